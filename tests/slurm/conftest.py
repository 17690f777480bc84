"""A real Slurm of two nodes for all tests here; they skip with the reason where there can be none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import submitted
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


@pytest.fixture(scope="session")
def undisturbed(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was submitted and that nothing has disturbed: what every other one is held against."""
    folder = tmp_path_factory.mktemp("undisturbed")
    path = submitted.config(folder)
    said = slurm.call("mpdist", "submit", str(path), "--nodes", "2", "--cpus", "2", "--time", "30m", cwd=folder)
    job = said.split()[2].rstrip(":")
    slurm.wait(job, "COMPLETED", timeout=240)
    (folder / "said").write_text(said)
    (folder / "job").write_text(job)
    return folder
