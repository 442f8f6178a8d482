"""`x.requires_grad_()` and `x.requires_grad = True` on an intermediate, in one graph.

transformers and PEFT request a gradient of the embedding's output so that reentrant checkpoints of frozen layers have
one (`enable_input_require_grads`); T5 and Wav2Vec2 request one of tensors that they make. Nobody reads these gradients,
and compiled checkpoints do not need them. Dynamo breaks the graph there: AOTAutograd differentiates only with respect
to a graph's inputs, so a result that needs a gradient because of the request would lose it.

Here the request changes Dynamo's example, so that the program's questions (`x.requires_grad`) are answered as in eager
mode, and leaves nothing in the graph. Once the graph is complete, `graph/gradients.py` has to prove that its results
are the same without the request: the tensor itself is not returned, no result loses its gradient, and nothing on the
way, such as a hook on the gradient or `torch.autograd.grad`, depends on it. Otherwise the frame is traced again without
this feature, and breaks as under stock PyTorch.

A tensor that may be an input of the graph or of a checkpoint's body (`x.contiguous()`) is left alone: it shares memory
with an input, and is not a new view of it. So is a tensor under a function transform.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from fxpasses.dynamo.failures import FeatureRejected
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method, opcodes
from fxpasses.dynamo.rules.bodies import is_in_another_body
from fxpasses.graph.aliases import storages, storages_of
from fxpasses.graph.calls import operator_of
from fxpasses.graph.gradients import check_gradients
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import Region

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_NEW_VIEWS = frozenset({"getitem", "permute", "select", "transpose", "unsqueeze", "view"})

handlers = Handlers()


def check(trace: Trace, gm: GraphModule | None, rewritten: GraphModule | None) -> None:
    if gm is not None and (conflict := trace.state(RequiredGradients).conflict(gm)):
        raise FeatureRejected(Feature.GRADIENTS, conflict)


class RequiredGradients:
    """The intermediates of one trace, as fake tensors, that require gradients because the program asked for it."""

    def __init__(self, trace: Trace) -> None:
        self._tensors: list[torch.Tensor] = []
        self._autocast = tuple((*region, None) for region in trace.autocast)
        self._enabled = trace.grad_enabled

    def add(self, example: torch.Tensor) -> None:
        example.requires_grad_()
        self._tensors.append(example)

    def conflict(self, gm: GraphModule) -> str:
        """Why a graph's results may depend on the requests; "" if they do not."""
        if not self._tensors:
            return ""
        try:
            check_gradients(Region(gm), self._tensors, self._autocast, self._enabled)
        except Refused as refused:
            return f"`requires_grad_()` on an intermediate has an effect: {refused.text}"
        return ""


@handlers.at(method("torch._dynamo.variables.tensor.TensorVariable", "call_method"), order=3)
def require(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name != "requires_grad_" or any(not _is_true(argument) for argument in (*args, *kwargs.values())):
        return NOT_HANDLED
    return self if _is_required(trace, tx, self) else NOT_HANDLED


@handlers.at(opcodes("STORE_ATTR"), without="`x.requires_grad = True` on an intermediate breaks the graph")
def assign(trace: Trace, proceed: Proceed, tx: Any, inst: Any) -> Any:
    if inst.argval != "requires_grad":
        return NOT_HANDLED
    value, tensor = (variable.realize() for variable in tx.stack[-2:])
    if not tensor.is_tensor() or not _is_true(value):
        return NOT_HANDLED
    if not _has_gradient(tensor) and not _is_required(trace, tx, tensor):
        return NOT_HANDLED
    tx.popn(2)
    return None


def _is_required(trace: Trace, tx: Any, variable: Any) -> bool:
    """Require the gradient of an intermediate, unless it has one or the request must stay; returns whether it did."""
    node = variable.as_proxy().node
    example = node.meta["example_value"]
    is_plain = type(example) is torch._subclasses.FakeTensor and example.is_floating_point()
    if _has_gradient(variable) or variable.source is not None or not is_plain or is_in_another_body(tx):
        return False
    inputs = tx.output.graph.find_nodes(op="placeholder")
    if set(storages_of(example)) & {found for node in inputs for found in storages(node)} and not _is_new_view(node):
        return False
    trace.state(RequiredGradients).add(example)
    variable.requires_grad = True
    return True


def _has_gradient(variable: Any) -> bool:
    return variable.as_proxy().node.meta["example_value"].requires_grad


def _is_new_view(node: Node) -> bool:
    """Whether a node makes a view that is a new object, whatever its arguments."""
    operand = node.args[0] if node.args else None
    is_tensors = isinstance(operand, Node) and isinstance(operand.meta.get("example_value"), torch.Tensor)
    return is_tensors and node.op.startswith("call") and operator_of(node) in _NEW_VIEWS


def _is_true(argument: Any) -> bool:
    return bool(argument.is_python_constant()) and argument.as_python_constant() is True
