"""What the launcher decides before it starts anything: ranks, devices, threads, address, port; and the dry run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpdist import inputs, launch, place, record, slurm
from mpdist.config import Resolved, load
from mpdist.errors import ConfigError, DoesNotFit, MachineError

CONFIG = """
name: a
model: {config: {model_type: llama, vocab_size: 259, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4}}
data: {train: [{path: x.txt, format: text}], tokenizer: bytes, seq_len: 64}
batch: {micro: 1, global: 24}
budget: {steps: 10}
"""


def ask(folder: Path, *overrides: str) -> Resolved:
    path = folder / "asked.yaml"
    path.write_text(CONFIG)
    return load(path, [f"out_dir={folder / 'runs'}", *overrides])


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
            monkeypatch.delenv(name)


def dry_run(resolved: Resolved, capsys: pytest.CaptureFixture[str], **options: int) -> str:
    assert launch.run(resolved, dry_run=True, **options) == 0
    return capsys.readouterr().out


def test_what_is_not_there_is_found_before_a_run_directory_is_made(tmp_path: Path) -> None:
    wrong = [
        "data.eval=[{path: held/*.jsonl}, {path: owner/hub, format: messages}]",
        "data.tokenizer=./tok",
        "data.chat_template=chat.jinja",
    ]
    with pytest.raises(ConfigError) as caught:
        launch.run(ask(tmp_path, "launch.device=cpu", *wrong))
    assert len(caught.value.problems) == 4
    line = CONFIG.splitlines().index(next(line for line in CONFIG.splitlines() if line.startswith("data"))) + 1
    text = str(caught.value)
    assert (
        f"data.train.0.path = x.txt ({tmp_path / 'asked.yaml'}:{line})\n  why: there is no such file or folder" in text
    )
    assert "data.eval.0.path = held/*.jsonl (command line)\n  why: no file matches" in text
    assert "data.tokenizer = ./tok (command line)" in text
    assert "data.chat_template = chat.jinja (command line)" in text
    assert "owner/hub" not in text
    assert not (tmp_path / "runs").exists()


def test_a_split_of_plain_files_is_refused_before_a_run_directory_is_made(tmp_path: Path) -> None:
    for name in ("a.jsonl", "folder/b.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [f"{tmp_path}/a.jsonl", f"{tmp_path}/*.jsonl", f"{tmp_path}/folder", "owner/hub"]
    sources = ", ".join(f"{{path: '{path}', split: train}}" for path in found)
    with pytest.raises(ConfigError) as caught:
        launch.run(ask(tmp_path, "launch.device=cpu", f"data.train=[{sources}]"))
    assert caught.value.status == 2
    names = [problem.what.split(" ")[0] for problem in caught.value.problems]
    assert names == ["data.train.0.split", "data.train.1.split"]
    assert "data.train.0.split = train (command line)\n  why: " in str(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ((), "there is no such folder"),
        (("there/x.txt",), "that folder is no run and no checkpoint"),
        (("there/checkpoints/step-final/manifest.json",), "the run there has no checkpoint yet"),  # somebody's copy
        (("there/checkpoints/step-00000007/manifest.json",), None),
        (("there/manifest.json",), None),
        (("runs/a/checkpoints/step-00000007/manifest.json",), None),  # a run's own come first
    ],
)
def test_c68_a_checkpoint_to_start_from_has_to_be_there(tmp_path: Path, made: tuple[str, ...], why: str | None) -> None:
    for name in made:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    resolved = ask(tmp_path, f"data.train.0.path={tmp_path / 'asked.yaml'}", f"checkpoint.resume={tmp_path / 'there'}")
    if why is None:
        inputs.check_inputs(resolved)
        return
    with pytest.raises(ConfigError) as caught:
        launch.run(resolved, ranks=2)
    assert caught.value.status == 2
    assert f"checkpoint.resume = {tmp_path / 'there'} (command line)\n  why: {why}" in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_what_was_written_since_is_found_in_files_patterns_and_folders(tmp_path: Path) -> None:
    names = ("x.txt", "many/a.jsonl", "tokenizer/tokenizer.json", "tokenizer/notes.md")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    sources = f"data.train=[{{path: {tmp_path}/x.txt}}, {{path: {tmp_path}/many/*.jsonl}}, {{path: owner/hub}}]"
    cfg = ask(tmp_path, sources, f"data.tokenizer={tmp_path / 'tokenizer'}").config
    for name in names:
        time.sleep(0.02)  # a file system's clock is coarser than ours
        moment = time.time()
        assert not inputs.changed_since(cfg, moment)
        time.sleep(0.02)
        os.utime(tmp_path / name, (100, 200))  # whatever time of writing it brings along, it was put there now
        assert inputs.changed_since(cfg, moment) is not name.endswith(".md"), name


def test_a_finished_run_says_so_whatever_has_gone_since(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    always = ("launch.device=cpu", "launch.address=localhost", "optim.horizon=10")
    resolved = ask(tmp_path, *always)  # x.txt is not there
    run, _ = record.open_run(resolved, {"ranks": 2, "nodes": 1})
    run.start_session()
    run.status(state="done", step=10, exit=0)
    run.close()
    run.release()
    for options in ({"ranks": 2}, {"ranks": 1, "nodes": 2, "node_rank": 1}):
        assert launch.run(resolved, **options) == 0
        assert f"{run.path} is finished: nothing to do" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"x\.txt"):
        launch.run(ask(tmp_path, *always, "budget.steps=20"), ranks=2)


def test_cpu_ranks_that_the_host_cannot_hold_do_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "host_memory", lambda: 2**20)
    monkeypatch.setattr(place, "visible_devices", lambda env: 0)
    with pytest.raises(DoesNotFit, match=r"the states of 2 CPU ranks need .*, and this host has 1.00 MiB"):
        launch.run(ask(tmp_path, "model.config.hidden_size=64", "model.config.intermediate_size=256"), ranks=2)
    assert "warning: no GPU is visible on this node, so these are CPU ranks" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_the_verdict_may_be_asked_for_a_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DoesNotFit):
        launch.run(ask(tmp_path), dry_run=True, memory_bytes=1000)
    assert "fits       NO" in capsys.readouterr().out
    assert launch.run(ask(tmp_path), dry_run=True, memory_bytes=2**30) == 0


# -- devices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "count"),
    [
        ("6,0", 2),
        ("0", 1),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0,-1,1", 1),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6, GPU-1b2c", 2),
        ("MIG-ae332a0c-d72c-4106-c12f-20bd9faed9f6", 1),
    ],
)
def test_c97_devices_are_counted_as_the_driver_counts(listed: str, count: int) -> None:
    assert place.visible_devices({"CUDA_VISIBLE_DEVICES": listed}) == count


def test_c97_visible_devices_are_kept_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,0")
    printed = dry_run(ask(tmp_path), capsys)
    assert "rank 0: LOCAL_RANK=0 CUDA_VISIBLE_DEVICES=6,0 OMP_NUM_THREADS=" in printed
    assert "rank 1: LOCAL_RANK=1 CUDA_VISIBLE_DEVICES=6,0 OMP_NUM_THREADS=" in printed
    assert "rank 2" not in printed
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,0"


def test_c97_more_ranks_than_devices_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,0")
    with pytest.raises(ConfigError, match=r"--ranks 3\n.*CUDA_VISIBLE_DEVICES=6,0 has 2 CUDA devices"):
        launch.run(ask(tmp_path), ranks=3, dry_run=True)
    with pytest.raises(ConfigError, match=r"launch.ranks = 3 \(command line\)"):
        launch.run(ask(tmp_path, "launch.ranks=3"), dry_run=True)


def test_c97_on_the_cpu_devices_do_not_limit_the_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "rank 2:" in dry_run(ask(tmp_path, "launch.device=cpu"), capsys, ranks=3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    printed = dry_run(ask(tmp_path), capsys)
    assert "1 node x 1 ranks" in printed


def test_a_cuda_run_without_devices_is_the_machines_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MachineError, match=r"launch\.device = cuda"):
        launch.run(ask(tmp_path, "launch.device=cuda"))
    assert not (tmp_path / "runs").exists()


# -- threads --------------------------------------------------------------------------------------------------------


def test_c98_threads_share_the_granted_cores() -> None:
    assert place.threads_for(2, 2, {}) == (1, "2 cores for 2 ranks")
    assert place.threads_for(8, 96, {})[0] == 12
    assert place.threads_for(4, 2, {})[0] == 1
    assert place.threads_for(2, 2, {"OMP_NUM_THREADS": "3"}) == (3, "as it was set")
    assert place.threads_for(1, 4, {"OMP_NUM_THREADS": ""})[0] == 4


def test_c98_granted_is_the_affinity_or_slurms_share() -> None:
    have = os.sched_getaffinity(0)
    assert place.granted_cores({}) == len(have)
    assert place.granted_cores({"SLURM_CPUS_PER_TASK": "1"}) == 1
    assert place.granted_cores({"SLURM_CPUS_PER_TASK": "4096"}) == len(have)
    os.sched_setaffinity(0, {min(have)})
    try:
        assert place.granted_cores({}) == 1
    finally:
        os.sched_setaffinity(0, have)


def test_c98_the_value_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    printed = dry_run(ask(tmp_path), capsys, ranks=2)
    assert printed.count(f"OMP_NUM_THREADS={threads} (") == 2


# -- address and port -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("a,b", "a"),
        ("n[1-2]", "n1"),
        ("gpu[008-010,012],m1", "gpu008"),
        ("n[3,5]-ib,n9", "n3-ib"),
        ("rack[1-2]n[4-8]", "rack1n4"),
        ("single.example.org", "single.example.org"),
    ],
)
def test_the_first_host_of_slurms_list(nodelist: str, first: str) -> None:
    assert place.first_host(nodelist) == first


def test_c91_an_address_that_is_not_the_first_host_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a,b")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: {"a": "10.0.0.1", "b": "10.0.0.2"}[name])
    with pytest.raises(
        ConfigError, match=r"launch.address = b \(command line\)\n.*first node of the job, a \(of a,b\)"
    ):
        launch.run(ask(tmp_path, "launch.address=b", "launch.nodes=2"), dry_run=True)


def test_c91_the_first_host_by_another_name_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: {"n1": "10.0.0.1", "10.0.0.1": "10.0.0.1"}[name])
    for address in ("10.0.0.1", "n1.cluster.example.org", "N1"):
        printed = dry_run(ask(tmp_path, f"launch.address={address}", "launch.nodes=2"), capsys)
        assert f"first host {address}, port 29500" in printed


def test_c91_several_nodes_need_an_address(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"launch\.address is not set"):
        launch.run(ask(tmp_path), nodes=2, dry_run=True)


def test_under_slurm_the_dry_run_shows_hosts_nodes_and_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURM_NODEID", "2")
    printed = dry_run(ask(tmp_path, "launch.port=31000"), capsys, ranks=4, nodes=3)
    assert "world: 3 nodes x 4 ranks; this is node 2; first host n1, port 31000" in printed
    assert "rank 8: LOCAL_RANK=0" in printed
    assert "rank 11: LOCAL_RANK=3" in printed
    assert "--node-rank 2 --master-addr n1 --master-port 31000" in printed


def test_a_dry_run_shows_the_nodes_of_a_step_that_nothing_here_can_find(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NODEID": "1"}
    step |= {"SLURM_STEP_NODELIST": "nowhere[03-04]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm, "_resolves", lambda host: False)
    monkeypatch.setattr(slurm, "ask", lambda *words: None)
    printed = dry_run(ask(tmp_path), capsys, ranks=2)
    assert "world: 2 nodes x 2 ranks; this is node 1; first host nowhere03, port" in printed
    assert "it would be refused: the node name nowhere03 is no host name that this node finds" in printed
    with pytest.raises(MachineError, match="nowhere03"):
        launch.run(ask(tmp_path), ranks=2)


def test_a_node_rank_outside_the_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--node-rank 2\n.*with 2 nodes it has to be 0 to 1"):
        launch.run(ask(tmp_path, "launch.address=n1"), nodes=2, node_rank=2, dry_run=True)


def test_c88_a_busy_port_is_one_line_with_its_number(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MachineError) as caught:
            launch.run(ask(tmp_path, f"launch.port={port}", "launch.device=cpu"), ranks=2)
    assert str(port) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.status == 4
    assert not (tmp_path / "runs").exists(), "the run directory was made for a run that could not start"


@pytest.mark.parametrize("port", ["66660", "0", "-1"])
def test_c88_a_port_out_of_range_is_a_usage_error(tmp_path: Path, port: str) -> None:
    with pytest.raises(ConfigError, match=rf"launch.port = {port}"):
        ask(tmp_path, f"launch.port={port}")


# -- the dry run ----------------------------------------------------------------------------------------------------


def test_a_dry_run_shows_all_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resolved = ask(tmp_path, "optim.lr=1e-3")
    printed = dry_run(resolved, capsys, ranks=2)
    lr = next(line for line in printed.splitlines() if line.startswith("optim.lr"))
    assert lr.split() == ["optim.lr", "0.001", "command", "line"]
    assert "2 ranks x micro 1 x accumulation 12 = 24 sequences a step" in printed
    command = printed.splitlines()[-1]
    assert "-m torch.distributed.run --nproc-per-node 2 --nnodes 1 --max-restarts 0" in command
    assert command.endswith(f"-m mpdist {tmp_path}/runs/a/config.yaml")
    assert not (tmp_path / "runs").exists()


def test_torch_is_not_imported_by_a_dry_run(tmp_path: Path) -> None:
    ask(tmp_path)
    code = "import sys; from mpdist import cli; s = cli.main(sys.argv[1:]); print(s, 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, "launch", str(tmp_path / "asked.yaml"), "--dry-run", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"
