"""The files and folders that a configuration names: what counts as local, and which of them are not there.

A launch looks before it makes a run directory or starts a rank: a mistyped path would otherwise cost the import of
torch on every rank. Names that may be hub ids are left to whoever loads them.
"""

from __future__ import annotations

import glob
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mpdist import shipped
from mpdist.errors import ConfigError, MpdistError, UsageError

if TYPE_CHECKING:
    from mpdist.config import Config, Resolved

FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".txt")
_COUNT = (*FILE_SUFFIXES, ".safetensors", ".jinja", ".model")  # of what lies in a model's or a data folder


def looks_local(name: str) -> bool:
    """Whether a name cannot be a hub id, which is `NAME` or `OWNER/NAME`."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def here_or_shipped(path: str) -> str:
    """The demo's data come with mpdist: where the working folder has no `configs/data/...`, the installed one is meant."""
    if path.startswith("configs/data/") and not Path(path).exists():
        installed = shipped.root() / path
        if installed.exists():
            return str(installed)
    return path


def check_inputs(resolved: Resolved) -> None:
    """Raises ConfigError with every local file or folder that the configuration names and that is not there."""
    cfg = resolved.config
    problems: list[MpdistError] = []

    def report(key: str, value: str, why: str, do: str) -> None:
        origin = resolved.origins.get(key, "config")
        problems.append(UsageError(f"{key} = {value} ({origin})", f"{why} (seen from {Path.cwd()})", do))

    path = cfg.model.path
    if path is not None and looks_local(path) and not Path(path).expanduser().exists():
        report("model.path", path, "there is no such folder", "correct the path, or make the model first")
    for part in ("train", "eval"):
        for number, source in enumerate(getattr(cfg.data, part)):
            if why := _lacking(here_or_shipped(source.path)):
                do = "correct the path; it is relative to the folder in which mpdist is started"
                report(f"data.{part}.{number}.path", source.path, why, do)
            elif source.split is not None and _names_files(here_or_shipped(source.path)):
                why, do = f"{source.path} is no data set: a file has no splits", "take split away, or name a data set"
                report(f"data.{part}.{number}.split", source.split, why, do)
    name = cfg.data.tokenizer
    if name not in ("model", "bytes") and looks_local(name) and not Path(name).expanduser().exists():
        report("data.tokenizer", name, "there is no such folder", "give a folder that is there, a hub id, or bytes")
    template = cfg.data.chat_template
    if template is not None and not Path(template).expanduser().is_file():
        report("data.chat_template", template, "there is no such file", "correct the path, or take the key out")
    wish = cfg.checkpoint.resume
    other = wish not in ("auto", "never") and not checkpoints(Path(cfg.out_dir) / cfg.name)  # a run's own come first
    if other and (why := _nothing_to_resume(Path(wish).expanduser())):
        report("checkpoint.resume", wish, why, "give the folder of a run or of a checkpoint, or take the key out")
    if problems:
        raise ConfigError(problems)


def checkpoints(run: Path) -> dict[int, Path]:
    """step -> folder of each checkpoint that a run has published, whole or not (mpdist.checkpoint needs torch to say so)."""
    folders = [path for path in run.glob("checkpoints/step-*") if path.is_dir()]
    return {int(p.name[5:]): p for p in folders if re.fullmatch(r"step-([0-9]{8}|[1-9][0-9]{8,})", p.name)}


def _nothing_to_resume(path: Path) -> str | None:
    """Why there is no checkpoint to start from at a path; None if there is, be it whole or not."""
    if not path.is_dir():
        return "there is no such folder"
    if (path / "checkpoints").is_dir():
        return None if checkpoints(path) else "the run there has no checkpoint yet"
    return None if (path / "manifest.json").is_file() else "that folder is no run and no checkpoint"


def changed_since(cfg: Config, moment: float) -> bool:
    """Whether a local file that the configuration names has been written or put back since, or one that counts in a folder
    of its. A time in the future, of a file server whose clock is ahead, says nothing."""
    names = [cfg.model.path, cfg.data.tokenizer, cfg.data.chat_template]
    names += [here_or_shipped(source.path) for source in (*cfg.data.train, *cfg.data.eval)]
    for name in filter(None, names):
        here = Path(name).expanduser()
        found = [here] if here.exists() else [Path(p) for p in glob.iglob(str(here), recursive=True)]
        for path in found:
            inside = [p for p in path.iterdir() if p.suffix in _COUNT] if path.is_dir() else [path]
            if any(moment < file.stat().st_ctime <= time.time() for file in inside):
                return True
    return False


def _names_files(path: str) -> bool:
    """Whether a local path that is there is one of files, and not a folder or what may be a hub id."""
    here = Path(path).expanduser()
    return here.is_file() or (not here.exists() and any(c in path for c in "*?["))


def _lacking(path: str) -> str | None:
    """Why there is nothing to read at a local path; None if there is, or if it may be a hub id."""
    here = Path(path).expanduser()
    if here.exists():
        return None
    if any(c in path for c in "*?["):
        found = any(Path(name).is_file() for name in glob.iglob(str(here), recursive=True))
        return None if found else "no file matches this pattern"
    if here.suffix.lower() in FILE_SUFFIXES or looks_local(path):
        return "there is no such file or folder"
    return None
