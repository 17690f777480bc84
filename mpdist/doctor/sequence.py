"""The debugging sequence of mixed precision, run for real: a few steps each on the configuration's own model and data.

FP32 first, which any reduced precision is judged against and which shows what precision has no part in. Then the compute
dtype reduced and nothing else, BF16 before FP16. Then as configured: 16-bit masters and wires, modules kept in FP32, the
scale. What is not finite is named by its first module (mpdist.diagnose); cures are tried, the smallest first: a scale that
may move, FP32 for the modules that FP16 cannot hold, BF16. What is finite is compared with FP32 over all steps.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpdist import arch, hub, plan
from mpdist.config.rules import scale_mode
from mpdist.config.write import inline
from mpdist.data import open_rows
from mpdist.data.command import from_config
from mpdist.dist import on_first, together
from mpdist.doctor import before, here, stuck, trial
from mpdist.doctor.cures import Cured, keeping, scaling
from mpdist.doctor.extremes import LIMIT, Extremes
from mpdist.doctor.judge import Loss, scale_told, starved
from mpdist.doctor.trial import Told, Trial, baseline, computing, like, prepared
from mpdist.errors import Diverged, MpdistError
from mpdist.findings import Finding, error_of
from mpdist.formats import FORMATS
from mpdist.optim import Optimizer
from mpdist.precision import DTYPES
from mpdist.sweep_first import layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpdist.config import Config
    from mpdist.doctor.examine import Subject

_CHECKS = {"weight": "weights", "parameter": "weights", "forward": "activations", "loss": "loss", "wire": "wire",
           "none": "hardware"}  # fmt: skip


def debug(subject: Subject, steps: int) -> list[Finding]:
    """Collective. The findings, in the order in which one disease would cause the next; the same on every rank."""
    asked = subject.resolved.config
    try:
        together(lambda: hub.settle(asked, weights=subject.world.is_first))
        folder = together(lambda: from_config(asked, lambda _: None)[0])[0]
    except MpdistError as error:
        return [refused("data", error)]
    labels = on_first(lambda: before.judged(open_rows(folder), asked))
    if error_of(labels) is not None:
        return labels
    cfg = fitting(subject)
    if cfg is None:
        why = "FP32, which everything else is judged against, does not fit into the memory of this device"
        do = "start it on more ranks, or with a smaller batch.micro and memory.checkpointing: full"
        return [*labels, Finding("trials", "none", "doubtful", why, do)]
    sequence = Sequence(subject, prepared(cfg), steps)
    sequence.take()
    return [*sequence.found, *labels]


def refused(check: str, error: MpdistError) -> Finding:
    return Finding(check, error.what, "failed", error.why, error.do, status=error.status)


def fitting(subject: Subject) -> Config | None:
    """The configuration with as little memory saved as FP32 needs: what that changes moves no number beyond rounding."""
    asked, world = subject.resolved.config, subject.world
    shape, memory = (
        arch.look(asked.model.path, asked.model.config, asked.model.revision),
        here.memory_of(subject.device),
    )
    full: dict[str, Any] = {"memory": {"checkpointing": "full"}}
    for change in ({}, full, {**full, "batch": {"micro": 1}}):
        cfg = like(asked, **change)
        made = plan.make(baseline(cfg), shape, world.local_ranks, world.nodes, memory, device=subject.device.type)
        if made.foreseen is None or memory is None or made.foreseen[0] <= memory:
            return cfg
    return None


class Sequence:
    """cfg: what all trials begin from. found: what has been found so far, the worst of a level first."""

    def __init__(self, subject: Subject, cfg: Config, steps: int) -> None:
        self.subject, self.cfg, self.steps = subject, cfg, steps
        self.found: list[Finding] = []
        self.runs: list[Finding] = []  # one line a trial
        self.extremes = Extremes()
        self.base = Told(cfg)  # FP32's trial
        self.blocks, self.dropout = layers(cfg)

    def take(self) -> None:
        compute = self.cfg.precision.compute
        self.base = base = self.tried("fp32", baseline(self.cfg), self.extremes.around)
        if not base.finite:
            self.blame(base, "fp32", "precision has no part in it: FP32 fails as well")
        else:
            self.judge_baseline(base)
            stages = {word: self.tried(word, computing(self.cfg, word)) for word in _stages(compute)}
            self.judge_asked(base, stages)
        self.found += self.runs

    def tried(self, name: str, cfg: Config, around: trial.Around | None = None) -> Told:
        """Collective. One trial, and the line about it."""
        told = trial.run(self.subject.resolved, cfg, self.subject.world, self.steps, around)
        self.runs.append(Finding(f"trial {name}", described(told)))
        return told

    # -- what a trial has shown ---------------------------------------------------------------------------------------

    def judge_baseline(self, base: Told) -> None:
        if base.skipped:
            where = base.finding["reason"] if base.finding else ""
            self.found.append(Finding("loss", f"{base.skipped} windows are not finite in FP32", "doubtful", where,
                                      "look at the rows that are named"))  # fmt: skip
        if len(base.losses) > 2 and min(base.losses[-2:]) > 1.2 * base.losses[0] and base.losses[0] > 0:
            why = f"the loss rises from {base.losses[0]:.4g} to {base.losses[-1]:.4g} in FP32, where precision has no part in it"
            self.found.append(Finding("learning rate", f"optim.lr = {self.cfg.optim.lr:g} is too large", "doubtful", why,
                                      "lower optim.lr, or lengthen optim.warmup"))  # fmt: skip

    def judge_asked(self, base: Told, stages: dict[str, Told]) -> None:
        """stages: of the compute dtypes on the way to the one that is asked for; the last is that one."""
        cfg, compute = self.cfg, self.cfg.precision.compute
        same = [told for told in (base, *stages.values()) if _alike(told.config, cfg)]
        masters = _Masters(cfg.optim.lr)
        told = same[0] if same else self.tried("as configured", cfg, masters.around)
        if not told.finite:
            self.blame(told, compute, _since(stages, told), stages)
            return
        if masters.stuck is not None:
            unchanged = told.figures.get("precision/unchanged_master")
            seen = "" if unchanged is None else f"; {unchanged:.0%} of the last update was lost"
            self.found += stuck.judged(masters.stuck, cfg, "failed", seen)
        if compute == "fp16":
            self.found += scale_told(told, base, lambda settings: self.cure(settings, "fp16, another scale"))
            self.found += self.beyond(told)
        loss = Loss(base, self.blocks, self.dropout)
        found = loss.compare("as configured", told, FORMATS[compute].eps)
        if found is not None and not any(f.level == "failed" for f in self.found):
            nearer = next((word for word, stage in stages.items() if stage is not told and stage.finite
                           and loss.compare(word, stage, FORMATS[word].eps) is None), None)  # fmt: skip
            self.found.append(_better(found, nearer, cfg))
        self.found += starved(told)

    def beyond(self, told: Told) -> list[Finding]:
        """FP16 came to its end although FP32 saw more than it can hold: infinities that came to nothing."""
        name, size = self.extremes.largest()
        if size <= LIMIT or told.config.precision.keep_fp32:
            return []
        why = "FP16 ends at 65504: infinities arise there, which the operations after it have turned into numbers"
        return [Finding("activations", f"{name} reaches {size:.3g}", "doubtful", why, "compute in bf16")]

    # -- what is not finite ---------------------------------------------------------------------------------------------

    def blame(self, told: Told, compute: str, since: str, stages: dict[str, Told] | None = None) -> None:
        if not told.diverged:
            assert told.error is not None
            cured = self.cured(told, compute)
            self.found.append(
                _cured(refused("weights" if self.extremes.weights else "model", told.error), cured, stages, self.base)
            )
            return
        finding = told.finding or {}
        kind = finding.get("kind", "unknown")
        place = finding.get("parameter") if kind == "weight" else finding.get("module")
        value = f"not finite in {compute}, first in {place or 'the model'}"
        if finding.get("tensor") and kind not in ("weight", "parameter"):
            value += f" ({finding['tensor']})"
        reason = finding.get("reason", str(told.error))
        found = Finding(
            _CHECKS.get(kind, "gradients"), value, "failed", f"{since}. {reason}", _plain(kind), status=Diverged.status
        )
        self.found.append(_cured(found, self.cured(told, compute), stages, self.base) if stages is not None else found)

    def cured(self, told: Told, compute: str) -> Cured | None:
        """Collective. The first cure that helps, of those that may."""
        kind = (told.finding or {}).get("kind")
        if compute == "fp32":
            return None
        if kind == "wire":
            return self.cure({"reduce.wire": "fp32"}, "wire in fp32")
        if compute == "fp16" and told.diverged and kind not in ("weight", "parameter", "forward", "loss"):
            found = scaling(self.cfg, lambda settings: self.cure(settings, "another scale"))
            if found is not None:
                return found
        return keeping(self.cfg, self.extremes, told, lambda settings: self.cure(settings, "some modules in fp32"))

    def cure(self, settings: dict[str, Any], name: str) -> Cured:
        """Collective. The configuration with these settings, tried."""
        return Cured(settings, self.tried(name, with_settings(self.cfg, settings)))


class _Masters:
    """Before the first step: whether the learning rate can move masters of 16 bit. `stuck` is None where they have 32."""

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.stuck: stuck.Stuck | None = None

    @contextmanager
    def around(self, of: Trial) -> Iterator[None]:
        """Collective."""
        cfg, optimizer = of.cfg, of.parts.optimizer
        if stuck.applies(cfg):
            self.stuck = _looked(optimizer, DTYPES[cfg.precision.compute], self.lr)
        yield


def _looked(optimizer: Optimizer, dtype: torch.dtype, lr: float) -> stuck.Stuck:
    samples = [
        part.tensor.reshape(-1)[:: max(1, part.tensor.numel() // 4096)]
        for part in optimizer.parts
        if part.tensor.numel()
    ]
    own = stuck.look(torch.cat([values.float() for values in samples]), dtype, lr) if samples else None
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    found = [one for one in ranks if one is not None]
    return stuck.Stuck(
        *(sum(values) / len(found) for values in zip(*((one.share, one.median) for one in found), strict=True))
    )


def _stages(compute: str) -> list[str]:
    return {"fp32": [], "bf16": ["bf16"], "fp16": ["bf16", "fp16"]}[compute]


def _alike(one: Config, other: Config) -> bool:
    """Whether two trials are the same: what is off has no values that count."""
    return _numbers(one) == _numbers(other)


def _numbers(cfg: Config) -> tuple[Any, ...]:
    mode, p = scale_mode(cfg), cfg.precision
    scale = (
        ()
        if mode == "off"
        else (mode, p.scale.init)
        if mode == "static"
        else (mode, p.scale.model_dump(exclude={"mode"}))
    )
    own = p.compute == "fp32" or p.master == "fp32"
    return p.compute, p.tf32, own, p.keep_fp32, scale, cfg.reduce.wire, cfg.reduce.wire == "fp32" or cfg.reduce.sum


def with_settings(cfg: Config, settings: dict[str, Any]) -> Config:
    """settings: by dotted names, of sections or of precision.scale."""
    scale = {key.rpartition(".")[2]: value for key, value in settings.items() if key.startswith("precision.scale.")}
    if scale:
        cfg = like(cfg, precision={"scale": cfg.precision.scale.model_copy(update=scale)})
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if "." not in name:
            cfg = like(cfg, **{section: {name: tuple(value) if isinstance(value, list) else value}})
    return cfg


# -- words ------------------------------------------------------------------------------------------------------------


def described(told: Told) -> str:
    text = f"{len(told.losses)} steps"
    if told.losses:
        text += f", loss {told.losses[0]:.4f} -> {told.losses[-1]:.4f}, gradient norm {told.norms[0]:.3g} -> {told.norms[-1]:.3g}"
    if told.skipped:
        text += f", {told.skipped} attempts skipped"
    if told.scales and (told.scales[-1] != 1.0 or told.skipped):
        text += f", scale {told.scales[-1]:g}"
    if not told.finite:
        text += ", then it diverged" if told.diverged else f"; refused: {told.error.what if told.error else ''}"
    return text


def _since(stages: dict[str, Told], told: Told) -> str:
    """Where on the way from FP32 it began."""
    first = next((word for word, stage in stages.items() if not stage.finite), None)
    if first is None:
        return "FP32 and the compute dtype alone are finite, so it is the other settings of precision and reduce"
    others = [word for word, stage in stages.items() if stage.finite]
    fine = " and ".join(["FP32", *(word.upper() for word in others)])
    return f"{fine} {'is' if fine == 'FP32' else 'are'} finite from the same weights on the same rows"


def _plain(kind: str) -> str:
    """What to do about a trouble that no precision cures."""
    if kind == "weight":
        return "load another copy of the model: this one is damaged, or was saved by a run that had diverged"
    if kind == "loss":
        return "look at the rows that are named, and at the labels that they have"
    return "look at the rows and the module that are named: a mask without any open place, a division, an exponential; then optim.lr"


def _cured(found: Finding, cured: Cured | None, stages: dict[str, Told] | None, base: Told) -> Finding:
    """The finding with what has been tried. base: FP32's trial."""
    other = (stages or {}).get("bf16")
    wider = other is not None and other.finite and "fp16" in (stages or {})
    if wider and other is not None and cured is not None and not _as_fp32(cured, base):
        do = f"precision.compute: bf16, which has FP32's range: tried, {described(other)}; {said(cured.settings)} came to its"
        do += f" end too, but not as FP32 does: {described(cured.told)}"
        return replace(found, value=cured.value or found.value, do=do, settings={"precision.compute": "bf16"})
    if cured is not None:
        do = f"{said(cured.settings)}: tried, {described(cured.told)}"
        do += f"; or precision.compute: bf16 ({described(other)})" if wider and other is not None else ""
        return replace(
            found, check=cured.check or found.check, value=cured.value or found.value, do=do, settings=cured.settings
        )
    if wider and other is not None:
        do = f"precision.compute: bf16, which has FP32's range: tried, {described(other)}"
        return replace(found, do=do, settings={"precision.compute": "bf16"})
    if stages:
        return replace(found, do="precision.compute: fp32", settings={"precision.compute": "fp32"})
    return found


def _as_fp32(cured: Cured, base: Told) -> bool:
    return "precision.keep_fp32" not in cured.settings or cured.sound(base)


def _better(found: Finding, nearer: str | None, cfg: Config) -> Finding:
    if cfg.precision.master == "compute":
        return replace(found, do="precision.master: fp32", settings={"precision.master": "fp32"})
    if cfg.reduce.wire != "fp32" and nearer == cfg.precision.compute:
        return replace(found, do="reduce.wire: fp32", settings={"reduce.wire": "fp32"})
    if nearer is not None and nearer != cfg.precision.compute:
        return replace(found, do=f"precision.compute: {nearer}", settings={"precision.compute": nearer})
    return found


def said(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {inline(value)}" for key, value in settings.items())
