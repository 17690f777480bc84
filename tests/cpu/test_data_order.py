"""Which rows are seen when and by whom: a pure function of the seed and the window's number."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from mpdist.data import Order, Rows, Source, collate, deal, micro_batches, open_rows, prepare
from mpdist.data.order import permute
from mpdist.errors import UsageError


def rows_of(tmp_path: Path, *groups: list[str], weights: tuple[float, ...] = ()) -> Rows:
    sources = []
    for number, texts in enumerate(groups):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append(Source(str(path), weight=weights[number] if weights else 1.0))
    return open_rows(
        prepare(sources, tokenizer="bytes", seq_len=64, packing="none", cache=tmp_path / "cache", say=lambda _: None)
    )


def epoch(order: Order, number: int) -> list[int]:
    first = number * order.windows_per_epoch
    return np.concatenate([order.window(first + i) for i in range(order.windows_per_epoch)]).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 97, 1000, 4096, 5001])
def test_c63_every_epoch_is_a_permutation_of_its_own(size: int) -> None:
    order = Order(size, 7, seed=3)
    epochs = [epoch(order, number) for number in range(3)]
    for rows in epochs:
        assert sorted(rows) == list(range(size))
    if size > 4:
        assert epochs[0] != epochs[1] != epochs[2]
        assert epoch(Order(size, 7, seed=4), 0) != epochs[0]
    assert epoch(Order(size, 7, seed=3), 2) == epochs[2]  # computed alone
    assert epoch(Order(size, 7, seed=3, shuffle=False), 1) == list(range(size))


def test_the_permutation_is_even() -> None:
    counts = np.zeros((6, 6), dtype=int)
    orders = set()
    for seed in range(3000):
        rows = permute(np.arange(6), 6, seed)
        counts[np.arange(6), rows] += 1
        orders.add(tuple(rows.tolist()))
    assert len(orders) > 690  # of 720; 3000 draws leave out 11 on average
    assert abs(counts - 500).max() < 100  # 5 standard deviations


def test_the_order_does_not_change_between_versions() -> None:
    assert Order(10, 4, seed=0).window(0).tolist() == [7, 5, 1, 0]
    assert Order(10**12, 4, seed=2**40).window(10**9).tolist() == [
        320293151368,
        931049639626,
        970843521935,
        449533768466,
    ]


@pytest.mark.alone
def test_any_window_of_a_huge_epoch_is_there_at_once() -> None:
    order = Order(10**9, 256, seed=1)
    for k in (order.windows_per_epoch // 100, order.windows_per_epoch * 99 // 100, 5 * order.windows_per_epoch):
        start = time.perf_counter()
        rows = order.window(k)
        assert time.perf_counter() - start < 0.5
        assert len(rows) == len(set(rows.tolist())) == 256
        assert np.array_equal(rows, Order(10**9, 256, seed=1).window(k))


def test_c26_the_short_last_window_is_kept_or_dropped_as_told() -> None:
    for rows, windows in ((3, 1), (6, 2), (8, 2)):
        order = Order(rows, 4, seed=0)
        assert order.windows_per_epoch == windows
        assert sorted(epoch(order, 0)) == list(range(rows))
        assert not set(order.window(windows - 1)) & set(order.window(0)) or windows == 1
    order = Order(6, 4, seed=0, last_window="drop")
    assert order.windows_per_epoch == 1
    assert len(order.window(1)) == 4
    with pytest.raises(UsageError, match="an epoch of 3 rows has no window of 4 rows"):
        Order(3, 4, seed=0, last_window="drop")


def test_c81_one_row_for_two_ranks_is_one_window_with_filler(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, ["hello"])
    order = Order(rows, 2, seed=0)
    assert order.windows_per_epoch == 1
    batches = [micro_batches(rows, order, 0, micro=1, ranks=2, rank=rank) for rank in range(2)]
    assert [len(b) for b in batches] == [1, 1]
    assert [int((b[0]["labels"] >= 0).sum()) for b in batches] == [5, 0]
    with pytest.raises(UsageError, match="an epoch of 0 rows"):
        Order(0, 2, seed=0)


def test_c126_filler_rows_are_visible_tokens_without_targets(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, ["hello"])
    for numbers in ([0], []):
        batch = collate(rows, np.array(numbers, dtype=np.int64), 2)
        assert {name: (a.shape, a.dtype) for name, a in batch.items()} == dict.fromkeys(
            ("input_ids", "labels", "position_ids"), ((2, 8), np.dtype("int64"))
        )
        assert (batch["labels"][len(numbers) :] == -100).all()
        assert batch["position_ids"][1].tolist() == list(range(8))
        assert "attention_mask" not in batch


def test_c74_padding_is_on_the_right_and_never_a_target(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, ["a" * 7, "bb"])  # 8 and 3 tokens
    batch = collate(rows, np.array([0, 1]), 2)
    assert batch["labels"].shape == (2, 8)
    assert (batch["labels"] >= 0).sum() == 9
    assert (batch["labels"][1, 2:] == -100).all()
    assert batch["input_ids"][1, :3].tolist() == rows.read(1)[0].tolist()
    assert batch["position_ids"].tolist() == [list(range(8))] * 2
    assert collate(rows, np.array([1]), 1)["labels"].shape == (1, 8)
    assert collate(rows, np.array([1]), 1, length=32)["labels"].shape == (1, 32)


def test_c87_ranks_share_the_rows_and_none_is_seen_twice() -> None:
    order = Order(8, 8, seed=0)
    dealt = deal(order.window(0), micro=2, ranks=2)
    ranks = [{int(n) for micro in dealt for n in micro[rank]} for rank in range(2)]
    assert not ranks[0] & ranks[1]
    assert ranks[0] | ranks[1] == set(range(8))


@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (2, 1), (4, 2), (1, 3), (2, 4), (8, 1)])
def test_c105_every_cut_of_a_window_has_the_same_rows(tmp_path: Path, micro: int, ranks: int) -> None:
    rows = rows_of(tmp_path, ["x" * n for n in range(1, 12)])
    order = Order(rows, 8, seed=5)
    total = 0
    for k in range(2):
        window = order.window(k)
        dealt = deal(window, micro, ranks)
        assert len(dealt) == -(-len(window) // (micro * ranks))
        assert all(len(per_rank) == ranks for per_rank in dealt)
        assert np.concatenate([r for m in dealt for r in m]).tolist() == window.tolist()
        for rank in range(ranks):
            for batch in micro_batches(rows, order, k, micro=micro, ranks=ranks, rank=rank):
                assert len(batch["labels"]) == micro
                total += int((batch["labels"] >= 0).sum())
    assert total == rows.label_counts.sum() == sum(range(1, 12))


@pytest.mark.parametrize("ranks", [1, 2])
def test_c86_evaluation_sees_every_row_once(tmp_path: Path, ranks: int) -> None:
    rows = rows_of(tmp_path, ["x" * n for n in (3, 1, 4, 1, 5)])
    order = Order(rows, 2 * ranks, seed=0, shuffle=False)
    real = 0
    for k in range(order.windows_per_epoch):
        for rank in range(ranks):
            for batch in micro_batches(rows, order, k, micro=2, ranks=ranks, rank=rank):
                real += int(((batch["labels"] >= 0).sum(1) > 0).sum())
    assert real == 5


def test_weights_repeat_the_whole_part_and_draw_the_fraction_anew(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, ["a" * 5] * 10, ["b" * 6] * 4, weights=(0.5, 2.25))
    order = Order(rows, 3, seed=0)
    assert order.epoch_rows == 5 + 9
    seen = [np.bincount(epoch(order, number), minlength=14) for number in range(6)]
    for counts in seen:
        assert counts[:10].sum() == 5
        assert counts[:10].max() == 1
        assert sorted(counts[10:]) == [2, 2, 2, 3]
    assert len({tuple(c[:10]) for c in seen}) > 3
    assert len(epoch(Order(rows, 3, seed=0, shuffle=False), 0)) == 14
