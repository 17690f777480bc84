"""Rehearsed damage to a checkpoint's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpdist.drill import Drill, corrupt


def checkpoint(folder: Path, step: int, content: bytes) -> Path:
    tensors = folder / f"step-{step:08d}" / "tensors"
    tensors.mkdir(parents=True)
    (tensors / "__0_0.distcp").write_bytes(b"small")
    (tensors / "__1_0.distcp").write_bytes(content)
    return tensors.parent


@pytest.mark.parametrize(
    ("how", "before", "expected"),
    [
        ("flip", None, b"abcddfgh"),
        ("truncate", None, b"abcdefg"),
        ("stale", b"ABCDEFGH", b"ABCDEFGH"),
        ("stale", b"shorter", bytes(8)),
        ("stale", None, bytes(8)),
    ],
)
def test_the_largest_file_is_damaged_and_no_other(
    tmp_path: Path, how: str, before: bytes | None, expected: bytes
) -> None:
    if before is not None:
        checkpoint(tmp_path, 10, before)
    path = checkpoint(tmp_path, 20, b"abcdefgh")
    checkpoint(tmp_path, 30, b"ABCDEFGH")
    corrupt(path, how)
    assert (path / "tensors" / "__1_0.distcp").read_bytes() == expected
    assert (path / "tensors" / "__0_0.distcp").read_bytes() == b"small"
    assert before is None or (tmp_path / "step-00000010/tensors/__1_0.distcp").read_bytes() == before


def test_it_is_on_record_before_it_strikes_and_strikes_once(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 20, b"abcdefgh")
    told = list[tuple[str, int, int, bytes]]()

    def record(name: str, number: int, rank: int) -> None:
        told.append((name, number, rank, (path / "tensors" / "__1_0.distcp").read_bytes()))

    plan = {"corrupt_at": {"save": 2, "how": "truncate"}}
    drill = Drill(plan, 0, [], record)
    for save in (1, 2, 2, 3):
        drill.published(path, save)
    assert told == [("corrupt_at#2", 2, 0, b"abcdefgh")]
    assert (path / "tensors" / "__1_0.distcp").read_bytes() == b"abcdefg"
    Drill(plan, 0, ["corrupt_at#2"], record).published(path, 2)
    assert len(told) == 1


def test_every_rank_knows_whether_an_attempts_numbers_are_rehearsed() -> None:
    def drill(**plan: dict[str, object]) -> Drill:
        return Drill(plan, 0, [], lambda *_: None)

    listed = drill(overflow_at={"attempts": [2], "rank": 1, "micro": 2})
    assert [listed.of_numbers(attempt, 2) for attempt in (1, 2)] == ["", "overflow_at"]
    assert listed.of_numbers(2, 1) == "", "there is no second micro-batch"
    assert drill(nan_loss_at={"attempts": "all", "rank": 1}).of_numbers(7, 1) == "nan_loss_at"
    assert drill(kill_at={"attempt": 1, "rank": 0}).of_numbers(1, 1) == ""
