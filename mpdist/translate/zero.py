"""DeepSpeed's zero_optimization, and the sections of its JSON that have no part in what is trained."""

from __future__ import annotations

from typing import Any

from mpdist.translate import facts
from mpdist.translate.accelerate import offload
from mpdist.translate.document import flag
from mpdist.translate.draft import OTHER, SAME, TRANSLATED, Draft, Rule, Verdict, none, off, same

_BUCKETS = "performance of theirs; mpdist sizes DeepSpeed's buckets itself"
QUIET = "performance of theirs, no number changes"
_REMOVED = "gone from DeepSpeed, and not in mpdist"


# Where an "auto" that nothing fills leaves one of ours open.
_OPEN = {
    "optimizer.params.lr": ("optim.lr", "2e-5"),
    "optimizer.params.betas": ("optim.betas", "[0.9, 0.999]"),
    "optimizer.params.weight_decay": ("optim.weight_decay", "0.01"),
    "scheduler.params.warmup_num_steps": ("optim.warmup", "0.03"),
    "bf16.enabled": ("precision.compute", "bf16"),
    "fp16.enabled": ("precision.compute", "fp16"),
    "gradient_clipping": ("optim.clip", "1.0"),
    "zero_optimization.stage": ("shard.stage", "3"),
}


def filled(key: str, rule: Rule) -> Rule:
    """The rule on what "auto" became; says so where nothing fills it."""

    def judge(value: Any, draft: Draft) -> Verdict:
        if value != "auto":
            return rule(value, draft)
        if key not in draft.filled:
            if key in _OPEN:
                ours, example = _OPEN[key]
                draft.decide(ours, example, f"{draft.deepspeed.prefix}{key} is auto there")
            return Verdict(OTHER, _unfilled(draft))
        value, words = draft.filled[key]
        verdict = rule(value, draft)
        text = words if not verdict.text or verdict.text in words else f"{words}; {verdict.text}"
        return Verdict(verdict.kind, text, verdict.sets)

    return judge


def _unfilled(draft: Draft) -> str:
    if draft.trainer.given:
        return "only known there when model and data are; left to mpdist"
    if draft.accelerate.given:
        return "accelerate fills it from the script; left to mpdist"
    return "the Trainer or accelerate fills it, and neither is given; left to mpdist"


def value_of(draft: Draft, key: str, default: Any = None) -> Any:
    found = facts.deepspeed_value(draft, key)
    return default if found is None else found


def stage(draft: Draft) -> int:
    return facts.deepspeed_stage(draft)


def _stage(value: Any, draft: Draft) -> Verdict:
    if stage(draft) == 0:
        return Verdict(OTHER, "stage 0 shards nothing, and in 16 bit DeepSpeed gets it wrong", {"shard.engine": "ddp"})
    return Verdict(TRANSLATED, "", {"shard.engine": "deepspeed", "shard.stage": stage(draft)})


def _devices(draft: Draft) -> tuple[str, str]:
    zero = "zero_optimization."
    optimizer = str(value_of(draft, f"{zero}offload_optimizer.device", "none")).lower()
    parameters = str(value_of(draft, f"{zero}offload_param.device", "none")).lower()
    if flag(value_of(draft, f"{zero}cpu_offload", False)):
        optimizer = "cpu"
    if flag(value_of(draft, f"{zero}cpu_offload_param", value_of(draft, f"{zero}cpu_offload_params", False))):
        parameters = "cpu"
    return optimizer, parameters


def _offload(value: Any, draft: Draft) -> Verdict:
    if str(value).lower() in ("none", "false", ""):
        return Verdict(SAME, "stays on the device in both")
    ours, text = offload(stage(draft), *_devices(draft))
    if ours == "none":
        return Verdict(SAME, "no effect there at this stage")
    return Verdict(OTHER if text else TRANSLATED, text, {"shard.offload": ours})


def _parameters(value: Any, draft: Draft) -> Verdict:
    if stage(draft) < 3 and str(value).lower() not in ("none", "false", ""):
        return Verdict(SAME, "no effect there below stage 3")
    return _offload(value, draft)


