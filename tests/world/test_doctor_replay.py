"""`mpdist doctor --replay RUN STEP`: a past step computed again gives its record to the last bit, or says what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import watched

from mpdist import cli

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 5 steps on 2 ranks, with checkpoints at 2 and 4, an overflow on the way and dropout; and one of one rank."""
    folder = tmp_path_factory.mktemp("replay")
    model = {"config": {**tiny.LLAMA, "attention_dropout": 0.1}}
    base = {"model": model, "budget__steps": 5, "checkpoint": {"every": 2, "keep": 5},
            "drill": {"overflow_at": {"attempts": [4], "rank": 1}},
            "precision": {"compute": "fp16", "scale": {"per_block": True}}}  # fmt: skip
    (run,) = watched.sessions(folder, 2, [{**base, "name": "two"}])
    assert run.status == 0, run.message
    assert len(run.attempts) > 5
    finding = run.events("finding")[0]  # of the drill
    assert (finding["bad_loss"], finding["rehearsed"], finding["reproduced"]) == (False, "overflow_at", True)
    return run.folder


def replay(capfd: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, dict[str, Any], str]:
    status = cli.main(["doctor", "--replay", *map(str, words), "--json"])
    said = capfd.readouterr()
    found = {row["check"]: row for row in json.loads(said.out)["findings"]} if said.out.strip().startswith("{") else {}
    return status, found, said.err


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_step_is_reached_again_and_a_changed_digit_is_found(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = tree(made)
    status, found, err = replay(capfd, made, "4")
    assert status == 0, err + str(found)
    assert found["replay"]["value"] == "2 steps from step-00000002 on 2 ranks"
    assert "equal to the record bit for bit, and 1 logged steps before it" in found["step 4"]["value"]
    assert tree(made) == before, "a replay writes nothing into the run"

    metrics = made / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    (row,) = [row for row in lines if (row["kind"], row["step"]) == ("train", 5)]
    norm = row["train/grad_norm"]
    row["train/grad_norm"] = norm * (1 + 2**-50)
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        status, found, err = replay(capfd, made, "5")
    finally:
        metrics.write_bytes(before["metrics.jsonl"])
    assert (status, sorted(found)) == (4, ["replay", "step 5"]), err
    assert found["step 5"]["level"] == "failed"
    assert f"train/grad_norm {row['train/grad_norm']!r} in the record, {norm!r} now" in found["step 5"]["value"]
    assert "silent corruption" in found["step 5"]["why"]


def test_a_damaged_checkpoint_is_passed_over(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpdist.doctor import replay as module

    (victim,) = (made / "checkpoints" / "step-00000002").glob("state.json")
    kept = victim.read_bytes()
    victim.write_bytes(kept[:-1])
    try:
        wanted = module.look(made, 4)
        nearer = module.look(made, 5)
        for name, value in module.environment_of(wanted).items():
            monkeypatch.setenv(name, value)
        rank = module.look(made, 4)
    finally:
        victim.write_bytes(kept)
    assert (wanted.begin, wanted.checkpoint, rank.checkpoint) == (0, None, None)
    assert sorted(rank.rows) == sorted(wanted.rows) == [1, 2, 3, 4]
    (told,) = module.passed_over(wanted)
    assert told.level == "doubtful"
    assert told.value.startswith("step-00000002 is passed over: state.json has ")
    assert (nearer.begin, nearer.passed) == (4, ())


def test_what_cannot_be_exact_is_refused(
    made: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpdist.doctor import replay as module

    assert replay(capfd, made / "nowhere", "3")[0] == 2
    status, _, err = replay(capfd, made, "9")
    assert status == 2
    assert "the nearest that are: 4, 5" in err
    monkeypatch.setattr(module, "FAR", 1)
    status, _, err = replay(capfd, made, "2")
    assert status == 2
    assert "the nearest earlier checkpoint is the run's beginning, 2 steps before it" in err
    monkeypatch.undo()

    env = made / "sessions" / "0001" / "env.json"
    kept = env.read_bytes()
    values = json.loads(kept)
    for change, why in (
        ({"versions": {**values["versions"], "torch": "1.0"}}, "session 1 had torch 1.0 and here it is"),
        ({"nodes": 2}, "the run had 2 nodes"),
        ({"cpu": "an abacus"}, "session 1 ran on an abacus"),
    ):
        env.write_text(json.dumps({**values, **change}))
        status, _, err = replay(capfd, made, "3")
        env.write_bytes(kept)
        assert status == 2
        assert why in err
    env.write_text(json.dumps({**values, "versions": 3}))
    status, _, err = replay(capfd, made, "3")
    env.write_bytes(kept)
    assert (status, "env.json: versions = 3" in err) == (2, True)
    history = made / "metrics.jsonl"
    kept = history.read_bytes()
    history.write_bytes(kept.replace(b'"train/loss": ', b'"train/lost": ', 1))
    status, _, err = replay(capfd, made, "1")
    history.write_bytes(kept)
    assert (status, "metrics.jsonl:1 has no train/loss" in err) == (2, True)
    status = cli.main(["doctor", str(made / "config.yaml"), "--replay", str(made), "3"])
    assert status == 2
    assert "the run's own configuration and number of ranks are taken" in capfd.readouterr().err
