"""Everything that is wrong is reported at once, with its origin and the nearest right key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpdist.config import ConfigError, load
from mpdist.config.describe import all_keys
from mpdist.errors import MpdistError

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


def problems(path: Path, *overrides: str) -> list[MpdistError]:
    with pytest.raises(ConfigError) as caught:
        load(path, list(overrides))
    assert caught.value.status == 2
    return caught.value.problems


def test_five_mistakes_at_five_depths_are_five_problems_with_suggestions(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        """\
sed: 1
optim: {learning_rate: 1e-4}
precision: {scale: {intervall: 5}}
data: {train: [{path: a.txt, fields: {txet: body}}], tokenizer: bytes}
drill: {kill_at: {attempt: 5, rnk: 1}}
name: bad
model: {config: {model_type: llama}}
batch: {global: 8}
budget: {steps: 10}
"""
    )
    found = {problem.what.split(" ")[0]: problem for problem in problems(path)}
    assert set(found) == {
        "sed",
        "optim.learning_rate",
        "precision.scale.intervall",
        "data.train.0.fields.txet",
        "drill.kill_at.rnk",
    }
    assert "bad.yaml:1" in found["sed"].what
    assert "`seed`" in found["sed"].do
    assert "`optim.lr`" in found["optim.learning_rate"].do
    assert "`precision.scale.interval`" in found["precision.scale.intervall"].do
    assert "text" in found["data.train.0.fields.txet"].do
    assert "`drill.kill_at.rank`" in found["drill.kill_at.rnk"].do


def test_unknown_keys_types_ranges_missing_keys_and_rules_come_together(good: Path) -> None:
    found = problems(
        good,
        "optim.lrr=1",
        "batch.micro=two",
        "optim.eps=-1",
        "name=null",
        "shard.stage=0",
        "precision.compute=fp8",
        "reduce.sum=wire",
        "data.train.0.format=txt",
    )
    names = {problem.what.split(" ")[0] for problem in found}
    assert names == {
        "optim.lrr",
        "batch.micro",
        "optim.eps",
        "name",
        "shard.stage",
        "precision.compute",
        "reduce.sum",
        "data.train.0.format",
    }


def test_every_problem_says_what_why_and_what_to_do(good: Path) -> None:
    for problem in problems(good, "optim.lrr=1", "batch.micro=two", "shard.stage=0", "budget.epochs=1", "name=null"):
        assert problem.what
        assert problem.why
        assert problem.do


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("btach={}", "batch"),
        ("batch.mirco=1", "batch.micro"),
        ("batch.Global=1", "batch.global"),
        ("lr=1e-4", "optim.lr"),
        ("wire=bf16", "reduce.wire"),
        ("shard.wire=bf16", "reduce.wire"),
        ("optim.max_grad_norm=1", "optim.clip"),
        ("gradient_checkpointing=true", "memory.checkpointing"),
        ("track.wandb.projet=x", "track.wandb.project"),
        ("data.train.0.wieght=2", "data.train.0.weight"),
        ("drill.overflow_at.attempt=[1]", "drill.overflow_at.attempts"),
    ],
)
def test_the_nearest_right_key(good: Path, written: str, right: str) -> None:
    assert any(problem.do == f"did you mean `{right}`?" for problem in problems(good, written))


def test_an_unknown_key_in_every_section_is_refused(good: Path) -> None:
    for name, key in all_keys():
        if key.section is not None:
            inside = f"{name}{'.0' if key.kind == 'list' else ''}.zzz".replace(".N.", ".0.")
            found = problems(good, f"{inside}=1")
            assert any(problem.what.startswith(f"{inside} = 1 (command line)") for problem in found), inside


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("seed=-1", "a whole number >= 0"),
        ("seed=1.5", "a whole number >= 0"),
        ("precision.scale.init=abc", "a number >= 1e-18"),
        ("precision.scale.growth=1e300", "a number > 1 and <= 65536"),
        ("seed=true", "a whole number >= 0"),
        ("deterministic=1", "true or false"),
        ("name=a/b", "one folder name"),
        ("name=.hidden", "one folder name"),
        ("batch=3", "a mapping"),
        ("data.train={path: x}", "a list of mappings"),
        ("data.train=[]", "a list of mappings, not empty"),
        ("data.train=[x]", "a mapping"),
        ("optim.betas=[0.9]", "a list of two numbers, each >= 0 and < 1"),
        ("optim.betas=[0.9, 1.0]", "a list of two numbers"),
        ("optim.lr=.inf", "a number >= 0"),
        ("optim.lr='1e-4'", "a number >= 0"),
        ("optim.clip=0", "a number > 0 or null"),
        ("shard.stage=4", "0, 1, 2 or 3"),
        ("shard.engine=zero", "ddp, fsdp2 or deepspeed"),
        ("reduce.wire=null", "not given"),
        ("memory.checkpointing=every 0", "none, full, selective or 'every N'"),
        ("memory.loss_chunk=0", "auto or a whole number >= 1"),
        ("launch.timeout=10 minutes", "a length of time"),
        ("launch.timeout=0", "a length of time"),
        ("launch.port=70000", "auto or a whole number >= 1 and <= 65535"),
        ("drill.exit_at={attempt: 0}", "a whole number >= 1"),
        ("drill.overflow_at.attempts=[]", "a list of whole numbers >= 1, not empty or all"),
        ("drill.overflow_at.attempts=some", "a list of whole numbers >= 1, not empty or all"),
        ("drill.kill_at.attempt=x", "a whole number >= 1"),
        ("model.freeze=embed", "a list of texts"),
        ("data.train.0.fields={text: 3}", "text"),
    ],
)
def test_wrong_values(good: Path, override: str, why: str) -> None:
    if why == "not given":  # a null clears what has a default
        assert load(good, [override]).config.reduce.wire == "fp32"
        return
    found = problems(good, override)
    assert len(found) == 1, [str(problem) for problem in found]
    assert found[0].what.startswith(override.split("=")[0].split(".")[0])
    assert why in found[0].why
    assert "command line" in found[0].what


def test_a_value_close_to_a_right_one_is_suggested(good: Path) -> None:
    (problem,) = problems(good, "optim.schedule=cosin")
    assert problem.do == "did you mean cosine?"
    (problem,) = problems(good, "memory.checkpointing=every 0")
    assert "did you mean" not in problem.do  # 'every N' is in quotation marks, and no word to write as it stands


@pytest.mark.parametrize(("word", "ours"), [("float16", "fp16"), ("Float32", "fp32"), ("bfloat16", "bf16")])
def test_other_words_for_a_dtype_lead_to_ours(good: Path, word: str, ours: str) -> None:
    (problem,) = problems(good, f"precision.compute={word}")
    assert problem.do == f"did you mean {ours}?"


def test_a_section_that_the_command_line_made_comes_from_there(good: Path) -> None:
    (problem,) = problems(good, "optm.lr=1")
    assert problem.what == "optm (command line)"


@pytest.mark.parametrize(
    "override",
    [
        "track.wandb.api_key=SECRET1234",
        "hf_token=SECRET1234",
        "token=SECRET1234",
        "model.config.password=SECRET1234",
        "name=hf_" + "SECRET1234" * 3,
        "track.wandb.project=" + "0123456789" * 4,
        "data.train.0.path=https://me:SECRET1234@host/x",
        "model.config.x=[a, hf_SECRET1234SECRET1234]",
    ],
)
def test_secrets_are_refused_and_not_repeated(good: Path, override: str) -> None:
    found = problems(good, override)
    text = "\n".join(str(problem) for problem in found)
    assert "secret" in text
    assert "WANDB_API_KEY" in text
    assert override.partition("=")[2] not in text
    assert "SECRET1234" not in text


def test_what_only_looks_like_a_secret_from_afar_is_fine(good: Path) -> None:
    config = load(
        good,
        ["model.config.bos_token_id=1", "model.config.pad_token=x", "data.tokenizer=hf_tokenizer", "name=sk-run"],
    ).config
    assert config.model.config is not None
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert (
        load(good, ["model.config=null", "model.path=a/b", f"model.revision={commit}"]).config.model.revision == commit
    )


def test_a_misspelt_key_is_one_mistake_even_where_the_right_one_is_required(tmp_path: Path) -> None:
    text = """
nam: run
modl: {config: {model_type: llama}}
data: {trian: [{path: a.txt}], tokenizer: bytes}
batch: {globl: 8}
bugdet: {steps: 3}
"""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    found = [error.do for error in caught.value.problems]
    right = ("name", "model", "data.train", "batch.global", "budget")
    assert sorted(found) == sorted(f"did you mean `{key}`?" for key in right)


def test_a_file_that_means_too_much_or_never_ends_is_refused_at_once(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.yaml"
    levels = [f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 10)}]" for i in range(1, 10)]
    bomb.write_text("\n".join(["k0: &k0 [a]", *levels]))
    assert "aliases hold more than 100,000 values" in problems(bomb)[0].why
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        assert "not a regular file" in problems(path)[0].why


def test_merge_keys_are_said_not_to_be_read(good: Path) -> None:
    good.write_text(GOOD + "optim: &o {lr: 1e-4}\nmemory: {<<: *o}\n")
    assert "merge keys are not read" in next(p for p in problems(good) if p.what.startswith("memory.<<")).do
