"""Writes of checkpointed layers to their weights: hoisted where eager mode's repeated write changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpasses.inspect
from fxpasses.metadata.hoist_writes import HoistWrites
from fxpasses.options import Options
from fxpasses.passes.pipeline import Result, run_further
from fxpasses.report import Reason
from tests.support import captured, compiled, reports_of

WIDTH = 4


class Layer(nn.Module):
    """`write` may write to the weight w, or to the buffer b."""

    def __init__(self, write: Callable[[Any], None]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("b", torch.randn(WIDTH))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self)
        return torch.tanh(x @ self.w + self.b)


class Model(nn.Module):
    """Checkpointed layers, `nested` deep; `shared`: one layer twice."""

    def __init__(self, write: Callable[[Any], None], nested: int = 1, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = Layer(write)
        self.layers = nn.ModuleList([first, first if shared else Layer(write)])
        self.nested = nested

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.checkpointed(layer, x, self.nested)
        return x.square().sum()

    def checkpointed(self, layer: nn.Module, x: Tensor, depth: int) -> Tensor:
        if not depth:
            return layer(x)
        return checkpoint(lambda x: self.checkpointed(layer, x, depth - 1).sin(), x, use_reentrant=False)


def trained(model: nn.Module, program: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Loss, gradients, weights and buffers of three steps, each of which takes the weights beyond the bounds."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(3):
        torch.manual_seed(number)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.mul_(3)
        loss = program(torch.randn(3, WIDTH, requires_grad=True))
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        found += [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    return found


def run(model: nn.Module, lowering: str = "aot_eager", fullgraph: bool = True) -> list[Any]:
    """Train as in eager mode; returns the reports of the pass."""
    expected = trained(eager := copy.deepcopy(model), eager)
    with fxpasses.inspect.record() as record:
        actual = trained(model, compiled(model, lowering, fullgraph=fullgraph))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    return reports_of(record, "hoist_writes")


def clamps(layer: Any) -> None:
    layer.w.data.clamp_(-1, 1)


def clamps_a_detached_alias(layer: Any) -> None:
    torch.clamp_(layer.w.detach(), max=0.5, min=-0.5)


def clamps_without_gradients(layer: Any) -> None:
    with torch.no_grad():
        layer.w.clamp_(-1, 1)


def fills_a_buffer(layer: Any) -> None:
    layer.b.fill_(0.5)


def clamps_by_name(layer: Any) -> None:
    torch.detach(input=layer.w).clamp_(-1, 1)


@pytest.mark.parametrize(
    "write", [clamps, clamps_by_name, clamps_a_detached_alias, clamps_without_gradients, fills_a_buffer]
)
def test_idempotent_writes_are_hoisted(write):
    (report,) = run(Model(write))
    assert len(report.changes) == 2 and not report.refusals


@pytest.mark.parametrize("arguments", [{"nested": 2}, {"shared": True}], ids=["a checkpoint in a checkpoint", "shared"])
def test_arrangements(arguments):
    (report,) = run(Model(clamps, **arguments))
    assert len(report.changes) == 2 * arguments.get("nested", 1) and not report.refusals


def test_under_inductor():
    (report,) = run(Model(clamps), "inductor")
    assert len(report.changes) == 2


def test_the_graph_before_and_after():
    """That of the pass's docstring."""
    w, x = torch.randn(WIDTH, WIDTH), torch.randn(3, WIDTH)

    def body(x):
        w.data.clamp_(-1, 1)
        return torch.tanh(x @ w)

    gm = captured(lambda x: checkpoint(body, x, use_reentrant=False), x)
    examples = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    given = Result(gm, examples, is_whole=True)  # as the backend finds out
    result = run_further([HoistWrites()], given, Options(strict=True))
    graphs = result.gm.graph, result.gm.wrap_body_0.graph
    names = [[node.name for node in graph.nodes if node.op.startswith("call")] for graph in graphs]
    assert names == [["_get_data_attr", "clamp_", "tag_activation_checkpoint", "getitem"], ["matmul", "tanh"]]
    assert result.reports[0].summary == "1 idempotent write before its checkpoint"


