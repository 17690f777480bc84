"""The memory ledger, planned: bytes of each tensor class on one rank, each with the formula that gave it.

States are exact (they follow torch's sharding rule tensor by tensor). Activations follow from what autograd keeps in
transformers' eager layers, one operator after another; see ``saved_per_token``. Rank 0 is planned: it holds the
larger share where a dimension does not divide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from mpdist import plan_zero
from mpdist.arch import Arch, Param, module_matches
from mpdist.formats import bytes_of
from mpdist.plan_zero import Held, Moment

MIB = 2**20
# Positions whose FP32 logits exist at once under `loss_chunk: auto`.
CHUNK_BYTES, CHUNK_LEAST = 64 * MIB, 128
# What the estimate may be off by: activations of eager layers are counted, kernels' workspaces and fragmentation not.
MARGIN = 0.1
BEYOND = "more ranks, a shorter data.seq_len, larger devices or a smaller model"  # where no other setting is enough
# What the allocator does not see: CUDA context, kernels and communicator buffers; or the libraries of a CPU process.
OVERHEAD = {"cuda": 2048 * MIB, "cpu": 640 * MIB}


@dataclass(frozen=True)
class Asked:
    """What the plan follows from, as plain values: the configuration's keys that decide bytes, and the world.

    ranks: the world's. micro, global_: sequences. seq_len: tokens. device: cpu or cuda.
    """

    ranks: int
    nodes: int
    micro: int
    global_: int
    seq_len: int
    packing: str = "none"
    attention: str = "auto"
    freeze: tuple[str, ...] = ()
    compute: str = "bf16"
    master: str = "fp32"
    keep_fp32: tuple[str, ...] = ()
    engine: str = "fsdp2"
    stage: int = 3
    replicas: int = 1
    offload: str = "none"
    wire: str = "fp32"
    sum: str = "fp32"
    when: str = "every"
    checkpointing: str = "none"
    loss_chunk: str | int = "auto"
    fused: bool = True
    device: str = "cuda"
    background: bool = True

    @property
    def accumulation(self) -> int:
        return self.global_ // (self.micro * self.ranks)

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of the model's states."""
        return 1 if self.engine == "ddp" else self.ranks // self.replicas

    @property
    def by_backend(self) -> bool:
        """Whether NCCL itself adds the gradients up, without receive buffers of ours."""
        return self.device == "cuda" and (self.wire == "fp32" or self.sum == "wire")

    def recomputed(self, layers: int) -> int:
        """How many of the model's blocks run forward once more in backward."""
        if self.checkpointing.startswith("every"):
            return -(-layers // int(self.checkpointing.split()[1]))
        return 0 if self.checkpointing == "none" else layers


@dataclass(frozen=True)
class Row:
    """One tensor class on one rank. rest: between steps; peak: its own largest; at_peak: when the total peaks."""

    row: str
    rest_bytes: int
    peak_bytes: int
    formula: str
    at_peak_bytes: int = 0
    host: bool = False


def loss_chunk_rows(vocab: int, rows: int, setting: str | int) -> int:
    """Positions that go through the output head at once, at most ``rows`` of them.

    auto: as many as keep the FP32 logits of a chunk within 64 MiB, but at least 128; 'none' or 0: all.
    """
    if setting in ("none", 0):
        return rows
    if isinstance(setting, int):
        return max(1, min(setting, rows))
    return max(1, min(rows, max(CHUNK_LEAST, CHUNK_BYTES // (4 * vocab))))


def saved_per_token(arch: Arch, c: int, seq_len: int, masked: bool, eager: bool) -> int:
    """Bytes that one token leaves for the backward of one block; c: bytes of the compute dtype.

    Counted from transformers' eager layers without dropout: RMS norms keep an FP32 copy, linear layers their input,
    attention q, k, v and its output, the MLP its gate, activation, up and product. ``masked``: packed rows bring
    a dense mask of one value per key and repeat the key and value heads; ``eager`` attention keeps its scores.
    """
    h, q, kv, f, heads = arch.hidden, arch.q_width, arch.kv_width, arch.intermediate, arch.heads
    kind = arch.model_type
    gemma = kind.startswith("gemma")
    if kind == "gpt2":
        total = c * (2 * h + 2 * h + 3 * h + h + 5 * f) + 8
    elif kind == "gpt_neox":
        total = c * (10 * h + 2 * f) + 8
    else:
        norm = 8 * h if gemma else (4 + c) * h
        total = (4 if gemma else 2) * (norm + 4) + 2 * c * h + 2 * c * (q + kv)
        total += _experts(arch, c) if arch.experts else 4 * c * f
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        total += (8 if gemma else 4 + c) * (q + kv) + 4 * (heads + arch.kv_heads)
    if kind == "phi3":
        # Slices of the fused product keep all of it, unless they are repeated and so copied.
        total += c * h + (0 if (masked or eager) and q != kv else c * (q + kv))
    if masked or eager or kind == "gemma2":
        total += 2 * c * (q - kv) if kind not in ("gpt2", "gpt_neox") else 0
    if eager or kind == "gemma2":
        scores = 4 + (c if c < 4 else 0) + (c if kind == "gemma2" else 0)
        return total + heads * seq_len * scores
    return total + 4 * heads + (c * seq_len if masked else 0)


def _experts(arch: Arch, c: int) -> int:
    each = 2 * c * arch.hidden + 4 * c * arch.intermediate
    return arch.experts_per_token * each + 25 * arch.experts


def kept_products_per_token(arch: Arch, c: int) -> int:
    """Bytes of a token that ``selective`` keeps of one block: its input, attention, and every second product."""
    h, q, kv, f = arch.hidden, arch.q_width, arch.kv_width, arch.intermediate
    if arch.model_type in ("gpt2", "gpt_neox"):
        products = 3 * h + f
    elif arch.model_type == "phi3":
        products = q + 2 * kv + 2 * f
    elif arch.experts:
        products = q + kv
    else:
        products = q + kv + f + h
    return c * (h + q + products) + 4 * arch.heads


@dataclass(frozen=True)
class _Sizes:
    """Byte counts that several rows need. full: unsharded; all are of one rank."""

    trainable: int  # elements held here
    trainable_full: int
    frozen: int  # bytes of frozen copies held here
    working_full: int  # bytes of an unsharded copy in the compute dtype
    working_frozen: int
    root: int  # bytes of what is in no block, unsharded, in the compute dtype
    largest: tuple[int, ...]  # the two largest blocks, likewise
    block_elements: int  # trainable elements of the largest block
    root_elements: int


def step_temporaries(fused: bool, largest: int) -> int:
    """Bytes that AdamW takes beside its states while it moves a tensor; largest: elements of the largest on this rank.

    torch's fused kernel works in place; its plain loop makes a root and a quotient of the second moment, both FP32.
    """
    return 0 if fused else 2 * 4 * largest


def step_text(fused: bool) -> str:
    return "none: the fused step works in place" if fused else "a root and a quotient in FP32, of the largest tensor"


def held(param: Param, shard_size: int) -> int:
    """Elements of a parameter on rank 0: torch shards the first dimension, rounding up."""
    return -(-param.shape[0] // shard_size) * prod(param.shape[1:])


def _sizes(asked: Asked, arch: Arch) -> _Sizes:
    trainable, frozen = arch.split(asked.freeze)
    compute = bytes_of(asked.compute)

    def working(params: Iterable[Param]) -> int:
        return sum(p.count * (4 if module_matches(p.name, asked.keep_fp32) else compute) for p in params)

    in_blocks: list[list[Param]] = [[] for _ in range(arch.layers)]
    root: list[Param] = []
    for p in arch.params:
        (in_blocks[p.block] if p.block >= 0 else root).append(p)
    held_frozen = sum(
        held(p, asked.shard_size) * (4 if module_matches(p.name, asked.keep_fp32) else compute) for p in frozen
    )
    names = {p.name for p in trainable}
    per_block = [sum(p.count for p in block if p.name in names) for block in in_blocks]
    return _Sizes(
        trainable=sum(held(p, asked.shard_size) for p in trainable),
        trainable_full=sum(p.count for p in trainable),
        frozen=held_frozen,
        working_full=working(trainable if asked.engine == "ddp" else arch.params),
        working_frozen=working(frozen),
        root=working(root),
        largest=tuple(sorted((working(block) for block in in_blocks), reverse=True)[:2]),
        block_elements=max(per_block),
        root_elements=sum(p.count for p in root if p.name in names),
    )


def _activations(asked: Asked, arch: Arch) -> tuple[int, int, str]:
    """(bytes at the end of forward, bytes more while one block runs backward, formula)."""
    c = bytes_of(asked.compute)
    tokens = asked.micro * asked.seq_len
    masked = asked.packing != "none" and asked.attention in ("auto", "sdpa")
    whole = saved_per_token(arch, c, asked.seq_len, masked, asked.attention == "eager")
    recomputed = asked.recomputed(arch.layers)
    kept = kept_products_per_token(arch, c) if asked.checkpointing == "selective" else c * arch.hidden
    norm = 8 if arch.model_type.startswith("gemma") else 4 + c
    # The last norm, the rotary tables, and ids, labels and positions in int64.
    outside = norm * arch.hidden + 12 + 2 * c * arch.head_dim + 3 * 8 + (asked.seq_len if masked else 0)
    stored = tokens * ((arch.layers - recomputed) * whole + recomputed * kept + outside)
    wide = arch.intermediate * (arch.experts_per_token or 1)
    running = tokens * (c * (3 * wide + 2 * arch.hidden) + (max(whole - kept, 0) if recomputed else 0))
    parts = []
    if arch.layers > recomputed:
        parts.append(f"{arch.layers - recomputed} blocks x {whole} B")
    if recomputed:
        parts.append(f"{recomputed} recomputed blocks x {kept} B")
    text = f"{tokens} tokens x ({' + '.join(parts)} + {outside} B) + the block in backward; an estimate"
    return stored, running, text


def _logits(asked: Asked, arch: Arch) -> tuple[int, int, str]:
    """(bytes while the loss is made, bytes kept for backward, formula)."""
    c, tokens = bytes_of(asked.compute), asked.micro * asked.seq_len
    rows = loss_chunk_rows(arch.vocab, tokens, asked.loss_chunk)
    wide = 4 + (c if c < 4 else 0)
    chunk = rows * arch.vocab * wide
    positions = 2 * tokens * arch.hidden * c
    if arch.model_type == "gemma2":  # soft-capped logits are the model's own, whole, in the compute dtype
        whole = 4 * tokens * arch.vocab * c
        return whole + chunk, whole, f"{tokens} x {arch.vocab} whole logits x 4 x {c} B + {rows} of them x {wide} B"
    table = arch.vocab * arch.hidden
    several = rows < tokens
    weight = table * ((4 + (c if c < 4 else 0)) if several else c)
    text = f"{rows} rows x {arch.vocab} logits x {wide} B + the head's gradient {arch.vocab} x {arch.hidden}"
    return chunk + positions + weight, positions // 2 + table * (4 if several else c), text


def _comm(asked: Asked, s: _Sizes) -> tuple[int, int, str]:
    """(bytes while a block's gradients travel, bytes while the last ones do, formula)."""
    if asked.ranks == 1 and asked.engine == "ddp":
        return 0, 0, "one rank sends nothing"
    c, wire = bytes_of(asked.compute), bytes_of(asked.wire)
    cast = wire if wire < 4 else 0
    if asked.engine == "ddp":
        if asked.by_backend:
            each, text = cast, f"gradients on their way: {cast} B a parameter"
        elif asked.ranks == 2:
            each, text = cast + 2 * wire, f"both ranks' gradients on their way: {cast} + 2 x {wire} B a parameter"
        else:
            each, text = wire + -(-(4 + wire) // asked.ranks), f"gathered sums: {wire} B a parameter and a share"
        again = 4 if asked.when == "every" and asked.accumulation > 1 else 0
        total = s.trainable_full * (each + again)
        return total, total, text + (" + 4 B for the micro-batch's own gradient" if again else "")
    each = c + 4 + cast + (0 if asked.by_backend else wire)
    text = f"one group's gradient: {c} B as computed, 4 B to reduce"
    text += f", {cast} B sent" if cast else ""
    text += "" if asked.by_backend else f", {wire} B received"
    return s.block_elements * each, s.root_elements * each, text + " a parameter"


def _working(asked: Asked, s: _Sizes) -> tuple[int, int, str]:
    """(rest, in forward and backward, formula)."""
    c = bytes_of(asked.compute)
    if asked.engine == "ddp":
        copies = s.working_full if asked.compute != asked.master and asked.master == "fp32" else 0
        total = copies + s.working_frozen
        text = f"{c} B a trainable parameter" if copies else "none: masters compute"
        return total, total, text + (f" + {c} B a frozen one" if s.working_frozen else "")
    frozen = f"; at rest {s.frozen} B of frozen shards" if s.frozen else ""
    if asked.stage == 2:
        text = f"the whole model unsharded in forward and backward, {c} B each"
        return s.frozen, s.frozen + s.working_full, text + frozen
    text = f"unsharded, {c} B a parameter: what is in no block, and the two largest blocks"
    return s.frozen, s.frozen + s.root + sum(s.largest), text + frozen


def _gradients(asked: Asked, s: _Sizes) -> tuple[int, int, int]:
    """(sharded bytes, those that are there when the last micro-batch starts, unsharded sums before it is reduced)."""
    sharded = asked.engine == "fsdp2"
    # ddp adds up in FP32 whatever the masters are; fully_shard's gradients have the masters' dtype.
    each = bytes_of(asked.compute) if asked.master == "compute" and sharded else 4
    wide = 4 * s.trainable_full if sharded and asked.when == "last" and asked.accumulation > 1 else 0
    # FSDP2 forgets gradients after a step and grows them in backward; ddp's buckets stay.
    early = each * s.trainable if not sharded or (asked.accumulation > 1 and not wide) else 0
    return each * s.trainable, early, wide


def _moments(asked: Asked, arch: Arch, s: _Sizes) -> tuple[dict[str, Moment], dict[str, str]]:
    """What comes and goes within a step, at the moments that can be the peak; and the formulas of those rows."""
    work_rest, work_peak, work_text = _working(asked, s)
    stored, running, act_text = _activations(asked, arch)
    making, kept, logit_text = _logits(asked, arch)
    comm_block, comm_root, comm_text = _comm(asked, s)
    gradients, early, wide = _gradients(asked, s)
    largest = max(held(q, asked.shard_size) for q in arch.params)
    step = step_temporaries(asked.fused, largest)
    before = {"working": work_peak, "gradients": early + wide}
    texts = {"working": work_text, "activations": act_text, "logits": logit_text, "comm": comm_text}
    texts["optimizer_temporaries"] = step_text(asked.fused)
    found = {
        "the loss": {**before, "activations": stored, "logits": making},
        "the start of backward": {**before, "activations": stored + running, "logits": kept},
        "the optimizer's step": {"working": work_rest, "gradients": gradients, "optimizer_temporaries": step},
    }
    if asked.engine == "ddp":  # every bucket is on its way by the time that the first block is done
        found["the end of backward"] = {**before, "activations": running, "comm": comm_root}
        return found, texts
    # fully_shard frees a group's copies before it reduces their gradients.
    found["the last block's reduction"] = {
        "working": max(0, work_peak - s.largest[0]),
        "gradients": early + wide,
        "activations": stored - stored // (arch.layers + 1),
        "logits": kept,
        "comm": comm_block,
    }
    last = gradients + (4 * s.root_elements if wide else 0)
    found["the end of backward"] = {"working": work_rest, "gradients": last, "comm": comm_root}
    return found, texts


ORDER = (
    *(
        "parameters",
        "working",
        "gathered",
        "gradients",
        "gradient_copies",
        "moments",
        "buffers",
        "activations",
        "logits",
    ),
    *("comm", "optimizer_temporaries", "overhead", "snapshot"),
)


# The moments of a step in the order in which they come.
MOMENTS = (
    *("rest", "forward", "the loss", "the start of backward", "the first reduction", "the last block's reduction"),
    *("the end of backward", "the reduction", "the optimizer's step"),
)


def _held(asked: Asked, arch: Arch) -> Held:
    """Under the engines of our own; see plan_zero for DeepSpeed."""
    s = _sizes(asked, arch)
    each = bytes_of(asked.compute) if asked.master == "compute" else 4
    grads, _, wide = _gradients(asked, s)
    changing, texts = _moments(asked, arch, s)
    always = {"parameters": each * s.trainable, "moments": 2 * each * s.trainable}
    # Gradients count as a state: they are there whenever it matters, though an engine may free them between steps.
    rest = always | {"working": _working(asked, s)[0], "gradients": grads}
    off = asked.offload == "all" and asked.device != "cpu"
    host = {"parameters", "gradients", "moments", "optimizer_temporaries"} if off else set[str]()
    share = f"{s.trainable_full} / {asked.shard_size} ranks" if asked.shard_size > 1 else f"{s.trainable_full}"
    unsharded = f" + 4 B x {s.trainable_full} until the last micro-batch" if wide else ""
    texts |= {
        "parameters": f"{each} B x {share}",
        "gradients": f"{grads // s.trainable} B x {share}{unsharded}",
        "moments": f"2 x {each} B x {share}",
    }
    return Held(always, rest, changing, texts, host)


@dataclass(frozen=True)
class Ledger:
    """All rows of one rank. peak_bytes: its most at once, at ``moment``, rows on the host left out.

    moments: in the order of a step, (its name, bytes of every row that is there then, those on the host too).
    """

    rows: tuple[Row, ...]
    peak_bytes: int
    moment: str
    moments: tuple[tuple[str, Moment], ...]


def rows(asked: Asked, arch: Arch) -> tuple[list[Row], int, str]:
    """All rows, the rank's peak in bytes (rows on the host left out), and the moment of that peak."""
    found = ledger_of(asked, arch)
    return list(found.rows), found.peak_bytes, found.moment


def ledger_of(asked: Asked, arch: Arch) -> Ledger:
    """The rows of rank 0 and what they hold from moment to moment."""
    if asked.engine == "deepspeed":
        found = plan_zero.held(asked, arch, _activations(asked, arch), _logits(asked, arch))
    else:
        found = _held(asked, arch)
    _, rest, changing, texts, host = found
    always = found.always | {"buffers": arch.buffer_bytes, "overhead": OVERHEAD[asked.device]}
    rest = always | rest
    if asked.background:
        rest["snapshot"] = rest["parameters"] + rest["moments"]
    host.add("snapshot")  # in host memory wherever the model is; there from the first save on
    totals = {
        name: sum(size for row, size in (always | held_then).items() if row not in host)
        for name, held_then in changing.items()
    }
    when = max(totals, key=lambda name: totals[name])
    texts |= {
        "buffers": "rotary frequencies in FP32",
        "snapshot": f"{texts['parameters']} + {texts['moments']}, on the host"
        if asked.background
        else "checkpoint.background = false",
        "overhead": "assumed: " + ("context, kernels, communicators" if asked.device == "cuda" else "libraries"),
    }
    out = []
    for name in ORDER:
        if name not in texts:  # of another engine
            continue
        own = max(rest.get(name, 0), *(held_then.get(name, 0) for held_then in changing.values()))
        there = (always | changing[when]).get(name, 0)
        out.append(Row(name, rest.get(name, 0), own, texts[name], there, name in host))
    moments = {"rest": rest | {"overhead": OVERHEAD[asked.device]}} | {n: always | h for n, h in changing.items()}
    in_order = tuple(sorted(moments.items(), key=lambda moment: MOMENTS.index(moment[0])))
    return Ledger(tuple(out), totals[when], when, in_order)
