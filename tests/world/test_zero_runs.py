"""Whole runs under the deepspeed engine: the same numbers, checkpoints and exports as under the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import watched
import worlds
from tiny import LLAMA, Result, same, timeless, train

pytestmark = pytest.mark.world

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "zero-1": {"engine": "deepspeed", "stage": 1},
    "zero-2": {"engine": "deepspeed", "stage": 2},
    "zero-3": {"engine": "deepspeed", "stage": 3},
    "zero-3-host": {"engine": "deepspeed", "stage": 3, "offload": "all"},
}
# What the engines share no code for: overflows, tied weights, frozen parameters, recomputation, packed rows, evaluation.
HARD: dict[str, Any] = {
    "model__config": {**LLAMA, "vocab_size": 261, "tie_word_embeddings": True},
    "model__freeze": ["*input_layernorm*"],
    "precision": {"compute": "fp16", "scale": {"interval": 3}},
    "drill": {"overflow_at": {"attempts": [1, 2, 6], "rank": 1}},
    "memory": {"checkpointing": "full"},
    "reduce": {"wire": "bf16"},
    "data__seq_len": 32,
    "budget__steps": 7,
    "eval": {"every": 3, "rows": 8},
    "checkpoint": {"every": 3, "keep": 9},
}
KINDS = ("model.", "exp_avg.", "exp_avg_sq.")


def numbers(run: Result, kind: str = "train") -> list[dict[str, Any]]:
    return timeless(run.rows(kind))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    found = {}
    for name, shard in ENGINES.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "eval.jsonl").write_text('{"text": "the dog sat on the mat"}\n' * 20)
        evaluation = [{"path": str(folder / "eval.jsonl")}]
        found[name] = train(folder, 2, shard=shard, **HARD, data__eval=evaluation)
        assert found[name].status == 0, (name, found[name].message)
    return found


def test_one_config_gives_the_same_scales_skips_rates_and_evaluations(runs: dict[str, Result]) -> None:
    plain = runs["ddp"]
    assert plain.column("scale/value") == [16384.0] * 6 + [32768.0]
    for name, run in runs.items():
        for column in ("scale/value", "scale/skipped", "train/lr", "train/label_tokens", "attempt"):
            assert run.column(column) == plain.column(column), (name, column)
        assert [e["attempt"] for e in run.events("skip")] == [1, 2, 6], name
        assert run.column("train/loss") == pytest.approx(plain.column("train/loss"), rel=1e-5), name
        assert run.column("train/grad_norm") == pytest.approx(plain.column("train/grad_norm"), rel=2e-3), name
        assert run.column("eval/loss", "eval") == pytest.approx(plain.column("eval/loss", "eval"), rel=1e-5), name


def test_same_cuts_give_the_same_bits(runs: dict[str, Result]) -> None:
    for name, of in {"zero-2": "ddp", "zero-3-host": "zero-3"}.items():
        assert runs[name].column("train/loss") == runs[of].column("train/loss"), name
        assert all(same(runs[name].weights(prefix=kind), runs[of].weights(prefix=kind)) for kind in KINDS), name


def test_masters_gradients_and_moments_are_fp32_and_shared_out(runs: dict[str, Result]) -> None:
    elements = sum(t.numel() for t in runs["ddp"].weights(prefix="exp_avg.").values())
    for name, run in runs.items():
        for row, each in {"parameters": 4, "gradients": 4, "moments": 8}.items():
            found = [r for r in run.ledger() if r["row"] == row]
            assert {r["dtype"] for r in found} == {"float32"}, (name, row)
            held = sum(r["measured_bytes"] for r in found)
            assert held == elements * each * (2 if name == "ddp" else 1), (name, row)


def test_a_run_moves_between_engines_stages_and_numbers_of_ranks(tmp_path: Path) -> None:
    """ZeRO-3 on 2 ranks, then fsdp2 on 1, ZeRO-2 on 2, ZeRO-1 on 3, ddp on 2: vocabulary 263 cuts unevenly everywhere."""
    base: dict[str, Any] = {
        "model__config": {**LLAMA, "vocab_size": 263},
        "batch": {"micro": 1, "global": 6},
        "optim": {"lr": 1e-3, "schedule": "constant"},
        "checkpoint": {"every": 2, "keep": 99},
    }
    whole = train(tmp_path, 2, **base, name="whole", shard=ENGINES["ddp"], budget__steps=10)
    assert whole.status == 0, whole.message
    way = [
        (2, ENGINES["zero-3"]),
        (1, {"engine": "fsdp2"}),
        (2, ENGINES["zero-2"]),
        (3, ENGINES["zero-1"]),
        (2, ENGINES["ddp"]),
    ]
    for i, (ranks, shard) in enumerate(way):
        path = tiny.config(tmp_path, **base, name="moved", shard=shard, budget__steps=2 * (i + 1))
        ((status, message, loaded),) = worlds.run(watched.session_loaded, ranks, [str(path)], worlds.free_ports(1))[0]
        assert status == 0, (shard, message)
        moved = Result(tmp_path / "runs" / "moved", [(status, message)])
        if i:
            saved = {key: tensor for kind in KINDS for key, tensor in moved.weights(2 * i, kind).items()}
            assert same(loaded, saved), shard
    print("losses", moved.column("train/loss"), whole.column("train/loss"))
    # FP32 sums over 1, 2 and 3 ranks round differently; ten steps of Adam carry that on.
    assert moved.column("train/loss") == pytest.approx(whole.column("train/loss"), rel=2e-6)


def test_killed_in_a_save_and_resumed_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    base: dict[str, Any] = {**HARD, "shard": ENGINES["zero-3"], "eval": {}, "memory": {}, "checkpoint": {"every": 2},
                            "budget__steps": 5}  # fmt: skip
    whole = train(tmp_path, 2, **base, name="whole")
    kill = {"kill_at": {"attempt": 7, "rank": 1, "phase": "save"}}
    with pytest.raises(AssertionError, match=r"died|failed"):
        train(tmp_path, 2, **{**base, "drill": {**HARD["drill"], **kill}}, launch__timeout="20s", name="killed")
    end = train(tmp_path, 2, **base, name="killed")
    assert end.status == 0, end.message
    assert numbers(end) == numbers(whole)
    assert all(same(end.weights(prefix=kind), whole.weights(prefix=kind)) for kind in KINDS)
