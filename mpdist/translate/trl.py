"""Keys of TRL's SFTConfig, and of the script arguments that stand beside TrainingArguments in one file."""

from __future__ import annotations

from typing import Any

from mpdist.config.write import inline
from mpdist.translate import facts
from mpdist.translate.document import flag, number, whole, words
from mpdist.translate.draft import NONE, OTHER, SAME, TRANSLATED, Draft, Rule, Verdict, none, off, same, to

_ATTENTION = ("sdpa", "eager", "flash_attention_2", "flex_attention")
_ADAPTERS = "no adapters here: every parameter trains but those of model.freeze"
_QUANTISED = "no quantised models here: masters are FP32"
_OTHER_TRAINER = "of another trainer of TRL; mpdist trains on the next token alone"
_WORKERS = "`mpdist prepare` does it, once"
_TOKENS = "special tokens are the tokenizer's"
_CUT = "the rows of a source are all used; data.train.N.weight takes a part of them"


def _attention(value: Any, draft: Draft) -> Verdict:
    name = str(value).lower()
    if name not in _ATTENTION:
        draft.decide("model.attention", "sdpa", f"theirs, {value}, has no equal")
        return Verdict(NONE, f"model.attention is auto, {', '.join(_ATTENTION)}")
    return Verdict(TRANSLATED, "", {"model.attention": name})


def _flash(value: Any, draft: Draft) -> Verdict:
    return (
        Verdict(TRANSLATED, "", {"model.attention": "flash_attention_2"}) if flag(value) else Verdict(SAME, "off there")
    )


def _dtype(value: Any, draft: Draft) -> Verdict:
    return Verdict(
        OTHER, "the dtype of masters there; FP32 here, and precision.compute is that of forward and backward"
    )


def _revision(value: Any, draft: Draft) -> Verdict:
    path = str(draft.trainer.get("model_name_or_path", ""))
    if str(value) == "main" or path.startswith((".", "/", "~")):
        return Verdict(SAME, "the newest in both")
    return Verdict(TRANSLATED, "", {"model.revision": str(value)})


def _length(value: Any, draft: Draft) -> Verdict:
    if whole(value) < 2:
        return Verdict(NONE, "a row has two tokens at least")
    return Verdict(TRANSLATED, "", {"data.seq_len": whole(value)})


def _packing(value: Any, draft: Draft) -> Verdict:
    if not flag(value):
        return Verdict(TRANSLATED, "", {"data.packing": "none"})
    wrapped = str(draft.trainer.get("packing_strategy", "bfd")).lower() == "wrapped"
    text = "documents do not see each other here; there only where attention is told"
    return Verdict(OTHER, text, {"data.packing": "concat" if wrapped else "best_fit"})


def _packing_strategy(value: Any, draft: Draft) -> Verdict:
    if not draft.trainer.flag("packing"):
        return Verdict(SAME, "no effect there: packing is off")
    if str(value).lower() in ("bfd_split", "bfd-requeue"):
        return Verdict(TRANSLATED, "", {"data.too_long": "split"})
    if str(value).lower() == "wrapped":
        return Verdict(TRANSLATED, "concat", {"data.too_long": "split"})
    if str(value).lower() in ("bfd", "ffd"):
        return Verdict(TRANSLATED, "best_fit")
    return Verdict(NONE, "data.packing is none, concat or best_fit")


def _truncation(value: Any, draft: Draft) -> Verdict:
    if str(value).lower() == "keep_start":
        return Verdict(TRANSLATED, "", {"data.too_long": "truncate"})
    return Verdict(NONE, "truncate keeps the beginning")


def _eval_packing(value: Any, draft: Draft) -> Verdict:
    if flag(value) == draft.trainer.flag("packing"):
        return Verdict(SAME, "data.packing is for evaluation too")
    return Verdict(NONE, "data.packing is for evaluation too")


def _loss_on(ours: str) -> Rule:
    def rule(value: Any, draft: Draft) -> Verdict:
        if not flag(value):
            return Verdict(SAME, "loss_on: all" if ours == "assistant" else "the whole row counts there")
        return Verdict(TRANSLATED, "", {"data.loss_on": ours})

    return rule


def _loss(value: Any, draft: Draft) -> Verdict:
    if str(value).lower() in ("nll", "chunked_nll"):
        return Verdict(SAME, "cross-entropy, in chunks of memory.loss_chunk")
    return Verdict(NONE, "the loss is plain cross-entropy")


