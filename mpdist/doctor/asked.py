"""What a configuration needs of this machine, as far as it can be said without torch and without other ranks."""

from __future__ import annotations

import netrc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mpdist import arch, hub, space
from mpdist.errors import DoesNotFit, MachineError, MpdistError, UsageError
from mpdist.findings import Finding
from mpdist.inputs import check_inputs
from mpdist.units import format_bytes

if TYPE_CHECKING:
    from mpdist.config import Config, Resolved
    from mpdist.plan import Plan

_WIDTH = 8  # elements of 16 bit that tensor cores take at once: 16 bytes


def look(resolved: Resolved, plan: Plan, env: Mapping[str, str] = os.environ) -> list[Finding]:
    cfg = resolved.config
    shape = arch.look(cfg.model.path, cfg.model.config, cfg.model.revision)
    return [
        fit(plan),
        *(sizes(shape, cfg) if isinstance(shape, arch.Arch) else []),
        room(resolved, plan),
        *inputs(resolved),
        *from_hub(cfg, env),
        *tracking(cfg, env),
    ]


def fit(plan: Plan) -> Finding:
    """The plan's own verdict, where it knows model and memory."""
    if plan.foreseen is None:
        return Finding("plan", plan.model)
    value = f"{format_bytes(plan.foreseen[0])} a rank at {plan.foreseen[1]}"
    if plan.memory_bytes is not None:
        value += f", of {format_bytes(plan.memory_bytes)}"
    failed = caught(plan.require_fit)
    if failed is not None:
        return Finding("plan", value, "failed", failed.why, failed.do, status=DoesNotFit.status)
    if plan.is_close:
        why = "it fits by less than the plan may be off"
        return Finding("plan", value, "doubtful", why, "see `mpdist plan --suggest`, or watch the first steps' ledger")
    return Finding("plan", value)


def sizes(shape: arch.Arch, cfg: Config) -> list[Finding]:
    """Sizes of matrix products that tensor cores take whole, or with padding. Only 16-bit and TF32 products use them."""
    if cfg.precision.compute == "fp32" and not cfg.precision.tf32:
        return []
    named = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "head_dim": shape.head_dim,
             "vocab_size": shape.vocab, "batch.micro x data.seq_len": cfg.batch.micro * cfg.data.seq_len}  # fmt: skip
    odd = {name: size for name, size in named.items() if size % _WIDTH}
    half = [name for name, size in named.items() if not size % _WIDTH and size % (2 * _WIDTH)]
    if not odd:
        more = f"; of 16 all but {', '.join(half)}" if half else " and 16"
        return [Finding("sizes", f"all are multiples of 8{more}")]
    value = ", ".join(f"{name} = {size}" for name, size in odd.items())
    why = "tensor cores take 8 elements of 16 bit at once; products of other sizes are padded or take a slower way"
    do = "; ".join(f"{name} {size} -> {-(-size // _WIDTH) * _WIDTH}" for name, size in odd.items())
    given = (
        "a pretrained model's sizes are fixed"
        if cfg.model.path is not None
        else f"in model.config, to the next multiple of 8: {do}"
    )
    return [Finding("sizes", f"not multiples of 8: {value}", "doubtful", why, given)]


def room(resolved: Resolved, plan: Plan) -> Finding:
    found = space.look(resolved, plan.saves)
    value = found.line.removeprefix("disk").strip()
    if plan.saves is not None:
        value += f", a checkpoint takes {format_bytes(plan.saves.bytes)}"
    if found.error is not None:
        return Finding("space", value, "failed", found.error.why, found.error.do)
    if found.warning is not None:
        return Finding("space", value, "doubtful", found.warning)
    return Finding("space", value)


def inputs(resolved: Resolved) -> list[Finding]:
    """Local files and folders that the configuration names."""
    error = caught(lambda: check_inputs(resolved))
    if error is None:
        return [Finding("inputs", "all local files and folders are there")]
    problems: list[MpdistError] = getattr(error, "problems", [error])
    return [Finding("inputs", p.what, "failed", p.why, p.do, status=UsageError.status) for p in problems]


def from_hub(cfg: Config, env: Mapping[str, str]) -> list[Finding]:
    wanted = hub.needs(cfg)
    lacking = [(need, part) for need in wanted if (part := need.lacking())]
    if not wanted:
        return [Finding("hub", "nothing is taken from it")]
    if not lacking:
        return [Finding("hub", "all is here: " + ", ".join(str(need) for need in wanted))]
    value = "not here: " + "; ".join(f"{need}: {part}" for need, part in lacking)
    do = "`mpdist fetch CONFIG` where there is a network"
    variable = hub.told_offline(env)
    trouble = f"{variable} is set" if variable else hub.unreachable(hub.endpoint(env))
    if trouble is not None:
        return [Finding("hub", value, "failed", f"and it cannot be asked: {trouble}", do, status=MachineError.status)]
    return [Finding("hub", value, "doubtful", "the ranks would fetch it while their devices wait", do)]


def tracking(cfg: Config, env: Mapping[str, str]) -> list[Finding]:
    """Whether W&B can know who is logging; only names of places, never what they hold."""
    from mpdist.track import strictest

    if strictest(cfg.track.wandb.mode, env) != "online":
        return []
    host = urlsplit(env.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    if env.get("WANDB_API_KEY"):
        return [Finding("W&B key", "WANDB_API_KEY is set")]
    path = Path(env.get("NETRC") or "~/.netrc").expanduser()
    try:
        known = netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        known = False
    if known:
        return [Finding("W&B key", f"{path} has one for {host}")]
    why = f"neither WANDB_API_KEY nor {path} has one for {host}, so the run would be logged offline"
    return [
        Finding("W&B key", "none", "doubtful", why, "`wandb login`, or track.wandb.mode=offline and `wandb sync` later")
    ]


def caught(act: Callable[[], object]) -> MpdistError | None:
    try:
        act()
    except MpdistError as error:
        return error
    return None
