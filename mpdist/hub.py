"""What a run takes from the Hugging Face hub, what of it lies here already, and whether the hub can be asked at all.

The libraries ask the hub first and look into their cache afterwards: on a node without a network that is six attempts
with pauses between them for each file. So the cache is looked at here, by its documented layout and without any of the
libraries; the hub is asked only for what is not there, and only after one bounded attempt has shown that it answers.
"""

from __future__ import annotations

import functools
import json
import os
import re
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpdist.arch import hub_snapshot
from mpdist.errors import MachineError, MpdistError, UsageError
from mpdist.inputs import FILE_SUFFIXES, here_or_shipped, looks_local

if TYPE_CHECKING:
    from mpdist.config import Config

VOCABULARIES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab*")
"""Any of these is a tokenizer's."""

_ASK_S = 5.0  # for one request
_WAIT_S = 8.0  # for its answer, a resolver without an answer included
_TRUE = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True)
class Need:
    """A thing of the hub's that a configuration names. key: where; kind: model, tokenizer, code or dataset."""

    key: str
    kind: str
    name: str
    revision: str | None = None

    @property
    def folder(self) -> Path | None:
        """Where it lies here, whole or not."""
        return dataset_folder(self.name) if self.kind == "dataset" else hub_snapshot(self.name, self.revision)

    def lacking(self, weights: bool = True) -> str | None:
        """What of it is not here, None where nothing is. weights: whether a model's are needed, or its config alone."""
        folder = self.folder
        if self.kind == "dataset":
            return None if folder is not None else "its rows"
        if folder is None:
            return {"model": "config and weights", "tokenizer": "its files", "code": "its code"}[self.kind]
        if self.kind == "tokenizer":
            return None if any(any(folder.glob(pattern)) for pattern in VOCABULARIES) else "its files"
        if self.kind == "code":
            return None if any(folder.glob("*.py")) else "its code"
        if not (folder / "config.json").is_file():
            return "config.json"
        return weights_lacking(folder) if weights else None

    def __str__(self) -> str:
        return f"{self.key} = {self.name}" + (f" ({self.revision})" if self.revision else "")


def needs(cfg: Config) -> list[Need]:
    """All of it, in the configuration's order; a name that is here as a folder or file is none of the hub's."""
    found: list[Need] = []
    model = cfg.model
    if model.path is not None and is_hub_id(model.path):
        found.append(Need("model.path", "model", model.path, model.revision))
        if model.trust_remote_code:
            found += [Need("model.path's code", "code", name) for name in _code_elsewhere(model.path, model.revision)]
    name = model.path if cfg.data.tokenizer == "model" else cfg.data.tokenizer
    if name is not None and name != "bytes" and is_hub_id(name):
        revision = model.revision if name == model.path else None
        found.append(Need("data.tokenizer", "tokenizer", name, revision))
    for part in ("train", "eval"):
        for number, source in enumerate(getattr(cfg.data, part)):
            if is_hub_dataset(here_or_shipped(source.path)):
                found.append(Need(f"data.{part}.{number}.path", "dataset", source.path))
    return found


def is_hub_id(name: str) -> bool:
    """Whether a model or tokenizer of that name is the hub's: no folder here, and no path."""
    return not looks_local(name) and not Path(name).expanduser().exists()


def is_hub_dataset(name: str) -> bool:
    """As `is_hub_id`, of data, whose names may also be files and patterns."""
    return is_hub_id(name) and not any(c in name for c in "*?[") and Path(name).suffix.lower() not in FILE_SUFFIXES


def _code_elsewhere(name: str, revision: str | None) -> list[str]:
    """Repositories that a model's config.json names for its code (`owner/name--module.Class`)."""
    folder = hub_snapshot(name, revision)
    try:
        classes = json.loads((folder / "config.json").read_text("utf-8")).get("auto_map", {}) if folder else {}
        return sorted({str(value).partition("--")[0] for value in classes.values() if "--" in str(value)})
    except (OSError, ValueError, AttributeError):
        return []


