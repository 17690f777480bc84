"""Values that are not finite: refused, skipped as a whole, shown in the record, and traced to their cause."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import watched

DDP: dict[str, Any] = {"shard": {"engine": "ddp"}}
STAGE3: dict[str, Any] = {"shard": {"engine": "fsdp2", "stage": 3}}
BOTH = [pytest.param(DDP, id="ddp"), pytest.param(STAGE3, id="fsdp2")]
EVERY = {"ddp": DDP, "fsdp2-2": {"shard": {"engine": "fsdp2", "stage": 2}}, "fsdp2-3": STAGE3}
HUGE = "model.layers.1.mlp.up_proj.weight"


def folder_of(path: Path, dtype: str, change: Any) -> str:
    """A Hugging Face folder of a random model whose state `change` has altered."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(tiny.LLAMA)
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    with torch.no_grad():
        change(made.state_dict())
    made.to(getattr(torch, dtype)).save_pretrained(path)
    return str(path)


def same(run: watched.Watched) -> bool:
    """Whether the weights are those that the run began with, bit for bit, on every rank."""
    return all(tiny.same(rank.start, rank.end) for rank in run.ranks)


def findings(run: watched.Watched) -> list[str]:
    return [event["reason"] for event in run.events("finding")]


def labels(run: watched.Watched, window: int) -> int:
    """Label tokens of that global window (from 0) of a run without skips."""
    totals = [0, *run.column("train/label_tokens")]
    return int(totals[window + 1] - totals[window])


# -- FP16's range -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", BOTH)
def test_c120_a_weight_beyond_fp16_is_named_before_the_first_step(tmp_path: Path, engine: Any) -> None:
    def enlarge(state: dict[str, Any]) -> None:
        state[HUGE][-1, 0] = -100000.0

    path = folder_of(tmp_path / "start", "bfloat16", enlarge)
    base = {**engine, "precision": {"compute": "fp16"}, "budget__steps": 1}
    refused, frozen, kept, wide = watched.sessions(
        tmp_path,
        2,
        [
            {**base, "model": {"path": path}},
            {**base, "model": {"path": path, "freeze": ["*up_proj*"]}},
            {**base, "model": {"path": path}, "precision": {"compute": "fp16", "keep_fp32": ["model.layers.1.mlp"]}},
            {**base, "model": {"path": path}, "precision": {"compute": "bf16"}},
        ],
    )
    for run in (refused, frozen):
        assert [rank.status for rank in run.ranks] == [2, 2]
        assert f"precision.compute = fp16, but {HUGE} holds" in run.message
        assert not run.attempts
    assert "holds 99840" in refused.message  # 100000 in BF16
    for run in (kept, wide):  # the two ways out that the message gives
        assert "holds" not in run.message


@pytest.mark.parametrize("engine", BOTH)
def test_c120_c127_overflowing_activations_are_traced_to_their_module(tmp_path: Path, engine: Any) -> None:
    """Finite weights, the largest about 40, whose products leave FP16's range: named, and given up after the patience."""

    def enlarge(state: dict[str, Any]) -> None:
        for name, tensor in state.items():
            if "layers.1.mlp" in name:
                tensor.mul_(600.0)

    path = folder_of(tmp_path / "start", "float32", enlarge)
    base = {**engine, "model": {"path": path}, "budget__steps": 2}
    half, brain = watched.sessions(
        tmp_path, 2, [{**base, "precision": {"compute": "fp16", "scale": {"patience": 3}}},
                      {**base, "precision": {"compute": "bf16"}}]
    )  # fmt: skip
    assert [rank.status for rank in half.ranks] == [5, 5]
    assert "3 attempts in a row were skipped, the last for non-finite loss" in half.message
    assert "activations: the first module with a non-finite output is model.layers.1." in half.message
    assert "rows [" in half.message
    assert "label tokens" in half.message
    assert "precision.keep_fp32" in half.message
    assert same(half)
    assert len(findings(half)) == 2  # at the first one, and at the end
    assert brain.status == 0, brain.message


# -- three kinds of trouble, three findings ------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", BOTH)
def test_c127_a_nan_weight_is_named_and_counted(tmp_path: Path, engine: Any) -> None:
    def spoil(state: dict[str, Any]) -> None:
        state[HUGE][-1, :3] = math.nan

    base = {**engine, "model": {"path": folder_of(tmp_path / "start", "bfloat16", spoil)}}
    runs = watched.sessions(
        tmp_path, 2, [{**base, "precision": {"compute": compute, "scale": {"patience": 2}}} for compute in ("fp32", "fp16")]
    )  # fmt: skip
    for run in runs:
        assert [rank.status for rank in run.ranks] == [5, 5]
        assert f"weights: {HUGE} holds 3 non-finite values (rank" in run.message
        assert findings(run)[0].startswith(f"weights: {HUGE}")
    single, half = (run.message for run in runs)
    assert "start from a copy of the model, or a checkpoint, whose weights are finite" in single
    assert " at a scale of " not in single
    assert "compute in bf16" not in half
    assert " at a scale of " in half


