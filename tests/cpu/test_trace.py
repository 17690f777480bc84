"""What a look at one process's window sees first, and which of several ranks' sights is told as the cause."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpdist import cause
from mpdist.config.schema import Precision
from mpdist.feed import Batch, Micro
from mpdist.precision import Decision, Policy, Reason
from mpdist.trace import Sight, Trace, look_at

HALF = torch.float16


class Two(nn.Module):
    """Two layers, and what a test puts between them."""

    def __init__(self, between: Any = lambda x: x, dtype: torch.dtype = HALF, again: bool = False) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, bias=False, dtype=dtype) for _ in range(2))
        self.between, self.again = between, again
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.eye(4))

    def forward(self, hidden: Tensor) -> Tensor:
        first = checkpoint(self.first, hidden, use_reentrant=False) if self.again else self.first(hidden)
        return self.second(self.between(first))


class Engine:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def leaves(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters())


def micro() -> Micro:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    index = torch.arange(6)
    return Micro(ids, ids, index, index, 6, np.array([40, 41]))


def watch(module: nn.Module, objective: Any, value: float = 1.0) -> Trace:
    """One micro-batch of two samples of three positions: objective(output) is what backward begins at."""
    trace = Trace(Engine(module), [micro()])  # type: ignore[arg-type]
    trace.start()
    trace.micro(0)
    output = module(torch.full((2, 3, 4), value, dtype=next(module.parameters()).dtype, requires_grad=True))
    loss = objective(output)
    trace.forwarded(loss, loss.detach().nan_to_num(0.0, 0.0, 0.0))
    loss.backward()
    trace.stop()
    assert not trace.broken, trace.broken
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    return trace


def only(trace: Trace) -> Sight:
    (sight,) = trace.sights
    return sight


def test_what_arises_between_two_modules_is_the_outer_one_s() -> None:
    def between(value: Tensor) -> Tensor:
        scale = torch.ones_like(value)
        scale[1, 2, 0] = 60000.0
        return value * scale * 2

    sight = next(s for s in watch(Two(between), lambda out: out.float().sum()).sights if s.in_forward)
    assert (sight.stage, sight.module, sight.tensor) == ("forward", "", "input 0 of second")
    assert (sight.index, sight.value, sight.count, sight.rows) == ((1, 2, 0), "inf", 1, (41,))
    assert (sight.last_good, sight.into, sight.out_of, sight.dtype) == ("first", 1.0, 2.0, "float16")


def test_masks_are_nothing_bad() -> None:
    class Masking(nn.Module):
        def forward(self, value: Tensor, mask: Tensor) -> Tensor:
            return value + mask

    class Attending(Two):
        def __init__(self) -> None:
            super().__init__(dtype=torch.float32)
            self.masking = Masking()

        def forward(self, hidden: Tensor) -> Tensor:
            mask = torch.zeros(4)
            mask[3] = -math.inf
            return self.second(self.masking(self.first(hidden), mask=mask).softmax(-1))

    assert watch(Attending(), lambda out: out.sum()).sights == []


def test_two_finite_gradients_may_have_a_sum_that_is_not() -> None:
    sight = only(
        watch(Two(), lambda out: (out * 40000).sum(dtype=torch.float32) + (out * 40000).sum(dtype=torch.float32))
    )
    assert (sight.stage, sight.module, sight.tensor) == ("backward", "second", "the sum of gradients of its output")
    assert (sight.value, sight.rows) == ("inf", (40, 41))


@pytest.mark.parametrize("again", [False, True])
def test_a_parameter_s_gradient_overflows_while_its_input_s_does_not(again: bool) -> None:
    """first's weight gradient is 6 x 200 x 100 > 65504; each single product is 20000."""
    sight = only(watch(Two(again=again), lambda out: (out * 100).sum(dtype=torch.float32), value=200.0))
    assert (sight.stage, sight.tensor, sight.value) == ("backward", "the gradient of second.weight", "inf")
    assert (sight.module, sight.into, sight.count, sight.rows) == ("second", 100.0, 16, (40, 41))


