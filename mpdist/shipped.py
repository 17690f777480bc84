"""The configurations and recipes that come with mpdist: in a checkout at its top, in a wheel beside the modules."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from mpdist.errors import MachineError, UsageError

FOLDERS = ("configs", "launch", "slurm")


def root() -> Path:
    """The folder that holds ``configs/``, ``launch/`` and ``slurm/``. Raises MachineError where they are missing."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_shipped", package.parent):
        if (folder / "configs").is_dir():
            return folder
    raise MachineError(
        f"there is no configs folder beside {package}", "the installation is not whole", "install mpdist again"
    )


def names() -> list[str]:
    """What there is, as paths under ``root()``: ``configs/...yaml``, ``launch/...sh``, ``slurm/...sbatch``."""
    top = root()
    found = []
    for folder in FOLDERS:
        if (top / folder).is_dir():
            found += [
                str(p.relative_to(top))
                for p in sorted((top / folder).rglob("*"))
                if p.suffix in (".yaml", ".sh", ".sbatch")
            ]
    return found


def find(name: str) -> Path:
    """The file of a name as listed, or of its last part with or without the ending. Raises UsageError."""
    known = names()
    matches = [n for n in known if name in (n, n.removeprefix("configs/"), Path(n).name, Path(n).stem)]
    if name in known:
        matches = [name]
    if len(matches) == 1:
        return root() / matches[0]
    if matches:
        raise UsageError(f"{name} names {len(matches)} files", ", ".join(matches), "give the whole name")
    stems = {Path(n).stem: n for n in known}
    near = difflib.get_close_matches(Path(name).stem, stems, n=1, cutoff=0.5)
    do = f"did you mean {stems[near[0]]}?" if near else "`mpdist configs` lists them"
    raise UsageError(f"{name} does not come with mpdist", "no shipped file has that name", do)


def describe(path: Path) -> str:
    """The first sentence of a file's opening comment."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("#!"):
            return re.split(r"(?<=[a-z0-9)])[.:] ", line.lstrip("# ").strip())[0].rstrip(".")
        if line.strip() and not line.startswith("#!"):
            break
    return ""


def copy(name: str, folder: Path) -> list[Path]:
    """Copy a file, and the parents that it extends, into ``folder`` so that it works there.

    Folders keep their places to each other, since ``extends`` is relative. Raises UsageError rather than overwrite.
    """
    top = root() / "configs"
    written = []
    for source in _with_parents(find(name)):
        target = folder / (source.relative_to(top) if source.is_relative_to(top) else source.name)
        if target.exists() and target.read_bytes() != source.read_bytes():
            raise UsageError(f"{target} exists", "it is not what comes with mpdist", "remove it, or copy elsewhere")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
        target.chmod(source.stat().st_mode & 0o777 | 0o200)
        written.append(target)
    return written


def _with_parents(path: Path) -> Iterator[Path]:
    while True:
        yield path
        match = re.search(r"^extends:\s*['\"]?([^'\"#\s]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if path.suffix != ".yaml" or match is None:
            return
        path = (path.parent / match[1]).resolve()
