"""A comparison's page: what stands on it, and that it says what the terminal says."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from compared import Made, compared_arms, curve

from mpdist import cli
from mpdist.compare import html, html_data
from mpdist.compare.analyse import analyse
from mpdist.compare.html_axes import log_ticks, pens, ticks
from mpdist.compare.text import text

BF16 = ("precision.compute=bf16",)


@pytest.fixture(scope="module")
def page() -> str:
    return html.page(compared_arms(gate=["loss_gap<=1%"]))


def test_every_figure_and_part_is_there_by_its_id(page: str) -> None:
    ids = re.findall(r'<figure id="([^"]+)"', page)
    assert ids == [
        *("loss-steps", "loss-tokens", "loss-seconds"),
        *("residual-bf16", "residual-fp16", "residual-fp32-control"),
        *("step-time", "scale", "memory"),
    ]
    assert set(html.FIGURES) < set(ids)
    every = re.findall(r' id="([^"]+)"', page)
    assert len(every) == len(set(every)), "an id names one thing"
    assert {"verdicts", "guide", "differs", "environment"} < set(every)
    around = unescape(re.sub(r"<[^>]+>", " ", page.split('id="environment"')[1]))
    assert re.search(r"memory\s+32.00.GiB", around)
    assert re.search(r"deterministic\s+yes", around)


def test_the_page_says_what_the_terminal_says(page: str) -> None:
    """Every number of the report's tables and every word of its verdicts."""
    found = compared_arms(gate=["loss_gap<=1%"])
    shown = unescape(re.sub(r"<[^>]+>", " ", page))
    words = set(shown.replace("\xa0", " ").split())
    headings = {"verdicts", "gates", "treatment", "note", "(allowed"}
    missing = {word for word in text(found).split() if word.strip("():.,;") not in shown and word not in words}
    assert missing <= headings, missing


def test_what_a_cell_needs_to_be_read_stands_by_it(page: str) -> None:
    """Whose value is on which side, what a mark means, what is a count among means, what is cut off."""
    shown = " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())
    assert shown.count("left of |: the arm, right of it: the reference") == 2
    assert "!: their schedules are not at the same point" in shown
    assert "9 non-finite gradients in 3 runs" in shown
    assert shown.count("Intervals that reach the frame go beyond it") == 3
    alike = [
        Made(f"{name}-seed{seed}", seed, settings=own)
        for seed in (0, 1)
        for name, own in (("fp32", ()), ("bf16", BF16))
    ]
    plain = html.page(analyse([one.run() for one in alike], None))
    assert "their schedules" not in plain
    assert "go beyond it" not in plain


def test_nothing_is_fetched_and_nothing_runs(page: str) -> None:
    assert not re.search(r"https?:|src=|href=|@import|<script|url\((?!#in-)", page)
    assert "default-src 'none'" in page


def test_arms_differ_in_colour_dashes_and_marks() -> None:
    found = list(pens([str(i) for i in range(7)]).values())
    for column in ("colour", "dash", "mark"):
        assert len({getattr(pen, column) for pen in found}) == 7
    assert len({(pen.colour, pen.dash, pen.mark) for pen in pens([str(i) for i in range(40)]).values()}) == 40


def test_curves_are_the_rows() -> None:
    """Means over seeds of three consecutive steps, the seeds' range around them; seconds from the end of the warm-up."""
    found = analyse([Made(f"{name}-seed{seed}", seed, 300, losses=curve(300) + seed, eval_every=100).run()
                     for name in ("a", "b") for seed in (0, 1)], None)  # fmt: skip
    one = html_data.loss(found.arms[0], html_data.STEP, found.warmup_step)
    assert (len(one.train), one.steps) == (100, 3)
    first = one.train[0]
    assert (first.x, first.mean) == (2.0, pytest.approx(curve(300)[:3].mean() + 0.5))
    assert (first.low, first.high) == (pytest.approx(curve(300)[:3].mean()), pytest.approx(curve(300)[:3].mean() + 1))
    assert [point.x for point in one.evals] == [100, 200, 300]
    seconds = html_data.loss(found.arms[0], html_data.TIME, found.warmup_step)
    assert seconds.evals[0].x == pytest.approx(98 * 0.05)
    assert html_data.loss(found.arms[0], html_data.TOKENS, 2).evals[-1].x == 300 * 480
    same = html_data.residuals(found, found.pairs[0])
    assert {(e.value, *seeds) for _, e, seeds in same.points} == {(0.0, 0.0, 0.0)}


