"""Engine ``ddp`` over a step: everything on every rank, gradients in flat FP32 buckets (see ``shard/ddp.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from mpdist.arch import Arch
from mpdist.formats import bytes_of
from mpdist.plan_activations import memo, top
from mpdist.plan_moments import END, FORWARD, LOSS, START, STEP, Held, Play, Scene, highest, more, part_of
from mpdist.plan_wire import all_reduce_waits, all_reducing

if TYPE_CHECKING:
    from mpdist.plan_memory import Asked

BUCKET = 8 * 2**20  # elements


class Bucket(NamedTuple):
    """Parameters whose gradients travel together. first, last: when they arrive, as places of backward: the head and the last
    norm at the number of blocks, then block by block, the embedding at -1."""

    elements: int
    first: int
    last: int


class Ddp(Play):
    """Several ranks; or one alone, whose parameters keep gradients of their own until backward is over."""

    def __init__(self, asked: Asked, arch: Arch) -> None:
        super().__init__(asked, arch)
        g, c = self.g, bytes_of(asked.compute)
        self.alone = asked.ranks == 1
        copies = g.copied if asked.master == "fp32" else 0
        self.rest = copies + g.whole_frozen
        sums = 4 * g.elements if not self.alone or c < 4 or asked.accumulation > 1 else 0
        self.always = {"working": self.rest, "gradients": sums}
        # Where each micro-batch is reduced, all but the first have buckets of their own to be added from.
        self.again = asked.accumulation > 1 and asked.when == "every" and not self.alone
        self.buckets: list[Bucket] = [] if self.alone else memo(arch, ("buckets", asked.freeze), self._buckets)
        # The gradient of a tied head waits for the embedding's, whichever engine asks for it.
        self.waits = self.loss.head if self.alone or arch.tied else 0
        key = ("travels", asked.freeze, asked.ranks, asked.nodes, asked.wire, asked.sum, asked.by_backend, self.again)
        self.flying, self.on_top = memo(arch, key, self._travels)
        # Blocks at which buckets leave, beside those at which activations turn: the first, and the last of each part.
        ends = [b.last for b in self.buckets if 0 <= b.last < self.layers]
        later = [min(end for end in ends if end >= place) for place in (0, 1, 2) if place <= max(ends, default=-1)]
        self.turns = sorted({*self.turns, *later, *ends[:1]})

    def scenes(self) -> Iterator[Scene]:
        for i in self.turns:
            yield FORWARD, {**self.always, "activations": self.forward(i)}
        yield from self._loss()
        for i in reversed(self.turns):
            if self.a.blocks[i].enters:
                yield from self._block(i, self._made(i + 1))
        yield from self._end(self._made(0))
        yield STEP, {"working": self.rest, "gradients": 4 * self.g.elements, **self.temporaries()}

    def _loss(self) -> Iterator[Scene]:
        top_of = self.layers
        for tail in self.tail():
            rows = {**self.always, **tail.rows}
            if tail.part == LOSS:
                yield LOSS, rows
            elif self.waits:
                yield START, more(more(rows, self.head_row, tail.head), "comm", tail.norms if self.alone else 0)
            elif not tail.head or not tail.passed:  # it is still there, or is just being made
                yield START, more(rows, self.head_row, tail.head)
            else:
                yield START, more(rows, "comm", self.flying[top_of])
        if not self.waits and self.loss.head:  # it is laid into its bucket while the positions' gradient waits
            rows = {
                "activations": self.base(self.layers) + self.tokens * self.a.tail.kept,
                "logits": self.loss.positions,
            }
            rows = more({**self.always, **rows}, self.head_row, self.loss.head)
            yield START, more(rows, "comm", 4 * self.buckets[0].elements if self.again else 0)
            yield START, {**self.always, "activations": rows["activations"], "logits": self.loss.positions,
                          "comm": self._starting(top_of)}  # fmt: skip

    def _block(self, i: int, made: int) -> Iterator[Scene]:
        stretch, part = self.a.blocks[i], part_of(i, self.layers)
        rows = more(self.always, self.head_row, self.waits)
        there = made if self.alone else self.flying[i + 1] + self._begun(i)
        for point, grads in self.points(stretch):
            yield part, more({**rows, "activations": self.base(i) + point}, "comm", there + grads)
        if not self.alone:
            rows["activations"] = self.base(i) + self.tokens * stretch.leaves
            yield part, more(rows, "comm", self._starting(i))

    def _end(self, made: int) -> Iterator[Scene]:
        embed = self.a.embed
        rows = more({**self.always, "activations": self.ids}, self.head_row, self.waits)
        if embed.enters:
            point, grads = top(embed.backward, self.tokens)
            there = made if self.alone else self.flying[0] + self._begun(-1)
            yield END, more(more(rows, "activations", point), "comm", there + grads)
            if self.arch.tied and self.loss.head:  # the two gradients of a tied table are summed into a third
                yield END, more(more(rows, "activations", embed.gradients), "comm", there + embed.gradients)
        elif self.alone:
            yield END, more(rows, "comm", made)
        if not self.alone:
            yield END, {**self.always, "activations": self.ids, "comm": self._starting(-1)}

    # -- buckets ------------------------------------------------------------------------------------------------------

    def _made(self, block: int) -> int:
        """One rank alone: the gradients of the blocks from this one on and of the last norm."""
        a, c = self.a, bytes_of(self.asked.compute)
        if self.asked.keep_fp32 or self.asked.freeze:
            return a.tail.gradients + sum(b.gradients for b in a.blocks[block:])
        return a.tail.gradients + c * (self.g.before[-1].elements - self.g.before[block].elements)

    def _buckets(self) -> list[Bucket]:
        trained = self.arch.split(self.asked.freeze)[0] if self.asked.freeze else self.arch.params
        found = []
        size, places = 0, list[int]()
        for p in reversed(trained):
            if size and size + p.count > BUCKET:
                found.append(Bucket(size, max(places), min(places)))
                size, places = 0, []
            size += p.count
            places.append(p.block if p.block >= 0 else -1 if p.group == "embedding" else self.layers)
        return [*found, Bucket(size, max(places), min(places))]

    def _travels(self) -> tuple[dict[int, int], dict[int, int]]:
        """By place, when it and all before it are done: bytes on their way, the micro-batch's own buckets included; and what
        a bucket that leaves there takes only while it starts."""
        waits = {b.elements: all_reduce_waits(self.asked, b.elements) for b in self.buckets}
        starts = {b.elements: all_reducing(self.asked, b.elements) for b in self.buckets}
        flying, on_top = dict[int, int](), dict[int, int]()
        total, index, begun = 0, 0, 0
        for place in range(self.layers, -2, -1):
            while self.again and begun < len(self.buckets) and self.buckets[begun].first >= place:
                total += 4 * self.buckets[begun].elements
                begun += 1
            while index < len(self.buckets) and self.buckets[index].last >= place:  # they leave in order
                size = self.buckets[index].elements
                on_top[place] = max(on_top.get(place, 0), starts[size] - waits[size])
                total += waits[size]
                index += 1
            flying[place] = total
        return flying, on_top

    def _begun(self, place: int) -> int:
        """The micro-batch's own buckets that this place begins to fill."""
        return 4 * sum(b.elements for b in self.buckets if b.first == place) if self.again else 0

    def _starting(self, place: int) -> int:
        return self.flying[place] + self.on_top.get(place, 0)

    # -- the whole --------------------------------------------------------------------------------------------------

    def held(self) -> Held:
        asked, g = self.asked, self.g
        c, each = bytes_of(asked.compute), bytes_of(asked.compute) if asked.master == "compute" else 4
        changing, own = highest(self.scenes())
        always = {"parameters": each * g.elements, "moments": 2 * each * g.elements}
        rest = always | {"working": self.rest, "gradients": 4 * g.elements}  # summed in FP32 whatever the masters are
        working = f"{c} B a trainable parameter" if self.rest > g.whole_frozen else "none: masters compute"
        texts = {
            "parameters": f"{each} B x {g.elements}",
            "gradients": f"4 B x {g.elements}",
            "moments": f"2 x {each} B x {g.elements}",
            "working": working + (f" + {g.whole_frozen} B of frozen ones" if g.whole_frozen else ""),
            "comm": self._comm_text(),
        }
        return Held(always, rest, changing, own, self.common_texts() | texts, set())

    def _comm_text(self) -> str:
        asked, wire = self.asked, bytes_of(self.asked.wire)
        if self.alone:
            return f"the parameters' own gradients, {bytes_of(asked.compute)} B each, until backward is over"
        cast = f"{wire} B sent" if wire < 4 else ""
        if asked.by_backend:
            text = f"buckets on their way: {cast} a parameter" if cast else "none: buckets are added up where they lie"
        elif asked.ranks == 2:
            text = f"buckets on their way: {cast + ' + ' if cast else ''}2 x {wire} B received a parameter"
        else:
            text = f"buckets on their way: their sums gathered, {wire} B a parameter, and a share"
        return text + (" + 4 B for the micro-batch's own gradients" if self.again else "")
