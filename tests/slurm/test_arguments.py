"""Arguments and refusals: what arrives from a command line through sbatch and srun, and what never gets so far."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import submitted
from cluster import Cluster
from host_lists import FORMS
from slurm_scenes import AWKWARD

from mpdist import slurm
from mpdist.config import load
from mpdist.lines import read_json

Figure = Callable[[str], None]


def test_a_dry_run_prints_the_list_and_the_script_and_submits_nothing(cluster: Cluster, tmp_path: Path) -> None:
    path = submitted.config(tmp_path)
    options = ["--nodes", "2", "--time", "2h", "--partition", "debug", "track.wandb.mode=disabled", "slurm.time=30m"]
    printed = cluster.call("mpdist", "submit", str(path), *options, "--dry-run", cwd=tmp_path, status=2)
    assert printed == ""  # 2h is over the limit, and --time comes after the override
    printed = cluster.call("mpdist", "submit", str(path), *options[:2], "--time", "30m", "--dry-run", cwd=tmp_path)
    assert (
        f"--output={tmp_path}/runs/run/slurm/%j.log {submitted.SCRIPT} {tmp_path}/runs/run/slurm/0001/config.yaml\n"
        in printed
    )
    assert "--nodes=2" in printed.split()
    assert "--time=00:30:00" in printed.split()
    assert submitted.SCRIPT.read_text() in printed
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--partition nope", ["slurm.partition = nope (command line)"]),
        ("--nodes 4", ["partition debug gives a job at most 2 nodes"]),
        (
            "--time 2h --gpus 8 --cpus 64 --mem 1TiB",
            [
                "partition debug allows 01:00:00 at most",
                "slurm.gpus_per_node (command line) asks for 8 GPUs of each node",
                "0 nodes of partition debug have as much; the largest has 8",
                "slurm.mem (command line) asks for 1048576 MiB of each node",
            ],
        ),
        (
            "track.wandb.project=hf_abcdefghijklmnopqrstuvwx track.wandb.mode=offline",
            ["its value looks like a secret"],
        ),
        ("slurm.extra=[--nodes=3]", ["--nodes=3 is what `mpdist submit` decides"]),
    ],
)
def test_what_can_never_start_is_refused(cluster: Cluster, tmp_path: Path, options: str, named: list[str]) -> None:
    path = submitted.config(tmp_path, batch__global=64)
    done = subprocess.run(
        ["mpdist", "submit", str(path), *options.split()],
        cwd=tmp_path, env=cluster.env(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    for text in named:
        assert text in done.stderr
    assert "hf_abc" not in done.stderr
    assert not (tmp_path / "runs").exists()


# `mpdist`, taking the folder of another Python than its own for the one whose `mpdist` the job is to find.
SUBMIT = "import sys; from mpdist import cli, submit; submit.sys.executable = sys.argv.pop(1); sys.exit(cli.main(sys.argv[1:]))"


def fake_mpdist(folder: Path) -> str:
    """A folder for PATH in which `mpdist` writes down what it is given."""
    (folder / "bin").mkdir()
    fake = folder / "bin" / "mpdist"
    fake.write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\n"
        f"name = '{folder}/' + sys.argv[1] + os.environ.get('SLURM_ARRAY_TASK_ID', '') + os.environ.get('SLURM_PROCID', '')\n"
        "json.dump(sys.argv[2:], open(name, 'w'))\n"
    )
    fake.chmod(0o755)
    return str(folder / "bin")


def arrived(figure: Figure, whose: str, found: list[str], given: list[str]) -> None:
    assert found == given
    figure(f"{whose}: {sum(a == b for a, b in zip(found, given, strict=True))} of {len(given)} arguments equal")


def test_awkward_arguments_arrive_unchanged(cluster: Cluster, tmp_path: Path, figure: Figure) -> None:
    env = cluster.env()
    path = f"{fake_mpdist(tmp_path)}:{env['PATH']}"
    job = cluster.sbatch("--nodes=2", str(submitted.SCRIPT), *AWKWARD, cwd=tmp_path, PATH=path)
    cluster.wait(job, "COMPLETED")
    for rank in (0, 1):
        arrived(figure, f"sbatch, launcher {rank}", json.loads((tmp_path / f"launch{rank}").read_text()), AWKWARD)
    assert json.loads((tmp_path / "requeue0").read_text()) == ["--step-status", "0", *AWKWARD]


def test_awkward_arguments_of_submit_arrive_unchanged(cluster: Cluster, tmp_path: Path, figure: Figure) -> None:
    """From the command line through sbatch and srun into the configuration of the launcher, each as it was given."""
    folder = tmp_path / "it's 模型 $HOME %j"
    folder.mkdir()
    path = submitted.config(folder, launch__ranks=1, batch__global=8)
    given = [*filter(None, AWKWARD), "a 'b' $c %d 模"]
    said = [f"data.train.{i}.path={folder}/train.jsonl" for i in range(len(given) - 1)]
    said += [f"data.train.{i}.fields.text={word}" for i, word in enumerate(given[:-1])] + [f"name={given[-1]}"]
    site = f"{fake_mpdist(tmp_path)}:{cluster.env()['PATH']}"
    command = ("python", "-c", SUBMIT, str(tmp_path / "bin" / "python"), "submit", str(path), *said, "--nodes", "1")
    done = cluster.call(*command, cwd=tmp_path, PATH=site)
    job = done.split()[2].rstrip(":")
    cluster.wait(job, "COMPLETED")
    (kept,) = json.loads((tmp_path / "launch0").read_text())
    cfg = load(kept).config
    arrived(figure, "mpdist submit, launcher", [*(source.fields["text"] for source in cfg.data.train), cfg.name], given)
    log = folder / "runs" / "a 'b' $c %d 模" / "slurm" / f"{job}.log"
    assert log.exists(), list(folder.rglob("*.log"))


def test_an_array_gives_each_task_a_seed_and_a_log_in_its_run(cluster: Cluster, tmp_path: Path) -> None:
    path = submitted.config(tmp_path, launch__ranks=1, batch__global=8)
    site = f"{fake_mpdist(tmp_path)}:{cluster.env()['PATH']}"
    command = ("python", "-c", SUBMIT, str(tmp_path / "bin" / "python"), "submit", str(path), "--array", "1,3")
    job = cluster.call(*command, cwd=tmp_path, PATH=site).split()[2].rstrip(":")
    while any(line.startswith(job) for line in cluster.queue()):
        time.sleep(0.1)
    for seed in (1, 3):
        assert json.loads((tmp_path / f"launch{seed}0").read_text()) == [
            str(tmp_path / "runs/run/slurm/0001/config.yaml"),
            "--seed",
            str(seed),
        ]
        assert (tmp_path / "runs" / f"run-seed{seed}" / "slurm" / f"{job}_{seed}.log").exists()
        assert (read_json(tmp_path / "runs" / f"run-seed{seed}" / "slurm/0001/submission.json") or {})["job"] == job


def test_host_lists_are_read_as_scontrol_does(cluster: Cluster, figure: Figure) -> None:
    draw = random.Random(7)

    def number() -> str:
        wide, low = draw.choice((1, 1, 2, 3)), draw.randint(0, 12)
        if draw.random() < 0.5:
            return f"{low:0{wide}d}"
        return f"{low:0{wide}d}-{low + draw.randint(0, 9):0{draw.choice((1, wide))}d}"

    def item() -> str:
        text = draw.choice(("n", "node-", "a1b", "x", "gpu_", "10.0.0."))
        for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3, 4))):
            text += f"[{','.join(number() for _ in range(draw.randint(1, 3)))}]" + draw.choice(
                ("", "", "x", "-ib", "r2")
            )
        # Most end with their last bracket: this scontrol reads no others.
        return text[: text.rfind("]") + 1] or text if draw.random() < 0.9 else text

    drawn = [draw.choice((",", ", ", ",,")).join(item() for _ in range(draw.randint(1, 3))) for _ in range(120)]
    for whose, texts, least in (("forms", [text for text, _ in FORMS if text], 8), ("drawn by chance", drawn, 80)):
        read = {text: hostnames(cluster, text) for text in texts}
        compared = {text: names for text, names in read.items() if names is not None}
        equal = [text for text, names in compared.items() if slurm.hosts(text) == names]
        assert equal == list(compared)
        assert len(equal) >= least
        figure(
            f"host lists, {whose}: {len(read)}; {len(compared)} that this scontrol reads, of which {len(equal)} are read "
            f"alike ({sum(map(len, compared.values()))} names)"
        )


def hostnames(cluster: Cluster, text: str) -> list[str] | None:
    """As scontrol reads a list. This one takes no text after the last bracket, which later versions write: None."""
    said = subprocess.run(
        ["scontrol", "show", "hostnames", text], env=cluster.env(), capture_output=True, text=True, check=False
    )
    return None if "Invalid" in said.stderr else said.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("options", "env", "command", "named"),
    [
        (["--ntasks-per-node=2"], {}, ["mpdist", "launch"], "srun --ntasks-per-node=1"),
        (["--ntasks-per-node=1"], {}, ["mpdist", "launch", "--nodes", "3"], "SLURM_STEP_NUM_NODES = 2"),
        (
            ["--ntasks-per-node=1"],
            {"RANK": "0", "WORLD_SIZE": "1"},
            ["python", "-m", "mpdist"],
            "SLURM_STEP_NUM_TASKS = 2",
        ),
    ],
    ids=["two launchers a node", "other nodes", "another launcher's rank"],
)
def test_a_contradiction_is_refused_with_both_values(
    cluster: Cluster, tmp_path: Path, options: list[str], env: dict[str, str], command: list[str], named: str
) -> None:
    path = submitted.config(tmp_path)
    done = subprocess.run(
        ["srun", "--nodes=2", *options, *command, str(path)],
        cwd=tmp_path, env=cluster.env(**env), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode in (2, 4), done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_each_script_names_what_it_lacks(cluster: Cluster, tmp_path: Path) -> None:
    """Without mpdist in PATH, without a configuration, on too many nodes: one line, and a status of its own."""
    path, sweep = "/usr/bin:/bin:/usr/sbin", submitted.SCRIPT.with_name("sweep.sbatch")
    cases = [
        ([str(script), *arguments], code, named)
        for script in (submitted.SCRIPT, submitted.SCRIPT.with_name("doctor.sbatch"), sweep)
        for arguments, code, named in ((["x.yaml"], "4:0", "mpdist is not in PATH"), ([], "2:0", "usage: sbatch"))
    ]
    jobs = [cluster.sbatch(*words, cwd=tmp_path, PATH=path) for words, _, _ in cases]
    cases.append(([], "2:0", "a sweep runs on one node, and this job has 2"))
    jobs.append(cluster.sbatch("--nodes=2", str(sweep), "x.yaml", cwd=tmp_path))
    for job, (_, code, named) in zip(jobs, cases, strict=True):
        cluster.wait(job, "FAILED")
        assert cluster.job(job)["ExitCode"] == code
        assert named in cluster.output(job)


def test_the_sweeps_script_hands_on_what_it_is_given_and_a_seed(cluster: Cluster, tmp_path: Path) -> None:
    path = f"{fake_mpdist(tmp_path)}:{cluster.env()['PATH']}"
    words = [*AWKWARD, "--vary", "a.b=1,2"]
    job = cluster.sbatch("--array=3", str(submitted.SCRIPT.with_name("sweep.sbatch")), *words, cwd=tmp_path, PATH=path)
    cluster.wait(job, "COMPLETED")
    assert json.loads((tmp_path / "sweep30").read_text()) == [*words, "--seed", "3"]
    assert json.loads((tmp_path / "requeue30").read_text()) == ["--sweep", "--step-status", "0", *words, "--seed", "3"]


def test_a_task_of_an_array_is_a_sweep_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    path = submitted.config(tmp_path)
    words = ("mpdist", "sweep", str(path), "--vary", "precision.compute=fp32,bf16", "--seed", "3", "--dry-run")
    said = cluster.call(*words, cwd=tmp_path)
    assert str(tmp_path / "runs" / "run-seed3") in said
    assert ("fp32-seed3" in said, "bf16-seed3" in said, "seed0" in said) == (True, True, False)


def test_a_refused_configuration_ends_the_job_with_its_status(cluster: Cluster, tmp_path: Path) -> None:
    path = submitted.config(tmp_path)
    job = cluster.sbatch(*submitted.NODES, str(submitted.SCRIPT), str(path), "optim.lr=fast", cwd=tmp_path)
    cluster.wait(job, "FAILED")
    assert cluster.job(job)["ExitCode"] == "2:0"
    assert "optim.lr = fast" in cluster.output(job)
    assert "srun" not in cluster.output(job)
    assert "Traceback" not in cluster.output(job)
    assert not submitted.run_of(tmp_path).exists()
