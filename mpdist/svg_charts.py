"""Stacks of bytes drawn: upright at the moments of a step, as areas over many samples, level side by side.

A part is told from its neighbours by colour, by hatching and by its label, so that greyscale print and colour-blind
eyes do. Every block says its part and its bytes in ``data-part`` and ``data-bytes``, and as a tooltip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from mpdist.svg import BAD, BLACK, GOOD, GREY, RULE, WIDTH, Canvas, Style, hatching, text_width, ticks, wrapped
from mpdist.units import format_bytes

Parts = Sequence[tuple[str, int]]  # (part's key, bytes), from the axis outwards


@dataclass(frozen=True)
class Bar:
    """One horizontal bar: its parts in bytes, and what stands beside it. fits: drawn as a tick, a cross or neither."""

    label: str
    parts: Parts
    value: str
    note: str = ""
    fits: bool | None = None


def reach(largest: int, limit: int | None) -> float:
    """Bytes at the end of an axis: the limit as well, unless the drawing would shrink to less than a third of it."""
    shown = limit if limit is not None and limit <= 3 * largest else 0
    return max(largest, shown, 1) * 1.08


# ------------------------------------------------------------------------------------------- upright stacks

_LEFT, _LIMIT, _LEGEND, _TOP = 62.0, 82.0, 220.0, 28.0


@dataclass(frozen=True)
class _Plot:
    """The frame of an upright drawing: bytes 0 to ``top`` over ``height`` pixels, legend on the right."""

    canvas: Canvas
    style: Style
    top: float
    height: float

    @property
    def width(self) -> float:
        return self.canvas.width - _LEFT - _LIMIT - _LEGEND

    def y(self, count: float) -> float:
        return _TOP + self.height * (1 - count / self.top)

    def axis(self) -> None:
        for count, label in [(0, "0"), *ticks(self.top)]:
            y = self.y(count)
            stroke = BLACK if not count else RULE
            self.canvas.line(_LEFT, y, _LEFT + self.width, y, stroke, stroke_width=1)
            self.canvas.text(_LEFT - 7, y + 4, label, anchor="end", fill=GREY)

    def limit(self) -> None:
        limit, end = self.style.limit, _LEFT + self.width
        if limit is None:
            return
        if limit <= self.top:
            y = self.y(limit)
            self.canvas.limit(_LEFT, y, end, y)
            self.canvas.text(end + 6, y - 2, "memory", 11, bold=True)
            self.canvas.text(end + 6, y + 11, format_bytes(limit), 11)
            return
        x = end + 12
        self.canvas.line(x, _TOP + 34, x, _TOP + 2, BLACK, stroke_width=2)
        self.canvas.shape([(x - 4, _TOP + 5), (x + 4, _TOP + 5), (x, _TOP - 4)], BLACK)
        for line, text in enumerate(("memory", format_bytes(limit), "far above")):
            self.canvas.text(x + 8, _TOP + 8 + 13 * line, text, 11, bold=not line)

    def legend(self, parts: Parts, head: str) -> None:
        """Every part from the top of the stack down, with its bytes at the moment that ``head`` names."""
        x, y, end = self.canvas.width - _LEGEND + 10, _TOP + 4, self.canvas.width - 2
        for line in wrapped(head, 11, _LEGEND - 14, bold=True):
            self.canvas.text(x, y, line, 11, bold=True)
            y += 14
        y += 8
        for part, count in reversed(parts):
            self.canvas.inked(x, y - 10, 13, 13, self.style.inks[part], stroke=BLACK, stroke_width=0.6)
            self.canvas.text(x + 19, y, self.style.name(part), 11, fill=BLACK if count else "#6b6b6b")
            self.canvas.text(end, y, format_bytes(count) if count else "-", 11, anchor="end")
            y += 19
        self.canvas.line(x, y - 10, end, y - 10, BLACK, stroke_width=1)
        self.canvas.text(x, y + 5, "sum", 11, bold=True)
        self.canvas.text(end, y + 5, format_bytes(sum(n for _, n in parts)), 11, anchor="end", bold=True)

    def total(self, x: float, count: int, peak: bool) -> None:
        """Above its column, and above the limit's line where that would run through it."""
        y = self.y(count) - 6
        limit = self.style.limit
        if limit is not None and limit <= self.top and y - (28 if peak else 14) < self.y(limit) < y + 6:
            y = self.y(limit) - 7
        over = limit is not None and count > limit
        self.canvas.text(x, y, format_bytes(count), 12, "middle", peak, BAD if over else BLACK, "#ffffff")
        if peak:
            self.canvas.text(x, y - 14, "peak", 11, "middle", True, BAD if over else BLACK, "#ffffff")


