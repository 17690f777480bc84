"""The window, the schedule, the norm and the loss of one process: what needs no second rank."""

from __future__ import annotations

import math

import pytest
import torch

from mpdist.loss import head_loss, logits_loss
from mpdist.optim import schedule, square_sum
from mpdist.precision import Reason, Verdict, Window, outside_fp16, scale_mode

GOOD, BAD, NAN = Verdict(1.0, 4.0), Verdict(1.0, math.inf), Verdict(math.nan, 4.0)


def test_scale_follows_the_rule_of_growth_and_backoff() -> None:
    window = Window(dynamic=True, scale=8.0, interval=2, patience=9)
    seen = [window.close(v).scale_after for v in (GOOD, GOOD, GOOD, BAD, GOOD, GOOD, BAD, BAD)]
    assert seen == [8, 16, 16, 8, 8, 16, 8, 4]
    assert (window.step, window.attempt, window.skipped) == (5, 8, 3)


def test_scale_agrees_with_torchs_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    scaler.scale(torch.ones(1))  # makes its state
    window = Window(dynamic=True, scale=64.0, interval=3, floor=2.0**-20, patience=99)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.0)
    for good in (True, True, False, True, True, True, True, False, False, True, True, True):
        optimizer.param_groups[0]["params"][0].grad = torch.full((1,), 1.0 if good else math.inf)
        scaler.step(optimizer)
        scaler.update()
        window.close(GOOD if good else BAD)
        assert window.scale == scaler.get_scale()


def test_unscale_and_clip_are_one_factor_of_the_whole_window() -> None:
    window = Window(dynamic=True, scale=8.0, clip=0.125)
    decision = window.close(Verdict(1.0, 4.0))  # norm of scaled gradients 2, unscaled 0.25
    assert decision.norm == 0.25
    assert decision.factor == 0.125 / 0.25 / 8
    unclipped = Window(dynamic=True, scale=8.0, clip=None).close(Verdict(1.0, 4.0))
    assert (unclipped.norm, unclipped.factor) == (0.25, 1 / 8)


def test_c05_at_the_floor_patience_ends_the_run() -> None:
    window = Window(dynamic=True, scale=65536.0, floor=1.0, patience=20)
    decisions = [window.close(BAD) for _ in range(20)]
    assert [d.scale for d in decisions[:17]] == [2.0**k for k in range(16, -1, -1)]
    assert {d.scale for d in decisions[16:]} == {1.0}
    assert [d.exhausted for d in decisions] == [False] * 19 + [True]
    assert [d.retry for d in decisions] == [True] * 16 + [False] * 4  # at the floor a retry could not end otherwise


def test_c05_a_loss_that_is_not_finite_leaves_the_scale_alone() -> None:
    window = Window(dynamic=True, scale=1024.0, patience=3)
    decisions = [window.close(NAN) for _ in range(3)]
    assert {d.scale_after for d in decisions} == {1024.0}
    assert {d.reason for d in decisions} == {Reason.LOSS}
    assert [d.retry for d in decisions] == [False] * 3
    assert decisions[-1].exhausted


@pytest.mark.parametrize("verdict", [BAD, NAN, Verdict(1.0, math.nan), Verdict(math.inf, 1.0)])
@pytest.mark.parametrize("dynamic", [True, False])
def test_c122_a_bad_window_is_never_applied_and_never_clipped(verdict: Verdict, dynamic: bool) -> None:
    window = Window(dynamic=dynamic, scale=2.0, clip=1.0)
    decision = window.close(verdict)
    assert not decision.applied
    assert decision.factor == 0.0
    assert (window.step, window.skipped, window.in_a_row) == (0, 1, 1)


def test_a_good_window_renews_patience() -> None:
    window = Window(dynamic=True, scale=2.0**30, patience=3)
    ends = [window.close(v).exhausted for v in (BAD, BAD, GOOD, BAD, NAN, BAD)]
    assert ends == [False] * 5 + [True]


def test_a_window_without_labels_uses_no_patience() -> None:
    window = Window(dynamic=True, scale=4.0, patience=1)
    decision = window.close_empty()
    assert (decision.applied, decision.exhausted, decision.reason) == (False, False, Reason.NO_LABELS)
    assert (window.empty, window.skipped, window.step, window.attempt, window.scale) == (1, 0, 0, 1, 4.0)


