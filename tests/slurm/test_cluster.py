"""The test bed is what the other tests take it for: nodes that are hosts of their own, and that can be lost."""

from __future__ import annotations

from cluster import Cluster


def test_each_node_is_a_host_of_its_own_whose_name_is_not_the_nodes(cluster: Cluster) -> None:
    script = "echo $SLURMD_NODENAME $(hostname) $(readlink /proc/self/ns/net)"
    lines = cluster.call("srun", "--nodes=2", "--ntasks-per-node=1", "sh", "-c", script).split("\n")
    words = [line.split() for line in sorted(filter(None, lines))]
    assert [w[:2] for w in words] == [[node, f"{node}-host"] for node in cluster.nodes]
    assert words[0][2] != words[1][2]


def test_a_job_and_its_processes_are_seen_and_ended(cluster: Cluster) -> None:
    job = cluster.sbatch("--nodes=2", "--wrap", "srun sleep 300", cwd=cluster.work)
    cluster.wait(job, "RUNNING")
    while len(cluster.processes(job)) < 3:  # the script, srun (and its helper), two sleeps
        assert cluster.state(job) == "RUNNING"
    cluster.settle()
    assert (cluster.queue(), cluster.processes(), cluster.state(job)) == ([], [], "CANCELLED")
