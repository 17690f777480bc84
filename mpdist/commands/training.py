"""Commands that train: on this machine, through Slurm, and the arms of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpdist.commands.words import (
    OVERRIDES,
    STATUSES,
    Parser,
    load_config,
    load_seeded,
    memory_of,
    natural,
    parse,
    positive,
    with_config,
    with_memory,
    with_seed,
    with_world,
)
from mpdist.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def launch(argv: Sequence[str]) -> int:
    parser = Parser(
        "launch",
        "Train. Plans and checks first, freezes the run directory OUT_DIR/NAME, then runs torchrun as a child, passes\n"
        "signals on, and returns the run's own status. Launching the same run again goes on where it stopped.",
        "example:\n  mpdist launch configs/smollm2_135m.yaml --ranks 2 batch.micro=4 optim.lr=1e-5\n\n"
        f"{OVERRIDES}\n{STATUSES}",
    )
    with_config(parser)
    with_world(parser)
    parser.add_argument("--node-rank", type=natural, metavar="N", help="this node's number (default: Slurm's, else 0)")
    with_seed(parser)
    with_memory(parser)
    parser.add_argument("--dry-run", action="store_true", help="print config, plan and command line; start nothing")
    arguments = parse(parser, argv)
    memory = memory_of(arguments)
    resolved = load_seeded(arguments)
    from mpdist import launch

    with launch.early_ears() as heard:
        return launch.run(
            resolved,
            ranks=arguments.ranks,
            nodes=arguments.nodes,
            node_rank=arguments.node_rank,
            dry_run=arguments.dry_run,
            memory_bytes=memory,
            heard=heard,
        )


# Options of `submit` beside --nodes and --ranks, and the keys under `slurm` that they set.
_SLURM_OPTIONS = {
    "time": ("time", "TIME", "time limit of one start, such as 2h"),
    "partition": ("partition", "NAME", "the partition"),
    "account": ("account", "NAME", "who pays"),
    "qos": ("qos", "NAME", "the quality of service"),
    "gpus": ("gpus_per_node", "N", "GPUs of each node"),
    "cpus": ("cpus_per_node", "N", "CPUs of each node"),
    "mem": ("mem", "BYTES", "memory of each node, such as 200GiB"),
    "constraint": ("constraint", "FEATURES", "what the nodes must have"),
    "array": ("array", "SEEDS", "a job array, such as 0-3: task K trains NAME-seedK with seed K"),
    "dependency": ("dependency", "WHEN", "such as afterok:123"),
    "requeues": ("requeues", "N", "how often the job may be queued again"),
}


def submit(argv: Sequence[str]) -> int:
    parser = Parser(
        "submit",
        "Hand a run to Slurm. Checks it first, and that the cluster has what it asks for; keeps script, arguments and\n"
        "names of variables in OUT_DIR/NAME/slurm; prints the job's id and how to watch, stop and resume it.",
        "examples:\n  mpdist submit configs/llama31_8b_4nodes.yaml --nodes 4 --gpus 8 --time 24h --partition gpu\n"
        "  mpdist submit run.yaml --nodes 2 --dry-run\n\n"
        "An option is short for a key: --time 2h is slurm.time=2h. What none says is left to the cluster's defaults.\n\n"
        f"{OVERRIDES}",
    )
    with_config(parser)
    with_world(parser)
    for option, (key, metavar, text) in _SLURM_OPTIONS.items():
        parser.add_argument(f"--{option}", metavar=metavar, help=f"{text} (slurm.{key})")
    with_memory(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the exact argument list and the script")
    arguments = parse(parser, argv)
    memory = memory_of(arguments)
    given = [("launch", name, getattr(arguments, name)) for name in ("nodes", "ranks")]
    given += [("slurm", key, getattr(arguments, option)) for option, (key, *_) in _SLURM_OPTIONS.items()]
    arguments.overrides += [f"{section}.{key}={value}" for section, key, value in given if value is not None]
    resolved = load_config(arguments)
    from mpdist import submit

    asked = submit.Asked(arguments.config, tuple(arguments.overrides), memory)
    return submit.run(resolved, asked, arguments.dry_run)


def requeue(argv: Sequence[str]) -> int:
    parser = Parser(
        "requeue",
        "At the end of a batch script: queue its job again if the run was stopped early with everything saved and its\n"
        "requeues (slurm.requeues) are not used up. Returns the run's own status, not srun's.",
        f"example, as in slurm/train.sbatch:\n  mpdist requeue --step-status $? run.yaml\n\n{OVERRIDES}",
    )
    with_config(parser)
    if "--sweep" in argv:
        _with_arms(parser)
    else:
        with_seed(parser)
    parser.add_argument("--sweep", action="store_true", help="the job ran `mpdist sweep`, whose options may follow")
    parser.add_argument(
        "--step-status",
        type=natural,
        default=1,
        metavar="N",
        help="srun's, where the run has left no status of its own",
    )
    arguments = parse(parser, argv)
    from mpdist import requeue

    try:
        resolved = load_seeded(arguments)
    except UsageError as error:
        return requeue.unreadable(arguments.config, error, arguments.step_status)
    return (requeue.run_sweep if arguments.sweep else requeue.run)(resolved, arguments.step_status)


def _with_arms(parser: Parser) -> None:
    """What makes a sweep's runs, which `mpdist requeue` takes as it was given in a batch script."""
    many: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument(
        "--vary", metavar="KEY=A,B,C", **many, help="an arm for each value; several: for each combination"
    )
    parser.add_argument("--arm", metavar="NAME:KEY=V,KEY=V", **many, help="an arm that sets several keys")
    parser.add_argument("--config", dest="files", metavar="FILE", **many, help="a whole configuration as an arm")
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="runs of each arm: seed, seed + 1, ...")
    parser.add_argument("--seed", type=natural, metavar="K", help="the sweep NAME-seedK, which begins with seed=K")
    parser.add_argument("--control", action="store_true", help="run the first arm twice: what differs then is noise")
    parser.add_argument(
        "--equal-time", metavar="TIME", help="train each arm for so long, such as 300s, by its own speed"
    )
    parser.add_argument("--ranks", type=positive, metavar="N", help="ranks on this node (default: launch.ranks)")
    parser.add_argument("--no-compare", action="store_true", help="at the end, do not call `mpdist compare`")


