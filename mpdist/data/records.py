"""What the user's files hold, one record after the other, each with the place it came from.

A source is one entry of ``data.train`` or ``data.eval``. Its ``path`` is one of
    FILE.jsonl, FILE.ndjson, FILE.json    one JSON object a line (a .json file may also be one array of objects)
    FILE.parquet                          one row a record
    FILE.txt                              the whole file is one document
    a pattern with * or ?                 the files that match, in the order of their names
    a folder of datasets.save_to_disk     loaded with datasets.load_from_disk
    any other folder, or a hub id         loaded with datasets.load_dataset

A record that cannot be used is not an exception here but a ``Bad`` in place of the fields: whether it ends the run or
is skipped and counted is decided in one place, by ``data.bad_record``. A leading byte order mark is no part of the
data, and neither is a line end, of either kind, that ends a line of JSON.
"""

from __future__ import annotations

import codecs
import glob
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from mpdist import hub
from mpdist.errors import UsageError
from mpdist.inputs import FILE_SUFFIXES, looks_local

FORMATS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "prompt_completion": ("prompt", "completion"),
    "messages": ("messages",),
}
OPTIONAL: dict[str, tuple[str, ...]] = {"messages": ("tools",)}
_decode = json.JSONDecoder().raw_decode
IN_MESSAGE = ("role", "content")


@dataclass(frozen=True)
class Source:
    """One source of records.

    ``fields`` renames: ``{"prompt": "question"}`` reads the record's ``question`` as the prompt. ``weight`` is how
    often each of its rows is seen in an epoch (0.5: half of them, drawn anew each epoch). ``key`` is what messages call
    its path.
    """

    path: str
    format: str = "text"
    split: str | None = None
    weight: float = 1.0
    fields: Mapping[str, str] = field(default_factory=dict)
    key: str = "path"


class Bad(NamedTuple):
    """Why a record cannot be used: a short reason to count by, and the whole story."""

    reason: str
    detail: str


class Record(NamedTuple):
    """``where`` is the file or data set, ``number`` its line or row, from 1. ``data`` has the format's own names."""

    where: str
    number: int
    data: dict[str, Any] | Bad

    def place(self) -> str:
        return f"{self.where}:{self.number}"


class Located(NamedTuple):
    """A source whose files are found. Either ``files``, or ``folder`` (a data set on disk), or neither (a hub id)."""

    source: Source
    files: tuple[Path, ...]
    folder: Path | None


def locate(source: Source) -> Located:
    """Find a source's files. Raises UsageError where there is nothing to read, or a setting would have no effect."""
    if source.format not in FORMATS:
        raise UsageError(f"format = {source.format!r} of {source.path}", f"formats are {', '.join(FORMATS)}")
    known = FORMATS[source.format] + OPTIONAL.get(source.format, ())
    known += IN_MESSAGE if source.format == "messages" else ()
    for name in source.fields:
        if name not in known:
            raise UsageError(
                f"fields: {name!r} of {source.path} has no effect",
                f"format {source.format} has the fields {', '.join(known)}",
                "write the name that mpdist uses on the left and the name in your records on the right",
            )
    if not source.weight > 0:
        raise UsageError(f"weight = {source.weight} of {source.path}", "a weight is above 0", "or leave it out")
    path = Path(source.path).expanduser()
    if path.is_dir():
        return Located(source, (), path)
    if path.is_file():
        files = [path]
    elif any(c in source.path for c in "*?["):
        files = [p for p in map(Path, sorted(glob.glob(str(path), recursive=True))) if p.is_file()]
        if not files:
            raise UsageError(f"{source.key} = {source.path}", "no file matches this pattern", "correct the pattern")
    elif path.suffix.lower() in FILE_SUFFIXES or looks_local(source.path):
        why = f"there is no such file or folder (seen from {Path.cwd()})"
        raise UsageError(f"{source.key} = {source.path}", why, "correct the path")
    else:
        return Located(source, (), None)
    for file in files:
        if file.suffix.lower() not in FILE_SUFFIXES:
            raise UsageError(f"{source.key} = {file}", f"a data file ends in one of {', '.join(FILE_SUFFIXES)}")
        if source.format != "text" and file.suffix.lower() == ".txt":
            raise UsageError(
                f"{source.key} = {file}", f"a .txt file is one text, it has no {FORMATS[source.format][0]!r}"
            )
    if source.split is not None:
        raise UsageError(
            f"split = {source.split!r} of {source.path}", "a file has no splits", "take split away, or name a data set"
        )
    return Located(source, tuple(files), None)


