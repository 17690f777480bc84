"""The translation as it grows: our values with their sources, and one verdict for each key of theirs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpdist.config import describe
from mpdist.errors import MpdistError, UsageError
from mpdist.translate.document import Document, Wrong

TRANSLATED, OTHER, NONE, SAME, UNKNOWN = "translated", "other", "none", "same", "unknown"


@dataclass(frozen=True)
class Verdict:
    kind: str
    text: str = ""
    sets: Mapping[str, Any] = field(default_factory=dict)
    short: str = ""  # stands for `sets` in the account, where that is long


class Line(NamedTuple):
    """One key of theirs in the account."""

    document: Document
    key: str
    value: str
    verdict: Verdict


class Value(NamedTuple):
    """One of ours, and the keys of theirs that it came from; ``ours`` says it for a default of theirs."""

    value: Any
    source: str


class World(NamedTuple):
    """Ranks in all, on each node, nodes; ``parallel`` are the ranks that had rows of their own there. None: unknown."""

    ranks: int | None
    per_node: int | None
    nodes: int
    parallel: int | None
    source: str


class Library(NamedTuple):
    """What the library's own classes said: version, names with defaults, and why they refuse the file (or None)."""

    name: str
    version: str | None
    defaults: Mapping[str, Any]
    refusal: str | None = None


Rule = Callable[[Any, "Draft"], Verdict]


class Draft:
    def __init__(
        self, trainer: Document, deepspeed: Document, accelerate: Document, world: World, libraries: dict[str, Library]
    ) -> None:
        self.trainer, self.deepspeed, self.accelerate = trainer, deepspeed, accelerate
        self.world, self.libraries = world, libraries
        self.values: dict[str, Value] = {}
        self.lines: list[Line] = []
        self.defaults: list[tuple[str, dict[str, Any]]] = []  # their default in words, and ours
        self.open: dict[str, tuple[str, str, str]] = {}  # our key: FILL IN or DECIDE, an example, why
        self.guesses: dict[str, str] = {}  # our key, set by more than their file says: what was guessed
        self.notes: list[str] = []
        self.problems: list[MpdistError] = []
        self.filled: dict[str, tuple[Any, str]] = {}  # keys of DeepSpeed that were "auto"

    def account(self, document: Document, rules: Mapping[str, Rule]) -> None:
        """A verdict for each key of the document."""
        for path, value in document.leaves():
            key = ".".join(path)
            try:
                verdict = self._judge(document, rules, path, value)
            except Wrong as wrong:
                what = f"{document.prefix}{key} = {describe.show(value)} ({document.where(path)})"
                self.problems.append(UsageError(what, f"it has to be {wrong} there", "correct the value"))
                continue
            verdict = self._take(f"{document.prefix}{key}", verdict)
            self.lines.append(Line(document, f"{document.prefix}{key}", describe.show(value), verdict))

    def _judge(self, document: Document, rules: Mapping[str, Rule], path: tuple[str, ...], value: Any) -> Verdict:
        key = ".".join(path)
        if key in document.secrets:
            return Verdict(
                NONE, "it looks like a secret and is not copied: HF_TOKEN or WANDB_API_KEY in the environment"
            )
        rule = find(rules, path)
        if rule is None:
            return self._unknown(document, rules, path)
        if value is None and not getattr(rule, "takes_null", False):
            return Verdict(SAME, "not set there either")
        return rule(value, self)

    def _unknown(self, document: Document, rules: Mapping[str, Rule], path: tuple[str, ...]) -> Verdict:
        library, key = self.libraries.get(document.format), ".".join(path)
        if library is not None and key in library.defaults:
            newer = f"{library.name} {library.version} has it, this version of mpdist has nothing for it"
            return Verdict(NONE, newer)
        names = [name for name in rules if "*" not in name]
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.7) or [
            name for name in names if name.rpartition(".")[2] == path[-1]
        ]
        text = f"in {document.where(path)}" + (f"; did you mean {document.prefix}{near[0]}?" if near else "")
        return Verdict(UNKNOWN, text)

    def _take(self, key: str, verdict: Verdict) -> Verdict:
        """Put what the verdict sets among our values, unless another file's key has decided it."""
        for ours, value in verdict.sets.items():
            known = self.values.get(ours)
            if known is not None and known.value != value:
                text = f"{known.source} decides {ours} = {describe.show(known.value)}, as it does there"
                return Verdict(OTHER, text)
        for ours, value in verdict.sets.items():
            self.set(ours, value, key)
        return verdict

    def set(self, ours: str, value: Any, source: str) -> None:
        known = self.values.get(ours)
        if known is not None and source not in known.source.split(", "):
            source = f"{known.source}, {source}"
        self.values[ours] = Value(value, source)
        self.open.pop(ours, None)

    def default(self, words: str, sets: Mapping[str, Any]) -> None:
        """Write down a default of theirs. What is set already stays."""
        new = {ours: value for ours, value in sets.items() if ours not in self.values}
        if new:
            self.defaults.append((words, new))
            for ours, value in new.items():
                self.set(ours, value, "their default")

    def fill(self, ours: str, example: str, why: str) -> None:
        """A required value that their file does not have."""
        if ours not in self.values and self.open.get(ours, ("",))[0] != "FILL IN":
            self.open[ours] = ("FILL IN", example, why)

    def decide(self, ours: str, example: str, why: str) -> None:
        """A value of theirs has no equal: mpdist's default would hold, and may not be what is wanted."""
        if ours not in self.values:
            self.open.setdefault(ours, ("DECIDE", example, why))

    def note(self, text: str) -> None:
        """A difference that hangs on no key of theirs."""
        if text not in self.notes:
            self.notes.append(text)

    def get(self, ours: str, default: Any = None) -> Any:
        return self.values[ours].value if ours in self.values else default


def find(rules: Mapping[str, Rule], path: tuple[str, ...]) -> Rule | None:
    """The rule of a key: its own, one with `*` for a part of its name, or that of all below a section (`name.**`)."""
    if ".".join(path) in rules:
        return rules[".".join(path)]
    for i in range(len(path)):
        name = ".".join((*path[:i], "*", *path[i + 1 :]))
        if name in rules:
            return rules[name]
    for end in range(len(path), 0, -1):
        name = ".".join((*path[:end], "**"))
        if name in rules:
            return rules[name]
    return None


def to(ours: str, convert: Callable[[Any], Any], meaning: str = "") -> Rule:
    """The value under a name of ours. With ``meaning`` it is the same setting, but does not do quite the same."""
    return lambda value, _: Verdict(OTHER if meaning else TRANSLATED, meaning, {ours: convert(value)})


def none(text: str) -> Rule:
    return lambda value, _: Verdict(NONE, text)


def same(text: str) -> Rule:
    return lambda value, _: Verdict(SAME, text)


_OFF: tuple[Any, ...] = (False, 0, "", "no", "none", "false", [], {})


def off(text: str, *also: Any) -> Rule:
    """No equal, unless it is switched off (or has a value in ``also``): then there is nothing to miss."""

    def rule(value: Any, _: Draft) -> Verdict:
        plain = value.lower() if isinstance(value, str) else value
        if plain in _OFF or value in also:
            return Verdict(SAME, "off there, and not in mpdist")
        return Verdict(NONE, text)

    return rule


def with_null(rule: Rule) -> Rule:
    """Lets the rule judge null too, which else means not set."""

    def judge(value: Any, draft: Draft) -> Verdict:
        return rule(value, draft)

    judge.takes_null = True  # type: ignore[attr-defined]
    return judge
