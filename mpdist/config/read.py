"""YAML 1.2 text to plain values, with the file and line of each one.

ruamel.yaml is used up to its node graph only: nodes carry lines, and repeated keys are still there to be refused.
"""

from __future__ import annotations

from typing import Any

from mpdist.errors import MpdistError, UsageError

Path = tuple[str, ...]

MOST_VALUES = 100_000  # of one document with its aliases written out; a few lines of them can mean billions


class Tree:
    """Nested plain values, where each came from (by path; list elements by number), and what was wrong on the way."""

    def __init__(
        self, value: Any, origins: dict[Path, str] | None = None, problems: list[MpdistError] | None = None
    ) -> None:
        self.value = value
        self.origins: dict[Path, str] = origins or {}
        self.problems: list[MpdistError] = problems or []


def parse(text: str, where: str, line_numbers: bool = True) -> Tree:
    """The tree of one document. ``where`` is a file name, or 'command line' with ``line_numbers`` off."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    tree = Tree(None)
    yaml = YAML(typ="safe", pure=True)
    try:
        root = yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{where}:{mark.line + 1}" if mark and line_numbers else where
        reason = " ".join(part for part in (error.context, error.problem) if part)
        tree.problems.append(UsageError(f"{at} is not YAML", reason, "correct the line, or the ones just above it"))
        return tree
    except RecursionError:
        tree.problems.append(UsageError(f"{where} is not usable YAML", "it is nested too deeply", "write it flat"))
        return tree
    except (YAMLError, ValueError) as error:
        tree.problems.append(
            UsageError(f"{where} is not YAML", str(error).splitlines()[0], "save it as plain UTF-8 text")
        )
        return tree
    if root is not None:
        try:
            _Builder(tree, yaml.constructor, where, line_numbers).build(root, ())
        except _TooManyError:
            why = f"written out, its aliases hold more than {MOST_VALUES:,} values"
            tree = Tree(
                None, {}, [UsageError(f"{where} is not usable YAML", why, "write the values out that are meant")]
            )
    return tree


class _TooManyError(Exception):
    pass


class _Builder:
    def __init__(self, tree: Tree, constructor: Any, where: str, line_numbers: bool) -> None:
        self.tree, self.constructor, self.where, self.line_numbers = tree, constructor, where, line_numbers
        self.open_nodes: set[int] = set()

    def at(self, node: Any) -> str:
        return f"{self.where}:{node.start_mark.line + 1}" if self.line_numbers else self.where

    def build(self, node: Any, path: Path) -> None:
        self.tree.value = self._value(node, path, self.at(node))

    def _value(self, node: Any, path: Path, origin: str) -> Any:
        self.tree.origins[path] = origin
        if len(self.tree.origins) > MOST_VALUES:
            raise _TooManyError
        kind = type(node).__name__
        if kind == "ScalarNode":
            return self._scalar(node)
        if id(node) in self.open_nodes:
            self._problem(origin, "an alias inside the value that it names", "write the value out")
            return None
        self.open_nodes.add(id(node))
        if kind == "SequenceNode":
            value: Any = [self._value(item, (*path, str(i)), self.at(item)) for i, item in enumerate(node.value)]
        else:
            value = self._mapping(node, path)
        self.open_nodes.discard(id(node))
        return value

    def _mapping(self, node: Any, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if type(key_node).__name__ != "ScalarNode":
                self._problem(self.at(key_node), "a key that is not a word", "write `key: value`")
                continue
            key = _joined(str(key_node.value))
            if key in result:
                name = ".".join((*path, key))
                first = self.tree.origins[(*path, key)]
                self._problem(
                    f"{name} ({self.at(key_node)})", f"it was already given at {first}", "keep one of the two"
                )
                continue
            result[key] = self._value(value_node, (*path, key), self.at(key_node))
        return result

    def _scalar(self, node: Any) -> Any:
        tag = str(node.tag)
        if not tag.startswith("tag:yaml.org,2002:"):
            self._problem(self.at(node), f"the tag {tag} has no meaning here", "remove the tag")
            return _joined(node.value)
        # A date is not a type of ours: `name: 2024-01-01` is text.
        # Nor are digits with `_` between them a number in YAML 1.2: `name: 2024_01` is text, too.
        if tag.rsplit(":", 1)[1] in ("null", "bool", "int", "float") and "_" not in node.value:
            try:
                return self.constructor.construct_object(node)
            except ValueError:
                return node.value
        return _joined(node.value)

    def _problem(self, what: str, why: str, do: str) -> None:
        self.tree.problems.append(UsageError(what, why, do))


def _joined(text: str) -> str:
    """JSON writes a character beyond 16 bits as two escapes, of which YAML makes two halves of a character."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:  # a half without its other half: whoever uses the text says that it is none
        return text


def merge(parent: Tree, child: Tree) -> Tree:
    """``child`` over ``parent``: mappings key by key, everything else as a whole."""
    tree = Tree(None, {}, [*parent.problems, *child.problems])

    def walk(old: Any, new: Any, path: Path) -> Any:
        tree.origins[path] = child.origins[path]
        if isinstance(old, dict) and isinstance(new, dict):
            result = {}
            for key, value in old.items():
                if key not in new:
                    result[key] = value
                    _copy(parent.origins, tree.origins, (*path, key))
            for key, value in new.items():
                result[key] = walk(old.get(key), value, (*path, key))
            return {key: result[key] for key in [*old, *(k for k in new if k not in old)]}
        _copy(child.origins, tree.origins, path)
        return new

    tree.value = walk(parent.value, child.value, ())
    return tree


def _copy(source: dict[Path, str], target: dict[Path, str], path: Path) -> None:
    target.update({p: origin for p, origin in source.items() if p[: len(path)] == path})
