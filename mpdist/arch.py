"""The shape of a causal LM, read from its ``config.json`` without torch: every parameter by name and size.

Parameters are listed one by one, so that counts by group, frozen patterns and shards are exact; a test holds
names and shapes against transformers' own models. A model type that is not in ``FAMILIES`` gives ``Unknown``
with its reason: planning goes on without it.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import inf, prod
from pathlib import Path
from typing import Any

from mpdist.arch_families import FAMILIES, FIELDS, Family, Shape, attends
from mpdist.errors import UsageError

MOST_LAYERS = 4096  # four times the deepest that anybody has trained; parameters are listed one by one
# transformers 5.24's names of activations (ACT2FN).
ACTIVATIONS = frozenset((
    *("gelu", "gelu_10", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate"),
    *("hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu"),
    *("sqrtsoftplus", "swish", "tanh", "prelu", "xielu"),
))  # fmt: skip

# What positions and windows are made of: whether a value can be meant, and what it is.
_POSITIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "rope_theta": (lambda v: isinstance(v, int | float) and 0 < v < inf, "The frequencies are its powers: it is a number above 0."),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (
        lambda v: isinstance(v, int | float) and 0 < v <= 1, "It is a share of a head: above 0, at most 1.",
    )),
    "max_window_layers": (lambda v: isinstance(v, int) and v >= 0, "It counts blocks: a whole number from 0."),
    "sliding_window_pattern": (lambda v: isinstance(v, int) and v > 0, "Each so many blocks one sees all: a whole number from 1."),
}  # fmt: skip


@dataclass(frozen=True)
class Param:
    """One parameter tensor. ``group``: embedding, head, block or norm; ``block``: its layer, -1 outside.

    ``matmul`` marks a matrix that every token is multiplied with; ``active`` is the share of it that one token
    meets (less than 1 for routed experts).
    """

    name: str
    shape: tuple[int, ...]
    group: str
    block: int = -1
    matmul: bool = False
    active: float = 1.0

    @cached_property
    def count(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Arch:
    """A causal LM's shape. Widths are in elements; ``vocab`` in rows of the embedding table.

    ``intermediate``: the width of a block's MLP, or of one expert; ``shared_intermediate`` of the MLP that every token
    passes beside its experts. ``learned_positions``: they come from a table that ends at ``max_positions``; elsewhere
    ``rotary_dim`` elements of each head are rotated. ``activation``: its name in transformers. Dropout is a probability:
    of attention scores, and of what a block adds to the stream. ``whole_logits``: the loss takes the model's own logits,
    since they are more than its head's product (capped, scaled) or a router's loss comes with them. ``router_loss``: whether
    one does. ``attends``: how many tokens each layer attends to, 0 for all.
    """

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int | None
    learned_positions: bool
    rotary_dim: int
    tied: bool
    activation: str
    attention_dropout: float
    hidden_dropout: float
    whole_logits: bool
    router_loss: bool
    attends: tuple[int, ...]
    experts: int
    experts_per_token: int
    shared_intermediate: int
    buffer_bytes: int
    dtype: str | None
    source: str
    params: tuple[Param, ...]

    @cached_property
    def total(self) -> int:
        return sum(p.count for p in self.params)

    @cached_property
    def embedding(self) -> int:
        """Token and learned position tables. A tied table counts here and not in ``head``."""
        return sum(p.count for p in self.params if p.group == "embedding")

    @cached_property
    def head(self) -> int:
        """An output matrix of the head's own, and its bias."""
        return sum(p.count for p in self.params if p.group == "head")

    @cached_property
    def norms(self) -> int:
        """Norms outside the blocks."""
        return sum(p.count for p in self.params if p.group == "norm")

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Parameters of each block, in order."""
        counts = [0] * self.layers
        for p in self.params:
            if p.block >= 0:
                counts[p.block] += p.count
        return tuple(counts)

    @cached_property
    def matmul_params(self) -> float:
        """Parameters that one token is multiplied with: no embedding look-up, the output head once, tied or not."""
        inside = sum(p.count * p.active for p in self.params if p.matmul)
        return inside + (self.vocab * self.hidden if self.tied else 0)

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def split(self, freeze: Iterable[str]) -> tuple[list[Param], list[Param]]:
        """(trainable, frozen) parameters; a shell pattern has to match a parameter's whole name to freeze it."""
        patterns = list(freeze)
        if not patterns:
            return list(self.params), []
        frozen = [p for p in self.params if any(fnmatchcase(p.name, pattern) for pattern in patterns)]
        held = {p.name for p in frozen}
        return [p for p in self.params if p.name not in held], frozen


