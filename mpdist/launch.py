"""Start a run on this node: plan, check, freeze the run directory, run torchrun as a child, return the run's status.

torch is never imported here, so that a mistake costs a fraction of a second. torchrun turns every end into status 1;
`status.json` is the truth, and where no rank could write it, the launcher does, naming the rank that failed first.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdist import blame, hang, hub, slurm, space, stacks, watch
from mpdist.errors import DoesNotFit, MachineError, UsageError
from mpdist.inputs import check_inputs
from mpdist.place import Place, check_machine, device_memory, find_place, host_memory, origin_of, with_free_port
from mpdist.supervise import Child, Heard, listening, say
from mpdist.units import format_bytes

if TYPE_CHECKING:
    from mpdist.config import Resolved
    from mpdist.plan import Plan
    from mpdist.record import RunDir

_OTHER_NODES_S = 10.0  # for what other nodes' launchers have to say about their ranks
_SILENT_S = 4.0  # torchrun says within a second that a rank has failed, and nothing of one that left with success
_ENDS = {"done": 0, "preempted": 75, "diverged": 5}


def run(
    resolved: Resolved,
    *,
    ranks: int | None = None,
    nodes: int | None = None,
    node_rank: int | None = None,
    dry_run: bool = False,
    memory_bytes: int | None = None,
    worker: Sequence[str] = ("-m", "mpdist"),
    heard: list[Heard] | None = None,
    look: Callable[[], None] | None = None,
) -> int:
    """Launch a run and wait for its end; the exit status that its status.json records.

    ranks, nodes: as launch.ranks and launch.nodes, which they replace; ranks are per node. node_rank: this node's
    number where there are several (default: Slurm's, else 0). memory_bytes: a rank's, for the plan's verdict (default:
    what the GPUs have). worker: what torchrun starts, the config's path follows. heard: the stop signals of a caller
    that is listening itself; one that is there already stops the run at its first step. look: called again and again
    while the ranks run.
    Raises UsageError, DoesNotFit or MachineError before anything is started. Main thread only.
    """
    place = find_place(resolved, ranks, nodes, node_rank, os.environ)
    if not dry_run and _is_finished(resolved, place):
        return 0
    plan = _plan(resolved, place, memory_bytes)
    if dry_run:
        print(describe(resolved, plan, place, worker))
        plan.require_fit()
        return 0
    if place.node_rank == 0:  # many nodes share one log
        say(plan.text())
    _require(resolved, place, plan)
    if warning := space.check(resolved, plan.saves):
        say(f"warning: {warning}")
    if place.node_rank:
        return _follow(resolved, place, worker, heard)
    from mpdist.record import open_run

    run_dir, mode = open_run(resolved, plan.to_json())
    try:
        # Before the run is on record as running, so that its end will be.
        with listening() if heard is None else contextlib.nullcontext(heard) as signals:
            return _lead(run_dir, mode, place, worker, resolved.config.launch.timeout, signals, look)
    finally:
        run_dir.release()


def early_ears() -> contextlib.AbstractContextManager[list[Heard] | None]:
    """For `heard` of `run`: in a step of Slurm's, which warns once, perhaps while the plan is made; else None."""
    return listening() if slurm.task(os.environ) else contextlib.nullcontext(None)


def foresee(resolved: Resolved, ranks: int | None = None) -> Plan:
    """The plan of a run on one node, with everything refused that `run` would refuse, but for a run directory that is
    there and a full disk. Touches nothing."""
    place = find_place(resolved, ranks, None, None, os.environ)
    plan = _plan(resolved, place, None)
    _require(resolved, place, plan)
    return plan


def _require(resolved: Resolved, place: Place, plan: Plan) -> None:
    plan.require_fit()
    check_machine(resolved, place)
    _check_host(plan, resolved, place)
    check_inputs(resolved)
    hub.check(resolved.config, weights=not place.node_rank)


def _is_finished(resolved: Resolved, place: Place) -> bool:
    """Whether nothing is left to do; said here, before anything that the run no longer needs is asked for.

    Raises UsageError where the directory refuses this run. On other nodes than the first it may be in the making.
    """
    from mpdist.record import RunDir, standing

    cfg = resolved.config
    if place.node_rank and not RunDir(Path(cfg.out_dir) / cfg.name).config_path.exists():
        return False
    run_dir, mode = standing(resolved, {"ranks": place.ranks * place.nodes, "nodes": place.nodes})
    if mode == "finished":
        say(f"{run_dir.path} is finished: nothing to do")
    return mode == "finished"


