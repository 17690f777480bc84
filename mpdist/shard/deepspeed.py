"""Engine `deepspeed`: ZeRO 1, 2 and 3 as `deepspeed.initialize` sets them up, under our window, sum, clip and AdamW.

DeepSpeed cuts the parameters, gathers them (stage 3), keeps them on the host (offload) and fills its buckets with
gradients. What decides numbers is ours, as for every engine: full buckets go over our wire instead of DeepSpeed's
averaging collectives, gradients add up in FP32, and its own step (scale, overflow check, clip, optimizer) never runs.

Its partitions are runs of elements, not of rows: at stages 1 and 2 all parameters, laid end to end, are cut once; at
stage 3 each is cut by itself. Masters are read unrounded into those partitions; DeepSpeed would copy rounded ones.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from mpdist.dist import set_timeout
from mpdist.errors import MachineError
from mpdist.plan_zero import buckets
from mpdist.precision import WORDS, Policy
from mpdist.reduce import Wire
from mpdist.shard import Part, Read, read_flat, replace_parameters
from mpdist.shard.gathered import hide_from_checkpoints, let_go_of_weights

_SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
_SUMS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


class _Cut(NamedTuple):
    """This rank's elements [start, start + size) of a parameter, and where they lie in the flat partition `group`."""

    start: int
    size: int
    group: int
    offset: int


