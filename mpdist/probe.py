"""What a model really does, found by trying: what follows its output layer, and whether packed documents stay apart.

Reading this from attribute names would miss every model that calls them something else, and a miss is silent: a wrong
loss, or attention across documents.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import UsageError

_VOCABULARY = 13  # rows of the small output layer that stands in for the model's own


class _Hidden:
    """Stands in for whatever class of output a base model returns; only the hidden states [B, T, H] are there."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, key: Any) -> Any:
        return self.last_hidden_state if key in (0, "last_hidden_state") else () if isinstance(key, slice) else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def ends_with_head(model: nn.Module, base: Any, head: Any) -> bool:
    """Whether the model's logits are nothing but head(what base returns): no cap, no scale, no layer between.

    Runs the model's own forward with known hidden states in place of the base and a small output layer in place of the
    head, so it needs no weights: the model may lie on the meta device. False where in doubt.
    """
    if type(head) is not nn.Linear or not isinstance(base, nn.Module):
        return False
    place = next((name for name, module in model.named_modules() if module is head), "")
    owner = model.get_submodule(place.rpartition(".")[0])
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 3, head.in_features, generator=draw)
    small = nn.Linear(head.in_features, _VOCABULARY, bias=head.bias is not None, device="cpu")
    with torch.no_grad():
        for param in small.parameters():  # logits of several units, so that a cap of any usual height bends them
            param.copy_(torch.randn(param.shape, generator=draw))
    own = base.__dict__.get("forward")
    try:
        setattr(owner, place.rpartition(".")[2], small)
        base.forward = lambda *_, **__: _Hidden(hidden)
        with torch.no_grad():
            ids = torch.zeros(1, 3, dtype=torch.int64)
            found = type(model).forward(model, input_ids=ids, use_cache=False).logits
            expected = nn.functional.linear(hidden, small.weight, small.bias)
        return found.device == expected.device and torch.allclose(found.float(), expected, rtol=1e-4, atol=1e-4)
    except Exception:  # a forward that cannot be taken apart like this keeps its own way
        return False
    finally:
        setattr(owner, place.rpartition(".")[2], head)
        del base.forward
        if own is not None:
            base.forward = own


@contextlib.contextmanager
def naming_the_uncertain() -> Iterator[None]:
    """Turns torch's refusal of an operation under `deterministic: true` into the user's choice, by the operation's name."""
    try:
        yield
    except RuntimeError as error:
        name, found, _ = str(error).partition(" does not have a deterministic implementation")
        if not found:
            raise
        raise UsageError(f"deterministic = true, but the model uses {name.split()[-1]}",
                         "torch has no deterministic implementation of this operation on this device",
                         "set deterministic: false (runs are then not exact to the bit), or use another model.attention",
                         ) from error  # fmt: skip


@naming_the_uncertain()
def check_isolation(module: nn.Module, vocabulary: int, longest: int, device: torch.device) -> None:
    """Collective. Raises UsageError where a packed row lets one document see another.

    module: the model as `model.give_loss` left it, with its weights. The loss of a row's second document must not move
    when the first one changes; where it moves, by how much is compared with a row that is one document.
    """
    length = min(24, longest)
    split = length // 2
    draw = torch.Generator().manual_seed(0)
    first, second = torch.randint(0, vocabulary, (2, 1, length), generator=draw)
    second[:, split:] = first[:, split:]
    index = torch.arange(split, length - 1, device=device)
    targets = first[0, split + 1 :].to(device)
    one = torch.ones((), dtype=torch.float32, device=device)

    def gap(positions: Tensor) -> float:
        where = {"position_ids": positions[None].to(device), "index": index, "targets": targets, "factor": one}
        losses = [module(input_ids=ids.to(device), **where)[1] for ids in (first, second)]
        return float((losses[0] - losses[1]).abs())

    apart = torch.cat([torch.arange(split), torch.arange(length - split)])
    with _as_in_evaluation(module):
        packed, plain = gap(apart), gap(torch.arange(length))
    # A non-finite loss says nothing here; training says what it means. Experts may round a little differently.
    leaks = torch.tensor(float(packed > 0.2 * plain), device=device)
    dist.all_reduce(leaks, op=dist.ReduceOp.MAX)
    if leaks.item():
        name = type(module).__name__.removeprefix("FSDP")
        raise UsageError(f"data.packing: in {name} a packed document sees the one before it",
                         f"changing the first document moved the loss of the second by {packed:.3g}: this architecture"
                         " does not separate documents by their positions",
                         "set data.packing: none")  # fmt: skip


@contextlib.contextmanager
def _as_in_evaluation(module: nn.Module) -> Iterator[None]:
    """No gradients, no dropout, nothing compiled for these few shapes."""
    module.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        module.train()


def takes(forward: Callable[..., Any], name: str) -> bool:
    """Whether a forward has an argument of this name, or takes any."""
    found = inspect.signature(forward).parameters
    return name in found or any(p.kind is p.VAR_KEYWORD for p in found.values())
