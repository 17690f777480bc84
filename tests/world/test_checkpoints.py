"""Saves: who writes what and in how much memory, which checkpoints stay, and what a failed one does."""

from __future__ import annotations

import gc
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import engines
import pytest
import worlds
from tiny import Result, config, same, session, train, write_text

pytestmark = pytest.mark.world


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def manifest(run: Path, step: int) -> dict[str, Any]:
    return dict(json.loads((run / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text()))


def steps(*numbers: int) -> list[str]:
    return [f"step-{number:08d}" for number in numbers]


# -- which ones stay ------------------------------------------------------------------------------------------------------


def laid(folder: Path, losses: dict[int, float | None], best: int | None = None) -> Path:
    """Checkpoints that consist of a manifest, with the evaluation losses of their steps."""
    from mpdist.shelf import name_of, write_manifest

    for step, loss in losses.items():
        path = folder / name_of(step)
        path.mkdir(parents=True)
        write_manifest(path, {"format": 2, "step": step, "eval_loss": loss, "files": {}})
    if best is not None:
        (folder / "best").write_text(name_of(best) + "\n")
    return folder


def left(folder: Path) -> tuple[list[str], str | None]:
    pointer = folder / "best"
    there = sorted(path.name for path in folder.iterdir() if path.is_dir())
    return there, pointer.read_text().strip() if pointer.exists() else None


@pytest.mark.parametrize(
    ("losses", "keep", "keep_best", "stay", "best"),
    [
        ({1: 3.0, 2: 1.0, 3: 2.0, 4: math.nan, 5: math.inf, 6: None}, 2, 1, (2, 5, 6), 2),
        ({1: 3.0, 2: 1.0, 3: 2.0, 4: math.nan, 5: math.inf, 6: None}, 2, 2, (2, 3, 5, 6), 2),
        ({1: 3.0, 2: 1.0, 3: 2.0, 4: math.nan, 5: math.inf, 6: None}, 1, 9, (1, 2, 3, 6), 2),
        ({1: 1.0, 2: 2.0, 3: 3.0, 4: 2.5}, 2, 0, (3, 4), 4),
        ({1: 2.0, 2: 2.0, 3: 2.0, 4: 2.0}, 1, 1, (1, 4), 1),
        ({1: 2.0, 2: 2.0, 3: 2.0, 4: 2.0}, 1, 2, (1, 2, 4), 1),
        ({1: None, 2: None, 3: None}, 2, 1, (2, 3), None),
        ({1: -math.inf, 2: math.nan}, 1, 1, (2,), None),
        ({99_999_998: 1.0, 99_999_999: 2.0, 100_000_000: 3.0}, 2, 0, (99_999_999, 100_000_000), 99_999_999),
    ],
)
def test_the_newest_and_those_of_lowest_loss_stay(
    tmp_path: Path, losses: dict[int, float | None], keep: int, keep_best: int, stay: Iterable[int], best: int | None
) -> None:
    from mpdist.shelf import name_of, retain

    folder = laid(tmp_path / "checkpoints", losses, best=1)
    retain(folder, max(losses), keep, keep_best)
    assert left(folder) == (sorted(map(name_of, stay)), None if best is None else name_of(best))


def test_leftovers_and_what_is_not_ours_neither_block_nor_count(tmp_path: Path) -> None:
    from mpdist.shelf import MANIFEST, retain

    folder = laid(tmp_path, {1: 9.0, 2: 5.0, 3: 1.0, 4: 4.0, 5: 3.0, 6: 0.5, 7: 7.0, 9: 0.1}, best=3)
    for step, text in ((1, ""), (3, "{torn"), (6, (folder / "step-00000005" / MANIFEST).read_text())):
        (folder / f"step-{step:08d}" / MANIFEST).write_text(text)
    shutil.rmtree(folder / "step-00000002" / "nothing", ignore_errors=True)
    ours = ["step-00000004", "step-00000005", "step-00000006", "step-00000007", "step-00000009"]
    foreign = ["step-final", "step-00000003-copy", "step-3"]
    for name in [*foreign, ".step-00000003.old", ".step-00000008.aside"]:
        (folder / name).mkdir()
    (folder / ".step-00000004.old").write_text("a file")
    # 6 holds another's manifest, so 4, 5 and 7 are the newest three; 9 was passed over at a resume from 6 or before.
    retain(folder, 7, 3, 1)
    assert left(folder) == (sorted(ours + foreign), "step-00000005")
    assert not list(folder.glob(".*"))


def test_a_checkpoint_known_to_be_damaged_takes_no_whole_ones_place(tmp_path: Path) -> None:
    from mpdist.shelf import retain

    folder = laid(tmp_path, {20: 3.0, 30: 2.0, 33: 1.0, 40: 4.0}, best=20)
    retain(folder, 40, 2, 1, {"step-00000033"})
    assert left(folder) == (steps(30, 33, 40), "step-00000030"), "nor is it the best"
    laid(folder, {50: 5.0})
    retain(folder, 50, 2, 0, {"step-00000033"})
    assert left(folder) == (steps(40, 50), "step-00000040")
    folder = laid(tmp_path / "few", {10: None, 20: None, 30: None}, best=None)
    retain(folder, 30, 3, 0, {"step-00000010"})
    assert left(folder)[0] == steps(10, 20, 30), "two whole newer ones, and three are to be kept"


def test_events_say_which_checkpoints_are_damaged(tmp_path: Path) -> None:
    from mpdist.shelf import damaged

    assert damaged(tmp_path / "events.jsonl") == set()
    refused = [{"event": "refused", "checkpoint": f"step-0000000{n}"} for n in (1, 2, 3)]
    anew = {"event": "save", "reason": "published", "checkpoint": "step-00000002"}
    loaded = {"event": "load", "reason": "/runs/a/checkpoints/step-00000003"}
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in [*refused, anew, loaded]))
    assert damaged(tmp_path / "events.jsonl") == {"step-00000001"}


