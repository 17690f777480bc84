"""When ranks stand still: how long that may last, and which rank is the one that did not arrive.

A rank says what it is doing whenever it turns to something else, and now and then while it is at it (mpdist.watch);
each time is a beat. `Watchdog` counts how long no rank of a node has given one. A launcher takes notice first, which ends
nothing, since a slow file system is no hang. Later it ends the run, if nothing excuses the ranks. `find` says who is where.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpdist.stacks import Place, place_of
from mpdist.watch import Report

_WINDOWED = frozenset(
    ("train", "data", "eval")
)  # what gives a beat again and again; all else takes as long as it takes
_NOTICE_S = 60.0
_NOTICE_GAPS = 10  # or so many times the longest pause seen, where that is more
_GRACE_S = (5.0, 60.0)  # after launch.timeout: the ranks' own timeouts come first, and name a lost connection too
_LOOK_S = 5.0  # a launcher that did not look for longer was itself suspended, as its ranks may have been
_GROUPS = 4  # places named in one sentence

Beats = Mapping[int, tuple[int | None, str | None]]  # by rank: number of the last beat, and what the rank was doing


class Watchdog:
    """timeout: launch.timeout. `look` is to be called often, with this node's living ranks."""

    def __init__(self, timeout: float) -> None:
        self.still = 0.0  # seconds for which no rank has moved
        self._timeout = timeout
        self._longest = 0.0  # pause between beats in windows so far
        self._looked: float | None = None
        self._beats: dict[int, tuple[int | None, str | None]] = {}
        self.noticed = False  # whether a notice or the end has been due since
        self._ended = False

    def look(self, now: float, beats: Beats) -> Literal["notice", "end"] | None:
        """What is due now, each once for as long as nothing moves. now: monotonic seconds."""
        since = 0.0 if self._looked is None else min(now - self._looked, _LOOK_S)
        self._looked = now
        if not beats or dict(beats) != self._beats:
            if self._in_windows(self._beats):
                self._longest = max(self._longest, self.still + since)
            self._beats, self.still, self.noticed, self._ended = dict(beats), 0.0, False, False
            return None
        self.still += since
        windows = self._in_windows(beats)
        if not self._ended and windows and self.still >= self._timeout + grace(self._timeout):
            self.noticed = self._ended = True
            return "end"
        if not self.noticed and self.still >= self._notice_after(windows):
            self.noticed = True
            return "notice"
        return None

    def _in_windows(self, beats: Beats) -> bool:
        return bool(beats) and all(doing in _WINDOWED for _, doing in beats.values())

    def _notice_after(self, windows: bool) -> float:
        if not windows:
            return max(_NOTICE_S, self._timeout / 2)
        return min(max(_NOTICE_S, _NOTICE_GAPS * self._longest), self._timeout / 2)


def grace(timeout: float) -> float:
    """Seconds that ranks have beyond launch.timeout."""
    return min(max(timeout / 10, _GRACE_S[0]), _GRACE_S[1])


@dataclass(frozen=True)
class Finding:
    """rank: the one that did not arrive, None if the stacks do not say. head: who that is. where: who is where, one
    line. stacks: of the rank, for a person. apart: all wait, but in different collectives."""

    rank: int | None
    step: int
    attempt: int
    head: str
    where: str
    stacks: str
    apart: bool = False

    @property
    def reason(self) -> str:
        return f"{self.head}: {self.where}"


def find(session: Path, reports: Mapping[int, Report]) -> Finding | None:
    """The ranks of which it is known where they stand, put together; None if that is none."""
    places = {rank: place_of(session, report) for rank, report in reports.items() if not report.end}
    return judge({rank: place for rank, place in places.items() if place is not None}, reports)


def judge(places: Mapping[int, Place], reports: Mapping[int, Report]) -> Finding | None:
    """As `find`, of given places."""
    if not places:
        return None
    rank = _culprit(places, reports)
    far = reports[_furthest_behind(list(places), reports) if rank is None else rank]
    groups = _groups(places, rank)
    shown = [rank] if rank is not None else [ranks[0] for ranks in groups[:2]]
    stacks = "\n".join(text for r in shown if (text := places[r].shown(r)))
    said = [f"{named(ranks)} {places[ranks[0]].described()}" for ranks in groups[:_GROUPS]]
    said += [f"others in {len(groups) - _GROUPS} more places"] if len(groups) > _GROUPS else []
    apart = len(groups) > 1 and all(place.kind == "waits" for place in places.values())
    head = _head(rank, places, apart, any(r not in places and not reports[r].end for r in reports))
    return Finding(rank, far.step or 0, far.attempt or 0, f"{head} ({at(far)})", ", ".join(said), stacks, apart)


def _culprit(places: Mapping[int, Place], reports: Mapping[int, Report]) -> int | None:
    stuck = [rank for rank, place in places.items() if place.kind == "mute"]
    stuck = stuck or [rank for rank, place in places.items() if place.kind == "here"]
    if stuck and (len(stuck) < len(places) or len(stuck) == 1):
        return _furthest_behind(stuck, reports)
    # All wait for each other, or none does: whoever is an attempt behind the others has left them waiting.
    slowest = _furthest_behind(list(places), reports)
    ahead = [_attempt(reports[rank]) > _attempt(reports[slowest]) for rank in places if rank != slowest]
    if ahead and all(ahead):
        return slowest
    groups = sorted(_groups(places, None), key=len)
    alone = len(groups) == 2 and len(groups[0]) == 1 < len(groups[1])
    return groups[0][0] if alone else None


def _furthest_behind(ranks: list[int], reports: Mapping[int, Report]) -> int:
    return min(ranks, key=lambda rank: (_attempt(reports[rank]), rank))


def _attempt(report: Report) -> int:
    return -1 if report.attempt is None else report.attempt


def _groups(places: Mapping[int, Place], first: int | None) -> list[list[int]]:
    """Ranks that stand at the same place; the one of rank `first` leads."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(places, key=lambda rank: (rank != first, rank)):
        groups.setdefault((places[rank].kind, places[rank].text), []).append(rank)
    return list(groups.values())


def _head(rank: int | None, places: Mapping[int, Place], apart: bool, more: bool) -> str:
    if rank is not None:
        return f"rank {rank} {'did not arrive' if len(places) > 1 else 'does not move'}"
    whose = "of this node " if more else ""
    if all(place.kind == "waits" for place in places.values()):
        return f"the ranks {whose}wait in {'different collectives' if apart else 'one collective'}"
    return f"no rank {whose}moves"


def at(report: Report) -> str:
    """`attempt 3, train`"""
    where = "before the first attempt" if report.attempt is None else f"attempt {report.attempt}"
    return f"{where}, {report.doing}" if report.doing else where


def named(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`"""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join("-".join(map(str, span)) for span in spans)
