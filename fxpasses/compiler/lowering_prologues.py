"""Compiles a prologue's device graph with Inductor if that saves passes over memory (`metadata/cost.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx import Graph, GraphModule, Node

from fxpasses.compiler.lowering import Compiled, inductor
from fxpasses.graph.calls import operator_of
from fxpasses.graph.copying import copy_graph_module
from fxpasses.graph.symbols import constant, is_symbolic
from fxpasses.graph.traits import PLANS, VIEWS
from fxpasses.metadata.program import Program
from fxpasses.options import Options

# A prologue's results live as long as the batch, so the next replay of a CUDA graph must not overwrite their memory.
# And the main graph is compiled for the strides that the operators give these results.
_FOR_PROLOGUES = {"triton.cudagraphs": False, "freezing": False, "keep_output_stride": True}


def is_compiled(program: Program, options: Options) -> bool:
    """Whether a prologue has a device graph that is worth compiling."""
    return program.device is not None and program.worth_compiling and options.lowering == "inductor"


def lower_prologue(program: Program, options: Options) -> Compiled:
    """Compile a prologue's device graph, to be called without gradients.

    Its integers are the unbacked symbols of the main graph: it assumes nothing about a batch, and no batch recompiles
    it.
    """
    assert program.device is not None
    gm = copy_graph_module(program.device)
    plans = _extract_plans(gm)
    masks = _return_bytes(gm)
    examples = [_example(node.meta["example_value"]) for node in gm.graph.find_nodes(op="placeholder")]
    context: Any = TracingContext(detect_fake_mode(examples))
    with tracing(context), torch.inference_mode(False), torch.no_grad():
        compiled = inductor(gm, examples, options, program.key(), fixed=_FOR_PROLOGUES)

    def call(*inputs: Any) -> tuple[Any, ...]:
        outputs = compiled(*inputs)
        return plans(*(value.view(torch.bool) if i in masks else value for i, value in enumerate(outputs)))

    return call


def _extract_plans(gm: GraphModule) -> GraphModule:
    """Have the graph return the operands of its attention plans; returns a graph that computes the original results.

    Otherwise a compiler would write a mask twice, for the operator that makes its plan and for the result, and copy
    its views.
    """
    output = gm.graph.output_node()
    rest, taken = Graph(), dict[Node, Node]()
    returned: list[Node] = []

    def take(node: Node, inside: bool) -> Node:
        if node not in taken:
            if inside and node.all_input_nodes == [node.args[0]]:
                is_view = operator_of(node.all_input_nodes[0]) in VIEWS
                taken[node] = rest.node_copy(node, lambda operand: take(operand, is_view))
            else:
                returned.append(node)
                taken[node] = rest.placeholder(node.name)
        return taken[node]

    results: Any = output.args[0]
    rest.output(tuple(take(node, operator_of(node) in PLANS) for node in results))
    output.args = (tuple(returned),)
    for node in reversed(gm.graph.nodes):
        if node in taken and not node.users:  # only such nodes: a write in place has no users either
            gm.graph.erase_node(node)
    gm.recompile()
    _placeholders_first(rest)
    return GraphModule({}, rest, class_name="Plans")


def _placeholders_first(graph: Graph) -> None:
    first = next(iter(graph.nodes))
    for node in reversed(graph.find_nodes(op="placeholder")):
        first.prepend(node)
        first = node


def _return_bytes(gm: GraphModule) -> set[int]:
    """Have the graph return its masks on the CPU as bytes 0 and 1; returns their positions.

    Inductor's C++ writes vectors of bools element by element, which took half the time of a mask (torch 2.13).
    """
    output = gm.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    masks = set()
    for position, node in enumerate(results):
        fake = node.meta["example_value"]
        if isinstance(fake, torch.Tensor) and fake.dtype is torch.bool and fake.device.type == "cpu":
            with gm.graph.inserting_before(output):
                results[position] = gm.graph.call_method("to", (node, torch.uint8))
            masks.add(position)
    output.args = (tuple(results),)
    gm.recompile()
    return masks


def _example(fake: Any) -> Any:
    number = constant(fake) if is_symbolic(fake) else None
    return fake if number is None else number
