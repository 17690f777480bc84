"""sweep.json: what a sweep is, in one file that whoever starts its runs and whoever compares them read alike.

It is written before the first run and says what was asked for, never how a run went: that is in the run's own folder.
Only the measured speeds of `--equal-time` are added, once, before the first run that trains by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpdist import run_files
from mpdist.errors import UsageError
from mpdist.lines import dump, write_atomic
from mpdist.run_files import COUNT, FINITE, FLAG, LIST, MAPPING, TEXT, maybe

NAME = "sweep.json"
_FORMAT = 1
_SCHEMA: run_files.Schema = {
    "name!": TEXT, "treatment!": LIST, "treatment.[]": TEXT, "arms!": LIST, "arms.[]": MAPPING, "arms.[].name!": TEXT,
    "arms.[].settings!": MAPPING, "arms.[].control": FLAG, "arms.[].file": maybe(TEXT), "seeds!": LIST, "seeds.[]": COUNT,
    "order!": LIST, "order.[]": LIST, "config!": TEXT, "digest!": TEXT, "ranks": maybe(COUNT), "equal_time": maybe(MAPPING),
    "equal_time.seconds!": FINITE, "equal_time.speeds!": LIST, "equal_time.speeds.[]": MAPPING,
    "equal_time.speeds.[].arm!": TEXT, "equal_time.speeds.[].step_s!": FINITE, "equal_time.speeds.[].steps!": COUNT,
    "equal_time.speeds.[].windows!": COUNT, "equal_time.speeds.[].spread_s!": LIST, "equal_time.speeds.[].spread_s.[]": FINITE,
    "values": MAPPING,
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """settings: this arm's value of every key of the treatment, as the resolved configuration has it.

    control: a second copy of the first arm, of which any difference from it is noise. file: the whole configuration
    that makes the arm, where there is one.
    """

    name: str
    settings: Mapping[str, Any]
    control: bool = False
    file: str | None = None


@dataclass(frozen=True)
class Run:
    """path: of the run directory, relative to the sweep's."""

    arm: str
    seed: int
    path: str


@dataclass(frozen=True)
class Speed:
    """What `--equal-time` has measured of an arm, and the steps that follow.

    step_s: train seconds of one window, the median of `windows` of them. spread_s: their quartiles. steps: budget and
    horizon of each of its runs.
    """

    arm: str
    step_s: float
    spread_s: tuple[float, float]
    windows: int
    steps: int


@dataclass(frozen=True)
class EqualTime:
    """seconds: of training (time/train_s) that each run is to take. speeds: none until they are measured."""

    seconds: float
    speeds: tuple[Speed, ...] = ()

    def steps(self, arm: str) -> int | None:
        """The budget of an arm's runs, None while it is not measured."""
        return next((speed.steps for speed in self.speeds if speed.arm == arm), None)


@dataclass(frozen=True)
class Sweep:
    """A comparison: the runs of some arms under some seeds.

    treatment: the keys in which the arms may differ, dotted; one that names a section stands for all below it. Under
    equal time, `budget.steps` differs too. order: (arm, seed) as the runs follow each other. config: the file that the
    arms start from; values: it resolved, with the command line's settings; digest: SHA-256 (hex) of those that can
    change a number. ranks: on each node; None as the configuration has it.
    """

    name: str
    treatment: tuple[str, ...]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    order: tuple[tuple[str, int], ...]
    config: str
    digest: str
    ranks: int | None = None
    equal_time: EqualTime | None = None
    values: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def runs(self) -> tuple[Run, ...]:
        """In the order in which they follow each other."""
        return tuple(Run(arm, seed, run_name(arm, seed)) for arm, seed in self.order)

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["runs"] = [asdict(run) for run in self.runs]
        last = {key: found.pop(key) for key in ("config", "digest", "values")}
        return {"format": _FORMAT, **found, **last}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Sweep:
        """Raises KeyError, TypeError or ValueError for what is no sweep's."""
        if value["format"] != _FORMAT:
            raise ValueError(f"its format is {value['format']}, and this version reads {_FORMAT}")
        timed = value["equal_time"]
        if timed is not None:
            speeds = (Speed(**{**speed, "spread_s": tuple(speed["spread_s"])}) for speed in timed["speeds"])
            timed = EqualTime(timed["seconds"], tuple(speeds))
        return cls(
            name=value["name"],
            treatment=tuple(value["treatment"]),
            arms=tuple(Arm(**arm) for arm in value["arms"]),
            seeds=tuple(value["seeds"]),
            order=tuple((arm, seed) for arm, seed in value["order"]),
            config=value["config"],
            digest=value["digest"],
            ranks=value["ranks"],
            equal_time=timed,
            values=value["values"],
        )


def run_name(arm: str, seed: int) -> str:
    return f"{arm}-seed{seed}"


def alternated(arms: tuple[str, ...], seeds: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """(arm, seed) in the order A B, B A, A B, ...: each seed's arms once, every other seed backwards.

    A machine drifts: it warms up, a neighbour comes, a disk fills. Were the arms always in one order, the later ones
    would see more of it. With the order turned round, a drift that is linear in time adds the same to every arm over
    each pair of seeds and cancels in their differences. Of an odd number of seeds, the last one's share of it remains.
    """
    for i, seed in enumerate(seeds):
        for arm in reversed(arms) if i % 2 else arms:
            yield arm, seed


def write(folder: Path, sweep: Sweep) -> None:
    write_atomic(folder / NAME, dump(sweep.to_json(), indent=1) + "\n")


def read(folder: str | Path) -> Sweep | None:
    """The sweep of a folder, None if there is none. Raises UsageError for one that this version does not read."""
    path = Path(folder) / NAME
    if not path.exists():
        return None
    try:
        value = run_files.load(path, {}) or {}
        if value["format"] == _FORMAT:  # another version's may differ in all else
            run_files.check(value, _SCHEMA, path.name)
        found = Sweep.from_json(value)
        unknown = sorted({arm for arm, _ in found.order} - {arm.name for arm in found.arms})
        if unknown:
            raise ValueError(f"its order names {unknown[0]}, which is no arm of it")
        return found
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, f"no {error}" if isinstance(error, KeyError) else str(error)) from error
    except UsageError as error:
        why = error.why if "cannot be read" in error.what else f"{error.what}: {error.why}"
        raise _unreadable(path, why or error.what) from error


def _unreadable(path: Path, why: str) -> UsageError:
    do = (
        f"put it back as `mpdist sweep` wrote it; or remove it: `mpdist compare {path.parent}` then tells arms by the runs' names "
        "(ARM-seedK), and a new sweep takes another name"
    )
    return UsageError(f"{path} cannot be read", why, do)