@dataclass(frozen=True)
class Unknown:
    """Why a model's shape cannot be known yet. ``missing`` marks a folder that does not exist (yet); ``was_read`` a config
    that is there, of a model that is not counted here."""

    reason: str
    missing: bool = False
    was_read: bool = False


def module_matches(parameter: str, patterns: Collection[str]) -> bool:
    """True if a shell pattern matches the module that owns the parameter, or a module around it."""
    if not patterns:  # asked for every parameter of a model, mostly without any
        return False
    parts = parameter.split(".")[:-1]
    return any(fnmatchcase(".".join(parts[:i]), pattern) for pattern in patterns for i in range(1, len(parts) + 1))


def model_flops_per_token(arch: Arch, seq_len: int, causal: bool = True) -> float:
    """Model FLOPs of one token, forward and backward: 6 a matmul parameter + 12 x layers x width x seq_len.

    ``causal`` halves the attention term, since a token attends to half of the sequence on average: the value that
    this project reports as ``speed/mfu``. Recompute, norms and look-ups are not counted; windows count as full.
    """
    attention = 12 * arch.layers * arch.q_width * seq_len
    return 6 * arch.matmul_params + (attention / 2 if causal else attention)


class _Reader:
    """Typed access to one config mapping; a wrong value is a UsageError that names the field and the source."""

    def __init__(self, given: Mapping[str, Any], family: Family, source: str) -> None:
        self.source, self.family, self.given = source, family, given
        self.values = dict(family.defaults)
        own = {**{family.names.get(field, field): field for field in family.fields}, **family.also}
        self.values.update({own[k]: v for k, v in given.items() if k in own and v is not None})

    def wrong(self, field: str, why: str, value: Any = None) -> UsageError:
        value = self.values.get(field) if value is None else value
        name = self.family.names.get(field, field)
        return UsageError(f"{name} = {value!r} in {self.source}", why, "Correct the model's config.")

    def integer(self, field: str, least: int = 1) -> int:
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(field, f"The model's size needs a whole number of at least {least} here.")
        return value

    def optional(self, field: str) -> int | None:
        return None if self.values.get(field) is None else self.integer(field)

    def probability(self, name: str) -> float:
        """Of a field by the name that the config class gives it; 0 where that name is empty."""
        value = self.given.get(name)
        value = self.family.defaults.get(name, 0.0) if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self.wrong(name, "A probability is between 0 and 1.", value)
        return float(value)

    def layerwise(self, layers: int) -> None:
        """Raises UsageError for what no positions and no kinds of layers can have. Fields that are not given pass."""
        kinds = self.given.get("rope_parameters")
        held = [self.given, *([kinds, *kinds.values()] if isinstance(kinds, Mapping) else [])]
        for name, (fits, why) in _POSITIONS.items():
            for value in (one.get(name) for one in held if isinstance(one, Mapping)):
                if value is not None and (isinstance(value, bool) or not fits(value)):
                    raise self.wrong(name, why, value)
        for name in ("layer_types", "mlp_only_layers"):
            value = self.given.get(name)
            if value is not None and not isinstance(value, list | tuple):
                raise self.wrong(name, "It is a list.", value)
        types = self.given.get("layer_types")
        if types and len(types) != layers:
            raise self.wrong("layer_types", f"There is one for each block, and num_hidden_layers = {layers}.", types)

    def flag(self, field: str) -> bool:
        value = self.values.get(field, False)
        if not isinstance(value, bool):
            raise self.wrong(field, "Only true or false mean something here.")
        return value


def _read(kind: str, r: _Reader) -> Shape:
    hidden, heads = r.integer("hidden_size"), r.integer("num_attention_heads")
    kv_heads, head_dim = r.optional("num_key_value_heads") or heads, r.optional("head_dim")
    if head_dim is None and hidden % heads:
        raise r.wrong("hidden_size", f"It is not divisible by num_attention_heads = {heads}.")
    if heads % kv_heads:
        raise r.wrong("num_key_value_heads", f"num_attention_heads = {heads} is not divisible by it.")
    experts = r.optional("num_local_experts") or 0
    intermediate = r.integer("intermediate_size", 0) or 4 * hidden
    if r.given.get(r.family.names.get("intermediate_size", "intermediate_size")) == 0:
        raise r.wrong("intermediate_size", "The model's size needs a whole number of at least 1 here.")
    layers = r.integer("num_hidden_layers")
    if layers > MOST_LAYERS:
        raise r.wrong("num_hidden_layers", f"No model has more than {MOST_LAYERS:,} blocks.")
    chosen = r.integer("num_experts_per_tok") if experts else 0
    if chosen > experts:
        raise r.wrong("num_experts_per_tok", f"There are {experts} experts to choose from.")
    r.layerwise(layers)
    return Shape(
        type=kind,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        intermediate=intermediate,
        vocab=r.integer("vocab_size"),
        max_positions=r.optional("max_position_embeddings"),
        attention_bias=r.flag("attention_bias"),
        mlp_bias=r.flag("mlp_bias"),
        experts=experts,
        experts_per_token=chosen,
        moe_intermediate=r.optional("moe_intermediate_size") or intermediate,
        shared_intermediate=r.optional("shared_expert_intermediate_size") or 0,
        sparse_step=r.optional("decoder_sparse_step") or 1,
        dense_layers=tuple(r.values.get("mlp_only_layers") or ()),
    )


