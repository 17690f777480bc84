"""Formats against their bit patterns, rounding against other implementations, and the lab's published figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpdist.formats import FORMATS, NARROW
from mpdist.numerics import table
from mpdist.numerics.rounding import decode, round_mx, round_nvfp4, round_to


def test_the_table_agrees_with_every_bit_pattern_and_a_wrong_fact_is_found(
    monkeypatch: pytest.MonkeyPatch, figure: Callable[[str], None]
) -> None:
    counts = {row["format"]: row["patterns"] for row in table.rows()}
    assert counts["fp16"] == counts["bf16"] == 2**15
    assert (counts["e2m1"], counts["tf32"]) == (8, 2**18)
    figure(f"patterns of one sign looked at: {counts}")
    assert {name: form.max for name, form in NARROW.items()} == {
        "e5m2": 57344,
        "e4m3": 448,
        "e2m1": 6,
        "e8m0": 2.0**127,
    }
    assert {name: form.bits for name, form in NARROW.items()} == {"e5m2": 8, "e4m3": 8, "e2m1": 4, "e8m0": 8}
    assert {name: form.bits for name, form in FORMATS.items()} == {"fp32": 32, "tf32": 19, "bf16": 16, "fp16": 16}
    monkeypatch.setattr(type(NARROW["e4m3"]), "max", property(lambda form: 480.0))
    with pytest.raises(AssertionError, match="e4m3: largest is 448"):
        table.check(NARROW["e4m3"])


def test_ties_go_to_the_even_neighbour_and_what_is_too_large_leaves_or_saturates() -> None:
    fp16, e4m3, e2m1 = FORMATS["fp16"], NARROW["e4m3"], NARROW["e2m1"]
    assert round_to([1 + 2**-12, 1 + 2**-11, 1 + 3 * 2**-12], fp16).tolist() == [1.0, 1.0, 1.0009765625]
    assert round_to([65519.99, 65520.0, -1e9], fp16).tolist() == [65504.0, np.inf, -np.inf]
    assert round_to([65520.0, -1e9], fp16, saturate=True).tolist() == [65504.0, -65504.0]
    assert round_to([464.0, 1e9], e4m3)[0] == 448.0
    assert np.isnan(round_to(1e9, e4m3))
    assert round_to([2.5, 3.5, 5.0, 100.0, 0.25], e2m1).tolist() == [2.0, 4.0, 4.0, 6.0, 0.0]
    assert np.signbit(round_to(-1e-30, fp16))


def test_stochastic_rounding_is_unbiased(figure: Callable[[str], None]) -> None:
    generator = np.random.default_rng(0)
    form, value = FORMATS["bf16"], 1.0 + 2**-10
    drawn = round_to(np.full(200_000, value), form, generator=generator)
    assert set(drawn.tolist()) == {1.0, 1.0 + 2**-7}
    assert round_to(value, form) == 1.0  # to the nearest would be off by all of it
    cases = {"bf16, 1 + 2^-10": drawn - value}
    values = generator.uniform(-2.0, 2.0, 200_000)  # down to subnormal numbers of the narrowest
    for name, form in (FORMATS | NARROW).items():
        if name not in ("fp32", "e8m0"):  # one as fine as what is drawn, one without zero and sign
            cases[name] = round_to(values, form, generator=generator) - values
    for name, error in cases.items():
        standard = error.std() / np.sqrt(len(error))
        figure(f"{name}: mean error {error.mean():+.2e} = {error.mean() / standard:+.2f} standard errors")
        assert abs(error.mean()) < 3 * standard


def test_blocks_share_a_scale() -> None:
    x = np.concatenate([np.full(32, 3.0), np.linspace(-500, 500, 32), np.zeros(32)])
    found = round_mx(x, NARROW["e4m3"])
    assert found.scales.tolist() == [2.0**-7, 1.0, 2.0**-127]  # 2^(1 - 8), 2^(8 - 8); zeros take the smallest
    assert found.values[:32].tolist() == [3.0] * 32
    assert found.values[32] == -448.0  # saturated: the scale is a power of two at or below
    assert not found.values[64:].any()
    fine = round_nvfp4(x[:64])
    assert np.abs(fine.values[:16] - 3.0).max() < 3.0 * 2**-3
    assert np.abs(fine.values).max() <= 500 * (1 + 2**-3)
    assert fine.scales.shape == (4,)
    assert not round_nvfp4(np.zeros(16)).values.any()


@pytest.fixture(scope="module")
def lab() -> dict[str, Any]:
    here = {**os.environ, "OMP_NUM_THREADS": "8"}  # the command sets its own
    command = [sys.executable, "-m", "mpdist.cli", "numerics", "lab", "--json"]
    done = subprocess.run(command, env=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def near(found: Any, wanted: float) -> bool:
    if isinstance(found, str):
        return found == {float("inf"): "inf"}.get(wanted, "nan")
    return found == pytest.approx(wanted, rel=0.03)


def test_the_labs_data_and_rounding_are_the_published_ones(lab: dict[str, Any], figure: Callable[[str], None]) -> None:
    assert lab["checks"]["mismatches"] == 0
    assert lab["checks"]["values"] == 200_499
    figure(f"roundings unlike NumPy's: {lab['checks']['mismatches']} of {lab['checks']['values']}")
    data = lab["data"]
    assert round(data["train_share"], 3) == 0.491
    assert round(data["test_share"], 3) == 0.502
    assert data["rule_accuracy"] == 0.9375
    assert round(data["optimum"], 6) == 0.079612
    assert round(data["step"], 4) == 0.8550


def test_the_labs_training_regimes(lab: dict[str, Any], figure: Callable[[str], None]) -> None:
    published = {
        "FP32": (1.214e-04, 0.9365, 0, 1),
        "FP16 weights, scaling": (2.598e-03, 0.9395, 1, 131072),
        "FP16 + FP32 master, scaling": (1.213e-04, 0.9365, 0, 131072),
        "FP16 + FP32 master, no scaling": (1.239e-04, 0.9365, 0, 1),
        "BF16 weights": (1.778e-02, 0.9468, 1, 1),
        "BF16 + FP32 master": (1.230e-04, 0.9365, 0, 1),
    }
    assert {row["regime"] for row in lab["regimes"]} == set(published)
    for row in lab["regimes"]:
        excess, accuracy, lost, scale = published[row["regime"]]
        figure(f"{row['regime']}: excess loss {row['excess']:.4g}, published {excess:.4g}")
        assert near(row["excess"], excess), row
        assert abs(row["accuracy"] - accuracy) < 0.002, row
        assert abs(row["lost"] - lost) < 0.002, row
        assert (row["skipped"], row["scale"]) == (0, scale), row


NAN, INF = float("nan"), float("inf")
CASTS: dict[str, list[tuple[float, float, float]]] = {
    "10": [(0, 0, 2.64e-4), *[(0, 0, 2.35e-4)] * 5, (0, 0, INF), (0, 0, INF), (0, 0.5750, NAN), (0, 0, 2.01e-3),
           (0.2178, 0, 5.95e-2), (0, 0, 1.96e-2), (1, 0, 1.0), (0, 0, 1.22e-2)],
    "3000": [(0.4690, 0, 3.29e-2), (0.2688, 0, 1.44e-2), (0.1187, 0, 1.43e-2), (0.0347, 0, 1.44e-2), (0.0066, 0, 1.44e-2),
             (0.0015, 0, 1.44e-2), (0.0002, 0, 1.44e-2), (0, 0, 1.44e-2), (0, 0.1365, NAN), (0, 0, 1.09e-1),
             (0.8279, 0, 4.50), (0.0017, 0, 3.02), (1, 0, 1.0), (0.1885, 0, 1.14)],
}  # fmt: skip


@pytest.mark.parametrize("step", CASTS)
def test_the_labs_casts(lab: dict[str, Any], step: str, figure: Callable[[str], None]) -> None:
    part = lab["casts"][step]
    assert near(part["smallest"], {"10": 4.1e-07, "3000": 1.15e-15}[step])
    assert near(part["largest"], {"10": 2.15e-04, "3000": 2.43e-04}[step])
    for row, (zero, infinite, error) in zip(part["rows"], CASTS[step], strict=True):
        assert abs(row["zero"] - zero) < 0.002, row
        assert abs(row["infinite"] - infinite) < 0.002, row
        assert near(row["error"], error), row
    zero = max(abs(row["zero"] - wanted[0]) for row, wanted in zip(part["rows"], CASTS[step], strict=True))
    figure(f"{len(part['rows'])} formats and scales: share flushed at most {zero:.5f} from the published")


def test_the_labs_accumulators(lab: dict[str, Any]) -> None:
    sums = {row["name"]: row for row in lab["sums"]}
    assert near(sums["weight gradient, fp16"]["sequential_error"], 2.08e-01)
    assert near(sums["weight gradient, fp16"]["pairwise_error"], 3.14e-02)
    assert near(sums["weight gradient, fp32"]["sequential_error"], 2.7e-05)
    assert near(sums["weight gradient, fp32"]["pairwise_error"], 4.1e-06)
    if "camera, fp16" in sums:  # where scikit-image is installed
        assert sums["camera, fp16"]["sequential"] == 2048.0
        assert sums["camera, fp16"]["pairwise"] == "inf"
        assert near(sums["camera, fp16"]["exact"], 132674.8857)
        assert near(sums["camera, fp32"]["sequential_error"], 7.43e-04)
        assert near(sums["camera, fp32"]["pairwise_error"], 8.03e-08)


def test_decode_knows_signs_infinities_and_nan() -> None:
    assert decode(FORMATS["fp16"], [0x3C00, 0xBC00, 0x7C00, 0x0001]).tolist() == [1.0, -1.0, INF, 2.0**-24]
    assert np.isnan(decode(NARROW["e4m3"], 0x7F))
    assert decode(NARROW["e4m3"], 0x7E) == 448.0


def test_the_neighbours_of_one_are_told_from_it() -> None:
    line = next(line.split() for line in table.text().splitlines() if line.split()[:1] == ["fp32"])
    assert line[-2:] == ["0.9999999", "1.00000012"]
