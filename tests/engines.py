"""Engines driven without the loop: the same rows, cut in any way, over any layout, and what came out in full tensors.

`worlds.run(engines.trace, ranks, layout.engine, ...)` trains a few steps on random rows whose label tokens are
unevenly spread, through the parts that the loop uses (Window, Wire, engine, Optimizer), and returns a `Trace`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import worlds

TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
IGNORED = -100


class Layout(NamedTuple):
    """ranks of the world and how the engine uses them."""

    ranks: int
    engine: str
    stage: int = 0
    replicas: int = 1


# Every kind of layout that 2 and 4 ranks allow; 1x2 is one shard with two replicas.
LAYOUTS: dict[str, Layout] = {
    "ddp": Layout(2, "ddp"),
    "fsdp2-2": Layout(2, "fsdp2", 2),
    "fsdp2-3": Layout(2, "fsdp2", 3),
    "hsdp-1x2": Layout(2, "fsdp2", 3, 2),
    "hsdp-2x2": Layout(4, "fsdp2", 3, 2),
    "zero-1": Layout(2, "deepspeed", 1),
    "zero-2": Layout(2, "deepspeed", 2),
    "zero-3": Layout(2, "deepspeed", 3),
}


class Rows(NamedTuple):
    """ids: [R, T] int64; labels: [R, T] int64, shifted already, -100 where no token counts."""

    ids: Any
    labels: Any

    @property
    def tokens(self) -> int:
        return int((self.labels != IGNORED).sum())


def draw(rows: int = 8, length: int = 16, seed: int = 0, vocab: int = 97) -> Rows:
    """Random rows whose share of label tokens differs from row to row; the first has none."""
    import torch

    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (rows, length + 1), generator=g)
    share = torch.rand(rows, 1, generator=g).square()
    share[0] = 0.0
    keep = torch.rand(rows, length, generator=g) < share
    keep[-1, 0] = True  # never a window without any
    return Rows(ids[:, :-1].contiguous(), torch.where(keep, ids[:, 1:], IGNORED))


def cut(rows: Rows, micro: int, ranks: int, rank: int) -> Iterator[Rows]:
    """This rank's micro-batches, dealt as the loop deals them: the m-th of rank r begins at (m * ranks + r) * micro."""
    for begin in range(rank * micro, len(rows.ids), micro * ranks):
        yield Rows(rows.ids[begin : begin + micro], rows.labels[begin : begin + micro])


@dataclass
class Rig:
    """One rank's engine with its wire, optimizer and window."""

    engine: Any
    wire: Any
    optimizer: Any
    window: Any
    rank: int
    ranks: int

    def attempt(
        self,
        rows: Rows,
        micro: int,
        lr: float = 1e-3,
        poison: int | None = None,
        means: bool = False,
        look: Callable[[list[Any]], None] | None = None,
    ) -> tuple[Any, float]:
        """One window as the loop does it: (decision, loss). Collective.

        poison: the micro-batch (from 0) whose gradient gets +inf on this rank. means: the wrong way, a mean of
        micro-batches' means. look: called with the summed, still scaled gradients.
        """
        import torch
        import torch.distributed as dist

        from mpdist.optim import square_sum
        from mpdist.precision import Verdict

        micros = list(cut(rows, micro, self.ranks, self.rank))
        total = torch.zeros((), dtype=torch.float64)
        for i, part in enumerate(micros):
            count = max(part.tokens, 1) * len(micros) * self.ranks if means else rows.tokens
            self.engine.micro(first=i == 0, last=i == len(micros) - 1)
            objective, loss = self.forward(part, self.window.scale / count)
            if poison == i:
                self.engine.poison()
            objective.backward()
            self.engine.after_backward(last=i == len(micros) - 1)
            total += loss
        gradients = self.engine.gradients()
        if look is not None:
            look(gradients)
        control = torch.stack([square_sum(gradients) / self.engine.replicas, total])
        dist.all_reduce(control)
        decision = self.window.close(Verdict(control[1].item(), control[0].item()))
        if decision.applied:
            if decision.factor != 1.0:
                torch._foreach_mul_(gradients, decision.factor)
            self.optimizer.step(gradients, lr)
            self.engine.refresh()
        self.engine.clear()
        return decision, control[1].item() / rows.tokens

    def forward(self, part: Rows, factor: float) -> tuple[Any, Any]:
        import torch

        labels = part.labels.reshape(-1)
        index = (labels != IGNORED).nonzero().squeeze(1)
        positions = torch.arange(part.ids.shape[1]).expand(part.ids.shape)
        value = torch.tensor(factor, dtype=torch.float32)
        objective, loss, extra = self.engine.module(
            input_ids=part.ids, position_ids=positions, index=index, targets=labels[index], factor=value
        )
        if extra is not None:
            objective = objective + extra * (part.tokens * factor)
        return objective, loss

    def full(self, locals_: list[Any] | None = None) -> dict[str, Any]:
        """Masters (default), or other local tensors of the trainable parts, as whole tensors by name. Collective."""
        parts = self.engine.parts if locals_ is None else self.optimizer.parts
        held = [p.tensor for p in parts] if locals_ is None else locals_
        return worlds.wholes(list(zip(parts, held, strict=True)))


