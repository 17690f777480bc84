"""What a checkpoint must be to be opened: whole, of one save, named as it says, and without a command hidden in it."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import Result, train

pytestmark = pytest.mark.world

OLD, NEW = "step-00000002", "step-00000004"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Two ranks, checkpoints of steps 2 and 4; the schedule leaves room to go on."""
    run = train(tmp_path_factory.mktemp("trust"), 2, checkpoint__every=2, optim__horizon=6)
    assert run.status == 0, run.message
    return run


@pytest.fixture
def checkpoints(trained: Result, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained.folder / "checkpoints", tmp_path / "checkpoints"))


def opened(folder: Path) -> tuple[str, list[tuple[str, str]]]:
    """The checkpoint that is used, and each one refused with the reason."""
    from mpdist import restore

    refused: list[tuple[str, str]] = []
    found = restore.newest(restore.candidates(folder), lambda *words: refused.append(words))
    assert found is not None
    return found.path.name, refused


def files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[min(int(len(data) * at), len(data) - 1)] ^= 1
    path.write_bytes(data)


def reseal(checkpoint: Path) -> None:
    """Makes the manifest match whatever now lies there, as an attacker would."""
    from mpdist.checkpoint import _digests
    from mpdist.shelf import MANIFEST, read_manifest, write_manifest

    names = [path.relative_to(checkpoint).as_posix() for path in files(checkpoint) if path.name != MANIFEST]
    entries = {name: {"bytes": size, "sha256": sha} for name, (size, sha) in _digests(checkpoint, names).items()}
    write_manifest(checkpoint, {**read_manifest(checkpoint), "files": entries})


# -- damage -------------------------------------------------------------------------------------------------------------


def test_whole_checkpoints_are_used(checkpoints: Path) -> None:
    assert opened(checkpoints) == (NEW, [])


@pytest.mark.parametrize("at", [0.0, 0.3, 0.9999])
def test_a_flipped_byte_in_any_file_is_named(checkpoints: Path, at: float) -> None:
    for victim in files(checkpoints / NEW):
        whole = victim.read_bytes()
        flip(victim, at)
        name = victim.relative_to(checkpoints / NEW).as_posix()
        used, refused = opened(checkpoints)
        assert used == OLD
        assert [(where, why.split()[0]) for where, why in refused] == [(NEW, name)]
        victim.write_bytes(whole)


def test_no_byte_of_the_manifest_can_change_unseen(checkpoints: Path) -> None:
    from mpdist.errors import CheckpointError
    from mpdist.shelf import MANIFEST, read_manifest

    path = checkpoints / NEW / MANIFEST
    whole, meant = path.read_bytes(), read_manifest(checkpoints / NEW)
    places, words = range(0, len(whole), 3), []
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1
        path.write_bytes(data)
        try:
            assert read_manifest(checkpoints / NEW) == meant
        except CheckpointError as error:
            words.append(error.what.split()[0])
    assert set(words) == {MANIFEST}
    assert len(words) > 0.9 * len(places)


