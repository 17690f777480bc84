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
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpdist.errors import CheckpointError
from mpdist.lines import dump, sync_folder, write_atomic, written_openly
from mpdist.model import persistent_buffers
from mpdist.optim import Optimizer
from mpdist.shard import Engine, Part

MANIFEST = "manifest.json"
_NAME = "step-{:08d}"


def name_of(step: int) -> str:
    return _NAME.format(step)


# -- what is saved ----------------------------------------------------------------------------------------------------


class Piece(torch.Tensor):
    """A local tensor that says where in the whole it belongs, in the way that torch.distributed.checkpoint asks.

    A DTensor would tie the copy that is being written to the device and the process groups of the original.
    """

    whole: torch.Size
    offsets: torch.Size

    @staticmethod
    def of(part: Part, local: torch.Tensor) -> Piece:
        piece = local.detach().as_subclass(Piece)
        piece.whole = torch.Size(part.shape)
        piece.offsets = torch.Size([part.start, *[0] * (len(part.shape) - 1)]) if part.shape else torch.Size([])
        return piece

    def plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def size(self, dim: int | None = None) -> Any:
        return self.whole if dim is None else self.whole[dim]

    def _chunk(self) -> Any:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return ChunkStorageMetadata(offsets=self.offsets, sizes=self.plain().size())

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if not self.plain().numel():
            return []
        data = TensorWriteData(self._chunk(), TensorProperties.create_from_tensor(self.plain()), self.whole)
        return [WriteItem(MetadataIndex(fqn, self.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[Any]:
        return [self._chunk()] if self.plain().numel() else []

    def __get_tensor_shard__(self, _: Any) -> torch.Tensor:
        return self.plain()


def tensors(engine: Engine, optimizer: Optimizer, module: nn.Module) -> dict[str, torch.Tensor]:
    """name -> tensor to save or to load into: masters and moments as pieces, persistent buffers whole."""
    state: dict[str, torch.Tensor] = {}
    index = {part.name: i for i, part in enumerate(optimizer.parts)}
    for part in engine.parts:
        state[f"model.{part.name}"] = Piece.of(part, part.tensor)
        if part.trainable:
            moments = optimizer.moments(index[part.name])
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{key}.{part.name}"] = Piece.of(part, moments[key])
    state.update({f"buffer.{name}": buffer for name, buffer in persistent_buffers(module)})
    return state


@dataclass
class Snapshot:
    """What one rank has to write of one moment. tensors: live ones, or copies on the host that training leaves alone."""

    tensors: dict[str, torch.Tensor]
    rng: dict[str, torch.Tensor]
    state: dict[str, Any]


def rng_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


# -- agreement --------------------------------------------------------------------------------------------------------


def together(act: Callable[[], Any], what: str, group: dist.ProcessGroup | None) -> list[Any]:
    """Collective. Runs `act` on each rank and returns all results; if any rank failed, all raise the same error."""
    try:
        outcome: tuple[Any, str | None, bool] = act(), None, False
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        outcome = None, f"{type(error).__name__}: {error}", full
    except BaseException as error:  # torch.distributed.checkpoint raises outside Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        root = _root(error)
        outcome = None, f"{type(error).__name__}: {root}", any(sign in root for sign in ("pos", "ENOSPC", "Errno 28"))
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, outcome, group=group)
    for rank, (_, message, full) in enumerate(results):
        if message is not None:
            why = "the disk is full or a quota is reached" if full else ""
            failure = CheckpointError(f"{what} failed on rank {rank}: {message}", why,
                                      "make space and launch again; the checkpoint before this one is untouched")  # fmt: skip
            failure.shared = dist.get_rank() != rank
            raise failure
    return [value for value, _, _ in results]


def _root(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    return "; ".join(dict.fromkeys(str(value[0]) for value in failures.values())) if failures else str(error)


# -- saving -----------------------------------------------------------------------------------------------------------


def write(
    folder: Path,
    snapshot: Snapshot,
    *,
    hf: Path | None,
    group: dist.ProcessGroup | None = None,
    fault: Callable[[], None] = lambda: None,
    written: Callable[[], None] = lambda: None,
) -> tuple[Path, int]:
    """Collective over `group`. Writes and publishes a checkpoint in `folder`; returns its path and its bytes.

    hf: folder with the model's config and tokenizer to put beside. fault: a drill. written: told, on every rank, when
    all files are on disk and digested. Raises CheckpointError on all ranks alike; nothing half-written is left and
    `latest` stays.
    """
    import torch.distributed.checkpoint as dcp

    rank, ranks = dist.get_rank(), dist.get_world_size()
    step = snapshot.state["step"]
    final, aside = folder / name_of(step), folder / f".{name_of(step)}.aside"

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            (aside / "rng").mkdir(parents=True)
            if hf is not None:
                shutil.copytree(hf, aside / "hf")

    def write_own() -> None:
        from safetensors.torch import save_file

        fault()
        rng = aside / "rng" / f"{rank:05d}.safetensors"
        written_openly(rng, lambda: save_file(snapshot.rng, rng))
        if rank == 0:
            (aside / "state.json").write_text(dump(snapshot.state) + "\n")

    def write_tensors() -> None:
        writer = dcp.FileSystemWriter(aside / "tensors", single_file_per_rank=True, sync_files=True)
        dcp.save(snapshot.tensors, storage_writer=writer, process_group=group)

    what = f"saving {final.name}"
    try:
        together(begin, what, group)
        together(write_own, what, group)
        together(write_tensors, what, group)
        files = sorted(p.relative_to(aside).as_posix() for p in aside.rglob("*") if p.is_file())
        digests = together(lambda: _digests(aside, files[rank::ranks]), what, group)
        written()
        size = together(lambda: _publish(final, aside, digests, snapshot.state) if rank == 0 else 0, what, group)[0]
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
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)  # a kill may have left one, and a folder is not renamed onto another
    if final.exists():  # superseded work of the same step, or one that was found altered
        os.rename(final, old)
    os.rename(aside, final)
    sync_folder(final.parent)
    write_atomic(final.parent / "latest", final.name + "\n")
    shutil.rmtree(old, ignore_errors=True)
    return sum(size for size, _ in listed.values())


def mark_best(folder: Path, step: int) -> None:
    write_atomic(folder / "best", name_of(step) + "\n")


def published(folder: Path) -> list[Path]:
    """The run's own checkpoints, oldest first. What else lies there (`step-final`, a copy) is somebody's, not ours."""
    names = [p.name for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
    steps = sorted(int(name[5:]) for name in names if re.fullmatch(r"step-[0-9]{8,}", name))
    return [folder / name_of(step) for step in steps if name_of(step) in names]


def prune(folder: Path, keep: int) -> list[str]:
    """Removes all but the `keep` newest checkpoints and those that `latest` and `best` name. Rank 0 only, and only
    while no save is under way: what earlier saves left half-done goes too."""
    held = {(folder / pointer).read_text().strip() for pointer in ("latest", "best") if (folder / pointer).exists()}
    for pattern in (".step-*.aside", ".step-*.old"):
        for left in folder.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)
    names = [path.name for path in published(folder)]
    gone = [name for name in names[:-keep] if name not in held]
    for name in gone:
        shutil.rmtree(folder / name)
    return gone
