"""The links between ranks, tried: whether values arrive as they were sent, how fast, and whose clock is off.

All of it goes over collectives of the process group that the run itself uses, so that what is tried is what will be
used: the same backend, interfaces and dtypes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mpdist.dist import set_timeout

_SUMMED = 1031  # elements; odd, so that no kernel's vector width divides it
_GATHERED = 37
_KINDS = 64
_ROUNDS = 6
_PIECE = {"cpu": 2**24, "cuda": 2**28}  # bytes of a tensor whose all-reduce is timed


# -- values ----------------------------------------------------------------------------------------------------------


def summed_right(dtype: torch.dtype, device: torch.device) -> str | None:
    """Collective. All-reduces numbers whose sum is exact in every dtype and order; what came out wrong, or None.

    Raises what the backend raises for a dtype that it does not have, on all ranks alike and before anything is sent.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    place = torch.arange(_SUMMED, device=device)
    weight = 1 + place % 3
    value = torch.where(place % _KINDS == rank % _KINDS, weight, torch.zeros_like(weight)).to(dtype)
    dist.all_reduce(value)
    # Of the ranks below `ranks`, those that have this place's number left when divided by _KINDS have added to it.
    adding = (ranks - 1 - place % _KINDS).div(_KINDS, rounding_mode="floor") + 1
    return _difference(value, (adding * weight).to(dtype))


def gathered_right(dtype: torch.dtype, device: torch.device) -> str | None:
    """Collective. All-gathers numbers that tell the ranks apart; what came out wrong, or None. Raises as `summed_right`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    place = torch.arange(_GATHERED, device=device)
    senders = torch.arange(ranks, device=device).unsqueeze(1)
    # The sender's number in bits, and even numbers that differ between neighbours, so that a shifted row shows.
    wanted = (1 + ((senders >> place % 16) & 1) + 2 * (place % 4)).to(dtype)
    parts = [torch.zeros(_GATHERED, dtype=dtype, device=device) for _ in range(ranks)]
    dist.all_gather(parts, wanted[rank].clone())
    return _difference(torch.stack(parts), wanted)


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    if torch.equal(found, wanted):
        return None
    odd = tuple((found != wanted).nonzero()[0].tolist())
    where = f"element {odd[-1]}" + (f" from rank {odd[0]}" if len(odd) > 1 else "")
    return f"{where} is {found[odd].item():g} where it has to be {wanted[odd].item():g}"


# -- clocks ----------------------------------------------------------------------------------------------------------


def clock_offsets(device: torch.device, now: Callable[[], float] = time.time) -> list[tuple[float, float]]:
    """Collective. For each rank, bounds in seconds of how far its clock is ahead of rank 0's (below 0: behind).

    As NTP does it, over a sum: nobody leaves an all-reduce before all have entered it. So rank r's time of entering, on
    its own clock, lies before rank 0's time of leaving, and the other way round; the closest of some rounds counts.
    """
    ranks = dist.get_world_size()
    own = torch.zeros(_ROUNDS, 2, dtype=torch.float64)
    token = torch.zeros(1, device=device)
    for round_ in range(_ROUNDS + 1):  # the first opens the connections
        entered = now()
        dist.all_reduce(token)
        token.item()
        left = now()
        if round_:
            own[round_ - 1, 0], own[round_ - 1, 1] = entered, left
    sent = own.to(device)
    parts = [torch.zeros_like(sent) for _ in range(ranks)]
    dist.all_gather(parts, sent)
    first = parts[0].cpu()
    bounds = []
    for part in (part.cpu() for part in parts):
        low = (part[:, 0] - first[:, 1]).max().item()
        high = (part[:, 1] - first[:, 0]).min().item()
        bounds.append((low, high))
    return bounds


# -- speed -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """An all-reduce's bus bandwidth, as nccl-tests defines it: 2 (n - 1) / n x bytes / seconds, of one rank.

    link: `within a node` or `between nodes`. node: what all ranks of a node reached together, where they sent at once.
    """

    link: str
    ranks: int
    bytes: int
    seconds: float
    at_once: int

    @property
    def bandwidth(self) -> float:
        """Bytes/s."""
        return 2 * (self.ranks - 1) / self.ranks * self.bytes / self.seconds

    @property
    def node(self) -> float:
        """Bytes/s of all groups that sent at once."""
        return self.at_once * self.bandwidth


def bandwidths(
    local_ranks: int, device: torch.device, dtype: torch.dtype = torch.float32, seconds: float = 0.5
) -> list[Speed]:
    """Collective. Times all-reduces inside each node, then between nodes, all local ranks at once; the slowest rank counts.

    local_ranks: of each node, whose ranks follow each other. seconds: about how long each class of link is timed.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    nodes = ranks // local_ranks
    inside = [[node * local_ranks + local for local in range(local_ranks)] for node in range(nodes)]
    across = [[node * local_ranks + local for node in range(nodes)] for local in range(local_ranks)]
    found = []
    for link, groups in (("within a node", inside), ("between nodes", across)):
        if len(groups[0]) < 2:
            continue
        mine = next(own for own in groups if rank in own)
        group = dist.new_group(mine, use_local_synchronization=True)
        set_timeout(group)
        spent = _timed(group, device, dtype, seconds)
        dist.destroy_process_group(group)
        at_once = local_ranks if link == "between nodes" else 1
        found.append(Speed(link, len(mine), _PIECE[device.type], spent, at_once))
    return found


def _timed(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Collective over the world. Seconds of one all-reduce over the group: the median of the slowest rank's."""
    tensor = torch.zeros(_PIECE[device.type] // dtype.itemsize, dtype=dtype, device=device)

    def once() -> float:
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    count = torch.tensor([max(3.0, min(50.0, seconds / max(once(), 1e-6)))], dtype=torch.float64, device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MIN)  # all ranks do it as often, or they wait for each other for ever
    times = sorted(once() for _ in range(int(count.item())))
    slowest = torch.tensor([times[len(times) // 2]], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.item())
