"""Advice: what it suggests loads, fits as promised, and is the cheapest and the smallest that there is."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mpdist import arch, plan
from mpdist.config import Resolved, load
from mpdist.config.rules import SUPPORT
from mpdist.errors import DoesNotFit
from mpdist.plan_activations import recomputed_flops
from mpdist.plan_advice import Candidate, _suggestion, advise, candidates, smallest
from mpdist.plan_memory import MARGIN, Asked, rows
from mpdist.plan_search import KEYS, Search, divisors, with_values

GIB = 2**30
# Small enough that every setting can be tried: 4 blocks, 113 M parameters, 2 of 3 in the vocabulary's tables.
CONFIG = """\
name: t
model: {config: {model_type: llama, hidden_size: 768, intermediate_size: 2048, num_hidden_layers: 4,
                 num_attention_heads: 12, num_key_value_heads: 4, vocab_size: 50000}}
data: {train: [{path: x.jsonl}], tokenizer: bytes, seq_len: 1024}
batch: {micro: 4, global: 32}
budget: {steps: 200}
launch: {device: cuda}
"""
ENGINES: dict[str, tuple[str, ...]] = {
    "ddp": ("shard.engine=ddp",),
    "fsdp2": (),
    "fsdp2 last": ("shard.stage=2", "reduce.when=last"),
    "hsdp": ("shard.replicas=2",),
    "zero 1": ("shard.engine=deepspeed", "shard.stage=1"),
    "zero 2 last": ("shard.engine=deepspeed", "shard.stage=2", "reduce.when=last"),
    "zero 3": ("shard.engine=deepspeed", "shard.stage=3"),
    "zero offload": ("shard.engine=deepspeed", "shard.stage=3", "shard.offload=optimizer"),
    "whole logits": ("memory.loss_chunk=4096", 'memory.checkpointing=every 3'),
    "compiled": ("model.compile=blocks", "memory.checkpointing=full"),
    "pure": ("precision.master=compute", "precision.keep_fp32=[lm_head]"),
}  # fmt: skip


def resolved(tmp_path: Path, *overrides: str, text: str = CONFIG) -> Resolved:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return load(file, list(overrides))


def search_of(found: Resolved, ranks: int, nodes: int, memory: float) -> Search:
    cfg = found.config
    shape = arch.look(cfg.model.path, cfg.model.config)
    assert isinstance(shape, arch.Arch)
    return Search(cfg, plan.asked_of(cfg, ranks, nodes), shape, int(memory))


def part(plan_or_search: plan.Plan | Search, share: float) -> int:
    """Bytes of so much of a peak, what the device's libraries take left out."""
    if isinstance(plan_or_search, Search):
        ledger = plan_or_search.ledger(plan_or_search.asked)
        peak, held = ledger.peak_bytes, ledger.rows
    else:
        peak, held = plan_or_search.peak_bytes or 0, plan_or_search.rows
    fixed = next(row.at_peak_bytes for row in held if row.row == "overhead")
    return int(fixed + share * (peak - fixed))


def made(found: Resolved, ranks: int, nodes: int, memory: float | None = None) -> plan.Plan:
    cfg = found.config
    shape = arch.look(cfg.model.path, cfg.model.config)
    memory = None if memory is None else int(memory)
    return plan.make(cfg, shape, ranks, nodes, memory, origin=found.origins.__getitem__)


def every_setting(search: Search) -> Iterator[Asked]:
    """All that a configuration may say instead, not only what the search looks at; as far as the engines take it."""
    a = search.asked
    engines = ("deepspeed",) if a.engine == "deepspeed" else ("ddp", "fsdp2")
    for engine in engines:
        can = SUPPORT[engine]
        copies = sorted({1, a.replicas, a.nodes}) if can.replicas else [1]
        for stage, replicas, offload in itertools.product(can.stages, copies, can.offload):
            for when, chunk in itertools.product(("every", "last"), dict.fromkeys((a.loss_chunk, "auto"))):
                one = replace(a, engine=engine, stage=stage, replicas=replicas, offload=offload, when=when)
                if search.allowed(one) and not _left_out(search, one):
                    for micro, mode in itertools.product(search.micros, search.ladder):
                        yield replace(one, loss_chunk=chunk, micro=micro, checkpointing=mode)