def _frame(style: Style, label: str, head: str, stacks: Sequence[Parts], at: int, height: float, foot: float) -> _Plot:
    """foot: pixels below the axis. at: which of the stacks the legend spells out."""
    least = 14 * len(wrapped(head, 11, _LEGEND - 14, bold=True)) + 19 * len(stacks[at]) + 30
    height = max(height, least - foot)
    canvas = Canvas(WIDTH, _TOP + height + foot, label)
    plot = _Plot(canvas, style, reach(max(sum(n for _, n in parts) for parts in stacks), style.limit), height)
    plot.axis()
    plot.legend(stacks[at], head)
    return plot


def columns(style: Style, slots: Sequence[tuple[str, Parts]], label: str, head: str, height: float = 280) -> str:
    """A stack at each moment, all with the same parts; what lies between two moments is only hinted at."""
    totals = [sum(n for _, n in parts) for _, parts in slots]
    peak = totals.index(max(totals))
    each = (WIDTH - _LEFT - _LIMIT - _LEGEND) / len(slots)
    names = [wrapped(moment, 11, each - 6, bold=i == peak) for i, (moment, _) in enumerate(slots)]
    foot = 18 + 13 * max(len(name) for name in names)
    plot = _frame(style, label, head, [parts for _, parts in slots], peak, height, foot)
    canvas = plot.canvas
    wide = min(0.7 * each, 120)
    lefts = [_LEFT + each * (i + 0.5) - wide / 2 for i in range(len(slots))]
    for x, x2, (_, parts), (_, parts2) in zip(lefts, lefts[1:], slots, slots[1:], strict=False):
        low = low2 = 0
        for (part, count), (_, count2) in zip(parts, parts2, strict=True):
            a, b = low + count, low2 + count2
            if count or count2:
                points = [(x + wide, plot.y(low)), (x + wide, plot.y(a)), (x2, plot.y(b)), (x2, plot.y(low2))]
                canvas.shape(points, style.inks[part].colour, fill_opacity=0.28)
            low, low2 = a, b
    cut = None if style.limit is None else (_LEFT, plot.y(style.limit), plot.width, 0.0)
    for i, (x, (moment, parts)) in enumerate(zip(lefts, slots, strict=True)):
        low = 0
        for part, count in parts:
            box = (x, plot.y(low + count), wide, plot.y(low) - plot.y(low + count))
            _block(canvas, style, part, count, box, moment, cut)
            low += count
        for line, text in enumerate(names[i]):
            canvas.text(x + wide / 2, _TOP + plot.height + 16 + 13 * line, text, 11, "middle", i == peak)
    canvas.line(_LEFT, plot.y(0), _LEFT + plot.width, plot.y(0), stroke_width=1)
    plot.limit()
    for i, total in enumerate(totals):
        plot.total(lefts[i] + wide / 2, total, i == peak)
    return str(canvas)


Box = tuple[float, float, float, float]  # left, top, width, height


def _block(canvas: Canvas, style: Style, part: str, count: int, box: Box, when: str, cut: Box | None) -> None:
    """One part of a stack, with its name and amount inside where there is room. cut: a line that the text keeps off."""
    if not count:
        return
    ink, name, amount = style.inks[part], style.name(part), format_bytes(count)
    title = f"{name}: {amount}, {when}" if when else f"{name}: {amount}"
    canvas.inked(*box, ink, title, stroke="#ffffff", stroke_width=0.7, data_part=part, data_bytes=count)
    x, y, w, h = _beside(box, cut) if cut else box
    for lines in ([f"{name} {amount}"], [name, amount], [amount]):
        wide, high = max(text_width(line, 10) for line in lines), 12 * len(lines)
        if wide + 6 > w or high + 1 > h:
            continue
        top = y + (h - high) / 2
        if ink.hatch != "none":
            canvas.rect(x + w / 2 - wide / 2 - 3, top, wide + 6, high, ink.colour)
        for i, line in enumerate(lines):
            canvas.text(x + w / 2, top + 9.4 + 12 * i, line, 10, "middle", fill=ink.on)
        return


