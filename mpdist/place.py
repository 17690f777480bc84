"""Where a run's ranks will be, decided without torch: ranks, devices, cores, threads, address and port of this node."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpdist import slurm
from mpdist.errors import ConfigError, MachineError, MpdistError, UsageError

if TYPE_CHECKING:
    from mpdist.config import Resolved

PORT_OF_SEVERAL_NODES = 29500


@dataclass(frozen=True)
class Place:
    """Where the ranks run. `ranks` are those of this node; `cuda` its visible devices; `first_host` as Slurm has it.

    task: this launcher as a task of a Slurm step, which then says what the nodes are. unfound: why its first host
    cannot be found from here, which a dry run tells and `check_machine` raises.
    """

    ranks: int
    nodes: int
    node_rank: int
    address: str | None
    port: int  # 0: any free one
    cuda: int
    device: str  # cpu or cuda, as far as it is known here
    cores: int
    threads: int
    threads_why: str
    first_host: str | None
    task: slurm.Task | None = None
    unfound: MachineError | None = None


def find_place(
    resolved: Resolved, ranks: int | None, nodes: int | None, node_rank: int | None, env: Mapping[str, str]
) -> Place:
    """Ranks, threads, address and port as they will be used. Raises ConfigError with all that cannot be."""
    ask, origin = resolved.config.launch, origin_of(resolved)
    problems: list[MpdistError] = []
    cuda = 0 if ask.device == "cpu" else visible_devices(env)
    task = slurm.task(env)
    nodes, node_rank = _nodes(resolved, task, nodes, node_rank, problems)
    asked = f"--ranks {ranks}" if ranks else f"launch.ranks = {ask.ranks} ({origin('launch.ranks')})"
    ranks = ranks or (ask.ranks if isinstance(ask.ranks, int) else max(cuda, 1))
    if cuda and ranks > cuda:
        shown = f"CUDA_VISIBLE_DEVICES={env['CUDA_VISIBLE_DEVICES']}" if "CUDA_VISIBLE_DEVICES" in env else "this node"
        why = f"{shown} has {cuda} CUDA device{'s' * (cuda != 1)}, and each rank needs its own"
        problems.append(UsageError(asked, why, f"take at most {cuda}, or launch.device=cpu"))
    if node_rank is None:
        node_rank = int(env.get("SLURM_NODEID") or 0) if nodes > 1 else 0
    if node_rank >= nodes:
        numbers = f"0 to {nodes - 1}" if nodes > 1 else "0"
        why = f"with {nodes} node{'s' * (nodes != 1)} it has to be {numbers}"
        problems.append(
            UsageError(f"--node-rank {node_rank}", why, f"give {numbers}, or set --nodes to what there are")
        )
    first = None
    if (
        listed := (task and env.get("SLURM_STEP_NODELIST"))
        or env.get("SLURM_JOB_NODELIST")
        or env.get("SLURM_NODELIST")
    ):
        first = first_host(listed)
    address = ask.address or (first if nodes > 1 else None)
    unfound = None
    if task and nodes > 1 and first and not ask.address:
        try:
            address = slurm.address(first)
        except MachineError as error:
            unfound = error
    if nodes > 1 and address is None:
        why = f"{nodes} nodes have to find each other"
        problems.append(UsageError("launch.address is not set", why, "set it to the first node's host name or address"))
    if ask.address and first and not slurm.same_host(ask.address, first):
        why = f"rank 0 runs on the first node of the job, {first} (of {listed}); elsewhere nobody would answer"
        what = f"launch.address = {ask.address} ({origin('launch.address')})"
        problems.append(UsageError(what, why, f"set launch.address={first}, or leave it out"))
    if problems:
        raise ConfigError(problems)
    several = next(slurm.ports(task)) if task else PORT_OF_SEVERAL_NODES
    port = ask.port if isinstance(ask.port, int) else (several if nodes > 1 else 0)
    cores = granted_cores(env)
    threads, why = threads_for(ranks, cores, env)
    device = "cuda" if cuda or ask.device == "cuda" else "cpu"
    return Place(ranks, nodes, node_rank, address, port, cuda, device, cores, threads, why, first, task, unfound)


def _nodes(
    resolved: Resolved, task: slurm.Task | None, nodes: int | None, node_rank: int | None, problems: list[MpdistError]
) -> tuple[int, int | None]:
    """The nodes, and this one's number: in a step of Slurm's, its own, which nothing else may contradict."""
    if task is None:
        return nodes or resolved.config.launch.nodes, node_rank
    origin = resolved.origins.get("launch.nodes", "default")
    asked = f"--nodes {nodes}" if nodes else f"launch.nodes = {resolved.config.launch.nodes} ({origin})"
    wish = nodes or resolved.config.launch.nodes
    if wish != task.nodes and (nodes or wish > 1):  # 1 is the default, which a frozen configuration writes out
        why = f"this step of job {task.job} has SLURM_STEP_NUM_NODES = {task.nodes}"
        do = f"give the job as many (sbatch --nodes), or set launch.nodes={task.nodes}"
        problems.append(UsageError(asked, why, do))
    if node_rank not in (None, task.node):
        why = f"Slurm has started it on the node with SLURM_NODEID = {task.node}"
        problems.append(UsageError(f"--node-rank {node_rank}", why, "leave it out"))
    if task.beside > 1:
        why = f"{task.beside} tasks of job {task.job} run on this node, and one `mpdist launch` starts all ranks of a node"
        do = "start it with srun --ntasks-per-node=1; or let srun start each rank: srun python -m mpdist CONFIG"
        problems.append(UsageError(f"SLURM_STEP_NUM_TASKS = {task.tasks} on {task.nodes} nodes", why, do))
    return task.nodes, task.node


def origin_of(resolved: Resolved) -> Callable[[str], str]:
    """Where a key's value came from, by its dotted name."""
    return lambda name: resolved.origins.get(name, "config")


