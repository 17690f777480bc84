"""One machine as a rank meets it, asked of the system without torch: memory, limits, disk, ports, cores, networks.

Each check returns a `Finding`; milliseconds each, since they run before every session. What decides is passed in, so
that a test can pass another machine's figures. Linux; elsewhere a figure that the system does not give is said to be
unknown, and is no reason for anything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpdist.findings import Finding
from mpdist.interface import addresses
from mpdist.units import format_bytes

_SHM = Path("/dev/shm")
_SHM_BYTES = (
    64 * 2**20
)  # of a rank; NCCL takes some MiB for each peer in its node, and a container's default is 64 in all
_FILES = 128  # beside sockets: libraries, data, logs
_SOCKETS = 8  # a peer: a process group has one to each, and there are some groups
_INWARD = ("lo", "docker", "virbr", "br-", "veth", "cni")  # interfaces that lead to this host or its containers
_PROBE_BYTES = 64 * 1024
_LEAST_FREE = 64 * 2**20  # logs, metrics and a session's files
_NATIVE = {
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}  # flags of x86 and of ARM under which a CPU multiplies in that dtype


# -- memory ----------------------------------------------------------------------------------------------------------


def host_memory(
    need: int | None, least: int | None, ranks: int, free: int | None = None, cgroup: bool = True, held: int = 0
) -> Finding:
    """Free memory of this host against the plan's. need, least: bytes of one rank at its peak, and for its states alone
    (None: not known); ranks: of this host. free: for a test. held: of the plan's overhead, what each process has already."""
    free = available_memory(cgroup) if free is None else free
    if free is None:
        return Finding("host memory", "its free part is unknown")
    return judge_memory("host memory", free, need, least, ranks, held)


def judge_memory(check: str, free: int, need: int | None, least: int | None, ranks: int = 1, held: int = 0) -> Finding:
    """free: bytes of the device that `ranks` ranks share. need, least, held: one rank's, as in `host_memory`."""
    each = f"{ranks} ranks x " if ranks > 1 else ""
    value = f"{_coarse(free)} free"
    if need is None or least is None:
        return Finding(check, value)
    value += f", the plan needs {each}{format_bytes(need)}"
    value += f" beside the {format_bytes(held)} of overhead that each process holds already" if held else ""
    if ranks * least > free:
        why = f"parameters, gradients and moments alone take {each}{format_bytes(least)}"
        do = "end what else runs there, or take a larger machine, more nodes or a smaller model"
        return Finding(check, value, "failed", why, do)
    if ranks * need > free:
        why = "the peak of a step may find no room, unless what else runs there gives some back"
        return Finding(
            check, value, "doubtful", why, "end what else runs there; `mpdist plan` has settings that need less"
        )
    return Finding(check, value)


def _coarse(size: int) -> str:
    """Whole GiB where there are many, so that ranks which look a moment apart say the same."""
    return f"{size >> 30} GiB" if size >= 2**34 else format_bytes(size)


