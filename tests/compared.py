"""Runs that were never made, for comparisons: the records that a run leaves, with measured noise in them.

`noise()` holds what real runs of tests/tiny.py measured here (`python tests/compared.py FOLDER` makes the file anew from such
runs): microseconds a token of each step, and how far the training loss of a BF16 run is from its FP32 twin's.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpdist.compare.analyse import analyse
from mpdist.compare.tree import Comparison, Run
from mpdist.config import leaves, load
from mpdist.record import read_metrics

FILE = Path(__file__).parent / "compared.json"
LABELS, TOKENS, SLOTS = 480, 500, 512  # of a step
CONFIG: dict[str, Any] = {
    "name": "run",
    "model": {"config": {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260}},
    "data": {"tokenizer": "bytes", "train": [{"path": "train.jsonl"}], "eval": [{"path": "eval.jsonl"}], "seq_len": 64},
    "batch": {"micro": 2, "global": 8},
    "precision": {"compute": "fp32"},
    "shard": {"engine": "fsdp2"},
    "optim": {"lr": 1e-3, "schedule": "linear", "warmup": 0},
    "budget": {"steps": 150},
    "eval": {"every": 15, "rows": 32},
    "track": {"every": 1, "wandb": {"mode": "disabled"}},
}  # fmt: skip
ENV: dict[str, Any] = {
    "session": 1, "host": "node1", "cpu": "a CPU", "cores": 2, "python": "3.11.7", "memory_bytes": 2**35,
    "versions": {"mpdist": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"}, "device": "cpu", "devices": ["cpu"], "backend": "gloo",
    "threads": 1, "attention": "sdpa", "loss": "chunked head", "tf32": False, "deterministic": True, "ranks": 1, "nodes": 1,
    "data": {"train": "d1", "eval": "e1"}, "variables": ["OMP_NUM_THREADS"], "model_flops_per_token": 185088.0,
}  # fmt: skip


@functools.cache
def noise() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


@functools.cache
def _resolved(overrides: tuple[str, ...] = ()) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(CONFIG))
        return load(path, overrides)


def curve(steps: int) -> np.ndarray:
    """A training loss that falls as a real one does."""
    return 1.9 + 3.6 / (1 + np.arange(1, steps + 1) / 40)


@dataclass
class Made:
    """One run. settings: overrides of the configuration, as on the command line. step_s, losses: of each step.

    residual: added to the losses. skips: (attempt, reason) of windows that were not applied.
    """

    name: str
    seed: int = 0
    steps: int = 150
    settings: tuple[str, ...] = ()
    step_s: Sequence[float] | None = None
    losses: Sequence[float] | None = None
    residual: Sequence[float] | None = None
    every: int = 1
    eval_every: int = 15
    eval_s: float = 0.5
    skips: Sequence[tuple[int, str]] = ()
    scale: float = 1.0
    env: dict[str, Any] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    masters: str = "float32"

    def values(self) -> dict[str, Any]:
        return dict(leaves(self.config().values()))

    def config(self) -> Any:
        return _resolved((*self.settings, f"seed={self.seed}", f"name={self.name}"))

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Train rows, and behind each evaluated step its evaluation's."""
        losses = np.asarray(curve(self.steps) if self.losses is None else self.losses[: self.steps], dtype=float)
        losses = losses + np.asarray(np.zeros(self.steps) if self.residual is None else self.residual[: self.steps])
        times = np.asarray(np.full(self.steps, 0.05) if self.step_s is None else self.step_s[: self.steps])
        skipped = sorted(attempt for attempt, _ in self.skips)
        found, attempt, paused, done = [], 0, 0.0, 0.0
        scale, last = self.scale, 0
        for step in range(1, self.steps + 1):
            attempt += 1
            while attempt in skipped:
                attempt, done, scale = attempt + 1, done + float(times[step - 1]), scale / 2
            done += float(times[step - 1])
            common = {
                "step": step, "attempt": attempt, "session": 1, "train/label_tokens": LABELS * step, "train/tokens": TOKENS * step,
                "time/train_s": done, "time/lost_s": 0.0,
            }  # fmt: skip
            if step % self.every == 0 or step == self.steps:
                found.append({
                    "kind": "train", **common, "train/loss": float(losses[step - 1]), "train/lr": 1e-3, "train/grad_norm": 1.7,
                    "train/slots": SLOTS * step, "scale/value": scale, "scale/skipped": attempt - step, "wire/grad_bytes": 0,
                    "mem/peak_allocated_bytes": 2**28, "mem/peak_reserved_bytes": 2**28, "time/total_s": done + paused + 1.0,
                    "speed/tokens_per_s": TOKENS * (step - last) / float(times[last:step].sum()), **self.row,
                })  # fmt: skip
                last = step
            if self.eval_every and (step % self.eval_every == 0 or step == self.steps):
                paused += self.eval_s
                found.append({"kind": "eval", **common, "eval/loss": float(losses[step - 1]) + 0.02, "eval/label_tokens": 2000,
                              "eval/perplexity": float(np.exp(losses[step - 1] + 0.02)), "time/total_s": done + paused + 1.0})  # fmt: skip
        return found

    def events(self) -> list[dict[str, Any]]:
        found, scale, skipped = (
            [{"event": "start", "step": 0, "attempt": 0, "rank": 0, "reason": "new", "session": 1}],
            self.scale,
            0,
        )
        for attempt, reason in sorted(self.skips):
            after = scale / 2 if reason == "non-finite gradients" else scale
            found.append({"event": "skip", "step": attempt - 1 - skipped, "attempt": attempt, "rank": 0, "reason": reason, "scale": scale,
                          "scale_after": after, "window": attempt - 1 - skipped, "session": 1})  # fmt: skip
            scale, skipped = after, skipped + 1
        return found

    def parts(self) -> dict[str, Any]:
        """status, plan, ledger and env as they stand in the run's files."""
        rows = [row for row in self.rows if row["kind"] == "train"]
        evals = sum(row["kind"] == "eval" for row in self.rows)
        time = {"train": rows[-1]["time/train_s"], "eval": evals * self.eval_s, "save": 0.1, "load": 0.5, "compile": 0.0, "data": 0.1,
                "start": 0.5, "lost": 0.0, "gap": 0.0}  # fmt: skip
        status = {
            "state": "done",
            "step": self.steps,
            "attempt": rows[-1]["attempt"],
            "exit": 0,
            "reason": "",
            "time": time,
        }
        plan = {
            "horizon": self.steps,
            "batch": {"micro": 2, "accumulation": 4, "ranks": 1, "global": 8, "tokens_per_step": 512},
        }
        ledger = [{"row": row, "rank": 0, "dtype": dtype, "elements": 100, "measured_bytes": 400} for row, dtype in
                  (("parameters", self.masters), ("gradients", "float32"), ("moments", self.masters), ("buffers", "float32"))]  # fmt: skip
        env = {**copy.deepcopy(ENV), "initial_weights": f"w{self.seed}", "order": f"o{self.seed}", **self.env}
        return {
            "status": {**status, **self.status},
            "plan": plan,
            "ledger": ledger,
            "env": {k: v for k, v in env.items() if v is not None},
        }

    def run(self) -> Run:
        """As read from files, without writing any."""
        rows, parts = self.rows, self.parts()
        return Run(
            path=Path("/runs") / self.name, values=self.values(), events=tuple(self.events()),
            train=tuple(row for row in rows if row["kind"] == "train"), evals=tuple(row for row in rows if row["kind"] == "eval"),
            status=parts["status"], plan=parts["plan"], ledger=tuple(parts["ledger"]), envs=(parts["env"],),
        )  # fmt: skip

    def write(self, folder: Path) -> Path:
        path = folder / self.name
        (path / "sessions" / "0001").mkdir(parents=True)
        parts = self.parts()
        (path / "config.yaml").write_text(self.config().to_yaml())
        (path / "metrics.jsonl").write_text("".join(json.dumps(_plain(row)) + "\n" for row in self.rows))
        (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in self.events()))
        (path / "ledger.json").write_text(json.dumps({"rows": parts["ledger"]}))
        for name in ("status", "plan"):
            (path / f"{name}.json").write_text(json.dumps(parts[name]))
        (path / "sessions" / "0001" / "env.json").write_text(json.dumps(parts["env"]))
        return path


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: "nan" if value != value else value for key, value in row.items()}


