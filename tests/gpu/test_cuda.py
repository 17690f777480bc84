"""One GPU: the same runs as on the CPU, through NCCL. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import same, timeless, train

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "fsdp2-2": {"engine": "fsdp2", "stage": 2},
    "fsdp2-3": {"engine": "fsdp2", "stage": 3},
    "offload": {"engine": "fsdp2", "stage": 3, "offload": "all"},
}
CUDA = {"device": "cuda", "timeout": "60s"}


@pytest.mark.parametrize("engine", ENGINES)
def test_fp32_losses_are_those_of_the_cpu(tmp_path: Path, engine: str) -> None:
    host = train(tmp_path, 1, name="host", shard=ENGINES[engine])
    device = train(tmp_path, 1, name="device", shard=ENGINES[engine], launch=CUDA)
    assert device.status == 0, device.message
    assert device.column("train/loss") == pytest.approx(host.column("train/loss"), rel=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_fp16_skips_and_resumes_exactly(tmp_path: Path, engine: str) -> None:
    hard: dict[str, Any] = {
        "shard": ENGINES[engine],
        "launch": CUDA,
        "precision": {"compute": "fp16", "scale": {"interval": 3}},
        "budget__steps": 8,
    }
    whole = train(tmp_path, 1, name="whole", **hard, drill={"overflow_at": {"attempts": [1, 5], "rank": 0}})
    assert whole.state()["attempt"] == 10
    drill = {"overflow_at": {"attempts": [1, 5], "rank": 0}, "stop_at": {"attempt": 4, "rank": 0}}
    assert train(tmp_path, 1, name="parts", **hard, drill=drill).status == 75
    parts = train(tmp_path, 1, name="parts", **hard, drill=drill)
    assert timeless(parts.rows()) == timeless(whole.rows())
    assert same(parts.weights(), whole.weights())


def test_bf16_ledger_counts_device_memory(tmp_path: Path) -> None:
    run = train(tmp_path, 1, launch=CUDA, precision={"compute": "bf16"})
    peak = next(row for row in run.ledger() if row["row"] == "peak")
    assert 0 < peak["measured_bytes"] < 2**30
    assert run.column("mem/peak_allocated_bytes")[-1] > 0
