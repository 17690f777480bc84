"""Tracking never stops, blocks or delays a run: W&B offline, online, missing, dying, hanging and raising."""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb_server import WandbServer, read_offline

from mpdist import track
from mpdist.lines import read_lines
from mpdist.record import RunDir
from mpdist.track import Progress, Tracker, figures_of, strictest

CLOSED = "http://127.0.0.1:9"  # nobody listens on the discard port of loopback


@pytest.fixture(autouse=True, scope="module")
def _clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("WANDB_") or name.lower().endswith("_proxy"):
                patch.delenv(name)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("WANDB_API_KEY", "0" * 40)
        patch.setenv("WANDB_BASE_URL", CLOSED)
        yield


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with WandbServer() as started:
        monkeypatch.setenv("WANDB_BASE_URL", started.url)
        yield started


class Timed:
    """`with Timed(5):` fails if its body takes longer."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s

    def __enter__(self) -> None:
        self.begin = time.monotonic()

    def __exit__(self, kind: object, *_: object) -> None:
        took = time.monotonic() - self.begin
        assert kind or took < self.limit_s, f"took {took:.1f} s of at most {self.limit_s} s"


def row(step: int, kind: str = "train", **more: Any) -> dict[str, Any]:
    axes = {"train/label_tokens": step * 10, "time/train_s": step * 0.5}
    return {"kind": kind, "step": step, "attempt": step, "session": 1, **axes, f"{kind}/loss": 1.0 / step, **more}


def start(path: Path, mode: str, warnings: list[str], **more: Any) -> Tracker:
    return Tracker(mode, "project", "name", path, warn=warnings.append, **more)


def offline_runs(path: Path) -> list[Path]:
    return sorted(path.glob("wandb/offline-run-*"))


def await_online(tracker: Tracker) -> None:
    deadline = time.monotonic() + 60
    while tracker.state == "starting" and time.monotonic() < deadline:
        time.sleep(0.02)
        tracker._exchange(0.0)
    assert tracker.state == "online"


# -- offline -------------------------------------------------------------------------------------------------------


def test_c100_one_run_from_one_rank(tmp_path: Path) -> None:
    warnings: list[str] = []
    ranks = [start(tmp_path, "offline", warnings, rank=rank) for rank in (0, 1)]
    for tracker in ranks:
        tracker.log(row(1))
    with Timed(20):
        for tracker in ranks:
            tracker.finish(0)
    assert len(offline_runs(tmp_path)) == 1
    assert warnings == []
    assert ranks[1].id is None


SECRET = "hf_" + "x1" * 15


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An offline run, read back."""
    path = tmp_path_factory.mktemp("recorded")
    warnings: list[str] = []
    config = {"optim": {"lr": 1e-4}, "hub": {"token": "abc"}, "path": f"https://me:{SECRET}@host/x"}
    tracker = start(path, "offline", warnings, run_id="abc123", config=config, group="arms")
    for step in range(1, 21):
        tracker.log(row(step))
    tracker.log(row(20, "eval", **{"eval/perplexity": 2.0}))
    tracker.log(row(21, **{"train/loss": math.nan, "train/grad_norm": "inf"}))
    tracker.finish(5)
    assert warnings == []
    assert tracker.state == "finished"
    assert tracker.url is None
    (folder,) = offline_runs(path)
    return read_offline(folder)


def test_an_offline_run_read_back(recorded: dict[str, Any]) -> None:
    assert recorded["run"] == {"id": "abc123", "name": "name", "project": "project", "group": "arms"}
    assert recorded["exit"] == 5
    assert [r["step"] for r in recorded["history"]] == [*range(1, 21), 20, 21]
    assert recorded["history"][20]["eval/perplexity"] == 2.0


def test_no_secret_reaches_the_config(recorded: dict[str, Any]) -> None:
    assert recorded["config"]["optim"] == {"lr": 1e-4}
    assert recorded["config"]["hub"] == {"token": "***"}
    assert SECRET not in json.dumps(recorded)


