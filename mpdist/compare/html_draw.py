"""A comparison's drawings: losses, residuals, step times, scales, memory. Each returns inline SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from mpdist import svg_charts
from mpdist.compare import html_data
from mpdist.compare.html_axes import LEFT, TOP, Frame, Pen, around, pens
from mpdist.compare.intervals import quantiles
from mpdist.compare.tree import Arm, Comparison, Pair
from mpdist.compare.verdict import within
from mpdist.plan_html import INKS, OTHER
from mpdist.svg import GREY, Style, text_width
from mpdist.svg_charts import Bar
from mpdist.units import format_bytes

_X = {
    html_data.STEP: ("steps", "applied steps"),
    html_data.TOKENS: ("tokens", "label tokens trained on"),
    html_data.TIME: ("seconds", "seconds of training, from the end of the warm-up"),
}
_ROW = 54.0  # pixels of a row of the step times


def styles(found: Comparison) -> dict[str, Pen]:
    return pens([arm.name for arm in found.arms])


def loss(found: Comparison, x: str) -> str:
    """Evaluation loss with its marks, the training loss thin behind it, the seeds' range as a band."""
    name, title = _X[x]
    curves = {arm.name: html_data.loss(arm, x, found.warmup_step) for arm in found.arms}
    points = [point for curve in curves.values() for point in (*curve.train, *curve.evals)]
    xs = [point.x for point in points if math.isfinite(point.x)]
    ys = _heights([value for point in points for value in (point.low, point.high)])
    frame = Frame(
        f"Loss against {name}", (min([0.0, *xs]), max([1.0, *xs]) if x != html_data.TIME else max([1e-9, *xs])), ys, title,
        "loss, nats a label token", 250, f"loss-{name}",
    )  # fmt: skip
    frame.grid()
    inks = styles(found)
    for arm in found.arms:
        curve, pen = curves[arm.name], inks[arm.name]
        frame.band([(p.x, p.low, p.high) for p in curve.evals or curve.train], pen.colour, 0.14)
        frame.path([(p.x, p.mean) for p in curve.train], pen, 1.0, stroke_opacity=0.55)
    for arm in found.arms:
        curve, pen = curves[arm.name], inks[arm.name]
        frame.path([(p.x, p.mean) for p in curve.evals], pen)
        for p in curve.evals:
            frame.mark(pen, p.x, p.mean, f"{arm.name}: {p.mean:.4f} ({p.low:.4f} to {p.high:.4f})")
        frame.key(pen, arm.name, *_ends(curve, x))
    if any(curve.evals for curve in curves.values()):
        frame.key(None, "", "Marks: evaluation, band: lowest to highest seed. Thin: training loss, mean over seeds")
    return str(frame.canvas)


def _ends(curve: html_data.Curve, x: str) -> list[str]:
    last = (curve.evals or curve.train)[-1:]
    if not last:
        return ["no step in common"]
    at, p = f"{last[0].x:,.4g}" if x == html_data.TIME else f"{last[0].x:,.0f}", last[0]
    return [f"{p.mean:.4f} at {at}" + (f", {p.low:.4f} to {p.high:.4f}" if p.low != p.high else "")]


def _heights(values: Sequence[float]) -> tuple[float, float]:
    """Of the axis: all values, unless the first few tower over the rest so that the others could not be told apart."""
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < 8:
        return around(finite)
    low, usual = finite[0], quantiles(finite, (0.95,))[0]
    return around([low, finite[-1] if finite[-1] - low < 2.5 * (usual - low) else usual])


