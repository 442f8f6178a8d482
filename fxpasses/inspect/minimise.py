"""Reduces a reproduction while it still fails, with PyTorch's minifier: `python -m fxpasses.inspect.minimise REQUEST`.

`fxpasses bisect` starts this program, and stops it if it hangs. The minifier takes the graph that Dynamo captures of
the reproduction, with the bodies of checkpoints inlined if the failure remains. Each candidate is written as a
reproduction and run; one that fails likewise replaces the file at once.

PyTorch's other tools do not serve: `NNModuleToString` writes a checkpoint's body as `GraphModule()`, and Dynamo's
accuracy minifier asks the compiled graph for parameters, which what a backend returns does not have.

Private name, checked on torch 2.13: `torch._functorch.fx_minifier.minifier`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import operator
import os
import re
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from fxpasses.base import overrides
from fxpasses.graph.calls import is_in_place, operator_of
from fxpasses.inspect.model import CAPTURED, Graph, Source, Stage
from fxpasses.inspect.reproduction import CannotReproduce, outcome, reproduction
from fxpasses.inspect.snapshot import input_data, snapshot, symbol_hints


@dataclass
class Request:
    """file: the reproduction. wanted: its outcome. function, passes, environment: as `reproduction` takes them."""

    file: str
    wanted: str
    function: str
    passes: list[str]
    environment: dict[str, str]
    seconds: float


class Search:
    """folder: where candidates are written."""

    def __init__(self, request: Request, folder: str) -> None:
        self.request = request
        self.folder = Path(folder)
        self.ends = time.monotonic() + request.seconds
        self.trials = 0
        self.prunes = False

    def run(self) -> None:
        from torch._functorch.fx_minifier import minifier

        gm, inputs = captured(self.request.file)
        inlined = inline_checkpoints(gm)
        gm = inlined if self.fails(inlined, inputs) else gm
        self.prunes = self.fails(*pruned(gm, inputs))  # not if what fails is a write that nobody reads
        size = -1
        while size != len(gm.graph.nodes):  # the minifier gets further without dead writes
            size = len(gm.graph.nodes)
            gm, inputs = minifier(gm, inputs, self.fails, self.take)
            gm, inputs = pruned(gm, inputs) if self.prunes else (gm, inputs)
        if self.request.environment and self.fails(gm, inputs, {}):  # a smaller graph has fewer changes to limit
            self.request.environment = {}
            self.take(gm, inputs)

    def take(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        """Make a graph that fails the reproduction; print its number of nodes, and the number of trials so far."""
        with contextlib.suppress(CannotReproduce):
            text, nodes = self.written(gm, inputs, self.request.environment)
            Path(self.request.file).write_text(text, encoding="utf-8")
            print(nodes, self.trials, flush=True)

    def fails(self, gm: GraphModule, inputs: Sequence[Any], environment: Mapping[str, str] | None = None) -> bool:
        """Whether a graph fails as wanted; no graph does once time is up."""
        if time.monotonic() > self.ends:
            return False
        self.trials += 1
        try:
            text, _ = self.written(gm, inputs, self.request.environment if environment is None else environment)
        except CannotReproduce:
            return False
        file = self.folder / f"trial_{self.trials}.py"  # Python caches a file's lines by its name
        file.write_text(text, encoding="utf-8")
        return outcome(printed_by(file)) == self.request.wanted

    def written(self, gm: GraphModule, inputs: Sequence[Any], environment: Mapping[str, str]) -> tuple[str, int]:
        """The text of a reproduction, and the number of nodes."""
        gm, inputs = pruned(gm, inputs) if self.prunes else (gm, inputs)
        regions = snapshot(gm)
        for node, data in zip(regions[0].nodes, input_data(inputs), strict=False):
            node.data = data
        for region in regions:
            for node in region.nodes:
                node.source = _place_in_program(node.source)
        graph = Graph(function=self.request.function, symbols=symbol_hints(gm), stages=[Stage(CAPTURED, regions)])
        return reproduction(graph, self.request.passes, Path(self.request.file).name, environment), graph.nodes


def _place_in_program(line: Source | None) -> Source | None:
    """The place in the user's program, which a line of a reproduction has as its comment."""
    found = re.search(r"  # (\S+):(\d+)$", line.code) if line is not None else None
    return Source(found[1], int(found[2])) if found is not None else None


def captured(file: str) -> tuple[GraphModule, Sequence[Any]]:
    """The graph that Dynamo captures of a reproduction's program, and its inputs."""
    found: list[tuple[GraphModule, Sequence[Any]]] = []

    def keep(gm: GraphModule, inputs: list[Any]) -> Any:
        found.append((copy.deepcopy(gm), [_copy(value) for value in inputs]))
        return gm.forward

    names = runpy.run_path(file)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        torch.compile(names["program"], backend=keep)(*names["INPUTS"])
    return found[0]


def _copy(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def inline_checkpoints(gm: GraphModule) -> GraphModule:
    """The graph with the nodes of each checkpoint's body in place of the call that runs the body."""
    graph = FxGraph()
    taken: dict[Any, Any] = {}
    for node in gm.graph.nodes:
        body = getattr(gm, node.args[0].target) if str(node.target) == "tag_activation_checkpoint" else None
        if body is not None and not body.graph.find_nodes(op="get_attr"):
            operands = [taken[operand] for operand in node.args[1:]]
            placeholders = body.graph.find_nodes(op="placeholder")
            taken[node] = graph.graph_copy(body.graph, dict(zip(placeholders, operands, strict=True)))
        elif node.target is operator.getitem and isinstance(taken[node.args[0]], tuple):
            taken[node] = taken[node.args[0]][node.args[1]]
        else:
            taken[node] = graph.node_copy(node, taken.__getitem__)
    for reference in graph.find_nodes(op="get_attr"):
        if not reference.users:
            graph.erase_node(reference)
    return GraphModule(gm, graph)


def pruned(gm: GraphModule, inputs: Sequence[Any]) -> tuple[GraphModule, Sequence[Any]]:
    """The graph without dead nodes and unused inputs. FX keeps every write; here a write is dead if nobody reads it."""
    gm = GraphModule(gm, copy.deepcopy(gm.graph))

    def is_write(node: Node) -> bool:
        return node.op.startswith("call") and is_in_place(operator_of(node))

    def is_needed(node: Node) -> bool:
        written = node.args[0] if is_write(node) and node.args else None
        return not all(map(is_write, written.users)) if isinstance(written, Node) else node.is_impure()

    gm.graph.eliminate_dead_code(is_impure_node=is_needed)
    kept = []
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if node.users:
            kept.append(value)
        else:
            gm.graph.erase_node(node)
    return gm, kept


def printed_by(file: Path) -> str:
    """What a reproduction prints when it runs in this process as if in a new one."""
    torch._dynamo.reset()
    overrides.count_anew()
    os.environ.pop(overrides.CHANGES, None)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        try:
            runpy.run_path(str(file), run_name="__main__")
        except Exception:
            traceback.print_exc(file=printed)
    return printed.getvalue()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="fxpasses-minimise-") as made:
        Search(Request(**json.loads(sys.argv[1])), made).run()