def test_c127_rows_without_labels_are_another_finding(tmp_path: Path) -> None:
    """A window whose rows have no label token: warned of and counted, no patience used, nothing called non-finite."""
    long = {"prompt": "a question that fills the row " * 2, "completion": "yes"}
    lines = [{"prompt": "ask", "completion": "yes"}] * 4 + [long] * 4
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"tokenizer": "bytes", "train": [{"path": str(tmp_path / "pairs.jsonl"), "format": "prompt_completion"}],
            "seq_len": 32, "packing": "none", "loss_on": "completion", "too_long": "truncate", "shuffle": False}  # fmt: skip
    changes = [{**engine, "data": data, "batch": {"micro": 1, "global": 4}, "budget": {"steps": 2},
                "precision": {"compute": "fp16", "scale": {"patience": 1}}} for engine in (DDP, STAGE3)]  # fmt: skip
    for run in watched.sessions(tmp_path, 2, changes):
        assert run.status == 0, run.message
        assert [attempt.reason for attempt in run.attempts] == [None, "no label token", None]
        assert [attempt.touched for attempt in run.attempts] == [True, False, True]
        assert run.column("scale/skipped") == [0, 0]
        assert not findings(run)
        assert any("has no label token" in event["reason"] for event in run.events("warning"))


# -- the record hides nothing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", BOTH)
def test_c123_c124_a_loss_of_nan_is_in_the_record_and_in_no_mean(tmp_path: Path, engine: Any) -> None:
    base = {**engine, "budget__steps": 5}
    plain, hurt = watched.sessions(
        tmp_path, 2, [base, {**base, "drill": {"nan_loss_at": {"attempts": [3], "rank": 1}}}]
    )
    assert hurt.status == 0, hurt.message
    assert [attempt.applied for attempt in hurt.attempts] == [True, True, False, True, True, True]
    (skip,) = hurt.events("skip")
    assert (skip["attempt"], skip["step"], skip["loss"], skip["reason"]) == (3, 2, "nan", "non-finite loss")
    assert hurt.column("step") == [1, 2, 3, 4, 5]
    assert hurt.column("attempt") == [1, 2, 4, 5, 6]
    assert hurt.column("scale/skipped") == [0, 0, 1, 1, 1]
    assert all(math.isfinite(loss) for loss in hurt.column("train/loss"))
    assert hurt.column("train/loss")[:2] == plain.column("train/loss")[:2]
    # The window is lost, not tried again: the third step is made of the fourth window.
    assert hurt.column("train/label_tokens")[2] == plain.column("train/label_tokens")[1] + labels(plain, 3)
    (finding,) = findings(hurt)
    assert finding.startswith("loss: non-finite on rank 1 (rows [")
    assert "although weights and every module's output are finite" in finding
    text = (hurt.folder / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


# -- skipped as a whole ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_c122_c128_one_bad_element_skips_the_window_in_every_precision(tmp_path: Path, name: str) -> None:
    """Attempt 2 overflows in one element of one rank: no rank's weights, moments or step counters move, whatever clips."""
    drill = {"overflow_at": {"attempts": [2], "rank": 1}}
    changes = [{**EVERY[name], "precision": {"compute": compute}, "budget__steps": 3, "drill": drill}
               for compute in ("fp32", "bf16", "fp16")]  # fmt: skip
    for run in watched.sessions(tmp_path, 2, changes):
        assert run.status == 0, run.message
        for rank in run.ranks:
            assert [attempt.applied for attempt in rank.attempts] == [True, False, True, True]
            assert [attempt.touched for attempt in rank.attempts] == [True, False, True, True]
            assert rank.counters == {3.0}
            assert all(bool(tensor.isfinite().all()) for tensor in rank.end.values())
        assert run.attempts[1].reason == "non-finite gradients"
        assert run.events("skip")[0]["reason"] == "non-finite gradients"


@pytest.mark.parametrize(
    ("value", "applied", "after"), [(1.0, True, 0.1), (1e20, False, 1e20), (math.inf, False, math.inf), (math.nan, False, math.nan)]
)  # fmt: skip
def test_c122_a_norm_that_is_not_finite_clips_nothing(value: float, applied: bool, after: float) -> None:
    import torch

    from mpdist.optim import square_sum
    from mpdist.precision import Verdict, Window

    gradients = [torch.full((50,), value), torch.full((5, 10), value)]
    window = Window(dynamic=False, scale=1.0, clip=1.0)
    decision = window.close(Verdict(1.0, square_sum(gradients).item()))
    assert decision.applied is applied
    if decision.applied:
        assert decision.norm == pytest.approx(10.0)
        torch._foreach_mul_(gradients, decision.factor)
    for gradient in gradients:
        assert torch.allclose(gradient, torch.full_like(gradient, after), equal_nan=True)
