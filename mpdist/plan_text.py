"""The plan as a table that a person reads before spending money."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpdist.plan_memory import BEYOND, MARGIN, states_of
from mpdist.plan_moments import FORWARD
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


def what(plan: Plan) -> list[str]:
    a, b = plan.asked, plan.batch
    world = f"{a.ranks} rank{'s' * (a.ranks != 1)} on {a.nodes} node{'s' * (a.nodes != 1)}"
    world += f" ({plan.world_from})" * bool(plan.world_from) + f", {'CPUs' if a.device == 'cpu' else 'GPUs'}"
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
    batch = f"{b.ranks} rank{'s' * (b.ranks != 1)} x micro {b.micro} x accumulation {b.accumulation}"
    batch += f" = {b.global_} sequences a step; x {a.seq_len:,} = {b.tokens_per_step:,} token slots a step"
    lines = [
        f"world      {world}; {shard}",
        f"precision  {a.compute} compute, {master}, {a.wire} wire, {a.sum} sum",
        f"batch      {batch}",
        _budget(plan),
    ]
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


def _budget(plan: Plan) -> str:
    b = plan.batch
    if plan.steps is not None:
        slots = f"{plan.steps * b.tokens_per_step:,} token slots"
        text = f"{plan.steps:,} step{'s' * (plan.steps != 1)} = {plan.steps * b.global_:,} sequences = {slots}"
    elif plan.tokens is not None and plan.least_steps is not None:
        text = f"{plan.tokens:,} tokens = {plan.least_steps:,} steps or more: padded slots hold none"
    else:
        text = "steps: " + plan.horizon_reason
    horizon = "" if plan.horizon is None else f"; the schedule spans {plan.horizon:,} ({plan.horizon_reason})"
    return f"budget     {text}{horizon}"


def comparison(plan: Plan) -> list[str]:
    """What the simulation found, row by row beside the formula's, and its verdict; nothing without one."""
    found = plan.simulation
    if found is None:
        return []
    by_formula = {row.row: row.peak_bytes for row in plan.rows}
    at_peak = found.parts[found.moment]
    names = dict.fromkeys(row for held in (found.rest, *found.parts.values()) for row in held)
    cells = [
        (
            name,
            format_bytes(found.rest.get(name, 0)),
            format_bytes(found.own_peak(name)),
            format_bytes(at_peak.get(name, 0)),
            _bytes(by_formula.get(name)),
        )
        for name in names
        if found.own_peak(name)
    ]
    over = format_bytes(found.overhead)
    total = ("the rank's peak", "", "", format_bytes(found.total), _bytes(plan.peak_bytes))
    how = f"{found.parameters:,} parameters, {found.how()}, {found.seconds:.1f} s"
    lines = ["", f"simulation of rank 0 ({how}): peak at {found.moment}"]
    head = ("row", "at rest", "own peak", "at the peak", "own peak by formula")
    lines += _table(head, [*cells, ("overhead", over, over, over, _bytes(by_formula.get("overhead"))), total])
    if plan.peak_bytes is not None:
        lines.append(f"  the formula is {plan.peak_bytes / found.total - 1:+.1%} off the simulation's peak")
    return [*lines, *_verdict(plan)]


def _memory(plan: Plan) -> list[str]:
    if plan.peak_bytes is None or plan.states_bytes is None:
        if plan.simulation is not None:
            return ["memory     unknown by formula"]
        way = "`mpdist plan --simulate` plays the model itself, where it can be built"
        return [f"memory     unknown by formula; {way}", *_verdict(plan)]
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
    per = f" = {plan.states_bytes / plan.trainable:.2f} B a trainable parameter on this rank" if plan.trainable else ""
    lines.append(
        f"  at the peak: what is there {_when(plan.peak_moment)}, when the rank holds the most; its sum is the peak"
    )
    lines.append("  own peak: the most of a row at any moment; these come at different moments and do not add up")
    lines.append(f"  states (parameters, working, gradients, moments) {format_bytes(plan.states_bytes)}{per}")
    lines.append(f"  why: {states_of(plan.asked, plan.shares).why}")
    if plan.host_bytes:
        per_node = plan.asked.per_node
        ranks = f"{format_bytes(plan.host_bytes)} a rank x {per_node} = " if per_node > 1 else ""
        lines.append(f"  host memory of a node: {ranks}{format_bytes(per_node * plan.host_bytes)}")
    if plan.simulation is None:
        lines += _verdict(plan)
    if plan.suggestions:
        enough = any(suggestion.fits for suggestion in plan.suggestions)
        said = "room for" if plan.fits else "smallest changes that make it fit" if enough else "nearest"
        lines += [said, *(f"  {suggestion}" for suggestion in plan.suggestions)]
    if plan.fits is False and not any(suggestion.fits for suggestion in plan.suggestions):
        lines.append("none of it is enough, nor all together: it takes " + takes(plan))
    return [*lines, *_candidates(plan)]


