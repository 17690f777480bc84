"""Who is queued again at the end of a job, and what its log says where none is: without a Slurm."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import tiny

from mpdist import cli, launch, lock, requeue, slurm
from mpdist.config import Resolved, load
from mpdist.errors import UsageError
from mpdist.lines import dump, write_atomic
from mpdist.record import RunDir


def ask(folder: Path, *overrides: str) -> Resolved:
    return load(tiny.config(folder), [*overrides, f"out_dir={folder}/runs"])


class Controller:
    """A stand-in for scontrol: what it says of the job, and what it was asked to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **job: str) -> None:
        self.job: dict[str, str] | None = {"JobState": "RUNNING", "PreemptTime": "None", "EndTime": "Unknown", **job}
        self.requeued: list[str] = []
        self.trouble: str | None = None
        monkeypatch.setattr(slurm, "ask", lambda kind, name: self.job)
        monkeypatch.setattr(requeue, "_ask_slurm", self._again)

    def _again(self, job: str) -> str | None:
        self.requeued.append(job)
        return self.trouble


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    return Controller(monkeypatch)


def ended(folder: Path, state: str = "preempted", code: int | None = 75, **more: Any) -> Resolved:
    """A run whose first session ended so, in job 12 unless said otherwise."""
    resolved = ask(folder, "slurm.requeues=2")
    run = RunDir(folder / "runs" / "run")
    job, restart = more.pop("job", "12"), more.pop("restart", 0)
    run.session = 1
    run.session_path().mkdir(parents=True, exist_ok=True)
    run.write_env({"slurm": {"job": job, "restart": restart}})
    run.status(**{"state": state, "step": 7, "attempt": 8, "exit": code, "reason": "stopped by SIGUSR1", **more})
    return resolved


def test_a_stopped_run_is_queued_again_until_its_budget_is_spent(
    tmp_path: Path, controller: Controller, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for times in (1, 2):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(times - 1))
        assert requeue.run(ended(tmp_path, restart=times - 1), 143) == 75
        assert controller.requeued == ["12"] * times
        assert f"{times} of 2 times" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert requeue.run(ended(tmp_path, restart=2), 143) == 75
    assert controller.requeued == ["12"] * 2
    assert "slurm.requeues = 2 (command line), and 2 are on record" in capsys.readouterr().err
    assert [(e["restart"], e["step"], e["why"]) for e in requeue.read(tmp_path / "runs/run")] == [
        (0, 7, "stopped by SIGUSR1"),
        (1, 7, "stopped by SIGUSR1"),
    ]


@pytest.mark.parametrize(
    ("state", "code", "status"),
    [("done", 0, 0), ("failed", 4, 4), ("failed", None, 1), ("diverged", 5, 5), ("running", None, 9)],
)
def test_no_other_end_is_queued_again_and_each_keeps_its_status(
    tmp_path: Path, controller: Controller, state: str, code: int | None, status: int
) -> None:
    assert requeue.run(ended(tmp_path, state, code), 9) == status
    assert controller.requeued == []


@pytest.mark.parametrize(
    ("state", "code", "changed", "asked"),
    [
        ("failed", 4, {"State": "DOWN*"}, True),
        ("running", None, {"State": "MIXED+NOT_RESPONDING*"}, True),
        ("failed", 4, {"BootTime": "2030-01-01T00:00:00"}, True),
        ("failed", 4, {"Port": "1"}, True),
        ("failed", 4, {}, False),
        ("failed", 1, {"State": "DOWN*"}, False),
    ],
    ids=["down", "missed", "started anew", "no slurmd", "all well", "a rank raised"],
)
def test_a_run_that_a_lost_node_has_ended_is_queued_again(
    tmp_path: Path, controller: Controller, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    state: str, code: int | None, changed: dict[str, str], asked: bool,
) -> None:  # fmt: skip
    """Slurm would, had it missed the node before the ranks there were missed; the budget holds here too."""
    with socket.create_server(("127.0.0.1", 0)) as slurmd:
        well = {
            "State": "MIXED",
            "NodeAddr": "127.0.0.1",
            "Port": str(slurmd.getsockname()[1]),
            "BootTime": "2020-01-01T00:00:00",
        }
        job = {**(controller.job or {}), "StartTime": "2025-01-01T00:00:00"}
        monkeypatch.setattr(slurm, "ask", lambda kind, name: job)
        monkeypatch.setattr(slurm, "show", lambda kind, names: [well, well | {"NodeName": "n2"} | changed])
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
        for times in range(1, 4):
            monkeypatch.setenv("SLURM_RESTART_COUNT", str(times - 1))
            status = requeue.run(ended(tmp_path, state, code, restart=times - 1, rank=None, attempt=8 + times), 137)
            assert status == (137 if code is None else code)
            said = capsys.readouterr().err
            assert controller.requeued == ["12"] * (min(times, 2) if asked else 0)
            assert ("lost n2, which no longer answers or started anew" in said) == (asked and times < 3)
    assert ("the run has used up its requeues" in said) == asked


