"""Values that no format can hold are refused where they stand, before anything computes with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import config

from mpdist.config import ConfigError, load


@pytest.mark.parametrize(
    ("override", "expects"),
    [
        ("launch.timeout=1e300", "at most 7d"),
        ("launch.timeout=8d", "at most 7d"),
        ("data.train.0.weight=1e18", "<= 1e+06"),
        ("data.seq_len=" + "9" * 30, "<= 1e+09"),
        ("precision.scale={mode: static, init: 1e300}", "<= 1e+18"),
        ("precision.scale={mode: static, init: 1e-42}", ">= 1e-18"),
        ("precision.scale={mode: dynamic, floor: 1e-300}", ">= 1e-18"),
        ("optim.eps=1e-46", ">= 1e-30"),
    ],
)
def test_values_beyond_every_format_are_refused_with_their_bound(tmp_path: Path, override: str, expects: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config(tmp_path), [override])
    assert [expects in str(problem) for problem in caught.value.problems] == [True]


@pytest.mark.parametrize("text", ["[" * 3000 + "]" * 3000, "{a: " * 3000 + "1" + "}" * 3000])
def test_a_file_nested_without_end_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load(path)


def test_a_json_file_may_escape_characters_beyond_16_bits(tmp_path: Path) -> None:
    name = "l\u00e4uf \U0001f642"
    path = config(tmp_path, name=name)
    assert "\\ud83d\\ude42" in path.read_text()
    assert load(path).config.name == name
    path.write_text(path.read_text().replace("\\ude42", ""))
    with pytest.raises(ConfigError, match="name = "):
        load(path)
