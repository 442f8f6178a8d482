"""Rules of row-wise operators on logits: the form of an operator's result, and how a program of rows writes it.

    logits: "f32[8, 384, 32000]"                rows [8, 384], and 32,000 columns
    logits.view(-1, 32000)                      rows [3072], 32,000 columns
    logits.tanh() * 30                          unchanged
    logits[:, :-1]                              chosen rows [8, 383]
    logits.log_softmax(-1).gather(-1, index)    1 column
    cross_entropy(logits, target, "none")       only rows
    logits.softmax(1)                           no rule: mixes rows

In the program all rows are in one dimension: [n, 32000], [n, 1], [n].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Node

from fxpasses.graph.calls import OperatorCall, is_in_place, operator_of
from fxpasses.graph.refusals import Refused
from fxpasses.graph.symbols import expression, hint_of, is_unbacked
from fxpasses.graph.traits import ALONG_DIMENSION, KEEPS_VALUES, RESHAPES, SQUEEZES, is_pointwise
from fxpasses.report import Reason
from fxpasses.rows.nodes import first_of, is_tensor, shape_of, whole_index

_RESHAPES = RESHAPES | SQUEEZES
# Operators along the columns: those that keep them, those that return one number, those that return values and indices.
_REDUCING = frozenset(
    {"all", "amax", "amin", "any", "argmax", "argmin", "logsumexp", "mean", "norm", "prod", "std", "sum", "var"}
)
_PAIRS = frozenset({"max", "min", "sort", "topk"})
_OF_CLASSES = frozenset({"cross_entropy", "nll_loss"})


@dataclass(frozen=True)
class Selection:
    """`x[index]` of rows in `lead` dimensions.

    rows: the sizes of x in these dimensions. parts: the start, stop and step of each slice, or one tensor of positions.
    """

    rows: tuple[Any, ...]
    parts: tuple[Any, ...]

    @property
    def lead(self) -> int:
        return len(self.rows)

    @property
    def index(self) -> tuple[Any, ...]:
        return tuple(slice(*part) if isinstance(part, tuple) else part for part in self.parts)

    @property
    def operands(self) -> list[Node]:
        found = [bound for part in self.parts for bound in (part if isinstance(part, tuple) else (part,))]
        return [bound for bound in found if isinstance(bound, Node)]


@dataclass(frozen=True)
class Form:
    """rows: the sizes of a value's first dimensions, which are rows. columns: the size of its last dimension, if it has
    one more. chosen: the selection that its rows come from; None for all rows."""

    rows: tuple[Any, ...]
    columns: int | None
    chosen: Selection | None = None

    @property
    def lead(self) -> int:
        return len(self.rows)

    @property
    def ndim(self) -> int:
        return self.lead + (self.columns is not None)

    @property
    def sizes(self) -> tuple[int, ...]:
        return () if self.columns is None else (self.columns,)


class Writer(Protocol):
    """Writes a program of rows."""

    def value(self, node: Node) -> Node:
        """The program's node for a value of some form."""

    def operand(self, node: Node, form: Form) -> Node:
        """The program's node for another operand of an operator whose result has `form`."""

    def emit(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node: ...


Write = Callable[[Writer], Node]


@dataclass(frozen=True)
class Rule:
    """forms: that of the node's result, or of each of its results. write: writes the node into the program."""

    forms: Form | tuple[Form, ...]
    write: Write


def refused(node: Node, text: str) -> Refused:
    return Refused(Reason.NOT_BY_ROWS, f"`{operator_of(node) or node.name}` {text}", node)


def rule(node: Node, forms: Mapping[Node, Any]) -> Rule:
    """The rule of a node that reads values of known forms; raises `Refused` without one."""
    name, call = operator_of(node), OperatorCall.of(node)
    first = call.argument("input", first_of(node))
    if name == "getitem" and isinstance(forms.get(first), tuple):
        return _item(node, forms[first])
    own = [operand for operand in node.all_input_nodes if operand in forms]
    if any(isinstance(forms[operand], tuple) for operand in own):
        raise refused(node, "takes several results as one")
    if is_in_place(name) or call.argument("inplace"):
        raise refused(node, "writes to logits")
    if name == "kl_div" and call.argument("reduction", "mean") != "none":
        raise refused(node, "is of all rows at once")
    if name == "kl_div" or (is_pointwise(name) and (name != "where" or len(node.args) == 3)) or _is_of_two(node, name):
        return _pointwise(node, own, forms)
    if name == "expand_as":
        return _expanded(node, call, forms)
    if own != [first] and name not in ("gather", *_OF_CLASSES):
        raise refused(node, "is not known to work row by row")
    form = forms[first]
    if name in _OF_CLASSES:
        return _loss(node, call, first, form, forms)
    if name == "getitem":
        return _indexed(node, first, form)
    if name == "index_select" and call.argument("dim") == 0 and form.lead == 1 and form.chosen is None:
        index = call.argument("index")
        if is_tensor(index) and len(shape_of(index)) == 1:
            chosen = Selection(form.rows, (index,))
            return _chosen(first, replace(form, rows=shape_of(node)[:1], chosen=chosen))
    if name in KEEPS_VALUES and node.all_input_nodes == [first]:
        return Rule(form, lambda to: to.emit(node.target, *_with_first(node, first, to.value(first))))
    if name in _RESHAPES:
        return _reshaped(node, first, form)
    if name == "gather":
        return _gathered(node, call, first, form, forms)
    return _along(node, call, name, first, form)


def _is_of_two(node: Node, name: str) -> bool:
    """Whether `max` or `min` compares two tensors."""
    return name in ("max", "min") and len(node.args) == 2 and is_tensor(node.args[1]) and not node.kwargs


def _item(node: Node, forms: tuple[Form, ...]) -> Rule:
    source, at = node.args
    if not isinstance(at, int) or not isinstance(source, Node):
        raise refused(node, "takes several results as one")
    return Rule(forms[at], lambda to: to.emit(node.target, (to.value(source), at)))


def _pointwise(node: Node, own: list[Node], forms: Mapping[Node, Any]) -> Rule:
    leads = {(forms[operand].lead, forms[operand].chosen) for operand in own}
    if len(leads) != 1:
        raise refused(node, "combines rows with other rows")
    ((lead, _),) = leads
    shape = shape_of(node)
    if len(shape) not in (lead, lead + 1) or any(forms[operand].ndim != len(shape) for operand in own):
        raise refused(node, "combines rows with columns")
    columns = None if len(shape) == lead else _integer(node, shape[-1])
    form = replace(forms[own[0]], columns=columns)
    pairs = [pair for operand in own for pair in zip(forms[operand].rows, shape[:lead], strict=True)]
    if any(size == 1 != whole for size, whole in pairs):
        raise refused(node, "gives more rows than it takes")
    others = [operand for operand in node.all_input_nodes if operand not in forms]
    if any(not is_tensor(operand) for operand in others):
        raise refused(node, "takes a number of the batch")

    def write(to: Writer) -> Node:
        def converted(operand: Node) -> Node:
            return to.value(operand) if operand in own else to.operand(operand, form)

        args, kwargs = _mapped(node, converted)
        return to.emit(node.target, args, kwargs)

    return Rule(form, write)


def _expanded(node: Node, call: OperatorCall, forms: Mapping[Node, Any]) -> Rule:
    """The rule of `weights.expand_as(logits)`."""
    x, other = call.argument("input"), call.argument("other")
    if x in forms or not isinstance(forms.get(other), Form) or not is_tensor(x):
        raise refused(node, "is not known to work row by row")
    form = forms[other]
    return Rule(form, lambda to: to.emit("expand_as", (to.operand(x, form), to.value(other))))


def _loss(node: Node, call: OperatorCall, first: Node, form: Form, forms: Mapping[Node, Any]) -> Rule:
    target, weight = call.argument("target"), call.argument("weight")
    is_known = is_tensor(target) and forms.get(target, form) == form and weight not in forms
    is_of_each = call.argument("reduction", "mean") == "none" and call.has_only(
        "input", "target", "weight", "ignore_index", "reduction", "label_smoothing"
    )
    if not is_known or form.lead != 1 or form.columns is None or not is_of_each:
        raise refused(node, "is not known as a loss of each row")
    rows = replace(form, columns=None)
    own = rows if len(shape_of(target)) == 1 else form

    def write(to: Writer) -> Node:
        def converted(operand: Node) -> Node:
            if operand in forms:
                return to.value(operand)
            return to.operand(operand, own if operand is target else form)

        args, kwargs = _mapped(node, converted)
        return to.emit(node.target, args, kwargs)

    return Rule(rows, write)


def _chosen(first: Node, form: Form) -> Rule:
    """The rule of a selection of rows: the program's operands already have only these."""
    return Rule(form, lambda to: to.value(first))


def _indexed(node: Node, first: Node, form: Form) -> Rule:
    shape = shape_of(first)
    given: Any = node.args[1]
    parts: tuple[Any, ...] = given if isinstance(given, tuple) else (given,)
    if _takes_each_rows_own(parts, form, shape):
        index = parts[1]

        def write(to: Writer) -> Node:
            columns = to.emit("remainder", (to.operand(index, replace(form, columns=None)), form.columns))
            found = to.emit("unsqueeze", (columns, 1))  # an index of -1 means the last column
            return to.emit("squeeze", (to.emit("gather", (to.value(first), 1, found)), 1))

        return Rule(replace(form, columns=None), write)
    index = whole_index(given, len(shape))
    rows: list[Any] = []
    rest = list(index)
    while len(rows) < form.lead and rest and rest[0] is not None:
        rows.append(rest.pop(0))
    if len(rows) < form.lead or any(part is None for part in rest[:-1]):
        raise refused(node, "adds a dimension among rows")
    is_all = all(isinstance(part, slice) and part in (slice(None), slice(0, None)) for part in rows)
    if not is_all:
        if rest not in ([], [slice(None)]) or form.chosen is not None:
            raise refused(node, "selects rows in a way that is not known")
        return _chosen(first, _selected(node, form, tuple(rows)))
    if form.columns is None and rest == [None]:
        return Rule(replace(form, columns=1), lambda to: to.emit("unsqueeze", (to.value(first), -1)))
    if form.columns is None or len(rest) != 1 or not isinstance(rest[0], (int, slice)):
        raise refused(node, "selects columns in a way that is not known")
    part = rest[0]
    bounds = (part.start, part.stop, part.step) if isinstance(part, slice) else (part,)
    if not all(bound is None or type(bound) is int for bound in bounds):
        raise refused(node, "selects columns by a number of the batch")
    columns = None if isinstance(part, int) else _integer(node, shape_of(node)[-1])
    return Rule(replace(form, columns=columns), lambda to: to.emit(node.target, (to.value(first), (slice(None), part))))


def _takes_each_rows_own(parts: tuple[Any, ...], form: Form, shape: tuple[Any, ...]) -> bool:
    """Whether an index is `[arange(N), index]`."""
    if form.lead != 1 or form.columns is None or len(parts) != 2 or not all(is_tensor(part) for part in parts):
        return False
    count, index = parts
    call = OperatorCall.of(count)
    is_count = operator_of(count) == "arange" and call.has_only("end", "device", "dtype")
    return is_count and shape_of(count) == shape[:1] == shape_of(index)


def _selected(node: Node, form: Form, rows: tuple[Any, ...]) -> Form:
    """The form of `x[rows]`, where `rows` are slices by numbers, or one tensor of positions."""
    after = shape_of(node)[: form.lead]
    if form.lead == 1 and is_tensor(rows[0]):
        example = rows[0].meta["example_value"]
        if example.dim() == 1 and example.dtype is torch.int64:
            return replace(form, rows=after, chosen=Selection(form.rows, rows))
    if not all(isinstance(part, slice) for part in rows):
        raise refused(node, "selects rows in a way that is not known")
    parts = tuple((part.start, part.stop, part.step) for part in rows)
    return replace(form, rows=after, chosen=Selection(form.rows, parts))


def _reshaped(node: Node, first: Node, form: Form) -> Rule:
    after, columns = shape_of(node), form.columns
    if node.meta["example_value"].dtype != first.meta["example_value"].dtype:
        raise refused(node, "takes the bits of logits for other numbers")
    if columns is not None and len(after) and after[-1] == columns:
        found = replace(form, rows=after[:-1])
    elif columns in (None, 1) and not (columns is None and len(after) == form.lead + 1 and after[-1] == 1):
        found = replace(form, rows=after, columns=None)
    elif columns is None:
        found = replace(form, columns=1)
    else:
        raise refused(node, "mixes rows and columns")
    if not found.lead or math.prod(after[: found.lead]) != math.prod(shape_of(first)[: form.lead]):
        raise refused(node, "mixes rows and columns")
    return Rule(found, lambda to: to.emit("reshape", (to.value(first), (-1, *found.sizes))))


def _gathered(node: Node, call: OperatorCall, first: Node, form: Form, forms: Mapping[Node, Any]) -> Rule:
    index = call.argument("index")
    if form.columns is None or call.argument("dim") not in (-1, form.lead) or not is_tensor(index):
        raise refused(node, "selects rows")
    shape = shape_of(index)
    if len(shape) != form.ndim or not _have_same_rows(index, first, form.lead):
        raise refused(node, "selects from other rows")
    if index in forms and forms[index].chosen != form.chosen:
        raise refused(node, "selects from other rows")
    found = replace(form, columns=_integer(node, shape[-1]))

    def write(to: Writer) -> Node:
        where = to.value(index) if index in forms else to.operand(index, found)
        return to.emit("gather", (to.value(first), 1, where))

    return Rule(found, write)


def _have_same_rows(one: Node, other: Node, lead: int) -> bool:
    """Whether two values have equally many rows; adds a guard if two inputs of the batch have separate sizes."""
    pairs = zip(one.meta["example_value"].shape[:lead], other.meta["example_value"].shape[:lead], strict=True)
    for own, its in pairs:
        if expression(own) != expression(its):
            if is_unbacked(own) or is_unbacked(its) or hint_of(own) != hint_of(its) or own != its:
                return False
    return True


def _along(node: Node, call: OperatorCall, name: str, first: Node, form: Form) -> Rule:
    if name not in ALONG_DIMENSION | _REDUCING | _PAIRS or form.columns is None:
        raise refused(node, "is not known to work row by row")
    dim = call.argument("dim", -1 if name in ("sort", "topk") else None)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if type(dim) is not int or dim not in (-1, form.lead):
        raise refused(node, "is along the rows")
    if name in _PAIRS:
        example = node.meta["example_value"]
        forms = tuple(_form_of(node, part, form) for part in example)
    else:
        forms = (_form_of(node, node.meta["example_value"], form),)
    args, kwargs = _with_dim(node, call)

    def write(to: Writer) -> Node:
        return to.emit(node.target, (to.value(first), *args[1:]), kwargs)

    if first_of(node) is not first:
        raise refused(node, "is written in a way that is not known")
    return Rule(forms if name in _PAIRS else forms[0], write)


def _form_of(node: Node, example: Tensor, form: Form) -> Form:
    if example.dim() == form.lead:
        return replace(form, columns=None)
    return replace(form, columns=_integer(node, example.shape[-1]))


def _with_dim(node: Node, call: OperatorCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments, with the last dimension in place of `dim`."""
    kwargs = dict(node.kwargs)
    for name in ("dim", "axis"):
        if name in kwargs:
            return node.args, {**kwargs, name: -1}
    place = call._place("dim")
    if place is None:
        return node.args, kwargs
    return (*node.args[:place], -1, *node.args[place + 1 :]), kwargs


def _with_first(node: Node, first: Node, value: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _mapped(node, lambda operand: value if operand is first else operand)


def _mapped(node: Node, convert: Callable[[Node], Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import torch.fx

    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), convert)
    return args, kwargs


def _integer(node: Node, size: Any) -> int:
    if not isinstance(size, int) and not getattr(size, "is_Integer", False):
        raise refused(node, "has columns whose number depends on the batch")
    return int(size)
