"""Which rows make up which global window: a pure function of (seed, number of the window).

Nothing is stored and nothing is walked through: any window of any epoch is computed alone, so a resume costs nothing
and another number of ranks sees the same global windows. An epoch's permutation is a swap-or-not shuffle (Hoang,
Morris, Rogaway 2012): in each round every number x has the partner key - x, and a bit, hashed from the greater of the
two, says whether the two change places. It permutes any number of rows, not only powers of two, and uses integers only,
so that no library's random generator can change the order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from mpdist.errors import UsageError

if TYPE_CHECKING:
    from mpdist.data.store import Rows

_AHEAD = 4096  # rows computed at once, so that a window costs a slice


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64: uint64 to uint64, every bit of the result depends on every bit of x."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _key(*parts: int) -> np.ndarray:
    """One uint64 (an array of length 1, whose arithmetic wraps silently) from whole numbers of any size."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        part = int(part)
        while True:
            key = _mix(key ^ np.uint64(part & 0xFFFFFFFFFFFFFFFF))
            part >>= 64
            if part in (0, -1):
                break
    return key


def permute(numbers: np.ndarray, size: int, *key: int) -> np.ndarray:
    """Where a keyed permutation of range(size) sends ``numbers`` (int64, each in the range). O(len(numbers)) work."""
    if size <= 1:
        return numbers
    rounds = 6 * max(size.bit_length(), 6)
    base = _key(*key)
    keys = _mix(base + np.arange(1, rounds + 1, dtype=np.uint64))
    x = np.asarray(numbers, dtype=np.int64)
    for salt, turn in zip(keys, (keys % np.uint64(size)).tolist(), strict=True):
        partner = turn - x
        partner += size * (partner < 0)
        bit = _mix(np.maximum(x, partner).astype(np.uint64) ^ salt) >> np.uint64(63)
        x = np.where(bit.astype(bool), partner, x)
    return x


class Order:
    """The rows of every global window.

    rows         number of rows, or a ``Rows``, which brings the weights of its sources
    window       rows of one global window (batch.global)
    shuffle      a new order each epoch, from (seed, epoch); else the rows as they stand
    last_window  of an epoch: "short" (fewer rows) or "drop"
    parts        (rows, weight) of each source, in order; by default one source of weight 1. A source of weight w gives
                 w * rows to an epoch: the whole part of w as repeats, the fraction drawn anew each epoch

    Raises UsageError where an epoch would have no window.
    """

    def __init__(
        self,
        rows: int | Rows,
        window: int,
        seed: int,
        shuffle: bool = True,
        last_window: str = "short",
        parts: list[tuple[int, float]] | None = None,
    ) -> None:
        if not isinstance(rows, int):
            parts = rows.parts if parts is None else parts
            rows = len(rows)
        self.rows, self.window_rows, self.seed, self.shuffle = rows, window, seed, shuffle
        self._weighted = parts is not None and any(weight != 1 for _, weight in parts)
        self._parts = _spread(parts if parts is not None and self._weighted else [(rows, 1.0)])
        self.epoch_rows = sum(whole * count + drawn for _, count, whole, drawn in self._parts)
        self.windows_per_epoch = self.epoch_rows // window if last_window == "drop" else -(-self.epoch_rows // window)
        if not self.windows_per_epoch:
            raise UsageError(
                f"an epoch of {self.epoch_rows} rows has no window of {window} rows",
                "no row" if not rows else "data.last_window = drop leaves the short one out",
                "use last_window: short, a smaller batch.global, or more data" if rows else "",
            )
        self._block = lru_cache(maxsize=4)(self._compute)

    def window(self, k: int) -> np.ndarray:
        """Row numbers (int64) of the global window k, counted from 0 over all epochs. An epoch's last may be short."""
        epoch, at = divmod(int(k), self.windows_per_epoch)
        per_block = max(1, _AHEAD // self.window_rows)
        block, inner = divmod(at, per_block)
        rows = self._block(epoch, block, per_block)[inner * self.window_rows : (inner + 1) * self.window_rows]
        return rows.copy()

    def _compute(self, epoch: int, block: int, per_block: int) -> np.ndarray:
        low = block * per_block * self.window_rows
        slots = np.arange(low, min(low + per_block * self.window_rows, self.epoch_rows), dtype=np.int64)
        if self.shuffle:
            slots = permute(slots, self.epoch_rows, self.seed, epoch, 0)
        if not self._weighted:
            return slots
        out = np.empty_like(slots)
        base = 0
        for number, (first, count, whole, drawn) in enumerate(self._parts, 1):
            size = whole * count + drawn
            mine = (slots >= base) & (slots < base + size)
            inner = slots[mine] - base
            extra = inner >= whole * count
            inner[~extra] %= max(count, 1)
            inner[extra] = permute(inner[extra] - whole * count, count, self.seed, epoch, number)
            out[mine] = first + inner
            base += size
        return out


def _spread(parts: list[tuple[int, float]]) -> list[tuple[int, int, int, int]]:
    """(first row, rows, whole repeats, rows drawn on top) of each source; a source with rows gives at least one."""
    out, first = [], 0
    for count, weight in parts:
        whole = int(weight)
        drawn = round((weight - whole) * count)
        if count and not whole and not drawn:
            drawn = 1
        out.append((first, count, whole, drawn))
        first += count
    return out


def deal(window_rows: np.ndarray, micro: int, ranks: int) -> list[list[np.ndarray]]:
    """A window's row numbers, as [micro-batch][rank]: rank r of micro-batch m has [(m * ranks + r) * micro : + micro].

    Every rank gets the same number of micro-batches; in the last of a short window a rank's rows may be few or none.
    """
    step = micro * ranks
    return [
        [window_rows[at + r * micro : at + (r + 1) * micro] for r in range(ranks)]
        for at in range(0, len(window_rows), step)
    ]
