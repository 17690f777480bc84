"""What several keys, or several files, say only together: ranks, precision, batch, and DeepSpeed's "auto"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mpdist.config.describe import show
from mpdist.errors import MpdistError, UsageError
from mpdist.translate.document import Document, Wrong, flag, number, whole
from mpdist.translate.draft import NONE, OTHER, Draft, Verdict, World

# What the Trainer takes where a key is absent, as far as it decides what is trained. Asked of the library where it is.
TRAINER_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "bf16": False,
    "fp16": False,
    "seed": 42,
    "logging_steps": 500,
}
# TRL's SFTConfig is TrainingArguments with keys of its own and a few other defaults.
_SFT = (
    "max_length max_seq_length packing packing_strategy eval_packing padding_free completion_only_loss assistant_only_loss "
    "dataset_text_field dataset_kwargs dataset_num_proc dataset_batch_size pad_to_multiple_of truncation_mode loss_type "
    "activation_offloading chat_template_path model_init_kwargs eos_token pad_token shuffle_dataset num_of_sequences "
    "chars_per_token"
)
SFT_KEYS = frozenset(_SFT.split())
SFT_DEFAULTS: dict[str, Any] = {"learning_rate": 2e-5, "logging_steps": 10, "gradient_checkpointing": True}
# What DeepSpeed takes where a key is absent; asked of the library where it is.
DEEPSPEED_DEFAULTS: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.min_loss_scale": 1,
    "fp16.hysteresis": 2,
}
# Both libraries' names, older ones too, for the same thing.
_OLD_NAMES = {"per_device_train_batch_size": "per_gpu_train_batch_size", "eval_strategy": "evaluation_strategy"}


def zero_stage(value: Any) -> int:
    stage = whole(value)
    if stage not in (0, 1, 2, 3):
        raise Wrong("0, 1, 2 or 3")
    return stage


_AUTO = ("deepspeed_config.gradient_accumulation_steps", "deepspeed_config.gradient_clipping")
_SHARED = ("tp", "cp", "sp", "dp_replicate")
# What several keys hang on: looked at first, so that a wrong value is told of its own key and not of another's.
_BASES: dict[str, tuple[tuple[Callable[[Any], Any], str], ...]] = {
    "trainer": (
        (whole, "per_device_train_batch_size per_gpu_train_batch_size gradient_accumulation_steps max_steps seed"),
        (number, "num_train_epochs learning_rate adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm"),
        (number, "warmup_steps warmup_ratio logging_steps eval_steps"),
        (flag, "bf16 fp16 packing assistant_only_loss completion_only_loss"),
    ),
    "deepspeed": (
        (whole, "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps"),
        (flag, "fp16.enabled bf16.enabled bfloat16.enabled torch_autocast.enabled"),
        (flag, "optimizer.params.torch_adam optimizer.params.adam_w_mode"),
        (number, "fp16.loss_scale fp16.hysteresis"),
        (zero_stage, "zero_optimization.stage"),
    ),
    "accelerate": (
        (whole, "num_processes num_machines deepspeed_config.gradient_accumulation_steps"),
        (
            whole,
            " ".join(f"parallelism_config.{part}{n}_size" for part in ("", "parallelism_config_") for n in _SHARED),
        ),
        (number, "deepspeed_config.gradient_clipping"),
        (zero_stage, "deepspeed_config.zero_stage"),
        (whole, "fsdp_config.fsdp_version fsdp_config.version"),
        (flag, "fp16"),
    ),
}


def check(document: Document) -> list[MpdistError]:
    """Values that are not of the kind that others count on."""
    found: list[MpdistError] = []
    for convert, names in _BASES[document.format]:
        for name in names.split():
            value = document.get(name)
            try:
                if value is not None and not (value == "auto" and _may_be_auto(document, name)):
                    convert(value)
            except Wrong as wrong:
                what = f"{document.prefix}{name} = {show(value)} ({document.where(tuple(name.split('.')))})"
                found.append(UsageError(what, f"it has to be {wrong} there", "correct the value"))
    return found


def _may_be_auto(document: Document, name: str) -> bool:
    return document.format == "deepspeed" or name in _AUTO


def is_sft(trainer: Document) -> bool:
    return bool(SFT_KEYS & set(trainer.values))


def trainer_value(draft: Draft, key: str) -> Any:
    """What the Trainer used: the file's value, or the default of its class."""
    found = draft.trainer.get(key, draft.trainer.get(_OLD_NAMES.get(key, key)))
    if found is not None:
        return found
    if is_sft(draft.trainer):
        if key == "bf16":
            return not draft.trainer.flag("fp16")
        if key in SFT_DEFAULTS:
            return SFT_DEFAULTS[key]
    return draft.libraries["trainer"].defaults.get(key, TRAINER_DEFAULTS.get(key))


