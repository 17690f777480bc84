"""`mpdist sweep`: the runs of a comparison, one after the other in one allocation, each as `mpdist launch` would start it.

Fair by construction: every arm runs under the same seeds, so from the same weights over the same windows of data that
were prepared once; what may not differ is refused before anything starts (mpdist.sweep_arms), and what should not, is
checked while it runs (mpdist.sweep_first). Arms are alternated (mpdist.sweep_file.alternated).

A sweep is its folder: OUT_DIR/NAME/sweep.json and a run directory for each arm and seed. Starting it again goes on where
it was: what is done or has diverged stays untouched, what was stopped resumes from its checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpdist import launch, run_files, sweep_arms, sweep_file, sweep_first, sweep_speed
from mpdist.config import Resolved, load
from mpdist.config.compat import differences
from mpdist.config.describe import show
from mpdist.errors import Diverged, MpdistError, Preempted, UsageError
from mpdist.lines import read_json
from mpdist.lock import NAME as LOCK
from mpdist.lock import Lock
from mpdist.record import RunDir, reachable, read_metrics
from mpdist.supervise import Heard, helper, listening, say
from mpdist.sweep_arms import Arms, Problems, Wanted
from mpdist.sweep_file import EqualTime, Sweep, run_name

_ENDED = ("done", "diverged")


@dataclass(frozen=True)
class Asked:
    """The command line. equal_time: seconds of training for each run. ranks: None as the configuration has it."""

    config: str
    overrides: tuple[str, ...] = ()
    vary: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    seeds: int = 1
    control: bool = False
    equal_time: float | None = None
    ranks: int | None = None


def run(asked: Asked, dry_run: bool = False, compare: Callable[[Path], object] | None = None) -> int:
    """Run what is left of a sweep; 0 when every run has come to its end, else the status of what stopped it.

    compare: called with the sweep's folder at the end; where it refuses, its status is the sweep's.
    Raises MpdistError for what can be known before anything starts, and for an arm that is another experiment than the
    others (UsageError). Main thread only.
    """
    making = Making(asked)
    arms = making.arms()
    sweep = making.sweep(arms)
    with reachable(making.folder):
        known = _standing(making.folder, sweep)
        if known is not None:
            sweep = _longer(known, sweep.seeds)
            making.check_budgets(sweep)
        text = describe(sweep, making.folder)
        ended = all(state(making.folder / r.path) in _ENDED for r in sweep.runs)
        lock = None if ended or dry_run else Lock.take(making.folder)
    if dry_run:
        print(text)
        return 0
    if lock is None:
        return _close(sweep, making.folder, compare)
    try:
        if sweep != known:
            sweep_file.write(making.folder, sweep)
        say(text)
        with listening() as heard:
            status = Running(making, sweep, heard).run()
    finally:
        lock.release()
    return status or _close(sweep, making.folder, compare)


class Making:
    """From the command line to the sweep and to the configuration of each of its runs."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.base = load(asked.config, asked.overrides)
        cfg = self.base.config
        self.folder = Path(os.path.abspath(Path(cfg.out_dir) / cfg.name))
        self.seeds = tuple(cfg.seed + i for i in range(asked.seeds))
        self.wanted = sweep_arms.ask(asked.config, asked.vary, asked.arms, asked.files, asked.control)
        self._check()

    def _check(self) -> None:
        """What no sweep can start from."""
        cfg, origin = self.base.config, self.base.origins
        found: list[tuple[str, str, str]] = []
        if cfg.launch.nodes > 1:
            do = "run each arm with `mpdist launch` on every node, and give the runs to `mpdist compare`"
            found.append(("launch.nodes", "a sweep runs on one node", do))
        if cfg.checkpoint.resume == "never":
            why = "a sweep that was stopped goes on, and so do its runs"
            found.append(("checkpoint.resume", why, "take it out"))
        if self.asked.equal_time is not None:
            if cfg.checkpoint.resume not in ("auto", "never"):
                why = "the steps of --equal-time count from the beginning of training"
                found.append(("checkpoint.resume", why, "start from weights: model.path=FOLDER"))
            if cfg.optim.horizon != "auto":
                found.append(
                    ("optim.horizon", "under --equal-time each schedule spans its own arm's steps", "take it out")
                )
        for key, why, do in found:
            what = f"{key} = {show(sweep_arms.look_up(self.base.values(), key))} ({origin.get(key, 'config')})"
            raise UsageError(what, why, do)

    def load(self, wish: Wanted, seed: int, steps: int | None = None, speed: str | None = None) -> Resolved:
        """The configuration of one run. steps: its budget under equal time. speed: the name of a run that measures."""
        cfg = self.base.config
        own = [*self.asked.overrides, *wish.settings, f"seed={seed}"]
        own.append(f"data.cache={cfg.data.cache or Path(cfg.out_dir) / '.data'}")
        if speed is not None:
            own += [*sweep_speed.settings(cfg), f"name={speed}", f"out_dir={self.folder / sweep_speed.FOLDER}"]
            own.append("checkpoint.resume=auto")
        else:
            own += [f"name={run_name(wish.name, seed)}", f"out_dir={self.folder}"]
            if cfg.track.wandb.mode != "disabled":
                own.append(f"track.wandb.group={cfg.track.wandb.group or cfg.name}")
            own += sweep_speed.budget(steps) if steps is not None else []
        return load(wish.path, own)

    def arms(self) -> Arms:
        """Raises UsageError, DoesNotFit or MachineError with every arm that cannot run, and why."""
        problems = Problems(len(self.wanted))
        found = sweep_arms.settle(self.wanted, lambda wish: self.load(wish, self.seeds[0]), problems)
        if found is not None:
            for wish, made in zip(found.wanted, found.resolved, strict=True):
                try:
                    launch.foresee(made, self.asked.ranks)
                except MpdistError as error:
                    problems.add(wish.name, error)
        problems.check()
        assert found is not None
        return found

    def sweep(self, arms: Arms) -> Sweep:
        cfg, timed = self.base.config, self.asked.equal_time
        made = arms.arms()
        return Sweep(
            cfg.name, arms.treatment, made, self.seeds,
            tuple(sweep_file.alternated(tuple(arm.name for arm in made), self.seeds)), str(self.base.path),
            self.base.number_digest(), self.asked.ranks, None if timed is None else EqualTime(timed), self.base.values(),
        )  # fmt: skip

    def check_budgets(self, sweep: Sweep) -> None:
        """Once the speeds are known: whether each arm's configuration still holds with its own steps."""
        problems = Problems(len(self.wanted))
        for wish in self.wanted:
            try:
                self.load(wish, self.seeds[0], steps_of(sweep, wish.name))
            except UsageError as error:
                problems.add(wish.name, error)
        problems.check()


