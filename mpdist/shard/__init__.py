"""What replicates or shards the model: one small protocol, one module for each engine.

An engine turns a model on the meta device into one that computes in the policy's dtypes and whose FP32 masters
lie on the ranks as the engine says. The window, the verdict, the clip, the optimizer, the ledger and checkpoints
see masters and gradients as plain local tensors (`Part`) and so are the same for every engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn


@dataclass(frozen=True)
class Part:
    """What this rank holds of one parameter: rows [start, start + len(tensor)) of the first dimension.

    name: as in the plain model. tensor: local master (or frozen working copy), shape [rows, *shape[1:]].
    shape: of the full parameter. For a replicated parameter start is 0 and tensor is all of it.
    flat: the tensor is a run of elements instead, [n], and start counts elements of the flattened parameter.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: int
    trainable: bool
    flat: bool = False


# read(name, start, stop) -> rows of the parameter or persistent buffer, CPU, any floating dtype. Collective where the
# source is rank 0's, so all ranks ask for the same names in the same order (rows may differ).
Read = Callable[[str, int, int], torch.Tensor]


def read_flat(read: Read, part: Part) -> torch.Tensor:
    """The elements of a flat part, from the rows that hold them. Collective as `read` is."""
    row = math.prod(part.shape[1:])
    stop = part.start + part.tensor.numel()
    first = part.start // max(row, 1)
    rows = read(part.name, first, -(-stop // max(row, 1)) if part.tensor.numel() else first)
    return rows.reshape(-1)[part.start - first * row : stop - first * row]


def replace_parameters(
    model: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter], device: torch.device
) -> None:
    """Puts make(name, old) in the place of each parameter, one object for a tied one, and moves buffers to the device."""
    fresh: dict[int, nn.Parameter] = {}
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    for name, old in list(model.named_parameters()):
        fresh[id(old)] = make(name, old)
    for prefix, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                module._parameters[key] = fresh[id(param)]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffers[f"{prefix}.{key}" if prefix else key]


class Engine(Protocol):
    """parts: every parameter once, in the plain model's order. module: what runs forward."""

    module: nn.Module
    parts: list[Part]
    replicas: int  # how many ranks hold the same bits of each master

    def load(self, read: Read) -> None:
        """Collective. Fills masters, working copies and persistent buffers from the source."""

    def micro(self, first: bool, last: bool) -> None:
        """Called before each micro-batch of a window; says whether it is the window's first or last one."""

    def after_backward(self, last: bool) -> None:
        """Called after each backward; after the last one all gradients are summed over ranks (collective)."""

    def gradients(self) -> list[torch.Tensor]:
        """The summed gradient of each trainable part, in the order of `parts`, shaped like its tensor."""

    def clear(self) -> None:
        """Forgets all gradients of the window."""

    def poison(self) -> None:
        """Drill: this rank's next gradient gets +inf in one element, before any reduction."""

    def refresh(self) -> None:
        """After the optimizer moved the masters: brings the working copies up to date."""

    def leaves(self) -> dict[str, torch.Tensor | None]:
        """Trainable name -> the tensor that autograd sees in its place, None where there is none yet. After a forward."""
