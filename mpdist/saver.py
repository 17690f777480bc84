"""Saves that go on while training does: copied first, written by a thread, at most one in flight.

A save stalls training for the copy to host memory; files, digests and the rename happen in a thread on a process group
of its own, since collectives of two threads on one group would mix. An error there is the same on all ranks; the loop
learns of it at the next step boundary through the window's control exchange. The host copies are kept and used again,
so that the second save allocates nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpdist.checkpoint import Piece, Snapshot, own_share, rng_states, write
from mpdist.dist import set_timeout
from mpdist.errors import CheckpointError, MpdistError
from mpdist.optim import Optimizer
from mpdist.shard import Engine

_PATIENCE = timedelta(minutes=30)  # ranks may write at different speeds, and nothing waits for a save but the next one


class Saver:
    """folder: the run's checkpoints. background: write in a thread. hf: see checkpoint.write.

    published(path, bytes, figures): called on rank 0, in whatever thread wrote, once the checkpoint is there; figures
    are seconds. written(step): called on rank 0 when all files are on disk. What they raise fails the save.
    """

    def __init__(
        self,
        folder: Path,
        *,
        background: bool,
        hf: Path,
        published: Callable[[Path, int, dict[str, float]], None],
        written: Callable[[int], None],
    ) -> None:
        self.folder, self.background, self.hf = folder, background, hf
        self._published, self._written = published, written
        # Control messages are small host objects, also where tensors live on a GPU.
        self._group = dist.new_group(backend="gloo")
        set_timeout(self._group, least=_PATIENCE)
        self._copies: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._usual: list[float] = []
        self.slowdown_s = 0.0

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed on this rank, as it then will have on every other."""
        return self._error is not None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(
        self,
        engine: Engine,
        optimizer: Optimizer,
        module: nn.Module,
        state: dict[str, Any],
        fault: Callable[[], None],
        eval_loss: float | None,
    ) -> None:
        """Collective. Takes a snapshot of this moment and begins to write it; waits for the save before, if any.

        Raises CheckpointError, alike on all ranks, for a save before that failed, or for this one if it is written here.
        """
        self.wait()
        begin = time.monotonic()
        live = own_share(engine, optimizer, module)
        held = {name: self._copy(name, piece) for name, piece in live.items()} if self.background else live
        snapshot = Snapshot(held, rng_states(), state, eval_loss)
        self.slowdown_s = 0.0
        stall = time.monotonic() - begin
        if not self.background:
            self._write(snapshot, fault, begin, None)
            if self._error is not None:
                self.wait()
            return
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, fault, begin, stall), name="save", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Collective. Waits for the save in flight; raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, MpdistError):
            raise error
        if error is not None:
            raise CheckpointError(f"a save failed: {type(error).__name__}: {error}", "", "launch again") from error

    def settled(self) -> bool:
        """Whether there was a save in flight; it has ended now, and what it did comes out where all ranks wait for it."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return False
        thread.join()
        return True

    def step_took(self, seconds: float) -> None:
        """How long a window took: what the thread takes from training is counted against the windows before."""
        if self.busy and self._usual:
            usual = sorted(self._usual)[len(self._usual) // 2]
            self.slowdown_s += max(0.0, seconds - usual)
        elif not self.busy:
            self._usual = [*self._usual[-19:], seconds]

    def _copy(self, name: str, piece: Piece) -> Piece:
        plain = piece.plain()
        if name not in self._copies:
            self._copies[name] = torch.empty(plain.shape, dtype=plain.dtype, pin_memory=plain.is_cuda)
        return piece.like(self._copies[name].copy_(plain))

    def _write(self, snapshot: Snapshot, fault: Callable[[], None], begin: float, stall: float | None) -> None:
        def published(path: Path, size: int) -> None:
            total = time.monotonic() - begin
            stalled = total if stall is None else stall
            figures = {"stall_s": stalled, "slowdown_s": self.slowdown_s, "write_s": total - (stall or 0.0)}
            self._published(path, size, figures)

        try:
            write(self.folder, snapshot, hf=self.hf, group=self._group, fault=fault,
                  written=lambda: self._written(snapshot.state["step"]), published=published)  # fmt: skip
        except BaseException as error:  # handed to the loop, which raises it where all ranks can
            self._error = error
