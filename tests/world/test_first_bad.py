"""The first value that is not finite, planted in every place where one can arise, and named the same by every rank.

One run of each engine meets five kinds of trouble, one after another, with good windows between them; the same run without
replays must end with the same bits.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import watched

pytestmark = pytest.mark.world

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"shard": {"engine": "ddp"}},
    "fsdp2-2": {"shard": {"engine": "fsdp2", "stage": 2}, "memory": {"checkpointing": "full"}},
    "fsdp2-3": {"shard": {"engine": "fsdp2", "stage": 3}},
    "zero-1": {"shard": {"engine": "deepspeed", "stage": 1}},
    "zero-2": {"shard": {"engine": "deepspeed", "stage": 2}},
    "zero-3": {"shard": {"engine": "deepspeed", "stage": 3}, "memory": {"checkpointing": "full"}},
}
PLAIN = ("fsdp2-3", "zero-1", "zero-3")  # engines that also run without replays: ddp has no state that these have not
SPOILT = ("ddp", "fsdp2-3", "zero-3")  # engines that also train from bad weights
FORWARD, BACKWARD, LOSS, GRADIENT, ONCE = 2, 4, 6, 8, 10  # attempts
WEIGHT = "model.layers.1.mlp.up_proj.weight"


class _State:
    """Of this process: which attempt and which micro-batch are under way, and whether they are for the first time."""

    number = micro = rank = 0
    again = False
    planted = False


def _spoil() -> Any:
    import torch

    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            ctx.active = (_State.number, _State.micro, _State.rank) == (BACKWARD, 1, 0)
            return value.view_as(value)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * math.nan if ctx.active else gradient

    return Spoil


def plant(model: Any) -> None:
    """inf in the forward of layer 3 on rank 1, micro-batch 2; NaN in the backward of layer 2 on rank 0, micro-batch 1; NaN
    in a forward that is never seen again."""

    def count(*_: Any) -> None:
        _State.micro += 1

    def spoil(_: Any, __: Any, output: Any) -> Any:
        here = _State.micro, _State.rank
        if (_State.number, *here) == (FORWARD, 2, 1):
            output = output.clone()
            output[1, 3, 5] = math.inf
        if (_State.number, *here) == (ONCE, 2, 1) and not _State.again:
            output = output * math.nan
        return output

    model.register_forward_pre_hook(count)
    model.model.layers[3].mlp.down_proj.register_forward_hook(spoil)
    up, spoiling = model.model.layers[2].mlp.up_proj, _spoil()
    own = up.forward
    up.forward = lambda value: spoiling.apply(own(value))


def forget_groups() -> None:
    """DeepSpeed keeps the process groups of a session that is over."""
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    for name, value in vars(groups).items():
        if name.startswith("_") and not name.startswith("__") and not callable(value):
            setattr(groups, name, {} if isinstance(value, dict) else None)


def arm(planted: list[bool]) -> list[Any]:
    """Before each session of a rank: the reports that it will make go into what is returned."""
    import torch.distributed as dist

    from mpdist import diagnose, train
    from mpdist.session import Session

    reports: list[Any] = []
    if not hasattr(_State, "own"):
        _State.own = diagnose.explain, train.micros, Session.get_ready, iter(planted)  # type: ignore[attr-defined]
    explain, micros, get_ready, following = _State.own  # type: ignore[attr-defined]
    wanted = next(following)
    forget_groups()

    def told(*args: Any) -> Any:
        reports.append(explain(*args))
        return reports[-1]

    def counted(s: Any, batch: Any, number: int, scale: float, trace: Any = None) -> Any:
        _State.number, _State.micro, _State.again = number, 0, trace is not None
        return micros(s, batch, number, scale, trace)

    def ready(self: Any, mode: str) -> None:
        get_ready(self, mode)
        _State.rank = dist.get_rank()
        if wanted:
            plant(self.parts.module)

    diagnose.explain, train.micros, Session.get_ready = told, counted, ready  # type: ignore[assignment, method-assign]
    return reports


def spoilt(folder: Path, name: str, rows: tuple[int, ...]) -> str:
    """A model's folder with NaN in these rows of one weight."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**tiny.LLAMA, "num_hidden_layers": 4}
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    with torch.no_grad():
        for row in rows:
            made.state_dict()[name][row, 2:4] = math.nan
    made.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, watched.Watched]:
    folder = tmp_path_factory.mktemp("bad")
    model = {"config": {**tiny.LLAMA, "num_hidden_layers": 4, "attention_dropout": 0.1}}
    drill = {
        "nan_loss_at": {"attempts": [LOSS], "rank": 1},
        "overflow_at": {"attempts": [GRADIENT], "rank": 1, "micro": 2},
    }
    changes: list[dict[str, Any]] = []
    for name, engine in ENGINES.items():
        long = {**engine, "model": model, "drill": drill, "budget__steps": 6, "precision": {"compute": "bf16"}}
        wire = {"wire": "fp16", **({"sum": "wire"} if name.startswith("zero") else {})}
        changes += [
            {**long, "name": name},
            {
                **engine,
                "name": f"{name}-wire",
                "budget__steps": 1,
                "reduce": wire,
                "precision__scale": {"init": 2.0**22},
            },
        ]
        if name in PLAIN:
            changes.append({**long, "name": f"{name}-off", "track__replay": "off"})
    embedding = spoilt(folder / "embedding", "model.embed_tokens.weight", (used_row(),))
    weight = spoilt(folder / "weight", WEIGHT, (-1, -2))
    for name in SPOILT:
        for what, path in (("embedding", embedding), ("weight", weight)):
            changes.append({**ENGINES[name], "name": f"{name}-{what}", "model": {"path": path}, "budget__steps": 1,
                            "precision": {"compute": "bf16", "scale": {"patience": 1}}})  # fmt: skip
    for change in changes:
        change["data__seq_len"] = 32
    planted = [change["name"] in ENGINES or change["name"].endswith("-off") for change in changes]
    found = watched.sessions(folder, 2, changes, arm=functools.partial(arm, planted), timeout=600.0)
    return {run.folder.name: run for run in found}


