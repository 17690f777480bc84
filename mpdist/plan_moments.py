"""A step of our own engines, moment by moment: what is there of each row that comes and goes.

The moments are the parts of a window's last micro-batch that a simulation tells apart, in the same order, and each is held at
its highest point. This module has what the engines share: the activations and the loss. ``plan_fsdp`` and ``plan_ddp`` lay
copies and gradients beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mpdist.arch import Arch, module_matches
from mpdist.formats import bytes_of
from mpdist.plan_activations import IDS, INDEX, Counted, How, Stretch, counted, memo, top
from mpdist.plan_groups import Groups, groups
from mpdist.plan_tape import Point

if TYPE_CHECKING:
    from mpdist.plan_memory import Asked

Moment = dict[str, int]  # row name -> bytes held at that moment
Scene = tuple[str, Moment]  # the moment that it belongs to, of which the highest scene counts
FORWARD, LOSS, START = "forward", "the loss", "the start of backward"
FIRST, SECOND = "the first block of backward", "the second block of backward"
LAST, END, STEP = "the last blocks of backward", "the end of backward", "the optimizer's step"
REDUCTION, FIRST_REDUCTION = "the reduction", "the first reduction"  # DeepSpeed's
MIB = 2**20
# Positions whose FP32 logits exist at once under `loss_chunk: auto`.
CHUNK_BYTES, CHUNK_LEAST = 64 * MIB, 128
MOMENTS = ("rest", FORWARD, LOSS, START, FIRST_REDUCTION, FIRST, SECOND, LAST, END, REDUCTION, STEP)


class Held(NamedTuple):
    """Bytes on one rank. always: at every moment of a step; rest: between steps; changing: what comes and goes, by moment;
    own: the most of each row at any time; texts: the rows' formulas; host: rows in host memory."""

    always: Moment
    rest: Moment
    changing: dict[str, Moment]
    own: Moment
    texts: dict[str, str]
    host: set[str]


def highest(scenes: Iterable[Scene]) -> tuple[dict[str, Moment], Moment]:
    """(each moment's highest scene, in the order of a step; the most of each row in any scene)."""
    found: dict[str, Moment] = {}
    sizes: dict[str, int] = {}
    own: Moment = {}
    for name, rows in scenes:
        size = 0
        for row, held in rows.items():
            size += held
            if held > own.get(row, 0):
                own[row] = held
        if size > sizes.get(name, -1):
            found[name], sizes[name] = rows, size
    return {name: found[name] for name in MOMENTS if name in found}, own


def part_of(block: int, blocks: int) -> str:
    """The part of backward in which a block's turn comes; where a model has few, the later name holds."""
    named = {blocks - 1: FIRST, blocks - 2: SECOND, 1: LAST, 0: END}
    return named.get(block, SECOND)


def more(rows: Moment, row: str, size: int) -> Moment:
    """The rows with so many bytes more in one of them."""
    return {**rows, row: rows.get(row, 0) + size}


def how_of(asked: Asked, arch: Arch) -> How:
    """What of the asked decides activations."""
    fused = asked.device == "cuda"
    scores = asked.attention == "eager" or arch.model_type == "gemma2" or (arch.attention_dropout and not fused)
    grows = asked.packing != "none" or scores or any(arch.attends)
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
        fused_dropout=fused,
    )


def step_temporaries(fused: bool, largest: int) -> int:
    """Bytes that AdamW takes beside its states while it moves a tensor; largest: elements of the largest on this rank.

    torch's fused kernel works in place; its plain loop makes a root and a quotient of the second moment, both FP32.
    """
    return 0 if fused else 2 * 4 * largest


@dataclass(frozen=True)
class Tail:
    """One scene between the last block's forward and its backward. head: bytes there of the output head's gradient, which
    engines take at different times; passed: whether the loss's own backward is over."""

    part: str
    rows: Moment
    head: int = 0
    passed: bool = False
    norms: int = 0  # gradients of the last norm


