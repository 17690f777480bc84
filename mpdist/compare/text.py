"""A comparison as a person reads it in a terminal: what was compared, the verdicts, then the figures behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpdist.compare.tree import Arm, AtTime, Comparison, Estimate, Figures, Pair
from mpdist.compare.verdict import number, times
from mpdist.units import format_bytes

NOTHING = "-"
HOLDS = {True: "holds", False: "DOES NOT HOLD", None: "DOES NOT HOLD (undecided)"}
_ITSELF = "nothing differs: one configuration against itself"
_MASTERS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def text(found: Comparison) -> str:
    parts = [
        _headline(found),
        _verdicts(found),
        *(one.lines() for one in (arms(found), steps(found), seconds(found), to_loss(found))),
        _gates(found),
        _guide(found),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


@dataclass(frozen=True)
class Table:
    """What stands in columns, the first set left and the others right. note: a line below it."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def lines(self) -> list[str]:
        """As text; nothing without a row."""
        if not self.rows:
            return []
        every = [self.head, *self.rows]
        widths = [max(len(row[i]) for row in every) for i in range(len(self.head))]
        found = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(wide) for cell, wide in zip(row[1:], widths[1:], strict=True))])
            for row in every
        ]  # fmt: skip
        return [f"  {line}".rstrip() for line in [*found, *([self.note] if self.note else [])]]


def _headline(found: Comparison) -> list[str]:
    seeds = ", ".join(map(str, found.seeds))
    lines = [
        f"{len(found.arms)} arms against {found.reference}, {len(found.seeds)} seed{'s' * (len(found.seeds) != 1)} ({seeds})",
        f"treatment  {', '.join(found.varied) or _ITSELF} (allowed to differ: {', '.join(found.treatment)})",
    ]
    lines += [f"ALLOWED    {one}: not the treatment, accepted by --allow" for one in found.allowed]
    lines += [f"DEFECT     {one.run}: {one.name}: {one.text}" for one in found.defects]
    lines += [f"note       {note.text}" for note in found.notes]
    return lines + bases(found)


def bases(found: Comparison) -> list[str]:
    """What the clocks and the intervals are."""
    behind = f"step {found.warmup_step} (warm-up of {found.warmup} windows, in all arms alike)"
    claims = "so that an arm's claims (speed, loss, drift) keep 95 %"
    return [
        f"clocks     train: inside windows; total: from the first start, gaps between sessions left out. Both begin behind {behind}",
        f"intervals  t over seeds, losses paired; {1 - found.level:.1%} each, {claims}",
    ]


def _verdicts(found: Comparison) -> list[str]:
    return ["verdicts", *(f"  {verdict.line}" for verdict in found.verdicts)] if found.verdicts else []


# -- the arms' own figures -----------------------------------------------------------------------------------------------


def _count(value: float) -> str:
    return NOTHING if not math.isfinite(value) else f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def _maybe(form: Callable[[float], str], value: float | None) -> str:
    return NOTHING if value is None or (isinstance(value, float) and math.isnan(value)) else form(value)


def _step(figures: Figures) -> str:
    s = figures.step_s
    return NOTHING if s is None else f"{s.median * 1000:.1f} ms ({s.low * 1000:.1f} to {s.high * 1000:.1f})"


def _attempts(arm: Arm) -> str:
    counts = sorted({run.attempts for run in arm.runs})
    return _count(counts[0]) if len(counts) == 1 else f"{arm.figures.attempts:,.1f} ({counts[0]:,} to {counts[-1]:,})"


def _skips(arm: Arm) -> str:
    """A count over all runs, where other rows are means."""
    told = ", ".join(f"{count} {reason}" for reason, count in arm.figures.skipped.items())
    return told + f" in {len(arm.runs)} runs" * (len(arm.runs) > 1) if told else "0"


