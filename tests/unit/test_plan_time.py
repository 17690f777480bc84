"""The least time of a step: by hand for a model of 115,008 parameters and a device of round figures."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from mpdist import arch
from mpdist.devices import Device, require
from mpdist.plan_memory import Asked
from mpdist.plan_time import PUBLISHED, Time, estimate, flops_per_token, format_seconds, missing
from mpdist.plan_traffic import Traffic, traffic

DEVICE = Device("Round", 10**9, 1e12, 5e11, 2.5e11, 1e11, 1e10, "ring", "a sheet of paper")
# Blocks of 4 x 64 x 64 and 3 x 64 x 128, a head of 256 x 64: 98,304 parameters that a token is multiplied with.
MODEL = 6 * 98304 + 6 * 2 * 64 * 32
N = 2 * 256 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64


def shape() -> arch.Arch:
    fields = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    found = arch.from_mapping({"model_type": "llama", "vocab_size": 256, **fields}, "test")
    assert isinstance(found, arch.Arch)
    assert found.total == N
    return found


def asked(**changes: Any) -> Asked:
    return replace(Asked(ranks=8, nodes=1, micro=1, global_=16, seq_len=32), **changes)


def timed(what: Asked, device: Device | None = DEVICE, **more: Any) -> Time:
    found = estimate(what, shape(), traffic(what, shape()), device, **more)
    assert found is not None
    return found


def part(time: Time, name: str) -> float | None:
    return next(p.seconds for p in time.parts if p.name == name)


def test_compute_is_the_ranks_tokens_over_the_peak() -> None:
    found = timed(asked())
    assert found.model_flops_per_token == found.hardware_flops_per_token == MODEL
    # 2 micro-batches of 32 tokens
    assert part(found, "compute") == pytest.approx(2 * 32 * MODEL / 1e12)
    assert part(timed(asked(compute="fp32")), "compute") == pytest.approx(2 * 32 * MODEL / 2.5e11)
    assert part(timed(asked(compute="fp32"), tf32=True), "compute") == pytest.approx(2 * 32 * MODEL / 5e11)
    given = timed(asked(), peak=4e12)
    assert part(given, "compute") == pytest.approx(2 * 32 * MODEL / 4e12)
    assert given.peak_from == "track.peak_tflops"


@pytest.mark.parametrize(
    ("mode", "again"),
    [
        ("none", 0),
        # All but the last product of each block, and attention's causal half.
        ("full", 2 * (2 * (4 * 64 * 64 + 2 * 64 * 128) + 2 * 64 * 32)),
        ("every 2", 2 * (4 * 64 * 64 + 2 * 64 * 128) + 2 * 64 * 32),
        # Keys, attention's output and one of the MLP's three.
        ("selective", 2 * 2 * (2 * 64 * 64 + 64 * 128)),
    ],
)
def test_what_is_computed_twice_is_hardware_work_and_not_the_models(mode: str, again: int) -> None:
    model, hardware, twice = flops_per_token(asked(checkpointing=mode), shape())
    assert (model, hardware, twice) == (MODEL, MODEL + again, again)
    found = timed(asked(checkpointing=mode))
    assert part(found, "compute") == pytest.approx(64 * (MODEL + again) / 1e12)


def test_frozen_parts_have_no_gradients_to_compute() -> None:
    table = flops_per_token(asked(freeze=("model.embed_tokens.*",)), shape())[1]
    # The first block's inputs need no gradient: 2 a parameter, and backward through its attention.
    assert table == MODEL - 2 * 40960 - 4 * 64 * 32
    head = flops_per_token(asked(freeze=("model.*",), checkpointing="full"), shape())
    assert head[1] == 2 * 98304 + 2 * 16384 + 2 * 2 * 64 * 32
    assert head[2] == 0
    assert flops_per_token(asked(freeze=("lm_head.*",)), shape())[1] == MODEL - 2 * 16384


def test_bytes_take_the_nodes_links_and_the_network_at_once() -> None:
    rows = [
        Traffic("parameters", "all-gather", "bf16", 16, 1, 10, 10, 3_000_000, 500_000, ""),
        Traffic("gradients", "reduce-scatter", "fp32", 16, 1, 10, 10, 1_000_000, 0, ""),
    ]
    what = asked(ranks=16, nodes=2)
    found = estimate(what, shape(), rows, DEVICE, network=2e9)
    assert found is not None
    assert part(found, "links") == pytest.approx(4e6 / 1e10)
    assert part(found, "network") == pytest.approx(8 * 5e5 / 2e9)  # 8 ranks share their node's network
    optimizer = part(found, "optimizer")
    assert optimizer is not None
    assert found.seconds is not None
    assert found.seconds == pytest.approx(0.002 + optimizer)  # the longest of them, and what waits for all
    assert found.bound_by == "network"
    assert found.tokens_per_s == pytest.approx(16 * 32 / found.seconds)
    without = estimate(what, shape(), rows, replace(DEVICE, link=None))
    assert without is not None
    assert without.unknown == ("links", "network")
    assert without.bound_by == "compute"
    assert without.likely is None
    assert "links and network left out" in without.lines()[-1]


def test_an_all_reduce_by_nccl_may_be_added_up_in_the_switches() -> None:
    ddp = asked(engine="ddp", stage=0, global_=8)
    assert part(timed(ddp), "links") == pytest.approx(4 * N / 1e10, rel=1e-3)
    # In 16 bit with FP32 sums every rank sends its shares itself, twice 7/8 of all.
    assert part(timed(replace(ddp, wire="bf16")), "links") == pytest.approx(2 * 2 * N * 7 / 8 / 1e10, rel=1e-3)


def test_one_rank_sends_nothing_and_has_no_line_for_it() -> None:
    found = timed(asked(ranks=1))
    assert [p.name for p in found.parts] == ["compute", "optimizer"]


def test_the_optimizer_moves_its_shard_once() -> None:
    # Masters and two moments read and written, gradients read, 4 bytes each.
    assert part(timed(asked(engine="ddp", stage=0)), "optimizer") == pytest.approx(28 * N / 1e11)
    assert part(timed(asked()), "optimizer") == pytest.approx(28 * N / 8 / 1e11)
    assert part(timed(asked(master="compute")), "optimizer") == pytest.approx(14 * N / 8 / 1e11)


def test_offload_takes_the_hosts_link_and_has_no_sum() -> None:
    """Since it is no faster than without, and how fast a host steps is not known."""
    card = replace(DEVICE, host=5e9, host_name="a bus")
    table = 2 * 256 * 64 + 64  # what is in no block, gathered once; blocks forward and backward; 2 micro-batches
    found = timed(asked(offload="all"), card)
    assert part(found, "host link") == pytest.approx(2 * 4 * (2 * N - table) / 8 / 5e9)
    last = timed(asked(offload="all", stage=2, when="last"), card)
    assert part(last, "host link") == pytest.approx(2 * 4 * N / 8 / 5e9)  # the gradients once, a half of what comes
    zero = timed(asked(engine="deepspeed", stage=2, offload="optimizer"), card)
    assert part(zero, "host link") == pytest.approx(2 * N / 8 / 5e9)
    for away in (found, last, zero, timed(asked(offload="all"))):
        assert part(away, "optimizer") is None
        assert (away.seconds, away.tokens_per_s, away.likely) == (None, None, None)
        assert "no time of a step" in away.lines()[-1]
    assert timed(asked(offload="all")).unknown == ("host link", "optimizer")
    assert part(timed(asked(offload="all"), require("H100")), "host link") is not None
    assert "64 GB/s each way (PCIe 5.0 x16)" in "\n".join(timed(asked(offload="all"), require("H100")).lines())
    assert require("GH200 144GB").host is None
    assert require("L4").host == require("L4").link
    assert "host link" not in [p.name for p in timed(asked(), card).parts]


def test_without_a_peak_there_is_no_estimate_but_its_reason() -> None:
    v100, mi300 = require("V100 SXM 32GB"), require("MI300X")
    assert estimate(asked(), shape(), [], None) is None
    assert "not known" in missing(asked(), None)
    assert estimate(asked(), shape(), [], v100) is None
    assert missing(asked(), v100) == "V100 SXM 32GB has no BF16 products of its own"
    assert estimate(asked(compute="fp32"), shape(), [], mi300, tf32=True) is None
    assert "MI300X in FP32 products that may use TF32" in missing(asked(compute="fp32"), mi300, tf32=True)
    # Given by hand, the rate is enough for the work alone.
    found = estimate(asked(), shape(), traffic(asked(), shape()), None, peak=1e12)
    assert found is not None
    assert found.unknown == ("links", "optimizer")


def test_only_where_runs_are_published_is_a_range_named_and_it_says_whose() -> None:
    one = asked(ranks=1, global_=1600)
    found = timed(one, require("H100"))
    assert found.likely is not None
    assert found.seconds is not None
    model = 1600 * 32 * MODEL / 989.4e12
    assert found.likely == (max(found.seconds, model / PUBLISHED[1]), model / PUBLISHED[0])
    assert "33% to 68% MFU" in found.lines()[-1]
    assert "torchtitan" in found.lines()[-1]
    assert timed(one, require("L4")).likely is None
    assert timed(replace(one, compute="fp32"), require("H100")).likely is None
    assert timed(replace(one, freeze=("model.embed_tokens.*",)), require("H100")).likely is None
    # Bound by its wires below anything published.
    assert timed(asked(global_=8, seq_len=2), require("H100")).likely is None
    assert "no faster than" in timed(one, require("L4")).lines()[-1]


def test_the_report_carries_every_figure_with_its_formula() -> None:
    found = timed(asked(), require("H100"))
    read = json.loads(json.dumps(found.json()))
    assert read["no_faster_than_s"] == found.seconds
    assert [p["part"] for p in read["parts"]] == ["compute", "links", "optimizer"]
    assert all(p["formula"] for p in read["parts"])
    assert read["peak_from"] == "NVIDIA H100 Tensor Core GPU data sheet"
    assert "64 tokens x 0.000614 GFLOP / 989.4 TFLOP/s BF16" in "\n".join(found.lines())
    assert "/ 450 GB/s (NVLink 4)" in "\n".join(found.lines())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.234, "1.23 s"),
        (123.4, "123 s"),
        (12345.0, "12,345 s"),
        (0.0456, "45.6 ms"),
        (7.2e-6, "7.2 us"),
        (0.0, "0 us"),
    ],
)
def test_seconds_are_written_with_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
