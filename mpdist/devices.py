"""Peak rates, memory and links of the GPUs that people fine-tune on, from their vendors' data sheets.

Rates are dense (no structured sparsity), in FLOP/s; 16-bit ones accumulate in FP32. Where a sheet gives a whole board
or rack, each figure is divided by its GPUs. A name counts as known only if every word of it is understood: a laptop's,
a cut-down or a sliced device is not taken for its namesake.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from mpdist.errors import UsageError
from mpdist.units import format_bytes


@dataclass(frozen=True)
class Device:
    """One GPU as its data sheet has it.

    memory_bytes: what torch reports in all on such a card, where ``memory_source`` names a report of it; else the sheet's
    GB read as 10^9 bytes (``sheet_bytes``), of which torch reports 10 % less (GDDR6 with error correction) to 7 % more.
    peak_16bit, peak_tf32, peak_fp32: FLOP/s of matrix products; peak_tf32 is None where the part has no TF32, or where
    it depends on the library whether it is used (AMD). memory_bandwidth: bytes/s. link: bytes/s in one direction to all
    peers in a node together, over ``link_name``; the bridges that some PCIe cards can get are not counted; None where
    the sheet leaves it to the system. bf16: whether BF16 products are native; FP16 ones are on all of them. host: bytes/s
    in one direction to the memory of its host, over ``host_name``; None where the sheet leaves it to the system.
    """

    name: str
    sheet_bytes: int
    peak_16bit: float
    peak_tf32: float | None
    peak_fp32: float
    memory_bandwidth: float
    link: float | None
    link_name: str
    source: str
    bf16: bool = True
    host: float | None = None
    host_name: str = ""

    @property
    def memory_bytes(self) -> int:
        return round(_REPORTED[self.name][0] * 2**30) if self.name in _REPORTED else self.sheet_bytes

    @property
    def memory_source(self) -> str:
        """Where ``memory_bytes`` is from, in words."""
        if self.name in _REPORTED:
            return f"as torch reports it on such a card ({_REPORTED[self.name][1]})"
        return f"its data sheet's {self.sheet_bytes // 10**9} GB, since no report of torch's is known here"

    def peak(self, compute: str, tf32: bool = False) -> float | None:
        """FLOP/s of matrix products in ``compute`` (fp32, bf16, fp16); None where that is not known or not native.

        tf32: whether FP32 products may use TF32.
        """
        if compute != "fp32":
            return None if compute == "bf16" and not self.bf16 else self.peak_16bit
        if tf32 and self.name.startswith("MI"):
            return None
        return self.peak_tf32 if tf32 and self.peak_tf32 is not None else self.peak_fp32


# Bytes/s in one direction; sheets give both directions together.
_LINKS: dict[str, float | None] = {
    "NVLink 5": 900e9,
    "NVLink 4": 450e9,
    "NVLink 4, cut to 400 GB/s": 200e9,
    "NVLink 3": 300e9,
    "NVLink 3, cut to 400 GB/s": 200e9,
    "NVLink 2": 150e9,
    "PCIe 5.0 x16": 64e9,
    "PCIe 4.0 x16": 32e9,
    "PCIe 3.0 x16": 16e9,
    "Infinity Fabric, 7 links": 448e9,
    "": None,
}
# How a module that has links of another kind to its peers reaches its host.
_HOSTS = {
    **dict.fromkeys(("B200", "H200 SXM", "H100 SXM", "H800 SXM", "H20", "MI325X", "MI300X"), "PCIe 5.0 x16"),
    **dict.fromkeys(("A100 SXM 80GB", "A100 SXM 40GB", "A800 SXM"), "PCIe 4.0 x16"),
}


# GiB in all that torch has reported on a card (in its "total capacity of ... GiB"), the least where reports differ, and
# where: an issue or a pull request on GitHub. A driver keeps some memory to itself, which nvidia-smi counts.
_REPORTED: dict[str, tuple[float, str]] = {
    "H200 SXM": (139.0, "read from one, rounded down"),
    "H100 SXM": (79.11, "vllm-project/vllm 27508"),
    "A100 SXM 80GB": (79.14, "lianqi1008/Control-GIC 5"),
    "A100 PCIe 80GB": (79.14, "lianqi1008/Control-GIC 5"),
    "A100 SXM 40GB": (39.39, "42,298,834,944 bytes of an A100-SXM4-40GB"),
    "A30": (23.53, "google/RB-Modulation 5"),
    "A10": (21.99, "zai-org/CogVLM 236"),
    "A10G": (22.49, "AUTOMATIC1111/stable-diffusion-webui 1259"),
    "L40S": (44.42, "stepfun-ai/Step-Video-T2V 8"),
    "L40": (44.40, "QwenLM/Qwen3-VL 2097"),
    "RTX PRO 6000 Blackwell Workstation": (94.97, "antirez/ds4 431"),
    "RTX 6000 Ada": (44.43, "DINGYANB/MTVCrafter 21"),
    "RTX 5090": (31.37, "Wan-Video/Wan2.1 465"),
    "RTX 4090": (23.61, "pinokiofactory/flux-webui 11"),
    "RTX 3090": (23.68, "vllm-project/vllm 16343"),
    "V100 SXM 32GB": (31.74, "liucongg/ChatGLM-Finetuning 73"),
    "V100 PCIe 32GB": (31.74, "liucongg/ChatGLM-Finetuning 73"),
    "V100 SXM 16GB": (15.75, "XuyangBai/TransFusion 49"),
    "V100 PCIe 16GB": (15.75, "XuyangBai/TransFusion 49"),
    "T4": (14.75, "hpcaitech/Open-Sora 697"),
    "MI300X": (191.98, "206,141,652,992 bytes of an MI300X"),
}


def _device(
    name: str,
    gb: int,
    rates: tuple[float, float | None, float],
    bandwidth: float,
    link: str,
    source: str,
    bf16: bool = True,
) -> Device:
    """gb: 10^9 bytes. rates: TFLOP/s in 16 bit, TF32, FP32. bandwidth: 10^9 bytes/s."""
    half, tf32, single = (None if rate is None else rate * 1e12 for rate in rates)
    assert half is not None
    assert single is not None
    host = link if link.startswith("PCIe") else _HOSTS.get(name, "")
    return Device(
        name, gb * 10**9, half, tf32, single, bandwidth * 1e9, _LINKS[link], link, source, bf16, _LINKS[host], host
    )


_HOPPER = (989.4, 494.7, 67.0)
_HOPPER_NVL = (835.5, 417.5, 60.0)
_HOPPER_PCIE = (756.0, 378.0, 51.0)
_AMPERE = (312.0, 156.0, 19.5)
_RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture white paper"
_ADA = "NVIDIA Ada GPU Architecture white paper"

# Of one name, the SXM module stands before the PCIe card.
DEVICES: tuple[Device, ...] = (
    _device("GB200", 186, (2500, 1250, 80), 8000, "NVLink 5", "NVIDIA GB200 NVL72 specifications, 1/72 of the rack"),
    _device("B300", 288, (2250, 1125, 75), 8000, "NVLink 5", "NVIDIA HGX B300 specifications, 1/8 of the board"),
    _device("B200", 180, (2250, 1125, 75), 8000, "NVLink 5", "NVIDIA HGX B200 and DGX B200 data sheets, 1/8 of 8 GPUs"),
    _device("GH200 96GB", 96, _HOPPER, 4000, "", "NVIDIA GH200 Grace Hopper Superchip data sheet"),
    _device("GH200 144GB", 144, _HOPPER, 4900, "", "NVIDIA GH200 Grace Hopper Superchip data sheet"),
    _device("H200 SXM", 141, _HOPPER, 4800, "NVLink 4", "NVIDIA H200 Tensor Core GPU data sheet"),
    _device("H200 NVL", 141, _HOPPER_NVL, 4800, "PCIe 5.0 x16", "NVIDIA H200 Tensor Core GPU data sheet"),
    _device("H100 SXM", 80, _HOPPER, 3350, "NVLink 4", "NVIDIA H100 Tensor Core GPU data sheet"),
    _device("H100 NVL", 94, _HOPPER_NVL, 3900, "PCIe 5.0 x16", "NVIDIA H100 Tensor Core GPU data sheet"),
    _device("H100 PCIe", 80, _HOPPER_PCIE, 2000, "PCIe 5.0 x16", "NVIDIA H100 PCIe GPU product brief"),
    _device("H800 SXM", 80, _HOPPER, 3350, "NVLink 4, cut to 400 GB/s", "NVIDIA H800 Tensor Core GPU data sheet"),
    _device("H800 PCIe", 80, _HOPPER_PCIE, 2000, "PCIe 5.0 x16", "NVIDIA H800 Tensor Core GPU data sheet"),
    _device("H20", 96, (148, 74, 44), 4000, "NVLink 4", "NVIDIA H20 GPU data sheet"),
    _device("A100 SXM 80GB", 80, _AMPERE, 2039, "NVLink 3", "NVIDIA A100 Tensor Core GPU data sheet"),
    _device("A100 SXM 40GB", 40, _AMPERE, 1555, "NVLink 3", "NVIDIA A100 Tensor Core GPU data sheet"),
    _device("A100 PCIe 80GB", 80, _AMPERE, 1935, "PCIe 4.0 x16", "NVIDIA A100 Tensor Core GPU data sheet"),
    _device("A100 PCIe 40GB", 40, _AMPERE, 1555, "PCIe 4.0 x16", "NVIDIA A100 Tensor Core GPU data sheet"),
    _device("A800 SXM", 80, _AMPERE, 2039, "NVLink 3, cut to 400 GB/s", "NVIDIA A800 Tensor Core GPU data sheet"),
    _device("A800 PCIe", 80, _AMPERE, 1935, "PCIe 4.0 x16", "NVIDIA A800 Tensor Core GPU data sheet"),
    _device("A30", 24, (165, 82, 10.3), 933, "PCIe 4.0 x16", "NVIDIA A30 Tensor Core GPU data sheet"),
    _device("A40", 48, (149.7, 74.8, 37.4), 696, "PCIe 4.0 x16", "NVIDIA A40 data sheet"),
    _device("A10", 24, (125, 62.5, 31.2), 600, "PCIe 4.0 x16", "NVIDIA A10 Tensor Core GPU data sheet"),
    _device("A10G", 24, (70, 35, 35), 600, "PCIe 4.0 x16", "NVIDIA A10G Tensor Core GPU data sheet"),
    _device("L40S", 48, (362.05, 183, 91.6), 864, "PCIe 4.0 x16", "NVIDIA L40S data sheet"),
    _device("L40", 48, (181.05, 90.5, 90.5), 864, "PCIe 4.0 x16", "NVIDIA L40 data sheet"),
    _device("L4", 24, (121, 60, 30.3), 300, "PCIe 4.0 x16", "NVIDIA L4 Tensor Core GPU data sheet"),
    _device("RTX PRO 6000 Blackwell Workstation", 96, (503.8, 251.9, 125), 1792, "PCIe 5.0 x16", _RTX_BLACKWELL),
    _device("RTX 6000 Ada", 48, (364.2, 182.1, 91.1), 960, "PCIe 4.0 x16", _ADA),
    _device("RTX A6000", 48, (154.8, 77.4, 38.7), 768, "PCIe 4.0 x16", "NVIDIA Ampere GA102 white paper"),
    _device("RTX 5090", 32, (209.5, 104.8, 104.8), 1792, "PCIe 5.0 x16", _RTX_BLACKWELL),
    _device("RTX 4090", 24, (165.2, 82.6, 82.6), 1008, "PCIe 4.0 x16", _ADA),
    _device("RTX 3090", 24, (71, 35.6, 35.6), 936, "PCIe 4.0 x16", "NVIDIA Ampere GA102 white paper"),
    _device("V100 SXM 32GB", 32, (125, None, 15.7), 900, "NVLink 2", "NVIDIA V100 GPU data sheet", bf16=False),
    _device("V100 SXM 16GB", 16, (125, None, 15.7), 900, "NVLink 2", "NVIDIA V100 GPU data sheet", bf16=False),
    _device("V100 PCIe 32GB", 32, (112, None, 14), 900, "PCIe 3.0 x16", "NVIDIA V100 GPU data sheet", bf16=False),
    _device("V100 PCIe 16GB", 16, (112, None, 14), 900, "PCIe 3.0 x16", "NVIDIA V100 GPU data sheet", bf16=False),
    _device("T4", 16, (65, None, 8.1), 320, "PCIe 3.0 x16", "NVIDIA T4 Tensor Core GPU data sheet", bf16=False),
    _device("MI325X", 256, (1307.4, None, 163.4), 6000, "Infinity Fabric, 7 links", "AMD Instinct MI325X data sheet"),
    _device("MI300X", 192, (1307.4, None, 163.4), 5300, "Infinity Fabric, 7 links", "AMD Instinct MI300X data sheet"),
    # Each of its two dies is a device of its own to programs.
    _device("MI250X", 64, (191.5, None, 47.85), 1638, "", "AMD Instinct MI250X data sheet, one of its two dies"),
)

# Words that say nothing of which device it is.
_IDLE = {
    *("nvidia", "tesla", "geforce", "rtx", "generation", "edition", "tensor", "core", "gpu", "ac"),
    *("amd", "instinct", "oam", "vf"),
    *("hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6", "gddr6x", "gddr7"),
}
_FORMS = {"sxm", "pcie"}
# Of these words a name may leave some out: what is sold under the shorter name is this.
_OPTIONAL = {"RTX PRO 6000 Blackwell Workstation": {"blackwell", "workstation"}}


@dataclass(frozen=True)
class _Asked:
    """A name taken apart: which model, SXM or PCIe where that is said, the memory in 10^9 bytes where that is said."""

    words: frozenset[str]
    form: str | None
    gigabytes: tuple[int, ...]


def _read(name: str) -> _Asked:
    text = re.sub(r"[-_/(),]", " ", name.lower())
    text = re.sub(r"\b(rtx)(?=\d|a\d)|(?<=\d)(?=sxm|pcie|nvl)", r"\1 ", text)
    text = re.sub(r"\bsxm\d\b", "sxm", text)
    # The GH200's own name counts its CPU's memory.
    text = text.replace("gh200 480gb", "gh200 96gb")
    sizes = tuple(int(size) for size in re.findall(r"\b(\d+) ?g(?:i?b)?\b", text))
    words = set(re.sub(r"\b\d+ ?g(?:i?b)?\b", " ", text).split()) - _IDLE
    forms = words & _FORMS
    return _Asked(frozenset(words - _FORMS), "".join(sorted(forms)) or None, sizes)


def _form(device: Device) -> str:
    return "pcie" if device.link_name.startswith("PCIe") else "sxm" if device.link_name.startswith("NVLink") else ""


def _close(memory: float, device: Device) -> bool:
    """Whether it can be this device's memory: sheets round, drivers keep some back, and GiB are taken for GB."""
    return 0.9 <= memory / device.sheet_bytes <= 1.1