def available_memory(cgroup: bool = True) -> int | None:
    """Bytes that this host can still give, or its control groups where they give less; None if the system is mute."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    return min([free, *(_group_left() if cgroup else [])])


def _group_left() -> Iterable[int]:
    """Bytes left in each control group above this process that has a limit (version 2, or 1's memory controller)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        two = number == "0"
        root = Path("/sys/fs/cgroup") / ("" if two else "memory")
        names = ("memory.max", "memory.current") if two else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        here = Path(path.strip("/"))
        for folder in (here, *here.parents):
            with contextlib.suppress(OSError, ValueError, IndexError):
                limit, used = (int((root / folder / name).read_text()) for name in names)
                stat = (root / folder / "memory.stat").read_text()
                cache = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
                if limit < 2**60:  # version 1 says a huge number where there is no limit
                    yield max(0, limit - used + (int(cache[1]) if cache else 0))


def shared_memory(ranks: int, cuda: bool, folder: Path = _SHM) -> Finding:
    """NCCL's ranks of one node talk through it. ranks: of this node."""
    try:
        system = os.statvfs(folder)
    except OSError as error:
        return Finding("shared memory", f"{folder}: {error.strerror}")
    free = system.f_bavail * system.f_frsize
    value = f"{format_bytes(free)} free at {folder}"
    if cuda and ranks > 1 and free < ranks * _SHM_BYTES:
        why = f"NCCL exchanges data between the {ranks} ranks of a node there, and fails in mid-run where it is full"
        do = f"start the container with --shm-size={ranks}g or --ipc=host, or clear {folder}"
        return Finding("shared memory", value, "doubtful", why, do)
    return Finding("shared memory", value)


# -- limits and cores ------------------------------------------------------------------------------------------------


def open_files(ranks: int, limits: tuple[int, int] | None = None) -> Finding:
    """ranks: of the whole world, since each keeps connections to the others. limits: soft and hard, for a test."""
    if limits is None:
        import resource

        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (_number(limit) for limit in limits)
    need = _FILES + _SOCKETS * ranks
    value = f"{_said(soft)} (hard limit {_said(hard)})"
    if soft >= need:
        return Finding("open files", value)
    why = f"a rank of {ranks} may need about {need} files and connections"
    do = f"`ulimit -n {min(max(65536, need), hard) if hard >= need else need}` before the start"
    do += "" if hard >= need else ", for which the administrator has to raise the hard limit"
    return Finding("open files", value, "failed" if soft < _FILES + ranks else "doubtful", why, do)


def locked_memory(nodes: int, infiniband: bool, soft: int | None = None) -> Finding:
    """RDMA pins its buffers. infiniband: whether this node has such devices. soft: for a test."""
    if soft is None:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    soft = _number(soft)
    value = f"{_said(soft, format_bytes)} can be locked"
    if nodes > 1 and infiniband and soft < 2**32:
        why = "InfiniBand needs memory that is locked; NCCL fails (ibv_reg_mr), or falls back to TCP"
        do = "`ulimit -l unlimited`; under Slurm PropagateResourceLimitsExcept=MEMLOCK"
        return Finding("locked memory", value, "doubtful", why, do)
    return Finding("locked memory", value)


def _number(limit: int) -> int:
    return 2**63 - 1 if limit < 0 else limit


def _said(limit: int, form: object = str) -> str:
    assert callable(form)
    return "unlimited" if limit >= 2**62 else str(form(limit))


def threads(each: int, ranks: int, cores: int) -> Finding:
    """each: threads of one rank (OMP_NUM_THREADS); ranks: of this node; cores: that they may use together."""
    value = f"{ranks} rank{'s' * (ranks != 1)} x {each} thread{'s' * (each != 1)} on {cores} core{'s' * (cores != 1)}"
    if each > 1 and each * ranks > cores:
        why = "threads that wait for a core hold up all ranks"
        do = f"set OMP_NUM_THREADS={max(1, cores // ranks)}, or give the job more cores"
        return Finding("threads", value, "doubtful", why, do)
    return Finding("threads", value)


# -- disk ------------------------------------------------------------------------------------------------------------


def run_directory(folder: Path, mark: str | None = None) -> Finding:
    """Whether this rank can write into a directory that is there; what is written is read back and taken away again.

    mark: name of a file that another rank has put there: without it this node sees another directory of that name.
    """
    check = "run directory"
    if mark is not None and not _appears(folder / mark):
        why = "rank 0 has made a file there that this rank does not see: the nodes do not share this directory"
        return Finding(
            check, str(folder), "failed", why, "set out_dir to a folder on a file system that all nodes share"
        )
    path = folder / f".probe-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    data = secrets.token_bytes(1024) * (_PROBE_BYTES // 1024)
    try:
        try:
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            back = path.read_bytes()
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
        system = os.statvfs(folder)
    except OSError as error:
        room = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = (
            "a file of 64 KiB does not fit" if room else "every rank writes its log and its part of a checkpoint there"
        )
        do = "make room, or ask for a larger quota" if room else "choose an out_dir that every rank may write to"
        return Finding(check, f"{folder}: {error.strerror}", "failed", why, do)
    free = system.f_bavail * system.f_frsize
    if back != data:
        why = "what was written there came back changed"
        return Finding(check, str(folder), "failed", why, "choose another out_dir; this file system cannot be trusted")
    value = f"writable, {_coarse(free)} free" if free else "writable"
    if system.f_blocks and free < _LEAST_FREE:
        return Finding(check, value, "doubtful", "logs and checkpoints will soon find the disk full", "make room")
    return Finding(check, value)


def _appears(path: Path) -> bool:
    """Network file systems show a new file late: a look at its folder makes them ask again."""
    deadline = time.monotonic() + 3.0
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            os.listdir(path.parent)
        time.sleep(0.05)
    return True


# -- networks --------------------------------------------------------------------------------------------------------


def ports(ranks: int, nodes: int, port: int | None, span: tuple[int, int] | None = None) -> Finding:
    """ranks: of the world. port: of the rendezvous, where it is a fixed one. span: the kernel's, for a test."""
    span = _ephemeral() if span is None else span
    if span is None:
        return Finding("ports", "the range of free ports is unknown")
    low, high = span
    value = f"{low} to {high} for connections" + (f", {port} for the meeting point" if port else "")
    if high - low + 1 < _SOCKETS * ranks:
        why = f"{ranks} ranks may open {_SOCKETS * ranks} connections from one node"
        return Finding("ports", value, "failed", why, "widen net.ipv4.ip_local_port_range (sysctl)")
    if port and nodes > 1 and low <= port <= high:
        why = "the kernel gives ports of that range to any connection, so it may be taken when a run starts"
        return Finding("ports", value, "doubtful", why, f"set launch.port to a free one below {low}")
    return Finding("ports", value)


def _ephemeral() -> tuple[int, int] | None:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class Interface:
    """A network interface. address: IPv4, None if it has none. speed: Mbit/s, None where the driver does not say."""

    name: str
    address: str | None
    up: bool
    speed: int | None

    def __str__(self) -> str:
        speed = f", {self.speed / 1000:g} Gbit/s" if self.speed else ""
        return f"{self.name} ({self.address or 'no address'}{'' if self.up else ', down'}{speed})"


def interfaces() -> list[Interface]:
    found, here = [], addresses()
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net") / name
        state = _text(folder / "operstate")
        speed = _text(folder / "speed")
        rate = int(speed) if speed.isdecimal() and int(speed) else None
        # A loopback or a tunnel says `unknown` where it is up.
        found.append(Interface(name, here.get(name), state in ("up", "unknown") and name in here, rate))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def network(
    nodes: int, cuda: bool, env: Mapping[str, str], found: list[Interface] | None = None, own: str | None = None
) -> Finding:
    """Which interface the backend will take: the one that a variable names, else as gloo and NCCL choose.

    found, own: this host's interfaces and the address that its own name resolves to, for a test.
    """
    found = interfaces() if found is None else found
    variable = "NCCL_SOCKET_IFNAME" if cuda else "GLOO_SOCKET_IFNAME"
    listed = ", ".join(map(str, found)) or "none"
    if wish := env.get(variable):
        names = [word.removeprefix("=").removeprefix("^") for word in wish.split(",")]
        there = [i for i in found if any(i.name.startswith(name) for name in names)]
        value = f"{variable}={wish}; there are {listed}"
        if not there and not wish.startswith("^"):
            do = f"set {variable} to one that is there, or leave it out"
            return Finding("network", value, "failed", "no interface of this host has that name", do)
        return Finding("network", value)
    own = _own_address() if own is None else own
    outward = [i for i in found if i.up and not i.name.startswith(_INWARD)]
    if cuda:  # InfiniBand first, then any but these
        taken = outward[0] if outward else None
    else:
        taken = next((i for i in found if i.address == own), None)
    local = taken is None or (taken.address or "").startswith("127.")
    value = f"{taken.name if taken else 'loopback'} by default; there are {listed}"
    if nodes > 1 and local:
        why = "no interface of this host has an address that other nodes could reach"
        if not cuda:
            why = f"{socket.gethostname()} resolves to {own or 'nothing'}, under which no other node can reach it"
        good = outward[0].name if outward else "the right one"
        return Finding("network", value, "doubtful", why, f"set {variable}={good}")
    return Finding("network", value)


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def infiniband() -> list[str]:
    """Names of this host's RDMA devices."""
    try:
        return sorted(os.listdir("/sys/class/infiniband"))
    except OSError:
        return []


# -- processor and scheduler -----------------------------------------------------------------------------------------


def cpu_flags() -> frozenset[str]:
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.lower().startswith(("flags", "features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_native(flags: Iterable[str]) -> set[str]:
    """Which of bf16 and fp16 a CPU with these flags multiplies by itself."""
    have = set(flags)
    return {dtype for dtype, any_of in _NATIVE.items() if have & any_of}


def driver() -> str | None:
    """The NVIDIA driver's version, None where there is none."""
    match = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", _text(Path("/proc/driver/nvidia/version")))
    return match[1] if match else None


def scheduler(env: Mapping[str, str]) -> Finding:
    """What of Slurm and torchrun is in the environment; values of places and counts, never of anything else."""
    shown = [name for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK",
                               "SLURM_PROCID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES",
                               "OMP_NUM_THREADS") if name in env]  # fmt: skip
    return Finding("environment", " ".join(f"{name}={env[name]}" for name in shown) or "no Slurm, no torchrun")
