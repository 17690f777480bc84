"""Rows to arrays: the data's part of the training loop, hence one copy a row and nothing for each token.

There is no attention mask anywhere. Padding is on the right, where causal attention keeps it from every real token, and
its labels are -100 because it is made so, not because of the id that it has: no pad token is needed. Positions that
start again at 0 are what keeps packed documents apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpdist.data.order import Order, deal

if TYPE_CHECKING:
    from mpdist.data.store import Rows

IGNORED = -100


def collate(rows: Rows, numbers: np.ndarray, micro_rows: int, length: int | None = None) -> dict[str, np.ndarray]:
    """int64 arrays [micro_rows, T]: ``input_ids``, ``labels`` (already shifted, or -100), ``position_ids``.

    T is ``length``, by default the longest of the rows, rounded up to a multiple of 8 and at most seq_len. Rows that
    are missing from ``numbers`` are filler: visible tokens, none of them a target, so that no attention row is empty.
    """
    numbers = np.asarray(numbers, dtype=np.int64)
    starts, ends = rows.bounds[numbers], rows.bounds[numbers + 1]
    if length is None:
        longest = int((ends - starts).max(initial=1))
        length = min(-(-longest // 8) * 8, rows.seq_len)
    out = np.zeros((3, micro_rows, length), dtype=np.int64)
    out[1] = IGNORED
    # padding counts on from 0 in the row's own slots: one unpacked document and its padding look like one document
    out[2] = np.arange(length)
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        out[:, i, : end - start] = rows.data[:, start:end]
    return {"input_ids": out[0], "labels": out[1], "position_ids": out[2]}


def micro_batches(
    rows: Rows, order: Order, k: int, *, micro: int, ranks: int, rank: int
) -> list[dict[str, np.ndarray]]:
    """What ``rank`` of ``ranks`` runs in the global window ``k``: one ``collate`` result for each micro-batch."""
    return [collate(rows, dealt[rank], micro) for dealt in deal(order.window(k), micro, ranks)]
