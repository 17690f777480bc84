"""What a session goes on from: its run's newest whole checkpoint, or the one that a new run is told to start from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdist import restore
from mpdist.dist import on_first
from mpdist.env import environment
from mpdist.errors import UsageError
from mpdist.lines import read_lines

if TYPE_CHECKING:
    from mpdist.config import Resolved
    from mpdist.record import RunDir
    from mpdist.world import World


def find(resolved: Resolved, run: RunDir, mode: str, refused: Callable[[str, str], None]) -> restore.Found | None:
    """Collective. The checkpoint to go on from, its files digested by all ranks together.

    refused: told the name of each that is passed over, and why. Raises UsageError, CheckpointError.
    """
    wish, check = resolved.config.checkpoint.resume, restore.fault_together
    if wish in ("auto", "never") or mode != "new":
        own = on_first(lambda: restore.candidates(run.checkpoints))
        found = restore.newest(own, refused, lambda path: check(path) or _foreign(resolved, path))
        if found is not None or wish in ("auto", "never"):
            return found  # else it ended before its own first checkpoint, and begins again where it began
    path = Path(wish).expanduser()
    if not on_first(lambda: (path / "checkpoints").is_dir()):
        return restore.open_checked(path, check)
    found = restore.newest(on_first(lambda: restore.candidates(path / "checkpoints")), refused, check)
    if found is None:
        raise UsageError(f"checkpoint.resume = {wish}", "the run there has no checkpoint", "give another path")
    return found


def _foreign(resolved: Resolved, path: Path) -> str | None:
    """Collective. Why a whole checkpoint in this run's directory is none of this run's."""

    def look() -> str | None:
        state = json.loads((path / "state.json").read_text())
        # Another version may know other settings, and so another digest of the same ones.
        comparable = state["versions"].get("mpdist") == environment()["versions"].get("mpdist")
        same = not comparable or state.get("identity") == resolved.identity()
        return None if same else "state.json is of a run with other settings, copied here"

    return on_first(look)


def check_data(found: restore.Found, now: dict[str, str]) -> None:
    """The same windows go on only over the same rows: files may have changed under their unchanged names.

    now: part of the data -> digest of its rows. Raises UsageError.
    """
    then = found.state.get("data") or {}
    changed = [f"data.{part}" for part, digest in now.items() if then.get(part, digest) != digest]
    if changed:
        raise UsageError(f"{' and '.join(changed)}: what the files hold has changed since {found.path.name} of this run",
                         "its windows would hold other rows than those that it has trained on and has left",
                         f"put the files back, or start a new run with checkpoint.resume={found.path}")  # fmt: skip


def fired_before(run: RunDir) -> list[str]:
    """The drills that earlier sessions of the run have played."""
    path = run.events_path
    return [e["reason"] for e in read_lines(path) if e.get("event") == "drill"] if path.exists() else []


def told(state: dict[str, Any], world: World, changes: list[str]) -> str:
    """What is worth a word of a resume: another world, another engine."""
    said = [f"{state['ranks']} ranks -> {world.ranks}"] if state["ranks"] != world.ranks else []
    said += [c for c in changes if c.startswith(("launch.nodes:", "shard.engine:", "shard.stage:"))]
    return f" ({', '.join(said)})" if said else ""