def residual(found: Comparison, pair: Pair) -> str:
    """The paired difference of training losses: mean, seeds and interval; and the evaluations' gaps with theirs."""
    curve = html_data.residuals(found, pair)
    pen = styles(found)[pair.arm]
    seeds = [value for _, _, values in curve.points for value in values]
    gaps = [(at.step, at.eval_loss_gap) for at in pair.matched_steps if at.eval_loss_gap is not None]
    low, high = around([0.0, *seeds, *(gap.value for _, gap in gaps)], 0.15)
    edges = [edge for gap in [*(g for _, g in gaps[-1:])] for edge in (gap.low, gap.high) if edge is not None]
    reach = high - low  # an interval of few seeds may be so wide that nothing else would be seen
    low, high = min([low, *(e for e in edges if e > low - reach)]), max([high, *(e for e in edges if e < high + reach)])
    end = max([1.0, *(step for step, _, _ in curve.points), *(step for step, _ in gaps)])
    frame = Frame(
        f"Paired difference of the losses of {pair.arm} and {pair.against}", (0.0, end), around([low, high], 0.03), "applied steps",
        f"{pair.arm} minus {pair.against}, nats a label token", 140, f"residual-{pair.arm}",
    )  # fmt: skip
    frame.grid()
    intervals = [(x, e.low, e.high) for x, e, _ in curve.points if e.low is not None and e.high is not None]
    frame.band(intervals, pen.colour, 0.12)
    frame.band([(x, min(values), max(values)) for x, _, values in curve.points], pen.colour, 0.2)
    zero = frame.y(0.0)
    frame.canvas.line(LEFT, zero, LEFT + frame.width, zero, stroke_width=1)
    frame.path([(x, e.value) for x, e, _ in curve.points], Pen(pen.colour, "", pen.mark), 1.2)
    for step, gap in gaps:
        if gap.low is not None and gap.high is not None:
            top, bottom = (min(max(frame.y(edge), TOP), TOP + frame.height) for edge in (gap.high, gap.low))
            frame.canvas.line(frame.x(step), top, frame.x(step), bottom, pen.colour, stroke_width=1.6)
        frame.mark(pen, step, gap.value, f"step {step:,}: {within(gap)}")
    edges = [edge for _, *both in intervals for edge in both]
    edges += [edge for _, gap in gaps for edge in (gap.low, gap.high) if edge is not None]
    cut = any(not frame.ys[0] <= edge <= frame.ys[1] for edge in edges)
    _say_residual(found, pair, frame, pen, curve.steps, bool(gaps), bool(intervals), cut)
    return str(frame.canvas)


def _say_residual(
    found: Comparison, pair: Pair, frame: Frame, pen: Pen, steps: int, evaluated: bool, known: bool, cut: bool
) -> None:
    told = []
    if pair.judged is not None and pair.loss_gap is not None:
        told.append(
            f"{'evaluation' if evaluated else 'training'} gap {within(pair.loss_gap)} at step {pair.judged.step:,}"
        )
    if pair.drift is not None:
        told.append(f"drift {within(pair.drift.slope)} in 1,000 steps")
    frame.key(pen, pair.arm, *told)
    level = f"{1 - found.level:.1%}"
    line = "Line: training losses" + (f", {steps} logged steps a point" if steps > 1 else "")
    bands = f"dark: all seeds, pale: {level} interval" if known else "band: all seeds; one seed has no interval"
    frame.key(
        None,
        "",
        f"{line}; {bands}."
        + (" Marks: evaluations" * evaluated + f", with their {level} interval" * (evaluated and known))
        + ". Intervals that reach the frame go beyond it" * cut,
    )


def step_times(found: Comparison) -> str:
    """How the times of a step are distributed, an arm below the other on one axis."""
    times = {arm.name: [1000 * t for t in html_data.step_times(arm, found.warmup_step)] for arm in found.arms}
    every = [t for own in times.values() for t in own if t > 0]
    if not every:
        return ""
    ends = [quantiles(own, (0.0, 0.995)) for own in times.values() if own]
    low, high = min(e[0] for e in ends), max(e[1] for e in ends)
    log = high > 4 * low
    xs = (low / 1.08, high * 1.08) if log else around([low, high], 0.04)
    count = len(found.arms)
    frame = Frame("Distribution of step times", xs, (0.0, float(count)), "milliseconds a step" + " (logarithmic)" * log,
                  "step times behind the warm-up, all seeds", _ROW * count, "step-time", log)  # fmt: skip
    frame.grid([(float(i), "") for i in range(count + 1)])
    inks = styles(found)
    for i, arm in enumerate(found.arms):
        own = [t for t in times[arm.name] if t > 0]
        if own:
            _ridge(frame, own, count - 1 - i, inks[arm.name])
            tenth, middle, ninth = quantiles(own, (0.1, 0.5, 0.9))
            usual = f"10 % to 90 %: {tenth:,.4g} to {ninth:,.4g}"
            frame.key(inks[arm.name], arm.name, f"median {middle:,.4g} ms, {usual}, {len(own):,} stretches")
        else:
            frame.key(inks[arm.name], arm.name, "no two logged steps behind the warm-up")
    frame.key(None, "", "Stroke: median. Bar: 10 % to 90 %. The slowest 0.5 % lie beyond the axis")
    return str(frame.canvas)


