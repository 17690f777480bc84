"""Everything in which runs differ that is not the treatment: asked, found around them, held by them, fed to them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mpdist.compare import fed, whole
from mpdist.compare.arms import Group, Grouping, in_patterns
from mpdist.compare.tree import Difference, Note, Run
from mpdist.errors import UsageError

# Settings that neither change a number nor a second of training. `seed` is what pairs the runs; drills are told of apart.
INDIFFERENT = (
    "name", "out_dir", "seed", "drill", "track.wandb", "track.peak_tflops", "slurm", "data.cache", "launch.timeout",
    "launch.port", "launch.address", "launch.retries", "checkpoint.keep", "checkpoint.keep_best", "checkpoint.on_error",
)  # fmt: skip
# What a session found around it -> the settings that decide it; where one of those differs, that is what is told.
FOUND: dict[str, tuple[str, ...]] = {
    "ranks": ("launch.ranks",),
    "nodes": ("launch.nodes",),
    "device": ("launch.device",),
    "devices": ("launch.device", "launch.ranks"),
    "backend": ("launch.device",),
    "threads": ("launch.ranks", "launch.device"),
    "cpu": (),
    "cores": (),
    "python": (),
    "attention": ("model.attention",),
    "loss": ("model", "memory.loss_chunk"),
    "tf32": ("precision.tf32",),
    "deterministic": ("deterministic",),
    "model_flops_per_token": ("model", "data.seq_len"),
}
# What the plan made of the settings -> the settings.
PLANNED: dict[str, tuple[str, ...]] = {
    "batch.accumulation": ("batch", "launch.ranks", "launch.nodes"),
    "batch.tokens_per_step": ("batch.global", "data.seq_len"),
}
# Rows of the ledger whose dtypes have to be alike -> the settings that may make them differ. Masters and moments have no
# such excuse: they are what `precision.master` says, or something is wrong.
HELD: dict[str, tuple[str, ...]] = {
    "masters": (),
    "moments": (),
    "gradients": ("precision", "reduce", "shard"),
    "buffers": ("precision", "model"),
    "working": ("precision", "shard", "model.freeze"),
}
_ROWS = {"masters": "parameters"}
_TELLING = (
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "CUDA_",
    "CUBLAS_",
    "PYTORCH_",
    "TORCH_",
    "MALLOC_",
    "LD_PRELOAD",
)


Told = Callable[[Sequence[str]], bool]  # whether a setting that decides it differs already


def differences(arms: Grouping) -> list[Difference]:
    """All of them, in the order in which a person would look for them. Runs are compared as they are, allowed or not."""
    settings = list(_settings(arms))
    changed = {difference.key for difference in settings} | set(arms.varied)

    def told(causes: Sequence[str]) -> bool:
        return any(in_patterns(key, causes) for key in changed)

    found = [*_seeds(arms), *settings, *_planned(arms, told), *_around(arms, told), *_held(arms, told)]
    return [*found, *fed.differences(arms, told)]


def sort(found: Sequence[Difference], allow: Sequence[str]) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
    """(refused, allowed). Raises UsageError for an `allow` that allows nothing."""
    keys = [difference.key for difference in found]
    for pattern in allow:
        if not any(in_patterns(key, [pattern]) for key in keys):
            near = difflib.get_close_matches(pattern, keys, n=1, cutoff=0.4)
            raise UsageError(
                f"--allow {pattern}", "the runs do not differ in that" if keys else "the runs differ in nothing but the treatment",
                f"did you mean {near[0]}?" if near else "leave it out",
            )  # fmt: skip
    allowed = tuple(one for one in found if in_patterns(one.key, allow))
    return tuple(one for one in found if one not in allowed), allowed


def refusal(refused: Sequence[Difference], treatment: Sequence[str]) -> UsageError:
    head = "1 difference that is" if len(refused) == 1 else f"{len(refused)} differences that are"
    lines = "".join(f"\n    {difference}" for difference in refused)
    return UsageError(
        f"these runs cannot be compared: they have {head} not the treatment ({', '.join(treatment)}):{lines}",
        "whatever the arms gained or lost, it could be because of these",
        f"run them alike, declare the treatment (--treatment KEY,...), or accept one by name: --allow {refused[0].key}",
    )


# -- one value a run ---------------------------------------------------------------------------------------------------


def _distinct(groups: Sequence[Group], key: str, value: Callable[[Run], Any]) -> Iterator[Difference]:
    """The difference in one thing, told by arms where each arm has one value, else by runs; nothing where all agree."""
    by_arm = {one.name: [value(run) for run in one.runs] for one in groups}
    if len({repr(one) for own in by_arm.values() for one in own}) < 2:
        return
    who: dict[str, list[str]] = {}
    for one in groups:
        own = by_arm[one.name]
        alike = len({repr(v) for v in own}) == 1
        for run, v in zip(one.runs, own, strict=True):
            names = who.setdefault(_show(v), [])
            name = one.name if alike else run.name
            if name not in names:
                names.append(name)
    yield Difference(key, tuple((_joined(names), shown) for shown, names in who.items()))


def _joined(names: Sequence[str]) -> str:
    shown = list(names) if len(names) <= 4 else [*names[:3], f"{len(names) - 3} others"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _show(value: Any) -> str:
    from mpdist.config.describe import show

    return "not recorded" if value is _MISSING else value if isinstance(value, str) and value else show(value)


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


_MISSING: Any = _Missing()


def _seeds(arms: Grouping) -> Iterator[Difference]:
    sets = {id(run): ", ".join(str(own.seed) for own in one.runs) for one in arms.groups for run in one.runs}
    yield from _distinct(arms.groups, "seeds", lambda run: sets[id(run)])


def _settings(arms: Grouping) -> Iterator[Difference]:
    for key in dict.fromkeys(key for one in arms.groups for run in one.runs for key in run.values):
        if in_patterns(key, INDIFFERENT):
            continue
        # The treatment differs between arms, never within one.
        sets = [[one] for one in arms.groups] if in_patterns(key, arms.treatment) else [arms.groups]
        for groups in sets:
            yield from _distinct(groups, key, _setting(key))


def _planned(arms: Grouping, told: Told) -> Iterator[Difference]:
    for key, causes in PLANNED.items():
        if not told(causes):
            yield from _distinct(arms.groups, key, _plan_of(key.rpartition(".")[2]))


def _around(arms: Grouping, told: Told) -> Iterator[Difference]:
    runs = [run for one in arms.groups for run in one.runs]
    for name in sorted({name for run in runs for env in run.envs for name in env.get("versions", {})}):
        yield from _distinct(arms.groups, f"versions.{name}", _over_sessions("versions", name))
    for key, causes in FOUND.items():
        if not told(causes):
            yield from _distinct(arms.groups, key, _over_sessions(key))
    yield from _distinct(arms.groups, "sessions", resumed_with)
    for part in ("train", "eval"):
        if not told(("data",)):
            yield from _distinct(arms.groups, f"data.{part}.digest", _over_sessions("data", part))


def _setting(key: str) -> Callable[[Run], Any]:
    return lambda run: run.values.get(key)


def _plan_of(name: str) -> Callable[[Run], Any]:
    return lambda run: run.plan.get("batch", {}).get(name, _MISSING)


def resumed_with(run: Run) -> str:
    """The settings that changed at a resume, which config.yaml no longer tells."""
    changes = [change for event in run.events if event["event"] == "resume" for change in event.get("changes", ())]
    return "resumed with " + ", ".join(changes) if changes else "never resumed with other settings"


def _over_sessions(*path: str) -> Callable[[Run], Any]:
    """A fact of env.json as a run's sessions found it: `2.12, then 2.13` where they disagree."""

    def value(run: Run) -> Any:
        values: list[Any] = []
        for env in run.envs:
            found: Any = env
            for name in path:
                found = found.get(name, _MISSING) if isinstance(found, dict) else _MISSING
            if found is not _MISSING and (not values or values[-1] != found):
                values.append(found)
        if not values:
            return _MISSING
        return values[0] if len(values) == 1 else ", then ".join(_show(one) for one in values)

    return value