def test_a_kill_between_publishing_and_the_rest_is_mended_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpdist import shelf

    folder = laid(tmp_path, {1: 3.0, 2: 1.0, 3: 2.0, 4: 0.5}, best=2)  # 4 is there, `best` has not moved

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for where in ("rename", "rmtree"):
        with monkeypatch.context() as patch:
            patch.setattr(shelf.os if where == "rename" else shelf.shutil, where, die)
            with pytest.raises(KeyboardInterrupt):
                shelf.retain(folder, 4, 1, 1)
        assert (folder / "best").read_text() == "step-00000004\n", "pointers move before anything goes"
    laid(folder, {5: 4.0})
    shelf.retain(folder, 5, 1, 1)
    assert left(folder) == (steps(4, 5), "step-00000004")
    assert not list(folder.glob(".*"))


def test_best_is_the_checkpoint_of_lowest_evaluation_loss_in_this_run(tmp_path: Path) -> None:
    text = write_text(tmp_path / "eval.jsonl", 12, seed=1)
    base: dict[str, Any] = {
        "data__eval": [{"path": str(text)}], "eval": {"every": 2}, "budget__steps": 5,
        "optim": {"lr": 0.3, "schedule": "constant"},
    }  # fmt: skip
    first = train(tmp_path, 2, **base, checkpoint={"every": 1, "keep": 2, "keep_best": 1})
    assert first.status == 0, first.message
    losses = {row["step"]: row["eval/loss"] for row in first.rows("eval")}
    assert set(losses) == {2, 4, 5}
    best = min(losses, key=lambda step: losses[step])
    assert best < 4, "else the newest two would hold it"
    assert names(first.folder) == ["best", "latest", *steps(best, 4, 5)]
    assert (first.folder / "checkpoints" / "best").read_text() == f"step-{best:08d}\n"
    assert {step: manifest(first.folder, step)["eval_loss"] for step in (best, 4, 5)} == {
        step: losses[step] for step in (best, 4, 5)
    }
    # A new run from it has its own best, even if all its losses are higher.
    path = first.folder / "checkpoints" / f"step-{best:08d}"
    start = {"every": 1, "keep": 9, "resume": str(path)}
    branch = train(tmp_path, 2, **{**base, "name": "branch", "budget__steps": best + 2}, checkpoint=start)
    assert branch.status == 0, branch.message
    own = {row["step"]: row["eval/loss"] for row in branch.rows("eval")}
    assert (branch.folder / "checkpoints" / "best").read_text() == f"step-{min(own, key=lambda s: own[s]):08d}\n"
    assert manifest(branch.folder, best + 1)["eval_loss"] is None


