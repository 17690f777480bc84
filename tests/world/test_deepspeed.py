"""The engine `deepspeed` by itself: quiet to start, modest with memory, and the same numbers whatever came before."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import engines
import pytest
import tiny
import worlds
from engines import Rig, Trace

pytestmark = pytest.mark.world

STAGES = (1, 2, 3)
# Options of engines.rig; stage 2 is what reduces each micro-batch.
NORMAL: dict[int, dict[str, Any]] = {
    stage: {"engine": "deepspeed", "stage": stage, "every": stage > 1} for stage in STAGES
}


# -- starting it ------------------------------------------------------------------------------------------------------


def _said(rank: int, folder: str) -> str:
    """What this rank writes to stdout and stderr while it imports DeepSpeed and takes a step on every stage."""
    path = f"{folder}/said-{rank}"
    os.environ["TORCH_EXTENSIONS_DIR"] = f"{folder}/compiled-{rank}"
    saved = [os.dup(fd) for fd in (1, 2)]
    with open(path, "w") as file:
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
    try:
        for stage in STAGES:
            for compute in ("fp32", "bf16", "fp16"):
                engines.rig(rank, **NORMAL[stage], compute=compute).attempt(engines.draw(), 2)
    finally:
        for stream, old, fd in zip((sys.stdout, sys.stderr), saved, (1, 2), strict=True):
            stream.flush()
            os.dup2(old, fd)
    return Path(path).read_text()


def test_it_starts_without_a_word_and_compiles_nothing(tmp_path: Path) -> None:
    for said in worlds.run(_said, 2, str(tmp_path)):
        assert said == ""
    assert not list(tmp_path.glob("compiled-*/**/*.*"))


def _without_instructions(rank: int) -> list[list[float]]:
    """Losses of each stage in FP16 on a processor that has no instructions for it, by DeepSpeed's account."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda _: False
    return [engines.trace(rank, **NORMAL[stage], compute="fp16", steps=2).losses for stage in STAGES]


def test_fp16_needs_no_instructions_of_the_processor() -> None:
    plain = worlds.run(_ddp_losses, 2)[0]
    for losses in worlds.run(_without_instructions, 2):
        assert losses == [pytest.approx(plain, rel=1e-5)] * 3


def _ddp_losses(rank: int) -> list[float]:
    return engines.trace(rank, compute="fp16", steps=2).losses


# -- memory -----------------------------------------------------------------------------------------------------------


def _held() -> int:
    """Bytes of all storages that tensors of this process keep alive."""
    import gc

    import torch

    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _memory(rank: int) -> dict[tuple[int, str], tuple[float, float]]:
    """(stage, compute) -> bytes a parameter held at the end of a backward and after the step."""
    found, alive = {}, []  # none of them goes while another is measured
    for stage in STAGES:
        for compute in ("fp32", "bf16"):
            before, backward = _held(), []
            made = engines.rig(rank, **NORMAL[stage], compute=compute)
            last = next(made.engine.module.parameters())  # the embedding, whose gradient comes last
            last.register_hook(lambda _, backward=backward: backward.append(_held()))
            made.attempt(engines.draw(), 2)
            alive.append(made)
            size = sum(p.tensor.numel() for p in made.optimizer.parts) * 2  # two ranks, close enough
            found[stage, compute] = (max(backward) - before) / size, (_held() - before) / size
    return found


def test_buckets_follow_the_model() -> None:
    """A bucket as DeepSpeed makes it is 2e9 bytes; afterwards masters, moments and working copies are left, and at stage
    3 gradients."""
    rest = {(1, "fp32"): 10, (1, "bf16"): 8, (2, "fp32"): 10, (2, "bf16"): 8, (3, "fp32"): 8, (3, "bf16"): 9}
    for found in worlds.run(_memory, 2):
        for key, (backward, after) in found.items():
            assert after == pytest.approx(rest[key], abs=0.6), key
            assert backward < 40, key


def _two_alike(rank: int, stage: int) -> list[Trace]:
    jobs: list[dict[str, Any]] = [{}, {"compute": "bf16", "hidden_size": 64}, {}]
    return [engines.trace(rank, **NORMAL[stage], steps=3, clip=1.0, **job) for job in jobs]


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_does_not_know_of_earlier_ones(stage: int) -> None:
    first, _, third = worlds.run(_two_alike, 2, stage)[0]
    assert first.losses == third.losses
    assert tiny.same(first.weights, third.weights)


# -- masters ----------------------------------------------------------------------------------------------------------


