"""What may differ when a run directory that exists is launched again."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpdist.config import load
from mpdist.config.compat import Differences, differences
from mpdist.config.describe import all_keys


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(
        "name: good\nmodel: {config: {model_type: llama, a: {b: 1}}}\n"
        "data: {train: [{path: a.txt}], tokenizer: bytes}\n"
        "batch: {global: 8}\nbudget: {steps: 10}\n"
    )
    return path


def compare(path: Path, old: list[str], new: list[str]) -> Differences:
    return differences(load(path, old).values(), load(path, new).values())


def keys(found: list[object]) -> list[str]:
    return [difference.key for difference in found]  # type: ignore[attr-defined]


def test_the_same_is_the_same(good: Path) -> None:
    found = compare(good, [], [])
    assert (found.free, found.listed, found.refused, found.allowed) == ([], [], [], True)


@pytest.mark.parametrize(
    "override",
    [
        "track.every=3",
        "track.wandb.mode=disabled",
        "checkpoint.keep=1",
        "checkpoint.resume=never",
        "out_dir=x",
        "launch.timeout=1m",
        "data.cache=x",
        "drill.kill_at={attempt: 1}",
    ],
)
def test_what_cannot_change_the_numbers_is_free(good: Path, override: str) -> None:
    found = compare(good, [], [override])
    assert found.free
    assert found.allowed
    assert not found.listed


@pytest.mark.parametrize(
    "override",
    [
        "launch.ranks=2",
        "batch.micro=2",
        "shard.engine=ddp",
        "shard.stage=2",
        "shard.replicas=2",
        "memory.checkpointing=full",
        "reduce.when=last",
    ],
)
def test_the_same_global_batches_cut_another_way_are_listed(good: Path, override: str) -> None:
    found = compare(good, [], [override])
    assert override.split("=")[0] in keys(list(found.listed))
    assert found.allowed


def test_evaluations_may_come_more_often_but_not_be_of_other_rows(good: Path) -> None:
    held_out = "data.eval=[{path: b.txt}]"
    assert keys(list(compare(good, [held_out], [held_out, "eval.every=7"]).listed)) == ["eval.every"]
    assert keys(list(compare(good, [held_out], [held_out, "eval.rows=7"]).refused)) == ["eval.rows"]


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "batch.global=16",
        "precision.compute=fp32",
        "precision.scale.patience=3",
        "optim.lr=1e-3",
        "data.train.0.path=b.txt",
        "data.seq_len=64",
        "data.train.1.path=b.txt",
        "model.config.a.b=2",
        "model.config.c=2",
        "reduce.wire=bf16",
        "deterministic=false",
        "budget.steps=20",
        "drill.overflow_at={attempts: [1]}",
    ],
)
def test_what_changes_the_numbers_is_refused(good: Path, override: str) -> None:
    found = compare(good, [], [override])
    assert not found.allowed
    assert any(str(difference).startswith(override.split("=")[0]) for difference in found.refused)


def test_a_setting_that_is_younger_than_the_directory_may_keep_its_default(good: Path) -> None:
    old, new = load(good).values(), load(good).values()
    del old["optim"]["clip"], old["precision"]["scale"]["interval"]
    assert differences(old, new).allowed
    new["optim"]["clip"] = 0.5
    found = differences(old, new)
    assert [str(d) for d in found.refused] == ["optim.clip: null -> 0.5"]


def test_a_difference_reads_well(good: Path) -> None:
    assert [str(d) for d in compare(good, [], ["optim.clip=null", "seed=1"]).refused] == [
        "seed: 0 -> 1",
        "optim.clip: 1.0 -> null",
    ]


def test_a_larger_budget_is_free_where_the_schedule_does_not_hang_on_it(good: Path) -> None:
    assert compare(good, ["optim.horizon=100"], ["optim.horizon=100", "budget.steps=20"]).allowed
    assert compare(good, ["optim.schedule=constant"], ["optim.schedule=constant", "budget.steps=20"]).allowed
    assert not compare(good, ["optim.horizon=100"], ["optim.horizon=200", "budget.steps=20"]).allowed
    assert not compare(good, ["optim.horizon=100", "budget.steps=20"], ["optim.horizon=100"]).allowed
    assert not compare(
        good, ["optim.horizon=100"], ["optim.horizon=100", "budget.steps=null", "budget.epochs=9"]
    ).allowed


def test_the_tables_name_keys_that_exist() -> None:
    from mpdist.config.compat import CUT, FREE, WATCHED

    known = {name for name, _ in all_keys()}
    for entry in (*FREE, *CUT, *WATCHED):
        assert entry.rstrip(".") in known
