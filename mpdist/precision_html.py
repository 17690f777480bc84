"""A run's telemetry as one page: what its precision costs, layer by layer and step by step, and how its scale does.

Drawn from metrics.jsonl, events.jsonl and the sessions' env.json, so while the run goes on too. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from mpdist import paper, run_files
from mpdist.errors import UsageError
from mpdist.lines import number
from mpdist.record import read_metrics
from mpdist.scale import best_static, events
from mpdist.svg import BLACK, GREY, RULE, WIDTH, Canvas, text_width


class Kind(NamedTuple):
    """How a figure is drawn. worst: of several steps in one column. log: colours follow its logarithm."""

    title: str
    caption: str
    worst: Callable[[Sequence[float]], float] = max
    log: bool = False


_CAST = "Share of the gradient's elements that are not zero, "
KINDS = {
    "grad_flushed": Kind(
        "Gradient flushed to zero", _CAST + "which the compute dtype turns to zero at the scale in use."
    ),
    "grad_overflowed": Kind(
        "Gradient overflowed",
        _CAST + "which the compute dtype cannot hold; of a skipped attempt at this step, if there was one.",
    ),
    "grad_subnormal": Kind("Gradient below the normal numbers", _CAST + "where FP16 loses bits (a sample)."),
    "wire_flushed": Kind(
        "Flushed on the wire", "Share of the ranks' addends that their cast to the wire dtype turns to zero."
    ),
    "wire_overflowed": Kind(
        "Overflowed on the wire", "Share of the ranks' addends that their cast to the wire dtype cannot hold."
    ),
    "grad_zero": Kind(
        "Gradient zero",
        "Share of all elements: what backward's kernels have flushed, and rows of an embedding that no token used.",
    ),
    "unchanged_master": Kind(
        "Updates that the masters did not take", "Share of updates, not zero, that left the master as it was."
    ),
    "unchanged_working": Kind(
        "Updates that the working copies did not show",
        "Share of updates, not zero, after which the 16-bit copy is the same; masters add them up.",
    ),
    "update_ratio": Kind("Update to weight", "L2 norm of the step's change over the weights'.", log=True),
    "grad_norm": Kind("Gradient norm", "Unscaled, before the clip.", log=True),
    "weight_norm": Kind("Weight norm", "Of the masters.", log=True),
    "headroom_overflow": Kind(
        "Headroom to overflow", "Powers of two from the largest gradient element to FP16's largest number.", min
    ),
    "headroom_underflow": Kind(
        "Headroom to underflow",
        "Powers of two by which the scale may fall until FP16 flushes 1 % of the gradient.",
        min,
    ),
}
_CELLS = 2500  # of one map: what a page can hold of a dozen
_STOPS = ((247, 251, 255), (158, 202, 225), (49, 130, 189), (8, 48, 107))  # light to dark, also in grey print
_LEFT, _RIGHT, _TOP, _FOOT = 200.0, 110.0, 8.0, 34.0


@dataclass(frozen=True)
class Telemetry:
    """What a run's directory holds. rows: those with figures by layer, in order of step, of the newest session's layers."""

    name: str
    layers: list[str]
    rows: list[dict[str, Any]]
    warnings: list[str]
    static: str | None


def read(run: str | Path) -> Telemetry:
    """Raises UsageError where there is no run, or one without telemetry."""
    folder = Path(run)
    with run_files.readable(folder):
        return _read(folder)


def _read(folder: Path) -> Telemetry:
    if not (folder / "metrics.jsonl").exists():
        raise UsageError(
            f"{folder} holds no metrics.jsonl",
            "a precision page is drawn from a run's metrics",
            "give a run's directory",
        )
    every = read_metrics(folder, _check)
    rows = [row for row in every if "precision/by_layer" in row]
    layers: dict[int, list[str]] = {}
    for row in rows:
        session = row["session"]
        if session not in layers:
            env = run_files.load(folder / "sessions" / f"{session:04d}" / "env.json", run_files.ENV) or {}
            layers[session] = env.get("layers", [])
    if not rows or not layers[rows[-1]["session"]]:
        raise UsageError(f"{folder} has no telemetry by layer", "no logged step has been measured yet, or an older version ran it",
                         "wait until a step is logged (track.every)")  # fmt: skip
    names = layers[rows[-1]["session"]]
    happened = events(folder, run_files.check_event)
    best = best_static(every, happened)
    warned = [e["reason"] for e in happened if e.get("event") == "warning" and "check" in e]
    rows = [row for row in rows if layers[row["session"]] == names]
    _check_layers(rows, names, folder)
    return Telemetry(folder.resolve().name, names, rows, warned, str(best) if best is not None else None)


def _check(row: dict[str, Any], where: str) -> None:
    run_files.check_figures(row, where)
    if "precision/by_layer" in row:
        run_files.check(row, {"scale/value!": run_files.FIGURE, "scale/skipped!": run_files.COUNT}, where)


def _check_layers(rows: Sequence[dict[str, Any]], layers: Sequence[str], folder: Path) -> None:
    for row in rows:
        for key, values in row["precision/by_layer"].items():
            if len(values) != len(layers):
                what = f"{folder / 'metrics.jsonl'}: precision/by_layer.{key} has {len(values)} values at step {row['step']}"
                raise UsageError(what, f"its session's env.json names {len(layers)} layers", run_files.DO)


def draw(run: str, file: str) -> int:
    """The command. The exit status. Raises UsageError as `read` does, and where the file cannot be written."""
    text = page(read(run))
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {file}", error.strerror or str(error), "give a file that can be written") from None
    print(f"{file}: what the precision of {run} costs, by layer and step")
    return 0


# -- the page ------------------------------------------------------------------------------------------------------------


def page(found: Telemetry) -> str:
    last = found.rows[-1]
    steps = f"steps {found.rows[0]['step']} to {last['step']}, {len(found.rows)} of them measured"
    body = [
        f"<header><h1>Precision: {escape(found.name)}</h1><p>{steps}; {len(found.layers)} layers</p></header>",
        _tiles(found),
    ]
    if found.warnings:
        body.append(
            paper.section(
                "Found", "<ul>" + "".join(f"<li>{escape(w)}</li>" for w in found.warnings) + "</ul>", apart=False
            )
        )
    body.append(paper.section("Over all layers", _table(found), apart=False))
    quiet = []
    for key, kind in KINDS.items():
        grid = values_of(found, key)
        if not any(value for row in grid for value in row if value is not None):
            if any(value is not None for row in grid for value in row):
                quiet.append(kind.title.lower())
            continue
        columns, steps_shown = thinned(grid, [row["step"] for row in found.rows], kind.worst)
        each = -(-len(found.rows) // max(1, len(steps_shown)))
        caption = kind.caption + (
            f" A column is {each} measured steps: their {'least' if kind.worst is min else 'largest'}."
            if each > 1
            else ""
        )
        body.append(
            paper.section(
                kind.title, paper.figure(heat_map(kind, found.layers, columns, steps_shown), caption), apart=False
            )
        )
    if quiet:
        body.append(f'<p class="quiet">Zero in every layer at every measured step: {escape(", ".join(quiet))}.</p>')
    return paper.document(f"Precision: {found.name}", body)


def values_of(found: Telemetry, key: str) -> list[list[float | None]]:
    """[step][layer]"""
    nothing: list[float | None] = [None] * len(found.layers)
    return [[number(v) for v in row["precision/by_layer"].get(key, nothing)] for row in found.rows]


def thinned(
    grid: list[list[float | None]], steps: list[int], worst: Callable[[Sequence[float]], float]
) -> tuple[list[list[float | None]], list[int]]:
    """As many columns as a map can hold, each the worst of its steps; and the last step of each."""
    most = max(8, _CELLS // max(1, len(grid[0])))
    each = -(-len(grid) // most)
    columns: list[list[float | None]] = []
    for begin in range(0, len(grid), each):
        own = zip(*grid[begin : begin + each], strict=True)
        columns.append([worst(real) if (real := [v for v in values if v is not None]) else None for values in own])
    return columns, [steps[min(begin + each, len(steps)) - 1] for begin in range(0, len(grid), each)]


def _tiles(found: Telemetry) -> str:
    last = found.rows[-1]
    tiles = [("scale", f"{last['scale/value']:g}", f"{last['scale/skipped']} attempts skipped")]
    if found.static is not None:
        value, _, seen = found.static.partition(" (")
        tiles.append(("the best static scale", value, seen.rstrip(")")))
    for key, title in (("unchanged_master", "updates that masters lost"), ("grad_flushed", "gradient flushed")):
        if f"precision/{key}" in last:
            tiles.append((title, f"{last[f'precision/{key}']:.2%}", f"at step {last['step']}"))
    inner = "".join(
        f"<div><dt>{escape(t)}</dt><dd><b>{escape(v)}</b><span>{escape(n)}</span></dd></div>" for t, v, n in tiles
    )
    return f'<dl class="tiles">{inner}</dl>'


def _table(found: Telemetry) -> str:
    lines = []
    for key, kind in KINDS.items():
        own = [(number(row[f"precision/{key}"]), row["step"]) for row in found.rows if f"precision/{key}" in row]
        if own:
            worst = kind.worst([value for value, _ in own])
            at = next((step for value, step in own if value == worst), own[-1][1])  # where none is finite: the last
            lines.append([escape(kind.title), f"{own[0][0]:.3g}", f"{own[-1][0]:.3g}", f"{worst:.3g}", str(at)])
    return paper.table(["figure", "first", "last", "worst", "at step"], [lines], range(1, 5))


# -- a map -----------------------------------------------------------------------------------------------------------------


def heat_map(kind: Kind, layers: Sequence[str], columns: Sequence[Sequence[float | None]], steps: Sequence[int]) -> str:
    """columns: [step][layer]. The first layer is at the top; what is missing is grey."""
    tall = min(16.0, max(4.0, 420 / len(layers)))
    wide = min(40.0, (WIDTH - _LEFT - _RIGHT) / len(columns))
    canvas = Canvas(WIDTH, _TOP + max(tall * len(layers), 76) + _FOOT, f"{kind.title}, by layer and step")
    real = [v for column in columns for v in column if v is not None and math.isfinite(v) and (v > 0 or not kind.log)]
    low, high = min(real, default=0.0), max(real, default=1.0)
    if not kind.log and kind.worst is max:
        low = 0.0  # a share of nothing is white
    for x, (column, step) in enumerate(zip(columns, steps, strict=True)):
        for y, value in enumerate(column):
            box, where = (_LEFT + x * wide, _TOP + y * tall, wide, tall), f"{layers[y]}, step {step}"
            if value is None:
                canvas.rect(*box, RULE, f"{where}: nothing of the kind")
            else:
                colour = _colour(_place(value, low, high, kind))
                canvas.rect(*box, colour, f"{where}: {value:.3g}", data_value=f"{value:.6g}")
    every = math.ceil(12 / tall)
    for y in range(0, len(layers), every):
        canvas.text(_LEFT - 6, _TOP + (y + 0.5) * tall + 3.5, _fitting(layers[y]), 10, "end")
    foot, taken = _TOP + tall * len(layers) + 14, -1.0
    for x, step in enumerate(steps):
        centre, half = _LEFT + (x + 0.5) * wide, text_width(str(step), 10) / 2
        if centre - half > taken + 8:
            canvas.text(centre, foot, str(step), 10, "middle", fill=GREY)
            taken = centre + half
    canvas.text(_LEFT, foot + 15, "step", 10, fill=GREY)
    _key(canvas, kind, low, high)
    return str(canvas)


def _key(canvas: Canvas, kind: Kind, low: float, high: float) -> None:
    left, parts = WIDTH - _RIGHT + 16, 5
    for i in range(parts):
        share = 1 - i / (parts - 1)
        value = low * (high / low) ** share if kind.log and low > 0 else low + (high - low) * share
        dark = share if kind.worst is max else 1 - share
        canvas.rect(left, _TOP + i * 14, 14, 14, _colour(dark), stroke=BLACK, stroke_width=0.4)
        if low != high or i == 0:
            canvas.text(left + 20, _TOP + i * 14 + 10.5, f"{value:.2g}", 10)


def _place(value: float, low: float, high: float, kind: Kind) -> float:
    """0, light, to 1, dark: the worse the darker."""
    if not math.isfinite(value):
        return 1.0
    if kind.log:
        value, low, high = (math.log(max(v, 1e-300)) for v in (value, low, high))
    share = min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 1.0
    return share if kind.worst is max else 1 - share


def _colour(share: float) -> str:
    at = share * (len(_STOPS) - 1)
    i = min(int(at), len(_STOPS) - 2)
    return "#" + "".join(f"{round(a + (b - a) * (at - i)):02x}" for a, b in zip(_STOPS[i], _STOPS[i + 1], strict=True))


def _fitting(name: str) -> str:
    """The end of a name, which tells layers apart."""
    while text_width(name, 10) > _LEFT - 16 and "." in name:
        name = name.partition(".")[2]
    while text_width(name, 10) > _LEFT - 16:
        name = name[1:]
    return name
