"""A step of our own engines, moment by moment: what FSDP2 gathers and reduces, what ddp sends, beside the activations.

The moments are the parts of a window's last micro-batch that a simulation tells apart, in the same order; each is held at its
highest point. Sources: torch 2.13, `torch/distributed/fsdp/_fully_shard` (`_fsdp_param_group.py`: when a group is gathered,
freed and reduced; `_fsdp_collectives.py`: in which buffers), our `reduce.py`, `shard/ddp.py` and `loss.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mpdist.arch import Arch
from mpdist.formats import bytes_of
from mpdist.plan_activations import IDS, INDEX, Counted, How, Stretch, counted, top
from mpdist.plan_groups import Group, Groups, groups
from mpdist.plan_loss import Loss, loss_of
from mpdist.plan_wire import all_reduce_waits, all_reducing, scattering

if TYPE_CHECKING:
    from mpdist.plan_memory import Asked

Moment = dict[str, int]  # row name -> bytes held at that moment
FORWARD, LOSS, START = "forward", "the loss", "the start of backward"
FIRST, SECOND = "the first block of backward", "the second block of backward"
LAST, END, STEP = "the last blocks of backward", "the end of backward", "the optimizer's step"
BUCKET = 8 * 2**20  # elements of one of ddp's buckets (shard/ddp.py)


def timeline(asked: Asked, arch: Arch) -> dict[str, Moment]:
    """Bytes of the rows that come and go at each moment, in the order of a step."""
    play = (_Ddp if asked.engine == "ddp" else _Fsdp)(asked, arch)
    found: dict[str, Moment] = {}
    for name, scene in play.scenes():
        if name not in found or sum(scene.values()) > sum(found[name].values()):
            found[name] = scene
    return {name: found[name] for name in (FORWARD, LOSS, START, FIRST, SECOND, LAST, END, STEP) if name in found}


def part_of(block: int, blocks: int) -> str:
    """The part of backward in which a block's turn comes."""
    named = {blocks - 1: FIRST, blocks - 2: SECOND, 1: LAST, 0: END}
    return named.get(block, SECOND)


def how_of(asked: Asked, arch: Arch) -> How:
    """What of the asked decides activations."""
    grows = asked.packing != "none" or asked.attention == "eager" or arch.model_type == "gemma2" or any(arch.attends)
    return How(
        compute=bytes_of(asked.compute),
        seq_len=asked.seq_len if grows else 0,
        packed=asked.packing != "none",
        attention=asked.attention,
        several=asked.micro > 1,
        checkpointing=asked.checkpointing,
        freeze=asked.freeze,
        keep_fp32=asked.keep_fp32,
        held=asked.engine != "ddp" or asked.ranks == 1,
    )


