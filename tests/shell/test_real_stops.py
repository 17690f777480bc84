"""Real runs that are stopped by signals and go on, that share a machine, and that are tracked."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
from real_runs import Job, arguments_of, checkpoints, files_with, jobs_in, left, state
from wandb_server import read_offline

pytestmark = pytest.mark.world

Figure = Callable[[str], None]
STEPS = 40
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


# Who is asked to stop, in which way, and the reason that the run gives for its end. SIGTERM to the launcher is in
# test_sweep_run.py; what needs no launcher, a signal to all ranks and the file STOP, in tests/world/test_resume.py.
STOPS = {
    ("rank 1", "TERM"): "a signal to another rank",
    ("torchrun", "TERM"): "SIGTERM",
    ("launcher", "USR1"): "SIGUSR1 to mpdist launch",
    ("group", "INT"): "SIGINT to mpdist launch",
}


@pytest.fixture(scope="module")
def scenes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    """All that is played here, at once: most of it waits, for imports on one core, for a server, for a slow disk."""
    played = {"two": two_at_once, "stops": stop_and_go_on}
    if any(item.name.startswith("test_c96_a_save_may_take_longer") for item in request.session.items):
        played["patience"] = stop_a_slow_save
    with ThreadPoolExecutor(len(played)) as pool:
        yield {name: pool.submit(play, tmp_path_factory.mktemp(f"{name} of runs")) for name, play in played.items()}


def two_at_once(folder: Path) -> tuple[Job, Job, float]:
    """Two runs of one configuration: tracked offline, and online where no server is. And the second's delay."""
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
        return first, second, delay


@pytest.fixture(scope="module")
def two(scenes: dict[str, Future[Any]]) -> tuple[Job, Job, float]:
    return scenes["two"].result()


def test_c88_two_runs_at_once_need_no_port_and_leave_the_same_numbers(
    two: tuple[Job, Job, float], figure: Figure
) -> None:
    first, second, _ = two
    for job in (first, second):
        assert state(job.run)["state"] == "done"
        assert job.err == ""
        assert job.out.splitlines()[-1] == f"done: {job.run}"
        assert left(job).column("step") == list(range(1, STEPS + 1))
    assert tiny.timeless(left(first).rows()) == tiny.timeless(left(second).rows())
    times = [(json.loads((job.run / "sessions/0001/env.json").read_text())["began"], left(job).events("end")[-1]["time"])
             for job in (first, second)]  # fmt: skip
    together = min(end for _, end in times) - max(began for began, _ in times)
    assert together > 0
    figure(
        f"two runs on one machine without a port, {together:.1f} s at once: exit {first.process.returncode} and "
        f"{second.process.returncode}, {len(left(first).rows())} and {len(left(second).rows())} rows, all equal"
    )


def test_the_console_has_rank_0_plain_and_each_rank_its_log(two: tuple[Job, Job, float]) -> None:
    job, _, _ = two
    assert "OMP_NUM_THREADS=1 (as it was set)" in job.out, "C98"
    assert "\r" not in job.out
    steps = [line for line in job.log("rank-00000").splitlines() if line.startswith("step ")]
    assert len(steps) == STEPS
    assert all(line in job.out.splitlines() for line in job.log("rank-00000").splitlines())
    assert "step " not in job.log("rank-00001")


def of_the_tracker(job: Job) -> list[dict[str, Any]]:
    """Its warnings; the preflight has one of its own where this CPU only emulates FP16."""
    return [event for event in left(job).events("warning") if "W&B" in event["reason"]]


def test_c100_one_tracker_run_for_two_ranks_drawn_over_steps_tokens_and_seconds(
    two: tuple[Job, Job, float], figure: Figure
) -> None:
    job, _, _ = two
    assert of_the_tracker(job) == []
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
    found = [*job.run.glob("wandb/*run-*")]
    assert found == [folder]
    figure(f"2 ranks: {len(found)} run of the tracker, with {len(kept['history'])} of {len(rows)} rows")


def test_c102_without_a_server_the_run_is_whole_and_hardly_later(two: tuple[Job, Job, float], figure: Figure) -> None:
    _, job, delay = two
    (warning,) = of_the_tracker(job)
    assert warning["reason"].startswith("W&B is offline for this session: ")
    assert job.out.count("W&B") == 1
    assert delay < 30
    (folder,) = job.run.glob("wandb/offline-run-*")
    assert len(read_offline(folder)["history"]) == STEPS
    figure(
        f"online behind a closed proxy: exit {job.process.returncode}, {len(left(job).rows())} rows, "
        f"{job.out.count('W&B')} warning, ended {delay:.1f} s after its last word (bound 30 s)"
    )


def test_no_secret_is_in_anything_that_a_run_leaves(two: tuple[Job, Job, float]) -> None:
    for job in two[:2]:
        assert files_with(job.run.parent.parent, *SECRETS.values()) == []
        assert files_with(job.run, "HF_TOKEN") == [job.run / "sessions/0001/env.json"], (
            "its name is told, not its value"
        )


