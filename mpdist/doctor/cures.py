"""Cures that are tried when a run in FP16 or BF16 is not finite: a scale that may move, FP32 for single modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpdist.config.rules import SUPPORT
from mpdist.doctor.extremes import LIMIT, Extremes, above, container, outermost, to_keep

if TYPE_CHECKING:
    from mpdist.config import Config
    from mpdist.doctor.trial import Told

_TRIES = 4
_FAR = 2.0  # times FP32's gradient norm, at the first and the last step: rounding moves it by percents
_INIT = 65536.0  # where a dynamic scale begins by default


@dataclass(frozen=True)
class Cured:
    """settings: what was tried, by dotted names. check, value: the disease's name and words for it, where the cure has shown
    what it was."""

    settings: dict[str, Any]
    told: Told
    check: str = ""
    value: str = ""

    def sound(self, base: Told) -> bool:
        """Whether modules in FP32 have made the run that FP32 makes, not only a finite one: no skip, and a gradient of about
        the same norm."""
        if self.told.skipped or not (self.told.norms and base.norms):
            return False
        ends = ((self.told.norms[at], base.norms[at]) for at in (0, -1))
        return all(theirs / _FAR <= own <= theirs * _FAR for own, theirs in ends)


Try = Callable[[dict[str, Any]], Cured]


def scaling(cfg: Config, attempt: Try) -> Cured | None:
    """Collective. A dynamic scale that may fall to 1, where the one that is asked for may not."""
    scale = cfg.precision.scale
    settings: dict[str, Any] = {}
    if scale.mode in ("static", "off"):
        settings["precision.scale.mode"] = "dynamic"
    if scale.floor > 1.0:
        settings["precision.scale.floor"] = 1.0
    if not settings:
        return None
    if scale.init > _INIT:
        settings["precision.scale.init"] = _INIT
    found = attempt(settings)
    if not found.told.finite:
        return None
    stands = (
        "off"
        if scale.mode == "off"
        else f"{scale.init:g} for ever"
        if scale.mode == "static"
        else f"never below {scale.floor:g}"
    )
    value = f"it is {stands}, and gradients overflow there; at {found.told.scales[-1]:g} they do not"
    return replace(found, check="loss scale", value=value)


def keeping(cfg: Config, extremes: Extremes, told: Told, attempt: Try) -> Cured | None:
    """Collective. FP32 for the fewest modules that make it finite: first those that hold more than FP16 can, then, one
    after another, those that are named."""
    if not SUPPORT[cfg.shard.engine].keeps:
        return None
    kept = list(cfg.precision.keep_fp32)
    names = set[str]()
    if cfg.precision.compute == "fp16":
        needed = to_keep(extremes.into, extremes.out_of, extremes.holders)
        if needed is None:
            return None
        names |= {*needed, *(above(name) for name in extremes.weights)}
    for _ in range(_TRIES):
        if not names:
            if (more := _outer(names, told, extremes)) is None:
                return None
            names.add(more)
        found = attempt({"precision.keep_fp32": [*kept, *outermost(names)]})
        if found.told.finite:
            return replace(found, value=_value(extremes, outermost(names)))
        if not found.told.diverged or (more := _outer(names, found.told, extremes)) is None:
            return None
        told = found.told
        names.add(more)
    return None


def _outer(names: set[str], told: Told, extremes: Extremes) -> str | None:
    """The module to keep next: the one that is named now, or what is around it where it is kept already."""
    module = (told.finding or {}).get("module") or ""
    around = next((name for name in outermost(names) if module == name or module.startswith(f"{name}.")), None)
    return container(above(around) if around else module, extremes.out_of, extremes.holders) if module else None


def _value(extremes: Extremes, names: list[str]) -> str:
    """How large what is in these modules becomes."""
    inside = {name: max(extremes.into[name], extremes.out_of[name]) for name in extremes.into
              if any(name == outer or name.startswith(f"{outer}.") for outer in names)}  # fmt: skip
    name, size = max(inside.items(), key=lambda item: item[1], default=("", 0.0))
    return f"{name} reaches {size:.3g}, and FP16 ends at {LIMIT:g}" if size > LIMIT else ""
