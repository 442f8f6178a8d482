"""`Function.apply(mask, mask, q, k)`: an autograd function that is given one tensor twice, in one graph.

Dynamo matches the gradients that `backward` returns with the tensors that `forward` takes. If one tensor is taken
twice, it breaks the graph; torch 2.11 forgets one of the two gradients. YOSO does so in each layer. Here the tensor's
gradient is the sum of both, as autograd adds them up:

    return None, None, grad_x, grad_x_1              before: the graph ends
    return None, grad_x + grad_x_1                   after, for `apply(mask, mask, x, x)`

Left to Dynamo are gradients of another shape or dtype than the tensor's, which autograd converts first, and those of
subclasses.

Private name, checked on torch 2.11 and 2.13, besides the handler's site: its arguments. The free variables of `forward`
are an ordered dict from the tensors of the frame to placeholders, and `backward` returns a gradient for each.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.graph.effects import quiet

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

handlers = Handlers()
_FUNCTION = "torch._dynamo.variables.higher_order_ops.AutogradFunctionApplyVariable"


@handlers.at(method(_FUNCTION, "rewire_bwd_graph_outputs"), without="one tensor for two operands breaks the graph")
def match_gradients(
    trace: Trace,
    proceed: Proceed,
    self: Any,
    fwd_freevars: Any,
    bwd_out: Any,
    bwd_graph: Graph,
    bwd_freevars: Any,
    orig_fwd_args: Any,
) -> Any:
    """fwd_freevars: the free variables of `forward`. bwd_out: what `backward` returns."""
    operands = [operand.realize() for operand in orig_fwd_args]
    repeated = _repeated(operands)
    if not repeated or not isinstance(bwd_out, BaseListVariable):
        return NOT_HANDLED
    proxies = [gradient.as_proxy() if gradient.is_tensor() else None for gradient in bwd_out.items]
    gradients = [bwd_freevars.get(proxy, proxy).node if proxy is not None else None for proxy in proxies]
    again = {operand.proxy.node for operand in repeated.values()}
    for gradient, operand in zip(gradients, operands, strict=False):
        if type(operand) is TensorVariable and operand.proxy.node in again and not _is_of(gradient, operand):
            return NOT_HANDLED
    none = ConstantVariable.create(None)
    once = [none if number in repeated else operand for number, operand in enumerate(operands)]
    result = proceed(self, fwd_freevars, bwd_out, bwd_graph, bwd_freevars, once)
    output = bwd_graph.output_node()
    found: Any = list(output.args[0])  # type: ignore[arg-type]
    places = [proxy.node for proxy in fwd_freevars]
    for number, operand in repeated.items():
        if operand.proxy.node in places:
            place = places.index(operand.proxy.node)
            found[place] = _sum(bwd_graph, output, found[place], gradients[number])
    output.args = (tuple(found),)
    return result


def _repeated(operands: Any) -> dict[int, Any]:
    """By number, the operands that are an earlier one."""
    first: dict[Node, int] = {}
    found = {}
    for number, operand in enumerate(operands):
        if type(operand) is TensorVariable and first.setdefault(operand.proxy.node, number) != number:
            found[number] = operands[first[operand.proxy.node]]
    return found


def _is_of(gradient: Node | None, operand: Any) -> bool:
    """Whether a gradient needs no conversion to be added to the operand's."""
    if gradient is None:
        return True
    example, wanted = gradient.meta.get("example_value"), operand.proxy.node.meta["example_value"]
    return type(example) is FakeTensor and (example.shape, example.dtype) == (wanted.shape, wanted.dtype)


def _sum(graph: Graph, output: Node, one: Node | None, other: Node | None) -> Node | None:
    if one is None or other is None:
        return one or other
    with graph.inserting_before(output):
        total = graph.call_function(operator.add, (one, other))
    examples = [node.meta["example_value"] for node in (one, other)]
    with quiet(examples[0].fake_mode):
        total.meta["example_value"] = operator.add(*examples)
    return total
