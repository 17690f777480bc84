"""Tokenise, pack and index sources once; afterwards only open the result.

The result is a folder in the cache, named by a digest of all that decides it: the contents of the files, every setting,
the tokenizer's files, the libraries' versions and the format of the rows. It appears by a rename, so it is whole or not
there. On the way, documents go into a stream in ``DIGEST.part``, and ``progress.json`` there says how far the stream is
good: after a kill the stream is cut back to that point and preparing goes on behind it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpdist.data import guard
from mpdist.data.pack import Pieces, pack
from mpdist.data.records import Bad, Located, Record, Source, load_dataset, locate, read
from mpdist.data.store import FORMAT, Rows, open_rows, write_json, write_rows
from mpdist.data.stream import Stamps, Stream
from mpdist.data.tokens import Document, Encoder, load_tokenizer, tokenizer_digest, tokenizer_folder
from mpdist.errors import UsageError

SAY_S = 30.0
BATCH_RECORDS = 1000
BATCH_CHARACTERS = 4 << 20
Say = Callable[[str], None]


@dataclass(frozen=True)
class _Job:
    """What is asked for, with its sources found."""

    located: list[Located]
    tokenizer: str
    seq_len: int
    packing: str
    loss_on: str
    too_long: list[str]  # of each source, auto resolved
    bad_record: str
    vocab_rows: int | None
    chat_template: str | None
    trust_remote_code: bool
    revision: str | None
    cache: Path
    say: Say
    settings: str  # JSON of all of it that decides the result, but for the contents of the sources


def prepare(
    sources: list[Source],
    *,
    tokenizer: str,
    seq_len: int,
    packing: str = "best_fit",
    loss_on: str = "all",
    too_long: str = "auto",
    bad_record: str = "error",
    vocab_rows: int | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    cache: str | Path,
    say: Say = print,
) -> Path:
    """The folder that ``open_rows`` opens, made if it is not there yet.

    tokenizer   "bytes", a folder or a hub id
    vocab_rows  rows of the model's embedding; every id is checked against it. None: not known, not checked
    cache       where results are kept; shared by all processes that prepare the same

    Any number of processes may call this at once, on one machine or on a shared file system: one works, the others wait
    for its result or its failure. Raises UsageError for records and settings that cannot be used, MachineError for the
    disk.
    """
    job = _asked(sources, tokenizer=tokenizer, seq_len=seq_len, packing=packing, loss_on=loss_on, too_long=too_long,
                 bad_record=bad_record, vocab_rows=vocab_rows, chat_template=chat_template,
                 trust_remote_code=trust_remote_code, revision=revision, cache=cache, say=say)  # fmt: skip
    request = hashlib.sha256(json.dumps([job.settings, [s.path for s in sources], vocab_rows]).encode()).hexdigest()
    datasets: dict[int, str] = {}
    folder = guard.once(
        job.cache, request, lambda: _ready(job, _key(job, datasets, look=True)), lambda: _make(job, datasets), say
    )
    rows = open_rows(folder)
    check_vocabulary(rows, vocab_rows)
    for line in report_lines(rows):
        say(line)
    return folder


def ready(sources: list[Source], *, cache: str | Path, **settings: Any) -> Path | None:
    """What ``prepare``, given the same, has left; None if that is not there, or it takes reading the sources to know.

    Raises UsageError as ``prepare`` does.
    """
    job = _asked(sources, cache=cache, say=lambda _: None, **settings)
    if not all(located.files or located.folder for located in job.located):
        return None
    return _ready(job, _key(job, {}, look=True))


def _asked(
    sources: list[Source], *, tokenizer: str, seq_len: int, packing: str, loss_on: str, too_long: str, bad_record: str,
    vocab_rows: int | None, chat_template: str | None, trust_remote_code: bool, revision: str | None, cache: str | Path,
    say: Say,
) -> _Job:  # fmt: skip
    located = [locate(source) for source in sources]
    if not located:
        raise UsageError("no source of data is named")
    policies = [_policy(source, too_long) for source in sources]
    template = None
    if chat_template is not None:
        try:
            template = hashlib.sha256(Path(chat_template).expanduser().read_bytes()).hexdigest()
        except OSError as error:
            raise UsageError(f"data.chat_template = {chat_template} cannot be read", str(error)) from None
    settings = {
        "format": FORMAT, "tokenizer": tokenizer_digest(tokenizer_folder(tokenizer, revision)), "template": template,
        "seq_len": seq_len, "packing": packing, "loss_on": loss_on, "too_long": policies, "bad_record": bad_record,
        "sources": [[s.format, s.split, s.weight, sorted(s.fields.items())] for s in sources],
    }  # fmt: skip
    cache = Path(cache).absolute()
    return _Job(
        located, tokenizer, seq_len, packing, loss_on, policies, bad_record, vocab_rows, chat_template,
        trust_remote_code, revision, cache, say, json.dumps(settings, sort_keys=True),
    )  # fmt: skip


def check_vocabulary(rows: Rows, vocab_rows: int | None) -> None:
    """Raises UsageError naming record and id if any id of the prepared data is not a row of the embedding."""
    if vocab_rows is not None and rows.report["max_id"] >= vocab_rows:
        raise _outside(rows.report["max_at"], rows.report["max_id"], vocab_rows)


def _policy(source: Source, too_long: str) -> str:
    if too_long == "auto":
        return "split" if source.format == "text" else "error"
    return too_long


def _outside(place: str, number: int, vocab_rows: int) -> UsageError:
    return UsageError(
        f"{place}: token id {number} is outside the model's embedding, which has {vocab_rows} rows",
        "the tokenizer knows more tokens than the model, and the vocabulary is never grown unasked",
        "use the model's own tokenizer, take the token out of the data, or grow and save the model first",
    )


def _key(job: _Job, datasets: dict[int, str], look: bool) -> str | None:
    """The result's name. With ``look``, only from files whose digest is on record; None if one is not."""
    stamps = Stamps(job.cache)
    contents: list[Any] = []
    for number, located in enumerate(job.located):
        if located.files or located.folder:
            root = located.folder
            files = list(located.files) or sorted(p for p in (root or Path()).rglob("*") if p.is_file())
            digests = [stamps.digest(file, look) for file in files]
            if None in digests:
                return None
            names = [str(file.relative_to(root)) if root else file.suffix.lower() for file in files]
            contents.append([names, digests])
        else:
            if number not in datasets:
                datasets[number] = load_dataset(located)._fingerprint
            contents.append([located.source.path, datasets[number]])
    if not look:
        stamps.save()
    return hashlib.sha256(json.dumps([job.settings, contents]).encode()).hexdigest()[:32]


