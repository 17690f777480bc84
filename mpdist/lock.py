"""One live run per directory.

The lock is a file, created exclusively, that says who holds it: host, pid, and when that process started (a pid
alone comes round again). Its holder also keeps it flock'ed, which the kernel ends with the process, however it
dies. So a lock whose holder is dead is taken over without asking. A lock of another host cannot be judged from here,
since flock may not reach across a network file system: it is refused with the way to clear it. One exception is a
requeued Slurm job: its former start has ended, or is on a node that Slurm has lost, where it may live on. The new start
puts another file in the lock's place, and the old one, which sees that (`lost`), has to end.

A launcher holds the lock for its workers: they inherit its token by the environment, and their claim is the launcher's.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import secrets
import time
from pathlib import Path
from typing import Any

from mpdist.errors import MachineError, UsageError

NAME = ".live"
TOKEN = "MPDIST_LOCK"
_WRITING_S = 2.0  # an empty lock this old has a creator that died before it could write


class Lock:
    """A held claim; `take` makes one. fd is None when the launcher above this process holds it."""

    def __init__(self, path: Path, fd: int | None, token: str) -> None:
        self.path, self.token = path, token
        self._fd = fd

    @classmethod
    def take(cls, folder: Path) -> Lock:
        """Claim a run directory for this process. Raises UsageError, naming host and pid, if a live run holds it."""
        path = folder / NAME
        deadline = time.monotonic() + _WRITING_S
        while True:
            fd, created = _open(path)
            done = False
            try:
                locked = _flock(fd)
                owner = _owner(fd)
                late = time.monotonic() > deadline
                if not created and owner and owner.get("token") == os.environ.get(TOKEN):
                    return cls(path, None, owner["token"])
                if locked is False and owner and _former_start(owner):
                    path.unlink(missing_ok=True)
                    continue
                # Only an unlocked, empty file that we did not create asks for patience: its creator is about to write.
                if locked is not False and _is_at(fd, path) and (created or _dead(owner) or (owner is None and late)):
                    done = True
                    return cls(path, fd, _write(fd))
                if owner or late:
                    raise refusal(folder, owner or {})
            finally:
                if not done:
                    os.close(fd)
                    if created:  # someone peeked at it in the moment before we locked it: begin again
                        path.unlink(missing_ok=True)
            time.sleep(0.02)

    @property
    def lost(self) -> bool:
        """Whether a later start of this Slurm job has taken the directory over."""
        return self._fd is not None and self.path.exists() and not _is_at(self._fd, self.path)

    def release(self) -> None:
        """Give it back. A lock that the launcher holds for this process stays the launcher's."""
        if self._fd is None:
            return
        if os.environ.get(TOKEN) == self.token:
            del os.environ[TOKEN]
        if _is_at(self._fd, self.path):
            self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = None


def holder(folder: Path) -> dict[str, Any] | None:
    """Who holds the lock, as written in it, dead or alive; None if nobody does."""
    try:
        fd = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _owner(fd)
    finally:
        os.close(fd)


def _open(path: Path) -> tuple[int, bool]:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), True
        except FileExistsError:
            pass
        except OSError as error:
            raise MachineError(f"{path}: cannot be created: {error.strerror}", do="choose another out_dir") from error
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC), False
        except FileNotFoundError:  # released in between
            continue
        except OSError as error:
            raise MachineError(f"{path}: cannot be opened: {error.strerror}", do="choose another out_dir") from error


def _flock(fd: int) -> bool | None:
    """True: locked. False: another process holds it. None: this file system has no locks; the file has to do."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _owner(fd: int) -> dict[str, Any] | None:
    try:
        value = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _write(fd: int) -> str:
    owner = _me() | {"token": secrets.token_hex(8), "since": time.time()}
    os.ftruncate(fd, 0)
    os.pwrite(fd, (json.dumps(owner) + "\n").encode(), 0)
    os.fsync(fd)
    os.environ[TOKEN] = owner["token"]
    return str(owner["token"])


def _me() -> dict[str, Any]:
    job = os.environ.get("SLURM_JOB_ID")
    return {
        "host": platform.node(),
        "boot": _boot(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "slurm": [job, os.environ.get("SLURM_RESTART_COUNT", "0")] if job else None,
    }


def _dead(owner: dict[str, Any] | None) -> bool:
    """Whether the holder is known to be gone. Asked with its flock free (or unknown)."""
    if owner is None:
        return False
    return _former_start(owner) or _gone(owner, _me())


def _former_start(owner: dict[str, Any]) -> bool:
    """Whether the holder was started by this Slurm job, before it was queued again."""
    mine, theirs = _me()["slurm"], owner.get("slurm")
    return bool(mine and theirs and theirs[0] == mine[0] and int(theirs[1]) < int(mine[1]))


def _gone(owner: dict[str, Any], me: dict[str, Any]) -> bool:
    if owner.get("host") != me["host"]:
        return False
    if owner.get("boot") != me["boot"]:
        return True
    started = _started(int(owner.get("pid") or 0))
    return started is None or started != owner.get("started")


def _boot() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """When a live process started, in whatever unit the system has; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        pass
    if Path("/proc/self/stat").exists() or pid <= 0:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "alive"


def refusal(folder: Path, owner: dict[str, Any]) -> UsageError:
    """What is said of a folder that a live run holds. owner: as `holder` gives it."""
    host, pid = owner.get("host", "an unknown host"), owner.get("pid", "unknown")
    job = (owner.get("slurm") or [None])[0]
    what = f"{folder} is in use by a live run: pid {pid} on {host}{f', of Slurm job {job}' * bool(job)}"
    if host != platform.node():
        ask = f" (squeue --job={job} can tell); scancel {job} ends it" if job else ""
        return UsageError(
            what,
            f"whether that run still lives cannot be told from {platform.node()}",
            f"wait for it{ask}; if it has surely ended, remove {folder / NAME} and launch again",
        )
    return UsageError(
        what,
        "two runs in one directory would overwrite each other's checkpoints",
        f"wait for it, stop it ({f'scancel {job}' if job else f'kill -TERM {pid}'}), or give this run another name",
    )
