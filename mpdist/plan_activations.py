"""Activations, counted, and what checkpointing computes twice: every stretch of a model (what precedes its blocks, each block,
what follows them) on a `Tape`.

Blocks that are alike are played once. What comes out is kept on the architecture, since advice asks for the same again with
other micro-batches; it depends on neither these nor the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from mpdist.arch import Arch, Param, module_matches
from mpdist.plan_layers import GEMMAS, Layer, Weight, block, norm
from mpdist.plan_tape import Point, Tape, Value

INDEX = 8  # bytes of an int64
IDS = 4 * INDEX  # ids, positions, the index of labelled positions and their targets


@dataclass(frozen=True)
class Stretch:
    """What one part of a model holds, per token of a micro-batch; gradients of parameters are absolute bytes.

    kept: from its forward until its backward. names_input: whether what entered it is part of that. forward: points of its
    forward, with what enters it, over what the parts before it keep. backward: points of its backward, likewise over what
    the parts before it keep. enters, leaves: the gradient that backward begins with and the one that it hands on.
    """

    kept: int
    names_input: bool
    forward: tuple[Point, ...]
    backward: tuple[Point, ...]
    enters: int
    leaves: int
    gradients: int


@dataclass(frozen=True)
class Counted:
    """A model's activations, in bytes per token. beside: there in forward whatever the blocks keep; behind: in the loss and
    in backward; named: parts of the embedding that the model names until its last norm.
    """

    embed: Stretch
    blocks: tuple[Stretch, ...]
    tail: Stretch
    beside: int
    behind: int
    named: int
    hidden: int  # what leaves the last norm
    before: tuple[int, ...] = field(default=())  # kept by all blocks before this one; one more entry for all


@dataclass(frozen=True)
class How:
    """What the bytes per token follow from. seq_len: only where scores or masks grow with it, else 0."""

    compute: int
    seq_len: int
    packed: bool
    attention: str
    several: bool
    checkpointing: str
    freeze: tuple[str, ...]
    keep_fp32: tuple[str, ...]
    held: bool
    fused_dropout: bool


def top(points: Iterable[Point], tokens: int) -> Point:
    """(bytes of activations, bytes of parameters' gradients) of the highest point."""
    best = max(points, key=lambda point: point[0] * tokens + point[1])
    return best[0] * tokens, best[1]


def _hull(points: list[Point]) -> tuple[Point, ...]:
    """The points that are the highest for some number of tokens: the upper right of their convex hull."""
    found: list[Point] = []
    for act, grad in sorted(set(points), reverse=True):  # most activations first
        if found and grad <= found[-1][1]:
            continue
        while len(found) > 1 and _below(found[-2], found[-1], (act, grad)):
            found.pop()
        found.append((act, grad))
    return tuple(found)


def _below(a: Point, b: Point, c: Point) -> bool:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]) >= 0


def memo(arch: Arch, key: Any, make: Callable[[], Any]) -> Any:
    """make(), once for each key and architecture: hashing an `Arch` would take longer than most of what is kept here."""
    kept = arch.__dict__.setdefault("_planned", {})
    if key not in kept:
        kept[key] = make()
    return kept[key]


# -- playing ------------------------------------------------------------------------------------------------------


def counted(arch: Arch, how: How) -> Counted:
    return memo(arch, how, lambda: _count(arch, how))


