"""A few steps of the run that a configuration asks for, in one precision, on the ranks that are here, leaving no run behind.

The session and the loop are a run's own; what differs is where its records go (into memory) and that nothing is evaluated,
saved, compiled or rehearsed. All trials of an examination see the same windows, weights, random numbers and rates.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from mpdist import train
from mpdist.assemble import assemble, switches
from mpdist.config.schema import Drill, Scale
from mpdist.dist import on_first
from mpdist.errors import Diverged, DoesNotFit, MpdistError
from mpdist.feed import Batch
from mpdist.outcome import Outcome
from mpdist.precision import Reason
from mpdist.record import RunDir
from mpdist.session import Session
from mpdist.worker import Seat

if TYPE_CHECKING:
    from mpdist import diagnose
    from mpdist.config import Config, Resolved
    from mpdist.world import World

PATIENCE, UNSCALED = 40, 3  # skips in a row, at most: while a scale falls, and where no lower one is to come
_NEVER = 10**9

Around = Callable[["Trial"], AbstractContextManager[None]]


@dataclass
class Told:
    """What a trial has shown, the same on every rank.

    losses, norms, scales: of the applied steps. first: the loss of the first attempt, applied or not. skipped: attempts
    skipped for non-finite values. finding: the last report on one (sentence, rank and facts, see mpdist.diagnose).
    figures: telemetry of the last step. wait_s, step_s: each rank's seconds for data and inside the window, step by step
    without the first, of the slowest rank. error: what ended it early.
    """

    config: Config
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    first: float | None = None
    skipped: int = 0
    finding: dict[str, Any] | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    wait_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    error: MpdistError | None = None

    @property
    def finite(self) -> bool:
        """Whether it came to its end: a falling scale on the way there is no trouble."""
        return self.error is None

    @property
    def diverged(self) -> bool:
        return isinstance(self.error, Diverged)


def like(cfg: Config, **sections: Mapping[str, Any]) -> Config:
    """The configuration with some values of some sections replaced; not checked against the rules between keys."""
    changed = {name: getattr(cfg, name).model_copy(update=dict(values)) for name, values in sections.items()}
    return cfg.model_copy(update=changed)


def prepared(cfg: Config) -> Config:
    """What all trials of a configuration have in common: nothing but the steps themselves."""
    wish = cfg.checkpoint.resume
    off = cfg.track.wandb.model_copy(update={"mode": "disabled"})
    cfg = cfg.model_copy(update={"drill": Drill()})
    return like(
        cfg, data={"eval": ()}, model={"compile": "none"}, track={"every": _NEVER, "replay": "auto", "wandb": off},
        checkpoint={"every": 0, "resume": "never" if wish == "auto" else wish},
        precision={"scale": _patient(cfg.precision.scale)},
    )  # fmt: skip


def baseline(cfg: Config) -> Config:
    """FP32 throughout."""
    plain = {"compute": "fp32", "tf32": False, "master": "fp32", "keep_fp32": (), "scale": _off(cfg)}
    return like(cfg, precision=plain, reduce={"wire": "fp32", "sum": "fp32"})


def computing(cfg: Config, compute: str) -> Config:
    """The baseline with another compute dtype and nothing else; FP16 with the loss scale that is asked for."""
    return like(
        baseline(cfg), precision={"compute": compute, "scale": cfg.precision.scale if compute == "fp16" else _off(cfg)}
    )


def _off(cfg: Config) -> Scale:
    return cfg.precision.scale.model_copy(update={"mode": "off", "per_block": False})


def _patient(scale: Scale) -> Scale:
    return scale.model_copy(update={"patience": min(scale.patience, PATIENCE)})


class _Notes(RunDir):
    """A run directory that is nowhere."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, rank)
        self.findings: list[dict[str, Any]] = []

    def event(
        self, name: str, step: int = 0, attempt: int = 0, rank: int | None = None, reason: str = "", **extra: Any
    ) -> None:
        if name == "finding":
            self.findings.append({"rank": rank, "reason": reason, "step": step, "attempt": attempt, **extra})

    def metrics(self, row: Mapping[str, Any]) -> None:
        pass

    def status(self, **fields: Any) -> dict[str, Any]:
        return {}

    def write_env(self, env: Mapping[str, Any]) -> None:
        pass