def _ready(job: _Job, key: str | None) -> Path | None:
    return job.cache / key if key is not None and (job.cache / key / "index.json").is_file() else None


# ---- the work


def _make(job: _Job, datasets: dict[int, str]) -> Path:
    """Runs in one process at a time."""
    key = _key(job, datasets, look=False)
    assert key is not None
    found = _ready(job, key)
    if found is not None:
        return found
    folder = job.cache / key
    part = folder.with_suffix(".part")
    stream = Stream(part)
    try:
        _tokenise(job, stream)
        index = _index(job, stream)
    except UsageError:  # it would come again; whoever mends the data or the settings gets another digest
        stream.close()
        shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        stream.close()
    write_json(part / "index.json", index)
    shutil.rmtree(folder, ignore_errors=True)  # only ever there without its index
    os.rename(part, folder)
    for name in (*Stream.EXTRAS, *(name for name, _ in Stream.FILES)):  # after the rename: a kill here costs disk only
        (folder / name).unlink()
    return folder


def _tokenise(job: _Job, stream: Stream) -> None:
    state = stream.state
    if state.records or state.source:
        job.say(f"going on after {state.documents:,} documents that were ready")
    if state.source == len(job.located):
        return
    tokenizer = load_tokenizer(
        job.tokenizer, chat_template=job.chat_template, trust_remote_code=job.trust_remote_code, revision=job.revision
    )
    if job.vocab_rows is not None and len(tokenizer) > job.vocab_rows:
        job.say(
            f"warning: the tokenizer has {len(tokenizer)} tokens and the model's embedding {job.vocab_rows} rows; "
            "a record that uses a token beyond them is an error"
        )
    told = time.monotonic()
    for number in range(state.source, len(job.located)):
        located = job.located[number]
        encoder = Encoder(tokenizer, located.source.format, job.loss_on, job.say)
        if len(state.reports) == number:
            state.reports.append(_blank(located.source))
        for batch in _batches(read(located, skip=state.records)):
            _add(job, stream, encoder, batch, number)
            stream.commit()
            if time.monotonic() - told > SAY_S:
                told = time.monotonic()
                job.say(f"{located.source.path}: {state.records:,} records, {state.tokens:,} tokens in all so far")
        state.source, state.records = number + 1, 0
        stream.commit(force=True)


