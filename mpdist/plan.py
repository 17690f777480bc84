"""What follows from a configuration and a world: batch arithmetic, memory ledger, traffic, verdict.

Nothing here needs torch. The launcher makes a plan from the world it will start; the worker makes it again from the
world it finds and refuses to go on if the two differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from mpdist.arch import ACTIVATIONS, Arch, Unknown, model_flops_per_token
from mpdist.config import Config, check_world
from mpdist.errors import ConfigError, DoesNotFit, MpdistError, UsageError
from mpdist.plan_advice import Candidate, MoreRanks, Suggestion, advise, candidates
from mpdist.plan_groups import uneven
from mpdist.plan_memory import MARGIN, OVERHEAD, Asked, Row, fullest, ledger_of, loss_chunk_rows, states_of
from mpdist.plan_search import Search, divisors
from mpdist.plan_simulated import Simulated
from mpdist.plan_traffic import Traffic, traffic
from mpdist.space import Saves, planned
from mpdist.units import format_bytes

if TYPE_CHECKING:
    from mpdist.plan_time import Time

__all__ = [
    "Asked",
    "Batch",
    "Plan",
    "Row",
    "Suggestion",
    "Traffic",
    "asked_of",
    "loss_chunk_rows",
    "make",
]

STATES = ("parameters", "working", "gradients", "moments")
PEAK_ERROR = 0.08  # stated relative error of the peak against tensors that are really there


@dataclass(frozen=True)
class Batch:
    """Sequences: ``micro`` on one rank at once, ``global_`` in a step. ``ranks``: the world's."""

    micro: int
    accumulation: int
    ranks: int
    global_: int
    tokens_per_step: int