@dataclass
class _Play:
    """What both engines share: the activations' side of each moment. Rows of a scene that are 0 may be left out."""

    asked: Asked
    arch: Arch

    def __post_init__(self) -> None:
        self.c = bytes_of(self.asked.compute)
        self.tokens = self.asked.micro * self.asked.seq_len
        self.a: Counted = counted(self.arch, how_of(self.asked, self.arch))
        self.g: Groups = groups(self.asked, self.arch)
        trains = self._trains("embedding" if self.arch.tied else "head")
        self.loss: Loss = loss_of(self.asked, self.arch, trains)
        self.layers = self.arch.layers
        # A mask of a window alone is one for all sequences of a micro-batch.
        windows = {n for n in self.arch.attends if 0 < n <= self.asked.seq_len}
        plain = self.asked.packing == "none" and self.asked.attention in ("auto", "sdpa")
        self.mask = len(windows) * self.asked.seq_len**2 if plain and self.arch.model_type != "gemma2" else 0
        self.left = IDS + (INDEX if self.arch.model_type == "opt" else 0)

    def _trains(self, group: str) -> bool:
        if not self.asked.freeze:
            return True
        return any(p.group == group for p in self.arch.split(self.asked.freeze)[0])

    def turns(self) -> list[int]:
        """Blocks at which a moment may be the highest of its part: the ends of each run of equal ones."""
        found = []
        for i in range(self.layers):
            same = 0 < i < self.layers - 1 and self.a.blocks[i - 1] is self.a.blocks[i] is self.a.blocks[i + 1]
            if not same or i in (1, 2, self.layers - 2):
                found.append(i)
        return found

    def forward(self, block: int) -> int:
        """Activations at the highest point of a block's forward."""
        point, _ = top(self.a.blocks[block].forward, self.tokens)
        return self.tokens * (self.a.beside + self.a.before[block]) + self.mask + point

    def entering(self) -> int:
        """Activations when the first block is about to run."""
        return self.tokens * (self.a.beside + self.a.hidden) + self.mask

    def base(self, block: int) -> int:
        """Activations that wait for backward when the blocks from this one on are done with it."""
        kept = self.mask if self.asked.checkpointing != "none" else 0
        return self.tokens * (self.a.behind + self.a.before[block]) + kept

    def tail(self) -> list[tuple[str, Moment, int]]:
        """(part, rows, gradients of parameters that are there) of the loss and of backward up to the last block."""
        t, a, loss = self.tokens, self.a, self.loss
        through = self.base(self.layers)
        named = self.tokens * (a.beside - a.behind)  # the embedding's rows and masks are named until the base returns
        normed, _ = top(a.tail.forward, t)
        kept = through + t * (a.tail.kept + (a.hidden if loss.whole else 0))
        own = t * a.hidden
        found = [
            (LOSS, {"activations": through + named + normed}, 0),
            (LOSS, {"activations": kept + (own if not loss.whole else 0) + loss.beside, "logits": loss.making}, 0),
            (START, {"activations": kept, "logits": loss.kept + loss.casting}, 0),
        ]
        head = loss.head
        if loss.whole:
            found.append((START, {"activations": kept + loss.whole, "logits": loss.positions}, 0))
            found.append((START, {"activations": kept + loss.positions + own}, head))
        else:
            found.append((START, {"activations": kept + 2 * own, "logits": loss.positions}, head))
        point, grads = top(a.tail.backward, t)
        found.append((START, {"activations": through + point}, head + grads))
        found.append((START, {"activations": through + own}, head + a.tail.gradients))
        return found