def _plan(resolved: Resolved, place: Place, memory: int | None) -> Plan:
    from mpdist import arch
    from mpdist.plan import make

    model = resolved.config.model
    shape = arch.look(model.path, model.config, model.revision)
    if memory is None and place.device == "cuda":
        memory = device_memory()
    return make(resolved.config, shape, place.ranks, place.nodes, memory, origin_of(resolved), place.device)


def _check_host(plan: Plan, resolved: Resolved, place: Place) -> None:
    """CPU ranks share the host's memory, and may not be what was meant. Raises DoesNotFit for what cannot be held."""
    if place.device != "cpu":
        return
    if resolved.config.launch.device == "auto":
        say("warning: no GPU is visible on this node, so these are CPU ranks; launch.device=cpu says that it is meant")
    memory = host_memory()
    if plan.states_bytes is None or memory is None:
        return
    whole = place.ranks * plan.states_bytes
    if whole > memory:
        raise DoesNotFit(
            f"the states of {place.ranks} CPU ranks need {format_bytes(whole)}, and this host has {format_bytes(memory)}",
            f"each holds {format_bytes(plan.states_bytes)} of parameters, gradients and moments, in host memory",
            "run it where there are GPUs, on more nodes, or with a smaller model",
        )


def _lead(
    run_dir: RunDir,
    mode: str,
    place: Place,
    worker: Sequence[str],
    timeout: float,
    heard: list[Heard],
    look: Callable[[], None] | None,
) -> int:
    """The node of rank 0: it owns the run directory."""
    from mpdist.env import environment
    from mpdist.record import STOP

    place = with_free_port(place)
    command = torchrun(place, worker, run_dir.config_path, timeout)
    ranks = place.ranks * place.nodes
    env = environment(torchrun=command, omp_num_threads=place.threads, ranks=ranks, nodes=place.nodes)
    session = run_dir.start_session(env)
    run_dir.status(state="running")
    folder = run_dir.session_path()
    say(f"{'resuming' if mode == 'resume' else 'running'} in {run_dir.path}, session {session}")
    say(f"OMP_NUM_THREADS={place.threads} ({place.threads_why})")
    if (run_dir.path / STOP).exists():
        say(f"warning: {run_dir.path / STOP} is there: this session will stop after its first step")
    variables = {**os.environ, "OMP_NUM_THREADS": str(place.threads), watch.SESSION: str(session)}
    child = Child(command, variables, folder / "logs" / "torchrun.log", heard, timeout, _noting(run_dir))

    def where() -> Path:
        if look is not None:
            look()
        if run_dir.taken_over:
            child.end_at_once()
        if place.nodes > 1:
            _tell_deaths(child, folder)
        return folder

    with slurm.meeting_at(place.port, run_dir.path, place.task):
        status = child.run(where)
    if run_dir.taken_over:  # what is on record from here on is the later start's
        what = f"{run_dir.path} was taken over by a later start of this Slurm job"
        raise MachineError(
            what, "Slurm has lost this node, which lives on", "nothing: this start has ended all its ranks"
        )
    return _conclude(run_dir, child, status)


