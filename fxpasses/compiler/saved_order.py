"""The order in which a forward graph returns its saved values, as AOTAutograd's runtime slices them.

    forward returns  its outputs, tensors, tensors saved without a version check, objects, sizes
    backward takes   sizes, tensors, tensors saved without a version check, objects, gradients, ...

PyTorch's partitioners put the states of random number generators, which let a checkpoint draw the same numbers twice,
right before the sizes. If a graph has a DTensor, its `DeviceMesh` is saved too, so an object precedes a tensor, and the
first call of forward fails: "expected all tensors_saved_with_vc_check to be Tensors".

Private name, checked on torch 2.11 and 2.13: the node's meta `saved_tensor_with_no_vc_check`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxpasses.graph.bodies import nodes_in

_TENSOR, _UNCHECKED_TENSOR, _OBJECT, _SIZE = range(4)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def may_save_objects(gm: GraphModule) -> bool:
    """Whether a graph that Dynamo captured has objects among its values, or inside them, as in a DTensor."""
    values = ((node, value) for node in nodes_in(gm) for value in pytree.tree_leaves(node.meta.get("example_value")))
    return any(
        is_traceable_wrapper_subclass(value) or (node.op == "placeholder" and _is_object(value))
        for node, value in values
    )


def order_saved(forward: GraphModule, backward: GraphModule, outputs: int) -> bool:
    """Put the saved results of `forward`, after its first `outputs` results, in AOTAutograd's order.

    Values of one kind keep their order. Returns whether anything moved; graphs in the right order are not touched.
    """
    output = forward.graph.output_node()
    returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    kinds = [_kind(value) for value in returned[outputs:]]
    order = sorted(range(len(kinds)), key=lambda number: kinds[number])
    if order == list(range(len(kinds))):
        return False
    positions = [*range(outputs), *(outputs + number for number in order)]
    output.args = (tuple(returned[position] for position in positions),)
    described = output.meta.get("desc")  # PyTorch's description of each output
    if isinstance(described, (list, tuple)) and len(described) == len(returned):
        output.meta["desc"] = [described[position] for position in positions]
    _reorder_placeholders(backward, kinds, order)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()
    return True


def _reorder_placeholders(backward: GraphModule, kinds: list[int], order: list[int]) -> None:
    """Put backward's placeholders for saved values in forward's order, except that sizes come first."""

    def sizes_first(numbers: list[int]) -> list[int]:
        return sorted(numbers, key=lambda number: kinds[number] != _SIZE)

    placeholders = backward.graph.find_nodes(op="placeholder")
    taken = dict(zip(sizes_first(list(range(len(kinds)))), placeholders, strict=False))
    behind = placeholders[len(kinds) - 1].next
    for number in sizes_first(order):
        behind.prepend(taken[number])


def _kind(saved: object) -> int:
    value = saved.meta.get("val") if isinstance(saved, Node) else None
    if isinstance(value, _SYMBOLIC):
        return _SIZE
    if _is_object(value):
        return _OBJECT
    unchecked = isinstance(saved, Node) and saved.meta.get("saved_tensor_with_no_vc_check", False)
    return _UNCHECKED_TENSOR if unchecked else _TENSOR


def _is_object(value: object) -> bool:
    return value is not None and not isinstance(value, (torch.Tensor, *_SYMBOLIC, int, float, complex, str))
