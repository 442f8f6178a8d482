"""Tensors that checkpointed layers share through a dict: one graph where nobody can tell, else as stock."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import fxpasses.inspect
from fxpasses.dynamo.interceptions import Feature, off_in, table
from tests.support import compiled

pytestmark = pytest.mark.usefixtures("capture_flags")

WIDTH = 4
captured = pytest.mark.skipif(Feature.SHARED in off_in(table()), reason="off on this torch")
X = torch.linspace(-1, 2, 6 * WIDTH).view(6, WIDTH)


class Model(nn.Module):
    """Layers 0 and 1 store keys and values, which layers 2 and 3 read."""

    container: type = dict
    options: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.keys = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        return self.through(x, self.container())

    def through(self, x: Tensor, shared: Any) -> Tensor:
        for number in range(4):
            x = checkpoint(self.layer, number, x, shared, use_reentrant=False, **self.options)
        return x

    def layer(self, number: int, x: Tensor, shared: Any) -> Tensor:
        if number < 2:
            self.store(number, x, shared)
        k, v = shared[number % 2]
        return x + (self.queries[number](x) @ k.T).softmax(-1) @ v

    def store(self, number: int, x: Tensor, shared: Any) -> None:
        shared[number] = tuple(self.keys[number](x).chunk(2, -1))


class UserDicts(Model):
    container = UserDict


class WritesToWeights(Model):
    """As Gemma 3n does, in the layers that read keys and values as well."""

    def layer(self, number: int, x: Tensor, shared: Any) -> Tensor:
        self.queries[number].weight.data.clamp_(-0.1, 0.1)
        return super().layer(number, x, shared)


class Asks(Model):
    def store(self, number: int, x: Tensor, shared: Any) -> None:
        super().store(number, x, shared)
        assert number in shared and shared.get(number) is not None


class ReadByTheFrame(Model):
    def forward(self, x: Tensor) -> Any:
        shared: dict[int, Any] = {}
        y = self.through(x, shared)
        return y, sum(k.sum() + v.sum() for k, v in shared.values())


def is_one_graph(model: nn.Module, lowering: str = "aot_eager") -> bool:
    """Whether a step is captured whole. It is eager mode's, bit for bit, in any case."""
    torch._dynamo.reset()
    eager = copy.deepcopy(model)

    def step(program: Any, model: nn.Module) -> Any:
        results = program(X)
        results = results if isinstance(results, tuple) else (results,)
        sum(result.square().sum() for result in results).backward()
        return [result.detach() for result in results], [parameter.grad for parameter in model.parameters()]

    expected = step(eager, eager)
    with fxpasses.inspect.record() as record:
        actual = step(compiled(model, lowering), model)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    graphs = [graph for graph in record.graphs if graph.outcome != "retraced"]
    return len(graphs) == 1 and "torch_dynamo_resume" not in graphs[0].function


@captured
@pytest.mark.parametrize("kind", [Model, UserDicts, WritesToWeights, Asks, ReadByTheFrame])
def test_one_graph(kind: type[Model]) -> None:
    assert is_one_graph(kind())


@captured
def test_without_autograd() -> None:
    model = Model().requires_grad_(False)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, "eager", fullgraph=True)(X), model(X), rtol=0, atol=0)


# What stays as stock PyTorch has it.


class StoresTwice(Model):
    def store(self, number: int, x: Tensor, shared: Any) -> None:
        super().store(0, x, shared)
        super().store(number, x + number, shared)


class StoredAgainByTheFrame(Model):
    def forward(self, x: Tensor) -> Any:
        shared: dict[int, Any] = {}
        y = self.through(x, shared)
        shared[0] = None
        return y


class Cleared(Model):
    def forward(self, x: Tensor) -> Any:
        shared: dict[int, Any] = {}
        y = self.through(x, shared)
        return y + len(shared.pop(1))


class AsksBefore(Model):
    """What eager mode's recomputation finds stored, it does not compute again, and so fails."""

    def store(self, number: int, x: Tensor, shared: Any) -> None:
        if number not in shared:
            super().store(number, x, shared)


class Counts(Model):
    def store(self, number: int, x: Tensor, shared: Any) -> None:
        super().store(number, x * len(shared), shared)


class StoresList(Model):
    def store(self, number: int, x: Tensor, shared: Any) -> None:
        shared[number] = list(self.keys[number](x).chunk(2, -1))


class DrawsOtherNumbers(Model):
    options = {"preserve_rng_state": False}


class OfTheModel(Model):
    def forward(self, x: Tensor) -> Any:
        self.kept = {} if self.kept is None else self.kept
        return self.through(x, self.kept)


class WrittenByALayer(Model):
    def store(self, number: int, x: Tensor, shared: Any) -> None:
        shared[number] = tuple(part.clone() for part in self.keys[number](x).chunk(2, -1))

    def layer(self, number: int, x: Tensor, shared: Any) -> Tensor:
        if number == 2:
            shared[0][1].detach().mul_(0.5)
        return super().layer(number, x, shared)


class WrittenByTheFrame(WrittenByALayer):
    def through(self, x: Tensor, shared: Any) -> Tensor:
        for number in (0, 1, 3):
            x = checkpoint(self.layer, number, x, shared, use_reentrant=False)
        shared[1][1].detach().mul_(0.5)
        return checkpoint(self.layer, 3, x, shared, use_reentrant=False)


@pytest.mark.parametrize(
    "kind", [StoresTwice, Counts, StoresList, DrawsOtherNumbers, WrittenByALayer, WrittenByTheFrame]
)
def test_what_a_recomputation_would_show_is_not_captured(kind: type[Model]) -> None:
    assert not is_one_graph(kind())


@pytest.mark.parametrize("kind", [AsksBefore, StoredAgainByTheFrame, Cleared])
def test_an_error_of_the_recomputation_stays(kind: type[Model]) -> None:
    for program in (kind(), compiled(kind(), "aot_eager")):
        y = program(X)
        with pytest.raises((CheckpointError, KeyError, TypeError)):
            y.sum().backward()


def test_a_dict_that_was_there_before() -> None:
    model = OfTheModel()
    model.kept = {}
    assert not is_one_graph(model)
