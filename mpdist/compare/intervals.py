"""Intervals, tests and power. All of it is scipy's; what is decided here is which of it is asked.

Runs are paired by their seed: both of a pair saw the same initial weights and the same rows in the same order, so what
a seed does to the loss is in both and leaves the difference. The pairs' differences are the observations of a one-sample
t-test. One seed has no spread, so it has no interval: points along one run's curve follow each other and cannot stand in
for other runs, which is why none is made of them.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence

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

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that values are nearly equal is what one hopes for
        found = stats.ttest_1samp(values, 0.0)
        low, high = found.confidence_interval(1 - level)
        least, most = found.confidence_interval(0.90)  # each side leaves 5 % out
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, 0.0, float(low), float(high), float(least), float(most), float(found.pvalue), len(values),
                    detectable(len(values), level) * spread)  # fmt: skip


def ratio(logs: Sequence[float], level: float = LEVEL) -> Estimate:
    """The geometric mean of pairs' ratios, given by their logarithms, with the interval that `gap` has for those."""
    found = gap(logs, level)

    def up(value: float | None) -> float | None:
        return None if value is None else math.exp(value) if value < 700 else math.inf

    seen = None if found.detectable is None else math.expm1(min(found.detectable, 700.0))
    return Estimate(up(found.value) or 0.0, 1.0, up(found.low), up(found.high), up(found.at_least), up(found.at_most), found.p,
                    found.n, seen, found.why)  # fmt: skip


@functools.cache
def detectable(n: int, level: float = LEVEL, power: float = POWER) -> float:
    """The true mean, in standard errors, that a t-test of n differences at this level sees with this probability.

    By the distribution of t squared, which is F's with one degree of freedom above: scipy's noncentral t has holes.
    """
    from scipy import optimize, stats

    edge = float(stats.t.ppf(1 - level / 2, n - 1))

    def missed(shift: float) -> float:
        return float(stats.ncf.cdf(edge**2, 1, n - 1, shift**2)) - (1 - power)

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
