"""The memory ledger, planned: bytes of each tensor class on one rank, each with the formula that gave it.

States are exact (they follow torch's sharding rule tensor by tensor). Activations are counted by playing each block on sizes
(``plan_layers``), and what engines gather, send and free is laid beside them moment by moment (``plan_fsdp``, ``plan_ddp``,
``plan_zero``). Rank 0 is planned: it holds the larger share where a dimension does not divide.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mpdist import plan_zero
from mpdist.arch import Arch
from mpdist.formats import bytes_of
from mpdist.plan_ddp import Ddp
from mpdist.plan_fsdp import Fsdp
from mpdist.plan_groups import groups, held
from mpdist.plan_moments import MIB, MOMENTS, Moment, loss_chunk_rows, step_temporaries

__all__ = [
    "BEYOND",
    "MARGIN",
    "MIB",
    "MOMENTS",
    "OVERHEAD",
    "Asked",
    "Ledger",
    "Row",
    "States",
    "held",
    "ledger_of",
    "loss_chunk_rows",
    "rows",
    "states_of",
    "step_temporaries",
]

# What the peak on a device may be off by: kernels' workspaces and the allocator's fragments are not counted.
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
    def per_node(self) -> int:
        """Ranks of one node."""
        return self.ranks // self.nodes

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
    """One tensor class on one rank. rest: between steps; peak: its own largest; at_peak: when the total peaks.

    error: what it may be off by, as a share of itself; 0 where it is exact. A difference of less than 256 KiB or 2 % of the
    rank's peak says nothing whatever the row (``ledger.FLOOR``). source: where the formula is from.
    """

    row: str
    rest_bytes: int
    peak_bytes: int
    formula: str
    at_peak_bytes: int = 0
    host: bool = False
    error: float = 0.0
    source: str = ""


@dataclass(frozen=True)
class Ledger:
    """All rows of one rank. peak_bytes: its most at once, at ``moment``, rows on the host left out.

    moments: in the order of a step, (its name, bytes of every row that is there then, those on the host too).
    """

    rows: tuple[Row, ...]
    peak_bytes: int
    moment: str
    moments: tuple[tuple[str, Moment], ...]


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
# Stated errors: what is not listed is exact. DeepSpeed's buffers are its own, of which we know the rules and not each moment.
ERRORS = {"activations": 0.03, "logits": 0.03, "comm": 0.03, "overhead": 1.0}
ZERO_ERRORS = ERRORS | {"activations": 0.1, "comm": 0.15, "gathered": 0.15, "gradients": 0.05}
_SHARDS = "torch's shards: the first dimension of each tensor, rounded up"
_FSDP = "torch 2.13, _fully_shard: when a group is gathered, freed and reduced"
_ZERO = "DeepSpeed 0.19.8: ZeRO's partitions and buckets"
SOURCES = {
    "fsdp2": {
        "parameters": _SHARDS,
        "gradients": _SHARDS,
        "moments": _SHARDS,
        "working": _FSDP,
        "comm": f"{_FSDP}; reduce.py",
    },
    "ddp": {
        **dict.fromkeys(("parameters", "gradients", "moments", "working"), "every rank holds all: shard/ddp.py"),
        "comm": "buckets of 8Mi elements: shard/ddp.py, reduce.py",
    },
    "deepspeed": dict.fromkeys(
        ("parameters", "gradients", "gradient_copies", "moments", "working", "gathered", "comm"), _ZERO
    ),
}
COMMON_SOURCES = {
    "activations": "transformers 5.24's layers, operation by operation: plan_layers.py",
    "logits": "the buffers of the chunked loss: loss.py",
    "buffers": "the config's rotary dimension",
    "optimizer_temporaries": "torch.optim.AdamW",
    "overhead": "an assumption, measured on no device of yours",
    "snapshot": "saver.py: a host copy of masters and moments",
}


def rows(asked: Asked, arch: Arch) -> tuple[list[Row], int, str]:
    """All rows, the rank's peak in bytes (rows on the host left out), and the moment of that peak."""
    found = ledger_of(asked, arch)
    return list(found.rows), found.peak_bytes, found.moment


