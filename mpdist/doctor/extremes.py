"""How large activations become, module by module, and which modules FP16 can only compute in FP32."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpdist.errors import MpdistError
from mpdist.model import find_blocks
from mpdist.precision import outside_fp16
from mpdist.trace import floats

if TYPE_CHECKING:
    from mpdist.doctor.trial import Trial

LIMIT = torch.finfo(torch.float16).max
_MASK = -1e30  # masks are added in as the most negative number of their dtype, or -inf


@dataclass
class Extremes:
    """The largest magnitude that entered and left each module, over all ranks and steps; `around` a trial's steps.

    weights: parameters with a value beyond FP16, before the first step. holders: modules that hold blocks of the model,
    which cannot be kept in FP32 (the root is "").
    """

    into: dict[str, float] = field(default_factory=dict)
    out_of: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    holders: frozenset[str] = frozenset({""})

    @contextlib.contextmanager
    def around(self, trial: Trial) -> Iterator[None]:
        """Collective."""
        root, device = trial.parts.module, trial.device
        modules = {name: module for name, module in root.named_modules() if name}
        blocks = {id(block) for block in find_blocks(root)}
        self.holders = frozenset({"", *(name for name, module in modules.items() if _holds(module, blocks))})
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, outside_fp16((p.name, p.tensor) for p in trial.parts.engine.parts))
        self.weights = dict(sorted(entry for rank in everywhere for entry in rank))
        seen = torch.zeros(len(modules), 2, device=device)
        handles = []
        for row, module in zip(seen, modules.values(), strict=True):
            handles.append(module.register_forward_pre_hook(_entering(row), with_kwargs=True))
            handles.append(module.register_forward_hook(_leaving(row)))
        try:
            yield
        except MpdistError:  # the same on all ranks; after anything else they are no longer together
            self._gather(modules, seen)
            raise
        finally:
            for handle in handles:
                handle.remove()
        self._gather(modules, seen)

    def _gather(self, modules: Collection[str], seen: Tensor) -> None:
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        for name, (into, out_of) in zip(modules, seen.tolist(), strict=True):
            self.into[name], self.out_of[name] = into, out_of

    def largest(self) -> tuple[str, float]:
        """The module with the largest output or input, and how large it is."""
        both = {name: max(self.into[name], self.out_of[name]) for name in self.into}
        return max(both.items(), key=lambda item: item[1], default=("", 0.0))


def _holds(module: nn.Module, blocks: set[int]) -> bool:
    return any(id(part) in blocks for part in module.modules() if part is not module)


def _magnitude(tensor: Tensor) -> Tensor:
    """FP32, without a wait. What masks does not count, nor does NaN: that a trial is not finite is told elsewhere."""
    values = torch.where(tensor.detach() > _MASK, tensor.detach(), 0.0)
    return values.abs().amax().float()


def _entering(row: Tensor) -> Any:
    def look(_: nn.Module, args: Any, kwargs: Any) -> None:
        for _label, tensor in floats((*args, kwargs)):
            row[0] = torch.maximum(row[0], _magnitude(tensor))

    return look


def _leaving(row: Tensor) -> Any:
    def look(_: nn.Module, __: Any, output: Any) -> None:
        for _label, tensor in floats(output):
            row[1] = torch.maximum(row[1], _magnitude(tensor))

    return look


def above(name: str) -> str:
    """The module that holds this one."""
    return name.rpartition(".")[0]


def container(name: str, out_of: Mapping[str, float], holders: Collection[str]) -> str | None:
    """The innermost module, from `name` outwards, whose own output FP16 can hold: what leaves a module that is kept in FP32
    is cast back. None where that would be one that holds blocks: the residual stream itself is too large."""
    while name not in holders:
        if out_of.get(name, 0.0) <= LIMIT and name in out_of:
            return name
        name = above(name)
    return None


def to_keep(into: Mapping[str, float], out_of: Mapping[str, float], holders: Collection[str]) -> list[str] | None:
    """The fewest modules to keep in FP32 so that FP16 need not hold what it cannot; None where no such modules exist.

    An output beyond the limit has to be made and used inside a kept module. So has an input; what makes it lies beside
    the module, in the one that holds both.
    """
    wanted: set[str] = set()
    begin = {above(name) for name, size in into.items() if size > LIMIT}
    begin |= {above(name) for name, size in out_of.items() if size > LIMIT}
    for name in begin:
        found = container(name, out_of, holders)
        if found is None:
            return None
        wanted.add(found)
    return outermost(wanted)


def outermost(names: Collection[str]) -> list[str]:
    """Without those that lie inside another one."""
    return sorted(name for name in names if not any(name.startswith(f"{other}.") for other in names))
