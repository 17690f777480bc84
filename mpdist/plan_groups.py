"""What the parameters of a model take on one rank, group by group: what is in no block, and each block.

torch shards the first dimension of each tensor, rounding up (`torch.chunk`); rank 0 holds the larger share, and what travels
is padded to that share times the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from mpdist.arch import Arch, Param, module_matches
from mpdist.formats import bytes_of
from mpdist.plan_activations import memo

if TYPE_CHECKING:
    from mpdist.plan_memory import Asked


def held(param: Param, shard_size: int) -> int:
    """Elements of a parameter on rank 0: torch shards the first dimension, rounding up."""
    return -(-param.shape[0] // shard_size) * prod(param.shape[1:])


@dataclass(frozen=True)
class Cut:
    """Tensors whose first dimension is this long, so that each of ``on`` ranks holds ``held`` elements of them all and the
    others less or nothing. elements: of them all, unsharded."""

    dimension: int
    tensors: int
    on: int
    elements: int
    held: int

    def text(self, shard_size: int) -> str:
        plural = "s are" if self.tensors > 1 else " is"
        return f"{self.tensors} tensor{plural} cut along a dimension of {self.dimension} over {shard_size} ranks, " + (
            f"on {self.on} of which they lie" if self.on < shard_size else "and the fullest hold more than their part"
        )


def uneven(params: Iterable[Param], shard_size: int) -> list[Cut]:
    """What makes the fullest rank's share of these parameters larger than one of ``shard_size`` equal ones, by the lengths of
    the tensors' first dimensions, most first; without those that add less than a hundredth."""
    alike: dict[int, list[Param]] = {}
    total = 0
    for p in params:
        total += p.count
        if p.shape[0] % shard_size:
            alike.setdefault(p.shape[0], []).append(p)
    found = []
    for dimension, tensors in alike.items():
        mine = sum(held(p, shard_size) for p in tensors)
        on = -(-dimension // -(-dimension // shard_size))
        found.append(Cut(dimension, len(tensors), on, sum(p.count for p in tensors), mine))
    grave = [cut for cut in found if 100 * (cut.held * shard_size - cut.elements) >= total]
    return sorted(grave, key=lambda cut: cut.elements - cut.held * shard_size)


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered and reduced together. Bytes say so; the rest are elements of those that train.

    copies: bytes unsharded, in the dtypes that compute. cast: bytes of this rank's share in them, 0 where masters are sent
    as they are. made: bytes of the gradients that backward makes; copied: of
    those in another dtype than FP32. outer: of `padded`, what no module inside reduces by itself.
    lasting: elements of the last one that trains.
    """

    copies: int = 0
    cast: int = 0
    made: int = 0
    copied: int = 0
    elements: int = 0
    padded: int = 0
    held: int = 0
    outer: int = 0
    lasting: int = 0


@dataclass(frozen=True)
class Groups:
    """All of a model. head: the output head where it is held apart, being kept in FP32; else it is in the root.

    elements, held: of all that train, and this rank's; largest: of one parameter on this rank. frozen: bytes of frozen
    shards. copied: unsharded bytes of what trains and computes in another dtype than FP32; whole_frozen: of frozen copies.
    """

    root: Group
    blocks: tuple[Group, ...]
    head: Group
    elements: int
    held: int
    largest: int
    frozen: int
    copied: int
    whole_frozen: int
    before: tuple[Group, ...] = ()  # all blocks before this one together; one more entry for all of them

    def since(self, block: int) -> Group:
        """The blocks from this one on, and a head that is held apart, together."""
        every, past, head = self.before[-1], self.before[block], self.head
        return Group(elements=every.elements - past.elements + head.elements, held=every.held - past.held + head.held)


def groups(asked: Asked, arch: Arch) -> Groups:
    key = ("groups", asked.shard_size, asked.compute, asked.master, asked.freeze, asked.keep_fp32)
    found: Groups = memo(arch, key, lambda: _groups(asked, arch))
    return found


def _groups(asked: Asked, arch: Arch) -> Groups:
    trained = {p.name for p in arch.split(asked.freeze)[0]} if asked.freeze else None
    apart = asked.engine == "fsdp2" and bytes_of(asked.compute) < 4 and not arch.tied
    root: list[Param] = []
    head: list[Param] = []
    blocks: list[list[Param]] = [[] for _ in range(arch.layers)]
    for p in arch.params:
        if p.block >= 0:
            blocks[p.block].append(p)
        else:
            (head if apart and p.group == "head" and _item(asked, p) == 4 else root).append(p)
    known: dict[tuple[object, ...], Group] = {}
    found = []
    for block in blocks:
        key = tuple((p.shape, trained is None or p.name in trained, _item(asked, p)) for p in block)
        if key not in known:
            known[key] = _group(asked, block, trained)
        found.append(known[key])
    first, last = _group(asked, root, trained), _group(asked, head, trained)
    every = (first, *found, last)
    before = [Group()]
    for group in found:
        past = before[-1]
        before.append(Group(
            copies=past.copies + group.copies, elements=past.elements + group.elements, held=past.held + group.held
        ))  # fmt: skip
    frozen = [p for p in arch.params if trained is not None and p.name not in trained]
    return Groups(
        root=first,
        blocks=tuple(found),
        head=last,
        elements=sum(g.elements for g in every),
        held=sum(g.held for g in every),
        largest=max(held(p, asked.shard_size) for p in arch.params),
        frozen=sum(_item(asked, p) * held(p, asked.shard_size) for p in frozen),
        copied=sum(g.copied for g in every),
        whole_frozen=sum(_item(asked, p) * p.count for p in frozen),
        before=tuple(before),
    )


def _group(asked: Asked, params: Iterable[Param], trained: set[str] | None) -> Group:
    n = asked.shard_size
    copies = cast = made = copied = elements = padded = mine = outer = lasting = 0
    params = list(params)
    mixed = len({_item(asked, p) for p in params}) > 1  # modules kept in FP32 are gathered and reduced by themselves
    for p in params:
        item, share = _item(asked, p), held(p, n)
        copies += item * share * n
        cast += item * share if item < 4 else 0
        if trained is None or p.name in trained:
            made += item * p.count
            copied += item * p.count if item < 4 else 0
            elements += p.count
            lasting = p.count
            padded += share * n
            mine += share
            outer += 0 if mixed and item == 4 else share * n
    return Group(copies, cast, made, copied, elements, padded, mine, outer, lasting)


def _item(asked: Asked, p: Param) -> int:
    return 4 if module_matches(p.name, asked.keep_fp32) else bytes_of(asked.compute)
