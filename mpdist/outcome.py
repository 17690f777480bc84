"""What one attempt at a window came to, and what a run has counted."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mpdist.precision import Decision


@dataclass
class Progressed:
    """Counters of the run, all ranks alike. window: the global window to attempt next, from 0."""

    window: int = 0
    label_tokens: int = 0
    tokens: int = 0
    slots: int = 0
    saves: int = 0
    fired: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """One attempt. loss: mean over the window's label tokens. stop: whether any rank was asked to stop."""

    decision: Decision
    loss: float
    auxiliary: float
    stop: bool
    seconds: float  # rank 0's time inside windows
    own_loss: torch.Tensor | None = None  # this rank's sum of token losses
    save_failed: bool = False  # whether the save in flight has failed on any rank
