"""The sweep without ranks: arms, names, refusals, order, the first-step check."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from swept import CONFIG, here, refusal  # noqa: F401 (a fixture)

from mpdist import cli, sweep, sweep_arms, sweep_file, sweep_first
from mpdist.config import load
from mpdist.errors import DoesNotFit, UsageError
from mpdist.sweep import Asked


def names(*vary: str, arms: tuple[str, ...] = (), files: tuple[str, ...] = (), control: bool = False) -> list[str]:
    return [arm.name for arm in sweep_arms.ask("run.yaml", vary, arms, files, control)]


def arms_of(**asked: Any) -> dict[str, dict[str, Any]]:
    made = sweep.Making(Asked("run.yaml", **asked))
    return {arm.name: dict(arm.settings) for arm in made.arms().arms()}


# -- arms -------------------------------------------------------------------------------------------------------------


def test_names_are_short_and_say_what_differs() -> None:
    assert names("precision.compute=fp32,bf16") == ["fp32", "bf16"]
    assert names("precision.compute=fp32,bf16", "reduce.wire=fp32,bf16") == [
        "fp32-wire-fp32",
        "fp32-wire-bf16",
        "bf16-wire-fp32",
        "bf16-wire-bf16",
    ]
    assert names("optim.lr=1e-4,2e-4") == ["lr-1e-4", "lr-2e-4"]
    assert names("optim.betas=[0.9, 0.95],[0.9, 0.99]") == ["betas-0.9-0.95", "betas-0.9-0.99"]
    assert names("memory.checkpointing=none,every 2") == ["none", "every-2"]
    assert names("optim.fused=true,false") == ["fused-true", "fused-false"]


def test_any_text_makes_a_name_that_is_a_folders_on_every_system() -> None:
    long = "x" * 300
    found = names(f"model.freeze=[a*],[a?],[A*],[{long}],[../..]")
    assert len({name.lower() for name in found}) == 5
    assert all(sweep_arms._NAME.fullmatch(name) and len(name) < 70 for name in found)
    assert found == names(f"model.freeze=[a*],[a?],[A*],[{long}],[../..]"), "a name is the same each time"


def test_config_is_an_arm_where_there_would_be_one_alone() -> None:
    assert names() == ["base"]
    assert names("precision.compute=bf16") == ["base", "bf16"]
    assert names(control=True) == ["base", "base-control"]
    assert names("precision.compute=bf16", control=True) == ["bf16", "bf16-control"]
    assert names(arms=("base:", "pure:precision.compute=bf16,precision.master=compute")) == ["base", "pure"]
    assert names(files=("a/b.yaml", "c/d.yml")) == ["b", "d"]
    assert names("precision.compute=fp32,bf16", control=True) == ["fp32", "bf16", "fp32-control"]


def test_commas_inside_brackets_and_quotes_do_not_part() -> None:
    assert sweep_arms.split("a, [1,2],{b: c, d: (e,f)},'x,y', \"z,\"") == [
        "a",
        "[1,2]",
        "{b: c, d: (e,f)}",
        "'x,y'",
        '"z,"',
    ]
    (arm, _) = sweep_arms.ask("run.yaml", (), ("d:drill.overflow_at.attempts=[1,2,6],optim.lr=1", "b:"), (), False)
    assert arm.settings == ("drill.overflow_at.attempts=[1,2,6]", "optim.lr=1")


@pytest.mark.parametrize(
    ("vary", "arms", "says"),
    [
        (("precision.compute",), (), "--vary precision.compute=fp32,bf16"),
        (("precision.compute=fp32,,bf16",), (), "a key and its values"),
        (("precision.compute=fp32,fp32",), (), "fp32 is there twice"),
        (("optim.lr=1,2", "optim.lr=3,4"), (), "given twice"),
        ((), ("pure",), "a name and the settings"),
        ((), ("precision.compute=bf16",), "a name and the settings"),
        ((), ("a/b:optim.lr=1",), "name it a-b"),
        ((), (".hidden:optim.lr=1",), "name it hidden"),
        ((), ("a:optim.lr=1", "A:optim.lr=2"), "two arms are called a"),
    ],
)
def test_options_that_cannot_be_read(vary: tuple[str, ...], arms: tuple[str, ...], says: str) -> None:
    assert says in refusal(Asked("run.yaml", vary=vary, arms=arms))


def test_every_arm_has_its_value_of_each_key_of_the_treatment() -> None:
    found = arms_of(
        vary=("precision.compute=fp32,bf16",), arms=("pure:precision.compute=bf16,precision.master=compute",)
    )
    assert found == {
        "fp32": {"precision.compute": "fp32", "precision.master": "fp32"},
        "bf16": {"precision.compute": "bf16", "precision.master": "fp32"},
        "pure": {"precision.compute": "bf16", "precision.master": "compute"},
    }


def test_a_default_that_hangs_on_another_key_belongs_to_the_treatment() -> None:
    found = arms_of(vary=("shard.engine=fsdp2,ddp",))
    assert found["fsdp2"] == {"shard.engine": "fsdp2", "shard.stage": 3}
    assert found["ddp"] == {"shard.engine": "ddp", "shard.stage": 0}


def test_a_section_stands_for_what_is_below_it() -> None:
    found = arms_of(arms=("a:precision.compute=fp16", "b:precision.compute=fp16,precision.scale={init: 1024}"))
    assert list(found["a"]) == ["precision.scale"]
    assert found["b"]["precision.scale"]["init"] == 1024
    drilled = arms_of(arms=("a:", "b:drill.overflow_at.attempts=[1]"))
    assert drilled["a"] == dict.fromkeys(drilled["b"])
    assert drilled["b"]["drill.overflow_at.attempts"] == [1]


def test_a_whole_file_is_an_arm_and_differs_where_it_does() -> None:
    Path("other.yaml").write_text("extends: run.yaml\nname: x\nseed: 9\nout_dir: y\noptim: {lr: 1.0}\n")
    assert arms_of(files=("other.yaml",)) == {"base": {"optim.lr": 2e-5}, "other": {"optim.lr": 1.0}}


# -- refused before anything runs ---------------------------------------------------------------------------------------


def test_what_all_arms_have_in_common_is_refused_by_name_all_at_once() -> None:
    Path("other.yaml").write_text("extends: run.yaml\ndata: {seq_len: 32}\neval: {rows: 7}\nbudget: {steps: 11}\n")
    said = refusal(Asked("run.yaml", files=("other.yaml",)))
    assert said.startswith("1 of 2 arms cannot run:")
    assert "arm other: data.seq_len: 64 in base -> 32" in said
    assert "arm other: eval.rows: 256 in base -> 7" in said
    assert "arm other: budget.steps: 10 in base -> 11" in said
    assert "--equal-time 300s" in said


@pytest.mark.parametrize(
    "key", ["seed=1,2", "batch.global=4,8", "eval.every=1,2", "model.path=a,b", "launch.ranks=1,2", "track.every=1,2"]
)
def test_a_key_that_makes_another_experiment_cannot_be_varied(key: str) -> None:
    assert f"every arm: {key.partition('=')[0]} cannot be varied" in refusal(Asked("run.yaml", vary=(key,)))


def test_impossible_combinations_are_named_with_their_arms_and_all_at_once() -> None:
    vary = ("precision.compute=fp32,bf16", "reduce.sum=fp32,wire", "batch.micro=1,3")
    said = refusal(Asked("run.yaml", vary=vary))
    assert said.startswith("6 of 8 arms cannot run:")
    assert (
        "arms fp32-sum-fp32-micro-3, fp32-sum-wire-micro-3, bf16-sum-fp32-micro-3, bf16-sum-wire-micro-3: batch.global"
        in said
    )
    assert "fp32-sum-wire-micro-1" in said.partition("reduce.sum")[0]
    assert said.count("it would have no effect: the wire is FP32") == 1, "one cause is said once"
    near = refusal(Asked("run.yaml", vary=("precision.compue=fp32,bf16",)))
    assert "arm bf16: precision.compue = bf16 (command line)" in near
    assert "did you mean `precision.compute`?" in near


def test_what_a_world_cannot_hold_is_found_for_each_arm_too(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal(Asked("run.yaml", vary=("batch.micro=1,2",), ranks=4))
    assert said.startswith("1 of 2 arms cannot run:\n1. arm micro-2: ")
    monkeypatch.setattr("mpdist.launch.host_memory", lambda: 1000)
    with pytest.raises(DoesNotFit) as caught:
        sweep.run(Asked("run.yaml", vary=("batch.micro=1,2",)), dry_run=True)
    assert "every arm: " in str(caught.value)


def test_two_arms_of_one_run_are_refused() -> None:
    said = refusal(Asked("run.yaml", vary=("precision.compute=fp32",)))
    assert "arm fp32: it is the same run as base" in said
    assert "--control" in said


@pytest.mark.parametrize(
    ("override", "timed", "says"),
    [
        ("launch.nodes=2", None, "launch.nodes = 2 (command line)\n  why: a sweep runs on one node"),
        ("checkpoint.resume=never", None, "goes on"),
        ("checkpoint.resume=runs/old", 60.0, "from the beginning"),
        ("optim.horizon=100", 60.0, "spans its own arm's steps"),
    ],
)
def test_what_no_sweep_can_start_from(override: str, timed: float | None, says: str) -> None:
    assert says in refusal(Asked("run.yaml", (override,), control=True, equal_time=timed))


def test_a_dry_run_prints_the_runs_in_order_and_touches_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run.yaml", "--vary", "precision.compute=fp32,bf16", "--seeds", "2", "--control", "--dry-run", "name=t"]
    assert cli.main(["sweep", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"sweep t: 6 runs, 3 arms x 2 seeds, in {Path.cwd() / 'runs' / 't'}"
    assert lines[1] == "what differs: precision.compute"
    order = ["fp32-seed5", "bf16-seed5", "fp32-control-seed5", "fp32-control-seed6", "bf16-seed6", "fp32-seed6"]
    assert [line.split()[1] for line in lines[4:]] == order
    assert lines[5].split() == ["2", "bf16-seed5", "new", "bf16"]
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--equal-time", "soon"], "'soon' is not a length of time"),
        (["--equal-time", "0"], "a time to train for"),
        (["--seeds", "0"], "whole number above 0"),
        (["--vary", "optim.lr"], "--vary optim.lr"),
    ],
)
def test_a_mistake_on_the_command_line_ends_with_status_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sweep", "run.yaml", *words]) == 2
    assert says in capsys.readouterr().err


# -- order and file -----------------------------------------------------------------------------------------------------


def test_a_linear_drift_cancels_over_a_pair_of_seeds() -> None:
    order = list(sweep_file.alternated(("a", "b", "c"), (0, 1, 2, 3)))
    assert [arm for arm, _ in order[:6]] == ["a", "b", "c", "c", "b", "a"]
    places = {arm: statistics.mean(i for i, run in enumerate(order) if run[0] == arm) for arm in "abc"}
    assert len(set(places.values())) == 1


def test_the_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    arms = (
        sweep_file.Arm("a", {"optim.lr": 1.0, "x": None}),
        sweep_file.Arm("a-control", {"optim.lr": 1.0, "x": None}, True),
    )
    timed = sweep_file.EqualTime(60.0, (sweep_file.Speed("a", 0.5, (0.4, 0.6), 20, 120),))
    order = tuple(sweep_file.alternated(("a", "a-control"), (5, 6)))
    made = sweep_file.Sweep("s", ("optim.lr", "x"), arms, (5, 6), order, "run.yaml", "abc", 2, timed, {"seed": 5})
    sweep_file.write(tmp_path, made)
    assert sweep_file.read(tmp_path) == made
    stored = json.loads((tmp_path / "sweep.json").read_text())
    assert stored["runs"][1] == {"arm": "a-control", "seed": 5, "path": "a-control-seed5"}
    assert stored["order"] == [["a", 5], ["a-control", 5], ["a-control", 6], ["a", 6]]
    assert stored["arms"][1]["control"] is True


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "it is no JSON"),
        ("[]", "it holds no JSON object"),
        ("{}", "no 'format'"),
        ('{"format": 99}', "its format is 99"),
    ],
)
def test_a_file_that_is_no_sweeps(tmp_path: Path, text: str, says: str) -> None:
    assert sweep_file.read(tmp_path) is None
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(UsageError, match=r"sweep\.json cannot be read") as caught:
        sweep_file.read(tmp_path)
    assert says in str(caught.value)


# -- the first step -----------------------------------------------------------------------------------------------------

FP32, BF16 = 2.0**-23, 2.0**-7


def seen(loss: float, labels: int = 100, order: str = "o", weights: str = "w", **data: str | None) -> sweep_first.Seen:
    return sweep_first.Seen(loss, labels, data, order, weights)


def odd(mine: sweep_first.Seen, theirs: sweep_first.Seen, eps: float = FP32, blocks: int | None = 4) -> str | None:
    one, other = sweep_first.Kind(eps, ("fp32", ())), sweep_first.Kind(FP32, ("fp32", ()))
    error = sweep_first.compare("b-seed0", mine, one, "a-seed0", theirs, other, blocks)
    return None if error is None else str(error)


def test_first_losses_may_differ_by_what_the_formats_round() -> None:
    most = (BF16 + FP32) * 2 * 5.0
    assert sweep_first.bound(BF16, FP32, 4, 5.0) == pytest.approx(most, rel=1e-12)
    assert odd(seen(5.0 + 0.99 * most), seen(5.0), BF16) is None
    said = odd(seen(5.0 + 1.01 * most), seen(5.0), BF16)
    assert said is not None
    assert said.startswith("b-seed0 begins with a loss of 5.0789")
    assert "(0.00781 + 1.19e-07) x sqrt(4) x 5" in said
    assert odd(seen(5.00001), seen(5.0)) is not None, "in FP32 the fifth decimal is another experiment"
    assert odd(seen(5.000001), seen(5.0)) is None
    assert sweep_first.bound(FP32, FP32, 1, 0.001) == 2 * FP32, "a loss near 0 is a difference of larger numbers"


def test_the_first_window_and_the_data_are_the_same_in_all_arms() -> None:
    said = odd(seen(5.0, 96), seen(5.0, 95))
    assert said is not None
    assert said.startswith("b-seed0 counts 96 label tokens in its first window, a-seed0 95")
    assert "other data than a-seed0: data.eval" in str(
        odd(seen(5.0, train="x", eval="y"), seen(5.0, train="x", eval="z"))
    )
    assert odd(seen(5.0, train="x", eval=None), seen(5.0, train="x", eval=None)) is None
    assert "takes its rows in another order" in str(odd(seen(5.0, order="p"), seen(5.0)))


def test_the_same_masters_are_the_same_bits_and_others_are_not_asked_for() -> None:
    assert "begins with other weights than a-seed0" in str(odd(seen(5.0, weights="v"), seen(5.0)))
    kinds = [sweep_first.kind(load("run.yaml", list(text)).config) for text in (
        ("precision.compute=bf16",), ("precision.compute=fp32",), ("precision.compute=bf16", "precision.master=compute"),
        ("model.freeze=[model.embed*]",),
    )]  # fmt: skip
    mixed, full, pure, frozen = (one.masters for one in kinds)
    assert mixed == full
    assert len({mixed, pure, frozen}) == 3
    error = sweep_first.compare("b", seen(5.0, weights="v"), kinds[2], "a", seen(5.0), kinds[0], 2)
    assert error is None, "rounded masters are other bits by treatment"


def test_what_fails_is_not_taken_for_another_experiment_and_masks_of_dropout_neither() -> None:
    assert odd(seen(math.nan), seen(5.0)) is None
    assert odd(seen(6.0), seen(5.0), blocks=None) is None
    gpt2 = {"model_type": "gpt2", "vocab_size": 259, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    blocks, dropout = sweep_first.layers(load("run.yaml", [f"model.config={json.dumps(gpt2)}"]).config)
    assert (blocks, dropout) == (3, True)
    assert sweep_first.layers(load("run.yaml").config) == (2, False)
    assert sweep_first.kind(load("run.yaml", ["precision.tf32=true", "launch.device=cuda"]).config).eps == 2.0**-10
    assert sweep_first.kind(load("run.yaml", ["precision.compute=bf16"]).config).eps == BF16
