"""Live bytes by ledger row, followed tensor by tensor: what the allocator of a CPU does not tell, and fake tensors have not.

Every storage that an operation returns is noted with the moment it came, the moment it went and the row that it counts to,
so the same account serves a real window and a simulated one. The row follows from the code that allocated it: the innermost
frame that `_ROWS` knows decides, and what nobody claims is an activation. Bytes that a kernel takes and gives back within one
operation are not seen, nor is a backend's own staging memory.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# Where memory is asked for -> what it is for. A name may hold one function's own row behind a colon.
_ROWS = {
    "mpdist/loss.py": "logits",
    "mpdist/reduce.py": "comm",
    "mpdist/shard/ddp.py": "comm",
    "mpdist/shard/deepspeed.py": "comm",
    "mpdist/optim.py": "optimizer_temporaries",
    "torch/optim/adam.py": "optimizer_temporaries",
    "torch/optim/adamw.py": "optimizer_temporaries",
    "_fully_shard/_fsdp_collectives.py": "working",
    "_fully_shard/_fsdp_collectives.py:foreach_reduce": "comm",
    "_fully_shard/_fsdp_collectives.py:reduce_scatter_copy_in": "comm",
    "_fully_shard/_fsdp_param.py": "working",
    "_fully_shard/_fsdp_param.py:to_accumulated_grad_if_needed": "gradients",
    "mpdist/shard/fsdp2.py:allocate": "comm",
    "mpdist/shard/fsdp2.py": "gradients",
    "runtime/zero/partition_parameters.py": "gathered",
    "runtime/zero/partitioned_param_coordinator.py": "gathered",
    "runtime/zero/stage3.py": "comm",
    "runtime/zero/stage_1_and_2.py": "comm",
    "runtime/bf16_optimizer.py": "comm",
}


@dataclass
class Span:
    """One storage of ``size`` bytes from operation ``begin`` up to ``end`` (None: still there)."""

    row: str
    size: int
    begin: int
    end: int | None = None
    dtype: str = ""
    site: str = ""


class Gauge(TorchDispatchMode):
    """Active inside its `with`. Tensors made before are known only once `name` has named them."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[Span] = []
        self.now = 0
        self.marks: dict[str, int] = {}
        self._open: dict[int, Span] = {}
        self._held: dict[int, Any] = {}  # weak references, kept until they fire
        self._resize: Any = None
        self._rows: dict[Any, str | None] = {}
        self._hooks: list[Any] = []

    # -- what comes and goes ------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.now += 1
        for tensor in _tensors(out):
            if not _wraps(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._open:
                    row, site = self._where(sys._getframe(1))
                    span = self._begin(storage, row, tensor.dtype, site)
                    if _among(storage, (args, kwargs)):  # written into: it was there all the time
                        span.begin = 0
        return out

    def __enter__(self) -> Gauge:
        # A storage that changes its size does so behind every operation's back; FSDP2 frees and refills its buffers so.
        self._resize = resize = torch.UntypedStorage.resize_
        gauge = self

        def resized(storage: Any, size: Any) -> Any:
            before = storage.nbytes()
            done = resize(storage, size)
            gauge._changed(storage, before)
            return done

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*problem)

    def _begin(self, storage: Any, row: str, dtype: torch.dtype, site: str = "") -> Span:
        key = storage._cdata
        span = Span(row, storage.nbytes(), self.now, None, str(dtype).removeprefix("torch."), site)
        self.spans.append(span)
        self._open[key] = span

        def gone(_: Any) -> None:
            self._held.pop(key, None)
            last = self._open.pop(key, None)
            if last is not None:
                # A moment of its own: what an operation read was still there beside what it made.
                self.now += 1
                last.end = self.now

        self._held[key] = weakref.ref(storage, gone)
        return span

    def _changed(self, storage: Any, before: int) -> None:
        span, size = self._open.get(storage._cdata), storage.nbytes()
        if size == before:
            return
        if span is None:  # made before the gauge was there
            row, site = self._where(sys._getframe(1))
            self.spans.append(Span(row, before, 0, self.now))
            self._begin(storage, row, torch.uint8, site)
            return
        span.end = self.now
        again = Span(span.row, size, self.now, None, span.dtype, span.site)
        self.spans.append(again)
        self._open[storage._cdata] = again

    def _where(self, frame: FrameType | None) -> tuple[str, str]:
        """(row, file:line of the innermost frame outside torch) of the code that is running."""
        row, site = None, ""
        while frame is not None and (row is None or not site):
            code = frame.f_code
            if code not in self._rows:
                self._rows[code] = _claimed(code.co_filename, code.co_name)
            row = row or self._rows[code]
            if not site and "/torch/" not in code.co_filename:
                site = f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
            frame = frame.f_back
        return row or "activations", site

    # -- what is known better than by its place -------------------------------------------------------------------

    def name(self, row: str, tensors: Iterable[Tensor]) -> None:
        """These tensors' storages count to `row`, from their first moment to their last."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            span = self._open.get(storage._cdata)
            if span is None and storage.nbytes():
                span = self._begin(storage, row, tensor.dtype)
                span.begin = 0
            if span is not None:
                span.row = row

    def follow(self, leaves: Iterable[Tensor]) -> None:
        """What backward makes as the gradient of one of these leaves counts to `comm`: it is on its way to its sum."""
        if self._hooks:
            return

        def arrived(leaf: Tensor) -> None:
            span = None if leaf.grad is None else self._open.get(leaf.grad.untyped_storage()._cdata)
            if span is not None and span.row == "activations":
                span.row = "comm"

        self._hooks = [leaf.register_post_accumulate_grad_hook(arrived) for leaf in leaves]

    def leave(self) -> None:
        """No leaf is followed any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def mark(self, moment: str) -> None:
        """Names this moment; what is done from now on comes after it."""
        self.now += 1
        self.marks[moment] = self.now

    # -- the account ----------------------------------------------------------------------------------------------

    def samples(self) -> Iterator[tuple[int, dict[str, int]]]:
        """(moment, bytes of each row from then on) at each moment at which anything changed. The mapping is reused."""
        moves: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for span in self.spans:
            moves[span.begin].append((span.row, span.size))
            if span.end is not None:
                moves[span.end].append((span.row, -span.size))
        held: dict[str, int] = defaultdict(int)
        for moment in sorted(moves):
            for row, size in moves[moment]:
                held[row] += size
            yield moment, held

    def peak(self, begin: int = 0, end: int | None = None) -> tuple[int, dict[str, int], int]:
        """(bytes, bytes of each row, moment) at the highest point of [begin, end)."""
        best: tuple[int, dict[str, int], int] = (0, {}, begin)
        before: tuple[int, dict[str, int]] = (0, {})
        for moment, held in self.samples():
            if end is not None and moment >= end:
                break
            if moment < begin:
                before = moment, dict(held)
                continue
            if before[1] and moment > begin:  # what was there already when the span of time began
                best = sum(before[1].values()), before[1], begin
            before = 0, {}
            total = sum(held.values())
            if total > best[0]:
                best = total, dict(held), moment
        return best if best[1] else (sum(before[1].values()), before[1], begin)

    def own_peaks(self) -> dict[str, tuple[int, int]]:
        """The most that each row ever held, and the moment at which it did."""
        found: dict[str, tuple[int, int]] = {}
        for moment, held in self.samples():
            for row, size in held.items():
                if size > found.get(row, (0, 0))[0]:
                    found[row] = size, moment
        return found

    def largest_site(self, row: str, moment: int) -> str:
        """file:line that had made most of what `row` held at that moment; empty where that is not known."""
        sizes: dict[str, int] = defaultdict(int)
        for span in self.spans:
            if span.row == row and span.begin <= moment and (span.end is None or span.end > moment):
                sizes[span.site] += span.size
        return max(sizes, key=lambda site: sizes[site], default="")

    def open(self) -> dict[int, Span]:
        """Spans that have not ended, by the address of their storage."""
        return dict(self._open)


def _among(storage: Any, given: Any) -> bool:
    """Whether one of the tensors given lies in this storage."""
    return any(t.untyped_storage()._cdata == storage._cdata for t in _tensors(given) if not _wraps(t))


def _tensors(given: Any) -> Iterator[Tensor]:
    """What an operation takes or returns holds them plainly or in lists; a general walk costs as much as the operation."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for item in given:
            yield from _tensors(item)
    elif isinstance(given, dict):
        yield from _tensors(list(given.values()))


def _wraps(tensor: Any) -> bool:
    """Whether it owns no bytes: what a DTensor wraps is seen by itself."""
    return bool(is_traceable_wrapper_subclass(tensor))


def _claimed(file: str, function: str) -> str | None:
    for place, row in _ROWS.items():
        path, _, name = place.partition(":")
        if name and file.endswith(path) and name in function:
            return row
    return next((row for place, row in _ROWS.items() if file.endswith(place)), None)