class DeepSpeed:
    replicas = 1  # each element of a master lies on one rank alone

    def __init__(
        self,
        model: nn.Module,
        *,
        policy: Policy,
        wire: Wire,
        device: torch.device,
        stage: int,
        every: bool,
        offload: str,
    ) -> None:
        """model: on the meta device, FP32. Collective. offload: none, optimizer, or all (stage 3 only).

        every: reduce each micro-batch, which below stage 3 is what DeepSpeed calls stage 2, else once, its stage 1.
        """
        if stage < 3:
            stage = 2 if every else 1
        self.module, self.wire, self.device, self.stage, self.every = model, wire, device, stage, every
        self._host = offload != "none"
        self._rank, self._ranks = wire.mesh.shard_index, wire.mesh.shard_size
        library = _library(device)
        options = _options(model, policy, wire, stage, offload)
        _materialise(library, model, policy, options, device)
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._trainable: list[Any] = [param for param in model.parameters() if param.requires_grad]
        # A place holder: DeepSpeed takes its parameter group and puts a flat partition into it. It never steps.
        client = torch.optim.AdamW(self._trainable, lr=0.0)
        self._runtime = library.initialize(model=model, optimizer=client, config=options, dist_init_required=False)[0]
        self._zero = self._runtime.optimizer
        for group in {self._runtime.data_parallel_group, self._runtime.seq_data_parallel_group}:
            set_timeout(group)
        self._held: dict[int, torch.Tensor] = {}
        self._last = False
        self._take_over()
        self._drop_spares()
        if stage == 3 and self._ranks > 1:
            let_go_of_weights(model)
            hide_from_checkpoints(self._zero.parameter_offload.get_param_coordinator())
        self._cuts = self._cuts_of_a_line() if stage < 3 else self._cuts_of_each()
        self.parts = self._make_parts()

    # -- set-up -----------------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Puts our sum in the place of DeepSpeed's. Raises MachineError for a version that is built in another way."""
        zero = self._zero
        needed = ("average_tensor", "copy_grads_in_partition") if self.stage < 3 else (_SCATTER, _SUMS)
        missing = [name for name in needed if not hasattr(zero, name)]
        if missing:
            raise MachineError(f"shard.engine = deepspeed: this version of DeepSpeed has no {missing[0]}",
                               "its optimizer is built in another way than those that mpdist was tried with",
                               "install deepspeed 0.19, or use shard.engine: fsdp2")  # fmt: skip
        zero.unregister_grad_acc_post_hooks()  # they would end each backward by themselves; after_backward does
        if self.stage == 3:
            setattr(zero, _SCATTER, self._scatter)
            zero._offload_grad_partition_at_boundary = lambda *_: None  # no copy for a step that never comes
            if not self.every:
                self._travel = zero.reduce_ready_partitions_and_remove_grads
                zero.reduce_ready_partitions_and_remove_grads = self._hold
            return
        # Stage 1 in BF16 would get another, hungrier optimizer if it were asked for FP32 accumulation from the start.
        zero.gradient_accumulation_dtype = torch.float32
        zero.use_separate_grad_accum = zero.dtype != torch.float32
        zero.use_grad_accum_attribute = zero.use_separate_grad_accum and self.stage == 1
        zero._use_compact_grad_partition_buffer = lambda _: True
        zero.average_tensor = self._average
        zero.copy_grads_in_partition = lambda param, _=None: zero.clear_grad_attribute(param)
        if self.stage == 2:
            self._travel = zero.reduce_ready_partitions_and_remove_grads
            zero.reduce_ready_partitions_and_remove_grads = self._in_order

    def _drop_spares(self) -> None:
        """Frees what DeepSpeed's own step alone would use, and at stage 3 the masters that equal the working copies."""
        zero = self._zero
        if self.stage < 3 and self._host:
            zero.param_buffer_of_bit16_for_cpu_offload_groups.clear()
            zero.temp_grad_buffer_for_cpu_offload = zero.temp_grad_buffer_for_gpu_offload = None
        for master, working in self._pairs():
            master.grad = None
            if (master.dtype, master.device) == (working.dtype, working.device):
                master.data = working

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        """Stage 3: flat partitions, (masters, working copies); the same memory where the masters compute."""
        if self.stage == 3:
            yield from zip(
                self._zero.fp32_partitioned_groups_flat, self._zero.fp16_partitioned_groups_flat, strict=True
            )

    def _cuts_of_a_line(self) -> dict[int, _Cut]:
        """Stages 1 and 2, by id of the parameter."""
        zero, cuts = self._zero, {}
        size = zero.partition_size[0]
        begin, end = self._rank * size, (self._rank + 1) * size
        for param, at in zip(zero.bit16_groups[0], zero.round_robin_bit16_offsets[0], strict=True):
            low, high = max(at, begin), min(at + param.numel(), end)
            cuts[id(param)] = _Cut(low - at, high - low, 0, low - begin) if high > low else _Cut(0, 0, 0, 0)
        return cuts

    def _cuts_of_each(self) -> dict[int, _Cut]:
        """Stage 3, by id of the parameter."""
        cuts = {}
        for group, params in enumerate(self._zero.fp16_groups):
            offset = 0
            for param in params:
                cuts[id(param)] = self._share(param)._replace(group=group, offset=offset)
                offset += param.partition_numel()
        return cuts

    def _share(self, param: Any) -> _Cut:
        """Stage 3: what of a parameter this rank holds; the last ones may hold nothing but padding."""
        start = min(self._rank * param.partition_numel(), param.ds_numel)
        return _Cut(start, min(param.partition_numel(), param.ds_numel - start), 0, 0)

    def _make_parts(self) -> list[Part]:
        zero = self._zero
        flats = zero.single_partition_of_fp32_groups if self.stage < 3 else zero.fp32_partitioned_groups_flat
        parts = []
        param: Any  # ZeRO-3 hangs its own attributes on parameters
        for name, param in self.module.named_parameters():
            shape = tuple(param.ds_shape if self.stage == 3 else param.shape)
            if param.requires_grad:
                start, size, group, offset = self._cuts[id(param)]
                parts.append(Part(name, flats[group].data[offset : offset + size], shape, start, True, flat=True))
            elif self.stage < 3:
                parts.append(Part(name, param.data, shape, 0, False))
            else:
                start, size, _, _ = self._share(param)
                parts.append(Part(name, param.ds_tensor.data[:size], shape, start, False, flat=True))
        return parts

    def load(self, read: Read) -> None:
        for part in self.parts:
            part.tensor.copy_(
                read_flat(read, part) if part.flat else read(part.name, 0, part.shape[0] if part.shape else 1)
            )
        self.refresh()

    # -- a window ---------------------------------------------------------------------------------------------

    def micro(self, first: bool, last: bool) -> None:
        zero = self._zero
        self._last = last
        self._arrived: set[int] = set()
        self._gone = 0
        if first and self.stage == 3:
            zero.grad_partitions_flat_buffer.zero_()
        zero.clear_backward_seen_flag()
        zero.micro_step_id = 1  # stage 3 adds to its sums but at 0, where what an earlier window left could survive
        self._runtime.set_gradient_accumulation_boundary(last)
        zero.backward_prologue()
        zero.enter_backward()

    def after_backward(self, last: bool) -> None:
        if self.stage < 3 and (last or self.stage == 2):
            self._add_zeros()
        self._runtime.allreduce_gradients()
        self._zero.backward_epilogue()
        self._zero.exit_backward()
        if last:
            sums = getattr(self._zero, _SUMS, {})
            for param in [p for p in self._trainable if id(p) in self._held]:  # the last micro-batch did not use them
                sums[param.ds_id].add_(self._scatter([param], torch.float32)[0])

    def poison(self) -> None:
        """Drill: this rank's next addend gets +inf in one element, before any reduction."""
        self.wire.poisoned = True

    def _in_order(self, param: Any, group: int) -> None:
        """Stage 2: gradients enter the buckets in the same order on all ranks, whatever a rank's loss depends on."""
        self._arrived.add(id(param))
        while self._gone < len(self._trainable) and id(self._trainable[-1 - self._gone]) in self._arrived:
            self._gone += 1
            self._travel(self._trainable[-self._gone], group)

    def _add_zeros(self) -> None:
        """Stages 1 and 2: for parameters that this rank has not used and others may have."""
        zero = self._zero
        zero.setup_buckets()
        for param in self._trainable:
            if self.stage == 2:
                if id(param) not in self._arrived:
                    param.grad = torch.zeros_like(param)
                    self._in_order(param, 0)
            elif zero.get_gradient_for_reduction(param) is None:
                zeros = torch.zeros_like(param, dtype=zero._gradient_reduction_buffer_dtype())
                setattr(param, "grad_accum" if zero.use_grad_accum_attribute else "grad", zeros)

    def _average(self, bucket: torch.Tensor, key: torch.dtype) -> None:
        """Stages 1 and 2, in place of DeepSpeed's average. bucket: [n], gradients of whole parameters end to end."""
        zero, size = self._zero, self._zero.partition_size[0]
        if not zero.ipg_buckets[key].params:  # what comes first is too large for a bucket and travels by itself
            return
        places = zero.round_robin_bit16_offsets[0]
        pieces: list[list[torch.Tensor]] = [[] for _ in range(self._ranks)]
        mine: list[tuple[int, int]] = []
        done = 0
        for _, index, _ in zero.ipg_buckets[key].params:
            param = zero.bit16_groups[0][index]
            at, end = places[index], places[index] + param.numel()
            if self.wire.counting:
                self.wire.count(self._names[id(param)], bucket[done : done + param.numel()])
            while at < end:  # a parameter may lie across the partitions of several ranks
                owner = at // size
                stop = min(end, (owner + 1) * size)
                pieces[owner].append(bucket[done : done + stop - at])
                if owner == self._rank:
                    mine.append((at - owner * size, stop - at))
                done, at = done + stop - at, stop
        total = self.wire.reduce_to_owners(pieces)
        flat = zero._get_compact_grad_partition_buffer(0).flat_partition
        for (offset, count), part in zip(mine, total.split([count for _, count in mine]), strict=True):
            flat[offset : offset + count].add_(part)
        for _, index, _ in zero.ipg_buckets[key].params:
            zero.clear_grad_attribute(zero.bit16_groups[0][index])

    def _hold(self, param: Any) -> None:
        """Stage 3, where gradients travel once: they add up whole, in FP32, until the last micro-batch."""
        if self._last:
            self._travel(param)
            return
        if id(param) in self._held:
            self._held[id(param)] += param.grad
        else:
            self._held[id(param)] = param.grad.to(torch.float32, copy=True)
        param.grad = None

    def _scatter(self, params: Sequence[Any], _: torch.dtype) -> list[torch.Tensor]:
        """Stage 3, in place of DeepSpeed's reduce-scatter: this rank's share of each parameter's gradient, FP32, padded."""
        shares = [param.partition_numel() for param in params]
        grads = [self._whole_gradient(param) for param in params]
        if self.wire.counting:
            for param, grad in zip(params, grads, strict=True):
                self.wire.count(self._names[id(param)], grad)
        dtype = torch.float32 if self.wire.wire == torch.float32 else grads[0].dtype
        addends = torch.zeros(self._ranks, sum(shares), dtype=dtype, device=self.device)
        offset = 0
        for flat, share in zip(grads, shares, strict=True):
            for rank in range(self._ranks):
                piece = flat[rank * share : (rank + 1) * share]
                addends[rank, offset : offset + len(piece)] = piece
            offset += share
        grads.clear()
        for param in params:
            param.grad = None  # on their way now
        out = torch.empty(offset, dtype=torch.float32, device=addends.device)
        self.wire.reduce_scatter(out, addends.view(-1))
        return list(out.split(shares))

    def _whole_gradient(self, param: Any) -> torch.Tensor:
        held = self._held.pop(id(param), None)
        if held is None:
            return param.grad.reshape(-1)
        return (held if param.grad is None else held.add_(param.grad)).reshape(-1)

    def gradients(self) -> list[torch.Tensor]:
        if self.stage == 3:
            sums = getattr(self._zero, _SUMS)
            return [sums[param.ds_id][: self._cuts[id(param)].size] for param in self._trainable]
        flat = self._zero._get_compact_grad_partition_buffer(0).flat_partition
        if self._host:
            target = self._zero.single_partition_of_fp32_groups[0]
            flat = target.grad.copy_(flat)
        cuts = (self._cuts[id(param)] for param in self._trainable)
        return [flat[cut.offset : cut.offset + cut.size] for cut in cuts]

    def clear(self) -> None:
        self._zero.zero_grad(set_to_none=True)
        if self.stage < 3:
            self._zero.averaged_gradients.clear()

    def refresh(self) -> None:
        zero = self._zero
        if self.stage < 3:
            zero.update_lp_params()
            return
        with torch.no_grad():
            zero._partition_all_parameters()  # what a forward without a backward has left gathered
            for group, (master, working) in enumerate(self._pairs()):
                if master.data_ptr() != working.data_ptr():
                    zero._reassign_or_swap_out_partitioned_parameters(group)

    def leaves(self) -> dict[str, torch.Tensor | None]:
        return {name: param for name, param in self.module.named_parameters() if param.requires_grad}


