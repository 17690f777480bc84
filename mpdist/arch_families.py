"""How each model type names and sizes its parameters: the table behind ``arch``.

Names and shapes are those of transformers' own classes (5.x), so experts come as one tensor a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Made = tuple[str, tuple[int, ...], bool]  # name, shape, is it a matrix that tokens are multiplied with


@dataclass(frozen=True)
class Shape:
    """The fields of one config.json that decide sizes, with defaults filled in."""

    type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int | None
    attention_bias: bool
    mlp_bias: bool
    experts: int
    experts_per_token: int
    moe_intermediate: int
    sparse_step: int
    dense_layers: tuple[int, ...]
    layer: int = 0


@dataclass(frozen=True)
class Family:
    """How one model type names its parts, and what its config class assumes where config.json is silent."""

    embed: str
    block: str
    norm: str
    make: Callable[[Shape], Iterator[Made]]
    defaults: Mapping[str, Any]
    norm_bias: bool = False
    positions: str = ""
    head: str = "lm_head.weight"


def _linear(name: str, out: int, into: int, bias: bool = False, conv1d: bool = False) -> Iterator[Made]:
    # GPT-2's Conv1D keeps its matrix transposed.
    yield f"{name}.weight", (into, out) if conv1d else (out, into), True
    if bias:
        yield f"{name}.bias", (out,), False


def _attention(s: Shape) -> Iterator[Made]:
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    qkv_bias = s.attention_bias or s.type == "qwen2"
    yield from _linear("self_attn.q_proj", q, s.hidden, qkv_bias)
    yield from _linear("self_attn.k_proj", kv, s.hidden, qkv_bias)
    yield from _linear("self_attn.v_proj", kv, s.hidden, qkv_bias)
    yield from _linear("self_attn.o_proj", s.hidden, q, s.attention_bias)
    if s.type in ("qwen3", "qwen3_moe", "gemma3_text"):
        yield "self_attn.q_norm.weight", (s.head_dim,), False
        yield "self_attn.k_norm.weight", (s.head_dim,), False


def _gated_mlp(s: Shape) -> Iterator[Made]:
    yield from _linear("mlp.gate_proj", s.intermediate, s.hidden, s.mlp_bias)
    yield from _linear("mlp.up_proj", s.intermediate, s.hidden, s.mlp_bias)
    yield from _linear("mlp.down_proj", s.hidden, s.intermediate, s.mlp_bias)


def _two_norms(s: Shape) -> Iterator[Made]:
    yield "input_layernorm.weight", (s.hidden,), False
    yield "post_attention_layernorm.weight", (s.hidden,), False


def _llama(s: Shape) -> Iterator[Made]:
    yield from _attention(s)
    yield from _gated_mlp(s)
    yield from _two_norms(s)


def _gemma(s: Shape) -> Iterator[Made]:
    yield from _llama(s)
    yield "pre_feedforward_layernorm.weight", (s.hidden,), False
    yield "post_feedforward_layernorm.weight", (s.hidden,), False


def _phi3(s: Shape) -> Iterator[Made]:
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    yield from _linear("self_attn.o_proj", s.hidden, q)
    yield from _linear("self_attn.qkv_proj", q + 2 * kv, s.hidden)
    yield from _linear("mlp.gate_up_proj", 2 * s.intermediate, s.hidden)
    yield from _linear("mlp.down_proj", s.hidden, s.intermediate)
    yield from _two_norms(s)


def is_sparse(s: Shape) -> bool:
    """Whether this layer routes to experts (Qwen3-MoE may keep some layers dense)."""
    return s.experts > 0 and s.layer not in s.dense_layers and (s.layer + 1) % s.sparse_step == 0


def _moe(s: Shape) -> Iterator[Made]:
    yield from _attention(s)
    if is_sparse(s):
        yield "mlp.gate.weight", (s.experts, s.hidden), True
        yield "mlp.experts.gate_up_proj", (s.experts, 2 * s.moe_intermediate, s.hidden), True
        yield "mlp.experts.down_proj", (s.experts, s.hidden, s.moe_intermediate), True
    else:
        yield from _gated_mlp(s)
    yield from _two_norms(s)


def _layernorm(name: str, width: int) -> Iterator[Made]:
    yield f"{name}.weight", (width,), False
    yield f"{name}.bias", (width,), False


def _gpt2(s: Shape) -> Iterator[Made]:
    yield from _layernorm("ln_1", s.hidden)
    yield from _linear("attn.c_attn", 3 * s.hidden, s.hidden, True, conv1d=True)
    yield from _linear("attn.c_proj", s.hidden, s.hidden, True, conv1d=True)
    yield from _layernorm("ln_2", s.hidden)
    yield from _linear("mlp.c_fc", s.intermediate, s.hidden, True, conv1d=True)
    yield from _linear("mlp.c_proj", s.hidden, s.intermediate, True, conv1d=True)


def _gpt_neox(s: Shape) -> Iterator[Made]:
    yield from _layernorm("input_layernorm", s.hidden)
    yield from _layernorm("post_attention_layernorm", s.hidden)
    yield from _linear("attention.query_key_value", 3 * s.hidden, s.hidden, s.attention_bias)
    yield from _linear("attention.dense", s.hidden, s.hidden, s.attention_bias)
    yield from _linear("mlp.dense_h_to_4h", s.intermediate, s.hidden, True)
    yield from _linear("mlp.dense_4h_to_h", s.hidden, s.intermediate, True)


def defaults_of(h: int, f: int, n: int, a: int, kv: int | None, vocab: int, **more: Any) -> dict[str, Any]:
    """What a config class assumes; ``save_pretrained`` writes only what differs from it."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip(names, (h, f, n, a, kv), strict=True)) | {"vocab_size": vocab} | more


