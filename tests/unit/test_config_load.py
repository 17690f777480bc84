"""Reading: YAML 1.2, parents, the command line, origins, and the way back to YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpdist.config import ConfigError, Resolved, leaves, load

BASE = """\
name: base
model: {config: {model_type: llama, hidden_size: 128}}
data:
  train:
    - {path: a.txt, format: text}
    - {path: b.txt}
  tokenizer: bytes
batch: {micro: 2, global: 32}
optim:
  lr: 1e-4
budget: {steps: 200}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base.yaml", BASE)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, list(overrides))
    return [str(problem) for problem in caught.value.problems]


def test_a_number_like_1e_minus_4_is_a_number(base: Path) -> None:
    assert load(base).config.optim.lr == 1e-4


def test_no_is_text_so_it_is_not_a_truth_value(base: Path) -> None:
    (problem,) = problems(write(base.parent / "c.yaml", "extends: base.yaml\ndeterministic: no\n"))
    assert 'deterministic = "no"' in problem
    assert "c.yaml:2" in problem
    assert "write false" in problem


def test_no_as_a_name_stays_text(base: Path) -> None:
    assert load(base, ["name=no"]).config.name == "no"
    assert load(write(base.parent / "c.yaml", "extends: base.yaml\nname: no\n")).config.name == "no"


def test_every_value_has_its_origin(base: Path) -> None:
    child = write(base.parent / "c.yaml", "extends: base.yaml\nname: child\noptim:\n  eps: 1e-6\n")
    origins = load(child, ["batch.micro=4"]).origins
    assert origins["name"] == f"{child}:2"
    assert origins["optim.eps"] == f"{child}:4"
    assert origins["optim.lr"] == f"{base}:10"
    assert origins["model.config.hidden_size"] == f"{base}:2"
    assert origins["data.train.1.path"] == f"{base}:6"
    assert origins["data.train.1.format"] == "default"
    assert origins["batch.micro"] == "command line"
    assert origins["seed"] == "default"


def test_there_is_an_origin_for_every_leaf_and_for_nothing_else(base: Path) -> None:
    resolved = load(base)
    assert set(resolved.origins) == {name for name, _ in leaves(resolved.values())}


def test_command_line_beats_file_beats_parent_beats_default(base: Path) -> None:
    child = write(base.parent / "c.yaml", "extends: base.yaml\nbatch: {micro: 4}\n")
    assert load(base).config.batch.micro == 2
    assert load(child).config.batch.micro == 4
    assert load(child).config.batch.global_ == 32
    assert load(child, ["batch.micro=8"]).config.batch.micro == 8
    assert load(child, ["batch.micro=8", "batch.micro=16"]).config.batch.micro == 16


def test_the_parents_path_is_relative_to_the_file(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base.parent / "runs").mkdir()
    child = write(base.parent / "runs" / "c.yaml", "extends: ../base.yaml\nname: child\n")
    monkeypatch.chdir("/")
    assert load(child).config.optim.lr == 1e-4


def test_a_list_in_a_child_replaces_the_parents(base: Path) -> None:
    child = write(base.parent / "c.yaml", "extends: base.yaml\ndata: {train: [{path: c.txt}]}\n")
    resolved = load(child)
    assert [source.path for source in resolved.config.data.train] == ["c.txt"]
    assert resolved.origins["data.train.0.path"] == f"{child}:2"


def test_parents_in_a_circle_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "extends: b.yaml\n")
    write(tmp_path / "b.yaml", "extends: a.yaml\n")
    assert any("circle: a.yaml -> b.yaml -> a.yaml" in problem for problem in problems(tmp_path / "a.yaml"))


@pytest.mark.parametrize("parent", ["nowhere.yaml", "[a.yaml, b.yaml]", "3", "''"])
def test_a_parent_that_is_not_one_file_is_refused(tmp_path: Path, parent: str) -> None:
    found = problems(write(tmp_path / "c.yaml", f"seed: 1\nextends: {parent}\n"))
    assert any("extends" in problem and "c.yaml:2" in problem for problem in found)


def test_list_elements_by_number(base: Path) -> None:
    config = load(base, ["data.train.1.path=1e5", "data.train.1.weight=1e1"]).config
    assert (config.data.train[0].path, config.data.train[1].path) == ("a.txt", "1e5")
    assert config.data.train[1].weight == 10
    assert load(base, ["data.train.2.path=c.txt"]).config.data.train[2].path == "c.txt"
    (problem,) = problems(base, "data.train.3.path=c.txt")
    assert "data.train has 2 elements" in problem


def test_text_is_taken_as_it_stands_and_the_rest_is_yaml(base: Path) -> None:
    config = load(
        base,
        ["name=0123", "out_dir={x}", "optim.betas=[0.8, 0.9]", "launch.timeout=2h30m", "memory.checkpointing=every 2"],
    ).config
    assert (config.name, config.out_dir, config.optim.betas) == ("0123", "{x}", (0.8, 0.9))
    assert (config.launch.timeout, config.memory.checkpointing) == (9000.0, "every 2")
    assert load(base, ["name=a=b"]).config.name == "a=b"
    assert load(base, ["model.config.hidden_size=64"]).config.model.config == {"model_type": "llama", "hidden_size": 64}


def test_digits_with_underscores_are_text_as_in_yaml_1_2(base: Path) -> None:
    child = write(base.parent / "c.yaml", "extends: base.yaml\nname: 2024_01\n")
    assert load(child).config.name == "2024_01"
    (problem,) = problems(base, "seed=1_000")
    assert 'seed = "1_000" (command line)' in problem


