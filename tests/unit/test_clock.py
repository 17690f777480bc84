"""Labelled time: exclusive sections, sums that are exact, and what a resume does to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpdist.clock import LABELS, Clock, Rate


class Hands:
    """A clock that moves when told."""

    def __init__(self, unix: float = 1000.0) -> None:
        self.elapsed = 0
        self.unix = unix

    def __call__(self) -> int:
        return self.elapsed

    def pass_(self, seconds: float) -> None:
        self.elapsed += round(seconds * 1e9)
        self.unix += seconds

    def clock(self) -> Clock:
        return Clock(self, lambda: self.unix)


def spend(hands: Hands, clock: Clock, **seconds: float) -> None:
    for label, amount in seconds.items():
        with clock(label):
            hands.pass_(amount)


def test_a_section_inside_another_pauses_it() -> None:
    hands = Hands()
    clock = hands.clock()
    hands.pass_(3)
    with clock("train"):
        hands.pass_(1)
        with clock("data"):
            hands.pass_(0.25)
            with clock("compile"):
                hands.pass_(5)
        hands.pass_(2)
    hands.pass_(0.5)
    table = clock.table()
    assert table["train"] == 3
    assert table["data"] == 0.25
    assert table["compile"] == 5
    assert table["start"] == 3.5, "time in no section is start-up's"


def test_the_open_section_counts_up_to_now() -> None:
    hands = Hands()
    clock = hands.clock()
    with clock("train"):
        hands.pass_(1)
        assert clock.seconds("train") == 1
        hands.pass_(1)
        assert clock.metrics()["time/train_s"] == 2


def test_an_exception_closes_its_sections() -> None:
    hands = Hands()
    clock = hands.clock()

    def fail() -> None:
        with clock("train"), clock("eval"):
            hands.pass_(1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    hands.pass_(7)
    assert clock.table()["eval"] == 1
    assert clock.table()["train"] == 0
    assert clock.table()["start"] == 7


@pytest.mark.parametrize("label", ["lost", "gap", "training", ""])
def test_only_known_sections_open(label: str) -> None:
    with pytest.raises(ValueError, match="no section of time"), Clock()(label):
        pass


def test_the_table_sums_to_the_wall_clock() -> None:
    hands = Hands()
    clock = hands.clock()
    for turn in range(1000):
        with clock("train"):
            hands.pass_(0.0123456789)
            with clock("data"):
                hands.pass_(0.001)
        if turn % 100 == 0:
            spend(hands, clock, eval=0.333333333, save=0.7)
    assert round(sum(clock.table().values()) * 1e9) == hands.elapsed
    assert set(clock.table()) == set(LABELS)


def test_a_real_clock_sums_too() -> None:
    clock = Clock()
    with clock("train"), clock("eval"):
        sum(range(10000))
    before = sum(clock.table().values())
    assert 0 < before <= sum(clock.table().values())
    assert clock.seconds("eval") > 0


def test_a_stop_and_resume_without_lost_work() -> None:
    hands = Hands()
    first = hands.clock()
    spend(hands, first, load=2, train=10, save=1)
    checkpoint = first.table()
    spend(hands, first, save=0.5)
    last, last_unix = first.table(), hands.unix
    hands.pass_(100)
    second = hands.clock()
    spend(hands, second, load=4)
    second.resume(checkpoint, last, last_unix, alive_unix=last_unix + 0.25, superseded=False)
    spend(hands, second, train=5)
    table = second.table()
    assert table["train"] == 15
    assert table["load"] == 6
    assert table["save"] == 1.5
    assert table["lost"] == 0
    assert table["gap"] == pytest.approx(99.75)
    assert table["start"] == pytest.approx(0.25)
    assert sum(table.values()) == pytest.approx(hands.unix - 1000.0)
    assert second.metrics()["time/total_s"] == pytest.approx(hands.unix - 1000.0 - 99.75)
    assert second.seconds("train", session=True) == 5


def test_start_up_before_the_clock_existed_is_counted() -> None:
    hands = Hands()
    first = hands.clock()
    spend(hands, first, train=10)
    record, at = first.table(), hands.unix
    hands.pass_(100)
    launched = hands.unix
    hands.pass_(7)
    second = hands.clock()
    second.backdate(launched)
    second.resume(record, record, at, superseded=False)
    assert second.table()["start"] == 7
    assert second.table()["gap"] == 100
    assert sum(second.table().values()) == pytest.approx(hands.unix - 1000.0)


def test_a_kill_moves_superseded_work_to_lost() -> None:
    hands = Hands()
    first = hands.clock()
    spend(hands, first, train=10, save=1)
    checkpoint = first.table()
    spend(hands, first, train=6, eval=2)
    last, last_unix = first.table(), hands.unix
    hands.pass_(3)  # more work, then a kill: the last line of the log was the last sign of life
    alive = hands.unix
    hands.pass_(50)
    second = hands.clock()
    second.resume(checkpoint, last, last_unix, alive)
    spend(hands, second, train=6)
    table = second.table()
    assert table["train"] == 16
    assert table["eval"] == 0
    assert table["lost"] == 11
    assert table["gap"] == 50
    assert sum(table.values()) == pytest.approx(hands.unix - 1000.0)
    assert second.metrics() == {"time/train_s": 16, "time/total_s": pytest.approx(28), "time/lost_s": 11}


def test_two_kills_before_any_checkpoint() -> None:
    hands = Hands()
    first = hands.clock()
    spend(hands, first, train=5)
    record, at = first.table(), hands.unix
    hands.pass_(10)
    second = hands.clock()
    second.resume(None, record, at)
    spend(hands, second, train=7)
    record, at = second.table(), hands.unix
    hands.pass_(20)
    third = hands.clock()
    third.resume(None, record, at)
    spend(hands, third, train=1)
    table = third.table()
    assert table["lost"] == 12
    assert table["gap"] == 30
    assert table["train"] == 1
    assert sum(table.values()) == pytest.approx(hands.unix - 1000.0)


def test_a_kill_after_lost_work_adds_up() -> None:
    hands = Hands()
    first = hands.clock()
    spend(hands, first, train=10)
    checkpoint = first.table()
    spend(hands, first, train=3)
    record, at = first.table(), hands.unix
    second = hands.clock()
    second.resume(checkpoint, record, at)
    spend(hands, second, train=2)
    third = hands.clock()
    third.resume(checkpoint, second.table(), hands.unix)
    assert third.table()["lost"] == 5
    assert third.table()["train"] == 10
    assert sum(third.table().values()) == pytest.approx(hands.unix - 1000.0)


def test_a_time_of_day_that_went_backwards_makes_no_negative_time() -> None:
    hands = Hands()
    first = hands.clock()
    spend(hands, first, train=10)
    record, at = first.table(), hands.unix
    hands.unix -= 500
    second = hands.clock()
    second.resume(record, record, at, at + 10)
    assert all(value >= 0 for value in second.table().values())
    assert second.table()["gap"] == 0


def test_c106_a_session_rate_counts_this_session_alone() -> None:
    hands = Hands()
    first = hands.clock()
    for _ in range(5):
        spend(hands, first, train=1)
    second = hands.clock()
    second.resume(first.table(), first.table(), hands.unix)
    rate = Rate(second, warmup=0)
    for _ in range(5):
        spend(hands, second, train=2)
    rate.mark(windows=5, tokens=5 * 100)
    session = rate.session()
    assert session is not None
    assert session.tokens == 500
    assert session.seconds == 10
    assert session.tokens_per_s == 50
    assert second.metrics()["time/train_s"] == 15, "totals are kept apart"


def test_c109_warm_up_is_left_out_of_the_rate(figure: Callable[[str], None]) -> None:
    def measure(warmup: int, slow: int) -> float:
        hands = Hands()
        clock = hands.clock()
        rate = Rate(clock, warmup)
        for window in range(1, 11):
            spend(hands, clock, train=0.1 + (1.0 if window <= slow else 0.0))
            if rate.wants(window) or window % 5 == 0:
                rate.mark(window, window * 100)
        session = rate.session()
        assert session is not None
        assert session.tokens_per_s is not None
        return session.tokens_per_s

    assert measure(warmup=2, slow=2) == pytest.approx(measure(warmup=2, slow=0))
    assert measure(warmup=0, slow=2) < 0.5 * measure(warmup=0, slow=0)
    for k in (2, 0):
        figure(
            f"k = {k}: {measure(k, slow=2):,.0f} tokens/s with 2 updates slowed by 1 s each, {measure(k, slow=0):,.0f} without"
        )


def test_a_rate_needs_a_span() -> None:
    hands = Hands()
    clock = hands.clock()
    rate = Rate(clock, warmup=2)
    assert rate.session() is None
    assert rate.mark(1, 10) is None
    assert rate.session() is None
    assert rate.mark(2, 20) is None
    assert rate.session() is None
    spend(hands, clock, train=4)
    span = rate.mark(4, 60)
    assert span is not None
    assert (span.windows, span.tokens, span.step_s, span.tokens_per_s) == (2, 40, 2, 10)
    assert rate.mark(4, 60) is None, "the same moment twice is no span"


def test_c110_evaluation_saving_and_data_are_not_training_time(figure: Callable[[str], None]) -> None:
    def run(stall: float) -> dict[str, float]:
        hands = Hands()
        clock = hands.clock()
        for window in range(1, 5):
            with clock("train"):
                with clock("data"):
                    hands.pass_(stall)
                hands.pass_(1)
            if window % 2 == 0:
                spend(hands, clock, eval=stall, save=stall)
        return clock.table()

    slow, fast = run(2.0), run(0.0)
    assert slow["train"] == fast["train"] == 4
    assert slow["eval"] == 4
    assert slow["save"] == 4
    assert slow["data"] == 8
    for name, table in (("stalls of 2 s", slow), ("none", fast)):
        figure(f"{name}: " + ", ".join(f"{label} {table[label]:g} s" for label in ("train", "eval", "save", "data")))
