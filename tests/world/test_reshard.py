"""A run that goes on with other ranks, on another engine: the state is the checkpoint's, and the numbers go on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import watched
import worlds
from tiny import Result, same, timeless

pytestmark = pytest.mark.world

STEPS = 8
CHAIN: list[tuple[int, dict[str, Any]]] = [  # two steps each
    (2, {"engine": "ddp"}),
    (1, {"engine": "fsdp2", "stage": 3}),
    (4, {"engine": "fsdp2", "stage": 3, "replicas": 2}),
    (2, {"engine": "fsdp2", "stage": 2}),
]
KINDS = ("model.", "exp_avg.", "exp_avg_sq.")


def words(folder: Path, count: int) -> str:
    """A tokenizer of that many words, and beside it texts of all of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w1"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = folder / f"words-{count}"
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w0").save_pretrained(str(path))
    draw = random.Random(count)
    texts = [" ".join(f"w{draw.randrange(1, count)}" for _ in range(draw.randint(8, 60))) for _ in range(90)]
    (path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Vocabularies that two ranks cannot and can share evenly; parameters of one element; a scale that moves."""

    def run(name: str, count: int, **changes: Any) -> dict[str, Any]:
        path = words(folder, count)
        data = {"tokenizer": path, "train": [{"path": f"{path}/texts.jsonl"}], "seq_len": 64}
        model = {"config": {**tiny.LLAMA, "vocab_size": count, **changes.pop("config", {})}}
        return {
            "name": name,
            "model": model,
            "data": data,
            "optim": {"lr": 1e-3, "warmup": 3, "horizon": STEPS},
            **changes,
        }

    # Apertus: its activation has two parameters of one element in each layer.
    one = {
        "model_type": "apertus",
        "hidden_act": "xielu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    half = {"compute": "fp16", "scale": {"interval": 3}}
    return {
        "97": run("97", 97),
        "96": run("96", 96),
        "one": run("one", 97, config=one),
        "half": run("half", 97, precision=half, drill={"overflow_at": {"attempts": [2, 5], "rank": 0}}),
    }


NAMES = ("97", "96", "one", "half")


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Result, Result, list[dict[str, Any]]]]:
    """Of each run: uninterrupted on two ranks, moved along the chain, and the states that the chain's links loaded."""
    folder = tmp_path_factory.mktemp("moved")
    todo = runs(folder)
    whole = watched.sessions(folder, 2, [{**run, "name": f"{name}-whole", "budget__steps": STEPS, "shard": CHAIN[0][1]}
                                         for name, run in todo.items()])  # fmt: skip
    loaded: dict[str, list[dict[str, Any]]] = {name: [] for name in todo}
    for link, (ranks, shard) in enumerate(CHAIN):
        paths = []
        for name, run in todo.items():
            made = tiny.config(
                folder, **run, shard=shard, budget__steps=2 * link + 2, checkpoint={"every": 0, "keep": 9}
            )
            paths.append(str(made.rename(folder / f"{name}-{link}.yaml")))
        by_rank = worlds.run(watched.session_loaded, ranks, paths, worlds.free_ports(len(paths)))
        for name, (status, message, state) in zip(todo, by_rank[0], strict=True):
            assert status == 0, message
            loaded[name].append(state)
    return {name: (run, Result(folder / "runs" / name, [(0, "")]), loaded[name])
            for run, name in zip(whole, todo, strict=True)}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_c54_c55_every_link_begins_with_the_checkpoints_bits(moved: Any, name: str) -> None:
    _, run, loaded = moved[name]
    for link in range(1, len(CHAIN)):
        saved = {key: tensor for kind in KINDS for key, tensor in run.weights(2 * link, kind).items()}
        assert len(saved) > 20
        assert same(loaded[link], saved)
        assert all(saved[key].any() for key in saved if key.startswith("exp_avg.")), "moments that were never touched"
    if name == "one":
        small = [key for key, tensor in loaded[1].items() if tensor.numel() == 1]
        assert len(small) == 2 * 2 * 3


@pytest.mark.parametrize("name", NAMES)
def test_c54_c55_the_numbers_go_on_as_if_nothing_had_moved(moved: Any, name: str) -> None:
    whole, run, _ = moved[name]
    for column in ("step", "attempt", "train/lr", "train/label_tokens", "train/tokens", "scale/value", "scale/skipped"):
        assert run.column(column) == whole.column(column)
    # The same micro-batches at bit-equal weights. What differs is the order in which a window's gradients are summed over
    # micro-batches and ranks, at most four addends an element: three roundings of 2^-24 of their size. The norm feels
    # them most; weights, and so losses, by no more than the learning rate lets through.
    bound = 4 * 2**-24
    assert run.column("train/loss") == pytest.approx(whole.column("train/loss"), rel=bound)
    assert run.column("train/grad_norm") == pytest.approx(whole.column("train/grad_norm"), rel=8 * bound)


@pytest.mark.parametrize("name", NAMES)
def test_c54_c65_what_cannot_be_exact_is_said(moved: Any, name: str) -> None:
    _, run, _ = moved[name]
    resumes = run.events("resume")
    assert len(resumes) == len(CHAIN) - 1
    for (before, _), (ranks, shard), event in zip(CHAIN[:-1], CHAIN[1:], resumes, strict=True):
        assert before != ranks
        assert (
            "another number of ranks, so random number generators start anew by (seed, window, rank)" in event["reason"]
        )
        assert any(change.startswith("shard.") for change in event["changes"]), shard
    moves = [[change for change in event["changes"] if change.startswith("launch.")] for event in resumes]
    assert moves == [[f"launch.ranks: {a} -> {b}"] for a, b in ((2, 1), (1, 4), (4, 2))], "whoever named the number"


def test_c55_uneven_shards_resume_exactly(tmp_path: Path) -> None:
    """Vocabulary 97 on two ranks is 49 and 48 rows, 96 is even, and a parameter of one element is on one rank alone."""
    todo = {
        name: {**run, "shard": {"engine": "fsdp2", "stage": 3}}
        for name, run in runs(tmp_path).items()
        if name != "half"
    }
    changes = []
    for name, run in todo.items():
        changes += [{**run, "name": f"{name}-whole", "budget__steps": 6}]
        changes += [{**run, "budget__steps": 3}, {**run, "budget__steps": 6}]
    found = watched.sessions(tmp_path, 2, changes)
    for whole, first, again in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert [run.status for run in (whole, first, again)] == [0, 0, 0], again.message
        assert "another number of ranks" not in again.events("resume")[0]["reason"]
        assert timeless(again.rows()) == timeless(whole.rows())
        for kind in KINDS:
            assert same(again.weights(prefix=kind), whole.weights(prefix=kind))
