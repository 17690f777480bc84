"""A scale's faults are found when they are there, once, and not in a scale that finds its place."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from mpdist.scale import FP16_MAX, Health, best_static


def told(
    outcomes: Iterable[bool], scale: float = 65536.0, floor: float = 1.0, interval: int = 2000, dynamic: bool = True,
    headroom: float | None = None, health: Health | None = None,
) -> dict[str, int]:  # fmt: skip
    """Finding -> the attempt that it was told at, for windows that overflow (False) or not, under GradScaler's rule."""
    health = health or Health(dynamic, floor)
    health.headroom = headroom
    found: dict[str, int] = {}
    step = skipped = good = 0
    for number, fits in enumerate(outcomes, 1):
        before = scale
        step, skipped, good = step + fits, skipped + (not fits), good + 1 if fits else 0
        if dynamic:
            if not fits:
                scale = max(scale / 2, floor)
            elif good == interval:
                scale, good = scale * 2, 0
        for finding in health.attempt(number, step, skipped, before, scale, not fits):
            assert finding.check not in found
            assert finding.level == "doubtful"
            assert finding.why
            assert finding.do
            found[finding.check] = number
    return found


def test_a_scale_that_finds_its_place_is_healthy() -> None:
    searching = [False] * 6 + [True] * 2000  # begins too high, and falls at once
    probing = searching + [False] + [True] * 2000 + [False] + [True] * 500  # grows, overflows, falls back
    assert told(probing, headroom=2.0) == {}


def test_each_fault_has_its_name() -> None:
    assert told([False] * 20 + [True] * 5) == {"scale at its floor": 16}
    assert told([True] * 20 + [False, True, True] * 5) == {"scale falls again and again": 33}
    assert told([True] * 150 + [False] + [True] * 200 + [False]) == {"overflow after the scale had settled": 151}
    assert told([True] * 1500, headroom=9.0) == {"scale too low to matter": 1000}
    assert told([True] * 1500, headroom=9.0, dynamic=False) == {"scale too low to matter": 1000}
    assert told([True] * 1500, headroom=3.0) == {}
    assert told([True] * 1500) == {}  # nobody has measured how much room there is
    assert told([True] * 1500, headroom=9.0, health=Health(True, 1.0, blocks=True)) == {}  # theirs is that of blocks


def test_what_was_told_before_a_resume_is_not_told_again() -> None:
    again = Health(True, 1.0, told={"scale at its floor"})
    assert told([False] * 20, health=again) == {}


def test_the_best_static_scale_leaves_room_to_what_was_seen() -> None:
    rows = [
        {"scale/value": 65536.0, "precision/headroom_overflow": 5.0},
        {"scale/value": 32768.0, "precision/headroom_overflow": 4.5},  # the largest gradient of the two, unscaled
        {"scale/value": 32768.0},
    ]
    best = best_static(rows, [])
    assert best is not None
    assert best.largest == pytest.approx(FP16_MAX / 2**4.5 / 32768)
    assert best.scale == 2.0 ** (15 + 4 - 3)
    assert best.scale * best.largest * 2**3 <= FP16_MAX < best.scale * best.largest * 2**4
    events = [{"event": "skip", "scale": 65536.0, "scale_after": 32768.0}, {"event": "skip", "scale": 1.0}]
    bounded = best_static(rows, events)
    assert bounded is not None
    assert (bounded.scale, bounded.overflowed) == (16384.0, 65536.0)
    assert "2^14 = 16384" in str(bounded)
    assert best_static([{"scale/value": 1.0}], events) is None
    assert best_static([{**row, "scale/block_max": 0.0} for row in rows], events) is None  # the room is that of blocks
