"""A small run is killed at random moments, in saves too, and resumed each time: it ends as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tiny import LLAMA, Result, same, timeless, train

pytestmark = [pytest.mark.world, pytest.mark.slow]

RUNS: dict[str, dict[str, Any]] = {
    "fp32-ddp": {"shard": {"engine": "ddp"}, "precision": {"compute": "fp32"}},
    "bf16-fsdp2": {"shard": {"engine": "fsdp2", "stage": 3}, "precision": {"compute": "bf16"}},
    "fp16-fsdp2": {
        "shard": {"engine": "fsdp2", "stage": 2},
        "precision": {"compute": "fp16", "scale": {"interval": 3}},
        "drill": {"overflow_at": {"attempts": [2, 7, 8, 15], "rank": 1}},
    },
}
KILLS = 10  # of each run, four of them inside a save


def progress(folder: Path) -> int:
    """Attempts that the newest checkpoint knows of."""
    states = sorted(folder.glob("checkpoints/step-*/state.json"))
    if not states:
        return 0
    import json

    return int(json.loads(states[-1].read_text())["attempt"])


@pytest.mark.parametrize("name", RUNS)
def test_killed_at_random_moments_and_resumed_equals_the_uninterrupted_run(tmp_path: Path, name: str) -> None:
    base: dict[str, Any] = {
        "model__config": {**LLAMA, "attention_dropout": 0.1},
        "budget__steps": 40,
        "optim": {"lr": 1e-2, "warmup": 3, "schedule": "cosine"},
        "checkpoint": {"every": 2, "keep": 2},
        "launch__timeout": "20s",
        **RUNS[name],
    }
    whole = train(tmp_path, 2, **{**base, "name": "whole"})
    assert whole.status == 0, whole.message
    draw = random.Random(name)
    folder = tmp_path / "runs" / "killed"
    struck, in_saves = 0, 0
    used: set[int] = set()
    for i in range(KILLS):
        who = draw.choice([[0], [1], [0, 1]])
        changes: dict[str, Any] = {**base, "name": "killed"}
        kill = None
        phase = ("save", "train", "save", "any", "train")[i % 5]
        if phase == "any":  # while forking, loading, training, saving
            kill = (draw.uniform(0.1, 1.0), who)
        else:
            # A drill that fired does not fire again, so each strikes at an attempt of its own.
            at = progress(folder) + (draw.randint(1, 4) if phase == "train" else 1)
            at = next(a for a in range(at, at + KILLS) if a not in used)
            used.add(at)
            fault = {"attempt": at, "rank": "all" if len(who) == 2 else who[0], "phase": phase}
            changes["drill"] = {**base.get("drill", {}), "kill_at": fault}
        with pytest.raises(AssertionError, match=r"died|failed"):
            train(tmp_path, 2, **changes, kill=kill, timeout=60)
        struck += 1
        in_saves += phase == "save"
    end = train(tmp_path, 2, **{**base, "name": "killed"})
    assert end.status == 0, end.message
    print(f"{name}: {struck} kills, {in_saves} in saves")
    assert struck == KILLS
    assert in_saves == 4
    check(end, whole)


def check(end: Result, whole: Result) -> None:
    assert timeless(end.rows()) == timeless(whole.rows())
    for prefix in ("model.", "exp_avg.", "exp_avg_sq."):
        assert same(end.weights(prefix=prefix), whole.weights(prefix=prefix))
