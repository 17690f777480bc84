"""The layers of transformers' causal LMs, written down in the operations of a `Tape`.

Each function follows the forward of its class in transformers 5.24 line by line: the same operations in the same order,
the same names kept for as long, since what is still named is still in memory. A test holds them against fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpdist.arch import Arch
from mpdist.plan_tape import Node, Store, Tape, Value

LAYER_NORMS = ("gpt2", "gpt_neox", "opt", "phi")
JOINING = ("gpt_neox", "phi", "phi3")  # lay the rotated and the other elements of a head end to end
GEMMAS = ("gemma", "gemma2", "gemma3_text")
INDEX = 8  # bytes of an int64


@dataclass(frozen=True)
class Weight:
    """A parameter: its elements, whether it trains and is a matrix, and the bytes of the dtype that it computes in."""

    count: int
    trains: bool
    matrix: bool = False
    item: int = 0


NOTHING = Weight(0, False)


@dataclass(frozen=True)
class Layer:
    """One block to be played. weights: by name within the block. masked: attention gets a dense mask. scores: attention
    is written out (eager), keeping its scores. sparse: its MLP is one of experts."""

    tape: Tape
    arch: Arch
    weights: Mapping[str, Weight]
    seq_len: int
    masked: bool
    scores: bool
    several: bool = True  # sequences in a micro-batch
    fused: bool = True  # whether dropout is part of its kernels, as on a GPU

    def weight(self, name: str) -> Weight:
        return self.weights.get(name, NOTHING)

    def linear(self, x: Value, width: int, name: str) -> Value:
        weight, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        biases = bias.count if bias.trains else 0
        return self._in(weight.item, x, lambda x: self.tape.linear(x, width, weight.count, weight.trains, biases))

    def norm(self, x: Value, name: str, heads: int = 1) -> Value:
        weight = self.weight(f"{name}.weight")
        return self._in(weight.item, x, lambda x: norm(self.tape, x, weight, self.arch.model_type, heads))

    def module(self, name: str, x: Value, call: Callable[[Value], Value]) -> Value:
        """A module's forward, all of it in FP32 where all its weights are."""
        items = {w.item for key, w in self.weights.items() if key.startswith(name)}
        return self._in(4 if items == {4} else 0, x, call)

    def _in(self, item: int, x: Value, call: Callable[[Value], Value]) -> Value:
        """The call in a dtype of so many bytes, 0 for the usual one: what enters is cast, and what leaves is cast back."""
        t, usual = self.tape, self.tape.item
        if item in (0, usual):
            return call(x)
        t.item = item
        try:
            out = call(t.to(x, item))
        finally:
            t.item = usual
        return t.to(out, usual)


def norm(t: Tape, x: Value, weight: Weight, kind: str, heads: int = 1) -> Value:
    """A norm of the family's. heads: how many of a token's parts are normed, one by one."""
    if kind in LAYER_NORMS:
        return t.layer_norm(x, weight.count, weight.trains)
    return rms_norm(t, x, weight, kind, heads)


def rms_norm(t: Tape, hidden: Value, weight: Weight, kind: str, heads: int = 1) -> Value:
    """RMS norms of all families: the square root in FP32; Gemma and OLMo 2 scale in FP32 too. heads: normed one by one."""
    item = hidden.item
    hidden = t.to(hidden, 4)
    power = t.apply(hidden, keeps=True, grads=3)
    root = t.keeping_result(power, width=heads)  # mean and reciprocal root
    del power
    hidden = t.mul(hidden, root)
    del root
    if kind in GEMMAS:
        hidden = t.scale(hidden, weight.count, weight.trains)
        return t.to(hidden, item)
    if kind == "olmo2":
        return t.to(t.scale(hidden, weight.count, weight.trains), item)
    return t.scale(t.to(hidden, item), weight.count, weight.trains)


