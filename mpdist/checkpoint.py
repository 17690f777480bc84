"""Checkpoints: sharded, whole or not there, and never opened before their digests match.

A checkpoint is a folder `step-00000100/`. It is written aside (`.step-00000100.aside/`), every file is flushed to disk
and listed with its size and SHA-256 in `manifest.json`, written last; then rank 0 renames the folder and moves `latest`.
Tensors are written by torch.distributed.checkpoint under the plain model's parameter names. Nothing of a checkpoint is
opened before the manifest has been checked against the files, and no pickle in it is trusted then (tensor_files).

    what                                         kept where                      by
    masters, moments, frozen parameters          tensors/*.distcp                each rank its share, replicas share rows
    persistent buffers                           tensors/*.distcp                shared out over ranks by rows
    step, attempt, scale, counters, data position, clocks, drills, W&B id  state.json    rank 0
    random number generators (CPU, device)       rng/00000.safetensors ...       each rank its own
    model config, tokenizer files                hf/                             rank 0
    not kept: gradients, working copies, buffers in no state dict (made anew from masters and config)
"""

from __future__ import annotations

import hashlib
import math
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
from mpdist.lines import dump, no_room, sync_folder, write_atomic, written_openly
from mpdist.model import persistent_buffers
from mpdist.optim import Optimizer
from mpdist.shard import Engine, Part
from mpdist.shelf import FORMAT, name_of, remove, write_manifest

# -- what is saved ----------------------------------------------------------------------------------------------------


