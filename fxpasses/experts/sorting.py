"""Put the rows of all experts in one order: sort the pairs, or use rows that are sorted already."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from fxpasses.experts.batched_values import Order, Rest
from fxpasses.experts.routing_facts import Columns
from fxpasses.experts.row_partition import Cut
from fxpasses.experts.selection import Selection
from fxpasses.graph.building import NodeBuilder
from fxpasses.graph.calls import operator_of


def sorted_pairs(emit: NodeBuilder, selection: Selection) -> Order:
    """Sort the pairs by expert, in the order of the loop; pairs of no expert come last, and belong to no group."""
    first, step, count = selection.first, selection.step, selection.count
    covers = selection.covers
    ids = selection.ids if selection.scores is None else _with_scores(emit, selection.ids, selection.scores)
    flat, in_order, places = sort_by_branch(emit, ids, selection.axes, (first, step, count), (), covers)
    example = flat.meta["example_value"]
    wanted = emit(torch.arange, (count,), {"device": example.device, "dtype": example.dtype})
    offsets = emit(torch.searchsorted, (in_order, wanted), {"right": True, "out_int32": True})
    size, rest = emit.size(flat, 0), None
    if not covers:
        rest = _rest(emit, offsets, size)
        places, in_order = filled(emit, rest, places), filled(emit, rest, in_order)
        in_order = emit("clamp", (in_order,), {"max": count - 1})
    by_row = in_order
    if (first, step) != (0, 1):
        by_row = emit(operator.add, (in_order, first)) if step == 1 else emit(operator.sub, (first, in_order))
    return Order(places, by_row, offsets, size, rest, covers=covers)


def _with_scores(emit: NodeBuilder, ids: Node, scores: Columns) -> Node:
    """The ids, with -1 for a pair whose score fails the tests: it belongs to no expert."""
    return emit(torch.where, (passed(emit, scores, emit("gather", (scores.matrix, 1, ids))), ids, -1))


def passed(emit: NodeBuilder, columns: Columns, elements: Node) -> Node:
    """Whether elements of the matrix pass the tests."""
    for test, number in columns.tests:
        elements = emit(test, (elements, number))
    is_answer = elements.meta["example_value"].dtype is torch.bool
    return elements if is_answer else emit(operator.ne, (elements, 0))


def sort_by_branch(
    emit: NodeBuilder,
    ids: Node,
    axes: Sequence[int],
    experts: tuple[int, int, int],
    missing: Sequence[int],
    covers: bool,
) -> tuple[Node, Node, Node]:
    """(flat, in_order, places): the ids of all pairs, the branch of each pair in sorted order, and its place in `flat`.

    axes: the axes of `ids`, in the order in which pairs are numbered. experts: (first, step, count); branch b is for
    expert first + step * b. Pairs of missing and of other experts go to branch `count`, the last. covers: there are no
    such pairs.
    """
    example = ids.meta["example_value"]
    if tuple(axes) != tuple(range(example.ndim)):
        ids = emit("permute", (ids, tuple(axes)))
    flat = emit("reshape", (ids, -1)) if example.ndim > 1 else ids
    if example.dtype not in (torch.int64, torch.int32):
        flat = emit("long", (flat,))  # a dtype for indices, in which the number of experts fits
    first, step, count = experts
    branch = flat
    if (first, step) != (0, 1):
        branch = emit(operator.sub, (flat, first) if step == 1 else (first, flat))
    if not covers:
        inside = emit(operator.and_, (emit(operator.ge, (branch, 0)), emit(operator.lt, (branch, count))))
        for expert in missing:
            inside = emit(operator.and_, (inside, emit(operator.ne, (flat, expert))))
        branch = emit(torch.where, (inside, branch, count))
    pair = emit(torch.sort, (branch,), {"stable": True})
    return flat, emit(operator.getitem, (pair, 0)), emit(operator.getitem, (pair, 1))


def coordinates(emit: NodeBuilder, ids: Node, axes: Sequence[int], places: Node) -> list[Node]:
    """The coordinates of the pairs along each of the axes."""
    sizes = [emit.size(ids, axis) for axis in axes]
    found, rest = [], places
    for size in reversed(sizes[1:]):
        found.append(emit(operator.mod, (rest, size)))
        rest = emit(operator.floordiv, (rest, size))
    return [rest, *reversed(found)]


def _rest(emit: NodeBuilder, offsets: Node, size: Any) -> Rest:
    total, device = emit(operator.getitem, (offsets, slice(-1, None))), offsets.meta["example_value"].device
    valid = emit(operator.lt, (emit(torch.arange, (size,), {"device": device}), total))
    return Rest(valid, emit("clamp", (emit(operator.sub, (total, 1)),), {"min": 0}))


def filled(emit: NodeBuilder, rest: Rest, rows: Node) -> Node:
    """A tensor [N, ...] whose rest is filled with copies of an expert's last row, without a gradient.

    The rest never reaches a result, but a copy is as finite as a row of the loop. A row of zeros is not, if the program
    divides by its norm, and in backward a NaN passes through any mask.
    """
    copied = emit("index_select", (rows, 0, rest.last))
    if rows.meta["example_value"].is_floating_point():
        copied = or_ones(emit, rest, emit("detach", (copied,)))
    return emit(torch.where, (_beside(emit, rest.valid, rows), rows, copied))


def or_ones(emit: NodeBuilder, rest: Rest, rows: Node) -> Node:
    """A tensor [N, ...]; ones if no expert has a row, in which case eager mode computes on no row.

    If an expert divides by a row's norm, a token of zeros, such as padding, would have a gradient of NaN.
    """
    any_valid = emit(operator.getitem, (rest.valid, slice(None, 1)))
    return emit(torch.where, (_beside(emit, any_valid, rows), rows, 1))


def _beside(emit: NodeBuilder, mask: Node, rows: Node) -> Node:
    """A mask of rows, to be broadcast over their other dimensions."""
    ndim = rows.meta["example_value"].ndim
    return emit("reshape", (mask, [-1, *[1] * (ndim - 1)])) if ndim > 1 else mask


def cut_rows(emit: NodeBuilder, cut: Cut) -> Order:
    """The order of rows that are already sorted. If a split checks that the counts cover them, the device checks it."""
    counts, example, size = cut.counts, cut.rows.meta["example_value"], emit.size(cut.rows, 0)
    ends = emit("cumsum", (counts, 0)) if cut.running else counts
    if cut.checks:
        covers = emit(operator.eq, (emit(operator.getitem, (ends, -1)), size))
        emit(torch._assert_async, (covers, "the counts of the experts do not cover the rows"))
    device = {"device": example.device} if counts.meta["example_value"].device != example.device else {}
    offsets = emit("to", (ends,), {"dtype": torch.int32, **device})
    return Order(None, None, offsets, size, None, covers=False)


def read_total(emit: NodeBuilder, cut: Cut) -> Node:
    """The sum of the counts, which the host reads where the program reads the first count.

    A negative count raises an error in the program's split; here it raises on the device.
    """
    first = min(node for node in cut.nodes if operator_of(node) == "item")
    with emit.graph.inserting_before(first):
        positive = emit("all", (emit(operator.ge, (cut.counts, 0)),))
        emit(torch._assert_async, (positive, "the count of an expert is negative"))
        total = emit.ask(emit("sum", (cut.counts,)))
        emit(torch.ops.aten._assert_scalar.default, (emit(operator.ge, (total, 0)), "a negative number of rows"))
    return total


def first_rows(emit: NodeBuilder, rows: Node, total: Node) -> Node:
    """`rows[:total]`, whose size is known to be the total."""
    whole, text = emit.size(rows, 0), "the experts have more rows than there are"
    emit(torch.ops.aten._assert_scalar.default, (emit(operator.le, (total, whole)), text))
    parts = emit(torch.split, (rows, [total, emit(operator.sub, (whole, total))]))
    return emit(operator.getitem, (parts, 0))