def activation(t: Tape, x: Value, name: str) -> Value:
    """As transformers' ACT2FN has it: gelu_new is written out in Python, the others are one operation."""
    if name == "gelu_new":
        half = t.apply(x)
        return t.mul(half, t.apply(t.keeping_result(t.apply(t.add(x, t.apply(t.apply(x, keeps=True, grads=3)))))))
    return t.keeping_result(x) if name == "relu" else t.apply(x, keeps=True)


def _rotate(t: Tape, x: Value, rotary: int, heads: int, cats: bool) -> Value:
    """x * cos + rotate_half(x) * sin on `rotary` elements of each head; the rest passes."""
    width = rotary * heads
    whole = not cats
    turned = x if whole else t.cut(x, width)
    half = width // 2
    straight = t.apply(turned)
    first, second = t.cut(turned, half), t.cut(turned, width - half)
    crossed = t.apply(t.cat(t.apply(second), first))
    del first, second
    return t.add(straight, crossed)


def rotary(b: Layer, q: Value, k: Value) -> tuple[Value, Value, tuple[Value, ...]]:
    """Rotated queries and keys, and what Phi still names until attention is done: the pieces they are laid together from."""
    t, a = b.tape, b.arch
    cats = a.model_type in JOINING
    q_turned = _rotate(t, q, a.rotary_dim, a.heads, cats)
    if cats and a.model_type != "phi":
        q_turned = _joined(t, q_turned, q)
    k_turned = _rotate(t, k, a.rotary_dim, a.kv_heads, cats)
    if a.model_type == "phi":
        return _joined(t, q_turned, q), _joined(t, k_turned, k), (q, k, q_turned, k_turned)
    return q_turned, _joined(t, k_turned, k) if cats else k_turned, ()


def _joined(t: Tape, turned: Value, whole: Value) -> Value:
    return t.cat(turned, t.cut(whole, whole.width - turned.width))


Attended = tuple[Value, Value | None]  # what attention returns, and its scores where they are written out


def attend(b: Layer, q: Value, k: Value, v: Value) -> Attended:
    """transformers' attention interface: torch's fused kernel, or eager."""
    t, a = b.tape, b.arch
    groups = a.heads // a.kv_heads
    if not b.scores:
        if a.attention_dropout and not b.fused:
            return _written_out(b, q, k, v), None
        if b.masked:
            k, v = t.repeat(k, groups), t.repeat(v, groups)
        out = t.attention(q, k, v, a.heads, t.item * b.seq_len if b.masked else 0)
        # The kernel's result lies as its queries do: head by head where they were laid end to end, so it is copied.
        return (t.copied(out) if a.model_type in JOINING else out), None
    k, v = t.repeat(k, groups), t.repeat(v, groups)
    joined, repeated = a.model_type in JOINING, groups > 1
    weights = t.apply(_product(b, q, k, a.heads * b.seq_len, (not joined, not joined and not repeated)))
    if a.model_type == "gemma2":
        weights = t.apply(weights)
        weights = t.keeping_result(weights)
        weights = t.apply(weights)
    weights = t.copied(weights)  # the causal mask is added
    weights = t.to(t.keeping_result(weights if a.model_type == "gpt2" else t.to(weights, 4)), t.item)
    out = _product(b, weights, v, q.width, (False, not repeated))
    if a.model_type != "gpt2":
        out = t.copied(out)  # contiguous()
    return out, weights


def _written_out(b: Layer, q: Value, k: Value, v: Value) -> Value:
    """torch's attention where no kernel takes dropout (on a CPU): in FP32, scores and all."""
    t, a = b.tape, b.arch
    groups = a.heads // a.kv_heads
    q, k, v = t.to(q, 4), t.to(t.repeat(k, groups), 4), t.to(t.repeat(v, groups), 4)
    scaled = t.apply(q)
    scores = _product(b, scaled, t.apply(k), a.heads * b.seq_len, (True, True))
    scores = t.copied(scores)  # the causal mask is added
    scores = t.keeping_result(scores)
    scores = t.dropout(scores, fused=False)
    _weights = t.to(scores, t.item)
    return t.copied(t.to(_product(b, scores, v, q.width, (False, True)), t.item))


