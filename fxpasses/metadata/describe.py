"""Numbered values in the words of the user's program: `batch['lengths'].sum()`, for messages and reports."""

from __future__ import annotations

from typing import Any

from fxpasses.graph.calls import operator_of
from fxpasses.graph.provenance import in_program, source
from fxpasses.graph.values import Entry, Ref, ValueTable
from fxpasses.metadata.emission import slice_of

_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "truediv": "/", "mod": "%", "pow": "**", "and_": "&",
    "or_": "|", "xor": "^", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_LONGEST = 80


def describe(table: ValueTable, operand: Any) -> str:
    """The expression for a reference or a constant; if it is long, the name of its node and the inputs behind it."""
    text = _describe(table, operand, 6)
    if "…" not in text or not isinstance(operand, Ref):
        return text
    roots = [table.entries[number] for number in slice_of(table, [operand])]
    names = dict.fromkeys(input_name(root) for root in roots if root.kind == "root")
    return f"{table.entries[operand.number].node.name} (from {', '.join(names)})"


def _describe(table: ValueTable, operand: Any, depth: int) -> str:
    if isinstance(operand, (list, tuple)):
        parts = [_describe(table, item, depth) for item in operand]
        return (
            f"[{', '.join(parts)}]" if isinstance(operand, list) else f"({', '.join(parts)}{',' * (len(parts) == 1)})"
        )
    if isinstance(operand, slice):
        bounds = [operand.start, operand.stop, *[operand.step] * (operand.step is not None)]
        return ":".join("" if bound is None else _describe(table, bound, depth) for bound in bounds)
    if not isinstance(operand, Ref):
        return str(operand)
    if depth == 0:
        return "…"
    text = _expression(table, table.entries[operand.number], depth)
    return text if len(text) <= _LONGEST else "…"


def _expression(table: ValueTable, entry: Entry, depth: int) -> str:
    if entry.kind == "root":
        return input_name(entry)
    if entry.kind == "look":
        return "x"
    if entry.kind == "item":
        return f"{_describe(table, entry.operands[0], depth - 1)}[{entry.path}]"
    parts = [_describe(table, argument, depth - 1) for argument in entry.args]
    parts += [f"{name}={_describe(table, value, depth - 1)}" for name, value in entry.kwargs.items()]
    target = entry.node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    if name in ("item", "sym_int", "int") and len(parts) == 1:
        return parts[0]
    if name in ("sym_max", "sym_min"):
        return f"{name.removeprefix('sym_')}({', '.join(parts)})"
    if name == "sym_sum" and len(entry.args) == 1 and isinstance(entry.args[0], (list, tuple)):
        return f"({' + '.join(_describe(table, item, depth - 1) for item in entry.args[0])})"
    if name in _OPERATORS and len(parts) == 2:
        return f"({parts[0]} {_OPERATORS[name]} {parts[1]})"
    if name == "neg" and len(parts) == 1:
        return f"-{parts[0]}"
    if name == "getitem" and len(parts) == 2:
        return f"{parts[0]}[{parts[1]}]"
    if entry.node.op == "call_method":
        return f"{parts[0]}.{name}({', '.join(parts[1:])})"
    return f"{name}({', '.join(parts)})"


def comparison(table: ValueTable, number: int) -> tuple[str, Any, Any] | None:
    """(symbol, left, right) of a value that is the comparison of two others."""
    entry = table.entries[number]
    name = operator_of(entry.node)
    if entry.kind == "op" and name in ("eq", "ne", "lt", "le", "gt", "ge") and len(entry.args) == 2:
        return _OPERATORS[name], entry.args[0], entry.args[1]
    return None


def input_name(entry: Entry) -> str:
    return in_program(source(entry.node)) or entry.node.name
