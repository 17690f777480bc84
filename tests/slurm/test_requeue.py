"""Stopped by Slurm or by a person, queued again by itself, and in the end the same run bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import submitted
from cluster import Cluster
from slurm_scenes import Seen

from mpdist.lines import read_json

pytestmark = pytest.mark.slow

Figure = Callable[[str], None]


def test_preempted_or_at_its_time_limit_it_saves_and_is_queued_again(requeued: Seen, figure: Figure) -> None:
    assert requeued.requeues == ["preempted by another job", "its time limit"]
    assert requeued.stops[0].endswith("(preempted by another job)")
    assert requeued.stops[1].startswith("stopped by SIGUSR1")
    assert requeued.stops[1].endswith("(its time limit)")
    assert requeued.stops[2].startswith("stopped by SIGUSR1")
    restarts = [known["Restarts"] for known in requeued.known]
    for number, status in enumerate(requeued.status[:2]):
        assert (status["state"], status["exit"]) == ("preempted", 75)
        assert requeued.loads[number] == status["step"]
        figure(
            f"{requeued.requeues[number]}: stopped at step {status['step']}, status {status['exit']}; resumed from step "
            f"{requeued.loads[number]} by the same job {requeued.known[number]['JobId']}"
        )
    assert [known["JobId"] for known in requeued.known[:3]] == [requeued.known[0]["JobId"]] * 3
    assert restarts[2] == "2"


def test_two_requeues_allowed_are_two(requeued: Seen, figure: Figure) -> None:
    assert requeued.ends[2][:2] == ("FAILED", "75:0")
    assert "not queued again: the run has used up its requeues" in requeued.said
    assert "slurm.requeues = 2" in requeued.said
    assert requeued.said.count("session ") >= 3, "what one job has printed stands in one file, in order"
    used, fresh = requeued.known[2:]
    assert len(requeued.requeues) == 2
    assert used["Restarts"] == "2"
    assert fresh["JobId"] != used["JobId"]
    assert (fresh["JobState"], fresh["Restarts"]) == ("COMPLETED", "0")
    (line,) = [line for line in requeued.said.splitlines() if "not queued again" in line]
    figure(
        f"slurm.requeues = 2: {len(requeued.requeues)} requeues on record; at the third stop job {used['JobId']} ended "
        f"{used['JobState']} {used['ExitCode']} with {used['Restarts']} restarts: {line}"
    )
    figure(f"submitted once more, job {fresh['JobId']} went on and ended {fresh['JobState']}")


def test_warned_preempted_or_limited_it_ends_the_same(undisturbed: Seen, requeued: Seen, figure: Figure) -> None:
    assert [event["reason"] for event in requeued.result.events("start")] == ["new", *["resume"] * 3]
    steps = [end[2] for end in requeued.ends]
    assert 0 < steps[0] < steps[1] < steps[2] < steps[3] == submitted.STEPS
    assert requeued.loads == steps[:3]
    assert submitted.differences(requeued.folder, undisturbed.folder) == []
    figure(f"preempted, at its time limit, warned by hand: {requeued.story(undisturbed)}")


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
    cluster: Cluster, undisturbed: Seen, stopped: Seen, figure: Figure
) -> None:
    assert (cluster.restarts(stopped.job), stopped.requeues) == (1, [])
    assert (stopped.ends[-1][0], stopped.left) == ("COMPLETED", [])
    stops = [event["step"] for event in stopped.result.events("stop")]
    assert len(stops) == 3
    assert stopped.loads == stops
    assert submitted.differences(stopped.folder, undisturbed.folder) == []
    figure(f"stopped by the file STOP, by scancel, requeued by hand: {stopped.story(undisturbed)}")