def test_charts_can_be_drawn_over_steps_tokens_and_seconds(recorded: dict[str, Any]) -> None:
    axes = recorded["axes"]
    assert {"step", "train/label_tokens", "time/train_s"} <= set(axes)
    assert axes["train/*"] == axes["eval/*"] == axes["scale/*"] == "step"
    assert axes["over_tokens/*"] == "train/label_tokens"
    assert axes["over_seconds/*"] == "time/train_s"
    for kind, logged in zip(("train", "eval"), recorded["history"][19:21], strict=True):
        assert {"step", "train/label_tokens", "time/train_s"} <= set(logged)
        assert logged[f"over_tokens/{kind}/loss"] == logged[f"over_seconds/{kind}/loss"] == logged[f"{kind}/loss"]


def test_c124_a_nan_reaches_the_chart_as_nan(recorded: dict[str, Any]) -> None:
    last = recorded["history"][-1]
    assert math.isnan(last["train/loss"])
    assert last["train/grad_norm"] == math.inf


def test_a_preempted_run_is_resumed_under_its_id(tmp_path: Path) -> None:
    warnings: list[str] = []
    ids = []
    for exit in (75, 0):
        tracker = start(tmp_path, "offline", warnings)
        tracker.log(row(1))
        tracker.finish(exit)
        ids.append(tracker.id)
    assert ids[0] == ids[1] == (tmp_path / "wandb/id").read_text().strip()
    assert [read_offline(folder)["run"]["id"] for folder in offline_runs(tmp_path)] == ids
    assert warnings == []


def test_rows_survive_the_death_of_the_trainer(tmp_path: Path) -> None:
    code = """
import os, sys, time
from mpdist.track import Tracker
tracker = Tracker("offline", "p", "n", sys.argv[1])
for step in range(1, 51):
    tracker.log({"kind": "train", "step": step, "train/loss": 1.0})
while tracker.state == "starting":
    time.sleep(0.02)
    tracker.log({"kind": "train", "step": 51, "train/loss": 1.0})
os.kill(os.getpid(), 9)
"""
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert child.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    found: dict[str, Any] = {"exit": None}
    while found["exit"] is None and time.monotonic() < deadline:
        time.sleep(0.1)
        found = read_offline(offline_runs(tmp_path)[0])
    assert found["exit"] == 1
    assert [r["step"] for r in found["history"]][:50] == list(range(1, 51))


# -- online --------------------------------------------------------------------------------------------------------


def axes_of(run: dict[str, Any]) -> dict[str, str]:
    """What each metric is drawn over: W&B keeps names under 1 (patterns under 2) and the axis's place, from 1, under 5."""
    found = json.loads(run["config"])["_wandb"]["value"]["m"]
    return {m.get("1", m.get("2")): found[m["5"] - 1]["1"] for m in found if "5" in m}


def test_online_and_resumed_it_is_one_run_with_its_config_and_its_ledger(tmp_path: Path, server: WandbServer) -> None:
    warnings: list[str] = []
    config = {"optim": {"lr": 1e-4}, "hub": {"token": "abc-secret"}, "path": f"https://me:{SECRET}@host/x"}
    axes = []
    with Timed(40):
        for session, first in enumerate((1, 6), 1):
            (tmp_path / "ledger.json").write_text(json.dumps({"rows": [], "session": session}))
            tracker = start(tmp_path, "online", warnings, config=config, group="arms")
            for step in range(first, first + 5):
                tracker.log(row(step))
            tracker.finish(75 if first == 1 else 0)
            assert tracker.state == "finished"
            assert tracker.url
            assert tracker.id in tracker.url
            axes.append(axes_of(server.runs[str(tracker.id)]))
            assert json.loads(server.files["ledger.json"])["session"] == session
    assert warnings == []
    ((name, run),) = server.runs.items()
    assert (name, run["exit"], run["groupName"], run["displayName"]) == (tracker.id, 0, "arms", "name")
    assert [r["step"] for r in run["history"]] == list(range(1, 11))
    assert axes[0] == axes[1], "a resumed run is drawn over the same axes"
    assert axes[0]["train/*"] == "step"
    assert axes[0]["over_seconds/*"] == "time/train_s"
    assert json.loads(run["config"])["optim"]["value"] == {"lr": 1e-4}
    heard = b"".join(server.heard)
    for secret in (SECRET, "abc-secret", "0" * 40):
        assert secret.encode() not in heard