class Trial(Session):
    def __init__(self, resolved: Resolved, world: World, steps: int) -> None:
        self.run: _Notes
        seat = Seat(resolved, world)
        seat.run = _Notes(Path(resolved.config.out_dir).expanduser() / ".doctor" / "trial", world.rank)
        super().__init__(resolved, seat)
        self.wanted = steps
        self.told = Told(resolved.config)
        self._times: list[tuple[float, float]] = []
        self._still = 0  # skips in a row that have left the scale where it was

    def build(self) -> None:
        """Collective. As a session's set-up, in the group that is there."""
        switches(self.cfg, self.device)
        self.hf = self.run.path / "hf"
        self.parts = assemble(self.resolved, self.seat.world, self.device, self.say)
        self.parts.steps, self.parts.windows, self.parts.tokens, self.parts.seconds = self.wanted, None, None, None
        self.get_ready("new")
        self.progress = None
        self.measure.due = False
        self.parts.steps += self.parts.window.step  # where it begins with another run's checkpoint

    def log(self, out: Outcome, last: bool) -> None:
        told = self.told
        told.first = out.loss if told.first is None else told.first
        told.losses.append(out.loss)
        told.norms.append(out.decision.norm)
        told.scales.append(out.decision.scale)
        told.figures = self.figures
        self._times.append((self.clock.seconds("data"), self.clock.seconds("train")))

    def skipped(self, out: Outcome, batch: Batch, again: diagnose.Again) -> None:
        self.told.first = out.loss if self.told.first is None else self.told.first
        super().skipped(out, batch, again)
        decision = out.decision
        self._still = self._still + 1 if decision.still else 0
        if self._still >= UNSCALED and decision.reason is not Reason.NO_LABELS:
            raise Diverged(f"{self._still} attempts in a row were skipped, the last for {decision.reason}")

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    def save(self, final: bool = False) -> None:
        pass

    def close_down(self) -> None:
        """Collective. The trial is over, however it ended."""
        told = self.told
        told.finding = on_first(lambda: self.run.findings[-1] if self.run.findings else None)
        if hasattr(self, "parts"):
            told.skipped = self.parts.window.skipped
            self.parts.feed.close()
        pairs = zip(self._times, self._times[1:], strict=False)
        own = torch.tensor([(b[0] - a[0], b[1] - a[1]) for a, b in pairs], dtype=torch.float64).reshape(-1, 2)
        own = own.to(self.device)
        # Whoever waits for data keeps the others waiting inside the window.
        wait, step = own[:, 0].contiguous(), own[:, 1].contiguous()
        dist.all_reduce(wait, op=dist.ReduceOp.MAX)
        dist.all_reduce(step, op=dist.ReduceOp.MIN)
        told.wait_s, told.step_s = wait.tolist(), step.tolist()


def run(resolved: Resolved, cfg: Config, world: World, steps: int, around: Around | None = None) -> Told:
    """Collective. `steps` steps of `cfg`, which is `prepared`; what ended it early is told, not raised.

    around: a context in which the steps are made, given the trial once its model is there. Raises DoesNotFit where the
    device's memory does not suffice: then the ranks are no longer together.
    """
    trial = Trial(replace(resolved, config=cfg), world, steps)
    try:
        trial.build()
        with around(trial) if around is not None else nullcontext():
            train.loop(trial)
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(f"a trial in {cfg.precision.compute} runs out of memory", str(error).splitlines()[0],
                         "lower batch.micro, or set memory.checkpointing: full, for the examination") from error  # fmt: skip
    except MpdistError as error:
        trial.told.error = error
    trial.close_down()
    told = trial.told
    del trial
    gc.collect()  # modules and hooks refer to each other in circles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return told


def modules_of(trial: Trial) -> dict[str, nn.Module]:
    """By name, the whole model left out."""
    return {name: module for name, module in trial.parts.module.named_modules() if name}
