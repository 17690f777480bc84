"""A run handed to Slurm: the argument list of sbatch, what is refused before it waits in a queue, what is kept of it.

The job runs slurm/train.sbatch, which works with plain sbatch as well. Arguments are a list from here to the rank: no
shell reads them. What is submitted is kept in OUT_DIR/NAME/slurm/0001: script, arguments, names of variables.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdist import arch, cluster, shipped, slurm
from mpdist.env import environment, mask
from mpdist.errors import MachineError
from mpdist.inputs import check_inputs
from mpdist.lines import dump, write_atomic
from mpdist.plan import make
from mpdist.record import standing

if TYPE_CHECKING:
    from mpdist.config import Resolved

SCRIPT = "slurm/train.sbatch"


@dataclass(frozen=True)
class Asked:
    """What a person gave: the configuration's path and overrides, as they stand. memory: of a rank, for the verdict."""

    config: str
    overrides: tuple[str, ...]
    memory: int | None = None


def run(resolved: Resolved, asked: Asked, dry_run: bool) -> int:
    """Submit a run to Slurm, or show what would be; the exit status. Raises UsageError, DoesNotFit or MachineError."""
    cfg = resolved.config
    names = [cfg.name] if cfg.slurm.array is None else [f"{cfg.name}-seed{k}" for k in seeds(cfg.slurm.array)]
    if cfg.slurm.array is None:
        run_dir, mode = standing(resolved, {})
        if mode == "finished":
            print(f"{run_dir.path} is finished: nothing to do")
            return 0
    gpus = gpus_of(resolved)
    plan = make(
        cfg,
        arch.look(cfg.model.path, cfg.model.config, cfg.model.revision),
        _ranks(resolved, gpus),
        cfg.launch.nodes,
        asked.memory,
        lambda name: resolved.origins.get(name, "config"),
        "cuda" if gpus else "cpu",
    )
    plan.require_fit()
    check_inputs(resolved)
    command = arguments(resolved, asked)
    cluster.check(resolved, gpus)
    where = f"{cfg.launch.nodes} node{'s' * (cfg.launch.nodes != 1)} x {_ranks(resolved, gpus)} ranks"
    if dry_run:
        print(
            f"{where}; it would submit, in {os.getcwd()}:\n\n{shlex.join(command)}\n\n{SCRIPT}:\n\n{_script()}", end=""
        )
        return 0
    if not gpus and cfg.launch.device == "auto":
        print(
            "warning: no GPUs are asked for (slurm.gpus_per_node), so these are CPU ranks; launch.device=cpu says that it is meant"
        )
    job = _submit(command, [Path(cfg.out_dir) / name for name in names])
    print(_told(job, where, resolved, [Path(cfg.out_dir) / name for name in names], asked))
    return 0


def arguments(resolved: Resolved, asked: Asked) -> list[str]:
    """sbatch and all that it is given; the script's own arguments last."""
    cfg, ask = resolved.config, resolved.config.slurm
    words = ["sbatch", "--parsable", f"--job-name={cfg.name}", f"--nodes={cfg.launch.nodes}", "--ntasks-per-node=1"]
    gpus = gpus_of(resolved) if ask.gres is None else None
    options: dict[str, Any] = {
        "account": ask.account,
        "partition": ask.partition,
        "qos": ask.qos,
        "constraint": ask.constraint,
        "time": None if ask.time is None else limit(ask.time),
        "gpus-per-node": gpus or None,
        "gres": ask.gres,
        "cpus-per-task": ask.cpus_per_node,
        "mem": None if ask.mem is None else f"{cluster.mebibytes(ask.mem)}M" if cluster.mebibytes(ask.mem) else "0",
        "array": ask.array,
        "dependency": ask.dependency,
    }
    words += [f"--{name}={value}" for name, value in options.items() if value is not None]
    words += ["--exclusive"] if ask.exclusive else []
    words += ["--kill-on-invalid-dep=yes"] if ask.dependency else []
    words += [f"--signal=USR1@{round(ask.signal_lead)}", "--requeue", "--open-mode=append"]
    words += [f"--output={log_pattern(Path(os.path.abspath(cfg.out_dir)), cfg.name, ask.array is not None)}"]
    return [*words, *ask.extra, str(shipped.root() / SCRIPT), asked.config, *asked.overrides]


