"""How each model type names and sizes its parameters: the table behind ``arch``.

Names, shapes and order are those of transformers' own classes (5.x), so experts come as one tensor a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
    shared_intermediate: int
    sparse_step: int
    dense_layers: tuple[int, ...]
    layer: int = 0


@dataclass(frozen=True)
class Family:
    """How one model type names its parts, and what its config class assumes where config.json is silent.

    ``reads``: the optional fields of FIELDS that its class knows; it ignores the others. ``names``: what it calls a
    field, where that is not the usual name. ``also``: further spellings that it accepts. ``counted``: values of
    settings with which its parameters are those listed; others are not counted. ``plain_logits``: likewise, values with
    which its logits are its head's product and no more. ``dropouts``: its fields for the dropout of attention scores
    and of what a block adds to the stream.
    """

    embed: str
    block: str
    norm: str
    make: Callable[[Shape], Iterator[Made]]
    defaults: Mapping[str, Any]
    reads: tuple[str, ...] = ("num_key_value_heads", "head_dim")
    names: Mapping[str, str] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)
    counted: Mapping[str, Any] = field(default_factory=dict)
    plain_logits: Mapping[str, Any] = field(default_factory=dict)
    norm_bias: bool = False
    norm_first: bool = False  # whether it stands before the blocks in the order of parameters
    positions: str = ""
    positions_unused: int = 0  # rows of the position table ahead of the first position
    head: str = "lm_head.weight"
    head_bias: bool = False
    rotary_share: float = 1.0
    dropouts: tuple[str, str] = ("attention_dropout", "")
    routes: bool = False  # to experts, so that its config may ask for a router's loss
    own_logits: bool = False  # its forward does not go through its base model, so the loss cannot come in between

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that its class reads, by their usual names."""
        return (*ALWAYS, *self.reads)

    def rotary_dim(self, config: Mapping[str, Any], head_dim: int) -> int:
        """Elements of a head that are rotated; 0 with a position table."""
        if self.positions:
            return 0
        rope = config.get("rope_parameters")
        share = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
        share = share or config.get("partial_rotary_factor") or config.get("rotary_pct")
        return int(head_dim * (share or self.rotary_share))

    def makes_whole_logits(self, config: Mapping[str, Any]) -> bool:
        plain = self.plain_logits
        odd = any(config.get(key, self.defaults.get(key, value)) != value for key, value in plain.items())
        return self.own_logits or odd or self.adds_router_loss(config)

    def adds_router_loss(self, config: Mapping[str, Any]) -> bool:
        return self.routes and bool(config.get("output_router_logits")) and config.get("router_aux_loss_coef") != 0


def _linear(name: str, out: int, into: int, bias: bool = False, conv1d: bool = False) -> Iterator[Made]:
    # GPT-2's Conv1D keeps its matrix transposed.
    yield f"{name}.weight", (into, out) if conv1d else (out, into), True
    if bias:
        yield f"{name}.bias", (out,), False


def _attention(s: Shape) -> Iterator[Made]:
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    qkv_bias = s.attention_bias or s.type == "qwen2"
    out_bias = s.attention_bias and s.type != "qwen2_moe"
    yield from _linear("self_attn.q_proj", q, s.hidden, qkv_bias)
    yield from _linear("self_attn.k_proj", kv, s.hidden, qkv_bias)
    yield from _linear("self_attn.v_proj", kv, s.hidden, qkv_bias)
    yield from _linear("self_attn.o_proj", s.hidden, q, out_bias)
    if s.type in ("qwen3", "qwen3_moe", "gemma3_text"):
        yield "self_attn.q_norm.weight", (s.head_dim,), False
        yield "self_attn.k_norm.weight", (s.head_dim,), False
    elif s.type == "olmo2":
        yield "self_attn.q_norm.weight", (q,), False
        yield "self_attn.k_norm.weight", (kv,), False


def _gated_mlp(s: Shape, name: str = "mlp", width: int = 0) -> Iterator[Made]:
    yield from _linear(f"{name}.gate_proj", width or s.intermediate, s.hidden, s.mlp_bias)
    yield from _linear(f"{name}.up_proj", width or s.intermediate, s.hidden, s.mlp_bias)
    yield from _linear(f"{name}.down_proj", s.hidden, width or s.intermediate, s.mlp_bias)


def _two_norms(s: Shape) -> Iterator[Made]:
    yield "input_layernorm.weight", (s.hidden,), False
    yield "post_attention_layernorm.weight", (s.hidden,), False


def _llama(s: Shape) -> Iterator[Made]:
    yield from _attention(s)
    yield from _gated_mlp(s)
    yield from _two_norms(s)


def _olmo2(s: Shape) -> Iterator[Made]:
    yield from _attention(s)
    yield from _gated_mlp(s)
    yield "post_attention_layernorm.weight", (s.hidden,), False
    yield "post_feedforward_layernorm.weight", (s.hidden,), False


