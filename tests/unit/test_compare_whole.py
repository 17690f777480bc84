"""What a run's files may have gone through since: each is compared as it was written, or refused by file and name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compared import Made

from mpdist import cli, plan_command, precision_html, run_files, sweep_file
from mpdist.compare import read
from mpdist.compare.analyse import compare
from mpdist.errors import UsageError

SKIPS = [(2, "non-finite gradients"), (7, "no label token"), (9, "non-finite loss")]
BF16 = ("precision.compute=bf16",)
AS_ASKED = ("track.every=1", "eval.every=4")


def run(folder: Path, name: str = "fp16-seed0", **more: Any) -> Path:
    """12 steps, an evaluation every 4 of them, 3 attempts that were not applied."""
    made = Made(name, steps=12, eval_every=4, skips=SKIPS, settings=AS_ASKED, **more)
    for row in made.rows:  # as a run counts: a window without labels is skipped apart
        if row["kind"] == "train":
            row["scale/skipped"] -= row["attempt"] >= 7
    return made.write(folder)


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read.runs([str(path)])
    return str(caught.value)


def lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if keep(json.loads(line))))


def told(one: Any) -> list[str]:
    return [note.kind for note in one.notes]


# -- histories and counters --------------------------------------------------------------------------------------------


def test_events_that_were_cut_are_refused_with_both_numbers(tmp_path: Path) -> None:
    path = run(tmp_path)
    assert len(read.read(path).skips) == 3
    events = path / "events.jsonl"
    whole = events.read_text()
    lines(events, lambda event: event["attempt"] < 9)
    said = refused(path)
    assert f"{events} tells of 2 skipped attempts, metrics.jsonl counts 3 (attempt - step)" in said
    lines(events, lambda event: event["event"] == "start")
    assert "tells of 0 skipped attempts, metrics.jsonl counts 3" in refused(path)
    for text in ("", whole.split("\n", 1)[1]):
        events.write_text(text)
        assert f"{events} is missing, or its beginning is" in refused(path)
    events.unlink()
    assert f"{events} is missing" in refused(path)
    events.write_text(whole[:-5])  # the last skip is torn off, of a run that is done
    assert "tells of 2 skipped attempts" in refused(path)
    events.write_text(whole + '{"event": "wa')
    assert f"{events} ends in the middle of a line" in refused(path)


def test_counters_of_status_and_metrics_have_to_agree_with_the_events(tmp_path: Path) -> None:
    path = run(tmp_path, status={"attempt": 17})
    assert "events.jsonl tells of 3 skipped attempts, status.json counts 5 (attempt - step)" in refused(path)
    other = run(tmp_path, "b", row={"scale/skipped": 7})
    assert "events.jsonl tells of 2 skipped attempts, metrics.jsonl counts 6 (scale/skipped)" in refused(other)


def test_a_run_that_began_from_anothers_checkpoint_counts_from_there(tmp_path: Path) -> None:
    path = run(tmp_path, status={"attempt": 25})
    metrics, events = path / "metrics.jsonl", path / "events.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows:
        row |= {"attempt": row["attempt"] + 10} | ({"scale/skipped": 12} if row["kind"] == "train" else {})
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    moved = [json.loads(line) for line in events.read_text().splitlines()]
    events.write_text("".join(json.dumps({**one, "attempt": one["attempt"] + 10}) + "\n" for one in moved))
    assert len(read.read(path).skips) == 3


def test_metrics_that_were_cut_are_refused_where_the_run_is_done(tmp_path: Path) -> None:
    path = run(tmp_path)
    metrics = path / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole[:-2])
    said = refused(path)
    assert f"{metrics} ends in the middle of a line" in said
    assert "status.json says done at step 12, the last whole row is of step 12" in said
    metrics.write_text("".join(line + "\n" for line in whole.splitlines()[:-1]))
    assert "has its last evaluation at step 8; status.json says done at step 12" in refused(path)
    (path / "status.json").write_text(json.dumps({"state": "done", "step": 11, "attempt": 14, "time": {}}))
    metrics.write_text(whole)
    assert "goes to step 12; status.json says done at step 11" in refused(path)


def test_steps_without_a_row_are_missing_only_where_they_should_have_one(tmp_path: Path) -> None:
    def made(name: str, every: int, keep: int, **status: Any) -> Path:
        one = Made(name, steps=12, eval_every=12, settings=(f"track.every={every}",), status=status)
        path = one.write(tmp_path)
        lines(
            path / "metrics.jsonl", lambda row: row["step"] <= keep and (row["step"] % every == 0 or row["step"] == 12)
        )
        return path

    assert read.read(made("stopped", 5, 10, state="preempted")).steps == 10
    assert "ends at step 5; status.json says preempted at step 12" in refused(made("cut", 5, 5, state="preempted"))
    assert "ends at step 10; status.json says done at step 12" in refused(made("last", 5, 10))


@pytest.mark.parametrize("state", ["running", "failed"])
def test_a_run_that_was_killed_may_lack_its_end_and_is_noted(tmp_path: Path, state: str) -> None:
    paths = [run(tmp_path, "fp32-seed0"), run(tmp_path, "other-seed0", status={"state": state})]
    metrics = paths[1] / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-2])
    found = compare(list(map(str, paths)), gate=["nonfinite<=9", "loss_gap<=100%"])
    assert [note.text for note in found.notes if note.kind == "torn"] == [
        "other-seed0: metrics.jsonl lacks its end: a kill tears the last line, and may lose what was written last"
    ]
    assert [one.holds for one in found.gates] == [None, None]
    assert (found.arm("fp32").figures.eval_step, found.arm("other").figures.eval_step) == (12, 8)


def test_a_mean_is_over_one_step(tmp_path: Path) -> None:
    """Two seeds, one of them killed at step 9: the arm's losses are those of steps that both have."""
    from mpdist.compare import text

    made = [Made(f"{name}-seed{seed}", seed, steps=9 if (name, seed) == ("b", 1) else 12, eval_every=4) for name in "ab"
            for seed in (0, 1)]  # fmt: skip
    made[3].rows.pop()  # the evaluation that a run's own last step has
    made[3].status = {"state": "running"}
    from mpdist.compare.analyse import analyse

    found = analyse([one.run() for one in made], None)
    b = found.arm("b").figures
    at = [row["eval/loss"] for one in made[2:] for row in one.rows if (row["kind"], row["step"]) == ("eval", 8)]
    assert (b.eval_step, b.eval_loss) == (8, pytest.approx(sum(at) / 2))
    trained = [row["train/loss"] for one in made[2:] for row in one.rows if (row["kind"], row["step"]) == ("train", 9)]
    assert b.train_loss == pytest.approx(sum(trained) / 2)
    assert ["  at step", "12", "8"] in text.arms(found).rows


