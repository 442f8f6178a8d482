"""The size of a query's result is asserted only where a program depends on it; no code is generated to write that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.output_graph import OutputGraph
from torch.fx import Graph, GraphModule, Node

from tests.support import compiled

pytestmark = pytest.mark.usefixtures("capture_flags")
X = torch.tensor([[1.0, -1.0, 2.0], [3.0, -2.0, 0.0]])


def positive(x: Tensor) -> Tensor:
    row, column = torch.where(x > 0)
    return x[row, column] * 2


def nonzero(x: Tensor) -> Tensor:
    return x.flatten()[(x > 0).flatten().nonzero()[:, 0]] * 2


def counted(x: Tensor) -> Tensor:
    row, _ = torch.where(x > 0)
    return x[row] * row.shape[0]


def checked(x: Tensor) -> Tensor:
    row, column = torch.where(x > 0)
    torch._check(row.shape[0] <= 4)
    return x[row, column] * 2


@pytest.fixture
def assertions(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """The assertions of the graphs that Dynamo gives to the backend."""
    found: list[Node] = []
    call = OutputGraph.call_user_compiler

    def note(self: Any, gm: GraphModule, examples: list[Any]) -> Any:
        found.extend(gm.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default))
        return call(self, gm, examples)

    monkeypatch.setattr(OutputGraph, "call_user_compiler", note)
    return found


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", [positive, nonzero])
def test_what_holds_of_every_mask_is_not_asserted(
    program: Callable[[Tensor], Tensor], lowering: str, assertions: list[Node]
) -> None:
    assert torch.equal(compiled(program, lowering)(X), program(X))
    assert not assertions


@pytest.mark.parametrize("program", [counted, checked])
def test_sizes_that_a_program_uses_keep_their_assertions(
    program: Callable[[Tensor], Tensor], assertions: list[Node]
) -> None:
    function = compiled(program)
    assert torch.equal(function(X), program(X))
    assert len(assertions) == 2
    if program is checked:
        with pytest.raises(RuntimeError):
            function(torch.ones(2, 3))


def test_no_code_is_generated_before_the_backend_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    generated: list[Graph] = []
    recompile, call = GraphModule.recompile, OutputGraph.call_user_compiler

    def note(self: GraphModule) -> Any:
        generated.append(self.graph)
        return recompile(self)

    def check(self: Any, gm: GraphModule, examples: list[Any]) -> Any:
        assert gm.graph not in generated
        return call(self, gm, examples)

    monkeypatch.setattr(GraphModule, "recompile", note)
    monkeypatch.setattr(OutputGraph, "call_user_compiler", check)
    assert torch.equal(compiled(positive)(X), positive(X))
