"""Small runs for tests: a config written to a folder, sessions of it on some ranks, and what they left behind."""

from __future__ import annotations

import copy
import json
import os
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import worlds

from mpdist.record import read_metrics

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 260, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "the",
    "dog",
    "ran",
    "far",
    "away",
    "from",
    "home",
    "in",
    "the",
    "rain",
]


def write_text(path: Path, records: int, seed: int = 0, longest: int = 20) -> Path:
    """jsonl of short texts of random words; the same file for the same arguments."""
    draw = random.Random(seed)
    lines = [json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(2, longest)))}) for _ in range(records)]
    path.write_text("\n".join(lines) + "\n")
    return path


def config(folder: Path, **changes: Any) -> Path:
    """A config file in `folder` for 8 rows a step of 64 positions; dotted keys change it (`optim__lr=1.0`)."""
    data = folder / "train.jsonl"
    if not data.exists():
        write_text(data, 120)
    values: dict[str, Any] = {
        "name": "run",
        "out_dir": str(folder / "runs"),
        "model": {"config": dict(LLAMA)},
        "data": {"tokenizer": "bytes", "train": [{"path": str(data)}], "seq_len": 64},
        "batch": {"micro": 2, "global": 8},
        "precision": {"compute": "fp32"},
        "shard": {"engine": "fsdp2"},
        "optim": {"lr": 1e-3, "schedule": "linear", "warmup": 0},
        "budget": {"steps": 4},
        "checkpoint": {"every": 0},
        "track": {"every": 1, "wandb": {"mode": "disabled"}},
        "launch": {"device": "cpu", "timeout": "60s"},
    }
    for key, value in changes.items():
        place = values
        *path, last = key.split("__")
        for part in path:
            place = place.setdefault(part, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = copy.deepcopy(value)  # a later key may change a part of it
    path = folder / "config.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    return path


def session(rank: int, path: str, overrides: list[str]) -> tuple[int, str]:
    """One session of a run on this rank: (exit status, message of the error that ended it)."""
    from mpdist.config import load
    from mpdist.errors import MpdistError
    from mpdist.train import run
    from mpdist.worker import Seat
    from mpdist.world import from_env

    world = from_env(os.environ)
    assert world is not None
    try:
        resolved = load(path, overrides)
        seat = Seat(resolved, world)
        seat.stop.listen(None)
        return run(resolved, seat), ""
    except MpdistError as error:
        return error.status, str(error)


class Result:
    """What a run left: rows of metrics by kind, events, status, ledger."""

    def __init__(self, folder: Path, ends: list[tuple[int, str]]) -> None:
        self.folder, self.ends = folder, ends
        self.status = ends[0][0]
        self.message = ends[0][1]

    def rows(self, kind: str = "train") -> list[dict[str, Any]]:
        return [row for row in read_metrics(self.folder) if row["kind"] == kind]

    def column(self, name: str, kind: str = "train") -> list[Any]:
        return [row[name] for row in self.rows(kind)]

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def state(self) -> dict[str, Any]:
        return json.loads((self.folder / "status.json").read_text())

    def ledger(self) -> list[dict[str, Any]]:
        return json.loads((self.folder / "ledger.json").read_text())["rows"]

    def weights(self, step: int | None = None, prefix: str = "model.") -> dict[str, Any]:
        """The tensors of a checkpoint (default: the newest) whose names begin with the prefix."""
        import torch
        from torch.distributed import checkpoint

        latest = (self.folder / "checkpoints" / "latest").read_text().strip()
        path = self.folder / "checkpoints" / (latest if step is None else f"step-{step:08d}")
        reader = checkpoint.FileSystemReader(path / "tensors")
        entries = reader.read_metadata().state_dict_metadata
        found = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if name.startswith(prefix)
        }
        with warnings.catch_warnings():  # that there is no process group is what is meant
            warnings.simplefilter("ignore", UserWarning)
            checkpoint.load(found, storage_reader=reader, no_dist=True)
        return found


def train(
    folder: Path,
    ranks: int,
    *overrides: str,
    timeout: float = 300.0,
    kill: tuple[float, list[int]] | None = None,
    **changes: Any,
) -> Result:
    """One session in `folder`; `changes` rewrite the config file, `overrides` are the command line's. kill: see worlds."""
    path = config(folder, **changes)
    ends = worlds.run(session, ranks, str(path), list(overrides), timeout=timeout, kill=kill)
    name = next((o.partition("=")[2] for o in overrides if o.startswith("name=")), changes.get("name", "run"))
    return Result(folder / "runs" / name, ends)


def train_each(folder: Path, ranks: int, changes: list[dict[str, Any]], timeout: float = 300.0) -> list[Result]:
    """A session for each set of changes, one after another on the same ranks: that spares the start of a world each time.
    What a run's directory holds is read when all have ended."""
    paths = [str(config(folder, **change).rename(folder / f"config-{i}.yaml")) for i, change in enumerate(changes)]
    found = worlds.run(session_each, ranks, paths, worlds.free_ports(len(paths)), timeout=timeout)
    names = [change.get("name", "run") for change in changes]
    return [Result(folder / "runs" / name, [ends[i] for ends in found]) for i, name in enumerate(names)]


def session_each(rank: int, paths: list[str], ports: list[int]) -> list[tuple[int, str]]:
    from mpdist.dist import stop

    ends = []
    for path, port in zip(paths, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        ends.append(session(rank, path, []))
        stop()  # a session that ended with an error left its group
    return ends


def fresh() -> Path:
    return Path(tempfile.mkdtemp(prefix="mpdist-test-"))


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two sets of tensors have the same names and bits."""
    import torch

    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what a clock, a memory meter or the session's number decides."""
    drop = ("time/", "speed/", "mem/")
    return [{k: v for k, v in row.items() if not k.startswith(drop) and k != "session"} for row in rows]
