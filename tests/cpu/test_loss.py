"""The loss head: its numbers against plain cross-entropy in FP64, and what it holds in memory while it makes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mpdist.loss import head_loss, logits_loss

HIDDEN, VOCABULARY, LABELS = 24, 97, 31


def _draw(
    dtype: torch.dtype = torch.float32, bias: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """hidden [3, 17, H], weight [V, H], bias, index of the labelled positions, targets."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(3, 17, HIDDEN, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=g).to(dtype).requires_grad_()
    shift = torch.randn(VOCABULARY, generator=g).to(dtype).requires_grad_() if bias else None
    index = torch.randperm(51, generator=g)[:LABELS].sort().values
    return hidden, weight, shift, index, torch.randint(0, VOCABULARY, (LABELS,), generator=g)


def _exact(hidden: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, targets: Tensor) -> list[Tensor]:
    """The summed loss and its gradients in FP64, from the same (rounded) inputs."""
    wide = [t.detach().double().requires_grad_() if t is not None else None for t in (hidden, weight, bias)]
    h, w, b = wide
    assert h is not None
    assert w is not None
    logits = torch.nn.functional.linear(h.reshape(-1, h.shape[-1])[index], w, b)
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    loss.backward()
    return [loss.detach()] + [t.grad for t in wide if t is not None and t.grad is not None]


def _ours(
    rows: int, hidden: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, targets: Tensor, factor: float = 1.0
) -> list[Tensor]:
    objective, loss = head_loss(hidden, weight, bias, index, targets, torch.tensor(factor), rows)
    objective.backward()
    return [loss] + [t.grad for t in (hidden, weight, bias) if t is not None and t.grad is not None]


def _gap(found: list[Tensor], exact: list[Tensor]) -> float:
    assert len(found) == len(exact)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("rows", [1, 4, 30, 31, 500])
@pytest.mark.parametrize("bias", [False, True])
def test_chunked_loss_and_gradients_are_those_of_cross_entropy(rows: int, bias: bool) -> None:
    inputs = _draw(bias=bias)
    found = _ours(rows, *inputs)
    assert _gap(found, _exact(*inputs)) < 1e-6
    assert all(t.dtype == torch.float32 for t in found)


def test_whole_logits_loss_is_cross_entropy_and_leaves_the_logits_alone() -> None:
    hidden, weight, _, index, targets = _draw()
    exact = _exact(hidden, weight, None, index, targets)
    logits = hidden @ weight.t()
    before = logits.detach().clone()
    objective, loss = logits_loss(logits, index, targets, torch.tensor(1.0), 7)
    objective.backward()
    assert torch.equal(logits.detach(), before)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert _gap([loss, hidden.grad, weight.grad], exact) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_loss_is_as_good_as_a_whole_head_with_fp32_softmax(dtype: torch.dtype) -> None:
    inputs = _draw(dtype, bias=True)
    exact = _exact(*inputs)
    found = _ours(5, *inputs)
    assert found[0].dtype == torch.float32
    assert [t.dtype for t in found[1:]] == [dtype] * 3
    again = _draw(dtype, bias=True)
    logits = torch.nn.functional.linear(again[0].reshape(-1, HIDDEN)[again[3]], again[1], again[2])
    loss = torch.nn.functional.cross_entropy(logits.float(), again[4], reduction="sum")
    loss.backward()
    plain = [loss.detach()] + [t.grad for t in again[:3] if t is not None and t.grad is not None]
    for mine, other, truth in zip(found, plain, exact, strict=True):
        assert _gap([mine], [truth]) <= 1.25 * _gap([other], [truth]) + 1e-7
    assert _gap(found, exact) < 8e-3


