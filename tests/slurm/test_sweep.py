"""`mpdist sweep` as one job."""

from __future__ import annotations

import pytest
from cluster import Cluster
from slurm_scenes import Seen

from mpdist.lines import read_json
from mpdist.requeue import read

pytestmark = pytest.mark.slow


def test_a_sweep_that_is_warned_is_queued_again_and_ends_with_its_report(cluster: Cluster, swept: Seen) -> None:
    folder = swept.run.parent
    assert swept.ends[-1][:2] == ("COMPLETED", "0:0"), swept.output
    assert cluster.restarts(swept.job) == 1
    (requeue,) = read(folder)
    assert requeue["job"] == swept.job
    assert "queued again, 1 of 20 times" in swept.output
    states = {name: (read_json(folder / name / "status.json") or {}) for name in ("fp32-seed0", "bf16-seed0")}
    assert [(status["state"], status["step"]) for status in states.values()] == [("done", 20)] * 2
    assert [status["session"] for status in states.values()] == [2, 1]
    assert swept.left == []
    report = swept.output.partition(f"to compare them: mpdist compare {folder}")[2]
    assert "bf16" in report, swept.output
