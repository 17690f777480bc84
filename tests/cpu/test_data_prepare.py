"""Prepared once, whole or not at all, whoever asks at once and whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mpdist import hub
from mpdist.data import Source, guard, open_rows, prepare
from mpdist.errors import MachineError, UsageError

WORKER = """
import sys, json, time
settings = json.loads(sys.argv[1])
slow = settings.pop("slow", 0)
import mpdist.data.prepare, mpdist.data.stream
from mpdist.data import Source, open_rows
from mpdist.errors import MpdistError
module = sys.modules["mpdist.data.prepare"]
sys.modules["mpdist.data.stream"].COMMIT_S = 0
module.BATCH_RECORDS = 10
add = module._add
def slowly(*arguments):
    time.sleep(slow)
    add(*arguments)
    print("batch", flush=True)
module._add = slowly
sources = [Source(settings.pop("path"))]
try:
    folder = module.prepare(sources, say=lambda line: print("say", line, flush=True), **settings)
except MpdistError as error:
    print("error", json.dumps([type(error).__name__, error.what]), flush=True)
    sys.exit(error.status)
print("digest", open_rows(folder).digest, flush=True)
"""


def documents(path: Path, count: int = 200) -> str:
    path.write_text("".join(json.dumps({"text": f"document {i} " * (i % 7 + 1)}) + "\n" for i in range(count)))
    return str(path)


def settings(tmp_path: Path, cache: str = "cache", **more: Any) -> dict[str, Any]:
    return {"tokenizer": "bytes", "seq_len": 64, "cache": str(tmp_path / cache)} | more


def start(tmp_path: Path, path: str, **more: Any) -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(settings(tmp_path, **more) | {"path": path})],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    )


def word(process: subprocess.Popen[str], first: str) -> str:
    """The rest of the next line that begins with ``first``."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(first):
            return line[len(first) :].strip()
    raise AssertionError(f"the process ended ({process.wait()}) without a line {first!r}")


def quiet(path: str, **arguments: Any) -> Path:
    return prepare([Source(path)], say=lambda _: None, **arguments)


def test_what_is_not_there_is_named_by_its_key(tmp_path: Path) -> None:
    from mpdist.config import load
    from mpdist.data.command import from_config

    (tmp_path / "run.yaml").write_text(
        "name: a\nmodel: {config: {model_type: llama}}\nbatch: {global: 1}\nbudget: {steps: 1}\n"
        f"data: {{train: [{{path: {documents(tmp_path / 'a.jsonl', 3)}}}, {{path: b.jsonl}}], tokenizer: bytes}}\n"
    )
    for override, said in (("name=a", "data.train.1.path = b.jsonl"), ("data.tokenizer=./t", "data.tokenizer = ./t")):
        kept = [] if override == "name=a" else [f"data.train.1.path={tmp_path / 'a.jsonl'}"]
        with pytest.raises(UsageError) as caught:
            from_config(load(tmp_path / "run.yaml", [override, f"out_dir={tmp_path}", *kept]).config, lambda _: None)
        assert caught.value.what == said


def test_a_killed_preparation_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = documents(tmp_path / "a.jsonl")
    whole = open_rows(quiet(path, **settings(tmp_path, "other")))
    for batches in (3, 4):  # killed twice
        with start(tmp_path, path, slow=0.05) as process:
            for _ in range(batches):
                word(process, "batch")
            process.send_signal(signal.SIGKILL)
    (part,) = (tmp_path / "cache").glob("*.part")
    done = json.loads((part / "progress.json").read_text())["records"]
    assert 30 <= done < 200
    with (part / "ids.bin").open("ab") as torn:
        torn.write(b"half a record")
    said: list[str] = []
    rows = open_rows(prepare([Source(path)], say=said.append, **settings(tmp_path)))
    assert rows.digest == whole.digest
    assert rows.report == whole.report
    assert f"going on after {done} documents that were ready" in said
    assert not list((tmp_path / "cache").glob("*.part"))
    assert sorted(p.name for p in rows.folder.iterdir()) == ["bounds.npy", "index.json", "labels.npy", "rows.bin"]


