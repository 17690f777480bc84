"""What autograd and checkpointing make of gathers that come and go: nothing is held on to, and no bit changes."""

from __future__ import annotations

import weakref
from typing import Any

import engines
import pytest
import worlds
from engines import Rig

pytestmark = pytest.mark.world

SMALL = 3000  # elements: less than the embedding and the head, more than any other tensor of engines.TINY
TIED: dict[str, Any] = {"tie_word_embeddings": True, "num_hidden_layers": 4}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "zero-2, on the host": ({"stage": 2, "offload": "optimizer"}, "none"),
    "zero-3, reduced once, on the host": ({"stage": 3, "every": False, "offload": "all"}, "none"),
    "zero-3, tied, full": ({"stage": 3, "compute": "bf16", **TIED}, "full"),
    "zero-3, tied, selective": ({"stage": 3, "compute": "bf16", **TIED}, "selective"),
}


def made(rank: int, options: dict[str, Any], checkpointing: str, bucket: int) -> Rig:
    from mpdist import model, plan_zero

    plan_zero.BUCKET = bucket
    rig = engines.rig(rank, "deepspeed", **options)
    model.checkpoint_blocks(model.find_blocks(rig.engine.module), checkpointing)
    return rig


def three_steps(rank: int) -> dict[str, list[tuple[list[float], dict[str, Any]]]]:
    """Losses and weights of each case, with one bucket for everything and with small ones."""
    found: dict[str, list[tuple[list[float], dict[str, Any]]]] = {}
    for name, (options, checkpointing) in CASES.items():
        for bucket in (2**23, SMALL):
            rig = made(rank, options, checkpointing, bucket)
            losses = [rig.attempt(engines.draw(seed=step), 2)[1] for step in range(3)]
            found.setdefault(name, []).append((losses, rig.full()))
    return found


def test_gathers_that_come_and_go_change_no_bit_under_checkpointing_and_offload() -> None:
    for name, ((losses, weights), (again, others)) in worlds.run(three_steps, 2)[0].items():
        assert losses == again, name
        assert engines.worst(weights, others) == 0.0, name


def weights_in_forward(rank: int) -> tuple[int, int]:
    """(elements of linear layers' weights that a forward gathers, those that are still there before backward)."""
    import torch

    rig = made(rank, {"stage": 3, "num_hidden_layers": 4}, "none", SMALL)
    seen: list[tuple[Any, int]] = []

    def note(module: Any, _: Any) -> None:
        seen.append((weakref.ref(module.weight.untyped_storage()), module.weight.numel()))

    for module in rig.engine.module.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(note)
    objective, _ = rig.forward(engines.draw(), 1.0)
    alive = sum(count for storage, count in seen if storage() is not None)
    objective.backward()
    return sum(count for _, count in seen), alive


def test_stage_3_lets_go_of_what_it_gathered_before_backward() -> None:
    for gathered, alive in worlds.run(weights_in_forward, 2):
        assert gathered > 30_000
        assert alive < 0.3 * gathered  # the head, and what was fetched ahead for backward
