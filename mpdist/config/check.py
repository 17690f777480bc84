"""From a tree as written to a validated Config, or to a list of everything that is wrong with it."""

from __future__ import annotations

import contextlib
import copy
import difflib
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from mpdist.config import describe, schema
from mpdist.config.read import Path, Tree
from mpdist.errors import MpdistError, UsageError

# Names that people bring from other trainers, where spelling alone would not lead to ours.
_OTHER_NAMES = {
    "learning_rate": "optim.lr",
    "per_device_train_batch_size": "batch.micro",
    "train_batch_size": "batch.global",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "global_batch_size": "batch.global",
    "batch_size": "batch.global",
    "gradient_accumulation_steps": "batch.global",
    "gradient_clipping": "optim.clip",
    "max_grad_norm": "optim.clip",
    "num_train_epochs": "budget.epochs",
    "max_steps": "budget.steps",
    "warmup_steps": "optim.warmup",
    "warmup_ratio": "optim.warmup",
    "lr_scheduler_type": "optim.schedule",
    "mixed_precision": "precision.compute",
    "fp16": "precision.compute",
    "bf16": "precision.compute",
    "dtype": "precision.compute",
    "torch_dtype": "precision.compute",
    "loss_scale": "precision.scale.mode",
    "gradient_checkpointing": "memory.checkpointing",
    "zero_stage": "shard.stage",
    "model_name_or_path": "model.path",
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "output_dir": "out_dir",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "eval.every",
    "logging_steps": "track.every",
    "num_processes": "launch.ranks",
    "nproc_per_node": "launch.ranks",
    "nnodes": "launch.nodes",
}
_OTHER_WORDS = {
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "f32": "fp32",
}
_SECRET_NAMES = ("token", "use_auth_token", "secret_key", "passwd", "apikey")
_SECRET_ENDS = (
    *("api_key", "access_key", "private_key", "password", "secret", "credential", "credentials"),
    *(f"{who}_token" for who in ("hf", "hub", "huggingface", "auth", "access", "api", "bearer", "wandb", "github")),
)
# A cheap look first: most texts begin with none of these.
_SECRET_STARTS = ("hf_", "wandb_v", "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "AKIA", "-----BEGIN")


def secrets(tree: Tree) -> list[MpdistError]:
    """Takes everything that looks like a secret out of the tree. Their values are in no message."""
    found: list[MpdistError] = []

    def walk(value: Any, path: Path) -> None:
        for name, item in list(_items(value)):
            here = (*path, name)
            if isinstance(value, dict) and _secret_name(name) and _may_be_secret(here):
                why = "its name says that it is a secret, and a configuration is stored and logged"
            elif isinstance(item, str) and _secret_value(item, here):
                why = "its value looks like a secret, and a configuration is stored and logged"
            else:
                walk(item, here)
                continue
            do = "take it out and give it to the library that uses it: HF_TOKEN or WANDB_API_KEY in the environment"
            found.append(UsageError(f"{dotted(here)} ({origin(tree, here)})", why, do))
            if isinstance(value, dict):
                del value[name]
            else:
                value[int(name)] = "removed"

    walk(tree.value, ())
    return found


def _secret_name(name: str) -> bool:
    plain = name.lower().replace("-", "_")
    return plain in _SECRET_NAMES or plain.endswith(_SECRET_ENDS)


def _secret_value(value: str, path: Path) -> bool:
    if value.startswith(_SECRET_STARTS):
        return (
            len(value) >= 20
            and re.fullmatch(r"[\w-]{20,}|-----BEGIN [A-Z ]*PRIVATE KEY.*", value, re.DOTALL) is not None
        )
    if path[0] == "track" and len(value) == 40:
        return re.fullmatch(r"[0-9a-f]{40}", value) is not None
    return "://" in value and re.match(r"[a-z]+://[^/\s:@]+:[^/\s@]+@", value) is not None


def _may_be_secret(path: Path) -> bool:
    """Our own keys are not secrets, whatever their names look like."""
    key = describe.find(path)
    return key is None or key.kind == "free"


def unknown(tree: Tree) -> list[MpdistError]:
    """Takes every key that the schema does not have out of the tree, with the nearest right key for each."""
    found: list[MpdistError] = []

    def walk(value: Any, section: type[BaseModel], path: Path) -> None:
        known = describe.children(section)
        for name in list(value):
            here = (*path, name)
            key = known.get(name)
            if key is None:
                found.append(_unknown_key(tree, here, value.pop(name), section))
            elif key.section is not None and isinstance(value[name], dict):
                walk(value[name], key.section, here)
            elif key.section is not None and key.kind == "list" and isinstance(value[name], list):
                for i, item in enumerate(value[name]):
                    if isinstance(item, dict):
                        walk(item, key.section, (*here, str(i)))

    walk(tree.value, schema.Config, ())
    return found


def _unknown_key(tree: Tree, path: Path, value: Any, section: type[BaseModel]) -> MpdistError:
    shown = "" if isinstance(value, (dict, list)) else f" = {describe.show(value)}"
    keys = describe.children(section)
    where = f"`{dotted(path[:-1])}`" if len(path) > 1 else "a configuration"
    why = f"{where} has no key `{path[-1]}`"
    near = nearest(path, list(keys))
    if path[-1] == "<<":
        do = "merge keys are not read (YAML 1.2 has none): write the keys out, or let the file `extends` a parent"
    elif near:
        do = f"did you mean `{near}`?"
    elif keys:
        do = f"its keys are {', '.join(keys)}"
    else:
        do = "it has no keys in this version; take the key out"
    return UsageError(f"{dotted(path)}{shown} ({origin(tree, path)})", why, do)


def nearest(path: Path, siblings: list[str]) -> str | None:
    """The full name of the nearest right key: a sibling, another trainer's word for ours, or one elsewhere."""
    name = path[-1]
    close = difflib.get_close_matches(name.lower(), siblings, n=1, cutoff=0.75)
    if close:
        return dotted((*path[:-1], close[0]))
    if name.lower() in _OTHER_NAMES:
        return _OTHER_NAMES[name.lower()]
    leaves: dict[str, str] = {}
    for full, _ in describe.all_keys():
        if not full.startswith("drill.") and ".N." not in full:
            leaves.setdefault(full.rsplit(".", 1)[-1], full)
    close = difflib.get_close_matches(name.lower(), siblings, n=1, cutoff=0.6)
    if name in leaves:
        return leaves[name]
    if close:
        return dotted((*path[:-1], close[0]))
    close = difflib.get_close_matches(name.lower(), list(leaves), n=1, cutoff=0.8)
    return leaves[close[0]] if close else None


def validate(tree: Tree) -> tuple[schema.Config | None, list[MpdistError], set[str]]:
    """The config, what is wrong, and the dotted names that are.

    Where something is wrong the config has the default in its place (or a stand-in where there is none), so that
    the rules between keys can still be checked on the rest; it is None only where not even that can be built.
    """
    value = copy.deepcopy(tree.value)
    problems: dict[str, MpdistError] = {}
    for _ in range(8):  # each round replaces what is wrong; nested mistakes need a round a depth
        try:
            with _no_plugins():
                config = schema.Config.model_validate(value)
            return config, list(problems.values()), set(problems)
        except ValidationError as error:
            for item in error.errors(include_url=False, include_context=False):
                path = _key_path(item["loc"])
                name = dotted(path)
                # A list is too short for pydantic where its elements are wrong: those are what to report.
                if not path or name in problems or any(known.startswith(name + ".") for known in problems):
                    continue
                kind = item["type"] if len(path) == len(item["loc"]) else "part"
                problems[name] = _problem(tree, path, kind, item["msg"])
            for name in problems:
                _replace(value, tuple(name.split(".")))
    return None, list(problems.values()), set(problems)


@contextlib.contextmanager
def _no_plugins() -> Iterator[None]:
    """No pydantic plugin takes part in our validation, and none is looked for.

    The variable is the documented way. Under it pydantic still imports the module that would look (and with it
    importlib.metadata, zipfile and email: a tenth of the time of a refusal), so that one is stood in for meanwhile.
    Where a later pydantic has no such module, the stand-in goes unused and nothing else changes.
    """
    variable, module = "PYDANTIC_DISABLE_PLUGINS", "pydantic.plugin._loader"
    before = os.environ.get(variable)
    os.environ[variable] = "__all__"
    stand_in = None
    if module not in sys.modules:
        stand_in = types.ModuleType(module)
        stand_in.get_plugins = lambda: ()  # type: ignore[attr-defined]
        sys.modules[module] = stand_in
    try:
        yield
    finally:
        if stand_in is not None:
            sys.modules.pop(module, None)
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _key_path(location: tuple[int | str, ...]) -> Path:
    """pydantic's location without the parts that name arms of a union or elements of a plain list."""
    path: Path = ()
    for part in location:
        longer = (*path, str(part))
        key = describe.find(longer)
        if key is None:
            break
        path = longer
    return path


def _problem(tree: Tree, path: Path, kind: str, message: str) -> MpdistError:
    key = describe.find(path)
    assert key is not None
    name = dotted(path)
    if kind == "missing":
        return UsageError(
            f"{name} is not given", f"it has no default: {key.description}", f"add `{name}`: {key.expects}"
        )
    value = _get(tree.value, path)
    why, do = f"it has to be {key.expects}", "correct the value, or take the key out"
    if kind == "value_error":
        said, _, cure = message.removeprefix("Value error, ").partition("\n")  # the cure where the check has its own
        why, do = said if value != "" else why, cure or f"give {name} {key.expects}"
    if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off") and "true or false" in key.expects:
        do = f"YAML 1.2 reads {value} as text; write {'true' if value.lower() in ('yes', 'on') else 'false'}"
    elif isinstance(value, str) and (word := _OTHER_WORDS.get(value.lower(), "")) and word in key.expects:
        do = f"did you mean {word}?"
    elif isinstance(value, str):
        # 'every N' is no word to write as it stands.
        words = re.sub("'[^']*'", "", key.expects).replace(",", " ").split()
        close = difflib.get_close_matches(value.lower(), words, n=1, cutoff=0.6)
        if close and close[0] not in ("or", "whole", "number", "text"):
            do = f"did you mean {close[0]}?"
    return UsageError(f"{name} = {describe.show(value)} ({origin(tree, path)})", why, do)


_STAND_INS: dict[Path, Any] = {
    ("name",): "unnamed",
    ("data",): {"train": [{"path": "unnamed"}]},
    ("data", "train"): [{"path": "unnamed"}],
    ("batch",): {"global": 1},
    ("batch", "global"): 1,
}
_LEAF_STAND_INS: dict[str, Any] = {"path": "unnamed", "attempts": [1], "attempt": 1, "save": 1}


def _replace(value: Any, path: Path) -> None:
    """The stand-in where the key has no default, else nothing, so that the default holds."""
    for part in path[:-1]:
        value = value[int(part)] if isinstance(value, list) else value.setdefault(part, {})
    if isinstance(value, list):
        value[int(path[-1])] = {"path": "unnamed"}
    elif path in _STAND_INS:
        value[path[-1]] = copy.deepcopy(_STAND_INS[path])
    elif path[-1] in _LEAF_STAND_INS and path[0] in ("data", "drill"):
        value[path[-1]] = _LEAF_STAND_INS[path[-1]]
    else:
        value.pop(path[-1], None)


def _get(value: Any, path: Path) -> Any:
    for part in path:
        value = value[int(part)] if isinstance(value, list) else value.get(part)
    return value


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return [(str(i), item) for i, item in enumerate(value)] if isinstance(value, list) else []


def dotted(path: Path) -> str:
    return ".".join(path)


def origin(tree: Tree, path: Path) -> str:
    """Where the value at ``path`` came from: its own origin, or that of the nearest thing around it."""
    for end in range(len(path), 0, -1):
        if path[:end] in tree.origins:
            return tree.origins[path[:end]]
    # A section that was made for a key below it is where that key is.
    return next((where for known, where in tree.origins.items() if known[: len(path)] == path), "default")
