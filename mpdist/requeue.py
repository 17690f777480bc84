"""The end of a Slurm job: whether it is queued again, and with which status the batch script leaves.

The run's own record decides, not srun's status, which is the highest of its tasks'. A job is queued again only if the
session that it ran was stopped with everything saved, or a node of it is gone; Slurm has no other plans for it (a cancelled
job is one), and the run's budget of requeues, which is kept with the run, is not spent. Slurm queues it again by itself only
where it has missed the node before the ranks there were missed: not where a node crashes and starts again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdist import slurm, watch
from mpdist.errors import DoesNotFit, MachineError, MpdistError, Preempted, UsageError
from mpdist.lines import dump, read_json, write_atomic
from mpdist.lock import holder, refusal
from mpdist.record import RunDir, standing
from mpdist.sweep_file import NAME as SWEEP

if TYPE_CHECKING:
    from mpdist.config import Resolved

NAME = "requeues.json"
_REFUSED = (UsageError.status, DoesNotFit.status)
_LOST = "lost "  # how the reason begins where nodes were
_SIGNALS = 128  # from this exit status on, a signal ended srun's worst task
_STATUS = {"done": 0, "preempted": Preempted.status, "diverged": 5, "failed": 1}


def run(resolved: Resolved, step_status: int) -> int:
    """Queue this job again if that is right; the exit status of its run, or `step_status` (srun's) where it left none.

    Raises UsageError outside of a job.
    """
    job = _job()
    run_dir = RunDir(Path(resolved.config.out_dir) / resolved.config.name)
    status = run_dir.read_status() or {}
    session = int(status.get("session") or 0)
    env = read_json(run_dir.session_path(session) / "env.json") or {}
    found = env.get("slurm") or {}
    if (found.get("job"), found.get("restart")) != (job["job"], job["restart"]):
        return _other(resolved, run_dir, job, found, step_status) if step_status else 0
    state, code = status.get("state"), status.get("exit")
    # A rank that raised has said so (status 1); one whose node is gone is killed or silent to the others, or to srun alone,
    # which ends the others by a signal, perhaps before any has begun.
    cut_short = state == "running" or (state == "failed" and (code == MachineError.status or (code or 0) > _SIGNALS))
    lost = slurm.lost(job["nodes"] or "", job["job"]) if cut_short else []
    if lost or state == "preempted":
        _say(_requeue(resolved, run_dir, status, job, lost))
    elif state == "running":
        _say(f"the run left no last word: its launcher was killed (srun's status is {step_status})")
    elif state != "done":
        _say(_why(run_dir, status))
    if state == "running":
        return step_status or 1
    return int(_STATUS[str(state)] if code is None else code)


def _other(
    resolved: Resolved, run_dir: RunDir, job: Mapping[str, Any], found: Mapping[str, Any], step_status: int
) -> int:
    """What stands there is another start's: this one was refused, or the configuration names another run by now."""
    if step_status in _REFUSED:  # the launcher's last words say why
        return step_status
    if step_status > _SIGNALS and (cause := _refusal(resolved, run_dir, job)):  # srun has ended the refused one's peers
        _say(f"job {job['job']} was refused, and is not queued again: {cause}")
        return cause.status
    if lost := slurm.lost(job["nodes"] or "", job["job"]):  # before the run had begun on all of them
        _say(_requeue(resolved, run_dir, run_dir.read_status() or {}, job, lost))
        return step_status
    last = f"the last one there is job {found['job']}, restart {found['restart']}" if found else "no job is"
    _say(
        f"job {job['job']} is not queued again: {resolved.path} names the run {run_dir.path}\n"
        f"  why: this start of the job (restart {job['restart']}) is not on record there: {last}; it ended before its run "
        "began, or the configuration was edited since\n"
        "  do:  if it was edited, put name and out_dir back and submit it again; it goes on from what was saved"
    )
    return step_status


def _refusal(resolved: Resolved, run_dir: RunDir, job: Mapping[str, Any]) -> MpdistError | None:
    """Why a launch of this run is refused now, as far as its directory says."""
    try:
        standing(resolved, {})
    except MpdistError as error:
        return error
    owner = holder(run_dir.path)
    return refusal(run_dir.path, owner) if owner and (owner.get("slurm") or [None])[0] != job["job"] else None


def unreadable(config: str, error: MpdistError, step_status: int) -> int:
    """As `run`, where the configuration no longer loads. Raises UsageError outside of a job."""
    job = _job()
    _say(
        f"{error}\n"
        f"mpdist: job {job['job']} is not queued again: {config} does not load any more (srun's status is {step_status}); "
        "mend it and submit it again to go on"
    )
    return step_status


def run_sweep(resolved: Resolved, step_status: int) -> int:
    """As `run`, for a job that ran `mpdist sweep`, whose own status is srun's. Raises UsageError outside of a job."""
    job = _job()
    folder = RunDir(Path(resolved.config.out_dir) / resolved.config.name)
    if step_status == Preempted.status and (folder.path / SWEEP).exists():
        runs = [read_json(path) or {} for path in folder.path.glob("*/status.json")]
        status = {key: sum(int(run.get(key) or 0) for run in runs) for key in ("step", "attempt")}
        last = max(runs, key=lambda run: float(run.get("updated") or 0), default={})
        _say(_requeue(resolved, folder, {**status, "reason": last.get("reason")}, job))
    return step_status


def _job() -> dict[str, Any]:
    job = slurm.session(os.environ)
    if job is None:
        raise UsageError(
            "mpdist requeue: SLURM_JOB_ID is not set",
            "it is for the end of a batch script, which runs in a job",
            "to go on with a stopped run, launch or submit it again",
        )
    return job


def _why(run_dir: RunDir, status: Mapping[str, Any]) -> str:
    """How a run ended badly, for the last lines of the job's log, which srun's own would be otherwise."""
    rank, where = status.get("rank"), f"at step {status.get('step')}"
    session = run_dir.session_path(int(status["session"]))
    text = f"the run {'has ' * (status['state'] == 'diverged')}{status['state']} {where}: {status.get('reason')}"
    if rank is None:
        return f"{text}\n  logs: {session / 'logs'}"
    host = (read_json(session / "ranks" / f"{rank:05d}.json") or {}).get("host", "an unknown host")
    return f"{text}\n  rank: {rank} on {host}, which has said more in {watch.log_of(session, rank)}"


def _requeue(
    resolved: Resolved, run_dir: RunDir, status: Mapping[str, Any], job: Mapping[str, Any], lost: Sequence[str] = ()
) -> str:
    """What was done, or why nothing was. lost: the nodes that ended the run, if any did."""
    cfg, step = resolved.config.slurm, status.get("step")
    reason, ended = str(status.get("reason")), f"stopped at step {step} with everything saved"
    if lost:
        reason = f"{_LOST}{', '.join(lost)}, which no longer answer{'s' * (len(lost) == 1)} or started anew"
        ended = "ended before its first step"
        if step:
            ended = f"stopped at step {step}, to go on from the last checkpoint"
    if reason.startswith("stopped by the file STOP"):
        return f"stopped at step {step} as asked ({reason}): not queued again"
    known = slurm.ask("job", job["job"])
    name = slurm.full_name(job["job"], known, os.environ)
    why = slurm.why_stopped(known, job["restart"], cfg.signal_lead) if known else None
    if why in (slurm.CANCELLED, slurm.QUEUED_AGAIN) or (known and known.get("JobState") != "RUNNING"):
        return f"stopped at step {step}: job {name} was {why or known.get('JobState') if known else why}"
    done = read(run_dir.path)
    if len(done) >= cfg.requeues:
        origin = resolved.origins.get("slurm.requeues", "config")
        return (
            f"{ended}, but not queued again: the run has used up its requeues\n"
            f"  why: slurm.requeues = {cfg.requeues} ({origin}), and {len(done)} are on record in {run_dir.path}\n"
            f"  do:  submit it again to go on; slurm.requeues={len(done) + 2} allows two more"
        )
    attempt = int(status.get("attempt") or 0)
    if why == slurm.TIME_LIMIT and done and done[-1]["attempt"] == attempt:
        return (
            f"stopped at step {step}, where the last start had stopped too: not queued again\n"
            "  why: the time limit left no time for one step\n"
            "  do:  submit it with a longer --time, or a shorter slurm.signal_lead"
        )
    if lost and done and done[-1]["attempt"] == attempt and str(done[-1]["why"]).startswith(_LOST):
        return (
            f"{ended}, where the last start had lost a node too: not queued again\n"
            f"  why: {reason}; before, the job had {done[-1]['why']}: what it does there may be what ends them\n"
            "  do:  look at those nodes' own logs, then submit it again to go on"
        )
    entry = {"job": job["job"], "restart": job["restart"], "step": step, "attempt": attempt, "time": time.time()}
    # First on record, then asked for: a kill in between costs one requeue, and never makes an endless row.
    path = run_dir.path / slurm.FOLDER / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, dump({"requeues": [*done, {**entry, "why": why or reason}]}, indent=1) + "\n")
    trouble = _ask_slurm(name)
    if trouble:
        write_atomic(path, dump({"requeues": done}, indent=1) + "\n")
        return f"{ended}, but Slurm does not queue job {name} again: {trouble}\n  do:  submit it again to go on"
    return (
        f"{ended} ({why or reason}): job {name} is queued again, "
        f"{len(done) + 1} of {cfg.requeues} times; it starts in some two minutes at the earliest"
    )


def read(run: Path) -> list[dict[str, Any]]:
    """The requeues of a run so far: job, restart, step, attempt, time, why."""
    found = (read_json(run / slurm.FOLDER / NAME) or {}).get("requeues", [])
    return [entry for entry in found if isinstance(entry, dict)]


def _ask_slurm(job: str) -> str | None:
    """What went wrong, if anything."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr or done.stdout).strip() or f"status {done.returncode}" if done.returncode else None


def _say(text: str) -> None:
    print(f"mpdist: {text}", file=sys.stderr, flush=True)