def read(located: Located, skip: int = 0) -> Iterator[Record]:
    """All records of a source in their order, without the first ``skip``, which are passed over and not parsed."""
    source = located.source
    names = {name: source.fields.get(name, name) for name in FORMATS[source.format]}
    maybe = {name: source.fields.get(name, name) for name in OPTIONAL.get(source.format, ())}
    inner = {source.fields[name]: name for name in IN_MESSAGE if name in source.fields}
    if located.files:
        rows = chain.from_iterable(_read_file(file, names, maybe) for file in located.files)
    else:
        rows = chain(_read_dataset(located, names, maybe))
    for where, number, raw in islice(rows, skip, None):
        yield Record(where, number, _fields(_parse(raw), names, maybe, inner))


def _parse(raw: Any) -> Any:
    """Bytes are JSON that was left for now, so that skipping costs no parsing; anything else is already a value."""
    if not isinstance(raw, bytes):
        return raw
    try:
        text = raw.decode()
        value, end = _decode(text)  # json.loads without its search for white space, which is stripped already
        if end != len(text):
            return Bad("broken JSON", f"the line is not JSON: more follows after column {end}")
        return value
    except UnicodeDecodeError as error:
        return Bad("not UTF-8", f"the line is not UTF-8: {error}")
    except (ValueError, RecursionError) as error:
        return Bad("broken JSON", f"the line is not JSON: {error}")


def _fields(value: Any, names: dict[str, str], maybe: dict[str, str], inner: dict[str, str]) -> dict[str, Any] | Bad:
    if isinstance(value, Bad):
        return value
    if not isinstance(value, dict):
        return Bad("wrong type", f"the record is not an object but {_kind(value)}")
    data = {}
    for name, column in names.items():
        if column not in value:
            there = ", ".join(map(repr, value)) or "nothing"
            return Bad("missing field", f"the record has no {column!r}; it has {there}")
        item = value[column]
        if name == "messages" and isinstance(item, list):
            item = [_message(m, inner) for m in item]
        bad = _check_messages(item, column) if name == "messages" else _check_text(item, column)
        if bad is not None:
            return bad
        data[name] = item
    for name, column in maybe.items():
        if value.get(column):
            data[name] = value[column]
    return data


def _message(message: Any, inner: dict[str, str]) -> Any:
    """Under mpdist's names, and without the nulls by which a table says that this message lacks what another has."""
    if not isinstance(message, dict):
        return message
    return {inner.get(k, k): v for k, v in message.items() if v is not None or inner.get(k, k) == "content"}


def _check_text(item: Any, column: str) -> Bad | None:
    if not isinstance(item, str):
        return Bad("wrong type", f"{column!r} is not text but {_kind(item)}")
    if not item or item.isspace():
        return Bad("empty text", f"{column!r} is empty")
    return None


