"""One rank from its first line to its exit status: it takes its seat in the run, trains, and says how it ended.

Nothing here imports torch before the rank is on record, so that a launcher can name a rank that dies while importing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mpdist import blame, hub, interface, slurm, watch
from mpdist.errors import Diverged, MachineError, MpdistError
from mpdist.lines import no_room
from mpdist.record import STOP, RunDir

if TYPE_CHECKING:
    from mpdist.config import Resolved
    from mpdist.world import World

_CAUSE_S = 2.0  # for the end of a lost rank to show


class Seat:
    """This rank's place in the run directory. `run` may still be another process's to create."""

    def __init__(self, resolved: Resolved, world: World) -> None:
        config = resolved.config
        self.run = RunDir(Path(config.out_dir) / config.name, rank=world.rank)
        self.world = world
        self.stop = watch.Stop()
        self.record: watch.Rank | None = None
        self.step = self.attempt = 0

    @property
    def given_session(self) -> int | None:
        """The session that the launcher has started for its ranks, if there is a launcher."""
        text = os.environ.get(watch.SESSION)
        return int(text) if text else None

    def take(self, session: int) -> None:
        """From here on the launcher, or a reader of the run directory, knows this process."""
        if self.record is None:
            self.run.session = session
            self.record = watch.report_rank(self.run.path, session, self.world.rank)
            watch.open_log(self.run.path, session, self.world.rank)

    @property
    def asked_to_stop(self) -> str | None:
        """Who asked this rank to stop: a signal, or a file `STOP` in the run directory (rank 0 looks for it)."""
        if self.stop.asked is None and self.world.is_first and (self.run.path / STOP).exists():
            return f"the file {STOP}"
        return self.stop.asked

    def at(self, step: int, attempt: int, doing: str) -> None:
        self.step, self.attempt = step, attempt
        if self.record is not None:
            self.record.at(step, attempt, doing)

    def doing(self, word: str) -> None:
        """What this rank turns to, for whoever watches it; see watch.Rank."""
        if self.record is not None:
            self.record.doing(word)

    def beat(self) -> None:
        if self.record is not None:
            self.record.beat()


def main(resolved: Resolved, world: World) -> NoReturn:
    """Ends this process with the exit status of its rank; see mpdist.errors."""
    seat = Seat(resolved, world)
    try:
        if seat.given_session is not None:
            seat.take(seat.given_session)
        seat.stop.listen(seat.record)
        hub.settle(resolved.config, weights=world.is_first)
        with _meeting(resolved, seat):
            from mpdist import train

            status = train.run(resolved, seat)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # some of torch's errors lie outside Exception
        status = _failed(seat, _expected(seat, error))
    spare_restarts(status)
    # No farewell: it takes the interpreter a second, and after a failure others may wait in a collective for this rank.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def spare_restarts(status: int) -> None:
    """Under a torchrun with --max-restarts: have it end where another start of the ranks would end no better.

    What is left to restart is a crash and a machine's fault: not a refusal, a divergence, nor a stop with all saved.
    """
    env = os.environ
    left = env.get("TORCHELASTIC_RESTART_COUNT", "0") != env.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if left and "TORCHELASTIC_RUN_ID" in env and status not in (0, 1, MachineError.status):
        os.kill(os.getppid(), signal.SIGTERM)


@contextlib.contextmanager
def _meeting(resolved: Resolved, seat: Seat) -> Iterator[None]:
    """What torch and its backends read from the environment, where no torchrun has set it or the host's name misleads."""
    world, task, env = seat.world, slurm.task(os.environ), os.environ
    called: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if task is not None and world.source == "srun" and world.ranks > 1:
        timeout = resolved.config.launch.timeout
        env["MASTER_ADDR"] = slurm.first_address(task, world.address)
        if world.port is None and world.is_first:
            port = slurm.free_port(task)
            called = slurm.meeting_at(port, seat.run.path, task)
        else:
            port = world.port or slurm.called_port(seat.run.path, task, timeout)
        env["MASTER_PORT"] = str(port)
        own = {"RANK": world.rank, "WORLD_SIZE": world.ranks, "LOCAL_RANK": world.local_rank}
        env.update({name: str(value) for name, value in own.items()}, LOCAL_WORLD_SIZE=str(world.local_ranks))
    if world.nodes > 1:
        interface.choose(env, [*(task.hosts if task else ()), env.get("MASTER_ADDR", "")])
    with called:
        yield


