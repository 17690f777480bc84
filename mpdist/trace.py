"""A window under watch: where in forward, backward or reduction a value that is not finite arises first.

For windows that are computed again after a bad verdict; nothing here runs otherwise. Three places are watched:

* forward: what enters and leaves each module, and each module's own parameters as it computes with them;
* backward: what enters and leaves each node of autograd's graph. Hooks on nodes leave graph and order of additions as they
  are, which a module's backward hooks do not; a node belongs to the innermost module that was running when it was made,
  by autograd's own sequence numbers;
* the wire: what a rank hands to a reduction, before and after the cast to the wire's dtype.

Everything is kept on this rank as plain values (`Sight`); mpdist.diagnose makes one report of all ranks' sights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpdist.feed import Micro
from mpdist.shard import Engine

STAGES = ("parameter", "forward", "loss", "backward", "addend", "wire", "sum")
"""What can be bad first; addend: a whole gradient as this rank hands it over; wire: only after the cast to the wire's dtype."""

_PIECE = 2**20  # elements looked at together
_FORWARD = STAGES.index("backward")


@dataclass(frozen=True)
class Sight:
    """The first non-finite value that one rank saw at one stage of one micro-batch.

    order: when, among the looks of this micro-batch. module: where it arose, "" for the whole model. tensor: in words.
    index: of its first non-finite element; value: nan, inf or -inf; count: how many of `elements`. rows: the samples that
    it lies in, row numbers of the data. last_good: the module that was finite right before. into, out_of: largest finite
    magnitudes on both sides of where it arose, nan where unknown.
    """

    stage: str
    micro: int
    order: int
    module: str
    tensor: str
    op: str
    index: tuple[int, ...]
    value: str
    count: int
    elements: int
    dtype: str
    rows: tuple[int, ...]
    last_good: str
    into: float
    out_of: float

    @property
    def in_forward(self) -> bool:
        return STAGES.index(self.stage) < _FORWARD


@dataclass(frozen=True)
class Bad:
    """A tensor's non-finite elements. masking: all are -inf, as masks have them."""

    index: tuple[int, ...]
    value: str
    count: int
    largest: float
    masking: bool


def magnitude(tensor: Tensor) -> float:
    """The largest magnitude, not finite if any element is not; no copy of the tensor is made."""
    if not tensor.numel():
        return 0.0
    tensor = tensor.detach()
    low, high = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
    return max(abs(low.item()), abs(high.item()))


def look_at(tensor: Tensor) -> Bad:
    """All about a tensor that has non-finite elements, in pieces."""
    first, count, largest, minus = -1, 0, 0.0, 0
    flat = tensor.detach().reshape(-1)
    for number, piece in enumerate(flat.split(_PIECE)):
        wrong = ~torch.isfinite(piece)
        found = int(wrong.sum())
        if found:
            if first < 0:
                first = number * _PIECE + int(wrong.nonzero()[0, 0])
            count += found
            minus += int((piece == -math.inf).sum())
        largest = max(largest, magnitude(piece.masked_fill(wrong, 0.0)))
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), tensor.shape)) if tensor.dim() else ()
    return Bad(index, str(flat[first].item()), count, largest, minus == count)


