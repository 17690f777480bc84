"""`mpdist prepare CONFIG`, and the one place where a configuration becomes prepared data.

This is the only file here that sees the configuration; the rest takes flat values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdist import hub
from mpdist.data.fetch import fetch
from mpdist.data.prepare import prepare, ready
from mpdist.data.records import Source
from mpdist.data.tokens import tokenizer_folder
from mpdist.errors import UsageError
from mpdist.inputs import here_or_shipped

if TYPE_CHECKING:
    from mpdist.config import Config, Resolved


def run(resolved: Resolved) -> int:
    """Fetch what the hub holds and prepare all data of one configuration. Returns the exit status 0, or raises MpdistError."""
    config = resolved.config
    fetch(config, print)
    hub.settle(config, weights=True)  # what is here already is read without asking the hub again
    train, held_out = from_config(config, print)
    print(f"data.train is ready: {train}")
    if held_out is not None:
        print(f"data.eval is ready: {held_out}")
    return 0


def from_config(config: Config, say: Callable[[str], None]) -> tuple[Path, Path | None]:
    """The folders of the prepared data.train and data.eval (None if there is none), made if they are not there yet.

    Safe to call from every rank at once. Raises UsageError and MachineError as ``prepare`` does.
    """
    settings = _settings(config)
    train = prepare(_sources("train", config.data.train), **settings, say=say)
    return train, prepare(_sources("eval", config.data.eval), **settings, say=say) if config.data.eval else None


def prepared(config: Config) -> Path | None:
    """The folder of the prepared data.train, if it is there; nothing is made. Raises UsageError as ``prepare`` does."""
    return ready(_sources("train", config.data.train), **_settings(config))


def _sources(part: str, sources: Any) -> list[Source]:
    return [
        Source(here_or_shipped(s.path), s.format, s.split, s.weight, dict(s.fields), f"data.{part}.{i}.path")
        for i, s in enumerate(sources)
    ]


def _settings(config: Config) -> dict[str, Any]:
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
    return {
        "tokenizer": tokenizer,
        "seq_len": data.seq_len,
        "packing": data.packing,
        "loss_on": data.loss_on,
        "too_long": data.too_long,
        "bad_record": data.bad_record,
        "vocab_rows": embedding_rows(config),
        "chat_template": data.chat_template,
        "trust_remote_code": model.trust_remote_code,
        "revision": model.revision if tokenizer == model.path else None,
        "cache": Path(data.cache).expanduser() if data.cache else Path(config.out_dir).expanduser() / ".data",
    }


def embedding_rows(config: Config) -> int | None:
    """Rows of the model's embedding as its config says, or None where it does not."""
    shape: dict[str, Any] | None = config.model.config
    if shape is None and config.model.path is not None:
        need = hub.Need("model.path", "model", config.model.path, config.model.revision)
        if hub.is_hub_id(need.name) and need.lacking(weights=False) is None:
            folder = need.folder  # of a model that need not have a tokenizer
        else:
            folder = tokenizer_folder(need.name, need.revision, need.key)
        try:
            shape = json.loads(((folder or Path()) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None  # loading the model tells what is wrong with it
    if not isinstance(shape, dict):
        return None
    text = shape.get("text_config")
    rows = shape.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return rows if isinstance(rows, int) else None