def _count(arch: Arch, how: How) -> Counted:
    trained = {p.name for p in arch.split(how.freeze)[0]} if how.freeze else None

    def trains(p: Param) -> bool:
        return trained is None or p.name in trained

    root = {p.group: trains(p) for p in arch.params if p.block < 0}
    embed = _stretch(how, lambda t, x: _embedded(t, arch, how, root["embedding"]), 0, False)
    known: dict[Any, Stretch] = {}
    blocks = []
    step = int(how.checkpointing.split()[1]) if how.checkpointing.startswith("every") else 1
    needs = root["embedding"]
    for number, weights in enumerate(_weights(arch, how, trains)):
        masked = _is_masked(arch, how, number)
        wrapped = how.checkpointing != "none" and number % step == 0
        key = (tuple(weights.items()), masked, wrapped, needs)
        if key not in known:
            known[key] = _block(arch, how, weights, masked, wrapped, needs)
        blocks.append(known[key])
        needs = needs or any(w.trains for w in weights.values())
    last = next(p for p in arch.params if p.group == "norm")
    weight = Weight(last.count, trains(last), item=4 if module_matches(last.name, how.keep_fp32) else how.compute)

    def end(t: Tape, x: Value) -> Value:
        layer = Layer(t, arch, {"weight": weight}, how.seq_len, False, False)
        return layer.module("weight", x, lambda x: norm(t, x, weight, arch.model_type))

    tail = _stretch(how, end, arch.hidden, needs)
    beside, behind, named = _beside(arch, how, not blocks[0].names_input)
    before = (0, *accumulate(b.kept for b in blocks))
    return Counted(embed, tuple(blocks), tail, beside, behind, named, how.compute * arch.hidden, before)


def _weights(arch: Arch, how: How, trains: Callable[[Param], bool]) -> list[dict[str, Weight]]:
    blocks: list[dict[str, Weight]] = [{} for _ in range(arch.layers)]
    for p in arch.params:
        if p.block >= 0:
            item = 4 if module_matches(p.name, how.keep_fp32) else how.compute
            name = p.name.partition(f".{p.block}.")[2]
            blocks[p.block][name] = Weight(p.count, trains(p), len(p.shape) == 2, item)
    return blocks


def _is_masked(arch: Arch, how: How, layer: int) -> bool:
    """Whether a layer's attention gets a dense mask: of packed rows, or of a window that is shorter than the rows.

    OPT gives its masks no positions, so its packed rows get none."""
    if how.attention not in ("auto", "sdpa"):
        return False
    window = arch.attends[layer]
    return (how.packed and arch.model_type != "opt") or 0 < window <= how.seq_len


def writes_scores(arch: Arch, attention: str) -> bool:
    """Whether attention is written out, keeping its scores: where asked for, and where they are capped (Gemma 2)."""
    return attention == "eager" or (attention == "auto" and arch.model_type == "gemma2")


def _block(
    arch: Arch, how: How, weights: dict[str, Weight], masked: bool, wrapped: bool, needs: bool
) -> Stretch:  # fmt: skip
    matrices = sum(w.matrix for w in weights.values()) if how.checkpointing == "selective" else None

    def play(t: Tape, x: Value) -> Value:
        layer = Layer(
            t, arch, weights, how.seq_len, masked, writes_scores(arch, how.attention), how.several, how.fused_dropout
        )
        if not wrapped:
            return block(layer, x)
        return t.checkpoint(lambda given: block(layer, given), x, matrices)

    return _stretch(how, play, arch.hidden, needs)


def _stretch(how: How, play: Callable[[Tape, Value], Value], width: int, needs: bool) -> Stretch:
    t = Tape(how.compute, how.held)
    x = t.given(width, needs)
    enters, entered = x.size, x.node
    y = play(t, x)
    forward = _hull(t.points)
    held = t.now
    del x
    names_input = t.now == held  # something else names it still
    end, size = y.node, y.size
    del y
    kept = t.now
    if end is None:
        return Stretch(kept, names_input, forward, ((0, 0),), 0, 0, 0)
    t.points = []
    t.backward(end, size)
    if entered is not None:
        entered.grad = None
    return Stretch(kept, names_input, forward, _hull(t.points), size, enters if needs else 0, t.gradients)


def _embedded(t: Tape, arch: Arch, how: How, trains: bool) -> Value:
    """What enters the first block; that its parts stay named is counted by `_beside`."""
    out = t.table(arch.hidden, [p.count for p in arch.params if p.group == "embedding"] if trains else [])
    if arch.model_type in GEMMAS or arch.model_type == "granite":
        return t.apply(out)
    return t.dropout(out, how.fused_dropout) if arch.model_type == "gpt2" and arch.hidden_dropout else out


