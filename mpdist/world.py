"""Who am I: this process's place in the run, from the variables that torchrun or srun set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpdist.errors import MachineError

_NO_STEP = 0xFFFFFFF0  # from here on a Slurm step's number means a batch script or an interactive shell


@dataclass(frozen=True)
class World:
    """A rank's place. Ranks and nodes count from 0; ``local_ranks`` is the number of ranks on this node."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    node: int
    nodes: int
    source: str
    address: str | None = None
    port: int | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def from_env(env: Mapping[str, str]) -> World | None:
    """The world that ``env`` (os.environ, or any mapping) describes; None where no launcher has set one.

    torchrun's variables win over srun's, since torchrun may itself have been started by srun. Raises
    MachineError where a launcher's variables are there but incomplete or contradict each other, or the other one's.
    """
    # A batch script may see SLURM_PROCID too; only the tasks of a step belong to a world.
    number = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID", "")
    step = "SLURM_PROCID" in env and number.isdecimal() and int(number) < _NO_STEP
    if "RANK" in env and "WORLD_SIZE" in env:
        found = _checked(_torchrun(env))
        if step and "SLURM_STEP_NUM_TASKS" in env:
            _agree(found, env)
        return found
    return _checked(_srun(env)) if step else None


def _agree(found: World, env: Mapping[str, str]) -> None:
    """Raises MachineError where the tasks of a step would each train for themselves, in one directory."""
    tasks = _number(env, "SLURM_STEP_NUM_TASKS")
    if "GROUP_WORLD_SIZE" in env:  # each task is one torchrun, of one world, to which other steps may belong too
        if found.nodes < tasks:
            raise MachineError(
                f"torchrun says GROUP_WORLD_SIZE = {found.nodes}, and Slurm says SLURM_STEP_NUM_TASKS = {tasks}",
                f"srun has started torchrun {tasks} times, and each of these knows of {found.nodes}",
                "start one torchrun a node (srun --ntasks-per-node=1) and give it --nnodes and --node-rank, as `mpdist launch` does",
            )
    elif (found.rank, found.ranks) != (_number(env, "SLURM_PROCID"), tasks):
        raise MachineError(
            f"RANK = {found.rank} and WORLD_SIZE = {found.ranks}, but SLURM_PROCID = {env['SLURM_PROCID']} and "
            f"SLURM_STEP_NUM_TASKS = {tasks}",
            "srun has started this rank, and the environment holds what another launcher has left",
            "unset RANK and WORLD_SIZE in the shell or script that submits the job",
        )


def _torchrun(env: Mapping[str, str]) -> World:
    rank, ranks = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    local_ranks = _number(env, "LOCAL_WORLD_SIZE", ranks)
    return World(
        rank=rank,
        ranks=ranks,
        local_rank=_number(env, "LOCAL_RANK", rank % max(local_ranks, 1)),
        local_ranks=local_ranks,
        node=_number(env, "GROUP_RANK", rank // max(local_ranks, 1)),
        nodes=_number(env, "GROUP_WORLD_SIZE", max(ranks // max(local_ranks, 1), 1)),
        source="torchrun",
        address=env.get("MASTER_ADDR"),
        port=_number(env, "MASTER_PORT") if "MASTER_PORT" in env else None,
    )


def _srun(env: Mapping[str, str]) -> World:
    rank = _number(env, "SLURM_PROCID")
    ranks = _number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")
    nodes = _number(env, "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES", 1)
    return World(
        rank=rank,
        ranks=ranks,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_ranks=max(ranks // max(nodes, 1), 1),
        node=_number(env, "SLURM_NODEID", 0),
        nodes=nodes,
        source="srun",
        address=env.get("MASTER_ADDR"),
        port=_number(env, "MASTER_PORT") if "MASTER_PORT" in env else None,
    )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise MachineError(
            f"{name} = {text}" if text is not None else f"{name} is not set",
            "the launcher's other variables are there, so this one has to be a number too",
            "start the ranks with `mpdist launch`, torchrun or srun, and do not set single variables by hand",
        )
    return int(text)


def _checked(world: World) -> World:
    if world.ranks < 1 or world.rank >= world.ranks or world.local_rank >= world.local_ranks:
        raise MachineError(
            f"rank {world.rank} of {world.ranks}, local rank {world.local_rank} of {world.local_ranks}",
            f"the variables that {world.source} has set contradict each other",
            "unset the variables left over from another launcher (env | grep -E 'RANK|WORLD|SLURM')",
        )
    if world.ranks != world.local_ranks * world.nodes:
        raise MachineError(
            f"{world.ranks} ranks on {world.nodes} nodes with {world.local_ranks} ranks here",
            "every node must run the same number of ranks",
            "give each node the same number of ranks, for example srun --ntasks-per-node",
        )
    return world