def test_an_evaluation_after_the_last_save_is_noted_in_it(tmp_path: Path) -> None:
    """The last attempt is skipped, so the loop neither evaluates nor saves behind it."""
    text = write_text(tmp_path / "eval.jsonl", 12, seed=1)
    run = train(
        tmp_path, 2, precision={"compute": "fp16", "scale": {"on_overflow": "next"}}, budget={"epochs": 1.0},
        data={"tokenizer": "bytes", "seq_len": 64, "train": [{"path": str(write_text(tmp_path / "few.jsonl", 20))}],
              "eval": [{"path": str(text)}], "packing": "none", "too_long": "truncate"},
        drill={"overflow_at": {"attempts": [3], "rank": 1}}, eval={"every": 0}, checkpoint={"every": 1, "keep": 1},
    )  # fmt: skip
    assert run.status == 0, run.message
    assert run.column("step") == [1, 2]
    assert run.column("step", "eval") == [2]
    assert names(run.folder) == ["best", "latest", *steps(2)]
    assert manifest(run.folder, 2)["eval_loss"] == run.column("eval/loss", "eval")[0]


# -- saves and what is left of them ---------------------------------------------------------------------------------------


def test_c58_only_one_rank_publishes_and_leftovers_do_not_block_it(tmp_path: Path) -> None:
    base: dict[str, Any] = {"optim__horizon": 9, "checkpoint": {"every": 1, "keep": 2}}
    first = train(tmp_path, 2, **base, budget__steps=5)
    assert first.status == 0, first.message
    assert names(first.folder) == ["latest", *steps(4, 5)]
    folder = first.folder / "checkpoints"
    for step in (6, 7):
        for left in (f".step-{step:08d}.aside", f".step-{step:08d}.old"):
            (folder / left / "tensors").mkdir(parents=True)
            (folder / left / "tensors" / "__7_0.distcp").write_text("of an aborted save")
    (folder / "step-00000008").write_text("a file where a checkpoint is to be")
    (folder / ".step-00000008.old").write_text("likewise")
    again = train(tmp_path, 2, **base, budget__steps=9)
    assert again.status == 0, again.message
    assert names(again.folder) == ["latest", *steps(8, 9)]
    assert (folder / "latest").read_text() == "step-00000009\n"
    assert not list(folder.rglob("__7_0.distcp"))


def session_slow_to_write(rank: int, path: str, seconds: float) -> tuple[int, str]:
    from mpdist import checkpoint

    digests = checkpoint._digests

    def slowly(*args: Any) -> Any:
        time.sleep(seconds)
        return digests(*args)

    checkpoint._digests = slowly
    return session(rank, path, [])


@pytest.mark.parametrize("stopped", [True, False])
def test_the_end_waits_for_the_save_under_way(tmp_path: Path, stopped: bool) -> None:
    """Stopped in the step behind a save, or done with a save of the last step."""
    drill = {"stop_at": {"attempt": 3, "rank": 1}} if stopped else {}
    path = config(tmp_path, checkpoint__every=2, budget__steps=5 if stopped else 2, drill=drill)
    ends = worlds.run(session_slow_to_write, 2, str(path), 0.5)
    run = Result(tmp_path / "runs" / "run", ends)
    last = 3 if stopped else 2
    assert [status for status, _ in ends] == [75 if stopped else 0] * 2
    assert (run.folder / "checkpoints" / "latest").read_text() == f"step-{last:08d}\n"
    assert names(run.folder) == ["latest", *steps(*range(2, last + 1))]
    lines = (run.folder / "events.jsonl").read_text().splitlines()
    said = [(e["event"], e["step"], e["reason"]) for e in map(json.loads, lines)]
    assert said.index(("save", last, "published")) < [event for event, *_ in said].index("end")