def zero() -> dict[str, Rule]:
    buckets = "reduce_bucket_size allgather_bucket_size prefetch_bucket_size param_persistence_threshold "
    buckets += "model_persistence_threshold max_live_parameters max_reuse_distance sub_group_size allgather_size"
    quiet = "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm "
    quiet += (
        "compute_grad_norm round_robin_gradients parameter_alignment memory_efficient_linear override_module_apply "
    )
    quiet += (
        "module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential ignore_unused_parameters "
    )
    quiet += "log_trace_cache_warnings enable_sanity_checks legacy_stage1 pipeline_loading_checkpoint cpu_offload_use_pin_memory"
    saving = "`mpdist export --dtype bf16` writes the 16-bit model"
    rules: dict[str, Rule] = {
        "stage": filled("zero_optimization.stage", _stage),
        **{name: none(_BUCKETS) for name in buckets.split()},
        **{name: none(QUIET) for name in quiet.split()},
        "load_from_fp32_weights": same("masters are always restored from FP32"),
        "elastic_checkpoint": off("checkpoints load on any number of ranks"),
        "gather_16bit_weights_on_model_save": none(saving),
        "stage3_gather_fp16_weights_on_model_save": none(saving),
        "cpu_offload": _offload,
        "cpu_offload_param": _parameters,
        "cpu_offload_params": _parameters,
        "offload_optimizer": same("empty"),
        "offload_param": same("empty"),
        "offload_optimizer.device": filled("zero_optimization.offload_optimizer.device", _offload),
        "offload_param.device": filled("zero_optimization.offload_param.device", _parameters),
        "offload_optimizer.ratio": off("all of the optimizer is on the host, or nothing", 1, 1.0),
        "offload_optimizer.nvme_path": off("offload goes to host memory"),
        "offload_param.nvme_path": off("offload goes to host memory"),
        "offload_optimizer.**": none(QUIET),
        "offload_param.**": none(QUIET),
        "zenflow.**": none("no such optimizer steps here"),
        "zero_hpz_partition_size": off("no second group for parameters; shard.replicas of fsdp2 is near to it", 1),
        "zero_quantized_weights": off("weights travel unquantised"),
        "zero_quantized_nontrainable_weights": off("weights travel unquantised"),
        "zero_quantized_gradients": off("gradients travel in fp32, bf16 or fp16"),
        "mics_shard_size": off("shard.replicas of fsdp2 is near to it", -1),
        "mics_hierarchical_params_gather": off(_REMOVED),
        "zeropp_loco_param.**": none(_REMOVED),
        "save_muon_momentum_buffer_in_memory": off("mpdist has AdamW alone"),
        "leaf_module.**": none("mpdist tells DeepSpeed itself"),
    }
    # Stage 3's names have a prefix in files, and DeepSpeed takes them without it too.
    rules |= {
        f"stage3_{name}": rule for name, rule in rules.items() if "." not in name and not name.startswith("stage")
    }
    return {"zero_optimization": _stage, **{f"zero_optimization.{name}": rule for name, rule in rules.items()}}


def sections() -> dict[str, Rule]:
    texts = {
        "activation_checkpointing": "for models that call DeepSpeed's own; memory.checkpointing is for all",
        "aio": "for NVMe, which is not used",
        "autotuning": "`mpdist plan` says what fits",
        "checkpoint": "checkpoints are mpdist's own, and load on any number of ranks",
        "comms_logger": "wire/grad_bytes counts what is sent",
        "comms": "the collectives are torch's",
        "compile": "model.compile: blocks compiles each block",
        "curriculum_learning": _REMOVED,
        "compression_training": _REMOVED,
        "data_efficiency": "the order of rows follows from seed and epoch alone",
        "datastates_ckpt": "checkpoints are written in the background by checkpoint.background",
        "elasticity": "a run goes on with another number of ranks as it is",
        "eigenvalue": _REMOVED,
        "expert_parallel": "no expert parallelism here",
        "flops_profiler": "speed/mfu is in metrics.jsonl",
        "hybrid_engine": "for generation while training",
        "amp": "precision.compute says it",
        "monitor_config": "metrics.jsonl has the numbers",
        "nebula": _REMOVED,
        "pipeline": "no pipeline parallelism here",
        "progressive_layer_drop": _REMOVED,
        "quantize_training": _REMOVED,
        "sparse_attention": "model.attention chooses",
        "tensor_parallel": "no tensor parallelism here",
        "timers": "time is in status.json",
        "weight_quantization": "no quantised training here",
    }
    rules: dict[str, Rule] = {}
    for name, text in texts.items():
        rules |= {name: off(text), f"{name}.enabled": off(text), f"{name}.**": none(text)}
    for name in ("tensorboard", "csv_monitor", "comet"):
        rules |= {
            f"{name}.enabled": off("metrics.jsonl has the numbers"),
            f"{name}.**": none("metrics.jsonl has the numbers"),
        }
    return rules
