"""Axes for a comparison's drawings, and how its arms are told apart: by colour, by dashes and by the shape of their marks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mpdist.svg import BLACK, GREY, RULE, WIDTH, Canvas, wrapped

_T = TypeVar("_T", bound=tuple[float, ...])
LEFT, TOP, LEGEND = 72.0, 30.0, 226.0
_FOOT = 40.0
# Okabe and Ito's colours without the yellow, which white paper swallows.
_COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("", "7 3", "2 2.5", "9 3 2 3", "12 4", "4 2 1 2", "1 3", "6 2 1 2 1 2")
_MARKS = ("circle", "square", "up", "diamond", "down", "cross", "plus", "bar", "hex")


@dataclass(frozen=True)
class Pen:
    """How an arm is drawn wherever it is."""

    colour: str
    dash: str
    mark: str
    width: float = 2.0
    size: float = 4.0


def pens(names: Sequence[str]) -> dict[str, Pen]:
    """Up to 7 arms differ in each of the three; more of them in their combination.

    The first are the thickest: of curves that lie over each other, each then shows behind the next.
    """
    return {
        name: Pen(
            _COLOURS[i % len(_COLOURS)],
            _DASHES[i % len(_DASHES)],
            _MARKS[i % len(_MARKS)],
            max(3.4 - 0.6 * i, 1.4),
            max(6.2 - 0.9 * i, 3.2),
        )
        for i, name in enumerate(names)
    }


def mark(canvas: Canvas, pen: Pen, x: float, y: float, title: str = "", **more: object) -> None:
    """A mark of the pen's shape around a point."""
    s, edge = pen.size, {"stroke": "#ffffff", "stroke_width": 0.8, **more}
    corners = {
        "square": [(-s, -s), (s, -s), (s, s), (-s, s)],
        "up": [(-1.2 * s, s), (1.2 * s, s), (0, -1.2 * s)],
        "down": [(-1.2 * s, -s), (1.2 * s, -s), (0, 1.2 * s)],
        "diamond": [(0, -1.4 * s), (1.1 * s, 0), (0, 1.4 * s), (-1.1 * s, 0)],
        "bar": [(-0.5 * s, -1.4 * s), (0.5 * s, -1.4 * s), (0.5 * s, 1.4 * s), (-0.5 * s, 1.4 * s)],
        "plus": [(a * s, b * s) for a, b in ((-.5, -1.4), (.5, -1.4), (.5, -.5), (1.4, -.5), (1.4, .5), (.5, .5), (.5, 1.4),
                                           (-.5, 1.4), (-.5, .5), (-1.4, .5), (-1.4, -.5), (-.5, -.5))],
        "cross": [(a * s, b * s) for a, b in ((-1.2, -.6), (-.6, -1.2), (0, -.6), (.6, -1.2), (1.2, -.6), (.6, 0), (1.2, .6),
                                            (.6, 1.2), (0, .6), (-.6, 1.2), (-1.2, .6), (-.6, 0))],
    }.get(pen.mark)  # fmt: skip
    if corners is None:  # a circle, or a hexagon
        count = 6 if pen.mark == "hex" else 20
        turns = [2 * math.pi * i / count for i in range(count)]
        corners = [(1.1 * s * math.cos(turn), 1.1 * s * math.sin(turn)) for turn in turns]
    canvas.shape([(x + a, y + b) for a, b in corners], pen.colour, title, **edge)


def ticks(low: float, high: float, most: int = 6) -> list[tuple[float, str]]:
    """(value, label) of at most ``most`` round numbers from ``low`` to ``high``."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [(low, f"{low:g}")]
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.9999)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first = math.ceil(low / step - 1e-9)
    values = [(first + i) * step for i in range(int(high / step + 1e-9) - first + 1)]
    return [(value, f"{value + 0.0:,.{digits}f}") for value in values]


def log_ticks(low: float, high: float, most: int = 9) -> list[tuple[float, str]]:
    """(value, label) of powers of ten and, where there is room, of round numbers between them."""
    for factors in (range(1, 10), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [
            factor * 10.0**power
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for factor in factors
            if low * 0.999 <= factor * 10.0**power <= high * 1.001
        ]
        if len(found) <= most:
            break
    return [(value, f"{value:,.10g}") for value in found]


def around(values: Iterable[float], share: float = 0.06) -> tuple[float, float]:
    """A range that holds the finite values, with some room; one around zero where there are none."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (-1.0, 1.0)
    room = share * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


