"""Which operation runs in which dtype: counted on one step of the live run, and held against what should be FP32.

The counts are of operations as torch dispatches them, so a fused kernel is one, and what it does inside (the softmax of an
attention kernel, the statistics of a layer norm) is not seen. Views and what telemetry does itself are left out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpdist.assemble import policy_of
from mpdist.findings import Finding
from mpdist.precision import WORDS, kept_modules

if TYPE_CHECKING:
    from mpdist.doctor.examine import Subject
    from mpdist.doctor.trial import Trial

PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "convolution_backward", "_grouped_mm"))
_KINDS = {
    "norms": frozenset(("rsqrt", "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward",
                        "rms_norm", "native_group_norm", "native_batch_norm")),
    "softmax": frozenset(("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "logsumexp")),
    "reductions": frozenset(("sum", "mean", "norm", "linalg_vector_norm", "_foreach_norm", "cumsum", "var", "std", "prod")),
}  # fmt: skip
# What moves numbers and computes none.
_MOVES = frozenset((
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros", "ones", "ones_like",
    "full", "full_like",
    "new_full", "scalar_tensor", "fill", "zero", "copy", "_foreach_copy", "clone", "cat", "stack",
    "split_with_sizes_copy", "_chunk_cat", "_unsafe_view", "slice_backward", "select_backward",
    "gather", "scatter", "index_select", "index", "embedding", "where",
    "masked_fill", "constant_pad_nd", "_reshape_copy", "resize_",
))  # fmt: skip
# Whose code asks for an operation. The innermost frame that is named here decides; what nobody claims is the model's.
_SITES = {
    "mpdist/telemetry.py": "", "mpdist/cast.py": "", "mpdist/diagnose.py": "", "mpdist/fingerprint.py": "",
    "mpdist/loss.py": "loss", "mpdist/optim.py": "optimizer", "/torch/optim/": "optimizer",
    "mpdist/reduce.py": "gradient sums", "mpdist/shard/": "gradient sums", "/_fully_shard/": "gradient sums",
    "/deepspeed/": "gradient sums",
}  # fmt: skip
# Kind -> what to do where it is not FP32; None for what may be in any dtype.
_FP32 = {
    "norms": "keep them: precision.keep_fp32: ['*norm*']",
    "softmax": "use model.attention: sdpa or eager, which compute it in FP32",
    "reductions": "where a module of the model adds up in 16 bit, keep it in precision.keep_fp32",
    "loss": "this is a defect of mpdist: the loss is FP32 by design",
    "optimizer": "precision.master: fp32",
}


class Ran(NamedTuple):
    """kind: see `kind_of`. phase: forward, backward or step."""

    name: str
    kind: str
    dtype: str
    phase: str


@dataclass
class Ops:
    """counts: of this rank's operations that make floating-point numbers. kept: modules that compute in FP32 by the policy."""

    counts: Counter[Ran] = field(default_factory=Counter)
    kept: list[str] = field(default_factory=list)

    @contextmanager
    def around(self, trial: Trial) -> Iterator[None]:
        self.kept = [name for name, _ in kept_modules(trial.parts.module, policy_of(trial.cfg))]
        with _Mode(self.counts):
            yield