def _follow(resolved: Resolved, place: Place, worker: Sequence[str], heard: list[Heard] | None) -> int:
    """Any other node: it waits for the first one to have frozen the run, and takes part in its session."""
    from mpdist.lock import holder
    from mpdist.record import RunDir

    cfg = resolved.config
    run_dir = RunDir(Path(cfg.out_dir) / cfg.name, rank=place.node_rank * place.ranks)
    if place.task is not None:
        place = replace(place, port=slurm.called_port(run_dir.path, place.task, cfg.launch.timeout))
    deadline = time.monotonic() + cfg.launch.timeout
    while not (run_dir.config_path.exists() and holder(run_dir.path)):
        if time.monotonic() > deadline:
            raise MachineError(
                f"node {place.node_rank} waited {cfg.launch.timeout:.0f} s for {run_dir.config_path}",
                "node 0 has not started this run, or the nodes do not share out_dir",
                "start node 0, and set out_dir to a folder that all nodes see",
            )
        time.sleep(0.5)
    _check_same(resolved, run_dir.config_path)
    env = {**os.environ, "OMP_NUM_THREADS": str(place.threads)}
    env.pop(watch.SESSION, None)
    say(f"node {place.node_rank} of {place.nodes}: joining {run_dir.path}, OMP_NUM_THREADS={place.threads}")
    command = torchrun(place, worker, run_dir.config_path, cfg.launch.timeout)
    log = run_dir.path / f".torchrun-{place.node_rank:04d}.log"
    with listening() if heard is None else contextlib.nullcontext(heard) as signals:
        child = Child(command, env, log, signals, cfg.launch.timeout, _noting(run_dir))

        def where() -> Path | None:
            if session := _own_session(run_dir, child.token):
                _tell_deaths(child, session)
            return session

        status = child.run(where)
        if session := _own_session(run_dir, child.token):
            run_dir.session = int(session.name)
            kept = session / "logs" / f"torchrun-{place.node_rank:04d}.log"
            shutil.move(log, kept)
            child.log = kept
        return _conclude(run_dir, child, status)


def _noting(run_dir: RunDir) -> Callable[[Path, hang.Finding], None]:
    """What a child does with a finding: it becomes an event of the run."""

    def note(session: Path, found: hang.Finding) -> None:
        run_dir.session = int(session.name)
        with contextlib.suppress(MachineError, OSError):  # a full disk is not this one's to report
            run_dir.event("finding", found.step, found.attempt, found.rank, found.reason)

    return note


def _check_same(resolved: Resolved, frozen: Path) -> None:
    """This node trains by the run's frozen configuration: what its own command asks for otherwise would be lost."""
    from mpdist.config import leaves, load

    there, here = dict(leaves(load(frozen).values())), dict(leaves(resolved.values()))
    keys = sorted(key for key in there.keys() | here.keys() if not key.startswith("launch.") and key != "out_dir")
    odd = [
        f"{key} = {there.get(key)} there and {here.get(key)} here" for key in keys if there.get(key) != here.get(key)
    ]
    if odd:
        raise UsageError(
            f"this node asks for another run than {frozen}: {'; '.join(odd[:5])}",
            "all nodes of a run train by the configuration of node 0",
            "give the same configuration and overrides on every node",
        )


def _own_session(run_dir: RunDir, token: str) -> Path | None:
    """The session in which a process that this launcher has started reports as a rank."""
    last = run_dir.last_session()
    for number in range(last, max(last - 3, 0), -1):
        for report in watch.read_reports(run_dir.session_path(number)).values():
            if report.here and report.launch == token:
                return run_dir.session_path(number)
    return None


# -- what ----------------------------------------------------------------------------------------------------------