def _verdict(plan: Plan) -> list[str]:
    if plan.memory_bytes is None:
        return ["fits       unknown: give --memory, such as 80GiB, to hear a verdict"]
    if plan.foreseen is None:
        return ["fits       unknown by formula: no verdict without the bytes"]
    verdict = "yes" if plan.fits else "NO"
    close = f", with less to spare than the estimate is good for ({MARGIN:.0%})" if plan.is_close else ""
    by = " by simulation" if plan.simulation is not None else ""
    text = f"{format_bytes(plan.foreseen[0])} of {format_bytes(plan.memory_bytes)} a rank on {plan.asked.ranks} ranks"
    lines = [f"fits       {verdict}{by}: {text.removesuffix('s') if plan.asked.ranks == 1 else text}{close}"]
    return lines + ([f"           {plan.memory_from}"] if plan.memory_from else [])


def _when(moment: str) -> str:
    return f"in {moment}" if moment == FORWARD else f"at {moment}"


def takes(plan: Plan) -> str:
    """What a job needs that no settings make fit."""
    if plan.more_ranks is None:
        return f"{BEYOND}; no number of ranks is enough by itself".replace("more ranks, ", "")
    rest = BEYOND.replace("more ranks, ", "")
    return f"{plan.more_ranks}; or {rest}"


def _candidates(plan: Plan) -> list[str]:
    if not plan.candidates:
        return []
    cells = [
        (
            format_bytes(c.peak_bytes) + ("*" if c.is_close else ""),
            format_bytes(c.sent_within),
            format_bytes(c.sent_between),
            f"{c.recompute:.0%}",
            f"{c.asked.micro} x {c.asked.accumulation}",
            format_bytes(c.host_bytes * c.asked.per_node),
            c.change or "as configured",
        )
        for c in plan.candidates
    ]
    head = ("peak", "sent in node", "sent between", "recomputed", "micro x accum", "host of a node", "settings")
    lines = [
        "",
        "settings that fit, cheapest first: of ddp, each stage and each offload what takes the least extra work",
    ]
    lines += _table(head, cells)
    lines.append("  recomputed: of forward's FLOPs, those that are done a second time in backward")
    if any(c.is_close for c in plan.candidates):
        lines.append(f"  * by less than the estimate is good for ({MARGIN:.0%})")
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
            format_bytes(t.textbook_bytes),
            f"{t.formula}: {t.how}",
        )
        for t in plan.traffic
    ]
    head = ("what", "dtype", "n", "payload", "sent in node", "sent between", "a ring's", "from")
    return ["", "traffic of one rank in a step", *_table(head, cells)]


def text(plan: Plan) -> str:
    """The plan in lines of text, without a final line break."""
    lines = [*what(plan), *(f"warning    {warning}" for warning in plan.warnings), *_memory(plan), *_traffic(plan)]
    if plan.flops_per_token is not None:
        rate = f"{plan.flops_per_token / 1e9:.3g} GFLOP a token"
        lines.append(f"compute    {rate}, forward and backward, attention counted as its causal half")
    if plan.time is not None:
        lines += ["", *plan.time.lines()]
    elif plan.time_unknown:
        lines.append(f"time       unknown: {plan.time_unknown}")
    lines += comparison(plan)
    return "\n".join(lines)


def beside_text(folder: str, plan: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """What a run planned and what it measured. plan: its plan.json. rows: as plan_command.beside gives them."""
    lines = [f"run        {folder}: ranks {plan.get('ranks')}, nodes {plan.get('nodes')}; {plan.get('model')}"]
    if not rows:
        lines.append("measured   nothing yet: a run writes ledger.json after its first applied step")
        rows = [
            {"row": r["row"], "planned_bytes": r["rest_bytes"], "cause": r.get("formula", "")}
            for r in plan.get("rows", [])
        ]
    cells = [
        (
            str(r["row"]),
            ", ".join(r.get("dtypes", ())) or "-",
            _ranks(r.get("ranks", ())),
            _bytes(r["planned_bytes"]),
            _bytes(r.get("measured_min_bytes")),
            _bytes(r.get("measured_max_bytes")),
            _bytes(r.get("difference_bytes"), signed=True),
            str(r["cause"]),
        )
        for r in rows
    ]
    head = ("row", "dtype", "ranks", "planned", "measured, least", "most", "difference", "cause")
    lines += ["", *_table(head, cells)]
    if any(r["row"] == "peak" for r in rows):
        apart = any(r["row"] == "overhead" and r.get("measured_max_bytes") is not None for r in rows)
        lines.append(
            "  peak: the most that tensors held at once; overhead: what the process held beside them"
            if apart
            else "  peak: the most that the process held, with the overhead"
        )
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "-"
    whole = list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if whole and len(ranks) > 1 else ",".join(map(str, ranks))


def _bytes(count: int | None, signed: bool = False) -> str:
    if count is None:
        return "-"
    return ("+" if signed and count > 0 else "") + format_bytes(count)