@dataclass(frozen=True)
class Plan:
    """The whole plan; bytes are of the rank that holds the most. What depends on an unknown model is None."""

    asked: Asked
    batch: Batch
    steps: int | None
    horizon: int | None
    horizon_reason: str
    tokens: int | None  # the budget's, where it counts them
    model: str
    memory_bytes: int | None
    saves: Saves | None
    parameters: int | None = None
    trainable: int | None = None
    rows: tuple[Row, ...] = ()
    states_bytes: int | None = None
    peak_bytes: int | None = None
    peak_moment: str = ""
    host_bytes: int = 0
    fits: bool | None = None
    suggestions: tuple[Suggestion, ...] = ()
    more_ranks: MoreRanks | None = None
    traffic: tuple[Traffic, ...] = ()
    flops_per_token: float | None = None
    loss_chunk_rows: int | None = None
    world_from: str = ""  # where the number of ranks is from, as it is told
    # Bytes by row at each moment of a step, in its order; rows on the host included.
    moments: tuple[tuple[str, dict[str, int]], ...] = ()
    candidates: tuple[Candidate, ...] = ()  # settings that fit, cheapest first, where somebody has asked for them
    # Of rows that pack documents: the same bytes where each row holds one, which attention needs no mask for.
    unmasked: Mapping[str, int] = field(default_factory=dict)
    time: Time | None = None  # of a step, where the device is known
    time_unknown: str = ""  # why it is not, where a device was named
    memory_from: str = ""  # which device's memory it is and whence, where it follows from a name
    warnings: tuple[str, ...] = ()  # what can be planned and may not be meant
    shares: float = 1.0  # equal shares of the states that the fullest rank holds
    simulation: Simulated | None = None  # where somebody has asked for one; `fits` follows it

    def to_json(self) -> dict[str, Any]:
        a, b = self.asked, self.batch
        return {
            "ranks": a.ranks,
            "nodes": a.nodes,
            "device": a.device,
            "model": self.model,
            "parameters": self.parameters,
            "trainable_parameters": self.trainable,
            "rows": [_row_json(row) for row in self.rows],
            "states_bytes_per_rank": self.states_bytes,
            "states": states_of(a, self.shares).to_json(),
            "peak_bytes_per_rank": self.peak_bytes,
            "peak_moment": self.peak_moment,
            "host_bytes_per_rank": self.host_bytes,
            "host_bytes_per_node": self.host_bytes * a.per_node,
            "memory_bytes": self.memory_bytes,
            "memory_from": self.memory_from,
            "warnings": list(self.warnings),
            "fits": self.fits,
            "suggestions": [str(s) for s in self.suggestions],
            "more_ranks": self.more_ranks.to_json() if self.more_ranks is not None else None,
            "candidates": [c.to_json() for c in self.candidates],
            "time": self.time.json() if self.time is not None else None,
            "simulation": self.simulation.to_json() if self.simulation is not None else None,
            "batch": {
                "micro": b.micro,
                "accumulation": b.accumulation,
                "ranks": b.ranks,
                "global": b.global_,
                "tokens_per_step": b.tokens_per_step,
            },
            "steps": self.steps,
            "horizon": self.horizon,
            "budget": {
                "least_steps": self.least_steps,
                "tokens": self.tokens,
                "token_slots": None if self.steps is None else self.steps * b.tokens_per_step,
            },
            "traffic": [t.json() for t in self.traffic],
            "model_flops_per_token": self.flops_per_token,
            "loss_chunk_rows": self.loss_chunk_rows,
            "checkpoint": self.saves.to_json() if self.saves is not None else None,
            "moments": [{"moment": moment, "rows": held} for moment, held in self.moments],
        }

    def ledger(self) -> dict[str, dict[str, Any]]:
        """What the measured ledger is held against: row -> bytes (at rest), peak, formula, error (relative, as stated).

        Row ``peak`` is the rank's without the overhead, which no tracker of tensors sees, and says that apart. Where rows
        pack documents, ``least`` is what takes fewer bytes in a window whose rows hold one document each.
        """
        found: dict[str, dict[str, Any]] = {
            r.row: {
                "bytes": r.rest_bytes,
                "peak": r.peak_bytes,
                "formula": r.formula,
                "error": r.error,
            }
            for r in self.rows
        }
        if self.peak_bytes is not None:
            over = sum(r.at_peak_bytes for r in self.rows if r.row == "overhead")
            peak = self.peak_bytes - over
            found["peak"] = {"bytes": peak, "peak": peak, "overhead": over, "error": PEAK_ERROR}
            found["peak"]["formula"] = f"the peak planned at {self.peak_moment}"
        for name, least in self.unmasked.items():
            found[name]["least"] = least
        return found

    def text(self) -> str:
        from mpdist.plan_text import text

        return text(self)

    def simulated(self, found: Simulated) -> Plan:
        """This plan with a simulation, whose peak decides whether it fits."""
        fits = None if self.memory_bytes is None else found.total <= self.memory_bytes
        return replace(self, simulation=found, fits=fits, parameters=found.parameters, trainable=found.trainable)

    @property
    def foreseen(self) -> tuple[int, str] | None:
        """(bytes of the rank's peak, its moment): the simulation's where there is one, else the formula's."""
        if self.simulation is not None:
            return self.simulation.total, self.simulation.moment
        return None if self.peak_bytes is None else (self.peak_bytes, self.peak_moment)

    @property
    def least_steps(self) -> int | None:
        """Steps that the budget takes where no slot is padding; None where data or the clock decide."""
        return self.steps if self.tokens is None else -(-self.tokens // self.batch.tokens_per_step)

    @property
    def is_close(self) -> bool:
        """Whether it fits, but by less than the estimate may be off."""
        if not self.fits or self.foreseen is None or self.memory_bytes is None:
            return False
        return self.foreseen[0] > (1 - MARGIN) * self.memory_bytes

    def require_fit(self) -> None:
        """Raises DoesNotFit where the plan says that memory is too small; silent where it fits or cannot be known."""
        if self.fits is not False or self.foreseen is None or self.memory_bytes is None:
            return
        peak, moment = self.foreseen
        from mpdist.plan_text import takes

        do = [str(s) for s in self.suggestions]
        raise DoesNotFit(
            f"the plan needs {format_bytes(peak)} a rank and there are {format_bytes(self.memory_bytes)}",
            f"the peak is at {moment}; `mpdist plan` shows what holds it",
            "; or ".join(do if any(s.fits for s in self.suggestions) else [*do, takes(self)]),
        )


def _row_json(row: Row) -> dict[str, Any]:
    where = {"where": "host"} if row.host else {}
    return {
        "row": row.row,
        "rest_bytes": row.rest_bytes,
        "peak_bytes": row.peak_bytes,
        "at_peak_bytes": row.at_peak_bytes,
        "formula": row.formula,
        "source": row.source,
        "error": row.error,
        **where,
    }


def make(
    cfg: Config,
    arch: Arch | Unknown | None,
    ranks: int,
    nodes: int,
    memory: int | None = None,
    origin: Callable[[str], str] = lambda _: "config",
    device: str | None = None,
    alternatives: bool = False,
) -> Plan:
    """The plan of ``cfg`` on ``nodes`` x ``ranks`` (ranks of one node).

    arch: what ``arch.look`` found. memory: bytes of one device, to fit in. origin: where a key's value came from, by
    its dotted name. device: cpu or cuda where it is known; else launch.device, of which auto counts as cuda.
    alternatives: also look for the other settings that fit the memory, its ``candidates``.
    Raises ConfigError with everything in the configuration that does not work with this world.
    """
    asked = asked_of(cfg, ranks, nodes, device)
    problems: list[MpdistError] = list(check_world(cfg, asked.ranks, origin, nodes))
    problems += _batch_problems(asked, origin)
    known = arch if isinstance(arch, Arch) else None
    if known is not None:
        problems += _model_problems(cfg, known, origin)
    if problems:
        raise ConfigError(problems)
    steps, horizon, why = _span(cfg)
    reason = arch.reason if isinstance(arch, Unknown) else "its shape is unknown"
    base = Plan(
        asked=asked,
        batch=Batch(asked.micro, asked.accumulation, asked.ranks, asked.global_, asked.global_ * asked.seq_len),
        steps=steps,
        horizon=horizon,
        horizon_reason=why,
        tokens=cfg.budget.tokens,
        model=f"{known.model_type}, from {known.source}" if known else f"unknown until the model is built: {reason}",
        memory_bytes=memory,
        saves=None if known is None else planned(cfg, asked, known),
    )
    return base if known is None else _with_model(base, cfg, known, memory, alternatives)


def _with_model(base: Plan, cfg: Config, arch: Arch, memory: int | None, alternatives: bool) -> Plan:
    asked = base.asked
    found = ledger_of(asked, arch)
    search = Search(cfg, asked, arch, memory) if memory is not None else None
    suggestions, more = advise(search) if search is not None else ([], None)
    unmasked = {}
    if asked.packing != "none":
        alone = ledger_of(replace(asked, packing="none"), arch)
        unmasked = {"activations": next(row.peak_bytes for row in alone.rows if row.row == "activations")}
        unmasked["peak"] = alone.peak_bytes - OVERHEAD[asked.device]
    return replace(
        base,
        parameters=arch.total,
        trainable=sum(p.count for p in arch.split(asked.freeze)[0]),
        rows=found.rows,
        states_bytes=sum(row.rest_bytes for row in found.rows if row.row in STATES),
        peak_bytes=found.peak_bytes,
        peak_moment=found.moment,
        host_bytes=sum(row.rest_bytes for row in found.rows if row.host),
        fits=None if memory is None else found.peak_bytes <= memory,
        suggestions=tuple(suggestions),
        more_ranks=more,
        traffic=tuple(traffic(asked, arch)),
        flops_per_token=model_flops_per_token(arch, asked.seq_len),
        loss_chunk_rows=loss_chunk_rows(arch.vocab, asked.micro * asked.seq_len, asked.loss_chunk),
        moments=found.moments,
        unmasked=unmasked,
        candidates=tuple(candidates(search)) if search is not None and alternatives else (),
        shares=fullest(asked, arch),
        warnings=tuple(_warnings(asked, arch)),
    )


def _warnings(asked: Asked, arch: Arch) -> Iterator[str]:
    if arch.max_positions is not None and asked.seq_len > arch.max_positions:
        yield f"data.seq_len = {asked.seq_len} is beyond the model's max_position_embeddings = {arch.max_positions}"
    if arch.activation not in ACTIVATIONS:
        yield f"'{arch.activation}' is no activation of transformers 5.24: planned like silu, the model may not be built"
    if asked.engine == "fsdp2" and asked.shard_size > 1:
        trained = arch.split(asked.freeze)[0]
        for cut in uneven(trained, asked.shard_size):
            part = cut.elements / sum(p.count for p in trained)
            yield (
                f"fsdp2 shares {part:.0%} of the parameters out unevenly: {cut.text(asked.shard_size)}, each with "
                f"{cut.held * asked.shard_size / cut.elements:.2f} equal shares; deepspeed's stage 3 cuts between any two elements"
            )


def asked_of(cfg: Config, ranks: int, nodes: int, device: str | None = None) -> Asked:
    """The values of a configuration that decide bytes; ``ranks`` are those of one node."""
    return Asked(
        ranks=ranks * nodes,
        nodes=nodes,
        micro=cfg.batch.micro,
        global_=cfg.batch.global_,
        seq_len=cfg.data.seq_len,
        packing=cfg.data.packing,
        attention=cfg.model.attention,
        freeze=tuple(cfg.model.freeze),
        compute=cfg.precision.compute,
        master=cfg.precision.master,
        keep_fp32=tuple(cfg.precision.keep_fp32),
        engine=cfg.shard.engine,
        stage=cfg.shard.stage,
        replicas=cfg.shard.replicas,
        offload=cfg.shard.offload,
        background=cfg.checkpoint.background,
        wire=cfg.reduce.wire,
        sum=cfg.reduce.sum,
        when=cfg.reduce.when,
        checkpointing=cfg.memory.checkpointing,
        loss_chunk=cfg.memory.loss_chunk,
        fused=cfg.optim.fused is not False,
        device=device or (cfg.launch.device if cfg.launch.device != "auto" else "cuda"),
    )


def _batch_problems(asked: Asked, origin: Callable[[str], str]) -> list[MpdistError]:
    each = asked.micro * asked.ranks
    if asked.global_ % each == 0 or asked.global_ % asked.micro:  # the second is the configuration's own mistake
        return []
    low = asked.global_ // each * each
    do = f"Take batch.global {_either([n for n in (low, low + each) if n])}"
    micros = divisors(asked.global_ // asked.ranks) if asked.global_ % asked.ranks == 0 else []
    nearest = [m for m in micros if m < asked.micro][-1:] + [m for m in micros if m > asked.micro][:1]
    do += f", or batch.micro {_either(nearest)}." if nearest else "."
    return [
        UsageError(
            f"batch.global = {asked.global_} ({origin('batch.global')}), batch.micro = {asked.micro} "
            f"({origin('batch.micro')}) on {asked.ranks} ranks",
            f"Each pass over the ranks takes {each} sequences, and {asked.global_} is not a whole number of passes.",
            do,
        )
    ]


def _either(values: list[int]) -> str:
    return " or ".join(map(str, values))


def _model_problems(cfg: Config, arch: Arch, origin: Callable[[str], str]) -> list[MpdistError]:
    problems: list[MpdistError] = []
    # A learned position table ends; rotary models run on past their stated length, if badly.
    if arch.learned_positions and arch.max_positions is not None and cfg.data.seq_len > arch.max_positions:
        problems.append(
            UsageError(
                f"data.seq_len = {cfg.data.seq_len} ({origin('data.seq_len')})",
                f"The model's position table ends at {arch.max_positions}.",
                f"Take data.seq_len {arch.max_positions} or less.",
            )
        )
    if arch.router_loss and cfg.precision.scale.per_block:
        problems.append(
            UsageError(
                f"precision.scale.per_block = true ({origin('precision.scale.per_block')})",
                "The model asks for a router loss, which enters inside the blocks, at the window's scale and not at a block's.",
                "Take it out, or set output_router_logits to false in the model's config.",
            )
        )
    where = f"model.freeze = {list(cfg.model.freeze)} ({origin('model.freeze')})"
    names = [p.name for p in arch.params]
    # A model's own code may have parameters that its type does not tell; the built model is asked in any case.
    for pattern in () if cfg.model.trust_remote_code else cfg.model.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            why = f"'{pattern}' matches no parameter; names are like {names[0]}."
            problems.append(UsageError(where, why, "Use shell wildcards, such as 'model.embed_tokens.*'."))
    if not arch.split(cfg.model.freeze)[0]:
        why = f"It freezes all {len(names)} parameters, so nothing would train."
        problems.append(UsageError(where, why, "Take narrower patterns."))
    return problems


def _span(cfg: Config) -> tuple[int | None, int | None, str]:
    """(steps, the schedule's horizon, why it is that or why it is not known)."""
    budget, horizon = cfg.budget, cfg.optim.horizon
    if isinstance(horizon, int):
        return budget.steps, horizon, "optim.horizon"
    if budget.steps is not None:
        return budget.steps, budget.steps, "budget.steps"
    if budget.seconds is not None:
        return None, None, "the clock decides how many steps there are; the schedule needs none"
    return None, None, "known once the data is prepared"
