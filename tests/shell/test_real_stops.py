"""Real runs that are stopped by signals and go on, that share a machine, and that are tracked."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from real_runs import Job, arguments_of, checkpoints, files_with, jobs_in, left, state
from wandb_server import read_offline

pytestmark = pytest.mark.world

STEPS = 60
SECRETS = {"WANDB_API_KEY": "0123456789abcdef" * 2 + "feedface", "HF_TOKEN": "hf_" + "s3cr3t" * 5}
NOBODY = "http://127.0.0.1:9"  # the discard port of loopback
PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOBODY)
# FP16 with skips, a scale that moves every few steps, warm-up into cosine, packed rows, dropout: all that has a state.
HARD: dict[str, Any] = {
    "name": "it's a \u00fcber run (1)",
    "model__config": {**tiny.LLAMA, "attention_dropout": 0.1},
    "precision": {"compute": "fp16", "scale": {"interval": 3}},
    "drill": {"overflow_at": {"attempts": [4, 9, 15, 30], "rank": 1}},
    "optim": {"lr": 1e-2, "warmup": 3, "schedule": "cosine"},
    "batch": {"micro": 2, "global": 16},
    "budget__steps": STEPS,
    "checkpoint": {"every": 0, "keep": 20},
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Job, float]]:
    """Two runs of one configuration at once: tracked offline, and online where no server is. And the second's delay."""
    folder = tmp_path_factory.mktemp("two runs")
    with jobs_in(folder) as jobs:
        asked = {**HARD, "track__wandb": {"mode": "offline"}}
        first = jobs.launch(tiny.config(folder, **asked), **SECRETS)
        first.wait_for_attempt(1)
        for words in arguments_of(first.alive()):
            assert not any(secret in words for secret in SECRETS.values())
        again = jobs.launch(folder / "config.yaml", WANDB_MODE="disabled")
        assert again.end() == 2
        assert f"is in use by a live run: pid {first.process.pid} on {os.uname().nodename}" in again.err
        other = folder / "other"
        other.mkdir()
        second = jobs.launch(tiny.config(other, **{**asked, "track__wandb": {"mode": "online"}}), **SECRETS, **PROXIES)
        assert second.end() == 0, (second.out, second.err)
        delay = time.time() - left(second).events("end")[-1]["time"]
        assert first.end() == 0, (first.out, first.err)
        yield first, second, delay


def test_c88_two_runs_at_once_need_no_port_and_leave_the_same_numbers(two: tuple[Job, Job, float]) -> None:
    first, second, _ = two
    for job in (first, second):
        assert state(job.run)["state"] == "done"
        assert job.err == ""
        assert job.out.splitlines()[-1] == f"done: {job.run}"
        assert left(job).column("step") == list(range(1, STEPS + 1))
    assert tiny.timeless(left(first).rows()) == tiny.timeless(left(second).rows())


def test_the_console_has_rank_0_plain_and_each_rank_its_log(two: tuple[Job, Job, float]) -> None:
    job, _, _ = two
    assert "OMP_NUM_THREADS=1 (as it was set)" in job.out, "C98"
    assert "\r" not in job.out
    steps = [line for line in job.log("rank-00000").splitlines() if line.startswith("step ")]
    assert len(steps) == STEPS
    assert all(line in job.out.splitlines() for line in job.log("rank-00000").splitlines())
    assert "step " not in job.log("rank-00001")


def test_c100_one_tracker_run_for_two_ranks_drawn_over_steps_tokens_and_seconds(two: tuple[Job, Job, float]) -> None:
    job, _, _ = two
    assert left(job).events("warning") == []
    (folder,) = job.run.glob("wandb/offline-run-*")
    kept = read_offline(folder)
    assert (kept["exit"], kept["run"]["project"]) == (0, "mpdist")
    assert kept["config"]["optim"]["lr"] == 1e-2
    rows = left(job).rows()
    assert len(kept["history"]) == len(rows)
    for logged, row in zip(kept["history"], rows, strict=True):
        for name in ("step", "train/loss", "train/label_tokens", "time/train_s"):
            assert logged[name] == row[name]
        assert logged["over_tokens/train/loss"] == logged["over_seconds/train/loss"] == row["train/loss"]
    assert kept["axes"]["train/*"] == "step"
    assert kept["axes"]["over_tokens/*"] == "train/label_tokens"
    assert kept["axes"]["over_seconds/*"] == "time/train_s"


