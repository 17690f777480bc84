"""Float formats and device peaks."""

from __future__ import annotations

import math
import struct

import pytest

from mpdist.formats import FORMATS, bytes_of, mfu, peak_flops


def test_fp32_and_fp16_agree_with_the_bytes_of_ieee_754() -> None:
    fp32, fp16 = FORMATS["fp32"], FORMATS["fp16"]
    assert fp32.max == struct.unpack("<f", bytes.fromhex("ffff7f7f"))[0]
    assert fp32.smallest_normal == struct.unpack("<f", bytes.fromhex("00008000"))[0]
    assert fp32.smallest_subnormal == struct.unpack("<f", bytes.fromhex("01000000"))[0]
    assert fp16.max == struct.unpack("<e", bytes.fromhex("ff7b"))[0] == 65504
    assert fp16.smallest_normal == struct.unpack("<e", bytes.fromhex("0004"))[0] == 2**-14
    assert fp16.smallest_subnormal == struct.unpack("<e", bytes.fromhex("0100"))[0] == 2**-24
    assert 1 + fp16.eps == struct.unpack("<e", bytes.fromhex("013c"))[0]


def test_bf16_has_fp32s_range_and_tf32_has_its_range_with_fp16s_precision() -> None:
    bf16, tf32 = FORMATS["bf16"], FORMATS["tf32"]
    assert bf16.smallest_normal == tf32.smallest_normal == FORMATS["fp32"].smallest_normal
    assert bf16.max == struct.unpack("<f", bytes.fromhex("00007f7f"))[0]
    assert bf16.eps == 2**-7
    assert tf32.eps == FORMATS["fp16"].eps
    assert [FORMATS[name].bits for name in ("fp32", "tf32", "bf16", "fp16")] == [32, 19, 16, 16]
    assert [bytes_of(name) for name in ("fp32", "tf32", "bf16", "fp16")] == [4, 4, 2, 2]


@pytest.mark.parametrize(
    ("device", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_a_devices_peak_is_found_by_its_own_name(device: str, tera: float) -> None:
    assert peak_flops(device) == pytest.approx(tera * 1e12)


def test_an_unknown_device_has_no_peak() -> None:
    assert peak_flops("Tesla V100-SXM2-16GB") is None  # has no BF16
    assert peak_flops("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None
    assert peak_flops("cpu") is None
    assert peak_flops("NVIDIA L400") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32", tf32=True) == pytest.approx(494.7e12)


def test_c107_utilisation_counts_every_devices_peak_once() -> None:
    one = mfu(1000.0, 500.0, 1, 1e9)
    assert one == pytest.approx(1000 * 500 / 1e9)
    assert one is not None
    assert mfu(1000.0, 500.0, 2, 1e9) == pytest.approx(one / 2)
    assert mfu(1000.0, 500.0, 1, None) is None
    assert math.isfinite(one)
