"""How long ranks may stand still, and which one is named."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mpdist.hang import Watchdog, grace, judge, named
from mpdist.stacks import Place
from mpdist.watch import Report

REDUCE, GATHER = (
    "all_reduce in train.exchange (mpdist/train.py:133)",
    "all_gather in train.attempt (mpdist/train.py:94)",
)


class Clocked:
    """A watchdog that is looked at every half second."""

    def __init__(self, timeout: float) -> None:
        self.dog, self.now, self.beat = Watchdog(timeout), 1000.0, 0
        self.due: list[tuple[str, float]] = []

    def stand(self, seconds: float, **doing: str) -> list[tuple[str, float]]:
        """Nothing moves for so long; what became due, and after how many seconds. r0="train": what rank 0 does."""
        beats = {int(name[1:]): (self.beat, word) for name, word in doing.items()}
        due = []
        for tick in range(int(seconds * 2) + 1):
            self.now += 0.5
            if verdict := self.dog.look(self.now, beats):
                due.append((verdict, tick / 2))
        self.beat += 1
        return due


def test_a_notice_then_the_end() -> None:
    assert Clocked(600).stand(700, r0="train", r1="train") == [("notice", 60.0), ("end", 660.0)]
    assert Clocked(600).stand(700, r0="eval") == [("notice", 60.0), ("end", 660.0)]
    assert Clocked(12).stand(100, r0="data", r1="train") == [("notice", 6.0), ("end", 17.0)]


@pytest.mark.parametrize("word", ["start", "load", "compile", "save", "end"])
def test_what_takes_as_long_as_it_takes_is_noticed_late_and_never_ended(word: str) -> None:
    assert Clocked(600).stand(5000, r0="train", r1=word) == [("notice", 300.0)]
    assert Clocked(12).stand(1000, r0=word) == [("notice", 60.0)]


def test_after_a_movement_all_begins_anew() -> None:
    ranks = Clocked(600)
    assert ranks.stand(100, r0="train", r1="train") == [("notice", 60.0)]
    for _ in range(100):
        assert ranks.stand(1, r0="train", r1="train") == []
    # The pause was ten times less than what is now taken for usual, but no more than half the timeout.
    assert ranks.stand(700, r0="train", r1="train") == [("notice", 300.0), ("end", 660.0)]


def test_slow_windows_are_no_hang() -> None:
    ranks = Clocked(6000)
    ranks.stand(20, r0="train")
    assert ranks.stand(250, r0="train") == [("notice", 205.0)], "ten times the longest pause"
    ranks = Clocked(6000)
    ranks.stand(200, r0="load")
    assert ranks.stand(100, r0="train") == [("notice", 60.0)], "loading says nothing of windows"


def test_one_rank_that_moves_is_enough() -> None:
    dog = Watchdog(12)
    assert not any(dog.look(float(now), {0: (5, "train"), 1: (now, "train")}) for now in range(1000))
    assert not any(dog.look(1000.0 + now, {}) for now in range(1000)), "nor is there a hang without ranks"


def test_time_in_which_the_launcher_itself_was_suspended_does_not_count() -> None:
    dog = Watchdog(600)
    beats = {0: (1, "train")}
    for now in (0.0, 0.5, 3600.0, 3600.5):
        assert dog.look(now, beats) is None
    assert dog.still == 6.0


def test_the_grace_lets_the_ranks_own_timeouts_come_first() -> None:
    assert [grace(timeout) for timeout in (1, 60, 300, 600, 7200)] == [5, 6, 30, 60, 60]


# -- who -----------------------------------------------------------------------------------------------------------


def ranks(**attempts: int) -> dict[int, Report]:
    found = {int(name[1:]): attempt for name, attempt in attempts.items()}
    return {r: Report(r, 100 + r, "vm", "1", step=a - 1, attempt=a, doing="train", beat=9) for r, a in found.items()}


def where(**texts: str) -> Mapping[int, Place]:
    kinds = {"waits": "waits", "device": "device", "mute": "mute"}
    return {
        int(name[1:]): Place(kinds.get(text.partition(" ")[0], "here"), text.partition(" ")[2])  # type: ignore[arg-type]
        for name, text in texts.items()
    }


def test_the_rank_that_does_not_wait_did_not_arrive() -> None:
    found = judge(where(r0=f"waits {REDUCE}", r1="at drill.strike (mpdist/drill.py:73)"), ranks(r0=3, r1=3))
    assert found is not None
    assert (found.rank, found.step, found.attempt, found.apart) == (1, 2, 3, False)
    assert found.reason == (
        f"rank 1 did not arrive (attempt 3, train): rank 1 in drill.strike (mpdist/drill.py:73), rank 0 waiting in {REDUCE}"
    )


def test_many_ranks_are_named_by_their_place() -> None:
    texts = {f"r{r}": f"waits {REDUCE}" for r in (0, 1, 2, 4, 6)} | {"r3": "at feed.make (mpdist/feed.py:70)"}
    found = judge(where(**texts, r5=f"waits {GATHER}"), ranks(**{f"r{r}": 3 for r in range(8)}))
    assert found is not None
    assert (found.rank, found.apart) == (3, False)
    assert found.where == (
        f"rank 3 in feed.make (mpdist/feed.py:70), ranks 0-2, 4, 6 waiting in {REDUCE}, rank 5 waiting in {GATHER}"
    )
    assert named([5]) == "rank 5"


def test_a_rank_alone() -> None:
    found = judge(where(r0="at drill.strike (mpdist/drill.py:73)"), ranks(r0=3))
    assert found is not None
    assert found.reason == "rank 0 does not move (attempt 3, train): rank 0 in drill.strike (mpdist/drill.py:73)"
    found = judge(where(r0="device train.exchange (mpdist/train.py:134)"), ranks(r0=3))
    assert found is not None
    assert found.where == "rank 0 waiting for the device in train.exchange (mpdist/train.py:134)"
    assert judge({}, ranks(r0=3)) is None


def test_different_collectives_are_a_mismatch() -> None:
    found = judge(where(r0=f"waits {REDUCE}", r1=f"waits {GATHER}"), ranks(r0=3, r1=3))
    assert found is not None
    assert (found.rank, found.apart) == (None, True)
    assert found.reason == (
        f"the ranks wait in different collectives (attempt 3, train): rank 0 waiting in {REDUCE}, rank 1 waiting in {GATHER}"
    )
    found = judge(where(r0=f"waits {REDUCE}", r1=f"waits {GATHER}", r2=f"waits {REDUCE}"), ranks(r0=3, r1=3, r2=3))
    assert found is not None
    assert found.rank == 1, "one against all others"
    found = judge(where(r0=f"waits {REDUCE}", r1=f"waits {GATHER}"), ranks(r0=3, r1=4))
    assert found is not None
    assert found.rank == 0, "an attempt behind"


def test_all_in_one_collective_wait_for_another_node() -> None:
    found = judge(where(r0=f"waits {REDUCE}", r1=f"waits {REDUCE}"), ranks(r0=3, r1=3, r2=3))
    assert found is not None
    assert (found.rank, found.apart) == (None, False)
    assert found.reason == (
        f"the ranks of this node wait in one collective (attempt 3, train): ranks 0-1 waiting in {REDUCE}"
    )


def test_a_process_that_is_stopped_comes_before_one_that_is_somewhere() -> None:
    found = judge(where(r0="at x.py", r1="mute does not answer"), ranks(r0=3, r1=3))
    assert found is not None
    assert found.rank == 1
    found = judge(where(r0="at x.py", r1="at y.py"), ranks(r0=3, r1=3))
    assert found is not None
    assert found.rank is None
    assert found.reason.startswith("no rank moves (attempt 3, train): rank 0 in x.py")
