"""Train seconds, steps and tokens of a run between its logged rows, warm-up left out.

The clock is `time/train_s`, which runs inside windows and stands still elsewhere: evaluation, saving, waiting for data,
loading and compilation are not in it. A stretch that a resume cuts in two is left out: the new session warms up in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpdist.compare.tree import Row, Run

SECONDS, TOKENS, TOTAL = "time/train_s", "train/tokens", "time/total_s"


@dataclass(frozen=True)
class Stretch:
    """From one logged step to the next. seconds: of training, those of skipped attempts in it included."""

    first: int
    last: int
    seconds: float
    tokens: int

    @property
    def steps(self) -> int:
        return self.last - self.first

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


def warm(runs: Sequence[Run], warmup: int) -> int | None:
    """The first step from ``warmup`` on that all runs have logged: rates and clocks begin behind it. None without one."""
    logged = set.intersection(*({row["step"] for row in run.train} for run in runs)) if runs else set()
    if warmup == 0:
        return 0
    return min((step for step in logged if step >= warmup), default=None)


def start(run: Run, step: int) -> Row:
    """The row at which the warm-up ends; of step 0 a made one."""
    if step == 0:
        return {"step": 0, "session": run.train[0]["session"], SECONDS: 0.0, TOKENS: 0, TOTAL: 0.0}
    return next(row for row in run.train if row["step"] == step)


def stretches(run: Run, warm_step: int) -> list[Stretch]:
    found, before = [], start(run, warm_step)
    for row in run.train:
        if row["step"] <= warm_step:
            continue
        if row["session"] == before["session"] and row[SECONDS] > before[SECONDS]:
            tokens = int(row.get(TOKENS, 0) - before.get(TOKENS, 0))
            found.append(Stretch(before["step"], row["step"], row[SECONDS] - before[SECONDS], tokens))
        before = row
    return found


def rate(stretches: Iterable[Stretch]) -> float | None:
    """Tokens per train second over all of them together; None where there are none."""
    own = list(stretches)
    seconds = sum(one.seconds for one in own)
    return sum(one.tokens for one in own) / seconds if seconds > 0 else None
