"""Finds logits, the operators that read them row by row, and the few numbers of each row that leave the region.

    logits = linear(h, weight)              a product                        [8, 384, 32000]
    capped = (logits / 30).tanh() * 30      inside
    losses = cross_entropy(capped.view(-1, 32000), target, reduction="none")
    total = losses.sum()                    reads `losses`, which leaves the region

A region has one product, or several if their rows meet (two heads, an adapter), and may contain any operators that have
a rule (`forms.py`). Logits that anything else reads stay unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from fxpasses.graph.calls import OperatorCall, is_in_place, operator_of
from fxpasses.graph.modes import Regions, autocast_regions
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import Region as Graph
from fxpasses.graph.symbols import batch_sizes_of
from fxpasses.loss.forms import Form, Rule, refused, rule
from fxpasses.loss.tail import is_linear
from fxpasses.report import Reason
from fxpasses.rows.nodes import is_tensor, shape_of

# Narrower products are not a language model's logits, and smaller ones gain nothing: one chunk holds all rows.
LEAST_COLUMNS, LEAST_BYTES = 2048, 32 << 20
_MOST_LEFT = 8  # at most an eighth of the columns of a row may leave

_Results = Form | tuple[Form, ...]


@dataclass(frozen=True, eq=False)
class Product:
    """`x @ weight`, with or without a bias. transposed: whether the weight is [V, H], as in `linear`."""

    node: Node
    x: Node
    weight: Node
    bias: Node | None
    transposed: bool


@dataclass(frozen=True, eq=False)
class Step:
    """A node inside a region, with its rule and the autocast regions around it."""

    node: Node
    rule: Rule
    autocast: Regions


@dataclass(frozen=True)
class Size:
    """The size of a value along an axis; None for all axes. product: one whose rows have the same sizes."""

    form: Form
    axis: int | None
    product: Product


@dataclass(eq=False)
class LossRegion:
    """products, steps: in program order. forms: those of all values. sizes: calls that read sizes of a value, and which
    size they read. trouble: why the region stays unchanged."""

    products: list[Product] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    forms: dict[Node, _Results] = field(default_factory=dict)
    sizes: dict[Node, Size] = field(default_factory=dict)
    trouble: Refused | None = None

    @property
    def nodes(self) -> list[Node]:
        return [*(product.node for product in self.products), *(step.node for step in self.steps)]

    @property
    def leaving(self) -> list[Node]:
        """The values that nodes outside read."""
        inside = {*self.nodes, *self.sizes}
        return [node for node in self.nodes if any(user not in inside for user in node.users)]

    def first_form(self) -> Form:
        form = self.forms[self.products[0].node]
        assert isinstance(form, Form)
        return form


def candidates(graph: torch.fx.Graph) -> dict[Node, Product]:
    """The products of rows and a weight that are large enough, and outside of function transforms."""
    inside = transformed(graph)
    found = ((node, _product(node)) for node in graph.nodes if node not in inside)
    return {node: product for node, product in found if product is not None and _is_large(node)}


def transformed(graph: torch.fx.Graph) -> set[Node]:
    """The nodes inside of function transforms, such as vmap."""
    found, levels = set(), 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name.endswith(("increment_nesting", "decrement_nesting")):
            levels += 1 if name.endswith("increment_nesting") else -1
        elif levels:
            found.add(node)
    return found


def find_regions(main: Graph, products: Mapping[Node, Product]) -> list[LossRegion]:
    """The regions of the given products, including those that stay unchanged."""
    around = autocast_regions(main.gm.graph)
    of: dict[Node, LossRegion] = {}
    regions: list[LossRegion] = []
    for node in main.gm.graph.nodes:
        own = list(dict.fromkeys(of[operand] for operand in node.all_input_nodes if operand in of))
        if node in products:
            region = LossRegion([products[node]])
            region.forms[node] = Form(shape_of(node)[:-1], int(shape_of(node)[-1]))
            regions.append(region)
            of[node] = region
            for other in own:
                other.trouble = other.trouble or refused(node, "multiplies logits by a weight")
        elif own:
            joined = _joined(own, regions, of)
            _visit(node, joined, around[node])
            if node in joined.forms or node in joined.sizes:
                of[node] = joined
    for region in regions:
        _leave_out_last(region)
        region.trouble = region.trouble or _trouble(region)
    return regions


def _leave_out_last(region: LossRegion) -> None:
    """Leave nodes outside that are linear in the losses of rows, as `losses * mask`: they give each row its weight."""
    inside = {*region.nodes}
    for step in reversed(region.steps):
        form, operands = region.forms[step.node], [x for x in step.node.all_input_nodes if x in region.forms]
        own = [region.forms[x] for x in operands]
        is_of_rows = all(isinstance(each, Form) and each.columns is None for each in (form, *own))
        if is_of_rows and is_linear(step.node, operands) and not inside.intersection(step.node.users):
            region.steps.remove(step)
            del region.forms[step.node]
            inside.remove(step.node)


def _joined(own: list[LossRegion], regions: list[LossRegion], of: dict[Node, LossRegion]) -> LossRegion:
    first, *others = own
    first.trouble = next((region.trouble for region in own if region.trouble is not None), None)
    for other in others:
        first.products += other.products
        first.steps += other.steps
        first.forms |= other.forms
        first.sizes |= other.sizes
        regions.remove(other)
        of |= {node: first for node, owner in of.items() if owner is other}
    order = {node: at for at, node in enumerate(first.steps[0].node.graph.nodes)} if others and first.steps else {}
    if order:
        first.steps.sort(key=lambda step: order[step.node])
    return first


def _visit(node: Node, region: LossRegion, autocast: Regions) -> None:
    """Take a node that reads values of a region into it, or leave it outside."""
    name = operator_of(node)
    if not _is_of_tensors(node):
        size = _size_of(node, name, region)
        if size is not None:
            region.sizes[node] = size
        return
    if is_in_place(name) or OperatorCall.of(node).argument("inplace"):
        region.trouble = region.trouble or refused(node, "writes to logits")
        return
    try:
        found = rule(node, region.forms)
    except Refused as why:
        wide = [operand for operand in node.all_input_nodes if _is_wide(region.forms.get(operand), region)]
        region.trouble = region.trouble or (why if wide else None)
        return
    forms = found.forms if isinstance(found.forms, tuple) else (found.forms,)
    reads_wide = any(_is_wide(region.forms.get(operand), region) for operand in node.all_input_nodes)
    if reads_wide or not any(_is_wide(form, region) for form in forms):
        region.forms[node] = found.forms
        region.steps.append(Step(node, found, autocast))


def _is_of_tensors(node: Node) -> bool:
    example = node.meta.get("example_value")
    if isinstance(example, (tuple, list)):
        return bool(example) and all(isinstance(part, torch.Tensor) for part in example)
    return isinstance(example, torch.Tensor)


def _size_of(node: Node, name: str, region: LossRegion) -> Size | None:
    """The size of a value of the region that a node asks for; None if it is not known before the value."""
    call = OperatorCall.of(node)
    source: Any = node.args[0] if node.args else None
    if name == "getitem" and source in region.sizes:
        whole, at = region.sizes[source], node.args[1]
        return replace(whole, axis=at % whole.form.ndim) if whole.axis is None and isinstance(at, int) else None
    asked, dim = call.argument("input", source), call.argument("dim")
    form, product = region.forms.get(asked), region.products[0]
    is_whole = (name == "size" and dim is None) or (name == "getattr" and node.args[1:] == ("shape",))
    if not isinstance(form, Form) or form.chosen is not None or not (is_whole or name in ("size", "sym_size")):
        return None
    if (form.lead != 1 and form.rows != shape_of(product.x)[:-1]) or not (is_whole or type(dim) is int):
        return None
    return Size(form, None if is_whole else dim % form.ndim, product)


def _is_wide(form: Any, region: LossRegion) -> bool:
    """Whether a value has too many columns to leave."""
    forms = form if isinstance(form, tuple) else (form,)
    least = min(int(shape_of(product.node)[-1]) for product in region.products)
    return any(f is not None and f.columns is not None and f.columns * _MOST_LEFT > least for f in forms)


def _trouble(region: LossRegion) -> Refused | None:
    """Why a region stays unchanged although all its operators have rules; None if it does not."""
    leaving = region.leaving
    for node in leaving:
        if isinstance(region.forms[node], tuple):
            return refused(node, "gives several results as one")
        if _is_wide(region.forms[node], region):
            user = next(user for user in node.users if user not in {*region.nodes, *region.sizes})
            reader = "is returned" if user.op == "output" else f"goes to `{operator_of(user) or user.name}`"
            return Refused(Reason.READ_IN_FULL, f"`{node.name}` {reader}", user if user.op != "output" else node)
    forms = [region.forms[node] for node in leaving]
    if not leaving:
        return refused(region.products[0].node, "is read by nothing")
    if len({form.chosen for form in forms if isinstance(form, Form)}) != 1:
        return refused(leaving[0], "is of other rows than other losses of the same logits")
    devices = {product.node.meta["example_value"].device for product in region.products}
    return None if len(devices) == 1 else refused(leaving[0], "is of two devices")


def _product(node: Node) -> Product | None:
    name, call = operator_of(node), OperatorCall.of(node)
    x: Any = call.argument("input")
    weight: Any = None
    bias: Any = None
    transposed = False
    if name == "linear":
        weight, bias, transposed = call.argument("weight"), call.argument("bias"), True
    elif name in ("matmul", "mm"):
        weight = call.argument("other")
    elif name == "einsum":
        return _by_letters(node)
    elif name == "addmm" and len(node.args) == 3 and not node.kwargs:
        bias, x, weight = node.args
    if not is_tensor(x) or not is_tensor(weight) or len(shape_of(weight)) != 2 or len(shape_of(x)) < 2:
        return None
    if bias is not None and (not is_tensor(bias) or len(shape_of(bias)) != 1):
        return None
    return Product(node, x, weight, bias, transposed)


def _by_letters(node: Node) -> Product | None:
    """`einsum("btd,vd->btv", x, weight)`, the weight in either order."""
    equation = node.args[0]
    operands: list[Any] = list(node.args[1:])
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or not all(is_tensor(part) for part in operands):
        return None
    terms, _, result = equation.replace(" ", "").replace("...", ".").partition("->")
    left, _, right = terms.partition(",")
    x, weight = operands
    fits = left[:-1] == result[:-1] and set(right) == {left[-1:], result[-1:]} and len(right) == 2
    if not fits or len(shape_of(x)) < 2 or len(set(left)) != len(left) or left[-1] == result[-1]:
        return None
    return Product(node, x, weight, None, right[0] == result[-1])


def _is_large(node: Node) -> bool:
    """Whether a product has the size of logits in the batch at hand, or may have it because its size is unknown."""
    columns = shape_of(node)[-1]
    example = node.meta["example_value"]
    if not columns.is_Integer or columns < LEAST_COLUMNS or not example.is_floating_point():
        return False
    sizes = batch_sizes_of(example)
    if sizes is not None and 0 in sizes:
        return False
    bytes_ = None if sizes is None else torch.Size(sizes).numel() * example.element_size()
    return bytes_ is None or bytes_ >= LEAST_BYTES
