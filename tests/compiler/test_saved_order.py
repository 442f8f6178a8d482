"""What forward saves, in the order in which AOTAutograd's runtime slices it."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv, StatelessSymbolicContext

from fxpasses.compiler.saved_order import order_saved


def graphs(values: dict[str, Any], unchecked: set[str] = frozenset()) -> tuple[GraphModule, GraphModule]:  # type: ignore[assignment]
    """A forward graph that returns one result and saves `values`, and a backward graph that takes them as it does."""
    forward, backward = Graph(), Graph()
    result, *saved = [forward.placeholder(name) for name in ("result", *values)]
    for node, value in zip(saved, values.values(), strict=True):
        node.meta["val"] = value
        if node.name in unchecked:
            node.meta["saved_tensor_with_no_vc_check"] = True
    output = forward.output((result, *saved))
    output.meta["desc"] = ["result", *values]
    sizes = [name for name, value in values.items() if isinstance(value, torch.SymInt)]
    for name in [*sizes, *(name for name in values if name not in sizes), "tangent"]:
        backward.placeholder(name)
    backward.output(tuple(backward.find_nodes(op="placeholder")))
    return tuple(GraphModule({}, graph) for graph in (forward, backward))  # type: ignore[return-value]


def returned(module: GraphModule) -> list[str]:
    return [node.name for node in module.graph.output_node().args[0]]  # type: ignore[union-attr]


def taken(module: GraphModule) -> list[str]:
    return [node.name for node in module.graph.find_nodes(op="placeholder")]


def values() -> tuple[torch.Tensor, object, torch.SymInt]:
    fake = FakeTensorMode(shape_env=ShapeEnv())
    tensor = fake.from_tensor(torch.zeros(5), symbolic_context=StatelessSymbolicContext([DYNAMIC]))
    return tensor, object(), tensor.shape[0]


DYNAMIC = torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC


def test_states_of_generators_come_before_objects_and_sizes() -> None:
    tensor, mesh, size = values()
    forward, backward = graphs({"a": tensor, "mesh": mesh, "state": tensor, "s": size, "t": size})
    assert taken(backward) == ["s", "t", "a", "mesh", "state", "tangent"]
    assert order_saved(forward, backward, 1)
    assert returned(forward) == ["result", "a", "state", "mesh", "s", "t"]
    assert forward.graph.output_node().meta["desc"] == returned(forward)
    assert taken(backward) == ["s", "t", "a", "state", "mesh", "tangent"]


def test_tensors_without_a_version_check_come_last_of_the_tensors() -> None:
    tensor, mesh, _ = values()
    forward, backward = graphs({"a": tensor, "b": tensor, "mesh": mesh, "state": tensor}, unchecked={"b"})
    assert order_saved(forward, backward, 1)
    assert returned(forward) == ["result", "a", "state", "b", "mesh"]
    assert taken(backward) == ["a", "state", "b", "mesh", "tangent"]


def test_what_is_in_order_is_left_alone() -> None:
    tensor, mesh, size = values()
    forward, backward = graphs({"a": tensor, "mesh": mesh, "s": size})
    assert not order_saved(forward, backward, 1)
    assert returned(forward) == ["result", "a", "mesh", "s"] and taken(backward) == ["s", "a", "mesh", "tangent"]
