"""Every way in which mpdist can end, each with its exit status.

An error carries three parts, each a sentence or two: *what* is wrong (``key = value`` and where it came
from; or tensor, rank and step), *why* it is wrong, and what to *do*. A user's mistake is always one of
these classes; anything else that escapes is a bug and ends in a traceback with status 1.

    status  class             meaning
    0       -                 done
    1       any other         a bug
    2       UsageError        the request or the configuration is wrong (ConfigError holds several)
    3       DoesNotFit        the plan says that memory is too small
    4       MachineError      the machine is wrong: devices, ports, disks, missing ranks
    5       Diverged          non-finite values outlasted the patience
    6       CheckpointError   a checkpoint cannot be saved, trusted or loaded
    7       GateFailed        a comparison's gate does not hold; nothing else is wrong
    75      Preempted         stopped early with everything saved; launch again to go on
"""

from __future__ import annotations

from typing import Any


def _rebuild(kind: type[MpdistError], args: tuple[Any, ...], values: dict[str, Any]) -> MpdistError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(values)
    return error


class MpdistError(Exception):
    """Base of all expected endings. ``str()`` gives the three parts, one a line."""

    status = 1
    shared = False  # set on the ranks that were told of another one's error

    def __init__(self, what: str, why: str = "", do: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.do = what, why, do

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between ranks whole; the default would call __init__ with what alone.
        return _rebuild, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.do:
            lines.append(f"  do:  {self.do}")
        return "\n".join(lines)


class UsageError(MpdistError):
    status = 2


class ConfigError(UsageError):
    """Several things wrong with one configuration, reported at once."""

    def __init__(self, problems: list[MpdistError]) -> None:
        self.problems = problems
        count = len(problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        body = "\n".join(f"{i}. {problem}" for i, problem in enumerate(problems, 1))
        super().__init__(f"the configuration has {head}:\n{body}")


class DoesNotFit(MpdistError):
    status = 3


class MachineError(MpdistError):
    status = 4


class Diverged(MpdistError):
    status = 5
    rank: int | None = None  # where the last non-finite value arose, if that is known


class CheckpointError(MpdistError):
    status = 6


class GateFailed(MpdistError):
    status = 7


class Preempted(MpdistError):
    status = 75
