"""accelerate's YAML: how a script is started, on how many ranks, with which plugin. The training itself is in the script."""

from __future__ import annotations

from typing import Any

from mpdist.errors import UsageError
from mpdist.translate import facts, fsdp
from mpdist.translate.document import Wrong, flag, number, whole
from mpdist.translate.draft import (
    NONE,
    OTHER,
    SAME,
    TRANSLATED,
    Draft,
    Rule,
    Verdict,
    none,
    off,
    same,
    with_null,
)

_TPU = "for TPUs"
_SAGEMAKER = (
    "ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version transformers_version "
    "py_version sagemaker_inputs_file sagemaker_metrics_file additional_args"
)
_REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU")
AUTOCAST = "autocast keeps norms and softmax in FP32 there; here precision.keep_fp32 names modules"
_SCRIPT = "accelerate's file does not hold it: it is in your script"


def kind(draft: Draft) -> str:
    return str(draft.accelerate.get("distributed_type", "NO")).upper()


def _distributed(value: Any, draft: Draft) -> Verdict:
    name = kind(draft)
    if name in _REPLICATED:
        if draft.deepspeed.given or (draft.trainer.given and fsdp.active(draft.trainer)):
            return Verdict(SAME, "the other file says how it is sharded")
        sets: dict[str, Any] = {"shard.engine": "ddp"}
        if name == "MULTI_CPU":
            sets["launch.device"] = "cpu"
        return Verdict(TRANSLATED, "", sets)
    if name == "FSDP":
        shape, text = fsdp.layout(draft, draft.accelerate)
        return Verdict(OTHER if text else TRANSLATED, text, shape)
    if name == "DEEPSPEED":
        return _deepspeed_stage(None, draft)
    draft.decide("shard.engine", "fsdp2", f"theirs, {name}, has no equal")
    return Verdict(NONE, "mpdist runs on CPUs and NVIDIA GPUs, with ddp, fsdp2 and deepspeed")


def _deepspeed_file(draft: Draft) -> bool:
    return draft.accelerate.get("deepspeed_config.deepspeed_config_file") is not None


def _deepspeed_stage(value: Any, draft: Draft) -> Verdict:
    """zero_stage, or distributed_type where there is no stage beside it."""
    if draft.deepspeed.given:
        return Verdict(SAME, "the DeepSpeed file has the stage")
    if _deepspeed_file(draft):
        draft.decide("shard.engine", "deepspeed", "the stage is in the DeepSpeed file, which was not given")
        return Verdict(OTHER, "the stage is in the DeepSpeed file: give --from-deepspeed FILE beside this one")
    stage = facts.zero_stage(draft.accelerate.get("deepspeed_config.zero_stage", 2))
    if stage == 0:
        return Verdict(OTHER, "stage 0 shards nothing, and in 16 bit DeepSpeed gets it wrong", {"shard.engine": "ddp"})
    return Verdict(TRANSLATED, "", {"shard.engine": "deepspeed", "shard.stage": stage})


def offload(stage: int, optimizer: str, parameters: str) -> tuple[str, str]:
    """Our shard.offload for DeepSpeed's two devices, and what is not the same."""
    text = "theirs is on NVMe, here it is host memory" if "nvme" in (optimizer, parameters) else ""
    if parameters != "none" and stage == 3:
        return "all", text if optimizer != "none" else "parameters alone there; all here, since they go together"
    if optimizer != "none" and stage > 0:
        return "optimizer", text
    return "none", ""


def _offload(value: Any, draft: Draft) -> Verdict:
    if draft.deepspeed.given:
        return Verdict(SAME, "the DeepSpeed file has it")
    stage = whole(draft.accelerate.get("deepspeed_config.zero_stage", 2))
    devices = [
        str(draft.accelerate.get(f"deepspeed_config.offload_{n}_device", "none")) for n in ("optimizer", "param")
    ]
    ours, text = offload(stage, *(device.lower() for device in devices))
    if str(value).lower() in ("none", ""):
        return Verdict(SAME, "stays on the device in both")
    if ours == "none":
        return Verdict(SAME, "no effect there at this stage")
    return Verdict(OTHER if text else TRANSLATED, text, {"shard.offload": ours})