def _ridge(frame: Frame, own: Sequence[float], base: int, pen: Pen) -> None:
    """A histogram whose highest bin fills four fifths of the row; in the axis' own measure, linear or logarithmic."""
    bins = 72
    counts = [0] * bins
    for value in own:
        at = int((frame.x(value) - LEFT) / frame.width * bins)
        if 0 <= at < bins:
            counts[at] += 1
    top, wide = max([*counts, 1]), frame.width / bins
    floor = frame.y(float(base))
    edge = [(LEFT, floor)]
    for i, count in enumerate(counts):
        y = frame.y(base + 0.8 * count / top)
        edge += [(LEFT + i * wide, y), (LEFT + (i + 1) * wide, y)]
    frame.canvas.shape(
        [*edge, (LEFT + frame.width, floor)], pen.colour, fill_opacity=0.25, stroke=pen.colour, stroke_width=1
    )
    tenth, middle, ninth = quantiles(own, (0.1, 0.5, 0.9))
    low, high = (min(max(frame.x(v), LEFT), LEFT + frame.width) for v in (tenth, ninth))
    frame.canvas.rect(low, floor - 4, high - low, 4, pen.colour)
    frame.canvas.line(frame.x(middle), floor, frame.x(middle), frame.y(base + 0.9), "#ffffff", stroke_width=4)
    frame.canvas.line(frame.x(middle), floor, frame.x(middle), frame.y(base + 0.9), pen.colour, stroke_width=2)
    label = f"{middle:,.4g}"
    x = min(frame.x(middle) + 4, LEFT + frame.width - text_width(label, 10.5) - 2)
    frame.canvas.text(x, frame.y(base + 0.9) + 8, label, 10.5, fill=GREY, halo="#ffffff")


def scales(found: Comparison) -> str:
    """The loss scale over attempts, each seed's; empty where nothing was scaled or skipped."""
    own = {arm.name: [html_data.scale(run) for run in arm.runs] for arm in found.arms if html_data.scaled(arm)}
    if not own:
        return ""
    values = [math.log2(v) for runs in own.values() for one in runs for _, v in (*one.steps, *one.skips) if v > 0]
    low, high = math.floor(min(values)) - 1, math.ceil(max(values)) + 1
    end = max(run.attempts for arm in found.arms for run in arm.runs)
    frame = Frame("Loss scale and skipped attempts", (0.0, float(end)), (float(low), float(high)), "attempts",
                  "loss scale", 170, "scale")  # fmt: skip
    every = max(1, math.ceil((high - low) / 7))
    frame.grid([(float(power), f"{2.0**power:,.10g}") for power in range(low, high + 1) if power % every == 0])
    inks = styles(found)
    for arm in found.arms:
        pen, skips = inks[arm.name], 0
        for run, one in zip(arm.runs, own.get(arm.name, ()), strict=False):
            points = [(float(a), math.log2(v)) for a, v in one.steps if v > 0]
            corners = points[:1]
            for (_, before), (attempt, after) in itertools.pairwise(points):
                corners += [(attempt, before), (attempt, after)]
            corners += [(float(run.attempts), points[-1][1])] if points else []
            frame.path(corners, pen, 1.6)
            for attempt, value in one.skips:
                title = f"{run.name}: attempt {attempt} skipped at {value:g}"
                frame.mark(Pen(pen.colour, "", "cross"), attempt, math.log2(max(value, 1e-9)), title)
            skips += len(one.skips)
        if arm.name in own:
            frame.key(pen, arm.name, f"{skips:,} of {sum(run.attempts for run in arm.runs):,} attempts skipped")
    frame.key(None, "", "Crosses: skipped attempts. Each seed has a line")
    return str(frame.canvas)


def memory(found: Comparison) -> tuple[str, Style, list[str]]:
    """(stacks of bytes of a rank, how they are drawn, their rows), an arm a bar; empty where nothing is known."""
    held = {arm.name: html_data.memory(arm) for arm in found.arms}
    rows = [row for row in INKS if any(parts.get(row) for parts, _ in held.values())]
    rows += sorted({row for parts, _ in held.values() for row in parts} - set(rows))
    style = Style({row: INKS.get(row, OTHER) for row in rows}, {row: row.replace("_", " ") for row in rows})
    bars = [
        Bar(arm.name, [(row, held[arm.name][0].get(row, 0)) for row in rows], format_bytes(sum(held[arm.name][0].values())),
            _beside(arm, held[arm.name][1]))
        for arm in found.arms
    ]  # fmt: skip
    if not rows:
        return "", style, []
    return svg_charts.bars(style, bars, "Bytes of a rank, arm by arm"), style, rows


def _beside(arm: Arm, planned: bool) -> str:
    peak = arm.figures.peak_allocated_bytes
    told = "planned, at the rank's peak" if planned else "measured between steps"
    if peak is not None:
        on = "resident in the process" if arm.runs[0].env.get("device") == "cpu" else "allocated"
        told += f"; measured peak {format_bytes(peak)} {on}"
    return told


def settings(settings: Mapping[str, object]) -> str:
    from mpdist.config.describe import show

    return ", ".join(f"{key} = {show(value)}" for key, value in settings.items())
