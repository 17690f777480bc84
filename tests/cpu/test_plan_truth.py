"""What the plan counts in closed formulas, against what autograd really keeps in transformers' layers, and moment by moment
against a simulation of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mpdist import arch, plan, simulate
from mpdist.arch_families import FAMILIES
from mpdist.config import load
from mpdist.plan_activations import How, counted
from mpdist.plan_memory import ledger_of

ROWS, TOKENS = 2, 64
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
CASES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "mistral": SMALL,
    "qwen2": SMALL,
    "qwen3": SMALL | {"head_dim": 24},
    "gemma": SMALL | {"head_dim": 16},
    "gemma2": SMALL | {"head_dim": 16},
    "gemma3_text": SMALL | {"head_dim": 16},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 96, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    "gpt_neox": {"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4, "vocab_size": 96},
    "phi": SMALL | {"num_key_value_heads": 4},
    "phi3": SMALL,
    "granite": SMALL,
    "olmo2": SMALL,
    "opt": {
        "hidden_size": 64,
        "ffn_dim": 112,
        "num_attention_heads": 4,
        "vocab_size": 96,
        "max_position_embeddings": 64,
    }
    | {"word_embed_proj_dim": 64, "dropout": 0.0, "pad_token_id": 0},
    "mixtral": SMALL | {"num_local_experts": 4},
    "qwen2_moe": SMALL | EXPERTS | {"shared_expert_intermediate_size": 80},
    "qwen3_moe": SMALL | EXPERTS | {"head_dim": 24},
}
DROPOUT = {"n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 96}  # GPT-2's own, of 0.1


def kept(kind: str, fields: dict[str, Any], layers: int, dtype: torch.dtype, packed: bool, attention: str) -> int:
    """Bytes of the storages that the model's body saves for backward, parameters and buffers left out."""
    deep = fields | {"n_layer" if kind == "gpt2" else "num_hidden_layers": layers}
    if kind == "gemma3_text":
        deep["layer_types"] = ["full_attention"] * layers
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(tokens | deep))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).train()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    positions = torch.arange(TOKENS).repeat(ROWS, 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(
            input_ids=torch.randint(0, 96, (ROWS, TOKENS)),
            position_ids=positions % 40 if packed else positions,
            use_cache=False,
        )
    return sum(seen.values())


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", CASES)
def test_a_blocks_saved_bytes_are_counted_to_one_percent(kind: str, dtype: torch.dtype, packed: bool) -> None:
    check(kind, CASES[kind], dtype, packed, "eager" if kind == "gemma2" else "sdpa")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "phi"])
def test_eager_attention_keeps_its_scores(kind: str, dtype: torch.dtype) -> None:
    check(kind, CASES[kind], dtype, False, "eager")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_dropout_keeps_masks_and_on_a_cpu_attentions_scores(dtype: torch.dtype) -> None:
    check("gpt2", DROPOUT, dtype, False, "sdpa")


def check(kind: str, fields: dict[str, Any], dtype: torch.dtype, packed: bool, attention: str) -> None:
    shape = arch.from_mapping({"model_type": kind, **fields}, "test")
    assert isinstance(shape, arch.Arch)
    block = kept(kind, fields, 3, dtype, packed, attention) - kept(kind, fields, 2, dtype, packed, attention)
    how = How(
        compute=dtype.itemsize, seq_len=TOKENS, packed=packed, attention=attention, several=True, checkpointing="none",
        freeze=(), keep_fp32=(), held=True, fused_dropout=False,
    )  # fmt: skip
    # In FP32 a block's first norm keeps what enters the block, which another one has made.
    planned = counted(shape, how).blocks[-1].kept
    if kind.startswith("gemma"):  # the scale plus one, in FP32, once for all tokens
        norms = sum(p.count for p in shape.params if p.block == 0 and "norm" in p.name)
        planned += 4 * norms / (ROWS * TOKENS)
    assert planned == pytest.approx(block / (ROWS * TOKENS), rel=0.01)


