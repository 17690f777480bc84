"""The loss on held-out rows: the same whatever the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from mpdist.assemble import Parts


def mean_loss(parts: Parts, device: torch.device, doing: Callable[[], None]) -> tuple[float, int]:
    """Collective. Total loss over total label tokens of the first eval rows, and that number of label tokens.

    The loss is NaN where there is none. doing: called before each batch. The module is in training mode afterwards.
    """
    feed = parts.eval_feed
    assert feed is not None
    parts.module.eval()
    one = torch.ones((), dtype=torch.float32, device=device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    labels, step_rows = 0, feed.micro * feed.ranks
    with torch.no_grad():
        for begin in range(0, parts.eval_rows, step_rows):
            doing()
            batch = feed.make(feed.order.window(begin // step_rows)[: parts.eval_rows - begin])
            micro = batch.micros[0]
            total += parts.module(input_ids=micro.input_ids, position_ids=micro.position_ids, index=micro.index,
                                  targets=micro.targets, factor=one)[1]  # fmt: skip
            labels += batch.labels
    dist.all_reduce(total)
    loss = total.item() / labels if labels else math.nan
    parts.module.train()
    return loss, labels