# -- sessions, ledgers, time tables ------------------------------------------------------------------------------------


def test_a_session_that_never_came_to_its_device_is_no_difference(tmp_path: Path) -> None:
    paths = [Made("fp32-seed0", steps=12, eval_every=4).write(tmp_path), Made("bf16-seed0", steps=12, eval_every=4, settings=BF16)
             .write(tmp_path)]  # fmt: skip
    sessions = paths[1] / "sessions"
    env = json.loads((sessions / "0001" / "env.json").read_text())
    (sessions / "0001").rename(sessions / "0002")
    (sessions / "0001").mkdir()
    early = {
        "session": 1,
        "host": "node1",
        "devices": [],
        "versions": {"mpdist": "0.1.0"},
        "variables": ["NCCL_DEBUG"],
        "ranks": 1,
    }
    (sessions / "0001" / "env.json").write_text(json.dumps(early))
    found = compare(list(map(str, paths)))
    assert found.refused == ()
    assert not {"sessions", "variables"} & set(told(found))
    assert found.environment["devices"] == ["cpu"]
    (sessions / "0001" / "env.json").write_text(json.dumps({**env, "devices": ["cuda:0"]}))  # one that did is one
    assert [one.key for one in compare(list(map(str, paths))).refused] == ["devices"]


def test_a_missing_ledger_is_noted_and_a_broken_one_refused(tmp_path: Path) -> None:
    paths = [run(tmp_path, "fp32-seed0"), run(tmp_path, "other-seed0")]
    (paths[1] / "ledger.json").unlink()
    found = compare(list(map(str, paths)))
    assert found.refused == ()
    assert [note.text for note in found.notes if note.kind == "ledger"] == [
        "other-seed0 has no ledger of what its ranks held: its dtypes are not compared"
    ]
    (paths[1] / "ledger.json").write_text('{"rows": ')
    assert f"{paths[1] / 'ledger.json'} cannot be read" in refused(paths[1])


def test_seconds_of_some_runs_alone_are_no_arms_means(tmp_path: Path) -> None:
    from mpdist.compare import text

    paths = [run(tmp_path, f"{name}-seed0") for name in ("fp32", "other")]
    (paths[1] / "status.json").unlink()
    found = compare(list(map(str, paths)))
    rows = {row[0]: row[1:] for row in text.arms(found).rows}
    assert rows["  not in train: eval"] == ["1.5", "-"]
    assert "state" in told(found)


# -- fields -------------------------------------------------------------------------------------------------------------

