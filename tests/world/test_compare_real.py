"""Defects planted in real runs, each caught and named by what the run itself recorded; and what a healthy clock holds.

All runs are sessions of one pair of ranks, one after the other, patched where the defect belongs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import worlds
from compared import lines

from mpdist.compare import text
from mpdist.compare.analyse import compare
from mpdist.compare.tree import Comparison
from mpdist.lines import read_json
from mpdist.record import read_metrics

pytestmark = pytest.mark.world
STEPS, EVERY, SLEEP = 10, 5, 0.25
COLD, COLD_S = 2, 1.0  # the first updates of a cold start, and what each takes longer
PURE = ("precision.compute=bf16", "precision.master=compute", "optim.lr=1e-5")
SKIPS = "drill={overflow_at: {attempts: [2, 3, 6]}}"
GROWS = ("reduce.wire=fp16", "precision.scale.interval=1")  # until the wire overflows, again and again

Figure = Callable[[str], None]

# -- what is planted: each changes modules of a rank, and says how to undo it ------------------------------------------


def nothing(_: dict[str, Any]) -> Callable[[], None]:
    return lambda: None


def patched(owner: Any, name: str, value: Any) -> Callable[[], None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def clip_before_unscale(_: dict[str, Any]) -> Callable[[], None]:
    from mpdist.precision import Window

    real = Window.close

    def close(self: Any, verdict: Any) -> Any:
        made = real(self, verdict)
        if not made.applied:
            return made
        norm = made.norm * made.scale
        return replace(made, norm=norm, factor=min(1.0, self.clip / norm) / made.scale)

    return patched(Window, "close", close)


def mean_of_means(_: dict[str, Any]) -> Callable[[], None]:
    from mpdist import train

    real = train.attempt

    def attempt(s: Any, batch: Any) -> Any:
        module, parts = s.parts.module, len(batch.micros) * s.seat.world.ranks

        def averaged(**given: Any) -> Any:
            objective, loss, extra = module(**given)
            share = batch.labels / (parts * len(given["targets"]))
            return objective * share, loss * share, extra

        undo = patched(s.parts, "module", averaged)
        try:
            return real(s, batch)
        finally:
            undo()

    return patched(train, "attempt", attempt)


def padding_counted(_: dict[str, Any]) -> Callable[[], None]:
    from mpdist.feed import Feed

    real = Feed.get
    return patched(Feed, "get", lambda self, number: replace(found := real(self, number), tokens=found.slots))


class TrainClock:
    """A clock that takes every section for training."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock

    def __call__(self, label: str) -> Any:
        return self._clock("train")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)


def evaluation_in_train(_: dict[str, Any]) -> Callable[[], None]:
    from mpdist.session import Session

    real = Session.evaluate

    def evaluate(self: Any) -> None:
        undo = patched(self, "clock", TrainClock(self.clock))
        try:
            real(self)
        finally:
            undo()

    return patched(Session, "evaluate", evaluate)


def slow_evaluation(_: dict[str, Any]) -> Callable[[], None]:
    from mpdist.session import Session

    real = Session.evaluate

    def evaluate(self: Any) -> None:
        section = self.clock

        class Slow:
            @contextmanager
            def __call__(self, label: str) -> Any:
                with section(label):
                    time.sleep(SLEEP)
                    yield

            def __getattr__(self, name: str) -> Any:
                return getattr(section, name)

        undo = patched(self, "clock", Slow())
        try:
            real(self)
        finally:
            undo()

    return patched(Session, "evaluate", evaluate)


def slow_device(seen: dict[str, Any]) -> Callable[[], None]:
    """A device that works behind its host: waiting for it takes long."""
    from mpdist import session

    def settle(_: Any) -> None:
        seen["settled"] = seen.get("settled", 0) + 1
        time.sleep(SLEEP)

    return patched(session, "settle", settle)


