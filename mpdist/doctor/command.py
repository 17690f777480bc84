"""The command: one process looks at its machine, or starts ranks as a launch would, and prints what they found."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpdist import blame, interface, slurm, watch
from mpdist.doctor import PATIENCE_S
from mpdist.env import environment
from mpdist.errors import MachineError, MpdistError, UsageError
from mpdist.findings import Finding, error_of, from_json, kind_of, table, to_paste
from mpdist.lines import dump, read_json, write_atomic
from mpdist.world import World, from_env

if TYPE_CHECKING:
    from mpdist.config import Resolved
    from mpdist.doctor.replay import Wanted
    from mpdist.place import Place

_MEETING = ".doctor"  # in out_dir: where the nodes of a Slurm step tell each other their port


def run(
    resolved: Resolved | None,
    *,
    ranks: int | None = None,
    nodes: int | None = None,
    node_rank: int | None = None,
    memory_bytes: int | None = None,
    as_json: bool = False,
    report: str | None = None,
    ops: bool = False,
    debug: int | None = None,
) -> int:
    """The exit status: 0, or that of the worst failed finding. Main thread only.

    ranks, nodes, node_rank: as for a launch. memory_bytes: of a rank, for the plan's verdict. report: where a rank writes
    what was found, for the process that has started it. A process that torchrun has started is a rank. ops: the operations
    of one training step by dtype, instead of links and speeds. debug: how many steps the debugging sequence takes in each
    precision; None leaves it out.
    """
    began = time.monotonic()
    if resolved is None:
        from mpdist.doctor import here

        return _tell(here.look(), as_json, began)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _rank(resolved, as_json, report, began, ops, debug)
    place = _place(resolved, ranks, nodes, node_rank)
    found = asked_of(resolved, place, memory_bytes) if place.node_rank == 0 else []
    if place.ranks * place.nodes == 1:
        from mpdist.doctor import examine, here

        alone = World(rank=0, ranks=1, local_rank=0, local_ranks=1, node=0, nodes=1, source="doctor")
        with _stdout_kept():
            seen = examine.run(resolved, alone, ops, debug)
        return _tell([*found, *here.described(), *seen], as_json, began)
    more = (*(("--ops",) if ops else ()), *(() if debug is None else ("--debug", "--steps", str(debug))))
    seen = _start(resolved, place, more=more)
    if place.node_rank:
        print(f"node {place.node_rank} of {place.nodes} has taken part: node 0 prints what was found", file=sys.stderr)
        return 0
    return _tell([*found, *seen], as_json, began)


def replay(run: str, step: int, *, as_json: bool = False, report: str | None = None) -> int:
    """As `run`, for a past step of a run: computed again and compared with its record. Main thread only."""
    from mpdist.doctor import replay

    began = time.monotonic()
    wanted = replay.look(run, step)
    env = replay.environment_of(wanted)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if report is None:
            raise UsageError(f"mpdist doctor --replay {run} {step}", "this process is a rank already, and it starts its own",
                             "call it outside of torchrun")  # fmt: skip
        return _replaying_rank(wanted, Path(report))  # with the environment that it was started with
    if wanted.ranks > 1:
        place = _place(wanted.resolved, wanted.ranks, 1, None)
        seen = _start(wanted.resolved, place, ("--replay", run, str(step)), variables=env)
        return _tell([*replay.passed_over(wanted), *seen], as_json, began)
    from mpdist.doctor import replay_ranks

    alone = World(rank=0, ranks=1, local_rank=0, local_ranks=1, node=0, nodes=1, source="doctor")
    with tempfile.TemporaryDirectory(prefix="mpdist-doctor-") as name, _stdout_kept(), _set(env):
        rows = replay_ranks.run(wanted, alone, Path(name) / "replay")
    return _tell([*replay.passed_over(wanted), *replay.compare(wanted, rows)], as_json, began)


@contextlib.contextmanager
def _set(env: Mapping[str, str]) -> Iterator[None]:
    kept = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _replaying_rank(wanted: Wanted, report: Path) -> int:
    from mpdist.doctor import replay, replay_ranks

    me = from_env(os.environ)
    assert me is not None
    with _stdout_kept():
        try:
            rows = replay_ranks.run(wanted, me, report.parent / "replay")
        except MpdistError as error:
            if me.local_rank == 0 or not error.shared:
                write_atomic(report, dump({"error": vars(error), "status": error.status}) + "\n")
            return error.status
    if me.is_first:
        found = replay.compare(wanted, rows)
        write_atomic(report, dump({"findings": [finding.to_json() for finding in found]}) + "\n")
    return 0


def asked_of(resolved: Resolved, place: Place, memory: int | None) -> list[Finding]:
    """What the configuration needs, beside what this node has."""
    from mpdist import arch, plan
    from mpdist.doctor import asked
    from mpdist.place import device_memory, origin_of

    cfg = resolved.config
    shape = arch.look(cfg.model.path, cfg.model.config, cfg.model.revision)
    if memory is None and place.device == "cuda":
        memory = device_memory()
    nodes = max(place.nodes, cfg.launch.nodes)
    made = plan.make(cfg, shape, place.ranks, nodes, memory, origin_of(resolved), place.device)
    return asked.look(resolved, made)


def _place(resolved: Resolved, ranks: int | None, nodes: int | None, node_rank: int | None) -> Place:
    """As a launch has it; but a configuration for several nodes is looked at on this one, if nobody says otherwise."""
    from mpdist.place import find_place

    task = slurm.task(os.environ)
    if task is None and nodes is None:
        nodes = 1
    place = find_place(resolved, ranks, nodes, node_rank, os.environ)
    if place.unfound:
        raise place.unfound
    return place


def _tell(found: Sequence[Finding], as_json: bool, began: float) -> int:
    from mpdist.config.write import block

    error = error_of(found)
    if as_json:
        rows = [finding.to_json() for finding in found]
        seconds = round(time.monotonic() - began, 2)
        print(dump({"findings": rows, "seconds": seconds, "machine": environment()}, indent=2))
    else:
        print(table(found))
        fragment = to_paste(found)
        if fragment:
            print(f"\nto paste into the configuration:\n\n{block(fragment)}", end="")
        failed, doubtful = (sum(f.level == level for f in found) for level in ("failed", "doubtful"))
        print(f"\n{failed} failed, {doubtful} doubtful, {len(found) - failed - doubtful} ok")
    return 0 if error is None else error.status


# -- ranks -----------------------------------------------------------------------------------------------------------


def _rank(resolved: Resolved, as_json: bool, report: str | None, began: float, ops: bool = False,
          debug: int | None = None) -> int:  # fmt: skip
    """One rank. The first one writes the report, or prints it where no other process waits for it."""
    me = from_env(os.environ)
    assert me is not None
    if me.nodes > 1:
        interface.choose(os.environ, [os.environ.get("MASTER_ADDR", "")])
    with _stdout_kept():
        from mpdist.doctor import asked, examine, here

        try:
            found = examine.run(resolved, me, ops, debug)
        except MpdistError as error:
            if report is not None and me.local_rank == 0:
                write_atomic(Path(report), dump({"error": vars(error), "status": error.status}) + "\n")
            if not error.shared:
                raise
            return error.status
        if me.is_first:
            own = [] if report is not None else asked.look(resolved, examine.plan_here(resolved, me))
            found = [*own, *here.described(), *found]
    if report is not None:
        if me.is_first:
            write_atomic(Path(report), dump({"findings": [finding.to_json() for finding in found]}) + "\n")
        return 0
    if me.is_first:
        return _tell(found, as_json, began)
    failed = error_of(found)
    return 0 if failed is None else failed.status


@contextlib.contextmanager
def _stdout_kept() -> Iterator[None]:
    """What libraries print goes to stderr: stdout is the report's, perhaps JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _start(resolved: Resolved, place: Place, instead: Sequence[str] = (), more: Sequence[str] = (),
           variables: Mapping[str, str] | None = None) -> list[Finding]:  # fmt: skip
    """Start this node's ranks under torchrun and wait for them; what they found, on node 0. Raises what ended them early.

    instead: words that take the configuration's place. more: options beside it. variables: of the ranks' environment.
    """
    from mpdist import launch
    from mpdist.place import with_free_port
    from mpdist.supervise import Child, listening

    timeout = resolved.config.launch.timeout if "--debug" in more else min(resolved.config.launch.timeout, PATIENCE_S)
    meeting = Path(resolved.config.out_dir).expanduser() / _MEETING
    with tempfile.TemporaryDirectory(prefix="mpdist-doctor-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        write_atomic(folder / "config.yaml", resolved.to_yaml())
        if place.task is not None and place.node_rank:
            place = replace(place, port=slurm.called_port(meeting, place.task, timeout))
        else:
            place = with_free_port(place)
            made = [path for path in (meeting, meeting.parent) if not path.exists()]
            stack.callback(_remove, made)
            stack.enter_context(slurm.meeting_at(place.port, meeting, place.task))
        worker = ("-m", "mpdist", "doctor", *instead, *more, "--report", str(folder / "report.json"))
        command = launch.torchrun(place, worker, folder / "config.yaml", timeout)
        command = command[:-1] if instead else command
        env = {**os.environ, "OMP_NUM_THREADS": str(place.threads), **(variables or {})}
        env.pop(watch.SESSION, None)
        heard = stack.enter_context(listening())
        child = Child(command, env, folder / "torchrun.log", heard, timeout, lambda *_: None)

        def asked_to_stop() -> None:
            if heard:  # nothing is to be saved
                raise KeyboardInterrupt

        status = child.run(asked_to_stop)
        told = read_json(folder / "report.json") or {}
        if status == 0 and (told or place.node_rank):
            return [from_json(row) for row in told.get("findings", [])]
        if "error" in told:
            why = told["error"]
            raise kind_of(told["status"])(why["what"], why["why"], why["do"])
        said = blame.before_agent(watch.read_text_tail(child.log)).strip()
    raise MachineError(
        "the ranks have not come to an end of the examination",
        said or f"torchrun ended with status {status} and no rank has said why",
        "what the ranks said is above; NCCL_DEBUG=INFO or TORCH_CPP_LOG_LEVEL=INFO lets the libraries say more",
    )


def _remove(folders: Sequence[Path]) -> None:
    """Those that have not been there before, and hold nothing."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def check_options(resolved: object, given: Sequence[str]) -> None:
    """Raises UsageError for options that belong to a configuration, where there is none, or to a launcher, in a rank."""
    if given and resolved is None:
        raise UsageError(
            f"mpdist doctor {given[0]}", "it says how to start a configuration's ranks", "give CONFIG with it"
        )
    if given and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise UsageError(f"mpdist doctor {given[0]}", "this process is a rank already: torchrun has set RANK and WORLD_SIZE",
                         "leave it out; torchrun says how many ranks there are")  # fmt: skip
