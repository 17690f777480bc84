"""Real ranks that die, raise, leave or hang, under the launcher and under plain torchrun: who is named, who is left."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from real_runs import ROOT, Job, Jobs, jobs_in, left, state

pytestmark = pytest.mark.world

Figure = Callable[[str], None]


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    with jobs_in(tmp_path) as started:
        yield started


def named(
    job: Job, figure: Figure, status: int, rank: int | None, reason: str, within_s: float | None = None
) -> dict[str, Any]:
    """What must hold after a failure under the launcher; status.json. within_s: from here on, the fault having been."""
    began = time.monotonic()
    assert job.end(within_s or 120) == status, (job.out, job.err)
    took = f", {time.monotonic() - began:.1f} s after the signal (bound {within_s:.0f} s)" if within_s else ""
    figure(f"exit {job.process.returncode}{took}, {len(job.alive())} processes left: {state(job.run)['reason']}")
    recorded = state(job.run)
    assert (recorded["state"], recorded["rank"], recorded["exit"]) == ("failed", rank, status)
    assert recorded["reason"].startswith(reason)
    assert reason in [line for line in job.err.splitlines() if not line.startswith("  ")][-1]
    end = left(job).events("end")[-1]
    assert (end["rank"], end["session"], end["step"]) == (rank or 0, job.session, recorded["step"])
    return recorded


def test_c93_c94_a_rank_that_dies_raises_or_leaves_is_named_and_nobody_is_left(
    tmp_path: Path, jobs: Jobs, figure: Figure
) -> None:
    faults = {"raise_at": {"attempt": 12}, "exit_at": {"attempt": 20, "code": 0}, "hang_at": {"attempt": 25}}
    drill = {name: {**fault, "rank": 1} for name, fault in faults.items()}
    config = tiny.config(tmp_path, drill=drill, budget__steps=2000, checkpoint__every=5)

    job = jobs.launch(config)
    os.kill(job.wait_for_attempt(7, rank=1)[1].pid, signal.SIGKILL)
    killed = named(job, figure, 4, 1, "rank 1 was killed by SIGKILL", within_s=30)
    assert killed["step"] >= 6
    assert "the one to read: rank-00001.log" in job.err

    job = jobs.launch(config)
    assert named(job, figure, 1, 1, "RuntimeError: drill: raised at attempt 12 on rank 1")["step"] == 11
    assert job.err.splitlines()[-1] == "rank 1 failed: RuntimeError: drill: raised at attempt 12 on rank 1"
    assert "Traceback" in job.err
    assert "Connection closed" not in job.err, "a victim has the last word"
    assert job.log("rank-00001").endswith("rank 1 failed: RuntimeError: drill: raised at attempt 12 on rank 1\n")
    assert "Traceback" in job.log("rank-00000"), "what each rank saw is in its log"

    job = jobs.launch(config)
    named(job, figure, 1, 1, "rank 1 left at step 19 with status 0")
    assert "resumed from step-000000" in job.out

    # The first signal cannot be obeyed while a rank hangs; the second needs nobody's consent.
    job = jobs.launch(config)
    job.wait_for_attempt(25, rank=1)
    os.killpg(job.process.pid, signal.SIGINT)
    job.until(lambda: "SIGINT: stopping at the next step boundary" in job.out)
    os.killpg(job.process.pid, signal.SIGINT)
    named(job, figure, 130, None, "ended at once by a second SIGINT", within_s=15)


def test_c93_c94_under_bare_torchrun_the_ranks_say_it_themselves(tmp_path: Path, jobs: Jobs) -> None:
    drill = {"raise_at": {"attempt": 3, "rank": 1}, "exit_at": {"attempt": 5, "rank": 1, "code": 0}}
    config = tiny.config(tmp_path, drill=drill, budget__steps=50, track__wandb={"mode": "offline"})

    job = jobs.torchrun(config, WANDB_MODE="disabled")
    assert job.end() == 1
    recorded = state(job.run)
    assert (recorded["state"], recorded["rank"], recorded["step"]) == ("failed", 1, 2)
    assert recorded["reason"] == "RuntimeError: drill: raised at attempt 3 on rank 1"
    ours = job.err.partition("torch/distributed/elastic")[0].splitlines()
    # torchrun's own lines come between them whenever it likes.
    said = [line for line in job.err.splitlines() if line.startswith("rank ")]
    assert said[-1] == "rank 1 failed: RuntimeError: drill: raised at attempt 3 on rank 1"
    assert sum(line.startswith("Traceback") for line in ours) == 1, "the victim's is in its log"
    assert not (job.run / "wandb").exists(), "WANDB_MODE=disabled is a stricter wish than the configuration's"

    job = jobs.torchrun(config, WANDB_MODE="disabled")
    assert job.end() == 1
    recorded = state(job.run)
    assert (recorded["state"], recorded["rank"], recorded["step"]) == ("failed", 1, 4)
    assert recorded["reason"].startswith("rank 1 left at step 4")
    assert job.err.partition("torch/distributed/elastic")[0].splitlines()[-4] == recorded["reason"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_all_ranks_meet_alike_has_one_end_of_one_rank(tmp_path: Path, jobs: Jobs, ranks: int) -> None:
    config = tiny.config(tmp_path)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    job = jobs.launch(config, f"data.train.0.path={empty}", "--ranks", str(ranks))
    assert job.end() == 2, (job.out, job.err)
    recorded = state(job.run)
    (end,) = left(job).events("end")
    assert (end["rank"], end["exit"], end["reason"]) == (recorded["rank"], 2, recorded["reason"])
    assert recorded["reason"].startswith("0 of 0 rows have loss tokens")
    assert f"rank {recorded['rank']} failed: 0 of 0 rows have loss tokens" in job.err


def test_c93_a_hang_ends_with_the_rank_the_collective_and_the_stack(tmp_path: Path, jobs: Jobs) -> None:
    started = {}
    for rank, ranks in ((1, 2), (0, 1)):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        config = tiny.config(folder, drill={"hang_at": {"attempt": 3, "rank": rank}}, launch__timeout="10s")
        started[rank] = jobs.launch(config, "--ranks", str(ranks))
    # The rank that waits has a timeout; the rank that is alone would be silent for ever.
    why = {1: "rank 0 gave up: RuntimeError: Timed out waiting 10000ms", 0: "no rank of this node has moved for "}
    for rank, job in started.items():
        job.wait_for_attempt(3, rank=rank)
        assert job.end(60) == 4, (job.out, job.err)
        recorded = state(job.run)
        assert (recorded["state"], recorded["rank"], recorded["exit"], recorded["step"]) == ("failed", rank, 4, 2)
        assert recorded["reason"].startswith(
            f"rank {rank} stopped answering at attempt 3 (train) (a drill); {why[rank]}"
        )
        assert f"; rank {rank} in drill.strike (mpdist/drill.py:" in recorded["reason"]
        head, reason, title, top, *_ = job.err.splitlines()
        assert head.endswith(f"the one to read: rank-{rank:05d}.log")
        assert reason == recorded["reason"]
        assert title == f"  rank {rank}, most recent call first:"
        assert top.startswith("    drill.strike (mpdist/drill.py:")
        assert "    train.loop (mpdist/train.py:" in job.err
        assert left(job).events("end")[-1]["reason"] == recorded["reason"]
        (noticed,) = left(job).events("finding")
        assert (noticed["rank"], noticed["step"], noticed["attempt"]) == (rank, 2, 3)
        assert f" s; {noticed['reason']}\n" in job.out
        assert "in strike" in job.log(f"rank-{rank:05d}")
    waiting = "rank 0 waiting in all_gather_single in train.micros (mpdist/train.py:"
    assert waiting in state(started[1].run)["reason"]
    assert waiting in left(started[1]).events("finding")[0]["reason"]


def listens(port: int) -> bool:
    """Whether a process of this machine waits for connections to the port."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return any(words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port for words in lines)


