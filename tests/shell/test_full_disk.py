"""Real runs on a disk that is full: in a save, in the record, while the launcher starts. Nothing before that is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_disk
import tiny
from tiny import Result, same, timeless

pytestmark = pytest.mark.world

SCRIPT = Path(small_disk.__file__)
KINDS = ("model.", "exp_avg.", "exp_avg_sq.")


def namespace() -> list[str]:
    """The command that gives a process a mount table of its own."""
    unshare = shutil.which("unshare")
    for options in (["-Urm"], ["-m"]):
        mount = "mount -t tmpfs -o size=64k none /mnt && mount -o remount,size=128k /mnt"
        if unshare and subprocess.run([unshare, *options, "sh", "-c", mount], capture_output=True).returncode == 0:
            return [unshare, *options]
    pytest.skip("this machine allows no private mount namespace")


Left = list[tuple[dict[str, Any], Result]]


def played(folder: Path, *scenes: str) -> dict[str, Left]:
    """The facts of each session of a scene, and what it left."""
    libraries = [str(SCRIPT.parent), str(SCRIPT.parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(libraries), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*namespace(), sys.executable, str(SCRIPT), str(folder), *scenes], env=env,
                          capture_output=True, text=True, timeout=1200)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    return {
        scene: [(fact, Result(folder / f"{scene}-{n}", [(0, "")])) for n, fact in enumerate(facts[scene], 1)]
        for scene in scenes
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The same run, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    tiny.train(folder, 2, name="whole", budget__steps=small_disk.STEPS, batch=small_disk.BATCH)
    return Result(folder / "runs" / "whole", [(0, "")])


def equal(run: Result, whole: Result) -> None:
    assert timeless(run.rows()) == timeless(whole.rows())
    for kind in KINDS:
        assert same(run.weights(prefix=kind), whole.weights(prefix=kind))


def lying(run: Result) -> list[str]:
    return sorted(path.name for path in (run.folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Left]:
    return played(tmp_path_factory.mktemp("scenes"), "launched", "went_on", "in_flight")


@pytest.fixture(scope="module")
def launched(scenes: dict[str, Left]) -> Left:
    return scenes["launched"]


def test_c59_a_save_that_does_not_fit_ends_the_run_and_leaves_the_checkpoint_before(launched: Left) -> None:
    from mpdist.restore import fault_in

    fact, run = launched[0]
    assert fact["status"] == 6
    state = run.state()
    assert (state["state"], state["exit"]) == ("failed", 6)
    taken = [event for event in run.events("save") if event["reason"] == "taken"]
    assert [event["step"] for event in taken] == [10, 20]
    assert fact["ended"] - taken[-1]["time"] < 30
    assert fact["err"].splitlines()[-3].startswith(f"rank {state['rank']} failed: saving step-00000020 failed on rank")
    assert fact["err"].splitlines()[-2] == "  why: the disk is full or a quota is reached"
    assert "Traceback" not in fact["err"]
    assert lying(run) == ["latest", "step-00000010"]
    assert (run.folder / "checkpoints/latest").read_text() == "step-00000010\n"
    assert fault_in(run.folder / "checkpoints/step-00000010") is None


def test_c59_a_record_that_meets_the_full_disk_ends_the_run_with_its_reason_on_record(launched: Left) -> None:
    fact, run = launched[1]
    assert "resumed from step-00000010" in fact["out"]
    assert fact["status"] == 4
    state = run.state()
    assert (state["state"], state["exit"], state["rank"]) == ("failed", 4, 0)
    # The line may also meet the end of the room in its middle: the last page of a file is not another file's to fill.
    assert any(why in state["reason"] for why in ("No space left on device", " bytes fitted"))
    assert f"rank 0 failed: {state['reason']}\n" in fact["err"]
    assert "Traceback" not in fact["err"] + fact["out"]
    assert run.events("end")[-1]["exit"] == 4
    steps = run.column("step")
    assert steps == list(range(1, len(steps) + 1)), "no hole, no torn line"


def test_c59_on_a_full_disk_nothing_starts_and_the_run_stands(launched: Left) -> None:
    (_, before), (fact, run) = launched[1:3]
    assert fact["status"] == 4
    assert "Traceback" not in fact["err"]
    assert "make room" in fact["err"].splitlines()[-1]
    for name in ("status.json", "metrics.jsonl", "events.jsonl", "config.yaml"):
        assert (run.folder / name).read_bytes() == (before.folder / name).read_bytes()
    assert lying(run) == lying(before)


def test_c59_with_room_again_the_run_ends_as_if_the_disk_had_never_been_full(launched: Left, whole: Result) -> None:
    fact, run = launched[3]
    assert [status for status, _ in fact["ends"]] == [0, 0], fact["ends"]
    assert run.state()["state"] == "done"
    equal(run, whole)
    assert not (run.folder / ".reserve").exists()


def test_c59_told_to_go_on_it_trains_through_a_full_disk_and_saves_when_there_is_room(
    scenes: dict[str, Left], whole: Result
) -> None:
    ((fact, run),) = scenes["went_on"]
    assert [status for status, _ in fact["ends"]] == [0, 0]
    warnings = [event["reason"] for event in run.events("warning") if "run directory: " not in event["reason"]]
    assert warnings[-1].startswith("saving step-000000")
    assert warnings[-1].endswith("checkpoint.on_error = go_on, so training goes on without it")
    steps = [event["step"] for event in run.events("save") if event["reason"] == "published"]
    assert steps[0] == 10
    assert steps[-1] == 40
    assert 20 not in steps
    assert not [name for name in lying(run) if name.startswith(".")]
    equal(run, whole)


def test_c59_a_line_that_meets_the_disk_that_a_save_has_filled_waits_for_its_end(
    scenes: dict[str, Left], whole: Result
) -> None:
    (fact, run), (again, finished) = scenes["in_flight"]
    assert [status for status, _ in fact["ends"]] == [6, 6], fact["ends"]
    assert "the disk is full or a quota is reached" in fact["ends"][0][1]
    assert lying(run) == ["latest", "step-00000010"]
    steps = run.column("step")
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 20
    assert [status for status, _ in again["ends"]] == [0, 0]
    equal(finished, whole)
