"""`python -m mpdist`: one rank, where a launcher has started it (`torchrun -m mpdist CONFIG`); else the command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mpdist import cli
from mpdist.errors import MpdistError, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in cli.COMMANDS or arguments[0].startswith("-") or arguments[0] == "help":
        return cli.main(arguments)
    if not os.path.exists(arguments[0]) and "RANK" not in os.environ and "SLURM_PROCID" not in os.environ:
        return cli.main(arguments)  # which says what is wrong with such a command
    status = cli.reported(lambda: _worker(arguments))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from mpdist import worker

        worker.spare_restarts(status)
    return status


def _worker(arguments: list[str]) -> int:
    from mpdist.world import from_env

    me = from_env(os.environ)
    if me is None:
        raise UsageError(
            f"python -m mpdist {arguments[0]}",
            "this is one rank of a run, but no launcher has said which (RANK and WORLD_SIZE are not set)",
            f"start it with `mpdist launch {arguments[0]}`, or torchrun --nproc-per-node N -m mpdist {arguments[0]}",
        )
    from mpdist.config import load

    try:
        resolved = load(arguments[0], arguments[1:])
    except MpdistError as error:
        if me.is_first:
            raise
        # Every rank reads the same file; one full message is enough.
        print(f"rank {me.rank}: the configuration is refused, rank 0 says why", file=sys.stderr)
        return error.status
    from mpdist import worker

    return worker.main(resolved, me)


if __name__ == "__main__":
    sys.exit(main())
