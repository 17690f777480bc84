"""The debugging sequence on sick runs, each of which has one disease that it has to name first, and on healthy ones."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import worlds

from mpdist.findings import Finding, from_json, to_paste, worst_first

pytestmark = pytest.mark.world

LLAMA = {**tiny.LLAMA, "vocab_size": 264}
MLP = "model.layers.1.mlp"
STEPS = 4
BF16: dict[str, Any] = {"precision": {"compute": "bf16"}}
SHARDED: dict[str, Any] = {"shard": {"engine": "fsdp2"}}
FP16: dict[str, Any] = {"precision": {"compute": "fp16"}}


def models(folder: Path) -> None:
    """Saved in `folder`: `outlier`, in one MLP of which activations reach 1e5, as BF16 training leaves them; `residual`,
    in which the residual stream does; `damaged`, with a NaN in a weight."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = {key: value for key, value in LLAMA.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **values))
    layer = model.model.layers[1]
    with torch.no_grad():
        up, down = layer.mlp.up_proj.weight, layer.mlp.down_proj.weight
        up.mul_(2.0**18), down.mul_(2.0**-18)
        model.save_pretrained(folder / "outlier")
        up.mul_(2.0**-6), down.mul_(2.0**34)
        model.save_pretrained(folder / "residual")
        up.mul_(2.0**-12), down.mul_(2.0**-16)
        layer.self_attn.q_proj.weight[3, 5] = math.nan
        model.save_pretrained(folder / "damaged")


