"""FSDP2 over a step: when it gathers, frees and reduces a group of parameters, and in which buffers.

Source: torch 2.13, `torch/distributed/fsdp/_fully_shard` (`_fsdp_param_group.py`, `_fsdp_collectives.py`). What is allocated
follows the order of its calls, which is the same on a GPU, where the work is queued on several streams, and on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpdist.arch import Arch
from mpdist.formats import bytes_of
from mpdist.plan_activations import top
from mpdist.plan_groups import Group, uneven
from mpdist.plan_moments import END, FORWARD, LOSS, START, STEP, Held, Moment, Play, Scene, highest, more, part_of
from mpdist.plan_wire import all_reducing, scattering

if TYPE_CHECKING:
    from mpdist.plan_memory import Asked


class Fsdp(Play):
    """Stages 2 and 3, with replicas; one rank alone too."""

    def __init__(self, asked: Asked, arch: Arch) -> None:
        super().__init__(asked, arch)
        g = self.g
        self.alone = asked.shard_size == 1
        self.master = bytes_of(asked.compute) if asked.master == "compute" else 4
        several = asked.accumulation > 1
        self.wide = 4 * g.elements if several and asked.when == "last" else 0
        self.adds = several and not self.wide  # to the gradients of earlier micro-batches
        self.frees = asked.stage == 3
        self.always = g.frozen + g.root.copies
        self.whole = 0 if self.frees else g.before[-1].copies + g.head.copies
        self.last = self.layers - 1
        self.host = asked.offload == "all" and asked.device != "cpu"

    def scenes(self) -> Iterator[Scene]:
        yield from self._forward()
        yield from self._loss()
        for i in reversed(self.turns):
            if self.a.blocks[i].enters:  # else nothing before it trains
                yield from self._block(i)
        yield from self._end()
        yield STEP, {"working": self.g.frozen, "gradients": self.master * self.g.held, **self.temporaries()}

    # -- copies -----------------------------------------------------------------------------------------------------

    def flat(self, group: Group) -> int:
        """A gathered group as it arrives, before it is cut into parameters."""
        return 0 if self.alone else group.copies

    def arriving(self, group: Group) -> int:
        """The same while it is gathered: beside it this rank's share in the compute dtype."""
        return 0 if self.alone else group.copies + group.cast

    def _forward(self) -> Iterator[Scene]:
        """A group as it arrived stays until the next one is cut out (a name in `wait_for_unshard` holds it so long)."""
        g, early = self.g, {"gradients": self._early()}
        yield FORWARD, {"working": self.always + self.flat(g.root), "activations": self.ids, **early}
        for i in self.turns:
            block, last = g.blocks[i], g.blocks[i - 1] if i else g.root
            whole = self.always + (0 if self.frees else g.before[i].copies)
            arrived = self.flat(last) + max(self.arriving(block), self.flat(block) + block.copies)
            yield FORWARD, {"working": whole + arrived, "activations": self.entering(i), **early}
            yield FORWARD, {"working": whole + self.flat(block) + block.copies, "activations": self.forward(i), **early}

    def _early(self) -> int:
        """Gradients when the last micro-batch starts."""
        return self.wide or (self.master * self.g.held if self.adds else 0)

    def _loss(self) -> Iterator[Scene]:
        g, early = self.g, {"gradients": self._early()}
        head, block = g.head, g.blocks[self.last]
        arrived = max(self.flat(block), self.flat(head)) + (head.copies if self.frees else 0)
        ahead = self.flat(block) if self.frees else 0
        # A head that is held apart is gathered in time, and reduced before the last block runs backward.
        apart = head.copies if self.frees else 0
        copies = self.always + self.whole
        waiting = 4 * head.padded
        for tail in self.tail():
            if tail.part == LOSS:
                yield LOSS, {**tail.rows, "working": copies + arrived, **early}
            elif head.padded and tail.passed:
                rows = {**tail.rows, "working": copies + ahead, "gradients": self.summed(self.layers)}
                yield START, more(rows, "comm", waiting + tail.norms)
            else:
                rows = {**tail.rows, "working": copies + ahead + apart, **early}
                yield START, more(more(rows, self.head_row, tail.head), "comm", tail.norms)
        if head.padded:
            own = self.base(self.layers) + self.tokens * self.a.tail.kept + self.loss.positions
            for scene in self._reducing(head, head.made, self._early()):
                yield START, {"working": copies + ahead, "activations": own, **scene}
        yield START, self._gathered(self.last, waiting)

    def working(self, block: int) -> int:
        """Copies while a block runs backward: what is in no block, its own, and the next one's, which are on their way."""
        g = self.g
        if not self.frees:
            return self.always + g.before[block + 1].copies
        ahead = self.flat(g.blocks[block - 1]) if block > 0 else 0
        return self.always + g.blocks[block].copies + ahead

    def _gathered(self, block: int, comm: int) -> Moment:
        """A block's copies are cut out of what arrived; then the one before it is sent for."""
        held = self.working(block)
        if self.frees:
            next_one = self.arriving(self.g.blocks[block - 1]) if block else 0
            held = self.always + self.g.blocks[block].copies + max(self.flat(self.g.blocks[block]), next_one)
        rows = {"working": held, "comm": comm, "gradients": self.summed(block + 1)}
        rows["activations"] = self.base(block + 1) + self.tokens * self.a.hidden
        return more(rows, self.head_row, self._head())

    # -- gradients --------------------------------------------------------------------------------------------------

    def _head(self) -> int:
        """The output head's gradient, where it waits for the end."""
        return 0 if self.g.head.padded else self.loss.head

    def summed(self, block: int) -> int:
        """Bytes of gradients once the blocks from this one on are reduced; all of them where there were some before."""
        if self.adds:
            return self.master * self.g.held
        done = self.g.since(block)
        return self.master * done.held + (self.wide - 4 * done.elements if self.wide else 0)

    def _reducing(self, group: Group, made: int, before: int) -> Iterator[Moment]:
        """comm and gradients while a group is reduced, first when its gradients are laid out. made: their bytes as backward
        made them; before: of sums that are there already. A name in `foreach_reduce` holds the last of a group's gradients until
        all is over."""
        if not group.elements:
            return
        laid, out = 4 * group.padded, 4 * group.held
        yield {"comm": laid + (0 if self.wide else made), "gradients": before}
        before -= 4 * group.elements if self.wide else 0
        passing = self.adds or self.master != 4 or self.host  # the result is added to what is there, cast, or sent on
        row = "comm" if passing else "gradients"
        # One rank alone divides by a factor of 1, into a buffer of its own.
        beside = laid if self.alone else scattering(self.asked, group.padded, group.held)
        named = 0 if self.alone else group.lasting * (4 if self.wide else made // group.elements)
        last = "gradients" if self.wide else self.head_row if named == self.loss.head else "comm"
        yield more(more({"comm": laid + beside, "gradients": before}, row, out), last, named)
        if self.asked.replicas > 1:
            reducing = all_reducing(self.asked, group.held)
            yield more(more({"comm": laid + reducing, "gradients": before}, row, out), last, named)
        if self.master != 4:
            yield more({"comm": laid + out, "gradients": before + self.master * group.held}, last, named)

    def _block(self, i: int) -> Iterator[Scene]:
        g, part, stretch = self.g, part_of(i, self.layers), self.a.blocks[i]
        # The buffer of the reduction before this one stays until the next one starts.
        waiting = 4 * (g.blocks[i + 1].outer if i < self.last else g.head.padded)
        rows = {"working": self.working(i), "gradients": self.summed(i + 1)}
        for point, grads in self.points(stretch):
            now = {**rows, "activations": self.base(i) + point}
            yield part, more(more(now, self.head_row, self._head()), "comm", waiting + grads)
        rows["working"] -= g.blocks[i].copies
        rows["activations"] = self.base(i) + self.tokens * stretch.leaves
        for scene in self._reducing(g.blocks[i], stretch.gradients, self.summed(i + 1)):
            yield part, more({**rows, **scene}, self.head_row, self._head())
        if i and self.a.blocks[i - 1].enters:
            yield part, self._gathered(i - 1, 4 * g.blocks[i].outer)

    def _end(self) -> Iterator[Scene]:
        """The embedding's backward, and the reduction of what is in no block."""
        g, embed, before = self.g, self.a.embed, self.summed(0)
        if embed.enters:
            point, grads = top(embed.backward, self.tokens)
            rows = {"working": self.always, "activations": self.ids + point, "gradients": before}
            rows = more(more(rows, self.head_row, self._head()), "comm", 4 * g.blocks[0].outer)
            yield END, more(rows, "comm", grads)
            if self.arch.tied and self.loss.head:  # the two gradients of a tied table are summed into a third
                rows = more(more(rows, "comm", embed.gradients), "activations", embed.gradients - point)
                yield END, rows
        for scene in self._reducing(g.root, g.root.made, before):
            yield END, {"working": g.frozen, "activations": self.ids, **scene}

    # -- the whole --------------------------------------------------------------------------------------------------

    def held(self) -> Held:
        g, each = self.g, self.master
        changing, own = highest(self.scenes())
        always = {"parameters": each * g.held, "moments": 2 * each * g.held}
        # Gradients count as a state: they are there whenever it matters, though FSDP2 forgets them after a step.
        rest = always | {"working": g.frozen, "gradients": each * g.held}
        host = {"parameters", "gradients", "moments", "optimizer_temporaries"} if self.host else set[str]()
        return Held(always, rest, changing, own, self.common_texts() | self._texts(), host)

    def _texts(self) -> dict[str, str]:
        asked, g, each = self.asked, self.g, self.master
        n = asked.shard_size
        share = f"{g.elements}" + (f" / {n} ranks" if n > 1 else "")
        why = ""
        if g.held * n != g.elements:
            cuts = uneven(self.arch.split(asked.freeze)[0], n)
            why = ": " + ("; ".join(cut.text(n) for cut in cuts) or "each tensor's first dimension is rounded up")
            share = f"{g.held} on the fullest rank, of {share}"
        unsharded = f" + 4 B x {g.elements} unsharded until the last micro-batch" if self.wide else ""
        c, wire = bytes_of(asked.compute), bytes_of(asked.wire)
        working = (
            "the whole model" if not self.frees else "what is in no block, one block cut out and one as it arrives"
        )
        frozen = f"; {g.frozen} B of frozen shards stay" if g.frozen else ""
        cast = f", {wire} B sent" if wire < 4 else ""
        received = "" if asked.by_backend or self.alone else f", {wire} B received"
        return {
            "parameters": f"{each} B x {share}{why}",
            "gradients": f"{each} B x {share}{unsharded}",
            "moments": f"2 x {each} B x {share}",
            "working": f"unsharded, {c} B a parameter: {working}{frozen}",
            "comm": f"of one group's gradients {c} B as made and 4 B laid out{cast}{received} a parameter; the buffer laid out"
            " before them stays until they are",
        }
