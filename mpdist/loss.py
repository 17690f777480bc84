"""Cross-entropy of a causal LM without ever holding all logits in FP32.

Only positions that carry a label reach the head: the caller says which (`index`), so prompts, padding and filler rows
cost nothing here and cannot spread a NaN. The positions go through the head in chunks; each chunk's gradient is made at
once, while its logits are still there, so nothing is computed twice and no chunk outlives its turn.

Shapes: B rows, T positions, H hidden size, V vocabulary, N labelled positions of the micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _softmax_loss(logits: Tensor, targets: Tensor, factor: Tensor | float | None) -> tuple[Tensor, Tensor | None]:
    """Sum of token losses (scalar FP32) and, where `factor` is given, factor * d(sum)/d(logits).

    logits: [n, V] FP32, overwritten. targets: [n] int64.
    Loss of a token: log(sum(exp(logits))) - logits[target]; its gradient: softmax(logits) - onehot(target).
    """
    logits.sub_(logits.amax(dim=1, keepdim=True))
    picked = logits.gather(1, targets[:, None])
    logits.exp_()
    total = logits.sum(dim=1, keepdim=True)
    loss = (total.log() - picked).sum()
    if factor is None:
        return loss, None
    logits.mul_(factor / total)
    # Each row has one target: read, change, write back, since adding by index is not deterministic on every device.
    logits.scatter_(1, targets[:, None], logits.gather(1, targets[:, None]) - factor)
    return loss, logits


class _HeadLoss(torch.autograd.Function):
    """objective, loss = head(hidden) against targets, in chunks of `rows` positions.

    The gradients are made in forward for a d(objective) of 1, so the objective must enter backward's root as it is or
    in a plain sum; `factor` (loss scale / label tokens) is applied before they are rounded to the compute dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, factor: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        rows = min(rows, len(hidden))
        # A sum over several chunks is kept in FP32; a single chunk is what one matrix product would give.
        grad_weight, product = None, None
        if need_weight:
            whole = rows == len(hidden) or weight.dtype == torch.float32
            grad_weight = torch.zeros_like(weight, dtype=weight.dtype if whole else torch.float32)
            product = None if whole else torch.empty_like(weight)
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and need_bias else None
        wanted = factor if need_hidden or need_weight or need_bias else None
        # One buffer for all chunks: fresh memory of this size costs more than what is done to it.
        narrow = torch.empty(rows, len(weight), dtype=weight.dtype, device=weight.device)
        wide = narrow if narrow.dtype == torch.float32 else torch.empty_like(narrow, dtype=torch.float32)
        for done in range(0, len(hidden), rows or 1):
            part, target = hidden[done : done + rows], targets[done : done + rows]
            low, logits = narrow[: len(part)], wide[: len(part)]
            if bias is None:
                torch.mm(part, weight.t(), out=low)
            else:
                torch.addmm(bias, part, weight.t(), out=low)
            if logits is not low:
                logits.copy_(low)
            part_loss, grad = _softmax_loss(logits, target, wanted)
            loss += part_loss
            if grad is None:
                continue
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            if low is not grad:
                low.copy_(grad)
            if grad_hidden is not None:
                torch.mm(low, weight, out=grad_hidden[done : done + len(part)])
            if grad_weight is not None and product is None:
                grad_weight.addmm_(low.t(), part)
            elif grad_weight is not None:
                grad_weight += torch.mm(low.t(), part, out=product)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = weight.dtype, bias.dtype if bias is not None else None
        ctx.mark_non_differentiable(loss)
        return loss * factor, loss

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight_dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias_dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


class _LogitsLoss(torch.autograd.Function):
    """As `_HeadLoss`, for models that do something to their logits after the head: logits [N, V] in the compute dtype
    exist once, their FP32 image only a chunk at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, factor: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        loss = torch.zeros((), dtype=torch.float32, device=logits.device)
        needed = ctx.needs_input_grad[0]
        grad_logits = torch.empty_like(logits) if needed else None
        done = 0
        for part, target in zip(logits.split(rows), targets.split(rows), strict=True) if len(logits) else []:
            copy = part.to(torch.float32, copy=True)
            part_loss, grad = _softmax_loss(copy, target, factor if needed else None)
            loss += part_loss
            if grad_logits is not None and grad is not None:
                grad_logits[done : done + len(part)] = grad
            done += len(part)
        ctx.save_for_backward(grad_logits)
        ctx.mark_non_differentiable(loss)
        return loss * factor, loss

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0], None, None, None


def head_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, targets: Tensor, factor: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """(factor * sum of token losses, to call backward on; sum of token losses, detached), both FP32 scalars.

    hidden: [B, T, H]; weight: [V, H]; bias: [V] or None; index: [N] int64 into the B * T positions;
    targets: [N] int64; factor: FP32 scalar tensor; rows: positions a chunk.
    """
    flat = hidden.reshape(-1, hidden.shape[-1]).index_select(0, index)
    return _HeadLoss.apply(flat.to(weight.dtype), weight, bias, targets, factor, rows)


def logits_loss(logits: Tensor, index: Tensor, targets: Tensor, factor: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """As `head_loss`, from the model's own logits [B, T, V]."""
    flat = logits.reshape(-1, logits.shape[-1]).index_select(0, index)
    return _LogitsLoss.apply(flat, targets, factor, rows)
