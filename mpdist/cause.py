"""One report out of what the ranks saw of a bad window: which sight is the cause, and what a person is told of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mpdist.errors import Diverged
from mpdist.feed import Batch
from mpdist.precision import Decision, Policy, Reason, Window
from mpdist.trace import STAGES, Sight, called

# By rehearsed fault, the kinds of cause that are its own doing.
_REHEARSED = {"overflow_at": ("addend", "sum"), "nan_loss_at": ("loss",)}


@dataclass(frozen=True)
class Report:
    """One cause, the same on every rank. lines: for a person. rank: where it arose. facts: for the event."""

    lines: tuple[str, ...]
    rank: int
    facts: dict[str, Any]

    @property
    def sentence(self) -> str:
        return ". ".join(self.lines)

    @property
    def place(self) -> tuple[Any, ...]:
        """What makes it the same finding as another one, whatever its numbers are."""
        keys = ("kind", "module", "tensor", "parameter", "lower_scale", "rows", "same_loss")
        return (self.rank, *(repr(self.facts.get(key)) for key in keys))


@dataclass(frozen=True)
class Attempt:
    """A skipped attempt, on this rank. loss: its sum of token losses. lowest: the scale that may still be tried, None where
    there is none below. every: gradients travelled after each micro-batch. replay: whether it may be computed again. exact:
    whether that gives the same bits, unless something is broken. policy: of the model.
    rehearsed: the fault of the drill that struck this attempt on any rank, empty without one."""

    batch: Batch
    decision: Decision
    loss: torch.Tensor | None
    lowest: float | None
    every: bool
    replay: bool
    exact: bool
    policy: Policy | None = None
    rehearsed: str = ""


@dataclass(frozen=True)
class Seen:
    """What one rank found. weights: (number of the part, name, count, index); gradients, again: names of parameters whose
    reduced gradient is bad in the attempt and when computed again, with the index. losses: of each micro-batch computed
    again. same: whether the sum has the same bits. squares: whether they can be summed in squares. broken: see Trace."""

    weights: list[tuple[int, str, int, tuple[int, ...]]]
    gradients: list[tuple[str, tuple[int, ...]]]
    lost: bool
    rows: list[list[int]]
    sights: list[Sight]
    again: list[tuple[str, tuple[int, ...]]]
    losses: list[float]
    same: bool
    squares: bool
    broken: str


@dataclass(frozen=True)
class Cause:
    """kind: one of STAGES, or weight (a master), norm, none (the replay was clean), unknown (there was none)."""

    kind: str
    rank: int
    sight: Sight | None = None
    places: int = 0  # ranks x micro-batches that show the same

    @property
    def in_backward(self) -> bool:
        return self.kind in ("backward", "addend", "wire", "sum", "norm")

    def is_of(self, fault: str) -> bool:
        """Whether a rehearsed fault would show so."""
        return self.kind in _REHEARSED.get(fault, ())


def find(ranks: list[Seen], attempt: Attempt) -> Cause:
    """The earliest sight: forward before backward before reduction, then by micro-batch, by order, by rank."""
    sights = [(sight, rank) for rank, seen in enumerate(ranks) for sight in seen.sights]
    forward = sorted((s.micro, s.order, rank, s) for s, rank in sights if s.in_forward) if sights else []
    weights = sorted((entry[0], rank) for rank, seen in enumerate(ranks) for entry in seen.weights)
    if weights:
        shown = forward[0] if forward else None
        return Cause("weight", weights[0][1], shown[3] if shown else None, len(forward))
    if forward:
        return Cause(forward[0][3].stage, forward[0][2], forward[0][3], len(forward))
    if not attempt.replay:
        return Cause("unknown", _showing(ranks))
    for stage in STAGES[STAGES.index("backward") :]:
        found = sorted((s.micro, s.order, rank, s) for s, rank in sights if s.stage == stage)
        if found:
            return Cause(stage, found[0][2], found[0][3], len(found))
    for rank, seen in enumerate(ranks):
        if seen.again:
            return Cause("sum" if len(ranks) > 1 else "addend", rank)
    if not all(seen.squares for seen in ranks):
        return Cause("norm", next(rank for rank, seen in enumerate(ranks) if not seen.squares))
    return Cause("unknown" if any(seen.broken for seen in ranks) else "none", _showing(ranks))


def _showing(ranks: list[Seen]) -> int:
    """Without a cause, the first rank whose loss is bad, else the first that holds a bad gradient."""
    lost = [rank for rank, seen in enumerate(ranks) if seen.lost]
    return (lost or [rank for rank, seen in enumerate(ranks) if seen.gradients] or [0])[0]


def tell(cause: Cause, ranks: list[Seen], attempt: Attempt, cured: bool | None) -> Report:
    """cured: whether the window is finite at the lowest scale, None where that was not tried."""
    sight = cause.sight
    # A gradient that travels once a window has no micro-batch of its own.
    micro = (
        None if sight is None or (not attempt.every and sight.stage in ("addend", "wire", "sum")) else sight.micro + 1
    )
    lower = False if cause.kind in ("weight", "parameter", "forward", "loss") else cured
    bad_loss = attempt.decision.reason is Reason.LOSS
    reproduced = attempt.replay and cause.kind not in ("none", "unknown")
    facts: dict[str, Any] = {"kind": cause.kind, "bad_loss": bad_loss, "lower_scale": lower, "replayed": attempt.replay,
                             "reproduced": reproduced, "same_loss": all(seen.same for seen in ranks)}  # fmt: skip
    if cause.is_of(attempt.rehearsed):
        facts["rehearsed"] = attempt.rehearsed
    if sight is not None:
        facts |= {"module": sight.module, "tensor": sight.tensor, "op": sight.op, "index": list(sight.index),
                  "value": sight.value, "count": sight.count, "dtype": sight.dtype, "micro": micro,
                  "rows": list(sight.rows), "last_good": sight.last_good, "largest_in": sight.into,
                  "largest_out": sight.out_of, "places": cause.places}  # fmt: skip
    gradients = next(((rank, seen.gradients) for rank, seen in enumerate(ranks) if seen.gradients), None)
    if cause.kind == "weight":
        _, name, count, index = ranks[cause.rank].weights[0]
        facts |= {"parameter": name, "parameter_index": list(index), "parameter_count": count}
    elif gradients is not None:
        facts |= {"parameter": gradients[1][0][0], "parameter_index": list(gradients[1][0][1])}
    return Report(tuple(_lines(cause, ranks, attempt, micro, lower)), cause.rank, facts)


def _lines(cause: Cause, ranks: list[Seen], attempt: Attempt, micro: int | None, lower: bool | None) -> list[str]:
    sight, tokens = cause.sight, f"the window has {attempt.batch.labels} label tokens"
    where = f"on rank {cause.rank}" + (f", micro-batch {micro}" if micro else "")
    if sight is not None:
        where += f", rows {list(sight.rows[:8])}"
    if cause.kind == "weight":
        _, name, count, index = ranks[cause.rank].weights[0]
        head = [
            f"weights: {name} holds {count} non-finite values (rank {cause.rank}), the first at {list(index)}; {tokens}"
        ]
        head += [f"it shows first in {sight.tensor} of {called(sight.module)}"] if sight is not None else []
    elif cause.kind == "parameter":
        assert sight is not None
        name = sight.tensor.removeprefix("parameter ")
        copy = f"weights: the {sight.dtype} working copy of {name} is non-finite {where}"
        head = [f"{copy}, although its master is finite; {tokens}"]
    elif cause.kind == "forward":
        assert sight is not None
        own = "" if sight.tensor.startswith("output") else ", in operations of its own"
        first = f"activations: the first module with a non-finite output is {called(sight.module)}{own} {where}"
        head = [f"{first}, while all weights are finite; {tokens}", _detail(sight, "before it")]
    elif cause.kind == "loss":
        found = [(rank, s) for rank, seen in enumerate(ranks) for s in seen.sights if s.stage == "loss"]
        who = ", ".join(f"rank {rank} (rows {list(s.rows[:8])}, micro-batch {s.micro + 1})" for rank, s in found[:4])
        head = [f"loss: non-finite on {who}, although weights and every module's output are finite; {tokens}"]
    elif cause.in_backward:
        head = _gradients(cause, ranks, where)
    else:
        return _unexplained(cause, ranks, attempt, tokens)
    if cause.places > 1:
        head.append(f"{cause.places} micro-batches of all ranks show it")
    if attempt.exact and not all(seen.same for seen in ranks):
        head.append("its loss, computed again, has other bits than before: suspect hardware or a race as well")
    return [*head, _cure(cause, attempt, lower)]


def _detail(sight: Sight, before: str) -> str:
    text = f"{sight.value} in {sight.tensor} at {list(sight.index)} ({sight.count} of {sight.elements} elements, {sight.dtype})"
    sides = [f"{size:.3g} {side}" for size, side in ((sight.into, "in"), (sight.out_of, "out")) if math.isfinite(size)]
    text += f"; largest finite magnitude {', '.join(sides)}" if sides else ""
    return text + (f"; {before} {called(sight.last_good)} was finite" if sight.last_good else "")


def _gradients(cause: Cause, ranks: list[Seen], where: str) -> list[str]:
    sight = cause.sight
    owner = next(((r, found) for r, seen in enumerate(ranks) if (found := seen.again or seen.gradients)), None)
    names = ", ".join(name for name, _ in owner[1][:3]) if owner else ""
    fine = "weights, activations and loss are finite"
    first = f"gradients: non-finite in {names} (rank {owner[0]}); {fine}" if owner else f"gradients: {fine}"
    if cause.kind == "backward":
        assert sight is not None
        op = f" ({sight.op})" if sight.op else ""
        arises = f"they arise in the backward of {called(sight.module)}{op} {where}"
        return [first, f"{arises}: {_detail(sight, 'before it in backward order')}"]
    if cause.kind == "addend":
        arises = f"each operation's gradient is finite, what goes into the reduction {where} is not"
        return [first, f"{arises}: {sight.value}, {sight.count} of {sight.elements} elements" if sight else arises]
    if cause.kind == "wire":
        assert sight is not None
        text = f"the reduction alone: every rank's own gradients are finite, cast to {sight.dtype} for the wire they overflow"
        return [first, f"{text} {where}, {sight.count} of {sight.elements} elements of a bucket"]
    if cause.kind == "sum":
        return [first, "the reduction alone: what every rank sends is finite, the sum is not"]
    return ["gradients: every element is finite, but their norm is not: the squares overflow"]


def _cure(cause: Cause, attempt: Attempt, lower: bool | None) -> str:
    sight = cause.sight
    if cause.is_of(attempt.rehearsed):
        return f"it was rehearsed (drill.{attempt.rehearsed}), so no cure is claimed"
    if lower is False and not cause.in_backward:
        text = "a lower loss scale cannot cure it"
        if sight is not None and cause.kind != "weight" and sight.dtype == "float16":
            text += f". In fp16 that is an overflow past 65504: {_wider(sight, attempt.policy)}"
        return text
    if not lower and attempt.decision.blocks:  # whatever was tried was tried at the blocks' scales of before
        return "the scale of the block where they arise has fallen, which may cure it"
    if lower is None:
        used = "it is at its lowest" if attempt.decision.scale != 1.0 else "there is none below 1"
        return f"a lower loss scale cannot cure it: {used}"
    if lower:
        return f"a lower loss scale cures it: at {attempt.lowest:g} the same window is finite"
    return f"a lower loss scale cannot cure it: at {attempt.lowest:g} the same window is not finite either"


def _wider(sight: Sight, policy: Policy | None) -> str:
    """A module that is kept in FP32 hands its output on in FP16: to keep it cures only what arises and stays inside it."""
    if policy is not None and policy.keeps(sight.module):
        return (f"{called(sight.module)} is kept in FP32 already, and its output does not fit when it is cast to FP16"
                " for what follows: compute in bf16")  # fmt: skip
    return ("compute in bf16; or keep in FP32 (precision.keep_fp32) the smallest module around it of which the output"
            " stays below that, if there is one: mpdist doctor CONFIG --debug tries it")  # fmt: skip


def remedy(found: Report, asked: Mapping[str, Any]) -> str:
    """What to do about a run that has diverged, by what was found. asked: the values of `precision`."""
    facts, kind, scale = found.facts, found.facts["kind"], asked["scale"]
    if "rehearsed" in facts:
        return f"drill.{facts['rehearsed']} of this run asked for it: take that out"
    if facts["lower_scale"]:
        if scale["mode"] == "static":
            return f"begin lower than precision.scale.init = {scale['init']:g}, or use precision.scale.mode=dynamic"
        return (f"begin lower than precision.scale.init = {scale['init']:g}; or let it fall further, with more than"
                f" precision.scale.patience = {scale['patience']}, or faster, with"
                f" less than precision.scale.backoff = {scale['backoff']:g}")  # fmt: skip
    if kind == "weight":
        return "start from a copy of the model, or a checkpoint, whose weights are finite"
    if kind == "wire":
        return "send gradients with reduce.wire=fp32"
    if kind in ("parameter", "forward") and facts.get("dtype") == "float16":
        return "compute in bf16, or what else the finding names; where it was finite before, lower the learning rate"
    if kind == "none":
        return "have the machine looked at (mpdist doctor CONFIG), and launch again"
    wider = {"fp16": " compute in bf16 or fp32,", "bf16": " compute in fp32,"}.get(asked["compute"], "")
    return f"lower the learning rate,{wider} or clean the data"


class Once:
    """Says a finding in full the first time, as long as the same is found again."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._place: tuple[Any, ...] | None = None
        self._attempt = 0

    def __call__(self, found: Report, attempt: int) -> None:
        if self._place == found.place:
            self._say(f"the cause is that of attempt {self._attempt}")
            return
        self._place, self._attempt = found.place, attempt
        self._say("\n  ".join(found.lines))


