"""Activation checkpointing in whole runs: the same bits, fewer bytes, nothing frozen in silence, the cache left alone."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import watched

MODES = ["none", "full", "selective", "every 2"]
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"shard": {"engine": "ddp"}},
    "fsdp2-2": {"shard": {"engine": "fsdp2", "stage": 2}},
    "fsdp2-3": {"shard": {"engine": "fsdp2", "stage": 3}},
}
DROPOUT = {**tiny.LLAMA, "attention_dropout": 0.1, "num_hidden_layers": 4}
FROZEN = ["model.embed_tokens.*", "model.layers.[01].*"]
# A user's own code: a parameter that no loss depends on.
SPARE = """
import torch
from transformers import LlamaForCausalLM
class Spare(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.spare = torch.nn.Parameter(torch.zeros(4))
"""
# A user's own code: checkpointing of the old, reentrant kind around each layer.
REENTRANT = """
import functools
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
class Spare(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            own = layer.forward
            def again(hidden_states, own=own, **kwargs):
                return checkpoint(functools.partial(own, **kwargs), hidden_states, use_reentrant=True)
            layer.forward = again
"""


def checkpoints(folder: Path, changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Masters and moments that each run of two ranks left, whole."""
    results = watched.sessions(folder, 2, changes)
    for result in results:
        assert result.status == 0, result.message
    return [{**result.weights(prefix=""), "losses": result.column("train/loss")} for result in results]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.pop("losses") == b.pop("losses") and tiny.same(a, b)


@pytest.mark.parametrize("engine", ENGINES)
def test_c45_c50_checkpointing_changes_no_bit(tmp_path: Path, engine: str) -> None:
    """Loss, gradients (by their moments) and weights of two steps in BF16, with dropout and half of the layers frozen;
    once in FP32 with all of it trained."""
    base = {**ENGINES[engine], "budget__steps": 2, "precision__compute": "bf16", "data__seq_len": 32,
            "model": {"config": DROPOUT, "freeze": FROZEN}}  # fmt: skip
    full = {"precision__compute": "fp32", "model": {"config": DROPOUT}}
    sets: list[dict[str, Any]] = [{}, full] if engine == "fsdp2-3" else [{}]
    changes = [
        {**base, **more, "memory": {"checkpointing": mode}, "name": f"{mode.replace(' ', '')}{i}"}
        for i, more in enumerate(sets)
        for mode in MODES
    ]
    dry = {**base, "model": {"config": {**DROPOUT, "attention_dropout": 0.0}, "freeze": FROZEN}, "name": "dry"}
    *found, control = checkpoints(tmp_path, [*changes, dry])
    for begin in range(0, len(found), 4):
        for other in found[begin + 1 : begin + 4]:
            assert same(dict(found[begin]), other)
    assert control["losses"] != found[0]["losses"]  # dropout was on, or this were no test of its masks


def _peak(mode: str) -> int:
    """Tracked bytes of forward and backward of one micro-batch of a model whose activations outweigh its weights."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    from mpdist import model as models

    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
              "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}  # fmt: skip
    built = models.build(models.read_config(models.Source(None, config, 0)), "sdpa")
    models.checkpoint_blocks(models.find_blocks(built), mode)
    models.give_loss(built, 32)
    frequencies = {name: buffer.clone() for name, buffer in built.named_buffers()}
    built.to_empty(device="cpu")
    for name, buffer in built.named_buffers():
        buffer.copy_(frequencies[name])
    for param in built.parameters():
        torch.nn.init.normal_(param, std=0.1)
    ids = torch.randint(0, 64, (2, 128))
    index = torch.arange(0, 256, 4)
    batch = {"input_ids": ids, "position_ids": torch.arange(128).expand(2, 128), "index": index,
             "targets": ids.view(-1)[index], "factor": torch.tensor(1.0)}  # fmt: skip
    tracker = MemTracker()
    with tracker:
        built(**batch)[0].backward()
    return max(sum(of.values()) for of in tracker.get_tracker_snapshot("peak").values())


def test_checkpointing_lowers_the_tracked_peak() -> None:
    peaks = {mode: _peak(mode) for mode in MODES}
    assert peaks["full"] < 0.75 * peaks["selective"], peaks
    assert peaks["selective"] < 0.85 * peaks["none"], peaks
    assert peaks["full"] < 0.75 * peaks["every 2"], peaks
    assert peaks["every 2"] < 0.85 * peaks["none"], peaks


# -- nothing is frozen in silence -------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_c44_with_frozen_embeddings_every_other_parameter_learns(tmp_path: Path, engine: str) -> None:
    run = watched.sessions(
        tmp_path, 2, [{**ENGINES[engine], "model": {"config": tiny.LLAMA, "freeze": ["model.embed_tokens.*"]},
                       "memory": {"checkpointing": "full"}, "budget__steps": 1}]
    )[0]  # fmt: skip
    assert run.status == 0, run.message
    seen = run.ranks[0]
    still = [name for name in seen.start if bool((seen.start[name] == seen.end[name]).all())]
    assert still == ["model.embed_tokens.weight"]


def own_modules(cache: str) -> None:
    """Foreign code is copied to a folder of the test, not to the user's."""
    from transformers import dynamic_module_utils

    dynamic_module_utils.HF_MODULES_CACHE = cache


def _own_code(folder: Path, code: str) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = dict(tiny.LLAMA)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    if "spare" in code:
        made.spare = torch.nn.Parameter(torch.zeros(4))
    made.save_pretrained(folder)
    (folder / "own.py").write_text(code)
    stored = json.loads((folder / "config.json").read_text())
    stored |= {"auto_map": {"AutoModelForCausalLM": "own.Spare"}, "architectures": ["Spare"]}
    (folder / "config.json").write_text(json.dumps(stored))
    return folder


@pytest.mark.parametrize("engine", ["ddp", "fsdp2-3"])
def test_c44_a_parameter_without_gradient_stops_the_run_and_is_named(tmp_path: Path, engine: str) -> None:
    model = {"path": str(_own_code(tmp_path / "spare", SPARE)), "trust_remote_code": True}
    old = {"path": str(_own_code(tmp_path / "reentrant", REENTRANT)), "trust_remote_code": True}
    old["freeze"] = ["model.embed_tokens.*"]
    changes = [{**ENGINES[engine], "model": chosen} for chosen in (model, {**model, "freeze": ["spare"]}, old)]
    arm = functools.partial(own_modules, str(tmp_path / "modules"))
    stopped, frozen, reentrant = watched.sessions(tmp_path, 2, changes, arm=arm)
    assert stopped.status == 2
    assert "1 trainable parameters got no gradient in the first window, the first spare" in stopped.message
    assert [rank.status for rank in stopped.ranks] == [2, 2]
    assert frozen.status == 0, frozen.message
    # Reentrant recomputation of a frozen input: the layers would never learn.
    assert reentrant.status == 2
    assert "model.layers.0.self_attn.q_proj.weight" in reentrant.message


def test_foreign_code_runs_only_when_asked_to(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n{SPARE}"
    run = tiny.train(tmp_path, 1, model={"path": str(_own_code(tmp_path / "spare", code))}, budget__steps=1)
    assert not (tmp_path / "ran").exists()
    assert run.status == 0, run.message  # transformers knows the model's type itself, and says what it has no place for
    log = (run.folder / "sessions" / "0001" / "logs" / "rank-00000.log").read_text()
    assert "warning: 1 tensors of" in log
    assert "left out, the first spare" in log


# -- one mechanism, in the right order ------------------------------------------------------------------------------------


def count_layers() -> list[int]:
    """Counts forwards of decoder layers from here on."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    if not hasattr(LlamaDecoderLayer, "calls"):  # once a process: torch keeps classes that it derives from this one
        own = LlamaDecoderLayer.forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            LlamaDecoderLayer.calls[0] += 1
            return own(self, *args, **kwargs)

        LlamaDecoderLayer.forward = forward
    LlamaDecoderLayer.calls = calls = [0]
    return calls


@pytest.mark.parametrize("engine", ["ddp", "fsdp2-3"])
def test_c49_a_layer_runs_exactly_twice_though_the_model_checkpoints_too(tmp_path: Path, engine: str) -> None:
    """4 steps of 2 micro-batches a rank, 2 layers: 16 forwards, and as many again where they are recomputed."""
    base = {**ENGINES[engine], "data__packing": "none"}
    both = {**tiny.LLAMA, "gradient_checkpointing": True}
    changes = [
        {**base, "model": {"config": tiny.LLAMA}},
        {**base, "model": {"config": both}},
        {**base, "model": {"config": both}, "memory": {"checkpointing": "full"}},
        {**base, "model": {"config": both}, "memory": {"checkpointing": "every 2"}},
    ]
    runs = watched.sessions(tmp_path, 2, changes, arm=count_layers)
    assert [run.status for run in runs] == [0] * 4, [run.message for run in runs]
    assert [run.ranks[0].probe[0] for run in runs] == [16, 16, 32, 24]
    assert len({tuple(run.column("train/loss")) for run in runs}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2-3"])
def test_c48_checkpointing_inside_compile_inside_sharding(tmp_path: Path, engine: str) -> None:
    """The one order that there is; no option can ask for another."""
    base = {**ENGINES[engine], "precision__compute": "bf16", "budget__steps": 2}
    plain, compiled = watched.sessions(
        tmp_path, 2, [{**base, "model": {"config": tiny.LLAMA}},
                      {**base, "model": {"config": tiny.LLAMA, "compile": "blocks"}, "memory": {"checkpointing": "full"}}],
        timeout=500,
    )  # fmt: skip
    assert (plain.status, compiled.status) == (0, 0), compiled.message
    losses = [run.column("train/loss") for run in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[1] != losses[0]  # fused code rounds differently: it was compiled


# -- the cache ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [True, False])
def test_c46_the_cache_is_off_in_training_and_untouched_in_the_export(tmp_path: Path, wanted: bool) -> None:
    from mpdist import export

    model = {"config": {**tiny.LLAMA, "use_cache": wanted}}
    steps = 20 if wanted else 2
    full = {"memory": {"checkpointing": "full"}, "optim__schedule": "constant"}
    run = tiny.train(tmp_path, 2, model=model, budget__steps=steps, **full)
    assert run.status == 0, run.message
    text = "".join(path.read_text() for path in (run.folder / "sessions").rglob("*.log"))
    assert f"step {steps}/{steps}" in text
    assert len(re.findall(r"\bcache\b|use_cache|past_key", text)) <= 1
    export.run(str(run.folder), str(tmp_path / "export"))
    stored = json.loads((tmp_path / "export" / "config.json").read_text())
    assert stored["use_cache"] is wanted
    assert "gradient_checkpointing" not in stored
