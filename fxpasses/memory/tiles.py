"""Tiles of rows: what an MLP computes between its products never stands in full.

Before, for x [B, T, H]:

    h = silu(linear(x, gate)) * linear(x, up)         # [B, T, 4 H]
    y = x + linear(h, down)                           # [B, T, H]

After, in two tiles:

    x_0, x_1 = x.split([T // 2, T - T // 2], 1)
    h_0 = silu(linear(x_0, gate)) * linear(x_0, up)   # [B, T / 2, 4 H]
    y_0 = x_0 + linear(h_0, down)
    ...
    y = torch.cat([y_0, y_1], 1)

Backward computes a tile's values again where it needs them, if they are not saved (`memory/recompute.py`), and adds up
the tiles' gradients of the weights.

A region is a connected set of operators that compute each row from the same row of their operands (`rows/rules.py`),
with a product inside whose result nothing outside reads. An operand that has all rows in a way that the rules do not
see does not fit a tile: then the operators raise on fake tensors, and the region stays.
"""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxpasses.graph.aliases import storages, written_operands
from fxpasses.graph.building import NodeBuilder
from fxpasses.graph.calls import is_in_place, operator_of
from fxpasses.graph.modes import autocast_regions
from fxpasses.graph.refusals import Refused
from fxpasses.graph.symbols import constant, expression
from fxpasses.graph.traits import PRODUCTS, RESHAPES, SETS_GRADIENTS, SETS_INFERENCE
from fxpasses.report import Reason
from fxpasses.rows.layout import Layout
from fxpasses.rows.rules import Rules, broadcasts
from fxpasses.rows.spaces import BATCH, ROWS, TOKENS, Space, Tags
from fxpasses.rows.writes import MAKES_MEMORY, Writes

_TAGS: dict[int, Tags] = {1: (ROWS, None), 2: (BATCH, TOKENS, None)}  # of values with so many dimensions of rows
_SIZED = RESHAPES | MAKES_MEMORY | {"expand", "repeat"}  # are told sizes, which in a tile are others


Sizes = tuple[Any, ...]


@dataclass(eq=False)
class _Rows:
    """Operators on the rows of [B, T, ...], or on those of [T, ...], in the graph's order.

    sizes: (B, T) or (T,). axis: along which rows are cut, the longer one.
    """

    sizes: Sizes
    nodes: list[Node] = field(default_factory=list)

    @property
    def axis(self) -> int:
        shape = self.results[0].meta["example_value"].shape
        return max(range(len(self.sizes)), key=lambda at: (_hint(shape[at]) or 0, at))

    @property
    def inputs(self) -> list[Node]:
        own = set(self.nodes)
        return list(dict.fromkeys(o for node in self.nodes for o in node.all_input_nodes if o not in own))

    @property
    def results(self) -> list[Node]:
        own = set(self.nodes)
        return [node for node in self.nodes if any(user not in own for user in node.users)]

    def is_worth_it(self) -> bool:
        """Whether a product inside has a result that is larger than any of the region's."""
        inside = set(self.nodes) - set(self.results)
        products = [node for node in inside if operator_of(node) in PRODUCTS]
        most = max((_width(node) for node in self.results), default=0)
        return any(_width(node) > most for node in products)


def tile_rows(gm: GraphModule, tiles: int) -> int:
    """Compute the rows of regions in so many tiles; returns the number of regions. The graph is changed."""
    graph, count = gm.graph, 0
    examples = (node.meta.get("example_value") for node in graph.nodes)
    fake_mode = next((value.fake_mode for value in examples if isinstance(value, FakeTensor)), None)
    for rows in list(_regions(graph)):
        try:
            count += _tile(graph, rows, tiles, fake_mode)
        except Refused:
            continue
    if count:
        gm.recompile()
    return count


def has_regions(gm: GraphModule) -> bool:
    """Whether `tile_rows` may find something. Nothing is asked of sizes."""
    return any(True for _ in _regions(gm.graph))


def _changes_mode(node: Node) -> bool:
    return operator_of(node) in SETS_GRADIENTS | SETS_INFERENCE


