"""Reading records: every kind of file, and what makes a record bad."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpdist.data import Rows, Source, open_rows, prepare
from mpdist.data.records import Bad, locate, read
from mpdist.errors import UsageError


def lines(path: Path, *records: object, newline: str = "\n") -> str:
    path.write_bytes(newline.join(json.dumps(record) for record in records).encode() + newline.encode())
    return str(path)


def rows_of(tmp_path: Path, *sources: Source, say=lambda _: None, **settings: object) -> Rows:
    settings = {"tokenizer": "bytes", "seq_len": 64, "packing": "none", "cache": tmp_path / "cache", **settings}
    return open_rows(prepare(list(sources), say=say, **settings))


def texts(source: Source) -> list[object]:
    return [record.data for record in read(locate(source))]


def test_the_same_records_from_every_kind_of_file(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    words = ["one", "two \u00e4", "three\nlines"]
    table = pyarrow.table({"text": words, "other": [1, 2, 3]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    datasets.Dataset.from_dict({"text": words}).save_to_disk(str(tmp_path / "saved"))
    split = {"train": datasets.Dataset.from_dict({"text": words}), "test": datasets.Dataset.from_dict({"text": ["x"]})}
    datasets.DatasetDict(split).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "array.json").write_text(json.dumps([{"text": word} for word in words], indent=1))
    (tmp_path / "folder").mkdir()
    lines(tmp_path / "folder" / "train.jsonl", *({"text": word} for word in words))
    for number, word in enumerate(words):
        (tmp_path / f"part{number}.txt").write_text(word)
    sources = [
        Source(lines(tmp_path / "a.jsonl", *({"text": word} for word in words))),
        Source(lines(tmp_path / "renamed.jsonl", *({"body": word} for word in words)), fields={"text": "body"}),
        Source(str(tmp_path / "array.json")),
        Source(str(tmp_path / "a.parquet")),
        Source(str(tmp_path / "saved")),
        Source(str(tmp_path / "splits"), split="train"),
        Source(str(tmp_path / "folder"), split="train"),
        Source(str(tmp_path / "part*.txt")),
    ]
    for source in sources:
        assert texts(source) == [{"text": word} for word in words], source
    digests = {rows_of(tmp_path, source).digest for source in sources}
    assert len(digests) == 1


def test_reading_can_start_behind_any_record(tmp_path: Path) -> None:
    one = lines(tmp_path / "a1.jsonl", {"text": "a"}, {"text": "b"})
    lines(tmp_path / "a2.jsonl", {"text": "c"}, {"text": "d"})
    source = Source(str(tmp_path / "a*.jsonl"))
    whole = list(read(locate(source)))
    assert whole[0].place() == f"{one}:1"
    assert whole[3].place() == f"{tmp_path / 'a2.jsonl'}:2"
    for skip in range(5):
        assert list(read(locate(source), skip)) == whole[skip:]


def test_c83_a_byte_order_mark_changes_nothing(tmp_path: Path) -> None:
    plain = lines(tmp_path / "plain.jsonl", {"text": "abc"}, {"text": "defg"})
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + Path(plain).read_bytes())
    first, second = rows_of(tmp_path, Source(plain)), rows_of(tmp_path, Source(str(marked)))
    assert first.folder != second.folder
    assert first.digest == second.digest
    assert all(np.array_equal(a, b) for i in range(2) for a, b in zip(first.read(i), second.read(i), strict=True))
    (tmp_path / "m.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert texts(Source(str(tmp_path / "m.txt"))) == [{"text": "abc"}]
    (tmp_path / "m.json").write_bytes(b'\xef\xbb\xbf[{"text": "abc"}]')
    assert texts(Source(str(tmp_path / "m.json"))) == [{"text": "abc"}]


def test_line_ends_and_blank_lines_are_not_data(tmp_path: Path) -> None:
    source = Source(lines(tmp_path / "a.jsonl", {"text": "a"}, {"text": "b\r\n"}, newline="\r\n"))
    assert texts(source) == [{"text": "a"}, {"text": "b\r\n"}]
    (tmp_path / "b.jsonl").write_bytes(b'\n{"text": "a"}\n \n\n{"text": "b"}')
    assert [record.number for record in read(locate(Source(str(tmp_path / "b.jsonl"))))] == [2, 5]


BAD = [
    (b'{"text": "a"', "broken JSON"),
    (b'{"text": "a"} {"text": "b"}', "broken JSON"),
    (b"nonsense", "broken JSON"),
    (b'{"text": ""}', "empty text"),
    (b'{"text": " \\n"}', "empty text"),
    (b'{"text": 5}', "wrong type"),
    (b'{"text": null}', "wrong type"),
    (b'["text"]', "wrong type"),
    (b'{"body": "a"}', "missing field"),
    (b'{"text": "\xff"}', "not UTF-8"),
    (b'{"text": "a\\ud800b"}', "not Unicode"),
    (b"[" * 100_000, "broken JSON"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_a_bad_record_is_named_or_counted(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good too"}\n')
    with pytest.raises(UsageError) as caught:
        rows_of(tmp_path, Source(str(path)))
    assert f"{path}:2: " in caught.value.what
    assert "bad_record" in caught.value.do
    said: list[str] = []
    rows = rows_of(tmp_path, Source(str(path)), bad_record="skip", say=said.append)
    report = rows.report["sources"][0]
    assert (report["read"], report["kept"], report["dropped"]) == (3, 2, {reason: 1})
    assert any(f"{reason} 1 (first: {path}:2)" in line for line in said)


def test_bad_messages(tmp_path: Path) -> None:
    bad = [[], "x", ["x"], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": 1}]]
    bad.append([{"role": "user", "content": " "}])
    found = texts(Source(lines(tmp_path / "a.jsonl", *({"messages": m} for m in bad)), "messages"))
    assert all(isinstance(item, Bad) for item in found)
    nulls = [{"role": "user", "content": "a", "name": None}, {"role": "tool", "content": "b", "name": "c"}]
    table = Source(lines(tmp_path / "nulls.jsonl", {"messages": nulls}), "messages")
    assert texts(table) == [{"messages": [{"role": "user", "content": "a"}, nulls[1]]}]
    odd = Source(
        lines(tmp_path / "b.jsonl", {"talk": [{"from": "user", "value": "hi"}]}),
        "messages",
        fields={"messages": "talk", "role": "from", "content": "value"},
    )
    assert texts(odd) == [{"messages": [{"role": "user", "content": "hi"}]}]


def test_sources_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "a.csv").write_text("text\n")
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.parquet").write_text("not parquet")
    two = {"train": datasets.Dataset.from_dict({"text": ["a"]}), "test": datasets.Dataset.from_dict({"text": ["b"]})}
    datasets.DatasetDict(two).save_to_disk(str(tmp_path / "splits"))
    refused = {
        "no such file": Source(str(tmp_path / "none.jsonl")),
        "no file matches": Source(str(tmp_path / "*.jsonl")),
        "a data file ends in": Source(str(tmp_path / "a.csv")),
        "it has no 'prompt'": Source(str(tmp_path / "a.txt"), "prompt_completion"),
        "a file has no splits": Source(str(tmp_path / "a.txt"), split="train"),
        "cannot be read as parquet": Source(str(tmp_path / "a.parquet")),
        "the splits are train, test": Source(str(tmp_path / "splits")),
        "has no column 'prompt'": Source(str(tmp_path / "splits"), "prompt_completion", split="test"),
        "has the fields": Source(str(tmp_path / "a.txt"), fields={"txt": "x"}),
    }
    for why, source in refused.items():
        with pytest.raises(UsageError) as caught:
            rows_of(tmp_path, source)
        assert why in str(caught.value), str(caught.value)