def _formats(arm: Arm) -> str:
    values, held = arm.runs[0].values, arm.figures.dtypes
    masters = held.get("masters") or (
        "float32" if values["precision.master"] == "fp32" else values["precision.compute"]
    )
    return " / ".join(
        [values["precision.compute"], _MASTERS.get(masters, masters), values["reduce.wire"], values["reduce.sum"]]
    )


def _others(figures: Figures) -> str:
    held = [figures.dtypes.get(name, NOTHING) for name in ("moments", "gradients", "buffers")]
    return ", ".join(_MASTERS.get(dtype, dtype) for dtype in held)


_ROWS: tuple[tuple[str, Callable[[Arm], str]], ...] = (
    ("compute / masters / wire / sum", _formats),
    ("moments, gradients, buffers", lambda a: _others(a.figures)),
    ("steps", lambda a: _count(a.figures.steps)),
    ("attempts", _attempts),
    ("skipped", _skips),
    ("final scale", lambda a: _maybe(lambda v: f"{v:g}", a.figures.final_scale)),
    ("label tokens", lambda a: _count(a.figures.label_tokens)),
    ("training loss", lambda a: f"{a.figures.train_loss:.4f}"),
    ("evaluation loss", lambda a: _maybe(lambda v: f"{v:.4f}", a.figures.eval_loss)),
    ("  spread over seeds", lambda a: _maybe(lambda v: f"{v:.4f}", a.figures.seed_spread)),
    ("perplexity", lambda a: _maybe(lambda v: f"{v:.2f}", a.figures.perplexity)),
    ("tokens/s", lambda a: _maybe(lambda v: f"{v:,.0f}", a.figures.tokens_per_s)),
    ("step, median (10 % to 90 %)", lambda a: _step(a.figures)),
    ("MFU", lambda a: _maybe(lambda v: f"{v:.1%}", a.figures.mfu)),
    ("  of a peak of", lambda a: _maybe(lambda v: f"{v / 1e12:,.0f} TFLOP/s", a.figures.peak_flops)),
    ("device busy", lambda a: "not read" if a.figures.device_busy is None else f"{a.figures.device_busy:.0%}"),
    ("peak allocated", lambda a: _maybe(format_bytes, a.figures.peak_allocated_bytes)),
    ("peak reserved", lambda a: _maybe(format_bytes, a.figures.peak_reserved_bytes)),
    ("gradient bytes a step", lambda a: _maybe(format_bytes, a.figures.wire_bytes)),
    ("  between nodes", lambda a: _maybe(format_bytes, a.figures.wire_bytes_between_nodes)),
    ("masters changed in a step", lambda a: _maybe(lambda v: f"{v:.1%}", a.figures.changed_fraction)),
    ("wire error", lambda a: _maybe(lambda v: f"{v:.2g}", a.figures.wire_error)),
    ("train seconds", lambda a: f"{a.figures.train_s:,.1f}"),
    ("total seconds", lambda a: f"{a.figures.total_s:,.1f}"),
)  # fmt: skip


def _seconds_of(arm: Arm, label: str) -> str:
    return f"{arm.figures.time.get(label, 0.0):,.1f}" if arm.figures.time else NOTHING


def arms(found: Comparison) -> Table:
    """One column an arm; rows that nobody has are left out. Below: what the train clock leaves out."""
    head = ["means over seeds", *(f"{arm.name}{' (A/A)' * arm.control}" for arm in found.arms)]
    rows = [[name, *(cell(arm) for arm in found.arms)] for name, cell in _ROWS]
    if len({arm.figures.eval_step for arm in found.arms}) > 1:  # no two cells of a row mean different steps unsaid
        at = next(i for i, row in enumerate(rows) if row[0] == "evaluation loss")
        rows.insert(at + 1, ["  at step", *(_maybe(_count, arm.figures.eval_step) for arm in found.arms)])
    labels = dict.fromkeys(label for arm in found.arms for label in arm.figures.time if label != "train")
    rows += [[f"  not in train: {label}", *(_seconds_of(arm, label) for arm in found.arms)] for label in labels]
    return Table(head, [row for row in rows if set(row[1:]) != {NOTHING}])


