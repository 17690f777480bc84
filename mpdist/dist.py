"""The process group: one start with a bounded wait that names who is missing, and the groups of the mesh.

Ranks are laid out as ``replica * shard_size + shard``, so a shard group is a run of neighbouring ranks and, as
long as it is no larger than a node, lies inside one. `Mesh` holds the groups that gradients travel over; where
a group spans several nodes it is split in two levels (inside a node, between nodes).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mpdist.errors import MachineError, MpdistError, UsageError
from mpdist.world import World


class _MissingRank(MachineError):
    lost_peer = True  # the rank to blame is another one


_T = TypeVar("_T")
_HELLO, _ROUND, _AGREED = "mpdist/hello/{}", "mpdist/round", "mpdist/agreed/{}"


def pick_device(world: World, wish: str) -> torch.device:
    """The device of this rank. ``wish`` is auto, cpu or cuda; auto takes a GPU where there is one."""
    if wish == "cpu" or (wish == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise MachineError("launch.device = cuda, but this machine shows no CUDA device",
                           "torch.cuda.device_count() is 0", "set launch.device: cpu, or check the driver")  # fmt: skip
    # Where Slurm shows each of its tasks only its own device, that device is number 0 whatever the local rank.
    index = 0 if count == 1 and world.source == "srun" else world.local_rank
    if index >= count:
        raise MachineError(f"local rank {world.local_rank} has no device: this node shows {count}",
                           "there are more ranks on the node than devices", "lower launch.ranks")  # fmt: skip
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def start(world: World, device: torch.device, timeout: timedelta) -> None:
    """Collective. Joins the process group; a rank that does not come within ``timeout`` is named (MachineError)."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if world.ranks == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    store = _store(world, timeout)
    begin, seats = _gather(store, world, _seat_of(device), timeout)
    _check_devices(seats)
    dist.init_process_group(
        backend, store=dist.PrefixStore(begin, store), rank=world.rank, world_size=world.ranks, timeout=timeout
    )


def _gather(store: dist.Store, world: World, seat: str, timeout: timedelta) -> tuple[str, list[str]]:
    """Collective. A name that this start of the ranks has for itself, and the seats of all of them, by rank.

    A torchrun that restarts its ranks may keep the store, with all that the dead ones have written, addresses among it,
    and its count of restarts differs between nodes. So each rank says hello with a word of its own, rank 0 proposes the
    words of all, again whenever one of them changes, and a rank agrees to a proposal that holds its own. Dead ones do not.
    """
    own = secrets.token_hex(8)
    store.set(_HELLO.format(world.rank), f"{own} {seat}")
    hellos = [_HELLO.format(rank) for rank in range(world.ranks)]
    deadline = time.monotonic() + timeout.total_seconds()
    proposed, agreed = "", ""
    while True:
        if world.rank == 0 and store.check(hellos):
            words = " ".join(hello.decode().partition(" ")[0] for hello in store.multi_get(hellos))
            if words != proposed:
                store.set(_ROUND, words)
                proposed = words
        elif world.rank and store.check([_ROUND]):
            proposed = store.get(_ROUND).decode()
        if proposed != agreed and proposed.split()[world.rank : world.rank + 1] == [own]:
            agreed = proposed
            store.add(_agreed(agreed), 1)
        if agreed and store.add(_agreed(agreed), 0) == world.ranks:
            return _agreed(agreed), [hello.decode().partition(" ")[2] for hello in store.multi_get(hellos)]
        if time.monotonic() > deadline:
            missing = [rank for rank, hello in enumerate(hellos) if not store.check([hello])] or [0]
            names = ", ".join(str(rank) for rank in missing)
            raise _MissingRank(f"rank {names} missing: {len(missing)} of {world.ranks} ranks did not start",
                               f"launch.timeout = {timeout.total_seconds():g} s is over",
                               "look at the log of the missing rank's node, or raise launch.timeout")  # fmt: skip
        time.sleep(0.02)


def _agreed(words: str) -> str:
    return _AGREED.format(hashlib.sha256(words.encode()).hexdigest()[:32])


def _seat_of(device: torch.device) -> str:
    """What a rank computes on, so that no two ranks of one host say the same GPU: its kind, host and place on the bus."""
    host = platform.node() or "?"
    if device.type != "cuda":
        return f"{device.type} {host}"
    about = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    bus = ":".join(f"{getattr(about, name):x}" for name in names if hasattr(about, name))
    return f"cuda {host} {bus or device.index}"


def _check_devices(seats: Sequence[str]) -> None:
    """Raises MachineError, alike on all ranks, where they could not form a group: it would hang, or fail in NCCL's words.

    seats: as `_seat_of` has them, by rank.
    """
    kinds = [seat.partition(" ")[0] for seat in seats]
    if len(set(kinds)) > 1:
        odd = next(rank for rank, kind in enumerate(kinds) if kind != kinds[0])
        raise MachineError(f"rank 0 on {seats[0].split()[1]} computes on {kinds[0]}, rank {odd} on {seats[odd].split()[1]} on {kinds[odd]}",
                           "all ranks need the same kind of device; where launch.device is auto, one without a visible GPU takes the CPU",
                           "check the driver and CUDA_VISIBLE_DEVICES of the node without, or set launch.device")  # fmt: skip
    for rank, seat in enumerate(seats):
        first = seats.index(seat)
        if kinds[rank] == "cuda" and first != rank:
            raise MachineError(f"ranks {first} and {rank} on {seat.split()[1]} have the same GPU",
                               "each rank needs a device of its own",
                               "start no more ranks than the node shows devices, and let the launcher set LOCAL_RANK")  # fmt: skip


