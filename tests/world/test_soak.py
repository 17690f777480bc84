"""A small run is killed at random moments, in saves too, and resumed each time: it ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import worlds
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
# Ten of each run: before an operation of a save on its files, within an attempt, or while loading, training, whatever.
PHASES = ("save", "attempt", "save", "clock", "save", "attempt", "save", "clock", "save", "attempt")
# What a rank does to the files of a checkpoint in one save, the model's config and tokenizer left out; rank 0 publishes.
OPERATIONS = {0: 30, 1: 6}
STEPS = 40


@dataclass(frozen=True)
class Strike:
    """When a rank kills itself: phase save: before its n-th operation on the files of save `saves`, counted in the session;
    attempt: `seconds` after attempt n has begun; clock: that long after the session has."""

    phase: str
    n: int
    saves: int
    seconds: float


def session_struck(rank: int, path: str, strikes: dict[int, Strike]) -> tuple[int, str]:
    if rank in strikes:
        strike = strikes[rank]
        if strike.phase == "clock":
            threading.Timer(strike.seconds, kill).start()
        if strike.phase == "save":
            kill_in_save(strike)
        kill_in_attempt(strike)
    return tiny.session(rank, path, [])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_save(strike: Strike) -> None:
    operations: dict[threading.Thread, int] = {}

    def heard(event: str, args: tuple[Any, ...]) -> None:
        thread = threading.current_thread()  # each save has one of its own
        if thread.name != "save" or event not in ("open", "os.rename", "os.mkdir", "os.remove"):
            return
        if "/checkpoints" in str(args[0]) and "/hf" not in str(args[0]):
            operations[thread] = operations.get(thread, 0) + 1
            late = len(operations) - strike.saves
            if late > 0 or (late == 0 and operations[thread] == strike.n):
                kill()

    sys.addaudithook(heard)


def kill_in_attempt(strike: Strike) -> None:
    """The run's last step ends every session that is to be struck."""
    from mpdist import train as loop

    attempt, left = loop.attempt, [strike.n if strike.phase == "attempt" else STEPS + 1]

    def begun(s: Any, batch: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            threading.Timer(strike.seconds, kill).start()
        if s.parts.window.step == STEPS - 1:
            kill()
        return attempt(s, batch)

    loop.attempt = begun


@pytest.mark.parametrize("name", RUNS)
def test_killed_at_random_moments_and_resumed_equals_the_uninterrupted_run(tmp_path: Path, name: str) -> None:
    base: dict[str, Any] = {
        "model__config": {**LLAMA, "attention_dropout": 0.1},
        "data__seq_len": 32,
        "batch": {"micro": 4, "global": 8},
        "budget__steps": STEPS,
        "optim": {"lr": 1e-2, "warmup": 3, "schedule": "cosine"},
        "checkpoint": {"every": 2, "keep": 2},
        "launch__timeout": "20s",
        **RUNS[name],
    }
    whole = train(tmp_path, 2, **{**base, "name": "whole"})
    assert whole.status == 0, whole.message
    draw = random.Random(name)
    path = str(tiny.config(tmp_path, **{**base, "name": "killed"}))
    for phase in PHASES:
        strikes = {}
        for rank in draw.choice([[0], [1], [0, 1]]):
            n = draw.randint(1, OPERATIONS[rank] if phase == "save" else 8)
            strikes[rank] = Strike(phase, n, draw.randint(1, 3), draw.uniform(0.0, 0.6 if phase == "clock" else 0.02))
        with pytest.raises(AssertionError, match=r"died|failed"):
            worlds.run(session_struck, 2, path, strikes, timeout=60)
    end = train(tmp_path, 2, **{**base, "name": "killed"})
    assert end.status == 0, end.message
    assert len(end.events("resume")) >= 3, "it was hardly ever under way"
    print(f"{name}: {len(PHASES)} kills, {PHASES.count('save')} in saves, {len(end.events('resume'))} resumes")
    check(end, whole)


def check(end: Result, whole: Result) -> None:
    assert timeless(end.rows()) == timeless(whole.rows())
    for prefix in ("model.", "exp_avg.", "exp_avg_sq."):
        assert same(end.weights(prefix=prefix), whole.weights(prefix=prefix))
