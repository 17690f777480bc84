"""Gradients over the wire: what dtype travels, in what dtype it is added up, and how many bytes went where.

With ``sum: fp32`` every rank receives its peers' addends in the wire dtype and adds them in FP32, in rank order,
so the rounding is that of one cast per addend and does not grow with the number of ranks. With ``sum: wire`` the
addition itself is done in the wire dtype (by NCCL where it can, else by us in rank order). Nothing is averaged:
the loss carries the whole normalisation.

A gradient that is sharded travels by reduce-scatter: an all-to-all of addends, then the local sum. One that is
replicated travels by all-reduce: between two ranks the addends themselves are exchanged; among more, a
reduce-scatter, then a gather of the sums in the wire dtype. Where the group spans nodes there are two levels:
first inside a node, then between nodes, with an FP32 sum at each, so that between nodes one node sends no more
than a ring would.

Payload is what this rank hands to a collective, its own part included; `Bytes` counts it by level.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mpdist.cast import lost
from mpdist.dist import Level, Mesh

# torch 2.13 renamed the call and warns about the old name.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_PIECE = 2**18  # elements of a sample that are looked at together


@dataclass
class Bytes:
    """Payload bytes that this rank handed to gradient collectives since the last `take`."""

    within: int = 0
    between: int = 0

    def add(self, tensor: torch.Tensor, level: Level) -> None:
        count = tensor.numel() * tensor.element_size()
        if level.crosses_nodes:
            self.between += count
        else:
            self.within += count

    def take(self) -> tuple[int, int]:
        counts = self.within, self.between
        self.within = self.between = 0
        return counts


class Wire:
    """Adds gradients over the levels of a mesh.

    wire: dtype handed to the collectives. sum_fp32: add in FP32 after the wire, else in the wire dtype.
    """

    def __init__(self, mesh: Mesh, wire: torch.dtype, sum_fp32: bool) -> None:
        self.mesh, self.wire, self.sum_fp32 = mesh, wire, sum_fp32
        self.bytes = Bytes()
        self.poisoned = False  # drill: the next addend of this rank gets +inf in one element
        self._watch: Callable[[str, torch.Tensor], None] | None = None
        self._sampling = False  # the next reduction is looked at
        self._sums: list[torch.Tensor] = []  # of the last sample: squares of the error, squares of the result
        self.counting = False  # what the cast of addends loses is counted
        self._lost: dict[str, torch.Tensor] = {}  # by parameter, see mpdist.cast.lost
        # An FP32 wire is summed in FP32 by NCCL as well, without our buffers.
        self.by_backend = dist.get_backend() == "nccl" and (wire == torch.float32 or not sum_fp32)

    # -- sharded gradients ------------------------------------------------------------------------------------

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        """Collective over the shard group. out: [n] FP32, this rank's chunk of the sum; inp: [shard_size * n]."""
        self._drill(inp)
        levels = self.mesh.scatter
        if not levels:
            out.copy_(inp)
        elif len(levels) == 1:
            self._exchange(out, inp, levels[0])
        else:
            inner, outer = levels
            chunk = inp.numel() // (inner.size * outer.size)
            # Chunk (node, local) of the input belongs to that rank. Sorted by local rank first, one exchange inside
            # the node leaves each rank with the node's sum of the chunks of its peers on all nodes.
            by_local = inp.view(outer.size, inner.size, chunk).transpose(0, 1).reshape(-1)
            node_sum = torch.empty(outer.size * chunk, dtype=torch.float32, device=inp.device)
            room = self._exchange(node_sum, by_local, inner)
            self._exchange(out, node_sum, outer, room)
        if levels and self._sampling:
            self._sampling = False
            self._note(None, out)

    def reduce_to_owners(self, pieces: list[list[torch.Tensor]]) -> torch.Tensor:
        """Collective over the shard group. pieces[r]: flat addends for shard rank r, of any length, the same on all ranks.

        Returns the FP32 sum of what this rank owns, its pieces end to end.
        """
        counts = [sum(piece.numel() for piece in own) for own in pieces]
        levels = self.mesh.scatter
        inner = levels[0].size if len(levels) == 2 else 1
        # With two levels, pieces (node, local) are sorted by local rank first, as in reduce_scatter.
        order = [node * inner + local for local in range(inner) for node in range(len(pieces) // inner)]
        ordered = [piece for rank in order for piece in pieces[rank]]
        # An FP32 wire takes 16-bit addends as they are, so they are laid end to end in FP32 at once.
        dtype = torch.float32 if self.wire == torch.float32 else ordered[0].dtype
        addend = torch.cat(ordered, out=torch.empty(sum(counts), dtype=dtype, device=ordered[0].device))
        self._drill(addend)
        if len(levels) == 2:
            outer = levels[1].size
            columns = [[counts[node * inner + local] for node in range(outer)] for local in range(inner)]
            local, node = self.mesh.shard_index % inner, self.mesh.shard_index // inner
            addend = self._exchange_uneven(addend, [sum(column) for column in columns], local, levels[0])
            total = self._exchange_uneven(addend, columns[local], node, levels[1])
        elif levels:
            total = self._exchange_uneven(addend, counts, self.mesh.shard_index, levels[0])
        else:
            return addend.float()
        if self._sampling:
            self._sampling = False
            self._note(None, total)
        return total

    def _exchange_uneven(self, inp: torch.Tensor, counts: list[int], own: int, level: Level) -> torch.Tensor:
        """As `_exchange`, chunk r of the input holding counts[r] elements; returns the FP32 sum of chunk `own`."""
        sent = self._cast(inp)
        self.bytes.add(sent, level)
        received = torch.empty(level.size * counts[own], dtype=self.wire, device=inp.device)
        dist.all_to_all_single(received, sent, [counts[own]] * level.size, counts, group=level.group)
        total = torch.empty(counts[own], dtype=torch.float32, device=inp.device)
        self._sum(total, received.view(level.size, -1) if counts[own] else received.view(level.size, 0))
        return total

    def add_replicas(self, tensor: torch.Tensor) -> None:
        """Collective over the replica group. tensor: FP32, replaced by the sum, the same bits on every replica."""
        self.start_add_replicas(tensor)()

    def start_add_replicas(self, tensor: torch.Tensor) -> Callable[[], None]:
        """As `add_replicas`, but returns once the first exchange has started; the caller calls the result to wait."""
        self._drill(tensor, "sum" if self.mesh.scatter else "addend")
        wait = self._all_reduce(tensor, self.mesh.replicas)
        if not self.mesh.replicas or not self._sampling:
            return wait
        self._sampling = False

        def finish() -> None:
            self._sampling = True
            wait()
            self._sampling = False
            self._note(None, tensor, self.mesh.replica_size)

        return finish

    # -- error of a sample ------------------------------------------------------------------------------------

    def sample(self) -> None:
        """The next reduction's rounding errors are added up, for `take_error`, and what the casts of all addends lose
        until `take_lost`; nothing more travels."""
        self._sampling, self._sums = self.wire != torch.float32, []
        self.counting = self._sampling and bool(self.mesh.scatter or self.mesh.replicas)
        self._lost = {}

    def take_error(self) -> torch.Tensor | None:
        """[squares of the error, squares of the result], FP64, None without a sample: this rank's part of each.

        Added up over ranks they give the squared relative error against FP32, as far as the rounding errors of
        different ranks are uncorrelated; what a backend rounds while it adds stays unseen.
        """
        sums, self._sums, self._sampling = self._sums, [], False
        return torch.stack([torch.stack(sums[:-1]).sum(), sums[-1]]) if len(sums) > 1 else None

    def count(self, name: str, addend: torch.Tensor) -> None:
        """Told by the engines, where `counting`: this rank's addend of a parameter's gradient, before its cast."""
        found = lost(addend, self.wire)
        self._lost[name] = self._lost[name] + found if name in self._lost else found

    def take_lost(self) -> dict[str, torch.Tensor]:
        """By parameter what the casts of this rank's addends lost since `sample`. Later casts, of sums, are not in it."""
        found, self._lost, self.counting = self._lost, {}, False
        return found

    def _note(self, before: torch.Tensor | None, after: torch.Tensor, holders: int = 1) -> None:
        """Adds squares to the sample: of what rounding lost, or of `after` itself. holders: ranks that note the same.

        In pieces: FP64 images of a whole bucket would be the highest point of the step's memory.
        """
        pieces = after.reshape(-1).split(_PIECE)
        others = before.reshape(-1).split(_PIECE) if before is not None else [None] * len(pieces)
        total = torch.zeros((), dtype=torch.float64, device=after.device)
        for piece, other in zip(pieces, others, strict=True):
            values = piece.double()
            if other is not None:
                values -= other
            total += values.square_().sum()
        self._sums.append(total / holders)

    def _cast(self, tensor: torch.Tensor, holders: int = 1) -> torch.Tensor:
        sent = tensor.to(self.wire)
        if self._sampling:
            self._note(tensor, sent, holders)
        if self._watch is not None:
            self._watch("wire", sent)
        return sent

    def _drill(self, addend: torch.Tensor, stage: str = "addend") -> None:
        if self.poisoned:
            self.poisoned = False
            addend.view(-1)[0] = float("inf")
        if self._watch is not None:
            self._watch(stage, addend)

    @contextlib.contextmanager
    def aside(self, watch: Callable[[str, torch.Tensor], None] | None) -> Iterator[None]:
        """What travels meanwhile is neither counted nor sampled, but shown: watch(stage, tensor) gets an `addend` as it
        comes, or a `sum` that travels on, and either as it goes over the `wire`."""
        kept = dict(vars(self))
        self.bytes, self.poisoned, self._sampling, self.counting, self._watch = Bytes(), False, False, False, watch
        try:
            yield
        finally:
            vars(self).update(kept)

    # -- the two moves ----------------------------------------------------------------------------------------

    def _room(self, room: torch.Tensor | None, count: int, device: torch.device) -> torch.Tensor:
        """Where to receive `count` elements: the buffer of the move before, if it is large enough.

        gloo holds a buffer a moment longer than its work takes: with a new one for each move a rank would now and then
        hold two.
        """
        if room is not None and room.numel() >= count:
            return room[:count]
        return torch.empty(count, dtype=self.wire, device=device)

    def _exchange(
        self, out: torch.Tensor, inp: torch.Tensor, level: Level, room: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Reduce-scatter over one level. out: [n] FP32; inp: [size * n], any floating dtype.

        Returns the buffer of what was received, if there is one: in the wire dtype, free to be written to.
        """
        sent = self._cast(inp)
        self.bytes.add(sent, level)
        if self.by_backend:
            received = out if out.dtype == self.wire else torch.empty(out.shape, dtype=self.wire, device=out.device)
            _scatter(received, sent, op=dist.ReduceOp.SUM, group=level.group)
            if received is not out:
                out.copy_(received)
            return None
        received = self._room(room, sent.numel(), sent.device)
        dist.all_to_all_single(received, sent, group=level.group)
        self._sum(out, received.view(level.size, -1))
        return received if room is None else room

    def _sum(self, out: torch.Tensor, addends: torch.Tensor, holders: int = 1) -> None:
        """out: [n] FP32 = sum over addends [ranks, n] in rank order, in FP32 or in the wire dtype."""
        total = out if self.sum_fp32 or self.wire == torch.float32 else addends[0].clone()
        if total is out:
            out.copy_(addends[0])
        for addend in addends[1:]:
            total.add_(addend)
        if total is not out:
            out.copy_(total)
            if self._sampling:
                self._note(_exact_sum(addends), out, holders)

    def _all_reduce(
        self, tensor: torch.Tensor, levels: tuple[Level, ...], room: torch.Tensor | None = None
    ) -> Callable[[], None]:
        if not levels:
            return _done
        if len(levels) == 2:
            return self._two_level_all_reduce(tensor, levels)
        level = levels[0]
        if self.by_backend:
            sent = self._cast(tensor)
            self.bytes.add(sent, level)
            work = dist.all_reduce(sent, group=level.group, async_op=True)
            return lambda: _finish(work, tensor, sent)
        if level.size == 2:
            return self._swap(tensor, level, room)
        part = _padded(tensor, level.size)
        mine = torch.empty(part.numel() // level.size, dtype=torch.float32, device=tensor.device)
        room = self._exchange(mine, part, level, room)
        return self._gather_back(tensor, mine, level, room)

    def _swap(self, tensor: torch.Tensor, level: Level, room: torch.Tensor | None) -> Callable[[], None]:
        """Between two ranks the addends cost no more than a reduce-scatter and a gather, and round only once."""
        sent = self._cast(tensor.reshape(-1))
        self.bytes.add(sent, level)
        received = self._room(room, level.size * sent.numel(), tensor.device)
        work = _gather(received, sent, group=level.group, async_op=True)

        def wait(sent: torch.Tensor = sent) -> None:  # holds the sent buffer until it has left
            work.wait()
            self._sum(tensor.view(-1), received.view(level.size, -1), holders=level.size)

        return wait

    def _two_level_all_reduce(self, tensor: torch.Tensor, levels: tuple[Level, ...]) -> Callable[[], None]:
        inner, outer = levels
        part = _padded(tensor, inner.size)
        mine = torch.empty(part.numel() // inner.size, dtype=torch.float32, device=tensor.device)
        room = self._exchange(mine, part, inner)
        self._all_reduce(mine, (outer,), room)()
        return self._gather_back(tensor, mine, inner, room, holders=outer.size)

    def _gather_back(
        self, tensor: torch.Tensor, mine: torch.Tensor, level: Level, room: torch.Tensor | None, holders: int = 1
    ) -> Callable[[], None]:
        sent = self._cast(mine, holders)
        self.bytes.add(sent, level)
        received = self._room(room, level.size * sent.numel(), tensor.device)
        work = _gather(received, sent, group=level.group, async_op=True)
        return lambda: _finish(work, tensor, received[: tensor.numel()])


def _exact_sum(addends: torch.Tensor) -> torch.Tensor:
    """[ranks, n] -> [n] in FP32, each element added up in FP64."""
    out = torch.empty(addends.shape[1], dtype=torch.float32, device=addends.device)
    for target, piece in zip(out.split(_PIECE), addends.split(_PIECE, dim=1), strict=True):
        target.copy_(piece.double().sum(0))
    return out


def _finish(work: dist.Work, tensor: torch.Tensor, result: torch.Tensor) -> None:
    work.wait()
    tensor.view(-1).copy_(result.view(-1))


def _done() -> None:
    return None


def _padded(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    """The tensor, flat, with zeros behind it so that `parts` divides it."""
    flat = tensor.reshape(-1)
    short = -flat.numel() % parts
    return torch.nn.functional.pad(flat, (0, short)) if short else flat