def steps_of(sweep: Sweep, arm: str) -> int | None:
    """The budget that equal time gives an arm's runs; a control has its first arm's."""
    if sweep.equal_time is None:
        return None
    return sweep.equal_time.steps(sweep.arms[0].name if sweep.arm(arm).control else arm)


def _standing(folder: Path, sweep: Sweep) -> Sweep | None:
    """The sweep that is in the folder already, None if there is none. Raises UsageError if it is another one."""
    known = sweep_file.read(folder) if folder.is_dir() else None
    if known is None:
        foreign = sorted(p.name for p in folder.iterdir() if p.name != LOCK) if folder.is_dir() else []
        foreign = [name for name in foreign if not name.endswith(".aside")]
        if foreign or (folder.exists() and not folder.is_dir()):
            what = (
                f"{folder} exists and is no sweep's: it holds {', '.join(foreign[:3])}"
                if foreign
                else f"{folder} is a file"
            )
            raise UsageError(what, "a sweep has a folder of its own", _way_on(folder))
        return None
    found = _differences(known, sweep)
    if found:
        raise UsageError(
            f"{folder} holds another sweep; it differs in (there -> now):\n    " + "\n    ".join(found),
            "runs of two definitions in one folder would be compared as if they were of one",
            "choose another name for the new sweep: name=...",
        )
    return known


