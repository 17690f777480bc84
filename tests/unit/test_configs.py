"""Every configuration that ships loads and plans, with no network and an empty model cache."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from mpdist import arch, plan
from mpdist.config import load
from mpdist.plan_memory import MIB

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RUNS = sorted(CONFIGS.glob("*.yaml"))
KNOWN = [file for file in RUNS if file.stem != "demo_chat"]
# What the comments promise: ranks of one node, nodes, memory.
FITS = {
    "demo_pretrain": (2, 1, 1024 * MIB),
    "smollm2_135m": (1, 1, 24 * 1024 * MIB),
    "qwen3_0.6b": (1, 1, 24 * 1024 * MIB),
    "qwen3_1.7b": (4, 1, 40 * 1024 * MIB),
    "llama31_8b_1node": (8, 1, 80 * 1024 * MIB),
    "llama31_8b_4nodes": (8, 4, 80 * 1024 * MIB),
}


@pytest.fixture(autouse=True)
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_it_loads_and_plans(file: Path) -> None:
    found = load(file)
    cfg = found.config
    ranks = cfg.launch.ranks if isinstance(cfg.launch.ranks, int) else 1
    shape = arch.look(cfg.model.path, cfg.model.config)
    made = plan.make(cfg, shape, ranks, cfg.launch.nodes, origin=found.origins.__getitem__)
    assert made.text()
    assert cfg.name == file.stem.replace("_", "-")
    assert made.batch.global_ == made.batch.micro * made.batch.accumulation * made.batch.ranks


@pytest.mark.parametrize("file", KNOWN, ids=lambda file: file.stem)
def test_it_fits_where_its_comments_say(file: Path) -> None:
    found = load(file)
    cfg = found.config
    ranks, nodes, memory = FITS[file.stem]
    made = plan.make(cfg, arch.look(cfg.model.path, cfg.model.config), ranks, nodes, memory)
    assert made.fits
    assert not made.is_close
    if cfg.launch.ranks != "auto":
        assert (cfg.launch.ranks, cfg.launch.nodes) == (ranks, nodes)


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_its_data_are_shipped_paths_and_its_purpose_is_its_first_line(file: Path) -> None:
    cfg = load(file).config
    assert all(source.path.startswith("configs/data/") for source in (*cfg.data.train, *cfg.data.eval))
    assert file.read_text("utf-8").startswith("# ")


def test_qwen3_1_7b_fits_one_gpu_of_80_gb_as_its_comment_says() -> None:
    cfg = load(CONFIGS / "qwen3_1.7b.yaml").config
    made = plan.make(cfg, arch.look(cfg.model.path), 1, 1, 80 * 1024 * MIB)
    assert made.fits
    assert not made.is_close


def test_llama_without_checkpointing_needs_what_its_comment_says() -> None:
    found = load(CONFIGS / "llama31_8b_1node.yaml", ["batch.micro=1", "memory.checkpointing=none"])
    shape = arch.look(found.config.model.path)
    made = plan.make(found.config, shape, 8, 1)
    activations = next(row for row in made.rows if row.row == "activations")
    assert activations.peak_bytes / 2**30 == pytest.approx(27, abs=1)


def test_the_four_node_run_sends_nothing_but_shards_between_nodes() -> None:
    cfg = load(CONFIGS / "llama31_8b_4nodes.yaml").config
    made = plan.make(cfg, arch.look(cfg.model.path), 8, 4)
    crossing = [t for t in made.traffic if t.sent_between]
    assert [t.collective for t in crossing] == ["all-reduce of replicas"]


def test_the_demo_trains_for_the_second_demo_to_go_on() -> None:
    first, second = load(CONFIGS / "demo_pretrain.yaml").config, load(CONFIGS / "demo_chat.yaml").config
    assert second.model.path == f"{first.out_dir}/{first.name}/export"
    assert second.data.loss_on == "completion"
    assert first.data.tokenizer == "bytes"
    assert first.model.config is not None
    # 256 bytes and the byte tokenizer's four special tokens
    assert first.model.config["vocab_size"] == 260
    assert second.data.seq_len <= first.model.config["max_position_embeddings"]