class _Mode(TorchDispatchMode):
    def __init__(self, counts: Counter[Ran]) -> None:
        super().__init__()
        self._counts = counts
        self._known: dict[Any, str | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace in ("aten", "c10d", "_c10d_functional"):
            self._note(func, args, out)
        return out

    def _note(self, func: Any, args: Any, out: Any) -> None:
        # An operation that writes into what it was given, or that sends it, returns nothing: then what it was given counts.
        made = [t.dtype for t in tree_leaves(out) if isinstance(t, Tensor)] or [
            t.dtype for t in tree_leaves(args) if isinstance(t, Tensor)
        ]
        floats = [dtype for dtype in made if dtype.is_floating_point]
        site = self._site(sys._getframe(2))
        if not floats or site == "":
            return
        name = func._schema.name.partition("::")[2].rstrip("_")
        dtype = WORDS.get(floats[0], str(floats[0]).removeprefix("torch."))
        backward = torch._C._current_autograd_node() is not None
        phase = "step" if site == "optimizer" else "backward" if backward else "forward"
        self._counts[Ran(name, kind_of(name, func.namespace, site), dtype, phase)] += 1

    def _site(self, frame: FrameType | None) -> str | None:
        """None: of the model."""
        while frame is not None:
            code = frame.f_code
            if code not in self._known:
                file = code.co_filename
                self._known[code] = next((site for place, site in _SITES.items() if place in file), None)
            if self._known[code] is not None:
                return self._known[code]
            frame = frame.f_back
        return None


def kind_of(name: str, namespace: str, site: str | None) -> str:
    """products, attention, norms, softmax, reductions, loss, casts, moves, collectives, gradient sums, optimizer, others."""
    if namespace != "aten":
        return "collectives"
    if name in _MOVES:
        return "moves"
    if name == "_to_copy":
        return "casts"
    if name in PRODUCTS:
        return "products"
    if "scaled_dot_product" in name or "flash_attention" in name:
        return "attention"
    if site is not None:
        return site
    return next((kind for kind, names in _KINDS.items() if name in names), "others")


# -- what is told --------------------------------------------------------------------------------------------------------


def look(subject: Subject) -> list[Finding]:
    """Collective. One step of the configuration's own run; the same findings on every rank, of rank 0's operations."""
    from mpdist.doctor import trial

    ops = Ops()
    cfg = trial.prepared(subject.resolved.config)
    told = trial.run(subject.resolved, cfg, subject.world, 1, ops.around)
    if told.error is not None:
        raise told.error
    everywhere: list[Any] = [None] * subject.world.ranks
    dist.all_gather_object(everywhere, (ops.counts, ops.kept))
    counts, kept = everywhere[0]
    return findings(counts, kept, WORDS[policy_of(cfg).compute], cfg.precision.master == "fp32")


def findings(counts: Mapping[Ran, int], kept: list[str], compute: str, wide_masters: bool) -> list[Finding]:
    found = [Finding("keep_fp32", ", ".join(kept) or "no module")]
    order = ("products", "attention", *_FP32, "gradient sums", "collectives", "casts", "moves", "others")
    kinds = {ran.kind for ran in counts}
    for kind in order:
        own = {ran: n for ran, n in counts.items() if ran.kind == kind}
        narrow = sorted({ran.dtype for ran in own} & {"bf16", "fp16"})
        check = f"ops: {kind}"
        if kind not in kinds:
            if kind == "softmax":
                found.append(Finding(check, "none by itself: inside the attention kernel, which keeps it in FP32"))
            continue
        if narrow and kind in _FP32 and not (kind == "optimizer" and not wide_masters) and not _inside(own):
            why = f"{' and '.join(narrow)} has too few bits to add up many numbers"
            found.append(Finding(check, _said(own), "doubtful", why, _FP32[kind]))
        else:
            inside = " (16-bit ones add up in FP32 inside)" if narrow and kind in ("norms", "reductions") else ""
            found.append(Finding(check, _said(own) + inside))
    for name in sorted(
        {ran.name for ran in counts}, key=lambda n: -sum(c for ran, c in counts.items() if ran.name == n)
    ):
        found.append(Finding(f"op {name}", _said({ran: n for ran, n in counts.items() if ran.name == name})))
    return found


def _inside(own: Mapping[Ran, int]) -> bool:
    """Whether all that is 16 bit are kernels that add up in FP32 inside, whatever they take and give."""
    narrow = {ran.name for ran in own if ran.dtype in ("bf16", "fp16")}
    return narrow <= (_KINDS["norms"] - {"rsqrt"}) | {"sum", "mean", "_foreach_norm", "linalg_vector_norm"}


def _said(own: Mapping[Ran, int]) -> str:
    """`bf16: 14 forward, 28 backward; fp32: 3 forward`"""
    parts = []
    for dtype in sorted({ran.dtype for ran in own}):
        phases: Counter[str] = Counter()
        for ran, count in own.items():
            if ran.dtype == dtype:
                phases[ran.phase] += count
        parts.append(f"{dtype}: " + ", ".join(f"{phases[p]} {p}" for p in ("forward", "backward", "step") if phases[p]))
    return "; ".join(parts)
