"""Run the branches' common program once, on the rows of all experts.

The rows of all branches lie one after the other in the order of the loop: those of the first expert, then the second's.
A *lifted* value is what all branches' values are together. The result of a query is known from the `Selection`; a
row-wise operator is applied to lifted operands; a product with a weight of each expert becomes a grouped product.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

import fxpasses.runtime.grouped_linear  # noqa: F401  registers the operators
from fxpasses.graph.effects import WRITERS
from fxpasses.graph.families import Constants, Family, mapped
from fxpasses.graph.symbols import expression
from fxpasses.passes.experts.counting import total_of
from fxpasses.passes.experts.cuts import Cut, cut_of
from fxpasses.passes.experts.lifted import (
    Order,
    Places,
    Rows,
    Weights,
    dimensions_of,
    elements,
    is_tensor,
    parts_of,
    row_of,
)
from fxpasses.passes.experts.rows import (
    ALONG,
    NORMS,
    POINTWISE,
    along_last_dimensions,
    keeps_rows,
    normalises_last_dimensions,
)
from fxpasses.passes.experts.selection import Masks, Selection, Unknown, is_integer, is_query, progression
from fxpasses.passes.experts.sorting import Emit, cut_rows, sorted_pairs

ops = torch.ops.fxpasses
_IN_PLACE = frozenset(name for name in POINTWISE if name.endswith("_") or name in WRITERS)


class Lifting:
    """Lifts families into nodes made by `emit(target, args, kwargs)` (a string target is a method)."""

    def __init__(self, emit: Emit, masks: Masks) -> None:
        self.emit = emit
        self.masks = masks
        self.order: Order | None = None
        self.selection: Selection | None = None
        self.cut: Cut | None = None
        self._lifted: dict[int, Any] = {}
        self._row_size: Any = None
        self._stacks: dict[Weights, Node] = {}

    # Queries

    def begin(self, selection: Selection) -> None:
        """Sort the pairs; before anything is lifted."""
        self.selection, self.order = selection, sorted_pairs(self.emit, selection)

    def begin_cut(self, cut: Cut) -> None:
        """The rows lie sorted already; before anything is lifted."""
        self.cut = self._whole(cut)
        self.order = cut_rows(self.emit, self.cut)

    def _whole(self, cut: Cut) -> Cut:
        """The cut of the first rows alone, where only so many are cut as the counts add up to."""
        if not cut.totals:
            return cut
        total = self.total(cut)
        rows = self._once((cut.rows, total), lambda: self.emit(operator.getitem, (cut.rows, slice(None, total))))
        return replace(cut, rows=rows, checks=False, totals=())

    def total(self, cut: Cut) -> int:
        """What the counts add up to, which must be a number, and no more than there are rows."""
        total = total_of(cut.counts, cut.running, self.masks.is_constant)
        size = cut.rows.meta["example_value"].shape[0]
        if not isinstance(total, int) or not isinstance(size, int) or total > size:
            raise Unknown("rows that are cut up to a number which is not known", cut.rows)
        return total

    def parts(self, cut: Cut) -> Rows:
        """Lift the parts of a tensor: they are the tensor. Several may be cut, all at the same places."""
        assert self.cut is not None
        cut = self._whole(cut)
        if (cut.counts, cut.running) != (self.cut.counts, self.cut.running):
            raise Unknown("parts that were cut by different counts", cut.rows)
        self.check_covered(cut.rows, cut.checks)
        if not cut.index:
            return Rows(cut.rows)
        return Rows(self.emit(operator.getitem, (cut.rows, (slice(None), *cut.index))))

    def check_covered(self, rows: Node, checks: bool) -> None:
        """That all parts together are the whole tensor; checks: the program raises an error if they are not."""
        assert self.cut is not None
        size, first = (expression(node.meta["example_value"].shape[0]) for node in (rows, self.cut.rows))
        if checks and self.cut.checks and size == first:
            return
        if size != total_of(self.cut.counts, self.cut.running, self.masks.is_constant):
            raise Unknown("the slices are not known to cover the rows", rows)

    def query(self, family: Family) -> Any:
        """Lift `torch.where(mask)`, `mask.nonzero()` or `x[mask]`; all queries of a loop must select the same pairs."""
        coordinates = self.coordinates_of(family.args[1] if family.name == "getitem" else family.args[0])
        if family.name == "where":
            return coordinates
        if family.name == "nonzero":
            as_tuple = family.kwargs.get("as_tuple", family.args[1] if len(family.args) > 1 else False)
            return coordinates if as_tuple else Places(coordinates)
        return self._gather(family, family.args[0], coordinates)

    def coordinates_of(self, mask: Family) -> tuple[Rows, ...]:
        """The coordinates of the rows in a mask that is used as an index."""
        selection = self.masks.selection_of(mask)
        if self.selection is None:
            raise Unknown("a query in a loop over parts", mask.nodes[0])
        if (selection.ids, selection.axes) != (self.selection.ids, self.selection.axes):
            raise Unknown("the loop asks for tokens in several orders", mask.nodes[0])
        if (selection.first, selection.step) != (self.selection.first, self.selection.step):
            raise Unknown("a branch asks for the tokens of two experts", mask.nodes[0])
        return self._coordinates(selection)

    def _coordinates(self, selection: Selection) -> tuple[Rows, ...]:
        assert self.order is not None
        places = self.order.places
        assert places is not None
        if len(selection.axes) == 1:
            return (Rows(places),)
        if len(selection.axes) != 2:
            raise Unknown("a routing of more than two dimensions", selection.ids)
        inner = selection.ids.meta["example_value"].shape[selection.axes[1]]
        if not isinstance(inner, int):
            inner = self.emit(torch.ops.aten.sym_size.int, (selection.ids, selection.axes[1]))
        key = ("outer", inner)
        outer = self._once(key, lambda: self.emit(operator.floordiv, (places, inner)))
        if selection.dims == 1:
            return (Rows(outer),)
        return Rows(outer), Rows(self._once(("inner", inner), lambda: self.emit(operator.mod, (places, inner))))

    def _once(self, key: Any, make: Callable[[], Node]) -> Node:
        if key not in self._lifted:
            self._lifted[key] = make()
        return self._lifted[key]

    # Everything else

    def lift(self, value: Any) -> Any:
        """The lifted value of a family; what is shared is itself. Raises `Unknown`."""
        if not isinstance(value, Family):
            return value
        if id(value) not in self._lifted:
            self._lifted[id(value)] = self._lift(value)
        return self._lifted[id(value)]

    def _lift(self, family: Family) -> Any:
        if not family.args and not family.kwargs:
            return Weights(None, family.nodes)
        if is_query(family):
            return self.query(family)
        if (cut := cut_of(family)) is not None:
            return self.parts(cut)
        if not self._has_rows(family):
            return self._of_each_expert(family)
        if not family.args:
            raise Unknown(f"`{family.name}` with keyword arguments alone", family.nodes[0])
        name = family.name
        first = self.lift(family.args[0]) if isinstance(family.args[0], Family) else family.args[0]
        if isinstance(first, (Places, tuple)):
            return self._part(family, first)
        if name == "getitem":
            return self._getitem(family, first)
        if name in ("matmul", "mm", "__matmul__", "linear"):
            return self._product(family, first)
        if name in ("index_select",) and not isinstance(first, Rows):
            return self._index_select(family, first)
        if name in POINTWISE:
            return self._pointwise(family)
        if name == "einsum":
            return self._einsum(family)
        if name in ("cat", "concat", "stack"):
            return self._joined(family)
        if not isinstance(first, Rows):
            raise Unknown(f"`{name}` of what is no row", family.nodes[0])
        if name in ALONG and along_last_dimensions(family, first.ndim, first.row):
            return self._call(family, first.row)
        if name in NORMS and normalises_last_dimensions(family, first.ndim, first.row):
            return self._call(family, first.row)
        if name in ("unsqueeze", "reshape", "view", "flatten", "expand", "repeat"):
            return self._reshaped(family, first)
        raise Unknown(f"`{name}` is not known to work row by row", family.nodes[0])

    def _has_rows(self, family: Family) -> bool:
        """Whether a family's tensors are made of rows: their size is known by the batch alone."""
        return any(row_of(part) is not None for part in parts_of(family.example)) or any(
            isinstance(part, torch.SymInt) for part in parts_of(family.example)
        )

    def _part(self, family: Family, source: Any) -> Any:
        name, node = family.name, family.nodes[0]
        if isinstance(source, tuple):
            if name == "getitem" and isinstance(family.args[1], int):
                return source[family.args[1]]
            raise Unknown(f"`{name}` of a tuple", node)
        if name == "getitem":
            index = family.args[1]
            if isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None) and isinstance(index[1], int):
                return source.coordinates[index[1]]
        if (name == "unbind" and family.args[1:] in ((1,), (-1,))) or (
            name == "unbind" and family.kwargs in ({"dim": 1},)
        ):
            return source.coordinates
        if name in ("squeeze", "flatten", "view", "reshape") and len(source.coordinates) == 1:
            if parts_of(family.example)[0].ndim == 1:
                return source.coordinates[0]
        raise Unknown(f"`{name}` of the places that a query found", node)

    def _getitem(self, family: Family, source: Any) -> Any:
        index = family.args[1]
        if isinstance(source, Rows):
            lifted = mapped(index, self.lift)
            if not keeps_rows(lifted, source.row, source.ndim):
                raise Unknown("an index among an expert's rows", family.nodes[0])
            return self._call(family, None)
        parts = index if isinstance(index, tuple) else (index,)
        places: list[Any] = []
        for part in parts:
            is_mask = isinstance(part, Family) and getattr(part.example, "dtype", None) is torch.bool
            places += self.coordinates_of(part) if is_mask else [self._index(part)]
        if not any(isinstance(place, Rows) for place in places):
            raise Unknown("an index that is not known", family.nodes[0])
        return self._gather(family, source, places)

    def _index(self, part: Any) -> Any:
        """A part of an index; the number of the expert becomes the expert of each row."""
        if isinstance(part, Constants):
            if self.selection is None or self.order is None or self.order.ids is None:
                raise Unknown("an index by the expert")
            if progression(part) != (self.selection.first, self.selection.step):
                raise Unknown("an index by another number than the expert's")
            return Rows(self.order.ids)
        lifted = self.lift(part)
        if isinstance(lifted, Rows) and (lifted.ndim != 1 or not is_integer(lifted.node)):
            raise Unknown("an index of several dimensions")
        return lifted

    def _gather(self, family: Family, source: Any, index: Sequence[Any]) -> Rows:
        """`x[tok]`, `weights[tok, slot, None]`: rows of what all branches share, or of what each makes of it."""
        nodes = tuple(part.node if isinstance(part, Rows) else part for part in index)
        if any(isinstance(node, (Family, Constants, Weights)) for node in nodes):
            raise Unknown("an index that is not known", family.nodes[0])
        if isinstance(source, (Family, Weights)) or isinstance(family.args[0], Family):
            if len(nodes) != 1:
                raise Unknown("an index of what the branch made", family.nodes[0])
            return self.at_rows(family.args[0], index[0])
        places = [place for place, part in enumerate(index) if isinstance(part, (Rows, int))]
        if places != list(range(places[0], places[-1] + 1)):
            raise Unknown("index tensors apart from each other", family.nodes[0])
        example = source.meta["example_value"]
        if len(nodes) == 1 and example.ndim == 2 and example.dtype.is_floating_point:
            return Rows(self.emit(ops.gather_rows.default, (source, nodes[0])))
        node = self.emit(operator.getitem, (source, nodes))
        row = next(place for place, part in enumerate(p for p in dimensions_of(index)) if isinstance(part, Rows))
        return Rows(node, row)

    def _index_select(self, family: Family, source: Any) -> Rows:
        dim = family.kwargs.get("dim", family.args[1] if len(family.args) > 1 else None)
        index = self.lift(family.kwargs.get("index", family.args[-1]))
        if dim != 0 or not isinstance(index, Rows) or not isinstance(source, Node):
            raise Unknown("an `index_select` that is not known", family.nodes[0])
        return self._gather(family, source, (index,))

    def at_rows(self, value: Any, tokens: Rows) -> Rows:
        """What a branch made for every token, for the tokens of the rows alone: row-wise over its first dimension."""
        if isinstance(value, Node):
            return Rows(self.emit(operator.getitem, (value, (tokens.node,))))
        if not isinstance(value, Family):
            raise Unknown("a value that is not known for each token")
        name, node = value.name, value.nodes[0]
        if name in ("eq", "__eq__") and any(isinstance(arg, Constants) for arg in value.args):
            source, constants = value.args if isinstance(value.args[1], Constants) else value.args[::-1]
            ids = self._index(constants)
            rows = self.at_rows(source, tokens)
            shape = (-1, *([1] * (rows.ndim - 1)))
            return Rows(self.emit(operator.eq, (rows.node, self.emit("reshape", (ids.node, shape)))))
        known = name in POINTWISE or name == "unsqueeze"
        if name in ALONG and isinstance(value.args[0], Family):
            known = along_last_dimensions(value, value.args[0].example.ndim, 0)
        if not known:
            raise Unknown(f"`{name}` is not known to work token by token", node)
        tokens_of = value.example.shape[0]

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, Constants):
                raise Unknown("a number that differs between the experts", node)
            if isinstance(leaf, Family) or (isinstance(leaf, Node) and is_tensor(leaf)):
                example = leaf.example if isinstance(leaf, Family) else leaf.meta["example_value"]
                if (example.ndim != value.example.ndim and name in POINTWISE) or example.shape[0] != tokens_of:
                    raise Unknown("a broadcast over tokens", node)
                return self.at_rows(leaf, tokens).node
            return leaf

        return Rows(self._emit_like(value, mapped(value.args, convert), mapped(value.kwargs, convert)))

    # Products and elementwise operators

    def _product(self, family: Family, rows: Any) -> Rows:
        node = family.nodes[0]
        weights, bias = family.args[1], None
        if family.name == "linear":
            bias = family.kwargs.get("bias", family.args[2] if len(family.args) > 2 else None)
        if not isinstance(rows, Rows):
            raise Unknown("a product in which the rows come second", node)
        if not isinstance(weights, Family):
            if bias is not None and isinstance(bias, Family):
                raise Unknown("a shared weight with a bias of each expert", node)
            return self._call(family, rows.row)  # the same weight for all: row by row
        if rows.ndim != 2 or rows.row != 0:
            raise Unknown("a product of rows of several dimensions", node)
        lifted = self.lift(weights)
        if not isinstance(lifted, Weights) or self._rank(weights) != 2:
            raise Unknown("a product of two tensors of rows", node)
        transposed = lifted.transposed != (family.name == "linear")
        stacked_bias = None
        if bias is not None:
            lifted_bias = self.lift(bias)
            if not isinstance(lifted_bias, Weights):
                raise Unknown("a bias that all experts share", node)
            stacked_bias = self._stacked(lifted_bias)
        assert self.order is not None
        if lifted.stacked is not None:
            args = (rows.node, lifted.stacked, self.order.offsets, stacked_bias, transposed)
            return Rows(self.emit(ops.grouped_mm.default, args))
        args = (rows.node, list(lifted.listed), self.order.offsets, stacked_bias, transposed)  # type: ignore[assignment]
        return Rows(self.emit(ops.grouped_mm_list.default, args))

    def _of_each_expert(self, family: Family) -> Weights:
        """A weight of each expert: one slice of a stack, or the transpose of such; else the branches' own nodes."""
        if family.name == "getitem" and isinstance(family.args[0], Node) and isinstance(family.args[1], Constants):
            first, step = progression(family.args[1])
            source, count = family.args[0], len(family.nodes)
            if step == 1 and is_tensor(source):
                whole = first == 0 and source.meta["example_value"].shape[0] == count
                stacked = source if whole else self.emit(operator.getitem, (source, slice(first, first + count)))
                return Weights(stacked, ())
        if family.name in ("t", "transpose", "mT", "T", "getattr") and isinstance(family.args[0], Family):
            dims = family.args[1:]
            rank = self._rank(family.args[0])
            swaps = family.name == "t" or (family.name == "getattr" and dims in (("mT",), ("T",)))
            swaps = swaps or (len(dims) == 2 and {d % rank for d in dims if isinstance(d, int)} == {rank - 1, rank - 2})
            inner = self.lift(family.args[0])
            if swaps and rank == 2 and isinstance(inner, Weights):
                return Weights(inner.stacked, inner.listed, not inner.transposed)
        return Weights(None, family.nodes)

    def _rank(self, family: Family) -> int:
        return int(family.example.ndim) if isinstance(family.example, torch.Tensor) else -1

    def _stacked(self, weights: Weights) -> Node:
        if weights.transposed:
            raise Unknown("a transposed bias")
        if weights.stacked is not None:
            return weights.stacked
        if weights not in self._stacks:
            self._stacks[weights] = self.emit(torch.stack, (list(weights.listed),))
        return self._stacks[weights]

    def _pointwise(self, family: Family) -> Rows:
        node = family.nodes[0]
        out = family.example
        row = row_of(out)
        if row is None:
            raise Unknown(f"`{family.name}` does not give rows", node)
        place = out.ndim - row  # counted from the end

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, Constants):
                if family.name in ("eq", "ne") and row == 0:  # asked for the expert: that of each row
                    shape = (-1, *([1] * (out.ndim - 1)))
                    return self.emit("reshape", (self._index(leaf).node, shape))
                raise Unknown(f"`{family.name}` by a number that differs between the experts", node)
            lifted = self.lift(leaf)
            if isinstance(lifted, Rows):
                if lifted.ndim - lifted.row != place:
                    raise Unknown(f"`{family.name}` of rows against other rows", node)
                return lifted.node
            if isinstance(lifted, Weights):
                if len(parts_of(leaf.example)) != 1 or leaf.example.ndim != 1 or (out.ndim, row) != (2, 0):
                    raise Unknown(f"`{family.name}` of rows and a tensor of each expert", node)
                assert self.order is not None
                return self.emit(
                    ops.grouped_expand.default, (self._stacked(lifted), self.order.offsets, self.order.rows)
                )
            if isinstance(lifted, Node) and is_tensor(lifted):
                example = lifted.meta["example_value"]
                size = example.shape[example.ndim - place] if example.ndim >= place else 1
                if not isinstance(size, int) or size != 1:
                    raise Unknown(f"`{family.name}` of rows and as many other rows", node)
            elif isinstance(lifted, (Node, tuple, Places)):
                raise Unknown(f"`{family.name}` of what is not known", node)
            return lifted

        in_place = family.kwargs.get("inplace") or family.name in _IN_PLACE
        if in_place and self.cut is not None:
            raise Unknown(f"`{family.name}` writes to rows that were cut", node)
        return Rows(self._emit_like(family, mapped(family.args, convert), mapped(family.kwargs, convert)), row)

    def _einsum(self, family: Family) -> Rows:
        """Row-wise where the rows' letter is in the result and in no operand that has no rows."""
        node, row = family.nodes[0], row_of(family.example)
        equation, *operands = family.args
        if row is None or not isinstance(equation, str) or "->" not in equation or "." in equation:
            raise Unknown("an `einsum` that is not known", node)
        inputs, output = equation.replace(" ", "").split("->")
        for letters, operand in zip(inputs.split(","), operands, strict=True):
            lifted = self.lift(operand)
            at = letters[lifted.row] if isinstance(lifted, Rows) else None
            if isinstance(lifted, Rows) and (at != output[row] or letters.count(at) != 1):
                raise Unknown("an `einsum` over the rows", node)
            if not isinstance(lifted, Rows) and output[row] in letters:
                raise Unknown("an `einsum` of rows and as many other rows", node)
        return self._call(family, row)

    def _joined(self, family: Family) -> Rows:
        """`torch.cat([gate, up], -1)`: rows side by side."""
        node, dim = family.nodes[0], family.kwargs.get("dim", family.args[1] if len(family.args) > 1 else 0)
        lifted = [self.lift(part) for part in family.args[0]]
        row, ndim = row_of(family.example), family.example.ndim
        if row is None or any(not isinstance(part, Rows) or part.row != row for part in lifted):
            raise Unknown(f"`{family.name}` of what is no row", node)
        if not isinstance(dim, int) or dim % ndim <= row:
            raise Unknown(f"`{family.name}` of rows one after the other", node)
        return Rows(self._emit_like(family, [[part.node for part in lifted], dim], {}), row)

    def _reshaped(self, family: Family, source: Rows) -> Rows:
        """Reshapes that keep the rows in one dimension, in their order."""
        node, out = family.nodes[0], family.example
        row = row_of(out)
        if row is None:
            raise Unknown(f"`{family.name}` mixes the rows", node)
        before, after = parts_of(family.args[0].example)[0].shape, out.shape
        # What lies before the rows, and what lies after them, must have as many elements as before.
        if family.name in ("reshape", "view", "flatten"):
            if any(not isinstance(s, int) for s in (*before[: source.row], *before[source.row + 1 :])):
                raise Unknown(f"`{family.name}` of rows of unknown width", node)
            if any(not isinstance(s, int) for s in (*after[:row], *after[row + 1 :])):
                raise Unknown(f"`{family.name}` of rows of unknown width", node)
            if elements(before[: source.row]) != elements(after[:row]):
                raise Unknown(f"`{family.name}` mixes the rows", node)
            shape = [-1 if i == row else int(size) for i, size in enumerate(after)]
            return Rows(self.emit("reshape", (source.node, shape)), row)
        if family.name == "unsqueeze":
            return self._call(family, row)
        sizes = family.args[1] if isinstance(family.args[1], (tuple, list)) else family.args[1:]
        wanted = [size if isinstance(size, int) else None for size in sizes]
        if len(wanted) != source.ndim or wanted[source.row] not in ((-1, None) if family.name == "expand" else (1,)):
            raise Unknown(f"`{family.name}` of rows", node)
        shared = [leaf if isinstance(leaf, (int, Node)) else None for leaf in sizes]
        keep = -1 if family.name == "expand" else 1
        shape = [keep if i == source.row else size for i, size in enumerate(shared)]  # type: ignore[misc]
        if None in shape:
            raise Unknown(f"`{family.name}` to sizes that are not known", node)
        return Rows(self.emit(family.name, (source.node, *shape)), source.row)

    def _call(self, family: Family, row: int | None) -> Any:
        """The same operator on lifted operands; the rows are where the branches' results have them."""

        def convert(leaf: Any) -> Any:
            lifted = self.lift(leaf)
            if isinstance(lifted, Constants):
                raise Unknown(f"`{family.name}` by a number that differs between the experts", family.nodes[0])
            if isinstance(lifted, (Weights, Places, tuple)):
                raise Unknown(f"`{family.name}` of a tensor of each expert", family.nodes[0])
            return lifted.node if isinstance(lifted, Rows) else lifted

        node = self._emit_like(family, mapped(family.args, convert), mapped(family.kwargs, convert))
        if isinstance(family.example, (tuple, list)):
            return tuple(
                Rows(self.emit(operator.getitem, (node, i)), _checked_row(part))
                for i, part in enumerate(family.example)
            )
        return Rows(node, _checked_row(family.example))

    def _emit_like(self, family: Family, args: Any, kwargs: Any) -> Node:
        return self.emit(family.nodes[0].target, tuple(args), dict(kwargs), like=family.nodes[0])


def _checked_row(example: Any) -> int:
    row = row_of(example)
    if row is None:
        raise Unknown("a result without rows")
    return row