def test_windows_are_those_that_transformers_fills_in() -> None:
    for kind in FAMILIES:
        shape, config = arch.from_mapping({"model_type": kind}, "test"), AutoConfig.for_model(kind)
        assert isinstance(shape, arch.Arch)
        window = getattr(config, "sliding_window", None) or 0
        kinds = getattr(config, "layer_types", None) or ["sliding" if window else "full"] * shape.layers
        assert shape.attends == tuple(window if "sliding" in one else 0 for one in kinds), kind
    for kind in ("qwen2", "qwen3", "qwen2_moe"):
        given = {"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 5}
        shape, config = arch.from_mapping({"model_type": kind, **given}, "test"), AutoConfig.for_model(kind, **given)
        assert isinstance(shape, arch.Arch)
        assert shape.attends == tuple(99 if "sliding" in one else 0 for one in config.layer_types), kind


# -- moment by moment -----------------------------------------------------------------------------------------------

SHAPE = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1501, "max_position_embeddings": 256,
}  # fmt: skip
TIED, GPT2 = SHAPE | {"tie_word_embeddings": True}, {"model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4}
GEMMA2 = SHAPE | {"model_type": "gemma2", "head_dim": 32}
WINDOW = SHAPE | {"model_type": "mistral", "sliding_window": 64}
STEPS: dict[str, tuple[dict[str, Any], int, int, str]] = {  # model, ranks, nodes, overrides
    "fsdp2": (SHAPE, 2, 1, ""),
    "fsdp2, selective, BF16 wire, two micro-batches": (
        SHAPE, 2, 1, "memory.checkpointing=selective reduce.wire=bf16 batch.global=16",
    ),
    "fsdp2, chunked loss, tied, odd shards": (TIED, 3, 1, "memory.checkpointing=full memory.loss_chunk=50"),
    "fsdp2, stage 2, once a window": (SHAPE, 2, 1, "shard.stage=2 reduce.when=last batch.global=16"),
    "fsdp2 alone": (SHAPE, 1, 1, "memory.checkpointing=full"),
    "hsdp over nodes": (SHAPE, 8, 2, "shard.replicas=2 memory.checkpointing=full reduce.wire=bf16"),
    "fsdp2, FP32, eager": (SHAPE, 2, 1, "precision.compute=fp32 model.attention=eager"),
    "fsdp2, a head in FP32": (SHAPE, 2, 1, "precision.keep_fp32=[lm_head]"),
    "fsdp2, pure 16 bit, frozen blocks": (
        SHAPE, 2, 1, "precision.master=compute model.freeze=['model.embed_tokens.*','model.layers.[01].*']",
    ),
    "fsdp2, a window": (WINDOW, 2, 1, "memory.checkpointing=full"),
    "fsdp2, capped logits": (GEMMA2, 2, 1, "memory.checkpointing=full"),
    "ddp, dropout": (GPT2 | {"vocab_size": 1501, "n_positions": 128}, 2, 1, "shard.engine=ddp shard.stage=0"),
    "ddp, four ranks, two micro-batches": (SHAPE, 4, 1, "shard.engine=ddp shard.stage=0 batch.global=32"),
    "ddp alone": (SHAPE, 1, 1, "shard.engine=ddp shard.stage=0 memory.checkpointing=full"),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_every_row_is_at_every_moment_what_a_simulation_finds(name: str, tmp_path: Path) -> None:
    model, ranks, nodes, overrides = STEPS[name]
    file = tmp_path / "run.yaml"
    file.write_text(
        f"name: t\nmodel: {{config: {model}}}\nlaunch: {{device: cpu}}\n"
        "data: {train: [{path: x.jsonl}], seq_len: 128, packing: none, tokenizer: bytes}\n"
        f"batch: {{micro: 4, global: {4 * ranks}}}\nbudget: {{steps: 10}}\n"
    )
    cfg = load(file, overrides.split()).config
    asked = plan.asked_of(cfg, ranks // nodes, nodes)
    found = simulate.simulate(cfg, asked)
    shape = arch.look(None, model)
    assert isinstance(shape, arch.Arch)
    moments = dict(ledger_of(asked, shape).moments)
    assert set(found.parts) <= set(moments)
    for moment, held in found.parts.items():
        total = sum(held.values())
        planned = {row: size for row, size in moments[moment].items() if row not in ("overhead", "snapshot")}
        assert sum(planned.values()) == pytest.approx(total, rel=0.01), (moment, held, planned)
        for row in {*held, *planned}:
            assert abs(planned.get(row, 0) - held.get(row, 0)) <= 0.02 * total, (moment, row, held, planned)
