"""A checkpoint becomes a folder that `from_pretrained` loads: one tensor at a time, in the dtype asked for.

The folder appears by a rename, whole. Tied weights are written once, as the model's own names have them; the config
says the dtype that is stored; cache settings and everything else in it are those of the model that the run started from.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from mpdist.checkpoint import root_of
from mpdist.errors import CheckpointError, UsageError
from mpdist.lines import written_openly
from mpdist.precision import DTYPES
from mpdist.restore import Found, candidates, newest, open_checked

_SHARD_BYTES = 4 * 10**9  # of the files written, and the most that is held in memory at once


def run(source: str, folder: str, dtype: str | None = None) -> int:
    """Exports a checkpoint, or a run's newest whole one. dtype: fp32, bf16, fp16, or None for the start model's own.

    Raises UsageError for a source that is none or a folder that exists, CheckpointError where it cannot be trusted.
    """
    found = _find(Path(source))
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(
            f"{target} exists", "an export never writes over anything", "give a new folder, or remove that one"
        )
    config = json.loads((found.path / "hf" / "config.json").read_text())
    stored = (
        DTYPES[dtype] if dtype else getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    )
    aside = target.with_name(f".{target.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        shutil.copytree(found.path / "hf", aside)
        config["dtype"] = str(stored).removeprefix("torch.")
        config.pop("torch_dtype", None)
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        count = _write(found, aside, stored)
        if target.exists():
            target.rmdir()
        os.rename(aside, target)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UsageError(f"{target} cannot be written: {error}", "", "choose another folder or make space") from error
    print(f"{target}: {count:,} parameters in {config['dtype']}, from {found.path} (step {found.step})")
    return 0


def _find(source: Path) -> Found:
    if (source / "checkpoints").is_dir():
        found = newest(
            candidates(source / "checkpoints"), lambda name, fault: print(f"warning: {name} is passed over: {fault}")
        )
        if found is None:
            raise UsageError(f"{source} has no checkpoint yet", "there is nothing to export", "let the run save first")
        return found
    if not source.is_dir():
        raise UsageError(f"{source} is no folder", "a run directory or a checkpoint is needed", "check the path")
    return open_checked(source)


def _write(found: Found, folder: Path, dtype: torch.dtype) -> int:
    """Writes safetensors files of at most `_SHARD_BYTES` and their index; returns the number of elements of parameters."""
    from safetensors.torch import save_file

    from mpdist.tensor_files import Reader

    reader = Reader(found.path / "tensors")
    names = {
        name.partition(".")[2]: name
        for name in reader.read_metadata().state_dict_metadata
        if name.startswith(("model.", "buffer."))
    }
    shards: list[dict[str, torch.Tensor]] = [{}]
    held, total, elements = 0, 0, 0
    files: list[Path] = []
    weight_map: dict[str, str] = {}
    for name, stored_name in sorted(names.items()):
        tensor = read_tensor(reader, stored_name)
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"{name} holds non-finite values in {found.path}", "the model would be useless", "use an earlier checkpoint"
            )  # fmt: skip
        if tensor.is_floating_point() and stored_name.startswith("model."):
            elements += tensor.numel()
            tensor = _cast(name, tensor, dtype)
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and held + size > _SHARD_BYTES:
            files.append(_flush(shards[-1], folder, len(files), save_file))
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        weight_map[name] = str(len(files))
        held, total = held + size, total + size
    files.append(_flush(shards[-1], folder, len(files), save_file))
    _name(files, weight_map, total, folder)
    return elements


def _flush(shard: dict[str, torch.Tensor], folder: Path, number: int, save_file: Any) -> Path:
    path = folder / f"part-{number:05d}.safetensors"
    written_openly(path, lambda: save_file(shard, path, metadata={"format": "pt"}))
    shard.clear()
    return path


def _name(files: list[Path], weight_map: dict[str, str], total: int, folder: Path) -> None:
    """The names that transformers looks for: one file, or a numbered set with an index."""
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
        return
    final = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for path, name in zip(files, final, strict=True):
        path.rename(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": {n: final[int(i)] for n, i in weight_map.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def read_tensor(reader: Any, name: str) -> torch.Tensor:
    """One whole tensor of a checked checkpoint, on the CPU."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    entry = reader.read_metadata().state_dict_metadata[name]
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():  # that there is no process group is what is meant
        warnings.simplefilter("ignore", UserWarning)
        try:
            dcp.load({name: tensor}, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise CheckpointError(f"{name} cannot be read: {root_of(error)}", "", "use another checkpoint") from error
    return tensor


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = tensor.to(dtype)
    if not torch.isfinite(cast).all():
        raise UsageError(f"{name} holds {tensor.abs().max().item():g}, which {str(dtype).removeprefix('torch.')} cannot",
                         "the export would hold infinite weights", "export with --dtype bf16 or fp32")  # fmt: skip
    return cast