def floats(value: Any, label: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors in what enters or leaves a module, each with where it stands."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel() and not value.is_meta:
            yield label, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from floats(item, f"{label} {key}".strip())
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from floats(item, f"{label} {number}".strip())


class Trace:
    """Watches the micro-batches of one window on this rank, between `start` and `stop`. `sights` is what it saw.

    deep: look at modules and nodes too; else only count what is bad (`losses`, and the reduced gradients by the caller).
    broken: the error that has ended the watch, "" for none. A look must not end the run.
    """

    def __init__(self, engine: Engine, micros: list[Micro], deep: bool = True) -> None:
        self.sights: list[Sight] = []
        self.losses: list[float] = []  # of each micro-batch, this rank's sum
        self.broken = ""
        self._engine, self._micros, self._deep = engine, micros, deep
        self._handles: list[Any] = []
        self._on_nodes: list[Any] = []
        self._now = 0
        self._forget()

    def _forget(self) -> None:
        for handle in self._on_nodes:  # a parameter's node outlives its graph
            handle.remove()
        self._on_nodes = []
        self._order = 0
        self._seen: dict[str, Sight] = {}  # of this micro-batch, by half: forward, backward, reduction
        self._open: list[tuple[str, int, float]] = []
        self._spans: list[tuple[int, int, str]] = []
        self._nodes: list[Any] = []
        self._passed: list[int] = []  # nodes that have run, all finite
        self._names: dict[int, str] = {}
        self._last_good = ""
        self._in_forward = True

    def start(self) -> None:
        if not self._deep:
            return
        for name, module in self._engine.module.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leaving(name)))

    def stop(self) -> None:
        self._keep()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget()

    def micro(self, number: int) -> None:
        """Before the forward of micro-batch `number`, from 0."""
        self._keep()
        self._forget()
        self._now = number

    def _keep(self) -> None:
        self.sights += self._seen.values()
        self._seen = {}

    def _guarded(self, look: Callable[..., None]) -> Callable[..., None]:
        def safe(*args: Any) -> None:
            if self.broken:
                return
            try:
                look(*args)
            except Exception as error:
                self.broken = f"{type(error).__name__}: {error}".splitlines()[0]

        return safe

    # -- forward ----------------------------------------------------------------------------------------------

    def _entering(self, name: str) -> Any:
        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._in_forward:  # a checkpointed block is computed again
                return
            self._order += 1
            into = 0.0
            for label, tensor in floats((*args, kwargs)):
                size = magnitude(tensor)
                if math.isfinite(size):
                    into = max(into, size)
                    continue
                bad = look_at(tensor)
                into = max(into, bad.largest)
                if bad.masking and not tensor.requires_grad:
                    continue
                outer = self._open[-1][0] if self._open else name
                came = self._open[-1][2] if self._open else math.nan
                what = f"input {label} of {called(name)}"
                self._see("forward", outer, what, tensor, bad, into=came, out_of=bad.largest)
            self._parameters(name, module, into)
            self._open.append((name, torch._C._autograd._get_sequence_nr(), into))

        return self._guarded(look)

    def _parameters(self, name: str, module: nn.Module, into: float) -> None:
        for key, param in module._parameters.items():
            if param is None or type(param.data) is not Tensor or not param.is_floating_point():
                continue
            if not math.isfinite(magnitude(param)):
                bad = look_at(param)
                what = f"parameter {f'{name}.{key}'.lstrip('.')}"
                self._see("parameter", name, what, param, bad, into=into, out_of=bad.largest, own=True)

    def _leaving(self, name: str) -> Any:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            if not self._in_forward or not self._open:
                return
            self._order += 1
            own, begin, into = self._open.pop()
            self._spans.append((begin, torch._C._autograd._get_sequence_nr(), own))
            good = True
            for label, tensor in floats(output):
                if not math.isfinite(magnitude(tensor)):
                    good, bad = False, look_at(tensor)
                    what = f"output{f' {label}' if label else ''}"
                    self._see("forward", name, what, tensor, bad, into=into, out_of=bad.largest)
            if good:
                self._last_good = name

        return self._guarded(look)

    def forwarded(self, objective: Tensor, loss: Tensor) -> None:
        """After a forward, before its backward. loss: this micro-batch's sum on this rank."""
        self.losses.append(loss.item())
        if self._deep:
            self._guarded(self._forwarded)(objective, loss)

    def _forwarded(self, objective: Tensor, loss: Tensor) -> None:
        seen = self._seen.get("forward")
        if seen is not None and math.isfinite(self.losses[-1]) and (seen.value == "-inf" or seen.elements == 1):
            del self._seen["forward"]  # a mask that a module made, or the loss times a scale that is too large for it
        if not math.isfinite(self.losses[-1]):
            self._see("loss", "", "the loss", loss, look_at(loss))
        elif not math.isfinite(objective.item()):
            self._see("backward", "", "the loss times its scale", objective, look_at(objective))
        self._in_forward = False
        self._names = {id(leaf): name for name, leaf in self._engine.leaves().items() if leaf is not None}
        self._follow(objective)

    # -- backward ---------------------------------------------------------------------------------------------

    def _follow(self, objective: Tensor) -> None:
        todo, known = [objective.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in known:
                continue
            known.add(node)
            todo.extend(following for following, _ in node.next_functions)
            number = len(self._nodes)
            self._nodes.append(node)
            if getattr(node, "variable", None) is not None:
                self._on_nodes.append(node.register_prehook(self._arriving(number)))
            else:
                self._on_nodes.append(node.register_hook(self._running(number)))

    def _arriving(self, number: int) -> Any:
        """At a parameter: the sum of what its uses gave it."""

        def look(incoming: tuple[Tensor | None, ...]) -> None:
            if "backward" not in self._seen and incoming[0] is not None and not math.isfinite(magnitude(incoming[0])):
                name = self._names.get(id(self._nodes[number].variable), "a parameter")
                bad = look_at(incoming[0])
                what = f"the sum of gradients of {name}"
                self._see("backward", name.rpartition(".")[0], what, incoming[0], bad, out_of=bad.largest, own=True)

        return self._guarded(look)

    def _running(self, number: int) -> Any:
        def look(outgoing: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
            if "backward" in self._seen:
                return
            self._order += 1
            node = self._nodes[number]
            into = 0.0
            for tensor in incoming:
                if tensor is None or not tensor.is_floating_point():
                    continue
                size = magnitude(tensor)
                if not math.isfinite(size):  # what gave the parts was finite
                    bad = look_at(tensor)
                    what = "the sum of gradients of its output"
                    self._see("backward", self._module(node), what, tensor, bad, node.name(), out_of=bad.largest)
                    return
                into = max(into, size)
            for place, tensor in enumerate(outgoing):
                if tensor is None or not tensor.is_floating_point() or math.isfinite(magnitude(tensor)):
                    continue
                bad, param = look_at(tensor), self._parameter(node, place)
                what = f"the gradient of {param}" if param else f"the gradient of input {place}"
                module = self._module(node)
                self._see("backward", module, what, tensor, bad, node.name(), into, bad.largest, own=bool(param))
                return
            self._passed.append(number)

        return self._guarded(look)

    def _module(self, node: Any) -> str:
        """The innermost module that was running when the node was made."""
        made = node._sequence_nr()
        around = [(begin, -end, name) for begin, end, name in self._spans if begin <= made < end]
        return max(around)[2] if around else ""

    def _parameter(self, node: Any, place: int) -> str | None:
        """The parameter that this gradient goes to, through nothing but casts and changes of shape."""
        following = node.next_functions[place][0] if place < len(node.next_functions) else None
        while following is not None and getattr(following, "variable", None) is None:
            if len(following.next_functions) != 1 or following.name().partition("Backward")[0] not in _SHAPING:
                return None
            following = following.next_functions[0][0]
        return self._names.get(id(following.variable)) if following is not None else None

    def _before(self) -> str:
        """In backward order, the module before the one where it went wrong."""
        here = self._module(self._nodes[self._passed[-1]]) if self._passed else ""
        return next((m for n in reversed(self._passed) if (m := self._module(self._nodes[n])) not in ("", here)), here)

    # -- reduction --------------------------------------------------------------------------------------------

    def wired(self, stage: str, tensor: Tensor) -> None:
        """Told by the wire, see mpdist.reduce."""
        self._guarded(self._wired)(stage, tensor)

    def _wired(self, stage: str, tensor: Tensor) -> None:
        if "reduction" not in self._seen and not math.isfinite(magnitude(tensor)):
            bad = look_at(tensor)
            self._see(stage, "", "a gradient", tensor, bad, out_of=bad.largest, own=True)

    # -- all --------------------------------------------------------------------------------------------------

    def _see(self, stage: str, module: str, what: str, tensor: Tensor, bad: Bad, op: str = "", into: float = math.nan,
             out_of: float = math.nan, own: bool = False) -> None:  # fmt: skip
        """own: a tensor of a parameter's shape, in which no samples can be told apart."""
        half = "reduction" if stage in ("addend", "wire", "sum") else "backward" if stage == "backward" else "forward"
        if half in self._seen:
            return
        good = self._before() if half == "backward" else self._last_good
        rows = self._rows(tensor) if not own else tuple(self._micros[self._now].rows.tolist())
        self._seen[half] = Sight(
            stage, self._now, self._order, module, what, op, bad.index, bad.value, bad.count, tensor.numel(),
            str(tensor.dtype).removeprefix("torch."), rows, good, into, out_of,
        )  # fmt: skip

    def _rows(self, tensor: Tensor) -> tuple[int, ...]:
        """The samples with a non-finite element, where the tensor's first dimension tells them apart; else all of them."""
        micro = self._micros[self._now]
        batch, length = micro.input_ids.shape
        everyone = tuple(int(row) for row in micro.rows)
        if not tensor.dim() or len(tensor) not in (batch, batch * length, len(micro.index)):
            return everyone
        wrong = (~torch.isfinite(tensor.detach())).reshape(len(tensor), -1).any(1).nonzero()[:, 0]
        if len(tensor) == batch:
            places = wrong
        elif len(tensor) == batch * length:
            places = wrong // length
        else:
            places = micro.index[wrong] // length
        found = sorted(set(places.tolist()))
        return tuple(everyone[place] for place in found if place < len(everyone))


_SHAPING = {"T", "Transpose", "View", "UnsafeView", "Reshape", "ToCopy", "Expand", "Permute", "Unsqueeze", "Squeeze"}


def called(module: str) -> str:
    return module or "the model"
