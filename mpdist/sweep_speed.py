"""Equal time: how fast each arm is, measured before the runs, and the steps that follow.

Arms that train for the same time make different numbers of steps. A schedule has to span the steps that its own arm
makes, or the faster arm would be compared at another phase of it. So the steps have to be known beforehand: each arm
runs a few windows, twice, the second time in reverse order, and gets the steps that its median window fits into the
time. That is an estimate; what each run really took is on its own clock (`time/train_s`).
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from mpdist.config import Config
from mpdist.errors import UsageError
from mpdist.record import read_metrics
from mpdist.sweep_file import Speed

FOLDER = ".speed"
PASSES = 2
QUIET = 0.2  # of the median: the distance of the quartiles from which on the steps are said to be a guess
CLOSE = 0.1  # of the time: from which on it is said that a run took another
WINDOWS = 12  # a pass and arm, the first two of which are warm-up (mpdist.clock.Rate)


def settings(config: Config) -> list[str]:
    """What makes a run of a configuration a short one that measures its windows and nothing else."""
    found = [
        f"budget={{steps: {WINDOWS}}}",
        "optim.horizon=auto",
        "optim.schedule=constant",
        "optim.warmup=0",
        "checkpoint.every=0",
        "track.every=1",
        "track.wandb={mode: disabled}",
        "drill=null",
    ]
    return found + (["eval.every=0", "eval.rows=1"] if config.data.eval else [])


def passes(arms: Sequence[str]) -> list[tuple[str, str]]:
    """(arm, name of the run that measures it), in order."""
    return [(arm, f"{arm}-{i + 1}") for i in range(PASSES) for arm in (reversed(arms) if i % 2 else arms)]


def clear(run: Path) -> None:
    """Of a run that has measured, the record stays."""
    for name in ("checkpoints", "hf"):
        shutil.rmtree(run / name, ignore_errors=True)


def speed(arm: str, runs: Sequence[Path], seconds: float) -> Speed:
    """What the runs of an arm say. seconds: of training that it is to get. Raises UsageError without any full window."""
    found = [row["speed/step_s"] for run in runs for row in read_metrics(run) if row.get("speed/step_s")]
    if len(found) < 2:
        raise UsageError(
            f"arm {arm} has made {len(found)} measurable windows",
            "how many steps fit into the time is measured on its first windows",
            f"see {runs[0] / 'events.jsonl'}",
        )
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return Speed(arm, middle, (low, high), len(found), max(1, round(seconds / middle)))


def budget(steps: int) -> list[str]:
    """The settings of a run that gets so many steps, its schedule spanning them."""
    return [f"budget={{steps: {steps}}}", "optim.horizon=auto"]


def text(speeds: Sequence[Speed], seconds: float, show: Callable[[str], None]) -> None:
    """Tell what was measured, one line an arm."""
    for s in speeds:
        low, high = s.spread_s
        show(
            f"{s.arm}: {1000 * s.step_s:.4g} ms a step (quartiles {1000 * low:.4g} to {1000 * high:.4g}, {s.windows} "
            f"windows), so {s.steps} steps in {seconds:g} s"
        )
        if high - low > QUIET * s.step_s:
            show(f"warning: on a quiet machine the quartiles of {s.arm} would be closer: its steps are a guess")


def missed(run: str, took: float, seconds: float) -> str | None:
    """What to say of a run that took another time than it was to take; None where it was close."""
    off = took / seconds - 1
    return (
        None if abs(off) <= CLOSE else f"warning: {run} trained for {took:.1f} s, {off:+.0%} of the {seconds:g} s meant"
    )
