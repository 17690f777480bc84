"""Amounts as people write them: bytes ('80GiB'), rates ('400Gbit/s') and durations ('2h30m')."""

from __future__ import annotations

import math
import re
from typing import Any

from mpdist.errors import UsageError

_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "pib": 2**50,
}
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_NUMBER = r"\d+(?:\.\d+)?"
_DURATION = rf"(?:({_NUMBER})d)?(?:({_NUMBER})h)?(?:({_NUMBER})m)?(?:({_NUMBER})s)?(?:({_NUMBER})ms)?"


def parse_bytes(text: str | int) -> int:
    """Bytes of '80GiB', '1.5 TB', '512MiB' or a plain count of bytes. Raises UsageError."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(rf"({_NUMBER})\s*([a-zA-Z]*)", text.strip())
    factor = _BYTES.get(match[2].lower() or "b") if match else None
    if match is None or factor is None:
        short = match is not None and match[2].lower() in ("k", "m", "g", "t", "p")  # of 1000 or of 1024?
        raise UsageError(
            f"{text!r} is not an amount of memory",
            "it takes a number and a unit: B, KB, MB, GB, TB, PB (powers of 1000) or KiB, MiB, GiB, TiB, PiB (of 1024)",
            f"did you mean {match[1]}{match[2].upper()}iB?" if match and short else "write it like 80GiB",
        )
    return round(float(match[1]) * factor)


def parse_rate(text: str) -> float:
    """Bytes/s of '50GB/s' or '46GiB/s' (bytes) and of '400Gbit/s', '400Gb/s' or '400Gbps' (bits, as networks are sold).

    Raises UsageError for what can be read as either, such as '400gb/s' or '400G', and without `/s` or `ps`.
    """
    match = re.fullmatch(rf"({_NUMBER})\s*([kKMGTP]i?)(B|[bB]its?|b)(/s|ps)", text.strip())
    if match is not None:
        return float(match[1]) * _BYTES[f"{match[2].lower()}b"] / (1 if match[3] == "B" else 8)
    loose = re.fullmatch(rf"({_NUMBER})\s*([kmgtp]?i?)(?:b?(?:/s|ps)?)", text.strip(), re.IGNORECASE)
    if loose is not None:
        unit = (loose[2][:1].upper() or "G") + loose[2][1:].lower()
        raise UsageError(
            f"{text!r} may be bits or bytes a second",
            "networks are sold in bits, memory in bytes, and there are 8 bits to a byte",
            f"write {loose[1]}{unit}bit/s or {loose[1]}{unit}B/s",
        )
    raise UsageError(
        f"{text!r} is not a rate of bytes or bits a second",
        "it takes a number and a unit: GB/s or GiB/s are bytes, Gbit/s, Gb/s or Gbps are bits; K, M, T and P likewise",
        "write it like 400Gbit/s or 50GB/s",
    )


def format_bytes(count: int | float) -> str:
    """The binary unit that keeps the number below 1024: 1536 -> '1.50 KiB'."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} PiB"


def parse_duration(text: str | int | float) -> float:
    """Seconds of '10m', '2h30m', '1.5h', '90s', '250ms' or a plain number of seconds. Raises UsageError."""
    if isinstance(text, (int, float)) and not isinstance(text, bool) and math.isfinite(text) and text >= 0:
        return float(text)
    if isinstance(text, str):
        compact = text.strip().replace(" ", "").lower()
        if re.fullmatch(_NUMBER, compact):
            return float(compact)
        match = re.fullmatch(_DURATION, compact)
        if match and compact:
            units = zip(match.groups(), _SECONDS.values(), strict=True)
            return sum(float(number) * seconds for number, seconds in units if number)
    raise UsageError(
        f"{text!r} is not a length of time",
        "a length of time is numbers with units, largest first: d, h, m, s, ms; or a number of seconds",
        "write it like 10m or 2h30m",
    )


def parse_time_limit(text: Any) -> Any:
    """A job's time limit in seconds: a length of time, or one of Slurm's own forms, M:S to D-H:M:S.

    A whole number is minutes to Slurm and seconds to `parse_duration`: UsageError. What is neither is given back.
    """
    word = str(text).strip()
    if re.fullmatch(r"\d+", word, re.ASCII) and int(word):  # a frozen configuration has a number with a point
        raise UsageError(
            f"{word} is not a time limit",
            f"Slurm would take it for minutes ({int(word) / 60:.4g} hours), and a bare length is seconds here "
            f"({int(word) / 60:.4g} minutes)",
            f"write {word}m or {word}s",
        )
    match = re.fullmatch(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(?:(\d+):)?(\d+):(\d+))", word, re.ASCII)
    if match is None or not isinstance(text, str):
        return text
    days, *clock = (int(part or 0) for part in match.groups())
    hours, minutes, seconds = (a + b for a, b in zip(clock[:3], clock[3:], strict=True))
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_node_memory(text: Any) -> Any:
    """A node's memory, as text for `parse_bytes`. Slurm's own units are of 1024: 200G -> 200GiB; 0 is all.

    Another bare number is MiB to Slurm and bytes to `parse_bytes`: UsageError. What is no amount is given back.
    """
    word = str(text).strip()
    if re.fullmatch(r"\d+", word, re.ASCII) and int(word):
        why = "it lacks its unit: Slurm would take it for MiB, and a bare amount is bytes here"
        raise UsageError(f"{word} is not an amount of memory", why, f"write {word}M, or with its unit, such as 200GiB")
    if match := re.fullmatch(r"(\d+)([kmgt])", word, re.ASCII | re.IGNORECASE):
        return f"{match[1]}{match[2].upper()}iB"
    if isinstance(text, str):
        parse_bytes(text)
    return "0" if text == 0 and text is not False else text
