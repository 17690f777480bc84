"""Comparisons of speed: what a busy machine, wasted attempts and a noisy control do to the verdict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compared import Made

from mpdist.compare.analyse import analyse
from mpdist.compare.pairs import ALL, UNDISTURBED
from mpdist.compare.tree import Comparison

BF16, FP16 = ("precision.compute=bf16",), ("precision.compute=fp16",)


def found(*made: Made, **asked: Any) -> Comparison:
    return analyse([one.run() for one in made], None, **asked)


def busy(draw: np.random.Generator, base: float) -> np.ndarray:
    """A third of the steps take up to three times as long."""
    return base * np.where(draw.random(150) < 0.33, draw.uniform(1.5, 3.0, 150), draw.normal(1.0, 0.01, 150))


def test_on_a_busy_machine_the_verdict_stands_on_undisturbed_steps() -> None:
    draw = np.random.default_rng(0)
    made = [Made(f"{name}-seed{seed}", seed, settings=settings, step_s=busy(draw, base))
            for seed in (0, 1, 2) for name, settings, base in (("fp32", (), 0.05), ("bf16", BF16, 0.04))]  # fmt: skip
    pair = found(*made).pairs[0]
    assert pair.basis == UNDISTURBED
    assert pair.speed is not None
    assert pair.speed_all is not None
    assert pair.speed.value == pytest.approx(1.25, rel=0.02)
    widths = [(one.high or 0) - (one.low or 0) for one in (pair.speed, pair.speed_all)]
    assert widths[0] < widths[1] / 3
    assert "of undisturbed steps" in found(*made).verdicts[0].line
    quiet = [Made(one.name, one.seed, settings=one.settings) for one in made]
    assert found(*quiet).pairs[0].basis == ALL


def test_attempts_that_were_wasted_cost_an_arm_its_speed_on_either_basis() -> None:
    draw = np.random.default_rng(1)
    skips = [(number, "non-finite gradients") for number in range(20, 170, 5)]
    made = [Made("fp32-seed0", step_s=busy(draw, 0.05)),
            Made("fp16-seed0", settings=FP16, step_s=busy(draw, 0.05), skips=skips, scale=2.0**40)]  # fmt: skip
    pair = found(*made).pairs[0]
    assert pair.basis == UNDISTURBED
    wasted = 1 / (1 + 30 / 148)
    assert pair.speed is not None
    assert pair.speed.value == pytest.approx(wasted, rel=0.03)


def control_of(apart: float, faster: float) -> Comparison:
    made = []
    for seed in (0, 1, 2):
        jitter = 1 + 0.001 * seed
        made.append(Made(f"fp32-seed{seed}", seed, step_s=np.full(150, 0.05 * jitter)))
        made.append(Made(f"bf16-seed{seed}", seed, settings=BF16, step_s=np.full(150, 0.05 / faster)))
        made.append(Made(f"control-seed{seed}", seed, step_s=np.full(150, 0.05 * (1 + apart * (seed == 1)))))
    return found(*made)


def test_the_speed_verdict_is_withheld_where_the_control_is_as_far_off() -> None:
    noisy = control_of(apart=0.08, faster=1.05)
    verdict = noisy.verdicts[0]
    assert (noisy.control, verdict.arm, verdict.speed) == ("control", "bf16", "withheld")
    assert "the A/A control control is up to" in verdict.line
    assert "measure again on a quiet machine" in [advice.rule for advice in noisy.guide]
    assert control_of(apart=0.001, faster=1.05).verdicts[0].speed == "faster"
    assert control_of(apart=0.08, faster=1.9).verdicts[0].speed == "faster"
