"""The `mpdist` command. Each command imports what it needs when it runs, so that help and refusals are immediate."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import mpdist
from mpdist.errors import MachineError, MpdistError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from mpdist.config import Resolved

_OVERRIDES = """\
KEY=VALUE sets one key for this run: the command line beats the file, the file beats its parent, the parent beats the
defaults. VALUE is read as YAML unless the key holds text; a list's element is data.train.0.path=...; KEY=null clears.
"""
_STATUSES = """\
exit statuses: 0 done, 1 a bug, 2 usage or configuration, 3 does not fit, 4 the machine is wrong, 5 diverged,
6 checkpoint, 7 a comparison's gate does not hold,
75 stopped early with everything saved (launch again to go on),
130 or 143 ended at once by a second Ctrl-C or TERM (launch again to go on from the last checkpoint)
"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Our own lines stay as they are; a fixed width, since asking the terminal imports shutil and its compressors."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=100)


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaints are UsageErrors like all others."""

    def __init__(self, command: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=f"mpdist {command}",
            description=description,
            epilog=epilog if _STATUSES in epilog else f"{epilog.rstrip()}\n\nexit statuses: `mpdist --help` lists them",
            formatter_class=_Help,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        message = message.replace(", KEY=VALUE", "")  # argparse takes what may be missing for required
        raise UsageError(f"{self.prog}: {message}", "", f"`{self.prog} --help` shows how it is used")


def _with_config(
    parser: _Parser, required: bool = True, name: str = "CONFIG", text: str = "the run's YAML file"
) -> None:
    parser.add_argument("config", nargs=None if required else "?", metavar=name, help=text)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings for this run")


def _with_world(parser: _Parser) -> None:
    parser.add_argument("--ranks", type=_positive, metavar="N", help="ranks on each node (default: launch.ranks)")
    parser.add_argument("--nodes", type=_positive, metavar="N", help="nodes (default: launch.nodes)")


def _with_memory(parser: _Parser) -> None:
    parser.add_argument("--memory", metavar="BYTES", help="a rank's memory to judge by, such as 80GiB")


def _memory(arguments: argparse.Namespace) -> int | None:
    if arguments.memory is None:
        return None
    from mpdist.units import parse_bytes

    return parse_bytes(arguments.memory)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _rate(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 1e-3 <= found <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 (TFLOP/s, from 0.001 to a million)")
    return found


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def _parse(parser: _Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Options may stand anywhere among the overrides."""
    return parser.parse_intermixed_args(list(argv))


def _load(arguments: argparse.Namespace) -> Resolved:
    # Building the schema makes many objects and no garbage: looking for some takes a tenth of the time.
    gc.disable()
    try:
        from mpdist.config import load

        return load(arguments.config, arguments.overrides)
    finally:
        gc.enable()


def _with_seed(parser: _Parser) -> None:
    parser.add_argument("--seed", type=_natural, metavar="K", help="train the run NAME-seedK with seed=K")


def _load_seeded(arguments: argparse.Namespace) -> Resolved:
    """The configuration, or the run that a job array's task makes of it."""
    resolved = _load(arguments)
    if arguments.seed is not None:
        name = f"{resolved.config.name}-seed{arguments.seed}"
        arguments.overrides = [*arguments.overrides, f"seed={arguments.seed}", f"name={name}"]
        resolved = _load(arguments)
    return resolved


def _launch(argv: Sequence[str]) -> int:
    parser = _Parser(
        "launch",
        "Train. Plans and checks first, freezes the run directory OUT_DIR/NAME, then runs torchrun as a child, passes\n"
        "signals on, and returns the run's own status. Launching the same run again goes on where it stopped.",
        "example:\n  mpdist launch configs/smollm2_135m.yaml --ranks 2 batch.micro=4 optim.lr=1e-5\n\n"
        f"{_OVERRIDES}\n{_STATUSES}",
    )
    _with_config(parser)
    _with_world(parser)
    parser.add_argument("--node-rank", type=_natural, metavar="N", help="this node's number (default: Slurm's, else 0)")
    _with_seed(parser)
    _with_memory(parser)
    parser.add_argument("--dry-run", action="store_true", help="print config, plan and command line; start nothing")
    arguments = _parse(parser, argv)
    memory = _memory(arguments)
    resolved = _load_seeded(arguments)
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