def test_null_clears(base: Path) -> None:
    config = load(base, ["optim.clip=null", "optim.lr=null", "budget.steps=null", "budget.epochs=2"]).config
    assert config.optim.clip is None
    assert config.optim.lr == 2e-5
    assert (config.budget.steps, config.budget.epochs) == (None, 2)
    child = write(base.parent / "c.yaml", "extends: base.yaml\noptim: null\n")
    assert load(child).config.optim.lr == 2e-5


def test_clearing_what_has_no_default_leaves_it_missing(base: Path) -> None:
    (problem,) = problems(base, "name=null")
    assert problem.startswith("name is not given")


def test_a_value_forgotten_in_a_file_is_not_a_default(base: Path) -> None:
    (problem,) = problems(write(base.parent / "c.yaml", "extends: base.yaml\nseed:\n"))
    assert "seed = null" in problem


@pytest.mark.parametrize("text", ["batch.micro", "=3", "batch..micro=3", ".=1"])
def test_an_override_that_is_none_is_refused(base: Path, text: str) -> None:
    (problem,) = problems(base, text)
    assert "command line" in problem
    assert "key=value" in problem


def test_whole_sections_may_be_given_on_the_command_line(base: Path) -> None:
    resolved = load(base, ["reduce={wire: bf16, when: last}", "drill.kill_at={attempt: 5, rank: all}"])
    assert (resolved.config.reduce.wire, resolved.config.reduce.when) == ("bf16", "last")
    assert resolved.config.drill.kill_at is not None
    assert resolved.config.drill.kill_at.rank == "all"
    assert resolved.origins["drill.kill_at.attempt"] == "command line"
    assert load(base, ["drill.stop_at.attempt=3"]).config.drill.stop_at is not None


def test_the_resolved_yaml_loads_again_to_the_same_values(base: Path) -> None:
    names = [
        'name=it\'s "quoted" \u00e9',
        "data.train.0.fields={text: 'yes'}",
        "model.config.x=[1.5, .inf, null, '1e5', 0x10]",
    ]
    resolved = load(
        base, [*names, "precision.scale.mode=off", "optim.clip=null", "launch.timeout=90s", "optim.eps=1e-9"]
    )
    again = load(write(base.parent / "again.yaml", resolved.to_yaml()))
    assert again.values() == resolved.values()
    assert again.digest() == resolved.digest()


def test_other_yaml_readers_take_the_resolved_yaml_the_same_way(base: Path) -> None:
    yaml = pytest.importorskip("yaml")
    resolved = load(base, ["name=no", "optim.eps=1e-9", "out_dir=12:30"])
    assert yaml.safe_load(resolved.to_yaml()) == resolved.values()


def test_digests(base: Path) -> None:
    def digests(*overrides: str) -> tuple[str, str]:
        resolved: Resolved = load(base, list(overrides))
        return resolved.digest(), resolved.number_digest()

    before = digests()
    assert digests() == before
    watched = digests("track.every=5", "checkpoint.keep=1", "name=other")
    assert watched[0] != before[0]
    assert watched[1] == before[1]
    assert digests("seed=1")[1] != before[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\nb: 2\n", "is not YAML"),
        ("seed: 1\nseed: 2\n", "already given at"),
        ("batch:\n  micro: 1\n  global: 4\n  micro: 2\n", "batch.micro"),
        ("seed: !!python/object:os.system 1\n", "c.yaml:1"),
        ("- a\n- b\n", "a mapping of keys to values"),
        ("model: {config: &x {y: *x}}\n", "an alias inside the value that it names"),
        ("[1, 2]: 3\n", "a key that is not a word"),
        ("a: 1\n---\nb: 2\n", "is not YAML"),
        ("\tname: x\n", "is not YAML"),
        ("name: \x01\n", "is not YAML"),
    ],
)
def test_broken_yaml_is_a_message_not_a_traceback(tmp_path: Path, text: str, said: str) -> None:
    assert any(said in problem for problem in problems(write(tmp_path / "c.yaml", text)))


def test_a_repeated_key_names_both_lines(tmp_path: Path) -> None:
    found = problems(write(tmp_path / "c.yaml", "batch:\n  micro: 1\n  global: 4\n  micro: 2\n"))
    assert any("c.yaml:4" in problem and "c.yaml:2" in problem for problem in found)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in problems(tmp_path / "none.yaml")[0]
    assert "directory" in problems(tmp_path)[0]
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    assert "UTF-8" in problems(tmp_path / "latin.yaml")[0]
    empty = [problem.split(" ")[0] for problem in problems(write(tmp_path / "empty.yaml", "# nothing\n"))]
    assert empty == ["name", "data.train", "batch.global", "no", "no"]  # and no model, no budget


def test_a_date_and_a_large_count(base: Path) -> None:
    child = write(base.parent / "c.yaml", "extends: base.yaml\nname: 2026-01-31\nbudget: {steps: null, tokens: 1e9}\n")
    config = load(child).config
    assert (config.name, config.budget.tokens) == ("2026-01-31", 10**9)


def test_variables_of_the_environment_set_nothing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load(base).digest()
    for name in ("NAME", "SEED", "MPDIST_SEED", "MPDIST_BATCH__MICRO", "BATCH_MICRO", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.setenv(name, "7")
    assert load(base).digest() == before


def test_a_config_cannot_be_changed(base: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(base).config.batch.micro = 3  # type: ignore[misc]
