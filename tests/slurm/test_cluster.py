"""The test bed is what the other tests take it for: nodes that are hosts of their own, with jobs that can be seen."""

from __future__ import annotations

from collections.abc import Callable

from cluster import Cluster


def test_each_node_is_a_host_of_its_own_whose_name_is_not_the_nodes(
    cluster: Cluster, figure: Callable[[str], None]
) -> None:
    script = "echo $SLURMD_NODENAME $(hostname) $(readlink /proc/self/ns/net)"
    lines = cluster.call("srun", "--nodes=2", "--ntasks-per-node=1", "sh", "-c", script).split("\n")
    words = [line.split() for line in sorted(filter(None, lines))]
    assert [w[:2] for w in words] == [[node, f"{node}-host"] for node in cluster.nodes]
    assert words[0][2] != words[1][2]
    figure("; ".join(f"node {node} calls itself {host}" for node, host, _ in words))


def test_a_jobs_processes_are_seen_and_end_with_it(cluster: Cluster) -> None:
    job = cluster.sbatch("--nodes=2", "--wrap", "srun sleep 300", cwd=cluster.work)
    cluster.wait(job, "RUNNING")
    while len(cluster.processes(job)) < 3:  # the script and two sleeps
        assert cluster.state(job) == "RUNNING"
    assert cluster.processes(job, cluster.nodes[1])
    cluster.call("scancel", job)
    assert cluster.wait(job) == "CANCELLED"
    assert cluster.left_by(job) == []