def _store(world: World, timeout: timedelta) -> dist.Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted_elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return dist.TCPStore(
            address, port, None, world.rank == 0 and not hosted_elsewhere, timeout=timeout, wait_for_workers=False
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise MachineError(f"rank {world.rank} cannot reach the meeting point {address}:{port}",
                           str(error).splitlines()[0], "check MASTER_ADDR, MASTER_PORT and that rank 0 has started") from error  # fmt: skip


def stop() -> None:
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def on_first(act: Callable[[], _T]) -> _T:
    """Collective. Rank 0 acts; all ranks get its result or raise its error."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = act()
        except MpdistError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        outcome[1].shared = dist.get_rank() != 0
        raise outcome[1]
    return outcome[0]


def same_everywhere(values: Mapping[str, Any], what: str) -> None:
    """Collective. Raises UsageError, alike on all ranks, naming what differs from rank 0's values."""
    first: list[Any] = [dict(values)]
    dist.broadcast_object_list(first, src=0)
    keys = sorted(set(first[0]) | set(values))
    mine = [(key, first[0].get(key), values.get(key)) for key in keys if first[0].get(key) != values.get(key)]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    for rank, found in enumerate(ranks):
        if found:
            listed = "; ".join(f"{key} = {there} on rank 0 and {here} on rank {rank}" for key, there, here in found[:5])
            error = UsageError(f"the ranks were started with different {what}: {listed}",
                               "each would train its own way, and their sum would be neither",
                               "start all nodes with the same configuration and installation")  # fmt: skip
            error.shared = dist.get_rank() != 0
            raise error


def together(act: Callable[[], _T]) -> list[_T]:
    """Collective. Every rank acts; all get all results, or raise the error of the lowest rank that failed."""
    outcome: tuple[Any, MpdistError | None] = None, None
    try:
        outcome = act(), None
    except MpdistError as error:
        outcome = None, error
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, outcome)
    for rank, (_, failure) in enumerate(results):
        if failure is not None:
            failure.shared = dist.get_rank() != rank
            raise failure
    return [value for value, _ in results]


@dataclass(frozen=True)
class Level:
    """A group over which gradients are added, and whether it crosses nodes."""

    group: dist.ProcessGroup
    size: int
    crosses_nodes: bool


@dataclass(frozen=True)
class Mesh:
    """This rank's place: `shard_mesh` for the sharding engine, and the levels of each reduction.

    scatter: the shard group, as one level or as (inside a node, between nodes); empty when nothing is sharded.
    replicas: the ranks that hold the same shard, likewise.
    """

    shard_mesh: DeviceMesh | None
    scatter: tuple[Level, ...]
    replicas: tuple[Level, ...]
    shard_size: int
    replica_size: int
    shard_index: int


def build_mesh(device_type: str, shard_size: int, local_size: int, with_device_mesh: bool = True) -> Mesh:
    """Collective. Cuts the world of W ranks into W / shard_size replicas of shard_size ranks each.

    local_size: ranks of one node; groups that span nodes get two levels.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    replica_size = world // shard_size
    first = rank - rank % shard_size
    scatter = _levels(list(range(first, first + shard_size)), local_size)
    replicas = _levels(list(range(rank % shard_size, world, shard_size)), local_size)
    mesh = None
    if with_device_mesh:
        names = ("replica", "shard")
        mesh = init_device_mesh(device_type, (replica_size, shard_size), mesh_dim_names=names)["shard"]
        set_timeout(mesh.get_group())
    return Mesh(mesh, scatter, replicas, shard_size, replica_size, rank % shard_size)


def _levels(ranks: list[int], local_size: int) -> tuple[Level, ...]:
    """Collective. The levels of the group `ranks` as seen by this rank; all ranks must call in the same order."""
    nodes = sorted({rank // local_size for rank in ranks})
    per_node = [[rank for rank in ranks if rank // local_size == node] for node in nodes]
    if len(nodes) > 1 and len(per_node[0]) > 1:
        inner, outer = per_node, [list(column) for column in zip(*per_node, strict=True)]
    else:
        inner, outer = ([ranks], []) if len(nodes) == 1 else ([], [ranks])
    levels = []
    for groups, crosses in ((inner, False), (outer, True)):
        mine = _my_group(groups)
        if mine is not None and len(mine[1]) > 1:
            levels.append(Level(mine[0], len(mine[1]), crosses))
    return tuple(levels)


def _my_group(groups: list[list[int]]) -> tuple[dist.ProcessGroup, list[int]] | None:
    """Collective. Of the groups known to this rank, the one it is in; built without the other ranks' help."""
    rank = dist.get_rank()
    for ranks in groups:
        if rank in ranks and len(ranks) > 1:
            # Only members create the group, so ranks in different shard groups need not know each other's lists.
            group = dist.new_group(ranks, use_local_synchronization=True)
            set_timeout(group)
            return group, ranks
    return None


def set_timeout(group: dist.ProcessGroup, least: timedelta = timedelta(0)) -> None:
    """Gives a group the timeout of the whole process group, or `least` where that is longer.

    torch gives each new group its own default, 10 or 30 minutes, whatever the process group was started with.
    """
    world = dist.group.WORLD
    assert world is not None
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    options = world._get_backend(device).options
    if options is not None:  # a simulated group waits for nobody
        dist.distributed_c10d._set_pg_timeout(max(options._timeout, least), group)
