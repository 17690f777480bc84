"""The training loop, top to bottom: windows in, steps out, every decision the same on all ranks.

A window is attempted: label tokens are known beforehand (the data's index holds them), each micro-batch runs forward
and backward under the window's one scale, gradients are summed over ranks by the engine. Then one exchange of a few
numbers, the only point at which the host waits for the device, gives the verdict. Skip, schedule, logs and stop all
follow from it.
"""

from __future__ import annotations

import hashlib
import math
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mpdist.feed import Batch
from mpdist.optim import square_sum
from mpdist.outcome import Outcome
from mpdist.precision import Verdict
from mpdist.probe import naming_the_uncertain
from mpdist.session import Session

if TYPE_CHECKING:
    from mpdist.config import Resolved
    from mpdist.trace import Trace
    from mpdist.worker import Seat


def run(resolved: Resolved, seat: Seat) -> int:
    """The exit status of one session on this rank. Raises MpdistError for every ending that is not done or preempted."""
    session = Session(resolved, seat)
    if not session.set_up():
        return 0
    return session.preempted() if loop(session) else session.finished()


@naming_the_uncertain()
def loop(s: Session) -> bool:
    """Windows until the budget is spent; whether a stop was asked for before that."""
    window, clock, cfg = s.parts.window, s.clock, s.cfg
    batch: Batch | None = None
    while not is_done(s):
        with clock("data"):
            if batch is None or batch.number != s.count.window:
                s.seat.doing("data")
                batch = s.parts.feed.get(s.count.window)
        s.seat.at(window.step, window.attempt + 1, "compile" if s.compiling else "train")
        if s.drill:
            s.drill.strike(window.attempt + 1)
        before = clock.seconds("train")
        with s.measure.window(batch.tensors()), clock("compile" if s.compiling else "train"):
            out = attempt(s, batch)
        s.compiling = False
        s.saver.step_took(clock.seconds("train") - before)
        if out.decision.applied:
            s.count.label_tokens += batch.labels
            s.count.tokens += batch.tokens
            s.count.slots += batch.slots
        if not out.decision.retry:
            s.count.window += 1
        s.passed += 1
        s.passed_tokens += batch.tokens
        if (
            s.passed == 1 and s.saved_step is None and s.first
        ):  # before any update: what the arms of a sweep have in common
            s.run.status(first={"loss": out.loss, "label_tokens": batch.labels})
        last = is_done(s, out)
        if out.save_failed:
            s.reap()
        if out.decision.applied:
            s.log(out, last)
        else:
            s.skipped(out, batch, partial(micros, s, batch, window.attempt))
            s.parts.engine.clear()
        if out.decision.applied and s.evaluates(last):
            s.evaluate()
        if out.decision.applied and (last or (cfg.checkpoint.every and window.step % cfg.checkpoint.every == 0)):
            s.save()
        if out.stop and not last:
            return True
    return False


def attempt(s: Session, batch: Batch) -> Outcome:
    """One window: forward, backward and reduction of its micro-batches, the verdict, and the step if it is applied."""
    parts, window, engine = s.parts, s.parts.window, s.parts.engine
    if batch.labels == 0:
        return Outcome(window.close_empty(), math.nan, 0.0, agreed_stop(s), 0.0)
    number, coming = window.attempt + 1, window.step + 1
    s.telemetry.begin(coming % s.cfg.track.every == 0 or coming == parts.steps)
    blocks = window.blocks
    loss, auxiliary = micros(s, batch, number, window.scale)
    if s.reach is not None:
        s.reach.check()
        s.reach = None

    gradients = engine.gradients()
    scales = None if blocks is None else blocks.of_parts()
    fault = None if blocks is None else blocks.close(gradients)
    found = exchange(s, square_sum(gradients, scales), loss, auxiliary, fault)
    squares, total, aux, stop, seconds, failed, *fell = found
    decision = window.close(Verdict(total, squares, sum(fell) > 0))
    s.telemetry.look(
        gradients, decision.scale if scales is None else scales.double() * decision.scale, decision.applied
    )
    if decision.applied:
        if blocks is not None:
            blocks.unscale(gradients, decision.factor)
        elif decision.factor != 1.0:
            torch._foreach_mul_(gradients, decision.factor)
        s.telemetry.hold()
        parts.optimizer.step(gradients, parts.lr(window.step))
        s.figures = s.telemetry.read()
        if blocks is not None and s.figures:
            s.figures |= blocks.figures()
        engine.refresh()
        if s.measure.due:
            s.write_ledger(gradients)
    s.wire_bytes = parts.wire.bytes.take()
    if decision.applied:
        engine.clear()  # else `skipped` may look at them first
    return Outcome(decision, total / batch.labels, aux, stop > 0, seconds, loss, failed > 0)


