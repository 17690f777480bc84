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
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpdist import assemble, model
from mpdist.arch import hub_cache_file, known_config
from mpdist.config import Config
from mpdist.errors import UsageError
from mpdist.gauge import Gauge
from mpdist.optim import Optimizer
from mpdist.plan_memory import OVERHEAD, Asked, loss_chunk_rows, step_temporaries
from mpdist.plan_simulated import Simulated, refuse
from mpdist.shard import Engine
from mpdist.shard.fsdp2 import set_dtypes
from mpdist.world import World

SHALLOW, DEEP = 4, 6  # blocks at which a deep model is played
FURTHER = "forward from the second block on"


def simulate(
    cfg: Config, asked: Asked, every_layer: bool = False, say: Callable[[str], None] = lambda _: None
) -> Simulated:
    """Plays a window of `cfg` on the world that `asked` tells. every_layer: also where a few would do. say: hears what has
    been done, and how long it took.

    Raises UsageError for what `refuse` refuses, and for a model that transformers cannot build or that reads its data.
    """
    refuse(asked)
    began = time.perf_counter()
    source = _source(cfg)
    config = model.read_config(source)
    text = config.get_text_config()
    layers = int(text.num_hidden_layers)
    depths: tuple[int, ...] = (
        (layers,) if every_layer or layers <= 2 * DEEP else _depths(text, layers, asked.checkpointing)
    )
    with _fake_world(asked.ranks), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about settings that a real run is told of
        runs = []
        for depth in depths:
            start = time.perf_counter()
            runs.append(_play(cfg, asked, _shallow(config, depth)))
            say(f"rank 0 of {asked.ranks} with {depth} of {layers} blocks: {time.perf_counter() - start:.1f} s")
    low, high = runs[0], runs[-1]
    ahead = (layers - depths[-1]) / (depths[-1] - depths[0]) if len(runs) > 1 else 0.0
    return Simulated(
        layers=layers,
        played=depths,
        parameters=_ahead(low.parameters, high.parameters, ahead),
        trainable=_ahead(low.trainable, high.trainable, ahead),
        rest=_line(low.rest, high.rest, ahead),
        parts=_joined({part: _line(low.parts[part], high.parts[part], ahead) for part in high.parts}),
        samples=high.samples,
        overhead=OVERHEAD[asked.device],
        seconds=time.perf_counter() - began,
    )


def _source(cfg: Config) -> model.Source:
    """Where the model's shape stands, without the network as far as that can be."""
    path, own = cfg.model.path, cfg.model.config
    config = dict(own) if own is not None else None
    if path is not None and not Path(path).expanduser().exists():
        cached, known = hub_cache_file(path, cfg.model.revision), known_config(path)
        if cached is not None:
            path = str(cached.parent)
        elif known is not None:
            path, config = None, {key: value for key, value in known.items() if key != "dtype"}
    return model.Source(path, config, cfg.seed, cfg.model.revision, cfg.model.trust_remote_code)


@dataclass(frozen=True)
class _Run:
    """One depth, as played."""

    parameters: int
    trainable: int
    rest: dict[str, int]
    parts: dict[str, dict[str, int]]
    samples: tuple[tuple[int, dict[str, int]], ...]