def torchrun(place: Place, worker: Sequence[str], config: Path, timeout: float) -> list[str]:
    """The child's argument list. No restarts: a run is launched again and resumes by itself.

    A stop that reaches torchrun itself may take the start-up time limit for its save, not torchrun's 30 s.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(place.ranks)]
    command += ["--nnodes", str(place.nodes), "--max-restarts", "0"]
    if place.nodes == 1:
        # The address is given, since a host need not find itself by its own name, and then would ask for it for minutes.
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{place.port}", "--local-addr", "127.0.0.1"]
        command += ["--rdzv-conf", "is_host=1"] if place.port else []
    else:
        command += ["--node-rank", str(place.node_rank), "--master-addr", str(place.address)]
        command += ["--master-port", str(place.port), "--rdzv-conf", f"timeout={math.ceil(timeout)}"]
    command += ["--shutdown-timeout", str(math.ceil(timeout))]
    command += ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    return [*command, *worker, str(config)]


def describe(resolved: Resolved, plan: Plan, place: Place, worker: Sequence[str]) -> str:
    """All that a dry run prints."""
    import shlex

    cfg = resolved.config
    room = space.look(resolved, plan.saves)
    lines = [resolved.to_text(), "", plan.text(), room.line]
    lines += [f"           it would be refused: {room.error.what}"] if room.error else []
    lines += [f"           warning: {room.warning}"] if room.warning else []
    lines.append("")
    where = f"{place.nodes} node{'s' * (place.nodes != 1)} x {place.ranks} ranks"
    if place.nodes > 1:
        where += f"; this is node {place.node_rank}; first host {place.address}, port {place.port}"
    elif place.first_host:
        where += f"; first host {place.first_host}"
    lines.append(f"world: {where}")
    lines += [f"       it would be refused: {place.unfound.what}"] if place.unfound else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "(not set)" if visible is None else visible
    for local in range(place.ranks):
        rank = place.node_rank * place.ranks + local
        lines.append(
            f"rank {rank}: LOCAL_RANK={local} CUDA_VISIBLE_DEVICES={shown} OMP_NUM_THREADS={place.threads}"
            f" ({place.threads_why})"
        )
    config = Path(os.path.abspath(Path(cfg.out_dir) / cfg.name)) / "config.yaml"
    lines += ["", "command:", shlex.join(torchrun(place, worker, config, cfg.launch.timeout))]
    return "\n".join(lines)


# -- how it ended --------------------------------------------------------------------------------------------------


def _conclude(run_dir: RunDir, child: Child, torchrun_status: int) -> int:
    """Read how the run ended, record it where no rank could, tell the user last of all; the exit status."""
    status = run_dir.read_status() or {}
    if status.get("state") in _ENDS:
        return _said(run_dir, status, child)
    here = [r for r in child.reports.values() if child.mine(r)]
    if run_dir.rank and here and all(r.proper for r in here):  # rank 0 is about to record the end, on its node
        return max(int((r.end or {})["status"]) for r in here)
    log = watch.read_text_tail(child.log)
    if child.hard is not None:
        reason = f"ended at once by a second {signal.Signals(child.hard).name}"
        failure = blame.Failure(None, reason, reason, 128 + child.hard)
    elif child.hung is not None:
        finding, why = child.hung
        known = blame.rehearsed(child.reports, run_dir.events_path, run_dir.session)
        failure = blame.stood_still(known, why, finding)
    else:
        found = _first_failure(run_dir, child, blame.Agent.read(log))
        ended = next((number for number in child.heard if number != signal.SIGUSR1), None)
        failure = found or _unexplained(status, torchrun_status, log, None if child.reports else ended)
    written = _as_written(status, failure)
    failure = written or failure
    report = child.reports.get(-1 if failure.rank is None else failure.rank)
    unrecorded = ""
    if run_dir.rank == 0 or (report is not None and child.mine(report)):
        run_dir.last_words()
        try:
            if written is None:
                _record(run_dir, status, failure, report)
            run_dir.close()
        except MachineError as error:  # the last thing read is why the run failed, not why that is not on record
            unrecorded = f"{error.what}\n"
    own = child.log.with_name(f"rank-{failure.rank:05d}.log") if report is not None else child.log
    text = failure.text
    if failure.rank is not None and report is None:  # it could not even say who it is
        text = f"{blame.before_agent(log)}\n{text}"
    sys.stdout.flush()
    where = f" (rank {failure.rank} was on {report.host})" if report is not None and not child.mine(report) else ""
    said = f"{unrecorded}the run failed{where}; logs in {own.parent}, the one to read: {own.name}\n{text}"
    print(said, file=sys.stderr, flush=True)
    return failure.exit


def _tell_deaths(child: Child, folder: Path) -> None:
    """Write down at once, for the other nodes' launchers, how ranks of this one have ended that could not say so."""
    for rank, when in child.deaths.items():
        report = child.reports[rank]
        if report.failure or report.end:
            continue
        agent = blame.Agent.read(watch.read_text_tail(child.log))
        code = agent.code(report.pid)
        if code is None and time.time() - when > _SILENT_S:
            code = 0
        if code is not None and report.pid not in agent.closed:
            watch.record_death(folder, rank, when, code)


def _first_failure(run_dir: RunDir, child: Child, agent: blame.Agent) -> blame.Failure | None:
    """As mpdist.blame has it; with several nodes, what only this one knows is written down for the others."""
    reports, folder = child.reports, run_dir.session_path()
    if all(child.mine(report) for report in reports.values()):
        return _blamed(run_dir, child, agent)
    for rank, when in child.deaths.items():
        report = reports[rank]
        if not report.failure and not report.end and report.pid not in agent.closed:
            watch.record_death(folder, rank, when, agent.code(report.pid))
    deadline = time.monotonic() + _OTHER_NODES_S
    while time.monotonic() < deadline:
        reports = watch.read_reports(folder)
        if all(child.mine(r) or r.failure or r.end for r in reports.values()):
            break
        time.sleep(0.2)
    child.reports = reports
    return _blamed(run_dir, child, agent)


