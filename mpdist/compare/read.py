"""Run directories as they stand: what was asked, what was logged, what each session found around it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpdist import run_files, sweep_file
from mpdist.compare import whole
from mpdist.compare.tree import Run
from mpdist.errors import ConfigError, UsageError
from mpdist.lines import read_lines
from mpdist.record import read_metrics


def runs(paths: Sequence[str]) -> list[Run]:
    """The runs at these paths, in their order, each once. A folder of runs (a sweep's) stands for all that it holds.

    Raises UsageError for what is no run, cannot be read, or has not made a step. Of a sweep's runs those that have not
    made one yet are left out.
    """
    found: dict[Path, Path] = {}  # where it really is -> as it is called
    for text in paths:
        path = Path(text)
        for one in [path] if (path / "config.yaml").is_file() else _inside(path):
            found.setdefault(Path(os.path.realpath(one)), one.absolute())
    return [read(path) for path in found.values()]


def sweep_of(paths: Sequence[Path]) -> sweep_file.Sweep | None:
    """The sweep that all these runs belong to, None if there is none."""
    folders = {path.parent for path in paths}
    found = sweep_file.read(folders.pop()) if len(folders) == 1 else None
    known = {run.path for run in found.runs} if found is not None else set()
    return found if all(path.name in known for path in paths) else None


def _inside(path: Path) -> list[Path]:
    if not path.is_dir():
        raise UsageError(f"{path}: there is no such directory", "", "give directories of runs, or a sweep's")
    sweep = sweep_file.read(path)
    if sweep is not None:
        begun = [path / run.path for run in sweep.runs if _has_step(path / run.path / "metrics.jsonl")]
        if not begun:
            raise UsageError(f"{path}: none of the sweep's runs has made a step", "", "`mpdist sweep` runs them")
        return begun
    inside = sorted(p.parent for p in path.glob("*/config.yaml"))
    if not inside:
        raise UsageError(
            f"{path} is no run directory", "it holds no config.yaml, and no folder that does",
            "give OUT_DIR/NAME of runs, or a sweep's directory",
        )  # fmt: skip
    return inside


def _has_step(metrics: Path) -> bool:
    return metrics.exists() and any(row["kind"] == "train" for row in read_metrics(metrics))


def read(path: Path) -> Run:
    from mpdist.config import leaves, load

    try:
        resolved = load(path / "config.yaml")
    except ConfigError as error:
        raise UsageError(f"{path} cannot be compared", f"config.yaml: {error.problems[0].what}", "") from error
    status = run_files.load(path / "status.json", run_files.STATUS) or {}  # before the histories, which only grow
    rows = _rows(path)
    train = tuple(row for row in rows if row["kind"] == "train")
    if not train:
        raise UsageError(f"{path} has no row of training", "it has not made a step", "leave it out, or launch it")
    events = path / "events.jsonl"
    ledger = run_files.load(path / "ledger.json", run_files.LEDGER) or {}
    histories = [file for file in (path / "metrics.jsonl", events) if file.exists()]
    found = Run(
        path=path,
        values=dict(leaves(resolved.values())),
        train=train,
        evals=tuple(row for row in rows if row["kind"] == "eval"),
        events=tuple(_counting(read_lines(events, run_files.check_event))) if events.exists() else (),
        status=status,
        plan=run_files.load(path / "plan.json", run_files.PLAN) or {},
        ledger=tuple(ledger.get("rows", ())),
        envs=_sessions(path),
        torn=tuple(file.name for file in histories if run_files.torn(file)),
    )
    whole.check(found)
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    if not (path / "metrics.jsonl").exists():
        raise UsageError(f"{path} has no metrics.jsonl", "nothing was trained there", "leave it out, or launch it")
    return read_metrics(path, run_files.check_row)


def _sessions(path: Path) -> tuple[dict[str, Any], ...]:
    """Each session's env.json. One whose worker never came to its device knows little of what a session knows, and made no
    step: it is left out beside others."""
    folder = path / "sessions"
    files = sorted(one / "env.json" for one in folder.iterdir() if one.name.isdecimal()) if folder.is_dir() else []
    found = [env for env in (run_files.load(file, run_files.ENV) for file in files) if env is not None]
    return tuple([env for env in found if env.get("devices") and "device" in env] or found)


def _counting(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the skipped attempts of work that a later session did again: it began before them."""
    kept: list[dict[str, Any]] = []
    for event in events:
        if event.get("event") == "start":
            begun = event.get("attempt", 0)
            kept = [old for old in kept if old["event"] != "skip" or old["attempt"] <= begun]
        kept.append(event)
    return kept
