"""What follows from a configuration and a world: batch arithmetic, memory ledger, traffic, verdict and advice.

Nothing here needs torch. The launcher makes a plan from the world it will start; the worker makes it again from the
world it finds and refuses to go on if the two differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from mpdist.arch import Arch, Unknown, look, model_flops_per_token
from mpdist.config import Config, Resolved, check_world
from mpdist.errors import ConfigError, DoesNotFit, MpdistError, UsageError
from mpdist.plan_memory import BEYOND, MARGIN, Asked, Row, loss_chunk_rows, rows
from mpdist.plan_traffic import Traffic, traffic
from mpdist.space import Saves, planned
from mpdist.units import format_bytes

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
    "run",
]

STATES = ("parameters", "working", "gradients", "moments")


@dataclass(frozen=True)
class Batch:
    """Sequences: ``micro`` on one rank at once, ``global_`` in a step. ``ranks``: the world's."""

    micro: int
    accumulation: int
    ranks: int
    global_: int
    tokens_per_step: int


@dataclass(frozen=True)
class Suggestion:
    """A change of settings, the peak that it gives, and whether that fits (None without a memory to fit in)."""

    change: str
    peak_bytes: int
    fits: bool | None

    def __str__(self) -> str:
        verdict = {True: "fits", False: "still too much", None: ""}[self.fits]
        return f"{self.change}: peak {format_bytes(self.peak_bytes)}" + (f", {verdict}" if verdict else "")


@dataclass(frozen=True)
class Plan:
    """The whole plan; bytes are of the rank that holds the most. What depends on an unknown model is None."""

    asked: Asked
    batch: Batch
    steps: int | None
    horizon: int | None
    horizon_reason: str
    model: str
    parameters: int | None
    trainable: int | None
    rows: tuple[Row, ...]
    states_bytes: int | None
    peak_bytes: int | None
    peak_moment: str
    host_bytes: int
    memory_bytes: int | None
    fits: bool | None
    suggestions: tuple[Suggestion, ...]
    traffic: tuple[Traffic, ...]
    flops_per_token: float | None
    loss_chunk_rows: int | None
    saves: Saves | None

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
            "peak_bytes_per_rank": self.peak_bytes,
            "peak_moment": self.peak_moment,
            "host_bytes_per_rank": self.host_bytes,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
            "suggestions": [str(s) for s in self.suggestions],
            "batch": {
                "micro": b.micro,
                "accumulation": b.accumulation,
                "ranks": b.ranks,
                "global": b.global_,
                "tokens_per_step": b.tokens_per_step,
            },
            "steps": self.steps,
            "horizon": self.horizon,
            "traffic": [t.json() for t in self.traffic],
            "model_flops_per_token": self.flops_per_token,
            "loss_chunk_rows": self.loss_chunk_rows,
            "checkpoint": self.saves.to_json() if self.saves is not None else None,
        }

    def ledger(self) -> dict[str, dict[str, Any]]:
        """What the measured ledger is held against: row -> bytes (at rest), peak, formula; row peak is the rank's."""
        found = {r.row: {"bytes": r.rest_bytes, "peak": r.peak_bytes, "formula": r.formula} for r in self.rows}
        if self.peak_bytes is not None:
            found["peak"] = {"bytes": self.peak_bytes, "peak": self.peak_bytes, "formula": f"at {self.peak_moment}"}
        return found

    def text(self) -> str:
        from mpdist.plan_text import text

        return text(self)

    @property
    def is_close(self) -> bool:
        """Whether it fits, but by less than the estimate may be off."""
        if not self.fits or self.peak_bytes is None or self.memory_bytes is None:
            return False
        return self.peak_bytes > (1 - MARGIN) * self.memory_bytes

    def require_fit(self) -> None:
        """Raises DoesNotFit where the plan says that memory is too small; silent where it fits or cannot be known."""
        if self.fits is not False or self.peak_bytes is None or self.memory_bytes is None:
            return
        do = [str(s) for s in self.suggestions if s.fits] or [str(s) for s in self.suggestions]
        raise DoesNotFit(
            f"the plan needs {format_bytes(self.peak_bytes)} a rank and there are {format_bytes(self.memory_bytes)}",
            f"the peak is at {self.peak_moment}; `mpdist plan` shows what holds it",
            "; or ".join(do if any(s.fits for s in self.suggestions) else [*do, BEYOND]),
        )


