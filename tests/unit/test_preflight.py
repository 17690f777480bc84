"""Checks of one machine, and how the findings of many ranks become one decision. No torch: figures are passed in."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpdist import machine
from mpdist.errors import DoesNotFit, MachineError
from mpdist.findings import Finding, error_of, from_json, merged, numbered, shortened, table, worst_first
from mpdist.machine import Interface

GIB = 2**30
BAD = Finding("disk", "full", "failed", "nothing fits", "make room")
DOUBT = Finding("clock", "late", "doubtful", "it lags", "set it")
GOOD = Finding("device", "a CPU")


# -- findings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "text"), [((0,), "0"), ((0, 1, 2, 3, 6), "0-3,6"), ((5, 3, 4, 9, 8), "3-5,8-9"), ((), "")]
)
def test_ranks_are_written_short_and_read_back(ranks: tuple[int, ...], text: str) -> None:
    assert shortened(ranks) == text
    assert numbered(text) == sorted(ranks)


def test_what_many_ranks_found_alike_is_one_finding_and_what_differs_stays_apart() -> None:
    ranks = [(rank, f"n{rank // 4}", [GOOD, BAD if rank == 5 else Finding("disk", "writable")]) for rank in range(8)]
    found = merged(ranks)
    assert [(f.check, f.level, shortened(f.ranks), f.host) for f in found] == [
        ("device", "ok", "0-7", "n0"), ("disk", "ok", "0-4,6-7", "n0"), ("disk", "failed", "5", "n1"),
    ]  # fmt: skip
    assert [f.level for f in worst_first(found)] == ["failed", "ok", "ok"]
    error = error_of(found)
    assert isinstance(error, MachineError)
    assert (error.what, error.why, error.do) == ("rank 5 on n1: disk: full", "nothing fits", "make room")


def test_several_failures_are_one_error_that_names_them_all() -> None:
    found = [Finding("plan", "90 GiB", "failed", "too large", "shard", status=DoesNotFit.status), BAD, DOUBT, GOOD]
    error = error_of(found)
    assert isinstance(error, DoesNotFit)
    assert "and: disk: full (do: make room)" in str(error)
    assert "clock" not in str(error)
    assert error_of([DOUBT, GOOD]) is None


def test_a_finding_survives_json() -> None:
    (found,) = merged([(3, "n1", [BAD]), (4, "n1", [BAD])])
    row = found.to_json()
    assert (row["check"], row["ok"], row["rank"], row["ranks"]) == ("disk", False, 3, "3-4")
    assert from_json(row) == found
    assert "why" not in GOOD.to_json()
    assert "rank" not in GOOD.to_json()


def test_the_table_has_the_worst_first_with_its_cure() -> None:
    lines = table([GOOD, DOUBT, BAD]).splitlines()
    assert lines[0].split() == ["failed", "disk", "full"]
    assert [line.strip() for line in lines[1:3]] == ["why: nothing fits", "do:  make room"]
    assert lines[-1].startswith("ok ")
    assert all(len(line) <= 118 for line in table([Finding("x", "y", "doubtful", "long " * 60)]).splitlines())


# -- memory and limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "level"), [(40 * GIB, "ok"), (30 * GIB, "doubtful"), (15 * GIB, "failed"), (None, "ok")]
)
def test_free_memory_against_the_plan_of_all_ranks_of_the_host(
    monkeypatch: pytest.MonkeyPatch, free: int | None, level: str
) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda cgroup: free)
    found = machine.host_memory(need=8 * GIB, least=4 * GIB, ranks=4)
    assert found.level == level, found
    assert (found.do != "") == (level != "ok")
    assert machine.host_memory(need=None, least=None, ranks=4).ok
    with_overhead = machine.host_memory(need=8 * GIB, least=4 * GIB, ranks=4, held=2 * GIB)
    if free is not None:
        assert "4 ranks x 8.00 GiB beside the 2.00 GiB of overhead" in with_overhead.value


def test_a_control_group_that_gives_less_is_what_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "job" / "step"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    for name, text in (
        ("max", "4294967296"),
        ("current", "3221225472"),
        ("stat", "anon 5\ninactive_file 1073741824\n"),
    ):
        (group.parent / f"memory.{name}").write_text(text)
    real = machine.Path

    def place(text: str) -> Path:
        if text == "/proc/self/cgroup":
            (tmp_path / "cgroup").write_text("0::/job/step\n")
            return tmp_path / "cgroup"
        return tmp_path if text == "/sys/fs/cgroup" else real(text)

    monkeypatch.setattr(machine, "Path", place)
    assert list(machine._group_left()) == [2 * GIB]
    assert machine.available_memory() is not None
    assert machine.available_memory() <= 2 * GIB  # type: ignore[operator]


def test_shared_memory_matters_to_gpu_ranks_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    docker = SimpleNamespace(f_bavail=16384, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: docker)
    assert machine.shared_memory(8, cuda=True).level == "doubtful"
    assert "--shm-size=8g" in machine.shared_memory(8, cuda=True).do
    assert machine.shared_memory(8, cuda=False).ok
    assert machine.shared_memory(1, cuda=True).ok


@pytest.mark.parametrize(
    ("ranks", "limits", "level"),
    [(8, (1024, 4096), "ok"), (512, (1024, 65536), "doubtful"), (1024, (1024, 4096), "failed"), (1024, (-1, -1), "ok")],
)
def test_open_files_grow_with_the_world(ranks: int, limits: tuple[int, int], level: str) -> None:
    found = machine.open_files(ranks, limits)
    assert found.level == level
    if level == "failed":
        assert "administrator" in found.do
    if level == "doubtful":
        assert "ulimit -n 65536" in found.do


def test_locked_memory_matters_to_rdma_between_nodes() -> None:
    assert machine.locked_memory(2, True, 65536).level == "doubtful"
    assert machine.locked_memory(1, True, 65536).ok
    assert machine.locked_memory(2, False, 65536).ok
    assert "unlimited" in machine.locked_memory(2, True, -1).value


def test_threads_that_share_cores_are_told_with_the_number_that_does_not() -> None:
    found = machine.threads(each=8, ranks=4, cores=16)
    assert found.level == "doubtful"
    assert "OMP_NUM_THREADS=4" in found.do
    assert machine.threads(4, 4, 16).ok
    assert machine.threads(1, 4, 2).ok, "with one thread there is nothing to lower"


# -- disk ------------------------------------------------------------------------------------------------------------


def test_a_directory_is_written_read_back_and_left_as_it_was(tmp_path: Path) -> None:
    found = machine.run_directory(tmp_path)
    assert found.ok
    assert found.value.startswith("writable")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "word"),
    [(errno.ENOSPC, "room"), (errno.EDQUOT, "quota"), (errno.EACCES, "write"), (errno.EROFS, "write")],
)
def test_a_directory_that_takes_nothing_fails_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, word: str
) -> None:
    def full(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    found = machine.run_directory(tmp_path)
    assert found.level == "failed"
    assert os.strerror(number) in found.value
    assert word in found.do
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_gives_back_other_bytes_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path)[:-1] + b"?")
    found = machine.run_directory(tmp_path)
    assert found.level == "failed"
    assert "changed" in found.why


def test_a_directory_without_the_other_ranks_mark_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 1000, 2))
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: None))
    assert "share" in machine.run_directory(tmp_path, "env.json").why
    (tmp_path / "env.json").touch()
    assert machine.run_directory(tmp_path, "env.json").ok


# -- networks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "nodes", "port", "span", "level"),
    [
        (8, 1, None, (32768, 60999), "ok"),
        (16, 2, 29500, (32768, 60999), "ok"),
        (16, 2, 40000, (32768, 60999), "doubtful"),
        (8, 1, 40000, (32768, 60999), "ok"),
        (1024, 128, None, (60000, 60999), "failed"),
    ],
)
def test_ports(ranks: int, nodes: int, port: int | None, span: tuple[int, int], level: str) -> None:
    found = machine.ports(ranks, nodes, port, span)
    assert found.level == level
    if level == "doubtful":
        assert "below 32768" in found.do


LOOP, ETHERNET = Interface("lo", "127.0.0.1", True, None), Interface("eth0", "10.0.0.7", True, 25000)
DOCKER, DOWN = Interface("docker0", "172.17.0.1", True, None), Interface("eth1", None, False, None)
HERE = [LOOP, DOCKER, DOWN, ETHERNET]


@pytest.mark.parametrize(
    ("nodes", "cuda", "env", "own", "level", "text"),
    [
        (2, False, {}, "127.0.1.1", "doubtful", "loopback by default"),
        (2, False, {}, "10.0.0.7", "ok", "eth0 by default"),
        (1, False, {}, "127.0.1.1", "ok", "loopback by default"),
        (2, True, {}, "127.0.1.1", "ok", "eth0 by default"),
        (2, False, {"GLOO_SOCKET_IFNAME": "eth0"}, "127.0.1.1", "ok", "GLOO_SOCKET_IFNAME=eth0"),
        (2, False, {"GLOO_SOCKET_IFNAME": "ib0"}, "127.0.1.1", "failed", "GLOO_SOCKET_IFNAME=ib0"),
        (2, True, {"NCCL_SOCKET_IFNAME": "=eth0"}, "", "ok", "NCCL_SOCKET_IFNAME==eth0"),
        (2, True, {"NCCL_SOCKET_IFNAME": "^docker"}, "", "ok", "NCCL_SOCKET_IFNAME=^docker"),
    ],
)
def test_the_interface_that_will_be_taken(
    nodes: int, cuda: bool, env: dict[str, str], own: str, level: str, text: str
) -> None:
    found = machine.network(nodes, cuda, env, HERE, own)
    assert (found.level, found.value.partition(";")[0]) == (level, text)
    if level == "doubtful":
        assert found.do == "set GLOO_SOCKET_IFNAME=eth0"


def test_this_hosts_interfaces_have_their_addresses() -> None:
    found = {interface.name: interface for interface in machine.interfaces()}
    assert set(found) == {name for _, name in socket.if_nameindex()}
    assert found["lo"].address == "127.0.0.1"
    assert str(ETHERNET) == "eth0 (10.0.0.7, 25 Gbit/s)"


# -- processor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "native"),
    [
        ("fpu avx2 f16c", set()),
        ("avx512f avx512_bf16", {"bf16"}),
        ("avx512_bf16 avx512_fp16 amx_bf16", {"bf16", "fp16"}),
        ("fp asimd asimdhp bf16", {"bf16", "fp16"}),
    ],
)
def test_which_16_bit_dtypes_a_cpu_has(flags: str, native: set[str]) -> None:
    assert machine.cpu_native(flags.split()) == native


def test_the_environment_shows_places_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    env: dict[str, Any] = {"SLURM_JOB_ID": "7", "RANK": "3", "WANDB_API_KEY": "local-secret", "HF_TOKEN": "hf_secret"}
    assert machine.scheduler(env).value == "SLURM_JOB_ID=7 RANK=3"
    assert machine.scheduler({}).value == "no Slurm, no torchrun"
