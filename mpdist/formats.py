"""Facts about the float formats that training uses.

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