def _tile(graph: Graph, rows: _Rows, tiles: int, fake_mode: Any) -> int:
    order = {node: place for place, node in enumerate(graph.nodes)}
    own, results, axis = set(rows.nodes), rows.results, rows.axis
    users = {user for node in results for user in node.users if user not in own}
    place = min([rows.nodes[-1].next, *users], key=order.__getitem__)
    by_rows = [node for node in rows.inputs if (tags := _tags(node, rows.sizes)) and tags[axis] is not None]
    memory = {storage for node in rows.inputs for storage in storages(node)}  # to which no result may belong
    autocast = autocast_regions(graph)
    if not by_rows or any(order[node] > order[place] for node in rows.inputs) or not all(map(_sizes, results)):
        raise Refused(Reason.NOT_BY_ROWS, "the rows are not computed at one place", place)
    for node in results:
        if memory.intersection(storages(node)):
            raise Refused(Reason.NOT_BY_ROWS, f"`{node.name}` is a view of an operand or of another result", place)
        memory.update(storages(node))
    if autocast[place] != autocast[rows.nodes[0]]:
        raise Refused(Reason.NOT_BY_ROWS, "the rows are used under another autocast", place)
    emit = NodeBuilder(graph, fake_mode, rows.nodes[0], Reason.NOT_BY_ROWS, autocast[place])
    with emit.before(place):
        count = emit.size(by_rows[0], axis)
        known = _hint(count if isinstance(count, int) else count.meta["example_value"])
        if (known or 0) < 2 * tiles:
            raise Refused(Reason.NOT_BY_ROWS, "there are few rows", place)
        sizes = _shares(emit, count, tiles)
        cut = {node: emit(torch.split, (node, sizes, axis)) for node in by_rows}  # whose gradient is one `cat`
        cut |= {node: _repeated(emit, node, tiles) for node in rows.inputs if _is_vector(node)}
        parts: dict[Node, list[Node]] = defaultdict(list)
        for number in range(tiles):
            made = {node: emit(operator.getitem, (found, number)) for node, found in cut.items()}
            for node in rows.nodes:
                args, kwargs = _with(made, node)
                made[node] = emit(None, args, kwargs, like=node)
            for node in results:
                parts[node].append(made[node])
        whole = {node: emit(torch.cat, (found, axis)) for node, found in parts.items()}
        for node, new in whole.items():
            if _form(new) != _form(node):
                raise Refused(Reason.NOT_BY_ROWS, f"`{node.name}` is not what its tiles are", node)
    for node, new in whole.items():
        node.replace_all_uses_with(new, lambda user: user not in own and not emit.made(user))
    for node in reversed(rows.nodes):
        graph.erase_node(node)
    return 1


def _hint(number: Any) -> int | None:
    """A size in the batch at hand."""
    return number if isinstance(number, int) else number.node.hint


def _with(made: dict[Node, Node], node: Node) -> Any:
    return map_arg((node.args, node.kwargs), lambda operand: made.get(operand, operand))