def limit(seconds: float) -> str:
    """As sbatch reads it, rounded up to whole seconds: 90061 -> 1-01:01:01."""
    rest = math.ceil(seconds)
    days, rest = divmod(rest, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def log_pattern(out_dir: Path, name: str, array: bool) -> str:
    """Where the job prints, in sbatch's pattern language, in which a backslash anywhere turns patterns off."""
    folder = f"{out_dir}/{name}"
    if "\\" in folder:
        return f"{folder}/{slurm.FOLDER}/job.log"
    folder = folder.replace("%", "%%")
    return f"{folder}-seed%a/{slurm.FOLDER}/%A_%a.log" if array else f"{folder}/{slurm.FOLDER}/%j.log"


def seeds(array: str) -> list[int]:
    """The indices of a job array: '0-3,8%2' -> 0, 1, 2, 3, 8."""
    found: list[int] = []
    for part in array.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        assert match is not None  # the schema has looked
        found += range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))
    return found


def gpus_of(resolved: Resolved) -> int:
    """GPUs of each node that the job asks for; 0 without."""
    ask, launch = resolved.config.slurm, resolved.config.launch
    if ask.gpus_per_node:
        return ask.gpus_per_node
    if ask.gres is not None:
        return cluster.gpus(ask.gres)
    return launch.ranks if launch.device == "cuda" and isinstance(launch.ranks, int) else 0


def _ranks(resolved: Resolved, gpus: int) -> int:
    ranks = resolved.config.launch.ranks
    return ranks if isinstance(ranks, int) else max(gpus, 1)


def _script() -> str:
    return (shipped.root() / SCRIPT).read_text(encoding="utf-8")


def _submit(command: Sequence[str], runs: Sequence[Path]) -> str:
    """The job's id, with all that was submitted kept beside each run. Raises MachineError where sbatch refuses."""
    if shutil.which("sbatch") is None:
        raise MachineError(
            "sbatch is not in PATH",
            "this machine submits nothing to Slurm",
            "go to a login node; --dry-run works anywhere",
        )
    kept = {
        "time": time.time(),
        "host": platform.node(),
        "folder": os.getcwd(),
        "arguments": [mask(word) for word in command],
        "variables": environment()["variables"],
    }
    places = [_place(run / slurm.FOLDER) for run in runs]
    for place in places:
        write_atomic(place / "train.sbatch", _script())
        write_atomic(place / "submission.json", dump({**kept, "job": None}, indent=1) + "\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # this mpdist, active or not
    done = subprocess.run(
        list(command),
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        for place in places:
            shutil.rmtree(place)
            for folder in (place.parent, place.parent.parent):
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
        raise MachineError(
            f"sbatch refuses: {done.stderr.strip() or f'status {done.returncode}'}", "", "nothing was submitted"
        )
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)
    job = done.stdout.strip().partition(";")[0]
    for place in places:
        write_atomic(place / "submission.json", dump({**kept, "job": job}, indent=1) + "\n")
    return job


def _place(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        try:
            (folder / f"{number:04d}").mkdir()
            return folder / f"{number:04d}"
        except FileExistsError:
            number += 1


def _told(job: str, where: str, resolved: Resolved, runs: Sequence[Path], asked: Asked) -> str:
    cfg = resolved.config
    log = log_pattern(Path(cfg.out_dir), cfg.name, cfg.slurm.array is not None)
    for sign, text in (("%j", job), ("%A", job), ("%a", "*"), ("%%", "%")):
        log = log.replace(sign, text)
    run = str(runs[0]) if len(runs) == 1 else f"{runs[0].parent}/{cfg.name}-seed*"
    log, run = (text if "*" in text else shlex.quote(text) for text in (log, run))
    again = shlex.join(["mpdist", "submit", asked.config, *asked.overrides])
    lines = (
        f"submitted job {job}: {where}{f', {len(runs)} seeds' if len(runs) > 1 else ''}",
        f"  watch:   squeue --job={job}; tail -F {log}",
        f"  stop:    touch {run}/STOP saves and ends; scancel {job} leaves it KillWait seconds to save",
        f"  resume:  by itself after a time limit or a preemption (slurm.requeues = {cfg.slurm.requeues}); else",
        f"           {again}",
    )
    return "\n".join(lines)
