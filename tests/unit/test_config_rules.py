"""Rules between keys: what cannot run, and what would have no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpdist import plan
from mpdist.config import SUPPORT, ConfigError, check_world, load, scale_mode

GOOD = """\
name: good
model: {config: {model_type: llama}}
data: {train: [{path: a.txt}], tokenizer: bytes}
batch: {global: 8}
budget: {steps: 10}
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


REFUSED = [
    ("model.path=x/y", "exactly one of model.path and model.config"),
    ("model.config=null", "exactly one of model.path and model.config"),
    ("model.revision=main", "no effect"),
    ("model.trust_remote_code=true", "no effect"),
    ("model.attention=flash_attention_2 precision.compute=fp32", "16 bit"),
    ("model.attention=flash_attention_2 launch.device=cpu", "GPU"),
    ("data.tokenizer=model", "no tokenizer beside it"),
    ("data.loss_on=completion", "no completion"),
    ("data.loss_on=assistant data.train.0.format=prompt_completion", "no roles"),
    ("data.train.0.fields.prompt=q", "has no field prompt"),
    ("data.eval.0.path=b.txt data.eval.0.weight=2", "no effect"),
    ("data.chat_template=t.jinja", "no effect"),
    ("batch.micro=3", "whole number of micro-batches"),
    ("precision.compute=fp32 precision.keep_fp32=[norm]", "no effect"),
    ("precision.compute=fp32 precision.master=compute", "no effect"),
    ("launch.device=cpu precision.tf32=true", "no effect"),
    ("precision.scale.init=1024", "no effect"),
    ("precision.scale.mode=static precision.scale.growth=4", "no effect"),
    ("precision.compute=fp16 precision.scale.init=1 precision.scale.floor=2", "below its floor"),
    ("precision.scale.per_block=true", "no effect"),
    ("reduce.wire=fp16 precision.scale.per_block=true", "no effect"),
    ("precision.compute=fp16 precision.scale.mode=off precision.scale.per_block=true", "lie inside the window's"),
    ("precision.compute=fp16 precision.master=compute precision.scale.per_block=true", "lose again"),
    ("precision.compute=fp16 shard.engine=deepspeed precision.scale.per_block=true", "end to end"),
    ("shard.stage=0", "fsdp2 has stage 2 or 3 only"),
    ("shard.engine=ddp shard.stage=3", "ddp has stage 0 only"),
    ("shard.engine=ddp shard.replicas=2", "every rank is a replica"),
    ("shard.engine=ddp shard.offload=all", "does not offload"),
    ("shard.offload=optimizer", "fsdp2 can offload none, all"),
    ("shard.engine=deepspeed shard.stage=0", "deepspeed has stage 1 or 2 or 3 only"),
    ("shard.engine=deepspeed shard.replicas=2", "all ranks share one copy"),
    ("shard.engine=deepspeed shard.offload=all", "that every rank holds whole"),
    ("shard.engine=deepspeed precision.master=compute", "keeps FP32 masters"),
    ("shard.engine=deepspeed precision.keep_fp32=[norm]", "in one dtype"),
    ("shard.engine=deepspeed model.compile=blocks", "cannot be compiled"),
    ("reduce.sum=wire", "no effect"),
    ("budget.epochs=1", "exactly one of steps"),
    ("budget.steps=null", "exactly one of steps"),
    ("optim.warmup=1.5", "whole"),
    ("optim.warmup=10", "whole span"),
    ("optim.schedule=constant optim.horizon=10", "no effect"),
    ("budget.steps=null budget.seconds=60", "does not say how many steps"),
    ("budget.steps=null budget.seconds=60 optim.schedule=constant optim.warmup=0.1", "does not say how many steps"),
    ("optim.weight_decay=0 optim.decay=all", "no effect"),
    ("eval.every=10", "no effect"),
    ("eval.rows=10", "no effect"),
    ("checkpoint.keep_best=2", "no effect"),
    ("track.wandb.mode=disabled track.wandb.project=x", "no effect"),
]


