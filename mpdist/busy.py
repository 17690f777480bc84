"""How busy this rank's device is, read in passing when a step is logged: it is never waited for."""

from __future__ import annotations

import time

import torch


class Busy:
    """Of a GPU, what its driver says of its last sampling period (a second or less; of the whole GPU, others' work too). Of a
    CPU, this process's processor time over the time that its threads had since the last reading, from 0 to about 1."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._dead = device.type not in ("cuda", "cpu")
        self._last = time.process_time(), time.monotonic()

    def read(self) -> float | None:
        """The share; None where it cannot be read, as without the driver's Python package (nvidia-ml-py, or amdsmi)."""
        if self._dead:
            return None
        if self._device.type == "cuda":
            try:
                return torch.cuda.utilization(self._device) / 100
            except Exception:  # the packages' own classes, which need not be installed to be named here
                self._dead = True
                return None
        (spent, then), now = self._last, (time.process_time(), time.monotonic())
        self._last = now
        wall = (now[1] - then) * torch.get_num_threads()
        return (now[0] - spent) / wall if wall > 0 else None


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given: what is timed up to here is then done, and not only asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
