"""What ranks find before they train: true values, planted faults of each kind, one decision of all ranks."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import worlds

from mpdist import dist as groups
from mpdist.errors import MachineError

pytestmark = pytest.mark.world
DTYPES = ("float32", "bfloat16", "float16")


def checks(run: tiny.Result, session: int = 1) -> dict[str, dict[str, Any]]:
    env = json.loads((run.folder / f"sessions/{session:04d}/env.json").read_text())
    return {row["check"]: row for row in env["preflight"]}


# -- a session -------------------------------------------------------------------------------------------------------


def test_a_session_of_two_ranks_says_what_it_found_and_takes_no_time_for_it(tmp_path: Path) -> None:
    run = tiny.train(tmp_path, 2, reduce={"wire": "bf16"})
    assert run.status == 0, run.message
    found = checks(run)
    alone = ("device", "compute dtype", "run directory", "host memory", "open files", "ports", "threads", "versions")
    links = [f"all-{way} {word}" for word in ("fp32", "bf16") for way in ("reduce", "gather")]
    assert {*alone, *links} <= set(found)
    assert all(row["ok"] for row in found.values()), found
    assert found["device"]["ranks"] == "0-1"
    assert found["host memory"]["ranks"] == "0", "what a node shares is looked at once"
    assert run.events("warning") == []
    spent = json.loads((run.folder / "sessions/0001/env.json").read_text())["preflight_s"]
    assert spent < 5.0, "tens of milliseconds on an idle machine"


def test_one_rank_has_nobody_to_compare_with(tmp_path: Path) -> None:
    run = tiny.train(tmp_path, 1)
    assert "preflight" not in json.loads((run.folder / "sessions/0001/env.json").read_text())


def session_with_a_fault(rank: int, path: str, fault: str) -> tuple[int, str]:
    """Rank 1 has one."""
    from mpdist import machine, preflight

    if rank == 1 and fault == "no room":
        plain_sync = os.fsync

        def full(file: int) -> None:
            if ".probe-" in os.readlink(f"/proc/self/fd/{file}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            plain_sync(file)

        os.fsync = full  # type: ignore[assignment]
    elif rank == 1 and fault == "another directory":
        machine._appears = lambda _: False
    elif rank == 1 and fault == "another session":
        about = preflight.about
        preflight.about = lambda *a: {**about(*a), "began": 1.0}  # type: ignore[assignment]
    elif rank == 1 and fault == "wrong sums":
        import torch.distributed as dist

        plain = dist.all_reduce

        def wrong(tensor: Any, *rest: Any, **more: Any) -> Any:
            done = plain(tensor, *rest, **more)
            if tensor.numel() > 1000:
                tensor[7] += 1
            return done

        dist.all_reduce = wrong
    elif fault == "little memory":
        machine.available_memory = lambda cgroup=True: 100_000  # type: ignore[assignment]
    elif rank == 1 and fault == "no GPU in torch":
        preflight.visible_devices = lambda env: 2
    return tiny.session(rank, path, [])


@pytest.mark.parametrize(
    ("fault", "what", "do", "changes"),
    [
        ("no room", "rank 1 on HOST: run directory: ", "make room", {}),
        ("another directory", "rank 1 on HOST: run directory: ", "that all nodes share", {}),
        ("another session", "run directory: ", "that all nodes share", {}),
        ("wrong sums", "rank 1 on HOST: all-reduce fp32: element 7 is 1", "take this node out", {}),
        ("little memory", "rank 0 on HOST: host memory: 97.66 KiB free", "end what else runs there", {}),
        ("no GPU in torch", "rank 1 on HOST: device: CPU", "launch.device=cpu if a CPU is meant", {"device": "auto"}),
    ],
)
def test_a_fault_of_one_rank_ends_all_with_its_cure(
    tmp_path: Path, fault: str, what: str, do: str, changes: dict[str, str]
) -> None:
    path = tiny.config(tmp_path, launch={"device": "cpu", "timeout": "60s"} | changes)
    ends = worlds.run(session_with_a_fault, 2, str(path), fault)
    assert [status for status, _ in ends] == [4, 4]
    assert ends[0][1] == ends[1][1]
    assert ends[0][1].startswith(what.replace("HOST", os.uname().nodename)), ends[0][1]
    assert do in ends[0][1]
    run = tmp_path / "runs/run"
    env = json.loads((run / "sessions/0001/env.json").read_text())
    failed = [row for row in env["preflight"] if row["level"] == "failed"]
    assert len(failed) == 1
    assert failed[0]["do"] in ends[0][1]
    assert not (run / "metrics.jsonl").read_text()


def session_in_doubt(rank: int, path: str) -> tuple[int, str]:
    from mpdist import machine, preflight

    preflight.native = lambda device: set()  # type: ignore[assignment]
    machine.interfaces = list
    return tiny.session(rank, path, [])


def test_what_is_doubtful_is_a_warning_event_and_trains(tmp_path: Path) -> None:
    path = tiny.config(tmp_path, precision={"compute": "bf16"}, budget={"steps": 1})
    ends = worlds.run(session_in_doubt, 2, str(path))
    assert [status for status, _ in ends] == [0, 0], ends
    run = tiny.Result(tmp_path / "runs/run", ends)
    (warning,) = run.events("warning")
    assert "compute dtype: bf16, emulated" in warning["reason"]
    assert "use precision.compute: fp32" in warning["reason"]
    assert checks(run)["compute dtype"]["level"] == "doubtful"


# -- links -----------------------------------------------------------------------------------------------------------


def right_values(rank: int) -> list[str | None]:
    import torch

    from mpdist import links

    cpu = torch.device("cpu")
    dtypes = [getattr(torch, name) for name in DTYPES]
    return [try_(dtype, cpu) for dtype in dtypes for try_ in (links.summed_right, links.gathered_right)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_values_that_arrive_as_they_were_sent_pass_in_every_dtype(ranks: int) -> None:
    assert worlds.run(right_values, ranks) == [[None] * 6] * ranks


def wrong_values(rank: int, how: str) -> list[str | None]:
    """A backend that does to every message what `how` says, on rank 1."""
    import torch
    import torch.distributed as dist

    from mpdist import links

    reduce, gather = dist.all_reduce, dist.all_gather

    def spoiled(tensor: Any) -> None:
        if rank == 1 and how == "a bit":
            tensor.view(torch.int16)[3] ^= 1 << 8
        elif rank == 1 and how == "shifted":
            tensor.copy_(tensor.roll(1))
        elif how == "twice":
            tensor.mul_(2)

    def all_reduce(tensor: Any, *rest: Any, **more: Any) -> None:
        if rank == 1 and how == "lost":
            tensor.zero_()
        reduce(tensor, *rest, **more)
        if how != "swapped":
            spoiled(tensor)

    def all_gather(parts: Any, tensor: Any, *rest: Any, **more: Any) -> None:
        gather(parts, torch.zeros_like(tensor) if rank == 1 and how == "lost" else tensor, *rest, **more)
        if how == "swapped":
            parts.reverse()
        for part in parts:
            spoiled(part)

    dist.all_reduce, dist.all_gather = all_reduce, all_gather
    cpu = torch.device("cpu")
    return [links.summed_right(torch.float16, cpu), links.gathered_right(torch.float16, cpu)]


@pytest.mark.parametrize("how", ["a bit", "shifted", "twice", "lost", "swapped"])
def test_values_that_change_on_their_way_are_seen(how: str) -> None:
    first, second = worlds.run(wrong_values, 2, how)
    everywhere = how in ("twice", "lost", "swapped")
    assert all(second if how != "swapped" else second[1:]), second
    assert all(first[1:]) == everywhere, first
    assert any("where it has to be" in text for text in second if text)


def offsets(rank: int) -> list[tuple[float, float]]:
    """Rank 2's clock is 37 s ahead, rank 1's 0.25 s behind."""
    import torch

    from mpdist import links

    ahead = {1: -0.25, 2: 37.0}.get(rank, 0.0)
    return links.clock_offsets(torch.device("cpu"), lambda: time.time() + ahead)


def test_clock_offsets_are_bounded_by_an_interval_that_holds_the_truth() -> None:
    everywhere = worlds.run(offsets, 3)
    assert everywhere[0] == everywhere[1] == everywhere[2]
    for (low, high), true in zip(everywhere[0], (0.0, -0.25, 37.0), strict=True):
        assert low <= true + 1e-6
        assert high >= true - 1e-6
        assert high - low < 0.2, "milliseconds on an idle machine"


def speeds(rank: int) -> list[tuple[str, int, float, float]]:
    import torch

    from mpdist import links

    tried = links.bandwidths(2, torch.device("cpu"), seconds=0.05)
    return [(found.link, found.ranks, found.bandwidth, found.node) for found in tried]


def test_each_class_of_link_has_its_bandwidth_and_all_ranks_the_same() -> None:
    whole = worlds.run(speeds, 4)
    assert all(found == whole[0] for found in whole), "the slowest rank's counts for all"
    (inside, ranks, one, node), (across, _, single, both) = whole[0]
    assert (inside, ranks, across) == ("within a node", 2, "between nodes")
    assert node == one
    assert both == 2 * single
    assert min(one, single) > 1e6


# -- meeting ---------------------------------------------------------------------------------------------------------


def test_ranks_on_different_kinds_of_device_are_told_before_a_group_is_tried() -> None:
    groups._check_devices(["cpu a", "cpu a", "cpu b"])
    groups._check_devices(["cuda a 0:1:0", "cuda a 0:2:0", "cuda b 0:1:0"])
    with pytest.raises(MachineError, match="rank 0 on a computes on cuda, rank 2 on b on cpu"):
        groups._check_devices(["cuda a 0:1:0", "cuda a 0:2:0", "cpu b"])
    with pytest.raises(MachineError, match="ranks 1 and 2 on b have the same GPU"):
        groups._check_devices(["cuda a 0:1:0", "cuda b 0:1:0", "cuda b 0:1:0"])


def session_on_two_kinds(rank: int, path: str) -> tuple[int, str]:
    groups._seat_of = lambda device: f"{'cuda' if rank else 'cpu'} n{rank} 0:1:0"  # type: ignore[assignment]
    return tiny.session(rank, path, [])


def test_such_ranks_end_together(tmp_path: Path) -> None:
    ends = worlds.run(session_on_two_kinds, 2, str(tiny.config(tmp_path)))
    assert [status for status, _ in ends] == [4, 4]
    assert "rank 0 on n0 computes on cpu, rank 1 on n1 on cuda" in ends[0][1]
    assert not (tmp_path / "runs/run").exists()