class Play:
    """The activations' side of each moment. Rows of a scene that are 0 may be left out."""

    def __init__(self, asked: Asked, arch: Arch) -> None:
        self.asked, self.arch, self.layers = asked, arch, arch.layers
        self.tokens = asked.micro * asked.seq_len
        self.how = how_of(asked, arch)
        self.a: Counted = counted(arch, self.how)
        self.g: Groups = groups(asked, arch)
        self.loss: Loss = loss_of(asked, arch, self._trains("embedding" if arch.tied else "head"))
        # The row of the head's gradient follows from whose operation makes it; a tied one waits where backward adds up.
        self.head_row = "logits" if not self.loss.whole else "activations" if arch.tied else "comm"
        # A mask of a window alone is one for all sequences of a micro-batch.
        windows = {n for n in arch.attends if 0 < n <= asked.seq_len}
        plain = asked.packing == "none" and asked.attention in ("auto", "sdpa") and arch.model_type != "gemma2"
        self.mask = len(windows) * asked.seq_len**2 if plain else 0
        self.ids = self.tokens * (IDS + (INDEX if arch.model_type == "opt" else 0))
        self.turns: list[int] = memo(arch, ("turns", self.how), self._turns)

    def _trains(self, group: str) -> bool:
        if not self.asked.freeze:
            return True
        return any(p.group == group for p in self.arch.split(self.asked.freeze)[0])

    def _turns(self) -> list[int]:
        """Blocks at which a moment may be the highest of its part: the ends of each run of equal ones."""
        blocks, last = self.a.blocks, self.layers - 1
        found = {0, 1, 2, last - 2, last - 1, last} & set(range(self.layers))
        for i in range(1, last):
            if not blocks[i - 1] is blocks[i] is blocks[i + 1]:
                found.add(i)
        return sorted(found)

    # -- activations ----------------------------------------------------------------------------------------------

    def forward(self, block: int) -> int:
        """At the highest point of a block's forward."""
        return self._waiting(block) + top(self.a.blocks[block].forward, self.tokens)[0]

    def entering(self, block: int) -> int:
        """When a block is about to run forward."""
        return self._waiting(block) + self.tokens * self.a.hidden

    def _waiting(self, block: int) -> int:
        a = self.a
        named = (
            a.named if block or self.arch.learned_positions else 0
        )  # what enters the first block is itself what is named
        return self.tokens * (a.beside + named + a.embed.kept + a.before[block]) + self.mask

    def base(self, block: int) -> int:
        """What waits for backward when the blocks from this one on are done with it."""
        kept = self.mask if self.asked.checkpointing != "none" else 0
        return self.tokens * (self.a.behind + self.a.embed.kept + self.a.before[block]) + kept

    def tail(self) -> Iterator[Tail]:
        """The loss, and backward up to the last block."""
        t, a, loss = self.tokens, self.a, self.loss
        own, through = t * a.hidden, self.base(self.layers)
        # The base model names masks and the embedding's rows until it returns.
        named = t * (a.beside - a.behind + a.named) + (self.mask if self.asked.checkpointing == "none" else 0)
        yield Tail(LOSS, {"activations": through + named + top(a.tail.forward, t)[0]})
        kept = through + t * a.tail.kept + (own if loss.whole else 0)
        made = kept + (0 if loss.whole else own) + loss.beside
        yield Tail(LOSS, {"activations": made, "logits": loss.making})
        yield Tail(START, {"activations": kept, "logits": loss.kept + loss.casting})
        if loss.whole:
            yield Tail(START, {"activations": kept + loss.whole, "logits": loss.positions})
            yield Tail(START, {"activations": kept + loss.positions + own}, loss.head, norms=0)
        else:
            yield Tail(START, {"activations": kept + 2 * loss.positions, "logits": loss.positions}, loss.head, True)
        point, grads = top(a.tail.backward, t)
        yield Tail(START, {"activations": through + point}, loss.head, True, grads)
        yield Tail(START, {"activations": through + own}, loss.head, True, a.tail.gradients)

    def points(self, stretch: Stretch) -> set[Point]:
        """(bytes of activations, of parameters' gradients) of a block's backward: the highest point, and each one's most."""
        t, hull = self.tokens, stretch.backward
        return {top(hull, t), (hull[0][0] * t, hull[0][1]), (hull[-1][0] * t, hull[-1][1])}

    def temporaries(self) -> Moment:
        cast = bytes_of(self.asked.compute) * self.g.elements  # FP32 sums for masters in 16 bit
        odd = self.asked.master == "compute" and self.asked.engine == "ddp" and self.asked.compute != "fp32"
        return {
            "activations": self.ids,
            "optimizer_temporaries": step_temporaries(self.asked.fused, self.g.largest) + (cast if odd else 0),
        }

    # -- what is said of it -------------------------------------------------------------------------------------------

    def common_texts(self) -> dict[str, str]:
        a, asked = self.a, self.asked
        kept = ", ".join(f"{count} blocks x {size:,} B" for size, count in _counts(b.kept for b in a.blocks))
        outside = a.behind + a.embed.kept + a.tail.kept
        text = f"{self.tokens:,} tokens x ({kept} + {outside:,} B outside of them), and what runs"
        odd = asked.master == "compute" and asked.engine == "ddp" and asked.compute != "fp32"
        step = (
            "none: the fused step works in place"
            if asked.fused
            else "a root and a quotient in FP32, of the largest tensor"
        )
        return {
            "activations": text,
            "logits": self.loss.text,
            "optimizer_temporaries": "the gradients in the masters' dtype" if odd else step,
        }


def _counts(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """(size, how often), in the order in which they first come."""
    found: dict[int, int] = {}
    for size in sizes:
        found[size] = found.get(size, 0) + 1
    return list(found.items())


# -- the loss: see ``loss.head_loss`` and ``loss.logits_loss``, whose buffers these are ---------------------------------


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
    """Bytes on one rank. making: the most while the loss is made. beside: activations there meanwhile, of the model's own
    logits. kept: until backward. casting: while the head's gradient is cast, on top. head: the head's gradient as backward
    hands it on. positions: the gradient of what the loss was made of. whole: activations while backward goes through logits
    that the model made itself, 0 where the loss makes them. text: the formula.
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
