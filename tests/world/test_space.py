"""The planned bytes of a checkpoint against those of a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import LLAMA, train

pytestmark = pytest.mark.world

# Large enough for values to outweigh headers, as they do in any model that matters.
MODEL = {**LLAMA, "hidden_size": 128, "intermediate_size": 256}
CASES: dict[str, dict[str, Any]] = {
    "fsdp2, frozen, bf16": {"precision": {"compute": "bf16"}, "model__freeze": ["model.embed*"]},
    "ddp": {"shard": {"engine": "ddp"}},
    "pure bf16": {"precision": {"compute": "bf16", "master": "compute"}},
}


@pytest.mark.parametrize("case", CASES)
def test_c59_a_checkpoint_has_the_bytes_that_were_planned(tmp_path: Path, case: str) -> None:
    run = train(tmp_path, 2, model__config=MODEL, budget__steps=1, **CASES[case])
    assert run.status == 0, run.message
    planned = json.loads((run.folder / "plan.json").read_text())["checkpoint"]["bytes"]
    path = run.folder / "checkpoints" / "step-00000001"
    real = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    (published,) = (event["bytes"] for event in run.events("save") if event["reason"] == "published")
    assert 0 < real - published < 4096, "the manifest lists all files but itself"
    assert planned == pytest.approx(real, rel=0.01)
