"""What Slurm says, read without Slurm: host lists, the step's environment, why a job ends. tests/slurm asks the real one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from host_lists import FORMS

from mpdist import interface, slurm
from mpdist.errors import MachineError, UsageError

STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_CPUS_ON_NODE": "64",
}


@pytest.mark.parametrize(("text", "names"), FORMS)
def test_a_host_list_in_each_of_slurms_forms(text: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no scontrol
    assert slurm.hosts(text) == names


@pytest.mark.parametrize("text", ["n[1-3", "n1]", "n[[1]]", "n[a]", "n[]", "n[3-1]", "n[1-99999]", "a[0-300]b[0-300]"])
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        slurm.hosts(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,2(x2),8(x1)", [1, 2, 2, 8]), ("72(x2)", [72, 72])]
)
def test_tasks_of_each_node(text: str, counts: list[int]) -> None:
    assert slurm.per_node(text) == counts


def test_a_count_that_slurm_does_not_write_is_refused() -> None:
    with pytest.raises(MachineError, match="no count of tasks per node"):
        slurm.per_node("2x3")


def test_a_step_names_its_own_nodes_not_the_jobs() -> None:
    task = slurm.task(STEP)
    assert task is not None
    assert (task.hosts, task.node, task.nodes, task.beside, task.cpus) == (("n2", "n3"), 1, 2, 1, 64)
    assert (task.name, task.restart) == ("12.0.0", 0)
    again = slurm.task({**STEP, "SLURM_RESTART_COUNT": "3"})
    assert again is not None
    assert again.name == "12.0.3"


@pytest.mark.parametrize("step", ["", "4294967290", "4294967291"])
def test_a_batch_script_and_an_interactive_shell_are_no_task(step: str) -> None:
    assert slurm.task({**STEP, "SLURM_STEP_ID": step}) is None
    assert slurm.task({}) is None


def test_a_step_with_uneven_nodes_knows_its_own_share() -> None:
    task = slurm.task({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NUM_TASKS": "3"})
    assert task is not None
    assert task.beside == 1


def test_jobs_and_restarts_meet_at_ports_of_their_own() -> None:
    first = {next(slurm.ports(slurm.task({**STEP, "SLURM_JOB_ID": str(job)}))) for job in range(100)}  # type: ignore[arg-type]
    assert len(first) == 100
    assert all(20000 <= port < 30000 for port in first)


def test_a_port_in_use_is_passed_over() -> None:
    import socket

    task = slurm.task({**STEP, "SLURM_JOB_ID": "77"})
    assert task is not None
    wanted = next(port for port in slurm.ports(task) if slurm.is_free(port))
    with socket.socket() as taken:
        taken.bind(("", wanted))
        taken.listen()
        chosen = slurm.free_port(task)
    assert chosen != wanted
    assert chosen in set(slurm.ports(task))


def test_the_other_nodes_hear_the_port_and_nothing_is_left(tmp_path: Path) -> None:
    task = slurm.task(STEP)
    assert task is not None
    with slurm.meeting_at(23456, tmp_path / "run", task):
        assert slurm.called_port(tmp_path / "run", task, 5) == 23456
        with pytest.raises(
            MachineError, match="waited 0 s for the first node, n2"
        ):  # another restart's call is not ours
            slurm.called_port(tmp_path / "run", slurm.task({**STEP, "SLURM_RESTART_COUNT": "1"}), 0)  # type: ignore[arg-type]
    assert not (tmp_path / "run" / "slurm").exists()


def test_what_a_killed_launcher_has_left_is_taken_away(tmp_path: Path) -> None:
    left = tmp_path / "slurm" / "meeting-11.0.0.json"
    left.parent.mkdir()
    left.write_text("{}")
    with slurm.meeting_at(23456, tmp_path, slurm.task(STEP)):
        assert not left.exists()


def test_a_master_address_that_is_not_the_first_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_resolves", lambda _: True)
    monkeypatch.setattr(slurm, "same_host", lambda one, other: one == other)
    task = slurm.task(STEP)
    assert task is not None
    assert slurm.first_address(task, None) == "n2"
    with pytest.raises(MachineError, match="MASTER_ADDR = n1, but rank 0 of this step runs on n2"):
        slurm.first_address(task, "n1")


def at(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))


def job(state: str, start: float, end: float, **more: str) -> dict[str, str]:
    known = {"JobState": state, "StartTime": at(start), "EndTime": at(end), "TimeLimit": "01:00:00", "Restarts": "0"}
    return {**known, "PreemptTime": "None", **more}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (lambda: job("RUNNING", -3300, 300), slurm.TIME_LIMIT),
        (lambda: job("RUNNING", -600, 3000), None),
        (lambda: job("RUNNING", -600, 20, PreemptTime=at(-1)), slurm.PREEMPTED),
        (lambda: job("COMPLETING", -3600, 0), slurm.TIME_LIMIT),
        (lambda: job("COMPLETING", -600, 0), slurm.CANCELLED),
        (lambda: job("COMPLETING", -600, 0, Restarts="1"), slurm.QUEUED_AGAIN),
        (lambda: job("RUNNING", -600, 0, EndTime="Unknown"), None),
    ],
)
def test_why_a_job_ends(said: Callable[[], dict[str, str]], why: str | None) -> None:
    assert slurm.why_stopped(said(), restart=0, lead=300) == why


@pytest.mark.parametrize(
    ("text", "value"), [("05:00", 300), ("01:00:00", 3600), ("1-02:03:04", 93784), ("UNLIMITED", None)]
)
def test_a_limit_in_seconds(text: str, value: float | None) -> None:
    assert slurm.seconds(text) == value


def test_what_scontrol_says_is_read_by_its_names() -> None:
    said = "JobId=12 JobName=a b=c d Account=(null) Comment= TRES=cpu=8,node=2 Command=/x y/z.sh one two  WorkDir=/w"
    found = slurm.pairs(said)
    assert (found["JobId"], found["Account"], found["Comment"]) == ("12", "(null)", "")
    assert (found["TRES"], found["WorkDir"]) == ("cpu=8,node=2", "/w")


def test_the_interface_of_a_peer_is_chosen_and_the_users_choice_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "addresses", lambda: {"lo": "127.0.0.1", "eth0": "10.1.0.5", "eth1": "10.2.0.5"})
    monkeypatch.setattr(interface, "towards", lambda peer, _: {"n2": "eth1"}.get(peer))
    env: dict[str, str] = {}
    assert interface.choose(env, ["nowhere", "n2"]) == "eth1"
    assert env == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    env = {"NCCL_SOCKET_IFNAME": "eth9"}
    interface.choose(env, ["n2"])
    assert env == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth9"}


def test_nccl_finds_infiniband_itself_and_nothing_is_set_where_nothing_is_certain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interface, "towards", lambda *_: None)
    monkeypatch.setattr(interface, "addresses", lambda: {"lo": "127.0.0.1", "eth0": "10.1.0.5", "ib0": "10.2.0.5"})
    env: dict[str, str] = {}
    assert interface.choose(env, ["n2"]) is None
    assert env == {}
    monkeypatch.setattr(interface, "towards", lambda *_: "eth0")
    interface.choose(env, ["n2"])
    assert env == {"GLOO_SOCKET_IFNAME": "eth0"}
    monkeypatch.setattr(interface, "towards", lambda *_: None)
    monkeypatch.setattr(
        interface, "addresses", lambda: {"lo": "127.0.0.1", "eth0": "10.1.0.5", "docker0": "172.17.0.1"}
    )
    assert interface.choose({}, ["n2"]) == "eth0"


def test_the_loopback_is_no_way_to_a_peer() -> None:
    assert interface.towards("127.0.0.1", interface.addresses()) is None
    assert interface.addresses()["lo"] == "127.0.0.1"


def test_a_second_term_under_slurm_asks_for_no_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a grace time it says TERM again and leaves KillWait seconds, in which a save may still end."""
    import signal

    from mpdist import watch

    for name in STEP:
        monkeypatch.delenv(name, raising=False)
    assert not watch.repeated(signal.SIGTERM)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert watch.repeated(signal.SIGTERM)
    assert not watch.repeated(signal.SIGINT)
    monkeypatch.setattr(watch.os, "_exit", lambda code: pytest.fail(f"ended at once with {code}"))
    stop = watch.Stop()
    stop._heard(signal.SIGTERM, None)
    stop._hard_at = time.monotonic() - 60
    stop._heard(signal.SIGTERM, None)
    assert stop.asked == "SIGTERM"


