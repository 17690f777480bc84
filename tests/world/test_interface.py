"""Wire bytes as the network interface counts them, in a namespace where nothing else can send."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interface_bytes.py")


@pytest.mark.world
def test_wire_bytes_at_the_interface() -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rn", "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no private network namespace")
    done = subprocess.run([unshare, "-rn", sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    wire = {name: seen for name, (seen, _) in found.items()}
    payload = {name: handed for name, (_, handed) in found.items()}
    assert payload["ddp bf16"] * 2 == payload["ddp fp32"]
    assert payload["fsdp2-3 bf16"] * 2 == payload["fsdp2-3 fp32"]
    # Two ranks swap: each sends all that it handed over (ddp), or the other rank's half of it (fsdp2).
    for name, share in (("ddp fp32", 1.0), ("ddp bf16", 1.0)):
        assert wire[name] == pytest.approx(2 * share * payload[name], rel=0.03)
    # What else crosses at stage 3 does not depend on the wire: the difference is the gradient's own.
    assert wire["fsdp2-3 fp32"] - wire["fsdp2-3 bf16"] == pytest.approx(payload["fsdp2-3 bf16"], rel=0.03)
    assert wire["fsdp2-3 bf16"] <= 0.51 * wire["plain fully_shard"]
    assert wire["fsdp2-2 bf16"] <= 0.35 * wire["plain fully_shard"]
