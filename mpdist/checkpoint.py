"""Checkpoints: sharded, whole or not there, and never opened before their digests match.

A checkpoint is a folder `step-00000100/`. It is written aside (`.step-00000100.aside/`), every file is flushed to disk
and listed with its size and SHA-256 in `manifest.json`, written last; then rank 0 renames the folder and moves `latest`.
Tensors are written by torch.distributed.checkpoint under the plain model's parameter names; its metadata is a pickle,
so nothing of a checkpoint is opened before the manifest has been checked against the files.

    what                                         kept where                      by
    masters, moments                             tensors/*.distcp                each rank its share
    frozen parameters, persistent buffers        tensors/*.distcp                shared out over ranks
    step, attempt, scale, counters, data position, clocks, drills, W&B id  state.json    rank 0
    random number generators (CPU, device)       rng/00000.safetensors ...       each rank its own
    model config, tokenizer files                hf/                             rank 0
    not kept: gradients, working copies, buffers in no state dict (made anew from masters and config)
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpdist.errors import CheckpointError
from mpdist.lines import dump, write_atomic
from mpdist.model import persistent_buffers
from mpdist.optim import Optimizer
from mpdist.shard import Engine

MANIFEST = "manifest.json"
_NAME = "step-{:08d}"


@dataclass(frozen=True)
class Found:
    """A checkpoint whose files match its manifest."""

    path: Path
    step: int
    state: dict[str, Any]


def name_of(step: int) -> str:
    return _NAME.format(step)


# -- what is saved ----------------------------------------------------------------------------------------------------


def tensors(engine: Engine, optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """name -> tensor to save or to load into, as torch.distributed.checkpoint takes it (DTensors where sharded)."""
    state: dict[str, Any] = {}
    index = {part.name: i for i, part in enumerate(optimizer.parts)}
    for part in engine.parts:
        state[f"model.{part.name}"] = engine.dtensor(part, part.tensor)
        if part.trainable:
            moments = optimizer.moments(index[part.name])
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{key}.{part.name}"] = engine.dtensor(part, moments[key])
    state.update({f"buffer.{name}": buffer for name, buffer in persistent_buffers(module)})
    return state


def _rng() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


# -- agreement --------------------------------------------------------------------------------------------------------


def _together(act: Callable[[], Any], what: str, group: dist.ProcessGroup | None) -> list[Any]:
    """Collective. Runs `act` on each rank and returns all results; if any rank failed, all raise the same error."""
    try:
        outcome: tuple[Any, str | None, bool] = act(), None, False
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        outcome = None, f"{type(error).__name__}: {error}", full
    except BaseException as error:  # torch.distributed.checkpoint raises outside Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        outcome = None, f"{type(error).__name__}: {_root(error)}", "pos" in _root(error) or "ENOSPC" in _root(error)
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, outcome, group=group)
    for rank, (_, message, full) in enumerate(results):
        if message is not None:
            why = "the disk is full or a quota is reached" if full else message
            raise CheckpointError(f"{what} failed on rank {rank}: {message}", why,
                                  "make space and launch again; the checkpoint before this one is untouched")  # fmt: skip
    return [value for value, _, _ in results]


def _root(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    return "; ".join(str(value[0]) for value in failures.values()) if failures else str(error)


# -- saving -----------------------------------------------------------------------------------------------------------


def save(
    folder: Path,
    step: int,
    engine: Engine,
    optimizer: Optimizer,
    module: nn.Module,
    state: dict[str, Any],
    *,
    hf: Path | None,
    group: dist.ProcessGroup | None = None,
    fault: Callable[[], None] = lambda: None,
) -> tuple[Path, int]:
    """Collective. Writes and publishes the checkpoint of `step` in `folder`; returns its path and its bytes.

    state: JSON values, of rank 0. hf: folder with the model's config and tokenizer to put beside. fault: a drill.
    Raises CheckpointError on all ranks alike; nothing half-written is left and `latest` stays.
    """
    import torch.distributed.checkpoint as dcp

    rank = dist.get_rank()
    final, aside = folder / name_of(step), folder / f".{name_of(step)}.aside"
    contents = tensors(engine, optimizer, module)

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            (aside / "rng").mkdir(parents=True)
            if hf is not None:
                shutil.copytree(hf, aside / "hf")

    def write_own() -> None:
        from safetensors.torch import save_file

        fault()
        save_file(_rng(), aside / "rng" / f"{rank:05d}.safetensors")
        if rank == 0:
            (aside / "state.json").write_text(dump(state) + "\n")

    def write_tensors() -> None:
        writer = dcp.FileSystemWriter(aside / "tensors", single_file_per_rank=True, sync_files=True)
        dcp.save(contents, storage_writer=writer, process_group=group)

    what = f"saving {final.name}"
    try:
        _together(begin, what, group)
        _together(write_own, what, group)
        _together(write_tensors, what, group)
        files = sorted(p.relative_to(aside).as_posix() for p in aside.rglob("*") if p.is_file())
        digests = _together(lambda: _digests(aside, files[rank :: dist.get_world_size()]), what, group)
        size = _together(lambda: _publish(final, aside, digests, state) if rank == 0 else 0, what, group)[0]
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return final, size


def _digests(folder: Path, files: list[str]) -> dict[str, tuple[int, str]]:
    """name -> (bytes, SHA-256), each file flushed to disk before."""
    result = {}
    for name in files:
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            result[name] = (file.tell(), digest)
    return result


def _publish(final: Path, aside: Path, digests: list[dict[str, tuple[int, str]]], state: dict[str, Any]) -> int:
    listed = {name: entry for part in digests for name, entry in part.items()}
    manifest = {
        "format": 1,
        "step": state["step"],
        "world": dist.get_world_size(),
        "config_digest": state["config_digest"],
        "versions": state["versions"],
        "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(listed.items())},
    }
    write_atomic(aside / MANIFEST, dump(manifest, indent=1) + "\n")
    if final.exists():  # superseded work of the same step
        shutil.rmtree(final)
    os.rename(aside, final)
    write_atomic(final.parent / "latest", final.name + "\n")
    return sum(size for size, _ in listed.values())


def mark_best(folder: Path, step: int) -> None:
    write_atomic(folder / "best", name_of(step) + "\n")


def prune(folder: Path, keep: int) -> list[str]:
    """Removes all but the `keep` newest checkpoints and those that `latest` and `best` name. Rank 0 only."""
    held = {(folder / pointer).read_text().strip() for pointer in ("latest", "best") if (folder / pointer).exists()}
    names = sorted(p.name for p in folder.glob("step-*") if p.is_dir())
    gone = [name for name in names[:-keep] if name not in held]
    for name in gone:
        shutil.rmtree(folder / name)
    return gone


# -- finding and loading ----------------------------------------------------------------------------------------------


def fault_in(path: Path) -> str | None:
    """The name of the file that keeps a checkpoint from being trusted, and why; None if all is well."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        listed = manifest["files"]
        present = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()} - {MANIFEST}
        for name in sorted(present ^ set(listed)):
            return f"{name} is {'not in the manifest' if name in present else 'missing'}"
        for name, entry in listed.items():
            with (path / name).open("rb") as file:
                if os.fstat(file.fileno()).st_size != entry["bytes"]:
                    return f"{name} has {os.fstat(file.fileno()).st_size} bytes, not {entry['bytes']}"
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    return f"{name} was altered: its SHA-256 is not the manifest's"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST}: {error}"
    return None


