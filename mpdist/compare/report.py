"""A comparison as JSON: the contract's keys, and beside them everything else that the tree holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mpdist.compare.tree import Arm, AtStep, AtTime, Comparison, Difference, Estimate, GateResult, Pair, Verdict


def as_json(found: Comparison) -> dict[str, Any]:
    return {
        "refused": [_difference(one) for one in found.refused],
        "allowed": [_difference(one) for one in found.allowed],
        "treatment": list(found.treatment),
        "varied": list(found.varied),
        "against": found.reference,
        "control": found.control,
        "seeds": list(found.seeds),
        "warmup": {"windows": found.warmup, "step": found.warmup_step},
        "level": found.level,
        "arms": [_arm(arm) for arm in found.arms],
        "matched_steps": [_at_step(pair, at) for pair in found.pairs for at in pair.matched_steps],
        "matched_seconds": [_at_time(pair, at) for pair in found.pairs for at in pair.matched_seconds],
        "to_loss": [_to_loss(pair) for pair in found.pairs if pair.to_loss is not None],
        "speed": [_speed(pair) for pair in found.pairs if pair.speed is not None],
        "drift": [_drift(pair) for pair in found.pairs if pair.drift is not None],
        "verdicts": [_verdict(one) for one in found.verdicts],
        "gates": [_gate(one) for one in found.gates],
        "defects": [asdict(one) for one in found.defects],
        "notes": [asdict(one) for one in found.notes],
        "guide": [asdict(one) for one in found.guide],
        "environment": dict(found.environment),
    }  # fmt: skip


def _whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def _difference(one: Difference) -> dict[str, Any]:
    return {"key": one.key, "values": dict(one.values), "text": str(one)}


def _arm(arm: Arm) -> dict[str, Any]:
    figures = asdict(arm.figures)
    for key in ("steps", "attempts", "label_tokens", "tokens"):
        figures[key] = _whole(figures[key])
    runs = [
        {"name": run.name, "path": str(run.path), "seed": run.seed, "state": run.state, "steps": run.steps, "attempts": run.attempts}
        for run in arm.runs
    ]  # fmt: skip
    return {"name": arm.name, "control": arm.control, "settings": dict(arm.settings), "runs": runs, **figures}


def _who(pair: Pair) -> dict[str, Any]:
    return {"arm": pair.arm, "against": pair.against, "seeds": len(pair.seeds)}


def _uncertain(found: Estimate | None) -> dict[str, Any]:
    if found is None:
        return {"interval": None}
    told = {
        "interval": None if found.low is None else [found.low, found.high],
        "p": found.p,
        "detectable": found.detectable,
    }
    return told | ({"why": found.why} if found.why else {})


def _both(values: Sequence[float] | None) -> list[float | int] | None:
    return None if values is None else [_whole(value) if value == value else value for value in values]


def _at_step(pair: Pair, at: AtStep) -> dict[str, Any]:
    gap = at.eval_loss_gap
    return {
        **_who(pair), "step": at.step, "attempts": _both(at.attempts), "label_tokens": _both(at.label_tokens),
        "eval_loss": at.eval_loss, "eval_loss_gap": None if gap is None else gap.value, **_uncertain(gap),
        "perplexity_ratio": None if at.perplexity_ratio is None else at.perplexity_ratio.value,
        "train_loss": at.train_loss, "train_loss_steps": [at.window_from + 1, at.step],
        "train_loss_gap": at.train_loss_gap.value, "train_loss_interval": _uncertain(at.train_loss_gap)["interval"],
    }  # fmt: skip


def _at_time(pair: Pair, at: AtTime) -> dict[str, Any]:
    gap = at.eval_loss_gap
    return {
        **_who(pair), "clock": at.clock, "seconds": at.seconds, "step": at.step, "eval_loss": at.eval_loss,
        "eval_loss_gap": None if gap is None else gap.value, **_uncertain(gap), "interpolated": True,
        "phase": at.phase, "same_phase": at.same_phase,
    }  # fmt: skip


def _to_loss(pair: Pair) -> dict[str, Any]:
    to = pair.to_loss
    assert to is not None
    ratios = {name: None if one is None else {"ratio": one.value, **_uncertain(one)} for name, one in
              (("steps_ratio", to.steps_ratio), ("train_s_ratio", to.train_s_ratio))}  # fmt: skip
    return {
        **_who(pair),
        "eval_loss": to.target,
        "steps": to.steps,
        "train_s": to.train_s,
        "total_s": to.total_s,
        **ratios,
    }


def _drift(pair: Pair) -> dict[str, Any]:
    drift = pair.drift
    assert drift is not None
    slope = drift.slope
    return {
        **_who(pair),
        "slope_per_1000_steps": slope.value,
        **_uncertain(slope),
        "first": drift.first,
        "last": drift.last,
    }


def _verdict(one: Verdict) -> dict[str, Any]:
    words = {"speed": one.speed, "loss": one.loss, "drift": one.drift, "alarms": list(one.alarms)}
    return {"arm": one.arm, "against": one.against, "text": one.line, **words}


def _gate(one: GateResult) -> dict[str, Any]:
    return {
        "gate": one.gate, "arm": one.arm, "value": one.value, "at_least": one.low, "at_most": one.high, "holds": one.holds,
        "text": one.text,
    }  # fmt: skip


def _speed(pair: Pair) -> dict[str, Any]:
    assert pair.speed is not None
    parts = {"all_steps": pair.speed_all, "undisturbed_steps": pair.speed_undisturbed}
    return {
        **_who(pair), "ratio": pair.speed.value, **_uncertain(pair.speed), "basis": pair.basis, "withheld": pair.withheld or None,
        **{name: None if one is None else {"ratio": one.value, **_uncertain(one)} for name, one in parts.items()},
    }  # fmt: skip
