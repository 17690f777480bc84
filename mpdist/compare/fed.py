"""Whether the runs of one seed began with the same weights and were fed the same rows in the same order."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mpdist import arch, sweep_first
from mpdist.compare.arms import Grouping
from mpdist.compare.tree import Difference, Run
from mpdist.errors import MpdistError
from mpdist.formats import FORMATS
from mpdist.lines import number

DEEP = 100  # layers: more than most models have
OVERFLOW = "non-finite gradients"  # as a skip event has it; at an unchanged scale the window is not tried again


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
        f"by its window's label tokens (a mean of means); rounding explains {100 * found.allowed:.2g}%"
    )
    return Difference("model.first_loss", ((a.name, str(found.mine)), (b.name, str(found.other))), text)


def _recorded(a: Run, b: Run) -> bool:
    return all(any("initial_weights" in env for env in run.envs) for run in (a, b))


class First(NamedTuple):
    """Losses of the first attempt, before any update. allowed: the largest relative gap that the two formats explain."""

    mine: float
    other: float
    allowed: float

    @property
    def off(self) -> bool:
        return math.isfinite(self.mine) and abs(self.mine - self.other) > self.allowed * abs(self.other)


def first_loss(run: Run, other: Run) -> First | None:
    """None where one was not recorded, or where dropout draws each format its own masks. The bound is the sweep's."""
    mine, theirs = _first(run), _first(other)
    if mine is None or theirs is None or not theirs or not math.isfinite(theirs):
        return None
    shape = json.dumps(
        {key.removeprefix("model.config."): v for key, v in run.values.items() if key.startswith("model.config.")}
    )
    blocks, dropout = _layers(run.values.get("model.path"), shape, run.values.get("model.revision"))
    if dropout:
        return None
    return First(mine, theirs, sweep_first.bound(_eps(run), _eps(other), blocks, min(mine, theirs)) / abs(theirs))


def _eps(run: Run) -> float:
    compute = run.values["precision.compute"]
    return FORMATS["tf32" if compute == "fp32" and run.values["precision.tf32"] else compute].eps


def _first(run: Run) -> float | None:
    """As the run's status has it, else the loss of step 1."""
    told = run.status.get("first")
    if isinstance(told, dict) and "loss" in told:
        return float(number(told["loss"]))
    row = run.train[0]
    return float(row["train/loss"]) if row["step"] == 1 and "train/loss" in row else None


@functools.cache
def _layers(path: str | None, shape: str, revision: str | None) -> tuple[int, bool]:
    """Blocks of the model, and whether it has dropout; a shape that nobody knows here is taken for a deep one without."""
    try:
        known = arch.look(path, json.loads(shape) or None, revision)
    except MpdistError:
        return DEEP, False
    if not isinstance(known, arch.Arch):
        return DEEP, False
    return known.layers, bool(known.attention_dropout or known.hidden_dropout)


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
