"""The arms of a sweep: what the options ask for, names, what may differ between arms and what may not.

An arm is the sweep's configuration with some settings more, or another whole configuration. Arms are compared, so they
have to agree in all that is not under test: initial weights, data and their order, evaluation, length. Keys that decide
those are refused as a treatment, also where a configuration file differs in them.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpdist.config import Resolved
from mpdist.config.compat import changed
from mpdist.config.describe import show
from mpdist.errors import ConfigError, DoesNotFit, MachineError, MpdistError, UsageError
from mpdist.sweep_file import Arm

BASE = "base"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_LONGEST = 60
_OWN = ("name", "out_dir", "seed")  # what the sweep gives each run itself

# What all arms have in common, whatever is under test; with the reason, and what to do instead.
_FIXED: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("seed",), "every arm runs under the same seeds", "--seeds N says under how many"),
    (("name", "out_dir"), "the sweep names its runs itself", "take it out"),
    (
        ("model.path", "model.config", "model.revision", "model.trust_remote_code"),
        "all arms start from the same weights",
        "compare runs of two models yourself, each with `mpdist launch`",
    ),
    (
        ("data.", "batch.global"),
        "all arms see the same rows in the same windows, or a step of one is not a step of the other",
        "give all arms the same; batch.micro may differ",
    ),
    (("eval.",), "all arms are evaluated at the same points on the same rows", "give all arms the same"),
    (("budget.",), "all arms make the same number of steps", "--equal-time 300s gives each the steps of that time"),
    (("checkpoint.resume",), "all arms start from the same state", "give all arms the same"),
    (("track.", "launch.", "slurm."), "all arms are started and logged alike", "give all arms the same (--ranks N)"),
)


@dataclass(frozen=True)
class Wanted:
    """An arm as asked for: a file, and the settings on top of it. called: its name is the user's own.

    declared: the keys that the options name.
    """

    name: str
    path: str
    settings: tuple[str, ...] = ()
    control: bool = False
    file: str | None = None
    called: bool = False

    @property
    def declared(self) -> list[str]:
        return [text.partition("=")[0].strip() for text in self.settings]


@dataclass
class Problems:
    """What is wrong with the arms, each thing once, with the names of the arms that have it."""

    arms: int
    found: dict[str, tuple[MpdistError, list[str]]] = field(default_factory=dict)

    def add(self, arm: str, error: MpdistError) -> None:
        for one in error.problems if isinstance(error, ConfigError) else [error]:
            names = self.found.setdefault(str(one), (one, []))[1]
            if arm not in names:
                names.append(arm)

    def check(self) -> None:
        """Raises UsageError, DoesNotFit or MachineError with all of it, the first of these that there is."""
        if not self.found:
            return
        arms = {name for _, names in self.found.values() for name in names}
        lines = [f"{len(arms)} of {self.arms} arms cannot run:"]
        for number, (text, (_, names)) in enumerate(self.found.items(), 1):
            who = "every arm" if len(names) == self.arms > 1 else f"arm{'s' * (len(names) != 1)} {', '.join(names)}"
            lines.append(f"{number}. {who}: {text}")
        kinds = [type(error) for error, _ in self.found.values()]
        order = (UsageError, DoesNotFit, MachineError)
        raise next((kind for kind in order if any(issubclass(k, kind) for k in kinds)), UsageError)("\n".join(lines))


# -- what the options ask for ----------------------------------------------------------------------------------------


def ask(path: str, vary: Sequence[str], arms: Sequence[str], files: Sequence[str], control: bool) -> tuple[Wanted, ...]:
    """The arms in order: the product of the varied values, named ones, whole files, the control of the first.

    path: the sweep's configuration, which is an arm itself (`base`) where the options make fewer than two. vary:
    `KEY=A,B,C`. arms: `NAME:KEY=VALUE,KEY=VALUE`. Raises UsageError for what cannot be read.
    """
    found = [*_product(path, [_varied(text) for text in vary]), *(_named(path, text) for text in arms)]
    found += [Wanted(_slug(_stem(file)), file, file=file) for file in files]
    if len(found) < 2 and not (found and control):
        found.insert(0, Wanted(BASE, path))
    if control:
        first = found[0]
        found.append(Wanted(f"{first.name}-control", first.path, first.settings, True, first.file))
    return tuple(_distinct(found))


def _varied(text: str) -> tuple[str, list[str]]:
    key, equals, written = text.partition("=")
    values = split(written)
    if not equals or not key.strip() or not all(values):
        raise UsageError(
            f"--vary {text}", "it takes a key and its values", "write it like --vary precision.compute=fp32,bf16"
        )
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise UsageError(
            f"--vary {text}", f"{twice[0]} is there twice", "give each value once; --control repeats an arm"
        )
    return key.strip(), values


def _named(path: str, text: str) -> Wanted:
    name, colon, settings = text.partition(":")
    pairs = split(settings) if settings.strip() else []
    if not colon or "=" in name or not all("=" in pair and pair.partition("=")[0].strip() for pair in pairs):
        raise UsageError(
            f"--arm {text}",
            "it takes a name and the settings that make the arm",
            "write it like --arm pure:precision.compute=bf16,precision.master=compute (nothing after the colon: CONFIG as it is)",
        )
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        why = f"its name is a part of a folder's: letters, digits and . _ + -, at most {_LONGEST}"
        raise UsageError(f"--arm {text}", why, f"name it {_slug(name)}, say")
    return Wanted(name, path, tuple(pairs), called=True)


def split(text: str) -> list[str]:
    """The parts between commas, but for commas inside brackets, braces and quotes."""
    parts, depth, quote, begin = [], 0, "", 0
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    return [*parts, text[begin:].strip()]


def _product(path: str, varied: list[tuple[str, list[str]]]) -> list[Wanted]:
    keys = [key for key, _ in varied]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise UsageError(f"--vary {twice[0]}=... is given twice", "", "give all its values in one")
    found = []
    for values in itertools.product(*(values for _, values in varied)) if varied else ():
        name = "-".join(_part(key, value, i == 0) for i, (key, value) in enumerate(zip(keys, values, strict=True)))
        found.append(Wanted(_slug(name), path, tuple(f"{k}={v}" for k, v in zip(keys, values, strict=True))))
    return found


def _part(key: str, value: str, first: bool) -> str:
    """A setting in a name. A word says enough of the first key; of another, or of a number, its key is said too."""
    says_enough = first and re.fullmatch(r"[A-Za-z][\w .]*", value) and value not in ("true", "false", "null")
    return value if says_enough else f"{key.rpartition('.')[2]}-{value}"


def _slug(text: str) -> str:
    """What can be a part of a folder's name anywhere, short; the same for the same text."""
    slug = re.sub(r"[^A-Za-z0-9._+]+", "-", text).strip("-._") or "arm"
    return slug if len(slug) <= _LONGEST else f"{slug[: _LONGEST - 7]}-{_hash(text)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _stem(file: str) -> str:
    return re.sub(r"\.ya?ml$", "", file.replace("\\", "/").rpartition("/")[2])


