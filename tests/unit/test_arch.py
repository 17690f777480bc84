"""Shapes from config.json: groups, patterns, look-up without a network, and mistakes."""

from __future__ import annotations

import json
import math
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

SHAPES = Path(__file__).resolve().parents[1] / "shapes"
# Parameters as the files on the hub count them, and one of the shape's ids there.
PUBLISHED = {
    "llama-3.1-8b": (8_030_261_248, "meta-llama/Llama-3.1-8B"),
    "llama-3.1-70b": (70_553_706_496, "meta-llama/Llama-3.1-70B"),
    "llama-3.1-405b": (405_853_388_800, "meta-llama/Llama-3.1-405B"),
    "qwen3-8b": (8_190_735_360, "Qwen/Qwen3-8B"),
    "qwen3-30b-a3b": (30_532_122_624, "Qwen/Qwen3-30B-A3B"),
    "qwen1.5-moe-a2.7b": (14_315_784_192, "Qwen/Qwen1.5-MoE-A2.7B"),
    "gemma-7b": (8_537_680_896, "google/gemma-7b"),
    "gemma-2-9b": (9_241_705_984, "google/gemma-2-9b"),
    "mistral-7b-v0.1": (7_241_732_096, "mistralai/Mistral-7B-v0.1"),
    "mixtral-8x7b": (46_702_792_704, "mistralai/Mixtral-8x7B-v0.1"),
    "gpt2": (124_439_808, "openai-community/gpt2"),
    "opt-1.3b": (1_315_758_080, "facebook/opt-1.3b"),
    "phi-1.5": (1_418_270_720, "microsoft/phi-1_5"),
    "phi-2": (2_779_683_840, "microsoft/phi-2"),
    "phi-3-mini": (3_821_079_552, "microsoft/Phi-3-mini-4k-instruct"),
    "pythia-1.4b": (1_414_647_808, "EleutherAI/pythia-1.4b"),
    "olmo-2-7b": (7_298_617_344, "allenai/OLMo-2-1124-7B"),
    "granite-3.1-8b": (8_170_848_256, "ibm-granite/granite-3.1-8b-base"),
}


def tiny(**changes: Any) -> arch.Arch:
    found = arch.from_mapping(TINY | changes, "test")
    assert isinstance(found, arch.Arch)
    return found


def shape(name: str) -> arch.Arch:
    found = arch.from_mapping(json.loads((SHAPES / f"{name}.json").read_text()), name)
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
    ("model", "count"), [("HuggingFaceTB/SmolLM2-135M", 134_515_008), ("Qwen/Qwen3-1.7B", 1_720_574_976)]
)
def test_the_shipped_configurations_models_are_known_without_a_network(model: str, count: int) -> None:
    found = arch.look(model)
    assert isinstance(found, arch.Arch)
    assert found.total == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_has_the_published_number_of_parameters(name: str) -> None:
    found, known = shape(name), arch.look(PUBLISHED[name][1])
    assert found.total == PUBLISHED[name][0]
    assert isinstance(known, arch.Arch)
    assert (known.params, known.buffer_bytes) == (found.params, found.buffer_bytes)


def test_every_published_shape_has_its_total_here() -> None:
    assert {file.stem for file in SHAPES.glob("*.json")} == set(PUBLISHED)


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


def test_c107_a_shared_expert_meets_every_token() -> None:
    model = tiny(model_type="qwen2_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
                 shared_expert_intermediate_size=48)  # fmt: skip
    assert model.matmul_params == 2 * (ATTENTION + 8 * 64 + 2 * 3 * 64 * 32 + 3 * 64 * 48 + 64) + 96 * 64
    assert (model.intermediate, model.shared_intermediate) == (32, 48)


def test_c107_a_heads_bias_is_no_matrix_product() -> None:
    phi = tiny(model_type="phi", num_key_value_heads=None)
    assert phi.head == 96 * 64 + 96
    assert phi.matmul_params == 2 * (4 * 64 * 64 + 2 * 64 * 112) + 96 * 64
    tied = tiny(model_type="phi", num_key_value_heads=None, tie_word_embeddings=True)
    assert (tied.head, tied.matmul_params) == (96, phi.matmul_params)


def test_a_position_table_that_ends_is_told_apart_from_rotary_positions() -> None:
    gpt2, opt, llama = shape("gpt2"), shape("opt-1.3b"), shape("llama-3.1-8b")
    assert [m.learned_positions for m in (gpt2, opt, llama)] == [True, True, False]
    assert [m.rotary_dim for m in (gpt2, opt, llama, shape("phi-2"))] == [0, 0, 128, 32]
    assert (opt.max_positions, opt.embedding) == (2048, (50272 + 2050) * 2048)  # two rows lie before the first position


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "opt", "word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        ({"model_type": "opt", "do_layer_norm_before": False}, "do_layer_norm_before"),
        ({"model_type": "opt", "layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm"),
    ],
)
def test_a_setting_that_changes_the_parameters_leaves_the_shape_unknown(changes: dict[str, Any], word: str) -> None:
    found = arch.from_mapping(TINY | changes, "test")
    assert isinstance(found, arch.Unknown)
    assert word in found.reason
    assert changes["model_type"] in found.reason


def test_an_unknown_type_is_no_error() -> None:
    found = arch.from_mapping({"model_type": "mamba"}, "test")
    assert isinstance(found, arch.Unknown)
    assert "mamba" in found.reason
    assert "llama" in found.reason
    assert found.was_read


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 3}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"vocab_size": True}, "vocab_size"),
        ({"attention_dropout": 2}, "attention_dropout"),
        ({"model_type": "opt", "ffn_dim": "wide"}, "ffn_dim"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": math.nan}, "rope_theta"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor"),
        ({"layer_types": 3}, "layer_types"),
        ({"layer_types": ["full_attention"] * 9}, "layer_types"),
        ({"model_type": "qwen2", "max_window_layers": "all"}, "max_window_layers"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 1}, "mlp_only_layers"),
        ({"rope_parameters": {"full_attention": {"rope_theta": -1.0}}}, "rope_theta"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
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


def test_a_size_under_a_name_that_its_class_does_not_read_is_refused_inline_and_ignored_in_a_file() -> None:
    opt = {k: v for k, v in TINY.items() if k not in ("intermediate_size", "num_key_value_heads")} | {
        "model_type": "opt"
    }
    with pytest.raises(UsageError, match="intermediate_size") as caught:
        arch.look(config=opt | {"intermediate_size": 112})
    assert "ffn_dim" in caught.value.do
    read = arch.from_mapping(opt | {"intermediate_size": 112}, "test")
    assert isinstance(read, arch.Arch)
    assert read.intermediate == 3072  # what OPTConfig assumes
    found = arch.look(config=opt | {"ffn_dim": 112})
    assert isinstance(found, arch.Arch)
    assert found.intermediate == 112


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