def test_c102_a_slow_server_delays_neither_a_row_nor_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    with WandbServer("slow") as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        with Timed(0.5):
            tracker = start(tmp_path, "online", warnings)
            for step in range(1, 100):
                tracker.log(row(step))
        await_online(tracker)
        with Timed(0.5):
            for step in range(100, 200):
                tracker.log(row(step))
        with Timed(track.FINISH_S + 2):
            tracker.finish(0)
        ((_, run),) = server.runs.items()
    assert (tracker.state, warnings, len(run["history"])) == ("finished", [], 199)


def sync(url: str, *folders: Path, **env: str) -> None:
    """`wandb sync`, as a person would after the run."""
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", *map(str, folders)]
    done = subprocess.run(
        command, env={**os.environ, "WANDB_BASE_URL": url, **env}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_c102_a_server_that_comes_back_gets_the_rest_and_what_was_offline_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: WandbServer
) -> None:
    """Three sessions of one run: the server dies in the first and comes back, is away in the second, there in the third."""
    warnings: list[str] = []
    tracker = start(tmp_path, "online", warnings)
    tracker.log(row(1))
    await_online(tracker)
    server.die()
    with Timed(0.5):
        for step in range(2, 100):
            tracker.log(row(step))
    with WandbServer(port=server.port, runs=server.runs) as back:
        for step in range(100, 120):
            tracker.log(row(step))
        tracker.finish(75)
        monkeypatch.setenv("WANDB_BASE_URL", CLOSED)
        away = start(tmp_path, "online", warnings)
        for step in range(120, 130):
            away.log(row(step))
        away.finish(75)
        assert away.id == tracker.id
        assert "offline for this session" in warnings[-1]
        if tracker.state != "finished":
            sync(back.url, *tmp_path.glob("wandb/run-*"))
        sync(back.url, *offline_runs(tmp_path))
        ((name, run),) = back.runs.items()
    assert name == tracker.id
    assert {r["step"] for r in run["history"]} == set(range(1, 130))
    assert {r["time/train_s"] for r in run["history"]} == {step * 0.5 for step in range(1, 130)}


def test_c102_a_server_that_dies_stops_and_delays_nothing(tmp_path: Path, server: WandbServer) -> None:
    warnings: list[str] = []
    tracker = start(tmp_path, "online", warnings, finish_s=4.0)
    tracker.log(row(1))
    await_online(tracker)
    server.die()
    with Timed(0.5):
        for step in range(2, 200):
            tracker.log(row(step))
    with Timed(6):
        tracker.finish(0)
    assert len(warnings) == 1
    assert "in time" in warnings[0]
    assert "wandb sync" in warnings[0]
    (folder,) = tmp_path.glob("wandb/run-*")
    assert len(read_offline(folder)["history"]) == 199, "all is on the disk, to be synced later"


@pytest.mark.parametrize("manner", ["closed", "proxy", "503", "401", "mute"])
def test_c102_without_a_server_the_run_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manner: str
) -> None:
    warnings: list[str] = []
    with WandbServer(manner if manner in ("503", "401", "mute") else "well") as server:
        if manner in ("503", "401", "mute"):
            monkeypatch.setenv("WANDB_BASE_URL", server.url)
        if manner == "proxy":
            monkeypatch.delenv("WANDB_BASE_URL")
            for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
                monkeypatch.setenv(name, CLOSED)
        run = RunDir(tmp_path)
        with Timed(0.5):
            tracker = start(tmp_path, "online", warnings)
            for step in range(1, 6):
                run.metrics(row(step))
                tracker.log(row(step))
        with Timed(15):
            tracker.finish(0)
    assert len(warnings) == 1
    assert "offline for this session" in warnings[0]
    assert len(read_lines(run.metrics_path)) == 5
    (folder,) = offline_runs(tmp_path)
    found = read_offline(folder)
    assert len(found["history"]) == 5
    assert found["exit"] == 0
    assert found["run"]["id"] == tracker.id


