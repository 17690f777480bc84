"""Whether the engines agree: the same training under every engine and stage, side by side.

`python tests/agreement.py` trains all of CASES, prints for each two engines the largest difference in loss, gradient norm
and weights, looks for drift, writes the table into the README, and fails where a bound does not hold. Words after it
choose the cases whose names hold one of them; the README is then left alone.

Drift is a bias that hides inside a tolerance. Over several seeds, which draw both the weights and the data, each
engine's mean residual against `ddp` is tested against zero: of the loss, of the gradient's norm before the clip and
after it, and of the length of all weights.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import engines
import worlds
from engines import LAYOUTS, Rig, Rows

README = Path(__file__).resolve().parents[1] / "README.md"
REFERENCE = "ddp"
ON_TWO = ("ddp", "fsdp2-2", "fsdp2-3", "zero-1", "zero-2", "zero-3")
ON_FOUR = ("ddp", "fsdp2-2", "fsdp2-3", "hsdp-2x2", "zero-1", "zero-2", "zero-3")
OVERFLOWS = (1, 2, 6)  # attempts at which rank 1 overflows in the FP16 cases
LR, SPAN = 2e-3, 60
ALPHA = 1e-3  # over all tests of a table together
FLOOR = 1e-8  # of a mean residual: what is smaller is agreement, whatever its sign


class Bound(NamedTuple):
    """The largest differences that are still agreement. loss: absolute; norm: relative; weights: L2 of all of them,
    relative too."""

    loss: float
    norm: float
    weights: float


EXACT = Bound(1e-6, 1e-6, 1e-5)
NEAR = Bound(2e-6, 5e-6, 1e-5)  # FP32 where more is between: dropout leaves gradients that nearly cancel
ROUNDED = Bound(2e-3, 2e-3, 1e-3)  # 16-bit compute or wire: what a rounding the other way becomes in the end


@dataclass(frozen=True)
class Case:
    """name: as the table has it. options: of engines.rig; model: changes of engines.TINY. rows: in a window."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    bound: Bound = NEAR
    model: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    engines: tuple[str, ...] = ON_TWO
    steps: int = 50
    seeds: int = 10
    micro: int = 2
    overflows: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return 2 * self.micro * self.ranks  # two micro-batches a rank