def _check_messages(item: Any, column: str) -> Bad | None:
    if not isinstance(item, list):
        return Bad("wrong type", f"{column!r} is not a list of messages but {_kind(item)}")
    if not item:
        return Bad("empty text", f"{column!r} is empty")
    for number, message in enumerate(item, 1):
        if not isinstance(message, dict):
            return Bad("wrong type", f"message {number} of {column!r} is not an object but {_kind(message)}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            return Bad("wrong type", f"message {number} of {column!r} has no text 'role'; it has {list(message)}")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            return Bad("wrong type", f"message {number} of {column!r} has no text 'content'; it has {list(message)}")
    if not any((message.get("content") or "").strip() or message.get("tool_calls") for message in item):
        return Bad("empty text", f"no message of {column!r} has any content")
    return None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _read_file(path: Path, names: dict[str, str], maybe: dict[str, str]) -> Iterator[tuple[str, int, Any]]:
    suffix = path.suffix.lower()
    if suffix == ".txt":
        return _read_text(path, names)
    return _read_parquet(path, names, maybe) if suffix == ".parquet" else _read_json(path)


def _read_text(path: Path, names: dict[str, str]) -> Iterator[tuple[str, int, Any]]:
    raw = path.read_bytes()
    try:
        yield str(path), 1, {names["text"]: raw.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        yield str(path), line, Bad("not UTF-8", f"the file is not UTF-8: {error}")


def _read_json(path: Path) -> Iterator[tuple[str, int, Any]]:
    """One object a line. Lines that hold nothing but white space are no records."""
    where = str(path)
    with path.open("rb") as file:
        head = file.read(len(codecs.BOM_UTF8))
        start = len(codecs.BOM_UTF8) if head == codecs.BOM_UTF8 else 0
        file.seek(start)
        if path.suffix.lower() == ".json" and file.read(4096).lstrip()[:1] == b"[":
            file.seek(start)
            yield from _read_array(where, file.read())
            return
        file.seek(start)
        for number, line in enumerate(file, 1):
            line = line.strip(b" \t\r\n")
            if line:
                yield where, number, line


def _read_array(where: str, raw: bytes) -> Iterator[tuple[str, int, Any]]:
    try:
        items = json.loads(raw)
    except (ValueError, RecursionError) as error:
        yield where, getattr(error, "lineno", 1), Bad("broken JSON", f"the file is not JSON: {error}")
        return
    for number, item in enumerate(items, 1):
        yield where, number, item


def _read_parquet(path: Path, names: dict[str, str], maybe: dict[str, str]) -> Iterator[tuple[str, int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"path = {path}", f"it cannot be read as parquet: {error}") from None
    with file:
        columns = _columns(str(path), file.schema_arrow.names, names, maybe)
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield str(path), number, row


def _columns(where: str, have: list[str], names: dict[str, str], maybe: dict[str, str]) -> list[str]:
    missing = [column for column in names.values() if column not in have]
    if missing:
        raise UsageError(
            f"{where} has no column {', '.join(map(repr, missing))}",
            f"its columns are {', '.join(have)}",
            "set the source's format, or rename with fields: {NAME: COLUMN}",
        )
    return [*names.values(), *(column for column in maybe.values() if column in have)]


def _read_dataset(located: Located, names: dict[str, str], maybe: dict[str, str]) -> Iterator[tuple[str, int, Any]]:
    data = load_dataset(located)
    chosen = data.select_columns(_columns(located.source.path, data.column_names, names, maybe))
    number = 0
    for start in range(0, len(chosen), 1024):
        for row in _rows(chosen[start : start + 1024]):
            number += 1
            yield located.source.path, number, row


def _rows(batch: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    names = list(batch)
    for values in zip(*batch.values(), strict=True):
        yield dict(zip(names, values, strict=True))


def load_dataset(located: Located) -> Any:
    """The ``datasets.Dataset`` behind a folder or a hub id. Raises UsageError where it or its split cannot be had, and
    MachineError where the hub cannot be asked for it."""
    import datasets

    source, folder = located.source, located.folder
    if folder is None and hub.dataset_folder(source.path) is None:
        hub.require([(hub.Need(source.key, "dataset", source.path), "its rows")])
    saved = folder is not None and any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    try:
        if saved:
            data = datasets.load_from_disk(str(folder))
        else:
            data = datasets.load_dataset(str(folder) if folder else source.path, split=source.split)
    except Exception as error:  # the library raises whatever its loaders and the network raise
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"{source.key} = {source.path} cannot be loaded as a data set",
            f"{type(error).__name__}: {first}",
            "check the name and the split; where there is no network, `mpdist fetch` must have fetched it before",
        ) from None
    if isinstance(data, datasets.DatasetDict):
        if source.split is None and len(data) == 1:
            return next(iter(data.values()))
        if source.split not in data:
            raise UsageError(
                f"split = {source.split} of {source.path}",
                f"the splits are {', '.join(data)}",
                "choose one: split: NAME",
            )
        return data[source.split]
    if saved and source.split is not None:
        raise UsageError(
            f"split = {source.split!r} of {source.path}",
            "this folder holds a data set without splits",
            "take split away",
        )
    return data
