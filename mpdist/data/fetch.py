"""`mpdist fetch CONFIG`: what the hub holds is brought here, where there is a network, for ranks that have none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdist import hub
from mpdist.data.records import Located, Source, load_dataset
from mpdist.data.tokens import TOKENIZER_FILES, tokenizer_folder
from mpdist.errors import UsageError
from mpdist.units import format_bytes

if TYPE_CHECKING:
    from mpdist.config import Config, Resolved

# What a model needs here. Other frameworks' copies of the weights stay on the hub, and other forms of the same ones.
_MODEL = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
_NOT = ("consolidated*", "original/*", "onnx/*")


def run(resolved: Resolved, refresh: bool = False) -> int:
    """Fetch all that one configuration takes from the hub; the exit status 0. refresh: ask also for newer versions.

    Raises MachineError, within seconds, where something is missing and the hub cannot be asked; UsageError for names
    that it does not have, and for local ones that are not there.
    """
    count = fetch(resolved.config, print, refresh)
    if not count:
        print("this configuration takes nothing from the hub")
    else:
        print("all is here: ranks that see this folder will not ask the hub")
    return 0


def fetch(cfg: Config, say: Callable[[str], None], refresh: bool = False) -> int:
    """As `run`; how many things there are."""
    if cfg.model.path is not None and not hub.is_hub_id(cfg.model.path):
        tokenizer_folder(
            cfg.model.path, key="model.path"
        )  # a GGUF file or a path to nowhere is refused with its reason
    wanted = hub.needs(cfg)
    lacking = {need: part for need in wanted if (part := _lacking(need)) or refresh}
    hub.require([(need, part or "its newest version") for need, part in lacking.items()])
    fetched: set[str] = set()
    for need in wanted:
        # The tokenizer has mostly come with its model by now.
        if need in lacking and (_lacking(need) or (refresh and need.name not in fetched)):
            say(f"{need}: fetching {lacking[need] or 'what is new'}")
            _fetch(need, cfg)
            fetched.add(need.name)
            say(f"{need}: here, {_described(need)}")
        else:
            say(f"{need}: here already, {_described(need)}")
    return len(wanted) + _code(cfg, say, {need.name for need in wanted if need.kind == "code"})


def _lacking(need: hub.Need) -> str | None:
    """As a rank sees it; and stricter, by the list that the hub's client keeps: a fetch that was cut short is no fetch."""
    part = need.lacking()
    if part is not None or need.kind == "dataset":
        return part
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot_download(need.name, revision=need.revision, local_files_only=True, **_patterns(need))
    except LocalEntryNotFoundError:
        return "some of its files"
    return None


def _patterns(need: hub.Need) -> dict[str, Any]:
    chosen = {"model": _MODEL, "tokenizer": TOKENIZER_FILES, "code": ("*.py", "*.json")}[need.kind]
    return {"allow_patterns": list(chosen), "ignore_patterns": list(_NOT)}


def _code(cfg: Config, say: Callable[[str], None], known: set[str]) -> int:
    """Repositories of code that only a config which was just fetched has named."""
    new = [need for need in hub.needs(cfg) if need.kind == "code" and need.name not in known and need.lacking()]
    for need in new:
        say(f"{need}: fetching its code")
        _fetch(need, cfg)
    return len(new)


def _fetch(need: hub.Need, cfg: Config) -> None:
    if need.kind == "dataset":
        _fetch_dataset(need, cfg)
        return
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(need.name, revision=need.revision, **_patterns(need)))
        if need.kind == "model" and not any(folder.glob("*.safetensors")):
            snapshot_download(need.name, revision=need.revision, allow_patterns=["*.bin"], ignore_patterns=list(_NOT))
    except Exception as error:  # the hub's client raises its own, its transport's and the operating system's errors
        raise hub.refused(need, error) from None
    if still := need.lacking():
        raise UsageError(f"{need} is on the hub without {still}", "that repository is no model that transformers loads",
                         "name another one, or convert it and name the folder")  # fmt: skip


def _fetch_dataset(need: hub.Need, cfg: Config) -> None:
    """By the library that will read it, which keeps what it has built of it, and builds anew what has changed."""
    _, part, number, _ = need.key.split(".")
    asked = getattr(cfg.data, part)[int(number)]
    source = Source(asked.path, asked.format, asked.split, asked.weight, dict(asked.fields), need.key)
    load_dataset(Located(source, (), None))


def _described(need: hub.Need) -> str:
    folder = need.folder
    if folder is None:
        return "nowhere"
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return f"{len(sizes)} file{'s' * (len(sizes) != 1)}, {format_bytes(sum(sizes))} in {folder}"
