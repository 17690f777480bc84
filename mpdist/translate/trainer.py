"""TrainingArguments of transformers, as JSON or YAML; SFTConfig of TRL and the usual script arguments beside them."""

from __future__ import annotations

import os
import re
from typing import Any

from mpdist.translate import accelerate, facts, fsdp, trl
from mpdist.translate.document import flag, number, whole, words
from mpdist.translate.draft import (
    NONE,
    OTHER,
    SAME,
    TRANSLATED,
    Draft,
    Rule,
    Verdict,
    to,
    with_null,
)
from mpdist.translate.trainer_keys import TEXTS

_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_RATIO = "a share of the run there; a number of steps here"


def _setting(draft: Draft, key: str) -> Any:
    return facts.trainer_value(draft, key)


def folder_name(text: str) -> str:
    """The text as the name of one folder."""
    return re.sub(r"[^\w.+@=-]+", "-", text).strip("-.")[:100] or "run"


def _output(value: Any, draft: Draft) -> Verdict:
    path = str(value).rstrip("/")
    sets = {"name": folder_name(os.path.basename(path)), "out_dir": os.path.dirname(path) or "."}
    return Verdict(TRANSLATED, "a run's folder is out_dir/name", sets)


def _run_name(value: Any, draft: Draft) -> Verdict:
    if draft.trainer.get("output_dir") is not None:
        return Verdict(OTHER, "W&B shows a run under its folder's name, from output_dir")
    return Verdict(TRANSLATED, "", {"name": folder_name(str(value))})


def _batch(value: Any, draft: Draft) -> Verdict:
    whole(value)
    found = facts.batch(draft)
    sets: dict[str, Any] = {"batch.micro": found.micro}
    if found.all is None:
        return Verdict(OTHER, f"and a part of batch.global = {found.words(draft.world)}", sets)
    return Verdict(TRANSLATED, found.words(draft.world), {**sets, "batch.global": found.all})


def _accumulation(value: Any, draft: Draft) -> Verdict:
    whole(value)
    found = facts.batch(draft)
    if found.all is None:
        return Verdict(OTHER, f"a part of batch.global = {found.words(draft.world)}")
    return Verdict(TRANSLATED, found.words(draft.world), {"batch.global": found.all})


def _tokens(value: Any, draft: Draft) -> Verdict:
    if flag(value):
        return Verdict(SAME, "a window's loss is over the label tokens of all ranks")
    return Verdict(OTHER, "the mean of the ranks' means there; over the label tokens of all ranks here")


def _steps(value: Any, draft: Draft) -> Verdict:
    if whole(value) > 0:
        return Verdict(TRANSLATED, "", {"budget.steps": whole(value)})
    return Verdict(SAME, "num_train_epochs decides")


def _epochs(value: Any, draft: Draft) -> Verdict:
    if whole(_setting(draft, "max_steps") or -1) > 0:
        return Verdict(SAME, "max_steps decides")
    return Verdict(TRANSLATED, "", {"budget.epochs": number(value)})


def _dtype(dtype: str) -> Rule:
    def rule(value: Any, draft: Draft) -> Verdict:
        compute, source = facts.precision(draft)
        if not flag(value):
            if not source:
                return Verdict(TRANSLATED, "neither: FP32", {"precision.compute": "fp32"})
            return Verdict(SAME, f"{source} decides")
        if facts.contradiction(draft):
            return facts.contradictory(draft)
        if draft.deepspeed.given or compute != dtype:
            return Verdict(TRANSLATED, "", {"precision.compute": compute})
        if fsdp.active(draft.trainer) or draft.get("shard.engine") == "fsdp2":
            return Verdict(TRANSLATED, "", {"precision.compute": compute})
        return Verdict(OTHER, accelerate.AUTOCAST, {"precision.compute": compute})

    return rule


def _scheduled(draft: Draft) -> bool:
    """Whether the DeepSpeed file has a scheduler, which then decides."""
    return bool(draft.deepspeed.get("scheduler"))


def _schedule(value: Any, draft: Draft) -> Verdict:
    kind = str(value).lower().removeprefix("schedulertype.")
    if _scheduled(draft):
        return Verdict(SAME, "the DeepSpeed file's scheduler decides")
    if kind not in _SCHEDULES:
        draft.decide("optim.schedule", "cosine", f"theirs, {kind}, has no equal; cosine here ends at 0")
        return Verdict(NONE, "mpdist has constant, linear and cosine, each after a warm-up")
    return Verdict(TRANSLATED, "", {"optim.schedule": _SCHEDULES[kind]})


