"""Bytes that one rank sends in a step, by collective, within its node and between nodes apart.

Two numbers for each: the payload, which is what the rank hands to collectives (``wire/grad_bytes`` counts the same),
and the traffic that follows: of a payload X over n ranks a gather or a reduce-scatter sends X x (n-1)/n. Gradients of a
group that spans nodes go in two levels, first inside a node. A gather of parameters is one ring over the whole
group, of which every node's last rank sends to the next node: its bytes are the average over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from mpdist import plan_zero
from mpdist.arch import Arch, module_matches
from mpdist.formats import bytes_of
from mpdist.plan_memory import Asked, held


@dataclass(frozen=True)
class Traffic:
    """One collective's bytes on one rank in one optimizer step."""

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
        }


@dataclass(frozen=True)
class _Group:
    """Ranks that a collective runs over: ``inner`` of them on one node, on ``outer`` nodes."""

    inner: int
    outer: int

    @property
    def size(self) -> int:
        return self.inner * self.outer


def _group(members: int, stride: int, per_node: int) -> _Group:
    """The group of rank 0: every ``stride``-th rank, ``members`` of them, with ``per_node`` ranks on a node."""
    nodes = {rank * stride // per_node for rank in range(members)}
    inner = members // len(nodes)
    return _Group(inner, len(nodes))


def _padded(elements: int, parts: int) -> int:
    return -(-elements // parts) * parts


def _scatter(elements: int, group: _Group, width: int) -> tuple[int, int, int, int]:
    """Reduce-scatter of ``elements``, two levels: payload and sent bytes, each within and between nodes."""
    inside = elements * width if group.inner > 1 else 0
    across = elements // group.inner * width if group.outer > 1 else 0
    return (
        inside,
        across,
        inside * (group.inner - 1) // group.inner,
        across * (group.outer - 1) // group.outer,
    )


def _reduce(elements: int, group: _Group, width: int, by_backend: bool) -> tuple[int, int, int, int]:
    """All-reduce of ``elements`` as the wire does it: payload and sent bytes, each within and between nodes."""
    if group.inner > 1 and group.outer > 1:
        padded = _padded(elements, group.inner)
        part = padded // group.inner
        a = _scatter(padded, _Group(group.inner, 1), width)
        b = _reduce(part, _Group(1, group.outer), width, by_backend)
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


def _row(
    what: str, collective: str, dtype: str, group: _Group, times: int, once: tuple[int, int, int, int], formula: str
) -> Traffic:
    a, b, c, d = (times * part for part in once)
    return Traffic(what, collective, dtype, group.size, times, a, b, c, d, formula)


def traffic(asked: Asked, arch: Arch) -> list[Traffic]:
    """All collectives of gradients and parameters in a step of ``asked.accumulation`` micro-batches."""
    per_node = asked.ranks // asked.nodes
    trainable, _ = arch.split(asked.freeze)
    width = bytes_of(asked.wire)
    micros = asked.accumulation
    times = micros if asked.when == "every" else 1
    how = f"{times} x a step" if times > 1 else "once a step"
    size = asked.shard_size
    out = []
    if asked.engine == "ddp":
        if asked.ranks > 1:
            everyone = _group(asked.ranks, 1, per_node)
            once = _reduce(sum(p.count for p in trainable), everyone, width, asked.by_backend)
            text = f"2 x (n-1)/n x {sum(p.count for p in trainable)} x {width} B, {how}"
            out.append(_row("gradients", "all-reduce", asked.wire, everyone, times, once, text))
        return out
    if asked.engine == "deepspeed":
        return _zero(asked, arch, _group(size, 1, per_node)) if size > 1 else []
    mine = sum(held(p, size) for p in trainable)
    shard = _group(size, 1, per_node)
    if size > 1:
        once = _scatter(mine * size, shard, width)
        text = f"(n-1)/n x {mine * size} x {width} B, {how}"
        out.append(_row("gradients", "reduce-scatter", asked.wire, shard, times, once, text))
    if asked.replicas > 1:
        copies = _group(asked.replicas, size, per_node)
        once = _reduce(mine, copies, width, asked.by_backend)
        text = f"2 x (n-1)/n x the shard's {mine} x {width} B, {how}"
        out.append(_row("gradients", "all-reduce of replicas", asked.wire, copies, times, once, text))
    if size > 1:
        out.append(_gathers(asked, arch, shard))
    return out


def _gathers(asked: Asked, arch: Arch, shard: _Group) -> Traffic:
    compute = bytes_of(asked.compute)
    root = blocks = 0
    for p in arch.params:
        width = 4 if module_matches(p.name, asked.keep_fp32) else compute
        size = _padded(p.shape[0], shard.size) * prod(p.shape[1:]) * width
        if p.block >= 0:
            blocks += size
        else:
            root += size
    passes = 2 if asked.stage == 3 else 1
    how = "blocks forward and backward, the rest once" if passes == 2 else "forward only"
    return _gather_row(asked, shard, root + passes * blocks, asked.accumulation, how)


def _gather_row(asked: Asked, shard: _Group, total: int, times: int, how: str) -> Traffic:
    """total: bytes that are gathered at a time, all ranks' parts together."""
    sent = total * (shard.size - 1) // shard.size
    # A ring over nodes: one rank in `inner` sends to another node, the others inside their own.
    between = sent // shard.inner if shard.outer > 1 else 0
    payload = total // shard.size
    once = (payload, 0, sent, 0) if shard.outer == 1 else (0, payload, sent - between, between)
    text = f"(n-1)/n x {total} B: {how}, " + (f"{times} x a step" if times > 1 else "once a step")
    return _row("parameters", "all-gather", asked.compute, shard, times, once, text)


def _zero(asked: Asked, arch: Arch, shard: _Group) -> list[Traffic]:
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
    text = f"(n-1)/n x {total} x {width} B, " + (f"{times} x a step" if times > 1 else "once a step")
    kind = "reduce-scatter" if stage == 3 else "all-to-all"
    gathered, how = plan_zero.fetched(asked, arch)
    often = asked.accumulation if stage == 3 else 1
    return [
        _row("gradients", kind, asked.wire, shard, times, once, text),
        _gather_row(asked, shard, gathered * bytes_of(asked.compute), often, how),
    ]
