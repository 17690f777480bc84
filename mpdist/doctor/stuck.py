"""Whether a learning rate can move 16-bit masters at all.

Adam moves a weight by about the learning rate a step. Beside a weight w the numbers of a format lie about |w| x eps apart
(mpdist.formats), and what is less than half of that rounds back to w: with every weight so, training stands still and
says nothing (see `mpdist numerics lab`, the regimes without an FP32 master).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpdist import arch, hub
from mpdist.findings import Finding
from mpdist.formats import FORMATS

if TYPE_CHECKING:
    from mpdist.config import Config

_SHARE = 0.5  # of the weights: from here on training is another thing than what was asked for
_SAMPLE, _TENSORS = 4096, 64
_SPREAD = 0.02  # of random weights, where a model's own configuration does not say


@dataclass(frozen=True)
class Stuck:
    """share: of the weights looked at, those that an update of `lr` leaves as they are. median: of their magnitudes."""

    share: float
    median: float


def look(values: Tensor, dtype: torch.dtype, lr: float) -> Stuck:
    """values: weights in any floating dtype, at least one."""
    held = values.reshape(-1).to(dtype)
    wide = held.float()
    same = ((wide + lr).to(dtype) == held) & ((wide - lr).to(dtype) == held)
    return Stuck(same.float().mean().item(), wide.abs().median().item())


def judged(found: Stuck, cfg: Config, level: str, seen: str = "") -> list[Finding]:
    """seen: what a trial has shown beside it."""
    if found.share <= _SHARE:
        return []
    word, lr = cfg.precision.compute, cfg.optim.lr
    half = found.median * FORMATS[word].eps / 2
    value = f"optim.lr = {lr:g} cannot move {found.share:.0%} of the {word} weights{seen}"
    why = (
        f"precision.master = compute: beside the median weight, {found.median:.3g}, the numbers of {word} lie up to "
        f"{2 * half:.2g} apart, so an update below about {half:.2g} rounds back to where it began"
    )
    do = "precision.master: fp32, which keeps what an update adds; or a learning rate well above that"
    return [Finding("learning rate", value, "doubtful" if level == "doubtful" else "failed", why, do, status=2,
                    settings={"precision.master": "fp32"})]  # fmt: skip


def applies(cfg: Config) -> bool:
    return cfg.precision.master == "compute" and cfg.precision.compute != "fp32" and cfg.optim.lr > 0


def sample(cfg: Config) -> Tensor | None:
    """Some of the weights that a run would begin with, FP32; None where they are not here, or a checkpoint's are taken."""
    if cfg.model.config is not None and cfg.checkpoint.resume in ("auto", "never"):
        spread = cfg.model.config.get("initializer_range", _SPREAD)
        return torch.randn(_SAMPLE, generator=torch.Generator().manual_seed(0)) * float(spread)
    found = files(cfg)
    return _of_files(found) if found is not None else None


def files(cfg: Config) -> list[Path] | None:
    """Of the weights that a run would begin with; None where they are not here, or others are taken."""
    if cfg.checkpoint.resume not in ("auto", "never") or cfg.model.path is None:
        return None
    need = hub.Need("model.path", "model", cfg.model.path, cfg.model.revision)
    folder = need.folder if hub.is_hub_id(need.name) else Path(need.name)
    if folder is None or not folder.is_dir() or arch.look(cfg.model.path, None, cfg.model.revision) is None:
        return None
    return sorted(folder.glob("*.safetensors"))


def _of_files(files: list[Path]) -> Tensor | None:
    """The beginning of matrices, evenly over all files."""
    from safetensors import SafetensorError, safe_open

    found: list[Tensor] = []
    for file in files[:: max(1, len(files) // 8)]:
        try:
            with safe_open(file, framework="pt") as opened:
                names = [name for name in opened.keys() if len(opened.get_slice(name).get_shape()) > 1]  # noqa: SIM118
                for name in names[:: max(1, len(names) // _TENSORS)]:
                    rows: Any = opened.get_slice(name)
                    found.append(rows[: max(1, _SAMPLE // max(1, rows.get_shape()[1]))].reshape(-1)[:_SAMPLE].float())
        except (SafetensorError, OSError, json.JSONDecodeError):
            return None  # loading the model says what is wrong with it
    return torch.cat(found) if found else None
