"""Converts FX graphs to the data model: a graph's present state, as plain values.

A snapshot holds no tensor, fake tensor or module, so a record keeps nothing of a model alive, and later changes of the
graph or of symbols' expressions do not affect it.

Private names, checked on torch 2.13: `torch.fx.node._get_qualified_name`, `SymInt.node.expr` and `.hint`.
"""

from __future__ import annotations

import enum
import linecache
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.node import _get_qualified_name
from torch.utils import _pytree as pytree

from fxpasses.graph.aliases import storages_of
from fxpasses.graph.flops import flops_of
from fxpasses.graph.provenance import is_of_package, module_of, source
from fxpasses.graph.symbols import bytes_of, is_symbolic
from fxpasses.inspect.model import MAIN, PROLOGUE, Node, Region, Source, TensorValue
from fxpasses.metadata.host_copies import copy_read_by, is_copy_to_host, is_read_by_items
from fxpasses.metadata.program import Check, Program

_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (\S+))?\n?([^\n]*)')
_HANDS_ON = re.compile(r"\(.*\*\w+, \*\*\w+\)")  # `return function(self, *args, **kwargs)`
_BLOCK = re.compile(r"\s*(?:async\s+)?(class|def)\s+(\w+)")
_COPIES_TO_HOST = frozenset({"cpu", "tolist", "numpy", "item"})


def snapshot(gm: GraphModule) -> list[Region]:
    """The regions of a graph: "main", and every body that a higher-order operator runs, outer ones first."""
    return list(_Snapshot().regions(gm, MAIN, ""))


def snapshot_prologue(program: Program) -> tuple[list[Region], list[str]]:
    """The regions of a prologue, and the texts of the assertions that are evaluated with it."""
    regions = []
    sides = (("host", program.host, program.host_inputs), ("device", program.device, program.device_inputs))
    for side, gm, inputs in sides:
        if gm is None:
            continue
        region = next(_Snapshot().regions(gm, f"{PROLOGUE}/{side}", ""))
        placeholders = sum(node.op == "placeholder" for node in region.nodes)
        region.inputs = [*inputs, *[-1] * (placeholders - len(inputs))]
        regions.append(region)
    return regions, [check_text(check) for check in program.checks]


def check_text(check: Check) -> str:
    place = f" (at {check.where})" if check.where else ""
    comparison = f" {check.comparison} {check.right_text}" if check.comparison else ""
    return f"{check.left_text}{comparison}{place}"


def where_from(gm: GraphModule) -> str:
    """The outermost line of the user's program that the graph comes from: `file.py:12 in forward (Model)`.

    "" if unknown. Lines of decorators that only pass their arguments on do not count. The class is the one around the
    line, or else the class of the outermost known module that is not PyTorch's.
    """
    place = owner = ""
    for node in gm.graph.nodes:
        frames = _FRAME.findall(node.meta.get("stack_trace") or "") if node.op.startswith("call") else []
        if frames and not place:
            program = (frame for frame in frames if not _HANDS_ON.search(frame[3]))
            file, line, function, _ = next(program, frames[0])
            place = f"{file.rsplit('/', 1)[-1]}:{line} in {function}"
            owner = _class_around(file, int(line))
        for _, cls in list((node.meta.get("nn_module_stack") or {}).values())[:1]:
            if not owner and isinstance(cls, type) and not cls.__module__.startswith("torch."):
                owner = cls.__name__
        if place and owner:
            break
    return f"{place} ({owner})" if owner else place


def _class_around(file: str, line: int) -> str:
    """The name of the class whose method contains a line, by the file's indentation; "" for none."""
    lines = linecache.getlines(file)[:line]
    inner = len(lines[-1]) - len(lines[-1].lstrip()) if lines else 0
    for text in reversed(lines):
        indent = len(text) - len(text.lstrip())
        if not text.strip() or indent >= inner:
            continue
        found = _BLOCK.match(text)
        if found is None:  # a condition or a loop, or the end of a signature
            inner = indent if text.rstrip().endswith(":") and not text.lstrip().startswith(")") else inner
        elif found[1] == "class":
            return found[2]
        else:
            inner = indent
    return ""


def symbol_hints(gm: GraphModule) -> dict[str, int]:
    """The traced value of every symbol that is the size of an input by itself."""
    hints: dict[str, int] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        for leaf in leaves_of(node):
            sizes = leaf.shape if isinstance(leaf, torch.Tensor) else [leaf]
            for size in sizes:
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.has_hint():
                    hints[str(size.node.expr)] = int(size.node.hint)
    return hints


