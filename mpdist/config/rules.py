"""Rules between keys. A setting that would have no effect is an error, like a combination that cannot run.

Having an effect is judged by value, not by whether a key was written: a resolved configuration writes every key,
defaults included, and has to load again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mpdist.config import describe, schema
from mpdist.config.schema import Config
from mpdist.errors import MpdistError, UsageError


class Support(NamedTuple):
    """What an engine can do. The README's support table is made from these."""

    engine: str
    stages: tuple[int, ...]
    replicas: bool
    offload: tuple[str, ...]
    wires: tuple[str, ...] = ("fp32", "bf16", "fp16")
    sums: tuple[str, ...] = ("fp32", "wire")
    when: tuple[str, ...] = ("every", "last")
    computes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    masters: tuple[str, ...] = ("fp32", "compute")
    keeps: bool = True  # precision.keep_fp32
    compiles: bool = True  # model.compile: blocks
    note: str = ""


SUPPORT = {
    "ddp": Support("ddp", (0,), False, ("none",), note="every rank holds the whole model"),
    "fsdp2": Support("fsdp2", (2, 3), True, ("none", "all"), note="replicas above 1 is HSDP"),
    "deepspeed": Support(
        *("deepspeed", (1, 2, 3), False, ("none", "optimizer", "all")),
        masters=("fp32",),
        keeps=False,
        compiles=False,
        note="ZeRO; offload all is of stage 3, where every rank has to run the same modules",
    ),
}


class _View:
    """A config with the names, values and origins that messages need."""

    def __init__(self, config: Config, origin: Callable[[str], str]) -> None:
        self.config, self.origin = config, origin

    def value(self, name: str) -> Any:
        value: Any = self.config
        for part in name.split("."):
            value = value[int(part)] if part.isdecimal() else getattr(value, "global_" if part == "global" else part)
        return value

    def show(self, *names: str) -> str:
        return ", ".join(f"{name} = {describe.show(self._plain(name))} ({self.origin(name)})" for name in names)

    def _plain(self, name: str) -> Any:
        value = self.value(name)
        if isinstance(value, tuple):
            return [item.model_dump(mode="json") if hasattr(item, "model_dump") else item for item in value]
        return value

    def changed(self, name: str) -> bool:
        """Whether the value is not the schema's default."""
        *path, leaf = name.split(".")
        section = self.value(".".join(path)) if path else self.config
        default = type(section).model_fields[leaf].get_default(call_default_factory=True, validated_data={})
        return bool(getattr(section, leaf) != default)

    def no_effect(self, name: str, why: str, do: str = "") -> Iterator[MpdistError]:
        if self.changed(name):
            yield UsageError(self.show(name), f"it would have no effect: {why}", do or f"take {name} out")


def _model(v: _View) -> Iterator[MpdistError]:
    model = v.config.model
    if (model.path is None) == (model.config is None):
        what = v.show("model.path") + " and model.config are both given" if model.path else "no model is given"
        yield UsageError(
            what,
            "exactly one of model.path and model.config says what to train",
            "give one (and set the other to null)",
        )
        return
    local = model.path is not None and (model.path.startswith((".", "/", "~")) or os.path.isdir(model.path))
    if model.config is not None or local:
        yield from v.no_effect("model.revision", "only a hub id has revisions")
    if model.config is not None and v.config.data.tokenizer == "bytes":
        yield from v.no_effect("model.trust_remote_code", "nothing is loaded that could bring code along")
    if model.attention == "flash_attention_2" and v.config.precision.compute == "fp32":
        yield UsageError(
            v.show("model.attention", "precision.compute"),
            "flash attention computes in 16 bit only",
            "take attention sdpa, or compute bf16",
        )
    if model.attention == "flash_attention_2" and v.config.launch.device == "cpu":
        yield UsageError(
            v.show("model.attention", "launch.device"), "flash attention needs a GPU", "take attention sdpa"
        )


