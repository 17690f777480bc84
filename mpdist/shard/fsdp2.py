"""Engine `fsdp2`: torch's `fully_shard`, with our own addition of gradients.

The FP32 sharded parameters are the masters. Stage 3 frees the unsharded working copies after forward, stage 2 keeps
them until backward is done. FSDP2 sees a one-dimensional shard mesh only; replicas (HSDP) are added up by our hook
after the scatter, so both legs obey the same wire and sum dtypes, and nothing is averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

from mpdist.precision import Policy, is_head, kept_modules
from mpdist.reduce import Wire
from mpdist.shard import Part, Read


class _Scatter(ReduceScatter):
    """FSDP2's reduce-scatter, done by our wire. FSDP2 hands over and takes back FP32."""

    def __init__(self, wire: Wire, columns: list[tuple[str, int]]) -> None:
        """columns: of what is reduced together, (parameter, elements of a shard with its padding)."""
        self.wire, self._columns = wire, columns

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        sizes = [size for _, size in self._columns]
        if self.wire.counting and input_tensor.numel() == sum(sizes) * self.wire.mesh.shard_size:
            by_rank = input_tensor.view(self.wire.mesh.shard_size, -1).split(sizes, dim=1)
            for (name, _), addend in zip(self._columns, by_rank, strict=True):
                self.wire.count(name, addend)
        self.wire.reduce_scatter(output_tensor, input_tensor)
        return None

    def add_replicas(self, tensor: torch.Tensor) -> None:
        """Where no reduce-scatter comes before it, this is where addends are cast."""
        if self.wire.counting and self.wire.mesh.shard_size == 1:
            for (name, _), addend in zip(
                self._columns, tensor.view(-1).split([n for _, n in self._columns]), strict=True
            ):
                self.wire.count(name, addend)
        self.wire.add_replicas(tensor)


class Fsdp2:
    def __init__(
        self,
        model: nn.Module,
        blocks: list[nn.Module],
        *,
        policy: Policy,
        wire: Wire,
        device: torch.device,
        stage: int,
        every: bool,
        offload: bool,
    ) -> None:
        """model: on the meta device, FP32; blocks: its repeated layers, each sharded by itself. Collective."""
        self.module, self.wire, self.device, self.every = model, wire, device, every
        self.replicas = wire.mesh.replica_size
        mesh = wire.mesh.shard_mesh
        assert mesh is not None
        self._host = offload
        set_dtypes(model, policy)
        options: dict[str, Any] = {"mesh": mesh, "offload_policy": OffloadPolicy()}
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        computing = None if policy.compute == policy.master else policy.compute
        # Inputs are left alone: casting them would round the loss factor, an FP32 scalar, to the compute dtype.
        normal = MixedPrecisionPolicy(param_dtype=computing, reduce_dtype=torch.float32, cast_forward_inputs=False)
        kept = MixedPrecisionPolicy(
            param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=policy.compute, cast_forward_inputs=True
        )
        reshard = stage == 3
        for _, module in kept_modules(model, policy):
            own = replace(kept, output_dtype=None) if is_head(model, module) else kept
            fully_shard(module, reshard_after_forward=reshard, mp_policy=own, **options)
        for block in blocks:
            if not isinstance(block, FSDPModule):
                fully_shard(block, reshard_after_forward=reshard, mp_policy=normal, **options)
        fully_shard(model, reshard_after_forward=False, mp_policy=normal, **options)
        self._materialise()
        self.parts = [self._part(name, p) for name, p in model.named_parameters()]
        self._sharded = [p for p in model.parameters() if p.requires_grad]
        self._set_communication()
        self._syncing = True

    def _set_communication(self) -> None:
        root = self.module
        assert isinstance(root, FSDPModule)
        names = {id(param): name for name, param in root.named_parameters()}
        for module in root.modules():
            if isinstance(module, FSDPModule):
                params = [p for g in module._get_fsdp_state()._fsdp_param_groups for p in g.fsdp_params]
                scatter = _Scatter(self.wire, [
                    (names[id(p.sharded_param)], p.padded_sharded_param_size.numel()) for p in params if p.sharded_param.requires_grad
                ])  # fmt: skip
                module.set_custom_reduce_scatter(scatter)
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                if self.wire.mesh.replicas or self.wire.mesh.shard_size == 1:
                    module.set_all_reduce_hook(scatter.add_replicas)
        # Ranks may use different parameters (experts, filler rows); each still takes part in each reduction.
        root.set_reduce_scatter_unused_params(True)

    def _materialise(self) -> None:
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        self.module.to_empty(device="cpu" if self._host else self.device)
        # to_empty leaves buffers as garbage, also those in no state dict (rotary frequencies).
        for name, buffer in self.module.named_buffers():
            owner_name, _, key = name.rpartition(".")
            owner = self.module.get_submodule(owner_name)
            owner._buffers[key] = buffers[name].to(self.device)
            del buffer

    def _part(self, name: str, param: nn.Parameter) -> Part:
        assert isinstance(param, DTensor)
        local, full = param._local_tensor, tuple(param.shape)
        share = -(-full[0] // self.wire.mesh.shard_size)  # torch.chunk's rule: all but the last shards are this long
        start = min(share * self.wire.mesh.shard_index, full[0])
        return Part(name, local, full, start, param.requires_grad)

    def load(self, read: Read) -> None:
        for part in self.parts:
            part.tensor.copy_(read(part.name, part.start, part.start + part.tensor.shape[0]))

    # -- a window ---------------------------------------------------------------------------------------------

    def poison(self) -> None:
        """Drill: the next gradient of this rank gets +inf in one element, before any reduction."""
        self.wire.poisoned = True

    def micro(self, first: bool, last: bool) -> None:
        root = self.module
        assert isinstance(root, FSDPModule)
        sync = self.every or last
        if sync != self._syncing:
            root.set_requires_gradient_sync(sync)
            self._syncing = sync
        if last and not first and not self.every:
            self._widen()

    def _params(self) -> Iterator[Any]:
        """FSDP2's own records of the trainable parameters that were gathered at least once."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for param in group.fsdp_params:
                        if param.sharded_param.requires_grad and hasattr(param, "_unsharded_param"):
                            yield param

    def _widen(self) -> None:
        """A parameter that the window's last micro-batch is the first to use must meet the others in FP32."""
        for param in self._params():
            if param.reduce_dtype and param.unsharded_accumulated_grad is None:
                param.unsharded_accumulated_grad = torch.zeros_like(param._unsharded_param, dtype=torch.float32)

    def leaves(self) -> dict[str, torch.Tensor | None]:
        seen = {id(param.sharded_param): param._unsharded_param for param in self._params()}
        names = [part.name for part in self.parts if part.trainable]
        return {n: seen.get(id(p)) for n, p in zip(names, self._sharded, strict=True)}

    def after_backward(self, last: bool) -> None:
        """FSDP2 has reduced in backward."""

    def gradients(self) -> list[torch.Tensor]:
        for param in self._sharded:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        return [param.grad._local_tensor for param in self._sharded]  # type: ignore[union-attr]

    def clear(self) -> None:
        for param in self._sharded:
            param.grad = None

    def refresh(self) -> None:
        """The next forward gathers from the masters, also after one without a backward, which left copies behind."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def set_dtypes(model: nn.Module, policy: Policy) -> None:
    """Meta parameters in the dtype in which they will rest: masters, or working copies where frozen."""
    for name, param in model.named_parameters():
        dtype = policy.master if param.requires_grad else policy.parameter_dtype(name)
        if param.dtype != dtype:
            param.data = torch.empty(param.shape, dtype=dtype, device="meta")
