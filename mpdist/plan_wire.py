"""Buffers of the wire (see ``reduce.Wire``): what lies beside the addend while gradients are exchanged, in bytes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from mpdist.formats import bytes_of

if TYPE_CHECKING:
    from mpdist.plan_memory import Asked


class Levels(NamedTuple):
    """Ranks that a collective runs over: ``inner`` of them on one node, on ``outer`` nodes."""

    inner: int
    outer: int

    @property
    def size(self) -> int:
        return self.inner * self.outer


@functools.cache
def levels(members: int, stride: int, per_node: int) -> Levels:
    """The group of rank 0: every ``stride``-th rank, ``members`` of them, with ``per_node`` ranks on a node."""
    nodes = {rank * stride // per_node for rank in range(members)}
    return Levels(members // len(nodes), len(nodes))


def shard_levels(asked: Asked) -> Levels:
    return levels(asked.shard_size, 1, asked.ranks // asked.nodes)


def replica_levels(asked: Asked) -> Levels:
    """Of the ranks that hold the same: all of them under ddp."""
    stride = 1 if asked.engine == "ddp" else asked.shard_size
    return levels(asked.ranks // asked.shard_size, stride, asked.ranks // asked.nodes)


def _exchange(asked: Asked, elements: int, ranks: int, room: bool = False) -> int:
    """Reduce-scatter of FP32 addends over one level: what is sent in the wire dtype, what is received.

    room: whether it is received where the move before has received, here and below.
    """
    wire = bytes_of(asked.wire)
    sent = elements * wire if wire < 4 else 0
    if asked.by_backend:
        return sent + (elements // ranks * wire if wire < 4 else 0)
    summed = elements // ranks * wire if asked.sum == "wire" and wire < 4 else 0
    return sent + (0 if room else elements * wire) + summed


def scattering(asked: Asked, elements: int, own: int) -> int:
    """Reduce-scatter of `elements` of which `own` are this rank's: the buffers beside addend and result."""
    group = shard_levels(asked)
    if group.inner == 1 or group.outer == 1:
        return _exchange(asked, elements, group.size)
    # Sorted by node, and a node's sum between the two exchanges.
    return 4 * elements + 4 * elements // group.inner + _exchange(asked, elements, group.inner)


def all_reducing(asked: Asked, elements: int) -> int:
    """All-reduce among replicas: the most that lies beside the addend, which is also the result."""
    return max(_all_reduce(asked, elements, replica_levels(asked)))


def all_reduce_waits(asked: Asked, elements: int) -> int:
    """Of that, what lies there until the result is waited for."""
    return _all_reduce(asked, elements, replica_levels(asked))[1]


def _all_reduce(asked: Asked, elements: int, group: Levels, room: bool = False) -> tuple[int, int]:
    """(while it starts, until it is waited for)."""
    wire = bytes_of(asked.wire)
    cast = elements * wire if wire < 4 else 0
    if group.size == 1:
        return 0, 0
    if group.inner > 1 and group.outer > 1:
        padded = -(-elements // group.inner) * group.inner
        laid = 4 * padded if padded != elements else 0
        part = padded // group.inner
        received = 0 if asked.by_backend else padded * wire
        across = received + max(_all_reduce(asked, part, Levels(1, group.outer), room=received > 0))
        gathered = _gathering(asked, part, group.inner)
        first = laid + 4 * part + max(_exchange(asked, padded, group.inner), across, gathered)
        return first, gathered
    n = group.size
    if asked.by_backend:
        return cast, cast
    if n == 2:
        both = cast + (0 if room else 2 * elements * wire)
        return both, both
    padded = -(-elements // n) * n
    laid = 4 * padded if padded != elements else 0
    part = padded // n
    gathered = _gathering(asked, part, n) - (padded * wire if room else 0)
    return laid + 4 * part + max(_exchange(asked, padded, n, room), gathered), gathered


def _gathering(asked: Asked, part: int, ranks: int) -> int:
    """Sums, gathered in the wire dtype."""
    wire = bytes_of(asked.wire)
    return ranks * part * wire