def _blank(source: Source) -> dict[str, Any]:
    counts = dict.fromkeys(("read", "kept", "truncated", "split", "unlabelled", "tokens", "label_tokens", "rows"), 0)
    return {"path": source.path, "format": source.format, **counts, "dropped": {}, "first_dropped": {}}


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        data = record.data
        if type(data) is dict:
            for value in data.values():
                size += len(value) if type(value) is str else sum(len(str(m)) for m in value)
        if len(batch) >= BATCH_RECORDS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _add(job: _Job, stream: Stream, encoder: Encoder, batch: list[Record], number: int) -> None:
    state = stream.state
    report = state.reports[number]
    encoded = iter(encoder.documents([r.data for r in batch if isinstance(r.data, dict)]))
    flat: list[int] = []
    targets = bytearray()
    lengths: list[int] = []
    places: list[Record] = []
    for record in batch:
        document: Document | Bad = record.data if isinstance(record.data, Bad) else next(encoded)
        if isinstance(document, Document) and not document.ids:
            document = Bad("empty text", "the record has no token")
        if isinstance(document, Bad):
            if job.bad_record == "error":
                raise UsageError(
                    f"{record.place()}: {document.detail}", "data.bad_record = error",
                    "mend the record, or set data.bad_record: skip, which counts such records and goes on",
                )  # fmt: skip
            _drop(report, document.reason, record)
            continue
        ids, marks = _fit(job, report, record, document, job.too_long[number])
        if ids:
            report["unlabelled"] += 1 not in marks[1:]
            flat.extend(ids)
            targets += marks
            lengths.append(len(ids))
            places.append(record)
    report["read"] += len(batch)
    report["kept"] += len(lengths)
    report["tokens"] += len(flat)
    array = np.array(flat, dtype=np.int32)
    if flat and int(array.max()) > state.max_id:
        at = int(array.argmax())
        state.max_id = int(array[at])
        state.max_at = places[int(np.searchsorted(np.cumsum(lengths), at, side="right"))].place()
        if job.vocab_rows is not None and state.max_id >= job.vocab_rows:
            first = int(np.argmax(array >= job.vocab_rows))
            place = places[int(np.searchsorted(np.cumsum(lengths), first, side="right"))].place()
            raise _outside(place, int(array[first]), job.vocab_rows)
    stream.add(array, bytes(targets), lengths)
    state.records += len(batch)


def _drop(report: dict[str, Any], reason: str, record: Record) -> None:
    report["dropped"][reason] = report["dropped"].get(reason, 0) + 1
    report["first_dropped"].setdefault(reason, record.place())