def _gemma2(s: Shape) -> Iterator[Made]:
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
    """Whether this layer routes to experts (Qwen's may keep some layers dense)."""
    return s.experts > 0 and s.layer not in s.dense_layers and (s.layer + 1) % s.sparse_step == 0


def _moe(s: Shape) -> Iterator[Made]:
    yield from _attention(s)
    if is_sparse(s):
        router = ("mlp.gate.weight", (s.experts, s.hidden), True)
        if s.type != "qwen3_moe":
            yield router
        yield "mlp.experts.gate_up_proj", (s.experts, 2 * s.moe_intermediate, s.hidden), True
        yield "mlp.experts.down_proj", (s.experts, s.hidden, s.moe_intermediate), True
        if s.type == "qwen3_moe":
            yield router
        if s.shared_intermediate:
            yield from _gated_mlp(s, "mlp.shared_expert", s.shared_intermediate)
            yield "mlp.shared_expert_gate.weight", (1, s.hidden), True
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


def _opt(s: Shape) -> Iterator[Made]:
    for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
        yield from _linear(f"self_attn.{name}", s.hidden, s.hidden, s.attention_bias)
    yield from _layernorm("self_attn_layer_norm", s.hidden)
    yield from _linear("fc1", s.intermediate, s.hidden, s.attention_bias)
    yield from _linear("fc2", s.hidden, s.intermediate, s.attention_bias)
    yield from _layernorm("final_layer_norm", s.hidden)


def _phi(s: Shape) -> Iterator[Made]:
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    yield from _linear("self_attn.q_proj", q, s.hidden, True)
    yield from _linear("self_attn.k_proj", kv, s.hidden, True)
    yield from _linear("self_attn.v_proj", kv, s.hidden, True)
    yield from _linear("self_attn.dense", s.hidden, q, True)
    yield from _linear("mlp.fc1", s.intermediate, s.hidden, True)
    yield from _linear("mlp.fc2", s.hidden, s.intermediate, True)
    yield from _layernorm("input_layernorm", s.hidden)


WINDOWED = ("mistral", "mixtral", "phi3", "gemma2", "gemma3_text", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")


def attends(config: Mapping[str, Any], s: Shape) -> tuple[int, ...]:
    """How many tokens each layer attends to, 0 for all; what is not given is as the config classes of transformers 5.24 have it."""
    window = config.get("sliding_window", 4096 if s.type in ("mistral", "gemma2", "gemma3_text") else None)
    if s.type.startswith("qwen"):
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    if not isinstance(window, int) or s.type not in WINDOWED:
        return (0,) * s.layers
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if "sliding" in str(kind) else 0 for kind in kinds[: s.layers])
    if s.type == "gemma3_text":
        pattern = config.get("sliding_window_pattern") or 6
        return tuple(window if (i + 1) % pattern else 0 for i in range(s.layers))
    if s.type == "gemma2":
        return tuple(window if (i + 1) % 2 else 0 for i in range(s.layers))
    first = 28 if config.get("max_window_layers") is None else config["max_window_layers"]
    if s.type == "qwen2_moe":
        return tuple(window if i % 2 == 0 and i < first else 0 for i in range(s.layers))
    if s.type in ("qwen2", "qwen3"):
        return tuple(window if i >= first else 0 for i in range(s.layers))
    return (window,) * s.layers


