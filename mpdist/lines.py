"""Files that survive a kill: states replaced whole, histories of JSON lines that only grow.

A state is written aside, synced and renamed, so a reader sees the old one or the new one. A history is appended
to, one line a write(2) in append mode, so a kill can tear the last line at most. No float in JSON is non-finite: NaN
and the infinities are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpdist.errors import MachineError, UsageError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Lines:
    """An append-only file of JSON lines; one write(2) a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def append(self, row: Mapping[str, Any]) -> None:
        """Raises MachineError if the line cannot be written whole; what got in of it is taken out again."""
        data = (dump(row) + "\n").encode()
        try:
            written = os.write(self._fd, data)
            if written == len(data):
                return
            # A full disk takes part of a line. Leaving it would glue the next line to it.
            end = os.fstat(self._fd).st_size
            os.ftruncate(self._fd, end - written)
            trouble = f"only {written} of {len(data)} bytes fitted"
        except OSError as error:
            trouble = error.strerror or str(error)
        raise MachineError(
            f"{self.path}: cannot append a line: {trouble}",
            "a run whose record has holes cannot be compared or resumed honestly",
            "make room on the disk (or mend it) and launch again; the run goes on from its last checkpoint",
        )

    def close(self) -> None:
        """Sync to the disk and close."""
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)


def repair(path: Path) -> bytes | None:
    """Cut a torn or unreadable end off a file of JSON lines. Returns what was cut, None if nothing was.

    Only ends are cut: a kill tears the last line, a crash of the machine may leave a stretch of zeros there.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    keep = data.rfind(b"\n") + 1
    while keep:
        before = data.rfind(b"\n", 0, keep - 1) + 1
        if _object(data[before:keep]) is not None:
            break
        keep = before
    if keep == len(data):
        return None
    os.truncate(path, keep)
    return data[keep:]


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_lines(path: str | Path, check: Callable[[dict[str, Any], str], None] | None = None) -> list[dict[str, Any]]:
    """Every whole line of a history, as written. The end may be in the middle of being written and is left out.

    check: called with each row and where it stands, such as `metrics.jsonl:7`. Raises UsageError for a broken line in the
    middle, or if there is no such file.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", do="check that a run was started there") from error
    rows = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        row = _object(line)
        if row is None:
            raise UsageError(f"{path}:{number}: not a JSON object", "only the last line of a history may be torn")
        if check is not None:
            check(row, f"{path}:{number}")
        rows.append(row)
    return rows


def write_atomic(path: Path, text: str) -> None:
    """Write aside, sync, rename: a reader sees the old file or the new one, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.aside")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise MachineError(
            f"{path}: cannot be written: {error.strerror or error}", do="make room, or check the permissions"
        ) from error
    sync_folder(path.parent)


def written_openly(path: Path, write: Callable[[], None]) -> None:
    """Have a library write a file that it would keep to its owner (safetensors does): the umask decides instead."""
    path.touch()
    mode = path.stat().st_mode & 0o777
    write()
    path.chmod(mode)


def no_room(error: BaseException) -> bool:
    """Whether it says that a disk is full or a quota used up, also where a library has put that into words of its own."""
    text = str(error)
    return getattr(error, "errno", None) in _NO_ROOM or any(os.strerror(number) in text for number in _NO_ROOM)


def sync_folder(path: Path) -> None:
    """Flush a folder's own entries, so that a rename in it survives a crash of the machine, where that can be done."""
    try:
        folder = os.open(path, os.O_RDONLY)
    except OSError:  # some file systems do not open folders; the rename itself has happened
        return
    try:
        os.fsync(folder)
    except OSError:
        pass
    finally:
        os.close(folder)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None if it is missing or is none."""
    try:
        return _object(path.read_bytes())
    except FileNotFoundError:
        return None


def plain(value: Any) -> Any:
    """What JSON can hold of a value: non-finite floats as strings, arrays of one element as numbers, paths as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else ("nan" if value != value else "inf" if value > 0 else "-inf")
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):  # a number of numpy or torch
        return plain(value.item())
    raise TypeError(f"{type(value).__name__} does not go into JSON: {value!r}")


def dump(value: Any, indent: int | None = None) -> str:
    """The JSON text of a value, by `plain`."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, indent=indent)


def number(value: Any) -> Any:
    """The float that "nan", "inf" or "-inf" stands for; anything else as it is."""
    return _NONFINITE.get(value, value) if isinstance(value, str) else value
