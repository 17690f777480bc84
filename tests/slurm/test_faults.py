"""A rank of a job fails, or a node is lost: who is named, what is left, and how the job ends or goes on."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import submitted
from cluster import Cluster
from slurm_scenes import Seen

pytestmark = pytest.mark.slow


Figure = Callable[[str], None]
STEP, SIGNAL = "the last step before the fault", "the signal"


def assert_named(
    seen: Seen, cluster: Cluster, figure: Figure, code: int, cause: str, since: str, bound: float, at: int | None = None
) -> None:
    """The job has ended with the run's status, in time; its last lines say who, where, when and why; nothing is left.

    since: from what on the scene has taken the time.
    """
    ((state, exit_code, step),) = seen.ends
    assert (state, exit_code) == ("FAILED", f"{code}:0"), seen.output
    assert step == at or at is None
    reason, rank = seen.output.splitlines()[-2:]
    assert reason.startswith(f"mpdist: the run failed at step {step}: {cause}"), seen.output
    log = seen.run / "sessions/0001/logs/rank-00001.log"
    assert rank == f"  rank: 1 on {cluster.nodes[1]}-host, which has said more in {log}"
    assert log.exists()
    assert "Root Cause" not in seen.output, "torchrun's summary is in a file of its own"
    status = seen.status[-1]
    assert (status["state"], status["rank"], status["exit"]) == ("failed", 1, code)
    assert seen.left == []
    assert seen.queued == []
    assert (cluster.restarts(seen.job), seen.requeues) == (0, [])
    assert seen.seconds < bound
    figure(
        f"{seen.seconds:.1f} s from {since} to the job's end (bound {bound:.0f} s; the whole job {seen.known[-1]['RunTime']});"
        f" job {state} with exit status {exit_code}; processes left on any node: {len(seen.left)}"
    )
    figure(f"last lines: {reason} | {rank.strip().replace(str(seen.folder), 'FOLDER')}")


def test_c93_a_rank_that_raises_is_the_last_word_of_the_jobs_log(
    cluster: Cluster, raises: Seen, figure: Figure
) -> None:
    assert_named(raises, cluster, figure, 1, "RuntimeError: drill: raised at attempt 5 on rank 1", STEP, 60, at=4)


def test_c93_a_rank_that_is_killed_ends_the_job_on_all_nodes(cluster: Cluster, killed: Seen, figure: Figure) -> None:
    assert_named(killed, cluster, figure, 4, "rank 1 was killed by SIGKILL", SIGNAL, 60)


def test_c94_a_rank_that_leaves_with_success_fails_the_job(cluster: Cluster, leaves: Seen, figure: Figure) -> None:
    assert_named(leaves, cluster, figure, 1, "rank 1 left at step 4 with status 0", STEP, 60, at=4)


def test_c93_a_rank_that_stands_still_is_named_and_ended(cluster: Cluster, hangs: Seen, figure: Figure) -> None:
    bound = 40 + 60  # launch.timeout, and what the others may take
    assert_named(hangs, cluster, figure, 4, "rank 1 stopped answering at attempt ", SIGNAL, bound)


def test_a_run_that_diverges_ends_with_its_own_status_and_stays_away(cluster: Cluster, diverges: Seen) -> None:
    assert diverges.ends == [("FAILED", "5:0", 0)]
    assert diverges.status[-1]["state"] == "diverged"
    assert (cluster.restarts(diverges.job), diverges.left) == (0, [])
    reason, *_, rank = diverges.output.rpartition("\nmpdist: ")[2].splitlines()
    assert reason.startswith("the run has diverged at step 0: 3 attempts in a row were skipped")
    assert rank.startswith(f"  rank: 1 on {cluster.nodes[1]}-host"), "where the loss was not finite"


def test_arguments_reach_the_worker_as_they_were_typed(diverges: Seen, figure: Figure) -> None:
    """Through submit, sbatch, srun, `mpdist launch` and torchrun: the run's own folder is one of them."""
    from slurm_scenes import AWKWARD, AWKWARD_NAME

    from mpdist.config import load

    project = load(diverges.run / "config.yaml").config.track.wandb.project
    assert diverges.run.name == AWKWARD_NAME
    assert project == "".join(AWKWARD)
    figure(f"the run's folder, as typed: {diverges.run.name}")
    whole = sum(word in project for word in AWKWARD if word)
    figure(f"awkward words whole in the project's name that the run has, as typed: {whole} of {len(AWKWARD) - 1}")


def test_a_run_whose_node_dies_goes_on_by_itself_elsewhere_and_ends_the_same(
    lost: Seen, undisturbed: Seen, figure: Figure
) -> None:
    assert_gone_on(lost, undisturbed)
    figure(f"a node dies; runs again after {lost.seconds:.0f} s: {lost.story(undisturbed)}")


def test_a_run_whose_node_crashes_before_slurm_misses_it_is_queued_again_and_ends_the_same(
    crashed: Seen, undisturbed: Seen, figure: Figure
) -> None:
    assert re.fullmatch(r"lost n\d+, which no longer answers or started anew", *crashed.requeues)
    assert_gone_on(crashed, undisturbed, requeues=1)
    figure(f"a node crashes; runs again after {crashed.seconds:.0f} s: {crashed.story(undisturbed)}")


def test_a_run_whose_first_node_is_cut_off_does_and_the_ranks_there_end(
    cut: Seen, undisturbed: Seen, figure: Figure
) -> None:
    assert_gone_on(cut, undisturbed)
    assert cut.said == "", "the ranks on the node that was cut off have ended by themselves"
    figure(f"a link is cut; runs again after {cut.seconds:.0f} s: {cut.story(undisturbed)}")


def assert_gone_on(seen: Seen, undisturbed: Seen, requeues: int = 0) -> None:
    """requeues: how many of the run's budget it took; Slurm's own are none of it."""
    assert [end[0] for end in seen.ends] == ["RUNNING", "COMPLETED"], seen.output
    assert seen.seconds < 120, "SlurmdTimeout, and what a busy controller takes"
    assert seen.left == []
    assert len(seen.requeues) == requeues
    assert [event["reason"] for event in seen.result.events("start")] == ["new", "resume"]
    assert seen.loads == [10]
    assert submitted.differences(seen.folder, undisturbed.folder) == []
