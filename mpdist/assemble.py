"""A configuration and a world become the parts that train: the only place where config values turn into objects."""

from __future__ import annotations

import copy
import json
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpdist import arch, devices, model, plan, precision
from mpdist.block_scale import BlockScale
from mpdist.config import Config, Resolved
from mpdist.data import Order, Rows, check_vocabulary, load_tokenizer, open_rows
from mpdist.data.command import from_config
from mpdist.dist import Mesh, build_mesh
from mpdist.errors import MachineError, MpdistError, UsageError
from mpdist.feed import Feed
from mpdist.optim import Optimizer, schedule
from mpdist.plan_memory import loss_chunk_rows
from mpdist.probe import check_isolation
from mpdist.reduce import Wire
from mpdist.shard import Engine
from mpdist.shard.ddp import Ddp
from mpdist.shard.deepspeed import DeepSpeed
from mpdist.shard.fsdp2 import Fsdp2
from mpdist.world import World

Say = Callable[[str], None]


@dataclass
class Parts:
    """All that a run trains with. lr(step): of the step about to be made. steps, windows, tokens, seconds: the budget;
    exactly one is set. flops: of one real token, None where the architecture is unknown."""

    module: nn.Module
    engine: Engine
    wire: Wire
    optimizer: Optimizer
    window: precision.Window
    feed: Feed
    eval_feed: Feed | None
    eval_rows: int
    lr: Callable[[int], float]
    horizon: int | None
    steps: int | None
    windows: int | None
    tokens: int | None
    seconds: float | None
    source: model.Source
    source_config: Any
    flops: float | None
    peak_flops: float | None
    facts: dict[str, Any]


