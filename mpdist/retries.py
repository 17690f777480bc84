"""The guard against a crash loop: a run that fails at the same step again and again is not started for ever.

A loop around `mpdist launch`, or a scheduler that requeues, repeats what cannot succeed until the allocation is spent.
What counts is read from the run directory alone, so that it holds for whatever starts the ranks.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdist.config.compat import changed
from mpdist.env import environment
from mpdist.errors import CheckpointError, MachineError, UsageError
from mpdist.inputs import changed_since
from mpdist.lines import read_json

if TYPE_CHECKING:
    from mpdist.config import Resolved
    from mpdist.record import RunDir

# Settings of which another value is no attempt to mend anything: a scheduler may change them at each start.
_MENDS_NOTHING = ("name", "out_dir", "slurm.", "launch.retries", "launch.port", "launch.address")
_FULL = os.strerror(errno.ENOSPC)
_BY_THE_USER = 128  # from this exit status on, a signal ended it at once
# Before the loop began, what these statuses name is mended outside of what is looked at here: files put back, a port freed.
_MENDED_ELSEWHERE = (UsageError.status, MachineError.status, CheckpointError.status)


@dataclass(frozen=True)
class Failures:
    """How often in a row the run has failed at `step`, and what it said the last time."""

    count: int
    step: int
    reason: str
    rank: int | None


def check(run: RunDir, resolved: Resolved, world: Mapping[str, Any]) -> None:
    """Raises UsageError where the run has failed `launch.retries` times in a row at the same step. Writes nothing.

    world: `ranks` and `nodes` of this start, as far as they are known.
    """
    found = count(run, resolved, world)
    limit = resolved.config.launch.retries
    if found is None or found.count < limit:
        return
    times = "once" if found.count == 1 else f"{found.count} times in a row"
    who = "" if found.rank is None else f" (rank {found.rank})"
    origin = resolved.origins.get("launch.retries", "config")
    raise UsageError(
        f"{run.path} has failed {times} at step {found.step}, the last time{who}: {found.reason}",
        f"with the same settings it would fail there again; launch.retries = {limit} ({origin})",
        "mend the cause; a changed setting or data file counts as an attempt to, and without one launch.retries="
        f"{found.count + 1} tries once more",
    )


def count(run: RunDir, resolved: Resolved, world: Mapping[str, Any]) -> Failures | None:
    """The failures at the newest one's step, newest session first, under the present settings; None without any.

    Sessions that left no last word (killed) and refusals before the loop began (a port that was taken, a missing rank,
    data or checkpoints that were altered) and full disks neither count nor end the row; nor do those under other settings or before
    a change of what is read, except that another step, or an end that was no failure, ends it for all.
    """
    ends, started = _history(run.events_path)
    present: _Settings | None = None
    newest: dict[str, Any] | None = None
    found = 0
    for session in sorted(ends, reverse=True):
        end = ends[session]
        if end.get("state") not in ("failed", "diverged"):
            break
        code = int(end.get("exit") or 1)
        full = _FULL in str(end.get("reason"))  # what is free is looked at before each start
        if full or code >= _BY_THE_USER or (code in _MENDED_ELSEWHERE and session not in started):
            continue
        newest = newest or end
        if end["step"] != newest["step"]:
            break
        present = present or _Settings(run, resolved, world)
        found += present.are_those_of(session) and not changed_since(resolved.config, end["time"])
    if newest is None:
        return None
    return Failures(
        found, newest["step"], str(newest.get("reason") or "it said no more").partition("\n")[0], newest.get("rank")
    )


def _history(path: Path) -> tuple[dict[int, dict[str, Any]], set[int]]:
    """The last `end` event of each session, and the sessions whose loop began."""
    ends, started = dict[int, dict[str, Any]](), set[int]()
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            event = json.loads(line)
        except ValueError:  # a torn line; the session's start will see to it
            continue
        if not isinstance(event, dict):
            continue
        if event.get("event") == "end":
            ends[event["session"]] = event
        elif event.get("event") == "start":
            started.add(event["session"])
    return ends, started


class _Settings:
    """The present settings, to be held against those of earlier sessions."""

    def __init__(self, run: RunDir, resolved: Resolved, world: Mapping[str, Any]) -> None:
        self._run, self._values, self._world = run, resolved.values(), world
        self._versions = environment()["versions"]
        self._same: dict[Path, bool] = {}

    def are_those_of(self, session: int) -> bool:
        env = read_json(self._run.session_path(session) / "env.json") or {}
        for key in ("ranks", "nodes"):
            if key in env and self._world.get(key, env[key]) != env[key]:
                return False
        if env.get("versions", self._versions) != self._versions:  # an upgrade may mend it as well
            return False
        path = self._config_of(session)
        if path not in self._same:
            self._same[path] = self._equal(path)
        return self._same[path]

    def _config_of(self, session: int) -> Path:
        """A session's configuration is kept in the last session that ran under it, or is still the run's."""
        for number in range(session, self._run.last_session() + 1):
            path = self._run.session_path(number) / "config.yaml"
            if path.exists():
                return path
        return self._run.config_path

    def _equal(self, path: Path) -> bool:
        from mpdist.config import load

        try:
            return not changed(load(path).values(), self._values, _MENDS_NOTHING)
        except UsageError:  # another version's
            return False
