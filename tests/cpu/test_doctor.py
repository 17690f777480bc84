"""The doctor's findings about one machine and one configuration: planted ills, each found, and none where there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from mpdist import cli, hub, preflight
from mpdist.arch import Arch, look
from mpdist.config import Resolved, load
from mpdist.doctor import asked, examine, here, speed
from mpdist.findings import Finding
from mpdist.plan import Plan, make
from mpdist.world import World

CPU = torch.device("cpu")
ALONE = World(rank=0, ranks=1, local_rank=0, local_ranks=1, node=0, nodes=1, source="test")


def by_check(found: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in found}


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    status = cli.main(["doctor", *map(str, words)])
    said = capsys.readouterr()
    return status, said.out, said.err


# -- this machine ----------------------------------------------------------------------------------------------------


def test_without_a_configuration_it_says_what_this_machine_is(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--json")
    told = json.loads(out)
    found = {row["check"]: row for row in told["findings"]}
    assert status == 0, [row for row in told["findings"] if row["level"] == "failed"]
    wanted = ("software", "host", "driver", "environment", "device", "speed fp32", "speed bf16", "speed fp16", "host memory",
              "shared memory", "open files", "locked memory", "threads", "ports", "network")  # fmt: skip
    assert set(wanted) <= set(found)
    assert f"torch {torch.__version__}" in found["software"]["value"]
    assert found["speed fp32"]["value"].split()[1] in ("MFLOP/s", "GFLOP/s", "TFLOP/s")
    assert told["machine"]["versions"]["torch"] == torch.__version__
    assert told["seconds"] < 60


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "speeds", lambda own: [Finding("speed bf16", "slow", "doubtful", "emulated", "use fp32")])
    status, out, _ = run(capsys)
    assert status == 0
    assert out.splitlines()[0].split() == ["doubtful", "speed", "bf16", "slow"]
    assert out.splitlines()[-1].startswith("0 failed, 1 doubtful, ")


def test_what_torch_cannot_use_of_a_node_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch can use this node's GPUs")
    monkeypatch.setattr(here, "speeds", lambda own: [])
    monkeypatch.setattr(preflight, "visible_devices", lambda env: 8)
    status, out, _ = run(capsys)
    assert status == 4
    assert out.startswith("failed")
    assert "this node shows 8 NVIDIA devices" in out


def test_the_measured_speed_is_that_of_a_product_timed_here() -> None:
    rate = speed.measure(CPU, ["fp32"])["fp32"]
    left = torch.full((512, 512), 0.5)
    for _ in range(3):
        left @ left
    import time

    began = time.perf_counter()
    for _ in range(20):
        left @ left
    own = 20 * 2 * 512**3 / (time.perf_counter() - began)
    assert own / 8 < rate < own * 8, "of the same order, other processes notwithstanding"
    assert torch.get_float32_matmul_precision() == "highest"


H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("rates", "name", "native", "compute", "doubtful"),
    [
        ([{"fp32": 5e13, "bf16": 7e14, "fp16": 7e14}] * 2, H100, {"bf16", "fp16"}, "bf16", {}),
        ([{"fp32": 5e13, "bf16": 2e14, "fp16": 7e14}] * 2, H100, {"bf16", "fp16"}, "bf16", {"bf16": "busy, throttled"}),
        ([{"fp32": 5e13, "bf16": 7e14}] * 3 + [{"fp32": 5e13, "bf16": 4e14}], H100, {"bf16"}, "bf16", {"bf16": "rank 3 reach"}),
        ([{"fp32": 2e10, "bf16": 5e8, "fp16": 5e8}], "cpu", set(), None, {"bf16": "slower", "fp16": "slower"}),
        ([{"fp32": 2e10, "bf16": 5e8}], "cpu", set(), "fp32", {}),
        ([{"fp32": 2e10, "bf16": 5e8}], "cpu", set(), "bf16", {}),
        ([{"fp32": 2e10, "bf16": 1e10}], "cpu", {"bf16"}, "bf16", {"bf16": "slower"}),
        ([{"fp32": 2e10}, {"fp32": 1e10}], "cpu", set(), "fp32", {}),
        ([{"fp32": 1e12}], "Some Card 9000", {"bf16"}, "bf16", {}),
    ],
    ids=["healthy", "far below its sheet", "one slow rank", "a CPU alone", "unused", "told elsewhere", "native but slow",
         "CPU ranks share", "unknown card"],
)  # fmt: skip
def test_speeds_are_judged(
    rates: list[dict[str, float]], name: str, native: set[str], compute: str | None, doubtful: dict[str, str]
) -> None:
    found = speed.judged(rates, [name] * len(rates), [85_000_000_000] * len(rates), native, compute)
    assert {f.check.removeprefix("speed ") for f in found if not f.ok} == set(doubtful)
    for word, text in doubtful.items():
        assert text in by_check(found)[f"speed {word}"].why
    if name == H100:
        assert "% of its data sheet" in found[-1].value


@pytest.mark.parametrize(
    ("capability", "compute", "value", "do"),
    [
        ((9, 0), "bf16", "bf16, native", ""),
        ((7, 5), "fp16", "fp16, native", ""),
        ((7, 5), "bf16", "bf16, emulated", "use precision.compute: fp16"),
        ((6, 1), "fp16", "fp16, emulated", "use precision.compute: fp32"),
        ((6, 1), "fp32", "fp32", ""),
    ],
)
def test_a_gpu_is_known_by_its_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], compute: str, value: str, do: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = preflight.compute_dtype(compute, torch.device("cuda", 0))
    assert found.value == value
    assert found.do.startswith(do)
    assert found.ok == (not do)


def test_a_cpus_answer_is_torchs_or_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.machine, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    assert "bf16" in preflight.native(CPU)
    assert preflight.compute_dtype("bf16", CPU).ok


# -- what a configuration needs --------------------------------------------------------------------------------------


@pytest.fixture
def resolved(tmp_path: Path) -> Resolved:
    return load(tiny.config(tmp_path))


def plan(resolved: Resolved, memory: int | None = None) -> Plan:
    cfg = resolved.config
    return make(cfg, look(cfg.model.path, cfg.model.config, None), 1, 1, memory, device="cpu")


def test_a_healthy_configuration_has_nothing(resolved: Resolved, tmp_path: Path) -> None:
    found = asked.look(resolved, plan(resolved, 2**40), {})
    assert [f for f in found if not f.ok] == []
    assert {"plan", "space", "inputs", "hub"} == {f.check for f in found}


def test_a_plan_that_does_not_fit_ends_with_status_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "STEPS", ())
    status, out, _ = run(capsys, tiny.config(tmp_path), "--memory", "1MiB")
    assert status == 3
    assert out.splitlines()[0].startswith("failed")
    assert "of 1.00 MiB" in out


def test_a_fit_by_a_hair_is_doubtful(resolved: Resolved) -> None:
    foreseen = plan(resolved, 2**40).foreseen
    assert foreseen is not None
    assert asked.fit(plan(resolved, int(foreseen[0] * 1.01))).level == "doubtful"
    assert asked.fit(plan(resolved, 2 * foreseen[0])).ok


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"precision": {"compute": "bf16"}}, ["vocab_size = 260"]),
        ({"precision": {"compute": "fp32", "tf32": True}, "launch": {"device": "cuda"}}, ["vocab_size = 260"]),
        ({"precision": {"compute": "bf16"}, "model__config__vocab_size": 264}, []),
        ({"precision": {"compute": "bf16"}, "model__config__vocab_size": 264, "model__config__intermediate_size": 60},
         ["intermediate_size = 60"]),
        ({"precision": {"compute": "bf16"}, "model__config__vocab_size": 264, "data__seq_len": 30, "batch": {"micro": 1, "global": 8}},
         ["batch.micro x data.seq_len = 30"]),
    ],
)  # fmt: skip
def test_sizes_that_tensor_cores_pad(tmp_path: Path, changes: dict[str, Any], named: list[str] | None) -> None:
    cfg = load(tiny.config(tmp_path, **changes)).config
    shape = look(None, cfg.model.config, None)
    assert isinstance(shape, Arch)
    found = asked.sizes(shape, cfg)
    if named is None:
        assert found == []
    else:
        assert found[0].ok == (not named)
        assert [text for text in named if text not in found[0].value] == []
        assert "-> " in found[0].do or not named
        assert named != ["vocab_size = 260"] or "to the next multiple of 8: vocab_size 260 -> 264" in found[0].do


def test_local_files_that_are_not_there_are_found_all(tmp_path: Path) -> None:
    found = asked.inputs(load(tiny.config(tmp_path), ["data.train.0.path=/none/a.jsonl", "data.tokenizer=/none/t"]))
    assert [f.level for f in found] == ["failed"] * 2
    assert {f.status for f in found} == {2}


def test_a_disk_without_room_for_a_checkpoint_fails(resolved: Resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    full = SimpleNamespace(f_frsize=1, f_bavail=1000, f_blocks=10**9, f_files=10, f_favail=1)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    found = asked.room(resolved, plan(resolved))
    assert (found.level, found.status) == ("failed", 4)


def test_what_the_hub_has_to_give_is_doubtful_with_a_network_and_failed_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cfg = load(tiny.config(tmp_path, model={"path": "me/tiny"}, data__tokenizer="model")).config
    monkeypatch.setattr(hub, "unreachable", lambda address: None)
    (found,) = asked.from_hub(cfg, {})
    assert (found.level, "model.path = me/tiny: config and weights" in found.value) == ("doubtful", True)
    monkeypatch.setattr(hub, "unreachable", lambda address: "no route to host")
    (found,) = asked.from_hub(cfg, {})
    assert (found.level, found.status) == ("failed", 4)
    assert "mpdist fetch" in found.do
    (found,) = asked.from_hub(cfg, {"HF_HUB_OFFLINE": "1"})
    assert "HF_HUB_OFFLINE is set" in found.why


def test_where_a_tracker_has_its_key_and_never_which(tmp_path: Path) -> None:
    online = load(tiny.config(tmp_path, track={"wandb": {"mode": "online"}})).config
    offline = load(tiny.config(tmp_path, track={"wandb": {"mode": "offline"}})).config
    secret = "0123456789abcdef" * 2 + "01234567"
    assert asked.tracking(offline, {}) == []
    assert asked.tracking(online, {"WANDB_MODE": "offline"}) == []
    (found,) = asked.tracking(online, {"WANDB_API_KEY": secret})
    assert (found.ok, found.value) == (True, "WANDB_API_KEY is set")
    kept = tmp_path / "netrc"
    assert asked.tracking(online, {"NETRC": str(kept)})[0].level == "doubtful"
    kept.write_text(f"machine api.wandb.ai login user password {secret}\n")
    (found,) = asked.tracking(online, {"NETRC": str(kept)})
    assert found.ok
    assert secret not in str(found)
    (found,) = asked.tracking(online, {"NETRC": str(kept), "WANDB_BASE_URL": "https://wandb.example"})
    assert "wandb.example" in found.why


# -- the examination -------------------------------------------------------------------------------------------------


def test_one_process_is_examined_like_a_world(resolved: Resolved, tmp_path: Path) -> None:
    found = by_check(examine.run(resolved, ALONE))
    assert {"device", "compute dtype", "run directory", "speed fp32", "versions"} <= set(found)
    assert (found["labels"].level, "not looked at" in found["labels"].value) == ("doubtful", True)
    assert "all-reduce fp32" not in found, "there is no link to try"
    assert not (tmp_path / "runs").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "train.jsonl"]


def test_weights_that_are_not_finite_are_found_in_their_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from mpdist.doctor.before import finite

    good, bad = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"x": torch.ones(3, 4), "none": torch.ones(0, 4), "ids": torch.arange(3)}, good)
    save_file({"y": torch.tensor([1.0, float("nan")]).bfloat16(), "z": torch.ones(2)}, bad)
    (found,) = finite([good], 2**20)
    assert (found.level, found.value) == ("ok", "3 tensors, 72 B, are finite")
    (found,) = finite([good, bad], 2**20)
    assert (found.level, found.value) == ("failed", "y in b.safetensors holds non-finite values")
    (found,) = finite([good, bad], 1)
    assert "4 more were not looked at (use --debug)" in found.value
    assert finite(None, 1) == []
    assert finite([], 1)[0].level == "doubtful"


def test_a_failed_step_ends_the_examination(resolved: Resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Finding("first", "bad", "failed", "because", "mend it")
    monkeypatch.setattr(examine, "STEPS", (lambda s: [bad], lambda s: pytest.fail("it went on")))
    assert examine.run(resolved, ALONE) == [bad]
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("words", "env", "text"),
    [
        (["--ranks", "2"], {}, "give CONFIG with it"),
        (["--memory", "1GiB"], {}, "give CONFIG with it"),
        (["CONFIG", "--ranks", "2"], {"RANK": "0", "WORLD_SIZE": "2"}, "this process is a rank already"),
        (["CONFIG", "--memory", "lots"], {}, "not an amount of memory"),
        (["CONFIG", "batch.mirco=1"], {}, "batch.micro"),
        (["."], {}, "mpdist doctor . --html FILE"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    words: list[str], env: dict[str, str], text: str,
) -> None:  # fmt: skip
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    path = tiny.config(tmp_path)
    status, _, err = run(capsys, *(path if word == "CONFIG" else word for word in words))
    assert status == 2
    assert text in err
