"""Why model states take 16 bytes a parameter: what an engine keeps of one that trains, and who shares it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpdist.formats import bytes_of
from mpdist.plan_memory import Asked


@dataclass(frozen=True)
class States:
    """Bytes of one trainable parameter at rest, before they are shared out over ``shared_by`` ranks.

    working: the copy in the compute dtype that stays between steps, shared over ``working_shared_by`` ranks; 0 where
    masters compute or the copy is made when it is needed. why: all of it in one line.
    """

    master: int
    gradient: int
    moments: int
    working: int
    shared_by: int
    working_shared_by: int
    why: str

    @property
    def total(self) -> int:
        return self.master + self.gradient + self.moments + self.working

    @property
    def per_rank(self) -> float:
        return (self.total - self.working) / self.shared_by + self.working / self.working_shared_by

    def to_json(self) -> dict[str, Any]:
        return {
            "master": self.master,
            "gradient": self.gradient,
            "moments": self.moments,
            "working": self.working,
            "shared_by": self.shared_by,
            "working_shared_by": self.working_shared_by,
            "bytes_per_parameter": self.total,
            "bytes_per_parameter_and_rank": self.per_rank,
            "why": self.why,
        }


def states_of(a: Asked) -> States:
    """Of the engine that is asked for. ddp and deepspeed sum gradients in FP32 whatever the masters are."""
    c = bytes_of(a.compute)
    master = c if a.master == "compute" else 4
    gradient = master if a.engine == "fsdp2" else 4
    working, text = _copy(a, c, master)
    total = 3 * master + gradient + working
    said = (
        f"{total:.2f} B a trainable parameter: {master} {'master' if master == 4 else 'weight'} + {gradient} gradient "
    )
    said += f"+ {2 * master} moments"
    said += f", shared by {a.shard_size} ranks" if a.shard_size > 1 else ""
    said += f"; {text}"
    if master < 4:
        said += f"; FP32 masters would make it {16 + (c if a.engine == 'ddp' else 0)}"
    elif c < 4:
        said += "; the textbook's 2 + 2 + 12 has the gradient in 16 bit"
    whole = a.engine == "deepspeed" and a.stage < 3
    return States(master, gradient, 2 * master, working, a.shard_size, 1 if whole else a.shard_size, said)


def _copy(a: Asked, c: int, master: int) -> tuple[int, str]:
    """(bytes of the working copy between steps, what there is to say of it)."""
    if a.engine == "fsdp2":
        often = "block by block" if a.stage == 3 else "for forward and backward"
        kind = "a working copy" if c < master else "a copy"
        return (
            0,
            f"{kind} of {c} is gathered {often}" if a.shard_size > 1 or c < master else "masters compute, uncopied",
        )
    if a.engine == "ddp":
        if c < master:
            return c, f"+ {c} for the working copy that ddp keeps"
        return 0, "masters compute, uncopied" if master == 4 else "the weights compute, uncopied"
    # In FP32 at stage 3 DeepSpeed's masters compute, where both lie in the same memory.
    apart = a.device != "cpu" and a.offload == "optimizer"
    if a.stage == 3 and c == 4 and not apart:
        return 0, "masters compute, uncopied"
    return c, f"+ {c} for the working copy, " + ("shared too" if a.stage == 3 else "whole on each rank")
