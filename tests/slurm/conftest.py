"""A real Slurm of two nodes for all tests here; they skip with the reason where there can be none."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from cluster import Cluster, unable


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, n1 and n2, of four CPUs each, hosts of their own; see cluster.Cluster."""
    if why := unable():
        if os.environ.get("MPDIST_EXPECT_SLURM"):
            pytest.fail(f"Slurm was expected here (MPDIST_EXPECT_SLURM is set): {why}")
        pytest.skip(why)
    cluster = Cluster.start(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    """The cluster with nothing running, and again after the test."""
    if slurm.queue():
        slurm.settle()
    yield slurm
    slurm.settle()