def diverged(found: Report, decision: Decision, window: Window, scaled: bool, asked: Mapping[str, Any]) -> Diverged:
    """The end of a run whose last attempts were all skipped. scaled: whether a loss scale is in use. asked: as in `remedy`."""
    at = f" at a scale of {decision.scale:g}" if scaled else ""
    error = Diverged(
        f"{window.in_a_row} attempts in a row were skipped, the last for {decision.reason}, at step {window.step}",
        f"precision.scale.patience = {window.patience} is used up{at}. {found.sentence}",
        f"the weights are as the last applied step left them; {remedy(found, asked)}",
    )
    error.rank = found.rank
    return error


def _unexplained(cause: Cause, ranks: list[Seen], attempt: Attempt, tokens: str) -> list[str]:
    lost = [(rank, seen) for rank, seen in enumerate(ranks) if seen.lost]
    bad = [(rank, seen) for rank, seen in enumerate(ranks) if seen.gradients]
    if attempt.decision.reason is Reason.LOSS:
        who = (
            ", ".join(
                f"rank {rank} (rows {[row for rows in seen.rows for row in rows][:8]})" for rank, seen in lost[:4]
            )
            or "no single rank"
        )
        head = f"loss: non-finite on {who}, although all weights are finite; {tokens}"
    else:
        names = ", ".join(name for name, _ in bad[0][1].gradients[:3]) if bad else ""
        head = f"gradients: non-finite in {names} (rank {bad[0][0]}); weights and loss are finite" if bad else (
            "gradients: every element is finite, but their norm is not")  # fmt: skip
    if cause.kind == "unknown":
        broken = next(
            (f"the look at it broke off on rank {r}: {s.broken}" for r, s in enumerate(ranks) if s.broken), None
        )
        return [head, broken or "the window was not computed again (track.replay = off)"]
    return [head, "the replay was clean: not reproducible, suspect hardware or a race"]
