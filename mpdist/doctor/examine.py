"""The steps of an examination, taken by all ranks of a world together, which may be one.

Each step gets the subject and returns the same findings on every rank; a failed one ends the examination, since what
follows would fail for its reason. A step that trains, such as a run in another precision, is one more entry of `STEPS`.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mpdist import arch, links, machine, plan, preflight
from mpdist.config import leaves
from mpdist.dist import on_first, pick_device, same_everywhere, start, stop
from mpdist.doctor import PATIENCE_S, before, here, speed
from mpdist.env import environment
from mpdist.findings import Finding, error_of, merged
from mpdist.units import format_bytes

if TYPE_CHECKING:
    from mpdist.config import Resolved
    from mpdist.plan import Plan
    from mpdist.world import World

_LOW_SHARE = 0.25  # of the link's rate in the data sheet; all-reduces of this size reach 0.5 to 0.9


@dataclass(frozen=True)
class Subject:
    """plan: of the world that the configuration is meant for, which may have more nodes than take part."""

    resolved: Resolved
    plan: Plan
    world: World
    device: torch.device


def run(resolved: Resolved, world: World, ops: bool = False, debug: int | None = None) -> list[Finding]:
    """Collective. Joins a process group, takes every step, leaves it. Raises MpdistError where there is nothing to examine:
    ranks that do not come, or that were started with different settings. ops: instead of what comes after the first step,
    one training step is made and its operations are counted. debug: steps of the debugging sequence, None without it."""
    cfg = resolved.config
    device = pick_device(world, cfg.launch.device)
    patience = cfg.launch.timeout if debug is not None else min(cfg.launch.timeout, PATIENCE_S)
    start(world, device, timedelta(seconds=patience))
    try:
        settings = {k: v for k, v in leaves(resolved.values()) if not k.startswith("launch.") and k != "out_dir"}
        same_everywhere(settings, "settings")
        same_everywhere(environment()["versions"], "versions")
        subject = Subject(resolved, planned(resolved, world, device), world, device)
        found: list[Finding] = []
        steps: tuple[Step, ...] = (ready, counted) if ops else STEPS
        if debug is not None:
            steps = ready, shared_directory, partial(trials, steps=debug)
        for step in steps:
            found += step(subject)
            if error_of(found) is not None:
                break
        return found
    finally:
        stop()


def plan_here(resolved: Resolved, world: World) -> Plan:
    """As `planned`, by a process that is not in the examination, or no longer."""
    return planned(resolved, world, pick_device(world, resolved.config.launch.device))


def planned(resolved: Resolved, world: World, device: torch.device) -> Plan:
    cfg = resolved.config
    shape = arch.look(cfg.model.path, cfg.model.config, cfg.model.revision)
    nodes = max(world.nodes, cfg.launch.nodes)
    return plan.make(cfg, shape, world.local_ranks, nodes, here.memory_of(device), device=device.type,
                     origin=lambda key: resolved.origins.get(key, "config"))  # fmt: skip


# -- steps -----------------------------------------------------------------------------------------------------------


def ready(subject: Subject) -> list[Finding]:
    """What is looked at before every session: see mpdist.preflight."""
    return preflight.examine(subject.resolved.config, subject.plan, subject.world, subject.device, None)


def counted(subject: Subject) -> list[Finding]:
    """Operations by dtype: see mpdist.doctor.ops."""
    from mpdist.doctor import ops

    return ops.look(subject)


def trials(subject: Subject, steps: int) -> list[Finding]:
    """A few steps in each precision, on these ranks: see mpdist.doctor.sequence."""
    from mpdist.doctor import sequence

    return sequence.debug(subject, steps)


def shared_directory(subject: Subject) -> list[Finding]:
    """Whether every rank may write where the run will be, and whether that is one directory on all nodes."""
    folder = Path(subject.resolved.config.out_dir).expanduser().absolute()
    there: Path = on_first(lambda: next(path for path in (folder, *folder.parents) if path.is_dir()))
    mark = there / f".doctor-{secrets.token_hex(8)}"

    def leave_mark() -> str | None:
        with contextlib.suppress(OSError):  # that rank 0 may not write there is found by the step like any other's
            mark.touch()
            return mark.name
        return None

    try:
        own = [machine.run_directory(there, on_first(leave_mark))]
        whole = preflight.gathered(subject.world, own, preflight.about(subject.device, None))
    finally:
        mark.unlink(missing_ok=True)
    return merged((rank.rank, rank.about["host"], rank.found) for rank in whole)


def speeds(subject: Subject) -> list[Finding]:
    """All ranks measure at once, as they will compute at once."""
    device = subject.device
    own = {"rates": speed.measure(device), "name": here.name_of(device), "memory": here.memory_of(device)}
    whole = [rank.about for rank in preflight.gathered(subject.world, [], own)]
    return speed.judged([rank["rates"] for rank in whole], [rank["name"] for rank in whole],
                        [rank["memory"] for rank in whole], preflight.native(device),
                        subject.resolved.config.precision.compute)  # fmt: skip


def bandwidth(subject: Subject) -> list[Finding]:
    """An all-reduce in FP32 over each class of link."""
    world = subject.world
    if world.ranks == 1:
        return []
    sheet = here.link_of(subject.device)
    found = []
    for tried in links.bandwidths(world.local_ranks, subject.device):
        check = f"bandwidth {tried.link}"
        value = (
            f"{_rate(tried.bandwidth)} a rank: an all-reduce of {format_bytes(tried.bytes)} over {tried.ranks} ranks"
        )
        if tried.at_once > 1:
            value += f", {_rate(tried.node)} a node with {tried.at_once} at once"
        if sheet and tried.link == "within a node" and tried.bandwidth < _LOW_SHARE * sheet:
            why = f"the data sheet has {_rate(sheet)}: the GPUs do not use their direct links"
            do = "look at nvidia-smi topo -m and nvlink --status, and unset NCCL_P2P_DISABLE"
            found.append(Finding(check, value, "doubtful", why, do))
        else:
            found.append(Finding(check, value))
    if subject.resolved.config.launch.nodes > 1 and world.nodes == 1:
        why = f"the configuration is for {subject.resolved.config.launch.nodes} nodes, and one has taken part"
        do = "start it on each of them: srun --ntasks-per-node=1 mpdist doctor CONFIG, or with --nodes and --node-rank"
        found.append(Finding("bandwidth between nodes", "not tried", "doubtful", why, do))
    return found


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3g} GB/s"


Step = Callable[[Subject], list[Finding]]
STEPS: tuple[Step, ...] = (
    ready,
    shared_directory,
    before.weights,
    before.labels,
    before.learning_rate,
    speeds,
    bandwidth,
)
