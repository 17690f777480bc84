"""What reduced precision costs, measured on steps that are logged: nothing is held or added up on the others.

precision/changed_fraction  with 16-bit masters: share of their values that the step changed. An update below about
                            1/256 of a BF16 weight rounds away, so small learning rates leave most values as they are
precision/wire_error        with a 16-bit wire: relative L2 error of the window's first reduction (a block of layers,
                            or a bucket) against the same reduction in FP32
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from mpdist.optim import Optimizer
from mpdist.reduce import Wire


class Telemetry:
    """begin, hold and read stand around one attempt; all three do nothing unless `begin` was told to measure."""

    def __init__(self, optimizer: Optimizer, wire: Wire) -> None:
        self._optimizer, self._wire = optimizer, wire
        self._pure = any(part.tensor.dtype != torch.float32 for part in optimizer.parts)
        self._any = self._pure or wire.wire != torch.float32
        self._measuring = False
        self._held: list[torch.Tensor] = []

    def begin(self, measure: bool) -> None:
        """Before the window's first backward; the same on all ranks."""
        self._measuring = measure and self._any
        if self._measuring:
            self._wire.sample()

    def hold(self) -> None:
        """Before the optimizer moves. Costs a copy of this rank's 16-bit masters until `read`."""
        if self._measuring and self._pure:
            self._held = [part.tensor.clone() for part in self._optimizer.parts]

    def read(self) -> dict[str, float]:
        """Collective where it measures. The figures, over all ranks, of an applied attempt."""
        if not self._measuring:
            return {}
        device = self._optimizer.parts[0].tensor.device
        sums = torch.zeros(4, dtype=torch.float64, device=device)
        for part, before in zip(self._optimizer.parts, self._held, strict=False):
            sums[0] += (part.tensor != before).sum()
            sums[1] += before.numel()
        self._held = []
        error = self._wire.take_error()
        if error is not None:
            sums[2:] = error.to(device)
        dist.all_reduce(sums)
        changed, count, gap, reference = sums.tolist()
        found = {}
        if count:
            found["precision/changed_fraction"] = changed / count
        if reference:
            found["precision/wire_error"] = math.sqrt(gap / reference)
        return found
