"""DeepSpeed's JSON: ZeRO, precision and batch, and perhaps optimizer and scheduler."""

from __future__ import annotations

from typing import Any

from mpdist.translate import facts, zero
from mpdist.translate.accelerate import clip, overflow, wire
from mpdist.translate.document import Wrong, flag, number, whole
from mpdist.translate.draft import NONE, OTHER, SAME, TRANSLATED, Draft, Rule, Verdict, find, none, off, same

_UNSIZED = "no train_micro_batch_size_per_gpu and gradient_accumulation_steps say it"
_UNKNOWN = "the DeepSpeed file does not hold it: it is in your script"


def _dtype(dtype: str) -> Rule:
    def rule(value: Any, draft: Draft) -> Verdict:
        compute, source = facts.precision(draft)
        if flag(value) and facts.contradiction(draft):
            return facts.contradictory(draft)
        if flag(value) or not source:
            return Verdict(TRANSLATED, "", {"precision.compute": compute})
        return Verdict(SAME, f"{source} decides")

    return rule


def _scale(rule: Rule) -> Rule:
    """For the keys that have an effect under FP16 alone."""

    def judge(value: Any, draft: Draft) -> Verdict:
        if draft.deepspeed.get("fp16.enabled") == "auto" and "fp16.enabled" not in draft.filled:
            return Verdict(OTHER, "only of effect if fp16.enabled comes to true; left to mpdist")
        if facts.precision(draft)[0] != "fp16" or not draft.deepspeed.get("fp16"):
            return Verdict(SAME, "no effect there: FP16 is off")
        return rule(value, draft)

    return judge


def _static(draft: Draft) -> float:
    return number(zero.value_of(draft, "fp16.loss_scale", 0))


def _loss_scale(value: Any, draft: Draft) -> Verdict:
    if number(value) == 0:
        return Verdict(TRANSLATED, "0 is a scale that moves", {"precision.scale.mode": "dynamic"})
    sets = {"precision.scale.mode": "static", "precision.scale.init": number(value)}
    return Verdict(TRANSLATED, "", sets)


def _moving(ours: str, convert: Any, text: str = "") -> Rule:
    def rule(value: Any, draft: Draft) -> Verdict:
        if _static(draft):
            return Verdict(SAME, "no effect there: the scale is static")
        return Verdict(OTHER if text else TRANSLATED, text, {ours: convert(value)})

    return _scale(rule)


def _power(value: Any) -> float:
    if not 0 <= whole(value) < 60:
        raise Wrong("a whole number from 0 to 59 (a scale is below 1e18)")
    return 2.0 ** whole(value)


def _hysteresis(value: Any, draft: Draft) -> Verdict:
    if whole(value) <= 1 or _static(draft):
        return Verdict(SAME, "the scale falls at each overflow in both")
    return Verdict(NONE, f"the scale falls at overflow {value} there, at each one here")


def _pure(value: Any, draft: Draft) -> Verdict:
    if not flag(value):
        return Verdict(SAME, "masters are FP32 in both")
    if facts.zero(draft):
        return Verdict(
            NONE, "the deepspeed engine keeps FP32 masters; fsdp2 has 16-bit ones (precision.master: compute)"
        )
    return Verdict(OTHER, "pure 16-bit training, named as such in every report", {"precision.master": "compute"})


def _wire(value: Any, draft: Draft) -> Verdict:
    wire = str(value).lower()
    if wire not in ("fp32", "fp16", "bf16"):
        raise Wrong("fp32, fp16 or bf16")
    sets = {"reduce.wire": wire, **({} if wire == "fp32" else {"reduce.sum": "wire"})}
    return Verdict(TRANSLATED, "" if wire == "fp32" else "sums are in that dtype there", sets)


def _accumulated(value: Any, draft: Draft) -> Verdict:
    if str(value).lower() in ("fp32", "float32", "torch.float32"):
        return Verdict(SAME, "micro-batches always add up in FP32 here")
    return Verdict(OTHER, "micro-batches always add up in FP32 here")


