"""The run directory's files: states replaced whole, histories that survive a kill, names that are checked."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mpdist.env import environment, mask, masked
from mpdist.errors import MachineError, UsageError
from mpdist.lines import Lines, plain, read_lines, repair, write_atomic
from mpdist.record import EVENTS, METRICS, RunDir, read_metrics


def row(step: int, kind: str = "train", **more: Any) -> dict[str, Any]:
    axes = {"train/label_tokens": step * 10, "time/train_s": step * 0.5}
    return {"kind": kind, "step": step, "attempt": step, **axes, **more}


def events(run: RunDir) -> list[dict[str, Any]]:
    return read_lines(run.events_path)


def test_a_row_is_one_line_with_its_session(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert run.start_session() == 1
    run.metrics(row(1, **{"train/loss": 2.5}))
    run.metrics(row(1, "eval", **{"eval/loss": 3.0, "precision/amax": 1.0}))
    first, second = run.metrics_path.read_text().splitlines()
    assert json.loads(first) == {
        "kind": "train", "step": 1, "attempt": 1, "session": 1,
        "train/label_tokens": 10, "time/train_s": 0.5, "train/loss": 2.5,
    }  # fmt: skip
    assert json.loads(second)["precision/amax"] == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train/losses": 1.0}, "not in METRICS: train/losses"),
        ({"loss": 1.0}, "not in METRICS: loss"),
        ({"kind": "test"}, "known kind"),
        ({"step": None}, "lacks step"),
    ],
)
def test_a_row_with_a_wrong_name_is_our_bug(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    run = RunDir(tmp_path)
    with pytest.raises(ValueError, match=message):
        run.metrics({**row(1), **change})
    assert not run.metrics_path.exists()


def test_every_row_can_be_drawn_over_every_axis(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lacks train/label_tokens, time/train_s"):
        RunDir(tmp_path).metrics({"kind": "eval", "step": 1, "attempt": 1, "eval/loss": 1.0})


def test_the_metric_names_are_the_contract() -> None:
    assert all(meaning and "/" in name for name, meaning in METRICS.items())
    assert {"train/loss", "scale/skipped", "wire/grad_bytes", "time/lost_s", "mem/peak_reserved_bytes"} <= set(METRICS)


def test_c124_a_nan_is_logged_as_what_it_is(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    losses = [2.0, 1.5, math.nan, math.inf, -math.inf]
    for step, loss in enumerate(losses, 1):
        run.metrics(row(step, **{"train/loss": loss, "scale/skipped": int(step >= 3)}))
    raw = [json.loads(line, parse_constant=pytest.fail) for line in run.metrics_path.read_text().splitlines()]
    assert [r["train/loss"] for r in raw] == [2.0, 1.5, "nan", "inf", "-inf"]
    back = read_metrics(run.path)
    assert math.isnan(back[2]["train/loss"])
    assert back[3]["train/loss"] == math.inf
    assert [r["scale/skipped"] for r in back] == [0, 0, 1, 1, 1]


def test_plain_takes_numbers_of_other_libraries_and_refuses_riddles() -> None:
    class Scalar:
        def item(self) -> float:
            return math.nan

    assert plain({"a": [Scalar(), (1, True)], "p": Path("x")}) == {"a": ["nan", [1, True]], "p": "x"}
    with pytest.raises(TypeError, match="does not go into JSON"):
        plain({"a": object()})


def test_events_are_checked_and_carry_the_six_fields(tmp_path: Path) -> None:
    run = RunDir(tmp_path, rank=1, session=2)
    run.event("skip", 4, 6, reason="overflow", scale_before=8.0)
    run.event("stop", 4, 6, rank=3)
    first, second = events(run)
    assert list(first)[:6] == ["event", "step", "attempt", "rank", "reason", "time"]
    assert (first["rank"], second["rank"], first["session"], first["scale_before"]) == (1, 3, 2, 8.0)
    assert abs(first["time"] - time.time()) < 60
    with pytest.raises(ValueError, match="no event is called"):
        run.event("boom")
    assert {"start", "skip", "save", "resume", "refused", "end"} <= EVENTS


def test_status_keeps_what_is_not_given(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.read_status() is None
    run.status(state="running", step=3, attempt=4, time={"train": 1.5})
    at = run.read_status()["time_at"]
    run.status(state="failed", exit=1, reason="killed by SIGKILL", rank=1)
    status = run.read_status()
    assert status is not None
    assert status["time_at"] == at < status["updated"], "the table's own moment, not that of the record of the end"
    assert [status[k] for k in ("state", "step", "attempt", "exit", "rank")] == ["failed", 3, 4, 1, 1]
    assert status["time"] == {"train": 1.5}
    assert status["updated"] <= time.time()
    status = run.status(state="running")
    assert (status["exit"], status["reason"], status["rank"], status["step"]) == (None, None, None, 3)
    with pytest.raises(ValueError, match="no state"):
        run.status(state="crashed")


def test_a_broken_status_reads_as_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (tmp_path / "status.json").write_text('{"state": "run')
    assert run.read_status() is None
    assert run.status(step=1)["state"] == "running"


def test_a_reader_never_sees_half_a_state(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.status(state="running", filler="x" * 20000)
    stop = threading.Event()
    seen: list[Any] = []

    def read() -> None:
        while not stop.is_set():
            seen.append(json.loads((tmp_path / "status.json").read_text()))

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(30):
        run.status(step=step, filler=str(step) * 20000)
    stop.set()
    reader.join()
    assert seen
    assert all(s["step"] == 0 or s["filler"] == str(s["step"]) * 20000 for s in seen)
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"], "nothing written aside stays"


def test_a_failed_replacement_leaves_the_old_state(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_atomic(path, "old")
    with _file_limit(100), pytest.raises(MachineError, match="cannot be written"):
        write_atomic(path, "n" * 1000)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_ledger_has_rows(tmp_path: Path) -> None:
    RunDir(tmp_path).ledger([{"row": "parameters", "rank": 0, "measured_bytes": 4}])
    assert json.loads((tmp_path / "ledger.json").read_text()) == {
        "rows": [{"row": "parameters", "rank": 0, "measured_bytes": 4}]
    }


# -- torn ends ------------------------------------------------------------


@pytest.mark.parametrize("tail", ['{"kind": "tr', "{", '{"kind": "train"}', "\0" * 300, "\0\0\n", "garbage\n", "\n"])
def test_a_torn_end_is_cut_and_said(tmp_path: Path, tail: str) -> None:
    run = RunDir(tmp_path)
    run.metrics(row(1))
    run.close()
    whole = run.metrics_path.read_text()
    run.metrics_path.write_text(whole + tail)
    again = RunDir(tmp_path)
    again.status(state="running", step=1, attempt=1)
    again.start_session()
    again.metrics(row(2))
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]
    assert again.metrics_path.read_text().startswith(whole)
    (warning,) = events(again)
    assert warning["event"] == "warning"
    assert "metrics.jsonl" in warning["reason"]
    assert warning["lost_bytes"] == len(tail)
    assert warning["step"] == 1


def test_torn_events_are_repaired_too(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.event("start")
    run.close()
    with open(run.events_path, "a") as file:
        file.write('{"event": "sa')
    RunDir(tmp_path).start_session()
    assert [e["event"] for e in events(run)] == ["start", "warning"]


def test_a_whole_history_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert repair(path) is None
    path.write_text("")
    assert repair(path) is None
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert repair(path) is None
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'


def test_another_rank_repairs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "start"}\n')
    RunDir(tmp_path, rank=1).event("drill")
    path.write_text(path.read_text() + '{"ev')  # rank 0 in the middle of a write, as a slow file system shows it
    RunDir(tmp_path, rank=1).event("drill")
    assert '{"ev' in path.read_text()


def test_a_broken_line_in_the_middle_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\nboom\n{"a": 2}\n')
    with pytest.raises(UsageError, match=r"metrics\.jsonl:2"):
        read_lines(path)


def test_a_history_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_metrics(tmp_path)


def test_a_full_disk_tears_no_line(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "metrics.jsonl")
    with _file_limit(100):
        lines.append({"a": "x" * 50})
        with pytest.raises(MachineError, match=r"metrics\.jsonl: cannot append"):
            lines.append({"a": "y" * 50})
    lines.append({"a": "z" * 200})
    assert [r["a"][0] for r in read_lines(lines.path)] == ["x", "z"]


class _file_limit:
    """Files of this process may have so many bytes; further ones fail as on a full disk."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> None:
        self.handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self.old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.old[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.old)
        signal.signal(signal.SIGXFSZ, self.handler)


