from __future__ import annotations

import pytest

from mpdist.errors import UsageError
from mpdist.units import format_bytes, parse_bytes, parse_duration, parse_rate


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GiB", 80 * 2**30),
        ("80 gib", 80 * 2**30),
        ("1.5TB", 15 * 10**11),
        ("512MiB", 2**29),
        ("7", 7),
        (7, 7),
        ("9B", 9),
        ("2PiB", 2**51),
    ],
)
def test_bytes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "80 apples", "-1GiB", "1e3", "80GiB!", "1,5GB"])
def test_what_is_not_bytes_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    assert "80GiB" in caught.value.do


def test_a_unit_of_one_letter_is_asked_about() -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes("80G")
    assert caught.value.do == "did you mean 80GiB?"


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("50GB/s", 50e9),
        ("50GBps", 50e9),
        ("50 GB/s", 50e9),
        ("46GiB/s", 46 * 2**30),
        ("400Gb/s", 50e9),
        ("400Gbps", 50e9),
        ("400Gbit/s", 50e9),
        ("1.6 Tbits/s", 2e11),
        ("8Kibit/s", 1024),
    ],
)
def test_a_rate_is_of_bytes_or_of_bits(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text",
    [
        "400",
        "400G",
        "400g",
        "400Gb",
        "400GB",
        "400Gbit",
        "400gb/s",
        "400gbps",
        "400G/s",
        "400GiBit",
        "fast",
        "-1GB/s",
        "",
    ],
)
def test_a_rate_that_may_be_either_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="bits") as caught:
        parse_rate(text)
    assert "write" in caught.value.do


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10m", 600),
        ("2h30m", 9000),
        ("1.5h", 5400),
        ("90s", 90),
        ("250ms", 0.25),
        ("1d", 86400),
        (3, 3),
        ("0.5", 0.5),
        ("2h 30m", 9000),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "10 minutes", "30m2h", "-5s", -1, float("nan"), float("inf"), True, None])
def test_what_is_not_a_duration_is_refused(text: object) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)  # type: ignore[arg-type]


def test_formats() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 80 * 2**30, 2**41, 3 * 2**60)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "80.00 GiB",
        "2.00 TiB",
        "3072.00 PiB",
    ]