def _tokenizer(v: _View) -> Iterator[MpdistError]:
    if v.config.model.path is None and v.config.model.config is not None and v.config.data.tokenizer == "model":
        yield UsageError(
            v.show("data.tokenizer"),
            "a model from model.config has no tokenizer beside it",
            "give data.tokenizer: bytes, or a folder or hub id",
        )


def _sources(v: _View) -> Iterator[MpdistError]:
    data = v.config.data
    names = {
        "text": {"text"},
        "prompt_completion": {"prompt", "completion"},
        "messages": {"messages", "role", "content"},
    }
    for part in ("train", "eval"):
        for i, source in enumerate(getattr(data, part)):
            here = f"data.{part}.{i}"
            for field in sorted(set(source.fields) - names[source.format]):
                yield UsageError(
                    f"{here}.fields.{field} = {source.fields[field]} ({v.origin(f'{here}.fields.{field}')})",
                    f"a record of format {source.format} has no field {field}",
                    f"its fields are {', '.join(sorted(names[source.format]))}; or another format",
                )
            if data.loss_on != "all" and source.format == "text":
                yield UsageError(
                    v.show("data.loss_on", f"{here}.format"),
                    "plain text has no completion and no assistant",
                    "take loss_on: all, or format prompt_completion or messages",
                )
            if data.loss_on == "assistant" and source.format == "prompt_completion":
                yield UsageError(
                    v.show("data.loss_on", f"{here}.format"), "such a record has no roles", "take loss_on: completion"
                )
            if part == "eval":
                yield from v.no_effect(f"{here}.weight", "evaluation reads every source once")
    if not any(source.format == "messages" for source in (*data.train, *data.eval)):
        yield from v.no_effect("data.chat_template", "no source has format messages")


def _batch(v: _View) -> Iterator[MpdistError]:
    batch = v.config.batch
    if batch.global_ % batch.micro:
        yield UsageError(
            v.show("batch.global", "batch.micro"),
            "a step is a whole number of micro-batches on every rank",
            _global_of(v.config),
        )


def _global_of(config: Config) -> str:
    """The batch to take: a multiple of what all ranks take at once, which another number of them makes another one."""
    micro, launch = config.batch.micro, config.launch
    if not isinstance(launch.ranks, int):
        return f"take a batch.global that is a multiple of {micro} x the ranks there are, or another batch.micro"
    ranks = launch.ranks * launch.nodes
    low = config.batch.global_ // (micro * ranks) * micro * ranks
    near = " or ".join(str(n) for n in (low, low + micro * ranks) if n)
    return f"take batch.global {near} ({micro} x {ranks} rank{'s' * (ranks != 1)} x a whole number), or another batch.micro"


def _precision(v: _View) -> Iterator[MpdistError]:
    precision = v.config.precision
    if precision.compute == "fp32":
        yield from v.no_effect("precision.keep_fp32", "everything is computed in FP32 already")
        yield from v.no_effect("precision.master", "the masters have the compute dtype, FP32, already")
    if v.config.launch.device == "cpu":
        yield from v.no_effect("precision.tf32", "a CPU has no TF32")


def _scale(v: _View) -> Iterator[MpdistError]:
    scale, mode = v.config.precision.scale, scale_mode(v.config)
    if v.config.precision.compute != "fp16":
        why = "every block's gradients fit into the range of what computes here"
        yield from v.no_effect("precision.scale.per_block", why, "take it out, or compute in fp16")
    elif scale.per_block and mode == "off":
        why = "scales of blocks lie inside the window's, and there is none"
        do = "take it out, or give precision.scale.mode: dynamic or static"
        yield UsageError(v.show("precision.scale.per_block", "precision.scale.mode"), why, do)
    elif scale.per_block and v.config.precision.master == "compute":
        why = "unscaled gradients are FP16 here, and lose again what a block's scale has kept"
        yield UsageError(v.show("precision.scale.per_block", "precision.master"), why, "take it out, or master: fp32")
    elif scale.per_block and v.config.shard.engine == "deepspeed":
        why = "deepspeed lays the gradients of all blocks end to end"
        yield UsageError(v.show("precision.scale.per_block", "shard.engine"), why, "take it out, or engine fsdp2")
    if mode == "off":
        why = "there is no loss scale here" + (" (compute and wire are not fp16)" if scale.mode == "auto" else "")
        for name in ("init", "growth", "backoff", "interval", "floor", "on_overflow"):
            yield from v.no_effect(f"precision.scale.{name}", why, "take it out, or give precision.scale.mode: dynamic")
    elif mode == "static":
        for name in ("growth", "backoff", "interval", "floor", *(() if scale.per_block else ("on_overflow",))):
            yield from v.no_effect(f"precision.scale.{name}", "a static scale never changes")
    elif scale.init < scale.floor:
        yield UsageError(
            v.show("precision.scale.init", "precision.scale.floor"),
            "the scale starts below its floor",
            "raise init or lower floor",
        )