def test_c13_state_continues_the_trajectory() -> None:
    verdicts = [GOOD, GOOD, GOOD, BAD, GOOD, NAN, GOOD, GOOD, BAD, GOOD] * 2
    whole = Window(dynamic=True, scale=64.0, interval=3, patience=9)
    scales = [whole.close(v).scale for v in verdicts]
    for stop in range(len(verdicts)):
        first = Window(dynamic=True, scale=64.0, interval=3, patience=9)
        got = [first.close(v).scale for v in verdicts[:stop]]
        second = Window(dynamic=True, scale=64.0, interval=3, patience=9)
        second.load(first.state())
        got += [second.close(v).scale for v in verdicts[stop:]]
        assert got == scales
        assert second.state() == whole.state()


def test_the_scale_never_reaches_infinity() -> None:
    window = Window(dynamic=True, scale=2.0**59, interval=1)
    for _ in range(8):
        window.close(GOOD)
    assert window.scale == 2.0**60


def test_auto_scale_is_for_fp16_alone() -> None:
    found = {(c, w): scale_mode("auto", c, w) for c in ("fp32", "bf16", "fp16") for w in ("fp32", "bf16", "fp16")}
    assert {key for key, mode in found.items() if mode == "dynamic"} == {k for k in found if "fp16" in k}
    assert set(found.values()) == {"dynamic", "off"}


def test_weights_that_fp16_cannot_hold_are_named() -> None:
    found = outside_fp16([("a", torch.tensor([1.0, -100000.0])), ("b", torch.ones(2)), ("none", torch.ones(0))])
    assert found == [("a", 100000.0)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_c09_squares_are_summed_in_fp32(dtype: torch.dtype) -> None:
    one = torch.tensor([5000.0], dtype=dtype)
    value = one.float().item()  # BF16 holds 4992
    assert square_sum([one, one.clone()]).sqrt().item() == pytest.approx(math.sqrt(2) * value, rel=1e-6)
    assert square_sum([torch.full((4096,), 100.0, dtype=torch.float16)]).sqrt().item() == pytest.approx(6400, rel=1e-6)
    assert square_sum([torch.full((2,), 1e18)]).item() == pytest.approx(2e36)


def _token_losses(values: list[float]) -> torch.Tensor:
    """Logits over two classes whose cross-entropy against class 0 is each of the values."""
    return torch.tensor([[0.0, math.log(math.expm1(v))] for v in values], dtype=torch.float32)


@pytest.mark.parametrize("path", ["head", "logits"])
def test_c21_the_window_counts_tokens_not_micro_batches(path: str) -> None:
    """3 tokens of loss 2 and 1 of loss 4 are 2.5 together; the mean of means would be 3."""
    objective, total = torch.zeros(()), torch.zeros(())
    for values in ([2.0, 2.0, 2.0], [4.0]):
        logits, n = _token_losses(values).requires_grad_(), len(values)
        index, targets, factor = torch.arange(n), torch.zeros(n, dtype=torch.int64), torch.tensor(1 / 4)
        if path == "head":
            eye = torch.eye(2)
            one, loss = head_loss(logits[None], eye, None, index, targets, factor, rows=2)
        else:
            one, loss = logits_loss(logits[None], index, targets, factor, rows=2)
        objective, total = objective + one.detach(), total + loss
        one.backward()
        wanted = (torch.softmax(logits.detach(), 1) - torch.tensor([1.0, 0.0])) / 4
        torch.testing.assert_close(logits.grad, wanted)
    assert objective.item() == pytest.approx(2.5, rel=1e-6)
    assert total.item() / 4 == pytest.approx(2.5, rel=1e-6)


def test_a_micro_batch_without_labels_gives_zero_gradients() -> None:
    hidden, weight = torch.randn(1, 3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    objective, loss = head_loss(hidden, weight, None, none, none, torch.tensor(1.0), rows=2)
    objective.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_c32_the_schedule_counts_steps() -> None:
    lr = schedule("linear", 1e-3, 0, 10)
    assert [round(lr(step), 7) for step in range(1, 11)] == [round(1e-3 * (1 - k / 10), 7) for k in range(10)]
    assert lr(5) == pytest.approx(6e-4)  # after update 4
    assert lr(11) == 0.0
    assert lr(50) == 0.0


def test_schedule_shapes() -> None:
    warm = schedule("cosine", 1.0, 4, 12)
    assert [warm(step) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    assert warm(5) == 1.0
    assert warm(9) == pytest.approx(0.5)
    assert warm(12) == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert warm(13) == 0.0
    assert [schedule("constant", 2.0, 2, None)(step) for step in (1, 2, 3, 999)] == [1.0, 2.0, 2.0, 2.0]
