"""`requires_grad_()` on an intermediate, in one graph: `embedding.register_forward_hook(... output.requires_grad_())`.

transformers and PEFT require a gradient of the embedding's output so that reentrant checkpoints of frozen layers have
one (`enable_input_require_grads`). Nobody reads that gradient, and compiled checkpoints do not need it. Dynamo breaks
the graph there: AOTAutograd differentiates with respect to a graph's inputs alone, so a result that needs a gradient
because of the request would lose it.

Here the request changes Dynamo's example, so that the program's questions (`x.requires_grad`) are answered as in eager
mode, and leaves nothing in the graph. Once the graph is complete, `graph/gradients.py` has to prove that its results
are the same without the request: the tensor itself is not returned, no result loses its gradient, and nothing on the
way, such as a hook on the gradient or `torch.autograd.grad`, depends on it. Otherwise the frame is traced again without
this feature, and breaks as under stock PyTorch.

A tensor whose memory an input of the graph shares is left alone, since it may be that input (`x.contiguous()`), and so
is one in the body of a checkpoint or under a function transform.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from fxpasses.capture.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.graph.aliases import storages, storages_of
from fxpasses.graph.gradients import check_gradients
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import Region

if TYPE_CHECKING:
    from fxpasses.capture.trace import Trace

handlers = Handlers()


class RequiredGradients:
    """The intermediates of one trace, as fake tensors, that require gradients because the program asked for it."""

    def __init__(self, autocast: Any) -> None:
        self._tensors: list[torch.Tensor] = []
        self._autocast = tuple((*region, None) for region in autocast)
        self._enabled = torch.is_grad_enabled()

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
    example = self.as_proxy().node.meta["example_value"]
    is_plain = type(example) is torch._subclasses.FakeTensor and example.is_floating_point()
    if example.requires_grad or self.source is not None or tx.output.current_tracer.parent is not None or not is_plain:
        return NOT_HANDLED
    inputs = tx.output.graph.find_nodes(op="placeholder")
    if set(storages_of(example)) & {found for node in inputs for found in storages(node)}:
        return NOT_HANDLED
    trace.required.add(example)
    self.requires_grad = True
    return self


def _is_true(argument: Any) -> bool:
    return bool(argument.is_python_constant()) and argument.as_python_constant() is True
