"""`mpdist doctor CONFIG` on several ranks, as a user starts it: by itself, on two nodes by hand, under torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import real_runs
import tiny

pytestmark = pytest.mark.world
DOCTOR = [sys.executable, "-m", "mpdist.cli", "doctor"]
BOUND_S = 120


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=real_runs.environment(MPDIST_TEST_DOCTOR=str(folder)), cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def left_behind(folder: Path) -> list[int]:
    """Processes that the test has started and that live."""
    mark = f"MPDIST_TEST_DOCTOR={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (
                mark in (path / "environ").read_bytes().split(b"\0")
                and b"Z" not in (path / "stat").read_bytes().split()[2]
            ):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def findings(out: str) -> dict[str, Any]:
    return {row["check"]: row for row in json.loads(out)["findings"]}


def test_two_ranks_are_started_examined_and_gone(tmp_path: Path) -> None:
    process = start([*DOCTOR, str(tiny.config(tmp_path)), "--ranks", "2", "--json", "precision.compute=bf16"], tmp_path)
    out, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == 0, err
    found = findings(out)
    assert found["all-reduce bf16"]["ranks"] == "0-1"
    assert found["versions"]["value"] == "equal on 2 ranks"
    assert "GB/s a rank: an all-reduce of 16.00 MiB over 2 ranks" in found["bandwidth within a node"]["value"]
    assert {"plan", "sizes", "space", "hub", "software", "speed bf16", "run directory"} <= set(found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "train.jsonl"], "it leaves nothing"
    assert left_behind(tmp_path) == []


def by_hand(folder: Path, *differ: str) -> tuple[list[int], list[tuple[str, str]]]:
    """Two nodes of one rank each, started one by one; the statuses, and what each said. differ: a setting for each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [*DOCTOR, str(tiny.config(folder)), "--ranks", "1", "--nodes", "2", "--json"]
    words += ["launch.address=127.0.0.1", f"launch.port={port}"]
    nodes = [start([*words, "--node-rank", str(n), *differ[n : n + 1]], folder) for n in range(2)]
    told = [node.communicate(timeout=BOUND_S) for node in nodes]
    assert left_behind(folder) == []
    return [node.returncode for node in nodes], told


def test_two_nodes_by_hand_try_the_links_between_them(tmp_path: Path) -> None:
    statuses, [(out, err), (second, said)] = by_hand(tmp_path)
    assert statuses == [0, 0], err + said
    assert "bandwidth between nodes" in findings(out)
    assert second == ""
    assert "node 1 of 2 has taken part" in said


@pytest.mark.slow
def test_nodes_that_disagree_are_told_on_both(tmp_path: Path) -> None:
    statuses, told = by_hand(tmp_path, "seed=0", "seed=1")
    assert statuses == [2, 2], told
    for _, said in told:
        assert "seed = 0 on rank 0 and 1 on rank 1" in said


def test_under_torchrun_each_process_is_a_rank(tmp_path: Path) -> None:
    path = str(tiny.config(tmp_path, data={"tokenizer": "bytes", "train": [{"path": "/none.jsonl"}], "seq_len": 64}))
    process = start([*real_runs.TORCHRUN, "doctor", path, "--json"], tmp_path)
    out, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == 1, "torchrun turns every status into 1"
    found = findings(out)
    assert (found["inputs"]["level"], found["inputs"]["status"]) == ("failed", 2), err
    assert found["all-reduce fp32"]["ok"]


def test_a_stop_ends_it_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    process = start([*DOCTOR, str(tiny.config(tmp_path)), "--ranks", "2"], tmp_path)
    deadline = time.monotonic() + BOUND_S
    while len(left_behind(tmp_path)) < 4:  # itself, torchrun and two ranks
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    process.communicate(timeout=BOUND_S)
    assert process.returncode == 130
    assert time.monotonic() - began < 20
    assert left_behind(tmp_path) == []
    assert os.path.exists(tmp_path / "train.jsonl")
