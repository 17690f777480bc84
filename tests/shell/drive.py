"""`mpdist launch` with the fake worker: drive.py CONFIG RANKS[/NODES/NODE_RANK] [KEY=VALUE ...]. Its patience is short."""

from __future__ import annotations

import sys
from pathlib import Path

from mpdist import cli, hang, launch, supervise
from mpdist.config import load

supervise._GRACE_S = supervise._GRACE_FAILED_S = 1.5
supervise._STACK_S, hang._GRACE_S = 0.5, (1.0, 1.0)


def main() -> int:
    config, ranks, *overrides = sys.argv[1:]
    worker = [str(Path(__file__).with_name("fake_worker.py"))]
    names = ("ranks", "nodes", "node_rank")
    world = {name: int(number) for name, number in zip(names, ranks.split("/"), strict=False)}
    status = cli.reported(lambda: launch.run(load(config, overrides), worker=worker, **world))
    assert "torch" not in sys.modules, "the launcher has imported torch"
    return status


if __name__ == "__main__":
    sys.exit(main())