def _library(device: torch.device) -> Any:
    """DeepSpeed, without the messages and the compilation that it begins with."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # asked for, also where srun has started the ranks
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    with _silent():
        import deepspeed
        import deepspeed.ops

    warnings.filterwarnings("ignore", message=".*(all_gather_into|reduce_scatter)_tensor", category=FutureWarning)
    # A C++ extension for inference, compiled at init for up to minutes, and a lock that a kill leaves behind for ever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if device.type == "cpu":  # it asks for instructions, and torch computes in FP16 without them
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    return deepspeed


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def _options(model: nn.Module, policy: Policy, wire: Wire, stage: int, offload: str) -> dict[str, Any]:
    """DeepSpeed's configuration. Buckets follow the model."""
    sizes = [param.numel() for param in model.parameters()]
    bucket, live = buckets(sizes)
    pinned = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    zero: dict[str, Any] = {
        "stage": stage, "overlap_comm": False, "contiguous_gradients": stage < 3, "round_robin_gradients": False,
        "reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "memory_efficient_linear": False,
    }  # fmt: skip
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": bucket, "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": live, "sub_group_size": 2 * sum(sizes),
        }  # fmt: skip
    if offload != "none":
        zero["offload_optimizer"] = pinned
    if offload == "all":
        zero["offload_param"] = pinned
    compute = WORDS[policy.compute]
    options: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
        "steps_per_print": 10**12, "zero_optimization": zero, "communication_data_type": WORDS[wire.wire],
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": compute if stage == 1 else "fp32"},
    }  # fmt: skip
    if compute != "fp32":  # a static scale of 1: ours is in the loss already
        options[compute] = {"enabled": True} | ({"loss_scale": 1.0} if compute == "fp16" else {})
    return options


def _materialise(library: Any, model: nn.Module, policy: Policy, options: dict[str, Any], device: torch.device) -> None:
    """Empty working copies on the device; at stage 3 each is cut as soon as it is made, so none is whole beside another."""
    cutter = library.zero.Init(config_dict_or_path=options) if options["zero_optimization"]["stage"] == 3 else None

    def make(name: str, old: nn.Parameter) -> nn.Parameter:
        data = torch.empty(old.shape, dtype=policy.parameter_dtype(name), device=device)
        param = nn.Parameter(data, old.requires_grad)
        if cutter is not None:
            cutter._convert_to_deepspeed_param(param)
            param.partition()  # type: ignore[attr-defined]
        return param

    replace_parameters(model, make, device)
