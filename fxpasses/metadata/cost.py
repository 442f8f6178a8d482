"""Whether compiling the tensors of a prologue pays off.

A mask of T × T elements is built in many passes over memory, which a compiler fuses into one. That saves time in each
batch, and costs seconds once. If sizes depend on the values in a batch, operators touch fewer elements than their
operands have (`mask[a:b] = 1`), and a compiler has to guard against sizes of 0 and 1: nothing is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from fxpasses.graph.calls import operator_of
from fxpasses.graph.effects import leaves
from fxpasses.graph.symbols import constant, elements_of, symbol
from fxpasses.graph.values import Entry, Ref, ValueTable
from fxpasses.metadata.emission import slice_of


def elements_saved(
    table: ValueTable, wanted: list[Ref], imported: Callable[[Entry], bool], elsewhere: AbstractSet[int] = frozenset()
) -> int:
    """How many elements need not be written if each tensor of `wanted` is made by one loop; 0 if that is impossible.

    imported: whether an entry's value comes from another graph. elsewhere: values that the other graph computes in any
    case, so that fusing them saves nothing.
    """
    total = 0
    for number in slice_of(table, wanted, stop=imported):
        entry = table.entries[number]
        written = _elements_taken(entry.fake) if imported(entry) else _elements_written(table, entry)
        if written is None:
            return 0
        total += written if number not in elsewhere else 0
    return total - sum(elements_of(table.entries[ref.number].fake) or 0 for ref in wanted)


def _elements_taken(fake: Any) -> int | None:
    """0 for a valid input of a compiled graph: a tensor of sizes known while tracing, or an integer."""
    if isinstance(fake, torch.Tensor):
        return None if elements_of(fake) is None else 0
    return 0 if symbol(fake) is not None or type(constant(fake)) is int else None


def _elements_written(table: ValueTable, entry: Entry) -> int | None:
    """How many elements an entry writes if it is not fused; None if that depends on the batch."""
    index = _index(entry)
    if entry.read or any(isinstance(leaf, Ref) and leaf.version is None for leaf in leaves(index)):
        return None
    sizes = [elements_of(leaf) for leaf in leaves(entry.fake) if isinstance(leaf, torch.Tensor)]
    if any(size is None for size in sizes):
        return None
    if entry.kind == "write" and index is not None:  # a partial write: all elements that a mask covers, or few
        return elements_of(table.entries[index.number].fake) if _is_mask(table, index) else 0
    makes = entry.kind == "write" or (entry.kind == "op" and entry.base is None)
    return sum(size or 0 for size in sizes) if makes else 0


def _index(entry: Entry) -> Any:
    """The `i` of `x[i]` and `x[i] = y`."""
    is_indexed = entry.kind in ("op", "write") and operator_of(entry.node) in ("getitem", "setitem")
    return entry.args[1] if is_indexed else None


def _is_mask(table: ValueTable, index: Any) -> bool:
    return isinstance(index, Ref) and getattr(table.entries[index.number].fake, "dtype", None) is torch.bool