def test_a_derivative_without_a_value_is_where_it_is() -> None:
    trace = watch(Two(lambda x: (x - x).abs().sqrt(), torch.float32, again=True), lambda out: out.sum())
    sight = only(trace)
    assert (sight.stage, sight.module, sight.op) == ("backward", "", "SqrtBackward0")
    assert sight.last_good == "second"


def test_a_working_copy_beyond_its_range_is_a_parameter() -> None:
    module = Two()
    with torch.no_grad():
        module.second.weight[2, 1] = 1e5
    sight = watch(module, lambda out: out.float().sum()).sights[0]
    assert (sight.stage, sight.tensor, sight.index) == ("parameter", "parameter second.weight", (2, 1))
    assert sight.order < 10


def test_a_look_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Two()
    trace = Trace(Engine(module), [micro()])  # type: ignore[arg-type]
    monkeypatch.setattr(trace, "_parameters", lambda *_: 1 / 0)
    trace.start()
    trace.micro(0)
    loss = module(torch.ones(2, 3, 4, dtype=HALF)).sum()
    trace.forwarded(loss, loss.detach())
    loss.backward()
    trace.stop()
    assert trace.broken == "ZeroDivisionError: division by zero"


def test_all_about_a_tensor_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpdist import trace

    monkeypatch.setattr(trace, "_PIECE", 7)
    tensor = torch.arange(60.0).view(3, 4, 5)
    tensor[1, 2, 3], tensor[2, 0, 0] = math.nan, -math.inf
    found = look_at(tensor)
    assert (found.index, found.value, found.count, found.largest, found.masking) == ((1, 2, 3), "nan", 2, 59.0, False)


# -- of several ranks -------------------------------------------------------------------------------------------------

SIGHT = Sight("forward", 0, 5, "a", "output", "", (0,), "inf", 1, 8, "float16", (3,), "", 1.0, 2.0)
GOOD = cause.Seen([], [], False, [[3]], [], [], [1.0], True, True, "")


def attempt(reason: Reason, **changes: Any) -> cause.Attempt:
    decision = Decision(False, False, reason, math.nan, 0.0, 8.0, 4.0, False)
    return replace(cause.Attempt(Batch(0, [micro()], 12, 12, 12), decision, None, 1.0, True, True, True), **changes)


def told(
    ranks: list[cause.Seen], reason: Reason = Reason.GRADIENTS, cured: bool | None = None, **changes: Any
) -> cause.Report:
    tried = attempt(reason, **changes)
    return cause.tell(cause.find(ranks, tried), ranks, tried, cured)


def test_the_earliest_sight_of_all_ranks_is_the_cause() -> None:
    late, early = replace(SIGHT, micro=1), replace(SIGHT, order=9, module="b")
    backward = replace(SIGHT, stage="backward", order=1, module="c")
    ranks = [replace(GOOD, sights=[late, backward]), replace(GOOD, sights=[early, late])]
    report = told(ranks, Reason.LOSS)
    assert (report.rank, report.facts["module"], report.facts["places"]) == (1, "b", 3)
    assert "first module with a non-finite output is b on rank 1, micro-batch 1, rows [3]" in report.sentence
    assert "an overflow past 65504" in report.sentence
    # An output that FP16 cannot hold is as large when its module is kept: the advice must not go in a circle.
    kept = told(ranks, Reason.LOSS, policy=Policy(torch.float16, keep_fp32=("b",)))
    assert "b is kept in FP32 already" in kept.sentence
    assert kept.sentence.endswith("compute in bf16")
    assert "precision.keep_fp32" not in kept.sentence
    report = told(
        [replace(GOOD, sights=[replace(SIGHT, stage="addend")]), replace(GOOD, sights=[backward])], cured=True
    )
    assert (report.rank, report.facts["kind"], report.facts["lower_scale"]) == (1, "backward", True)
    assert report.sentence.endswith("a lower loss scale cures it: at 1 the same window is finite")