FIELDS: dict[str, tuple[str, Any, str]] = {  # file, value; the name that is told
    "time.eval": ("status.json", {"time": {"eval": None}}, "time.eval = null"),
    "time nan": ("status.json", {"time": {"eval": float("nan")}}, "time.eval = NaN"),
    "status step": ("status.json", {"step": "12"}, 'step = "12"'),
    "first": ("status.json", {"first": {}}, "has no first.loss"),
    "plan batch": ("plan.json", {"batch": 3}, "batch = 3"),
    "plan rows": ("plan.json", {"rows": {"a": 1}}, "rows = "),
    "plan row": ("plan.json", {"rows": [7]}, "rows.0 = 7"),
    "horizon": ("plan.json", {"horizon": "long"}, 'horizon = "long"'),
    "ledger rows": ("ledger.json", {"rows": "all"}, 'rows = "all"'),
    "ledger bytes": ("ledger.json", {"rows": [{"row": "moments", "rank": 0, "measured_bytes": -1}]}, "rows.0.measured_bytes = -1"),
    "versions": ("sessions/0001/env.json", {"versions": ["torch"]}, "versions = "),
    "version": ("sessions/0001/env.json", {"versions": {"torch": 2}}, "versions.torch = 2"),
    "variables": ("sessions/0001/env.json", {"variables": {"A": 1}}, "variables = "),
    "layers": ("sessions/0001/env.json", {"layers": "all"}, 'layers = "all"'),
    "label tokens": ("metrics.jsonl", {"train/label_tokens": "many"}, 'train/label_tokens = "many"'),
    "seconds": ("metrics.jsonl", {"time/train_s": None}, "time/train_s = null"),
    "rate": ("metrics.jsonl", {"train/lr": [1]}, "train/lr = [1]"),
    "step": ("metrics.jsonl", {"step": "one"}, 'step = "one"'),
    "huge step": ("metrics.jsonl", {"step": 10**400}, "step = 1000"),
    "session": ("metrics.jsonl", {"session": ...}, "has no session"),
    "loss": ("metrics.jsonl", {"train/loss": ...}, "has no train/loss"),
    "kind": ("metrics.jsonl", {"kind": "rest"}, "kind = 'rest'"),
    "by layer": ("metrics.jsonl", {"precision/by_layer": None}, "precision/by_layer = null"),
    "event": ("events.jsonl", {"attempt": None}, "attempt = null"),
    "changes": ("events.jsonl", {"changes": 1}, "changes = 1"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "change", "expected"), FIELDS.values(), ids=FIELDS)