def _expected(seat: Seat, error: BaseException) -> BaseException:
    """A full disk is nobody's bug, whoever meets it."""
    if isinstance(error, MpdistError) or not no_room(error):
        return error
    what = f"{getattr(error, 'filename', None) or seat.run.path}: {getattr(error, 'strerror', None) or error}"
    return MachineError(what, do="make room and launch again; the run goes on from its last checkpoint")


def _failed(seat: Seat, error: BaseException) -> int:
    seat.run.last_words()
    status = error.status if isinstance(error, MpdistError) else 1
    if seat.record is not None:
        seat.record.failed(error)
    else:
        _say(seat.world.rank, error)
    if seat.world.is_first and seat.run.session:
        if not watch.lost_peer(error):
            _record(seat, _own(seat, error, status))
        elif watch.LAUNCH not in os.environ:  # else the launcher, which sees all ranks, says who was the cause
            failure = _cause(seat) or _own(seat, error, status)
            _record(seat, failure)
            watch.tell(failure.text)
    return status


def _say(rank: int, error: BaseException) -> None:
    """Print an error from before this rank had a record. What all ranks meet alike is rank 0's to print."""
    if not isinstance(error, MpdistError):
        traceback.print_exception(error)
        print(f"rank {rank} failed: {type(error).__name__}: {error}", file=sys.stderr)
    elif rank == 0:
        print(error, file=sys.stderr)
    elif isinstance(error, MachineError) and not error.shared:
        print(f"rank {rank}: {error.what if watch.lost_peer(error) else error}", file=sys.stderr)


def _own(seat: Seat, error: BaseException, status: int) -> blame.Failure:
    head = str(error) if isinstance(error, MpdistError) else f"{type(error).__name__}: {error}"
    rank = error.rank if isinstance(error, Diverged) else None  # all ranks end alike, and one of them was the cause
    return blame.Failure(seat.world.rank if rank is None else rank, head, head, status)


def _record(seat: Seat, failure: blame.Failure) -> None:
    state = "diverged" if failure.exit == Diverged.status else "failed"
    last = seat.run.read_status() or {}
    step, attempt = max(seat.step, last.get("step") or 0), max(seat.attempt, last.get("attempt") or 0)
    where: dict[str, Any] = {"step": step, "attempt": attempt, "rank": failure.rank, "reason": failure.reason}
    seat.run.status(state=state, exit=failure.exit, **where)
    seat.run.event("end", state=state, exit=failure.exit, **where)


def _cause(seat: Seat) -> blame.Failure | None:
    """Which rank this one has lost, and how, as far as the ranks' own records and this machine's processes say."""
    deadline = time.monotonic() + _CAUSE_S
    while True:
        reports = watch.read_reports(seat.run.session_path())
        gone = {rank: time.time() for rank, report in reports.items() if not report.alive}
        causes = [r for r in reports.values() if (not r.failure["lost_peer"] if r.failure else r.rank in gone)]
        if causes or time.monotonic() > deadline:
            known = blame.rehearsed(reports, seat.run.events_path, seat.run.session)
            failure = blame.first_failure(known, gone, blame.Agent())
            if failure is None or failure.rank not in reports:
                return failure
            trace = (reports[failure.rank].failure or {}).get("trace", "")
            return replace(failure, text=failure.text.removeprefix(trace))  # its rank has printed that itself
        time.sleep(0.05)