def _mixed(value: Any, draft: Draft) -> Verdict:
    mixed = facts.mixed_precision(draft.accelerate)
    compute, source = facts.precision(draft)
    if mixed == "fp8":
        draft.decide("precision.compute", "bf16", "theirs, fp8, has no equal")
        return Verdict(NONE, "mpdist computes in fp32, bf16 or fp16")
    if mixed not in ("no", "bf16", "fp16"):
        raise Wrong("no, fp16, bf16 or fp8")
    if source not in ("mixed_precision", ""):
        if draft.deepspeed.given and mixed not in ("no", compute):
            what = f"mixed_precision = {mixed}, but {source} = true in the DeepSpeed file"
            why, do = "accelerate refuses the two together", 'make them equal, or write "auto" in the DeepSpeed file'
            draft.problems.append(UsageError(what, why, do))
        return Verdict(SAME, f"{source} decides, as it does there")
    sets = {"precision.compute": compute}
    if (
        mixed != "no"
        and kind(draft) in _REPLICATED
        and not (draft.deepspeed.given or draft.get("shard.engine") == "fsdp2")
    ):
        return Verdict(OTHER, AUTOCAST, sets)
    return Verdict(TRANSLATED, "", sets)


def _ranks(value: Any, draft: Draft) -> Verdict:
    world = draft.world
    if world.source == "--ranks":
        return Verdict(SAME, f"--ranks decides: {world.ranks} in all")
    if world.per_node is None:
        return Verdict(SAME, "given on their command line; here by --ranks N")
    text = f"ranks of each node: {world.ranks} over {world.nodes} nodes" if world.nodes > 1 else ""
    return Verdict(OTHER if text else TRANSLATED, text, {"launch.ranks": world.per_node})


def _machines(value: Any, draft: Draft) -> Verdict:
    return Verdict(TRANSLATED, "", {"launch.nodes": draft.world.nodes})


def _address(value: Any, draft: Draft) -> Verdict:
    if draft.world.nodes == 1:
        return Verdict(SAME, "one node needs no address")
    return Verdict(TRANSLATED, "", {"launch.address": str(value)})


def _port(value: Any, draft: Draft) -> Verdict:
    return Verdict(TRANSLATED, "", {"launch.port": whole(value)})


def _node(value: Any, draft: Draft) -> Verdict:
    if draft.world.nodes == 1:
        return Verdict(SAME, "one node")
    return Verdict(NONE, "one configuration serves all nodes: `mpdist launch CONFIG --node-rank N` on each")


def _gpus(value: Any, draft: Draft) -> Verdict:
    if str(value).lower() == "all":
        return Verdict(SAME, "all are used here too")
    return Verdict(NONE, f"set CUDA_VISIBLE_DEVICES={value} in the environment")


def _cpu(value: Any, draft: Draft) -> Verdict:
    if flag(value):
        return Verdict(TRANSLATED, "", {"launch.device": "cpu"})
    return Verdict(SAME, "launch.device is auto")


def _compiler(value: Any, draft: Draft) -> Verdict:
    if str(value).upper() in ("NO", "NONE", ""):
        return Verdict(SAME, "off in both")
    if str(value).upper() != "INDUCTOR":
        return Verdict(NONE, "torch.compile has its default backend here (inductor): model.compile: blocks")
    return facts.compiled(draft)


def _accumulation(value: Any, draft: Draft) -> Verdict:
    if value == "auto":
        return Verdict(SAME, "filled from the script or the Trainer there")
    if draft.trainer.given or draft.deepspeed.given:
        return Verdict(SAME, "the other file decides")
    found = facts.batch(draft)
    mean = "the mean of the micro-batches' means there, of the window's label tokens here"
    if found.all is None:
        return Verdict(OTHER, f"a part of batch.global = {found.words(draft.world)}; {mean}")
    return Verdict(OTHER, f"{found.words(draft.world)}; {mean}", {"batch.global": found.all})


def _clip(value: Any, draft: Draft) -> Verdict:
    if draft.deepspeed.given:
        return Verdict(SAME, "the DeepSpeed file has it")
    return clip(value)


