"""Combinations of settings that meet only in an engine: each trains to the right numbers or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import train

pytestmark = pytest.mark.world

KEPT: dict[str, Any] = {"precision": {"compute": "bf16", "keep_fp32": ["*norm*"]}, "budget__steps": 1}


def test_selective_checkpointing_with_kept_parts_in_blocks_is_refused_on_fsdp2_only(tmp_path: Path) -> None:
    sharded = train(tmp_path, 1, name="sharded", memory={"checkpointing": "selective"}, **KEPT)
    assert sharded.status == 2
    assert "keeps model.layers.0.input_layernorm" in sharded.message
    plain = train(tmp_path, 1, name="plain", **KEPT)
    full = train(tmp_path, 1, name="full", memory={"checkpointing": "full"}, **KEPT)
    ddp = train(tmp_path, 1, name="ddp", memory={"checkpointing": "selective"}, shard={"engine": "ddp"}, **KEPT)
    block = {"precision": {"compute": "bf16", "keep_fp32": ["model.layers.0", "lm_head"]}}
    whole = train(tmp_path, 1, name="whole", memory={"checkpointing": "selective"}, **{**KEPT, **block})
    assert plain.column("train/loss") == full.column("train/loss") == ddp.column("train/loss")
    assert whole.status == 0, whole.message


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("pattern", ["model", "*"])
def test_what_holds_all_blocks_cannot_be_kept_in_fp32(tmp_path: Path, engine: str, pattern: str) -> None:
    precision = {"compute": "bf16", "keep_fp32": [pattern]}
    run = train(tmp_path, 1, precision=precision, shard={"engine": engine}, budget__steps=1)
    assert run.status == 2
    assert "keeps model, which holds the model's blocks" in run.message