def _uncounted(kind: str, config: Mapping[str, Any], family: Family, shape: Shape) -> str | None:
    """Why a setting keeps this model's parameters from being those that its family lists; None if none does."""
    for setting, value in family.counted.items():
        if config.get(setting, value) != value:
            return f"model type '{kind}' with {setting} = {config[setting]!r} is not counted without torch"
    width = config.get("word_embed_proj_dim") if kind == "opt" else None
    if width is not None and width != shape.hidden:
        return f"model type 'opt' with word_embed_proj_dim = {width!r} beside hidden_size = {shape.hidden} is not counted without torch"
    return None


def _params(family: Family, s: Shape, tied: bool) -> Iterator[Param]:
    yield Param(family.embed, (s.vocab, s.hidden), "embedding")
    if family.positions:
        if s.max_positions is None:
            raise UsageError(
                "max_position_embeddings is missing", "The position table's size follows from it.", "Add it."
            )
        yield Param(family.positions, (s.max_positions + family.positions_unused, s.hidden), "embedding")
    norm = [Param(f"{family.norm}.weight", (s.hidden,), "norm")]
    if family.norm_bias:
        norm.append(Param(f"{family.norm}.bias", (s.hidden,), "norm"))
    if family.norm_first:
        yield from norm
    share = s.experts_per_token / s.experts if s.experts else 1.0
    for layer in range(s.layers):
        for name, shape, matmul in family.make(replace(s, layer=layer)):
            active = share if ".experts." in name else 1.0
            yield Param(f"{family.block}.{layer}.{name}", shape, "block", layer, matmul, active)
    if not family.norm_first:
        yield from norm
    if not tied:
        yield Param(family.head, (s.vocab, s.hidden), "head", matmul=True)
    if family.head_bias:
        yield Param(family.head.replace("weight", "bias"), (s.vocab,), "head")


def _activation(kind: str, reader: _Reader) -> str:
    name = str(reader.values.get("hidden_act", "silu"))
    return "gelu_pytorch_tanh" if kind == "gemma" and name == "gelu" else name  # as its class reads old files


