"""A run that cannot get past a step, started again and again, as a loop or a requeue does."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from real_runs import jobs_in, left, state

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
            assert (state(job.run)["state"], state(job.run)["step"]) == ("diverged", 2), (job.out, job.err)
        ends = [(end["state"], end["exit"], end["step"]) for end in left(job).events("end")]
        assert ends == [("diverged", 5, 2)] * 2
        before = contents(job.run)
        refused = jobs.launch(config)
        assert refused.end() == 2
        assert f"{job.run} has failed 2 times in a row at step 2, the last time (rank 0): 2 attempts" in refused.err
        assert "launch.retries=3 tries once more" in refused.err
        assert "Traceback" not in refused.err
        ranks = tiny.train(tmp_path, 2, **changes)
        assert [status for status, _ in ranks.ends] == [2, 2], "whatever starts the ranks"
        assert "2 times in a row at step 2" in ranks.message
        assert contents(job.run) == before
    assert tiny.train(tmp_path, 2, "launch.retries=3", **changes).status == 5, "it is tried once more"
