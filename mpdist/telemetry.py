"""What reduced precision costs, measured on steps that are logged: nothing is held or added up on the others.

Shares are of elements that are not zero, over all ranks, unless another whole is named.

precision/grad_zero           share of all elements of the window's gradient that are zero. Where FP16 computes, what
                              backward's kernels flush is among these: it is zero before anyone can count it
precision/grad_flushed        16-bit compute: share of the window's gradient, scaled, that the compute dtype turns to zero
precision/grad_overflowed     likewise, to infinity; where attempts at this step were skipped, the last one's share of all
                              elements that were not finite
precision/grad_subnormal      with a scale: share below FP16's normal numbers, where bits are lost
precision/wire_flushed, precision/wire_overflowed
                              16-bit wire: share of the ranks' addends that their cast to the wire dtype lost
precision/wire_error          16-bit wire: relative L2 error of the window's first reduction (a block of layers, or a
                              bucket) against the same reduction in FP32
precision/changed_fraction    16-bit masters: share of all their values that the step changed. An update below about
                              1/256 of a BF16 weight rounds away, so small learning rates leave most values as they are
precision/unchanged_master    share of updates, not zero, that left the master as it was
precision/unchanged_working   16-bit compute under FP32 masters: likewise, the working copy
precision/update_ratio        L2 norm of the master's change over the master's
precision/weight_norm         L2 norm of the masters
precision/headroom_overflow   with a scale: powers of two that it may grow by until the window's largest gradient element
                              leaves FP16's range; activations' gradients may leave it earlier
precision/headroom_underflow  with a scale: powers of two that it may fall by until FP16 flushes more than 1 % of the
                              window's gradient; negative if it does so already
precision/by_layer            {name: [a number for each layer]} of these and of grad_norm, unscaled and before the clip;
                              the session's env.json has the names of the layers

Gradients are counted whole. What needs the masters of before the step (and the scale's headroom to underflow) looks at
evenly spaced values, up to 16,384 of each parameter's part on a rank, so that no second copy of the masters is held. Where
blocks have scales of their own (precision.scale.per_block), `scaled` is by that of the parameter's block as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpdist.cast import least, lost
from mpdist.optim import Optimizer
from mpdist.reduce import Wire

SAMPLE = 2**14  # values of a part that are looked at where not all are
_LOST_SHARE = 0.01  # of the gradient: what a scale may lose
_POWERS = range(-45, 17)  # of two: thresholds between which magnitudes of scaled gradients are counted

# name -> (part, whole) of summed columns
_SHARES = {
    "grad_zero": ("zero", "elements"),
    "grad_flushed": ("flushed", "cast"),
    "grad_overflowed": ("overflowed", "cast"),
    "grad_subnormal": ("subnormal", "sampled"),
    "wire_flushed": ("wire_flushed", "wire"),
    "wire_overflowed": ("wire_overflowed", "wire"),
    "unchanged_master": ("stuck", "moving"),
    "unchanged_working": ("stuck_working", "moving_working"),
}


def layer_of(name: str) -> str:
    """The layer that a parameter's figures count to: its numbered block, else the module that holds it."""
    block = re.match(r"(.*?\.\d+)\.", name)
    return block[1] if block else name.rpartition(".")[0] or name


def by_name(row: Mapping[str, Any], layers: Sequence[str]) -> dict[str, Any]:
    """The row with each layer's figures under a name of their own, for those who cannot draw lists."""
    flat = {key: value for key, value in row.items() if key != "precision/by_layer"}
    for metric, values in row.get("precision/by_layer", {}).items():
        flat |= {f"precision/{metric}/{n}": v for n, v in zip(layers, values, strict=True) if v is not None}
    return flat


