"""Bytes by tensor class, measured on the live tensors of this rank, beside what was planned."""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpdist.optim import Optimizer
from mpdist.shard import Part

_PASSING = "lives within a window only; its peak is planned, the process's peak is measured"
_RESTING = "planned only: no tensors of the engine or the optimizer, the process's peak is measured"
_UNMEASURED = {  # classes that are there between windows too, and of which no tensors are looked at here
    "overhead": "assumed, not measured: libraries, context and the like; the process's peak is measured",
    "snapshot": "planned only: host copies that the first save makes and the run keeps; this table leaves them out",
    "gradient_copies": "planned only: the optimizer's own copies, held between windows too; the process's peak is measured",
}


def measure(
    parts: Sequence[Part], gradients: Sequence[Tensor], optimizer: Optimizer, module: nn.Module, rank: int
) -> list[dict[str, Any]]:
    """Rows of one rank: row, rank, dtype, elements, measured_bytes. Call after an applied step, gradients still there.

    working: parameters that the module computes with and that are no masters (ddp with 16-bit compute, or frozen).
    """
    masters = [part.tensor for part in parts if part.trainable]
    held = {tensor.data_ptr() for tensor in masters if tensor.numel()}
    working = [part.tensor for part in parts if not part.trainable]
    known = held | {tensor.data_ptr() for tensor in working}
    for param in module.parameters():
        local = getattr(param, "_local_tensor", getattr(param, "ds_tensor", param.data))  # a shard, of FSDP2 or ZeRO-3
        if local.numel() and local.data_ptr() not in known:
            working.append(local)
    moments = [state[key] for state in optimizer.adam.state.values() for key in ("exp_avg", "exp_avg_sq")]
    classes = {
        "parameters": masters,
        "working": working,
        "gradients": list(gradients),
        "moments": moments,
        "buffers": list(module.buffers()),
    }
    rows = []
    for name, tensors in classes.items():
        for dtype, (elements, count) in sorted(_by_dtype(tensors).items()):
            rows.append({"row": name, "rank": rank, "dtype": dtype, "elements": elements, "measured_bytes": count})
    rows.append(
        {"row": "peak", "rank": rank, "dtype": None, "elements": None, "measured_bytes": peak_bytes(masters)[0]}
    )
    return rows


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


def beside_plan(rows: Sequence[dict[str, Any]], planned: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what the plan expected of each class and why they differ. A planned class that has no tensors at rest
    gets a row of its own with its planned peak and nothing measured.

    planned: row -> {"bytes": at rest, "peak": bytes, "formula": text} of the plan, bytes per rank.
    """
    result = []
    totals: dict[tuple[str, int], int] = defaultdict(int)
    for row in rows:
        totals[row["row"], row["rank"]] += row["measured_bytes"]
    seen = set()
    for row in rows:
        plan = planned.get(row["row"])
        first = (row["row"], row["rank"]) not in seen
        seen.add((row["row"], row["rank"]))
        expected = None if plan is None or not first else plan["peak" if row["row"] == "peak" else "bytes"]
        result.append({**row, "planned_bytes": expected, "cause": _cause(row, totals, expected, plan)})
    for rank in sorted({row["rank"] for row in rows}):
        for name, plan in planned.items():
            if (name, rank) not in seen:
                empty = {"row": name, "rank": rank, "dtype": None, "elements": None, "measured_bytes": None}
                cause = (
                    _UNMEASURED.get(name, _RESTING if plan["bytes"] else _PASSING) if plan["peak"] else "none planned"
                )
                result.append({**empty, "planned_bytes": plan["peak"], "cause": cause})
    return result


def _cause(row: dict[str, Any], totals: Mapping[Any, int], expected: int | None, plan: Mapping[str, Any] | None) -> str:
    if expected is None:
        return "not planned" if plan is None else "in the row above"
    gap = totals[row["row"], row["rank"]] - expected
    if gap == 0:
        return "as planned"
    if row["row"] == "peak":
        return "the process as a whole is measured: interpreter, libraries and allocator included"
    if row["row"] in ("parameters", "working", "gradients", "moments") and abs(gap) <= 0.02 * max(expected, 1) + 65536:
        return "parameters are cut where ranks do not divide them, so some hold a little more or less"
    return f"{gap:+d} bytes against {plan['formula']}" if plan else ""
