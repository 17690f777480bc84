"""The plan's picture: its numbers are the plan's, its sizes are to scale, and the file needs nothing beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from pictures import GIB, view

from mpdist import arch, plan, svg
from mpdist.config import load
from mpdist.plan_html import INKS, Choice, View, measured_of, page, view_of
from mpdist.plan_memory import MOMENTS, Asked, ledger_of
from mpdist.plan_text import text
from mpdist.svg import text_width, ticks, wrapped
from mpdist.svg_charts import Bar, bars, columns
from mpdist.units import format_bytes

OKABE_ITO = {"#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"}
LLAMA = "meta-llama/Llama-3.1-8B"


def drawings(html: str) -> list[ElementTree.Element]:
    """The charts of a page, without the keys' swatches."""
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg viewBox.*?</svg>", html, re.DOTALL)]


def blocks(drawing: ElementTree.Element) -> list[dict[str, Any]]:
    """The rows that it draws: part, bytes, and x, y, width, height in pixels."""
    return [
        {
            **{key: float(found.attrib[key]) for key in ("x", "y", "width", "height")},
            "part": found.attrib["data-part"],
            "bytes": int(found.attrib["data-bytes"]),
        }
        for found in drawing.iter("rect")
        if "data-part" in found.attrib
    ]


def columns_of(drawing: ElementTree.Element) -> list[dict[str, int]]:
    found: dict[float, dict[str, int]] = {}
    for block in blocks(drawing):
        found.setdefault(block["x"], {})[block["part"]] = block["bytes"]
    return list(found.values())


def texts(drawing: ElementTree.Element) -> list[str]:
    return [found.text or "" for found in drawing.iter("text")]


def made(tmp_path: Path, *overrides: str, memory: int | None = None, model: str = LLAMA, ranks: int = 8) -> plan.Plan:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"name: t\nmodel: {{path: {model}}}\ndata:\n  train: [{{path: x.jsonl}}]\n  seq_len: 4096\n"
        "batch: {micro: 1, global: 64}\nbudget: {steps: 200}\n"
    )
    found = load(file, list(overrides))
    return plan.make(found.config, arch.look(model), ranks, 1, memory=memory)


def without_nothing(held: dict[str, int]) -> dict[str, int]:
    return {row: count for row, count in held.items() if count}


# -- what it says is what the plan says ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [(), ("shard.engine=ddp",), ("shard.engine=deepspeed", "shard.stage=3", "shard.offload=all")],
    ids=["fsdp2", "ddp", "deepspeed"],
)
def test_the_columns_are_the_plans_moments(tmp_path: Path, overrides: Sequence[str]) -> None:
    found = made(tmp_path, *overrides)
    seen = view_of(found)
    host = {row.row for row in found.rows if row.host}
    drawn = columns_of(drawings(page(seen))[0])
    assert drawn == [without_nothing({r: n for r, n in held.items() if r not in host}) for _, held in found.moments]
    assert seen.peak == (found.peak_bytes, found.peak_moment)
    assert max(sum(held.values()) for held in drawn) == found.peak_bytes


def test_what_lies_on_the_host_is_drawn_apart(tmp_path: Path) -> None:
    found = made(tmp_path, "shard.engine=deepspeed", "shard.stage=3", "shard.offload=all")
    curve, host = drawings(page(view_of(found)))[:2]
    held = {block["part"]: block["bytes"] for block in blocks(host)}
    assert held == without_nothing({row.row: row.rest_bytes for row in found.rows if row.host})
    assert sum(held.values()) == found.host_bytes
    assert not held.keys() & {block["part"] for block in blocks(curve)}


