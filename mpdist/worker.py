"""One rank from its first line to its exit status: it takes its seat in the run, trains, and says how it ended.

Nothing here imports torch before the rank is on record, so that a launcher can name a rank that dies while importing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdist import watch
from mpdist.errors import Diverged, MpdistError
from mpdist.record import RunDir

if TYPE_CHECKING:
    from mpdist.config import Resolved
    from mpdist.world import World


class Seat:
    """This rank's place in the run directory. `run` may still be another process's to create."""

    def __init__(self, resolved: Resolved, world: World) -> None:
        config = resolved.config
        self.run = RunDir(Path(config.out_dir) / config.name, rank=world.rank)
        self.world = world
        self.stop = watch.Stop()
        self.record: watch.Rank | None = None

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

    def at(self, step: int, attempt: int) -> None:
        if self.record is not None:
            self.record.at(step, attempt)


def main(resolved: Resolved, world: World) -> int:
    """The exit status of this rank; see mpdist.errors."""
    seat = Seat(resolved, world)
    if seat.given_session is not None:
        seat.take(seat.given_session)
    seat.stop.listen(seat.record)
    try:
        from mpdist import train

        return train.run(resolved, seat)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # some of torch's errors lie outside Exception
        return _failed(seat, error)


def _failed(seat: Seat, error: BaseException) -> int:
    status = error.status if isinstance(error, MpdistError) else 1
    if seat.record is not None:
        seat.record.failed(error)
    elif seat.world.is_first:
        print(error, file=sys.stderr)
    # Where another rank is the cause, the launcher, which sees all of them, says so in status.json.
    if seat.world.is_first and seat.run.session and not (watch.lost_peer(error) and watch.LAUNCH in os.environ):
        state: dict[str, Any] = {"state": "diverged" if status == Diverged.status else "failed", "exit": status}
        seat.run.status(**state, reason=str(error), rank=seat.world.rank)
        seat.run.event("end", reason=str(error))
    # Other ranks may wait in a collective for this one: no farewell that could block.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
