"""The plan against real windows on gloo ranks: bytes handed to the wire exactly, the tracked peak within its margin."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import worlds

from mpdist import arch, ledger, plan_zero
from mpdist.plan import STATES
from mpdist.plan_memory import Asked, rows
from mpdist.plan_traffic import traffic

pytestmark = pytest.mark.world

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,  # where a CPU has no 16-bit units, its products are slow
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}
TOKENS = 128


def assembled(asked: Asked, nodes: int, changes: dict[str, Any]) -> tuple[Any, Any]:
    """Collective. (engine, wire) of MODEL with `changes`, cut and computing as asked."""
    import torch

    from mpdist import model as parts
    from mpdist.dist import build_mesh
    from mpdist.plan_memory import loss_chunk_rows
    from mpdist.precision import DTYPES, Policy
    from mpdist.reduce import Wire
    from mpdist.shard.ddp import Ddp
    from mpdist.shard.deepspeed import DeepSpeed
    from mpdist.shard.fsdp2 import Fsdp2

    config = {**MODEL, **changes}
    model = parts.build(parts.read_config(parts.Source(None, config, 0)), "sdpa")
    parts.freeze(model, list(asked.freeze))
    blocks = parts.find_blocks(model)
    parts.checkpoint_blocks(blocks, asked.checkpointing)
    parts.give_loss(model, loss_chunk_rows(config["vocab_size"], asked.micro * TOKENS, asked.loss_chunk))
    mesh = build_mesh("cpu", asked.shard_size, asked.ranks // nodes, asked.engine == "fsdp2")
    wire = Wire(mesh, DTYPES[asked.wire], asked.sum == "fp32")
    common: dict[str, Any] = {"policy": Policy(DTYPES[asked.compute]), "wire": wire, "device": torch.device("cpu")}
    common["every"] = asked.when == "every"
    if asked.engine == "ddp":
        return Ddp(model, ranks=asked.ranks, **common), wire
    if asked.engine == "deepspeed":
        return DeepSpeed(model, stage=asked.stage, offload=asked.offload, **common), wire
    return Fsdp2(model, blocks, stage=asked.stage, offload=False, **common), wire


def trained(
    engine: Any, asked: Asked, changes: dict[str, Any], begin: Callable[[], None], end: Callable[[], None], rank: int
) -> Any:
    """Collective. Rows of the ledger of a window like any later one, around which `begin` and `end` are called: the second,
    but under DeepSpeed, which fetches ahead from its third forward on."""
    import torch

    from mpdist import ledger
    from mpdist.optim import Optimizer

    shapes = {p.name: p.shape for p in described(changes).params}
    engine.load(lambda name, start, stop: 0.02 * torch.randn((stop - start, *shapes[name][1:])))
    optimizer = Optimizer(engine.parts, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, decay="matrices", fused=True)
    last_window = 2 if asked.engine == "deepspeed" and asked.accumulation == 1 else 1
    for number in range(last_window + 1):
        if number == last_window:
            begin()
        for micro in range(asked.accumulation):
            last = micro == asked.accumulation - 1
            engine.micro(micro == 0, last)
            ids = torch.randint(0, {**MODEL, **changes}["vocab_size"], (asked.micro, TOKENS))
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
        gradients = engine.gradients()
        optimizer.step(gradients, 1e-3)
        rows = ledger.Measure(engine, optimizer, rank, followed=False).take(gradients)
        del gradients
        engine.clear()
        engine.refresh()
    end()
    return rows


def window(rank: int, asked: Asked, nodes: int, bucket: int) -> tuple[int, int, int, int, list[dict[str, Any]]]:
    """(payload within nodes, between nodes, peak of tracked bytes, those after the step, rows of the ledger) of one rank's
    last window."""
    import torch
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Live(TorchDispatchMode):
        """Sums the storages that are alive, after each operation on one that is new or has grown: only then may there be
        more than ever. A storage may shrink and grow without telling anybody."""

        def __init__(self) -> None:
            super().__init__()
            self.storages: dict[int, Any] = {}
            self.seen: dict[int, int] = {}  # bytes of each when it was last looked at
            self.peak = self.rest = 0
            self.counting = False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            more = False
            for tensor in tree_leaves((args, kwargs, out)):
                # FSDP2's wrappers own no bytes: what they wrap is seen by itself.
                if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    key, size = storage._cdata, storage.nbytes()
                    if key not in self.storages:
                        self.storages[key] = weakref.ref(storage, lambda _, key=key: self.storages.pop(key, None))
                        self.seen[key] = 0
                    more = more or size > self.seen[key]
                    self.seen[key] = size
            if self.counting and more:
                self.peak = max(self.peak, self.alive())
            return out

        def alive(self) -> int:
            storages = [held() for held in list(self.storages.values())]
            return sum(storage.nbytes() for storage in storages if storage is not None)

    plan_zero.BUCKET = bucket
    live = Live()

    def begin() -> None:
        live.counting, live.peak = True, live.alive()
        wire.bytes.take()

    def end() -> None:
        live.rest = live.alive()

    with live:
        engine, wire = assembled(asked, nodes, {})
        found = trained(engine, asked, {}, begin, end, rank)
    dist.barrier()
    return *wire.bytes.take(), live.peak, live.rest, found


def states(rank: int, cases: list[tuple[Asked, dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Rows of the ledger for each case, of a small model with `changes`."""
    return [
        trained(assembled(asked, 1, changes)[0], asked, changes, lambda: None, lambda: None, rank)
        for asked, changes in cases
    ]


