"""One line on each arm, in words that stand on an interval or are not said."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpdist.compare.defects import LOSS, SPEED, TIME
from mpdist.compare.tree import Arm, AtTime, Defect, Estimate, Pair, Verdict

UNSEEN = "no difference seen"


def verdict(pair: Pair, arm: Arm, reference: Arm, defects: Sequence[Defect], control: bool) -> Verdict:
    """control: whether the arm is the reference over again, of which any difference is noise."""
    spoilt = {claim: one for one in defects for claim in one.spoils if one.arm in (pair.arm, pair.against)}
    speed, said_of_speed = _speed(pair, spoilt.get(SPEED))
    loss, said_of_loss = _diverged(arm) or _nothing_to_hold(reference) or _loss(pair, reference, spoilt.get(LOSS))
    drift, said_of_drift = ("unknown", "") if reference.diverged else _drift(pair, spoilt.get(LOSS))
    parts = [said_of_speed, said_of_loss, *([said_of_drift] if said_of_drift else [])]
    at = pair.at_time("train")
    if at is not None and loss != "diverged" and not reference.diverged and not spoilt.keys() & {LOSS, TIME}:
        parts.append(_at_time(at))
    name = f"{pair.arm} (A/A control)" if control else pair.arm
    return Verdict(pair.arm, pair.against, f"{name}: " + "; ".join(filter(None, parts)), speed, loss, drift)


def number(value: float) -> str:
    """A loss or a difference of losses, with a sign: enough digits to tell it from nothing."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:+.{max(4, 1 - math.floor(math.log10(abs(value))))}f}"


def times(value: float) -> str:
    """A ratio: 1.93, or 0.971 where the third digit is what matters."""
    if not 0.005 <= value < 1000:
        return f"{value:.2g}"
    return f"{value:.3f}" if abs(value - 1) < 0.1 else f"{value:.2f}"


def within(found: Estimate) -> str:
    """`+0.0006 +- 0.0011`, or the value alone."""
    if found.low is None or found.high is None:
        return number(found.value)
    return f"{number(found.value)} +- {number((found.high - found.low) / 2).lstrip('+')}"


def _speed(pair: Pair, spoilt: Defect | None) -> tuple[str, str]:
    found = pair.speed
    if spoilt is not None:
        return "withheld", f"speed withheld: {spoilt.name}"
    if found is None:
        return "unknown", "speed unknown: no two logged steps behind the warm-up"
    of = "tokens/s" if pair.speed is pair.speed_all else "tokens/s of undisturbed steps"
    told = f"{times(found.value)}x {of}"
    if found.low is None or found.high is None:
        return (
            ("withheld", f"{told}, verdict withheld: {pair.withheld}")
            if pair.withheld
            else ("unknown", f"{told} ({found.why})")
        )
    told += f" ({times(found.low)} to {times(found.high)})"
    if pair.withheld:
        return "withheld", f"{told}, verdict withheld: {pair.withheld}"
    if found.seen:
        return ("faster" if found.value > 1 else "slower"), told
    return UNSEEN, f"{told}, {UNSEEN} at this size{_would(found, _share(found.detectable or 0.0))}"


def _share(more: float) -> str:
    """Of a ratio that is so much above 1."""
    return f"{more:.1%}" if more < 10 else f"{times(1 + more)}x"


def _would(found: Estimate, size: str) -> str:
    return f" (one of {size} would have been)" if found.detectable else ""


def _diverged(arm: Arm) -> tuple[str, str] | None:
    if not arm.diverged:
        return None
    ends = ", ".join(f"{run.name} at step {run.steps:,}" for run in arm.diverged)
    return "diverged", f"DIVERGED: {ends} of {len(arm.runs)} run{'s' * (len(arm.runs) != 1)}"


def _nothing_to_hold(reference: Arm) -> tuple[str, str] | None:
    """A reference that diverged has no loss that another could be higher or lower than."""
    for run in reference.diverged:
        return "withheld", f"loss withheld: {run.name}, of the reference, diverged at step {run.steps:,}"
    return None


def _loss(pair: Pair, reference: Arm, spoilt: Defect | None) -> tuple[str, str]:
    at, found = pair.judged, pair.loss_gap
    if spoilt is not None:
        return "withheld", f"loss withheld: {spoilt.name}"
    if at is None or found is None:
        return "unknown", "loss unknown: no common step"
    kind = "loss" if at.eval_loss_gap is not None else "training loss"
    if found.value == 0 and found.low == found.high == 0:
        return UNSEEN, f"{kind} the same to the last bit at {at.step:,} steps"
    told = f"{kind} {within(found)} at {at.step:,} steps"
    if found.low is None:
        return "unknown", f"{told} ({found.why})"
    spread = reference.figures.seed_spread
    if spread is not None and at.eval_loss_gap is not None:
        told += f", {'inside' if abs(found.value) <= spread else 'outside'} the seed spread of {spread:.4f}"
    if found.seen:
        return ("higher" if found.value > 0 else "lower"), told
    return UNSEEN, f"{told}: {UNSEEN} at this size{_would(found, f'{found.detectable or 0:.4f}')}"


def _drift(pair: Pair, spoilt: Defect | None) -> tuple[str, str]:
    if pair.drift is None or pair.drift.slope.low is None or spoilt is not None:
        return "unknown", ""
    slope = pair.drift.slope
    if not slope.seen:
        return "none seen", ""
    between = f"between steps {pair.drift.first:,} and {pair.drift.last:,}"
    return ("up" if slope.value > 0 else "down"), f"the residual drifts by {within(slope)} per 1,000 steps {between}"


def _at_time(at: AtTime) -> str:
    found = at.eval_loss_gap
    if found is None:
        return ""
    when = f"at {at.seconds:,.3g} s" if at.seconds < 1000 else f"at {at.seconds:,.0f} s"
    if found.low is None:
        told = f"{when} of training {number(found.value)}"
    elif found.value == 0 and not found.seen:
        told = f"{when} of training no difference"
    elif found.seen:
        told = f"{when} of training {abs(found.value):.4f} {'lower' if found.value < 0 else 'higher'} ({within(found)})"
    else:
        told = f"{when} of training {within(found)}, {UNSEEN}"
    if not at.same_phase and at.phase is not None:
        told += f", the schedules at {at.phase[0]:.0%} and {at.phase[1]:.0%}"
    return told
