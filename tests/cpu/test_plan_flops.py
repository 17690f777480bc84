"""The plan's FLOPs of a token, against those that torch counts in transformers' layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from mpdist import arch, model
from mpdist.plan_memory import Asked
from mpdist.plan_time import flops_per_token

ROWS, TOKENS = 2, 16
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
NO_GQA = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
CASES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen3": SMALL | {"head_dim": 24, "tie_word_embeddings": True},
    "gemma3_text": SMALL | {"head_dim": 16},  # a norm behind the last product
    "phi": SMALL,  # attention and MLP side by side
    "gpt_neox": NO_GQA,
}
MODES = ("none", "full", "selective", "every 2")


def counted(kind: str, mode: str, freeze: tuple[str, ...]) -> int:
    """FLOPs of forward and backward but for attention's, which torch does not count in its kernel for CPUs."""
    config = AutoConfig.for_model(kind, **(CASES[kind] | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}))
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    if freeze:
        model.freeze(built, list(freeze))
    model.checkpoint_blocks(model.find_blocks(built), mode)
    ids, places = torch.randint(3, 90, (ROWS, TOKENS)), torch.arange(TOKENS).expand(ROWS, TOKENS)
    with FlopCounterMode(display=False) as counter:
        built(input_ids=ids, position_ids=places, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    return int(counter.get_total_flops())


def planned(kind: str, mode: str, freeze: tuple[str, ...]) -> float:
    shape = arch.from_mapping({"model_type": kind, **CASES[kind]}, "test")
    assert isinstance(shape, arch.Arch)
    # A length of 0 leaves attention's own products out.
    asked = Asked(ranks=1, nodes=1, micro=1, global_=1, seq_len=0, checkpointing=mode, freeze=freeze)
    return flops_per_token(asked, shape)[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CASES)
def test_hardware_flops_are_those_that_torch_counts(kind: str, mode: str) -> None:
    assert counted(kind, mode, ()) == planned(kind, mode, ()) * ROWS * TOKENS


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize(
    "freeze",
    [
        ("model.embed_tokens.*",),
        ("model.embed_tokens.*", "model.layers.0.*"),
        ("*.layers.*", "model.norm.*", "lm_head.*"),  # the embedding alone trains
        ("model.*",),  # the head alone
        ("*.mlp.*",),
    ],
)
def test_frozen_parts_are_never_counted_high_and_by_a_block_low_at_most(freeze: tuple[str, ...], mode: str) -> None:
    found, expected = counted("llama", mode, freeze), planned("llama", mode, freeze) * ROWS * TOKENS
    block = planned("llama", mode, ()) - planned(
        "llama", "none", ("*.layers.*", "model.norm.*", "model.embed_tokens.*")
    )
    assert expected <= found <= expected + block / 3 * ROWS * TOKENS