def used_row() -> int:
    """The embedding's row of a letter that most samples have."""
    from mpdist.data.tokens import byte_tokenizer

    (row,) = byte_tokenizer()("t", add_special_tokens=False)["input_ids"]
    return int(row)


def reports(run: watched.Watched) -> list[Any]:
    """What every rank was told, after a look that all were told the same and that the record has it."""
    mine, other = (rank.probe for rank in run.ranks)
    # repr: unknown magnitudes are nan, which equals nothing
    assert [repr(report) for report in mine] == [repr(report) for report in other]
    events = run.events("finding")
    assert [event["reason"] for event in events] == [report.sentence for report in mine]
    for event, report in zip(events, mine, strict=True):
        assert event["rank"] == report.rank
        assert (event["kind"], event["reproduced"]) == (report.facts["kind"], report.facts["reproduced"])
    return list(mine)


def rows(run: watched.Watched, attempt: int, micro: int, rank: int) -> list[int]:
    return run.ranks[rank].attempts[attempt - 1].rows[micro - 1]


@pytest.mark.parametrize("name", ENGINES)
def test_each_planted_fault_is_named_exactly(
    runs: dict[str, watched.Watched], name: str, figure: Callable[[str], None]
) -> None:
    run = runs[name]
    assert run.status == 0, run.message
    assert [event["attempt"] for event in run.events("finding")] == [FORWARD, BACKWARD, LOSS, GRADIENT, ONCE]
    forward, backward, loss, gradient, once = reports(run)
    for event, report in zip(run.events("finding"), reports(run), strict=True):
        figure(f"attempt {event['attempt']}, the same on both ranks: {report.sentence}")

    place = {"kind": "forward", "module": "model.layers.3.mlp.down_proj", "tensor": "output", "index": [1, 3, 5], "micro": 2,
             "value": "inf", "count": 1, "last_good": "model.layers.3.mlp.act_fn", "bad_loss": True, "lower_scale": False}  # fmt: skip
    # What was finite right before is the layer's other projection or its activation, whichever ran last.
    assert forward.facts.pop("last_good") in ("model.layers.3.mlp.act_fn", "model.layers.3.mlp.up_proj")
    place.pop("last_good")
    assert place.items() <= forward.facts.items()
    assert (forward.rank, forward.facts["rows"]) == (1, [rows(run, FORWARD, 2, 1)[1]])
    assert 0 < forward.facts["largest_in"] < 100
    assert 0 < forward.facts["largest_out"] < 100
    assert "micro-batch 2" in forward.sentence

    place = {"kind": "backward", "module": "model.layers.2.mlp.up_proj", "op": "SpoilBackward", "micro": 1, "value": "nan",
             "tensor": "the gradient of input 0", "bad_loss": False, "places": 1}  # fmt: skip
    assert place.items() <= backward.facts.items()
    assert (backward.rank, backward.facts["rows"]) == (0, rows(run, BACKWARD, 1, 0))
    assert backward.facts["last_good"].startswith("model.layers.2.mlp")
    assert 0 < backward.facts["largest_in"] < 100

    assert (loss.facts["kind"], loss.rank, loss.facts["micro"]) == ("loss", 1, 1)
    assert loss.facts["rows"] == rows(run, LOSS, 1, 1)
    assert "although weights and every module's output are finite" in loss.sentence

    assert (gradient.facts["kind"], gradient.rank, gradient.facts["count"]) == ("addend", 1, 1)
    assert gradient.facts["micro"] == (None if name == "zero-1" else 2)  # there gradients travel once a window
    assert gradient.sentence.startswith(f"gradients: non-finite in {gradient.facts['parameter']}")

    assert (once.facts["kind"], once.facts["reproduced"], once.rank) == ("none", False, 1)
    assert once.sentence.endswith("the replay was clean: not reproducible, suspect hardware or a race")


