"""What a checkpointed layer stores outside: captured where nobody can tell a repeated store, else as stock."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fxpasses.inspect
from tests.support import compiled

pytestmark = pytest.mark.usefixtures("capture_flags")

ROWS, WIDTH, PARTS = 12, 4, 3


def counted(x: Tensor) -> Tensor:
    return (x[:, :PARTS].argmax(1, keepdim=True) == torch.arange(PARTS)).sum(0)


def scaled(x: Tensor, sizes: Any) -> Tensor:
    return sum((x * size).sin() * (number + 1) for number, size in enumerate(sizes)) / ROWS


class Notes:
    """An object that is no module, such as torchtitan's `ExpertParallel`."""

    def __init__(self) -> None:
        self.sizes: Any = None
        self.calls = 0
        self.log: list[Any] = []


class Layer(nn.Module):
    """`run` is checkpointed. What a kind of layer stores lies in `notes` and on the layer itself."""

    options: dict[str, Any] = {}

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.notes = notes
        self.shape: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False, **self.options)

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class StoresList(Layer):
    def run(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.notes.sizes = counted(x).tolist()
        self.shape = (x.shape, "rows", None)
        return scaled(x, self.notes.sizes)


class ReadByTheFrame(StoresList):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.notes.sizes[1]


class ReadByTheNextCheckpoint(StoresList):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return checkpoint(lambda y: scaled(y.cos(), self.notes.sizes), y, use_reentrant=False)


class ClearedBefore(StoresList):
    def forward(self, x: Tensor) -> Tensor:
        self.notes.sizes = None
        return super().forward(x)


def state(model: nn.Sequential) -> Any:
    return copy.deepcopy([(vars(layer.notes), layer.shape) for layer in model])


def step(program: Any, model: nn.Sequential, x: Tensor) -> list[Any]:
    """Numbers after forward, then after backward."""
    x = x.clone().requires_grad_()
    out = program(x)
    after_forward = state(model)
    grads = torch.autograd.grad(out.square().sum(), [x, *model.parameters()])
    return [out.detach(), after_forward, list(grads), state(model)]


def assert_as_eager(kind: type[Layer], layers: int = 2, shared: bool = False, lowering: str = "aot_eager") -> int:
    """Three steps, the second one twice forward; returns how many graphs were compiled."""
    torch.manual_seed(4)
    notes = Notes()
    model = nn.Sequential(*(kind(notes if shared else Notes()) for _ in range(layers)))
    own = copy.deepcopy(model)
    program = compiled(own, lowering)
    with fxpasses.inspect.record() as record:
        for number in range(3):
            x = torch.randn(ROWS, WIDTH)
            if number == 1:
                program(x.sin().requires_grad_()), model(x.sin())
            actual, expected = step(program, own, x), step(model, model, x)
            torch.testing.assert_close(actual[::2], expected[::2], rtol=0, atol=0)
            assert actual[1::2] == expected[1::2]
    return len(record.graphs)


@pytest.mark.parametrize("kind", [StoresList, ReadByTheFrame, ReadByTheNextCheckpoint, ClearedBefore])
def test_one_graph(kind: type[Layer]) -> None:
    """Before, nothing was compiled: "HOP: Unsafe side effect"."""
    counters.clear()
    assert assert_as_eager(kind) == 1
    assert not counters["graph_break"]


class Model(nn.Module):
    """A model of the user's own, which Dynamo traces in another way than one of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(StoresList(Notes()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("given", ["model", "function"])
def test_what_is_compiled_may_be_a_model_or_a_function(given: str) -> None:
    torch.manual_seed(4)
    model = Model()
    program = compiled(model if given == "model" else lambda x: model(x), "eager")
    counters.clear()
    program(torch.randn(ROWS, WIDTH, requires_grad=True)).sum().backward()
    assert not counters["graph_break"] and model.layers[1].notes.sizes


class Recurrent(Layer):
    """As RecurrentGemma: what the last call left is cleared, and the state after the last row stored."""

    state: Any = None

    def run(self, x: Tensor) -> Tensor:
        self.state = None
        x = self.linear(x)
        before = torch.zeros(WIDTH) if self.state is None else self.state
        rows = x + before
        self.state = rows[-1] + before
        return self.linear(rows.sin())


class WrittenByTheFrame(Recurrent):
    """Eager mode stores again in the recomputation what was written to."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.state.detach().add_(1)
        return y


class WrittenInTheBody(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        self.state = self.linear(x).detach()
        y = self.linear(self.state.sin() * x)
        self.state.add_(1)
        return y


class StopsBetween(Recurrent):
    """Eager mode ends the recomputation at the sine, with `None` stored."""

    def run(self, x: Tensor) -> Tensor:
        self.state = None
        x = self.linear(x).sin()
        self.state = x[-1] + 1
        return x + 1


def left(program: Any, model: nn.Sequential, x: Tensor) -> list[Any]:
    """Output, gradients, and what the layers hold after a step."""
    out = program(x)
    grads = torch.autograd.grad(out.square().sum(), list(model.parameters()))
    return [out.detach(), *grads, *(None if layer.state is None else layer.state.detach() for layer in model)]


@pytest.mark.parametrize(
    ("kind", "graphs"), [(Recurrent, 1), (WrittenByTheFrame, None), (WrittenInTheBody, None), (StopsBetween, None)]
)
def test_tensors_are_stored_as_by_eager_mode(kind: type[Recurrent], graphs: int | None) -> None:
    """Before, no such layer was one graph. A store that the recomputation repeats otherwise is left to eager mode."""
    torch.manual_seed(4)
    model = nn.Sequential(*(kind(Notes()) for _ in range(2)))
    own = copy.deepcopy(model)
    program = compiled(own, "aot_eager")
    with fxpasses.inspect.record() as record:
        for _ in range(2):
            x = torch.randn(ROWS, WIDTH)
            torch.testing.assert_close(left(program, own, x), left(model, model, x), rtol=0, atol=0)
    assert graphs is None or len(record.graphs) == graphs


@pytest.mark.slow
def test_through_inductor() -> None:
    torch.manual_seed(4)
    model = nn.Sequential(StoresList(Notes()))
    own = copy.deepcopy(model)
    x = torch.randn(ROWS, WIDTH)
    actual, expected = step(compiled(own, "inductor"), own, x), step(model, model, x)
    torch.testing.assert_close(actual[::2], expected[::2])
    assert actual[1::2] == expected[1::2]


# What a recomputation would show


class StoresTwice(Layer):
    """The recomputation stops after the first store: it has all that backward needs."""

    def run(self, x: Tensor) -> Tensor:
        self.notes.sizes = counted(x).tolist()
        y = scaled(self.linear(x), self.notes.sizes)
        self.notes.sizes = (*self.notes.sizes, counted(y)[1].item())
        return y + self.notes.sizes[-1]


class Counts(Layer):
    """Eager mode counts each step twice."""

    def run(self, x: Tensor) -> Tensor:
        self.notes.calls += 1
        return self.linear(x).sin()


class CountsFromZero(Counts):
    """A store that waits in the trace is read from there."""

    def forward(self, x: Tensor) -> Tensor:
        self.notes.calls = 0
        return super().forward(x)


class StoresOnce(Layer):
    def run(self, x: Tensor) -> Tensor:
        if self.notes.sizes is None:
            self.notes.sizes = counted(x).tolist()
        return self.linear(x).sin()


class AsksWhetherItIsThere(Layer):
    def run(self, x: Tensor) -> Tensor:
        self.notes.seen = 1 if hasattr(self.notes, "seen") else 0
        return self.linear(x).sin()


class LooksIntoTheDict(Layer):
    def run(self, x: Tensor) -> Tensor:
        before = vars(self.notes)["calls"]
        self.notes.calls = before + 1
        return self.linear(x).sin()


class ClearedAfter(StoresList):
    """Eager mode stores again in the recomputation what was cleared."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.notes.sizes = None
        return y


class ChangedAfter(StoresList):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.notes.sizes.append(5)
        return y


class StoresTensor(Layer):
    def run(self, x: Tensor) -> Tensor:
        self.notes.sizes = counted(x).sum().item()
        self.last = counted(x)
        return self.linear(x).sin()


class Appends(Layer):
    def run(self, x: Tensor) -> Tensor:
        self.notes.log.append(counted(x)[0].item())
        return self.linear(x).sin()


class ReadByAnEarlierCheckpoint(StoresList):
    """Its recomputation, after the other's, finds another number than it found in forward."""

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda x: x.sin() if self.notes.sizes is None else x.cos(), x, use_reentrant=False)
        self.notes.calls = 0
        return super().forward(y)


class DrawsOtherNumbers(Layer):
    options = {"preserve_rng_state": False}

    def run(self, x: Tensor) -> Tensor:
        self.notes.sizes = counted(x).tolist()
        return scaled(self.linear(x), self.notes.sizes)


@pytest.mark.parametrize(
    "kind",
    [
        StoresTwice,
        Counts,
        CountsFromZero,
        StoresOnce,
        AsksWhetherItIsThere,
        LooksIntoTheDict,
        ClearedAfter,
        ChangedAfter,
        StoresTensor,
        Appends,
        DrawsOtherNumbers,
    ],
)
def test_what_a_recomputation_would_show_is_not_captured(kind: type[Layer]) -> None:
    assert_as_eager(kind)


def test_two_checkpoints_that_store_on_one_object() -> None:
    """After the step eager mode has what the first layer stored, which is recomputed last."""
    assert_as_eager(StoresList, shared=True)


def test_a_checkpoint_that_reads_what_a_later_one_stores() -> None:
    """Eager mode itself recomputes something else than forward; it is left to eager mode."""
    counters.clear()
    compiled(ReadByAnEarlierCheckpoint(Notes()), "aot_eager")(torch.randn(ROWS, WIDTH, requires_grad=True))
    assert any("Unsafe side effect" in reason for reason in counters["graph_break"])


def test_a_part_of_a_frame_does_not_show_what_the_rest_stores() -> None:
    torch.manual_seed(4)
    layer, x = StoresList(Notes()), torch.randn(ROWS, WIDTH, requires_grad=True)

    def program(x: Tensor) -> Tensor:
        y = layer(x)
        torch._dynamo.graph_break()
        layer.notes.sizes = None
        return y

    left = []
    for run in (program, compiled(program, "aot_eager")):
        run(x).sum().backward()
        left.append(layer.notes.sizes)
    assert left[0] == left[1] is not None