def test_a_run_under_which_nodes_are_lost_at_one_attempt_does_not_go_through_all_of_them(
    tmp_path: Path, controller: Controller, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be what ends them; or they answer nobody, and a rank was killed for another reason."""
    for times, (node, attempt) in enumerate([("n2", 9), ("n4", 9)]):
        monkeypatch.setattr(slurm, "lost", lambda nodes, job, node=node: [node])
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(times))
        assert requeue.run(ended(tmp_path, "failed", 4, restart=times, attempt=attempt), 137) == 4
    assert controller.requeued == ["12"]
    said = capsys.readouterr().err.splitlines()
    assert "where the last start had lost a node too: not queued again" in said[-3]
    assert "lost n4" in said[-2]
    assert "lost n2" in said[-2]


@pytest.mark.parametrize(
    ("state", "code", "earlier"), [("failed", 143, 0), (None, None, 0), (None, None, 5)], ids=["ranks", "run", "again"]
)
def test_a_node_that_is_lost_before_the_run_begins_is_none_the_less(
    tmp_path: Path, controller: Controller, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    state: str | None, code: int | None, earlier: int,
) -> None:  # fmt: skip
    """Before any rank had begun, or before the run was on record; `again`: it has a session of an earlier job."""
    if state:
        resolved = ended(tmp_path, state, code, rank=None, step=0)
    else:
        resolved = ended(tmp_path, job="11", step=earlier) if earlier else ask(tmp_path, "slurm.requeues=2")
    gone: list[str] = []
    monkeypatch.setattr(slurm, "lost", lambda nodes, job: gone)
    assert requeue.run(resolved, 143) == 143
    assert controller.requeued == []
    gone.append("n2")
    capsys.readouterr()
    assert requeue.run(resolved, 143) == 143
    assert controller.requeued == ["12"]
    where = f"stopped at step {earlier}, to go on" if earlier else "ended before its first step"
    assert capsys.readouterr().err.startswith(f"mpdist: {where}")
    assert [entry["why"][:7] for entry in requeue.read(tmp_path / "runs/run")] == ["lost n2"]


def test_a_launch_that_a_signal_ends_before_any_rank_began_has_failed_nowhere() -> None:
    """Slurm sends TERM to torchrun too; status 143 is none of a row of failures that a start is refused for."""
    found = launch._unexplained({"state": "running"}, -15, "", signal.SIGTERM)
    assert (found.exit, found.rank, found.reason) == (143, None, "ended by SIGTERM before any rank had begun")
    assert launch._unexplained({}, 1, "Address already in use", signal.SIGTERM).exit == 4
    assert launch._unexplained({}, 1, "", None).exit == 1


def test_of_an_array_only_the_task_that_was_stopped_is_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last task has the array's number: asked for it, Slurm tells of all tasks, and would queue all of them again."""
    task = {"ArrayJobId": "12", "PreemptTime": "None", "EndTime": "Unknown", "Restarts": "0"}
    tasks = [
        {**task, "JobId": "13", "ArrayTaskId": "0", "JobState": "COMPLETED"},
        {**task, "JobId": "12", "ArrayTaskId": "1", "JobState": "RUNNING"},
    ]
    asked: list[str] = []
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(slurm, "show", lambda kind, *names: tasks)
    monkeypatch.setattr(requeue, "_ask_slurm", asked.append)
    assert requeue.run(ended(tmp_path), 143) == 75
    assert asked == ["12_1"]
    assert "job 12_1 is queued again, 1 of 2 times" in capsys.readouterr().err
    tasks.clear()  # the controller does not answer
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert requeue.run(ended(tmp_path), 143) == 75
    assert asked == ["12_1"] * 2


def test_the_jobs_log_ends_with_who_failed_where_when_and_why(
    tmp_path: Path, controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = ended(tmp_path, "failed", 4, rank=3, reason="rank 3 was killed by SIGKILL")
    session = tmp_path / "runs/run/sessions/0001"
    write_atomic(session / "ranks/00003.json", dump({"host": "n7"}))
    requeue.run(resolved, 143)
    assert capsys.readouterr().err == (
        "mpdist: the run failed at step 7: rank 3 was killed by SIGKILL\n"
        f"  rank: 3 on n7, which has said more in {session}/logs/rank-00003.log\n"
    )
    requeue.run(ended(tmp_path, "diverged", 5, rank=None, reason="3 attempts"), 143)
    assert capsys.readouterr().err == f"mpdist: the run has diverged at step 7: 3 attempts\n  logs: {session}/logs\n"


def test_a_stopped_sweep_is_queued_again_within_its_budget(tmp_path: Path, controller: Controller) -> None:
    """What its runs have done in all tells whether a start got anywhere; other ends are left as they are."""
    folder = tmp_path / "runs/run"
    resolved = ask(tmp_path, "slurm.requeues=2")
    write_atomic(folder / "sweep.json", "{}")
    for times, arm in enumerate(("a-seed0", "b-seed0", "c-seed0"), 1):
        write_atomic(folder / arm / "status.json", dump({"step": 2, "attempt": 3, "reason": "stopped by SIGUSR1"}))
        assert requeue.run_sweep(resolved, 75) == 75
        assert controller.requeued == ["12"] * min(times, 2)
    assert [(e["step"], e["attempt"]) for e in requeue.read(folder)] == [(2, 3), (4, 6)]
    assert requeue.run_sweep(resolved, 4) == 4
    assert len(controller.requeued) == 2


def test_a_lost_launcher_is_no_success(tmp_path: Path, controller: Controller) -> None:
    """srun may say 0 when a node is lost."""
    assert requeue.run(ended(tmp_path, "running", None), 0) == 1


@pytest.mark.parametrize("other", [{"job": "11"}, {"restart": 4}])
def test_what_another_start_has_left_decides_nothing(
    tmp_path: Path, controller: Controller, other: dict[str, Any]
) -> None:
    """A job that was refused before it began must not go round for ever because the one before it was preempted."""
    assert requeue.run(ended(tmp_path, **other), 2) == 2
    assert controller.requeued == []


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"JobState": "COMPLETING", "Restarts": "0"}, "cancelled"),
        ({"JobState": "COMPLETING", "Restarts": "1"}, "queued again"),
        ({"JobState": "PENDING", "Restarts": "1"}, "queued again"),
    ],
)
def test_slurms_own_plans_for_a_job_are_left_to_it(
    tmp_path: Path, controller: Controller, capsys: pytest.CaptureFixture[str], job: dict[str, str], said: str
) -> None:
    assert controller.job is not None
    controller.job.update(job)
    assert requeue.run(ended(tmp_path), 143) == 75
    assert controller.requeued == []
    assert f"job 12 was {said}" in capsys.readouterr().err
    assert requeue.read(tmp_path / "runs/run") == []


