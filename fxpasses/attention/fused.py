"""`scaled_dot_product_attention` in a graph, in all its spellings."""

from __future__ import annotations

from torch.fx import Node

from fxpasses.attention.match import Attention, Mask, Operand
from fxpasses.attention.spelling import shape_of
from fxpasses.graph.calls import argument, operator_of
from fxpasses.graph.refusals import Refused
from fxpasses.report import Reason

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_USUAL = (0, 1, 2, 3)


def is_fused_attention(node: Node) -> bool:
    return operator_of(node) == "scaled_dot_product_attention"


def fused_attention(node: Node) -> Attention | None:
    """The attention of a call; None for one without a mask. Raises `Refused`."""
    query, key, value, mask, dropout, causal = (argument(node, name) for name in _ARGUMENTS)
    if mask is None:
        return None
    if dropout not in (None, 0, 0.0):
        raise Refused(Reason.DROPOUT, f"p = {dropout}", node)
    tensors = (query, key, value)
    if causal or not isinstance(mask, Node) or not all(isinstance(tensor, Node) for tensor in tensors):
        raise Refused(Reason.NOT_BY_HEADS, "its arguments are not those of a masked attention", node)
    if any(len(shape_of(tensor)) != 4 for tensor in tensors):
        raise Refused(Reason.NOT_BY_HEADS, f"it has {len(shape_of(query))} dimensions", node)
    scale = argument(node, "scale")
    if scale is not None and not isinstance(scale, (int, float)):
        raise Refused(Reason.UNKNOWN_SIZE, "the scale is computed", node)
    query, key, value = (Operand(tensor, _USUAL) for tensor in tensors)
    grouped = bool(argument(node, "enable_gqa", False))
    return Attention(node, query, key, value, Mask(mask), scale, node, fused=True, grouped=grouped)