def _product(b: Layer, x: Value, y: Value, width: int, scattered: tuple[bool, bool]) -> Value:
    """A batched product of two values; one whose heads lie scattered over the rows of several sequences is copied."""
    t = b.tape
    if b.several:
        x, y = (t.copied(v) if far else v for v, far in ((x, scattered[0]), (y, scattered[1])))
    sizes = [x.size, y.size]
    node = t.record([x, y], lambda node, grad: [t.new(size) for size in sizes])
    t.keep(node, x, y)
    return t.made(width, x.item, node, t.every_second())


def attention(b: Layer, hidden: Value) -> Attended:
    """Separate projections for queries, keys and values (the Llama line, Gemma, Qwen, OPT, Phi)."""
    t, a, kind = b.tape, b.arch, b.arch.model_type
    opt, normed = kind == "opt", kind in ("qwen3", "qwen3_moe", "olmo2")
    heads = (1, 1) if kind == "olmo2" else (a.heads, a.kv_heads)  # OLMo 2 norms all of them as one
    q = b.linear(hidden, a.q_width, "self_attn.q_proj")
    if opt:
        q = t.apply(q)
    elif normed:
        q = b.norm(q if kind == "olmo2" else t.copied_back(q), "self_attn.q_norm", heads[0])
    k = b.linear(hidden, a.kv_width, "self_attn.k_proj")
    if normed:
        k = b.norm(k if kind == "olmo2" else t.copied_back(k), "self_attn.k_norm", heads[1])
    v = b.linear(hidden, a.kv_width, "self_attn.v_proj")
    if not opt and not normed:
        q, k = t.copied_back(q), t.copied_back(k)
    if kind == "gemma3_text":
        q = b.norm(q, "self_attn.q_norm", heads[0])
        k = b.norm(k, "self_attn.k_norm", heads[1])
    if not opt:
        q, k, _pieces = rotary(b, q, k)
    out, scores = attend(b, q, k, v)
    return b.linear(out, a.hidden, "self_attn." + {"opt": "out_proj", "phi": "dense"}.get(kind, "o_proj")), scores


def fused_attention(b: Layer, hidden: Value) -> Attended:
    """One projection for all three (GPT-2, GPT-NeoX, Phi-3)."""
    t, a, kind = b.tape, b.arch, b.arch.model_type
    names = {"gpt2": ("attn.c_attn", "attn.c_proj"), "gpt_neox": ("attention.query_key_value", "attention.dense")}
    into, out_of = names.get(kind, ("self_attn.qkv_proj", "self_attn.o_proj"))
    qkv = b.linear(hidden, a.q_width + 2 * a.kv_width, into)
    if kind == "phi3":
        q, k, v = t.cut(qkv, a.q_width), t.cut(qkv, a.kv_width), t.cut(qkv, a.kv_width)
    else:
        if kind == "gpt_neox":
            qkv = t.copied_back(qkv)
        q, k, v = t.split(qkv, a.q_width, a.kv_width, a.kv_width)
    if kind != "gpt2":
        q, k, _ = rotary(b, q, k)
    out, scores = attend(b, q, k, v)
    return b.linear(out, a.hidden, out_of), scores


def gated_mlp(b: Layer, x: Value, name: str = "mlp", width: int = 0) -> Value:
    t, wide, kind = b.tape, width or b.arch.intermediate, b.arch.activation
    # One expression, as there: no name keeps what has passed.
    return b.linear(
        t.mul(activation(t, b.linear(x, wide, f"{name}.gate_proj"), kind), b.linear(x, wide, f"{name}.up_proj")),
        b.arch.hidden,
        f"{name}.down_proj",
    )


def fused_mlp(b: Layer, x: Value) -> Value:
    """Phi-3's: gate and up in one product."""
    t, a = b.tape, b.arch
    up = b.linear(x, 2 * a.intermediate, "mlp.gate_up_proj")
    gate, up = t.split(up, a.intermediate, a.intermediate)
    up = t.mul(up, activation(t, gate, a.activation))
    del gate
    return b.linear(up, a.hidden, "mlp.down_proj")