# -- noise -------------------------------------------------------------------------------------------------------------


def step_times(
    draw: np.random.Generator, steps: int, kind: str = "moderate", block: int = 10, mixed: bool = True
) -> np.ndarray:
    """Seconds of each step, in blocks of consecutive steps of real runs, so that what disturbs one disturbs its neighbours.

    mixed: blocks of all runs, as a run sees that outlasts any disturbance; else of one, whose mood is then this run's.
    """
    pool = [np.asarray(one) for one in noise()[kind]]
    pool = pool if mixed else [pool[draw.integers(len(pool))]]
    found: list[float] = []
    while len(found) < steps:
        one = pool[draw.integers(len(pool))]
        at = draw.integers(len(one) - block + 1)
        found += list(one[at : at + block])
    return np.asarray(found[:steps]) * TOKENS * 1e-6


def residuals(draw: np.random.Generator, count: int, steps: int) -> list[np.ndarray]:
    """What rounding does to the losses of runs that are otherwise alike: curves without a mean over runs, of either sign.

    The first loss is of the initial weights, and the same.
    """
    curves = np.asarray(noise()["residual"])
    curves = curves - curves.mean(axis=0)
    chosen = draw.choice(len(curves), count, replace=False)
    return [_stretched(curves[i], steps) * draw.choice((-1.0, 1.0)) * (np.arange(steps) > 0) for i in chosen]