_BF16: dict[str, Any] = {"compute": "bf16"}
_FP16: dict[str, Any] = {"compute": "fp16"}
_SHORT: dict[str, Any] = {"steps": 10, "seeds": 6}
_EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
_GPT2 = {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": True}
PLAIN = Case("FP32, clip", {"clip": 1.2}, EXACT)
HALF = Case("BF16, clip", {**_BF16, "clip": 1.2}, ROUNDED)
DRILLED = Case(
    f"FP16, overflows at attempts {', '.join(map(str, OVERFLOWS))}, scale grows every 3 steps",
    {**_FP16, "scale": {"interval": 3}}, ROUNDED, overflows=OVERFLOWS, **{**_SHORT, "steps": 20},
)  # fmt: skip
CONTROL = replace(
    HALF,
    name="control",
    options={**_BF16, "clip": 1.0},
    model={"num_hidden_layers": 1},
    engines=("ddp",),
    steps=15,
    seeds=8,
)
CASES = [
    PLAIN,
    HALF,
    DRILLED,
    Case("FP32, once a window", {"every": False}, **_SHORT),
    Case("BF16, once a window", {**_BF16, "every": False}, ROUNDED, **_SHORT),
    *(
        Case(f"FP32 with {'an' if wire == 'fp16' else 'a'} {wire.upper()} wire, sum {'fp32' if fp32 else 'wire'}",
             {"wire": wire, "sum_fp32": fp32, "every": False}, ROUNDED, **_SHORT)
        for wire in ("bf16", "fp16") for fp32 in (True, False)
    ),
    Case("BF16 with a BF16 wire, each micro-batch", {**_BF16, "wire": "bf16"}, ROUNDED, **_SHORT),
    Case("FP16 with an FP16 wire, sum wire", {**_FP16, "wire": "fp16", "sum_fp32": False}, ROUNDED, **_SHORT),
    Case("FP32, tied weights", model={"tie_word_embeddings": True}, **_SHORT),
    Case("BF16, tied weights", _BF16, ROUNDED, {"tie_word_embeddings": True}, **_SHORT),
    Case("FP32, embedding and first layer frozen", {"freeze": ("model.embed*", "*.layers.0.*")}, **_SHORT),
    *(
        Case(f"FP32, checkpointing {mode}, dropout", {"checkpointing": mode}, model={"attention_dropout": 0.1}, **_SHORT)
        for mode in ("full", "selective", "every 2")
    ),
    Case("BF16, checkpointing full", {**_BF16, "checkpointing": "full"}, ROUNDED, **_SHORT),
    Case("FP32, mixture of experts", model=_EXPERTS, **_SHORT),
    Case("FP32, GPT-2", model=_GPT2, **_SHORT),
    Case("FP32, 3 ranks", {"clip": 1.2}, ranks=3, micro=1, **_SHORT),
    Case("BF16, 3 ranks", {**_BF16, "clip": 1.2}, ROUNDED, ranks=3, micro=1, **_SHORT),
    Case("FP32, 4 ranks", {"clip": 1.2}, ranks=4, engines=ON_FOUR, micro=1, **_SHORT),
    Case("BF16, 4 ranks", {**_BF16, "clip": 1.2}, ROUNDED, ranks=4, engines=ON_FOUR, micro=1, **_SHORT),
    Case("FP32, 2 nodes of 2 ranks", {"local": 2}, ranks=4, engines=ON_FOUR, micro=1, **_SHORT),
    Case("FP32 with a BF16 wire, 2 nodes of 2 ranks", {"local": 2, "wire": "bf16", "every": False}, ROUNDED, ranks=4,
         engines=ON_FOUR, micro=1, **_SHORT),
]  # fmt: skip


# -- training ---------------------------------------------------------------------------------------------------------


@dataclass
class Course:
    """One seed under one engine. scales, applied: by attempt; the others by applied step. seen: the norm of what the
    optimizer got. weights: every master, whole."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> float:
        return math.sqrt(sum(w.double().square().sum().item() for w in self.weights.values()))


def text(case: Case, seed: int, step: int) -> Rows:
    """Rows in which a token is mostly followed by the same other one, so that there is something to learn. The share of
    label tokens differs from row to row; the first has none."""
    import torch

    vocab = engines.TINY["vocab_size"]
    follower = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
    g = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
    ids = torch.randint(0, vocab, (case.rows, 17), generator=g)
    for at in range(1, 17):
        follows = torch.rand(case.rows, generator=g) < 0.8
        ids[:, at] = torch.where(follows, follower[ids[:, at - 1]], ids[:, at])
    share = torch.rand(case.rows, 1, generator=g)
    share[0] = 0.0
    keep = torch.rand(case.rows, 16, generator=g) < share
    keep[-1, 0] = True  # never a window without any
    return Rows(ids[:, :-1].contiguous(), torch.where(keep, ids[:, 1:], engines.IGNORED))


def train(rank: int, case: Case, engine: str, fault: str = "") -> list[Course]:
    """Collective. One engine, made once, and a course with each seed. fault: one of FAULTS."""
    layout = LAYOUTS[engine]
    made = engines.rig(
        rank,
        layout.engine,
        layout.stage,
        layout.replicas,
        **{"every": engine != "zero-1", **case.options},
        **case.model,
    )
    window = made.window
    courses = []
    for seed in range(case.seeds):
        made.window = copy.copy(window)
        if seed:  # an engine is made with the weights of the first
            restart(made, case, seed)
        if fault:
            FAULTS[fault](made)
        courses.append(run_course(made, case, seed))
    return courses


def restart(made: Rig, case: Case, seed: int) -> None:
    """Collective. The weights of this seed, and nothing of an earlier one."""
    import torch

    from mpdist import model as models

    source = models.Source(None, {**engines.TINY, **case.model}, seed)
    read, _, _ = models.open_weights(source, models.read_config(source), made.engine.module, torch.device("cpu"))
    made.engine.load(read)
    made.engine.clear()
    made.engine.refresh()
    made.optimizer.adam.state.clear()


def run_course(made: Rig, case: Case, seed: int) -> Course:
    import torch
    import torch.distributed as dist

    from mpdist.optim import schedule, square_sum

    course, lr, own_step = Course(), schedule("linear", LR, 3, SPAN), type(made.optimizer).step

    def step(gradients: list[Any], rate: float) -> None:
        squares = square_sum(gradients) / made.engine.replicas
        dist.all_reduce(squares)
        course.seen.append(squares.sqrt().item())
        course.lrs.append(rate)
        own_step(made.optimizer, gradients, rate)

    made.optimizer.step = step
    while made.window.step < case.steps:
        coming, number = made.window.step + 1, made.window.attempt + 1
        where = f"{seed}/{coming}/{made.rank}".encode()  # dropout, as the loop seeds it
        torch.manual_seed(int.from_bytes(hashlib.blake2b(where, digest_size=8).digest(), "little") >> 1)
        poison = 0 if number in case.overflows and made.rank == 1 else None
        decision, loss = made.attempt(text(case, seed, coming), case.micro, lr(coming), poison)
        course.scales.append(decision.scale)
        course.applied.append(decision.applied)
        if decision.applied:
            course.losses.append(loss)
            course.norms.append(decision.norm)
    course.weights = made.full()
    return course


def courses(rank: int, jobs: list[tuple[Case, str, str]]) -> list[list[Course]]:
    """On each rank: (case, engine, fault) one after another in the same process."""
    return [train(rank, *job) for job in jobs]


def run(jobs: list[tuple[Case, str, str]], timeout: float) -> dict[tuple[str, str, str], list[Course]]:
    """(name of the case, engine, fault) -> its courses. One world for each number of ranks."""
    found = {}
    for ranks in sorted({case.ranks for case, _, _ in jobs}):
        own = [job for job in jobs if job[0].ranks == ranks]
        for (case, engine, fault), result in zip(own, worlds.run(courses, ranks, own, timeout=timeout)[0], strict=True):
            found[case.name, engine, fault] = result
    return found


# -- faults that must be found ----------------------------------------------------------------------------------------


def _factor(made: Rig) -> None:
    """Gradients are a thousandth too large."""
    own = type(made.engine).gradients
    made.engine.gradients = lambda: [gradient.mul_(1.001) for gradient in own(made.engine)]


def _clip(made: Rig) -> None:
    """The clip divides by a norm that is a hundredth too large."""
    own = type(made.window).close

    def close(verdict: Any) -> Any:
        decision = own(made.window, verdict)
        clipped = made.window.clip is not None and decision.norm > made.window.clip
        return replace(decision, factor=decision.factor / 1.01) if clipped else decision

    made.window.close = close  # type: ignore[method-assign]


def _twice(made: Rig) -> None:
    """Rank 1's addend of one matrix counts twice."""
    name = "model.layers.0.self_attn.v_proj.weight"
    param = dict(made.engine.module.named_parameters())[name]
    if made.rank == 1 and not hasattr(param, "hurt"):
        param.hurt = param.register_hook(lambda gradient: 2 * gradient)


def _rate(made: Rig) -> None:
    """The learning rate is four thousandths too large."""
    own = type(made.optimizer.adam).step

    def step() -> None:
        for group in made.optimizer.adam.param_groups:
            group["lr"] *= 1.004
        own(made.optimizer.adam)

    made.optimizer.adam.step = step  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[Rig], None]] = {"factor": _factor, "clip": _clip, "twice": _twice, "rate": _rate}


