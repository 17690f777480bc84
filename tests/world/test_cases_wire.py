"""What travels between ranks, in which dtype, how much of it and how exactly it is added up: C36 to C43."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import engines
import pytest
import tiny
import watched
import worlds
from engines import LAYOUTS, Trace

pytestmark = pytest.mark.world

SHARDS: dict[str, dict[str, Any]] = {
    "ddp": {"shard__engine": "ddp", "shard__stage": 0},
    "fsdp2-2": {"shard__stage": 2},
    "fsdp2-3": {"shard__stage": 3},
    "hsdp": {"shard__stage": 3, "shard__replicas": 2},
}
WIRES = ("fp32", "bf16", "fp16")
SIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
Calls = list[tuple[str, str, int]]


def _record() -> Calls:
    """From here on (operation, dtype, bytes) of what is handed to collectives that can carry gradients is kept."""
    import torch.distributed as dist

    from mpdist import reduce

    calls: Calls = []

    def spy(owner: Any, name: str, at: int) -> None:
        known = getattr(owner, name)
        call = getattr(known, "spied", known)  # an earlier session's recorder is replaced

        def recorded(*args: Any, **kwargs: Any) -> Any:
            tensor = args[at]
            trial = sys._getframe(1).f_globals["__name__"] == "mpdist.links"  # the links' before the first step
            if tensor.is_floating_point() and tensor.dtype.itemsize < 8 and not trial:  # control values travel in FP64
                calls.append((name, str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()))
            return call(*args, **kwargs)

        recorded.spied = call  # type: ignore[attr-defined]
        setattr(owner, name, recorded)

    spy(dist, "all_to_all_single", 1)
    spy(reduce, "_gather", 1)
    spy(reduce, "_scatter", 1)
    for name in ("all_reduce", "reduce", "reduce_scatter_tensor"):  # FSDP2's own ways to add gradients
        spy(dist, name, 1 if name == "reduce_scatter_tensor" else 0)
    return calls


NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, int, str], watched.Watched]:
    """(engine, wire, micro-batches of a window, when) -> a run of 2 steps on 2 ranks whose collectives were recorded."""
    asked = [(e, w, 2, "every") for e in SHARDS for w in WIRES]
    asked += [(e, w, 1, "every") for e in ("ddp", "fsdp2-3", "hsdp") for w in ("fp32", "bf16")]
    asked += [(e, w, 2, "last") for e in ("ddp", "fsdp2-3") for w in ("fp32", "bf16")]
    changes = [
        {**SHARDS[e], "reduce__wire": w, "batch": {"micro": 4 // n, "global": 8}, "reduce__when": when, "budget__steps": 2,
         "precision__compute": "bf16", "name": f"{e}-{w}-{n}-{when}"}
        for e, w, n, when in asked
    ]  # fmt: skip
    runs = watched.sessions(tmp_path_factory.mktemp("recorded"), 2, changes, arm=_record, timeout=300)
    return dict(zip(asked, runs, strict=True))


def test_c39_c41_the_wire_has_the_dtype_that_was_asked_for(
    recorded: dict[tuple[str, str, int, str], watched.Watched],
) -> None:
    for (engine, wire, count, when), run in recorded.items():
        assert run.status == 0, run.message
        for seen in run.ranks:
            gradients = [call for call in seen.probe if call[2] > 64]  # less is the probe at the start
            assert {NAMES[dtype] for _, dtype, _ in gradients} == {wire}, (engine, wire, count, when)
            ways = {"_gather"} if engine in ("ddp", "hsdp") else {"all_to_all_single"}
            assert {name for name, _, _ in gradients} == ways
            # Two windows of the same bytes; the row's figure is that of one.
            assert sum(size for _, _, size in gradients) == 2 * run.column("wire/grad_bytes")[0]


def test_c39_16_bit_halves_the_bytes(recorded: dict[tuple[str, str, int, str], watched.Watched]) -> None:
    elements = sum(t.numel() for t in recorded["ddp", "fp32", 1, "every"].weights().values())
    for (engine, wire, count, when), run in recorded.items():
        sent = run.column("wire/grad_bytes")[0]
        assert set(run.column("wire/grad_bytes")) == {sent}
        reductions = count if when == "every" else 1
        assert sent == SIZE[wire] * elements * reductions, (engine, wire, count, when)
        assert sent * 2 == recorded[engine, "fp32", count, when].column("wire/grad_bytes")[0] * SIZE[wire] // 2


def test_c40_a_16_bit_wire_reports_its_error(recorded: dict[tuple[str, str, int, str], watched.Watched]) -> None:
    """Here compute is BF16, so a 16-bit wire rounds next to nothing where each micro-batch travels by itself."""
    for (engine, wire, count, when), run in recorded.items():
        errors = [row.get("precision/wire_error") for row in run.rows()]
        if wire == "fp32":
            assert errors == [None, None]
        elif when == "last":
            assert all(0 < e < 2e-3 for e in errors), (engine, wire, count, when)
        else:
            assert all(0 <= e < (1e-5 if wire == "fp16" else 1e-30) for e in errors), (engine, wire, count, when)


Job = tuple[str, dict[str, Any]]


def _traces(rank: int, jobs: list[Job]) -> list[Trace]:
    found = []
    for layout, options in jobs:
        wanted = LAYOUTS[layout]
        found.append(engines.trace(rank, wanted.engine, wanted.stage, wanted.replicas, **options))
    return found


@pytest.fixture(scope="module")
def gradients() -> dict[str, Trace]:
    """Rank 0's traces of one window, FP32 compute: every layout of 2 ranks, every wire and sum, one micro-batch or two."""
    jobs: dict[str, Job] = {}
    for layout in ("ddp", "fsdp2-2", "fsdp2-3", "hsdp-1x2"):
        for wire in WIRES:
            for micro in (4, 2):
                jobs[f"{layout} {wire} {micro}"] = (layout, {"wire": wire, "micro": micro})
            if wire != "fp32":
                jobs[f"{layout} {wire} sum"] = (layout, {"wire": wire, "micro": 4, "sum_fp32": False})
    found = worlds.run(_traces, 2, list(jobs.values()), timeout=200)
    return dict(zip(jobs, found[0], strict=True))


