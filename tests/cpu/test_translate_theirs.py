"""What mpdist says of accelerate, DeepSpeed and transformers, held against those libraries."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from foreign import FILES, FORMATS

from mpdist.errors import UsageError
from mpdist.optim import schedule
from mpdist.translate import accelerate, deepspeed, facts, text, theirs, trainer
from mpdist.translate.command import translate
from mpdist.translate.document import nothing
from mpdist.translate.draft import UNKNOWN, Draft, find

pytestmark = pytest.mark.filterwarnings("ignore")


def asked(folder: Path, name: str, content: str | None = None, **more: str) -> Draft:
    """The draft of one of the files (or other content in its format), with the libraries asked."""
    files: dict[str, str | None] = dict.fromkeys(("accelerate", "deepspeed", "trainer"))
    for format, written in {FORMATS.get(name, name): content or FILES[name], **more}.items():
        path = folder / f"{format}.{'json' if written.startswith('{') else 'yaml'}"
        path.write_text(written)
        files[format] = str(path)
    return translate(files, 8 if files["accelerate"] is None else None)[0]


@pytest.mark.parametrize("name", FILES)
def test_the_libraries_own_classes_take_the_files(tmp_path: Path, name: str) -> None:
    library = asked(tmp_path, name).libraries[FORMATS[name]]
    assert library.version
    assert library.refusal is None


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("fsdp2.yaml", "num_processes: 8", "num_processes: 8\nnum_proceses: 8", "unknown keys"),
        ("fsdp1.yaml", "distributed_type: FSDP", "distributed_type: FSPD", "not a valid DistributedType"),
        ("bare.json", '"stage": 1', '"stage": 1, "overlap_com": true', "Extra inputs are not permitted"),
        ("alone.json", '"min_loss_scale": 4', '"min_loss_scale": 0', "min_loss_scale must be > 0"),
    ],
)
def test_what_the_libraries_refuse_is_passed_on(tmp_path: Path, name: str, old: str, new: str, said: str) -> None:
    assert old in FILES[name]
    refusal = asked(tmp_path, name, FILES[name].replace(old, new)).libraries[FORMATS[name]].refusal
    assert refusal is not None
    assert said in refusal


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bare.json", '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "bfloat16 and fp16 modes cannot be"),
        ("trainer", '{"output_dir": "o", "fp16": true, "bf16": true}', "At most one of fp16 and bf16 can be True"),
    ],
)
def test_the_summary_says_that_the_library_refuses_the_file(tmp_path: Path, name: str, content: str, said: str) -> None:
    summary = text.summary(asked(tmp_path, name, content), [])
    assert re.search(rf"^theirs: \w+ [\d.]+ refuses the file: {said}", summary, re.MULTILINE)


def test_a_trailing_comma_is_taken_by_deepspeed_and_refused_by_accelerate_and_transformers(tmp_path: Path) -> None:
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    draft = asked(tmp_path, "bare.json", '{"train_batch_size": 8,}')
    assert DeepSpeedConfig(draft.deepspeed.path).train_batch_size == 8
    for reader in (HfDeepSpeedConfig, HfTrainerDeepSpeedConfig):
        with pytest.raises(ValueError, match=r"line 1 column \d+"):
            reader(draft.deepspeed.path)
    said = r"takes the file, but it is no strict JSON \(.*deepspeed.json:1: .*while accelerate and transformers .* refuse it"
    assert re.search(said, text.summary(draft, []))
    assert "theirs:" not in text.summary(asked(tmp_path, "bare.json", '{"train_batch_size": 8}'), [])
    with pytest.raises(UsageError, match="twice in one mapping"):
        asked(tmp_path, "bare.json", '{"train_batch_size": 8, "train_batch_size": 9,}')


def test_deepspeed_takes_comments_and_so_does_mpdist(tmp_path: Path) -> None:
    commented = FILES["bare.json"].replace('"train_micro', '// of each GPU\n  "train_micro')
    assert asked(tmp_path, "bare.json", commented).get("batch.micro") == 1


def test_every_field_of_their_classes_has_a_verdict() -> None:
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
    from accelerate.utils import DeepSpeedPlugin
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from transformers import TrainingArguments

    fields = [field.name for field in dataclasses.fields(TrainingArguments)]
    sections = {"deepspeed"}  # a mapping there is a document of its own
    assert [name for name in fields if find(trainer.RULES, (name,)) is None and name not in sections] == []
    for kind in (ClusterConfig, SageMakerConfig):
        names = [field.name for field in dataclasses.fields(kind)]
        assert [name for name in names if find(accelerate.RULES, (name,)) is None] == []
    mine = {"hf_ds_config", "is_train_batch_min", "enable_msamp", "msamp_opt_level"}  # of the object, in no file
    names = [field.name for field in dataclasses.fields(DeepSpeedPlugin) if field.name not in mine]
    assert [name for name in names if find(accelerate.RULES, ("deepspeed_config", name)) is None] == []
    for section, model in (
        ("zero_optimization", DeepSpeedZeroConfig),
        ("fp16", DeepSpeedFP16Config),
        ("bf16", DeepSpeedBF16Config),
    ):
        names = [alias for name, field in model.model_fields.items() for alias in (name, field.alias or name)]
        below = {
            name: (section, name, "x") if find(deepspeed.RULES, (section, name)) is None else (section, name)
            for name in names
        }
        assert [name for name, path in below.items() if find(deepspeed.RULES, path) is None] == []


def test_the_defaults_that_are_written_down_are_theirs(tmp_path: Path) -> None:
    library = theirs.trainer(nothing("trainer"))
    assert {key: library.defaults[key] for key in facts.TRAINER_DEFAULTS} == facts.TRAINER_DEFAULTS
    library = asked(tmp_path, "bare.json").libraries["deepspeed"]
    assert {key: library.defaults[key] for key in facts.DEEPSPEED_DEFAULTS} == facts.DEEPSPEED_DEFAULTS


def test_a_whole_dump_of_training_arguments_is_accounted_for(tmp_path: Path) -> None:
    """As `TrainingArguments.to_json_string` writes it, and as a JSON of the environment of a run holds it."""
    from transformers import TrainingArguments

    made = TrainingArguments(
        output_dir=str(tmp_path / "out"), use_cpu=True, learning_rate=3e-5, report_to="none", hub_token="hf_" + 30 * "x"
    )
    written = json.loads(made.to_json_string())
    assert len(written) > 100
    draft = asked(tmp_path, "trainer", json.dumps(written))
    assert [line.key for line in draft.lines if line.verdict.kind == UNKNOWN] == []
    assert {line.key.partition(".")[0] for line in draft.lines} == set(written)
    assert draft.get("optim.lr") == 3e-5
    assert draft.get("launch.device") == "cpu"
    # What is at its default has nothing to miss: no equal is said of what is in use.
    missed = {line.key for line in draft.lines if line.verdict.kind == "none"}
    assert missed == {"per_device_eval_batch_size", "hub_token"}


@pytest.mark.parametrize("arguments", ["run_clm.json", "sft.yaml", "small.yaml"])
def test_auto_becomes_what_transformers_makes_of_it(tmp_path: Path, arguments: str) -> None:
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    draft = asked(tmp_path, "auto.json", trainer=FILES[arguments])
    names = [field for field in facts.TRAINER_DEFAULTS if field != "num_train_epochs"]
    values = {name: facts.trainer_value(draft, name) for name in names}
    values = {name: float(value) if name == "learning_rate" else value for name, value in values.items()}
    values["bf16"] = facts.flag(values["bf16"])
    steps = 1000
    made = SimpleNamespace(
        **values, world_size=8, save_on_each_node=False, fp16_full_eval=False, bf16_full_eval=False,
        get_warmup_steps=lambda total: facts.warmup(draft) if facts.warmup(draft) >= 1 else -(-total * facts.warmup(draft) // 1),
    )  # fmt: skip
    filled = HfTrainerDeepSpeedConfig(copy.deepcopy(draft.deepspeed.values))
    filled.trainer_config_process(made)
    filled.trainer_config_finalize(made, SimpleNamespace(config=SimpleNamespace(hidden_size=64)), steps)
    assert filled.mismatches == []
    assert len(draft.filled) >= 10
    for key, (value, _) in draft.filled.items():
        # A share of the steps stays one here, until the steps are known.
        found = -(-steps * value // 1) if key.endswith("warmup_num_steps") and value < 1 else value
        assert filled.get_value(key) == found, key


def test_a_mismatch_is_refused_where_transformers_refuses_it(tmp_path: Path) -> None:
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    with pytest.raises(UsageError) as refused:
        asked(tmp_path, "alone.json", trainer=FILES["run_clm.json"])
    values: dict[str, Any] = {**facts.TRAINER_DEFAULTS, **json.loads(FILES["run_clm.json"]), "bf16": False}
    made = SimpleNamespace(
        **values, world_size=8, save_on_each_node=False, fp16_full_eval=False, bf16_full_eval=False, get_warmup_steps=lambda _: 100
    )  # fmt: skip
    filled = HfTrainerDeepSpeedConfig(json.loads(FILES["alone.json"]))
    filled.trainer_config_process(made)
    with pytest.raises(ValueError, match="mismatch"):
        filled.trainer_config_finalize(made, SimpleNamespace(), 1000)
    assert {line.split("ds ")[1].split("=")[0] for line in filled.mismatches} == {
        item.split(" = ")[0].split(". ")[-1] for item in str(refused.value).splitlines() if ", but " in item
    }


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 10])
def test_the_rate_is_theirs_after_the_warm_up_and_one_step_ahead_in_it(kind: str, warmup: int) -> None:
    import torch
    from transformers import get_scheduler

    name = "constant_with_warmup" if kind == "constant" else kind
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    their = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=100)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        their.step()
    our = [schedule(kind, 1.0, warmup, 100)(step) for step in range(1, 101)]
    assert our[warmup:] == pytest.approx(rates[warmup:], abs=1e-12)
    assert our[: max(warmup - 1, 0)] == pytest.approx(rates[1:warmup], abs=1e-12)