def test_a_truncated_file_is_named(checkpoints: Path) -> None:
    for victim in files(checkpoints / NEW):
        whole = victim.read_bytes()
        for size in (0, len(whole) // 2, len(whole) - 1):
            victim.write_bytes(whole[:size])
            used, refused = opened(checkpoints)
            if victim.name == "manifest.json" and size == len(whole) - 1:
                assert (used, refused) == (NEW, [])  # its last byte is the end of the line
                continue
            assert used == OLD
            assert refused[0][1].split()[0] == victim.relative_to(checkpoints / NEW).as_posix()
        victim.write_bytes(whole)


def one_file_from_the_older_save(old: Path, new: Path) -> str:
    victim = new / "tensors" / "__1_0.distcp"
    assert victim.stat().st_size == (old / "tensors" / victim.name).stat().st_size, "else the size alone would tell"
    shutil.copyfile(old / "tensors" / victim.name, victim)
    return "tensors/__1_0.distcp was altered"


def two_saves_interleaved(old: Path, new: Path) -> str:
    for path in files(new / "tensors")[::2]:
        shutil.copyfile(old / "tensors" / path.name, path)
    return "tensors/.metadata was altered"


def no_manifest(_: Path, new: Path) -> str:
    (new / "manifest.json").unlink()
    return "manifest.json cannot be used"


def the_manifest_of_another(old: Path, new: Path) -> str:
    shutil.copyfile(old / "manifest.json", new / "manifest.json")
    return "manifest.json is that of step-00000002"


def a_manifest_of_nothing(_: Path, new: Path) -> str:
    from mpdist.shelf import read_manifest, write_manifest

    write_manifest(new, {**read_manifest(new), "files": []})
    return "hf/chat_template.jinja is not in the manifest"


def the_format_of_another_version(_: Path, new: Path) -> str:
    from mpdist.shelf import read_manifest, write_manifest

    write_manifest(new, {**read_manifest(new), "format": 1})
    return "manifest.json has format 1"


def a_missing_file(_: Path, new: Path) -> str:
    (new / "rng" / "00001.safetensors").unlink()
    return "rng/00001.safetensors is missing"


def no_table_and_a_manifest_that_agrees(_: Path, new: Path) -> str:
    (new / "tensors" / ".metadata").unlink()
    reseal(new)
    return "tensors/.metadata is missing"


def an_extra_file(_: Path, new: Path) -> str:
    (new / "tensors" / "__2_0.distcp").write_bytes(b"")
    return "tensors/__2_0.distcp is not in the manifest"


def another_steps_name(old: Path, new: Path) -> str:
    shutil.rmtree(new)
    shutil.copytree(old, new)
    return "manifest.json is that of step-00000002"


@pytest.mark.parametrize(
    "damage",
    [one_file_from_the_older_save, two_saves_interleaved, no_manifest, the_manifest_of_another, a_manifest_of_nothing,
     the_format_of_another_version, a_missing_file, no_table_and_a_manifest_that_agrees, an_extra_file,
     another_steps_name],
    ids=lambda damage: damage.__name__,
)  # fmt: skip
def test_what_is_not_one_whole_save_is_named_and_the_one_before_is_used(
    checkpoints: Path, damage: Callable[[Path, Path], str]
) -> None:
    expected = damage(checkpoints / OLD, checkpoints / NEW)
    used, refused = opened(checkpoints)
    assert used == OLD
    assert [where for where, _ in refused] == [NEW]
    assert refused[0][1].startswith(expected)


def test_a_copy_under_a_name_that_is_no_steps_can_be_started_from(checkpoints: Path) -> None:
    from mpdist import restore

    copy = shutil.copytree(checkpoints / NEW, checkpoints.parent / "before-the-crash")
    assert restore.open_checked(Path(copy)).step == 4


# -- pickles ------------------------------------------------------------------------------------------------------------


class Command:
    """Unpickled, makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def the_table_itself(_: Any, evil: Path) -> Any:
    return Command(evil)


def deep_in_the_table(table: Any, evil: Path) -> Any:
    table.planner_data = {"a": ("b", Command(evil))}
    return table


def an_entry_that_is_no_tensor(table: Any, _: Path) -> Any:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    table.state_dict_metadata["model.lm_head.weight"] = BytesStorageMetadata()  # torch would unpickle it freely
    return table


def a_file_of_another_folder(table: Any, _: Path) -> Any:
    next(iter(table.storage_data.values())).relative_path = "../../../secret"
    return table


def no_table(_: Any, __: Path) -> Any:
    return {"state_dict_metadata": {}}


@pytest.mark.parametrize(
    ("forge", "why"),
    [
        (the_table_itself, "names posix.mkdir"),
        (deep_in_the_table, "names posix.mkdir"),
        (an_entry_that_is_no_tensor, "names torch.distributed.checkpoint.metadata.BytesStorageMetadata"),
        (a_file_of_another_folder, "names ../../../secret"),
        (no_table, "holds a dict instead of a table"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_table_with_a_command_in_it_is_refused_and_nothing_is_run(
    checkpoints: Path, forge: Callable[[Any, Path], Any], why: str
) -> None:
    evil, table = checkpoints.parent / "evil", checkpoints / NEW / "tensors" / ".metadata"
    table.write_bytes(pickle.dumps(forge(pickle.loads(table.read_bytes()), evil)))
    used, refused = opened(checkpoints)  # the manifest does not match: refused before it is opened
    assert (used, refused[0][1].partition(":")[0]) == (OLD, "tensors/.metadata was altered") or (
        refused[0][1].startswith("tensors/.metadata has ")
    )
    reseal(checkpoints / NEW)
    used, refused = opened(checkpoints)
    assert used == OLD
    assert refused[0][1].startswith(f"tensors/.metadata {why}")
    assert not evil.exists()


def test_getattr_in_a_pickle_reaches_nothing_but_memory_formats(tmp_path: Path) -> None:
    """Some versions of Python pickle members of an Enum by it, and everything else could be reached by it too."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

    from mpdist.tensor_files import _Unpickler, fault_in_table

    class ByName:
        def __init__(self, kind: Any, name: str) -> None:
            self.args = kind, name

        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, self.args

    good = pickle.dumps(ByName(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    assert _Unpickler(io.BytesIO(good)).load() is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    (tmp_path / ".metadata").write_bytes(pickle.dumps(ByName(Metadata, "__init__")))
    assert "names __init__ of" in str(fault_in_table(tmp_path))


def test_a_file_of_tensors_with_a_command_in_it_runs_nothing(checkpoints: Path) -> None:
    import torch

    from mpdist import export
    from mpdist.errors import CheckpointError

    evil, table = checkpoints.parent / "evil", checkpoints / NEW / "tensors" / ".metadata"
    torch.save(Command(evil), table.with_name("__0_0.distcp"))
    entries = pickle.loads(table.read_bytes())
    for place in entries.storage_data.values():
        place.relative_path, place.offset = "__0_0.distcp", 0
        place.length = table.with_name("__0_0.distcp").stat().st_size
    table.write_bytes(pickle.dumps(entries))
    reseal(checkpoints / NEW)
    assert opened(checkpoints) == (NEW, [])
    with pytest.raises(CheckpointError, match="holds something else than tensors"):
        export.run(str(checkpoints / NEW), str(checkpoints.parent / "export"))
    assert not evil.exists()
    assert not (checkpoints.parent / "export").exists()


# -- whole runs -----------------------------------------------------------------------------------------------------------


def picture(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder below with its time of change and size."""
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_c68_a_run_that_cannot_be_resumed_ends_with_6_and_changes_nothing(trained: Result, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained.folder, tmp_path / "runs" / "run"))
    flip(run / "checkpoints" / NEW / "state.json")
    (run / "checkpoints" / OLD / "manifest.json").unlink()
    (run / "checkpoints" / ".step-00000005.aside").mkdir()
    kept = ["checkpoints", "hf"]
    before = {name: picture(run / name) for name in kept}
    metrics = (run / "metrics.jsonl").read_bytes()
    again = longer(tmp_path, trained)
    assert [status for status, _ in again.ends] == [6, 6]
    assert "none of the 2 checkpoints" in again.message
    assert [(e["checkpoint"], e["file"]) for e in again.events("refused")] == [
        (NEW, "state.json"),
        (OLD, "manifest.json"),
    ]
    assert {name: picture(run / name) for name in kept} == before
    assert (run / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize("whole_run", [True, False])
def test_c68_a_new_run_from_a_checkpoint_that_is_not_whole_leaves_that_one_alone(
    trained: Result, tmp_path: Path, whole_run: bool
) -> None:
    source = Path(shutil.copytree(trained.folder, tmp_path / "source"))
    for name in (OLD, NEW):
        flip(source / "checkpoints" / name / "tensors" / "__1_0.distcp")
    before = picture(source)
    path = source if whole_run else source / "checkpoints" / NEW
    branch = longer(tmp_path, trained, name="branch", checkpoint={"every": 2, "resume": str(path)})
    assert [status for status, _ in branch.ends] == [6, 6]
    assert "__1_0.distcp" in branch.message or branch.events("refused")[0]["file"] == "tensors/__1_0.distcp"
    assert picture(source) == before
    assert not list((branch.folder / "checkpoints").glob("*"))
    assert not (branch.folder / "metrics.jsonl").exists() or not branch.rows()


def longer(folder: Path, trained: Result, **changes: Any) -> Result:
    """The trained run's settings in another folder, with two steps more."""
    data = [{"path": str(trained.folder.parents[1] / "train.jsonl")}]
    values = {"data__train": data, "checkpoint__every": 2, "optim__horizon": 6, "budget__steps": 6}
    if "checkpoint" in changes:
        del values["checkpoint__every"]
    return train(folder, 2, **{**values, **changes})


def test_a_whole_checkpoint_of_another_run_is_passed_over(tmp_path: Path) -> None:
    common: dict[str, Any] = {"checkpoint__every": 2, "optim__horizon": 6, "budget__steps": 4}
    run = train(tmp_path, 1, **common)
    other = train(tmp_path, 1, **common, name="other", seed=3)
    shutil.rmtree(run.folder / "checkpoints" / NEW)
    shutil.copytree(other.folder / "checkpoints" / NEW, run.folder / "checkpoints" / NEW)
    end = train(tmp_path, 1, **{**common, "budget__steps": 6})
    assert end.status == 0, end.message
    refused = end.events("refused")
    assert [(e["checkpoint"], e["file"]) for e in refused] == [(NEW, "state.json")]
    assert "other settings" in refused[0]["reason"]
    assert [e["reason"] for e in end.events("load")] == [str(run.folder / "checkpoints" / OLD)]
