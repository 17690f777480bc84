"""The closed formula against a simulation for the published shapes of ten families and more, on eight ranks in BF16."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mpdist import arch, plan, simulate
from mpdist.config import load
from mpdist.plan_memory import ledger_of

SHAPES = Path(__file__).resolve().parents[1] / "shapes"
CASES = [  # shape, tokens in a row, checkpointing
    ("llama-3.1-8b", 4096, "selective"),
    ("mistral-7b-v0.1", 4096, "full"),
    ("qwen3-8b", 4096, "none"),
    ("gemma-2-9b", 1024, "full"),
    ("phi-3-mini", 4096, "full"),
    ("phi-2", 2048, "none"),
    ("mixtral-8x7b", 4096, "selective"),
    ("gpt2", 1024, "none"),
    ("pythia-1.4b", 2048, "selective"),
    ("opt-1.3b", 2048, "full"),
]
MORE = [
    ("gemma-7b", 2048, "selective"),
    ("qwen3-30b-a3b", 2048, "full"),
    ("olmo-2-7b", 4096, "none"),
    ("granite-3.1-8b", 2048, "full"),
    ("qwen1.5-moe-a2.7b", 4096, "selective"),
]


@pytest.mark.parametrize(
    ("name", "tokens", "checkpointing"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_the_formula_is_what_a_simulation_finds(
    name: str, tokens: int, checkpointing: str, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    config = json.loads((SHAPES / f"{name}.json").read_text())
    file = tmp_path / "run.yaml"
    file.write_text(
        f"name: t\nmodel: {{config: {json.dumps(config)}}}\nmemory: {{checkpointing: {checkpointing}}}\nlaunch: {{device: cpu}}\n"
        f"data: {{train: [{{path: x.jsonl}}], seq_len: {tokens}, packing: none, tokenizer: bytes}}\n"
        "batch: {micro: 1, global: 8}\nbudget: {steps: 10}\n"
    )
    cfg = load(file, []).config
    asked = plan.asked_of(cfg, 8, 1)
    shape = arch.look(None, config)
    assert isinstance(shape, arch.Arch)
    found = ledger_of(asked, shape)
    overhead = next(row.at_peak_bytes for row in found.rows if row.row == "overhead")
    simulated = simulate.simulate(cfg, asked)
    formula = found.peak_bytes - overhead
    off = formula / simulated.peak - 1
    figure(f"formula {formula / 2**30:.2f} GiB, simulation {simulated.peak / 2**30:.2f} GiB, {off:+.2%}")
    assert formula == pytest.approx(simulated.peak, rel=0.05)
    for moment, held in simulated.parts.items():
        assert sum(dict(found.moments)[moment].values()) == pytest.approx(
            sum(held.values()) + overhead + dict(found.moments)[moment].get("snapshot", 0), rel=0.05
        ), moment
