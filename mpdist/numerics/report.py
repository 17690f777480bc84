"""What `mpdist numerics lab` prints, and its machine-readable form."""

from __future__ import annotations

from typing import Any

from mpdist.numerics.lab import EARLY, STEPS, Lab, right_half_rule

_LESSONS = (
    "With an FP32 master every 16-bit regime ends within about 2 % of the FP32 run's excess loss; without one both freeze:",
    "every nonzero update is lost. The scale recovers underflow until the weight gradient, not the activation gradient,",
    "overflows first. An FP16 accumulator fails on range as well as on precision.",
)


def as_json(lab: Lab) -> dict[str, Any]:
    return {
        "checks": lab.checks,
        "data": {
            "train_share": float(lab.data.y.mean()), "test_share": float(lab.data.test_y.mean()),
            "rule_accuracy": right_half_rule(lab.data), "optimum": lab.data.optimum, "step": lab.data.step,
        },
        "regimes": [
            {"regime": name, "excess": t.excess, "accuracy": t.accuracy, "lost": t.lost, "skipped": t.skipped, "scale": t.scale}
            for name, t in lab.trained.items()
        ],
        "casts": {
            str(step): {"smallest": low, "largest": high, "rows": [cast._asdict() for cast in rows]}
            for step, (rows, low, high) in lab.casts.items()
        },
        "sums": [entry._asdict() for entry in lab.sums],
    }  # fmt: skip


def text(lab: Lab) -> str:
    found = as_json(lab)
    lines = [
        "rounding",
        f"  against NumPy's float16 on {lab.checks['values']:,} values: {lab.checks['mismatches']} mismatches",
    ]
    lines += [f"  FP16: {term} -> {value!r}" for term, value in lab.checks["fp16"].items()]
    lines += [f"  FP32: 1 + 2^-12 -> {lab.checks['fp32']:.7f}", "", "data"]
    data = found["data"]
    lines.append(f"  class-1 share {data['train_share']:.3f} (train), {data['test_share']:.3f} (test); "
                 f"the rule 'right half brighter' is right on {data['rule_accuracy']:.4f}")  # fmt: skip
    lines.append(f"  optimum {data['optimum']:.6f}, step size {data['step']:.4f}, {STEPS:,} steps")
    lines += [
        "",
        f"{'training regime':32} {'excess loss':>12} {'accuracy':>9} {'lost':>6} {'skipped':>8} {'final S':>8}",
    ]
    lines += [f"{r['regime']:32} {r['excess']:12.3e} {r['accuracy']:9.4f} {r['lost']:6.3f} {r['skipped']:8d} {r['scale']:8g}"
              for r in found["regimes"]]  # fmt: skip
    for step in (EARLY, STEPS):
        part = found["casts"][str(step)]
        lines += ["", f"activation gradients after {step:,} steps, |dz| from {part['smallest']:.1e} to {part['largest']:.1e}",
                  f"{'format, scale':20} {'zero':>7} {'inf':>7} {'relative error':>15}"]  # fmt: skip
        lines += [
            f"{row['name']:20} {row['zero']:7.4f} {row['infinite']:7.4f} {row['error']:15.2e}" for row in part["rows"]
        ]
    lines += ["", f"{'accumulated in':22} {'exact':>12} {'one after another':>28} {'in pairs':>28}"]
    lines += [_sum(row) for row in found["sums"]]
    if not lab.has_picture:
        lines.append("scikit-image is not installed, so its picture was not summed: pip install 'mpdist[lab]'")
    return "\n".join([*lines, "", *_LESSONS])


def _sum(row: dict[str, Any]) -> str:
    def shown(value: float | None, error: float) -> str:
        return f"rel. {error:.2e}" if value is None else f"{value:.4f} (rel. {error:.2e})"

    exact = "" if row["exact"] is None else f"{row['exact']:.4f}"
    first, second = (shown(row[way], row[f"{way}_error"]) for way in ("sequential", "pairwise"))
    return f"{row['name']:22} {exact:>12} {first:>28} {second:>28}"
