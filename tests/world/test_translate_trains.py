"""A configuration that was made from somebody else's file trains as that file means: batch, schedule, precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from mpdist.translate import command, text

pytestmark = pytest.mark.world

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3, "gradient_clipping": 0.5,
    "fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 3, "hysteresis": 1},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.98], "eps": 1e-7, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 2,
                                                      "total_num_steps": 6, "warmup_type": "linear"}},
}  # fmt: skip
TRAINER = {
    "output_dir": "out/job", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 6,
    "learning_rate": 5e-4, "lr_scheduler_type": "cosine", "warmup_steps": 3, "bf16": True, "seed": 7, "max_grad_norm": 0.0,
    "logging_steps": 1,
}  # fmt: skip


def trained(folder: Path, content: str, ranks: int | None, **files: str | None) -> tuple[tiny.Result, dict[str, Any]]:
    """The run of what is printed for a file, with a model and data written in; and the values that were printed."""
    from ruamel.yaml import YAML

    given = {"accelerate": None, "deepspeed": None, "trainer": None, **files}
    for name, path in given.items():
        if path is not None:
            (folder / path).write_text(content)
            given[name] = str(folder / path)
    printed = text.render(*command.translate(given, ranks))
    values = YAML(typ="safe").load(printed)
    own = {"model": {}, "data": {}, "batch": {}, "budget": {}, "optim": {}, "shard": {}, "precision": {}}
    merged = {**own, **values, "name": "run", "out_dir": str(folder / "runs")}
    merged["model"] = {**(merged["model"] or {}), "config": dict(tiny.LLAMA)}
    merged["data"] = {**(merged["data"] or {}), "tokenizer": "bytes", "seq_len": 64, "packing": "concat",
                      "train": [{"path": str(tiny.write_text(folder / "train.jsonl", 120))}]}  # fmt: skip
    merged.setdefault("launch", {})
    merged["launch"] = {**(merged["launch"] or {}), "device": "cpu", "timeout": "60s"}
    merged["launch"].pop("ranks", None)
    merged["track"] = {"every": 1, "wandb": {"mode": "disabled"}}
    merged["budget"] = merged["budget"] or {"steps": 6}
    if not (merged["batch"] or {}).get("global"):
        merged["batch"] = {"micro": 1, "global": 4}
    run = tiny.train(folder, 2, **{key: value for key, value in merged.items() if value not in ({}, None)})
    assert run.status == 0, run.message
    return run, values


def test_deepspeeds_file_trains_as_it_means(tmp_path: Path) -> None:
    run, values = trained(tmp_path, json.dumps(DEEPSPEED), 2, deepspeed="ds.json")
    assert values["batch"] == {"micro": 1, "global": 1 * 3 * 2}
    assert run.column("train/slots") == [6 * 64 * step for step in range(1, 7)]
    # Linear over two steps to the peak, then linear to 0 behind the sixth; DeepSpeed counts the first step as 0.
    assert run.column("train/lr") == pytest.approx([5e-4, 1e-3, *[1e-3 * (1 - i / 4) for i in range(4)]])
    assert run.column("scale/value")[0] == 2.0**10
    assert run.column("scale/value")[3] == 2.0**11  # the window of three
    assert {row["dtype"] for row in run.ledger() if row["row"] == "working"} == {"float16"}
    assert {row["dtype"] for row in run.ledger() if row["row"] == "parameters"} == {"float32"}
    assert values["shard"] == {"engine": "deepspeed", "stage": 2}


def test_the_trainers_arguments_train_as_they_mean(tmp_path: Path) -> None:
    import math

    run, values = trained(tmp_path, json.dumps(TRAINER), 2, trainer="args.json")
    assert values["batch"] == {"micro": 2, "global": 2 * 2 * 2}
    assert run.column("train/slots") == [8 * 64 * step for step in range(1, 7)]
    cosine = [5e-4 * 0.5 * (1 + math.cos(math.pi * i / 3)) for i in range(3)]
    assert run.column("train/lr") == pytest.approx([5e-4 / 3, 5e-4 * 2 / 3, 5e-4, *cosine])
    assert len(run.rows()) == 6
    assert values["optim"]["clip"] is None
    assert values["optim"]["betas"] == [0.9, 0.999]
    assert {row["dtype"] for row in run.ledger() if row["row"] == "parameters"} == {"float32"}


def test_accelerates_file_trains_as_it_means(tmp_path: Path) -> None:
    run, values = trained(tmp_path, ACCELERATE, None, accelerate="acc.yaml")
    assert values["shard"]["engine"] == "fsdp2"
    assert values["shard"]["stage"] == 3
    assert values["precision"]["compute"] == "bf16"
    rows = {row["row"]: row for row in run.ledger() if row["rank"] == 0}
    assert rows["parameters"]["dtype"] == rows["gradients"]["dtype"] == rows["moments"]["dtype"] == "float32"
    whole = sum(tensor.numel() for tensor in run.weights().values())
    assert rows["parameters"]["elements"] == pytest.approx(whole / 2, rel=0.01)  # two processes share it
    assert len(run.rows()) == 6
