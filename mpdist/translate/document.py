"""A file of another trainer: its values under dotted names, with the line of each, and the types that people write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from mpdist.config import check, describe, read
from mpdist.errors import ConfigError, UsageError

TITLES = {
    "accelerate": "an accelerate configuration",
    "deepspeed": "a DeepSpeed configuration",
    "trainer": "TrainingArguments",
}


class Wrong(Exception):
    """A value that is none of those that its key takes; says what would be."""


class Document:
    """One file, or a part of one: ``prefix`` is what stands before its names in messages."""

    def __init__(
        self, format: str, path: str, values: dict[str, Any], origins: dict[read.Path, str], prefix: str = ""
    ) -> None:
        self.format, self.path, self.values, self.origins, self.prefix = format, path, values, origins, prefix
        self.secrets: set[str] = set()
        self.loose = ""  # where and why it is no strict JSON, if only the second reader took it

    @property
    def given(self) -> bool:
        return bool(self.values)

    def get(self, name: str, default: Any = None) -> Any:
        """The value under a dotted name; the default too where it is null."""
        value: Any = self.values
        for part in name.split("."):
            if not isinstance(value, dict) or value.get(part) is None:
                return default
            value = value[part]
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        return flag(self.get(name, default))

    def number(self, name: str, default: float) -> float:
        return number(self.get(name, default))

    def leaves(self) -> Iterator[tuple[read.Path, Any]]:
        """Every value that holds no further keys; an empty mapping is one."""
        yield from _leaves(self.values, ())

    def where(self, path: read.Path) -> str:
        """FILE:LINE, as near as it is known."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return self.path

    def part(self, format: str, name: str) -> Document:
        """The mapping under ``name`` as a document of its own format."""
        origins = {path[1:]: where for path, where in self.origins.items() if path[:1] == (name,)}
        return Document(format, self.path, self.values[name], origins, f"{self.prefix}{name}.")


def _leaves(value: Any, path: read.Path) -> Iterator[tuple[read.Path, Any]]:
    if isinstance(value, dict) and (value or not path):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for i, item in enumerate(value):
            yield from _leaves(item, (*path, str(i)))
    else:
        yield path, value


def nothing(format: str) -> Document:
    return Document(format, "", {}, {})


Lenient = Callable[[str, Callable[[list[tuple[str, Any]]], Any]], Any]


def open_document(format: str, path: str, lenient: Lenient | None = None) -> Document:
    """Read FILE. ``lenient`` is a second reader of JSON, for what the library takes beyond it (comments)."""
    option, title = f"--from-{format}", TITLES[format]
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text", f"{title} is JSON or YAML", "give the text file, no pickle") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({option})", error.strerror or str(error), "check the path") from None
    as_json = format == "deepspeed" or text.lstrip().startswith("{")
    tree, loose = _json(text, path, lenient) if as_json else (read.parse(text, path), "")
    if tree.problems:
        raise tree.problems[0] if len(tree.problems) == 1 else ConfigError(tree.problems)
    if not isinstance(tree.value, dict) or not tree.value:
        holds = "nothing" if tree.value in (None, {}) else describe.show(tree.value)
        raise UsageError(f"{path} holds {holds}", f"{title} is a mapping of keys to values", "check the path")
    document = Document(format, path, tree.value, tree.origins)
    document.secrets = _hide_secrets(tree)
    document.loose = loose
    return document


def _json(text: str, path: str, lenient: Lenient | None) -> tuple[read.Tree, str]:
    """The tree, and why the strict reader refused it where the lenient one did not."""
    problems: list[Any] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for i, (key, _) in enumerate(pairs):
            if key in dict(pairs[:i]):
                why, do = "one of the two would be passed over", "keep one"
                problems.append(UsageError(f"{path} has the key {key} twice in one mapping", why, do))
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        problems.clear()
        value = lenient(text, unique) if lenient is not None else None
        if not isinstance(value, dict):
            what = f"{path}:{error.lineno} is not JSON"
            raise UsageError(what, error.msg, "correct the line, or the ones just above it") from None
        return read.Tree(value, {}, problems), f"{path}:{error.lineno}: {error.msg}"
    # The lines come from the YAML reader, to which a tab between two tokens means something else.
    lines = read.parse(text.replace("\t", " "), path)
    return read.Tree(value, {} if lines.problems else lines.origins, problems), ""


def _hide_secrets(tree: read.Tree) -> set[str]:
    """Names of what looks like a secret. Its value is taken out, so that it is in no output."""
    unset = {path for path, value in _leaves(tree.value, ()) if value is None}
    found = {error.what.rpartition(" (")[0] for error in check.secrets(tree)}
    for path in {tuple(name.split(".")) for name in found} | unset:
        holder = tree.value
        for part in path[:-1]:
            holder = holder[int(part)] if isinstance(holder, list) else holder.setdefault(part, {})
        if isinstance(holder, dict):
            holder[path[-1]] = None if path in unset else "not shown"
    return {name for name in found if tuple(name.split(".")) not in unset}


def flag(value: Any) -> bool:
    """YAML 1.1 and command lines know more words for true and false than YAML 1.2."""
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word in ("true", "yes", "on", "1", "y", "t"):
        return True
    if word in ("false", "no", "off", "0", "none", "n", "f", ""):
        return False
    raise Wrong("true or false")


def number(value: Any) -> float:
    """A YAML 1.1 reader takes 1e-5 for text, and so do files written for one."""
    try:
        if not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise Wrong("a number")


def whole(value: Any) -> int:
    found = number(value)
    if not found.is_integer():
        raise Wrong("a whole number")
    return int(found)


def words(value: Any) -> list[str]:
    """A list, or text with its elements between spaces or commas."""
    items = value if isinstance(value, list) else str(value).replace(",", " ").split()
    return [str(item).strip().lower() for item in items]
