"""Advice: the settings that fit a memory, cheapest first, and the smallest changes that make a job fit.

Cheapest is: ddp before stage 1, 2 and 3 before offload. Within one of these it is the work that a step takes on top of the
model's own arithmetic (``plan_search.Search.cost``).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mpdist.plan_memory import MARGIN, Asked, Row
from mpdist.plan_search import KEYS, OFFLOAD, Search, overrides, with_values
from mpdist.units import format_bytes

MOST_RANKS = 2**16  # beyond it nobody is sent to look for more


@dataclass(frozen=True)
class Suggestion:
    """A change of settings, the peak that it gives, whether that fits, and whether by less than the estimate may be off."""

    change: str
    peak_bytes: int
    fits: bool
    is_close: bool = False

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "still too much"
        verdict += f", with less than {MARGIN:.0%} to spare" if self.is_close else ""
        return f"{self.change or 'as configured'}: peak {format_bytes(self.peak_bytes)}, {verdict}"


@dataclass(frozen=True)
class Candidate:
    """Settings that fit. changes: what differs from the configuration, by key; empty where nothing does.

    rows: the whole plan of memory. sent: bytes that a rank sends in a step. recompute: FLOPs of forward that are done once
    more in backward, as a share of forward's own.
    """

    asked: Asked
    changes: Mapping[str, str | int]
    peak_bytes: int
    is_close: bool  # fits, by less than the estimate may be off
    sent_within: int
    sent_between: int
    recompute: float
    rows: tuple[Row, ...]

    @property
    def change(self) -> str:
        """The changes as overrides of a command line."""
        return overrides(self.changes)

    @property
    def host_bytes(self) -> int:
        return sum(row.rest_bytes for row in self.rows if row.host)

    @property
    def settings(self) -> dict[str, str | int]:
        return {key: getattr(self.asked, field) for field, key in KEYS.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "change": self.change,
            "accumulation": self.asked.accumulation,
            "peak_bytes_per_rank": self.peak_bytes,
            "is_close": self.is_close,
            "host_bytes_per_rank": self.host_bytes,
            "host_bytes_per_node": self.host_bytes * self.asked.per_node,
            "sent_bytes_within": self.sent_within,
            "sent_bytes_between": self.sent_between,
            "recompute": self.recompute,
        }


@dataclass(frozen=True)
class MoreRanks:
    """The smallest multiple of the ranks there are on which the job fits, and the settings with which it does."""

    ranks: int
    nodes: int
    global_: int  # the batch that so many ranks can share out; the configured one where they divide it
    change: str
    peak_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "ranks": self.ranks,
            "nodes": self.nodes,
            "global": self.global_,
            "change": self.change,
            "peak_bytes_per_rank": self.peak_bytes,
        }

    def __str__(self) -> str:
        nodes = f" on {self.nodes} node{'s' * (self.nodes != 1)}"
        return f"{self.ranks} ranks{nodes} with {self.change}: peak {format_bytes(self.peak_bytes)}"


def advise(search: Search) -> tuple[list[Suggestion], MoreRanks | None]:
    """What to change, by whether the job fits as it is configured.

    It fits: the largest micro-batch that there is room for. It does not: the three smallest changes that make it fit; else
    what comes nearest, 16-bit compute where that is enough (which changes the numbers), and the ranks that it takes.
    """
    if search.fits(search.asked):
        larger = room(search)
        return [larger] if larger else [], None
    found = [_suggestion(search, one) for one in smallest(search)]
    if found:
        return found, None
    found = [nearest(search)]
    if search.asked.compute == "fp32":
        half = {"precision.compute": "bf16"}
        cfg, asked = with_values(search.cfg, half), replace(search.asked, compute="bf16")
        narrow = Search(cfg, asked, search.arch, search.memory)
        ways = [asked] if narrow.fits(asked) else smallest(narrow, 1)
        for way in (_suggestion(narrow, one) for one in ways):
            found.append(replace(way, change=f"{overrides(half)} {way.change}".rstrip()))
    return found, more_ranks(search)


def candidates(search: Search) -> list[Candidate]:
    """Settings that fit, cheapest first: of each level the cheapest, and where that fits by less than the estimate may be
    off, the cheapest that does not; and the configuration's own, or else the smallest changes that make it fit."""
    found = {search.asked} if search.fits(search.asked) else set(smallest(search))
    levels: dict[int, list[Asked]] = {}
    for layout in search.layouts:
        for micro in search.micros:
            least = search.least(replace(layout, micro=micro)) if micro <= search.asked.micro else None
            if least is not None:
                levels.setdefault(search.cost(least)[0], []).append(least)
    for level in levels.values():
        first = _cheapest(search, level)
        if first is not None and not search.fits(first, 1 - MARGIN):
            found.add(first)
            first = _cheapest(
                search, [one for one in (search.least(one, 1 - MARGIN) for one in level) if one is not None]
            )
        if first is not None:
            found.add(first)
    return [_candidate(search, one) for one in sorted(found, key=search.order)]


def _cheapest(search: Search, every: list[Asked]) -> Asked | None:
    return next((one for one in sorted(every, key=search.order) if search.allowed(one)), None)


