"""Stopped by Slurm, queued again by itself, and in the end the same run bit for bit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import submitted
from cluster import Cluster

from mpdist.lines import read_json
from mpdist.requeue import read

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def training(cluster: Cluster, folder: Path, *options: str, **changes: object) -> Iterator[tuple[str, Path]]:
    """A job that has trained some steps, and its run's directory."""
    path = submitted.config(folder, **changes)
    job = cluster.sbatch(*submitted.NODES, *options, str(submitted.SCRIPT), str(path), cwd=folder)
    run = submitted.run_of(folder)
    submitted.until_step(cluster, job, run, 3)
    yield job, run


def why(run: Path) -> list[str]:
    return [entry["why"] for entry in read(run)]


def reasons(run: Path) -> list[str]:
    return [event["reason"] for event in submitted.tiny.Result(run, [(0, "")]).events("stop")]


def assert_gaps_are_not_counted(run: Path) -> None:
    """The last row's time is that of the sessions, not that between them."""
    found = submitted.tiny.Result(run, [(0, "")])
    ends = {event["session"]: event["time"] for event in found.events("end")}
    begins = {s: (read_json(run / "sessions" / f"{s:04d}" / "env.json") or {})["began"] for s in ends}
    inside = sum(ends[s] - begins[s] for s in ends)
    between = max(ends.values()) - min(begins.values()) - inside
    total = found.rows()[-1]["time/total_s"]
    assert inside / 2 < total <= inside + 1, (total, inside, between)
    assert between > 2 * (len(ends) - 1)


def test_warned_it_saves_is_queued_again_and_ends_the_same_within_its_budget(
    cluster: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    """USR1 as Slurm sends it, three times: two requeues are allowed, the third stop is the last; a new job goes on."""
    with training(cluster, tmp_path, slurm__requeues=2) as (job, run):
        for times in (1, 2):
            cluster.call("scancel", "--signal=USR1", job)
            cluster.hurry(job)
            assert cluster.restarts(job) == times
            status = read_json(run / "status.json") or {}
            assert (status["state"], status["exit"]) == ("preempted", 75)
            made = status["step"]
            assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{made:08d}"
            cluster.wait(job, "RUNNING")
            submitted.until_step(cluster, job, run, made + 2)
        cluster.call("scancel", "--signal=USR1", job)
        assert cluster.wait(job) == "FAILED"
        assert cluster.job(job)["ExitCode"] == "75:0"
    assert "slurm.requeues = 2" in cluster.output(job)
    assert [text.removesuffix(" to mpdist launch") for text in why(run)] == ["stopped by SIGUSR1"] * 2
    assert [entry["restart"] for entry in read(run)] == [0, 1]
    assert cluster.queue() == []
    assert cluster.processes(job) == []
    # What one job has printed stands in one file, its later starts after the earlier ones.
    assert cluster.output(job).count("session ") >= 3

    again = cluster.sbatch(*submitted.NODES, str(submitted.SCRIPT), "config.yaml", cwd=tmp_path)
    cluster.wait(again, "COMPLETED", timeout=240)
    assert submitted.differences(tmp_path, undisturbed) == []
    assert [event["reason"] for event in submitted.result(tmp_path).events("start")] == ["new", *["resume"] * 3]
    assert_gaps_are_not_counted(run)


def test_preempted_by_a_higher_partition_it_comes_back_and_ends_the_same(
    cluster: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    with training(cluster, tmp_path, "--partition=low") as (job, run):
        other = cluster.sbatch("--partition=high", "--nodes=2", "--exclusive", "--wrap", "sleep 2", cwd=tmp_path)
        cluster.wait(job, "PENDING")
        cluster.wait(other, "COMPLETED")
        cluster.hurry(job)
        cluster.wait(job, "COMPLETED", timeout=240)
    assert why(run) == ["preempted by another job"]
    assert reasons(run)[0].endswith("(preempted by another job)")
    assert submitted.differences(tmp_path, undisturbed) == []


def test_at_its_time_limit_it_is_queued_again_and_told_apart(
    cluster: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    """Slurm counts a limit in minutes and warns up to a minute early: here within the first half minute."""
    path = submitted.config(tmp_path)
    job = cluster.sbatch(
        *submitted.NODES, "--time=3", "--signal=USR1@150", str(submitted.SCRIPT), str(path), "slurm.signal_lead=150s",
        cwd=tmp_path,
    )  # fmt: skip
    run = submitted.run_of(tmp_path)
    cluster.wait(job, "RUNNING")
    cluster.wait(job, "PENDING", timeout=120)
    cluster.call("scontrol", "update", f"jobid={job}", "TimeLimit=30")
    cluster.hurry(job)
    cluster.wait(job, "COMPLETED", timeout=240)
    assert why(run) == ["its time limit"]
    assert len(reasons(run)) == 1
    assert reasons(run)[0].startswith("stopped by SIGUSR1")
    assert reasons(run)[0].endswith("(its time limit)")
    assert submitted.differences(tmp_path, undisturbed) == []


def test_queued_again_by_hand_it_goes_on_and_counts_no_requeue(
    cluster: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    with training(cluster, tmp_path) as (job, run):
        cluster.call("scontrol", "requeue", job)
        cluster.hurry(job)
        cluster.wait(job, "COMPLETED", timeout=240)
    assert cluster.restarts(job) == 1
    assert why(run) == []
    assert submitted.differences(tmp_path, undisturbed) == []


def test_cancelled_or_stopped_by_a_file_it_saves_and_stays_away(cluster: Cluster, tmp_path: Path) -> None:
    with training(cluster, tmp_path) as (job, run):
        (run / "STOP").touch()
        assert cluster.wait(job) == "FAILED"
        assert cluster.job(job)["ExitCode"] == "75:0"
        assert "not queued again" in cluster.output(job)
        first = (read_json(run / "status.json") or {})["step"]
    job = cluster.sbatch(*submitted.NODES, str(submitted.SCRIPT), "config.yaml", cwd=tmp_path)
    submitted.until_step(cluster, job, run, first + 2)
    cluster.call("scancel", job)
    assert cluster.wait(job) == "CANCELLED"
    status = read_json(run / "status.json") or {}
    assert status["state"] == "preempted"
    assert status["reason"].endswith("(cancelled)")
    time.sleep(1)
    assert (cluster.queue(), cluster.processes(job), why(run)) == ([], [], [])


def test_a_run_that_diverges_ends_with_its_own_status_and_stays_away(cluster: Cluster, tmp_path: Path) -> None:
    changes = {"drill__nan_loss_at": {"attempts": "all", "rank": 3}, "precision__scale": {"patience": 3}}
    path = submitted.config(tmp_path, batch__global=8, **changes)
    job = cluster.sbatch(*submitted.NODES, str(submitted.SCRIPT), str(path), cwd=tmp_path)
    assert cluster.wait(job, timeout=180) == "FAILED"
    assert cluster.job(job)["ExitCode"] == "5:0"
    assert (read_json(submitted.run_of(tmp_path) / "status.json") or {})["state"] == "diverged"
    assert cluster.queue() == []