def _loaded(rank: int) -> list[tuple[dict[str, Any], dict[str, set[str]]]]:
    """Of each stage and 16-bit compute dtype: masters right after the load, and dtypes of what computes."""
    found = []
    for stage in STAGES:
        for compute in ("bf16", "fp16"):
            made = engines.rig(rank, **NORMAL[stage], compute=compute)
            working = {str(p.dtype) for p in made.engine.module.parameters()}
            found.append(
                (made.full(), {"working": working, "masters": {str(p.tensor.dtype) for p in made.engine.parts}})
            )
    return found


def test_c14_masters_are_the_unrounded_weights_right_after_the_load() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = dict(engines.TINY)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    wanted = {name: param.detach() for name, param in plain.named_parameters()}
    assert not tiny.same(wanted, {name: tensor.bfloat16().float() for name, tensor in wanted.items()})
    for by_stage in worlds.run(_loaded, 2):
        for (masters, dtypes), compute in zip(by_stage, ("torch.bfloat16", "torch.float16") * 3, strict=True):
            assert tiny.same(masters, wanted)
            assert dtypes == {"working": {compute}, "masters": {"torch.float32"}}


def _struck(rank: int) -> dict[tuple[int, str], dict[str, Any]]:
    """Four attempts, rank 1 overflowing in the second's last micro-batch: what each of them moved."""
    import torch

    found = {}
    for stage in STAGES:
        for compute in ("fp32", "bf16", "fp16"):
            made = engines.rig(rank, **NORMAL[stage], compute=compute)
            state: dict[str, Any] = {"applied": [], "moved": []}
            for attempt in range(4):
                before = _state_of(made)
                strike = 1 if attempt == 1 and rank == 1 else None
                decision, _ = made.attempt(engines.draw(seed=made.window.step), 2, 1e-3, strike)
                after = _state_of(made)
                state["applied"].append(decision.applied)
                state["moved"].append(not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
            state["steps"] = {float(s["step"]) for s in made.optimizer.adam.state.values()}
            found[stage, compute] = state
    return found


def _state_of(made: Rig) -> list[Any]:
    """Copies of the masters, moments and step counters, and of what computes."""
    held = [part.tensor for part in made.engine.parts]
    held += [
        made.optimizer.moments(i)[key]
        for i in range(len(made.optimizer.parts))
        for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    return [tensor.detach().clone() for tensor in [*held, *made.engine.module.parameters()]]


def test_c122_c128_a_gradient_that_is_not_finite_on_one_rank_moves_nothing_on_any() -> None:
    for found in worlds.run(_struck, 2):
        for key, state in found.items():
            assert state["applied"] == [True, False, True, True], key
            assert state["moved"] == [True, False, True, True], key
            assert state["steps"] == {3.0}, key


# -- what a parameter is used for ---------------------------------------------------------------------------------------


def _spare_layer(user: int) -> Any:
    import torch
    import torch.distributed as dist

    class Spare(torch.nn.Module):
        """A layer that all use and one that only this rank uses, or none."""

        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)

        def forward(self, input_ids: Any, factor: Any, **_: Any) -> Any:
            x = self.used(torch.ones(4, dtype=self.used.weight.dtype))
            x = self.spare(x) if dist.get_rank() == user else x
            loss = x.float().sum() * input_ids.float().mean()
            return loss * factor, loss.detach(), None

    with torch.device("meta"):
        return Spare()


def _spare(rank: int, cases: list[dict[str, Any]], user: int) -> list[dict[str, Any]]:
    """Weights after two steps."""
    from mpdist import plan_zero

    plan_zero.BUCKET = 16  # one of the two fills it
    found = []
    for case in cases:
        made = engines.rig(rank, **case, model=_spare_layer(user))
        for part in made.engine.parts:
            part.tensor.fill_(0.5)
        made.engine.refresh()
        for step in range(2):
            made.attempt(engines.draw(seed=step), 2)
        found.append(made.full())
    return found


@pytest.mark.parametrize("user", [-1, 0, 1])
def test_a_layer_that_one_rank_uses_or_none_trains_as_under_ddp(user: int) -> None:
    engines_ = [{"engine": "ddp"}, NORMAL[1], NORMAL[2]]
    if user < 0:  # under ZeRO-3 all ranks gather a module together, so all have to run it
        engines_ += [NORMAL[3], {**NORMAL[3], "every": False}]
    cases = [{**engine, "compute": compute} for compute in ("fp32", "bf16") for engine in engines_]
    for found in worlds.run(_spare, 2, cases, user):
        for begin in (0, len(engines_)):
            plain = found[begin]
            decayed = plain["spare.weight"].mean()
            only_decayed = pytest.approx(0.5 * (1 - 1e-3 * 0.1) ** 2, rel=1e-6)
            assert (decayed == only_decayed) == (user < 0)
            for other in found[begin + 1 : begin + len(engines_)]:
                assert engines.worst(other, plain) < 1e-6


def _in_small_buckets(rank: int, stage: int) -> list[Trace]:
    from mpdist import plan_zero

    found = []
    for elements in (plan_zero.BUCKET, 3000, 500):  # a matrix of the MLP has 2048, a vocabulary's 3104
        plan_zero.BUCKET = elements
        for compute in ("fp32", "bf16"):
            found.append(engines.trace(rank, **NORMAL[stage], compute=compute, steps=2))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_the_size_of_buckets_changes_no_bit(stage: int) -> None:
    found = worlds.run(_in_small_buckets, 2, stage)[0]
    for small in (found[2:4], found[4:6]):
        for trace, plain in zip(small, found[:2], strict=True):
            assert trace.losses == plain.losses
            assert tiny.same(trace.weights, plain.weights)


# -- a forward without a backward ---------------------------------------------------------------------------------------


def _evaluated(made: Rig) -> float:
    """The loss of some rows, as the loop evaluates. Collective."""
    import torch
    import torch.distributed as dist

    made.engine.module.eval()
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for part in engines.cut(engines.draw(seed=99), 2, made.ranks, made.rank):
            total += made.forward(part, 1.0)[1]
    made.engine.module.train()
    dist.all_reduce(total)
    return total.item()


def _with_evaluation(rank: int, stages: tuple[int, ...], compute: str) -> list[dict[str, Any]]:
    """Three steps with an evaluation after each or without any, then the weights of a fresh start and its evaluation."""
    import torch

    found = []
    for stage in stages:
        for evaluates in (True, False):
            which = NORMAL[stage] if stage else {"engine": "ddp"}
            made = engines.rig(rank, **which, compute=compute, tie_word_embeddings=True, num_hidden_layers=3)
            start = [part.tensor.clone() for part in made.engine.parts]
            first, later = _evaluated(made), []
            for step in range(3):
                made.attempt(engines.draw(seed=step), 2)
                if evaluates:
                    later.append(_evaluated(made))
            weights = made.full()
            left = sum(p.numel() for p in made.engine.module.parameters())
            for part, old in zip(made.engine.parts, start, strict=True):
                part.tensor.copy_(old)
            made.engine.refresh()
            again = _evaluated(made)
            found.append({"weights": weights, "later": later, "first": first, "again": again, "left": left})
            assert all(torch.equal(part.tensor, old) for part, old in zip(made.engine.parts, start, strict=True))
    return found


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_c53_an_evaluation_sees_the_masters_and_leaves_no_trace(compute: str) -> None:
    found = worlds.run(_with_evaluation, 2, (0, *STAGES), compute)[0]
    plain = found[0]["later"]
    assert len(set(plain)) == 3
    for i in range(0, len(found), 2):
        seen, unseen = found[i : i + 2]
        assert tiny.same(seen["weights"], unseen["weights"])
        assert seen["later"] == pytest.approx(plain, rel=1e-6 if compute == "fp32" else 1e-3)
        assert seen["first"] == seen["again"] == unseen["again"]  # not those of the steps before
        assert len(set(seen["later"]) - {seen["first"]}) == 3
        if i == 2 * len(STAGES):
            assert seen["left"] == 0  # stage 3: nothing stays gathered


# -- offload ------------------------------------------------------------------------------------------------------------


def _offloaded(rank: int, jobs: list[dict[str, Any]]) -> list[Trace]:
    return [engines.trace(rank, **job, steps=4, clip=1.0) for job in jobs]


def test_offload_changes_no_bit() -> None:
    more: list[dict[str, Any]] = [{"compute": "fp32"}, {"compute": "bf16", "freeze": ("*.layers.0.*",)}]
    more.append({"compute": "fp16", "poison": (2,)})
    jobs = [
        {**NORMAL[stage], "offload": offload, **extra}
        for extra in more
        for stage in STAGES
        for offload in ("none", "optimizer", "all")
        if offload != "all" or stage == 3
    ]
    found = worlds.run(_offloaded, 2, jobs)[0]
    plain: Trace
    for job, trace in zip(jobs, found, strict=True):
        if job["offload"] == "none":
            plain = trace
            continue
        assert trace.losses == plain.losses, job
        assert trace.norms[-1] == plain.norms[-1], job
        assert trace.applied == plain.applied, job
        assert tiny.same(trace.weights, plain.weights), job