def test_every_row_and_every_sum_of_the_plans_text_stands_on_the_page(tmp_path: Path) -> None:
    found = made(tmp_path, memory=80 * GIB)
    html = page(view_of(found))
    table = text(found).partition("memory of the rank")[2].partition("states (")[0]
    amounts = set(re.findall(r"\b[\d.]+ (?:B|[KMGT]iB)\b", table))
    assert len(amounts) > 8
    assert [amount for amount in amounts if amount not in html] == []
    for row in found.rows:
        if row.peak_bytes:
            assert row.formula in html.replace("&#x27;", "'").replace("&quot;", '"')
    for sent in found.traffic:
        assert format_bytes(sent.sent_within) in html


def test_the_configured_settings_lead_the_candidates(tmp_path: Path) -> None:
    found = made(tmp_path, memory=80 * GIB)
    (first, *_) = view_of(found).candidates
    assert (first.label, first.peak_bytes, first.fits) == ("as configured", found.peak_bytes, found.fits)


def test_candidates_of_the_advice_follow_in_its_order(tmp_path: Path) -> None:
    found = made(tmp_path, memory=80 * GIB)
    other = made(tmp_path, "memory.checkpointing=full", memory=80 * GIB)
    advised = Advised("memory.checkpointing=full", other)
    seen = view_of(replace(found, candidates=(Advised("", found), advised)))  # type: ignore[arg-type]
    assert [one.label for one in seen.candidates] == ["as configured", "memory.checkpointing=full"]
    assert seen.candidates[1].peak_bytes == other.peak_bytes
    assert seen.candidates[1].note.startswith("sends ")
    assert "recomputes 25% of forward" in seen.candidates[1].note


class Advised:
    """As plan_advice has it."""

    def __init__(self, change: str, found: plan.Plan) -> None:
        self.change, self.rows, self.peak_bytes, self.is_close = change, found.rows, found.peak_bytes, found.is_close
        self.sent_within, self.sent_between, self.recompute, self.host_bytes = 10 * GIB, 0, 0.25, found.host_bytes


def test_a_model_that_is_not_known_yet_has_no_bytes_and_says_so(tmp_path: Path) -> None:
    found = made(tmp_path, model=str(tmp_path / "nowhere"))
    html = page(view_of(found))
    assert "unknown until the model is built" in html
    assert drawings(html) == []


def test_measured_rows_stand_beside_the_planned_ones() -> None:
    pairs = [
        {"row": "parameters", "planned_bytes": 4 * GIB, "measured_max_bytes": 4 * GIB, "difference_bytes": 0},
        # The rank that is furthest off is not the one that holds the most.
        {"row": "moments", "planned_bytes": 8 * GIB, "measured_max_bytes": 9 * GIB, "difference_bytes": -2 * GIB},
        {"row": "unaccounted", "planned_bytes": 0, "measured_max_bytes": GIB, "difference_bytes": None},
        {"row": "unaccounted", "planned_bytes": 0, "measured_max_bytes": GIB, "difference_bytes": GIB},
        {"row": "snapshot", "planned_bytes": 12 * GIB, "measured_max_bytes": None, "difference_bytes": None},
    ]
    measured = measured_of(pairs)
    assert measured == {
        "parameters": (4 * GIB, 4 * GIB),
        "moments": (8 * GIB, 6 * GIB),
        "unaccounted": (0, 2 * GIB),
    }
    html = page(view(measured=measured))
    assert "-2.00 GiB (-25.0%)" in html
    assert html.count(">none<") == 1, "parameters"
    (drawing,) = [d for d in drawings(html) if "as planned" in texts(d)]
    found = {block["part"]: block for block in blocks(drawing)}
    assert {part: block["bytes"] for part, block in found.items()} == {row: n for row, (_, n) in measured.items()}
    strokes = [float(line.attrib["x1"]) for line in drawing.iter("line") if line.attrib.get("class") == "planned"]
    scale = found["moments"]["width"] / (6 * GIB)
    assert [(x - found["moments"]["x"]) / scale / GIB for x in strokes] == pytest.approx([4, 8, 0], abs=0.01)
    assert {"as planned", "-25.0%", "not planned"} <= set(texts(drawing))


