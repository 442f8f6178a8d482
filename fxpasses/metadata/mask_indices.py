"""`x[mask]` for a mask that the batch determines: index by the mask's positions, which are metadata too.

    before    y: "f32[u0, 8]" = x[mask]                 asks the device how many rows there are, in every step
    after     positions: "i64[u0, 2]" = mask.nonzero()
              y = x[positions.select(1, 0), positions.select(1, 1)]

This is how PyTorch runs an index by a mask: results and gradients stay the same, bit for bit. `hoist_metadata` moves
the positions to the prologue; then an activation's rows are gathered without asking the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fxpasses.graph.calls import operator_of
from fxpasses.graph.regions import Region
from fxpasses.graph.symbols import is_symbolic, symbol
from fxpasses.graph.values import Tensor
from fxpasses.metadata.analysis import Closure


def index_by_positions(main: Region, closure: Closure, fake_mode: Any, may_change: Callable[[Node], bool]) -> bool:
    """Rewrite each index of an activation by a mask of `closure`; returns whether there was one."""
    changed = False
    for region in main.walk():
        for node in list(region.gm.graph.nodes):
            mask = _mask_of(node, closure)
            if mask is not None and may_change(node):
                _rewrite(node, mask, fake_mode)
                changed = True
    return changed


def _mask_of(node: Node, closure: Closure) -> Node | None:
    """The mask of the closure by which a node indexes the first dimensions of an activation."""
    if operator_of(node) != "getitem" or len(node.meta.get("unbacked_bindings", ())) != 1 or node in closure.values:
        return None
    source, index = node.args
    parts = index if isinstance(index, tuple) else (index,)
    mask, example = parts[0], node.meta.get("example_value")
    if not isinstance(mask, Node) or any(isinstance(part, Node) for part in parts[1:]) or source is mask:
        return None
    selected = mask.meta.get("example_value")
    if not isinstance(closure.values.get(mask), Tensor) or not isinstance(example, torch.Tensor):
        return None
    is_mask = isinstance(selected, torch.Tensor) and selected.dtype == torch.bool and selected.ndim > 0
    (bound,) = node.meta["unbacked_bindings"]
    is_first = example.ndim > 0 and is_symbolic(example.shape[0]) and symbol(example.shape[0]) == bound
    return mask if is_mask and is_first else None


def _rewrite(node: Node, mask: Node, fake_mode: Any) -> None:
    graph, (source, index) = node.graph, node.args
    selected, rows = mask.meta["example_value"], node.meta["example_value"].shape[0]
    kept: dict[str, Any] = {name: node.meta[name] for name in ("stack_trace", "nn_module_stack") if name in node.meta}
    with fake_mode, torch.no_grad():
        size, stride = (rows, selected.ndim), _strides_of_nonzero(selected, rows, fake_mode)
        example = torch.empty_strided(size, stride, dtype=torch.int64, device=selected.device)
        columns = [example.select(1, place) for place in range(selected.ndim)]
    with graph.inserting_before(node):
        positions = graph.call_method("nonzero", (mask,))
        positions.meta = {**kept, "example_value": example, "unbacked_bindings": node.meta.pop("unbacked_bindings")}
        count = graph.call_method("size", (positions, 0))  # gives other nodes the number of rows
        count.meta = {**kept, "example_value": rows}
        found = []
        for place, column in enumerate(columns):
            found.append(graph.call_method("select", (positions, 1, place)))
            found[-1].meta = {**kept, "example_value": column}
    node.args = (source, (*found, *index[1:]) if isinstance(index, tuple) else tuple(found))


def _strides_of_nonzero(mask: torch.Tensor, rows: Any, fake_mode: Any) -> tuple[Any, Any]:
    with fake_mode.shape_env.ignore_fresh_unbacked_symbols():
        by_column = mask.nonzero().stride()[0] == 1 if mask.ndim > 1 else False
    return (1, rows) if by_column else (mask.ndim, 1)