def _way_on(folder: Path) -> str:
    """Beside another folder's name: a sweep that has lost its sweep.json still has its runs."""
    do = "choose another name or out_dir"
    if not folder.is_dir() or not any(folder.glob("*-seed*/config.yaml")):
        return do
    return f"if these are a sweep's runs, put its {sweep_file.NAME} back; `mpdist compare {folder}` reads them without it. Or {do}"


def _longer(known: Sweep, seeds: tuple[int, ...]) -> Sweep:
    """The sweep with the seeds that are asked for now, which go on from those that it has: the runs that are there keep
    their places."""
    order = tuple(sweep_file.alternated(tuple(arm.name for arm in known.arms), seeds))
    return known if seeds == known.seeds else replace(known, seeds=seeds, order=order)


def _differences(known: Sweep, asked: Sweep) -> list[str]:
    """In what an earlier definition differs from what is asked for now, as far as it may matter."""
    found = differences(dict(known.values), dict(asked.values))
    lines = [str(d) for d in [*found.refused, *found.listed, *(d for d in found.free if d.key.startswith("budget."))]]
    then, now = ({arm.name: arm for arm in sweep.arms} for sweep in (known, asked))
    for name in [*then, *(n for n in now if n not in then)]:
        if name not in now or name not in then:
            lines.append(
                f"arm {name}: {'there' if name in then else 'absent'} -> {'there' if name in now else 'absent'}"
            )
        elif (settings := _settings(then[name])) != _settings(now[name]):
            lines.append(f"arm {name}: {settings} -> {_settings(now[name])}")
    if list(then) != list(now) and then.keys() == now.keys():
        lines.append(f"order of the arms: {', '.join(then)} -> {', '.join(now)}")
    fewer = len(asked.seeds) < len(known.seeds)  # more of them only add runs
    plain: list[tuple[str, Any, Any]] = [
        ("--seeds", len(known.seeds), len(asked.seeds) if fewer else len(known.seeds)),
        ("--ranks", known.ranks, asked.ranks),
        ("--equal-time", _seconds(known), _seconds(asked)),
    ]
    return lines + [f"{key}: {show(old)} -> {show(new)}" for key, old, new in plain if old != new]


def _seconds(sweep: Sweep) -> float | None:
    return None if sweep.equal_time is None else sweep.equal_time.seconds


def _settings(arm: sweep_file.Arm) -> str:
    return ", ".join(f"{key}={show(value)}" for key, value in arm.settings.items()) or "as the configuration"


def _apart(sweep: Sweep, arm: str) -> str:
    """What makes an arm: its settings where they are not the first arm's; of the first, all that are set."""
    first, own = sweep.arms[0], sweep.arm(arm)
    if own is first:
        keys = [key for key, value in own.settings.items() if value is not None]
    else:
        keys = [key for key, value in own.settings.items() if value != first.settings[key]]
    return _settings(replace(own, settings={key: own.settings[key] for key in keys}) if keys else first)


# -- running ----------------------------------------------------------------------------------------------------------