_GEMMA = defaults_of(2304, 9216, 26, 8, 4, 256000, head_dim=256, tie_word_embeddings=True)
_LLAMA_NAMES = ("model.embed_tokens.weight", "model.layers", "model.norm")
FAMILIES: dict[str, Family] = {
    "llama": Family(*_LLAMA_NAMES, _llama, defaults_of(4096, 11008, 32, 32, None, 32000)),
    "mistral": Family(*_LLAMA_NAMES, _llama, defaults_of(4096, 14336, 32, 32, 8, 32000)),
    "qwen2": Family(*_LLAMA_NAMES, _llama, defaults_of(4096, 22016, 32, 32, 32, 151936)),
    "qwen3": Family(*_LLAMA_NAMES, _llama, defaults_of(4096, 22016, 32, 32, 32, 151936, head_dim=128)),
    "gemma2": Family(*_LLAMA_NAMES, _gemma, _GEMMA),
    "gemma3_text": Family(*_LLAMA_NAMES, _gemma, _GEMMA | {"vocab_size": 262208}),
    "phi3": Family(*_LLAMA_NAMES, _phi3, defaults_of(3072, 8192, 32, 32, None, 32064)),
    "mixtral": Family(
        *_LLAMA_NAMES, _moe, defaults_of(4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2)
    ),
    "qwen3_moe": Family(
        *_LLAMA_NAMES,
        _moe,
        defaults_of(2048, 6144, 24, 32, 4, 151936, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
    ),
    "gpt2": Family(
        "transformer.wte.weight",
        "transformer.h",
        "transformer.ln_f",
        _gpt2,
        defaults_of(768, 0, 12, 12, None, 50257, max_position_embeddings=1024, tie_word_embeddings=True),
        norm_bias=True,
        positions="transformer.wpe.weight",
    ),
    "gpt_neox": Family(
        "gpt_neox.embed_in.weight",
        "gpt_neox.layers",
        "gpt_neox.final_layer_norm",
        _gpt_neox,
        defaults_of(6144, 24576, 44, 64, None, 50432, attention_bias=True),
        norm_bias=True,
    ),
}
# Other spellings that config classes accept for one field.
ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "num_experts": "num_local_experts",
}
FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias"),
    *("num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
)
