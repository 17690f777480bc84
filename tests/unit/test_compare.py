"""Comparisons: which runs are arms, the same step, the same second, the same loss, and what is said of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared import LABELS, TOKENS, Made, curve, lines

from mpdist import cli, sweep_file
from mpdist.compare import arms, match, read
from mpdist.compare.analyse import analyse, compare
from mpdist.compare.text import bases
from mpdist.compare.tree import Comparison
from mpdist.errors import UsageError

BF16, FP16 = ("precision.compute=bf16",), ("precision.compute=fp16",)
SKIPS = [(1, "non-finite gradients"), (2, "non-finite gradients"), (6, "non-finite gradients")]


def found(*made: Made, **asked: Any) -> Comparison:
    return analyse([one.run() for one in made], None, **asked)


def three(**bf16: Any) -> list[Made]:
    """Two arms under three seeds; BF16 is a little apart from FP32, by another amount under each seed."""
    made = []
    for seed, apart in enumerate((0.004, 0.006, 0.005)):
        made.append(Made(f"fp32-seed{seed}", seed, losses=curve(150) + 0.01 * seed))
        residual = np.where(np.arange(150) > 0, apart, 0.0)
        made.append(
            Made(f"bf16-seed{seed}", seed, settings=BF16, losses=curve(150) + 0.01 * seed, residual=residual, **bf16)
        )
    return made


# -- arms -----------------------------------------------------------------------------------------------------------------


def test_arms_come_from_names_and_are_held_against_fp32() -> None:
    both = found(*three())
    assert [(arm.name, arm.seeds) for arm in both.arms] == [("fp32", (0, 1, 2)), ("bf16", (0, 1, 2))]
    assert both.reference == "fp32"
    assert found(*three(), against="bf16").pairs[0].arm == "fp32"


def test_other_names_make_arms_by_their_values() -> None:
    made = [Made("one", 0), Made("two", 1), Made("three", 0, settings=BF16), Made("four", 1, settings=BF16)]
    grouping = arms.group([one.run() for one in made], None)
    assert {group.name: [run.name for run in group.runs] for group in grouping.groups} == {
        "fp32": ["one", "two"], "bf16": ["three", "four"],
    }  # fmt: skip


def test_single_runs_are_arms_by_their_own_names_also_where_nothing_differs() -> None:
    assert [arm.name for arm in found(Made("before"), Made("after", settings=BF16)).arms] == ["before", "after"]
    again = found(Made("monday"), Made("tuesday"))
    assert [arm.name for arm in again.arms] == ["monday", "tuesday"]
    assert again.varied == ()
    assert again.control is None
    assert again.verdicts[0].loss == "unknown"  # one seed


def test_no_two_arms_and_no_two_runs_of_a_seed() -> None:
    with pytest.raises(UsageError, match="one run"):
        found(Made("alone"))
    with pytest.raises(UsageError, match="all 2 runs are of one arm, fp32"):
        found(Made("fp32-seed0"), Made("fp32-seed1", 1))
    with pytest.raises(UsageError, match="--against fp8"):
        found(*three(), against="fp8")


def written_sweep(folder: Path, made: list[Made], **more: Any) -> sweep_file.Sweep:
    for one in made:
        one.write(folder)
    names = list(dict.fromkeys(one.name.rpartition("-seed")[0] for one in made))
    own = tuple(sweep_file.Arm(name, {}, control=name == more.get("control")) for name in names)
    seeds = tuple(sorted({one.seed for one in made}))
    sweep = sweep_file.Sweep(
        name="s", treatment=more.get("treatment", ("precision.compute",)), arms=own, seeds=seeds, config="c.yaml", digest="d",
        order=tuple(sweep_file.alternated(tuple(names), seeds)), equal_time=more.get("equal_time"),
    )  # fmt: skip
    sweep_file.write(folder, sweep)
    return sweep


def test_a_sweep_says_what_its_arms_are_what_may_differ_and_what_is_missing(tmp_path: Path) -> None:
    made = [Made(f"{name}-seed{seed}", seed, settings=settings) for seed in (0, 1)
            for name, settings in (("bf16", BF16), ("fp32", ()), ("again", BF16))]  # fmt: skip
    written_sweep(tmp_path, made, control="again")
    whole = compare([str(tmp_path)])
    assert [arm.name for arm in whole.arms] == [
        "bf16",
        "fp32",
        "again",
    ]  # the sweep's first is the reference, its control last
    assert (whole.reference, whole.control, whole.treatment) == ("bf16", "again", ("precision.compute",))
    (tmp_path / "fp32-seed1" / "metrics.jsonl").unlink()
    assert [one.key for one in compare([str(tmp_path)]).refused] == ["seeds"]
    some = compare([str(tmp_path)], allow=["seeds"])
    assert [note.text for note in some.notes if note.kind == "missing"] == [
        "1 of the sweep's 6 runs are not here, or have not made a step: fp32-seed1"
    ]
    named = compare([str(tmp_path / "bf16-seed0"), str(tmp_path / "fp32-seed0")])
    assert (named.reference, named.control) == ("bf16", None)


def test_under_equal_time_the_arms_may_differ_in_length(tmp_path: Path) -> None:
    made = [
        Made("fp32-seed0", steps=60, settings=("budget.steps=60",)),
        Made("bf16-seed0", steps=90, settings=(*BF16, "budget.steps=90")),
    ]
    written_sweep(tmp_path, made, equal_time=sweep_file.EqualTime(4.0))
    assert compare([str(tmp_path)]).refused == ()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        read.runs([str(tmp_path / "nowhere")])
    with pytest.raises(UsageError, match="is no run directory"):
        read.runs([str(tmp_path)])
    path = Made("fp32-seed0", steps=4).write(tmp_path)
    (path / "metrics.jsonl").write_text("")
    with pytest.raises(UsageError, match="has not made a step"):
        read.runs([str(path)])
    (path / "metrics.jsonl").unlink()
    with pytest.raises(UsageError, match="nothing was trained there"):
        read.runs([str(path)])
    (path / "config.yaml").write_text("name: x\nunknown: 1\n")
    with pytest.raises(UsageError, match=r"config\.yaml: "):
        read.runs([str(path)])


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    """The control of these tests: a run in memory is the run of its files."""
    made = Made("fp16-seed0", steps=7, settings=FP16, skips=SKIPS, scale=65536.0, eval_every=3)
    one, two = read.runs([str(made.write(tmp_path))])[0], made.run()
    assert {k: v for k, v in vars(one).items() if k != "path"} == {k: v for k, v in vars(two).items() if k != "path"}


def test_a_run_counts_once_and_keeps_the_name_that_it_is_called_by(tmp_path: Path) -> None:
    path = Made("run", steps=4).write(tmp_path)
    (tmp_path / "fp32-seed0").symlink_to(path)
    assert [run.name for run in read.runs([str(tmp_path / "fp32-seed0"), str(path), str(path)])] == ["fp32-seed0"]


def test_superseded_work_does_not_count(tmp_path: Path) -> None:
    made = Made("fp32-seed0", steps=6, eval_every=0, status={"state": "running"})
    path = made.write(tmp_path)
    rows = (path / "metrics.jsonl").read_text().splitlines()
    later = [{"session": 2, "train/loss": 1.0, "attempt": step + 1, "scale/skipped": 1} for step in (4, 5, 6)]
    again = [json.dumps({**json.loads(row), **new}) for row, new in zip(rows[3:], later, strict=True)]
    (path / "metrics.jsonl").write_text("\n".join([*rows[:5], *again]) + "\n")
    told = (("start", 0, 0), ("skip", 1, 2), ("skip", 3, 5), ("start", 3, 4))
    events = [
        {"event": name, "step": step, "attempt": attempt, "reason": "non-finite gradients"}
        for name, step, attempt in told
    ]
    (path / "events.jsonl").write_text("\n".join(map(json.dumps, events)) + "\n")
    run = read.read(path)
    assert [row["train/loss"] for row in run.train[3:]] == [1.0, 1.0, 1.0]
    assert [event["attempt"] for event in run.skips] == [2]


# -- the same step ---------------------------------------------------------------------------------------------------------


def test_seven_steps_of_ten_attempts_are_matched_by_steps_and_by_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], figure: Callable[[str], None]
) -> None:
    made = [Made("fp32-seed0", steps=7, eval_every=7),
            Made("fp16-seed0", steps=7, eval_every=7, settings=FP16, skips=SKIPS, scale=65536.0)]  # fmt: skip
    paths = [str(one.write(tmp_path)) for one in made]
    assert cli.main(["compare", *paths]) == 0
    text = capsys.readouterr().out
    assert "steps                                                   7                          7" in text
    assert "attempts                                                7                         10" in text
    assert "3 non-finite gradients" in text
    assert "8192" in text  # the scale that it ended with: 65536, halved three times
    for line in lines(text, "means over|steps|attempts|skipped|label tokens|at matched steps|fp16 +7"):
        figure(line)
    assert cli.main(["compare", *paths, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(arm["name"], arm["steps"], arm["attempts"], arm["label_tokens"]) for arm in report["arms"]] == [
        ("fp32", 7, 7, 7 * LABELS), ("fp16", 7, 10, 7 * LABELS),
    ]  # fmt: skip
    at = report["matched_steps"][-1]
    assert (at["step"], at["attempts"], at["label_tokens"]) == (7, [10, 7], [7 * LABELS, 7 * LABELS])
    assert report["arms"][1]["skipped"] == {"non-finite gradients": 3}
    assert report["arms"][1]["final_scale"] == 8192


def test_gaps_are_paired_over_seeds() -> None:
    """The seeds' own spread is ten times the gap's, and does not blur it."""
    both = found(*three())
    at = both.pairs[0].judged
    assert at is not None
    assert at.step == 150
    assert at.eval_loss_gap is not None
    assert at.eval_loss_gap.value == pytest.approx(0.005)
    # t of 2 degrees of freedom at 1 - 0.05 / 6 is 7.6488; the standard error of 4, 6 and 5 thousandths is 0.001 / sqrt(3).
    assert at.eval_loss_gap.high == pytest.approx(0.005 + 7.648804 * 0.001 / np.sqrt(3), rel=1e-4)
    assert both.arm("fp32").figures.seed_spread == pytest.approx(0.01)
    assert both.verdicts[0].loss == "higher"
    assert "inside the seed spread of 0.0100" in both.verdicts[0].line


def test_a_difference_that_is_not_seen_is_said_with_the_one_that_would_have_been() -> None:
    made = three()
    for one, apart in zip(made[1::2], (0.004, -0.006, 0.005), strict=True):
        one.residual = np.where(np.arange(150) > 0, apart, 0.0)
    verdict = found(*made).verdicts[0]
    assert verdict.loss == "no difference seen"
    assert "no difference seen at this size (one of 0.0471 would have been)" in verdict.line  # 13.4253 standard errors


def test_a_machine_that_hides_everything_is_said_so_in_readable_figures() -> None:
    made = three()
    for one, step_s in zip(made, (0.05, 0.05, 0.2, 0.9, 0.1, 0.03), strict=True):
        one.step_s = np.full(150, step_s)
    line = found(*made).verdicts[0].line
    assert re.search(r"no difference seen at this size \(one of [\d.e+]{2,8}x would have been\)", line), line


def test_the_training_gap_is_of_the_last_tenth_and_serves_where_nothing_is_evaluated() -> None:
    made = three(eval_every=0)
    for one in made[::2]:
        one.eval_every = 0
    at = found(*made).pairs[0].judged
    assert at is not None
    assert (at.step, at.window_from, at.eval_loss) == (150, 135, None)
    assert at.train_loss_gap.value == pytest.approx(0.005)
    assert "training loss +0.0050" in found(*made).verdicts[0].line


def test_equal_runs_are_equal_to_the_last_bit() -> None:
    verdict = found(*(Made(f"{name}-seed{seed}", seed) for name in ("a", "b") for seed in (0, 1))).verdicts[0]
    assert "loss the same to the last bit at 150 steps" in verdict.line
    assert verdict.alarms == ()


def test_one_seed_makes_no_claim() -> None:
    one = found(
        Made("fp32-seed0"), Made("bf16-seed0", settings=BF16, residual=np.full(150, 0.5) * (np.arange(150) > 0))
    )
    assert one.verdicts[0].alarms == ()
    assert one.verdicts[0].loss == one.verdicts[0].speed == "unknown"
    assert "one seed" in one.verdicts[0].line
    assert any(note.kind == "one seed" for note in one.notes)
    assert [advice.rule for advice in one.guide] == ["one seed says little"]


@pytest.mark.parametrize(
    ("peak", "bought"), [(2**27, "memory alone"), (2**28, "nothing that"), (2**29, "nothing that")]
)
def test_memory_is_recommended_where_the_peak_is_lower(peak: int, bought: str) -> None:
    told = [one.text for one in found(*three(row={"mem/peak_allocated_bytes": peak})).guide if "needs" in one.rule]
    assert len(told) == 1
    assert f"so BF16 buys {bought}" in told[0]


def test_the_loss_to_reach_is_a_finite_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("nan", "inf", "0", "low"):
        assert cli.main(["compare", str(tmp_path), "--to-loss", text]) == 2
        assert f"--to-loss: '{text}' is not a finite number above 0" in capsys.readouterr().err


def test_runs_of_two_lengths_are_matched_where_the_shorter_ends() -> None:
    made = [Made("fp32-seed0", steps=100), Made("bf16-seed0", steps=150, settings=BF16)]
    both = found(*made)
    assert both.pairs[0].matched_steps[-1].step == 100
    assert any("100 to 150 steps" in note.text for note in both.notes)


def test_an_arm_that_diverged_is_a_result_and_holds_no_gate() -> None:
    made = [Made("fp32-seed0", steps=40), Made("fp32-seed1", 1, steps=40), Made("fp16-seed0", steps=40, settings=FP16)]
    made.append(
        Made("fp16-seed1", 1, steps=30, settings=FP16, status={"state": "diverged", "reason": "20 attempts in a row"})
    )
    made[3].rows[-1]["eval/loss"] = float("nan")
    both = found(*made, gate=["loss_gap<=1%"])
    assert both.verdicts[0].loss == "diverged"
    assert both.verdicts[0].alarms == ("loss",)
    assert "DIVERGED: fp16-seed1 at step 30 of 2 runs" in both.verdicts[0].line
    assert [(one.holds, one.text) for one in both.gates] == [(False, "fp16-seed1 diverged at step 30")]
    assert "an arm that diverged" in [advice.rule for advice in both.guide]
    made[3].status["state"] = "running"
    running = found(*made, gate=["loss_gap<=1%"])
    assert [(one.holds, one.text) for one in running.gates] == [(None, "fp16-seed1 is running at step 30")]
    assert running.pairs[0].judged is not None
    told = running.pairs[0].judged.eval_loss_gap
    assert told is not None
    assert (told.low, told.why) == (None, "a value is not finite")


def test_a_residual_that_grows_is_a_drift() -> None:
    made = three()
    for one, slope in zip(made[1::2], (1.0, 1.1, 0.9), strict=True):
        one.residual = np.arange(150) * 1e-4 * slope
    both = found(*made)
    drift = both.pairs[0].drift
    assert drift is not None
    assert drift.slope.value == pytest.approx(0.1)  # nats for 1,000 steps
    assert both.verdicts[0].drift == "up"
    assert "a gap that grows" in [advice.rule for advice in both.guide]
    assert both.pairs[0].residual[-1][1] == pytest.approx(149e-4)


# -- the same second ----------------------------------------------------------------------------------------------------------


def test_at_the_same_second_the_faster_arm_is_further() -> None:
    made = [Made("fp32-seed0", step_s=np.full(150, 0.1)), Made("bf16-seed0", settings=BF16, step_s=np.full(150, 0.05))]
    pair = found(*made).pairs[0]
    at = pair.at_time("train")
    assert at is not None
    assert at.seconds == pytest.approx(148 * 0.05)  # BF16's whole run behind two windows of warm-up
    assert at.step == pytest.approx((150.0, 2 + 148 / 2))
    # FP32 is at step 76 then, between its evaluations at 75 and 90.
    between = np.interp(76, [75, 90], curve(150)[[74, 89]] + 0.02)
    assert at.eval_loss == pytest.approx((curve(150)[149] + 0.02, between))
    assert (at.phase, at.same_phase) == (pytest.approx((1.0, 76 / 150)), False)
    assert any("bf16 has 100% of its schedule behind it, fp32 51%" in note.text for note in found(*made).notes)
    assert pair.speed is not None
    assert pair.speed.value == pytest.approx(2.0)


def test_c110_total_seconds_hold_what_train_seconds_leave_out() -> None:
    """An arm that evaluates slower is no slower, and stands where it was at the same train second."""
    slow, plain = Made("bf16-seed0", settings=BF16, eval_s=2.0), Made("fp32-seed0", eval_s=0.1)
    pair = found(plain, slow).pairs[0]
    assert pair.speed is not None
    assert pair.speed.value == pytest.approx(1.0)
    train, total = pair.at_time("train"), pair.at_time("total")
    assert train is not None
    assert total is not None
    assert train.step == pytest.approx((150.0, 150.0))
    assert total.step[0] < total.step[1]
    arm = found(plain, slow).arm("bf16")
    assert arm.figures.time["eval"] == pytest.approx(10 * 2.0)


def test_a_constant_schedule_has_no_phases() -> None:
    constant = ("optim.schedule=constant",)
    made = [
        Made("fp32-seed0", settings=constant),
        Made("bf16-seed0", settings=(*BF16, *constant), step_s=np.full(150, 0.02)),
    ]
    both = found(*made)
    at = both.pairs[0].at_time("train")
    assert at is not None
    assert (at.phase, at.same_phase) == (None, True)
    assert not any(note.kind == "phase" for note in both.notes)


def test_c109_the_warm_up_is_left_out_of_all_arms_alike(figure: Callable[[str], None]) -> None:
    """Two slow first windows; how many were left out is told."""
    step_s = np.full(150, 0.05)
    slow = step_s.copy()
    slow[:2] += 1.0
    made = [Made("fp32-seed0", step_s=step_s), Made("bf16-seed0", settings=BF16, step_s=slow)]
    with_it, without = found(*made, warmup=0), found(*made)
    assert (with_it.warmup_step, without.warmup_step) == (0, 2)
    assert without.pairs[0].speed_all is not None
    assert without.pairs[0].speed_all.value == pytest.approx(1.0)
    assert with_it.pairs[0].speed_all is not None
    assert with_it.pairs[0].speed_all.value == pytest.approx(7.5 / 9.5)
    ratios = [one.pairs[0].speed_all.value for one in (without, with_it)]  # type: ignore[union-attr]
    figure(
        f"2 slow updates at its start, else as fast: {ratios[0]:.3f}x with k = {without.warmup}, {ratios[1]:.3f}x with k = 0"
    )
    assert without.arm("bf16").figures.tokens_per_s == pytest.approx(TOKENS / 0.05)
    assert any("behind step 2 (warm-up of 2 windows, in all arms alike)" in line for line in bases(without))


def test_where_rows_are_far_between_the_warm_up_ends_at_the_first_that_all_have() -> None:
    made = [Made("fp32-seed0", every=10), Made("bf16-seed0", every=10, settings=BF16)]
    assert found(*made).warmup_step == 10
    lone = found(Made("fp32-seed0", steps=2), Made("bf16-seed0", steps=2, settings=BF16), warmup=5)
    assert any(note.kind == "warm-up" for note in lone.notes)
    assert lone.pairs[0].speed is None


def points(*rows: tuple[int, float, float]) -> list[match.Point]:
    return [match.Point(step, seconds, 2 * seconds, loss) for step, seconds, loss in rows]


def test_between_evaluations_the_straight_line_is_taken_and_beyond_them_nothing() -> None:
    rows = points((10, 1.0, 5.0), (20, 2.0, 4.0), (30, 3.0, 4.5), (40, 5.0, 3.0))
    assert match.loss_at(rows, "train", 1.5) == pytest.approx(4.5)
    assert match.loss_at(rows, "total", 3.0) == pytest.approx(4.5)
    assert match.loss_at(rows, "train", 5.0) == 3.0
    assert match.loss_at(rows, "train", 0.9) is None
    assert match.loss_at(rows, "train", 5.1) is None
    assert match.to_loss(rows, 4.25) == pytest.approx((17.5, 1.75, 3.5))  # the first time, though it rises again
    assert match.to_loss(rows, 6.0) == (10.0, 1.0, 2.0)
    assert match.to_loss(rows, 2.9) is None


def test_the_way_to_a_loss_in_steps_and_in_seconds() -> None:
    made = [Made(f"{name}-seed{seed}", seed, settings=settings, step_s=np.full(150, step_s))
            for seed in (0, 1) for name, settings, step_s in (("fp32", (), 0.1), ("bf16", BF16, 0.05))]  # fmt: skip
    to = found(*made, target=3.0).pairs[0].to_loss
    assert to is not None
    assert to.steps is not None
    assert to.steps[0] == to.steps[1]
    assert to.steps_ratio is not None
    assert to.steps_ratio.value == 1.0
    assert to.train_s_ratio is not None
    assert to.train_s_ratio.value == pytest.approx(0.5)
    never = found(*made, target=0.1).pairs[0].to_loss
    assert never is not None
    assert never.steps is None


# -- what is told ------------------------------------------------------------------------------------------------------------------


def test_the_report_has_the_contracts_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(one.write(tmp_path)) for one in three()]
    assert cli.main(["compare", *paths, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"refused", "treatment", "arms", "matched_steps", "matched_seconds", "verdicts", "gates"} <= set(report)
    assert {"name", "runs", "steps", "attempts", "label_tokens", "train_s", "tokens_per_s"} <= set(report["arms"][0])
    at = report["matched_steps"][-1]
    assert (at["arm"], at["against"], at["step"]) == ("bf16", "fp32", 150)
    assert at["eval_loss_gap"] == pytest.approx(0.005)
    assert at["interval"][0] < 0.005 < at["interval"][1]
    assert report["matched_seconds"][-1]["clock"] == "total"
    assert report["verdicts"][0]["text"].startswith("bf16: 1.000x tokens/s")
    assert report["speed"][0]["ratio"] == pytest.approx(1.0)


def test_the_text_names_clocks_warm_up_and_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(one.write(tmp_path)) for one in three()]
    assert cli.main(["compare", *paths]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "2 arms against fp32, 3 seeds (0, 1, 2)\ntreatment  precision.compute (allowed to differ: precision.*, reduce.*)"
    )
    assert "Both begin behind step 2 (warm-up of 2 windows, in all arms alike)" in text
    assert "98.3% each" in text
    for label in ("eval", "save", "load", "compile", "data", "start", "lost", "gap"):
        assert f"not in train: {label}" in text
    assert "fp32 / fp32 / fp32 / fp32" in text
    assert "on the straight line between the evaluations" in text
    assert "what the figures recommend" in text


def test_figures_that_nobody_recorded_are_left_out() -> None:
    from mpdist.compare.text import text

    bare = found(
        *(Made(f"{name}-seed0", settings=settings, eval_every=0) for name, settings in (("fp32", ()), ("bf16", BF16)))
    )
    told = text(bare)
    assert "MFU" not in told
    assert "perplexity" not in told.replace("perplexity ratio", "")
    assert "final scale" not in told


def test_a_refused_command_line_imports_nothing_heavy(tmp_path: Path) -> None:
    probe = (
        "import sys\nfrom mpdist.cli import main\nstatus = main(['compare', 'nowhere'])\n"
        "print(status, sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'numpy', 'scipy'}))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path,
                          env={"PYTHONPATH": str(Path(__file__).resolve().parents[2])})  # fmt: skip
    assert done.stdout.strip() == "2 []"