def _batch(key: str) -> Rule:
    def rule(value: Any, draft: Draft) -> Verdict:
        whole(value)
        found = facts.batch(draft)
        if key == "train_micro_batch_size_per_gpu":
            return Verdict(TRANSLATED, "", {"batch.micro": found.micro})
        if found.all is None:
            return Verdict(OTHER, f"a part of batch.global = {found.words(draft.world)}")
        sets = {"batch.global": found.all}
        if found.micro and found.all % found.micro == 0:
            sets["batch.micro"] = found.micro
        if key == "gradient_accumulation_steps" and (found.accumulation or 1) > 1 and not draft.trainer.given:
            mean = "the mean of the micro-batches' means there, of the window's label tokens here"
            return Verdict(OTHER, f"{found.words(draft.world)}; {mean}", sets)
        return Verdict(TRANSLATED, found.words(draft.world), sets)

    return rule


def _optimizer(value: Any, draft: Draft) -> Verdict:
    name = str(value).lower()
    if name == "adam" and not flag(zero.value_of(draft, "optimizer.params.adam_w_mode", True)):
        return Verdict(NONE, "Adam adds the decay to the gradient; here it is AdamW's, apart from it")
    if name not in ("adam", "adamw"):
        draft.decide("optim.lr", "2e-5", f"theirs is {value}'s, and an AdamW needs another")
        return Verdict(NONE, "mpdist has AdamW alone")
    return Verdict(TRANSLATED, "Adam is AdamW there" if name == "adam" else "", {"optim.name": "adamw"})


def _adam(draft: Draft) -> bool:
    return str(draft.deepspeed.get("optimizer.type", "")).lower() in ("adam", "adamw")


def _pair(value: Any) -> list[float]:
    if not isinstance(value, list) or len(value) != 2:
        raise Wrong("a list of two numbers")
    return [number(item) for item in value]


def _of_adam(ours: str, convert: Any) -> Rule:
    def rule(value: Any, draft: Draft) -> Verdict:
        if not _adam(draft):
            return Verdict(NONE, "of an optimizer that is not here")
        if ours == "optim.weight_decay" and number(value) > 0:
            text = "every parameter decays there, biases and norms too"
            return Verdict(OTHER, text, {ours: number(value), "optim.decay": "all"})
        return Verdict(TRANSLATED, "", {ours: convert(value)})

    return rule


_PEAKS = {"WarmupLR": None, "WarmupDecayLR": 0.001}  # warmup_max_lr where the file has none; None is the optimizer's


def _kind(draft: Draft) -> str:
    return str(draft.deepspeed.get("scheduler.type"))


_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _schedule(value: Any, draft: Draft) -> Verdict:
    if _kind(draft) not in _SCHEDULES:
        draft.decide("optim.schedule", "cosine", f"theirs, {value}, has no equal")
        return Verdict(NONE, "mpdist has constant, linear and cosine, each after a warm-up")
    text = "it ends at cos_min_ratio there, at 0 here" if value == "WarmupCosineLR" else ""
    return Verdict(OTHER if text else TRANSLATED, text, {"optim.schedule": _SCHEDULES[value]})


def _of_schedule(rule: Rule) -> Rule:
    def judge(value: Any, draft: Draft) -> Verdict:
        if _kind(draft) not in _SCHEDULES:
            return Verdict(NONE, "of a schedule that is not here")
        return rule(value, draft)

    return judge


def _warmup(value: Any, draft: Draft) -> Verdict:
    steps = number(value)
    kind = str(zero.value_of(draft, "scheduler.params.warmup_type", "log")).lower()
    shape = (
        "a logarithm up from 0 there, a straight line here" if kind == "log" else "their first steps have a rate of 0"
    )
    return Verdict(OTHER, shape, {"optim.warmup": 0 if steps == 1 else steps})


def _span(value: Any, draft: Draft) -> Verdict:
    if _kind(draft) == "WarmupLR":
        return Verdict(SAME, "no effect there: the rate stays constant")
    return Verdict(TRANSLATED, "", {"optim.horizon": whole(value)})