@pytest.mark.parametrize("layout", ["ddp", "fsdp2-2", "fsdp2-3", "hsdp-1x2"])
def test_c40_c42_error_of_a_16_bit_wire(gradients: dict[str, Trace], layout: str) -> None:
    for micro in (4, 2):
        exact = gradients[f"ddp fp32 {micro}"].gradients
        assert engines.relative(gradients[f"{layout} fp32 {micro}"].gradients, exact) < 1e-6
        assert 0 < engines.relative(gradients[f"{layout} bf16 {micro}"].gradients, exact) < 2e-3
        assert 0 < engines.relative(gradients[f"{layout} fp16 {micro}"].gradients, exact) < 3e-4
    exact = gradients["ddp fp32 4"].gradients
    for wire, bound in (("bf16", 2.0**-7), ("fp16", 2.0**-10)):
        summed = engines.relative(gradients[f"{layout} {wire} sum"].gradients, exact)
        assert engines.relative(gradients[f"{layout} {wire} 4"].gradients, exact) < summed < bound


@pytest.mark.parametrize("layout", ["fsdp2-2", "fsdp2-3", "hsdp-1x2"])
def test_c42_layouts_round_alike(gradients: dict[str, Trace], layout: str) -> None:
    for wire in WIRES:
        for case in ("4", "2", *(() if wire == "fp32" else ("sum",))):
            mine, theirs = (gradients[f"{name} {wire} {case}"].gradients for name in (layout, "ddp"))
            assert tiny.same(mine, theirs), (wire, case)


def test_c43_the_optimizer_sees_fp32_whatever_travels(
    gradients: dict[str, Trace], recorded: dict[tuple[str, str, int, str], watched.Watched]
) -> None:
    for name, found in gradients.items():
        assert found.dtypes["gradients"] == {"torch.float32"}, name
    for key, run in recorded.items():
        assert run.ranks[1].gradients == {"torch.float32"}, key