def plain_mlp(b: Layer, x: Value, first: str, second: str) -> Value:
    wide = b.linear(x, b.arch.intermediate, first)  # what entered stays named by the module's call
    wide = activation(b.tape, wide, b.arch.activation)
    return b.linear(wide, b.arch.hidden, second)


# -- experts: all of them in one grouped product, as transformers runs them ---------------------------------------


def experts(b: Layer, hidden: Value) -> Value:
    """A sparse MLP: each token meets `experts_per_token` experts, and in Qwen2-MoE one that all share."""
    shared = None
    if b.arch.shared_intermediate:
        shared = gated_mlp(b, hidden, "mlp.shared_expert", b.arch.shared_intermediate)
    _logits, weights, _chosen = _router(b, hidden)
    out = _grouped(b, hidden, weights)
    if shared is None:
        return out
    gate = b.linear(hidden, 1, "mlp.shared_expert_gate")
    shared = b.tape.mul(shared, b.tape.keeping_result(gate))
    return b.tape.add(out, shared)


def _router(b: Layer, hidden: Value) -> tuple[Value, Value, Value]:
    """(logits of all experts, weights and indices of the chosen ones)."""
    t, count, top = b.tape, b.arch.experts, b.arch.experts_per_token
    logits = b.linear(hidden, count, "mlp.gate")
    probabilities = t.keeping_result(t.to(logits, 4))
    size = probabilities.size
    chosen = Value(t.new(INDEX * top), top, INDEX, None)
    node = t.record([probabilities], lambda node, grad: [t.new(size)])
    weights = t.made(top, 4, node)
    t.keep(node, chosen)
    weights = t.apply(weights, keeps=True)  # their sum is divided out
    if b.arch.model_type != "mixtral":
        weights = t.to(weights, t.item)
    return logits, weights, chosen


def _indexed(t: Tape, x: Value, width: int, rows: int) -> Value:
    """Rows of x picked by `rows` indices a token, which backward reads to lay the gradient into zeros."""
    size = x.size

    def rule(node: Node, grad: Store) -> list[Store]:
        zeros = t.new(size)
        laid = t.new(size)
        del zeros
        return [laid]

    node = t.record([x], rule)
    t.keep(node, Value(t.new(INDEX * rows), rows, INDEX, None))
    return t.made(width, x.item, node)


def _expert(b: Layer, x: Value, width: int, name: str) -> Value:
    """Each row times the matrix of its expert."""
    t, weight, size = b.tape, b.weight(name), x.size

    def rule(node: Node, grad: Store) -> list[Store]:
        back = t.new(size)
        if weight.trains:
            t.gradient(weight.count)
        return [back]

    node = t.record([x], rule, weight.trains)
    if weight.trains:
        t.keep(node, x)
    return t.made(width, t.item, node)


def _grouped(b: Layer, hidden: Value, weights: Value) -> Value:
    t, a, top = b.tape, b.arch, b.arch.experts_per_token
    order = Value(t.new(2 * INDEX * top), 2 * top, INDEX, None)  # sorted experts, and where they stood
    selected = _indexed(t, hidden, top * a.hidden, top)
    weights = _indexed(t, weights, top, top)
    out = _expert(b, selected, 2 * top * a.intermediate, "mlp.experts.gate_up_proj")
    gate, up = t.split(out, top * a.intermediate, top * a.intermediate)
    out = t.mul(activation(t, gate, a.activation), up)
    del gate, up
    out = _expert(b, out, top * a.hidden, "mlp.experts.down_proj")
    weighted = t.mul(out, Value(weights.store, top, weights.item, weights.node))
    weighted = _indexed(t, weighted, top * a.hidden, top)
    del order
    return t.to(t.apply(weighted, width=a.hidden), t.item)


# -- blocks -------------------------------------------------------------------------------------------------------


def _dropped(b: Layer, x: Value) -> Value:
    """Dropout of what a block adds: its mask and its result; without it nothing happens."""
    return b.tape.dropout(x, b.fused) if b.arch.hidden_dropout else x


