"""The argument list of sbatch, what a cluster is asked, and who is queued again: without a Slurm."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import tiny

from mpdist import cli, cluster, requeue, shipped, slurm, submit
from mpdist.config import Resolved, load
from mpdist.errors import ConfigError, UsageError
from mpdist.lines import dump, write_atomic
from mpdist.record import RunDir

TOP = Path(__file__).resolve().parents[2]


def ask(folder: Path, *overrides: str) -> Resolved:
    return load(tiny.config(folder), [*overrides, f"out_dir={folder}/runs"])


def words(folder: Path, *overrides: str) -> list[str]:
    return submit.arguments(ask(folder, *overrides), submit.Asked("c.yaml", overrides))


def test_the_list_is_sbatch_its_options_the_script_and_what_a_person_gave(tmp_path: Path) -> None:
    overrides = ("slurm.time=2h", "launch.nodes=4", "slurm.partition=gpu", "track.every=3")
    assert words(tmp_path, *overrides) == [
        *("sbatch", "--parsable", "--job-name=run", "--nodes=4", "--ntasks-per-node=1", "--partition=gpu"),
        *("--time=02:00:00", "--signal=USR1@300", "--requeue", "--open-mode=append"),
        f"--output={tmp_path}/runs/run/slurm/%j.log",
        *(str(TOP / "slurm" / "train.sbatch"), "c.yaml", *overrides),
    ]


@pytest.mark.parametrize(
    ("override", "words_"),
    [
        ("slurm.account=proj", ["--account=proj"]),
        ("slurm.qos=high", ["--qos=high"]),
        ("slurm.constraint=h100&nvlink", ["--constraint=h100&nvlink"]),
        ("slurm.gpus_per_node=8", ["--gpus-per-node=8"]),
        ("slurm.gres=gpu:a100:4", ["--gres=gpu:a100:4"]),
        ("slurm.cpus_per_node=96", ["--cpus-per-task=96"]),
        ("slurm.mem=1.5GiB", ["--mem=1536M"]),
        ("slurm.mem=0", ["--mem=0"]),
        ("slurm.exclusive=true", ["--exclusive"]),
        ("slurm.signal_lead=90s", ["--signal=USR1@90"]),
        ("slurm.dependency=afterok:7", ["--dependency=afterok:7", "--kill-on-invalid-dep=yes"]),
        ("slurm.array=0-7%2", ["--array=0-7%2"]),
        ("slurm.extra=[--mail-type=END,'--comment=two words']", ["--mail-type=END", "--comment=two words"]),
        ("slurm.time=90061s", ["--time=1-01:01:01"]),
    ],
)
def test_each_key_is_an_option(tmp_path: Path, override: str, words_: list[str]) -> None:
    found = words(tmp_path, override)
    assert set(words_) <= set(found)
    assert found.index(words_[0]) < found.index(str(TOP / "slurm" / "train.sbatch"))


def test_gpus_follow_from_the_ranks_where_the_device_is_theirs(tmp_path: Path) -> None:
    assert "--gpus-per-node=4" in words(tmp_path, "launch.device=cuda", "launch.ranks=4")
    assert not any("gpu" in word.partition(".sbatch")[0] for word in words(tmp_path, "launch.ranks=4")[:-4])
    both = words(tmp_path, "launch.device=cuda", "launch.ranks=4", "slurm.gres=gpu:h100:4")
    assert not any(word.startswith("--gpus-per-node") for word in both)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("slurm.extra=[--partition=x]", "set slurm.partition"),
        ("slurm.extra=[-p x]", "set slurm.partition"),
        ("slurm.extra=[--nodes=3]", "`mpdist submit` decides"),
        ("slurm.extra=[mail]", "no option of sbatch's"),
        ("slurm.array=a-b", "numbers and ranges"),
        ("slurm.mem=12x", "a number and a unit"),
        ("slurm.requeues=-1", "slurm.requeues = -1"),
        ("slurm.partiton=x", "did you mean `slurm.partition`"),
        ("slurm.signal_lead=0.5s", "slurm.signal_lead"),
        ("slurm.time=6m", "slurm.time = 360.0 (command line), slurm.signal_lead = 300.0 (default)"),
    ],
)
def test_what_slurm_could_not_take_is_refused_by_the_configuration(tmp_path: Path, override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=r"the configuration has 1 problem") as caught:
        ask(tmp_path, override)
    assert named in str(caught.value)


def test_gpus_are_asked_for_in_one_way(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both ask for GPUs"):
        ask(tmp_path, "slurm.gpus_per_node=4", "slurm.gres=gpu:4")


@pytest.mark.parametrize(
    ("folder", "array", "pattern"),
    [
        ("/a/100%", False, "/a/100%%/x/slurm/%j.log"),
        ("/a", True, "/a/x-seed%a/slurm/%A_%a.log"),
        ("/back\\slash", False, "/back\\slash/x/slurm/job.log"),
    ],
)
def test_a_folder_that_slurm_would_read_as_a_pattern(folder: str, array: bool, pattern: str) -> None:
    assert submit.log_pattern(Path(folder), "x", array) == pattern


def test_the_indices_of_an_array_are_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.seeds("0-3,8,10-20:5%2") == [0, 1, 2, 3, 8, 10, 15, 20]
    path = tiny.config(tmp_path)
    assert cli.main(["launch", str(path), "--seed", "3", "--dry-run", "--ranks", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert next(line for line in printed if line.startswith("seed ")).split()[:2] == ["seed", "3"]
    assert next(line for line in printed if line.startswith("name ")).split()[:2] == ["name", "run-seed3"]


@pytest.mark.parametrize(
    ("gres", "count"),
    [("gpu:8", 8), ("gpu:a100:4(S:0-1),nvme:1", 4), ("gpu", 1), ("(null)", 0), ("gpu:a100:2,gpu:v100:2", 4), ("", 0)],
)
def test_gpus_of_a_node(gres: str, count: int) -> None:
    assert cluster.gpus(gres) == count


PARTITIONS = [
    {"PartitionName": "small", "Default": "YES", "MaxNodes": "2", "TotalNodes": "8", "MaxTime": "01:00:00", "State": "UP"},
    {"PartitionName": "big", "MaxNodes": "UNLIMITED", "MinNodes": "4", "TotalNodes": "8", "MaxTime": "UNLIMITED", "State": "UP"},
    {"PartitionName": "shut", "MaxNodes": "UNLIMITED", "TotalNodes": "8", "MaxTime": "UNLIMITED", "State": "INACTIVE"},
]  # fmt: skip
NODES = [
    {"NodeName": f"n{i}", "CPUTot": "96", "RealMemory": "1000000", "Gres": "gpu:h100:8", "Partitions": "small,big,shut"}
    for i in range(8)
]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "show", lambda kind, *_: PARTITIONS if kind == "partition" else NODES)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["launch.nodes=3"], ["launch.nodes = 3 (command line)", "partition small gives a job at most 2 nodes"]),
        (["slurm.time=2h"], ["slurm.time = 7200 s (command line)", "allows 01:00:00 at most"]),
        (["slurm.partition=big"], ["partition big wants 4 nodes at least"]),
        (["slurm.partition=shut"], ["its state is INACTIVE"]),
        (["slurm.partition=none"], ["no such partition", "take one of small, big, shut"]),
        (["slurm.cpus_per_node=97"], ["asks for 97 CPUs of each node", "the largest has 96"]),
        (["slurm.gpus_per_node=16"], ["asks for 16 GPUs of each node", "the largest has 8"]),
        (["slurm.time=2h", "launch.nodes=3"], ["2 problems"]),
        (["slurm.partition=small,big", "slurm.time=2h"], ["wants 4 nodes", "allows 01:00:00"]),
    ],
    ids=lambda value: " ".join(value) if "=" in value[0] else "",
)
def test_what_this_cluster_can_never_give_is_refused(tmp_path: Path, overrides: list[str], named: list[str]) -> None:
    resolved = ask(tmp_path, *overrides)
    with pytest.raises(ConfigError) as caught:
        cluster.check(resolved, submit.gpus_of(resolved))
    for text in named:
        assert text in str(caught.value)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    "overrides",
    [["launch.nodes=2", "slurm.time=1h"], ["slurm.partition=small,big", "slurm.time=2h", "launch.nodes=4"]],
    ids=" ".join,
)
def test_what_it_can_give_is_not(tmp_path: Path, overrides: list[str]) -> None:
    cluster.check(ask(tmp_path, *overrides), 8)


@pytest.mark.usefixtures("known")
def test_the_partition_of_sbatchs_own_variable_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "big")
    with pytest.raises(ConfigError, match="partition big wants 4 nodes at least"):
        cluster.check(ask(tmp_path), 0)


def test_what_cannot_be_asked_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cluster.check(ask(tmp_path, "slurm.partition=nowhere", "launch.nodes=900"), 0)


def test_the_sbatch_files_travel_with_the_package() -> None:
    assert {"slurm/train.sbatch", "slurm/sweep.sbatch", "slurm/doctor.sbatch"} <= set(shipped.names())
    assert shipped.describe(shipped.root() / "slurm/train.sbatch") == "One run on the nodes of a Slurm job"


# -- queued again ------------------------------------------------------------------------------------------------------


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
            status = requeue.run(ended(tmp_path, state, code, restart=times - 1, rank=None), 137)
            assert status == (137 if code is None else code)
            said = capsys.readouterr().err
            assert controller.requeued == ["12"] * (min(times, 2) if asked else 0)
            assert ("lost n2, which no longer answers or started anew" in said) == (asked and times < 3)
    assert ("the run has used up its requeues" in said) == asked


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
