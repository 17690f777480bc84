"""A scale for each block (mpdist.block_scale) on one process: what it keeps where one scale cannot, and its rules."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from mpdist import assemble
from mpdist.block_scale import BlockScale, judge, power_of_two
from mpdist.config import load
from mpdist.diagnose import Ration
from mpdist.errors import UsageError
from mpdist.feed import Batch
from mpdist.optim import square_sum
from mpdist.precision import Verdict, Window
from mpdist.session import Session
from mpdist.shard import Part

DEPTH, WIDTH, ROWS = 24, 32, 64


class _Gain(torch.autograd.Function):
    """1 in forward, so that activations stay in FP16's range, and `gain` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: float) -> Tensor:
        ctx.gain = gain
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.gain, None


class Block(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.up(x))
        y = x + self.down(inner)
        y = _Gain.apply(y / y.detach().float().square().mean().sqrt().to(y.dtype), self.gain)
        self.seen = [inner, y]
        return y


class Deep(nn.Module):
    """24 blocks c * (x + f(x)), c by `gain` in backward; 4 or 1/4 are 2^48 over all of them, FP16 has 2^40."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(gain) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().square().mean()

    def backward(self, x: Tensor, scale: float, scales: BlockScale | None = None, look: bool = False) -> list[Tensor]:
        """The gradients of all activations, as backward made them."""
        self.zero_grad()
        if scales is not None:
            scales.begin()
        objective = self(x) * scale
        if scales is not None and look:
            scales.look(objective, dict(self.named_parameters()))
        seen = [tensor for layer in self.layers for tensor in layer.seen]  # type: ignore[union-attr]
        for tensor in seen:
            tensor.retain_grad()
        objective.backward()
        return [tensor.grad for tensor in seen]  # type: ignore[misc]

    def gradients(self) -> list[Tensor]:
        return [param.grad.float() for param in self.parameters()]  # type: ignore[union-attr]


def attach(made: nn.Module, blocks: Any) -> BlockScale:
    scales = BlockScale(made, list(blocks), torch.device("cpu"))
    scales.take([Part(n, p.data, tuple(p.shape), 0, p.requires_grad) for n, p in made.named_parameters()])
    return scales


def share(found: list[Tensor], reference: list[Tensor]) -> float:
    """Of the reference's non-zero elements, those that are neither flushed nor overflowed."""
    pairs = list(zip(found, reference, strict=True))
    kept = sum(int(((a != 0) & a.isfinite() & (b != 0)).sum()) for a, b in pairs)
    return kept / sum(int((b != 0).sum()) for _, b in pairs)


@pytest.mark.parametrize(("gain", "powers"), [(0.25, range(20, 27)), (4.0, range(-17, -9))])
def test_each_blocks_scale_keeps_what_no_single_scale_keeps(gain: float, powers: range) -> None:
    """powers: of two, around the best of all single scales, 2^23 and 2^-13; farther off less is kept."""
    single, half = Deep(gain), Deep(gain).half()
    single.load_state_dict(half.state_dict())
    x = torch.randn(ROWS, WIDTH).half()
    reference = single.backward(x.float(), 1.0)
    shares = [share(half.backward(x, 2.0**power), reference) for power in powers]
    best = max(shares)
    assert best > 1.05 * max(shares[0], shares[-1])
    scales, window, skips = attach(half, half.layers), 2.0**16 if gain < 1 else 2.0**8, 0
    for number in range(80):
        found = half.backward(x, window, scales, look=number == 0)
        gradients = half.gradients()
        before = scales.state()
        fell = bool(scales.close(gradients))
        assert fell == (not all(bool(g.isfinite().all()) for g in gradients))  # the head never is to blame
        skips += fell
        if before == scales.state():
            break
    kept = share(found, reference)
    print(f"gain {gain:g}: one scale keeps {best:.1%}, one a block {kept:.2%}; {skips} skips")
    assert best < 0.9
    assert kept >= 0.99
    assert skips <= 20 if gain > 1 else not skips
    scales.unscale(gradients, 1 / window)
    for (name, param), gradient in zip(single.named_parameters(), gradients, strict=True):
        assert param.grad is not None
        assert (gradient - param.grad).norm() <= 0.02 * param.grad.norm(), name