def _left_out(search: Search, one: Asked) -> bool:
    """Twins of other settings, and whole gradients where there is no room: see Search."""
    if one.engine == "deepspeed" and one.stage < 3:
        own = (search.asked.when, "every") if one.stage == search.asked.stage else ()
        return one.when not in (own or {1: ("last",), 2: ("every",)}[one.stage])
    return one.when == "last" and one.offload != "none" and search.asked.when != "last"


@pytest.mark.parametrize(
    ("engine", "ranks", "nodes"),
    [*((engine, 2, 2) for engine in ENGINES), ("hsdp", 4, 1), ("ddp", 1, 1), ("fsdp2", 1, 1), ("zero 2 last", 1, 1)],
)
def test_everything_suggested_loads_and_needs_what_it_says(tmp_path: Path, engine: str, ranks: int, nodes: int) -> None:
    asked = resolved(tmp_path, *ENGINES[engine])
    told = 0
    for share in (1.2, 0.6, 0.3, 0.1):
        memory = part(made(asked, ranks, nodes), share)
        search = search_of(asked, ranks, nodes, memory)
        suggestions, _ = advise(search)
        found = candidates(search)
        for change, promised, fits in [
            *((s.change, s.peak_bytes, s.fits) for s in suggestions),
            *((c.change, c.peak_bytes, True) for c in found),
        ]:
            again = made(resolved(tmp_path, *ENGINES[engine], *shlex.split(change)), ranks, nodes, memory)
            assert (again.peak_bytes, again.fits) == (promised, fits), change
            assert again.is_close is (fits and promised > (1 - MARGIN) * memory)
            assert again.batch.global_ == 32
            assert ("deepspeed" in change) is False  # it is for those who ask for it
            told += 1
        assert all(s.is_close is (s.fits and s.peak_bytes > (1 - MARGIN) * memory) for s in suggestions)
        keys = [[setting.split("=")[0] for setting in shlex.split(s.change)] for s in suggestions]
        assert all(len(set(k)) == len(k) for k in keys)
        # What is told where it does not fit stands among what fits, with what it costs.
        assert {s.change for s in suggestions if s.fits and not search.fits(search.asked)} <= {c.change for c in found}
        for c in found:
            again = made(resolved(tmp_path, *ENGINES[engine], *shlex.split(c.change)), ranks, nodes)
            assert sum(t.sent_within for t in again.traffic) == c.sent_within
            assert sum(t.sent_between for t in again.traffic) == c.sent_between
            assert c.asked.micro <= search.asked.micro
    assert told >= 6


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_cheaper_fits_than_the_first_candidate(tmp_path: Path, engine: str) -> None:
    asked = resolved(tmp_path, *ENGINES[engine])
    search = search_of(asked, 4, 1, 1)
    every = [one for one in every_setting(search) if one.micro <= search.asked.micro]
    assert len(every) > 100
    for share in (0.9, 0.5, 0.3, 0.2):
        search.memory = part(search, share)
        fitting = [one for one in every if search.fits(one)]
        found = candidates(search)
        assert bool(found) is bool(fitting)
        if not found:
            continue
        if "zero" in engine:  # which gathers once more what it recomputes: less of it is not always less work
            fitting = [one for one in fitting if one == search.least(one)]
        best = min(fitting, key=search.cost)
        assert search.cost(found[0].asked) == search.cost(best), (found[0].change, search.change(best))
        costs = [search.cost(c.asked) for c in found]
        assert costs == sorted(costs)
        for level in {cost[0] for cost in map(search.cost, fitting)}:
            cheapest = min(search.cost(one) for one in fitting if search.cost(one)[0] == level)
            assert cheapest in costs


