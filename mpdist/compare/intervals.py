"""Intervals, tests and power. All of it is scipy's; what is decided here is which of it is asked.

Losses are paired by their seed: both runs of a pair began with the same weights and saw the same rows in the same order,
so what a seed does to the loss is in both and leaves the difference. The pairs' differences are the observations of a
one-sample t-test. Speeds are not paired: a seed decides what is trained, not what else the machine does in that minute.
Each run's is an observation of its arm, and a two-sample t-test asks whether the arms' differ; that the spread is the
machine's, and so the same for both, doubles what is known of it.

One seed has no spread, so it has no interval: points along one run's curve follow each other and cannot stand in for
other runs, which is why none is made of them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mpdist.compare.tree import Drift, Estimate

TOGETHER = 0.05  # that a pair of arms without a difference is said to have one: by its speed, its loss or its drift
CLAIMS = 3
LEVEL = TOGETHER / CLAIMS  # of each claim's test (Bonferroni)
POWER = 0.95
ONE_SEED = "one seed: nothing says what another would give"


def gap(differences: Sequence[float], level: float = LEVEL) -> Estimate:
    """The mean difference of pairs, with its t interval. Without one for a single pair, or where a value is not finite."""
    values = [float(value) for value in differences]
    mean = sum(values) / len(values)
    if not all(map(math.isfinite, values)):
        return Estimate(mean, n=len(values), why="a value is not finite")
    if len(values) == 1:
        return Estimate(mean, why=ONE_SEED)
    if max(values) == min(values):  # bit-equal runs, most of all
        p = 1.0 if mean == 0 else 0.0
        return Estimate(mean, 0.0, mean, mean, mean, mean, p, len(values), 0.0)
    import numpy as np
    from scipy import stats

    with _nearly_equal():
        found = stats.ttest_1samp(values, 0.0)
        low, high = found.confidence_interval(1 - level)
        least, most = found.confidence_interval(0.90)  # each side leaves 5 % out
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, 0.0, float(low), float(high), float(least), float(most), float(found.pvalue), len(values),
                    detectable(len(values) - 1, level) * spread)  # fmt: skip


def ratio(logs: Sequence[float], level: float = LEVEL) -> Estimate:
    """The geometric mean of pairs' ratios, given by their logarithms, with the interval that `gap` has for those."""
    return _raised(gap(logs, level))


def speed_ratio(arm: Sequence[float], other: Sequence[float], level: float = LEVEL) -> Estimate:
    """The ratio of two arms' speeds (geometric means), each given by its runs': Student's t of their logarithms."""
    a, b = ([math.log(value) if value > 0 else math.nan for value in values] for values in (arm, other))
    mean = sum(a) / len(a) - sum(b) / len(b)
    if min(len(a), len(b)) < 2 or not all(map(math.isfinite, a + b)) or len(set(a)) == len(set(b)) == 1:
        return _raised(gap([mean] * (1 if min(len(a), len(b)) < 2 else len(a)), level))
    import numpy as np
    from scipy import stats

    with _nearly_equal():
        found = stats.ttest_ind(a, b)
        low, high = found.confidence_interval(1 - level)
        least, most = found.confidence_interval(0.90)
    spread = math.sqrt((np.var(a, ddof=1) * (len(a) - 1) + np.var(b, ddof=1) * (len(b) - 1)) / found.df)
    error = spread * math.sqrt(1 / len(a) + 1 / len(b))
    return _raised(Estimate(mean, 0.0, float(low), float(high), float(least), float(most), float(found.pvalue), len(a),
                            detectable(int(found.df), level) * error))  # fmt: skip


@contextlib.contextmanager
def _nearly_equal() -> Iterator[None]:
    """That values hardly differ is what one hopes for, and no cause for a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _raised(found: Estimate) -> Estimate:
    """Of logarithms, the same of what they are the logarithms of."""

    def up(value: float) -> float:
        return math.inf if value > 700 else math.exp(value)

    seen = None if found.detectable is None else math.expm1(min(found.detectable, 700.0))
    return replace(found.mapped(up, 1.0), detectable=seen)


@functools.cache
def detectable(df: int, level: float = LEVEL, power: float = POWER) -> float:
    """The true difference, in standard errors, that a t-test of so many degrees of freedom sees with this probability.

    By the distribution of t squared, which is F's with one degree of freedom above: scipy's noncentral t has holes.
    """
    from scipy import optimize, stats

    edge = float(stats.t.ppf(1 - level / 2, df))

    def missed(shift: float) -> float:
        return float(stats.ncf.cdf(edge**2, 1, df, shift**2)) - (1 - power)

    return float(optimize.brentq(missed, 0.0, 10.0 * edge))


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation of independent runs; None of fewer than two, or where one is not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    import numpy as np

    return float(np.std(values, ddof=1))


def quantiles(values: Sequence[float], shares: Sequence[float]) -> list[float]:
    import numpy as np

    return [float(value) for value in np.quantile(values, shares)]


def drift(curves: Sequence[Sequence[tuple[int, float]]], level: float = LEVEL) -> Drift | None:
    """Whether residuals grow: the slope of each seed's over its second half, and a t-test of those slopes.

    curves: (step, arm minus reference) of each seed, at the same steps. None of fewer than 8 steps.
    """
    steps = [step for step, _ in curves[0]] if curves else []
    half = len(steps) // 2
    if len(steps) < 8:
        return None
    from scipy import stats

    slopes = []
    for curve in curves:
        later = curve[half:]
        if not all(math.isfinite(value) for _, value in later):
            return None
        slopes.append(1000.0 * float(stats.linregress([s for s, _ in later], [v for _, v in later]).slope))
    return Drift(gap(slopes, level), steps[half], steps[-1])
