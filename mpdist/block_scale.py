"""A scale for each residual block inside the window's loss scale: for FP16 in models so deep that no one scale fits all.

Backward of block i runs at S * s_i, where S is the window's scale and s_i a power of two: an identity on the hidden state
that enters the block multiplies what comes back through it by s_(i-1) / s_i, and one behind the last block takes the
gradient from S to S * s_last. A product with a power of two is exact, so no number changes but those that FP16 would have
flushed or overflowed. What runs behind the blocks (norm, head) stays at S. What runs before them (embeddings) shares block
0's scale, or stays at S where it shares a weight with what runs behind them.

Per window the largest magnitudes of each block decide its next scale, on the device and the same on every rank: of the
gradients that enter and leave its backward, over all micro-batches, and of its weights' gradients. The largest is brought
to at least 2^9 and below 2^10, six powers of two under FP16's end, at once where the scale has to fall and by 2 a window
where it may rise; a block of which nothing is left rises with the one above it. After an overflow the scale of the block
where it arose, and of all whose backward ran on it, is 2^4 smaller; where it arose in a block, the window's own scale stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpdist.errors import UsageError
from mpdist.shard import Part
from mpdist.trace import floats

TARGET = 10  # largest magnitudes lie in [2^9, 2^10)
RISE, FALL = 1, 4  # powers of two in one window: where all is well, after an overflow
LARGEST = 60  # scales stay in [2^-60, 2^60], so that ratios of two, and what undoes one, are normal FP32 numbers
_NOTHING = -(2**20)  # the height of what was zero or not finite
_KEY = "precision.scale.per_block = true"


class _Boundary(torch.autograd.Function):
    """The hidden state between two blocks, as it is; its gradient passes `BlockScale.crossed`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, owner: BlockScale, position: int) -> Tensor:
        ctx.owner, ctx.position = owner, position
        return hidden

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.owner.crossed(ctx.position, gradients[0]), None, None