@pytest.mark.parametrize("tied", [False, True])
def test_what_runs_before_the_blocks_has_the_first_ones_scale_unless_it_is_tied(tied: bool) -> None:
    single, half = Deep(1.0), Deep(1.0)
    if tied:
        single.head, half.head = single.first, half.first
    half.half()
    single.load_state_dict(half.state_dict())
    x = torch.randn(ROWS, WIDTH).half()
    single.backward(x.float(), 1.0)
    scales = attach(half, half.layers)
    scales.load([3] * 12 + [-5] * 12)
    half.backward(x, 2.0**8, scales, look=True)
    gradients = half.gradients()
    scales.close(gradients)  # tells the next ones, and leaves this window's
    found = dict(zip(dict(half.named_parameters()), scales.of_parts().tolist(), strict=True))
    assert found["first.weight"] == (1 if tied else 8)
    assert found.get("head.weight", 1) == 1
    assert (found["layers.0.up.weight"], found["layers.23.down.bias"]) == (8, 1 / 32)
    wanted = [param.grad for param in single.parameters()]
    squares = square_sum(gradients, scales.of_parts()).item() / 2.0**16
    assert squares == pytest.approx(square_sum(wanted).item(), rel=1e-2)  # type: ignore[arg-type]
    scales.unscale(gradients, 2.0**-8)
    for name, gradient, grad in zip(found, gradients, wanted, strict=True):
        assert (gradient - grad).norm() <= 0.02 * grad.norm(), name  # type: ignore[union-attr]


