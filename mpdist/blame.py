"""Why a run ended badly: which rank was first, from what the ranks left behind (mpdist.watch) and torchrun's log.

torchrun names the first process that it sees fail, which is wrong when a rank leaves with status 0 or hangs: its peers
then fail with a lost connection and are blamed. Here an error that only says that a peer is gone never wins over the
peer's own end. What the ranks' stacks say (mpdist.hang) names the one that the others have waited for.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mpdist.errors import CheckpointError, DoesNotFit, MachineError, MpdistError, UsageError
from mpdist.hang import Finding
from mpdist.lines import read_lines
from mpdist.watch import Report

_FATAL = ("kill_at", "exit_at", "hang_at")  # drills after which a rank says nothing more
_AGAIN = "launch again: the run goes on from its last checkpoint"
_REFUSALS = {kind.status for kind in (UsageError, DoesNotFit, MachineError, CheckpointError)}
_ENTRY = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s+exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)")
_FIRST = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
_CLOSING = re.compile(r"Sending process (\d+) closing signal")
_WATCHDOG = re.compile(r"Watchdog caught (collective operation timeout: .*?)(?: before timing out|$)", re.MULTILINE)
_AGENT_LINE = re.compile(r"^[IWE]\d{4} \d\d:\d\d:", re.MULTILINE)


@dataclass(frozen=True)
class Agent:
    """torchrun's account: exit codes by pid (negative: a signal), ranks by pid, and whom it told to end itself."""

    codes: Mapping[int, int] = field(default_factory=dict)
    ranks: Mapping[int, int] = field(default_factory=dict)
    closed: frozenset[int] = frozenset()
    complete: bool = False  # its table is there: a pid that is missing from it ended with status 0

    @classmethod
    def read(cls, log: str) -> Agent:
        entries = [(int(pid), int(rank), int(code)) for rank, code, pid in _ENTRY.findall(log)]
        codes = {int(pid): int(code) for code, pid in _FIRST.findall(log)} | {p: c for p, _, c in entries}
        closed = frozenset(int(pid) for pid in _CLOSING.findall(log))
        return cls(codes, {p: r for p, r, _ in entries}, closed, bool(entries))

    def code(self, pid: int) -> int | None:
        return self.codes.get(pid, 0 if self.complete else None)


@dataclass(frozen=True)
class Failure:
    """The first failing rank: `reason` is one line for status.json, `text` what the user reads last."""

    rank: int | None
    reason: str
    text: str
    exit: int


def first_failure(
    reports: Mapping[int, Report], deaths: Mapping[int, float], agent: Agent, finding: Finding | None = None
) -> Failure | None:
    """Who failed first, None if nothing says so.

    finding: where the ranks stood, if that is known. deaths: when a rank that is gone was last seen alive (unix time), for
    those that the launcher did not kill itself. That is before its peers have felt it and written down what they make of
    it.
    """
    found: list[tuple[float, Failure]] = []
    closed: list[tuple[float, Failure]] = []
    for report in reports.values():
        if report.failure:
            if not report.failure["lost_peer"]:
                found.append((report.failure["time"], _own(report)))
        elif not report.end or not report.end.get("proper"):
            when = report.end["time"] if report.end else deaths.get(report.rank)
            code = report.end["status"] if report.end else None
            if when is not None:
                gone = _gone(report, agent.code(report.pid) if code is None else code)
                (closed if report.pid in agent.closed else found).append((when, gone))
    for pid, rank in agent.ranks.items():
        if rank not in reports and pid not in agent.closed:
            found.append((0.0, _unreported(rank, agent.codes[pid])))
    if found:
        return min(found, key=lambda item: (item[0], item[1].rank or 0))[1]
    lost = sorted((r for r in reports.values() if r.failure), key=lambda r: r.failure["time"] if r.failure else 0.0)
    if lost:
        silent = [r for r in reports.values() if not r.failure and not r.end]
        return _silent(silent, lost[0], reports, finding) or _own(lost[0])
    return min(closed, key=lambda item: item[0])[1] if closed else None


def spoken_for(report: Report, when: float | None, code: int | None, log: str) -> Report:
    """A rank's report, with the failure that NCCL's watchdog kept it from writing down: it ends a process that has waited
    too long by SIGABRT. when, code: of its death, as `deaths` and Agent have them. log: the end of the rank's own."""
    if report.end:
        when, code = report.end["time"], report.end["status"]
    found = _WATCHDOG.search(log) if code == -signal.SIGABRT and not report.failure else None
    if found is None:
        return report
    failure: dict[str, Any] = {"rank": report.rank, "time": when, "message": found[1], "trace": "", "status": 1}
    return replace(report, failure=failure | {"lost_peer": True}, end=None)


def rehearsed(reports: Mapping[int, Report], events: Path, session: int) -> dict[int, Report]:
    """The reports, with the rehearsed fault that the run's events say has killed, ended or stopped a rank of them."""
    try:
        rows = [e for e in read_lines(events) if e.get("event") == "drill" and e.get("session") == session]
    except MpdistError:  # no events yet, or a broken line in them: no reason not to say who failed
        rows = []
    struck = {row["rank"]: str(row["reason"]).partition("#")[0] for row in rows}
    return {r: replace(v, drill=struck[r]) if struck.get(r) in _FATAL else v for r, v in reports.items()}


