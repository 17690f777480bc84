"""Gates: `loss_gap<=0.25%`, `speed>=1.2x`, one quantity, one bound, a unit. For CI: all hold, or the status is 7.

A gate holds where the figures leave no doubt: the one-sided 95 % bound of the quantity is on its right side. Where the
value is on the right side and its bound is not, the gate is undecided, and does not hold. With one seed there is no
bound, so an estimate decides no gate but against it. What is counted and not estimated decides by its value.

A run that has not come to its end decides nothing either, on the arm's side or, where the quantity is measured against
the reference, on that one.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpdist.compare.defects import LOSS, SPEED, TIME
from mpdist.compare.tree import Arm, Defect, Estimate, GateResult, Pair
from mpdist.errors import UsageError
from mpdist.units import format_bytes, parse_bytes

_GRAMMAR = re.compile(
    r"\s*(?:([^\s:<>=]+):)?([a-z_]+)\s*(<=|>=|<|>)\s*([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([a-zA-Z%]*)\s*"
)


@dataclass(frozen=True)
class Sides:
    """What a quantity is read from: an arm, the reference, and the pair of them."""

    arm: Arm
    reference: Arm
    pair: Pair


@dataclass(frozen=True)
class Quantity:
    """units: what a bound may be written in, "" being none. alone: units in which the arm's own runs are all that counts."""

    meaning: str
    units: tuple[str, ...]
    value: Callable[[Sides, str], Estimate | None]
    spoilt_by: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gate:
    text: str
    arm: str | None
    quantity: str
    relation: str
    bound: float
    unit: str


def _percent(found: Estimate | None, base: float | None, unit: str) -> Estimate | None:
    """The gap in nats, or in percent of the reference's."""
    if found is None or unit == "":
        return found
    if not base:
        return None
    return found.mapped(lambda value: 100 * value / base, 0.0)


def _loss_gap(of: Sides, unit: str) -> Estimate | None:
    at = of.pair.judged
    if at is None:
        return None
    base = at.eval_loss[1] if at.eval_loss is not None else at.train_loss[1]
    return _percent(of.pair.loss_gap, base, unit)


def _train_loss_gap(of: Sides, unit: str) -> Estimate | None:
    at = of.pair.matched_steps[-1] if of.pair.matched_steps else None
    return None if at is None else _percent(at.train_loss_gap, at.train_loss[1], unit)


def _timed_gap(of: Sides, unit: str) -> Estimate | None:
    at = of.pair.at_time("train")
    if at is None or at.eval_loss is None:
        return None
    return _percent(at.eval_loss_gap, at.eval_loss[1], unit)


def _perplexity(of: Sides, _: str) -> Estimate | None:
    found = of.pair.judged.perplexity_ratio if of.pair.judged is not None else None
    return None if found is None else found.mapped(lambda value: 100 * (value - 1), 0.0)


def _counted(arm: float | None, reference: float | None, unit: str) -> Estimate | None:
    """A counter, by itself or over the reference's."""
    if arm is None or (unit == "x" and not reference):
        return None
    return Estimate(arm / reference if unit == "x" and reference else arm)


def _memory(of: Sides, unit: str) -> Estimate | None:
    return _counted(of.arm.figures.peak_allocated_bytes, of.reference.figures.peak_allocated_bytes, unit)


def _wire(of: Sides, unit: str) -> Estimate | None:
    return _counted(of.arm.figures.wire_bytes, of.reference.figures.wire_bytes, unit)


def _step_time(of: Sides, _: str) -> Estimate | None:
    found = of.pair.speed
    return None if found is None else found.mapped(lambda value: 1 / value if value else math.inf, 1.0, turned=True)


def _skipped(of: Sides, unit: str) -> Estimate | None:
    count = sum(len(run.skips) for run in of.arm.runs)
    return Estimate(100 * count / max(sum(run.attempts for run in of.arm.runs), 1) if unit == "%" else count)


def _nonfinite(of: Sides, _: str) -> Estimate | None:
    return Estimate(of.arm.figures.nonfinite)


def _steps_to_loss(of: Sides, _: str) -> Estimate | None:
    return of.pair.to_loss.steps_ratio if of.pair.to_loss is not None else None


def _time_to_loss(of: Sides, _: str) -> Estimate | None:
    return of.pair.to_loss.train_s_ratio if of.pair.to_loss is not None else None


QUANTITIES: dict[str, Quantity] = {
    "loss_gap": Quantity("evaluation loss (training loss without any) at the last matched step, minus the reference's",
                         ("", "%"), _loss_gap, (LOSS,)),
    "train_loss_gap": Quantity("training loss over the last tenth of the matched steps, minus the reference's",
                               ("", "%"), _train_loss_gap, (LOSS,)),
    "timed_loss_gap": Quantity("evaluation loss at the same train seconds, minus the reference's",
                               ("", "%"), _timed_gap, (LOSS, TIME)),
    "perplexity_gap": Quantity("perplexity at the last matched step above the reference's", ("%",), _perplexity, (LOSS,)),
    "speed": Quantity("tokens/s over the reference's", ("x",), lambda of, _: of.pair.speed, (SPEED,)),
    "step_time": Quantity("seconds a token over the reference's", ("x",), _step_time, (SPEED,)),
    "steps_to_loss": Quantity("steps to the common loss over the reference's", ("x",), _steps_to_loss, (LOSS,)),
    "time_to_loss": Quantity("train seconds to the common loss over the reference's", ("x",), _time_to_loss, (LOSS, TIME)),
    "peak_memory": Quantity("peak allocated bytes of a rank", ("bytes", "x"), _memory, alone=("bytes",)),
    "wire_bytes": Quantity("payload that a rank hands to gradient collectives in a step", ("bytes", "x"), _wire, alone=("bytes",)),
    "skipped": Quantity("attempts that were skipped", ("", "%"), _skipped, alone=("", "%")),
    "nonfinite": Quantity("attempts that were skipped for a non-finite value", ("",), _nonfinite, alone=("",)),
}  # fmt: skip