def adds_up(layer: Any) -> None:
    layer.b.data.add_(1)


def read_before(layer: Any) -> None:
    layer.b.data.copy_(layer.w.data[0])
    layer.w.data.clamp_(-1, 1)


def by_a_tensor(layer: Any) -> None:
    layer.w.data.clamp_(max=layer.b.abs().max())


def in_two_ways(layer: Any) -> None:
    layer.w.data.clamp_(-1, 1)
    layer.w.data.mul_(0.5)


@pytest.mark.parametrize(
    ("write", "reasons"),
    [
        (adds_up, [Reason.INPUT_WRITTEN]),
        (read_before, [Reason.INPUT_WRITTEN, Reason.READ_BEFORE_WRITE]),
        (by_a_tensor, [Reason.INPUT_WRITTEN]),
        (in_two_ways, [Reason.WRITTEN_BY_LAYER, Reason.INPUT_WRITTEN]),
    ],
)
def test_other_writes_stay(write, reasons):
    """AOTAutograd refuses them, as in stock PyTorch; run operator by operator they are eager mode's."""
    (report,) = run(Model(write), "eager")
    assert not report.changes and [refusal.reason for refusal in report.refusals] == reasons * 2


class Tied(Model):
    """Another checkpoint reads the weight before the one that clamps it."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: torch.tanh(x @ layer.w), x, use_reentrant=False)
        return super().forward(x)


class WritesTheTranspose(Model):
    """The same operation, and not the same elements."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        for layer in self.layers:
            layer.w.data.t().tril_()
        return found


class UpdatesStatistics(Model):
    """By a function whose name does not tell that it writes."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.checkpointed(layer, x, 1)
            x = F.batch_norm(x, layer.b, torch.ones(WIDTH), training=True)
        return x.square().sum()


class PartOfAProgram(Model):
    """The graph ends before the weight is written again."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        torch._dynamo.graph_break()
        for layer in self.layers:
            layer.w.data.mul_(0.5)
        return found


@pytest.mark.parametrize(
    ("kind", "write", "reason"),
    [
        (Tied, clamps, Reason.READ_BEFORE_WRITE),
        (WritesTheTranspose, lambda layer: layer.w.data.tril_(), Reason.WRITTEN_BY_LAYER),
        (UpdatesStatistics, lambda layer: layer.b.data.clamp_(-1, 1), Reason.WRITTEN_BY_LAYER),
        (PartOfAProgram, clamps, Reason.INPUT_WRITTEN),
    ],
)
def test_what_other_code_tells_from_a_write_before_stays(kind, write, reason):
    """AOTAutograd refuses most of them, as in stock PyTorch; hoisted, they would have other gradients."""
    (report, *_) = run(kind(write), "eager", fullgraph=kind is not PartOfAProgram)
    assert not report.changes and {refusal.reason for refusal in report.refusals} == {reason}


def test_memory_of_two_operands_stays():
    def body(x, row, table):
        row.clamp_(-1, 1)
        return x * row * table.sum()

    def run(program):
        torch.manual_seed(0)
        x, table = torch.randn(3, WIDTH, requires_grad=True), 3 * torch.randn(2, WIDTH)
        return program(x, table[0], table), table

    def program(x, row, table):
        return checkpoint(body, x, row, table, use_reentrant=False).sum()

    with fxpasses.inspect.record() as record:
        actual = run(compiled(program))
    torch.testing.assert_close(actual, run(program))
    report = reports_of(record, "hoist_writes")[0]  # of the graph that is given up for it
    assert not report.changes and [refusal.reason for refusal in report.refusals] == [Reason.INPUT_WRITTEN]
