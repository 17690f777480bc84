"""Prepared rows on disk: one memory-mapped array and its index, nothing that runs code when it is opened.

    rows.bin      int32 [3, N]: ids, labels, positions of all tokens of all rows, one row after the other
    bounds.npy    int64 [rows + 1]: where each row begins and ends in N
    labels.npy    int64 [rows]: label tokens of each row
    index.json    sizes, the digest of the contents, weights of the sources, the report; written last

Labels are already shifted: ``labels[t]`` is the id at t + 1 of the same document, or -100. This is the only shift.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from mpdist.data.batch import IGNORED
from mpdist.data.pack import Pieces
from mpdist.errors import UsageError

FORMAT = 1  # of the files, and of what preparing means: raise it when either changes
_CHUNK = 1 << 22  # tokens gathered at once


class Rows:
    """Prepared rows, memory-mapped. ``report``: what preparing counted; ``parts``: (rows, weight) of each source."""

    def __init__(
        self, folder: Path, index: dict[str, Any], data: np.ndarray, bounds: np.ndarray, labels: np.ndarray
    ) -> None:
        self.folder = folder
        self.seq_len: int = index["seq_len"]
        self.digest: str = index["digest"]
        self.report: dict[str, Any] = index["report"]
        self.parts: list[tuple[int, float]] = [(int(count), float(weight)) for count, weight in index["parts"]]
        self.data, self.bounds, self.label_counts = data, bounds, labels

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def token_counts(self) -> np.ndarray:
        """Real tokens of each row, int64 [rows]."""
        return np.diff(self.bounds)

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids, labels, positions of row i, each int32 [n] with n <= seq_len. IndexError past the end."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        ids, labels, positions = self.data[:, self.bounds[i] : self.bounds[i + 1]]
        return ids, labels, positions


def open_rows(folder: str | Path) -> Rows:
    """Open what ``prepare`` returned. Raises UsageError where it is not whole."""
    folder = Path(folder)
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise ValueError(f"its format is {index['format']}, this version reads {FORMAT}")
        bounds = np.load(folder / "bounds.npy", allow_pickle=False)
        labels = np.load(folder / "labels.npy", allow_pickle=False)
        tokens, size = index["tokens"], (folder / "rows.bin").stat().st_size
        count = index["rows"]
        if size != 12 * tokens or len(bounds) != count + 1 or len(labels) != count or bounds[-1] != tokens:
            raise ValueError(f"rows.bin has {size} bytes, not {12 * tokens}, or the index is another's")
        # a plain ndarray over the map: slicing a np.memmap costs ten times as much
        data = np.asarray(np.memmap(folder / "rows.bin", dtype=np.int32, mode="r", shape=(3, tokens)))
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise UsageError(
            f"the prepared data in {folder} cannot be used", str(error), "delete the folder; it is made anew"
        ) from None
    return Rows(folder, index, data, bounds, labels)


def write_rows(
    folder: Path, ids: np.ndarray, targets: np.ndarray, pieces: Pieces, index: dict[str, Any]
) -> dict[str, Any]:
    """Write everything but index.json into ``folder`` and return the index.

    ids int32 [tokens], targets uint8 [tokens]: the stream of all documents; pieces: as ``pack`` gives them, one row
    after the other.
    """
    starts, lengths, rows = pieces
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    count = int(rows[-1]) + 1 if len(rows) else 0
    bounds = np.concatenate(([0], ends[np.flatnonzero(np.diff(rows, append=count))])).astype(np.int64)
    labels_of = np.zeros(count, dtype=np.int64)
    digest = hashlib.sha256(json.dumps([FORMAT, index["seq_len"], index["parts"]]).encode())
    digest.update(bounds.tobytes())
    path = folder / "rows.bin"
    with path.open("wb") as file:
        file.truncate(12 * total)
    out = np.memmap(path, dtype=np.int32, mode="r+", shape=(3, total)) if total else np.zeros((3, 0), dtype=np.int32)
    first = 0
    while first < len(starts):
        done = int(ends[first] - lengths[first])
        last = max(first + 1, int(np.searchsorted(ends, done + _CHUNK, side="right")))
        block = _gather(ids, targets, starts[first:last], lengths[first:last])
        out[:, done : done + block.shape[1]] = block
        digest.update(block.tobytes())
        hits = np.add.reduceat(block[1] != IGNORED, ends[first:last] - lengths[first:last] - done, dtype=np.int64)
        np.add.at(labels_of, rows[first:last], hits)
        first = last
    if total:
        out.flush()  # type: ignore[union-attr]
    np.save(folder / "bounds.npy", bounds, allow_pickle=False)
    np.save(folder / "labels.npy", labels_of, allow_pickle=False)
    sizes = {"rows": count, "tokens": total, "labels": int(labels_of.sum())}
    return {**index, **sizes, "format": FORMAT, "digest": digest.hexdigest()}


def _gather(ids: np.ndarray, targets: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int32 [3, n]: ids, shifted labels, positions of some pieces, one after the other."""
    before = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    positions = np.arange(total) - np.repeat(before, lengths)
    at = positions + np.repeat(starts, lengths)
    out = np.empty((3, total), dtype=np.int32)
    out[0] = ids[at]
    wanted = targets[at].astype(bool)
    out[1, :-1] = np.where(wanted[1:], out[0, 1:], IGNORED)
    out[1, before[1:] - 1] = IGNORED  # the first token of the next piece is nobody's target
    out[1, -1] = IGNORED
    out[2] = positions
    return out


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` as a whole and durably: a kill leaves the old file or the new one."""
    aside = path.with_name(path.name + ".aside")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
