"""The plan as a picture: what a step holds moment by moment, what other settings would, and every row's origin.

One file, for a screen and for A4 paper; see ``paper``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from mpdist import paper, svg_charts
from mpdist.plan_memory import MARGIN
from mpdist.svg import Ink, Style, swatch
from mpdist.svg_charts import Bar, Parts
from mpdist.units import format_bytes

if TYPE_CHECKING:
    from mpdist.plan import Plan, Row

Held = Mapping[str, int]  # row name -> bytes

# Okabe and Ito's colours. Rows of like lightness differ in their hatching, for print in grey; a row that is a copy of
# another has its colour. In the order of the stacks, from the axis up: first what is there throughout a step.
INKS: dict[str, Ink] = {
    "overhead": Ink("#8c8c8c", "grid"),
    "parameters": Ink("#0072b2", on="#ffffff"),
    "moments": Ink("#009e73", "level"),
    "buffers": Ink("#000000", on="#ffffff"),
    "gradient_copies": Ink("#d55e00", "down"),
    "working": Ink("#56b4e9"),
    "gathered": Ink("#56b4e9", "up"),
    "gradients": Ink("#d55e00"),
    "activations": Ink("#e69f00", "dots"),
    "logits": Ink("#f0e442"),
    "comm": Ink("#cc79a7", "upright"),
    "optimizer_temporaries": Ink("#009e73", "up"),
    "snapshot": Ink("#0072b2", "down", on="#ffffff"),
}
OTHER = Ink("#666666")
STATES = ("parameters", "working", "gradients", "moments")
A_PAGE = 560.0  # pixels: bars that one page of paper has room for beside their heading, key and axis


class Choice(NamedTuple):
    """Settings that could be taken. rows: bytes on the device at the peak, together ``peak_bytes``. fits: None without
    a memory to fit in. note: what it costs, such as traffic and recomputation."""

    label: str
    rows: Held
    peak_bytes: int
    fits: bool | None = None
    note: str = ""


class TableRow(NamedTuple):
    """One row of the plan, in bytes: between steps, its own largest, at the rank's peak; and where they come from."""

    row: str
    rest: int
    peak: int
    at_peak: int
    formula: str


class TrafficRow(NamedTuple):
    """One collective's bytes on one rank in one step: handed over, sent within the node, sent to other nodes."""

    what: str
    dtype: str
    ranks: int
    payload: int
    within: int
    between: int
    formula: str


@dataclass(frozen=True)
class View:
    """What the page shows, in bytes of the rank that holds the most.

    curve: (moment, bytes by row) in the order of a step. simulated: the same of a simulation; samples: (index, bytes by
    row), finer, of what ``samples_of`` says. measured: (planned, measured) bytes by row, as a run's ledger holds them against
    each other. host: rows in host memory, drawn apart.
    Raises ValueError where a candidate's rows do not add up to its peak.
    """

    title: str
    subtitle: Sequence[str]
    curve: Sequence[tuple[str, Held]]
    candidates: Sequence[Choice] = ()
    rows: Sequence[TableRow] = ()
    traffic: Sequence[TrafficRow] = ()
    footnotes: Sequence[str] = ()
    simulated: Sequence[tuple[str, Held]] = ()
    samples: Sequence[tuple[float, Held]] = ()
    samples_of: str = ""
    measured: Mapping[str, tuple[int, int]] | None = None
    memory_bytes: int | None = None
    host: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for one in self.candidates:
            if sum(one.rows.values()) != one.peak_bytes:
                raise ValueError(f"{one.label}: rows of {sum(one.rows.values())} bytes, a peak of {one.peak_bytes}")

    def on_device(self, held: Held) -> dict[str, int]:
        return {row: count for row, count in held.items() if row not in self.host}

    @property
    def peak(self) -> tuple[int, str]:
        """(bytes, moment) of the curve's highest point."""
        totals = [(sum(self.on_device(held).values()), moment) for moment, held in self.curve]
        return max(totals, key=lambda total: total[0])