def _beside(box: Box, cut: Box) -> Box:
    """The larger part of the box on one side of the line ``cut``, which is upright or level; the box if it is not hit."""
    x, y, w, h = box
    left, top, wide, high = cut
    if wide == 0 and x < left < x + w:
        return (x, y, left - x - 3, h) if left - x > x + w - left else (left + 3, y, x + w - left - 3, h)
    if high == 0 and y < top < y + h:
        return (x, y, w, top - y - 3) if top - y > y + h - top else (x, top + 3, w, y + h - top - 3)
    return box


def areas(style: Style, samples: Sequence[tuple[float, Parts]], label: str, head: str, height: float = 380) -> str:
    """Stacked steps: each sample holds until the next. Of very many, those with the largest sum of each pixel stay."""
    kept, plot_width = list(samples), WIDTH - _LEFT - _LIMIT - _LEGEND
    first, span = kept[0][0], max(kept[-1][0] - kept[0][0], 1e-9)
    if len(kept) > plot_width:
        best: dict[int, tuple[float, Parts]] = {}
        for sample in kept:
            pixel = int((sample[0] - first) / span * plot_width)
            if pixel not in best or sum(n for _, n in sample[1]) > sum(n for _, n in best[pixel][1]):
                best[pixel] = sample
        kept = [best[pixel] for pixel in sorted(best)]
    totals = [sum(n for _, n in parts) for _, parts in kept]
    peak = totals.index(max(totals))
    plot = _frame(style, label, head, [parts for _, parts in kept], peak, height, 22)
    xs = [_LEFT + plot.width * (time - first) / span for time, _ in kept]
    lows = [0] * len(kept)
    for i, (part, _) in enumerate(kept[0][1]):
        highs = [low + parts[i][1] for low, (_, parts) in zip(lows, kept, strict=True)]
        if highs != lows:
            edge = [*_steps(xs, [plot.y(n) for n in highs]), *reversed(_steps(xs, [plot.y(n) for n in lows]))]
            most = max(parts[i][1] for _, parts in kept)
            title = f"{style.name(part)}: up to {format_bytes(most)}"
            plot.canvas.shape(edge, style.inks[part].colour, title, data_part=part, data_bytes=most)
            _hatched(plot.canvas, edge, style.inks[part].hatch, f"{crc32(label.encode()):08x}-{i}")
        lows = highs
    top = " ".join(f"{x:.2f},{y:.2f}" for x, y in _steps(xs, [plot.y(n) for n in totals]))
    plot.canvas.body.append(f'<polyline points="{top}" fill="none" stroke="{BLACK}" stroke-width="1"/>')
    plot.limit()
    plot.total(min(max(xs[peak], _LEFT + 40), _LEFT + plot.width - 40), totals[peak], True)
    plot.canvas.text(
        _LEFT + plot.width / 2, _TOP + plot.height + 16, "samples in the order of the step", 11, "middle", fill=GREY
    )
    return str(plot.canvas)


def _hatched(canvas: Canvas, edge: Sequence[tuple[float, float]], hatch: str, name: str) -> None:
    """Hatching within a polygon. name: unlike any other on the page, to find the polygon by."""
    left, top = (min(point[i] for point in edge) for i in (0, 1))
    right, bottom = (max(point[i] for point in edge) for i in (0, 1))
    marks = hatching(hatch, left, top, right - left, bottom - top)
    if marks:
        at = " ".join(f"{x:.2f},{y:.2f}" for x, y in edge)
        canvas.body.append(f'<clipPath id="clip-{name}"><polygon points="{at}"/></clipPath>')
        canvas.body.append(f'<g clip-path="url(#clip-{name})">{marks}</g>')