def _fit(job: _Job, report: dict[str, Any], record: Record, document: Document, policy: str) -> tuple[list[int], bytes]:
    """ids and target marks of a document that now is as long as it may be; empty if it is dropped."""
    ids, targets = document
    count = len(ids)
    marks = b"\0" * targets + b"\1" * (count - targets) if isinstance(targets, int) else bytes(targets)
    if count <= job.seq_len:
        return ids, marks
    if policy == "error":
        raise UsageError(
            f"{record.place()}: the record has {count} tokens, more than data.seq_len = {job.seq_len}",
            f"data.too_long = error, which auto is for the format {report['format']}",
            "raise data.seq_len, or set data.too_long to truncate, drop or split",
        )
    if policy == "drop":
        _drop(report, "too long", record)
        return [], b""
    if policy == "truncate":
        report["truncated"] += 1
        return ids[: job.seq_len], marks[: job.seq_len]
    report["split"] += 1
    return ids, marks


def _index(job: _Job, stream: Stream) -> dict[str, Any]:
    """Pack each source by itself, since sources differ in weight, and write the rows. Returns the index."""
    reports = stream.state.reports
    total = sum(r["read"] for r in reports)
    labelled = sum(r["kept"] - r["unlabelled"] for r in reports)
    if not labelled:
        do = "check the format, the fields and data.loss_on"
        raise UsageError(f"0 of {total} rows have loss tokens", _why_nothing(reports), do)
    ids, targets, lengths = stream.arrays()
    all_pieces: list[Pieces] = []
    parts: list[tuple[int, float]] = []
    document = offset = row = 0
    for report, located in zip(reports, job.located, strict=True):
        mine = lengths[document : document + report["kept"]]
        starts, sizes, rows = pack(mine, job.seq_len, job.packing)
        count = int(rows[-1]) + 1 if len(rows) else 0
        all_pieces.append((starts + offset, sizes, rows + row))
        parts.append((count, located.source.weight))
        report["rows"] = count
        document, offset, row = document + report["kept"], offset + report["tokens"], row + count
    pieces = tuple(np.concatenate(arrays) for arrays in zip(*all_pieces, strict=True))
    index = {"seq_len": job.seq_len, "parts": parts}
    index = write_rows(stream.folder, ids, targets, pieces, index)  # type: ignore[arg-type]
    labels = np.load(stream.folder / "labels.npy", allow_pickle=False)
    first = 0
    for report, (count, _) in zip(reports, parts, strict=True):
        report["label_tokens"] = int(labels[first : first + count].sum())
        first += count
    return {**index, "report": {"sources": reports, "max_id": stream.state.max_id, "max_at": stream.state.max_at}}


def _why_nothing(reports: list[dict[str, Any]]) -> str:
    told = []
    for report in reports:
        reasons = [f"{count} dropped as {reason}" for reason, count in report["dropped"].items()]
        if report["unlabelled"]:
            reasons.append(f"{report['unlabelled']} without a label token")
        if report["truncated"]:
            reasons.append(f"{report['truncated']} truncated")
        told.append(f"{report['path']}: {', '.join(reasons) or 'no record'}")
    return "; ".join(told)


def report_lines(rows: Rows) -> list[str]:
    """What was read, kept, dropped and why, a line each source, and the total."""
    lines = []
    for report in rows.report["sources"]:
        dropped = sum(report["dropped"].values())
        line = f"data {report['path']} ({report['format']}): "
        line += f"{report['read']:,} read, {report['kept']:,} kept, {dropped:,} dropped"
        for reason, count in report["dropped"].items():
            line += f"; {reason} {count:,} (first: {report['first_dropped'][reason]})"
        for what in ("truncated", "split"):
            if report[what]:
                line += f"; {what} {report[what]:,}"
        lines.append(line)
        if report["unlabelled"]:
            counts = f"{report['unlabelled']:,} of {report['kept']:,}"
            lines.append(f"warning: {counts} records of {report['path']} have no label token")
    tokens = int(rows.bounds[-1])
    full = tokens / (len(rows) * rows.seq_len)
    lines.append(
        f"data in all: {len(rows):,} rows of {rows.seq_len}, {tokens:,} tokens ({full:.1%} full), "
        f"{int(rows.label_counts.sum()):,} label tokens"
    )
    return lines
