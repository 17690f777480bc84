"""Which documents share a row, and where a document is cut.

A row is a list of pieces, each a stretch of one document. Positions start again at 0 in each piece and its first token
is never a target, so pieces in one row know nothing of each other. A document that fits into a row is never cut, except
by ``concat``, which cuts at every row's end.

Pieces are three int64 arrays, one entry a piece, in the order of the rows: offset of its first token in the stream of
all documents, number of tokens, and number of its row from 0.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

Pieces = tuple[np.ndarray, np.ndarray, np.ndarray]


def pack(lengths: np.ndarray, seq_len: int, packing: str) -> Pieces:
    """``lengths``: tokens of each document in the order of the stream; longer than ``seq_len`` means: cut it."""
    lengths = np.asarray(lengths, dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])) if len(lengths) else lengths
    if packing == "concat":
        return _concat(starts, lengths, seq_len)
    starts, lengths = _split(starts, lengths, seq_len)
    if packing == "none":
        return starts, lengths, np.arange(len(lengths), dtype=np.int64)
    bins = best_fit(lengths, seq_len)
    # rows in the order of their first piece, pieces in the order of the stream: no row order left over from the sizes
    first = np.full(int(bins.max(initial=-1)) + 1, len(bins), dtype=np.int64)
    np.minimum.at(first, bins, np.arange(len(bins)))
    rank = np.empty_like(first)
    rank[np.argsort(first)] = np.arange(len(first))
    rows = rank[bins]
    order = np.argsort(rows, kind="stable")
    return starts[order], lengths[order], rows[order]


def _split(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents longer than a row become full rows and a rest."""
    counts = -(-lengths // seq_len)
    inner = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    left = np.repeat(lengths, counts) - inner * seq_len
    return np.repeat(starts, counts) + inner * seq_len, np.minimum(left, seq_len)


def _concat(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> Pieces:
    total = int(lengths.sum())
    cuts = np.union1d(starts[lengths > 0], np.arange(0, total, seq_len, dtype=np.int64))
    return cuts, np.diff(np.append(cuts, total)), cuts // seq_len


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing: the bin of each piece, int64. Every length is at most ``capacity``.

    Equal lengths are placed together and bins with equal room are kept together, so the work grows with the number of
    distinct lengths and not with that of documents: a million documents take about a second.
    """
    bins = np.empty(len(lengths), dtype=np.int64)
    if not len(lengths):  # a source of which every record was dropped
        return bins
    order = np.argsort(-lengths, kind="stable")
    sizes, firsts = np.unique(-lengths[order], return_index=True)
    groups = np.split(order, firsts[1:])
    room: dict[int, list[np.ndarray]] = {}  # room left -> the bins that have it
    rooms: list[int] = []  # the keys of `room`, sorted
    made = 0

    def put(left: int, members: np.ndarray) -> None:
        if left and len(members):
            if left not in room:
                insort(rooms, left)
                room[left] = []
            room[left].append(members)

    for size, pieces in zip((-sizes).tolist(), groups, strict=True):
        while len(pieces):
            at = bisect_left(rooms, size)
            if at < len(rooms):
                left = rooms.pop(at)
                parts = room.pop(left)
                open_bins = parts[0] if len(parts) == 1 else np.concatenate(parts)
            else:
                left = capacity
                need = -(-len(pieces) // (capacity // size))
                open_bins = np.arange(made, made + need)
                made += need
            each = left // size  # a bin that was the best fit once stays the best fit until no more go in
            full = min(len(open_bins), len(pieces) // each)
            bins[pieces[: full * each]] = np.repeat(open_bins[:full], each)
            put(left - each * size, open_bins[:full])
            pieces = pieces[full * each :]
            open_bins = open_bins[full:]
            if len(open_bins) and len(pieces):  # fewer pieces than one more bin takes
                bins[pieces] = open_bins[0]
                put(left - len(pieces) * size, open_bins[:1])
                pieces, open_bins = pieces[:0], open_bins[1:]
            put(left, open_bins)
    return bins
