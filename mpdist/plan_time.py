"""How fast a step can be at most on a known device: work, traffic and memory traffic, each over the device's own peak.

The figure is a bound, for full rows of one document each with a label everywhere: other rows cost less, and no kernel,
link or memory runs at its data sheet's rate. Only what published runs have reached turns it into an estimate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mpdist.arch import Arch, model_flops_per_token
from mpdist.devices import Device
from mpdist.plan_activations import recomputed_flops
from mpdist.plan_memory import Asked, rows
from mpdist.plan_traffic import Traffic, host_bytes

# Model FLOPs utilisation of whole training steps: torchtitan (8B on H100 33 to 39 %, on A100 57 to 58), llm-foundry (0.8B
# to 70B on H100, 35 to 46), Megatron-LM (2B to 462B on H100, 41 to 48), PyTorch's FSDP posts (7B on A100, 57 to 68).
PUBLISHED = (0.33, 0.68)
_PUBLISHED_ON = ("A100 SXM", "H100 SXM")
_PUBLISHED_BY = "torchtitan, llm-foundry, Megatron-LM and PyTorch's FSDP posts, models of 0.8B to 462B"


@dataclass(frozen=True)
class Part:
    """Seconds that one resource is busy in a step at its peak rate. seconds: None where they are not known."""

    name: str
    seconds: float | None
    formula: str

    def json(self) -> dict[str, object]:
        return {"part": self.name, "seconds": self.seconds, "formula": self.formula}


@dataclass(frozen=True)
class Time:
    """A step's least time on one device.

    peak: FLOP/s that the work is divided by. FLOPs a token: of the model, as speed/mfu counts them, and of the hardware,
    with what is computed twice and without gradients that nobody needs. seconds: no step is faster; without the parts
    that are not known; None where so much of it passes through the host that such a sum would mislead. likely: seconds
    from the best to the worst of ``PUBLISHED``, None where nothing like it is published. tokens_per_s: of all ranks, no
    faster.
    """

    device: str
    peak: float
    peak_from: str
    model_flops_per_token: float
    hardware_flops_per_token: float
    parts: tuple[Part, ...]
    seconds: float | None
    bound_by: str
    tokens_per_s: float | None
    likely: tuple[float, float] | None = field(default=None)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The parts that are left out of ``seconds``."""
        return tuple(part.name for part in self.parts if part.seconds is None)

    def json(self) -> dict[str, object]:
        return {
            "device": self.device,
            "peak_flops": self.peak,
            "peak_from": self.peak_from,
            "model_flops_per_token": self.model_flops_per_token,
            "hardware_flops_per_token": self.hardware_flops_per_token,
            "parts": [part.json() for part in self.parts],
            "no_faster_than_s": self.seconds,
            "bound_by": self.bound_by,
            "tokens_per_s_at_most": self.tokens_per_s,
            "published_range_s": None if self.likely is None else list(self.likely),
        }

    def lines(self) -> list[str]:
        """The bound in lines of text: the parts with their formulas, and the sum."""
        width = max(len(part.name) for part in self.parts)
        out = [f"time of a step on {self.device}, all at its peak rate ({self.peak_from}), with full rows"]
        for part in self.parts:
            seconds = "unknown" if part.seconds is None else format_seconds(part.seconds)
            out.append(f"  {part.name.ljust(width)}  {seconds:>8}  {part.formula}")
        if self.seconds is None or self.tokens_per_s is None:
            unknown = " and ".join(self.unknown)
            return [*out, f"  no time of a step: with offload it hangs on what is not known here: {unknown}"]
        without = f", {' and '.join(self.unknown)} left out" if self.unknown else ""
        out.append(
            f"  no faster than {format_seconds(self.seconds)} a step, {self.tokens_per_s:,.0f} tokens/s over all ranks; "
            f"bound by {self.bound_by}{without}"
        )
        if self.likely is not None:
            low, high = (format_seconds(seconds) for seconds in self.likely)
            share = f"{PUBLISHED[0]:.0%} to {PUBLISHED[1]:.0%}"
            out.append(
                f"  an estimate: {low} to {high} if it reaches {share} MFU, as published runs do ({_PUBLISHED_BY})"
            )
        return out


