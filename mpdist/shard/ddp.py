"""Engine `ddp`: every rank holds everything (stage 0).

With 16-bit compute the module's parameters are working copies in the compute dtype and the FP32 masters lie beside
them; with FP32 compute they are the same tensors. Gradients are gathered into flat FP32 buckets as backward
produces them, in an order that is the same on all ranks; a bucket travels as soon as it and all before it are full.
One rank alone needs neither buckets nor hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from mpdist.precision import Policy, keep_in_fp32
from mpdist.reduce import Wire
from mpdist.shard import Part, Read, replace_parameters

_BUCKET_ELEMENTS = 8 * 2**20  # 32 MiB of FP32: large enough for the link, small enough to overlap


@dataclass
class _Bucket:
    """A run of parameters whose gradients travel together; `total` is the window's FP32 sum, flat."""

    names: list[str]
    total: torch.Tensor
    views: dict[str, torch.Tensor]
    addend: torch.Tensor | None = None  # this micro-batch's own gradient where it travels by itself
    missing: set[str] = field(default_factory=set)
    wait: Callable[[], None] | None = None


class Ddp:
    def __init__(
        self, model: nn.Module, *, policy: Policy, wire: Wire, device: torch.device, every: bool, ranks: int
    ) -> None:
        """model: on the meta device, FP32, `requires_grad` as it will train. every: reduce each micro-batch."""
        self.module, self.policy, self.wire, self.device, self.every = model, policy, wire, device, every
        self.replicas = ranks
        self._ranks = ranks
        keep_in_fp32(model, policy)
        self._working: dict[str, nn.Parameter] = {}
        self.parts: list[Part] = []
        self._materialise()
        self._apart = [
            (part, self._working[part.name])
            for part in self.parts
            if part.trainable and part.tensor is not self._working[part.name].data
        ]
        self._copied = [(p.tensor, w.data) for p, w in self._apart]
        self._trainable = [p for p in self.parts if p.trainable]
        # Autograd adds FP32 gradients over micro-batches by itself; 16-bit ones need an FP32 sum of our own.
        self._own_sum = any(self._working[p.name].dtype != torch.float32 for p in self._trainable)
        self._first = True
        self._last = False
        self._grads: list[torch.Tensor] | None = None
        if ranks == 1 and self._own_sum:
            self._grads = [torch.empty_like(p.tensor, dtype=torch.float32) for p in self._trainable]
        self._buckets: list[_Bucket] = self._build_buckets() if ranks > 1 else []
        self._poisoned = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and ranks > 1 else None

    # -- set-up -----------------------------------------------------------------------------------------------

    def _materialise(self) -> None:
        masters: dict[str, torch.Tensor] = {}

        def make(name: str, old: nn.Parameter) -> nn.Parameter:
            dtype = self.policy.parameter_dtype(name)
            work = nn.Parameter(torch.empty(old.shape, dtype=dtype, device=self.device), old.requires_grad)
            masters[name] = work.data
            if old.requires_grad and dtype != self.policy.master:
                masters[name] = torch.empty(old.shape, dtype=self.policy.master, device=self.device)
            return work

        replace_parameters(self.module, make, self.device)
        for name, work in self.module.named_parameters():
            self._working[name] = work
            self.parts.append(Part(name, masters[name], tuple(work.shape), 0, work.requires_grad))

    def _build_buckets(self) -> list[_Bucket]:
        runs: list[list[Part]] = [[]]
        for part in reversed(self._trainable):  # backward reaches the last layers first
            if runs[-1] and sum(p.tensor.numel() for p in runs[-1]) + part.tensor.numel() > _BUCKET_ELEMENTS:
                runs.append([])
            runs[-1].append(part)
        buckets = []
        for run in runs:
            total = torch.zeros(sum(p.tensor.numel() for p in run), dtype=torch.float32, device=self.device)
            views = dict(zip((p.name for p in run), _views(total, run), strict=True))
            bucket = _Bucket([p.name for p in run], total, views)
            buckets.append(bucket)
            for part in run:
                self._working[part.name].register_post_accumulate_grad_hook(self._hook(part.name, bucket))
        return buckets

    def load(self, read: Read) -> None:
        for part in self.parts:
            part.tensor.copy_(read(part.name, 0, part.shape[0] if part.shape else 1))
        self.refresh()

    # -- a window ---------------------------------------------------------------------------------------------

    def poison(self) -> None:
        """Drill: the next gradient of this rank gets +inf in one element, before any reduction."""
        self._poisoned = True
        self.wire.poisoned = self._ranks > 1

    def micro(self, first: bool, last: bool) -> None:
        self._first, self._last = first, last
        for bucket in self._buckets:
            bucket.missing = set(bucket.names)
        self._next = 0

    def _travels(self) -> bool:
        return self.every or self._last

    def _hook(self, name: str, bucket: _Bucket) -> Callable[[torch.Tensor], None]:
        def collect(param: torch.Tensor) -> None:
            target = self._target(bucket, name)
            # The first addend is copied, so that nothing of an earlier window is ever added.
            if self._first or target is not bucket.views[name]:
                target.copy_(param.grad)  # type: ignore[arg-type]
            else:
                target.add_(param.grad)  # type: ignore[arg-type]
            param.grad = None
            bucket.missing.discard(name)
            if self._travels():
                self._start_full_buckets(finish=False)

        return collect

    def _target(self, bucket: _Bucket, name: str) -> torch.Tensor:
        """Where this micro-batch's gradient of `name` goes: the window's sum, or a buffer that travels by itself."""
        if self._first or not self.every:
            return bucket.views[name]
        if bucket.addend is None:
            bucket.addend = torch.zeros_like(bucket.total)
        offset = bucket.views[name].storage_offset() - bucket.total.storage_offset()
        view = bucket.views[name]
        return bucket.addend[offset : offset + view.numel()].view(view.shape)

    def _start_full_buckets(self, finish: bool) -> None:
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.missing and not finish:
                return
            if self._first:
                for name in bucket.missing:
                    bucket.views[name].zero_()
            elif self.every and bucket.addend is None:
                bucket.addend = torch.zeros_like(bucket.total)
            with self._beside():
                if self.wire.counting:
                    for name in bucket.names:
                        self.wire.count(name, self._target(bucket, name))
                bucket.wait = self.wire.start_add_replicas(bucket.total if bucket.addend is None else bucket.addend)
            self._next += 1

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On a GPU, work for the wire is queued on a stream of its own, behind what is queued so far and beside backward."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def after_backward(self, last: bool) -> None:
        if self._ranks == 1:
            self._add_alone()
            return
        if not self._travels():
            if self._first:
                for bucket in self._buckets:
                    for name in bucket.missing:
                        bucket.views[name].zero_()
            return
        self._start_full_buckets(finish=True)
        with self._beside():
            for bucket in self._buckets:
                assert bucket.wait is not None
                bucket.wait()
                bucket.wait = None
                if bucket.addend is not None:
                    bucket.total.add_(bucket.addend)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        for bucket in self._buckets:
            bucket.addend = None  # only now may its memory be used again

    def _add_alone(self) -> None:
        """One rank: autograd adds FP32 gradients by itself; 16-bit ones are added in FP32 here."""
        params = [self._working[part.name] for part in self._trainable]
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        if self._poisoned:
            grads[0].view(-1)[0] = float("inf")
            self._poisoned = False
        if not self._own_sum:
            self._grads = grads
            return
        assert self._grads is not None
        if self._first:
            torch._foreach_copy_(self._grads, grads)
        else:
            torch._foreach_add_(self._grads, grads)
        for param in params:
            param.grad = None

    def gradients(self) -> list[torch.Tensor]:
        if self._ranks == 1:
            assert self._grads is not None
            return self._grads
        views: dict[str, torch.Tensor] = {}
        for bucket in self._buckets:
            views.update(bucket.views)
        return [views[part.name] for part in self._trainable]

    def clear(self) -> None:
        if self._ranks == 1 and not self._own_sum:
            for part in self._trainable:
                self._working[part.name].grad = None
            self._grads = None

    def refresh(self) -> None:
        if self._copied:
            torch._foreach_copy_([work for _, work in self._copied], [master for master, _ in self._copied])

    def leaves(self) -> dict[str, torch.Tensor | None]:
        return {part.name: self._working[part.name] for part in self._trainable}


def _views(flat: torch.Tensor, run: list[Part]) -> list[torch.Tensor]:
    sizes = [part.tensor.numel() for part in run]
    return [piece.view(part.shape) for piece, part in zip(flat.split(sizes), run, strict=True)]
