"""What a simulation found: bytes of rank 0 by row, at the highest point of each part of a window, beside the formula's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpdist.errors import UsageError

if TYPE_CHECKING:
    from mpdist.plan_memory import Asked

Held = Mapping[str, int]  # row name -> bytes


@dataclass(frozen=True)
class Simulated:
    """Bytes are of rank 0, without the overhead that is no tensor.

    layers: blocks of the model; played: how many of them were really played, at one depth or two. rest: between steps.
    parts: of each part of a window, in order, what its highest point holds. samples: the window's course, (operation, bytes
    by row), of the deepest model that was played. parameters: of the whole model. seconds: what the simulation took.
    """

    layers: int
    played: tuple[int, ...]
    parameters: int
    trainable: int
    rest: Held
    parts: Mapping[str, Held]
    samples: tuple[tuple[int, Held], ...]
    overhead: int
    seconds: float

    @property
    def moment(self) -> str:
        return max(self.parts, key=lambda part: sum(self.parts[part].values()))

    @property
    def peak(self) -> int:
        return sum(self.parts[self.moment].values())

    @property
    def total(self) -> int:
        """The peak with the overhead that the plan assumes."""
        return self.peak + self.overhead

    def own_peak(self, row: str) -> int:
        return max(held.get(row, 0) for held in (self.rest, *self.parts.values()))

    def how(self) -> str:
        if len(self.played) == 1:
            return f"all {self.layers} blocks played"
        return f"{' and '.join(map(str, self.played))} of {self.layers} blocks played, the others carried on from them"

    def to_json(self) -> dict[str, Any]:
        at_peak = self.parts[self.moment]
        names = [
            row for row in {**self.rest, **{r: 0 for held in self.parts.values() for r in held}} if self.own_peak(row)
        ]
        return {
            "peak_bytes_per_rank": self.total,
            "peak_moment": self.moment,
            "overhead_bytes": self.overhead,
            "layers": self.layers,
            "played_layers": list(self.played),
            "parameters": self.parameters,
            "trainable_parameters": self.trainable,
            "seconds": round(self.seconds, 3),
            "rows": [
                {
                    "row": row,
                    "rest_bytes": self.rest.get(row, 0),
                    "peak_bytes": self.own_peak(row),
                    "at_peak_bytes": at_peak.get(row, 0),
                }
                for row in names
                if self.own_peak(row)
            ],
            "moments": [{"moment": part, "rows": dict(held)} for part, held in self.parts.items()],
        }


def refuse(asked: Asked) -> None:
    """Raises UsageError for what cannot be played."""
    if asked.engine == "deepspeed":
        raise UsageError("--simulate with shard.engine = deepspeed", "DeepSpeed asks for real memory as it starts",
                         "plan it by formula (without --simulate), or simulate the fsdp2 engine at the same stage")  # fmt: skip
    if asked.offload != "none":
        raise UsageError(f"--simulate with shard.offload = {asked.offload}",
                         "fake tensors lie on one device, so nothing could be told apart",
                         "plan it by formula (without --simulate), or simulate shard.offload=none")  # fmt: skip
