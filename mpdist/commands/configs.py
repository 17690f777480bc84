"""Commands about configurations, and those that come with mpdist."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mpdist.commands.words import (
    OVERRIDES,
    Parser,
    load_seeded,
    parse,
    positive,
    with_config,
    with_seed,
)


def config(argv: Sequence[str]) -> int:
    parser = Parser(
        "config",
        "Check a configuration and print every value with its origin: FILE:LINE, command line or default.\n"
        "Everything that is wrong is reported at once, with the nearest right key; the exit status is then 2.",
        "examples:\n  mpdist config run.yaml batch.micro=4\n  mpdist config --schema > mpdist.schema.json\n"
        "  mpdist config --from-trainer args.yaml --from-deepspeed zero3.json --ranks 8 > run.yaml\n\n"
        f"{OVERRIDES}",
    )
    with_config(parser, required=False)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--yaml", action="store_true", help="print the resolved values as a file that loads again")
    what.add_argument("--schema", action="store_true", help="print the JSON schema of a configuration file")
    what.add_argument("--reference", action="store_true", help="print every key as a Markdown table")
    with_seed(parser)
    _with_sources(parser)
    arguments = parse(parser, argv)
    files = {name: getattr(arguments, f"from_{name}") for name in _SOURCES}
    if any(files.values()):
        return _translate(parser, arguments, files)
    if arguments.ranks or arguments.nodes:
        parser.error("--ranks and --nodes are for --from-...: what a configuration holds does not hang on them")
    if arguments.schema or arguments.reference:
        if arguments.config is not None or arguments.seed is not None:
            parser.error(
                "--schema and --reference describe every configuration: give no CONFIG and no --seed with them"
            )
        return _print_schema(arguments.schema)
    if arguments.config is None:
        parser.error("which configuration? give CONFIG, --schema or --reference")
    resolved = load_seeded(arguments)
    print(resolved.to_yaml() if arguments.yaml else resolved.to_text(), end="" if arguments.yaml else "\n")
    return 0


_SOURCES = {
    "accelerate": "accelerate's YAML or JSON",
    "deepspeed": "DeepSpeed's JSON",
    "trainer": "TrainingArguments (or SFTConfig) as JSON or YAML",
}


def _with_sources(parser: Parser) -> None:
    group = parser.add_argument_group(
        "coming from elsewhere",
        "print a configuration made from theirs, with an account of each key; any of them together",
    )
    for name, text in _SOURCES.items():
        group.add_argument(f"--from-{name}", metavar="FILE", help=text)
    group.add_argument("--ranks", type=positive, metavar="N", help="ranks on each node, where no file says it")
    group.add_argument("--nodes", type=positive, metavar="N", help="nodes, where no file says it")


def _translate(parser: Parser, arguments: argparse.Namespace, files: dict[str, str | None]) -> int:
    given = (arguments.config, arguments.seed)
    if given != (None, None) or arguments.yaml or arguments.schema or arguments.reference:
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


def configs(argv: Sequence[str]) -> int:
    parser = Parser(
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