def test_c43_two_mechanisms_cannot_be_asked_for(tmp_path: Path) -> None:
    """The wire has one dtype and one sum; a second mechanism has no key, and a sum without a 16-bit wire no effect."""
    from mpdist.config import load
    from mpdist.errors import ConfigError

    for asked in ({"reduce__sum": "wire"}, {"reduce__hook": "bf16_compress"}, {"reduce__wire": ["bf16", "fp16"]}):
        with pytest.raises(ConfigError) as error:
            load(tiny.config(tmp_path, **asked), [])
        assert error.value.status == 2
        assert "reduce." in str(error.value)
    load(tiny.config(tmp_path, reduce__wire="bf16", reduce__sum="wire"), [])


def _sums(rank: int, shard: int, local: int) -> dict[str, Any]:
    """Sums of known addends over a world cut into shards of `shard` ranks, on nodes of `local` ranks."""
    import torch
    import torch.distributed as dist

    from mpdist.dist import build_mesh
    from mpdist.reduce import Wire

    world, found = dist.get_world_size(), {}
    mesh = build_mesh("cpu", shard, local, False)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for sum_fp32 in (True, False):
            wire = Wire(mesh, dtype, sum_fp32)
            g = [torch.randn(48, generator=torch.Generator().manual_seed(r)) for r in range(world)]
            whole = torch.stack(g).double().sum(0)
            mine = g[rank].clone()
            wire.sample()
            if shard > 1:
                piece = torch.empty(48 // shard)
                wire.reduce_scatter(piece, mine)
            else:
                piece = mine
            wire.add_replicas(piece)
            sampled = wire.take_error()
            counted = wire.bytes.take()
            part = whole.chunk(shard)[mesh.shard_index]
            wide = torch.arange(48.0).add(rank)  # whole numbers below 2^8: every dtype holds them and their sums
            out = torch.empty(48 // shard)
            if shard > 1:
                wire.reduce_scatter(out, wide)
            else:
                out = wide.clone()
            wire.add_replicas(out)
            wanted = sum(torch.arange(48.0) + r for r in range(world)).chunk(shard)[mesh.shard_index]
            found[name, sum_fp32] = {
                "error": ((piece.double() - part).square().sum().item(), part.square().sum().item()),
                "sampled": None if sampled is None else sampled.tolist(), "bytes": counted,
                "whole numbers": torch.equal(out, wanted), "bits": piece.numpy().tobytes(), "shard": mesh.shard_index,
            }  # fmt: skip
    return found


# (ranks, shard size, ranks a node): replicated, sharded, hybrid; on one node, on two, on nodes of one rank
PLACES = [
    (2, 1, 2),
    (2, 2, 2),
    (4, 1, 4),
    (4, 1, 2),
    (4, 4, 4),
    (4, 4, 2),
    (4, 2, 2),
    (4, 2, 4),
    (4, 4, 1),
    (4, 1, 1),
    (3, 1, 3),
]


def _all_sums(rank: int, places: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    return [_sums(rank, shard, local) for _, shard, local in places]


@pytest.fixture(scope="module")
def sums() -> dict[tuple[int, int, int], list[dict[str, Any]]]:
    found = {}
    for ranks in (2, 3, 4):
        places = [place for place in PLACES if place[0] == ranks]
        by_rank = worlds.run(_all_sums, ranks, places)
        found |= {place: [mine[i] for mine in by_rank] for i, place in enumerate(places)}
    return found


@pytest.mark.parametrize("place", PLACES)
def test_c40_sums_are_exact_where_values_are(
    sums: dict[tuple[int, int, int], list[dict[str, Any]]], place: tuple[int, int, int]
) -> None:
    for mine in sums[place]:
        for way, found in mine.items():
            assert found["whole numbers"], way
    for way in sums[place][0]:
        by_shard: dict[int, set[bytes]] = {}
        for mine in sums[place]:
            by_shard.setdefault(mine[way]["shard"], set()).add(mine[way]["bits"])
        assert all(len(bits) == 1 for bits in by_shard.values()), way  # replicas hold the same bits


@pytest.mark.parametrize("place", PLACES)
def test_c40_errors_of_the_wire_are_small_and_as_reported(
    sums: dict[tuple[int, int, int], list[dict[str, Any]]], place: tuple[int, int, int]
) -> None:
    bound = {"fp32": 3e-7, "bf16": 2.0**-8, "fp16": 2.0**-11}
    for name, sum_fp32 in sums[place][0]:
        gaps, whole = (sum(mine[name, sum_fp32]["error"][k] for mine in sums[place]) for k in (0, 1))
        error = (gaps / whole) ** 0.5
        assert error <= bound[name] * (1 if sum_fp32 else 3), (name, sum_fp32)
        samples = [mine[name, sum_fp32]["sampled"] for mine in sums[place]]
        if name == "fp32":
            assert error > 0 or place[0] == 2
            assert samples == [None] * place[0]
        elif place[1] in (1, place[0]):  # the sample is the first reduction: all of it where there is one
            reported = (sum(s[0] for s in samples) / sum(s[1] for s in samples)) ** 0.5
            assert reported == pytest.approx(error, rel=0.5), (name, sum_fp32)


def test_two_levels_send_no_more_between_nodes_than_a_ring(
    sums: dict[tuple[int, int, int], list[dict[str, Any]]],
) -> None:
    """2 nodes of 2 ranks, 48 elements. A ring between nodes carries 2 * 48 * 3/4 elements for an all-reduce, half of that
    for a reduce-scatter, each over one link; two levels hand half of the node's sum to each rank's own link."""
    for name, size in SIZE.items():
        replicated, sharded, hybrid = (
            [mine[name, True]["bytes"] for mine in sums[place]] for place in ((4, 1, 2), (4, 4, 2), (4, 2, 2))
        )
        assert replicated == [((48 + 24) * size, 24 * size)] * 4
        assert sharded == [(48 * size, 24 * size)] * 4
        assert hybrid == [(48 * size, 24 * size)] * 4
        one_node = [mine[name, True]["bytes"] for mine in sums[4, 1, 4]]
        assert one_node == [((48 + 12) * size, 0)] * 4
        alone = [mine[name, True]["bytes"] for mine in sums[4, 4, 1]]
        assert alone == [(0, 48 * size)] * 4


def _two_nodes(rank: int, jobs: list[Job]) -> list[Trace]:
    return [engines.trace(rank, engine, **options) for engine, options in jobs]


def test_two_nodes_of_two_ranks_train_as_one() -> None:
    layouts = [("ddp", 0, 1), ("fsdp2", 3, 1), ("fsdp2", 3, 2)]
    jobs: list[Job] = []
    for engine, stage, replicas in layouts:
        for wire in ("fp32", "bf16"):
            for local in (2, 4):
                options = {"stage": stage, "replicas": replicas, "wire": wire, "local": local, "micro": 1}
                jobs.append((engine, options))
    found = worlds.run(_two_nodes, 4, jobs)
    reference = found[0][1].gradients  # ddp on one node, FP32
    for traces in found:
        for (engine, options), trace in zip(jobs, traces, strict=True):
            bound = 1e-6 if options["wire"] == "fp32" else 2.0**-8  # rounded once or twice on the way
            assert engines.relative(trace.gradients, reference) < bound, (engine, options)
            within, between = trace.wire[0]
            assert within > 0
            assert (between > 0) == (options["local"] == 2)
            assert between <= within / 2
    for half, whole in ((2, 0), (6, 4), (10, 8)):  # BF16 against FP32 on two nodes
        assert [2 * b for b in found[0][half].wire[0]] == list(found[0][whole].wire[0])


def _thirty_thousand(rank: int, cases: list[tuple[str, int, int, bool, int]]) -> list[dict[str, Any]]:
    """Four micro-batches whose gradients are 30000 for each element on each rank, over an FP16 wire."""
    import torch
    from torch import nn

    found = []
    for engine, stage, replicas, every, step in cases:
        with torch.device("meta"):
            model = nn.Linear(3, 2, bias=False)
        made = engines.rig(rank, engine, stage, replicas, model=model, wire="fp16", every=every)
        for part in made.engine.parts:
            part.tensor.fill_(1.0)
        for i in range(4):
            made.engine.micro(i == 0, i == 3)
            made.engine.module(torch.full((1, 3), 30000.0 / (1 if every else step))).sum().backward()
            made.engine.after_backward(i == 3)
        found.append(made.full(made.engine.gradients()))
    return found


def test_c36_micro_batches_of_30000_over_an_fp16_wire_are_exact() -> None:
    """The sum over ranks and micro-batches, 240000, is beyond FP16; each addend is not. With `last` one addend is the
    sum of four, 30000 again."""
    shapes = [("ddp", 0, 1), ("fsdp2", 2, 1), ("fsdp2", 3, 1), ("fsdp2", 3, 2)]
    cases = [(*shape, every, 4) for shape in shapes for every in (True, False)]
    for by_case in worlds.run(_thirty_thousand, 2, cases):
        for case, gradients in zip(cases, by_case, strict=True):
            wanted = 240000.0 if case[3] else 60000.0
            assert gradients["weight"].tolist() == [[wanted] * 3] * 2, case


def _overflowing(rank: int) -> list[bool]:
    """Whether a window is applied whose addends are 30000, 70000 (beyond FP16) and again 30000."""
    import torch
    from torch import nn

    from mpdist.optim import square_sum
    from mpdist.precision import Verdict

    with torch.device("meta"):
        model = nn.Linear(3, 2, bias=False)
    made, applied = engines.rig(rank, "fsdp2", 3, model=model, wire="fp16", scale={"scale": 4.0}), []
    for size in (30000.0, 70000.0, 30000.0):
        made.engine.micro(True, True)
        made.engine.module(torch.full((1, 3), size if rank == 1 else 1.0)).sum().backward()
        made.engine.after_backward(True)
        squares = square_sum(made.engine.gradients())
        torch.distributed.all_reduce(squares)
        applied.append(made.window.close(Verdict(1.0, squares.item())).applied)
        made.engine.clear()
    return applied


def test_what_overflows_an_fp16_wire_is_seen_by_the_verdict() -> None:
    assert worlds.run(_overflowing, 2) == [[True, False, True]] * 2


def _refuse_bf16() -> None:
    """From here on the group's gathers and exchanges raise for BF16, as some backends do."""
    import torch
    import torch.distributed as dist

    from mpdist import reduce

    def guard(owner: Any, name: str) -> None:
        call = getattr(owner, name)
        if hasattr(call, "guarded"):
            return

        def guarded(output: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.dtype == torch.bfloat16:
                raise RuntimeError("Invalid scalar type")
            return call(output, tensor, *args, **kwargs)

        guarded.guarded = True  # type: ignore[attr-defined]
        setattr(owner, name, guarded)

    guard(dist, "all_to_all_single")
    guard(dist, "all_gather")
    guard(dist, "all_gather_into_tensor")
    guard(reduce, "_gather")


def test_c37_a_backend_without_bf16_is_named_before_step_1(tmp_path: Path) -> None:
    changes = [{**shard, "reduce__wire": "bf16", "name": name} for name, shard in SHARDS.items()]
    changes.append({"precision__compute": "bf16", "name": "compute"})
    changes.append({"reduce__wire": "fp16", "budget__steps": 1, "name": "fp16"})
    *wires, compute, other = watched.sessions(tmp_path, 2, changes, arm=_refuse_bf16)
    for run in wires:
        for status, message in run.ends:
            assert status == 2
            assert "reduce.wire = bf16" in message
            assert "Invalid scalar type" in message
            assert "reduce.wire: fp32" in message
    for status, message in compute.ends:
        assert status == 2
        assert "precision.compute = bf16" in message
        assert "precision.compute: fp32" in message
    for run in (*wires, compute):
        assert not run.ranks[0].attempts
    assert other.status == 0, other.message


def test_two_nodes_in_a_whole_run(tmp_path: Path) -> None:
    normal = {"budget__steps": 2, "batch": {"micro": 1, "global": 8}, "precision__compute": "bf16"}
    changes = [{**normal, "reduce__wire": wire, "name": wire} for wire in WIRES]
    runs = watched.sessions(tmp_path, 4, changes, local=2)
    for wire, run in zip(WIRES, runs, strict=True):
        assert run.status == 0, run.message
        assert json.loads((run.folder / "sessions/0001/env.json").read_text())["nodes"] == 2
        sent, whole = (r.column("wire/grad_bytes")[0] for r in (run, runs[0]))
        assert sent * 4 == whole * SIZE[wire]
        assert run.column("train/loss") == pytest.approx(runs[0].column("train/loss"), rel=1e-4)
