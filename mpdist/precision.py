"""Which dtype where (`Policy`), and the accumulation window with its one loss scale (`Window`).

The window's rules, which hold for every engine because only this file knows them:

* The scale is read once, when the window opens, and cannot change before it closes.
* Closing takes one `Verdict`, a value that was reduced over all ranks, and gives one `Decision`. Whether the
  optimizer moves, whether the schedule moves, what is logged and when the run gives up all follow from it.
* Growth and back-off follow the rule of torch's GradScaler: `interval` applied windows in a row multiply the scale by
  `growth`; a window with non-finite gradients multiplies it by `backoff`, never below `floor`.
* A window whose loss itself is non-finite says nothing about the scale, which stays; it is not tried again.
* Blocks may have scales of their own inside the window's (mpdist.block_scale). Where they alone overflowed, theirs fall
  and the window's stays.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpdist.errors import UsageError

if TYPE_CHECKING:
    from mpdist.block_scale import BlockScale

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WORDS = {dtype: word for word, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Policy:
    """compute: dtype of forward and backward. master: dtype of what the optimizer updates. keep_fp32: patterns of module
    names (shell wildcards) that compute in FP32 whatever `compute` says."""

    compute: torch.dtype
    master: torch.dtype = torch.float32
    keep_fp32: tuple[str, ...] = ()

    def keeps(self, module_name: str) -> bool:
        """Whether this module, or one that holds it, is named by keep_fp32."""
        parts = module_name.split(".")
        prefixes = (".".join(parts[: i + 1]) for i in range(len(parts)))
        return any(fnmatch(prefix, pattern) for prefix in prefixes for pattern in self.keep_fp32)

    def parameter_dtype(self, parameter_name: str) -> torch.dtype:
        """The dtype in which the module computes with this parameter."""
        return torch.float32 if self.keeps(parameter_name.rpartition(".")[0]) else self.compute


def kept_modules(model: nn.Module, policy: Policy) -> list[tuple[str, nn.Module]]:
    """The outermost modules that compute in FP32 by the policy.

    Raises UsageError where one of them shares a parameter with a module that does not: it cannot be held in two dtypes.
    """
    kept: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in kept)
        if name and not inside and policy.keeps(name):
            kept.append((name, module))
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for outer, module in kept:
        for param in module.parameters():
            others = [name for name in names[id(param)] if not name.startswith(f"{outer}.")]
            if others:
                raise UsageError(f"precision.keep_fp32 = {list(policy.keep_fp32)} keeps {outer}, whose weight is tied to {others[0]}",
                                 "one weight cannot be held in two dtypes",
                                 "keep neither of the two, or a module that holds both")  # fmt: skip
    return kept


def is_head(model: nn.Module, module: nn.Module) -> bool:
    """Whether the module is the model's output layer: what leaves it, logits or the loss, is not rounded again."""
    return hasattr(model, "get_output_embeddings") and module is model.get_output_embeddings()  # type: ignore[operator]


