"""mpdist against the HF Trainer and a bare loop: one process, one rank, same model, rows, clip, fused AdamW, BF16.

    OMP_NUM_THREADS=1 python tests/bench/throughput.py [--hidden 256] [--layers 4] [--blocks 6] [--steps 10]

Blocks of steps alternate ABBA; a figure is the median of the steps' times, from one step's beginning to the next one's,
the first three steps of a block left out. The A/A control is mpdist against itself over the same blocks: where it leaves
0.97 to 1.03 the machine was too noisy and the ratios say nothing. Calls are Python function calls a step, exact.

Also here: what the loss head needs, chunked against all logits at once (`--head`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tiny import LLAMA, config, write_text

ROWS = 4


class Size(NamedTuple):
    """hidden, layers: of the model. vocab: ids are bytes; the head is as wide as a small model's. length: of a row."""

    hidden: int
    layers: int
    vocab: int = 8192
    length: int = 128


def shape(size: Size) -> dict[str, Any]:
    hidden = size.hidden
    return {**LLAMA, "vocab_size": size.vocab, "hidden_size": hidden, "intermediate_size": int(hidden * 2.75),
            "num_hidden_layers": size.layers, "num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64,
            "tie_word_embeddings": True}  # fmt: skip


class Mpdist:
    """The real loop with its checks and logs on; stamps are the moments at which a window begins."""

    def __init__(self, folder: Path, size: Size, packed: bool = False) -> None:
        from mpdist.config import load
        from mpdist.session import Session
        from mpdist.worker import Seat
        from mpdist.world import from_env

        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        lines = write_text(folder / "train.jsonl", 4000, longest=60).read_text().splitlines()
        text = folder / "train.txt"
        text.write_text("\n".join(json.loads(line)["text"] for line in lines))  # one document
        source = {"path": str(folder / "train.jsonl" if packed else text)}
        path = config(folder, name="bench", model__config=shape(size), precision__compute="bf16",
                      shard__engine="ddp", data__seq_len=size.length, data__train=[source], batch={"micro": ROWS, "global": ROWS},
                      track__every=10, optim__schedule="constant", optim__warmup=None, budget__steps=10**6)  # fmt: skip
        world = from_env(os.environ)
        assert world is not None
        resolved = load(path)
        self.run = Session(resolved, Seat(resolved, world))
        assert self.run.set_up()
        self.run.save = lambda: None  # type: ignore[method-assign]
        self.run.progress = None
        self.stamps: list[float] = []
        self.run.seat.at = lambda *_: self.stamps.append(time.perf_counter())  # type: ignore[method-assign]

    def steps(self, count: int) -> list[float]:
        from mpdist.train import loop

        self.stamps.clear()
        self.run.parts.steps = self.run.parts.window.step + count
        loop(self.run)
        return [b - a for a, b in itertools.pairwise(self.stamps)]

    def batches(self, count: int) -> list[dict[str, torch.Tensor]]:
        """The same rows as HF takes them: labels unshifted, so that its own shift gives the same targets."""
        result = []
        for number in range(count):
            micro = self.run.parts.feed._make(number).micros[0]
            labels = torch.full_like(micro.input_ids, -100)
            shifted = torch.full((micro.input_ids.numel(),), -100)
            shifted[micro.index] = micro.targets
            labels[:, 1:] = shifted.view_as(labels)[:, :-1]
            result.append({"input_ids": micro.input_ids, "labels": labels, "position_ids": micro.position_ids})
        return result


def hf_model(size: Size) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = shape(size)
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    made.use_cache = False
    return AutoModelForCausalLM.from_config(made, dtype=torch.float32)


class Trainer:
    def __init__(self, folder: Path, size: Size, batches: list[dict[str, torch.Tensor]]) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        self.model, self.folder = hf_model(size), folder
        self.examples = [{k: v[i] for k, v in batch.items()} for batch in batches for i in range(ROWS)]

    def steps(self, count: int) -> list[float]:
        from transformers import Trainer, TrainerCallback, TrainingArguments

        stamps: list[float] = []

        class Stamp(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                stamps.append(time.perf_counter())

        arguments = TrainingArguments(
            output_dir=str(self.folder / "trainer"), per_device_train_batch_size=ROWS, max_steps=count, bf16=True, use_cpu=True,
            optim="adamw_torch_fused", max_grad_norm=1.0, logging_steps=10**6, save_strategy="no", report_to="none",
            lr_scheduler_type="constant", disable_tqdm=True, learning_rate=1e-3, weight_decay=0.1, dataloader_pin_memory=False,
        )  # fmt: skip
        Trainer(self.model, arguments, train_dataset=self.examples, callbacks=[Stamp()]).train()
        return [b - a for a, b in itertools.pairwise(stamps)]


class Bare:
    """The shortest loop that keeps FP32 masters: autocast, fused AdamW, clip, scheduler."""

    def __init__(self, size: Size, batches: list[dict[str, torch.Tensor]]) -> None:
        self.model = hf_model(size).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        self.batches, self.at = batches, 0

    def step(self) -> None:
        batch = self.batches[self.at % len(self.batches)]
        self.at += 1
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - begin)
        return times


