"""`mpdist numerics formats`: the float formats side by side, each figure held against the format's bit patterns."""

from __future__ import annotations

import numpy as np

from mpdist.formats import FORMATS, NARROW, Format
from mpdist.numerics.rounding import Array, decode

_HEAD = ("format", "bits", "exponent", "fraction", "bias", "largest", "smallest normal", "smallest subnormal", "epsilon",
         "binades", "below 1", "above 1")  # fmt: skip


def rows() -> list[dict[str, object]]:
    """One object a format: the facts, and `patterns`, how many bit patterns were decoded to check them."""
    return [_row(form) for form in (FORMATS | NARROW).values()]


def _row(form: Format) -> dict[str, object]:
    return {
        "format": form.name, "bits": form.bits, "exponent": form.exponent_bits, "fraction": form.fraction_bits,
        "bias": form.bias, "largest": form.max, "smallest normal": form.smallest_normal,
        "smallest subnormal": form.smallest_subnormal, "epsilon": form.eps, "binades": form.binades,
        "below 1": form.below_one,
        "above 1": 1 + form.eps, "patterns": check(form),
    }  # fmt: skip


def check(form: Format) -> int:
    """Decodes bit patterns, all of a format of up to 20 bits, else those at every border, and compares the facts with them.

    Returns how many were decoded. Raises AssertionError where a fact is wrong.
    """
    half = 1 << (form.bits - (form.top != "scale"))  # patterns without a sign, in the order of their numbers
    one = form.bias << form.fraction_bits
    first_normal = 1 << form.fraction_bits
    if form.bits <= 20:
        patterns = np.arange(half)
    else:
        borders = (0, first_normal, one, half - first_normal, half)
        patterns = np.unique(np.clip([b + d for b in borders for d in range(-4, 5)], 0, half - 1))
    numbers = decode(form, patterns)
    finite: Array = numbers[np.isfinite(numbers)]
    assert (np.diff(finite) > 0).all(), form.name
    facts = {
        "largest": (finite.max(), form.max),
        "one": (decode(form, one), 1.0),
        "above one": (decode(form, one + 1), 1 + form.eps),
        "below one": (decode(form, one - 1), form.below_one),
        "smallest": (finite[finite > 0].min(), form.smallest_subnormal or form.smallest_normal),
    }
    if form.top != "scale":
        facts["smallest normal"] = (decode(form, first_normal), form.smallest_normal)
        if first_normal > 1:
            facts["largest subnormal"] = (decode(form, first_normal - 1), form.smallest_normal * (1 - form.eps))
    for what, (found, said) in facts.items():
        if float(found) != said:
            raise AssertionError(f"{form.name}: {what} is {float(found)!r} by its bits and {said!r} by the table")
    return int(patterns.size)


def text() -> str:
    """All that the command prints."""
    listed = [[_shown(row[name]) for name in _HEAD] for row in rows()]
    widths = [max(len(line[i]) for line in [list(_HEAD), *listed]) for i in range(len(_HEAD))]
    lines = [
        "  ".join(f"{cell:>{wide}}" for cell, wide in zip(line, widths, strict=True)) for line in [list(_HEAD), *listed]
    ]
    counts = ", ".join(f"{row['format']} {row['patterns']}" for row in rows())
    notes = [
        f"checked against bit patterns: {counts} (all, up to 20 bits; else every border)",
        "tf32 is what a tensor core makes of FP32 inputs, and is stored in 32 bits; e8m0 is a scale, without sign or zero",
    ]
    return "\n".join([*lines, "", *notes])


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if not isinstance(value, float):
        return str(value)
    short = f"{value:.7g}"
    return f"{value:.9g}" if float(short) == 1 != value else short  # FP32's neighbour of 1 takes nine digits
