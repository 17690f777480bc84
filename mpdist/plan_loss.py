"""What the loss holds: see ``loss.head_loss`` and ``loss.logits_loss``, whose buffers these are. All in bytes of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpdist.arch import Arch, module_matches
from mpdist.formats import bytes_of

if TYPE_CHECKING:
    from mpdist.plan_memory import Asked

MIB = 2**20
# Positions whose FP32 logits exist at once under `loss_chunk: auto`.
CHUNK_BYTES, CHUNK_LEAST = 64 * MIB, 128


def loss_chunk_rows(vocab: int, rows: int, setting: str | int) -> int:
    """Positions that go through the output head at once, at most ``rows`` of them.

    auto: as many as keep the FP32 logits of a chunk within 64 MiB, but at least 128; 'none' or 0: all.
    """
    if setting in ("none", 0):
        return rows
    if isinstance(setting, int):
        return max(1, min(setting, rows))
    return max(1, min(rows, max(CHUNK_LEAST, CHUNK_BYTES // (4 * vocab))))


@dataclass(frozen=True)
class Loss:
    """making: the most while the loss is made. beside: activations there meanwhile, of the model's own logits. kept: until
    backward. casting: while the head's gradient is cast, on top. head: the head's gradient as backward hands it on.
    positions: the gradient of what the loss was made of. whole: activations while backward goes through logits that the model
    made itself, 0 where the loss makes them. text: the formula.
    """

    making: int
    beside: int
    kept: int
    casting: int
    head: int
    positions: int
    whole: int
    text: str


def loss_of(asked: Asked, arch: Arch, trains: bool) -> Loss:
    """trains: whether the output head does."""
    c, tokens, h, vocab = bytes_of(asked.compute), asked.micro * asked.seq_len, arch.hidden, arch.vocab
    rows = loss_chunk_rows(vocab, tokens, asked.loss_chunk)
    name = "model.embed_tokens.weight" if arch.tied else "lm_head.weight"
    item = 4 if module_matches(name, asked.keep_fp32) else c
    if arch.whole_logits:
        return _own_logits(arch, c, tokens, rows, trains)
    positions = tokens * h * item
    beside = positions if item != c else 0  # hidden states are cast on entering a head that is kept in FP32
    several = rows < tokens and item < 4
    table = vocab * h if trains else 0
    bias = vocab if arch.model_type == "phi" and trains else 0
    head = 4 if several else item
    wide = rows * vocab * (item + (4 if item < 4 else 0))
    making = 2 * positions + table * (head + (item if several else 0)) + wide + 4 * bias + 16 * rows
    text = (
        f"{rows} rows x {vocab} logits x {item}{' + 4' if item < 4 else ''} B + 2 x {tokens} positions x {h} x {item} B"
    )
    if trains:
        text += f" + the head's gradient {vocab} x {h} x {head}{f' + {item}' if several else ''} B"
    kept = positions + table * head + 4 * bias
    casting = table * item if several else 0
    return Loss(making, beside, kept, casting, table * item + bias * item, positions, 0, text)


def _own_logits(arch: Arch, c: int, tokens: int, rows: int, trains: bool) -> Loss:
    """Logits that the model makes itself, whole and in the compute dtype: capped (Gemma 2), scaled, or with a router's loss."""
    whole = tokens * arch.vocab * c
    # Capping divides, bends and multiplies, and the bending (tanh) keeps its result; scaling keeps nothing.
    stays = whole if arch.model_type.startswith("gemma") else 0
    head = arch.vocab * arch.hidden * c if trains else 0
    # A chunk's FP32 image is still named while the next one is made.
    wide = (rows + min(rows, tokens - rows)) * arch.vocab * 4
    making = 2 * whole + wide + 8 * rows
    text = f"the model's own logits: {tokens} x {arch.vocab} x {c} B, 2 for the loss + {rows} rows x 4 B a logit"
    return Loss(making, whole + stays, whole, 0, head, whole, stays + 2 * whole, text)
