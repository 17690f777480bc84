"""The settings around a configuration that its engines take: what each needs, and what it costs.

What is tried are the keys that cut the same training in another way: engine and stage, replicas, offload, when gradients
are reduced, checkpointing, the chunk of the loss and the micro-batch. The global batch stays, and no number changes beyond
rounding. What an engine cannot do is asked of the check that a configuration goes through (``config.rules``).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from mpdist.arch import Arch, model_flops_per_token
from mpdist.config import check_world
from mpdist.config.rules import SUPPORT, check
from mpdist.formats import bytes_of
from mpdist.plan_activations import recomputed_blocks
from mpdist.plan_groups import uneven
from mpdist.plan_memory import Asked, Ledger, ledger_of, states_of
from mpdist.plan_traffic import traffic
from mpdist.plan_zero import number

if TYPE_CHECKING:
    from mpdist.config import Config

# The keys that may change, by their field of Asked.
KEYS = {
    "engine": "shard.engine",
    "stage": "shard.stage",
    "replicas": "shard.replicas",
    "offload": "shard.offload",
    "when": "reduce.when",
    "checkpointing": "memory.checkpointing",
    "loss_chunk": "memory.loss_chunk",
    "micro": "batch.micro",
}
OFFLOAD = ("none", "optimizer", "all")
# FLOP that a GPU could do while it moves a byte, to weigh work of unlike kinds: NVIDIA's H100 SXM data sheet has 989.4e12
# FLOP/s in 16 bit, 3.35e12 B/s to its own memory, 450e9 B/s to its node; and 50e9 B/s is one 400 Gb/s port a GPU.
FLOP_A_BYTE = {"memory": 295, "node": 2199, "network": 19788}


class Search:
    """The settings around one configuration that the engines take, and what each needs and costs.

    asked: the configuration's own, on its world. memory: bytes of one device.
    """

    def __init__(self, cfg: Config, asked: Asked, arch: Arch, memory: int) -> None:
        self.cfg, self.asked, self.arch, self.memory = cfg, asked, arch, memory
        self._ledgers: dict[Asked, Ledger] = {}
        self._sent: dict[Asked, tuple[int, int]] = {}
        self._recompute: dict[str, float] = {}
        self.smallest: dict[tuple[int, int], list[Asked]] = {}  # what plan_advice.smallest found, by memory and count
        self.micros = divisors(asked.global_ // asked.ranks)[::-1]  # the largest first

    # -- what each needs and costs ------------------------------------------------------------------------------

    def ledger(self, asked: Asked) -> Ledger:
        if asked not in self._ledgers:
            self._ledgers[asked] = ledger_of(asked, self.arch)
        return self._ledgers[asked]

    def peak(self, asked: Asked) -> int:
        return self.ledger(asked).peak_bytes

    def fits(self, asked: Asked, room: float = 1.0) -> bool:
        most = room * self.memory
        return self.floor(asked) <= most and self.peak(asked) <= most

    def floor(self, asked: Asked) -> int:
        """Bytes that the peak is not below, found at once: states, and what is there of the whole model."""
        a, states = asked, states_of(asked)
        c, total = bytes_of(a.compute), self.arch.total
        on_device = a.offload == "none" or a.device == "cpu"
        found = (states.master + states.moments) * self._trainable // a.shard_size if on_device else 0
        if a.engine == "ddp":
            return found + (states.gradient + states.working) * self._trainable
        if on_device and a.when == "last" and a.accumulation > 1:  # whole gradients until the last micro-batch
            found += 4 * self._trainable
        whole = a.stage < 3 and (a.engine == "deepspeed" or a.shard_size > 1)
        return found + (c * total if whole else 0)

    @cached_property
    def _trainable(self) -> int:
        return sum(p.count for p in self.arch.split(self.asked.freeze)[0])

    def recompute(self, checkpointing: str) -> float:
        """FLOPs of forward that are done again, as a share of forward's own."""
        if checkpointing not in self._recompute:
            whole, selective = self._blocks
            step = int(checkpointing.split()[1]) if checkpointing.startswith("every") else 1
            again = (
                sum(selective) if checkpointing == "selective" else sum(whole[::step]) if checkpointing != "none" else 0
            )
            self._recompute[checkpointing] = again / self._forward
        return self._recompute[checkpointing]

    @cached_property
    def _blocks(self) -> tuple[list[float], list[float]]:
        a = self.asked
        eager = a.attention == "eager"
        return (
            recomputed_blocks(self.arch, a.seq_len, False, eager),
            recomputed_blocks(self.arch, a.seq_len, True, eager),
        )

    @cached_property
    def _forward(self) -> float:
        return model_flops_per_token(self.arch, self.asked.seq_len) / 3

    def sent(self, asked: Asked) -> tuple[int, int]:
        """Bytes that a rank sends in a step, within its node and between nodes."""
        plain = replace(asked, offload="none", loss_chunk="auto")
        if asked.engine != "deepspeed":  # which gathers once more what it computes again
            plain = replace(plain, checkpointing="none")
        if plain not in self._sent:
            found = traffic(plain, self.arch)
            self._sent[plain] = sum(t.sent_within for t in found), sum(t.sent_between for t in found)
        return self._sent[plain]

    def cost(self, asked: Asked) -> tuple[int, float]:
        """(level: ddp, stages, offload; FLOPs of one rank that a step's extra work is worth).

        Extra work is what is computed again, the weights read by each micro-batch in forward and both products of
        backward, and the bytes sent: a sum of times as if nothing overlapped. It orders settings; it times nothing.
        """
        offloaded = OFFLOAD.index(asked.offload)
        level = 3 + offloaded if offloaded else number(asked) if asked.engine == "deepspeed" else asked.stage
        tokens = asked.accumulation * asked.micro * asked.seq_len
        within, between = self.sent(asked)
        work = self.recompute(asked.checkpointing) * self._forward * tokens
        read = 3 * bytes_of(asked.compute) * self.arch.total * asked.accumulation
        work += read * FLOP_A_BYTE["memory"] + within * FLOP_A_BYTE["node"] + between * FLOP_A_BYTE["network"]
        return level, work

    def settings(self, asked: Asked) -> dict[str, str | int]:
        """The keys that differ from the configuration, with their values."""
        found = {key: getattr(asked, field) for field, key in KEYS.items() if self._differs(asked, field)}
        if asked.engine not in (self.asked.engine, "ddp"):  # whose default of the stage is its own
            found["shard.stage"] = asked.stage
        stages = (self.asked.engine, self.asked.stage), (asked.engine, asked.stage)
        if stages[0] != stages[1] and ("deepspeed", 1) in stages:  # which decides what the default of this key is
            found["reduce.when"] = asked.when
        return found

    def _differs(self, asked: Asked, field: str) -> bool:
        return bool(getattr(asked, field) != getattr(self.asked, field))

    def order(self, asked: Asked) -> tuple[tuple[int, float], int, int]:
        """Cheapest first; of equal cost what keeps nearer to the configuration."""
        return self.cost(asked), len(self.settings(asked)), self.peak(asked)

    def change(self, asked: Asked) -> str:
        return overrides(self.settings(asked))

    def allowed(self, asked: Asked) -> bool:
        """Whether the check of a configuration takes it, on this world."""
        cfg = with_values(self.cfg, self.settings(asked))
        return not check(cfg, _anywhere, set()) and not check_world(cfg, asked.ranks, _anywhere, asked.nodes)

    # -- what there is to try -----------------------------------------------------------------------------------

    @cached_property
    def layouts(self) -> list[Asked]:
        """Every sharding and chunk of the loss that is allowed, with the configured micro-batch and checkpointing."""
        a = self.asked
        chunks = list(dict.fromkeys((a.loss_chunk, "auto")))
        shared = [shared for shared in self._shardings() if self.allowed(shared)]
        return [replace(one, loss_chunk=chunk) for one in shared for chunk in chunks]

    def _shardings(self) -> Iterator[Asked]:
        a = self.asked
        if self._wants_flat:
            yield from (
                replace(a, engine="deepspeed", stage=3, replicas=1, offload="none", when=when)
                for when in dict.fromkeys((a.when, "every"))
            )
        # DeepSpeed is for those who ask for it.
        for engine in ("deepspeed",) if a.engine == "deepspeed" else ("ddp", "fsdp2"):
            can = SUPPORT[engine]
            copies = [1, a.replicas, a.nodes] if can.replicas else [1]
            # What is offloaded lies in the same memory where the host is the device.
            offload = can.offload if a.device == "cuda" else [o for o in can.offload if o in ("none", a.offload)]
            for stage in can.stages:
                if a.ranks == 1 and engine == "fsdp2" and stage < 3 and a.stage != stage:
                    continue  # one rank alone shares nothing; stage 3 at least unshards a few blocks at a time
                for to in offload:
                    # The host of a node has no room for what all nodes together could hold.
                    for replicas in sorted(set(copies if to == "none" else copies[:2])):
                        one = replace(a, engine=engine, stage=stage, replicas=replicas, offload=to)
                        yield from (replace(one, when=when) for when in self._whens(one))

    @cached_property
    def _wants_flat(self) -> bool:
        """Whether fsdp2's shards are too uneven to fit without offload, which DeepSpeed's, cut between elements, may do."""
        a = self.asked
        if a.engine == "deepspeed" or not uneven(self.arch.split(a.freeze)[0], a.ranks):
            return False
        least = replace(
            a, engine="fsdp2", stage=3, replicas=1, offload="none", checkpointing="full", micro=1, when="every"
        )
        return not self.fits(least)

    def _whens(self, asked: Asked) -> Iterable[str]:
        own = self.asked.when
        if asked.engine == "deepspeed" and asked.stage < 3:  # its stages 1 and 2 are one, told apart by this key
            if asked.stage == self.asked.stage:
                return dict.fromkeys((own, "every"))
            return ("last",) if asked.stage == 1 else ("every",)
        if asked.global_ == asked.ranks:  # one micro-batch: no other than the last
            return (own,)
        # Offload is for who has no room, and whole gradients want it.
        return dict.fromkeys((own, "every")) if asked.offload != "none" else ("every", "last")

    @cached_property
    def ladder(self) -> list[str]:
        """Checkpointing settings by the FLOPs that they recompute, none first."""
        layers = self.arch.layers
        counts: dict[int, int] = {}  # blocks that are recomputed -> the smallest N of `every N` that recomputes so many
        for n in range(layers, 1, -1):
            counts[-(-layers // n)] = n
        found = ["none", "selective", "full", *(f"every {n}" for n in counts.values())]
        own = self.asked.checkpointing
        if own.startswith("every"):  # in its own words
            twins = [one for one in found if one != "selective" and self._recomputes(one) == self._recomputes(own)]
            found = [one for one in found if one not in twins] + [own]
        return sorted(found, key=self.recompute)

    def _recomputes(self, checkpointing: str) -> int:
        return replace(self.asked, checkpointing=checkpointing).recomputed(self.arch.layers)

    def least(self, asked: Asked, room: float = 1.0) -> Asked | None:
        """With the least checkpointing that fits; None where not even all of it does."""
        ladder = [replace(asked, checkpointing=one) for one in self.ladder]
        if not self.fits(ladder[-1], room):
            return None
        # `selective` keeps other things than the blocks before and after it, so bytes fall on either side of it only.
        middle = self.ladder.index("selective")
        for part in (ladder[:1], ladder[1:middle], ladder[middle : middle + 1], ladder[middle + 1 :]):
            if part and self.fits(part[-1], room):
                return part[bisect.bisect_left(part, True, key=lambda one: self.fits(one, room))]
        return None


def divisors(n: int) -> list[int]:
    """In ascending order."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def overrides(settings: Mapping[str, str | int]) -> str:
    """As they are given on the command line, quoted for a shell where they hold a space."""
    return " ".join(f'"{key}={value}"' if " " in str(value) else f"{key}={value}" for key, value in settings.items())


def with_values(cfg: Config, settings: Mapping[str, str | int]) -> Config:
    """A copy with these keys of its sections set, unchecked."""
    sections: dict[str, dict[str, str | int]] = {}
    for key, value in settings.items():
        section, _, leaf = key.partition(".")
        sections.setdefault(section, {})["global_" if leaf == "global" else leaf] = value
    return cfg.model_copy(
        update={name: getattr(cfg, name).model_copy(update=values) for name, values in sections.items()}
    )


def _anywhere(_: str) -> str:
    return "config"
