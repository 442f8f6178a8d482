"""Writes a region of logits as a program of rows, and its call in the graph."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

import fxpasses.loss.operators  # noqa: F401 - defines the operators
from fxpasses.graph.aliases import storages, written_operands
from fxpasses.graph.building import NodeBuilder, replace_operand
from fxpasses.graph.calls import operator_of
from fxpasses.graph.gradients import requiring
from fxpasses.graph.modes import autocast_regions, modes
from fxpasses.graph.reachability import reached
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import Region as MainGraph
from fxpasses.graph.traits import KEEPS_VALUES, VIEWS, is_pointwise
from fxpasses.loss.body import Body
from fxpasses.loss.forms import Form, refused
from fxpasses.loss.region import LossRegion, Product, transformed
from fxpasses.loss.row_program import register
from fxpasses.loss.tail import Tail, Weights, find_tail
from fxpasses.report import Reason
from fxpasses.rows.nodes import is_tensor, shape_of

ops = torch.ops.fxpasses
_PURE = frozenset({"all", "any", "flatten", "gather", "index_select", "mean", "pad", "sum"})


class Rewrite:
    """The rewrite of one region. inductor: see `RowProgram`."""

    def __init__(self, main: MainGraph, region: LossRegion, fake_mode: Any, inductor: Mapping[str, Any] | None) -> None:
        self.main, self.region, self.fake_mode, self.inductor = main, region, fake_mode, inductor
        self.graph = main.gm.graph
        self.order = {node: at for at, node in enumerate(self.graph.nodes)}
        self.leaving = region.leaving
        self.requiring = requiring(self.graph)
        self.is_trained = any(map(self.requires_grad, self.leaving))
        carries = self.requires_grad if self.is_trained else _is_floating
        self.trained = [node for node in self.leaving if carries(node)]
        self.dependent = reached(region.nodes, lambda node: node.users).keys()
        self.tail = find_tail(self.trained, carries, self.dependent)
        if self.is_trained and any(_is_float16(product.node) for product in region.products):
            self.tail = None  # gradients in forward are not scaled yet, and vanish or overflow in float16

    def requires_grad(self, node: Node) -> bool:
        """Whether a gradient may flow through a node; true for the output, and for nodes without a known result."""
        if node.op == "output" or (node.op.startswith("call") and node.meta.get("example_value") is None):
            return True
        return node in self.requiring if node in self.order else _any_tensor(node, lambda tensor: tensor.requires_grad)

    @property
    def makes_logits_twice(self) -> bool:
        """Whether the weights of the rows' losses are known only in backward."""
        return self.tail is None and self.is_trained

    def run(self) -> None:
        """Rewrite the graph; raises `Refused` if an operand is computed too late."""
        tail = self.tail
        self._replace_sizes()
        inside = {*self.region.nodes, *self.region.sizes, *(tail.nodes if tail else ())}
        read = [node for node in self.leaving if any(user not in inside for user in node.users)]
        ends = [*read, *([tail.loss] if tail else [])]
        users = [user for node in ends for user in node.users if user not in inside]
        place = min(users, key=self.order.__getitem__)
        if place in transformed(self.graph):
            raise refused(place, "reads a loss inside of a function transform")
        self.inside, self.place = inside, place
        self.emit = NodeBuilder(
            self.graph, self.fake_mode, self.leaving[0], autocast=autocast_regions(self.graph)[place]
        )
        self._check_writes()
        with self.emit.before(place), self._gradients():
            self._write(tail, read)
        self._erase(inside)

    @contextlib.contextmanager
    def _gradients(self) -> Iterator[None]:
        """If the program has switched gradients off at the place, switch them on for the nodes written there."""
        mode = modes(self.graph).get(self.place)
        if mode is None or not mode.changed or not self.is_trained:
            yield
            return
        enabled = torch.is_grad_enabled()
        self.graph.call_function(torch._C._set_grad_enabled, (enabled,))
        yield
        self.graph.call_function(torch._C._set_grad_enabled, (not enabled,))

    def _write(self, tail: Tail | None, read: list[Node]) -> None:
        emit = self.emit
        self.known_sizes: list[Node] = [product.x for product in self.region.products]
        self.xs = xs = [self._rows_of(product) for product in self.region.products]
        self.known_sizes += xs
        ws = [self._weight_of(product) for product in self.region.products]
        body = Body(self, xs)
        program, rows, shared = body.run()
        xs, ws = body.of_products(xs), body.of_products(ws)
        key = register(program)
        replaced: dict[Node, Node] = {}
        if tail is None:
            results = emit(ops.values_of_rows.default, (key, xs, ws, rows, shared))
            values = list(range(len(self.leaving)))
        else:
            cotangents = self._cotangents(tail)
            results = emit(ops.loss_of_rows.default, (key, xs, ws, rows, shared, cotangents, bool(read)))
            loss = emit(operator.getitem, (results, 0))
            if any(map(_may_be_empty, [self.xs[0], *self.trained, *tail.nodes])):
                loss = emit("add", (loss, self._of_no_rows(tail)))
            dtype = tail.loss.meta["example_value"].dtype
            if loss.meta["example_value"].dtype != dtype:
                loss = emit("to", (loss, dtype))
            replaced[tail.loss] = loss
            values = list(range(1, 1 + len(self.leaving)))
        for at, node in zip(values, self.leaving, strict=True):
            if node in read:
                replaced[node] = self._as_before(emit(operator.getitem, (results, at)), node)
        for node, value in replaced.items():  # from here on nothing is refused
            self._replace(node, value)

    def _of_no_rows(self, tail: Tail) -> Node:
        """The tail's result for losses of 0: NaN for a mean over no rows."""
        made: dict[Node, Node] = {}
        for node in self.trained:
            form = self.region.forms[node]
            assert isinstance(form, Form)
            dtype = node.meta["example_value"].dtype
            made[node] = self.emit("new_zeros", (self.xs[0], self.sizes(node, form)), {"dtype": dtype})
        for node in tail.nodes:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: made.get(operand, operand))
            made[node] = self.emit(node.target, args, kwargs, like=node)
        return made[tail.loss]

    def _check_writes(self) -> None:
        """Raise `Refused` if an operand is written before the program's place, where it would be read too late."""
        nodes = [*self.region.nodes, *(self.tail.nodes if self.tail else ())]
        operands = {operand for node in nodes for operand in node.all_input_nodes if operand not in self.inside}
        memory = {storage for operand in operands for storage in storages(operand)}
        first = min(self.order[product.node] for product in self.region.products)
        last = len(self.order) if self.makes_logits_twice else self.order[self.place]
        for node in self.graph.nodes:
            if first < self.order.get(node, -1) < last:
                for written in written_operands(node):
                    if not memory.isdisjoint(storages(written)):
                        raise Refused(
                            Reason.INPUT_WRITTEN, f"`{node.name}` writes to what the loss is computed from", node
                        )

    def _replace(self, node: Node, value: Node) -> None:
        node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in self.inside)

    def _as_before(self, value: Node, node: Node) -> Node:
        form = self.region.forms[node]
        assert isinstance(form, Form)
        return value if form.lead == 1 else self.emit("reshape", (value, self.sizes(node, form)))

    def _replace_sizes(self) -> None:
        """Read the sizes of logits from the rows that they are computed from."""
        for node, size in self.region.sizes.items():
            if size.axis is None:
                continue
            form, x = size.form, size.product.x
            emit = NodeBuilder(self.graph, self.fake_mode, node)
            with emit.after(x):
                if size.axis == form.lead:
                    known: Any = form.columns
                elif form.rows == shape_of(x)[:-1]:
                    known = emit.size(x, size.axis)
                else:
                    sizes = [emit.size(x, at) for at in range(len(shape_of(x)) - 1)]
                    known = functools.reduce(lambda one, other: _times(one, other, emit), sizes)
            for user in list(node.users):
                replace_operand(user, node, known)

    # Operands

    def there(self, node: Node) -> Node:
        """A node of the graph, computed before the program's place: it is moved there if necessary and allowed."""
        if node in self.dependent and node not in self.inside:
            raise refused(node, "is computed from the losses for which it is read")
        if node in self.order and self.order[node] >= self.order[self.place]:
            self._move(node)
        return node

    def _move(self, node: Node) -> None:
        """Move a node, and the nodes that it needs, up to the program's place."""
        first = self.order[self.place]
        needed = reached([node], lambda each: [x for x in each.all_input_nodes if self.order.get(x, -1) >= first])
        between = [each for each in self.graph.nodes if first <= self.order.get(each, -1) <= self.order[node]]
        is_pure = all(
            _is_pure(operator_of(each)) and is_tensor(each) and not self.requires_grad(each) for each in needed
        )
        if not is_pure or any(each in self.dependent for each in needed) or any(map(written_operands, between)):
            raise refused(node, "is computed after a loss that it is read for")
        for each in sorted(needed, key=self.order.__getitem__):
            self.place.prepend(each)
            self.order[each] = first - 1

    def size(self, size: Any) -> int | Node:
        """A size, as a number or read from a value that has it."""
        if getattr(size, "is_Integer", False):
            return int(size)
        place = self.order[self.place]
        others = (node for node, at in self.order.items() if at < place and is_tensor(node) and node not in self.inside)
        for node in (*self.known_sizes, *others):
            for axis, own in enumerate(shape_of(node)):
                if own == size:
                    return self.emit.size(node, axis)
        raise Refused(Reason.UNKNOWN_SIZE, f"{size}")

    def sizes(self, node: Node, form: Form) -> tuple[int | Node, ...]:
        """The sizes of a value. One number may have several symbols, if nothing has compared them yet."""
        x = self.region.products[0].x
        if form.lead == 1:
            rows = [self.emit.size(self.xs[0], 0)]
        elif form.chosen is None and form.rows == shape_of(x)[:-1]:
            rows = [self.emit.size(x, axis) for axis in range(form.lead)]
        else:
            rows = [self.size(size) for size in form.rows]
        return (*rows, *form.sizes)

    def _rows_of(self, product: Product) -> Node:
        """x [N, H] of a product, for the chosen rows."""
        x, emit = self._cast(self.there(product.x), product), self.emit
        form = self.region.forms[self.leaving[0]]
        chosen = form.chosen if isinstance(form, Form) else None
        features = shape_of(x)[-1]
        if not features.is_Integer:
            raise refused(product.node, "has features whose number depends on the batch")
        if chosen is not None:
            if shape_of(x)[:-1] != chosen.rows:
                if chosen.lead != 1:
                    raise refused(product.node, "has rows in other dimensions")
                x = self._flat(x, len(shape_of(x)) - 1)
            for node in chosen.operands:
                self.there(node)
            x = emit(operator.getitem, (x, chosen.index))
        return self._flat(x, len(shape_of(x)) - 1)

    def _flat(self, x: Node, lead: int) -> Node:
        """A value whose rows are in `lead` dimensions, with these flattened into one."""
        return x if lead == 1 else self.emit("flatten", (x, 0, lead - 1))

    def _weight_of(self, product: Product) -> Node:
        weight = self._cast(self.there(product.weight), product)
        return weight if product.transposed else self.emit("t", (weight,))

    def _cast(self, x: Node, product: Product) -> Node:
        """Cast an operand as autocast does, and detach it if the product has no gradient."""
        dtype = product.node.meta["example_value"].dtype
        if self.requires_grad(x) and not self.requires_grad(product.node):
            x = self.emit("detach", (x,))
        return x if x.meta["example_value"].dtype == dtype else self.emit("to", (x, dtype))

    def operand(self, node: Node, form: Form) -> tuple[Node, bool]:
        """An operand that is broadcast to values of a form: [N, ...] if it has rows; and whether it has."""
        node = self.there(node)
        shape, emit = shape_of(node), self.emit
        shape = (sympy.Integer(1),) * (form.ndim - len(shape)) + shape
        rows, rest = shape[: form.lead], shape[form.lead :]
        if any(not size.is_Integer for size in rest):
            raise refused(node, "has columns whose number depends on the batch")
        rest = tuple(map(int, rest))
        if all(size == 1 for size in rows):
            return (node if len(shape_of(node)) <= len(rest) else emit("reshape", (node, rest))), False
        if any(size == 1 for size in rows):
            example = next(x for x in self.region.nodes if self.region.forms[x] == form)
            node = emit("expand", (node, (*self.sizes(example, replace(form, columns=None)), *rest)))
        return self._flat(node, form.lead), True

    def _cotangents(self, tail: Tail) -> list[Node]:
        """The weight of each row of the trained results in the loss, [N] or [N, k]."""
        for node in tail.nodes:
            for operand in node.all_input_nodes:
                if operand not in tail.nodes and operand not in self.trained:
                    self.there(operand)
        found, weights = [], Weights(tail, self.trained, self.emit, self.size, self.xs[0]).run()
        for node, weight in zip(self.trained, weights, strict=True):
            dtype, form = node.meta["example_value"].dtype, self.region.forms[node]
            assert isinstance(form, Form)
            if not isinstance(weight, Node):
                sizes = (self.emit.size(self.xs[0], 0), *form.sizes)
                found.append(self.emit("new_full", (self.xs[0], sizes, weight), {"dtype": dtype}))
                continue
            if weight.meta["example_value"].dtype != dtype:
                weight = self.emit("to", (weight, dtype))
            if shape_of(weight) != shape_of(node):
                weight = self.emit("expand", (weight, self.sizes(node, form)))
            found.append(self._flat(weight, form.lead))
        return found

    def _erase(self, inside: set[Node]) -> None:
        for node in sorted(inside, key=self.order.__getitem__, reverse=True):
            if not node.users:
                self.graph.erase_node(node)


def _may_be_empty(node: Node) -> bool:
    """Whether a tensor has no elements in some batch: `losses[:, :n]`, or `logits[:, :-1]` of texts of one token."""
    return not all(statically_known_true(size > 0) for size in node.meta["example_value"].shape)


def _times(one: Any, other: Any, emit: NodeBuilder) -> Any:
    if isinstance(one, int) and isinstance(other, int):
        return one * other
    return emit(operator.mul, (one, other))


def _is_pure(name: str) -> bool:
    return is_pointwise(name) or name in KEEPS_VALUES | VIEWS | _PURE


def _is_floating(node: Node) -> bool:
    return _any_tensor(node, torch.Tensor.is_floating_point)


def _is_float16(node: Node) -> bool:
    return bool(node.meta["example_value"].dtype is torch.float16)


def _any_tensor(node: Node, holds: Callable[[torch.Tensor], bool]) -> bool:
    example = node.meta.get("example_value")
    if node.op == "output" or (example is None and node.op.startswith("call")):
        return True
    return any(isinstance(leaf, torch.Tensor) and holds(leaf) for leaf in pytree.tree_leaves(example))
