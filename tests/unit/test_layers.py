"""Imports point down. The table of layers is here; what is not in it is a part (layer 3)."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "mpdist"

# words 0, asked 1, follows 2, parts 3, whole 4, command 5
LAYERS = {
    "": 0,
    "errors": 0,
    "units": 0,
    "world": 0,
    "config": 1,
    "arch": 1,
    "arch_families": 1,
    "devices": 1,
    "formats": 1,
    "shipped": 1,
    "cluster": 2,
    "interface": 2,
    "requeue": 2,
    "submit": 2,
    "slurm": 2,
    "plan": 2,
    "plan_advice": 2,
    "plan_command": 4,
    "plan_tape": 2,
    "plan_layers": 2,
    "plan_activations": 2,
    "plan_groups": 2,
    "plan_moments": 2,
    "plan_wire": 2,
    "plan_ddp": 2,
    "plan_fsdp": 2,
    "plan_memory": 2,
    "plan_search": 2,
    "plan_html": 2,
    "plan_simulated": 2,
    "plan_text": 2,
    "plan_time": 2,
    "plan_traffic": 2,
    "plan_zero": 2,
    "paper": 2,
    "svg": 2,
    "svg_charts": 2,
    "space": 2,
    "findings": 2,
    "hub": 2,
    "machine": 2,
    "clock": 2,
    "compare": 2,
    "compare.command": 4,
    "compare.tracked": 4,
    "lines": 2,
    "lock": 2,
    "record": 2,
    "run_files": 2,
    "precision_html": 2,
    "scale": 2,
    "retries": 2,
    "env": 2,
    "watch": 2,
    "stacks": 2,
    "hang": 2,
    "blame": 2,
    "supervise": 2,
    "inputs": 2,
    "place": 2,
    "launch": 2,
    "sweep": 2,
    "sweep_arms": 2,
    "sweep_file": 2,
    "sweep_first": 2,
    "sweep_speed": 2,
    "translate": 2,
    "translate.theirs": 4,
    "translate.command": 4,
    "assemble": 4,
    "simulate": 4,
    "preflight": 4,
    "resume": 4,
    "evaluation": 4,
    "session": 4,
    "train": 4,
    "worker": 4,
    "export": 4,
    "data.command": 4,
    "doctor": 4,
    "data.fetch": 4,
    "cli": 5,
    "commands": 5,
    "__main__": 5,
}
PARTS = 3
# All that is not the standard library below the parts, inside functions too.
CONFIG_LIBRARIES = {"pydantic", "ruamel"}
# Statistics that are not home-made: a comparison's, imported where they are used and never when the command starts.
STATISTICS = {"numpy", "scipy"}
# Packages that belong to some modules only, wherever the import stands.
ONLY_IN = {
    "wandb": {"track", "wandb_process"},
    "transformers": {"model", "data", "export", "loss", "simulate", "translate"},
    "datasets": {"data"},
    "accelerate": {"model", "translate"},
    "deepspeed": {"shard", "translate"},
    # track: W&B runs in a process of its own, which may hang or die
    "subprocess": {"place", "requeue", "slurm", "submit", "supervise", "track"},
    "multiprocessing": set(),
}


@dataclass(frozen=True)
class Import:
    module: str  # who imports, dotted, without the package's name
    line: int
    target: str  # dotted: `torch.nn`, or `mpdist.errors`
    top: bool  # when the module is imported, not later inside a function
    typing: bool  # under TYPE_CHECKING only

    @property
    def own(self) -> str | None:
        """The target without the package's name, where it is one of ours."""
        return self.target.removeprefix("mpdist").removeprefix(".") if self.target.split(".")[0] == "mpdist" else None


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    package = module.split(".") if path.name == "__init__.py" and module else module.split(".")[:-1]

    def visit(node: ast.AST, top: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(module, child.lineno, alias.name, top, typing)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    around = ["mpdist", *package][: len(package) + 2 - child.level]
                    base = ".".join([*around, *([base] if base else [])])
                for alias in child.names:
                    name = f"{base}.{alias.name}"
                    is_module = name.removeprefix("mpdist.") in known and name.startswith("mpdist.")
                    yield Import(module, child.lineno, name if is_module else base, top, typing)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                checking = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
                yield from visit(child, top and not inside, typing or checking)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), True, False)


