"""The same step, the same second, the same loss: where two runs can be laid beside each other.

Losses at a step are read off rows, never made up. Between two evaluations, where a second or a loss falls, the straight
line between them is taken; whoever prints such a figure says so.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from mpdist.compare.tree import Run
from mpdist.compare.windows import SECONDS, TOTAL, start

CLOCKS = {"train": SECONDS, "total": TOTAL}


class Point(NamedTuple):
    """An evaluation: at which step, how long after the warm-up by each clock, and its loss."""

    step: int
    train: float
    total: float
    loss: float

    def at(self, clock: str) -> float:
        return self.train if clock == "train" else self.total


def points(run: Run, warm_step: int) -> list[Point]:
    """The evaluations behind the warm-up, by step. Their total seconds are those at which the step was made."""
    begin = start(run, warm_step)
    made = {row["step"]: row for row in run.train}
    found = []
    for row in run.evals:
        if row["step"] < warm_step:
            continue
        then = made.get(row["step"], row)
        total = then.get(TOTAL, math.nan) - begin.get(TOTAL, math.nan)
        found.append(Point(row["step"], then[SECONDS] - begin[SECONDS], total, row["eval/loss"]))
    return found


def elapsed(run: Run, warm_step: int, clock: str) -> list[tuple[int, float]]:
    """(step, seconds since the end of the warm-up) at each logged step; NaN where a clock was not recorded."""
    key, begin = CLOCKS[clock], start(run, warm_step)
    since = begin.get(key, math.nan)
    return [(warm_step, 0.0)] + [
        (row["step"], row.get(key, math.nan) - since) for row in run.train if row["step"] > warm_step
    ]


def end(run: Run, warm_step: int, clock: str) -> float:
    """Seconds from the end of the warm-up to the last step that can be laid beside another run: its last evaluation, or
    its last logged step where it has none."""
    last = max((row["step"] for row in run.evals), default=run.steps)
    return max((seconds for step, seconds in elapsed(run, warm_step, clock) if step <= last), default=math.nan)


def step_at(run: Run, warm_step: int, clock: str, seconds: float) -> float:
    """The step that a run had reached, on the straight line between logged steps."""
    found = elapsed(run, warm_step, clock)
    i = bisect_right([at for _, at in found], seconds)
    if i >= len(found):
        return float(found[-1][0])
    (step, at), (following, then) = found[i - 1], found[i]
    return step + (following - step) * (seconds - at) / (then - at)


def common_steps(runs: Sequence[Run], kind: str) -> list[int]:
    """Steps at which all runs have a row of that kind."""
    rows = [{row["step"] for row in (run.evals if kind == "eval" else run.train)} for run in runs]
    return sorted(set.intersection(*rows)) if rows else []


def eval_loss(run: Run, step: int) -> float:
    return float(next(row["eval/loss"] for row in run.evals if row["step"] == step))


def train_loss(run: Run, first: int, last: int, steps: Sequence[int]) -> float:
    """Mean of the training loss over those of ``steps`` that lie in (first, last]: each step counts once."""
    wanted = {step for step in steps if first < step <= last}
    losses = [float(row["train/loss"]) for row in run.train if row["step"] in wanted]
    return sum(losses) / len(losses)


def loss_at(found: Sequence[Point], clock: str, seconds: float) -> float | None:
    """The evaluation loss after so many seconds; None before the first evaluation or behind the last."""
    times = [point.at(clock) for point in found]
    if not times or seconds < times[0] or seconds > times[-1] * (1 + 1e-12):
        return None
    i = min(bisect_right(times, seconds), len(times) - 1)
    if i == 0:
        return found[0].loss
    share = min((seconds - times[i - 1]) / (times[i] - times[i - 1]), 1.0)
    return found[i - 1].loss + share * (found[i].loss - found[i - 1].loss)


def to_loss(found: Sequence[Point], target: float) -> tuple[float, float, float] | None:
    """(step, train seconds, total seconds) at which an evaluation first is at the target or below; None if never."""
    for i, point in enumerate(found):
        if point.loss <= target:
            if i == 0:
                return float(point.step), point.train, point.total
            a = found[i - 1]
            share = (a.loss - target) / (a.loss - point.loss)
            mixed = [x + share * (y - x) for x, y in zip(a[:3], point[:3], strict=True)]
            return mixed[0], mixed[1], mixed[2]
    return None
