"""Runs that stopped in an awkward place and went on: C05, C12, C63, C65, C66, C69, C81 and C87 across a restart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import watched
from tiny import same, timeless, train

pytestmark = pytest.mark.world

HALF: dict[str, Any] = {"precision__compute": "fp16", "data__seq_len": 32}  # short: 16-bit products may be slow
SCHEDULE = {"lr": 1e-2, "warmup": 3, "schedule": "cosine"}
# name -> what the run is, and the attempt at whose end it is stopped
STOPPED: dict[str, tuple[dict[str, Any], int]] = {
    "c66": ({**HALF, "optim": SCHEDULE, "budget__steps": 10, "drill__overflow_at": {"attempts": [3], "rank": 1}}, 6),
    "c69-retry": ({**HALF, "drill__overflow_at": {"attempts": [1, 2], "rank": 1}}, 2),
    "c69-next": ({**HALF, "precision__scale__on_overflow": "next", "drill__overflow_at": {"attempts": [1, 2], "rank": 0}}, 2),
    "c12": ({**HALF, "precision__scale": {"init": 2**40, "patience": 40}}, 5),
    "c05": ({**HALF, "precision__scale__patience": 5, "drill__overflow_at": {"attempts": list(range(2, 40)), "rank": 1}}, 4),
}  # fmt: skip


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[watched.Watched]]:
    """Of each run: uninterrupted; until it was stopped; from there on."""
    changes = []
    for name, (run, attempt) in STOPPED.items():
        there = {**run, "name": name, "drill__stop_at": {"attempt": attempt, "rank": 1}}
        changes += [{**run, "name": f"{name}-whole"}, there, dict(there)]
    runs = watched.sessions(tmp_path_factory.mktemp("stopped"), 2, changes)
    return {name: runs[3 * i : 3 * i + 3] for i, name in enumerate(STOPPED)}


@pytest.mark.parametrize("name", STOPPED)
def test_c05_c12_c66_c69_a_stop_shows_in_no_number(stopped: dict[str, list[watched.Watched]], name: str) -> None:
    whole, first, second = stopped[name]
    assert [status for status, _ in first.ends] == [75, 75]
    assert len(first.attempts) == STOPPED[name][1]
    assert [status for status, _ in second.ends] == [status for status, _ in whole.ends]
    assert timeless(second.rows()) == timeless(whole.rows())
    for mine, one, two in zip(whole.ranks, first.ranks, second.ranks, strict=True):
        assert [a.state for a in mine.attempts] == [a.state for a in [*one.attempts, *two.attempts]]
        assert same(two.end, mine.end)
    skips = [[(e["attempt"], e["step"], e["scale"]) for e in run.events("skip")] for run in (whole, second)]
    assert skips[0] == skips[1]


def test_c66_the_rate_goes_on_where_it_was(stopped: dict[str, list[watched.Watched]]) -> None:
    _, first, second = stopped["c66"]
    last = first.attempts[-1].state
    assert (last["step"], last["attempt"]) == (5, 6), "a skip before the save"
    saves = [(event["reason"], event["attempt"]) for event in first.events("save") if event["step"] == 5]
    assert saves == [("taken", 6), ("written", 6), ("published", 6)]
    warm = [1e-2 * k / 3 for k in (1, 2, 3)]
    down = [1e-2 * (1 + math.cos(math.pi * k / 7)) / 2 for k in range(7)]
    assert second.column("train/lr") == pytest.approx([*warm, *down])


@pytest.mark.parametrize("name", ["c69-retry", "c69-next"])
def test_c69_a_save_before_the_first_step_is_gone_on_from(stopped: dict[str, list[watched.Watched]], name: str) -> None:
    _, first, second = stopped[name]
    assert not any(attempt.applied for attempt in first.attempts)
    assert not any(tensor.any() for tensor in first.weights(0, "exp_avg").values())
    assert second.events("load")[0]["reason"].endswith("step-00000000")
    assert second.state()["step"] == 4


def test_c12_the_scale_is_not_the_initial_one_again(stopped: dict[str, list[watched.Watched]]) -> None:
    _, first, second = stopped["c12"]
    assert [attempt.scale for attempt in first.attempts] == [2.0**k for k in range(40, 35, -1)]
    assert second.attempts[0].scale == 2.0**35
    assert second.column("scale/skipped")[-1] == len(second.events("skip")) > 10


def test_c05_a_restart_gives_no_new_patience(stopped: dict[str, list[watched.Watched]]) -> None:
    _, first, second = stopped["c05"]
    assert [attempt.applied for attempt in first.attempts] == [True, False, False, False]
    assert [attempt.applied for attempt in second.attempts] == [False, False]
    assert second.ends[0][0] == 5
    assert "5 attempts in a row were skipped" in second.message


# -- random numbers -----------------------------------------------------------------------------------------------------


def draws() -> dict[str, list[Any]]:
    """Rank r draws r numbers more after each step; kept are what each save's generator would give next, and each load's."""
    import torch
    import torch.distributed as dist

    from mpdist.session import Session

    kept: dict[str, list[Any]] = {"saved": [], "loaded": []}
    save, resume, log = (_original(Session, name) for name in ("save", "resume", "log"))

    def coming() -> list[float]:
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        return torch.rand(4, generator=generator).tolist()

    def saving(self: Session, final: bool = False) -> None:
        kept["saved"].append((self.parts.window.step, coming()))
        save(self, final)

    def resuming(self: Session, mode: str) -> None:
        resume(self, mode)
        kept["loaded"].append((self.parts.window.step, coming()))

    def logging(self: Session, *args: Any) -> None:
        log(self, *args)
        torch.rand(1 + dist.get_rank())

    Session.save, Session.resume, Session.log = saving, resuming, logging  # type: ignore[method-assign]
    return kept


def _original(owner: type, name: str) -> Any:
    """A method as it was before an earlier session in this process replaced it."""
    key = f"_original_{name}"
    if not hasattr(owner, key):
        setattr(owner, key, getattr(owner, name))
    return getattr(owner, key)


def test_c65_each_rank_gets_its_own_generators_back(tmp_path: Path) -> None:
    run = {"model__config": {**tiny.LLAMA, "attention_dropout": 0.1}, "budget__steps": 6, "checkpoint": {"every": 3}}
    there = {**run, "name": "run", "drill__stop_at": {"attempt": 3, "rank": 0}}
    changes = [{**run, "name": "whole"}, there, dict(there)]
    whole, first, second = watched.sessions(tmp_path, 2, changes, arm=draws)
    assert [run.status for run in (whole, first, second)] == [0, 75, 0], second.message
    loaded = [rank.probe["loaded"][0] for rank in second.ranks]
    assert loaded == [rank.probe["saved"][0] for rank in first.ranks]
    assert loaded == [rank.probe["saved"][0] for rank in whole.ranks]
    assert [step for step, _ in loaded] == [3, 3]
    assert loaded[0] != loaded[1]
    assert timeless(second.rows()) == timeless(whole.rows())


# -- rows ---------------------------------------------------------------------------------------------------------------


def seen(runs: list[watched.Watched]) -> list[list[set[int]]]:
    """The rows of each attempt of these sessions, by rank."""
    return [
        [{row for micro in rank.attempts[k].rows for row in micro} for rank in run.ranks]
        for run in runs
        for k in range(len(run.attempts))
    ]


def test_c63_c87_an_epoch_that_a_stop_cuts_has_each_row_once(tmp_path: Path) -> None:
    """Nine rows in windows of four, three epochs; stopped within the second one, and gone on from with one rank."""
    (tmp_path / "train.jsonl").write_text("".join(f'{{"text": "row {i}"}}\n' for i in range(9)))
    run = {"name": "run", "data__packing": "none", "batch": {"micro": 1, "global": 4}, "budget": {"epochs": 3},
           "drill__stop_at": {"attempt": 4, "rank": 0}}  # fmt: skip
    first = watched.sessions(tmp_path, 2, [dict(run)])
    second = watched.sessions(tmp_path, 1, [dict(run)])
    assert [first[0].status, second[0].status] == [75, 0], second[0].message
    attempts = seen([*first, *second])
    assert len(attempts) == 9
    epochs = []
    for begin in (0, 3, 6):
        rows = [row for ranks in attempts[begin : begin + 3] for rank in ranks for row in sorted(rank)]
        assert sorted(rows) == list(range(9)), "twice, or never"
        epochs.append([set().union(*ranks) for ranks in attempts[begin : begin + 3]])
    assert epochs[0] != epochs[1] != epochs[2]


def test_c81_one_row_for_two_ranks_goes_on_too(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n')
    run = {"name": "run", "data__packing": "none", "batch": {"micro": 1, "global": 2}, "budget": {"epochs": 4},
           "drill__stop_at": {"attempt": 2, "rank": 1}}  # fmt: skip
    first, second = watched.sessions(tmp_path, 2, [dict(run), dict(run)])
    assert [first.status, second.status] == [75, 0], second.message
    assert seen([first, second]) == [[{0}, set()]] * 4
    assert second.column("train/label_tokens") == [5, 10, 15, 20]


# -- what is under way at the stop --------------------------------------------------------------------------------------


def busy_feed() -> list[str]:
    """In the second session, the batch after the stop is still being made when the feed is closed. Kept: threads left."""
    import threading

    from mpdist.feed import Feed

    left: list[str] = []
    make, close = _original(Feed, "_make"), _original(Feed, "close")
    closing = threading.Event()
    Feed.sessions = getattr(Feed, "sessions", 0) + 1  # type: ignore[attr-defined]
    second = Feed.sessions == 2  # type: ignore[attr-defined]

    def making(self: Feed, number: int) -> Any:
        if second and number == 3:
            assert closing.wait(60)
        return make(self, number)

    def closed(self: Feed) -> None:
        threading.Timer(0.2, closing.set).start()
        close(self)
        left.extend(thread.name for thread in threading.enumerate())

    Feed._make, Feed.close = making, closed  # type: ignore[method-assign]
    return left


def test_a_stop_while_a_batch_is_being_made(tmp_path: Path) -> None:
    there = {"name": "run", "budget__steps": 6, "drill__stop_at": {"attempt": 3, "rank": 0}}
    changes = [{"name": "whole", "budget__steps": 6}, there, dict(there)]
    whole, first, second = watched.sessions(tmp_path, 2, changes, arm=busy_feed)
    assert [run.status for run in (whole, first, second)] == [0, 75, 0], second.message
    for rank in (*first.ranks, *second.ranks):
        assert "MainThread" in rank.probe
        assert not [name for name in rank.probe if name.startswith("feed")]
    assert timeless(second.rows()) == timeless(whole.rows())


def test_a_budget_of_seconds_counts_those_before_the_stop(tmp_path: Path) -> None:
    seconds = 2.0
    run = {"budget": {"seconds": seconds}, "optim": {"lr": 1e-3, "schedule": "constant"},
           "drill": {"stop_at": {"attempt": 2, "rank": 1}}}  # fmt: skip
    first = train(tmp_path, 2, **run)
    assert [status for status, _ in first.ends] == [75, 75]
    before = first.column("time/train_s")[-1]
    second = train(tmp_path, 2, **run)
    assert [status for status, _ in second.ends] == [0, 0], second.message
    spent = second.column("time/train_s")
    assert spent == sorted(spent)
    assert spent[1] == before < spent[2]
    # The budget is looked at within a window, by rank 0's clock: the first window to begin after it is spent is the last.
    assert spent[-3] < seconds <= spent[-1]
    assert second.state()["state"] == "done"
    rows = len(spent)
    assert train(tmp_path, 2, **run).status == 0
    assert len(second.rows()) == rows, "nothing is left to do"