def stop_and_go_on(folder: Path) -> tuple[Job, list[dict[str, Any]]]:
    """One run, stopped in each of the ways and launched again. The last job, and what was there after each stop."""
    config = tiny.config(folder, **HARD)
    facts = []
    with jobs_in(folder) as jobs:
        for whom, name in STOPS:
            job = jobs.launch(config)
            before = checkpoints(job.run)
            reports = job.wait_for_attempt(state(job.run)["attempt"] + 3 if before else 3)
            pids = {
                "launcher": job.process.pid,
                "group": -job.process.pid,
                "rank 1": reports[1].pid,
                "torchrun": job.parent(),
            }
            os.kill(pids[whom], signal.Signals[f"SIG{name}"])
            status = job.end()
            new = sorted(set(checkpoints(job.run)) - set(before))
            facts.append({"job": job, "status": status, "state": state(job.run), "reports": job.reports(),
                          "gone": set(before) - set(checkpoints(job.run)), "new": new})  # fmt: skip
        job = jobs.launch(config)
        assert job.end() == 0, (job.out, job.err)
    return job, facts


@pytest.fixture(scope="module")
def stops(scenes: dict[str, Future[Any]]) -> tuple[Job, list[dict[str, Any]]]:
    return scenes["stops"].result()


@pytest.mark.parametrize("how", STOPS)
def test_c96_a_stop_is_one_save_of_one_step_by_all_ranks(
    stops: tuple[Job, list[dict[str, Any]]], how: Any, figure: Figure
) -> None:
    from mpdist.restore import fault_in

    number = list(STOPS).index(how)
    fact = stops[1][number]
    job, ended = fact["job"], fact["state"]
    assert fact["status"] == 75, (job.out, job.err)
    assert job.err == ""
    assert (ended["state"], ended["exit"], ended["rank"]) == ("preempted", 75, None)
    assert ended["reason"] == f"stopped by {STOPS[how]}"
    assert (stops[1][number - 1]["state"]["step"] if number else 0) < ended["step"] < STEPS
    assert (fact["new"], fact["gone"]) == ([f"step-{ended['step']:08d}"], set()), "one save, and the old ones stay"
    assert fault_in(job.run / "checkpoints" / fact["new"][0]) is None
    assert {report.step for report in fact["reports"].values()} == {fact["reports"][1].step}
    assert all(report.proper for report in fact["reports"].values())
    assert job.out.splitlines()[-1].startswith(f"stopped early at step {ended['step']}, everything is saved")
    steps = {rank: report.step for rank, report in sorted(fact["reports"].items())}
    figure(f"{how[1]} to {how[0]}: exit {fact['status']}, steps of the ranks {steps}, new checkpoints {fact['new']}")


def test_c13_c66_c96_no_number_shows_the_stops(
    stops: tuple[Job, list[dict[str, Any]]], two: tuple[Job, Job, float], figure: Figure
) -> None:
    job, _ = stops
    assert state(job.run)["session"] == len(STOPS) + 1
    assert (job.run / "checkpoints/latest").read_text() == f"step-{STEPS:08d}\n"
    assert tiny.timeless(left(job).rows()) == tiny.timeless(left(two[0]).rows())
    for kind in ("model.", "exp_avg.", "exp_avg_sq."):
        assert tiny.same(left(job).weights(prefix=kind), left(two[0]).weights(prefix=kind))
    assert len(set(left(job).column("scale/value"))) > 3
    assert left(job).rows()[-1]["scale/skipped"] >= 4
    stopped = [event["step"] for event in left(job).events("stop")]
    assert [event["step"] for event in left(job).events("load")] == stopped
    rows = left(job).rows()
    figure(
        f"stopped and gone on at steps {stopped}: {len(rows)} of {STEPS} rows and all tensors as undisturbed, bit for bit"
    )


SLOW_SAVE = """
import os, time
if "RANK" in os.environ:
    def slowly(source, target, *args, rename=os.rename, **kwargs):
        if "step-" in os.path.basename(target):
            time.sleep(40)
        return rename(source, target, *args, **kwargs)
    os.rename = slowly
"""


def stop_a_slow_save(folder: Path) -> tuple[Job, float]:
    """torchrun is asked to stop while a save takes 40 s. The job, and the seconds from there to its end."""
    hook = folder / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(SLOW_SAVE)
    config = tiny.config(folder, budget__steps=2000, launch__timeout="100s")
    with jobs_in(folder) as jobs:
        job = jobs.launch(config, PYTHONPATH=f"{hook}:{Path(__file__).parents[2]}")
        job.wait_for_attempt(3)
        began = time.monotonic()
        os.kill(job.parent(), signal.SIGTERM)
        assert job.end() == 75, (job.out, job.err)
    return job, time.monotonic() - began


@pytest.mark.slow
def test_c96_a_save_may_take_longer_than_torchruns_patience(scenes: dict[str, Future[Any]], figure: Figure) -> None:
    job, seconds = scenes["patience"].result()
    assert seconds > 35, "the hook has slowed nothing"
    assert checkpoints(job.run) == [f"step-{state(job.run)['step']:08d}"]
    figure(f"a save of 40 s: exit {job.process.returncode} after {seconds:.1f} s, checkpoints {checkpoints(job.run)}")