# Of two blocks: largest magnitudes at their inputs and behind the last; of their weights', the head's, what is tied.
INF = math.inf
JUDGED = [
    ("all is well: by 2 up at most", [4.0, 4.0, 4.0], [8.0, 8.0, 1.0, 1.0], [0, 0], [1, 1], False),
    ("down at once, by the largest of three", [4.0, 4.0, 4.0], [4.0, 40000.0, 1.0, 1.0], [0, 0], [1, -6], False),
    ("what enters a block's backward counts, at its own scale", [4.0, 2.0**14, 4.0], [4.0, 4.0, 1.0, 1.0], [0, 0], [-5, -5], False),
    ("nothing seen: up with the block above", [0.0, 0.0, 4.0], [0.0, 0.0, 1.0, 1.0], [0, 0], [1, 1], False),
    ("nothing seen, and that one is low: stays", [0.0, 0.0, 60000.0], [0.0, 0.0, 1.0, 1.0], [0, 0], [0, -6], False),
    ("nothing at all", [0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [7, -7], [7, -7], False),
    ("in the last block: both fall", [INF, INF, 4.0], [INF, INF, 1.0, INF], [0, 0], [-4, -4], True),
    ("in the first: it falls alone", [INF, 4.0, 4.0], [INF, 4.0, 1.0, INF], [0, 0], [-4, 0], True),
    ("in weights alone", [4.0, 4.0, 4.0], [4.0, INF, 1.0, 1.0], [0, 0], [0, -4], True),
    ("what came in says how far", [INF, 2.0**15, 4.0], [INF, 4.0, 1.0, 1.0], [0, 0], [-6, 0], True),
    ("behind the blocks: nothing is known of them", [INF, INF, INF], [INF, INF, INF, INF], [0, 0], [0, 0], False),
    ("at the head's weights alone", [4.0, 4.0, 4.0], [4.0, 4.0, INF, 1.0], [0, 0], [0, 0], False),
    ("in tied embeddings, from a finite gradient", [4.0, 4.0, 4.0], [4.0, 4.0, 1.0, INF], [0, 0], [0, 0], False),
    ("at the head and in a block", [INF, 4.0, 4.0], [INF, 4.0, INF, 1.0], [0, 0], [-4, 0], False),
    ("no lower scale is left", [INF, INF, 4.0], [INF, INF, 1.0, 1.0], [-60, -60], [-60, -60], False),
]  # fmt: skip


@pytest.mark.parametrize(("peaks", "weights", "before", "after", "blamed"), [case[1:] for case in JUDGED],
                         ids=[case[0] for case in JUDGED])  # fmt: skip
def test_the_next_scales(
    peaks: list[float], weights: list[float], before: list[int], after: list[int], blamed: bool
) -> None:
    found, blame = judge(torch.tensor(peaks), torch.tensor(weights), torch.tensor(before, dtype=torch.int32))
    assert found.tolist() == after
    assert bool(blame) == blamed
    assert power_of_two(found).tolist() == [2.0**power for power in after]


class Odd(nn.Module):
    """Three linear blocks; `kind` says what is wrong with them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(Two(4, 4) if kind == "two" else nn.Linear(4, 4) for _ in range(3))
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        if kind == "shared":
            self.layers[2].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        begun = x = self.first(x)
        for number, layer in enumerate(self.layers):
            if self.kind == "left out" and number == 1:
                continue
            x = layer(x, begun * 2) if self.kind == "two" else layer(x)
            if self.kind == "past" and number == 0:
                begun = x
            if self.kind == "past" and number == 1:
                x = x + begun
        return self.head(x).sum()


class Two(nn.Linear):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + other)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shared", "layers.2.weight and layers.0.weight are one weight"),
        ("two", "2 tensors that carry gradients enter layers.0"),
        ("left out", "layers.2 runs where layers.1 should"),
        ("past", "gradients reach layers.0.bias from layers.1 past the blocks between"),
    ],
)
def test_what_would_mix_two_scales_is_refused_by_name(kind: str, words: str) -> None:
    odd = Odd(kind)

    def first_forward() -> None:
        scales = attach(odd, odd.layers)
        scales.begin()
        scales.look(odd(torch.ones(2, 4)), dict(odd.named_parameters()))

    with pytest.raises(UsageError) as caught:
        first_forward()
    assert words in str(caught.value)


def test_no_blocks_and_a_router_loss_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no list of blocks"):
        BlockScale(nn.Linear(2, 2), [], torch.device("cpu"))
    path = tiny.config(tmp_path, precision={"compute": "fp16", "scale": {"per_block": True}})
    experts: Any = Odd("")
    experts.config = SimpleNamespace(output_router_logits=True, router_aux_loss_coef=0.01)
    with pytest.raises(UsageError, match="asks for a router loss"):
        assemble._block_scales(load(path, []).config, experts, list(experts.layers), torch.device("cpu"))


def test_a_window_keeps_its_scale_where_blocks_fall_and_its_state_holds_theirs() -> None:
    made = Deep(1.0)
    window = Window(dynamic=True, scale=8.0, blocks=attach(made, made.layers))
    decision = window.close(Verdict(1.0, INF, blocks=True))
    assert (decision.retry, decision.blocks, decision.scale_after) == (True, True, 8.0)
    assert decision.told(scaled=True) == "non-finite gradients (scales of blocks fall)"
    ration = Ration()
    assert [ration.due(decision, 1), ration.due(decision, 1)] == [True, False]  # as usual as a fall of the window's own
    assert window.close(Verdict(1.0, INF)).scale_after == 4.0
    state = {**window.state(), "blocks": list(range(DEPTH))}
    window.load(state)
    assert window.state() == state
    window.load({key: value for key, value in state.items() if key != "blocks"})  # of a run without
    assert window.state() == state


def test_a_window_that_was_not_computed_tells_of_no_blocks() -> None:
    """Scales that fell behind the window before it, which was applied, are no cause of its skip."""
    made = Deep(4.0)
    scales = attach(made, made.layers)
    window = Window(dynamic=True, scale=8.0, blocks=scales)
    scales.begin()
    scales.load([-4] * DEPTH)  # what that window's close has come to
    told: list[dict[str, Any]] = []
    session: Any = SimpleNamespace(
        parts=SimpleNamespace(window=window, facts={"scale": {"mode": "dynamic"}}), first=True,
        run=SimpleNamespace(event=lambda *_, **more: told.append(more)), watch_scale=lambda _: None, say=str, warn=str,
    )  # fmt: skip
    outcome: Any = SimpleNamespace(decision=window.close_empty(), loss=math.nan)
    Session.skipped(session, outcome, Batch(0, [], 0, 8, 8, 2), lambda *_: (torch.zeros(()), torch.zeros(())))
    assert told[0]["reason"] == "no label token"
    assert "blocks" not in told[0]