def _warmup(key: str) -> Rule:
    def rule(value: Any, draft: Draft) -> Verdict:
        amount = number(value)
        if _scheduled(draft):
            return Verdict(SAME, "the DeepSpeed file's scheduler decides")
        if str(_setting(draft, "lr_scheduler_type")).lower() == "constant":
            return Verdict(SAME, "a constant schedule has no warm-up there")
        if key == "warmup_ratio" and draft.trainer.number("warmup_steps", 0) > 0:
            return Verdict(SAME, "warmup_steps decides")
        if amount == 0 and facts.warmup(draft) > 0:
            return Verdict(SAME, "warmup_ratio decides")
        if amount >= 1 and key == "warmup_ratio":
            return Verdict(NONE, "the warm-up is the whole run there")
        sets = {"optim.warmup": float(amount) if amount < 1 else int(-(-amount // 1))}
        if amount == 0:
            return Verdict(TRANSLATED, "", sets)
        return Verdict(
            OTHER, "the rate is one step behind there: their first step has 0, here 1/warm-up of the peak", sets
        )

    return rule


def _by_file(rule: Rule) -> Rule:
    """For what a DeepSpeed file's optimizer decides where it has one."""

    def judge(value: Any, draft: Draft) -> Verdict:
        if draft.deepspeed.get("optimizer"):
            return Verdict(SAME, "goes through the DeepSpeed file's optimizer, as there")
        return rule(value, draft)

    return judge


def _optim(value: Any, draft: Draft) -> Verdict:
    name = str(value).lower().removeprefix("optimizernames.")
    if name in ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_hf"):
        return Verdict(TRANSLATED, "", {"optim.name": "adamw"})
    text = f"mpdist has AdamW with FP32 moments alone; a rate for {name} may not suit it"
    if "adamw" in name and ("bit" in name or name.startswith("paged")):
        text = "the moments are quantised or paged there, and FP32 here: 8 bytes a parameter, sharded"
    return Verdict(NONE, text)


def _beta(value: Any, draft: Draft) -> Verdict:
    number(value)
    betas = [number(_setting(draft, f"adam_beta{i}")) for i in (1, 2)]
    return Verdict(TRANSLATED, "", {"optim.betas": betas})


def _decay(value: Any, draft: Draft) -> Verdict:
    return Verdict(TRANSLATED, "biases and norms do not decay in either", {"optim.weight_decay": number(value)})


def _clip(value: Any, draft: Draft) -> Verdict:
    if draft.deepspeed.given and draft.deepspeed.get("gradient_clipping") is None:
        return Verdict(OTHER, "under DeepSpeed gradient_clipping alone clips, and the file has none")
    limit = number(value)
    return Verdict(TRANSLATED, "0 is off" if limit == 0 else "", {"optim.clip": limit or None})


def _every(ours: str, strategy: str) -> Rule:
    """logging_steps, save_steps, eval_steps: whole numbers, or shares of the run."""

    def rule(value: Any, draft: Draft) -> Verdict:
        amount = number(value)
        if _strategy(draft, strategy) != "steps":
            return Verdict(SAME, f"no effect there: {strategy} is {_strategy(draft, strategy)}")
        if amount < 1:
            draft.decide(ours, "100", f"theirs is {amount:g} of the run")
            return Verdict(NONE, _RATIO)
        return Verdict(TRANSLATED, "", {ours: whole(value)})

    return rule


def _strategy(draft: Draft, key: str) -> str:
    old = {"eval_strategy": "evaluation_strategy"}.get(key, key)
    found = draft.trainer.get(key, draft.trainer.get(old, "no" if key == "eval_strategy" else "steps"))
    word = str(found).lower().rpartition(".")[2]
    return "no" if word == "false" else word


def _log_strategy(value: Any, draft: Draft) -> Verdict:
    if _strategy(draft, "logging_strategy") == "steps":
        return Verdict(SAME, "by steps in both")
    return Verdict(NONE, "rows are logged every track.every steps")


def _save_strategy(value: Any, draft: Draft) -> Verdict:
    kind = _strategy(draft, "save_strategy")
    if kind == "steps":
        return Verdict(SAME, "by steps in both")
    if kind == "no":
        return Verdict(OTHER, "the end is always saved here", {"checkpoint.every": 0})
    if kind == "best":
        return Verdict(NONE, "saves are every checkpoint.every steps; the best evaluation's stays, by eval/loss")
    draft.decide("checkpoint.every", "100", "theirs is once an epoch: rows / batch.global steps")
    return Verdict(NONE, "checkpoint.every counts steps; an epoch has rows / batch.global")


def _eval_strategy(value: Any, draft: Draft) -> Verdict:
    kind = _strategy(draft, "eval_strategy")
    if kind == "no":
        return Verdict(SAME, "without data.eval there is no evaluation here either")
    rows = "all of the data there, eval.rows of it here"
    if kind == "epoch":
        draft.decide("eval.every", "50", "theirs is once an epoch: rows / batch.global steps")
        return Verdict(NONE, f"eval.every counts steps; {rows}")
    every = number(draft.trainer.get("eval_steps", _setting(draft, "logging_steps")) or 500)
    return Verdict(OTHER, rows, {"eval.every": whole(every)} if every >= 1 else {})


def _limit(value: Any, draft: Draft) -> Verdict:
    if value is None:
        return Verdict(OTHER, "all checkpoints stay there; here checkpoint.keep is 3, and the best and the latest")
    return Verdict(TRANSLATED, "the best and the latest stay as well", {"checkpoint.keep": max(1, whole(value))})


def _best(value: Any, draft: Draft) -> Verdict:
    if not flag(value):
        return Verdict(SAME, "off in both; the best is kept all the same")
    return Verdict(NONE, "the best is kept: `mpdist export RUN/checkpoints/...`, which the file `best` names")


def _metric(value: Any, draft: Draft) -> Verdict:
    if str(value) in ("loss", "eval_loss"):
        return Verdict(SAME, "eval/loss in both")
    return Verdict(NONE, "the best is that of eval/loss")


def _report(value: Any, draft: Draft) -> Verdict:
    names = words(value)
    if "wandb" in names or "all" in names:
        rest = [name for name in names if name not in ("wandb", "all")]
        text = f"for {', '.join(rest)}: metrics.jsonl has the numbers" if rest else "under track.wandb.project"
        return Verdict(OTHER if rest else TRANSLATED, text, {"track.wandb.mode": "online"})
    if all(name in ("none", "") for name in names):
        return Verdict(TRANSLATED, "metrics.jsonl has the numbers", {"track.wandb.mode": "disabled"})
    return Verdict(NONE, "metrics.jsonl has the numbers", {"track.wandb.mode": "disabled"})


def _seed(value: Any, draft: Draft) -> Verdict:
    return Verdict(OTHER, "the same number gives another order of the data here", {"seed": whole(value)})


def _data_seed(value: Any, draft: Draft) -> Verdict:
    if whole(value) == whole(_setting(draft, "seed")):
        return Verdict(SAME, "seed is for weights, dropout and data alike")
    return Verdict(NONE, "seed is for weights, dropout and data alike")


def _checkpointing(value: Any, draft: Draft) -> Verdict:
    every = draft.trainer.get("activation_checkpointing_kwargs.every_n_layers", 1)
    if not flag(value):
        return Verdict(TRANSLATED, "", {"memory.checkpointing": "none"})
    return Verdict(TRANSLATED, "", {"memory.checkpointing": "full" if whole(every) == 1 else f"every {whole(every)}"})


def _reentrant(value: Any, draft: Draft) -> Verdict:
    if flag(value):
        return Verdict(OTHER, "never reentrant here; the same numbers, and frozen embeddings are no trap")
    return Verdict(SAME, "never reentrant here")


def _layers(value: Any, draft: Draft) -> Verdict:
    return Verdict(SAME, "with activation_checkpointing")


def _compile(value: Any, draft: Draft) -> Verdict:
    if not flag(value):
        return Verdict(SAME, "off in both")
    return facts.compiled(draft)


def _cpu(value: Any, draft: Draft) -> Verdict:
    if flag(value):
        return Verdict(TRANSLATED, "", {"launch.device": "cpu"})
    return Verdict(SAME, "launch.device is auto")


def _drop(value: Any, draft: Draft) -> Verdict:
    if flag(value):
        return Verdict(OTHER, "there the last micro-batch, here the last window", {"data.last_window": "drop"})
    return Verdict(SAME, "an epoch's last rows are used in both")


def _sampling(value: Any, draft: Draft) -> Verdict:
    kind = str(value).lower()
    if kind == "sequential":
        return Verdict(TRANSLATED, "", {"data.shuffle": False})
    if kind == "random":
        return Verdict(SAME, "shuffled in both")
    return Verdict(NONE, "packing fills rows instead (data.packing), and keeps the order random")


def _timeout(value: Any, draft: Draft) -> Verdict:
    return Verdict(TRANSLATED, "seconds", {"launch.timeout": number(value)})


def _deterministic(value: Any, draft: Draft) -> Verdict:
    return Verdict(TRANSLATED, "", {"deterministic": flag(value)})


def _sharded(value: Any, draft: Draft) -> Verdict:
    if not fsdp.active(draft.trainer):
        return Verdict(SAME, "off there")
    sets, text = fsdp.layout(draft, draft.trainer)
    return Verdict(OTHER if text else TRANSLATED, text, sets)


def _fsdp_file(value: Any, draft: Draft) -> Verdict:
    return Verdict(NONE, "a file of its own is not read: put what it holds here")


def _deepspeed(value: Any, draft: Draft) -> Verdict:
    if value in ("", False):
        return Verdict(SAME, "off there")
    if draft.deepspeed.given:
        return Verdict(SAME, f"read from {draft.deepspeed.path}")
    draft.decide("shard.engine", "deepspeed", "the stage is in the DeepSpeed file, which was not given")
    return Verdict(NONE, "it was not read: give --from-deepspeed FILE beside this one")


def _resume(value: Any, draft: Draft) -> Verdict:
    if str(value).lower() in ("true", "false"):
        return Verdict(SAME, "launching again goes on by itself")
    return Verdict(NONE, "the Trainer's checkpoint is of another format; model.path takes its weights alone")


RULES: dict[str, Rule] = {
    **TEXTS,
    "output_dir": _output,
    "run_name": _run_name,
    **dict.fromkeys(("per_device_train_batch_size", "per_gpu_train_batch_size"), _batch),
    "gradient_accumulation_steps": _accumulation,
    "average_tokens_across_devices": _tokens,
    "max_steps": _steps,
    "num_train_epochs": _epochs,
    "bf16": _dtype("bf16"),
    "fp16": _dtype("fp16"),
    "learning_rate": _by_file(to("optim.lr", number)),
    "lr_scheduler_type": _schedule,
    "warmup_steps": _warmup("warmup_steps"),
    "warmup_ratio": _warmup("warmup_ratio"),
    "optim": _by_file(_optim),
    "adam_beta1": _by_file(_beta),
    "adam_beta2": _by_file(_beta),
    "adam_epsilon": _by_file(to("optim.eps", number)),
    "weight_decay": _by_file(_decay),
    "max_grad_norm": _clip,
    "logging_steps": _every("track.every", "logging_strategy"),
    "logging_strategy": _log_strategy,
    "save_steps": _every("checkpoint.every", "save_strategy"),
    "save_strategy": _save_strategy,
    "save_total_limit": with_null(_limit),
    "eval_steps": _every("eval.every", "eval_strategy"),
    "eval_strategy": _eval_strategy,
    "evaluation_strategy": _eval_strategy,
    "load_best_model_at_end": _best,
    "metric_for_best_model": _metric,
    "report_to": _report,
    "seed": _seed,
    "data_seed": _data_seed,
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), _checkpointing),
    "activation_checkpointing_kwargs.every_n_layers": _layers,
    **{f"{key}_checkpointing_kwargs.use_reentrant": _reentrant for key in ("gradient", "activation")},
    "gradient_checkpointing_use_reentrant": _reentrant,
    "tf32": to("precision.tf32", flag),
    "torch_compile": _compile,
    "use_cpu": _cpu,
    "no_cuda": _cpu,
    "full_determinism": _deterministic,
    "dataloader_drop_last": _drop,
    "train_sampling_strategy": _sampling,
    "ddp_timeout": _timeout,
    "fsdp": _sharded,
    **fsdp.rules(lambda draft: draft.trainer),
    "fsdp_config": lambda value, draft: Verdict(SAME, "empty") if value == {} else _fsdp_file(value, draft),
    "deepspeed": _deepspeed,
    "resume_from_checkpoint": _resume,
    **trl.RULES,
}


def finish(draft: Draft) -> None:
    """The Trainer's defaults where the file says nothing, and what no key of it says."""
    found = facts.batch(draft)
    name = "SFTConfig" if facts.is_sft(draft.trainer) else "TrainingArguments"
    sizes = {"batch.micro": found.micro}
    if found.all is not None:
        sizes["batch.global"] = found.all
    draft.default(f"per_device_train_batch_size: {found.micro}", sizes)
    product = f"{found.micro} x {found.accumulation} x ranks"
    draft.fill("batch.global", product, "it depends on the number of ranks: give --ranks N, or write it")
    if draft.get("budget.steps") is None:
        epochs = number(_setting(draft, "num_train_epochs"))
        draft.default(f"num_train_epochs: {epochs:g}", {"budget.epochs": epochs})
    if not draft.deepspeed.get("optimizer"):
        _finish_optimizer(draft)
    if not _scheduled(draft) and "optim.schedule" not in draft.open:
        kind = str(_setting(draft, "lr_scheduler_type")).lower()
        draft.default(f"lr_scheduler_type: {kind}", {"optim.schedule": _SCHEDULES.get(kind, "linear")})
    if not _scheduled(draft) and draft.get("optim.schedule") != "constant":
        draft.default("no warm-up", {"optim.warmup": facts.warmup(draft)})
    draft.default("seed: 42", {"seed": whole(_setting(draft, "seed"))})
    compute, source = facts.precision(draft)
    if "precision.compute" not in draft.open:
        draft.default(f"{source or 'bf16, fp16'} of {name}", {"precision.compute": compute})
    accelerate.overflow(draft)
    _finish_sharding(draft)
    if facts.is_sft(draft.trainer):
        trl.finish(draft)
    trl.fill(draft)
    _notes(draft, compute)


def _finish_optimizer(draft: Draft) -> None:
    rate = number(_setting(draft, "learning_rate"))
    betas = [number(_setting(draft, f"adam_beta{i}")) for i in (1, 2)]
    decay = number(_setting(draft, "weight_decay"))
    draft.default(f"learning_rate: {rate:g}", {"optim.lr": rate})
    draft.default("adam_beta1, adam_beta2", {"optim.betas": betas})
    draft.default(f"weight_decay: {decay:g}", {"optim.weight_decay": decay})


def _finish_sharding(draft: Draft) -> None:
    if draft.deepspeed.given or draft.accelerate.given or "shard.engine" in draft.open:
        return
    if fsdp.active(draft.trainer):
        accelerate.wire(draft)
        return
    draft.default("without fsdp, deepspeed or a file of accelerate: DDP", {"shard.engine": "ddp"})
    draft.note("If the script was started by `accelerate launch` with a file, give it too: --from-accelerate FILE.")


def _notes(draft: Draft, compute: str) -> None:
    draft.note(
        "The Trainer divides by the label tokens of the whole window since transformers 4.46, and over all ranks where "
        "average_tokens_across_devices is true (the default of 5); before it averaged the micro-batches' means. Here it "
        "is always the window's, over all ranks."
    )
    draft.note(
        "The Trainer's masters have the dtype in which the script loads the model, which since transformers 5 is that of "
        "the file. Here they are FP32 whatever the file has; precision.master: compute is 16-bit training."
    )
    if (facts.batch(draft).accumulation or 1) > 1 and draft.get("shard.engine") in ("ddp", "fsdp2"):
        draft.note(
            "The Trainer sends gradients once a step (no_sync); reduce.when: last does, the default does at each micro-batch."
        )
    if compute == "fp16":
        draft.note("The Trainer's global_step counts skipped steps too; here steps are those that were applied.")
    if draft.trainer.get("save_total_limit", 0) == 0 and "save_total_limit" not in draft.trainer.values:
        draft.note("The Trainer keeps every checkpoint; here checkpoint.keep is 3, and the best and the latest stay.")
    draft.note("What is logged and saved, and how often, is mpdist's default where their file does not say.")
