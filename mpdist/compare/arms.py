"""Which runs are one arm, what may differ between arms, and which arm the others are measured against."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpdist.compare.tree import Note, Run
from mpdist.errors import UsageError
from mpdist.sweep_file import Sweep

TREATMENT = ("precision.*", "reduce.*")  # what may differ where nobody declares anything
_NAMED = re.compile(r"(.+)-seed(\d+)")


@dataclass(frozen=True)
class Group:
    """The runs of one arm, in order of their seed, and its values of the treatment's keys that vary."""

    name: str
    runs: tuple[Run, ...]
    settings: Mapping[str, Any]
    control: bool = False


@dataclass(frozen=True)
class Grouping:
    """treatment: as declared; varied: the keys of it that differ between runs. reference and control: names of arms."""

    treatment: tuple[str, ...]
    varied: tuple[str, ...]
    groups: tuple[Group, ...]
    reference: str
    control: str | None
    notes: tuple[Note, ...]

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)


def in_patterns(key: str, patterns: Iterable[str]) -> bool:
    """Whether a dotted key is named: by itself, by a section (`precision`, `precision.`, `precision.*`) that holds it."""
    stems = (pattern.removesuffix("*").rstrip(".") for pattern in patterns)
    return any(key == stem or key.startswith(f"{stem}.") for stem in stems)


def group(
    runs: Sequence[Run], sweep: Sweep | None, treatment: Sequence[str] = (), against: str | None = None
) -> Grouping:
    """The arms of these runs. treatment: the keys that the user declares; else the sweep's, else precision and reduce.

    Raises UsageError where the runs make no two arms, or an arm has two runs of one seed.
    """
    declared = tuple(treatment) or (sweep.treatment if sweep is not None else ()) or TREATMENT
    if not treatment and sweep is not None and sweep.equal_time is not None:
        declared += ("budget.steps",)
    _known(treatment)
    keys = sorted({key for run in runs for key in run.values})
    varied = tuple(
        key for key in keys if in_patterns(key, declared) and len({repr(run.values.get(key)) for run in runs}) > 1
    )
    named, notes = _named(runs, sweep), []
    members = named if named is not None else _by_values(runs, varied)
    if len(members) < 2:
        raise UsageError(
            f"all {len(runs)} runs are of one arm, {next(iter(members))}" if len(runs) > 1 else f"{runs[0].path}: one run",
            "a comparison takes two arms: runs that differ in the treatment, or two runs of one seed", "name more runs",
        )  # fmt: skip
    groups = tuple(
        Group(name, tuple(sorted(own, key=lambda run: run.seed)), {key: own[0].values.get(key) for key in varied},
              sweep is not None and any(arm.control for arm in sweep.arms if arm.name == name))
        for name, own in members.items()
    )  # fmt: skip
    for one in groups:
        _one_of_each_seed(one)
    if sweep is not None:
        missing = [run.path for run in sweep.runs if run.path not in {one.name for one in runs}]
        if missing:
            notes.append(
                Note(
                    "missing",
                    f"{len(missing)} of the sweep's {len(sweep.runs)} runs are not here, or have not made a step: "
                    + ", ".join(missing),
                )
            )
    reference = _reference(groups, sweep, against)
    return Grouping(declared, varied, groups, reference, _control(groups, reference), tuple(notes))


def _known(treatment: Sequence[str]) -> None:
    from mpdist.config.describe import all_keys

    known = [key for key, _ in all_keys()]
    for pattern in treatment:
        if not any(in_patterns(key, [pattern]) for key in known) and not in_patterns(pattern, ("model.config",)):
            import difflib

            near = difflib.get_close_matches(pattern.removesuffix(".*"), known, n=1)
            raise UsageError(f"--treatment {pattern}", "no key of a configuration is called that",
                             f"did you mean {near[0]}?" if near else "`mpdist config --reference` lists the keys")  # fmt: skip


def _named(runs: Sequence[Run], sweep: Sweep | None) -> dict[str, list[Run]] | None:
    """Arms by the sweep's word, or by names such as bf16-seed1; None where the names do not say."""
    members: dict[str, list[Run]] = {}
    arms = {run.path: run.arm for run in sweep.runs} if sweep is not None else {}
    for run in runs:
        match = _NAMED.fullmatch(run.name)
        arm = arms.get(run.name) or (match[1] if match is not None and int(match[2]) == run.seed else None)
        if arm is None:
            return None
        members.setdefault(arm, []).append(run)
    order = [arm.name for arm in sweep.arms] if sweep is not None else list(members)
    return {name: members[name] for name in order if name in members}


def _by_values(runs: Sequence[Run], varied: Sequence[str]) -> dict[str, list[Run]]:
    """Arms by their values of what varies; runs that are alike in all of it, seed included, are arms of their own."""
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(_values_name(run, varied), []).append(run)
    twice = any(len({run.seed for run in own}) < len(own) for own in members.values())
    if twice or all(len(own) == 1 for own in members.values()):
        names = [run.name for run in runs]
        return {run.name if names.count(run.name) == 1 else str(run.path): [run] for run in runs}
    return members


def _values_name(run: Run, varied: Sequence[str]) -> str:
    from mpdist.config.describe import show

    if len(varied) == 1:
        return show(run.values.get(varied[0]))
    return ",".join(f"{key.rpartition('.')[2]}={show(run.values.get(key))}" for key in varied) or "all"


def _one_of_each_seed(group: Group) -> None:
    seeds = [run.seed for run in group.runs]
    for seed in seeds:
        if seeds.count(seed) > 1:
            both = " and ".join(str(run.path) for run in group.runs if run.seed == seed)
            raise UsageError(f"arm {group.name} has two runs of seed {seed}: {both}",
                             "runs are paired by their seeds", "leave one out, or give the runs names of two arms")  # fmt: skip


def _reference(groups: Sequence[Group], sweep: Sweep | None, against: str | None) -> str:
    names = [one.name for one in groups]
    if against is not None:
        if against not in names:
            raise UsageError(f"--against {against}", "no arm is called that", f"the arms are {', '.join(names)}")
        return against
    plain = [one.name for one in groups if not one.control and one.name != "control"]
    if sweep is not None and sweep.arms[0].name in plain:
        return sweep.arms[0].name
    full = [one.name for one in groups if one.name in plain and _is_fp32(one.runs[0].values)]
    return (full or plain or names)[0]


def _is_fp32(values: Mapping[str, Any]) -> bool:
    return (values["precision.compute"], values["reduce.wire"], values["precision.tf32"]) == ("fp32", "fp32", False)


def _control(groups: Sequence[Group], reference: str) -> str | None:
    """The A/A control: named so by the sweep, or one of three arms and more that is the reference over again."""
    own = next(one for one in groups if one.name == reference).settings
    alike = [one for one in groups if one.name != reference and one.settings == own]
    if len(groups) > 2:
        alike.sort(key=lambda one: not one.control)
        return alike[0].name if alike else None
    return next((one.name for one in alike if one.control), None)
