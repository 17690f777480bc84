"""One process works, the others wait: by a lock on a file, without any collective that could time out.

The lock is fcntl's, which the kernel drops when its holder dies however that happens, and which network file systems
carry as far as they carry any lock. Whoever gets it next goes on where the dead holder stopped. A holder that fails
tells why, and those who were waiting by then fail with the same error instead of running into it one after the other.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpdist import errors
from mpdist.errors import MachineError, MpdistError

POLL_S = 0.1
WAIT_LINE_S = 30.0
_threads = threading.Lock()  # fcntl locks belong to a process: they do not keep its own threads apart


def once(
    folder: Path, request: str, ready: Callable[[], Path | None], work: Callable[[], Path], say: Callable[[str], None]
) -> Path:
    """What ``ready`` finds, or what ``work`` makes while no other process works in ``folder``.

    ``request`` says what is asked for: a failure is passed on only to those who ask for the same. Raises what ``work``
    raises, and MachineError where the file system has no locks.
    """
    found = ready()
    if found is not None:
        return found
    with _threads:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise MachineError(
                f"{folder} cannot be written: {error.strerror}",
                "prepared data are kept there",
                "set data.cache to a folder that can",
            ) from None
        known = _failure(folder).get("id")
        try:
            found = _acquire(fd, folder, ready, say)
            if found is not None:
                return found
            failure = _failure(folder)
            if failure.get("id") != known and failure.get("request") == request:
                raise _again(failure)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {platform.node()}".encode(), 0)
            return _work(folder, request, work)
        finally:
            os.close(fd)  # this is what unlocks


def _acquire(fd: int, folder: Path, ready: Callable[[], Path | None], say: Callable[[str], None]) -> Path | None:
    """Wait for the lock, or for the result to be there."""
    start = told = looked = time.monotonic()
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise MachineError(
                    f"{folder / 'lock'} cannot be locked",
                    str(error),
                    "set data.cache to a folder on another file system",
                ) from None
        time.sleep(POLL_S)
        now = time.monotonic()
        if now - looked > 10 * POLL_S:
            looked = now
            found = ready()
            if found is not None:
                return found
        if now - told > WAIT_LINE_S:
            told = now
            holder = os.pread(fd, 200, 0).decode(errors="replace") or "another process"
            say(f"waiting for {holder}, which prepares data in {folder} ({now - start:.0f} s so far)")


def _work(folder: Path, request: str, work: Callable[[], Path]) -> Path:
    try:
        return work()
    except Exception as error:
        if isinstance(error, OSError):
            failed: Exception = MachineError(
                f"preparing data in {folder} failed", str(error), "run it again: it goes on where it stopped"
            )
        else:
            failed = error
        told: dict[str, Any] = {"id": secrets.token_hex(8), "request": request, "kind": type(failed).__name__}
        if isinstance(failed, MpdistError):
            told |= {"what": failed.what, "why": failed.why, "do": failed.do}
        else:
            told |= {"what": f"{type(failed).__name__}: {failed}", "why": "", "do": ""}
        try:
            aside = folder / "failure.json.aside"
            aside.write_text(json.dumps(told), encoding="utf-8")
            os.replace(aside, folder / "failure.json")
        except OSError:
            pass  # a full disk: the others will find out themselves
        if failed is error:
            raise
        raise failed from error


def _failure(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "failure.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _again(failure: dict[str, Any]) -> Exception:
    kind = getattr(errors, failure["kind"], None)
    if isinstance(kind, type) and issubclass(kind, MpdistError) and kind is not errors.ConfigError:
        return kind(failure["what"], failure["why"], failure["do"])
    return RuntimeError(f"the process that prepared the data failed: {failure['what']}")
