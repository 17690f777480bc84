"""The schema describes itself: every key in the reference, in the JSON schema, and read somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from mpdist.config import json_schema
from mpdist.config.describe import all_keys, find, reference

ROOT = Path(__file__).resolve().parents[2]


def test_every_key_is_described() -> None:
    for name, key in all_keys():
        assert key.description.endswith((".", ")")), name
        assert key.expects, name
        assert "anything" not in key.expects, name


def test_find_knows_exactly_the_keys() -> None:
    for name, key in all_keys():
        found = find(tuple(name.replace(".N.", ".0.").split(".")))
        assert found is not None
        assert found.expects == key.expects
    assert find(("batch", "nothing")) is None
    assert find(("data", "train", "0", "nothing")) is None
    assert find(("seed", "deeper")) is None


def test_the_reference_has_a_row_for_each_key() -> None:
    rows = reference().splitlines()
    assert len(rows) == 2 + len(list(all_keys()))
    assert "| `optim.lr` | a number >= 0 | 2.0e-05 | The peak learning rate. |" in rows


def test_the_json_schema_refuses_unknown_keys_at_every_depth() -> None:
    schema = json_schema()
    objects = [schema, *schema["$defs"].values()]
    assert all(part["additionalProperties"] is False for part in objects)
    assert "extends" in schema["properties"]
    assert "global" in schema["$defs"]["Batch"]["properties"]
    names = {name.split(".")[-1] for name, _ in all_keys()}
    described = {key for part in objects for key in part["properties"]} - {"extends"}
    assert described == names


def test_no_key_without_a_reader() -> None:
    """A key that nothing reads would be accepted and do nothing."""
    code = "\n".join(
        path.read_text() for path in sorted((ROOT / "mpdist").rglob("*.py")) if path.parent.name != "config"
    )
    unread = []
    for name, key in all_keys():
        leaf = name.split(".")[-1].replace("global", "global_")
        if key.section is None and not re.search(rf"\.{leaf}\b|\"{leaf}\"", code):
            unread.append(name)
    assert unread == []