def view_of(plan: Plan, measured: Mapping[str, tuple[int, int]] | None = None, name: str = "", gpu: str = "") -> View:
    """What ``page`` draws of a plan and the candidates it has; measured as View has it. name: the run's; gpu: its device's."""
    from mpdist.plan_text import what

    facts = {line[:11].strip(): line[11:] for line in what(plan)}
    notes = [
        f"Planned by a closed formula, good to {MARGIN:.0%}: states are exact, activations are counted operator by operator.",
        "Columns stand at the moments that can be the peak; the paler bands between them only lead the eye.",
        "1 GiB = 2^30 bytes. Between steps: after the optimizer's step and before the next forward.",
    ]
    if plan.candidates:
        notes.insert(
            2, "Settings: as configured, then what fits, cheapest first, told by what differs from the configuration."
        )
    return View(
        title=f"Memory plan{f' of {name}' if name else ''}: {plan.asked.ranks} rank{'s' * (plan.asked.ranks != 1)}"
        + (f", {gpu}" if gpu else ""),
        subtitle=[facts[key] for key in ("model", "world", "precision", "batch")],
        curve=plan.moments,
        candidates=_choices(plan),
        rows=[TableRow(r.row, r.rest_bytes, r.peak_bytes, r.at_peak_bytes, r.formula) for r in plan.rows],
        traffic=[
            TrafficRow(
                f"{t.what}, {t.collective}", t.dtype, t.ranks, t.payload_within + t.payload_between, t.sent_within,
                t.sent_between, t.formula,
            )
            for t in plan.traffic
        ],
        footnotes=notes,
        measured=measured,
        memory_bytes=plan.memory_bytes,
        **_played(plan),
        host=frozenset(r.row for r in plan.rows if r.host),
    )  # fmt: skip


def _played(plan: Plan) -> dict[str, Any]:
    """View's fields of a simulation, its assumed overhead added so that it stands beside the formula's."""
    found = plan.simulation
    if found is None:
        return {}
    over = {"overhead": found.overhead}
    return {
        "simulated": [(part, {**over, **held}) for part, held in found.parts.items()],
        "samples": [(moment, {**over, **held}) for moment, held in found.samples],
        "samples_of": found.how() if len(found.played) == 1 else f"{found.played[-1]} of {found.layers} blocks",
    }


def _choices(plan: Plan) -> list[Choice]:
    """The plan itself and then its candidates, in their order: cheapest first."""
    if plan.peak_bytes is None:
        return []
    same = next((c for c in plan.candidates if not c.change), None)
    sent = (sum(t.sent_within for t in plan.traffic), sum(t.sent_between for t in plan.traffic))
    note = _cost(*sent, same.recompute if same else None, plan.host_bytes, plan.is_close)
    found = [Choice("as configured", _at_peak(plan.rows), plan.peak_bytes, plan.fits, note)]
    for c in plan.candidates:
        if c.change:
            note = _cost(c.sent_within, c.sent_between, c.recompute, c.host_bytes, c.is_close)
            fits = None if plan.memory_bytes is None else c.peak_bytes <= plan.memory_bytes
            found.append(Choice(c.change, _at_peak(c.rows), c.peak_bytes, fits, note))
    return found


def _at_peak(rows: Iterable[Row]) -> Held:
    return {r.row: r.at_peak_bytes for r in rows if not r.host}


def _cost(within: int, between: int, recompute: float | None, host: int, close: bool) -> str:
    """What a step sends and does twice, and what lies on the host. recompute: of forward's FLOPs."""
    parts = [f"sends {format_bytes(within + between)} a step" if within + between else "sends nothing"]
    if between:
        parts[0] += f", {format_bytes(between)} of it between nodes"
    if recompute is not None:
        parts.append(f"recomputes {recompute:.0%} of forward" if recompute else "recomputes nothing")
    if host:
        parts.append(f"{format_bytes(host)} on the host")
    if close:
        parts.append("less to spare than the plan may be off by")
    return "; ".join(parts)