# -- what came out ----------------------------------------------------------------------------------------------------


def gap(found: list[Course], wanted: list[Course]) -> Bound:
    """The largest differences over all seeds and steps."""
    loss = norm = weights = 0.0
    for a, b in zip(found, wanted, strict=True):
        loss = max(loss, *(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True)))
        norm = max(norm, *(abs(x - y) / y for x, y in zip(a.norms, b.norms, strict=True)))
        weights = max(weights, engines.relative(a.weights, b.weights))
    return Bound(loss, norm, weights)


def within(found: Bound, bound: Bound) -> bool:
    return all(value <= limit for value, limit in zip(found, bound, strict=True))


def figures(course: Course) -> dict[str, float]:
    """Means over the steps: what is compared seed by seed."""

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values)

    return {
        "loss": mean(course.losses),
        "norm": mean([math.log(value) for value in course.norms]),
        "norm after the clip": mean([math.log(value) for value in course.seen]),
        "length of the weights": math.log(course.length),
    }


class Drift(NamedTuple):
    """bias: mean over seeds of the mean residual. p: adjusted for all tests of the table (Holm)."""

    bias: float
    p: float

    @property
    def found(self) -> bool:
        return abs(self.bias) > FLOOR and self.p < ALPHA


def drifts(pairs: dict[Any, tuple[list[Course], list[Course]]]) -> dict[tuple[Any, str], Drift]:
    """pairs: key -> (an engine's courses, the reference's), by seed. A paired t-test for each figure of each."""
    from scipy import stats

    raw: dict[tuple[Any, str], Drift] = {}
    for key, (found, wanted) in pairs.items():
        ours, theirs = [figures(course) for course in found], [figures(course) for course in wanted]
        for name in ours[0]:
            a, b = [values[name] for values in ours], [values[name] for values in theirs]
            bias = math.fsum(x - y for x, y in zip(a, b, strict=True)) / len(a)
            p = 1.0 if abs(bias) <= FLOOR else float(stats.ttest_rel(a, b).pvalue)
            raw[key, name] = Drift(bias, p)
    adjusted, least = {}, 0.0
    for done, key in enumerate(sorted(raw, key=lambda k: raw[k].p)):
        least = min(1.0, max(least, raw[key].p * (len(raw) - done)))
        adjusted[key] = Drift(raw[key].bias, least)
    return adjusted


