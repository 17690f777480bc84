"""Rehearsed faults: what a run does when a rank overflows, dies, hangs, is stopped, finds the disk full or a save damaged.

Attempts and saves count from 1 over the whole run, resumes included. A fault of the process says in an event that it
fired before it strikes, so that a resumed run does not meet it again. A fault of the numbers belongs to its attempt: where
a resume makes that attempt again it strikes again, else the run would not go on as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


class Drill:
    """plan: the config's drill section as plain values, faults that are off left out. fired: what earlier sessions
    rehearsed, as `name#attempt` or `name#save`. record(name, number, rank) writes the event; only the rank that is struck calls it."""

    def __init__(
        self,
        plan: Mapping[str, Mapping[str, Any]],
        rank: int,
        fired: Iterable[str],
        record: Callable[[str, int, int], None],
    ) -> None:
        self._plan = {name: values for name, values in plan.items() if values}
        self._rank, self._record = rank, record
        self._fired = {name for name in fired if "@" not in name}
        self._again = False

    def __bool__(self) -> bool:
        return bool(self._plan)

    def _due(self, name: str, number: int, exactly: bool = True) -> Mapping[str, Any] | None:
        """The fault's values if it strikes this rank now; remembers and records that it did."""
        fault = self._plan.get(name)
        if fault is None or fault.get("rank", self._rank) not in (self._rank, "all"):
            return None
        at = fault.get("attempt", fault.get("save"))
        if "attempts" in fault:
            hit = fault["attempts"] == "all" or number in fault["attempts"]
        else:
            hit = number == at if exactly else number >= at
        key = f"{name}@{number}" if "attempts" in fault else f"{name}#{at}"
        if self._again and hit and "attempts" in fault:
            return fault if key in self._fired else None
        if not hit or key in self._fired:
            return None
        self._fired.add(key)
        self._record(key, number, self._rank)
        return fault

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """An attempt is computed again: the faults of its numbers that struck it strike again, and are not recorded twice."""
        self._again = True
        try:
            yield
        finally:
            self._again = False

    def of_numbers(self, attempt: int, micros: int) -> str:
        """The fault of the numbers that strikes an attempt of so many micro-batches on any rank, "" without one. The same on
        all ranks."""
        for name in ("nan_loss_at", "overflow_at"):
            fault = self._plan.get(name)
            if fault is None or fault.get("micro", 1) > micros:
                continue
            if fault["attempts"] == "all" or attempt in fault["attempts"]:
                return name
        return ""

    def overflow(self, attempt: int, micro: int) -> bool:
        """Whether micro-batch `micro` (from 1) of this attempt gets +inf into one gradient element of this rank."""
        fault = self._plan.get("overflow_at")
        return fault is not None and fault.get("micro", 1) == micro and self._due("overflow_at", attempt) is not None

    def nan_loss(self, attempt: int) -> bool:
        return self._due("nan_loss_at", attempt) is not None

    def strike(self, attempt: int) -> None:
        """The faults of an attempt's beginning: exceptions, exits, hangs, kills, stop signals to this rank."""
        if self._plan.get("kill_at", {}).get("phase") == "train" and self._due("kill_at", attempt):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault := self._due("stop_at", attempt):
            os.kill(os.getpid(), getattr(signal, f"SIG{fault['signal']}"))
        if self._due("raise_at", attempt):
            raise RuntimeError(f"drill: raised at attempt {attempt} on rank {self._rank}")
        if fault := self._due("exit_at", attempt):
            os._exit(fault["code"])
        if self._due("hang_at", attempt):
            while True:
                time.sleep(3600)

    def saving(self, save: int, attempt: int) -> None:
        """The faults inside a save: a kill, or a disk that is full (OSError)."""
        if self._plan.get("kill_at", {}).get("phase") == "save" and self._due("kill_at", attempt, exactly=False):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._due("disk_full_at", save):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (drill)")

    def published(self, checkpoint: Path, save: int) -> None:
        """The fault of a checkpoint that has been published: what it holds is no longer what was saved."""
        if fault := self._due("corrupt_at", save):
            corrupt(checkpoint, fault["how"])


def corrupt(checkpoint: Path, how: str) -> None:
    """Damages the largest file of tensors, as schema.CorruptAt says."""
    victim = max((checkpoint / "tensors").glob("*.distcp"), key=lambda path: (path.stat().st_size, path.name))
    size = victim.stat().st_size
    if how == "truncate":
        os.truncate(victim, size - 1)
    elif how == "flip":
        with victim.open("r+b") as file:
            file.seek(size // 2)
            byte = file.read(1)[0]
            file.seek(size // 2)
            file.write(bytes([byte ^ 1]))
    else:
        before = max((p for p in checkpoint.parent.glob("step-*") if p.name < checkpoint.name), default=None)
        old = None if before is None else before / "tensors" / victim.name
        if old is not None and old.is_file() and old.stat().st_size == size:
            shutil.copyfile(old, victim)
        else:
            os.truncate(victim, 0)
            os.truncate(victim, size)