def open_checked(path: Path) -> Found:
    """The checkpoint at `path`, all its files checked. Raises CheckpointError naming the file that is wrong."""
    wrong = "it is no folder" if not path.is_dir() else fault_in(path)
    if wrong is not None:
        raise CheckpointError(f"{path} cannot be trusted: {wrong}", "it was torn by a crash or altered",
                              "use another checkpoint")  # fmt: skip
    state = json.loads((path / "state.json").read_text())
    return Found(path, state["step"], state)


def newest(folder: Path, refused: Callable[[str, str], None]) -> Found | None:
    """The newest checkpoint in `folder` that is whole. refused(checkpoint, fault) is told of each passed over.

    Raises CheckpointError where there are checkpoints and none is whole.
    """
    names = sorted((p.name for p in folder.glob("step-*") if p.is_dir()), reverse=True) if folder.is_dir() else []
    for name in names:
        wrong = fault_in(folder / name)
        if wrong is None:
            return open_checked(folder / name)
        refused(name, wrong)
    if names:
        raise CheckpointError(f"none of the {len(names)} checkpoints in {folder} is whole", "each has a torn or altered file",
                              "restore one from a copy, or start a new run under another name")  # fmt: skip
    return None


def load(
    found: Found, engine: Engine, optimizer: Optimizer, module: nn.Module, group: dist.ProcessGroup | None = None
) -> bool:
    """Collective. Masters, moments, buffers and this rank's random number generators become those of the checkpoint.

    Returns whether every rank found its own generators (False after a change of the number of ranks). Raises
    CheckpointError naming tensors that are missing, unknown or of another shape.
    """
    import torch.distributed.checkpoint as dcp

    wanted = tensors(engine, optimizer, module)
    reader = dcp.FileSystemReader(found.path / "tensors")
    _compare(found, wanted, reader.read_metadata().state_dict_metadata)
    _together(lambda: dcp.load(wanted, storage_reader=reader, process_group=group), f"loading {found.path.name}", group)
    for part, param in zip(optimizer.parts, optimizer.params, strict=True):
        if param.numel() or part.shape:
            optimizer.adam.state[param]["step"].fill_(found.state["step"])
    engine.refresh()
    return all(_together(lambda: _load_rng(found.path), f"loading {found.path.name}", group))


def _compare(found: Found, wanted: dict[str, Any], stored: dict[str, Any]) -> None:
    missing, unknown = sorted(set(wanted) - set(stored)), sorted(set(stored) - set(wanted))
    shapes = [
        f"{name} is {list(stored[name].size)} there and {list(tensor.shape)} here"
        for name, tensor in wanted.items()
        if name in stored and tuple(stored[name].size) != tuple(tensor.shape)
    ]
    dtypes = [
        f"{name} is {stored[name].properties.dtype} there and {tensor.dtype} here"
        for name, tensor in wanted.items()
        if name in stored and stored[name].properties.dtype != tensor.dtype
    ]
    problems = [f"{n} is missing" for n in missing] + [f"{n} is not in this model" for n in unknown] + shapes + dtypes
    if problems:
        raise CheckpointError(
            f"{found.path} does not fit this model: " + "; ".join(problems[:8]) + (" ..." if len(problems) > 8 else ""),
            f"{len(problems)} tensors differ",
            "resume with the model that the checkpoint was saved from",
        )


def _load_rng(path: Path) -> bool:
    from safetensors.torch import load_file

    own = path / "rng" / f"{dist.get_rank():05d}.safetensors"
    count = len(list((path / "rng").iterdir()))
    if not own.exists() or count != dist.get_world_size():
        return False
    states = load_file(own)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    return True