def _template_path(value: Any, draft: Draft) -> Verdict:
    if str(value).endswith((".jinja", ".jinja2", ".j2", ".txt")):
        return Verdict(TRANSLATED, "", {"data.chat_template": str(value)})
    return Verdict(OTHER, "a tokenizer's template: data.tokenizer takes that tokenizer, data.chat_template a file")


def _template(value: Any, draft: Draft) -> Verdict:
    draft.decide(
        "data.chat_template", "template.jinja", "theirs stands in the file itself; write it into one of its own"
    )
    return Verdict(OTHER, "the template itself there, a file that holds it here")


def _text_field(value: Any, draft: Draft) -> Verdict:
    if str(value) == "text":
        return Verdict(SAME, "a record of format text has it in `text`")
    return Verdict(OTHER, f"the source's fields: {{text: {value}}}")


def _items(draft: Draft) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What their file says of the sources of training and of evaluation, in its order."""
    trainer = draft.trainer
    mixture = trainer.get("dataset_mixture.datasets", trainer.get("datasets", []))
    mixer = trainer.get("dataset_mixer", {})
    if isinstance(mixture, list) and mixture and all(isinstance(item, dict) for item in mixture):
        return mixture, []
    if isinstance(mixer, dict) and mixer:
        split = next((s for s in trainer.get("dataset_splits", []) if str(s).startswith("train")), None)
        return [{"id": name, "weight": weight, "split": split} for name, weight in mixer.items()], []
    if trainer.get("dataset_name"):
        name = trainer.get("dataset_name")
        splits = (trainer.get("dataset_train_split", "train"), trainer.get("dataset_test_split", "test"))
        train, evaluation = ([{"id": name, "split": split}] for split in splits)
        return train, evaluation
    if trainer.get("train_file"):
        held_out = trainer.get("validation_file")
        return [{"id": trainer.get("train_file")}], [{"id": held_out}] if held_out else []
    return [], []


def _sources(draft: Draft) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Sources of training and of evaluation as ours are written; without a format where nothing tells it."""
    train, evaluation = _items(draft)
    return [_source(item, draft) for item in train], [_source(item, draft) for item in evaluation]


def _source(item: dict[str, Any], draft: Draft) -> dict[str, Any]:
    source: dict[str, Any] = {"path": str(item.get("id", item.get("path")))}
    if item.get("split"):
        source["split"] = str(item["split"])
    if item.get("weight") is not None and number(item["weight"]) != 1:
        source["weight"] = number(item["weight"])
    format, _ = _format(item, draft)
    return {**source, "format": format} if format else source


def _format(item: dict[str, Any], draft: Draft) -> tuple[str | None, str]:
    """The format of a source's records, and the key that it is guessed from where no columns and no file name tell it."""
    columns = words(item.get("columns") or draft.trainer.get("dataset_columns", []) or [])
    for column, format, key in (
        ("messages", "messages", "assistant_only_loss"),
        ("completion", "prompt_completion", "completion_only_loss"),
    ):
        if column in columns:
            return format, ""
        if draft.trainer.flag(key):
            return format, key
    if "text" in columns or str(item.get("id")).endswith(".txt"):
        return "text", ""
    return ("text", "block_size") if draft.trainer.get("block_size") is not None else (None, "")


def _guesses(draft: Draft, ours: str) -> str:
    """What of data.train, or data.eval, their file does not say: splits are as TRL's own script has them."""
    training = ours == "data.train"
    items = _items(draft)[0 if training else 1]
    formats = dict.fromkeys(_format(item, draft) for item in items)
    found = [f"format: {format} (by {key})" for format, key in formats if key]
    found += ["format: messages" for format, _ in formats if format is None]
    key, split = ("dataset_train_split", "train") if training else ("dataset_test_split", "test")
    if any(item.get("split") for item in items) and draft.trainer.get("dataset_name") == items[0].get("id"):
        found += [f"split: {split} (no {key})"] if draft.trainer.get(key) is None else []
    return ", ".join(found)


def _evaluates(draft: Draft) -> bool:
    return str(draft.trainer.get("eval_strategy", draft.trainer.get("evaluation_strategy", "no"))) != "no"


