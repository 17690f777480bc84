"""Bytes by tensor class, measured on the live tensors of this rank, beside what was planned.

What is there between windows (masters, working copies, gradients, moments, buffers) is read off the tensors themselves.
What comes and goes within one (activations, logits, wire buffers) is followed in one window by a gauge where the device is a
CPU; on a GPU the allocator tells the peak. Whatever else is alive is searched for and told by size, dtype and place.
"""

from __future__ import annotations

import contextlib
import gc
import resource
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpdist.gauge import Gauge, Span
from mpdist.optim import Optimizer
from mpdist.shard import Engine
from mpdist.units import format_bytes

STATES = ("parameters", "working", "gradients", "moments")
PASSING = ("activations", "logits", "comm", "gathered", "optimizer_temporaries")  # there within a window only
# What any row may be off by before it is worth a warning, whatever its stated error: bytes, and a share of the planned peak.
FLOOR, SHARE = 256 * 1024, 0.02
_UNMEASURED = {
    "snapshot": "planned only: host copies that the first save makes and the run keeps; this table leaves them out",
    "gradient_copies": "planned only: the optimizer's own copies, held between windows too; the process's peak is measured",
    "overhead": "assumed, not measured: libraries, context and the like; the process's peak is measured",
}


class Measure:
    """One rank's measuring: the first applied window (or the one numbered ``at``) is followed, where that can be done."""

    def __init__(self, engine: Engine, optimizer: Optimizer, rank: int, *, followed: bool, at: int = 1) -> None:
        """followed: whether a gauge can follow a window here. at: which applied window of the session shows all there is."""
        self.engine, self.optimizer, self.rank, self.at = engine, optimizer, rank, at
        self.followed = followed
        self.applied = 0
        self.gauge: Gauge | None = None
        self.due = True

    @contextlib.contextmanager
    def window(self, inputs: Iterable[Tensor] = ()) -> Iterator[None]:
        """Around one attempt. inputs: what the window's micro-batches consist of."""
        if not (self.due and self.followed and self.applied + 1 >= self.at):
            yield
            return
        self.gauge = Gauge()
        with self.gauge:
            for row, tensors in self._classes([]).items():
                self.gauge.name(row, tensors)
            self.gauge.name("activations", inputs)
            try:
                yield
            finally:
                self.gauge.leave()
                self.gauge = None

    def forwarded(self) -> None:
        """After a micro-batch's forward."""
        if self.gauge is not None:
            self.gauge.follow(leaf for leaf in self.engine.leaves().values() if leaf is not None)

    def take(self, gradients: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Rows of this rank: row, rank, dtype, elements, measured_bytes, and measured_peak_bytes where it was followed.

        Call after an applied step, inside `window`, the gradients still there.
        """
        self.applied += 1
        classes = self._classes(gradients)
        if self.gauge is not None:
            self.gauge.name("gradients", gradients)
        self.due = self.followed and self.gauge is None
        return self._rows(classes)

    def _classes(self, gradients: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """working: what the module computes with and no master is (16-bit copies, frozen parameters)."""
        parts, module = self.engine.parts, self.engine.module
        masters = [part.tensor for part in parts if part.trainable]
        held = {tensor.data_ptr() for tensor in masters if tensor.numel()}
        working = [part.tensor for part in parts if not part.trainable]
        known = held | {tensor.data_ptr() for tensor in working}
        for param in module.parameters():
            local = _local(param)
            if local.numel() and local.data_ptr() not in known:
                working.append(local)
        states = self.optimizer.adam.state.values()
        moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq") if key in state]
        return {
            "parameters": masters,
            "working": working,
            "gradients": list(gradients),
            "moments": moments,
            "buffers": list(module.buffers()),
        }

    def _rows(self, classes: dict[str, list[Tensor]]) -> list[dict[str, Any]]:
        strangers = self._strangers(classes)
        own = self.gauge.own_peaks() if self.gauge is not None else {}
        rows = []
        for name, tensors in classes.items():
            for number, (dtype, (elements, count)) in enumerate(sorted(_by_dtype(tensors).items())):
                row = {"row": name, "rank": self.rank, "dtype": dtype, "elements": elements, "measured_bytes": count}
                rows.append(row | ({"measured_peak_bytes": own[name][0]} if number == 0 and name in own else {}))
            if not tensors and name in own:  # there within a window only
                rows.append(self._row(name, 0) | {"measured_peak_bytes": own[name][0]})
        for name in PASSING:
            if name in own:
                size, moment = own[name]
                site = self.gauge.largest_site(name, moment) if self.gauge is not None else ""
                rows.append({"row": name, "rank": self.rank, "dtype": None, "elements": None, "measured_bytes": size,
                             "site": site})  # fmt: skip
        rows += strangers
        first = classes["parameters"][:1]
        if self.gauge is None:
            rows.append(self._row("peak", peak_bytes(first)[0]))
            return rows
        tracked = self.gauge.peak()[0]
        return [*rows, self._row("overhead", max(0, peak_bytes(first)[0] - tracked)), self._row("peak", tracked)]

    def _row(self, name: str, size: int) -> dict[str, Any]:
        return {"row": name, "rank": self.rank, "dtype": None, "elements": None, "measured_bytes": size}

    def _strangers(self, classes: dict[str, list[Tensor]]) -> list[dict[str, Any]]:
        """One row for each (dtype, place) of tensors that are alive between windows and of no class, above FLOOR bytes."""
        known = {t.untyped_storage()._cdata for tensors in classes.values() for t in tensors}
        spans = (
            {key: span for key, span in self.gauge.open().items() if span.begin > 0} if self.gauge is not None else {}
        )
        found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        alike: dict[tuple[str, str], Tensor] = {}
        seen: dict[tuple[str, str], list[Span]] = defaultdict(list)
        device = next((t.device for t in classes["parameters"]), torch.device("cpu"))
        for tensor in _all_tensors(device):
            storage = tensor.untyped_storage()
            if storage._cdata in known or not storage.nbytes():
                continue
            known.add(storage._cdata)
            span = spans.get(storage._cdata)
            if span is not None and span.row in ("comm", "gathered"):
                continue  # buffers that an engine keeps are planned in their own row
            key = str(tensor.dtype).removeprefix("torch."), span.site if span is not None else ""
            found[key][0] += storage.nbytes() // tensor.element_size()
            found[key][1] += storage.nbytes()
            alike.setdefault(key, tensor)
            if span is not None:
                seen[key].append(span)
        for key, (_, size) in found.items():
            for span in seen[key] if size > FLOOR else ():
                span.row = "unaccounted"  # and not what its place would make of it
        return [
            {"row": "unaccounted", "rank": self.rank, "dtype": dtype, "elements": elements, "measured_bytes": size,
             "cause": _likeness(elements, alike[dtype, site], classes) + (f", made at {site}" if site else "")}
            for (dtype, site), (elements, size) in sorted(found.items()) if size > FLOOR
        ]  # fmt: skip


def _local(param: nn.Parameter) -> Tensor:
    """What of a parameter is on this rank: a shard of FSDP2 or of ZeRO-3, else all of it."""
    found: Tensor = getattr(param, "_local_tensor", getattr(param, "ds_tensor", param.data))
    return found


def _all_tensors(device: torch.device) -> Iterator[Tensor]:
    """Every tensor on the device that Python code can still reach, wrappers without bytes of their own left out."""
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and not hasattr(found, "_local_tensor"):
            try:
                if found.device == device and found.layout == torch.strided:
                    yield found
            except (RuntimeError, NotImplementedError, ReferenceError):
                continue  # a wrapper that does not answer


def _likeness(elements: int, one: Tensor, classes: Mapping[str, Sequence[Tensor]]) -> str:
    """What so many elements are likely to be a copy of, told by their contents, else by their number."""
    for name in ("gradients", "parameters", "moments"):
        if any(t.shape == one.shape and t.numel() > 1 and torch.equal(t, one.to(t.dtype)) for t in classes[name]):
            return f"a copy of {name} that no row plans"
    alike = [n for n in STATES if classes[n] and sum(t.numel() for t in classes[n]) == elements]
    return f"no row plans it; as many elements as {' or '.join(alike)}" if alike else "no row plans it"


def _by_dtype(tensors: Iterable[Tensor]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for tensor in tensors:
        elements, size = found[str(tensor.dtype).removeprefix("torch.")]
        found[str(tensor.dtype).removeprefix("torch.")] = (
            elements + tensor.numel(),
            size + tensor.numel() * tensor.element_size(),
        )
    return found


def peak_bytes(tensors: Sequence[Tensor] = ()) -> tuple[int, int]:
    """(peak allocated, peak reserved) on the device; on a host the peak resident bytes twice."""
    if torch.cuda.is_available() and (not tensors or tensors[0].device.type == "cuda"):
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return resident, resident


# ---------------------------------------------------------------------------------------------- beside the plan


def beside_plan(rows: Sequence[dict[str, Any]], planned: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what the plan expected of each class and why they differ. A planned class that was not measured gets a
    row of its own with its planned peak.

    planned: row -> {"bytes": at rest, "peak": bytes, "formula": text, "error": stated relative error} of one rank, with
    "least" where the data may make it fewer; of the row `peak` the bytes without the overhead. A row that is further off
    than its error and FLOOR has ``off: true``.
    """
    totals: dict[tuple[str, int], int] = defaultdict(int)
    for row in rows:
        totals[row["row"], row["rank"]] += row["measured_bytes"]
    floor = max(FLOOR, round(SHARE * planned["peak"]["peak"]) if "peak" in planned else 0)
    result, seen = [], set()
    for row in rows:
        key = row["row"], row["rank"]
        plan = planned.get(row["row"])
        if row["row"] == "unaccounted":
            result.append({**row, "planned_bytes": 0, "off": True})
            continue
        if key in seen:
            result.append({**row, "planned_bytes": None, "cause": "in the row above"})
            continue
        seen.add(key)
        result.append(_compared(row, totals[key], plan, floor, followed=("overhead", row["rank"]) in totals))
    for rank in sorted({row["rank"] for row in rows}):
        for name, plan in planned.items():
            if (name, rank) not in seen:
                result.append({"row": name, "rank": rank, "dtype": None, "elements": None, "measured_bytes": None,
                               "planned_bytes": plan["peak"], "cause": _unmeasured(name, plan)})  # fmt: skip
    return result


def _compared(
    row: dict[str, Any], total: int, plan: Mapping[str, Any] | None, floor: int, followed: bool
) -> dict[str, Any]:
    """One class on one rank beside its plan: at rest for what stays, at its own peak for what passes."""
    name, site = row["row"], row.get("site")
    out = {k: v for k, v in row.items() if k != "site"}
    if plan is None:
        return {**out, "planned_bytes": None, "cause": "not planned"}
    process = name == "overhead" or (name == "peak" and not followed)
    expected = plan["peak"] if name in PASSING else plan["bytes"]
    expected += plan.get("overhead", 0) if process and name == "peak" else 0
    least = min(expected, plan.get("least", expected))
    gap, above, allowed = total - expected, 0, plan.get("error", 0.0)
    if "measured_peak_bytes" in row:
        out["planned_peak_bytes"] = plan["peak"]
        above = row["measured_peak_bytes"] - plan["peak"]
    fewer = name == "logits" and gap < 0  # positions without a label take nothing there; the plan counts on none
    short = least - total > allowed * least + floor and not fewer
    off = short or gap > allowed * expected + floor or above > allowed * plan["peak"] + floor
    out["planned_bytes"] = expected
    if gap == 0 and not off:
        return {**out, "cause": "as planned"}
    if process:
        return {**out, "cause": "the process as a whole is measured: interpreter, libraries and allocator included"}
    if name in STATES and not off and abs(gap) <= 0.02 * max(expected, 1) + 65536:
        return {**out, "cause": "parameters are cut where ranks do not divide them, so some hold a little more or less"}
    far = _apart(gap) if gap else f"{_apart(above)} at its own peak"
    cause = f"{far} than {plan['formula']}"
    if gap < 0 and least < expected:
        cause += f"; {least:,} bytes where each row holds one document"
    if not off:
        return {**out, "cause": cause}
    made = f"; most of it was made at {site}" if site else ""
    return {**out, "off": True, "cause": f"{cause}; stated to be good to {allowed:.0%}{made}"}


def _apart(gap: int) -> str:
    return f"{abs(gap):,} bytes {'more' if gap > 0 else 'less'}"


def _unmeasured(name: str, plan: Mapping[str, Any]) -> str:
    if not plan["peak"]:
        return "none planned"
    passing = "lives within a window only; its peak is planned, the process's peak is measured"
    resting = "planned only: no tensors of the engine or the optimizer, the process's peak is measured"
    return _UNMEASURED.get(name, resting if plan["bytes"] else passing)


def warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence for each row that is further off than it may be, of the rank where it is furthest."""
    worst: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in rows:
        if row.get("off"):
            key = row["row"], row["cause"] if row["row"] == "unaccounted" else ""
            if key not in worst or row["measured_bytes"] > worst[key]["measured_bytes"]:
                worst[key] = row
    out = []
    for (name, _), row in worst.items():
        dtype = f" of {row['dtype']}" if row["dtype"] else ""
        told = f"ledger: {name}: {format_bytes(row['measured_bytes'])}{dtype} on rank {row['rank']}"
        out.append(f"{told}, planned {format_bytes(row['planned_bytes'])}: {row['cause']}")
    return out