class _Fsdp(_Play):
    """FSDP2, stages 2 and 3, with replicas; one rank alone too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        asked, g = self.asked, self.g
        self.alone = asked.shard_size == 1
        self.master = bytes_of(asked.compute) if asked.master == "compute" else 4
        several = asked.accumulation > 1
        self.wide = 4 * g.elements if several and asked.when == "last" else 0
        self.adds = several and not self.wide  # to gradients of earlier micro-batches
        self.free_after = asked.stage == 3
        self.head_row = "comm" if self.loss.whole else "logits"

    # -- copies ---------------------------------------------------------------------------------------------------

    def flat(self, group: Group) -> int:
        """A gathered group as it arrives, before it is cut into parameters."""
        return 0 if self.alone else group.copies

    def working(self, block: int, upto: int | None = None) -> int:
        """Copies while a block runs backward: what is in no block, its own, and the next one's, which are on their way."""
        g = self.g
        if not self.free_after:
            return g.frozen + g.root.copies + sum(b.copies for b in g.blocks[: block + 1])
        ahead = self.flat(g.blocks[block - 1]) if block > 0 else 0
        return g.frozen + g.root.copies + g.blocks[block].copies + ahead

    def _gathering(self) -> Iterator[tuple[str, Moment]]:
        """Forward's moments in which copies peak."""
        g, early = self.g, self._early()
        ids = self.tokens * self.left
        root, first = g.root, g.blocks[0]
        yield FORWARD, {"working": g.frozen + self.flat(root) + root.copies, "activations": ids, **early}
        # The gathered root stays until the first block is gathered beside it.
        both = g.frozen + root.copies + self.flat(root)
        after = both + (0 if self.alone else first.cast) + self.flat(first)
        yield FORWARD, {"working": max(both, after), "activations": self.entering(), **early}
        whole = 0
        for i, block in enumerate(g.blocks):
            held = whole + block.copies + self.flat(block)
            if i in self._turns:
                yield FORWARD, {"working": g.frozen + root.copies + held, "activations": self.forward(i), **early}
            whole += 0 if self.free_after else block.copies

    def _early(self) -> Moment:
        if self.wide:
            return {"gradients": self.wide}
        return {"gradients": self.master * self.g.held} if self.adds else {}

    # -- gradients ------------------------------------------------------------------------------------------------

    def summed(self, block: int) -> int:
        """Bytes of gradients once the blocks from this one on are reduced; of all of them where there were some before."""
        if self.adds:
            return self.master * self.g.held
        done = self.g.blocks[block:]
        return (
            self.master * sum(b.held for b in done)
            + self.wide
            - (4 * sum(b.elements for b in done) if self.wide else 0)
        )

    def _reducing(self, group: Group, made: int, before: int) -> Iterator[Moment]:
        """comm and gradients while a group is reduced. made: bytes of its gradients; before: of sums already there."""
        if not group.elements:
            return
        sums = 4 * group.elements if self.wide else 0
        sent = 4 * group.padded
        # Laid out for sending beside what backward made, or beside the window's unsharded sum.
        yield {"comm": sent + (0 if self.wide else made), "gradients": before}
        out = 4 * group.held
        row = "comm" if self.adds or self.master != 4 else "gradients"
        after = before - sums
        if self.alone:
            moving = sent + 4 * group.padded  # divided by the factor of 1, in a buffer of its own
        else:
            moving = sent + scattering(self.asked, group.padded, group.held)
        yield _with({"comm": moving, "gradients": after}, row, out)
        if self.asked.replicas > 1:
            yield _with({"comm": sent + all_reducing(self.asked, group.held), "gradients": after}, row, out)
        if self.master != 4:
            yield {"comm": sent + out, "gradients": after + self.master * group.held}

    def scenes(self) -> Iterator[tuple[str, Moment]]:
        self._turns = set(self.turns())
        g, early = self.g, self._early()
        yield from self._gathering()
        last = self.layers - 1
        copies = g.frozen + g.root.copies
        whole = 0 if self.free_after else sum(b.copies for b in g.blocks)
        ahead = self.flat(g.blocks[last]) if self.free_after else 0
        for part, rows, grads in self.tail():
            loss = part == LOSS
            held = copies + whole + (self.flat(g.blocks[last]) if loss else ahead)
            yield part, _with({**rows, "working": held, **early}, self.head_row, grads)
        yield START, self._entering(last, 0)
        for i in reversed(range(self.layers)):
            if i in self._turns:
                yield from self._block(i)
        yield from self._end()
        gradients = self.master * g.held
        yield STEP, {"working": g.frozen, "gradients": gradients, **_temporaries(self.asked, g)}

    def _entering(self, block: int, comm: int) -> Moment:
        """A block's copies are cut out of what was gathered, which is there beside them."""
        g = self.g
        if self.free_after:
            held = g.frozen + g.root.copies + g.blocks[block].copies + self.flat(g.blocks[block])
        else:
            held = self.working(block)
        return {
            "working": held,
            "activations": self.base(block + 1) + self.tokens * self.a.hidden,
            "logits": self.loss.head if self.head_row == "logits" else 0,
            "comm": comm + (self.loss.head if self.head_row == "comm" else 0),
            "gradients": self.summed(block + 1),
        }

    def _block(self, i: int) -> Iterator[tuple[str, Moment]]:
        g, part, stretch = self.g, part_of(i, self.layers), self.a.blocks[i]
        if not stretch.enters:  # nothing before it trains
            return
        # The buffer of the reduction before this one stays until the next one starts.
        waiting = 4 * g.blocks[i + 1].padded if i + 1 < self.layers else 0
        point, grads = top(stretch.backward, self.tokens)
        head = {self.head_row: self.loss.head}
        rows = {"working": self.working(i), "activations": self.base(i) + point, "gradients": self.summed(i + 1)}
        yield part, _with({**rows, **head}, "comm", waiting + grads)
        rows["working"] -= g.blocks[i].copies
        rows["activations"] = self.base(i) + self.tokens * stretch.leaves
        for scene in self._reducing(g.blocks[i], stretch.gradients, self.summed(i + 1)):
            yield part, _with({**rows, **scene}, self.head_row, self.loss.head)
        if i and self.a.blocks[i - 1].enters:
            yield part, self._entering(i - 1, 4 * g.blocks[i].padded)

    def _end(self) -> Iterator[tuple[str, Moment]]:
        """The embedding's backward, and the reduction of what is in no block."""
        g, a, t = self.g, self.a, self.tokens
        waiting = 4 * g.blocks[0].padded
        ids, head = t * self.left, self.loss.head
        before = self.summed(0)
        rows = {"working": g.frozen + g.root.copies, "activations": ids, "gradients": before, self.head_row: head}
        made = g.root.made
        if a.embed.enters:
            point, grads = top(a.embed.backward, t)
            scene = _with({**rows, "activations": ids + point}, "comm", waiting + grads)
            yield END, scene
            if self.arch.tied and head:  # the two gradients of one table are summed into a third
                yield END, _with(scene, "activations", a.embed.gradients)
        held = head if self.head_row == "logits" and not self.arch.tied else 0
        for scene in self._reducing(g.root, made - held, before):
            laid = scene["comm"] >= 4 * g.root.padded + made - held and "gradients" in scene
            yield END, {"activations": ids, "working": g.frozen, **scene, "logits": held if laid else 0}


