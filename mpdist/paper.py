"""A report as one HTML file, for a screen and for A4 paper: what its sections, figures and tables look like.

Nothing is fetched and no script runs; the file's own policy forbids both. Drawings are inline (see svg_charts).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from mpdist.svg import Style, swatch


def document(title: str, body: Iterable[str]) -> str:
    """The file. body: parts of HTML; each section that stands apart, after the first, starts a page of paper."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def section(title: str, inner: str, apart: bool = True) -> str:
    """apart: on a page of its own."""
    kind = ' class="apart"' if apart else ""
    return f"<section{kind}>\n<h2>{escape(title)}</h2>\n{inner}\n</section>"


def figure(drawing: str, caption: str = "", name: str = "") -> str:
    """name: by which the page finds it (an id)."""
    said = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    own = f' id="{escape(name)}"' if name else ""
    return f"<figure{own}>{said}{drawing}</figure>"


def legend(style: Style, parts: Iterable[str]) -> str:
    keys = "".join(f"<li>{swatch(style, row)} {escape(style.name(row))}</li>" for row in parts)
    return f'<ul class="legend">{keys}</ul>'


def table(head: Sequence[str], bodies: Sequence[Sequence[Sequence[str]]], numbers: range) -> str:
    """Cells are HTML. numbers: the columns that are set right."""

    def line(cells: Sequence[str], tag: str) -> str:
        classes = [' class="n"' if i in numbers else "" for i in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{c}>{cell}</{tag}>" for c, cell in zip(classes, cells, strict=True)) + "</tr>"

    rows = "".join("<tbody>" + "".join(line(cells, "td") for cells in body) + "</tbody>" for body in bodies if body)
    return f"<table><thead>{line(head, 'th')}</thead>{rows}</table>"


_CSS = """
@page { size: A4 landscape; margin: 12mm; }
* { box-sizing: border-box; }
html { color-scheme: light; }
body { margin: 0; background: #fff; color: #000; font: 13px/1.4 Arial, "Liberation Sans", Helvetica, "DejaVu Sans", sans-serif;
  -webkit-print-color-adjust: exact; print-color-adjust: exact; }
svg text { font-family: Arial, "Liberation Sans", Helvetica, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 20px 24px 32px; }
h1 { font-size: 22px; line-height: 1.2; margin: 0 0 6px; }
h2 { font-size: 16px; margin: 0 0 6px; }
header p { margin: 0 0 1px; color: #333; }
.tiles { display: flex; flex-wrap: wrap; gap: 8px; margin: 10px 0 0; }
.tiles div { flex: 1 1 150px; border: 1px solid #999; border-left: 4px solid #0072b2; padding: 5px 10px 6px; }
.tiles div.good { border-left-color: #009e73; }
.tiles div.close { border-left-color: #e69f00; }
.tiles div.bad { border-left-color: #d55e00; }
.tiles dt { font-size: 11px; color: #444; }
.tiles dd { margin: 0; }
.tiles b { font-size: 17px; display: block; white-space: nowrap; }
.tiles span { font-size: 11px; }
.tiles .close span { font-weight: bold; }
.tiles .good span { color: #006b4e; font-weight: bold; }
.tiles .bad span { color: #a84300; font-weight: bold; }
section { margin-top: 26px; overflow-x: auto; }
figure { margin: 0 0 8px; break-inside: avoid; }
figure > svg { display: block; max-width: 100%; height: auto; }
figcaption { margin: 2px 0 8px; color: #333; }
.swatch { vertical-align: -2px; margin-right: 5px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 3px 18px; margin: 4px 0 8px; padding: 0; font-size: 12px; }
.legend li { white-space: nowrap; }
table { border-collapse: collapse; width: 100%; font-size: 12px; }
th, td { text-align: left; vertical-align: top; padding: 4px 16px 4px 0; border-bottom: 1px solid #d9d9d9; }
th { border-bottom: 2px solid #000; vertical-align: bottom; }
tbody + tbody tr:first-child td { border-top: 2px solid #000; }
th:last-child, td:last-child { padding-right: 0; overflow-wrap: anywhere; }
td:first-child { white-space: nowrap; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
tr { break-inside: avoid; }
.dense table { font-size: 11px; }
.dense th, .dense td { padding-right: 10px; }
.dense .n { white-space: normal; }
.dense th.n { overflow-wrap: anywhere; }
.notes { margin: 20px 0 0; padding-left: 18px; font-size: 11px; color: #333; break-inside: avoid; }
@media (max-width: 700px) { figure > svg { max-width: none; } }
@media print {
  main { max-width: none; padding: 0; }
  section { margin-top: 14px; overflow: visible; }
  section + section.apart { margin-top: 0; break-before: page; }
  section:not(.apart) { break-inside: avoid; }
  h2 { break-after: avoid; }
  .dense th, .dense td { padding-top: 3px; padding-bottom: 3px; line-height: 1.3; }
}
"""
