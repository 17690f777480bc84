"""Runs whose disk is full, in a mount namespace with small file systems of their own: small_disk.py FOLDER SCENE ...

They lie at FOLDER/SCENE-disk, where only this process and its children see them. Whatever a session leaves in its run
directory is copied to FOLDER/SCENE-N; the last line of output is JSON, a fact sheet for each session by its scene.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import worlds
from real_runs import Jobs, jobs_in

STEPS, EVERY = 40, 10
BATCH = {"micro": 4, "global": 8}  # one micro-batch a rank: nothing here looks at more
ROOM = "1500k"  # for one checkpoint of 660 KiB and what else a run leaves, not for a second one
MORE = "6m"


def config(folder: Path, name: str, **changes: Any) -> Path:
    save = {"every": EVERY, "keep": 3, **changes.pop("checkpoint", {})}
    return tiny.config(folder, name=name, budget__steps=STEPS, batch=BATCH, checkpoint=save, **changes)


class Disk:
    def __init__(self, folder: Path, scene: str, size: str) -> None:
        self.path = folder / f"{scene}-disk"
        self.path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", self.path], check=True)

    def resize(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", self.path], check=True)


def fill(path: Path) -> Path:
    """A file that takes all the room there is."""
    with path.open("wb", buffering=0) as file:
        for block in (65536, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(block)):
                    pass
    return path


def keep(run: Path, folder: Path, scene: str, facts: list[dict[str, Any]], **known: Any) -> None:
    facts.append({"ended": time.time(), **known})
    shutil.copytree(run, folder / f"{scene}-{len(facts)}", symlinks=True)


# -- under the launcher -------------------------------------------------------------------------------------------------


def launched(folder: Path) -> list[dict[str, Any]]:
    """A save that does not fit; with more room again, until something else takes it all; on the full disk; with room."""
    disk, facts = Disk(folder, "launched", ROOM), list[dict[str, Any]]()
    path = config(folder, "launched", out_dir=str(disk.path / "runs"))

    def end(jobs: Jobs, *overrides: str, before: Callable[[Any], None] = lambda _: None) -> None:
        job = jobs.launch(path, *overrides)
        before(job)
        status = job.end()
        keep(job.run, folder, "launched", facts, status=status, out=job.out, err=job.err)

    def take_all(job: Any) -> None:
        job.until(lambda: (job.run / "metrics.jsonl").read_text().count('"session": 2') > 1)
        fill(disk.path / "filler")

    with jobs_in(folder) as jobs:
        end(jobs)
        disk.resize(MORE)
        # Rows go on fitting into the last page of their file for some steps: no save may meet the full disk before.
        end(jobs, f"checkpoint.every={10 * STEPS}", before=take_all)
        end(jobs)
    (disk.path / "filler").unlink()
    ends = worlds.run(tiny.session, 2, str(path), [])
    keep(disk.path / "runs" / "launched", folder, "launched", facts, ends=ends)
    return facts


# -- ranks alone --------------------------------------------------------------------------------------------------------


def went_on(folder: Path) -> list[dict[str, Any]]:
    """checkpoint.on_error = go_on: a save does not fit, training goes on, and there is room for later ones."""
    disk, facts = Disk(folder, "went_on", ROOM), list[dict[str, Any]]()
    run = disk.path / "runs" / "went_on"

    def make_room() -> None:
        while not (run / "events.jsonl").exists() or '"saving step-' not in (run / "events.jsonl").read_text():
            time.sleep(0.01)
        disk.resize(MORE)

    threading.Thread(target=make_room, daemon=True).start()
    path = config(folder, "went_on", out_dir=str(disk.path / "runs"), checkpoint={"on_error": "go_on"})
    ends = worlds.run(tiny.session, 2, str(path), [])
    keep(run, folder, "went_on", facts, ends=ends)
    return facts


def in_flight(folder: Path) -> list[dict[str, Any]]:
    """A save takes all the room and gives up only when rank 0's record has met the full disk; then a launch with room."""
    disk, facts = Disk(folder, "in_flight", MORE), list[dict[str, Any]]()
    path = config(folder, "in_flight", out_dir=str(disk.path / "runs"))
    for session in (session_greedy, tiny.session):
        ends = worlds.run(session, 2, str(path), [])
        keep(disk.path / "runs" / "in_flight", folder, "in_flight", facts, ends=ends)
    return facts


def session_greedy(rank: int, path: str, overrides: list[str]) -> tuple[int, str]:
    from mpdist import record
    from mpdist.drill import Drill
    from mpdist.errors import MachineError
    from mpdist.lines import Lines

    met = threading.Event()

    def saving(self: Drill, save: int, attempt: int) -> None:
        if rank == 0 and save == 2:
            runs = Path(json.loads(Path(path).read_text())["out_dir"])
            (aside,) = (runs / "in_flight" / "checkpoints").glob(".step-*.aside")
            fill(aside / "filler")
            assert met.wait(60), "nothing of the record has met the full disk"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def noticed(write: Callable[..., None]) -> Callable[..., None]:
        def writing(*args: Any) -> None:
            try:
                write(*args)
            except MachineError:
                met.set()
                raise

        return writing

    Drill.saving = saving  # type: ignore[method-assign]
    Lines.append, record.write_atomic = noticed(Lines.append), noticed(record.write_atomic)  # type: ignore[method-assign]
    return tiny.session(rank, path, overrides)


if __name__ == "__main__":
    scenes = {"launched": launched, "went_on": went_on, "in_flight": in_flight}
    print("\n" + json.dumps({scene: scenes[scene](Path(sys.argv[1])) for scene in sys.argv[2:]}))