def test_c91_a_rank_that_does_not_come_is_named_in_time(tmp_path: Path, jobs: Jobs, figure: Figure) -> None:
    config = tiny.config(tmp_path, launch__timeout="10s")
    ports = []
    with socket.socket() as one, socket.socket() as two:
        for free in (one, two):
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    alone = [jobs.rank(config, rank, port) for rank, port in enumerate(ports)]
    first, second = alone
    first.until(lambda: listens(ports[0]))  # imports take as long as they take
    began = time.monotonic()
    assert first.end(20) == 4
    seconds = time.monotonic() - began
    assert "rank 1 missing: 1 of 2 ranks did not start" in first.err
    assert "launch.timeout = 10 s" in first.err
    assert second.end(60) == 4
    assert f"rank 1 cannot reach the meeting point 127.0.0.1:{ports[1]}" in second.err
    for job in alone:
        assert "Traceback" not in job.err
    said = next(line for line in first.err.splitlines() if "rank 1 missing" in line)
    figure(f"1 of 2 ranks started, launch.timeout 10 s: exit 4 after {seconds:.1f} s of waiting (bound 20 s): {said}")
    assert not (tmp_path / "runs" / "run").exists()


def test_c88_a_busy_port_and_a_directory_in_use_are_refused(tmp_path: Path, jobs: Jobs, figure: Figure) -> None:
    config = tiny.config(tmp_path)
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = busy.getsockname()[1]
        job = jobs.launch(config, f"launch.port={port}")
        assert job.end() == 4
        assert str(port) in job.err.splitlines()[-1]
        assert "Traceback" not in job.err
        figure(f"launch.port={port} in use: exit 4, last line: {job.err.splitlines()[-1]}")
    job = jobs.launch(config, "launch.port=66660")
    assert job.end() == 2
    assert "66660" in job.err
    assert not (tmp_path / "runs").exists()
    figure(f"launch.port=66660: exit {job.process.returncode}")


# W&B's package as a run imports it, with a third row that it cannot take.
RAISING = """
class Settings:
    model_fields = {}
    base_url = "http://127.0.0.1:9"
    def __init__(self, **given): pass
class Run:
    dir, url, calls = ".", None, 0
    def define_metric(self, *a, **k): pass
    def mark_preempting(self): pass
    def save(self, *a, **k): pass
    def finish(self, exit_code=0): pass
    def log(self, row):
        Run.calls += 1
        if Run.calls == 3: raise RuntimeError("boom")
def setup(settings=None): return type("S", (), {"settings": Settings})
def init(**given): return Run()
def teardown(): pass
def login(prompt=True): return True
"""


def test_c102_a_tracker_that_raises_at_the_third_row_costs_a_run_nothing(
    tmp_path: Path, jobs: Jobs, figure: Figure
) -> None:
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "wandb.py").write_text(RAISING)
    config = tiny.config(tmp_path, budget__steps=5, track__wandb={"mode": "offline"})
    job = jobs.launch(config, PYTHONPATH=f"{tmp_path / 'stub'}:{ROOT}")
    assert job.end() == 0, (job.out, job.err)
    assert left(job).column("step") == [1, 2, 3, 4, 5]
    warnings = [event["reason"] for event in left(job).events("warning") if "W&B" in event["reason"]]
    assert len(warnings) == sum("warning: W&B" in line for line in job.out.splitlines()) == 1
    assert "boom" in warnings[0]
    figure(f"exit {job.process.returncode}, {len(left(job).rows())} rows, {len(warnings)} warning: {warnings[0]}")