class Telemetry:
    """begin, look, hold and read stand around one attempt; all do nothing unless `begin` was told to measure.

    compute: the dtype in which the module of a parameter computes. replicas: ranks that hold the same masters. device:
    where sums over ranks are made. scaled: whether a loss scale is in use. layers: names, in the model's order.
    """

    def __init__(
        self, optimizer: Optimizer, wire: Wire, *, compute: Callable[[str], torch.dtype] = lambda _: torch.float32,
        replicas: int = 1, device: torch.device | None = None, scaled: bool = False,
    ) -> None:  # fmt: skip
        self._optimizer, self._wire, self._parts, self._scaled = optimizer, wire, optimizer.parts, scaled
        self._replicas, self._device = replicas, device or self._parts[0].tensor.device
        self._compute = [compute(part.name) for part in self._parts]
        self._pure = any(part.tensor.dtype != torch.float32 for part in self._parts)
        names = [layer_of(part.name) for part in self._parts]
        self.layers = list(dict.fromkeys(names))
        self._layer = torch.tensor([self.layers.index(name) for name in names], device=self._device)
        self._strides = [1 if self._pure else _stride(part.tensor) for part in self._parts]
        decay = {id(param): group["weight_decay"] for group in optimizer.adam.param_groups for param in group["params"]}
        self._decay = [decay[id(param)] for param in optimizer.params]
        self._measuring = False
        self._columns: dict[str, Tensor] = {}  # [parts], FP64
        self._skipped: tuple[list[Tensor], dict[str, Tensor]] | None = None
        self._carried: dict[str, list[float]] | None = None  # by layer, from the session before
        self._largest: Tensor | None = None  # [parts]
        self._before: list[Tensor] = []

    def begin(self, measure: bool) -> None:
        """Before the window's first backward; the same on all ranks."""
        self._measuring = measure
        if measure:
            self._wire.sample()
        else:
            self._skipped = self._carried = None

    def state(self) -> dict[str, list[float]] | None:
        """Collective where a measured attempt was skipped: sums over ranks, by layer, that the next step's row will tell."""
        if self._skipped is None:
            return self._carried
        counts, wire = self._skipped
        elements = [float(part.tensor.numel()) for part in self._parts]
        columns = {"not_finite": torch.stack(counts).to(self._device).double(),
                   "elements": torch.tensor(elements, dtype=torch.float64, device=self._device)}  # fmt: skip
        if wire:
            columns["wire_overflowed"] = self._by_part(wire)[:, 2]
        sums = self._by_layer(columns)
        dist.all_reduce(sums)
        return dict(zip(columns, sums.T.tolist(), strict=True))

    def load(self, state: dict[str, list[float]] | None) -> None:
        """Of `state`, from the checkpoint that is gone on from."""
        self._carried = state

    # -- of one attempt, on the device ------------------------------------------------------------------------------

    def look(self, gradients: list[Tensor], scale: float | Tensor, applied: bool) -> None:
        """At the window's summed gradients, still scaled. scale: of all, or [parts]. No wait, no collective.

        Of a skipped attempt it is kept, until a step is applied, where values were not finite.
        """
        if not self._measuring:
            return
        if not applied:
            self._wire.take_error()
            self._skipped = [torch.count_nonzero(g - g) for g in gradients], self._wire.take_lost()
            self._carried = None
            return
        device = self._device
        norms = torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32)).to(device).double()
        weights = torch.stack(torch._foreach_norm([part.tensor for part in self._parts], 2.0, dtype=torch.float32))
        elements = torch.tensor([float(g.numel()) for g in gradients], dtype=torch.float64, device=device)
        nothing = torch.zeros(3, dtype=torch.float64, device=gradients[0].device)
        casts = [lost(g, t) if t != torch.float32 else nothing for g, t in zip(gradients, self._compute, strict=True)]
        cast = torch.stack(casts).to(device)
        plain = [
            torch.count_nonzero(g) if t == torch.float32 else c[0]
            for g, t, c in zip(gradients, self._compute, casts, strict=True)
        ]
        self._columns = {
            "elements": elements, "squares": (norms / scale).square(), "weights": weights.to(device).double().square(),
            "zero": elements - torch.stack([count.double() for count in plain]).to(device),
            "cast": cast[:, 0], "flushed": cast[:, 1], "overflowed": cast[:, 2],
        }  # fmt: skip
        if self._scaled:
            self._look_at_sizes(gradients)
        self._look_at_wire(self._wire.take_lost())

    def _look_at_sizes(self, gradients: list[Tensor]) -> None:
        """Largest magnitudes of all, and how many of a sample lie at or below each power of two."""
        tiny = torch.finfo(torch.float16).smallest_normal
        edges = [0.0, *(2.0**k for k in _POWERS), tiny * (1 - 2**-24), math.inf]
        bounds = torch.tensor(edges, device=gradients[0].device)
        rows, largest = [], []
        for gradient in gradients:
            sample = gradient.reshape(-1)[:: _stride(gradient)].abs().float().sort()[0]
            rows.append(torch.searchsorted(sample, bounds, right=True))
            low, high = torch.aminmax(gradient) if gradient.numel() else (bounds[0], bounds[0])
            largest.append(torch.maximum(-low, high).float())
        self._largest = torch.stack(largest).to(self._device)
        table = torch.stack(rows).to(self._device).double()
        table = table[:, 1:] - table[:, :1]  # those that are not zero
        names = (*(f"up to 2^{k}" for k in _POWERS), "subnormal", "sampled")
        self._columns |= dict(zip(names, table.unbind(1), strict=True))

    def _look_at_wire(self, found: Mapping[str, Tensor]) -> None:
        skipped, skipped_wire = self._skipped or ([], {})
        self._skipped = None
        if skipped:
            self._columns["not_finite"] = torch.stack(skipped).to(self._device).double()
        if found:
            table, before = (self._by_part(counts) for counts in (found, skipped_wire or found))
            self._columns |= {"wire": table[:, 0], "wire_flushed": table[:, 1], "wire_overflowed": before[:, 2]}

    def _by_part(self, counts: Mapping[str, Tensor]) -> Tensor:
        """[parts, 3]"""
        nothing = torch.zeros(3, dtype=torch.float64, device=next(iter(counts.values())).device)
        return torch.stack([counts.get(part.name, nothing) for part in self._parts]).to(self._device)

    def hold(self) -> None:
        """Before the optimizer moves. Costs a copy of the sample, with 16-bit masters of all, until `read`."""
        if self._measuring:
            self._before = [part.tensor.reshape(-1)[::stride].clone() for part, stride in self._sampled()]

    def _sampled(self) -> Any:
        return zip(self._parts, self._strides, strict=True)

    def _look_at_updates(self) -> None:
        """An update is not zero where Adam's first moment is not, or where a weight that is not zero decays."""
        rows = []
        lr = self._optimizer.adam.param_groups[0]["lr"]
        for i, (part, stride) in enumerate(self._sampled()):
            before, after = self._before[i], part.tensor.reshape(-1)[::stride]
            moving = self._optimizer.moments(i)["exp_avg"].reshape(-1)[::stride] != 0
            if self._decay[i]:
                moving = moving | (before != 0)
            if lr == 0:
                moving = torch.zeros_like(moving)
            same, wide, compute = before == after, before.float(), self._compute[i]
            working = (moving, moving & (before.to(compute) == after.to(compute)))
            if part.tensor.dtype != torch.float32 or compute == torch.float32:  # the masters compute
                working = (torch.zeros_like(moving), torch.zeros_like(moving))
            counts = [mask.sum() for mask in (moving, moving & same, ~same, *working)]
            squares = [values.square().sum(dtype=torch.float64) for values in (after.float() - wide, wide)]
            rows.append(torch.stack([value.double() for value in (*counts, *squares)]))
        self._before = []
        names = ("moving", "stuck", "changed", "moving_working", "stuck_working", "moved", "sampled_weights")
        self._columns |= dict(zip(names, torch.stack(rows).to(self._device).unbind(1), strict=True))

    # -- over ranks -------------------------------------------------------------------------------------------------

    def read(self) -> dict[str, Any]:
        """Collective where it measures. The figures, over all ranks, of an applied attempt."""
        if not self._measuring:
            return {}
        self._look_at_updates()
        sums, largest, wire = self._summed()
        self._columns, self._largest = {}, None
        if self._carried is not None:  # another number of ranks may hold the same elements more than once
            ratio = sum(sums["elements"]) / sum(self._carried["elements"])
            for name in {"not_finite", *sums} & self._carried.keys() - {"elements"}:
                sums[name] = [count * ratio for count in self._carried[name]]
            self._carried = None
        whole = {name: sum(column) for name, column in sums.items()}
        found = self._figures(whole, max(largest, default=0.0))
        if self._pure and whole["elements"]:
            found["changed_fraction"] = whole["changed"] / whole["elements"]
        found.pop("grad_norm", None)  # train/grad_norm
        if wire[1]:
            found["wire_error"] = math.sqrt(wire[0] / wire[1])
        by_layer: dict[str, list[float | None]] = {}
        for i in range(len(self.layers)):
            own = self._figures({name: column[i] for name, column in sums.items()}, largest[i] if largest else 0.0)
            for name, value in own.items():
                by_layer.setdefault(name, [None] * len(self.layers))[i] = float(f"{value:.4g}")
        return {f"precision/{name}": value for name, value in found.items()} | {"precision/by_layer": by_layer}

    def _summed(self) -> tuple[dict[str, list[float]], list[float], list[float]]:
        """Columns by layer, summed over ranks; the largest magnitudes; squares of the wire's error and of its result."""
        device, count = self._device, len(self.layers)
        sums = self._by_layer(self._columns)
        error = self._wire.take_error()
        both = torch.zeros(2, dtype=torch.float64, device=device) if error is None else error.to(device)
        together = torch.cat([sums.view(-1), both])
        dist.all_reduce(together)
        largest: list[float] = []
        if self._largest is not None:
            own = self._layer[None, :] == torch.arange(count, device=device)[:, None]
            top = torch.where(own, self._largest[None, :], 0.0).amax(dim=1)
            dist.all_reduce(top, op=dist.ReduceOp.MAX)
            largest = top.tolist()
        values = together[:-2].view(count, -1).T.tolist()
        return dict(zip(self._columns, values, strict=True)), largest, together[-2:].tolist()

    def _by_layer(self, columns: Mapping[str, Tensor]) -> Tensor:
        """[layers, columns], of this rank."""
        table = torch.stack(list(columns.values()), dim=1)
        sums = torch.zeros(len(self.layers), table.shape[1], dtype=torch.float64, device=self._device)
        return sums.index_add_(0, self._layer, table)

    def _figures(self, sums: Mapping[str, float], largest: float) -> dict[str, float]:
        """Of a layer or of all, from its sums; a share of nothing is left out."""
        found = {name: sums[a] / sums[b] for name, (a, b) in _SHARES.items() if sums.get(b)}
        if sums.get("not_finite"):
            found["grad_overflowed"] = sums["not_finite"] / sums["elements"]
        found["grad_norm"] = math.sqrt(sums["squares"] / self._replicas)
        found["weight_norm"] = math.sqrt(sums["weights"] / self._replicas)
        if sums["sampled_weights"]:
            found["update_ratio"] = math.sqrt(sums["moved"] / sums["sampled_weights"])
        if largest:
            found["headroom_overflow"] = math.log2(torch.finfo(torch.float16).max / largest)
        if sums.get("sampled"):
            found["headroom_underflow"] = _headroom({k: sums[f"up to 2^{k}"] / sums["sampled"] for k in _POWERS})
        return found


def _headroom(shares: Mapping[int, float]) -> int:
    """How far a scale may fall. shares: of scaled gradients whose magnitude is at most 2^k. FP16 flushes up to 2^-25."""
    flushed = round(math.log2(least(torch.float16) / 2))
    return max((k for k, share in shares.items() if share <= _LOST_SHARE), default=min(shares)) - flushed


def _stride(tensor: Tensor) -> int:
    """Of a sample; odd, so that it does not stay in the same columns of a matrix."""
    return -(-tensor.numel() // SAMPLE) | 1
