"""Whether the plan holds: bytes foreseen by formula, foreseen by simulation, and tracked in real runs, side by side.

`python tests/planned.py` trains each of CASES for a few steps on gloo ranks, reads the tracked peak from the run's own
`ledger.json` and the planned one from its `plan.json`, plays the same configuration on fake tensors, prints the table, writes it
into the README, and fails where a bound does not hold. Words after it choose the cases whose names hold one of them; the README
is then left alone.
"""

from __future__ import annotations

import re
import statistics
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny

README = Path(__file__).resolve().parents[1] / "README.md"
MEDIAN, WORST, SIMULATED = (
    0.03,
    0.08,
    0.01,
)  # the largest errors: of the formula over all cases, of each, of the simulation
MIB = 2**20

SHAPE: dict[str, Any] = tiny.LLAMA | {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 4096, "max_position_embeddings": 512,
}  # fmt: skip
_COMMON = {"vocab_size": 4096, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
GPT2: dict[str, Any] = _COMMON | {"model_type": "gpt2", "n_embd": 256, "n_layer": 6, "n_head": 8, "n_positions": 512}
QWEN3: dict[str, Any] = SHAPE | {"model_type": "qwen3", "head_dim": 48, "tie_word_embeddings": True}
GEMMA3: dict[str, Any] = SHAPE | {"model_type": "gemma3_text", "head_dim": 32, "tie_word_embeddings": True}
ODD = {"vocab_size": 4099}
TIED = {"tie_word_embeddings": True}


@dataclass(frozen=True)
class Case:
    """name: as the table has it. set: dotted keys of the configuration. model: changes of SHAPE, or a whole shape."""

    name: str
    ranks: int
    set: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    micros: int = 1

    def keys(self) -> dict[str, Any]:
        engine, _, stage = self.name.split(",")[0].partition(" ")
        rows = 4 * self.ranks * self.micros
        found: dict[str, Any] = {
            "shard__engine": {"zero": "deepspeed"}.get(engine, engine),
            "precision__compute": "bf16",
            "model": {"config": self.model if "model_type" in self.model else SHAPE | self.model, "attention": "sdpa"},
            "data__seq_len": 256,
            "data__packing": "none",
            "batch": {"micro": 4, "global": rows},
            "budget__steps": 3,
        }
        if engine != "ddp":
            found["shard__stage"] = int(stage[0])
        return found | {key.replace(".", "__"): value for key, value in self.set.items()}


FP32, FP16 = {"precision.compute": "fp32"}, {"precision.compute": "fp16"}
WIRE, LAST = {"reduce.wire": "bf16"}, {"reduce.when": "last"}
FULL, SELECTIVE = {"memory.checkpointing": "full"}, {"memory.checkpointing": "selective"}
CASES = [
    Case("ddp, FP32", 1, FP32),
    Case("ddp, BF16, checkpointing full", 1, FULL),
    Case("fsdp2 3, BF16, selective, chunks of 100", 1, SELECTIVE | {"memory.loss_chunk": 100}),
    Case("ddp, BF16 wire", 2, WIRE, micros=2),
    Case("ddp, FP32, tied", 2, FP32, TIED),
    Case("ddp, GPT-2 without dropout, once a window", 2, LAST,
         GPT2 | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, 2),
    Case("fsdp2 3, FP32", 2, FP32),
    Case("fsdp2 3, BF16 wire, full, odd vocabulary", 2, WIRE | FULL, ODD, 2),
    Case("fsdp2 2, once a window", 2, LAST, micros=2),
    Case("fsdp2 3, FP16, selective, packed", 2, FP16 | SELECTIVE | {"data.packing": "concat"}),
    Case("fsdp2 3, every 2, chunks of 300, tied", 2, {"memory.checkpointing": "every 2", "memory.loss_chunk": 300}, TIED),
    Case("fsdp2 3, eager attention, Qwen3", 2, {"model.attention": "eager"}, QWEN3),
    Case("zero 1, BF16", 2, {}),
    Case("zero 2, BF16 wire", 2, WIRE, micros=2),
    Case("zero 3, full", 2, FULL),
    Case("ddp, BF16, packed", 4, {"data.packing": "concat"}, micros=2),
    Case("fsdp2 3, two replicas, BF16 wire", 4, WIRE | {"shard.replicas": 2}, micros=2),
    Case("fsdp2 3, Gemma 3, full", 4, FULL, GEMMA3),
    Case("fsdp2 2, FP32, frozen embedding", 4, FP32 | {"model.freeze": ["model.embed_tokens.*"]}),
    Case("zero 3, FP32, selective, odd vocabulary", 4, FP32 | SELECTIVE, ODD),
]  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Bytes of the rank that holds the most, without the overhead that no tensor is."""

    planned: int
    simulated: int | None
    tracked: int

    @property
    def formula_error(self) -> float:
        return self.planned / self.tracked - 1

    @property
    def simulation_error(self) -> float | None:
        return None if self.simulated is None else self.simulated / self.tracked - 1


def found(case: Case) -> Found:
    """Trains the case and plays it."""
    folder = tiny.fresh()
    tiny.write_text(folder / "train.jsonl", 40 * case.ranks, longest=600)
    run = tiny.train(folder, case.ranks, timeout=600, **case.keys())
    if run.status:
        raise SystemExit(f"{case.name}: {run.message}")
    rows = [row for row in run.ledger() if row["row"] == "peak"]
    return Found(
        rows[0]["planned_bytes"], simulated(folder / "config.yaml", case.ranks), max(r["measured_bytes"] for r in rows)
    )


def simulated(config: Path, ranks: int) -> int | None:
    """The simulation's peak; None for DeepSpeed, which cannot be played."""
    from mpdist.config import load
    from mpdist.plan import asked_of
    from mpdist.simulate import simulate

    cfg = load(config, []).config
    asked = asked_of(cfg, ranks, 1, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return None if asked.engine == "deepspeed" else simulate(cfg, asked).peak


def table(results: dict[str, tuple[int, Found]]) -> list[str]:
    lines = ["| ranks | configuration | tracked MiB | formula | simulation |", "| --- | --- | ---: | ---: | ---: |"]
    for name, (ranks, f) in results.items():
        played = "" if f.simulation_error is None else f"{f.simulation_error:+.2%}"
        lines.append(f"| {ranks} | {name} | {f.tracked / MIB:.1f} | {f.formula_error:+.1%} | {played} |")
    return lines


def verdict(results: dict[str, tuple[int, Found]]) -> tuple[str, list[str]]:
    """(one line of figures, what does not hold)."""
    errors = {name: abs(f.formula_error) for name, (_, f) in results.items()}
    played = {name: abs(e) for name, (_, f) in results.items() if (e := f.simulation_error) is not None}
    wrong = [f"{name}: formula off by {e:.1%}" for name, e in errors.items() if e > WORST]
    wrong += [f"{name}: simulation off by {e:.2%}" for name, e in played.items() if e > SIMULATED]
    median = statistics.median(errors.values())
    if median > MEDIAN:
        wrong.append(f"the formula's median error is {median:.1%}")
    worst = max(played.values(), default=0.0)
    return (
        f"Formula: median error {median:.1%}, worst {max(errors.values()):.1%}. Simulation: worst {worst:.2%}.",
        wrong,
    )


def main(words: list[str]) -> int:
    chosen = [case for case in CASES if not words or any(word in case.name for word in words)]
    results = {}
    for case in chosen:
        results[case.name] = case.ranks, found(case)
        print(table({case.name: results[case.name]})[-1], flush=True)
    line, wrong = verdict(results)
    print(f"\n{line}")
    if not words:
        begin, end = "<!-- begin planned -->", "<!-- end planned -->"
        text = "\n".join([begin, "", *table(results), "", line, "", end])
        README.write_text(re.sub(f"{begin}.*?{end}", lambda _: text, README.read_text(), flags=re.DOTALL))
    for problem in wrong:
        print(problem, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
