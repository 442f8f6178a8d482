"""Runs a graph as it was captured if its compiled code raises, as Inductor's does for strides that it did not expect.

What eager mode raises as well, an index that is out of range, is the program's error: the second run raises it. Where a
second run would show, in a tensor that is written twice, in a collective that other ranks issue once, or in a
checkpoint that counts what is saved, the first error stands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxpasses.collectives.as_written import is_in_checkpoint, uncompiled
from fxpasses.containment import contained
from fxpasses.errors import MetadataError, OffloadError, RecordingError
from fxpasses.graph.calls import FACTORIES, VIEWS, is_in_place, operator_of
from fxpasses.graph.collectives import communicates
from fxpasses.graph.copying import copy_graph_module
from fxpasses.graph.regions import Region
from fxpasses.once import warn_once

Run = Callable[..., Any]

# What code that is wrong, or not there, raises. Other exceptions steer a program, as a checkpoint's early stop does.
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
_MEANT = (MetadataError, OffloadError, RecordingError, torch.OutOfMemoryError)


def recovering(compiled: Run, captured: Run, gm: GraphModule, function: Hashable) -> Run:
    """`compiled`; where it raises, `captured`, which runs the captured graph `gm`.

    One warning is given for a function of the program, which `function` identifies, and a kind of error.
    """
    if communicates(gm) or any(_writes(node) for region in Region(gm).walk() for node in region.gm.graph.nodes):
        return compiled

    def run(*inputs: Any) -> Any:
        try:
            return compiled(*inputs)
        except _MEANT:
            raise
        except _FAILURES as error:
            if is_in_checkpoint():
                raise
            failed = error
        results = captured(*inputs)
        what = f"a compiled graph failed when it ran ({type(failed).__name__}: {failed})"
        instead = "For batches for which it fails it runs uncompiled, as it was captured."
        warn_once(("when it runs", type(failed), function), f"{what}. {instead}")
        return results

    return run


def unasserted(gm: GraphModule, of_program: Collection[str]) -> Run:
    """Runs a captured graph without what PyTorch asserts of sizes that it does not know: operators check the batch's.

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


def _writes(node: Node) -> bool:
    """Whether a node may write to a tensor that the graph is given, and not to one that it makes."""
    if not node.op.startswith("call"):
        return False
    if node.kwargs.get("out") is not None:
        return True
    schema = getattr(node.target, "_schema", None)
    writes = schema.is_mutable if schema is not None else is_in_place(operator_of(node))
    return bool(writes or node.kwargs.get("inplace")) and not _is_made(node.args[0] if node.args else None)


def _is_made(written: Any) -> bool:
    while (
        isinstance(written, Node)
        and written.args
        and (operator_of(written) in VIEWS or is_in_place(operator_of(written)))
    ):
        written = written.args[0]
    return isinstance(written, Node) and operator_of(written) in FACTORIES