@pytest.mark.parametrize(("overrides", "why"), REFUSED)
def test_refused(good: Path, overrides: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(good, overrides.split(" "))
    assert len(caught.value.problems) == 1, str(caught.value)
    problem = caught.value.problems[0]
    assert why in problem.why
    assert problem.do
    assert "command line" in problem.what or problem.what == "no budget is given" or problem.what == "no model is given"


ALLOWED = [
    "precision.compute=fp16 precision.scale.init=1024",
    "reduce.wire=fp16 precision.scale.init=1024 reduce.sum=wire",
    "precision.scale.mode=static precision.scale.init=1",
    "precision.scale.patience=3",
    "precision.compute=fp16 precision.scale.per_block=true precision.scale.mode=static precision.scale.on_overflow=next",
    "precision.scale.init=65536",
    "shard.engine=ddp",
    "shard.stage=2 shard.replicas=2 shard.offload=all",
    "reduce.when=last",
    "budget.steps=null budget.seconds=60 optim.schedule=constant",
    "budget.steps=null budget.seconds=60 optim.horizon=100",
    "budget.steps=null budget.epochs=0.5",
    "optim.schedule=constant optim.warmup=3",
    "optim.lr=0",
    "data.eval.0.path=b.txt eval.every=0",
    "data.train.0.format=messages data.chat_template=t.jinja data.loss_on=assistant",
    "model.config=null model.path=org/name model.revision=main model.trust_remote_code=true",
    "slurm={} drill={}",
]


@pytest.mark.parametrize("overrides", ALLOWED)
def test_allowed_and_again_from_its_resolved_yaml(good: Path, overrides: str) -> None:
    """A resolved file writes every key, so that a rule may go by values only, not by what was written."""
    parts = [part.strip() for part in overrides.split(" ")]
    resolved = load(good, parts)
    again = good.parent / "again.yaml"
    again.write_text(resolved.to_yaml())
    assert load(again).values() == resolved.values()


def test_batch_names_the_two_nearest_that_all_ranks_share_out(good: Path) -> None:
    def advice(*more: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load(good, ["batch.micro=3", *more])
        return caught.value.problems[0].do

    assert "a multiple of 3 x the ranks" in advice()
    assert advice("launch.ranks=1").startswith("take batch.global 6 or 9 (3 x 1 rank")
    assert advice("launch.ranks=4", "launch.nodes=2", "batch.global=64").startswith(
        "take batch.global 48 or 72 (3 x 8 ranks"
    )
    cfg = load(good, ["batch.micro=3", "launch.ranks=4", "launch.nodes=2", "batch.global=72"]).config
    assert plan.make(cfg, None, 4, 2).batch.accumulation == 3


@pytest.mark.parametrize("steps", [1, 3])
def test_a_warm_up_longer_than_the_span_is_told_what_works(good: Path, steps: int) -> None:
    given = [f"budget.steps={steps}", "optim.warmup=3"]
    with pytest.raises(ConfigError) as caught:
        load(good, given)
    (problem,) = caught.value.problems
    assert f"budget.steps = {steps}" in problem.what
    for value in (0.05, *range(steps)):
        assert str(value) in problem.do
        load(good, [*given, f"optim.warmup={value}"])


def test_the_stage_follows_the_engine(good: Path) -> None:
    assert load(good).config.shard.stage == 3
    assert load(good, ["shard.engine=ddp"]).config.shard.stage == 0


def test_what_the_scale_mode_comes_to(good: Path) -> None:
    for overrides, mode in (
        ([], "off"),
        (["precision.compute=fp16"], "dynamic"),
        (["reduce.wire=fp16"], "dynamic"),
        (["precision.compute=fp16", "precision.scale.mode=off"], "off"),
        (["precision.scale.mode=static"], "static"),
    ):
        assert scale_mode(load(good, overrides).config) == mode


def test_every_engine_of_the_schema_is_in_the_support_table_with_its_default_stage(good: Path) -> None:
    for engine, support in SUPPORT.items():
        assert load(good, [f"shard.engine={engine}"]).config.shard.stage in support.stages
        for stage in support.stages:
            load(good, [f"shard.engine={engine}", f"shard.stage={stage}"])


@pytest.mark.parametrize(
    ("overrides", "ranks", "why"),
    [
        (["shard.replicas=3"], 4, "does not divide the world of 4 ranks"),
        (["drill.kill_at={attempt: 1, rank: 2}"], 2, "no effect"),
        (["drill.overflow_at={attempts: [1], micro: 5}"], 2, "no effect"),
    ],
)
def test_what_only_the_world_can_tell(good: Path, overrides: list[str], ranks: int, why: str) -> None:
    (problem,) = check_world(load(good, overrides).config, ranks)
    assert why in problem.why


def test_a_world_that_works(good: Path) -> None:
    overrides = [
        "shard.replicas=2",
        "drill.kill_at={attempt: 1, rank: all}",
        "drill.overflow_at={attempts: all, micro: 4, rank: 1}",
    ]
    assert check_world(load(good, overrides).config, 2) == []


def test_zero_1_reduces_once_a_window_unless_told_otherwise(good: Path) -> None:
    one = ["shard.engine=deepspeed", "shard.stage=1"]
    assert load(good, one).config.reduce.when == "last"
    assert load(good, [*one, "reduce.wire=bf16"]).config.reduce.when == "last"
    assert load(good, [*one, "reduce.when=every"]).config.reduce.when == "every"
    assert load(good, ["shard.engine=deepspeed"]).config.shard.stage == 2
    assert load(good, ["shard.engine=deepspeed"]).config.reduce.when == "every"
