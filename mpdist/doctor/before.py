"""What is wrong with a run's numbers as far as it shows before anything is trained: its labels,
weights that are not finite, and updates that round away."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open

from mpdist.data import Rows, open_rows
from mpdist.data.command import prepared
from mpdist.dist import on_first
from mpdist.doctor import stuck
from mpdist.errors import Diverged, MpdistError
from mpdist.findings import Finding
from mpdist.precision import DTYPES
from mpdist.trace import magnitude
from mpdist.units import format_bytes

if TYPE_CHECKING:
    from mpdist.config import Config
    from mpdist.doctor.examine import Subject

_LOOKED_AT = 2 * 2**30  # bytes of weights: seconds, even from a slow disk
_FEW = 0.5  # of the rows: a run on data of which more give nothing to learn is hardly what was meant


def labels(subject: Subject) -> list[Finding]:
    """Of data that is prepared already: preparing takes its time."""
    cfg = subject.resolved.config

    def look() -> list[Finding]:
        try:
            folder = prepared(cfg)
        except MpdistError:  # what is missing has a finding of its own
            folder = None
        if folder is None:
            return [Finding("labels", "not looked at: the data is not prepared yet", "doubtful",
                            "rows without a label teach nothing, and how many there are shows in prepared data alone",
                            "`mpdist prepare CONFIG`, then this again; or mpdist doctor CONFIG --debug, which prepares it")]  # fmt: skip
        return judged(open_rows(folder), cfg)

    return on_first(look)


def judged(rows: Rows, cfg: Config) -> list[Finding]:
    counts = rows.label_counts
    tokens, count = int(rows.token_counts.sum()), int(counts.sum())
    empty = float(np.mean(counts == 0))
    value = f"{count:,} of {tokens:,} tokens have one, {empty:.0%} of the rows have none"
    if empty <= _FEW:
        return [Finding("labels", value)]
    source = max(rows.report["sources"], key=lambda report: report["unlabelled"])
    why = (
        f"a row without a label teaches nothing and takes its time; most are of {source['path']}: "
        f"{source['unlabelled']:,} of {source['kept']:,} records have none, {source['truncated']:,} were truncated"
    )
    do = f"look at data.loss_on = {cfg.data.loss_on}, the chat template or the fields' names, and data.too_long"
    return [Finding("labels", value, "failed" if not count else "doubtful", why, do, status=2)]


def weights(subject: Subject) -> list[Finding]:
    """Non-finite values in a local model's files, tensor by tensor."""
    cfg = subject.resolved.config
    return on_first(lambda: finite(stuck.files(cfg), _LOOKED_AT))


def finite(files: Sequence[Path] | None, most: int) -> list[Finding]:
    """files: safetensors; None where none are loaded. most: bytes after which no other tensor is read."""
    bad, seen, size, left = list[str](), 0, 0, 0
    for file in files or ():
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if size >= most:
                        left += 1
                        continue
                    tensor = opened.get_tensor(name)
                    seen, size = seen + 1, size + tensor.nbytes
                    if (
                        tensor.is_floating_point()
                        and tensor.element_size() > 1
                        and not math.isfinite(magnitude(tensor))
                    ):
                        bad.append(f"{name} in {file.name}")
        except (SafetensorError, OSError, ValueError):
            return []  # loading the model says what is wrong with it
    if bad:
        whose = f"{bad[0]} and {len(bad) - 1} more hold" if len(bad) > 1 else f"{bad[0]} holds"
        do = "load another copy of the model: this one is damaged, or was saved by a run that had diverged"
        return [Finding("weights", f"{whose} non-finite values", "failed", "a loss that meets them is not finite", do,
                        status=Diverged.status)]  # fmt: skip
    if not seen:
        why, do = "a file of another format may run what is in it", "mpdist doctor CONFIG --debug loads the model"
        return [] if files is None else [Finding("weights", "not looked at: no safetensors file", "doubtful", why, do)]
    rest = f"; {left} more were not looked at (use --debug)" if left else ""
    return [Finding("weights", f"{seen} tensors, {format_bytes(size)}, are finite{rest}")]


def learning_rate(subject: Subject) -> list[Finding]:
    """Whether `optim.lr` can move masters of 16 bit."""
    cfg = subject.resolved.config
    if not stuck.applies(cfg):
        return []

    def look() -> list[Finding]:
        weights = stuck.sample(cfg)
        if weights is None:
            return []
        found = stuck.look(weights, DTYPES[cfg.precision.compute], cfg.optim.lr)
        return stuck.judged(found, cfg, "doubtful") or [Finding("learning rate", "it moves the weights of 16 bit")]

    return on_first(look)
