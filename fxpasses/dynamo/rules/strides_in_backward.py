"""`tile.stride(0)` in the backward of an `autograd.Function`, of memory that this backward allocates.

Dynamo traces a backward before it knows the strides of the gradients, and does not answer questions about strides.
Instead it retraces the backward with gradients that are first made contiguous, which fails if one of the function's
outputs is None, as in TRL's fused head. But the strides of a tensor that is made from sizes alone do not depend on any
gradient: questions about them are answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.substitutions import TENSOR
from fxpasses.graph.effects import is_reshaping
from fxpasses.graph.reachability import reached

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

handlers = Handlers()


@handlers.at(method(TENSOR, "_strict_mode_conditional_banned_ops"))
def unknown_properties(trace: Trace, proceed: Proceed, self: Any) -> Any:
    """The names of a tensor's properties that Dynamo does not know in a backward."""
    return [] if _is_made_from_sizes(self.as_proxy().node) else NOT_HANDLED


def _is_made_from_sizes(node: Node) -> bool:
    return not any(map(_may_have_other_strides, reached([node], _tensors_behind)))


def _tensors_behind(node: Node) -> list[Node]:
    return [operand for operand in node.all_input_nodes if isinstance(operand.meta.get("example_value"), torch.Tensor)]


def _may_have_other_strides(node: Node) -> bool:
    return node.op in ("placeholder", "get_attr") or any(map(is_reshaping, node.users))
