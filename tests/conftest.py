"""How the suite is dealt out to several workers (tests/run.sh), and which tests run with the machine to themselves.

A worker gets whole files, so that what a module has started is started once, and all of tests/slurm, since there is one
cluster. Tests marked `alone` judge time: `--alone not` leaves them out, `--alone only` runs nothing else.

What a test measured it may say with `figure(text)`; `--figures` prints these lines at the end, so that a claim can be read
from the run that proved it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as tests/run.sh does, and before torch is there

WORKERS = 6  # at most: each holds an interpreter with torch, and ranks of its own
LONGEST_FIRST = {"slurm": 0, "shell": 1, "world": 2, "cpu": 3}  # folders; what is begun last should not be long


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alone", choices=["not", "only"], help="leave out what is marked alone, or run only that")
    parser.addoption("--figures", action="store_true", help="print at the end what the tests measured")


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """`figure(text)`: a line for --figures. It travels with the test's report, also from a worker's process."""
    return lambda text: record_property("figure", text)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A test that failed has proven nothing; its figures are left out."""
    passed = terminalreporter.getreports("passed") if config.getoption("figures") else []
    said = [(r.nodeid, text) for r in passed for name, text in r.user_properties if name == "figure"]
    if said:
        terminalreporter.section("figures")
    before = ""
    for test, text in sorted(dict.fromkeys(said), key=lambda one: one[0]):  # a test's own in its order
        if test != before:
            terminalreporter.line(test)
        terminalreporter.line(f"    {text}")
        before = test


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spares `--alone only` the imports of all other files."""
    if config.getoption("alone") == "only" and collection_path.is_file():
        return "mark.alone" not in collection_path.read_text("utf-8") or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if asked := config.getoption("alone"):
        kept = [item for item in items if (item.get_closest_marker("alone") is None) == (asked == "not")]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: LONGEST_FIRST.get(item.path.parent.name, len(LONGEST_FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: much of a test is waiting."""
    return min(len(os.sched_getaffinity(0)) + 1, WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "tests/slurm" if file.startswith("tests/slurm/") else file

    config.option.loadscopereorder = False  # keep the order of the items; the default is by the number of tests
    return ByFile(config, log)