def _data(value: Any, draft: Draft) -> Verdict:
    train, evaluation = _sources(draft)
    if not train:
        return Verdict(NONE, "data.train names a file, a folder or a hub id")
    if not all("format" in source for source in train):
        return Verdict(OTHER, f"a source says its format; guessed in the FILL IN line: {_guesses(draft, 'data.train')}")
    sets: dict[str, Any] = {"data.train": train}
    if evaluation and _evaluates(draft):
        sets["data.eval"] = evaluation
    guesses = {ours: guess for ours in sets if (guess := _guesses(draft, ours))}
    draft.guesses |= guesses
    said = "; ".join(f"of {ours}, {guess}" for ours, guess in guesses.items())
    return Verdict(
        OTHER if said else TRANSLATED, f"guessed, to decide: {said}" if said else "", sets, " and ".join(sets)
    )


def _config_name(value: Any, draft: Draft) -> Verdict:
    if str(value) == "default":
        return Verdict(SAME, "the default one")
    return Verdict(NONE, "a source has no subset's name: save it by datasets.save_to_disk and give the folder")


def _fraction(value: Any, draft: Draft) -> Verdict:
    return (
        Verdict(OTHER, "a fixed part of the rows there; each epoch draws its own here")
        if number(value) != 1
        else _data(value, draft)
    )


def _block(value: Any, draft: Draft) -> Verdict:
    sets = {"data.seq_len": whole(value), "data.packing": "concat"}
    return Verdict(OTHER, "documents are joined and cut, but do not see each other here", sets)


_SFT: dict[str, Rule] = {
    "max_length": _length,
    "max_seq_length": _length,
    "packing": _packing,
    "packing_strategy": _packing_strategy,
    "eval_packing": _eval_packing,
    "padding_free": same("short rows are cut to the longest of a window; packing leaves little padding"),
    "pad_to_multiple_of": none("rows are padded to a multiple of 8"),
    "truncation_mode": _truncation,
    "completion_only_loss": _loss_on("completion"),
    "assistant_only_loss": _loss_on("assistant"),
    "loss_type": _loss,
    "activation_offloading": off("activations are recomputed or kept, never moved to the host"),
    "chat_template_path": _template_path,
    "chat_template": _template,
    "dataset_text_field": _text_field,
    "dataset_kwargs": off("mpdist prepares the data itself"),
    "dataset_kwargs.**": none("mpdist prepares the data itself"),
    "dataset_num_proc": none(_WORKERS),
    "dataset_batch_size": none(_WORKERS),
    "num_of_sequences": none(_WORKERS),
    "chars_per_token": none(_WORKERS),
    "shuffle_dataset": same("data.shuffle: a new order each epoch"),
    "eos_token": none(f"{_TOKENS}: data.tokenizer takes a folder with another one"),
    "pad_token": same("padding is in no loss, whatever its token"),
    "model_init_kwargs": off("model.path, model.attention, precision"),
    "model_init_kwargs.attn_implementation": _attention,
    "model_init_kwargs.dtype": _dtype,
    "model_init_kwargs.torch_dtype": _dtype,
    "model_init_kwargs.revision": _revision,
    "model_init_kwargs.trust_remote_code": to("model.trust_remote_code", flag),
    "model_init_kwargs.use_cache": same("no cache in training"),
    "model_init_kwargs.**": none("model.path, model.attention and precision say how a model is loaded"),
}
_MODEL: dict[str, Rule] = {
    "model_name_or_path": to("model.path", str),
    "model_revision": _revision,
    "dtype": _dtype,
    "torch_dtype": _dtype,
    "trust_remote_code": to("model.trust_remote_code", flag),
    "attn_implementation": _attention,
    "use_flash_attention_2": _flash,
    "use_peft": off(_ADAPTERS),
    **{
        f"lora_{name}": none(_ADAPTERS)
        for name in ["r", "alpha", "dropout", "target_modules", "target_parameters", "modules_to_save"]
    },
    **{key: none(_ADAPTERS) for key in ("lora_task_type", "lora_bias", "use_rslora", "use_dora")},
    **{f"load_in_{bits}bit": off(_QUANTISED) for bits in (4, 8)},
    **{key: none(_QUANTISED) for key in ("bnb_4bit_quant_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant")},
    "tokenizer_name": to("data.tokenizer", str),
    "tokenizer_name_or_path": to("data.tokenizer", str),
    "cache_dir": none("HF_HOME in the environment"),
    "use_fast_tokenizer": same("tokenizers are fast ones"),
    "low_cpu_mem_usage": same("each rank reads its shards only"),
}
_SCRIPT: dict[str, Rule] = {
    "dataset_name": _data,
    "dataset_config": _config_name,
    "dataset_config_name": _config_name,
    "dataset_train_split": _data,
    "dataset_test_split": _data,
    "dataset_streaming": off("data are prepared on disk, once"),
    "dataset_mixture.datasets.*.id": _data,
    "dataset_mixture.datasets.*.split": _data,
    "dataset_mixture.datasets.*.weight": _fraction,
    "dataset_mixture.datasets.*.columns": _data,
    "dataset_mixture.datasets.*.config": _config_name,
    "dataset_mixture.seed": same("seed and epoch decide the order"),
    "dataset_mixture.test_split_size": none("data.eval names held-out data of its own"),
    "dataset_mixture.**": none("data.train"),
    "datasets.*.path": _data,
    "datasets.*.split": _data,
    "datasets.*.columns": _data,
    "datasets.*.name": _config_name,
    "datasets.**": none("data.train"),
    "dataset_mixer.*": _fraction,
    "dataset_splits": _data,
    "dataset_configs": none("a source has no subset's name: save it by datasets.save_to_disk and give the folder"),
    "train_file": _data,
    "validation_file": _data,
    "test_split_size": off("data.eval names held-out data of its own"),
    "validation_split_percentage": off("data.eval names held-out data of its own"),
    "streaming": off("data are prepared on disk, once"),
    "block_size": _block,
    "max_train_samples": off(_CUT),
    "max_eval_samples": off("eval.rows"),
    "preprocessing_num_workers": none(_WORKERS),
    "overwrite_cache": off("prepared data are found by a digest of all that they depend on"),
    "auto_insert_empty_system_msg": off("messages are taken as they are"),
    "system_prompt": off("messages are taken as they are"),
    "ignore_bias_buffers": off("buffers are the same on all ranks"),
    "wandb_project": to("track.wandb.project", str),
    "wandb_entity": none("WANDB_ENTITY in the environment"),
    "wandb_run_group": none("WANDB_RUN_GROUP in the environment"),
    **{
        key: none(_OTHER_TRAINER)
        for key in ("beta", "max_prompt_length", "max_completion_length", "precompute_ref_log_probs")
    },
}
RULES: dict[str, Rule] = {**_MODEL, **_SCRIPT, **_SFT}


