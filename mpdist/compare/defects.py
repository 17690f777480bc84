"""Signs, in what a run recorded, of something that makes its figures mean another thing than they say.

Each check knows one defect, reads one run (beside the reference's of the same seed, where that tells more) and says what
it saw. What a defect spoils is not judged any more: its verdict and its gates are withheld.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mpdist.compare.fairness import dtypes
from mpdist.compare.fed import OVERFLOW, first_loss
from mpdist.compare.intervals import quantiles
from mpdist.compare.tree import Arm, Defect, Row, Run

CHANGED = 0.9  # of the masters: below it, a step leaves so many as they are that small updates are being lost
NEAR = 0.01  # relative: within which two figures say the same
WIRE_ERROR = 0.1  # of a reduction: BF16 rounds to 0.002, FP16 to 0.0003
OFTEN = 0.02  # of all attempts: a scale that has settled skips less
SPEED, LOSS, TIME = "speed", "loss", "time"


class Sign(NamedTuple):
    name: str
    text: str
    spoils: tuple[str, ...] = ()


Check = Callable[[Run, Run | None], Iterator[Sign]]  # of a run, beside the reference's of its seed


def find(arms: Sequence[Arm], reference: Arm) -> list[Defect]:
    """One for each defect and run, in order of arms."""
    found: list[Defect] = []
    for arm in arms:
        for run in arm.runs:
            other = next((one for one in reference.runs if one.seed == run.seed and one is not run), None)
            for check in CHECKS:
                found += [Defect(sign.name, arm.name, run.name, sign.text, sign.spoils) for sign in check(run, other)]
    return found


def _stalled(run: Run, _: Run | None) -> Iterator[Sign]:
    """The figures are what they say, so nothing is spoilt; what is trained is less than was asked for."""
    shares = [float(row["precision/changed_fraction"]) for row in run.train if "precision/changed_fraction" in row]
    rates = [float(row["train/lr"]) for row in run.train if row.get("train/lr")]
    usual = quantiles(shares, (0.5,))[0] if shares else 1.0
    if usual < CHANGED:
        at = f" at learning rates up to {max(rates):g}" if rates else ""
        masters = dtypes(run).get("masters", "16-bit")
        yield Sign(
            "stalled updates", f"a step changes {usual:.1%} of the {masters} masters{at}; the other updates round away"
        )


def _clip_before_unscale(run: Run, other: Run | None) -> Iterator[Sign]:
    """The clip saw scaled gradients: then the norm that is left is clip / scale, or the norm told is the scaled one."""
    clip = run.values["optim.clip"]
    rows = [
        row
        for row in run.train
        if row.get("scale/value", 1.0) > 1.0 and math.isfinite(row.get("train/grad_norm", math.nan))
    ]
    if clip is not None and len(rows) >= 3:
        left = [row["train/grad_norm"] * row["scale/value"] / clip for row in rows]
        count = sum(abs(value - 1) < NEAR for value in left)
        if count >= 0.9 * len(left):
            text = f"grad_norm x scale is optim.clip = {clip:g} in {count} of {len(rows)} rows: scaled gradients were clipped"
            yield Sign("clip before unscale", text, (LOSS,))
            return
    there = {row["step"]: row for row in other.train if row.get("train/grad_norm", 0) > 0} if other is not None else {}
    early = [(row, there[row["step"]]) for row in rows[: max(3, len(rows) // 10)] if row["step"] in there]
    ratios = [row["train/grad_norm"] / twin["train/grad_norm"] for row, twin in early]
    scales = [row["scale/value"] / twin.get("scale/value", 1.0) for row, twin in early]
    if ratios and all(scale > 4 and 0.5 < share / scale < 2.0 for share, scale in zip(ratios, scales, strict=True)):
        text = f"grad_norm is {ratios[0]:,.0f} times the reference's at {scales[0]:,.0f} times its scale: the clip saw the scale"
        yield Sign("clip before unscale", text, (LOSS,))


def _mean_of_means(run: Run, other: Run | None) -> Iterator[Sign]:
    """Same weights, same rows, another loss: it is not divided by what it should be."""
    found = None if other is None else first_loss(run, other)
    if found is None or other is None or not found.off:
        return
    batch = run.plan.get("batch", {})
    parts = batch.get("accumulation", 1) * batch.get("ranks", 1)
    text = f"the loss of step 1 is {found.mine:.5f}, that of {other.name} {found.other:.5f}, on the same weights and rows; "
    text += f"rounding explains {100 * found.allowed:.2g}%"
    if parts > 1:
        text += f": as if the means of {parts} micro-batches were averaged, whatever their label tokens"
    yield Sign("mean of means" if parts > 1 else "first loss", text, (LOSS,))


def _padding(run: Run, other: Run | None) -> Iterator[Sign]:
    """The rate told, times its seconds, is slots and not tokens; or the tokens counted are the run's own slots."""
    told = real = slots = 0.0
    for before, row in zip(run.train, run.train[1:], strict=False):
        if "speed/tokens_per_s" not in row or "train/slots" not in row or before["session"] != row["session"]:
            continue
        told += row["speed/tokens_per_s"] * (row["time/train_s"] - before["time/train_s"])
        real += row["train/tokens"] - before["train/tokens"]
        slots += row["train/slots"] - before["train/slots"]
    off = abs(told / real - 1) if real else 0.0
    if off > NEAR and abs(told / slots - 1) < min(off, NEAR):
        text = f"speed/tokens_per_s amounts to {told:,.0f} tokens; {real:,.0f} were real, {slots:,.0f} positions were processed"
        yield Sign("padding counted", text, (SPEED,))
    there = {row["step"]: row for row in other.train} if other is not None else {}
    common = [row for row in run.train if row["step"] in there and "train/tokens" in row]
    if not common or other is None:
        return
    row, twin = common[-1], there[common[-1]["step"]]
    same_rows = row.get("train/label_tokens") == twin.get("train/label_tokens")
    if (
        same_rows
        and row["train/tokens"] > twin.get("train/tokens", math.inf)
        and row["train/tokens"] == row.get("train/slots")
    ):
        text = f"{row['train/tokens']:,} tokens after {row['step']:,} steps, which are all its positions; {other.name} counts "
        text += f"{twin['train/tokens']:,} on the same rows"
        yield Sign("padding counted", text, (SPEED,))


