"""A call that Dynamo cannot trace is traced as other Python: one graph, and reports have the program's place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import fxpasses
from fxpasses.dynamo import hints, interceptions
from fxpasses.dynamo.substitutions import are_tensors, substitute
from tests.support import compiled

X, Y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0])

pytestmark = pytest.mark.usefixtures("capture_flags")


@pytest.fixture
def substituted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.equal` of activations, at which Dynamo breaks the graph, counts the equal elements."""
    handlers = interceptions.Handlers()

    def have_one_dimension(trace: Any, input: Any, other: Any) -> bool:
        return are_tensors(input, other) and input.as_proxy().node.meta["example_value"].ndim == 1

    @substitute(handlers, torch.equal, torch.Tensor.equal, when=have_one_dimension)
    def equal(input: Tensor, other: Tensor) -> Tensor:
        return (input == other).sum()

    monkeypatch.setattr(hints, "handlers", [*hints.handlers, *handlers])


@pytest.mark.usefixtures("substituted")
def test_a_function_and_a_method_are_replaced() -> None:
    program = compiled(lambda x, y: x * torch.equal(x, other=y) + x.equal(y), fullgraph=True)
    assert program(X, Y).tolist() == [4.0, 6.0, 8.0]


@pytest.mark.usefixtures("substituted")
def test_what_the_condition_refuses_and_what_does_not_fit_are_left_to_dynamo() -> None:
    program = compiled(lambda x, y: x if torch.equal(x, y) else -x)
    assert program(X[None], Y[None]).tolist() == [[-1.0, -2.0, -3.0]]
    with pytest.raises(TypeError):
        compiled(lambda x, y: torch.equal(x, y, 1))(X, Y)


def test_the_place_is_the_programs() -> None:
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        return pad_sequence((x[: lengths[0]], x[lengths[0] :]))

    with fxpasses.inspect.record() as record:
        compiled(program)(X, torch.tensor([1, 2]))
    nodes = record.graphs[0].stages[0].regions[0].nodes
    files = {node.source.file for node in nodes if node.source is not None}
    assert any("pad" in node.name for node in nodes) and not any("fxpasses/dynamo" in file for file in files)