def test_a_failed_save_ends_all_ranks_at_the_next_step(tmp_path: Path) -> None:
    drill = {"disk_full_at": {"save": 1, "rank": 1}}
    run = train(tmp_path, 2, checkpoint__every=20, budget__steps=60, drill=drill, optim__schedule="constant")
    assert [status for status, _ in run.ends] == [6, 6]
    assert all("rank 1" in message and "full" in message for _, message in run.ends)
    assert 20 <= run.column("step")[-1] < 40, "it is not found out by the next save"
    assert names(run.folder) == []


def test_a_failed_save_may_be_gone_on_from_but_not_the_last(tmp_path: Path) -> None:
    keep: dict[str, Any] = {"on_error": "go_on", "keep": 9}
    drill = {"disk_full_at": {"save": 1, "rank": 1}}
    run = train(tmp_path, 2, checkpoint={"every": 2, **keep}, budget__steps=6, drill=drill)
    assert run.status == 0, run.message
    assert names(run.folder) == ["latest", *steps(4, 6)]
    assert len(run.events("warning")) == 1
    # The disk has room again when the last one is tried anew.
    once = train(tmp_path, 2, name="once", checkpoint={"every": 0, **keep}, budget__steps=2, drill=drill)
    assert once.status == 0, once.message
    assert names(once.folder) == ["latest", *steps(2)]


def session_with_a_full_record(rank: int, path: str, word: str) -> tuple[int, str]:
    """Rank 0's history cannot take the line that a save is `word`."""
    from mpdist.errors import MachineError
    from mpdist.record import RunDir

    event = RunDir.event

    def full(self: Any, name: str, *args: Any, **values: Any) -> None:
        if name == "save" and values.get("reason") == word:
            raise MachineError("events.jsonl: cannot append a line")
        event(self, name, *args, **values)

    RunDir.event = full  # type: ignore[method-assign]
    return session(rank, path, [])


@pytest.mark.parametrize("word", ["written", "published"])
def test_rank_0_alone_failing_in_a_save_fails_it_everywhere(tmp_path: Path, word: str) -> None:
    path = config(tmp_path, checkpoint__every=2)
    ends = worlds.run(session_with_a_full_record, 2, str(path), word, timeout=40)
    assert [status for status, _ in ends] == [6, 6]
    assert all("failed on rank 0" in message and "cannot append" in message for _, message in ends)
    whole = ["latest", *steps(2)] if word == "published" else []
    assert names(tmp_path / "runs" / "run") == whole


# -- memory ---------------------------------------------------------------------------------------------------------------


def saved(rank: int, folder: str, layout: engines.Layout, background: bool) -> dict[str, Any]:
    """Collective. A checkpoint of a small model some steps old; what this rank held for it, and what all should hold."""
    from mpdist.saver import Saver

    made = rig(rank, layout, 7)
    for step in range(2):
        made.attempt(engines.draw(seed=step), 2)
    Path(folder, "hf").mkdir(parents=True, exist_ok=True)
    saver = Saver(Path(folder), background=background, hf=Path(folder, "hf"), published=quiet, written=quiet)
    state = {"step": 2, "config_digest": "", "versions": {}}
    saver.start(made.engine, made.optimizer, made.engine.module, state, quiet, None)
    saver.wait()
    copied = sum(copy.nbytes for copy in saver._copies.values())
    return {"copied": copied, "state": everything(made)}


def rig(rank: int, layout: engines.Layout, value: int) -> engines.Rig:
    """Collective. An odd vocabulary, and two buffers with this value, which the usual models do not have."""
    import torch

    made = engines.rig(rank, *layout[1:], vocab_size=97)
    made.engine.module.register_buffer("scalar", torch.tensor(value))
    made.engine.module.register_buffer("rows", torch.full((5, 3), float(value)))
    return made