# -- what the ranks held -------------------------------------------------------------------------------------------------


def dtypes(run: Run) -> dict[str, str]:
    """The dtypes that the ledger measured, by what was held; `float32`, or several joined by a plus."""
    found: dict[str, str] = {}
    for name in HELD:
        rows = [row for row in run.ledger if row.get("row") == _ROWS.get(name, name) and row.get("dtype")]
        held = sorted({row["dtype"] for row in rows if row.get("measured_bytes")})
        if held:
            found[name] = "+".join(held)
    return found


def _held(arms: Grouping, told: Told) -> Iterator[Difference]:
    """Of the runs that have a ledger; those without are noted."""
    measured = [replace(one, runs=tuple(run for run in one.runs if run.ledger)) for one in arms.groups]
    groups = [one for one in measured if one.runs]
    runs = [run for one in groups for run in one.runs]
    for name, causes in HELD.items():
        as_asked = not causes and all(dtypes(run).get(name) in (None, fed.masters_asked(run)) for run in runs)
        if not as_asked and not told(causes):
            yield from _distinct(groups, name, _dtype(name))


def _dtype(name: str) -> Callable[[Run], Any]:
    return lambda run: dtypes(run).get(name, "none")


# -- what is worth knowing and stops nothing ------------------------------------------------------------------------------------


