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

import contextlib
import hashlib
import json
import math
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
from mpdist.lines import dump, no_room, number, sync_folder, write_atomic, written_openly
from mpdist.model import persistent_buffers
from mpdist.optim import Optimizer
from mpdist.shard import Engine, Part

MANIFEST = "manifest.json"
_FORMAT = 2
_NAME = "step-{:08d}"


def name_of(step: int) -> str:
    return _NAME.format(step)


def step_of(name: str) -> int | None:
    """The step that a checkpoint's folder is named after; None for names that no checkpoint of ours has."""
    step = int(name[5:]) if re.fullmatch(r"step-[0-9]{8,}", name) else None
    return step if step is not None and name_of(step) == name else None


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
            _remove(aside)
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
            _remove(aside)
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
            "format": _FORMAT,
            "step": state["step"],
            "eval_loss": snapshot.eval_loss,
            "world": dist.get_world_size(),
            "config_digest": state["config_digest"],
            "versions": state["versions"],
            "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(listed.items())},
        },
    )
    old = final.with_name(f".{final.name}.old")
    _remove(old)  # a kill may have left one, and a folder is not renamed onto another
    if final.exists():  # superseded work of the same step, or one that was found altered
        os.rename(final, old)
    os.rename(aside, final)
    sync_folder(final.parent)
    write_atomic(final.parent / "latest", final.name + "\n")
    _remove(old)
    return sum(size for size, _ in listed.values())


def _remove(path: Path) -> None:
    """Whatever it is; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
    if form != _FORMAT:
        raise CheckpointError(f"{MANIFEST} has format {form}, and this version of mpdist reads {_FORMAT}")
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


def retain(folder: Path, step: int, keep: int, keep_best: int) -> list[str]:
    """Moves `best`, then removes all but the `keep` newest checkpoints and the `keep_best` of lowest evaluation loss;
    returns what it removed. Rank 0 only, once the checkpoint of `step` is published and while no save is under way.

    All is found anew from what lies there, so what a kill left undone is done by the next save. A checkpoint that does
    not know itself counts for neither; nor do those behind `step`, which a resume has passed over.
    """
    there = [path for path in published(folder) if (step_of(path.name) or 0) <= step]
    losses: dict[Path, float] = {}
    for path in there:
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
    older = there[: there.index(newest[0])] if newest else []
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
            _remove(left)