def _peak(value: Any, draft: Draft) -> Verdict:
    """The schedule's rate beats the optimizer's."""
    return Verdict(TRANSLATED, "", {"optim.lr": number(value)})


def _rate(value: Any, draft: Draft) -> Verdict:
    peak = zero.value_of(draft, "scheduler.params.warmup_max_lr", _PEAKS.get(_kind(draft)))
    if peak is not None and _kind(draft) in _PEAKS:
        return Verdict(SAME, f"warmup_max_lr = {peak} decides, as it does there")
    return _of_adam("optim.lr", number)(value, draft)


def _report(value: Any, draft: Draft) -> Verdict:
    if isinstance(value, (int, float)) and 1 <= value < 2**31:
        return Verdict(OTHER, "one logged row in so many steps", {"track.every": whole(value)})
    return Verdict(SAME, "never")


def _drop(value: Any, draft: Draft) -> Verdict:
    if flag(value):
        return Verdict(OTHER, "there the last micro-batch, here the last window", {"data.last_window": "drop"})
    return Verdict(SAME, "kept in both")


def _wandb(value: Any, draft: Draft) -> Verdict:
    if flag(value):
        return Verdict(TRANSLATED, "", {"track.wandb.mode": "online"})
    return Verdict(SAME, "off there; offline here, which writes files only")


def _sixteen() -> dict[str, Rule]:
    lost = "consecutive overflows do not refill what is not there: the scale falls at each one here"
    return {
        "fp16.enabled": zero.filled("fp16.enabled", _dtype("fp16")),
        "fp16.auto_cast": off("inputs are token ids, which are not cast"),
        "fp16.loss_scale": _scale(_loss_scale),
        "fp16.initial_scale_power": _moving("precision.scale.init", _power),
        "fp16.loss_scale_window": _moving("precision.scale.interval", whole),
        "fp16.min_loss_scale": _moving("precision.scale.floor", number),
        "fp16.hysteresis": _scale(_hysteresis),
        "fp16.consecutive_hysteresis": _scale(off(lost)),
        "fp16.fp16_master_weights_and_grads": _pure,
        **{f"{name}.enabled": zero.filled(f"{name}.enabled", _dtype("bf16")) for name in ("bf16", "bfloat16")},
        "bf16.immediate_grad_update": off("performance of theirs"),
        "bf16.check_grad_overflow": lambda value, _: (
            Verdict(SAME, "what is not finite is never applied")
            if flag(value)
            else Verdict(OTHER, "what is not finite is never applied here")
        ),
        "bf16.bf16_master_weights_and_grads": _pure,
        "bf16.bf16_optimizer_states": off("moments have the dtype of the masters"),
        "torch_autocast.enabled": lambda value, draft: (
            Verdict(OTHER, "autocast keeps some operations in FP32; here keep_fp32 names modules")
            if flag(value)
            else Verdict(SAME, "off in both")
        ),
        "torch_autocast.dtype": lambda value, draft: (
            Verdict(SAME, "fp16 and bf16 decide")
            if facts.contradiction(draft)
            else Verdict(TRANSLATED, "", {"precision.compute": facts.precision(draft)[0]})
        ),
        "torch_autocast.lower_precision_safe_modules": none("precision.keep_fp32 names the others"),
        "communication_data_type": _wire,
        "seq_parallel_communication_data_type": none("no sequence parallelism here"),
        "data_types.grad_accum_dtype": _accumulated,
        "data_types.keep_in_fp32_modules": off("precision.keep_fp32 takes name patterns of modules", "auto"),
        "data_types.**": none("precision.compute and precision.master say it"),
    }


