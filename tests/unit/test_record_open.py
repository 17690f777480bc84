"""Who may run in a directory, and what an existing one means: the live-run lock and open_run."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mpdist import lock
from mpdist.config import Resolved, load
from mpdist.errors import UsageError
from mpdist.record import RunDir, moved, open_run, standing

CONFIG = """
name: a
model: {config: {model_type: llama, vocab_size: 97, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4}}
data: {train: [{path: x.txt, format: text}], tokenizer: bytes, seq_len: 64}
batch: {micro: 1, global: 4}
budget: {steps: 10}
optim: {horizon: 10}
"""


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lock.TOKEN, "")
    monkeypatch.delenv(lock.TOKEN)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def ask(folder: Path, *overrides: str) -> Resolved:
    path = folder / "asked.yaml"
    path.write_text(CONFIG)
    return load(path, [f"out_dir={folder / 'runs'}", *overrides])


def begun(folder: Path, **status: Any) -> RunDir:
    """A run that got to step 3 and ended."""
    run, mode = open_run(ask(folder), {"ranks": 2})
    assert mode == "new"
    run.start_session()
    run.status(state="running", step=3, attempt=4)
    run.status(**status)
    run.close()
    run.release()
    return run


def contents(path: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(path.rglob("*")) if p.is_file()}


# -- open_run ------------------------------------------------------------


def test_a_new_run_is_frozen_and_claimed(tmp_path: Path) -> None:
    resolved = ask(tmp_path)
    run, mode = open_run(resolved, {"ranks": 2})
    assert mode == "new"
    assert run.path == tmp_path / "runs/a"
    assert load(run.config_path).digest() == resolved.digest()
    assert json.loads(run.plan_path.read_text()) == {"ranks": 2}
    owner = lock.holder(run.path)
    assert owner is not None
    assert owner["pid"] == os.getpid()
    assert owner["host"] == platform.node()
    run.release()
    assert lock.holder(run.path) is None


def test_a_launch_that_trained_nothing_is_new_again_with_any_config(tmp_path: Path) -> None:
    run, _ = open_run(ask(tmp_path), {})
    run.start_session()
    run.status(state="failed", exit=2)
    run.release()
    again, mode = open_run(ask(tmp_path, "seed=7"), {})
    assert mode == "new"
    assert load(again.config_path).config.seed == 7


@pytest.mark.parametrize("state", ["running", "preempted", "failed", "diverged"])
def test_a_run_that_ended_early_in_any_way_resumes(tmp_path: Path, state: str) -> None:
    begun(tmp_path, state=state)
    run, mode = open_run(ask(tmp_path), {})
    assert mode == "resume"
    assert run.changes == []
    assert run.last_alive is not None
    assert run.start_session() == 2


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    run = begun(tmp_path, state="done", step=10)
    before = contents(run.path)
    _, mode = open_run(ask(tmp_path), {"ranks": 2})
    assert mode == "finished"
    assert contents(run.path) == before


def test_a_larger_budget_goes_on_from_a_finished_run(tmp_path: Path) -> None:
    begun(tmp_path, state="done", step=10)
    run, mode = open_run(ask(tmp_path, "budget.steps=20"), {})
    assert mode == "resume"
    assert run.changes == ["budget.steps: 10 -> 20"]


def test_another_configuration_is_refused_with_every_difference(tmp_path: Path) -> None:
    run = begun(tmp_path, state="preempted")
    before = contents(run.path)
    with pytest.raises(UsageError) as refusal:
        open_run(ask(tmp_path, "seed=1", "batch.global=8", "track.every=1", "optim.lr=1e-3"), {})
    text = str(refusal.value)
    assert "seed: 0 -> 1" in text
    assert "batch.global: 4 -> 8" in text
    assert "optim.lr" in text
    assert "track.every" not in text, "what cannot change the numbers is no difference"
    assert refusal.value.status == 2
    assert contents(run.path) == before


def test_a_budget_that_may_not_grow_is_refused_with_the_rule_that_would_let_it(tmp_path: Path) -> None:
    begun(tmp_path, state="done")
    with pytest.raises(UsageError, match=r"a constant one, or one with optim\.horizon") as refusal:
        open_run(ask(tmp_path, "budget.steps=5"), {})
    assert "half-way" not in str(refusal.value)
    with pytest.raises(UsageError) as refusal:
        open_run(ask(tmp_path, "seed=1", "budget.steps=20"), {})
    assert "half-way" not in str(refusal.value), "it is finished"
    assert "optim.horizon" not in str(refusal.value)


def test_another_cut_of_the_batch_resumes_and_is_listed(tmp_path: Path) -> None:
    begun(tmp_path, state="preempted")
    run, mode = open_run(ask(tmp_path, "batch.micro=2", "track.every=1"), {})
    assert mode == "resume"
    assert run.changes == ["batch.micro: 1 -> 2"]
    assert load(run.config_path).config.batch.micro == 2, "workers read the frozen file, so it is the new one"
    assert load(run.session_path(1) / "config.yaml").config.batch.micro == 1
    worker = RunDir(run.path)
    worker.join(run.start_session())
    assert worker.changes == run.changes
    assert worker.began == run.began
    run.status(state="running")
    assert worker.previous["state"] == "preempted"
    assert worker.previous["step"] == 3
    assert worker.last_alive == run.last_alive


@pytest.mark.parametrize(
    ("state", "ranks", "nodes", "expected"),
    [
        ({"ranks": 2, "nodes": 1}, 1, 1, ["launch.ranks: 2 -> 1"]),
        ({"ranks": 4, "nodes": 1}, 4, 2, ["launch.ranks: 4 -> 2", "launch.nodes: 1 -> 2"]),
        ({"ranks": 4, "nodes": 2}, 2, 1, ["launch.nodes: 2 -> 1"]),
        ({"ranks": 2}, 4, 1, ["launch.ranks: 2 -> 4"]),
        ({"ranks": 1}, 2, 2, []),
        ({"ranks": 2, "nodes": 1}, 2, 1, []),
    ],
)
def test_a_resume_lists_the_world_that_was_and_is(
    state: dict[str, int], ranks: int, nodes: int, expected: list[str]
) -> None:
    listed = ["launch.ranks: auto -> 2", "launch.nodes: 1 -> 2", "batch.micro: 1 -> 2"]
    assert moved(listed, state, ranks, nodes) == [*expected, "batch.micro: 1 -> 2"]


def test_never_refuses_a_run_that_has_begun_and_no_other(tmp_path: Path) -> None:
    run, mode = open_run(ask(tmp_path, "checkpoint.resume=never"), {})
    assert mode == "new"
    run.release()
    run, mode = open_run(ask(tmp_path, "checkpoint.resume=never"), {})
    assert mode == "new"
    run.status(step=1, attempt=1)
    run.release()
    with pytest.raises(UsageError, match=r"checkpoint\.resume = never"):
        open_run(ask(tmp_path, "checkpoint.resume=never"), {})
    assert open_run(ask(tmp_path), {})[1] == "resume"


def test_another_starting_point_is_another_run(tmp_path: Path) -> None:
    begun(tmp_path, state="preempted")
    with pytest.raises(UsageError, match=r"checkpoint\.resume: auto -> "):
        open_run(ask(tmp_path, f"checkpoint.resume={tmp_path / 'elsewhere'}"), {})


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_is_no_run_directory_is_not_written_into(tmp_path: Path, what: str) -> None:
    (tmp_path / "runs").mkdir()
    if what == "file":
        (tmp_path / "runs/a").write_text("mine")
    else:
        (tmp_path / "runs/a").mkdir()
        (tmp_path / "runs/a/thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match="exists and is no"):
        open_run(ask(tmp_path), {})
    assert len(list((tmp_path / "runs").rglob("*"))) == (1 if what == "file" else 2)


def test_a_frozen_config_of_another_version_is_refused(tmp_path: Path) -> None:
    run = begun(tmp_path, state="preempted")
    with open(run.config_path, "a") as file:
        file.write("no_such_key: 1\n")
    with pytest.raises(UsageError, match="cannot be resumed"):
        open_run(ask(tmp_path), {})


def test_the_worker_of_a_launch_opens_what_its_launcher_holds(tmp_path: Path) -> None:
    run, _ = open_run(ask(tmp_path), {})
    code = """
