"""`mpdist fetch` against a stand-in for the hub, and ranks that then never ask it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from hub_server import COMMIT, HubServer

from mpdist import hub
from mpdist.config import load

ROOT = Path(__file__).resolve().parents[2]

# Every address that the process looks up or connects to, but for its own host's.
NOTED = """\
import os, socket
_FILE = os.environ["CALLS"]
def _note(what, place):
    if not isinstance(place, (str, bytes)) and str(place[0]) in ("127.0.0.1", "localhost", "::1") and place[1] != 1:
        return
    with open(_FILE, "a") as file:
        file.write(f"{what} {place}\\n")
_connect, _look_up = socket.socket.connect, socket.getaddrinfo
def connect(self, place):
    if self.family in (socket.AF_INET, socket.AF_INET6) and self.type == socket.SOCK_STREAM:
        _note("connect", place)
    return _connect(self, place)
def look_up(host, port, *rest, **more):
    if host not in (None, "", "127.0.0.1", "localhost", socket.gethostname()):
        _note("look up", (host, port))
    return _look_up(host, port, *rest, **more)
socket.socket.connect, socket.getaddrinfo = connect, look_up
"""
NOWHERE = "http://127.0.0.1:1"  # a port that nothing listens on: an attempt is refused at once, and counted


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository as the hub's are: with files that no run needs."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from mpdist.data.tokens import byte_tokenizer

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = {key: value for key, value in tiny.LLAMA.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return files | {
        "README.md": b"# me",
        ".gitattributes": b"",
        "consolidated.safetensors": b"?",
        "flax_model.msgpack": b"?",
    }


@pytest.fixture(scope="module")
def server(model: dict[str, bytes]) -> Iterator[HubServer]:
    rows = "".join(json.dumps({"text": f"the cat {i} sat on the mat"}) + "\n" for i in range(60))
    data = {"train.jsonl": rows.encode(), "README.md": b""}
    bare = {name: body for name, body in model.items() if "token" not in name}
    with HubServer({"models/me/tiny": model, "models/me/bare": bare, "datasets/me/Some-Rows": data}) as server:
        yield server


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, server: HubServer) -> tuple[Path, list[str]]:
    """The cache that one fetch has filled, and what it asked for."""
    folder = tmp_path_factory.mktemp("login")
    done = Shell(folder, server.url).run("fetch", write(folder))
    assert done.returncode == 0, done.stderr
    return folder / "hf", list(server.asked)


def write(folder: Path) -> Path:
    data = {"train": [{"path": "me/Some-Rows", "split": "train"}], "seq_len": 64}
    return tiny.config(folder, model={"path": "me/tiny"}, data=data, budget={"steps": 2})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write(tmp_path)


class Shell:
    """A machine with a hub cache of its own, from which commands are started."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.calls = folder, folder / "calls"
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(NOTED)
        drop = ("HF_", "SLURM_", "MPDIST_", "TRANSFORMERS_")
        plain = {k: v for k, v in os.environ.items() if not k.startswith(drop) and not k.lower().endswith("_proxy")}
        self.env = plain | {
            "HF_ENDPOINT": url, "HF_HOME": str(folder / "hf"), "CALLS": str(self.calls), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{folder / 'site'}:{ROOT}", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }  # fmt: skip

    def run(self, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        self.calls.write_text("")
        return subprocess.run(
            [sys.executable, "-m", "mpdist", *map(str, words)],
            env=self.env | env, cwd=self.folder, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    @property
    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path, NOWHERE)


@pytest.fixture
def fetched(tmp_path: Path, server: HubServer, kept: tuple[Path, list[str]]) -> Shell:
    """A machine that has a cache as a fetch leaves it, and reaches the hub."""
    shutil.copytree(kept[0], tmp_path / "hf", symlinks=True)
    server.asked.clear()
    return Shell(tmp_path, server.url)


def alone(**more: str) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | more


def test_what_is_needed_is_fetched_once_and_nothing_else(
    kept: tuple[Path, list[str]], fetched: Shell, server: HubServer, config: Path
) -> None:
    got = {line.rpartition("/")[2] for line in kept[1] if line.startswith("GET /me/tiny/resolve/")}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= got
    assert not got & {"README.md", "consolidated.safetensors", "flax_model.msgpack"}
    again = fetched.run("fetch", config)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("here already") == 3
    assert (server.asked, fetched.called) == ([], [])
    assert fetched.run("fetch", config, "--refresh").returncode == 0
    assert "GET /api/models/me/tiny/revision/main" in server.asked
    assert not [line for line in server.asked if "model.safetensors" in line and line.startswith("GET")]


def test_a_rank_trains_from_what_was_fetched_and_prepared_without_opening_a_socket(
    fetched: Shell, config: Path
) -> None:
    assert fetched.run("prepare", config).returncode == 0
    done = fetched.run(config, **alone(HF_ENDPOINT=NOWHERE))
    assert done.returncode == 0, done.stderr
    assert fetched.called == []
    assert "each rank reads its rows" in (fetched.folder / "runs/run/sessions/0001/env.json").read_text()
    assert json.loads((fetched.folder / "runs/run/status.json").read_text())["step"] == 2
    assert len([p for p in (fetched.folder / "runs/.data").iterdir() if p.is_dir()]) == 1, "it was found prepared"


@pytest.mark.parametrize(
    "settings",
    [["model.path=me/bare", "data.tokenizer=bytes"], ["model.revision=v1"]],
    ids=["a model without a tokenizer", "a revision"],
)
def test_so_it_does_with(fetched: Shell, config: Path, settings: list[str]) -> None:
    assert fetched.run("fetch", config, *settings).returncode == 0
    (fetched.folder / "hf/hub/models--me--tiny/refs/main").unlink()  # nothing may fall back to what else is here
    done = fetched.run(config, *settings, **alone(HF_ENDPOINT=NOWHERE))
    assert done.returncode == 0, done.stderr
    assert fetched.called == []


@pytest.mark.parametrize("way", ["fetch", "prepare", "launch", "rank"])
def test_without_a_network_one_attempt_is_made_and_all_that_is_missing_is_named(
    shell: Shell, config: Path, way: str
) -> None:
    words = (config,) if way == "rank" else (way, config)
    done = shell.run(*words, **(alone() if way == "rank" else {}))
    assert done.returncode == 4, done.stderr
    assert len([call for call in shell.called if call.startswith("connect")]) == 1, shell.called
    for text in (
        "model.path = me/tiny",
        "data.tokenizer = me/tiny",
        "data.train.0.path = me/Some-Rows",
        "mpdist fetch",
    ):
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (shell.folder / "runs/run/sessions").exists()


def test_where_the_hub_may_not_be_asked_it_is_not(shell: Shell, config: Path) -> None:
    done = shell.run("fetch", config, HF_HUB_OFFLINE="1")
    assert done.returncode == 4
    assert "HF_HUB_OFFLINE is set" in done.stderr
    assert shell.called == []


def test_a_fetch_that_was_cut_short_is_finished(fetched: Shell, config: Path) -> None:
    snapshot = fetched.folder / f"hf/hub/models--me--tiny/snapshots/{COMMIT}"
    for name in ("generation_config.json", "model.safetensors"):
        (snapshot / name).unlink()
    assert fetched.run("fetch", config).returncode == 0
    assert {"generation_config.json", "model.safetensors"} <= {path.name for path in snapshot.iterdir()}
    (snapshot / "generation_config.json").unlink()
    done = fetched.run("fetch", config, HF_ENDPOINT=NOWHERE)
    assert done.returncode == 4
    assert "model.path = me/tiny: some of its files" in done.stderr


def test_a_name_that_the_hub_does_not_have_is_the_users_mistake(fetched: Shell, config: Path) -> None:
    done = fetched.run("fetch", config, "model.path=me/tiny2", "data.tokenizer=me/tiny")
    assert done.returncode == 2, done.stderr
    assert "model.path = me/tiny2 cannot be fetched" in done.stderr
    assert "Traceback" not in done.stderr


def test_code_of_another_repository_is_a_need_of_its_own(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / f"hf/hub/models--me--tiny/snapshots/{COMMIT}"
    folder.mkdir(parents=True)
    (tmp_path / "hf/hub/models--me--tiny/refs").mkdir()
    (tmp_path / "hf/hub/models--me--tiny/refs/main").write_text(COMMIT)
    classes = {"AutoConfig": "you/code--configuration.C", "AutoModelForCausalLM": "you/code--modeling.M"}
    (folder / "config.json").write_text(json.dumps({"auto_map": classes}))
    kinds = [(need.kind, need.name) for need in hub.needs(load(config, ["model.trust_remote_code=true"]).config)]
    assert ("code", "you/code") in kinds
    assert not any(need.kind == "code" for need in hub.needs(load(config).config))


def test_the_names_of_built_data_sets_are_the_librarys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from datasets.naming import camelcase_to_snakecase

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    for name in ("CamelCase-2", "plain_one", "HTTPRows", "rows.v1", "Some-Rows"):
        assert hub.dataset_folder(f"me/{name}") is None
        made = tmp_path / f"me___{camelcase_to_snakecase(name)}" / "default" / "0.0.0" / "abc"
        made.mkdir(parents=True)
        (made / "dataset_info.json").write_text("{}")
        assert hub.dataset_folder(f"me/{name}") is not None, name


def test_a_hub_that_takes_connections_and_never_answers_is_waited_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import socket

    monkeypatch.setattr(hub, "_ASK_S", 0.3)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        said: Any = hub.unreachable(f"http://127.0.0.1:{mute.getsockname()[1]}")
    assert said is not None
    assert "timed out" in said