def _training() -> dict[str, Rule]:
    params, plan = "optimizer.params.", "scheduler.params."
    filled: dict[str, Rule] = {
        **{
            key: _batch(key)
            for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        },
        "gradient_clipping": lambda value, _: clip(value),
        f"{params}lr": _rate,
        f"{params}betas": _of_adam("optim.betas", _pair),
        f"{params}eps": _of_adam("optim.eps", number),
        f"{params}weight_decay": _of_adam("optim.weight_decay", number),
        f"{plan}warmup_min_lr": off("a warm-up starts at 0"),
        f"{plan}warmup_max_lr": _of_schedule(_peak),
        f"{plan}warmup_num_steps": _of_schedule(_warmup),
        f"{plan}total_num_steps": _of_schedule(_span),
    }
    return {
        **{key: zero.filled(key, rule) for key, rule in filled.items()},
        "optimizer.type": _optimizer,
        "optimizer.legacy_fusion": none(zero.QUIET),
        f"{params}torch_adam": same("torch's AdamW is what runs here"),
        f"{params}adam_w_mode": same("with optimizer.type"),
        f"{params}bias_correction": lambda value, _: (
            Verdict(SAME, "in both") if flag(value) else Verdict(NONE, "the moments' bias is always corrected here")
        ),
        f"{params}max_grad_norm": none("DeepSpeed does not use it; gradient_clipping is what clips"),
        f"{params}**": none("AdamW here has lr, betas, eps and weight_decay"),
        "scheduler.type": _schedule,
        f"{plan}warmup_type": same("with warmup_num_steps"),
        f"{plan}warmup_min_ratio": off("a warm-up starts at 0"),
        f"{plan}cos_min_ratio": off("a schedule ends at 0"),
        f"{plan}last_batch_iteration": off("a run starts at its first step", -1),
        f"{plan}**": none("of a schedule that is not here"),
    }


RULES: dict[str, Rule] = {
    **_training(),
    **_sixteen(),
    **zero.zero(),
    **zero.sections(),
    "zero_allow_untested_optimizer": same("mpdist's own AdamW runs under DeepSpeed"),
    "zero_force_ds_cpu_optimizer": same("mpdist's own AdamW runs under DeepSpeed"),
    "managed_gradient_accumulation": same("mpdist decides where a window ends"),
    "prescale_gradients": off("gradients are summed, never averaged: the loss carries the whole division"),
    "gradient_predivide_factor": off(
        "gradients are summed, never averaged: the loss carries the whole division", 1, 1.0
    ),
    "gradient_allreduce_op": same("gradients are summed; the loss carries the whole division"),
    "sparse_gradients": off("gradients travel dense"),
    "disable_allgather": off(zero.QUIET),
    "disable_python_gc": off(zero.QUIET),
    "dump_state": off("`mpdist config` prints every value with its origin"),
    "steps_per_print": _report,
    "wall_clock_breakdown": off("status.json has the time table"),
    "memory_breakdown": off("ledger.json has the bytes"),
    "vocabulary_size": none("the model's own"),
    "sequence_parallel_size": off("no sequence parallelism here", 1),
    "use_data_before_expert_parallelism": off("no expert parallelism here"),
    "dataloader_drop_last": _drop,
    "log_level": none("ranks log to sessions/NNNN/logs"),
    "wandb.enabled": _wandb,
    "wandb.project": lambda value, draft: (
        Verdict(TRANSLATED, "", {"track.wandb.project": str(value)})
        if draft.deepspeed.flag("wandb.enabled")
        else Verdict(SAME, "off there")
    ),
    "wandb.**": none("WANDB_ENTITY and the like are read from the environment"),
}


def known(path: tuple[str, ...]) -> bool:
    return find(RULES, path) is not None


