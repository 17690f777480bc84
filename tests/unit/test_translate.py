"""`mpdist config --from-...`: every key of theirs has one verdict, and what is printed is a configuration of ours.

The files have the shapes and keys of public ones. Their libraries are not asked here: tests/cpu/test_translate_theirs.py
holds what is said of them against the libraries themselves.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from foreign import FILES, FORMATS

from mpdist import cli
from mpdist.config import Resolved, load
from mpdist.errors import UsageError
from mpdist.translate import command, text
from mpdist.translate.draft import NONE, OTHER, SAME, TRANSLATED, UNKNOWN, Draft


def translated(
    folder: Path, *names: str, ranks: int | None = None, nodes: int | None = None, **changed: str
) -> tuple[Draft, str]:
    """The draft and the printed file of some of FILES, or of files given as `format=text`."""
    files: dict[str, str | None] = dict.fromkeys(("accelerate", "deepspeed", "trainer"))
    for name in names:
        files[FORMATS[name]] = write(folder, name, FILES[name])
    for format, content in changed.items():
        files[format] = write(folder, f"{format}.txt", content)
    draft, problems = command.translate(files, ranks, nodes, ask=False)
    return draft, text.render(draft, problems)


def write(folder: Path, name: str, content: str) -> str:
    path = folder / name
    path.write_text(content)
    return str(path)


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[str]:
    """Every key of a file, as the account names them."""
    if isinstance(value, dict) and (value or not path):
        return [name for key, item in value.items() for name in leaves(item, (*path, key))]
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [name for i, item in enumerate(value) for name in leaves(item, (*path, str(i)))]
    return [".".join(path)]


def keys_of(name: str) -> list[str]:
    if name.endswith(".json"):
        return leaves(json.loads(FILES[name]))
    from ruamel.yaml import YAML

    return leaves(YAML(typ="safe").load(FILES[name]))


def account(printed: str) -> list[str]:
    """The keys that the printed comments give a verdict for, in their order, before the parts that are not by key."""
    part = printed.partition("# ==== Their defaults")[0].partition("# ==== Other, ")[0]
    return re.findall(r"^#   ([\w./-]+) = ", part, re.MULTILINE)


def filled_in(folder: Path, draft: Draft, printed: str) -> Resolved:
    """The printed file, loaded with what it says has to be filled in."""
    loss_on = draft.get("data.loss_on", "all")
    kind = {"all": "text", "completion": "prompt_completion"}.get(loss_on, "messages")
    wanted = {
        "name": "x",
        "model.path": "some/model",
        "data.train": f"[{{path: a.jsonl, format: {kind}}}]",
        "data.eval": f"[{{path: b.jsonl, format: {kind}}}]",
        "batch.global": "64",
        "budget.steps": "100000",
    }
    path = folder / "printed.yaml"
    path.write_text(printed)
    missing = [ours for ours, (what, _, _) in draft.open.items() if what == "FILL IN"]
    return load(path, [f"{ours}={wanted[ours]}" for ours in missing])


def verdicts(draft: Draft) -> dict[str, tuple[str, str]]:
    return {line.key: (line.verdict.kind, line.verdict.text) for line in draft.lines}


def ours(draft: Draft) -> dict[str, Any]:
    return {key: value.value for key, value in draft.values.items()}


@pytest.mark.parametrize("ranks", [None, 8])
@pytest.mark.parametrize("name", FILES)
def test_every_key_is_accounted_for_once_and_the_result_loads(tmp_path: Path, name: str, ranks: int | None) -> None:
    draft, printed = translated(tmp_path, name, ranks=None if FORMATS[name] == "accelerate" else ranks)
    keys = keys_of(name)
    assert sorted(line.key for line in draft.lines) == sorted(keys)
    assert sorted(account(printed)) == sorted(keys)
    assert [key for key, (kind, _) in verdicts(draft).items() if kind == UNKNOWN] == []
    assert "refuses it as it stands" not in printed
    loaded = filled_in(tmp_path, draft, printed)
    for key, value in ours(draft).items():
        assert f"{key} = {value}" in text_of(loaded, key, value)


def text_of(loaded: Resolved, key: str, value: Any) -> str:
    """`key = value` where the loaded configuration holds just that."""
    found: Any = loaded.values()
    for part in key.split("."):
        found = found[part]
    if key in ("data.train", "data.eval"):
        found = [{k: v for k, v in source.items() if k in given} for source, given in zip(found, value, strict=True)]
    return f"{key} = {value}" if found == value else f"{key} is {found}"


EXPECTED: dict[str, dict[str, Any]] = {
    "fsdp1.yaml": {
        "shard.engine": "fsdp2", "shard.stage": 3, "shard.replicas": 2, "shard.offload": "all",
        "memory.checkpointing": "full", "precision.compute": "bf16", "reduce.wire": "bf16", "reduce.sum": "wire",
        "launch.ranks": 8, "launch.nodes": 2, "launch.address": "10.0.0.4", "launch.port": 29501,
    },
    "fsdp2.yaml": {
        "shard.engine": "fsdp2", "shard.stage": 2, "shard.replicas": 2, "memory.checkpointing": "none",
        "precision.compute": "fp16", "precision.scale.on_overflow": "next", "reduce.wire": "fp16", "reduce.sum": "wire",
        "launch.ranks": 8, "launch.nodes": 1,
    },
    "plugin.yaml": {
        "shard.engine": "deepspeed", "shard.stage": 3, "shard.offload": "optimizer", "precision.compute": "bf16",
        "reduce.wire": "bf16", "reduce.sum": "wire", "optim.clip": 0.5, "launch.ranks": 4, "launch.nodes": 1,
    },
    "auto.json": {
        "shard.engine": "deepspeed", "shard.stage": 3, "shard.offload": "all", "optim.name": "adamw",
        "optim.schedule": "linear", "track.every": 2000,
    },
    "alone.json": {
        "shard.engine": "deepspeed", "shard.stage": 2, "shard.offload": "optimizer",
        "batch.micro": 4, "batch.global": 64, "precision.compute": "fp16",
        "precision.scale.mode": "dynamic", "precision.scale.init": 4096.0, "precision.scale.interval": 500,
        "precision.scale.floor": 4.0, "precision.scale.on_overflow": "next", "reduce.wire": "fp32",
        "optim.name": "adamw", "optim.lr": 0.001, "optim.betas": [0.8, 0.999], "optim.eps": 1e-8,
        "optim.weight_decay": 3e-7, "optim.decay": "all", "optim.clip": None, "optim.schedule": "constant",
        "optim.warmup": 100.0, "track.every": 10, "track.wandb.mode": "online", "track.wandb.project": "zero",
    },
    "bare.json": {
        "shard.engine": "deepspeed", "shard.stage": 1, "batch.micro": 1, "batch.global": 64,
        "precision.compute": "bf16", "reduce.wire": "bf16", "reduce.sum": "wire", "optim.clip": 1.0,
    },
    "run_clm.json": {
        "name": "gpt2-notes", "out_dir": "/scratch/out", "seed": 7, "model.path": "gpt2",
        "data.train": [{"path": "train.txt", "format": "text"}], "data.eval": [{"path": "valid.txt", "format": "text"}],
        "data.seq_len": 1024, "data.packing": "concat", "batch.micro": 4, "batch.global": 64,
        "precision.compute": "fp16", "precision.scale.on_overflow": "next", "shard.engine": "ddp",
        "optim.name": "adamw", "optim.lr": 1e-4, "optim.betas": [0.9, 0.98], "optim.eps": 1e-6,
        "optim.weight_decay": 0.01, "optim.clip": None, "optim.schedule": "constant", "optim.warmup": 100,
        "budget.steps": 1000, "eval.every": 200, "checkpoint.every": 400, "checkpoint.keep": 2,
        "track.every": 50, "track.wandb.mode": "disabled", "launch.timeout": 3600.0,
    },
    "sft.yaml": {
        "name": "zephyr", "out_dir": "data", "seed": 42, "model.path": "mistralai/Mistral-7B-v0.1",
        "model.attention": "flash_attention_2",
        "data.train": [
            {"path": "HuggingFaceH4/ultrachat_200k", "split": "train_sft", "format": "messages"},
            {"path": "HuggingFaceTB/smoltalk2", "split": "everyday", "weight": 0.5, "format": "messages"},
        ],
        "data.seq_len": 8192, "data.packing": "best_fit", "data.loss_on": "assistant", "data.too_long": "truncate",
        "batch.micro": 1, "batch.global": 16, "precision.compute": "bf16", "shard.engine": "ddp",
        "memory.checkpointing": "full", "optim.lr": 2e-5, "optim.betas": [0.9, 0.999], "optim.weight_decay": 0.0,
        "optim.clip": 0.2, "optim.warmup": 0.1, "budget.epochs": 5.0, "track.every": 5, "track.wandb.mode": "online",
    },
    "small.yaml": {
        "seed": 42, "batch.micro": 2, "batch.global": 16, "precision.compute": "bf16", "precision.tf32": True,
        "shard.engine": "fsdp2", "shard.stage": 3, "shard.offload": "all", "reduce.wire": "bf16", "reduce.sum": "wire",
        "model.compile": "blocks", "optim.lr": 5e-6, "optim.betas": [0.9, 0.999], "optim.weight_decay": 0.0,
        "optim.schedule": "linear", "optim.warmup": 0.0, "budget.epochs": 3.0, "checkpoint.every": 0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_what_comes_out(tmp_path: Path, name: str) -> None:
    draft, _ = translated(tmp_path, name, ranks=8 if FORMATS[name] != "accelerate" else None)
    assert ours(draft) == {"launch.ranks": 8, **EXPECTED[name]}


def test_verdicts_of_each_kind(tmp_path: Path) -> None:
    found = verdicts(translated(tmp_path, "fsdp1.yaml")[0])
    assert found["mixed_precision"] == (TRANSLATED, "")
    assert found["num_processes"] == (OTHER, "ranks of each node: 16 over 2 nodes")
    assert found["machine_rank"][0] == NONE
    assert found["fsdp_config.fsdp_use_orig_params"][0] == SAME
    found = verdicts(translated(tmp_path, "plugin.yaml")[0])
    assert found["deepspeed_config.gradient_accumulation_steps"][0] == OTHER  # mean of means
    assert found["dynamo_config.dynamo_backend"][0] == NONE  # not under ZeRO
    assert found["main_process_ip"] == (SAME, "not set there either")
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3" in found["gpu_ids"][1]
    found = verdicts(translated(tmp_path, "alone.json")[0])
    assert found["train_batch_size"] == (TRANSLATED, "4 x accumulation x ranks")
    assert found["optimizer.params.lr"] == (SAME, "warmup_max_lr = 0.001 decides, as it does there")
    assert found["optimizer.params.weight_decay"][0] == OTHER  # biases too
    assert found["fp16.hysteresis"][0] == NONE
    assert found["data_types.grad_accum_dtype"][0] == SAME
    found = verdicts(translated(tmp_path, "run_clm.json")[0])
    assert found["num_train_epochs"] == (SAME, "max_steps decides")
    assert found["warmup_steps"][0] == OTHER  # one step behind
    assert found["fp16"][0] == OTHER  # autocast
    assert found["report_to"][0] == NONE
    found = verdicts(translated(tmp_path, "sft.yaml")[0])
    assert found["dataset_mixture.datasets.1.config"][0] == NONE
    assert found["torch_dtype"][0] == OTHER
    assert found["lr_scheduler_type"][0] == NONE
    assert found["run_name"][0] == OTHER


def test_differences_without_a_key_are_said(tmp_path: Path) -> None:
    printed = translated(tmp_path, "fsdp1.yaml")[1]
    assert "accelerate steps a prepared scheduler once a rank" in printed
    assert "mean of the micro-batches' means" in printed
    printed = translated(tmp_path, "alone.json")[1]
    assert "DeepSpeed's scale grows one step later" in printed
    assert "DeepSpeed's masters are the weights after rounding" in printed
    assert "16 bit without data_types.grad_accum_dtype" not in printed  # the file has it
    assert "16 bit without data_types.grad_accum_dtype" in translated(tmp_path, "bare.json")[1]
    assert "fp16.hysteresis is 2 by default" not in translated(tmp_path, "bare.json")[1]


def test_their_defaults_are_written_down_and_are_named_as_such(tmp_path: Path) -> None:
    draft, printed = translated(tmp_path, trainer='{"output_dir": "out"}', ranks=2)
    assert ours(draft) == {
        "name": "out", "out_dir": ".", "batch.micro": 8, "batch.global": 16, "budget.epochs": 3.0, "optim.lr": 5e-5,
        "optim.betas": [0.9, 0.999], "optim.weight_decay": 0.0, "optim.schedule": "linear", "optim.warmup": 0.0,
        "seed": 42, "precision.compute": "fp32", "shard.engine": "ddp", "launch.ranks": 2,
    }  # fmt: skip
    said = printed.partition("Their defaults, written down")[2]
    assert all(
        f"{key} = " in " ".join(said.split()) for key in ours(draft) if key not in ("name", "out_dir", "launch.ranks")
    )
    # One key of SFTConfig makes it one, with its other defaults.
    draft, _ = translated(tmp_path, trainer='{"output_dir": "out", "packing": false}', ranks=2)
    found = ours(draft)
    assert (found["optim.lr"], found["precision.compute"], found["memory.checkpointing"]) == (2e-5, "bf16", "full")
    assert (found["data.seq_len"], found["data.packing"], found["data.too_long"]) == (1024, "none", "truncate")


def test_auto_is_filled_from_the_training_arguments(tmp_path: Path) -> None:
    draft, printed = translated(tmp_path, "auto.json", "run_clm.json", ranks=4)
    found = ours(draft)
    assert (found["shard.engine"], found["shard.stage"], found["shard.offload"]) == ("deepspeed", 3, "all")
    assert (found["batch.micro"], found["batch.global"]) == (4, 32)
    assert (found["precision.compute"], found["precision.scale.interval"]) == ("fp16", 500)
    assert (found["optim.lr"], found["optim.betas"], found["optim.eps"]) == (1e-4, [0.9, 0.98], 1e-6)
    assert (found["optim.weight_decay"], found["optim.decay"], found["optim.clip"]) == (0.01, "all", None)
    # The DeepSpeed file's scheduler decides, with the Trainer's numbers.
    assert (found["optim.schedule"], found["optim.warmup"], found["optim.horizon"]) == ("linear", 100.0, 1000)
    assert "gradient_clipping = auto -> optim.clip = null: max_grad_norm = 0.0 of TrainingArguments" in printed
    assert sorted(account(printed)) == sorted([*keys_of("auto.json"), *keys_of("run_clm.json")])
    assert filled_in(tmp_path, draft, printed).config.shard.engine == "deepspeed"


def test_auto_is_filled_from_accelerate(tmp_path: Path) -> None:
    accelerate = FILES["plugin.yaml"].replace("zero_stage: 3", "zero_stage: 3\n  deepspeed_config_file: auto.json")
    accelerate = accelerate.replace("mixed_precision: bf16", "mixed_precision: fp16")
    draft, printed = translated(tmp_path, "auto.json", accelerate=accelerate)
    found = ours(draft)
    assert (found["optim.clip"], found["precision.compute"], found["launch.ranks"]) == (0.5, "fp16", 4)
    assert "gradient_accumulation_steps = auto" in printed
    assert {ours for ours, (what, _, _) in draft.open.items() if what == "DECIDE"} >= {"optim.lr", "optim.warmup"}
    assert filled_in(tmp_path, draft, printed).config.precision.compute == "fp16"


def test_auto_alone_is_said_to_be_unfilled_and_left_open(tmp_path: Path) -> None:
    draft, printed = translated(tmp_path, "auto.json")
    found = verdicts(draft)
    for key in (
        "optimizer.params.lr",
        "gradient_clipping",
        "train_batch_size",
        "bf16.enabled",
        "fp16.loss_scale_window",
    ):
        assert found[key][0] == OTHER
        assert "left to mpdist" in found[key][1]
    assert "# DECIDE lr: 2e-5  # optimizer.params.lr is auto there" in printed
    assert "# FILL IN global: micro x accumulation x ranks" in printed


def test_what_transformers_refuses_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        translated(tmp_path, "alone.json", "run_clm.json", ranks=4)
    said = str(refused.value)
    for key in (
        "train_batch_size = 64",
        "optimizer.params.lr = 0.0002",
        "optimizer.params.betas",
        "scheduler.params.warmup_max_lr",
    ):
        assert key in said
    assert "gradient_clipping" not in said  # both are off
    assert 'write "auto"' in said
    with pytest.raises(UsageError, match=r"gradient_accumulation_steps = 4, but gradient_accumulation_steps = 2"):
        translated(tmp_path, "plugin.yaml", "sft.yaml")
    both = FILES["plugin.yaml"].replace("zero_stage: 3", "zero_stage: 3\n  deepspeed_config_file: alone.json")
    with pytest.raises(UsageError, match=r"mixed_precision = bf16, but fp16\.enabled"):
        translated(tmp_path, "alone.json", accelerate=both)


def test_a_deepspeed_mapping_inside_the_training_arguments_is_read(tmp_path: Path) -> None:
    inside = {"output_dir": "out", "bf16": True, "deepspeed": json.loads(FILES["auto.json"])}
    draft, printed = translated(tmp_path, trainer=json.dumps(inside), ranks=2)
    assert ours(draft)["shard.engine"] == "deepspeed"
    assert sorted(account(printed)) == sorted(leaves(inside))
    with pytest.raises(UsageError, match="only one of them"):
        translated(tmp_path, "auto.json", trainer=json.dumps(inside))


def test_a_file_that_another_file_names_is_asked_for(tmp_path: Path) -> None:
    draft, printed = translated(tmp_path, trainer='{"output_dir": "out", "deepspeed": "zero3.json"}', ranks=2)
    assert verdicts(draft)["deepspeed"] == (NONE, "it was not read: give --from-deepspeed FILE beside this one")
    assert "# DECIDE engine: deepspeed" in printed
    assert "shard.engine" not in ours(draft)
    # accelerate's file decides it after all: nothing is open any more.
    file = FILES["plugin.yaml"].replace("  gradient_accumulation_steps: 4\n  gradient_clipping: 0.5\n", "")
    draft, _ = translated(tmp_path, accelerate=file, trainer='{"output_dir": "out", "deepspeed": "zero3.json"}')
    assert ours(draft)["shard.engine"] == "deepspeed"
    assert "shard.engine" not in draft.open
    named = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: z.json, zero3_init_flag: true}\n"
    draft, printed = translated(tmp_path, accelerate=named)
    assert verdicts(draft)["deepspeed_config.deepspeed_config_file"][0] == NONE
    assert "# DECIDE engine: deepspeed" in printed


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("distributed_type: MULTI_GPU\nmixed_precision: fp16", {"shard.engine": "ddp", "precision.compute": "fp16"}),
        ("distributed_type: 'NO'\nmixed_precision: 'no'", {"shard.engine": "ddp", "precision.compute": "fp32"}),
        ("distributed_type: MULTI_CPU\nuse_cpu: true", {"launch.device": "cpu", "precision.compute": "fp32"}),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 2}",
            {"shard.engine": "fsdp2", "shard.stage": 2},
        ),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD}", {"shard.engine": "ddp"}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: SHARD_GRAD_OP}", {"shard.stage": 2}),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}",
            {"shard.stage": 3},
        ),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 0}", {"shard.engine": "ddp"}),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {}", {"shard.engine": "deepspeed", "shard.stage": 2}),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, offload_param_device: nvme, offload_optimizer_device: nvme}",
            {"shard.offload": "all"},
        ),
        ("distributed_type: MULTI_GPU\nfp16: true\nnum_processes: 2", {"precision.compute": "fp16", "launch.ranks": 2}),
        ("distributed_type: XLA\nmixed_precision: fp8", {}),
    ],
    ids=lambda value: value.replace("\n", " ")[:60] if isinstance(value, str) else "",
)
def test_kinds_of_accelerate_runs(tmp_path: Path, content: str, expected: dict[str, Any]) -> None:
    draft, printed = translated(tmp_path, accelerate=content + "\n")
    found = ours(draft)
    assert {key: found.get(key) for key in expected} == expected
    filled_in(tmp_path, draft, printed)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"lr_scheduler_type": "linear", "warmup_steps": 0.1}, {"optim.warmup": 0.1}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 100}, {"optim.schedule": "constant", "optim.warmup": None}),
        ({"warmup_ratio": 0.1, "warmup_steps": 10}, {"optim.warmup": 10}),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, {"shard.engine": "fsdp2", "shard.stage": 2}),
        ({"fsdp": "shard_grad_op auto_wrap", "fsdp_config": {"xla": False}}, {"shard.stage": 2}),
        ({"fsdp": "", "fsdp_config": {"min_num_params": 0}}, {"shard.engine": "ddp"}),
        ({"gradient_checkpointing": True, "use_cpu": True}, {"memory.checkpointing": "full", "launch.device": "cpu"}),
        ({"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 3}}, {"memory.checkpointing": "every 3"}),
        ({"save_strategy": "no", "save_steps": 10, "logging_steps": 0.1}, {"checkpoint.every": 0, "track.every": None}),
        ({"eval_strategy": "steps", "logging_steps": 20}, {"eval.every": 20}),
        ({"report_to": ["wandb", "tensorboard"], "full_determinism": True}, {"track.wandb.mode": "online", "deterministic": True}),
        ({"report_to": "none", "dataloader_drop_last": True}, {"track.wandb.mode": "disabled", "data.last_window": "drop"}),
        ({"max_length": 512, "packing": True, "packing_strategy": "wrapped"}, {"data.packing": "concat", "data.too_long": "split"}),
        ({"max_length": 512, "completion_only_loss": True, "dataset_name": "a/b"}, {"data.loss_on": "completion"}),
        ({"train_sampling_strategy": "sequential"}, {"data.shuffle": False}),
    ],
    ids=lambda value: " ".join(value)[:60],
)  # fmt: skip
def test_training_arguments(tmp_path: Path, content: dict[str, Any], expected: dict[str, Any]) -> None:
    draft, printed = translated(tmp_path, trainer=json.dumps({"output_dir": "out", **content}), ranks=2)
    assert {key: draft.get(key) for key in expected} == expected
    assert sorted(account(printed)) == sorted(leaves({"output_dir": "out", **content}))
    filled_in(tmp_path, draft, printed)


def test_ranks_by_option_and_context_parallel_ranks(tmp_path: Path) -> None:
    draft, _ = translated(tmp_path, "fsdp2.yaml", "small.yaml")
    assert draft.world.parallel == 2  # 8 ranks, of which 4 shared their rows
    assert ours(draft)["batch.global"] == 4
    draft, printed = translated(tmp_path, "fsdp2.yaml", "small.yaml", ranks=2)
    assert draft.world.ranks == 2
    assert "--ranks decides: 2 in all" in printed


def test_what_mpdist_would_refuse_is_said(tmp_path: Path) -> None:
    printed = translated(tmp_path, trainer='{"output_dir": "o", "attn_implementation": "flash_attention_2"}', ranks=2)[
        1
    ]
    said = " ".join(printed.partition("mpdist refuses it as it stands")[2].replace("#", "").split())
    assert "flash attention computes in 16 bit only" in said
    printed = translated(tmp_path, "fsdp2.yaml", "small.yaml")[1]
    assert "no multiple of batch.micro 2 x 8 ranks" in " ".join(printed.replace("#", "").split())
    shares = "distributed_type: FSDP\nnum_machines: 1\nnum_processes: 6\nparallelism_config: {parallelism_config_dp_replicate_size: 4}\n"
    assert "it does not divide the world of 6 ranks" in translated(tmp_path, accelerate=shares)[1]


def test_typos_are_named_with_the_nearest_key(tmp_path: Path) -> None:
    draft, printed = translated(
        tmp_path,
        deepspeed='{"train_batch_size": 8, "micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "reduce_bucket_sise": 5e8}}',
        ranks=2,
    )
    found = verdicts(draft)
    assert found["micro_batch_size_per_gpu"][0] == UNKNOWN
    assert "did you mean train_micro_batch_size_per_gpu?" in found["micro_batch_size_per_gpu"][1]
    assert "did you mean zero_optimization.reduce_bucket_size?" in found["zero_optimization.reduce_bucket_sise"][1]
    assert "deepspeed.txt:1" in printed


def test_fp16_and_bf16_together_are_contradictory(tmp_path: Path) -> None:
    both = '{"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}'
    for files, keys, who in (
        ({"deepspeed": both}, ("fp16.enabled", "bf16.enabled"), "DeepSpeed"),
        ({"trainer": '{"output_dir": "o", "fp16": true, "bf16": true}'}, ("fp16", "bf16"), "transformers"),
    ):
        draft, printed = translated(tmp_path, ranks=2, **files)
        for key in keys:
            kind, said = verdicts(draft)[key]
            assert kind == NONE
            assert f"contradictory: fp16 and bf16 are both on, which {who} refuses" in said
        assert "precision.compute" not in ours(draft)
        assert "# DECIDE compute: bf16  # fp16 and bf16 are both on there" in printed


def test_why_the_global_batch_is_open_is_the_real_cause(tmp_path: Path) -> None:
    draft, printed = translated(tmp_path, "auto.json", ranks=2)
    line = next(line for line in printed.splitlines() if "FILL IN global" in line)
    assert "train_micro_batch_size_per_gpu and gradient_accumulation_steps are auto there: give --from-trainer" in line
    assert "--ranks" not in line
    assert (ours(draft)["launch.ranks"], draft.values["launch.ranks"].source) == (2, "--ranks")
    printed = translated(tmp_path, deepspeed='{"zero_optimization": {"stage": 2}}', ranks=2)[1]
    assert "the file has no train_batch_size, and no train_micro_batch_size_per_gpu" in printed
    printed = translated(tmp_path, deepspeed='{"train_micro_batch_size_per_gpu": 2}')[1]
    assert "# FILL IN global: 2 x 1 x ranks  # it depends on the number of ranks: give --ranks N" in printed
    draft, printed = translated(tmp_path, deepspeed='{"train_batch_size": 8}')
    assert verdicts(draft)["train_batch_size"] == (TRANSLATED, "batch.micro x 1 micro-batch x ranks")
    assert "# DECIDE micro: 1  # it depends on the number of ranks" in printed


def test_guessed_formats_and_splits_are_marked(tmp_path: Path) -> None:
    named = {"output_dir": "o", "dataset_name": "a/b"}
    draft, printed = translated(tmp_path, trainer=json.dumps(named), ranks=2)
    assert (
        "# FILL IN train: [{path: a/b, split: train, format: messages}]  # guessed: format: messages, split: train"
        in printed
    )
    assert verdicts(draft)["dataset_name"][0] == OTHER
    loss = {**named, "assistant_only_loss": True, "eval_strategy": "steps"}
    draft, printed = translated(tmp_path, trainer=json.dumps(loss), ranks=2)
    assert (
        "DECIDE, guessed: format: messages (by assistant_only_loss), split: train (no dataset_train_split)" in printed
    )
    assert "split: test (no dataset_test_split)" in verdicts(draft)["dataset_name"][1]
    assert "data.train (guessed: format: messages (by assistant_only_loss)" in text.summary(draft, [])
    said = {**loss, "dataset_columns": ["messages"], "dataset_train_split": "x", "dataset_test_split": "y"}
    draft, printed = translated(tmp_path, trainer=json.dumps(said), ranks=2)
    assert verdicts(draft)["dataset_name"] == (TRANSLATED, "")
    assert "guessed:" not in printed
    assert draft.guesses == {}
    assert translated(tmp_path, trainer=json.dumps(said), ranks=2, nodes=2)[0].get("launch.nodes") == 2


def test_secrets_are_not_copied(tmp_path: Path) -> None:
    draft, printed = translated(tmp_path, "run_clm.json")
    assert "hf_abcdefghijklmnopqrstuvwxyz" not in printed
    assert verdicts(draft)["hub_token"][0] == NONE


@pytest.mark.parametrize(
    ("format", "content", "said"),
    [
        (
            "deepspeed",
            '{\n "bf16": {"enabled": true},\n "zero_optimization" {"stage": 3}\n}',
            "deepspeed.txt:3 is not JSON",
        ),
        ("deepspeed", '{"bf16": {"enabled": true', "deepspeed.txt:1 is not JSON"),
        ("deepspeed", "{}", "holds nothing"),
        ("deepspeed", '{"train_batch_size": 8, "train_batch_size": 9}', "twice in one mapping"),
        ("accelerate", "distributed_type: FSDP\n  num_processes: 8\n", "accelerate.txt:2 is not YAML"),
        ("accelerate", "distributed_type: FSDP\nnum_processes: many\n", "num_processes = many"),
        ("accelerate", "num_processes: 8\nmixed_precision: bf16\n", "it has no distributed_type"),
        (
            "accelerate",
            "distributed_type: DEEPSPEED\nnum_processes: 3\nnum_machines: 2\n",
            "as many ranks as the others",
        ),
        ("trainer", "- a\n- b\n", "holds [a, b]"),
        ("trainer", '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}', "--from-deepspeed"),
        ("trainer", '{"output_dir": "o", "learning_rate": "fast"}', "it has to be a number there"),
        (
            "trainer",
            '{"output_dir": "o", "per_device_train_batch_size": 2.5}',
            "trainer.txt:1)\n  why: it has to be a whole number",
        ),
        ("trainer", '{"vocab_size": 3, "hidden_size": 8}', "0 of its 2 keys"),
    ],
)
def test_files_that_are_not_of_the_format_are_refused(
    tmp_path: Path,
    format: str,
    content: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command.theirs, "_asked", lambda kind, _: command.theirs.not_asked(kind))
    path = write(tmp_path, f"{format}.txt", content)
    assert cli.main(["config", f"--from-{format}", path]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert "do:" in captured.err
    assert "Traceback" not in captured.err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.theirs, "_asked", lambda kind, _: command.theirs.not_asked(kind))
    files = {name: write(tmp_path, name, FILES[name]) for name in ("auto.json", "run_clm.json")}
    words = ["config", "--from-trainer", files["run_clm.json"], "--from-deepspeed", files["auto.json"], "--ranks", "4"]
    assert cli.main(words) == 0
    captured = capsys.readouterr()
    head = captured.out.replace("\n# ", " ")  # a long path goes into the next line
    assert head.startswith("# An mpdist configuration, translated from ")
    assert "is not installed: whether it takes the file" in captured.out
    assert " translated, " in captured.err
    for more, said in ((["run.yaml"], "give no CONFIG"), (["--yaml"], "no other output")):
        assert cli.main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["config", "run.yaml", "--ranks", "4"]) == 2
    assert "are for --from-" in capsys.readouterr().err
    assert cli.main(["config", "--from-trainer", str(tmp_path / "missing.json")]) == 2
    assert "missing.json cannot be read (--from-trainer)" in capsys.readouterr().err
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x02\xff")
    assert cli.main(["config", "--from-trainer", str(tmp_path / "training_args.bin")]) == 2
    assert "give the text file, no pickle" in capsys.readouterr().err