def calls(steps: Callable[[int], Any], short: int = 10, long: int = 30) -> float:
    """Python calls of one steady step: the difference of two runs, so that what surrounds the steps cancels."""
    counts = []
    for count in (short, long):
        seen = 0

        def look(_: Any, event: str, __: Any) -> None:
            nonlocal seen
            seen += event == "call"

        sys.setprofile(look)
        try:
            steps(count)
        finally:
            sys.setprofile(None)
        counts.append(seen)
    return (counts[1] - counts[0]) / (long - short)


def head() -> dict[str, float]:
    """Loss head at vocabulary 49,152, hidden 512, 2,048 positions, FP32 and BF16: peak bytes and time against all at once."""
    from mpdist.loss import head_loss
    from mpdist.plan_memory import loss_chunk_rows

    found: dict[str, float] = {}
    vocab, hidden, rows = 49152, 512, 2048
    for dtype in (torch.float32, torch.bfloat16):
        states = torch.randn(1, rows, hidden, dtype=dtype)
        weight = (torch.randn(vocab, hidden) * 0.02).to(dtype)
        targets = torch.randint(0, vocab, (rows,))

        def chunked(states: Any = states, weight: Any = weight, targets: Any = targets) -> None:
            h, w = states.clone().requires_grad_(), weight.clone().requires_grad_()
            chunk = loss_chunk_rows(vocab, rows, "auto")
            head_loss(h, w, None, torch.arange(rows), targets, torch.tensor(1 / rows), chunk)[0].backward()

        def full(states: Any = states, weight: Any = weight, targets: Any = targets) -> None:
            h, w = states.clone().requires_grad_(), weight.clone().requires_grad_()
            logits = torch.nn.functional.linear(h[0], w).float()
            torch.nn.functional.cross_entropy(logits, targets).backward()

        times: dict[str, list[float]] = {"chunked": [], "full": [], "again": []}
        for _ in range(5):
            for name, act in (("chunked", chunked), ("full", full), ("again", chunked)):
                begin = time.perf_counter()
                act()
                times[name].append(time.perf_counter() - begin)
        name = str(dtype).removeprefix("torch.")
        medians = {k: statistics.median(v) for k, v in times.items()}
        found[f"{name} peak ratio"] = peak(chunked) / peak(full)
        found[f"{name} time ratio"] = medians["chunked"] / medians["full"]
        found[f"{name} A/A"] = medians["chunked"] / medians["again"]
    return found


def peak(act: Callable[[], None]) -> float:
    """Most bytes in live tensors while `act` runs, by torch's own tracker."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    with tracker:
        act()
    return float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=6, help="blocks of each arm")
    parser.add_argument("--steps", type=int, default=12, help="steps of a block")
    parser.add_argument("--packed", action="store_true", help="short documents share a row, instead of one long text")
    parser.add_argument("--head", action="store_true", help="only the loss head")
    parser.add_argument("--calls", action="store_true", help="only Python calls a step, against the bare loop, as JSON")
    asked = parser.parse_args()
    size = Size(asked.hidden, asked.layers)
    if asked.calls:
        size = size._replace(vocab=264, length=32)  # no call depends on it
        with tempfile.TemporaryDirectory() as text:
            ours = Mpdist(Path(text), size)
            bare = Bare(size, ours.batches(50))
            ours.steps(5)
            bare.steps(5)
            print(json.dumps({"mpdist": calls(ours.steps), "bare": calls(bare.steps)}))
        return
    if asked.head:
        for name, value in head().items():
            print(f"{name:24} {value:.3f}")
        return
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        ours = Mpdist(folder, size, asked.packed)
        batches = ours.batches(50)
        arms: dict[str, Any] = {
            "mpdist": ours,
            "trainer": Trainer(folder, size, batches),
            "bare": Bare(size, batches),
        }
        for arm in arms.values():
            arm.steps(5)  # imports, first allocations, the ledger
        count = {name: calls(arm.steps) for name, arm in arms.items()}
        times: dict[str, list[float]] = {name: [] for name in (*arms, "again")}
        for block in range(asked.blocks):
            order = ["mpdist", "trainer", "bare", "again"]
            for name in order if block % 2 == 0 else order[::-1]:
                arm = arms["mpdist" if name == "again" else name]
                times[name].append(statistics.median(arm.steps(asked.steps)[3:]))
    tokens = ROWS * size.length
    print(
        f"{sum(p.numel() for p in arms['bare'].model.parameters()):,} parameters, {ROWS} x {size.length}, torch {torch.__version__}"
    )
    print(f"{'arm':10}{'ms a step':>12}{'slots/s':>12}{'calls':>10}{'mpdist is':>12}")
    for name in arms:
        ratio = statistics.median(b / a for a, b in zip(times["mpdist"], times[name], strict=True))
        ms = 1000 * statistics.median(times[name])
        print(f"{name:10}{ms:12.1f}{tokens / ms * 1000:12.0f}{count[name]:10.0f}{ratio:11.3f}x")
    control = statistics.median(b / a for a, b in zip(times["mpdist"], times["again"], strict=True))
    print(f"A/A control {control:.3f}; calls against the bare loop {count['mpdist'] / count['bare']:.3f}")


if __name__ == "__main__":
    main()
