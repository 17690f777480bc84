"""Rounding in NumPy against torch's own casts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from mpdist.formats import FORMATS, NARROW
from mpdist.numerics.rounding import decode, round_to

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e5m2": torch.float8_e5m2,
    "e4m3": torch.float8_e4m3fn,
    "e8m0": torch.float8_e8m0fnu,
}


@pytest.mark.parametrize("name", DTYPES)
def test_every_pattern_is_torchs_number(name: str) -> None:
    form = (FORMATS | NARROW)[name]
    patterns = torch.arange(1 << form.bits, dtype=torch.int32).to(torch.int16 if form.bits == 16 else torch.uint8)
    assert np.array_equal(decode(form, np.arange(1 << form.bits)), patterns.view(DTYPES[name]).double(), equal_nan=True)


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2", "e4m3"])
def test_casts_of_all_16_bit_patterns_ties_and_random_values_are_torchs(
    name: str, figure: Callable[[str], None]
) -> None:
    form = (FORMATS | NARROW)[name]
    finite = np.sort(decode(form, np.arange(1 << form.bits)))
    finite = finite[np.isfinite(finite)]
    ties = (finite[1:] + finite[:-1]) / 2
    generator = np.random.default_rng(0)
    drawn = generator.standard_normal(100_000) * 2.0 ** generator.integers(-30, 17, 100_000)
    patterns = [decode(FORMATS[wide], np.arange(1 << 16)) for wide in ("fp16", "bf16")]
    values = torch.from_numpy(np.concatenate([*patterns, ties, np.nextafter(ties, np.inf), drawn]).astype(np.float32))
    if name == "e4m3":  # torch saturates what is finite here
        values = values[values.isfinite()]
    ours = round_to(values.double().numpy(), form, saturate=name == "e4m3")
    theirs = values.to(DTYPES[name]).double().numpy()
    assert np.array_equal(ours, theirs, equal_nan=True)
    figure(f"{len(ours)} values rounded as torch does")
    known = ~np.isnan(theirs)
    assert np.array_equal(np.signbit(ours[known]), np.signbit(theirs[known]))


def test_scales_are_torchs_above_its_subnormals() -> None:
    generator = np.random.default_rng(0)
    values = np.concatenate([np.abs(generator.standard_normal(50_000)) * 2.0 ** generator.integers(-110, 120, 50_000),
                             1.5 * 2.0 ** np.arange(-120, 127)]).astype(np.float32)  # fmt: skip
    theirs = torch.from_numpy(values).to(torch.float8_e8m0fnu).double().numpy()
    assert np.array_equal(round_to(values, NARROW["e8m0"]), theirs)