@functools.cache
def all_imports() -> list[Import]:
    known = modules()
    return [found for module, path in known.items() for found in imports(module, path, known)]


def layer(module: str) -> int:
    while module not in LAYERS and "." in module:
        module = module.rpartition(".")[0]
    return LAYERS.get(module, PARTS)


def test_the_table_names_modules_that_exist() -> None:
    missing = set(LAYERS) - set(modules())
    assert not missing, f"in the table of layers, but not in the package: {sorted(missing)}"


def test_no_import_points_up() -> None:
    wrong = [
        f"mpdist/{i.module}:{i.line} imports {i.own}: layer {layer(i.module)} may not import layer {layer(i.own)}"
        for i in all_imports()
        if i.own is not None and layer(i.own) > layer(i.module)
    ]
    assert wrong == []


def test_parts_get_flat_values_and_never_see_the_config() -> None:
    wrong = [
        f"mpdist/{i.module}:{i.line} imports {i.own}"
        for i in all_imports()
        if i.own is not None and i.own.split(".")[0] == "config" and layer(i.module) == PARTS
    ]
    assert wrong == []


def test_modules_do_not_import_each_other_in_circles() -> None:
    graph: dict[str, set[str]] = {}
    for i in all_imports():
        if i.own is not None and i.top and not i.typing and i.own != i.module:
            graph.setdefault(i.module, set()).add(i.own)
    done: set[str] = set()

    def walk(module: str, chain: tuple[str, ...]) -> None:
        assert module not in chain, " -> ".join((*chain[chain.index(module) :], module))
        if module not in done:
            for target in sorted(graph.get(module, ())):
                # A package's modules are imported by its __init__, and may import each other's names from beside it.
                if not module.startswith(f"{target}."):
                    walk(target, (*chain, module))
            done.add(module)

    for module in sorted(graph):
        walk(module, ())


def test_only_the_standard_library_below_the_parts() -> None:
    wrong = []
    for i in all_imports():
        package = i.target.split(".")[0]
        outside = package not in sys.stdlib_module_names and package != "mpdist"
        top = i.module.split(".")[0]
        allowed = CONFIG_LIBRARIES if top == "config" else STATISTICS if top == "compare" and not i.top else set()
        if outside and not i.typing and (layer(i.module) < PARTS or layer(i.module) == 5) and package not in allowed:
            wrong.append(f"mpdist/{i.module}:{i.line} imports {i.target}")
    assert wrong == []


@pytest.mark.parametrize("package", sorted(ONLY_IN))
def test_a_package_stays_where_it_belongs(package: str) -> None:
    wrong = [
        f"mpdist/{i.module}:{i.line}"
        for i in all_imports()
        if i.target.split(".")[0] == package and i.module.split(".")[0] not in ONLY_IN[package]
    ]
    assert wrong == [], f"{package} is imported outside {sorted(ONLY_IN[package])}"


def test_the_command_imports_its_commands_inside_the_functions() -> None:
    whole = [i for i in all_imports() if i.module.partition(".")[0] in ("cli", "commands", "__main__")]
    top = {i.own for i in whole if i.own is not None and i.top and not i.typing}
    assert top <= {"", "errors", "cli", "commands.words"}


def test_the_checks_see_what_they_should(tmp_path: Path) -> None:
    """The control: each kind of import, as these tests read it."""
    path = tmp_path / "x.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nimport torch.nn\nfrom .. import errors\nfrom . import ddp\n"
        "from ..plan import make\n"
        "if TYPE_CHECKING:\n    from mpdist.config import Config\ndef f():\n    import wandb\n"
    )
    known = dict.fromkeys(("", "errors", "plan", "config", "shard", "shard.ddp"), path)
    found = [(i.target, i.top, i.typing) for i in imports("shard.x", path, known)]
    assert found == [
        ("typing", True, False),
        ("torch.nn", True, False),
        ("mpdist.errors", True, False),
        ("mpdist.shard.ddp", True, False),
        ("mpdist.plan", True, False),
        ("mpdist.config", True, True),
        ("wandb", False, False),
    ]
    assert (layer("errors"), layer("config.load"), layer("shard.ddp"), layer("data.command")) == (0, 1, 3, 4)
