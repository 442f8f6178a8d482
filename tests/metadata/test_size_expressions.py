"""Sizes as expressions."""

from __future__ import annotations

import itertools
import operator

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpasses.metadata.size_expressions import is_arithmetic, sizes_of_slices


def test_a_slice_between_numbers_is_as_long_as_pythons() -> None:
    """Of `x[:, start:end]`, whose length is a symbol of its own, as torch 2.11 makes one."""
    shapes, graph = ShapeEnv(), Graph()
    start, end, length = (shapes.create_unbacked_symint() for _ in range(3))
    torch._check(length >= 0)
    x, *bounds = (graph.placeholder(name) for name in ("x", "start", "end"))
    part = graph.call_function(operator.getitem, (x, (slice(None), slice(*bounds))))
    with FakeTensorMode(shape_env=shapes):
        examples = torch.empty(2, 5), start, end, torch.empty(2, length)
    for node, example in zip((x, *bounds, part), examples, strict=True):
        node.meta["example_value"] = example
    assert sizes_of_slices(part) == {}
    part.meta["unbacked_bindings"] = {length.node.expr: ()}
    ((found, size),) = sizes_of_slices(part).items()
    assert found == length.node.expr and is_arithmetic(size)
    for first, last in itertools.product(range(-7, 8), repeat=2):
        assert size.xreplace({start.node.expr: first, end.node.expr: last}) == len(range(5)[first:last])
