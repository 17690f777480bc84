"""Commands that only look: what a run will need, and how runs differ."""

from __future__ import annotations

from collections.abc import Sequence

from mpdist.commands.words import (
    OVERRIDES,
    Parser,
    figure,
    load_config,
    memory_of,
    natural,
    parse,
    rate,
    with_config,
    with_memory,
    with_world,
)

# Options of `plan` that a run has answered.
_OF_A_CONFIG = ("ranks", "nodes", "memory", "gpu", "peak", "network", "suggest", "simulate", "overrides")


def _plan_parser() -> Parser:
    parser = Parser(
        "plan",
        "What follows from a configuration, without a GPU and without torch: bytes a rank by tensor class, the batch\n"
        "arithmetic, the traffic, whether it fits, and which settings do. Exit status 3 if it does not fit.\n"
        "Of a run's directory: what it planned beside what its ranks measured.",
        "examples:\n  mpdist plan configs/llama31_8b_1node.yaml --memory 80GiB\n"
        "  mpdist plan configs/llama31_8b_1node.yaml --gpu H100 --suggest\n"
        f"  mpdist plan runs/my-run\n\n{OVERRIDES}",
    )
    with_config(parser, name="CONFIG|RUN_DIR", text="the run's YAML file, or the directory of a run")
    with_world(parser)
    with_memory(parser)
    parser.add_argument("--gpu", metavar="NAME", help="the ranks' GPU, such as H100: its memory and its peak rates")
    parser.add_argument("--peak", type=rate, metavar="TFLOPS", help="one GPU's TFLOP/s instead of its data sheet's")
    parser.add_argument("--network", metavar="RATE", help="what a node sends to others, such as 400Gbit/s or 50GB/s")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the plan as JSON")
    form.add_argument("--suggest", action="store_true", help="print the cheapest settings that fit, as YAML")
    parser.add_argument("--html", metavar="FILE", help="draw the plan, and the settings that fit, into a file")
    parser.add_argument("--simulate", action="store_true", help="prove it: play the job on fake tensors (with torch)")
    parser.add_argument(
        "--every-layer", action="store_true", help="with --simulate: play all blocks, not a few of many"
    )
    return parser


def plan(argv: Sequence[str]) -> int:
    parser = _plan_parser()
    arguments = parse(parser, argv)
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
    memory, network = memory_of(arguments), None
    if arguments.network is not None:
        from mpdist.units import parse_rate

        network = parse_rate(arguments.network)
        if not network or not (arguments.gpu or arguments.peak):
            parser.error("--network takes a rate above 0, for the time of a step: with --gpu or --peak")
    resolved = load_config(arguments)
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


def _compare_parser() -> Parser:
    parser = Parser(
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
        "--warmup", type=natural, metavar="K", help="windows to leave out of rates and clocks (default: 2)"
    )
    parser.add_argument(
        "--to-loss",
        type=figure,
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
    parser.add_argument("--html", metavar="FILE", help="draw the comparison, with its curves and tables, into a file")
    parser.add_argument(
        "--wandb",
        choices=("online", "offline"),
        help="make it a W&B run of its own, beside the runs and in their group",
    )
    return parser


def compare(argv: Sequence[str]) -> int:
    arguments = parse(_compare_parser(), argv)
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
        html=arguments.html,
        wandb=arguments.wandb,
    )
