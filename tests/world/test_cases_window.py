"""Accumulation and the schedule: C21 to C35. How a global batch is cut must not show in any number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engines
import pytest
import tiny
import watched
import worlds
from engines import LAYOUTS, Trace

pytestmark = pytest.mark.world

STEPS = 20
Job = tuple[str, dict[str, Any]]


def _traces(rank: int, jobs: list[Job]) -> list[Trace]:
    found = []
    for layout, options in jobs:
        wanted = LAYOUTS[layout]
        found.append(engines.trace(rank, wanted.engine, wanted.stage, wanted.replicas, **options))
    return found


def _all_jobs(ranks: int) -> list[Job]:
    names = [name for name, layout in LAYOUTS.items() if layout.ranks == ranks or (ranks == 1 and layout.replicas == 1)]
    return [
        (name, {"micro": micro, "steps": STEPS}) for name in names for micro in {1: (8, 2), 2: (2, 4), 4: (1, 2)}[ranks]
    ]


@pytest.fixture(scope="module")
def cuts() -> dict[tuple[int, str, int], list[Trace]]:
    """(ranks, layout, micro) -> each rank's trace of 20 steps of the same 8 rows, their label tokens uneven."""
    found = {}
    for ranks in (1, 2, 4):
        jobs = _all_jobs(ranks)
        by_rank = worlds.run(_traces, ranks, jobs)
        for i, (name, options) in enumerate(jobs):
            found[ranks, name, options["micro"]] = [traces[i] for traces in by_rank]
    return found


def test_c24_c42_the_cut_of_a_batch_shows_in_no_norm_and_no_loss(
    cuts: dict[tuple[int, str, int], list[Trace]],
) -> None:
    plain = cuts[1, "ddp", 8][0]
    assert len(cuts) == 28
    for key, traces in cuts.items():
        for found in traces:
            assert found.norms[0] == pytest.approx(plain.norms[0], rel=1e-5), key
            assert found.norms == pytest.approx(plain.norms, rel=1e-5), key
            assert found.losses == pytest.approx(plain.losses, rel=1e-5), key


def test_c21_c22_the_gradient_is_that_of_one_big_batch(cuts: dict[tuple[int, str, int], list[Trace]]) -> None:
    plain = cuts[1, "ddp", 8][0].gradients
    for key, traces in cuts.items():
        for found in traces:
            assert engines.relative(found.gradients, plain) < 1e-6, key


def test_c42_replicas_hold_the_same_bits(cuts: dict[tuple[int, str, int], list[Trace]]) -> None:
    for key, traces in cuts.items():
        assert all(tiny.same(found.weights, traces[0].weights) for found in traces), key


@pytest.fixture(scope="module")
def many() -> dict[str, Trace]:
    """Rank 0's traces on 2 ranks: 50 steps with the clip off and on, ways to reduce, the mean of means, tied weights."""
    jobs: dict[str, Job] = {}
    for layout in ("ddp", "fsdp2-2", "fsdp2-3", "hsdp-1x2"):
        jobs[layout] = (layout, {"steps": 50})
        jobs[f"{layout} clip"] = (layout, {"steps": 50, "clip": 0.5})
        for compute in ("fp32", "bf16"):
            for every in (True, False):
                name = f"{layout} {compute} {'every' if every else 'last'}"
                jobs[name] = (layout, {"micro": 1, "compute": compute, "every": every, "steps": 2})
        jobs[f"{layout} tied"] = (layout, {"tie_word_embeddings": True, "steps": 3})
    jobs["means"] = ("ddp", {"means": True})
    jobs["ddp unfused"] = ("ddp", {"steps": 3, "fused": False})
    found = worlds.run(_traces, 2, list(jobs.values()), timeout=200)
    assert all(tiny.same(a.weights, b.weights) for a, b in zip(*found, strict=True))
    return dict(zip(jobs, found[0], strict=True))


def test_c21_control_the_mean_of_means_is_off_by_percents(
    many: dict[str, Trace], cuts: dict[tuple[int, str, int], list[Trace]]
) -> None:
    assert engines.relative(many["means"].gradients, cuts[1, "ddp", 8][0].gradients) > 0.02


@pytest.mark.parametrize("layout", ["fsdp2-2", "fsdp2-3", "hsdp-1x2"])
def test_engines_agree_bit_for_bit_in_fp32(many: dict[str, Trace], layout: str) -> None:
    assert tiny.same(many[layout].weights, many["ddp"].weights)
    assert many[layout].losses == many["ddp"].losses
    clipped, wanted = many[f"{layout} clip"], many["ddp clip"]
    assert all(norm > 0.5 for norm in wanted.norms)
    assert engines.relative(clipped.weights, wanted.weights) < 1e-6