def test_without_a_key_nobody_is_asked_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: WandbServer
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    warnings: list[str] = []
    with Timed(15):
        tracker = start(tmp_path, "online", warnings)
        tracker.log(row(1))
        tracker.finish(0)
    assert len(warnings) == 1
    assert "API key" in warnings[0]
    assert len(offline_runs(tmp_path)) == 1
    assert server.runs == {}


# -- a tracker that misbehaves -------------------------------------------------------------------------------------

_STUB = """
import json, time
class Settings:
    model_fields = {}
    def __init__(self, **given): pass
    base_url = "http://127.0.0.1:9"
class Run:
    dir, url, calls = ".", None, 0
    def define_metric(self, *a, **k): pass
    def mark_preempting(self): pass
    def finish(self, exit_code=0): FINISH
    def log(self, row):
        Run.calls += 1
        LOG
def setup(settings=None): return type("S", (), {"settings": Settings})
def init(**given): INIT; return Run()
def teardown(): pass
def login(prompt=True): return True
"""


def stub(folder: Path, monkeypatch: pytest.MonkeyPatch, **bodies: str) -> None:
    text = _STUB
    for part in ("INIT", "LOG", "FINISH"):
        text = text.replace(part, bodies.get(part.lower(), "pass"))
    (folder / "stub").mkdir()
    (folder / "stub/wandb.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder / "stub"))


@pytest.mark.parametrize(
    "log",
    ["if Run.calls == 3: raise RuntimeError('boom')", "if Run.calls == 3: raise SystemExit", "import os; os._exit(3)"],
)
def test_c102_a_tracker_that_raises_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str) -> None:
    stub(tmp_path, monkeypatch, log=log)
    warnings: list[str] = []
    tracker = start(tmp_path, "offline", warnings)
    deadline = time.monotonic() + 10
    while tracker.state != "off" and time.monotonic() < deadline:
        tracker.log(row(1))
        time.sleep(0.01)
    assert tracker.state == "off"
    for step in range(1, 50):
        tracker.log(row(step))
    with Timed(2):
        tracker.finish(0)
        tracker.finish(0)
    assert len(warnings) == 1
    assert "off for the rest of the run" in warnings[0]


@pytest.mark.parametrize("init", ["raise RuntimeError('boom')", "raise SystemExit(1)", "import os; os._exit(3)"])
def test_c102_a_tracker_that_cannot_start_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str
) -> None:
    stub(tmp_path, monkeypatch, init=init)
    warnings: list[str] = []
    tracker = start(tmp_path, "offline", warnings)
    tracker.log(row(1))
    with Timed(10):
        tracker.finish(0)
    assert len(warnings) == 1
    assert tracker.state == "off"


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_c102_a_tracker_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    stub(tmp_path, monkeypatch, **{where: "time.sleep(1000)"})
    monkeypatch.setattr(track, "BUFFER_BYTES", 50_000)
    warnings: list[str] = []
    tracker = start(tmp_path, "offline", warnings, finish_s=1.5)
    assert tracker._process is not None
    pid = tracker._process.pid
    with Timed(1.0):
        for step in range(1, 2001):
            tracker.log(row(step))
    with Timed(4):
        tracker.finish(0)
    assert "left behind" in warnings[0]
    assert 0 < tracker.dropped < 2000 or where == "finish"
    assert warnings[1:] == [w for w in warnings if w.startswith(f"{tracker.dropped} rows did not reach W&B")]
    assert len(warnings) == (2 if tracker.dropped else 1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_config_that_json_cannot_hold_is_shown_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, monkeypatch)
    warnings: list[str] = []
    tracker = start(tmp_path, "offline", warnings, config={"path": tmp_path, "set": {1}})
    tracker.finish(0)
    assert warnings == []
    assert tracker.state == "finished"