class _Ddp(_Play):
    """Everything on every rank; gradients in flat FP32 buckets, or one rank alone with its parameters' own gradients."""

    def scenes(self) -> Iterator[tuple[str, Moment]]:
        self._turns = set(self.turns())
        g, asked = self.g, self.asked
        copies = g.whole_trained if self.c < 4 and asked.master == "fp32" else 0
        if asked.keep_fp32 and copies:  # modules in FP32 compute on their masters
            copies = self._apart()
        rest = copies + g.whole_frozen
        self.alone = asked.ranks == 1
        self.own_sum = self.c < 4
        sums = 4 * g.elements if not self.alone or self.own_sum or asked.accumulation > 1 else 0
        base = {"working": rest, "gradients": sums}
        for i in self.turns():
            yield FORWARD, {**base, "activations": self.forward(i)}
        row = "comm" if self.loss.whole else "logits"
        later = asked.accumulation > 1 and asked.when == "every" and not self.alone
        runs = [] if self.alone else self._runs()
        for part, rows, grads in self.tail():
            if self.alone or not grads or part == LOSS:
                yield part, _with({**base, **rows}, row, grads)
            else:
                yield part, {**base, **rows, "comm": self._flying(runs, self.layers, later)}
        if not self.alone:  # the head's gradient is laid into its bucket while the other one waits
            loss, new = self.loss, 4 * runs[0][0] if later else 0
            through = self.base(self.layers) + self.tokens * self.a.tail.kept
            rows = {"activations": through, "logits": loss.positions + (0 if loss.whole else loss.head)}
            yield START, _with({**base, **rows}, "comm", new + (loss.head if loss.whole else 0))
        yield from self._backward(base, row, later)
        yield STEP, {"working": rest, "gradients": 4 * g.elements, **_temporaries(asked, g)}

    def _apart(self) -> int:
        kept = replace(self.asked, compute="fp32", keep_fp32=())
        whole = groups(kept, self.arch).whole_trained  # 4 B for all
        here = self.g.whole_trained
        in_fp32 = (here - self.c * self.g.elements) // (4 - self.c)  # elements of the kept modules
        return min(whole, self.c * (self.g.elements - in_fp32))

    def _buckets(self) -> list[int]:
        """Elements of each, in the order in which they leave."""
        return [size for size, _ in self._runs()]

    def _runs(self) -> list[tuple[int, int]]:
        """(elements, the block whose backward fills it, -1 for what only the end fills) of each bucket."""
        trained = self.arch.split(self.asked.freeze)[0] if self.asked.freeze else self.arch.params
        found: list[list[int]] = [[0, self.layers]]
        for p in reversed(trained):
            if found[-1][0] and found[-1][0] + p.count > BUCKET:
                found.append([0, self.layers])
            filled = p.block if p.block >= 0 else (-1 if p.group == "embedding" else self.layers)
            found[-1] = [found[-1][0] + p.count, min(found[-1][1], filled)]
        return [(size, block) for size, block in found]

    def _backward(self, base: Moment, row: str, later: bool) -> Iterator[tuple[str, Moment]]:
        g, a, t = self.g, self.a, self.tokens
        runs = self._runs() if not self.alone else []
        made = self.loss.head + a.tail.gradients
        for i in reversed(range(self.layers)):
            stretch, part = a.blocks[i], part_of(i, self.layers)
            if stretch.enters and i in self._turns:
                point, grads = top(stretch.backward, t)
                comm = grads + self._flying(runs, i + 1, later) if not self.alone else made - self.loss.head + grads
                scene = {**base, "activations": self.base(i) + point, "comm": comm}
                yield part, _with(scene, row, self.loss.head if self.alone else 0)
            made += stretch.gradients
        ids, table = t * self.left, a.embed.gradients
        if self.alone:
            scene = {**base, "activations": ids, "comm": made - self.loss.head + table}
            if a.embed.enters:
                scene["activations"] += top(a.embed.backward, t)[0]
            if self.arch.tied and self.loss.head:
                scene["activations"] += table
            yield END, _with(scene, row, self.loss.head)
            return
        flying = self._flying(runs, 0, later)
        if a.embed.enters:
            point, grads = top(a.embed.backward, t)
            tied = self.loss.head if self.arch.tied else 0
            extra = table if tied else 0
            yield END, {**base, "activations": ids + point + extra, "comm": flying + grads + tied}
        leaving = sum(all_reduce_waits(self.asked, size) for size, _ in runs)
        starting = max(all_reducing(self.asked, size) - all_reduce_waits(self.asked, size) for size, _ in runs)
        again = 4 * g.elements if later else 0
        yield END, {**base, "activations": ids, "comm": again + leaving + max(0, starting)}

    def _flying(self, runs: list[tuple[int, int]], block: int, later: bool) -> int:
        """Bytes of buckets that are on their way, and of this micro-batch's own ones, when blocks from this one on are done."""
        total = 0
        for size, filled in runs:
            if filled < block or (filled == -1):
                total += 4 * size if later else 0
                break
            total += all_reduce_waits(self.asked, size) if self.asked.ranks > 1 else 0
            total += 4 * size if later else 0
        return total


def _with(rows: Moment, row: str, more: int) -> Moment:
    return {**rows, row: rows.get(row, 0) + more}


def _temporaries(asked: Asked, g: Groups) -> Moment:
    return {"optimizer_temporaries": step_bytes(asked, g)}


def step_bytes(asked: Asked, g: Groups) -> int:
    """What the optimizer makes while it steps, largest tensor by largest tensor."""
    return 0 if asked.fused else 2 * 4 * g.largest


def tails(stretch: Stretch) -> int:
    return stretch.kept
