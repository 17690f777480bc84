"""What a run left in its files, read by whoever looks at it later: each field has the type that its readers count on, or is
refused by file, line and name. A run's own sessions write these files; anything else may have happened to them since.

A schema maps dotted names to kinds. `*` stands for every value of an object, `[]` for every element of a list, and a name
that ends in `!` has to be there. Parents stand before what they hold.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpdist.errors import UsageError

_MANY = 2**63  # no count of anything is so large
_NONFINITE = ("nan", "inf", "-inf")
DO = "put it back as it was written, or leave the run out"


@dataclass(frozen=True)
class Kind:
    """said: what a value should be, in words."""

    said: str
    fits: Callable[[Any], bool]


Schema = Mapping[str, Kind]


def _number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MANY)


def _finite(value: Any) -> bool:
    return _number(value) and math.isfinite(value)


def _layered(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(own, list) and all(one is None or FIGURE.fits(one) for one in own) for own in value.values()
    )


def maybe(kind: Kind) -> Kind:
    return Kind(f"{kind.said} or null", lambda value: value is None or kind.fits(value))


TEXT = Kind("a text", lambda value: isinstance(value, str))
COUNT = Kind(
    "a whole number from 0", lambda v: isinstance(v, int) and not isinstance(v, bool) and 0 <= v < _MANY
)  # fmt: skip
FINITE = Kind("a finite number", _finite)
FIGURE = Kind('a number, or "nan", "inf" or "-inf"', lambda v: _number(v) or (isinstance(v, str) and v in _NONFINITE))
MAPPING = Kind("an object", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
_LAYERED = Kind("an object of lists of numbers", _layered)

STATUS: Schema = {
    "state!": TEXT, "step!": COUNT, "attempt!": COUNT, "reason": maybe(TEXT), "time": MAPPING, "time.*": FINITE, "first": MAPPING,
    "first.loss!": FIGURE, "first.label_tokens": COUNT,
}  # fmt: skip
PLAN: Schema = {
    "horizon": maybe(COUNT), "batch": MAPPING, "batch.*": maybe(FINITE), "rows": LIST, "rows.[]": MAPPING, "rows.[].row!": TEXT,
    "rows.[].at_peak_bytes": maybe(COUNT), "peak_bytes_per_rank": maybe(COUNT),
}  # fmt: skip
LEDGER: Schema = {
    "rows!": LIST, "rows.[]": MAPPING, "rows.[].row!": TEXT, "rows.[].rank!": COUNT, "rows.[].dtype": maybe(TEXT),
    "rows.[].measured_bytes": maybe(COUNT), "rows.[].planned_bytes": maybe(COUNT),
}  # fmt: skip
ENV: Schema = {
    "host": TEXT, "device": TEXT, "devices": LIST, "devices.[]": TEXT, "versions": MAPPING, "versions.*": maybe(TEXT),
    "variables": LIST, "variables.[]": TEXT, "layers": LIST, "layers.[]": TEXT, "data": maybe(MAPPING), "data.*": maybe(TEXT),
    "initial_weights": maybe(TEXT), "order": maybe(TEXT), "peak_flops": maybe(FINITE),
    "ranks": COUNT, "nodes": COUNT, "threads": maybe(COUNT),
}  # fmt: skip
EVENT: Schema = {
    "event!": TEXT, "step!": COUNT, "attempt!": COUNT, "reason": maybe(TEXT), "changes": LIST, "changes.[]": TEXT, "check": TEXT,
}  # fmt: skip
SKIP: Schema = {"reason!": TEXT, "scale": FINITE, "scale_after": FINITE, "window": COUNT}
SCALE: Schema = {"scale!": FINITE}
LOAD: Schema = {"session!": COUNT}
ROW: Schema = {"kind!": TEXT, "step!": COUNT, "session!": COUNT}
"""What `mpdist.record.read_metrics` puts rows in order by."""
_COMPARED: Schema = {"attempt!": COUNT, "train/label_tokens!": COUNT, "time/train_s!": FINITE}
_LOSSES = {"train": {"train/loss!": FIGURE}, "eval": {"eval/loss!": FIGURE}}
_COUNTED = frozenset(("train/label_tokens", "train/tokens", "train/slots", "scale/skipped"))


def load(path: Path, schema: Schema) -> dict[str, Any] | None:
    """A JSON object from a file; None if there is none. Raises UsageError for one that cannot be read, or does not fit."""
    with readable(path):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        value = json.loads(data)
        why = "it holds no JSON object"
    except RecursionError:
        value, why = None, "its values lie too deep in each other"
    except ValueError as error:
        value, why = None, f"it is no JSON: {error}"
    if not isinstance(value, dict):
        raise UsageError(f"{path} cannot be read", why, DO)
    check(value, schema, str(path))
    return value


@contextlib.contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """What the operating system has against reading, as a UsageError. path: where it does not say what it could not read."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or path} cannot be read: {error.strerror or error}"
        raise UsageError(what, "", "make it readable, or leave the run out") from error