import sys
from mpdist.config import load
from mpdist.record import open_run
run, mode = open_run(load(sys.argv[1]), {})
run.release()
print(mode)
"""
    child = subprocess.run([sys.executable, "-c", code, str(run.config_path)], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert child.stdout == "new\n"
    assert lock.holder(run.path), "the worker's release is not the launcher's"


# -- failing again and again ---------------------------------------------


def fail(folder: Path, *overrides: str, step: int = 3, started: bool = True, ranks: int = 2, **end: Any) -> RunDir:
    """One more session of the run, which ends at `step`; without `state`, killed without a word."""
    run, _ = open_run(ask(folder, *overrides), {"ranks": ranks, "nodes": 1})
    run.start_session({"ranks": ranks, "nodes": 1})
    if started:
        run.event("start", step)
        run.status(state="running", step=step, attempt=step + 1)
    if end:
        end = {"reason": "why it ended", "rank": 1, "exit": 1} | end
        run.event("end", step, step + 1, **end)
        run.status(state=end["state"], step=step)
    run.close()
    run.release()
    return run


def refused(folder: Path, *overrides: str, ranks: int = 2) -> str:
    """The refusal of one more start, which writes nothing; empty if there is none."""
    run = RunDir(folder / "runs/a")
    before = contents(run.path)
    try:
        standing(ask(folder, *overrides), {"ranks": ranks, "nodes": 1})
    except UsageError as error:
        with pytest.raises(UsageError):
            open_run(ask(folder, *overrides), {"ranks": ranks, "nodes": 1})
        return str(error)
    finally:
        assert contents(run.path) == before
    return ""


def test_a_run_that_fails_twice_at_one_step_is_not_started_again(tmp_path: Path) -> None:
    fail(tmp_path, state="failed", reason="ValueError: first\nmore", rank=0)
    assert refused(tmp_path) == ""
    fail(tmp_path, state="failed", reason="ValueError: odd\nmore", rank=1)
    text = refused(tmp_path)
    assert "has failed 2 times in a row at step 3, the last time (rank 1): ValueError: odd\n" in text
    assert "launch.retries = 2 (default)" in text
    assert "launch.retries=3 tries once more" in text
    assert refused(tmp_path, "launch.retries=3") == ""
    fail(tmp_path, "launch.retries=3", state="failed")
    assert "failed 3 times in a row" in refused(tmp_path, "launch.retries=3")
    assert "launch.retries=4" in refused(tmp_path)


def test_a_limit_of_one_and_divergence_count_too(tmp_path: Path) -> None:
    fail(tmp_path, state="diverged", exit=5)
    assert "has failed once at step 3" in refused(tmp_path, "launch.retries=1")
    fail(tmp_path, state="failed")
    assert "2 times" in refused(tmp_path)


def test_failures_at_step_0_count_whatever_began(tmp_path: Path) -> None:
    fail(tmp_path, step=0, started=False, state="failed", exit=1)
    fail(tmp_path, step=0, state="failed")
    assert "2 times in a row at step 0" in refused(tmp_path)


@pytest.mark.parametrize(
    "neutral",
    [
        {},
        {"started": False, "state": "failed", "exit": 4},
        {"started": False, "state": "failed", "exit": 6},
        {"started": False, "state": "failed", "exit": 2},
        {"state": "failed", "exit": 130},
        {"state": "failed", "exit": 6, "reason": "saving step-00000004 failed on rank 1: No space left on device"},
    ],
    ids=[
        "killed outright",
        "machine while starting",
        "checkpoints damaged",
        "data altered",
        "ended by the user",
        "full disk",
    ],
)
def test_what_is_no_fault_of_the_run_neither_counts_nor_absolves(tmp_path: Path, neutral: dict[str, Any]) -> None:
    for _ in range(3):
        fail(tmp_path, **neutral)
    assert refused(tmp_path) == ""
    fail(tmp_path, state="failed")
    fail(tmp_path, **neutral)
    assert refused(tmp_path) == ""
    fail(tmp_path, state="failed", exit=4)
    fail(tmp_path, "launch.retries=9", **neutral)
    assert "2 times in a row at step 3" in refused(tmp_path)


@pytest.mark.parametrize(
    "between", [{"step": 4, "state": "failed"}, {"state": "preempted", "exit": 75}, {"state": "done", "exit": 0}]
)
def test_getting_on_ends_the_row(tmp_path: Path, between: dict[str, Any]) -> None:
    fail(tmp_path, state="failed")
    fail(tmp_path, **between)
    more = () if between["state"] != "done" else ("budget.steps=20",)
    fail(tmp_path, *more, state="failed")
    assert refused(tmp_path, *more) == ""


@pytest.mark.parametrize("changed", ["batch.micro=2", "checkpoint.background=false"])
def test_a_changed_setting_may_have_mended_it(tmp_path: Path, changed: str) -> None:
    fail(tmp_path, state="failed")
    fail(tmp_path, state="failed")
    assert refused(tmp_path)
    assert refused(tmp_path, changed) == ""
    fail(tmp_path, changed, state="failed")
    assert refused(tmp_path, changed) == ""
    assert refused(tmp_path), "back to what has failed twice already"
    fail(tmp_path, changed, state="failed")
    assert refused(tmp_path, changed)
    fail(tmp_path, changed, "launch.retries=9", step=9, state="failed")
    assert refused(tmp_path) == "", "it got further"


def test_a_file_that_was_written_or_put_back_since_may_have_mended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.bak").write_text("good")
    (tmp_path / "x.txt").write_text("odd")
    os.utime("x.bak", (1, 1))
    os.utime("x.txt", (2e9, 2e9))  # a file server's clock that is ahead is no change
    fail(tmp_path, state="failed", exit=2)
    fail(tmp_path, state="failed", exit=2)
    assert refused(tmp_path)
    (tmp_path / "x.bak").rename("x.txt")  # with its old time of writing
    assert refused(tmp_path) == ""


def test_a_torn_line_in_the_history_is_no_reason_to_refuse(tmp_path: Path) -> None:
    fail(tmp_path, state="failed")
    run = fail(tmp_path, state="failed")
    with run.events_path.open("ab") as file:
        file.write(bytes(100) + b'{"event": "save"}\n')
    assert "2 times in a row" in refused(tmp_path)


def test_what_a_scheduler_changes_at_each_start_mends_nothing(tmp_path: Path) -> None:
    fail(tmp_path, "launch.port=2001", state="failed")
    fail(tmp_path, "launch.port=2002", "launch.address=n1", state="failed")
    assert refused(tmp_path, "launch.port=2003")


def test_another_number_of_ranks_and_another_version_may_have_mended_it(tmp_path: Path) -> None:
    fail(tmp_path, state="failed")
    run = fail(tmp_path, state="failed")
    assert refused(tmp_path, ranks=2)
    assert refused(tmp_path, ranks=4) == ""
    run.write_env({"versions": {"mpdist": "0.0.1"}})
    assert refused(tmp_path) == "", "only the first was under this version"


# -- the lock ------------------------------------------------------------

_HOLD = """
import os, sys, time
from mpdist.errors import UsageError
from mpdist.record import RunDir
run = RunDir(sys.argv[1])
try:
    run.claim()