class _Snapshot:
    def __init__(self) -> None:
        self.storages: dict[int, int] = {}

    def regions(self, gm: GraphModule, path: str, call: str) -> Iterator[Region]:
        bodies = _body_paths(gm, path)
        references = {reference for reference, _ in bodies}  # not nodes of the record: a call names its body
        yield Region(path, [self._node(n, bodies) for n in gm.graph.nodes if n not in references], call)
        for (reference, user), body_path in bodies.items():
            yield from self.regions(getattr(gm, str(reference.target)), body_path, user.name)

    def _node(self, node: FxNode, bodies: dict[tuple[FxNode, FxNode], str]) -> Node:
        def argument(value: Any) -> Any:
            if isinstance(value, FxNode):
                return {"body": bodies[value, node]} if (value, node) in bodies else {"node": value.name}
            return _argument(value, argument)

        leaves = leaves_of(node)
        module, module_class = module_of(node)
        taken = Node(
            name=node.name,
            op=node.op,
            target=_target(node),
            args=[argument(a) for a in node.args],
            kwargs={name: argument(a) for name, a in node.kwargs.items()},
            values=[self._tensor(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)],
            scalar=_scalar(value_of(node)),
            binds=[str(symbol) for symbol in node.meta.get("unbacked_bindings") or ()],
            module=module,
            module_class=module_class,
            source=_source(node),
            source_name=source(node) if node.op == "placeholder" else "",
            flops=flops_of(node, leaves),
        )
        taken.host_read = _is_host_read(node, taken)
        return taken

    def _tensor(self, tensor: torch.Tensor) -> TensorValue:
        storages = storages_of(tensor)  # none for a tensor without a storage of its own
        return TensorValue(
            shape=[_size(size) for size in tensor.shape],
            stride=[_size(step) for step in tensor.stride()] if tensor.layout is torch.strided else [],
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=str(tensor.device),
            bytes=bytes_of(tensor),
            storage=self.storages.setdefault(storages[0], len(self.storages)) if storages else None,
            requires_grad=tensor.requires_grad,
        )


def _body_paths(gm: GraphModule, path: str) -> dict[tuple[FxNode, FxNode], str]:
    """(reference to a body, call that runs it) → the body's path; two calls of one body have a path each."""
    paths: dict[tuple[FxNode, FxNode], str] = {}
    for reference in gm.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(gm, str(reference.target), None), GraphModule):
            for user in reference.users:
                own = f"{path}/{reference.target}"
                paths[reference, user] = own if own not in paths.values() else f"{own}:{user.name}"
    return paths


def value_of(node: FxNode) -> Any:
    """The example of a node, which Dynamo calls `example_value` and AOTAutograd `val`."""
    return node.meta["example_value"] if "example_value" in node.meta else node.meta.get("val")


def leaves_of(node: FxNode) -> list[Any]:
    """The tensors, numbers and other parts of a node's example."""
    value = value_of(node)
    return pytree.tree_leaves(value) if isinstance(value, (tuple, list, dict)) else [] if value is None else [value]


def _size(size: Any) -> int | str:
    return size if isinstance(size, int) else str(size.node.expr)


def _scalar(value: Any) -> str:
    if is_symbolic(value):
        return str(value.node.expr)
    return repr(value) if isinstance(value, (bool, int, float)) else ""


def _target(node: FxNode) -> str:
    if not callable(node.target):
        return str(node.target)
    if isinstance(node.target, torch._ops.OpOverload):
        return f"torch.ops.{node.target}"
    try:
        return _get_qualified_name(node.target)
    except Exception:  # a callable object without a name
        return str(getattr(node.target, "__name__", type(node.target).__name__))


def _argument(value: Any, convert: Any) -> Any:
    """A JSON value; see `model.Node`."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"constant": repr(value)}
    if isinstance(value, (list, tuple)):
        return [convert(item) for item in value]
    if isinstance(value, slice):
        return {"slice": [convert(value.start), convert(value.stop), convert(value.step)]}
    if isinstance(value, dict):
        return {"dict": [[str(key), convert(item)] for key, item in value.items()]}
    if is_symbolic(value):
        return {"constant": str(value.node.expr)}
    if value is Ellipsis:
        return {"constant": "..."}
    if isinstance(value, enum.Enum):
        return {"constant": f"{type(value).__name__}.{value.name}"}
    return {"constant": re.sub(r" at 0x[0-9a-f]+", "", str(value))[:200]}


def _source(node: FxNode) -> Source | None:
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return None
    file, line, function, code = next((f for f in reversed(frames) if not is_of_package(f[0])), frames[-1])
    return Source(file, int(line), function, code.strip()[:200])


def _is_host_read(node: FxNode, taken: Node) -> bool:
    """Whether a node reads a number from a tensor, makes a data-dependent size, or copies a device tensor to the host.

    A copy to the host is one wait, however many numbers are read from it.
    """
    if taken.binds:
        return taken.op.startswith("call") and taken.short_target != "getitem" and copy_read_by(node) is None
    if is_copy_to_host(node) and is_read_by_items(node):
        return True
    inputs = [leaf for argument in node.all_input_nodes for leaf in leaves_of(argument)]
    from_device = any(isinstance(leaf, torch.Tensor) and leaf.device.type not in ("cpu", "meta") for leaf in inputs)
    to_host = bool(taken.values) and all(value.device == "cpu" for value in taken.values)
    return from_device and (to_host or taken.short_target in _COPIES_TO_HOST) and node.op.startswith("call")


def input_data(example_inputs: Sequence[Any], limit: int = 64) -> list[Any]:
    """The elements of each small integer or bool input, and plain numbers, for reproductions; None for other inputs."""

    def data(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, torch._subclasses.FakeTensor):
            small = value.numel() <= limit and not value.dtype.is_floating_point and not value.dtype.is_complex
            return value.tolist() if small else None
        return value if isinstance(value, (bool, int, float)) else None

    return [data(value) for value in example_inputs]
