"""The rules by which a loop's body, traced for one part of unknown size u, is computed for all parts at once.

The parts lie one after another in a dimension of size T, the sum of their sizes; there are n of them:

    for one part                      for all
    q: [1, 8, u, 64]                  rows   [1, 8, T, 64]    a dimension of size u is one of size T
    q.mean(2): [1, 8, 64]             each   [n, 1, 8, 64]    no dimension of size u: one value for each part
    q @ k.mT: [1, 8, u, u]            pairs  [1, 8, T, T]     right where both rows are of one part

What a value is shows in its sizes for one part, so each rule is checked by the sizes of its result. An operator that
computes each row from the same rows of its operands runs on all rows. Attention runs with a mask of the pairs that are
of one part, of which `sparsify_attention` makes a plan; softmax over pairs hides the others. Sums over the rows of a
part are sums by index. Anything else is refused, and the loop is unrolled.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fxpasses.graph.calls import OperatorCall, is_in_place, operator_of, swaps_last_dimensions
from fxpasses.graph.symbols import expression
from fxpasses.graph.traits import CASTS, COMPARISONS, COPIES, RESHAPES, is_pointwise
from fxpasses.sequences import views
from fxpasses.sequences.batched import Batched, Unbatched, Values, place_of

_KEEPS = CASTS | COPIES | {"alias", "type_as"}
_NORMS = frozenset({"layer_norm", "rms_norm"})
_SIZES = frozenset({"add", "floor_divide", "getattr", "getitem", "mul", "numel", "size", "sub", "sym_size"})
_SPLITS = frozenset({"chunk", "split", "unbind"})
_REARRANGES = frozenset({"getitem", "narrow", "permute", "squeeze", "transpose", "unsqueeze"})
# Losses of rows, and what they take besides `input`, `target` and `reduction`.
_LOSSES = {
    "cross_entropy": {"ignore_index"}, "l1_loss": set(), "mse_loss": set(), "nll_loss": {"ignore_index"},
    "smooth_l1_loss": {"beta"},
}  # fmt: skip


class Batching(Values):
    """Computes the nodes of a body for all parts. At first, the parts themselves are known.

    mixes_rows: whether the rows of a part attend to each other.
    """

    mixes_rows = False

    def visit(self, node: Node) -> None:
        """Compute a node of the body for all parts, if it depends on the part. Raises `Unbatched`."""
        if not any(map(self.depends, node.all_input_nodes)):
            return
        name, example = operator_of(node), node.meta.get("example_value")
        if is_in_place(name) or not name or OperatorCall.of(node).argument("out") is not None:
            raise Unbatched(f"`{node.name}` writes, or is no operator")
        if node.args and node.args[0] in self.several:
            self.known[node] = self.several[node.args[0]][node.args[1]]  # type: ignore[index]
        elif isinstance(example, Tensor):
            found = self._rule(node, name)
            self._check(node, example, found)
            self.known[node] = found
        elif isinstance(example, (tuple, list)) and name in _SPLITS:
            self.several[node] = views.split(self, node, name)
        elif name in _SIZES | COMPARISONS:
            self.numbers.add(node)
        else:
            raise Unbatched(f"`{node.name}` differs from part to part, and is no tensor")

    def _check(self, node: Node, example: Tensor, found: Batched) -> None:
        """Raise `Unbatched` unless the sizes of a result are those that its rule promises."""
        shape, dims = list(self.shape(node)), self.dims_of(node)
        if dims != found.dims or len(dims) > 2:
            raise Unbatched(f"`{node.name}` mixes the parts")
        for at in dims:
            shape[at] = _value(self.graph.rows)
        if not dims:
            shape = [_value(self.graph.count), *shape]
        actual = found.node.meta["example_value"]
        if [*map(expression, actual.shape)] != shape or actual.dtype != example.dtype:
            raise Unbatched(f"`{node.name}` has other sizes for all parts: {[*actual.shape]}, not {shape}")

    # Rules

    def _rule(self, node: Node, name: str) -> Batched:
        call = OperatorCall.of(node)
        if not any(operand in self.known for operand in node.all_input_nodes):
            raise Unbatched(f"`{name}` makes a tensor of a part's size")
        if name == "scaled_dot_product_attention":
            return self._attention(node, call)
        if is_pointwise(name) or name in _KEEPS or (name == "dropout" and _keeps_all(call)):
            return self._pointwise(node, name)
        first = call.argument("input", node.args[0] if node.args else None)
        if not isinstance(first, Node) or first not in self.known:
            raise Unbatched(f"`{name}` of something else than a part")
        if name in _LOSSES:
            return self._loss(node, call, name, first)
        others = [o for o in node.all_input_nodes if o in self.known and o is not first]
        if name in ("matmul", "bmm", "mm", "linear"):
            return self._product(node, call, name)
        if others:
            raise Unbatched(f"`{name}` of several values of a part")
        state = self.known[first]
        if name in ("sum", "mean"):
            return self._reduced(node, call, name, first, state)
        if name == "normalize":
            return self._normalized(call, len(self.shape(first)), state)
        if name in ("softmax", "log_softmax"):
            return self._softmax(node, call, name, first, state)
        if name in _NORMS:
            over = call.argument("normalized_shape", ())
            many = len(over) if isinstance(over, (tuple, list, torch.Size)) else 1
            if any(at >= len(self.shape(first)) - many for at in state.dims):
                raise Unbatched(f"`{name}` over the rows of a part")
            return self.as_it_is(node, state.dims)
        if name in RESHAPES | {"expand"}:
            return views.reshaped(self, node, call, name, first, state)
        if name in _REARRANGES or swaps_last_dimensions(node):
            return views.rearranged(self, node, call, name, first, state)
        raise Unbatched(f"`{name}` has no rule for parts")

    def _pointwise(self, node: Node, name: str) -> Batched:
        dims, ndim = self.dims_of(node), len(self.shape(node))
        known = [self.known[operand] for operand in node.all_input_nodes if operand in self.known]
        hides = len(dims) == 2 and name in _KEEPS | {"dropout"} and all(state.hides for state in known)
        fitted = {operand: self._fitted(operand, dims, ndim) for operand in node.all_input_nodes}
        args: Any = map_arg(node.args, fitted.__getitem__)
        kwargs: Any = map_arg(node.kwargs, fitted.__getitem__)
        return Batched(self.graph.emit(node.target, *args, **kwargs), dims, hides)

    def _fitted(self, operand: Node, dims: tuple[int, ...], ndim: int) -> Node:
        """An operand of an elementwise operator, so that it broadcasts to the result.

        dims: the result's dimensions of rows. ndim: how many it has for one part.
        """
        example = operand.meta.get("example_value")
        if operand in self.numbers:
            if expression(example) != self.size:
                raise Unbatched("a number that is computed from a part's size")
            state, own = Batched(self.graph.lengths(), ()), 0
        elif operand not in self.known:
            if not dims and isinstance(example, Tensor) and example.ndim > ndim:
                raise Unbatched("an operand has more dimensions than its result")
            return operand
        else:
            state, own = self.known[operand], len(self.shape(operand))
        found = state.node
        if state.dims:
            return found
        if not dims:
            return self.unsqueezed(found, ndim - own)
        if len(dims) > 1:
            raise Unbatched("a value of each part is combined with pairs of rows")
        found = self.graph.emit(torch.index_select, found, 0, self.graph.ids())  # for each row, that of its part
        at = dims[0] - (ndim - own)
        if at < 0:
            return self.unsqueezed(found, -at - 1)
        found = self.graph.emit(torch.squeeze, found, at + 1)  # its dimension of size 1
        return self.graph.emit(torch.movedim, found, 0, at)

    def _product(self, node: Node, call: OperatorCall, name: str) -> Batched:
        dims = self.dims_of(node)
        one = call.argument("input")
        other = call.argument("weight" if name == "linear" else "other", node.args[1])
        if any(self.depends(operand) for operand in node.all_input_nodes if operand not in (one, other)):
            raise Unbatched(f"`{name}` with a part's own bias")
        if other not in self.known:
            state = self.known[one]
            last = len(self.shape(one)) - 1
            if last in state.dims or len(state.dims) > 1:
                raise Unbatched(f"`{name}` sums over the rows of a part")
            weight = len(self.shape(other))
            if weight > 2 or name == "bmm" or len(self.shape(node)) != last + 1:
                raise Unbatched(f"`{name}` of a part and a batch of matrices")
            # One value for each part has a dimension more than `mm` takes.
            return self.as_it_is(node, dims, torch.matmul if name == "mm" else None)
        if one not in self.known or name == "linear":
            raise Unbatched(f"`{name}` with a part as the weight")
        a, b = self.known[one], self.known[other]
        ndim = len(self.shape(one))
        if ndim < 2 or len(self.shape(other)) != ndim or len(self.shape(node)) != ndim:
            raise Unbatched(f"`{name}` of other dimensions")
        if a.dims == (ndim - 2,) and b.dims == (ndim - 1,):  # queries by keys
            return self.as_it_is(node, dims)
        if a.dims == (ndim - 2, ndim - 1) and b.dims == (ndim - 2,) and a.hides:  # weights by values
            return self.as_it_is(node, dims)
        raise Unbatched(f"`{name}` sums over the rows of a part")

    def _attention(self, node: Node, call: OperatorCall) -> Batched:
        q, k, v = (call.argument(name, None) for name in ("query", "key", "value"))
        mask = call.argument("attn_mask")
        if mask is not None or call.argument("dropout_p", 0.0) != 0:
            raise Unbatched("attention with a mask of its own, or with dropout")
        ndim = len(self.shape(node))
        if any(o not in self.known or self.known[o].dims != (ndim - 2,) for o in (q, k, v)):
            raise Unbatched("attention of something else than rows of parts")
        causal = call.argument("is_causal", False)
        if type(causal) is not bool:
            raise Unbatched("attention that may be causal")
        options = {n: call.argument(n) for n in ("scale", "enable_gqa") if call.argument(n) is not None}
        operands = [self.known[o].node for o in (q, k, v)]
        same = self._same(node)
        if causal:
            same = self.graph.emit(torch.tril, same)
        result = self.graph.emit(F.scaled_dot_product_attention, *operands, attn_mask=same, **options)
        return Batched(result, (ndim - 2,))

    def _same(self, node: Node) -> Node:
        """The mask of the pairs of rows that are of one part. Attention by tiles, which makes it cheap, is for CPUs."""
        if node.meta["example_value"].device.type != "cpu":
            raise Unbatched("attention of parts on a device")
        self.mixes_rows = True
        return self.graph.same()

    def _softmax(self, node: Node, call: OperatorCall, name: str, first: Node, state: Batched) -> Batched:
        ndim = len(self.shape(first))
        dim = call.argument("dim")
        if type(dim) is not int:
            raise Unbatched(f"`{name}` over unknown dimensions")
        dim = place_of(dim, ndim)
        if dim not in state.dims:
            return self._along(node, call, state, dim - ndim)
        if state.dims != (ndim - 2, ndim - 1) or dim != ndim - 1 or name != "softmax":
            raise Unbatched(f"`{name}` over the rows of a part")
        hidden = self.graph.emit(torch.logical_not, self._same(node))
        scores = self.graph.emit(torch.masked_fill, state.node, hidden, float("-inf"))
        kwargs = {"dtype": call.argument("dtype")} if call.argument("dtype") is not None else {}
        return Batched(self.graph.emit(F.softmax, scores, dim=-1, **kwargs), state.dims, hides=True)

    def _normalized(self, call: OperatorCall, ndim: int, state: Batched) -> Batched:
        dim = call.argument("dim", 1)
        if type(dim) is not int or place_of(dim, ndim) in state.dims or len(state.dims) > 1:
            raise Unbatched("`normalize` over the rows of a part")
        given = {name: call.argument(name) for name in ("p", "eps")}
        options = {name: value for name, value in given.items() if value is not None}
        return Batched(self.graph.emit(F.normalize, state.node, dim=dim % ndim - ndim, **options), state.dims)

    def _along(self, node: Node, call: OperatorCall, state: Batched, dim: int) -> Batched:
        kwargs = {"dtype": call.argument("dtype")} if call.argument("dtype") is not None else {}
        target = getattr(F, call.name)
        return Batched(self.graph.emit(target, state.node, dim=dim, **kwargs), state.dims)

    def _reduced(self, node: Node, call: OperatorCall, name: str, first: Node, state: Batched) -> Batched:
        ndim, dims = len(self.shape(first)), call.argument("dim")
        over = range(ndim) if dims is None or dims == () else [dims] if type(dims) is int else dims
        fits = first.meta["example_value"].is_floating_point() and call.argument("dtype") is None
        if not fits or not isinstance(over, (range, list, tuple)) or any(type(dim) is not int for dim in over):
            raise Unbatched(f"`{name}` in another dtype, or over unknown dimensions")
        over = sorted({place_of(dim, ndim) for dim in over})
        return self._reduce(name, state, ndim, over, bool(call.argument("keepdim")))

    def _reduce(self, name: str, state: Batched, ndim: int, over: list[int], keep: bool) -> Batched:
        """The sum or the mean over some dimensions, of `ndim` that a part's has."""
        rows = [dim for dim in over if dim in state.dims]
        if rows and len(state.dims) > 1:
            raise Unbatched(f"`{name}` over pairs of rows")
        found, others = state.node, [dim - ndim for dim in over if dim not in rows]
        if others:
            found = self.graph.emit(getattr(torch, name), found, dim=others, keepdim=True)
        if rows:
            found = self._segment_sum(found, rows[0])
            if name == "mean":
                sizes = self.unsqueezed(self.graph.lengths(), ndim)
                found = self.graph.emit(torch.div, found, sizes)
        each = not state.dims or bool(rows)
        for dim in reversed(over if not keep else ()):
            found = self.graph.emit(torch.squeeze, found, dim + each)
        kept = tuple(at - (0 if keep else sum(dim < at for dim in over)) for at in state.dims if at not in rows)
        return Batched(found, kept)

    def _segment_sum(self, node: Node, dim: int) -> Node:
        """[..., T, ...] to [n, ..., 1, ...]: the sum over the rows of each part, in dimension `dim`."""
        example = node.meta["example_value"]
        narrow = example.dtype in (torch.float16, torch.bfloat16)  # which `sum` adds in float32
        moved = self.graph.emit(torch.movedim, node, dim, 0)
        if narrow:
            moved = self.graph.emit("float", moved)
        sizes = [self.graph.size(moved, at) for at in range(1, example.ndim)]
        zeros = self.graph.emit("new_zeros", moved, [self.graph.count, *sizes])
        found = self.graph.emit(torch.index_add, zeros, 0, self.graph.ids(), moved)
        found = self.graph.emit(torch.unsqueeze, found, dim + 1)
        return self.graph.emit("to", found, example.dtype) if narrow else found

    def _loss(self, node: Node, call: OperatorCall, name: str, first: Node) -> Batched:
        """The loss of the rows of each part, for logits [u, C] or predictions [u, ...]."""
        how, target = call.argument("reduction", "mean"), call.argument("target")
        if not call.has_only("input", "target", "reduction", *_LOSSES[name]) or how not in ("mean", "sum", "none"):
            raise Unbatched(f"`{name}` with other options")
        if target not in self.known or self.known[target].dims != (0,) or self.known[first].dims != (0,):
            raise Unbatched(f"`{name}` of something else than rows of parts")
        if "ignore_index" not in _LOSSES[name] and self.shape(first) != self.shape(target):
            raise Unbatched(f"`{name}` broadcasts")
        options = {parameter: call.argument(parameter) for parameter in _LOSSES[name]}
        options = {parameter: value for parameter, value in options.items() if value is not None}
        operands = self.known[first].node, self.known[target].node
        losses = Batched(self.graph.emit(getattr(F, name), *operands, reduction="none", **options), (0,))
        ndim = losses.node.meta["example_value"].ndim
        if how == "none":
            return losses
        if how == "sum" or "ignore_index" not in _LOSSES[name]:
            return self._reduce(how, losses, ndim, list(range(ndim)), keep=False)
        if ndim != 1 or operands[1].meta["example_value"].is_floating_point():
            raise Unbatched(f"`{name}` of something else than logits of rows")
        counted = self.graph.emit(torch.ne, operands[1], options.get("ignore_index", -100))
        counted = self.graph.emit("to", counted, torch.float32)
        total, count = (self._reduce("sum", Batched(n, (0,)), 1, [0], keep=False) for n in (losses.node, counted))
        found = self.graph.emit(torch.div, total.node, count.node)
        return Batched(self.graph.emit("to", found, losses.node.meta["example_value"].dtype), ())


def _keeps_all(call: OperatorCall) -> bool:
    return call.argument("p", 0.5) == 0 or call.argument("training", True) is False


def _value(number: Any) -> Any:
    """The expression of a number that may be given by its node."""
    return expression(number.meta["example_value"] if isinstance(number, Node) else number)