def test_two_at_once_work_once(tmp_path: Path) -> None:
    path = documents(tmp_path / "a.jsonl")
    with start(tmp_path, path, slow=0.02) as one, start(tmp_path, path, slow=0.02) as two:
        outputs = [process.communicate(timeout=60)[0].splitlines() for process in (one, two)]
    digests = {line for lines in outputs for line in lines if line.startswith("digest")}
    assert len(digests) == 1
    assert sorted(lines.count("batch") for lines in outputs) == [0, 20]


def test_a_waiter_takes_over_from_a_killed_worker(tmp_path: Path) -> None:
    path = documents(tmp_path / "a.jsonl")
    with start(tmp_path, path, slow=0.05) as one:
        word(one, "batch")
        with start(tmp_path, path) as two:
            time.sleep(0.3)
            one.send_signal(signal.SIGKILL)
            assert word(two, "digest")


def test_a_failure_is_handed_to_those_who_wait(tmp_path: Path) -> None:
    path = documents(tmp_path / "a.jsonl")
    with Path(path).open("a") as file:
        file.write("nonsense\n")
    with start(tmp_path, path, slow=0.15) as one:
        word(one, "batch")
        with start(tmp_path, path, slow=0.15) as two:
            errors = [json.loads(word(process, "error")) for process in (one, two)]
            assert "batch" not in two.communicate()[0]
    assert errors[0] == errors[1]
    assert errors[0][0] == "UsageError"
    assert f"{path}:201" in errors[0][1]
    assert (one.returncode, two.returncode) == (2, 2)
    mended = Path(path)
    mended.write_text("".join(mended.read_text().splitlines(keepends=True)[:-1]))
    assert len(open_rows(quiet(path, **settings(tmp_path)))) > 0  # an old failure does not stick


def test_a_full_disk_is_the_machines_fault_and_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["mpdist.data.stream"].Stream, "add", full)
    with pytest.raises(MachineError, match="failed") as caught:
        quiet(documents(tmp_path / "a.jsonl"), **settings(tmp_path))
    assert "No space left" in caught.value.why
    monkeypatch.undo()
    assert quiet(str(tmp_path / "a.jsonl"), **settings(tmp_path)).is_dir()


def test_two_hosts_whose_locks_do_not_meet_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["mpdist.data.prepare"]
    add = module._add

    def another_begins(job: Any, stream: Any, *arguments: Any) -> None:
        add(job, stream, *arguments)
        (stream.folder / "owner").write_text("another")

    monkeypatch.setattr(module, "_add", another_begins)
    with pytest.raises(MachineError, match="two processes write"):
        quiet(documents(tmp_path / "a.jsonl"), **settings(tmp_path))


def test_waiting_says_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "WAIT_LINE_S", 0.2)
    path = documents(tmp_path / "a.jsonl")
    said: list[str] = []
    with start(tmp_path, path, slow=0.05) as one:
        word(one, "batch")
        prepare([Source(path)], say=said.append, **settings(tmp_path))
        assert any(line.startswith(f"waiting for process {one.pid} on ") for line in said)
        assert word(one, "digest")


def test_the_result_is_found_again_until_anything_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(documents(tmp_path / "a.jsonl", 20))
    os.utime(path, (1e9, 1e9))
    first = quiet(str(path), **settings(tmp_path))
    assert quiet(str(path), **settings(tmp_path)) == first
    moved = path.rename(tmp_path / "b.jsonl")
    assert quiet(str(moved), **settings(tmp_path)) == first  # contents count, not names
    others = [
        quiet(str(moved), **settings(tmp_path, **change))
        for change in ({"seq_len": 65}, {"packing": "none"}, {"too_long": "drop"}, {"bad_record": "skip"})
    ]
    others.append(prepare([Source(str(moved), weight=2.0)], say=lambda _: None, **settings(tmp_path)))
    moved.write_text(moved.read_text().replace("document", "documend"))
    os.utime(moved, (1e9, 1e9 + 1))
    others.append(quiet(str(moved), **settings(tmp_path)))
    assert len({first, *others}) == 7
    monkeypatch.setattr(sys.modules["mpdist.data.prepare"], "_tokenise", lambda *_: pytest.fail("made anew"))
    assert quiet(str(moved), **settings(tmp_path)) == others[-1]


