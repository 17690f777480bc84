"""Commands that do not compute neither import nor start anything heavy. Counted in modules, since times vary.

What the counts stand for, in process time: help takes a fiftieth of `torchrun --help`, a refusal under a tenth.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    "torch",
    "numpy",
    "transformers",
    "datasets",
    "accelerate",
    "deepspeed",
    "wandb",
    "pandas",
    "pyarrow",
    "tokenizers",
}
CONFIG_LIBRARIES = {
    *("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"),
    *("ruamel", "_ruamel_yaml", "_ruamel_yaml_clibz"),
}
# Standard modules that would mean that something searches the installation, speaks to a network or spawns.
COSTLY = {"importlib.metadata", "email.message", "zipfile", "asyncio", "ssl", "http.client", "multiprocessing"}

PROBE = """\
import json, sys
before = set(sys.modules)
from mpdist.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
import os
os.write(int(os.environ["PROBE_FD"]), json.dumps([status or 0, sorted(set(sys.modules) - before)]).encode())
"""
CONFIG = """\
name: light
model: {config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
                 num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 260, tie_word_embeddings: true}}
data: {train: [{path: a.txt}], tokenizer: bytes, seq_len: 64}
batch: {global: 8}
budget: {steps: 10}
"""


def probe(tmp_path: Path, *arguments: str) -> tuple[int, set[str]]:
    """Exit status of `mpdist ARGUMENTS`, and the modules that it imported."""
    report = tmp_path / "report.json"
    with report.open("wb") as file:
        process = subprocess.run(
            [sys.executable, "-c", PROBE, *arguments],
            env={"PROBE_FD": str(file.fileno()), "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            pass_fds=[file.fileno()],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert process.returncode == 0, process.stderr
    status, names = json.loads(report.read_text())
    return status, set(names)


def outside(names: set[str]) -> set[str]:
    """The top-level packages that are neither the standard library's nor ours."""
    tops = {name.split(".")[0] for name in names}
    return {name for name in tops if not name.startswith("_sysconfigdata")} - set(sys.stdlib_module_names) - {"mpdist"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "light.yaml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *(
            [name, "--help"]
            for name in (
                "launch",
                "sweep",
                "compare",
                "plan",
                "config",
                "configs",
                "prepare",
                "fetch",
                "doctor",
                "export",
            )
        ),
    ],
    ids=" ".join,
)
def test_help_imports_nothing_but_a_part_of_the_standard_library(tmp_path: Path, arguments: list[str]) -> None:
    status, names = probe(tmp_path, *arguments)
    assert status == 0
    assert outside(names) == set()
    assert not names & COSTLY
    own = {name for name in names if name.startswith("mpdist") and not name.startswith("mpdist.commands")}
    assert own == {"mpdist", "mpdist.cli", "mpdist.errors"}
    assert len(names) < 40, sorted(names)


@pytest.mark.parametrize("command", ["launch", "config", "plan", "prepare", "fetch", "doctor"])
def test_a_refused_config_imports_the_config_libraries_at_most(tmp_path: Path, config: Path, command: str) -> None:
    status, names = probe(tmp_path, command, str(config), "batch.mirco=3", "optim.lr=fast")
    assert status == 2
    assert outside(names) <= CONFIG_LIBRARIES
    assert not names & COSTLY
    assert len(names) < 260, len(names)


def test_config_and_plan_import_no_torch(tmp_path: Path, config: Path) -> None:
    for arguments in (["config", str(config)], ["config", "--schema"], ["plan", str(config), "--ranks", "2", "--json"]):
        status, names = probe(tmp_path, *arguments)
        assert status == 0
        assert outside(names) <= CONFIG_LIBRARIES, arguments


BLOCKED = """\
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in %r:
            raise AssertionError(f"{name} was asked for")
sys.meta_path.insert(0, Blocked())
from mpdist.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--memory", "1GiB"),
        ("--memory", "80GiB", "--suggest"),
        ("--gpu", "H100", "--json"),
        ("--memory", "80GiB", "--html", "plan.html"),
    ],
    ids=" ".join,
)
def test_a_plan_works_where_nothing_heavy_can_be_imported(
    tmp_path: Path, config: Path, arguments: tuple[str, ...]
) -> None:
    command = [sys.executable, "-c", BLOCKED % HEAVY, "plan", str(config), "--ranks", "2", *arguments]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == (3 if "1GiB" in arguments else 0), done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", [["launch"], ["sweep", "--vary", "precision.compute=fp32,bf16", "--seeds", "3"]])
def test_a_dry_launch_imports_no_torch(tmp_path: Path, config: Path, command: list[str]) -> None:
    (tmp_path / "a.txt").write_text("a text")
    status, names = probe(tmp_path, command[0], str(config), *command[1:], "--ranks", "2", "--dry-run")
    assert status == 0
    assert not outside(names) & HEAVY
    assert not (tmp_path / "runs").exists()


def test_a_refused_file_of_another_trainer_imports_no_library_of_its(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 7}}')
    for arguments in (
        ["--from-deepspeed", "zero.json"],
        ["--from-trainer", "zero.json"],
        ["--from-accelerate", "none"],
    ):
        status, names = probe(tmp_path, "config", *arguments)
        assert status == 2
        assert outside(names) <= CONFIG_LIBRARIES, arguments
