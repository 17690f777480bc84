"""The plan, proved by running: the real model, engine, wire and loss on fake tensors in a fake process group.

Rank 0 of the whole world is played in one process without weights, data or devices: FakeTensorMode gives every tensor its
shape and dtype but no memory, torch's `fake` backend answers collectives at once, and the gauge that measures real windows
counts the bytes. Deep models are played with a few of their blocks at two depths and carried on in a straight line, part by
part of the window: each part's highest point grows by the same bytes with each block.

The optimizer's step is added by formula, since fake kernels copy what real ones update in place.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpdist import assemble, model
from mpdist.config import Config
from mpdist.errors import UsageError
from mpdist.gauge import Gauge
from mpdist.optim import Optimizer
from mpdist.plan_memory import Asked, loss_chunk_rows
from mpdist.shard import Engine
from mpdist.world import World

SHALLOW, DEEP = 4, 6  # blocks at which a deep model is played


@dataclass(frozen=True)
class Simulated:
    """Bytes of rank 0. parts: of each part of a window, the bytes of each row at that part's highest point."""

    layers: int
    played: tuple[int, ...]  # numbers of blocks that were really played
    rest: dict[str, int]
    parts: dict[str, dict[str, int]]
    seconds: float
    curve: tuple[tuple[int, dict[str, int]], ...] = ()  # of the deepest one that was played

    @property
    def moment(self) -> str:
        return max(self.parts, key=lambda part: sum(self.parts[part].values()))

    @property
    def peak(self) -> int:
        return sum(self.parts[self.moment].values())


def refuse(asked: Asked) -> None:
    """Raises UsageError for what cannot be played."""
    if asked.engine == "deepspeed":
        raise UsageError("--simulate with shard.engine = deepspeed", "DeepSpeed asks for real memory as it starts",
                         "plan it by formula (without --simulate), or simulate the fsdp2 engine at the same stage")  # fmt: skip
    if asked.offload != "none":
        raise UsageError(f"--simulate with shard.offload = {asked.offload}",
                         "fake tensors lie on one device, so nothing could be told apart",
                         "plan it by formula (without --simulate), or simulate shard.offload=none")  # fmt: skip


def simulate(cfg: Config, asked: Asked, every_layer: bool = False) -> Simulated:
    """Plays a window of `cfg` on the world that `asked` tells. every_layer: also where a few would do.

    Raises UsageError for what `refuse` refuses, and for a model that transformers cannot build or that reads its data.
    """
    refuse(asked)
    began = time.perf_counter()
    source = model.Source(cfg.model.path, dict(cfg.model.config) if cfg.model.config is not None else None, cfg.seed,
                          cfg.model.revision, cfg.model.trust_remote_code)  # fmt: skip
    config = model.read_config(source)
    text = config.get_text_config()
    layers = int(text.num_hidden_layers)
    depths: tuple[int, ...] = (layers,) if every_layer or layers <= 2 * DEEP else _depths(text, layers)
    with _fake_world(asked.ranks):
        runs = [_play(cfg, asked, _shallow(config, depth)) for depth in depths]
    seconds = time.perf_counter() - began
    rest, parts, _ = runs[0]
    more, deeper, curve = runs[-1]
    if len(runs) == 1:
        return Simulated(layers, depths, rest, parts, seconds, curve)
    ahead = (layers - depths[-1]) / (depths[-1] - depths[0])
    further = {part: _line(parts[part], deeper[part], ahead) for part in deeper}
    return Simulated(layers, depths, _line(rest, more, ahead), further, seconds, curve)


def _line(low: dict[str, int], high: dict[str, int], ahead: float) -> dict[str, int]:
    rows = {*low, *high}
    return {r: max(0, round(high.get(r, 0) + ahead * (high.get(r, 0) - low.get(r, 0)))) for r in sorted(rows)}


