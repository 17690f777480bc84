"""A run that stopped and went on equals one that did not, in every number but the times."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import worlds
from tiny import LLAMA, Result, config, same, session, timeless, train, train_each, write_text

pytestmark = pytest.mark.world

# Packed rows, dropout, FP16 with skips at the start, in the middle and by a scale that grows too high.
HARD: dict[str, Any] = {
    "model__config": {**LLAMA, "attention_dropout": 0.1},
    "precision": {"compute": "fp16", "scale": {"interval": 3}},
    "drill": {"overflow_at": {"attempts": [2, 9, 10, 17], "rank": 1}},
    "optim": {"lr": 1e-2, "warmup": 3, "schedule": "cosine"},
    "data__packing": "best_fit",
    "data__seq_len": 32,
    "budget__steps": 20,
}


ENGINES: dict[str, dict[str, Any]] = {"ddp": {"engine": "ddp"}, "fsdp2-3": {"engine": "fsdp2", "stage": 3}}
CUTS = {1: "USR1", 7: "INT", 13: "TERM"}  # after this step, by this signal


def test_stopped_after_k_steps_and_resumed_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    asked = [{**HARD, "shard": shard, "name": f"{name}-whole"} for name, shard in ENGINES.items()]
    wholes = dict(zip(ENGINES, train_each(tmp_path, 2, asked), strict=True))
    cut: dict[tuple[str, int], dict[str, Any]] = {}
    for name, whole in wholes.items():
        assert whole.status == 0
        assert whole.state()["attempt"] > 20
        for k, how in CUTS.items():
            stop = {"attempt": whole.column("attempt")[k - 1], "rank": k % 2, "signal": how}
            drill = {**HARD["drill"], "stop_at": stop}
            cut[name, k] = {**HARD, "shard": ENGINES[name], "name": f"{name}-{k}", "drill": drill}
    for (_, k), first in zip(cut, train_each(tmp_path, 2, list(cut.values())), strict=True):
        assert [status for status, _ in first.ends] == [75, 75]
        assert first.state()["state"] == "preempted"
        assert [(e["state"], e["exit"]) for e in first.events("end")] == [("preempted", 75)]
        assert first.column("step")[-1] == k
    for (name, _), again in zip(cut, train_each(tmp_path, 2, list(cut.values())), strict=True):
        assert again.status == 0, again.message
        assert [(e["state"], e["exit"]) for e in again.events("end")] == [("preempted", 75), ("done", 0)]
        assert timeless(again.rows()) == timeless(wholes[name].rows())
        for prefix in ("model.", "exp_avg.", "exp_avg_sq."):
            assert same(again.weights(prefix=prefix), wholes[name].weights(prefix=prefix))


def test_a_finished_run_launched_again_changes_nothing(tmp_path: Path) -> None:
    first = train(tmp_path, 1)
    before = {p: p.stat().st_mtime_ns for p in first.folder.rglob("*") if p.is_file()}
    assert train(tmp_path, 1).status == 0
    assert {p: p.stat().st_mtime_ns for p in first.folder.rglob("*") if p.is_file()} == before


def test_a_larger_budget_under_an_explicit_horizon_goes_on(tmp_path: Path) -> None:
    whole = train(tmp_path, 2, name="whole", optim__horizon=12, budget__steps=12)
    train(tmp_path, 2, name="parts", optim__horizon=12, budget__steps=5)
    parts = train(tmp_path, 2, name="parts", optim__horizon=12, budget__steps=12)
    assert timeless(parts.rows()) == timeless(whole.rows())
    assert same(parts.weights(), whole.weights())


def test_an_altered_checkpoint_is_named_and_passed_over(tmp_path: Path) -> None:
    here = {"every": 1, "background": False}
    drill = {"kill_at": {"attempt": 4, "rank": "all"}}
    with pytest.raises(AssertionError, match="died"):
        train(tmp_path, 2, checkpoint=here, budget__steps=5, drill=drill)
    newest = tmp_path / "runs" / "run" / "checkpoints" / "step-00000003"
    victim = next((newest / "tensors").glob("*.distcp"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    again = train(tmp_path, 2, checkpoint=here, budget__steps=5, drill=drill)
    assert again.status == 0, again.message
    refused = again.events("refused")[0]
    assert refused["checkpoint"] == "step-00000003"
    assert refused["file"] == f"tensors/{victim.name}"
    whole = train(tmp_path, 2, name="whole", budget__steps=5)
    assert timeless(again.rows()) == timeless(whole.rows())


def test_a_damaged_checkpoint_costs_no_whole_one(tmp_path: Path) -> None:
    always: dict[str, Any] = {"checkpoint": {"every": 0, "keep": 2}, "optim__horizon": 5}
    drill = {"corrupt_at": {"save": 2, "how": "flip"}}
    for steps in (2, 3, 5):
        run = train(tmp_path, 1, budget__steps=steps, drill=drill, **always)
        assert run.status == 0, run.message
    assert [event["checkpoint"] for event in run.events("refused")] == ["step-00000003"]
    there = {path.name for path in (run.folder / "checkpoints").glob("step-*")} - {"step-00000003"}
    assert there == {"step-00000002", "step-00000005"}


def test_a_rehearsed_damage_is_passed_over_in_any_form(tmp_path: Path) -> None:
    always: dict[str, Any] = {"checkpoint__every": 1, "optim__horizon": 7}
    hurt = {
        save: {"corrupt_at": {"save": save, "how": how}} for save, how in ((2, "flip"), (4, "truncate"), (6, "stale"))
    }
    asked = [{"name": "whole", "budget__steps": 7, **always}]
    asked += [{"budget__steps": save, "drill": damage, **always} for save, damage in hurt.items()]
    asked += [{"budget__steps": 7, "drill": hurt[6], **always}]
    whole, *damaged, again = train_each(tmp_path, 2, asked)
    assert [run.status for run in (whole, *damaged, again)] == [0] * 5, [run.message for run in damaged]
    drills = [(event["reason"], event["rank"]) for event in again.events("drill")]
    assert drills == [(f"corrupt_at#{save}", 0) for save in hurt], "a save that is made again is not damaged again"
    refused = again.events("refused")
    assert [event["checkpoint"] for event in refused] == [f"step-{step:08d}" for step in (2, 4, 6)]
    assert {event["file"] for event in refused} <= {"tensors/__0_0.distcp", "tensors/__1_0.distcp"}
    assert " bytes, not " in refused[1]["reason"]
    assert all("was altered" in event["reason"] for event in refused[::2])
    assert timeless(again.rows()) == timeless(whole.rows())
    assert same(again.weights(), whole.weights())


def test_with_no_whole_checkpoint_left_the_run_ends_with_status_6_and_writes_nothing(tmp_path: Path) -> None:
    first = train(tmp_path, 1, budget__steps=2, optim__horizon=4)
    (first.folder / "checkpoints" / "step-00000002" / "state.json").unlink()
    again = train(tmp_path, 1, budget__steps=4, optim__horizon=4)
    assert again.status == 6
    assert "state.json is missing" in again.events("refused")[0]["reason"]
    assert again.column("step") == [1, 2]


def test_a_new_run_starts_from_the_whole_state_of_another_ones_checkpoint(tmp_path: Path) -> None:
    whole = train(tmp_path, 2, name="whole", budget__steps=8, optim__horizon=8)
    first = train(tmp_path, 2, name="first", budget__steps=3, optim__horizon=8)
    path = first.folder / "checkpoints" / "step-00000003"
    branch = train(
        tmp_path, 2, name="branch", budget__steps=8, optim__horizon=8, checkpoint={"every": 0, "resume": str(path)}
    )
    assert branch.status == 0, branch.message
    assert timeless(branch.rows()) == timeless(whole.rows())[3:]
    assert same(branch.weights(), whole.weights())


def test_kill_inside_a_save_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    drill = {"kill_at": {"attempt": 3, "rank": 1, "phase": "save"}}
    with pytest.raises(AssertionError, match=r"died|failed"):
        train(tmp_path, 2, checkpoint__every=1, drill=drill, launch__timeout="5s", timeout=40)
    names = sorted(p.name for p in (tmp_path / "runs" / "run" / "checkpoints").glob("step-*"))
    assert names == ["step-00000001", "step-00000002"]
    again = train(tmp_path, 2, checkpoint__every=1, drill=drill)
    assert again.status == 0, again.message
    assert timeless(again.rows()) == timeless(train(tmp_path, 2, name="whole").rows())


def test_a_full_disk_keeps_the_checkpoint_before_and_tells_all_ranks(tmp_path: Path) -> None:
    drill = {"disk_full_at": {"save": 2, "rank": 1}}
    full = train(tmp_path, 2, checkpoint__every=2, drill=drill)
    assert [status for status, _ in full.ends] == [6, 6]
    assert "rank 1" in full.message
    assert "full" in full.message
    assert sorted(p.name for p in (full.folder / "checkpoints").iterdir()) == ["latest", "step-00000002"]
    again = train(tmp_path, 2, checkpoint__every=2, drill=drill)
    assert again.status == 0, again.message
    assert timeless(again.rows()) == timeless(train(tmp_path, 2, name="whole").rows())


def test_a_stop_file_in_the_run_directory_stops_the_run_once(tmp_path: Path) -> None:
    whole = train(tmp_path, 2, name="whole", budget__steps=6)
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    (folder / "sessions").mkdir()  # what a launch leaves that failed early
    begun = train(tmp_path, 2, budget__steps=6, drill={"stop_at": {"attempt": 1, "rank": 0}})
    assert begun.status == 75
    (folder / "STOP").touch()
    stopped = train(tmp_path, 2, budget__steps=6)
    assert [status for status, _ in stopped.ends] == [75, 75]
    assert stopped.column("step") == [1, 2]
    assert stopped.state()["reason"] == "stopped by the file STOP"
    assert not (folder / "STOP").exists(), "it stops one session"
    path = str(config(tmp_path, budget__steps=6))
    told = worlds.run(session_all_told, 2, path)
    assert [status for status, _ in told] == [75, 75]
    assert (stopped.column("step"), stopped.state()["reason"]) == ([1, 2, 3], "stopped by SIGTERM")
    assert [event["step"] for event in stopped.events("save") if event["reason"] == "published"] == [1, 2, 3]
    again = train(tmp_path, 2, budget__steps=6)
    assert again.status == 0, again.message
    assert timeless(again.rows()) == timeless(whole.rows())


def session_all_told(rank: int, path: str) -> tuple[int, str]:
    """Each rank gets SIGTERM in its first attempt, as when a scheduler signals every process of a job."""
    from mpdist import train as loop

    attempt = loop.attempt

    def told(s: Any, batch: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return attempt(s, batch)

    loop.attempt = told
    return session(rank, path, [])


def test_c96_a_signal_within_an_evaluation_stops_all_ranks_at_the_next_step(
    tmp_path: Path, figure: Callable[[str], None]
) -> None:
    """The second of ten steps is evaluated, within the warm-up; rank 1 alone is told."""
    held = str(write_text(tmp_path / "held.jsonl", 8, seed=1))
    asked = {
        "budget__steps": 10, "eval": {"every": 2}, "data__eval": [{"path": held}],
        "optim": {"lr": 1e-3, "schedule": "cosine", "warmup": 4},
    }  # fmt: skip
    whole = train(tmp_path, 2, name="whole", **asked)
    path = str(config(tmp_path, **asked))
    ends = worlds.run(session_told_in_evaluation, 2, path)
    assert [status for status, _ in ends] == [75, 75]
    run = Result(tmp_path / "runs" / "run", ends)
    assert [row["step"] for row in run.rows("eval")] == [2]
    stop, (save,) = run.state()["step"], [e["step"] for e in run.events("save") if e["reason"] == "published"]
    assert stop == save == run.column("step")[-1] == 3
    again = train(tmp_path, 2, **asked)
    assert again.status == 0, again.message
    for kind in ("train", "eval"):
        assert timeless(again.rows(kind)) == timeless(whole.rows(kind))
    figure(
        f"TERM to rank 1 within the evaluation at step 2: exits {[status for status, _ in ends]}, one save at step {save}; "
        f"resumed: {len(again.rows())} train and {len(again.rows('eval'))} eval rows equal to the undisturbed run's"
    )


def session_told_in_evaluation(rank: int, path: str) -> tuple[int, str]:
    from mpdist import session as module

    mean_loss = module.mean_loss

    def told(*arguments: Any, **options: Any) -> Any:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return mean_loss(*arguments, **options)

    module.mean_loss = told
    return session(rank, path, [])


def test_growth_of_the_scale_is_an_event_also_between_logged_steps(tmp_path: Path) -> None:
    run = train(tmp_path, 1, precision={"compute": "fp16", "scale": {"interval": 2}}, track__every=100, budget__steps=5)
    moves = [(event["step"], event["before"], event["scale"]) for event in run.events("scale")]
    assert moves == [(2, 65536.0, 131072.0), (4, 131072.0, 262144.0)]
