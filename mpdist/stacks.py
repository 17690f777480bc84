"""Where a rank stands, read from the stacks in its log or from the traceback of its error.

The launcher asks a rank for its stacks by a signal; faulthandler writes them into the rank's log, also while the rank is
blocked in C. A line before them says which beat the launcher saw last (mpdist.watch), so that a dump counts only as
long as its rank has not moved since.

A rank waits for others if the innermost frame of its main thread is a collective. Where the main thread only waits for
another thread (autograd's, the feed's, the save's), that one is looked at. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import linecache
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

from mpdist.watch import Report, log_of, process_state, read_text_tail

_QUESTION = re.compile(r"^mpdist launch asks for the stacks of this rank at beat (\d+|None): .*$", re.MULTILINE)
_SILENCE = re.compile(r"^mpdist launch got no answer; the process is in state (\S+)", re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[.*\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "((?!<frozen ).+)", line (\d+) in (.+)$')  # none of runpy
_TRACED = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_LIBRARY = re.compile(r"^.*/(?:site-packages|dist-packages|lib/python3\.\d+)/")
_STATES = {
    "T": "stopped",
    "t": "stopped by a debugger",
    "D": "in an uninterruptible wait, often for a disk or a file server",
}
_TAIL = 1 << 20  # bytes: a dump has up to 100 threads of up to 100 frames
_SHOWN = 12  # frames of a stack in a message

# Frames that pass a call on, and say nothing of it.
_THROUGH = (
    "torch/_ops.py",
    "torch/utils/_contextlib.py",
    "torch/_dynamo/eval_frame.py",
    "torch/distributed/c10d_logger.py",
)
_NO_COLLECTIVES = ("torch/distributed/checkpoint/", "torch/distributed/elastic/")  # files and processes
_OWN_WAITS = {"mpdist/reduce.py": ("wait", "_finish"), "mpdist/dist.py": ("start", "_store")}
_HELPERS = ("mpdist/reduce.py", "mpdist/dist.py")  # whoever calls them is the one to name
_C10D = "torch/distributed/distributed_c10d.py"
_THREAD_WAITS = ("threading.py", "queue.py", "concurrent/futures/")
_ENGINE = "_engine_run_backward"  # autograd's: on a GPU a thread of its own runs the hooks
_HOST_WAITS = re.compile(r"\.(?:tolist|item|cpu|numpy|synchronize)\(")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    name: str

    @property
    def path(self) -> str:
        """Without the folders above the package: `mpdist/train.py`, `torch/nn/functional.py`, `threading.py`."""
        short = _LIBRARY.sub("", self.file)
        if short == self.file and "/" in short:
            _, ours, rest = short.rpartition("/mpdist/")
            short = f"mpdist/{rest}" if ours else "/".join(short.rsplit("/", 2)[-2:])
        return short

    @property
    def ours(self) -> bool:
        return self.path.startswith("mpdist/")

    @property
    def called(self) -> str:
        """`train.exchange` for what is ours, `all_reduce` for what is not."""
        if not self.ours:
            return self.name
        return f"{self.path.removeprefix('mpdist/').removesuffix('.py').replace('/', '.')}.{self.name}"

    def __str__(self) -> str:
        return f"{self.called} ({self.path}:{self.line})"


Stack = tuple[Frame, ...]  # the innermost frame first


@dataclass(frozen=True)
class Place:
    """Where a rank stands. waits: for other ranks; device: the host for its GPU; here: in anything else; mute: it
    cannot say. stacks: of the thread that matters, and of the main thread if that is another one."""

    kind: Literal["waits", "device", "here", "mute"]
    text: str
    stacks: tuple[Stack, ...] = ()

    def described(self) -> str:
        """As it follows `rank 1 `."""
        return {"waits": "waiting in ", "device": "waiting for the device in ", "here": "in ", "mute": ""}[
            self.kind
        ] + self.text

    def shown(self, rank: int) -> str:
        """The stacks for a person."""
        lines = []
        for title, stack in zip((f"rank {rank}", "its main thread"), self.stacks, strict=False):
            lines += [f"  {title}, most recent call first:", *(f"    {frame}" for frame in stack[:_SHOWN])]
        return "\n".join(lines)


# -- asking ------------------------------------------------------------------------------------------------------------


def write_question(session: Path, report: Report, why: str) -> None:
    """Into the rank's log, before it is asked."""
    _append(
        log_of(session, report.rank), f"mpdist launch asks for the stacks of this rank at beat {report.beat}: {why}"
    )


def write_silence(session: Path, report: Report) -> None:
    """Into the log of a rank that was asked and lives, if no stack has come: what its process is doing instead."""
    state = process_state(report.pid)
    if state is not None and not threads_in(_answer(log_tail(session, report.rank))[1]):
        _append(log_of(session, report.rank), f"mpdist launch got no answer; the process is in state {state}")