_APPEND_FOR_EVER = """
import sys
from mpdist.record import RunDir
run = RunDir(sys.argv[1])
run.start_session()
step = 0
while True:
    step += 1
    run.metrics({"kind": "train", "step": step, "attempt": step, "train/label_tokens": step, "time/train_s": 0.0,
                 "precision/filler": "x" * 3000})
    if step == 50:
        print("go", flush=True)
"""


def test_a_kill_in_the_middle_of_appending_loses_at_most_one_line(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", _APPEND_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "go\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    run = RunDir(tmp_path)
    assert run.start_session() == 2
    steps = [r["step"] for r in read_lines(run.metrics_path)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 50
    run.metrics(row(len(steps) + 1))
    assert read_metrics(tmp_path)[-1]["session"] == 2


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    code = """
import sys
from mpdist.record import RunDir
run = RunDir(sys.argv[1], rank=int(sys.argv[2]))
for step in range(200):
    run.event("drill", step, step, reason="x" * 500)
"""
    children = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(rank)]) for rank in (1, 2)]
    assert [child.wait() for child in children] == [0, 0]
    found = read_lines(tmp_path / "events.jsonl")
    assert len(found) == 400
    for rank in (1, 2):
        assert [e["step"] for e in found if e["rank"] == rank] == list(range(200))


# -- rows that count ------------------------------------------------------------


def write(path: Path, *rows: tuple[int, int, str]) -> Path:
    file = path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"kind": k, "step": n, "session": s}) + "\n" for s, n, k in rows))
    return file