def micros(
    s: Session, batch: Batch, number: int, scale: float, trace: Trace | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective. A window's micro-batches, forward, backward and reduction, under one scale: (this rank's sum of token
    losses, its auxiliary loss), FP64. trace: of a window that is computed again; rehearsed faults strike again too."""
    parts, engine, blocks = s.parts, s.parts.engine, s.parts.window.blocks
    seed_window(s, batch.number)
    if blocks is not None:
        blocks.begin(again=trace is not None)
    factor = torch.full((), scale / batch.labels, dtype=torch.float32, device=s.device)
    loss = torch.zeros((), dtype=torch.float64, device=s.device)
    auxiliary = torch.zeros_like(loss)
    poison = bool(s.drill) and s.drill.nan_loss(number)
    count = len(batch.micros)
    for i, micro in enumerate(batch.micros):
        s.seat.beat()
        if trace is not None:
            trace.micro(i)
        engine.micro(first=i == 0, last=i == count - 1)
        objective, micro_loss, extra = parts.module(
            input_ids=micro.input_ids,
            position_ids=micro.position_ids,
            index=micro.index,
            targets=micro.targets,
            factor=factor,
        )
        if extra is not None:  # a router's loss enters with the micro-batch's share of the window's label tokens
            share = micro.labels / batch.labels
            objective = objective + extra * (share * scale)
            auxiliary += extra.detach() * share
        if poison:
            objective, micro_loss = objective * math.nan, micro_loss * math.nan
        if s.reach is not None:
            s.reach.look(objective)
            if blocks is not None:
                blocks.look(objective, engine.leaves())
        if trace is not None:
            trace.forwarded(objective, micro_loss)
        s.measure.forwarded()
        if s.drill and s.drill.overflow(number, i + 1):
            engine.poison()
        objective.backward()
        engine.after_backward(last=i == count - 1)
        loss += micro_loss
    return loss, auxiliary


def exchange(
    s: Session, squares: torch.Tensor, loss: torch.Tensor, auxiliary: torch.Tensor, fault: torch.Tensor | None
) -> list[float]:
    """The window's one control exchange and one host wait: sums over ranks of what every decision needs. fault: whether
    blocks' scales have fallen, None where they have none."""
    spent = s.clock.seconds("train") if s.first else 0.0
    mine = [float(s.seat.asked_to_stop is not None), spent, float(s.saver.failed)]
    own = torch.tensor(mine, dtype=torch.float64, device=s.device)
    more = [] if fault is None else [fault[None].double()]
    control = torch.cat([torch.stack([squares.to(s.device) / s.parts.engine.replicas, loss, auxiliary]), own, *more])
    if s.seat.world.ranks > 1:
        dist.all_reduce(control)
    return control.tolist()


def agreed_stop(s: Session) -> bool:
    vote = torch.tensor(float(s.seat.asked_to_stop is not None), device=s.device)
    dist.all_reduce(vote)
    return bool(vote.item() > 0)


def seed_window(s: Session, number: int) -> None:
    """Dropout is a function of (seed, window, rank): a retried window sees the same masks, a resumed one too."""
    text = f"{s.cfg.seed}/{number}/{s.rank}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    torch.default_generator.manual_seed(seed)
    if s.device.type == "cuda":
        torch.cuda.default_generators[s.device.index].manual_seed(seed)


def is_done(s: Session, out: Outcome | None = None) -> bool:
    """Whether the budget is spent. The same on all ranks: counters, and rank 0's clock as exchanged."""
    parts, count = s.parts, s.count
    if out is not None:
        s.seconds = max(s.seconds, out.seconds)
    if parts.steps is not None:
        return parts.window.step >= parts.steps
    if parts.windows is not None:
        return count.window >= parts.windows
    if parts.tokens is not None:
        return count.tokens >= parts.tokens
    assert parts.seconds is not None
    return s.seconds >= parts.seconds
