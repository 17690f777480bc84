from __future__ import annotations

import pytest

from mpdist.errors import MachineError
from mpdist.world import from_env

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
}


def test_torchrun() -> None:
    world = from_env(TORCHRUN)
    assert world is not None
    assert (world.rank, world.ranks, world.local_rank, world.local_ranks, world.node, world.nodes) == (3, 4, 1, 2, 1, 2)
    assert (world.source, world.address, world.port) == ("torchrun", "n1", 29500)
    assert not world.is_first


def test_srun() -> None:
    world = from_env(SRUN)
    assert world is not None
    assert (world.rank, world.ranks, world.local_rank, world.local_ranks, world.node, world.nodes) == (3, 4, 1, 2, 1, 2)
    assert (world.source, world.address) == ("srun", None)


def test_srun_of_a_part_of_the_job_counts_the_steps_tasks_not_the_jobs() -> None:
    world = from_env(
        {**SRUN, "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "8"}
    )
    assert world is not None
    assert (world.ranks, world.nodes) == (4, 2)


def test_torchrun_inside_srun_is_torchruns() -> None:
    world = from_env({**SRUN, **TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"})
    assert world is not None
    assert (world.rank, world.source) == (0, "torchrun")


STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}


def test_one_torchrun_a_node_under_srun_agrees_with_it() -> None:
    world = from_env({**SRUN, **STEP, **TORCHRUN, "SLURM_PROCID": "1", "SLURM_LOCALID": "0"})
    assert world is not None
    assert (world.rank, world.ranks, world.source) == (3, 4, "torchrun")


def test_a_torchrun_for_itself_in_each_task_is_refused_with_both_counts() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    with pytest.raises(MachineError, match="GROUP_WORLD_SIZE = 1, and Slurm says SLURM_STEP_NUM_TASKS = 2"):
        from_env({**SRUN, **STEP, **TORCHRUN, **alone})


def test_torchruns_of_two_steps_of_one_node_each_are_one_world() -> None:
    world = from_env({**SRUN, **TORCHRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    assert world is not None
    assert (world.rank, world.nodes) == (3, 2)


def test_an_interactive_shell_is_no_rank() -> None:
    assert from_env({**SRUN, "SLURM_STEP_ID": "4294967290"}) is None


def test_a_rank_left_over_in_the_environment_of_srun_is_refused_with_both_values() -> None:
    left = {"RANK": "0", "WORLD_SIZE": "1"}
    named = "RANK = 0 and WORLD_SIZE = 1, but SLURM_PROCID = 3 and SLURM_STEP_NUM_TASKS = 4"
    with pytest.raises(MachineError, match=named):
        from_env({**SRUN, "SLURM_STEP_NUM_TASKS": "4", **left})


def test_ranks_that_a_script_takes_from_srun_agree_with_it() -> None:
    world = from_env({**SRUN, "SLURM_STEP_NUM_TASKS": "4", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    assert world is not None
    assert (world.rank, world.node) == (3, 1)


@pytest.mark.parametrize("env", [{}, {"RANK": "0"}, {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}])
def test_no_launcher_is_no_world(env: dict[str, str]) -> None:
    """The last one is a batch script: it may have a SLURM_PROCID, but is not a task of a step."""
    assert from_env(env) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"RANK": "x"}, "RANK = x"),
        ({"RANK": "4"}, "rank 4 of 4"),
        ({"LOCAL_RANK": "2"}, "local rank 2 of 2"),
        ({"WORLD_SIZE": "3", "RANK": "0"}, "3 ranks on 2 nodes"),
    ],
)
def test_variables_that_contradict_each_other_are_named(change: dict[str, str], named: str) -> None:
    with pytest.raises(MachineError, match=named):
        from_env({**TORCHRUN, **change})
