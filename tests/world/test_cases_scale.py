"""FP16 and the loss scale over several ranks: C02 to C13, C33 and C34, and rehearsed overflows on every engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engines
import pytest
import tiny
import watched
import worlds

pytestmark = pytest.mark.world

SHARDS: dict[str, dict[str, Any]] = {
    "ddp": {"shard__engine": "ddp", "shard__stage": 0},
    "fsdp2-2": {"shard__stage": 2},
    "fsdp2-3": {"shard__stage": 3},
    "hsdp": {"shard__stage": 3, "shard__replicas": 2},
}
OVERFLOW = {"attempts": [1, 2, 6], "rank": 1}


HALF: dict[str, Any] = {"precision__compute": "fp16", "data__seq_len": 32}  # short: 16-bit products may be slow


@pytest.fixture(scope="module")
def drilled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, watched.Watched]:
    """FP16, overflows rehearsed at attempts 1, 2 and 6 on rank 1, 7 steps, on every engine; and variants of it."""
    normal = {**HALF, "budget__steps": 7, "drill__overflow_at": OVERFLOW}
    changes = [{**normal, **shard, "name": name} for name, shard in SHARDS.items()]
    for name in ("ddp", "fsdp2-3"):
        changes.append({**normal, **SHARDS[name], "name": f"{name}-unfused", "optim__fused": False})
    changes.append({**normal, "name": "last", "reduce__when": "last", "drill__overflow_at": {**OVERFLOW, "micro": 2}})
    changes.append({**normal, "name": "next", "precision__scale__on_overflow": "next"})
    runs = watched.sessions(tmp_path_factory.mktemp("drilled"), 2, changes)
    return {run.folder.name: run for run in runs}


ALL = [*SHARDS, "ddp-unfused", "fsdp2-3-unfused", "last", "next"]


@pytest.mark.parametrize("name", ALL)
def test_rehearsed_overflows(drilled: dict[str, watched.Watched], name: str) -> None:
    run = drilled[name]
    assert run.ends == [(0, ""), (0, "")]
    assert (run.state()["step"], run.state()["attempt"], run.state()["state"]) == (7, 10, "done")
    scales = [65536.0, 32768.0] + [16384.0] * 4 + [8192.0] * 4
    for seen in run.ranks:
        assert [a.applied for a in seen.attempts] == [n not in OVERFLOW["attempts"] for n in range(1, 11)]
        assert [a.scale for a in seen.attempts] == scales
        assert [a.touched for a in seen.attempts] == [a.applied for a in seen.attempts]  # bit for bit
        assert seen.counters == {7.0}
        assert seen.gradients == {"torch.float32"}
        assert {a.reason for a in seen.attempts if not a.applied} == {"non-finite gradients"}
    assert [a.state for a in run.ranks[0].attempts] == [a.state for a in run.ranks[1].attempts]
    assert run.column("step") == list(range(1, 8))
    assert run.column("attempt") == [3, 4, 5, 7, 8, 9, 10]
    assert run.column("train/lr") == pytest.approx([1e-3 * (1 - k / 7) for k in range(7)])
    assert run.column("scale/value") == [16384.0] * 3 + [8192.0] * 4
    assert run.column("scale/skipped") == [2, 2, 2, 3, 3, 3, 3]
    skips = [(e["attempt"], e["step"], e["scale"], e["scale_after"]) for e in run.events("skip")]
    assert skips == [(1, 0, 65536, 32768), (2, 0, 32768, 16384), (6, 3, 16384, 8192)]
    assert sorted(e["reason"] for e in run.events("drill")) == ["overflow_at@1", "overflow_at@2", "overflow_at@6"]


def test_a_retried_window_loses_no_row_and_next_goes_on(drilled: dict[str, watched.Watched]) -> None:
    retried, following = ([a.rows for a in drilled[n].attempts] for n in ("fsdp2-3", "next"))
    assert retried[0] == retried[1] == retried[2]
    assert retried[5] == retried[6]
    assert len({str(rows) for rows in retried}) == 7
    assert len({str(rows) for rows in following}) == 10
    skips = {name: drilled[name].events("skip") for name in ("fsdp2-3", "next")}
    assert [skip.get("passed_over") for skip in skips["fsdp2-3"]] == [None] * 3
    assert [skip["passed_over"] for skip in skips["next"]] == [8] * 3


def test_a_rehearsed_overflow_claims_no_cure(drilled: dict[str, watched.Watched]) -> None:
    for name in ALL:
        finding = drilled[name].events("finding")[0]
        assert (finding["rehearsed"], finding["lower_scale"]) == ("overflow_at", None)
        assert finding["reason"].endswith("it was rehearsed (drill.overflow_at), so no cure is claimed")


def test_c34_fused_and_unfused_skip_alike(drilled: dict[str, watched.Watched]) -> None:
    for name in ("ddp", "fsdp2-3"):
        fused, plain = drilled[name], drilled[f"{name}-unfused"]
        assert [a.state for a in fused.attempts] == [a.state for a in plain.attempts]
        assert [a.lr for a in fused.attempts] == [a.lr for a in plain.attempts]
        assert fused.column("train/loss") == pytest.approx(plain.column("train/loss"), rel=1e-3)


def test_engines_take_the_same_way(drilled: dict[str, watched.Watched]) -> None:
    for name in ("fsdp2-2", "fsdp2-3", "hsdp", "last"):
        assert drilled[name].column("train/loss") == pytest.approx(drilled["ddp"].column("train/loss"), rel=1e-4)


def _records(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"text": f"{'ab' * (i % 5 + 1)} row {i}"}) + "\n" for i in range(count)))
    return path


@pytest.mark.parametrize(
    ("rows", "micro", "window", "ranks", "sizes"),
    [(10, 1, 2, 2, [4, 4, 2]), (11, 1, 2, 2, [4, 4, 3]), (9, 2, 3, 1, [6, 3]), (5, 1, 4, 1, [4, 1]), (14, 2, 2, 2, [8, 6])],
)  # fmt: skip
def test_c04_one_unscale_a_window_also_in_the_short_last_one(
    tmp_path: Path, rows: int, micro: int, window: int, ranks: int, sizes: list[int]
) -> None:
    """Three epochs; the first case is 5 micro-batches per rank and epoch in windows of 2."""
    data = _records(tmp_path / "short.jsonl", rows)
    normal = {
        "data__train": [{"path": str(data)}],
        "data__packing": "none",
        "batch": {"micro": micro, "global": micro * window * ranks},
        "budget": {"epochs": 3},
        "optim__clip": 1.0,
    }
    changes = [{**normal, "name": c, "precision__compute": c} for c in ("fp16", "fp32")]
    half, single = watched.sessions(tmp_path, ranks, changes)
    attempts = len(sizes) * 3
    for run in (half, single):
        assert run.status == 0, run.message
        assert (run.state()["attempt"], run.state()["step"]) == (attempts, attempts)
        per_window = [
            [row for seen in run.ranks for micro_rows in seen.attempts[k].rows for row in micro_rows]
            for k in range(attempts)
        ]
        assert [len(taken) for taken in per_window] == sizes * 3
        for epoch in range(3):
            seen = [row for taken in per_window[epoch * len(sizes) : (epoch + 1) * len(sizes)] for row in taken]
            assert sorted(seen) == list(range(rows))
    assert half.column("train/grad_norm")[0] == pytest.approx(single.column("train/grad_norm")[0], rel=1e-2)
    assert half.column("train/grad_norm") == pytest.approx(single.column("train/grad_norm"), rel=5e-2)
    assert half.column("train/lr") == single.column("train/lr")


@pytest.fixture(scope="module")
def hopeless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, watched.Watched]:
    half, forever = HALF, {"drill__overflow_at": {"attempts": list(range(1, 60)), "rank": 1}}
    nan = {"drill__nan_loss_at": {"attempts": "all", "rank": 1}, "precision__scale__patience": 4}
    changes = [
        {**half, **forever, "name": "floor"},
        {**half, **forever, **SHARDS["ddp"], "name": "floor-ddp", "precision__scale": {"floor": 16384, "patience": 5}},
        {**half, **forever, "name": "static", "precision__scale": {"mode": "static", "init": 64, "patience": 3}},
        {**half, **nan, "name": "nan-fp16"},
        *({**nan, **shard, "name": f"nan-{name}"} for name, shard in SHARDS.items()),
    ]
    return {run.folder.name: run for run in watched.sessions(tmp_path_factory.mktemp("hopeless"), 2, changes)}


@pytest.mark.parametrize(
    ("name", "scales"),
    [("floor", [2.0**k for k in range(16, -1, -1)] + [1.0] * 3), ("floor-ddp", [65536.0, 32768.0] + [16384.0] * 3),
     ("static", [64.0] * 3)],
)  # fmt: skip
def test_c05_overflow_without_end_stops_and_names_the_gradients(
    hopeless: dict[str, watched.Watched], name: str, scales: list[float]
) -> None:
    run = hopeless[name]
    assert [end[0] for end in run.ends] == [5, 5]
    for seen in run.ranks:
        assert [a.scale for a in seen.attempts] == scales
        assert not any(a.touched for a in seen.attempts)
        assert tiny.same(seen.start, seen.end)
    assert "non-finite gradients" in run.message
    assert "gradients: non-finite in model." in run.message or "gradients: non-finite in lm_head" in run.message


@pytest.mark.parametrize("name", ["nan-fp16", *(f"nan-{name}" for name in SHARDS)])
def test_a_loss_of_nan_for_ever_ends_with_5_and_the_first_weights(
    hopeless: dict[str, watched.Watched], name: str
) -> None:
    run = hopeless[name]
    assert [end[0] for end in run.ends] == [5, 5]
    for seen in run.ranks:
        assert len(seen.attempts) == 4
        assert {a.reason for a in seen.attempts} == {"non-finite loss"}
        assert len({a.scale for a in seen.attempts}) == 1
        assert not any(a.touched for a in seen.attempts)
        assert tiny.same(seen.start, seen.end)
    assert "non-finite loss" in run.message
    assert "loss: non-finite on rank 1 (rows [" in run.message
    assert [e["loss"] for e in run.events("skip")] == ["nan"] * 4


def _three_to_one() -> Any:
    import torch
    from torch import nn

    class ThreeToOne(nn.Module):
        """Weight [1, 3] and bias [1] in one group, and a layer [3, 3]: on 2 or 4 ranks some shards are empty."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
            return self.outer(self.inner(x)).sum() * factor

    with torch.device("meta"):
        return ThreeToOne()


