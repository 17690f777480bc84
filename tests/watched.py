"""Whole runs, several in one set of processes, with an eye on every attempt of every rank.

`sessions(folder, ranks, [changes, ...])` writes one config for each set of changes (see tiny.config), runs one after
another on the same ranks and returns a `Watched` for each: what tiny.Result reads from the run directory, and what
each rank held before and after each attempt.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny
import worlds


@dataclass
class Attempt:
    """What one rank saw of one attempt.

    lr: of the step that it made or would have made. touched: whether masters, moments or Adam's counter changed here.
    """

    applied: bool
    reason: str | None
    loss: float
    scale: float
    scale_after: float
    state: dict[str, Any]
    lr: float
    touched: bool
    rows: list[list[int]]


@dataclass
class Seen:
    """One rank's session.

    start, end: whole masters before the first and after the last attempt; digests: likewise, of this rank's masters,
    moments and counters. gradients: dtypes that the optimizer was handed. probe: what the caller's `arm` returned.
    """

    status: int = 0
    message: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    start: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    gradients: set[str] = field(default_factory=set)
    masters: dict[str, str] = field(default_factory=dict)
    counters: set[float] = field(default_factory=set)
    digests: tuple[str, str] = ("", "")
    probe: Any = None


class Watched(tiny.Result):
    def __init__(self, folder: Path, seen: list[Seen]) -> None:
        super().__init__(folder, [(s.status, s.message) for s in seen])
        self.ranks = seen

    @property
    def attempts(self) -> list[Attempt]:
        return self.ranks[0].attempts


def sessions(
    folder: Path,
    ranks: int,
    changes: list[dict[str, Any]],
    *,
    local: int | None = None,
    arm: Callable[[], Any] | None = None,
    timeout: float = 300.0,
) -> list[Watched]:
    """local: ranks a node. arm: called on each rank before each session, for instance to record collectives."""
    paths = []
    for i, change in enumerate(changes):
        change.setdefault("name", f"run{i}")
        path = tiny.config(folder, **change)
        paths.append(str(path.rename(folder / f"{i}-{change['name']}.yaml")))
    ports = worlds.free_ports(len(paths))
    found = worlds.run(session_each, ranks, paths, ports, local, arm, timeout=timeout)
    return [Watched(folder / "runs" / change["name"], [rank[i] for rank in found]) for i, change in enumerate(changes)]


def session_each(
    rank: int, paths: list[str], ports: list[int], local: int | None, arm: Callable[[], Any] | None
) -> list[Seen]:
    from mpdist.dist import stop

    if local is not None:
        os.environ.update(LOCAL_WORLD_SIZE=str(local), LOCAL_RANK=str(rank % local))
    found = []
    for path, port in zip(paths, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        probe = arm() if arm is not None else None
        found.append(one(path))
        found[-1].probe = probe
        stop()  # a session that ended with an error left its group
    return found


def session_loaded(rank: int, paths: list[str], ports: list[int]) -> list[tuple[int, str, dict[str, Any]]]:
    """Sessions one after another: status, message, and the whole state right after it was loaded, by its name."""
    from mpdist import train
    from mpdist.config import load
    from mpdist.dist import stop
    from mpdist.errors import MpdistError
    from mpdist.session import Session
    from mpdist.worker import Seat
    from mpdist.world import from_env

    found: list[tuple[int, str, dict[str, Any]]] = []
    for path, port in zip(paths, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        world = from_env(os.environ)
        assert world is not None
        state: dict[str, Any] = {}
        try:
            resolved = load(path, [])
            run = Session(resolved, Seat(resolved, world))
            assert run.set_up()
            engine, optimizer = run.parts.engine, run.parts.optimizer
            parts = {"model": [(part, part.tensor) for part in engine.parts]}
            for i, part in enumerate(optimizer.parts):
                for key, moment in optimizer.moments(i).items():
                    if key != "step":
                        parts.setdefault(key, []).append((part, moment))
            for kind, held in parts.items():
                state |= {f"{kind}.{name}": tensor for name, tensor in worlds.wholes(held).items()}
            status, message = (run.preempted() if train.loop(run) else run.finished()), ""
        except MpdistError as error:
            status, message = error.status, str(error)
            stop()
        found.append((status, message, state))
    return found


def one(path: str) -> Seen:
    """One session in this process."""
    from mpdist import train
    from mpdist.config import load
    from mpdist.errors import MpdistError
    from mpdist.session import Session
    from mpdist.worker import Seat
    from mpdist.world import from_env

    seen = Seen()

    attempt = train.attempt

    class Looking(Session):
        def attempt(self, batch: Any) -> Any:
            parts = self.parts
            if not seen.start:
                seen.start = whole(parts.engine)
                seen.masters = {p.name: str(p.tensor.dtype) for p in parts.engine.parts if p.trainable}
                step = parts.optimizer.step

                def spy(gradients: list[Any], lr: float) -> None:
                    seen.gradients.update(str(g.dtype) for g in gradients)
                    step(gradients, lr)

                parts.optimizer.step = spy
            before = digest(parts.engine, parts.optimizer)
            seen.digests = (seen.digests[0] or before, "")
            out = attempt(self, batch)
            d, after = out.decision, digest(parts.engine, parts.optimizer)
            rows, state = [micro.rows.tolist() for micro in batch.micros], parts.window.state()
            lr = parts.lr(parts.window.step + (not d.applied))
            reason = str(d.reason) if d.reason else None
            seen.attempts.append(
                Attempt(d.applied, reason, out.loss, d.scale, d.scale_after, state, lr, before != after, rows)
            )  # fmt: skip
            return out

        def close(self, *args: Any) -> None:
            self.look()
            super().close(*args)

        def look(self) -> None:
            seen.end = whole(self.parts.engine)
            seen.digests = (seen.digests[0], digest(self.parts.engine, self.parts.optimizer))
            seen.counters = {float(s["step"]) for s in self.parts.optimizer.adam.state.values()}

    world = from_env(os.environ)
    assert world is not None
    run = None
    try:
        resolved = load(path, [])
        seat = Seat(resolved, world)
        seat.stop.listen(None)
        run = Looking(resolved, seat)
        train.attempt = Looking.attempt
        if run.set_up():
            seen.status = run.preempted() if train.loop(run) else run.finished()
    except MpdistError as error:
        seen.status, seen.message = error.status, str(error)
        if seen.status == 5 and run is not None:  # all ranks come here together
            run.look()
    finally:
        train.attempt = attempt
    return seen


def whole(engine: Any) -> dict[str, Any]:
    """Collective. Masters by name, whole."""
    return worlds.wholes([(part, part.tensor) for part in engine.parts])


def digest(engine: Any, optimizer: Any) -> str:
    """Of the bits of this rank's masters, moments and Adam counters (missing moments count as zeros)."""
    import torch

    sha = hashlib.sha256()
    for part in engine.parts:
        sha.update(part.tensor.contiguous().view(torch.uint8).numpy().tobytes())
    for i, _ in enumerate(optimizer.parts):
        state = optimizer.adam.state.get(optimizer.params[i]) or {}
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if key in state and bool(state[key].any()):
                sha.update(f"{i}{key}".encode() + state[key].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
