"""Spells out the loss of all rows as the losses of each row, followed by their reduction.

cross_entropy(logits, target)               losses = cross_entropy(logits, target, reduction="none")
                                            losses.sum() / (target != -100).sum()
cross_entropy(logits.transpose(1, 2), t)    cross_entropy(logits.flatten(0, 1), t.flatten(), ...)
kl_div(p, q, reduction="batchmean")         kl_div(p, q, reduction="none").sum(-1).sum() / len(p)
x.sum(), x.mean()                           x.sum(-1).sum(), divided by the number of elements
"""

from __future__ import annotations

import operator
from collections.abc import Set
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from fxpasses.graph.aliases import storages
from fxpasses.graph.building import NodeBuilder, erase_unused
from fxpasses.graph.calls import OperatorCall, is_in_place, operator_of, swaps_last_dimensions
from fxpasses.graph.modes import autocast_regions, modes
from fxpasses.graph.regions import Region
from fxpasses.graph.traits import is_pointwise
from fxpasses.rows.nodes import is_tensor, shape_of

_OF_CLASSES = {"cross_entropy": F.cross_entropy, "nll_loss": F.nll_loss}


def spell_out(main: Region, fake_mode: Any, reached: Set[Node], least: int) -> None:
    """Spell out the losses among `reached`, the nodes that depend on logits of at least `least` columns."""
    reached = set(reached)
    around, before = autocast_regions(main.gm.graph), modes(main.gm.graph)
    given = {storage for node in main.gm.graph.nodes if not node.op.startswith("call") for storage in storages(node)}
    for node in list(main.gm.graph.nodes):
        if node not in reached or not is_tensor(node):
            continue
        name = operator_of(node)
        emit = NodeBuilder(main.gm.graph, fake_mode, node, autocast=around[node])
        with emit.before(node), torch.set_grad_enabled(torch.is_grad_enabled() is not before[node].changed):
            spelled = None
            if is_in_place(name) and name != "setitem":
                is_own = node.args[0] in reached and given.isdisjoint(storages(node))
                spelled = _out_of_place(node, name, emit) if is_own else None
            elif name in _OF_CLASSES:
                spelled = _of_classes(node, name, emit)
            elif name == "kl_div":
                spelled = _divergence(node, emit)
            elif name in ("sum", "mean"):
                spelled = _reduced(node, name, least, emit)
        if spelled is not None:
            reached.add(spelled)
            node.replace_all_uses_with(spelled)
            erase_unused([node], lambda unused: unused in reached)


def _out_of_place(node: Node, name: str, emit: NodeBuilder) -> Node | None:
    """The result of an operator that writes to new logits, `logits /= 2`, in separate memory, for all later readers."""
    written = node.args[0]
    if not is_pointwise(name[:-1]) or not isinstance(written, Node) or len(storages(written)) != 1:
        return None
    later, memory, follows = [], storages(written), False
    for other in node.graph.nodes:
        follows = follows or other is node
        if follows and other is not node:
            later += [operand for operand in other.all_input_nodes if storages(operand) == memory]
    if any(operand not in (written, node) and comes_before(operand, node) for operand in later):
        return None  # they are read by another name, whose memory is written as well
    plain = name[:-1]
    target = plain if hasattr(torch.Tensor, plain) else getattr(torch, plain)
    found = emit(target, node.args, dict(node.kwargs))
    if found.meta["example_value"].dtype != node.meta["example_value"].dtype:
        found = emit("to", (found, node.meta["example_value"].dtype))
    written.replace_all_uses_with(
        found, delete_user_cb=lambda user: user not in (node, found) and comes_before(node, user)
    )
    return found


def comes_before(one: Node, other: Node) -> bool:
    return one < other