def _one_element(rank: int, jobs: list[tuple[str, int, int]]) -> list[dict[str, Any]]:
    """Per job: a finite window, then one with inf from rank 0, then a finite one."""
    import torch
    import torch.distributed as dist

    from mpdist.optim import square_sum
    from mpdist.precision import Verdict

    found = []
    for engine, stage, replicas in jobs:
        scale = {"dynamic": True, "scale": 8.0, "interval": 99}
        made = engines.rig(rank, engine, stage, replicas, model=_three_to_one(), compute="fp16", scale=scale)
        for part in made.engine.parts:
            part.tensor.fill_(0.5)
        made.engine.refresh()
        state: dict[str, Any] = {"rows": [len(p.tensor) for p in made.engine.parts], "norms": [], "applied": []}
        for attempt in range(3):
            made.engine.micro(True, True)
            loss = made.engine.module(torch.ones(2, 3, dtype=torch.float16), made.window.scale)
            if attempt == 1 and rank == 0:
                made.engine.poison()
            loss.backward()
            made.engine.after_backward(True)
            gradients = made.engine.gradients()
            squares = square_sum(gradients) / made.engine.replicas
            dist.all_reduce(squares)
            decision = made.window.close(Verdict(1.0, squares.item()))
            before = [p.tensor.clone() for p in made.engine.parts]
            if decision.applied:
                torch._foreach_mul_(gradients, decision.factor)
                made.optimizer.step(gradients, 0.125)
                made.engine.refresh()
            made.engine.clear()
            state["norms"].append(decision.norm)
            state["applied"].append(decision.applied)
            moved = [bool((p.tensor != b).any()) for p, b in zip(made.engine.parts, before, strict=True)]
            state.setdefault("moved", []).append(moved)
        state["scale"], state["full"] = made.window.scale, made.full()
        found.append(state)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_c07_ranks_with_empty_shards_share_the_verdict(ranks: int) -> None:
    jobs = [("fsdp2", 2, 1), ("fsdp2", 3, 1), ("fsdp2", 3, 2), *(("deepspeed", stage, 1) for stage in (1, 2, 3))]
    jobs.append(("ddp", 0, 1))
    by_rank = worlds.run(_one_element, ranks, jobs)
    shards = [found[1]["rows"] for found in by_rank]  # inner.weight, inner.bias, outer.weight, outer.bias
    assert [rows[3] for rows in shards] == [1] + [0] * (ranks - 1)
    if ranks == 4:
        assert [rows[0] for rows in shards] == [1, 1, 1, 0]
    reference = by_rank[0][-1]["full"]
    for found in by_rank:
        for state in found:
            assert state["applied"] == [True, False, True]
            assert state["scale"] == 4.0
            assert not any(state["moved"][1])
            assert state["norms"][0] == pytest.approx(by_rank[0][-1]["norms"][0], rel=1e-6)
            assert engines.worst(state["full"], reference) < 1e-6


