"""Commands about this machine, and what has to be on it before and after a run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mpdist.commands.words import (
    OVERRIDES,
    Parser,
    load_config,
    memory_of,
    natural,
    parse,
    positive,
    with_config,
    with_memory,
    with_world,
)
from mpdist.errors import UsageError


def _doctor_parser() -> Parser:
    parser = Parser(
        "doctor",
        "What is wrong, before anything is trained: findings, worst first, each with its cure. Without CONFIG of this\n"
        "machine: devices, versions, limits, and how fast it multiplies in FP32, BF16 and FP16. With CONFIG also of what\n"
        "it needs, on all its ranks: they are started as a launch would, and try their links for values and speed.\n"
        "Exit status 0 if nothing has failed, else that of the first failure.\n\n"
        "With --debug the debugging sequence of mixed precision is run for a few steps, on the same ranks.\n\n"
        "With --replay a past step of a run is computed again, from the nearest earlier checkpoint, and its loss and gradient\n"
        "norm are compared with its record bit for bit: what differs is silent corruption, or a race.",
        "examples:\n  mpdist doctor\n  mpdist doctor run.yaml --ranks 8\n  mpdist doctor --replay runs/sft 1200\n"
        "  srun --ntasks-per-node=1 mpdist doctor run.yaml --json\n\n"
        f"torchrun ... -m mpdist doctor CONFIG works too.\n\n{OVERRIDES}",
    )
    with_config(parser, required=False)
    with_world(parser)
    parser.add_argument("--ops", action="store_true", help="make one training step and count its operations by dtype")
    parser.add_argument(
        "--debug",
        action="store_true",
        help="a few steps in FP32, in less precision, and as CONFIG says; what fails is named, cures tried",
    )
    parser.add_argument("--steps", type=positive, metavar="N", help="with --debug: how many of each (default: 8)")
    parser.add_argument(
        "--html", metavar="FILE", help="CONFIG being a run's folder: draw what its precision cost, by layer"
    )
    parser.add_argument("--node-rank", type=natural, metavar="N", help="this node's number (default: Slurm's, else 0)")
    with_memory(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--replay", nargs=2, metavar=("RUN", "STEP"), help="a run's folder, and a logged step of it")
    parser.add_argument("--report", metavar="FILE", help=argparse.SUPPRESS)  # from the process that starts the ranks
    return parser


# Options of `doctor`: those of ranks that it starts, and its ways to look.
_OF_RANKS = ("ranks", "nodes", "node_rank", "memory")
_LOOKS = ("html", "replay", "ops", "debug")


def doctor(argv: Sequence[str]) -> int:
    parser = _doctor_parser()
    arguments = parse(parser, argv)
    given = [f"--{name.replace('_', '-')}" for name in _OF_RANKS if getattr(arguments, name) is not None]
    looks = [f"--{name}" for name in _LOOKS if getattr(arguments, name) not in (None, False)]
    if len(looks) > 1:
        parser.error(f"{looks[0]} and {looks[1]} look at different things: give one of them")
    if arguments.steps is not None and not arguments.debug:
        parser.error("--steps goes with --debug")
    if arguments.html is not None:
        if arguments.config is None or given or arguments.json or arguments.overrides:
            parser.error("--html takes a run's folder alone: mpdist doctor RUN --html FILE")
        from mpdist import precision_html

        return precision_html.draw(arguments.config, arguments.html)
    if arguments.replay is not None:
        return _replay(arguments, given)
    if looks and arguments.config is None:
        parser.error(f"{looks[0]} needs the CONFIG whose steps are made")
    memory = memory_of(arguments)
    if arguments.config is not None and os.path.isdir(arguments.config):
        why = "without an option a configuration's needs are looked at, and that is a folder"
        do = f"of a run's folder: mpdist doctor {arguments.config} --html FILE (what its precision cost), or mpdist doctor"
        do += f" --replay {arguments.config} STEP (a step again); or give its config.yaml"
        raise UsageError(f"mpdist doctor {arguments.config}", why, do)
    resolved = load_config(arguments) if arguments.config is not None else None
    from mpdist.doctor import TRIAL_STEPS, command

    command.check_options(resolved, given)
    return command.run(
        resolved,
        ranks=arguments.ranks,
        nodes=arguments.nodes,
        node_rank=arguments.node_rank,
        memory_bytes=memory,
        as_json=arguments.json,
        report=arguments.report,
        ops=arguments.ops,
        debug=(arguments.steps or TRIAL_STEPS) if arguments.debug else None,
    )


def _replay(arguments: argparse.Namespace, given: list[str]) -> int:
    folder, step = arguments.replay
    if arguments.config is not None or given:
        raise UsageError(f"mpdist doctor --replay with {arguments.config or given[0]}",
                         "the run's own configuration and number of ranks are taken", "leave it out")  # fmt: skip
    if not step.isdecimal() or not int(step):
        raise UsageError(f"mpdist doctor --replay {folder} {step}", "a step is a whole number from 1 on", "give one")
    from mpdist.doctor import command

    return command.replay(folder, int(step), as_json=arguments.json, report=arguments.report)


def fetch(argv: Sequence[str]) -> int:
    parser = Parser(
        "fetch",
        "Bring here what a configuration takes from the hub (model, tokenizer, data sets), where there is a network: a\n"
        "login node. Ranks that see the same Hugging Face folder (HF_HOME) then never ask the hub. What is here already\n"
        "is said and left; without a network, what is missing is named within seconds (exit status 4).",
        f"example:\n  HF_HOME=/shared/hf mpdist fetch run.yaml\n\n{OVERRIDES}",
    )
    with_config(parser)
    parser.add_argument("--refresh", action="store_true", help="ask the hub for newer versions of what is here")
    arguments = parse(parser, argv)
    resolved = load_config(arguments)
    from mpdist.data import fetch

    return fetch.run(resolved, arguments.refresh)


def prepare(argv: Sequence[str]) -> int:
    parser = Parser(
        "prepare",
        "Fetch what the hub holds, then tokenise, pack and index the data once, before any GPU is held. Resumable;\n"
        "launch does what is left of it. The result is found again by the digest of everything that it depends on.",
        f"example:\n  mpdist prepare run.yaml data.cache=/data/prepared\n\n{OVERRIDES}",
    )
    with_config(parser)
    resolved = load_config(parse(parser, argv))
    from mpdist.data import command

    return command.run(resolved)


def export(argv: Sequence[str]) -> int:
    parser = Parser(
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


def numerics(argv: Sequence[str]) -> int:
    parser = Parser(
        "numerics",
        "formats: the float formats side by side, each figure checked against the format's bit patterns.\n"
        "lab: train one small problem in emulated formats, and see what casts, scales and accumulators do to it.",
        "examples:\n  mpdist numerics formats\n  mpdist numerics lab --json",
    )
    parser.add_argument("what", choices=("formats", "lab"), metavar="formats|lab")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args(list(argv))
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
