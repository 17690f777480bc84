"""The sweep with runs that take no time: their order, what is repeated and what is not, failures, equal time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from swept import CONFIG, here, refusal  # noqa: F401 (a fixture)

from mpdist import cli, lock, sweep, sweep_file, sweep_speed
from mpdist.config import Resolved
from mpdist.errors import MachineError, UsageError
from mpdist.lines import read_json
from mpdist.record import RunDir
from mpdist.sweep import Asked


class Fake:
    """In place of `launch.run`: it writes what a run leaves. plan: run name -> state to end in, or an error to raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[str] = []
        self.prepared: list[list[str]] = []
        self.resolved: dict[str, Resolved] = {}
        self.plan: dict[str, Any] = {}
        self.loss: dict[str, float] = {}
        self.step_s: dict[str, float] = {}
        self.patient = ""  # the run that goes on until it is asked to stop
        monkeypatch.setattr("mpdist.sweep.launch.run", self.run)
        monkeypatch.setattr("mpdist.sweep.helper", self.prepare)

    def prepare(self, command: list[str], heard: list[Any]) -> int:
        self.prepared.append(command)
        return int(self.plan.get("prepare", 0))

    def run(
        self, resolved: Resolved, *, ranks: int | None, heard: list[Any], look: Callable[[], None] | None = None
    ) -> int:
        name = resolved.config.name
        self.started.append(name)
        self.resolved[name] = resolved
        end = self.plan.get(name, "done")
        if isinstance(end, Exception):
            raise end
        run = RunDir(Path(resolved.config.out_dir) / name)
        run.freeze(resolved.to_yaml(), {})
        run.start_session({"data": {"train": "d", "eval": None}})
        run.status(state="running", first={"loss": self.loss.get(name, 5.0), "label_tokens": 100})
        deadline = time.monotonic() + 20
        while self.patient == name and look is not None and not heard:
            look()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if end == "TERM":
            os.kill(os.getpid(), signal.SIGTERM)
            end = "preempted"
        for step in range(1, 6):
            row: dict[str, Any] = {
                "kind": "train",
                "step": step,
                "attempt": step,
                "train/label_tokens": step,
                "time/train_s": 1.0,
            }
            if step > 2:
                row["speed/step_s"] = self.step_s.get(name.rpartition("-")[0], 0.1) * (1 + 0.01 * step)
            run.metrics(row)
        run.metrics(
            {"kind": "eval", "step": 5, "attempt": 5, "train/label_tokens": 5, "time/train_s": 1.0, "eval/loss": 4.25}
        )
        state, status = (
            ("preempted", 75)
            if heard
            else ("failed", end)
            if isinstance(end, int)
            else (end, {"done": 0, "diverged": 5}[end])
        )
        run.status(state=state, step=5, exit=status, time={"train": 1.0})
        run.close()
        return status


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch)


TWO = Asked("run.yaml", vary=("precision.compute=fp32,bf16",), seeds=2)
ORDER = ["fp32-seed5", "bf16-seed5", "bf16-seed6", "fp32-seed6"]
HOME = Path("runs/s")


def contents(path: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(path.rglob("*")) if p.is_file()}


