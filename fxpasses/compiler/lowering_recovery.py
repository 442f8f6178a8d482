"""Runs the captured graph if its compiled code raises, as Inductor's does for strides that it did not expect.

An error that eager mode raises as well, such as an index out of range, is the program's: the second run raises it. If
the batch determines sizes in the graph, small tensors that the graph writes, such as a batch norm's statistics, are
restored before the second run. If a second run would be visible, in a larger tensor that is written twice, in a
collective that other ranks issue once, or in a checkpoint that counts saved tensors, the first error stands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxpasses.base.containment import contained
from fxpasses.base.once import warn_once
from fxpasses.collectives.as_written import is_in_checkpoint, uncompiled
from fxpasses.errors import MetadataError, OffloadError, RecordingError
from fxpasses.graph.aliases import AliasSets, written_operands
from fxpasses.graph.calls import OperatorCall
from fxpasses.graph.collectives import communicates
from fxpasses.graph.copying import copy_graph_module
from fxpasses.graph.regions import Region
from fxpasses.graph.symbols import binds_symbols, bytes_of

Run = Callable[..., Any]

# The errors of wrong or missing code. Other exceptions steer a program, like a checkpoint's early stop.
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
_MOST_RESTORED = 1 << 20  # bytes; they are copied in each step
_MEANT = (MetadataError, OffloadError, RecordingError, torch.OutOfMemoryError)


def recovering(compiled: Run, captured: Run, gm: GraphModule, function: Hashable) -> Run:
    """`compiled`; if it raises, `captured`, which runs the captured graph `gm`.

    Warns once for each function of the program, identified by `function`, and kind of error.
    """
    if communicates(gm) or (written := _written_inputs(gm)) is None:
        return compiled

    def run(*inputs: Any) -> Any:
        before = [(inputs[at], inputs[at].detach().clone()) for at in written]
        try:
            return compiled(*inputs)
        except _MEANT:
            raise
        except _FAILURES as error:
            if is_in_checkpoint():
                raise
            failed = error
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
        results = captured(*inputs)
        what = f"a compiled graph failed when it ran ({type(failed).__name__}: {failed})"
        instead = "For batches for which it fails it runs uncompiled, as it was captured."
        warn_once(("when it runs", type(failed), function), f"{what}. {instead}")
        return results

    return run


def unasserted(gm: GraphModule, of_program: Collection[str]) -> Run:
    """Runs a captured graph without PyTorch's assertions on unknown sizes: operators check the batch's own sizes.

    of_program: the conditions that the program asserts itself.
    """

    @functools.cache
    def made() -> Run:
        copy = copy_graph_module(gm)
        for region in Region(copy).walk():
            for node in region.gm.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
                condition = str(node.args[1]).partition(" for expression ")[2].rpartition(" on node ")[0]
                if condition and condition not in of_program:
                    region.gm.graph.erase_node(node)
            region.gm.recompile()
        return uncompiled(copy)

    def run(*inputs: Any) -> Any:
        captured = uncompiled(gm)
        with contained("leaving out what PyTorch asserts of sizes", "The assertions stay."):
            captured = made()
        return captured(*inputs)

    return run


def _written_inputs(gm: GraphModule) -> list[int] | None:
    """The positions of the inputs that a graph writes, to be restored; None if they cannot be."""
    written = [operand for node in gm.graph.nodes for operand in written_operands(node)]
    for region in Region(gm).walk():
        written += [_in_graph(operand, region) for node in region.gm.graph.nodes for operand in _written_beside(node)]
    if not written:
        return []
    sets, inputs = AliasSets(gm.graph.nodes), gm.graph.find_nodes(op="placeholder")
    found = [at for at, node in enumerate(inputs) if sets.meet([node], written)]
    sizes = [bytes_of(inputs[at].meta["example_value"]) for at in found]
    is_little = None not in sizes and sum(filter(None, sizes)) <= _MOST_RESTORED and binds_symbols(gm)
    return found if is_little or not found else None


def _written_beside(node: Node) -> list[Node]:
    """The operands that a function of PyTorch writes although its name does not say so."""
    call = OperatorCall.of(node)
    names: tuple[str, ...] = ()
    if call.name in ("batch_norm", "instance_norm"):
        names = ("running_mean", "running_var")
    elif call.name in ("embedding", "embedding_bag") and call.argument("max_norm") is not None:
        names = ("weight",)
    return [operand for operand in map(call.argument, names) if isinstance(operand, Node)]


def _in_graph(node: Node, region: Region) -> Node:
    """The node outside of all checkpoint bodies that an operand inside stands for."""
    while region.parent is not None and isinstance(operand := region.operands.get(node), Node):
        node, region = operand, region.parent
    return node
