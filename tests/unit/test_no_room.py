"""A full disk: recognised in any words, told instead of traced, and room kept for a run's last words."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest

from mpdist import cli
from mpdist.errors import MachineError
from mpdist.lines import Lines, no_room, read_lines
from mpdist.record import RunDir
from mpdist.watch import _Log

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some/file")


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (FULL, True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (RuntimeError("out of memory"), False),
    ],
)
def test_a_full_disk_is_known_in_any_words(error: Exception, full: bool) -> None:
    assert no_room(error) is full


def test_a_command_on_a_full_disk_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(error: OSError) -> Any:
        raise error

    assert cli.reported(lambda: failing(FULL)) == 4
    assert capsys.readouterr().err.splitlines() == [
        "some/file: No space left on device",
        "  do:  make room and try again",
    ]
    with pytest.raises(PermissionError):
        cli.reported(lambda: failing(PermissionError(errno.EACCES, "Permission denied")))


def test_a_log_on_a_full_disk_loses_lines_and_ends_nothing() -> None:
    log = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    console = io.StringIO()
    out = _Log(log, console)
    print("a line", file=out)
    out.flush()
    assert console.getvalue() == "a line\n"
    with pytest.raises(OSError, match="No space left"):
        log.close()


def test_a_run_holds_room_while_it_is_live(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.claim()
    run.start_session()
    reserve = run.path / ".reserve"
    assert reserve.stat().st_size == 65536
    run.last_words()
    assert not reserve.exists()
    run.last_words()
    run.start_session()
    run.close()
    run.release()
    assert not reserve.exists()


def test_what_meets_a_disk_that_a_save_has_filled_is_written_when_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, append, asked = RunDir(tmp_path / "run"), Lines.append, list[str]()

    def full(self: Lines, row: Any) -> None:
        if not asked:
            raise MachineError("cannot append a line")
        append(self, row)

    monkeypatch.setattr(Lines, "append", full)
    with pytest.raises(MachineError):
        run.event("start")
    run.made_room = lambda: not asked.append("once")  # type: ignore[func-returns-value]
    run.event("start", 7)
    assert [event["step"] for event in read_lines(run.events_path)] == [7]
