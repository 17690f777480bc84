"""The command line: what each command prints, refuses and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mpdist.__main__
from mpdist import cli, shipped
from mpdist.config import load
from mpdist.errors import MachineError, UsageError

GOOD = """\
name: good
model: {config: {model_type: llama}}
data: {train: [{path: a.txt}], tokenizer: bytes}
batch: {global: 8}
budget: {steps: 10}
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def test_without_a_command_it_says_what_there_is_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_help_names_every_command_with_an_example_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    top = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"  {name} " in top
        with pytest.raises(SystemExit) as end:
            cli.main([name, "--help"])
        assert end.value.code == 0
        text = capsys.readouterr().out
        assert f"mpdist {name}" in text.split("example", 1)[1]
        assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lanch", "x.yaml"], "did you mean `mpdist launch`?"),
        (["run.yaml"], "did you mean `mpdist launch run.yaml`?"),
        (["zzz"], "lists the commands"),
        (["launch"], "CONFIG"),
        (["plan", "x.yaml", "--ranks", "0"], "whole number above 0"),
        (["plan", "x.yaml", "--memory", "much"], "80GiB"),
        (["config"], "which configuration?"),
        (["config", "x.yaml", "--schema"], "give no CONFIG"),
        (["config", "x.yaml"], "No such file"),
        (["config", "x.yaml", "--rank", "2"], "--rank"),
        (["export", "x"], "FOLDER"),
        (["configs", "show"], "show NAME"),
        (["configs", "show", "nothing-like-it"], "does not come with mpdist"),
    ],
)
def test_refusals_are_status_2_and_say_what_to_do(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert "do:" in captured.err
    assert "Traceback" not in captured.err


def test_config_prints_values_with_origins(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", str(good), "optim.lr=1e-3"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["optim.lr"].endswith("command line")
    assert lines["batch.global"].endswith(f"{good}:4")
    assert lines["seed"].endswith("default")


def test_config_yaml_loads_again(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", str(good), "--yaml", "seed=3"]) == 0
    again = good.parent / "again.yaml"
    again.write_text(capsys.readouterr().out)
    assert load(again).values() == load(good, ["seed=3"]).values()


def test_config_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["extends"]


def test_options_may_stand_among_the_overrides(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpdist import launch

    seen: dict[str, object] = {}

    def run(resolved: object, **options: object) -> int:
        seen.update(options, lr=resolved.config.optim.lr, micro=resolved.config.batch.micro)  # type: ignore[attr-defined]
        return 75

    monkeypatch.setattr(launch, "run", run)
    arguments = ["launch", str(good), "optim.lr=1e-3", "--ranks", "2", "batch.micro=4", "--dry-run"]
    assert cli.main(arguments) == 75
    assert seen == {
        "ranks": 2,
        "nodes": None,
        "node_rank": None,
        "dry_run": True,
        "memory_bytes": None,
        "heard": None,
        "lr": 1e-3,
        "micro": 4,
    }


def test_expected_errors_have_their_status_and_bugs_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: BaseException) -> int:
        raise error

    assert cli.reported(lambda: fail(MachineError("the disk is full", "no space left on /x", "free some"))) == 4
    assert capsys.readouterr().err == "the disk is full\n  why: no space left on /x\n  do:  free some\n"
    assert cli.reported(lambda: fail(KeyboardInterrupt())) == 130
    with pytest.raises(ZeroDivisionError):
        cli.reported(lambda: 1 // 0)


def run_module(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE") and not k.startswith("SLURM_")}
    return subprocess.run(
        [sys.executable, "-m", "mpdist", *arguments],
        env={**clean, **env},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_worker_without_a_launcher_is_told_how_to_start(good: Path) -> None:
    done = run_module(str(good))
    assert done.returncode == 2
    assert f"mpdist launch {good}" in done.stderr


def test_the_module_is_the_command_too() -> None:
    assert run_module("--version").stdout == f"mpdist {mpdist.__version__}\n"
    assert "did you mean `mpdist launch`?" in run_module("lanch").stderr


def test_a_refused_config_is_explained_by_rank_0_and_named_by_the_others(good: Path) -> None:
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    first = run_module(str(good), "sed=1", RANK="0", LOCAL_RANK="0", **world)
    other = run_module(str(good), "sed=1", RANK="1", LOCAL_RANK="1", **world)
    assert (first.returncode, other.returncode) == (2, 2)
    assert "did you mean `seed`?" in first.stderr
    assert other.stderr == "rank 1: the configuration is refused, rank 0 says why\n"


def test_a_worker_gets_its_config_and_its_world(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    seen: list[object] = []

    def main(resolved: object, world: object) -> int:
        seen.extend((resolved.config.seed, world.rank, world.ranks))  # type: ignore[attr-defined]
        return 5

    stand_in = types.ModuleType("mpdist.worker")
    stand_in.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpdist.worker", stand_in)
    monkeypatch.setattr(mpdist, "worker", stand_in, raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GROUP_RANK", raising=False)
    assert mpdist.__main__.main([str(good), "seed=3"]) == 5
    assert seen == [3, 1, 2]


def test_a_reader_that_leaves_is_not_an_error(good: Path) -> None:
    command = f"{sys.executable} -m mpdist config {good} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_configs_lists_shows_and_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["configs"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == shipped.names()
    name = next(n for n in listed if "/base/" not in n and "extends:" in (shipped.root() / n).read_text())
    assert cli.main(["configs", "show", name]) == 0
    assert capsys.readouterr().out == (shipped.root() / name).read_text()
    assert cli.main(["configs", "copy", Path(name).stem, str(tmp_path)]) == 0
    copied = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert len(copied) > 1
    assert load(copied[0]).values() == load(shipped.root() / name).values()
    copied[0].write_text("mine")
    assert cli.main(["configs", "copy", name, str(tmp_path)]) == 2
    assert copied[0].read_text() == "mine"


def test_an_unknown_shipped_name_has_the_nearest() -> None:
    name = Path(shipped.names()[0]).stem
    with pytest.raises(UsageError) as caught:
        shipped.find(name[:-1])
    assert "did you mean" in caught.value.do
