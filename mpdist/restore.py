"""Finding a checkpoint that can be trusted, and loading it: nothing is opened before its digest has matched.

Whoever can write a checkpoint can write its manifest too, so digests find accidents; that nothing in a checkpoint is run
is held by how it is opened (tensor_files).

The digests are computed by all ranks together, each its share of the files. A checkpoint fits a run if names, shapes and
dtypes agree in both directions; the number of ranks, the engine and its stage may be others than those that saved it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpdist.checkpoint import tensors, together
from mpdist.errors import CheckpointError
from mpdist.optim import Optimizer
from mpdist.shard import Engine
from mpdist.shelf import MANIFEST, published, read_manifest

_STATE = "state.json"
_TENSORS = "tensors"
_TABLE = f"{_TENSORS}/.metadata"


@dataclass(frozen=True)
class Found:
    """A checkpoint whose files match its manifest."""

    path: Path
    step: int
    state: dict[str, Any]


def fault_in(path: Path, part: int = 0, parts: int = 1) -> str | None:
    """The name of the file that keeps a checkpoint from being trusted, and why; None if all is well.

    part of parts: digest only this share of the files. Nothing is opened but the manifest and bytes to be digested, and
    the table of tensors once its own digest has matched.
    """
    from mpdist.tensor_files import fault_in_table

    if not path.is_dir():
        return "it is no folder"
    try:
        listed = read_manifest(path)["files"]
        present = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()} - {MANIFEST}
        for name in sorted(present ^ {*listed, _STATE, _TABLE}):
            return f"{name} is {'not in the manifest' if name in present else 'missing'}"
        for name in sorted(listed)[part::parts]:
            with (path / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != listed[name]["bytes"]:
                    return f"{name} has {size} bytes, not {listed[name]['bytes']}"
                if hashlib.file_digest(file, "sha256").hexdigest() != listed[name]["sha256"]:
                    return f"{name} was altered: its SHA-256 is not the manifest's"
            if name == _TABLE and (wrong := fault_in_table(path / _TENSORS)) is not None:
                return f"{name} {wrong}"
    except CheckpointError as error:
        return error.what
    except OSError as error:
        return f"{os.path.relpath(error.filename or path, path)} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be used: {error}"
    return None


def fault_together(path: Path) -> str | None:
    """Collective. As `fault_in`, each rank digesting its share; all get the same answer."""
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault_in(path, dist.get_rank(), dist.get_world_size()))
    return next((fault for fault in faults if fault is not None), None)


def open_checked(path: Path, check: Callable[[Path], str | None] = fault_in) -> Found:
    """The checkpoint at `path`, all its files checked. Raises CheckpointError naming the file that is wrong."""
    wrong = check(path)
    if wrong is not None:
        raise CheckpointError(f"{path} cannot be trusted: {wrong}", "it was torn by a crash or altered",
                              "use another checkpoint")  # fmt: skip
    return _open(path)


def _open(path: Path) -> Found:
    state = json.loads((path / _STATE).read_text())
    return Found(path, state["step"], state)


def candidates(folder: Path) -> list[Path]:
    """The published checkpoints of a run, newest first."""
    return published(folder)[::-1]


def newest(
    paths: list[Path], refused: Callable[[str, str], None], check: Callable[[Path], str | None] = fault_in
) -> Found | None:
    """The first of the checkpoints that is whole. refused(checkpoint, fault) is told of each passed over.

    Raises CheckpointError where there are checkpoints and none is whole.
    """
    for path in paths:
        wrong = check(path)
        if wrong is None:
            return _open(path)
        refused(path.name, wrong)
    if paths:
        raise CheckpointError(f"none of the {len(paths)} checkpoints in {paths[0].parent} is whole",
                              "each has a torn or altered file",
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

    from mpdist.tensor_files import Reader

    wanted = tensors(engine, optimizer, module)
    reader = Reader(found.path / _TENSORS)
    _compare(found, wanted, reader.read_metadata().state_dict_metadata)
    together(lambda: dcp.load(wanted, storage_reader=reader, process_group=group), f"loading {found.path.name}", group)
    for part, param in zip(optimizer.parts, optimizer.params, strict=True):
        if param.numel() or part.shape:
            optimizer.adam.state[param]["step"].fill_(found.state["step"])
    engine.refresh()
    return all(together(lambda: _load_rng(found.path), f"loading {found.path.name}", group))


def _compare(found: Found, wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    missing, unknown = sorted(set(wanted) - set(stored)), sorted(set(stored) - set(wanted))
    shapes = [
        f"{name} is {list(stored[name].size)} there and {list(tensor.size())} here"
        for name, tensor in wanted.items()
        if name in stored and tuple(stored[name].size) != tuple(tensor.size())
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
