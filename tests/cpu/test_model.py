"""Models of many families: loss and gradients as transformers' own, blocks, freezing, and weights read bit for bit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpdist import model as models
from mpdist.errors import CheckpointError, UsageError
from mpdist.loss import head_loss

_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 97, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
_GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 97, "bos_token_id": None, "eos_token_id": None,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "llama-tied": {**_SIZES, "tie_word_embeddings": True},
    "qwen3": _SIZES,
    "phi": _SIZES,  # a head with a bias
    "gpt2": _GPT2,
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97},
    "gemma2": {**_SIZES, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_SIZES, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "granite": {**_SIZES, "logits_scaling": 4.0, "embedding_multiplier": 2.0},
    "cohere": {**_SIZES, "logit_scale": 0.25},
    "recurrent_gemma": {**_SIZES, "attention_window_size": 32, "logits_soft_cap": 2.0},
    "mixtral": {**_SIZES, "num_local_experts": 4, **_EXPERTS},
    "qwen3_moe": {**_SIZES, "num_experts": 4, "moe_intermediate_size": 24, **_EXPERTS},
}
_WHOLE = {"gemma2", "gemma3_text", "granite", "cohere", "recurrent_gemma", "mixtral", "qwen3_moe"}


def _config(name: str, **changes: Any) -> Any:
    values = {"model_type": name.partition("-")[0], **CONFIGS[name], **changes}
    return models.read_config(models.Source(None, values, 0))


def _random(name: str, **changes: Any) -> Any:
    """A model of transformers' own making, with weights large enough that every part of it matters."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(_config(name, **changes), dtype=torch.float32)
    for param in made.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.2)
    return made.train()


