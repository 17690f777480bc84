"""The curves that a comparison's page draws, taken from the rows of its runs: means over seeds, and what lies around them.

A run of thousands of steps has more points than a page has pixels, and the loss of one batch says little: consecutive
logged steps are averaged until ``POINTS`` are left. Steps count where all of an arm's runs have logged them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpdist.compare import match
from mpdist.compare.intervals import gap
from mpdist.compare.pairs import Couple, residual
from mpdist.compare.tree import Arm, Comparison, Estimate, Pair, Run
from mpdist.compare.windows import SECONDS, start, stretches

POINTS = 100
STEP, TOKENS, TIME = "step", "train/label_tokens", SECONDS


@dataclass(frozen=True)
class Point:
    """One place of a curve: the mean over seeds, the lowest and the highest of them."""

    x: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """Of one arm. train: training loss, averaged over ``steps`` logged steps a point; evals: evaluation loss."""

    train: tuple[Point, ...]
    evals: tuple[Point, ...]
    steps: int


def loss(arm: Arm, x: str, warm_step: int) -> Curve:
    """The losses of an arm over one of STEP, TOKENS and TIME; seconds count from the end of the warm-up."""
    begin = warm_step if x == TIME else 0
    logged = [step for step in match.common_steps(arm.runs, "train") if step > begin]
    rows = [{row["step"]: row for row in run.train} for run in arm.runs]
    zero = [float(start(run, warm_step)[SECONDS]) if x == TIME else 0.0 for run in arm.runs]
    each = math.ceil(len(logged) / POINTS) if logged else 1
    train = []
    for i in range(0, len(logged), each):
        steps = logged[i : i + each]
        values = [_mean([float(own[step]["train/loss"]) for step in steps]) for own in rows]
        at = [
            _mean([float(own[step].get(x, math.nan)) - begun for step in steps])
            for own, begun in zip(rows, zero, strict=True)
        ]
        train.append(Point(_mean(at), _mean(values), min(values), max(values)))
    evals = []
    for step in match.common_steps(arm.runs, "eval"):
        if step < begin:
            continue
        found = [next(row for row in run.evals if row["step"] == step) for run in arm.runs]
        values = [float(row["eval/loss"]) for row in found]
        at = [float(row.get(x, math.nan)) - begun for row, begun in zip(found, zero, strict=True)]
        evals.append(Point(_mean(at), _mean(values), min(values), max(values)))
    return Curve(tuple(train), tuple(evals), each)


@dataclass(frozen=True)
class Residual:
    """An arm's training loss minus the reference's. points: (step, its mean over seeds with its interval, and each seed's)."""

    points: tuple[tuple[float, Estimate, tuple[float, ...]], ...]
    steps: int


def residuals(found: Comparison, pair: Pair) -> Residual:
    arm, other = found.arm(pair.arm), found.arm(pair.against)
    couples = [Couple(arm.run(seed), other.run(seed)) for seed in pair.seeds]
    common = match.common_steps([run for one in couples for run in (one.arm, one.other)], "train")
    curves = [residual(one, common) for one in couples]
    each = math.ceil(len(common) / POINTS) if common else 1
    points = []
    for i in range(0, len(common), each):
        seeds = tuple(_mean([value for _, value in curve[i : i + each]]) for curve in curves)
        points.append((_mean([float(step) for step in common[i : i + each]]), gap(seeds, found.level), seeds))
    return Residual(tuple(points), each)


def step_times(arm: Arm, warm_step: int) -> list[float]:
    """Seconds a step, of all stretches between logged steps behind the warm-up, all runs together."""
    return [one.step_s for run in arm.runs for one in stretches(run, warm_step)]


@dataclass(frozen=True)
class Scale:
    """A run's loss scale. steps: (attempt from which on it was used, scale). skips: (attempt, scale) that were not applied."""

    steps: tuple[tuple[int, float], ...]
    skips: tuple[tuple[int, float], ...]


def scale(run: Run) -> Scale:
    """Read off the logged rows and the skips between them."""
    skips = [(int(one["attempt"]), float(one.get("scale", 1.0))) for one in run.skips]
    rows = [(int(row["attempt"]), float(row.get("scale/value", 1.0))) for row in run.train]
    steps: list[tuple[int, float]] = []
    for attempt, value in sorted({*skips, *rows}):
        if not steps or steps[-1][1] != value:
            steps.append((attempt, value))
    return Scale(tuple(steps), tuple(skips))


def scaled(arm: Arm) -> bool:
    """Whether any of its runs scaled its loss, or skipped an attempt."""
    return any(run.skips or any(row.get("scale/value", 1.0) != 1.0 for row in run.train) for run in arm.runs)


def memory(arm: Arm) -> tuple[dict[str, int], bool]:
    """(bytes by row of a rank, whether they are planned): the plan's rows at the rank's peak, else what the ledger measured.

    The ledger's rows are of the rank that holds the most of them.
    """
    run = arm.runs[0]
    planned = {row["row"]: int(row["at_peak_bytes"]) for row in run.plan.get("rows", ()) if row.get("at_peak_bytes")}
    if planned and run.plan.get("peak_bytes_per_rank"):
        return planned, True
    ranks: dict[int, dict[str, int]] = {}
    for row in run.ledger:
        held = ranks.setdefault(int(row.get("rank", 0)), {})
        held[row["row"]] = held.get(row["row"], 0) + int(row.get("measured_bytes") or 0)
    most = max(ranks.values(), key=lambda held: sum(held.values()), default={})
    return {row: count for row, count in most.items() if count and row != "peak"}, False


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