@dataclass
class Frame:
    """A drawing with two axes and a column for its legend. xs, ys: (low, high). log: the x axis is logarithmic."""

    label: str
    xs: tuple[float, float]
    ys: tuple[float, float]
    x_title: str
    y_title: str
    height: float
    name: str
    log: bool = False
    canvas: Canvas = field(init=False)
    _line: float = TOP

    def __post_init__(self) -> None:
        self.canvas = Canvas(WIDTH, TOP + self.height + _FOOT, self.label)
        box = f'<rect x="{LEFT}" y="{TOP}" width="{self.width:.2f}" height="{self.height:.2f}"/>'
        self.canvas.body.append(f'<clipPath id="in-{self.name}">{box}</clipPath>')

    @property
    def width(self) -> float:
        return WIDTH - LEFT - LEGEND

    def x(self, value: float) -> float:
        low, high = self.xs
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return LEFT + self.width * (value - low) / (high - low)

    def y(self, value: float) -> float:
        low, high = self.ys
        return TOP + self.height * (1 - (value - low) / (high - low))

    def grid(self, y_ticks: Sequence[tuple[float, str]] | None = None) -> None:
        """Lines and labels of both axes, and their titles."""
        canvas, bottom, right = self.canvas, TOP + self.height, LEFT + self.width
        for value, label in ticks(*self.ys, max(2, int(self.height / 34))) if y_ticks is None else y_ticks:
            y = self.y(value)
            canvas.line(LEFT, y, right, y, RULE, stroke_width=1)
            canvas.text(LEFT - 7, y + 4, label, anchor="end", fill=GREY)
        for value, label in log_ticks(*self.xs) if self.log else ticks(*self.xs, 8):
            x = self.x(value)
            canvas.line(x, bottom, x, bottom + 4, GREY, stroke_width=1)
            canvas.text(x, bottom + 17, label, anchor="middle", fill=GREY)
        canvas.line(LEFT, bottom, right, bottom, stroke_width=1)
        canvas.text(LEFT + self.width / 2, bottom + 34, self.x_title, anchor="middle")
        canvas.text(4, 13, self.y_title, bold=True)

    def band(self, points: Sequence[tuple[float, float, float]], colour: str, opacity: float) -> None:
        """(x, low, high) filled between; parts that are not finite are left out."""
        for part in _finite(points):
            edge = [(self.x(x), self.y(low)) for x, low, _ in part]
            edge += [(self.x(x), self.y(high)) for x, _, high in reversed(part)]
            self.canvas.shape(edge, colour, fill_opacity=opacity, clip_path=f"url(#in-{self.name})")

    def path(self, points: Sequence[tuple[float, float]], pen: Pen, width: float | None = None, **more: object) -> None:
        for part in _finite(points):
            at = " ".join(f"{self.x(x):.2f},{self.y(y):.2f}" for x, y in part)
            dash = f' stroke-dasharray="{pen.dash}"' if pen.dash else ""
            extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
            thick = pen.width if width is None else width
            self.canvas.body.append(
                f'<polyline points="{at}" fill="none" stroke="{pen.colour}" stroke-width="{thick:g}"{dash}{extra} '
                f'clip-path="url(#in-{self.name})"/>'
            )

    def mark(self, pen: Pen, x: float, y: float, title: str = "") -> None:
        """Only inside the frame."""
        if self.ys[0] <= y <= self.ys[1] and self.xs[0] <= x <= self.xs[1]:
            mark(self.canvas, pen, self.x(x), self.y(y), title)

    def key(self, pen: Pen | None, name: str, *lines: str) -> None:
        """An entry of the legend, its name bold: a piece of the line with its mark, and what is said below it."""
        x, canvas = WIDTH - LEGEND + 14, self.canvas
        inset = 38.0 if pen is not None else 0.0
        if pen is not None:
            dash = {"stroke_dasharray": pen.dash} if pen.dash else {}
            canvas.line(x, self._line - 4, x + 32, self._line - 4, pen.colour, stroke_width=pen.width, **dash)
            mark(canvas, pen, x + 16, self._line - 4)
        for text in wrapped(name, 11.5, LEGEND - 18 - inset, bold=True):
            canvas.text(x + inset, self._line, text, 11.5, bold=True)
            self._line += 14
        for text in (part for line in lines for part in wrapped(line, 10.5, LEGEND - 18)):
            canvas.text(x, self._line, text, 10.5, fill=GREY if pen is not None else BLACK)
            self._line += 13
        self._line += 7
        canvas.height = max(canvas.height, self._line)


def _finite(points: Sequence[_T]) -> list[list[_T]]:
    """The stretches without a value that is not finite, of two points or more."""
    found: list[list[_T]] = [[]]
    for point in points:
        if all(map(math.isfinite, point)):
            found[-1].append(point)
        elif found[-1]:
            found.append([])
    return [part for part in found if len(part) > 1]
