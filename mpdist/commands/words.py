"""What the commands' parsers have in common: wording, options, and how a configuration is loaded."""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from mpdist.errors import UsageError

if TYPE_CHECKING:
    from mpdist.config import Resolved

LEAST_MEMORY = 2**20  # bytes of a rank: below it a unit was forgotten

OVERRIDES = """\
KEY=VALUE sets one key for this run: the command line beats the file, the file beats its parent, the parent beats the
defaults. VALUE is read as YAML unless the key holds text; a list's element is data.train.0.path=...; KEY=null clears.
"""


STATUSES = """\
exit statuses: 0 done, 1 a bug, 2 usage or configuration, 3 does not fit, 4 the machine is wrong, 5 diverged,
6 checkpoint, 7 a comparison's gate does not hold,
75 stopped early with everything saved (launch again to go on),
130 or 143 ended at once by a second Ctrl-C or TERM (launch again to go on from the last checkpoint)
"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Our own lines stay as they are; a fixed width, since asking the terminal imports shutil and its compressors."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=100)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaints are UsageErrors like all others."""

    def __init__(self, command: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=f"mpdist {command}",
            description=description,
            epilog=epilog if STATUSES in epilog else f"{epilog.rstrip()}\n\nexit statuses: `mpdist --help` lists them",
            formatter_class=_Help,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        message = message.replace(", KEY=VALUE", "")  # argparse takes what may be missing for required
        if message.endswith(": expected one argument"):
            message = message.replace("expected one argument", "no value follows; what begins with - is no value")
        raise UsageError(f"{self.prog}: {message}", "", f"`{self.prog} --help` shows how it is used")


def with_config(parser: Parser, required: bool = True, name: str = "CONFIG", text: str = "the run's YAML file") -> None:
    parser.add_argument("config", nargs=None if required else "?", metavar=name, help=text)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings for this run")


def with_world(parser: Parser) -> None:
    parser.add_argument("--ranks", type=positive, metavar="N", help="ranks on each node (default: launch.ranks)")
    parser.add_argument("--nodes", type=positive, metavar="N", help="nodes (default: launch.nodes)")


def with_memory(parser: Parser) -> None:
    parser.add_argument("--memory", metavar="BYTES", help="a rank's memory to judge by, such as 80GiB")


def memory_of(arguments: argparse.Namespace) -> int | None:
    if arguments.memory is None:
        return None
    from mpdist.units import format_bytes, parse_bytes

    found = parse_bytes(arguments.memory)
    if found < LEAST_MEMORY:
        bare = arguments.memory.strip()
        unit = f"did you mean {bare}GiB? Else " if bare.isdecimal() and int(bare) else ""
        raise UsageError(
            f"--memory {arguments.memory}",
            f"that is {format_bytes(found)}, and nothing fits into so little",
            f"{unit}give what one rank's device has, with its unit: such as 80GiB",
        )
    return found


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def rate(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 1e-3 <= found <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 (TFLOP/s, from 0.001 to a million)")
    return found


def figure(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return found


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Options may stand anywhere among the overrides."""
    return parser.parse_intermixed_args(list(argv))


def load_config(arguments: argparse.Namespace) -> Resolved:
    # Building the schema makes many objects and no garbage: looking for some takes a tenth of the time.
    gc.disable()
    try:
        from mpdist.config import ConfigError, load

        try:
            return load(arguments.config, arguments.overrides)
        except ConfigError:
            # What is advised has to hold on the world that is asked for.
            given = [(name, getattr(arguments, name, None)) for name in ("ranks", "nodes")]
            world = [f"launch.{name}={count}" for name, count in given if count]
            if world:
                load(arguments.config, [*arguments.overrides, *world])
            raise
    finally:
        gc.enable()


def with_seed(parser: Parser) -> None:
    parser.add_argument("--seed", type=natural, metavar="K", help="train the run NAME-seedK with seed=K")


def load_seeded(arguments: argparse.Namespace) -> Resolved:
    """The configuration, or the run that a job array's task makes of it."""
    resolved = load_config(arguments)
    if arguments.seed is not None:
        name = f"{resolved.config.name}-seed{arguments.seed}"
        arguments.overrides = [*arguments.overrides, f"seed={arguments.seed}", f"name={name}"]
        resolved = load_config(arguments)
    return resolved
