"""The stream of documents that preparing writes first, and digests of what it reads: the parts that survive a kill."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpdist.data.store import write_json
from mpdist.errors import MachineError, UsageError

COMMIT_S = 2.0  # at most so much work is lost to a kill, and something is written for good so often
RACY_S = 2.0  # a file changed so shortly before it was read may change again without a new time stamp


@dataclass
class State:
    """How far the stream is good. ``records`` of source number ``source`` are used up."""

    source: int = 0
    records: int = 0
    documents: int = 0
    tokens: int = 0
    max_id: int = -1
    max_at: str = ""
    reports: list[dict[str, Any]] = field(default_factory=list)


class Stream:
    """All documents in the order of the records: ids, whether each is a target, and the documents' lengths."""

    FILES = (("ids.bin", np.int32), ("targets.bin", np.uint8), ("lengths.bin", np.int64))
    EXTRAS = ("progress.json", "owner")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.state = self._load()
        self.files = [(folder / name).open("ab") for name, _ in self.FILES]
        for file, (_, dtype), count in zip(self.files, self.FILES, self._counts(), strict=True):
            file.truncate(count * np.dtype(dtype).itemsize)
        self.committed = time.monotonic()
        self.token = secrets.token_hex(8)
        (folder / "owner").write_text(self.token)

    def _counts(self) -> tuple[int, int, int]:
        return self.state.tokens, self.state.tokens, self.state.documents

    def _load(self) -> State:
        """The last good state whose files are there in full; else the beginning."""
        try:
            state = State(**json.loads((self.folder / "progress.json").read_text(encoding="utf-8")))
            self.state = state
            sizes = [(self.folder / name).stat().st_size // np.dtype(dtype).itemsize for name, dtype in self.FILES]
            return state if all(a >= b for a, b in zip(sizes, self._counts(), strict=True)) else State()
        except (OSError, ValueError, TypeError):
            return State()

    def add(self, ids: np.ndarray, targets: bytes, lengths: list[int]) -> None:
        for file, data in zip(self.files, (ids.tobytes(), targets, np.array(lengths, np.int64).tobytes()), strict=True):
            file.write(data)
        self.state.tokens += len(ids)
        self.state.documents += len(lengths)

    def commit(self, force: bool = False) -> None:
        if not force and time.monotonic() - self.committed < COMMIT_S:
            return
        owner = (self.folder / "owner").read_text()
        if owner != self.token:
            raise MachineError(
                f"two processes write {self.folder} at once",
                "the file system's locks do not reach from one host to the other",
                "prepare the data before the launch with `mpdist prepare`, or set data.cache to another file system",
            )
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())
        write_json(self.folder / "progress.json", vars(self.state))
        self.committed = time.monotonic()

    def close(self) -> None:
        for file in self.files:
            file.close()

    def arrays(self) -> list[np.ndarray]:
        return [
            np.asarray(np.memmap(self.folder / name, dtype=dtype, mode="r", shape=(count,)))
            for (name, dtype), count in zip(self.FILES, self._counts(), strict=True)
        ]


class Stamps:
    """sha256 of files, remembered by size and time so that a launch need not read all data again."""

    def __init__(self, cache: Path) -> None:
        self.path = cache / "stamps.json"
        try:
            self.known: dict[str, Any] = dict(json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            self.known = {}
        self.grown = False

    def digest(self, file: Path, look: bool) -> str | None:
        try:
            stat = file.stat()
            stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
            name = str(file.absolute())
            known = self.known.get(name)
            if known and known[:3] == stamp:
                return known[3]
            if look:
                return None
            settled = time.time() - stat.st_mtime > RACY_S
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise UsageError(f"{file} cannot be read", str(error)) from None
        if settled:
            self.known[name] = [*stamp, digest]
            self.grown = True
        return digest

    def save(self) -> None:
        if self.grown:
            write_json(self.path, self.known)
