"""What a check has found, and how findings of many ranks become one list, one table, one decision.

A finding is `ok`, `doubtful` (it goes on, and is told) or `failed` (nothing starts). What several ranks found alike is
one finding that names them all, so that a thousand ranks do not fill a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpdist.errors import Diverged, DoesNotFit, MachineError, MpdistError, UsageError

LEVELS = ("failed", "doubtful", "ok")
_STATUSES: tuple[type[MpdistError], ...] = (MachineError, DoesNotFit, UsageError, Diverged, MpdistError)


@dataclass(frozen=True)
class Finding:
    """check: its name. value: what was found, for a person. why and do: for what is not ok, as an error has them.
    ranks: those that found it, empty for what all found together. host: of the first of them. status: the exit status of
    a failure. settings: what cures it, by the dotted names of a configuration."""

    check: str
    value: str
    level: str = "ok"
    why: str = ""
    do: str = ""
    ranks: tuple[int, ...] = ()
    host: str = ""
    status: int = MachineError.status
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def ok(self) -> bool:
        return self.level == "ok"

    def to_json(self) -> dict[str, Any]:
        """As env.json and `mpdist doctor --json` have it; what is empty is left out."""
        row: dict[str, Any] = {"check": self.check, "ok": self.ok, "level": self.level, "value": self.value}
        if self.ranks:
            row |= {"rank": self.ranks[0], "ranks": shortened(self.ranks), "host": self.host}
        row |= {key: text for key, text in (("why", self.why), ("do", self.do)) if text}
        row |= {"settings": dict(self.settings)} if self.settings else {}
        return row | ({"status": self.status} if self.level == "failed" else {})

    @property
    def what(self) -> str:
        """One line: whose, which check, what was found."""
        who = f"rank{'s' * (len(self.ranks) > 1)} {shortened(self.ranks)} on {self.host}: " if self.ranks else ""
        return f"{who}{self.check}: {self.value}"


def from_json(row: Mapping[str, Any]) -> Finding:
    """The finding that `to_json` wrote."""
    ranks = tuple(numbered(row.get("ranks", "")))
    return Finding(row["check"], row["value"], row["level"], row.get("why", ""), row.get("do", ""), ranks,
                   row.get("host", ""), row.get("status", MachineError.status), row.get("settings", {}))  # fmt: skip


def shortened(ranks: Sequence[int]) -> str:
    """`0-3,6` for 0, 1, 2, 3 and 6."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def numbered(text: str) -> list[int]:
    """The numbers that `shortened` wrote."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def merged(found: Iterable[tuple[int, str, Sequence[Finding]]]) -> list[Finding]:
    """(rank, host, its findings) of all ranks, what is alike put together: in the order of the checks."""
    together: dict[tuple[str, ...], Finding] = {}
    checks: dict[str, int] = {}
    for rank, host, own in found:
        for finding in own:
            checks.setdefault(finding.check, len(checks))
            key = (finding.check, finding.level, finding.value, finding.why, finding.do)
            known = together.get(key, replace(finding, ranks=(), host=host))
            together[key] = replace(known, ranks=(*known.ranks, rank))
    return sorted(together.values(), key=lambda f: (checks[f.check], f.ranks))


def worst_first(found: Iterable[Finding]) -> list[Finding]:
    return sorted(found, key=lambda f: LEVELS.index(f.level))


def error_of(found: Iterable[Finding]) -> MpdistError | None:
    """What ends a start: the first failed finding's error, the others named in it; None where none has failed."""
    failed = [finding for finding in found if finding.level == "failed"]
    if not failed:
        return None
    first, *others = failed
    more = "".join(f"\n  and: {other.what}" + (f" (do: {other.do})" if other.do else "") for other in others)
    return kind_of(first.status)(first.what, first.why, first.do + more)


def kind_of(status: int) -> type[MpdistError]:
    """The class of error that ends with an exit status."""
    return next(kind for kind in _STATUSES if kind.status == status)


def table(found: Iterable[Finding], width: int = 118) -> str:
    """Worst first, one line a finding, its reason and cure below it."""
    rows = worst_first(found)
    wide = max((len(row.check) for row in rows), default=0)
    lines = []
    for row in rows:
        where = f"  (rank{'s' * (len(row.ranks) > 1)} {shortened(row.ranks)}, {row.host})" if _some(row, rows) else ""
        lines.append(f"{row.level:8}  {row.check:{wide}}  {row.value}{where}")
        for word, text in (("why", row.why), ("do", row.do)):
            if text:
                lines += _folded(text, f"{'':10}{word + ':':5}", width)
    return "\n".join(lines)


def to_paste(found: Iterable[Finding]) -> dict[str, Any]:
    """The settings that cure what was found, as a configuration nests them; of two for one key the worse finding's."""
    nested: dict[str, Any] = {}
    for finding in reversed(worst_first(found)):
        for name, value in finding.settings.items():
            *sections, key = name.split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = value
    return nested


def _some(row: Finding, rows: Sequence[Finding]) -> bool:
    """Whether it matters who has found this: not where it is the only finding of its check, or nobody's in particular."""
    return bool(row.ranks) and sum(other.check == row.check for other in rows) > 1


def _folded(text: str, head: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head))
