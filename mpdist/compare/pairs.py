"""One arm against the reference: at matched steps, at matched seconds, on the way to one loss, in speed, in drift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpdist.compare import match
from mpdist.compare.figures import mean
from mpdist.compare.intervals import drift, gap, quantiles, ratio, speed_ratio
from mpdist.compare.tree import Arm, AtStep, AtTime, Estimate, Pair, Run, ToLoss
from mpdist.compare.windows import Stretch, rate, stretches

TENTH = 0.1  # of the steps: over which the training loss is averaged, and how many fastest ones count as undisturbed
QUARTERS = (0.25, 0.5, 0.75, 1.0)
PHASE = 0.01  # of the schedule: arms further apart than this are at different phases
BUSY = 1.25  # a machine is busy where a run's 90th percentile of the time a token takes is so far above its 10th
FEW = 20  # stretches, below which there is no talking of a tenth of them
ALL, UNDISTURBED = "all steps", "undisturbed steps"


@dataclass(frozen=True)
class Couple:
    """The runs of one seed."""

    arm: Run
    other: Run


def pair(arm: Arm, reference: Arm, warm_step: int | None, target: float | None) -> Pair:
    """Everything but `withheld`, which takes the control's pair. target: the loss to reach."""
    seeds = tuple(seed for seed in arm.seeds if seed in reference.seeds)
    couples = [Couple(arm.run(seed), reference.run(seed)) for seed in seeds]
    runs = [run for couple in couples for run in (couple.arm, couple.other)]
    curves = [residual(couple, match.common_steps(runs, "train")) for couple in couples]
    speed = _speed(couples, warm_step)
    return Pair(
        arm=arm.name, against=reference.name, seeds=seeds,
        matched_steps=_at_steps(couples, runs),
        matched_seconds=_at_times(couples, warm_step),
        to_loss=_to_loss(couples, warm_step, target),
        speed=speed.judged, basis=speed.basis, speed_all=_ratio(speed.all), speed_undisturbed=_ratio(speed.undisturbed),
        seeds_all=tuple(a / b for a, b in speed.all), seeds_undisturbed=tuple(a / b for a, b in speed.undisturbed),
        drift=drift(curves), withheld="",
        residual=tuple(
            (step, mean(values), min(values), max(values))
            for step, values in ((at[0][0], [value for _, value in at]) for at in zip(*curves, strict=True))
        ),
    )  # fmt: skip


def residual(couple: Couple, steps: Sequence[int]) -> list[tuple[int, float]]:
    """(step, training loss of the arm minus the reference's), on the same rows."""
    wanted = set(steps)
    there = {row["step"]: float(row["train/loss"]) for row in couple.other.train}
    return [
        (row["step"], float(row["train/loss"]) - there[row["step"]])
        for row in couple.arm.train
        if row["step"] in wanted
    ]


# -- steps ---------------------------------------------------------------------------------------------------------------


def _at_steps(couples: Sequence[Couple], runs: Sequence[Run]) -> tuple[AtStep, ...]:
    """At each common evaluation, and at the last common step."""
    logged, evaluated = match.common_steps(runs, "train"), match.common_steps(runs, "eval")
    if not logged:
        return ()
    steps = sorted({step for step in evaluated if step in set(logged)} | {logged[-1]})
    return tuple(_at_step(couples, step, logged, step in evaluated) for step in steps)


def _at_step(couples: Sequence[Couple], step: int, logged: Sequence[int], evaluated: bool) -> AtStep:
    first = min(round(step * (1 - TENTH)), step - 1)
    losses = [[match.train_loss(run, first, step, logged) for run in (one.arm, one.other)] for one in couples]
    evals = [[match.eval_loss(run, step) for run in (one.arm, one.other)] for one in couples] if evaluated else []
    rows = [[next(row for row in run.train if row["step"] == step) for run in (one.arm, one.other)] for one in couples]

    def both(values: Sequence[Sequence[float]]) -> tuple[float, float]:
        return mean(value[0] for value in values), mean(value[1] for value in values)

    found = gap([a - b for a, b in evals]) if evals else None
    return AtStep(
        step=step,
        attempts=both([[row["attempt"] for row in two] for two in rows]),
        label_tokens=both([[row.get("train/label_tokens", math.nan) for row in two] for two in rows]),
        eval_loss=both(evals) if evals else None,
        eval_loss_gap=found,
        perplexity_ratio=ratio([a - b for a, b in evals]) if evals else None,
        window_from=first,
        train_loss=both(losses),
        train_loss_gap=gap([a - b for a, b in losses]),
    )


# -- seconds ---------------------------------------------------------------------------------------------------------------


def _at_times(couples: Sequence[Couple], warm_step: int | None) -> tuple[AtTime, ...]:
    """At the quarters of the longest time that all runs have, by each clock."""
    if warm_step is None:
        return ()
    found = []
    for clock in match.CLOCKS:
        longest = min(match.end(run, warm_step, clock) for one in couples for run in (one.arm, one.other))
        if math.isfinite(longest) and longest > 0:
            found += [_at_time(couples, warm_step, clock, longest * share) for share in QUARTERS]
    return tuple(found)


