"""The README: its generated parts are what the code says, its commands parse, and the files that it names exist.

Run as a program, this writes the generated parts anew.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpdist import cli, errors
from mpdist.clock import LABELS
from mpdist.commands.words import Parser
from mpdist.compare.gates import QUANTITIES
from mpdist.config import compat, load
from mpdist.config.describe import find, reference
from mpdist.config.rules import SUPPORT
from mpdist.record import EVENTS, METRICS, STATES

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
_PART = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _support() -> str:
    rows = []
    for engine in SUPPORT.values():
        lists = (engine.offload, engine.computes, engine.wires, engine.sums, engine.when)
        stages = ", ".join(map(str, engine.stages))
        replicas = "yes" if engine.replicas else "no"
        rows.append([f"`{engine.engine}`", stages, replicas, *(", ".join(values) for values in lists), engine.note])
    names = ["stage", "replicas", "offload", "compute", "wire", "sum", "when"]
    sections = ["shard", "shard", "shard", "precision", "reduce", "reduce", "reduce"]
    keys = [f"`{section}.{name}`" for section, name in zip(sections, names, strict=True)]
    return _table(["engine", *keys, ""], rows)


def _resume() -> str:
    def names(entries: tuple[str, ...]) -> str:
        return ", ".join(f"`{entry}*`" if entry.endswith(".") else f"`{entry}`" for entry in entries)

    more = "a larger budget of the same kind, under a constant schedule or with `optim.horizon` given"
    rows = [["freely: they change no number", names(compat.FREE)], ["freely", more]]
    rows.append(["named in the `resume` event: equal but for FP32 rounding", names(compat.CUT)])
    rows.append(["named in the `resume` event: the training is the same", names(compat.WATCHED)])
    return _table(["may change", "keys"], rows)


def _gates() -> str:
    units = {"": "none", "bytes": "bytes such as `80GiB`"}
    rows = [
        [f"`{name}`", ", ".join(units.get(unit, f"`{unit}`") for unit in quantity.units), quantity.meaning]
        for name, quantity in QUANTITIES.items()
    ]
    return _table(["quantity", "unit", ""], rows)


GENERATED: dict[str, Callable[[], str]] = {
    "gates": _gates,
    "commands": lambda: _table(
        ["command", ""], [[f"`mpdist {name}`", summary] for name, (_, summary) in cli.COMMANDS.items()]
    ),
    "support": _support,
    "resume": _resume,
    "time": lambda: _table(["`time`", "seconds"], [[f"`{label}`", text] for label, text in LABELS.items()]),
    "metrics": lambda: _table(["name", "meaning"], [[f"`{name}`", text] for name, text in METRICS.items()]),
    "reference": reference,
}


MEASURED = {
    "agreement": "tests/agreement.py",
    "planned": "tests/planned.py",
}  # parts whose figures come from a run of that program


def written(text: str) -> str:
    """The README with its generated parts as they should be; measured ones stay as they are."""
    return _PART.sub(lambda m: m[0] if m[2] in MEASURED else f"{m[1]}\n{GENERATED[m[2]]()}\n\n{m[3]}", text)


def test_the_generated_parts_are_up_to_date() -> None:
    text = README.read_text("utf-8")
    parts = [match[2] for match in _PART.finditer(text)]
    assert [part for part in parts if part not in MEASURED] == list(GENERATED)
    assert {part for part in parts if part in MEASURED} == set(MEASURED)
    assert text == written(text), "run: python tests/unit/test_readme.py"


def test_the_agreement_table_has_every_engine_and_stage() -> None:
    part = next(match[0] for match in _PART.finditer(README.read_text("utf-8")) if match[2] == "agreement")
    heads = part.splitlines()[2].split(" | ")
    wanted = {f"`{support.engine}` {stage}" for support in SUPPORT.values() for stage in support.stages}
    assert wanted <= set(heads)
    assert len(part.splitlines()) > 20


def test_the_planned_table_has_every_case() -> None:
    from planned import CASES

    part = next(match[0] for match in _PART.finditer(README.read_text("utf-8")) if match[2] == "planned")
    assert [case.name for case in CASES] == re.findall(r"^\| \d+ \| (.*?) \|", part, re.MULTILINE)


def _fences(*languages: str) -> list[str]:
    return [body for language, body in _FENCE.findall(README.read_text("utf-8")) if language in languages]


def _commands() -> list[list[str]]:
    lines = [line for body in _fences("sh") for line in body.splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


def test_every_fence_has_a_language_that_is_checked_here() -> None:
    languages = {language for language, _ in _FENCE.findall(README.read_text("utf-8"))}
    assert languages == {"sh", "yaml", "python"}
    assert README.read_text("utf-8").count("```") == 2 * len(_fences("sh", "yaml", "python"))
    for body in _fences("sh"):
        subprocess.run(["sh", "-n"], input=body, text=True, check=True, timeout=20)
    for body in _fences("python"):
        compile(body, "README.md", "exec")


class _Parsed(Exception):
    """Carries what a command line was understood as, before anything is done."""


@pytest.mark.parametrize("words", [w for w in _commands() if w[0] == "mpdist"], ids=" ".join)
def test_commands_parse_and_their_settings_are_real(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop_after(method: Callable[..., Any]) -> Callable[..., None]:
        def parse(parser: Any, argv: list[str]) -> None:
            monkeypatch.undo()
            raise _Parsed(method(parser, argv))

        return parse

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(Parser, name, stop_after(getattr(Parser, name)))
    with pytest.raises(_Parsed) as caught:
        cli.COMMANDS[words[1]][0](words[2:])
    arguments = caught.value.args[0]
    if hasattr(arguments, "overrides") and arguments.config is not None and not arguments.config.startswith("runs/"):
        shipped = ROOT / arguments.config.replace("my_runs/", "configs/")
        load(shipped, arguments.overrides)


def test_the_scripts_named_are_there() -> None:
    text = README.read_text("utf-8")
    for path in set(re.findall(r"\b(?:tests|launch|configs)/[\w./]+\.(?:py|sh|md|yaml)\b", text)):
        assert (ROOT / path).is_file(), path
    for script in re.findall(r"^ {4}sh (\S+)", text, re.MULTILINE):
        assert (ROOT / script).is_file(), script


def test_yaml_fragments_hold_real_keys() -> None:
    from ruamel.yaml import YAML

    def keys(node: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        return [path, *(deeper for key, value in items for deeper in keys(value, (*path, str(key))))]

    for body in _fences("yaml"):
        for path in keys(YAML(typ="safe").load(body), ())[1:]:
            assert find(path) is not None, path


def test_keys_in_the_prose_exist() -> None:
    text = _PART.sub("", README.read_text("utf-8"))
    sections = r"(?:model|data|batch|precision|shard|reduce|memory|optim|budget|eval|checkpoint|track|launch)"
    named = set(re.findall(rf"`({sections}(?:\.\w+)+)(?:=[^`]*)?`", text)) - {"launch.sh"}
    assert len(named) > 10
    for name in named:
        assert find(tuple(name.split("."))) is not None, name


def test_the_torchrun_line_is_that_of_the_recipe() -> None:
    def words(text: str) -> list[str]:
        found = re.search(r"torchrun (--(?:.*\\\n)*.*) -m mpdist", text)
        assert found
        return found[1].replace("\\\n", " ").replace('"${RANKS:-8}"', "8").split()

    assert words(README.read_text("utf-8")) == words((ROOT / "launch/one_node.sh").read_text("utf-8"))


def test_events_and_states_are_all_explained() -> None:
    section = README.read_text("utf-8").partition("## The run directory")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \| .* \| .* \|$", section, re.MULTILINE)) - {"event"} == EVENTS
    assert all(f"`{state}`" in section for state in STATES)


def test_exit_statuses_are_those_of_the_errors() -> None:
    section = README.read_text("utf-8").partition("## Exit statuses")[2].partition("\n## ")[0]
    listed = {int(number) for number in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    classes = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MpdistError)
    ]
    assert listed == {0, *(kind.status for kind in classes)}


if __name__ == "__main__":
    README.write_text(written(README.read_text("utf-8")), "utf-8")