# -- one against the other ---------------------------------------------------------------------------------------------------


def _gap(found: Estimate | None) -> str:
    if found is None:
        return NOTHING
    return number(found.value) + (
        "" if found.low is None or found.high is None else f" ({number(found.low)} to {number(found.high)})"
    )


def _ratio(found: Estimate | None) -> str:
    if found is None:
        return NOTHING
    return times(found.value) + (
        "" if found.low is None or found.high is None else f" ({times(found.low)} to {times(found.high)})"
    )


def _two(values: tuple[float, float] | None, form: Callable[[float], str]) -> str:
    return NOTHING if values is None else f"{form(values[0])} | {form(values[1])}"


_WHOSE = "left of |: the arm, right of it: the reference"
_SHOWN = 6  # lines of a pair's matched steps


def _thinned(pair: Pair) -> list[int]:
    count = len(pair.matched_steps)
    wanted = (
        {round(i * (count - 1) / max(_SHOWN - 1, 1)) for i in range(_SHOWN)} if count > _SHOWN else set(range(count))
    )
    return sorted(wanted)


def steps(found: Comparison) -> Table:
    rows = []
    for pair in found.pairs:
        for at in (pair.matched_steps[i] for i in _thinned(pair)):
            counts = [f"{at.step:,}", _two(at.attempts, _count), _two(at.label_tokens, _count)]
            losses = [
                _two(at.eval_loss, _loss),
                _gap(at.eval_loss_gap),
                _ratio(at.perplexity_ratio),
                _gap(at.train_loss_gap),
            ]
            rows.append([pair.arm, *counts, *losses])
    head = "at matched steps, step, attempts, label tokens, evaluation loss, gap, perplexity ratio, training gap (last tenth)"
    return Table(head.split(", "), rows, _WHOSE)


def _loss(value: float) -> str:
    return f"{value:.4f}"


def seconds(found: Comparison) -> Table:
    rows = []
    for pair in found.pairs:
        for at in pair.matched_seconds:
            cells = [at.clock, f"{at.seconds:,.1f}", _two(at.step, lambda v: f"{v:,.0f}"), _two(at.eval_loss, _loss)]
            rows.append([pair.arm, *cells, _gap(at.eval_loss_gap), _phase(at)])
    head = "at matched seconds, clock, seconds, step, evaluation loss, gap, schedule"
    return Table(
        head.split(", "),
        rows,
        f"{_WHOSE}; the loss at a second is on the straight line between the evaluations before and after it"
        + "; !: their schedules are not at the same point"
        * any(not at.same_phase for p in found.pairs for at in p.matched_seconds),
    )


def _phase(at: AtTime) -> str:
    if at.phase is None:
        return "constant"
    return f"{at.phase[0]:.0%} | {at.phase[1]:.0%}" + ("" if at.same_phase else " !")


def to_loss(found: Comparison) -> Table:
    rows = []
    for pair in found.pairs:
        to = pair.to_loss
        if to is not None:
            made, trained, total = (
                _two(to.steps, "{:,.0f}".format),
                *(_two(s, "{:,.1f}".format) for s in (to.train_s, to.total_s)),
            )
            ratios = [_ratio(to.steps_ratio), _ratio(to.train_s_ratio)]
            rows.append([pair.arm, _loss(to.target), made, ratios[0], trained, ratios[1], total])
    head = "to reach a loss, loss, steps, ratio, train seconds, ratio, total seconds"
    return Table(head.split(", "), rows)


def _gates(found: Comparison) -> list[str]:
    return (
        ["gates", *(f"  {HOLDS[one.holds]}: {one.gate} for {one.arm}: {one.text}" for one in found.gates)]
        if found.gates
        else []
    )


def _guide(found: Comparison) -> list[str]:
    if not found.guide:
        return []
    lines = ["what the figures recommend"]
    for one in found.guide:
        lines.append(f"  {one.arm or 'all'}: {one.rule}: {one.text}")
        lines.append(f"      {one.source}")
    return lines