def test_files_of_a_known_time_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = documents(tmp_path / "a.jsonl", 20)
    os.utime(path, (1e9, 1e9))
    quiet(path, **settings(tmp_path))
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("read again"))
    quiet(path, **settings(tmp_path))


def test_broken_results_are_refused(tmp_path: Path) -> None:
    folder = quiet(documents(tmp_path / "a.jsonl", 20), **settings(tmp_path))
    with (folder / "rows.bin").open("ab") as file:
        file.truncate(100)
    with pytest.raises(UsageError, match="cannot be used"):
        open_rows(folder)
    with pytest.raises(UsageError, match="cannot be used"):
        open_rows(tmp_path)


def test_c71_nothing_to_learn_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"prompt": "p" * 100, "completion": "c"}) + "\n") * 4)
    pairs = [Source(str(path), "prompt_completion")]
    for too_long, why in (("truncate", "4 without a label token, 4 truncated"), ("drop", "4 dropped as too long")):
        with pytest.raises(UsageError, match="0 of 4 rows have loss tokens") as caught:
            prepare(
                pairs,
                loss_on="completion",
                say=lambda _: None,
                **settings(tmp_path, packing="none", too_long=too_long),
            )
        assert why in caught.value.why
    assert not list((tmp_path / "cache").glob("*.part"))


def test_c71_records_without_labels_are_kept_counted_and_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = [{"prompt": "p" * n, "completion": "c"} for n in (100, 5, 6)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    said: list[str] = []
    folder = prepare(
        [Source(str(path), "prompt_completion")],
        loss_on="completion",
        say=said.append,
        **settings(tmp_path, packing="none", too_long="truncate"),
    )
    report = open_rows(folder).report["sources"][0]
    assert (report["read"], report["kept"], report["unlabelled"], report["truncated"]) == (3, 3, 1, 1)
    assert report["label_tokens"] == 4
    assert any(line.startswith("warning: 1 of 3 records") for line in said)
    assert any("3 read, 3 kept, 0 dropped; truncated 1" in line for line in said)


def test_c81_an_empty_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("")
    with pytest.raises(UsageError, match="0 of 0 rows have loss tokens") as caught:
        quiet(str(path), **settings(tmp_path))
    assert "no record" in caught.value.why


def test_the_demo_text_and_chat_run_through_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mpdist.config import load
    from mpdist.data import command

    documents(tmp_path / "train.jsonl")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat}))
    config = tmp_path / "run.yaml"
    config.write_text(
        f"""
name: x
out_dir: {tmp_path}/runs
model: {{config: {{model_type: llama, vocab_size: 260, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1,
  intermediate_size: 8}}}}
data:
  train: [{{path: {tmp_path}/train.jsonl, format: text}}, {{path: {tmp_path}/chat.jsonl, format: messages}}]
  eval: [{{path: {tmp_path}/chat.jsonl, format: messages}}]
  tokenizer: bytes
  seq_len: 64
batch: {{micro: 1, global: 2}}
precision: {{compute: fp32}}
budget: {{steps: 2}}
"""
    )
    resolved = load(config)
    assert command.embedding_rows(resolved.config) == 260
    assert command.run(resolved) == 0
    told = capsys.readouterr().out
    assert "data.train is ready" in told
    assert "label tokens" in told
    train, held_out = command.from_config(resolved.config, lambda _: None)
    assert train.parent == tmp_path / "runs" / ".data"
    assert held_out is not None
    assert len(open_rows(train).parts) == 2
    assert open_rows(held_out).report["sources"][0]["read"] == 1
    small = load(config, ["model.config.vocab_size=200"])
    with pytest.raises(UsageError, match="outside the model's embedding, which has 200 rows"):
        command.from_config(small.config, lambda _: None)


def test_a_hub_model_that_cannot_be_had_is_the_users_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setattr(hub, "unreachable", lambda address: None)
    with pytest.raises(UsageError, match="cannot be fetched"):
        quiet(documents(tmp_path / "a.jsonl"), **settings(tmp_path, tokenizer="some-org/some-model"))
