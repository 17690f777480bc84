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
class Group:
    """Parameters that are gathered and reduced together. Bytes say so; the rest are elements of those that train.

    copies: bytes unsharded, in the dtypes that compute. cast: bytes of this rank's share in them, 0 where masters are sent
    as they are. made: bytes of the gradients that backward makes. largest: of one parameter.
    """

    copies: int = 0
    cast: int = 0
    made: int = 0
    elements: int = 0
    padded: int = 0
    held: int = 0
    largest: int = 0


@dataclass(frozen=True)
class Groups:
    """All of a model. frozen: bytes of frozen shards; whole_*: unsharded bytes of copies that train or are frozen."""

    root: Group
    blocks: tuple[Group, ...]
    elements: int
    held: int
    largest: int  # of one parameter on this rank, trained or not
    frozen: int
    whole_trained: int
    whole_frozen: int


def groups(asked: Asked, arch: Arch) -> Groups:
    key = ("groups", asked.shard_size, asked.compute, asked.master, asked.freeze, asked.keep_fp32)
    found: Groups = memo(arch, key, lambda: _groups(asked, arch))
    return found


def _groups(asked: Asked, arch: Arch) -> Groups:
    trained = {p.name for p in arch.split(asked.freeze)[0]} if asked.freeze else None
    root: list[Param] = []
    blocks: list[list[Param]] = [[] for _ in range(arch.layers)]
    for p in arch.params:
        (blocks[p.block] if p.block >= 0 else root).append(p)
    known: dict[tuple[object, ...], Group] = {}
    found = []
    for block in blocks:
        key = tuple(
            (p.shape, trained is None or p.name in trained, _item(asked, p) if asked.keep_fp32 else 0) for p in block
        )
        if key not in known:
            known[key] = _group(asked, block, trained)
        found.append(known[key])
    first = _group(asked, root, trained)
    every = (first, *found)
    frozen = [p for p in arch.params if trained is not None and p.name not in trained]
    whole = sum(_item(asked, p) * p.count for p in frozen)
    return Groups(
        root=first,
        blocks=tuple(found),
        elements=sum(g.elements for g in every),
        held=sum(g.held for g in every),
        largest=max(held(p, asked.shard_size) for p in (*root, *blocks[0], *blocks[-1])),
        frozen=sum(_item(asked, p) * held(p, asked.shard_size) for p in frozen),
        whole_trained=sum(g.made for g in every),
        whole_frozen=whole,
    )


def _group(asked: Asked, params: Iterable[Param], trained: set[str] | None) -> Group:
    n = asked.shard_size
    copies = cast = made = elements = padded = mine = largest = 0
    for p in params:
        item, share = _item(asked, p), held(p, n)
        copies += item * share * n
        trains = trained is None or p.name in trained
        if item < 4:
            cast += item * share
        if trains:
            made += item * p.count
            elements += p.count
            padded += share * n
            mine += share
            largest = max(largest, p.count)
    return Group(copies, cast, made, elements, padded, mine, largest)


def _item(asked: Asked, p: Param) -> int:
    return 4 if module_matches(p.name, asked.keep_fp32) else bytes_of(asked.compute)