def compared_arms(steps: int = 300, seeds: int = 3, **asked: Any) -> Comparison:
    """FP32, BF16 twice as fast, FP16 with a scale that finds its place, and FP32 again as the control."""
    draw, made = np.random.default_rng(0), []
    apart = [residuals(draw, seeds, steps) for _ in range(3)]
    skips = [(1, "non-finite gradients"), (2, "non-finite gradients")]
    arms = (("fp32", (), 1.0, None), ("bf16", ("precision.compute=bf16",), 0.5, 0),
            ("fp16", ("precision.compute=fp16",), 0.6, 1), ("fp32-control", (), 1.0, 2))  # fmt: skip
    for seed in range(seeds):
        for name, settings, factor, other in arms:
            scaled = {"scale": 65536.0, "skips": [*skips, (170 + seed, skips[0][1])]} if name == "fp16" else {}
            made.append(Made(
                f"{name}-seed{seed}", seed, steps, settings, step_times(draw, steps) * factor, loss_of(seed, steps),
                None if other is None else apart[other][seed], eval_every=30, **scaled,
            ))  # fmt: skip
    return analyse([one.run() for one in made], None, against="fp32", **asked)


def lines(report: str, beginning: str) -> list[str]:
    """Those of a report that begin with this pattern and a blank, as they are printed."""
    return [line.strip() for line in report.splitlines() if re.match(f"({beginning}) ", line.strip())]


def loss_of(seed: int, steps: int) -> np.ndarray:
    found = noise()["loss"]
    return _stretched(np.asarray(found[seed % len(found)]), steps)


def _stretched(curve: np.ndarray, steps: int) -> np.ndarray:
    return np.interp(np.linspace(0, len(curve) - 1, steps), np.arange(len(curve)), curve)


def _measured(folder: Path) -> tuple[list[float], list[float]]:
    rows = [row for row in read_metrics(folder) if row["kind"] == "train"]
    seconds, tokens = (np.array([row[key] for row in rows]) for key in ("time/train_s", "train/tokens"))
    return [float(f"{value:.4g}") for value in (np.diff(seconds) / np.diff(tokens))[2:] * 1e6], [
        row["train/loss"] for row in rows
    ]


def main(folder: Path, out: Path = FILE) -> None:
    """folder: with runs fp32-seedK and bf16-seedK in `pairs/` and others, for their times, in `moderate/` and `heavy/`."""
    found: dict[str, Any] = {
        kind: [_measured(run)[0] for run in sorted((folder / kind).iterdir())] for kind in ("moderate", "heavy")
    }
    full = [_measured(run)[1] for run in sorted((folder / "pairs").glob("fp32-seed*"))]
    half = [_measured(run)[1] for run in sorted((folder / "pairs").glob("bf16-seed*"))]
    found["loss"] = [[float(f"{value:.6g}") for value in one] for one in full]
    found["residual"] = [
        [float(f"{b - a:.4g}") for a, b in zip(one, two, strict=True)] for one, two in zip(full, half, strict=True)
    ]
    out.write_text(
        "{\n"
        + ",\n".join(f'"{key}": {json.dumps(value, separators=(",", ":"))}' for key, value in found.items())
        + "\n}\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
