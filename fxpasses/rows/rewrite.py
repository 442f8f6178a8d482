"""Rewrites a graph to compute rows as one sequence: B becomes 1, and T the number of needed rows.

    rows = fxpasses.live_rows(target != -100)                     # int64 [N], by the prologue
    h = embedding(ids.view(-1)[rows][None], table)                # [1, N, 512]
    q = linear(h, w).view(1, N, 8, 64).transpose(1, 2)
    a = fxpasses.sparse_attention(q, k, v, None, fxpasses.plan_of_rows(mask, rows, seen, ...))
    loss = cross_entropy(logits.view(N, 32000), target[rows])

Most nodes stay unchanged, since ranks do. Values that only the batch determines are gathered. If a value is needed for
fewer rows than it was computed for, such as a residual before the last layer's MLP, rows are selected from it. A value
that is needed for all rows stays unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx import Node

import fxpasses.attention.runtime.operators  # noqa: F401  registers the operators
from fxpasses.attention.match import Operand
from fxpasses.graph.aliases import is_written
from fxpasses.graph.building import NodeBuilder
from fxpasses.graph.calls import argument, is_in_place, operator_of
from fxpasses.graph.modes import autocast_regions
from fxpasses.graph.regions import Region
from fxpasses.graph.symbols import elements_of
from fxpasses.graph.traits import RESHAPES, SETS_GRADIENTS, SETS_INFERENCE
from fxpasses.graph.values import Tensor, Value
from fxpasses.rows.attentions import RowAttention
from fxpasses.rows.conversion import Conversion
from fxpasses.rows.demand import RowSet, closed, demands
from fxpasses.rows.exits import Exit
from fxpasses.rows.layout import Layout, Step
from fxpasses.rows.nodes import first_of, is_tensor, refused, shape_of
from fxpasses.rows.packings import Packing, Packings, computed
from fxpasses.rows.routing import is_inside
from fxpasses.rows.rules import broadcasts
from fxpasses.rows.spaces import BATCH, CHOICES, GROUPS, ROWS, SORTED, TOKENS, Tags

ops = torch.ops.fxpasses


class Rewrite:
    """One rewrite. It changes the graph; if it raises `Refused`, the graph must be thrown away."""

    def __init__(self, main: Region, layout: Layout, closure: Mapping[Node, Value], fake_mode: Any) -> None:
        self.main, self.layout, self.closure, self.fake_mode = main, layout, closure, fake_mode
        self.regions = {region.gm.graph: region for region in main.walk()}
        self.needed = demands(layout)
        self.conversion = Conversion(layout)
        self.new: dict[Node, Node] = {}
        self.packings: dict[RowSet, Packing] = {}
        self.last_set: Node
        self._made: dict[Any, Node] = {}
        self.moments = {node: moment for region in main.walk() for node, moment in self._moments(region)}
        self.moment = 0

    def run(self) -> None:
        self._prepare()
        for step in self.layout.steps:
            self.moment = self.moments[step.node]
            with step.region.gm.graph.inserting_before(step.node):
                emit = NodeBuilder(step.region.gm.graph, self.fake_mode, step.node, autocast=step.autocast)
                if step.node in self.layout.exits:
                    if not self._is_whole(self.layout.exits[step.node].operand):
                        step.node.replace_all_uses_with(self._left(step, emit))
                elif self._is_whole(step.node):
                    self.new[step.node] = step.node
                elif step.node in self.needed:
                    self.new[step.node] = self._packed(step, emit)
        self._return_packed()
        self._erase()

    def _is_whole(self, node: Node) -> bool:
        """Whether a value is needed for all rows, and so stays unchanged."""
        return node in self.needed and self.needed[node].all

    @property
    def part(self) -> float:
        """The share of the products with weights that is computed for only some rows."""
        return sum(share for rows, share in self._shares().items() if not rows.all)

    def _moments(self, region: Region) -> Iterator[tuple[Node, int]]:
        """The nodes of a region, each with a number that changes where gradients are switched or rows are written: a
        copy made of a value before such a place cannot be used after it."""
        moment = 0
        for node in region.gm.graph.nodes:
            yield node, moment
            writes = node in self.layout.written or node in self.layout.fills
            writes = writes or (node in self.layout.scores and is_in_place(operator_of(node)))
            moment += writes or getattr(node.target, "__name__", "") in SETS_GRADIENTS | SETS_INFERENCE

    # Before the first row: everything that only the batch determines, and the sets

    def _prepare(self) -> None:
        graph = self.main.gm.graph
        first = next(node for node in graph.nodes if node.op.startswith("call") and self._has_rows(node))
        nodes = list(graph.nodes)
        placed, autocast = set(nodes[: nodes.index(first)]), autocast_regions(graph)
        for node in nodes[len(placed) :]:
            if node.op.startswith("call") and node in self.closure and placed.issuperset(node.all_input_nodes):
                if autocast[node] != autocast[first] and _is_floating(node):
                    raise refused(node, "is computed in another region of autocast")
                first.prepend(node)
                placed.add(node)
        self.placed = placed
        with graph.inserting_before(first):
            emit = NodeBuilder(graph, self.fake_mode, first)
            self.sets = Packings(self.layout, self.needed, emit, self._outside)
            self.masks = {node: self.sets.mask(found) for node, found in self.sets.attentions.items()}
            shares = self._shares()
            for rows, share in shares.items():
                if not rows.all:
                    self.packings[rows] = self.sets.packing(rows, share, self.fake_mode)
            for rows in self._sets():
                self._add_part(rows)
        self.last_set = first.prev

    def _add_part(self, rows: RowSet) -> Packing:
        """The packing of a set of a part, made after the packings of the wholes around it."""
        if rows not in self.packings:
            assert rows.space.whole is not None
            self.packings[rows] = self.sets.part(rows.space, self._add_part(replace(rows, space=rows.space.whole)))
        return self.packings[rows]

    def _sets(self) -> dict[RowSet, None]:
        """The sets of the values and exits that do not take all rows."""
        found = dict.fromkeys(rows for rows in self.needed.values() if not rows.all)
        ends = {node: found.operand for node, found in self.layout.exits.items() if not self._is_whole(found.operand)}
        found |= {RowSet(self.layout.spaces[x], frozenset({node})): None for node, x in ends.items()}
        partly = (a for node, a in self.layout.attentions.items() if node in self.needed and not self._is_whole(node))
        return found | {closed(self.layout.spaces[a.key.node]): None for a in partly if not a.is_unpacked}

    def _shares(self) -> dict[RowSet, float]:
        """For each set of rows of a whole space, its share of the products with weights."""
        found: dict[RowSet, float] = dict.fromkeys((rows.whole for rows in self._sets()), 0)
        for node, rows in self.needed.items():
            if operator_of(node) in ("linear", "addmm", "matmul"):
                elements: float = max((elements_of(part) or 0 for part in self._weights(node)), default=0)
                found[rows.whole] = found.get(rows.whole, 0) + elements
            elif "grouped_mm" in operator_of(node):
                used = [(elements_of(part) or 0) / part.shape[0] for part in self._weights(node) if part.dim() == 3]
                found[rows.whole] = found.get(rows.whole, 0) + sum(used) * self.conversion.choices(node)
        total = sum(found.values())
        return {rows: elements / total if total else 1 / len(found) for rows, elements in found.items()}

    def _weights(self, node: Node) -> Iterator[Any]:
        yield from (n.meta["example_value"] for n in node.all_input_nodes if n not in self.layout.tags and is_tensor(n))

    def _has_rows(self, node: Node) -> bool:
        body = self.main.bodies.get(node)
        return node in self.layout.tags or (body is not None and any(s.region is body for s in self.layout.steps))

    def _outside(self, node: Node) -> Node:
        """The main graph's node with the value of a body's node, which is metadata of the batch."""
        region = self.regions[node.graph]
        if region.parent is None:
            if node not in self.placed:
                raise refused(node, "is made of rows, if only of their sizes")
            return node
        if node.op == "placeholder":
            operand = region.operands[node]
            assert isinstance(operand, Node)
            return self._outside(operand)
        if is_written(region.gm, node.meta["example_value"]) or not isinstance(self.closure[node], Tensor):
            raise refused(node, "is made in a checkpoint")
        if node not in self._made:
            copied = self.main.gm.graph.node_copy(node, self._outside)
            self._made[node] = copied
            self.placed.add(copied)
        return self._made[node]

    # Values

    def _value(self, node: Node) -> Node:
        """The packed value of a node, for the rows for which it is needed."""
        if self._is_whole(node):
            return node
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
                    inner, self.moment = self.moment, self.moments[region.call]
                    packed = self._at(origin, self.needed[node], region.parent, emit)
                    self.moment = inner
                self.new[node] = self._inside(region, packed)
        return self.new[node]

    def _inside(self, region: Region, outer: Any) -> Any:
        """A value of the main graph, or of the region around, as an input of a body; a number is returned itself."""
        if not isinstance(outer, Node) or outer.graph is region.gm.graph:
            return outer
        if (region, outer) not in self._made:
            assert region.parent is not None and region.call is not None
            given = self._inside(region.parent, outer)
            node = region.add_placeholder(outer.name, given.meta["example_value"])
            region.call.args = (*region.call.args, given)
            region.operands[node] = given
            self._made[region, outer] = node
        return self._made[region, outer]

    def _at(self, node: Node, rows: RowSet, region: Region, emit: NodeBuilder) -> Node:
        """The packed value of a node, for rows that may be fewer than those that it was computed for."""
        value, own = self._value(node), self.needed[node]
        if own == rows:
            return value
        if is_inside(self.layout.tags[node]):
            raise refused(node, "is needed for other rows than it is computed for")
        key = (value, rows, region, self.moment)
        if key not in self._made and own.all:
            self._made[key] = self._selected(value, node, rows, region, emit)
        if key not in self._made:
            if (own, rows) not in self._made:
                self._made[own, rows] = self._early(
                    lambda early: early("index_select", (self.packings[own].place, 0, self.packings[rows].rows))
                )
            dim = next(at for at, tag in enumerate(self.layout.tags[node]) if tag in (TOKENS, ROWS))
            self._made[key] = emit("index_select", (value, dim, self._inside(region, self._made[own, rows])))
        return self._made[key]

    def _early(self, make: Callable[[NodeBuilder], Node]) -> Node:
        """Make a value that depends only on sets, at the place where the sets are made."""
        last = self.last_set
        with self.main.gm.graph.inserting_before(last.next):
            made = make(NodeBuilder(self.main.gm.graph, self.fake_mode, last))
        self.last_set = made
        return made

    def _aligned(self, operand: Node, tags: Tags, rows: RowSet, step: Step, emit: NodeBuilder) -> Node:
        """An operand that is not a value with rows but is broadcast against rows, gathered if it has one for each."""
        own = shape_of(operand)
        own = (1,) * (len(tags) - len(own)) + own
        many = {tag: at for at, (size, tag) in enumerate(zip(own, tags, strict=True)) if tag and size != 1}
        if not many:
            return operand
        if GROUPS in many or is_inside((*many,)):
            raise refused(operand, "has an element for each group")
        packing = self.packings[rows]

        def inside(value: Any) -> Any:
            return self._inside(step.region, value)

        missing = len(tags) - len(shape_of(operand))
        if ROWS in many:
            return emit("index_select", (operand, many[ROWS] - missing, inside(packing.rows)))
        if len(many) == 2:
            own_sizes = self.sets.sizes(rows.space)
            own_tags = {BATCH: own_sizes.batch, TOKENS: own_sizes.tokens}
            sizes = [own_tags.get(tag, -1) if tag else -1 for tag in tags]
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
        name, wanted, first = operator_of(node), self.needed[node], first_of(node)
        if name == "setitem":
            return emit(node.target, torch.fx.map_arg(node.args, self._filling(node, region, emit)), {}, like=node)
        tags = self.layout.tags[node]
        if name == "embedding":
            return self._embedded(step, emit)
        if node in self.layout.scores:
            return self._on_unpacked(node, region, emit)
        if node in self.layout.attentions and self.layout.attentions[node].is_unpacked:
            return self._selected(self._on_unpacked(node, region, emit), node, wanted, region, emit)
        if node in self.layout.attentions:
            return self._attention(self.layout.attentions[node], region, emit)
        if node in self.layout.parts:
            whole = RowSet(self.layout.spaces[first], wanted.exits)
            return self._at(first, whole, region, emit)
        if name.startswith("new_"):
            kwargs = {key: value for key, value in node.kwargs.items() if key != "size"}
            return emit(name, (self._at(first, wanted, region, emit), self._resized(step, region, emit)), kwargs)
        if name in RESHAPES or name == "expand":
            resized = self._resized(step, region, emit)
            return emit("expand" if name == "expand" else "reshape", (self._at(first, wanted, region, emit), *resized))
        aligned = set(node.all_input_nodes)
        if name == "cross_entropy":  # weights of classes are not broadcast against rows
            aligned = {argument(node, "target")}
        elif not broadcasts(node, name.rstrip("_")) and name not in ("copy_", "cat", "stack", "gather"):
            aligned = set()

        def convert(operand: Node) -> Node:
            if operand in self.layout.tags:
                return self._at(operand, wanted, region, emit)
            aligns = operand in aligned and is_tensor(operand)
            return self._aligned(operand, tags, wanted, step, emit) if aligns else operand

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

    def _filling(self, node: Node, region: Region, emit: NodeBuilder) -> Callable[[Node], Node]:
        """Converts the operands of `x[...] = y`, and of `x[order] = arange(N)`, which gets as many numbers as x has."""
        wanted = self.needed[node]

        def convert(operand: Node) -> Node:
            if operand in self.layout.tags:
                return self._at(operand, wanted, region, emit)
            memory = self._at(cast("Node", first_of(node)), wanted, region, emit)
            return emit(operand.target, (emit.size(memory, 0),), dict(operand.kwargs))

        return convert

    def _resized(self, step: Step, region: Region, emit: NodeBuilder) -> list[Any]:
        """The sizes of a packed value."""
        node = step.node
        count = self._inside(region, self.packings[self.needed[node]].count)
        sizes: dict[str, Any] = {BATCH: 1, TOKENS: count, ROWS: count}
        if GROUPS in self.layout.tags[node]:
            sizes[GROUPS] = self.conversion.groups(node)
        if {CHOICES, SORTED} & {*self.layout.tags[node]}:
            sizes[CHOICES] = sizes[SORTED] = computed(emit, operator.mul, count, self.conversion.choices(node))
        own = zip(self.layout.tags[node], node.meta["example_value"].shape, strict=True)
        resized = [sizes[tag] if tag else size for tag, size in own]
        if any(isinstance(size, torch.SymInt) for size in resized):
            raise refused(node, "has a size of the batch beside its rows")
        return resized

    def _embedded(self, step: Step, emit: NodeBuilder) -> Node:
        node, rows = step.node, self.packings[self.needed[step.node]].rows
        ids = argument(node, "input")
        found = emit("index_select", (emit("reshape", (ids, -1)), 0, self._inside(step.region, rows)))
        found = emit("unsqueeze", (found, 0))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: found if operand is ids else operand)
        return emit(node.target, args, kwargs, like=node)

    def _attention(self, found: RowAttention, region: Region, emit: NodeBuilder) -> Node:
        wanted, seen = self.needed[found.node], closed(self.layout.spaces[found.key.node])
        mask, heads = self.masks[found.node], shape_of(found.query.node)[found.query.order[1]]
        share = int(heads) // mask.meta["example_value"].shape[1]
        plan_key = (mask, wanted, seen, share)
        if plan_key not in self._made:
            slots = self.packings[wanted].slots, self.packings[seen].slots
            arguments = (mask, *slots, self.sets.sizes(wanted.space).batch, share)
            self._made[plan_key] = self._early(lambda early: early(ops.plan_of_rows.default, arguments))

        def by_heads(operand: Operand, rows: RowSet) -> Node:
            value = self._at(operand.node, rows, region, emit)
            return value if operand.order == (0, 1, 2, 3) else emit("permute", (value, operand.order))

        operands = by_heads(found.query, wanted), by_heads(found.key, seen), by_heads(found.value, seen)
        plan = self._inside(region, self._made[plan_key])
        result = emit(ops.sparse_attention.default, (*operands, None, plan, found.scale))
        dtype = found.node.meta["example_value"].dtype
        if result.meta["example_value"].dtype is not dtype:
            raise refused(found.node, f"is of {dtype}, unlike its operands")
        return result if found.order == (0, 1, 2, 3) else emit("permute", (result, found.order))

    def _on_unpacked(self, node: Node, region: Region, emit: NodeBuilder) -> Node:
        def convert(operand: Node) -> Node:
            if operand in self.layout.scores:
                return self.new[operand]
            return self._unpacked(operand, region, emit) if operand in self.layout.tags else operand

        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), convert)
        return emit(node.target, args, kwargs, like=node)

    def _selected(self, x: Node, node: Node, rows: RowSet, region: Region, emit: NodeBuilder) -> Node:
        """The packed value of `node`, from its value with all rows."""
        return self.conversion.select(x, node, self._inside(region, self.packings[rows].rows), emit)

    def _unpacked(self, node: Node, region: Region, emit: NodeBuilder) -> Node:
        """A value with all rows [.., B, .., T, ..]; rows that were not computed are copies of others."""
        if self._is_whole(node):
            return node
        key = ("unpacked", self._value(node), region, self.moment)
        if key not in self._made:
            rows = self.needed[node]
            sizes = self.sets.sizes(rows.space)
            place, *own = (self._inside(region, x) for x in (self.packings[rows].place, sizes.batch, sizes.tokens))
            self._made[key] = self.conversion.unpack(self._value(node), node, place, (own[0], own[1]), emit)
        return self._made[key]

    # Exits

    def _left(self, step: Step, emit: NodeBuilder) -> Node:
        """The result of an exit, from packed rows."""
        node, found = step.node, self.layout.exits[step.node]
        if step.region.parent is not None:
            raise refused(node, "ends rows in a checkpoint")
        wanted = RowSet(self.layout.spaces[found.operand], frozenset({node}))
        packing = self.packings[wanted]
        x = self._at(found.operand, wanted, step.region, emit)
        if found.kind == "loss":
            target = emit("index_select", (found.by, 0, packing.rows))
            target = emit("masked_fill", (target, packing.padding, argument(node, "ignore_index", -100)))
            replaced = {found.by: target, found.operand: x}
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda part: replaced.get(part, part))
            return emit(node.target, args, kwargs, like=node)
        if found.kind == "picked":
            space = wanted.space
            place = self._early(
                lambda early: early("index_select", (packing.place, 0, self.sets.picked(found.by, space, early)))
            )
            x = x if ROWS in self.layout.tags[found.operand] else emit("squeeze", (x, 0))
            return emit("index_select", (x, 0, place))
        if found.kind == "masked":
            return self._masked(node, x, found, wanted, emit)
        return self._summed(node, x, self.layout.tags[found.operand], wanted, emit)

    def _masked(self, node: Node, x: Node, found: Exit, rows: RowSet, emit: NodeBuilder) -> Node:
        """A masked value with all rows, from the packed ones: those that were not computed are 0."""
        sizes, place = self.sets.sizes(rows.space), self.packings[rows].place
        if rows.space.whole is not None:  # its places are one more
            place = emit("narrow", (place, 0, 0, sizes.rows))
        x = self.conversion.unpack(x, found.operand, place, (sizes.batch, sizes.tokens), emit)
        x = emit("masked_fill", (x, emit(torch.ne if found.hides else torch.eq, (found.by, 0)), 0))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda part: x if part is found.operand else part)
        return emit(node.target, args, kwargs, like=node)

    def _summed(self, node: Node, x: Node, tags: Tags, rows: RowSet, emit: NodeBuilder) -> Node:
        packing = self.packings[rows]
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
        exact = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype  # as `sum` accumulates
        zeros = emit("new_zeros", (x, (self.sets.sizes(rows.space).batch, *rest)), {"dtype": exact})
        added = emit("to", (emit("squeeze", (x, 0)), exact))
        found = emit("to", (emit("index_add", (zeros, 0, packing.sequences, added)), dtype))
        return emit("unsqueeze", (found, 1)) if argument(node, "keepdim", False) else found

    # After the last row

    def _return_packed(self) -> None:
        """Have the bodies return packed values; raises `Refused` for returned rows that nobody needs."""
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
        """Erase the values with all rows, and metadata that nobody uses any more."""
        kept = set(self.new.values())
        inside = {node for found in self.layout.attentions.values() for node in found.inside}
        old = self.layout.tags.keys() | self.layout.exits.keys() | self.layout.fills.keys()
        old |= inside | self.layout.numbers
        for region in self.main.walk():
            for node in reversed(list(region.gm.graph.nodes)):
                is_old = node in old or self._is_made_for_rows(node)
                is_input = node.op == "placeholder" and region.parent is not None
                if not node.users and node not in kept and (is_input or (is_old and node.op.startswith("call"))):
                    region.erase(node)
                elif node in self.needed and node not in kept and not self._is_whole(node):
                    raise refused(node, "is read where its rows are not")
            region.gm.recompile()

    def _is_made_for_rows(self, node: Node) -> bool:
        """Whether a node only makes a tensor of metadata, which may have become unused."""
        return isinstance(self.closure.get(node), Tensor) and not is_in_place(operator_of(node))


def _out_of_place(node: Node) -> Any:
    """The operator that returns the result which this in-place operator writes."""
    name = operator_of(node)[:-1]
    return name if hasattr(torch.Tensor, name) else getattr(torch, name)


def _is_floating(node: Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example.is_floating_point()