def test_a_field_of_another_type_is_named_with_its_file(
    tmp_path: Path, name: str, change: dict[str, Any], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [run(tmp_path, f"{one}-seed0") for one in ("fp32", "other")]
    file = paths[1] / name
    text, _, rest = file.read_text().partition("\n") if name.endswith("l") else (file.read_text(), "", "")
    value = {**json.loads(text), **change}
    line = json.dumps({key: one for key, one in value.items() if one is not ...})
    file.write_text(f"{line}\n{rest}" if name.endswith("l") else line)
    assert cli.main(["compare", *map(str, paths)]) == 2
    said = capsys.readouterr().err
    assert str(file) + (":1" if name.endswith("l") else "") in said
    assert expected in said


BROKEN: dict[str, Callable[[Path], Any]] = {
    "a directory": lambda path: path.mkdir(),
    "a loop": lambda path: path.symlink_to(path),
    "no JSON": lambda path: path.write_text("{"),
    "a list": lambda path: path.write_text("[]"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "deep object": lambda path: path.write_text('{"a":' * 100_000),
}


@pytest.mark.parametrize("breaking", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("name", ["status.json", "plan.json", "ledger.json", "sessions/0001/env.json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, breaking: Callable[[Path], Any]) -> None:
    path = run(tmp_path)
    file = path / name
    file.unlink()
    breaking(file)
    assert f"{file} cannot be read" in refused(path)
    if name in ("plan.json", "ledger.json"):
        with pytest.raises(UsageError, match=r"cannot be read|is no run directory"):
            plan_command.show(str(path), False)


def test_histories_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        path = run(tmp_path / name)
        (path / name).unlink()
        (path / name).mkdir()
        assert f"{path / name} cannot be read" in refused(path)
        (path / name).rmdir()
        (path / name).write_text("[" * 100_000 + "\n")
        assert f"{path / name}:1: not a JSON object" in refused(path)


@pytest.mark.parametrize("name", ["", "status.json", "plan.json", "ledger.json", "metrics.jsonl", "sessions"])
@pytest.mark.parametrize("command", ["compare", "plan", "doctor"])
def test_what_the_system_does_not_let_one_read_is_no_traceback(
    tmp_path: Path, command: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As another user would find it; the superuser, under whom tests may run, may read everything."""
    path = run(tmp_path, row={"precision/by_layer": {"weight_norm": [1.0]}})
    shut = os.path.join(path, name).rstrip("/")
    real = {one: getattr(os, one) for one in ("open", "stat", "scandir", "listdir")}

    def within(file: Any) -> bool:
        inside = os.fspath(file) if isinstance(file, str | os.PathLike) else ""
        return inside.startswith(shut + "/") or (inside == shut and name not in ("",))

    def shutting(one: str) -> Callable[..., Any]:
        def call(file: Any = ".", *args: Any, **more: Any) -> Any:
            if within(file) and (one != "stat" or os.fspath(file) != shut):
                raise PermissionError(13, "Permission denied", os.fspath(file))
            return real[one](file, *args, **more)

        return call

    for one in real:
        monkeypatch.setattr(os, one, shutting(one))
    import io

    opened = io.open
    monkeypatch.setattr(
        io, "open", lambda file, *a, **m: opened(file, *a, **m, opener=lambda f, flags: os.open(f, flags))
    )
    words = {
        "compare": ["compare", str(path)],
        "plan": ["plan", str(path)],
        "doctor": ["doctor", str(path), "--html", str(tmp_path / "x")],
    }
    status = cli.main(words[command])
    said = capsys.readouterr().err
    reads = {"plan": ("", "plan.json"), "doctor": ("", "metrics.jsonl", "sessions")}.get(command)
    if reads is None or name in reads:
        assert status == 2, said
        assert "Permission denied" in said


# -- pages, sweeps -------------------------------------------------------------------------------------------------------


def test_a_precision_page_of_norms_that_are_not_finite(tmp_path: Path) -> None:
    path = run(tmp_path, row={"precision/weight_norm": "nan", "precision/by_layer": {"weight_norm": ["nan", None]}},
               env={"layers": ["a", "b"]})  # fmt: skip
    assert "nan" in precision_html.page(precision_html.read(path))
    metrics = path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('{"weight_norm": ["nan", null]}', "null"))
    with pytest.raises(UsageError, match=r"metrics.jsonl:1: precision/by_layer = null"):
        precision_html.read(path)


def _sweep(folder: Path) -> Path:
    for name in ("fp32", "bf16"):
        run(folder, f"{name}-seed0")
    own = tuple(sweep_file.Arm(name, {}) for name in ("fp32", "bf16"))
    order = tuple(sweep_file.alternated(("fp32", "bf16"), (0, 1)))
    sweep_file.write(folder, sweep_file.Sweep("s", (), own, (0, 1), order, "c.yaml", "d"))
    return folder / sweep_file.NAME


@pytest.mark.parametrize(("change", "said"), [
    ({"treatment": [7]}, "treatment.0 = 7"), ({"seeds": ["a"]}, 'seeds.0 = "a"'), ({"arms": [{"name": 1}]}, "arms.0.name = 1"),
    ({"arms": 3}, "arms = 3"), ({"format": 9}, "its format is 9"), ({"order": [["fp32"]]}, "cannot be read"),
    ({"order": [["fp8", 0]]}, "cannot be read"),
])  # fmt: skip
def test_a_damaged_sweep_file_is_named_with_a_way_on(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    file = _sweep(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UsageError) as caught:
        compare([str(tmp_path)])
    assert said in str(caught.value)
    assert str(file) in str(caught.value)
    assert "remove it" in caught.value.do
    file.unlink()  # which is what it advises
    assert [arm.name for arm in compare([str(tmp_path)]).arms] == ["bf16", "fp32"]


def test_a_run_that_has_begun_and_made_no_step_is_not_there_yet(tmp_path: Path) -> None:
    _sweep(tmp_path)
    for name, text in (("bf16-seed1", ""), ("fp32-seed1", '{"kind": "tr')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("name: x\n")
        (tmp_path / name / "metrics.jsonl").write_text(text)
    found = compare([str(tmp_path)])
    assert found.seeds == (0,)
    assert [note.text for note in found.notes if note.kind == "missing"] == [
        "2 of the sweep's 4 runs are not here, or have not made a step: bf16-seed1, fp32-seed1"
    ]


def test_what_a_schema_says_of_names() -> None:
    schema = {"a": run_files.MAPPING, "a.b!": run_files.COUNT, "a.c.[]": run_files.TEXT}
    run_files.check({}, schema, "f")  # what is not there lacks nothing
    run_files.check({"a": {"b": 1, "c": ["x"]}}, schema, "f")
    for value, said in (
        ({"a": {}}, r"f has no a\.b"),
        ({"a": {"b": True}}, r"f: a\.b = true"),
        ({"a": {"b": 1, "c": ["x", 2]}}, r"f: a\.c\.1 = 2"),
    ):
        with pytest.raises(UsageError, match=said):
            run_files.check(value, schema, "f")