def _is_vector(node: Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example.dim() == 1 and example.requires_grad


def _repeated(emit: NodeBuilder, vector: Node, tiles: int) -> Node:
    """A vector, such as a bias, for each tile, whose gradients are stacked and added up at the end.

    Where they are added one by one, Inductor computes all of them in one kernel, after the last tile, until which it
    keeps what they are summed over.
    """
    matrix = emit("expand", (emit("unsqueeze", (vector, 0)), tiles, -1))
    return emit(torch.unbind, (matrix, 0))


def _shares(emit: NodeBuilder, count: int | Node, tiles: int) -> list[Any]:
    """The sizes of tiles; the last is what is left."""
    if isinstance(count, int):
        return [count // tiles] * (tiles - 1) + [count - count // tiles * (tiles - 1)]
    size = emit(operator.floordiv, (count, tiles))
    return [size] * (tiles - 1) + [emit(operator.sub, (count, emit(operator.mul, (size, tiles - 1))))]


def _form(node: Node) -> Any:
    example = node.meta["example_value"]
    sizes = [*map(expression, (*example.shape, *example.stride()))]
    return sizes, example.dtype, example.device, example.requires_grad


def _regions(graph: Graph) -> Iterator[_Rows]:
    """The regions that are worth tiling.

    stages: how often a path to a node has left rows and come back, as through attention. Two nodes of one region have
    the same, so nothing outside is between them.
    """
    if any(node.op.startswith("call") and (_changes_mode(node) or written_operands(node)) for node in graph.nodes):
        return
    stages: dict[Node, int] = {}
    regions: dict[Node, _Rows] = {}
    found = map(_sizes, (node for node in graph.nodes if operator_of(node) in PRODUCTS))
    own = {rows: _of_rows(graph, rows) for rows in found if rows is not None}
    autocast, live = autocast_regions(graph), _live(graph)
    for node in graph.nodes:
        rows = next((rows for rows, nodes in own.items() if node in nodes and node in live), None)
        operands = node.all_input_nodes
        stages[node] = max((stages[operand] for operand in operands), default=0)
        if rows is None:
            continue
        left = max((stages[operand] for operand in operands if operand not in own[rows]), default=0)
        stages[node] = max(stages[node], left + 1)
        regions[node] = _Rows(rows, [node])
        for operand in operands:
            other = regions.get(operand)
            is_near = operand in own[rows] and stages[operand] == stages[node] and autocast[operand] == autocast[node]
            if is_near and other is not None and other is not regions[node]:
                other.nodes += regions[node].nodes
                for each in regions[node].nodes:
                    regions[each] = other
    order = {node: place for place, node in enumerate(graph.nodes)}
    for region in dict.fromkeys(regions.values()):
        region.nodes.sort(key=order.__getitem__)
        if region.is_worth_it():
            yield region


def _live(graph: Graph) -> set[Node]:
    """The nodes that the graph's output needs."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or not found.isdisjoint(node.users):
            found.add(node)
    return found


def _of_rows(graph: Graph, sizes: Sizes) -> set[Node]:
    """The nodes that compute each row of [B, T, ...], or of [T, ...], from the same row of their operands."""
    layout = Layout()
    rules = Rules(layout.tags, layout.spaces, Writes(layout), may_drop=False)
    space = Space((sizes[0], sizes[-1]))
    found = set()
    for node in graph.nodes:
        name, tags = operator_of(node), None
        may_be = node.op.startswith("call") and name not in _SIZED and not is_in_place(name)
        if may_be and any(operand in layout.tags for operand in node.all_input_nodes):
            with contextlib.suppress(Refused):
                tags = rules.tags_of(node, name)
        others = [o for o in node.all_input_nodes if o not in layout.tags] if broadcasts(node, name) else []
        if tags == _TAGS[len(sizes)] and not any(_spans(operand, len(sizes)) for operand in others):
            found.add(node)
        tags = tags if node in found else _tags(node, sizes)
        if tags is not None:
            layout.tags[node], layout.spaces[node] = tags, space
    return found


def _spans(operand: Node, count: int) -> bool:
    """Whether an operand that is broadcast to [B, T, H] has B or T elements there. count: that of B and T."""
    example = operand.meta.get("example_value")
    shape = example.shape[:-1][-count:] if isinstance(example, torch.Tensor) else ()
    return any(constant(size) != 1 for size in shape)


def _tags(node: Node, sizes: Sizes) -> Tags | None:
    """The tags of any value [B, T, H], or [1, T, H], or [T, H]: its rows may be cut, whatever they are."""
    own = _sizes(node)
    if own is None or len(own) != len(sizes) or own[-1] != sizes[-1] or own[0] not in (sizes[0], 1):
        return None
    return _TAGS[len(sizes)] if own == sizes else (None, TOKENS, None)


def _sizes(node: Node) -> Sizes | None:
    """(B, T) of a value [B, T, H], (T,) of one [T, H]; None of weights."""
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or isinstance(example, torch.nn.Parameter) or example.dim() not in (2, 3):
        return None
    return tuple(sympy.sympify(expression(size)) for size in example.shape[:-1])


def _width(node: Node) -> int:
    example = node.meta.get("example_value")
    size = example.shape[-1] if isinstance(example, torch.Tensor) else 0
    return size if isinstance(size, int) else 0
