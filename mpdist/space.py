"""The disk that a run takes: the bytes of a checkpoint, the most that lie there at once, and whether there is room.

A full disk is found at the first save, hours after the start. What a save writes is known before: masters, moments and
frozen parameters by the model's shape, and some bytes around each of them. Quotas cannot be seen from here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpdist.arch import Arch, module_matches
from mpdist.errors import MachineError
from mpdist.formats import bytes_of
from mpdist.inputs import checkpoints
from mpdist.plan_memory import MIB, Asked
from mpdist.units import format_bytes

if TYPE_CHECKING:
    from mpdist.config import Config, Resolved

# Measured on checkpoints of torch 2.13: what a stored piece of a tensor takes beside its values (a header in its file,
# an entry in the table of all pieces), a rank's generators and share of the manifest, model config and state.
PIECE_BYTES, RANK_BYTES, FIXED_BYTES = 1840, 5600, 8192
TOKENIZER_BYTES = 32 * MIB  # those of large vocabularies have 10 to 35 MB


@dataclass(frozen=True)
class Saves:
    """bytes: of one checkpoint. count: how many lie in the run directory at its fullest, the one being written included.
    stay: how many stay when none is being written. left: how many a new run makes, None where that is not known.
    assumed: the part of `bytes` that may be much less, a tokenizer's."""

    bytes: int
    formula: str
    count: int
    stay: int
    left: int | None
    assumed: int = 0

    @property
    def kept_bytes(self) -> int:
        return self.count * self.bytes

    def to_json(self) -> dict[str, int | str]:
        return {"bytes": self.bytes, "kept_bytes": self.kept_bytes, "kept": self.count, "formula": self.formula}


@dataclass(frozen=True)
class Room:
    """What there is, and what follows. line: for a dry run; error: why nothing should start; warning: what to know."""

    line: str
    error: MachineError | None = None
    warning: str | None = None


def planned(cfg: Config, asked: Asked, arch: Arch) -> Saves:
    """The saves of a new run. No family whose shape is known has buffers in its state dict."""
    trained, frozen = arch.split(asked.freeze)
    master = bytes_of(asked.compute) if asked.master == "compute" else 4
    compute = bytes_of(asked.compute)
    values = 3 * master * sum(p.count for p in trained)
    still = sum(p.count * (4 if module_matches(p.name, asked.keep_fp32) else compute) for p in frozen)
    pieces = 3 * sum(_pieces(p.shape[0], asked) for p in trained) + sum(_pieces(p.shape[0], asked) for p in frozen)
    around = PIECE_BYTES * pieces + RANK_BYTES * asked.ranks + FIXED_BYTES
    assumed = 0 if cfg.data.tokenizer == "bytes" else TOKENIZER_BYTES
    around += assumed
    formula = f"{3 * master} B x {sum(p.count for p in trained):,} trained parameters"
    if frozen:
        formula += f" + {format_bytes(still)} of frozen ones"
    formula += f" + {format_bytes(around)} of small files and headers"
    stay = cfg.checkpoint.keep + (
        cfg.checkpoint.keep_best if cfg.data.eval else 0
    )  # the best may be older than the others
    left = _saves_left(cfg, 0)
    return Saves(values + still + around, formula, min(stay + 1, left or stay + 1), stay, left, assumed)


def _pieces(rows: int, asked: Asked) -> int:
    """How many ranks write a share of so many rows: torch's shards, each shared out over the ranks that hold it."""
    copies = asked.ranks // asked.shard_size
    share = -(-rows // asked.shard_size)
    return rows // share * min(share, copies) + min(rows % share, copies)


def _saves_left(cfg: Config, step: int) -> int | None:
    """Saves that a run makes after this step until its budget is spent, each `every` steps and at the end."""
    every, steps = cfg.checkpoint.every, cfg.budget.steps
    if not every:
        return 1
    if steps is None:
        return None
    return max(1, steps // every - step // every + bool(steps % every))


# -- what there is ---------------------------------------------------------------------------------------------------


def check(resolved: Resolved, saves: Saves | None) -> str | None:
    """A warning, or None. Raises MachineError where not even one checkpoint fits, unless `checkpoint.on_error` lets it."""
    found = look(resolved, saves)
    if found.error is not None:
        raise found.error
    return found.warning


def look(resolved: Resolved, saves: Saves | None) -> Room:
    """saves: None where the model's shape is not known."""
    cfg = resolved.config
    folder = Path(os.path.abspath(Path(cfg.out_dir) / cfg.name / "checkpoints"))
    try:
        here = next(path for path in (folder, *folder.parents) if path.exists())
        system, lying = os.statvfs(here), {step: _size(path) for step, path in checkpoints(folder.parent).items()}
        gone = sum(map(_size, _half_done(folder)))  # removed before the first save
    except OSError:  # whoever opens the run directory says what is wrong with it
        return Room("disk       its free space cannot be asked for")
    free = system.f_bavail * system.f_frsize
    where = f"out_dir = {cfg.out_dir} ({resolved.origins.get('out_dir', 'config')}) is there"
    line = f"disk       {format_bytes(free)} free at {here}"
    do = "make room, or choose another out_dir"
    if system.f_files and not system.f_favail:
        what = f"the file system of {here} can hold no more files: none of its {system.f_files:,} inodes is free"
        return _refusal(cfg, line, MachineError(what, f"{where}, and a run writes files", do))
    if saves is None or not system.f_blocks:  # some file systems do not count their blocks
        return Room(line)
    free += gone
    if free < saves.bytes - saves.assumed:
        what = (
            f"a checkpoint takes {format_bytes(saves.bytes - saves.assumed)}, and {here} has {format_bytes(free)} free"
        )
        error = MachineError(what, f"{where}, and the first save would find the disk full", do)
        return _refusal(cfg, line, error)
    newest = max(lying, default=0)
    full = _full_at(free, saves, [lying[step] for step in sorted(lying)], _saves_left(cfg, newest))
    if full is None:
        return Room(line)
    text = (
        f"{here} has {format_bytes(free)} free, and up to {saves.stay + 1} checkpoints of {format_bytes(saves.bytes)} lie "
        f"there at once: {_save(cfg, newest, full)} will find the disk full; make room, or lower checkpoint.keep"
    )
    return Room(line, warning=text)


def _refusal(cfg: Config, line: str, error: MachineError) -> Room:
    if cfg.checkpoint.on_error == "stop":
        error.do += ", or train without saves until there is room: checkpoint.on_error=go_on"
        return Room(line, error=error)
    return Room(line, warning=f"{error.what}; checkpoint.on_error = go_on, so it starts all the same")


def _full_at(free: int, saves: Saves, lying: list[int], left: int | None) -> int | None:
    """Which of the coming saves, from 1, does not fit. What lies there goes, oldest first, as new ones are published."""
    held = list(lying)
    steady = len(lying) + saves.stay + 1  # from here on each save finds what the one before it found
    for save in range(1, min(steady, left or steady) + 1):
        if free < saves.bytes:
            return save
        held.append(saves.bytes)
        free -= saves.bytes
        while len(held) > saves.stay:
            free += held.pop(0)
    return None


def _save(cfg: Config, newest: int, number: int) -> str:
    every, steps = cfg.checkpoint.every, cfg.budget.steps
    if not every:
        return "the save at the end"
    step = (newest // every + number) * every
    return f"save {number} from now, at step {step if steps is None else min(step, steps)},"


def _half_done(folder: Path) -> list[Path]:
    return [path for pattern in (".step-*.aside", ".step-*.old") for path in folder.glob(pattern)]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
