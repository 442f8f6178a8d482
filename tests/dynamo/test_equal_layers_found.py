"""Layers that look equal by their guards, and are not: programs whose results were wrong once.

Each has five layers, of which one, mostly the fourth, does something else.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tests.support import compiled

pytestmark = pytest.mark.usefixtures("capture_flags")
KNOWN: list[Any] = []
MEMBERS: set[Any] = set()
TABLE: dict[Any, float] = {}
Apply = Callable[..., Any]


class Layer(nn.Module):
    """Applies a function of itself, a tensor and more arguments."""

    def __init__(self, function: Apply) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.items, self.table, self.ordered = [1], {"a": 1.0}, OrderedDict(a=1.0)
        self.function = function

    def forward(self, *given: Any) -> Any:
        return self.function(self, *given)


class Model(nn.Module):
    layers: Any

    def __init__(self, function: Apply, call: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(function) for _ in range(5))
        self.call = call
        self.tables = [{"b": 1} for _ in range(5)]

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        for place, layer in enumerate(self.layers):
            x = layer(x) if self.call is None else self.call(self, layer, place, x)
        return x


def assert_as_in_eager_mode(model: Any, change: Callable[[Any], object] | None = None, strict: bool = True) -> None:
    torch._dynamo.reset()
    eager, x = copy.deepcopy(model), torch.linspace(-1, 1, 12).view(3, 4)
    program = compiled(model, strict=strict)
    for make in (lambda model: None, change) if change is not None else (lambda model: None,):
        make(model), make(eager)
        torch.testing.assert_close(program(x), eager(x), rtol=0, atol=0)


def linear(self: Any, x: Tensor) -> Tensor:
    return self.lin(x)


def test_which_object_something_is() -> None:
    functions: list[Apply] = [
        lambda self, x: self.lin(x) if self is KNOWN[0] else x.cos(),
        lambda self, x: self.lin(x) if self == KNOWN[0] else x.cos(),
        lambda self, x: self.lin(x) if self in MEMBERS else x.cos(),
        lambda self, x: self.lin(x) if self in KNOWN else x.cos(),
        lambda self, x: x.cos() * TABLE.get(self, 1.0),
        lambda self, x: x * 3 + self.a if self.a is self.b else x + self.a + self.b,
        lambda self, x: x * KNOWN.count(self) if len(KNOWN) else x,
    ]
    torch.manual_seed(0)
    for function in functions:
        model = Model(function)
        special = model.layers[3]
        special.b = special.a
        # A deep copy for eager mode would be another object, so the model is compared with itself.
        KNOWN[:], x = [special], torch.linspace(-1, 1, 12).view(3, 4)
        MEMBERS.clear()
        MEMBERS.add(special)
        TABLE.clear()
        TABLE[special] = 5.0
        torch._dynamo.reset()
        torch.testing.assert_close(compiled(model)(x), model(x), rtol=0, atol=0)
    TABLE.update({layer: place + 1.0 for place, layer in enumerate(model.layers)})
    for layer in model.layers:
        layer.function = lambda self, x: x.cos() * TABLE[self]
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(model)(x), model(x), rtol=0, atol=0)


def own_weight(model: Any, layer: Any, place: int, x: Tensor) -> Tensor:
    return layer(x, model.layers[3].lin.weight)


def one_list(model: Any, layer: Any, place: int, x: Tensor) -> Tensor:
    a = [x]
    return layer(x, a, a if place == 3 else [x])


def tagged(model: Any, layer: Any, place: int, x: Tensor) -> Tensor:
    y = x * 2
    if place == 3:
        y.tag = 5  # type: ignore[attr-defined]
    return layer(y)


def tables(model: Any, layer: Any, place: int, x: Tensor) -> Tensor:
    more = model.tables[place]["b"] + 1
    return layer(x, model.tables[place]) * more


def test_arguments() -> None:
    same = lambda self, x, w: x.cos() if w is self.lin.weight else self.lin(x)  # noqa: E731
    assert_as_in_eager_mode(Model(same, own_weight))
    assert_as_in_eager_mode(Model(lambda self, x, a, b: self.lin(x) * (2 if a is b else 1), one_list))
    assert_as_in_eager_mode(Model(lambda self, x: self.lin(x) * getattr(x, "tag", 1), tagged))
    asks = lambda self, x, table: self.lin(x) * (2 if "a" in table else 1)  # noqa: E731
    assert_as_in_eager_mode(Model(asks, tables), lambda model: model.tables[3].update(a=1))


class OfInputs(Model):
    def forward(self, *inputs: Tensor) -> Tensor:
        total = torch.stack(inputs).sum()
        for layer, x in zip(self.layers, inputs, strict=True):
            total = total + layer(x)
        return total


def test_attributes_of_inputs() -> None:
    model = OfInputs(lambda self, x: (self.lin(x) * getattr(x, "tag", 1)).sum())
    program, inputs = compiled(model), [torch.randn(3, 4, requires_grad=True) for _ in range(5)]
    torch.testing.assert_close(program(*inputs), model(*inputs), rtol=0, atol=0)
    inputs[3].tag = 7  # type: ignore[attr-defined]
    torch.testing.assert_close(program(*inputs), model(*inputs), rtol=0, atol=0)
    model = OfInputs(lambda self, x: (self.lin(x) * (2 if x.grad is None else 1)).sum())
    inputs[2].grad = torch.ones(3, 4)
    torch.testing.assert_close(compiled(model)(*inputs), model(*inputs), rtol=0, atol=0)


class Changing(Model):
    change: Callable[[Any], object]

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.layers[3])
        return super().forward(x)


def grow(layer: Any) -> None:
    layer.items.append(1)


def replace(layer: Any) -> None:
    layer.table["a"] = 5.0


def forget(layer: Any) -> None:
    layer.lin.bias = None


def put(layer: Any) -> None:
    layer.ordered["a"] = 5.0


def test_changes_before_the_first_layer() -> None:
    reads = lambda self, x: self.lin(x) * len(self.items) * self.table["a"] * self.ordered["a"]  # noqa: E731
    for change in (grow, replace, forget, put):
        model = Changing(reads)
        model.change = change
        assert_as_in_eager_mode(model)


def passing(model: Any, layer: Any, place: int, x: Tensor) -> Tensor:
    a, b = checkpoint(layer, x, x * 2, use_reentrant=False)
    return a + b


def hooked(model: Any, layer: Any, place: int, x: Tensor) -> Tensor:
    y = layer(x)
    if place == 1:
        y.register_hook(lambda gradient: gradient * 2)
    return y


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is F.linear else result


def doubling(model: Any, layer: Any, place: int, x: Tensor) -> Tensor:
    with contextlib.ExitStack() as stack:
        if place == 3:
            stack.enter_context(Doubling())
        return layer(x)


def test_results_and_modes() -> None:
    assert_as_in_eager_mode(Model(lambda self, x, y: (y, self.lin(x)), passing))
    assert_as_in_eager_mode(Model(linear, hooked), strict=False)
    assert_as_in_eager_mode(Model(linear, doubling), strict=False)


def test_reads_without_a_guard() -> None:
    model = Model(lambda self, x: self.lin(x) * next(iter(self.table)))
    for place, layer in enumerate(model.layers):
        layer.table = {2.0 if place == 3 else 1.0: 1.0}
    assert_as_in_eager_mode(model)
    functions: list[Apply] = [
        lambda self, x: self.lin(x) * len(vars(self.held)),
        lambda self, x: self.lin(x) * self.held.__dict__.get("more", 7),
        lambda self, x: self.lin(x) * sum(vars(self.held).values()),
        lambda self, x: self.lin(x) * self.mask.untyped_storage().size(),
        lambda self, x: self.lin(x) * (2 if isinstance(self.mask, nn.Buffer) else 1),
    ]
    for number, function in enumerate(functions):
        model = Model(function)
        for place, layer in enumerate(model.layers):
            is_other = place == 3
            layer.held = SimpleNamespace(a=1, **({"more": 2} if is_other else {}))
            mask = torch.ones(6 if is_other and number == 3 else 4)[:4]
            layer.mask = nn.Buffer(mask) if is_other and number == 4 else mask
        assert_as_in_eager_mode(model)


GLOBAL = SimpleNamespace(value=2.0)


def times_held(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) * self.held.value


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Layer(times_held) for _ in range(3))
        for layer in self.inner:
            layer.held = GLOBAL  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = layer(x)
        return x


@pytest.mark.parametrize("place", range(3))
def test_an_object_that_a_global_holds_too(place: int) -> None:
    """Dynamo has no guard that says so of a module's object and a global's."""

    class Scaled(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * GLOBAL.value)

    model = Scaled(linear)
    model.layers = nn.ModuleList(Outer() for _ in range(5))
    model.layers[3].inner[place].held = SimpleNamespace(value=7.0)
    x = torch.linspace(-1, 1, 12).view(3, 4)
    torch.testing.assert_close(compiled(model)(x), model(x), rtol=0, atol=0)


def test_a_container_of_numbers_that_changes() -> None:
    """Not of layers: Dynamo's deque raises where it is asked for its value while it holds a symbol."""
    model = Model(lambda self, x: x * self.values[0])
    for layer in model.layers:
        layer.values = deque([1.0])
    program, x = compiled(model), torch.ones(3, 4)
    for value in (1.0, 2.0, 3.0):
        model.layers[3].values = deque([value])
        torch.testing.assert_close(program(x), model(x), rtol=0, atol=0)