def scale_mode(config: Config) -> str:
    """What ``precision.scale.mode: auto`` comes to: dynamic where compute or wire is fp16, else off."""
    if config.precision.scale.mode != "auto":
        return config.precision.scale.mode
    return "dynamic" if "fp16" in (config.precision.compute, config.reduce.wire) else "off"


def _engine(v: _View) -> Iterator[MpdistError]:
    shard, can = v.config.shard, SUPPORT[v.config.shard.engine]
    others = [s.engine for s in SUPPORT.values() if shard.stage in s.stages]
    stages = " or ".join(map(str, can.stages))
    if shard.stage not in can.stages:
        other = f", or shard.engine: {others[0]}" if others else ""
        yield UsageError(
            v.show("shard.stage", "shard.engine"),
            f"{can.engine} has stage {stages} only",
            f"take shard.stage: {stages}{other}",
        )
    if shard.replicas > 1 and not can.replicas:
        yield UsageError(
            v.show("shard.replicas", "shard.engine"),
            f"under {can.engine} "
            + ("every rank is a replica" if shard.engine == "ddp" else "all ranks share one copy"),
            "take replicas: 1, or engine fsdp2",
        )
    if shard.offload not in can.offload:
        others = [s.engine for s in SUPPORT.values() if shard.offload in s.offload]
        yield UsageError(
            v.show("shard.offload", "shard.engine"),
            f"{can.engine} can offload {', '.join(can.offload)}"
            if can.offload[1:]
            else f"{can.engine} does not offload",
            f"take offload: {' or '.join(can.offload)}, or engine {others[0]}",
        )
    elif shard.engine == "deepspeed" and shard.offload == "all" and shard.stage < 3:
        yield UsageError(
            v.show("shard.offload", "shard.stage"),
            "working copies that every rank holds whole cannot wait in host memory",
            "take offload: optimizer, or stage 3",
        )


def _engines_limits(v: _View) -> Iterator[MpdistError]:
    engine, precision = v.config.shard.engine, v.config.precision
    can = SUPPORT[engine]
    if precision.master not in can.masters and precision.compute != "fp32":
        yield UsageError(
            v.show("precision.master", "shard.engine"),
            f"{engine} keeps FP32 masters",
            "take master: fp32, or engine fsdp2",
        )
    if precision.keep_fp32 and not can.keeps:
        yield UsageError(
            v.show("precision.keep_fp32", "shard.engine"),
            f"{engine} lays all parameters end to end, in one dtype",
            "take keep_fp32 out, or engine fsdp2",
        )
    if v.config.model.compile != "none" and not can.compiles:
        yield UsageError(
            v.show("model.compile", "shard.engine"),
            f"{engine}'s hooks on modules cannot be compiled",
            "take compile: none, or engine fsdp2",
        )


def _reduce(v: _View) -> Iterator[MpdistError]:
    if v.config.reduce.wire == "fp32":
        yield from v.no_effect(
            "reduce.sum", "the wire is FP32, so both sums are the same", "take sum out, or a 16-bit wire"
        )


def _budget(v: _View) -> Iterator[MpdistError]:
    names = [f"budget.{n}" for n in ("steps", "epochs", "tokens", "seconds") if getattr(v.config.budget, n) is not None]
    if len(names) != 1:
        what = v.show(*names) if names else "no budget is given"
        do = "set the others to null" if names else "give one, such as budget: {steps: 200}"
        yield UsageError(what, "exactly one of steps, epochs, tokens and seconds says when the run is done", do)