def _steps(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    corners = [(xs[0], ys[0])]
    for x, before, y in zip(xs[1:], ys, ys[1:], strict=False):
        corners += [(x, before), (x, y)]
    return corners


# ---------------------------------------------------------------------------------------------- level bars

_NAME, _VALUE = 236.0, 130.0


def bar_height(item: Bar) -> float:
    """Pixels that the bar takes up with its label, its note and the gap below."""
    label, note = wrapped(item.label, 12, _NAME - 14), wrapped(item.note, 10.5, WIDTH - _NAME - _VALUE)
    return max(15 * len(label) + 6, 26 + 13 * len(note)) + 9


def bars(style: Style, items: Sequence[Bar], label: str, end: float | None = None) -> str:
    """Bars one below the other on one axis, names on the left, values on the right. end: bytes where the axis ends."""
    wide, heights = WIDTH - _NAME - _VALUE, [bar_height(item) for item in items]
    top = end or reach(max(sum(n for _, n in item.parts) for item in items), style.limit)
    head = 24.0 if style.limit is None else 42.0
    canvas = Canvas(WIDTH, head + sum(heights), label)
    limit = None if style.limit is None or style.limit > top else _NAME + wide * style.limit / top
    bottom = canvas.height - 6
    for count, text in [(0, "0"), *ticks(top, 8)]:
        x = _NAME + wide * count / top
        canvas.line(x, head - 8, x, bottom, RULE if count else BLACK, stroke_width=1)
        if limit is None or abs(x - limit) > text_width(text, 11) / 2 + 5:
            canvas.text(x, head - 13, text, 11, "middle", fill=GREY)
    if style.limit is not None:
        said = f"memory {format_bytes(style.limit)}" + ("" if limit else ", far beyond this axis")
        half = text_width(said, 11, bold=True) / 2
        canvas.text(min(limit or WIDTH, WIDTH - half), 11, said, 11, "middle", bold=True)
    if limit is not None:
        canvas.line(limit, 16, limit, bottom, BLACK, stroke_width=2, class_="limit")
    y = head
    for item, height in zip(items, heights, strict=True):
        for line, text in enumerate(wrapped(item.label, 12, _NAME - 14)):
            canvas.text(_NAME - 12, y + 15 + 15 * line, text, 12, "end")
        low = 0
        for part, count in item.parts:
            box = (_NAME + wide * low / top, y, wide * count / top, 22.0)
            _block(canvas, style, part, count, box, "", None if limit is None else (limit, y, 0.0, 22.0))
            low += count
        for line, text in enumerate(wrapped(item.note, 10.5, wide)):
            canvas.text(_NAME + 4, y + 35 + 13 * line, text, 10.5, fill=GREY, halo="#ffffff")
        if limit is not None and sum(n for _, n in item.parts) * wide / top > limit - _NAME:
            canvas.rect(limit - 3, y, 6, 22, "#ffffff")
            canvas.line(limit, y - 1, limit, y + 23, BLACK, stroke_width=2)
        _verdict(canvas, item, y)
        y += height
    return str(canvas)


def _verdict(canvas: Canvas, item: Bar, y: float) -> None:
    x = WIDTH - _VALUE + 14
    canvas.text(x, y + 15, item.value, 12, bold=True)
    if item.fits is not None:
        canvas.mark(x, y + 32, item.fits)
        said, colour = ("fits", GOOD) if item.fits else ("does not fit", BAD)
        canvas.text(x + 15, y + 32, said, 11, fill=colour)


def bullets(style: Style, items: Sequence[tuple[str, int, int]], label: str) -> str:
    """A bar for what was measured and an upright stroke for what was planned. items: (part, planned, measured) bytes."""
    wide, head, each = WIDTH - _NAME - 250.0, 24.0, 23.0
    top = reach(max(max(planned, measured) for _, planned, measured in items), None)
    canvas = Canvas(WIDTH, head + each * len(items) + 2, label)
    for count, text in [(0, "0"), *ticks(top, 8)]:
        x = _NAME + wide * count / top
        canvas.line(x, head - 8, x, canvas.height, RULE if count else BLACK, stroke_width=1)
        canvas.text(x, head - 13, text, 11, "middle", fill=GREY)
    for i, (part, planned, measured) in enumerate(items):
        y, title = head + each * i, f"{style.name(part)}: measured {format_bytes(measured)}"
        canvas.text(_NAME - 12, y + 13, style.name(part), 12, "end")
        size = wide * measured / top
        canvas.inked(_NAME, y + 2, size, 14, style.inks[part], title, data_part=part, data_bytes=measured)
        x = _NAME + wide * planned / top
        canvas.line(x, y - 2, x, y + 20, "#ffffff", stroke_width=4)
        canvas.line(x, y - 2, x, y + 20, BLACK, stroke_width=2, class_="planned")
        gap = f"{(measured - planned) / planned:+.1%}" if planned and measured != planned else ""
        gap = gap or ("as planned" if measured == planned else "not planned")
        canvas.text(WIDTH - 150, y + 13, format_bytes(measured), 12, "end", bold=True)
        canvas.text(WIDTH - 138, y + 13, gap, 11)
    return str(canvas)
