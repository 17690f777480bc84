"""Before a session of several ranks trains: is this the machine that was planned for, and do its links carry numbers?

Every rank looks at itself, all ranks hear of all, and all decide alike from the same list: a failed check ends the start
with its cure (MachineError), a doubtful one becomes a warning event. What was found stands in the session's env.json. It
is meant to cost less than anyone notices; what takes longer belongs to `mpdist doctor`, which calls `examine` too.
"""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpdist import links, machine, watch
from mpdist.findings import Finding, error_of, merged, numbered, shortened
from mpdist.lines import read_json
from mpdist.place import granted_cores, visible_devices
from mpdist.precision import DTYPES

if TYPE_CHECKING:
    from mpdist.config import Config, Resolved
    from mpdist.plan import Plan
    from mpdist.worker import Seat
    from mpdist.world import World

SKEW_S = 1.0  # which rank failed first is told by the ranks' clocks
_MARK = "env.json"  # of the session, there before any rank takes its seat


def before(resolved: Resolved, planned: Plan, seat: Seat, device: torch.device, say: Callable[[str], None]) -> None:
    """Collective, once this rank has its seat. Raises MachineError alike on all ranks."""
    began = time.monotonic()
    session = seat.run.session_path()
    found = examine(resolved.config, planned, seat.world, device, session)
    if seat.world.is_first:
        rows = [finding.to_json() for finding in found]
        seat.run.write_env({"preflight": rows, "preflight_s": round(time.monotonic() - began, 4)})
        for finding in found:
            if finding.level == "doubtful":
                text = f"{finding.what}: {finding.why}; {finding.do}"
                seat.run.event("warning", rank=finding.ranks[0] if finding.ranks else 0, reason=text)
                say(f"warning: {text}")
    error = error_of(found)
    if error is not None:
        first = next(finding for finding in found if finding.level == "failed")
        error.shared = seat.world.rank != (first.ranks[0] if first.ranks else 0)
        raise error


def examine(cfg: Config, planned: Plan, world: World, device: torch.device, folder: Path | None) -> list[Finding]:
    """Collective: the same list on every rank. folder: the session's, None where there is none.

    Links are not tried where a rank has failed by itself: it might not take part.
    """
    whole = gathered(world, look(cfg, planned, world, device, folder), about(device, folder))
    found = merged((own.rank, own.about["host"], own.found) for own in whole)
    found += judged([own.about for own in whole], cfg, world)
    if error_of(found) is None and world.ranks > 1:
        found += try_links(cfg, world, device, [own.about["host"] for own in whole])
    return found


# -- each rank by itself ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Own:
    """What one rank has found by itself, and what others have to know of it."""

    rank: int
    found: list[Finding]
    about: Mapping[str, Any]


def gathered(world: World, found: list[Finding], about: Mapping[str, Any]) -> list[Own]:
    """Collective. Every rank's, in their order."""
    whole: list[Any] = [None] * world.ranks
    dist.all_gather_object(whole, Own(world.rank, found, about))
    return whole


def about(device: torch.device, folder: Path | None) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    began = (read_json(folder / _MARK) or {}).get("began") if folder is not None else None
    return {"host": platform.node(), "device": device_name(device), "threads": torch.get_num_threads(),
            "cores": shortened(cores), "granted": granted_cores(os.environ), "began": began}  # fmt: skip


