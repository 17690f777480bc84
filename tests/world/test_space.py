"""The planned bytes of a checkpoint against those of a real one, and ranks that look for room by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import worlds

from mpdist import space

pytestmark = pytest.mark.world

# Large enough for values to outweigh headers, as they do in any model that matters.
MODEL = {**tiny.LLAMA, "hidden_size": 128, "intermediate_size": 256}
CASES: dict[str, dict[str, Any]] = {
    "fsdp2, frozen, bf16": {"precision": {"compute": "bf16"}, "model__freeze": ["model.embed*"]},
    "ddp": {"shard": {"engine": "ddp"}},
    "pure bf16": {"precision": {"compute": "bf16", "master": "compute"}},
}


@pytest.mark.parametrize("case", CASES)
def test_c59_a_checkpoint_has_the_bytes_that_were_planned(tmp_path: Path, case: str) -> None:
    run = tiny.train(tmp_path, 2, model__config=MODEL, budget__steps=1, **CASES[case])
    assert run.status == 0, run.message
    planned = json.loads((run.folder / "plan.json").read_text())["checkpoint"]["bytes"]
    path = run.folder / "checkpoints" / "step-00000001"
    real = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    (published,) = (event["bytes"] for event in run.events("save") if event["reason"] == "published")
    assert 0 < real - published < 4096, "the manifest lists all files but itself"
    assert planned == pytest.approx(real, rel=0.01)


def session_on_a_full_disk(rank: int, path: str) -> tuple[int, str]:
    """One rank that nothing but torchrun has started."""
    space.os.statvfs = lambda folder: SimpleNamespace(  # type: ignore[assignment]
        f_frsize=1, f_bavail=1000, f_blocks=10**9, f_files=10, f_favail=1
    )
    return tiny.session(rank, path, [])


def test_c59_ranks_without_a_launcher_find_the_disk_full_together_and_before_anything_is_written(
    tmp_path: Path,
) -> None:
    ends = worlds.run(session_on_a_full_disk, 2, str(tiny.config(tmp_path)))
    assert [status for status, _ in ends] == [4, 4]
    assert all(message.startswith("a checkpoint takes ") for _, message in ends)
    assert not (tmp_path / "runs").exists()
    assert tiny.train(tmp_path, 2).status == 0
    ends = worlds.run(session_on_a_full_disk, 2, str(tiny.config(tmp_path)))
    assert [status for status, _ in ends] == [0, 0], "a finished run needs no room"
