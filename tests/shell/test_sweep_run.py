"""A sweep with real ranks, killed in its third arm, stopped there, and gone on with: nothing finished is repeated."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
from real_runs import Job, checkpoints, state

from mpdist.lines import read_json
from mpdist.record import read_metrics
from mpdist.sweep_file import read

pytestmark = pytest.mark.world

ORDER = ["fp32-seed0", "bf16-seed0", "fp16-seed0", "fp16-seed1", "bf16-seed1", "fp32-seed1"]
STEPS, SAVED = 40, 10  # some seconds, so that a signal finds the third run at work; steps from one save to the next


@dataclass
class Story:
    """What was seen after each of the three starts."""

    folder: Path
    killed: dict[str, Any]
    stopped: dict[str, Any]
    done: dict[str, Any]


def files(run: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p.relative_to(run)): (p.read_bytes(), p.stat().st_mtime_ns) for p in run.rglob("*") if p.is_file()}


def seen(job: Job, home: Path) -> dict[str, Any]:
    return {"status": job.process.returncode, "out": job.out, "err": job.err, "state": read_json(home / ORDER[2] / "status.json"),
            "finished": {name: files(home / name) for name in ORDER[:2]}, "left": job.alive(),
            "attempts": {name: attempts(home / name) for name in ORDER}}  # fmt: skip


def attempts(run: Path) -> dict[int, list[int]]:
    """Those that each session has made and told of, superseded ones too: of applied windows and of skipped ones."""
    found: dict[int, set[int]] = {}
    for file in (run / "metrics.jsonl", run / "events.jsonl"):
        for line in file.read_text().splitlines() if file.is_file() else ():
            if line.endswith("}"):  # a kill tears the last
                one = json.loads(line)
                if one.get("kind") == "train" or one.get("event") == "skip":
                    found.setdefault(one["session"], set()).add(one["attempt"])
    return {session: sorted(made) for session, made in sorted(found.items())}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("sweep")
    held_out = tiny.write_text(folder / "held_out.jsonl", 30, 7)
    config = tiny.config(folder, name="s", budget__steps=STEPS, eval__every=20, eval__rows=8, data__eval=[{"path": str(held_out)}],
                         checkpoint__every=SAVED, checkpoint__keep=2)  # fmt: skip
    home = folder / "runs" / "s"
    words = [sys.executable, "-m", "mpdist.cli", "sweep", str(config), "--vary", "precision.compute=fp32,bf16,fp16"]
    jobs: list[Job] = []

    def start() -> Job:
        jobs.append(
            Job([*words, "--seeds", "2", "--ranks", "1", "--no-compare"], home / ORDER[2], folder / f"job-{len(jobs)}")
        )
        return jobs[-1]

    try:
        first = start()
        first.wait_for_attempt(12)
        os.killpg(first.process.pid, signal.SIGKILL)
        first.process.wait()
        killed = seen(first, home)
        second = start()
        second.wait_for_attempt(15)
        second.process.send_signal(signal.SIGTERM)
        second.end()
        stopped = seen(second, home)
        third = start()
        third.end()
        yield Story(home, killed, stopped, seen(third, home))
    finally:
        for job in jobs:
            job.kill()


def test_a_sweep_killed_in_its_third_arm_repeats_nothing_that_was_finished(
    story: Story, figure: Callable[[str], None]
) -> None:
    assert story.killed["status"] == -signal.SIGKILL
    assert story.killed["state"]["state"] == "running", "it was killed at work"
    assert story.done["status"] == 0, story.done["err"]
    for name in ORDER[:2]:
        assert story.killed["finished"][name], "it was finished before"
        assert story.stopped["finished"][name] == story.killed["finished"][name], "not even a file was touched"
        assert story.done["finished"][name] == story.killed["finished"][name]
    sessions = {name: len(list((story.folder / name / "sessions").iterdir())) for name in ORDER}
    assert sessions == {name: 3 if name == ORDER[2] else 1 for name in ORDER}
    assert story.done["out"].count(": done before\n") == 2
    assert [state(story.folder / name)["state"] for name in ORDER] == ["done"] * len(ORDER)
    before, after = story.killed["attempts"], story.done["attempts"]
    assert [name for name in ORDER if before[name]] == ORDER[:3]
    for name in ORDER[:2]:
        assert before[name] == after[name], "no attempt more"
        assert before[name][1][-1] >= STEPS
    sessions_of = after[ORDER[2]]
    assert list(sessions_of) == [1, 2, 3]
    assert sessions_of[3][0] == sessions_of[2][-1] + 1, "a run that was stopped saved, and goes on behind it"
    for name, made in after.items():
        later = {session: own for session, own in made.items() if session not in before[name]}
        figure(f"{name}: {told(before[name])} when killed; after that {told(later)}")
    touched = sum(story.done["finished"][name] != story.killed["finished"][name] for name in ORDER[:2])
    count = sum(map(len, story.killed["finished"].values()))
    figure(f"the 2 runs that were finished when it was killed, {count} files: {touched} runs with a file that changed")


def told(made: dict[int, list[int]]) -> str:
    parts = [f"attempts {own[0]} to {own[-1]} in session {session}" for session, own in made.items()]
    return ", ".join(parts) or "nothing"


def test_a_stop_signal_to_the_sweep_saves_and_says_how_to_go_on(story: Story) -> None:
    assert story.stopped["status"] == 75, story.stopped["err"]
    assert story.stopped["state"]["state"] == "preempted"
    assert story.stopped["state"]["reason"] == "stopped by SIGTERM to mpdist launch"
    said = story.stopped["out"].splitlines()[-1]
    assert said.startswith("the sweep stops at fp16-seed0; 4 of 6 runs are left: the same command goes on")
    assert story.stopped["left"] == []


def test_the_arms_began_alike_and_were_seen_at_the_same_points(story: Story) -> None:
    sweep = read(story.folder)
    assert sweep is not None
    assert [run.path for run in sweep.runs] == ORDER
    rows = {name: read_metrics(story.folder / name) for name in ORDER}
    points = {tuple((row["kind"], row["step"], row["train/label_tokens"]) for row in rows[name]) for name in ORDER[:2]}
    assert len(points) == 1, "the same steps, with the same label tokens each"
    assert len(rows[ORDER[0]]) == STEPS + 2
    for fp32, *others in ((ORDER[0], *ORDER[1:3]), (ORDER[5], *ORDER[3:5])):
        first = state(story.folder / fp32)["first"]
        assert first["loss"] == rows[fp32][0]["train/loss"]
        for other in (state(story.folder / name)["first"] for name in others):
            assert first["label_tokens"] == other["label_tokens"]
            assert 0 < abs(first["loss"] - other["loss"]) < 1e-3, "other formats, the same weights and rows"
    seeds = {state(story.folder / name)["first"]["loss"] for name in (ORDER[0], ORDER[5])}
    assert len(seeds) == 2, "another seed is other weights"
    data = {json.dumps(read_json(story.folder / name / "sessions/0001/env.json")["data"]) for name in ORDER}  # type: ignore[index]
    assert len(data) == 1
    assert len(checkpoints(story.folder / ORDER[5])) > 0
