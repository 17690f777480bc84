"""What is played on the tests' Slurm, several scenes at once: most of each waits, for imports on few cores or for Slurm.

A scene submits, disturbs, waits, and returns what it saw; tests of tests/slurm look at that. Each has a folder of its own;
one that harms nodes has nodes of its own.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import submitted
import tiny
from cluster import Cluster, Failed
from submitted import LONG_S, NODES, SCRIPT

from mpdist import slurm, watch
from mpdist.lines import read_json
from mpdist.requeue import read

_WARNED = "SIGUSR1: "  # what a launcher says then
APART = {
    "lost": 3,
    "cut": 3,
    "crashed": 3,
    "taken": 2,
}  # partitions, and their nodes: one more than the job needs where one is lost


AWKWARD = [
    "a b",
    "it's",
    'say "hi"',
    "$HOME `id` $(id)",
    "two\nlines\n",
    "täglich 模型 🚀",
    "*.py ~ ! # & ; | < >",
    "back\\slash\\n and % %j =",
    "",
]
AWKWARD_NAME = "a 'b' \"q\" $c `id` & 模"


@dataclass
class Seen:
    """folder: the scene's. job: its last. ends: a job's state, exit code and step, after each of its stops.

    known: what scontrol said of the job, after each of its stops. queue: squeue's lines when the last job had ended.
    """

    folder: Path
    job: str = ""
    ends: list[tuple[str, str, int]] = field(default_factory=list)
    status: list[dict[str, Any]] = field(default_factory=list)
    known: list[dict[str, str]] = field(default_factory=list)
    queue: list[str] = field(default_factory=list)
    output: str = ""
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)
    said: str = ""
    name: str = "run"

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def result(self) -> tiny.Result:
        return tiny.Result(self.run, [(0, "")])

    @property
    def requeues(self) -> list[str]:
        return [entry["why"] for entry in read(self.run)]

    @property
    def stops(self) -> list[str]:
        return [event["reason"] for event in self.result.events("stop")]

    @property
    def loads(self) -> list[int]:
        """The steps whose checkpoints were gone on from."""
        return [event["step"] for event in self.result.events("load")]

    @property
    def env(self) -> dict[str, Any]:
        """What its first session recorded of where it ran."""
        return read_json(self.run / "sessions" / "0001" / "env.json") or {}

    @property
    def queued(self) -> list[str]:
        """squeue's lines of the last job after its end."""
        return [line for line in self.queue if line.split()[0] == self.job]

    def story(self, undisturbed: Seen) -> str:
        """How often it started, from where, and how much of it is equal to the undisturbed run."""
        starts, status = self.result.events("start"), self.result.state()
        same = [f"{n} of {of} {what}" for what, (n, of) in submitted.compared(self.folder, undisturbed.folder).items()]
        return (
            f"{len(starts)} starts ({', '.join(event['reason'] for event in starts)}), resumed from step "
            f"{', '.join(map(str, self.loads))}; equal bit for bit to the undisturbed run's: {', '.join(same)}; "
            f"final status: {status['state']} at step {status['step']}, job {self.ends[-1][0]}"
        )

    def look(self, cluster: Cluster, job: str) -> None:
        """After a stop: how the job and the run stand."""
        known, status = cluster.job(job), read_json(self.run / "status.json") or {}
        self.job = job
        self.known.append(known)
        self.ends.append((known["JobState"], known["ExitCode"], status.get("step", 0)))
        self.status.append(status)

    def close(self, cluster: Cluster, job: str) -> Seen:
        """After the end of the last job."""
        self.look(cluster, job)
        self.queue = cluster.queue()
        self.left = cluster.left_by(job)
        self.output = cluster.output(job)
        return self


def submit(cluster: Cluster, folder: Path, *options: str, overrides: tuple[str, ...] = (), **changes: Any) -> str:
    path = submitted.config(folder, **changes)
    return cluster.sbatch(*NODES, *options, str(SCRIPT), str(path), *overrides, cwd=folder)


