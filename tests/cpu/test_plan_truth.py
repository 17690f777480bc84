"""What the plan counts in closed formulas, against what autograd really keeps in transformers' layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mpdist import arch
from mpdist.plan_memory import saved_per_token

ROWS, TOKENS = 2, 64
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "pad_token_id": 0,
}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "mistral": SMALL,
    "qwen2": SMALL,
    "qwen3": SMALL | {"head_dim": 24},
    "gemma2": SMALL | {"head_dim": 16},
    "gemma3_text": SMALL | {"head_dim": 16},
    "gpt2": dict(n_embd=64, n_head=4, n_positions=64, vocab_size=96, **NO_DROPOUT),
    "gpt_neox": {"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4, "vocab_size": 96},
    "phi3": SMALL,
    "mixtral": SMALL | {"num_local_experts": 4},
}


def kept(kind: str, layers: int, dtype: torch.dtype, packed: bool, attention: str) -> int:
    """Bytes of the storages that the model's body saves for backward, parameters and buffers left out."""
    fields = dict(CASES[kind]) | {"n_layer" if kind == "gpt2" else "num_hidden_layers": layers}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(tokens | fields))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).train()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    positions = torch.arange(TOKENS).repeat(ROWS, 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(
            input_ids=torch.randint(0, 96, (ROWS, TOKENS)),
            position_ids=positions % 40 if packed else positions,
            use_cache=False,
        )
    return sum(seen.values())


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", CASES)
def test_a_blocks_saved_bytes_are_counted_to_one_percent(kind: str, dtype: torch.dtype, packed: bool) -> None:
    check(kind, dtype, packed, "eager" if kind == "gemma2" else "sdpa")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_eager_attention_keeps_its_scores(dtype: torch.dtype) -> None:
    check("llama", dtype, False, "eager")


def check(kind: str, dtype: torch.dtype, packed: bool, attention: str) -> None:
    described = arch.from_mapping({"model_type": kind, **CASES[kind]}, "test")
    assert isinstance(described, arch.Arch)
    one = kept(kind, 2, dtype, packed, attention)
    block = kept(kind, 3, dtype, packed, attention) - one
    width = dtype.itemsize
    planned = saved_per_token(described, width, TOKENS, packed and attention == "sdpa", attention == "eager")
    assert planned == pytest.approx(block / (ROWS * TOKENS), rel=0.01)
