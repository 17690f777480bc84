"""What a comparison refuses: each thing that may differ beside the treatment, by its name and both values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compared import Made

from mpdist import cli
from mpdist.compare import text
from mpdist.compare.analyse import analyse
from mpdist.compare.tree import Comparison
from mpdist.errors import UsageError

BF16 = ("precision.compute=bf16",)


def two(change: Callable[[Made], Any] | None = None, settings: tuple[str, ...] = (), **other: Any) -> list[Made]:
    """An FP32 and a BF16 run of one seed; the second with a difference more."""
    made = [Made("fp32-seed0", steps=40), Made("bf16-seed0", steps=40, settings=(*BF16, *settings), **other)]
    if change is not None:
        change(made[1])
    return made


def found(made: list[Made], **asked: Any) -> Comparison:
    return analyse([one.run() for one in made], None, **asked)


def keys(made: list[Made], **asked: Any) -> list[str]:
    return [one.key for one in found(made, **asked).refused]


Figure = Callable[[str], None]


def refused_as(one: Comparison) -> str:
    assert (one.pairs, one.verdicts) == ((), ()), "nothing was compared"
    return "refused: " + "; ".join(map(str, one.refused))


def test_runs_that_differ_in_the_treatment_alone_are_compared() -> None:
    compared = found(two())
    assert compared.refused == ()
    assert compared.varied == ("precision.compute",)
    assert len(compared.verdicts) == 1


SETTINGS = {
    "batch": ("batch.global=16", ["batch.global"]),
    "micro-batch": ("batch.micro=4", ["batch.micro"]),
    "sequence length": ("data.seq_len=128", ["data.seq_len"]),
    "order of the data": ("data.shuffle=false", ["data.shuffle"]),
    "packing": ("data.packing=concat", ["data.packing"]),
    "data": ("data.train.0.path=other.jsonl", ["data.train.0.path"]),
    "optimizer": ("optim.betas=[0.9, 0.99]", ["optim.betas"]),
    "weight decay": ("optim.weight_decay=0", ["optim.weight_decay"]),
    "learning rate": ("optim.lr=2e-3", ["optim.lr"]),
    "clip": ("optim.clip=null", ["optim.clip"]),
    "schedule": ("optim.schedule=cosine", ["optim.schedule"]),
    "horizon": ("optim.horizon=500", ["optim.horizon"]),
    "length": ("budget.steps=200", ["budget.steps"]),
    "evaluation points": ("eval.every=10", ["eval.every"]),
    "evaluation rows": ("eval.rows=64", ["eval.rows"]),
    "engine": ("shard.engine=ddp", ["shard.engine", "shard.stage"]),
    "stage": ("shard.stage=2", ["shard.stage"]),
    "checkpointing": ("memory.checkpointing=full", ["memory.checkpointing"]),
    "compilation": ("model.compile=blocks", ["model.compile"]),
    "model": ("model.config.hidden_size=64", ["model.config.hidden_size"]),
    "start": ("checkpoint.resume=elsewhere", ["checkpoint.resume"]),
    "saves": ("checkpoint.every=10", ["checkpoint.every"]),
    "logging": ("track.every=5", ["track.every"]),
    "determinism": ("deterministic=false", ["deterministic"]),
}


@pytest.mark.parametrize(("setting", "expected"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_beside_the_treatment_is_refused_by_name(setting: str, expected: list[str], figure: Figure) -> None:
    compared = found(two(settings=(setting,)))
    refused = compared.refused
    assert [one.key for one in refused] == expected
    values = dict(refused[0].values)
    assert set(values) == {"fp32", "bf16"}
    assert len(set(values.values())) == 2
    assert all(value in str(refused[0]) for value in values.values())
    figure(refused_as(compared))


ENVIRONMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"versions": {"mpdist": "0.1.0", "torch": "2.12.0", "transformers": "5.24.0"}}, "versions.torch"),
    "package more": ({"versions": {"mpdist": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "triton": "3"}}, "versions.triton"),
    "python": ({"python": "3.12.1"}, "python"),
    "device": ({"device": "NVIDIA H100 80GB HBM3"}, "device"),
    "devices": ({"devices": ["cpu", "cpu"]}, "devices"),
    "cpu": ({"cpu": "another CPU"}, "cpu"),
    "cores": ({"cores": 8}, "cores"),
    "threads": ({"threads": 2}, "threads"),
    "backend": ({"backend": "nccl"}, "backend"),
    "ranks": ({"ranks": 2}, "ranks"),
    "nodes": ({"nodes": 2}, "nodes"),
    "attention": ({"attention": "eager"}, "attention"),
    "kernel of the loss": ({"loss": "plain"}, "loss"),
    "contents of the data": ({"data": {"train": "d2", "eval": "e1"}}, "data.train.digest"),
    "contents of the evaluation": ({"data": {"train": "d1", "eval": "e2"}}, "data.eval.digest"),
    "order of the samples": ({"order": "another"}, "data.order"),
    "initial weights": ({"initial_weights": "others"}, "model.initial_weights"),
    "not recorded": ({"threads": None}, "threads"),
}  # fmt: skip


@pytest.mark.parametrize(("env", "key"), ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_what_a_session_found_around_it_is_refused_by_name(env: dict[str, Any], key: str, figure: Figure) -> None:
    compared = found(two(env=env))
    assert [one.key for one in compared.refused] == [key]
    figure(refused_as(compared))


@pytest.mark.parametrize(("name", "value"), [("accumulation", 2), ("tokens_per_step", 1024)])
def test_a_batch_of_another_shape_under_the_same_settings_is_refused_by_name(
    name: str, value: int, figure: Figure
) -> None:
    """As a world of another size makes it."""
    one, other = (made.run() for made in two())
    batch = {**other.plan["batch"], name: value}
    other = type(other)(**{**vars(other), "plan": {**other.plan, "batch": batch}})
    compared = analyse([one, other], None)
    assert [one.key for one in compared.refused] == [f"batch.{name}"]
    figure(refused_as(compared))


def test_96_against_95_label_tokens_in_step_12_names_step_12(figure: Figure) -> None:
    def change(made: Made) -> None:
        for row in made.rows:
            row["train/label_tokens"] = row["step"] * 96 - (row["step"] >= 12)

    made = two(change)
    for row in made[0].rows:
        row["train/label_tokens"] = row["step"] * 96
    compared = found(made)
    refused = compared.refused
    assert [one.key for one in refused] == ["data.label_tokens"]
    assert "96 against 95 label tokens in step 12 (fp32-seed0 against bf16-seed0)" in str(refused[0])
    figure(refused_as(compared))


def test_between_logged_steps_the_stretch_is_named() -> None:
    made = [Made("fp32-seed0", steps=40, every=10), Made("bf16-seed0", steps=40, every=10, settings=BF16)]
    for row in made[1].rows:
        row["train/label_tokens"] -= row["step"] >= 12
    assert "4,800 against 4,799 label tokens in steps 11 to 20" in str(found(made).refused[0])


def test_windows_given_up_after_an_overflow_make_other_samples() -> None:
    """on_overflow: next leaves the window out; retry does not, and is compared."""
    skips = [(1, "non-finite gradients"), (5, "non-finite gradients")]
    fp16 = ("precision.compute=fp16", "precision.scale.on_overflow=next")
    made = [Made("fp32-seed0", steps=40), Made("fp16-seed0", steps=40, settings=fp16, skips=skips, scale=65536.0)]
    refused = found(made).refused
    assert [one.key for one in refused] == ["data.samples"]
    assert "from step 1 on they are other samples: fp16-seed0 gave window 0 up" in str(refused[0])
    made[1].settings = ("precision.compute=fp16",)
    assert found(made).refused == ()


def test_c112_masters_that_are_not_what_was_asked_for_are_refused(figure: Figure) -> None:
    """Both asked for FP32 masters, the ledger measured others."""
    compared = found(two(masters="bfloat16"))
    refused = compared.refused
    assert [one.key for one in refused] == ["masters", "moments"]
    assert str(refused[0]) == "masters: float32 in fp32, bfloat16 in bf16"
    figure(refused_as(compared))


@pytest.mark.parametrize(("row", "key"), [("gradients", "gradients"), ("buffers", "buffers"), ("working", "working")])
def test_c112_other_dtypes_that_ranks_held_are_refused_where_no_setting_explains_them(row: str, key: str) -> None:
    one, other = (made.run() for made in two(settings=("precision.compute=fp32",)))
    ledger = [held for held in other.ledger if held["row"] != row]
    ledger.append({"row": row, "rank": 0, "dtype": "bfloat16", "elements": 100, "measured_bytes": 200})
    other = type(other)(**{**vars(other), "ledger": tuple(ledger)})
    assert [one.key for one in analyse([one, other], None).refused] == [key]


def test_c112_pure_16_bit_is_flagged_and_is_refused_where_the_treatment_is_another(figure: Figure) -> None:
    """BF16 with FP32 masters beside pure BF16."""
    pure = Made("pure-seed0", steps=40, settings=(*BF16, "precision.master=compute"), masters="bfloat16")
    mixed = Made("mixed-seed0", steps=40, settings=BF16)
    declared = found([mixed, pure])
    assert declared.refused == ()
    assert [note.text for note in declared.notes if note.kind == "masters"] == [
        "pure: its masters are bfloat16: pure 16-bit training, NO FP32 masters"
    ]
    rows = {row[0]: row[1:] for row in text.arms(declared).rows}
    assert rows["compute / masters / wire / sum"] == ["bf16 / fp32 / fp32 / fp32", "bf16 / bf16 / fp32 / fp32"]
    assert rows["moments, gradients, buffers"] == ["fp32, fp32, fp32", "bf16, fp32, fp32"]
    narrow = found([mixed, pure], treatment=["precision.compute"])
    assert [one.key for one in narrow.refused] == ["precision.master"]
    figure(refused_as(narrow))


def test_pure_runs_of_two_dtypes_hold_other_bits_and_are_compared() -> None:
    made = [Made(f"{dtype}-seed0", steps=40, settings=(f"precision.compute={dtype}", "precision.master=compute"),
                 masters=long, env={"initial_weights": dtype}) for dtype, long in (("bf16", "bfloat16"), ("fp16", "float16"))]  # fmt: skip
    assert keys(made) == []


def test_the_seed_sets_have_to_be_the_same(figure: Figure) -> None:
    made = [*two(), Made("fp32-seed1", 1, 40)]
    compared = found(made)
    refused = compared.refused
    assert [one.key for one in refused] == ["seeds"]
    assert str(refused[0]) == "seeds: 0, 1 in fp32, 0 in bf16"
    figure(refused_as(compared))
    assert found(made, allow=["seeds"]).seeds == (0,)


def test_runs_of_one_arm_have_to_be_alike_too() -> None:
    made = [*two(), Made("fp32-seed1", 1, 40), Made("bf16-seed1", 1, 40, settings=("precision.compute=fp16",))]
    refused = found(made).refused
    assert [one.key for one in refused] == ["precision.compute"]
    assert dict(refused[0].values) == {"bf16-seed0": "bf16", "bf16-seed1": "fp16"}


def test_first_losses_speak_where_no_digest_was_recorded() -> None:
    def change(made: Made) -> None:
        made.rows[0]["train/loss"] *= 1.2

    made = two(change, env={"initial_weights": None})
    refused = found(made).refused
    assert [one.key for one in refused] == ["model.first_loss"]
    assert "other initial weights, or a loss that is not divided by its window's label tokens" in str(refused[0])


def test_all_differences_are_told_at_once_and_nothing_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = two(settings=("optim.lr=2e-3", "eval.rows=64"), env={"threads": 2})
    paths = [str(one.write(tmp_path)) for one in made]
    assert cli.main(["compare", *paths]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "3 differences that are not the treatment (precision.*, reduce.*)" in told.err
    for line in (
        "optim.lr: 0.001 in fp32, 0.002 in bf16",
        "eval.rows: 32 in fp32, 64 in bf16",
        "threads: 1 in fp32, 2 in bf16",
    ):
        assert line in told.err
    assert cli.main(["compare", *paths, "--json"]) == 2
    written = json.loads(capsys.readouterr().out)
    assert [one["key"] for one in written["refused"]] == ["optim.lr", "eval.rows", "threads"]
    assert written["refused"][0]["values"] == {"fp32": "0.001", "bf16": "0.002"}
    assert written["matched_steps"] == written["verdicts"] == []


def test_what_is_allowed_stands_in_the_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = two(
        settings=("optim.lr=2e-3",), env={"versions": {"mpdist": "0.1.0", "torch": "2.12.0", "transformers": "5.24.0"}}
    )
    paths = [str(one.write(tmp_path)) for one in made]
    assert cli.main(["compare", *paths, "--allow", "optim.lr"]) == 2
    assert "versions.torch" in capsys.readouterr().err
    assert cli.main(["compare", *paths, "--allow", "optim.lr", "--allow", "versions"]) == 0
    head = capsys.readouterr().out.partition("verdicts")[0]
    assert "ALLOWED    optim.lr: 0.001 in fp32, 0.002 in bf16" in head
    assert "ALLOWED    versions.torch: 2.13.0 in fp32, 2.12.0 in bf16" in head


def test_a_declared_treatment_takes_the_place_of_the_default() -> None:
    made = [Made("none-seed0", steps=40), Made("full-seed0", steps=40, settings=("memory.checkpointing=full",))]
    assert found(made, treatment=["memory.checkpointing"]).refused == ()
    assert found(made, treatment=["memory"]).varied == ("memory.checkpointing",)
    assert keys(two(), treatment=["memory.checkpointing"]) == ["precision.compute"]


def test_a_wrong_key_gets_the_nearest_right_one() -> None:
    with pytest.raises(UsageError, match=r"precision\.compute"):
        found(two(), treatment=["precison.compute"])
    with pytest.raises(UsageError, match=r"optim\.lr"):
        found(two(settings=("optim.lr=2e-3",)), allow=["optim.rl"])
    with pytest.raises(UsageError, match="nothing but the treatment"):
        found(two(), allow=["optim.lr"])


def test_indifferent_settings_may_differ() -> None:
    assert (
        keys(two(settings=("checkpoint.keep=7", "track.wandb.mode=offline", "launch.timeout=5m", "out_dir=elsewhere")))
        == []
    )


def test_what_is_worth_knowing_is_noted_and_stops_nothing() -> None:
    def change(made: Made) -> None:
        made.status = {"state": "diverged", "reason": "20 attempts in a row were skipped"}

    noted = found(two(change, env={"host": "node2", "variables": ["OMP_NUM_THREADS", "NCCL_P2P_DISABLE"]}))
    told = {note.kind: note.text for note in noted.notes}
    assert noted.refused == ()
    assert told["state"] == "bf16-seed0: diverged at step 40: 20 attempts in a row were skipped"
    assert told["host"] == "the runs ran on 2 hosts: node1 and node2"
    assert "NCCL_P2P_DISABLE" in told["variables"]


def test_versions_that_changed_at_a_resume_are_told_in_order() -> None:
    one, other = (made.run() for made in two())
    later = {**other.env, "versions": {**other.env["versions"], "torch": "2.14.0"}}
    other = type(other)(**{**vars(other), "envs": (other.env, later)})
    assert str(analyse([one, other], None).refused[0]) == "versions.torch: 2.13.0 in fp32, 2.13.0, then 2.14.0 in bf16"


def test_settings_that_changed_at_a_resume_are_refused() -> None:
    one, other = (made.run() for made in two())
    resumed = {
        "event": "resume",
        "step": 20,
        "attempt": 20,
        "rank": 0,
        "reason": "",
        "changes": ["launch.ranks: 2 -> 1"],
    }
    other = type(other)(**{**vars(other), "events": (*other.events, resumed)})
    assert [one.key for one in analyse([one, other], None).refused] == ["sessions"]
