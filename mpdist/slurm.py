"""What Slurm says to a process: which task of which step it is, where the others are, and why it is asked to stop.

Read from the environment and, where it can be asked, from `scontrol`. Host lists are read here, in all forms that Slurm
writes, since a compute node need not have Slurm's commands. Standard library only.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpdist.errors import MachineError, UsageError
from mpdist.lines import dump, read_json, write_atomic

FOLDER = "slurm"  # of a run: what was submitted, logs of jobs, how often they were queued again
_MOST_HOSTS = 65536  # of one list: Slurm's own limit of a range
_NO_STEP = 0xFFFFFFF0  # from here on a step's number means something else: batch, extern, interactive
_ASK_S = 10.0  # for the controller to answer
_ANSWER_S = 5.0  # for a node's slurmd to take a connection
_PORTS = (20000, 10000)  # the first that a job may take, and how many: below the kernel's own (from 32768)
_TRIES = 50  # ports of a job that are looked at
_NEAR_S = 90.0  # Slurm warns up to 60 s early, and looks every 30 s


# -- lists -----------------------------------------------------------------------------------------------------------


def hosts(text: str) -> list[str]:
    """The names of a host list, as `scontrol show hostnames` has them: 'n[08-10,12]-ib,m[0-1]x[2-3]'.

    Numbers keep the width of a range's lower end. Raises UsageError for what is no host list.
    """
    names: list[str] = []
    for item in _items(text):
        names += _expand(item, text)
        if len(names) > _MOST_HOSTS:
            raise _no_list(text, f"it names more than {_MOST_HOSTS} hosts")
    return names


def _items(text: str) -> Iterator[str]:
    """The parts between commas (or spaces) that stand outside of brackets."""
    depth, item = 0, ""
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _no_list(text, "its brackets do not match")
        if depth == 0 and letter in ", \t\n":
            if item:
                yield item
            item = ""
        else:
            item += letter
    if depth:
        raise _no_list(text, "its brackets do not match")
    if item:
        yield item


def _expand(item: str, whole: str) -> list[str]:
    """All names of 'a[0-1]x[2-3]', in Slurm's order: the last bracket varies fastest, then the first, then the second."""
    parts = re.split(r"\[([^\]]*)\]", item)  # text, inside, text, inside, ..., text
    choices = [_numbers(inside, whole) for inside in parts[1::2]]
    if math.prod(map(len, choices)) > _MOST_HOSTS:
        raise _no_list(whole, f"it names more than {_MOST_HOSTS} hosts")
    names = []
    for *others, last in itertools.product(*reversed(choices[:-1]), *choices[-1:]) if choices else ():
        numbers = [*reversed(others), last]
        names.append("".join(text + number for text, number in zip(parts[::2], [*numbers, ""], strict=True)))
    return names or [item]


def _numbers(inside: str, whole: str) -> list[str]:
    found: list[str] = []
    for part in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip(), re.ASCII)
        if match is None:
            raise _no_list(whole, f"[{inside}] is no list of numbers and ranges")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low) or int(high) - int(low) >= _MOST_HOSTS:
            raise _no_list(whole, f"{part.strip()} is no range")
        found += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
    return found


def _no_list(text: str, why: str) -> UsageError:
    short = text if len(text) < 200 else f"{text[:200]}..."
    return UsageError(f"{short} is no host list", why, "write it as Slurm does: n[1-3,07-09],login")