def _beside(arch: Arch, how: How, names_embedding: bool) -> tuple[int, int, int]:
    """(in forward, in the loss and backward, named): ids and positions, rotary tables, masks; the embedding's rows."""
    c, kinds = how.compute, 2 if arch.model_type == "gemma3_text" else 1
    tables = kinds * 2 * arch.rotary_dim * (4 if arch.model_type == "olmo2" else c)
    found = IDS + tables
    mask = _mask(arch, how)
    stays = found + (mask if how.checkpointing != "none" else 0)
    if arch.model_type == "opt":  # shifted positions, of which backward reads the table's rows
        found, stays = found + INDEX + 4, stays + INDEX
    named = c * arch.hidden if names_embedding else 0
    if arch.learned_positions:
        named = 2 * c * arch.hidden
    return found + mask, stays, named


def _mask(arch: Arch, how: How) -> int:
    """Bytes per token of the masks that all blocks share; those of a window alone are one for the micro-batch."""
    kinds = len(set(arch.attends))
    if writes_scores(arch, how.attention):
        return kinds * how.compute * how.seq_len
    return kinds * how.seq_len if how.packed and how.attention in ("auto", "sdpa") and arch.model_type != "opt" else 0


# -- what activation checkpointing computes a second time, in FLOPs of one token -----------------------------------------

# The matrices that close a block's attention, under their families' names; some list them ahead of what feeds them.
_CLOSING = (
    "o_proj.weight",
    "out_proj.weight",
    "attn.c_proj.weight",
    "attention.dense.weight",
    "self_attn.dense.weight",
)


def recomputed_flops(arch: Arch, seq_len: int, checkpointing: str, eager: bool = False) -> float:
    """FLOPs of forward that backward does again, a token: 2 a multiplied parameter, attention as its causal half."""
    if checkpointing == "none":
        return 0.0
    blocks = recomputed_blocks(arch, seq_len, checkpointing == "selective", eager)
    return sum(blocks[:: int(checkpointing.split()[1]) if checkpointing.startswith("every") else 1])


def recomputed_blocks(arch: Arch, seq_len: int, selective: bool, eager: bool = False) -> list[float]:
    """The same for each block by itself, where it is checkpointed.

    Whole: all but its last product, which nobody needs again where nothing behind it keeps its output (no dropout, norm or
    routing): torch stops there. selective: every second product, the last one and every other before it, as
    ``model.checkpoint_blocks`` leaves them; attention only where it is made of products itself (eager), experts always.
    """
    blocks: list[list[Param]] = [[] for _ in range(arch.layers)]
    for p in arch.params:
        if p.block >= 0:
            blocks[p.block].append(p)
    known: dict[tuple[tuple[int, ...], ...], float] = {}  # most blocks are alike
    out = []
    for params in blocks:
        shapes = tuple(p.shape for p in params)
        if shapes not in known:
            known[shapes] = _products(arch, seq_len, params, eager, selective)
        out.append(known[shapes])
    return out


def _products(arch: Arch, seq_len: int, block: list[Param], eager: bool, selective: bool) -> float:
    """FLOPs of one block that are done again."""
    matrices = [p for p in block if p.matmul]
    attention = [p for p in matrices if "attn" in p.name or "attention" in p.name]
    attention.sort(key=lambda p: p.name.endswith(_CLOSING))
    experts = sum(2 * p.count * p.active for p in matrices if p.active < 1)
    others = [p for p in matrices if p not in attention and p.active == 1]
    scores = 2.0 * arch.q_width * seq_len  # 4 a width and a key, of which a token has half on average
    parts = [2.0 * p.count for p in (*attention[:-1], attention[-1], *others)]
    if eager or arch.model_type == "gemma2":
        parts[len(attention) - 1 : len(attention) - 1] = [scores / 2, scores / 2]
        scores = 0.0
    needed = bool(experts or arch.hidden_dropout) or any("post_feedforward" in p.name for p in block)
    if not needed:
        parts[-1] = 0.0
    if selective:
        return sum(parts[::-1][::2]) + experts
    return sum(parts) + scores + experts