class Piece(torch.Tensor):
    """A local tensor that says where in the whole it belongs, in the way that torch.distributed.checkpoint asks.

    A DTensor would tie the copy that is being written to the device and the process groups of the original.
    """

    whole: torch.Size
    begin: int

    @staticmethod
    def of(local: torch.Tensor, whole: tuple[int, ...], begin: int = 0) -> Piece:
        """`local` holds the elements of a tensor of the shape `whole` from `begin` on, counted row after row."""
        piece = local.detach().as_subclass(Piece)
        piece.whole, piece.begin = torch.Size(whole), begin
        return piece

    @staticmethod
    def of_part(part: Part, local: torch.Tensor) -> Piece:
        return Piece.of(local, part.shape, part.start if part.flat else part.start * math.prod(part.shape[1:]))

    def plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def like(self, local: torch.Tensor) -> Piece:
        """Another tensor in the place of this one."""
        return Piece.of(local, self.whole, self.begin)

    def share(self, index: int, count: int) -> Piece:
        """The rows that one of `count` ranks writes, all of which hold this piece. May be none."""
        plain = self.plain()
        if count == 1:
            return self
        if not self.whole:
            return Piece.of(plain if index == 0 else plain.new_empty(0), ())
        begin, end = (len(plain) * i // count for i in (index, index + 1))
        return Piece.of(plain[begin:end], self.whole, self.begin + begin * math.prod(plain.shape[1:]))

    def size(self, dim: int | None = None) -> Any:
        return self.whole if dim is None else self.whole[dim]

    def _chunks(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        boxes = _boxes(self.whole, self.begin, self.plain().numel())
        return [ChunkStorageMetadata(offsets=torch.Size(where), sizes=torch.Size(size)) for where, size in boxes]

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        kind = TensorProperties.create_from_tensor(self.plain())
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, kind, self.whole),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        return self._chunks()

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        flat, at = self.plain().view(-1), 0
        for chunk in self._chunks():
            end = at + math.prod(chunk.sizes)
            if chunk.offsets == index.offset:
                return flat[at:end].view(chunk.sizes)
            at = end
        raise ValueError(f"no piece of {index.fqn} begins at {index.offset}")


Box = tuple[tuple[int, ...], tuple[int, ...]]  # where in the whole it begins, and its size, in each dimension


def _boxes(shape: tuple[int, ...], begin: int, count: int) -> list[Box]:
    """`count` elements from `begin` on, counted row after row, as boxes in that order: checkpoints hold boxes only."""
    if count == 0:
        return []
    if len(shape) < 2:
        return [((begin,), (count,)) if shape else ((), ())]
    row = math.prod(shape[1:])
    first, inside = divmod(begin, row)
    boxes: list[Box] = []
    if inside or count < row:  # a part of a row, cut in the same way
        head = min(row - inside, count)
        boxes = [((first, *where), (1, *size)) for where, size in _boxes(shape[1:], inside, head)]
        first, count = first + 1, count - head
    if count >= row:
        boxes.append(((first, *[0] * (len(shape) - 1)), (count // row, *shape[1:])))
        first, count = first + count // row, count % row
    return boxes + [((first, *where), (1, *size)) for where, size in _boxes(shape[1:], 0, count)]


def tensors(engine: Engine, optimizer: Optimizer, module: nn.Module) -> dict[str, Piece]:
    """name -> what this rank holds of it, to be loaded into: masters, moments, frozen parameters, persistent buffers."""
    state: dict[str, Piece] = {}
    index = {part.name: i for i, part in enumerate(optimizer.parts)}
    for part in engine.parts:
        state[f"model.{part.name}"] = Piece.of_part(part, part.tensor)
        if part.trainable:
            moments = optimizer.moments(index[part.name])
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{key}.{part.name}"] = Piece.of_part(part, moments[key])
    state.update({f"buffer.{name}": Piece.of(b, tuple(b.shape)) for name, b in persistent_buffers(module)})
    return state


def own_share(engine: Engine, optimizer: Optimizer, module: nn.Module) -> dict[str, Piece]:
    """name -> what this rank is to save of it, so that all ranks together save everything once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    replica = rank * engine.replicas // ranks  # see mpdist.dist: the ranks of one replica are neighbours
    shares = {
        name: piece.share(rank, ranks) if name.startswith("buffer.") else piece.share(replica, engine.replicas)
        for name, piece in tensors(engine, optimizer, module).items()
    }
    return {name: piece for name, piece in shares.items() if piece.plain().numel()}


@dataclass
class Snapshot:
    """What one rank has to write of one moment. tensors: live ones, or copies on the host that training leaves alone.

    eval_loss: of an evaluation at this very step, if there was one.
    """

    tensors: dict[str, Piece]
    rng: dict[str, torch.Tensor]
    state: dict[str, Any]
    eval_loss: float | None = None


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
        outcome = None, f"{type(error).__name__}: {error}", no_room(error)
    except BaseException as error:  # torch.distributed.checkpoint raises outside Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        root = root_of(error)
        full = any(sign in root for sign in ("unexpected pos", "ENOSPC", "Errno 28"))
        outcome = None, f"{type(error).__name__}: {root}", full
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, outcome, group=group)
    for rank, (_, message, full) in enumerate(results):
        if message is not None:
            why = "the disk is full or a quota is reached" if full else ""
            do = "make space and launch again" if full else "see to that and launch again"
            failure = CheckpointError(f"{what} failed on rank {rank}: {message}", why,
                                      f"{do}; no other checkpoint was touched")  # fmt: skip
            failure.shared = dist.get_rank() != rank
            raise failure
    return [value for value, _, _ in results]


def root_of(error: BaseException) -> str:
    """What lies beneath an error of torch.distributed.checkpoint, which lists each rank's with its traceback."""
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
    published: Callable[[Path, int], None] = lambda _, __: None,
) -> None:
    """Collective over `group`. Writes and publishes a checkpoint in `folder`.

    hf: folder with the model's config and tokenizer to put beside. fault: a drill. Told on rank 0: written, when all
    files are on disk and digested; published(path, bytes), when the checkpoint is there. Raises CheckpointError on all
    ranks alike, for what these two raise as well; nothing half-written is left and `latest` names a whole one.
    """
    import torch.distributed.checkpoint as dcp

    from mpdist.tensor_files import Writer

    rank, ranks = dist.get_rank(), dist.get_world_size()
    step = snapshot.state["step"]
    final, aside = folder / name_of(step), folder / f".{name_of(step)}.aside"

    def begin() -> None:
        if rank == 0:
            remove(aside)
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

    def publish() -> None:
        if rank == 0:
            written()
            published(final, _publish(final, aside, digests, snapshot))

    what = f"saving {final.name}"
    try:
        together(begin, what, group)
        together(write_own, what, group)
        writer = Writer(aside / "tensors")
        together(lambda: dcp.save(snapshot.tensors, storage_writer=writer, process_group=group), what, group)
        files = sorted(p.relative_to(aside).as_posix() for p in aside.rglob("*") if p.is_file())
        digests = together(lambda: _digests(aside, files[rank::ranks]), what, group)
        together(publish, what, group)
    except CheckpointError:
        if rank == 0:
            remove(aside)
        raise


def _digests(folder: Path, files: list[str]) -> dict[str, tuple[int, str]]:
    """name -> (bytes, SHA-256), each file flushed to disk before."""
    result = {}
    for name in files:
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            result[name] = (file.tell(), digest)
    return result


def _publish(final: Path, aside: Path, digests: list[dict[str, tuple[int, str]]], snapshot: Snapshot) -> int:
    """The bytes of the checkpoint that is now there."""
    listed = {name: entry for part in digests for name, entry in part.items()}
    state = snapshot.state
    write_manifest(
        aside,
        {
            "format": FORMAT,
            "step": state["step"],
            "eval_loss": snapshot.eval_loss,
            "world": dist.get_world_size(),
            "config_digest": state["config_digest"],
            "versions": state["versions"],
            "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(listed.items())},
        },
    )
    old = final.with_name(f".{final.name}.old")
    remove(old)  # a kill may have left one, and a folder is not renamed onto another
    if os.path.lexists(final):  # superseded work of the same step, or one that was found altered
        os.rename(final, old)
    os.rename(aside, final)
    sync_folder(final.parent)
    write_atomic(final.parent / "latest", final.name + "\n")
    remove(old)
    return sum(size for size, _ in listed.values())
