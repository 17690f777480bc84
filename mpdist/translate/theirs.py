"""The libraries' own classes: which keys they have, with which defaults, and whether they take the file as it is.

Each import costs seconds and brings torch along, so this is for `mpdist config --from-...` alone. None of it starts a
process group or compiles anything.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.metadata
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from mpdist.translate.document import Document
from mpdist.translate.draft import Draft, Library

_PACKAGES = {"accelerate": "accelerate", "deepspeed": "deepspeed", "trainer": "transformers"}


def not_asked(format: str) -> Library:
    return Library(_PACKAGES[format], None, {})


def trainer(document: Document) -> Library:
    """TrainingArguments' fields. The class looks for the devices that the run was on, so of the file it is given fp16 and bf16
    alone, and only where both are on."""

    def ask() -> Library:
        from transformers import TrainingArguments

        refusal = None
        if document.flag("fp16") and document.flag("bf16"):
            refusal = _refusal(lambda: TrainingArguments(output_dir=".", use_cpu=True, fp16=True, bf16=True))
        return Library("transformers", _version("transformers"), _defaults(TrainingArguments), refusal)

    return _asked("trainer", ask)


def accelerate(document: Document) -> Library:
    """ClusterConfig's fields, and what the reader of `accelerate launch` says of the file."""

    def ask() -> Library:
        from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

        refusal = _refusal(lambda: load_config_from_file(document.path))
        return Library("accelerate", _version("accelerate"), _defaults(ClusterConfig), refusal)

    return _asked("accelerate", ask)


def deepspeed(draft: Draft) -> Library:
    """DeepSpeedConfig's defaults, and what it says of the file once "auto" is filled, on one rank."""

    def ask() -> Library:
        from deepspeed.runtime.config import DeepSpeedConfig

        empty = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1})
        defaults = {"gradient_clipping": empty.gradient_clipping}
        defaults |= {f"fp16.{name}": value for name, value in empty.float16_config.model_dump().items()}
        values = _for_one_rank(draft)
        refusal = _refusal(lambda: DeepSpeedConfig(values))
        return Library("deepspeed", _version("deepspeed"), defaults, refusal)

    return _asked("deepspeed", ask)


def lenient_json(text: str, pairs: Callable[[list[tuple[str, Any]]], Any]) -> Any:
    """DeepSpeed itself reads a file by hjson, which takes comments and trailing commas; accelerate and transformers by json."""
    try:
        import hjson

        return hjson.loads(text, object_pairs_hook=pairs)
    except (ImportError, ValueError):
        return None


def _asked(format: str, ask: Callable[[], Library]) -> Library:
    try:
        with _quiet():
            return ask()
    except ImportError:
        return not_asked(format)


def _refusal(read: Callable[[], Any]) -> str | None:
    try:
        read()
    except Exception as error:  # whatever their classes raise is what they have to say
        text = " ".join(str(error).split()) or type(error).__name__
        return text.partition(" For further information visit")[0][:400]
    return None


def _defaults(kind: Any) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(kind):
        value = field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        found[field.name] = None if value is dataclasses.MISSING else value
    return found


def _for_one_rank(draft: Draft) -> dict[str, Any]:
    values = copy.deepcopy(draft.deepspeed.values)

    def without_auto(holder: dict[str, Any], path: str) -> None:
        for key in list(holder):
            if isinstance(holder[key], dict):
                without_auto(holder[key], f"{path}{key}.")
            elif holder[key] == "auto":
                filled = draft.filled.get(path + key)
                if filled is None:
                    del holder[key]
                else:
                    holder[key] = filled[0]

    without_auto(values, "")
    values.pop("train_batch_size", None)
    values.setdefault("train_micro_batch_size_per_gpu", 1)
    return values


def _version(package: str) -> str:
    return importlib.metadata.version(package)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the libraries say while they are imported is not part of our output. DeepSpeed is told not to look for GPUs."""
    before = os.environ.get("DS_ACCELERATOR")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sink = io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        if before is None:
            os.environ.pop("DS_ACCELERATOR", None)