@pytest.mark.parametrize("name", PLAIN)
def test_a_replay_leaves_no_bit_behind(runs: dict[str, watched.Watched], name: str) -> None:
    looked, plain = runs[name], runs[f"{name}-off"]
    assert plain.status == 0, plain.message
    assert all(not event["replayed"] for event in plain.events("finding"))
    for one, other in zip(looked.ranks, plain.ranks, strict=True):
        assert one.digests == other.digests
        assert [a.state for a in one.attempts] == [a.state for a in other.attempts]
        assert [a.rows for a in one.attempts] == [a.rows for a in other.attempts]
        assert [repr(a.loss) for a in one.attempts] == [repr(a.loss) for a in other.attempts]
    assert tiny.timeless(looked.rows()) == tiny.timeless(plain.rows())
    states = [{p.name: p.read_bytes() for p in run.folder.glob("checkpoints/*/rng/*")} for run in (looked, plain)]
    assert len(states[0]) == 2
    assert states[0] == states[1]


@pytest.mark.parametrize("name", ENGINES)
def test_an_overflow_of_the_wire_alone_is_the_scale_s_to_cure(
    runs: dict[str, watched.Watched], name: str, figure: Callable[[str], None]
) -> None:
    run = runs[f"{name}-wire"]
    assert run.status == 0, run.message
    first = reports(run)[0]
    figure(first.sentence)
    assert (first.facts["kind"], first.facts["dtype"], first.facts["bad_loss"]) == ("wire", "float16", False)
    assert first.facts["lower_scale"] is True
    assert "every rank's own gradients are finite" in first.sentence
    assert "a lower loss scale cures it" in first.sentence
    skips = len(run.events("skip"))
    assert skips > 1
    assert len(run.events("finding")) == 1 + skips // 8, "the usual falls of a scale cost one replay"


@pytest.mark.parametrize("name", SPOILT)
def test_a_bad_weight_is_named_with_where_it_shows_first(
    runs: dict[str, watched.Watched], name: str, figure: Callable[[str], None]
) -> None:
    run = runs[f"{name}-embedding"]
    assert [rank.status for rank in run.ranks] == [5, 5]
    (report,) = reports(run)
    figure(report.sentence)
    place = {"kind": "weight", "parameter": "model.embed_tokens.weight", "parameter_index": [used_row(), 2], "parameter_count": 2,
             "module": "model.embed_tokens", "lower_scale": False, "micro": 1}  # fmt: skip
    assert place.items() <= report.facts.items()
    assert report.sentence in run.message
    run = runs[f"{name}-weight"]
    (report,) = reports(run)
    height = tiny.LLAMA["intermediate_size"]
    place = {"kind": "weight", "parameter": WEIGHT, "parameter_index": [height - 2, 2], "parameter_count": 4,
             "module": "model.layers.1.mlp.up_proj"}  # fmt: skip
    assert place.items() <= report.facts.items()
    assert "Infinity" not in (text := (run.folder / "events.jsonl").read_text())
    assert "NaN" not in text
    assert all(json.loads(line) for line in text.splitlines())


def test_which_attempts_are_worth_a_replay() -> None:
    from mpdist.diagnose import Ration
    from mpdist.precision import Decision, Reason

    def skip(reason: Reason, falls: bool, exhausted: bool = False) -> Decision:
        return Decision(False, falls, reason, math.nan, 0.0, 8.0, 4.0 if falls else 8.0, exhausted)

    falling, stuck, lost = (skip(Reason.GRADIENTS, True), skip(Reason.GRADIENTS, False), skip(Reason.LOSS, False))
    ration = Ration()
    assert [ration.due(falling, n) for n in range(1, 18)] == [n in (1, 8, 16) for n in range(1, 18)]
    assert [ration.due(falling, n) for n in (1, 2)] == [False, False], "the first of a session only"
    assert [ration.due(stuck, n) for n in (3, 4)] == [True, False], "no lower scale to come"
    assert [ration.due(lost, n) for n in (1, 2, 3)] == [True, False, False]
    assert [ration.due(lost, 1), ration.due(falling, 1), ration.due(lost, 2)] == [True, False, True]
    assert Ration().due(skip(Reason.GRADIENTS, True, exhausted=True), 3)
    always = Ration(always=True)
    assert all(always.due(falling, n) for n in range(1, 5))
