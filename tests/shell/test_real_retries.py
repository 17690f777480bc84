"""A run started again and again, as a loop, a requeue or torchrun's --max-restarts does: on from a crash, and no further."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from real_runs import BOUND_S, jobs_in, left, state

pytestmark = pytest.mark.world


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def test_a_loop_around_a_run_that_diverges_at_one_step_ends_by_itself(tmp_path: Path) -> None:
    drill = {"nan_loss_at": {"attempts": [3, 4, 5, 6], "rank": 1}}
    changes = {"drill": drill, "precision__scale": {"patience": 2}, "checkpoint__every": 1}
    config = tiny.config(tmp_path, **changes)
    with jobs_in(tmp_path) as jobs:
        for start in (jobs.launch, jobs.torchrun):
            job = start(config)
            job.end()
            end = state(job.run)
            assert (end["state"], end["step"], end["rank"]) == ("diverged", 2, 1), (job.out, job.err)
        ends = [(end["state"], end["exit"], end["step"]) for end in left(job).events("end")]
        assert ends == [("diverged", 5, 2)] * 2
        before = contents(job.run)
        refused = jobs.launch(config)
        assert refused.end() == 2
        assert f"{job.run} has failed 2 times in a row at step 2, the last time (rank 1): 2 attempts" in refused.err
        assert "launch.retries=3 tries once more" in refused.err
        assert "Traceback" not in refused.err
        ranks = tiny.train(tmp_path, 2, **changes)
        assert [status for status, _ in ranks.ends] == [2, 2], "whatever starts the ranks"
        assert "2 times in a row at step 2" in ranks.message
        assert contents(job.run) == before
    assert tiny.train(tmp_path, 2, "launch.retries=3", **changes).status == 5, "it is tried once more"


def test_torchruns_restarts_mend_a_crash_and_are_not_spent_on_what_cannot_succeed(tmp_path: Path) -> None:
    """Its ranks meet anew in the store that the dead ones have used; a stop, a divergence and a refusal end it."""
    drill = {"stop_at": {"attempt": 2, "rank": 1}, "kill_at": {"attempt": 5, "rank": 1}}
    drill["nan_loss_at"] = {"attempts": [8, 9], "rank": 0}
    changes = {"budget__steps": 12, "precision__scale": {"patience": 2}, "checkpoint__every": 1}
    config = tiny.config(tmp_path, drill=drill, **changes)
    other = tmp_path / "undisturbed"
    other.mkdir()
    with jobs_in(tmp_path) as jobs:
        job = jobs.torchrun(config, restarts=3)
        job.end()
        assert (state(job.run)["state"], state(job.run)["step"]) == ("preempted", 2), job.err
        job = jobs.torchrun(config, restarts=3)
        job.end(2 * BOUND_S)  # two starts
        assert (state(job.run)["state"], state(job.run)["step"]) == ("diverged", 7), job.err
        ends = [(end["session"], end["state"], end["step"]) for end in left(job).events("end")]
        assert ends == [(1, "preempted", 2), (2, "failed", 4), (3, "diverged", 7)]
        refused = jobs.torchrun(config, "optim.lr=fast", restarts=3)
        assert refused.end() == 1
        assert refused.err.count("optim.lr = fast") == 1
        assert state(job.run)["session"] == 3
    whole = tiny.train(other, 2, drill={"nan_loss_at": drill["nan_loss_at"]}, **changes)
    assert whole.status == 5
    assert tiny.timeless(left(job).rows()) == tiny.timeless(whole.rows())
