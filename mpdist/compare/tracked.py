"""A comparison as a W&B run of its own: its tables, its curves, its page, and a figure of each arm in the summary.

It lies beside the runs that it compares, in OUT_DIR/.compare, and in their group, so that W&B shows the arms and what
follows from them together. What W&B cannot take is said and changes nothing: the comparison is on the terminal.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import Any

from mpdist.compare import html, html_data, text
from mpdist.compare.tree import Comparison
from mpdist.track import Tracker

FOLDER, JOB = ".compare", "comparison"
_FINISH_S = 120.0
_AXES = {"steps": html_data.STEP, "tokens": html_data.TOKENS, "seconds": html_data.TIME}


def show(found: Comparison, mode: str) -> None:
    """mode: online or offline. Waits for W&B longer than a run's end does: no rank waits with it."""
    first = found.arms[0].runs[0]
    project, group = (first.values.get(f"track.wandb.{key}") for key in ("project", "group"))
    parent = first.path.parent
    tracker = Tracker(
        mode, project or "mpdist", f"comparison of {parent.name}", parent / FOLDER, group=group or parent.name, job=JOB,
        finish_s=_FINISH_S,
        config={
            "treatment": list(found.treatment), "varied": list(found.varied), "against": found.reference, "seeds": list(found.seeds),
            "arms": {arm.name: [run.name for run in arm.runs] for arm in found.arms},
        },
    )  # fmt: skip
    tracker.show(tables(found), plots(found), html.page(found), summary(found))
    tracker.finish(0)
    where = tracker.url or (
        f"{parent / FOLDER / 'wandb'}; `wandb sync` sends it" if tracker.state == "finished" else None
    )
    if where is not None:
        print(f"the comparison is a W&B run: {where}", file=sys.stderr, flush=True)


def tables(found: Comparison) -> dict[str, dict[str, Any]]:
    """What the report has in columns, and its lines of words as tables of their own."""
    made = {
        "arms": text.arms(found), "matched_steps": text.steps(found), "matched_seconds": text.seconds(found),
        "to_loss": text.to_loss(found),
        "verdicts": text.Table(["arm", "speed", "loss", "drift", "verdict"],
                               [[one.arm, one.speed, one.loss, one.drift, one.line] for one in found.verdicts]),
        "guide": text.Table(["arm", "rule", "text", "source"], [[g.arm or "all", g.rule, g.text, g.source] for g in found.guide]),
        "defects": text.Table(["run", "defect", "text"], [[one.run, one.name, one.text] for one in found.defects]),
        "gates": text.Table(["arm", "gate", "holds", "text"],
                            [[one.arm, one.gate, text.HOLDS[one.holds], one.text] for one in found.gates]),
    }  # fmt: skip
    return {
        name: {"head": _distinct(list(one.head)), "rows": [list(row) for row in one.rows]}
        for name, one in made.items()
        if one.rows
    }


def _distinct(names: list[str]) -> list[str]:
    """A second column of one name gets its number: W&B tells columns by their names."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return found


def plots(found: Comparison) -> dict[str, dict[str, Any]]:
    """Evaluation loss (training loss without any) over each axis, and the paired residuals."""
    made = {}
    for name, axis in _AXES.items():
        curves = {arm.name: html_data.loss(arm, axis, found.warmup_step) for arm in found.arms}
        lines = {arm: [(p.x, p.mean) for p in curve.evals or curve.train] for arm, curve in curves.items()}
        made[f"loss_over_{name}"] = _lines(f"loss over {name}", name, lines)
    apart = {pair.arm: [(x, e.value) for x, e, _ in html_data.residuals(found, pair).points] for pair in found.pairs}
    made["residual"] = _lines(f"training loss minus that of {found.reference}, paired by seed", "steps", apart)
    return made


def _lines(title: str, x: str, lines: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    finite = {name: [point for point in points if all(map(math.isfinite, point))] for name, points in lines.items()}
    kept = {name: points for name, points in finite.items() if points}
    return {
        "title": title, "x": x, "keys": list(kept), "xs": [[p[0] for p in points] for points in kept.values()],
        "ys": [[p[1] for p in points] for points in kept.values()],
    }  # fmt: skip


def summary(found: Comparison) -> dict[str, Any]:
    """Of each arm beside the reference: speed, loss gap and the words of its verdict."""
    made: dict[str, Any] = {}
    for pair, verdict in zip(found.pairs, found.verdicts, strict=True):
        figures = {"speed": pair.speed and pair.speed.value, "loss_gap": pair.loss_gap and pair.loss_gap.value}
        words = {"verdict": verdict.line, "alarms": ", ".join(verdict.alarms)}
        told = figures | words
        made |= {f"{pair.arm}/{key}": value for key, value in told.items() if value is not None}
    return {key: value for key, value in made.items() if not (isinstance(value, float) and not math.isfinite(value))}
