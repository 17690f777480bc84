"""Run inside a private network namespace: bytes that cross the loopback interface in one step, by engine and wire.

    unshare -rn python tests/world/interface_bytes.py

Prints JSON: name -> bytes of one step over both ranks, as the interface counts them (headers included). The control is
torch's own `fully_shard` with BF16 parameters and FP32 reduction; everything else is fixed.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import engines  # noqa: E402
import worlds  # noqa: E402

SIZE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
STEPS = 2


def loopback_up() -> None:
    """The namespace's own loopback starts down. ioctl SIOCSIFFLAGS, IFF_UP."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug:
        fcntl.ioctl(plug, 0x8914, struct.pack("16sh14x", b"lo", 0x1))


def sent() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def _count(step: Any) -> int:
    """Bytes of one steady step. Collective."""
    import torch.distributed as dist

    step()
    dist.barrier()
    before = sent()
    for _ in range(STEPS):
        step()
    dist.barrier()
    return (sent() - before) // STEPS


def ours(rank: int, options: dict[str, Any]) -> tuple[int, int]:
    rows = engines.draw(4, 4)
    rig = engines.rig(rank, **options, **SIZE)
    count = _count(lambda: rig.attempt(rows, 2))
    rig.wire.bytes.take()
    rig.attempt(rows, 2)
    return count, sum(rig.wire.bytes.take())


def plain(rank: int) -> tuple[int, int]:
    """torch's fully_shard on the same model: BF16 parameters, FP32 reduce."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from mpdist import model as models

    config = models.read_config(models.Source(None, {**engines.TINY, **SIZE}, 0))
    model = models.build(config, "sdpa")
    blocks = models.find_blocks(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for block in [*blocks, model]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    for param in model.parameters():
        torch.nn.init.normal_(param._local_tensor, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    part = next(engines.cut(engines.draw(4, 4), 2, 2, rank))

    def step() -> None:
        model(input_ids=part.ids).logits.float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return _count(step), 0


def main() -> None:
    loopback_up()
    found: dict[str, Any] = {}
    for name, options in {
        "ddp fp32": {"engine": "ddp"},
        "ddp bf16": {"engine": "ddp", "wire": "bf16"},
        "fsdp2-3 fp32": {"engine": "fsdp2", "stage": 3, "compute": "bf16"},
        "fsdp2-3 bf16": {"engine": "fsdp2", "stage": 3, "compute": "bf16", "wire": "bf16"},
        "fsdp2-2 bf16": {"engine": "fsdp2", "stage": 2, "compute": "bf16", "wire": "bf16"},
    }.items():
        found[name] = worlds.run(ours, 2, options)[0]
    found["plain fully_shard"] = worlds.run(plain, 2)[0]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
