"""What the sweep's tests begin from: a config of which nothing is trained, in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpdist import lock, sweep
from mpdist.errors import UsageError
from mpdist.sweep import Asked

CONFIG = """
name: s
seed: 5
model: {config: {model_type: llama, vocab_size: 259, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4}}
data: {train: [{path: x.txt}], eval: [{path: x.txt}], tokenizer: bytes, seq_len: 64}
batch: {micro: 1, global: 4}
precision: {compute: fp32}
budget: {steps: 10}
launch: {device: cpu}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """run.yaml and x.txt lie in the working directory; no sweep holds a lock."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(lock.TOKEN, "")
    monkeypatch.delenv(lock.TOKEN)
    Path("run.yaml").write_text(CONFIG)
    Path("x.txt").write_text("a text")


def refusal(asked: Asked) -> str:
    with pytest.raises(UsageError) as caught:
        sweep.run(asked, dry_run=True)
    return str(caught.value)
