"""The run directory: everything a run leaves behind, and how it is written so that a kill costs nothing else.

States (`status.json`, `ledger.json`, `plan.json`, `config.yaml`) are replaced whole. Histories (`metrics.jsonl`,
`events.jsonl`) only grow; a line that a kill tore is cut off when the next session opens the file, and said in a
`warning` event. Rank 0 writes metrics, status and ledger; any rank may append events, a line being one write.

`open_run` decides what an existing directory means for a run that wants to start: the same config goes on from the
last checkpoint, whatever the end was (killed, preempted, failed, diverged); another config is refused.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdist import retries, run_files
from mpdist.errors import ConfigError, MachineError, UsageError
from mpdist.lines import Lines, dump, number, read_json, read_lines, repair, write_atomic
from mpdist.lock import NAME as LOCK
from mpdist.lock import Lock

if TYPE_CHECKING:
    from mpdist.config import Resolved
    from mpdist.config.compat import Difference

METRICS: dict[str, str] = {
    "train/loss": "mean over the window's label tokens, all ranks",
    "train/label_tokens": "tokens that the loss counted, cumulative, all ranks",
    "train/tokens": "real tokens processed, no padding, cumulative, all ranks",
    "train/slots": "positions processed, padding included, cumulative, all ranks",
    "train/lr": "learning rate that this step used",
    "train/grad_norm": "gradient norm, unscaled, before the clip",
    "train/aux_loss": "auxiliary loss of a mixture of experts, the window's mean",
    "scale/value": "loss scale that this step used",
    "scale/skipped": "attempts skipped so far",
    "scale/block_min": "log2 of the smallest scale of a block that this step used (precision.scale.per_block)",
    "scale/block_max": "log2 of the largest one",
    "eval/loss": "mean over the evaluation's label tokens, all ranks",
    "eval/perplexity": "exp(eval/loss)",
    "eval/label_tokens": "label tokens of the evaluation",
    "time/train_s": "seconds inside windows, cumulative, all else excluded",
    "time/total_s": "seconds since the first start, cumulative, gaps between sessions excluded",
    "time/lost_s": "seconds of work that a resume superseded, cumulative",
    "speed/step_s": "train seconds per step since the last row",
    "speed/tokens_per_s": "real tokens per train second since the last row, all ranks",
    "speed/mfu": "share of the peak that the session's env.json names",
    "speed/device_busy": "how busy rank 0's device was: a GPU as its driver samples it, a CPU's threads since the last row",
    "mem/peak_allocated_bytes": "peak bytes in tensors on this device (host: peak resident)",
    "mem/peak_reserved_bytes": "peak bytes held by the allocator on this device (host: peak resident)",
    "wire/grad_bytes": "payload this rank handed to gradient collectives in this step",
    "wire/grad_bytes_between_nodes": "the part of it that went to groups of ranks on several nodes",
}
"""Every metric's name and meaning. Names that begin with `precision/` are telemetry and open-ended."""

AXES = ("train/label_tokens", "time/train_s")
"""What every row must hold beside its step, so that any figure can be drawn over any axis."""

EVENTS = frozenset(
    ("start", "skip", "scale", "save", "load", "resume", "stop", "drill", "warning", "finding", "end", "refused")
)
STATES = frozenset(("running", "done", "preempted", "diverged", "failed"))
STOP = "STOP"  # a file of this name in the run directory ends the session as a signal would
_ROW_KEYS = ("kind", "step", "attempt", "session")
_RESERVE = ".reserve"  # room that a run holds, to say on a full disk how it ended
_RESERVE_BYTES = 65536