def test_the_loss_scale_is_there_before_gradients_are_rounded() -> None:
    """A gradient of 1e-9 is nothing in FP16; scaled first, it survives."""
    far = _draw(torch.float16)
    lost = _ours(5, *far, factor=1e-9)
    assert lost[1].abs().max() == 0
    near = _draw(torch.float16)
    kept = _ours(5, *near, factor=1e-9 * 65536)
    exact = [t * 1e-9 * 65536 for t in _exact(*near)[1:]]
    assert _gap(kept[1:], exact) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_label_at_all_gives_zero_and_gradients_of_zero(dtype: torch.dtype) -> None:
    hidden, weight, bias, _, _ = _draw(dtype, bias=True)
    none = torch.empty(0, dtype=torch.int64)
    found = _ours(4, hidden, weight, bias, none, none)
    assert [t.abs().max().item() for t in found] == [0.0] * 4
    for param in (hidden, weight):
        param.grad = None
    objective, loss = logits_loss(hidden @ weight.t(), none, none, torch.tensor(1.0), 4)
    objective.backward()
    assert loss.item() == 0.0
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0


def test_c126_a_nan_where_nothing_is_labelled_does_not_spread() -> None:
    hidden, weight, _, index, targets = _draw()
    exact = _exact(hidden, weight, None, index, targets)
    rest = torch.tensor(sorted(set(range(51)) - set(index.tolist())))
    with torch.no_grad():
        hidden.view(-1, HIDDEN)[rest] = float("nan")
    loss, grad_hidden, grad_weight = _ours(5, hidden, weight, None, index, targets)
    assert _gap([loss, grad_weight], [exact[0], exact[2]]) < 1e-6
    assert torch.equal(grad_hidden.view(-1, HIDDEN)[rest], torch.zeros(len(rest), HIDDEN))


def test_a_nan_in_a_labelled_position_is_not_hidden() -> None:
    hidden, weight, _, index, targets = _draw()
    with torch.no_grad():
        hidden.view(-1, HIDDEN)[index[3]] = float("nan")
    assert _ours(5, hidden, weight, None, index, targets)[0].isnan()


def test_huge_logits_do_not_overflow_the_softmax() -> None:
    hidden, weight, _, index, targets = _draw()
    with torch.no_grad():
        hidden.mul_(1e4)
    found = _ours(5, hidden, weight, None, index, targets)
    assert _gap(found, _exact(hidden, weight, None, index, targets)) < 1e-5


def test_frozen_hidden_or_weight_gets_no_gradient() -> None:
    hidden, weight, bias, index, targets = _draw(bias=True)
    weight.requires_grad_(False)
    assert bias is not None
    bias.requires_grad_(False)
    exact = _exact(hidden, weight, bias, index, targets)
    loss, grad_hidden = _ours(5, hidden, weight, bias, index, targets)
    assert weight.grad is None
    assert bias.grad is None
    assert _gap([loss, grad_hidden], exact[:2]) < 1e-6
    with torch.no_grad():  # evaluation
        assert head_loss(hidden, weight, bias, index, targets, torch.tensor(1.0), 5)[1] == loss


# -- what it holds: vocabulary 49,152 ----


def _peak(act: Callable[[], None]) -> int:
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    with tracker:
        act()
    return max(sum(of.values()) for of in tracker.get_tracker_snapshot("peak").values())


def test_peak_memory_of_the_chunked_head_is_a_fraction_of_the_whole_one() -> None:
    """341 positions a chunk are what `loss_chunk: auto` gives for this vocabulary (64 MiB of FP32 logits). The tensors
    are fake, so that only their sizes are seen; `tests/bench/throughput.py --head` measures time and real memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from mpdist.plan_memory import loss_chunk_rows

    assert loss_chunk_rows(49152, 2048, "auto") == 341
    with FakeTensorMode():
        hidden = torch.empty(1, 2048, 64, dtype=torch.bfloat16).requires_grad_()
        weight = torch.empty(49152, 64, dtype=torch.bfloat16).requires_grad_()
        targets = torch.empty(2048, dtype=torch.int64)

        def plain() -> None:
            logits = (hidden[0] @ weight.t()).float()
            (torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / len(targets)).backward()

        def chunked() -> None:
            index, factor = torch.arange(2048), torch.tensor(1 / len(targets))
            head_loss(hidden, weight, None, index, targets, factor, 341)[0].backward()

        whole = _peak(plain)
        hidden.grad = weight.grad = None
        assert whole > 700 * 2**20  # 2048 x 49152 in FP32 twice; else nothing was measured
        assert _peak(chunked) <= 0.3 * whole