@pytest.mark.parametrize("engine", ENGINES)
def test_no_fewer_keys_make_it_fit_than_the_first_suggestion_changes(tmp_path: Path, engine: str) -> None:
    asked = resolved(tmp_path, *ENGINES[engine])
    search = search_of(asked, 4, 1, 1)
    every = [one for one in every_setting(search) if one.micro <= search.asked.micro]
    for share in (0.95, 0.6, 0.35, 0.2):
        search.memory = part(search, share)
        fitting = [one for one in every if search.fits(one)]
        told = [_suggestion(search, one) for one in smallest(search)]
        assert len(told) <= 3
        assert bool(told) is bool(fitting)
        if not told:
            continue
        if "zero" in engine:
            fitting = [one for one in fitting if one == search.least(one)]
        counts = [len(shlex.split(s.change)) for s in told]
        assert counts == sorted(counts)
        assert counts[0] == min(len(search.settings(one)) for one in fitting)
        # Of what changes as few keys the cheapest comes first.
        fewest = [one for one in fitting if len(search.settings(one)) == counts[0]]
        assert told[0].change in {search.change(o) for o in fewest if search.cost(o) == min(map(search.cost, fewest))}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_left_out_at_once_could_not_fit(tmp_path: Path, engine: str) -> None:
    search = search_of(resolved(tmp_path, *ENGINES[engine]), 4, 1, 1)
    shares = [search.floor(one) / search.peak(one) for one in every_setting(search)]
    assert max(shares) <= 1
    assert max(shares) > 0.1  # overhead and activations are most of this small model