# -- modes ---------------------------------------------------------------------------------------------------------


def test_disabled_does_nothing_and_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track, "_spawn", pytest.fail)
    tracker = Tracker("disabled", "p", "n", tmp_path)
    tracker.log(row(1))
    tracker.finish(0)
    assert list(tmp_path.iterdir()) == []
    assert tracker.id is None
    code = "import sys, mpdist.track; sys.exit('wandb' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("mode", "wish", "result"),
    [
        ("online", None, "online"), ("online", "offline", "offline"), ("online", "disabled", "disabled"),
        ("offline", "online", "offline"), ("disabled", "online", "disabled"), ("disabled", "offline", "disabled"),
        ("online", "dryrun", "offline"), ("offline", "nonsense", "offline"), ("offline", "", "offline"),
    ],
)  # fmt: skip
def test_the_environment_can_only_be_stricter(mode: str, wish: str | None, result: str) -> None:
    assert strictest(mode, {} if wish is None else {"WANDB_MODE": wish}) == result


def test_offline_by_the_environment_asks_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: WandbServer
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = start(tmp_path, "online", [])
    tracker.log(row(1))
    tracker.finish(0)
    assert server.requests == 0
    assert len(offline_runs(tmp_path)) == 1


# -- progress ------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


FIGURES = {"train/lr": 1e-4, "train/grad_norm": 0.5, "speed/tokens_per_s": 12345.6}


def test_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    progress = Progress(100, out)
    progress.tick(1)
    progress.row(row(2, **FIGURES))
    progress.row(row(4, **FIGURES, **{"scale/value": 65536.0, "scale/skipped": 2}))
    progress.row(row(4, "eval", **{"eval/perplexity": 1.284}))
    progress.close()
    assert out.getvalue().splitlines() == [
        "step   2/100  loss 0.5000  lr 1.00e-04  norm 0.5  tok/s 12,346",
        "step   4/100  loss 0.2500  lr 1.00e-04  norm 0.5  tok/s 12,346  scale 65536  skipped 2",
        "step   4/100  eval loss 0.2500  perplexity 1.28",
    ]


def test_one_live_line_on_a_terminal() -> None:
    out = Terminal()
    progress = Progress(10, out, start=4)
    progress.tick(5)
    progress.tick(6)
    assert out.getvalue().count("\r") == 1, "at most ten redraws a second"
    progress.row(row(6, **FIGURES))
    progress.say("saved")
    progress.row(row(8, **FIGURES))
    progress.close()
    text = out.getvalue()
    assert text.count("\n") == 2
    assert "saved\n" in text
    assert text.endswith("\n")
    assert "step  8/10 [################....]" in text
    assert "left" in text


def test_the_live_line_holds_whole_figures_as_far_as_the_terminal_is_wide() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 70, 0, 0))
    with open(theirs, "w") as console, open(ours, "rb"):
        log = Terminal()  # what a rank writes to is its log and the terminal at once
        log.console = console  # type: ignore[attr-defined]
        progress = Progress(10, log)
        progress.row(row(8, **FIGURES))
    assert log.getvalue().endswith("left  loss 0.1250  lr 1.00e-04")


def test_nan_and_unknown_totals_are_shown() -> None:
    assert figures_of({"kind": "train", "train/loss": math.nan, "train/grad_norm": "inf"}) == "loss nan  norm inf"
    out = io.StringIO()
    Progress(None, out).row(row(3))
    estimated = io.StringIO()
    Progress(40, estimated, about=True).row(row(3))
    assert estimated.getvalue().startswith("step  3/~40  loss")
    assert out.getvalue() == "step 3  loss 0.3333\n"


def test_a_terminal_that_went_away_does_not_end_a_run() -> None:
    class Gone(Terminal):
        def write(self, _: str) -> int:
            raise OSError(5, "Input/output error")

    progress = Progress(10, Gone())
    progress.row(row(1))
    progress.tick(2)
    progress.close()
