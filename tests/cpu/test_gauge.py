"""The account of live bytes: against torch's own allocator, and by row."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from mpdist.gauge import Gauge

MIB = 2**20


def network(width: int, recompute: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))
        for _ in range(4)
    ]

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(blocks)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + (checkpoint(block, x, use_reentrant=False) if recompute else block(x))
            return x.square().mean()

    return Net()


def allocated(model: torch.nn.Module, x: torch.Tensor) -> int:
    """The most that the CPU's allocator held above what was there before, by the profiler's own count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        model(x).backward()
    held = peak = 0
    todo = list(found.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    moves = []
    while todo:
        event = todo.pop()
        todo.extend(event.children)
        if event.name == "[memory]":
            moves.append((event.start_time_ns, event.extra_fields.alloc_size))
    for _, size in sorted(moves):
        held += size
        peak = max(peak, held)
    return peak


def test_the_account_is_the_allocators_own() -> None:
    for recompute in (False, True):
        model, x = network(128, recompute), torch.randn(512, 128)
        with Gauge() as gauge:
            gauge.name("parameters", [*model.parameters(), x])
            model(x).backward()
        model.zero_grad(set_to_none=True)
        expected = allocated(model, x) + gauge.own_peaks()["parameters"][0]
        assert abs(gauge.peak()[0] - expected) <= 0.01 * expected, (recompute, gauge.peak()[0] / MIB, expected / MIB)


def test_looking_changes_no_bit() -> None:
    seen = []
    for watched in (False, True):
        model, x = network(64, True), torch.linspace(-1, 1, 64 * 32).view(32, 64)
        if watched:
            with Gauge():
                model(x).backward()
        else:
            model(x).backward()
        seen.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_a_storage_that_shrinks_and_grows_is_followed() -> None:
    with Gauge() as gauge:
        tensor = torch.empty(MIB, dtype=torch.uint8)
        tensor.untyped_storage().resize_(0)
        gauge.mark("freed")
        other = torch.empty(MIB // 2, dtype=torch.uint8)
        gauge.mark("other")
        tensor.untyped_storage().resize_(2 * MIB)
        gauge.mark("end")
        del tensor
    assert gauge.peak(gauge.marks["freed"], gauge.marks["other"])[0] == MIB // 2
    assert gauge.peak()[0] == 2 * MIB + MIB // 2
    assert gauge.peak(gauge.now + 1)[0] == other.numel()


def test_what_was_there_before_counts_from_the_start_once_it_is_met_or_named() -> None:
    written, named, shrunk = (torch.zeros(MIB, dtype=torch.uint8) for _ in range(3))
    with Gauge() as gauge:
        gauge.name("parameters", [named])
        passing = torch.ones(MIB, dtype=torch.uint8)
        del passing
        written.add_(1)
        shrunk.untyped_storage().resize_(0)
        gauge.name("gradients", [written])
    size, rows, _ = gauge.peak()
    assert (size, rows["parameters"], rows["gradients"]) == (4 * MIB, MIB, MIB)


def test_a_leafs_gradient_is_on_its_way_and_the_place_of_an_allocation_is_known() -> None:
    model, x = network(128, False), torch.randn(64, 128)
    with Gauge() as gauge:
        loss = model(x)
        gauge.follow(model.parameters())
        loss.backward()
        gauge.leave()
        extra = torch.zeros(MIB)
        moment = gauge.now
    assert gauge.own_peaks()["comm"][0] >= sum(4 * p.numel() for p in model.parameters())
    assert gauge.largest_site("activations", moment).startswith("test_gauge.py:"), extra.shape
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
