"""Rates that a run reports: of its session alone after a resume (C106), and of the model's own arithmetic (C107)."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny import train_each

pytestmark = pytest.mark.world

Figure = Callable[[str], None]
PEAK = 1e9  # FLOP/s of one rank, as the runs are told


def test_c106_after_a_resume_a_rate_is_of_its_sessions_tokens_and_seconds(tmp_path: Path, figure: Figure) -> None:
    always: dict[str, Any] = {"optim__horizon": 10, "name": "run"}
    (whole,) = train_each(tmp_path, 2, [{**always, "name": "whole", "budget__steps": 10}])
    (run,) = [train_each(tmp_path, 2, [{**always, "budget__steps": steps}]) for steps in (5, 10)][-1]
    rows = run.rows()
    assert [(row["step"], row["session"]) for row in rows] == [(n, 1 + (n > 5)) for n in range(1, 11)]
    assert run.column("train/tokens") == whole.column("train/tokens"), "totals go on"
    told = []
    for before, row in pairwise(rows):
        if "speed/tokens_per_s" in row:
            tokens, seconds = (row[key] - before[key] for key in ("train/tokens", "time/train_s"))
            assert before["session"] == row["session"]
            assert row["speed/tokens_per_s"] == pytest.approx(tokens / seconds, rel=1e-6)
            told.append((row["step"], tokens, seconds))
    assert [step for step, *_ in told] == [3, 4, 5, 8, 9, 10], "the first two windows of a session are its warm-up"
    second = rows[9]["train/tokens"] - rows[4]["train/tokens"]
    step, tokens, seconds = told[3]
    figure(
        f"5 updates, resumed, 5 updates: {rows[9]['train/tokens']} tokens in all (the undisturbed run: "
        f"{whole.rows()[9]['train/tokens']}), {second} of them in the second session; told at step {step}: "
        f"{rows[step - 1]['speed/tokens_per_s']:.0f} tokens/s = {tokens} tokens of its window / {seconds:.4f} s"
    )


def test_c107_utilisation_by_hand_whatever_the_cut_and_the_recompute(tmp_path: Path, figure: Figure) -> None:
    """6 FLOPs for each weight of a matrix product, the head once and the embedding not, and causal attention."""
    h, layers, vocab = (tiny.LLAMA[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    seq = 64
    attention, mlp = h * h + 2 * h * (h // 2) + h * h, 3 * h * tiny.LLAMA["intermediate_size"]
    by_hand = 6 * (layers * (attention + mlp) + vocab * h) + 6 * layers * h * seq
    always: dict[str, Any] = {"track__peak_tflops": PEAK / 1e12, "budget__steps": 5}
    cuts: dict[str, dict[str, Any]] = {
        "window of 2 or 4 micro-batches": {"batch": {"micro": 2, "global": 8}},
        "of 1 or 2": {"batch": {"micro": 4, "global": 8}},
        "with everything recomputed": {"memory__checkpointing": "full"},
    }
    asked = [{**always, **cut, "name": f"run{i}"} for i, cut in enumerate(cuts.values())]
    checked = 0
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        for run in train_each(folder, ranks, asked):
            assert run.status == 0, run.message
            env = json.loads((run.folder / "sessions/0001/env.json").read_text())
            assert env["model_flops_per_token"] == by_hand
            rows = [row for row in run.rows() if "speed/mfu" in row]
            assert [row["step"] for row in rows] == [3, 4, 5]
            for row in rows:
                assert row["speed/mfu"] == pytest.approx(by_hand * row["speed/tokens_per_s"] / (ranks * PEAK), rel=1e-9)
                checked += 1
    figure(
        f"{by_hand} FLOPs a token by hand, as told by 1 and 2 ranks with {', '.join(cuts)}; speed/mfu is that times tokens/s "
        f"over ranks x peak in {checked} of {checked} rows"
    )
