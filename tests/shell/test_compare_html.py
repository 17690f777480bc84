"""A comparison's page in a real headless Chromium: nothing clipped, covered or fetched, no complaint, whole on paper."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from browser import chromium, looked_at
from compared import Made, compared_arms

from mpdist.compare import html
from mpdist.compare.analyse import analyse


def crowded() -> str:
    """Twelve arms with long names, short runs, one that went wrong."""
    made = []
    for i in range(12):
        settings = (f"optim.lr={(i + 1) * 1e-4:g}",)
        name = f"a-name-of-an-arm-that-says-everything-about-it-{i}"
        made.append(Made(f"{name}-seed0", steps=40, settings=settings, step_s=np.full(40, 10.0 ** (i % 4 - 2))))
    made[3].residual = np.where(np.arange(40) > 20, np.nan, 10.0 * np.arange(40))
    return html.page(analyse([one.run() for one in made], None, treatment=["optim.lr"]))


def refused() -> str:
    made = [
        Made("fp32-seed0", steps=12),
        Made("bf16-seed0", steps=12, settings=("precision.compute=bf16", "optim.lr=2e-3")),
    ]
    return html.page(analyse([one.run() for one in made], None))


PAGES = {"usual": lambda: html.page(compared_arms(gate=["loss_gap<=1%"])), "crowded": crowded, "refused": refused}


@pytest.mark.parametrize("name", PAGES)
def test_no_text_is_cut_off_or_lies_over_another_and_the_figures_are_there(
    tmp_path: Path, name: str, figure: Callable[[str], None]
) -> None:
    shown = PAGES[name]().replace('Arial, "Liberation Sans", Helvetica, "DejaVu Sans"', '"DejaVu Sans", Verdana')
    found = looked_at(tmp_path, shown, 1084)  # what A4 leaves, and the page's margins
    assert (found["cut"], found["over"]) == ([], [])
    assert found["wide"] <= 1084
    drawn = shown.count("<figure") - shown.count('<figure id="scale"><p>')
    assert found["drawings"] == drawn
    figure(f"{name}: {found['drawings']} drawings of {drawn}, {found['texts']} texts in them; {len(found['cut'])} cut off, "
           f"{len(found['over'])} over another; {found['wide']} of 1084 pixels wide")  # fmt: skip


def asked_for(tmp_path: Path, shown: str) -> tuple[str, str, list[str]]:
    """(what became of the page, complaints, the addresses that were asked for), the browser's own business left out."""
    log = tmp_path / "net.json"
    dom, complaints = chromium(tmp_path, shown, "--dump-dom", f"--log-net-log={log}")
    asked = re.findall(r'"url":"([^"]+)"', log.read_text())
    return (
        dom,
        complaints,
        [url for url in asked if not re.match(r"https?://[^/]*\.(google|googleapis|gvt1)\.com/", url)],
    )


def test_the_page_is_quiet_and_asks_for_nothing(tmp_path: Path, figure: Callable[[str], None]) -> None:
    shown = PAGES["usual"]()
    dom, complaints, asked = asked_for(tmp_path, shown)
    assert (complaints, asked) == ("", [])
    wanted = [*html.FIGURES, *(f"residual-{arm}" for arm in ("bf16", "fp16", "fp32-control"))]
    drawn = [name for name in wanted if re.search(f'<figure id="{name}">(?:(?!</figure>).)*<svg', dom, re.DOTALL)]
    assert drawn == wanted
    figure(f"console errors: {len(complaints.splitlines())}; requests: {len(set(asked))}; figures: {len(drawn)} of {len(wanted)}: "
           + ", ".join(drawn))  # fmt: skip
    # The control: without the policy, what a page asks for is seen, and what it complains of.
    free = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", shown)
    free = free.replace("</main>", '<img src="http://127.0.0.1:9/x.png"></main>')
    free = free.replace("</main>", '<script>console.error("a complaint")</script></main>')
    _, complaints, asked = asked_for(tmp_path, free)
    assert "http://127.0.0.1:9/x.png" in asked
    assert "a complaint" in complaints
    figure(
        f"the control, a page that asks and complains: console errors: {len(complaints.splitlines())}; requests: {len(set(asked))}"
    )


def test_on_paper_it_is_whole_and_a_screen_shows_it(tmp_path: Path, figure: Callable[[str], None]) -> None:
    pdf, png = tmp_path / "page.pdf", tmp_path / "page.png"
    chromium(tmp_path, PAGES["usual"](), "--no-pdf-header-footer", f"--print-to-pdf={pdf}")
    pages = len(re.findall(rb"/Type /Page\b", pdf.read_bytes()))
    assert 6 <= pages <= 11, pages
    chromium(tmp_path, PAGES["usual"](), f"--screenshot={png}", "--window-size=1130,1600")
    assert len(png.read_bytes()) > 100_000, "an empty page is a few kilobytes"
    figure(f"{pages} pages of A4, {len(png.read_bytes()):,} bytes of screenshot at 1130 x 1600")
