"""What a load restores, what it refuses to load, and what an export makes of a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import worlds
from tiny import LLAMA, Result, same, train, write_text

pytestmark = pytest.mark.world

BF16: dict[str, Any] = {"precision": {"compute": "bf16"}}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"shard": {"engine": "ddp"}},
    "fsdp2-2": {"shard": {"engine": "fsdp2", "stage": 2}},
    "fsdp2-3": {"shard": {"engine": "fsdp2", "stage": 3}},
}


# -- what a load restores ---------------------------------------------------------------------------------------------------


def session_again(rank: int, path: str, folder: str) -> dict[str, Any]:
    """Goes on from the newest checkpoint, evaluates and saves to another folder, all before its first attempt."""
    from mpdist.config import load
    from mpdist.session import Session
    from mpdist.worker import Seat
    from mpdist.world import from_env

    world = from_env(os.environ)
    assert world is not None
    resolved = load(path, [])
    s = Session(resolved, Seat(resolved, world))
    assert s.set_up()
    counters = {float(state["step"]) for state in s.parts.optimizer.adam.state.values()}
    s.evaluate()
    s.saver.folder = Path(folder)
    s.save(final=True)
    s.close("preempted", 75, "before the first attempt")
    assert s.evaluated is not None
    return {"counters": counters, "eval": s.evaluated}


@pytest.mark.parametrize("engine", ENGINES)
def test_c52_c53_a_load_moves_nothing_and_the_next_forward_sees_it(tmp_path: Path, engine: str) -> None:
    text = write_text(tmp_path / "eval.jsonl", 12, seed=1)
    base: dict[str, Any] = {
        **ENGINES[engine], **BF16, "data__eval": [{"path": str(text)}], "eval": {"every": 3}, "budget__steps": 6,
        "optim__lr": 1e-2, "drill": {"stop_at": {"attempt": 3, "rank": 0}},
    }  # fmt: skip
    first = train(tmp_path, 2, **base)
    assert first.status == 75, first.message
    loss = first.column("eval/loss", "eval")[0]  # read now: the next session's row will count instead
    found = worlds.run(session_again, 2, str(tmp_path / "config.yaml"), str(tmp_path / "copy" / "checkpoints"))
    for rank in found:
        assert rank["counters"] == {3.0}
        assert rank["eval"] == (3, loss)
    copy = Result(tmp_path / "copy", [(0, "")])
    for prefix in ("model.", "exp_avg.", "exp_avg_sq."):
        assert same(copy.weights(3, prefix), first.weights(3, prefix))
    states = [json.loads((run.folder / "checkpoints/step-00000003/state.json").read_text()) for run in (first, copy)]
    assert states[0]["window_state"] == states[1]["window_state"]
    assert {**states[0]["count"], "saves": 2} == states[1]["count"]


def altered(run: Path, step: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Saves the tensors of a checkpoint anew after `change`, under a manifest that agrees."""
    import torch.distributed.checkpoint as dcp

    from mpdist.checkpoint import _digests
    from mpdist.shelf import MANIFEST, read_manifest, write_manifest

    folder = run / "checkpoints" / f"step-{step:08d}"
    tensors = Result(run, [(0, "")]).weights(step, prefix="")
    change(tensors)
    shutil.rmtree(folder / "tensors")
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder / "tensors"), no_dist=True)
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    entries = {name: {"bytes": size, "sha256": sha} for name, (size, sha) in _digests(folder, files).items()}
    write_manifest(folder, {**read_manifest(folder), "files": entries})


def one_more(tensors: dict[str, Any]) -> None:
    tensors["model.extra.weight"] = tensors["model.lm_head.weight"].clone()


def one_less(tensors: dict[str, Any]) -> None:
    del tensors["exp_avg.lm_head.weight"]


def another_shape(tensors: dict[str, Any]) -> None:
    tensors["model.lm_head.weight"] = tensors["model.lm_head.weight"][:-1].clone()


def another_dtype(tensors: dict[str, Any]) -> None:
    tensors["exp_avg_sq.lm_head.weight"] = tensors["exp_avg_sq.lm_head.weight"].bfloat16()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_c67_names_shapes_and_dtypes_must_match_in_both_directions(tmp_path: Path) -> None:
    base: dict[str, Any] = {"optim__horizon": 4, "checkpoint__every": 1}
    first = train(tmp_path, 2, **base, budget__steps=1)
    assert first.status == 0, first.message
    for change, words in (
        (one_more, "model.extra.weight is not in this model"),
        (one_less, "exp_avg.lm_head.weight is missing"),
        (another_shape, "model.lm_head.weight is [259, 32] there and [260, 32] here"),
        (another_dtype, "exp_avg_sq.lm_head.weight is torch.bfloat16 there and torch.float32 here"),
    ):
        name = change.__name__
        run = Path(shutil.copytree(first.folder, tmp_path / "runs" / name))
        altered(run, 1, change)
        again = train(tmp_path, 2, **base, name=name, budget__steps=2)
        assert [status for status, _ in again.ends] == [6, 6], name
        assert all(words in message for _, message in again.ends), name
        assert again.column("step") == [1]


# -- the export -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_c61_file_content_and_config_agree_in_the_dtype_asked_for(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from mpdist import export
    from mpdist.tensor_files import Reader

    values = {**LLAMA, "tie_word_embeddings": tied}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    made.to(torch.bfloat16).save_pretrained(tmp_path / "start")
    run = train(tmp_path, 2, **BF16, model={"path": str(tmp_path / "start")}, budget__steps=2, shard={"engine": "ddp"})
    assert run.status == 0, run.message
    masters = {name.removeprefix("model."): tensor for name, tensor in run.weights().items()}
    assert ("lm_head.weight" in masters) is not tied
    for prefix in ("model.", "exp_avg.", "exp_avg_sq."):
        stored = Reader(run.folder / "checkpoints" / "step-00000002" / "tensors").read_metadata().state_dict_metadata
        assert {e.properties.dtype for n, e in stored.items() if n.startswith(prefix)} == {torch.float32}, "to resume"
    elements = sum(tensor.numel() for tensor in masters.values())
    monkeypatch.setattr(export, "_SHARD_BYTES", 20_000)
    for asked, dtype in ((None, torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)):
        folder = tmp_path / f"export-{asked}"
        export.run(str(run.folder), str(folder), asked)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == dtype.itemsize * elements
        largest = max(tensor.numel() * dtype.itemsize for tensor in masters.values())
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) > 2
        assert max(path.stat().st_size for path in files) < max(20_000, largest) + 4096, "no more is held at once"
        assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == dtype
        assert (model.lm_head.weight is model.get_input_embeddings().weight) is tied
        loaded = dict(model.named_parameters())
        assert same(loaded, {name: tensor.to(dtype) for name, tensor in masters.items()})
        words = [AutoTokenizer.from_pretrained(path)("abc").input_ids for path in (folder, run.folder / "hf")]
        assert words[0] == words[1]
