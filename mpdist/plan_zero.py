"""What DeepSpeed's ZeRO holds and sends, planned as plan_memory and plan_traffic do for the engines of our own.

Parameters are cut by elements. Below stage 3 those that train lie end to end in one line, which is padded to an even
number of elements on each rank and cut once; at stage 3 each is cut by itself, rounded up. Masters, moments and summed
gradients are of this rank's cut. Working copies are whole below stage 3; at stage 3 they are cut too, and gathered
module by module, with a bucket's worth fetched ahead. Gradients travel in buckets; what is larger travels by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from mpdist.arch import Arch
from mpdist.formats import bytes_of
from mpdist.plan_activations import memo, top
from mpdist.plan_moments import (
    END,
    FIRST_REDUCTION,
    FORWARD,
    LOSS,
    REDUCTION,
    START,
    STEP,
    Held,
    Play,
    Scene,
    highest,
    more,
    part_of,
    step_temporaries,
)

if TYPE_CHECKING:
    from mpdist.plan_memory import Asked

BUCKET = 8 * 2**20  # elements; DeepSpeed's own default is 5e8, gigabytes whatever the model


def buckets(sizes: Sequence[int]) -> tuple[int, int]:
    """(elements of a bucket, gathered elements from which on stage 3 fetches nothing ahead) for parameters of these sizes."""
    return buckets_of(sum(sizes), max(sizes))


def buckets_of(total: int, largest: int) -> tuple[int, int]:
    """The same, of the sum of the sizes and the largest one."""
    bucket = min(BUCKET, total)
    bucket += bucket % 2
    return bucket, bucket + largest


def share(total: int, ranks: int) -> int:
    """A rank's part of the line below stage 3, padding included."""
    return 2 * -(-total // (2 * ranks))


def cut(counts: Iterable[int], stage: int, ranks: int, rank: int = 0) -> int:
    """Elements of these parameters that are one rank's, padding left out."""
    if stage == 3:
        return sum(max(0, min(-(-n // ranks), n - rank * -(-n // ranks))) for n in counts)
    total = sum(counts)
    return max(0, min(share(total, ranks), total - rank * share(total, ranks)))


def number(asked: Asked) -> int:
    """DeepSpeed's own number of the stage: its stage 1 keeps gradients whole until the last micro-batch, its 2 does not."""
    return 3 if asked.stage == 3 else 2 if asked.when == "every" else 1


def fetched(asked: Asked, arch: Arch) -> tuple[int, str]:
    """(elements that are gathered at a time, padding included; when that is)."""
    if asked.stage < 3:
        trainable, _ = arch.split(asked.freeze)
        return asked.ranks * share(sum(p.count for p in trainable), asked.ranks), "after the step"
    found: tuple[int, str] = memo(
        arch, ("fetched", BUCKET, asked.ranks, asked.checkpointing), lambda: _fetched(asked, arch)
    )
    return found


def _fetched(asked: Asked, arch: Arch) -> tuple[int, str]:
    every = {p.name: asked.ranks * -(-p.count // asked.ranks) for p in arch.params}
    if arch.total <= BUCKET:
        return sum(every.values()), "the whole model, which fits a bucket"
    total = 2 * sum(every.values())
    # The head is used again before it is let go; one that is tied to the embedding is a third use of it.
    total += sum(every[p.name] for p in arch.params if arch.tied and p.group == "embedding")
    total -= sum(every[p.name] for p in arch.params if p.group == "head")
    text = "forward and backward"
    recomputed = asked.recomputed(arch.layers)
    if recomputed:
        blocks = sum(every[p.name] for p in arch.params if p.block >= 0)
        total += blocks * recomputed // arch.layers
        text += ", recomputed blocks up to once more"
    return total, text


class _Model:
    """A model's parameters by element counts: of those that train, all, and the frozen ones."""

    def __init__(self, asked: Asked, arch: Arch) -> None:
        trainable, frozen = arch.split(asked.freeze)
        in_blocks = [0] * (arch.layers + 1)  # the last entry: norms behind the blocks
        for p in trainable:
            if p.block >= 0 or p.group == "norm":
                in_blocks[p.block] += p.count
        self.behind = [sum(in_blocks[i:]) for i in range(arch.layers + 1)]  # from a block on, to where backward begins
        self.counts = [p.count for p in trainable]
        self.every, self.frozen = [p.count for p in arch.params], [p.count for p in frozen]
        self.trainable, self.largest = sum(self.counts), max(self.every)
        self.in_block = max(p.count for p in arch.params if p.block >= 0)
        self.head = max((p.count for p in trainable if p.group == "head"), default=0)
        self.tied = arch.embedding if arch.tied and any(p.group == "embedding" for p in trainable) else 0

    def cuts(self, stage: int, ranks: int) -> tuple[int, int, int]:
        """This rank's elements of those that train; at stage 3, which cuts all parameters, of all and of the frozen ones."""
        return cut(self.counts, stage, ranks), cut(self.every, 3, ranks), cut(self.frozen, 3, ranks)


class _Zero:
    """One configuration's sizes, in elements unless they say bytes."""

    def __init__(self, asked: Asked, arch: Arch) -> None:
        self.asked, self.stage, self.c = asked, number(asked), bytes_of(asked.compute)
        m: _Model = memo(arch, ("zero", asked.freeze), lambda: _Model(asked, arch))
        self.trainable, self.all, self.in_block = m.trainable, arch.total, m.in_block
        self.behind = m.behind
        self.head, self.tied, self.largest = m.head, m.tied, max(m.counts)
        self.mine, cut_of_all, cut_of_frozen = memo(
            arch, ("cut", asked.freeze, self.stage, asked.ranks), lambda: m.cuts(self.stage, asked.ranks)
        )
        self.stepping = step_temporaries(asked.fused, min(self.largest, self.mine))
        self.bucket, self.live = buckets_of(arch.total, m.largest)
        host = asked.offload != "none" and asked.device != "cpu"
        self.host, self.all_host = host, host and asked.offload == "all"
        # In FP32 at stage 3 the masters compute, where they lie in the same memory.
        self.shared = self.stage == 3 and self.c == 4 and self.host == self.all_host
        self.working = self.all
        if self.stage == 3:
            self.working = cut_of_frozen if self.shared else cut_of_all
        # Whole gradients in FP32: on each rank until the last micro-batch.
        several = asked.accumulation > 1
        self.early = self.trainable if asked.when == "last" and several else 0  # when the last one starts
        self.width = 4 if self.stage == 1 else self.c  # bytes of a gradient that goes into a bucket

    def filled(self, block: int) -> int:
        """Stage 3: bytes of the gradients that wait for their bucket to be full once this block's are there."""
        return self.c * min(self.bucket, self.behind[block] + (0 if self.tied else self.head))

    def travelling(self, elements: int) -> int:
        """Bytes while so many gradients are on their way at once, the bucket left out that they may lie in."""
        asked, wire = self.asked, bytes_of(self.asked.wire)
        dtype = "fp32" if asked.wire == "fp32" or self.width == 4 else asked.compute
        laid = bytes_of(dtype)  # once more, in the order of their owners
        if asked.ranks == 1:
            return elements * (laid + (4 if self.stage == 3 or laid < 4 else 0))
        inner = asked.ranks if asked.nodes in (1, asked.ranks) else asked.ranks // asked.nodes
        sent = 0 if dtype == asked.wire else wire
        received = 0 if self.stage == 3 and asked.by_backend else wire
        total = elements * (laid + sent + received) + 4 * elements // inner
        if self.stage < 3:
            return total
        again = elements * laid if inner < asked.ranks else 0  # sorted by node
        return max(elements * (self.c + laid), total + again)  # as computed they are gone once they are laid out

    def gathered(self) -> tuple[int, int]:
        """Stage 3: (elements that are whole at once, those fetched together, which are there twice until they are used)."""
        if self.stage < 3 or self.asked.ranks == 1:
            return 0, 0
        return min(self.all, self.live + self.in_block), min(self.all, self.bucket + self.in_block)


def held(asked: Asked, arch: Arch) -> Held:
    z, play = _Zero(asked, arch), Play(asked, arch)
    states = {"parameters": 4 * z.mine, "moments": 8 * z.mine, "working": z.c * z.working}
    always = dict(states)
    if z.stage == 3:
        always["gradients"] = 4 * z.mine
    if z.stage < 3 and asked.offload != "none":
        always["gradient_copies"] = 4 * z.mine
    rest = always | {"gradients": 4 * z.mine}
    host = {"parameters", "moments", "optimizer_temporaries", "gradient_copies"} if z.host else set[str]()
    host |= {"gradients"} if z.host and z.stage == 3 else set()
    host |= {"working"} if z.all_host else set()
    changing, own = highest(_scenes(z, play))
    return Held(always, rest, changing, own, play.common_texts() | _texts(z), host)


def _scenes(z: _Zero, play: Play) -> Iterator[Scene]:
    """What comes and goes within a step."""
    whole, twice = (z.c * n for n in z.gathered())
    sums, largest = 4 * z.mine, z.largest
    at_once = z.trainable <= z.bucket  # all gradients travel together
    before = sums if z.stage == 3 or (z.stage == 2 and z.asked.accumulation > 1) else 0
    reduced = before if at_once else sums
    early = before + 4 * z.early
    bucket = z.width * z.bucket if z.stage < 3 else 0
    kept = z.c * z.tied  # a tied head's gradient waits for that of the embedding
    first, last = z.head or min(z.in_block, largest), min(max(z.bucket, largest), z.trainable)
    filling = bucket
    if z.stage == 1:  # a gradient as computed, and in FP32 before it is added
        filling += (z.c + (4 if z.c < 4 else 0)) * first

    def leaving(elements: int) -> int:
        own = z.width * elements if z.stage == 2 and elements > z.bucket else 0
        return bucket + own + z.travelling(elements)

    ahead = {"gathered": whole, "gradients": early}
    for i in play.turns:
        yield FORWARD, {**ahead, "gathered": whole + twice, "activations": play.forward(i)}
    for tail in play.tail():
        if tail.part == LOSS:
            yield LOSS, {**ahead, **tail.rows}
        else:
            rows = {**ahead, **tail.rows, "comm": z.filled(play.layers) if z.stage == 3 else filling}
            yield START, more(rows, "logits", kept if tail.passed else 0)
    for i in play.turns:
        point = top(play.a.blocks[i].backward, play.tokens)[0]
        comm = z.filled(i) if z.stage == 3 else filling
        rows = {**ahead, "activations": play.base(i) + point, "logits": kept, "comm": comm}
        yield part_of(i, play.layers), rows
    end = {"gathered": min(whole, z.c * max(largest, z.in_block)), "activations": play.ids, "comm": leaving(last)}
    yield STEP, {"gradients": sums, "activations": play.ids, "optimizer_temporaries": z.stepping}
    if z.stage == 1:  # those in a bucket are nowhere else
        yield END, {**end, "gradients": before + 4 * (z.trainable - (last if last <= z.bucket else 0))}
        if not at_once:
            going = max(z.bucket, z.in_block)
            rows = {"gradients": sums + 4 * (z.trainable - last), "activations": play.ids, "comm": leaving(going)}
            yield REDUCTION, rows
        return
    yield END, {**end, "gradients": reduced + 4 * min(z.early, last)}
    if not at_once:  # a head larger than a bucket leaves ahead of the blocks, else the first full bucket within one
        last_block = play.layers - 1
        there = play.base(last_block + 1) + play.tokens * play.a.tail.kept
        if first <= z.bucket:
            there = play.base(last_block) + top(play.a.blocks[last_block].backward, play.tokens)[0]
        yield FIRST_REDUCTION, {
            "gathered": whole, "gradients": reduced + 4 * z.early, "activations": there, "logits": kept,
            "comm": leaving(max(z.bucket, first)),
        }  # fmt: skip


def _texts(z: _Zero) -> dict[str, str]:
    asked = z.asked
    ranks = f" / {asked.ranks} ranks" if asked.ranks > 1 else ""
    share = f"{z.trainable}{ranks}"
    working = f"{z.c} B x {z.all}, whole on each rank" if z.stage < 3 else f"{z.c} B x {z.all}{ranks}"
    if z.shared:
        working = "none: masters compute" + (f"; {z.c} B x {z.working} frozen ones" if z.working else "")
    whole, twice = z.gathered()
    comm = (
        f"a bucket of {z.bucket} gradients x {z.width} B and the largest tensor by itself, on their way to their owners"
    )
    unsharded = f" + 4 B x {z.trainable} until the last micro-batch" if z.stage == 1 or z.early else ""
    texts = {
        "parameters": f"4 B x {share}",
        "working": working,
        "gradients": f"4 B x {share}{unsharded}",
        "moments": f"2 x 4 B x {share}",
        "comm": comm + f" in {asked.wire}" if asked.ranks > 1 else comm,
        "optimizer_temporaries": "none: the fused step works in place"
        if asked.fused
        else "a root and a quotient in FP32, of the largest piece",
    }
    if z.stage == 3:
        texts["gathered"] = f"{z.c} B a parameter: up to {whole} of them whole at once, up to {twice} twice"
    if z.stage < 3 and asked.offload != "none":
        texts["gradient_copies"] = f"4 B x {share}: once more, where the optimizer runs"
    return texts
