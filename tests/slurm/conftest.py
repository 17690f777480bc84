"""A real Slurm for all tests here; they skip with the reason where there can be none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import slurm_scenes
from cluster import Cluster, unable

PLAYERS = 5  # scenes at a time: each waits for Slurm, a time limit or a timeout for more than half of its time


@pytest.fixture(scope="session")
def bare_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := unable():
        if os.environ.get("MPDIST_EXPECT_SLURM"):
            pytest.fail(f"Slurm was expected here (MPDIST_EXPECT_SLURM is set): {why}")
        pytest.skip(why)
    cluster = Cluster.start(tmp_path_factory.mktemp("slurm"), apart=slurm_scenes.APART)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def scenes(
    request: pytest.FixtureRequest, bare_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    """The scenes that the selected tests look at, under way from the first test on."""
    looked_at = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    pool = ThreadPoolExecutor(PLAYERS)
    yield {
        name: pool.submit(play, bare_cluster, tmp_path_factory.mktemp(name))
        for name, play in slurm_scenes.SCENES.items()
        if name in looked_at
    }
    pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture(scope="session")
def cluster(bare_cluster: Cluster, scenes: dict[str, Future[Any]]) -> Cluster:
    """Two nodes, n1 and n2, hosts of their own, on which jobs of the scenes may run; see cluster.Cluster."""
    return bare_cluster


def _fixture(name: str) -> Callable[..., Any]:
    @pytest.fixture(scope="session", name=name)
    def seen(scenes: dict[str, Future[Any]]) -> Any:
        return scenes[name].result()

    return seen


for _name in slurm_scenes.SCENES:
    globals()[f"_{_name}"] = _fixture(_name)
