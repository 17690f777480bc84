"""The first-step check: before any update, all arms of a seed hold the same weights and see the same window.

So the loss of their first attempt may differ by what their compute formats round away and no more. A larger difference
means that the arms are not what the sweep takes them for (other weights, other rows, a mask that one way of computing
loses), and whatever is compared afterwards is that, not the treatment.

The bound on the difference of two arms' losses is

    (eps_a + eps_b) * sqrt(layers) * max(1, loss)

with eps the gap between 1 and the next number of the compute format (mpdist.formats), twice its unit roundoff. Each
block rounds the residual stream, and roundings that are not all of one sign grow with the root of their number: the
sqrt(n) u that holds with high probability where n u holds for certain (Higham & Mary, A new approach to probabilistic
rounding error analysis, SIAM J. Sci. Comput. 41(5), 2019). Measured on random Llamas of 2 to 32 layers, 63 and 504
label tokens, logits from small to wild: at most 0.35 of the bound (fp16 against fp32, a loss of 12.8), 0.26 between two
cuts of one window in FP32. A trained model's logits lie between those.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdist import arch
from mpdist.errors import UsageError
from mpdist.formats import FORMATS
from mpdist.lines import number, read_json

if TYPE_CHECKING:
    from mpdist.config import Config

_LOOK_S = 0.5
_UNKNOWN_LAYERS = 100  # of a model whose shape is not known: more than most have


@dataclass(frozen=True)
class Seen:
    """What a run has left of its first attempt: `loss` and `label_tokens`; the digests of its prepared data, of the order
    in which it takes them, and of its initial masters (mpdist.fingerprint)."""

    loss: float
    label_tokens: int
    data: Mapping[str, str | None]
    order: str | None = None
    weights: str | None = None


def seen(run: Path) -> Seen | None:
    """None as long as the run has not closed its first attempt."""
    first = (read_json(run / "status.json") or {}).get("first")
    if not isinstance(first, Mapping):
        return None
    known: dict[str, Any] = {}
    for session in sorted((run / "sessions").glob("[0-9]*")):  # what a run begins with, its later sessions do not say
        known |= read_json(session / "env.json") or {}
    data, order, weights = (known.get(key) for key in ("data", "order", "initial_weights"))
    return Seen(float(number(first["loss"])), int(first["label_tokens"]), data or {}, order, weights)


@dataclass(frozen=True)
class Kind:
    """How an arm begins. eps: of the format in which it computes. masters: their dtype and the patterns of those that do
    not train: where both are alike, the initial masters are the same bits."""

    eps: float
    masters: tuple[Any, ...] = ()


def kind(config: Config) -> Kind:
    compute, master = config.precision.compute, config.precision.master
    eps = FORMATS["tf32" if compute == "fp32" and config.precision.tf32 else compute].eps
    return Kind(eps, (compute if master == "compute" else "fp32", config.model.freeze))


def layers(config: Config) -> tuple[int, bool]:
    """Blocks of the model, and whether it has dropout. A shape that is not known is taken for a deep one without."""
    model = config.model
    shape = arch.look(model.path, model.config, model.revision)
    if not isinstance(shape, arch.Arch):
        return _UNKNOWN_LAYERS, False
    return shape.layers, bool(shape.attention_dropout or shape.hidden_dropout)


def bound(eps_a: float, eps_b: float, blocks: int, loss: float) -> float:
    """By how much the first losses of two arms may differ, in nats a token; see the module's text."""
    return (eps_a + eps_b) * math.sqrt(blocks) * max(1.0, loss)


def compare(
    name: str, mine: Seen, kind_a: Kind, other: str, theirs: Seen, kind_b: Kind, blocks: int | None
) -> UsageError | None:
    """What makes run `name` another experiment than run `other`, None if nothing does.

    blocks: None where the losses differ anyway, by dropout's masks. A loss that is not finite says that the arm fails,
    not that it is another: the run's own end has that.
    """
    do = (
        "find out which of the two is wrong (`mpdist config RUN/config.yaml`, RUN/events.jsonl); remove the folder of a "
        "run that is to be made again"
    )
    for part, digest in mine.data.items():
        if theirs.data.get(part, digest) != digest:
            what = f"{name} has other data than {other}: data.{part} is {str(digest)[:12]}, not {str(theirs.data[part])[:12]}"
            return UsageError(what, "all arms have to see the same rows; the files have changed since", do)
    if mine.order and theirs.order and mine.order != theirs.order:
        what = f"{name} takes its rows in another order than {other}"
        return UsageError(what, "all arms have to see the same windows, one after the other", do)
    if kind_a.masters == kind_b.masters and mine.weights and theirs.weights and mine.weights != theirs.weights:
        what = f"{name} begins with other weights than {other}"
        return UsageError(what, "all arms of a seed have to start from the same, bit for bit", do)
    if mine.label_tokens != theirs.label_tokens:
        what = f"{name} counts {mine.label_tokens} label tokens in its first window, {other} {theirs.label_tokens}"
        return UsageError(what, "all arms have to see the same windows", do)
    if blocks is None or not (math.isfinite(mine.loss) and math.isfinite(theirs.loss)):
        return None
    eps_a, eps_b = kind_a.eps, kind_b.eps
    gap, most = abs(mine.loss - theirs.loss), bound(eps_a, eps_b, blocks, min(mine.loss, theirs.loss))
    if gap <= most:
        return None
    return UsageError(
        f"{name} begins with a loss of {mine.loss:.8g}, {other} with {theirs.loss:.8g}, before any update",
        f"they differ by {gap:.3g}; the same weights on the same rows may differ by {most:.3g}, that is (eps + eps) x "
        f"sqrt(layers) x loss = ({eps_a:.3g} + {eps_b:.3g}) x sqrt({blocks}) x {max(1.0, min(mine.loss, theirs.loss)):.3g}",
        do,
    )


class Watch:
    """Looks at a run while it trains: an arm that is another experiment need not go on for hours.

    check: what is wrong with the run, None as long as nothing is known to be. stop: asks the run to stop.
    """

    def __init__(self, run: Path, check: Callable[[], UsageError | None], stop: Callable[[], None]) -> None:
        self.error: UsageError | None = None
        self._run, self._check, self._stop = run, check, stop
        self._looked = 0.0
        self._done = False

    def look(self) -> None:
        """To be called again and again while the run is under way."""
        if self._done or time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        if not os.path.exists(self._run / "status.json") or seen(self._run) is None:
            return
        self._done = True
        self.error = self._check()
        if self.error is not None:
            self._stop()