def test_the_file_stop_means_stop(tmp_path: Path, controller: Controller) -> None:
    assert requeue.run(ended(tmp_path, reason="stopped by the file STOP"), 0) == 75
    assert controller.requeued == []


def test_a_requeue_that_slurm_refuses_is_not_counted(
    tmp_path: Path, controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    controller.trouble = "Access denied"
    assert requeue.run(ended(tmp_path), 143) == 75
    assert requeue.read(tmp_path / "runs/run") == []
    assert "does not queue job 12 again: Access denied" in capsys.readouterr().err


def test_without_an_answer_from_the_controller_the_record_decides(tmp_path: Path, controller: Controller) -> None:
    controller.job = None
    assert requeue.run(ended(tmp_path), 143) == 75
    assert controller.requeued == ["12"]


def test_a_time_limit_too_short_for_a_step_is_no_endless_row(
    tmp_path: Path, controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    import time

    assert controller.job is not None
    controller.job["EndTime"] = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 60))
    resolved = ended(tmp_path)
    assert requeue.run(resolved, 143) == 75
    assert requeue.run(resolved, 143) == 75
    assert controller.requeued == ["12"]
    assert "the time limit left no time for one step" in capsys.readouterr().err
    assert [entry["why"] for entry in requeue.read(tmp_path / "runs/run")] == ["its time limit"]


