"""The table of devices: what a name means, what it does not, and the peaks."""

from __future__ import annotations

import math

import pytest

from mpdist.config.compat import differences
from mpdist.config.schema import Track
from mpdist.devices import DEVICES, candidates, find, mfu, peak_flops, require
from mpdist.errors import UsageError

# As torch.cuda.get_device_name gives them, and as people type them.
NAMES = {
    "NVIDIA GB200": "GB200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA B200": "B200",
    "NVIDIA GH200 480GB": "GH200 96GB",  # its CPU's memory
    "NVIDIA GH200 144G HBM3e": "GH200 144GB",
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H20": "H20",
    "NVIDIA A100-SXM4-80GB": "A100 SXM 80GB",
    "NVIDIA A100-SXM4-40GB": "A100 SXM 40GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe 80GB",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA A800-SXM4-80GB": "A800 SXM",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA L40S": "L40S",
    "NVIDIA L40": "L40",
    "NVIDIA L4": "L4",
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000 Blackwell Workstation",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "Tesla V100-SXM2-16GB": "V100 SXM 16GB",
    "Tesla T4": "T4",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI300X VF": "MI300X",
    "H100": "H100 SXM",
    "h100-80gb": "H100 SXM",
    "H100SXM": "H100 SXM",
    "A100 80GB": "A100 SXM 80GB",
    "a100-40gb": "A100 SXM 40GB",
    "a100 80 GB pcie": "A100 PCIe 80GB",
    "rtx4090": "RTX 4090",
    "RTX PRO 6000": "RTX PRO 6000 Blackwell Workstation",
}
# Each resembles one that is there.
STRANGERS = [
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA A100-SXM-64GB",
    "GRID A100-40C",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "Quadro RTX 6000",
    "Tesla V100S-PCIE-32GB",
    "NVIDIA H20-3e",
    "NVIDIA L400",
    "H100 96GB",
    "L4 SXM",
    "cpu",
    "NVIDIA",
    "",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_device_is_found_by_torchs_name_and_by_what_people_type(name: str) -> None:
    found = find(name)
    assert found is not None
    assert found.name == NAMES[name]


@pytest.mark.parametrize("name", STRANGERS)
def test_a_device_that_only_resembles_a_known_one_is_unknown(name: str) -> None:
    assert find(name) is None
    assert peak_flops(name, "fp16") is None
    with pytest.raises(UsageError, match="is unknown"):
        require(name)


def test_every_device_is_found_by_its_own_name_and_by_nothing_else() -> None:
    assert len({device.name for device in DEVICES}) == len(DEVICES)
    for device in DEVICES:
        assert candidates(device.name) == (device,)
        assert require(device.name.lower().replace(" ", "-")) is device


def test_memory_tells_apart_what_shares_a_name() -> None:
    with pytest.raises(UsageError, match="A100 SXM 80GB, A100 SXM 40GB"):
        find("A100")
    for size, name in ((80 * 2**30, "A100 SXM 80GB"), (40 * 10**9, "A100 SXM 40GB"), (42_298_834_944, "A100 SXM 40GB")):
        assert require("A100", size).name == name
    with pytest.raises(UsageError, match=r"of 60.00 GiB is not clear(.|\n)*A100 SXM 80GB, A100 SXM 40GB"):
        find("A100", 60 * 2**30)
    # A limit on what may be used of a device is no other device.
    assert require("H100", 60 * 2**30).name == "H100 SXM"


def test_a_devices_memory_is_what_torch_reports_where_that_is_known() -> None:
    """No data sheet's figure is off by more than drivers keep back or round up, and each says which of the two it is."""
    reported = [device for device in DEVICES if device.memory_bytes != device.sheet_bytes]
    assert {"H100 SXM", "H200 SXM", "A100 SXM 80GB", "RTX 4090"} <= {device.name for device in reported}
    for device in DEVICES:
        assert 0.98 <= device.memory_bytes / device.sheet_bytes <= 1.08
        assert ("data sheet's" in device.memory_source) == (device not in reported)
    assert require("H100").memory_bytes == round(79.11 * 2**30)


def test_an_unknown_device_is_said_with_its_neighbours() -> None:
    with pytest.raises(UsageError, match=r"the GPU 'RTX 4080' is unknown(.|\n)*RTX 4090"):
        require("RTX 4080")


@pytest.mark.parametrize(
    ("device", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100", 312),  # whichever of them it is
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


def test_a_peak_is_of_the_dtype_that_is_computed_in() -> None:
    h100, v100, mi300 = "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB", "AMD Instinct MI300X"
    assert peak_flops(h100, "fp32") == pytest.approx(67e12)
    assert peak_flops(h100, "fp32", tf32=True) == pytest.approx(494.7e12)
    assert peak_flops(v100, "bf16") is None  # has none in hardware
    assert peak_flops(v100, "fp16") == pytest.approx(125e12)
    assert peak_flops(v100, "fp32", tf32=True) == peak_flops(v100, "fp32") == pytest.approx(15.7e12)
    assert peak_flops(mi300, "fp32") == pytest.approx(163.4e12)
    assert peak_flops(mi300, "fp32", tf32=True) is None  # its libraries decide


def test_a_partition_has_not_the_peak_of_the_whole() -> None:
    assert peak_flops("AMD Instinct MI300X", memory_bytes=206_141_652_992) == pytest.approx(1307.4e12)
    assert peak_flops("AMD Instinct MI300X", memory_bytes=25_753_026_560) is None


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_the_figures_of_a_device_agree_with_each_other(device) -> None:  # type: ignore[no-untyped-def]
    """No slip of a digit: each ratio is one that the hardware is built to."""
    assert device.source.split()[0] in ("NVIDIA", "AMD")
    if device.peak_tf32 is not None:
        assert device.peak_16bit / device.peak_tf32 == pytest.approx(2, rel=0.02)
        assert device.peak_fp32 <= device.peak_tf32
    # FLOPs a byte of memory traffic, and how far a link lies below the memory.
    assert 30 < device.peak_16bit / device.memory_bandwidth < 450
    assert device.link is None or 5 < device.memory_bandwidth / device.link < 80
    # A pass over the whole memory takes 10 to 100 ms on all of them.
    assert 0.01 < device.memory_bytes / device.memory_bandwidth < 0.1
    assert (device.link is None) == (device.link_name == "")


def test_c107_utilisation_counts_every_devices_peak_once() -> None:
    one = mfu(1000.0, 500.0, 1, 1e9)
    assert one == pytest.approx(1000 * 500 / 1e9)
    assert one is not None
    assert mfu(1000.0, 500.0, 2, 1e9) == pytest.approx(one / 2)
    assert mfu(1000.0, 500.0, 1, None) is None
    assert math.isfinite(one)


def test_the_peak_can_be_given_and_makes_no_other_run() -> None:
    assert Track(peak_tflops=312.0).peak_tflops == 312.0
    with pytest.raises(ValueError, match="greater than 0"):
        Track(peak_tflops=0.0)
    rest = {"budget": {"steps": 1}, "optim": {"horizon": "auto", "schedule": "cosine", "warmup": 0.03}}
    found = differences({"track": {"every": 10}, **rest}, {"track": {"every": 10, "peak_tflops": 312.0}, **rest})
    assert [d.key for d in found.free] == ["track.peak_tflops"]
    assert found.allowed
    assert found.listed == []
