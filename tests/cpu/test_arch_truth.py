"""The torch-free parameter table against the models that transformers builds."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2CLS

from mpdist import arch
from mpdist.model import give_loss

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
NO_GQA = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
OPT = {k: v for k, v in NO_GQA.items() if k != "intermediate_size"} | {"ffn_dim": 112, "max_position_embeddings": 32}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "llama with biases, tied": {
        "model_type": "llama",
        **SMALL,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama with its own head width": {"model_type": "llama", **SMALL, "head_dim": 24},
    "mistral": {"model_type": "mistral", **SMALL},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 24},
    "gemma2": {"model_type": "gemma2", **SMALL, "head_dim": 16},
    "gemma3_text": {"model_type": "gemma3_text", **SMALL, "head_dim": 16},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 96},
    "gpt2 with its own inner width": {"model_type": "gpt2", "n_embd": 64, "n_inner": 80, "n_layer": 1, "n_head": 4},
    "gemma": {"model_type": "gemma", **SMALL, "head_dim": 16},
    "gemma with biases": {"model_type": "gemma", **SMALL, "head_dim": 24, "attention_bias": True},
    "opt": {"model_type": "opt", **OPT},
    "opt without biases, untied": {
        "model_type": "opt",
        **OPT,
        "enable_bias": False,
        "word_embed_proj_dim": 64,
        "tie_word_embeddings": False,
    },
    "phi": {"model_type": "phi", **SMALL},
    "phi with its own share of rotary, tied": {
        "model_type": "phi",
        **NO_GQA,
        "partial_rotary_factor": 0.4,
        "tie_word_embeddings": True,
    },
    "olmo2": {"model_type": "olmo2", **SMALL, "attention_bias": True},
    "granite": {"model_type": "granite", **SMALL, "attention_bias": True, "mlp_bias": True},
    "qwen2_moe": {"model_type": "qwen2_moe", **SMALL, **EXPERTS, "decoder_sparse_step": 2},
    "qwen2_moe with a dense layer, without biases": {
        "model_type": "qwen2_moe",
        **SMALL,
        **EXPERTS,
        "mlp_only_layers": [1],
        "qkv_bias": False,
    },
    "gpt_neox": {"model_type": "gpt_neox", **NO_GQA},
    "gpt_neox without attention bias": {"model_type": "gpt_neox", **NO_GQA, "attention_bias": False},
    "phi3": {"model_type": "phi3", **SMALL},
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 4},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **SMALL,
        "head_dim": 16,
        "num_experts": 4,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 2,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe with a dense layer": {
        "model_type": "qwen3_moe",
        **SMALL,
        "num_experts": 4,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [1],
        "num_experts_per_tok": 2,
    },
}
SHAPES = Path(__file__).resolve().parents[1] / "shapes"
# Every size left to the config class: save_pretrained writes only what differs from it.
CASES |= {f"{file.stem}, whole": json.loads(file.read_text()) for file in sorted(SHAPES.glob("*.json"))}
CASES |= {f"{kind} by its defaults": {"model_type": kind} for kind in arch.FAMILIES}


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_has_the_name_and_shape_that_transformers_gives_it(case: str) -> None:
    fields = dict(CASES[case])
    described = arch.from_mapping(fields, "test")
    assert isinstance(described, arch.Arch)
    config = AutoConfig.for_model(fields.pop("model_type"), **(TOKENS | fields))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # as mpdist builds it, buffers too
    truth = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert [(p.name, p.shape) for p in described.params] == list(truth.items())  # in order, as engines fill buckets
    assert described.total == sum(p.numel() for p in model.parameters())
    assert described.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    assert described.buffer_bytes == sum(b.numel() * b.element_size() for b in model.buffers())
    family = arch.FAMILIES[described.model_type]
    names = (family.names.get("hidden_act", "hidden_act"), *family.dropouts)
    assert (described.activation, described.attention_dropout, described.hidden_dropout) == tuple(
        getattr(config, name) if name else 0.0 for name in names
    )
    groups = described.embedding + described.head + sum(described.blocks) + described.norms
    assert groups == described.total


@pytest.mark.parametrize("case", ["llama", "qwen3", "gpt2", "gemma2", "mixtral", "opt", "phi", "qwen2_moe"])
def test_a_saved_config_is_read_like_the_model_it_came_from(case: str, tmp_path: Any) -> None:
    fields = dict(CASES[case])
    config = AutoConfig.for_model(fields.pop("model_type"), **(TOKENS | fields))
    config.save_pretrained(tmp_path)
    described = arch.look(str(tmp_path))
    assert isinstance(described, arch.Arch)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert described.total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("case", ["gpt2", "opt", "llama", "phi"])
def test_only_a_learned_position_table_ends(case: str) -> None:
    fields = dict(CASES[case]) | ({} if case in ("gpt2", "opt") else {"max_position_embeddings": 32})
    described = arch.from_mapping(fields, "test")
    assert isinstance(described, arch.Arch)
    assert described.max_positions == 32
    config = AutoConfig.for_model(fields.pop("model_type"), **(TOKENS | fields))
    model = AutoModelForCausalLM.from_config(config).eval()
    model(input_ids=torch.ones(1, 32, dtype=torch.int64), use_cache=False)
    ended = pytest.raises(IndexError) if described.learned_positions else contextlib.nullcontext()
    with ended:
        model(input_ids=torch.ones(1, 33, dtype=torch.int64), use_cache=False)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("phi", {}),
        ("gemma", {}),
        ("gemma2", {}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma3_text", {}),
        ("gemma3_text", {"final_logit_softcapping": 20.0}),
        ("granite", {}),
        ("granite", {"logits_scaling": 8.0}),
        ("mixtral", {}),
        ("mixtral", {"output_router_logits": True}),
        ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.0}),
        ("qwen2_moe", {"output_router_logits": True}),
    ],
)
def test_whole_logits_are_foreseen_where_the_loss_needs_them(kind: str, changes: dict[str, Any]) -> None:
    described = arch.from_mapping(CASES[kind] | changes, "test")
    assert isinstance(described, arch.Arch)
    fields = CASES[kind] | changes
    config = AutoConfig.for_model(fields.pop("model_type"), **(TOKENS | fields))
    way = give_loss(AutoModelForCausalLM.from_config(config, dtype=torch.float32), 64)
    assert described.whole_logits == ("whole logits" in way)
    assert described.router_loss == ("router loss" in way)


def test_the_names_of_activations_are_transformers_own() -> None:
    assert set(ACT2CLS) == arch.ACTIVATIONS