def _at_time(couples: Sequence[Couple], warm_step: int, clock: str, seconds: float) -> AtTime:
    steps, losses, phases = [], [], []
    for one in couples:
        runs = (one.arm, one.other)
        at = [match.step_at(run, warm_step, clock, seconds) for run in runs]
        steps.append(at)
        phases.append(
            [None if _constant(run) else step / run.horizon for run, step in zip(runs, at, strict=True) if run.horizon]
        )
        losses.append([match.loss_at(match.points(run, warm_step), clock, seconds) for run in runs])
    known = [[a, b] for a, b in losses if a is not None and b is not None]
    whole = known if len(known) == len(couples) else []
    shares = [two for two in phases if len(two) == 2 and None not in two]
    phase = (mean(two[0] for two in shares), mean(two[1] for two in shares)) if shares else None  # type: ignore[misc]
    return AtTime(
        clock=clock, seconds=seconds,
        step=(mean(two[0] for two in steps), mean(two[1] for two in steps)),
        eval_loss=(mean(two[0] for two in whole), mean(two[1] for two in whole)) if whole else None,
        eval_loss_gap=gap([a - b for a, b in whole]) if whole else None,
        phase=phase, same_phase=phase is None or abs(phase[0] - phase[1]) <= PHASE,
    )  # fmt: skip


def _constant(run: Run) -> bool:
    return bool(run.values["optim.schedule"] == "constant")


def _to_loss(couples: Sequence[Couple], warm_step: int | None, target: float | None) -> ToLoss | None:
    if warm_step is None or target is None:
        return None
    found = [[match.to_loss(match.points(run, warm_step), target) for run in (one.arm, one.other)] for one in couples]
    reached = [(a, b) for a, b in found if a is not None and b is not None]
    if len(reached) < len(couples):
        return ToLoss(target, None, None, None, None, None)

    def both(i: int) -> tuple[float, float]:
        return mean(a[i] for a, _ in reached), mean(b[i] for _, b in reached)

    def ratios(i: int) -> Estimate | None:
        if any(min(a[i], b[i]) <= 0 for a, b in reached):
            return None
        return ratio([math.log(a[i] / b[i]) for a, b in reached])

    return ToLoss(target, both(0), ratios(0), both(1), ratios(1), both(2))


# -- speed -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speeds:
    """Each seed's speeds, (arm, reference), of all steps and of undisturbed ones (none where there are too few)."""

    all: tuple[tuple[float, float], ...] = ()
    undisturbed: tuple[tuple[float, float], ...] = ()
    busy: bool = False

    @property
    def basis(self) -> str:
        return UNDISTURBED if self.busy and self.undisturbed else ALL

    @property
    def judged(self) -> Estimate | None:
        return _ratio(self.undisturbed if self.basis == UNDISTURBED else self.all)


def _ratio(seeds: Sequence[tuple[float, float]]) -> Estimate | None:
    return speed_ratio([own for own, _ in seeds], [other for _, other in seeds]) if seeds else None


def _speed(couples: Sequence[Couple], warm_step: int | None) -> Speeds:
    """What of it the verdict stands on follows from the spread inside the runs, the same question for both arms.

    On a machine that others use too, the mean of a run tells more of them than of the arm: the time that the fastest
    tenth of the windows takes does not. A window that was attempted twice costs twice under either.
    """
    if warm_step is None:
        return Speeds()
    found = [[stretches(run, warm_step) for run in (one.arm, one.other)] for one in couples]
    every = [(rate(a) or 0.0, rate(b) or 0.0) for a, b in found]
    if not all(a > 0 and b > 0 for a, b in every):
        return Speeds()
    if min(len(own) for two in found for own in two) < FEW:
        return Speeds(tuple(every))
    quick = []
    for (a, b), one in zip(found, couples, strict=True):
        tenths = [quantiles(_per_token(own), (TENTH,))[0] for own in (a, b)]
        quick.append((1 / (tenths[0] * _tries(one.arm, warm_step)), 1 / (tenths[1] * _tries(one.other, warm_step))))
    spreads = [quantiles(_per_token(own), (0.1, 0.9)) for two in found for own in two]
    return Speeds(tuple(every), tuple(quick), quantiles([high / low for low, high in spreads], (0.5,))[0] > BUSY)


def _per_token(own: Sequence[Stretch]) -> list[float]:
    return [one.seconds / max(one.tokens, 1) for one in own]


def _tries(run: Run, warm_step: int) -> float:
    """Attempts for each applied step behind the warm-up."""
    return 1.0 + sum(event["step"] >= warm_step for event in run.skips) / max(run.steps - warm_step, 1)


def withheld(pair: Pair, control: Pair | None) -> Pair:
    """The pair with the reason why its speed is not judged, if there is one: an A/A control that is as far off.

    The control's distance is the largest of its seeds', on the basis of this pair.
    """
    if control is None or pair.speed is None or pair.arm == control.arm:
        return pair
    own = control.seeds_undisturbed if pair.basis == UNDISTURBED else control.seeds_all
    claimed = abs(math.log(pair.speed.value)) if pair.speed.value > 0 else math.inf
    apart = max((abs(math.log(one)) for one in own), default=0.0)
    if claimed > apart:
        return pair
    why = f"the A/A control {control.arm} is up to {math.expm1(apart):.1%} away from {control.against}, which is the same run again"
    return replace(pair, withheld=why)
