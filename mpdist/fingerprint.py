"""What a run begins with, as two digests that do not depend on how it is cut over ranks: its masters, its samples' order.

A comparison holds runs against each other by them: the same name of a model, or the same seed, may give other weights
under another version, and the same files may have other contents.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from mpdist.feed import Feed
from mpdist.shard import Engine

_CHUNK = 1 << 18  # elements at once: what is made of them on the way is 4 MiB
_ROWS = 4096  # of the order's beginning


def facts(engine: Engine, feed: Feed) -> dict[str, Any]:
    """Collective. `initial_weights` and `order`, SHA-256 (hex), for a session that begins a run."""
    return {"initial_weights": weights(engine), "order": order(feed)}


def weights(engine: Engine) -> str:
    """Collective. Of the bits of every trainable master, as FP32.

    The sums of the bits, read as whole numbers, and of their squares, modulo 2^64: the same whichever rank holds which
    elements, and in whichever order they are added.
    """
    parts = [part for part in engine.parts if part.trainable]
    device = parts[0].tensor.device if parts else torch.device("cpu")
    sums = torch.zeros(len(parts), 2, dtype=torch.int64, device=device)
    for i, part in enumerate(parts):
        for piece in part.tensor.detach().reshape(-1).split(_CHUNK):
            bits = piece.float().view(torch.int32).long()
            sums[i, 0] += bits.sum()
            sums[i, 1] += (bits * bits).sum()  # wraps, as it should
    own = {part.name: [value % 2**64 for value in values] for part, values in zip(parts, sums.tolist(), strict=True)}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    digest = hashlib.sha256()
    for name in sorted({name for rank in everywhere for name in rank}):
        # Ranks that hold the same bits say the same, so the sum over all of them is a whole multiple.
        held = [rank[name] for rank in everywhere if name in rank]
        total = [sum(values) // engine.replicas % 2**64 for values in zip(*held, strict=True)]
        digest.update(repr((name, total)).encode())
    return digest.hexdigest()


def order(feed: Feed) -> str:
    """Of the rows' contents and of the numbers of those that the first windows take, in order."""
    digest = hashlib.sha256(feed.rows.digest.encode())
    windows = max(1, min(feed.order.windows_per_epoch, _ROWS // feed.order.window_rows))
    for number in range(windows):
        digest.update(feed.order.window(number).tobytes() + b"|")
    return digest.hexdigest()
