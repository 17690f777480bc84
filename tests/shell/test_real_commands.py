"""What a user meets first: help that helps, and the first commands after installing a wheel."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import ROOT, environment

from mpdist.cli import COMMANDS, main

TEXTS = {"train": "lincoln", "eval": "lincoln_heldout"}


def mpdist(*arguments: str | Path, status: int = 0, cwd: Path | None = None, **env: str) -> str:
    """What a command prints; what it complains of, where a complaint is expected."""
    command = [sys.executable, "-m", "mpdist.cli", *map(str, arguments)]
    done = subprocess.run(command, env=environment(**env), cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The same in this process: an interpreter for each command would take longer than all that they say."""
    monkeypatch.setenv("COLUMNS", "100")

    def said(*arguments: str, status: int = 0) -> str:
        try:
            found = main(list(arguments))
        except SystemExit as error:
            found = error.code
        out, err = capsys.readouterr()
        assert (found or 0) == status, out + err
        return err if status else out

    return said


def test_every_help_has_an_example_and_says_where_the_exit_statuses_are(here: Callable[..., str]) -> None:
    general = mpdist("--help")
    assert mpdist("help") == general
    assert mpdist(status=2) == general
    assert "75 stopped early with everything saved" in general
    for name in COMMANDS:
        assert f"\n  {name} " in general
        said = here(name, "--help")
        assert said.startswith(f"usage: mpdist {name}")
        example = said.partition("\nexample")[2]
        assert f" mpdist {name}" in example, name
        assert "exit statuses: " in said, name
        assert all(len(line) <= 120 for line in said.splitlines()), name


def test_a_command_without_its_arguments_says_what_it_lacks(here: Callable[..., str]) -> None:
    for name in COMMANDS.keys() - {"configs", "doctor"}:
        said = here(name, status=2)
        assert any(what in said for what in ("CONFIG", "FOLDER", "RUN", "formats|lab"))
        assert "KEY=VALUE" not in said, "settings are never required"
        assert f"`mpdist {name} --help` shows how it is used" in said


@pytest.mark.slow
def test_an_installed_wheel_lists_plans_and_trains(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    built, site, elsewhere = (tmp_path / name for name in ("built", "site", "elsewhere"))
    elsewhere.mkdir()

    def python(*words: str | Path) -> None:
        subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True, capture_output=True, timeout=300)

    python("-m", "hatchling", "build", "-t", "wheel", "-d", built)
    (wheel,) = built.glob("*.whl")
    python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
    there = {"cwd": elsewhere, "PYTHONPATH": str(site)}

    listed = mpdist("configs", **there)  # type: ignore[arg-type]
    names = [line.split()[0] for line in listed.splitlines()]
    assert {"configs/smollm2_135m.yaml", "configs/demo_chat.yaml", "launch/demo.sh"} <= set(names)
    (copy, *_) = mpdist("configs", "copy", "llama31_8b_1node", "mine", **there).split()  # type: ignore[arg-type]
    assert "fits" in mpdist("plan", copy, "--memory", "80GiB", **there)  # type: ignore[arg-type]
    for path in (site / "mpdist" / "_shipped" / "configs").glob("*.yaml"):
        assert "parameters" in mpdist("plan", path, **there)  # type: ignore[arg-type]

    shipped = site / "mpdist" / "_shipped" / "configs"
    demo = shipped / "demo_pretrain.yaml"
    texts = [f"data.{kind}.0.path={shipped / 'data' / name}.txt" for kind, name in TEXTS.items()]
    small = [
        *texts,
        "budget.steps=2",
        "optim.warmup=0",
        "eval.rows=8",
        "launch.device=cpu",
        "track.wandb.mode=disabled",
    ]
    said = mpdist("launch", demo, "--ranks", "2", *small, **there)  # type: ignore[arg-type]
    assert said.splitlines()[-1] == f"done: {elsewhere / 'runs' / 'demo-pretrain'}"
    env = (elsewhere / "runs" / "demo-pretrain" / "sessions" / "0001" / "env.json").read_text()
    assert str(ROOT) not in env.replace(sys.executable, "")  # whose environment may lie in the checkout