def test_all_runs_in_order_and_nothing_the_second_time(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.run(TWO) == 0
    assert fake.started == ORDER
    out = capsys.readouterr().out
    assert "[2/4] bf16-seed5: precision.compute=bf16" in out
    assert out.splitlines()[-1] == f"to compare them: mpdist compare {HOME.absolute()}"
    assert "fp32-seed6  done   5      1.0      4.2500" in out
    before = contents(HOME)
    assert sweep.run(TWO) == 0
    assert fake.started == ORDER
    assert contents(HOME) == before
    assert len(fake.prepared) == 1, "data are prepared once"
    assert fake.prepared[0][2:5] == ["mpdist.cli", "prepare", "run.yaml"]


def test_runs_share_data_seed_and_group_and_differ_in_the_treatment_alone(fake: Fake) -> None:
    assert sweep.run(TWO) == 0
    cfgs = [fake.resolved[name].config for name in ORDER]
    assert {cfg.data.cache for cfg in cfgs} == {"runs/.data"}
    assert {cfg.track.wandb.group for cfg in cfgs} == {"s"}
    assert {cfg.out_dir for cfg in cfgs} == {str(HOME.absolute())}
    assert [(cfg.seed, cfg.precision.compute) for cfg in cfgs] == [(5, "fp32"), (5, "bf16"), (6, "bf16"), (6, "fp32")]


def test_untracked_runs_have_no_group(fake: Fake) -> None:
    assert sweep.run(Asked("run.yaml", ("track.wandb.mode=disabled",), control=True)) == 0
    assert fake.resolved["base-seed5"].config.track.wandb.group is None


def test_a_comparison_that_refuses_has_the_last_line_and_the_status(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    compared: list[Path] = []

    def compare(folder: Path) -> None:
        assert not (folder / lock.NAME).exists(), "others may look into it by now"
        compared.append(folder)
        raise UsageError("the runs differ in data.train", "", "give them the same")

    fake.plan["bf16-seed6"] = "TERM"
    assert sweep.run(TWO, compare=compare) == 75
    assert compared == [], "half a sweep is not compared"
    fake.plan.clear()
    assert sweep.run(TWO, compare=compare) == 2
    assert compared == [HOME.absolute()]
    *said, last = capsys.readouterr().err.splitlines()
    assert said == ["the runs differ in data.train", "  do:  give them the same"]
    assert last == (
        f"the sweep's runs have ended, and their comparison was refused; to ask again: mpdist compare {HOME.absolute()}"
    )
    assert {sweep.state(HOME / name) for name in ORDER} == {"done"}


def test_an_arm_that_diverges_is_recorded_and_not_repeated(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.plan["bf16-seed5"] = "diverged"
    assert sweep.run(TWO) == 0
    assert fake.started == ORDER
    out = capsys.readouterr().out
    assert "[2/4] bf16-seed5: it diverged" in out
    assert "bf16-seed5  diverged  5" in out
    fake.plan.clear()
    assert sweep.run(TWO) == 0
    assert fake.started == ORDER


@pytest.mark.parametrize("status", [1, 2, 3, 4, 6])
def test_any_other_failure_stops_the_sweep_with_its_status(
    fake: Fake, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.plan["bf16-seed6"] = status
    assert sweep.run(TWO) == status
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"the sweep stops at bf16-seed6, which ended with status {status}; 2 of 4 runs are left")
    before = contents(HOME / "bf16-seed5")
    fake.plan.clear()
    assert sweep.run(TWO) == 0
    assert fake.started == [*ORDER[:3], *ORDER[2:]]
    assert contents(HOME / "bf16-seed5") == before


def test_an_error_of_a_launch_says_at_which_run(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.plan["bf16-seed5"] = MachineError("the port is taken")
    with pytest.raises(MachineError, match="port"):
        sweep.run(TWO)
    assert "the sweep stops at bf16-seed5" in capsys.readouterr().out
    assert not (HOME / lock.NAME).exists(), "the folder is free again"


def test_a_stop_signal_stops_the_arm_and_the_sweep(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.plan["bf16-seed5"] = "TERM"
    assert sweep.run(TWO) == 75
    assert fake.started == ORDER[:2]
    assert "the same command goes on" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    fake.plan.clear()
    assert sweep.run(TWO) == 0
    assert fake.started == [*ORDER[:2], *ORDER[1:]]


def test_data_that_cannot_be_prepared_stop_it_before_the_first_run(fake: Fake) -> None:
    fake.plan["prepare"] = 2
    assert sweep.run(TWO) == 2
    assert fake.started == []


def test_another_sweep_in_the_same_folder_is_refused_with_the_differences(fake: Fake) -> None:
    assert sweep.run(TWO) == 0
    before = contents(HOME)
    other = Asked(
        "run.yaml", ("optim.lr=1.0", "launch.timeout=5m"), ("precision.compute=fp32,fp16",), seeds=1, control=True
    )
    said = refusal(other)
    assert f"{HOME.absolute()} holds another sweep; it differs in (there -> now):" in said
    for line in (
        "optim.lr: 2.0e-05 -> 1.0",
        "arm bf16: there -> absent",
        "arm fp16: absent -> there",
        "--seeds: 2 -> 1",
    ):
        assert f"\n    {line}\n" in said
    assert "arm fp32-control: absent -> there" in said
    assert "launch.timeout" not in said, "that changes no number"
    assert "budget.steps: 10 -> 20" in refusal(
        Asked("run.yaml", ("budget.steps=20", "optim.horizon=10"), TWO.vary, seeds=2)
    )
    assert "order of the arms: fp32, bf16 -> bf16, fp32" in refusal(
        Asked("run.yaml", vary=("precision.compute=bf16,fp32",), seeds=2)
    )
    assert "--ranks: null -> 2" in refusal(Asked("run.yaml", vary=TWO.vary, seeds=2, ranks=2))
    assert contents(HOME) == before


def test_more_seeds_go_on_in_the_same_folder(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.run(TWO) == 0
    before = {name: contents(HOME / name) for name in ORDER}
    more = Asked("run.yaml", vary=TWO.vary, seeds=4)
    known = (HOME / sweep_file.NAME).read_bytes()
    assert sweep.run(more, dry_run=True) == 0
    assert (HOME / sweep_file.NAME).read_bytes() == known
    added = ["fp32-seed7", "bf16-seed7", "bf16-seed8", "fp32-seed8"]
    fake.plan["bf16-seed8"] = "TERM"
    assert sweep.run(more) == 75
    fake.plan.clear()
    assert sweep.run(more) == 0
    assert fake.started == [*ORDER, *added[:3], *added[2:]]
    assert {name: contents(HOME / name) for name in ORDER} == before
    found = sweep_file.read(HOME)
    assert found is not None
    assert (found.seeds, [run.path for run in found.runs]) == ((5, 6, 7, 8), [*ORDER, *added])
    assert "--seeds: 4 -> 2" in refusal(TWO)


def test_a_folder_that_cannot_be_one_is_the_machines_fault_as_for_a_launch(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("afile").write_text("")
    for where in ("afile", "afile/deeper"):
        assert cli.main(["sweep", "run.yaml", "--vary", TWO.vary[0], f"out_dir={where}"]) == 4
        said = capsys.readouterr().err
        assert "afile" in said
        assert "Not a directory" in said
        assert "do:  choose another out_dir" in said
    assert fake.started == []


def test_a_sweep_that_has_lost_its_file_is_told_a_way_on(fake: Fake) -> None:
    assert sweep.run(TWO) == 0
    (HOME / sweep_file.NAME).unlink()
    said = refusal(TWO)
    assert f"put its sweep.json back; `mpdist compare {HOME.absolute()}` reads them without it" in said
    (HOME / sweep_file.NAME).write_text("{")
    assert f"remove it: `mpdist compare {HOME.absolute()}` then tells arms by the runs' names" in refusal(TWO)


def test_a_folder_of_something_else_is_left_alone(fake: Fake) -> None:
    HOME.mkdir(parents=True)
    (HOME / "config.yaml").write_text("a run's")
    assert "exists and is no sweep's: it holds config.yaml" in refusal(TWO)
    assert fake.started == []


def test_a_live_sweep_is_not_joined(fake: Fake) -> None:
    held = lock.Lock.take(HOME)
    os.environ.pop(lock.TOKEN)
    with pytest.raises(UsageError, match="in use by a live run"):
        sweep.run(TWO)
    held.release()


def test_an_arm_that_begins_elsewhere_stops_the_sweep_while_it_trains(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.loss["bf16-seed5"] = 5.2
    fake.patient = "bf16-seed5"
    assert cli.main(["sweep", "run.yaml", "--vary", TWO.vary[0], "--seeds", "2"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("bf16-seed5 begins with a loss of 5.2, fp32-seed5 with 5, before any update")
    assert "bf16-seed5 is another experiment" in said.out
    assert fake.started == ["fp32-seed5", "bf16-seed5"]
    assert sweep.state(HOME / "bf16-seed5") == "preempted", "it stopped as for a signal, with everything saved"
    told = (read_json(HOME / "bf16-seed5" / "status.json") or {})["reason"]
    assert told == "stopped by mpdist sweep: " + said.err.partition("\n")[0]


def test_a_short_run_that_begins_elsewhere_is_found_at_its_end(fake: Fake) -> None:
    fake.loss["fp32-seed6"] = 5.001
    fake.loss["bf16-seed6"] = 5.2
    with pytest.raises(UsageError, match=r"fp32-seed6 begins with a loss of 5\.001, bf16-seed6 with 5\.2"):
        sweep.run(TWO)


# -- equal time ---------------------------------------------------------------------------------------------------------


def test_each_arm_gets_the_steps_that_its_speed_fits_into_the_time(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.step_s = {"fp32": 0.2, "bf16": 0.1}
    asked = Asked("run.yaml", ("optim.warmup=5",), TWO.vary, seeds=2, control=True, equal_time=60.0)
    assert sweep.run(asked) == 0
    probes = ["fp32-1", "bf16-1", "bf16-2", "fp32-2"]
    assert fake.started[:4] == probes
    assert len(fake.started) == 10
    probe = fake.resolved["fp32-1"].config
    assert (probe.budget.steps, probe.optim.schedule, probe.track.wandb.mode) == (
        sweep_speed.WINDOWS,
        "constant",
        "disabled",
    )
    known = sweep_file.read(HOME)
    assert known is not None
    assert known.equal_time is not None
    fp32, bf16 = known.equal_time.speeds
    assert fp32.step_s == pytest.approx(0.2 * 1.04, rel=1e-12), "the median of windows of 1.03, 1.04 and 1.05, twice"
    assert fp32.spread_s == pytest.approx((0.2 * 1.0325, 0.2 * 1.0475), rel=1e-12)
    assert (fp32.windows, fp32.steps, bf16.steps) == (6, round(60 / 0.208), round(60 / 0.104))
    for name, steps in (("fp32-seed5", fp32.steps), ("bf16-seed6", bf16.steps), ("fp32-control-seed6", fp32.steps)):
        cfg = fake.resolved[name].config
        assert (cfg.budget.steps, cfg.optim.horizon, cfg.optim.schedule) == (steps, "auto", "cosine")
    out = capsys.readouterr().out
    assert "bf16: 104 ms a step (quartiles 103.3 to 104.8, 6 windows), so 577 steps in 60 s" in out
    assert "a guess" not in out
    assert known.treatment == ("precision.compute",)
    assert "warning: fp32-seed5 trained for 1.0 s, -98% of the 60 s meant" in out
    assert sweep.run(asked) == 0
    assert len(fake.started) == 10, "speeds are measured once"
    assert "--equal-time: 60.0 -> 90.0" in refusal(
        Asked("run.yaml", ("optim.warmup=5",), TWO.vary, seeds=2, control=True, equal_time=90.0)
    )


def test_a_warm_up_longer_than_an_arms_own_horizon_is_refused_with_its_name(fake: Fake) -> None:
    fake.step_s = {"fp32": 10.0, "bf16": 0.1}
    asked = Asked("run.yaml", ("optim.warmup=8",), TWO.vary, equal_time=60.0)
    with pytest.raises(UsageError, match=r"1 of 2 arms cannot run:\n1. arm fp32: optim.warmup"):
        sweep.run(asked)
    assert fake.started == ["fp32-1", "bf16-1", "bf16-2", "fp32-2"]


def test_a_noisy_measurement_and_a_missed_time_are_said() -> None:
    said: list[str] = []
    speeds = [sweep_file.Speed("a", 1.0, (0.95, 1.16), 20, 60), sweep_file.Speed("b", 1.0, (0.95, 1.14), 20, 60)]
    sweep_speed.text(speeds, 60.0, said.append)
    assert [line[:10] for line in said] == ["a: 1000 ms", "warning: o", "b: 1000 ms"]
    assert "quartiles of a " in said[1]
    assert sweep_speed.missed("a-seed0", 65.9, 60.0) is None
    assert sweep_speed.missed("a-seed0", 66.6, 60.0) == "warning: a-seed0 trained for 66.6 s, +11% of the 60 s meant"


def test_an_arm_without_two_full_windows_cannot_be_measured(fake: Fake) -> None:
    fake.plan["fp32-1"] = fake.plan["fp32-2"] = "diverged"
    fake.step_s["fp32"] = 0.0
    with pytest.raises(UsageError, match="arm fp32 has made 0 measurable windows"):
        sweep.run(Asked("run.yaml", vary=TWO.vary, equal_time=60.0))