Norms = tuple[str, str]  # of attention and of the MLP


def _one_after_the_other(b: Layer, hidden: Value, before: Norms | None, behind: Norms | None) -> Value:
    """Attention and then the MLP, each with what entered it added (the Llama line, Gemma, OLMo 2)."""
    t, attend = b.tape, fused_attention if b.arch.model_type == "phi3" else attention
    residual = hidden
    if before:
        hidden = b.norm(hidden, before[0])
    hidden, _scores = attend(b, hidden)
    if behind:
        hidden = b.norm(hidden, behind[0])
    hidden = t.add(residual, _scaled(b, _dropped(b, hidden)))
    residual = hidden
    if before:
        hidden = b.norm(hidden, before[1])
    hidden = _fed(b, hidden)
    if behind:
        hidden = b.norm(hidden, behind[1])
    return t.add(residual, _scaled(b, _dropped(b, hidden)))


def _fed(b: Layer, hidden: Value) -> Value:
    kind = b.arch.model_type
    if b.weight("mlp.experts.down_proj").count:
        return experts(b, hidden)
    return b.module("mlp.", hidden, lambda x: fused_mlp(b, x) if kind == "phi3" else gated_mlp(b, x))


def _scaled(b: Layer, x: Value) -> Value:
    return b.tape.apply(x) if b.arch.model_type == "granite" else x


def _gpt2(b: Layer, hidden: Value) -> Value:
    t = b.tape
    residual = hidden
    hidden = b.norm(hidden, "ln_1")
    attended, _scores = fused_attention(b, hidden)
    attended = _dropped(b, attended)
    hidden = t.add(attended, residual)
    residual = hidden
    hidden = b.norm(hidden, "ln_2")
    return t.add(residual, _dropped(b, plain_mlp(b, hidden, "mlp.c_fc", "mlp.c_proj")))


def _gpt_neox(b: Layer, hidden: Value) -> Value:
    t = b.tape
    attended, _scores = fused_attention(b, b.norm(hidden, "input_layernorm"))
    attended = _dropped(b, attended)
    mlp = plain_mlp(b, b.norm(hidden, "post_attention_layernorm"), "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    return t.add(t.add(_dropped(b, mlp), attended), hidden)


def _opt(b: Layer, hidden: Value) -> Value:
    """One name for all that passes, so that nothing waits for the end of a call."""
    t = b.tape
    residual = hidden
    hidden = b.norm(hidden, "self_attn_layer_norm")
    hidden, _scores = attention(b, hidden)
    hidden = _dropped(b, hidden)
    hidden = t.add(residual, hidden)
    residual = hidden
    hidden = b.norm(hidden, "final_layer_norm")
    hidden = b.linear(hidden, b.arch.intermediate, "fc1")
    hidden = activation(t, hidden, b.arch.activation)
    hidden = b.linear(hidden, b.arch.hidden, "fc2")
    hidden = _dropped(b, hidden)
    return t.add(residual, hidden)


def _phi(b: Layer, hidden: Value) -> Value:
    t = b.tape
    residual = hidden
    hidden = b.norm(hidden, "input_layernorm")
    attended, _scores = attention(b, hidden)
    attended = _dropped(b, attended)
    fed = _dropped(b, plain_mlp(b, hidden, "mlp.fc1", "mlp.fc2"))
    return t.add(t.add(attended, fed), residual)


_APART = {"gpt2": _gpt2, "gpt_neox": _gpt_neox, "opt": _opt, "phi": _phi}


def block(b: Layer, hidden: Value) -> Value:
    """One block of the family's, from what enters it to what leaves it."""
    kind = b.arch.model_type
    if kind in _APART:
        return b.module("", hidden, lambda x: _APART[kind](b, x))
    gemma = kind in GEMMAS[1:]
    second = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    before = None if kind == "olmo2" else ("input_layernorm", second)
    behind = ("post_attention_layernorm", "post_feedforward_layernorm") if gemma or kind == "olmo2" else None
    return b.module("", hidden, lambda x: _one_after_the_other(b, x, before, behind))
