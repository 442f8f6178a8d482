"""Equal layers are traced once: the graph, its guards and its places are those of tracing each, and so are results."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.output_graph import OutputGraph
from torch._inductor import config as inductor_config
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from fxpasses.dynamo.rules.equal_layers import Layers
from tests.support import compiled

pytestmark = pytest.mark.usefixtures("capture_flags")
N = 4  # layers


@dataclass
class Seen:
    """What Dynamo has made of a program, without the numbers in names."""

    code: str
    guards: set[tuple[str, str]]
    places: list[Any]


@dataclass
class Traces:
    seen: list[Seen] = field(default_factory=list)
    copies: int = 0


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Traces:
    found = Traces()
    compile_graph, copied = OutputGraph.compile_and_call_fx_graph, Layers.copied

    def note(self: Any, *given: Any, **named: Any) -> Any:
        found.seen.append(_seen(self))
        return compile_graph(self, *given, **named)

    def count(self: Any, call: Any) -> Any:
        result = copied(self, call)
        found.copies += result is not None
        return result

    monkeypatch.setattr(OutputGraph, "compile_and_call_fx_graph", note)
    monkeypatch.setattr(Layers, "copied", count)
    return found


def _seen(output: Any) -> Seen:
    bodies = [node for gm in output.nn_modules.values() if isinstance(gm, GraphModule) for node in gm.graph.nodes]
    nodes = [*output.graph.nodes, *bodies]
    numbers = {node: f"%{place}" for place, node in enumerate(nodes)}
    lines = []
    for node in nodes:
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda operand: numbers[operand])
        target = re.sub(r"_\d+$", "", str(node.target))
        lines.append(f"{node.op} {target} {arguments} {value_of(node)}")
    guards = {(guard.create_fn_name(), re.sub(r"_\d+|0x\w+", "", _name(guard))) for guard in output.guards}
    guards = {(kind, name) for kind, name in guards if "type(" not in name}  # of classes: one for all of its objects
    places = [(node.meta.get("nn_module_stack"), node.meta.get("stack_trace")) for node in nodes]
    return Seen("\n".join(lines), guards, places)


def value_of(node: Any) -> str:
    """An example; gradient functions are not those of the operators in copies."""
    return re.sub(r",\s+grad_fn=<\w+>", ", grad_fn", str(node.meta.get("example_value")))


def _name(guard: Any) -> str:
    name = guard.originating_source.name
    return name() if callable(name) else name


class Layer(nn.Module):
    def __init__(self, place: int = 0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.place, self.scale = place, 0.5

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x)))) * self.scale
        return x + (y if mask is None else y * mask)


class Model(nn.Module):
    layers: Any
    level: float

    def __init__(self, layers: Sequence[nn.Module], call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.call = call

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        x = x * 2
        for place, layer in enumerate(self.layers):
            x = layer(x, mask) if self.call is None else self.call(self, layer, place, x, mask)
        return x


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 3, 8, requires_grad=True), torch.rand(2, 3, 1)


def assert_as_traced(model: nn.Module, traces: Traces, monkeypatch: pytest.MonkeyPatch, copies: int) -> None:
    """Results, gradients, graph, guards and places are those of a trace of all layers, and `copies` were copied."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    has_shared_modules = len(names) > len(list(model.modules()))
    runs = []
    for is_on in (True, False):
        torch._dynamo.reset()
        traces.seen.clear()
        with monkeypatch.context() as patch:
            if not is_on:
                patch.setattr(Layers, "may_copy", lambda *given: False)
            results = gradients_of(compiled(model))
        runs.append((results, traces.copies, list(traces.seen)))
    (ours, copied, seen), (_, _, expected) = runs
    torch.testing.assert_close(ours, gradients_of(model), rtol=0, atol=0)
    assert copied == copies
    assert [each.code for each in seen] == [each.code for each in expected]
    assert [each.places for each in seen] == [each.places for each in expected]
    if not has_shared_modules:  # whose guards Dynamo has under their first name alone
        assert [each.guards for each in seen] == [each.guards for each in expected]