def per_node(text: str) -> list[int]:
    """Tasks (or CPUs) of each node, from Slurm's '2(x3),1'. Raises MachineError for another form."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip(), re.ASCII)
        if match is None:
            raise MachineError(
                f"{text!r} is no count of tasks per node", "Slurm writes '2(x3),1'", "do not set it by hand"
            )
        found += [int(match[1])] * int(match[2] or 1)
    return found


# -- this process ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """This process as a task of a job's step. Nodes and tasks count from 0; `beside`: tasks on this node.

    restart: how often the job was queued again. hosts: the step's nodes, in the order of their numbers.
    """

    job: str
    restart: int
    step: str
    rank: int
    tasks: int
    node: int
    nodes: int
    local: int
    beside: int
    hosts: tuple[str, ...]
    cpus: int | None  # of this step on this node

    @property
    def name(self) -> str:
        """What no other start of any job of this cluster is called."""
        return f"{self.job}.{self.step}.{self.restart}"


def task(env: Mapping[str, str]) -> Task | None:
    """The task that `env` describes; None outside of a step (a batch script, a login shell, `salloc`)."""
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or ""
    if "SLURM_PROCID" not in env or "SLURM_JOB_ID" not in env or not step.isdecimal() or int(step) >= _NO_STEP:
        return None
    nodes = _number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1)
    tasks = _number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)
    node = _number(env, "SLURM_NODEID", default=0)
    shares = per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or str(max(tasks // nodes, 1)))
    cpus = env.get("SLURM_CPUS_ON_NODE", "")
    return Task(
        job=env["SLURM_JOB_ID"],
        restart=_number(env, "SLURM_RESTART_COUNT", default=0),
        step=step,
        rank=_number(env, "SLURM_PROCID"),
        tasks=tasks,
        node=node,
        nodes=nodes,
        local=_number(env, "SLURM_LOCALID", default=0),
        beside=shares[node] if node < len(shares) else shares[-1],
        hosts=tuple(hosts(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "")),
        cpus=int(cpus) if cpus.isdecimal() and int(cpus) else None,
    )


def session(env: Mapping[str, str]) -> dict[str, Any] | None:
    """The job of this process, for the record of its session; None outside of Slurm."""
    if "SLURM_JOB_ID" not in env:
        return None
    names = {"job": "SLURM_JOB_ID", "restart": "SLURM_RESTART_COUNT", "nodes": "SLURM_JOB_NODELIST"}
    found = {key: env.get(name) for key, name in {**names, "partition": "SLURM_JOB_PARTITION"}.items()}
    return {**found, "restart": int(found["restart"] or 0)}


def _number(env: Mapping[str, str], *names: str, default: int | None = None) -> int:
    for name in names:
        if name in env:
            if not env[name].isdecimal():
                raise MachineError(f"{name} = {env[name]}", "Slurm sets a number there", "do not set it by hand")
            return int(env[name])
    if default is None:
        raise MachineError(f"{names[0]} is not set", "Slurm's other variables are", "start the ranks with srun")
    return default


# -- where the ranks meet --------------------------------------------------------------------------------------------


def address(host: str) -> str:
    """The first node by a name or address that this node can find; node names need not be host names."""
    if _resolves(host):
        return host
    known = ask("node", host) or {}
    for name in (known.get("NodeAddr"), known.get("NodeHostName")):
        if name and name != host and _resolves(name):
            return name
    raise MachineError(
        f"the node name {host} is no host name that this node finds",
        "neither the resolver nor Slurm (scontrol show node) gives an address for it",
        "set launch.address to the first node's host name or address",
    )


def first_address(task: Task, given: str | None) -> str:
    """Where rank 0 is: `given` (MASTER_ADDR), which must mean the step's first node. Raises MachineError if it does not."""
    first = address(task.hosts[0])
    if given is None:
        return first
    if not same_host(given, first):
        raise MachineError(
            f"MASTER_ADDR = {given}, but rank 0 of this step runs on {task.hosts[0]}",
            "srun starts rank 0 on the first of SLURM_STEP_NODELIST; elsewhere nobody would answer",
            f"unset MASTER_ADDR, or set it to {first}",
        )
    return given


def same_host(one: str, other: str) -> bool:
    """Whether two names or addresses mean one host; asks the resolver only if the names differ."""
    if one.partition(".")[0].lower() == other.partition(".")[0].lower() and not one[:1].isdigit():
        return True
    try:
        return socket.gethostbyname(one) == socket.gethostbyname(other)
    except OSError:
        return one == other


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def ports(task: Task) -> Iterator[int]:
    """Ports for the ranks of this step to meet at, the preferred one first: jobs beside each other take others."""
    first, count = _PORTS
    number = int(task.job) if task.job.isdecimal() else 0
    start = (number * 97 + int(task.step) * 13 + task.restart * 7) % count
    for i in range(_TRIES):
        yield first + (start + i) % count


def free_port(task: Task) -> int:
    """The first of this step's ports that nothing on this node listens at. Raises MachineError without any."""
    for port in ports(task):
        if is_free(port):
            return port
    tried = list(ports(task))
    raise MachineError(
        f"ports {tried[0]} to {tried[-1]} of this node are all in use",
        f"the ranks of job {task.job} have no port to meet at",
        "set launch.port to a free one",
    )


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _meeting(run: Path, task: Task) -> Path:
    """The first node's word to the others of its step, in the run's folder, which all see: at which port they meet."""
    return run / FOLDER / f"meeting-{task.name}.json"


@contextlib.contextmanager
def meeting_at(port: int, run: Path, task: Task | None) -> Iterator[None]:
    """By the first node: while the ranks run, the others are told the port."""
    if task is None or task.tasks == 1:
        yield
        return
    path = _meeting(run, task)
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob("meeting-*.json"):  # left by a launcher that was killed
        old.unlink(missing_ok=True)
    write_atomic(path, dump({"port": port, "time": time.time()}) + "\n")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
            path.parent.rmdir()  # unless a submission lies there too


