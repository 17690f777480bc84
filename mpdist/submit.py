"""A run handed to Slurm: the argument list of sbatch, what is refused before it waits in a queue, what is kept of it.

The job runs slurm/train.sbatch, which works with plain sbatch as well. Arguments are a list from here to the rank: no
shell reads them. What is submitted is kept in OUT_DIR/NAME/slurm/0001: configuration, script, arguments, names of
variables. The job reads the configuration that is kept there, at each of its starts and ends, so that the file of which
it was made may be edited meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdist import arch, cluster, shipped, slurm
from mpdist.env import environment, mask
from mpdist.errors import MachineError, UsageError
from mpdist.inputs import check_inputs
from mpdist.lines import dump, read_json, write_atomic
from mpdist.lock import holder
from mpdist.plan import make
from mpdist.record import STOP, reachable, standing
from mpdist.supervise import say

if TYPE_CHECKING:
    from mpdist.config import Resolved

SCRIPT = "slurm/train.sbatch"
CONFIG = "config.yaml"
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
          "TIMEOUT")  # fmt: skip
_OF_THE_SITE = ("SLURM_CONF", "SLURM_CLUSTERS")


@dataclass(frozen=True)
class Asked:
    """What a person gave: the configuration's path and overrides, as they stand. memory: of a rank, for the verdict."""

    config: str
    overrides: tuple[str, ...]
    memory: int | None = None


def run(resolved: Resolved, asked: Asked, dry_run: bool) -> int:
    """Submit a run to Slurm, or show what would be; the exit status. Raises UsageError, DoesNotFit or MachineError."""
    cfg = resolved.config
    if cfg.slurm.array is None:
        run_dir, mode = standing(resolved, {})
        if mode == "finished":
            say(f"{run_dir.path} is finished: nothing to do")
            say(f"to train on from its end: name=NEW checkpoint.resume={run_dir.path}, with a larger budget")
            return 0
    runs = _runs(resolved)
    if cfg.slurm.dependency is None:  # else it waits for what is there now
        _refuse_second(runs)
        _refuse_stopped(runs)
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
    kept = Path(os.path.abspath(cfg.out_dir)) / cfg.name / slurm.FOLDER
    cluster.check(resolved, gpus)
    where = f"{cfg.launch.nodes} node{'s' * (cfg.launch.nodes != 1)} x {_ranks(resolved, gpus)} ranks"
    if dry_run:
        command = arguments(resolved, _next(kept) / CONFIG)
        script = _script().removesuffix("\n")
        say(f"{where}; it would submit, in {os.getcwd()}:\n\n{shlex.join(command)}\n\n{SCRIPT}:\n\n{script}")
        return 0
    if not gpus and cfg.launch.device == "auto":
        say(
            "warning: no GPUs are asked for (slurm.gpus_per_node), so these are CPU ranks; launch.device=cpu says that it is meant"
        )
    place = _place(kept)
    job = _submit(arguments(resolved, place / CONFIG), resolved, place, runs)
    say(_told(job, where, resolved, asked))
    return 0


def arguments(resolved: Resolved, config: Path) -> list[str]:
    """sbatch and all that it is given; the script's own argument, the configuration that is kept, last."""
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
    return [*words, *ask.extra, str(shipped.root() / SCRIPT), str(config)]


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


def _runs(resolved: Resolved) -> dict[str, Path]:
    """The runs of the job by its array's index; by "" without an array."""
    cfg = resolved.config
    if cfg.slurm.array is None:
        return {"": Path(cfg.out_dir) / cfg.name}
    return {str(seed): Path(cfg.out_dir) / f"{cfg.name}-seed{seed}" for seed in seeds(cfg.slurm.array)}


def _refuse_second(runs: dict[str, Path]) -> None:
    """Raises UsageError where a job of the same run waits or runs, as far as Slurm can be asked."""
    for run in runs.values():
        for job in _jobs(run):
            known = slurm.ask("job", job) or {}
            state = known.get("JobState", "COMPLETED")
            if state in _ENDED or not known.get("UserId", f"({os.getuid()})").endswith(f"({os.getuid()})"):
                continue
            job = slurm.full_name(job, known, {})  # the last task's own number is the whole array's
            raise UsageError(
                f"{run} is the run of job {job}, which is {state}",
                "a second job of the same run would find its directory in use, or go on behind it",
                f"wait for it, end it (scancel {job}), or queue behind it: --dependency=afterany:{job}",
            )


def _jobs(run: Path) -> Iterator[str]:
    """The jobs that a run was submitted as, newest first, and the one that holds its directory."""
    for path in sorted((run / slurm.FOLDER).glob("*/submission.json"), reverse=True):
        kept = read_json(path) or {}
        job, task = kept.get("job"), kept.get("task", "")
        if job and task is not None:  # None: of an array, whose runs have their own
            yield f"{job}_{task}" if task else str(job)
    held = (holder(run) or {}).get("slurm")
    if held:
        yield str(held[0])