class RunDir:
    """One run's directory. Opening one creates nothing; the first write creates what it needs.

    rank: this process's. Only rank 0 repairs torn files.
    """

    def __init__(self, path: str | Path, rank: int = 0, session: int = 0) -> None:
        self.path = Path(os.path.abspath(path))
        self.rank = rank
        self.session = session
        self.began = time.time()  # unix time of the session's start, as far as anyone knows
        self.changes: list[str] = []  # what open_run found to differ and to be allowed, for the resume event
        self.last_alive: float | None = None  # unix time of the last sign of life before this session
        self.previous: dict[str, Any] = {}  # status.json as the session before left it; empty for the first
        self.lock: Lock | None = None
        # Asked where nothing more can be written: whether to try again, since what filled the disk is gone by now.
        self.made_room: Callable[[], bool] = lambda: False
        self._lines: dict[str, Lines] = {}

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    def session_path(self, session: int | None = None) -> Path:
        """Folder of a session (default: the current one)."""
        return self.path / "sessions" / f"{self.session if session is None else session:04d}"

    def freeze(self, config_yaml: str, plan: Mapping[str, Any]) -> None:
        """Write what was asked and what follows from it. A config that this replaces is kept in its last session."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.config_path.exists():
            old, last = self.config_path.read_text(encoding="utf-8"), self.last_session()
            kept = self.session_path(last) / "config.yaml"
            if old != config_yaml and last and not kept.exists():  # else `old` is a start's that made no session
                write_atomic(kept, old)
        write_atomic(self.config_path, config_yaml)
        write_atomic(self.plan_path, dump(plan, indent=1) + "\n")

    # -- sessions ------------------------------------------------------------------------------------------------

    def last_session(self) -> int:
        """Number of the newest session, 0 if there is none."""
        folder = self.path / "sessions"
        numbers = [int(p.name) for p in folder.iterdir() if p.name.isdecimal()] if folder.is_dir() else []
        return max(numbers, default=0)

    def start_session(self, env: Mapping[str, Any] | None = None) -> int:
        """Begin the next session: its folder, its logs folder, its env.json; torn histories are repaired."""
        if self.last_alive is None:
            self._look_back()
        with reachable(self.path):
            self._make_session()
        with contextlib.suppress(OSError):  # a disk as full as that has nothing to reserve
            (self.path / _RESERVE).write_bytes(os.urandom(_RESERVE_BYTES))  # zeros would take no room on some
        kept = {"began": self.began, "changes": self.changes, "last_alive": self.last_alive, "previous": self.previous}
        self.write_env({**(env or {}), **kept})
        for path in (self.events_path, self.metrics_path):
            self._open(path)
        return self.session

    def _make_session(self) -> None:
        while True:
            self.session = self.last_session() + 1
            try:
                self.session_path().mkdir(parents=True)
                break
            except FileExistsError:  # another launcher was quicker; the lock sorts out who may run
                continue
        (self.session_path() / "logs").mkdir()

    def join(self, session: int) -> None:
        """Take part in a session that the launcher started: what it found out on opening is taken over."""
        self.session = session
        env = read_json(self.session_path() / "env.json") or {}
        self.began, self.changes = env.get("began", self.began), env.get("changes", [])
        self.last_alive, self.previous = env.get("last_alive"), env.get("previous", {})

    def write_env(self, env: Mapping[str, Any]) -> None:
        """Add to the session's env.json (the launcher knows the host, the worker its devices)."""
        path = self.session_path() / "env.json"
        old = read_json(path) or {"session": self.session, "time": time.time()}
        write_atomic(path, dump({**old, **env}, indent=1) + "\n")

    def _look_back(self) -> None:
        """Note how the run was left, before this session writes anything."""
        self.last_alive, self.previous = self.alive_at(), self.read_status() or {}

    def alive_at(self) -> float | None:
        """Unix time of the run's last sign of life, from its files; None for a run that never began."""
        files = [self.path / "status.json", self.metrics_path, self.events_path]
        return max((p.stat().st_mtime for p in files if p.exists()), default=None)

    # -- states --------------------------------------------------------------------------------------------------

    def status(self, **fields: Any) -> dict[str, Any]:
        """Replace status.json: `state`, `step`, `attempt`, `exit`, `reason`, `rank` and whatever else is given.

        What is not given stays, so that the launcher can record an end without knowing the time table. A state of
        `running` clears the end of the session before. `time` (the clock's table) is kept with its moment, `time_at`.
        Returns what was written. A session that a later one has superseded writes nothing.
        """
        if self.session and self.session < self.last_session():  # it lives on, on a node that its scheduler has lost
            return {}
        state = fields.get("state")
        if state is not None and state not in STATES:
            raise ValueError(f"no state is called {state!r}; there are {', '.join(sorted(STATES))}")
        base: dict[str, Any] = {"state": "running", "step": 0, "attempt": 0, "exit": None, "reason": None, "rank": None}
        base |= self.read_status() or {}
        if state == "running":
            base |= {"exit": None, "reason": None, "rank": None}
        base |= fields
        if "time" in fields:  # an end recorded by the launcher is later than the last time table
            base["time_at"] = time.time()
        base |= {"session": self.session or base.get("session", 0), "updated": time.time()}
        self.path.mkdir(parents=True, exist_ok=True)
        self._again(lambda: write_atomic(self.path / "status.json", dump(base, indent=1) + "\n"))
        return base

    def has_progress(self) -> bool:
        """Whether any session got as far as an attempt or a checkpoint."""
        status = self.read_status() or {}
        if status.get("attempt") or status.get("step") or status.get("state") == "done":
            return True
        rows = self.metrics_path.exists() and self.metrics_path.stat().st_size > 0
        return rows or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    def read_status(self) -> dict[str, Any] | None:
        """status.json, or None if there is none or a crash of the machine left it unreadable."""
        return read_json(self.path / "status.json")

    def ledger(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace ledger.json by these rows."""
        self._again(lambda: write_atomic(self.path / "ledger.json", dump({"rows": list(rows)}, indent=1) + "\n"))

    # -- histories -----------------------------------------------------------------------------------------------

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Append one row. It needs kind (train or eval), step, attempt and the axes; the session is filled in.

        Raises ValueError for a name that is not in METRICS: that is a bug of the caller.
        """
        full = {"kind": None, "step": None, "attempt": None, "session": self.session, **row}
        missing = [key for key in _ROW_KEYS if full.get(key) is None] + [key for key in AXES if key not in full]
        if missing or full["kind"] not in ("train", "eval"):
            raise ValueError(f"a metrics row of kind {full['kind']!r} lacks {', '.join(missing) or 'a known kind'}")
        unknown = [k for k in full if k not in METRICS and k not in _ROW_KEYS and not k.startswith("precision/")]
        if unknown:
            raise ValueError(f"not in METRICS: {', '.join(unknown)}")
        self._again(lambda: self._open(self.metrics_path).append(full))

    def event(
        self, name: str, step: int = 0, attempt: int = 0, rank: int | None = None, reason: str = "", **extra: Any
    ) -> None:
        """Append one event. rank: the one it is about (default: this process's)."""
        if name not in EVENTS:
            raise ValueError(f"no event is called {name!r}; there are {', '.join(sorted(EVENTS))}")
        line = {"event": name, "step": step, "attempt": attempt, "rank": self.rank if rank is None else rank}
        line |= {"reason": reason, "time": time.time(), "session": self.session, **extra}
        self._again(lambda: self._open(self.events_path).append(line))

    def _again(self, write: Callable[[], None]) -> None:
        try:
            write()
        except MachineError:
            if not self.made_room():
                raise
            write()

    def _open(self, path: Path) -> Lines:
        if path.name not in self._lines:
            torn = repair(path) if self.rank == 0 else None
            self._lines[path.name] = Lines(path)
            if torn:
                self._warn_torn(path, torn)
        return self._lines[path.name]

    def _warn_torn(self, path: Path, torn: bytes) -> None:
        status = self.read_status() or {}
        text = f"{path.name} ended in a torn line of {len(torn)} bytes; it was cut off"
        self.event(
            "warning",
            int(status.get("step") or 0),
            int(status.get("attempt") or 0),
            reason=text,
            file=path.name,
            lost_bytes=len(torn),
            lost=torn[:200].decode("utf-8", "replace"),
        )

    def close(self) -> None:
        """Sync and close the histories. Writing again opens them again."""
        for lines in self._lines.values():
            lines.close()
        self._lines.clear()

    # -- the live-run lock -------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Make this process the one live run of the directory, until `release` or its end; see mpdist.lock.

        Raises UsageError, naming host and pid, if another run is live here.
        """
        if self.lock is None:
            self.lock = Lock.take(self.path)

    def release(self) -> None:
        """Give the claim back. Without one, nothing happens."""
        if self.lock is not None:
            self.last_words()
            self.lock.release()
            self.lock = None

    @property
    def taken_over(self) -> bool:
        """Whether a later start of the same Slurm job has claimed the directory meanwhile."""
        return self.lock is not None and self.lock.lost

    def last_words(self) -> None:
        """Give the reserve up, for the record of a failure."""
        with contextlib.suppress(OSError):
            (self.path / _RESERVE).unlink()


def open_run(resolved: Resolved, plan: Mapping[str, Any]) -> tuple[RunDir, str]:
    """The directory of a run that wants to start, claimed for this process, and what starting means there:

    new: nothing was trained here; config and plan are frozen. resume: go on from its newest good checkpoint, whatever
    the end was; if there is none yet, from the beginning. finished: nothing is left to do; nothing is touched, not
    even claimed. Safe to repeat inside one launch (launcher, then worker).

    Raises UsageError if the directory is no run's, is another configuration's (with the list of differences), must
    not be resumed (`checkpoint.resume: never`), has failed too often at one step, or is in use; MachineError if it
    cannot be read or written.
    """
    run, mode = standing(resolved, plan)
    if mode == "finished":
        return run, mode
    with reachable(run.path):
        run._look_back()
        run.claim()
        if run.previous.get("state") == "done":  # else a kill during start-up would leave the new budget as spent
            run.status(state="running")
        run.freeze(resolved.to_yaml(), plan)
    return run, mode


def standing(resolved: Resolved, world: Mapping[str, Any]) -> tuple[RunDir, str]:
    """What `open_run` finds or why it refuses, without claiming or writing anything. world: `ranks` and `nodes`."""
    config = resolved.config
    run = RunDir(Path(config.out_dir) / config.name)
    with reachable(run.path):
        if not run.config_path.exists():
            _refuse_foreign(run)
            return run, "new"
        mode = _existing(run, resolved)
        if mode != "finished":
            retries.check(run, resolved, world)
        return run, mode


@contextlib.contextmanager
def reachable(folder: Path) -> Iterator[None]:
    """What keeps a run, or a sweep, from using its folder: a MachineError."""
    try:
        yield
    except OSError as error:  # another user's folder, a file in the path's middle
        what = f"{error.filename or folder}: {error.strerror}"
        raise MachineError(what, f"all that it leaves is kept in {folder}", "choose another out_dir") from error


def _existing(run: RunDir, resolved: Resolved) -> str:
    from mpdist.config import load
    from mpdist.config.compat import differences

    progress = run.has_progress()
    if not progress:
        return "new"
    if resolved.config.checkpoint.resume == "never":
        raise UsageError(
            f"checkpoint.resume = never, but {run.path} holds a run that has begun",
            "a new run there would overwrite it",
            "choose another name, or resume it with checkpoint.resume=auto",
        )
    try:
        old = load(run.config_path).values()
    except ConfigError as error:
        why = f"its configuration is not one that this version of mpdist reads: {error.problems[0].what}"
        raise UsageError(f"{run.path} cannot be resumed", why, "choose another name for this run") from error
    finished = (run.read_status() or {}).get("state") == "done"
    found = differences(old, resolved.values())
    refused = found.refused + [d for d in found.free if d.key == "checkpoint.resume" and _is_path(d.old, d.new)]
    if refused:
        raise _another(run, refused, finished)
    more = [d for d in found.free if d.key.startswith("budget.")]
    if finished and not more:
        return "finished"
    run.changes = [str(d) for d in found.listed + more]
    return "resume"


def _another(run: RunDir, refused: Sequence[Difference], finished: bool) -> UsageError:
    why = f"a run that changed what it trains {'half-way ' * (not finished)}would be neither the one nor the other"
    do = "choose another name for the new run; checkpoint.resume=PATH starts it from a checkpoint of this one"
    if all(d.key.startswith("budget.") for d in refused):
        why = (
            "a run's budget may only grow, in its own unit, and only under a schedule that does not hang on it: "
            "a constant one, or one with optim.horizon given from the start"
        )
        do += ", whose steps its budget counts too"
    return UsageError(
        f"{run.path} holds a run of another configuration; it differs in (there -> now):\n    "
        + "\n    ".join(map(str, refused)),
        why,
        do,
    )


def moved(changes: Sequence[str], state: Mapping[str, Any], ranks: int, nodes: int) -> list[str]:
    """The changes, launch.ranks (a node's) and launch.nodes being those of the world that saved the state and of this one:
    options and launchers replace what the configurations say. A checkpoint that does not know its nodes had as many."""
    then = int(state.get("nodes", nodes))
    worlds = (("launch.ranks", int(state["ranks"]) // then or 1, ranks // nodes or 1), ("launch.nodes", then, nodes))
    kept = [change for change in changes if not change.startswith(("launch.ranks:", "launch.nodes:"))]
    return [f"{key}: {old} -> {new}" for key, old, new in worlds if old != new] + kept


def _is_path(*values: Any) -> bool:
    return any(value not in ("auto", "never") for value in values)


def _refuse_foreign(run: RunDir) -> None:
    """A directory without config.yaml may hold what a launch leaves that failed early, or a submission, and no more."""
    if run.path.is_dir():
        ours = {LOCK, _RESERVE, "sessions", "plan.json", "status.json", "slurm", STOP}
        foreign = sorted(p.name for p in run.path.iterdir() if p.name not in ours and not p.name.endswith(".aside"))
        if not foreign:
            return
        what = f"{run.path} exists and is no run directory: it holds {', '.join(foreign[:3])}"
    elif run.path.exists():
        what = f"{run.path} exists and is no directory"
    else:
        return
    raise UsageError(what, "a run directory belongs to one run alone", "choose another name or out_dir")


def read_metrics(path: str | Path, check: Callable[[dict[str, Any], str], None] | None = None) -> list[dict[str, Any]]:
    """The rows that count, in order of step: the last of each (kind, step), superseded work left out.

    Work is superseded by any row of a later session at the same or an earlier step: that session began again before
    it. "nan", "inf" and "-inf" come back as floats. path: metrics.jsonl or a run directory. check: of
    each row, beside what puts rows in order (see `read_lines`). Raises UsageError with file and line.
    """
    path = Path(path)

    def checked(row: dict[str, Any], where: str) -> None:
        run_files.check(row, run_files.ROW, where)
        if check is not None:
            check(row, where)

    kept: dict[tuple[str, int], dict[str, Any]] = {}
    session: int | None = None
    for row in read_lines(path / "metrics.jsonl" if path.is_dir() else path, checked):
        if session is not None and row["session"] != session:
            kept = {key: old for key, old in kept.items() if _order(old) < _order(row)}
        session = row["session"]
        kept[row["kind"], row["step"]] = {key: number(value) if "/" in key else value for key, value in row.items()}
    return sorted(kept.values(), key=_order)


def _order(row: Mapping[str, Any]) -> tuple[int, bool]:
    """Training comes before the evaluation of the same step."""
    return row["step"], row["kind"] != "train"