def _own(report: Report) -> Failure:
    record = report.failure or {}
    head = str(record["message"]).partition("\n")[0]
    text = f"{record['trace']}rank {report.rank} failed: {record['message']}"
    return Failure(report.rank, head, text, int(record["status"]))


def _gone(report: Report, code: int | None) -> Failure:
    where = f"at step {report.step}" if report.step is not None else "before its first step"
    if code is None:
        found = _plain(report.rank, f"left {where} without a word, killed or by itself", 1, report.drill)
    elif code < 0:
        found = _plain(report.rank, f"{_killed(code, report.drill)} ({where})", _exit_of_signal(code), report.drill)
    else:
        found = _plain(report.rank, f"left {where} with status {code}", 1, report.drill)
    if report.drill is not None:
        return advised(found, f"drill.{report.drill} of this run asked for it", f"{_AGAIN}, and a drill strikes once")
    return _out_of_memory(found) if code == -signal.SIGKILL else found


def _unreported(rank: int, code: int) -> Failure:
    if code < 0:
        found = _plain(rank, f"{_killed(code)} (while starting)", _exit_of_signal(code))
        return _out_of_memory(found) if code == -signal.SIGKILL else found
    # A refusal of ours, which it has printed: a full disk keeps a rank from being on record.
    return _plain(rank, f"left with status {code} while starting", code if code in _REFUSALS else 1)


def _silent(
    silent: list[Report], first: Report, reports: Mapping[int, Report], finding: Finding | None
) -> Failure | None:
    """Peers have waited in vain: the rank that never spoke is the one that hangs; the furthest behind, if several.

    Where all have spoken, only the stacks can tell.
    """
    record = first.failure or {}
    head = str(record["message"]).partition("\n")[0]
    gave_up = f"rank {first.rank} gave up: {head}"
    named = reports.get(finding.rank) if finding is not None and finding.rank is not None else None
    slow = named if named in silent or not silent else min(silent, key=_behind)
    if slow is not None:
        return hung(slow, gave_up, finding)
    if finding is None or not finding.apart:
        return None
    reason = f"{finding.reason}; {gave_up}"
    return _waited(Failure(None, reason, f"{reason}\n{finding.stacks}", int(record["status"])))


def stood_still(reports: Mapping[int, Report], why: str, finding: Finding | None) -> Failure:
    """The launcher has waited in vain, and has ended the ranks."""
    if finding is None:
        return _waited(Failure(None, why, why, MachineError.status))
    if finding.rank is not None:
        return hung(reports[finding.rank], why, finding)
    reason = f"{why}; {finding.reason}"
    return _waited(Failure(None, reason, f"{reason}\n{finding.stacks}".rstrip(), MachineError.status))


def hung(rank: Report, why: str, finding: Finding | None) -> Failure:
    """A rank that others, or the launcher, have waited for in vain. why: how that showed."""
    where = f"at attempt {rank.attempt}" if rank.attempt is not None else "before its first attempt"
    doing = f" ({rank.doing})" if rank.doing else ""
    drill = " (a drill)" if rank.drill is not None else ""
    reason = f"rank {rank.rank} stopped answering {where}{doing}{drill}; {why}"
    text = reason
    if finding is not None:
        reason += f"; {finding.where}"
        text = f"{reason}\n{finding.stacks}".rstrip()
    failure = Failure(rank.rank, reason, text, MachineError.status)
    if rank.drill is not None:
        return advised(failure, f"drill.{rank.drill} of this run asked for it", f"{_AGAIN}, and a drill strikes once")
    return _waited(failure)


def advised(failure: Failure, why: str, do: str) -> Failure:
    """With the two lines that end every message of a failure that is not a bug."""
    return replace(failure, text=f"{failure.text}\n  why: {why}\n  do:  {do}")


def _waited(failure: Failure) -> Failure:
    return advised(failure, "a step needs all ranks, and launch.timeout is how long they wait for one that does not come",
                   f"see where it stands (its log has the stacks), then {_AGAIN}; raise launch.timeout if it was only slow")  # fmt: skip


def _out_of_memory(failure: Failure) -> Failure:
    return advised(failure, "the kernel kills so where the host's memory is used up; a scheduler or a person may, too",
                   f"look at the host's memory (`dmesg` names what was killed for it), then {_AGAIN}")  # fmt: skip


def _behind(report: Report) -> tuple[int, int]:
    return (-1 if report.attempt is None else report.attempt), report.rank


def _plain(rank: int, what: str, status: int, drill: str | None = None) -> Failure:
    sentence = f"rank {rank} {what}{' (a drill)' if drill is not None else ''}"
    return Failure(rank, sentence, sentence, status)


def _killed(code: int, drill: str | None = None) -> str:
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (", perhaps out of memory" if -code == signal.SIGKILL and not drill else "")


def _exit_of_signal(code: int) -> int:
    """A SIGKILL comes from the machine (memory, a person); other signals (SIGSEGV, SIGABRT) are somebody's bug."""
    return MachineError.status if -code == signal.SIGKILL else 1


def before_agent(log: str, lines: int = 20) -> str:
    """The last lines that a worker wrote before torchrun spoke (a failed import, say), else the last lines."""
    found = _AGENT_LINE.search(log)
    head = log[: found.start()] if found else log
    chosen = head if head.strip() else log
    return "\n".join(chosen.rstrip().splitlines()[-lines:])
