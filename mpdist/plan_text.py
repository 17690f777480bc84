"""The plan as a table that a person reads before spending money."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpdist.plan_memory import BEYOND, MARGIN
from mpdist.units import format_bytes

if TYPE_CHECKING:
    from mpdist.plan import Plan


def _table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns, the last one ragged; the numbers in between are set right."""
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head) - 1)]
    out = []
    for line in [head, *lines]:
        cells = [line[0].ljust(widths[0])] + [line[i].rjust(widths[i]) for i in range(1, len(widths))]
        out.append(("  " + "  ".join([*cells, line[-1]])).rstrip())
    return out


def _shared(ranks: int) -> str:
    return "one rank holds the whole copy" if ranks == 1 else f"{ranks} ranks share one copy"


def _what(plan: Plan) -> list[str]:
    a, b = plan.asked, plan.batch
    world = f"{a.ranks} rank{'s' * (a.ranks != 1)} on {a.nodes} node{'s' * (a.nodes != 1)}"
    world += f", {'CPUs' if a.device == 'cpu' else 'GPUs'}"
    shard = a.engine if a.engine == "ddp" else f"{a.engine} stage {a.stage}, " + _shared(a.shard_size)
    if a.engine == "deepspeed" and a.stage < 3 and a.ranks > 1:
        once = a.when == "last"
        shard += (
            f" of masters{'' if once else ', gradients'} and moments; working copies{' and gradients' * once} are whole"
        )
    if a.offload != "none":
        shard += f", offload {a.offload}"
    if a.replicas > 1:
        shard += f", {a.replicas} replicas"
    master = "FP32 masters" if a.master == "fp32" else f"pure {a.compute}: NO FP32 masters"
    micros = f"{b.accumulation} micro-batch{'es' * (b.accumulation != 1)} of {b.micro} on each of {b.ranks} ranks"
    lines = [
        f"world      {world}; {shard}",
        f"precision  {a.compute} compute, {master}, {a.wire} wire, {a.sum} sum",
        f"batch      {b.global_} sequences a step = {micros}; {b.tokens_per_step:,} token slots a step",
    ]
    steps = f"{plan.steps:,} steps" if plan.steps is not None else "steps: " + plan.horizon_reason
    horizon = "" if plan.horizon is None else f"; the schedule spans {plan.horizon:,} ({plan.horizon_reason})"
    lines.append(f"budget     {steps}{horizon}")
    count = "" if plan.parameters is None else f"{plan.parameters:,} parameters"
    if plan.trainable is not None and plan.trainable != plan.parameters:
        count += f" of which {plan.trainable:,} train"
    lines.append(f"model      {count + '; ' if count else 'parameters '}{plan.model}")
    if plan.saves is not None:
        s = plan.saves
        lines.append(f"checkpoint {format_bytes(s.bytes)} = {s.formula}")
        most = f"up to {s.count} at once, the one being written included" if s.count > 1 else "one, at the end"
        lines.append(f"           {most}: {format_bytes(s.kept_bytes)} in the run directory")
    return lines


def _memory(plan: Plan) -> list[str]:
    if plan.peak_bytes is None or plan.states_bytes is None:
        return ["memory     unknown until the model is built"]
    lines = ["", "memory of the rank that holds the most"]
    cells = []
    for row in plan.rows:
        if not row.peak_bytes:
            continue
        name = f"{row.row} (host)" if row.host else row.row
        cells.append(
            (
                name,
                format_bytes(row.rest_bytes),
                format_bytes(row.peak_bytes),
                "-" if row.host else format_bytes(row.at_peak_bytes),
                row.formula,
            )
        )
    total = ("the rank's peak", "", "", format_bytes(plan.peak_bytes), f"at {plan.peak_moment}")
    lines += _table(("row", "at rest", "own peak", "at the peak", "from"), [*cells, total])
    per = f" = {plan.states_bytes / plan.trainable:.2f} B a trainable parameter" if plan.trainable else ""
    lines.append(f"  states (parameters, working, gradients, moments) {format_bytes(plan.states_bytes)}{per}")
    if plan.memory_bytes is None:
        lines.append("fits       unknown: give --memory, such as 80GiB, to hear a verdict")
    else:
        verdict = "yes" if plan.fits else "NO"
        close = f", with less to spare than the estimate is good for ({MARGIN:.0%})" if plan.is_close else ""
        lines.append(
            f"fits       {verdict}: {format_bytes(plan.peak_bytes)} of {format_bytes(plan.memory_bytes)}{close}"
        )
    if plan.suggestions:
        lines.append("try" if plan.fits is False else "room for")
        lines += [f"  {suggestion}" for suggestion in plan.suggestions]
    if plan.fits is False and not any(suggestion.fits for suggestion in plan.suggestions):
        lines.append(f"none of it is enough, nor all together: it takes {BEYOND}")
    return lines


def _traffic(plan: Plan) -> list[str]:
    if plan.parameters is None:
        return []
    if not plan.traffic:
        return ["traffic    none: one rank alone"]
    cells = [
        (
            f"{t.what}, {t.collective}",
            t.dtype,
            str(t.ranks),
            format_bytes(t.payload_within + t.payload_between),
            format_bytes(t.sent_within),
            format_bytes(t.sent_between),
            t.formula,
        )
        for t in plan.traffic
    ]
    head = ("what", "dtype", "n", "payload", "sent in node", "sent between", "from")
    return ["", "traffic of one rank in a step", *_table(head, cells)]


def text(plan: Plan) -> str:
    """The plan in lines of text, without a final line break."""
    lines = [*_what(plan), *_memory(plan), *_traffic(plan)]
    if plan.flops_per_token is not None:
        rate = f"{plan.flops_per_token / 1e9:.3g} GFLOP a token"
        lines.append(f"compute    {rate}, forward and backward, attention counted as its causal half")
    return "\n".join(lines)
