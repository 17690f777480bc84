"""One torchrun as a child: started so that nothing of it can be left behind, asked to stop, ended, and watched.

The child lives in a session of its own, so that a Ctrl-C at the terminal reaches the launcher alone, which then asks
each rank by SIGUSR1 to stop at a step boundary. The kernel kills torchrun when the launcher dies, and the ranks when
torchrun does (mpdist.watch); every process of the run carries a mark in its environment, by which strays are found.
Ranks that stand still are asked where they are (mpdist.hang).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from mpdist import hang, stacks, watch

_POLL_S = 0.1
_LOOK_S = 0.2  # how often the ranks' records are read
_ASK_S = 2.0  # how often a stop is repeated: a rank may not have listened yet
_GRACE_S = 10.0  # after a rank has died: the others may still write down what they saw
_GRACE_FAILED_S = 20.0  # after a rank has recorded an error but lives on: it may be closing files
_STACK_S = 2.0  # for a rank to write down its stacks; before that time is up, ranks that have said nothing are asked
_AGENT_S = 5.0  # for torchrun to write its account once its workers are dead
_STRAYS_S = 5.0  # for helpers of the ranks, such as a tracker's, to end by themselves
_SAME_S = 0.2  # two TERMs within this time are one, passed on twice


def say(text: str) -> None:
    """Print for a person, live. A console that has gone away is no reason to end a run."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


def _interrupt(text: str) -> None:
    """As `say`, while a live line may be on the terminal."""
    say(f"\n{text}" if sys.stdout.isatty() else text)


Heard = tuple[int, float]  # a signal's number and when it came (time.monotonic)


