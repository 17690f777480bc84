"""Telemetry of whole runs: the same on every engine, as counted beside it, over the ranks' shards."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import watched
import worlds

pytestmark = pytest.mark.world

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"shard__engine": "ddp"},
    "fsdp2-3": {},
    "hsdp": {"shard__replicas": 2},
    "zero-2": {"shard__engine": "deepspeed", "shard__stage": 2},
    "zero-3": {"shard__engine": "deepspeed", "shard__stage": 3},
}
# A scale so low that the wire's FP16 flushes a part of what FP32 has computed.
WIRE = {"reduce__wire": "fp16", "precision__scale": {"mode": "static", "init": 2.0**-9}, "budget__steps": 2}
HALF = {"precision__compute": "fp16", "budget__steps": 2}


def count_casts() -> Callable[[], dict[str, list[float]]]:
    """Counts what this rank's casts to the wire lose, by themselves."""
    from mpdist.reduce import Wire

    own = Wire.__dict__.get("_own_cast", Wire._cast)
    Wire._own_cast = own  # type: ignore[attr-defined]
    seen: list[list[float]] = []

    def cast(self: Wire, tensor: Any, holders: int = 1) -> Any:
        sent = own(self, tensor, holders)
        gone = (tensor != 0) & (sent == 0)
        seen.append([float((tensor != 0).sum()), float(gone.sum()), float(sent.isinf().sum())])
        return sent

    Wire._cast = cast  # type: ignore[method-assign]
    return seen  # type: ignore[return-value]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, watched.Watched]:
    changes = [{**WIRE, **engine, "name": f"wire-{name}"} for name, engine in ENGINES.items()]
    floor = {"on_overflow": "retry", "floor": 32768.0}
    changes += [
        {**HALF, "name": "skipped", "drill__overflow_at": {"attempts": [2], "rank": 1}, "precision__scale": floor}
    ]
    changes += [{**HALF, "name": "sparse", "track__every": 2, "budget__steps": 3, "precision__keep_fp32": ["lm_head"]}]
    zero = [change for change in changes if change["name"] == "wire-zero-2"]  # DeepSpeed starts once in a process
    changes.remove(zero[0])
    found = watched.sessions(tmp_path_factory.mktemp("telemetry"), 2, changes, arm=count_casts)
    found += watched.sessions(tmp_path_factory.mktemp("zero"), 2, zero, arm=count_casts)
    return {run.folder.name: run for run in found}


@pytest.mark.parametrize("name", ENGINES)
def test_the_wires_losses_are_those_of_its_casts(
    runs: dict[str, watched.Watched], name: str, figure: Callable[[str], None]
) -> None:
    run = runs[f"wire-{name}"]
    assert run.ends == [(0, ""), (0, "")]
    rows = run.rows()
    shares = [row["precision/wire_flushed"] for row in rows]
    assert all(0.01 < share < 0.9 for share in shares)
    assert [row["precision/wire_overflowed"] for row in rows] == [0.0, 0.0]
    whole = [sum(cast[i] for seen in run.ranks for cast in seen.probe) for i in range(3)]
    figure(f"flushed in the cast to the FP16 wire: {sum(shares) / 2:.5f} told, {whole[1] / whole[0]:.5f} counted")
    # Both steps have about as many elements that are not zero; a mean of their shares is the share of all.
    assert sum(shares) / 2 == pytest.approx(whole[1] / whole[0], rel=1e-3)


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "ddp"])
def test_engines_report_alike(runs: dict[str, watched.Watched], name: str) -> None:
    first, other = runs["wire-ddp"].rows()[0], runs[f"wire-{name}"].rows()[0]
    figures = {key for key in first if key.startswith("precision/")} - {"precision/by_layer", "precision/wire_error"}
    assert {
        f"precision/{key}" for key in ("grad_zero", "unchanged_master", "update_ratio", "headroom_overflow")
    } < figures
    for key in figures:
        assert other[key] == pytest.approx(first[key], rel=2e-3, abs=1e-5), key
    ours, theirs = first["precision/by_layer"], other["precision/by_layer"]
    assert ours.keys() == theirs.keys()
    for key, values in ours.items():
        assert theirs[key] == pytest.approx(values, rel=5e-3, abs=1e-4), key


