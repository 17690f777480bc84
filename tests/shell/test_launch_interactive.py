"""launch/interactive.sh hands srun, and that hands torchrun, what `mpdist launch` would in the same step."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest
import tiny

from mpdist import launch, place
from mpdist.config import load

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "interactive.sh"
# srun runs its command here as the second of two tasks; torchrun writes down what it is given.
SRUN = '#!/bin/sh\necho "$@" >srun.words\nwhile [ "${1#--}" != "$1" ]; do shift; done\nSLURM_NODEID=1 exec "$@"\n'
TORCHRUN = '#!/bin/sh\nprintf "%s\\n" "$@" >torchrun.words\n'
SCONTROL = "#!/bin/sh\nprintf 'n7\\nn8\\n'\n"


def written(folder: Path, *arguments: str, **env: str) -> tuple[str, list[str]]:
    for name, text in (("srun", SRUN), ("torchrun", TORCHRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "41234", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[7-8]"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") and k not in ("RANKS", "PORT")}
    subprocess.run(
        ["sh", str(SCRIPT), *arguments],
        env={**kept, **job, "PATH": f"{folder}:{os.environ['PATH']}", **env}, cwd=folder, check=True, timeout=20,
    )  # fmt: skip
    return (folder / "srun.words").read_text(), (folder / "torchrun.words").read_text().splitlines()


def test_its_torchrun_line_is_that_of_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    srun, found = written(tmp_path, "c.yaml", "optim.lr=1e-4", RANKS="2")
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1" in srun
    resolved = load(tiny.config(tmp_path), ["launch.address=n7", "launch.port=21234"])
    where = place.find_place(resolved, 2, 2, 1, {})
    wanted = launch.torchrun(where, ["-m", "mpdist"], Path("c.yaml"), 600)[3:]
    assert sorted(found) == sorted([*wanted, "optim.lr=1e-4"])
    assert found[-4:] == ["-m", "mpdist", "c.yaml", "optim.lr=1e-4"]
    pairs = [*itertools.pairwise(found)]
    for option in ("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-conf"):
        assert (option, wanted[wanted.index(option) + 1]) in pairs


def test_arguments_pass_two_shells_unchanged(tmp_path: Path) -> None:
    _, found = written(tmp_path, "a b.yaml", "name=it's $HOME `id`", PORT="3000")
    assert found[-2:] == ["a b.yaml", "name=it's $HOME `id`"]
    assert ("--master-port", "3000") in [*itertools.pairwise(found)]


def test_it_is_short_and_says_what_it_is_for() -> None:
    lines = SCRIPT.read_text().splitlines()
    assert len(lines) <= 40
    assert lines[1].startswith("# One run on the nodes of an interactive Slurm job")