@pytest.mark.parametrize("layout", ["ddp", "fsdp2-2", "fsdp2-3", "hsdp-1x2"])
def test_c28_every_and_last_give_the_same_gradient(many: dict[str, Trace], layout: str) -> None:
    for compute in ("fp32", "bf16"):
        every, last = (many[f"{layout} {compute} {when}"] for when in ("every", "last"))
        assert engines.relative(every.gradients, last.gradients) < 1e-6
        assert every.dtypes["gradients"] == last.dtypes["gradients"] == {"torch.float32"}
        if layout != "hsdp-1x2":
            assert every.wire[0][0] == 4 * last.wire[0][0]  # four micro-batches
    assert many[f"{layout} bf16 every"].wire == many[f"{layout} fp32 every"].wire  # the wire is FP32 in both


@pytest.mark.parametrize("layout", ["fsdp2-2", "fsdp2-3", "hsdp-1x2"])
def test_c114_tied_weights_train_alike_on_every_engine(many: dict[str, Trace], layout: str) -> None:
    tied = many[f"{layout} tied"]
    assert len(tied.weights) == 20
    assert tiny.same(tied.weights, many["ddp tied"].weights)


def _gradient_bytes(rank: int, cases: list[tuple[int, bool]]) -> list[tuple[int, int]]:
    """(largest bytes of gradients held after any micro-batch, bytes of the full FP32 gradient) of a window of 4."""
    found = []
    for stage, every in cases:
        made = engines.rig(rank, "fsdp2", stage, compute="bf16", every=every)
        full = sum(4 * param.numel() for param in made.engine.module.parameters())
        largest = 0
        for i, part in enumerate(engines.cut(engines.draw(8), 1, 2, rank)):
            made.engine.micro(i == 0, i == 3)
            made.forward(part, 0.01)[0].backward()
            made.engine.after_backward(i == 3)
            held = [
                p.sharded_param.grad._local_tensor for p in made.engine._params() if p.sharded_param.grad is not None
            ]
            held += [
                p.unsharded_accumulated_grad for p in made.engine._params() if p.unsharded_accumulated_grad is not None
            ]
            largest = max(largest, sum(t.numel() * t.element_size() for t in held))
        found.append((largest, full))
    return found


def test_c28_reducing_every_micro_batch_keeps_gradients_sharded() -> None:
    for found in worlds.run(_gradient_bytes, 2, [(3, True), (3, False), (2, True), (2, False)]):
        for (every, full), (last, _) in (found[:2], found[2:]):
            assert every == pytest.approx(full / 2, rel=0.02)
            assert last == pytest.approx(full, rel=0.02)


