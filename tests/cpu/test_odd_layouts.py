"""Layouts of ranks over nodes that do not come out even are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import config

from mpdist.config import ConfigError, load
from mpdist.plan import make


@pytest.mark.parametrize(
    ("ranks", "nodes", "replicas", "near"),
    [(2, 3, 2, "take 1 or 3 or 6"), (3, 2, 3, "take 1 or 2 or 6"), (4, 3, 2, "take 1 or 3 or 6 or 12")],
)
def test_shards_that_straddle_nodes_unevenly_are_refused(
    tmp_path: Path, ranks: int, nodes: int, replicas: int, near: str
) -> None:
    asked = load(config(tmp_path, shard={"replicas": replicas}, batch={"global": 24}), []).config
    with pytest.raises(ConfigError) as caught:
        make(asked, None, ranks, nodes)
    assert "unevenly" in str(caught.value)
    assert near in str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "nodes", "replicas"), [(2, 3, 3), (2, 3, 1), (4, 2, 4), (4, 2, 2), (1, 4, 2), (6, 1, 2)]
)
def test_shards_within_a_node_or_of_whole_nodes_work(tmp_path: Path, ranks: int, nodes: int, replicas: int) -> None:
    asked = load(config(tmp_path, shard={"replicas": replicas}, batch={"global": 24}), []).config
    assert make(asked, None, ranks, nodes).batch.ranks == ranks * nodes
