"""The folder of a run's checkpoints: their names, what each says of itself, and which ones stay."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mpdist.errors import CheckpointError
from mpdist.lines import dump, number, read_lines, write_atomic

MANIFEST = "manifest.json"
FORMAT = 2
_NAME = "step-{:08d}"


def name_of(step: int) -> str:
    return _NAME.format(step)


def step_of(name: str) -> int | None:
    """The step that a checkpoint's folder is named after; None for names that no checkpoint of ours has."""
    step = int(name[5:]) if re.fullmatch(r"step-[0-9]{8,}", name) else None
    return step if step is not None and name_of(step) == name else None


def remove(path: Path) -> None:
    """Whatever it is; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


# -- the manifest -----------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, values: dict[str, Any]) -> None:
    """Written whole or not at all. It ends with a digest of itself."""
    write_atomic(folder / MANIFEST, dump({**values, "sha256": _seal(values)}, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises CheckpointError where that cannot be used."""
    try:
        values = json.loads((folder / MANIFEST).read_bytes())
        form, seal, step = values.get("format"), values.pop("sha256", None), values.get("step")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be used: {error}") from error
    if form != FORMAT:
        raise CheckpointError(f"{MANIFEST} has format {form}, and this version of mpdist reads {FORMAT}")
    if seal != _seal(values):
        raise CheckpointError(f"{MANIFEST} was altered: it does not match the SHA-256 that it ends with")
    if step_of(folder.name) not in (step, None):
        raise CheckpointError(f"{MANIFEST} is that of {name_of(step)}, so this folder was renamed or mixed from two")
    return dict(values)


def _seal(values: dict[str, Any]) -> str:
    return hashlib.sha256(dump(values).encode()).hexdigest()


# -- which ones stay --------------------------------------------------------------------------------------------------


def published(folder: Path) -> list[Path]:
    """The run's own checkpoints, oldest first. What else lies there (`step-final`, a copy) is somebody's, not ours."""
    paths = folder.iterdir() if folder.is_dir() else ()
    steps = sorted(step for path in paths if path.is_dir() and (step := step_of(path.name)) is not None)
    return [folder / name_of(step) for step in steps]


def evaluated(folder: Path, step: int, loss: float) -> None:
    """Notes the loss of an evaluation that was made after the checkpoint of the same step."""
    path = folder / name_of(step)
    write_manifest(path, {**read_manifest(path), "eval_loss": loss})


def damaged(events: Path) -> set[str]:
    """The checkpoints that a run's events say were refused, without those that were saved anew or loaded since."""
    found: set[str] = set()
    for event in read_lines(events) if events.exists() else ():
        if event.get("event") == "refused":
            found.add(str(event.get("checkpoint")))
        elif event.get("event") == "save" and event.get("reason") == "published":
            found.discard(str(event.get("checkpoint")))
        elif event.get("event") == "load":  # somebody has put its files back
            found.discard(Path(str(event.get("reason"))).name)
    return found


def retain(folder: Path, step: int, keep: int, keep_best: int, refused: Collection[str] = ()) -> list[str]:
    """Moves `best`, then removes all but the `keep` newest checkpoints and the `keep_best` of lowest evaluation loss;
    returns what it removed. Rank 0 only, once the checkpoint of `step` is published and while no save is under way.

    All is found anew from what lies there, so what a kill left undone is done by the next save. A checkpoint that does
    not know itself counts for neither, nor does one of `refused`, known to be damaged: both go once `keep` that count are
    newer. Those behind `step`, which a resume has passed over, neither count nor go.
    """
    there = [path for path in published(folder) if (step_of(path.name) or 0) <= step]
    losses: dict[Path, float] = {}
    for path in there:
        if path.name in refused:
            continue
        with contextlib.suppress(CheckpointError):
            loss = number(read_manifest(path)["eval_loss"])
            losses[path] = math.inf if loss is None or math.isnan(loss) else loss
    newest = [path for path in there if path in losses][-keep:]
    ranked = sorted((path for path in losses if math.isfinite(losses[path])), key=lambda path: losses[path])
    kept = {*newest, *ranked[:keep_best], folder / name_of(step)}
    best = next((path for path in ranked if path in kept), None)
    if best is not None:
        write_atomic(folder / "best", best.name + "\n")
    else:
        (folder / "best").unlink(missing_ok=True)
    older = there[: there.index(newest[0])] if len(newest) == keep else []
    gone = [path for path in there if path not in kept and (path in losses or path in older)]
    for path in gone:  # by a rename first: half of a checkpoint must not look like one
        with contextlib.suppress(OSError):  # still in somebody's use; the next save tries again
            os.rename(path, path.with_name(f".{path.name}.old"))
    clear(folder)
    return [path.name for path in gone]


def clear(folder: Path) -> None:
    """Removes what saves have left half-done. Rank 0 only, and only while no save is under way."""
    for pattern in (".step-*.aside", ".step-*.old"):
        for left in folder.glob(pattern):
            remove(left)
