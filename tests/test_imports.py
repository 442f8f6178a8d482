"""The import rules of ARCHITECTURE.md: who may import whom, and no circle, imports inside of functions included."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import fxpasses

ROOT = Path(fxpasses.__file__).parent
# What a folder may import besides itself and the modules of `BASE`.
MAY_IMPORT = {
    "graph": set(),
    "runtime": set(),
    "collectives": {"graph"},
    "passes": {"graph", "metadata"},
    "metadata": {"graph", "runtime", "passes"},
    "dynamo": {"graph", "runtime", "metadata", "collectives"},
    "fold": {"graph", "passes"},
    "topk": {"graph", "passes"},
    "offload": {"graph", "runtime", "fold"},
    "memory": {"graph", "fold", "offload", "attention", "rows"},
    "attention": {"graph", "runtime", "metadata", "passes"},
    "experts": {"graph", "runtime", "passes", "dynamo"},
    "sequences": {"graph", "metadata", "dynamo", "experts"},
    "rows": {"graph", "runtime", "metadata", "attention", "experts", "passes", "dynamo"},
    "loss": {"graph", "runtime", "metadata", "rows", "passes", "dynamo"},
    "restart": {"graph", "metadata", "dynamo", "loss", "passes", "rows"},
    "inspect": {
        "graph",
        "runtime",
        "collectives",
        "passes",
        "metadata",
        "dynamo",
        "fold",
        "offload",
        "attention",
        "rows",
    },
}
# Plain data, errors and words: they import one another alone.
BASE = {"base", "default_options", "errors", "options", "registry", "report", "version"}


def modules() -> dict[str, Path]:
    found = {}
    for file in ROOT.rglob("*.py"):
        parts = ("fxpasses", *file.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(tree: ast.AST, known: dict[str, Path], types: bool) -> Iterator[str]:
    """Modules of the package that a module imports. types: whether to count those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        yield from imported(node, known, types)


def imports(types: bool = False) -> dict[str, set[str]]:
    known = modules()
    return {name: set(imported(ast.parse(file.read_text()), known, types)) - {name} for name, file in known.items()}


def test_no_circle() -> None:
    # The package itself names public objects for their users; what it imports lazily is no module's own import.
    TopologicalSorter({name: found - {"fxpasses"} for name, found in imports(types=True).items()}).prepare()


def test_folders_import_what_lies_below_them() -> None:
    wrong = []
    for name, found in imports().items():
        folder = (name.split(".") + [""])[1]
        for other in found - {"fxpasses"}:
            part = (other.split(".") + [""])[1]
            if folder in MAY_IMPORT and part not in BASE | MAY_IMPORT[folder] | {folder}:
                wrong.append(f"{name} imports {other}")
            if folder in BASE and part not in BASE:
                wrong.append(f"{name} imports {other}")
    assert not wrong, sorted(wrong)


def test_who_names_an_operator_of_the_package_imports_what_registers_it() -> None:
    """A pass may run in a process that has imported nothing else."""
    known, found = modules(), imports()
    texts = {name: file.read_text() for name, file in known.items()}
    registers = {
        operator: name
        for name, text in texts.items()
        for operator in re.findall(r'^@custom_op\(\s*"fxpasses::(\w+)"', text, re.MULTILINE)
    }
    assert len(registers) > 20
    wrong = []
    for name, text in texts.items():
        seen, rest = set(), [name]
        while rest:
            module = rest.pop()
            if module not in seen:
                seen.add(module)
                rest += found[module]
        names = {node.attr for node in ast.walk(ast.parse(text)) if _is_of_package(node)}
        wrong += [f"{name}: {operator}" for operator in names & registers.keys() if registers[operator] not in seen]
    assert not wrong, sorted(wrong)


def _is_of_package(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.ops.fxpasses"