# -- the table --------------------------------------------------------------------------------------------------------

Results = dict[tuple[str, str, str], list[Course]]
Drifts = dict[tuple[Any, str], Drift]


def columns() -> dict[str, str]:
    """Engine of LAYOUTS -> the head of its column."""
    heads = {}
    for name in ON_FOUR:
        layout = LAYOUTS[name]
        heads[name] = f"`{layout.engine}` {layout.stage}" + (", 2 replicas" if layout.replicas > 1 else "")
    return heads


def short(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-") if value else "0"


def cell(found: Bound) -> str:
    return "the same bits" if not any((found.loss, found.weights)) else " / ".join(map(short, found))


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])


def row(case: Case, results: Results, drifted: Drifts) -> list[str]:
    plain = results[case.name, REFERENCE, ""]
    cells = [case.name]
    for name in columns():
        if name == REFERENCE:
            cells.append(f"{plain[0].losses[0]:.3f} to {plain[0].losses[-1]:.3f}")
        else:
            cells.append(cell(gap(results[case.name, name, ""], plain)) if name in case.engines else "")
    own = [drift for (key, _), drift in drifted.items() if key[0] == case.name]
    found = [f"{key[1]}: {figure}" for (key, figure), drift in drifted.items() if key[0] == case.name and drift.found]
    return [*cells, f"{case.seeds} x {case.steps}", ", ".join(found) or f"none, p = {min(d.p for d in own):.2g}"]


def control_row(fault: str, results: Results, drifted: Drifts) -> list[str]:
    off = gap(results[CONTROL.name, REFERENCE, fault], results[CONTROL.name, REFERENCE, ""])
    found = {figure: d for (key, figure), d in drifted.items() if key == (CONTROL.name, REFERENCE, fault) and d.found}
    what = (FAULTS[fault].__doc__ or "").rstrip(".")
    return [what, short(off.loss), ", ".join(f"{figure} (p = {d.p:.0e})" for figure, d in found.items()) or "not found"]


def pairs_of(results: Results) -> dict[Any, tuple[list[Course], list[Course]]]:
    """What `drifts` takes: everything beside the reference of its case."""
    return {
        key: (found, results[key[0], REFERENCE, ""]) for key, found in results.items() if key[1:] != (REFERENCE, "")
    }


def gaps(case: Case, results: Results) -> dict[tuple[str, str], Bound]:
    """Of each two engines of the case."""
    return {
        (a, b): gap(results[case.name, b, ""], results[case.name, a, ""])
        for a, b in itertools.combinations(case.engines, 2)
    }


def faults_of(case: Case, results: Results) -> list[str]:
    """A line for each two engines of the case that are farther apart than its bound."""
    return [
        f"{case.name}: {a} and {b} are {found} apart, allowed are {case.bound}"
        for (a, b), found in gaps(case, results).items()
        if not within(found, case.bound)
    ]


def report(cases: list[Case], results: Results) -> tuple[str, list[str]]:
    """(the README's part, what is wrong)."""
    pairs = pairs_of(results)
    true, controls = ({k: v for k, v in pairs.items() if bool(k[2]) is hurt} for hurt in (False, True))
    drifted, hurt = drifts(true), drifts(controls)
    wrong, rows = [], []
    for case in cases:
        print(case.name)
        for (a, b), found in gaps(case, results).items():
            print(f"    {a:8} {b:8}  loss {found.loss:8.1e}  norm {found.norm:8.1e}  weights {found.weights:8.1e}")
        wrong += faults_of(case, results)
        rows.append(row(case, results, drifted))
    wrong += [
        f"drift: {key[0]}, {key[1]}, {figure}: {drift}" for (key, figure), drift in drifted.items() if drift.found
    ]
    below = [control_row(fault, results, hurt) for fault in FAULTS]
    wrong += [f"control not found: {line[0]}" for line in below if line[-1] == "not found"]
    head = ["training", *columns().values(), "seeds x steps", "drift"]
    text = markdown(head, rows) + "\n\n" + markdown(["fault put into `ddp` in BF16", "loss", "drift found in"], below)
    return text, wrong


def main(words: list[str]) -> int:
    cases = [case for case in CASES if not words or any(word in case.name for word in words)]
    jobs = [(case, engine, "") for case in cases for engine in case.engines]
    jobs += [(CONTROL, REFERENCE, fault) for fault in ("", *FAULTS)]
    text, wrong = report(cases, run(jobs, timeout=3000.0))
    print(text)
    print("\n".join(wrong))
    if not words and not wrong:
        part = re.compile(r"(<!-- begin agreement -->\n).*?(<!-- end agreement -->)", re.DOTALL)
        readme = README.read_text("utf-8")
        README.write_text(part.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", readme), "utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