def finish(draft: Draft) -> None:
    """DeepSpeed's defaults where the file says nothing, and what no key of it says."""
    compute, source = facts.precision(draft)
    if zero.stage(draft) == 0:
        draft.default("no zero_optimization.stage: nothing is sharded", {"shard.engine": "ddp"})
    if not source and "precision.compute" not in draft.open:
        draft.default("neither bf16 nor fp16: FP32", {"precision.compute": "fp32"})
    if compute == "fp16":
        _finish_scale(draft)
    if compute != "fp32":
        _notes(draft)
    if "communication_data_type" not in draft.deepspeed.values:
        wire(draft)
    if "gradient_clipping" not in draft.deepspeed.values:
        limit = facts.deepspeed_default(draft, "gradient_clipping")
        words = f"gradient_clipping: {limit} in current versions; before, nothing was clipped"
        draft.default(words, {"optim.clip": limit or None})
    if _kind(draft) == "WarmupDecayLR" and draft.deepspeed.get("scheduler.params.warmup_max_lr") is None:
        draft.default("warmup_max_lr: 0.001", {"optim.lr": _PEAKS["WarmupDecayLR"]})
    if _adam(draft):
        decay = 0.01 if flag(zero.value_of(draft, "optimizer.params.torch_adam", False)) else 0.0
        for key, value in (("lr", 1e-3), ("betas", [0.9, 0.999]), ("weight_decay", decay)):
            if f"optim.{key}" not in draft.open:
                draft.default(f"{key} of DeepSpeed's Adam", {f"optim.{key}": value})
    if _kind(draft) in _SCHEDULES and draft.deepspeed.get("scheduler.params.warmup_num_steps") is None:
        draft.default("warmup_num_steps: 1000", {"optim.warmup": 1000})
    if not draft.trainer.given:
        _finish_alone(draft)


def _finish_scale(draft: Draft) -> None:
    if _static(draft):
        return
    overflow(draft)
    interval = facts.deepspeed_default(draft, "fp16.loss_scale_window")
    draft.default(f"fp16.loss_scale_window: {interval}", {"precision.scale.interval": interval})
    if draft.deepspeed.get("fp16.hysteresis") is None and whole(facts.deepspeed_default(draft, "fp16.hysteresis")) > 1:
        draft.note("fp16.hysteresis is 2 by default: there the scale falls at the second overflow, here at each one.")
    draft.note(
        "DeepSpeed's scale grows one step later, and in that step its gradients are half of what they should be. Here "
        "the scale changes between windows and no gradient with it."
    )


def _notes(draft: Draft) -> None:
    draft.note("DeepSpeed's masters are the weights after rounding to 16 bit; here they are the unrounded ones.")
    found = facts.batch(draft)
    accumulated = str(draft.deepspeed.get("data_types.grad_accum_dtype", "")).lower()
    if (found.accumulation or 1) > 1 and accumulated not in ("fp32", "float32"):
        draft.note("DeepSpeed adds up micro-batches in 16 bit without data_types.grad_accum_dtype; here in FP32.")


def _no_global(draft: Draft, found: facts.Batch) -> str:
    """What batch.global cannot be computed for."""
    if found.micro and found.accumulation:
        return "it depends on the number of ranks: give --ranks N, or write it"
    auto = [key for key in facts.SIZES if draft.deepspeed.get(key) == "auto" and key not in draft.filled]
    if not auto:
        return f"the file has no train_batch_size, and {_UNSIZED}"
    keys = ", ".join(auto[:-1]) + f" and {auto[-1]} are" if auto[1:] else f"{auto[0]} is"
    filled = "the script fills it" if draft.accelerate.given else "give --from-trainer FILE, which fills it"
    return f"{keys} auto there: {filled}, or write it"


def _finish_alone(draft: Draft) -> None:
    found = facts.batch(draft)
    product = f"{found.micro or 'micro'} x {found.accumulation or 'accumulation'} x {draft.world.parallel or 'ranks'}"
    draft.fill("batch.global", product, _no_global(draft, found))
    if found.micro is None:
        why = "it depends on the number of ranks: give --ranks N" if found.accumulation and found.all else _UNSIZED
        draft.decide("batch.micro", "1", why)
    if (found.accumulation or 2) > 1:
        draft.note(
            "DeepSpeed divides each micro-batch's loss by their number: the mean of means, and of the ranks'. Here the "
            "window's loss is its sum over label tokens by their number."
        )
    if not _adam(draft):
        for key, example in (("optim.lr", "2e-5"), ("optim.betas", "[0.9, 0.999]"), ("optim.weight_decay", "0.01")):
            draft.decide(key, example, _UNKNOWN)
    if _kind(draft) not in _SCHEDULES:
        draft.decide("optim.schedule", "linear", _UNKNOWN)
        draft.decide("optim.warmup", "0.03", _UNKNOWN)