def look(cfg: Config, planned: Plan, world: World, device: torch.device, folder: Path | None) -> list[Finding]:
    """This rank's device, memory and directory; what all ranks of a node share is left to the first of them."""
    cuda = device.type == "cuda"
    found = [device_found(cfg.launch.device, device), compute_dtype(cfg.precision.compute, device)]
    peak = least = None
    held = 0
    if planned.peak_bytes is not None and planned.states_bytes is not None:
        # What libraries and a CUDA context take, this process holds already.
        held = sum(row.at_peak_bytes for row in planned.rows if row.row == "overhead")
        host = sum(row.rest_bytes for row in planned.rows if row.host)
        peak, least = planned.peak_bytes - held, planned.states_bytes - (host if cuda else 0)
    if cuda:
        found.append(machine.judge_memory("GPU memory", torch.cuda.mem_get_info(device)[0], peak, least, held=held))
        peak = least = planned.host_bytes if planned.host_bytes else None
        held = 0
    if folder is not None:
        found.append(machine.run_directory(folder, _MARK))
    if world.local_rank:
        return found
    port = cfg.launch.port if isinstance(cfg.launch.port, int) else None
    return [
        *found,
        machine.host_memory(peak, least, world.local_ranks, held=held),
        machine.shared_memory(world.local_ranks, cuda),
        machine.open_files(world.ranks),
        machine.locked_memory(world.nodes, bool(machine.infiniband())),
        machine.ports(world.ranks, world.nodes, port),
        machine.network(world.nodes, cuda, os.environ),
    ]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}"


def device_found(wish: str, device: torch.device) -> Finding:
    """Whether the rank has the kind of device that a launcher would have counted on. wish: launch.device."""
    name = device_name(device)
    there = visible_devices(os.environ) if device.type == "cpu" and wish == "auto" else 0
    if there:
        why = f"this node shows {there} NVIDIA device{'s' * (there != 1)}, and torch {torch.__version__} can use none: "
        why += "it was built without CUDA" if torch.version.cuda is None else "the driver may be too old for it"
        do = "install the CUDA build of torch, or mend the driver (nvidia-smi); launch.device=cpu if a CPU is meant"
        return Finding("device", name, "failed", why, do)
    return Finding("device", name)


def native(device: torch.device) -> set[str]:
    """Which of bf16 and fp16 the device multiplies by itself, as torch or the CPU's flags have it."""
    if device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(device)
        if torch.version.hip is not None:
            return {"bf16", "fp16"}
        return {name for name, least in (("bf16", 8), ("fp16", 7)) if major >= least}
    found = machine.cpu_native(machine.cpu_flags())
    for name in ("bf16", "fp16"):
        answer = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
        try:
            # oneDNN takes these dtypes on AVX-512 too, by converting: faster than torch's own loops.
            if answer is not None and answer():
                found.add(name)
        except RuntimeError:  # a build without oneDNN
            continue
    return found


def compute_dtype(compute: str, device: torch.device) -> Finding:
    if compute == "fp32":
        return Finding("compute dtype", "fp32")
    if compute in native(device):
        return Finding("compute dtype", f"{compute}, native")
    other = "fp16" if device.type == "cuda" and compute == "bf16" and "fp16" in native(device) else "fp32"
    why = f"this device has no {compute} of its own: results are right, and slower than in {other}"
    do = f"use precision.compute: {other}, or another device"
    return Finding("compute dtype", f"{compute}, emulated", "doubtful", why, do)


# -- all ranks together ----------------------------------------------------------------------------------------------


def judged(everyone: Sequence[Mapping[str, Any]], cfg: Config, world: World) -> list[Finding]:
    """What shows only beside each other: devices that differ, threads that share cores, directories that are not one."""
    found = [Finding("versions", f"equal on {world.ranks} rank{'s' * (world.ranks != 1)}")]
    kinds = _by(everyone, "device")
    if len(kinds) > 1:
        value = "; ".join(f"ranks {shortened(ranks)}: {name}" for name, ranks in kinds.items())
        why = "the slowest sets the pace, and different devices give different last bits"
        found.append(Finding("devices", value, "doubtful", why, "ask for nodes of one kind (Slurm: --constraint)"))
    found += _threads(everyone, world)
    begun = {own["began"] for own in everyone}
    if len(begun) > 1:
        odd = next(rank for rank, own in enumerate(everyone) if own["began"] != everyone[0]["began"])
        why = f"rank {odd} on {everyone[odd]['host']} sees another session of that name than rank 0"
        do = "set out_dir to a folder on a file system that all nodes share"
        found.append(Finding("run directory", f"{cfg.out_dir}/{cfg.name}", "failed", why, do))
    return found