def candidates(name: str, memory_bytes: int | None = None) -> tuple[Device, ...]:
    """The devices that a name can mean: torch's name of a device, or a shorter one as people type it.

    Where a name does not say SXM or PCIe and there are both, it is the SXM module: NVIDIA's own names say PCIe.
    memory_bytes: of the device, where it is known. Empty for a name with any word that is not understood, for a slice
    of a device (MIG) and for a partition, of which the memory tells.
    """
    asked = _read(name)
    found = []
    for device in DEVICES:
        own = _read(device.name).words
        left_out = own - asked.words
        if not asked.words or asked.words - own or left_out - _OPTIONAL.get(device.name, set()):
            continue
        if asked.form not in (None, _form(device)):
            continue
        sizes = [size * 1e9 for size in asked.gigabytes] + ([] if memory_bytes is None else [float(memory_bytes)])
        found.append((device, all(_close(size, device) for size in sizes)))
    if asked.form is None and any(_form(device) == "sxm" for device, _ in found):
        found = [(device, fits) for device, fits in found if _form(device) == "sxm"]
    return tuple(device for device, fits in found if fits)


def find(name: str, memory_bytes: int | None = None) -> Device | None:
    """The device of that name, or None if it is not in the table. See ``candidates`` for what a name may be.

    memory_bytes: tells apart the devices that share a name, such as an A100 of 40 and of 80 GB; not looked at where the
    name alone is enough. Raises UsageError with the candidates where that leaves none or several.
    """
    found = candidates(name)
    if len(found) > 1 and memory_bytes is not None:
        found = candidates(name, memory_bytes)
    if len(found) == 1:
        return found[0]
    if not (several := found or candidates(name)):
        return None
    names = ", ".join(device.name for device in several)
    what = f"the GPU '{name}'" + ("" if memory_bytes is None else f" of {format_bytes(memory_bytes)}")
    raise UsageError(f"{what} is not clear", f"The name fits {names}.", "Give one of these names.")