def _norm_of_5000(rank: int) -> float:
    import torch
    import torch.distributed as dist

    from mpdist.optim import square_sum

    squares = square_sum([torch.tensor([5000.0], dtype=torch.float16), torch.zeros(0, dtype=torch.float16)])
    dist.all_reduce(squares)
    return squares.sqrt().item()


def test_c09_the_norm_over_ranks_is_wider_than_fp16() -> None:
    assert worlds.run(_norm_of_5000, 2) == pytest.approx([7071.0678, 7071.0678], rel=1e-6)


def test_c02_c12_defaults_are_stored_and_a_high_scale_comes_down(tmp_path: Path) -> None:
    half = {**HALF, "budget__steps": 3}
    plain, high, wire = watched.sessions(
        tmp_path,
        2,
        [
            {**half, "name": "plain"},
            {**half, "name": "high", "precision__scale__init": 2**32, "precision__scale__patience": 40},
            {"budget__steps": 2, "name": "wire", "reduce__wire": "fp16", "precision__scale__init": 2**24},
        ],
    )
    stored = json.loads((plain.folder / "sessions/0001/env.json").read_text())["scale"]
    wanted = {"init": 65536, "growth": 2.0, "backoff": 0.5, "interval": 2000, "floor": 1.0, "mode": "dynamic"}
    assert {key: stored[key] for key in wanted} == wanted
    assert plain.column("scale/value") == [65536.0] * 3
    assert high.status == 0, high.message
    skipped = high.column("scale/skipped")[-1]
    assert skipped >= 10  # 2^32 is far beyond what FP16 gradients bear
    assert high.state()["step"] == 3
    assert high.state()["attempt"] == 3 + skipped == 3 + len(high.events("skip"))
    assert high.column("train/lr") == plain.column("train/lr")  # warm-up and decay are not used up by skips
    assert high.column("train/loss") == pytest.approx(plain.column("train/loss"), rel=1e-3)
    for run in (plain, high, wire):
        for mine, theirs in zip(run.ranks[0].attempts, run.ranks[1].attempts, strict=True):
            assert mine.state == theirs.state
    assert {row["dtype"] for row in plain.ledger() if row["row"] == "parameters"} == {"float32"}


