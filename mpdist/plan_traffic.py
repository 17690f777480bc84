"""Bytes that one rank sends in a step, by collective, within its node and between nodes apart.

Three numbers for each: the payload, which is what the rank hands to collectives (``wire/grad_bytes`` counts the same); the
traffic that follows, as this backend really sends it; and the textbook's, a ring over all ranks in the dtype asked for, of a
payload X over n ranks X x (n-1)/n for a gather or a reduce-scatter and twice that for an all-reduce. Gradients of a group that
spans nodes go in two levels, first inside a node. A gather of parameters is one ring over the whole group, of which every
node's last rank sends to the next node: its bytes are the average over ranks.

What is really sent is a ring's sum in all these cases, padding apart, though the moves are others: gloo's own reduce-scatter
would be an all-reduce, twice the bytes, and DeepSpeed's below stage 3 is one; our wire exchanges addends instead (``reduce``).
"""

from __future__ import annotations

from dataclasses import dataclass

from mpdist import plan_zero
from mpdist.arch import Arch
from mpdist.formats import bytes_of
from mpdist.plan_groups import Groups, groups
from mpdist.plan_memory import Asked
from mpdist.plan_wire import Levels, replica_levels, shard_levels


@dataclass(frozen=True)
class Traffic:
    """One collective's bytes on one rank in one optimizer step. textbook: those of a ring over all its ranks; how: what this
    backend does instead."""

    what: str
    collective: str
    dtype: str
    ranks: int
    times: int
    payload_within: int
    payload_between: int
    sent_within: int
    sent_between: int
    formula: str
    textbook_bytes: int = 0
    textbook: str = ""
    how: str = ""

    def json(self) -> dict[str, object]:
        return {
            "what": self.what,
            "collective": self.collective,
            "dtype": self.dtype,
            "ranks": self.ranks,
            "times": self.times,
            "payload_bytes": self.payload_within + self.payload_between,
            "payload_bytes_within": self.payload_within,
            "payload_bytes_between": self.payload_between,
            "sent_bytes_within": self.sent_within,
            "sent_bytes_between": self.sent_between,
            "formula": self.formula,
            "textbook_bytes": self.textbook_bytes,
            "textbook": self.textbook,
            "how": self.how,
        }


Once = tuple[int, int, int, int]  # payload within and between nodes, sent within and between


def _often(times: int) -> str:
    return f"{times} x a step" if times > 1 else "once a step"


