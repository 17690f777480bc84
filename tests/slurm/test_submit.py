"""`mpdist submit` and plain sbatch on a real Slurm: a first job, what is kept of it, and what is refused at once."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import submitted
import tiny
from cluster import Cluster

from mpdist import slurm
from mpdist.lines import read_json

AWKWARD = [
    "a b",
    "it's",
    'say "hi"',
    "$HOME `id` $(id)",
    "two\nlines\n",
    "täglich 模型 🚀",
    "*.py ~ ! # & ; | < >",
    "back\\slash\\n and % %j =",
    "",
]


@pytest.mark.slow
def test_a_submitted_run_trains_on_two_nodes_and_ends(cluster: Cluster, undisturbed: Path) -> None:
    run, job = submitted.run_of(undisturbed), (undisturbed / "job").read_text()
    assert cluster.queue() == []
    assert cluster.processes(job) == []
    found = submitted.result(undisturbed)
    assert found.state()["state"] == "done"
    assert found.column("step") == list(range(1, submitted.STEPS + 1))
    env = read_json(run / "sessions" / "0001" / "env.json") or {}
    assert (env["ranks"], env["nodes"]) == (4, 2)
    assert (env["slurm"]["job"], env["slurm"]["restart"], env["slurm"]["partition"]) == (job, 0, "debug")
    assert slurm.hosts(env["slurm"]["nodes"]) == cluster.nodes
    hosts = {(read_json(path) or {})["host"] for path in (run / "sessions/0001/ranks").glob("0000?.json")}
    assert hosts == {f"{node}-host" for node in cluster.nodes}


@pytest.mark.slow
def test_what_was_submitted_is_kept_and_says_how_to_watch_stop_and_resume(cluster: Cluster, undisturbed: Path) -> None:
    run, job, said = (
        submitted.run_of(undisturbed),
        (undisturbed / "job").read_text(),
        (undisturbed / "said").read_text(),
    )
    kept = read_json(run / "slurm" / "0001" / "submission.json") or {}
    assert kept["job"] == job
    assert kept["arguments"][0] == "sbatch"
    assert {"--nodes=2", "--cpus-per-task=2", "--time=00:30:00", "--requeue", "--signal=USR1@300"} <= set(
        kept["arguments"]
    )
    assert "OMP_NUM_THREADS" in kept["variables"]
    assert "=" not in "".join(kept["variables"])
    assert (run / "slurm" / "0001" / "train.sbatch").read_text() == submitted.SCRIPT.read_text()
    assert f"done at step {submitted.STEPS}" in (run / "slurm" / f"{job}.log").read_text()
    assert f"step {submitted.STEPS}/{submitted.STEPS}" in cluster.output(job)
    for told in (
        f"submitted job {job}: 2 nodes x 2 ranks",
        f"squeue --job={job}",
        "runs/run/STOP",
        f"scancel {job}",
        "mpdist submit",
    ):
        assert told in said
    again = cluster.call("mpdist", "submit", str(undisturbed / "config.yaml"), "--nodes", "2", cwd=undisturbed)
    assert "is finished: nothing to do" in again
    assert cluster.queue() == []


def test_a_dry_run_prints_the_list_and_the_script_and_submits_nothing(cluster: Cluster, tmp_path: Path) -> None:
    path = submitted.config(tmp_path)
    options = ["--nodes", "2", "--time", "2h", "--partition", "debug", "track.wandb.mode=disabled", "slurm.time=30m"]
    printed = cluster.call("mpdist", "submit", str(path), *options, "--dry-run", cwd=tmp_path, status=2)
    assert printed == ""  # 2h is over the limit, and --time comes after the override
    printed = cluster.call("mpdist", "submit", str(path), *options[:2], "--time", "30m", "--dry-run", cwd=tmp_path)
    assert (
        f"--output={tmp_path}/runs/run/slurm/%j.log {submitted.SCRIPT} {path} launch.nodes=2 slurm.time=30m\n"
        in printed
    )
    assert submitted.SCRIPT.read_text() in printed
    assert not (tmp_path / "runs").exists()
    assert cluster.queue() == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--partition", "nope"], "slurm.partition = nope (command line)"),
        (["--nodes", "4"], "partition debug gives a job at most 2 nodes"),
        (["--time", "2h"], "partition debug allows 01:00:00 at most"),
        (["--gpus", "8"], "slurm.gpus_per_node (command line) asks for 8 GPUs of each node"),
        (["--cpus", "64"], "0 nodes of partition debug have as much; the largest has 4"),
        (["--mem", "1TiB"], "slurm.mem (command line) asks for 1048576 MiB of each node"),
        (
            ["track.wandb.project=hf_abcdefghijklmnopqrstuvwx", "track.wandb.mode=offline"],
            "its value looks like a secret",
        ),
        (["slurm.extra=[--nodes=3]"], "--nodes=3 is what `mpdist submit` decides"),
    ],
    ids=lambda value: str(value)[:24] if isinstance(value, list) else "",
)
def test_what_can_never_start_is_refused(cluster: Cluster, tmp_path: Path, options: list[str], named: str) -> None:
    path = submitted.config(tmp_path, batch__global=64)
    done = subprocess.run(
        ["mpdist", "submit", str(path), *options],
        cwd=tmp_path, env=cluster.env(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert named in done.stderr
    assert "hf_abc" not in done.stderr
    assert not (tmp_path / "runs").exists()
    assert cluster.queue() == []


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


def test_awkward_arguments_arrive_unchanged(cluster: Cluster, tmp_path: Path) -> None:
    env = cluster.env()
    path = f"{fake_mpdist(tmp_path)}:{env['PATH']}"
    job = cluster.sbatch("--nodes=2", str(submitted.SCRIPT), *AWKWARD, cwd=tmp_path, PATH=path)
    cluster.wait(job, "COMPLETED")
    for name in ("launch0", "launch1"):
        assert json.loads((tmp_path / name).read_text()) == AWKWARD
    assert json.loads((tmp_path / "requeue0").read_text()) == ["--step-status", "0", *AWKWARD]


def test_awkward_arguments_of_submit_arrive_unchanged(cluster: Cluster, tmp_path: Path) -> None:
    """From the command line through sbatch and srun into the arguments of the launcher, each as it was given."""
    folder = tmp_path / "it's 模型 $HOME %j"
    folder.mkdir()
    path = submitted.config(folder, track__wandb={"mode": "offline"}, launch__ranks=1, batch__global=8)
    said = [f"track.wandb.project={word}" for word in AWKWARD if word] + ["name=a 'b' $c %d 模"]
    site = f"{fake_mpdist(tmp_path)}:{cluster.env()['PATH']}"
    command = ("python", "-c", SUBMIT, str(tmp_path / "bin" / "python"), "submit", str(path), *said, "--nodes", "1")
    done = cluster.call(*command, cwd=tmp_path, PATH=site)
    job = done.split()[2].rstrip(":")
    cluster.wait(job, "COMPLETED")
    assert json.loads((tmp_path / "launch0").read_text()) == [str(path), *said, "launch.nodes=1"]
    log = folder / "runs" / "a 'b' $c %d 模" / "slurm" / f"{job}.log"
    assert log.exists(), list(folder.rglob("*.log"))


def test_an_array_gives_each_task_a_seed_and_a_log_in_its_run(cluster: Cluster, tmp_path: Path) -> None:
    path = submitted.config(tmp_path, launch__ranks=1, batch__global=8)
    site = f"{fake_mpdist(tmp_path)}:{cluster.env()['PATH']}"
    command = ("python", "-c", SUBMIT, str(tmp_path / "bin" / "python"), "submit", str(path), "--array", "1,3")
    job = cluster.call(*command, cwd=tmp_path, PATH=site).split()[2].rstrip(":")
    while any(line.startswith(job) for line in cluster.queue()):
        pass
    for seed in (1, 3):
        assert json.loads((tmp_path / f"launch{seed}0").read_text()) == [
            str(path),
            "slurm.array=1,3",
            "--seed",
            str(seed),
        ]
        assert (tmp_path / "runs" / f"run-seed{seed}" / "slurm" / f"{job}_{seed}.log").exists()
        assert (read_json(tmp_path / "runs" / f"run-seed{seed}" / "slurm/0001/submission.json") or {})["job"] == job


def test_host_lists_are_read_as_scontrol_does(cluster: Cluster) -> None:
    import random

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
        return text

    compared = 0
    for _ in range(300):
        text = draw.choice((",", ", ", ",,")).join(item() for _ in range(draw.randint(1, 3)))
        said = subprocess.run(
            ["scontrol", "show", "hostnames", text], env=cluster.env(), capture_output=True, text=True, check=False
        )
        if "Invalid" not in said.stderr:  # it takes no text after the last bracket, which later versions write
            compared += 1
            assert slurm.hosts(text) == said.stdout.split("\n")[:-1], text
    assert compared > 70


@pytest.mark.slow
def test_srun_starts_each_rank_directly_and_the_run_is_the_same(
    cluster: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    path = submitted.config(tmp_path)
    step = ("srun", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1", "python", "-m", "mpdist", str(path))
    cluster.call(*step, cwd=tmp_path, timeout=240)
    assert submitted.differences(tmp_path, undisturbed) == []
    assert not (submitted.run_of(tmp_path) / "slurm").exists()


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


@pytest.mark.slow
def test_two_jobs_on_the_same_nodes_one_of_them_with_its_port_taken(cluster: Cluster, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    jobs = []
    for folder in folders:
        path = submitted.config(folder, launch__ranks=1, batch__global=8, budget__steps=5)
        jobs.append(
            cluster.sbatch("--hold", "--nodes=2", "--cpus-per-task=2", str(submitted.SCRIPT), str(path), cwd=folder)
        )
    task = slurm.task(
        {"SLURM_JOB_ID": jobs[1], "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": cluster.nodes[0]}
    )
    assert task is not None
    wanted = next(slurm.ports(task))
    listen = "import socket, sys; s = socket.create_server(('', int(sys.argv[1]))); print('taken', flush=True); sys.stdin.read()"
    space = f"/run/netns/{cluster.bridge}-{cluster.nodes[0]}"
    with subprocess.Popen(
        ["nsenter", f"--net={space}", "python3", "-c", listen, str(wanted)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as taker:  # fmt: skip
        assert taker.stdout is not None
        assert taker.stdin is not None
        assert taker.stdout.readline() == "taken\n"
        cluster.call("scontrol", "release", *jobs)
        for job in jobs:
            cluster.wait(job, "COMPLETED", timeout=240)
        taker.stdin.close()
    assert [submitted.result(folder).column("step") for folder in folders] == [[1, 2, 3, 4, 5]] * 2
    assert f"--master-port {wanted + 1} " in (
        submitted.run_of(folders[1]) / "sessions/0001/env.json"
    ).read_text().replace('",\n  "', " ")


@pytest.mark.slow
def test_interactive_inside_an_allocation(cluster: Cluster, tmp_path: Path) -> None:
    path = submitted.config(tmp_path, batch__global=8, budget__steps=3)
    script = submitted.TOP / "launch" / "interactive.sh"
    cluster.call(
        "salloc", "--nodes=2", "--cpus-per-task=2", "sh", str(script), str(path), cwd=tmp_path, timeout=240, RANKS="2",
        PORT="23457",
    )  # fmt: skip
    assert submitted.result(tmp_path).column("step") == [1, 2, 3]
    assert submitted.result(tmp_path).state()["state"] == "done"


def test_the_scripts_own_environment_names_what_it_lacks(cluster: Cluster, tmp_path: Path) -> None:
    """Without mpdist in PATH, and without a configuration: one line, and a status of its own."""
    path = os.pathsep.join(p for p in ("/usr/bin", "/bin", "/usr/sbin") if p)
    for arguments, code, named in ((["x.yaml"], "4:0", "mpdist is not in PATH"), ([], "2:0", "usage: sbatch")):
        job = cluster.sbatch(str(submitted.SCRIPT), *arguments, cwd=tmp_path, PATH=path)
        cluster.wait(job, "FAILED")
        assert cluster.job(job)["ExitCode"] == code
        assert named in cluster.output(job)


def test_a_refused_configuration_ends_the_job_with_its_status(cluster: Cluster, tmp_path: Path) -> None:
    path = submitted.config(tmp_path)
    job = cluster.sbatch(*submitted.NODES, str(submitted.SCRIPT), str(path), "optim.lr=fast", cwd=tmp_path)
    cluster.wait(job, "FAILED")
    assert "optim.lr = fast" in cluster.output(job)
    assert "Traceback" not in cluster.output(job)
    assert tiny.Result(submitted.run_of(tmp_path), [(0, "")]).folder.exists() is False


@pytest.mark.slow
def test_the_doctor_looks_at_the_jobs_nodes(cluster: Cluster, tmp_path: Path) -> None:
    path = submitted.config(tmp_path, launch__ranks=1, batch__global=8)
    script = submitted.SCRIPT.with_name("doctor.sbatch")
    job = cluster.sbatch("--nodes=2", str(script), str(path), cwd=tmp_path)
    assert cluster.wait(job, timeout=180) == "COMPLETED", cluster.output(job)
    printed = (tmp_path / f"doctor-{job}.log").read_text()
    assert "0 failed" in printed
    assert "bandwidth between nodes" in printed
    assert not submitted.run_of(tmp_path).exists()


@pytest.mark.slow
def test_the_first_job_of_the_readme(cluster: Cluster, tmp_path: Path) -> None:
    """As it stands there, but for its length, from a folder that has only the package's configurations."""
    lines = (submitted.TOP / "README.md").read_text().partition("## Slurm")[2].splitlines()
    line = next(line for line in lines if line.startswith("mpdist submit") and "--dry-run" not in line)
    words = [str(submitted.TOP / word) if word.startswith("configs/") else word for word in shlex.split(line)]
    said = cluster.call(*words, "budget.steps=10", "optim.warmup=0", cwd=tmp_path)
    cluster.wait(said.split()[2].rstrip(":"), "COMPLETED", timeout=240)
    found = tiny.Result(tmp_path / "runs" / "demo-pretrain", [(0, "")])
    assert (found.state()["state"], found.state()["step"]) == ("done", 10)
    assert found.rows("eval")[-1]["eval/loss"] < 5.56  # a uniform guess
