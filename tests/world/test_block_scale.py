"""Scales of blocks in whole runs of two ranks: nothing changes but what FP16 loses, and all ranks agree on them."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import watched

pytestmark = pytest.mark.world

STEPS = 5
SHARDS: dict[str, dict[str, Any]] = {
    "ddp": {"shard__engine": "ddp", "shard__stage": 0},
    "fsdp2-2": {"shard__stage": 2, "memory__checkpointing": "full"},
    "hsdp": {"shard__stage": 3, "shard__replicas": 2, "reduce__when": "last"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, watched.Watched]:
    """3 blocks, 2 micro-batches a rank and window; the window's scale grows at step 3."""
    normal = {"model": {"config": {**tiny.LLAMA, "num_hidden_layers": 3}}, "precision__compute": "fp16",
              "budget__steps": STEPS, "precision__scale__interval": 3}  # fmt: skip
    on = {**normal, "precision__scale__per_block": True}
    drilled = {**on, "drill__overflow_at": {"attempts": [2], "rank": 1}}
    changes = [{**normal, "name": "off"}, *({**on, **shard, "name": name} for name, shard in SHARDS.items())]
    changes += [{**drilled, **SHARDS["ddp"], "name": "at the head"}, {**drilled, "name": "in a block"}]
    stop = {**drilled, "name": "stopped", "drill__stop_at": {"attempt": 4, "rank": 1}}
    names = [*(change["name"] for change in changes), "stopped", "resumed"]
    found = watched.sessions(tmp_path_factory.mktemp("blocks"), 2, [*changes, stop, dict(stop)])
    return dict(zip(names, found, strict=True))


def test_losses_are_those_of_one_scale_on_every_engine(runs: dict[str, watched.Watched]) -> None:
    off = runs["off"]
    assert off.status == 0, off.message
    for name in SHARDS:
        run = runs[name]
        assert run.status == 0, run.message
        assert run.column("train/loss") == pytest.approx(off.column("train/loss"), rel=1e-5)
        assert run.column("train/grad_norm") == pytest.approx(off.column("train/grad_norm"), rel=1e-4)
        assert run.column("scale/value") == off.column("scale/value") == [65536.0] * 3 + [131072.0] * 2
        # Unscaled, each layer's norm is what it was; at their scales gradients lie where they should.
        for mine, theirs in zip(run.rows(), off.rows(), strict=True):
            layers = [row["precision/by_layer"] for row in (mine, theirs)]
            assert layers[0]["grad_norm"] == pytest.approx(layers[1]["grad_norm"], rel=1e-2)
            assert mine["step"] == 1 or min(layers[0]["headroom_overflow"][1:4]) > 4
        assert [a.state for a in run.attempts] == [a.state for a in runs["ddp"].attempts]
    assert "blocks" not in off.attempts[-1].state
    assert "scale/block_min" not in off.rows()[-1]


def test_all_ranks_have_the_same_scales_and_tell_them(runs: dict[str, watched.Watched]) -> None:
    for run in (runs[name] for name in runs if name != "off"):
        states = [[attempt.state for attempt in seen.attempts] for seen in run.ranks]
        assert states[0] == states[1]
    states = [attempt.state["blocks"] for attempt in runs["ddp"].attempts]
    assert all(len(powers) == 3 for powers in states)
    assert len({tuple(powers) for powers in states}) > 1
    told = [(row["scale/block_min"], row["scale/block_max"]) for row in runs["ddp"].rows()]
    assert told == [(0, 0), *((min(powers), max(powers)) for powers in states[:-1])]


def test_a_blocks_overflow_leaves_the_windows_scale_and_the_heads_does_not(runs: dict[str, watched.Watched]) -> None:
    head, block = runs["at the head"], runs["in a block"]
    for run in (head, block):
        assert [end[0] for end in run.ends] == [0, 0]
        assert [a.applied for a in run.attempts] == [n != 2 for n in range(1, STEPS + 2)]
        assert [a.touched for a in run.attempts] == [a.applied for a in run.attempts]
        assert run.attempts[1].rows == run.attempts[2].rows  # tried again
        assert run.column("train/loss") == pytest.approx(runs["off"].column("train/loss"), rel=1e-5)
    before, after = (head.attempts[n].state["blocks"] for n in (0, 1))
    assert after == before
    assert [a.scale for a in head.attempts[:3]] == [65536.0, 65536.0, 32768.0]
    before, after = (block.attempts[n].state["blocks"] for n in (0, 1))
    assert after == [*before[:2], before[2] - 4]  # FSDP2 reduces the last block first
    assert [a.scale for a in block.attempts[:3]] == [65536.0] * 3
    (skip,), (finding,) = block.events("skip"), block.events("finding")
    assert (skip["scale"], skip["scale_after"], skip["blocks"]) == (65536, 65536, ["model.layers.2"])
    # The window is computed again at the scales that it had.
    assert (finding["reproduced"], finding["same_loss"], finding["kind"]) == (True, True, "addend")
    assert finding["parameter"].startswith("model.layers.2.")


def test_a_resumed_run_is_the_same_to_the_bit(runs: dict[str, watched.Watched]) -> None:
    whole, stopped, resumed = runs["in a block"], runs["stopped"], runs["resumed"]
    assert (stopped.status, resumed.status) == (75, 0)
    states = [a.state for a in (*stopped.attempts, *resumed.attempts)]
    assert states == [a.state for a in whole.attempts]
    assert tiny.timeless(resumed.rows()) == tiny.timeless(whole.rows())
    assert tiny.same(resumed.ranks[0].end, whole.ranks[0].end)