def clip(value: Any) -> Verdict:
    limit = number(value)
    return Verdict(TRANSLATED, "0 is off" if limit == 0 else "", {"optim.clip": limit or None})


def _file(value: Any, draft: Draft) -> Verdict:
    if draft.deepspeed.given:
        return Verdict(SAME, f"read from {draft.deepspeed.path}")
    return Verdict(NONE, "it was not read: give --from-deepspeed FILE beside this one")


def _parallel(name: str, text: str) -> Rule:
    def rule(value: Any, draft: Draft) -> Verdict:
        if whole(value) <= 1:
            return Verdict(SAME, "not used there")
        return Verdict(NONE, text.format(n=value))

    return rule


def _copies(value: Any, draft: Draft) -> Verdict:
    if whole(value) <= 1:
        return Verdict(SAME, "one copy in both")
    return Verdict(TRANSLATED, "", {"shard.replicas": whole(value)})


def _only_deepspeed(rule: Rule) -> Rule:
    def judge(value: Any, draft: Draft) -> Verdict:
        if kind(draft) != "DEEPSPEED":
            return Verdict(SAME, "no effect there: the run is not DeepSpeed")
        if _deepspeed_file(draft) and not draft.deepspeed.given:
            return Verdict(OTHER, "accelerate takes it from the DeepSpeed file: give --from-deepspeed FILE")
        return rule(value, draft)

    return judge


def _parallelism() -> dict[str, Rule]:
    shared = "mpdist has no such parallelism: {n} ranks shared their rows there, each has its own here"
    rules = {f"{name}_size": _parallel(name, shared) for name in ("tp", "cp", "sp")}
    rules |= {"dp_replicate_size": _copies, "dp_shard_size": same("the ranks over shard.replicas")}
    rules |= {f"{name}_backend": none("no such parallelism here") for name in ("cp", "sp")}
    prefixed = {f"parallelism_config.parallelism_config_{name}": rule for name, rule in rules.items()}
    return {
        **prefixed,
        **{f"parallelism_config.{name}": rule for name, rule in rules.items()},
        "parallelism_config.**": none("no such parallelism here"),
    }


def _zero() -> dict[str, Rule]:
    moe = off("no expert parallelism; DeepSpeed's leaf modules are found by mpdist")
    several = none("mpdist starts torchrun on each node: launch/by_hand.sh, launch.nodes, launch.address")
    rules: dict[str, Rule] = {
        "zero_stage": _deepspeed_stage,
        "offload_optimizer_device": _offload,
        "offload_param_device": _offload,
        "offload_optimizer_nvme_path": off("offload goes to host memory"),
        "offload_param_nvme_path": off("offload goes to host memory"),
        "gradient_accumulation_steps": _accumulation,
        "gradient_clipping": _clip,
        "zero3_init_flag": same("weights never exist as a whole on a rank here"),
        "zero3_save_16bit_model": none("`mpdist export --dtype bf16` writes the 16-bit model"),
        "deepspeed_multinode_launcher": several,
        "deepspeed_hostfile": several,
        "deepspeed_exclusion_filter": several,
        "deepspeed_inclusion_filter": several,
        "deepspeed_moe_layer_cls_names": moe,
        "transformer_moe_cls_names": moe,
    }
    guarded = {f"deepspeed_config.{name}": _only_deepspeed(rule) for name, rule in rules.items()}
    return {**guarded, "deepspeed_config.deepspeed_config_file": _file}


