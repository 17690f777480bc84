"""Why something is non-finite or gets no gradient: looked for once, when it happens, on all ranks together.

A window that was skipped is computed again with hooks (mpdist.trace), from the same weights, random numbers and scale, as if
nothing had happened in between; what the ranks saw becomes one report, the same on each. `Ration` says which windows are
worth that.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mpdist.errors import UsageError
from mpdist.feed import Batch
from mpdist.optim import square_sum
from mpdist.precision import Decision, Reason
from mpdist.reduce import Wire
from mpdist.shard import Engine, Part
from mpdist.trace import STAGES, Sight, Trace, called, look_at, magnitude

# again(scale, trace): the window's forward, backward and reduction once more; this rank's (sum of token losses, auxiliary).
Again = Callable[[float, Trace], tuple[torch.Tensor, torch.Tensor]]
_Context = Callable[[], contextlib.AbstractContextManager[None]]

_OFTEN = 8  # skips in a row after which a falling scale is no longer usual


class Reach:
    """Checks in the first window that autograd reaches every trainable parameter.

    A parameter that no loss depends on would keep its weights for ever without a word (frozen by a reentrant checkpoint,
    a branch that is never taken). Looks at the graph, costs one walk, and only once.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: set[int] = set()

    def look(self, objective: torch.Tensor) -> None:
        todo, known = [objective.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in known:
                continue
            known.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                self._seen.add(id(variable))
            todo.extend(following for following, _ in node.next_functions)

    def check(self) -> None:
        """Raises UsageError naming the parameters that were not reached."""
        leaves = self._engine.leaves()
        lost = [name for name, leaf in leaves.items() if id(leaf) not in self._seen]
        if lost:
            raise UsageError(f"{len(lost)} trainable parameters got no gradient in the first window, the first {lost[0]}",
                             "the loss does not depend on them, so they would never change",
                             "freeze them with model.freeze, or use a model that trains them")  # fmt: skip


class Ration:
    """Which skipped attempts are looked into. The same on all ranks: it knows agreed values only.

    A dynamic scale falls as a matter of course, several attempts in a row when it starts: of these the session's first is
    looked into and then every eighth in a row. What no lower scale can cure (a loss that is bad itself, a scale that does
    not move) is looked into at the first attempt of each row of skips, and whatever ends the run once more.
    """

    def __init__(self, always: bool = False) -> None:
        self._always, self._first, self._told = always, True, False

    def due(self, decision: Decision, in_a_row: int) -> bool:
        first, self._first = self._first, False
        if in_a_row == 1:
            self._told = False
        urgent = decision.reason is Reason.LOSS or decision.scale_after >= decision.scale
        news = urgent and not self._told
        self._told |= urgent
        return self._always or decision.exhausted or first or news or in_a_row % _OFTEN == 0


@dataclass(frozen=True)
class Report:
    """One cause, the same on every rank. lines: for a person. rank: where it arose. facts: for the event."""

    lines: tuple[str, ...]
    rank: int
    facts: dict[str, Any]

    @property
    def sentence(self) -> str:
        return ". ".join(self.lines)


@dataclass(frozen=True)
class Attempt:
    """A skipped attempt, on this rank. loss: its sum of token losses. lowest: the scale that may still be tried, None where
    there is none below. every: gradients travelled after each micro-batch. replay: whether it may be computed again."""

    batch: Batch
    decision: Decision
    loss: torch.Tensor | None
    lowest: float | None
    every: bool
    replay: bool


@dataclass(frozen=True)
class _Seen:
    """What one rank found. weights: (number of the part, name, count, index); gradients, again: names of parameters whose
    reduced gradient is bad in the attempt and when computed again, with the index. losses: of each micro-batch computed
    again. same: whether the sum has the same bits. squares: whether it can be summed in squares."""

    weights: list[tuple[int, str, int, tuple[int, ...]]]
    gradients: list[tuple[str, tuple[int, ...]]]
    lost: bool
    rows: list[list[int]]
    sights: list[Sight]
    again: list[tuple[str, tuple[int, ...]]]
    losses: list[float]
    same: bool
    squares: bool


def explain(engine: Engine, wire: Wire, attempt: Attempt, again: Again, rehearsing: _Context) -> Report:
    """Collective. The cause of a skipped attempt, whose gradients are still there; they are gone afterwards, and nothing
    else has changed. rehearsing: context in which the attempt's rehearsed faults strike again."""
    batch = attempt.batch
    gradients = _bad_gradients(engine)
    lost = attempt.loss is not None and not torch.isfinite(attempt.loss).item()
    trace = Trace(engine, batch.micros)
    repeated: list[tuple[str, tuple[int, ...]]] = []
    same = squares = True
    if attempt.replay:
        engine.clear()
        with _aside(engine, wire, trace.wired, rehearsing):
            loss = _computed(engine, again, attempt.decision.scale, trace)
        repeated = _bad_gradients(engine)
        squares = bool(torch.isfinite(square_sum(engine.gradients())).item())
        same = attempt.loss is None or _bits(loss) == _bits(attempt.loss)
        engine.clear()
    rows = [[int(row) for row in micro.rows] for micro in batch.micros]
    mine = _Seen(_bad_weights(engine), gradients, lost, rows, trace.sights, repeated, trace.losses, same, squares)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    cause = _cause(ranks, attempt)
    cured = None
    if attempt.replay and cause.in_backward and attempt.lowest is not None:
        cured = _finite_at(engine, wire, attempt, again, attempt.lowest, rehearsing)
    return _report(cause, ranks, attempt, cured)


def _computed(engine: Engine, again: Again, scale: float, trace: Trace) -> torch.Tensor:
    trace.start()
    try:
        return again(scale, trace)[0]
    finally:
        trace.stop()


def _finite_at(engine: Engine, wire: Wire, attempt: Attempt, again: Again, scale: float, rehearsing: _Context) -> bool:
    """Collective. Whether the same window has a finite loss and finite gradients at another scale."""
    with _aside(engine, wire, None, rehearsing):
        loss = _computed(engine, again, scale, Trace(engine, attempt.batch.micros, deep=False))
    bad = ~torch.isfinite(square_sum(engine.gradients()) + loss.to(torch.float64))
    flag = bad.to(torch.float32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    engine.clear()
    return flag.item() == 0


@contextlib.contextmanager
def _aside(engine: Engine, wire: Wire, watch: Any, rehearsing: _Context) -> Iterator[None]:
    """What is computed in it leaves no trace: generators, buffers, counts of the wire. Nothing compiled, which has no hooks."""
    device = next((part.tensor.device for part in engine.parts if part.tensor.device.type == "cuda"), None)
    states = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device is not None else None
    buffers = [(owner._buffers, key, value, value.clone()) for owner in engine.module.modules()
               for key, value in owner._buffers.items() if value is not None]  # fmt: skip
    try:
        with wire.aside(watch), rehearsing(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for held, key, value, kept in buffers:
            value.copy_(kept)
            held[key] = value
        torch.set_rng_state(states[0])
        if device is not None and states[1] is not None:
            torch.cuda.set_rng_state(states[1], device)


def _bits(value: torch.Tensor) -> bytes:
    return struct.pack("<d", float(value.item()))


def _bad_weights(engine: Engine) -> list[tuple[int, str, int, tuple[int, ...]]]:
    found = []
    for number, part in enumerate(engine.parts):
        if not math.isfinite(magnitude(part.tensor)):
            bad = look_at(part.tensor)
            found.append((number, part.name, bad.count, _whole_index(part, bad.index)))
    return found


def _bad_gradients(engine: Engine) -> list[tuple[str, tuple[int, ...]]]:
    parts = [part for part in engine.parts if part.trainable]
    pairs = zip(parts, engine.gradients(), strict=True)
    return [
        (part.name, _whole_index(part, look_at(gradient).index))
        for part, gradient in pairs
        if not math.isfinite(magnitude(gradient))
    ]


def _whole_index(part: Part, local: tuple[int, ...]) -> tuple[int, ...]:
    """The index in the whole parameter."""
    if part.flat:
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(part.start + local[0]), part.shape))
    return (part.start + local[0], *local[1:]) if local else ()


# -- one report --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cause:
    """kind: one of STAGES, or weight (a master), norm, none (the replay was clean), unknown (there was none)."""

    kind: str
    rank: int
    sight: Sight | None = None
    places: int = 0  # ranks x micro-batches that show the same

    @property
    def in_backward(self) -> bool:
        return self.kind in ("backward", "addend", "wire", "sum", "norm")


def _cause(ranks: list[_Seen], attempt: Attempt) -> _Cause:
    sights = [(sight, rank) for rank, seen in enumerate(ranks) for sight in seen.sights]
    forward = sorted((s.micro, s.order, rank, s) for s, rank in sights if s.in_forward) if sights else []
    weights = sorted((entry[0], rank) for rank, seen in enumerate(ranks) for entry in seen.weights)
    if weights:
        shown = forward[0] if forward else None
        return _Cause("weight", weights[0][1], shown[3] if shown else None, len(forward))
    if forward:
        return _Cause(forward[0][3].stage, forward[0][2], forward[0][3], len(forward))
    if not attempt.replay:
        return _Cause("unknown", _showing(ranks))
    for stage in STAGES[STAGES.index("backward") :]:
        found = sorted((s.micro, s.order, rank, s) for s, rank in sights if s.stage == stage)
        if found:
            return _Cause(stage, found[0][2], found[0][3], len(found))
    for rank, seen in enumerate(ranks):
        if seen.again:
            return _Cause("sum" if len(ranks) > 1 else "addend", rank)
    if not all(seen.squares for seen in ranks):
        return _Cause("norm", next(rank for rank, seen in enumerate(ranks) if not seen.squares))
    return _Cause("none", _showing(ranks))


def _showing(ranks: list[_Seen]) -> int:
    """Without a cause, the first rank whose loss is bad, else the first that holds a bad gradient."""
    lost = [rank for rank, seen in enumerate(ranks) if seen.lost]
    return (lost or [rank for rank, seen in enumerate(ranks) if seen.gradients] or [0])[0]


def _report(cause: _Cause, ranks: list[_Seen], attempt: Attempt, cured: bool | None) -> Report:
    sight = cause.sight
    # A gradient that travels once a window has no micro-batch of its own.
    micro = (
        None if sight is None or (not attempt.every and sight.stage in ("addend", "wire", "sum")) else sight.micro + 1
    )
    lower = False if cause.kind in ("weight", "parameter", "forward", "loss") else cured
    bad_loss = attempt.decision.reason is Reason.LOSS
    reproduced = attempt.replay and cause.kind != "none"
    facts: dict[str, Any] = {"kind": cause.kind, "bad_loss": bad_loss, "lower_scale": lower, "replayed": attempt.replay,
                             "reproduced": reproduced, "same_loss": all(seen.same for seen in ranks)}  # fmt: skip
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


def _lines(cause: _Cause, ranks: list[_Seen], attempt: Attempt, micro: int | None, lower: bool | None) -> list[str]:
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
    return [*head, _cure(cause, attempt, lower)]


def _detail(sight: Sight, before: str) -> str:
    text = f"{sight.value} in {sight.tensor} at {list(sight.index)} ({sight.count} of {sight.elements} elements, {sight.dtype})"
    sides = [f"{size:.3g} {side}" for size, side in ((sight.into, "in"), (sight.out_of, "out")) if math.isfinite(size)]
    text += f"; largest finite magnitude {', '.join(sides)}" if sides else ""
    return text + (f"; {before} {called(sight.last_good)} was finite" if sight.last_good else "")


def _gradients(cause: _Cause, ranks: list[_Seen], where: str) -> list[str]:
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


def _cure(cause: _Cause, attempt: Attempt, lower: bool | None) -> str:
    sight = cause.sight
    if lower is False and not cause.in_backward:
        text = "a lower loss scale cannot cure it"
        if sight is not None and cause.kind != "weight" and sight.dtype == "float16":
            text += (". In fp16 that is an overflow past 65504: compute in bf16 or keep that module in FP32 with"
                     " precision.keep_fp32")  # fmt: skip
        return text
    if lower is None:
        used = "it is at its lowest" if attempt.decision.scale != 1.0 else "there is none below 1"
        return f"a lower loss scale cannot cure it: {used}"
    if lower:
        return f"a lower loss scale cures it: at {attempt.lowest:g} the same window is finite"
    return f"a lower loss scale cannot cure it: at {attempt.lowest:g} the same window is not finite either"


def _unexplained(cause: _Cause, ranks: list[_Seen], attempt: Attempt, tokens: str) -> list[str]:
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
        return [head, "the window was not computed again (track.replay = off)"]
    return [head, "the replay was clean: not reproducible, suspect hardware or a race"]
