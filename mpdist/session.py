"""One session of a run on this rank: what is set up before the loop, what follows each attempt, and how it ends.

The loop itself is in mpdist.train; it calls the methods here in the order in which they stand.
"""

from __future__ import annotations

import math
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpdist import cause, diagnose, fingerprint, ledger, preflight, restore, resume, shelf, slurm, space, watch
from mpdist.assemble import assemble, policy_of, save_hf, switches, worlds_plan
from mpdist.busy import Busy, settle
from mpdist.clock import Clock, Rate
from mpdist.config import leaves
from mpdist.devices import mfu
from mpdist.dist import on_first, pick_device, same_everywhere, start, stop
from mpdist.drill import Drill
from mpdist.env import environment
from mpdist.errors import CheckpointError, Preempted
from mpdist.evaluation import mean_loss
from mpdist.feed import Batch
from mpdist.outcome import Outcome, Progressed
from mpdist.precision import Decision, Reason
from mpdist.record import STOP, moved, open_run, read_metrics, standing
from mpdist.saver import Saver
from mpdist.scale import best_static, events, health_of
from mpdist.telemetry import Telemetry, by_name
from mpdist.track import Progress, Tracker

if TYPE_CHECKING:
    from mpdist.config import Resolved
    from mpdist.plan import Plan
    from mpdist.worker import Seat


_NAMED = 8  # blocks, in the event of a skip
_OWN_KEYS = ("launch.address", "launch.port", "out_dir")  # what each node may name in its own way


