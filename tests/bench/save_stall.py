"""What a save costs training: written in place against written by a thread, alternated in one run of 100 M parameters.

    OMP_NUM_THREADS=1 python tests/bench/save_stall.py [--pairs 3]

Cost = time until `save` returns + what the steps behind it take longer than the median step, until the write has ended.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny import LLAMA, config, write_text


def session(folder: Path) -> Any:
    from mpdist.config import load
    from mpdist.session import Session
    from mpdist.worker import Seat
    from mpdist.world import from_env

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    write_text(folder / "train.jsonl", 2000)
    shape = {**LLAMA, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 12,
             "num_key_value_heads": 12, "vocab_size": 1024}  # fmt: skip
    path = config(folder, model__config=shape, data__seq_len=32, batch={"micro": 2, "global": 2}, shard__engine="ddp",
                  track__every=1000, budget__steps=10**6, optim__schedule="constant", optim__warmup=None,
                  checkpoint={"every": 0, "keep": 1})  # fmt: skip
    world = from_env(os.environ)
    assert world is not None
    resolved = load(path)
    run = Session(resolved, Seat(resolved, world))
    assert run.set_up()
    run.progress = None
    return run


def steps(run: Any, count: int) -> list[float]:
    from mpdist.train import attempt

    times = []
    for _ in range(count):
        begin = time.perf_counter()
        attempt(run, run.parts.feed.get(run.count.window))
        run.count.window += 1
        times.append(time.perf_counter() - begin)
    return times


def cost(run: Any, background: bool, usual: float) -> tuple[float, float]:
    """(seconds until save returns, seconds that steps lost while it was written)."""
    run.saver.background = background
    begin = time.perf_counter()
    run.save()
    stall = time.perf_counter() - begin
    lost = 0.0
    while run.saver.busy:
        lost += max(0.0, steps(run, 1)[0] - usual)
    run.reap()
    return stall, lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        run = session(Path(text))
        steps(run, 3)
        cost(run, True, 0.0)  # the host copies are made once
        parameters = sum(part.tensor.numel() for part in run.parts.engine.parts)
        rows = []
        for pair in range(asked.pairs):
            usual = statistics.median(steps(run, 5))
            for background in (True, False) if pair % 2 else (False, True):
                rows.append((background, *cost(run, background, usual)))
        print(f"{parameters:,} parameters, step {usual:.2f} s")
        for kind in (False, True):
            some = [(stall, lost) for background, stall, lost in rows if background is kind]
            name = "thread" if kind else "in place"
            print(f"{name:9} returns after {statistics.median(s for s, _ in some):.2f} s, steps lose "
                  f"{statistics.median(lost for _, lost in some):.2f} s")  # fmt: skip
        both = {kind: [s + lost for background, s, lost in rows if background is kind] for kind in (True, False)}
        ratios = [a / b for a, b in zip(both[True], both[False], strict=True)]
        print(
            f"thread / in place, all counted: {statistics.median(ratios):.2f} (each pair: {', '.join(f'{r:.2f}' for r in ratios)})"
        )


if __name__ == "__main__":
    main()
