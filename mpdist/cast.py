"""What a cast loses: how many elements become zero, how many become infinite. Counted on the device, without a wait."""

from __future__ import annotations

import torch

_PIECE = 2**18  # elements looked at together: what is made of them stays in a core's cache
_PIECE_CUDA = 2**24


def lost(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[elements that are not zero, of these zero in `dtype`, not finite in `dtype`], FP64, on the tensor's device.

    By the cast itself, so that rounding, ties and subnormals are the device's own.
    """
    total = torch.zeros(3, dtype=torch.int64, device=tensor.device)
    for piece in tensor.reshape(-1).split(_PIECE_CUDA if tensor.is_cuda else _PIECE):
        cast = piece.to(dtype)
        kept, left = torch.count_nonzero(piece), torch.count_nonzero(cast)
        # x - x is 0 where x is finite and NaN, which is not 0, where it is not.
        total += torch.stack([kept, kept - left, torch.count_nonzero(cast - cast)])
    return total.double()


def least(dtype: torch.dtype) -> float:
    """The smallest subnormal number: half of it is the largest magnitude that a cast turns into zero."""
    info = torch.finfo(dtype)
    return float(info.smallest_normal * info.eps)
