"""Real runs under `mpdist launch` or torchrun, as a user starts them: processes to signal and what they left behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tiny import Result

from mpdist import watch

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = [sys.executable, "-m", "mpdist.cli", "launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mpdist"]
BOUND_S = 300.0  # for what takes seconds on an idle machine
_MARK = "MPDIST_TEST_JOB"


def environment(**more: str) -> dict[str, str]:
    """A user's plain shell: nothing of a scheduler, a tracker or a proxy."""
    drop = ("SLURM_", "MPDIST_", "WANDB_", "TORCHELASTIC_", "HF_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop) and not k.lower().endswith("_proxy")}
    return env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"} | more


class Job:
    """A command under way whose processes, down to the last helper, are known by a mark in their environment."""

    def __init__(self, command: Sequence[str | Path], run: Path, output: Path, **env: str) -> None:
        self.run, self.mark = run, secrets.token_hex(8)
        self._files = [output.with_suffix(".out"), output.with_suffix(".err")]
        before = set(_numbers(run / "sessions"))
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self.process = subprocess.Popen(
                [str(word) for word in command], env=environment(**env) | {_MARK: self.mark}, stdout=out, stderr=err,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.began, self._before = time.monotonic(), before

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    @property
    def err(self) -> str:
        return self._files[1].read_text()

    @property
    def session(self) -> int | None:
        """The session that this job has begun, once it has."""
        new = set(_numbers(self.run / "sessions")) - self._before
        return max(new, default=None)

    def reports(self) -> dict[int, watch.Report]:
        return {} if self.session is None else watch.read_reports(self.run / f"sessions/{self.session:04d}")

    def log(self, name: str) -> str:
        return (self.run / f"sessions/{self.session:04d}/logs/{name}.log").read_text()

    def wait_for_attempt(self, attempt: int, rank: int = 0) -> dict[int, watch.Report]:
        """Until a rank has that attempt of the run under way; the reports of the ranks."""
        self.until(lambda: rank in self.reports() and (self.reports()[rank].attempt or 0) >= attempt)
        return self.reports()

    def until(self, ready: Callable[[], bool], bound_s: float = BOUND_S) -> None:
        deadline = time.monotonic() + bound_s
        while not ready():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.out}\n{self.err}"
            assert time.monotonic() < deadline, f"it did not happen in time:\n{self.out}\n{self.err}"
            time.sleep(0.1 if self.session is None else 0.01)  # what is waited for early is the imports

    def end(self, bound_s: float = BOUND_S) -> int:
        """Its exit status. Fails if it does not end in time, or leaves a process behind."""
        self.process.wait(timeout=bound_s)
        left = self.alive()
        assert left == [], f"left behind: {[Path(f'/proc/{pid}/cmdline').read_bytes() for pid in left]}"
        return self.process.returncode

    def alive(self) -> list[int]:
        mark = f"{_MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0") and watch.started(int(entry.name)):
                    found.append(int(entry.name))
        return found

    def parent(self, rank: int = 0) -> int:
        """The pid of torchrun: the parent of a rank."""
        stat = Path(f"/proc/{self.reports()[rank].pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])

    def kill(self) -> None:
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()] if folder.is_dir() else []


class Jobs:
    """Starts jobs of the config files that tests.tiny writes; `close` kills what is left of them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._jobs = folder, list[Job]()

    def launch(self, config: Path, *overrides: str, **env: str) -> Job:
        return self._start([*LAUNCH, config, "--ranks", "2", *overrides], config, **env)

    def torchrun(self, config: Path, *overrides: str, restarts: int = 0, **env: str) -> Job:
        at = TORCHRUN.index("-m", 3)
        command = [*TORCHRUN[:at], "--max-restarts", str(restarts), *TORCHRUN[at:]]
        return self._start([*command, config, *overrides], config, **env)

    def rank(self, config: Path, rank: int, port: int, **env: str) -> Job:
        """One rank of two, by hand."""
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return self._start([sys.executable, "-m", "mpdist", config], config, **place, **env)

    def _start(self, command: Sequence[str | Path], config: Path, **env: str) -> Job:
        asked = json.loads(config.read_text())
        output = self._folder / f"job-{len(self._jobs)}"
        self._jobs.append(Job(command, Path(asked["out_dir"]) / asked["name"], output, **env))
        return self._jobs[-1]

    def close(self) -> None:
        for job in self._jobs:
            job.kill()


@contextlib.contextmanager
def jobs_in(folder: Path) -> Iterator[Jobs]:
    jobs = Jobs(folder)
    try:
        yield jobs
    finally:
        jobs.close()


def left(job: Job) -> Result:
    """What the run of a job has left in its directory."""
    return Result(job.run, [(job.process.returncode or 0, "")])


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def files_with(folder: Path, *texts: str) -> list[Path]:
    """Files anywhere below that hold one of these texts."""
    words = [text.encode() for text in texts]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if any(word in path.read_bytes() for word in words)]


def arguments_of(pids: Sequence[int]) -> list[str]:
    return [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]


def state(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "status.json").read_text()))