def cold_start(_: dict[str, Any]) -> Callable[[], None]:
    from mpdist import train

    real = train.attempt

    def attempt(s: Any, batch: Any) -> Any:
        if batch.number < COLD:
            time.sleep(COLD_S)
        return real(s, batch)

    return patched(train, "attempt", attempt)


def other_order(_: dict[str, Any]) -> Callable[[], None]:
    """Two rows of one window change places: it has the same rows still, and the same label tokens."""
    from mpdist.data import Order

    real = Order.window

    def window(self: Any, k: int) -> Any:
        rows = real(self, k)
        return rows[[1, 0, *range(2, len(rows))]] if k == 2 else rows

    return patched(Order, "window", window)


RUNS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], Callable[[], None]]]] = {
    "fp32": ((), nothing),
    "slow": ((), slow_evaluation),
    "device": (("track.every=5",), slow_device),
    "cold": ((), cold_start),
    "order": ((), other_order),
    "pure": (PURE, nothing),
    "lr": (("optim.lr=1e-5",), nothing),
    "mixed": (("precision.compute=bf16", "optim.lr=1e-5"), nothing),
    "clip": (("precision.compute=fp16",), clip_before_unscale),
    "means": ((), mean_of_means),
    "padding": ((), padding_counted),
    "clock": ((), evaluation_in_train),
    "wire": (GROWS, nothing),
    "seven": (("budget.steps=7",), nothing),
    "skips": (("budget.steps=7", "precision.compute=fp16", "precision.scale.init=256", SKIPS), nothing),
}