@pytest.mark.parametrize("cured", [None, False])
def test_where_a_blocks_scale_has_fallen_no_cure_is_denied(cured: bool | None) -> None:
    fell = replace(attempt(Reason.GRADIENTS).decision, scale_after=8.0, blocks=True)
    ranks = [replace(GOOD, sights=[replace(SIGHT, stage="backward")])]
    report = told(ranks, cured=cured, decision=fell)
    assert report.sentence.endswith("the scale of the block where they arise has fallen, which may cure it")


def test_a_cause_that_comes_again_is_said_once_unless_its_loss_has_other_bits() -> None:
    said: list[str] = []
    once = cause.Once(said.append)
    ranks = [replace(GOOD, sights=[replace(SIGHT, stage="backward")])]
    for number, same in ((1, True), (2, True), (3, False)):
        once(told([replace(one, same=same) for one in ranks]), number)
    assert said[1] == "the cause is that of attempt 1"
    assert "suspect hardware" in said[2]


def test_what_no_hook_sees_is_told_from_the_gradients() -> None:
    bad = [("w", (1, 2))]
    report = told([GOOD, replace(GOOD, gradients=bad, again=bad)], cured=False)
    assert (report.facts["kind"], report.rank, report.facts["parameter_index"]) == ("sum", 1, [1, 2])
    assert "what every rank sends is finite, the sum is not" in report.sentence
    assert "at 1 the same window is not finite either" in report.sentence
    assert told([replace(GOOD, gradients=bad, again=bad)]).facts["kind"] == "addend"
    report = told([GOOD, replace(GOOD, squares=False)])
    assert (report.facts["kind"], report.rank) == ("norm", 1)
    report = told([GOOD, replace(GOOD, gradients=bad, same=False)])
    assert (report.facts["kind"], report.facts["reproduced"], report.facts["same_loss"]) == ("none", False, False)
    assert "the replay was clean: not reproducible" in report.sentence
    report = told([GOOD, replace(GOOD, sights=[replace(SIGHT, stage="backward")], same=False)])
    assert "has other bits than before" in report.sentence
    report = told([GOOD, replace(GOOD, gradients=bad)], replay=False)
    assert (report.facts["kind"], report.facts["replayed"]) == ("unknown", False)
    assert "track.replay = off" in report.sentence
    report = told([GOOD, replace(GOOD, gradients=bad, broken="OSError: no")])
    assert "the look at it broke off on rank 1: OSError: no" in report.sentence
    wire = replace(SIGHT, stage="wire")
    assert told([replace(GOOD, sights=[wire], again=bad)], every=False).facts["micro"] is None


@pytest.mark.parametrize(
    ("stage", "cured", "changes", "scale", "words"),
    [
        ("backward", True, {}, {"init": 1e18}, "begin lower than precision.scale.init = 1e+18; or let it fall further"),
        ("backward", True, {}, {"mode": "static", "init": 1e6}, "or use precision.scale.mode=dynamic"),
        ("backward", False, {}, {}, "lower the learning rate, compute in bf16 or fp32, or clean the data"),
        ("addend", None, {"rehearsed": "overflow_at"}, {}, "drill.overflow_at of this run asked for it: take that out"),
        ("backward", True, {"rehearsed": "overflow_at"}, {}, "begin lower than precision.scale.init"),
        ("wire", False, {}, {}, "reduce.wire=fp32"),
        ("forward", None, {}, {}, "compute in bf16, or what else the finding names"),
    ],
)  # fmt: skip
def test_what_is_to_be_done_follows_what_was_found(
    stage: str, cured: bool | None, changes: dict[str, Any], scale: dict[str, Any], words: str
) -> None:
    asked = Precision.model_validate({"compute": "fp16", "scale": scale}).model_dump()
    report = told([replace(GOOD, sights=[replace(SIGHT, stage=stage)])], cured=cured, **changes)
    assert words in cause.remedy(report, asked)


def test_a_finding_is_the_same_whatever_its_numbers() -> None:
    one, other, elsewhere = (
        told([replace(GOOD, sights=[replace(SIGHT, **own)])]).place
        for own in ({}, {"count": 2, "into": 9.0}, {"module": "b"})
    )
    assert one == other != elsewhere