def examined(rank: int, paths: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Every configuration, one after another in one world: what is found in it."""
    import torch

    from mpdist.config import load
    from mpdist.doctor import asked, examine, sequence
    from mpdist.feed import Feed
    from mpdist.world import World

    world = World(rank=rank, ranks=2, local_rank=rank, local_ranks=2, node=0, nodes=1, source="test")
    device, told, get = torch.device("cpu"), {}, Feed.get

    def slow(feed: Feed, number: int) -> Any:
        time.sleep(0.2)
        return get(feed, number)

    for name, path in paths.items():
        Feed.get = slow if name == "starved" and rank == 1 else get  # type: ignore[method-assign]
        resolved = load(path)
        subject = examine.Subject(resolved, examine.planned(resolved, world, device), world, device)
        found = [*asked.look(resolved, subject.plan, {}), *sequence.debug(subject, STEPS)]
        told[name] = [finding.to_json() for finding in found]
    return told


CONFIGS: dict[str, dict[str, Any]] = {
    "healthy bf16": {**BF16, **SHARDED},
    "healthy fp16": {**FP16},
    "kept": {"precision": {"compute": "fp16", "keep_fp32": [MLP]}, "model": {"path": "outlier"}},
    "outlier in bf16": {**BF16, "model": {"path": "outlier"}},
    "outlier": {**FP16, **SHARDED, "model": {"path": "outlier"}},
    "zero": {**FP16, "model": {"path": "outlier"}, "shard": {"engine": "deepspeed", "stage": 2}},
    "residual": {**FP16, "model": {"path": "residual"}},
    "damaged": {**BF16, "model": {"path": "damaged"}},
    "rate": {"precision": {"compute": "bf16", "master": "compute"}, "optim__lr": 1e-6},
    "masked": {**BF16, "data__loss_on": "completion", "data__too_long": "truncate"},
    "starved": {**BF16},
    "width": {**BF16, "model__config__vocab_size": 261},
    "floor": {**SHARDED, "precision": {"compute": "fp16", "scale": {"init": 2.0**40, "floor": 2.0**40}}},
    "low": {"precision": {"compute": "fp16", "scale": {"mode": "static", "init": 1e-4}}},
}
# What each is ill of, the word for it that a person has to read, and what is to be pasted.
DISEASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "outlier": ("activations", f"{MLP}.up_proj reaches 1.09e+05", {"precision": {"keep_fp32": [MLP]}}),
    "zero": ("activations", f"first in {MLP}.up_proj", {"precision": {"compute": "bf16"}}),  # it keeps no modules
    "residual": ("activations", f"first in {MLP}.down_proj", {"precision": {"compute": "bf16"}}),
    "damaged": ("weights", "not finite in fp32, first in model.layers.1.self_attn.q_proj.weight", {}),
    "rate": ("learning rate", "optim.lr = 1e-06 cannot move 98%", {"precision": {"master": "fp32"}}),
    "masked": ("data", "0 of 40 rows have loss tokens", {}),
    "starved": ("data wait", "ms for data", {}),
    "width": ("sizes", "vocab_size = 261", {}),
    "floor": ("loss scale", "never below 1.09951e+12", {"precision": {"scale": {"floor": 1.0, "init": 65536.0}}}),
    "low": (
        "loss scale",
        "flushes 76% of the gradient",
        {"precision": {"scale": {"mode": "dynamic", "init": 65536.0}}},
    ),
}
HEALTHY = sorted(set(CONFIGS) - set(DISEASES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="module")
def paths(folder: Path) -> dict[str, str]:
    models(folder)
    record = {"prompt": "the cat sat on a mat " * 4, "completion": "x"}
    (folder / "cut.jsonl").write_text("\n".join([json.dumps(record)] * 40))
    found = {}
    for name, change in CONFIGS.items():
        model = change.get("model", {"config": dict(LLAMA)})
        if "path" in model:
            model = {"path": str(folder / model["path"])}
        change = {"shard": {"engine": "ddp"}, **change, "name": name.replace(" ", "-"), "model": model}
        if name == "masked":
            change["data__train"] = [{"path": str(folder / "cut.jsonl"), "format": "prompt_completion"}]
        found[name] = str(tiny.config(folder, **dict(sorted(change.items()))).rename(folder / f"{name}.yaml"))
    return found


@pytest.fixture(scope="module")
def found(paths: dict[str, str]) -> dict[str, list[Finding]]:
    first, second = worlds.run(examined, 2, paths, timeout=300)
    for name, rows in first.items():
        own, other = ([row for row in ranks if row["check"] != "space"] for ranks in (rows, second[name]))
        assert own == other, f"{name}: every rank has to come to the same"
    return {name: [from_json(row) for row in rows] for name, rows in first.items()}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding(
    found: dict[str, list[Finding]], name: str, figure: Callable[[str], None]
) -> None:
    figure(f"{sum(not finding.ok for finding in found[name])} findings of {len(found[name])} checks")
    assert [finding for finding in found[name] if not finding.ok] == []
    trials = {
        finding.check.removeprefix("trial "): finding.value
        for finding in found[name]
        if finding.check.startswith("trial")
    }
    assert {"fp32", "bf16"} <= set(trials)
    if name == "kept":
        assert "then it diverged" in trials["fp16"], (
            "what the configuration has cured already is told, and is no finding"
        )
        assert f"{STEPS} steps" in trials["as configured"]


@pytest.mark.parametrize("name", DISEASES)
def test_the_disease_is_named_first(found: dict[str, list[Finding]], name: str, figure: Callable[[str], None]) -> None:
    check, words, fragment = DISEASES[name]
    first = worst_first(found[name])[0]
    assert first.check == check
    assert first.level != "ok"
    assert words in first.value
    figure(f"first: {first.check}: {first.value}; to paste: {to_paste(found[name])}")
    assert first.why
    assert first.do
    assert to_paste(found[name]) == fragment
    assert sum(finding.level == "failed" for finding in found[name]) <= 1, "one disease is one failure"


def test_what_is_to_be_pasted_is_a_valid_configuration(found: dict[str, list[Finding]], paths: dict[str, str]) -> None:
    from mpdist.config import load

    for name, (_, _, fragment) in DISEASES.items():
        values = json.loads(Path(paths[name]).read_text())
        for section, changes in fragment.items():
            values[section] |= changes
        path = Path(paths[name]).with_name(f"{name} cured.yaml")
        path.write_text(json.dumps(values))
        load(path)


def test_fp16_names_the_module_and_both_ways_out(
    found: dict[str, list[Finding]], figure: Callable[[str], None]
) -> None:
    outlier = worst_first(found["outlier"])[0]
    figure(f"{outlier.value}: {outlier.why}: {outlier.do}")
    for finding in found["outlier in bf16"]:
        if finding.check.startswith("trial"):
            figure(f"the same weights in BF16, {finding.check}: {finding.value}")
    assert f"the first module with a non-finite output is {MLP}.up_proj" in outlier.why
    assert "FP32 and BF16 are finite from the same weights" in outlier.why
    assert outlier.do.startswith(f"precision.keep_fp32: [{MLP}]: tried, {STEPS} steps")
    assert "or precision.compute: bf16" in outlier.do
    residual = worst_first(found["residual"])[0]
    assert "keep_fp32:" not in residual.do, "the stream between the blocks cannot be kept"


# -- what is decided without a model ----------------------------------------------------------------------------------


def test_which_modules_fp16_cannot_hold() -> None:
    from mpdist.doctor.extremes import to_keep

    holders = {"", "model", "model.layers"}
    calm = dict.fromkeys(
        ["model.layers.0", "model.layers.0.mlp", "model.layers.0.mlp.up", "model.layers.0.mlp.down"], 1.0
    )
    block, mlp, up, down = calm

    def keep(into: dict[str, float], out_of: dict[str, float]) -> list[str] | None:
        return to_keep(calm | into, calm | out_of, holders)

    assert keep({}, {}) == []
    assert keep({down: 1e5}, {}) == [mlp], "what is made between two modules is made in the one around them"
    assert keep({}, {up: 1e5}) == [mlp], "its output has to be used in FP32, too"
    assert keep({}, {down: 1e5, mlp: 1e5}) == [block]
    assert keep({}, {down: 1e5, mlp: 1e5, block: 1e5}) is None
    assert keep({block: 1e5}, {}) is None


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ([5.50, 5.2, 4.9, 4.6, 4.3, 4.0], None),
        ([5.51, 5.3, 5.0, 4.7, 4.4, 4.1], None),
        ([5.50, 5.5, 5.5, 5.5, 5.5, 5.5], "the loss ends at 5.5"),
        ([5.80, 5.2, 4.9, 4.6, 4.3, 4.0], "the first loss is 5.8"),
    ],
    ids=["the same", "rounded", "it stands still", "another model"],
)
def test_convergence_is_judged_over_all_steps(tmp_path: Path, own: list[float], words: str | None) -> None:
    from mpdist.config import load
    from mpdist.doctor.judge import Loss
    from mpdist.doctor.trial import Told

    cfg = load(tiny.config(tmp_path)).config
    base = Told(cfg, losses=[5.5, 5.2, 4.9, 4.6, 4.3, 4.0])
    found = Loss(base, blocks=2, dropout=False).compare("bf16", Told(cfg, losses=own), 2.0**-7)
    assert (found is None) == (words is None)
    if found is not None and words is not None:
        assert words in found.value


def test_a_cure_that_does_not_train_as_fp32_does_comes_second(tmp_path: Path) -> None:
    from mpdist.config import load
    from mpdist.doctor.cures import Cured
    from mpdist.doctor.sequence import _cured
    from mpdist.doctor.trial import Told

    cfg = load(tiny.config(tmp_path)).config
    base, bf16 = Told(cfg, losses=[5.0], norms=[4.6]), Told(cfg, losses=[5.0], norms=[4.7])
    found, stages = Finding("weights", "x", "failed"), {"bf16": bf16, "fp16": Told(cfg)}
    for norm, skipped, first in ((4.5, 0, "keep_fp32"), (96.0, 0, "compute"), (4.5, 11, "compute")):
        told = Told(cfg, losses=[5.0], norms=[norm], skipped=skipped)
        made = _cured(found, Cured({"precision.keep_fp32": ["a"]}, told), stages, base)
        assert made.do.startswith(f"precision.{first}")
        assert list(made.settings) == [f"precision.{first}"]
        assert "precision.keep_fp32: [a]" in made.do
        assert "precision.compute: bf16" in made.do


def test_without_training_rates_and_labels_are_looked_at(folder: Path, paths: dict[str, str]) -> None:
    import numpy as np
    import torch

    from mpdist.config import load
    from mpdist.data import Rows
    from mpdist.doctor import before, stuck

    cfg = load(paths["rate"]).config
    low = stuck.look(stuck.sample(cfg), torch.bfloat16, cfg.optim.lr)
    (told,) = stuck.judged(low, cfg, "doubtful")
    assert told.level == "doubtful"
    assert low.share == pytest.approx(0.98, abs=0.02)
    assert stuck.judged(stuck.look(stuck.sample(cfg), torch.bfloat16, 1e-3), cfg, "doubtful") == []
    saved = stuck.sample(load(paths["outlier"]).config)
    assert saved is not None
    assert saved.abs().max() > 1e3, "of the model's own files"
    report = {"sources": [{"path": "a.jsonl", "unlabelled": 3, "kept": 4, "truncated": 3}]}
    labels = np.array([5, 0, 0, 0])
    rows = Rows(folder, {"seq_len": 8, "digest": "", "report": report, "parts": []}, labels, np.arange(5) * 8, labels)
    (told,) = before.judged(rows, cfg)
    assert (told.level, "75% of the rows have none" in told.value) == ("doubtful", True)
    assert "a.jsonl: 3 of 4 records" in told.why
