"""The demo: the script itself, start to end, with the package that is installed here instead of one in .venv."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "demo.sh"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose .venv stands for the running Python, so that the script finds everything installed."""
    for name in ("launch", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    config = tmp_path / "configs" / "demo_pretrain.yaml"
    text = config.read_text()
    assert text.count("steps: 400}") == 1
    config.write_text(text.replace("steps: 400}", "steps: 160}"))  # enough to learn from; the rest only costs time
    tools = tmp_path / ".venv" / "bin"
    _write(tools / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    _write(tools / "mpdist", f'#!/bin/sh\nexec "{sys.executable}" -m mpdist.cli "$@"\n')
    _write(tools / "pip", "#!/bin/sh\nexit 9\n")
    wanted = subprocess.run(
        ["sh", "-c", "cat pyproject.toml constraints.txt | cksum"], cwd=tmp_path, capture_output=True, check=True
    )
    (tmp_path / ".venv" / "tests-installed").write_bytes(wanted.stdout)
    return tmp_path


def _demo(checkout: Path, cwd: Path, timeout: float) -> str:
    done = subprocess.run(
        ["sh", str(checkout / "launch" / "demo.sh")], cwd=cwd, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def _held_out(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["eval/loss"] for row in rows if row["kind"] == "eval"]


@pytest.mark.slow
def test_the_demo_learns_answers_and_runs_again_politely(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    said = _demo(checkout, elsewhere, timeout=600)
    assert list(elsewhere.iterdir()) == []

    first, second = (_held_out(checkout / "runs" / name) for name in ("demo-pretrain", "demo-chat"))
    assert first[-1] < 0.6 * math.log(260)
    assert first[-1] < first[0]
    assert second[-1] < 0.95 * second[0]

    # The last lines show how to generate, and an answer that ends where the template ends it.
    assert 'from_pretrained("runs/demo-chat/export")' in said
    answer = said.rpartition("<|im_start|>assistant\n")[2]
    assert re.fullmatch(r"[^<]{10,}<\|im_end\|>\n", answer), answer

    before = {path: path.stat().st_mtime_ns for path in (checkout / "runs").rglob("*") if path.is_file()}
    again = _demo(checkout, elsewhere, timeout=120)
    assert again.count("is finished: nothing to do") == 2
    assert again.endswith(answer)
    assert before == {path: path.stat().st_mtime_ns for path in (checkout / "runs").rglob("*") if path.is_file()}


def test_the_script_is_short_and_holds_no_training_value() -> None:
    lines = SCRIPT.read_text().splitlines()
    assert len(lines) <= 40
    assert "set -eu" in lines
    launches = [line.strip() for line in lines if "mpdist launch" in line]
    assert launches == ['.venv/bin/mpdist launch "configs/demo_$run.yaml"']
    subprocess.run(["sh", "-n", str(SCRIPT)], check=True, timeout=20)


def test_without_a_new_enough_python_it_says_so(tmp_path: Path) -> None:
    _write(tmp_path / "launch" / "demo.sh", SCRIPT.read_text())
    (tmp_path / "pyproject.toml").write_text("")
    _write(tmp_path / "bin" / "python3", "#!/bin/sh\nexit 1\n")  # as an older one would
    (tmp_path / "bin" / "dirname").symlink_to(shutil.which("dirname") or "")
    done = subprocess.run(
        [shutil.which("sh") or "", str(tmp_path / "launch" / "demo.sh")],
        env={"PATH": str(tmp_path / "bin")}, cwd=tmp_path, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert done.returncode == 4
    assert "Python 3.11 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_copied_out_of_its_checkout_it_does_nothing(tmp_path: Path) -> None:
    _write(tmp_path / "elsewhere" / "demo.sh", SCRIPT.read_text())
    done = subprocess.run(
        ["sh", str(tmp_path / "elsewhere" / "demo.sh")], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 2
    assert "checkout" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_it_takes_a_newer_python_where_the_first_is_too_old_and_installs_once(tmp_path: Path) -> None:
    """With a python3.12 that writes down what it is asked for, and stands for the environment's own as well."""
    _write(tmp_path / "launch" / "demo.sh", SCRIPT.read_text())
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("")
    log = tmp_path / "asked"
    _write(tmp_path / "bin" / "python3", "#!/bin/sh\nexit 1\n")
    _write(
        tmp_path / "bin" / "python3.12",
        f"""#!/bin/sh
echo "$*" >>{log}
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin"; for tool in python pip mpdist; do cp "$0" "$3/bin/$tool"; done; fi
""",
    )
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    for _ in range(2):
        subprocess.run(
            ["sh", str(tmp_path / "launch" / "demo.sh")], env=env, check=True, timeout=20, capture_output=True
        )
    asked = log.read_text()
    assert asked.count("-m venv .venv") == 1
    assert asked.count("-m pip install --quiet -e . -c constraints.txt") == 1
    assert asked.count("launch configs/demo_pretrain.yaml") == 2