@pytest.mark.parametrize("in_a_step", [True, False])
def test_a_jobs_log_says_nothing_that_only_a_terminal_needs_and_its_end_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_a_step: bool
) -> None:
    """All nodes' launchers write into one log there, and nobody can send a second INT."""
    import signal

    from mpdist import launch, supervise
    from mpdist.record import RunDir

    for name, value in STEP.items():
        if in_a_step:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    child = supervise.Child([], {}, tmp_path / "log", [(signal.SIGUSR1, time.monotonic())], 60.0, lambda *_: None)
    child._serve_signals()
    said = capsys.readouterr().out
    assert "SIGUSR1: stopping at the next step boundary" in said
    assert ("a second INT or TERM" in said) != in_a_step
    for state, code in (("done", 0), ("preempted", 75)):
        for rank in (0, 2):
            assert launch._said(RunDir(tmp_path, rank=rank), {"state": state, "step": 4, "exit": code}, child) == code
            assert (capsys.readouterr().out == "") == (in_a_step and rank == 2)


@pytest.mark.parametrize("name", ["slurm/train.sbatch", "launch/interactive.sh"])
def test_c93_what_starts_a_run_on_several_nodes_has_srun_end_all_when_one_fails(name: str) -> None:
    lines = (Path(__file__).resolve().parents[2] / name).read_text().replace("\\\n", " ").splitlines()
    steps = [line for line in lines if line.startswith(("srun ", "exec srun "))]
    assert steps
    assert all(" --kill-on-bad-exit=1 " in step for step in steps)
