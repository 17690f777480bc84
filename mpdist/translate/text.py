"""A draft as a YAML file: the configuration, and below it the account of their keys as comments."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from mpdist.config import describe, write
from mpdist.translate.document import Document
from mpdist.translate.draft import NONE, OTHER, SAME, TRANSLATED, UNKNOWN, Draft, Line

_WIDTH = 120
_NAMES = {"accelerate": "accelerate", "deepspeed": "DeepSpeed", "trainer": "transformers"}
_HEADS = {
    TRANSLATED: "Translated",
    OTHER: "Means something else here",
    NONE: "No equal here",
    UNKNOWN: "Not a key of theirs, as far as is known here: passed over",
    SAME: "Nothing to do",
}


def render(draft: Draft, problems: list[str]) -> str:
    """The whole file. ``problems``: why mpdist would refuse it as it stands."""
    return "".join([_head(draft), body(draft), "\n", *_account(draft), *_rest(draft, problems)])


def documents(draft: Draft) -> list[Document]:
    found: list[Document] = []
    for line in draft.lines:
        if line.document not in found:
            found.append(line.document)
    return found


def _head(draft: Draft) -> str:
    files = " and ".join(f"{document.path} ({_name(draft, document)})" for document in documents(draft))
    text = (
        f"An mpdist configuration, translated from {files}. The account of their keys is below. A line with FILL IN has "
        "to be written before it loads; at a line with DECIDE the default of mpdist, or what is guessed there, holds until it is."
    )
    return _comment(text, "# ", "# ") + "\n"


def _name(draft: Draft, document: Document) -> str:
    version = draft.libraries[document.format].version
    return f"{_NAMES[document.format]} {version}" if version else _NAMES[document.format]


def body(draft: Draft) -> str:
    """The configuration itself, in the order of the schema, each line with its source."""
    tree: dict[str, Any] = {}
    for ours in sorted({*draft.values, *draft.open}, key=_position):
        *path, leaf = ours.split(".")
        holder = tree
        for part in path:
            holder = holder.setdefault(part, {})
        holder[leaf] = (ours,)
    return "".join(_lines(draft, tree, 0))


def _position(ours: str) -> tuple[int, str]:
    order = [name for name, _ in describe.all_keys()]
    return (order.index(ours) if ours in order else len(order), ours)


def _lines(draft: Draft, tree: Mapping[str, Any], indent: int) -> Iterator[str]:
    for key, item in tree.items():
        margin = " " * indent
        if isinstance(item, dict):
            yield f"{margin}{key}:\n"
            yield from _lines(draft, item, indent + 2)
        elif item[0] in draft.values:
            value, source = draft.values[item[0]]
            first, *more = source.split(", ")
            guess = f"; DECIDE, guessed: {draft.guesses[item[0]]}" if item[0] in draft.guesses else ""
            yield f"{margin}{key}: {write.inline(value)}  # {first}{f' and {len(more)} more' if more else ''}{guess}\n"
        else:
            what, example, why = draft.open[item[0]]
            yield f"{margin}# {what} {key}: {example}  # {why}\n"


def _account(draft: Draft) -> Iterator[str]:
    for document in documents(draft):
        yield f"# ==== The keys of {document.path} ({_name(draft, document)})\n"
        lines = [line for line in draft.lines if line.document is document]
        for kind in (TRANSLATED, OTHER, NONE, UNKNOWN, SAME):
            found = [line for line in lines if line.verdict.kind == kind]
            if found:
                yield f"#\n# {_HEADS[kind]}:\n"
                yield from (_comment(_line(line), "#   ", "#       ") for line in found)
        yield "#\n"


def _line(line: Line) -> str:
    sets = line.verdict.short or ", ".join(
        f"{ours} = {describe.show(value)}" for ours, value in line.verdict.sets.items()
    )
    arrow = f" -> {sets}" if sets else ""
    text = f": {line.verdict.text}" if line.verdict.text else ""
    return f"{line.key} = {line.value}{arrow}{text}"


def _rest(draft: Draft, problems: list[str]) -> Iterator[str]:
    if draft.defaults:
        yield "# ==== Their defaults, written down because ours differ\n"
        for words, sets in draft.defaults:
            ours = ", ".join(f"{name} = {describe.show(value)}" for name, value in sets.items())
            yield _comment(f"{words} -> {ours}", "#   ", "#       ")
        yield "#\n"
    if draft.notes:
        yield "# ==== Other, whatever the keys say\n"
        yield from (_comment(note, "#   ", "#       ") for note in draft.notes)
        yield "#\n"
    asked = [_asked(draft, document) for document in documents(draft)]
    yield "# ==== What their own classes say of it\n"
    yield from (_comment(text, "#   ", "#       ") for text in asked)
    if problems:
        yield "#\n# ==== mpdist refuses it as it stands\n"
        yield from (_comment(problem, "#   ", "#       ") for problem in problems)


def _asked(draft: Draft, document: Document) -> str:
    library, name = draft.libraries[document.format], _name(draft, document)
    if library.version is None:
        return f"{name} is not installed: whether it takes the file, and its own defaults, is not checked."
    if library.refusal:
        return f"{name} refuses the file: {library.refusal}"
    if document.format == "trainer":
        return f"{name}: names and defaults are those of its TrainingArguments; the values are not checked."
    if document.loose:
        return (
            f"{name} takes the file, but it is no strict JSON ({document.loose}): DeepSpeed reads it by hjson, while accelerate "
            "and transformers read it by json and refuse it."
        )
    return f"{name} takes the file."


def _comment(text: str, first: str, then: str) -> str:
    lines = textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines) + "\n"


def summary(draft: Draft, problems: list[str]) -> str:
    """One line for the terminal when the file goes elsewhere."""
    count = {kind: sum(line.verdict.kind == kind for line in draft.lines) for kind in _HEADS}
    text = (
        f"{len(draft.lines)} key{'s' * (len(draft.lines) != 1)}: {count[TRANSLATED]} translated, {count[OTHER]} mean something else here, "
        f"{count[NONE]} without an equal, {count[UNKNOWN]} unknown, {count[SAME]} with nothing to do"
    )
    missing = [ours for ours, (what, _, _) in draft.open.items() if what == "FILL IN"]
    undecided = [ours for ours, (what, _, _) in draft.open.items() if what == "DECIDE"]
    undecided += [f"{ours} (guessed: {guess})" for ours, guess in draft.guesses.items()]
    if missing:
        text += f"\nto fill in: {', '.join(missing)}"
    if undecided:
        text += f"\nto decide: {', '.join(undecided)}"
    for document in documents(draft):
        if draft.libraries[document.format].refusal or document.loose:
            text += f"\ntheirs: {_asked(draft, document)}"
    return text + "".join(f"\nrefused as it stands: {problem}" for problem in problems)
