"""Block formats against torchao's own rounding, where it is installed: `pip install 'mpdist[torchao]'`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from mpdist.formats import NARROW
from mpdist.numerics.rounding import round_mx, round_nvfp4


def values(span: float, seed: int = 0) -> np.ndarray:
    """[64, 256] FP32, the blocks of 16 over 2**-span to 2**span; the first row is zero, the second has ties."""
    draw = np.random.default_rng(seed)
    powers = np.repeat(2.0 ** draw.uniform(-span, span, (64, 16)), 16, axis=1)
    found = (draw.standard_normal((64, 256)) * powers).astype(np.float32)
    found[0] = 0.0
    found[1] = np.arange(256) * 0.25
    return found


@pytest.mark.parametrize("name", ["e5m2", "e4m3", "e2m1"])
def test_mx_blocks_are_torchaos_bit_for_bit(name: str, figure: Callable[[str], None]) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed")
    dtypes = {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn, "e2m1": torch.float4_e2m1fn_x2}
    x = values(12.0)
    theirs, own = mx.MXTensor.to_mx(torch.from_numpy(x), dtypes[name], 32), round_mx(x, NARROW[name])
    same = theirs.dequantize(torch.float32).numpy() == own.values
    figure(f"MX {name}: {same.sum()} of {same.size} values equal torchao's")
    assert same.all()
    exponents = theirs.scale.view(torch.uint8).numpy().astype(int).reshape(own.scales.shape)
    assert (2.0 ** (exponents - 127) == own.scales).all()


def test_nvfp4_blocks_are_torchaos_where_their_scales_are_normal_numbers(figure: Callable[[str], None]) -> None:
    """Scales below 2^-6 of the tensor's are kept here as E4M3's subnormal numbers; torchao raises them to 2^-6."""
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="torchao is not installed")
    for span, same in ((3.0, 1.0), (10.0, 0.5)):
        x = values(span)
        tensor = torch.from_numpy(x)
        whole = nvfp4.per_tensor_amax_to_scale(tensor.abs().max())
        theirs = nvfp4.NVFP4Tensor.to_nvfp4(tensor, per_tensor_scale=whole).dequantize(torch.float32).numpy()
        own = round_nvfp4(x)
        normal = np.repeat(own.scales / float(whole) >= 2.0**-6, 16, axis=1) | (x == 0)
        assert normal.mean() >= same - 0.01
        close = np.isclose(theirs[normal], own.values[normal], rtol=1e-6, atol=0)
        figure(
            f"NVFP4 over 2^+-{span:.0f}: {close.sum()} of {normal.sum()} values equal torchao's; {(~normal).sum()} left out"
        )
        assert close.all()
        if not normal.all():
            assert np.abs(own.values - x)[~normal].mean() < np.abs(theirs - x)[~normal].mean()
