"""A worker without torch for the launcher's tests: it steps, agrees on a stop with its peers through files, and fails
as it is told. FAKE is a JSON object: steps, sleep (seconds a step), and faults: {"RANK": [KIND, STEP]}."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from mpdist import watch
from mpdist.errors import Diverged, MpdistError
from mpdist.record import RunDir

SAVE_S = 0.3


def main() -> int:
    fake = json.loads(os.environ.get("FAKE", "{}"))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    session = _session(Path(sys.argv[1]).parent)
    run = RunDir(Path(sys.argv[1]).parent, rank, session)
    if fake.get("faults", {}).get(str(rank)) == ["import", 0]:
        raise ImportError("no module called fla_attn")
    record = watch.report_rank(run.path, session, rank)
    watch.open_log(run.path, session, rank)
    stop = watch.Stop().listen(record)
    meet = run.session_path() / "meet"
    meet.mkdir(exist_ok=True)
    print(f"rank {rank} of {ranks}: OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} is ready", flush=True)
    try:
        return _steps(fake, run, record, stop, meet, ranks)
    except (MpdistError, OSError, ValueError) as error:
        record.failed(error)
        return error.status if isinstance(error, MpdistError) else 1


def _session(run_dir: Path) -> int:
    """The launcher's word; on another node than the first, rank 0's, which here has to wait for its report."""
    if text := os.environ.get(watch.SESSION):
        return int(text)
    while True:
        for path in run_dir.glob("sessions/*/ranks/00000.json"):
            return int(path.parent.parent.name)
        time.sleep(0.05)


def _steps(fake: dict, run: RunDir, record: watch.Rank, stop: watch.Stop, meet: Path, ranks: int) -> int:
    for step in range(1, fake.get("steps", 3) + 1):
        if stop.asked:
            (meet / "wish").write_text(stop.asked)
        _agree(meet, run, step, ranks)
        if (meet / f"stop-{step}").exists():
            return _end(
                run,
                record,
                "preempted",
                step - 1,
                75,
                f"stopped by {stop.asked or watch.passed_on(run.session_path())}",
            )
        record.at(step - 1, step, "train")
        kind, at = fake.get("faults", {}).get(str(run.rank), ["", 0])
        if at == step:
            _fault(kind)
        if run.rank == 0:
            print(f"step {step}", flush=True)
        time.sleep(fake.get("sleep", 0.01))
        record.at(step, step, "train")
    return _end(run, record, "done", fake.get("steps", 3), 0)


def _agree(meet: Path, run: RunDir, step: int, ranks: int) -> None:
    """Rank 0 looks at the wish once all have come, so that all ranks see the same."""
    (meet / f"here-{step}-{run.rank}").touch()
    _until(run, lambda: all((meet / f"here-{step}-{r}").exists() for r in range(ranks)))
    if run.rank == 0:
        (meet / (f"stop-{step}" if (meet / "wish").exists() else f"go-{step}")).touch()
    _until(run, lambda: (meet / f"stop-{step}").exists() or (meet / f"go-{step}").exists())


def _until(run: RunDir, ready) -> None:
    while not ready():
        for report in watch.read_reports(run.session_path()).values():
            if not report.alive and not ready():
                raise ConnectionError("[pair.cc:553] Connection closed by peer [127.0.0.1]:29501")
        time.sleep(0.01)


def _fault(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raise":
        raise ValueError("the data ends\nhere")
    if kind == "diverge":
        raise Diverged("loss = nan at attempt 2", "patience is used up", "lower optim.lr")
    if kind == "hard exit":
        os._exit(0)
    if kind == "exit":
        sys.exit(0)
    if kind == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, watch.STOP_SIGNALS)
        time.sleep(1000)


def _end(run: RunDir, record: watch.Rank, state: str, step: int, status: int, reason: str | None = None) -> int:
    time.sleep(SAVE_S)
    if run.rank == 0:
        run.status(state=state, step=step, attempt=step, exit=status, reason=reason)
        print(f"{state} at step {step}", flush=True)
    record.ended(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