def _by(everyone: Iterable[Mapping[str, Any]], key: str) -> dict[str, list[int]]:
    kinds: dict[str, list[int]] = {}
    for rank, own in enumerate(everyone):
        kinds.setdefault(own[key], []).append(rank)
    return kinds


def _threads(everyone: Sequence[Mapping[str, Any]], world: World) -> list[Finding]:
    """One finding a node, alike ones as one; the worst first."""
    found: list[tuple[int, str, list[Finding]]] = []
    for first in range(0, world.ranks, world.local_ranks):
        own = everyone[first : first + world.local_ranks]
        cores: set[int] = set()
        for rank in own:
            cores.update(numbered(rank["cores"]))
        granted = [rank["granted"] for rank in own]  # by srun to each rank, by torchrun to all of the node
        count = min(len(cores), sum(granted) if world.source == "srun" else max(granted))
        most = max(rank["threads"] for rank in own)
        found.append((first, own[0]["host"], [machine.threads(most, len(own), count)]))
    return merged(found)


def try_links(cfg: Config, world: World, device: torch.device, hosts: Sequence[str]) -> list[Finding]:
    """Collective. Values in the dtypes that this run sends, and clocks where there are several hosts."""
    words = list(dict.fromkeys(("fp32", cfg.reduce.wire, cfg.precision.compute)))
    own: list[Finding] = []
    for word in words:
        for name, attempt in (("all-reduce", links.summed_right), ("all-gather", links.gathered_right)):
            own.append(_tried(f"{name} {word}", functools.partial(attempt, DTYPES[word], device)))
    whole = gathered(world, own, {})
    found = merged((rank.rank, hosts[rank.rank], rank.found) for rank in whole)
    if len(set(hosts)) > 1:
        found += clocks(links.clock_offsets(device), hosts)
    return found


def _tried(check: str, attempt: Callable[[], str | None]) -> Finding:
    backend = dist.get_backend()
    try:
        wrong = attempt()
    except (RuntimeError, ValueError, TypeError) as error:
        if watch.lost_peer(error):
            raise
        # The ones that this run needs are tried once more, by the wire itself, and refused with what to do.
        return Finding(check, f"{backend} has none")
    if wrong is None:
        return Finding(check, f"right over {backend}")
    why = f"{backend} has changed numbers on their way; training on them would be worthless"
    do = "take this node out of the job and have its devices and cables checked; NCCL_DEBUG=INFO shows the path taken"
    return Finding(check, wrong, "failed", why, do)


def clocks(bounds: Sequence[tuple[float, float]], hosts: Sequence[str]) -> list[Finding]:
    """bounds: of each rank's clock against rank 0's, as `links.clock_offsets` has them; a host's ranks have one clock."""
    by_host = {}
    for host in dict.fromkeys(hosts):
        own = [bounds[rank] for rank, name in enumerate(hosts) if name == host]
        by_host[host] = max(low for low, _ in own), min(high for _, high in own)
    least = {host: max(0.0, low, -high) for host, (low, high) in by_host.items()}
    worst = max(least, key=lambda host: least[host])
    low, high = by_host[worst]
    error = abs(high - low) / 2
    if least[worst] > SKEW_S:
        ahead = "ahead of" if low > 0 else "behind"
        value = f"{worst} is {abs(low + high) / 2:.1f} s {ahead} {hosts[0]}"
        why = "which rank failed first, and how old a file is, is told by clocks"
        return [Finding("clocks", value, "doubtful", why, "synchronise the nodes (chronyc tracking, timedatectl)")]
    most = max(max(abs(low), abs(high)) for low, high in by_host.values())
    return [
        Finding("clocks", f"{len(by_host)} hosts agree within {most * 1e3:.1f} ms (uncertain by {error * 1e3:.1f})")
    ]
