"""Trials that came to their end, judged against FP32 and the clock. Plain arithmetic on what they have told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from mpdist.findings import Finding
from mpdist.formats import FORMATS
from mpdist.sweep_first import bound

if TYPE_CHECKING:
    from mpdist.doctor.cures import Cured
    from mpdist.doctor.trial import Told

_PROGRESS = 0.2  # of what FP32 gained: a run that is further behind learns something else, or nothing
_FLUSHED = 0.05  # of the gradient, beyond what is zero in FP32 too
_SKIPPED = 0.5  # of the attempts
_WAIT_SHARE, _WAIT_S = 0.2, 0.02  # of a step, and seconds below which a wait is the machine's noise


@dataclass(frozen=True)
class Loss:
    """How far from FP32's a loss may be. base: FP32's trial. blocks: of the model. dropout: draws differ between dtypes."""

    base: Told
    blocks: int
    dropout: bool

    def compare(self, name: str, told: Told, eps: float) -> Finding | None:
        """None where rounding explains it: by mpdist.sweep_first's bound at the first loss, before any update; over the last
        third of the steps by twice that, since updates have been rounded too, and a fifth of what FP32 has gained."""
        base, count = self.base.losses, min(len(self.base.losses), len(told.losses))
        if not count:
            return None
        first, late = told.losses[0] - base[0], max(1, count // 3)
        most = bound(eps, FORMATS["fp32"].eps, self.blocks, base[0])
        do = "compare them over more steps: mpdist sweep CONFIG --vary precision.compute=fp32,bf16"
        if abs(first) > most and not self.dropout:
            value = f"the first loss is {told.losses[0]:.5g} {name}, {base[0]:.5g} in FP32"
            why = f"before any update they may differ by {most:.2g}, by rounding: more than precision differs"
            return Finding("convergence", value, "doubtful", why, do)
        end, own = fmean(base[count - late : count]), fmean(told.losses[count - late : count])
        allowed = 2 * most + _PROGRESS * max(0.0, base[0] - end)
        if own - end <= allowed:
            return None
        value = f"the loss ends at {own:.4g} {name}, at {end:.4g} in FP32 (mean of {late} steps of {count})"
        why = f"it may be higher by {allowed:.2g}: rounding, and a fifth of what FP32 has gained"
        return Finding("convergence", value, "doubtful", why, do)


def scale_told(told: Told, base: Told, attempt: Callable[[dict[str, Any]], Cured]) -> list[Finding]:
    """Collective where a higher scale is tried. A scale that does not settle, or stands so low that gradients vanish."""
    scale = told.config.precision.scale
    attempts = len(told.losses) + told.skipped
    if told.skipped > _SKIPPED * attempts and told.scales and told.scales[-1] != told.scales[0]:
        why = f"{told.skipped} of {attempts} attempts overflow, and the scale still falls ({told.scales[-1]:g})"
        return [Finding("loss scale", "it does not settle", "doubtful", why, "begin lower: precision.scale.init",
                        settings={"precision.scale.init": told.scales[-1]})]  # fmt: skip
    lost = flushed(told, base)
    if lost <= _FLUSHED:
        return []
    settings: dict[str, Any] = {"precision.scale.mode": "dynamic"} if scale.mode in ("static", "off") else {}
    if scale.init < 65536.0 or not settings:
        settings["precision.scale.init"] = max(65536.0, 256.0 * scale.init)
    found = attempt(settings)
    value = f"at a scale of {told.scales[-1]:g} FP16 flushes {lost:.0%} of the gradient to zero"
    if found.told.finite and flushed(found.told, base) < lost / 2:
        do = f"{', '.join(f'{key}: {text}' for key, text in settings.items())}: tried, {flushed(found.told, base):.0%} are flushed"
        return [
            Finding(
                "loss scale", value, "failed", "they are below FP16's smallest number", do, status=2, settings=settings
            )
        ]
    return [Finding("loss scale", value, "doubtful", "they are below FP16's smallest number, at a higher scale too",
                    "compute in bf16", settings={"precision.compute": "bf16"})]  # fmt: skip


def flushed(told: Told, base: Told) -> float:
    """The share of the gradient that FP16 turns into zero, by its casts or in its kernels, beyond what is zero in FP32."""
    zero = told.figures.get("precision/grad_zero", 0.0) - base.figures.get("precision/grad_zero", 0.0)
    return max(0.0, zero) + told.figures.get("precision/grad_flushed", 0.0)


def starved(told: Told) -> list[Finding]:
    """Medians, so that a single pause of the machine is no finding."""
    if not told.wait_s:
        return []
    wait, step = median(told.wait_s), median(told.step_s)
    if wait < _WAIT_S or wait < _WAIT_SHARE * (wait + step):
        return []
    value = f"{wait / (wait + step):.0%} of a step: {wait * 1000:.0f} ms for data, {step * 1000:.0f} ms of training"
    why = "rows are read one window ahead, from prepared files; the disk under data.cache or the processor is too slow for that"
    do = "keep data.cache on a local disk, leave each rank a core of its own, or give a step more work (batch.micro)"
    return [Finding("data wait", value, "doubtful", why, do)]
