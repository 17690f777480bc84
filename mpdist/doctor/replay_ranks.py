"""The ranks of a replay: the run's own set-up and loop, in a directory of their own, up to the step that was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpdist import restore, resume, train
from mpdist.dist import on_first, stop
from mpdist.doctor.replay import Wanted
from mpdist.drill import Drill
from mpdist.errors import UsageError
from mpdist.feed import Batch
from mpdist.outcome import Outcome, Progressed
from mpdist.record import RunDir
from mpdist.session import Session
from mpdist.worker import Seat

if TYPE_CHECKING:
    from mpdist.config import Resolved
    from mpdist.plan import Plan
    from mpdist.world import World

_NUMBERS = ("overflow_at", "nan_loss_at")  # rehearsed faults that belong to their attempts


class _Reached(Exception):
    """The step has been made."""


class _Seat(Seat):
    """A place in no run: no record, no log of its own."""

    def __init__(self, resolved: Resolved, world: World, folder: Path) -> None:
        super().__init__(resolved, world)
        self.run = RunDir(folder, rank=world.rank)

    def take(self, session: int) -> None:
        self.run.session = session

    @property
    def asked_to_stop(self) -> str | None:
        return None


class _Again(Session):
    """The run's session, which begins at a given checkpoint, writes nothing, and ends behind a given step."""

    def __init__(self, wanted: Wanted, seat: Seat) -> None:
        super().__init__(wanted.resolved, seat)
        self.wanted = wanted
        self.rows: list[dict[str, Any]] = []

    def open_directory(self, plan: Plan) -> tuple[int, str]:
        return self.run.start_session(), "new"

    def get_ready(self, mode: str) -> None:
        super().get_ready(mode)
        device = self.parts.facts["device"]
        if device != self.wanted.env.get("device"):
            raise UsageError(f"mpdist doctor --replay {self.wanted.run} {self.wanted.step}",
                             f"the run had the device {self.wanted.env.get('device')} and here it is {device}",
                             "replay it on the same kind of device")  # fmt: skip
        faults = {n: v for n, v in self.cfg.drill.model_dump(exclude_none=True).items() if n in _NUMBERS}
        self.drill = Drill(faults, self.rank, [], lambda *_: None)
        self.measure.due = False
        if self.parts.seconds is not None:  # this machine's speed is not to end it
            self.parts.seconds = float("inf")

    def resume(self, mode: str) -> None:
        wanted, parts = self.wanted, self.parts
        if wanted.checkpoint is None:
            if self.cfg.checkpoint.resume not in ("auto", "never"):  # it began at a checkpoint of another run
                super().resume(mode)
            self._begin_alike()
            return
        found = restore.open_checked(wanted.checkpoint, restore.fault_together)
        resume.check_data(found, parts.facts["data"])
        restore.load(found, parts.engine, parts.optimizer, parts.module)
        parts.window.load(found.state["window_state"])
        self.count = Progressed(**{**found.state["count"], "fired": []})
        self.saved_step, self.damaged = found.step, set()

    def _begin_alike(self) -> None:
        """Collective. Raises UsageError where the beginning is not the run's: another model in its place, or other data."""
        from mpdist import fingerprint

        first = on_first(lambda: _begun(self.wanted))
        for key, value in fingerprint.facts(self.parts.engine, self.parts.feed).items():
            if first.get(key) not in (None, value):
                raise UsageError(f"mpdist doctor --replay {self.wanted.run} {self.wanted.step}",
                                 f"it has no checkpoint before that step, and what it began with is no longer here: {key}"
                                 " differs", "put the model and the data back, or ask for a step behind a checkpoint")  # fmt: skip
        self.damaged = set()

    # -- what a session does beside its steps -------------------------------------------------------------------

    def say(self, text: str) -> None: ...

    def progress_shown(self) -> Any:
        return None

    def write(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def evaluates(self, last: bool) -> bool:
        return False

    def save(self, final: bool = False) -> None: ...

    def skipped(self, out: Outcome, batch: Batch, again: Any) -> None: ...

    def log(self, out: Outcome, last: bool) -> None:
        super().log(out, last)
        if self.parts.window.step >= self.wanted.step:
            raise _Reached


def _begun(wanted: Wanted) -> dict[str, Any]:
    from mpdist.lines import read_json

    return read_json(RunDir(wanted.run).session_path(1) / "env.json") or {}


def run(wanted: Wanted, world: World, folder: Path) -> list[dict[str, Any]]:
    """Collective. The rows of the steps computed again; rank 0 has them. folder: for what a session leaves, to be removed."""
    if world.ranks == 1 and wanted.env.get("threads"):
        torch.set_num_threads(int(wanted.env["threads"]))
    session = _Again(wanted, _Seat(wanted.resolved, world, folder))
    try:
        session.set_up()
        train.loop(session)
    except _Reached:
        dist.barrier()
    finally:
        if hasattr(session, "parts"):
            session.parts.feed.close()
        stop()
    return session.rows