def _saved(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    made = _random(name).to(dtype)
    made.save_pretrained(folder, **options)
    return made


def _packed() -> tuple[Tensor, Tensor, Tensor]:
    """ids, position_ids, labels as transformers wants them (it shifts): rows of 6 and 10 tokens, the second padded."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 97, (2, 16), generator=g)
    labels = ids.clone()
    labels[:, [0, 6]] = -100
    labels[1, 10:] = -100
    return ids, torch.cat([torch.arange(6), torch.arange(10)]).expand(2, 16).contiguous(), labels


def _shifted(labels: Tensor) -> tuple[Tensor, Tensor]:
    """index and targets as the data gives them."""
    moved = torch.full_like(labels, -100)
    moved[:, :-1] = labels[:, 1:]
    index = (moved.view(-1) != -100).nonzero()[:, 0]
    return index, moved.view(-1)[index]


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_transformers(name: str) -> None:
    made = _random(name)
    ids, positions, labels = _packed()
    theirs = made(input_ids=ids, position_ids=positions, labels=labels, use_cache=False).loss
    theirs.backward()
    expected = {n: p.grad.clone() for n, p in made.named_parameters()}
    made.zero_grad(set_to_none=True)

    way = models.give_loss(made, 5)
    index, targets = _shifted(labels)
    objective, loss, auxiliary = made(
        input_ids=ids, position_ids=positions, index=index, targets=targets, factor=torch.tensor(1.0 / len(targets))
    )
    assert (auxiliary is not None) == (name in ("mixtral", "qwen3_moe"))
    total = objective if auxiliary is None else objective + auxiliary
    total.backward()
    assert total.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert loss.item() == pytest.approx(objective.item() * len(targets), rel=1e-6)
    largest = max(g.abs().max().item() for g in expected.values())
    for n, p in made.named_parameters():  # a key's bias has no gradient but rounding, so the scale is the whole model's
        assert (p.grad - expected[n]).abs().max() <= 1e-5 * max(expected[n].abs().max().item(), 1e-2 * largest), n
    assert way.startswith("whole logits") == (name in _WHOLE)


def test_a_head_is_recognised_by_what_it_does_on_the_meta_device_too() -> None:
    for name, whole in {"llama": False, "gpt2": False, "granite": True, "cohere": True}.items():
        built = models.build(_config(name), "auto")
        assert next(built.parameters()).is_meta
        assert models.give_loss(built, 5).startswith("whole logits") == whole
        assert next(built.parameters()).is_meta
        assert built.get_output_embeddings().weight.shape == (97, 32)  # type: ignore[operator]
    # A scale of one changes nothing, whatever its name.
    assert models.give_loss(models.build(_config("cohere", logit_scale=1.0), "auto"), 5) == "chunked head"


class Plain(nn.Module):
    """As foreign code may be: no config, positions or cache, and logits that are doubled."""

    base_model_prefix = "inner"

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Embedding(97, 8), nn.Linear(8, 97)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> Any:
        class Out:
            logits = self.head(self.inner(input_ids)) * 2.0

        return Out


def test_a_forward_without_position_ids_or_cache_is_called_without_them() -> None:
    plain = Plain()
    assert models.give_loss(plain, 5).startswith("whole logits")
    ids, positions, labels = _packed()
    index, targets = _shifted(labels)
    objective, _, _ = plain(
        input_ids=ids, position_ids=positions, index=index, targets=targets, factor=torch.tensor(1.0)
    )
    weight = plain.head.weight * 2.0
    assert plain.head.bias is not None
    expected = head_loss(plain.inner(ids), weight, plain.head.bias * 2.0, index, targets, torch.tensor(1.0), 100)[0]
    assert objective.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_router_loss_without_a_weight_is_refused() -> None:
    made = Plain()
    made.config = SimpleNamespace(output_router_logits=True)  # type: ignore[assignment]
    with pytest.raises(UsageError, match="router loss"):
        models.give_loss(made, 5)


def test_a_router_loss_enters_only_where_the_config_asks_for_it() -> None:
    made = _random("mixtral", output_router_logits=False)
    assert models.give_loss(made, 5) == "chunked head"


def test_blocks_are_the_repeated_layers_not_the_experts_inside_them() -> None:
    for name in CONFIGS:
        built = models.build(_config(name), "auto")
        blocks = models.find_blocks(built)
        assert len(blocks) == 2, name
        inside = sum(p.numel() for block in blocks for p in block.parameters())
        outside = sum(p.numel() for p in built.parameters()) - inside
        assert outside <= 2 * 97 * 32 + 64 * 32 + 97 + 5 * 32, name  # embeddings, head and norms at most


def test_parameters_are_fp32_on_the_meta_device_and_buffers_real_and_fp32() -> None:
    for name in ("llama", "gemma3_text", "gpt2"):
        built = models.build(_config(name, dtype="bfloat16"), "auto")
        assert all(p.is_meta and p.dtype == torch.float32 for p in built.parameters())
        expected = dict(_random(name).named_buffers())
        found = dict(built.named_buffers())
        assert found.keys() == expected.keys()
        for key, buffer in found.items():
            assert torch.equal(buffer, expected[key]), key
            assert not buffer.is_floating_point() or buffer.dtype == torch.float32


# -- freezing -------------------------------------------------------------------------------------------------------------


def test_freeze_matches_names_and_says_what_it_cannot_do() -> None:
    built = models.build(_config("llama"), "auto")
    models.freeze(built, ["model.embed_tokens.*", "*.layers.0.*"])
    frozen = {n for n, p in built.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in built.named_parameters() if "embed_tokens" in n or ".layers.0." in n}
    with pytest.raises(UsageError, match=r"lm_heat.*matches no parameter"):
        models.freeze(built, ["lm_heat.*"])
    with pytest.raises(UsageError, match="nothing to train"):
        models.freeze(built, ["*"])


# -- weights --------------------------------------------------------------------------------------------------------------


def _read(folder: Path) -> tuple[dict[str, Tensor], str]:
    """Every parameter, read in three slices of rows, as ranks would."""
    source = models.Source(str(folder), None, 0)
    config = models.read_config(source)
    built = models.build(config, "auto")
    read, how, spare = models.open_weights(source, config, built, torch.device("cpu"))
    assert spare == []
    found = {}
    for name, param in built.named_parameters():
        cuts = [0, len(param) // 3, len(param) // 2, len(param)]
        found[name] = torch.cat([read(name, a, b) for a, b in itertools.pairwise(cuts)])
    return found, how


def _same(found: dict[str, Tensor], made: nn.Module) -> bool:
    expected = {n: p.detach() for n, p in made.named_parameters()}
    return found.keys() == expected.keys() and all(torch.equal(found[n], p) for n, p in expected.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "gemma2"])
def test_rows_are_read_bit_for_bit_in_the_dtype_of_the_file(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    made = _saved(tmp_path, name, dtype)
    found, how = _read(tmp_path)
    assert how == "each rank reads its rows"
    assert _same(found, made)
    assert {t.dtype for t in found.values()} == {dtype}


def test_several_files_with_an_index_are_read_like_one(tmp_path: Path) -> None:
    made = _saved(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    found, how = _read(tmp_path)
    assert how == "each rank reads its rows"
    assert _same(found, made)


def test_pickled_files_and_older_names_go_through_transformers(tmp_path: Path) -> None:
    made = _saved(tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(made.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    found, how = _read(tmp_path / "pickled")
    assert (how, _same(found, made)) == ("rank 0 reads and sends", True)

    from safetensors.torch import load_file, save_file

    made = _saved(tmp_path / "renamed", "gpt2")
    path = tmp_path / "renamed" / "model.safetensors"
    old = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file({**old, "h.0.attn.bias": torch.ones(1, 1, 64, 64)}, path, metadata={"format": "pt"})
    found, how = _read(tmp_path / "renamed")
    assert (how, _same(found, made)) == ("rank 0 reads and sends", True)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_that_transformers_fuses_come_out_fused(tmp_path: Path, name: str) -> None:
    made = _saved(tmp_path, name)
    found, how = _read(tmp_path)
    assert (how, _same(found, made)) == ("rank 0 reads and sends", True)


@pytest.mark.parametrize("lost", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path, lost: str) -> None:
    from safetensors.torch import load_file, save_file

    _saved(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if n != lost}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=lost):
        _read(tmp_path)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    """C121: an embedding of another number of rows than the config says is not shrunk or grown in silence."""
    _saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 104}))
    with pytest.raises(CheckpointError, match=r"2 have another shape, the first lm_head"):
        _read(tmp_path)


def test_a_broken_file_is_the_users_to_mend(tmp_path: Path) -> None:
    _saved(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError):
        _read(tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    _saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="quantised"):
        models.read_config(models.Source(str(tmp_path), None, 0))


@pytest.mark.parametrize(
    ("values", "message"),
    [({}, "model_type"), ({"model_type": "lama"}, "lama"), ({"model_type": "llama", "hidden_size": "wide"}, "hidden_size")],
)  # fmt: skip
def test_a_config_that_transformers_refuses_is_the_users_to_mend(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        models.read_config(models.Source(None, values, 0))


def test_an_attention_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="BloomForCausalLM does not support"):
        models.build(_config("bloom"), "sdpa")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match=r"flash_attn|[Ff]lash"):
            models.build(_config("llama"), "flash_attention_2")


def test_eager_and_sdpa_attention_agree() -> None:
    ids, positions, _ = _packed()
    made = _random("llama").eval()
    outs = []
    for attention in ("eager", "sdpa"):
        built = models.build(_config("llama"), attention).eval()
        built.to_empty(device="cpu")
        built.load_state_dict(made.state_dict())
        for (_, a), (_, b) in zip(built.named_buffers(), made.named_buffers(), strict=True):
            a.copy_(b)
        assert built.config._attn_implementation == attention  # type: ignore[union-attr]
        outs.append(built(input_ids=ids, position_ids=positions, use_cache=False).logits)
    assert not torch.equal(*outs)  # different code
    assert torch.allclose(*outs, rtol=1e-5, atol=1e-5)