def undisturbed(cluster: Cluster, folder: Path) -> Seen:
    """What every other run is held against. It is submitted with `mpdist submit`, and the port that it wants is taken."""
    seen = Seen(folder)
    path = submitted.config(folder)
    options = ("--nodes", "2", "--cpus", "1", "--time", "30m", "slurm.extra=[--hold]")
    seen.said = cluster.call("mpdist", "submit", str(path), *options, cwd=folder, timeout=LONG_S)
    job = seen.said.split()[2].rstrip(":")
    wanted = wanted_port(job, cluster.nodes[0])
    listen = "import socket, sys; s = socket.create_server(('', int(sys.argv[1]))); print('taken', flush=True); sys.stdin.read()"
    space = f"/run/netns/{cluster.bridge}-{cluster.nodes[0]}"
    with subprocess.Popen(
        ["nsenter", f"--net={space}", "python3", "-c", listen, str(wanted)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as taker:  # fmt: skip
        assert taker.stdout is not None
        assert taker.stdin is not None
        assert taker.stdout.readline() == "taken\n"
        cluster.call("scontrol", "release", job)
        cluster.wait(job, "COMPLETED", timeout=LONG_S)
        taker.stdin.close()
    return seen.close(cluster, job)


def wanted_port(job: str, node: str) -> int:
    env = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": node}
    task = slurm.task(env)
    assert task is not None
    return next(slurm.ports(task))


def requeued(cluster: Cluster, folder: Path) -> Seen:
    """Preempted; at its time limit, with which the two requeues are used up; warned by hand; and a new job goes on.

    Slurm counts a limit in minutes and warns up to a minute early: here within the first half minute.
    """
    seen = Seen(folder)
    options = ("--partition=low", f"--nodelist={','.join(cluster.apart['taken'])}", "--time=30", "--signal=USR1@150")
    job = submit(cluster, folder, *options, overrides=("slurm.signal_lead=150s",), slurm__requeues=2)
    made = submitted.until_step(cluster, job, seen.run, 3)
    script = ("--partition=high", options[1], "--nodes=2", "--exclusive", "--wrap", "sleep 2")
    other = cluster.sbatch(*script, cwd=folder)
    cluster.wait(other, "COMPLETED", timeout=LONG_S)
    seen.look(cluster, job)
    warned = cluster.output(job).count(_WARNED)
    cluster.hurry(job, 1, TimeLimit="3")
    submitted.until_step(cluster, job, seen.run, seen.ends[-1][2] + 1)
    _held_until_warned(cluster, job, watch.read_reports(seen.run / "sessions/0002")[1].pid, warned)
    _until(lambda: cluster.restarts(job) >= 2, f"job {job} was not queued again")
    seen.look(cluster, job)
    made = seen.ends[-1][2]
    cluster.hurry(job, 2, TimeLimit="30")
    submitted.until_step(cluster, job, seen.run, made + 2)
    cluster.call("scancel", "--signal=USR1", job)
    cluster.wait(job, timeout=LONG_S)
    seen.look(cluster, job)
    seen.said = cluster.output(job)
    again = cluster.sbatch(*NODES, *options[:2], str(SCRIPT), "config.yaml", cwd=folder)
    cluster.wait(again, "COMPLETED", timeout=LONG_S)
    return seen.close(cluster, again)


def _held_until_warned(cluster: Cluster, job: str, pid: int, warned: int) -> None:
    """warned: how often it was before. A rank stands still meanwhile: a quick machine would be done before Slurm warns."""
    with contextlib.suppress(ProcessLookupError):  # warned already, and gone
        os.kill(pid, signal.SIGSTOP)
        try:
            _until(lambda: cluster.output(job).count(_WARNED) > warned, f"job {job} was not warned of its limit", 100.0)
        finally:
            os.kill(pid, signal.SIGCONT)


def _until(ready: Callable[[], bool], what: str, timeout: float = LONG_S) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        if time.monotonic() > deadline:
            raise Failed(f"{what} in {timeout:.0f} s")
        time.sleep(0.5)


def stopped(cluster: Cluster, folder: Path) -> Seen:
    """By the file STOP, by scancel, and queued again by hand: three jobs of one run."""
    seen = Seen(folder)
    job = submit(cluster, folder)
    submitted.until_step(cluster, job, seen.run, 3)
    (seen.run / "STOP").touch()
    cluster.wait(job, timeout=LONG_S)
    seen.look(cluster, job)
    seen.said = cluster.output(job)
    for how in ("scancel", "requeue"):
        job = cluster.sbatch(*NODES, str(SCRIPT), "config.yaml", cwd=folder)
        submitted.until_step(cluster, job, seen.run, seen.ends[-1][2] + 2)
        if how == "scancel":
            cluster.call("scancel", job)
            cluster.wait(job, timeout=LONG_S)
        else:
            cluster.call("scontrol", "requeue", job)
            cluster.hurry(job, 1)
        seen.look(cluster, job)
    cluster.wait(job, "COMPLETED", timeout=LONG_S)
    return seen.close(cluster, job)


def lost(cluster: Cluster, folder: Path) -> Seen:
    """The second node dies under a run that has a checkpoint."""
    return _without(cluster, folder, "lost", 1, cluster.kill_node)


def crashed(cluster: Cluster, folder: Path) -> Seen:
    """The second node crashes: its ranks and launcher are missed at once, the node itself by Slurm only later."""
    return _without(cluster, folder, "crashed", 1, cluster.crash_node)


def cut(cluster: Cluster, folder: Path) -> Seen:
    """The first node's cable is cut: rank 0, its launcher and the batch script live on, and hold the run's directory."""
    return _without(cluster, folder, "cut", 0, cluster.cut)


def _without(cluster: Cluster, folder: Path, partition: str, number: int, harm: Callable[[str], None]) -> Seen:
    seen = Seen(folder)
    job = submit(cluster, folder, f"--partition={partition}")
    submitted.until_step(cluster, job, seen.run, 12)
    node = slurm.hosts(cluster.job(job)["NodeList"])[number]
    harm(node)
    began = time.monotonic()
    try:
        cluster.hurry(job, 1)
        seen.seconds = time.monotonic() - began
        seen.look(cluster, job)
        cluster.wait(job, "COMPLETED", timeout=LONG_S)
        if number == 0:  # those of a dead node are frozen here
            seen.said = "\n".join(
                word for word in cluster.left_by(job, node) if "mpdist" in word and "slurm_script" not in word
            )
    finally:
        cluster.heal(node)
    return seen.close(cluster, job)


def raises(cluster: Cluster, folder: Path) -> Seen:
    return _fails(cluster, folder, drill__raise_at={"attempt": 5, "rank": 1})


def leaves(cluster: Cluster, folder: Path) -> Seen:
    return _fails(cluster, folder, drill__exit_at={"attempt": 5, "rank": 1, "code": 0})


def killed(cluster: Cluster, folder: Path) -> Seen:
    return _fails(cluster, folder, signal.SIGKILL)


def hangs(cluster: Cluster, folder: Path) -> Seen:
    return _fails(cluster, folder, signal.SIGSTOP, launch__timeout="40s")


def _fails(cluster: Cluster, folder: Path, number: int | None = None, **changes: Any) -> Seen:
    """A fault of rank 1, on the second node. seconds: from there to the job's end."""
    seen = Seen(folder)
    job = submit(cluster, folder, **changes)
    submitted.until_step(cluster, job, seen.run, 4)
    if number is not None:
        os.kill(watch.read_reports(seen.run / "sessions/0001")[1].pid, number)
    began = time.monotonic()
    cluster.wait(job, timeout=LONG_S)
    seen.seconds = time.monotonic() - began
    return seen.close(cluster, job)


def diverges(cluster: Cluster, folder: Path) -> Seen:
    """And everything that a person typed for it was awkward."""
    seen = Seen(folder / "it's 模型 $HOME %j", name=AWKWARD_NAME)
    changes = {"drill__nan_loss_at": {"attempts": "all", "rank": 1}, "precision__scale": {"patience": 3}}
    path = submitted.config(seen.folder, batch__global=8, track__wandb={"mode": "offline"}, **changes)
    words = (f"name={AWKWARD_NAME}", f"track.wandb.project={''.join(AWKWARD)}", "--nodes", "2", "--cpus", "1")
    seen.said = cluster.call("mpdist", "submit", str(path), *words, cwd=folder, timeout=LONG_S, WANDB_MODE="disabled")
    job = seen.said.split()[2].rstrip(":")
    cluster.wait(job, timeout=LONG_S)
    seen.close(cluster, job)
    seen.output = (seen.run / "slurm" / f"{job}.log").read_text()  # scontrol shows such a path as a pattern
    return seen


def swept(cluster: Cluster, folder: Path) -> Seen:
    """A sweep of two arms, warned in its first run."""
    seen = Seen(folder, name="run/fp32-seed0")
    path = submitted.config(folder, batch__global=16, budget__steps=20)
    arms = ("--vary", "precision.compute=fp32,bf16", "--ranks", "1")
    job = cluster.sbatch(str(SCRIPT.with_name("sweep.sbatch")), str(path), *arms, cwd=folder)
    submitted.until_step(cluster, job, seen.run, 2)
    cluster.call("scancel", "--signal=USR1", job)
    cluster.hurry(job, 1)
    seen.look(cluster, job)
    cluster.wait(job, timeout=LONG_S)
    return seen.close(cluster, job)


def started_by_srun(cluster: Cluster, folder: Path) -> Seen:
    """Each rank directly, without torchrun."""
    path = submitted.config(folder)
    step = ("srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "python", "-m", "mpdist", str(path))
    cluster.call(*step, cwd=folder, timeout=LONG_S)
    return Seen(folder)


def interactive(cluster: Cluster, folder: Path) -> Seen:
    path = submitted.config(folder, batch__global=8, budget__steps=3)
    script = submitted.TOP / "launch" / "interactive.sh"
    words = ("salloc", "--nodes=2", "sh", str(script), str(path))
    cluster.call(*words, cwd=folder, timeout=LONG_S, RANKS="1", PORT="23457")
    return Seen(folder)


def examined(cluster: Cluster, folder: Path) -> Seen:
    """By the doctor."""
    path = submitted.config(folder, batch__global=8)
    job = cluster.sbatch("--nodes=2", str(SCRIPT.with_name("doctor.sbatch")), str(path), cwd=folder)
    cluster.wait(job, timeout=LONG_S)
    return Seen(folder).close(cluster, job)


def of_the_readme(cluster: Cluster, folder: Path) -> Seen:
    """Its first job, but for its length and a row for each step, from a folder that has only the package's configurations."""
    lines = (submitted.TOP / "README.md").read_text().partition("## Slurm")[2].splitlines()
    line = next(line for line in lines if line.startswith("mpdist submit") and "--dry-run" not in line)
    words = [str(submitted.TOP / word) if word.startswith("configs/") else word for word in shlex.split(line)]
    short = ("budget.steps=5", "optim.warmup=0", "track.every=1")
    said = cluster.call(*words, *short, cwd=folder, timeout=LONG_S)
    job = said.split()[2].rstrip(":")
    cluster.wait(job, "COMPLETED", timeout=LONG_S)
    return Seen(folder, said=said, name="demo-pretrain").close(cluster, job)


SCENES: dict[str, Callable[[Cluster, Path], Seen]] = {
    play.__name__: play
    for play in (
        requeued, undisturbed, stopped, lost, crashed, cut, swept, hangs, killed, raises, leaves,
        started_by_srun, of_the_readme, examined, interactive, diverges,
    )
}  # fmt: skip