def format_seconds(seconds: float) -> str:
    """Three digits in the unit that keeps the number above 1: 0.0123 -> '12.3 ms'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
    raise AssertionError(seconds)


def missing(asked: Asked, device: Device | None, tf32: bool = False) -> str:
    """Why there is no estimate, where ``estimate`` gives None."""
    if device is None:
        return "the peak rates of the device are not known"
    if asked.compute == "bf16" and not device.bf16:
        return f"{device.name} has no BF16 products of its own"
    kind = "FP32 products that may use TF32" if tf32 and asked.compute == "fp32" else asked.compute.upper()
    return f"the peak rate of {device.name} in {kind} is not known"


def estimate(
    asked: Asked,
    arch: Arch,
    traffic: Iterable[Traffic],
    device: Device | None,
    *,
    tf32: bool = False,
    peak: float | None = None,
    network: float | None = None,
) -> Time | None:
    """The least time of a step of ``asked``, or None where no peak is known (``missing`` says why).

    traffic: the plan's rows. tf32: precision.tf32. peak: FLOP/s of one device, in place of the data sheet's
    (track.peak_tflops). network: bytes/s that one node can send to others, all its cards together.
    """
    rate, source = peak, "track.peak_tflops"
    if rate is None:
        if device is None or (rate := device.peak(asked.compute, tf32)) is None:
            return None
        source = device.source
    tokens = asked.micro * asked.accumulation * asked.seq_len
    model, hardware, again = flops_per_token(asked, arch)
    kind = "TF32" if asked.compute == "fp32" and tf32 else asked.compute.upper()
    text = f"{tokens:,} tokens x {hardware / 1e9:.3g} GFLOP"
    text += f" ({again / 1e9:.3g} of them computed twice)" if again else ""
    compute = Part("compute", tokens * hardware / rate, f"{text} / {rate / 1e12:g} TFLOP/s {kind}")
    waits = _communication(asked, list(traffic), device, network) + _host(asked, arch, device)
    after = _optimizer(asked, arch, device)
    together = [part for part in (compute, *waits) if part.seconds is not None]
    longest = max(together, key=lambda part: part.seconds or 0.0)
    seconds = (longest.seconds or 0.0) + (after.seconds or 0.0)
    # The host's own step is what such a job may wait for most. A bound without it would be below one without offload.
    sums = after.seconds is not None or asked.offload == "none"
    return Time(
        device=device.name if device is not None else "an unnamed device",
        peak=rate,
        peak_from=source,
        model_flops_per_token=model,
        hardware_flops_per_token=hardware,
        parts=(compute, *waits, after),
        seconds=seconds if sums else None,
        bound_by=longest.name,
        tokens_per_s=tokens * asked.ranks / seconds if sums else None,
        likely=None
        if None in [part.seconds for part in waits]
        else _likely(asked, device, tokens * model / rate, seconds),
    )


def _likely(asked: Asked, device: Device | None, model_seconds: float, least: float) -> tuple[float, float] | None:
    """model_seconds: the model's own FLOPs at the peak rate, which is what MFU relates a step to."""
    like = device is not None and device.name.startswith(_PUBLISHED_ON) and asked.compute != "fp32"
    slowest = model_seconds / PUBLISHED[0]
    if not like or asked.freeze or asked.offload != "none" or least >= slowest:
        return None
    return max(least, model_seconds / PUBLISHED[1]), slowest


# ------------------------------------------------------------------------------------------------ work


