"""Autograd on sizes: what a tape keeps, gives back and peaks at, and what follows for whole models."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mpdist import arch
from mpdist.arch_families import FAMILIES
from mpdist.plan_activations import Counted, counted, top
from mpdist.plan_memory import Asked, ledger_of
from mpdist.plan_moments import how_of
from mpdist.plan_tape import Tape, Value

SHAPES = sorted((Path(__file__).resolve().parents[1] / "shapes").glob("*.json"))
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 96,
}


def shape(kind: str = "llama", **more: object) -> arch.Arch:
    found = arch.from_mapping({"model_type": kind, **SMALL, **more}, "test")
    assert isinstance(found, arch.Arch)
    return found


def asked(**changes: object) -> Asked:
    return replace(Asked(ranks=8, nodes=1, micro=1, global_=8, seq_len=128), **changes)  # type: ignore[arg-type]


def played(a: Asked, model: arch.Arch) -> Counted:
    return counted(model, how_of(a, model))


# -- the tape ---------------------------------------------------------------------------------------------------------


def test_memory_is_given_back_with_the_last_name() -> None:
    t = Tape(2)
    x = t.given(10)
    y = t.apply(x, keeps=True)
    assert t.now == 40  # both, of two bytes an element
    del x
    assert t.now == 40  # kept for backward
    del y
    assert t.now == 20


def test_a_linear_layer_keeps_its_input_and_makes_two_gradients() -> None:
    t = Tape(2)
    x = t.given(10)
    y = t.linear(x, 30, count=300)
    end, size, entered = y.node, y.size, x.node
    del x, y
    assert t.now == 20
    t.points = []
    assert end is not None
    assert entered is not None
    t.backward(end, size)
    assert t.gradients == 600
    assert max(t.points) == (20 + 60 + 20, 600)  # what is kept, the gradient that comes, the one that goes on
    assert entered.grad is not None
    assert t.now == entered.grad.size == 20


def test_nothing_is_kept_for_what_does_not_train() -> None:
    t = Tape(2)
    x = t.given(10, needs=False)
    frozen = t.linear(x, 30, count=300, trains=False)
    assert frozen.node is None
    del x
    assert t.now == frozen.size
    trained = t.linear(frozen, 5, count=150)
    assert trained.node is not None


def test_a_sum_hands_one_gradient_to_both_sides() -> None:
    t = Tape(4)
    x = t.given(8)
    y = t.add(x, t.apply(x, keeps=True))
    end, size = y.node, y.size
    del x, y
    t.points = []
    assert end is not None
    t.backward(end, size)
    # x that is kept and one gradient for both; then that of the branch, and the sum of the two beside them.
    assert [point[0] for point in t.points] == [64, 96, 96]


def test_recomputation_keeps_the_argument_and_stops_where_nothing_more_is_asked_for() -> None:
    def call(x: Value) -> Value:
        return t.linear(t.apply(t.linear(x, 40, 1), keeps=True), 10, 1)

    made = {}
    for checkpointed in (False, True):
        t = Tape(2)
        x = t.given(10)
        y = t.checkpoint(call, x) if checkpointed else call(x)
        end, size = y.node, y.size
        del x, y
        made[checkpointed] = t.now
        t.points = []
        assert end is not None
        t.backward(end, size)
        assert t.now == 20
        if checkpointed:  # the last product's result is never made again
            assert [point[0] for point in t.points][:3] == [40, 120, 200]
    assert made == {False: 20 + 80 + 80, True: 20}


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_gives_back_all_it_has_kept(kind: str) -> None:
    model = shape(kind)
    for mode in ("none", "selective", "full"):
        found = played(asked(checkpointing=mode), model)
        for block, weights in zip(found.blocks, model.blocks, strict=True):
            assert block.enters == block.leaves == 2 * model.hidden
            assert block.gradients == 2 * weights
            assert block.kept >= 2 * model.hidden
            # The gradient that comes beside all that is kept, and less than twice that at any time once it is there again.
            assert top(block.backward, 1 << 20)[0] >= (block.kept + block.enters) << 20
    kept = [played(asked(checkpointing=mode), model).blocks[0].kept for mode in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    assert kept[2] == 2 * model.hidden


def test_blocks_before_the_first_that_trains_keep_nothing() -> None:
    model = shape()
    found = played(asked(freeze=("model.embed_tokens.*", "model.layers.[01].*")), model)
    assert [block.kept > 0 for block in found.blocks] == [False, False, True]
    assert [block.enters > 0 for block in found.blocks] == [False, False, True]
    assert found.blocks[2].leaves == 0
    norms = played(asked(freeze=("*proj*",)), model).blocks[0]
    assert norms.kept < played(asked(), model).blocks[0].kept


def test_a_window_shorter_than_the_rows_brings_a_mask_to_its_layers_only() -> None:
    model = shape("gemma3_text", num_hidden_layers=6, sliding_window=64, head_dim=16, num_key_value_heads=2)
    assert model.attends == (64,) * 5 + (0,)
    near, whole = (played(asked(), model).blocks[i].kept for i in (0, 5))
    repeated = 2 * 2 * (model.q_width - model.kv_width)
    assert near - whole == 2 * 128 + repeated  # the mask in the compute dtype, keys and values for each head
    assert len({block.kept for block in played(asked(seq_len=32), model).blocks}) == 1


def test_a_model_is_played_once_for_all_micro_batches_and_ranks() -> None:
    model = shape()
    a, b = (
        played(asked(micro=micro, global_=8 * micro, ranks=8, wire=wire), model)
        for micro, wire in ((2, "fp32"), (4, "bf16"))
    )
    assert a is b


@pytest.mark.alone
@pytest.mark.parametrize("file", SHAPES, ids=lambda file: file.stem)
def test_a_published_shape_is_planned_at_once(file: Path) -> None:
    model = arch.from_mapping(json.loads(file.read_text()), file.name)
    assert isinstance(model, arch.Arch)
    for engine, stage in (("fsdp2", 3), ("ddp", 0), ("deepspeed", 2)):
        a = asked(engine=engine, stage=stage, ranks=512, nodes=64, global_=4096, seq_len=1024)
        began = time.process_time()
        first = ledger_of(a, model)
        once = time.process_time() - began
        again = []
        for _ in range(3):
            began = time.process_time()
            for micro in (1, 2, 4, 8):
                ledger_of(replace(a, micro=micro), model)
            again.append(time.process_time() - began)
        assert once < 0.2
        assert min(again) < 0.08
        assert all(row.formula and row.source for row in first.rows)
        assert {row.row for row in first.rows if row.error} >= {"activations", "logits", "comm"}
        exact = {row.row: row.error for row in first.rows if row.row in ("parameters", "moments", "buffers")}
        assert not any(exact.values())
        own = {row.row: row.peak_bytes for row in first.rows}
        for _, held in first.moments:
            assert all(size <= own.get(row, 0) for row, size in held.items() if row != "snapshot")