def rig(
    rank: int,
    engine: str = "ddp",
    stage: int = 0,
    replicas: int = 1,
    *,
    compute: str = "fp32",
    master: str = "fp32",
    wire: str = "fp32",
    sum_fp32: bool = True,
    every: bool = True,
    local: int | None = None,
    path: str | None = None,
    model: Any = None,
    fused: bool = True,
    keep_fp32: tuple[str, ...] = (),
    scale: dict[str, Any] | None = None,
    clip: float | None = None,
    offload: str = "none",
    freeze: tuple[str, ...] = (),
    checkpointing: str = "none",
    **changes: Any,
) -> Rig:
    """Collective. TINY with `changes` (or the model in the folder `path`) under an engine; local: ranks a node.

    model: a module on the meta device to use instead; its masters are then left as they are allocated.
    scale: arguments of precision.Window; FP16 starts dynamic at 65536.
    """
    import torch
    import torch.distributed as dist

    from mpdist import dist as groups
    from mpdist import model as models
    from mpdist.optim import Optimizer
    from mpdist.precision import DTYPES, Policy, Window
    from mpdist.reduce import Wire
    from mpdist.shard.ddp import Ddp
    from mpdist.shard.fsdp2 import Fsdp2

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    ranks, device = dist.get_world_size(), torch.device("cpu")
    source = models.Source(path, None if path else {**TINY, **changes}, 0)
    built, blocks = model, []
    if model is None:
        config = models.read_config(source)
        built = models.build(config, "sdpa")
        if freeze:
            models.freeze(built, list(freeze))
        blocks = models.find_blocks(built)
        models.checkpoint_blocks(blocks, checkpointing)
        models.give_loss(built, 16)
    policy = Policy(DTYPES[compute], torch.float32 if master == "fp32" else DTYPES[compute], keep_fp32)
    shards = 1 if engine == "ddp" else ranks // replicas
    mesh = groups.build_mesh("cpu", shards, local or ranks, engine != "ddp")
    way = Wire(mesh, DTYPES[wire], sum_fp32)
    made: Any
    if engine == "deepspeed":
        from mpdist.shard.deepspeed import DeepSpeed

        made = DeepSpeed(built, policy=policy, wire=way, device=device, stage=stage, every=every, offload=offload)
    elif engine == "ddp":
        made = Ddp(built, policy=policy, wire=way, device=device, every=every, ranks=ranks)
    else:
        made = Fsdp2(built, blocks, policy=policy, wire=way, device=device, stage=stage, every=every, offload=False)
    if model is None:
        read, _, _ = models.open_weights(source, config, built, device)
        made.load(read)
    optimizer = Optimizer(made.parts, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decay="matrices", fused=fused)
    normal: dict[str, Any] = {"dynamic": True, "scale": 65536.0} if "fp16" in (compute, wire) else {}
    window = Window(**{"dynamic": False, "scale": 1.0, "clip": clip, **normal, **(scale or {})})
    return Rig(made, way, optimizer, window, rank, ranks)


@dataclass
class Trace:
    """What a few windows left. gradients: unscaled FP32 sums of the first window, before the clip. wire: payload bytes
    (within nodes, between nodes) a window. scales: that each attempt used."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    wire: list[tuple[int, int]] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, set[str]] = field(default_factory=dict)


def trace(
    rank: int,
    engine: str = "ddp",
    stage: int = 0,
    replicas: int = 1,
    *,
    micro: int = 2,
    rows: int = 8,
    steps: int = 1,
    lr: float = 1e-3,
    means: bool = False,
    poison: tuple[int, ...] = (),
    poison_rank: int = 1,
    **options: Any,
) -> Trace:
    """Collective. Trains `steps` windows of `rows` rows, cut into micro-batches of `micro`; see `rig` for the options.

    poison: attempts (from 1) in which `poison_rank` overflows in its first micro-batch; the window is tried again.
    """
    made, found = rig(rank, engine, stage, replicas, **options), Trace()

    def keep(gradients: list[Any]) -> None:
        if not found.gradients:
            found.gradients = {n: g.float() / made.window.scale for n, g in made.full(gradients).items()}
            found.dtypes["gradients"] = {str(g.dtype) for g in gradients}

    while made.window.step < steps:
        number = made.window.attempt + 1
        strike = 0 if number in poison and rank == poison_rank else None
        decision, loss = made.attempt(draw(rows, seed=made.window.step), micro, lr, strike, means, keep)
        found.losses.append(loss)
        found.norms.append(decision.norm)
        found.scales.append(decision.scale)
        found.applied.append(decision.applied)
        found.wire.append(made.wire.bytes.take())
    found.weights = made.full()
    found.dtypes["masters"] = {str(p.tensor.dtype) for p in made.engine.parts}
    found.dtypes["moments"] = {
        str(s[k].dtype) for s in made.optimizer.adam.state.values() for k in ("exp_avg", "exp_avg_sq")
    }
    return found


def worst(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of any element."""
    assert a.keys() == b.keys()
    return max((a[k].double() - b[k].double()).abs().max().item() for k in a)


def relative(a: dict[str, Any], b: dict[str, Any]) -> float:
    """L2 norm of the difference over all tensors, relative to the norm of b."""
    assert a.keys() == b.keys()
    gap = math.fsum((a[k].double() - b[k].double()).square().sum().item() for k in a)
    return math.sqrt(gap / math.fsum(b[k].double().square().sum().item() for k in b))