def parse(texts: Sequence[str]) -> list[Gate]:
    """Raises UsageError for what is no gate: the nearest quantity, the units that it takes."""
    return [_parse(text) for text in texts]


def _parse(text: str) -> Gate:
    match = _GRAMMAR.fullmatch(text)
    if match is None:
        raise UsageError(f"--gate {text!r}", "a gate is [ARM:]QUANTITY, one of <= >= < >, a number and a unit",
                         "write it like 'loss_gap<=0.25%' or 'bf16:speed>=1.2x'")  # fmt: skip
    arm, name, relation, number, unit = match.groups()
    if name not in QUANTITIES:
        near = difflib.get_close_matches(name, QUANTITIES, n=1, cutoff=0.4)
        raise UsageError(f"--gate {text!r}: there is no quantity called {name}", f"there are {', '.join(QUANTITIES)}",
                         f"did you mean {near[0]}?" if near else "choose one of them")  # fmt: skip
    units, bound = QUANTITIES[name].units, float(number)
    if not math.isfinite(bound):
        raise UsageError(f"--gate {text!r}: {number} is infinite", "such a gate holds, or fails, whatever was measured",
                         "give a finite bound")  # fmt: skip
    if "bytes" in units and unit not in ("", "x", "%"):
        bound, unit = float(parse_bytes(f"{number}{unit}")), "bytes"
    if unit not in units:
        takes = " or ".join({"": "no unit", "bytes": "bytes such as 80GiB"}.get(one, one) for one in units)
        what = f"--gate {text!r}: the unit is {unit!r}" if unit else f"--gate {text!r} has no unit"
        written = "GiB" if units[0] == "bytes" else units[0]
        raise UsageError(
            what, f"{name}: {QUANTITIES[name].meaning}; it is in {takes}", f"write {name}{relation}{number}{written}"
        )
    return Gate(text.strip(), arm, name, relation, bound, unit)


def judge(
    gates: Sequence[Gate], arms: Sequence[Arm], pairs: Sequence[Pair], defects: Sequence[Defect], control: str | None
) -> tuple[GateResult, ...]:
    """Each gate on the arm that it names, else on every arm but the reference and the control."""
    by_name = {arm.name: arm for arm in arms}
    results = []
    for gate in gates:
        if gate.arm is not None and gate.arm not in {pair.arm for pair in pairs}:
            raise UsageError(f"--gate {gate.text!r}: no arm is called {gate.arm}" if gate.arm not in by_name else
                             f"--gate {gate.text!r}: {gate.arm} is what the others are measured against",
                             f"the arms are {', '.join(pair.arm for pair in pairs)}", "")  # fmt: skip
        wanted = (
            [pair for pair in pairs if pair.arm == gate.arm] if gate.arm else [p for p in pairs if p.arm != control]
        )
        results += [_judge(gate, Sides(by_name[pair.arm], by_name[pair.against], pair), defects) for pair in wanted]
    return tuple(results)


def _judge(gate: Gate, of: Sides, defects: Sequence[Defect]) -> GateResult:
    quantity = QUANTITIES[gate.quantity]
    found = quantity.value(of, gate.unit)
    spoilt = [
        one
        for one in defects
        if set(one.spoils) & set(quantity.spoilt_by) and one.arm in (of.arm.name, of.reference.name)
    ]

    def result(holds: bool | None, text: str) -> GateResult:
        return GateResult(gate.text, of.arm.name, None if found is None else found.value,
                          None if found is None else found.at_least, None if found is None else found.at_most, holds, text)  # fmt: skip

    if spoilt:
        return result(None, f"withheld: {spoilt[0].name} in {spoilt[0].run}")
    for run in of.arm.diverged:
        return result(False, f"{run.name} diverged at step {run.steps:,}")
    for run in of.arm.unfinished:
        return result(None, f"{run.name} is {run.state} at step {run.steps:,}")
    if gate.unit not in quantity.alone:
        for run in (*of.reference.diverged, *of.reference.unfinished):
            how = "diverged" if run.state == "diverged" else f"is {run.state}"
            return result(None, f"{run.name}, of the reference, {how} at step {run.steps:,}")
    if found is None:
        return result(None, "not measured")
    if not math.isfinite(found.value):
        return result(False, "it is not finite")
    if gate.quantity in ("speed", "step_time") and of.pair.withheld:
        return result(None, f"{_show(found.value, gate)}, withheld: {of.pair.withheld}")
    upward = gate.relation in (">=", ">")
    edge = found.at_least if upward else found.at_most
    holds = _holds(found.value, gate)
    if holds and edge is None and found.why:
        return result(None, f"{_show(found.value, gate)} ({found.why}): undecided, more seeds would tell")
    if not holds or edge is None:
        return result(holds, _show(found.value, gate) + (f" ({found.why})" if found.why else ""))
    told = f"{_show(found.value, gate)}, at {'least' if upward else 'most'} {_show(edge, gate)} at 95 %"
    return result(True, told) if _holds(edge, gate) else result(None, f"{told}: undecided, more seeds would tell")


def _holds(value: float, gate: Gate) -> bool:
    return {"<=": value <= gate.bound, ">=": value >= gate.bound, "<": value < gate.bound, ">": value > gate.bound}[
        gate.relation
    ]


def _show(value: float, gate: Gate) -> str:
    return format_bytes(value) if gate.unit == "bytes" else f"{value:.4g}{gate.unit}"
