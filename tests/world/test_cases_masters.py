"""Masters and moments are FP32, whatever the checkpoint holds and on every engine: C02 and C14 to C20."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import engines
import pytest
import tiny
import watched
import worlds

pytestmark = pytest.mark.world

SHARDS: dict[str, dict[str, Any]] = {
    "ddp": {"shard__engine": "ddp", "shard__stage": 0},
    "fsdp2-2": {"shard__stage": 2},
    "fsdp2-3": {"shard__stage": 3},
    "hsdp": {"shard__stage": 3, "shard__replicas": 2},
}
FILES = ("fp32", "bf16", "fp16", "mixed", "bin")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model, of values that every format holds, stored in FP32, BF16 and FP16, in BF16 with one norm in FP32, and
    in BF16 as a pickled file, which rank 0 reads for all."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    base = tmp_path_factory.mktemp("models")
    torch.manual_seed(1)
    values = {key: value for key, value in tiny.LLAMA.items() if key != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**values))
    with torch.no_grad():
        for param in model.parameters():
            rounded = param.bfloat16().float()
            param.copy_(torch.where(rounded.abs() < 2.0**-14, 0.0, rounded))  # FP16's normal numbers
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        model.to(dtype).save_pretrained(base / name)
    for name in ("mixed", "bin"):
        shutil.copytree(base / "bf16", base / name)
    tensors = load_file(base / "bf16/model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"] = tensors["model.layers.0.input_layernorm.weight"].float()
    save_file(tensors, base / "mixed/model.safetensors", metadata={"format": "pt"})
    (base / "bin/model.safetensors").unlink()
    torch.save(load_file(base / "bf16/model.safetensors"), base / "bin/pytorch_model.bin")
    return {name: base / name for name in FILES}


def _from(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(folder)},
        "data__tokenizer": "bytes",
        "data__seq_len": 32,
        "budget__steps": 3,
        **changes,
    }


@pytest.fixture(scope="module")
def runs(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str, str], watched.Watched]:
    """(file, engine, compute) -> a run of 3 steps on 2 ranks."""
    asked = [(file, "fsdp2-3", "bf16") for file in FILES]
    asked += [(file, "fsdp2-3", "fp16") for file in ("fp16", "mixed")]
    asked += [("bf16", shard, "bf16") for shard in SHARDS if shard != "fsdp2-3"]
    asked += [("fp16", shard, "fp16") for shard in SHARDS if shard != "fsdp2-3"]
    asked += [(file, "ddp", "bf16") for file in ("fp32", "mixed")]
    changes = [
        _from(folders[f], **SHARDS[s], precision__compute=c, optim__clip=1.0, name="-".join((f, s, c)))
        for f, s, c in asked
    ]
    found = watched.sessions(tmp_path_factory.mktemp("masters"), 2, changes, timeout=200)
    return dict(zip(asked, found, strict=True))


def test_c02_c14_masters_are_fp32_on_every_engine_whatever_the_file(
    runs: dict[tuple[str, str, str], watched.Watched],
) -> None:
    for (file, engine, compute), run in runs.items():
        assert run.ends == [(0, ""), (0, "")], (file, engine, compute)
        for seen in run.ranks:
            assert set(seen.masters.values()) == {"torch.float32"}
            assert seen.gradients == {"torch.float32"}
        rows = run.ledger()
        for name in ("parameters", "gradients", "moments"):
            assert {(r["rank"], r["dtype"]) for r in rows if r["row"] == name} == {(0, "float32"), (1, "float32")}
        for prefix in ("model.", "exp_avg.", "exp_avg_sq."):
            assert {str(t.dtype) for t in run.weights(prefix=prefix).values()} == {"torch.float32"}


def test_c15_c16_the_dtype_of_the_file_changes_no_number(
    runs: dict[tuple[str, str, str], watched.Watched],
) -> None:
    for engine in ("fsdp2-3", "ddp"):
        plain = runs["fp32", engine, "bf16"]
        for (file, other, compute), run in runs.items():
            if (other, compute) == (engine, "bf16"):
                assert tiny.timeless(run.rows()) == tiny.timeless(plain.rows()), file
                assert tiny.same(run.ranks[0].end, plain.ranks[0].end)
    half = runs["fp16", "fsdp2-3", "fp16"]
    assert tiny.same(half.ranks[1].end, runs["mixed", "fsdp2-3", "fp16"].ranks[1].end)


def test_c17_a_model_of_mixed_dtypes_trains(runs: dict[tuple[str, str, str], watched.Watched]) -> None:
    for (file, _, _), run in runs.items():
        if file == "mixed":
            assert run.column("scale/skipped")[-1] == 0
            assert run.column("train/loss")[-1] < run.column("train/loss")[0]


def test_c20_every_rank_starts_from_the_files_bits(
    runs: dict[tuple[str, str, str], watched.Watched], folders: dict[str, Path]
) -> None:
    from safetensors.torch import load_file

    stored = {name: tensor.float() for name, tensor in load_file(folders["bf16"] / "model.safetensors").items()}
    for (file, engine, compute), run in runs.items():
        for seen in run.ranks:
            assert tiny.same(seen.start, stored), (file, engine, compute)
        ways = json.loads((run.folder / "sessions/0001/env.json").read_text())["weights"]
        assert ways == ("rank 0 reads and sends" if file == "bin" else "each rank reads its rows")


def _other_files(rank: int, good: str, other: str) -> list[str]:
    """Opens the weights of folders that differ between ranks; what each try ended with."""
    import torch

    from mpdist import model as models
    from mpdist.errors import MpdistError

    found = []
    for mine in ((good, other), (other, good)):
        source = models.Source(mine[rank], None, 0)
        config = models.read_config(source)
        built = models.build(config, "sdpa")
        try:
            read, how, _ = models.open_weights(source, config, built, torch.device("cpu"))
            found.append(how)
            for name, param in built.named_parameters():
                read(name, 0, param.shape[0])
        except MpdistError as error:
            found.append(f"{error.status} {error}")
    return found


def test_c20_ranks_that_see_other_files_fail_together(folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    values = {key: value for key, value in tiny.LLAMA.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(**{**values, "vocab_size": 300})).save_pretrained(tmp_path / "other")
    # Where all have the same shapes, ranks may read; where one has only a pickled file, rank 0 sends to all.
    mixed = worlds.run(_other_files, 2, str(folders["bf16"]), str(folders["bin"]), timeout=60)
    assert mixed == [["rank 0 reads and sends"] * 2] * 2
    shutil.copy(folders["bin"] / "pytorch_model.bin", tmp_path / "other/pytorch_model.bin")
    (tmp_path / "other/model.safetensors").unlink()
    ends = worlds.run(_other_files, 2, str(folders["bin"]), str(tmp_path / "other"), timeout=60)
    assert ends[0] == ends[1]
    assert all("rank" in end and end.startswith(("2", "6")) for end in ends[0])


def test_c19_moments_are_fp32_after_a_resume_too(tmp_path: Path) -> None:
    half = {"precision__compute": "bf16", "optim__horizon": 10}
    changes = []
    for name in ("ddp", "fsdp2-3", "hsdp"):
        shard = SHARDS[name]
        changes += [{**half, **shard, "name": name, "budget__steps": n} for n in (3, 5)]
        changes.append({**half, **shard, "name": f"{name}-whole", "budget__steps": 5})
    runs = watched.sessions(tmp_path, 2, changes, timeout=200)
    for first, second, whole in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        assert (first.status, second.status, whole.status) == (0, 0, 0), second.message
        for before, after in zip(first.ranks, second.ranks, strict=True):
            assert tiny.same(before.end, after.start)
            assert before.digests[1] == after.digests[0]  # masters, moments, Adam's counter
            assert after.counters == {5.0}
        moments = {str(t.dtype) for p in ("exp_avg.", "exp_avg_sq.") for t in second.weights(prefix=p).values()}
        assert moments == {"torch.float32"}
        assert {r["dtype"] for r in second.ledger() if r["row"] == "moments"} == {"float32"}
        for prefix in ("model.", "exp_avg.", "exp_avg_sq."):
            assert tiny.same(second.weights(prefix=prefix), whole.weights(prefix=prefix))


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> dict[str, watched.Watched]:
    folder = tmp_path_factory.mktemp("pure")
    compute = {"precision__compute": "bf16", "precision__master": "compute", "optim__schedule": "constant"}
    changes = [{**compute, **SHARDS[s], "name": s, "track__every": 2, "budget__steps": 3} for s in ("ddp", "fsdp2-3")]
    changes.append({**compute, "name": "slow", "optim__lr": 1e-5})
    changes.append({"precision__compute": "bf16", "name": "masters"})
    found = {run.folder.name: run for run in watched.sessions(folder, 2, changes)}
    path = str(folder / "runs/fsdp2-3")
    back = {"precision__compute": "bf16", "name": "back", "checkpoint__resume": path, "optim__schedule": "constant"}
    return {**found, "back": watched.sessions(folder, 2, [back])[0]}


def test_c18_pure_16_bit_is_named_and_says_what_share_of_the_weights_moved(pure: dict[str, watched.Watched]) -> None:
    for name in ("ddp", "fsdp2-3"):
        run = pure[name]
        assert run.status == 0, run.message
        assert [row["step"] for row in run.rows()] == [2, 3]
        shares = run.column("precision/changed_fraction")
        assert all(0.5 < share < 1.0 for share in shares)
        for row in ("parameters", "moments"):
            assert {r["dtype"] for r in run.ledger() if r["row"] == row} == {"bfloat16"}
    first, second = (pure[name].column("precision/changed_fraction") for name in ("ddp", "fsdp2-3"))
    assert first == pytest.approx(second, abs=0.02)
    assert pure["slow"].column("precision/changed_fraction")[0] < first[0] / 2
    assert not any("precision/changed_fraction" in row for row in pure["masters"].rows())


def test_c19_a_checkpoint_of_other_dtypes_is_refused_by_name(pure: dict[str, watched.Watched]) -> None:
    back = pure["back"]
    assert back.ranks[0].status in (2, 6)
    assert back.ends[0] == back.ends[1]
    assert "precision.master" in back.message or ("bfloat16" in back.message and "float32" in back.message)


def _one_step(rank: int, lrs: list[float]) -> list[tuple[float, float]]:  # fmt: skip
    """Share of 100,000 weights (normal, sigma 0.02) that one AdamW step changes: (BF16, FP32) for each lr."""
    import torch

    from mpdist.dist import build_mesh
    from mpdist.optim import Optimizer
    from mpdist.reduce import Wire
    from mpdist.shard import Part
    from mpdist.telemetry import Telemetry

    wire = Wire(build_mesh("cpu", 1, 1, False), torch.float32, True)
    g = torch.Generator().manual_seed(rank)
    weights = torch.randn(100_000, generator=g) * 0.02
    gradient, found = torch.randn(100_000, generator=g), []
    for lr in lrs:
        shares = []
        for dtype in (torch.bfloat16, torch.float32):
            part = Part("w", weights.to(dtype), (100_000,), 0, True)
            before = part.tensor.clone()
            options: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "decay": "all"}
            optimizer = Optimizer([part], fused=True, **options)
            telemetry = Telemetry(optimizer, wire)
            telemetry.begin(True)
            telemetry.look([gradient], 1.0, True)
            telemetry.hold()
            optimizer.step([gradient.clone()], lr)
            share = (part.tensor != before).float().mean().item()
            reported = telemetry.read()
            if dtype == torch.bfloat16:
                assert abs(reported["precision/changed_fraction"] - share) < 1e-6
            else:
                assert "precision/changed_fraction" not in reported
                assert reported["precision/unchanged_master"] == pytest.approx(1 - share, abs=1e-3)
            shares.append(share)
        found.append((shares[0], shares[1]))
    return found


def test_c18_small_updates_vanish_in_bf16_and_not_in_fp32() -> None:
    lrs = [1e-6, 1e-5, 1e-4, 1e-3]
    found = worlds.run(_one_step, 1, lrs)[0]
    assert [bf16 for bf16, _ in found] == pytest.approx([0.020, 0.156, 0.882, 1.0], abs=0.02)
    assert [fp32 for _, fp32 in found] == pytest.approx([1.0] * 4, abs=1e-3)


def _masters_of_pure(rank: int) -> dict[str, set[str]]:
    return engines.trace(rank, "fsdp2", 3, compute="bf16", master="compute", steps=2).dtypes


def test_c17_pure_16_bit_masters_have_one_dtype_too() -> None:
    for dtypes in worlds.run(_masters_of_pure, 2):
        assert dtypes == {k: {"torch.bfloat16"} for k in ("masters", "gradients", "moments")}