def described(changes: dict[str, Any] | None = None) -> arch.Arch:
    found = arch.from_mapping({**MODEL, **(changes or {})}, "test")
    assert isinstance(found, arch.Arch)
    return found


def measured(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Bytes of each state of one rank, all dtypes together."""
    totals = dict.fromkeys(STATES, 0)
    for row in rows:
        if row["row"] in totals:
            totals[row["row"]] += row["measured_bytes"]
    return totals


def planned_states(asked: Asked, shape: arch.Arch) -> dict[str, int]:
    return {row.row: row.rest_bytes for row in rows(asked, shape)[0] if row.row in STATES}


BASE = {"micro": 4, "seq_len": TOKENS, "device": "cpu", "attention": "sdpa"}
ZERO = {"engine": "deepspeed", "attention": "sdpa"}
SMALL = 12_500  # elements of a bucket: less than the embedding, more than a block's matrices
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
    "ddp over 3 nodes": ({"ranks": 6, "nodes": 3, "global_": 24, "engine": "ddp", "stage": 0}, 3),
    "ddp over 2 nodes": ({"ranks": 4, "nodes": 2, "global_": 16, "engine": "ddp", "stage": 0, "wire": "bf16"}, 2),
    "zero-1": ({**ZERO, "ranks": 2, "global_": 16, "stage": 1, "when": "last"}, 1),
    "zero-2, full, bf16 wire": (
        {**ZERO, "ranks": 2, "global_": 16, "stage": 2, "wire": "bf16", "checkpointing": "full"},
        1,
    ),
    "zero-2 over 2 nodes, frozen": (
        {
            **ZERO,
            "ranks": 4,
            "nodes": 2,
            "global_": 16,
            "stage": 2,
            "compute": "fp32",
            "freeze": ("model.embed_tokens.*",),
        },
        2,
    ),
    "zero-2, on the host": ({**ZERO, "ranks": 2, "global_": 8, "stage": 2, "offload": "optimizer"}, 1),
    "zero-3": ({**ZERO, "ranks": 2, "global_": 8, "stage": 3}, 1),
    "zero-3, fp32, selective": (
        {
            **ZERO,
            "ranks": 2,
            "global_": 8,
            "stage": 3,
            "compute": "fp32",
            "checkpointing": "selective",
            "offload": "all",
        },
        1,
    ),
    "zero-3 over 2 nodes, last": (
        {**ZERO, "ranks": 4, "nodes": 2, "global_": 32, "stage": 3, "wire": "bf16", "when": "last"},
        2,
    ),
}
BUCKETS = dict.fromkeys(CASES, SMALL) | {"zero-1": 2**23}


def asked_of(case: str) -> Asked:
    return Asked(**({"nodes": 1} | BASE | CASES[case][0]))


def windows(rank: int, cases: list[str]) -> dict[str, Any]:
    return {case: window(rank, asked_of(case), CASES[case][1], BUCKETS[case]) for case in cases}


@pytest.fixture(scope="module")
def played() -> dict[str, Any]:
    """What rank 0 saw in each case. A world of its own for each number of ranks; what fails there fails once."""
    found = {}
    for ranks in sorted({asked_of(case).ranks for case in CASES}):
        cases = [case for case in CASES if asked_of(case).ranks == ranks]
        found |= worlds.run(windows, ranks, cases, timeout=1200)[0]
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_window_hands_over_the_planned_bytes_and_peaks_where_planned(
    case: str, played: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_zero, "BUCKET", BUCKETS[case])
    asked = asked_of(case)
    planned = [t for t in traffic(asked, described()) if t.what == "gradients"]
    within, between, peak, rest, live = played[case]
    assert within == sum(t.payload_within for t in planned)
    assert between == sum(t.payload_between for t in planned)
    assert measured(live) == planned_states(asked, described())
    found, total, _ = rows(asked, described())
    total -= next(row.at_peak_bytes for row in found if row.row == "overhead")
    assert total == pytest.approx(peak, rel=0.05 if asked.engine == "deepspeed" else 0.01)
    if asked.engine == "deepspeed":  # which makes buffers of its own, and nothing else may be left of them
        gone = {"overhead", "snapshot"} | ({"gradients"} if asked.stage < 3 else set())
        left = sum(row.rest_bytes for row in found if row.row not in gone)
        assert left == pytest.approx(rest, rel=0.002, abs=8192), "but for a micro-batch's ids and the like"


# A vocabulary that no number of ranks divides, a third of it frozen or tied, and norms of fewer elements than ranks.
ODD: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True},
    {
        "num_hidden_layers": 1,
        "hidden_size": 2,
        "intermediate_size": 3,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    },
]
FROZEN = ("model.embed_tokens.*", "*layernorm*")


def test_zero_states_are_planned_to_the_byte() -> None:
    small = {
        "vocab_size": 61,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    cases = []
    for stage in (1, 2, 3):
        for compute in ("fp32", "bf16"):
            for freeze, changes in ((), {}), ((), ODD[1]), ((), ODD[2]), (FROZEN, {}):
                when = "last" if stage == 1 else "every"
                asked = Asked(**{**BASE, **ZERO, "ranks": 3, "nodes": 1, "micro": 1, "global_": 3, "stage": stage,
                                 "compute": compute, "freeze": freeze, "when": when})  # fmt: skip
                cases.append((asked, {**small, **changes}))
    ranks = worlds.run(states, 3, cases)
    for number, (asked, changes) in enumerate(cases):
        shape = described(changes)
        lives = [measured(found[number]) for found in ranks]
        planned = planned_states(asked, shape)
        assert lives[0] == planned, (asked, changes)
        trainable = sum(p.count for p in shape.split(asked.freeze)[0])
        for name, each in (("parameters", 4), ("gradients", 4), ("moments", 8)):
            assert sum(live[name] for live in lives) == each * trainable, (name, asked, changes)
        book = {name: {"bytes": size, "peak": size, "formula": ""} for name, size in planned.items()}
        causes = {row["cause"] for row in ledger.beside_plan([r for found in ranks for r in found[number]], book)
                  if row["row"] in STATES}  # fmt: skip
        assert all("planned" in cause or "do not divide" in cause or "row above" in cause for cause in causes), causes


def test_the_ledger_does_not_call_passing_what_stays() -> None:
    row = {"row": "parameters", "rank": 0, "dtype": "float32", "elements": 1, "measured_bytes": 4}
    names = ("overhead", "snapshot", "gradient_copies", "other", "comm")
    book = {name: {"bytes": 0 if name == "comm" else 4, "peak": 4, "formula": ""} for name in ("parameters", *names)}
    causes = {found["row"]: found["cause"] for found in ledger.beside_plan([row], book)}
    assert [name for name in names if causes[name].startswith("lives within a window only")] == ["comm"]
    assert causes["overhead"].startswith("assumed, not measured")
    assert "the first save makes" in causes["snapshot"]
    assert "optimizer's own copies" in causes["gradient_copies"]
