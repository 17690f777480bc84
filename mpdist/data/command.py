"""`mpdist prepare CONFIG`, and the one place where a configuration becomes prepared data.

This is the only file here that sees the configuration; the rest takes flat values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdist.data.prepare import prepare
from mpdist.data.records import Source
from mpdist.data.tokens import tokenizer_folder
from mpdist.errors import UsageError
from mpdist.inputs import here_or_shipped, looks_local

if TYPE_CHECKING:
    from mpdist.config import Config, Resolved

# What a model needs here; other frameworks' copies of the weights stay on the hub.
_WEIGHTS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")


def run(resolved: Resolved) -> int:
    """Fetch the model and prepare all data of one configuration. Returns the exit status 0, or raises MpdistError."""
    config = resolved.config
    folder = fetch_model(config, print)
    if folder is not None:
        print(f"model {config.model.path}: {folder}")
    train, held_out = from_config(config, print)
    print(f"data.train is ready: {train}")
    if held_out is not None:
        print(f"data.eval is ready: {held_out}")
    return 0


def from_config(config: Config, say: Callable[[str], None]) -> tuple[Path, Path | None]:
    """The folders of the prepared data.train and data.eval (None if there is none), made if they are not there yet.

    Safe to call from every rank at once. Raises UsageError and MachineError as ``prepare`` does.
    """
    data, model = config.data, config.model
    tokenizer = data.tokenizer
    if tokenizer == "model":
        if model.path is None:
            raise UsageError(
                "data.tokenizer = model",
                "a model from model.config has no tokenizer beside it",
                "give data.tokenizer: bytes, or a folder or hub id",
            )
        tokenizer = model.path
    revision = model.revision if tokenizer == model.path else None
    vocab_rows = embedding_rows(config)
    cache = Path(data.cache).expanduser() if data.cache else Path(config.out_dir).expanduser() / ".data"

    def one(part: str, sources: Any) -> Path:
        return prepare(
            [
                Source(here_or_shipped(s.path), s.format, s.split, s.weight, dict(s.fields), f"data.{part}.{i}.path")
                for i, s in enumerate(sources)
            ],
            tokenizer=tokenizer,
            seq_len=data.seq_len,
            packing=data.packing,
            loss_on=data.loss_on,
            too_long=data.too_long,
            bad_record=data.bad_record,
            vocab_rows=vocab_rows,
            chat_template=data.chat_template,
            trust_remote_code=model.trust_remote_code,
            revision=revision,
            cache=cache,
            say=say,
        )

    return one("train", data.train), one("eval", data.eval) if data.eval else None


def embedding_rows(config: Config) -> int | None:
    """Rows of the model's embedding as its config says, or None where it does not."""
    shape: dict[str, Any] | None = config.model.config
    if shape is None and config.model.path is not None:
        folder = tokenizer_folder(config.model.path, config.model.revision, "model.path")
        try:
            shape = json.loads(((folder or Path()) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None  # loading the model tells what is wrong with it
    if not isinstance(shape, dict):
        return None
    text = shape.get("text_config")
    rows = shape.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return rows if isinstance(rows, int) else None


def fetch_model(config: Config, say: Callable[[str], None]) -> Path | None:
    """The local copy of a model named by hub id, fetched if it is not there yet; None for a folder or model.config.

    Raises UsageError where it cannot be had.
    """
    path = config.model.path
    if path is None or _is_local(path):
        return None
    from huggingface_hub import snapshot_download

    try:
        say(f"model {path}: looking for it in the local copy of the hub, and on the hub")
        folder = Path(snapshot_download(path, revision=config.model.revision, allow_patterns=list(_WEIGHTS)))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(path, revision=config.model.revision, allow_patterns=["*.bin"])
    except Exception as error:  # the hub client raises its own, requests' and the operating system's errors
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"model.path = {path} cannot be fetched",
            f"{type(error).__name__}: {first}",
            "name a folder, or run `mpdist prepare` where the hub can be reached",
        ) from None
    return folder


def _is_local(path: str) -> bool:
    """Whether a path is a folder or a file here. A GGUF file or a path to nowhere is refused with its reason."""
    if Path(path).expanduser().exists() or looks_local(path):
        tokenizer_folder(path, key="model.path")
        return True
    return False