class Session:
    """State of one session. All ranks hold the same counters; `first` is rank 0, which alone writes and prints."""

    def __init__(self, resolved: Resolved, seat: Seat) -> None:
        self.cfg, self.resolved, self.seat, self.run = resolved.config, resolved, seat, seat.run
        self.rank, self.first = seat.world.rank, seat.world.is_first
        self.clock = Clock()
        self.count = Progressed()
        self.device = pick_device(seat.world, self.cfg.launch.device)

    # -- set-up -----------------------------------------------------------------------------------------------

    def set_up(self) -> bool:
        """Collective. Joins the group and the run directory, builds, loads. False where the run was finished before."""
        cfg, seat = self.cfg, self.seat
        switches(cfg, self.device)
        start(seat.world, self.device, timedelta(seconds=cfg.launch.timeout))
        # A node that was started with another override, or has another version installed, must not take part unseen.
        same_everywhere({k: v for k, v in leaves(self.resolved.values()) if k not in _OWN_KEYS}, "settings")
        same_everywhere(environment()["versions"], "versions")
        planned = worlds_plan(self.resolved, seat.world, self.device)
        self.ledger_plan = planned.ledger()
        session, mode = on_first(lambda: self.open_directory(planned))
        if mode == "finished":
            if self.first:
                print(f"{self.run.path} is finished: nothing to do")
            return False
        seat.take(session)
        self.clock.backdate(self.run.began)
        if seat.world.ranks > 1:
            preflight.before(self.resolved, planned, seat, self.device, self.say)
        seat.doing("load")
        with self.clock("load"):
            self.parts = assemble(self.resolved, seat.world, self.device, self.say)
        self.hf = self.run.path / "hf"
        on_first(lambda: save_hf(self.hf, self.parts, cfg))
        self.get_ready(mode)
        return True

    def get_ready(self, mode: str) -> None:
        """Collective. All that follows the attempts, and what is gone on from."""
        cfg = self.cfg
        self.seconds, self.passed, self.passed_tokens = 0.0, 0, 0
        self.wire_bytes = (0, 0)  # of the last attempt: within nodes, between nodes
        self.evaluated: tuple[int, float] | None = None  # step and loss of the last evaluation
        self.saved_step: int | None = None  # of the newest checkpoint in this run's directory
        self.saved_attempt = 0  # of the newest save, whatever became of it
        self.compiling = cfg.model.compile != "none"
        # DeepSpeed fetches ahead from its third forward on.
        self.measure = ledger.Measure(
            self.parts.engine, self.parts.optimizer, self.rank,
            at=3 if (cfg.shard.engine, cfg.shard.stage) == ("deepspeed", 3) else 1,
            followed=self.device.type == "cpu" and not self.compiling,
        )  # fmt: skip
        self.telemetry = Telemetry(
            self.parts.optimizer, self.parts.wire, compute=policy_of(cfg).parameter_dtype, device=self.device,
            replicas=self.parts.engine.replicas, scaled=self.parts.facts["scale"]["mode"] != "off",
        )  # fmt: skip
        self.parts.facts["layers"] = self.telemetry.layers
        self.figures: dict[str, Any] = {}
        self.health = health_of(self.parts.facts["scale"], self.run.path) if self.first else None
        self.reach: diagnose.Reach | None = diagnose.Reach(self.parts.engine)
        self.say_found = cause.Once(self.say)
        self.ration = diagnose.Ration(always=cfg.track.replay == "always")
        with self.clock("load"):
            self.resume(mode)
            if self.saved_step is None:  # it begins here, if only from another run's checkpoint
                self.parts.facts |= fingerprint.facts(self.parts.engine, self.parts.feed)
            self.parts.optimizer.allocate()
        faults = cfg.drill.model_dump(exclude_none=True)
        self.drill = Drill(faults, self.rank, self.count.fired, self.drilled)
        wandb = cfg.track.wandb
        self.tracker = Tracker(wandb.mode, wandb.project, cfg.name, self.run.path, group=wandb.group,
                               config=self.resolved.values(), rank=self.rank, warn=self.warn)  # fmt: skip
        self.progress = self.progress_shown() if self.first else None
        self.rate, self.busy, self.versions = Rate(self.clock), Busy(self.device), environment()["versions"]
        on_first(lambda: shelf.clear(self.run.checkpoints))  # a kill may have left a save half-done
        self.saver = Saver(
            self.run.checkpoints, background=cfg.checkpoint.background, hf=self.hf, published=self.published,
            written=lambda step: self.run.event("save", step, self.saved_attempt, reason="written"),
        )  # fmt: skip
        self.run.made_room = self.saver.settled  # a save that does not fit fills the disk until it gives up
        if self.first:
            world = self.seat.world
            digests = {"config_digest": self.resolved.digest(), "number_digest": self.resolved.number_digest()}
            self.run.write_env({**environment([self.parts.facts["device"]]), **self.parts.facts, **digests,
                                "ranks": world.ranks, "nodes": world.nodes})  # fmt: skip
            self.run.status(state="running", step=self.parts.window.step, attempt=self.parts.window.attempt)
            self.run.event("start", self.parts.window.step, self.parts.window.attempt, reason=mode)

    def progress_shown(self) -> Progress:
        parts = self.parts
        likely = parts.horizon if parts.tokens and self.cfg.optim.horizon == "auto" else None
        total = parts.steps or parts.windows or likely
        return Progress(total, start=parts.window.step, about=parts.steps is None)

    def open_directory(self, plan: Plan) -> tuple[int, str]:
        """Rank 0: (session, mode). Under a launcher the directory is open already and the session known."""
        values, given = plan.to_json(), self.seat.given_session
        if given is None and standing(self.resolved, values)[1] != "finished":  # a launcher has looked itself
            warning = space.check(self.resolved, plan.saves)
            if warning is not None:
                print(f"warning: {warning}", flush=True)
        opened, mode = open_run(self.resolved, values)
        if mode != "finished":
            self.run = self.seat.run = opened
            if given is not None:
                opened.join(given)
            else:
                opened.start_session({"ranks": plan.asked.ranks, "nodes": plan.asked.nodes})
        return opened.session, mode

    def say(self, text: str) -> None:
        if self.first:
            progress: Progress | None = getattr(self, "progress", None)
            if progress is None:
                print(text, flush=True)
            else:  # its live line has to make way
                progress.say(text)

    def warn(self, text: str) -> None:
        if self.first:
            self.run.event("warning", self.parts.window.step, self.parts.window.attempt, reason=text)
            self.say(f"warning: {text}")

    def drilled(self, name: str, number: int, rank: int) -> None:
        self.run.event("drill", self.parts.window.step, number, rank, reason=name)

    def resume(self, mode: str) -> None:
        """Collective. Loads the newest whole checkpoint of the run, or the one that a new run starts from."""
        found = resume.find(self.resolved, self.run, mode, self.refused)
        self.count.fired = on_first(lambda: resume.fired_before(self.run))
        self.damaged = on_first(lambda: shelf.damaged(self.run.events_path))
        if found is None:
            if self.first and mode == "resume":  # it ended before its first checkpoint: all that it did is superseded
                status = self.run.previous
                self.clock.resume(None, status.get("time"), status.get("time_at"), self.run.last_alive)
            return
        parts, state = self.parts, found.state
        own = found.path.parent == self.run.checkpoints
        if own:
            resume.check_data(found, parts.facts["data"])
        own_rng = restore.load(found, parts.engine, parts.optimizer, parts.module)
        parts.window.load(state["window_state"])
        self.telemetry.load(state.get("telemetry") if own else None)
        self.count = Progressed(**{**state["count"], "fired": self.count.fired})
        if own:
            self.saved_step = found.step
            self.damaged.discard(found.path.name)  # somebody has put its files back
        self.seconds = state["clock"].get("train", 0.0)
        if self.first:
            status = self.run.previous  # by now the launcher may have written a new one
            self.clock.resume(state["clock"], status.get("time"), status.get("time_at"), self.run.last_alive,
                              superseded=(status.get("step") or 0) > found.step or status.get("state") == "running")  # fmt: skip
            where = (parts.window.step, parts.window.attempt)
            self.run.event("load", *where, reason=str(found.path))
            note = (
                ""
                if own_rng
                else "; another number of ranks, so random number generators start anew by (seed, window, rank)"
            )
            world = self.seat.world
            changes = moved(self.run.changes, state, world.ranks, world.nodes)
            self.run.event("resume", *where, reason=f"from {found.path.name}{note}", changes=changes)
            self.say(f"resumed from {found.path.name}{resume.told(state, world, changes)}{note}")

    def refused(self, name: str, fault: str) -> None:
        if self.first:
            self.run.event("refused", reason=fault, checkpoint=name, file=fault.split()[0])
            print(f"warning: checkpoint {name} is passed over: {fault}", flush=True)

    # -- what follows an attempt --------------------------------------------------------------------------------

    def watch_scale(self, decision: Decision) -> None:
        """After each attempt whose gradients were judged: faults of the scale, each told once in a run."""
        window = self.parts.window
        if self.health is None or decision.reason not in (None, Reason.GRADIENTS):
            return
        self.health.headroom = self.figures.get("precision/headroom_overflow", self.health.headroom)
        overflow = decision.reason is Reason.GRADIENTS and not decision.blocks
        for found in self.health.attempt(
            window.attempt, window.step, window.skipped, decision.scale, decision.scale_after, overflow
        ):
            text = f"{found.check}: {found.value}; {found.why}. {found.do}"
            self.run.event("warning", window.step, window.attempt, reason=text, check=found.check)
            self.say(f"warning: {text}")

    def log(self, out: Outcome, last: bool) -> None:
        window, count, decision = self.parts.window, self.count, out.decision
        self.watch_scale(decision)
        if self.first and decision.scale_after != decision.scale:
            self.run.event("scale", window.step, window.attempt, scale=decision.scale_after, before=decision.scale)
        logged = last or window.step % self.cfg.track.every == 0
        if self.progress is not None and not logged:
            self.progress.tick(window.step)
        if not (logged or self.rate.wants(self.passed)):
            return
        with self.clock("train"):  # the rest of the step that the host has run ahead of
            settle(self.device)
        speed = self.rate.mark(self.passed, self.passed_tokens)
        if not logged or not self.first:
            return
        allocated, reserved = ledger.peak_bytes()
        row: dict[str, Any] = {
            "kind": "train", "step": window.step, "attempt": window.attempt,
            "train/loss": out.loss, "train/lr": self.parts.lr(window.step), "train/grad_norm": out.decision.norm,
            "train/label_tokens": count.label_tokens, "train/tokens": count.tokens, "train/slots": count.slots,
            "scale/value": out.decision.scale, "scale/skipped": window.skipped,
            "wire/grad_bytes": sum(self.wire_bytes), "wire/grad_bytes_between_nodes": self.wire_bytes[1],
            "mem/peak_allocated_bytes": allocated, "mem/peak_reserved_bytes": reserved, **self.clock.metrics(),
            **self.figures,
        }  # fmt: skip
        if (busy := self.busy.read()) is not None:
            row["speed/device_busy"] = busy
        if out.auxiliary:
            row["train/aux_loss"] = out.auxiliary
        if speed is not None and speed.tokens_per_s is not None:
            row |= {"speed/step_s": speed.step_s, "speed/tokens_per_s": speed.tokens_per_s}
            if self.parts.flops and self.parts.peak_flops:
                row["speed/mfu"] = mfu(
                    self.parts.flops, speed.tokens_per_s, self.seat.world.ranks, self.parts.peak_flops
                )
        self.write(row)
        self.run.status(state="running", step=window.step, attempt=window.attempt, time=self.clock.table())

    def write(self, row: dict[str, Any]) -> None:
        self.run.metrics(row)
        self.tracker.log(by_name(row, self.telemetry.layers))
        if self.progress is not None:
            self.progress.row(row)

    def skipped(self, out: Outcome, batch: Batch, again: diagnose.Again) -> None:
        """Collective where the ration says so: the cause is looked for on all ranks. again: see mpdist.diagnose."""
        window, decision = self.parts.window, out.decision
        assert decision.reason is not None
        scaled = self.parts.facts["scale"]["mode"] != "off"
        self.watch_scale(decision)
        if self.first:
            blocks = window.blocks if decision.reason is Reason.GRADIENTS else None
            fallen = blocks.fallen() if blocks is not None else []
            kept = decision.retry or decision.exhausted or decision.reason is Reason.NO_LABELS
            lost = 0 if kept else batch.rows
            more: dict[str, Any] = {k: v for k, v in (("blocks", fallen[:_NAMED]), ("passed_over", lost)) if v}
            self.run.event("skip", window.step, window.attempt, reason=str(decision.reason), loss=out.loss,
                           scale=decision.scale, scale_after=decision.scale_after, window=batch.number, **more)  # fmt: skip
            over = f"; its {lost} row{'s are' if lost > 1 else ' is'} passed over" if lost else ""
            self.say(f"attempt {window.attempt} skipped: {decision.told(scaled, fallen)}{over}")
        if decision.reason is Reason.NO_LABELS:
            self.warn(f"window {batch.number} has no label token; it is skipped and counted")
            return
        if not self.ration.due(decision, window.in_a_row):
            return
        self.seat.doing("replay")
        lowest = window.floor if window.dynamic else 1.0
        attempt = cause.Attempt(
            batch, decision, out.own_loss, lowest if lowest < decision.scale else None,
            every=self.cfg.reduce.when == "every", replay=self.cfg.track.replay != "off",
            exact=self.cfg.deterministic and self.cfg.model.compile == "none", policy=policy_of(self.cfg),
            rehearsed=self.drill.of_numbers(window.attempt, len(batch.micros)),
        )  # fmt: skip
        found = diagnose.explain(self.parts.engine, self.parts.wire, attempt, again, self.drill.again)
        if self.first:
            self.run.event("finding", window.step, window.attempt, found.rank, found.sentence, **found.facts)
            if not decision.exhausted:  # else the error says it
                self.say_found(found, window.attempt)
        if decision.exhausted:
            raise cause.diverged(found, decision, window, scaled, self.cfg.precision.model_dump())

    def evaluates(self, last: bool) -> bool:
        every = self.cfg.eval.every
        return self.parts.eval_feed is not None and (last or (every > 0 and self.parts.window.step % every == 0))

    def evaluate(self) -> None:
        """Collective. See `evaluation.mean_loss`; the first evaluation compiles the model once more."""
        parts, compiles = self.parts, self.evaluated is None and self.cfg.model.compile != "none"
        with self.clock("eval"):
            loss, labels = mean_loss(parts, self.device, lambda: self.seat.doing("compile" if compiles else "eval"))
        self.evaluated = parts.window.step, loss
        if not labels:
            self.warn(
                f"the first {parts.eval_rows} rows of data.eval hold no label token, so eval/loss is nan; raise eval.rows"
            )
        if self.first:
            self.write({
                "kind": "eval", "step": parts.window.step, "attempt": parts.window.attempt, "eval/loss": loss,
                "eval/perplexity": math.exp(loss) if loss < 700 else math.inf, "eval/label_tokens": labels,
                "train/label_tokens": self.count.label_tokens, "train/tokens": self.count.tokens, **self.clock.metrics(),
            })  # fmt: skip

    def save(self, final: bool = False) -> None:
        """Collective. Begins a checkpoint of this moment; returns when it is copied, or with `final` when it is published."""
        parts, window, count = self.parts, self.parts.window, self.count
        with self.clock("save"):
            self.reap()
            count.saves += 1
            number, attempt = count.saves, window.attempt
            self.saved_attempt = attempt
            state = {"step": window.step, "attempt": attempt, "window_state": window.state(),
                "count": {**vars(count), "fired": []}, "clock": self.clock.table(), "wandb": self.tracker.id,
                "session": self.run.session, "config_digest": self.resolved.digest(),
                "identity": self.resolved.identity(), "data": parts.facts["data"],
                "ranks": self.seat.world.ranks, "nodes": self.seat.world.nodes, "seed": self.cfg.seed,
                "versions": self.versions, "telemetry": self.telemetry.state(),
            }  # fmt: skip
            if self.first:
                self.run.event("save", window.step, attempt, reason="taken")
            try:
                self.saver.start(parts.engine, parts.optimizer, parts.module, state,
                                 lambda: self.drill.saving(number, attempt), self.eval_loss())  # fmt: skip
                self.saved_step = window.step
                if final:
                    self.saver.wait()
            except CheckpointError as error:
                self.save_failed(error, final)

    def eval_loss(self) -> float | None:
        """Of an evaluation at this very step, if there was one."""
        return self.evaluated[1] if self.evaluated is not None and self.evaluated[0] == self.parts.window.step else None

    def reap(self) -> None:
        """Collective. Waits for the save in flight; what became of it is decided by checkpoint.on_error."""
        self.seat.doing("save")
        try:
            self.saver.wait()
        except CheckpointError as error:
            self.save_failed(error, False)

    def save_failed(self, error: CheckpointError, final: bool) -> None:
        self.saved_step = None
        if final or self.cfg.checkpoint.on_error == "stop":
            raise error
        self.warn(f"{error.what}; checkpoint.on_error = go_on, so training goes on without it")

    def published(self, path: Path, size: int, figures: dict[str, float]) -> None:
        """Rank 0, in the saving thread: the checkpoint is there."""
        step = int(path.name.removeprefix("step-"))
        more = dict[str, Any](figures)
        self.run.event("save", step, self.saved_attempt, reason="published", checkpoint=path.name, bytes=size, **more)
        self.damaged.discard(path.name)
        if self.drill:
            self.drill.published(path, self.count.saves)
        self.retain(step)

    def retain(self, step: int) -> None:
        keep = self.cfg.checkpoint
        shelf.retain(self.run.checkpoints, step, keep.keep, keep.keep_best, self.damaged)

    def write_ledger(self, gradients: list[torch.Tensor]) -> None:
        """Collective: the live tensors of every rank by class, beside the plan. Twice where a later window shows more."""
        everywhere: list[Any] = [None] * self.seat.world.ranks
        dist.all_gather_object(everywhere, self.measure.take(gradients))
        if self.first:
            rows = ledger.beside_plan([row for part in everywhere for row in part], self.ledger_plan)
            self.run.ledger(rows)
            if not self.measure.due:
                for text in ledger.warnings(rows):
                    self.warn(text)

    # -- endings ------------------------------------------------------------------------------------------------

    def preempted(self) -> int:
        """Collective. Asked to stop by a signal to some rank: everything is saved, the status is 75."""
        self.reap()
        if self.saved_step != self.parts.window.step:
            self.save(final=True)
        # Ranks may agree on another one's wish before the launcher's signal has reached this one.
        asked = self.seat.asked_to_stop or watch.passed_on(self.run.session_path()) or "a signal to another rank"
        if self.first:
            (self.run.path / STOP).unlink(missing_ok=True)  # obeyed; the next session is not to stop at once
            why = slurm.why_this_job_stops(os.environ, self.cfg.slurm.signal_lead)
            asked += f" ({why})" if why and not asked.endswith(STOP) else ""
        self.close("preempted", Preempted.status, f"stopped by {asked}")
        return Preempted.status

    def finished(self) -> int:
        """Collective. The budget is spent: what is left to evaluate and to save is done."""
        self.reap()
        step = self.parts.window.step
        if self.parts.eval_feed is not None and self.eval_loss() is None:
            self.evaluate()  # the last attempt was a skipped one, or a kill came between the last save and here
            if self.saved_step == step:
                on_first(lambda: self.evaluated_late(step))
        if self.saved_step != step:
            self.save(final=True)
        self.close("done", 0, "the budget is spent")
        return 0

    def evaluated_late(self, step: int) -> None:
        """Rank 0: the checkpoint of this step was there before its evaluation."""
        assert self.evaluated is not None
        shelf.evaluated(self.run.checkpoints, step, self.evaluated[1])
        self.retain(step)

    def close(self, state: str, status: int, reason: str) -> None:
        """Collective. The last words of a session that ends as it should."""
        self.seat.doing("end")
        self.parts.feed.close()
        window = self.parts.window
        if self.first:
            if state == "preempted":
                self.run.event("stop", window.step, window.attempt, reason=reason)
            best = best_static(read_metrics(self.run.path), events(self.run.path)) if self.health is not None else None
            more: dict[str, Any] = {} if best is None else {"static_scale": best.scale}
            self.run.event("end", window.step, window.attempt, reason=reason, state=state, exit=status, **more)
            self.run.status(state=state, step=window.step, attempt=window.attempt, exit=status, reason=reason,
                            time=self.clock.table())  # fmt: skip
            if self.progress is not None:
                self.progress.close()
            if best is not None:
                print(f"the best static scale, by what was measured: {best}", flush=True)
            print(f"{state} at step {window.step} ({window.attempt} attempts): {self.run.path}", flush=True)
        dist.barrier()
        stop()
        if self.seat.record is not None:
            self.seat.record.ended(status)
        # All ranks have said goodbye: waiting for a tracker holds nobody up.
        self.tracker.finish(status)
        if self.first:
            self.run.close()
            self.run.release()