def defaults_of(h: int, f: int, n: int, a: int, kv: int | None, vocab: int, **more: Any) -> dict[str, Any]:
    """What a config class assumes; ``save_pretrained`` writes only what differs from it."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip(names, (h, f, n, a, kv), strict=True)) | {"vocab_size": vocab} | more


# Fields that decide sizes: those that every class reads, and those that only some do.
ALWAYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("max_position_embeddings", "tie_word_embeddings", "hidden_act"),
)
_MLP_OF_EXPERTS = ("moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers")
_EXPERTS = ("num_local_experts", "num_experts_per_tok")
FIELDS = (
    *ALWAYS,
    *("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"),
    *(*_EXPERTS, *_MLP_OF_EXPERTS, "shared_expert_intermediate_size"),
)
_HEADS = ("num_key_value_heads", "head_dim")
_BIASED = (*_HEADS, "attention_bias")
_LLAMA_NAMES = ("model.embed_tokens.weight", "model.layers", "model.norm")
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}
_GEMMA2 = defaults_of(2304, 9216, 26, 8, 4, 256000, **_GEMMA)
_GEMMA2_NAMES = {"hidden_act": "hidden_activation"}
_UNCAPPED = {"final_logit_softcapping": None}
FAMILIES: dict[str, Family] = {
    "llama": Family(*_LLAMA_NAMES, _llama, defaults_of(4096, 11008, 32, 32, None, 32000), reads=(*_BIASED, "mlp_bias")),
    "mistral": Family(*_LLAMA_NAMES, _llama, defaults_of(4096, 14336, 32, 32, 8, 32000)),
    "qwen2": Family(*_LLAMA_NAMES, _llama, defaults_of(4096, 22016, 32, 32, 32, 151936)),
    "qwen3": Family(*_LLAMA_NAMES, _llama, defaults_of(4096, 22016, 32, 32, 32, 151936, head_dim=128), reads=_BIASED),
    "gemma": Family(*_LLAMA_NAMES, _llama, defaults_of(3072, 24576, 28, 16, 16, 256000, **_GEMMA), reads=_BIASED),
    "gemma2": Family(
        *_LLAMA_NAMES,
        _gemma2,
        _GEMMA2 | {"final_logit_softcapping": 30.0},
        reads=_BIASED,
        names=_GEMMA2_NAMES,
        plain_logits=_UNCAPPED,
    ),
    "gemma3_text": Family(
        *_LLAMA_NAMES,
        _gemma2,
        _GEMMA2 | {"vocab_size": 262208},
        reads=_BIASED,
        names=_GEMMA2_NAMES,
        plain_logits=_UNCAPPED,
    ),
    "phi": Family(
        "model.embed_tokens.weight",
        "model.layers",
        "model.final_layernorm",
        _phi,
        defaults_of(2048, 8192, 24, 32, None, 51200, hidden_act="gelu_new"),
        counted={"qk_layernorm": False},
        norm_bias=True,
        head_bias=True,
        rotary_share=0.5,
        dropouts=("attention_dropout", "resid_pdrop"),
    ),
    "phi3": Family(
        *_LLAMA_NAMES,
        _phi3,
        defaults_of(3072, 8192, 32, 32, None, 32064),
        reads=("num_key_value_heads",),
        dropouts=("attention_dropout", "resid_pdrop"),
    ),
    "granite": Family(
        *_LLAMA_NAMES,
        _llama,
        defaults_of(4096, 11008, 32, 32, None, 32000),
        reads=(*_BIASED, "mlp_bias"),
        plain_logits={"logits_scaling": 1},
    ),
    "olmo2": Family(*_LLAMA_NAMES, _olmo2, defaults_of(4096, 11008, 32, 32, None, 50304), reads=_BIASED),
    "mixtral": Family(
        *_LLAMA_NAMES,
        _moe,
        defaults_of(4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
        reads=(*_HEADS, *_EXPERTS),
        routes=True,
        also={"num_experts": "num_local_experts"},
    ),
    "qwen2_moe": Family(
        *_LLAMA_NAMES,
        _moe,
        defaults_of(2048, 5632, 24, 16, 16, 151936, num_local_experts=60, num_experts_per_tok=4, attention_bias=True)
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        reads=(*_BIASED, *_EXPERTS, *_MLP_OF_EXPERTS, "shared_expert_intermediate_size"),
        names={"num_local_experts": "num_experts", "attention_bias": "qkv_bias"},
        routes=True,
    ),
    "qwen3_moe": Family(
        *_LLAMA_NAMES,
        _moe,
        defaults_of(2048, 6144, 24, 32, 4, 151936, num_local_experts=128, num_experts_per_tok=8)
        | {"moe_intermediate_size": 768},
        reads=(*_BIASED, *_EXPERTS, *_MLP_OF_EXPERTS),
        routes=True,
        also={"num_experts": "num_local_experts"},
    ),
    "gpt2": Family(
        "transformer.wte.weight",
        "transformer.h",
        "transformer.ln_f",
        _gpt2,
        defaults_of(768, 0, 12, 12, None, 50257, max_position_embeddings=1024, tie_word_embeddings=True)
        | {"hidden_act": "gelu_new", "attn_pdrop": 0.1, "resid_pdrop": 0.1},
        reads=(),
        names={"intermediate_size": "n_inner", "hidden_act": "activation_function"},
        also={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
        },
        norm_bias=True,
        positions="transformer.wpe.weight",
        dropouts=("attn_pdrop", "resid_pdrop"),
    ),
    "gpt_neox": Family(
        "gpt_neox.embed_in.weight",
        "gpt_neox.layers",
        "gpt_neox.final_layer_norm",
        _gpt_neox,
        defaults_of(6144, 24576, 44, 64, None, 50432, attention_bias=True, hidden_act="gelu"),
        reads=("attention_bias",),
        norm_bias=True,
        rotary_share=0.25,
        dropouts=("attention_dropout", "hidden_dropout"),
    ),
    "opt": Family(
        "model.decoder.embed_tokens.weight",
        "model.decoder.layers",
        "model.decoder.final_layer_norm",
        _opt,
        defaults_of(768, 3072, 12, 12, None, 50272, max_position_embeddings=2048, tie_word_embeddings=True)
        | {"hidden_act": "relu", "attention_bias": True, "dropout": 0.1},
        reads=("attention_bias",),
        names={"intermediate_size": "ffn_dim", "attention_bias": "enable_bias", "hidden_act": "activation_function"},
        counted={
            "do_layer_norm_before": True,
            "layer_norm_elementwise_affine": True,
            "_remove_final_layer_norm": False,
        },
        norm_bias=True,
        norm_first=True,
        positions="model.decoder.embed_positions.weight",
        positions_unused=2,
        dropouts=("attention_dropout", "dropout"),
        own_logits=True,
    ),
}