def counted(path: Path) -> list[tuple[int, int, str]]:
    return [(r["session"], r["step"], r["kind"]) for r in read_metrics(path)]


def test_the_last_row_of_a_step_counts(tmp_path: Path) -> None:
    write(tmp_path, (1, 1, "train"), (1, 2, "train"), (1, 2, "eval"), (1, 3, "train"), (2, 3, "train"), (2, 4, "train"))
    assert counted(tmp_path) == [(1, 1, "train"), (1, 2, "train"), (1, 2, "eval"), (2, 3, "train"), (2, 4, "train")]


def test_rows_after_the_place_of_a_resume_are_superseded(tmp_path: Path) -> None:
    write(tmp_path, *[(1, n, "train") for n in (5, 10, 15, 20)], (1, 20, "eval"), (2, 12, "train"), (3, 13, "train"))
    assert counted(tmp_path) == [(1, 5, "train"), (1, 10, "train"), (2, 12, "train"), (3, 13, "train")]


def test_an_evaluation_after_a_resume_leaves_the_training_row_of_its_step(tmp_path: Path) -> None:
    write(tmp_path, (1, 10, "train"), (1, 10, "eval"), (1, 11, "train"), (2, 10, "eval"))
    assert counted(tmp_path) == [(1, 10, "train"), (2, 10, "eval")]


def test_a_line_being_written_is_not_read(tmp_path: Path) -> None:
    file = write(tmp_path, (1, 1, "train"))
    with open(file, "a") as end:
        end.write('{"kind": "train", "step": 2')
    assert counted(file) == [(1, 1, "train")]


# -- sessions ------------------------------------------------------------


def test_sessions_count_up_and_are_folders(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.last_session() == 0
    assert [run.start_session({"a": 1}), run.start_session()] == [1, 2]
    run.write_env({"devices": ["cpu"]})
    env = json.loads((tmp_path / "sessions/0002/env.json").read_text())
    assert env["session"] == 2
    assert env["devices"] == ["cpu"]
    assert (tmp_path / "sessions/0001/logs").is_dir()


def test_the_last_sign_of_life_is_from_before_this_session(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.alive_at() is None
    run.metrics(row(1))
    os.utime(run.metrics_path, (1000, 2000))
    again = RunDir(tmp_path)
    again.start_session()
    again.event("start")
    assert again.last_alive == 2000


def test_a_config_that_is_replaced_stays_with_its_session(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.freeze("a: 1\n", {"ranks": 2})
    run.start_session()
    run.freeze("a: 1\n", {"ranks": 2})
    assert not (tmp_path / "sessions/0001/config.yaml").exists()
    run.freeze("a: 2\n", {"ranks": 4})
    assert (tmp_path / "sessions/0001/config.yaml").read_text() == "a: 1\n"
    assert run.config_path.read_text() == "a: 2\n"
    assert json.loads(run.plan_path.read_text()) == {"ranks": 4}


# -- env.json ------------------------------------------------------------


def test_env_holds_names_and_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-very-secret-value")
    monkeypatch.setenv("NCCL_DEBUG", "INFO-value")
    monkeypatch.setenv("UNRELATED_THING", "1")
    env = environment(["cpu"], argv=["mpdist", "launch", "c.yaml"], peak_flops=None)
    text = json.dumps(plain(env))
    assert "a-very-secret-value" not in text
    assert "INFO-value" not in text
    assert {"WANDB_API_KEY", "NCCL_DEBUG"} <= set(env["variables"])
    assert "UNRELATED_THING" not in env["variables"]
    assert env["devices"] == ["cpu"]
    assert env["command"] == ["mpdist", "launch", "c.yaml"]
    assert env["versions"]["torch"]
    assert env["cores"] >= 1
    assert env["cpu"]


HF = "hf_" + "aB3" * 10


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"launch x.yaml model.path={HF}", "launch x.yaml model.path=***"),
        ("data.path=https://me:pass@host/x", "data.path=https://***@host/x"),
        ("--api-key abc --steps 3", "--api-key *** --steps 3"),
        ("hub.token=abcdef", "hub.token=***"),
        ("track.wandb.api_key=0123 seed=1", "track.wandb.api_key=*** seed=1"),
        ("budget.tokens=1000 data.tokenizer=bytes", "budget.tokens=1000 data.tokenizer=bytes"),
        ("model.revision=" + "0a" * 20, "model.revision=" + "0a" * 20),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, kept: str) -> None:
    assert mask(text) == kept
    assert environment(argv=text.split(" "))["command"] == kept.split(" ")


def test_words_with_spaces_stay_words() -> None:
    assert environment(argv=["mpdist", "name=my run", ""])["command"] == ["mpdist", "name=my run", ""]


def test_nested_values_are_masked_by_key_too() -> None:
    config = {"hub": {"token": "abc", "tokens": 5}, "list": [HF, 1], "password": None}
    assert masked(config) == {"hub": {"token": "***", "tokens": 5}, "list": ["***", 1], "password": None}
