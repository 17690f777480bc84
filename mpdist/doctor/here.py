"""This machine by itself: what it is made of, how fast it is, and what would hold up ranks on it."""

from __future__ import annotations

import os
import platform

import torch

from mpdist import machine, preflight
from mpdist.devices import find
from mpdist.doctor import speed
from mpdist.env import environment
from mpdist.errors import UsageError
from mpdist.findings import Finding
from mpdist.place import granted_cores


def look() -> list[Finding]:
    """Everything that can be said without a configuration and without other ranks."""
    own = devices()
    cuda = own[0].type == "cuda"
    ranks = len(own)
    return [
        *described(),
        *cards(own),
        *memories(own),
        *speeds(own),
        machine.host_memory(None, None, 1),
        machine.shared_memory(ranks, cuda),
        machine.open_files(ranks),
        machine.locked_memory(1, bool(machine.infiniband())),
        machine.threads(torch.get_num_threads(), 1, granted_cores(os.environ)),
        machine.ports(ranks, 1, None),
        machine.network(1, cuda, os.environ),
    ]


def devices() -> list[torch.device]:
    """The GPUs that torch can use, else the CPU."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]


def described() -> list[Finding]:
    """Versions, processor, driver, scheduler: facts, of which none is wrong by itself."""
    env = environment()
    versions = {"python": env["python"], **env["versions"]}
    wanted = ("python", "mpdist", "torch", "transformers", "datasets", "accelerate", "deepspeed", "wandb")
    text = " ".join(f"{name} {versions[name]}" for name in wanted if name in versions)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "no CUDA"
    driver = machine.driver()
    found = [
        Finding("software", f"{text}; torch has {built}"),
        Finding("host", f"{platform.node()}, {env['cpu']}, {env['cores']} cores, {platform.platform()}"),
        Finding("driver", driver or "no NVIDIA driver"),
        machine.scheduler(os.environ),
    ]
    rdma = machine.infiniband()
    return [*found, Finding("InfiniBand", ", ".join(rdma))] if rdma else found


def cards(own: list[torch.device]) -> list[Finding]:
    """Each kind of device with how many there are; unusable ones are a failure."""
    found = [preflight.device_found("auto", own[0])]
    if own[0].type == "cpu":
        return found
    names = [preflight.device_name(device) for device in own]
    counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if len(set(names)) > 1:
        why = "ranks on different devices wait for the slowest, and differ in their last bits"
        return [Finding("device", counts, "doubtful", why, "choose equal ones with CUDA_VISIBLE_DEVICES")]
    return [Finding("device", counts)]


def memories(own: list[torch.device]) -> list[Finding]:
    """Free memory of each GPU, beside what its data sheet has."""
    found = []
    for device in own:
        if device.type != "cuda":
            continue
        free, total = torch.cuda.mem_get_info(device)
        check, value = f"GPU {device.index} memory", f"{free >> 20:,} of {total >> 20:,} MiB free"
        if free < 0.9 * total:
            why = "another process holds the rest"
            found.append(
                Finding(check, value, "doubtful", why, "end what runs there (nvidia-smi), or choose another GPU")
            )
        else:
            found.append(Finding(check, value))
    return found


def speeds(own: list[torch.device]) -> list[Finding]:
    """Measured one after the other, so that no device waits for another's host thread."""
    rates = [speed.measure(device) for device in own]
    return speed.judged(rates, [name_of(d) for d in own], [memory_of(d) for d in own], preflight.native(own[0]))


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def memory_of(device: torch.device) -> int | None:
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def link_of(device: torch.device) -> float | None:
    """Bytes/s in one direction to all peers of a node by the data sheet, where it is known."""
    try:
        card = find(name_of(device), memory_of(device)) if device.type == "cuda" else None
    except UsageError:  # a name that fits several
        return None
    return card.link if card is not None else None
