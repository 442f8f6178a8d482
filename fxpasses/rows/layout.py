"""Which dimensions of a value are the batch's sequences and tokens.

    ids: i64[8, 384]                                    metadata
    h = embedding(ids, table)         [8, 384, 512]     batch, tokens, -
    q = linear(h, w).view(8, 384, 8, 64)                batch, tokens, -, -
    q = q.transpose(1, 2)                               batch, -, tokens, -
    logits = linear(h, w).view(3072, 32000)             rows, -
    cross_entropy(logits, target)                       an exit: takes rows, and gives none

Forwards, from the embeddings of the batch's tokens, through operators that compute each row from the same row of their
operands. Attention is the one operator that mixes rows and is known. Whatever else mixes rows is refused, as is a row
that leaves the graph: what a program returns is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from fxpasses.graph.aliases import storages
from fxpasses.graph.calls import CASTS, OperatorCall, is_in_place, is_pointwise, operator_of
from fxpasses.graph.checkpoints import has_policy
from fxpasses.graph.modes import Regions, autocast_regions
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import Region
from fxpasses.graph.symbols import expression
from fxpasses.passes.experts.rowwise_rules import ALONG
from fxpasses.report import Reason
from fxpasses.rows.exits import BATCH, ROWS, TOKENS, Exit, Tags, exit_of

ATTENTION = "scaled_dot_product_attention"
RESHAPES = frozenset({"flatten", "reshape", "unflatten", "view"})
_KEEPING = CASTS | {"clone", "type_as"}
_KEEPING_ALONG = frozenset({"chunk", "cumsum", "glu", "log_softmax", "softmax", "split", "tensor_split"})
_NORMS = frozenset({"layer_norm", "rms_norm"})


def shape_of(node: Node) -> tuple[Any, ...]:
    """The sizes of a tensor, as integers or expressions."""
    return tuple(sympy.sympify(expression(size)) for size in node.meta["example_value"].shape)


def is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("example_value"), Tensor)


def first_of(node: Node) -> Any:
    return node.args[0] if node.args else None


def refused(node: Node, text: str = "is not known to work row by row") -> Refused:
    return Refused(Reason.NOT_BY_ROWS, f"`{operator_of(node) or node.name}` {text}", node)


@dataclass(eq=False)
class Layout:
    """What is known of the rows of a graph and its checkpoint bodies.

    ids: an input of an embedding, whose sizes are the batch's. tags: of each value with rows. exits: the nodes that
    take rows and give none. attentions: those among rows. steps: in the order in which they run. origins: of a body's
    inputs and of a checkpoint's results, the value that each is, on the other side of the border. results: those
    results. written: of each operator in place, the value whose memory it writes.
    """

    ids: Node | None = None
    tags: dict[Node, Tags] = field(default_factory=dict)
    exits: dict[Node, Exit] = field(default_factory=dict)
    attentions: list[Node] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    origins: dict[Node, Node] = field(default_factory=dict)
    results: set[Node] = field(default_factory=set)
    written: dict[Node, Node] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Step:
    """A node that takes or gives rows. autocast: the regions around it."""

    node: Node
    region: Region
    autocast: Regions


def find_layout(main: Region, is_metadata: Callable[[Node], bool], may_drop: bool = False) -> Layout | None:
    """The layout of a graph; None without an embedding of tokens. Raises `Refused` for what mixes rows otherwise.

    may_drop: whether a dropout may draw other random numbers than eager mode's.
    """
    analysis = _Analysis(is_metadata, may_drop)
    analysis.run(main)
    return analysis.layout if analysis.layout.ids is not None else None


class _Analysis:
    def __init__(self, is_metadata: Callable[[Node], bool], may_drop: bool) -> None:
        self.is_metadata, self.may_drop = is_metadata, may_drop
        self.layout = Layout()
        self.tags = self.layout.tags
        self.sizes: tuple[Any, ...] = ()

    def run(self, region: Region) -> None:
        for node, autocast in autocast_regions(region.gm.graph, region.autocast).items():
            name = operator_of(node)
            if node in region.bodies:
                if has_policy(region.bodies[node].gm):
                    raise Refused(Reason.SELECTIVE, "", node)
                self._body(node, region.bodies[node])
            elif self._is_embedding(node, name):
                self.tags[node] = (BATCH, TOKENS, None)
                self.layout.steps.append(Step(node, region, autocast))
            elif any(operand in self.tags for operand in node.all_input_nodes):
                self._visit(node, name, region, autocast)

    def _body(self, call: Node, body: Region) -> None:
        for placeholder, operand in body.operands.items():
            if operand in self.tags:
                self.tags[placeholder], self.layout.origins[placeholder] = self.tags[operand], operand
        self.run(body)
        for user in call.users:
            outputs, at = body.gm.graph.output_node().args[0], user.args[-1]
            if operator_of(user) != "getitem" or not isinstance(outputs, (tuple, list)) or not isinstance(at, int):
                raise refused(call, "returns rows in a way that is not known")
            result: Any = outputs[at]
            if result in self.tags:
                self.tags[user], self.layout.origins[user] = self.tags[result], result
                self.layout.results.add(user)

    def _is_embedding(self, node: Node, name: str) -> bool:
        """Whether a node looks the batch's tokens up: those of the first such node."""
        ids: Any = OperatorCall.of(node).argument("input") if name == "embedding" else None
        if not is_tensor(ids) or not self.is_metadata(ids) or len(shape_of(ids)) != 2:
            return False
        call = OperatorCall.of(node)
        if call.argument("max_norm") is not None or call.argument("scale_grad_by_freq") or call.argument("sparse"):
            return False  # what becomes of the table depends on how often it is looked up
        if ids.meta["example_value"].device.type != "cpu":
            raise Refused(Reason.NOT_ON_CPU, f"`{ids.name}`", node)
        if self.layout.ids is None and 1 not in shape_of(ids):
            self.layout.ids, self.sizes = ids, shape_of(ids)
        return shape_of(ids) == self.sizes

    def _visit(self, node: Node, name: str, region: Region, autocast: Regions) -> None:
        if node in self.layout.origins:
            return
        if node.op == "output":
            if region.parent is None:
                raise refused(node, "takes rows, which are exact where they are returned")
            return
        found = exit_of(node, self.tags, self.is_metadata)
        if found is not None:
            self.layout.exits[node] = found
        elif isinstance(node.meta.get("example_value"), (Tensor, tuple, list)):
            self.tags[node] = self._rule(node, name)
            if sorted(filter(None, self.tags[node])) not in ([BATCH, TOKENS], [ROWS]):
                raise refused(node, "combines rows with other rows")
            if is_tensor(node) and len(self.tags[node]) != len(shape_of(node)):
                raise refused(node)
        else:
            raise refused(node, "reads numbers of rows")
        self.layout.steps.append(Step(node, region, autocast))

    def _rule(self, node: Node, name: str) -> Tags:
        call = OperatorCall.of(node)
        first = call.argument("input", first_of(node))
        tags = self.tags.get(first, ()) if isinstance(first, Node) else ()
        if call.argument("inplace"):
            raise refused(node, "writes to rows")
        if is_in_place(name):
            return self._in_place(node, name)
        if name == ATTENTION:
            return self._attention(node, call)
        if name in ("cat", "stack"):
            return self._joined(node, call, name)
        if is_pointwise(name) and (name != "where" or len(node.args) == 3):
            return self._broadcast(node)
        if name == "addmm":  # a bias, rows and a weight
            rows: Any = node.args[1]
            if self.tags.get(rows) == (ROWS, None) and self._rows_among(node) == 1 and len(node.args) == 3:
                return (ROWS, None)
        if not tags:
            raise refused(node)
        if name in _KEEPING or (name == "dropout" and (self.may_drop or not _drops(call))):
            return tags
        found = self._selected(node, call, name, tags) or self._multiplied(node, call, name, tags)
        if found is not None:
            return found
        if name in _NORMS and not any(tags[-len(call.argument("normalized_shape")) :]):
            return tags
        if name in RESHAPES:
            return self._regrouped(node, shape_of(first), tags, shape_of(node))
        if name in ("transpose", "permute", "unsqueeze", "squeeze", "expand"):
            return self._rearranged(node, call, name, tags)
        if name in ALONG and (dims := call.argument("dim", ALONG[name])) is not None:
            found = _along(tags, dims, name, call)
            if found is not None:
                return found
        raise refused(node)

    def _selected(self, node: Node, call: OperatorCall, name: str, tags: Tags) -> Tags | None:
        """Rules of operators that select or repeat features."""
        dim = call.argument("dim")
        if name == "getitem":
            return self._indexed(node, tags) if is_tensor(first_of(node)) else tags
        if name == "gather" and tags[dim] is None:
            return self._gathered(node, call.argument("index"), tags)
        if name == "repeat_interleave" and type(dim) is int and tags[dim] is None:
            return tags if type(call.argument("repeats")) is int else None
        return None

    def _multiplied(self, node: Node, call: OperatorCall, name: str, tags: Tags) -> Tags | None:
        """Rules of products with weights, and of the loss of each row."""
        if self._rows_among(node) != 1:
            return None
        if name == "cross_entropy" and tags == (ROWS, None):
            is_known = is_tensor(call.argument("target")) and call.argument("reduction", "mean") == "none"
            return (ROWS,) if is_known else None
        if name in ("linear", "matmul") and tags[-1] is None:
            return self._product(node, call, name, tags)
        return None

    def _in_place(self, node: Node, name: str) -> Tags:
        """`x += y`, where no other value shares the memory of x: it is `x + y` from there on."""
        written = first_of(node)
        if not is_pointwise(name[:-1]) or written not in self.tags or node.kwargs.get("out") is not None:
            raise refused(node, "writes to rows")
        written = self.layout.written.get(written, written)
        memory = set(storages(node))
        sharing = {other for other in self.tags if other is not written and memory & set(storages(other))}
        if any(self.layout.written.get(other) is not written for other in sharing):
            raise refused(node, "writes to rows that another value shares")
        if self.layout.origins.get(written) is not None or self._broadcast(node) != self.tags[written]:
            raise refused(node, "writes to rows of another checkpoint")
        self.layout.written[node] = written
        return self.tags[written]

    def _rows_among(self, node: Node) -> int:
        return len(self.tags.keys() & {*node.all_input_nodes})

    def _product(self, node: Node, call: OperatorCall, name: str, tags: Tags) -> Tags:
        """Rows times a weight, [..., in] by [out, in] or [in, out]."""
        other = call.argument("weight" if name == "linear" else "other")
        if not is_tensor(other) or other in self.tags or len(shape_of(other)) > 2:
            raise refused(node, "multiplies rows by rows")
        return tags if len(shape_of(node)) == len(tags) else tags[:-1]

    def _broadcast(self, node: Node) -> Tags:
        found: list[str | None] = [None] * node.meta["example_value"].dim()
        for operand in node.all_input_nodes:
            for place, tag in enumerate(reversed(self.tags.get(operand, ())), 1):
                if tag is not None and found[-place] not in (None, tag):
                    raise refused(node, "combines rows with other rows")
                found[-place] = tag or found[-place]
        return tuple(found)

    def _gathered(self, node: Node, index: Any, tags: Tags) -> Tags:
        """`x.gather(-1, index)`, where the index has a row for each of x."""
        rows = [(size, tag) for size, tag in zip(shape_of(first_of(node)), tags, strict=True) if tag]
        own = [(size, tag) for size, tag in zip(shape_of(index), tags, strict=True) if tag]
        if rows != own or (index in self.tags and self.tags[index] != tags):
            raise refused(node, "selects by other rows")
        return tags

    def _joined(self, node: Node, call: OperatorCall, name: str) -> Tags:
        parts = first_of(node)
        if not isinstance(parts, (tuple, list)) or not all(is_tensor(part) for part in parts):
            raise refused(node)
        ndim = node.meta["example_value"].dim()
        dim = call.argument("dim", 0)
        if name == "stack":
            own = {self.tags.get(part) for part in parts}
            (tags,) = own if len(own) == 1 else (None,)
            if tags is None:
                raise refused(node, "joins rows with what is none")
            at = dim % ndim
            return (*tags[:at], None, *tags[at:])
        found = self._broadcast(node)
        if found[dim % ndim] is not None:
            raise refused(node, "joins along the rows")
        return found

    def _regrouped(self, node: Node, before: tuple[Any, ...], tags: Tags, after: tuple[Any, ...]) -> Tags:
        """A dimension is the same before and after if its size and the product of the sizes before it are."""
        if node.meta["example_value"].dtype != first_of(node).meta["example_value"].dtype:
            raise refused(node, "takes the bits of rows for other numbers")
        found: list[str | None] = [None] * len(after)
        places = {(math.prod(after[:place]), size): place for place, size in reversed([*enumerate(after)])}
        batch, tokens = self.sizes
        outer = [math.prod(before[:at]) for at in range(len(before))]
        for at, tag in enumerate(tags):
            if tag is None:
                continue
            if (outer[at], before[at]) in places:
                found[places[outer[at], before[at]]] = tag
            elif tag == ROWS and {(outer[at], batch), (outer[at] * batch, tokens)} <= places.keys():
                found[places[outer[at], batch]], found[places[outer[at] * batch, tokens]] = BATCH, TOKENS
            elif tag == BATCH and tags[at + 1 : at + 2] == (TOKENS,) and (outer[at], batch * tokens) in places:
                found[places[outer[at], batch * tokens]] = ROWS
            elif not (tag == TOKENS and ROWS in found):
                raise refused(node, "mixes rows and features")
        return tuple(found)

    def _rearranged(self, node: Node, call: OperatorCall, name: str, tags: Tags) -> Tags:
        ndim = len(tags)
        if name == "transpose":
            order, (i, j) = list(tags), (call.argument("dim0"), call.argument("dim1"))
            order[i], order[j] = order[j], order[i]
            return tuple(order)
        if name == "permute":
            return tuple(tags[dim] for dim in call.sequence("dims"))
        if name == "unsqueeze":
            at = call.argument("dim") % (ndim + 1)
            return (*tags[:at], None, *tags[at:])
        if name == "expand":
            return (None,) * (node.meta["example_value"].dim() - ndim) + tags
        dims = call.argument("dim")
        if type(dims) is not int or tags[dims] is not None:
            raise refused(node, "removes a dimension of rows")
        at = dims % ndim
        kept = node.meta["example_value"].dim() == ndim
        return tags if kept else (*tags[:at], *tags[at + 1 :])

    def _indexed(self, node: Node, tags: Tags) -> Tags:
        index = list(node.args[1]) if isinstance(node.args[1], tuple) else [node.args[1]]
        if any(is_tensor(part) or isinstance(part, (list, Tensor)) for part in index):
            raise refused(node, "selects rows")
        at = index.index(Ellipsis) if Ellipsis in index else len(index)
        index[at : at + 1] = [slice(None)] * (len(tags) - sum(part not in (None, Ellipsis) for part in index))
        found, own = [], iter(tags)
        for part in index:
            tag = None if part is None else next(own)
            if tag and part not in (slice(None), slice(0, None)):
                raise refused(node, "selects rows")
            found += [tag] if part is None or isinstance(part, slice) else []
        return tuple(found)

    def _attention(self, node: Node, call: OperatorCall) -> Tags:
        operands = [call.argument(name) for name in ("query", "key", "value")]
        mask = call.argument("attn_mask")
        if mask is not None and not self._is_known_mask(mask):
            raise refused(node, "has a mask that is not the batch's, or not bool [B, H, T, T]")
        if call.argument("dropout_p", 0.0):
            raise refused(node, "drops pairs at random")
        if any(self.tags.get(operand) != (BATCH, None, TOKENS, None) for operand in operands):
            raise refused(node, "is not self-attention by heads")
        self.layout.attentions.append(node)
        return self.tags[operands[0]]

    def _is_known_mask(self, mask: Any) -> bool:
        if not is_tensor(mask) or not self.is_metadata(mask) or mask.meta["example_value"].dtype != torch.bool:
            return False
        batch, tokens = self.sizes
        sizes = shape_of(mask)
        return len(sizes) == 4 and sizes[0] in (1, batch) and sizes[2:] == (tokens, tokens)


def _drops(call: OperatorCall) -> bool:
    p = call.argument("p", 0.5)
    return call.argument("training", True) is not False and not (type(p) in (int, float) and p == 0)


def _along(tags: Tags, dims: Any, name: str, call: OperatorCall) -> Tags | None:
    """The tags after an operator along some dimensions; None if one of them has rows."""
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    if not all(type(dim) is int for dim in dims) or any(tags[dim] for dim in dims):
        return None
    if name == "unflatten":
        return None
    if name == "unbind":
        return tuple(tag for at, tag in enumerate(tags) if at not in {dim % len(tags) for dim in dims})
    if name in _KEEPING_ALONG or call.argument("keepdim", False):
        return tags
    return tuple(tag for at, tag in enumerate(tags) if at not in {dim % len(tags) for dim in dims})
