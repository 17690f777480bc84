"""A file, its parents and the command line become one resolved configuration."""

from __future__ import annotations

import json
import os
import pathlib
import re
from dataclasses import dataclass
from typing import Any

from mpdist.config import check, describe, read, rules
from mpdist.config.read import Path, Tree
from mpdist.config.schema import Config
from mpdist.errors import ConfigError, UsageError

COMMAND_LINE = "command line"
_MOST_BYTES = 2**24  # of a file


@dataclass(frozen=True)
class Resolved:
    """A configuration with the origin of each value: ``FILE:LINE``, ``command line`` or ``default``.

    ``origins`` is keyed by dotted names as in the YAML (``batch.global``, ``data.train.0.path``).
    """

    config: Config
    origins: dict[str, str]
    path: pathlib.Path

    def values(self) -> dict[str, Any]:
        """Nested plain values under their YAML names; what ``to_yaml`` writes."""
        return self.config.model_dump(mode="json", by_alias=True)

    def to_yaml(self) -> str:
        """Every value, defaults included, so that a later version's defaults do not change a run. ``load`` takes it."""
        from mpdist.config import write

        return write.block(self.values())

    def to_text(self) -> str:
        """One line a value: key, value, origin, in columns."""
        rows = [(name, describe.show(value), self.origins[name]) for name, value in leaves(self.values())]
        wide, middle = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{name:{wide}}  {value:{middle}}  {where}" for name, value, where in rows)

    def digest(self) -> str:
        """SHA-256 (hex) of all values."""
        return _digest(self.values())

    def number_digest(self) -> str:
        """SHA-256 (hex) of the values that can change the numbers of a run."""
        from mpdist.config import compat

        return _digest(compat.numbers(self.values()))

    def identity(self) -> str:
        """SHA-256 (hex) of the values that are the same in all sessions of a run."""
        from mpdist.config import compat

        return _digest(compat.identity(self.values()))


def load(path: str | pathlib.Path, overrides: list[str] | tuple[str, ...] = ()) -> Resolved:
    """Read ``path`` (YAML 1.2), its parents by ``extends`` and the ``key=value`` overrides.

    Raises ConfigError with every problem there is: in the YAML, unknown keys, types and ranges, rules between keys.
    """
    tree = _with_parents(str(path), ())
    if not isinstance(tree.value, dict):
        raise ConfigError(tree.problems)
    secret = check.secrets(tree)
    for override in overrides:
        _override(tree, override)
    secret += check.secrets(tree)
    _clear_nulls(tree)
    unknown = check.unknown(tree)
    config, invalid, names = check.validate(tree)
    # A misspelt key is one mistake: that the key which was meant is then missing is not another.
    meant = {match[1] for error in unknown if (match := re.search("did you mean `([^`]+)`", error.do))}
    problems = [*tree.problems, *secret, *unknown]
    problems += [error for error in invalid if error.what.removesuffix(" is not given") not in meant]
    names |= meant
    if config is not None:
        problems += rules.check(config, lambda name: check.origin(tree, tuple(name.split("."))), names)
    if problems or config is None:
        raise ConfigError(problems)
    values = config.model_dump(mode="json", by_alias=True)
    origins = {name: _leaf_origin(tree, tuple(name.split("."))) for name, _ in leaves(values)}
    return Resolved(config, origins, pathlib.Path(path))