def _submit(argv: Sequence[str]) -> int:
    parser = _Parser(
        "submit",
        "Hand a run to Slurm. Checks it first, and that the cluster has what it asks for; keeps script, arguments and\n"
        "names of variables in OUT_DIR/NAME/slurm; prints the job's id and how to watch, stop and resume it.",
        "examples:\n  mpdist submit configs/llama31_8b_4nodes.yaml --nodes 4 --gpus 8 --time 24h --partition gpu\n"
        "  mpdist submit run.yaml --nodes 2 --dry-run\n\n"
        "An option is short for a key: --time 2h is slurm.time=2h. What none says is left to the cluster's defaults.\n\n"
        f"{_OVERRIDES}",
    )
    _with_config(parser)
    _with_world(parser)
    for option, (key, metavar, text) in _SLURM_OPTIONS.items():
        parser.add_argument(f"--{option}", metavar=metavar, help=f"{text} (slurm.{key})")
    _with_memory(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the exact argument list and the script")
    arguments = _parse(parser, argv)
    memory = _memory(arguments)
    given = [("launch", name, getattr(arguments, name)) for name in ("nodes", "ranks")]
    given += [("slurm", key, getattr(arguments, option)) for option, (key, *_) in _SLURM_OPTIONS.items()]
    arguments.overrides += [f"{section}.{key}={value}" for section, key, value in given if value is not None]
    resolved = _load(arguments)
    from mpdist import submit

    asked = submit.Asked(arguments.config, tuple(arguments.overrides), memory)
    return submit.run(resolved, asked, arguments.dry_run)


def _requeue(argv: Sequence[str]) -> int:
    parser = _Parser(
        "requeue",
        "At the end of a batch script: queue its job again if the run was stopped early with everything saved and its\n"
        "requeues (slurm.requeues) are not used up. Returns the run's own status, not srun's.",
        f"example, as in slurm/train.sbatch:\n  mpdist requeue --step-status $? run.yaml\n\n{_OVERRIDES}",
    )
    _with_config(parser)
    _with_seed(parser)
    parser.add_argument(
        "--step-status",
        type=_natural,
        default=1,
        metavar="N",
        help="srun's, where the run has left no status of its own",
    )
    arguments = _parse(parser, argv)
    resolved = _load_seeded(arguments)
    from mpdist import requeue

    return requeue.run(resolved, arguments.step_status)


def _sweep(argv: Sequence[str]) -> int:
    parser = _Parser(
        "sweep",
        "Run the arms of a comparison: the same weights and data for each seed, in one allocation, alternated (A B B A),\n"
        "into OUT_DIR/NAME. The same command again goes on where it stopped, and repeats nothing that is finished.",
        "examples:\n"
        "  mpdist sweep run.yaml --vary precision.compute=fp32,bf16,fp16 --vary reduce.wire=fp32,bf16 --seeds 3\n"
        "  mpdist sweep run.yaml --arm fp32:precision.compute=fp32 --arm pure:precision.compute=bf16,precision.master=compute\n"
        "  mpdist sweep run.yaml --config other.yaml --control --equal-time 300s --dry-run\n\n"
        "CONFIG itself is the arm `base` where the options make fewer than two; `--arm base:` asks for it.\n"
        f"{_OVERRIDES}\n{_STATUSES}",
    )
    _with_config(parser)
    many: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument(
        "--vary", metavar="KEY=A,B,C", **many, help="an arm for each value; several: for each combination"
    )
    parser.add_argument("--arm", metavar="NAME:KEY=V,KEY=V", **many, help="an arm that sets several keys")
    parser.add_argument("--config", dest="files", metavar="FILE", **many, help="a whole configuration as an arm")
    parser.add_argument("--seeds", type=_positive, default=1, metavar="N", help="runs of each arm: seed, seed + 1, ...")
    parser.add_argument("--control", action="store_true", help="run the first arm twice: what differs then is noise")
    parser.add_argument(
        "--equal-time", metavar="TIME", help="train each arm for so long, such as 300s, by its own speed"
    )
    parser.add_argument("--ranks", type=_positive, metavar="N", help="ranks on this node (default: launch.ranks)")
    parser.add_argument("--no-compare", action="store_true", help="at the end, do not call `mpdist compare`")
    parser.add_argument("--dry-run", action="store_true", help="print the runs in order; start nothing")
    arguments = _parse(parser, argv)
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


# Options of `plan` that a run has answered.
_OF_A_CONFIG = ("ranks", "nodes", "memory", "gpu", "peak", "network", "suggest", "simulate", "overrides")


def _plan(argv: Sequence[str]) -> int:
    parser = _Parser(
        "plan",
        "What follows from a configuration, without a GPU and without torch: bytes a rank by tensor class, the batch\n"
        "arithmetic, the traffic, whether it fits, and which settings do. Exit status 3 if it does not fit.\n"
        "Of a run's directory: what it planned beside what its ranks measured.",
        "examples:\n  mpdist plan configs/llama31_8b_1node.yaml --memory 80GiB\n"
        "  mpdist plan configs/llama31_8b_1node.yaml --gpu H100 --suggest\n"
        f"  mpdist plan runs/my-run\n\n{_OVERRIDES}",
    )
    _with_config(parser, name="CONFIG|RUN_DIR", text="the run's YAML file, or the directory of a run")
    _with_world(parser)
    _with_memory(parser)
    parser.add_argument("--gpu", metavar="NAME", help="the ranks' GPU, such as H100: its memory and its peak rates")
    parser.add_argument("--peak", type=_rate, metavar="TFLOPS", help="one GPU's TFLOP/s instead of its data sheet's")
    parser.add_argument("--network", metavar="BYTES/S", help="what a node sends to others, such as 400GB/s")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the plan as JSON")
    form.add_argument("--suggest", action="store_true", help="print the cheapest settings that fit, as YAML")
    parser.add_argument("--html", metavar="FILE", help="draw the plan, and the settings that fit, into a file")
    parser.add_argument("--simulate", action="store_true", help="prove it: play the job on fake tensors (with torch)")
    parser.add_argument(
        "--every-layer", action="store_true", help="with --simulate: play all blocks, not a few of many"
    )
    arguments = _parse(parser, argv)
    if arguments.every_layer and not arguments.simulate:
        parser.error("--every-layer says how to --simulate")
    import os

    if os.path.isdir(arguments.config):
        given = [name for name in _OF_A_CONFIG if getattr(arguments, name)]
        if given:
            name = "KEY=VALUE" if given[0] == "overrides" else f"--{given[0]}"
            parser.error(f"a run has its plan already: {name} is for a configuration")
        from mpdist import plan_command

        return plan_command.show(arguments.config, arguments.json, arguments.html)
    memory, network = _memory(arguments), None
    if arguments.network is not None:
        from mpdist.units import parse_bytes

        network = parse_bytes(arguments.network.removesuffix("/s"))
        if not network or not (arguments.gpu or arguments.peak):
            parser.error("--network takes bytes a second above 0, for the time of a step: with --gpu or --peak")
    resolved = _load(arguments)
    from mpdist import plan_command

    return plan_command.run(
        resolved,
        ranks=arguments.ranks,
        nodes=arguments.nodes,
        memory_bytes=memory,
        as_json=arguments.json,
        suggest=arguments.suggest,
        html=arguments.html,
        gpu=arguments.gpu,
        peak=None if arguments.peak is None else arguments.peak * 1e12,
        network=network,
        simulate=arguments.simulate,
        every_layer=arguments.every_layer,
    )


def _config(argv: Sequence[str]) -> int:
    parser = _Parser(
        "config",
        "Check a configuration and print every value with its origin: FILE:LINE, command line or default.\n"
        "Everything that is wrong is reported at once, with the nearest right key; the exit status is then 2.",
        "examples:\n  mpdist config run.yaml batch.micro=4\n  mpdist config --schema > mpdist.schema.json\n"
        "  mpdist config --from-trainer args.yaml --from-deepspeed zero3.json --ranks 8 > run.yaml\n\n"
        f"{_OVERRIDES}",
    )
    _with_config(parser, required=False)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--yaml", action="store_true", help="print the resolved values as a file that loads again")
    what.add_argument("--schema", action="store_true", help="print the JSON schema of a configuration file")
    what.add_argument("--reference", action="store_true", help="print every key as a Markdown table")
    _with_sources(parser)
    arguments = _parse(parser, argv)
    files = {name: getattr(arguments, f"from_{name}") for name in _SOURCES}
    if any(files.values()):
        return _translate(parser, arguments, files)
    if arguments.ranks or arguments.nodes:
        parser.error("--ranks and --nodes are for --from-...: what a configuration holds does not hang on them")
    if arguments.schema or arguments.reference:
        if arguments.config is not None:
            parser.error("--schema and --reference describe every configuration: give no CONFIG with them")
        return _print_schema(arguments.schema)
    if arguments.config is None:
        parser.error("which configuration? give CONFIG, --schema or --reference")
    resolved = _load(arguments)
    print(resolved.to_yaml() if arguments.yaml else resolved.to_text(), end="" if arguments.yaml else "\n")
    return 0


_SOURCES = {
    "accelerate": "accelerate's YAML or JSON",
    "deepspeed": "DeepSpeed's JSON",
    "trainer": "TrainingArguments (or SFTConfig) as JSON or YAML",
}


def _with_sources(parser: _Parser) -> None:
    group = parser.add_argument_group(
        "coming from elsewhere",
        "print a configuration made from theirs, with an account of each key; any of them together",
    )
    for name, text in _SOURCES.items():
        group.add_argument(f"--from-{name}", metavar="FILE", help=text)
    group.add_argument("--ranks", type=_positive, metavar="N", help="ranks on each node, where no file says it")
    group.add_argument("--nodes", type=_positive, metavar="N", help="nodes, where no file says it")


def _translate(parser: _Parser, arguments: argparse.Namespace, files: dict[str, str | None]) -> int:
    if arguments.config is not None or arguments.yaml or arguments.schema or arguments.reference:
        parser.error("--from-... prints a new configuration: give no CONFIG and no other output with it")
    from mpdist.translate import command

    return command.run(files, arguments.ranks, arguments.nodes)


def _print_schema(schema: bool) -> int:
    if schema:
        import json

        from mpdist.config import json_schema

        print(json.dumps(json_schema(), indent=2))
    else:
        from mpdist.config.describe import reference

        print(reference())
    return 0


def _configs(argv: Sequence[str]) -> int:
    parser = _Parser(
        "configs",
        "The configurations and recipes that come with mpdist: list them, show one, or copy one (with the parents\n"
        "that it extends) to edit it.",
        "examples:\n  mpdist configs\n  mpdist configs show llama31_8b\n  mpdist configs copy llama31_8b my_runs",
    )
    parser.add_argument("action", nargs="?", choices=("list", "show", "copy"), default="list", help="default: list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="as listed, or its last part")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="where to copy it")
    arguments = parser.parse_args(list(argv))
    from pathlib import Path

    from mpdist import shipped

    if arguments.action == "list":
        if arguments.name:
            parser.error(f"list takes no name; `mpdist configs show {arguments.name}` prints it")
        names = shipped.names()
        wide = max((len(name) for name in names), default=0)
        for name in names:
            print(f"{name:{wide}}  {shipped.describe(shipped.root() / name)}".rstrip())
    elif arguments.name is None or (arguments.action == "copy") != (arguments.folder is not None):
        parser.error("use `show NAME` or `copy NAME FOLDER`")
    elif arguments.action == "show":
        print(shipped.find(arguments.name).read_text(encoding="utf-8"), end="")
    else:
        for path in shipped.copy(arguments.name, Path(arguments.folder)):
            print(path)
    return 0


def _prepare(argv: Sequence[str]) -> int:
    parser = _Parser(
        "prepare",
        "Fetch what the hub holds, then tokenise, pack and index the data once, before any GPU is held. Resumable;\n"
        "launch does what is left of it. The result is found again by the digest of everything that it depends on.",
        f"example:\n  mpdist prepare run.yaml data.cache=/data/prepared\n\n{_OVERRIDES}",
    )
    _with_config(parser)
    resolved = _load(_parse(parser, argv))
    from mpdist.data import command

    return command.run(resolved)


def _doctor(argv: Sequence[str]) -> int:
    parser = _Parser(
        "doctor",
        "What is wrong, before anything is trained: findings, worst first, each with its cure. Without CONFIG of this\n"
        "machine: devices, versions, limits, and how fast it multiplies in FP32, BF16 and FP16. With CONFIG also of what\n"
        "it needs, on all its ranks: they are started as a launch would, and try their links for values and speed.\n"
        "Exit status 0 if nothing has failed, else that of the first failure.",
        "examples:\n  mpdist doctor\n  mpdist doctor run.yaml --ranks 8\n"
        "  srun --ntasks-per-node=1 mpdist doctor run.yaml --json\n\n"
        f"torchrun ... -m mpdist doctor CONFIG works too.\n\n{_OVERRIDES}",
    )
    _with_config(parser, required=False)
    _with_world(parser)
    parser.add_argument("--node-rank", type=_natural, metavar="N", help="this node's number (default: Slurm's, else 0)")
    _with_memory(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--report", metavar="FILE", help=argparse.SUPPRESS)  # from the process that starts the ranks
    arguments = _parse(parser, argv)
    given = [
        f"--{n.replace('_', '-')}"
        for n in ("ranks", "nodes", "node_rank", "memory")
        if getattr(arguments, n) is not None
    ]
    memory = _memory(arguments)
    resolved = _load(arguments) if arguments.config is not None else None
    from mpdist.doctor import command

    command.check_options(resolved, given)
    return command.run(
        resolved,
        ranks=arguments.ranks,
        nodes=arguments.nodes,
        node_rank=arguments.node_rank,
        memory_bytes=memory,
        as_json=arguments.json,
        report=arguments.report,
    )


def _fetch(argv: Sequence[str]) -> int:
    parser = _Parser(
        "fetch",
        "Bring here what a configuration takes from the hub (model, tokenizer, data sets), where there is a network: a\n"
        "login node. Ranks that see the same Hugging Face folder (HF_HOME) then never ask the hub. What is here already\n"
        "is said and left; without a network, what is missing is named within seconds (exit status 4).",
        f"example:\n  HF_HOME=/shared/hf mpdist fetch run.yaml\n\n{_OVERRIDES}",
    )
    _with_config(parser)
    parser.add_argument("--refresh", action="store_true", help="ask the hub for newer versions of what is here")
    arguments = _parse(parser, argv)
    resolved = _load(arguments)
    from mpdist.data import fetch

    return fetch.run(resolved, arguments.refresh)


def _export(argv: Sequence[str]) -> int:
    parser = _Parser(
        "export",
        "Write a folder that transformers' from_pretrained loads, from a checkpoint or a run's latest one.",
        "example:\n  mpdist export runs/my-run my-model --dtype bf16",
    )
    parser.add_argument("source", metavar="CHECKPOINT_OR_RUN", help="a checkpoint's folder, or a run's")
    parser.add_argument("folder", metavar="FOLDER", help="the folder to write; it must not exist")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="default: the dtype of the model the run started from"
    )
    arguments = parser.parse_args(list(argv))
    from mpdist import export

    return export.run(arguments.source, arguments.folder, arguments.dtype)


def _numerics(argv: Sequence[str]) -> int:
    parser = _Parser(
        "numerics",
        "formats: the float formats side by side, each figure checked against the format's bit patterns.\n"
        "lab: train one small problem in emulated formats, and see what casts, scales and accumulators do to it.",
        "examples:\n  mpdist numerics formats\n  mpdist numerics lab --json",
    )
    parser.add_argument("what", choices=("formats", "lab"), metavar="formats|lab")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args(list(argv))
    import os

    from mpdist.lines import dump

    for library in ("OPENBLAS", "OMP", "MKL"):  # the order of a sum moves its last digits
        os.environ[f"{library}_NUM_THREADS"] = "1"
    if arguments.what == "formats":
        from mpdist.numerics import table

        print(dump(table.rows(), indent=2) if arguments.json else table.text())
        return 0
    from mpdist.numerics import lab, report

    found = lab.run(lambda line: print(line, file=sys.stderr, flush=True))
    print(dump(report.as_json(found), indent=2) if arguments.json else report.text(found))
    return 0


def _compare(argv: Sequence[str]) -> int:
    parser = _Parser(
        "compare",
        "Runs beside each other, at matched steps and at matched seconds, each difference with its interval over seeds,\n"
        "and a verdict on each arm. Refused, with every difference by name, where the runs differ in more than the\n"
        "treatment; exit status 7 where a gate does not hold.",
        "examples:\n  mpdist compare sweeps/precision\n"
        "  mpdist compare runs/fp32-seed* runs/bf16-seed* --gate 'loss_gap<=0.25%' --gate 'speed>=1.2x'\n"
        "  mpdist compare runs/a runs/b --treatment memory.checkpointing --allow versions.torch\n\n"
        "Arms are those of sweep.json, or of names such as bf16-seed1, or runs that are alike in the treatment.\n"
        "A gate is [ARM:]QUANTITY, one of <= >= < >, a number and a unit; a wrong one is told what there is.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, or a folder of them such as a sweep's")
    parser.add_argument("--treatment", metavar="KEY,...", help="the settings that may differ between arms; a section stands for "
                        "all in it (default: the sweep's, else precision and reduce)")  # fmt: skip
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="KEY",
        help="accept one difference by name; the report says so in its head",
    )
    parser.add_argument(
        "--against", metavar="ARM", help="what the others are measured against (default: the first arm, or FP32)"
    )
    parser.add_argument(
        "--warmup", type=_natural, metavar="K", help="windows to leave out of rates and clocks (default: 2)"
    )
    parser.add_argument(
        "--to-loss",
        type=_rate,
        metavar="LOSS",
        help="the evaluation loss to reach (default: the highest that a run ends with)",
    )
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="GATE",
        help="such as 'loss_gap<=0.25%%'; status 7 if it does not hold",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = _parse(parser, argv)
    from mpdist.compare import command

    return command.run(
        arguments.runs,
        treatment=[key.strip() for key in (arguments.treatment or "").split(",") if key.strip()],
        allow=arguments.allow,
        against=arguments.against,
        warmup=arguments.warmup,
        target=arguments.to_loss,
        gates=arguments.gate,
        as_json=arguments.json,
    )


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "launch": (_launch, "train: check, plan, freeze the run directory, run torchrun, return the run's status"),
    "submit": (
        _submit,
        "the same through Slurm: checked, kept with the run, queued again by itself when it was stopped",
    ),
    "requeue": (_requeue, "at the end of a batch script: queue the job again if its run was stopped early"),
    "sweep": (_sweep, "run the arms of a comparison: same weights and data for each seed, alternated, resumable"),
    "compare": (
        _compare,
        "runs beside each other at matched steps and seconds, with intervals, verdicts and gates, or refused",
    ),
    "plan": (
        _plan,
        "what follows from a config: bytes a rank, traffic, whether it fits, what would; of a run: planned and measured",
    ),
    "config": (
        _config,
        "check a config; print every value with its origin, the JSON schema, or one made from another trainer's",
    ),
    "configs": (_configs, "the configs and recipes that come with mpdist: list, show, copy"),
    "doctor": (
        _doctor,
        "what is wrong with this machine, or with a config on it and its ranks' links; each with its cure",
    ),
    "fetch": (_fetch, "bring what the hub holds here, for ranks that have no network"),
    "prepare": (_prepare, "tokenise, pack and index the data before any GPU is held"),
    "numerics": (_numerics, "the float formats checked bit by bit, and a lab that trains in emulated ones"),
    "export": (_export, "a folder that from_pretrained loads, from a run or a checkpoint"),
}

