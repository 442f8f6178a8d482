"""Rewrites a graph to compute rows as one sequence: B becomes 1, and T the number of rows that are needed.

    rows = fxpasses.live_rows(target != -100)                     # int64 [N], by the prologue
    h = embedding(ids.view(-1)[rows][None], table)                # [1, N, 512]
    q = linear(h, w).view(1, N, 8, 64).transpose(1, 2)
    a = fxpasses.sparse_attention(q, k, v, None, fxpasses.plan_of_rows(mask, rows, seen, ...))
    loss = cross_entropy(logits.view(N, 32000), target[rows])

Most nodes stay as they are, since the ranks do. Values that only the batch determines are gathered; a value that is
needed for fewer rows than it was computed for, a residual before the last layer's MLP, is selected from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings

import fxpasses.runtime.attention.operators  # noqa: F401  registers the operators
from fxpasses.graph.building import NodeBuilder
from fxpasses.graph.calls import argument, is_in_place, is_pointwise, operator_of
from fxpasses.graph.modes import autocast_regions
from fxpasses.graph.regions import Region
from fxpasses.graph.symbols import elements_of
from fxpasses.graph.values import Tensor, Value
from fxpasses.rows import operators  # noqa: F401  registers the operators
from fxpasses.rows.demand import RowSet, demands
from fxpasses.rows.exits import BATCH, ROWS, TOKENS, Exit, Tags
from fxpasses.rows.layout import ATTENTION, RESHAPES, Layout, Step, first_of, is_tensor, refused, shape_of

ops = torch.ops.fxpasses


class Packing:
    """A set of rows, as nodes of the main graph.

    slots: int64 [N], rows in order, -1 for padding. rows: the same, 0 for padding. padding: bool [N]. count: N.
    sequences, tokens: int64 [N], b and t of each. place: int64 [B * T], of each row among them.
    """

    def __init__(self, emit: NodeBuilder, live: Node, share: float, tokens: Any, fake_mode: Any) -> None:
        self.slots = emit(ops.live_rows.default, (live, share))
        found = self.slots.meta["example_value"]
        self.slots.meta["unbacked_bindings"] = compute_unbacked_bindings(fake_mode.shape_env, found)
        self.rows = emit("clamp", (self.slots,), {"min": 0})
        self.padding = emit(torch.lt, (self.slots, 0))
        self.count = emit.size(self.slots, 0)
        self.sequences = emit(torch.floor_divide, (self.rows, tokens))
        self.tokens = emit(torch.remainder, (self.rows, tokens))
        self.place = emit("clamp", (emit("sub", (emit("cumsum", (live, 0)), 1)),), {"min": 0})


class Rewrite:
    """One rewrite. It changes the graph; where it raises `Refused`, the graph is to be thrown away."""

    def __init__(self, main: Region, layout: Layout, closure: Mapping[Node, Value], fake_mode: Any) -> None:
        self.main, self.layout, self.closure, self.fake_mode = main, layout, closure, fake_mode
        self.regions = {region.gm.graph: region for region in main.walk()}
        self.needed = demands(layout)
        assert layout.ids is not None
        self.ids: Node = layout.ids
        self.new: dict[Node, Node] = {}
        self.packings: dict[RowSet, Packing] = {}
        self.last_set: Node
        self._made: dict[Any, Node] = {}

    def run(self) -> None:
        self._prepare()
        for step in self.layout.steps:
            with step.region.gm.graph.inserting_before(step.node):
                emit = NodeBuilder(step.region.gm.graph, self.fake_mode, step.node, autocast=step.autocast)
                if step.node in self.layout.exits:
                    step.node.replace_all_uses_with(self._left(step, emit))
                elif step.node in self.needed:
                    self.new[step.node] = self._packed(step, emit)
        self._return_packed()
        self._erase()

    # Before the first row: all that only the batch determines, and the sets

    def _prepare(self) -> None:
        graph = self.main.gm.graph
        first = next(node for node in graph.nodes if node.op.startswith("call") and self._has_rows(node))
        autocast = autocast_regions(graph)
        for node in [node for node in graph.nodes if node.op.startswith("call") and node in self.closure]:
            if autocast[node] != autocast[first] and _is_floating(node):
                raise refused(node, "is computed in another region of autocast")
            first.prepend(node)
        with graph.inserting_before(first):
            emit = NodeBuilder(graph, self.fake_mode, first)
            ids = self._outside(self.ids)
            self.batch, self.tokens = emit.size(ids, 0), emit.size(ids, 1)
            self.all_rows = emit.size(emit("reshape", (ids, -1)), 0)
            self.masks = {node: self._mask(node, emit) for node in self.layout.attentions if node in self.needed}
            for rows, share in self._shares().items():
                live = self._live(rows, emit)
                self.packings[rows] = Packing(emit, live, share, self.tokens, self.fake_mode)
        self.last_set = first.prev

    def _shares(self) -> dict[RowSet, float]:
        """By set of rows: the part of the products with weights that is computed for it."""
        found = dict.fromkeys((*self.needed.values(), *(RowSet(frozenset({node})) for node in self.layout.exits)), 0)
        for node, rows in self.needed.items():
            if operator_of(node) in ("linear", "addmm", "matmul"):
                found[rows] += max((elements_of(part) or 0 for part in self._weights(node)), default=0)
        return {rows: elements / max(1, sum(found.values())) for rows, elements in found.items()}

    def _weights(self, node: Node) -> Iterator[Any]:
        yield from (n.meta["example_value"] for n in node.all_input_nodes if n not in self.layout.tags and is_tensor(n))

    def _has_rows(self, node: Node) -> bool:
        body = self.main.bodies.get(node)
        return node in self.layout.tags or (body is not None and any(s.region is body for s in self.layout.steps))

    def _outside(self, node: Node) -> Node:
        """The node of the main graph with the value that a node of a body has; of the batch's metadata."""
        region = self.regions[node.graph]
        if region.parent is None:
            return node
        if node.op == "placeholder":
            operand = region.operands[node]
            assert isinstance(operand, Node)
            return self._outside(operand)
        if any(is_in_place(operator_of(user)) for user in node.users) or not isinstance(self.closure[node], Tensor):
            raise refused(node, "is made in a checkpoint")
        if node not in self._made:
            copied = self.main.gm.graph.node_copy(node, self._outside)
            self._made[node] = copied
        return self._made[node]

    def _mask(self, attention: Node, emit: NodeBuilder) -> Node:
        """bool [B or 1, H or 1, T, T]"""
        mask = argument(attention, "attn_mask")
        if mask is not None:
            return self._outside(mask)
        is_causal = bool(argument(attention, "is_causal", False))
        key = "causal" if is_causal else "all"
        if key not in self._made:
            kind = {"dtype": torch.bool, "device": _device(attention)}
            ones = emit(torch.ones, (1, 1, self.tokens, self.tokens), kind)
            self._made[key] = emit(torch.tril, (ones,)) if is_causal else ones
        return self._made[key]

    def _live(self, rows: RowSet, emit: NodeBuilder) -> Node:
        """bool [B * T], the rows of a set."""
        if rows.closed:
            masks = list(dict.fromkeys(self.masks.values()))
            seed = self._live(RowSet(rows.exits), emit)
            return emit(ops.attended_rows.default, (seed, masks, self.batch))
        found = [self._read(node, self.layout.exits[node], emit) for node in self.layout.exits if node in rows.exits]
        live = found[0]
        for other in found[1:]:
            live = emit(torch.logical_or, (live, other))
        return live

    def _read(self, node: Node, found: Exit, emit: NodeBuilder) -> Node:
        """bool [B * T], the rows that an exit reads."""
        if found.kind == "loss":
            return emit(torch.ne, (self._outside(found.by), argument(node, "ignore_index", -100)))
        none = {"dtype": torch.bool, "device": _device(self.ids)}
        if found.kind == "picked":
            return emit(
                torch.index_fill, (emit(torch.zeros, (self.all_rows,), none), 0, self._picked(found.by, emit), True)
            )
        if found.by is None:
            return emit(torch.ones, (self.all_rows,), none)
        factor = emit(torch.eq if found.hides else torch.ne, (self._outside(found.by), 0))
        tags = self.layout.tags[found.operand]
        own = factor.meta["example_value"].dim()
        sizes = [{BATCH: self.batch, TOKENS: self.tokens, ROWS: self.all_rows}.get(tag or "", -1) for tag in tags]
        for place in range(1, len(tags) + 1):  # a dimension of features that the factor lacks
            if sizes[-place] == -1 and place > own:
                sizes[-place] = 1
        whole = emit("expand", (factor, *sizes))
        places = [at for at, tag in enumerate(tags) if tag]
        if places != [*range(len(places))]:
            whole = emit("movedim", (whole, places, [*range(len(places))]))
        return emit("any", (emit("reshape", (whole, self.all_rows, -1)), 1))

    def _picked(self, index: Any, emit: NodeBuilder) -> Node:
        """The rows of `x[:, 0]` or `x[b, t]`."""
        first, second, *_ = index
        if isinstance(second, int):
            sequence: Any = emit(torch.arange, (self.batch,), {"device": _device(self.ids)})
            token: Any = second if second >= 0 else _computed(emit, operator.add, self.tokens, second)
        else:  # counted from the end as well, and an error beyond it
            sequence, token = (
                emit(
                    operator.getitem, (emit(torch.arange, (size,), {"device": _device(self.ids)}), self._outside(part))
                )
                for part, size in ((first, self.batch), (second, self.tokens))
            )
        return emit("add", (emit("mul", (sequence, self.tokens)), token))

    # Values

    def _value(self, node: Node) -> Node:
        """The packed value of a node, for the rows for which it is needed."""
        if node not in self.new:
            origin = self.layout.origins[node]
            if node in self.layout.results:
                self.new[node] = node
                node.meta["example_value"] = self._value(origin).meta["example_value"]
            else:
                region = self.regions[node.graph]
                assert region.parent is not None and region.call is not None
                with region.parent.gm.graph.inserting_before(region.call):
                    emit = NodeBuilder(region.parent.gm.graph, self.fake_mode, region.call)
                    packed = self._at(origin, self.needed[node], region.parent, emit)
                self.new[node] = self._inside(region, packed)
        return self.new[node]

    def _inside(self, region: Region, outer: Any) -> Any:
        """A value of the main graph, or of the region around, as an input of a body; a number as it is."""
        if not isinstance(outer, Node) or outer.graph is region.gm.graph:
            return outer
        if (region, outer) not in self._made:
            assert region.parent is not None and region.call is not None
            given = self._inside(region.parent, outer)
            with region.gm.graph.inserting_after(region.placeholders()[-1]):
                node = region.gm.graph.placeholder(outer.name)
            node.meta = {"example_value": given.meta["example_value"]}
            region.call.args = (*region.call.args, given)
            region.operands[node] = given
            self._made[region, outer] = node
        return self._made[region, outer]

    def _at(self, node: Node, rows: RowSet, region: Region, emit: NodeBuilder) -> Node:
        """The packed value of a node, for rows that may be fewer than those that it was computed for."""
        value, own = self._value(node), self.needed[node]
        if own == rows:
            return value
        key = (value, rows, region)
        if key not in self._made:
            if (own, rows) not in self._made:
                self._made[own, rows] = self._early(
                    lambda early: early("index_select", (self.packings[own].place, 0, self.packings[rows].rows))
                )
            dim = next(at for at, tag in enumerate(self.layout.tags[node]) if tag in (TOKENS, ROWS))
            self._made[key] = emit("index_select", (value, dim, self._inside(region, self._made[own, rows])))
        return self._made[key]

    def _early(self, make: Callable[[NodeBuilder], Node]) -> Node:
        """Make a value of sets alone, where the sets are made."""
        last = self.last_set
        with self.main.gm.graph.inserting_before(last.next):
            made = make(NodeBuilder(self.main.gm.graph, self.fake_mode, last))
        self.last_set = made
        return made

    def _aligned(self, operand: Node, tags: Tags, rows: RowSet, step: Step, emit: NodeBuilder) -> Node:
        """An operand without rows of its own, which is broadcast against rows: gathered where it has one for each."""
        own = shape_of(operand)
        own = (sympy.Integer(1),) * (len(tags) - len(own)) + own
        many = {tag: at for at, (size, tag) in enumerate(zip(own, tags, strict=True)) if tag and size != 1}
        if not many:
            return operand
        packing = self.packings[rows]

        def inside(value: Any) -> Any:
            return self._inside(step.region, value)

        missing = len(tags) - len(shape_of(operand))
        if ROWS in many:
            return emit("index_select", (operand, many[ROWS] - missing, inside(packing.rows)))
        if len(many) == 2:
            sizes = [{BATCH: self.batch, TOKENS: self.tokens}.get(tag, -1) if tag else -1 for tag in tags]
            whole = emit("expand", (operand, *map(inside, sizes)))
            places = (tags.index(BATCH), tags.index(TOKENS))
            found = emit("flatten", (emit("movedim", (whole, places, (0, 1))), 0, 1))
            found = emit("unsqueeze", (emit("index_select", (found, 0, inside(packing.rows))), 0))
            return emit("movedim", (found, (0, 1), places))
        ((tag, at),) = many.items()
        index = packing.tokens if tag == TOKENS else packing.sequences
        found = emit("index_select", (operand, at - missing, inside(index)))
        if tag == BATCH:  # the rows are tokens of one sequence
            found = emit("transpose", (found, tags.index(BATCH) - missing, tags.index(TOKENS) - missing))
        return found

    def _packed(self, step: Step, emit: NodeBuilder) -> Node:
        node, region = step.node, step.region
        name, tags, wanted = operator_of(node), self.layout.tags[node], self.needed[node]
        first = first_of(node)
        if name == "embedding":
            return self._embedded(step, emit)
        if name == ATTENTION:
            return self._attention(step, emit)
        if name in RESHAPES or name == "expand":
            count = self._inside(region, self.packings[wanted].count)
            sizes = {BATCH: 1, TOKENS: count, ROWS: count}
            resized = [
                sizes[tag] if tag else size for tag, size in zip(tags, node.meta["example_value"].shape, strict=True)
            ]
            if any(isinstance(size, torch.SymInt) for size in resized):
                raise refused(node, "has a size of the batch beside its rows")
            return emit("expand" if name == "expand" else "reshape", (self._at(first, wanted, region, emit), *resized))
        aligns = is_pointwise(name.rstrip("_")) or name in ("cat", "stack", "gather", "cross_entropy")

        def convert(operand: Node) -> Node:
            if operand in self.layout.tags:
                return self._at(operand, wanted, region, emit)
            return self._aligned(operand, tags, wanted, step, emit) if aligns and is_tensor(operand) else operand

        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), convert)
        if (written := self.layout.written.get(node)) is None:
            return emit(node.target, args, kwargs, like=node)
        result = emit(_out_of_place(node), args, kwargs)
        dtype = node.meta["example_value"].dtype
        if result.meta["example_value"].dtype != dtype:
            result = emit("to", (result, dtype))
        self.new[written] = result
        for other, owner in self.layout.written.items():
            if owner is written and other in self.new:
                self.new[other] = result
        return result

    def _embedded(self, step: Step, emit: NodeBuilder) -> Node:
        node, rows = step.node, self.packings[self.needed[step.node]].rows
        ids = argument(node, "input")
        found = emit("index_select", (emit("reshape", (ids, -1)), 0, self._inside(step.region, rows)))
        found = emit("unsqueeze", (found, 0))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: found if operand is ids else operand)
        return emit(node.target, args, kwargs, like=node)

    def _attention(self, step: Step, emit: NodeBuilder) -> Node:
        node, region, wanted = step.node, step.region, self.needed[step.node]
        query, key, value = (argument(node, part) for part in ("query", "key", "value"))
        seen = self.needed[key]
        mask, heads = self.masks[node], query.meta["example_value"].shape[1]
        share = heads // mask.meta["example_value"].shape[1]
        plan_key = (mask, wanted, seen, share)
        if plan_key not in self._made:
            slots = self.packings[wanted].slots, self.packings[seen].slots
            arguments = (mask, *slots, self.batch, share)
            self._made[plan_key] = self._early(lambda early: early(ops.plan_of_rows.default, arguments))
        operands = [
            self._at(query, wanted, region, emit),
            *(self._at(part, seen, region, emit) for part in (key, value)),
        ]
        arguments = (*operands, None, self._inside(region, self._made[plan_key]), argument(node, "scale"))
        return emit(ops.sparse_attention.default, arguments)

    # Exits

    def _left(self, step: Step, emit: NodeBuilder) -> Node:
        """What an exit gives, from packed rows."""
        node, found = step.node, self.layout.exits[step.node]
        if step.region.parent is not None:
            raise refused(node, "ends rows in a checkpoint")
        wanted = RowSet(frozenset({node}))
        packing = self.packings[wanted]
        x = self._at(found.operand, wanted, step.region, emit)
        if found.kind == "loss":
            target = emit("index_select", (found.by, 0, packing.rows))
            target = emit("masked_fill", (target, packing.padding, argument(node, "ignore_index", -100)))
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), {found.by: target, found.operand: x}.get)
            return emit(node.target, args, kwargs, like=node)
        if found.kind == "picked":
            place = self._early(lambda early: early("index_select", (packing.place, 0, self._picked(found.by, early))))
            return emit("index_select", (emit("squeeze", (x, 0)), 0, place))
        return self._summed(node, x, self.layout.tags[found.operand], packing, emit)

    def _summed(self, node: Node, x: Node, tags: Tags, packing: Packing, emit: NodeBuilder) -> Node:
        at = next(at for at, tag in enumerate(tags) if tag in (TOKENS, ROWS))
        shape: list[Any] = [1] * len(tags)
        shape[at] = packing.count
        x = emit("masked_fill", (x, emit("reshape", (packing.padding, *shape)), 0))
        dims = argument(node, "dim")
        dims = dims if isinstance(dims, (tuple, list)) or dims is None else (dims,)
        summed = set(tags) if dims is None else {tags[dim] for dim in dims}
        if ROWS in summed or BATCH in summed:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: x)
            return emit(node.target, args, kwargs, like=node)
        if tags[:2] != (BATCH, TOKENS) or dims is None or len(dims) != 1:
            raise refused(node, "sums rows in a way that is not known")
        rest = [size for size in x.meta["example_value"].shape[2:]]
        if any(isinstance(size, torch.SymInt) for size in rest):
            raise refused(node, "has a size of the batch beside its rows")
        dtype = node.meta["example_value"].dtype
        exact = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype  # as `sum` adds
        zeros = emit("new_zeros", (x, (self.batch, *rest)), {"dtype": exact})
        added = emit("to", (emit("squeeze", (x, 0)), exact))
        found = emit("to", (emit("index_add", (zeros, 0, packing.sequences, added)), dtype))
        return emit("unsqueeze", (found, 1)) if argument(node, "keepdim", False) else found

    # After the last row

    def _return_packed(self) -> None:
        """Have the bodies return packed values, and forget those that nobody needs."""
        for region in self.main.walk():
            if region.parent is None:
                continue
            output = region.gm.graph.output_node()
            assert region.call is not None
            if any(r in self.layout.tags and r not in self.needed for r in output.all_input_nodes):
                raise refused(region.call, "returns rows that nobody needs")
            output.args = torch.fx.map_arg(output.args, lambda node: self.new.get(node, node))
            results: Any = output.args[0]
            examples = [r.meta["example_value"] if isinstance(r, Node) else r for r in results]
            region.call.meta["example_value"] = tuple(examples)

    def _erase(self) -> None:
        """Erase the values of all rows, and what of the batch nobody uses any more."""
        kept = set(self.new.values())
        for region in self.main.walk():
            for node in reversed(list(region.gm.graph.nodes)):
                is_old = node in self.layout.tags or node in self.layout.exits or self._is_made_for_rows(node)
                is_input = node.op == "placeholder" and region.parent is not None
                if not node.users and node not in kept and (is_input or (is_old and node.op.startswith("call"))):
                    region.erase(node)
            region.gm.recompile()

    def _is_made_for_rows(self, node: Node) -> bool:
        """Whether a node only makes a tensor of metadata, for which there may be no use any more."""
        return isinstance(self.closure.get(node), Tensor) and not is_in_place(operator_of(node))


def _out_of_place(node: Node) -> Any:
    """The operator that returns what this one writes."""
    name = operator_of(node)[:-1]
    return name if hasattr(torch.Tensor, name) else getattr(torch, name)


def _is_floating(node: Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example.is_floating_point()


def _device(node: Node) -> torch.device:
    device: torch.device = node.meta["example_value"].device
    return device


def _computed(emit: NodeBuilder, function: Any, one: Any, other: Any) -> Any:
    """A number from numbers, which may be nodes."""
    if isinstance(one, Node) or isinstance(other, Node):
        return emit(function, (one, other))
    return function(one, other)