def finish(draft: Draft) -> None:
    """TRL's defaults where an SFTConfig says nothing."""
    trainer = draft.trainer
    if trainer.get("gradient_checkpointing", trainer.get("activation_checkpointing")) is None:
        draft.default("gradient_checkpointing: true of SFTConfig", {"memory.checkpointing": "full"})
    if trainer.get("max_seq_length") is None and "max_length" not in trainer.values:
        draft.default("max_length: 1024 of SFTConfig", {"data.seq_len": 1024})
    draft.default("packing: false of SFTConfig", {"data.packing": "none"})
    draft.default("longer records are cut off at max_length", {"data.too_long": "truncate"})
    if facts.SFT_DEFAULTS["learning_rate"] == draft.get("optim.lr") and trainer.get("learning_rate") is None:
        draft.note("2e-5 is SFTConfig's own learning rate; TrainingArguments alone has 5e-5.")


def fill(draft: Draft) -> None:
    """The required values that script and file did not have between them."""
    train, evaluation = _sources(draft)
    draft.fill(
        "data.train", _shown(train or [{"path": "train.jsonl", "format": "messages"}]), _why(draft, "data.train")
    )
    if "eval.every" in draft.values or "eval.every" in draft.open:
        why = f"eval.every is of no effect without it; {_why(draft, 'data.eval')}"
        draft.fill("data.eval", _shown(evaluation or [{"path": "heldout.jsonl", "format": "messages"}]), why)
    if "data.seq_len" not in draft.values:
        draft.decide("data.seq_len", "2048", "rows are as long as the script makes them there")
    if "data.packing" not in draft.values:
        draft.decide(
            "data.packing", "none", "rows are as the script makes them there; best_fit here, so a row holds several"
        )


def _why(draft: Draft, ours: str) -> str:
    guess = _guesses(draft, ours)
    return (
        f"guessed: {guess}; a format is text, prompt_completion or messages" if guess else "their file does not name it"
    )


def _shown(sources: list[dict[str, Any]]) -> str:
    return inline([{**source, "format": source.get("format", "messages")} for source in sources])