def test_c102_without_a_server_the_run_is_whole_and_hardly_later(two: tuple[Job, Job, float]) -> None:
    _, job, delay = two
    (warning,) = left(job).events("warning")
    assert warning["reason"].startswith("W&B is offline for this session: ")
    assert job.out.count("W&B") == 1
    assert delay < 30
    (folder,) = job.run.glob("wandb/offline-run-*")
    assert len(read_offline(folder)["history"]) == STEPS


def test_no_secret_is_in_anything_that_a_run_leaves(two: tuple[Job, Job, float]) -> None:
    for job in two[:2]:
        assert files_with(job.run.parent.parent, *SECRETS.values()) == []
        assert files_with(job.run, "HF_TOKEN") == [job.run / "sessions/0001/env.json"], (
            "its name is told, not its value"
        )


def test_c13_c66_c96_signals_stop_all_ranks_at_one_step_and_no_number_shows_it(
    tmp_path: Path, two: tuple[Job, Job, float]
) -> None:
    config = tiny.config(tmp_path, **HARD)
    step = 0
    with jobs_in(tmp_path) as jobs:
        for whom, name in (("launcher", "USR1"), ("rank 1", "TERM"), ("torchrun", "TERM"), ("group", "INT")):
            job = jobs.launch(config)
            before = checkpoints(job.run)
            reports = job.wait_for_attempt(state(job.run)["attempt"] + 4 if before else 4)
            number = signal.Signals[f"SIG{name}"]
            if whom == "group":
                os.killpg(job.process.pid, number)
            else:
                targets = {"launcher": job.process.pid, "rank 1": reports[1].pid, "torchrun": job.parent()}
                os.kill(targets[whom], number)
            assert job.end() == 75, (job.out, job.err)
            assert job.err == ""
            ended = state(job.run)
            assert (ended["state"], ended["exit"], ended["rank"]) == ("preempted", 75, None)
            assert step < ended["step"] < STEPS
            step = ended["step"]
            assert set(checkpoints(job.run)) - set(before) == {f"step-{step:08d}"}, "one save, and the old ones stay"
            reports = job.reports()
            assert reports[0].step == reports[1].step
            assert all(report.proper for report in reports.values())
            assert job.out.splitlines()[-1].startswith(f"stopped early at step {step}, everything is saved")
        job = jobs.launch(config)
        assert job.end() == 0, (job.out, job.err)
    assert state(job.run)["session"] == 5
    assert tiny.timeless(left(job).rows()) == tiny.timeless(left(two[0]).rows())
    assert len(set(left(job).column("scale/value"))) > 3
    assert left(job).rows()[-1]["scale/skipped"] >= 4


SLOW_SAVE = """
import os, time
if "RANK" in os.environ:
    def slowly(source, target, *args, rename=os.rename, **kwargs):
        if "step-" in os.path.basename(target):
            time.sleep(40)
        return rename(source, target, *args, **kwargs)
    os.rename = slowly
"""


@pytest.mark.slow
def test_c96_a_save_may_take_longer_than_torchruns_patience(tmp_path: Path) -> None:
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(SLOW_SAVE)
    config = tiny.config(tmp_path, budget__steps=2000, launch__timeout="100s")
    with jobs_in(tmp_path) as jobs:
        job = jobs.launch(config, PYTHONPATH=f"{hook}:{Path(__file__).parents[2]}")
        job.wait_for_attempt(3)
        began = time.monotonic()
        os.kill(job.parent(), signal.SIGTERM)
        assert job.end() == 75, (job.out, job.err)
    assert time.monotonic() - began > 35, "the hook has slowed nothing"
    assert checkpoints(job.run) == [f"step-{state(job.run)['step']:08d}"]
