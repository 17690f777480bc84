"""What telemetry costs: one run, blocks of steps with and without it, in the order A B B A, by the process's CPU time.

    OMP_NUM_THREADS=1 python tests/bench/telemetry.py [--compute fp16] [--hidden 256] [--layers 4] [--rounds 6]

A block is 10 steps of 4 rows of 128 tokens, of which telemetry measures the last. The cost is the median over rounds
of (B + B) / (A + A) - 1; the control is A / A - 1 of the same rounds, and says how much of it is the machine's noise.
CPU time counts what this process computes, not what it waits for. `inside` is the same cost as counted between the
beginning and the end of each call of telemetry's, as a share of a block without it: free of the steps' own noise, blind to
what telemetry does to their caches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny import LLAMA, config, write_text

STEPS, ROWS, LENGTH = 10, 4, 128


def session(folder: Path, asked: argparse.Namespace) -> Any:
    """The real loop, set up, which logs every tenth step and saves nothing."""
    from mpdist.config import load
    from mpdist.session import Session
    from mpdist.worker import Seat
    from mpdist.world import from_env

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    write_text(folder / "train.jsonl", 4000, longest=60)
    shape = {**LLAMA, "vocab_size": 8192, "hidden_size": asked.hidden, "intermediate_size": int(asked.hidden * 2.75),
             "num_hidden_layers": asked.layers, "num_attention_heads": asked.hidden // 32,
             "num_key_value_heads": asked.hidden // 64, "tie_word_embeddings": True}  # fmt: skip
    path = config(folder, name="bench", model__config=shape, precision__compute=asked.compute, shard__engine="ddp", data__seq_len=LENGTH,
                  batch={"micro": ROWS, "global": ROWS}, track__every=10, optim__schedule="constant", optim__warmup=None,
                  budget__steps=10**6)  # fmt: skip
    world = from_env(os.environ)
    assert world is not None
    resolved = load(path)
    made = Session(resolved, Seat(resolved, world))
    assert made.set_up()
    made.save = lambda: None  # type: ignore[method-assign]
    made.progress = None
    return made


def counted(telemetry: Any, spent: list[float]) -> None:
    """CPU seconds that pass inside telemetry's own calls are added to the last element of `spent`."""

    def inside(call: Any) -> Any:
        def timed(*args: Any) -> Any:
            before = time.process_time()
            try:
                return call(*args)
            finally:
                spent[-1] += time.process_time() - before

        return timed

    for name in ("look", "hold", "read"):
        setattr(telemetry, name, inside(getattr(telemetry, name)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute", default="fp16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    asked = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")  # a session leads its own output into its log
    from mpdist.train import loop

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        run = session(Path(folder), asked)
        begin, spent = run.telemetry.begin, [0.0]
        counted(run.telemetry, spent)
        blocks: list[tuple[str, float]] = []
        for name in ["warm-up", *"ABBA" * asked.rounds]:
            run.telemetry.begin = begin if name == "B" else lambda _: begin(False)
            run.parts.steps = run.parts.window.step + STEPS
            spent.append(0.0)
            before = time.process_time()
            loop(run)
            blocks.append((name, time.process_time() - before))
            print(f"{name}: {blocks[-1][1] / STEPS:.4f} CPU-s a step", file=sys.stderr, flush=True)
    rounds = [blocks[i : i + 4] for i in range(1, len(blocks), 4)]
    ratios = [(b1 + b2) / (a1 + a2) - 1 for (_, a1), (_, b1), (_, b2), (_, a2) in rounds]
    control = [a1 / a2 - 1 for (_, a1), _, _, (_, a2) in rounds]
    plain = statistics.median(a for name, a in blocks if name == "A") / STEPS
    inside = statistics.median(own for (name, _), own in zip(blocks, spent[1:], strict=True) if name == "B")
    told = json.dumps({"compute": asked.compute, "parameters": sum(p.tensor.numel() for p in run.parts.engine.parts),
                      "step_cpu_s": round(plain, 4), "cost": round(statistics.median(ratios), 4),
                      "control": round(statistics.median(control), 4),
                      "inside": round(inside / STEPS / plain, 4), "inside_cpu_s": round(inside, 4),
                      "costs": [round(r, 4) for r in ratios], "controls": [round(r, 4) for r in control]})  # fmt: skip
    print(told, file=out, flush=True)


if __name__ == "__main__":
    main()
