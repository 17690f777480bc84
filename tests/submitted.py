"""Runs under a test's own Slurm: a small configuration for two nodes, and what to wait for in its run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import tiny
from cluster import Cluster, Failed

from mpdist.lines import read_json
from mpdist.record import read_metrics

TOP = Path(__file__).resolve().parents[1]
SCRIPT = TOP / "slurm" / "train.sbatch"
STEPS = 40
NODES = ("--nodes=2", "--cpus-per-task=1")
LONG_S = 400.0  # for what takes a tenth of that on an idle machine


def config(folder: Path, **changes: Any) -> Path:
    """Steps of a tenth of a second or two, so that a signal finds the run in the midst of them; see tiny.config."""
    folder.mkdir(exist_ok=True)
    asked = {
        "batch__global": 32,
        "budget__steps": STEPS,
        "checkpoint__every": 10,
        "launch__ranks": 1,
        "launch__timeout": "120s",
    }
    return tiny.config(folder, **{**asked, **changes})


def run_of(folder: Path) -> Path:
    return folder / "runs" / "run"


def result(folder: Path) -> tiny.Result:
    run = run_of(folder)
    return tiny.Result(run, [(int((read_json(run / "status.json") or {}).get("exit") or 0), "")])


def step_of(run: Path) -> int:
    """The last step on record."""
    path = run / "metrics.jsonl"
    return max((row["step"] for row in read_metrics(path)), default=0) if path.exists() else 0


def until_step(cluster: Cluster, job: str, run: Path, step: int, timeout: float = LONG_S) -> int:
    """Wait until the run has made this step; which it has made by then. Raises Failed if the job ends before."""
    deadline, asked = time.monotonic() + timeout, time.monotonic()
    while (made := step_of(run)) < step:
        if (now := time.monotonic()) > asked + 2.0:  # Slurm is asked seldom: each answer costs two processes' time
            asked = now
            if now > deadline or cluster.state(job) in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"):
                raise Failed(f"job {job} is {cluster.state(job)} at step {made}\n{cluster.output(job)}")
        time.sleep(0.1)
    return made


def differences(one: Path, other: Path) -> list[str]:
    """In which rows and weights two runs' results differ, but for clocks; [] where all bits are the same."""
    a, b = result(one), result(other)
    found = [f"{kind} rows" for kind in ("train", "eval") if tiny.timeless(a.rows(kind)) != tiny.timeless(b.rows(kind))]
    for prefix in ("model.", "exp_avg.", "exp_avg_sq."):
        if not tiny.same(a.weights(prefix=prefix), b.weights(prefix=prefix)):
            found.append(prefix)
    return found
