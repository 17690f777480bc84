"""The doctor on one GPU. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_a_gpu_is_described_and_measured() -> None:
    from mpdist.doctor import here

    found = {finding.check: finding for finding in here.look()}
    assert torch.cuda.get_device_name(0) in found["device"].value
    assert "compute capability" in found["device"].value
    assert "GPU 0 memory" in found
    assert "TFLOP/s" in found["speed fp16"].value
    assert found["driver"].value != "no NVIDIA driver"


def test_a_configuration_is_examined_on_it(tmp_path: Path) -> None:
    from mpdist.config import load
    from mpdist.doctor import examine
    from mpdist.findings import error_of
    from mpdist.world import World

    path = tiny.config(tmp_path, launch={"device": "cuda", "timeout": "60s"}, precision={"compute": "fp16"})
    alone = World(rank=0, ranks=1, local_rank=0, local_ranks=1, node=0, nodes=1, source="test")
    found = examine.run(load(path), alone)
    assert error_of(found) is None, found
    checks = {finding.check: finding for finding in found}
    assert "the plan needs" in checks["GPU memory"].value
    assert checks["compute dtype"].value == "fp16, native"
