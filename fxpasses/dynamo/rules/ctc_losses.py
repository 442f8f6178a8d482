"""`F.ctc_loss` with lengths in tensors, in one graph.

Dynamo breaks the graph there, because the size of what the loss keeps for its backward pass depends on the lengths; and
at `with torch.backends.cudnn.flags(enabled=False):`, in which transformers computes it. Here the loss is computed by an
operator of this package, as in eager mode without cuDNN, bit for bit (`dynamo/runtime/ctc.py`).

Left to Dynamo are calls with lists of lengths, under autocast, without a batch, and those that may take cuDNN. In the
`with` statement nothing but the loss may run on a device of CUDA; otherwise the frame is traced again without this
feature.

Private names, checked on torch 2.11, 2.13 and 2.15, besides the handlers' sites: `NullContextVariable`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import NullContextVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch.fx import Node
from torch.utils import _pytree as pytree

from fxpasses.dynamo.failures import FeatureRejected
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.hints import TORCH_FUNCTION
from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.runtime import ctc

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_SIGNATURE = inspect.signature(F.ctc_loss)
_LOSS: Any = ctc.ctc_loss
_TENSORS = ("log_probs", "targets", "input_lengths", "target_lengths")
_INTEGERS = (torch.int32, torch.int64)

handlers = Handlers()


class _WithoutCudnn:
    """depth: of statements that switch cuDNN off."""

    def __init__(self, trace: Trace) -> None:
        self.depth = 0


class WithoutCudnn(NullContextVariable):
    """`torch.backends.cudnn.flags(enabled=False)`, which changes nothing on the CPU."""

    def __init__(self, trace: Trace, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.trace = trace
        self.last: Any = None  # the last node before the statement

    def enter(self, tx: Any) -> Any:
        self.last = next(iter(reversed(tx.output.graph.nodes)))
        self.trace.state(_WithoutCudnn).depth += 1
        return ConstantVariable.create(None)

    def exit(self, tx: Any, *args: Any) -> Any:
        self.trace.state(_WithoutCudnn).depth -= 1
        node = self.last.next
        while node.op != "root":
            if node.target is not torch.ops.fxpasses.ctc_losses and _is_on_cuda(node):
                raise FeatureRejected(Feature.CTC, f"`{node.name}` runs on a device without cuDNN")
            node = node.next
        return ConstantVariable.create(None)

    def supports_graph_breaks(self) -> bool:
        return False


@handlers.at(method(TORCH_FUNCTION, "call_function"), order=5)
def call(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.value is torch.backends.cudnn.flags:
        switches_off = not args and kwargs.keys() == {"enabled"} and _constant(kwargs["enabled"]) is False
        return WithoutCudnn(trace) if switches_off else NOT_HANDLED
    if self.value is not F.ctc_loss or not _is_supported(trace, args, kwargs):
        return NOT_HANDLED
    return UserFunctionVariable(_LOSS).call_function(tx, args, kwargs)


def _is_supported(trace: Trace, args: Any, kwargs: Any) -> bool:
    try:
        given = _SIGNATURE.bind(*args, **kwargs).arguments
    except TypeError:
        return False
    tensors = [given.pop(name).realize() for name in _TENSORS]
    if not all(tensor.is_tensor() for tensor in tensors) or None in map(_constant, given.values()):
        return False
    log_probs, targets, *lengths = (tensor.as_proxy().node.meta["example_value"] for tensor in tensors)
    is_loss = log_probs.ndim == 3 and log_probs.dtype in (torch.float32, torch.float64)
    are_lengths = all(length.ndim == 1 and length.dtype in _INTEGERS for length in lengths)
    may_take_cudnn = log_probs.device.type == "cuda" and not trace.state(_WithoutCudnn).depth
    is_cast = torch.is_autocast_enabled(log_probs.device.type)
    return is_loss and are_lengths and targets.dtype in _INTEGERS and not may_take_cudnn and not is_cast


def _constant(variable: Any) -> Any:
    return variable.as_python_constant() if variable.is_python_constant() else None


def _is_on_cuda(node: Node) -> bool:
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda" for leaf in leaves)