def check(value: Mapping[str, Any], schema: Schema, where: str) -> None:
    """Raises UsageError for the first field that is not what the schema says. where: a file, with its line if it has some."""
    for pattern, kind in schema.items():
        must = pattern.endswith("!")
        for name, found in _at(value, pattern.removesuffix("!").split("."), must):
            if found is _MISSING:
                raise UsageError(f"{where} has no {name}", f"it should be {kind.said}", DO)
            if not kind.fits(found):
                shown = json.dumps(found, default=str)
                shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
                raise UsageError(f"{where}: {name} = {shown}", f"it should be {kind.said}", DO)


_MISSING = object()


def _at(value: Any, parts: list[str], must: bool, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of all that a pattern names; what a parent lacks altogether is that parent's own entry to tell."""
    if not parts:
        yield name, value
        return
    first, rest = parts[0], parts[1:]
    items: Iterator[tuple[Any, Any]] | list[tuple[Any, Any]] = []
    if first == "*" and isinstance(value, dict):
        items = list(value.items())
    elif first == "[]" and isinstance(value, list):
        items = list(enumerate(value))
    elif isinstance(value, dict) and first in value:
        items = [(first, value[first])]
    elif must and not rest and isinstance(value, dict):
        yield f"{name}{first}", _MISSING
    for key, own in items:
        yield from _at(own, rest, must, f"{name}{key}" + ("." if rest else ""))


def check_row(row: Mapping[str, Any], where: str) -> None:
    """A row of metrics.jsonl as comparisons read it: every figure is a number, and what they cannot do without is there."""
    check(row, _COMPARED, where)
    losses = _LOSSES.get(row["kind"])
    if losses is None:
        raise UsageError(f"{where}: kind = {row['kind']!r}", "it should be train or eval", DO)
    check(row, losses, where)
    check_figures(row, where)


def check_figures(row: Mapping[str, Any], where: str) -> None:
    """A row of metrics.jsonl whose figures are numbers, whichever there are."""
    check(row, {key: _metric(key) for key in row if "/" in key}, where)


def _metric(key: str) -> Kind:
    if key == "precision/by_layer":
        return _LAYERED
    if key in _COUNTED:
        return COUNT
    return FINITE if key.startswith(("time/", "mem/", "wire/")) else FIGURE


def check_event(event: Mapping[str, Any], where: str) -> None:
    """A line of events.jsonl as comparisons read it."""
    check(event, EVENT, where)
    more = {"skip": SKIP, "scale": SCALE, "load": LOAD}.get(event["event"])
    if more is not None:
        check(event, more, where)


def torn(path: Path) -> bool:
    """Whether a history ends in the middle of a line: a kill does that, and whoever cuts a file."""
    with readable(path), open(path, "rb") as file:
        if not file.seek(0, 2):
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"