def _evaluation_in_clock(run: Run, _: Run | None) -> Iterator[Sign]:
    """The train clock has to stand still between a step's row and its evaluation's, and from there to the next step."""
    name, spoils = "evaluation in the train clock", (SPEED, TIME)
    made = {row["step"]: row for row in run.train}
    pauses = [
        (row["step"], row["time/train_s"] - made[row["step"]]["time/train_s"])
        for row in run.evals
        if row["step"] in made
    ]
    ran = [(step, pause) for step, pause in pauses if pause > 1e-6]
    if ran:
        yield Sign(
            name, f"time/train_s runs on by {ran[0][1]:.3g} s during the evaluation at step {ran[0][0]:,}", spoils
        )
        return
    if run.evals and run.state == "done" and run.status.get("time", {}).get("eval", 1.0) == 0:
        yield Sign(name, f"{len(run.evals)} evaluations, and the time table has no second for them", spoils)
        return
    after, plain = _around_evaluations(run)
    if len(after) < 3 or len(plain) < 3:
        return
    from scipy import stats

    usual, then = quantiles(plain, (0.5,))[0], quantiles(after, (0.5,))[0]
    if then > 2 * usual and stats.mannwhitneyu(after, plain, alternative="greater").pvalue < 1e-3:
        yield Sign(name, f"a step behind an evaluation takes {then:.3g} s of train time, others {usual:.3g} s", spoils)


def _around_evaluations(run: Run) -> tuple[list[float], list[float]]:
    """Train seconds a step, of stretches that an evaluation lies in, and of all others; a session's first left out."""
    at = {row["step"] for row in run.evals}
    after: list[float] = []
    plain: list[float] = []
    for before, row in zip(run.train[1:], run.train[2:], strict=False):
        if before["session"] == row["session"]:
            step_s = (row["time/train_s"] - before["time/train_s"]) / (row["step"] - before["step"])
            (after if any(before["step"] <= step < row["step"] for step in at) else plain).append(step_s)
    return after, plain


def _wire(run: Run, other: Run | None) -> Iterator[Sign]:
    """What travels in 16 bit leaves its range: the error of a reduction, or skips that the compute dtype does not explain."""
    wire, compute = run.values["reduce.wire"], run.values["precision.compute"]
    if wire == "fp32":
        return
    errors = [float(row["precision/wire_error"]) for row in run.train if "precision/wire_error" in row]
    bad = [error for error in errors if not math.isfinite(error) or error > WIRE_ERROR]
    if bad:
        text = f"a reduction in {wire} is off by {bad[0]:.2g} of its size, in {len(bad)} of {len(errors)} samples"
        yield Sign("wire overflow", text)
        return
    late = _late_overflows(run)
    twin = other is not None and (other.values["reduce.wire"], other.values["precision.compute"]) == ("fp32", compute)
    explained = compute == "fp16" and not (twin and other is not None and not _late_overflows(other))
    if not explained and len(late) > max(2.0, OFTEN * run.attempts):
        scale = late[-1].get("scale", math.nan)
        text = f"{len(late)} attempts of the second half were skipped for {OVERFLOW}, the last at a scale of {scale:g}"
        yield Sign(
            "wire overflow", f"{text}: {compute} does not explain them, a sum that leaves the range of {wire} does"
        )


def _late_overflows(run: Run) -> list[Row]:
    return [event for event in run.skips if event["reason"] == OVERFLOW and event["attempt"] > run.attempts / 2]


CHECKS: tuple[Check, ...] = (_stalled, _clip_before_unscale, _mean_of_means, _padding, _evaluation_in_clock, _wire)
