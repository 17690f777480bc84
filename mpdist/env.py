"""What surrounds a session, for its env.json: versions, machine, names of variables, command line. Never a secret.

Variables are recorded by name alone: that NCCL_P2P_DISABLE was set explains a slow run, and its value can be asked
for. Text that could hold a secret (the command line, a tracker's configuration) goes through `mask`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mpdist import slurm

_PACKAGES = (
    "mpdist", "torch", "transformers", "tokenizers", "datasets", "accelerate", "deepspeed", "safetensors", "wandb",
    "numpy", "pydantic", "triton", "flash-attn", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
_VARIABLES = re.compile(
    r"(MPDIST|CUDA|NVIDIA|NCCL|GLOO|TORCH|TORCHINDUCTOR|PYTORCH|TP|OMP|MKL|KMP|GOMP|OPENBLAS|CUBLAS|HF|TRANSFORMERS|"
    r"TOKENIZERS|DATASETS|WANDB|SLURM|MASTER|UCX|FI|LD|MALLOC|PYTHON)_?.*|(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE)|"
    r"(HTTPS?|NO|ALL)_PROXY",
    re.IGNORECASE,
)

# Forms that credentials of the services near a training run take, wherever they stand in a text.
_TOKENS = re.compile(
    r"hf_[A-Za-z0-9]{16,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|"
    r"wandb_v\d_\w{16,}|xox[a-z]-[\w-]{10,}|AKIA[A-Z0-9]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|local-[0-9a-f]{40}"
)
_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_WORD = r"(?:api[_-]?key|access[_-]?key|token|secret|password|passwd|credentials?|authorization)"
_NAMED = re.compile(rf"(?i)((?:^|[\s._-]){_WORD}\s*[=:]\s*|--?[\w-]*{_WORD}\s+)(?!null$)\S+")
_SECRET_KEY = re.compile(rf"(?i)(?:^|[._-]){_WORD}$")
_MASK = "***"


def mask(text: str) -> str:
    """The text with everything that looks like a credential replaced by ***."""
    return _NAMED.sub(rf"\g<1>{_MASK}", _IN_URL.sub(_MASK, _TOKENS.sub(_MASK, text)))


def masked(value: Any) -> Any:
    """`mask` for nested values; under a key that names a secret, all is masked."""
    if isinstance(value, Mapping):
        return {
            key: _MASK if _SECRET_KEY.search(str(key)) and item not in (None, "") else masked(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [masked(item) for item in value]
    return mask(value) if isinstance(value, str) else value


def environment(devices: Sequence[str] = (), argv: Sequence[str] | None = None, **extra: Any) -> dict[str, Any]:
    """What env.json holds. devices: names, one a rank; extra: switches, the peak that MFU divides by, and so on."""
    return {
        "time": time.time(),
        "host": platform.node(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": dict(_versions()),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "slurm": slurm.session(os.environ),
        "devices": list(devices),
        "variables": sorted(name for name in os.environ if _VARIABLES.fullmatch(name)),
        "command": _command(sys.argv if argv is None else argv),
        **masked(extra),
    }


def _command(argv: Sequence[str]) -> list[str]:
    """The words, masked as one text: an option's value may stand in a word of its own."""
    text = mask(" ".join(word.replace(" ", "\0") for word in argv))
    return [word.replace("\0", " ") for word in text.split(" ")]


@functools.cache
def _versions() -> Mapping[str, str]:
    """As `importlib.metadata.version` tells them, which parses each package's whole description for it."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution(name)
            stated = re.search(r"^Version: *(\S+)", distribution.read_text("METADATA") or "", re.MULTILINE)
            found[name] = stated[1] if stated else distribution.version
    return MappingProxyType(found)


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