def gradients_of(model: Callable[..., Any]) -> list[Any]:
    x, mask = inputs()
    own: Any = getattr(model, "_orig_mod", model)
    needed = [x, *(parameter for parameter in own.parameters() if parameter.requires_grad)]
    torch.manual_seed(1)
    Counting.counts["n"], STEP["n"] = 0, 1
    result = torch.utils._pytree.tree_leaves(model(x, mask))
    loss: Any = sum(value.square().sum() for value in result if isinstance(value, Tensor))
    return [loss.detach(), *torch.autograd.grad(loss, needed, allow_unused=True)]


# Layers that are copied


class WithDropout(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + F.dropout(self.down(self.up(x).relu()), 0.5, self.training)


class WithViews(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.up(x)
        y[..., :4].add_(1)
        return x + y[..., :8].flatten(0, 1).view_as(x) * y[..., 8:]


class LeavingParts(Layer):
    """Autograd refuses to tell of parts of a tensor that was written to."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = torch.stack([self.norm(x), x])
        left, right = y.unbind(0)
        total = left.sum() + right.sum()
        return x + y.mul_(0.5)[0] * total


class OfParts(Layer):
    """Its views are of an argument, and of what it returns."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        left, right = x.chunk(2, dim=-1)
        y = self.norm(torch.cat([right, left], -1))
        return y, y.flatten(0, 1)[:, 1:], y.expand_as(x).to(x.dtype)


class WithBuffer(Layer):
    table: Tensor

    def __init__(self, place: int = 0) -> None:
        super().__init__(place)
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) + self.table * 0.1


class Nested(nn.Module):
    """A list in a layer: its modules are copied as well, and with the layer again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.inner:
            x = layer(x, mask=mask)
        return x


class NestedByPlace(Nested):
    """It differs from its likes, and what is in it does not."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x * self.place, mask)


class Returning(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return super().forward(x), None, x


class Switching(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            scale = self.scale * x.mean()
        return super().forward(x) * scale


class Casting(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.up(x)
            with torch.autocast("cpu", enabled=False):
                y = y.float() * 2
        return x + self.down(y)


def with_tuples(model: Model, layer: nn.Module, place: int, x: Tensor, mask: Tensor | None) -> Tensor:
    y, _, x = layer(x)
    return y + x


def writing_to_parts(model: Model, layer: nn.Module, place: int, x: Tensor, mask: Tensor | None) -> Tensor:
    y, part, whole = layer(x)
    part.mul_(2)
    whole[0].add_(1)
    x.mul_(3)
    return y * x


def alternating(model: Model, layer: nn.Module, place: int, x: Tensor, mask: Tensor | None) -> Tensor:
    assert mask is not None
    return layer(x, mask if place % 2 else mask + 1)


def collecting(model: Model, layer: nn.Module, place: int, x: Tensor, mask: Tensor | None) -> Tensor:
    seen = [x]
    seen.append(layer(x, mask))
    return seen[-1]


class Checkpointed(Layer):
    """As transformers does it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(super().__call__, **kwargs), *args, use_reentrant=False)


class CheckpointInside(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + checkpoint(lambda y: self.down(self.up(y).relu()), F.dropout(x, 0.5), use_reentrant=False)


def checkpointing(model: Model, layer: nn.Module, place: int, x: Tensor, mask: Tensor | None) -> Tensor:
    return checkpoint(layer, x, mask, use_reentrant=False)


def tied() -> list[nn.Module]:
    layers = [Layer() for _ in range(N)]
    for layer in layers:
        layer.norm = layers[0].norm
        layer.up.weight = layers[0].up.weight
    return list(layers)


# Torch 2.11 follows a loop over a list of modules by comparing objects, so only what is in it is copied.
_NESTED = N if torch.__version__ >= "2.12" else 2 * N - 1
COPIED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "equal": (lambda: Model([Layer() for _ in range(N)]), N - 1),
    "sequence": (lambda: Wrapped(nn.Sequential(*(Layer() for _ in range(N)))), N - 1),
    "an index that nothing reads": (lambda: Model([Layer(place) for place in range(N)]), N - 1),
    "dropout": (lambda: Model([WithDropout() for _ in range(N)]), N - 1),
    "views and writes": (lambda: Model([WithViews() for _ in range(N)]), N - 1),
    "writes to views, by its caller": (lambda: Model([OfParts() for _ in range(N)], writing_to_parts), N - 1),
    "buffers": (lambda: Model([WithBuffer() for _ in range(N)]), N - 1),
    "nested": (lambda: Model([Nested() for _ in range(N)]), _NESTED),
    "in layers that differ": (lambda: Model([NestedByPlace(place) for place in range(N)]), 2 * N - 1),
    "tuples": (lambda: Model([Returning() for _ in range(N)], with_tuples), N - 1),
    "masks that alternate": (lambda: Model([Layer() for _ in range(N)], alternating), N - 2),
    "a list of the loop's": (lambda: Model([Layer() for _ in range(N)], collecting), N - 1),
    "checkpoints": (lambda: Model([Checkpointed() for _ in range(N)]), N - 1),
    "checkpoints inside": (lambda: Model([CheckpointInside() for _ in range(N)]), N - 1),
    "checkpoints around": (lambda: Model([Layer() for _ in range(N)], checkpointing), N - 1),
    "checkpoints twice": (lambda: Model([Checkpointed() for _ in range(N)], checkpointing), N - 1),
    "tied": (lambda: Model(tied()), N - 1),
    "gradients off inside": (lambda: Model([Switching() for _ in range(N)]), N - 1),
    "autocast inside": (lambda: Model([Casting() for _ in range(N)]), N - 1),
    "parts left behind": (lambda: Model([LeavingParts() for _ in range(N)]), N - 1),
    "two kinds": (lambda: Model([Layer() if i % 2 else WithDropout() for i in range(2 * N)]), 2 * N - 2),
}


class Wrapped(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.layers(x * 2)


@pytest.mark.parametrize("name", COPIED)
def test_equal_layers_are_copied(name: str, traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    make, copies = COPIED[name]
    torch.manual_seed(0)
    assert_as_traced(make(), traces, monkeypatch, copies)


# Layers that differ


class ByPlace(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) if self.place % 2 else x.sin()


class Counting(Layer):
    counts = {"n": 0}

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.counts["n"] += 1
        return super().forward(x) * self.counts["n"]


class Marking(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.done = True
        return super().forward(x)


class Drawing(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) * random.uniform(1, 1)


class ReadingGlobal(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) * STEP["n"]


class ReadingOwner(Layer):
    owner: list[Any]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) * self.owner[0].level


STEP = {"n": 1}


def stepping(model: Model, layer: nn.Module, place: int, x: Tensor, mask: Tensor | None) -> Tensor:
    STEP["n"] = place + 1
    return layer(x)


def levels(model: Model, layer: nn.Module, place: int, x: Tensor, mask: Tensor | None) -> Tensor:
    model.level = place + 1.0
    return layer(x)


def growing(model: Model, layer: nn.Module, place: int, x: Tensor, mask: Tensor | None) -> Tensor:
    x = torch.cat([x, x[:, :1]], 1) if place % 2 else x
    return layer(x)


def partly_frozen(model: Model, layer: nn.Module, place: int, x: Tensor, mask: Tensor | None) -> Tensor:
    with torch.set_grad_enabled(place > 1):
        return layer(x)


def lists(model: Model, layer: nn.Module, place: int, x: Tensor, mask: Tensor | None) -> Tensor:
    seen: list[Tensor] = []
    layer(x, seen)
    return seen[0]


class Filling(Layer):
    def forward(self, x: Tensor, seen: Any = None) -> Tensor:
        seen.append(super().forward(x))
        return x


def changed(change: Callable[[Any], object], *places: int) -> Callable[[], Model]:
    def make() -> Model:
        layers = [Layer() for _ in range(N)]
        for place in places:
            change(layers[place])
        return Model(layers)

    return make


def widen(layer: Layer) -> None:
    layer.up, layer.down = nn.Linear(8, 32), nn.Linear(32, 8)


def owned() -> Model:
    model = Model([ReadingOwner() for _ in range(N)], levels)
    for layer in model.layers:
        layer.owner = [model]
    return model


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "an index that decides": (lambda: Model([ByPlace(place) for place in range(N)]), 0),
    "a constant of one": (changed(lambda layer: setattr(layer, "scale", 0.25), 1), N - 2),
    "a flag of one": (changed(lambda layer: layer.norm.eval(), 1), N - 1),  # which a norm does not read
    "a dtype's twin": (changed(lambda layer: setattr(layer, "scale", 1), 2), N - 2),
    "a hook": (changed(lambda layer: layer.up.register_forward_hook(lambda *given: given[2] * 2), 2), N - 2),
    "a hook of the first": (changed(lambda layer: layer.register_forward_pre_hook(lambda m, a: (a[0] * 2,)), 0), N - 2),
    "no bias": (changed(lambda layer: layer.up.register_parameter("bias", None), 1), N - 2),
    "frozen": (changed(lambda layer: layer.up.weight.requires_grad_(False), 0, 2), N - 2),
    "another module": (changed(lambda layer: setattr(layer, "norm", nn.Identity()), 1), N - 2),
    "its own forward": (changed(lambda layer: setattr(layer, "forward", lambda x, mask: x * 2), 1), N - 2),
    "a wider one": (changed(widen, 1), N - 2),
    "a count": (lambda: Model([Counting() for _ in range(N)]), 0),
    "a mark": (lambda: Model([Marking() for _ in range(N)]), 0),
    "a list that is filled": (lambda: Model([Filling() for _ in range(N)], lists), 0),
    "the loop's index": (lambda: Model([Layer() for _ in range(N)], lambda m, layer, i, x, _: layer(x, mask=i)), 0),
    "a global that changes": (lambda: Model([ReadingGlobal() for _ in range(N)], stepping), 0),
    "an attribute that changes": (owned, 0),
    "other sizes": (lambda: Model([Layer() for _ in range(N)], growing), N - 3),
    "other modes": (lambda: Model([Layer() for _ in range(N)], partly_frozen), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_layers_that_differ_are_traced(name: str, traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    make, copies = DIFFERENT[name]
    torch.manual_seed(0)
    assert_as_traced(make(), traces, monkeypatch, copies)


def test_parameters_that_are_constants_are_traced(traces: Traces) -> None:
    model = Model([Layer() for _ in range(N)]).eval()
    with torch.no_grad(), inductor_config.patch(freezing=True):  # Dynamo asks for the process's setting
        given = inputs()
        torch.testing.assert_close(compiled(model)(*given), model(*given), rtol=0, atol=0)
    assert traces.copies == 0


def test_a_number_of_each_layer_that_changes_in_each_step(traces: Traces) -> None:
    """It becomes an input of the graph after the first change, as it does where each layer is traced."""
    model = Model([Layer() for _ in range(N)])
    run = compiled(model)
    for level in (0.5, 0.4, 0.3, 0.2):
        for layer in model.layers:
            layer.scale = level
        torch.testing.assert_close(gradients_of(run), gradients_of(model), rtol=0, atol=0)
    assert len(traces.seen) == 2


def test_a_layer_that_changes_later_is_compiled_again() -> None:
    model: Any = Model([Layer() for _ in range(N)])
    program = compiled(model)
    for change in (
        lambda: None,
        lambda: setattr(model.layers[2], "scale", 0.125),
        lambda: model.layers[3].up.weight.requires_grad_(False),
        lambda: setattr(model.layers[3].up, "bias", None),
    ):
        change()
        torch.testing.assert_close(gradients_in(program, model), gradients_in(model, model), rtol=0, atol=0)


def gradients_in(program: Callable[..., Any], model: nn.Module) -> list[Any]:
    x, mask = inputs()
    loss = program(x, mask).square().sum()
    needed = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    return [loss.detach(), *torch.autograd.grad(loss, needed)]


@pytest.fixture(autouse=True)
def seeds() -> Iterator[None]:
    random.seed(0)
    yield
