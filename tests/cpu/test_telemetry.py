"""What casts lose is counted as NumPy counts it, on gradients of a real model; a scale's headroom follows from counts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import tiny
import torch
from numpy.typing import NDArray

from mpdist.cast import least, lost
from mpdist.formats import FORMATS
from mpdist.numerics.rounding import round_to
from mpdist.telemetry import _headroom, by_name, layer_of


@pytest.fixture(scope="module")
def gradients() -> list[torch.Tensor]:
    """Of the mean loss of random rows, FP32, as small as a window of 256 times the tokens may have them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**copy.deepcopy(tiny.LLAMA)))
    ids = torch.randint(0, 260, (4, 64))
    (model(input_ids=ids, labels=ids).loss / 256).backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def half(values: NDArray[np.float32]) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float64)


def brain(values: NDArray[np.float32]) -> NDArray[np.float64]:
    return round_to(values, FORMATS["bf16"])


@pytest.mark.parametrize(
    ("dtype", "power", "cast"),
    [*((torch.float16, power, half) for power in (0, 8, 16, 32)), (torch.bfloat16, 0, brain), (torch.bfloat16, -122, brain)],
)  # fmt: skip
def test_flushes_and_overflows_are_those_of_a_direct_count(
    gradients: list[torch.Tensor],
    dtype: torch.dtype,
    power: int,
    cast: Callable[..., NDArray[np.float64]],
    figure: Callable[[str], None],
) -> None:
    whole = zeros = infinite = 0
    for gradient in gradients:
        scaled = gradient * 2.0**power
        values = scaled.numpy()
        found = cast(values)
        expected = [(values != 0).sum(), ((values != 0) & (found == 0)).sum(), np.isinf(found).sum()]
        assert lost(scaled, dtype).tolist() == expected
        whole, zeros, infinite = whole + expected[0], zeros + expected[1], infinite + expected[2]
    figure(f"at 2^{power}: {zeros} of {whole} flushed, {infinite} overflowed, as a direct count finds")
    # The cases are such that each loss is seen in one of them and missing in another.
    assert (zeros > 0) == ((dtype, power) in ((torch.float16, 0), (torch.float16, 8), (torch.bfloat16, -122)))
    assert (infinite > 0) == ((dtype, power) == (torch.float16, 32))


def test_what_is_not_finite_already_is_counted_and_pieces_add_up() -> None:
    values = torch.arange(2**19 + 3) / 2.0**19
    values[[0, 70_000, 2**19]] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    assert lost(values, torch.float16).tolist() == [2**19 + 3, 0, 3]
    assert lost(torch.zeros(0), torch.float16).tolist() == [0, 0, 0]


def test_headroom_is_how_far_a_scale_may_fall() -> None:
    half_of_least = least(torch.float16) / 2
    assert half_of_least == 2.0**-25
    draw = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 2.0**-8
    shares = {k: (draw.abs() <= 2.0**k).double().mean().item() for k in range(-45, 17)}
    room = _headroom(shares)

    def flushed(fall: int) -> float:
        count = lost(draw * 2.0**-fall, torch.float16).tolist()
        return count[1] / count[0]

    assert flushed(room) <= 0.01 < flushed(room + 1)
    low = {k: shares[min(k + 20, 16)] for k in shares}  # the same at 2^-20 of the scale
    assert _headroom(low) == room - 20 < 0


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.11.mlp.experts.3.up.weight", "model.layers.11"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("transformer.h.0.ln_1.bias", "transformer.h.0"),
        ("w", "w"),
    ],
)
def test_parameters_count_to_their_block(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_each_layer_has_a_name_of_its_own_where_lists_cannot_be_drawn() -> None:
    row = {
        "step": 3,
        "precision/grad_zero": 0.5,
        "precision/by_layer": {"grad_zero": [0.25, None], "grad_norm": [1.0, 2.0]},
    }
    assert by_name(row, ["a", "b.0"]) == {
        "step": 3,
        "precision/grad_zero": 0.5,
        "precision/grad_zero/a": 0.25,
        "precision/grad_norm/a": 1.0,
        "precision/grad_norm/b.0": 2.0,
    }
    assert by_name({"eval/loss": 1.0}, ["a"]) == {"eval/loss": 1.0}