def ledger_of(asked: Asked, arch: Arch) -> Ledger:
    """The rows of rank 0 and what they hold from moment to moment."""
    if asked.engine == "deepspeed":
        found = plan_zero.held(asked, arch)
    else:
        found = (Ddp if asked.engine == "ddp" else Fsdp)(asked, arch).held()
    _, rest, changing, own, texts, host = found
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
    errors = ZERO_ERRORS if asked.engine == "deepspeed" else ERRORS
    sources = COMMON_SOURCES | SOURCES[asked.engine]
    peak = always | changing[when]
    out = [
        Row(
            row=name,
            rest_bytes=rest.get(name, 0),
            peak_bytes=max(rest.get(name, 0), own.get(name, 0), peak.get(name, 0)),
            formula=texts[name],
            at_peak_bytes=peak.get(name, 0),
            host=name in host,
            error=errors.get(name, 0.0),
            source=sources[name],
        )
        for name in ORDER
        if name in texts
    ]
    moments = {"rest": rest} | {name: always | held_then for name, held_then in changing.items()}
    return Ledger(tuple(out), totals[when], when, tuple(moments.items()))


# -- why states take 16 bytes a parameter: what an engine keeps of one that trains, and who shares it ------------------


@dataclass(frozen=True)
class States:
    """Bytes of one trainable parameter at rest, before they are shared out over ``shared_by`` ranks.

    working: the copy in the compute dtype that stays between steps, shared over ``working_shared_by`` ranks; 0 where
    masters compute or the copy is made when it is needed. why: all of it in one line.
    """

    master: int
    gradient: int
    moments: int
    working: int
    shared_by: int
    working_shared_by: int
    why: str

    @property
    def total(self) -> int:
        return self.master + self.gradient + self.moments + self.working

    @property
    def per_rank(self) -> float:
        return (self.total - self.working) / self.shared_by + self.working / self.working_shared_by

    def to_json(self) -> dict[str, Any]:
        sums = {"bytes_per_parameter": self.total, "bytes_per_parameter_and_rank": self.per_rank}
        return asdict(self) | sums


def fullest(a: Asked, arch: Arch) -> float:
    """How many times an equal share of what trains the fullest rank holds; 1 where shards are even."""
    found = groups(a, arch)
    return found.held * a.shard_size / found.elements if a.engine == "fsdp2" and found.elements else 1.0


def states_of(a: Asked, times: float = 1.0) -> States:
    """Of the engine that is asked for. ddp and deepspeed sum gradients in FP32 whatever the masters are.

    times: ``fullest``, to be said in ``why``.
    """
    c = bytes_of(a.compute)
    master = c if a.master == "compute" else 4
    gradient = master if a.engine == "fsdp2" else 4
    working, text = _copy(a, c, master)
    total = 3 * master + gradient + working
    said = (
        f"{total:.2f} B a trainable parameter: {master} {'master' if master == 4 else 'weight'} + {gradient} gradient "
    )
    said += f"+ {2 * master} moments"
    said += f", shared by {a.shard_size} ranks" if a.shard_size > 1 else ""
    said += f", of which the fullest holds {times:.2f} equal shares" if times >= 1.005 else ""
    said += f"; {text}"
    if master < 4:
        said += f"; FP32 masters would make it {16 + (c if a.engine == 'ddp' else 0)}"
    elif c < 4:
        said += "; the textbook's 2 + 2 + 12 has the gradient in 16 bit"
    whole = a.engine == "deepspeed" and a.stage < 3
    return States(master, gradient, 2 * master, working, a.shard_size, 1 if whole else a.shard_size, said)


def _copy(a: Asked, c: int, master: int) -> tuple[int, str]:
    """(bytes of the working copy between steps, what there is to say of it)."""
    if a.engine == "fsdp2":
        often = "block by block" if a.stage == 3 else "for forward and backward"
        kind = "a working copy" if c < master else "a copy"
        return (
            0,
            f"{kind} of {c} is gathered {often}" if a.shard_size > 1 or c < master else "masters compute, uncopied",
        )
    if a.engine == "ddp":
        if c < master:
            return c, f"+ {c} for the working copy that ddp keeps"
        return 0, "masters compute, uncopied" if master == 4 else "the weights compute, uncopied"
    # In FP32 at stage 3 DeepSpeed's masters compute, where both lie in the same memory.
    apart = a.device != "cpu" and a.offload == "optimizer"
    if a.stage == 3 and c == 4 and not apart:
        return 0, "masters compute, uncopied"
    return c, f"+ {c} for the working copy, " + ("shared too" if a.stage == 3 else "whole on each rank")
