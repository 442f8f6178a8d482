"""Row-wise rules: the dimensions of a result from those of its operands, for operators that compute each row from the
same row of their operands.

    linear(x, weight)           batch, tokens, -       of x: batch, tokens, -
    x.view(-1, 32000)           rows, -
    x.transpose(1, 2)           batch, -, tokens
    x.softmax(1)                refused: along the tokens
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor
from torch.fx import Node

from fxpasses.experts.rowwise_rules import ALONG
from fxpasses.graph.calls import OperatorCall, is_in_place, swaps_last_dimensions
from fxpasses.graph.refusals import Refused
from fxpasses.graph.traits import ALONG_DIMENSION, BATCHED_PRODUCTS, KEEPS_VALUES, RESHAPES, is_pointwise
from fxpasses.rows.nodes import first_of, is_tensor, refused, shape_of, unfollowed, whole_index
from fxpasses.rows.products import tags_of_product
from fxpasses.rows.routing import Routing, is_inside
from fxpasses.rows.spaces import BATCH, CHOICES, GROUPS, ROWS, TOKENS, Space, Tags
from fxpasses.rows.writes import MAKES_MEMORY, WRITTEN_BY_INDEX, Writes

_KEEPING_ALONG = ALONG_DIMENSION | {"chunk", "glu", "split", "tensor_split"}
_NORMS = frozenset({"layer_norm", "rms_norm"})


class Rules:
    """The rules, for a layout that is being made.

    tags, spaces: those of earlier values. writes: the writes in place. may_drop: whether a dropout may draw other
    random numbers than eager mode's. near_misses: why nodes that look like attention are not.
    """

    def __init__(self, tags: Mapping[Node, Tags], spaces: Mapping[Node, Space], writes: Writes, may_drop: bool) -> None:
        self.tags, self.spaces, self.writes, self.may_drop = tags, spaces, writes, may_drop
        self.near_misses: list[Refused] = []
        self.routing = Routing(tags, spaces)

    def tags_of(self, node: Node, name: str) -> Tags:
        """The tags of a node that takes rows. Raises `Refused`."""
        found = self._tags_of(node, name)
        self.routing.note(node, name, found)
        return found

    def _tags_of(self, node: Node, name: str) -> Tags:
        call = OperatorCall.of(node)
        first = call.argument("input", first_of(node))
        tags = self.tags.get(first, ()) if isinstance(first, Node) else ()
        if call.argument("inplace"):
            raise unfollowed(node, "writes to rows")
        if is_in_place(name):
            self.writes.keeps(node, self.routing.known())
        routed = self.routing.rule(node, name)
        if routed is not None:
            return routed
        if name in MAKES_MEMORY:
            return self.writes.makes(node, first, tags)
        if self.writes.copies(node):
            return self._broadcast(node)
        if name.rstrip("_") in WRITTEN_BY_INDEX and (self._scatters(call, tags) or self.routing.adds(node)):
            return self.writes.in_place(node, name, lambda _: tags) if is_in_place(name) else tags
        if is_in_place(name) and name[:-1] in WRITTEN_BY_INDEX:
            raise unfollowed(node, "writes to other rows")
        if is_in_place(name):
            return self.writes.in_place(node, name, self._broadcast)
        if name in ("cat", "stack"):
            return self._joined(node, call, name)
        if broadcasts(node, name):
            return self._broadcast(node)
        if name == "addmm" and len(node.args) == 3:  # a bias, rows and a weight
            bias, rows, _ = cast("tuple[Any, ...]", node.args)
            fits = self.tags.get(rows) == (ROWS, None) and self._rows_among(node) == 1
            if fits and is_tensor(bias) and len(shape_of(bias)) == 1:
                return (ROWS, None)
        if name in BATCHED_PRODUCTS:
            product = tags_of_product(node, self.tags)
            if product is None and self.near_misses and self._rows_among(node) > 1:  # says why this is not attention
                raise self.near_misses[0]
            if product is not None:
                return product
        if not tags:
            raise refused(node)
        if name in KEEPS_VALUES or (name == "dropout" and (self.may_drop or not _drops(call))):
            return tags
        found = self._selected(node, call, name, tags) or self._multiplied(node, call, name, tags)
        if found is not None:
            return found
        if name in _NORMS and _is_over_features(call.argument("normalized_shape"), tags):
            return tags
        if name in RESHAPES:
            return self.regrouped(node)
        if name in ("view_as_complex", "view_as_real"):
            return tags[:-1] if name == "view_as_complex" else (*tags, None)
        if swaps_last_dimensions(node):
            return (*tags[:-2], tags[-1], tags[-2])
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
            return self.indexed(node, tags) if is_tensor(first_of(node)) else tags
        if name == "gather" and tags[dim] is None:
            return self._gathered(node, call.argument("index"), tags)
        if name == "topk" and tags[call.argument("dim", -1)] is None:
            return tags
        if name == "normalize":
            along = call.argument("dim", 1)
            return tags if type(along) is int and tags[along] is None else None
        if name == "repeat":
            times = call.sequence("repeats")
            fits = len(times) == len(tags) and all(n == 1 for n, tag in zip(times, tags, strict=True) if tag)
            return tags if fits else None
        if name == "repeat_interleave" and type(dim) is int and tags[dim] is None:
            return tags if type(call.argument("repeats")) is int else None
        return None

    def _multiplied(self, node: Node, call: OperatorCall, name: str, tags: Tags) -> Tags | None:
        """Rules of products with weights, and of the loss of each row."""
        if self._rows_among(node) != 1:
            return None
        if name == "cross_entropy" and tags == (ROWS, None):
            target = call.argument("target")
            is_known = is_tensor(target) and len(shape_of(target)) == 1 and call.argument("reduction", "mean") == "none"
            return (ROWS,) if is_known else None
        if name in ("linear", "matmul") and tags[-1] is None:
            return self._product(node, call, name, tags)
        return None

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
        if GROUPS in found or is_inside(tuple(found)):
            (at,) = (len(found) - at for at, tag in enumerate(found) if tag == GROUPS or is_inside((tag,)))
            others = [shape_of(part) for part in node.all_input_nodes if part not in self.tags and is_tensor(part)]
            if any(len(sizes) >= at and sizes[-at] != 1 for sizes in others):
                raise refused(node, "combines rows by groups with other values")
        return tuple(found)

    def _gathered(self, node: Node, index: Any, tags: Tags) -> Tags:
        """`x.gather(-1, index)`, where the index has a row for each row of x."""
        rows = [(size, tag) for size, tag in zip(shape_of(first_of(node)), tags, strict=True) if tag]
        own = [(size, tag) for size, tag in zip(shape_of(index), tags, strict=True) if tag]
        known = self.tags.get(index, None if GROUPS in tags else tags)
        if rows != own or known != tags:
            raise refused(node, "selects by other rows")
        return tags

    def _scatters(self, call: OperatorCall, tags: Tags) -> bool:
        """Whether a call is `x.scatter(-1, index, y)`, where index and y have the rows of x, or y is a number."""
        dim, index, source = call.argument("dim"), call.argument("index"), call.argument("src", call.argument("value"))
        if call.name.startswith("index") or not call.has_only("input", "dim", "index", "src", "value"):
            return False
        if not tags or type(dim) is not int or tags[dim] is not None:
            return False
        rows = [size for size, tag in zip(shape_of(call.argument("input")), tags, strict=True) if tag]
        for other in (index, source):
            if isinstance(other, Node) and is_tensor(other):
                own = self.tags.get(other, ())
                if own != tags or [size for size, tag in zip(shape_of(other), own, strict=True) if tag] != rows:
                    return False
        return isinstance(index, Node)

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

    def regrouped(self, node: Node) -> Tags:
        """The tags of a reshape. A dimension stays the same if its size and the product of the sizes before it do."""
        first: Any = first_of(node)
        before, tags, after = shape_of(first), self.tags[first], shape_of(node)
        if node.meta["example_value"].dtype != first_of(node).meta["example_value"].dtype:
            raise refused(node, "takes the bits of rows for other numbers")
        found: list[str | None] = [None] * len(after)
        places = {(math.prod(after[:place]), size): place for place, size in reversed([*enumerate(after)])}
        batch, tokens = self.spaces[first_of(node)].sizes
        outer = [math.prod(before[:at]) for at in range(len(before))]
        for at, tag in enumerate(tags):
            if tag is None or (tag == TOKENS and ROWS in found):
                continue
            if tag == ROWS and {(outer[at], batch), (outer[at] * batch, tokens)} <= places.keys():
                found[places[outer[at], batch]], found[places[outer[at] * batch, tokens]] = BATCH, TOKENS
            elif tag == GROUPS and (outer[at], batch) in places:
                found[places[outer[at], batch]] = BATCH
            elif tag == CHOICES and (outer[at], batch * tokens) in places:
                found[places[outer[at], batch * tokens]] = ROWS
            elif (outer[at], before[at]) in places:
                found[places[outer[at], before[at]]] = tag
            elif tag == BATCH and tags[at + 1 : at + 2] == (TOKENS,) and (outer[at], batch * tokens) in places:
                found[places[outer[at], batch * tokens]] = ROWS
            elif tag in (BATCH, ROWS) and (joined := self._joined_with_features(at, before, tags)) in places:
                found[places[joined]] = GROUPS if tag == BATCH else CHOICES
            else:
                raise refused(node, "mixes rows and features")
        return tuple(found)

    def _joined_with_features(self, at: int, before: tuple[Any, ...], tags: Tags) -> tuple[Any, Any]:
        """For a dimension of sequences or rows joined with the features after it: the product before it, its size."""
        stop = next((other for other in range(at + 1, len(tags)) if tags[other]), len(tags))
        return math.prod(before[:at]), math.prod(before[at:stop])

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
            if self._is_one_text(node) and ROWS in tags[at:]:
                return (*tags[:at], BATCH, *(TOKENS if tag == ROWS else tag for tag in tags[at:]))
            return (*tags[:at], None, *tags[at:])
        if name == "expand":
            return (None,) * (node.meta["example_value"].dim() - ndim) + tags
        dims = call.argument("dim")
        if type(dims) is not int or (tags[dims] and not (tags[dims] == BATCH and self._is_one_text(node))):
            raise refused(node, "removes a dimension of rows")
        at = dims % ndim
        kept = node.meta["example_value"].dim() == ndim
        return tags if kept else _without_batch((*tags[:at], *tags[at + 1 :]))

    def _is_one_text(self, node: Node) -> bool:
        """Whether the batch is one packed text, [1, T], whose rows are its tokens."""
        space = self.spaces.get(OperatorCall.of(node).argument("input", first_of(node)))
        return space is not None and bool(space.sizes[0] == 1)

    def indexed(self, node: Node, tags: Tags) -> Tags:
        """The tags of `x[...]`, which keeps all rows. tags: those of x."""
        given = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        lists = [part for part in given if isinstance(part, list)]
        if any(is_tensor(part) or isinstance(part, Tensor) for part in given) or len(lists) > 1:
            raise refused(node, "selects rows")
        if lists and (any(type(part) is int for part in given) or any(type(at) is not int for at in lists[0])):
            raise refused(node, "selects rows")
        index = whole_index(given, len(tags))
        found, own = [], iter(tags)
        for part in index:
            tag = None if part is None else next(own)
            is_the_text = tag == BATCH and type(part) is int and self._is_one_text(node)
            if tag and part not in (slice(None), slice(0, None)) and not is_the_text:
                raise refused(node, "selects rows")
            found += [tag] if part is None or isinstance(part, (list, slice)) else []
        if index[0] is None and found[1:2] == [ROWS] and self._is_one_text(node):
            found[:2] = [BATCH, TOKENS]
        return _without_batch(tuple(found))


def _without_batch(tags: Tags) -> Tags:
    """The tags of one text without its dimension of sequences: its tokens are rows."""
    return tuple(ROWS if tag == TOKENS and not {BATCH, GROUPS} & {*tags} else tag for tag in tags)


def broadcasts(node: Node, name: str) -> bool:
    """Whether an operator computes each element from the elements of its operands at the same place."""
    if name in ("max", "min"):  # only of two tensors
        return len(node.args) == 2 and is_tensor(node.args[1]) and not node.kwargs
    return is_pointwise(name) and (name != "where" or len(node.args) == 3)


def _drops(call: OperatorCall) -> bool:
    p = call.argument("p", 0.5)
    return call.argument("training", True) is not False and not (type(p) in (int, float) and p == 0)


def _is_over_features(shape: Any, tags: Tags) -> bool:
    """Whether a norm is over features only. `shape` may also be a node, a part of a value's size."""
    return isinstance(shape, (tuple, list)) and not any(tags[-len(shape) :])


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