def _distinct(arms: list[Wanted]) -> list[Wanted]:
    """Where two names are one (file systems may not tell upper case from lower), those made here get a mark."""
    found: list[Wanted] = []
    for arm in arms:
        alike = [other for other in arms if other.name.lower() == arm.name.lower()]
        if len(alike) > 1 and not arm.called:
            arm = replace(arm, name=f"{arm.name}-{_hash(' '.join((arm.path, *arm.settings)))}")
        found.append(arm)
    names = [arm.name.lower() for arm in found]
    if twice := [arm.name for arm in found if names.count(arm.name.lower()) > 1]:
        raise UsageError(
            f"two arms are called {twice[0]}", "", "give each arm once, and a name of its own: --arm NAME:..."
        )
    return found


# -- what follows ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arms:
    """The arms as they resolve under the first seed; `resolved` in the order of `wanted`."""

    wanted: tuple[Wanted, ...]
    resolved: tuple[Resolved, ...]
    treatment: tuple[str, ...]

    def arms(self) -> tuple[Arm, ...]:
        return tuple(
            Arm(wish.name, {key: look_up(made.values(), key) for key in self.treatment}, wish.control, wish.file)
            for wish, made in zip(self.wanted, self.resolved, strict=True)
        )


def settle(wanted: Sequence[Wanted], make: Callable[[Wanted], Resolved], problems: Problems) -> Arms | None:
    """Resolve the arms and find the treatment; None where `problems` has got some that forbid to go on.

    make: loads one arm; its ConfigError is noted. Problems of the world are not looked for here.
    """
    made: dict[str, Resolved] = {}
    for wish in wanted:
        for key in wish.declared:
            if found := _fixed(key):
                problems.add(wish.name, UsageError(f"{key} cannot be varied", *found))
        try:
            made[wish.name] = make(wish)
        except UsageError as error:
            problems.add(wish.name, error)
    if problems.found:
        return None
    first = made[wanted[0].name].values()
    differing: set[str] = set()
    for wish in wanted[1:]:
        there = made[wish.name].values()
        keys = changed(first, there, _OWN)
        for key in keys:
            if found := _fixed(key):
                what = f"{key}: {show(look_up(first, key))} in {wanted[0].name} -> {show(look_up(there, key))}"
                problems.add(wish.name, UsageError(what, *found))
        differing.update(keys)
    for one, other in itertools.combinations([wish for wish in wanted if not wish.control], 2):
        if not changed(made[one.name].values(), made[other.name].values(), _OWN):
            why = "two arms with the same settings show nothing but the machine's noise"
            same = UsageError(f"it is the same run as {one.name}", why, "take it out; --control repeats the first arm")
            problems.add(other.name, same)
    if problems.found:
        return None
    declared = [key for wish in wanted for key in wish.declared]
    return Arms(tuple(wanted), tuple(made[wish.name] for wish in wanted), _treatment(declared, differing))


def _fixed(key: str) -> tuple[str, str] | None:
    """Why a key is not for arms to differ in, and what to do; None for one that is."""
    for keys, why, do in _FIXED:
        if any(key == entry.rstrip(".") or key.startswith(entry.rstrip(".") + ".") for entry in keys):
            return why, do
    return None


def _treatment(declared: Sequence[str], differing: set[str]) -> tuple[str, ...]:
    """The keys in which the arms differ: as they were declared where they were, else (a default that hangs on another
    key, a whole file) as they are. A key stands for all below it."""
    named = [key for key in dict.fromkeys(declared) if any(_below(leaf, key) for leaf in differing)]
    keys = [*named, *(leaf for leaf in sorted(differing) if not any(_below(leaf, key) for key in named))]
    return tuple(key for key in keys if not any(_below(key, other) for other in keys if other != key))


def _below(key: str, section: str) -> bool:
    return key == section or key.startswith(section + ".")


def look_up(values: Any, key: str) -> Any:
    """The value at a dotted key, None where there is none."""
    for part in key.split("."):
        if isinstance(values, Mapping):
            values = values.get(part)
        elif isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        else:
            return None
    return values
