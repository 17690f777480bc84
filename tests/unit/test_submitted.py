"""What `mpdist submit` keeps for its job, what it tells, and which second job it refuses: with a stand-in for sbatch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny

from mpdist import cli, lock, slurm, submit
from mpdist.config import load
from mpdist.errors import MachineError
from mpdist.lines import dump, read_json, write_atomic
from mpdist.record import RunDir

TOP = Path(__file__).resolve().parents[2]
AWKWARD = 'it\'s 100%j "q" $HOME `id` back\\slash & 模型 🚀 # : {x}'


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH in which sbatch takes everything as job 7, and writes down its last argument."""
    fake = tmp_path / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\nfor last; do :; done; printf %s "$last" >{tmp_path}/last; echo 7\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    return fake


def known(monkeypatch: pytest.MonkeyPatch, **jobs: dict[str, str]) -> None:
    """What scontrol says of jobs, each by its number behind a letter."""
    asked = {name[1:]: fields for name, fields in jobs.items()}
    monkeypatch.setattr(slurm, "ask", lambda kind, name: asked.get(name))


def given(folder: Path) -> Path:
    """The configuration that the job was given."""
    return Path((folder / "last").read_text())


@pytest.mark.parametrize("path", sorted((TOP / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_kept_configuration_is_the_submitted_one(tmp_path: Path, path: Path) -> None:
    resolved = load(path, [f"out_dir={tmp_path}/runs"])
    place = submit._place(tmp_path / "runs" / "x" / "slurm")
    assert submit._submit(["sbatch", str(place / "config.yaml")], resolved, place, {"": place.parent.parent}) == "7"
    kept = load(given(tmp_path))
    assert (kept.digest(), kept.number_digest(), kept.identity()) == (
        resolved.digest(),
        resolved.number_digest(),
        resolved.identity(),
    )


def test_the_job_is_given_what_was_submitted_whatever_becomes_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = tiny.config(tmp_path, out_dir="runs")
    child = tmp_path / "child.yaml"
    child.write_text("extends: config.yaml\noptim: {clip: null}\ndata: {train: [{path: train.jsonl}]}\n")
    words = [f"name={AWKWARD}", "slurm.account=null", "slurm.time=2h", "track.wandb.mode=offline"]
    words.append(f"track.wandb.project={AWKWARD}")
    asked = load(str(child), words)
    assert cli.main(["submit", "child.yaml", *words]) == 0
    assert "mpdist submit child.yaml" in capsys.readouterr().out
    child.write_text("name: other\nbatch: {gobal: 3}\n")
    parent.unlink()
    assert given(tmp_path) == tmp_path / "runs" / AWKWARD / "slurm" / "0001" / "config.yaml"
    kept = load(given(tmp_path))
    assert (kept.digest(), kept.number_digest()) == (asked.digest(), asked.number_digest())
    assert kept.config.optim.clip is None
    assert kept.config.name == kept.config.track.wandb.project == AWKWARD
    assert Path(kept.config.data.train[0].path) == Path("train.jsonl")


def test_an_array_is_given_one_configuration_of_which_each_seed_makes_its_run(tmp_path: Path) -> None:
    path = tiny.config(tmp_path)
    assert cli.main(["submit", str(path), "--array", "1,3", "optim.lr=0.5"]) == 0
    path.write_text("name: [")
    kept = given(tmp_path)
    assert kept == tmp_path / "runs/run/slurm/0001/config.yaml"
    assert load(kept, ["seed=3", "name=run-seed3"]).config.optim.lr == 0.5
    for seed in (1, 3):
        folder = tmp_path / "runs" / f"run-seed{seed}" / "slurm"
        assert (read_json(folder / "0001/submission.json") or {})["task"] == str(seed)
        assert (folder / f"7_{seed}.log").read_text() == ""
    assert cli.main(["config", str(kept), "--seed", "3", "--yaml"]) == 0


def test_a_refusal_of_sbatchs_leaves_nothing_behind(tmp_path: Path, site: Path) -> None:
    path = tiny.config(tmp_path)
    site.write_text("#!/bin/sh\nexit 1\n")
    assert cli.main(["submit", str(path)]) == 4
    assert cli.main(["submit", str(path), "--array", "0-2"]) == 4
    site.unlink()
    assert cli.main(["submit", str(path)]) == 4
    assert [*(tmp_path / "runs").glob("*")] == []


@pytest.mark.parametrize("inside", [True, False])
def test_a_job_inherits_nothing_of_the_job_that_submits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Path, inside: bool
) -> None:
    """Slurm does not take an array's index or the count of restarts back: the job would train another run."""
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLURM_CONF"):
        monkeypatch.setenv(name, "3")
    if inside:
        monkeypatch.setenv("SLURM_JOB_ID", "5")
    site.write_text(f"#!/bin/sh\nexport -p >{tmp_path}/env\necho 7\n")
    assert cli.main(["submit", str(tiny.config(tmp_path))]) == 0
    said = (tmp_path / "env").read_text()
    found = [n for n in ("JOB_ID", "ARRAY_TASK_ID", "RESTART_COUNT", "CONF") if f"SLURM_{n}=" in said]
    assert found == (["CONF"] if inside else ["ARRAY_TASK_ID", "RESTART_COUNT", "CONF"])


@pytest.mark.parametrize("array", [[], ["--array", "0-2"]], ids=["one", "array"])
@pytest.mark.parametrize("out_dir", ["config.yaml/runs", "/proc/runs"])
def test_a_folder_that_cannot_be_made_is_named_and_nothing_is_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out_dir: str, array: list[str]
) -> None:
    path = tiny.config(tmp_path)
    assert cli.main(["submit", str(path), f"out_dir={out_dir}", *array]) == 4
    assert "choose another out_dir" in capsys.readouterr().err
    assert not (tmp_path / "last").exists()


@pytest.mark.parametrize("array", [[], ["--array", "0-2"]], ids=["one", "array"])
def test_a_submission_that_a_full_disk_cuts_short_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: list[str]
) -> None:
    real, written = submit.write_atomic, []

    def write(path: Path, text: str) -> None:
        written.append(path)
        if len(written) == 2:
            raise MachineError(f"{path}: cannot be written: No space left on device")
        real(path, text)

    monkeypatch.setattr(submit, "write_atomic", write)
    assert cli.main(["submit", str(tiny.config(tmp_path)), *array]) == 4
    assert [*(tmp_path / "runs").glob("*")] == []
    assert not (tmp_path / "last").exists()


