"""A run directory with telemetry by layer, in numbers that are easy to follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYERS = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "model.norm", "lm_head"]


def run_with_telemetry(folder: Path, steps: int, layers: list[str] | None = None) -> Path:
    """`steps` logged steps, every tenth; an event of a scale at its floor, and a skip at 8192."""
    names = LAYERS if layers is None else layers
    (folder / "sessions" / "0001").mkdir(parents=True)
    (folder / "sessions" / "0001" / "env.json").write_text(json.dumps({"layers": names}))
    lines = []
    for n in range(1, steps + 1):
        by_layer: dict[str, list[Any]] = {
            "grad_norm": [1.0 / n / (i + 1) for i in range(len(names))],
            "weight_norm": [10.0 + i for i in range(len(names))],
            "update_ratio": [1e-3 / n * (i + 1) for i in range(len(names))],
            "unchanged_working": [None, *(0.1 * (i % 9) + 0.01 * n for i in range(len(names) - 1))],
            "unchanged_master": [0.0] * len(names),
            "grad_flushed": [0.0] * len(names),
            "grad_subnormal": [0.01 * i for i in range(len(names))],
            "headroom_overflow": [5.0 + i - 0.1 * n for i in range(len(names))],
            "headroom_underflow": [float(10 - i % 12) for i in range(len(names))],
        }
        totals = {f"precision/{key}": max(v for v in values if v is not None) for key, values in by_layer.items()}
        lines.append({"kind": "train", "step": 10 * n, "attempt": 10 * n + 1, "session": 1, "train/loss": 2.0, "scale/value": 4096.0,
                      "scale/skipped": 1, **totals, "precision/headroom_overflow": 5.0, "precision/by_layer": by_layer})  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [
        {
            "event": "skip",
            "step": 0,
            "attempt": 1,
            "rank": 0,
            "reason": "non-finite gradients",
            "scale": 8192.0,
            "scale_after": 4096.0,
        },
        {
            "event": "warning",
            "step": 3,
            "attempt": 4,
            "rank": 0,
            "reason": "scale at its floor: <1>; it falls no further",
            "check": "scale at its floor",
        },
        {"event": "warning", "step": 3, "attempt": 4, "rank": 0, "reason": "of something else"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder
