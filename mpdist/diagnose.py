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
from typing import Any

import torch
import torch.distributed as dist

from mpdist import cause
from mpdist.checkpoint import rng_states
from mpdist.errors import UsageError
from mpdist.optim import square_sum
from mpdist.precision import Decision, Reason
from mpdist.reduce import Wire
from mpdist.shard import Engine, Part
from mpdist.trace import Trace, look_at, magnitude

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
        urgent = decision.reason is Reason.LOSS or decision.still
        news = urgent and not self._told
        self._told |= urgent
        return self._always or decision.exhausted or first or news or in_a_row % _OFTEN == 0


def explain(engine: Engine, wire: Wire, attempt: cause.Attempt, again: Again, rehearsing: _Context) -> cause.Report:
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
    mine = cause.Seen(
        _bad_weights(engine), gradients, lost, rows, trace.sights, repeated, trace.losses, same, squares, trace.broken
    )
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    found = cause.find(ranks, attempt)
    cured = None
    # Without the drill's fault any scale would do, and the claim would be false.
    rehearsed = found.is_of(attempt.rehearsed)
    if attempt.replay and found.in_backward and attempt.lowest is not None and not rehearsed:
        cured = _finite_at(engine, wire, attempt, again, attempt.lowest)
    return cause.tell(found, ranks, attempt, cured)


def _computed(engine: Engine, again: Again, scale: float, trace: Trace) -> torch.Tensor:
    trace.start()
    try:
        return again(scale, trace)[0]
    finally:
        trace.stop()


def _finite_at(engine: Engine, wire: Wire, attempt: cause.Attempt, again: Again, scale: float) -> bool:
    """Collective. Whether the same window has a finite loss and finite gradients at another scale, as at a retry: there a
    rehearsed overflow is over."""
    with _aside(engine, wire, None, contextlib.nullcontext):
        loss = _computed(engine, again, scale, Trace(engine, attempt.batch.micros, deep=False))
    bad = ~torch.isfinite(square_sum(engine.gradients()).to(loss.device) + loss)
    flag = bad.to(torch.float32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    engine.clear()
    return flag.item() == 0


@contextlib.contextmanager
def _aside(engine: Engine, wire: Wire, watch: Any, rehearsing: _Context) -> Iterator[None]:
    """What is computed in it leaves no trace: generators, buffers, counts of the wire. Nothing compiled, which has no hooks."""
    states = rng_states()
    buffers = [(owner._buffers, key, value, value.clone()) for owner in engine.module.modules()
               for key, value in owner._buffers.items() if value is not None]  # fmt: skip
    try:
        with wire.aside(watch), rehearsing(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for held, key, value, kept in buffers:
            value.copy_(kept)
            held[key] = value
        torch.set_rng_state(states["cpu"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])


def _bits(value: torch.Tensor) -> bytes:
    number = float(value.item())
    return struct.pack("<d", number) if number == number else b"nan"


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