def _of_classes(node: Node, name: str, emit: NodeBuilder) -> Node | None:
    call = OperatorCall.of(node)
    scores, target, weight = call.argument("input"), call.argument("target"), call.argument("weight")
    how = call.argument("reduction", "mean")
    deprecated = [call.argument("size_average"), call.argument("reduce")]
    if not is_tensor(scores) or not is_tensor(target) or deprecated != [None, None]:
        return None
    ndim = len(shape_of(scores))
    if how not in ("mean", "sum", "none") or ndim not in (2, 3) or (how == "none" and ndim == 2):
        return None
    kwargs: dict[str, Any] = {"reduction": "none", "ignore_index": call.argument("ignore_index", -100)}
    if name == "cross_entropy":
        kwargs["label_smoothing"] = call.argument("label_smoothing", 0.0)
    is_index = not target.meta["example_value"].is_floating_point()
    if ndim == 3:
        scores = _columns_last(scores)
        if scores is None or not is_index:
            return None
        scores, own = emit("flatten", (scores, 0, 1)), target
        target = emit("flatten", (target, 0, 1))
    if weight is not None:
        kwargs["weight"] = weight
    losses = emit(_OF_CLASSES[name], (scores, target), kwargs)
    if how == "none":
        return emit("view_as", (losses, own))
    ignored = emit(operator.eq, (target, kwargs["ignore_index"])) if is_index else None
    if ignored is not None:  # these are 0 already; the fill shows that these rows have the weight 0
        losses = emit("masked_fill", (losses, ignored, 0))
    total = emit("sum", (losses,))
    return total if how == "sum" else emit("div", (total, _weight(losses, target, weight, ignored, emit)))


def _columns_last(x: Node) -> Node | None:
    """y [B, T, V] if x is `y.transpose(1, 2)`, in any spelling."""
    name, call = operator_of(x), OperatorCall.of(x)
    dims = (call.argument("dim0"), call.argument("dim1"))
    swaps = name == "transpose" and {dim % 3 for dim in dims if isinstance(dim, int)} == {1, 2}
    swaps = swaps or (name == "permute" and call.sequence("dims") in ((0, 2, 1), (0, -1, 1), (0, -1, -2)))
    swaps = swaps or swaps_last_dimensions(x)
    y = call.argument("input", x.args[0] if x.args else None)
    return y if swaps and isinstance(y, Node) else None


def _weight(losses: Node, target: Node, weight: Node | None, ignored: Node | None, emit: NodeBuilder) -> int | Node:
    """The divisor of a mean over losses. ignored: which targets are ignored; None for probabilities."""
    if ignored is None:
        return emit.size(losses, 0)
    if weight is None:
        return emit("sum", (emit("logical_not", (ignored,)),))
    found = emit("index_select", (weight, 0, emit("masked_fill", (target, ignored, 0))))
    return emit("sum", (emit("masked_fill", (found, ignored, 0)),))


def _divergence(node: Node, emit: NodeBuilder) -> Node | None:
    call = OperatorCall.of(node)
    how = call.argument("reduction", "mean")
    if (
        how not in ("batchmean", "mean", "sum")
        or [call.argument("size_average"), call.argument("reduce")] != [None] * 2
    ):
        return None
    first = call.argument("input")
    parts = emit(
        F.kl_div,
        (first, call.argument("target")),
        {"reduction": "none", "log_target": call.argument("log_target", False)},
    )
    total = emit("sum", (emit("sum", (parts, -1)),))
    if how == "batchmean":
        return emit("div", (total, emit.size(first, 0)))
    return total if how == "sum" else _per_element(total, parts, emit)


def _reduced(node: Node, name: str, least: int, emit: NodeBuilder) -> Node | None:
    call = OperatorCall.of(node)
    x = call.argument("input")
    is_whole = is_tensor(x) and len(shape_of(x)) > 1 and call.has_only("input", "dtype") and len(node.args) == 1
    if (
        not is_whole
        or not shape_of(x)[-1].is_Integer
        or shape_of(x)[-1] < least
        or not x.meta["example_value"].is_floating_point()
    ):
        return None
    dtype = {"dtype": call.argument("dtype")} if call.argument("dtype") is not None else {}
    total = emit("sum", (emit("sum", (x, -1), dtype),))
    return total if name == "sum" else _per_element(total, x, emit)


def _per_element(total: Node, x: Node, emit: NodeBuilder) -> Node:
    for axis in range(len(shape_of(x))):
        total = emit("div", (total, emit.size(x, axis)))
    return total
