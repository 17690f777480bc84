"""The launcher with a real torchrun and ranks that need no torch: ends, signals, and nobody left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpdist import watch

HERE = Path(__file__).parent
BOUND_S = 120
CONFIG = """
name: a
model: {config: {model_type: llama, vocab_size: 259, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4}}
data: {train: [{path: x.txt, format: text}], tokenizer: bytes, seq_len: 64}
batch: {micro: 1, global: 4}
budget: {steps: 10}
launch: {device: cpu}
"""


class Launched:
    """A launcher under way; everything of it dies with the test."""

    def __init__(self, folder: Path, fake: dict[str, Any], *overrides: str, ranks: int | str = 2) -> None:
        (folder / "asked.yaml").write_text(CONFIG)
        (folder / "x.txt").write_text("a text")
        self.run = folder / "runs" / "a"
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MPDIST_"))}
        env["FAKE"] = json.dumps(fake)
        env["PYTHONPATH"] = str(HERE.parent.parent)
        env.pop("OMP_NUM_THREADS", None)
        command = [sys.executable, str(HERE / "drive.py"), str(folder / "asked.yaml"), str(ranks)]
        self.process = subprocess.Popen(
            [*command, f"out_dir={folder / 'runs'}", f"data.train.0.path={folder / 'x.txt'}", *overrides],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.out = self.err = ""

    def end(self) -> int:
        """Its exit status; fails the test if it does not end, or leaves processes."""
        self.out, self.err = self.process.communicate(timeout=BOUND_S)
        assert self.alive() == []
        return self.process.returncode

    def alive(self) -> list[int]:
        """Every process with this run's configuration among its arguments: torchrun and the ranks."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(self.run / "config.yaml").encode() in words and watch.started(int(entry.name)):
                found.append(int(entry.name))
        return found

    def agent(self) -> int:
        """torchrun's pid: the parent of a rank."""
        stat = Path(f"/proc/{self.reports()[0].pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])

    def reports(self, session: int = 1) -> dict[int, watch.Report]:
        return watch.read_reports(self.run / "sessions" / f"{session:04d}")

    def wait_for_step(self, step: int, rank: int | None = None) -> dict[int, watch.Report]:
        """Until both ranks, or the one, have got that far in the first session."""

        def there() -> bool:
            found = self.reports()
            return len(found) == 2 and all((r.step or 0) >= step for r in found.values() if rank in (None, r.rank))

        until(lambda: there() or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()
        return self.reports()

    def status(self) -> dict[str, Any]:
        return dict(json.loads((self.run / "status.json").read_text()))

    def log(self, rank: int, session: int = 1) -> str:
        return (self.run / f"sessions/{session:04d}/logs/rank-{rank:05d}.log").read_text()

    def kill_all(self) -> None:
        for pid in [*self.alive(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.wait()


def until(ready: Callable[[], bool], bound_s: float = BOUND_S) -> None:
    deadline = time.monotonic() + bound_s
    while not ready():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def one(fake: dict[str, Any], *overrides: str, **options: Any) -> Launched:
        folder = tmp_path / options.pop("folder", ".")
        folder.mkdir(exist_ok=True)
        started.append(Launched(folder, fake, *overrides, **options))
        return started[-1]

    yield one
    for launched in started:
        launched.kill_all()


Start = Callable[..., Launched]


# -- good ends --------------------------------------------------------------------------------------------------------


def test_a_stop_that_lies_there_is_said_at_the_start(start: Start, tmp_path: Path) -> None:
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/STOP").touch()
    run = start({"steps": 3})
    assert run.end() == 0, run.err
    assert f"warning: {run.run}/STOP is there" in run.out


def test_c88_two_jobs_at_once_need_no_port(start: Start) -> None:
    one, two = start({"steps": 3}, folder="one"), start({"steps": 3}, folder="two")
    for run in (one, two):
        assert run.end() == 0, run.err
        assert run.status()["state"] == "done"
        assert run.err == ""
        assert run.out.splitlines()[-1] == f"done: {run.run}"
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"rank 1 of 2: OMP_NUM_THREADS={threads} is ready" in one.log(1), "C98"
    assert f"OMP_NUM_THREADS={threads} (" in one.out, "C98"
    assert "step 3" in one.out
    assert "step 3" in one.log(0)
    assert "rank 1 of 2" not in one.out, "the console is rank 0's alone"
    env = json.loads((one.run / "sessions/0001/env.json").read_text())
    assert env["torchrun"][1:3] == ["-m", "torch.distributed.run"]
    plan = json.loads((one.run / "plan.json").read_text())
    assert (plan["ranks"], plan["batch"]["accumulation"]) == (2, 2)


def test_a_preempted_run_is_resumed_in_a_second_session(start: Start) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup would pass its wish on to the run
    first = start({"steps": 1000, "sleep": 0.02})
    first.wait_for_step(1)
    first.process.send_signal(signal.SIGHUP)
    assert first.end() == 75, first.err
    again = start({"steps": 2})
    assert again.end() == 0, again.err
    assert "session 2" in again.out
    assert again.status()["session"] == 2
    after = start({"steps": 2})
    assert after.end() == 0
    assert after.out.splitlines()[-1] == f"{after.run} is finished: nothing to do"
    assert not (after.run / "sessions/0003").exists()


def test_a_port_of_ones_own(start: Start) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    run = start({"steps": 1}, f"launch.port={port}")
    assert run.end() == 0, run.err
    env = json.loads((run.run / "sessions/0001/env.json").read_text())
    assert f"localhost:{port}" in env["torchrun"]


def two_nodes(start: Start, fake: dict[str, Any]) -> tuple[Launched, Launched]:
    """Both on this machine, one rank each."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    where = ("launch.address=127.0.0.1", f"launch.port={port}")
    return start(fake, *where, ranks="1/2/1"), start(fake, *where, ranks="1/2/0")


def test_two_nodes_by_hand(start: Start) -> None:
    second, first = two_nodes(start, {"steps": 3})
    out, err = first.process.communicate(timeout=BOUND_S)
    assert second.end() == 0, second.err
    assert first.process.returncode == 0, (out, err)
    assert f"node 1 of 2: joining {first.run}" in second.out
    assert "rank 1 of 2" in first.log(1)
    assert (first.run / "sessions/0001/logs/torchrun-0001.log").exists()


def test_c93_a_rank_that_is_killed_on_another_node(start: Start) -> None:
    second, first = two_nodes(start, {"steps": 1000, "sleep": 0.05})
    os.kill(first.wait_for_step(2)[1].pid, signal.SIGKILL)
    assert first.process.wait(timeout=30) == 4
    assert second.end() == 4
    assert first.status()["reason"].startswith("rank 1 was killed by SIGKILL")


# -- failures ----------------------------------------------------------------------------------------------------------


def failed(run: Launched, rank: int, reason: str, status: int) -> None:
    """What must hold after any failure."""
    began = time.monotonic()
    assert run.end() == status, (run.out, run.err)
    assert time.monotonic() - began < 30
    recorded = run.status()
    assert (recorded["state"], recorded["rank"], recorded["exit"]) == ("failed", rank, status)
    assert reason in recorded["reason"]
    last = [line for line in run.err.splitlines() if not line.startswith(("  why:", "  do:"))][-2:]
    assert any(reason in line for line in last)
    assert f"rank-{rank:05d}.log" in run.err
    assert "Root Cause" not in run.err, "torchrun's table belongs into its log"
    events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
    ends = [(e["event"], e["rank"], e["reason"]) for e in events if e["event"] == "end"]
    assert ends == [("end", rank, recorded["reason"])]


def test_c93_survivors_that_notice_nothing_are_ended(start: Start) -> None:
    run = start({"steps": 9, "faults": {"0": ["hang", 2], "1": ["kill", 2]}})
    failed(run, 1, "rank 1 was killed by SIGKILL", 4)


def test_c94_a_rank_that_leaves_with_success_is_named(start: Start) -> None:
    run = start({"steps": 5, "faults": {"1": ["exit", 3]}})
    failed(run, 1, "rank 1 left at step 2 with status 0", 1)


def test_c94_also_where_its_peer_waits_for_ever(start: Start) -> None:
    run = start({"steps": 9, "faults": {"0": ["hang", 2], "1": ["hard exit", 2]}})
    failed(run, 1, "rank 1 left at step 1 with status 0", 1)


def test_a_ranks_own_error_is_the_last_thing_on_stderr(start: Start) -> None:
    run = start({"steps": 5, "faults": {"1": ["raise", 2]}})
    failed(run, 1, "ValueError: the data ends", 1)
    assert run.err.endswith("rank 1 failed: ValueError: the data ends\nhere\n")
    assert "Traceback (most recent call last)" in run.err
    assert "Connection closed by peer" not in run.err
    assert run.status()["step"] == 1


def test_an_error_of_ours_keeps_its_exit_status_and_three_parts(start: Start) -> None:
    run = start({"steps": 5, "faults": {"0": ["diverge", 2]}})
    assert run.end() == 5
    assert run.err.splitlines()[-3:] == [
        "rank 0 failed: loss = nan at attempt 2",
        "  why: patience is used up",
        "  do:  lower optim.lr",
    ]


def test_a_rank_that_fails_before_it_can_report(start: Start) -> None:
    run = start({"steps": 5, "faults": {"1": ["import", 0]}})
    began = time.monotonic()
    assert run.end() == 1
    assert time.monotonic() - began < 25, "torchrun alone would give the other rank 30 s"
    assert "ImportError: no module called fla_attn" in run.err
    assert run.err.splitlines()[-1] == "rank 1 left with status 1 while starting"
    assert run.status()["rank"] == 1


def findings(run: Launched) -> list[tuple[int, str]]:
    path = run.run / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(event["rank"], event["reason"]) for event in events if event["event"] == "finding"]


def test_c93_a_rank_that_stands_still_is_noticed_left_alone_and_ended_when_patience_is_used_up(start: Start) -> None:
    run = start({"steps": 1000, "sleep": 0.02}, "launch.timeout=6s")
    pid = run.wait_for_step(2)[1].pid
    os.kill(pid, signal.SIGSTOP)
    until(lambda: len(findings(run)) == 1)
    os.kill(pid, signal.SIGCONT)
    run.wait_for_step((run.reports()[1].step or 0) + 5)
    os.kill(pid, signal.SIGSTOP)
    assert run.end() == 4, (run.out, run.err)
    mute = "rank 1 does not answer the request for its stack (state T: stopped)"
    noticed = findings(run)
    assert [rank for rank, _ in noticed] == [1, 1]
    for _, reason in noticed:
        assert reason.startswith("rank 1 did not arrive (attempt ")
        assert f"{mute}, rank 0 in _until (shell/fake_worker.py:" in reason
        assert re.search(rf"warning: no rank of this node has moved for \d s; {re.escape(reason)}", run.out)
    status = run.status()
    assert (status["state"], status["rank"], status["exit"]) == ("failed", 1, 4)
    assert status["reason"].startswith(
        f"rank 1 stopped answering at attempt {status['attempt']} (train); no rank of this "
    )
    assert "s (launch.timeout = 6 s); " + mute in status["reason"]
    assert run.err.splitlines()[-3] == status["reason"]
    assert "in _until" in run.log(0), "the stacks are in the logs"


# -- signals -----------------------------------------------------------------------------------------------------------


def stopped(run: Launched) -> None:
    assert run.end() == 75, (run.out, run.err)
    status = run.status()
    assert (status["state"], status["exit"]) == ("preempted", 75)
    reports = run.reports()
    # A rank that stops before its first step has not said where it is.
    assert {r.step or 0 for r in reports.values()} == {status["step"]}, "all ranks stop at one step"
    assert all(r.proper for r in reports.values())
    assert run.err == ""


# Signals to a rank, to torchrun and to the whole group: test_real_stops.py, with ranks that train; and in
# test_real_failures.py a rank that is killed, and a signal that comes twice.


def test_c96_a_signal_to_the_launcher_stops_all_ranks_at_one_step(start: Start) -> None:
    run = start({"steps": 1000, "sleep": 0.02})
    run.wait_for_step(3)
    run.process.send_signal(signal.SIGTERM)
    stopped(run)
    assert "SIGTERM: stopping at the next step boundary" in run.out
    assert run.status()["reason"] == "stopped by SIGTERM to mpdist launch"


def test_c96_a_signal_that_comes_before_the_ranks_do(start: Start) -> None:
    run = start({"steps": 1000, "sleep": 0.02})
    until(lambda: bool(run.alive()))
    run.process.send_signal(signal.SIGUSR1)
    stopped(run)


def test_c96_a_signal_right_after_the_run_is_on_record(start: Start) -> None:
    run = start({"steps": 1000, "sleep": 0.02})
    until((run.run / "status.json").exists)
    run.process.send_signal(signal.SIGINT)
    stopped(run)
    assert run.status()["reason"] == "stopped by SIGINT to mpdist launch"


def test_c96_a_second_signal_ends_the_run_at_once(start: Start) -> None:
    number = signal.SIGTERM
    run = start({"steps": 1000, "faults": {"1": ["hang", 3]}})
    run.wait_for_step(2, rank=1)
    run.process.send_signal(number)
    time.sleep(1)
    assert run.process.poll() is None
    began = time.monotonic()
    run.process.send_signal(number)
    assert run.end() == 128 + number
    assert time.monotonic() - began < 15, "torchrun alone would give the rank that hangs 30 s"
    status = run.status()
    assert (status["state"], status["exit"]) == ("failed", 128 + number)
    assert status["reason"] == "ended at once by a second SIGTERM"


@pytest.mark.parametrize("target", ["launcher", "torchrun"])
def test_c93_a_sigkill_above_the_ranks_leaves_nobody_behind(start: Start, target: str) -> None:
    run = start({"steps": 1000, "sleep": 0.02})
    run.wait_for_step(2)
    os.kill(run.process.pid if target == "launcher" else run.agent(), signal.SIGKILL)
    until(lambda: run.alive() == [], 10)
    if target == "torchrun":
        assert run.end() == 1
        assert run.status()["state"] == "failed"
    else:
        assert start({"steps": 1}).end() == 0, "the next launch takes the directory over"
