"""One arm's own figures, over its runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from mpdist.compare.fairness import dtypes
from mpdist.compare.fed import OVERFLOW
from mpdist.compare.intervals import quantiles, spread
from mpdist.compare.tree import Figures, Row, Run, Spread
from mpdist.compare.windows import rate, stretches

NONFINITE = (OVERFLOW, "non-finite loss")


def figures(runs: Sequence[Run], warm_step: int | None) -> Figures:
    def last(key: str) -> float:
        return mean(run.train[-1].get(key, math.nan) for run in runs)

    def at_one_step(rows: Callable[[Run], Sequence[Row]], key: str) -> tuple[int | None, list[float]]:
        """The last step of which all runs have a row, and each one's figure there: of two steps no mean is made."""
        by_step = [{row["step"]: row for row in rows(run)} for run in runs]
        step = max(set.intersection(*(set(own) for own in by_step)), default=None)
        return step, [] if step is None else [float(own[step].get(key, math.nan)) for own in by_step]

    def rows(key: str, pick: Callable[[list[float]], float]) -> float | None:
        values = [float(row[key]) for run in runs for row in run.train if key in row]
        return pick(values) if values else None

    own = [stretches(run, warm_step) for run in runs] if warm_step is not None else []
    steps = [one.step_s for found in own for one in found]
    rates = [found for found in map(rate, own) if found is not None]
    eval_step, evals = at_one_step(lambda run: run.evals, "eval/loss")
    _, trained = at_one_step(lambda run: run.train, "train/loss")
    allocated, reserved = (rows(f"mem/peak_{kind}_bytes", max) for kind in ("allocated", "reserved"))
    skipped: dict[str, int] = {}
    for run in runs:
        for event in run.skips:
            skipped[event["reason"]] = skipped.get(event["reason"], 0) + 1
    return Figures(
        steps=mean(run.steps for run in runs),
        attempts=mean(run.attempts for run in runs),
        label_tokens=last("train/label_tokens"),
        tokens=last("train/tokens"),
        train_s=last("time/train_s"),
        total_s=last("time/total_s"),
        train_loss=mean(trained) if trained else math.nan,
        eval_step=eval_step,
        eval_loss=mean(evals) if evals else None,
        perplexity=math.exp(min(mean(evals), 700.0)) if evals else None,
        seed_spread=spread(evals) if evals else None,
        tokens_per_s=mean(rates) if len(rates) == len(runs) else None,
        step_s=_spread(steps),
        mfu=rows("speed/mfu", mean),
        peak_flops=next((env["peak_flops"] for run in runs for env in run.envs if env.get("peak_flops")), None),
        device_busy=rows("speed/device_busy", mean),
        peak_allocated_bytes=None if allocated is None else int(allocated),
        peak_reserved_bytes=None if reserved is None else int(reserved),
        wire_bytes=rows("wire/grad_bytes", lambda values: values[-1]),
        wire_bytes_between_nodes=rows("wire/grad_bytes_between_nodes", lambda values: values[-1]),
        skipped=skipped,
        nonfinite=sum(skipped.get(reason, 0) for reason in NONFINITE),
        final_scale=_final_scale(runs),
        changed_fraction=rows("precision/changed_fraction", mean),
        wire_error=rows("precision/wire_error", mean),
        dtypes=_held(runs),
        time=_time(runs),
    )


def _held(runs: Sequence[Run]) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for run in runs:
        for name, dtype in dtypes(run).items():
            found.setdefault(name, set()).add(dtype)
    return {name: "+".join(sorted(held)) for name, held in found.items()}


def _time(runs: Sequence[Run]) -> dict[str, float]:
    """Nothing where a run has no table: the others' means would pass for all runs'."""
    tables = [run.status.get("time", {}) for run in runs]
    if not all(tables):
        return {}
    labels = dict.fromkeys(label for table in tables for label in table)
    return {label: mean(table.get(label, 0.0) for table in tables) for label in labels}


def mean(values: Iterable[float]) -> float:
    found = [float(value) for value in values]
    return sum(found) / len(found)


def _spread(steps: Sequence[float]) -> Spread | None:
    if not steps:
        return None
    low, middle, high = quantiles(steps, (0.1, 0.5, 0.9))
    return Spread(middle, low, high, len(steps))


def _final_scale(runs: Sequence[Run]) -> float | None:
    """The loss scale that the next attempt would have used, the smallest of the runs'; None where there is none."""
    found = []
    for run in runs:
        if all(row.get("scale/value", 1.0) == 1.0 for row in run.train) and not run.skips:
            continue
        last = float(run.train[-1].get("scale/value", 1.0))
        for event in run.events:
            if event["event"] in ("scale", "skip") and event["attempt"] >= run.train[-1]["attempt"]:
                last = float(event.get("scale", last) if event["event"] == "scale" else event.get("scale_after", last))
        found.append(last)
    return min(found, default=None)