def _depths(text: Any, layers: int) -> tuple[int, int]:
    """Two depths with whole periods of the model's pattern of layers (every second one local, every sixth one global)."""
    kinds = list(getattr(text, "layer_types", None) or ())[:layers]
    period = next((p for p in range(1, layers // 4 + 1) if all(kinds[i] == kinds[i % p] for i in range(len(kinds)))), 1)
    # The remainder of the period stays, so that the last block is what it is in the whole model.
    odd = layers % period
    first = -(-SHALLOW // period) * period + odd
    second = first + max(period, (DEEP - SHALLOW + period - 1) // period * period)
    return first, second


def _shallow(config: Any, layers: int) -> Any:
    """A copy of the config with so many blocks."""
    found = copy.deepcopy(config)
    text = found.get_text_config()
    kinds = getattr(text, "layer_types", None)
    text.num_hidden_layers = layers
    if kinds:
        text.layer_types = list(kinds)[:layers]
    return found


@contextlib.contextmanager
def _fake_world(ranks: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _packed_as_asked(packed: bool) -> Iterator[None]:
    """Whether rows hold several documents is read from the positions, which fake tensors do not hold."""
    from transformers import masking_utils

    reads = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: position_ids.clone() if packed else None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = reads


Played = tuple[dict[str, int], dict[str, dict[str, int]], tuple[tuple[int, dict[str, int]], ...]]


def _play(cfg: Config, asked: Asked, config: Any) -> Played:
    """(bytes at rest, bytes at the highest point of each part of a window, the whole window's curve)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    built = model.build(config, cfg.model.attention, cfg.model.trust_remote_code)
    model.freeze(built, list(cfg.model.freeze))
    blocks = model.find_blocks(built)
    model.checkpoint_blocks(blocks, asked.checkpointing)
    vocab = built.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    model.give_loss(built, loss_chunk_rows(vocab, asked.micro * asked.seq_len, asked.loss_chunk))
    local = asked.ranks // asked.nodes
    world = World(0, asked.ranks, 0, local, 0, asked.nodes, "simulation")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mesh = assemble.mesh_of(cfg, world, torch.device("cpu"))  # makes real tensors
    with mode, _packed_as_asked(asked.packing != "none" and asked.attention in ("auto", "sdpa")):
        _make_fake(built, mode)
        wire, engine = assemble.engine_of(cfg, built, blocks, assemble.policy_of(cfg), world, torch.device("cpu"), mesh)
        wire._by_backend = asked.by_backend
        optimizer = Optimizer(engine.parts, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, decay="matrices", fused=True)
        with Gauge() as gauge:
            _windows(gauge, engine, optimizer, blocks, asked)
    return _account(gauge, asked)


def _make_fake(built: nn.Module, mode: Any) -> None:
    for module in built.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = mode.from_tensor(buffer)


def _windows(gauge: Gauge, engine: Engine, optimizer: Optimizer, blocks: list[nn.Module], asked: Asked) -> None:
    """Two windows, since an engine may hold more from its second one on; `gauge` is left at the second one's end."""
    trained = [part.tensor for part in engine.parts if part.trainable]
    frozen = [part.tensor for part in engine.parts if not part.trainable]
    known = {tensor.untyped_storage()._cdata for tensor in [*trained, *frozen]}
    working = [p.data for p in engine.module.parameters() if not hasattr(p, "_local_tensor")]
    gauge.name("working", [*frozen, *(p for p in working if p.untyped_storage()._cdata not in known)])
    gauge.name("parameters", trained)
    gauge.name("buffers", engine.module.buffers())
    moments = [optimizer.moments(i) for i in range(len(trained))]
    gauge.name("moments", [m[key] for m in moments for key in ("exp_avg", "exp_avg_sq")])
    ids = torch.zeros(asked.micro, asked.seq_len, dtype=torch.int64)
    positions = torch.arange(asked.seq_len).repeat(asked.micro, 1)
    flat = torch.arange(ids.numel())
    given = {"input_ids": ids, "position_ids": positions, "index": flat, "targets": flat.clone()}
    gauge.name("activations", given.values())
    factor = torch.ones((), dtype=torch.float32)
    marks = [block.register_forward_hook(_marks(gauge, i, len(blocks))) for i, block in enumerate(blocks)]
    count = min(asked.accumulation, 2)
    for window in range(2):
        gauge.marks.clear()
        for micro in range(count):
            last = micro == count - 1
            engine.micro(first=micro == 0, last=last)
            gauge.mark("forward")
            objective, _, extra = engine.module(**given, factor=factor)
            if extra is not None:
                objective = objective + extra * factor
            if window == 0 and micro == 0:
                gauge.follow(leaf for leaf in engine.leaves().values() if leaf is not None)
            gauge.mark("the start of backward")
            objective.backward()
            engine.after_backward(last=last)
            del objective, extra
        gradients = engine.gradients()
        gauge.name("gradients", gradients)
        gauge.mark("the optimizer's step")
        del gradients
        engine.refresh()
        gauge.mark("the end")
        if window == 0:
            engine.clear()
    for mark in marks:
        mark.remove()
    gauge.leave()


def _marks(gauge: Gauge, number: int, count: int) -> Any:
    """Marks the moments at which backward enters a block: the gradient of what it returned is there."""

    def returned(_: nn.Module, __: Any, output: Any) -> None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        if number == count - 1:
            gauge.mark("the loss")
        if hidden.requires_grad:
            place = {count - 1: "the first block of backward", count - 2: "the second block of backward",
                     1: "the last blocks of backward", 0: "the end of backward"}.get(number)  # fmt: skip
            if place is not None:
                hidden.register_hook(lambda _: gauge.mark(place))

    return returned


def _account(gauge: Gauge, asked: Asked) -> Played:
    order = sorted(gauge.marks.items(), key=lambda item: item[1])
    begin, end = gauge.marks["forward"], gauge.marks["the end"]
    parts = {}
    for (name, start), (_, stop) in itertools.pairwise(order):
        parts[name] = gauge.peak(start, stop)[1]
    samples = [(moment, dict(held)) for moment, held in gauge.samples() if begin <= moment <= end]
    return gauge.peak(end)[1], parts, tuple(samples)