def _schedule(v: _View) -> Iterator[MpdistError]:
    optim, budget = v.config.optim, v.config.budget
    share = 0 < optim.warmup < 1
    needs_horizon = optim.schedule != "constant" or share
    if optim.warmup >= 1 and optim.warmup != math.floor(optim.warmup):
        yield UsageError(
            v.show("optim.warmup"), "from 1 on it counts steps, which are whole", "take a whole number, or one below 1"
        )
    if not needs_horizon:
        yield from v.no_effect("optim.horizon", "a constant schedule has no span, and the warm-up is not a share of it")
    elif optim.horizon == "auto" and budget.seconds is not None:
        what = v.show(
            "optim.horizon", "budget.seconds", "optim.warmup" if optim.schedule == "constant" else "optim.schedule"
        )
        do = "give optim.horizon a number of steps, or take a constant schedule with its warm-up in steps"
        yield UsageError(what, "a budget in seconds does not say how many steps the schedule spans", do)
    span = optim.horizon if optim.horizon != "auto" else budget.steps
    if span is not None and optim.schedule != "constant" and optim.warmup >= 1 and optim.warmup >= span:
        why = f"the warm-up takes up the schedule's whole span of {span} step{'s' * (span != 1)}"
        most = f"0 to {span - 1} steps" if span > 1 else "0"
        do = f"take optim.warmup {most}, or a share below 1 such as 0.05, which follows the span"
        yield UsageError(
            v.show("optim.warmup", "budget.steps" if optim.horizon == "auto" else "optim.horizon"), why, do
        )
    if optim.weight_decay == 0:
        yield from v.no_effect("optim.decay", "weight_decay is 0")


def _evaluation(v: _View) -> Iterator[MpdistError]:
    if not v.config.data.eval:
        for name in ("eval.every", "eval.rows", "checkpoint.keep_best"):
            yield from v.no_effect(name, "data.eval is empty", "take it out, or give data.eval a source")


def _tracking(v: _View) -> Iterator[MpdistError]:
    if v.config.track.wandb.mode == "disabled":
        for name in ("project", "group"):
            yield from v.no_effect(f"track.wandb.{name}", "track.wandb.mode is disabled")


# What submit says itself, from other keys.
_OF_SUBMIT = (
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "signal",
    "requeue",
    "open-mode",
    "output",
    "parsable",
    "wrap",
    "no-requeue",
)
_ITS_KEY = {
    **dict.fromkeys(("account", "A"), "account"),
    **dict.fromkeys(("partition", "p"), "partition"),
    **dict.fromkeys(("qos", "q"), "qos"),
    **dict.fromkeys(("constraint", "C"), "constraint"),
    **dict.fromkeys(("time", "t"), "time"),
    **dict.fromkeys(("array", "a"), "array"),
    **dict.fromkeys(("dependency", "d"), "dependency"),
    **dict.fromkeys(("cpus-per-task", "c"), "cpus_per_node"),
    "gpus-per-node": "gpus_per_node",
    "gres": "gres",
    "mem": "mem",
    "exclusive": "exclusive",
}


def _slurm(v: _View) -> Iterator[MpdistError]:
    if v.config.slurm.gpus_per_node and "gpu" in (v.config.slurm.gres or ""):
        why = "both ask for GPUs, and Slurm would take the one or the other"
        yield UsageError(v.show("slurm.gpus_per_node", "slurm.gres"), why, "give one of them")
    if v.config.slurm.time is not None and v.config.slurm.time <= v.config.slurm.signal_lead + 60:
        why = "Slurm gives its warning up to 60 s early: the run would be told to stop as soon as it starts"
        do = "ask for more time, or a shorter signal_lead"
        yield UsageError(v.show("slurm.time", "slurm.signal_lead"), why, do)
    for option in v.config.slurm.extra:
        name = option[2:].partition("=")[0] if option.startswith("--") else option[1:2]  # -px is -p x
        if not option.startswith("-"):
            do = "write it as one word, such as --mail-type=END"
            yield UsageError(v.show("slurm.extra"), f"{option} is no option of sbatch's", do)
        elif key := _ITS_KEY.get(name):
            yield UsageError(v.show("slurm.extra"), f"{option} has a key of its own", f"set slurm.{key}")
        elif name in (*_OF_SUBMIT, "N", "n", "o"):
            yield UsageError(v.show("slurm.extra"), f"{option} is what `mpdist submit` decides", "take it out")