def notes(arms: Grouping) -> list[Note]:
    found: list[Note] = []
    for one in arms.groups:
        for run in one.runs:
            found += _about(run)
        pure = sorted({dtypes(run).get("masters", "float32") for run in one.runs} - {"float32"})
        asked = (
            one.runs[0].values["precision.master"] == "compute" and one.runs[0].values["precision.compute"] != "fp32"
        )
        if pure or asked:
            held = ", ".join(pure) or one.runs[0].values["precision.compute"]
            found.append(Note("masters", f"{one.name}: its masters are {held}: pure 16-bit training, NO FP32 masters"))
    runs = [run for one in arms.groups for run in one.runs]
    hosts = sorted({str(env["host"]) for run in runs for env in run.envs if "host" in env})
    if len(hosts) > 1:
        found.append(Note("host", f"the runs ran on {len(hosts)} hosts: {_joined(hosts)}"))
    sets = [{name for name in run.env.get("variables", ()) if name.startswith(_TELLING)} for run in runs]
    odd = sorted(set().union(*sets) - set.intersection(*sets)) if sets else []
    if odd:
        found.append(Note("variables", f"variables that were set for some runs only: {', '.join(odd)}"))
    if len(arms.varied) > 1 and len(arms.groups) == 2:
        found.append(
            Note("treatment", f"the arms differ in {len(arms.varied)} settings at once: {', '.join(arms.varied)}")
        )
    return found


def _about(run: Run) -> Iterator[Note]:
    if run.state != "done":
        reason = run.status.get("reason")
        yield Note("state", f"{run.name}: {run.state} at step {run.steps}" + (f": {reason}" if reason else ""))
    if run.torn or (run.state not in whole.ENDED and whole.lacking(run) is not None):
        files = ", ".join(run.torn or ("metrics.jsonl",))
        yield Note(
            "torn", f"{run.name}: {files} lacks its end: a kill tears the last line, and may lose what was written last"
        )
    if not run.ledger:
        yield Note("ledger", f"{run.name} has no ledger of what its ranks held: its dtypes are not compared")
    if len(run.envs) > 1:
        yield Note("sessions", f"{run.name} ran in {len(run.envs)} sessions: its train seconds hold a warm-up each")
    drills = sorted({event.get("reason", "") for event in run.events if event["event"] == "drill"})
    if drills:
        yield Note("drill", f"{run.name}: rehearsed faults: {', '.join(drills)}")
