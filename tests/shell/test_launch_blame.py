"""Who failed first, from what ranks and torchrun leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mpdist import blame, stacks, watch
from mpdist.blame import Agent, first_failure
from mpdist.errors import CheckpointError, Diverged
from mpdist.hang import Finding

LOG = """\
[rank1]: no module called fla_attn
W1129 23:40:01.004000 10 torch/api.py:1029] Sending process 100 closing signal SIGTERM
E1129 23:40:01.104000 10 torch/api.py:1003] failed (exitcode: -9) local_rank: 1 (pid: 101) of binary: py
Traceback (most recent call last):
============================================================
worker.py FAILED
Failures:
[1]:
  time      : 2026-11-29_23:40:01
  host      : vm
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 100)
  error_file: <N/A>
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_23:40:01
  host      : vm
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 101)
  error_file: <N/A>
============================================================
"""


def report(rank: int, **kwargs: object) -> watch.Report:
    return watch.Report(rank, 100 + rank, "vm", "1", step=2, attempt=3, **kwargs)  # type: ignore[arg-type]


def failed(rank: int, at: float, message: str, lost: bool = False, status: int = 1) -> watch.Report:
    record = {"time": at, "message": message, "trace": "", "lost_peer": lost, "status": status}
    return report(rank, failure=record)


def ranks(*reports: watch.Report) -> dict[int, watch.Report]:
    return {r.rank: r for r in reports}


def test_torchruns_account_is_read() -> None:
    agent = Agent.read(LOG)
    assert agent.codes == {100: -15, 101: -9}
    assert agent.ranks == {100: 0, 101: 1}
    assert agent.closed == {100}
    assert agent.code(102) == 0, "not in a complete table: it ended with status 0"
    assert Agent.read("").code(102) is None
    assert blame.before_agent(LOG) == "[rank1]: no module called fla_attn"


def test_c93_a_killed_rank_comes_before_what_its_peers_say() -> None:
    first = first_failure(
        ranks(failed(0, 10.05, "Connection reset by peer", lost=True), report(1)), {1: 9.9}, Agent.read(LOG)
    )
    assert first is not None
    assert (first.rank, first.exit) == (1, 4)
    assert first.reason == "rank 1 was killed by SIGKILL, perhaps out of memory (at step 2)"
    reason, why, do = first.text.splitlines()
    assert reason == first.reason
    assert why.startswith("  why: the kernel")
    assert do.startswith("  do:  look at the host's memory (`dmesg`")
    # Also where the peer's error is not known to speak of a peer.
    first = first_failure(ranks(failed(0, 10.05, "the store said no"), report(1)), {1: 9.9}, Agent.read(LOG))
    assert first is not None
    assert first.rank == 1


def test_c93_a_rank_that_torchrun_ended_is_not_blamed() -> None:
    agent = Agent(codes={100: -15, 101: 1}, closed=frozenset({100}), complete=True)
    first = first_failure(ranks(report(0), failed(1, 10.05, "ValueError: bad", status=1)), {0: 9.0}, agent)
    assert first is not None
    assert (first.rank, first.text) == (1, "rank 1 failed: ValueError: bad")


def test_c94_a_rank_that_left_with_success_is_named() -> None:
    agent = Agent(codes={100: 1}, ranks={100: 0}, complete=True)
    lost = failed(0, 10.0, "Connection closed by peer", lost=True)
    for left in (report(1), report(1, end={"time": 9.95, "proper": False, "status": None})):
        first = first_failure(ranks(lost, left), {1: 9.9}, agent)
        assert first is not None
        assert (first.rank, first.reason, first.exit) == (1, "rank 1 left at step 2 with status 0", 1)


def test_a_rank_that_had_finished_is_not_blamed_for_a_later_error() -> None:
    over = report(1, end={"time": 9.0, "proper": True, "status": 0})
    first = first_failure(ranks(failed(0, 12.0, "no space", status=6), over), {1: 9.1}, Agent.read(""))
    assert first is not None
    assert (first.rank, first.exit) == (0, 6)


def test_the_first_of_several_errors_is_named_and_the_lowest_rank_of_equal_ones() -> None:
    both = ranks(failed(0, 11.0, "second"), failed(1, 10.0, "first"), failed(2, 10.0, "first too"))
    first = first_failure(both, {}, Agent.read(""))
    assert first is not None
    assert (first.rank, first.reason) == (1, "first")


def test_c93_a_rank_that_hangs_is_named_by_its_silence() -> None:
    first = first_failure(
        ranks(failed(0, 10.0, "Timed out waiting 8000ms for recv", lost=True), report(1)), {}, Agent.read("")
    )
    assert first is not None
    assert (first.rank, first.exit) == (1, 4)
    assert first.reason.startswith("rank 1 stopped answering at attempt 3; rank 0 gave up: Timed out")


def test_a_rehearsed_fault_is_called_one(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    struck = [(7, 1, "kill_at#3"), (8, 0, "hang_at#3"), (8, 2, "nan_loss_at@2"), (8, 1, "overflow_at@1")]
    rows = [{"event": "drill", "session": session, "rank": rank, "reason": reason} for session, rank, reason in struck]
    events.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"event": "end", "session": 7, "rank": 1}]))
    three = ranks(report(0), report(1), report(2))
    drills = [{r: v.drill for r, v in blame.rehearsed(three, events, n).items() if v.drill} for n in (7, 8, 9)]
    assert drills == [{1: "kill_at"}, {0: "hang_at"}, {}]
    assert blame.rehearsed(three, tmp_path / "none.jsonl", 7) == three
    killed = first_failure(blame.rehearsed(three, events, 7), {1: 9.9}, Agent.read(LOG))
    assert killed is not None
    assert killed.reason == "rank 1 was killed by SIGKILL (at step 2) (a drill)"
    hung = blame.stood_still(blame.rehearsed(three, events, 8), "no rank has moved", replace(FOUND, rank=0))
    assert hung.reason.startswith("rank 0 stopped answering at attempt 3 (a drill); no rank has moved")
    for failure, name in ((killed, "kill_at"), (hung, "hang_at")):
        why, do = failure.text.splitlines()[-2:]
        assert why == f"  why: drill.{name} of this run asked for it"
        assert do.startswith("  do:  launch again")


FOUND = Finding(1, 2, 3, "", "rank 1 in drill.strike (mpdist/drill.py:73), rank 0 waiting in x", "  rank 1\n    strike")


def test_the_stacks_say_which_of_the_silent_ranks_hangs_and_where() -> None:
    lost = failed(0, 10.0, "Timed out waiting 8000ms for recv", lost=True)
    first = first_failure(ranks(lost, report(1), report(2)), {}, Agent.read(""), replace(FOUND, rank=2))
    assert first is not None
    assert (first.rank, first.exit) == (2, 4)
    first = first_failure(ranks(lost, report(1)), {}, Agent.read(""), FOUND)
    assert first is not None
    assert first.reason == (
        "rank 1 stopped answering at attempt 3; rank 0 gave up: Timed out waiting 8000ms for recv;"
        " rank 1 in drill.strike (mpdist/drill.py:73), rank 0 waiting in x"
    )
    stacks, why, do = first.text.removeprefix(f"{first.reason}\n").rsplit("\n", 2)
    assert stacks == "  rank 1\n    strike"
    assert why.startswith("  why: ")
    assert "raise launch.timeout" in do
    dead = first_failure(ranks(lost, report(1)), {1: 9.9}, Agent.read(""), FOUND)
    assert dead is not None
    assert "strike" not in dead.text, "a rank that died is another matter"


def test_ranks_in_different_collectives_that_all_gave_up() -> None:
    both = ranks(*(failed(r, 10.0 + r, "Timed out waiting 8000ms for recv", lost=True) for r in (0, 1)))
    apart = replace(FOUND, rank=None, head="the ranks wait in different collectives", where="rank 0 in x, rank 1 in y")
    first = first_failure(both, {}, Agent.read(""), replace(apart, apart=True))
    assert first is not None
    assert (first.rank, first.exit) == (None, 1)
    assert first.reason.startswith(
        "the ranks wait in different collectives: rank 0 in x, rank 1 in y; rank 0 gave up: Timed"
    )
    first = first_failure(both, {}, Agent.read(""), apart)
    assert first is not None
    assert first.reason == "Timed out waiting 8000ms for recv", "one collective: the connection is to blame"


def test_what_the_launcher_has_ended_itself() -> None:
    first = blame.stood_still(ranks(report(0), report(1)), "no rank of this node has moved for 17 s", FOUND)
    assert (first.rank, first.exit) == (1, 4)
    assert first.reason.startswith(
        "rank 1 stopped answering at attempt 3; no rank of this node has moved for 17 s; rank 1 in d"
    )
    apart = replace(FOUND, rank=None, head="the ranks wait in different collectives")
    first = blame.stood_still(ranks(report(0), report(1)), "no rank has moved", apart)
    assert (first.rank, first.exit) == (None, 4)
    assert first.reason.startswith("no rank has moved; the ranks wait in different collectives: rank 1 in drill.strike")
    assert blame.stood_still({}, "no rank has moved", None).reason == "no rank has moved", "a full disk takes no stacks"


NCCL = """[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.
Fatal Python error: Aborted
"""


def test_nccls_watchdog_kills_the_rank_that_waited_not_the_one_to_blame() -> None:
    ended = report(0, end={"time": 9.9, "proper": False, "status": -signal.SIGABRT})
    for given in (report(0), ended):
        told = blame.spoken_for(given, 9.9, -signal.SIGABRT, NCCL)
        first = first_failure(ranks(told, report(1)), {0: 9.9}, Agent.read(""))
        assert first is not None
        assert (first.rank, first.exit) == (1, 4)
        assert "rank 0 gave up: collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE" in first.reason
        assert first.reason.endswith("ran for 600060 milliseconds")
    assert blame.spoken_for(report(0), 9.9, -signal.SIGABRT, "free(): invalid pointer") == report(0)
    assert blame.spoken_for(report(0), 9.9, -signal.SIGKILL, NCCL) == report(0)


@pytest.mark.parametrize(("code", "status"), [(1, 1), (4, 4), (17, 1)])
def test_a_rank_that_died_before_it_could_report(code: int, status: int) -> None:
    first = first_failure(ranks(report(0)), {}, Agent(codes={101: code}, ranks={101: 1}, complete=True))
    assert first is not None
    assert (first.reason, first.exit) == (f"rank 1 left with status {code} while starting", status)
    assert first_failure(ranks(report(0)), {}, Agent.read("")) is None


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer"), True),
        (RuntimeError("Timed out waiting 8000ms for recv operation to complete"), True),
        (ConnectionError("Connection closed by peer"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("Connection closed by peer"), False),
        (Diverged("loss = nan; Connection reset"), False),
    ],
)
def test_errors_that_only_say_that_a_peer_is_gone(error: Exception, lost: bool) -> None:
    assert watch.lost_peer(error) is lost


def test_an_error_that_all_ranks_raise_is_the_one_ranks_where_it_arose() -> None:
    own, told = CheckpointError("no space left on rank 1"), CheckpointError("no space left on rank 1")
    told.shared = True
    assert not watch.lost_peer(own)
    assert watch.lost_peer(told)


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is no rank, and other tests fork it."""
    monkeypatch.setattr(watch, "_answer_gently", lambda: None)


@pytest.mark.usefixtures("no_thread")
def test_a_rank_records_what_happens_to_it(tmp_path: Path) -> None:
    record = watch.report_rank(tmp_path, 1, 3)
    assert watch.read_reports(tmp_path / "sessions/0001")[3].step is None
    record.at(7, 9, "eval")
    try:
        raise KeyError("x")
    except KeyError as error:
        record.failed(error)
    record.failed(CheckpointError("a second one does not replace the first"))
    found = watch.read_reports(tmp_path / "sessions/0001")[3]
    assert (found.pid, found.step, found.attempt, found.doing, found.alive, found.end) == (
        os.getpid(),
        7,
        9,
        "eval",
        True,
        None,
    )
    assert found.failure is not None
    assert found.failure["message"] == "KeyError: 'x'"
    assert found.failure["trace"].rstrip().endswith("KeyError: 'x'")


@pytest.mark.usefixtures("no_thread")
def test_a_rank_gives_a_beat_whenever_it_turns_to_something_and_now_and_then_while_it_is_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = watch.report_rank(tmp_path, 1, 3)

    def said() -> tuple[int | None, str | None, int | None]:
        found = watch.read_reports(tmp_path / "sessions/0001")[3]
        return found.attempt, found.doing, found.beat

    assert said() == (None, "start", 1)
    record.doing("load")
    assert said() == (None, "load", 2)
    record.at(0, 1, "train")
    record.doing("eval")
    record.doing("eval")
    assert said() == (1, "eval", 5)
    for _ in range(100):
        record.beat()
    assert said()[2] == 5
    monkeypatch.setattr(watch, "_BEAT_S", 0.0)
    record.beat()
    assert said() == (1, "eval", 6)


def test_a_pid_that_came_round_again_is_not_the_rank() -> None:
    me = os.getpid()
    assert watch.alive(me, watch.started(me))
    assert not watch.alive(me, "1")
    assert not watch.alive(2**22 + 1, None)


BUSY = """
import sys, threading, time
from mpdist import watch
watch.report_rank(sys.argv[1], 1, 0)
watch.open_log(sys.argv[1], 1, 0)
def work(depth):
    return work(depth - 1) if depth else None
def churn():
    while True:
        thread = threading.Thread(target=work, args=(50,))
        thread.start()
        work(80)
        thread.join()
threading.Thread(target=churn, daemon=True).start()
print("ready", flush=True)
time.sleep(600)
"""


def test_a_rank_that_is_well_can_be_asked_for_its_stacks_again_and_again(tmp_path: Path) -> None:
    log = watch.log_of(tmp_path / "sessions/0001", 0)

    def written() -> str:
        return log.read_text() if log.exists() else ""

    with subprocess.Popen([sys.executable, "-c", BUSY, str(tmp_path)], stdout=subprocess.DEVNULL) as rank:
        try:
            deadline = time.monotonic() + 60
            while "ready" not in written():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            for _ in range(300):
                rank.send_signal(watch.ASK_GENTLY)
                time.sleep(0.002)  # asked the other way, it is dead of a segmentation fault after some 20
            while written().count("Current thread") < 100:  # signals of a kind may merge
                assert rank.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert rank.poll() is None
        finally:
            rank.kill()
    main = stacks.threads_in(written())[-1]
    assert [frame.name for frame in main] == ["<module>"]


LOGGING = """
import os, sys
from mpdist import watch
watch.open_log(sys.argv[1], 1, int(sys.argv[2]))
print("by print")
print("to stderr", file=sys.stderr)
os.write(1, b"from C\\n")
os.system("echo of a child")
print("\\r 10% of it", end="", flush=True)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_writes_to_its_log_and_rank_0_to_the_console_too(tmp_path: Path, rank: int) -> None:
    command = [sys.executable, "-c", LOGGING, str(tmp_path), str(rank)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    log = (tmp_path / f"sessions/0001/logs/rank-{rank:05d}.log").read_text()
    assert log.splitlines()[:4] == ["by print", "to stderr", "from C", "of a child"]
    if rank == 0:
        assert done.stdout == b"by print\n\r 10% of it"
        assert done.stderr == b"to stderr\n"
        assert "10%" not in log, "a progress bar does not belong into a file"
    else:
        assert done.stdout == done.stderr == b""


def test_a_console_that_goes_away_does_not_end_the_rank(tmp_path: Path) -> None:
    code = LOGGING + "\nfor i in range(1000): print('line', i)\n"
    gone, console = os.pipe()
    os.close(gone)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), "0"], stdout=console, timeout=60)
    os.close(console)
    assert done.returncode == 0
    assert "line 999" in (tmp_path / "sessions/0001/logs/rank-00000.log").read_text()