def switches(cfg: Config, device: torch.device) -> None:
    """Process-wide settings of torch that the config decides."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(cfg.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # a pass over each new tensor
    torch.backends.cudnn.benchmark = not cfg.deterministic
    torch.set_float32_matmul_precision("high" if cfg.precision.tf32 else "highest")
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))


def worlds_plan(resolved: Resolved, world: World, device: torch.device) -> plan.Plan:
    """The plan, made again from the world that is really there."""
    cfg = resolved.config
    shape = arch.look(cfg.model.path, cfg.model.config, cfg.model.revision)
    return plan.make(cfg, shape, world.local_ranks, world.nodes, device=device.type,
                     origin=lambda key: resolved.origins.get(key, "config"))  # fmt: skip


def assemble(resolved: Resolved, world: World, device: torch.device, say: Say) -> Parts:
    """Collective. Prepares data, builds, shards and fills the model. Raises MpdistError alike on all ranks."""
    cfg = resolved.config
    folders = from_config(cfg, say if world.is_first else _silent)
    rows = open_rows(folders[0])
    source = model.Source(cfg.model.path, dict(cfg.model.config) if cfg.model.config is not None else None, cfg.seed,
                          cfg.model.revision, cfg.model.trust_remote_code)  # fmt: skip
    config = model.read_config(source)
    built = model.build(copy.deepcopy(config), cfg.model.attention, cfg.model.trust_remote_code)
    config.architectures = [type(built).__name__]
    _check_attention(built, cfg)
    model.freeze(built, list(cfg.model.freeze))
    blocks = model.find_blocks(built)
    model.checkpoint_blocks(blocks, cfg.memory.checkpointing)
    if cfg.model.compile == "blocks":
        model.compile_blocks(blocks)
    vocab = built.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    check_vocabulary(rows, vocab)
    scales = _block_scales(cfg, built, blocks, device)
    way = model.give_loss(built, loss_chunk_rows(vocab, cfg.batch.micro * cfg.data.seq_len, cfg.memory.loss_chunk))
    policy = policy_of(cfg)
    wire, engine = engine_of(cfg, built, blocks, policy, world, device, mesh_of(cfg, world, device))
    read, how, spare = model.open_weights(source, config, built, device)
    if spare:
        say(
            f"warning: {len(spare)} tensors of {source.path} have no place in the model and are left out, the first {spare[0]}"
        )
    engine.load(read)
    for name, buffer in model.persistent_buffers(built):
        buffer.copy_(read(name, 0, buffer.shape[0] if buffer.dim() else 1))
    _check_masters(engine, policy)
    if cfg.data.packing != "none":
        check_isolation(engine.module, vocab, cfg.data.seq_len, device)
    optimizer = Optimizer(engine.parts, betas=cfg.optim.betas, eps=cfg.optim.eps, weight_decay=cfg.optim.weight_decay,
                          decay=cfg.optim.decay, fused=True if cfg.optim.fused == "auto" else cfg.optim.fused)  # fmt: skip
    order = Order(rows, cfg.batch.global_, cfg.seed, cfg.data.shuffle, cfg.data.last_window)
    ranks: dict[str, Any] = {"micro": cfg.batch.micro, "ranks": world.ranks, "rank": world.rank, "device": device}
    eval_rows = open_rows(folders[1]) if folders[1] else None
    eval_order = Order(eval_rows, cfg.batch.micro * world.ranks, 0, shuffle=False) if eval_rows is not None else None
    span = _span(cfg, rows, order)
    shape = arch.look(cfg.model.path, cfg.model.config, cfg.model.revision)
    flops = arch.model_flops_per_token(shape, cfg.data.seq_len) if isinstance(shape, arch.Arch) else None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    facts: dict[str, Any] = {
        "device": name, "backend": dist.get_backend(), "threads": torch.get_num_threads(), "loss": way, "weights": how,
        "attention": getattr(built.config, "_attn_implementation", None),
        "data": {"train": rows.digest, "eval": eval_rows.digest if eval_rows else None},
        "rows": len(rows), "scale": _scale_facts(cfg), "tf32": cfg.precision.tf32, "deterministic": cfg.deterministic,
        "model_flops_per_token": flops, "peak_flops": _peak_flops(cfg, device, name),
    }  # fmt: skip
    return Parts(
        module=engine.module, engine=engine, wire=wire, optimizer=optimizer, window=_window(cfg, engine, scales),
        feed=Feed(rows, order, **ranks), eval_feed=Feed(eval_rows, eval_order, **ranks) if eval_rows is not None and eval_order else None,
        eval_rows=min(cfg.eval.rows, len(eval_rows)) if eval_rows is not None else 0,
        lr=schedule(cfg.optim.schedule, cfg.optim.lr, _warmup(cfg, span["horizon"]), span["horizon"]),
        source=source, source_config=config, flops=flops, peak_flops=facts["peak_flops"], facts=facts, **span,
    )  # fmt: skip


def _peak_flops(cfg: Config, device: torch.device, name: str) -> float | None:
    """FLOP/s of one device: as the configuration has it, else as the table of devices does; None where neither does."""
    if cfg.track.peak_tflops is not None:
        return cfg.track.peak_tflops * 1e12
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return devices.peak_flops(name, cfg.precision.compute, cfg.precision.tf32, memory)


def _silent(_: str) -> None:
    return None


def policy_of(cfg: Config) -> precision.Policy:
    compute = precision.DTYPES[cfg.precision.compute]
    master = torch.float32 if cfg.precision.master == "fp32" else compute
    return precision.Policy(compute, master, tuple(cfg.precision.keep_fp32))


def mesh_of(cfg: Config, world: World, device: torch.device) -> Mesh:
    """Collective. The groups of ranks that the engine needs."""
    shards = world.ranks // cfg.shard.replicas if cfg.shard.engine != "ddp" else 1
    return build_mesh(device.type, shards, world.local_ranks, with_device_mesh=cfg.shard.engine == "fsdp2")


def engine_of(
    cfg: Config, built: nn.Module, blocks: list[nn.Module], policy: precision.Policy, world: World, device: torch.device,
    mesh: Mesh,
) -> tuple[Wire, Engine]:  # fmt: skip
    """Collective. The model, built on the meta device, cut and computing as the configuration says; not yet filled."""
    sharded, zero = cfg.shard.engine != "ddp", cfg.shard.engine == "deepspeed"
    kept = precision.kept_modules(built, policy)
    if policy.keep_fp32 and not kept:
        raise UsageError(f"precision.keep_fp32 = {list(policy.keep_fp32)} matches no module",
                         f"modules are named like {[n for n, _ in built.named_modules()][3]}", "use shell wildcards")  # fmt: skip
    own = {id(block) for block in blocks}
    around = [name for name, module in kept if any(id(part) in own for part in module.modules() if part is not module)]
    if around:
        raise UsageError(f"precision.keep_fp32 = {list(policy.keep_fp32)} keeps {around[0]}, which holds the model's blocks",
                         f"nothing to speak of would be left for precision.compute: {cfg.precision.compute}",
                         "use precision.compute: fp32, or patterns of blocks and what is in them, such as *.layers.0")  # fmt: skip
    inner = {id(module) for block in blocks for module in block.modules() if module is not block}
    within = [name for name, module in kept if id(module) in inner]
    if sharded and within and cfg.memory.checkpointing == "selective":
        # Its bookkeeping of operations meets those by which FSDP2 gathers a module, which recomputation repeats otherwise.
        raise UsageError(f"memory.checkpointing = selective, and precision.keep_fp32 keeps {within[0]}, which lies inside a block",
                         "the fsdp2 engine cannot recompute a part of a block that it gathers by itself",
                         "use memory.checkpointing: full, keep whole blocks in FP32, or use shard.engine: ddp")  # fmt: skip
    wire = Wire(mesh, precision.DTYPES[cfg.reduce.wire], cfg.reduce.sum == "fp32")
    _probe(wire, device)
    every = cfg.reduce.when == "every"
    if not sharded:
        return wire, Ddp(built, policy=policy, wire=wire, device=device, every=every, ranks=world.ranks)
    _probe_gather(wire, policy.compute, device)
    if zero:
        return wire, DeepSpeed(built, policy=policy, wire=wire, device=device, stage=cfg.shard.stage, every=every,
                               offload=cfg.shard.offload)  # fmt: skip
    return wire, Fsdp2(built, blocks, policy=policy, wire=wire, device=device, stage=cfg.shard.stage, every=every,
                       offload=cfg.shard.offload == "all")  # fmt: skip


def _probe(wire: Wire, device: torch.device) -> None:
    """Collective. Each (operation, dtype) that gradients will use is tried once, so that none fails inside backward."""
    size = wire.mesh.shard_size
    addend = torch.ones(size * 4, device=device)
    out = torch.empty(4, device=device)
    try:
        if size > 1:
            wire.reduce_scatter(out, addend)
        wire.add_replicas(torch.ones(4, device=device))
    except (RuntimeError, ValueError, TypeError) as error:
        raise UsageError(f"reduce.wire = {precision.WORDS[wire.wire]}: the {dist.get_backend()} backend refuses it",
                         str(error).splitlines()[0], "use reduce.wire: fp32") from error  # fmt: skip
    wire.bytes.take()


def _probe_gather(wire: Wire, compute: torch.dtype, device: torch.device) -> None:
    """Collective. As `_probe`, for the working copies that sharded ranks gather from each other."""
    for level in wire.mesh.scatter:
        parts = [torch.empty(4, dtype=compute, device=device) for _ in range(level.size)]
        try:
            dist.all_gather(parts, torch.ones(4, dtype=compute, device=device), group=level.group)
        except (RuntimeError, ValueError, TypeError) as error:
            raise UsageError(f"precision.compute = {precision.WORDS[compute]}: the {dist.get_backend()} backend refuses it",
                             str(error).splitlines()[0], "use precision.compute: fp32, or shard.engine: ddp") from error  # fmt: skip


def _block_scales(cfg: Config, built: nn.Module, blocks: list[nn.Module], device: torch.device) -> BlockScale | None:
    if not cfg.precision.scale.per_block:
        return None
    if model.router_coefficient(built):
        raise UsageError("precision.scale.per_block = true, but the model asks for a router loss",
                         "that enters inside the blocks, at the window's scale and not at a block's",
                         "take it out, or set output_router_logits to false in the model's config")  # fmt: skip
    return BlockScale(built, blocks, device)


def _window(cfg: Config, engine: Engine, scales: BlockScale | None) -> precision.Window:
    s = cfg.precision.scale
    if scales is not None:
        scales.take(engine.parts)
    mode = precision.scale_mode(s.mode, cfg.precision.compute, cfg.reduce.wire)
    return precision.Window(
        dynamic=mode == "dynamic", scale=1.0 if mode == "off" else s.init, growth=s.growth, backoff=s.backoff,
        interval=s.interval, floor=s.floor, patience=s.patience, retry=s.on_overflow == "retry", clip=cfg.optim.clip,
        blocks=scales,
    )  # fmt: skip


def _scale_facts(cfg: Config) -> dict[str, Any]:
    mode = precision.scale_mode(cfg.precision.scale.mode, cfg.precision.compute, cfg.reduce.wire)
    return {**cfg.precision.scale.model_dump(), "mode": mode}


def _check_masters(engine: Engine, policy: precision.Policy) -> None:
    """Verify, do not trust: every trainable parameter's master has the dtype that the policy says."""
    odd = [
        f"{p.name} is {p.tensor.dtype}"
        for p in engine.parts
        if p.trainable and p.tensor.dtype not in (policy.master, torch.float32)
    ]
    if odd:
        raise MpdistError(f"masters are not {policy.master}: {odd[0]} and {len(odd) - 1} others")
    if policy.compute == torch.float16:
        found = precision.outside_fp16(
            (p.name, p.tensor) for p in engine.parts if policy.parameter_dtype(p.name) == torch.float16
        )
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, found)
        large = sorted({entry for part in everywhere for entry in part})
        if large:
            name, largest = large[0]
            raise UsageError(f"precision.compute = fp16, but {name} holds {largest:g}",
                             "FP16 ends at 65504, so this weight would become infinite",
                             "use precision.compute: bf16; or keep that module in FP32 with precision.keep_fp32, if what leaves"
                             " it stays below that")  # fmt: skip


