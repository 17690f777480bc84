"""Runs that end at odd moments, beside folders that are not theirs, on groups whose waits must be bounded."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import worlds
from tiny import Result, same, timeless, train, write_text

pytestmark = pytest.mark.world


def test_a_run_killed_before_its_first_checkpoint_begins_again_where_checkpoint_resume_says(tmp_path: Path) -> None:
    first = train(tmp_path, 1, name="first", budget__steps=3, optim__horizon=8)
    here = {"every": 0, "resume": str(first.folder / "checkpoints" / "step-00000003")}
    whole = train(tmp_path, 1, name="whole", budget__steps=6, optim__horizon=8, checkpoint=here)
    drill = {"kill_at": {"attempt": 6, "rank": "all"}}
    with pytest.raises(AssertionError, match="died"):
        train(tmp_path, 1, name="branch", budget__steps=6, optim__horizon=8, checkpoint=here, drill=drill)
    again = train(tmp_path, 1, name="branch", budget__steps=6, optim__horizon=8, checkpoint=here, drill=drill)
    assert again.status == 0, again.message
    assert timeless(again.rows()) == timeless(whole.rows())
    assert same(again.weights(), whole.weights())


def test_folders_beside_the_checkpoints_are_neither_loaded_nor_removed(tmp_path: Path) -> None:
    first = train(tmp_path, 1, budget__steps=2, optim__horizon=8, checkpoint={"every": 1, "keep": 1})
    folder = first.folder / "checkpoints"
    for name in ("step-final", "step-00000002-copy"):
        shutil.copytree(folder / "step-00000002", folder / name)
    left = [folder / ".step-00000001.aside", folder / ".step-00000003.old"]
    for path in left:
        path.mkdir()
        (path / "file").touch()
    again = train(tmp_path, 1, budget__steps=5, optim__horizon=8, checkpoint={"every": 1, "keep": 1})
    assert again.status == 0, again.message
    assert again.events("load")[0]["reason"].endswith("step-00000002")
    assert sorted(p.name for p in folder.glob("step-*")) == ["step-00000002-copy", "step-00000005", "step-final"]
    assert not any(path.exists() for path in left)
    assert train(tmp_path, 1, budget__steps=6, optim__horizon=8, checkpoint={"every": 1, "keep": 1}).status == 0
    assert Result(first.folder, [(0, "")]).events("load")[-1]["reason"].endswith("step-00000005")


def test_a_checkpoint_left_over_from_a_kill_does_not_keep_its_step_from_being_published(tmp_path: Path) -> None:
    from mpdist.checkpoint import _publish

    state = {"step": 7, "config_digest": "", "versions": {}}
    names = ("step-00000007", ".step-00000007.old", ".step-00000007.aside")
    final, old, aside = (tmp_path / name for name in names)
    for path in (final, old, aside):
        path.mkdir()
        (path / "file").write_text(path.name)
    worlds.run(_published, 1, _publish, final, aside, state)
    assert (final / "file").read_text() == aside.name
    assert [p.name for p in tmp_path.glob(".step*")] == []


def _published(rank: int, publish: Callable[..., Any], final: Path, aside: Path, state: dict[str, Any]) -> None:
    from mpdist.checkpoint import Snapshot

    publish(final, aside, [{"file": (1, "")}], Snapshot({}, {}, state))


def test_every_group_waits_as_long_as_the_config_says(tmp_path: Path) -> None:
    for layout in ((2, 4), (2, 2), (1, 2)):
        for waits in worlds.run(timeouts, 4, *layout, timeout=77.0):
            assert set(waits) == {timedelta(seconds=77)}


def timeouts(rank: int, shard: int, local: int) -> list[timedelta]:
    import torch

    from mpdist.dist import build_mesh

    mesh = build_mesh("cpu", shard, local)
    assert mesh.shard_mesh is not None
    groups = [level.group for level in (*mesh.scatter, *mesh.replicas)] + [mesh.shard_mesh.get_group()]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_a_rank_that_hangs_is_not_waited_for_longer_than_the_timeout(tmp_path: Path) -> None:
    drill = {"hang_at": {"attempt": 2, "rank": 1}}
    with pytest.raises(AssertionError, match=r"(?s)rank 0 failed.*Timed out"):
        train(tmp_path, 2, shard={"engine": "ddp"}, drill=drill, launch__timeout="3s", timeout=60)


def test_a_run_whose_data_files_changed_under_their_names_is_not_resumed(tmp_path: Path) -> None:
    write_text(tmp_path / "held.jsonl", 20)
    held = {"data__eval": [{"path": str(tmp_path / "held.jsonl")}], "eval": {"rows": 8}}
    first = train(tmp_path, 1, budget__steps=2, optim__horizon=8, **held)
    text = (tmp_path / "train.jsonl").read_text()
    write_text(tmp_path / "train.jsonl", 120, seed=1)
    changed = train(tmp_path, 2, budget__steps=4, optim__horizon=8, **held)
    assert [status for status, _ in changed.ends] == [2, 2]
    assert changed.message.startswith("data.train: what the files hold has changed since step-00000002")
    (tmp_path / "train.jsonl").write_text(text)
    write_text(tmp_path / "held.jsonl", 20, seed=1)
    assert "data.eval: what" in train(tmp_path, 1, budget__steps=4, optim__horizon=8, **held).message
    here = {"every": 0, "resume": str(first.folder / "checkpoints" / "step-00000002")}
    assert train(tmp_path, 1, name="new", budget__steps=4, optim__horizon=8, checkpoint=here, **held).status == 0
    write_text(tmp_path / "held.jsonl", 20)
    assert train(tmp_path, 1, budget__steps=4, optim__horizon=8, **held).status == 0


def test_an_end_while_a_larger_budget_starts_up_does_not_leave_the_run_as_finished(tmp_path: Path) -> None:
    train(tmp_path, 1, budget__steps=2, optim__horizon=8)
    text = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text("broken")
    # Under the tests' harness nobody records this end, as nobody records a kill.
    assert train(tmp_path, 1, budget__steps=4, optim__horizon=8).status == 2
    (tmp_path / "train.jsonl").write_text(text)
    again = train(tmp_path, 1, budget__steps=4, optim__horizon=8)
    assert again.column("step") == [1, 2, 3, 4]


def test_evaluation_rows_without_a_label_token_are_warned_of(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * 100, "completion": "b"}, {"prompt": "a", "completion": "b"}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(path), "format": "prompt_completion"}
    changes = {"data__eval": [source], "data__train": [source], "data__loss_on": "completion", "budget__steps": 1}
    run = train(tmp_path, 1, data__too_long="truncate", data__packing="none", eval={"rows": 1}, **changes)
    assert run.status == 0, run.message
    assert math.isnan(run.column("eval/loss", "eval")[0])
    assert "the first 1 rows of data.eval hold no label token" in run.events("warning")[-1]["reason"]


def test_broken_leftovers_in_the_data_cache_are_named_or_made_anew(tmp_path: Path) -> None:
    assert train(tmp_path, 1, budget__steps=1).status == 0
    cache = tmp_path / "runs" / ".data"
    (cache / "stamps.json").write_text("[1]")
    assert train(tmp_path, 1, name="stamps", budget__steps=1).status == 0
    bounds = next(cache.rglob("bounds.npy"))
    bounds.write_bytes(b"")
    broken = train(tmp_path, 1, name="bounds", budget__steps=1)
    assert broken.status == 2
    assert f"the prepared data in {bounds.parent} cannot be used" in broken.message


def test_a_data_cache_that_cannot_be_written_is_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = train(tmp_path, 2, data__cache=str(tmp_path / "file" / "cache"), budget__steps=1)
    assert [status for status, _ in run.ends] == [4, 4]
    assert f"{tmp_path / 'file' / 'cache'} cannot be written" in run.message


def test_a_new_run_of_another_precision_begins_with_its_own_loss_scale(tmp_path: Path) -> None:
    def branch(name: str, source: Result, **precision: Any) -> list[float]:
        here = {"every": 0, "resume": str(source.folder)}
        run = train(tmp_path, 1, name=name, precision=precision, budget__steps=4, optim__horizon=8, checkpoint=here)
        assert run.status == 0, run.message
        return run.column("scale/value")

    plain = train(tmp_path, 1, name="plain", budget__steps=2, optim__horizon=8)
    moving = {"compute": "fp16", "scale": {"init": 1024.0, "interval": 1}}
    half = train(tmp_path, 1, name="half", precision=moving, budget__steps=2, optim__horizon=8)
    assert half.column("scale/value") == [1024.0, 2048.0]
    assert branch("to-half", plain, compute="fp16") == [65536.0, 65536.0]
    assert branch("to-static", plain, compute="fp16", scale={"mode": "static", "init": 512.0}) == [512.0, 512.0]
    assert branch("to-plain", half, compute="fp32") == [1.0, 1.0]
    assert branch("goes-on", half, compute="fp16") == [4096.0, 4096.0]
