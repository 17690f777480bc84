"""What is wrong with a run's numbers as far as it shows before anything is trained: its labels, and updates that round away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpdist.data import Rows, open_rows
from mpdist.data.command import prepared
from mpdist.dist import on_first
from mpdist.doctor import stuck
from mpdist.errors import MpdistError
from mpdist.findings import Finding
from mpdist.precision import DTYPES

if TYPE_CHECKING:
    from mpdist.config import Config
    from mpdist.doctor.examine import Subject

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
            return [Finding("labels", "the data is not prepared yet: `mpdist prepare` says how many tokens have one")]
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
