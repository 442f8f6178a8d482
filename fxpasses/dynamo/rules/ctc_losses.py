"""`F.ctc_loss` with lengths in tensors, in one graph.

Dynamo breaks the graph at the loss, because the tensor that it keeps for its backward pass has a size that depends on
the lengths; and at `with torch.backends.cudnn.flags(enabled=False):`, in which transformers computes it. Here an
operator of this package computes the loss, as in eager mode without cuDNN, bit for bit (`dynamo/runtime/ctc.py`).

Left to Dynamo are calls with lists of lengths, under autocast, without a batch, and those that may use cuDNN. In the
`with` statement, only the loss may run on a CUDA device; otherwise the frame is traced again without this feature.

Private names, checked on torch 2.11, 2.13 and 2.15, besides the handlers' sites: `NullContextVariable`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import NullContextVariable
from torch.fx import Node
from torch.utils import _pytree as pytree

from fxpasses.dynamo.failures import FeatureRejected
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.runtime import ctc
from fxpasses.dynamo.substitutions import TORCH_FUNCTION, are_constants, are_tensors, example, substitute

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_INTEGERS = (torch.int32, torch.int64)

handlers = Handlers()


class _WithoutCudnn:
    """depth: how many statements that switch cuDNN off are open."""

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
def flags(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.value is not torch.backends.cudnn.flags or args or kwargs.keys() != {"enabled"}:
        return NOT_HANDLED
    enabled = kwargs["enabled"]
    is_off = enabled.is_python_constant() and enabled.as_python_constant() is False
    return WithoutCudnn(trace) if is_off else NOT_HANDLED


def _takes_no_cudnn(
    trace: Trace, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, **options: Any
) -> bool:
    if not are_tensors(log_probs, targets, input_lengths, target_lengths) or not are_constants(*options.values()):
        return False
    x, ids, *lengths = map(example, (log_probs, targets, input_lengths, target_lengths))
    is_loss = x.ndim == 3 and x.dtype in (torch.float32, torch.float64) and ids.dtype in _INTEGERS
    are_lengths = all(length.ndim == 1 and length.dtype in _INTEGERS for length in lengths)
    may_take_cudnn = x.device.type == "cuda" and not trace.state(_WithoutCudnn).depth
    return is_loss and are_lengths and not may_take_cudnn and not torch.is_autocast_enabled(x.device.type)


substitute(handlers, F.ctc_loss, when=_takes_no_cudnn)(ctc.ctc_loss)


def _is_on_cuda(node: Node) -> bool:
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda" for leaf in leaves)