def leaves(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted names and values; plain lists and empty mappings are leaves."""
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = prefix + key
        if isinstance(value, dict) and value:
            found += leaves(value, name + ".")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for i, item in enumerate(value):
                found += leaves(item, f"{name}.{i}.")
        else:
            found.append((name, value))
    return found


def _with_parents(path: str, chain: tuple[str, ...]) -> Tree:
    real = os.path.realpath(path)
    if real in chain:
        names = " -> ".join(os.path.basename(p) for p in (*chain[chain.index(real) :], real))
        return Tree({}, {}, [UsageError(f"extends goes in a circle: {names}", "", "take one `extends` out")])
    tree = _read(path)
    if not isinstance(tree.value, dict) or "extends" not in tree.value:
        return tree
    parent = tree.value.pop("extends")
    where = tree.origins.pop(("extends",))
    if not isinstance(parent, str) or not parent:
        why = "it has to be the path of one file, relative to this one"
        tree.problems.append(UsageError(f"extends = {describe.show(parent)} ({where})", why, "name one parent"))
        return tree
    parent_path = os.path.normpath(os.path.join(os.path.dirname(path), parent))
    if not os.path.isfile(parent_path):
        why = f"there is no file {parent_path}"
        tree.problems.append(
            UsageError(f"extends = {parent} ({where})", why, "the path is relative to the file that extends")
        )
        return tree
    base = _with_parents(parent_path, (*chain, real))
    if not isinstance(base.value, dict):
        tree.problems[:0] = base.problems
        return tree
    return read.merge(base, tree)


def _read(path: str) -> Tree:
    if os.path.exists(path) and not os.path.isdir(path):
        why = (
            "" if os.path.isfile(path) else "it is not a regular file, and a run reads its configuration more than once"
        )
        why = why or (f"it is larger than {_MOST_BYTES >> 20} MiB" if os.path.getsize(path) > _MOST_BYTES else "")
        if why:
            return Tree(None, {}, [UsageError(f"{path} cannot be a configuration", why, "give a YAML file")])
    try:
        with open(path, encoding="utf-8") as file:
            tree = read.parse(file.read(), path)
    except UnicodeDecodeError:
        return Tree(None, {}, [UsageError(f"{path} is not text", "a configuration is UTF-8 text", "save it as UTF-8")])
    except OSError as error:
        do = "check the path; `mpdist configs` lists the ones that come with mpdist"
        return Tree(None, {}, [UsageError(f"{path} cannot be read", error.strerror or str(error), do)])
    if tree.value is None and not tree.problems:
        tree.value = {}
    elif not isinstance(tree.value, dict) and not tree.problems:
        why = "a configuration is a mapping of keys to values"
        tree.problems.append(
            UsageError(f"{path} holds {describe.show(tree.value)}", why, "write it as `key: value` lines")
        )
        tree.value = None
    tree.origins.pop((), None)
    tree.origins[()] = path
    return tree


def _override(tree: Tree, text: str) -> None:
    """Put one ``key=value`` into the tree."""
    name, equals, written = text.partition("=")
    path: Path = tuple(name.strip().split("."))
    if not equals or not all(path):
        why = "an override is `key=value`, such as batch.micro=4 or data.train.0.path=notes.txt"
        tree.problems.append(UsageError(f"{text} ({COMMAND_LINE})", why, "write key, equals sign, value"))
        return
    if path == ("extends",):
        why = "the parent is part of the file"
        tree.problems.append(UsageError(f"extends ({COMMAND_LINE})", why, "load the other file, or edit this one"))
        return
    key = describe.find(path)
    if written == "null":
        value = Tree(None, {(): COMMAND_LINE})
    elif key is not None and key.is_text:
        value = Tree(written, {(): COMMAND_LINE})
    else:
        value = read.parse(written, f"{name} ({COMMAND_LINE})", line_numbers=False)
        tree.problems += value.problems
        if value.problems:
            return
        value.origins = dict.fromkeys(value.origins or {(): ""}, COMMAND_LINE)
    _set(tree, path, value)


def _set(tree: Tree, path: Path, value: Tree) -> None:
    holder: Any = tree.value
    for i, part in enumerate(path):
        last = i == len(path) - 1
        if isinstance(holder, list):
            if not part.isdecimal() or int(part) > len(holder):
                why = f"{check.dotted(path[:i])} has {len(holder)} element{'s' * (len(holder) != 1)}, counted from 0"
                tree.problems.append(
                    UsageError(f"{check.dotted(path)} ({COMMAND_LINE})", why, "give a number that is there")
                )
                return
            if int(part) == len(holder):
                holder.append({})
            slot: Any = int(part)
        elif isinstance(holder, dict):
            slot = part
            if not last and not isinstance(holder.get(slot), (dict, list)):
                key = describe.find(path[: i + 1])
                holder[slot] = [] if key is not None and key.kind == "list" else {}
        else:
            why = f"{check.dotted(path[:i])} is {describe.show(holder)}, which holds no keys"
            tree.problems.append(UsageError(f"{check.dotted(path)} ({COMMAND_LINE})", why, "give the whole value"))
            return
        if not last:
            holder = holder[slot]
            continue
        for old in [p for p in tree.origins if p[: len(path)] == path]:
            del tree.origins[old]
        holder[slot] = value.value
        tree.origins.update({(*path, *p): where for p, where in value.origins.items()})


def _clear_nulls(tree: Tree) -> None:
    """A null clears what a parent or the file has set, unless null is itself a value of that key.

    A null for a plain value in a file stays and is refused as a wrong type: it is more likely a forgotten value.
    """

    def walk(value: dict[str, Any], path: Path) -> None:
        for name in list(value):
            here = (*path, name)
            key = describe.find(here)
            if key is None or key.kind == "free":
                continue
            if isinstance(value[name], dict):
                walk(value[name], here)
            elif isinstance(value[name], list):
                for i, item in enumerate(value[name]):
                    if isinstance(item, dict):
                        walk(item, (*here, str(i)))
            elif (
                value[name] is None
                and not key.nullable
                and (key.kind in ("section", "list") or tree.origins.get(here) == COMMAND_LINE)
            ):
                del value[name]
                tree.origins.pop(here, None)

    walk(tree.value, ())


def _leaf_origin(tree: Tree, path: Path) -> str:
    if path in tree.origins:
        return tree.origins[path]
    # A free mapping or list given as a whole has one origin for all that it holds.
    for end in range(len(path) - 1, 0, -1):
        key = describe.find(path[:end])
        if key is not None and key.kind == "free" and path[:end] in tree.origins:
            return tree.origins[path[:end]]
    return "default"


def _digest(values: Any) -> str:
    import hashlib

    return hashlib.sha256(json.dumps(values, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, for editors."""
    result = Config.model_json_schema(by_alias=True)
    result["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    result["title"] = "mpdist configuration"
    result["properties"] = {
        "extends": {"type": "string", "description": "One parent file, relative to this one."},
        **result["properties"],
    }
    # What a file leaves out may come from its parent or the command line.
    result.pop("required", None)
    for definition in result.get("$defs", {}).values():
        if definition.get("title") in ("Batch", "Data"):
            definition.pop("required", None)
    return result