def deepspeed_default(draft: Draft, key: str) -> Any:
    return draft.libraries["deepspeed"].defaults.get(key, DEEPSPEED_DEFAULTS.get(key))


def deepspeed_value(draft: Draft, key: str) -> Any:
    """What DeepSpeed got: "auto" replaced where something fills it, else None."""
    if key in draft.filled:
        return draft.filled[key][0]
    value = draft.deepspeed.get(key)
    return None if value == "auto" else value


def warmup(draft: Draft) -> float:
    """The Trainer's warm-up: steps from 1 on, a share below."""
    steps = number(trainer_value(draft, "warmup_steps") or 0)
    return steps if steps else number(draft.trainer.get("warmup_ratio", 0.0))


def world(accelerate: Document, per_node: int | None, nodes: int | None) -> World:
    """The ranks: the command line's, else accelerate's processes."""
    count = whole(accelerate.get("num_processes", -1))
    machines = nodes or max(1, whole(accelerate.get("num_machines", 1)))
    source = "--ranks" if per_node else "num_processes"
    ranks = per_node * machines if per_node else count if count > 0 else None
    if accelerate.given and str(accelerate.get("distributed_type")).upper() == "NO" and ranks is None:
        ranks = 1
    if ranks is not None and ranks % machines:
        what = f"num_processes = {ranks} over {machines} nodes"
        raise UsageError(
            what, "each node has as many ranks as the others", "give --ranks N (on each node) and --nodes N"
        )
    shared = 1
    for name in ("tp", "cp", "sp"):
        for key in (f"parallelism_config_{name}_size", f"{name}_size"):
            shared *= max(1, whole(accelerate.get(f"parallelism_config.{key}", 1)))
    parallel = None if ranks is None else max(1, ranks // shared)
    return World(ranks, None if ranks is None else ranks // machines, machines, parallel, source)


def precision(draft: Draft) -> tuple[str, str]:
    """The dtype of forward and backward, and the key that says so."""
    for name, dtype in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        enabled = deepspeed_value(draft, f"{name}.enabled")
        if enabled is not None and flag(enabled):
            return dtype, f"{draft.deepspeed.prefix}{name}.enabled"
    if draft.deepspeed.given and flag(draft.deepspeed.get("torch_autocast.enabled", False)):
        dtype = str(draft.deepspeed.get("torch_autocast.dtype", "bfloat16"))
        return "fp16" if "16" in dtype and "bf" not in dtype else "bf16", "torch_autocast"
    if draft.trainer.given:
        for dtype in ("fp16", "bf16"):
            if flag(trainer_value(draft, dtype) or False):
                return dtype, dtype
    mixed = mixed_precision(draft.accelerate)
    return (mixed, "mixed_precision") if mixed in ("bf16", "fp16") else ("fp32", "")


def mixed_precision(accelerate: Document) -> str:
    old = "fp16" if accelerate.given and accelerate.flag("fp16") else "no"
    return str(accelerate.get("mixed_precision", old)).lower()


def contradiction(draft: Draft) -> str:
    """Who refuses that fp16 and bf16 are both on; empty where they are not."""

    def on(name: str) -> bool:
        return flag(deepspeed_value(draft, f"{name}.enabled") or False)

    if draft.trainer.given and all(flag(trainer_value(draft, name) or False) for name in ("fp16", "bf16")):
        return "transformers"
    return "DeepSpeed" if on("fp16") and (on("bf16") or on("bfloat16")) else ""


def contradictory(draft: Draft) -> Verdict:
    draft.decide("precision.compute", "bf16", "fp16 and bf16 are both on there")
    text = f"contradictory: fp16 and bf16 are both on, which {contradiction(draft)} refuses; precision.compute is one of them"
    return Verdict(NONE, text)


class Batch(NamedTuple):
    """Sequences: what one rank runs at once, micro-batches of a step, and in a step over all ranks. None: unknown."""

    micro: int | None
    accumulation: int | None
    all: int | None

    def words(self, world: World) -> str:
        count, ranks = self.accumulation, world.parallel
        parts = [
            str(self.micro or "batch.micro"),
            f"{count} micro-batch{'es' * (count != 1)}" if count else "accumulation",
            f"{ranks} rank{'s' * (ranks != 1)}" if ranks else "ranks",
        ]
        return " x ".join(parts)


def batch(draft: Draft) -> Batch:
    parallel = draft.world.parallel
    if draft.trainer.given:
        micro = whole(trainer_value(draft, "per_device_train_batch_size"))
        steps = whole(trainer_value(draft, "gradient_accumulation_steps"))
        both = deepspeed_value(draft, "train_batch_size")
        total = micro * steps * parallel if parallel else whole(both) if both is not None else None
        return Batch(micro, steps, total)
    known = {key: deepspeed_value(draft, key) for key in SIZES} if draft.deepspeed.given else dict.fromkeys(SIZES)
    total, size, count = (None if value is None else whole(value) for value in known.values())
    if count is None and draft.accelerate.get("deepspeed_config.gradient_accumulation_steps", "auto") != "auto":
        count = whole(draft.accelerate.get("deepspeed_config.gradient_accumulation_steps"))
    if draft.deepspeed.given and count is None and "gradient_accumulation_steps" not in draft.deepspeed.values:
        count = 1 if total is None or size is None else None
    if total is None and size and count and parallel:
        total = size * count * parallel
    if size is None and total and parallel and count:
        size = max(1, total // parallel // count)
    if count is None and total and size and parallel:
        count = max(1, total // size // parallel)
    return Batch(size, count, total)


def deepspeed_stage(draft: Draft) -> int:
    whole_section = draft.deepspeed.get("zero_optimization")
    if isinstance(whole_section, bool):  # as DeepSpeed's first versions had it
        return int(whole_section)
    return zero_stage(deepspeed_value(draft, "zero_optimization.stage") or 0)


def zero(draft: Draft) -> bool:
    """Whether DeepSpeed shards, so that the engine is ours of that name."""
    if draft.deepspeed.given:
        return deepspeed_stage(draft) > 0
    if str(draft.accelerate.get("distributed_type", "")).upper() != "DEEPSPEED":
        return False
    return zero_stage(draft.accelerate.get("deepspeed_config.zero_stage", 2)) > 0


def compiled(draft: Draft, text: str = "each block is compiled here, there the whole model") -> Verdict:
    """A compiled model of theirs."""
    if zero(draft):
        return Verdict(
            NONE, "the deepspeed engine's hooks cannot be compiled; fsdp2 compiles each block (model.compile)"
        )
    return Verdict(OTHER, text, {"model.compile": "blocks"})


SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def fill(draft: Draft) -> None:
    """Replaces DeepSpeed's "auto" as transformers or accelerate would, and refuses what they refuse."""
    if not draft.deepspeed.given:
        _check_plugin(draft)
        return
    if draft.trainer.given:
        fillers, who = _from_trainer(draft), "TrainingArguments"
    elif draft.accelerate.given:
        fillers, who = _from_accelerate(draft), "accelerate"
    else:
        return
    for key, (value, words, must_match) in fillers.items():
        written = draft.deepspeed.get(key)
        if written == "auto":
            if value is not None:
                draft.filled[key] = (value, f"{words} of {who}")
        elif must_match and written is not None and value is not None and written != value:
            what = f"{draft.deepspeed.prefix}{key} = {written}, but {words}"
            why = "transformers refuses a DeepSpeed file that says other than the TrainingArguments"
            draft.problems.append(UsageError(what, why, 'make them equal, or write "auto" in the DeepSpeed file'))


def _check_plugin(draft: Draft) -> None:
    """accelerate's DeepSpeed without a file of DeepSpeed is held against the TrainingArguments all the same."""
    if not draft.trainer.given or str(draft.accelerate.get("distributed_type")).upper() != "DEEPSPEED":
        return
    pairs = (("gradient_accumulation_steps", "gradient_accumulation_steps"), ("gradient_clipping", "max_grad_norm"))
    for name, key in pairs if draft.accelerate.get("deepspeed_config.deepspeed_config_file") is None else ():
        written, value = draft.accelerate.get(f"deepspeed_config.{name}", "auto"), trainer_value(draft, key)
        if written not in ("auto", "none") and number(written) != number(value):
            what = f"deepspeed_config.{name} = {written}, but {key} = {value} in the TrainingArguments"
            do = "make them equal, or take the key out of accelerate's file"
            draft.problems.append(UsageError(what, "transformers refuses the two together", do))


_Fillers = dict[str, tuple[Any, str, bool]]


def _from_trainer(draft: Draft) -> _Fillers:
    def ask(key: str, convert: Callable[[Any], Any] = number) -> tuple[Any, str, bool]:
        value = convert(trainer_value(draft, key))
        return value, f"{key} = {value}", True

    micro, steps = (ask(key, whole) for key in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    total = micro[0] * steps[0] * draft.world.parallel if draft.world.parallel else None
    betas = [number(trainer_value(draft, f"adam_beta{i}")) for i in (1, 2)]
    horizon, share = whole(trainer_value(draft, "max_steps") or -1), warmup(draft)
    if 0 < share < 1 and horizon > 0:
        share = -(-horizon * share // 1)
    fillers: _Fillers = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "train_batch_size": (total, f"{micro[0]} x {steps[0]} micro-batches x {draft.world.parallel} ranks", True),
        "gradient_clipping": ask("max_grad_norm"),
        "optimizer.params.lr": ask("learning_rate"),
        "optimizer.params.betas": (betas, f"adam_beta1, adam_beta2 = {betas}", True),
        "optimizer.params.eps": ask("adam_epsilon"),
        "optimizer.params.weight_decay": ask("weight_decay"),
        "scheduler.params.warmup_min_lr": (0, "0", False),
        "scheduler.params.warmup_max_lr": ask("learning_rate"),
        "scheduler.params.total_num_steps": (horizon if horizon > 0 else None, f"max_steps = {horizon}", True),
        "scheduler.params.warmup_num_steps": (share or 1, f"a warm-up of {share or 1:g}", not 0 < share < 1),
    }
    for dtype in ("fp16", "bf16"):
        fillers[f"{dtype}.enabled"] = ask(dtype, lambda value: flag(value or False))
    return fillers


def _from_accelerate(draft: Draft) -> _Fillers:
    mixed = mixed_precision(draft.accelerate)
    fillers: _Fillers = {f"{d}.enabled": (mixed == d, f"mixed_precision = {mixed}", False) for d in ("fp16", "bf16")}
    for key, name, default in (
        ("gradient_accumulation_steps", "gradient_accumulation_steps", None),
        ("gradient_clipping", "gradient_clipping", 1.0),
        ("zero_optimization.stage", "zero_stage", 2),
        ("zero_optimization.offload_optimizer.device", "offload_optimizer_device", "none"),
        ("zero_optimization.offload_param.device", "offload_param_device", "none"),
    ):
        value = draft.accelerate.get(f"deepspeed_config.{name}", default)
        fillers[key] = (None if value == "auto" else value, f"{name} = {value}", False)
    return fillers
