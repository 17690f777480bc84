"""This rank's micro-batches of each global window, made one window ahead by a thread.

A thread, not a process: assembling rows is a few copies, and a thread cannot die before a save that needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mpdist.data import IGNORED, Order, Rows, collate, deal


@dataclass(frozen=True)
class Micro:
    """input_ids, position_ids: [B, T] int64; index: [N] int64, the labelled ones of the B * T positions; targets: [N].

    labels: N, known on the host. rows: the row numbers behind it, fewer than B where filler rows were added.
    """

    input_ids: Tensor
    position_ids: Tensor
    index: Tensor
    targets: Tensor
    labels: int
    rows: np.ndarray


@dataclass(frozen=True)
class Batch:
    """One global window as this rank sees it. Counts, rows among them, are over all ranks and known without asking them."""

    number: int
    micros: list[Micro]
    labels: int
    tokens: int
    slots: int
    rows: int = 0

    def tensors(self) -> Iterator[Tensor]:
        for micro in self.micros:
            yield from (micro.input_ids, micro.position_ids, micro.index, micro.targets)


class Feed:
    def __init__(self, rows: Rows, order: Order, *, micro: int, ranks: int, rank: int, device: torch.device) -> None:
        self.rows, self.order, self.micro, self.ranks, self.rank, self.device = rows, order, micro, ranks, rank, device
        self._lengths = rows.token_counts
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def get(self, number: int) -> Batch:
        """The global window `number`, counted from 0 over all epochs; the one behind it is begun."""
        if self._ahead is not None and self._ahead[0] == number:
            batch = self._ahead[1].result()
        else:
            batch = self._make(number)
        self._ahead = number + 1, self._pool.submit(self._make, number + 1)
        return batch

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _make(self, number: int) -> Batch:
        return self.make(self.order.window(number), number)

    def make(self, window: np.ndarray, number: int = 0) -> Batch:
        """The window of these row numbers."""
        dealt = deal(window, self.micro, self.ranks)
        micros = [self._micro(ranks[self.rank]) for ranks in dealt]
        slots = sum(self.micro * self._width(numbers) for ranks in dealt for numbers in ranks)
        labels, tokens = int(self.rows.label_counts[window].sum()), int(self._lengths[window].sum())
        return Batch(number, micros, labels, tokens, slots, len(window))

    def _width(self, numbers: np.ndarray) -> int:
        longest = int(self._lengths[numbers].max(initial=1))
        return min(-(-longest // 8) * 8, self.rows.seq_len)

    def _micro(self, numbers: np.ndarray) -> Micro:
        arrays = collate(self.rows, numbers, self.micro, self._width(numbers))
        labels = arrays["labels"].reshape(-1)
        index = np.flatnonzero(labels != IGNORED)
        return Micro(
            input_ids=self._send(arrays["input_ids"]),
            position_ids=self._send(arrays["position_ids"]),
            index=self._send(index),
            targets=self._send(labels[index]),
            labels=len(index),
            rows=numbers,
        )

    def _send(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
