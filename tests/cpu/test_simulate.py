"""The plan played on fake tensors: against the figures found by running, against itself at full depth, and what it refuses."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mpdist import model, plan, simulate
from mpdist.config import Config, load
from mpdist.errors import UsageError
from mpdist.plan_memory import Asked
from mpdist.simulate import Simulated

GIB = 2**30
SHAPES = Path(__file__).resolve().parents[1] / "shapes"
LLAMA = SHAPES / "llama-3.1-8b.json"
DEEP = """{model_type: llama, hidden_size: 128, intermediate_size: 352, num_hidden_layers: 13, num_attention_heads: 4,
  num_key_value_heads: 2, vocab_size: 1000, max_position_embeddings: 256}"""
SMALL = DEEP.replace("num_hidden_layers: 13", "num_hidden_layers: 2")


def configured(
    tmp_path: Path, shape: str, ranks: int, *overrides: str, nodes: int = 1, seq: int = 4096
) -> tuple[Config, Asked]:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"name: t\nmodel: {{config: {shape}}}\ndata: {{train: [{{path: x.jsonl}}], seq_len: {seq}, packing: none, tokenizer: bytes}}\n"
        f"batch: {{micro: 1, global: {ranks}}}\nbudget: {{steps: 10}}\n"
    )
    cfg = load(file, list(overrides)).config
    return cfg, plan.asked_of(cfg, ranks // nodes, nodes)


def played(tmp_path: Path, shape: str, ranks: int, *overrides: str, every_layer: bool = False, **more: Any) -> Simulated:  # fmt: skip
    return simulate.simulate(*configured(tmp_path, shape, ranks, *overrides, **more), every_layer=every_layer)


def stock_loss(built: Any, rows: Any) -> str:
    """The loss that transformers computes by itself, over all logits at once in FP32."""
    own = functools.partial(type(built).forward, built)

    def forward(self: Any, input_ids: Any, position_ids: Any, index: Any, targets: Any, factor: Any) -> Any:
        out = own(input_ids=input_ids, position_ids=position_ids, use_cache=False, labels=input_ids)
        return out.loss * factor, out.loss.detach(), None

    built.forward = types.MethodType(forward, built)
    return "stock"


# Found by running Llama-3.1-8B at 8 ranks, 1 x 4096, BF16 compute, with torch's FSDPMemTracker and transformers' own loss.
FOUND = {"none": 44.1, "selective": 26.3, "full": 20.6}


@pytest.mark.parametrize("mode", FOUND)
def test_llama_8b_is_what_torchs_own_tracker_found(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str], None]
) -> None:
    monkeypatch.setattr(model, "give_loss", stock_loss)
    found = played(tmp_path, LLAMA.read_text(), 8, f"memory.checkpointing={mode}")
    figure(f"checkpointing {mode}: {found.peak / GIB:.2f} GiB simulated, {FOUND[mode]} found by torch's tracker")
    assert found.peak / GIB == pytest.approx(FOUND[mode], rel=0.03)


def test_a_few_blocks_foretell_all_of_them(tmp_path: Path) -> None:
    """In groups of three, the last of them not full; `full` and `none` are foretold for Llama-3.1-8B above."""
    some, every = (
        played(tmp_path, DEEP, 4, "memory.checkpointing=every 3", seq=256, every_layer=whole) for whole in (False, True)
    )
    assert (len(some.played), some.layers, every.played) == (2, 13, (13,))
    assert some.parts.keys() == every.parts.keys()
    for part in some.parts:
        assert sum(some.parts[part].values()) == pytest.approx(sum(every.parts[part].values()), rel=0.005), part


def test_a_pattern_of_layers_is_kept_whole(tmp_path: Path) -> None:
    shape = (
        "{model_type: gemma3_text, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 26, num_attention_heads: 4,"
        " num_key_value_heads: 2, head_dim: 16, vocab_size: 500, sliding_window: 32}"
    )
    some, every = (played(tmp_path, shape, 2, seq=128, every_layer=whole) for whole in (False, True))
    assert all((26 - depth) % 6 == 0 and depth < 26 for depth in some.played)
    assert some.peak == pytest.approx(every.peak, rel=0.005)


def test_states_are_16_bytes_a_parameter_over_the_ranks(tmp_path: Path) -> None:
    for ranks in (1, 2, 4):
        rest = played(tmp_path, SMALL, ranks, seq=64).rest
        parameters = rest["parameters"] // 4
        assert (rest["moments"], rest["gradients"]) == (8 * parameters, 4 * parameters)


@pytest.mark.parametrize(
    ("override", "what"),
    [("shard.engine=deepspeed", "real memory"), ("shard.offload=all", "one device")],
)
def test_what_cannot_be_played_is_refused(override: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=what):
        played(tmp_path, SMALL, 2, override, seq=64)


def test_a_config_that_its_own_model_cannot_run_is_a_users_mistake(tmp_path: Path) -> None:
    shape = (
        "{model_type: deepseek_v2, num_hidden_layers: 2, n_routed_experts: 4, hidden_size: 64, intermediate_size: 64}"
    )
    with pytest.raises(UsageError, match="cannot be played"):
        played(tmp_path, shape, 2, seq=64)


def test_the_formulas_plan_comes_first_then_what_is_done_and_nothing_is_left_behind(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import masking_utils

    from mpdist import cli

    before = masking_utils.find_packed_sequence_indices, torch.UntypedStorage.resize_
    configured(tmp_path, DEEP, 2, seq=64)
    settings = ("data.packing=concat", "model.attention=sdpa", "--ranks", "2", "--memory", "8GiB", "--simulate")
    assert cli.main(["plan", str(tmp_path / "run.yaml"), *settings]) == 0
    said = capfd.readouterr()
    by_formula, by_simulation = said.out.split("simulation of rank 0")
    assert "fits       yes: " in by_formula
    assert "fits       yes by simulation: " in by_simulation
    told = [line for line in said.err.splitlines() if line.startswith("simulation: ")]
    assert [line.rpartition(": ")[0].split(" with ")[-1] for line in told[-2:]] == ["4 of 13 blocks", "6 of 13 blocks"]
    assert all(re.search(r"\d s", line) for line in told[1:])
    assert (masking_utils.find_packed_sequence_indices, torch.UntypedStorage.resize_) == before
    assert not torch.distributed.is_initialized()
