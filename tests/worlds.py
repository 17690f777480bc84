"""Runs a function on several gloo ranks, in processes forked from one that has the imports done.

`run(function, ranks, *args)` calls function(rank, *args) inside a started process group on each rank and returns the
results in rank order; a function whose name starts with `session` is a worker that joins its group itself. A rank that
raises fails the call with that rank's traceback; a hang is killed by the watchdog.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

_PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch._inductor.compile_fx",  # DeepSpeed imports it at its first start
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "mpdist.shard.fsdp2",
    "mpdist.shard.ddp",
    "deepspeed",
    "mpdist.model",
    "mpdist.optim",
    "mpdist.train",
    "mpdist.export",
    "mpdist.config.write",
    "mpdist.tensor_files",
    "ruamel.yaml",
    "transformers.tokenization_utils_tokenizers",
    "transformers.convert_slow_tokenizer",
]
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it says on import that it has looked for one
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)


def run(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 300.0,
    kill: tuple[float, list[int]] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """See above. kill: (seconds, ranks) sends SIGKILL to those ranks after that time; the call then fails."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kwargs["_port"] = free_ports(1)[0] if function.__name__.startswith("session") else None
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_main,
                args=(function, rank, ranks, f"{folder}/store", theirs, timeout, args, kwargs),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        timer = None
        if kill is not None:
            timer = threading.Timer(kill[0], lambda: [processes[rank].kill() for rank in kill[1]])
            timer.start()
        try:
            return _collect(pipes, processes, timeout)
        finally:
            if timer is not None:
                timer.cancel()
            for process in processes:
                process.kill()
                process.join()


def wholes(held: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Collective. held: parts and what each rank holds of them, the rows that its part names. The full tensors by name."""
    import torch
    import torch.distributed as dist

    pieces: list[Any] = [None] * dist.get_world_size()
    # As bytes: a pickled tensor is an archive of all that it is a view of.
    mine = [bytearray(local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()) for _, local in held]
    dist.all_gather_object(pieces, [(part.start, data) for (part, _), data in zip(held, mine, strict=True)])
    found = {}
    for i, (part, local) in enumerate(held):
        full = found[part.name] = torch.empty(part.shape, dtype=local.dtype)
        rows = full.view(-1) if part.flat or not full.dim() else full.view(len(full), -1)
        for start, data in (rank[i] for rank in pieces):
            if data:
                piece = torch.frombuffer(data, dtype=local.dtype).view(-1, *rows.shape[1:])
                rows[start : start + len(piece)] = piece
    return found


def free_ports(count: int) -> list[int]:
    """Free ports below those that the system hands out by itself, since some are opened only minutes later; none that
    another worker of the same test run may choose."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 10
    draw, found = random.SystemRandom(), list[int]()
    while len(found) < count:
        port = draw.randrange(10000 + 2200 * worker, 12200 + 2200 * worker)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in found:
                found.append(port)
    return found


def _collect(pipes: list[Any], processes: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        ready = wait([p for i, p in enumerate(pipes) if i not in results], timeout=timeout)
        if not ready:
            raise AssertionError(f"ranks {sorted(set(range(len(pipes))) - set(results))} hung for {timeout} s")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                good, value = pipe.recv()
            except EOFError:
                processes[rank].join()
                raise AssertionError(f"rank {rank} died with status {processes[rank].exitcode}") from None
            if not good:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = pickle.loads(value)
    return [results[rank] for rank in range(len(pipes))]


def _main(
    function: Callable[..., Any], rank: int, ranks: int, store: str, pipe: Any, timeout: float, args: Any, kwargs: Any
) -> None:
    faulthandler.dump_traceback_later(timeout * 0.9)
    import torch
    import torch.distributed as dist

    gc.freeze()  # what is imported is no garbage, and DeepSpeed collects at each start
    torch.set_num_threads(1)
    try:
        port = kwargs.pop("_port")
        if port is not None:  # the function is a worker that joins a group by itself
            place = {
                "RANK": rank,
                "WORLD_SIZE": ranks,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": ranks,
                "MASTER_PORT": port,
            }
            os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
            value = function(rank, *args, **kwargs)
        else:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
            )
            value = function(rank, *args, **kwargs)
            dist.barrier()
        # Plain pickle: tensors sent the multiprocessing way live in memory that ends with this process.
        pipe.send((True, pickle.dumps(value)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)  # the group's threads must not delay the end
