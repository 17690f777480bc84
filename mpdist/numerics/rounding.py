"""Rounding to any binary floating-point format, and bit patterns turned into numbers. NumPy; all numbers are float64.

FP64 holds every number of every format here exactly, so one rounding is one rounding. A sum of two numbers of a format
that was computed in FP64 and is rounded here once is what the format's own adder gives.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpdist.formats import NARROW, Format

Array = NDArray[np.float64]


def round_to(
    values: ArrayLike, form: Format, saturate: bool = False, generator: np.random.Generator | None = None
) -> Array:
    """The numbers of a format that are nearest to the values; ties go to the even one, subnormals are kept.

    saturate: what is too large becomes the largest number instead of infinity (NaN where the format has none). A format
    that has neither saturates always. generator: round stochastically instead, up with the probability that makes the
    mean exact; what is too large for the format is then decided after the rounding.
    """
    x = np.asarray(values, dtype=np.float64)
    if form.top == "scale":
        return _round_scale(x, form)
    _, exponents = np.frexp(x)
    unit = np.ldexp(1.0, np.maximum(exponents - 1, form.least_exponent) - form.fraction_bits)
    with np.errstate(invalid="ignore", over="ignore"):
        steps = x / unit
        if generator is None:
            rounded = np.rint(steps) * unit
        else:
            rounded = np.floor(steps + generator.random(x.shape)) * unit
        large = np.abs(rounded) > form.max
    if not large.any():
        return rounded
    beyond = form.max if saturate or form.top == "all" else np.inf if form.top == "ieee" else np.nan
    return np.where(large, np.copysign(beyond, x), rounded)


def _round_scale(x: Array, form: Format) -> Array:
    """E8M0 has no sign and no zero: the nearest power of two, the larger one where a value lies half-way."""
    with np.errstate(invalid="ignore"):
        mantissas, exponents = np.frexp(x)
        power = np.ldexp(1.0, np.clip(exponents - (mantissas < 0.75), -form.bias, form.bias))
    return np.where((x >= 0) & np.isfinite(x), np.where(x == 0, form.smallest_normal, power), np.nan)


def decode(form: Format, patterns: ArrayLike) -> Array:
    """The numbers that bit patterns stand for. patterns: integers below 2 ** form.bits."""
    bits = np.asarray(patterns, dtype=np.int64)
    fraction = bits & ((1 << form.fraction_bits) - 1)
    exponent = bits >> form.fraction_bits & ((1 << form.exponent_bits) - 1)
    if form.top == "scale":
        return np.where(exponent == (1 << form.exponent_bits) - 1, np.nan, np.ldexp(1.0, exponent - form.bias))
    normal = exponent > 0
    power = np.where(normal, exponent, 1) - form.bias - form.fraction_bits
    size = np.ldexp((fraction + (normal << form.fraction_bits)).astype(np.float64), power)
    last = exponent == (1 << form.exponent_bits) - 1
    if form.top == "ieee":
        size = np.where(last, np.where(fraction == 0, np.inf, np.nan), size)
    elif form.top == "nan":
        size = np.where(last & (fraction == (1 << form.fraction_bits) - 1), np.nan, size)
    return np.where(bits >> (form.exponent_bits + form.fraction_bits) & 1, -size, size)


class Blocks(NamedTuple):
    """A tensor in blocks: rounded elements times their block's scale are `values`. scales: one a block, in FP64."""

    values: Array
    scales: Array


def round_mx(values: ArrayLike, element: Format, block: int = 32) -> Blocks:
    """Blocks along the last dimension, which `block` divides, each with an E8M0 scale (OCP Microscaling Formats 1.0, 6.3).

    The scale is the power of two at or below the block's largest magnitude, over that of the format's largest number, so
    elements may saturate.
    """
    x = np.asarray(values, dtype=np.float64)
    cut = x.reshape(*x.shape[:-1], -1, block)
    largest = np.abs(cut).max(axis=-1, keepdims=True)
    form = NARROW["e8m0"]
    top = np.frexp(element.max)[1] - 1
    scales = np.ldexp(1.0, np.clip(np.frexp(largest)[1] - 1 - top, -form.bias, form.bias))
    scales = np.where(largest == 0, form.smallest_normal, scales)
    return Blocks((round_to(cut / scales, element, saturate=True) * scales).reshape(x.shape), scales[..., 0])


def round_nvfp4(values: ArrayLike, block: int = 16) -> Blocks:
    """E2M1 elements in blocks along the last dimension, each with an E4M3 scale, under one FP32 scale of the tensor.

    The tensor's scale puts the largest block's scale at E4M3's largest number: max / (6 x 448) (NVIDIA, NVFP4, 2025).
    """
    x = np.asarray(values, dtype=np.float64)
    element, form = NARROW["e2m1"], NARROW["e4m3"]
    cut = x.reshape(*x.shape[:-1], -1, block)
    largest = np.abs(cut).max(axis=-1, keepdims=True)
    whole = np.float64(np.float32(np.abs(x).max(initial=0.0) / (element.max * form.max))) or 1.0
    scales = (
        round_to(np.maximum(largest / element.max / whole, form.smallest_subnormal or 0.0), form, saturate=True) * whole
    )
    return Blocks((round_to(cut / scales, element, saturate=True) * scales).reshape(x.shape), scales[..., 0])
