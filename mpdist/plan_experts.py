"""Mixtures of experts in the operations of a `Tape`, as transformers runs them: all experts in one grouped product."""

from __future__ import annotations

from mpdist.plan_layers import Layer, activation, gated_mlp
from mpdist.plan_tape import Node, Store, Tape, Value

INDEX = 8  # bytes of an int64


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


def _product(b: Layer, x: Value, width: int, name: str) -> Value:
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
    out = _product(b, selected, 2 * top * a.intermediate, "mlp.experts.gate_up_proj")
    gate, up = t.split(out, top * a.intermediate, top * a.intermediate)
    out = t.mul(activation(t, gate, a.activation), up)
    del gate, up
    out = _product(b, out, top * a.hidden, "mlp.experts.down_proj")
    weighted = t.mul(out, Value(weights.store, top, weights.item, weights.node))
    weighted = _indexed(t, weighted, top * a.hidden, top)
    del order
    return t.to(t.apply(weighted, width=a.hidden), t.item)