def called_port(run: Path, task: Task, timeout: float) -> int:
    """By another node: the port, once the first has said it. Raises MachineError if it has not in `timeout` seconds."""
    path, deadline = _meeting(run, task), time.monotonic() + timeout
    while (found := read_json(path)) is None:
        if time.monotonic() > deadline:
            raise MachineError(
                f"task {task.rank} waited {timeout:.0f} s for the first node, {task.hosts[0]}, to say where the ranks meet",
                f"{path} is not there: it has not come so far, or the nodes do not share out_dir",
                "look at its part of the log, and set out_dir to a folder that all nodes see",
            )
        time.sleep(0.2)
    return int(found["port"])


# -- asking the controller -------------------------------------------------------------------------------------------


def ask(kind: str, name: str) -> dict[str, str] | None:
    """What `scontrol show KIND NAME` says, by its names; None where it cannot be asked or knows of none.

    An array's number is that of its last task too: asked for that job, Slurm tells of all tasks.
    """
    found = show(kind, name)
    own = [job for job in found if job.get("JobId") == name] if kind == "job" else []
    return next(iter(own or found), None)


def full_name(job: str, known: Mapping[str, str] | None, env: Mapping[str, str]) -> str:
    """What Slurm's commands take for this one job and no other of its array. known: as `ask` has it."""
    array, task = (known or {}).get("ArrayJobId"), (known or {}).get("ArrayTaskId")
    if known is None:
        array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else job


def show(kind: str, *names: str) -> list[dict[str, str]]:
    """As `ask`, of all that there are; [] where it cannot be asked."""
    try:
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", kind, *names],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    return [pairs(line) for line in done.stdout.splitlines() if "=" in line]


def pairs(line: str) -> dict[str, str]:
    """'A=1 B=x y C=' -> {'A': '1', 'B': 'x y', 'C': ''}."""
    return {m[1]: m[2] for m in re.finditer(r"(?:^| )([A-Za-z][\w:/]*)=(.*?)(?= [A-Za-z][\w:/]*=|\s*$)", line)}


def lost(nodes: str, job: str) -> list[str]:
    """Which nodes of a job's list are gone. A node of which the controller says nothing is not known to be."""
    started = _moment((ask("job", job) or {}).get("StartTime")) or math.inf
    known = {node.get("NodeName", ""): node for node in show("node", nodes)} if nodes else {}
    return [name for name, node in known.items() if _is_lost(name, node, started)]


def _is_lost(name: str, node: Mapping[str, str], started: float) -> bool:
    """Whether Slurm misses it, it booted after the job had started (unix time), or its slurmd does not answer."""
    missed = re.search(r"\bDOWN\b|NOT_RESPONDING|\*", node.get("State", ""))
    booted = _moment(node.get("BootTime")) or 0.0
    return bool(missed) or booted > started or not _answers(node.get("NodeAddr", name), node.get("Port", ""))


def _answers(host: str, port: str) -> bool:
    """Whether a slurmd takes connections there; yes where its port is not known."""
    try:
        socket.create_connection((host, int(port)), _ANSWER_S).close()
    except ValueError:
        return True
    except OSError:
        return False
    return True


PREEMPTED = "preempted by another job"
TIME_LIMIT = "its time limit"
QUEUED_AGAIN = "queued again"
CANCELLED = "cancelled"


def why_stopped(job: Mapping[str, str], restart: int, lead: float) -> str | None:
    """Why Slurm ends a job, from `ask("job", ...)`; None where it does not: a person has signalled it.

    restart: how often the job had been queued again when it started this time. lead: how many seconds before its end
    it is warned. A job in its grace time, or soon to meet its limit, is still RUNNING.
    """
    if job.get("PreemptTime", "None") not in ("None", "N/A", "Unknown"):
        return PREEMPTED
    started, end = _moment(job.get("StartTime")), _moment(job.get("EndTime"))
    if job.get("JobState") == "RUNNING":
        return TIME_LIMIT if end is not None and end - time.time() < lead + _NEAR_S else None
    if int(job.get("Restarts") or 0) > restart:
        return QUEUED_AGAIN
    limit = seconds(job.get("TimeLimit", ""))
    if started and end and limit is not None and end - started > limit - 1:
        return TIME_LIMIT
    return CANCELLED


def why_this_job_stops(env: Mapping[str, str], lead: float) -> str | None:
    """`why_stopped` of this process's job, for the record of its run; None outside of a job, or where nobody answers."""
    found = session(env)
    job = ask("job", str(found["job"])) if found else None
    return None if found is None or job is None else why_stopped(job, found["restart"], lead)


def _moment(text: str | None) -> float | None:
    """Unix time of Slurm's local time; None for Unknown."""
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def seconds(text: str) -> float | None:
    """Of a limit as Slurm writes it: '30', '05:00', '1-02:03:04'; None for UNLIMITED and other words."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text, re.ASCII)
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
