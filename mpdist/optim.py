"""AdamW on the local FP32 masters, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpdist.shard import Part


class Optimizer:
    """torch.optim.AdamW over local tensors, engine-independent. Moments are FP32 where the masters are.

    decay: `matrices` decays parameters of two or more dimensions (embeddings too), `all` every one.
    """

    def __init__(
        self, parts: list[Part], *, betas: tuple[float, float], eps: float, weight_decay: float, decay: str, fused: bool
    ) -> None:
        self.parts = [part for part in parts if part.trainable]
        self.params = [torch.nn.Parameter(part.tensor) for part in self.parts]  # same storage as the master
        decayed: list[Tensor] = []
        plain: list[Tensor] = []
        for part, param in zip(self.parts, self.params, strict=True):
            (decayed if decay == "all" or len(part.shape) >= 2 else plain).append(param)
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=eps, fused=fused, foreach=None if fused else False
        )  # fmt: skip

    def step(self, gradients: list[Tensor], lr: float) -> None:
        """gradients: unscaled and clipped, in the order of `parts`; cast where masters are 16 bit."""
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad = gradient if gradient.dtype == param.dtype else gradient.to(param.dtype)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        for param in self.params:
            param.grad = None

    def moments(self, index: int) -> dict[str, Tensor]:
        """exp_avg, exp_avg_sq and step (FP32 scalar) of `parts[index]`; zeros before the first step."""
        param = self.params[index]
        state = self.adam.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=self._step_device(param))
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state

    def allocate(self) -> None:
        """Makes the moments of every part now: what does not fit fails before the first window, not at its end."""
        for index in range(len(self.params)):
            self.moments(index)

    def _step_device(self, param: Tensor) -> torch.device:
        return param.device if self.adam.defaults["fused"] else torch.device("cpu")


def schedule(kind: str, peak: float, warmup: int, horizon: int | None) -> Callable[[int], float]:
    """lr(step) of the step that is about to be made, counted from 1.

    Linear from peak / warmup to peak over `warmup` steps; then constant, or falling over the rest of the horizon,
    linearly or along half a cosine, so that a step behind the horizon would have 0.
    """

    def lr(step: int) -> float:
        if step <= warmup:
            return peak * step / warmup
        if kind == "constant" or horizon is None:
            return peak
        share = min((step - 1 - warmup) / max(horizon - warmup, 1), 1.0)
        return peak * (1.0 - share) if kind == "linear" else peak * 0.5 * (1.0 + math.cos(math.pi * share))

    return lr


def square_sum(gradients: list[Tensor], scales: Tensor | None = None) -> Tensor:
    """Sum of squares over all elements, FP64 scalar. Norms of single tensors are FP32 (or wider) whatever their dtype.

    scales: [gradients] FP32, what each is divided by before.
    """
    norms = torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32)).double()
    if scales is not None:
        norms = norms / scales.to(norms.device)
    return norms.square_().sum()