def visible_devices(env: Mapping[str, str]) -> int:
    """CUDA devices that a process started with `env` will see, counted as the driver does, without loading it."""
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        nodes = [p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()]
        return len(nodes) or len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    count = 0
    for entry in listed.split(","):  # the driver stops at the first entry that names no device
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", entry.strip()):
            break
        count += 1
    return count


def device_memory() -> int | None:
    """Bytes of this node's smallest GPU, from nvidia-smi; None if that cannot be asked."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return min((int(line) for line in answer.split()), default=0) * 2**20 or None
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def host_memory() -> int | None:
    """Bytes of this host's memory, or of the control group's share of it; None if the system does not say."""
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    try:
        return min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such group, or `max`
        return found


def granted_cores(env: Mapping[str, str]) -> int:
    """Cores that this process may use: its affinity, or Slurm's cpus per task where that is less.

    A task that has its node for itself has all of the job's CPUs there, whatever a task of another step would have.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    task = slurm.task(env)
    if task is not None and task.beside == 1 and task.cpus:
        return min(cores, task.cpus)
    share = env.get("SLURM_CPUS_PER_TASK", "")
    return min(cores, int(share)) if share.isdecimal() and int(share) else cores


def threads_for(ranks: int, cores: int, env: Mapping[str, str]) -> tuple[int, str]:
    """OMP_NUM_THREADS of each rank, and why: the user's value, else the granted cores shared out."""
    given = env.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given):
        return int(given), "as it was set"
    return max(1, cores // ranks), f"{cores} core{'s' * (cores != 1)} for {ranks} rank{'s' * (ranks != 1)}"


def first_host(nodelist: str) -> str:
    """The first host of a list as Slurm writes it: 'n[08-10,12],m1' -> 'n08'."""
    return next(iter(slurm.hosts(nodelist)), "")


def with_free_port(place: Place) -> Place:
    """In a step of Slurm's: with the first of its ports that is free just now, for other jobs may be on this node."""
    if place.task is None or place.port not in set(slurm.ports(place.task)):
        return place
    return replace(place, port=slurm.free_port(place.task))


def check_machine(resolved: Resolved, place: Place) -> None:
    """Raises MachineError where this node lacks the devices or the port that are asked for, or cannot find the first."""
    if place.unfound:
        raise place.unfound
    ask, origin = resolved.config.launch, origin_of(resolved)
    if ask.device == "cuda" and not place.cuda:
        raise MachineError(
            f"launch.device = cuda ({origin('launch.device')})",
            "no CUDA device is visible on this node",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, or set launch.device=cpu",
        )
    chosen_later = place.task is not None and not isinstance(
        ask.port, int
    )  # from the job's ports, when all else is ready
    if place.port and place.node_rank == 0 and not chosen_later:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", place.port))
            except OSError as error:
                do = "choose another launch.port" if place.nodes > 1 else "free it, or leave launch.port at auto"
                raise MachineError(
                    f"port {place.port} cannot be used ({error.strerror}; launch.port: {origin('launch.port')}): {do}"
                ) from error
