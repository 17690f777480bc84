"""The disk that a run takes: bytes of a checkpoint, how many lie there at once, and what follows from the room there is."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpdist import arch, launch, plan, space
from mpdist.config import Resolved, load
from mpdist.errors import MachineError

CONFIG = """
name: a
model: {config: {model_type: llama, vocab_size: 259, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4}}
data: {train: [{path: x.txt, format: text}], tokenizer: bytes, seq_len: 64}
batch: {micro: 1, global: 8}
budget: {steps: 1000}
"""


def ask(folder: Path, *overrides: str) -> Resolved:
    path = folder / "asked.yaml"
    path.write_text(CONFIG)
    return load(path, [f"out_dir={folder / 'runs'}", *overrides])


def saves(resolved: Resolved, ranks: int = 2) -> space.Saves:
    found = arch.look(None, resolved.config.model.config, None)
    planned = plan.make(resolved.config, found, ranks, 1).saves
    assert planned is not None
    return planned


def disk(monkeypatch: pytest.MonkeyPatch, free: int, **more: int) -> None:
    """A file system with so many bytes free, all of them for root only beside."""
    values = {"f_frsize": 1, "f_bavail": free, "f_bfree": 10**15, "f_blocks": 10**15, "f_files": 100, "f_favail": 10}
    monkeypatch.setattr(space.os, "statvfs", lambda path: SimpleNamespace(**values | more))


def lay(resolved: Resolved, step: int, size: int, name: str = "step-{:08d}") -> Path:
    folder = Path(resolved.config.out_dir) / "a" / "checkpoints" / name.format(step)
    folder.mkdir(parents=True)
    (folder / "x.distcp").write_bytes(b"\0" * size)
    return folder


# -- how much ---------------------------------------------------------------------------------------------------------


def parameters(*overrides: str, folder: Path) -> tuple[int, int]:
    found = arch.look(None, ask(folder, *overrides).config.model.config, None)
    assert isinstance(found, arch.Arch)
    return found.total, found.embedding


def test_c59_masters_and_moments_are_12_bytes_a_trained_parameter_and_frozen_ones_keep_theirs(tmp_path: Path) -> None:
    total, embedding = parameters(folder=tmp_path)
    plain = saves(ask(tmp_path)).bytes
    assert 12 * total < plain < 12 * total + 300_000
    pure = saves(ask(tmp_path, "precision.master=compute")).bytes
    assert plain - pure == 6 * total, "the same headers, half of the values"
    frozen = saves(ask(tmp_path, "model.freeze=['model.embed*']"))
    assert plain - frozen.bytes == 10 * embedding + 2 * 2 * space.PIECE_BYTES, "bf16, and no moments of it on two ranks"
    assert f"12 B x {total - embedding:,} trained parameters" in frozen.formula
    kept = saves(ask(tmp_path, "model.freeze=['model.embed*']", "precision.keep_fp32=['model.embed_tokens']")).bytes
    assert kept - frozen.bytes == 2 * embedding
    tokenizer = saves(ask(tmp_path, "data.tokenizer=owner/some")).bytes
    assert tokenizer - plain == space.TOKENIZER_BYTES


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ((), 4),  # three, and the one being written
        (("data.eval=[{path: y.txt}]",), 5),  # the best may be an old one
        (("data.eval=[{path: y.txt}]", "checkpoint.keep_best=2"), 6),
        (("checkpoint.keep=1",), 2),
        (("checkpoint.every=0",), 1),
        (("checkpoint.every=400",), 3),  # 400, 800 and the end
        (("checkpoint.every=500",), 2),
        (("budget={steps: null, epochs: 3}",), 4),  # who knows how many
    ],
)
def test_c59_no_more_are_kept_than_are_made(tmp_path: Path, overrides: tuple[str, ...], count: int) -> None:
    found = saves(ask(tmp_path, *overrides))
    assert found.to_json() == {
        "bytes": found.bytes,
        "kept": count,
        "kept_bytes": count * found.bytes,
        "formula": found.formula,
    }


def test_c59_the_plan_says_it(tmp_path: Path) -> None:
    resolved = ask(tmp_path)
    found = plan.make(resolved.config, arch.look(None, resolved.config.model.config, None), 2, 1)
    assert found.to_json()["checkpoint"]["kept"] == 4
    assert "up to 4 at once, the one being written included: " in found.text()
    unknown = plan.make(resolved.config, None, 2, 1)
    assert unknown.to_json()["checkpoint"] is None
    assert "checkpoint" not in unknown.text()


# -- is there room ----------------------------------------------------------------------------------------------------


def test_c59_a_disk_for_less_than_one_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = ask(tmp_path)
    one = saves(resolved)
    disk(monkeypatch, one.bytes - 1)
    with pytest.raises(MachineError) as caught:
        space.check(resolved, one)
    error = caught.value
    assert error.status == 4
    assert str(tmp_path) in error.what
    assert "free" in error.what
    assert "out_dir" in error.why
    assert "checkpoint.on_error=go_on" in error.do
    warning = space.check(ask(tmp_path, "checkpoint.on_error=go_on"), one)
    assert warning is not None
    assert "starts all the same" in warning


def test_c59_nothing_starts_and_a_dry_run_only_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = ask(tmp_path, "launch.device=cpu", f"data.train.0.path={tmp_path / 'asked.yaml'}")
    disk(monkeypatch, 1000)
    with pytest.raises(MachineError, match=r"a checkpoint takes .*, and .* has 1000 B free"):
        launch.run(resolved, ranks=2)
    assert not (tmp_path / "runs").exists()
    capsys.readouterr()
    assert launch.run(resolved, ranks=2, dry_run=True) == 0
    printed = capsys.readouterr().out
    assert f"disk       1000 B free at {tmp_path}\n           it would be refused: a checkpoint takes " in printed


@pytest.mark.parametrize(
    ("fit", "overrides", "said"),
    [
        (1, (), "save 2 from now, at step 200,"),
        (3, (), "save 4 from now, at step 400,"),
        (4, (), None),
        (4, ("data.eval=[{path: y.txt}]",), "save 5 from now, at step 500,"),
        (1, ("checkpoint.every=0",), None),
        (1, ("checkpoint.every=600", "checkpoint.keep=1"), "save 2 from now, at step 1000,"),
        (2, ("checkpoint.every=600",), None),
    ],
)
def test_c59_a_disk_that_fills_up_later_is_warned_of_with_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fit: int, overrides: tuple[str, ...], said: str | None
) -> None:
    resolved = ask(tmp_path, *overrides)
    one = saves(resolved)
    disk(monkeypatch, fit * one.bytes + 1)
    warning = space.check(resolved, one)
    assert (warning is None) is (said is None), warning
    assert said is None or said in str(warning)


def test_c59_what_lies_there_already_comes_back_as_new_ones_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = ask(tmp_path)
    one = saves(resolved)
    for step in (100, 200, 300):
        lay(resolved, step, one.bytes)
    lay(resolved, 7, one.bytes, "mine")  # somebody's own
    disk(monkeypatch, one.bytes)
    assert space.check(resolved, one) is None, "each save makes room for the next"
    (lowered := ask(tmp_path, "checkpoint.keep=1"))
    assert space.check(lowered, saves(lowered)) is None
    raised = ask(tmp_path, "checkpoint.keep=5")
    assert "save 2 from now, at step 500," in str(space.check(raised, saves(raised)))
    disk(monkeypatch, one.bytes - 1)
    with pytest.raises(MachineError):
        space.check(resolved, one)
    lay(resolved, 400, 1, ".step-{:08d}.aside")  # a save that a kill tore is no loss
    assert space.check(resolved, one) is None


def test_c59_a_file_system_without_inodes_is_refused_whatever_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(monkeypatch, 10**12, f_favail=0)
    with pytest.raises(MachineError, match="none of its 100 inodes is free"):
        space.check(ask(tmp_path), None)
    disk(monkeypatch, 10**12, f_favail=0, f_files=0)  # as file systems say that make them as they need them
    assert space.check(ask(tmp_path), None) is None


def test_a_shape_that_is_not_known_and_a_disk_that_does_not_say_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(monkeypatch, 0)
    assert space.check(ask(tmp_path), None) is None
    disk(monkeypatch, 0, f_blocks=0)
    assert space.check(ask(tmp_path), saves(ask(tmp_path))) is None

    def refuse(path: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(space.os, "statvfs", refuse)
    assert space.check(ask(tmp_path), saves(ask(tmp_path))) is None


def test_the_free_space_is_that_of_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / "a").mkdir(parents=True)
    os.symlink(tmp_path / "elsewhere", tmp_path / "runs" / "a" / "checkpoints")
    assert space.look(ask(tmp_path), None).line.endswith(f"free at {tmp_path / 'runs' / 'a' / 'checkpoints'}")
    (tmp_path / "runs" / "a" / "checkpoints").unlink()
    assert space.look(ask(tmp_path), None).line.endswith(f"free at {tmp_path / 'runs' / 'a'}")
