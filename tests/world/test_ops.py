"""Operations by dtype, counted on a step of a live run: the model's products in 16 bit, what adds up in FP32."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections import Counter
from typing import Any

import pytest
import tiny
import worlds

from mpdist.doctor.ops import Ran, findings
from mpdist.errors import UsageError

pytestmark = pytest.mark.world
CASES: list[tuple[int, list[str], bool]] = [
    (1, ["shard.engine=ddp"], False),
    (2, ["precision.keep_fp32=[lm_head]", "model.attention=eager"], False),
    (1, ["shard.engine=ddp", "model.attention=eager"], True),
]


def session_ops(rank: int, path: str, overrides: list[str], planted: bool) -> str:
    """What `mpdist doctor CONFIG --ops --json` prints on this rank. planted: attention's softmax stays in 16 bit."""
    import torch

    from mpdist.commands.machine import doctor

    own = torch.nn.functional.softmax
    if planted:
        torch.nn.functional.softmax = lambda x, dim=None, dtype=None: own(x, dim=dim)  # type: ignore[assignment]
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        status = doctor([path, "--ops", "--json", "precision.compute=bf16", *overrides])
    assert status == 0
    assert not os.path.exists(os.path.join(os.path.dirname(path), "runs", "run"))  # it leaves no run behind
    return told.getvalue()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """For each case {check: finding}."""
    path = tiny.config(tmp_path_factory.mktemp("ops"))
    found = []
    for ranks, overrides, planted in CASES:
        said = worlds.run(session_ops, ranks, str(path), overrides, planted)
        assert said[1:] == [""] * (ranks - 1)
        found.append({row["check"]: row for row in json.loads(said[0][said[0].index("{") :])["findings"]})
    return found


def counted(row: dict[str, Any]) -> dict[str, Counter[str]]:
    """{dtype: {phase: n}}"""
    found = {}
    for part in row["value"].partition(" (")[0].split("; "):
        dtype, _, phases = part.partition(": ")
        found[dtype] = Counter({p.split()[1]: int(p.split()[0]) for p in phases.split(", ")})
    return found


def test_each_linear_layer_is_a_product_forward_and_two_backward(told: list[dict[str, dict[str, Any]]]) -> None:
    linears = 2 * 7  # of two layers
    sdpa, eager, _ = (counted(case["ops: products"]) for case in told)
    assert sdpa["bf16"]["backward"] == 2 * linears * 4  # micro-batches; the head's are made with the loss
    assert sdpa["bf16"]["forward"] > linears * 4
    assert set(sdpa) == {"bf16"}
    assert counted(told[0]["ops: attention"]) == {"bf16": {"forward": 8, "backward": 8}}
    attention = 2 * 2  # products of two layers
    assert eager["bf16"] == {"forward": (linears + attention) * 2, "backward": 2 * (linears + attention) * 2}
    assert eager["fp32"]["forward"] > 0  # the head, kept


def test_what_adds_up_is_fp32_and_said_so(told: list[dict[str, dict[str, Any]]]) -> None:
    for case in told[:2]:
        assert {row["level"] for check, row in case.items() if check.startswith("op")} == {"ok"}
        for kind in ("norms", "loss"):
            assert set(counted(case[f"ops: {kind}"])) == {"fp32"}
        assert set(counted(case["ops: optimizer"])) <= {"fp32", "float64"}
        assert counted(case["op rsqrt"]) == {"fp32": {"forward": 5 * (4 if case is told[0] else 2)}}
        assert counted(case["op _fused_adamw"])["fp32"]["step"] == 2  # two groups
    assert "inside the attention kernel" in told[0]["ops: softmax"]["value"]
    assert counted(told[1]["ops: softmax"]) == {"fp32": {"forward": 4, "backward": 4}}
    assert [case["keep_fp32"]["value"] for case in told] == ["no module", "lm_head", "no module"]
    assert set(counted(told[1]["ops: collectives"])) >= {"bf16", "fp32"}


def test_a_softmax_in_16_bit_is_found(told: list[dict[str, dict[str, Any]]]) -> None:
    row = told[2]["ops: softmax"]
    assert row["level"] == "doubtful"
    assert "bf16: 8 forward" in row["value"]
    assert "model.attention" in row["do"]


def test_pure_16_bit_masters_are_no_finding_and_a_loss_in_16_bit_is_one() -> None:
    counts = {Ran("_fused_adamw", "optimizer", "bf16", "step"): 2, Ran("logsumexp", "loss", "fp16", "forward"): 1}
    rows = {row.check: row for row in findings(counts, [], "bf16", wide_masters=False)}
    assert rows["ops: optimizer"].ok
    assert rows["ops: loss"].level == "doubtful"
    assert not {row.check: row for row in findings(counts, [], "bf16", wide_masters=True)}["ops: optimizer"].ok


def test_it_needs_a_configuration() -> None:
    from mpdist.commands.machine import doctor

    with pytest.raises(UsageError, match="--ops needs the CONFIG"):
        doctor(["--ops"])