def _buffer_bytes(config: Mapping[str, Any], s: Shape, rotary_dim: int) -> int:
    """Rotary frequencies in FP32, kept twice for each kind of layer that has its own, and Gemma's embedding scale."""
    kinds = 1
    if s.type == "gemma3_text":  # every sixth layer sees the whole sequence, where the config does not list them
        kinds = len(set(config.get("layer_types") or ("full" if (i + 1) % 6 == 0 else "near" for i in range(s.layers))))
    return 2 * 4 * ((rotary_dim + 1) // 2) * kinds + (4 if s.type.startswith("gemma") else 0)


def from_mapping(config: Mapping[str, Any], source: str, inline: bool = False) -> Arch | Unknown:
    """Shape from the content of a config.json. ``inline``: written by hand, so a near-miss of a key is an error.

    Raises UsageError for a value that no model can have.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise UsageError(f"no model_type in {source}", "It names the kind of model.", "Add one, such as 'llama'.")
    family = FAMILIES.get(kind)
    if family is None:
        reason = f"model type '{kind}' is not among those counted without torch ({', '.join(FAMILIES)})"
        return Unknown(reason, was_read=True)
    if inline:
        _refuse_near_misses(config, family, source)
    if config.get("quantization_config"):
        why = "Quantised weights have no gradients and no FP32 masters."
        do = "Start from the model that was quantised, in bf16, fp16 or fp32."
        raise UsageError(f"quantization_config in {source}", why, do)
    reader = _Reader(config, family, source)
    shape = _read(kind, reader)
    uncounted = _uncounted(kind, config, family, shape)
    if uncounted is not None:
        return Unknown(uncounted, was_read=True)
    tied, rotary_dim = reader.flag("tie_word_embeddings"), family.rotary_dim(config, shape.head_dim)
    attention_dropout, hidden_dropout = map(reader.probability, family.dropouts)
    dtype = config.get("dtype") or config.get("torch_dtype")
    return Arch(
        model_type=kind,
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate=shape.moe_intermediate if shape.experts else shape.intermediate,
        vocab=shape.vocab,
        max_positions=shape.max_positions,
        learned_positions=bool(family.positions),
        rotary_dim=rotary_dim,
        tied=tied,
        activation=_activation(kind, reader),
        attention_dropout=attention_dropout,
        hidden_dropout=hidden_dropout,
        whole_logits=family.makes_whole_logits(config),
        router_loss=family.adds_router_loss(config),
        attends=attends(config, shape),
        experts=shape.experts,
        experts_per_token=shape.experts_per_token,
        shared_intermediate=shape.shared_intermediate if shape.experts else 0,
        buffer_bytes=_buffer_bytes(config, shape, rotary_dim),
        dtype=dtype if isinstance(dtype, str) else None,
        source=source,
        params=tuple(_params(family, shape, tied)),
    )


def _refuse_near_misses(config: Mapping[str, Any], family: Family, source: str) -> None:
    # transformers keeps any key it does not know as a plain attribute: a typing mistake would silently train
    # a model of the default size. Keys that resemble none of the sizes are left to transformers.
    own = {family.names.get(field, field) for field in FIELDS} | set(family.also)
    for key in config:
        if key in own or key == "model_type":
            continue
        near = [family.names[key]] if key in family.names else difflib.get_close_matches(key, own, 1, 0.85)
        if near and near[0] not in config:
            raise UsageError(f"{source}: unknown key '{key}'", "It would be ignored.", f"Did you mean '{near[0]}'?")


# ------------------------------------------------------------------------------------------------ finding


def look(
    path: str | None = None, config: Mapping[str, Any] | None = None, revision: str | None = None
) -> Arch | Unknown:
    """The shape of ``model.path`` (a folder or hub id) or of an inline ``model.config``; never uses the network.

    A hub id is looked up in the local cache, then among the shapes that this package carries. Raises UsageError
    for a folder without a readable config.json.
    """
    if config is not None:
        return from_mapping(config, "model.config", inline=True)
    if not path:
        return Unknown("neither model.path nor model.config is given")
    folder = Path(path).expanduser()
    if folder.is_dir():
        return from_mapping(_read_json(folder / "config.json", folder), str(folder / "config.json"))
    if folder.exists():
        raise UsageError(
            f"model.path = {path}", "It is a file.", "Give the folder that holds config.json, or a hub id."
        )
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        return Unknown(f"there is no folder {path}", missing=True)
    cached = hub_cache_file(path, revision)
    if cached is not None:
        return from_mapping(_read_json(cached, cached.parent), str(cached))
    known = known_config(path)
    if known is not None:
        return from_mapping(known, f"the shape known for {path}")
    return Unknown(f"'{path}' is not in the local cache")


def known_config(hub_id: str) -> Mapping[str, Any] | None:
    """What config.json of a hub id says of its shape, where this package carries it."""
    known = json.loads(Path(__file__).with_name("arch_known.json").read_text("utf-8"))
    return next((entry["config"] for entry in known if hub_id in entry["ids"]), None)


def _read_json(file: Path, folder: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"model.path = {folder}",
            "The folder holds no config.json, so it is not a Hugging Face model folder.",
            "Give a folder that save_pretrained or `mpdist export` wrote, or a hub id.",
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read", str(error), "Write the file again from its source.") from None
    if not isinstance(value, dict):
        raise UsageError(f"{file} cannot be read", "It holds no JSON object.", "Write the file again from its source.")
    return value


def hub_cache_file(hub_id: str, revision: str | None) -> Path | None:
    """config.json of a hub id in the Hugging Face cache folder."""
    folder = hub_snapshot(hub_id, revision)
    return folder / "config.json" if folder is not None and (folder / "config.json").is_file() else None


def hub_snapshot(hub_id: str, revision: str | None) -> Path | None:
    """The folder of a hub id in the Hugging Face cache, whole or not, found by that cache's documented layout."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    repo = Path(hub).expanduser() / ("models--" + hub_id.replace("/", "--"))
    commit = revision or "main"
    reference = repo / "refs" / commit
    if reference.is_file():
        commit = reference.read_text("utf-8").strip()
    folder = repo / "snapshots" / commit
    return folder if folder.is_dir() else None