def _row_json(row: Row) -> dict[str, Any]:
    where = {"where": "host"} if row.host else {}
    return {
        "row": row.row,
        "rest_bytes": row.rest_bytes,
        "peak_bytes": row.peak_bytes,
        "at_peak_bytes": row.at_peak_bytes,
        "formula": row.formula,
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
) -> Plan:
    """The plan of ``cfg`` on ``nodes`` x ``ranks`` (ranks of one node).

    arch: what ``arch.look`` found. memory: bytes of one device, to fit in. origin: where a key's value came from, by
    its dotted name. device: cpu or cuda where it is known; else launch.device, of which auto counts as cuda.
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
        model=f"{known.model_type}, from {known.source}" if known else f"unknown until the model is built: {reason}",
        parameters=None,
        trainable=None,
        rows=(),
        states_bytes=None,
        peak_bytes=None,
        peak_moment="",
        host_bytes=0,
        memory_bytes=memory,
        fits=None,
        suggestions=(),
        traffic=(),
        flops_per_token=None,
        loss_chunk_rows=None,
        saves=None if known is None else planned(cfg, asked, known),
    )
    return base if known is None else _with_model(base, known, memory)


def _with_model(base: Plan, arch: Arch, memory: int | None) -> Plan:
    asked = base.asked
    found, peak, moment = rows(asked, arch)
    fits = None if memory is None else peak <= memory
    return replace(
        base,
        parameters=arch.total,
        trainable=sum(p.count for p in arch.split(asked.freeze)[0]),
        rows=tuple(found),
        states_bytes=sum(row.rest_bytes for row in found if row.row in STATES),
        peak_bytes=peak,
        peak_moment=moment,
        host_bytes=sum(row.rest_bytes for row in found if row.host),
        fits=fits,
        suggestions=tuple(_suggest(asked, arch, memory) if memory is not None else ()),
        traffic=tuple(traffic(asked, arch)),
        flops_per_token=model_flops_per_token(arch, asked.seq_len),
        loss_chunk_rows=loss_chunk_rows(arch.vocab, asked.micro * asked.seq_len, asked.loss_chunk),
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
    near = [str(n) for n in (low, low + each) if n]
    fewer = [m for m in range(1, asked.micro) if asked.global_ % (m * asked.ranks) == 0]
    do = f"Take batch.global {' or '.join(near)}" + (f", or batch.micro {max(fewer)}" if fewer else "") + "."
    return [
        UsageError(
            f"batch.global = {asked.global_} ({origin('batch.global')}), batch.micro = {asked.micro} "
            f"({origin('batch.micro')}) on {asked.ranks} ranks",
            f"Each pass over the ranks takes {each} sequences, and {asked.global_} is not a whole number of passes.",
            do,
        )
    ]


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


# ----------------------------------------------------------------------------------------------- command


def run(resolved: Resolved, *, ranks: int | None, nodes: int | None, memory_bytes: int | None, as_json: bool) -> int:
    """`mpdist plan`: prints the plan; status 3 where it does not fit. ranks: of one node; None as the config says."""
    cfg = resolved.config
    if ranks is None and isinstance(cfg.launch.ranks, int):
        ranks = cfg.launch.ranks
    elif ranks is None:
        from mpdist.place import visible_devices

        ranks = 1 if cfg.launch.device == "cpu" else max(1, visible_devices(os.environ))
    shape = look(cfg.model.path, cfg.model.config, cfg.model.revision)
    plan = make(
        cfg, shape, ranks, nodes or cfg.launch.nodes, memory_bytes, lambda name: resolved.origins.get(name, "config")
    )
    print(json.dumps(plan.to_json(), indent=2) if as_json else plan.text())
    return DoesNotFit.status if plan.fits is False else 0


# ------------------------------------------------------------------------------------------------ advice


def _suggest(asked: Asked, arch: Arch, memory: int) -> list[Suggestion]:
    """What to change, cheapest in speed first: each change alone, and the first of them together that fit.

    Together only without one that fits alone. Where it fits already: the largest micro-batch that fits with the estimate's margin to spare.
    """

    def tried(change: str, trial: Asked) -> Suggestion:
        peak = rows(trial, arch)[1]
        return Suggestion(change, peak, peak <= memory)

    peak = rows(asked, arch)[1]
    if peak <= memory:
        room = (1 - MARGIN) * memory
        larger = [m for m in _micros(asked) if m > asked.micro and rows(replace(asked, micro=m), arch)[1] <= room]
        return [tried(f"batch.micro={max(larger)}", replace(asked, micro=max(larger)))] if larger else []
    found = [tried(change, replace(asked, **values)) for change, values in _changes(asked)]
    found = [alone for alone in found if alone.peak_bytes < peak]
    enough = {alone.change for alone in found if alone.fits}
    together, settings = asked, dict[str, str]()
    for change, values in _changes(asked):
        if change in enough or rows(replace(together, **values), arch)[1] >= rows(together, arch)[1]:
            continue
        together = replace(together, **values)
        settings |= dict(setting.split("=", 1) for setting in change.split(" "))  # a later value of a key replaces it
        both = tried(" ".join(f"{key}={value}" for key, value in settings.items()), together)
        if both.fits:
            return [*found, both]
    return found


def _micros(asked: Asked) -> list[int]:
    each = asked.global_ // asked.ranks
    return [m for m in range(1, each + 1) if each % m == 0] if asked.global_ % asked.ranks == 0 else []


def _changes(asked: Asked) -> list[tuple[str, dict[str, Any]]]:
    out: list[tuple[str, dict[str, Any]]] = []
    third: tuple[str, dict[str, Any]] = ("shard.stage=3", {"stage": 3})
    if asked.stage == 1:  # which is what makes `last` the default
        third = ("shard.stage=3 reduce.when=every", {"stage": 3, "when": "every"})
    if asked.loss_chunk != "auto":
        out.append(("memory.loss_chunk=auto", {"loss_chunk": "auto"}))
    if asked.engine == "ddp" and asked.ranks > 1:
        out.append(("shard.engine=fsdp2 shard.stage=3", {"engine": "fsdp2", "stage": 3}))
    if asked.engine != "ddp":
        if asked.stage < 3:
            out.append(third)
        # Below stage 3 deepspeed keeps gradients whole for `last` even with one micro-batch.
        if asked.when == "last" and (asked.accumulation > 1 or (asked.engine == "deepspeed" and asked.stage < 3)):
            out.append(("reduce.when=every", {"when": "every"}))
    if asked.checkpointing == "none":
        out.append(("memory.checkpointing=selective", {"checkpointing": "selective"}))
    smaller = sorted((m for m in _micros(asked) if m < asked.micro), reverse=True)
    for micro in smaller[:2]:
        out.append((f"batch.micro={micro}", {"micro": micro}))
    if asked.checkpointing != "full":
        out.append(("memory.checkpointing=full", {"checkpointing": "full"}))
    if asked.replicas > 1:
        out.append(("shard.replicas=1", {"replicas": 1}))
    if 1 in smaller[2:]:
        out.append(("batch.micro=1", {"micro": 1}))
    if asked.compute == "fp32":
        out.append(("precision.compute=bf16", {"compute": "bf16"}))
    if asked.device == "cuda" and asked.engine == "deepspeed" and asked.offload != "all":
        if asked.offload == "none":
            out.append(("shard.offload=optimizer", {"offload": "optimizer"}))
        before, values = ("", {}) if asked.stage == 3 else (f"{third[0]} ", third[1])
        out.append((f"{before}shard.offload=all", {**values, "offload": "all"}))
    elif asked.device == "cuda" and asked.offload == "none":
        if asked.engine == "fsdp2":
            out.append(("shard.offload=all", {"offload": "all"}))
        elif asked.ranks > 1:
            sharded = {"engine": "fsdp2", "stage": 3, "offload": "all"}
            out.append(("shard.engine=fsdp2 shard.stage=3 shard.offload=all", sharded))
    return out
