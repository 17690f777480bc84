"""Runs that end as they should, by each way to start them on a real Slurm: `mpdist submit`, sbatch, srun, salloc."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import submitted
from cluster import Cluster
from slurm_scenes import Seen, wanted_port

from mpdist import slurm
from mpdist.lines import read_json

pytestmark = pytest.mark.slow

Figure = Callable[[str], None]


def in_words(seen: Seen) -> str:
    """What a job did and left: its end, where it ran, its metrics, squeue."""
    steps = seen.result.column("step")
    return (
        f"job {seen.job} {seen.known[-1]['JobState']} {seen.known[-1]['ExitCode']}, {seen.env['nodes']} nodes "
        f"({seen.env['slurm']['nodes']}), {seen.env['ranks']} ranks; metrics: {len(steps)} rows, steps {steps[0]} to {steps[-1]},"
        f" status {seen.result.state()['state']}; squeue: {len(seen.queued)} lines of the job, {len(seen.queue)} in all"
    )


def port(seen: Seen) -> int:
    """At which the job's ranks met."""
    words = seen.env["torchrun"]
    return int(words[words.index("--master-port") + 1])


def test_a_submitted_run_trains_on_two_nodes_and_ends(cluster: Cluster, undisturbed: Seen, figure: Figure) -> None:
    assert (undisturbed.ends, undisturbed.left) == ([("COMPLETED", "0:0", submitted.STEPS)], [])
    assert undisturbed.result.state()["state"] == "done"
    assert undisturbed.result.column("step") == list(range(1, submitted.STEPS + 1))
    assert undisturbed.queued == []
    env = undisturbed.env
    assert (env["ranks"], env["nodes"]) == (2, 2)
    job = env["slurm"]
    assert (job["job"], job["restart"], job["partition"]) == (undisturbed.job, 0, "debug")
    assert slurm.hosts(job["nodes"]) == cluster.nodes
    hosts = {(read_json(path) or {})["host"] for path in (undisturbed.run / "sessions/0001/ranks").glob("0000?.json")}
    assert hosts == {f"{node}-host" for node in cluster.nodes}
    figure(f"{in_words(undisturbed)}; hosts of the ranks: {', '.join(sorted(hosts))}")


def test_c88_a_job_whose_port_is_taken_takes_the_next(cluster: Cluster, undisturbed: Seen, figure: Figure) -> None:
    wanted = wanted_port(undisturbed.job, cluster.nodes[0])
    assert port(undisturbed) == wanted + 1
    figure(f"port {wanted} of the job's first node was listened to by another; its ranks met at {port(undisturbed)}")


def test_c88_jobs_share_their_nodes(
    cluster: Cluster, raises: Seen, leaves: Seen, killed: Seen, hangs: Seen, figure: Figure
) -> None:
    """Two of these at least were on the same two nodes at once; that each ended by its own fault is theirs to test."""
    together = []
    for pair in combinations((raises, leaves, killed, hangs), 2):
        for seen in pair:
            assert slurm.hosts(seen.env["slurm"]["nodes"]) == cluster.nodes
        seconds = min(s.result.events("end")[-1]["time"] for s in pair) - max(s.env["began"] for s in pair)
        if seconds > 0:
            together.append((seconds, pair))
            assert port(pair[0]) != port(pair[1])
    assert together
    seconds, (one, other) = max(together, key=lambda found: found[0])
    figure(
        f"pairs of jobs on the same two nodes at once: {len(together)}; longest, {seconds:.0f} s: job {one.job} at port "
        f"{port(one)}, job {other.job} at port {port(other)}"
    )


def test_what_was_submitted_is_kept_and_says_how_to_watch_stop_and_resume(cluster: Cluster, undisturbed: Seen) -> None:
    run, job = undisturbed.run, undisturbed.job
    kept = read_json(run / "slurm" / "0001" / "submission.json") or {}
    assert kept["job"] == job
    assert kept["arguments"][0] == "sbatch"
    asked = {"--nodes=2", "--cpus-per-task=1", "--time=00:30:00", "--requeue", "--signal=USR1@300", "--hold"}
    assert asked <= set(kept["arguments"])
    assert "OMP_NUM_THREADS" in kept["variables"]
    assert "=" not in "".join(kept["variables"])
    assert (run / "slurm" / "0001" / "train.sbatch").read_text() == submitted.SCRIPT.read_text()
    assert f"done at step {submitted.STEPS}" in (run / "slurm" / f"{job}.log").read_text()
    assert f"step {submitted.STEPS}/{submitted.STEPS}" in undisturbed.output
    for told in (
        f"submitted job {job}: 2 nodes x 1 ranks",
        f"squeue --job={job}",
        "runs/run/STOP",
        f"scancel {job}",
        "mpdist submit",
    ):
        assert told in undisturbed.said
    words = ("mpdist", "submit", str(undisturbed.folder / "config.yaml"), "--nodes", "2")
    assert "is finished: nothing to do" in cluster.call(*words, cwd=undisturbed.folder)


def test_srun_starts_each_rank_directly_and_the_run_is_the_same(undisturbed: Seen, started_by_srun: Seen) -> None:
    assert submitted.differences(started_by_srun.folder, undisturbed.folder) == []
    assert not (started_by_srun.run / "slurm").exists()


def test_interactive_inside_an_allocation(interactive: Seen) -> None:
    assert interactive.result.column("step") == [1, 2, 3]
    assert interactive.result.state()["state"] == "done"


def test_the_doctor_looks_at_the_jobs_nodes(examined: Seen) -> None:
    assert examined.ends[0][0] == "COMPLETED", examined.output
    printed = (examined.folder / f"doctor-{examined.job}.log").read_text()
    assert "0 failed" in printed
    assert "bandwidth between nodes" in printed
    assert not examined.run.exists()


def test_the_first_job_of_the_readme(of_the_readme: Seen, figure: Figure) -> None:
    found = of_the_readme.result
    assert of_the_readme.ends == [("COMPLETED", "0:0", 5)]
    assert (of_the_readme.left, of_the_readme.queued) == ([], [])
    assert (of_the_readme.env["nodes"], of_the_readme.env["ranks"]) == (2, 4)
    assert (found.state()["state"], found.column("step")) == ("done", [1, 2, 3, 4, 5])
    loss = found.rows("eval")[-1]["eval/loss"]
    assert loss < 5.56  # a uniform guess
    figure(f"{in_words(of_the_readme)}; held-out loss {loss:.3f}")
