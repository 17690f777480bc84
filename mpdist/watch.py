"""What a rank leaves on disk while it runs, so that a launcher can name it, signal it and say why it ended.

Files of a session, written by each rank alone:

    sessions/0001/ranks/00001.json         who: pid, host, when the process started
    sessions/0001/ranks/00001.at           where: step, attempt, what it is doing, number of the beat; overwritten in place
    sessions/0001/ranks/00001.failed.json  its own error, in full, with the time
    sessions/0001/ranks/00001.end.json     how it left: `proper` where the run was over, or not
    sessions/0001/logs/rank-00001.log      all that it wrote to stdout and stderr

and by the launcher, before it asks its ranks to stop:

    sessions/0001/asked                    the name of the signal that it got itself

A rank without the last two was killed by a signal or left by os._exit. Standard library only: workers use this
before they import torch.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import io
import os
import platform
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from mpdist import slurm
from mpdist.errors import MpdistError
from mpdist.lines import dump, read_json, write_atomic

SESSION = "MPDIST_SESSION"  # the session's number, from the launcher to its workers
LAUNCH = "MPDIST_LAUNCH"  # host:pid:start of the launcher; marks every process that it started
ASKED = "asked"  # a session's file: the signal that the launcher got, for the reason that the run records
# How a launcher asks a rank for its stacks. ASK_GENTLY is for one that may be well: a thread answers, with Python's lock
# held. A handler answers ASK_HARD also while C code keeps the lock, but reads other threads while they run, which can crash.
ASK_HARD = signal.SIGUSR2
ASK_GENTLY = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else ASK_HARD
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_BEAT_S = 1.0  # how often a rank says that it is still at it
_SAME_S = 1.0  # Slurm and torchrun both pass a TERM on: two within this time are one
_PR_SET_PDEATHSIG = 1
_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Read error|Write error|Broken pipe|Timed out waiting|Socket Timeout"
    r"|connectFullMesh|recvValue|NCCL (communicator|error|timeout)|ncclRemoteError|watchdog",
    re.IGNORECASE,
)
_SOURCE = re.compile(r"\[\S+\.(?:cc|cpp|h):\d+\] ?")  # where in gloo or NCCL it was written


# -- the worker's side -----------------------------------------------------------------------------------------------


class Rank:
    """This process's record. Made by `report_rank`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._closed = False
        self._at = os.open(folder / f"{rank:05d}.at", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._where: tuple[int | str, int | str] = ("-", "-")
        self._beats, self._beat_at = 0, 0.0
        self.doing("start")

    def at(self, step: int, attempt: int, doing: str) -> None:
        """Say where this rank is: steps applied so far, attempt under way. One small write, cheap enough for each."""
        self._where = step, attempt
        self.doing(doing)

    def doing(self, word: str) -> None:
        """Say what it turns to: start, load, compile, train, data, eval, save or end. Each call is a beat."""
        self._word, self._beats, self._beat_at = word, self._beats + 1, time.monotonic()
        step, attempt = self._where
        with contextlib.suppress(OSError):  # a full disk is met by whoever has something to keep there
            os.pwrite(self._at, f"{step:>15} {attempt:>15} {word:>8} {self._beats:>15}\n".encode(), 0)

    def beat(self) -> None:
        """It is still at it: for what is done many times in one attempt. Next to nothing, a write a second at most."""
        if time.monotonic() - self._beat_at >= _BEAT_S:
            self.doing(self._word)

    def failed(self, error: BaseException) -> None:
        """Record the error that ends this rank, at the moment it happened; the first one of a rank counts.

        Without a launcher above, it is also printed on the real stderr, since the output of ranks goes to files.
        """
        if self._closed:
            return
        self._closed = True
        expected, lost = isinstance(error, MpdistError), lost_peer(error)
        message = str(error) if expected else f"{type(error).__name__}: {error}".rstrip(": ")
        trace = "" if expected else "".join(traceback.format_exception(error))
        if lost and not expected:
            message = _SOURCE.sub("", message).partition(". This is")[0]
        record = {"rank": self.rank, "time": time.time(), "message": message, "trace": trace, "lost_peer": lost}
        recorded = self._write("failed", record | {"status": getattr(error, "status", 1) if expected else 1})
        text = f"{trace}rank {self.rank} failed: {message}"
        if _consoles:  # the log too is asked why
            _write(2, text)
        if lost and not expected:  # the one to read is another rank's
            text = f"rank {self.rank} has lost another rank: {message}"
        if not recorded or (LAUNCH not in os.environ and not (lost and expected)):
            tell(text)

    def ended(self, status: int) -> None:
        """Record a proper end, the run being over (done or stopped and saved). Stop signals are ignored from here.

        torchrun sends TERM to the ranks that are still closing files as soon as one has left with a status of 75.
        """
        if self._closed:
            return
        self._leave(proper=True, status=status)
        with contextlib.suppress(ValueError):  # not in the main thread
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def _leave(self, proper: bool = False, status: int | None = None) -> None:
        if not self._closed:
            self._closed = True
            self._write("end", {"rank": self.rank, "time": time.time(), "status": status, "proper": proper})

    def _write(self, kind: str, record: dict[str, Any]) -> bool:
        """False where the disk is full or gone, which must not hide the error that is to be recorded."""
        try:
            write_atomic(self.folder / f"{self.rank:05d}.{kind}.json", dump(record) + "\n")
        except (OSError, MpdistError):
            return False
        return True


def report_rank(run_dir: str | Path, session: int, rank: int) -> Rank:
    """Say that this process is a rank of the session, and tie its life to the process that started it.

    Call it early, before importing torch. The launcher signals the pid that is recorded here.
    """
    _die_with_parent()
    faulthandler.enable(2)  # by then the rank's log
    faulthandler.register(ASK_HARD, file=2)
    _answer_gently()
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:  # whose default is death, and `listen` may be seconds away
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    folder = session_folder(run_dir, session) / "ranks"
    folder.mkdir(parents=True, exist_ok=True)
    record = Rank(folder, rank)
    pid = os.getpid()
    who = {"rank": rank, "pid": pid, "host": platform.node(), "started": started(pid), "time": time.time()}
    who["launch"] = os.environ.get(LAUNCH)
    write_atomic(folder / f"{rank:05d}.json", dump(who) + "\n")
    atexit.register(record._leave)  # a sys.exit that nobody announced
    return record


def _answer_gently() -> None:
    """Start the thread that writes the stacks of all threads to stderr when it is asked. Before any other thread."""
    if ASK_GENTLY == ASK_HARD:
        return
    signal.signal(ASK_GENTLY, lambda *_: None)  # should a library's thread let it through, it does nothing
    signal.pthread_sigmask(signal.SIG_BLOCK, {ASK_GENTLY})

    def answer() -> None:
        while True:
            signal.sigwait({ASK_GENTLY})
            faulthandler.dump_traceback(2)

    threading.Thread(target=answer, name="stacks", daemon=True).start()


class Stop:
    """The wish to stop at the next step boundary, from signals to this process; `asked` names the first one.

    TERM, INT, HUP and USR1 ask; a second INT or TERM ends the process at once.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self._hard_at: float | None = None
        self._rank: Rank | None = None

    def listen(self, rank: Rank | None = None) -> Stop:
        """Catch the signals from here on. Main thread only. rank: where an end at once is recorded."""
        self._rank = rank
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup's wish stands
                signal.signal(number, self._heard)
        return self

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        self.asked = self.asked or self._why(number)
        if number not in (signal.SIGINT, signal.SIGTERM):
            return
        now = time.monotonic()
        if self._hard_at is None or repeated(number):
            self._hard_at = now
        elif now - self._hard_at > _SAME_S:
            if self._rank is not None:
                self._rank.failed(_EndedAtOnce(f"ended at once by a second {signal.Signals(number).name}"))
            os._exit(128 + number)

    def _why(self, number: int) -> str:
        asked = None
        if number == signal.SIGUSR1 and self._rank is not None:  # the launcher's way to ask, whatever it got itself
            asked = passed_on(self._rank.folder.parent)
        return asked or signal.Signals(number).name


def repeated(number: int) -> bool:
    """Whether a signal says again what it has said, and asks for no end at once: Slurm's second TERM, at the end of a
    grace time, after which there are KillWait seconds left for a save, and SIGKILL follows without anybody's help."""
    return number == signal.SIGTERM and slurm.task(os.environ) is not None


def passed_on(session: Path) -> str | None:
    """The signal that the launcher of this session got, if it has asked the ranks to stop."""
    name = read_text_tail(session / ASKED).strip()
    return f"{name} to mpdist launch" if name else None


class _EndedAtOnce(MpdistError):
    status = 1


def tell(text: str) -> None:
    """Print on the real stderr, past this rank's log."""
    any(_write(console, text) for console in _consoles or (2,))


def _write(file: int, text: str) -> bool:
    with contextlib.suppress(OSError):
        os.write(file, f"{text}\n".encode("utf-8", "replace"))
        return True
    return False


_consoles: tuple[int, ...] = ()  # the real stderr and stdout, once open_log has put the file in their place


def open_log(run_dir: str | Path, session: int, rank: int) -> Path:
    """Send this process's output to its own log file; rank 0's goes to the console as well, live.

    File descriptors 1 and 2 become the file, so that what libraries write from C is kept too; rank 0's sys.stdout and
    sys.stderr then write to both. A console that goes away does not end the run. Returns the file's path.
    """
    global _consoles
    logs = session_folder(run_dir, session) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    path = log_of(session_folder(run_dir, session), rank)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    out, err = os.dup(1), os.dup(2)
    _consoles = (err, out)
    # Under our launcher, stderr belongs to torchrun's own log: the console is stdout.
    consoles = (out, out if LAUNCH in os.environ else err)
    for number, console in zip((1, 2), consoles, strict=True):
        os.dup2(file, number)
        stream = open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        live = None
        if rank == 0:
            live = open(console, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, "stdout" if number == 1 else "stderr", _Log(stream, live))
    os.close(file)
    return path


class _Log(io.TextIOBase):
    """Writes to the log file and to the console, if any; redrawn lines (a progress bar's) to the console alone.

    A full disk takes no lines; what is lost with them is no reason to end a run.
    """

    def __init__(self, log: TextIO, console: TextIO | None) -> None:
        self._log, self.console = log, console
        self._live = console is not None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def write(self, text: str) -> int:
        if "\r" not in text:
            with contextlib.suppress(OSError):
                self._log.write(text)
        if self.console is not None and self._live:
            try:
                self.console.write(text)
                self.console.flush()
            except (OSError, ValueError):  # the terminal was closed, or `| head` has had enough
                self._live = False
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._log.flush()

    def isatty(self) -> bool:
        return self.console is not None and self._live and self.console.isatty()

    def fileno(self) -> int:
        return self._log.fileno()

    def writable(self) -> bool:
        return True


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends. Linux; elsewhere nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        libc().prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _die_with_parent() -> None:
    """The worker's: only under torchrun, since a rank that a shell has started may well outlive the shell."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    die_with_parent()
    host, _, rest = os.environ.get(LAUNCH, "").partition(":")
    pid, _, start = rest.partition(":")
    if host == platform.node() and pid.isdigit() and not alive(int(pid), start or None):
        os._exit(1)  # the launcher ended before the kernel knew what to do: nobody waits for this rank


_libc_handle: ctypes.CDLL | None = None


def libc() -> ctypes.CDLL:
    """The C library, loaded once."""
    global _libc_handle
    if _libc_handle is None:
        _libc_handle = ctypes.CDLL(None, use_errno=True)
    return _libc_handle


def lost_peer(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone or has failed, which then is the one to name."""
    if isinstance(error, MpdistError):
        return error.shared or bool(getattr(error, "lost_peer", False))
    if type(error).__name__ in ("DistBackendError", "DistNetworkError"):
        return True
    return isinstance(error, (RuntimeError, OSError)) and bool(_LOST_PEER.search(str(error)))


# -- the launcher's side -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What one rank has left so far. `failure` and `end` are the records that `Rank` writes."""

    rank: int
    pid: int
    host: str
    started: str | None
    launch: str | None = None  # the launcher above it, as LAUNCH has it
    failure: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    step: int | None = None
    attempt: int | None = None
    doing: str | None = None
    beat: int | None = None  # how many it has given: one more whenever it moves
    drill: str | None = None  # the rehearsed fault that struck it last in this session, as a reader of the events knows

    @property
    def here(self) -> bool:
        return self.host == platform.node()

    @property
    def alive(self) -> bool:
        """Whether its process runs; True for another host's, of which nothing is known here."""
        return not self.here or alive(self.pid, self.started)

    @property
    def proper(self) -> bool:
        return bool(self.end and self.end.get("proper"))


def record_death(session: Path, rank: int, when: float, code: int | None) -> None:
    """Write for a rank that could not: when it was last seen (unix time), its exit code or minus its signal."""
    record = {"rank": rank, "time": when, "status": code, "proper": False}
    write_atomic(session / "ranks" / f"{rank:05d}.end.json", dump(record) + "\n")


def session_folder(run_dir: str | Path, session: int) -> Path:
    return Path(run_dir) / "sessions" / f"{session:04d}"


def read_reports(session: Path) -> dict[int, Report]:
    """The reports of a session's ranks, by rank."""
    folder = session / "ranks"
    found = {}
    for path in sorted(folder.glob("[0-9]*[0-9].json")) if folder.is_dir() else []:
        who = read_json(path)
        if who is None:
            continue
        failure, end = read_json(path.with_suffix(".failed.json")), read_json(path.with_suffix(".end.json"))
        known = (who["rank"], who["pid"], who["host"], who.get("started"), who.get("launch"))
        found[who["rank"]] = Report(*known, failure, end, *_read_at(path.with_suffix(".at")))
    return found


def _read_at(path: Path) -> tuple[int | None, int | None, str | None, int | None]:
    try:
        step, attempt, doing, beat = path.read_text().split()
        return (None, None, doing, int(beat)) if attempt == "-" else (int(step), int(attempt), doing, int(beat))
    except (OSError, ValueError):
        return None, None, None, None


def log_of(session: Path, rank: int) -> Path:
    """All that a rank wrote to stdout and stderr."""
    return session / "logs" / f"rank-{rank:05d}.log"


def started(pid: int) -> str | None:
    """When a live process started, in the kernel's ticks; None if there is none. A pid alone comes round again."""
    fields = _stat(pid)
    if len(fields) > 19:
        return None if fields[0] in "ZX" else fields[19]
    if Path("/proc/self/stat").exists():
        return None
    try:  # no /proc on this system
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return None
    return "alive"


def process_state(pid: int) -> str | None:
    """The kernel's letter: R, S, T stopped, D in an uninterruptible wait; None if there is no such process."""
    return next(iter(_stat(pid)), None)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name; [] if there are none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def alive(pid: int, start: str | None) -> bool:
    now = started(pid)
    return now is not None and start in (None, now)


def marked(token: str) -> Iterator[int]:
    """Pids of this user's processes that were started with LAUNCH=token in their environment, whoever their parent."""
    mark = f"{LAUNCH}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            if pid != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0") and started(pid):
                yield pid
        except OSError:  # gone in between, or another user's
            continue


def own_token() -> str:
    """The value of LAUNCH for the processes that this one starts."""
    pid = os.getpid()
    return f"{platform.node()}:{pid}:{started(pid) or ''}"


def read_text_tail(path: Path, size: int = 65536) -> str:
    """The last bytes of a log as text, '' if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
