"""A comparison as a W&B run of its own, offline, read back from what wandb wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from compared import Made
from wandb_server import read_offline

from mpdist import cli
from mpdist.compare import tracked
from mpdist.compare.analyse import compare

OFFLINE = ("track.wandb.mode=offline", "track.wandb.group=arms", "track.wandb.project=precisions")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("wandb")
    for name, compute in (("fp32", "fp32"), ("bf16", "bf16")):
        for seed in (0, 1):
            Made(
                f"{name}-seed{seed}", seed, 40, settings=(f"precision.compute={compute}", *OFFLINE), eval_every=10
            ).write(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_GROUP", "WANDB_DIR"):
            patch.delenv(name, raising=False)
        patch.setenv("HOME", str(folder))
        assert cli.main(["compare", str(folder), "--wandb", "offline"]) == 0
    (run,) = (folder / tracked.FOLDER / "wandb").glob("offline-run-*")
    return {"folder": folder, "files": run / "files", **read_offline(run)}


def test_it_is_a_run_beside_its_arms_and_in_their_group(
    shown: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert {key: shown["run"][key] for key in ("name", "project", "group")} == {
        "name": f"comparison of {shown['folder'].name}", "project": "precisions", "group": "arms",
    }  # fmt: skip
    assert shown["config"]["arms"] == {"fp32": ["fp32-seed0", "fp32-seed1"], "bf16": ["bf16-seed0", "bf16-seed1"]}
    assert shown["exit"] == 0
    # What lies there is no run to compare.
    assert [arm.name for arm in compare([str(shown["folder"])]).arms] == ["fp32", "bf16"]


def test_its_tables_plots_and_page_are_whole(shown: dict[str, Any]) -> None:
    (row,) = shown["history"]
    found = compare([str(shown["folder"])])
    media = shown["files"]
    for name, table in tracked.tables(found).items():
        told = {key: row[f"tables/{name}/{key}"] for key in ("_type", "nrows", "ncols")}
        assert told == {"_type": "table-file", "nrows": len(table["rows"]), "ncols": len(table["head"])}
        written = json.loads((media / row[f"tables/{name}/path"]).read_text())
        assert (written["columns"], written["data"]) == (table["head"], table["rows"])
    for name, plot in tracked.plots(found).items():
        written = json.loads((media / row[f"plots/{name}_table/path"]).read_text())
        assert len(written["data"]) == sum(map(len, plot["xs"])) > 0
    assert '<figure id="loss-steps">' in (media / row["page/path"]).read_text()


def test_names_of_columns_are_told_apart() -> None:
    assert tracked._distinct(["to", "loss", "ratio", "s", "ratio"]) == ["to", "loss", "ratio", "s", "ratio 2"]


def test_wandb_disabled_in_the_environment_is_honoured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    paths = [
        str(Made(name, steps=12, settings=(f"precision.compute={name}",)).write(tmp_path)) for name in ("fp32", "bf16")
    ]
    assert cli.main(["compare", *paths, "--wandb", "online"]) == 0
    assert "W&B" not in capsys.readouterr().err
    assert not (tmp_path / tracked.FOLDER).exists()
