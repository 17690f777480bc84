"""Packing conserves every token and every target, and lets no document see or predict another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpdist.data import Rows, Source, collate, open_rows, prepare
from mpdist.data.pack import best_fit, pack
from mpdist.errors import UsageError

PACKINGS = ("none", "concat", "best_fit")


def rows_of(tmp_path: Path, texts: list[str], **settings: Any) -> Rows:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {"tokenizer": "bytes", "seq_len": 64, "packing": "none", "cache": tmp_path / "cache"} | settings
    return open_rows(prepare([Source(str(path))], say=lambda _: None, **settings))


def naive_best_fit(lengths: np.ndarray, capacity: int) -> int:
    room: list[int] = []
    for size in sorted(lengths.tolist(), reverse=True):
        fits = [left for left in room if left >= size]
        if fits:
            room.remove(min(fits))
        room.append((min(fits) if fits else capacity) - size)
    return len(room)


def test_best_fit_is_best_fit_decreasing() -> None:
    rng = np.random.default_rng(0)
    for trial in range(60):
        capacity = int(rng.integers(2, 60))
        lengths = rng.integers(1, capacity + 1, size=int(rng.integers(0, 120)))
        bins = best_fit(lengths, capacity)
        used = np.bincount(bins, weights=lengths, minlength=1)
        assert used.max() <= capacity
        if len(lengths):
            assert (used > 0).all(), trial
            assert len(used) == naive_best_fit(lengths, capacity), trial


def test_best_fit_fills_rows_and_is_fast_for_many_documents() -> None:
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(5.5, 1.0, 300_000), 2, 2048).astype(np.int64)
    starts, sizes, rows = pack(lengths, 2048, "best_fit")
    assert len(starts) == len(lengths)  # none was cut
    assert lengths.sum() / (2048 * (rows[-1] + 1)) >= 0.985
    assert sizes.sum() == lengths.sum()


def test_no_packing_conserves_tokens_and_cuts_only_what_it_must() -> None:
    rng = np.random.default_rng(2)
    for _ in range(60):
        seq_len = int(rng.integers(2, 40))
        lengths = rng.integers(1, 3 * seq_len, size=int(rng.integers(1, 60)))
        ends = np.cumsum(lengths)
        for packing in PACKINGS:
            starts, sizes, rows = pack(lengths, seq_len, packing)
            covered = np.zeros(int(ends[-1]), dtype=int)
            for start, size in zip(starts, sizes, strict=True):
                covered[start : start + size] += 1
                assert np.searchsorted(ends, start, "right") == np.searchsorted(ends, start + size - 1, "right")
            assert (covered == 1).all()
            assert (np.diff(rows) >= 0).all()
            assert set(rows.tolist()) == set(range(int(rows[-1]) + 1))
            fill = np.bincount(rows, weights=sizes)
            assert fill.max() <= seq_len
            if packing == "concat":
                assert (fill[:-1] == seq_len).all()
            else:
                assert len(starts) == (-(-lengths // seq_len)).sum()


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_rows_hold_every_document_and_every_target(tmp_path: Path, packing: str) -> None:
    rng = np.random.default_rng(3)
    texts = [f"{i}:" + "x" * int(rng.integers(0, 150)) for i in range(200)]
    rows = rows_of(tmp_path, texts, packing=packing)
    wanted = sorted(b for text in texts for b in [*text.encode(), -1])
    found, targets, pieces = [], 0, 0
    alphabet = {}
    from mpdist.data import byte_tokenizer

    tokenizer = byte_tokenizer()
    for number in range(260):
        alphabet[number] = -1 if number == 0 else (tokenizer.decode([number]).encode() or b"?")[0]
    for i in range(len(rows)):
        ids, labels, positions = rows.read(i)
        assert len(ids) == rows.token_counts[i] <= 64
        assert (labels >= 0).sum() == rows.label_counts[i]
        found += [alphabet[number] for number in ids.tolist()]
        firsts = positions == 0
        assert firsts[0]
        assert (np.diff(positions)[~firsts[1:]] == 1).all()
        # a target is the next token of the same piece: all of them, and none across pieces
        assert (labels[:-1] == np.where(firsts[1:], -100, ids[1:])).all()
        assert labels[-1] == -100
        targets += int((labels >= 0).sum())
        pieces += int(firsts.sum())
    assert sorted(found) == wanted
    assert targets == len(wanted) - pieces
    assert rows.report["sources"][0]["label_tokens"] == targets


def test_c77_the_first_token_of_a_document_is_never_a_target(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, ["a" * 5, "b" * 9], seq_len=16, packing="best_fit")  # 6 and 10 with their end tokens
    assert len(rows) == 1
    assert rows.token_counts.tolist() == [16]
    assert rows.label_counts.tolist() == [14]
    positions = collate(rows, np.array([0]), 1)["position_ids"][0]
    assert positions.tolist() == [*range(6), *range(10)]


def test_c78_the_targets_are_the_same_packed_and_not(tmp_path: Path) -> None:
    documents = ["a" * 7, "b" * 2]
    counts = [rows_of(tmp_path, documents, packing=p, cache=tmp_path / p).label_counts.sum() for p in PACKINGS]
    assert counts == [9, 9, 9]


@pytest.mark.parametrize("packing", PACKINGS)
def test_too_long(tmp_path: Path, packing: str) -> None:
    texts = ["a" * 10, "b" * 100, "c" * 63]  # 11, 101 and 64 tokens
    with pytest.raises(UsageError, match=r"data\.jsonl:2: the record has 101 tokens, more than data\.seq_len = 64"):
        rows_of(tmp_path, texts, packing=packing, too_long="error")
    rows = rows_of(tmp_path, texts, packing=packing, too_long="drop")
    assert rows.report["sources"][0]["dropped"] == {"too long": 1}
    assert rows.token_counts.sum() == 75
    rows = rows_of(tmp_path, texts, packing=packing, too_long="truncate")
    assert rows.report["sources"][0]["truncated"] == 1
    assert rows.token_counts.sum() == 75 + 64
    ends = sum(int((rows.read(i)[0] == 0).sum()) for i in range(len(rows)))
    assert ends == 2  # the truncated one has none
    for too_long in ("split", "auto"):
        rows = rows_of(tmp_path, texts, packing=packing, too_long=too_long)
        assert rows.report["sources"][0]["split"] == 1
        assert rows.token_counts.sum() == 75 + 101


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_source_of_which_nothing_is_left_takes_no_row(tmp_path: Path, packing: str) -> None:
    for name, text in (("long", "x" * 50), ("short", "y" * 5)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    settings: dict[str, Any] = {"tokenizer": "bytes", "seq_len": 8, "packing": packing, "too_long": "drop"}
    both = [Source(str(tmp_path / name)) for name in ("long.jsonl", "short.jsonl")]
    rows = open_rows(prepare(both, cache=tmp_path / "c", say=lambda _: None, **settings))
    assert [report["rows"] for report in rows.report["sources"]] == [0, 1]
    with pytest.raises(UsageError, match="0 of 1 rows have loss tokens"):
        prepare(both[:1], cache=tmp_path / "c", say=lambda _: None, **settings)


def test_auto_is_an_error_for_prompts_and_completions(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "p" * 100, "completion": "c"}))
    with pytest.raises(UsageError, match="which auto is for the format prompt_completion"):
        prepare(
            [Source(str(path), "prompt_completion")],
            tokenizer="bytes",
            seq_len=64,
            cache=tmp_path / "cache",
            say=lambda _: None,
        )