def _padded(elements: int, parts: int) -> int:
    return -(-elements // parts) * parts


def _scatter(elements: int, group: Levels, width: int) -> Once:
    """Reduce-scatter of ``elements``, two levels: payload and sent bytes, each within and between nodes."""
    inside = elements * width if group.inner > 1 else 0
    across = elements // group.inner * width if group.outer > 1 else 0
    return (
        inside,
        across,
        inside * (group.inner - 1) // group.inner,
        across * (group.outer - 1) // group.outer,
    )


def _reduce(elements: int, group: Levels, width: int, by_backend: bool) -> Once:
    """All-reduce of ``elements`` as the wire does it: payload and sent bytes, each within and between nodes."""
    if group.inner > 1 and group.outer > 1:
        padded = _padded(elements, group.inner)
        part = padded // group.inner
        a = _scatter(padded, Levels(group.inner, 1), width)
        b = _reduce(part, Levels(1, group.outer), width, by_backend)
        gathered = part * (group.inner - 1) * width
        return a[0] + part * width, b[1], a[2] + gathered, b[3]
    n = group.size
    if by_backend:
        payload, sent = elements * width, 2 * elements * width * (n - 1) // n
    elif n == 2:
        payload = sent = elements * width
    else:
        padded = _padded(elements, n)
        payload, sent = padded * width + padded // n * width, 2 * padded * width * (n - 1) // n
    return (0, payload, 0, sent) if group.outer > 1 else (payload, 0, sent, 0)


RINGS = {"all-reduce": (2, "ring all-reduce: 2 x (n-1)/n"), "scatter": (1, "ring reduce-scatter: (n-1)/n"),
         "gather": (1, "ring all-gather: (n-1)/n")}  # fmt: skip


@dataclass(frozen=True)
class _Collective:
    """What a row of traffic says beside its bytes. ring: a key of RINGS. elements, width: what a ring would send."""

    what: str
    collective: str
    dtype: str
    ring: str
    elements: int
    width: int
    formula: str
    how: str

    def row(self, group: Levels, times: int, once: Once) -> Traffic:
        a, b, c, d = (times * part for part in once)
        factor, name = RINGS[self.ring]
        textbook = times * (factor * self.elements * self.width * (group.size - 1) // group.size)
        text = f"{name} x {self.elements} x {self.width} B" + (f", {times} x" if times > 1 else "")
        return Traffic(self.what, self.collective, self.dtype, group.size, times, a, b, c, d, self.formula, textbook, text,
                       self.how)  # fmt: skip


def traffic(asked: Asked, arch: Arch) -> list[Traffic]:
    """All collectives of gradients and parameters in a step of ``asked.accumulation`` micro-batches."""
    g, width = groups(asked, arch), bytes_of(asked.wire)
    times = asked.accumulation if asked.when == "every" else 1
    often = _often(times)
    size = asked.shard_size
    out = []
    if asked.engine == "ddp":
        if asked.ranks > 1:
            everyone = replica_levels(asked)
            once = _reduce(g.elements, everyone, width, asked.by_backend)
            text = f"2 x (n-1)/n x {g.elements} x {width} B, {often}"
            named = _Collective("gradients", "all-reduce", asked.wire, "all-reduce", g.elements, width, text,
                                _reducing(asked, everyone))  # fmt: skip
            out.append(named.row(everyone, times, once))
        return out
    if asked.engine == "deepspeed":
        return _zero(asked, arch, shard_levels(asked)) if size > 1 else []
    shard = shard_levels(asked)
    if size > 1:
        padded = f" (of which {g.held * size - g.elements} are padding)" if g.held * size != g.elements else ""
        text = f"(n-1)/n x {g.held * size}{padded} x {width} B, {often}"
        named = _Collective("gradients", "reduce-scatter", asked.wire, "scatter", g.elements, width, text,
                            _scattering(asked, shard))  # fmt: skip
        out.append(named.row(shard, times, _scatter(g.held * size, shard, width)))
    if asked.replicas > 1:
        copies = replica_levels(asked)
        once = _reduce(g.held, copies, width, asked.by_backend)
        text = f"2 x (n-1)/n x the shard's {g.held} x {width} B, {often}"
        named = _Collective("gradients", "all-reduce of replicas", asked.wire, "all-reduce", g.held, width, text,
                            _reducing(asked, copies))  # fmt: skip
        out.append(named.row(copies, times, once))
    if size > 1:
        out.append(_gathers(asked, arch, g, shard))
    return out


def _scattering(asked: Asked, group: Levels) -> str:
    if asked.by_backend:
        return "NCCL's reduce-scatter" + (", inside nodes and then between them" if min(group) > 1 else "")
    text = "an all-to-all of addends, which each rank sums"
    return text + (", inside nodes and then between them" if min(group) > 1 else "")


def _reducing(asked: Asked, group: Levels) -> str:
    if min(group) > 1:
        return "scattered inside a node, summed between nodes, gathered inside again"
    if asked.by_backend:
        return "NCCL's all-reduce"
    if group.size == 2:
        return "the two ranks swap addends"
    return "an all-to-all of addends, which each rank sums, and a gather of the sums"


def _gathers(asked: Asked, arch: Arch, g: Groups, shard: Levels) -> Traffic:
    passes = 2 if asked.stage == 3 else 1
    how = "blocks forward and backward, the rest once" if passes == 2 else "forward only"
    blocks = g.before[-1].copies + g.head.copies
    exact = sum(p.count for p in arch.params) if not asked.keep_fp32 else 0
    inside = sum(arch.blocks)
    elements = exact + (passes - 1) * inside if exact else (g.root.copies + passes * blocks) // bytes_of(asked.compute)
    return _gather_row(asked, shard, g.root.copies + passes * blocks, asked.accumulation, how, elements)


def host_bytes(asked: Asked, arch: Arch) -> tuple[int, int, str]:
    """(bytes that a rank's device takes from its host in a step, bytes that it hands back, in words) under offload.

    fsdp2 (torch's CPUOffloadPolicy) fetches the masters of a shard whenever it gathers them and casts on the device, and
    hands each reduced gradient back in their dtype. DeepSpeed: the least that it can do, each updated share there and its
    gradient back once, in the compute dtype; with parameters offloaded, a share each time that it is gathered.
    """
    g, c = groups(asked, arch), bytes_of(asked.compute)
    if asked.engine == "deepspeed":
        mine = plan_zero.cut([p.count for p in arch.split(asked.freeze)[0]], asked.stage, asked.shard_size)
        if asked.offload != "all":
            return c * mine, c * mine, "at least its share's gradients and what they become, once"
        fetched = plan_zero.fetched(asked, arch)[0] // asked.shard_size * asked.accumulation
        return c * fetched, c * mine, "at least its share whenever it is gathered, and its gradients once"
    master = c if asked.master == "compute" else 4
    passes, times = 2 if asked.stage == 3 else 1, asked.accumulation if asked.when == "every" else 1
    there = g.root.held + passes * (g.held - g.root.held)
    how = "masters whenever they are gathered, gradients whenever they are reduced"
    return master * there * asked.accumulation, master * g.held * times, how


def _gather_row(asked: Asked, shard: Levels, total: int, times: int, how: str, elements: int) -> Traffic:
    """total: bytes that are gathered at a time, all ranks' parts together; elements: of them, what is no padding."""
    sent = total * (shard.size - 1) // shard.size
    # A ring over nodes: one rank in `inner` sends to another node, the others inside their own.
    between = sent // shard.inner if shard.outer > 1 else 0
    payload = total // shard.size
    once = (payload, 0, sent, 0) if shard.outer == 1 else (0, payload, sent - between, between)
    padded = ", padding included" if total > elements * bytes_of(asked.compute) and not asked.keep_fp32 else ""
    text = f"(n-1)/n x {total} B{padded}: {how}, {_often(times)}"
    named = _Collective("parameters", "all-gather", asked.compute, "gather", elements, bytes_of(asked.compute), text,
                        "NCCL's or gloo's all-gather, a ring over all ranks")  # fmt: skip
    return named.row(shard, times, once)


def _zero(asked: Asked, arch: Arch, shard: Levels) -> list[Traffic]:
    """DeepSpeed's: gradients go to the owners of their elements; parameters are gathered after the step, or at each use."""
    trainable, _ = arch.split(asked.freeze)
    counts, width, stage = [p.count for p in trainable], bytes_of(asked.wire), plan_zero.number(asked)
    times = 1 if asked.when == "last" else asked.accumulation
    if stage == 3:
        total = sum(_padded(count, shard.size) for count in counts)
        once = _scatter(total, shard, width)
    else:
        total = sum(counts)
        # Between nodes a rank sends what the ranks with its own place on all nodes own.
        column = sum(plan_zero.cut(counts, stage, shard.size, rank) for rank in range(0, shard.size, shard.inner))
        within = total * width if shard.inner > 1 else 0
        between = column * width if shard.outer > 1 else 0
        once = (within, between, within * (shard.inner - 1) // shard.inner, between * (shard.outer - 1) // shard.outer)
    text = f"(n-1)/n x {total} x {width} B, {_often(times)}"
    kind = "reduce-scatter" if stage == 3 else "all-to-all"
    gathered, how = plan_zero.fetched(asked, arch)
    often = asked.accumulation if stage == 3 else 1
    moves = _scattering(asked, shard) + (
        "" if stage == 3 else "; DeepSpeed's own sum would be an all-reduce, twice as much"
    )
    named = _Collective("gradients", kind, asked.wire, "scatter", sum(counts), width, text, moves)
    return [
        named.row(shard, times, once),
        _gather_row(asked, shard, gathered * bytes_of(asked.compute), often, how, gathered),
    ]