def weights_lacking(folder: Path) -> str | None:
    """Which weight files a model's folder lacks, None if it has them all."""
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        try:
            listed = set(json.loads((folder / index).read_text("utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            continue
        gone = sorted(name for name in listed if not (folder / name).is_file())
        return f"{len(gone)} of {len(listed)} weight files" if gone else None
    single = ("model.safetensors", "pytorch_model.bin")
    return None if any((folder / name).is_file() for name in single) else "its weights"


def dataset_folder(name: str) -> Path | None:
    """Where `datasets` keeps a hub data set that it has built; None if it has not."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")).expanduser()
    owner, _, own = name.rpartition("/")
    own = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", own)).lower()
    folder = cache / "___".join(filter(None, (owner, own)))
    return folder if any(folder.glob("*/*/*/dataset_info.json")) else None


# -- asking it -------------------------------------------------------------------------------------------------------


def endpoint(env: Mapping[str, str] = os.environ) -> str:
    return (env.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def told_offline(env: Mapping[str, str] = os.environ) -> str | None:
    """The variable by which the hub may not be asked, if there is one."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return next((name for name in names if env.get(name, "").upper() in _TRUE), None)


@functools.cache
def unreachable(address: str) -> str | None:
    """Why the hub at an address does not answer, None if it does. One request, asked once in a process."""
    answer: list[str | None] = []
    thread = threading.Thread(target=lambda: answer.append(_ask(address)), daemon=True)
    thread.start()  # since a resolver that has no server to ask cannot be given a time
    thread.join(_WAIT_S)
    return answer[0] if answer else f"no answer within {_WAIT_S:g} s"


def _ask(address: str) -> str | None:
    import ssl
    import urllib.error
    import urllib.request

    try:
        request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "mpdist"})
        urllib.request.urlopen(request, timeout=_ASK_S).close()
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code} {error.reason}" if error.code >= 500 or error.code == 407 else None
    except urllib.error.URLError as error:
        # Somebody is there; whether its certificate is good is for the hub's own client to say, which has its own list.
        return None if isinstance(error.reason, ssl.SSLError) else _said(error.reason)
    except (OSError, ValueError) as error:
        return _said(error)
    return None


def _said(reason: object) -> str:
    return str(getattr(reason, "strerror", None) or reason)


def require(lacking: Sequence[tuple[Need, str]]) -> None:
    """Raises MachineError, naming all that is not here, where the hub may not or cannot be asked for it.

    lacking: what is not here, and which part of it.
    """
    if not lacking:
        return
    variable = told_offline()
    trouble = f"{variable} is set" if variable else unreachable(endpoint())
    if trouble is None:
        return
    listed = "; ".join(f"{need}: {part}" for need, part in lacking)
    why = trouble if variable else f"{endpoint()} does not answer: {trouble}"
    raise MachineError(
        f"not in the local copy of the hub: {listed}",
        why,
        "run `mpdist fetch CONFIG` where there is a network (a login node), with HF_HOME on a file system that the compute"
        " nodes see; or name folders",
    )


def check(cfg: Config, weights: bool = True) -> bool:
    """Whether all that the configuration takes from the hub is here. Raises MachineError where something is missing and
    cannot be had. weights: whether this process reads the model's; a rank without them gets them from rank 0."""
    lacking = [(need, part) for need in needs(cfg) if (part := need.lacking(weights))]
    if lacking:
        require(lacking)
    return not lacking


def settle(cfg: Config, weights: bool, env: MutableMapping[str, str] = os.environ) -> None:
    """`check`, by a rank before it imports the libraries, which look at their switches once: with all here, none of them
    ever asks the hub."""
    if check(cfg, weights) and "HF_HUB_OFFLINE" not in env:
        env["HF_HUB_OFFLINE"] = "1"


def refused(need: Need, error: Exception) -> MpdistError:
    """What the hub's client has raised, as a user's error: it raises its own, its transport's and the system's."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return UsageError(
        f"{need} cannot be fetched",
        f"{type(error).__name__}: {first}",
        "check the name, and that you may read it (`hf auth login`); or name a folder",
    )