except UsageError as error:
    print("refused", error, flush=True)
    sys.exit(2)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def hold(folder: Path, seconds: float = 60) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", _HOLD, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True)


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def end(*children: subprocess.Popen[str]) -> None:
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_a_second_live_run_is_refused_by_host_and_pid(tmp_path: Path) -> None:
    child = hold(tmp_path)
    assert first_line(child) == "held\n"
    with pytest.raises(UsageError) as refusal:
        RunDir(tmp_path).claim()
    assert f"pid {child.pid} on {platform.node()}" in refusal.value.what
    assert refusal.value.do
    end(child)


def test_of_many_that_claim_at_once_one_wins(tmp_path: Path) -> None:
    children = [hold(tmp_path, 60) for _ in range(6)]
    lines = [first_line(child) for child in children]
    assert sum(line == "held\n" for line in lines) == 1, lines
    winner = children[lines.index("held\n")]
    assert all(f"pid {winner.pid} " in line for line in lines if line != "held\n"), lines
    end(*children)


def test_the_lock_of_a_killed_run_is_taken_over(tmp_path: Path) -> None:
    child = hold(tmp_path)
    assert first_line(child) == "held\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    run = RunDir(tmp_path)
    run.claim()
    assert (lock.holder(tmp_path) or {})["pid"] == os.getpid()
    run.release()
    end(child)


