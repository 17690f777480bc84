"""Shapes from config.json: groups, patterns, look-up without a network, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpdist import arch
from mpdist.errors import UsageError

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
ATTENTION = 64 * 64 + 2 * 64 * 32 + 64 * 64
MLP = 3 * 64 * 112


def tiny(**changes: Any) -> arch.Arch:
    found = arch.from_mapping(TINY | changes, "test")
    assert isinstance(found, arch.Arch)
    return found


@pytest.fixture(autouse=True)
def empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "hub"


def test_groups_of_a_tied_and_an_untied_model() -> None:
    untied, tied = tiny(), tiny(tie_word_embeddings=True)
    assert untied.blocks == (ATTENTION + MLP + 128,) * 2
    assert (untied.embedding, untied.head, untied.norms) == (96 * 64, 96 * 64, 64)
    assert (tied.embedding, tied.head) == (96 * 64, 0)
    assert untied.total - tied.total == 96 * 64


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("HuggingFaceTB/SmolLM2-135M", 134_515_008),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
    ],
)
def test_the_shipped_configurations_models_are_known_without_a_network(model: str, count: int) -> None:
    found = arch.look(model)
    assert isinstance(found, arch.Arch)
    assert found.total == count


def test_freeze_patterns_match_whole_names() -> None:
    trainable, frozen = tiny().split(["model.embed_tokens.*", "*.layers.0.*"])
    assert {p.name.split(".")[2] for p in frozen if p.block >= 0} == {"0"}
    assert sum(p.count for p in frozen) == 96 * 64 + tiny().blocks[0]
    assert sum(p.count for p in trainable + frozen) == tiny().total
    assert tiny().split(["model.embed_tokens"])[1] == []


def test_module_patterns_reach_inside_a_module() -> None:
    assert arch.module_matches("model.layers.0.self_attn.q_proj.weight", ["*.self_attn"])
    assert not arch.module_matches("model.layers.0.mlp.up_proj.weight", ["*.self_attn"])
    assert not arch.module_matches("model.norm.weight", ["*.weight"])


def test_c107_flops_leave_the_embedding_out_and_count_the_head_once() -> None:
    matmul = 2 * (ATTENTION + MLP) + 96 * 64
    for model in (tiny(), tiny(tie_word_embeddings=True)):
        assert model.matmul_params == matmul
        assert arch.model_flops_per_token(model, 32) == 6 * matmul + 6 * 2 * 64 * 32
        assert arch.model_flops_per_token(model, 32, causal=False) == 6 * matmul + 12 * 2 * 64 * 32


def test_c107_a_token_meets_only_its_experts() -> None:
    model = arch.from_mapping(
        TINY | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, "test"
    )
    assert isinstance(model, arch.Arch)
    assert model.matmul_params == 2 * (ATTENTION + 8 * 64 + 2 * MLP) + 96 * 64


def test_an_unknown_type_is_no_error() -> None:
    found = arch.from_mapping({"model_type": "mamba"}, "test")
    assert isinstance(found, arch.Unknown)
    assert "mamba" in found.reason
    assert "llama" in found.reason


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 3}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"vocab_size": True}, "vocab_size"),
    ],
)
def test_a_value_that_no_model_can_have_names_its_key(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError) as caught:
        tiny(**changes)
    assert word in caught.value.what
    assert caught.value.why
    assert caught.value.do


def test_a_misspelt_size_in_an_inline_config_is_refused() -> None:
    wrong = {k: v for k, v in TINY.items() if k != "hidden_size"} | {"hiden_size": 64}
    with pytest.raises(UsageError, match="hiden_size") as caught:
        arch.look(config=wrong)
    assert "hidden_size" in caught.value.do
    assert isinstance(arch.look(config=TINY | {"rope_theta": 1e4, "attention_dropout": 0.1}), arch.Arch)


def test_a_folder_is_read_and_its_absence_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"dtype": "bfloat16"}))
    found = arch.look(str(tmp_path))
    assert isinstance(found, arch.Arch)
    assert found.dtype == "bfloat16"
    assert found.source.endswith("config.json")
    absent = arch.look("runs/nowhere/export")
    assert isinstance(absent, arch.Unknown)
    assert absent.missing


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_a_folder_without_a_whole_config_json_is_an_error_in_three_parts(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError) as caught:
        arch.look(str(tmp_path))
    assert str(tmp_path) in caught.value.what
    assert caught.value.why
    assert caught.value.do


def test_a_hub_id_is_found_in_the_local_cache(empty_hub_cache: Path) -> None:
    unknown = arch.look("some/model")
    assert isinstance(unknown, arch.Unknown)
    assert not unknown.missing
    assert "not in the local cache" in unknown.reason
    repo = empty_hub_cache / "models--some--model"
    (repo / "snapshots" / "abc").mkdir(parents=True)
    (repo / "snapshots" / "abc" / "config.json").write_text(json.dumps(TINY))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    for revision in (None, "abc"):
        found = arch.look("some/model", revision=revision)
        assert isinstance(found, arch.Arch)
        assert found.total == tiny().total
    assert isinstance(arch.look("some/model", revision="other"), arch.Unknown)


def test_the_cache_wins_over_the_shapes_that_ship(empty_hub_cache: Path) -> None:
    snapshot = empty_hub_cache / "models--Qwen--Qwen3-0.6B" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(TINY))
    found = arch.look("Qwen/Qwen3-0.6B")
    assert isinstance(found, arch.Arch)
    assert found.vocab == 96
