"""Runs under a test's own Slurm: a small configuration for two nodes, and what to wait for in its run."""

from __future__ import annotations

import json
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
    return [what for what, (same, of) in compared(one, other).items() if same != of]


def compared(one: Path, other: Path) -> dict[str, tuple[int, int]]:
    """What of two runs' results has the same bits, and of how much, but for clocks."""
    a, b = result(one), result(other)
    found = {}
    for kind in ("train", "eval"):
        rows = [[json.dumps(row, sort_keys=True) for row in tiny.timeless(run.rows(kind))] for run in (a, b)]
        if kind == "train" or any(rows):
            assert any(rows), f"no {kind} rows to compare"
            found[f"{kind} rows"] = (sum(x == y for x, y in zip(*rows, strict=False)), max(map(len, rows)))
    for prefix in ("model.", "exp_avg.", "exp_avg_sq."):
        mine, theirs = a.weights(prefix=prefix), b.weights(prefix=prefix)
        names = mine.keys() | theirs.keys()
        assert names, f"no tensors {prefix}* to compare"
        same = (name for name in mine.keys() & theirs.keys() if _bits(mine[name]) == _bits(theirs[name]))
        found[f"tensors {prefix}*"] = (len(list(same)), len(names))
    return found


def _bits(tensor: Any) -> tuple[str, bytes]:
    return f"{tensor.dtype} {tuple(tensor.shape)}", tensor.numpy().tobytes()
