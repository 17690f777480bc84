"""The plan's picture in a real headless Chromium: nothing clipped, nothing over another, the pages of paper, no complaint.

Skipped where there is no Chromium; `tests/run.sh` installs one where it may.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import chromium, looked_at
from pictures import CURVE, GIB, view
from real_runs import ROOT, environment

from mpdist.plan_html import INKS, View, page


def crowded() -> View:
    """As much as there can be: every row, long names, a limit that runs through amounts."""
    every = {row: (i + 1) * 3 * GIB // 2 for i, row in enumerate(INKS) if row != "snapshot"}
    curve = [(name, held | {"gradient_copies": 2 * GIB}) for name, held in CURVE]
    curve += [("the reduction", every), ("the first reduction", every | {"activations": 30 * GIB})]
    some = view().candidates
    return view(
        subtitle=["a/name/that/is/" + "very_long_" * 12 + "; 8,030,261,248 parameters", *view().subtitle],
        curve=curve,
        candidates=[*some, *some, *some, *some],
        simulated=CURVE,
        samples=[(float(i), CURVE[i * len(CURVE) // 900][1]) for i in range(900)],
        samples_of="Tensors of 6 of the 32 blocks, operation by operation.",
        measured={row: (n, n + n // 50) for row, n in every.items()} | {"peak": (80 * GIB, 81 * GIB)},
        memory_bytes=51 * GIB,
        host=frozenset({"snapshot", "optimizer_temporaries"}),
    )


PAGES: Mapping[str, tuple[View, int]] = {  # and how many pages of A4 landscape each takes
    "usual": (view(), 3),
    "crowded": (crowded(), 6),
    "small": (view(memory_bytes=1024 * GIB, candidates=[], traffic=[]), 2),
    "no memory": (
        replace(view(), memory_bytes=None, candidates=[one._replace(fits=None) for one in view().candidates]),
        3,
    ),
}


@pytest.mark.parametrize(
    ("name", "fonts"),
    [*((name, "the widest") for name in PAGES), *((name, "the page's") for name in ("usual", "crowded"))],
)
def test_no_text_is_cut_off_or_lies_over_another(tmp_path: Path, name: str, fonts: str) -> None:
    html = page(PAGES[name][0])
    if fonts == "the widest":
        html = html.replace('Arial, "Liberation Sans", Helvetica, "DejaVu Sans"', '"DejaVu Sans", Verdana')
    found = looked_at(tmp_path, html)
    assert found["drawings"] >= 2
    assert found["texts"] > 40
    assert found["cut"] == []
    assert found["over"] == []
    assert found["wide"] <= 1130


def test_a_narrow_window_scrolls_the_drawings_and_not_the_page(tmp_path: Path) -> None:
    assert looked_at(tmp_path, page(view()), width=600)["wide"] <= 600


def test_the_look_finds_what_is_cut_and_what_is_covered(tmp_path: Path) -> None:
    """The control."""
    html = page(view())
    bad = html.replace("</svg>\n", "</svg>", 1).replace(
        ">the loss</text>", '>the loss</text><text x="1020" y="40">beyond the edge</text>', 1
    )
    assert "beyond the edge" in bad
    assert looked_at(tmp_path, bad)["cut"] == ["beyond the edge"]
    twice = re.sub(r"(<text [^>]*>)(forward)(</text>)", r"\1\2\3\1over it\3", html, count=1)
    assert looked_at(tmp_path, twice)["over"] == ["forward | over it"]


def test_the_page_as_it_is_gives_no_complaint(tmp_path: Path, figure: Callable[[str], None]) -> None:
    dom, complaints = chromium(tmp_path, page(crowded()), "--dump-dom")
    assert "<h1>Memory plan: 8 ranks</h1>" in dom
    figure(f"{len(complaints.splitlines())} lines in the console")
    assert complaints == ""


def test_the_pages_policy_lets_nothing_in(tmp_path: Path) -> None:
    """The control: what would be fetched or run is refused, and that is heard."""
    bad = page(view()).replace(
        "</body>", '<img src="https://example.org/x.png"><script>document.title = "ran"</script></body>'
    )
    dom, complaints = chromium(tmp_path, bad, "--dump-dom")
    assert "<title>ran</title>" not in dom
    assert complaints.count("Content Security Policy") == 2, complaints


@pytest.mark.parametrize("name", PAGES)
def test_on_paper_it_takes_the_pages_it_should_in_its_colours(tmp_path: Path, name: str) -> None:
    seen, pages = PAGES[name]
    out = tmp_path / "page.pdf"
    chromium(tmp_path, page(seen), "--no-pdf-header-footer", f"--print-to-pdf={out}")
    pdf = out.read_bytes()
    boxes = re.findall(rb"/MediaBox \[([^\]]*)\]", pdf)
    assert len(boxes) == len(re.findall(rb"/Type /Page\b", pdf)) == pages
    for box in boxes:
        assert [float(n) for n in box.split()] == pytest.approx([0, 0, 841.9, 595.3], abs=1), "A4 landscape"
    painted = set(re.findall(rb"([\d.]+) ([\d.]+) ([\d.]+) rg", b"\n".join(_unpacked(pdf))))
    colours = [[round(255 * float(part)) for part in colour] for colour in painted]
    for row in {row for _, held in seen.curve for row, count in held.items() if count} - seen.host:
        colour = INKS[row].colour
        assert [int(colour[i : i + 2], 16) for i in (1, 3, 5)] in colours, row


def _unpacked(pdf: bytes) -> list[bytes]:
    found = []
    for stream in re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL):
        try:
            found.append(zlib.decompress(stream))
        except zlib.error:  # a font
            continue
    return found


def test_the_command_draws_what_it_prints(tmp_path: Path, figure: Callable[[str], None]) -> None:
    command = [
        sys.executable,
        "-m",
        "mpdist.cli",
        "plan",
        str(ROOT / "configs" / "llama31_8b_1node.yaml"),
        "--ranks",
        "8",
    ]
    file = tmp_path / "plan.html"
    command += ["--memory", "80GiB", "--json", "--html", str(file)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    plan, html = json.loads(done.stdout), file.read_text("utf-8")
    found = looked_at(tmp_path, html)
    assert (found["cut"], found["over"]) == ([], [])
    assert found["blocks"][0] == max(
        sum(n for row, n in moment["rows"].items() if row not in _on_host(plan)) for moment in plan["moments"]
    )
    assert found["blocks"][0] == plan["peak_bytes_per_rank"]
    figure(f"{found['drawings']} drawings, {found['texts']} texts, {len(found['cut'])} cut off, {len(found['over'])} covered;"
           f" tallest stack {found['blocks'][0]} B, as printed")  # fmt: skip


def _on_host(plan: Mapping[str, Any]) -> set[str]:
    return {row["row"] for row in plan["rows"] if row.get("where") == "host"}


def test_a_screenshot_has_the_size_of_the_window(tmp_path: Path) -> None:
    out = tmp_path / "page.png"
    chromium(tmp_path, page(view()), f"--screenshot={out}", "--window-size=1130,1600")
    png = out.read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert [int.from_bytes(png[i : i + 4], "big") for i in (16, 20)] == [1130, 1600]
    assert len(png) > 50_000, "an empty page is a few kilobytes"