RULES: dict[str, Rule] = {
    "compute_environment": lambda value, _: (
        Verdict(SAME, "where it runs is the launcher's business")
        if value in ("LOCAL_MACHINE", 0)
        else Verdict(NONE, "mpdist starts no cloud jobs; run `mpdist launch` on the machines")
    ),
    "debug": off("mpdist names who does not come to a collective, after launch.timeout"),
    "distributed_type": _distributed,
    "downcast_bf16": off(_TPU),
    "enable_cpu_affinity": off("processes are not pinned; use numactl or Slurm"),
    "fp16": _mixed,
    "gpu_ids": _gpus,
    "machine_rank": _node,
    "main_process_ip": _address,
    "main_process_port": _port,
    "main_training_function": same("for notebooks and TPUs"),
    "mixed_precision": with_null(_mixed),
    "num_machines": _machines,
    "num_processes": _ranks,
    "rdzv_backend": same("torchrun meets at launch.address by c10d"),
    "same_network": same("launch.address has to be reachable, as there"),
    "use_cpu": _cpu,
    "dynamo_backend": _compiler,
    "dynamo_config": same("off in both"),
    "dynamo_config.dynamo_backend": _compiler,
    "dynamo_config.dynamo_use_regional_compilation": same("model.compile: blocks is regional"),
    "dynamo_config.**": off("torch.compile has its default settings here", "default", "DEFAULT"),
    "deepspeed_config": same("empty"),
    **_zero(),
    **fsdp.rules(lambda draft: draft.accelerate),
    **_parallelism(),
    "parallelism_config": same("empty"),
    "fp8_config": same("empty"),
    "fp8_config.**": none("mpdist computes in fp32, bf16 or fp16"),
    "megatron_lm_config": same("empty"),
    "megatron_lm_config.**": none("no tensor or pipeline parallelism here"),
    "mpirun_config": same("empty"),
    "mpirun_config.**": none("ranks are started by torchrun, and meet over gloo or NCCL"),
    **{f"tpu_{name}": off(_TPU) for name in ("name", "zone", "use_cluster", "use_sudo", "vm", "env")},
    "command_file": off(_TPU),
    "commands": off(_TPU),
    **{key: off("for SageMaker jobs") for key in _SAGEMAKER.split()},
}


def finish(draft: Draft) -> None:
    """What the file leaves to accelerate's defaults, and what no key of it says."""
    if "mixed_precision" not in draft.accelerate.values and not draft.deepspeed.given and not draft.trainer.given:
        draft.default("mixed_precision: no", {"precision.compute": facts.precision(draft)[0]})
    sharded = fsdp.active(draft.accelerate)
    if kind(draft) == "DEEPSPEED" and not draft.deepspeed.given and not _deepspeed_file(draft):
        if draft.accelerate.get("deepspeed_config.gradient_clipping", "auto") == "auto" and not draft.trainer.given:
            draft.default("gradient_clipping: 1.0, where nothing else is said", {"optim.clip": 1.0})
        sharded = True
    if sharded:
        wire(draft)
    overflow(draft)
    if draft.trainer.given:
        return
    draft.note(
        "accelerate steps a prepared scheduler once a rank at each optimizer step: counted in its steps, a warm-up or "
        "a span is as many times longer as there are ranks. Here optim.warmup and optim.horizon count optimizer steps."
    )
    draft.note(
        "Accelerator.backward divides by the accumulation steps: the mean of the micro-batches' means, and of the ranks'. "
        "Here the window's loss is its sum over label tokens by their number."
    )
    draft.fill("batch.global", "micro x accumulation x ranks", _SCRIPT)
    for key, example in (("batch.micro", "1"), ("optim.lr", "2e-5"), ("optim.betas", "[0.9, 0.999]")):
        draft.decide(key, example, _SCRIPT)
    for key, example in (("optim.weight_decay", "0.01"), ("optim.schedule", "linear"), ("optim.warmup", "0.03")):
        draft.decide(key, example, _SCRIPT)


def overflow(draft: Draft) -> None:
    """The scalers of torch and of DeepSpeed go on to the next batch; a static scale knows no other way here."""
    if draft.get("precision.compute") == "fp16" and draft.get("precision.scale.mode") != "static":
        draft.default("the batch of an overflow is passed over", {"precision.scale.on_overflow": "next"})


def wire(draft: Draft) -> None:
    """FSDP as accelerate sets it up, and DeepSpeed, send gradients in the dtype of the model and add them up in it."""
    compute = draft.get("precision.compute")
    if compute in ("bf16", "fp16") and draft.get("shard.engine") in ("fsdp2", "deepspeed"):
        words = f"gradients travel and are added up in {compute}; mpdist's own default is FP32, without these two lines"
        draft.default(words, {"reduce.wire": compute, "reduce.sum": "wire"})
