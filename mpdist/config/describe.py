"""The schema in words: for messages ('a whole number >= 1'), suggestions and the README's reference."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

from mpdist.config import schema

_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


class Key(NamedTuple):
    """One key. ``kind`` is value, section, list (of sections) or free (a mapping whose keys are not ours)."""

    name: str
    kind: str
    expects: str
    default: str
    description: str
    nullable: bool
    is_text: bool
    section: type[BaseModel] | None


def children(section: type[BaseModel]) -> dict[str, Key]:
    return _children(section)


@functools.cache
def _children(section: type[BaseModel]) -> dict[str, Key]:
    return {field.alias or name: _key(field.alias or name, field) for name, field in section.model_fields.items()}


def find(path: tuple[str, ...]) -> Key | None:
    """The key at ``path``; None where there is none. Anything below a free mapping is a free key."""
    section: type[BaseModel] | None = schema.Config
    key: Key | None = None
    for part in path:
        if key is not None and key.kind == "free":
            text = key.expects.endswith("to text")
            return Key(part, "free", "text" if text else "anything", "", "", True, text, None)
        if key is not None and key.kind == "list" and part.isdecimal():
            key = Key(part, "section", "a mapping", "", "", False, False, key.section)
            continue
        if section is None or (key is not None and key.kind not in ("section",)):
            return None
        key = children(section).get(part)
        if key is None:
            return None
        section = key.section
    return key


def all_keys(section: type[BaseModel] = schema.Config, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Every key with its dotted name, sections before what they hold; a list's elements as `data.train.N.path`."""
    for name, key in children(section).items():
        yield prefix + name, key
        if key.section is not None:
            yield from all_keys(key.section, f"{prefix}{name}.{'N.' if key.kind == 'list' else ''}")


def _key(name: str, field: FieldInfo) -> Key:
    annotation, metadata = _plain(field.annotation, list(field.metadata))
    nullable = any(arm is type(None) for arm in _arms(annotation))
    arms = [_plain(arm, []) for arm in _arms(annotation) if arm is not type(None)]
    kind, section, is_text = "value", None, False
    if len(arms) == 1:
        inner = arms[0][0]
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            kind, section = "section", inner
        elif get_origin(inner) is tuple and _is_section(get_args(inner)[0]):
            kind, section = "list", get_args(inner)[0]
        elif get_origin(inner) is dict:
            kind = "free"
        is_text = inner is str
    return Key(
        name,
        kind,
        describe(annotation, metadata),
        _default(field, section),
        field.description or "",
        nullable,
        is_text,
        section,
    )


def _default(field: FieldInfo, section: type[BaseModel] | None) -> str:
    if field.is_required():
        return "required"
    if section is not None and field.validate_default:
        return ""
    value = field.get_default(call_default_factory=True, validated_data={})
    return show(list(value) if isinstance(value, tuple) else value)


def show(value: Any) -> str:
    """A value as it would be written in YAML, cut to one short line."""
    from mpdist.config.write import inline

    text = inline(value)
    return text if len(text) <= 60 else text[:57] + "..."


def describe(annotation: Any, metadata: list[Any] | None = None) -> str:
    annotation, metadata = _plain(annotation, list(metadata or []))
    arms = [arm for arm in _arms(annotation) if arm is not type(None)]
    words = [_one(arm, metadata) for arm in arms]
    if len(arms) < len(_arms(annotation)):
        words.append("null")
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _one(annotation: Any, metadata: list[Any]) -> str:
    annotation, metadata = _plain(annotation, metadata)
    if any(getattr(m, "func", None) is schema._duration for m in metadata):
        most = next((m.le for m in metadata if getattr(m, "le", None) is not None), None)
        return "a length of time such as 10m" + (f", at most {most / 86400:g}d" if most else "")
    if any(isinstance(m, AfterValidator) and m.func is schema._checkpointing for m in metadata):
        return "none, full, selective or 'every N'"
    if any(isinstance(m, AfterValidator) and m.func is schema._folder_name for m in metadata):
        return "text, one folder name"
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        words = [show(value) for value in args]
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    if origin is tuple:
        filled = any(
            getattr(part, "min_length", 0) for item in metadata for part in (item, *getattr(item, "metadata", ()))
        )
        end = ", not empty" if filled else ""
        if _is_section(args[0]):
            return f"a list of mappings{end}"
        inner = describe(args[0])
        if len(args) == 2 and args[1] is not Ellipsis:
            return f"a list of two numbers, each {inner.removeprefix('a number ')}"
        return f"a list of {'texts' if inner == 'text' else inner.replace('a whole number', 'whole numbers')}{end}"
    if origin is dict:
        return "a mapping of text to text" if describe(args[1]) == "text" else "a mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a mapping"
    word = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(annotation, "anything")
    return word + _bounds(metadata)


def _bounds(metadata: list[Any]) -> str:
    found = []
    for item in metadata:
        for part in (item, *getattr(item, "metadata", ())):
            for attribute, word in _BOUNDS:
                bound = getattr(part, attribute, None)
                if isinstance(bound, (int, float)):
                    found.append(f"{word} {bound:g}" if bound < 2**53 else f"{word} {bound}")
    return f" {' and '.join(found)}" if found else ""


def _plain(annotation: Any, metadata: list[Any]) -> tuple[Any, list[Any]]:
    while get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        annotation, metadata = inner, [*metadata, *more]
    return annotation, metadata


def _arms(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def reference() -> str:
    """Every key as a Markdown table, in the schema's order."""
    lines = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, key in all_keys():
        bold = key.section is not None
        cells = (f"**`{name}`**" if bold else f"`{name}`", key.expects, key.default, key.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
