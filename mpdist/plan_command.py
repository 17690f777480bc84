"""`mpdist plan`: the plan of a configuration with its advice, or what a run planned beside what it measured."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdist import plan_text, run_files
from mpdist.arch import Arch, Unknown, look
from mpdist.config.load import COMMAND_LINE
from mpdist.config.write import block
from mpdist.errors import DoesNotFit, UsageError
from mpdist.plan import Plan, make
from mpdist.plan_advice import Candidate
from mpdist.plan_memory import MARGIN
from mpdist.plan_simulated import refuse
from mpdist.run_files import COUNT, LIST, MAPPING, TEXT, Kind
from mpdist.units import format_bytes

if TYPE_CHECKING:
    from mpdist.config import Config, Resolved
    from mpdist.devices import Device

_PLAN: run_files.Schema = {
    "rows!": LIST, "rows.[]": MAPPING, "rows.[].row!": TEXT, "rows.[].rest_bytes!": COUNT, "ranks!": COUNT, "nodes!": COUNT,
    "device!": Kind("cpu or cuda", lambda value: value in ("cpu", "cuda")),
}  # fmt: skip


def run(
    resolved: Resolved,
    *,
    ranks: int | None,
    nodes: int | None,
    memory_bytes: int | None,
    as_json: bool,
    suggest: bool = False,
    html: str | None = None,
    gpu: str | None = None,
    peak: float | None = None,
    network: float | None = None,
    simulate: bool = False,
    every_layer: bool = False,
) -> int:
    """Prints the plan; status 3 where it does not fit, 2 where a verdict was asked for and there is none.

    ranks: of one node; None as the config says. suggest: print the cheapest settings that fit as YAML instead; status 3
    where none do. html: a file to draw it into. gpu: its name, for its memory (unless memory_bytes is given) and its rates.
    peak: FLOP/s of one device, instead of the data sheet's. network: bytes/s that a node can send to others. simulate: also
    play it on fake tensors, which takes torch and some seconds; every_layer: with all of the model's blocks.
    """
    cfg = resolved.config
    device, memory_from = _card(gpu, memory_bytes)
    if device is not None:
        memory_bytes = memory_bytes or device.memory_bytes
    nodes = nodes or cfg.launch.nodes
    ranks, whence = _ranks(resolved) if ranks is None else (ranks, "--ranks")
    if suggest and memory_bytes is None:
        why, do = "it asks what fits, and no memory is given", "give --memory, such as 80GiB, or --gpu"
        raise UsageError("--suggest", why, do)
    if suggest and simulate:
        do = "save what it prints, and plan that file with --simulate"
        raise UsageError("--suggest with --simulate", "a simulation proves a configuration as it stands", do)
    shape = look(cfg.model.path, cfg.model.config, cfg.model.revision)
    origin = resolved.origins.get
    plan = make(cfg, shape, ranks, nodes, memory_bytes, lambda name: origin(name, "config"), alternatives=True)
    plan = replace(plan, world_from=whence, memory_from=memory_from)
    if isinstance(shape, Arch) and (device is not None or peak is not None):
        plan = _timed(plan, cfg, shape, device, peak, network)
    if simulate:
        refuse(plan.asked)
    if not as_json and not suggest:
        print(plan.text(), flush=True)
    if simulate:
        plan = _simulated(plan, cfg, every_layer)
        if not as_json:
            print("\n".join(plan_text.comparison(plan)))
    if html is not None:
        _draw(plan, html, cfg.name, device.name if device is not None else "")
    if suggest:
        print(fragment(resolved, plan, shape), end="")
        return 0
    if as_json:
        print(json.dumps(plan.to_json(), indent=2))
    if memory_bytes is not None and plan.foreseen is None:
        raise _no_verdict(memory_bytes, shape)
    return DoesNotFit.status if plan.fits is False else 0


def _card(gpu: str | None, memory_bytes: int | None) -> tuple[Device | None, str]:
    """(the card, what its memory is known from; empty where the memory is given)."""
    if gpu is None:
        return None, ""
    from mpdist.devices import require

    device = require(gpu, memory_bytes)
    said = f"memory of {device.name}: {format_bytes(device.memory_bytes)}, {device.memory_source}"
    return device, said if memory_bytes is None else ""


def _no_verdict(memory_bytes: int, shape: Arch | Unknown) -> UsageError:
    why = shape.reason if isinstance(shape, Unknown) else "the model's shape is unknown"
    way = "add --simulate, which plays the model itself with torch"
    if isinstance(shape, Unknown) and shape.missing:
        way = "correct model.path"
    do = f"{way}, or leave --memory and --gpu out"
    return UsageError(f"no verdict on {format_bytes(memory_bytes)} a rank: bytes are not known by formula", why, do)


def _simulated(plan: Plan, cfg: Config, every_layer: bool) -> Plan:
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"simulation: {text}", file=sys.stderr, flush=True)

    say("torch and transformers are being loaded")
    from mpdist.simulate import simulate

    say(f"they are there: {time.perf_counter() - began:.1f} s; now the model is played on tensors without memory")
    return plan.simulated(simulate(cfg, plan.asked, every_layer, say))


def _timed(
    plan: Plan, cfg: Config, shape: Arch, device: Device | None, peak: float | None, network: float | None
) -> Plan:
    from mpdist import plan_time

    asked, tf32 = plan.asked, cfg.precision.tf32
    told = "--peak" if peak is not None else "track.peak_tflops"
    if peak is None and cfg.track.peak_tflops is not None:
        peak = cfg.track.peak_tflops * 1e12
    found = plan_time.estimate(asked, shape, plan.traffic, device, tf32=tf32, peak=peak, network=network)
    if found is None:
        return replace(plan, time_unknown=plan_time.missing(asked, device, tf32))
    return replace(plan, time=found if peak is None else replace(found, peak_from=told))


def _ranks(resolved: Resolved) -> tuple[int, str]:
    """(ranks of a node, where that number is from)."""
    launch = resolved.config.launch
    if isinstance(launch.ranks, int):
        return launch.ranks, f"launch.ranks, {resolved.origins.get('launch.ranks', 'config')}"
    if launch.device == "cpu":
        return 1, "launch.ranks = auto on a CPU"
    from mpdist.place import visible_devices

    seen = visible_devices(os.environ)
    return max(
        1, seen
    ), f"{seen} GPU{'s' * (seen != 1)} visible here" if seen else "no GPU is visible here: give --ranks"


def fragment(resolved: Resolved, plan: Plan, shape: Arch | Unknown | None) -> str:
    """The cheapest settings that fit with the estimate's margin to spare, else the cheapest that fit, as a configuration
    that extends the one they are of; it works wherever it is saved.

    Raises DoesNotFit where nothing fits, UsageError where the model's shape is not known.
    """
    if isinstance(shape, Unknown) or plan.memory_bytes is None:
        why = shape.reason if isinstance(shape, Unknown) else "no memory is given"
        do = "give a model.path whose config.json can be read"
        if isinstance(shape, Unknown) and shape.was_read:
            do = "try settings by hand, each with --simulate, which plays the model itself"
        raise UsageError("--suggest", f"bytes are not known: {why}", do)
    if not plan.candidates:
        plan.require_fit()
    best = next((one for one in plan.candidates if not one.is_close), plan.candidates[0])
    world = {"launch.ranks": plan.asked.per_node, "launch.nodes": plan.asked.nodes}
    given = _given(resolved)
    values: dict[str, Any] = {}
    for name, value in (given | best.settings | world).items():
        *path, leaf = name.split(".")
        holder = values
        for part in path:
            holder = holder.setdefault(part, {})
        holder[leaf] = value
    lines = _comment(resolved, plan, best, {**given, **best.changes, **world})
    return "".join(f"# {line}\n" for line in lines) + block({"extends": str(resolved.path.resolve())} | values)


def _given(resolved: Resolved) -> dict[str, Any]:
    """What the command line sets, by dotted name; of a list that it changes all elements."""
    found = {}
    for name, origin in resolved.origins.items():
        if origin == COMMAND_LINE:
            parts = list(itertools.takewhile(lambda part: not part.isdecimal(), name.split(".")))
            value: Any = resolved.values()
            for part in parts:
                value = value[part]
            found[".".join(parts)] = value
    return found


def _comment(resolved: Resolved, plan: Plan, best: Candidate, settings: Mapping[str, Any]) -> list[str]:
    a = plan.asked
    world = f"{a.ranks} rank{'s' * (a.ranks != 1)} on {a.nodes} node{'s' * (a.nodes != 1)}"
    sent = format_bytes(best.sent_within + best.sent_between)
    text = f"For {world} with {format_bytes(plan.memory_bytes or 0)} each: peak {format_bytes(best.peak_bytes)}; "
    text += f"a rank sends {sent} a step; {best.recompute:.0%} of forward is computed twice; "
    text += f"{best.asked.accumulation} micro-batch{'es' * (best.asked.accumulation != 1)} a step."
    lines = [text]
    if best.host_bytes:
        node = format_bytes(best.host_bytes * best.asked.per_node)
        lines.append(f"Its ranks hold {node} in the host memory of each node, which has to be there as well.")
    if best.is_close:
        lines.append(
            f"It fits by less than the estimate is good for ({MARGIN:.0%}), and nothing fits with more to spare."
        )
    words = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
    command = shlex.join(["mpdist", "launch", str(resolved.path.resolve()), *words])
    return [*lines, "Save this file anywhere and launch it, or without a file:", f"  {command}"]


def _draw(plan: Plan, file: str, name: str, gpu: str = "", pairs: Sequence[Mapping[str, Any]] = ()) -> None:
    from mpdist import plan_html

    try:
        view = plan_html.view_of(plan, plan_html.measured_of(pairs), name, gpu)
        Path(file).write_text(plan_html.page(view), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {file}", error.strerror or str(error), "give a file that can be written") from None
    print(f"the picture is in {file}", file=sys.stderr)


# ------------------------------------------------------------------------------------------------- of a run


def show(folder: str, as_json: bool, html: str | None = None) -> int:
    """What a run planned and what it measured, row by row. Raises UsageError where the folder holds no run."""
    path = Path(folder)
    plan, rows = _checked_plan(path / "plan.json"), list[dict[str, Any]]()
    if (measured := _load(path / "ledger.json", run_files.LEDGER)) is not None:
        rows = measured["rows"]
    pairs = beside(rows)
    if html is not None:
        _draw(_made_again(path, plan), html, path.resolve().name, pairs=pairs)
    if as_json:
        print(json.dumps({"plan": plan, "ledger": rows, "rows": pairs}, indent=2))
    else:
        print(plan_text.beside_text(folder, plan, pairs))
    return 0


def _load(file: Path, schema: run_files.Schema) -> dict[str, Any] | None:
    try:
        return run_files.load(file, schema)
    except UsageError as error:
        why = error.why if "cannot be read" in error.what else f"{error.what}: {error.why}"
        raise UsageError(f"{file} cannot be read", why or error.what, "plan the run's config.yaml instead") from error


def _checked_plan(file: Path) -> dict[str, Any]:
    found = _load(file, _PLAN)
    if found is None:
        why = f"there is no {file.name} in it, which every run writes as it starts"
        do = "give OUT_DIR/NAME of a run, or a configuration"
        raise UsageError(f"{file.parent} is no run directory", why, do)
    if not 0 < found["nodes"] <= found["ranks"] or found["ranks"] % found["nodes"]:
        why = f"no {found['ranks']} ranks are evenly on {found['nodes']} nodes"
        raise UsageError(f"{file} cannot be read", why, "plan the run's config.yaml instead")
    return found


def beside(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry a row of a ledger: its dtypes, ranks, planned bytes, the least and most that a rank measured, and the
    difference of the rank that is furthest off, with that rank's cause. What was not planned stands by its cause.

    rows: as in ledger.json; a class held in several dtypes has a row for each, of which the first has the plan of all.
    """
    groups: dict[tuple[str, str], dict[int, list[Mapping[str, Any]]]] = {}
    for row in rows:
        key = row["row"], str(row.get("cause")) if row["row"] == "unaccounted" else ""
        groups.setdefault(key, {}).setdefault(row["rank"], []).append(row)
    found = []
    for (name, _), ranks in groups.items():
        measured = {rank: _sum(of, "measured_bytes") for rank, of in ranks.items()}
        planned = {rank: _sum(of, "planned_bytes") for rank, of in ranks.items()}
        sizes = [size for size in measured.values() if size is not None]
        gaps = {r: m - p for r, m in measured.items() if m is not None and (p := planned[r]) is not None}
        worst = max(gaps, key=lambda rank: abs(gaps[rank]), default=min(ranks))
        dtypes = dict.fromkeys(str(row["dtype"]) for of in ranks.values() for row in of if row.get("dtype"))
        found.append(
            {
                "row": name,
                "dtypes": list(dtypes),
                "ranks": sorted(ranks),
                "planned_bytes": planned[worst],
                "measured_min_bytes": min(sizes, default=None),
                "measured_max_bytes": max(sizes, default=None),
                "difference_bytes": gaps.get(worst),
                "rank": worst,
                "cause": str(ranks[worst][0].get("cause") or ""),
            }
        )
    return found


def _sum(rows: Sequence[Mapping[str, Any]], key: str) -> int | None:
    found = [row[key] for row in rows if row.get(key) is not None]
    return sum(found) if found else None


def _made_again(path: Path, plan: Mapping[str, Any]) -> Plan:
    """The plan of a run's own configuration, on the world that its plan.json names."""
    from mpdist.config import load

    resolved = load(path / "config.yaml")
    model = resolved.config.model
    ranks, nodes = int(plan["ranks"]), int(plan["nodes"])
    shape = look(model.path, model.config, model.revision)
    return make(resolved.config, shape, ranks // nodes, nodes, device=str(plan["device"]))