# -- what it tells -----------------------------------------------------------------------------------------------------


def told(said: str, what: str) -> str:
    line = next(line for line in said.splitlines() if line.startswith(f"  {what}:"))
    return line.partition(":")[2].strip()


@pytest.mark.parametrize("name", ["arr", "it's $a %j &", "lr%j"])
def test_the_lines_of_an_array_work_before_it_has_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The stop line as a shell takes it; the log's pattern matches each task's log."""
    path = tiny.config(tmp_path, out_dir="my runs")
    assert cli.main(["submit", str(path), "--array", "0-1", f"name={name}"]) == 0
    said = capsys.readouterr().out
    shell = {"cwd": tmp_path, "env": {**os.environ, "PATH": "/usr/bin:/bin"}, "check": True, "text": True}
    subprocess.run(["sh", "-c", told(said, "stop")], **shell)
    assert [(tmp_path / "my runs" / f"{name}-seed{k}" / "STOP").exists() for k in (0, 1)] == [True, True]
    pattern = told(said, "watch").partition("tail -F ")[2]
    listed = subprocess.run(["sh", "-c", f"ls {pattern}"], capture_output=True, **shell).stdout
    assert listed.splitlines() == [f"my runs/{name}-seed{k}/slurm/7_{k}.log" for k in (0, 1)]


def test_a_name_that_looks_like_a_pattern_of_sbatchs_is_told_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.config(tmp_path, out_dir="runs")
    assert cli.main(["submit", str(path), "name=lr%j"]) == 0
    assert told(capsys.readouterr().out, "watch").endswith("tail -F runs/lr%j/slurm/7.log")


def test_a_finished_run_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.config(tmp_path)
    run = RunDir(tmp_path / "runs" / "run")
    run.freeze(load(path).to_yaml(), {})
    run.status(state="done", step=4, attempt=4, exit=0)
    assert cli.main(["submit", str(path)]) == 0
    said = capsys.readouterr().out
    assert "is finished: nothing to do" in said
    assert f"name=NEW checkpoint.resume={run.path}" in said


# -- a second job ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "COMPLETING", "COMPLETED", "CANCELLED", None])
def test_a_run_whose_job_is_still_there_is_not_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str | None
) -> None:
    path = str(tiny.config(tmp_path))
    assert cli.main(["submit", path]) == 0
    capsys.readouterr()
    known(monkeypatch, **({} if state is None else {"_7": {"JobState": state, "UserId": f"me({os.getuid()})"}}))
    lives = state in ("RUNNING", "PENDING", "COMPLETING")
    assert cli.main(["submit", path, "--dry-run"]) == (2 if lives else 0)
    assert cli.main(["submit", path]) == (2 if lives else 0)
    said = capsys.readouterr().err
    assert (f"is the run of job 7, which is {state}" in said) == lives
    assert ("scancel 7" in said) == lives
    assert cli.main(["submit", path, "--dependency", "afterany:7"]) == 0


def test_another_users_job_of_that_number_is_none_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tiny.config(tmp_path))
    assert cli.main(["submit", path]) == 0
    known(monkeypatch, _7={"JobState": "RUNNING", "UserId": f"other({os.getuid() + 1})"})
    assert cli.main(["submit", path]) == 0


def test_each_run_of_an_array_has_its_own_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tiny.config(tmp_path))
    assert cli.main(["submit", path, "--array", "0-2"]) == 0
    known(monkeypatch, _7={"JobState": "RUNNING"}, _7_0={"JobState": "COMPLETED"}, _7_1={"JobState": "RUNNING"})
    assert cli.main(["submit", path]) == 0  # the run without a seed was never submitted
    assert cli.main(["submit", path, "--array", "0,2"]) == 0
    assert cli.main(["submit", path, "--array", "0-1"]) == 2
    assert "run-seed1 is the run of job 7_1, which is RUNNING" in capsys.readouterr().err


def test_a_job_that_holds_the_directory_counts_however_it_was_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tiny.config(tmp_path))
    write_atomic(tmp_path / "runs/run" / lock.NAME, dump({"host": "n1", "pid": 4, "slurm": ["9", "0"]}))
    known(monkeypatch, _9={"JobState": "RUNNING"})
    assert cli.main(["submit", path]) == 2
    assert "is the run of job 9" in capsys.readouterr().err
    known(monkeypatch, _9={"JobState": "RUNNING", "ArrayJobId": "9", "ArrayTaskId": "2"})
    assert cli.main(["submit", path]) == 2
    assert "(scancel 9_2)" in capsys.readouterr().err, "that of 9 would end the other tasks too"


@pytest.mark.parametrize("here", [True, False])
def test_a_directory_in_use_names_the_job_that_holds_it(tmp_path: Path, here: bool) -> None:
    owner: dict[str, Any] = {"host": os.uname().nodename if here else "n1", "pid": 4, "slurm": ["9", "0"]}
    said = str(lock.refusal(tmp_path, owner))
    assert f"is in use by a live run: pid 4 on {owner['host']}, of Slurm job 9" in said
    assert "scancel 9" in said
    assert "kill -TERM" not in said
    plain = str(lock.refusal(tmp_path, owner | {"slurm": None}))
    assert ("kill -TERM 4" in plain) == here
    assert "job" not in plain


def test_a_stop_that_lies_there_is_named_before_anything_is_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tiny.config(tmp_path, out_dir="my runs"))
    assert cli.main(["submit", path]) == 0
    (tmp_path / "my runs/run/STOP").touch()
    assert cli.main(["submit", path]) == 2
    said = capsys.readouterr().err
    cure = next(line for line in said.splitlines() if "do:" in line).partition("do:")[2].strip()
    subprocess.run(["/bin/sh", "-c", cure], env={"PATH": "/usr/bin:/bin"}, check=True)
    assert cli.main(["submit", path]) == 0
    assert cli.main(["submit", path, "--array", "0-1"]) == 0
    (tmp_path / "my runs/run-seed1/STOP").touch()
    assert cli.main(["submit", path, "--array", "0-1"]) == 2


def test_a_stop_of_a_run_that_has_not_begun_does_not_make_its_folder_foreign(tmp_path: Path) -> None:
    from mpdist.record import standing

    resolved = load(tiny.config(tmp_path))
    (tmp_path / "runs/run").mkdir(parents=True)
    (tmp_path / "runs/run/STOP").touch()
    assert standing(resolved, {})[1] == "new"
    shutil.rmtree(tmp_path / "runs")


@pytest.mark.parametrize("dry", [True, False], ids=["dry", "real"])
def test_a_reader_of_its_lines_that_has_gone_is_no_failure(tmp_path: Path, site: Path, dry: bool) -> None:
    """As in `mpdist submit ... | head -1`; the job has been submitted all the same."""
    path = tiny.config(tmp_path)
    gone, out = os.pipe()
    os.close(gone)
    done = subprocess.run(
        [sys.executable, "-m", "mpdist", "submit", str(path), *["--dry-run"] * dry],
        stdout=out, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}, text=True, check=False,
    )  # fmt: skip
    os.close(out)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "last").exists() == (not dry)


@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    ("words", "status"), [(["launch", "--dry-run"], 141), (["plan", "--ranks", "1"], 0), (["submit", "--help"], None)]
)
def test_no_command_takes_a_closed_pipe_for_a_bug(
    tmp_path: Path, words: list[str], status: int | None, buffered: str
) -> None:
    path = tiny.config(tmp_path)
    gone, out = os.pipe()
    os.close(gone)
    done = subprocess.run(
        [sys.executable, "-m", "mpdist", words[0], str(path), *words[1:]],
        stdout=out, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": buffered}, text=True, check=False,
    )  # fmt: skip
    os.close(out)
    assert done.stderr == ""
    assert done.returncode in ((0, 141) if status is None else (status, 0))
