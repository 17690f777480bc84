"""Ranks that were started with different settings do not train together."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import worlds

pytestmark = pytest.mark.world


def session_of_its_own(rank: int, path: str) -> tuple[int, str]:
    """Rank 1 was given another learning rate and another seed."""
    return tiny.session(rank, path, ["optim.lr=1", "seed=7"] if rank else [])


def test_another_override_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    path = tiny.config(tmp_path)
    ends = worlds.run(session_of_its_own, 2, str(path))
    assert [status for status, _ in ends] == [2, 2]
    for _, message in ends:
        assert "optim.lr = 0.001 on rank 0 and 1.0 on rank 1" in message
        assert "seed = 0 on rank 0 and 7 on rank 1" in message
    assert not (tmp_path / "runs" / "run").exists()
