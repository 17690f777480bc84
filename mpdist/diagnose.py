"""Why something is non-finite or gets no gradient: looked for once, when it happens, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpdist.errors import UsageError
from mpdist.feed import Batch, Micro
from mpdist.precision import Reason
from mpdist.shard import Engine


class Reach:
    """Checks in the first window that autograd reaches every trainable parameter.

    A parameter that no loss depends on would keep its weights for ever without a word (frozen by a reentrant checkpoint,
    a branch that is never taken). Looks at the graph, costs one walk, and only once.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: set[int] = set()

    def look(self, objective: torch.Tensor) -> None:
        todo, known = [objective.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in known:
                continue
            known.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                self._seen.add(id(variable))
            todo.extend(following for following, _ in node.next_functions)

    def check(self) -> None:
        """Raises UsageError naming the parameters that were not reached."""
        leaves = self._engine.leaves()
        lost = [name for name, leaf in leaves.items() if id(leaf) not in self._seen]
        if lost:
            raise UsageError(f"{len(lost)} trainable parameters got no gradient in the first window, the first {lost[0]}",
                             "the loss does not depend on them, so they would never change",
                             "freeze them with model.freeze, or use a model that trains them")  # fmt: skip


def explain(
    module: nn.Module,
    engine: Engine,
    batch: Batch,
    reason: Reason,
    device: torch.device,
    loss: torch.Tensor | None = None,
) -> str:
    """Collective. One sentence on the likeliest cause: weights, the compute dtype, the data or the gradients.

    loss: this rank's sum in the attempt; the gradients are still those of the attempt.
    """
    weights = _bad_weights(engine)
    outputs = [(_first_bad_output(module, micro, device), micro) for micro in batch.micros]
    bad = next(((name, micro) for name, micro in outputs if name is not None), None)
    mine = {
        "weights": weights,
        "module": bad[0] if bad else None,
        "rows": bad[1].rows.tolist()[:8] if bad else [],
        "labels": sum(micro.labels for micro in batch.micros),
        "lost": loss is not None and not torch.isfinite(loss).item(),
        "own rows": [row for micro in batch.micros for row in micro.rows.tolist()][:8],
        "gradients": _bad_gradients(engine) if reason is Reason.GRADIENTS else [],
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return _sentence(ranks, reason, batch)


def _sentence(ranks: list[dict[str, Any]], reason: Reason, batch: Batch) -> str:
    tokens = f"the window has {batch.labels} label tokens"
    for rank, found in enumerate(ranks):
        if found["weights"]:
            name, count = found["weights"][0]
            return f"weights: {name} holds {count} non-finite values (rank {rank}); {tokens}"
    for rank, found in enumerate(ranks):
        if found["module"]:
            return (f"activations: the first module with a non-finite output is {found['module']} on rank {rank}, rows "
                    f"{found['rows']}, while all weights are finite; {tokens}. In fp16 that is an overflow past 65504: "
                    "compute in bf16 or keep that module in FP32 with precision.keep_fp32")  # fmt: skip
    for rank, found in enumerate(ranks):
        if found["gradients"]:
            return f"gradients: non-finite in {', '.join(found['gradients'][:3])} (rank {rank}); weights, activations and loss are finite"
    if reason is Reason.LOSS:
        lost = [f"rank {rank} (rows {found['own rows']})" for rank, found in enumerate(ranks) if found["lost"]]
        where = f"loss: non-finite on {', '.join(lost) or 'no single rank'}"
        return f"{where}, although weights and every module's output are finite; {tokens}"
    return "gradients: non-finite, though a second forward shows finite weights and activations"


def _bad_weights(engine: Engine) -> list[tuple[str, int]]:
    counts = [(p.name, int((~torch.isfinite(p.tensor)).sum().item())) for p in engine.parts if p.tensor.numel()]
    return [(name, count) for name, count in counts if count]


def _bad_gradients(engine: Engine) -> list[str]:
    names = [part.name for part in engine.parts if part.trainable]
    return [
        n for n, g in zip(names, engine.gradients(), strict=True) if g.numel() and not torch.isfinite(g).all().item()
    ]


def _first_bad_output(module: nn.Module, micro: Micro, device: torch.device) -> str | None:
    """Collective where the module is sharded. Name of the first module whose output is not finite."""
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            for value in output if isinstance(output, tuple) else (output,):
                finite = (
                    not isinstance(value, torch.Tensor)
                    or not value.is_floating_point()
                    or bool(torch.isfinite(value).all())
                )
                if not found and not finite:
                    found.append(name)

        return look

    leaves = [(name, child) for name, child in module.named_modules() if name and not list(child.children())]
    handles = [child.register_forward_hook(watch(name)) for name, child in leaves]
    try:
        with torch.no_grad():
            one = torch.ones((), device=device)
            module(input_ids=micro.input_ids, position_ids=micro.position_ids, index=micro.index,
                   targets=micro.targets, factor=one)  # fmt: skip
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
