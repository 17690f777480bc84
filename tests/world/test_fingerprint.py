"""What a run records that it begins with: the same however it is cut, another where weights or rows are others."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"engine": "ddp"}),
    "fsdp2": (2, {"engine": "fsdp2"}),
    "fsdp2, 2 replicas": (2, {"engine": "fsdp2", "replicas": 2}),
    "fsdp2, 3 ranks": (3, {"engine": "fsdp2"}),
    "zero 2": (2, {"engine": "deepspeed", "stage": 2}),
    "zero 3": (2, {"engine": "deepspeed", "stage": 3}),
}


def begun(ranks: int, *overrides: str, **changes: Any) -> dict[str, str]:
    """The two digests of a run of two steps."""
    changes = {"budget": {"steps": 2}, "batch": {"micro": 1, "global": 12}, **changes}
    result = tiny.train(tiny.fresh(), ranks, *overrides, **changes)
    assert result.status == 0, result.message
    env = json.loads((result.folder / "sessions" / "0001" / "env.json").read_text())
    return {name: env[name] for name in ("initial_weights", "order")}


@pytest.mark.world
@pytest.mark.parametrize("way", WAYS)
def test_the_digests_do_not_hang_on_how_a_run_is_cut(way: str) -> None:
    ranks, shard = WAYS[way]
    assert begun(ranks, shard=shard) == alone()


@pytest.mark.world
def test_another_seed_other_rows_and_another_model_have_others() -> None:
    seed = begun(1, "seed=1")
    assert seed["initial_weights"] != alone()["initial_weights"]
    assert seed["order"] != alone()["order"]
    still = begun(1, "data.shuffle=false")
    assert (still["initial_weights"], still["order"] == alone()["order"]) == (alone()["initial_weights"], False)
    rows = begun(1, "data.seq_len=32")
    assert (rows["initial_weights"], rows["order"] == alone()["order"]) == (alone()["initial_weights"], False)


_alone: dict[str, str] = {}


def alone() -> dict[str, str]:
    """Of one rank."""
    if not _alone:
        _alone.update(begun(1))
    return _alone