def log_tail(session: Path, rank: int) -> str:
    """Enough of a rank's log to hold a dump."""
    return read_text_tail(log_of(session, rank), _TAIL)


def _append(log: Path, line: str) -> None:
    with contextlib.suppress(OSError), log.open("a") as file:
        file.write(f"{line}\n")


def place_of(session: Path, report: Report) -> Place | None:
    """Where a rank stands now, by its own error or by the last answer in its log; None if that is not known."""
    if report.failure and (place := place_in_trace(report.failure.get("trace") or "")):
        return place
    beat, answer = _answer(log_tail(session, report.rank))
    if beat is None or beat != str(report.beat):
        return None
    threads = threads_in(answer)
    if threads:
        return place_in(threads)
    found = _SILENCE.search(answer)
    if found is None:
        return None
    if found[1] in _STATES:
        return Place("mute", f"does not answer the request for its stack (state {found[1]}: {_STATES[found[1]]})")
    return Place("here", f"an unknown place, since it does not answer the request for its stack (state {found[1]})")


def _answer(log: str) -> tuple[str | None, str]:
    """The beat of the last question in a log, and what has been written after it."""
    questions = list(_QUESTION.finditer(log))
    return (questions[-1][1], log[questions[-1].end() :]) if questions else (None, "")


# -- reading -----------------------------------------------------------------------------------------------------------


def threads_in(text: str) -> list[Stack]:
    """The threads of a dump; of several dumps, each thread as it stood last. The main thread is the last one."""
    threads: dict[str, list[Frame]] = {}
    frames: list[Frame] | None = None
    for line in text.splitlines():
        if head := _THREAD.match(line):
            threads.pop(head[1], None)
            frames = threads[head[1]] = []
        elif frames is not None and (found := _FRAME.match(line)):
            frames.append(Frame(found[1], int(found[2]), found[3]))
    stacks = [tuple(stack) for stack in threads.values() if stack]
    return sorted(stacks, key=lambda stack: stack[-1].name in ("<module>", "_run_module_as_main"))


def place_in(threads: list[Stack]) -> Place:
    """Where a process with these threads stands, the main thread being the last."""
    main = threads[-1]
    other = _waited_for(main, threads[:-1])
    kind, text = _read(other or main)
    return Place(kind, text, (other, main) if other else (main,))


def place_in_trace(trace: str) -> Place | None:
    """The collective in which an error was raised, by its traceback."""
    stack = tuple(Frame(file, int(line), name) for file, line, name in _TRACED.findall(trace))[::-1]
    kind, text = _read(stack) if stack else ("here", "")
    return Place("waits", text, (stack,)) if kind == "waits" else None


def _waited_for(main: Stack, others: list[Stack]) -> Stack | None:
    """The thread for which the main thread waits, if it does nothing else."""
    if main[0].name == _ENGINE:  # autograd's threads were not begun by Python
        return next((stack for stack in others if stack[-1].name != "_bootstrap"), None)
    if not main[0].path.startswith(_THREAD_WAITS):
        return None
    caller = next((frame.path for frame in main if frame.ours), None)
    return next((stack for stack in others if any(frame.path == caller for frame in stack)), None)


def _read(stack: Stack) -> tuple[Literal["waits", "device", "here"], str]:
    inside = list(takewhile(lambda frame: frame.path in _THROUGH or _is_collective(frame), stack))
    if any(_is_collective(frame) for frame in inside):
        return "waits", _collective(stack, inside)
    top = next((frame for frame in stack if frame.path not in _THROUGH), stack[0])
    own = next((frame for frame in stack if frame.ours), top)
    if top.name == "synchronize" or _HOST_WAITS.search(linecache.getline(top.file, top.line)):
        return "device", str(own)
    return "here", str(top) if own is top else f"{top}, called by {own}"


def _is_collective(frame: Frame) -> bool:
    path = frame.path
    if path.startswith("torch/distributed/"):
        return not path.startswith(_NO_COLLECTIVES) and path not in _THROUGH
    return frame.name in _OWN_WAITS.get(path, ())


def _collective(stack: Stack, inside: list[Frame]) -> str:
    """`all_reduce in train.exchange (mpdist/train.py:133)`: the call that was made, and the line of ours that made it."""
    calls = [frame for frame in inside if frame.path == _C10D] or [
        frame for frame in inside if frame.path not in _THROUGH
    ][:1]
    own = [frame for frame in stack if frame.ours and frame.name not in _OWN_WAITS.get(frame.path, ())]
    at = next((f for f in own if f.path not in _HELPERS and f.name != "together"), own[0] if own else None)
    return calls[-1].called if at is None else f"{calls[-1].called} in {at}"
