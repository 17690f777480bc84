"""The plan against real windows on gloo ranks: bytes handed to the wire exactly, the tracked peak within its margin."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import worlds

from mpdist import arch
from mpdist.plan_memory import MARGIN, Asked, rows
from mpdist.plan_traffic import traffic

pytestmark = pytest.mark.world

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
}
TOKENS = 128


def window(_: int, asked: Asked, nodes: int) -> tuple[int, int, int]:
    """(payload within nodes, between nodes, peak of tracked bytes) of one rank's second window, in bytes."""
    import torch
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from mpdist import model as parts
    from mpdist.dist import build_mesh
    from mpdist.optim import Optimizer
    from mpdist.plan_memory import loss_chunk_rows
    from mpdist.precision import DTYPES, Policy
    from mpdist.reduce import Wire
    from mpdist.shard.ddp import Ddp
    from mpdist.shard.fsdp2 import Fsdp2

    class Live(TorchDispatchMode):
        """Sums the storages that are alive after each operation; a storage may shrink without telling anybody."""

        def __init__(self) -> None:
            super().__init__()
            self.storages: dict[int, Any] = {}
            self.peak = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in tree_leaves((args, kwargs, out)):
                if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self.storages:
                        key = storage._cdata
                        self.storages[key] = weakref.ref(storage, lambda _, key=key: self.storages.pop(key, None))
            alive = [held() for held in list(self.storages.values())]
            self.peak = max(self.peak, sum(storage.nbytes() for storage in alive if storage is not None))
            return out

    config = parts.read_config(parts.Source(None, MODEL, 0))
    model = parts.build(config, "sdpa")
    parts.freeze(model, list(asked.freeze))
    blocks = parts.find_blocks(model)
    parts.checkpoint_blocks(blocks, asked.checkpointing)
    chunk = loss_chunk_rows(MODEL["vocab_size"], asked.micro * TOKENS, asked.loss_chunk)
    parts.give_loss(model, chunk)
    policy = Policy(DTYPES[asked.compute])
    device = torch.device("cpu")
    mesh = build_mesh("cpu", asked.shard_size, asked.ranks // nodes, asked.engine == "fsdp2")
    wire = Wire(mesh, DTYPES[asked.wire], asked.sum == "fp32")
    every = asked.when == "every"
    engine: Any
    if asked.engine == "ddp":
        engine = Ddp(model, policy=policy, wire=wire, device=device, every=every, ranks=asked.ranks)
    else:
        engine = Fsdp2(
            model, blocks, policy=policy, wire=wire, device=device, stage=asked.stage, every=every, offload=False
        )
    with Live() as live:
        engine.load(lambda name, start, stop: 0.02 * torch.randn((stop - start, *dict(shapes)[name][1:])))
        optimizer = Optimizer(engine.parts, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, decay="matrices", fused=True)
        for _window in range(2):
            live.peak = 0
            wire.bytes.take()
            for micro in range(asked.accumulation):
                last = micro == asked.accumulation - 1
                engine.micro(micro == 0, last)
                ids = torch.randint(0, MODEL["vocab_size"], (asked.micro, TOKENS))
                out = engine.module(
                    input_ids=ids,
                    position_ids=torch.arange(TOKENS).repeat(asked.micro, 1),
                    index=torch.arange(ids.numel()),
                    targets=ids.roll(-1, 1).flatten(),
                    factor=torch.tensor(1.0 / ids.numel()),
                )
                out[0].backward()
                del out
                engine.after_backward(last)
            optimizer.step(engine.gradients(), 1e-3)
            engine.clear()
            engine.refresh()
    dist.barrier()
    return *wire.bytes.take(), live.peak


def described() -> arch.Arch:
    found = arch.from_mapping(MODEL, "test")
    assert isinstance(found, arch.Arch)
    return found


shapes = {p.name: p.shape for p in described().params}.items()
BASE = {"micro": 4, "seq_len": TOKENS, "device": "cpu", "attention": "sdpa"}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "ddp, fp32": ({"ranks": 2, "global_": 8, "engine": "ddp", "stage": 0, "compute": "fp32"}, 1),
    "ddp, bf16, bf16 wire": ({"ranks": 2, "global_": 16, "engine": "ddp", "stage": 0, "wire": "bf16"}, 1),
    "fsdp2, fp32": ({"ranks": 2, "global_": 8, "compute": "fp32"}, 1),
    "fsdp2, bf16, full": ({"ranks": 2, "global_": 16, "wire": "bf16", "checkpointing": "full"}, 1),
    "fsdp2, stage 2, last": ({"ranks": 2, "global_": 16, "stage": 2, "when": "last"}, 1),
    "fsdp2, frozen, selective": (
        {"ranks": 2, "global_": 8, "checkpointing": "selective", "freeze": ("model.embed_tokens.*",)},
        1,
    ),
    "fsdp2 over 2 nodes": ({"ranks": 4, "nodes": 2, "global_": 16, "wire": "bf16"}, 2),
    "hsdp over 2 nodes": ({"ranks": 4, "nodes": 2, "replicas": 2, "global_": 16, "wire": "bf16"}, 2),
    "ddp over 2 nodes": ({"ranks": 4, "nodes": 2, "global_": 16, "engine": "ddp", "stage": 0, "wire": "bf16"}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_window_hands_over_the_planned_bytes_and_peaks_where_planned(case: str) -> None:
    changes, nodes = CASES[case]
    asked = Asked(**({"nodes": 1} | BASE | changes))
    planned = [t for t in traffic(asked, described()) if t.what == "gradients"]
    within, between, peak = worlds.run(window, asked.ranks, asked, nodes)[0]
    assert within == sum(t.payload_within for t in planned)
    assert between == sum(t.payload_between for t in planned)
    found, total, _ = rows(asked, described())
    total -= next(row.at_peak_bytes for row in found if row.row == "overhead")
    assert total == pytest.approx(peak, rel=MARGIN)