class Running:
    """A sweep under way. heard: the stop signals since it began."""

    def __init__(self, making: Making, sweep: Sweep, heard: list[Heard]) -> None:
        self.making, self.sweep, self.heard = making, sweep, heard
        self.folder = making.folder
        self._wanted = {wish.name: wish for wish in making.wanted}
        self._kinds = dict[str, sweep_first.Kind]()
        self._blocks: int | None = None

    def run(self) -> int:
        status = self._prepare() or self._measure()
        if status:
            return self._stopped(status)
        self._facts()
        for number, (arm, seed) in enumerate(self.sweep.order, 1):
            place = f"[{number}/{len(self.sweep.order)}] {run_name(arm, seed)}"
            if (ended := state(self.folder / run_name(arm, seed))) in _ENDED:
                say(f"{place}: {ended} before")
                continue
            if self.heard:
                return self._stopped(Preempted.status)
            say(f"\n{place}: {_apart(self.sweep, arm)}")
            status = self._train(arm, seed)
            if status == Diverged.status:
                say(f"{place}: it diverged, which is a result: recorded, and the sweep goes on")
            elif status:
                return self._stopped(status, run_name(arm, seed))
        return 0

    def _prepare(self) -> int:
        """The data (and a hub's model), once for all arms, in a process of its own: it brings libraries and threads."""
        if any((self.folder / run.path / "sessions").is_dir() for run in self.sweep.runs):
            return 0
        wish = self.making.wanted[0]
        resolved = self.making.load(wish, self.making.seeds[0])
        cache = resolved.config.data.cache
        words = [*self.making.asked.overrides, *wish.settings, f"data.cache={cache}", f"seed={resolved.config.seed}"]
        status = helper([sys.executable, "-m", "mpdist.cli", "prepare", wish.path, *words], self.heard)
        return Preempted.status if self.heard else status

    def _measure(self) -> int:
        """Under equal time, once: each arm's speed, and from it its steps. Writes them into sweep.json."""
        timed = self.sweep.equal_time
        if timed is None or timed.speeds:
            return 0
        where = self.folder / sweep_speed.FOLDER
        names = [arm.name for arm in self.sweep.arms if not arm.control]
        runs: dict[str, list[Path]] = {name: [] for name in names}
        for arm, name in sweep_speed.passes(names):
            if self.heard:
                return Preempted.status
            runs[arm].append(where / name)
            if state(where / name) not in _ENDED:
                say(f"\nspeed of {arm}: {sweep_speed.WINDOWS} windows")
                resolved = self.making.load(self._wanted[arm], self.making.seeds[0], speed=name)
                status = launch.run(resolved, ranks=self.sweep.ranks, heard=self.heard)
                if status not in (0, Diverged.status):
                    return status
            sweep_speed.clear(where / name)
        speeds = tuple(sweep_speed.speed(arm, paths, timed.seconds) for arm, paths in runs.items())
        say("")
        sweep_speed.text(speeds, timed.seconds, say)
        measured = replace(self.sweep, equal_time=replace(timed, speeds=speeds))
        self.making.check_budgets(measured)
        sweep_file.write(self.folder, measured)
        self.sweep = measured
        return 0

    def _facts(self) -> None:
        """What the first-step check needs to know of each arm."""
        for wish in self.making.wanted:
            cfg = self.making.load(wish, self.making.seeds[0], steps_of(self.sweep, wish.name)).config
            self._kinds[wish.name] = sweep_first.kind(cfg)
        self._blocks, dropout = sweep_first.layers(cfg)
        if dropout:
            self._blocks = None
            say(
                "the model has dropout, of which formats and cuts draw masks of their own: first losses are not compared"
            )

    def _train(self, arm: str, seed: int) -> int:
        """One run, as `mpdist launch` would do it. Raises UsageError where it is another experiment than the others."""
        path = self.folder / run_name(arm, seed)
        resolved = self.making.load(self._wanted[arm], seed, steps_of(self.sweep, arm))

        def stop() -> None:
            say(f"{run_name(arm, seed)} is another experiment than the sweep's other runs: it is stopped")
            self.heard.append((signal.SIGTERM, time.monotonic()))

        watch = sweep_first.Watch(path, lambda: self._odd(arm, seed), stop)
        try:
            status = launch.run(resolved, ranks=self.sweep.ranks, heard=self.heard, look=watch.look)
        except MpdistError:
            say(f"the sweep stops at {run_name(arm, seed)}")
            raise
        if watch.error is not None:  # its launcher knows of a signal alone
            RunDir(path).status(reason=f"stopped by mpdist sweep: {watch.error.what}")
        if error := watch.error or self._odd(arm, seed):
            raise error
        return status

    def _odd(self, arm: str, seed: int) -> UsageError | None:
        """What makes a run another experiment than one of its seed's others, the most exact of those that there are."""
        mine = sweep_first.seen(self.folder / run_name(arm, seed))
        if mine is None:
            return None
        others = [name for name, k in self.sweep.order if k == seed and name != arm]
        for other in sorted(others, key=lambda name: self._kinds[name].eps):
            theirs = sweep_first.seen(self.folder / run_name(other, seed))
            if theirs is not None:
                return sweep_first.compare(
                    *(run_name(arm, seed), mine, self._kinds[arm]),
                    *(run_name(other, seed), theirs, self._kinds[other]),
                    self._blocks,
                )
        return None

    def _stopped(self, status: int, name: str | None = None) -> int:
        """Say how to go on."""
        where = f" at {name}" if name else ""
        why = "" if status in (Preempted.status, 130, 143) else f", which ended with status {status}"
        left = sum(state(self.folder / run.path) not in _ENDED for run in self.sweep.runs)
        say(
            f"the sweep stops{where}{why}; {left} of {len(self.sweep.runs)} runs are left: the same command goes on, and "
            "repeats nothing that is finished"
        )
        return status if status > 0 else 128 - status


