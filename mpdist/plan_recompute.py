"""What activation checkpointing computes a second time, in FLOPs of one token."""

from __future__ import annotations

from mpdist.arch import Arch, Param

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
    for block in blocks:
        shapes = tuple(p.shape for p in block)
        if shapes not in known:
            known[shapes] = _products(arch, seq_len, block, eager, selective)
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