@contextlib.contextmanager
def listening() -> Iterator[list[Heard]]:
    """Catch stop signals into the list that this gives, from before a run is on record until after its end is.

    Main thread only.
    """
    heard: list[Heard] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        heard.append((number, time.monotonic()))

    before = {}
    for number in watch.STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup's wish stands
            before[number] = signal.signal(number, hear)
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Child:
    """The running torchrun and what is known of its ranks.

    deaths: when a local rank that is gone was last seen alive (unix time), by rank; only those not killed from here.
    hard: the signal that asked for an end at once, if any. heard: what `listening` has caught. timeout: launch.timeout.
    note(session, finding): called when no rank moves and it is known where they stand. hung: set where
    that ended the run: the finding, if any, and how it showed.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        heard: list[Heard],
        timeout: float,
        note: Callable[[Path, hang.Finding], None],
    ) -> None:
        self.command, self.env, self.log = list(command), dict(env), log
        self.token = watch.own_token()
        self.reports: dict[int, watch.Report] = {}
        self.deaths: dict[int, float] = {}
        self.hard: int | None = None
        self.killed = False
        self.hung: tuple[hang.Finding | None, str] | None = None
        self._heard, self._note = heard, note
        self._timeout, self._watchdog = timeout, hang.Watchdog(timeout)
        self._due: tuple[str, float] | None = None  # what the watchdog wants once the stacks are there, and when
        self._folder: Path | None = None
        self._asked = False
        self._asked_at = 0.0
        self._looked_at = 0.0
        self._saw_at = time.time()
        self._failed_at: float | None = None
        self._questioned: list[watch.Report] = []
        self._process: subprocess.Popen[bytes]

    @property
    def heard(self) -> list[int]:
        """The stop signals that have come, in their order."""
        return [number for number, _ in self._heard]

    def mine(self, report: watch.Report) -> bool:
        """Whether a rank was started here; with several nodes, others have launchers of their own."""
        return report.launch == self.token

    def run(self, folder: Callable[[], Path | None]) -> int:
        """Start, watch until the end, leave nothing behind; torchrun's exit status.

        folder: the session's folder, None while it is not known.
        """
        with self.log.open("ab") as log:
            self._start(log)
            try:
                while self._process.poll() is None:
                    time.sleep(_POLL_S)
                    self._look(folder())
                    self._serve_signals()
                    self._end_after_failure()
                    self._end_hang()
                self._looked_at = 0.0
                self._look(folder())
            finally:
                self._sweep()
        return self._process.wait()

    def _start(self, log: IO[bytes]) -> None:
        env = {**self.env, watch.LAUNCH: self.token}
        watch.libc()  # loaded here, since the child may do next to nothing between fork and exec
        self._process = subprocess.Popen(
            self.command,
            env=env,
            stdin=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
            preexec_fn=_prepare,  # safe here: one thread, and two system calls on the other side
        )

    def _serve_signals(self) -> None:
        hard = [item for item in self._heard if item[0] in (signal.SIGINT, signal.SIGTERM)]
        again = [(n, at) for n, at in hard[1:] if not watch.repeated(n)]
        second = next((n for n, at in again if n == signal.SIGINT or at - hard[0][1] > _SAME_S), None)
        if second is not None and self.hard is None:
            self.hard = second
            say(f"a second {signal.Signals(second).name}: ending all ranks at once")
            self._kill(with_agent=True)
        if not self._heard or self.hard is not None:
            return
        if not self._asked:
            name = signal.Signals(self._heard[0][0]).name
            # In a step of Slurm's nobody can send one.
            more = "" if watch.repeated(signal.SIGTERM) else "; a second INT or TERM ends the run at once"
            _interrupt(f"{name}: stopping at the next step boundary{more}")
            self._asked = True
        if time.monotonic() - self._asked_at > _ASK_S:
            self._asked_at = time.monotonic()
            if self._folder is not None:
                with contextlib.suppress(OSError):  # a reason that lacks the signal's name is no reason not to stop
                    (self._folder / watch.ASKED).write_text(f"{signal.Signals(self._heard[0][0]).name}\n")
            for report in self.reports.values():
                if self.mine(report) and not report.end and report.alive:
                    _send(report.pid, signal.SIGUSR1)

    def _look(self, folder: Path | None) -> None:
        now = time.monotonic()
        if folder is None or now - self._looked_at < _LOOK_S:
            return
        self._looked_at, self._folder = now, folder
        fresh = watch.read_reports(folder)
        if fresh.keys() - self.reports.keys() and self._asked:
            self._asked_at = 0.0  # a rank that has only now said who it is
        self.reports = fresh
        saw_at, self._saw_at = self._saw_at, time.time()
        for rank, report in fresh.items():
            if rank not in self.deaths and not self.killed and self.mine(report) and not report.alive:
                self.deaths[rank] = saw_at

    def _end_after_failure(self) -> None:
        """Kill what is left when one rank is dead and the others will not notice."""
        dead = any(not self.reports[rank].proper for rank in self.deaths) or self._agent_gave_up()
        if not dead and not any(report.failure for report in self.reports.values()):
            return
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        grace = _GRACE_S if dead else _GRACE_FAILED_S
        if now - self._failed_at > grace + _AGENT_S:
            self._kill(with_agent=True)
        elif now - self._failed_at > grace:
            self._close_questions()
            self._kill(with_agent=False)
        elif now - self._failed_at > grace - _STACK_S and not self._questioned:
            self._question("other ranks have failed", watch.ASK_HARD)

    def _end_hang(self) -> None:
        """Take notice of ranks that stand still; end those that have no reason to, once all patience is used up."""
        if self._failed_at is not None or self.killed or self._folder is None:
            return
        now = time.monotonic()
        verdict = self._watchdog.look(now, self._beats())
        if verdict:
            self._due = verdict, now + _STACK_S
            self._question(self._stillness(), watch.ASK_GENTLY if verdict == "notice" else watch.ASK_HARD)
        if self._due is None or now < self._due[1]:
            return
        (wish, _), self._due = self._due, None
        self._close_questions()
        self.reports = watch.read_reports(self._folder)
        self._watchdog.look(now, self._beats())
        if not self._watchdog.noticed:  # one has moved meanwhile
            return
        finding = hang.find(self._folder, self.reports)
        if wish == "notice":
            if finding is not None:
                _interrupt(f"warning: {self._stillness()}; {finding.reason}")
                self._note(self._folder, finding)
        else:
            self.hung = finding, f"{self._stillness()} (launch.timeout = {self._timeout:g} s)"
            self._kill(with_agent=True)

    def _beats(self) -> hang.Beats:
        return {report.rank: (report.beat, report.doing) for report in self._silent()}

    def _stillness(self) -> str:
        return f"no rank of this node has moved for {self._watchdog.still:.0f} s"

    def _silent(self) -> list[watch.Report]:
        """This node's ranks that live and have neither failed nor ended."""
        return [r for r in self.reports.values() if self.mine(r) and not r.failure and not r.end and r.alive]

    def _question(self, why: str, how: int) -> None:
        """Ask ranks that have said nothing where they are; the stacks come into their logs. how: a signal."""
        self._questioned = self._silent()
        for report in self._questioned:
            if self._folder is not None:
                stacks.write_question(self._folder, report, why)
            _send(report.pid, how)

    def _close_questions(self) -> None:
        for report in self._questioned:
            if self._folder is not None:
                stacks.write_silence(self._folder, report)
        self._questioned = []

    def _agent_gave_up(self) -> bool:
        """Whether torchrun is ending its workers because one has failed, perhaps before that one could report.

        It does the same when it gets a stop signal itself, and when the first rank of a stopped run has left with 75.
        """
        if any(report.proper for report in self.reports.values()):
            return False
        text = watch.read_text_tail(self.log)
        return "closing signal" in text and "death signal" not in text

    def end_at_once(self) -> None:
        """SIGKILL the ranks and torchrun: what they write would not count any more."""
        self._kill(with_agent=True)

    def _kill(self, with_agent: bool) -> None:
        """SIGKILL every process of the run; without torchrun itself, it gets to write down how its workers ended."""
        self.killed = True
        agent = self._process.pid
        pids = set(watch.marked(self.token))
        pids |= {r.pid for r in self.reports.values() if self.mine(r) and r.alive}
        if with_agent:
            pids.add(agent)
        else:
            pids.discard(agent)
        for pid in pids:
            _send(pid, signal.SIGKILL)

    def _sweep(self) -> None:
        """After the end: strays get a moment, then they are killed."""
        deadline = time.monotonic() + (0.0 if self.hard is not None else _STRAYS_S)
        while self._process.poll() is not None and any(watch.marked(self.token)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self._serve_signals()
        for _ in range(50):
            self._kill(with_agent=True)
            if self._process.poll() is not None and not any(watch.marked(self.token)):
                return
            time.sleep(_POLL_S)
        left = ", ".join(str(pid) for pid in watch.marked(self.token))
        print(f"warning: processes that a SIGKILL does not end: {left}", file=sys.stderr)


def helper(command: Sequence[str], heard: list[Heard]) -> int:
    """Run a short command of ours that a signal may end at any point; its exit status, negative where one did."""
    watch.libc()
    process = subprocess.Popen(
        list(command), stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=watch.die_with_parent
    )
    while process.poll() is None:
        if heard:
            process.kill()
        time.sleep(_POLL_S)
    return process.wait()


def _prepare() -> None:
    """In the child, before it becomes torchrun."""
    watch.die_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