def keep_in_fp32(model: nn.Module, policy: Policy) -> None:
    """Casts what enters the kept modules to FP32 and what leaves them back to the compute dtype."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _cast(args, torch.float32), _cast(kwargs, torch.float32)

    def leave(_: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, policy.compute)

    for _, module in kept_modules(model, policy):
        module.register_forward_pre_hook(enter, with_kwargs=True)
        if not is_head(model, module):
            module.register_forward_hook(leave)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value


class Reason(enum.StrEnum):
    """Why an attempt was skipped. Only non-finite values use up patience."""

    GRADIENTS = "non-finite gradients"
    LOSS = "non-finite loss"
    NO_LABELS = "no label token"


@dataclass(frozen=True)
class Verdict:
    """Sums over all ranks of one window, in FP64. loss: of token losses. squares: of scaled gradient elements. blocks:
    whether scales of blocks have fallen and nothing else is to blame."""

    loss: float
    squares: float
    blocks: bool = False


@dataclass(frozen=True)
class Decision:
    """applied: the optimizer moves. retry: the same window again. norm: unscaled, before the clip (nan if unknown)."""

    applied: bool
    retry: bool
    reason: Reason | None
    norm: float
    factor: float  # what the scaled gradients are multiplied by: unscale and clip in one
    scale: float  # the scale that this attempt used
    scale_after: float
    exhausted: bool  # patience is used up: the run ends as diverged
    blocks: bool = False  # scales of blocks have fallen instead of the window's

    @property
    def still(self) -> bool:
        """Whether no scale has fallen."""
        return self.scale_after >= self.scale and not self.blocks

    def told(self, scaled: bool, fallen: Sequence[str] = ()) -> str:
        """Of a skipped attempt: why it was, and with a scale what became of that. fallen: blocks whose scales fell."""
        moved = f"scale {self.scale:g} -> {self.scale_after:g}"
        if self.blocks:
            more = f" and {len(fallen) - 1} more" if len(fallen) > 1 else ""
            moved = f"scales of blocks fall: {fallen[0]}{more}" if fallen else "scales of blocks fall"
        return f"{self.reason} ({moved})" if scaled else str(self.reason)


@dataclass
class Window:
    """The loss scale and the counters of attempts. All ranks hold the same values always.

    dynamic: the scale moves. scale: 1.0 where it is off. patience: skips in a row that are borne. blocks: scales of blocks
    inside this one, None without any; they move in either mode.
    """

    dynamic: bool
    scale: float
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 1.0
    patience: int = 20
    retry: bool = True
    clip: float | None = None
    blocks: BlockScale | None = None
    attempt: int = 0
    step: int = 0
    skipped: int = 0  # attempts skipped for non-finite values
    empty: int = 0  # windows skipped for want of label tokens
    in_a_row: int = 0  # skips in a row
    good: int = 0  # applied windows since the scale last moved
    losses: int = field(default=0)  # attempts whose loss was non-finite

    _STATE = ("scale", "attempt", "step", "skipped", "empty", "in_a_row", "good", "losses")

    def close(self, verdict: Verdict) -> Decision:
        """One attempt is over: decides, moves the scale, counts."""
        used = self.scale
        self.attempt += 1
        if not math.isfinite(verdict.loss):
            self.losses += 1
            return self._skip(Reason.LOSS, used, retry=False)
        if not math.isfinite(verdict.squares):
            if self.dynamic and not verdict.blocks:
                self.scale = max(used * self.backoff, self.floor)
                self.good = 0
            # At unchanged scales the same window would end the same way.
            retry = self.retry and (verdict.blocks or self.scale != used)
            return self._skip(Reason.GRADIENTS, used, retry, verdict.blocks)
        self.step += 1
        self.in_a_row = 0
        if self.dynamic:
            self.good += 1
            if self.good == self.interval:
                self.good = 0
                grown = used * self.growth
                self.scale = grown if math.isfinite(grown) and grown <= _LARGEST_SCALE else used
        norm = math.sqrt(verdict.squares) / used
        factor = 1.0 / used
        if self.clip is not None and norm > self.clip:
            factor *= self.clip / norm
        return Decision(True, False, None, norm, factor, used, self.scale, False)

    def close_empty(self) -> Decision:
        """A window without any label token: skipped and counted apart, no patience used."""
        self.attempt += 1
        self.empty += 1
        return Decision(False, False, Reason.NO_LABELS, math.nan, 0.0, self.scale, self.scale, False)

    def _skip(self, reason: Reason, used: float, retry: bool, blocks: bool = False) -> Decision:
        self.skipped += 1
        self.in_a_row += 1
        exhausted = self.in_a_row >= self.patience
        return Decision(False, retry, reason, math.nan, 0.0, used, self.scale, exhausted, blocks)

    def state(self) -> dict[str, Any]:
        own = {} if self.blocks is None else {"blocks": self.blocks.state()}
        return {**{key: getattr(self, key) for key in (*self._STATE, "dynamic")}, **own}

    def load(self, state: dict[str, Any]) -> None:
        """The counters of a checkpoint, and its scale where it moved there and moves here; the blocks' where both have some.

        A new run may begin from a checkpoint of another precision: a scale of 1 from there would lose FP16 gradients.
        """
        moves = self.dynamic and bool(state.get("dynamic", True))
        for key in self._STATE:
            if moves or key not in ("scale", "good"):
                setattr(self, key, type(getattr(self, key))(state[key]))
        if self.blocks is not None and "blocks" in state:
            self.blocks.load(state["blocks"])


# Beyond this the scaled loss of one token leaves FP32's range too easily; GradScaler has no bound and reaches inf.
_LARGEST_SCALE = 2.0**60


def scale_mode(mode: str, compute: str, wire: str) -> str:
    """dynamic, static or off. `auto` is dynamic where 16-bit floats with 5 exponent bits compute or travel, else off."""
    if mode == "auto":
        return "dynamic" if "fp16" in (compute, wire) else "off"
    return mode


def outside_fp16(parts: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, float]]:
    """Parameters with a value that FP16 cannot hold, and the largest magnitude of each: inf where it was cast already."""
    found = []
    limit = torch.finfo(torch.float16).max
    for name, tensor in parts:
        if tensor.numel():
            low, high = torch.aminmax(tensor)
            largest = max(abs(low.item()), abs(high.item()))
            if largest > limit and (math.isfinite(largest) or tensor.dtype == torch.float16):
                found.append((name, largest))
    return found