# These do more than print: a broken pipe may be one of theirs, and is never a success.
_WORKING = ("launch", "submit", "requeue", "sweep", "fetch", "prepare", "export")


def _help() -> str:
    commands = "\n".join(f"  {name:8} {summary}" for name, (_, summary) in COMMANDS.items())
    return (
        f"usage: mpdist COMMAND ...\n\n{mpdist.__doc__}\n\ncommands:\n{commands}\n\n"
        "a first run:\n"
        "  mpdist configs                                   what there is to start from\n"
        "  mpdist configs copy smollm2_135m my_runs         a copy of yours to edit\n"
        "  mpdist plan my_runs/smollm2_135m.yaml --ranks 8  does it fit?\n"
        "  mpdist launch my_runs/smollm2_135m.yaml          train\n\n"
        "with your own launcher: torchrun ... -m mpdist CONFIG [KEY=VALUE ...], as `mpdist configs show one_node` has it\n"
        "`mpdist COMMAND --help` has each command's options and an example; `mpdist --version` the version.\n\n"
        f"{_STATUSES}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. What a user can cause is printed in three parts on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = reported(lambda: _dispatch(arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        if arguments and arguments[0] in _WORKING:
            raise
        # The reader has gone (`mpdist config ... | head`). Python would complain once more when it closes stdout.
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    gc.freeze()  # the process ends here: the interpreter need not search all of it for garbage first
    return status


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(_help(), end="", file=sys.stderr)
        return UsageError.status
    if arguments[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0
    if arguments[0] == "--version":
        print(f"mpdist {mpdist.__version__}")
        return 0
    if arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]][0](arguments[1:])
    raise _unknown_command(arguments[0])


def _unknown_command(name: str) -> UsageError:
    if name.endswith((".yaml", ".yml")):
        return UsageError(f"mpdist {name}", "the command is missing", f"did you mean `mpdist launch {name}`?")
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    do = f"did you mean `mpdist {near[0]}`?" if near else "`mpdist --help` lists the commands"
    return UsageError(f"mpdist {name}", "there is no such command", do)


def reported(work: Callable[[], Any]) -> int:
    """Run ``work``; its ending as an exit status. Expected errors are printed, a bug keeps its traceback."""
    try:
        return int(work())
    except MpdistError as error:
        print(error, file=sys.stderr)
        return error.status
    except OSError as error:
        from mpdist.lines import no_room

        if not no_room(error):
            raise
        print(
            f"{error.filename or 'a file'}: {error.strerror or error}\n  do:  make room and try again", file=sys.stderr
        )
        return MachineError.status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