def measured_of(pairs: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """View's ``measured`` from what plan_command.beside makes of a ledger: of each row the rank that is furthest off."""
    found: dict[str, tuple[int, int]] = {}
    for pair in pairs:
        if pair["measured_max_bytes"] is not None:
            gap, planned = pair["difference_bytes"], pair["planned_bytes"] or 0
            before = found.get(pair["row"], (0, 0))
            measured = pair["measured_max_bytes"] if gap is None else planned + gap
            found[pair["row"]] = (before[0] + planned, before[1] + measured)
    return found


def page(view: View) -> str:
    """The whole file. One section a page of paper; text that the drawings repeat stands in the tables too."""
    style = _style(view)
    body = [_header(view)]
    if view.curve:
        body.append(paper.section("Bytes on a rank over a step", _curve(view, style)))
    else:
        body.append("<p>The bytes are unknown until the model is built.</p>")
    if view.simulated or view.samples:
        body.append(paper.section("The same step, simulated", _simulated(view, style)))
    if view.candidates:
        body.append(paper.section("Settings that could be taken", _candidates(view, style)))
    if measured := _measured(view, style):
        body.append(paper.section("Planned and measured", measured))
    if view.rows:
        body.append(paper.section("Every row, and where it comes from", _rows(view, style)))
    if view.traffic:
        body.append(paper.section("What a rank sends in a step", _traffic(view), apart=False))
    if view.footnotes:
        items = "".join(f"<li>{escape(note)}</li>" for note in view.footnotes)
        body.append(f'<footer><ul class="notes">{items}</ul></footer>')
    return paper.document(view.title, body)


# ------------------------------------------------------------------------------------------------- drawings


def _style(view: View) -> Style:
    everywhere: list[Held] = [held for _, held in (*view.curve, *view.simulated, *view.samples)]
    everywhere += [one.rows for one in view.candidates] + [{r.row: r.peak for r in view.rows}]
    everywhere.append(dict.fromkeys(view.measured or (), 0))
    rows = dict.fromkeys(row for held in everywhere for row in held)
    inks = {row: INKS[row] for row in INKS if row in rows} | {row: OTHER for row in rows if row not in INKS}
    names = {row: row.replace("_", " ") for row in inks} | {"peak": "the rank's peak"}
    return Style(inks, names, view.memory_bytes)


def _stacks(style: Style, held: Iterable[Held]) -> list[Parts]:
    """Each with the same rows in the order of the stacks; rows that are nowhere left out."""
    every = list(held)
    rows = [row for row in style.inks if any(one.get(row) for one in every)]
    return [[(row, one.get(row, 0)) for row in rows] for one in every]


def _header(view: View) -> str:
    tiles = list[tuple[str, str, str, str]]()
    if view.curve:
        peak, moment = view.peak
        tiles.append(("Peak of a rank", format_bytes(peak), f"at {moment}", ""))
        if view.memory_bytes is not None:
            spare = view.memory_bytes - peak
            said, kind = f"fits, {format_bytes(spare)} to spare", "good"
            if spare < 0:
                said, kind = f"does not fit: {format_bytes(-spare)} short", "bad"
            elif spare < MARGIN * view.memory_bytes:  # which the plan may be off by
                said, kind = f"fits, but only by {format_bytes(spare)}", "close"
            tiles.append(("Memory of a device", format_bytes(view.memory_bytes), said, kind))
    if view.rows:
        states = sum(r.rest for r in view.rows if r.row in STATES)
        tiles.append(("Model states", format_bytes(states), "of a rank, between steps", ""))
    if host := sum(r.rest for r in view.rows if r.row in view.host):
        tiles.append(("On the host", format_bytes(host), "of a rank, between steps", ""))
    if sent := sum(t.within + t.between for t in view.traffic):
        tiles.append(("Sent in a step", format_bytes(sent), "by a rank", ""))
    boxes = "".join(
        f'<div class="{kind}"><dt>{escape(name)}</dt><dd><b>{escape(value)}</b> <span>{escape(under)}</span></dd></div>'
        for name, value, under, kind in tiles
    )
    lines = "".join(f"<p>{escape(line)}</p>" for line in view.subtitle)
    return f'<header><h1>{escape(view.title)}</h1>{lines}<dl class="tiles">{boxes}</dl></header>'


def _curve(view: View, style: Style) -> str:
    stacks = _stacks(style, (view.on_device(held) for _, held in view.curve))
    peak, moment = view.peak
    slots = [(name, parts) for (name, _), parts in zip(view.curve, stacks, strict=True)]
    label = f"Stacked bytes at each moment of a step; the peak is {format_bytes(peak)} at {moment}"
    (rest,) = _stacks(style, [{r.row: r.rest for r in view.rows if r.row in view.host}])
    height = 248 if rest else 280  # both stay on one page of paper, also in a wide font
    drawn = paper.figure(svg_charts.columns(style, slots, label, f"at the peak: {moment}", height))
    if not rest:
        return drawn
    more = [f"{style.name(r.row)} {format_bytes(r.peak)}" for r in view.rows if r.row in view.host and r.peak > r.rest]
    note = f"within a step: {', '.join(more)}" if more else ""
    host = Bar("On the host, between steps", rest, format_bytes(sum(n for _, n in rest)), note)
    apart = Style(style.inks, style.names)  # the limit is the device's
    drawing = svg_charts.bars(apart, [host], "Stacked bytes of a rank in host memory")
    return drawn + paper.figure((paper.legend(style, [row for row, _ in rest]) if len(rest) > 1 else "") + drawing)


def _simulated(view: View, style: Style) -> str:
    """Columns by part of a step and the finer curve, which may be of fewer blocks than the model has."""
    out = []
    if view.simulated:
        stacks = _stacks(style, (view.on_device(held) for _, held in view.simulated))
        slots = [(name, parts) for (name, _), parts in zip(view.simulated, stacks, strict=True)]
        peak, moment = max((sum(n for _, n in parts), name) for name, parts in slots)
        label = f"Stacked bytes by part of the simulated step; the peak is {format_bytes(peak)} in {moment}"
        caption = "Each part of a step at its highest point, in a run of the real sharding on tensors without contents."
        out.append(paper.figure(svg_charts.columns(style, slots, label, f"at the peak: {moment}", 236), caption))
    if view.samples:
        stacks = _stacks(style, (view.on_device(held) for _, held in view.samples))
        samples = [(time, parts) for (time, _), parts in zip(view.samples, stacks, strict=True)]
        peak = max(sum(n for _, n in parts) for parts in stacks)
        label = f"Stacked bytes over the simulated samples; the peak is {format_bytes(peak)}"
        apart = Style(style.inks, style.names, None if view.simulated else style.limit)
        drawing = svg_charts.areas(apart, samples, label, "at the highest sample", 216 if view.simulated else 380)
        out.append(paper.figure(drawing, view.samples_of))
    return "\n".join(out)


def _candidates(view: View, style: Style) -> str:
    stacks = _stacks(style, (one.rows for one in view.candidates))
    end = svg_charts.reach(max(one.peak_bytes for one in view.candidates), view.memory_bytes)
    items = [
        Bar(one.label, parts, format_bytes(one.peak_bytes), one.note, one.fits)
        for one, parts in zip(view.candidates, stacks, strict=True)
    ]
    keys = paper.legend(style, _visible(stacks, end))
    heights = [svg_charts.bar_height(item) for item in items]
    # Shared out evenly, a drawing may be larger than its share by one bar.
    figures = 1 if sum(heights) <= A_PAGE else math.ceil(sum(heights) / (A_PAGE - max(heights)))
    shares: list[list[Bar]] = [[] for _ in range(figures)]
    for item, start in zip(items, accumulate(heights, initial=0.0), strict=False):
        shares[int(start * figures / sum(heights))].append(item)
    label = "Stacked bytes at the peak of the candidate settings"
    return "\n".join(paper.figure(keys + svg_charts.bars(style, share, label, end)) for share in shares)


def _visible(stacks: Sequence[Parts], end: float) -> list[str]:
    """The rows that are at least half a pixel wide in one of the bars; a key to what nobody sees would only confuse."""
    most = [(one[0][0], max(n for _, n in one)) for one in zip(*stacks, strict=True)]
    return [row for row, count in most if count > end / 1500]


def _measured(view: View, style: Style) -> str:
    """Planned and measured, row by row; nothing without a ledger."""
    measured = view.measured or {}
    items = [(row, *measured[row]) for row in style.inks if any(measured.get(row, ()))]
    if not items:
        return ""
    caption = "Bars: what the run's ledger has measured, on the rank that is furthest off. Strokes: what was planned."
    return paper.figure(svg_charts.bullets(style, items, "Bytes of each row, planned and measured"), caption)


# --------------------------------------------------------------------------------------------------- tables


def _rows(view: View, style: Style) -> str:
    measured = view.measured
    more = ["measured", "difference"] if measured else []
    head = ["row", "between steps", "own peak", "at the peak", *more, "from"]

    def cells(r: TableRow, on_host: bool) -> list[str]:
        name = f"{swatch(style, r.row)} {escape(style.name(r.row))}{' (host)' if on_host else ''}"
        at_peak = "-" if on_host else format_bytes(r.at_peak)
        return [name, format_bytes(r.rest), format_bytes(r.peak), at_peak, *against(r.row), escape(r.formula)]

    def against(row: str) -> list[str]:
        if not measured:
            return []
        if row not in measured:
            return ["-", "-"]
        planned, count = measured[row]
        if count == planned:
            return [format_bytes(count), "none"]
        gap = f"{'+' if count > planned else '-'}{format_bytes(abs(count - planned))}"
        return [format_bytes(count), gap + (f" ({(count - planned) / planned:+.1%})" if planned else "")]

    shown = [r for r in view.rows if r.peak]
    device = [cells(r, False) for r in shown if r.row not in view.host]
    host = [cells(r, True) for r in shown if r.row in view.host]
    total = list[str]()
    if view.curve:
        peak, moment = view.peak
        total = ["<b>the rank's peak</b>", "", "", f"<b>{format_bytes(peak)}</b>", *against("")]
        total.append(f"at {escape(moment)}")
    return paper.table(head, [device, [total] if total else [], host], range(1, len(head) - 1))


def _traffic(view: View) -> str:
    head = ["what", "dtype", "ranks", "payload", "sent in the node", "sent between nodes", "from"]
    lines = [
        [
            escape(t.what), escape(t.dtype), str(t.ranks), *map(format_bytes, (t.payload, t.within, t.between)),
            escape(t.formula),
        ]
        for t in view.traffic
    ]  # fmt: skip
    sums = [sum(sizes) for sizes in zip(*((t.payload, t.within, t.between) for t in view.traffic), strict=True)]
    total = ["<b>together</b>", "", "", *(f"<b>{format_bytes(n)}</b>" for n in sums), ""]
    return paper.table(head, [lines, [total]], range(2, 6))