def _check_attention(built: nn.Module, cfg: Config) -> None:
    limit = getattr(built.config, "max_position_embeddings", None)
    if isinstance(limit, int) and cfg.data.seq_len > limit:
        warnings.warn(
            f"data.seq_len = {cfg.data.seq_len} is beyond the model's max_position_embeddings = {limit}", stacklevel=1
        )
    if cfg.model.attention == "flex_attention" and not torch.cuda.is_available():
        raise MachineError("model.attention = flex_attention", "it has no backward on a CPU", "use sdpa or eager")


def _span(cfg: Config, rows: Rows, order: Order) -> dict[str, Any]:
    """The budget as one limit, and the steps that the schedule spans."""
    budget, wanted = cfg.budget, cfg.optim.horizon
    span: dict[str, Any] = {"steps": budget.steps, "windows": None, "tokens": budget.tokens, "seconds": budget.seconds}
    auto = budget.steps
    if budget.epochs is not None:
        span["windows"] = auto = max(1, math.ceil(budget.epochs * order.windows_per_epoch - 1e-9))
    if budget.tokens is not None:
        a_step = rows.token_counts.sum() / max(order.windows_per_epoch, 1)
        auto = max(1, math.ceil(budget.tokens / a_step))
    span["horizon"] = wanted if isinstance(wanted, int) else auto
    return span


def _warmup(cfg: Config, horizon: int | None) -> int:
    """Steps of warm-up: a share of the horizon below 1, else steps."""
    if cfg.optim.warmup >= 1 or horizon is None:
        return int(cfg.optim.warmup)
    return round(cfg.optim.warmup * horizon)


def save_hf(folder: Path, parts: Parts, cfg: Config) -> None:
    """The model's config as it came (cache and dtype untouched) and its tokenizer, for exports. Rank 0 only."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    name = cfg.data.tokenizer if cfg.data.tokenizer != "model" else cfg.model.path
    assert name is not None  # the config's rules refuse a random model without a tokenizer of its own
    tokenizer = load_tokenizer(
        name,
        chat_template=cfg.data.chat_template,
        trust_remote_code=cfg.model.trust_remote_code,
        revision=cfg.model.revision if name == cfg.model.path else None,
    )
    tokenizer.save_pretrained(folder)
    config = parts.source_config
    config.save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    if parts.source.path is None:
        stored["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(stored, indent=2) + "\n")