def flops_per_token(asked: Asked, arch: Arch) -> tuple[float, float, float]:
    """(model FLOPs, hardware FLOPs, those of the latter that are computed twice), forward and backward, of one token.

    Hardware FLOPs: 2 a multiplied parameter forward, 2 for its input's gradient and 2 for its own, if it trains;
    attention as its causal half, 2 x width x seq_len a block forward and twice that backward; and recomputation (see
    plan_activations). Below the first part that trains there is no backward; that part itself counts with its own
    gradients alone, so a model with frozen parts is counted low rather than high.
    """
    model = model_flops_per_token(arch, asked.seq_len)
    again = recomputed_flops(arch, asked.seq_len, asked.checkpointing, asked.attention == "eager")
    if not asked.freeze:
        return model, model + again, again
    trains = {p.name for p in arch.split(asked.freeze)[0]}
    # The embedding is block -1, the last norm and the head stand behind the last block.
    first = min(arch.layers if p.group in ("norm", "head") else p.block for p in arch.params if p.name in trains)
    below_head = any(p.name in trains for p in arch.params if p.group != "head")
    table_trains = any(p.name in trains for p in arch.params if p.group == "embedding")
    products = [
        (p.count * p.active, p.block > first if p.block >= 0 else below_head, p.name in trains)
        for p in arch.params
        if p.matmul
    ]
    if arch.tied:
        products.append((arch.vocab * arch.hidden, True, table_trains))
    work = sum(count * (2 + 2 * passes_on + 2 * has_own) for count, passes_on, has_own in products)
    behind = max(0, arch.layers - 1 - first)  # blocks that gradients pass through from end to end
    again *= behind / arch.layers
    return model, work + 2 * arch.q_width * asked.seq_len * (arch.layers + 2 * behind) + again, again


# -------------------------------------------------------------------------------------- bytes on wires


def _communication(asked: Asked, traffic: list[Traffic], device: Device | None, network: float | None) -> list[Part]:
    """Bytes that a rank sends inside its node and between nodes, over what can carry them; no part where it sends none."""
    parts = []
    within = sum(_least(asked, row)[0] for row in traffic)
    between = sum(_least(asked, row)[1] for row in traffic)
    if within:
        gigabytes = f"{within / 1e9:.3g} GB sent"
        if device is None or device.link is None:
            parts.append(Part("links", None, f"{gigabytes}, over a link of unknown rate"))
        else:
            text = f"{gigabytes} / {device.link / 1e9:.4g} GB/s ({device.link_name})"
            parts.append(Part("links", within / device.link, text))
    if between:
        per_node = asked.ranks // asked.nodes
        ranks = f" x {per_node} ranks of a node" if per_node > 1 else ""
        text = f"{between / 1e9:.3g} GB sent{ranks}"
        if network is None:
            parts.append(Part("network", None, f"{text}, over a network of unknown rate"))
        else:
            seconds = between * per_node / network
            parts.append(Part("network", seconds, f"{text} / {network / 1e9:.4g} GB/s of a node"))
    return parts


def _host(asked: Asked, arch: Arch, device: Device | None) -> list[Part]:
    """What passes between a device and its host's memory, the two directions at once; no part without offload."""
    if asked.offload == "none":
        return []
    there, back, how = host_bytes(asked, arch)
    text = f"{there / 1e9:.3g} GB to the device, {back / 1e9:.3g} GB back: {how}"
    if device is None or device.host is None:
        return [Part("host link", None, f"{text}; over a link of unknown rate")]
    text += f"; / {device.host / 1e9:.4g} GB/s each way ({device.host_name})"
    return [Part("host link", max(there, back) / device.host, text)]


def _least(asked: Asked, row: Traffic) -> tuple[int, int]:
    """(bytes within, between) that a rank cannot do without sending.

    What NCCL adds up itself may be added up in the switches (NVLink SHARP), to which each rank sends its payload once.
    """
    if row.collective.startswith("all-reduce") and asked.by_backend:
        return min(row.payload_within, row.sent_within), min(row.payload_between, row.sent_between)
    return row.sent_within, row.sent_between


# ------------------------------------------------------------------------------------ the optimizer's step


def _optimizer(asked: Asked, arch: Arch, device: Device | None) -> Part:
    """The update: it waits for every gradient, since one norm and one verdict go before it, and is bound by memory."""
    states = {row.row: row for row in rows(asked, arch)[0]}
    p, m, g = (states[name] for name in ("parameters", "moments", "gradients"))
    moved = 2 * p.rest_bytes + 2 * m.rest_bytes + g.rest_bytes
    text = f"{moved / 1e9:.3g} GB: masters and moments read and written, gradients read"
    if p.host or m.host:
        return Part("optimizer", None, f"{text}, in host memory")
    if device is None:
        return Part("optimizer", None, f"{text}, over memory of unknown rate")
    bandwidth = device.memory_bandwidth
    return Part("optimizer", moved / bandwidth, f"{text}; / {bandwidth / 1e9:,.0f} GB/s")
