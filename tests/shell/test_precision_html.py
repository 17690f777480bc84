"""A run's precision page in a real browser: nothing is cut off, no text lies over another, few layers or many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from browser import chromium, looked_at
from telemetered import LAYERS, run_with_telemetry

MANY = [
    "model.embed_tokens",
    *(f"model.language_model.decoder.some_long_name.layers.{i}" for i in range(126)),
    "lm_head",
]


@pytest.mark.parametrize(("steps", "layers"), [(1, LAYERS), (7, LAYERS), (400, LAYERS), (60, MANY)])
def test_no_text_is_cut_off_or_lies_over_another(tmp_path: Path, steps: int, layers: list[str]) -> None:
    run, file = run_with_telemetry(tmp_path / "run", steps, layers), tmp_path / "out.html"
    command = [sys.executable, "-m", "mpdist.cli", "doctor", str(run), "--html", str(file)]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    html = file.read_text("utf-8")
    assert len(html) < 4_000_000
    _, complaints = chromium(tmp_path, html, "--dump-dom")
    assert complaints == ""
    found = looked_at(tmp_path, html)
    assert (found["drawings"], found["cut"], found["over"]) == (7, [], [])
    assert found["texts"] > 50
    assert found["wide"] <= 1130