def test_ddp_comes_before_stage_two_before_stage_three_before_offload(tmp_path: Path) -> None:
    asked = resolved(tmp_path)
    search = search_of(asked, 8, 1, 80 * GIB)
    assert {c.asked.engine for c in candidates(search)} == {"ddp", "fsdp2"}
    levels = []
    peaks = sorted({search.peak(one) for one in every_setting(search)}, reverse=True)
    for memory in peaks[:: len(peaks) // 60]:
        search.memory = memory
        found = candidates(search)
        if found:
            levels.append(search.cost(found[0].asked)[0])
            order = [search.cost(c.asked)[0] for c in found]
            assert order == sorted(order)
    assert levels == sorted(levels)
    assert set(levels) == {0, 2, 3, 5}


def test_checkpointing_is_only_as_much_as_needed(tmp_path: Path) -> None:
    search = search_of(resolved(tmp_path, "batch.micro=1"), 4, 1, 1)
    assert search.ladder[0] == "none"
    assert [search.recompute(one) for one in search.ladder] == sorted(search.recompute(one) for one in search.ladder)
    assert set(search.ladder) == {"none", "every 4", "every 2", "selective", "full"}
    layout = search.asked
    seen = set()
    for memory in sorted({search.peak(replace(layout, checkpointing=one)) for one in search.ladder}):
        search.memory = memory
        least = search.least(layout)
        assert least is not None
        fitting = [one for one in search.ladder if search.fits(replace(layout, checkpointing=one))]
        assert least.checkpointing == fitting[0]
        seen.add(least.checkpointing)
        if search.peak(least) == memory:
            search.memory = memory - 1
            again = search.least(layout)
            assert again is None or search.recompute(again.checkpointing) > search.recompute(least.checkpointing)
    assert {"none", "full"} < seen


def test_a_smaller_micro_batch_costs_more_only_by_what_it_reads_and_sends(tmp_path: Path) -> None:
    search = search_of(resolved(tmp_path), 4, 1, 80 * GIB)
    one, four = (search.cost(replace(search.asked, micro=m)) for m in (1, 4))
    assert one > four
    full = search.cost(replace(search.asked, checkpointing="full"))
    assert full > four
    assert search.cost(replace(search.asked, micro=1, checkpointing="full")) > max(one, full)


def test_where_nothing_fits_the_nearest_and_the_ranks_that_it_takes_are_told(tmp_path: Path) -> None:
    asked = resolved(tmp_path, "shard.engine=ddp")
    one_rank = search_of(asked, 1, 1, 1)
    offloaded = [one for one in every_setting(one_rank) if one.offload != "none"]
    lowest = min(map(one_rank.peak, every_setting(one_rank)))
    assert any(one_rank.peak(one) == lowest for one in offloaded)
    cpu = resolved(tmp_path, "shard.engine=ddp", "launch.device=cpu", "batch.micro=1")
    for share in (0.9, 0.7, 0.55):
        search = search_of(cpu, 1, 1, share * search_of(cpu, 1, 1, 1).peak(search_of(cpu, 1, 1, 1).asked))
        while advise(search)[0][0].fits:
            search = search_of(cpu, 1, 1, 0.9 * search.memory)
        (nearest, *_), more = advise(search)
        every = [one for one in every_setting(search) if one.micro == 1]
        assert nearest.peak_bytes == min(map(search.peak, every)) > search.memory
        assert more is not None
        assert more.peak_bytes <= search.memory
        changed = resolved(
            tmp_path, "shard.engine=ddp", "launch.device=cpu", "batch.micro=1", *shlex.split(more.change)
        )
        assert made(changed, more.ranks // more.nodes, more.nodes).peak_bytes == more.peak_bytes
        for fewer in range(2, more.ranks):
            whole = -(-32 // fewer) * fewer
            world = resolved(
                tmp_path, "shard.engine=ddp", "launch.device=cpu", "batch.micro=1", f"batch.global={whole}"
            )
            there = search_of(world, *((fewer, 1) if fewer <= 8 else (1, fewer)), search.memory)
            assert not any(there.fits(one) for one in every_setting(there) if one.micro == 1), fewer


def test_no_number_of_ranks_helps_where_what_nobody_shares_is_too_much(tmp_path: Path) -> None:
    found = made(resolved(tmp_path), 4, 1, GIB // 2)
    assert found.fits is False
    assert found.more_ranks is None
    assert "no number of ranks is enough" in found.text()
    assert "a shorter data.seq_len" in found.text()
    with pytest.raises(DoesNotFit, match="no number of ranks is enough"):
        found.require_fit()


def test_sixteen_bit_compute_is_told_where_nothing_else_is_enough(tmp_path: Path) -> None:
    ask = ("precision.compute=fp32", "batch.micro=1", "launch.device=cpu")
    search = search_of(resolved(tmp_path, *ask), 4, 1, 1)
    search.memory = min(map(search.peak, every_setting(search))) - 1
    told, _ = advise(search)
    assert told[0].fits is False
    assert told[1].change.startswith("precision.compute=bf16")
    again = made(resolved(tmp_path, *ask, *shlex.split(told[1].change)), 4, 1, search.memory)
    assert again.fits
    assert again.peak_bytes == told[1].peak_bytes


def test_engine_limits_are_the_checks_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = resolved(tmp_path)
    before = search_of(asked, 4, 1, 80 * GIB).layouts
    assert {one.offload for one in before if one.engine == "fsdp2"} == {"none", "all"}
    monkeypatch.setitem(SUPPORT, "fsdp2", SUPPORT["fsdp2"]._replace(offload=("none",), stages=(3,)))
    after = search_of(asked, 4, 1, 80 * GIB).layouts
    assert {(one.offload, one.stage) for one in after if one.engine == "fsdp2"} == {("none", 3)}
    zero = search_of(resolved(tmp_path, *ENGINES["zero 3"]), 4, 1, 80 * GIB).layouts
    assert {one.stage for one in zero if one.offload == "all"} == {3}  # a rule of its own, not of the table
    assert {one.stage for one in zero if one.offload == "none"} == {1, 2, 3}


def test_room_for_a_larger_micro_batch_is_named_with_a_margin(tmp_path: Path) -> None:
    asked = resolved(tmp_path, "batch.micro=1")
    peak = made(asked, 4, 1).peak_bytes
    assert peak is not None
    (room,) = made(asked, 4, 1, 3 * peak).suggestions
    assert room.change.startswith("batch.micro=")
    assert peak < room.peak_bytes <= (1 - MARGIN) * 3 * peak
    close = made(asked, 4, 1, 1.02 * peak)
    assert close.fits
    assert close.is_close
    assert close.suggestions == ()
    assert "less to spare" in close.text()


def test_a_candidate_that_fits_narrowly_is_marked_and_followed_by_one_with_room(tmp_path: Path) -> None:
    search = search_of(resolved(tmp_path, "shard.engine=ddp", "batch.micro=1"), 4, 1, 1)
    search.memory = int(1.01 * search.peak(search.asked))
    found = candidates(search)
    assert found[0].is_close
    assert found[0].change in ("", "reduce.when=last")
    second = next(c for c in found if not c.is_close)
    assert second.peak_bytes <= (1 - MARGIN) * search.memory
    assert second.recompute > 0 or second.asked.engine != "ddp"


# -- recomputation -------------------------------------------------------------------------------------------------------


def test_recompute_follows_from_the_blocks(tmp_path: Path) -> None:
    shape = search_of(resolved(tmp_path), 1, 1, 1).arch
    none, half, full = (recomputed_flops(shape, 1024, mode) for mode in ("none", "every 2", "full"))
    assert (none, half) == (0, full / 2)
    attention, projections, mlp = 2 * 768 * 1024, 2 * 768 * (768 + 256 + 256 + 768), 3 * 2 * 768 * 2048
    assert full == 4 * (attention + projections + mlp * 2 / 3)  # the last product is needed by nobody
    selective = recomputed_flops(shape, 1024, "selective")
    assert selective == 4 * (2 * 768 * (256 + 768) + mlp / 3)  # k, o, up; attention is kept
    eager = recomputed_flops(shape, 1024, "selective", eager=True)
    assert eager == selective + 4 * attention / 2  # its scores, not its values


# -- the configuration fragment ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("share", [1.5, 0.95, 0.6])
def test_the_fragment_is_a_configuration_wherever_it_is_saved(
    tmp_path: Path, engine: str, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    from mpdist import plan_command

    lines = [*ENGINES[engine], "precision.compute=bf16", "batch.micro=2"]
    asked = resolved(tmp_path, *lines)
    memory = part(made(asked, 4, 1), share)
    found = candidates(search_of(asked, 4, 1, memory))
    best = next((one for one in found if not one.is_close), found[0])
    wanted = {"ranks": 4, "nodes": 1, "memory_bytes": memory, "as_json": False, "suggest": True}
    assert plan_command.run(asked, **wanted) == 0
    fragment = capsys.readouterr().out
    assert fragment.startswith("# ")
    assert plan_command.format_bytes(best.peak_bytes) in fragment
    assert ("by less than" in fragment) is best.is_close
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "saved.yaml").write_text(fragment)
    base = "\n".join(line for line in CONFIG.splitlines() if not line.startswith(("batch", "launch")))
    (tmp_path / "on_top.yaml").write_text(f"extends: elsewhere/saved.yaml\n{base}\nbatch: {{global: 32}}\n")
    (line,) = [line for line in fragment.splitlines() if line.startswith("#   mpdist launch ")]
    _, _, _, path, *settings = shlex.split(line)
    for found in (load(elsewhere / "saved.yaml"), load(tmp_path / "on_top.yaml"), load(Path(path), settings)):
        assert (found.config.launch.ranks, found.config.launch.nodes) == (4, 1)
        assert made(found, 4, 1, memory).peak_bytes == best.peak_bytes
        assert plan.asked_of(found.config, 4, 1) == best.asked


def test_a_fragment_needs_a_memory_and_something_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mpdist import plan_command
    from mpdist.errors import UsageError

    asked = resolved(tmp_path)
    with pytest.raises(UsageError, match="no memory is given"):
        plan_command.run(asked, ranks=4, nodes=1, memory_bytes=None, as_json=False, suggest=True)
    with pytest.raises(DoesNotFit):
        plan_command.run(asked, ranks=4, nodes=1, memory_bytes=2**20, as_json=False, suggest=True)
    unknown = resolved(tmp_path, text=CONFIG.replace("model_type: llama", "model_type: bert"))
    with pytest.raises(UsageError, match="model type 'bert'"):
        plan_command.run(unknown, ranks=4, nodes=1, memory_bytes=GIB, as_json=False, suggest=True)
    assert capsys.readouterr().out == ""


def test_tensors_of_few_rows_lie_on_few_ranks_and_flat_shards_are_tried_before_offload(tmp_path: Path) -> None:
    """fully_shard cuts the first dimension, of which experts have 4: on 8 ranks half of them hold nothing of it."""
    experts = CONFIG.replace("llama,", "mixtral, num_local_experts: 4, num_experts_per_tok: 2,").replace(
        "2048", "16384"
    )
    found = resolved(tmp_path, text=experts)
    search = search_of(found, 8, 1, 100 * GIB)
    parts = [p for p in search.arch.params if p.shape[0] == 4]
    assert len(parts) == 3 * search.arch.layers  # with the routers
    whole = made(found, 8, 1)
    row = next(row for row in whole.rows if row.row == "parameters")
    held = sum(p.count // 4 for p in parts) + sum(
        -(-p.shape[0] // 8) * p.count // p.shape[0] for p in search.arch.params if p not in parts
    )
    assert row.rest_bytes == 4 * held
    assert row.formula.startswith(f"4 B x {held} on the fullest rank, of {whole.parameters} / 8 ranks: ")
    assert f"{len(parts)} tensors are cut along a dimension of 4 over 8 ranks, on 4 of which they lie" in row.formula
    assert f"fullest holds {8 * held / whole.parameters:.2f} equal shares" in whole.text()
    assert sum("cut along a dimension of 4" in warning for warning in whole.warnings) == 1
    assert "padding" in whole.traffic[0].formula
    # On 4 ranks every share is equal.
    even = made(found, 4, 1)
    assert even.warnings == ()
    assert next(row for row in even.rows if row.row == "parameters").formula == f"4 B x {even.parameters} / 4 ranks"
    # Offload is not needed where flat shards fit, and what is suggested loads as what it was.
    flat = replace(search.asked, engine="deepspeed", checkpointing="full", micro=1, when="every")
    search = search_of(found, 8, 1, search.peak(flat))
    first = candidates(search)[0]
    assert (first.asked.engine, first.asked.offload) == ("deepspeed", "none")
    loaded = load(found.path, shlex.split(first.change))
    assert made(loaded, 8, 1).peak_bytes == first.peak_bytes


def test_divisors() -> None:
    assert divisors(1) == [1]
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert all(divisors(n) == [d for d in range(1, n + 1) if n % d == 0] for n in range(1, 200))


def test_values_are_set_under_their_names(tmp_path: Path) -> None:
    cfg = resolved(tmp_path).config
    again = with_values(cfg, {"batch.global": 64, "batch.micro": 2, "shard.stage": 2})
    assert (again.batch.global_, again.batch.micro, again.shard.stage, again.shard.engine) == (64, 2, 2, "fsdp2")
    assert cfg.batch.global_ == 32
    assert with_values(cfg, {}) == cfg


# -- what is printed -----------------------------------------------------------------------------------------------------


def test_the_command_prints_settings_that_fit_and_ends_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mpdist import plan_command

    asked = resolved(tmp_path, "batch.micro=8")
    memory = part(made(asked, 4, 1), 0.6)
    assert plan_command.run(asked, ranks=4, nodes=1, memory_bytes=memory, as_json=True) == 3
    data = json.loads(capsys.readouterr().out)
    assert data["fits"] is False
    assert data["suggestions"]
    for one in data["candidates"]:
        assert set(one["settings"]) == set(KEYS.values())
        assert one["peak_bytes_per_rank"] <= memory
        assert one["accumulation"] * one["settings"]["batch.micro"] * 4 == 32
    assert plan_command.run(asked, ranks=4, nodes=1, memory_bytes=memory, as_json=False) == 3
    text = capsys.readouterr().out
    assert "smallest changes that make it fit" in text
    assert "settings that fit, cheapest first" in text
    assert data["candidates"][0]["change"] in text
    assert plan_command.run(asked, ranks=4, nodes=None, memory_bytes=80 * GIB, as_json=False) == 0
    assert "as configured" in capsys.readouterr().out


def test_a_candidates_rows_at_the_peak_add_up_to_it(tmp_path: Path) -> None:
    found: list[Candidate] = candidates(search_of(resolved(tmp_path, "batch.micro=8"), 4, 1, 80 * GIB))
    assert len(found) > 3
    for c in found:
        assert sum(row.at_peak_bytes for row in c.rows if not row.host) == c.peak_bytes
        assert rows(c.asked, search_of(resolved(tmp_path), 4, 1, 1).arch)[1] == c.peak_bytes