def everything(made: engines.Rig) -> dict[str, Any]:
    """Collective. Masters, moments and persistent buffers, whole."""
    from mpdist.model import persistent_buffers

    found = made.full()
    found |= {f"buffer.{name}": buffer.clone() for name, buffer in persistent_buffers(made.engine.module)}
    for key in ("exp_avg", "exp_avg_sq"):
        moments = [made.optimizer.moments(i)[key] for i in range(len(made.optimizer.parts))]
        found |= {f"{key}.{name}": tensor for name, tensor in made.full(moments).items()}
    return found


def quiet(*_: Any) -> None:
    return None


def restored(rank: int, folders: list[str], layout: engines.Layout) -> list[dict[str, Any]]:
    from mpdist import restore

    made = rig(rank, layout, 0)
    found = []
    for folder in folders:
        restore.load(
            restore.open_checked(Path(folder, "step-00000002")), made.engine, made.optimizer, made.engine.module
        )
        found.append(everything(made))
    return found


def test_c56_ranks_share_out_what_they_copy_and_write_and_any_layout_loads_it(tmp_path: Path) -> None:
    folders, states = [], []
    for name in ("ddp", "fsdp2-2", "hsdp-1x2", "hsdp-2x2"):
        layout = engines.LAYOUTS[name]
        folder = tmp_path / name
        ranks = worlds.run(saved, layout.ranks, str(folder), layout, True)
        total = sum(tensor.nbytes for tensor in ranks[0]["state"].values())
        assert sum(rank["copied"] for rank in ranks) == total, "each element once"
        assert max(rank["copied"] for rank in ranks) < 1.1 * total / layout.ranks
        written = [path.stat().st_size for path in (folder / "step-00000002" / "tensors").glob("*.distcp")]
        assert len(written) == layout.ranks
        assert max(written) < 1.2 * sum(written) / layout.ranks
        folders.append(str(folder))
        states.append(ranks[0]["state"])
    for name in ("ddp", "fsdp2-3", "hsdp-2x2"):
        layout = engines.LAYOUTS[name]
        for rank in worlds.run(restored, layout.ranks, folders, layout):
            for state, expected in zip(rank, states, strict=True):
                assert same(state, expected)


def peak_of(act: Callable[[], None]) -> int:
    """Bytes by which this process's resident memory rises above what it is now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    act()
    return _memory("VmHWM") - before


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def rise(rank: int, folder: str, layout: engines.Layout) -> tuple[list[float], int]:
    """Collective. Peak extra memory of first a save in place, then one in the background, as shares of the full state."""
    from mpdist.saver import Saver

    big = {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 8, "num_attention_heads": 8,
           "num_key_value_heads": 8, "vocab_size": 8001}  # fmt: skip
    made = engines.rig(rank, *layout[1:], **big)
    for i in range(len(made.optimizer.parts)):  # zeros would not be resident
        made.optimizer.moments(i)["exp_avg"].normal_()
        made.optimizer.moments(i)["exp_avg_sq"].uniform_()
    full = sum(12 * math.prod(part.shape) for part in made.engine.parts)
    Path(folder, "hf").mkdir(parents=True, exist_ok=True)
    rises = []
    for step, background in enumerate((False, True)):
        saver = Saver(Path(folder), background=background, hf=Path(folder, "hf"), published=quiet, written=quiet)
        state = {"step": step, "config_digest": "", "versions": {}}

        def save(saver: Saver = saver, state: dict[str, Any] = state) -> None:
            saver.start(made.engine, made.optimizer, made.engine.module, state, quiet, None)
            saver.wait()

        rises.append(peak_of(save) / full)
    return rises, full


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2-2", "fsdp2-3", "hsdp-1x2"])
def test_c56_no_rank_gathers_the_state_to_save_it(tmp_path: Path, name: str) -> None:
    for rank, (rises, full) in enumerate(worlds.run(rise, 2, str(tmp_path), engines.LAYOUTS[name])):
        print(f"{name}, rank {rank}: {full / 1e6:.0f} MB of masters and moments, rise in place {rises[0]:.2f}, "
              f"in the background {rises[1]:.2f}")  # fmt: skip
        assert full > 590e6
        assert rises[0] < 0.15
        assert rises[1] < 0.6
