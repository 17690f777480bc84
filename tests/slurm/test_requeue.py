"""Stopped by Slurm or by a person, queued again by itself, and in the end the same run bit for bit."""

from __future__ import annotations

import pytest
import submitted
from cluster import Cluster
from slurm_scenes import Seen

from mpdist.lines import read_json

pytestmark = pytest.mark.slow


def test_preempted_or_at_its_time_limit_it_saves_and_is_queued_again(requeued: Seen) -> None:
    assert requeued.requeues == ["preempted by another job", "its time limit"]
    assert requeued.stops[0].endswith("(preempted by another job)")
    assert requeued.stops[1].startswith("stopped by SIGUSR1")
    assert requeued.stops[1].endswith("(its time limit)")
    assert requeued.stops[2].startswith("stopped by SIGUSR1")
    for status in requeued.status[:2]:
        assert (status["state"], status["exit"]) == ("preempted", 75)


def test_two_requeues_allowed_are_two(cluster: Cluster, requeued: Seen) -> None:
    assert requeued.ends[2][:2] == ("FAILED", "75:0")
    assert "not queued again: the run has used up its requeues" in requeued.said
    assert "slurm.requeues = 2" in requeued.said
    assert requeued.said.count("session ") >= 3, "what one job has printed stands in one file, in order"
    first, last = cluster.job(requeued.job)["JobId"], requeued.job
    assert (requeued.ends[3][0], first) == ("COMPLETED", last)


def test_warned_preempted_or_limited_it_ends_the_same(undisturbed: Seen, requeued: Seen) -> None:
    assert [event["reason"] for event in requeued.result.events("start")] == ["new", *["resume"] * 3]
    steps = [end[2] for end in requeued.ends]
    assert 0 < steps[0] < steps[1] < steps[2] < steps[3] == submitted.STEPS
    assert submitted.differences(requeued.folder, undisturbed.folder) == []


def test_the_gaps_between_its_starts_are_not_counted(requeued: Seen) -> None:
    """The last row's time is that of the sessions, not that between them."""
    found = requeued.result
    ends = {event["session"]: event["time"] for event in found.events("end")}
    begins = {s: (read_json(requeued.run / "sessions" / f"{s:04d}" / "env.json") or {})["began"] for s in ends}
    inside = sum(ends[s] - begins[s] for s in ends)
    between = max(ends.values()) - min(begins.values()) - inside
    total = found.rows()[-1]["time/total_s"]
    assert inside / 2 < total <= inside + 1, (total, inside, between)
    assert between > 2 * (len(ends) - 1)


def test_stopped_by_a_file_or_cancelled_it_saves_and_stays_away(stopped: Seen) -> None:
    by_file, cancelled = stopped.ends[:2]
    assert by_file[:2] == ("FAILED", "75:0")
    assert "as asked (stopped by the file STOP): not queued again" in stopped.said
    assert cancelled[0] == "CANCELLED"
    assert stopped.status[1]["state"] == "preempted"
    assert stopped.status[1]["reason"].endswith("(cancelled)")


def test_queued_again_by_hand_it_goes_on_counts_no_requeue_and_ends_the_same(
    cluster: Cluster, undisturbed: Seen, stopped: Seen
) -> None:
    assert (cluster.restarts(stopped.job), stopped.requeues) == (1, [])
    assert (stopped.ends[-1][0], stopped.left) == ("COMPLETED", [])
    assert submitted.differences(stopped.folder, undisturbed.folder) == []