def session_all(rank: int, path: str, ports: list[int]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, port in zip(RUNS, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)  # the store of the session before may still hold its own
        settings, plant = RUNS[name]
        undo = plant(seen)
        try:
            status, message = tiny.session(rank, path, [*settings, f"name={name}-seed0"])
            assert status == 0, (name, message)
        finally:
            undo()
    return seen


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("real")
    held_out = tiny.write_text(folder / "held_out.jsonl", 16, 7)
    path = tiny.config(
        folder, shard__engine="ddp", data__packing="none", data__eval=[{"path": str(held_out)}], data__cache=str(folder / "cache"),
        eval__every=EVERY, eval__rows=16, budget__steps=STEPS, optim__clip=0.5,
    )  # fmt: skip
    seen = worlds.run(session_all, 2, str(path), worlds.free_ports(len(RUNS)), timeout=300.0)
    return folder / "runs", seen[0]


def beside(folder: Path, name: str, other: str = "fp32", **asked: Any) -> Comparison:
    return compare([str(folder / f"{other}-seed0"), str(folder / f"{name}-seed0")], against=other, **asked)


CAUGHT = {
    "pure": ("stalled updates", "lr", "of the bfloat16 masters at learning rates up to 1e-05; the other updates round away"),
    "clip": ("clip before unscale", "fp32", "times its scale: the clip saw the scale"),
    "means": ("mean of means", "fp32", "as if the means of 4 micro-batches were averaged, whatever their label tokens"),
    "padding": ("padding counted", "fp32", "which are all its positions; fp32-seed0 counts"),
    "clock": ("evaluation in the train clock", "fp32", "during the evaluation at step 5"),
    "wire": ("wire overflow", "fp32", "fp32 does not explain them, a sum that leaves the range of fp16 does"),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUGHT)
def test_a_planted_defect_is_caught_and_named(story: tuple[Path, dict[str, Any]], name: str, figure: Figure) -> None:
    defect, other, said = CAUGHT[name]
    found = beside(story[0], name, other)
    assert found.refused == ()
    assert [(one.name, one.run) for one in found.defects] == [(defect, f"{name}-seed0")]
    assert said in found.defects[0].text
    assert "a defect first" in [advice.rule for advice in found.guide]
    (line,) = lines(text.text(found), "DEFECT")
    figure(line)


def test_the_order_of_the_samples_alone_is_refused_by_its_digest(
    story: tuple[Path, dict[str, Any]], figure: Figure
) -> None:
    """Nothing else tells it: the settings, the rows of each window and their label tokens are the same."""
    found = beside(story[0], "order")
    assert [one.key for one in found.refused] == ["data.order"]
    digests = [value for _, value in found.refused[0].values]
    assert len(set(digests)) == 2
    assert all(len(one) == 64 for one in digests)
    ours, theirs = (read_metrics(story[0] / f"{name}-seed0") for name in ("order", "fp32"))
    assert [row["train/label_tokens"] for row in ours] == [row["train/label_tokens"] for row in theirs]
    figure(f"refused: {found.refused[0]}")


def test_c110_a_slow_evaluation_is_no_defect_and_no_training_time(
    story: tuple[Path, dict[str, Any]], figure: Figure
) -> None:
    """The control of the planted defects too: nothing is named where nothing was planted."""
    folder = story[0]
    found = beside(folder, "slow")
    assert (found.refused, found.defects) == ((), ())
    rows = read_metrics(folder / "slow-seed0")
    made = {row["step"]: row["time/train_s"] for row in rows if row["kind"] == "train"}
    evals = [row for row in rows if row["kind"] == "eval"]
    assert [row["step"] for row in evals] == [5, 10]
    assert all(row["time/train_s"] == made[row["step"]] for row in evals)
    times = [(read_json(folder / f"{name}-seed0" / "status.json") or {})["time"] for name in ("slow", "fp32")]
    assert times[0]["eval"] >= 2 * SLEEP
    assert times[0]["train"] == made[STEPS]
    ran = [row["time/train_s"] - made[row["step"]] for row in evals]
    figure(f"2 evaluations slowed by {SLEEP} s each: {times[0]['eval']:.2f} s in eval ({times[1]['eval']:.2f} s unslowed), "
           f"{sum(ran):g} s in train")  # fmt: skip


def test_c109_a_cold_start_is_left_out_of_the_rates(story: tuple[Path, dict[str, Any]], figure: Figure) -> None:
    """k = 2 by default and printed; what is left is the rate of the other updates, to the last digit."""
    found, with_it = beside(story[0], "cold"), beside(story[0], "cold", warmup=0)
    assert "behind step 2 (warm-up of 2 windows, in all arms alike)" in text.text(found)
    rows = {row["step"]: row for row in read_metrics(story[0] / "cold-seed0") if row["kind"] == "train"}
    seconds, tokens = (rows[STEPS][key] - rows[COLD][key] for key in ("time/train_s", "train/tokens"))
    assert rows[COLD]["time/train_s"] >= COLD * COLD_S
    rates = [one.arm("cold").figures.tokens_per_s for one in (with_it, found)]
    assert rates[0] is not None
    assert rates[1] is not None
    assert rates[1] == pytest.approx(tokens / seconds)
    assert rates[0] == pytest.approx(rows[STEPS]["train/tokens"] / rows[STEPS]["time/train_s"])
    assert rates[1] > 1.2 * rates[0]
    left = rows[COLD]["time/train_s"]
    figure(f"first {COLD} updates slowed by {COLD_S:g} s each: {rates[0]:,.0f} tokens/s with k = 0, {rates[1]:,.0f} with k = {COLD}, "
           f"the default, which leaves {left:.2f} s out and {seconds:.2f} s in")  # fmt: skip


def test_c108_a_device_is_waited_for_inside_the_train_clock_once_a_boundary(
    story: tuple[Path, dict[str, Any]], figure: Figure
) -> None:
    """At the end of the warm-up and at each logged step, and at no other."""
    folder, seen = story
    rows = [row for row in read_metrics(folder / "device-seed0") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [5, 10]
    assert seen["settled"] == 3
    train = rows[1]["time/train_s"] - rows[0]["time/train_s"]
    assert rows[1]["speed/step_s"] * 5 == pytest.approx(train, rel=1e-6), "the wait is in the rate as well"
    assert train >= SLEEP
    busy = [row["speed/device_busy"] for row in rows]
    assert all(0 < share < 1.2 for share in busy)
    figure(f"{seen['settled']} waits in {STEPS} updates logged every 5: at the end of the warm-up and at each logged step; "
           f"the last {STEPS - 5} took {train:.2f} s of train time, one wait of {SLEEP} s in them")  # fmt: skip
    assert busy[1] * (rows[1]["time/total_s"] - rows[0]["time/total_s"]) < train - SLEEP + 1.0, "a sleep is no work"


def test_seven_steps_of_ten_attempts_are_matched_by_steps_and_tokens(
    story: tuple[Path, dict[str, Any]], figure: Figure
) -> None:
    """Three overflows, rehearsed, in FP16: the same windows again at a lower scale, and nothing left out."""
    found = beside(story[0], "skips", "seven")
    assert found.refused == ()
    arm, other = found.arm("skips"), found.arm("seven")
    assert (arm.figures.steps, arm.figures.attempts, other.figures.attempts) == (7, 10, 7)
    assert arm.figures.skipped == {"non-finite gradients": 3}
    assert arm.figures.final_scale == 32
    at = found.pairs[0].judged
    assert at is not None
    assert (at.step, at.attempts) == (7, (10, 7))
    assert at.label_tokens[0] == at.label_tokens[1] == other.figures.label_tokens
    assert [note.kind for note in found.notes if note.kind == "drill"] == ["drill"]
    rows = {row[0]: row[1:] for row in text.arms(found).rows}
    assert (rows["steps"], rows["attempts"], rows["skipped"]) == (
        ["7", "7"],
        ["7", "10"],
        ["0", "3 non-finite gradients"],
    )
    assert rows["label tokens"][0] == rows["label tokens"][1]
    for line in lines(text.text(found), "means over|steps|attempts|skipped|label tokens|at matched steps|skips +7"):
        figure(line)


def test_c112_pure_16_bit_beside_fp32_masters_shows_in_the_masters_and_is_flagged(
    story: tuple[Path, dict[str, Any]], figure: Figure
) -> None:
    """As the ranks held them: what each run stores, what the table shows, what is said, what refuses it."""
    found = beside(story[0], "pure", "mixed")
    assert found.refused == ()
    held = {arm.name: arm.figures.dtypes for arm in found.arms}
    assert [held[name]["masters"] for name in ("mixed", "pure")] == ["float32", "bfloat16"]
    assert [held[name]["moments"] for name in ("mixed", "pure")] == ["float32", "bfloat16"]
    assert all({"masters", "moments", "gradients", "buffers"} <= set(one) for one in held.values())
    values = found.arms[0].runs[0].values
    assert (values["optim.clip"], found.arms[0].runs[0].plan["batch"]["accumulation"]) == (0.5, 2)
    rows = {row[0]: row[1:] for row in text.arms(found).rows}
    name = "compute / masters / wire / sum"
    assert [one.split(" / ")[:2] for one in rows[name]] == [["bf16", "fp32"], ["bf16", "bf16"]]
    (flag,) = [note.text for note in found.notes if note.kind == "masters"]
    assert flag == "pure: its masters are bfloat16: pure 16-bit training, NO FP32 masters"
    narrow = beside(story[0], "pure", "mixed", treatment=["precision.compute"])
    assert [one.key for one in narrow.refused] == ["precision.master"]
    figure(f"{name}: {rows[name][0]} in mixed, {rows[name][1]} in pure")
    figure(f"note: {flag}")
    figure(f"with precision.compute alone as the treatment, refused: {narrow.refused[0]}")


def test_each_run_says_how_busy_its_device_was(story: tuple[Path, dict[str, Any]]) -> None:
    found = beside(story[0], "slow")
    shares = [arm.figures.device_busy for arm in found.arms]
    assert all(share is not None and 0 < share < 1.2 for share in shares)