class BlockScale:
    """The scales of a model's n blocks, as powers of two on the device. Position i < n is the input of block i, position n
    the output of the last one; a gradient is measured before it crosses.

    A window: `begin`, forwards and backwards (in the session's first window `look` between them), `close`, then `unscale`
    where it is applied. `of_parts` and `figures` tell of the last window begun.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
        """Puts hooks on the blocks, outside of checkpointing and compilation, before an engine puts its own. Raises UsageError
        where the model has no blocks, or two of them share a parameter."""
        if not blocks:
            raise UsageError(_KEY, "the model has no list of blocks", "take it out")
        known = {id(module): name for name, module in model.named_modules()}
        self.names = [known[id(block)] for block in blocks]
        self._refuse_shared(model)
        self._device, self._count = device, len(blocks)
        self._next = 0  # the block that has to come in this forward
        self._apart = False  # what runs before the blocks shares no weight with what runs behind them
        self._exponents = self._used = torch.zeros(len(blocks), dtype=torch.int32, device=device)
        self._peaks = torch.zeros(len(blocks) + 1, dtype=torch.float32, device=device)
        # Of each trainable part: its name, whether this rank holds nothing of it, and its slot. That is its block, n for
        # what runs behind the blocks, n + 1 for what runs before them at the window's scale.
        self._parts: list[str] = []
        self._empty: list[bool] = []
        self._slots: list[int] = []
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._entering(index), with_kwargs=True)
        self._last = blocks[-1]
        self.begin()

    def _block(self, parameter: str) -> int | None:
        return next((i for i, name in enumerate(self.names) if parameter.startswith(f"{name}.")), None)

    def _refuse_shared(self, model: nn.Module) -> None:
        owners: dict[int, tuple[int | None, str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            first = owners.setdefault(id(param), (self._block(name), name))
            if first[0] != self._block(name):
                raise UsageError(f"{_KEY}, but {name} and {first[1]} are one weight", "its gradients would meet at two scales",
                                 "take it out, or compute in bf16")  # fmt: skip

    def take(self, parts: Sequence[Part]) -> None:
        """The engine's parts, once it has made them and put its own hooks on the blocks."""
        self._last.register_forward_hook(self._leaving)
        self._parts = [part.name for part in parts if part.trainable]
        self._empty = [part.tensor.numel() == 0 for part in parts if part.trainable]
        owners = [self._block(name) for name in self._parts]
        self._place([self._count if owner is None else owner for owner in owners])

    def _place(self, slots: list[int]) -> None:
        self._slots = slots
        held = [slot for slot, empty in zip(slots, self._empty, strict=True) if not empty]
        every = torch.arange(self._count + 2, device=self._device)
        self._of_parts = torch.tensor(slots, dtype=torch.int64, device=self._device)
        self._own = torch.tensor(held, dtype=torch.int64, device=self._device)[None, :] == every[:, None]

    # -- forward and backward -----------------------------------------------------------------------------------

    def _entering(self, index: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            if not torch.is_grad_enabled():
                return None
            if index != self._next:
                raise UsageError(f"{_KEY}, but {self.names[index]} runs where {self.names[self._next]} should",
                                 "scales between blocks hold for one order, in which none is left out",
                                 "take it out, or set the model's layerdrop to 0")  # fmt: skip
            self._next = (index + 1) % self._count
            found = self._carrier(f"enter {self.names[index]}", (args, kwargs), [*args, *kwargs.values()])
            if found is None:
                return None
            crossed = _Boundary.apply(found, self, index)
            return (
                tuple(crossed if value is found else value for value in args),
                {key: crossed if value is found else value for key, value in kwargs.items()},
            )

        return hook

    def _leaving(self, _: nn.Module, __: Any, output: Any) -> Any:
        plain = isinstance(output, Tensor)
        values = [output] if plain else list(output)
        found = self._carrier(f"leave {self.names[-1]}", output, values) if torch.is_grad_enabled() else None
        if found is None:
            return None
        crossed = _Boundary.apply(found, self, self._count)
        return crossed if plain else type(output)(crossed if value is found else value for value in output)

    def _carrier(self, where: str, nest: Any, values: list[Any]) -> Tensor | None:
        """The one tensor of the nest that carries gradients."""
        found = {id(tensor): tensor for _, tensor in floats(nest) if tensor.requires_grad}
        if not found:
            return None
        if len(found) > 1 or not any(id(value) in found for value in values):
            raise UsageError(f"{_KEY}, but {len(found)} tensors that carry gradients {where}",
                             "only the hidden state can be brought from one block's scale to another's",
                             "take it out, or compute in bf16")  # fmt: skip
        return next(iter(found.values()))

    def crossed(self, position: int, gradient: Tensor) -> Tensor:
        """In backward: the gradient at the scale of what comes next. No host waits."""
        low, high = torch.aminmax(gradient)
        place = self._peaks[position]
        torch.maximum(place, torch.maximum(-low, high).float(), out=place)
        if position == 0 and self._apart:
            return gradient
        # Computed in FP32 and rounded once: a ratio may lie outside of FP16's range.
        return torch.mul(gradient, self._ratios[position : position + 1], out=torch.empty_like(gradient))

    # -- a window -----------------------------------------------------------------------------------------------

    def begin(self, again: bool = False) -> None:
        """Before the window's first forward. again: the last window is computed once more, at the scales that it had."""
        if not again:
            self._used = self._exponents
        self._next = 0
        self._peaks.zero_()
        plain = torch.zeros(1, dtype=torch.int32, device=self._device)
        before = torch.cat([plain, self._used])
        self._ratios = power_of_two(before - torch.cat([self._used, plain]))

    def look(self, objective: Tensor, leaves: dict[str, Tensor | None]) -> None:
        """After a forward of the session's first window and before its backward: that gradients reach each block through its
        boundaries alone, and what runs before the blocks. leaves: of the engine.

        Walks autograd's graph once. Raises UsageError naming the parameter that is reached another way.
        """
        names = {id(leaf): name for name, leaf in leaves.items() if leaf is not None}
        reached: dict[int, set[str]] = {}
        roots, owner = [objective.grad_fn], self._count  # whose backward is walked; -1: what runs before the blocks
        while roots:
            found, boundaries = _until_boundaries(roots)
            reached[owner] = {names[leaf] for leaf in found if leaf in names}
            wanted = None if owner in (-1, self._count) else owner
            odd = sorted(name for name in reached[owner] if self._block(name) != wanted)
            early = [node for node in boundaries if node.position != owner]
            if odd or early:
                what = odd[0] if odd else self.names[min(early[0].position, self._count - 1)]
                here = self.names[wanted] if wanted is not None else "what runs around the blocks"
                raise UsageError(f"{_KEY}, but gradients reach {what} from {here} past the blocks between",
                                 "they would arrive there at another block's scale",
                                 "take it out, or compute in bf16")  # fmt: skip
            roots, owner = [edge for node in boundaries for edge, _ in node.next_functions], owner - 1
        front, tail = reached.get(-1, set()), reached[self._count]
        self._apart = not front & tail
        place = 0 if self._apart else self._count + 1
        pairs = zip(self._parts, self._slots, strict=True)
        self._place([place if name in front else slot for name, slot in pairs])

    def close(self, gradients: list[Tensor]) -> Tensor:
        """Collective. The scales of the next window, from this one's summed gradients, which stay as they are.

        gradients: in the order of the engine's trainable parts, at the window's scale times their block's. Returns a scalar
        FP32: 1 where blocks have overflowed and nothing else has, and lower scales of theirs are to come.
        """
        seen = torch.cat([self._peaks, self._largest(gradients)])
        seen = torch.nan_to_num(seen, nan=math.inf, posinf=math.inf)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        peaks, weights = seen.split([self._count + 1, self._count + 2])
        self._exponents, blamed = judge(peaks, weights, self._used)
        return blamed.float()

    def _largest(self, gradients: list[Tensor]) -> Tensor:
        """[n + 2]: the largest magnitude of each slot's gradients on this rank."""
        held = [gradient for gradient, empty in zip(gradients, self._empty, strict=True) if not empty]
        if not held:
            return torch.zeros(self._count + 2, device=self._device)
        sizes = torch.stack(torch._foreach_norm(held, math.inf, dtype=torch.float32)).to(self._device)
        return torch.where(self._own, sizes[None, :], 0.0).amax(dim=1)

    def _factors(self) -> Tensor:
        """[n + 2] FP32: the scales of the slots."""
        return torch.cat([power_of_two(self._used), torch.ones(2, device=self._device)])

    def of_parts(self) -> Tensor:
        """[parts] FP32: what each trainable part's gradient is multiplied by, beside the window's scale."""
        return self._factors()[self._of_parts]

    def unscale(self, gradients: list[Tensor], factor: float) -> None:
        """Multiplies each gradient by factor / its block's scale, in place."""
        factors = (factor / self._factors()).to(gradients[0].device)
        for slot in set(self._slots):
            own = [gradient for gradient, place in zip(gradients, self._slots, strict=True) if place == slot]
            torch._foreach_mul_(own, factors[slot])

    # -- what is told and kept ----------------------------------------------------------------------------------

    def figures(self) -> dict[str, float]:
        """Of a logged step; the host waits."""
        low, high = torch.aminmax(self._used)
        return {"scale/block_min": float(low), "scale/block_max": float(high)}

    def fallen(self) -> list[str]:
        """After `close`, the blocks whose scales fell, in backward order: the first one is where it arose. The host waits."""
        lower = (self._exponents < self._used).tolist()
        return [name for name, fell in zip(self.names, lower, strict=True) if fell][::-1]

    def state(self) -> list[int]:
        """The powers of two of the next window's scales; the host waits."""
        return [int(power) for power in self._exponents.tolist()]

    def load(self, state: list[int]) -> None:
        self._exponents = torch.tensor(state, dtype=torch.int32, device=self._device)


def power_of_two(exponents: Tensor) -> Tensor:
    """[...] int32 in [-126, 127] -> FP32, exact on every device, which a device's own power function need not be."""
    return ((exponents.int() + 127) << 23).view(torch.float32)


def judge(peaks: Tensor, weights: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """(the next exponents [n] int32, whether the blocks alone are to blame for this window, a bool scalar).

    peaks: [n + 1] FP32, inf for what is not finite: largest magnitudes at each position, at the scale of the block behind
    it. weights: [n + 2], likewise of the weights' gradients of each block, of what stays at 1 behind them, and before them
    or shared. exponents: [n] int32 of this window.
    """
    count = len(exponents)
    behind = torch.cat([exponents[1:], torch.zeros_like(exponents[:1])])
    heights = (_height(peaks[:-1], exponents), _height(peaks[1:], behind), _height(weights[:count], exponents))
    height = torch.stack(heights).amax(dim=0)
    wanted = _wanted(height, exponents)
    bad, bad_weights = ~torch.isfinite(peaks), ~torch.isfinite(weights)
    order = torch.arange(count, device=exponents.device)
    # Below the block where it arose every gradient is bad, and nothing is known of what would fit there.
    spoilt = (bad[None, :-1] & (order[None, :] >= order[:, None])).any(dim=1)
    fault = (spoilt | bad_weights[:count]) & ~bad[-1]
    lower = torch.minimum(wanted, exponents - FALL)
    well = ~(bad.any() | bad_weights.any())
    after = torch.where(fault, lower, torch.where(well, torch.minimum(wanted, exponents + RISE), exponents))
    after = after.clamp(-LARGEST, LARGEST)
    elsewhere = bad[-1] | bad_weights[count] | (bad_weights[count + 1] & ~bad.any())
    return after, (fault & (after < exponents)).any() & ~elsewhere


def _wanted(height: Tensor, exponents: Tensor) -> Tensor:
    """[n] int32: where each scale should be. A block whose gradients were all zero, which FP16 may have flushed, goes where
    the nearest one above it goes that had some, if that is up."""
    count, seen = len(exponents), height > _NOTHING
    order = torch.arange(count, device=exponents.device)
    above = torch.where(seen[None, :] & (order[None, :] >= order[:, None]), order[None, :], count).amin(dim=1)
    wanted = torch.cat([torch.where(seen, TARGET - height, exponents), torch.full_like(exponents[:1], -LARGEST)])[above]
    return torch.where(seen, wanted, torch.maximum(wanted, exponents))


def _height(sizes: Tensor, exponents: Tensor) -> Tensor:
    """int32 h: size / 2^exponent lies in [2^(h-1), 2^h)."""
    known = torch.isfinite(sizes) & (sizes > 0)
    return torch.where(known, torch.frexp(sizes).exponent - exponents, _NOTHING)


def _until_boundaries(roots: list[Any]) -> tuple[set[int], list[Any]]:
    """Ids of the leaves, and the nodes of boundaries, that a walk from the roots reaches first."""
    todo, known = list(roots), set()
    leaves: set[int] = set()
    boundaries: list[Any] = []
    while todo:
        node = todo.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if isinstance(node, _Boundary._backward_cls):
            boundaries.append(node)
            continue
        if getattr(node, "variable", None) is not None:
            leaves.add(id(node.variable))
        todo.extend(following for following, _ in node.next_functions)
    return leaves, boundaries