def test_c11_schedule_overflow_and_stop_agree_on_all_ranks(tmp_path: Path) -> None:
    drill = {"precision__compute": "fp16", "budget__steps": 5, "drill__overflow_at": {"attempts": [2], "rank": 1}}
    changes = [{**drill, **shard, "name": name} for name, shard in SHARDS.items()]
    for run in watched.sessions(tmp_path, 2, changes, timeout=60):
        mine, theirs = (seen.attempts for seen in run.ranks)
        assert [a.lr for a in mine] == [a.lr for a in theirs] == pytest.approx([1e-3, 8e-4, 8e-4, 6e-4, 4e-4, 2e-4])
        assert [a.state for a in mine] == [a.state for a in theirs]
        assert run.state()["step"] == 5


@pytest.mark.parametrize("name", ["ddp", "fsdp2-3"])
def test_c13_the_scale_does_not_know_about_restarts(tmp_path: Path, name: str) -> None:
    """Growth every 3 windows, overflows at attempts 4, 9 and 15: 20 steps, against 20 with a stop at attempt 12."""
    normal = {
        **SHARDS[name],
        **HALF,
        "precision__scale__interval": 3,
        "budget__steps": 20,
        "drill__overflow_at": {"attempts": [4, 9, 15], "rank": 1},
    }
    stopped = {**normal, "name": "stopped", "drill__stop_at": {"attempt": 12, "rank": 1}}
    whole, first, second = watched.sessions(tmp_path, 2, [{**normal, "name": "whole"}, stopped, dict(stopped)])
    assert [end[0] for end in first.ends] == [75, 75]
    assert second.status == 0, second.message
    assert first.attempts[-1].state["attempt"] == 12
    assert second.attempts[0].state["attempt"] == 13
    scales = [a.scale for a in whole.attempts]
    assert scales == [a.scale for a in [*first.attempts, *second.attempts]]
    assert len(set(scales)) > 2
    assert tiny.timeless(second.rows()) == tiny.timeless(whole.rows())
    assert tiny.same(second.ranks[0].end, whole.ranks[0].end)