def _blamed(run_dir: RunDir, child: Child, agent: blame.Agent) -> blame.Failure | None:
    session = run_dir.session_path()
    reports = blame.rehearsed(child.reports, run_dir.events_path, run_dir.session)
    known = {
        rank: blame.spoken_for(report, child.deaths.get(rank), agent.code(report.pid), stacks.log_tail(session, rank))
        for rank, report in reports.items()
    }
    return blame.first_failure(known, child.deaths, agent, hang.find(session, known))


def _as_written(status: Mapping[str, Any], failure: blame.Failure) -> blame.Failure | None:
    """The failure as the first rank's own, where it met the same one and has written this end itself; else None.

    What all ranks meet alike is the first failure of whichever came first, and has one end and one rank all the same.
    """
    rank = status.get("rank")
    said = (status.get("state"), status.get("exit"), str(status.get("reason")).partition("\n")[0])
    if rank is None or said != ("failed", failure.exit, failure.reason.partition("\n")[0]):
        return None
    text = failure.text.replace(f"rank {failure.rank} failed: ", f"rank {rank} failed: ", 1)
    return replace(failure, rank=rank, text=text)


def _record(run_dir: RunDir, status: Mapping[str, Any], failure: blame.Failure, report: watch.Report | None) -> None:
    """Write a failure into status.json and events.jsonl, at the step where its rank was, if it has said so."""
    step, attempt = status.get("step") or 0, status.get("attempt") or 0
    if report is not None and report.step is not None:
        step, attempt = max(step, report.step), max(attempt, report.attempt or 0)
    run_dir.status(
        state="failed", step=step, attempt=attempt, rank=failure.rank, reason=failure.reason, exit=failure.exit
    )
    run_dir.event("end", step, attempt, failure.rank, failure.reason, state="failed", exit=failure.exit)


def _unexplained(status: Mapping[str, Any], torchrun_status: int, log: str, ended: int | None) -> blame.Failure:
    """ended: the signal that came before any rank, if one did; Slurm sends it to torchrun too, which is no rank's failure."""
    if status.get("state") == "failed" and status.get("exit"):
        reason = str(status.get("reason"))
        return blame.Failure(status.get("rank"), reason, reason, int(status["exit"]))
    busy = "EADDRINUSE" in log or "Address already in use" in log
    met = re.search(r"(\d+)/(\d+) clients joined", log)
    if met:
        reason = f"only {met[1]} of {met[2]} nodes came to the meeting point within launch.timeout"
        text = f"{reason}\n  do:  start `mpdist launch` on every node (--node-rank 0 to {int(met[2]) - 1}), or raise launch.timeout"
        return blame.Failure(None, reason, text, MachineError.status)
    reason = f"torchrun ended with status {torchrun_status} and no rank has said why"
    if ended is not None and not busy:
        reason = f"ended by {signal.Signals(ended).name} before any rank had begun"
        return blame.Failure(None, reason, reason, 128 + ended)
    if busy:
        reason = "the rendezvous port was taken while torchrun started"
    text = f"{blame.before_agent(log)}\n{reason}".lstrip()
    return blame.Failure(None, reason, text, MachineError.status if busy else 1)


def _said(run_dir: RunDir, status: Mapping[str, Any], child: Child) -> int:
    """The run itself has recorded its end; a message for what was not simply done."""
    state, step = status["state"], status.get("step")
    late = [r for r in child.reports.values() if r.failure and not r.failure["lost_peer"]]
    for report in late if state != "diverged" else []:
        message = (report.failure or {})["message"]
        print(f"warning: after the run was {state}, rank {report.rank} failed: {message}", file=sys.stderr, flush=True)
    code = status.get("exit")
    code = _ENDS[state] if code is None else int(code)
    if run_dir.rank and slurm.task(os.environ) and state != "diverged":
        return code  # the first node's launcher says it, in the same log
    if state == "preempted":
        say(f"stopped early at step {step}, everything is saved; launch again to go on")
    elif state == "diverged":
        text = (late[0].failure or {})["message"] if late else status.get("reason")
        print(f"diverged at step {step}: {text}", file=sys.stderr, flush=True)
    else:
        say(f"done: {run_dir.path}")
    return code
