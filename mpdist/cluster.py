"""What a cluster has, as far as Slurm tells before a job is submitted: partitions, their limits, what their nodes hold.

Slurm accepts a job that can never start (more nodes than the partition has, a time over its limit) and lets it wait for
ever. Here such a job is refused. What cannot be asked is not refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpdist import slurm
from mpdist.errors import ConfigError, MpdistError, UsageError
from mpdist.units import parse_bytes

if TYPE_CHECKING:
    from mpdist.config import Resolved


@dataclass(frozen=True)
class Node:
    """cpus, gpus: counts; memory: MiB; None where Slurm does not say. partitions: their names."""

    name: str
    cpus: int | None
    memory: int | None
    gpus: int
    partitions: tuple[str, ...]


def check(resolved: Resolved, gpus: int) -> None:
    """Raises ConfigError with all that this cluster can never give. gpus: of each node, as the job asks for them."""
    known = {part["PartitionName"]: part for part in slurm.show("partition") if "PartitionName" in part}
    if not known:
        return
    ask, problems = resolved.config.slurm, list[MpdistError]()
    default = [name for name, part in known.items() if part.get("Default") == "YES"]
    asked = ask.partition or os.environ.get("SBATCH_PARTITION")
    names = asked.split(",") if asked else default
    for name in names:
        if name not in known:
            origin = _origin(resolved, "slurm.partition") if ask.partition else "SBATCH_PARTITION"
            what = f"slurm.partition = {name} ({origin})"
            problems.append(UsageError(what, "this cluster has no such partition", f"take one of {', '.join(known)}"))
    if problems or not names:
        if not names and not problems:
            why, do = "this cluster has no default partition", f"set slurm.partition to one of {', '.join(known)}"
            problems.append(UsageError("slurm.partition is not set", why, do))
        raise ConfigError(problems)
    nodes = [_node(fields) for fields in slurm.show("node")]
    # A job may start in any of several partitions: it is hopeless only where it is in all of them.
    found = [_never(resolved, known[name], [n for n in nodes if name in n.partitions], gpus) for name in names]
    if all(found):
        raise ConfigError([problem for one in found for problem in one])


def _never(resolved: Resolved, part: dict[str, str], nodes: Sequence[Node], gpus: int) -> list[MpdistError]:
    """Why the job can never start in one partition."""
    cfg, name = resolved.config, part["PartitionName"]
    problems: list[MpdistError] = []

    def refuse(what: str, why: str, do: str) -> None:
        problems.append(UsageError(what, why, do))

    count = cfg.launch.nodes
    asked = f"launch.nodes = {count} ({_origin(resolved, 'launch.nodes')})"
    most = min(_count(part.get("MaxNodes")), _count(part.get("TotalNodes")))
    if count > most:
        refuse(asked, f"partition {name} gives a job at most {most:.0f} nodes", "take fewer, or another partition")
    if count < _count(part.get("MinNodes"), 0):
        refuse(asked, f"partition {name} wants {part['MinNodes']} nodes at least", "take more, or another partition")
    longest = slurm.seconds(part.get("MaxTime", ""))
    if cfg.slurm.time is not None and longest is not None and cfg.slurm.time > longest:
        what = f"slurm.time = {cfg.slurm.time:g} s ({_origin(resolved, 'slurm.time')})"
        refuse(
            what,
            f"partition {name} allows {part['MaxTime']} at most",
            "ask for less: the run is queued again and goes on",
        )
    if part.get("State", "UP") in ("INACTIVE", "DRAIN"):
        refuse(f"partition {name}", f"its state is {part['State']}", "take another partition")
    for key, wanted, has, unit in _per_node(resolved, gpus):
        fitting = [node for node in nodes if (amount := has(node)) is None or amount >= wanted]
        if nodes and len(fitting) < count <= most:
            best = max((has(node) or 0 for node in nodes), default=0)
            what = f"{key} ({_origin(resolved, key)}) asks for {wanted} {unit} of each node"
            refuse(
                what, f"{len(fitting)} nodes of partition {name} have as much; the largest has {best}", "ask for less"
            )
    return problems


def _per_node(resolved: Resolved, gpus: int) -> Iterator[tuple[str, int, Callable[[Node], int | None], str]]:
    """What is asked of each node: the key, how much, where a node says what it has, and of what."""
    ask = resolved.config.slurm
    if gpus:
        key = "slurm.gpus_per_node" if ask.gpus_per_node else "slurm.gres" if ask.gres else "launch.ranks"
        yield key, gpus, lambda node: node.gpus, "GPUs"
    if ask.cpus_per_node:
        yield "slurm.cpus_per_node", ask.cpus_per_node, lambda node: node.cpus, "CPUs"
    if ask.mem and mebibytes(ask.mem):
        yield "slurm.mem", mebibytes(ask.mem), lambda node: node.memory, "MiB"


def _node(fields: dict[str, str]) -> Node:
    def number(name: str) -> int | None:
        text = fields.get(name, "")
        return int(text) if text.isdecimal() else None

    partitions = tuple(fields.get("Partitions", "").split(","))
    return Node(
        fields.get("NodeName", ""), number("CPUTot"), number("RealMemory"), gpus(fields.get("Gres", "")), partitions
    )


def gpus(gres: str) -> int:
    """GPUs of a node in Slurm's words: 'gpu:a100:4(S:0-1),nvme:1' -> 4. A kind without a count is one."""
    found = 0
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, *rest = part.strip().split(":")
        if kind.removeprefix("gres/") == "gpu":
            found += int(rest[-1]) if rest and rest[-1].isdecimal() else 1
    return found


def mebibytes(text: str) -> int:
    """Of an amount such as 200GiB, rounded up, as sbatch counts memory."""
    return -(-parse_bytes(text) // 2**20)


def _count(text: str | None, default: float = float("inf")) -> float:
    return float(text) if text and text.isdecimal() else default


def _origin(resolved: Resolved, key: str) -> str:
    return resolved.origins.get(key, "config")