def test_a_candidate_whose_rows_are_not_its_peak_is_refused() -> None:
    with pytest.raises(ValueError, match="rows of 3 bytes, a peak of 4"):
        view(candidates=[Choice("x", {"parameters": 1, "moments": 2}, 4)])


def test_moments_come_in_the_order_of_a_step() -> None:
    shape = arch.look(LLAMA)
    assert isinstance(shape, arch.Arch)
    seen = set()
    for engine in ("ddp", "fsdp2", "deepspeed"):
        for stage in (1, 2, 3):
            for when in ("every", "last"):
                asked = Asked(ranks=8, nodes=1, micro=1, global_=64, seq_len=512, engine=engine, stage=stage, when=when)
                names = [name for name, _ in ledger_of(asked, shape).moments]
                assert (names[0], names[-1]) == ("rest", "the optimizer's step")
                assert names == [name for name in MOMENTS if name in names]
                seen |= set(names)
    assert seen == set(MOMENTS)


# -- to scale --------------------------------------------------------------------------------------------------


def test_columns_are_to_scale_and_stand_on_each_other() -> None:
    drawing = drawings(page(view()))[0]
    found = [block for block in blocks(drawing) if block["bytes"] > GIB]
    scale = found[0]["height"] / found[0]["bytes"]
    assert len(found) > 20
    for block in found:
        assert block["height"] == pytest.approx(scale * block["bytes"], abs=0.02)
    for x in {block["x"] for block in found}:
        stack = sorted((b for b in blocks(drawing) if b["x"] == x), key=lambda b: -b["y"])
        for low, high in pairwise(stack):
            assert high["y"] + high["height"] == pytest.approx(low["y"], abs=0.03)


@pytest.mark.parametrize("memory", [24, 40, 80, 140])
def test_the_limit_is_drawn_where_the_memory_ends(memory: int) -> None:
    drawing = drawings(page(view(memory_bytes=memory * GIB)))[0]
    found = [block for block in blocks(drawing) if block["bytes"] > GIB]
    scale = sum(block["height"] for block in found) / sum(block["bytes"] for block in found)
    ground = max(block["y"] + block["height"] for block in found)
    (line,) = [line for line in drawing.iter("line") if line.attrib.get("class") == "limit"]
    assert float(line.attrib["y1"]) == pytest.approx(ground - scale * memory * GIB, abs=0.05)


def test_a_memory_that_would_dwarf_the_bars_is_told_and_not_drawn() -> None:
    drawing = drawings(page(view(memory_bytes=1000 * GIB)))[0]
    assert not [line for line in drawing.iter("line") if line.attrib.get("class") == "limit"]
    assert {"1000.00 GiB", "far above"} <= set(texts(drawing))


def test_bars_are_to_scale_and_the_limit_crosses_those_that_do_not_fit() -> None:
    style = svg.Style(INKS, {}, 20 * GIB)
    small, large = Bar("a", [("parameters", 10 * GIB)], "10 GiB"), Bar("b", [("parameters", 30 * GIB)], "30 GiB")
    drawing = ElementTree.fromstring(bars(style, [small, large], "label"))
    first, second = blocks(drawing)
    assert second["width"] == pytest.approx(3 * first["width"], abs=0.02)
    (line,) = [line for line in drawing.iter("line") if line.attrib.get("class") == "limit"]
    assert float(line.attrib["x1"]) == pytest.approx(first["x"] + 2 * first["width"], abs=0.02)


def test_a_moment_without_a_row_has_no_block_of_it() -> None:
    slots = [("one", [("parameters", 5), ("logits", 0)]), ("two", [("parameters", 5), ("logits", 5)])]
    drawing = ElementTree.fromstring(columns(svg.Style(INKS, {}), slots, "label", "head"))
    assert columns_of(drawing) == [{"parameters": 5}, {"parameters": 5, "logits": 5}]