def test_claiming_twice_in_one_process_is_one_claim(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.claim()
    run.claim()
    run.release()
    run.release()
    RunDir(tmp_path).claim()


def plant(folder: Path, **changes: Any) -> None:
    owner = lock._me() | {"token": "other", "since": time.time()} | changes
    (folder / lock.NAME).write_text(json.dumps(owner))


def test_a_live_pid_holds_where_the_file_system_has_no_locks(tmp_path: Path) -> None:
    plant(tmp_path)
    with pytest.raises(UsageError, match=f"pid {os.getpid()}"):
        RunDir(tmp_path).claim()


@pytest.mark.parametrize(
    "changes", [{"started": "1"}, {"boot": "before"}, {"pid": 2**22 + 1}], ids=["pid reused", "rebooted", "pid gone"]
)
def test_a_dead_holder_on_this_host_is_replaced(tmp_path: Path, changes: dict[str, Any]) -> None:
    plant(tmp_path, **changes)
    RunDir(tmp_path).claim()


def test_the_lock_of_another_host_is_refused_with_the_way_to_clear_it(tmp_path: Path) -> None:
    plant(tmp_path, host="node17", pid=2**22 + 1)
    with pytest.raises(UsageError) as refusal:
        RunDir(tmp_path).claim()
    assert f"pid {2**22 + 1} on node17" in refusal.value.what
    assert f"remove {tmp_path / lock.NAME}" in refusal.value.do
    (tmp_path / lock.NAME).unlink()
    RunDir(tmp_path).claim()


def test_a_requeued_job_takes_over_from_its_former_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, host="node17", slurm=["42", "0"])
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    with pytest.raises(UsageError):
        RunDir(tmp_path).claim()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    RunDir(tmp_path).claim()


def test_a_lost_node_that_lives_on_gives_way_to_the_jobs_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is still held, perhaps seen to be so through a network file system; what it writes no longer counts."""
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    former, later = RunDir(tmp_path), RunDir(tmp_path)
    former.claim()
    former.start_session()
    former.status(state="running", step=3)
    monkeypatch.delenv(lock.TOKEN)
    with pytest.raises(UsageError, match="in use"):
        RunDir(tmp_path).claim()
    assert not former.taken_over
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    later.claim()
    assert (former.taken_over, later.taken_over) == (True, False)
    later.start_session()
    later.status(state="running", step=4)
    former.status(state="failed", step=9, exit=1)
    former.release()
    status = later.read_status() or {}
    assert (status["state"], status["step"], status["session"]) == ("running", 4, 2)
    assert lock.holder(tmp_path), "the later start's claim stands"
    assert not later.taken_over


def test_an_empty_lock_is_waited_for_and_then_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_WRITING_S", 0.2)
    (tmp_path / lock.NAME).touch()
    start = time.monotonic()
    RunDir(tmp_path).claim()
    assert 0.2 <= time.monotonic() - start < 5
