"""Float formats."""

from __future__ import annotations

import struct

from mpdist.formats import FORMATS, bytes_of


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