def test_more_samples_than_pixels_keep_their_highest() -> None:
    samples = [(float(i), {"parameters": GIB, "activations": GIB * (i == 3001)}) for i in range(5000)]
    (drawing,) = [d for d in drawings(page(view(samples=samples))) if "samples in the order of the step" in texts(d)]
    (most,) = [p for p in drawing.iter("polygon") if p.attrib.get("data-part") == "activations"]
    assert most.attrib["data-bytes"] == str(GIB)
    assert "2.00 GiB" in texts(drawing), "the peak"
    assert len(most.attrib["points"]) < 60000


# -- a file by itself, for every eye ---------------------------------------------------------------------------


def test_nothing_is_fetched_and_nothing_runs() -> None:
    html = page(view(samples=[(0.0, {"logits": 1, "comm": 2}), (1.0, {"logits": 2, "comm": 1})]))
    for what in ("http:", "https:", "//", "<script", "<link", "<img", "@import", "src=", "href="):
        assert what not in html, what
    assert set(re.findall(r"url\((.)", html)) == {"#"}
    assert "default-src 'none'; style-src 'unsafe-inline'" in html


def test_what_a_user_wrote_is_text_and_never_markup() -> None:
    bad = '<script>alert("1")</script>'
    held = {"parameters": 1}
    html = page(View(bad, [bad], [(bad, held)], [Choice(bad, held, 1, None, bad)], [], [], [bad]))
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert") >= 6


def test_rows_are_told_apart_without_their_colour() -> None:
    """Okabe and Ito's colours; rows whose lightness is alike differ in their hatching."""

    def lightness(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y

    assert {ink.colour for row, ink in INKS.items() if row != "overhead"} <= OKABE_ITO
    rows = list(INKS.items())
    for i, (name, ink) in enumerate(rows):
        for other, other_ink in rows[:i]:
            assert ink != other_ink, f"{name} and {other}"
            if ink.hatch == other_ink.hatch:
                assert abs(lightness(ink.colour) - lightness(other_ink.colour)) > 8, f"{name} and {other}"
        # Text on it has the contrast that WCAG asks of text of its size.
        light, dark = sorted(((16 + lightness(c)) / 116) ** 3 for c in (ink.colour, ink.on))[::-1]
        assert (light + 0.05) / (dark + 0.05) >= 4.5, name


def test_a_row_that_nobody_has_named_yet_is_drawn_all_the_same() -> None:
    held = {"parameters": GIB, "workspace": GIB}
    assert columns_of(drawings(page(View("t", [], [("now", held)])))[0]) == [held]


# -- small tools -----------------------------------------------------------------------------------------------


def test_ticks_are_round_and_few() -> None:
    assert ticks(50 * GIB) == [(10 * i * GIB, f"{10 * i} GiB") for i in range(1, 6)]
    assert [label for _, label in ticks(1.6 * GIB, 4)] == ["0.5 GiB", "1 GiB", "1.5 GiB"]
    assert [label for _, label in ticks(900)] == ["200 B", "400 B", "600 B", "800 B"]
    for top in (1, 7, 1023, 1025, 3 * 2**20, 17 * GIB, 999 * GIB, 5000 * 2**40):
        assert 1 <= len(ticks(top)) <= 6
        assert all(0 < count <= top for count, _ in ticks(top))


def test_lines_are_broken_at_spaces_and_long_words_behind_a_mark() -> None:
    assert wrapped("", 11, 100) == []
    assert wrapped("one two", 11, 1000) == ["one two"]
    long = "memory.checkpointing=selective shard.engine=deepspeed"
    for width in (40, 90, 200):
        lines = wrapped(long, 12, width)
        assert all(text_width(line, 12) <= width for line in lines)
        assert "".join(lines).replace(" ", "") == long.replace(" ", "")
    assert wrapped(long, 12, 170)[0] == "memory.checkpointing="
