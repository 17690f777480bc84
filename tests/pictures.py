"""A plan's picture with everything on it, in numbers that are easy to follow."""

from __future__ import annotations

from typing import Any

from mpdist.plan_html import Choice, TableRow, TrafficRow, View

GIB = 2**30
ALWAYS = {"parameters": 4 * GIB, "moments": 8 * GIB, "buffers": 512, "overhead": 2 * GIB}
CURVE = [
    ("rest", dict(ALWAYS)),
    ("forward", ALWAYS | {"working": 3 * GIB, "gathered": GIB, "gradients": 4 * GIB, "activations": 14 * GIB}),
    ("the loss", ALWAYS | {"working": 3 * GIB, "gradients": 4 * GIB, "activations": 27 * GIB, "logits": 3 * GIB}),
    ("the start of backward", ALWAYS | {"working": 3 * GIB, "gradients": 4 * GIB, "activations": 27 * GIB, "logits": 2 * GIB}),
    ("the last block's reduction", ALWAYS | {"gradients": 4 * GIB, "activations": 26 * GIB, "comm": GIB}),
    ("the end of backward", ALWAYS | {"gradients": 4 * GIB, "comm": 6 * GIB}),
    ("the optimizer's step", ALWAYS | {"gradients": 4 * GIB, "optimizer_temporaries": GIB // 4}),
]  # fmt: skip
PEAK = 51 * GIB + 512


def view(**changes: Any) -> View:
    peak = dict(CURVE[2][1])
    larger = peak | {"parameters": 32 * GIB, "moments": 64 * GIB}
    smaller = peak | {"activations": GIB}
    rest = {"parameters": 4 * GIB, "moments": 8 * GIB, "gradients": 4 * GIB, "buffers": 512, "overhead": 2 * GIB}
    own = {row: max(held.get(row, 0) for _, held in CURVE) for row in {r: 0 for _, held in CURVE for r in held}}
    rows = [
        TableRow(row, rest.get(row, 0), most, peak.get(row, 0), f"a formula of {row}, with <marks> & more")
        for row, most in own.items()
    ]
    rows.append(
        TableRow("snapshot", 12 * GIB, 12 * GIB, 0, "4 B x 8030261248 / 8 ranks + 2 x 4 B x 8030261248 / 8 ranks")
    )
    values: dict[str, Any] = {
        "title": "Memory plan: 8 ranks",
        "subtitle": ["8,030,261,248 parameters; llama", "8 ranks on 1 node, GPUs; fsdp2 stage 3", "64 sequences a step"],
        "curve": CURVE,
        "candidates": [
            Choice("as configured", peak, PEAK, True, "sends 405.11 GiB a step; recomputes nothing"),
            Choice("memory.checkpointing=full", smaller, PEAK - 26 * GIB, True, "recomputes 74% of forward"),
            Choice(
                'shard.engine=ddp shard.replicas=1 "memory.checkpointing=every 3" reduce.when=last', larger,
                PEAK + 84 * GIB, False, "sends 418.81 GiB a step, 23.41 GiB of it between nodes; recomputes 24% of forward; "
                "89.75 GiB on the host; less to spare than the plan may be off by",
            ),
        ],
        "rows": rows,
        "traffic": [TrafficRow("gradients, reduce-scatter", "fp32", 8, 120 * GIB, 105 * GIB, GIB, "(n-1)/n x 30 GiB")],
        "footnotes": ["Planned by a closed formula.", "1 GiB = 2^30 bytes."],
        "memory_bytes": 80 * GIB,
        "host": frozenset({"snapshot"}),
    }  # fmt: skip
    return View(**{**values, **changes})