def _two_layers() -> Any:
    import torch
    from torch import nn

    class Two(nn.Module):
        """The second layer is used where asked for."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            x = self.one(x)
            return (self.two(x) if both else x).float().sum()

    with torch.device("meta"):
        return Two()


def _late_use(rank: int, cases: list[tuple[str, int, int, bool, str]], late: int) -> list[dict[str, Any]]:
    """Gradients of a window of 2 in which the second layer is used in micro-batch `late` only (2: on rank 0 alone)."""
    import torch

    found = []
    for engine, stage, replicas, every, compute in cases:
        made = engines.rig(rank, engine, stage, replicas, model=_two_layers(), compute=compute, every=every)
        for part in made.engine.parts:
            part.tensor.fill_(0.5)
        made.engine.refresh()
        dtype = torch.bfloat16 if compute == "bf16" else torch.float32
        for i in range(2):
            made.engine.micro(i == 0, i == 1)
            both = i == late if late < 2 else (i == 1 and rank == 0)
            made.engine.module(torch.full((1, 4), i + 1.0, dtype=dtype), both).backward()
            made.engine.after_backward(i == 1)
        found.append(made.full(made.engine.gradients()))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_c30_a_parameter_used_in_one_micro_batch_only(ranks: int, late: int) -> None:
    shapes = [("fsdp2", 2, 1), ("fsdp2", 3, 1), ("ddp", 0, 1), *([("fsdp2", 3, 2)] if ranks == 2 else [])]
    # Under ZeRO-3 all ranks gather a module together, so it cannot be one that only some of them run.
    shapes += [("deepspeed", stage, 1) for stage in (1, 2, 3) if stage < 3 or late < 2 or ranks == 1]
    cases = [(*shape, every, compute) for shape in shapes for every in (True, False) for compute in ("bf16", "fp32")]
    # Micro-batch i has input i+1: without the second layer d(one) = i+1, with it (i+1) * 4 * 0.5; d(two) = (i+1) * 4 * 0.5.
    used = [[(i == late if late < 2 else (i == 1 and rank == 0)) for i in range(2)] for rank in range(ranks)]
    one = sum((i + 1) * (2.0 if both else 1.0) for flags in used for i, both in enumerate(flags))
    two = sum((i + 1) * 2.0 for flags in used for i, both in enumerate(flags) if both)
    for by_case in worlds.run(_late_use, ranks, cases, late):
        for case, gradients in zip(cases, by_case, strict=True):
            assert gradients["one.weight"].tolist() == [[one] * 4] * 4, case
            assert gradients["two.weight"].tolist() == [[two] * 4] * 4, case


def _records(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"text": f"{'ab' * (i % 5 + 1)} row {i}"}) + "\n" for i in range(count)))
    return path


@pytest.mark.parametrize(("rows", "steps"), [(3, 1), (6, 2), (8, 2), (9, 3)])
def test_c26_the_short_last_window_is_one_step(tmp_path: Path, rows: int, steps: int) -> None:
    """One rank, micro-batches of one row, windows of 4, one epoch; and the same two epochs long."""
    normal = {
        "data__train": [{"path": str(_records(tmp_path / "few.jsonl", rows))}],
        "data__packing": "none",
        "batch": {"micro": 1, "global": 4},
    }
    one, two, drop = watched.sessions(
        tmp_path,
        1,
        [
            {**normal, "name": "one", "budget": {"epochs": 1}},
            {**normal, "name": "two", "budget": {"epochs": 2}},
            {**normal, "name": "drop", "budget": {"epochs": 1}, "data__last_window": "drop"},
        ],
    )
    assert (one.state()["step"], two.state()["step"]) == (steps, 2 * steps)
    assert not tiny.same(one.ranks[0].start, one.ranks[0].end)
    seen = [row for attempt in two.attempts for micro in attempt.rows for row in micro]
    assert sorted(seen[:rows]) == sorted(seen[rows:]) == list(range(rows))
    if rows >= 4:
        assert drop.state()["step"] == rows // 4
    else:
        assert drop.status == 2  # no whole window: said before step 1


def test_c23_c25_ranks_and_micro_batches_without_label_tokens(tmp_path: Path) -> None:
    """Rows 0 to 7 have no label token (their completions are cut off), the others have; in that order."""
    lines = [{"prompt": "p" * 200, "completion": "lost"}] * 8
    lines += [{"prompt": "p" * (200 if i % 4 else 8), "completion": f"kept {i}"} for i in range(8)]
    path = tmp_path / "cut.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    normal = {
        "data": {
            "tokenizer": "bytes", "seq_len": 64, "packing": "none", "too_long": "truncate", "loss_on": "completion",
            "shuffle": False, "train": [{"path": str(path), "format": "prompt_completion"}],
        },
        "budget": {"steps": 2}, "optim__schedule": "constant", "precision__scale__patience": 1,
    }  # fmt: skip
    runs = []
    for ranks, micro in ((1, 8), (1, 2), (2, 2), (2, 1)):
        folder = tmp_path / f"{ranks}x{micro}"
        folder.mkdir()
        runs += watched.sessions(folder, ranks, [{**normal, "batch": {"micro": micro, "global": 8}}])
    for run in runs:
        assert run.status == 0, run.message
        skips = [(e["attempt"], e["reason"]) for e in run.events("skip")]
        assert skips == [(1, "no label token"), (3, "no label token")]
        assert (run.state()["step"], run.state()["attempt"]) == (2, 4)
        assert run.column("scale/skipped") == [0, 0]  # counted apart from overflows
        assert run.column("train/loss") == pytest.approx(runs[0].column("train/loss"), rel=1e-5)
        assert run.column("train/grad_norm") == pytest.approx(runs[0].column("train/grad_norm"), rel=1e-5)
        assert run.column("train/label_tokens") == runs[0].column("train/label_tokens")
        assert not any(a.touched for seen in run.ranks for a in seen.attempts if not a.applied)


def test_c24_c31_c32_c103_c105_a_runs_rows_do_not_know_how_it_was_cut(tmp_path: Path) -> None:
    """Windows of 4, 2 and 1 micro-batches on 1 and 2 ranks: the schedule counts steps, loss and norm are the window's."""
    found = []
    for ranks, micros in ((1, (8, 2)), (2, (4, 1))):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        changes = [
            {"batch": {"micro": m, "global": 8}, "budget__steps": 10, "name": f"{m}", "track__every": 1} for m in micros
        ]
        found += watched.sessions(folder, ranks, changes)
    for run in found:
        assert run.column("train/lr") == pytest.approx([1e-3 * (1 - k / 10) for k in range(10)])
        assert run.column("train/lr")[4] == pytest.approx(6e-4)  # after update 4
        for name in ("train/loss", "train/grad_norm"):
            assert run.column(name) == pytest.approx(found[0].column(name), rel=1e-5)
        for name in ("train/label_tokens", "train/tokens", "attempt"):
            assert run.column(name) == found[0].column(name)
        assert run.column("train/loss")[0] == pytest.approx(found[0].column("train/loss")[0], rel=1e-6)
        assert {a.state["step"] for a in run.attempts} == set(range(1, 11))
