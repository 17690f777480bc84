"""The engines agree, in a part of the table that `python tests/agreement.py` makes; and what finds a drift can fail."""

from __future__ import annotations

import math
from dataclasses import replace

import agreement
import pytest
from agreement import CASES, CONTROL, DRILLED, FAULTS, HALF, ON_TWO, PLAIN, REFERENCE, Results

pytestmark = pytest.mark.world

LONG = [replace(PLAIN, seeds=1), replace(HALF, seeds=1, steps=30)]
# BF16 alone: FP32's tolerance leaves a drift no room. What hurts it is looked for in the same steps, seeds and model.
MANY = replace(CONTROL, engines=ON_TWO, steps=10, seeds=7)
SCALED = replace(DRILLED, seeds=1, steps=14)
UNSCALED = replace(SCALED, name="FP32 twin", options={}, overflows=(), engines=(REFERENCE,))


@pytest.fixture(scope="module")
def results() -> Results:
    jobs = [(case, engine, "") for case in (*LONG, MANY, SCALED, UNSCALED) for engine in case.engines]
    jobs += [(MANY, REFERENCE, fault) for fault in FAULTS]
    return agreement.run(jobs, timeout=400.0)


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_engines_agree_over_many_steps(results: Results, case: agreement.Case) -> None:
    """FP32: losses within 1e-6, norms within 1e-6 of their size. BF16: losses within 2e-3, the first within 1e-5."""
    plain = results[case.name, REFERENCE, ""][0]
    assert len(plain.losses) == case.steps >= 30
    assert plain.losses[-1] < plain.losses[0] - 0.5  # there is something to agree about
    assert 0 < sum(norm > case.options["clip"] for norm in plain.norms) < case.steps
    assert case.bound.loss == {"FP32, clip": 1e-6, "BF16, clip": 2e-3}[case.name]
    assert not agreement.faults_of(case, results)
    firsts = [results[case.name, engine, ""][0].losses[0] for engine in ON_TWO]
    assert max(firsts) - min(firsts) < 1e-5  # all begin from masters that were never rounded


def test_no_engine_drifts(results: Results) -> None:
    pairs = {key: pair for key, pair in agreement.pairs_of(results).items() if key[0] == MANY.name and not key[2]}
    assert len(pairs) == len(ON_TWO) - 1
    assert not {key: drift for key, drift in agreement.drifts(pairs).items() if drift.found}


@pytest.mark.parametrize("fault", FAULTS)
def test_drift_is_found_where_losses_stay_within_the_tolerance(results: Results, fault: str) -> None:
    key = MANY.name, REFERENCE, fault
    pairs = {k: pair for k, pair in agreement.pairs_of(results).items() if k[0] == MANY.name and k[2]}
    assert agreement.gap(*pairs[key]).loss < HALF.bound.loss
    found = {figure for (other, figure), drift in agreement.drifts(pairs).items() if other == key and drift.found}
    assert {"factor": "norm", "clip": "norm after the clip", "twice": "norm", "rate": "loss"}[fault] in found


def test_fp16_engines_scale_and_skip_alike(results: Results) -> None:
    """Rank 1 overflows at attempts 1, 2 and 6; every third applied step in a row doubles the scale."""
    courses = {engine: results[SCALED.name, engine, ""][0] for engine in ON_TWO}
    for engine, course in courses.items():
        assert course.scales[:6] == [65536.0, 32768.0, 16384.0, 16384.0, 16384.0, 32768.0], engine
        assert course.scales[6:] == [16384.0] * 3 + [32768.0] * 3 + [65536.0] * 3 + [131072.0] * 2
        assert course.applied == [attempt not in agreement.OVERFLOWS for attempt in range(1, 18)]
        assert course.lrs == courses[REFERENCE].lrs
        assert len(set(course.lrs)) > 10
    assert not agreement.faults_of(SCALED, results)


def test_the_norm_that_adam_sees_does_not_jump_when_the_scale_grows(results: Results) -> None:
    plain = results[UNSCALED.name, REFERENCE, ""][0].seen
    for engine in ON_TWO:
        seen = results[SCALED.name, engine, ""][0].seen
        assert max(abs(math.log(a / b)) for a, b in zip(seen, plain, strict=True)) < 0.01, engine


@pytest.mark.slow
def test_every_case_of_the_table_agrees_in_its_first_steps() -> None:
    cases = [replace(case, seeds=1, steps=2) for case in CASES if case not in (PLAIN, HALF, DRILLED)]
    results = agreement.run([(case, engine, "") for case in cases for engine in case.engines], timeout=900.0)
    assert not [line for case in cases for line in agreement.faults_of(case, results)]
