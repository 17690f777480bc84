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


@pytest.mark.parametrize("engine", ENGINES)
def test_scales_of_blocks_are_those_of_the_cpu(tmp_path: Path, engine: str) -> None:
    """Two may differ by 1 where a largest magnitude lies at a power of two."""
    half = {"compute": "fp16", "scale": {"per_block": True}}
    host = train(tmp_path, 1, name="host", shard=ENGINES[engine], precision=half)
    device = train(tmp_path, 1, name="device", shard=ENGINES[engine], precision=half, launch=CUDA)
    assert device.status == 0, device.message
    assert device.column("train/loss") == pytest.approx(host.column("train/loss"), rel=1e-3)
    for name in ("scale/block_min", "scale/block_max"):
        assert device.column(name) == pytest.approx(host.column(name), abs=1)


def test_a_window_with_scales_of_blocks_never_waits_for_the_device() -> None:
    from torch import nn

    from mpdist.block_scale import BlockScale
    from mpdist.shard import Part

    made = nn.Sequential(nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])).half().cuda()
    blocks = list(made[0])
    scales = BlockScale(made, blocks, torch.device("cuda"))
    scales.take([Part(name, p.data, tuple(p.shape), 0, True) for name, p in made.named_parameters()])
    hidden = torch.ones(4, 8, dtype=torch.float16, device="cuda", requires_grad=True)
    seen = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            scales.begin()
            x = hidden * 1
            for block in blocks:
                x = block(x)
            x.float().square().mean().backward()
            gradients = [p.grad.float() for p in made.parameters()]
            fault = scales.close(gradients)
            scales.unscale(gradients, 0.5)
            seen.append(scales.of_parts())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert fault.item() == 0
    assert seen[0].tolist() == [1.0] * 6
    assert seen[1].tolist() == [2.0] * 6


def test_bf16_ledger_counts_device_memory(tmp_path: Path) -> None:
    run = train(tmp_path, 1, launch=CUDA, precision={"compute": "bf16"})
    peak = next(row for row in run.ledger() if row["row"] == "peak")
    assert 0 < peak["measured_bytes"] < 2**30
    assert run.column("mem/peak_allocated_bytes")[-1] > 0
