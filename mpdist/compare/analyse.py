"""From run directories to a Comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpdist.compare import arms as arming
from mpdist.compare import defects, fairness, gates, guide, read, windows
from mpdist.compare.figures import figures
from mpdist.compare.intervals import LEVEL
from mpdist.compare.pairs import pair, withheld
from mpdist.compare.tree import Arm, Comparison, Defect, Note, Pair, Run
from mpdist.compare.verdict import verdict
from mpdist.errors import UsageError
from mpdist.sweep_file import Sweep

WARMUP = 2  # windows, as the logged rates leave out
AROUND = (
    "host", "cpu", "cores", "memory_bytes", "device", "devices", "threads", "ranks", "nodes", "backend", "python", "platform",
    "attention", "deterministic", "tf32",
)  # fmt: skip


def compare(
    paths: Sequence[str],
    *,
    treatment: Sequence[str] = (),
    allow: Sequence[str] = (),
    against: str | None = None,
    warmup: int = WARMUP,
    target: float | None = None,
    gate: Sequence[str] = (),
) -> Comparison:
    """The runs at these paths beside each other.

    treatment: the keys that may differ (default: the sweep's, else precision and reduce). allow: differences to accept, by
    name. against: the arm that the others are measured against. warmup: windows to leave out of rates and clocks. target:
    the evaluation loss to reach (default: the highest that a run ends with). gate: see mpdist.compare.gates.

    Where `refused` is not empty, nothing was compared: there are arms, and no pairs. Raises UsageError.
    """
    runs = read.runs(paths)
    sweep = read.sweep_of([run.path for run in runs])
    asked: dict[str, Any] = {
        "treatment": treatment,
        "allow": allow,
        "against": against,
        "warmup": warmup,
        "target": target,
    }
    return analyse(runs, sweep, **asked, gate=gate)


def analyse(
    runs: Sequence[Run],
    sweep: Sweep | None,
    *,
    treatment: Sequence[str] = (),
    allow: Sequence[str] = (),
    against: str | None = None,
    warmup: int = WARMUP,
    target: float | None = None,
    gate: Sequence[str] = (),
) -> Comparison:
    """As `compare`, of runs that have been read."""
    wanted = gates.parse(gate)
    grouping = arming.group(runs, sweep, treatment, against)
    refused, allowed = fairness.sort(fairness.differences(grouping), allow)
    warm = windows.warm(runs, warmup)
    built = [
        Arm(one.name, one.settings, one.runs, figures(one.runs, warm), one.name == grouping.control)
        for one in grouping.groups
    ]
    reference = next(arm for arm in built if arm.name == grouping.reference)
    built.sort(key=lambda arm: (arm is not reference, arm.control))
    common = tuple(sorted(set.intersection(*(set(arm.seeds) for arm in built))))
    if not refused and not common:
        raise UsageError(
            "the arms have no seed in common", "runs are paired by their seeds", "run the same seeds of each"
        )
    found: tuple[Defect, ...] = () if refused else tuple(defects.find(built, reference))
    pairs = () if refused else _pairs(built, reference, warm, target, grouping.control)
    by_name = {arm.name: arm for arm in built}
    verdicts = tuple(verdict(one, by_name[one.arm], reference, found, one.arm == grouping.control) for one in pairs)
    notes = [*grouping.notes, *fairness.notes(grouping), *_notes(built, pairs, warm)]
    return Comparison(
        treatment=grouping.treatment, varied=grouping.varied, reference=grouping.reference, control=grouping.control,
        seeds=common, warmup=warmup, warmup_step=warm or 0, level=LEVEL, refused=refused, allowed=allowed, notes=tuple(notes),
        defects=found, arms=tuple(built), pairs=pairs, verdicts=verdicts,
        gates=gates.judge(wanted, built, pairs, found, grouping.control) if pairs else (),
        guide=guide.advise(built, pairs, verdicts, found, grouping.control) if pairs else (),
        environment=environment(runs),
    )  # fmt: skip


def _pairs(
    built: Sequence[Arm], reference: Arm, warm: int | None, target: float | None, control: str | None
) -> tuple[Pair, ...]:
    ends = [float(run.evals[-1]["eval/loss"]) if run.evals else math.nan for arm in built for run in arm.runs]
    if target is None and all(map(math.isfinite, ends)):
        target = max(ends)  # so that every run gets there
    found = [pair(arm, reference, warm, target) for arm in built if arm is not reference]
    again = next((one for one in found if one.arm == control), None)
    return tuple(withheld(one, again) for one in found)


def environment(runs: Sequence[Run]) -> dict[str, Any]:
    """What surrounded the runs: each fact once where all agree, else every value that there was."""
    found: dict[str, Any] = {}
    for key in AROUND:
        values: list[Any] = []
        for run in runs:
            values += [env[key] for env in run.envs if key in env and env[key] not in values]
        if values:
            found[key] = values[0] if len(values) == 1 else values
    found["versions"] = {
        name: version for run in runs for env in run.envs for name, version in env.get("versions", {}).items()
    }
    return found


def _notes(built: Sequence[Arm], pairs: Sequence[Pair], warm: int | None) -> list[Note]:
    found: list[Note] = []
    if warm is None:
        found.append(
            Note("warm-up", "no run logged a step behind the warm-up that all others logged: no rates, no clocks")
        )
    if any(len(one.seeds) < 2 for one in pairs):
        found.append(Note("one seed", "one seed: differences have no interval, and no claim is made of them"))
    for one in pairs:
        at = one.at_time("train")
        if at is not None and not at.same_phase and at.phase is not None:
            further = "further" if at.phase[0] > at.phase[1] else "less far"
            found.append(Note(
                "phase",
                f"after {at.seconds:,.4g} s of training {one.arm} has {at.phase[0]:.0%} of its schedule behind it, {one.against} "
                f"{at.phase[1]:.0%}: its learning rate has moved {further}, which changes the loss by itself",
            ))  # fmt: skip
    lengths = sorted({run.steps for arm in built for run in arm.runs})
    if len(lengths) > 1:
        found.append(
            Note(
                "length",
                f"runs reached {lengths[0]:,} to {lengths[-1]:,} steps: matched steps end where the shortest of a pair does",
            )
        )
    return found
