"""ZeRO-3's gathered weights, kept out of the hands of autograd and of selective checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


class _Place(NamedTuple):
    """Where in a gathered parameter a tensor lies that autograd wants back."""

    param: Any
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def let_go_of_weights(model: nn.Module) -> None:
    """Lets weights that DeepSpeed frees after a module's forward be freed.

    Autograd keeps views of them, such as a linear layer's transposed one, and with these each whole weight until
    backward. From here on it keeps a view's place, and finds the weight gathered again when the module's backward begins.
    """
    gathered: dict[int, Any] = {}  # by address; a parameter that is gone from there has another address itself

    def note(module: nn.Module, _: Any) -> None:
        for param in module._parameters.values():
            if param is not None:
                gathered[param.data_ptr()] = param

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Place:
        address = tensor.untyped_storage().data_ptr()
        param = gathered.get(address) if address else None
        if param is None or param.data_ptr() != address or param.dtype != tensor.dtype:
            return tensor
        return _Place(param, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(kept: torch.Tensor | _Place) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        if not kept.param.numel():  # of a module whose backward DeepSpeed has not seen begin
            kept.param.all_gather()
        return kept.param.data.as_strided(kept.size, kept.stride, kept.offset)

    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return own(*args, **kwargs)

    model.forward = forward
    for module in model.modules():
        if module._parameters:
            module.register_forward_pre_hook(note)


def hide_from_checkpoints(coordinator: Any) -> None:
    """Selective checkpointing counts operations, and DeepSpeed gathers with other ones in forward than when it is repeated."""

    def hidden(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            stack = _get_current_dispatch_mode_stack()
            if not any(type(mode).__module__ == "torch.utils.checkpoint" for mode in stack):
                return own(*args, **kwargs)
            with _disable_current_modes():
                return own(*args, **kwargs)

        return call

    coordinator.fetch_sub_module = hidden(coordinator.fetch_sub_module)
    coordinator.release_sub_module = hidden(coordinator.release_sub_module)