def sweep(argv: Sequence[str]) -> int:
    parser = Parser(
        "sweep",
        "Run the arms of a comparison: the same weights and data for each seed, in one allocation, alternated (A B B A),\n"
        "into OUT_DIR/NAME. The same command again goes on where it stopped, and repeats nothing that is finished.",
        "examples:\n"
        "  mpdist sweep run.yaml --vary precision.compute=fp32,bf16,fp16 --vary reduce.wire=fp32,bf16 --seeds 3\n"
        "  mpdist sweep run.yaml --arm fp32:precision.compute=fp32 --arm pure:precision.compute=bf16,precision.master=compute\n"
        "  mpdist sweep run.yaml --config other.yaml --control --equal-time 300s --dry-run\n\n"
        "CONFIG itself is the arm `base` where the options make fewer than two; `--arm base:` asks for it.\n"
        f"{OVERRIDES}\n{STATUSES}",
    )
    with_config(parser)
    _with_arms(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the runs in order; start nothing")
    arguments = parse(parser, argv)
    load_seeded(arguments)
    seconds = None
    if arguments.equal_time is not None:
        from mpdist.units import parse_duration

        seconds = parse_duration(arguments.equal_time)
        if not seconds:
            parser.error("--equal-time 0: it takes a time to train for")
    from mpdist import sweep

    asked = sweep.Asked(
        arguments.config,
        tuple(arguments.overrides),
        tuple(arguments.vary),
        tuple(arguments.arm),
        tuple(arguments.files),
        arguments.seeds,
        arguments.control,
        seconds,
        arguments.ranks,
    )
    return sweep.run(asked, arguments.dry_run, None if arguments.no_compare else _report)


def _report(folder: Path) -> None:
    from mpdist.compare import command

    command.run([str(folder)])