def state(run: Path) -> str:
    """Of a run directory: `new`, or its status.json's state."""
    return str((read_json(run / "status.json") or {}).get("state") or "new")


# -- telling ----------------------------------------------------------------------------------------------------------


def describe(sweep: Sweep, folder: Path) -> str:
    """The runs in order, with what differs between their arms."""
    count, arms = len(sweep.runs), len(sweep.arms)
    size = f"{count} run{'s' * (count != 1)}, {arms} arm{'s' * (arms != 1)} x {len(sweep.seeds)}"
    lines = [
        f"sweep {sweep.name}: {size} seed{'s' * (len(sweep.seeds) != 1)}, in {folder}",
        f"what differs: {', '.join(sweep.treatment) or 'nothing (a control alone)'}",
    ]
    if sweep.equal_time is not None:
        each = f"each trains for {sweep.equal_time.seconds:g} s"
        lines.append(
            f"{each}, in steps by its arm's speed" + ("" if sweep.equal_time.speeds else ", which is measured first")
        )
        sweep_speed.text(sweep.equal_time.speeds, sweep.equal_time.seconds, lines.append)
    if not sweep.values["data"]["eval"]:
        lines.append("data.eval is empty: there will be training losses to compare, and no evaluation")
    heads = ["", "run", "state", *sweep.treatment]
    rows = [
        [
            str(i),
            run.path,
            state(folder / run.path),
            *(show(sweep.arm(run.arm).settings[key]) for key in sweep.treatment),
        ]
        for i, run in enumerate(sweep.runs, 1)
    ]
    return "\n".join([*lines, "", *_columns([heads, *rows])])


def _close(sweep: Sweep, folder: Path, compare: Callable[[Path], object] | None) -> int:
    """All runs have ended: how, and the comparison or the command for it."""
    rows = [["run", "state", "steps", "train s", "eval loss"]]
    for run in sweep.runs:
        status = run_files.load(folder / run.path / "status.json", run_files.STATUS) or {}
        metrics = read_metrics(folder / run.path, run_files.check_figures)
        last: dict[str, Any] = next((row for row in reversed(metrics) if row["kind"] == "eval"), {})
        seconds = (status.get("time") or {}).get("train")
        rows.append([
            run.path, state(folder / run.path), str(status.get("step")), "" if seconds is None else f"{seconds:.1f}",
            f"{last['eval/loss']:.4f}" if last else "",
        ])  # fmt: skip
    say("\n" + "\n".join(_columns(rows)))
    for text in _missed(sweep, folder):
        say(text)
    say(f"\nto compare them: mpdist compare {folder}")
    if compare is not None:
        say("")
        try:
            compare(folder)
        except MpdistError as error:
            print(error, file=sys.stderr, flush=True)
            do = f"the sweep's runs have ended, and their comparison was refused; to ask again: mpdist compare {folder}"
            print(do, file=sys.stderr, flush=True)
            return error.status
    return 0


def _missed(sweep: Sweep, folder: Path) -> list[str]:
    """Under equal time: the finished runs of which the steps took another."""
    if sweep.equal_time is None:
        return []
    ended = [(r.path, read_json(folder / r.path / "status.json") or {}) for r in sweep.runs]
    took = [(path, (status.get("time") or {}).get("train")) for path, status in ended if status.get("state") == "done"]
    found = [
        sweep_speed.missed(path, seconds, sweep.equal_time.seconds) for path, seconds in took if seconds is not None
    ]
    return [text for text in found if text is not None]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, wide, strict=True)).rstrip() for row in rows]
