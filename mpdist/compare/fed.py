"""Whether the runs of one seed began with the same weights and were fed the same rows in the same order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mpdist.compare.arms import Grouping
from mpdist.compare.tree import Difference, Run

OVERFLOW = "non-finite gradients"  # as a skip event has it; at an unchanged scale the window is not tried again
# Of the first loss: by how much a format may move it. One unit roundoff, of what a mean over many tokens has much less.
ROUNDING = {"fp32": 1e-5, "bf16": 2.0**-8, "fp16": 2.0**-11, "tf32": 2.0**-11}


def differences(arms: Grouping, told: Callable[[Sequence[str]], bool]) -> Iterator[Difference]:
    """At most one of each kind. told: whether a setting that decides it differs already."""
    own = arms.group(arms.reference)
    checks: list[tuple[tuple[str, ...], Callable[[Run, Run], Difference | None]]] = [
        (("model", "checkpoint.resume"), _weights),
        (("model", "checkpoint.resume", "data", "batch.global"), _first_loss),
        (("data", "batch.global"), _order),
        (("data", "batch.global"), _labels),
        ((), _lost),
    ]
    for causes, check in checks:
        if told(causes):
            continue
        for one in arms.groups:
            pairs = (
                (run, other) for run in one.runs for other in own.runs if run.seed == other.seed and run is not other
            )
            found = next(filter(None, (check(other, run) for run, other in pairs)), None)
            if found is not None:
                yield found
                break


def _fact(a: Run, b: Run, name: str, key: str) -> Difference | None:
    values = [next((env[name] for env in run.envs if name in env), None) for run in (a, b)]
    if None in values or values[0] == values[1]:
        return None
    return Difference(key, ((a.name, str(values[0])), (b.name, str(values[1]))))


def _weights(a: Run, b: Run) -> Difference | None:
    """Masters that were asked for in two dtypes do not hold the same bits."""
    return _fact(a, b, "initial_weights", "model.initial_weights") if masters_asked(a) == masters_asked(b) else None


def masters_asked(run: Run) -> str:
    """The dtype that masters and moments have by the settings."""
    pure = run.values["precision.master"] == "compute"
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[
        run.values["precision.compute"] if pure else "fp32"
    ]


def _first_loss(a: Run, b: Run) -> Difference | None:
    """In the place of the weights' digest, where none was recorded."""
    found = first_loss(a, b)
    if _recorded(a, b) or found is None or not found.off:
        return None
    text = (
        f"{found.mine:.5f} in {a.name}, {found.other:.5f} in {b.name}: other initial weights, or a loss that is not divided "
        f"by its window's label tokens (a mean of means); rounding explains {found.allowed:.2%}"
    )
    return Difference("model.first_loss", ((a.name, str(found.mine)), (b.name, str(found.other))), text)


def _recorded(a: Run, b: Run) -> bool:
    return all(any("initial_weights" in env for env in run.envs) for run in (a, b))


class First(NamedTuple):
    """Training losses at step 1, before any update. allowed: the largest relative gap that the two formats explain."""

    mine: float
    other: float
    allowed: float

    @property
    def off(self) -> bool:
        return math.isfinite(self.mine) and abs(self.mine - self.other) > self.allowed * abs(self.other)


def first_loss(run: Run, other: Run) -> First | None:
    """None where the two did not log step 1."""
    rows = [one.train[0] for one in (run, other)]
    if any(row["step"] != 1 or "train/loss" not in row for row in rows):
        return None
    allowed = [
        ROUNDING["tf32" if one.values["precision.tf32"] else one.values["precision.compute"]] for one in (run, other)
    ]
    return First(float(rows[0]["train/loss"]), float(rows[1]["train/loss"]), max(allowed))


def _order(a: Run, b: Run) -> Difference | None:
    return _fact(a, b, "order", "data.order")


def _labels(a: Run, b: Run) -> Difference | None:
    """The first step, or stretch of steps between two logged ones, whose label tokens differ."""
    key = "train/label_tokens"
    there = {row["step"]: row[key] for row in b.train if key in row}
    before, ours, theirs = 0, 0, 0
    for row in a.train:
        step = row["step"]
        if step not in there or key not in row:
            continue
        counts = row[key] - ours, there[step] - theirs
        if counts[0] != counts[1]:
            where = f"step {step}" if step == before + 1 else f"steps {before + 1} to {step}"
            text = f"{counts[0]:,} against {counts[1]:,} label tokens in {where} ({a.name} against {b.name})"
            return Difference("data.label_tokens", ((a.name, str(counts[0])), (b.name, str(counts[1]))), text)
        before, ours, theirs = step, row[key], there[step]
    return None


def lost_windows(run: Run) -> list[tuple[int, int]]:
    """(first step behind it, number) of each window that was given up after a non-finite value."""
    again = run.values["precision.scale.on_overflow"] == "retry"
    return [
        (event["step"] + 1, event.get("window", -1))
        for event in run.skips
        if not (again and event["reason"] == OVERFLOW and event.get("scale_after") != event.get("scale"))
    ]


def _lost(a: Run, b: Run) -> Difference | None:
    ours, theirs = lost_windows(a), lost_windows(b)
    last = min(a.steps, b.steps)
    apart = sorted(set(ours) ^ set(theirs))
    if not apart or apart[0][0] > last:
        return None
    who = a if apart[0] in ours else b
    text = f"from step {apart[0][0]} on they are other samples: {who.name} gave window {apart[0][1]} up after a non-finite value"
    return Difference("data.samples", ((a.name, f"{len(ours)} windows given up"), (b.name, f"{len(theirs)}")), text)