def _joined(parts: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Forward as one part: where its highest point lies may differ between few blocks and many, so its beginning is carried
    on by itself."""
    more = parts.pop(FURTHER)
    return parts | {"forward": max(parts["forward"], more, key=lambda held: sum(held.values()))}


def _ahead(low: int, high: int, ahead: float) -> int:
    return max(0, round(high + ahead * (high - low)))


def _line(low: dict[str, int], high: dict[str, int], ahead: float) -> dict[str, int]:
    return {row: _ahead(low.get(row, 0), high.get(row, 0), ahead) for row in sorted({*low, *high})}


def _depths(text: Any, layers: int, checkpointing: str) -> tuple[int, ...]:
    """Two depths with whole periods of what differs from block to block (every sixth one sees all of the sequence, every N-th
    one is recomputed), or all blocks where that would be no fewer."""
    kinds = list(getattr(text, "layer_types", None) or ())[:layers]
    period = next((p for p in range(1, layers // 4 + 1) if all(kinds[i] == kinds[i % p] for i in range(len(kinds)))), 1)
    if checkpointing.startswith("every"):
        period = math.lcm(period, int(checkpointing.split()[1]))
    # The remainder of the period stays, so that the last block is what it is in the whole model.
    first = -(-SHALLOW // period) * period + layers % period
    second = first + max(period, -(-(DEEP - SHALLOW) // period) * period)
    return (first, second) if second < layers else (layers,)


def _shallow(config: Any, layers: int) -> Any:
    """A copy of the config with so many blocks."""
    found = copy.deepcopy(config)
    text = found.get_text_config()
    kinds = getattr(text, "layer_types", None)
    text.num_hidden_layers = layers
    if kinds:
        with contextlib.suppress(AttributeError):  # one that follows from the number of layers by itself
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
def _kernels_of(device: str) -> Iterator[None]:
    """On a GPU attention drops probabilities out inside its kernel; a CPU's kernel cannot, and keeps all of them instead."""
    function, own = nn.functional, nn.functional.scaled_dot_product_attention

    def fused(*args: Any, dropout_p: float = 0.0, **more: Any) -> Tensor:
        return own(*args, **more)

    if device == "cuda":
        function.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        function.scaled_dot_product_attention = own


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


# What model code and fake tensors raise where they do not go together, or where the config's values do not.
_UNPLAYABLE = (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, KeyError, IndexError)


def _play(cfg: Config, asked: Asked, config: Any) -> _Run:
    name = str(getattr(config, "model_type", "the model"))
    try:
        return _played(cfg, asked, config)
    except _UNPLAYABLE as error:
        told = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        raise UsageError(f"--simulate: {name} cannot be played", f"its own code ends in {type(error).__name__}: {told[:200]}",
                         "correct the model's config, or plan it by formula (without --simulate)") from error  # fmt: skip


def _played(cfg: Config, asked: Asked, config: Any) -> _Run:
    from torch._subclasses.fake_tensor import FakeTensorMode

    built = model.build(config, cfg.model.attention, cfg.model.trust_remote_code)
    model.freeze(built, list(cfg.model.freeze))
    blocks = model.find_blocks(built)
    counts = [(p.numel(), p.requires_grad) for p in built.parameters()]
    model.checkpoint_blocks(blocks, asked.checkpointing)
    vocab = built.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    model.give_loss(built, loss_chunk_rows(vocab, asked.micro * asked.seq_len, asked.loss_chunk))
    world = World(0, asked.ranks, 0, asked.ranks // asked.nodes, 0, asked.nodes, "simulation")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = torch.device("cpu")  # bytes do not depend on it
    mesh = assemble.mesh_of(cfg, world, device)  # makes real tensors
    packed = asked.packing != "none" and asked.attention in ("auto", "sdpa")
    policy = assemble.policy_of(cfg)
    if asked.engine == "fsdp2":
        set_dtypes(built, policy)  # under fake tensors a parameter takes no data of another dtype
    with mode, _packed_as_asked(packed), _kernels_of(asked.device):
        _make_fake(built, mode)
        wire, engine = assemble.engine_of(cfg, built, blocks, policy, world, device, mesh)
        wire.by_backend = asked.by_backend
        optimizer = Optimizer(engine.parts, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, decay="matrices", fused=True)
        with Gauge() as gauge:
            _windows(gauge, engine, optimizer, blocks, asked)
        rest, parts, samples = _account(gauge)
        moved = max((part.tensor.numel() for part in engine.parts if part.trainable), default=0)
    parts["the optimizer's step"]["optimizer_temporaries"] = step_temporaries(asked.fused, moved)
    return _Run(sum(n for n, _ in counts), sum(n for n, trains in counts if trains), rest, parts, samples)


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
        if number == 0:
            gauge.mark(FURTHER)
        if number == count - 1:
            gauge.mark("the loss")
        if hidden.requires_grad:
            place = {count - 1: "the first block of backward", count - 2: "the second block of backward",
                     1: "the last blocks of backward", 0: "the end of backward"}.get(number)  # fmt: skip
            if place is not None:
                hidden.register_hook(lambda _: gauge.mark(place))

    return returned


def _account(gauge: Gauge) -> tuple[dict[str, int], dict[str, dict[str, int]], tuple[tuple[int, dict[str, int]], ...]]:
    """(bytes between steps, at the highest point of each part of the last window, and all along it)."""
    order = sorted(gauge.marks.items(), key=lambda item: item[1])
    begin, end = gauge.marks["forward"], gauge.marks["the end"]
    parts = {name: gauge.peak(start, stop)[1] for (name, start), (_, stop) in itertools.pairwise(order)}
    samples = tuple((moment - begin, dict(held)) for moment, held in gauge.samples() if begin <= moment <= end)
    return gauge.peak(end)[1], parts, samples