def _refuse_stopped(runs: dict[str, Path]) -> None:
    found = [run / STOP for run in runs.values() if (run / STOP).exists()]
    if found:
        raise UsageError(
            f"{found[0]} is there{f', and {len(found) - 1} others like it' * (len(found) > 1)}",
            "the run would stop as soon as it has started",
            shlex.join(["rm", *map(str, found)]),
        )


def _submit(command: Sequence[str], resolved: Resolved, kept: Path, runs: dict[str, Path]) -> str:
    """The job's id, with all that was submitted kept. Raises MachineError where sbatch refuses.

    kept: the folder of this submission; of an array, each run has one of its own beside.
    """
    if shutil.which("sbatch") is None:
        _take_back([kept])
        raise MachineError(
            "sbatch is not in PATH",
            "this machine submits nothing to Slurm",
            "go to a login node; --dry-run works anywhere",
        )
    what = {
        "time": time.time(),
        "host": platform.node(),
        "folder": os.getcwd(),
        "arguments": [mask(word) for word in command],
        "variables": environment()["variables"],
    }
    places: dict[Path, str | None] = {kept: None}
    try:
        for seed, run in runs.items():
            places[_place(run / slurm.FOLDER) if seed else kept] = seed
        for place, task in places.items():
            write_atomic(place / "train.sbatch", _script())
            write_atomic(place / CONFIG, resolved.to_yaml())
            write_atomic(place / "submission.json", dump({**what, "task": task, "job": None}, indent=1) + "\n")
    except MachineError:  # a full disk
        _take_back(places)
        raise
    done = subprocess.run(
        list(command),
        env=_variables(),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        _take_back(places)
        raise MachineError(
            f"sbatch refuses: {done.stderr.strip() or f'status {done.returncode}'}", "", "nothing was submitted"
        )
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)
    job = done.stdout.strip().partition(";")[0]
    for place, task in places.items():
        write_atomic(place / "submission.json", dump({**what, "task": task, "job": job}, indent=1) + "\n")
        if task:  # so that a pattern finds the log before the task has started
            (place.parent / f"{job}_{task}.log").touch()
    return job


def _variables() -> dict[str, str]:
    """What sbatch hands on to the job: this mpdist first in PATH, active or not, and nothing of a job that submits it.

    Slurm replaces only what it sets anew: an array's index, or how often that job was queued again, would stay.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    inside = "SLURM_JOB_ID" in os.environ
    kept = {k: v for k, v in os.environ.items() if not (inside and k.startswith("SLURM_") and k not in _OF_THE_SITE)}
    return {**kept, "PATH": path}


def _take_back(places: Iterable[Path]) -> None:
    for place in places:
        shutil.rmtree(place)
        for folder in (place.parent, place.parent.parent):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def _next(folder: Path) -> Path:
    """The first number that is free there."""
    return next(folder / f"{n:04d}" for n in itertools.count(1) if not (folder / f"{n:04d}").exists())


def _place(folder: Path) -> Path:
    with reachable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            place = _next(folder)
            with contextlib.suppress(FileExistsError):  # another submission was quicker
                place.mkdir()
                return place


def _told(job: str, where: str, resolved: Resolved, asked: Asked) -> str:
    cfg, count = resolved.config, len(_runs(resolved))
    signs = {"%%": "%", "%j": job, "%A": job, "%a": "\0"}
    log = log_pattern(Path(cfg.out_dir), cfg.name, cfg.slurm.array is not None)
    log = _quoted(log if "\\" in log else re.sub("%[%jAa]", lambda m: signs[m[0]], log))
    run = str(Path(cfg.out_dir) / cfg.name)
    stop = f"touch {shlex.quote(f'{run}/{STOP}')}"
    if cfg.slurm.array is not None:
        stop = f'for d in {shlex.quote(f"{run}-seed")}*; do touch "$d/{STOP}"; done'
    again = shlex.join(["mpdist", "submit", asked.config, *asked.overrides])
    lines = (
        f"submitted job {job}: {where}{f', {count} seeds' if count > 1 else ''}",
        f"  watch:   squeue --job={job}; tail -F {log}",
        f"  stop:    {stop}",
        f"           saves and ends; scancel {job} leaves it KillWait seconds to save",
        f"  resume:  by itself after a time limit or a preemption (slurm.requeues = {cfg.slurm.requeues}); else",
        f"           {again}",
    )
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """For a shell, in which each NUL is to be any text."""
    return "*".join(shlex.quote(part) if part else "" for part in text.split("\0"))