def test_outside_of_a_job_there_is_nothing_to_queue_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UsageError, match="SLURM_JOB_ID is not set"):
        requeue.run(ask(tmp_path), 0)


def test_a_broken_record_of_requeues_counts_as_none(tmp_path: Path) -> None:
    write_atomic(tmp_path / "slurm" / "requeues.json", dump({"requeues": [1, {"job": "3"}]}))
    assert requeue.read(tmp_path) == [{"job": "3"}]
    (tmp_path / "slurm" / "requeues.json").write_text("{")
    assert requeue.read(tmp_path) == []
    assert json.loads("[]") == requeue.read(tmp_path / "nowhere")


# -- the configuration names another run, or none ----------------------------------------------------------------------


@pytest.mark.parametrize("renamed", [True, False], ids=["no run", "another job's run"])
def test_a_configuration_that_names_another_run_by_now_is_said(
    tmp_path: Path, controller: Controller, capsys: pytest.CaptureFixture[str], renamed: bool
) -> None:
    """With plain sbatch, the file was edited while the job ran: the run has saved, and nobody goes on with it."""
    ended(tmp_path, job="12" if renamed else "11", restart=0 if renamed else 3)
    resolved = ask(tmp_path, *["name=new"] * renamed)
    assert requeue.run(resolved, 75) == 75
    assert controller.requeued == []
    said = capsys.readouterr().err
    assert said.startswith(f"mpdist: job 12 is not queued again: {tmp_path}/config.yaml names the run {tmp_path}/runs/")
    assert ("no job is" if renamed else "the last one there is job 11, restart 3") in said


def test_a_run_that_was_finished_before_needs_no_word(
    tmp_path: Path, controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    assert requeue.run(ended(tmp_path, "done", 0, job="11"), 0) == 0
    assert capsys.readouterr().err == ""


def test_a_configuration_that_no_longer_loads_is_the_last_word(
    tmp_path: Path, controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.config(tmp_path)
    ended(tmp_path)
    path.write_text(path.read_text().replace('"micro"', '"mico"'))
    assert cli.main(["requeue", "--step-status", "75", str(path)]) == 75
    said = capsys.readouterr().err
    assert "did you mean `batch.micro`?" in said
    assert said.splitlines()[-1].startswith(f"mpdist: job 12 is not queued again: {path} does not load any more")
    assert controller.requeued == []


@pytest.mark.parametrize("why", ["in use", "another configuration"])
def test_a_start_that_was_refused_ends_with_its_cause_and_status_whatever_srun_made_of_it(
    tmp_path: Path, controller: Controller, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    """srun ends the other nodes' tasks, which wait for the refused one, and its own status is that of the killed."""
    resolved = ended(tmp_path, job="11")
    run = RunDir(tmp_path / "runs/run")
    if why == "in use":
        write_atomic(run.path / lock.NAME, dump({"host": "n1", "pid": 4, "slurm": ["11", "0"]}))
    else:
        run.freeze(resolved.to_yaml(), {})
        resolved = ask(tmp_path, "batch.global=16")
    for step_status in (137, 143):
        assert requeue.run(resolved, step_status) == 2
        said = capsys.readouterr().err
        assert said.startswith("mpdist: job 12 was refused, and is not queued again: ")
        assert ("pid 4 on n1, of Slurm job 11" if why == "in use" else "batch.global: 8 -> 16") in said
    assert requeue.run(resolved, 2) == 2
    assert capsys.readouterr().err == "", "the launcher's own words are the last"
