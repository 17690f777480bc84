"""Engine ``ddp`` over a step: everything on every rank, gradients in flat FP32 buckets (see ``shard/ddp.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from mpdist.arch import Arch
from mpdist.formats import bytes_of
from mpdist.plan_activations import top
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
        self.buckets = [] if self.alone else list(self._buckets())
        # The gradient of a tied head waits for the embedding's, whichever engine asks for it.
        self.waits = self.loss.head if self.alone or arch.tied else 0
        self.turns |= {place for bucket in self.buckets for place in bucket[1:] if 0 <= place < self.layers}

    def scenes(self) -> Iterator[Scene]:
        for i in sorted(self.turns):
            yield FORWARD, {**self.always, "activations": self.forward(i)}
        yield from self._loss()
        made = self.a.tail.gradients
        for i in reversed(range(self.layers)):
            if i in self.turns and self.a.blocks[i].enters:
                yield from self._block(i, made)
            made += self.a.blocks[i].gradients
        yield from self._end(made)
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
                yield START, more(rows, "comm", self.flying(top_of))
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
        there = made if self.alone else self.flying(i + 1) + self._begun(i)
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
            # The two gradients of a tied table are summed into a third.
            tied = embed.gradients if self.arch.tied and self.loss.head else 0
            passing = grads + (made if self.alone else self.flying(0) + self._begun(-1))
            yield END, more(more(rows, "activations", point + tied), "comm", passing)
        elif self.alone:
            yield END, more(rows, "comm", made)
        if not self.alone:
            yield END, {**self.always, "activations": self.ids, "comm": self._starting(-1)}

    # -- buckets ------------------------------------------------------------------------------------------------------

    def _buckets(self) -> Iterator[Bucket]:
        trained = self.arch.split(self.asked.freeze)[0] if self.asked.freeze else self.arch.params
        size, places = 0, list[int]()
        for p in reversed(trained):
            if size and size + p.count > BUCKET:
                yield Bucket(size, max(places), min(places))
                size, places = 0, []
            size += p.count
            places.append(p.block if p.block >= 0 else -1 if p.group == "embedding" else self.layers)
        yield Bucket(size, max(places), min(places))

    def flying(self, place: int) -> int:
        """Bytes on their way, and of the micro-batch's own buckets, when all places from this one on are done."""
        total, left = 0, True
        for bucket in self.buckets:  # they leave in order
            left = left and bucket.last >= place
            total += all_reduce_waits(self.asked, bucket.elements) if left else 0
            total += 4 * bucket.elements if self.again and bucket.first >= place else 0
        return total

    def _begun(self, place: int) -> int:
        """The micro-batch's own buckets that this place begins to fill."""
        return 4 * sum(b.elements for b in self.buckets if b.first == place) if self.again else 0

    def _starting(self, place: int) -> int:
        """The most while the buckets that this place fills start to leave: what each takes only as it starts, on top."""
        on_top = [all_reducing(self.asked, b.elements) - all_reduce_waits(self.asked, b.elements)
                  for b in self.buckets if b.last == place]  # fmt: skip
        return self.flying(place) + max([0, *on_top])

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