def require(name: str, memory_bytes: int | None = None) -> Device:
    """The device of that name, as ``find`` has it. Raises UsageError where it is unknown: no figure is ever guessed."""
    device = find(name, memory_bytes)
    if device is not None:
        return device
    known = {device.name.lower(): device.name for device in DEVICES}
    near = [known[low] for low in difflib.get_close_matches(name.lower(), known, 3, 0.5)]
    raise UsageError(
        f"the GPU '{name}' is unknown",
        "It is not in the table of devices" + (f"; the nearest there: {', '.join(near)}." if near else "."),
        "Leave it out and give its memory with --memory: its time is not estimated, its memory is planned all the same.",
    )


def peak_flops(device: str, compute: str = "bf16", tf32: bool = False, memory_bytes: int | None = None) -> float | None:
    """Peak FLOP/s of one device by its name, for matrix products in ``compute``; None where it is not known.

    tf32: whether FP32 products may use TF32. memory_bytes: of the device, which tells a partition from the whole. A
    name that can mean several devices has a peak if they all have the same.
    """
    peaks = {found.peak(compute, tf32) for found in candidates(device, memory_bytes)}
    return peaks.pop() if len(peaks) == 1 else None


def mfu(flops_per_token: float, tokens_per_s: float, ranks: int, peak: float | None) -> float | None:
    """Model FLOPs utilisation: the share of all ranks' peak that the model's own arithmetic makes use of.

    tokens_per_s: real tokens of all ranks together. peak: FLOP/s of one device; None gives None.
    """
    return None if not peak else flops_per_token * tokens_per_s / (ranks * peak)
