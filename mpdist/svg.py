"""A canvas for inline SVG: shapes, text whose width is known beforehand, hatched inks, an axis of bytes.

Sizes are CSS pixels; ``WIDTH`` is what A4 landscape leaves between its margins, so that print needs no scaling.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape

WIDTH = 1032
BLACK, GREY, RULE = "#000000", "#444444", "#d9d9d9"
GOOD, BAD = "#006b4e", "#a84300"  # Okabe and Ito's green and vermillion, darkened until small text is easy to read
# Advance widths of DejaVu Sans in em. Of the usual sans-serif fonts it is the widest but for Verdana, which is as wide.
_NARROW = {**dict.fromkeys("ijl'|", 0.28), **dict.fromkeys("I.,:; !", 0.32), **dict.fromkeys("ft()[]r-/", 0.41)}
_WIDE = {**dict.fromkeys("mwMWG%@", 0.9), **dict.fromkeys("+=<>~", 0.84)}
_UNITS = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40), ("PiB", 2**50))


@dataclass(frozen=True)
class Ink:
    """How a part is drawn. hatch: none, up, down, level, upright, grid or dots, in white."""

    colour: str
    hatch: str = "none"
    on: str = BLACK  # what is legible on it


@dataclass(frozen=True)
class Style:
    """What the drawings of one page share. inks, names: by a part's key. limit: bytes, drawn as a line."""

    inks: Mapping[str, Ink]
    names: Mapping[str, str]
    limit: int | None = None

    def name(self, part: str) -> str:
        return self.names.get(part, part)


def text_width(text: str, size: float, bold: bool = False) -> float:
    """At most so many pixels; a little less in most fonts."""
    em = sum(_NARROW.get(c) or _WIDE.get(c) or (0.7 if c.isupper() else 0.62) for c in text)
    return em * size * (1.1 if bold else 1.0)


def wrapped(text: str, size: float, width: float, bold: bool = False) -> list[str]:
    """Lines that fit ``width``. Words that are too long are cut, behind a mark where there is one."""
    lines, line = list[str](), ""
    for word in text.split():
        while text_width(word, size, bold) > width and len(word) > 1:
            room = next(n for n in range(len(word), 0, -1) if n == 1 or text_width(word[:n], size, bold) <= width)
            marks = [m.end() for m in re.finditer(r"[._=/,-]", word[:room])]
            room = marks[-1] if marks else room
            lines += [line] if line else []
            line, lines, word = "", [*lines, word[:room]], word[room:]
        both = f"{line} {word}" if line else word
        if text_width(both, size, bold) <= width:
            line = both
        else:
            lines, line = [*lines, line], word
    return [*lines, line] if line else lines


def ticks(top: float, most: int = 6) -> list[tuple[int, str]]:
    """(bytes, label) of at most ``most`` round amounts above zero up to ``top`` bytes, all in one binary unit."""
    name, unit = next((u for u in reversed(_UNITS) if top >= 1.5 * u[1]), _UNITS[0])
    rough = max(top / unit / most, 1e-9)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.9999)
    step = max(step, 1 / unit)
    return [(round(step * i * unit), f"{step * i:g} {name}") for i in range(1, int(top / unit / step + 1e-9) + 1)]


