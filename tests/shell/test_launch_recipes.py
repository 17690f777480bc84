"""The recipes in launch/: short, valid, and handing torchrun what they say."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "launch"
RECIPES = [FOLDER / "one_node.sh", FOLDER / "by_hand.sh"]


def called(recipe: str, tmp_path: Path, *arguments: str, **env: str) -> list[str]:
    """What a recipe hands to torchrun, which here is a script that writes it down."""
    fake = tmp_path / "torchrun"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "OMP=$OMP_NUM_THREADS" "$@"\n')
    fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    kept = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        ["sh", str(FOLDER / recipe), *arguments],
        env={**kept, "PATH": path, **env}, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_short_and_says_what_it_is_for(recipe: Path) -> None:
    lines = recipe.read_text().splitlines()
    assert len(lines) <= 40
    assert lines[0] == "#!/bin/sh"
    assert lines[1].startswith("# ")
    subprocess.run(["sh", "-n", str(recipe)], check=True, timeout=20)


def test_one_node_passes_everything_on(tmp_path: Path) -> None:
    words = called("one_node.sh", tmp_path, "a b.yaml", "optim.lr=1e-4", RANKS="2", OMP_NUM_THREADS="3")
    assert words[0] == "OMP=3"
    assert words[1:3] == ["--nproc-per-node", "2"]
    assert words[-4:] == ["-m", "mpdist", "a b.yaml", "optim.lr=1e-4"]
    assert called("one_node.sh", tmp_path, "c.yaml")[:3] == ["OMP=8", "--nproc-per-node", "8"]


def test_by_hand_names_the_node_and_the_first_one(tmp_path: Path) -> None:
    words = called("by_hand.sh", tmp_path, "c.yaml", NODES="4", NODE="3", ADDRESS="node-a", PORT="31000")
    for option, value in (
        ("--nnodes", "4"),
        ("--node-rank", "3"),
        ("--master-addr", "node-a"),
        ("--master-port", "31000"),
    ):
        assert words[words.index(option) + 1] == value


def test_by_hand_without_its_variables_says_which_is_missing(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("NODES", "NODE", "ADDRESS")}
    done = subprocess.run(
        ["sh", str(FOLDER / "by_hand.sh"), "c.yaml"], env={**env, "NODES": "2"}, capture_output=True, text=True,
        timeout=20, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode != 0
    assert "NODE: the number of this node, from 0" in done.stderr