def _candidate(search: Search, asked: Asked) -> Candidate:
    found = search.ledger(asked)
    close = found.peak_bytes > (1 - MARGIN) * search.memory
    recompute = search.recompute(asked.checkpointing)
    return Candidate(asked, search.settings(asked), found.peak_bytes, close, *search.sent(asked), recompute, found.rows)


def smallest(search: Search, count: int = 3) -> list[Asked]:
    """The changes of the fewest keys that make it fit, of as few the cheapest; different keys before other values of
    the same, and no key that is not needed."""
    key = search.memory, count
    if key in search.smallest:
        return search.smallest[key]
    kept: list[Asked] = []
    for keys in range(1, len(KEYS) + 1):
        kept += sorted(_fitting(search, keys), key=search.order)
        kept = [one for one in kept if not any(_beats(search, other, one) for other in kept)]
        if len(kept) >= count:
            break
    first = {frozenset(search.settings(one)): one for one in reversed(kept)}
    chosen = [one for one in kept if one in first.values()] + [one for one in kept if one not in first.values()]
    found = sorted(chosen[:count], key=lambda one: (len(search.settings(one)), search.order(one)))
    return search.smallest.setdefault(key, found)


def _suggestion(search: Search, asked: Asked) -> Suggestion:
    fits = search.fits(asked)
    return Suggestion(search.change(asked), search.peak(asked), fits, fits and not search.fits(asked, 1 - MARGIN))


def _beats(search: Search, one: Asked, other: Asked) -> bool:
    """Whether it needs no other keys, recomputes no more and cuts the micro-batch no smaller."""
    mine, others = search.settings(one).keys(), search.settings(other).keys()
    if not mine <= others or one == other:
        return False
    if search.recompute(one.checkpointing) > search.recompute(other.checkpointing) or one.micro < other.micro:
        return False
    return len(mine) < len(others) or search.order(one) < search.order(other)


def _fitting(search: Search, keys: int) -> Iterator[Asked]:
    """What fits and is allowed with so many keys changed, the cheapest values of each."""
    smaller = [m for m in search.micros if m < search.asked.micro]
    for layout in search.layouts:
        left = keys - len(search.settings(layout))
        tries: list[Asked | None] = []
        if left == 0:
            tries = [layout]
        elif left == 1:
            tries = [search.least(layout), *(replace(layout, micro=m) for m in smaller)]
        elif left == 2:
            tries = [search.least(replace(layout, micro=m)) for m in smaller]
        for one in tries:
            if one is not None and len(search.settings(one)) == keys and search.fits(one) and search.allowed(one):
                yield one


def nearest(search: Search) -> Suggestion:
    """The settings with the smallest peak, for a job that none makes fit."""
    best = search.asked
    every = [replace(layout, micro=m, checkpointing="full") for layout in search.layouts for m in search.micros]
    for one in sorted(every, key=search.floor):
        if search.floor(one) > search.peak(best):
            break
        if one.micro <= search.asked.micro and search.peak(one) <= search.peak(best) and search.allowed(one):
            best = min(best, one, key=lambda one: (search.peak(one), search.order(one)))
    return _suggestion(search, best)


def room(search: Search) -> Suggestion | None:
    """For a job that fits: the largest micro-batch that fits with the estimate's margin to spare."""
    for micro in search.micros:
        one = replace(search.asked, micro=micro)
        if micro > search.asked.micro and search.fits(one, 1 - MARGIN) and search.allowed(one):
            return _suggestion(search, one)
    return None


def more_ranks(search: Search) -> MoreRanks | None:
    """How many ranks it takes where nothing else helps; None where no number of them is enough."""
    most = MOST_RANKS // search.asked.ranks

    def enough(times: int) -> MoreRanks | None:
        return _on(search, times) if times <= most else None

    times = 2
    while enough(times) is None:
        if times > most:
            return None
        times *= 2
    first = bisect.bisect_left(range(times // 2 + 1, times), True, key=lambda n: enough(n) is not None)
    return enough(times // 2 + 1 + first)


def _on(search: Search, times: int) -> MoreRanks | None:
    """With the least memory on so many times the ranks, without offload where that is enough; None if nothing fits."""
    a = search.asked
    per_node = a.ranks // a.nodes
    nodes = 1 if a.nodes == 1 and per_node * times <= 8 else a.nodes * times
    ranks = a.ranks * times
    whole = -(-a.global_ // ranks) * ranks
    world = replace(a, ranks=ranks, nodes=nodes, global_=whole, micro=1)
    there = Search(search.cfg, world, search.arch, search.memory)
    sharded = [one for one in there.layouts if one.stage == 3 and one.replicas == 1 and one.loss_chunk == "auto"]
    for one in sorted(sharded, key=lambda one: (OFFLOAD.index(one.offload), one.when != "every")):
        lowest = replace(one, checkpointing="full")
        if there.fits(lowest):
            values = search.settings(lowest) | ({"batch.global": whole} if whole != a.global_ else {})
            return MoreRanks(ranks, nodes, whole, overrides(values), there.peak(lowest))
    return None