def test_the_scale_is_followed_through_its_skips() -> None:
    skips = [(1, "non-finite gradients"), (6, "non-finite gradients")]
    run = Made("fp16-seed0", steps=7, settings=("precision.compute=fp16",), skips=skips, scale=1024.0).run()
    found = html_data.scale(run)
    assert found.skips == ((1, 1024.0), (6, 512.0))
    assert found.steps == ((1, 1024.0), (2, 512.0), (7, 256.0))


def test_memory_is_the_plans_peak_or_what_the_ledger_measured() -> None:
    made = Made("fp32-seed0", steps=4)
    arm = analyse([made.run(), Made("bf16-seed0", steps=4, settings=BF16).run()], None).arms[0]
    assert html_data.memory(arm) == ({"parameters": 400, "gradients": 400, "moments": 400, "buffers": 400}, False)
    rows = [{"row": "parameters", "at_peak_bytes": 7}, {"row": "comm", "at_peak_bytes": 0}]
    arm.runs[0].plan.update(rows=rows, peak_bytes_per_rank=7)  # type: ignore[attr-defined]
    assert html_data.memory(arm) == ({"parameters": 7}, True)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [(0.0, 100.0, ["0", "20", "40", "60", "80", "100"]), (-0.0021, 0.0021, ["-0.002", "-0.001", "0.000", "0.001", "0.002"]),
     (1e6, 1.4e6, ["1,000,000", "1,100,000", "1,200,000", "1,300,000", "1,400,000"])],
)  # fmt: skip
def test_ticks_are_round(low: float, high: float, labels: list[str]) -> None:
    assert [label for _, label in ticks(low, high)] == labels


def test_logarithmic_ticks_have_room() -> None:
    assert [label for _, label in log_ticks(18.0, 80.0)] == ["20", "30", "40", "50", "60", "70", "80"]
    assert [label for _, label in log_ticks(0.9, 4000.0)] == ["1", "3", "10", "30", "100", "300", "1,000", "3,000"]


def test_one_seed_without_evaluation_and_with_a_loss_that_is_not_finite_is_drawn() -> None:
    made = [Made("fp32-seed0", steps=12, eval_every=0), Made("bf16-seed0", steps=12, eval_every=0, settings=BF16)]
    made[1].residual = np.where(np.arange(12) == 5, np.nan, 0.0)
    shown = html.page(analyse([one.run() for one in made], None))
    assert shown.count("<figure") == 7
    assert "nan" not in "".join(re.findall(r'(?:points|x|y|x1|y1|x2|y2|d)="[^"]*"', shown)).lower()


def test_a_page_is_written_where_it_is_said_and_also_of_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [Made("fp32-seed0", steps=12), Made("bf16-seed0", steps=12, settings=BF16)]
    paths = [str(one.write(tmp_path)) for one in made]
    file = tmp_path / "page.html"
    assert cli.main(["compare", *paths, "--html", str(file)]) == 0
    assert f"the comparison is drawn in {file}" in capsys.readouterr().err
    assert "<title>Comparison: " in file.read_text()
    other = str(Made("fp16-seed0", steps=12, settings=("precision.compute=fp16", "optim.lr=2e-3")).write(tmp_path))
    assert cli.main(["compare", *paths, other, "--html", str(file)]) == 2
    shown = file.read_text()
    assert "REFUSED: optim.lr: 0.001 in fp32 and bf16, 0.002 in fp16" in shown
    assert "<figure" not in shown
    assert cli.main(["compare", *paths, "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "--html" in capsys.readouterr().err
