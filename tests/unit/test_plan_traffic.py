"""Bytes between ranks: what is handed to collectives, what follows within and between nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpdist import arch, plan_zero
from mpdist.plan_memory import Asked
from mpdist.plan_traffic import Traffic, traffic


def shape() -> arch.Arch:
    found = arch.from_mapping(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 256,
        },
        "test",
    )
    assert isinstance(found, arch.Arch)
    return found


N = shape().total
ROOT = N - sum(shape().blocks)


def rows(**changes: Any) -> dict[tuple[str, str], Traffic]:
    base = Asked(ranks=8, nodes=1, micro=1, global_=8, seq_len=32, compute="bf16")
    return {(t.what, t.collective): t for t in traffic(replace(base, **changes), shape())}


def sent(t: Traffic) -> int:
    return t.sent_within + t.sent_between


def test_one_rank_sends_nothing() -> None:
    assert rows(ranks=1, global_=1) == {}
    assert rows(ranks=1, global_=1, engine="ddp", stage=0) == {}
    assert rows(ranks=1, global_=1, engine="deepspeed") == {}


@pytest.mark.parametrize(("wire", "width"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_a_wire_of_half_the_width_sends_half_the_bytes(wire: str, width: int) -> None:
    reduced = rows(wire=wire)["gradients", "reduce-scatter"]
    assert reduced.payload_within == N * width
    assert sent(reduced) == N * width * 7 // 8
    replicated = rows(wire=wire, engine="ddp", stage=0)["gradients", "all-reduce"]
    assert sent(replicated) == pytest.approx(2 * N * width * 7 / 8, rel=1e-3)


def test_two_ranks_swap_their_addends() -> None:
    swap = rows(ranks=2, global_=2, engine="ddp", stage=0, device="cpu")["gradients", "all-reduce"]
    assert swap.payload_within == swap.sent_within == 4 * N


def test_accumulation_multiplies_traffic_unless_it_waits_for_the_last() -> None:
    once, every = rows()["gradients", "reduce-scatter"], rows(global_=32)["gradients", "reduce-scatter"]
    last = rows(global_=32, when="last")["gradients", "reduce-scatter"]
    assert sent(every) == 4 * sent(once)
    assert sent(last) == sent(once)
    for engine in ({}, {"engine": "ddp", "stage": 0}):
        four, one = rows(global_=32, **engine), rows(global_=32, when="last", **engine)
        key = next(k for k in four if k[0] == "gradients")
        assert sent(four[key]) == 4 * sent(one[key])


def test_stage_three_gathers_blocks_twice_and_the_rest_once() -> None:
    three, two = rows()["parameters", "all-gather"], rows(stage=2)["parameters", "all-gather"]
    assert sent(two) == 2 * N * 7 // 8
    assert sent(three) == 2 * (2 * N - ROOT) * 7 // 8


def test_modules_kept_in_fp32_are_gathered_in_fp32() -> None:
    kept = rows(stage=2, keep_fp32=("lm_head",))["parameters", "all-gather"]
    assert sent(kept) == (2 * N + 2 * shape().head) * 7 // 8


def test_frozen_parameters_are_gathered_but_not_reduced() -> None:
    found = rows(freeze=("model.embed_tokens.*",))
    assert found["gradients", "reduce-scatter"].payload_within == 4 * (N - shape().embedding)
    assert sent(found["parameters", "all-gather"]) == sent(rows()["parameters", "all-gather"])


@pytest.mark.parametrize("nodes", [2, 4])
def test_between_nodes_two_levels_send_no_more_than_a_ring(nodes: int) -> None:
    inner = 8 // nodes
    found = rows(nodes=nodes, wire="bf16")["gradients", "reduce-scatter"]
    assert sent(found) == pytest.approx(2 * N * 7 / 8, rel=1e-3)  # in all as many as one ring
    ring = 2 * N * 7 / 8 / inner
    assert 0 < found.sent_between <= ring
    assert found.sent_between == 2 * N // inner * (nodes - 1) // nodes
    assert found.payload_between == 2 * N // inner


def test_replicas_on_nodes_send_only_their_shard_between_them() -> None:
    found = rows(nodes=4, ranks=32, replicas=4, global_=32, wire="bf16", device="cpu")
    inside, across = found["gradients", "reduce-scatter"], found["gradients", "all-reduce of replicas"]
    assert (inside.ranks, across.ranks) == (8, 4)
    assert inside.sent_between == across.sent_within == 0
    assert across.sent_between == pytest.approx(2 * (N / 8) * 2 * 3 / 4, rel=1e-3)
    assert found["parameters", "all-gather"].sent_between == 0


def test_replicas_inside_a_node_stay_there() -> None:
    found = rows(replicas=4)
    assert all(t.sent_between == 0 for t in found.values())
    assert found["gradients", "reduce-scatter"].ranks == 2


def test_ddp_over_nodes_crosses_with_an_equal_part_of_each_rank() -> None:
    found = rows(nodes=2, engine="ddp", stage=0, wire="bf16", device="cpu")["gradients", "all-reduce"]
    assert found.sent_between == pytest.approx(2 * N / 4, rel=1e-3)
    assert found.sent_within == pytest.approx(2 * 2 * N * 3 / 4, rel=1e-3)


def test_json_gives_both_kinds_of_bytes() -> None:
    data = rows(nodes=2)["gradients", "reduce-scatter"].json()
    assert data["payload_bytes"] == data["payload_bytes_within"] + data["payload_bytes_between"]  # type: ignore[operator]
    assert {"what", "collective", "dtype", "times", "sent_bytes_within", "sent_bytes_between", "formula"} <= set(data)


# -- DeepSpeed ------------------------------------------------------------------------------------------------------------


def test_zero_below_3_sends_gradients_to_their_owners_and_gathers_parameters_after_the_step() -> None:
    every = rows(engine="deepspeed", stage=2, global_=16, wire="bf16")
    assert every["gradients", "all-to-all"].payload_within == 2 * 2 * N
    assert every["parameters", "all-gather"].times == 1
    assert sent(every["parameters", "all-gather"]) == 2 * N * 7 // 8
    once = rows(engine="deepspeed", stage=1, global_=16, when="last")
    assert once["gradients", "all-to-all"].payload_within == 4 * N
    frozen = rows(engine="deepspeed", stage=2, freeze=("model.embed_tokens.*",))
    assert frozen["gradients", "all-to-all"].payload_within == 4 * (N - shape().embedding)
    assert sent(frozen["parameters", "all-gather"]) == pytest.approx(2 * (N - shape().embedding) * 7 / 8, rel=1e-3)


def test_zero_3_gathers_at_each_use_unless_the_model_fits_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    three: dict[str, Any] = {"engine": "deepspeed", "stage": 3}
    assert rows(**three)["gradients", "reduce-scatter"].payload_within == 4 * N
    assert sent(rows(**three)["parameters", "all-gather"]) == 2 * N * 7 // 8
    monkeypatch.setattr(plan_zero, "BUCKET", 1000)
    twice = sent(rows(**three)["parameters", "all-gather"])
    assert twice == 2 * (2 * N - shape().head) * 7 // 8
    again = sent(rows(**three, checkpointing="every 2")["parameters", "all-gather"])
    assert again - twice == 2 * shape().blocks[0] * 7 // 8
    assert sent(rows(**three, global_=16)["parameters", "all-gather"]) == 2 * twice


def test_zero_between_nodes_sends_what_its_own_column_owns() -> None:
    found = rows(engine="deepspeed", stage=2, nodes=2)["gradients", "all-to-all"]
    assert found.payload_within == 4 * N
    assert found.payload_between == pytest.approx(4 * N / 4, rel=1e-3)
