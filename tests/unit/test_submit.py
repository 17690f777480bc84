"""The argument list of sbatch, what a cluster is asked, and who is queued again: without a Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny

from mpdist import cli, cluster, shipped, slurm, submit
from mpdist.config import Resolved, load
from mpdist.errors import ConfigError

TOP = Path(__file__).resolve().parents[2]


def ask(folder: Path, *overrides: str) -> Resolved:
    return load(tiny.config(folder), [*overrides, f"out_dir={folder}/runs"])


def words(folder: Path, *overrides: str) -> list[str]:
    return submit.arguments(ask(folder, *overrides), Path("kept.yaml"))


def test_the_list_is_sbatch_its_options_the_script_and_the_configuration_that_is_kept(tmp_path: Path) -> None:
    overrides = ("slurm.time=2h", "launch.nodes=4", "slurm.partition=gpu", "track.every=3")
    assert words(tmp_path, *overrides) == [
        *("sbatch", "--parsable", "--job-name=run", "--nodes=4", "--ntasks-per-node=1", "--partition=gpu"),
        *("--time=02:00:00", "--signal=USR1@300", "--requeue", "--open-mode=append"),
        f"--output={tmp_path}/runs/run/slurm/%j.log",
        *(str(TOP / "slurm" / "train.sbatch"), "kept.yaml"),
    ]


@pytest.mark.parametrize(
    ("override", "words_"),
    [
        ("slurm.account=proj", ["--account=proj"]),
        ("slurm.qos=high", ["--qos=high"]),
        ("slurm.constraint=h100&nvlink", ["--constraint=h100&nvlink"]),
        ("slurm.gpus_per_node=8", ["--gpus-per-node=8"]),
        ("slurm.gres=gpu:a100:4", ["--gres=gpu:a100:4"]),
        ("slurm.cpus_per_node=96", ["--cpus-per-task=96"]),
        ("slurm.mem=1.5GiB", ["--mem=1536M"]),
        ("slurm.mem=0", ["--mem=0"]),
        ("slurm.exclusive=true", ["--exclusive"]),
        ("slurm.signal_lead=90s", ["--signal=USR1@90"]),
        ("slurm.dependency=afterok:7", ["--dependency=afterok:7", "--kill-on-invalid-dep=yes"]),
        ("slurm.array=0-7%2", ["--array=0-7%2"]),
        ("slurm.extra=[--mail-type=END,'--comment=two words']", ["--mail-type=END", "--comment=two words"]),
        ("slurm.time=90061s", ["--time=1-01:01:01"]),
        ("slurm.time=1:30:00", ["--time=01:30:00"]),
        ("slurm.time=90:30", ["--time=01:30:30"]),
        ("slurm.time=1-02", ["--time=1-02:00:00"]),
        ("slurm.time=1-02:03", ["--time=1-02:03:00"]),
        ("slurm.time=2-00:00:05", ["--time=2-00:00:05"]),
        ("slurm.time=7200.0", ["--time=02:00:00"]),
        ("slurm.mem=200G", ["--mem=204800M"]),
        ("slurm.mem=4000m", ["--mem=4000M"]),
        ("slurm.mem=1T", ["--mem=1048576M"]),
        ("slurm.mem=2GB", ["--mem=1908M"]),
    ],
)
def test_each_key_is_an_option(tmp_path: Path, override: str, words_: list[str]) -> None:
    found = words(tmp_path, override)
    assert set(words_) <= set(found)
    assert found.index(words_[0]) < found.index(str(TOP / "slurm" / "train.sbatch"))


def test_gpus_follow_from_the_ranks_where_the_device_is_theirs(tmp_path: Path) -> None:
    assert "--gpus-per-node=4" in words(tmp_path, "launch.device=cuda", "launch.ranks=4")
    assert not any("gpu" in word.partition(".sbatch")[0] for word in words(tmp_path, "launch.ranks=4")[:-3])
    both = words(tmp_path, "launch.device=cuda", "launch.ranks=4", "slurm.gres=gpu:h100:4")
    assert not any(word.startswith("--gpus-per-node") for word in both)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("slurm.extra=[--partition=x]", "set slurm.partition"),
        ("slurm.extra=[-p x]", "set slurm.partition"),
        ("slurm.extra=[--nodes=3]", "`mpdist submit` decides"),
        ("slurm.extra=[mail]", "no option of sbatch's"),
        ("slurm.array=a-b", "numbers and ranges"),
        ("slurm.mem=12x", "a number and a unit"),
        ("slurm.mem=1.5G", "do:  did you mean 1.5GiB?"),
        ("slurm.mem=4000", "do:  write 4000M"),
        (
            "slurm.time=1440",
            "minutes (24 hours), and a bare length is seconds here (24 minutes)\n  do:  write 1440m or 1440s",
        ),
        ("slurm.time='90'", "minutes (1.5 hours)"),
        ("slurm.time=1:00:00:00", "a length of time is numbers with units"),
        ("slurm.requeues=-1", "slurm.requeues = -1"),
        ("slurm.partiton=x", "did you mean `slurm.partition`"),
        ("slurm.signal_lead=0.5s", "slurm.signal_lead"),
        ("slurm.time=6m", "slurm.time = 360.0 (command line), slurm.signal_lead = 300.0 (default)"),
    ],
)
def test_what_slurm_could_not_take_is_refused_by_the_configuration(tmp_path: Path, override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=r"the configuration has 1 problem") as caught:
        ask(tmp_path, override)
    assert named in str(caught.value)


def test_gpus_are_asked_for_in_one_way(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both ask for GPUs"):
        ask(tmp_path, "slurm.gpus_per_node=4", "slurm.gres=gpu:4")


@pytest.mark.parametrize(
    ("folder", "array", "pattern"),
    [
        ("/a/100%", False, "/a/100%%/x/slurm/%j.log"),
        ("/a", True, "/a/x-seed%a/slurm/%A_%a.log"),
        ("/back\\slash", False, "/back\\slash/x/slurm/job.log"),
    ],
)
def test_a_folder_that_slurm_would_read_as_a_pattern(folder: str, array: bool, pattern: str) -> None:
    assert submit.log_pattern(Path(folder), "x", array) == pattern


def test_the_indices_of_an_array_are_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.seeds("0-3,8,10-20:5%2") == [0, 1, 2, 3, 8, 10, 15, 20]
    path = tiny.config(tmp_path)
    assert cli.main(["launch", str(path), "--seed", "3", "--dry-run", "--ranks", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert next(line for line in printed if line.startswith("seed ")).split()[:2] == ["seed", "3"]
    assert next(line for line in printed if line.startswith("name ")).split()[:2] == ["name", "run-seed3"]


@pytest.mark.parametrize(
    ("gres", "count"),
    [("gpu:8", 8), ("gpu:a100:4(S:0-1),nvme:1", 4), ("gpu", 1), ("(null)", 0), ("gpu:a100:2,gpu:v100:2", 4), ("", 0)],
)
def test_gpus_of_a_node(gres: str, count: int) -> None:
    assert cluster.gpus(gres) == count


PARTITIONS = [
    {"PartitionName": "small", "Default": "YES", "MaxNodes": "2", "TotalNodes": "8", "MaxTime": "01:00:00", "State": "UP"},
    {"PartitionName": "big", "MaxNodes": "UNLIMITED", "MinNodes": "4", "TotalNodes": "8", "MaxTime": "UNLIMITED", "State": "UP"},
    {"PartitionName": "shut", "MaxNodes": "UNLIMITED", "TotalNodes": "8", "MaxTime": "UNLIMITED", "State": "INACTIVE"},
]  # fmt: skip
NODES = [
    {"NodeName": f"n{i}", "CPUTot": "96", "RealMemory": "1000000", "Gres": "gpu:h100:8", "Partitions": "small,big,shut"}
    for i in range(8)
]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "show", lambda kind, *_: PARTITIONS if kind == "partition" else NODES)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["launch.nodes=3"], ["launch.nodes = 3 (command line)", "partition small gives a job at most 2 nodes"]),
        (["slurm.time=2h"], ["slurm.time = 7200 s (command line)", "allows 01:00:00 at most"]),
        (["slurm.partition=big"], ["partition big wants 4 nodes at least"]),
        (["slurm.partition=shut"], ["its state is INACTIVE"]),
        (["slurm.partition=none"], ["no such partition", "take one of small, big, shut"]),
        (["slurm.cpus_per_node=97"], ["asks for 97 CPUs of each node", "the largest has 96"]),
        (["slurm.gpus_per_node=16"], ["asks for 16 GPUs of each node", "the largest has 8"]),
        (["slurm.time=2h", "launch.nodes=3"], ["2 problems"]),
        (["slurm.partition=small,big", "slurm.time=2h"], ["wants 4 nodes", "allows 01:00:00"]),
    ],
    ids=lambda value: " ".join(value) if "=" in value[0] else "",
)
def test_what_this_cluster_can_never_give_is_refused(tmp_path: Path, overrides: list[str], named: list[str]) -> None:
    resolved = ask(tmp_path, *overrides)
    with pytest.raises(ConfigError) as caught:
        cluster.check(resolved, submit.gpus_of(resolved))
    for text in named:
        assert text in str(caught.value)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    "overrides",
    [["launch.nodes=2", "slurm.time=1h"], ["slurm.partition=small,big", "slurm.time=2h", "launch.nodes=4"]],
    ids=" ".join,
)
def test_what_it_can_give_is_not(tmp_path: Path, overrides: list[str]) -> None:
    cluster.check(ask(tmp_path, *overrides), 8)


@pytest.mark.usefixtures("known")
def test_the_partition_of_sbatchs_own_variable_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "big")
    with pytest.raises(ConfigError, match="partition big wants 4 nodes at least"):
        cluster.check(ask(tmp_path), 0)


def test_what_cannot_be_asked_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cluster.check(ask(tmp_path, "slurm.partition=nowhere", "launch.nodes=900"), 0)


def test_the_sbatch_files_travel_with_the_package() -> None:
    assert {"slurm/train.sbatch", "slurm/sweep.sbatch", "slurm/doctor.sbatch"} <= set(shipped.names())
    assert shipped.describe(shipped.root() / "slurm/train.sbatch") == "One run on the nodes of a Slurm job"


def test_every_script_for_a_shell_can_be_started() -> None:
    found = sorted((TOP / "launch").glob("*.sh"))
    assert len(found) >= 4
    assert [path.name for path in found if not os.access(path, os.X_OK)] == []
