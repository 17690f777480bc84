"""Facts about the float formats that training uses, and the dense peak rates of known devices.

Everything here is arithmetic on (exponent bits, fraction bits); nothing is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """One binary floating-point format with subnormals.

    ``bits`` counts the bits that carry information; TF32 has 19 of them but is stored in ``storage`` = 4 bytes.
    ``top`` says what the largest exponent is for: ``ieee`` infinities and NaN; ``nan`` numbers, and NaN where all bits are
    set (E4M3, as OCP's 8-bit specification has it); ``all`` numbers alone (E2M1); ``scale`` is E8M0, powers of two without
    a sign or a zero, and NaN where all bits are set (the last two: OCP Microscaling Formats 1.0).
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    storage: float
    top: str = "ieee"

    @property
    def bits(self) -> int:
        return (self.top != "scale") + self.exponent_bits + self.fraction_bits

    @property
    def bias(self) -> int:
        return int(2 ** (self.exponent_bits - 1) - 1)

    @property
    def eps(self) -> float:
        """The gap between 1 and the next larger number."""
        return 2.0**-self.fraction_bits

    @property
    def below_one(self) -> float:
        """The largest number below 1."""
        if self.top == "scale":
            return 0.5
        return 1.0 - self.eps / (1 if self.smallest_normal == 1.0 else 2)

    @property
    def max(self) -> float:
        """The largest finite number."""
        if self.top in ("ieee", "scale"):
            return (2.0 - self.eps) * 2.0**self.bias
        return (2.0 - self.eps * (2 if self.top == "nan" else 1)) * 2.0 ** (self.bias + 1)

    @property
    def least_exponent(self) -> int:
        """The exponent of the smallest normal number."""
        return (0 if self.top == "scale" else 1) - self.bias

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.least_exponent

    @property
    def smallest_subnormal(self) -> float | None:
        """The smallest number above zero; anything under half of it rounds to zero. None where there are no subnormals."""
        return None if self.top == "scale" else self.smallest_normal * self.eps

    @property
    def binades(self) -> int:
        """Powers of two from the smallest number above zero to the largest."""
        low = self.least_exponent if self.top == "scale" else self.least_exponent - self.fraction_bits
        return math.frexp(self.max)[1] - low


FORMATS: dict[str, Format] = {
    "fp32": Format("fp32", 8, 23, 4),
    "tf32": Format("tf32", 8, 10, 4),
    "bf16": Format("bf16", 8, 7, 2),
    "fp16": Format("fp16", 5, 10, 2),
}
# Of 8 and fewer bits: no dtype to train in here, but for casts to be looked at.
NARROW: dict[str, Format] = {
    "e5m2": Format("e5m2", 5, 2, 1),
    "e4m3": Format("e4m3", 4, 3, 1, "nan"),
    "e2m1": Format("e2m1", 2, 1, 0.5, "all"),
    "e8m0": Format("e8m0", 8, 0, 1, "scale"),
}


def bytes_of(dtype: str) -> int:
    """Bytes that one element of ``dtype`` (fp32, tf32, bf16, fp16) takes in memory."""
    return int(FORMATS[dtype].storage)


# Dense (not sparse) tensor-core rates for 16-bit inputs with FP32 accumulation, in FLOP/s, from the vendors'
# data sheets. The first name found in the device's own name wins, so a longer name stands before its prefix.
PEAK_16BIT: tuple[tuple[str, float], ...] = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("GH200", 989.4e12),
    ("H200 NVL", 835e12),
    ("H200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.4e12),
    ("H800 PCIe", 756e12),
    ("H800", 989.4e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A30", 165e12),
    ("A40", 149.7e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("RTX A6000", 154.8e12),
    ("L40S", 362.05e12),
    ("L40", 181.05e12),
    ("L4", 121e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI325X", 1307.4e12),
    ("MI300X", 1307.4e12),
)


def peak_flops(device: str, compute: str = "bf16", tf32: bool = False) -> float | None:
    """Peak FLOP/s of one device by its name, for matrix products in ``compute``; None where it is not known.

    FP32 products have a peak here only if they may use TF32 (half of the 16-bit rate on every NVIDIA part listed).
    A slice of a device (MIG) has no peak of its own in the tables, so it counts as unknown rather than as the whole.
    """
    if " MIG " in f" {device} ":
        return None
    words = device.replace("-", " ").split()
    for name, rate in PEAK_16BIT:
        want = name.split()
        if any(words[i : i + len(want)] == want for i in range(len(words))):
            if compute in ("bf16", "fp16"):
                return rate
            return rate / 2 if tf32 and not name.startswith("MI") else None
    return None


def mfu(flops_per_token: float, tokens_per_s: float, ranks: int, peak: float | None) -> float | None:
    """Model FLOPs utilisation: the share of all ranks' peak that the model's own arithmetic makes use of.

    tokens_per_s: real tokens of all ranks together. peak: FLOP/s of one device; None gives None.
    """
    return None if not peak else flops_per_token * tokens_per_s / (ranks * peak)
