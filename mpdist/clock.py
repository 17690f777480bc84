"""Where a run's wall-clock goes: every nanosecond belongs to exactly one label.

A comparison at equal time is only fair if the clock is named. "Train" here means inside windows and nothing
else; evaluation, saving, waiting for data and so on have labels of their own. Sections are exclusive: one
that opens inside another pauses it. So the labels sum to the wall-clock exactly, and an arm that evaluates
more often does not look slower.

Time outside every section is `start`: start-up, and what little a session does between windows.

Across sessions the table goes on. A checkpoint holds the table of its moment; `status.json` holds the last
one known. When a run goes on from a checkpoint, work done after it is superseded: its time moves to `lost`.
The time in which nothing ran is `gap`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

LABELS: dict[str, str] = {
    "train": "inside windows: forward, backward, reduction, step",
    "eval": "evaluation",
    "save": "training stood still for a checkpoint",
    "load": "model and checkpoint loading",
    "compile": "compilation",
    "data": "waiting for data",
    "start": "start-up, and whatever is in no other section",
    "lost": "work superseded by a resume from an earlier checkpoint",
    "gap": "between sessions: nothing ran",
}
_SECTIONS = frozenset(LABELS) - {"lost", "gap"}
_NS = 1_000_000_000


class Clock:
    """Cumulative labelled time of a run. Belongs to one thread. Seconds are floats, kept as whole nanoseconds.

    `ns` is a monotonic clock and `unix` the time of day; tests inject both. Time of day only measures what no
    monotonic clock can: the gap between two processes.
    """

    def __init__(self, ns: Callable[[], int] = time.monotonic_ns, unix: Callable[[], float] = time.time) -> None:
        self._now, self._unix = ns, unix
        self._before = dict.fromkeys(LABELS, 0)
        self._here = dict.fromkeys(LABELS, 0)
        self._open = ["start"]
        self._last = ns()
        self._began_unix = unix()

    @contextmanager
    def __call__(self, label: str) -> Iterator[None]:
        """Count the enclosed time under `label`, pausing the section around it. Safe under exceptions."""
        if label not in _SECTIONS:
            raise ValueError(f"no section of time is called {label!r}; there are {', '.join(sorted(_SECTIONS))}")
        self._settle()
        self._open.append(label)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def backdate(self, unix: float) -> None:
        """The session began at this time of day, before this clock did: that time is start-up. Before `resume`."""
        self._here["start"] += max(0, int((self._began_unix - unix) * _NS))
        self._began_unix = min(self._began_unix, unix)

    def _settle(self) -> None:
        now = self._now()
        self._here[self._open[-1]] += now - self._last
        self._last = now

    def seconds(self, label: str, session: bool = False) -> float:
        """Seconds under `label` so far, over all sessions or in this one. The open section counts up to now."""
        self._settle()
        return (self._here[label] + (0 if session else self._before[label])) / _NS

    def table(self) -> dict[str, float]:
        """label -> cumulative seconds. The values sum to the wall-clock since the run's first start, gaps included."""
        self._settle()
        return {label: (self._before[label] + self._here[label]) / _NS for label in LABELS}

    def metrics(self) -> dict[str, float]:
        """The `time/...` figures of a logged row."""
        table = self.table()
        total = sum(self._before.values()) + sum(self._here.values()) - self._before["gap"]
        return {"time/train_s": table["train"], "time/total_s": total / _NS, "time/lost_s": table["lost"]}

    def resume(
        self,
        checkpoint: Mapping[str, float] | None,
        last: Mapping[str, float] | None,
        last_unix: float | None,
        alive_unix: float | None = None,
        superseded: bool = True,
    ) -> None:
        """Go on from earlier sessions. What this session has counted so far is kept.

        checkpoint: the table in the checkpoint loaded (None: from the beginning).
        last: the last table that the run wrote, and last_unix when (None: no record, then nothing is known to be lost).
        alive_unix: when the run last gave a sign of life, if later than last_unix; the time between is lost too.
        superseded: False if nothing was done after the checkpoint but to end; then `last` holds as it stands.
        """
        done = _whole(checkpoint)
        if last is None or last_unix is None:
            self._before = done
            return
        known = _whole(last)
        if not superseded:
            done = dict(known)
        else:
            done["gap"] = known["gap"]
            kept = sum(done[label] for label in done if label != "lost")
            done["lost"] = max(done["lost"], sum(known.values()) - kept)
        alive = max(last_unix, min(alive_unix or last_unix, self._began_unix))
        # A few hundred milliseconds of shutting down after the last record are not work that was lost.
        done["lost" if superseded else "start"] += int((alive - last_unix) * _NS)
        done["gap"] += max(0, int((self._began_unix - alive) * _NS))
        self._before = done


def _whole(table: Mapping[str, float] | None) -> dict[str, int]:
    return {label: round((table or {}).get(label, 0.0) * _NS) for label in LABELS}


@dataclass(frozen=True)
class Speed:
    """What was seen over a span of windows: `windows` of them, `tokens` real tokens, `seconds` of train time."""

    windows: int
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def step_s(self) -> float | None:
        return self.seconds / self.windows if self.windows else None


class Rate:
    """Speed in this session alone, over train time, without the first `warmup` windows.

    Counts are of this session, never cumulative ones of the run: tokens of ten windows over the time of five is the
    classic wrong rate after a resume. The figures are of real work: pass what was seen, not what was planned.

    The caller marks moments at which the device is known to be idle (it synchronised): a device that works ahead of
    its host makes any other moment meaningless. `wants(windows)` names the one moment outside the logged steps
    that is needed, the end of the warm-up.
    """

    def __init__(self, clock: Clock, warmup: int = 2) -> None:
        if warmup < 0:
            raise ValueError("warmup is a number of windows, 0 or more")
        self.warmup = warmup
        self._clock = clock
        self._base: tuple[int, int, float] | None = None
        self._last: tuple[int, int, float] | None = None
        if warmup == 0:
            self.mark(0, 0)

    def wants(self, windows: int) -> bool:
        """Whether a mark is needed after this session's window number `windows`, logged or not."""
        return windows == self.warmup

    def mark(self, windows: int, tokens: int) -> Speed | None:
        """The span since the mark before; None within the warm-up. Both counts are since the session began."""
        if windows < self.warmup:
            return None
        here = (windows, tokens, self._clock.seconds("train", session=True))
        span = _span(self._last, here) if self._last and windows > self._last[0] else None
        self._base = self._base or here
        self._last = here
        return span

    def session(self) -> Speed | None:
        """From the end of the warm-up to the last mark; None if there is nothing in between."""
        if self._base is None or self._last is None or self._last[0] == self._base[0]:
            return None
        return _span(self._base, self._last)


def _span(a: tuple[int, int, float], b: tuple[int, int, float]) -> Speed:
    return Speed(b[0] - a[0], b[1] - a[1], b[2] - a[2])
