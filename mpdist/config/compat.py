"""Which keys may differ when a run directory that exists is launched again, and why the others may not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Cannot change a number of the run: where it is, how it is watched, started and kept.
FREE = (
    "name",
    "out_dir",
    "track.",
    "slurm.",
    "checkpoint.",
    "data.cache",
    "launch.timeout",
    "launch.port",
    "launch.address",
    "launch.retries",
    "drill.kill_at",
    "drill.stop_at",
    "drill.hang_at",
    "drill.raise_at",
    "drill.exit_at",
    "drill.disk_full_at",
    "drill.corrupt_at",
)
# The same global batches cut another way: equal but for FP32 rounding. A resume lists them in its event.
CUT = (
    "launch.ranks",
    "launch.nodes",
    "batch.micro",
    "shard.engine",
    "shard.stage",
    "shard.replicas",
    "shard.offload",
    "memory.checkpointing",
    "reduce.when",
)
# When a figure is taken, of the same rows each time. eval.rows is not here: it would make `best` compare two figures.
WATCHED = ("eval.every",)


@dataclass(frozen=True)
class Difference:
    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        from mpdist.config.describe import show

        return f"{self.key}: {show(self.old)} -> {show(self.new)}"


@dataclass(frozen=True)
class Differences:
    """``free``: of no consequence. ``listed``: allowed, to be named in the resume event. ``refused``: exit 2."""

    free: list[Difference] = field(default_factory=list)
    listed: list[Difference] = field(default_factory=list)
    refused: list[Difference] = field(default_factory=list)

    @property
    def allowed(self) -> bool:
        return not self.refused


def differences(old: dict[str, Any], new: dict[str, Any]) -> Differences:
    """Compare the values (``Resolved.values()``) that a run directory holds with those asked for now.

    A setting that is younger than the directory makes no difference where it is left as it is by default.
    """
    result = Differences()
    before, after = _flat(old), _flat(new)
    larger_budget = _only_more_budget(old, new)
    for key in [*before, *(k for k in after if k not in before)]:
        if key in before and key in after and before[key] == after[key]:
            continue
        if key not in before and _is_default(key, after[key]):
            continue
        difference = Difference(key, before.get(key), after.get(key))
        if _in(key, FREE) or (key.startswith("budget.") and larger_budget):
            result.free.append(difference)
        elif _in(key, (*CUT, *WATCHED)):
            result.listed.append(difference)
        else:
            result.refused.append(difference)
    return result


def numbers(values: dict[str, Any]) -> dict[str, Any]:
    """The values that can change the numbers of a run, flat under dotted names."""
    return {key: value for key, value in _flat(values).items() if not _in(key, FREE)}


def identity(values: dict[str, Any]) -> dict[str, Any]:
    """The values that every session of one run shares: those of which another makes another run."""
    return {key: value for key, value in _flat(values).items() if not _in(key, (*FREE, *CUT, *WATCHED, "budget."))}


def changed(old: dict[str, Any], new: dict[str, Any], left_out: tuple[str, ...]) -> list[str]:
    """The keys of which the values differ, but for those that are left out (a name, or `section.`)."""
    before, after = _flat(old), _flat(new)
    keys = before.keys() | after.keys()
    return sorted(key for key in keys if before.get(key) != after.get(key) and not _in(key, left_out))


def _is_default(key: str, value: Any) -> bool:
    from mpdist.config.describe import find, show

    known = find(tuple(key.split(".")))
    return known is not None and known.kind == "value" and known.default == show(value)


def _only_more_budget(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """A larger budget of the same kind, where the schedule's span does not hang on it."""
    before = {kind: amount for kind, amount in old["budget"].items() if amount is not None}
    after = {kind: amount for kind, amount in new["budget"].items() if amount is not None}
    if set(before) != set(after) or any(after[kind] < before[kind] for kind in before):
        return False
    horizons = {old["optim"]["horizon"], new["optim"]["horizon"]}
    constant = new["optim"]["schedule"] == "constant" and (new["optim"]["warmup"] >= 1 or new["optim"]["warmup"] == 0)
    return len(horizons) == 1 and (horizons != {"auto"} or constant)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(values, dict) and values:
        items = [(str(key), value) for key, value in values.items()]
    elif isinstance(values, list) and values and isinstance(values[0], dict):
        items = [(str(i), value) for i, value in enumerate(values)]
    else:
        return {prefix[:-1]: values}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat.update(_flat(value, f"{prefix}{key}."))
    return flat


def _in(key: str, table: tuple[str, ...]) -> bool:
    return any(key == entry or key.startswith(entry if entry.endswith(".") else entry + ".") for entry in table)
