"""Writes the operators between the logits and the results of their rows as a program of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fxpasses.graph.building import NodeBuilder
from fxpasses.graph.modes import Regions, autocast_regions
from fxpasses.graph.reachability import reached
from fxpasses.loss.forms import Form, refused
from fxpasses.loss.region import LossRegion
from fxpasses.loss.row_program import Result, RowProgram
from fxpasses.rows.nodes import is_tensor


class Rewrite(Protocol):
    """The rewrite that a program is written for (`loss/rewrite.py`)."""

    region: LossRegion
    graph: Graph
    fake_mode: Any
    inductor: Mapping[str, Any] | None
    leaving: list[Node]
    trained: list[Node]
    is_trained: bool
    emit: NodeBuilder

    def operand(self, node: Node, form: Form) -> tuple[Node, bool]: ...

    def requires_grad(self, node: Node) -> bool: ...


class Body:
    """Writes the program of a region; a `Writer` for rules (`forms.py`)."""

    def __init__(self, rewrite: Rewrite, xs: Sequence[Node]) -> None:
        self.rewrite, self.region, self.xs = rewrite, rewrite.region, xs
        self.graph = Graph()
        self.products: list[Node] = []
        self.rows: dict[Node, Node] = {}  # placeholders, by the operand that they stand for
        self.shared: dict[Node, Node] = {}
        self.values: dict[Node, Node] = {}
        self.autocast: list[tuple[tuple[Any, ...], Node]] = []

    def run(self) -> tuple[RowProgram, list[Node], list[Node]]:
        """The program, and its operands with rows and without."""
        region, leaving = self.region, self.rewrite.leaving
        for product, x in zip(region.products, self.xs, strict=True):
            example = product.node.meta["example_value"]
            with self.rewrite.fake_mode:
                logits = torch.empty(
                    x.meta["example_value"].shape[0], example.shape[-1], dtype=example.dtype, device=example.device
                )
            self.products.append(self._placeholder(f"logits_{len(self.products)}", logits))
            self.values[product.node] = self.products[-1]
        around = autocast_regions(self.rewrite.graph)
        for product in region.products:
            if product.bias is not None:
                self._enter(around[product.node], product.node)
                form = region.forms[product.node]
                assert isinstance(form, Form)
                bias = self.operand(product.bias, form)
                if bias.meta["example_value"].dtype != product.node.meta["example_value"].dtype:
                    bias = self.emit("to", (bias, product.node.meta["example_value"].dtype))
                self._note(product.node, self.emit("add", (self.values[product.node], bias)))
        for step in region.steps:
            self._enter(step.autocast, step.node)
            self._note(step.node, step.rule.write(self))
        self._enter((), leaving[0])
        results = [self.values[node] for node in leaving]
        self.graph.output(tuple(results))
        self._order()
        flows = self.flows = self._trained(results)
        body = GraphModule({}, self.graph, class_name="Rows")
        trained = self.rewrite.trained
        found = tuple(self._result(value, node, node in trained) for value, node in zip(results, leaving, strict=True))
        program = RowProgram(body, len(self.products), len(self.rows), len(self.shared), found, self.rewrite.inductor)
        return program, self._given(self.rows.items(), flows), self._given(self.shared.items(), flows)

    def of_products(self, operands: Sequence[Node]) -> list[Node]:
        """The operands of products, as the program takes them (`_given`)."""
        return self._given(zip(operands, self.products, strict=True), self.flows)

    def _result(self, value: Node, node: Node, differentiable: bool) -> Result:
        example, form = value.meta["example_value"], self.region.forms[node]
        assert isinstance(form, Form)
        if example.dtype != node.meta["example_value"].dtype or tuple(example.shape[1:]) != form.sizes:
            raise refused(node, "is not what it was, row by row")
        return Result(form.sizes, example.dtype, differentiable)

    def _note(self, node: Node, value: Node) -> None:
        self.values[node] = self.emit("detach", (value,)) if self._stops_gradients(node) else value

    def _stops_gradients(self, node: Node) -> bool:
        requires_grad = self.rewrite.requires_grad
        is_stopped = is_tensor(node) and is_floating(node) and not requires_grad(node)
        return is_stopped and any(map(requires_grad, node.all_input_nodes))

    def _trained(self, results: Sequence[Node]) -> set[Node]:
        """The nodes through which gradients of the trained results flow."""

        def operands(node: Node) -> list[Node]:
            return [] if node.target == "detach" or not is_floating(node) else node.all_input_nodes

        if not self.rewrite.is_trained:
            return set()
        trained = [
            value for value, node in zip(results, self.rewrite.leaving, strict=True) if node in self.rewrite.trained
        ]
        return set(reached(trained, operands))

    def _given(self, operands: Iterable[tuple[Node, Node]], trained: set[Node]) -> list[Node]:
        """The operands for some placeholders: detached if eager mode gives them no gradient, since 0 would be one."""
        return [
            operand
            if placeholder in trained or not self.rewrite.requires_grad(operand)
            else self.rewrite.emit("detach", (operand,))
            for operand, placeholder in operands
        ]

    # Writer

    def value(self, node: Node) -> Node:
        return self.values[node]

    def operand(self, node: Node, form: Form) -> Node:
        if form.chosen is None and self.region.forms[self.rewrite.leaving[0]].chosen is not None:  # type: ignore[union-attr]
            found, has_rows = self.rewrite.operand(node, form)
            if has_rows:
                raise refused(node, "has rows of which a part is chosen later")
        else:
            found, has_rows = self.rewrite.operand(node, form)
        kind = self.rows if has_rows else self.shared
        if found not in kind:
            name = f"{'row' if has_rows else 'shared'}_{len(kind)}"
            kind[found] = self._placeholder(name, found.meta["example_value"])
        return kind[found]

    def emit(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        return self.builder(target, args, kwargs)

    def _placeholder(self, name: str, example: Any) -> Node:
        node = self.graph.placeholder(name)
        node.meta["example_value"] = example
        return node

    def _enter(self, regions: Regions, origin: Node) -> None:
        """Leave and enter autocast regions, so that exactly the given ones are open."""
        shared = 0
        while shared < min(len(regions), len(self.autocast)) and self.autocast[shared][0] == regions[shared]:
            shared += 1
        while len(self.autocast) > shared:
            self.graph.call_function(_exit_autocast, (self.autocast.pop()[1],))
        for arguments in regions[shared:]:
            self.autocast.append((arguments, self.graph.call_function(_enter_autocast, arguments)))
        self.builder = NodeBuilder(self.graph, self.rewrite.fake_mode, origin, autocast=regions)

    def _order(self) -> None:
        """Put placeholders first: products, operands with rows, operands without."""
        first = next(iter(self.graph.nodes))
        for node in reversed([*self.products, *self.rows.values(), *self.shared.values()]):
            if node is not first:
                first.prepend(node)
                first = node


def is_floating(node: Node) -> bool:
    """Whether a node, or one of its results, may carry a gradient."""
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    return any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves)
