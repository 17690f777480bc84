"""The measured ledger: states to the byte, a followed window beside its plan, and a wrong plan caught."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import worlds

pytestmark = pytest.mark.world

# Large enough that a row's error is no matter of the floor below which nothing is said.
SHAPE: dict[str, Any] = tiny.LLAMA | {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 2048,
}  # fmt: skip
WIDE = {"model": {"config": SHAPE, "attention": "sdpa"}, "data__packing": "none", "budget__steps": 1}


def class_bytes(rows: list[dict[str, Any]], rank: int, *names: str) -> int:
    return sum(row["measured_bytes"] for row in rows if row["rank"] == rank and row["row"] in names)


def trained(folder: Path, ranks: int, **changes: Any) -> tiny.Result:
    tiny.write_text(folder / "train.jsonl", 200, longest=60)
    return tiny.train(folder, ranks, **{**WIDE, **changes})


def total_of(shape: dict[str, Any]) -> int:
    from mpdist import arch

    found = arch.from_mapping(shape, "test")
    assert isinstance(found, arch.Arch)
    return found.total


STATES = ("parameters", "working", "gradients", "moments")


def test_fsdp2_holds_16_bytes_a_parameter_over_its_ranks(tmp_path: Path, figure: Callable[[str], None]) -> None:
    for compute in ("bf16", "fp32"):
        rows = trained(tmp_path, 2, precision__compute=compute, name=compute).ledger()
        assert not [row for row in rows if row.get("off")]
        for rank in (0, 1):
            held = class_bytes(rows, rank, *STATES)
            figure(f"{compute}, rank {rank} of 2: {held} B measured / {total_of(SHAPE)} = {held / total_of(SHAPE)}")
            assert held == 16 * total_of(SHAPE) // 2, (compute, rank)


# Bytes a parameter on each of w ranks in BF16, with gradients in FP32: DeepSpeed's own table for its stages 1 to 3, in the
# variants that add gradients up in FP32. Its stage 1 keeps whole sums until the last micro-batch: 4 w more at the peak.
ZERO = {1: lambda w: 2 + 16 / w, 2: lambda w: 2 + 16 / w, 3: lambda w: 18 / w}


@pytest.mark.parametrize("stage", ZERO)
def test_each_stage_of_deepspeed_holds_its_row_of_the_table(
    stage: int, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    run = trained(tmp_path, 2, shard={"engine": "deepspeed", "stage": stage}, precision__compute="bf16")
    for rank in (0, 1):
        held = class_bytes(run.ledger(), rank, *STATES) / total_of(SHAPE)
        figure(f"rank {rank} of 2: {held:.4f} B a parameter measured, the table's {ZERO[stage](2)}")
        assert held == pytest.approx(ZERO[stage](2), rel=1e-3)


def test_a_followed_window_stands_beside_its_plan_and_nothing_is_off(tmp_path: Path) -> None:
    run = trained(tmp_path, 2, precision__compute="bf16", model__config=SHAPE)
    rows = {row["row"]: row for row in run.ledger() if row["rank"] == 1}
    assert {"activations", "logits", "comm", "working", "overhead", "peak"} <= rows.keys()
    assert not [row for row in run.ledger() if row.get("off")]
    assert not [e for e in run.events("warning") if e["reason"].startswith("ledger")]
    assert rows["peak"]["measured_bytes"] == pytest.approx(rows["peak"]["planned_bytes"], rel=0.08)
    assert rows["peak"]["measured_bytes"] < rows["overhead"]["measured_bytes"]


def session_with_a_copy(rank: int, path: str, kept: bool) -> tuple[int, str]:
    """A session whose optimizer first makes FP32 copies of the gradients: kept for good, or gone after the step."""
    from torch.optim import AdamW

    step = AdamW.step

    def copying(self: Any, *args: Any) -> Any:
        spare = [param.grad.clone() for group in self.param_groups for param in group["params"]]
        if kept:
            self.spare = spare
        return step(self, *args)

    AdamW.step = copying  # type: ignore[method-assign]
    return tiny.session(rank, path, [])


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "passing"])
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_an_extra_copy_of_the_gradients_is_named(
    engine: str, kept: bool, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    tiny.write_text(tmp_path / "train.jsonl", 200, longest=60)
    path = tiny.config(tmp_path, **WIDE, shard__engine=engine)
    worlds.run(session_with_a_copy, 2, str(path), kept)
    run = tiny.Result(tmp_path / "runs" / "run", [(0, "")])
    warned = [e["reason"] for e in run.events("warning") if e["reason"].startswith("ledger")]
    assert len(warned) == 1, warned
    figure(warned[0])
    share = total_of(SHAPE) // (2 if engine == "fsdp2" else 1)
    off = [row for row in run.ledger() if row.get("off")]
    assert {row["rank"] for row in off} == {0, 1}
    if kept:
        assert {(r["row"], r["dtype"], r["elements"], r["measured_bytes"]) for r in off} == {
            ("unaccounted", "float32", share, 4 * share)
        }
        assert "a copy of gradients that no row plans" in warned[0]
    else:
        assert {row["row"] for row in off} == {"optimizer_temporaries"}
        assert "test_ledger.py" in warned[0] or "optim.py" in warned[0]


def test_a_plan_that_is_wrong_is_caught_by_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpdist import ledger

    run = trained(tmp_path, 2, precision__compute="bf16")
    plan = json.loads((run.folder / "plan.json").read_text())
    book = {
        row["row"]: {"bytes": row["rest_bytes"], "peak": row["peak_bytes"], "formula": row["formula"], "error": 0.1}
        for row in plan["rows"]
    }
    book["moments"]["bytes"] //= 2  # a plan that forgot the second moment
    rows = [{k: v for k, v in row.items() if k not in ("off", "cause", "planned_bytes")} for row in run.ledger()]
    rows = [row for row in rows if row["measured_bytes"] is not None and row["row"] not in ("peak", "overhead")]
    said = ledger.warnings(ledger.beside_plan(rows, book))
    assert [text.split(": ")[1] for text in said] == ["moments"]
    assert f"{4 * total_of(SHAPE) // 2:,} bytes more than" in said[0]


def test_rows_of_one_document_each_need_no_mask_and_may_hold_less() -> None:
    from mpdist import ledger

    plan = {"bytes": 0, "peak": 12 << 20, "formula": "so many tokens", "error": 0.03, "least": 10 << 20}

    def beside(size: int) -> dict[str, Any]:
        row = {
            "row": "activations",
            "rank": 0,
            "dtype": None,
            "elements": None,
            "measured_bytes": size,
            "site": "a.py:1",
        }
        return ledger.beside_plan([row], {"activations": plan})[0]

    fewer = beside((10 << 20) - 16)
    assert "off" not in fewer
    assert fewer["cause"].startswith(
        "2,097,168 bytes less than so many tokens; 10,485,760 bytes where each row holds one"
    )
    assert beside(9 << 20)["off"]
    assert beside(13 << 20)["off"]
    assert "off" not in beside(11 << 20)
