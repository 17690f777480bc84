"""What the loop costs in Python, counted, not timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "throughput.py"


@pytest.mark.slow
def test_python_calls_of_a_step_are_at_most_those_of_a_bare_loop_and_a_little() -> None:
    command = [sys.executable, str(BENCH), "--calls", "--hidden", "64", "--layers", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bare"] > 500
    assert found["mpdist"] <= 1.15 * found["bare"]
