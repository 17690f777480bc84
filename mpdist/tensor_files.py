"""A checkpoint's `tensors/` folder: written one tensor at a time, and opened without running anything that is in it.

The format is that of torch.distributed.checkpoint: one file of tensors a rank, and `.metadata`, which says what is
where. That one is a pickle, and a pickle can run any command when it is opened, so here it may name nothing but the few
classes that make up such a table. Tensors are read by `torch.load` with `weights_only=True`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mpdist.errors import CheckpointError

TABLE = ".metadata"


class Writer(FileSystemWriter):
    """torch's own keeps a copy in host memory of all that is not on the host, or only a part of it, until the file is closed."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results = []
        with (Path(self.path) / name).open("wb") as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                tensor = tensor.detach().cpu()
                if (
                    tensor.untyped_storage().nbytes() != tensor.nbytes
                ):  # rows of a larger one, which would be written whole
                    tensor = tensor.clone()
                begin = file.tell()
                torch.save(tensor, file)
                size = file.tell() - begin
                results.append(WriteResult(item.index, size, _StorageInfo(name, begin, size)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class Reader(FileSystemReader):
    """Raises CheckpointError, in `read_metadata`, for a table that cannot be read or names what it may not."""

    _table: Metadata | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        if self._table is None:
            path = Path(self.path) / TABLE
            try:
                with path.open("rb") as file:
                    self._table = table_of(_Unpickler(file).load())
            except Exception as error:  # a pickle that is none fails in many ways
                raise CheckpointError(f"{path} {_why(error)}", "opening what else it names could run a command",
                                      "use another checkpoint") from error  # fmt: skip
        return self._table

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError:  # torch's own text advises to open it all the same
            raise CheckpointError(f"{self.path} holds something else than tensors", "opening it could run a command",
                                  "use another checkpoint") from None  # fmt: skip


def fault_in_table(folder: Path) -> str | None:
    """Why the table of a `tensors/` folder cannot be used; None if it can."""
    try:
        Reader(folder).read_metadata()
    except CheckpointError as error:
        return _why(error.__cause__)
    return None


class _Foreign(ValueError):
    """What a table has that belongs in none."""


def _why(error: BaseException | None) -> str:
    return str(error) if isinstance(error, _Foreign) else f"cannot be read: {type(error).__name__}: {error}"


def table_of(loaded: Any) -> Metadata:
    """`loaded`, if it is a table of tensors in files of its own folder. Raises ValueError for anything else."""
    if not isinstance(loaded, Metadata):
        raise _Foreign(f"holds a {type(loaded).__name__} instead of a table of tensors")
    for name, entry in loaded.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):  # other entries would be unpickled without a check
            raise _Foreign(f"says that {name} is no tensor")
    for place in loaded.storage_data.values():
        if Path(place.relative_path).name != place.relative_path or place.transform_descriptors:
            raise _Foreign(f"names {place.relative_path}, which is no plain file of its folder")
    if loaded.storage_meta is None:
        loaded.storage_meta = StorageMeta()
    return loaded


def _member(kind: Any, name: str) -> Any:
    """In the place of `getattr`, by which some versions of Python pickle the members of an Enum."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise _Foreign(f"names {name} of {kind}, and a table of tensors needs none")
    return kind[name]


_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),  # the second is Python 3.13's
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise _Foreign(f"names {module}.{name}, which no table of tensors needs")
