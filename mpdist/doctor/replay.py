"""`mpdist doctor --replay RUN STEP`: a past step of a run computed again, and its record held against that, bit for bit.

The step is reached from the nearest earlier checkpoint, or from the run's beginning, by the run's own loop; nothing of the
run's directory is written. The same numbers come out only in the same world, so what differs is told before anything starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdist import run_files
from mpdist.env import environment
from mpdist.errors import MachineError, UsageError
from mpdist.findings import Finding
from mpdist.lines import read_lines
from mpdist.record import RunDir, read_metrics
from mpdist.shelf import published, step_of

if TYPE_CHECKING:
    from mpdist.config import Resolved

_FROM = "MPDIST_REPLAY_FROM"  # the checkpoint's name, empty for the run's beginning: from the command to its ranks
FAR = 100  # steps between a checkpoint and the step asked for, at most: each is trained again
_COMPUTES = ("mpdist", "torch", "transformers", "numpy", "deepspeed", "accelerate")
COMPARED = (
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "scale/value",
    "scale/block_min",
    "scale/block_max",
    "train/label_tokens",
    "train/aux_loss",
    "attempt",
)


@dataclass(frozen=True)
class Wanted:
    """What is computed again. begin: the checkpoint's step, 0 for the run's beginning. rows: recorded ones of the steps
    (begin, step] by step. env: of the session that made the step. resolved: that session's configuration. passed: nearer
    checkpoints that are damaged, each with its fault."""

    run: Path
    step: int
    begin: int
    checkpoint: Path | None
    rows: dict[int, dict[str, Any]]
    env: dict[str, Any]
    resolved: Resolved
    passed: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return int(self.env["ranks"])


def look(run: str | Path, step: int) -> Wanted:
    """What there is to compute again. Raises UsageError where it cannot be, or cannot be exact."""
    from mpdist.config import load

    folder = RunDir(run)
    what = f"mpdist doctor --replay {run} {step}"
    if not folder.config_path.is_file() or not folder.metrics_path.is_file():
        raise UsageError(what, "it is no run directory: it has no config.yaml and metrics.jsonl", "give a run's folder")
    rows = {row["step"]: row for row in read_metrics(folder.path, run_files.check_row) if row["kind"] == "train"}
    if step not in rows:
        near = sorted(rows, key=lambda there: abs(there - step))[:2]
        there = f"the nearest that are: {', '.join(map(str, sorted(near)))}" if near else "no step is"
        raise UsageError(what, f"step {step} is not in metrics.jsonl, so there is nothing to compare with", there)
    begin, checkpoint, passed = _nearest(folder, step)
    if step - begin > FAR:
        nearest = checkpoint.name if checkpoint is not None else "the run's beginning"
        nearest += f" ({'; '.join(passed)})" if passed else ""
        raise UsageError(what, f"the nearest earlier checkpoint is {nearest}, {step - begin} steps before it; at most {FAR} are"
                               " trained again", "ask for a step that is nearer to a checkpoint, and keep more of them with"
                               " checkpoint.every and checkpoint.keep")  # fmt: skip
    made = sessions(folder, rows[step]["session"], begin)
    envs = {number: run_files.load(folder.session_path(number) / "env.json", run_files.ENV) or {} for number in made}
    resolved = load(_config(folder, made[-1]))
    _exact(what, resolved, envs)
    between = {at: row for at, row in rows.items() if begin < at <= step}
    return Wanted(folder.path, step, begin, checkpoint, between, envs[made[-1]], resolved, passed)


def _nearest(folder: RunDir, step: int) -> tuple[int, Path | None, tuple[str, ...]]:
    """The nearest earlier checkpoint that is whole, with its step, or the run's beginning, and what is wrong with those passed
    over. A rank is told by its parent, which has read the files."""
    from mpdist.restore import fault_in

    earlier = sorted(((step_of(path.name) or 0), path) for path in published(folder.checkpoints))[::-1]
    told, passed = os.environ.get(_FROM), list[str]()
    for at, path in earlier:
        if at >= step:
            continue
        if told is not None:
            if path.name == told:
                return at, path, ()
            continue
        # One that is too far away is refused whatever it holds.
        fault = fault_in(path) if step - at <= FAR else None
        if fault is None:
            return at, path, tuple(passed)
        passed.append(f"{path.name} is passed over: {fault}")
    return 0, None, tuple(passed)


def sessions(folder: RunDir, last: int, begin: int) -> list[int]:
    """The sessions that made the steps behind `begin`, up to session `last`, in order: each goes on from what it loaded."""
    events = read_lines(folder.events_path, run_files.check_event)
    loaded = {e["session"]: e["step"] for e in events if e["event"] == "load"}
    made = [last]
    while loaded.get(made[0], 0) > begin and made[0] > 1:
        made.insert(0, made[0] - 1)
    return made


def _config(folder: RunDir, session: int) -> Path:
    """The configuration of a session: one that was replaced lies with the last session that had it."""
    kept = (folder.session_path(n) / "config.yaml" for n in range(session, folder.last_session() + 1))
    return next((path for path in kept if path.is_file()), folder.config_path)


def _exact(what: str, resolved: Resolved, envs: dict[int, dict[str, Any]]) -> None:
    """Raises UsageError naming what keeps these steps from being computed again bit for bit, here and now."""
    if not resolved.config.deterministic:
        raise UsageError(what, "the run had deterministic = false, so the same step may give other bits each time",
                         "runs with deterministic: true can be replayed")  # fmt: skip
    now = environment()
    found = []
    for number, env in envs.items():
        then = {"ranks": env.get("ranks"), "nodes": env.get("nodes"), "device": env.get("device")}
        if then["ranks"] is None:
            found.append(f"session {number} has left no env.json that says on how many ranks it ran")
        first = next(iter(envs.values()))
        found += [f"{key} was {first.get(key)} and became {value} in session {number}, between the checkpoint and the step"
                  for key, value in then.items() if value != first.get(key)]  # fmt: skip
        found += _differing(env, now, number)
    if found:
        raise UsageError(what, f"it would not be exact: {'; '.join(dict.fromkeys(found))}",
                         "replay on the machine and with the versions of the run, a step whose checkpoint is as near as that")  # fmt: skip
    if next(iter(envs.values()))["nodes"] != 1:
        raise UsageError(what, f"the run had {next(iter(envs.values()))['nodes']} nodes, and this command starts one node's ranks",
                         "compare runs of one node")  # fmt: skip


def _differing(env: dict[str, Any], now: dict[str, Any], session: int) -> Iterable[str]:
    then, versions = env.get("versions", {}), now["versions"]
    for name in _COMPUTES:
        if then.get(name) != versions.get(name):
            yield f"session {session} had {name} {then.get(name, 'not')} and here it is {versions.get(name, 'not installed')}"
    if env.get("cpu") != now["cpu"]:
        yield f"session {session} ran on {env.get('cpu')} and this is {now['cpu']}"


def passed_over(wanted: Wanted) -> list[Finding]:
    """What the command tells beside the comparison, which a rank makes."""
    do = "put its files back from a copy, if there is one"
    return [Finding("checkpoint", text, "doubtful", "it was torn by a crash or altered", do) for text in wanted.passed]


def compare(wanted: Wanted, again: list[dict[str, Any]]) -> list[Finding]:
    """The recorded rows against those computed again: what is equal, and the first step that is not."""
    begun = wanted.checkpoint.name if wanted.checkpoint is not None else "the run's beginning"
    steps = wanted.step - wanted.begin
    found = [
        Finding(
            "replay", f"{steps} step{'s' * (steps > 1)} from {begun} on {wanted.ranks} rank{'s' * (wanted.ranks > 1)}"
        ),
    ]
    rows = {row["step"]: row for row in again}
    wrong = []
    for step, record in sorted(wanted.rows.items()):
        row = rows.get(step, {})
        pairs = [(key, record[key], row.get(key)) for key in COMPARED if key in record]
        differing = [f"{key} {then!r} in the record, {now!r} now" for key, then, now in pairs if then != now]
        if differing:
            wrong.append((step, ", ".join(differing)))
    if wrong:
        step, text = wrong[0]
        more = f"; {len(wrong)} of {len(wanted.rows)} logged steps differ, the first is this" if len(wrong) > 1 else ""
        do = ("replay once more: numbers that come again mean that the record was made wrong (a device, memory or a link of"
              " that time), numbers that change mean that this machine computes wrong now")  # fmt: skip
        found.append(Finding(f"step {step}", f"{text}{more}", "failed",
                             "the same weights, rows and random numbers gave other bits: silent corruption, or a race", do,
                             status=MachineError.status))  # fmt: skip
        return found
    last = wanted.rows[wanted.step]
    values = f"train/loss {last['train/loss']!r}, train/grad_norm {last['train/grad_norm']!r}"
    others = f", and {len(wanted.rows) - 1} logged steps before it" if len(wanted.rows) > 1 else ""
    return [*found, Finding(f"step {wanted.step}", f"{values}: equal to the record bit for bit{others}")]


def environment_of(wanted: Wanted) -> dict[str, str]:
    """What the run's ranks had that decides bits; and nothing is sent anywhere."""
    threads = {"OMP_NUM_THREADS": str(wanted.env["threads"])} if wanted.env.get("threads") else {}
    begin = {_FROM: wanted.checkpoint.name if wanted.checkpoint is not None else ""}
    return {"WANDB_MODE": "disabled", **threads, **begin}
