"""Whether a loss scale does its work, told from what it went through: each fault once, with what to do about it; and the
static scale that would have done.

Every rank could come to the same findings, since windows and decisions are the same everywhere; one tells them. No torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpdist.findings import Finding
from mpdist.lines import read_lines

SETTLED = 100  # steps, and windows at one scale, after which an overflow is no longer the search for a scale
FALLS, AMONG = 5, 100  # so many falls among so many attempts are too many
LONG = 1000  # steps after which there should have been a skip, if the scale were as high as it can be
WIDE = 6.0  # powers of two between the largest gradient element and FP16's largest number that are more than caution
SPARE = 3  # powers of two that a static scale leaves to what was not seen
FP16_MAX = 65504.0


@dataclass
class Health:
    """One session's scale, attempt by attempt. dynamic: it moves. told: names of findings that were told before. blocks: those
    have scales of their own, whose headroom is always about the same."""

    dynamic: bool
    floor: float
    told: set[str] = field(default_factory=set)
    headroom: float | None = None  # powers of two to overflow, as measured last
    blocks: bool = False
    _falls: deque[int] = field(default_factory=lambda: deque(maxlen=FALLS))
    _good: int = 0  # windows in a row without an overflow at the scale as it is

    def attempt(
        self, number: int, step: int, skipped: int, scale: float, after: float, overflow: bool
    ) -> list[Finding]:
        """What is new. number: of the attempt. step, skipped: counters after it. scale, after: before its verdict and now."""
        found = []
        if overflow and self.dynamic and after <= self.floor:
            found.append(_at_the_floor(step, after))
        if after < scale and step >= SETTLED // 10:  # a scale that begins too high falls to its place at once
            self._falls.append(number)
        if len(self._falls) == FALLS and number - self._falls[0] < AMONG:
            found.append(_again_and_again(step, after, number - self._falls[0] + 1))
        if overflow and step >= SETTLED and self._good >= SETTLED:
            found.append(_late(step, scale, self._good))
        room = None if self.blocks else self.headroom
        if not overflow and step >= LONG and not skipped and room is not None and room >= WIDE:
            found.append(_too_low(step, scale, room, self.dynamic))
        self._good = 0 if overflow or after != scale else self._good + 1
        fresh = [finding for finding in found if finding.check not in self.told]
        self.told |= {finding.check for finding in fresh}
        return fresh


def health_of(scale: Mapping[str, Any], run: Path) -> Health | None:
    """Of a run that begins or goes on; None where no scale is in use. scale: mode and floor, as env.json has them."""
    if scale["mode"] == "off":
        return None
    told = {str(event["check"]) for event in events(run) if "check" in event}
    return Health(scale["mode"] == "dynamic", scale["floor"], told, blocks=scale.get("per_block", False))


def events(run: Path, check: Callable[[dict[str, Any], str], None] | None = None) -> list[dict[str, Any]]:
    """Of a run directory; none where nothing has happened yet. check: as `read_lines` takes it."""
    path = run / "events.jsonl"
    return read_lines(path, check) if path.exists() else []


def _at_the_floor(step: int, scale: float) -> Finding:
    return Finding("scale at its floor", f"{scale:g} at step {step}", "doubtful",
                   "it falls no further: windows that overflow now are lost, and use up precision.scale.patience",
                   "lower precision.scale.floor where gradients are finite and large (train/grad_norm); else lower optim.lr, "
                   "compute in bf16, or keep the layers that overflow first in precision.keep_fp32")  # fmt: skip


def _again_and_again(step: int, scale: float, among: int) -> Finding:
    return Finding("scale falls again and again", f"{FALLS} times in {among} attempts, to {scale:g} at step {step}", "doubtful",
                   "gradients grow faster than the scale follows, or it grows back too soon",
                   "look at which layers overflow (mpdist doctor RUN --html FILE); lower optim.lr or optim.clip, raise "
                   "precision.scale.interval, or compute in bf16")  # fmt: skip


def _late(step: int, scale: float, good: int) -> Finding:
    return Finding("overflow after the scale had settled", f"at step {step}, scale {scale:g}", "doubtful",
                   f"{good} windows in a row had fitted at this scale: a gradient is larger than any of theirs",
                   "one is a rare batch; if more follow, lower optim.lr, or compute in bf16")  # fmt: skip


def _too_low(step: int, scale: float, room: float, dynamic: bool) -> Finding:
    value = f"no skip in {step} steps; at scale {scale:g} the largest gradient is 2^{room:.1f} below overflow"
    do = f"precision.scale.init={2.0 ** (math.floor(math.log2(scale) + room) - SPARE):g}"
    do += " or a shorter precision.scale.interval" if dynamic else ""
    why = "small gradients are flushed that a larger scale would keep"
    return Finding("scale too low to matter", value, "doubtful", why, do)


@dataclass(frozen=True)
class Static:
    """scale: the largest power of two that leaves SPARE powers to overflow. largest: of unscaled gradient elements, as
    measured on logged steps. overflowed: the smallest scale at which a window overflowed, None where none did."""

    scale: float
    largest: float
    overflowed: float | None

    def __str__(self) -> str:
        seen = f"the largest gradient element seen is {self.largest:.3g}"
        if self.overflowed is not None:
            seen += f", and a window overflowed at {self.overflowed:g}"
        return f"2^{round(math.log2(self.scale))} = {self.scale:g} ({seen}; {SPARE} powers of two are spare)"


def best_static(rows: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> Static | None:
    """From a run's metrics and events; None where no headroom was measured, or not that of one scale for all blocks.

    Activations' gradients are not measured and may be larger, so that an overflow bounds the scale, too: the scale stays
    a quarter of the smallest one that overflowed, rehearsed overflows among them.
    """
    largest = 0.0
    for row in rows:
        room, scale = row.get("precision/headroom_overflow"), row.get("scale/value")
        if room is not None and scale and row.get("scale/block_max") is None:
            largest = max(largest, FP16_MAX / 2.0**room / scale)
    if not largest:
        return None
    falls = [
        e["scale"] for e in events if e.get("event") == "skip" and e.get("scale_after", math.inf) < e.get("scale", 0.0)
    ]
    overflowed = min(falls, default=None)
    power = math.floor(math.log2(FP16_MAX / largest)) - SPARE
    if overflowed is not None:
        power = min(power, math.floor(math.log2(overflowed)) - 2)
    return Static(2.0**power, largest, overflowed)