def test_layers_add_up_to_the_whole_and_have_their_names_once(runs: dict[str, watched.Watched]) -> None:
    run = runs["wire-fsdp2-3"]
    env = json.loads((run.folder / "sessions" / "0001" / "env.json").read_text())
    assert env["layers"] == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    for row in run.rows():
        layers = row["precision/by_layer"]
        assert all(len(values) == 5 for values in layers.values())
        assert sum(norm**2 for norm in layers["grad_norm"]) ** 0.5 == pytest.approx(row["train/grad_norm"], rel=1e-3)
        assert sum(norm**2 for norm in layers["weight_norm"]) ** 0.5 == pytest.approx(
            row["precision/weight_norm"], rel=1e-3
        )
        assert min(layers["headroom_overflow"]) == pytest.approx(row["precision/headroom_overflow"], abs=1e-2)
        assert row["precision/unchanged_master"] == 0.0  # FP32 masters take every update
        assert "precision/changed_fraction" not in row
        assert "precision/unchanged_working" not in row  # the masters compute
        assert len(json.dumps(layers)) < 1000


def test_a_skipped_attempts_overflow_is_told_with_the_step(runs: dict[str, watched.Watched]) -> None:
    rows = runs["skipped"].rows()
    assert [row["attempt"] for row in rows] == [1, 3]
    assert rows[0]["precision/grad_overflowed"] == 0.0
    assert 0 < rows[1]["precision/grad_overflowed"] < 1e-3  # one element, and what it met on its way
    where = [share > 0 for share in rows[1]["precision/by_layer"]["grad_overflowed"]]
    assert 1 <= sum(where) < len(where)


def test_a_scale_at_its_floor_is_told_once_and_the_end_names_a_static_one(runs: dict[str, watched.Watched]) -> None:
    run = runs["skipped"]
    told = [event for event in run.events("warning") if "check" in event]
    assert [(event["check"], event["attempt"]) for event in told] == [("scale at its floor", 2)]
    assert "precision.scale.floor" in told[0]["reason"]
    rows, (end,) = run.rows(), run.events("end")
    room = min(row["precision/headroom_overflow"] + math.log2(row["scale/value"]) for row in rows)
    assert end["static_scale"] == 2.0 ** min(math.floor(room) - 3, 14)  # a quarter of what has overflowed, at most


def test_only_logged_steps_are_measured_and_what_stays_in_fp32_is_cast_by_nobody(
    runs: dict[str, watched.Watched],
) -> None:
    rows = runs["sparse"].rows()
    assert [row["step"] for row in rows] == [2, 3]
    for row in rows:
        layers = row["precision/by_layer"]
        assert layers["grad_flushed"][-1] is None
        assert layers["unchanged_working"][-1] is None
        assert layers["grad_flushed"][1] == 0.0
        assert 0 < row["precision/unchanged_working"] < 1


def _changed(rank: int, lrs: list[float]) -> list[tuple[float, float, float]]:
    """One AdamW step on this rank's half of 100,000 weights (normal, sigma 0.02), for each lr: share of BF16 masters that
    changed, of their updates that were lost, of FP32 masters' updates that were lost."""
    import torch

    from mpdist.dist import build_mesh
    from mpdist.optim import Optimizer
    from mpdist.reduce import Wire
    from mpdist.shard import Part
    from mpdist.telemetry import Telemetry

    wire = Wire(build_mesh("cpu", 2, 2, False), torch.float32, True)
    g = torch.Generator().manual_seed(0)
    weights, gradient = torch.randn(100_000, generator=g) * 0.02, torch.randn(100_000, generator=g)
    own, found = slice(rank * 30_000, 30_000 + rank * 70_000), []
    for lr in lrs:
        row: list[float] = []
        for dtype in (torch.bfloat16, torch.float32):
            part = Part("w", weights[own].to(dtype), (100_000,), own.start, True)
            optimizer = Optimizer([part], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, decay="all", fused=True)
            telemetry = Telemetry(optimizer, wire, compute=lambda _: torch.bfloat16)
            telemetry.begin(True)
            telemetry.look([gradient[own].clone()], 1.0, True)
            telemetry.hold()
            optimizer.step([gradient[own].clone()], lr)
            figures = telemetry.read()
            row += [figures[name] for name in ("precision/changed_fraction",) if name in figures]
            row.append(figures["precision/unchanged_master"])
        found.append(tuple(row))
    return found  # type: ignore[return-value]


def test_c18_shares_of_updates_that_bf16_takes(figure: Callable[[str], None]) -> None:
    lrs = [1e-6, 1e-5, 1e-4]
    found = worlds.run(_changed, 2, lrs)
    assert found[0] == found[1]
    assert [changed for changed, _, _ in found[0]] == pytest.approx([0.020, 0.156, 0.882], abs=0.01)
    for lr, (changed, lost, single) in zip(lrs, found[0], strict=True):
        figure(f"lr {lr}: BF16 masters {changed:.2%} changed, FP32 masters {1 - single:.2%}")
        assert lost == pytest.approx(1 - changed, abs=1e-9)
        assert single < 1e-4
