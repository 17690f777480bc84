"""The `mpdist` command. Each command imports what it needs when it runs, so that help and refusals are immediate."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mpdist
from mpdist.commands.words import STATUSES
from mpdist.errors import MachineError, MpdistError, UsageError


def _in(module: str, name: str) -> Callable[[Sequence[str]], int]:
    """The command's function of that module of `mpdist.commands`, imported when it is called."""

    def command(argv: Sequence[str]) -> int:
        import importlib

        status: int = getattr(importlib.import_module(f"mpdist.commands.{module}"), name)(argv)
        return status

    return command


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "launch": (
        _in("training", "launch"),
        "train: check, plan, freeze the run directory, run torchrun, return the run's status",
    ),
    "submit": (
        _in("training", "submit"),
        "the same through Slurm: checked, kept with the run, queued again by itself when it was stopped",
    ),
    "requeue": (
        _in("training", "requeue"),
        "at the end of a batch script: queue the job again if its run was stopped early",
    ),
    "sweep": (
        _in("training", "sweep"),
        "run the arms of a comparison: same weights and data for each seed, alternated, resumable",
    ),
    "compare": (
        _in("looking", "compare"),
        "runs beside each other at matched steps and seconds, with intervals, verdicts and gates, or refused",
    ),
    "plan": (
        _in("looking", "plan"),
        "what follows from a config: bytes a rank, traffic, whether it fits, what would; of a run: planned and measured",
    ),
    "config": (
        _in("configs", "config"),
        "check a config; print every value with its origin, the JSON schema, or one made from another trainer's",
    ),
    "configs": (_in("configs", "configs"), "the configs and recipes that come with mpdist: list, show, copy"),
    "doctor": (
        _in("machine", "doctor"),
        "what is wrong with this machine, or with a config on it and its ranks' links; each with its cure",
    ),
    "fetch": (_in("machine", "fetch"), "bring what the hub holds here, for ranks that have no network"),
    "prepare": (_in("machine", "prepare"), "tokenise, pack and index the data before any GPU is held"),
    "numerics": (
        _in("machine", "numerics"),
        "the float formats checked bit by bit, and a lab that trains in emulated ones",
    ),
    "export": (_in("machine", "export"), "a folder that from_pretrained loads, from a run or a checkpoint"),
}


_BROKEN_PIPE = 141  # what a shell says of a program that SIGPIPE ended
# These do more than print: one that a broken pipe has cut short is no success.
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
        f"{STATUSES}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. What a user can cause is printed in three parts on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = reported(lambda: _dispatch(arguments))
    except BrokenPipeError:
        if not _nobody_reads():  # a pipe to another process than the reader of what is printed
            raise
        status = _BROKEN_PIPE if arguments and arguments[0] in _WORKING else 0
    finally:
        _flush()
    gc.freeze()  # the process ends here: the interpreter need not search all of it for garbage first
    return status


def _nobody_reads() -> bool:
    """Whether stdout is a pipe whose reader has gone (`mpdist config ... | head`)."""
    import select

    watch = select.poll()
    try:
        watch.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # what stands in for it in a test is no file
        return False
    return any(event & select.POLLERR for _, event in watch.poll(0))


def _flush() -> None:
    """What is left to print, else the interpreter would complain where nobody reads it. The work has its status by now."""
    if sys.stdout is None:  # closed by the shell: `>&-`
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