_DRILLS_WITH_RANK = tuple(name for name in schema.Drill.model_fields if name != "corrupt_at")

# Each rule with the keys that it reads: it is left out where one of them is wrong already.
_RULES: tuple[tuple[Callable[[_View], Iterator[MpdistError]], tuple[str, ...]], ...] = (
    (_model, ("model", "precision.compute", "launch.device", "data.tokenizer")),
    (_tokenizer, ("model.path", "model.config", "data.tokenizer")),
    (_sources, ("data",)),
    (_batch, ("batch",)),
    (_precision, ("precision.compute", "precision.keep_fp32", "precision.master", "precision.tf32", "launch.device")),
    (_scale, ("precision", "reduce.wire", "shard.engine")),
    (_engine, ("shard",)),
    (_engines_limits, ("shard.engine", "precision", "model.compile")),
    (_reduce, ("reduce",)),
    (_budget, ("budget",)),
    (_schedule, ("optim.warmup", "optim.horizon", "optim.schedule", "optim.weight_decay", "optim.decay", "budget")),
    (_evaluation, ("eval", "data.eval")),
    (_tracking, ("track.wandb",)),
    (_slurm, ("slurm",)),
)


def check(config: Config, origin: Callable[[str], str], wrong: set[str]) -> list[MpdistError]:
    """Every rule that the config breaks, but for those that read a key in ``wrong`` (dotted names)."""
    view = _View(config, origin)
    return [problem for rule, reads in _RULES if not _touches(reads, wrong) for problem in rule(view)]


def _touches(reads: tuple[str, ...], wrong: set[str]) -> bool:
    return any(r == w or r.startswith(w + ".") or w.startswith(r + ".") for r in reads for w in wrong)


def check_world(
    config: Config, ranks: int, origin: Callable[[str], str] = lambda _: "config", nodes: int = 1
) -> list[MpdistError]:
    """What does not work with a world of this many ranks on so many nodes; for the plan, which knows the world."""
    found: list[MpdistError] = []
    view = _View(config, origin)
    replicas = config.shard.replicas
    if ranks % replicas:
        near = " or ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        found.append(
            UsageError(view.show("shard.replicas"), f"it does not divide the world of {ranks} ranks", f"take {near}")
        )
    elif not _even(ranks // replicas, ranks // nodes):
        near = " or ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0 and _even(ranks // n, ranks // nodes))
        why = f"shards of {ranks // replicas} ranks would straddle nodes of {ranks // nodes} unevenly"
        found.append(UsageError(view.show("shard.replicas"), why, f"take {near}"))
    for name in _DRILLS_WITH_RANK:
        drill = getattr(config.drill, name)
        if drill is None:
            continue
        if isinstance(drill.rank, int) and drill.rank >= ranks:
            why = f"the world has {ranks} rank{'s' * (ranks != 1)}, from 0: the drill would have no effect"
            found.append(UsageError(view.show(f"drill.{name}.rank"), why, f"take a rank below {ranks}"))
    overflow = config.drill.overflow_at
    accumulation = config.batch.global_ // (config.batch.micro * ranks)
    if overflow is not None and accumulation and overflow.micro > accumulation:
        why = f"each rank has only {accumulation} in a window: the drill would have no effect"
        found.append(UsageError(view.show("drill.overflow_at.micro"), why, f"take 1 to {accumulation}"))
    return found


def _even(shard: int, per_node: int) -> bool:
    """Whether each group of `shard` ranks lies in one node or fills whole ones: gradients travel in two even levels."""
    return shard % per_node == 0 or per_node % shard == 0
