"""A run's precision page: its cells are the run's numbers, and what cannot be drawn is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from telemetered import LAYERS, run_with_telemetry

from mpdist.errors import UsageError
from mpdist.precision_html import KINDS, page, read, thinned


def maps(html: str) -> dict[str, ElementTree.Element]:
    drawings = re.findall(r"<h2>([^<]*)</h2>\s*<figure>.*?(<svg viewBox.*?</svg>)", html, re.DOTALL)
    return {title: ElementTree.fromstring(drawing) for title, drawing in drawings}


def test_every_cell_is_a_number_of_the_run(tmp_path: Path) -> None:
    found = read(run_with_telemetry(tmp_path / "run", steps=6))
    drawn = maps(page(found))
    assert set(drawn) == {KINDS[key].title for key in ("grad_norm", "weight_norm", "update_ratio", "unchanged_working",
                                                       "headroom_overflow", "headroom_underflow", "grad_subnormal")}  # fmt: skip
    for key in ("grad_norm", "unchanged_working", "headroom_overflow"):
        cells = [rect for rect in drawn[KINDS[key].title].iter("rect") if "data-value" in rect.attrib]
        wanted = [value for row in found.rows for value in row["precision/by_layer"][key] if value is not None]
        assert [float(cell.attrib["data-value"]) for cell in cells] == pytest.approx(wanted, rel=1e-5)
        said = [cell.findtext("title") for cell in cells]
        assert said[0] is not None
        assert said[0].startswith(f"{LAYERS[0] if key != 'unchanged_working' else LAYERS[1]}, step 10: ")
        colours = {float(cell.attrib["data-value"]): cell.attrib["fill"] for cell in cells}
        darkest = min(colours.values(), key=lambda colour: int(colour[1:3], 16))
        assert colours[(min if key.startswith("headroom") else max)(colours)] == darkest  # the worse the darker


def test_what_is_zero_everywhere_is_said_and_not_drawn(tmp_path: Path) -> None:
    html = page(read(run_with_telemetry(tmp_path / "run", steps=3)))
    quiet = re.search(r'class="quiet">([^<]*)<', html)
    assert quiet is not None
    assert "gradient flushed to zero" in quiet[1]
    assert "updates that the masters did not take" in quiet[1]
    assert "on the wire" not in quiet[1], "a run without a 16-bit wire says nothing of it"


def test_findings_and_the_static_scale_stand_on_the_page(tmp_path: Path) -> None:
    html = page(read(run_with_telemetry(tmp_path / "run", steps=3)))
    assert "scale at its floor: &lt;1&gt;" in html
    assert "the best static scale" in html
    assert "2^11 = 2048" in html


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"event": "skip", "reason": "non-finite gradients", "scale": "inf"}, 'scale = "inf"'),
        ({"event": "warning", "check": "scale at its floor", "reason": 3}, "reason = 3"),
    ],
)
def test_a_damaged_event_is_named(tmp_path: Path, event: dict[str, Any], said: str) -> None:
    path = run_with_telemetry(tmp_path / "run", steps=3)
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "attempt": 1, **event}) + "\n")
    with pytest.raises(UsageError, match=r"events.jsonl:\d+: .*" + re.escape(said)):
        page(read(path))


def test_a_long_run_has_the_worst_of_several_steps_in_a_column() -> None:
    grid: list[list[float | None]] = [[float(step % 7), None] for step in range(10_000)]
    columns, steps = thinned(grid, list(range(10, 100_010, 10)), max)
    assert len(columns) == len(steps) <= 1250
    assert {tuple(column) for column in columns[:-1]} == {(6.0, None)}
    assert steps[-1] == 100_000


def test_what_is_no_run_or_has_no_telemetry_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"metrics\.jsonl"):
        read(tmp_path)
    row = {"kind": "train", "step": 1, "attempt": 1, "session": 1, "train/loss": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UsageError, match=r"track\.every"):
        read(tmp_path)