@dataclass
class Canvas:
    """An SVG that grows by what is drawn on it. label: what a screen reader says in its place."""

    width: float
    height: float
    label: str
    body: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, w: float, h: float, fill: str, title: str = "", **more: object) -> None:
        inner = f"<title>{escape(title)}</title>" if title else ""
        self.body.append(f'<rect x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}" fill="{fill}"{_more(more)}>')
        self.body[-1] += f"{inner}</rect>"

    def inked(self, x: float, y: float, w: float, h: float, ink: Ink, title: str = "", **more: object) -> None:
        self.rect(x, y, w, h, ink.colour, title, **more)
        self.body.append(hatching(ink.hatch, x, y, w, h))

    def shape(self, points: Iterable[tuple[float, float]], fill: str, title: str = "", **more: object) -> None:
        inner = f"<title>{escape(title)}</title>" if title else ""
        at = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self.body.append(f'<polygon points="{at}" fill="{fill}"{_more(more)}>{inner}</polygon>')

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = BLACK, **more: object) -> None:
        at = f'x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"'
        self.body.append(f'<line {at} stroke="{stroke}"{_more(more)}/>')

    def text(
        self, x: float, y: float, text: str, size: float = 11, anchor: str = "start", bold: bool = False,
        fill: str = BLACK, halo: str = "",
    ) -> None:  # fmt: skip
        """At the baseline ``y``. halo: a colour around the letters, where something lies behind them."""
        more = ' font-weight="700"' if bold else ""
        more += f' stroke="{halo}" stroke-width="3" stroke-linejoin="round" paint-order="stroke"' if halo else ""
        at = f'x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" text-anchor="{anchor}" fill="{fill}"'
        self.body.append(f"<text {at}{more}>{escape(text)}</text>")

    def limit(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.line(x1, y1, x2, y2, "#ffffff", stroke_width=5)
        self.line(x1, y1, x2, y2, BLACK, stroke_width=2, stroke_dasharray="7 4", class_="limit")

    def mark(self, x: float, y: float, fits: bool) -> None:
        """A tick or a cross, nine pixels wide, on the baseline ``y``."""
        path = "M0 -4 l3 3.5 l6 -8" if fits else "M0.5 -8 l8 8 m0 -8 l-8 8"
        colour = GOOD if fits else BAD
        at = f'transform="translate({x:.2f} {y:.2f})"'
        self.body.append(f'<path d="{path}" {at} fill="none" stroke="{colour}" stroke-width="2.2"/>')

    def __str__(self) -> str:
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
        return f'<svg {size} role="img" aria-label="{escape(self.label)}">{"".join(self.body)}</svg>'


def _more(attributes: Mapping[str, object]) -> str:
    """Python's names of attributes: stroke_width, and class_ for what is a keyword."""
    return "".join(f' {k.rstrip("_").replace("_", "-")}="{escape(str(v))}"' for k, v in attributes.items())


def hatching(hatch: str, x: float, y: float, w: float, h: float) -> str:
    """White marks over a box, cut to it. Lines of their own and no SVG pattern: what prints a page makes those coarse."""
    pitch, half = 7.0, 3.5
    path = ""
    if hatch in ("level", "grid", "dots"):
        left = x + half if hatch == "dots" else x
        path += "".join(f"M{left:.1f} {y + v:.1f}H{x + w:.1f}" for v in _range(half, h, pitch))
    if hatch in ("upright", "grid"):
        path += "".join(f"M{x + u:.1f} {y:.1f}V{y + h:.1f}" for u in _range(half, w, pitch))
    if hatch in ("up", "down"):
        for c in _range(half, w + h, pitch):  # where the line, drawn on, meets the box's top or bottom edge
            low, high = max(0.0, c - h), min(w, c)
            ends = [(low, c - low), (high, c - high)] if hatch == "up" else [(low, h - c + low), (high, h - c + high)]
            path += "M" + "L".join(f"{x + u:.1f} {y + v:.1f}" for u, v in ends)
    if not path:
        return ""
    pen = {
        "up": 'stroke-width="1.7"',
        "down": 'stroke-width="1.7"',
        "dots": 'stroke-width="1.9" stroke-linecap="round"',
    }
    pen["dots"] += ' stroke-dasharray="0 7"'
    more = pen.get(hatch, 'stroke-width="1"')
    return f'<path class="hatch" d="{path}" fill="none" stroke="#fff" {more} pointer-events="none"/>'


def _range(start: float, stop: float, step: float) -> list[float]:
    return [start + step * i for i in range(max(0, math.ceil((stop - start) / step)))]


def swatch(style: Style, part: str) -> str:
    canvas = Canvas(14, 14, style.name(part))
    canvas.inked(0.5, 0.5, 13, 13, style.inks[part], stroke=BLACK, stroke_width=0.6)
    inner = "".join(canvas.body)
    return f'<svg class="swatch" width="14" height="14" viewBox="0 0 14 14" aria-hidden="true">{inner}</svg>'
