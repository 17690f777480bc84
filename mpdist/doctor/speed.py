"""How fast a device multiplies matrices, dtype by dtype: whether 16 bit pays here, and whether the device is what it was
sold as."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mpdist import devices
from mpdist.findings import Finding, shortened

if TYPE_CHECKING:
    import torch

WORDS = ("fp32", "tf32", "bf16", "fp16")
_SAMPLES = 5
_LONG_S = 0.05  # of one product; a larger one would tell no more
_SIDES = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
_LOW_SHARE = 0.3  # of the data sheet's rate; large products reach 0.6 to 0.9
_SLOW_SHARE = 0.8  # of the median rank's


def measure(device: torch.device, words: Sequence[str] = WORDS) -> dict[str, float]:
    """FLOP/s of a square matrix product by dtype, the median of five after a warm-up; about a second in all.

    tf32: FP32 products that may use TF32, on a GPU that has it.
    """
    import torch

    found = {}
    before = torch.get_float32_matmul_precision()
    try:
        for word in words:
            if word == "tf32" and not (device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8):
                continue
            torch.set_float32_matmul_precision("high" if word == "tf32" else "highest")
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(word, torch.float32)
            found[word] = _rate(device, dtype)
    finally:
        torch.set_float32_matmul_precision(before)
    return found


def _rate(device: torch.device, dtype: torch.dtype) -> float:
    import torch

    def timed(side: int) -> Callable[[], float]:
        left = torch.full((side, side), 0.5, dtype=dtype, device=device)
        out = torch.empty_like(left)

        def once() -> float:
            began = time.perf_counter()
            torch.mm(left, left, out=out)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - began

        once()
        return once

    sides = _SIDES[device.type]
    side = sides[0]
    go = timed(side)
    spent = min(go(), go())
    # A product of twice the side takes eight times as long, or less where the small one did not fill the device.
    while side < sides[-1] and spent * 8 < _LONG_S:
        side *= 2
        go = timed(side)
        spent = go()
    times = sorted(go() for _ in range(_SAMPLES))
    return 2 * side**3 / times[_SAMPLES // 2]


def judged(
    rates: Sequence[Mapping[str, float]],
    names: Sequence[str],
    memories: Sequence[int | None],
    native: set[str],
    compute: str | None = None,
) -> list[Finding]:
    """rates, names, memories: of each rank's device. native: dtypes that it has. compute: the one that will be used, whose
    emulation is the preflight's to tell; without one, any that is slower here than FP32 is doubtful."""
    found = []
    for word in rates[0]:
        own = [rate[word] for rate in rates]
        middle = sorted(own)[len(own) // 2]
        slow = [rank for rank, rate in enumerate(own) if rate < _SLOW_SHARE * middle]
        value = f"{_said(middle)}FLOP/s"
        times = middle / sorted(rate["fp32"] for rate in rates)[len(own) // 2]
        if word != "fp32":
            value += f", {times:.2g} x FP32"
        if word in ("bf16", "fp16"):
            value += ", native" if word in native else ", emulated"
        peak = devices.peak_flops(names[0], "fp32" if word == "tf32" else word, word == "tf32", memories[0])
        share = f", {middle / peak:.0%} of its data sheet" if peak else ""
        why, do = "", ""
        slower = word in ("bf16", "fp16") and times < 1
        if slower and (compute is None or (compute == word and word in native)):
            why, do = "it is slower than FP32 on this device", "compute in fp32 here, or in 16 bit on another device"
        elif peak and middle < _LOW_SHARE * peak:
            why = "the device is busy, throttled, capped in power, or a part of a larger one"
            do = "look at nvidia-smi -q -d PERFORMANCE,CLOCK,POWER and at what else runs there"
        elif slow and names[0] != "cpu":
            why = f"rank{'s' * (len(slow) > 1)} {shortened(slow)} reach less than {_SLOW_SHARE:.0%} of it, and all wait for the slowest"
            do = "compare their nodes' clocks and power limits (nvidia-smi -q), or leave them out"
        found.append(Finding(f"speed {word}", value + share, "doubtful" if why else "ok", why, do))
    return found


def _said(rate: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate / 1e6:.3g} M"
