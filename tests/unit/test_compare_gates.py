"""Gates: what they may say, when they hold, and the exit status that tells CI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared import Made, curve

from mpdist import cli
from mpdist.compare import gates
from mpdist.compare.analyse import analyse
from mpdist.compare.tree import Comparison, GateResult
from mpdist.errors import UsageError

BF16 = ("precision.compute=bf16",)


def arms(apart: tuple[float, ...] = (0.004, 0.006, 0.005), faster: float = 1.5, **bf16: Any) -> list[Made]:
    """BF16 with these gaps of the loss under seeds 0, 1, ...; the reference ends at an evaluation loss of about 2.68."""
    made = []
    for seed, gap in enumerate(apart):
        residual = np.where(np.arange(150) > 0, gap, 0.0)
        made.append(Made(f"fp32-seed{seed}", seed, step_s=np.full(150, 0.05 * (1 + seed / 1000))))
        made.append(
            Made(f"bf16-seed{seed}", seed, settings=BF16, residual=residual, step_s=np.full(150, 0.05 / faster), **bf16)
        )
    return made


def judged(gate: str, made: list[Made] | None = None) -> GateResult:
    return compared(made or arms(), gate).gates[0]


def compared(made: list[Made], *gate: str) -> Comparison:
    return analyse([one.run() for one in made], None, gate=list(gate))


def test_a_gate_is_a_quantity_a_relation_a_number_and_a_unit() -> None:
    found = gates.parse(
        ["loss_gap<=0.25%", " bf16:speed >= 1.2x ", "peak_memory<80GiB", "skipped<=3", "train_loss_gap>-1e-3"]
    )
    assert [(one.arm, one.quantity, one.relation, one.bound, one.unit) for one in found] == [
        (None, "loss_gap", "<=", 0.25, "%"), ("bf16", "speed", ">=", 1.2, "x"), (None, "peak_memory", "<", 80 * 2**30, "bytes"),
        (None, "skipped", "<=", 3.0, ""), (None, "train_loss_gap", ">", -0.001, ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("los_gap<=0.25%", "did you mean loss_gap?"),
        ("spede>=1.2x", "did you mean speed?"),
        ("speed>=1.2", "write speed>=1.2x"),
        ("speed>=120%", "the unit is '%'"),
        ("loss_gap<=0.25x", "it is in no unit or %"),
        ("loss_gap=0.25%", "a gate is"),
        ("loss_gap<=", "a gate is"),
        ("loss_gap<=0.25% and speed>=1x", "a gate is"),
        ("<=0.25%", "a gate is"),
        ("", "a gate is"),
        ("peak_memory<80G", "GiB"),
    ],
)
def test_what_is_no_gate_is_told_what_would_be(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        gates.parse([text])
    assert expected in str(caught.value)


def test_every_quantity_of_the_table_can_be_asked_for() -> None:
    for name, quantity in gates.QUANTITIES.items():
        for unit in quantity.units:
            written = {"bytes": "GiB"}.get(unit, unit)
            found = judged(f"{name}<=1000{written}")
            assert found.holds is True or found.text == "not measured", (name, unit, found)


def test_a_gate_holds_where_the_bound_does() -> None:
    """The gap is 5 thousandths, its one-sided 95 % bound 2.92 standard errors of 1 / sqrt(3) thousandths above it."""
    bound = 0.005 + 2.919986 * 0.001 / np.sqrt(3)
    assert judged(f"loss_gap<={bound + 1e-5:.6f}").holds is True
    undecided = judged(f"loss_gap<={bound - 1e-5:.6f}")
    assert undecided.holds is None
    assert "undecided, more seeds would tell" in undecided.text
    assert judged("loss_gap<=0.004").holds is False
    assert judged("loss_gap>=0.001").holds is True


def test_percent_is_of_the_reference() -> None:
    base = curve(150)[149] + 0.02
    assert judged("loss_gap<=1%").value == pytest.approx(100 * 0.005 / base)
    assert judged("perplexity_gap<=1%").value == pytest.approx(100 * np.expm1(0.005))


def test_speed_and_its_inverse() -> None:
    assert judged("speed>=1.2x").holds is True
    assert judged("speed>=1.2x").value == pytest.approx(1.5, rel=0.01)
    assert judged("step_time<=0.7x").holds is True
    assert judged("step_time<=0.66x").holds is False


def test_with_one_seed_an_estimate_holds_no_gate_and_a_count_does() -> None:
    for gate in ("loss_gap<=0.25%", "speed>=1.2x", "perplexity_gap<=1%", "steps_to_loss<=1.1x"):
        one = judged(gate, arms((0.005,)))
        assert one.holds is None, gate
        assert "one seed: nothing says what another would give): undecided" in one.text
    assert judged("loss_gap<=0.1%", arms((0.005,))).holds is False
    for gate in ("skipped<=0", "nonfinite<=0", "peak_memory<=1GiB", "peak_memory<=1x"):
        assert judged(gate, arms((0.005,))).holds is True, gate


@pytest.mark.parametrize("state", ["diverged", "running", "preempted", "failed", "unknown"])
def test_a_reference_that_has_not_come_to_its_end_holds_no_gate_against_it(state: str) -> None:
    made = arms()
    made[2].status = {"state": state}  # of seed 1
    found = compared(made, "loss_gap<=5%", "speed>=1.2x", "peak_memory<=1x", "nonfinite<=0", "peak_memory<=1GiB")
    assert [one.holds for one in found.gates] == [None, None, None, True, True]
    assert found.gates[0].text.startswith("fp32-seed1, of the reference, ")
    if state == "diverged":
        assert (found.verdicts[0].loss, found.verdicts[0].drift) == ("withheld", "unknown")
        assert "loss withheld: fp32-seed1, of the reference, diverged at step 150" in found.verdicts[0].line
    made[2].status, made[3].status = {}, {"state": state}
    assert all(one.holds is not True for one in compared(made, "loss_gap<=5%", "nonfinite<=0").gates)


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        ("loss_gap<=1e400", "1e400 is infinite"),
        ("speed>=-1e999x", "-1e999 is infinite"),
        ("peak_memory<=1", "has no unit"),
        ("wire_bytes<=5", "has no unit"),
    ],
)
def test_a_bound_is_finite_and_has_its_unit(gate: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        gates.parse([gate])


def test_what_is_counted_is_not_estimated() -> None:
    skips = [(1, "non-finite gradients"), (60, "non-finite gradients")]
    made = arms(skips=skips)
    assert judged("skipped<=6", made).holds is True
    assert judged("skipped<6", made).holds is False
    assert judged("skipped<=2%", made).value == pytest.approx(100 * 6 / (3 * 152))
    assert judged("peak_memory<=1x", made).value == 1.0
    assert judged("wire_bytes<=1x", made).text == "not measured"  # nothing travelled in either arm


def test_a_loss_that_is_not_finite_holds_no_gate() -> None:
    made = arms()
    for row in made[1].rows:
        if row["kind"] == "eval" and row["step"] == 150:
            row["eval/loss"] = float("nan")
    assert judged("loss_gap<=1%", made).holds is False


def test_a_gate_is_on_every_arm_but_the_reference_and_the_control() -> None:
    made = arms() + [Made(f"control-seed{seed}", seed) for seed in range(3)]
    assert [one.arm for one in compared(made, "loss_gap<=1%").gates] == ["bf16"]
    assert [one.arm for one in compared(made, "control:loss_gap<=1%").gates] == ["control"]
    with pytest.raises(UsageError, match="what the others are measured against"):
        compared(made, "fp32:loss_gap<=1%")
    with pytest.raises(UsageError, match="no arm is called fp8"):
        compared(made, "fp8:loss_gap<=1%")


def test_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(one.write(tmp_path)) for one in arms()]
    assert cli.main(["compare", *paths, "--gate", "loss_gap<=0.5%", "--gate", "speed>=1.2x"]) == 0
    told = capsys.readouterr()
    assert told.out.count("  holds: ") == 2
    assert told.err == ""
    assert cli.main(["compare", *paths, "--gate", "loss_gap<=0.1%", "--gate", "speed>=1.2x"]) == 7
    told = capsys.readouterr()
    assert "DOES NOT HOLD: loss_gap<=0.1% for bf16" in told.out
    assert told.err.startswith("1 of 2 gates does not hold:\n    loss_gap<=0.1% for bf16: 0.18")
    assert cli.main(["compare", *paths, "--gate", "los_gap<=0.1%"]) == 2
    assert "did you mean loss_gap?" in capsys.readouterr().err
    # A comparison that is refused says so, and not that a gate holds.
    (tmp_path / "other").mkdir()
    odd = Made("odd-seed0", settings=(*BF16, "optim.lr=2e-3")).write(tmp_path / "other")
    assert cli.main(["compare", paths[0], str(odd), "--gate", "loss_gap<=100%"]) == 2
