"""Random stacks of layers that are equal or differ in one thing: as in eager mode, also after one has changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpasses.dynamo.rules.equal_layers import Layers
from tests.support import compiled

pytestmark = pytest.mark.usefixtures("capture_flags")
GLOBAL = {"scale": 1.5}
Step = Callable[[Any, Tensor, Tensor], Tensor]


def by_place(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    return x.sin() if self.place % 3 == 0 else x.cos()


def counting(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    self.count += 1
    return x * self.count


def switching(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    with torch.set_grad_enabled(self.flag):
        y = x * self.scale
    return x + y


def viewing(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    a, b = self.up(x).chunk(2, -1)
    return x + F.linear(a * b.sigmoid(), self.weight)


STEPS: list[Step] = [
    lambda self, x, mask: x + self.lin(x) * self.scale,
    lambda self, x, mask: x.sin() if self.flag else x.cos(),
    lambda self, x, mask: x * len(self.items),
    lambda self, x, mask: x * self.table.get("a", 2.0),
    lambda self, x, mask: x + self.table.get("b", 0.5),
    lambda self, x, mask: F.layer_norm(x, (4,), self.norm.weight, self.norm.bias),
    lambda self, x, mask: x + self.shared(x),
    lambda self, x, mask: x * mask if self.flag else x - mask,
    lambda self, x, mask: x * GLOBAL["scale"],
    lambda self, x, mask: x + self.buffer,
    lambda self, x, mask: x * (2 if self.optional is None else 1),
    lambda self, x, mask: x * (2 if self.lin is self.shared else 1),
    lambda self, x, mask: F.gelu(x).clamp(max=3.0),
    viewing, by_place, counting, switching,
]  # fmt: skip
RARE = (11, 14, 15, 16)  # steps that no copy may have


class Layer(nn.Module):
    buffer: Tensor

    def __init__(self, steps: list[Step], place: int, shared: nn.Module, draw: random.Random) -> None:
        super().__init__()
        self.steps, self.place = steps, place
        self.lin, self.norm, self.up = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 8)
        self.weight = nn.Parameter(torch.eye(4))
        self.shared = shared if draw.random() < 0.5 else nn.Linear(4, 4)
        self.register_buffer("buffer", torch.full((4,), float(place)))
        self.scale, self.flag, self.items = 0.5, True, [1, 2]
        self.table: dict[str, float] = {"a": 1.0}
        self.optional: float | None = None
        self.count = 0
        if draw.random() < 0.3:
            change(self, draw)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for step in self.steps:
            x = step(self, x, mask)
        return x


def change(layer: Any, draw: random.Random) -> None:
    """Make one thing different."""
    what = draw.randrange(9)
    if what == 0:
        layer.scale = draw.choice([0.25, 1, 1.0])
    elif what == 1:
        layer.flag = not layer.flag
    elif what == 2:
        layer.items = [*layer.items, 3]
    elif what == 3:
        layer.table = {**layer.table, draw.choice("ab"): 3.0}
    elif what == 4:
        layer.lin.weight.requires_grad_(not layer.lin.weight.requires_grad)
    elif what == 5:
        layer.optional = 1.0
    elif what == 6:
        layer.lin.bias = None
    elif what == 7:
        layer.shared = nn.Linear(4, 4)
    else:
        layer.norm = nn.LayerNorm(4, elementwise_affine=True, eps=1e-3)


class Stack(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        common = [step for place, step in enumerate(STEPS) if place not in RARE]
        recipes = [draw.sample(common, draw.randrange(1, 5)) for _ in range(draw.randrange(1, 3))]
        for recipe in recipes:
            if draw.random() < 0.3:
                recipe.append(STEPS[draw.choice(RARE)])
        self.layers = nn.ModuleList(
            Layer(draw.choice(recipes), place, shared, draw) for place in range(draw.randrange(3, 7))
        )
        self.is_checkpointed = draw.random() < 0.3 and not any(counting in recipe for recipe in recipes)
        self.changes_global = draw.random() < 0.1
        self.alternates = draw.random() < 0.3

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x * 2
        for place, layer in enumerate(self.layers):
            if self.changes_global:
                GLOBAL["scale"] = place + 0.5
            own = mask + 1 if self.alternates and place % 2 else mask
            x = checkpoint(layer, x, own, use_reentrant=False) if self.is_checkpointed else layer(x, own)
        return x


def outcome(program: Callable[..., Any], model: nn.Module) -> list[Any]:
    GLOBAL["scale"] = 1.5
    x, mask = torch.linspace(-1, 1, 24).view(2, 3, 4).requires_grad_(), torch.ones(2, 3, 1)
    result = program(x, mask)
    needed = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    gradients = torch.autograd.grad(result.square().sum(), needed, allow_unused=True)
    return [result.detach(), *gradients, *(layer.count for layer in model.layers)]  # type: ignore[union-attr]


def run(seed: int) -> None:
    """Compare one stack."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    torch._dynamo.reset()
    model: Any = Stack(draw)
    eager = copy.deepcopy(model)
    program = compiled(model)
    for _ in range(3):
        expected, actual = outcome(eager, eager), outcome(program, model)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        place, seed_of_change = draw.randrange(len(model.layers)), draw.random()
        for each in (model, eager):
            torch.manual_seed(seed)
            change(each.layers[place], random.Random(seed_of_change))


class Copies:
    found = 0


@pytest.fixture(autouse=True)
def counting_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Layers.copied

    def count(self: Any, call: Any) -> Any:
        result = copied(self, call)
        Copies.found += result is not None
        return result

    monkeypatch.setattr(Layers, "copied", count)
    Copies.found = 0


@pytest.mark.parametrize("part", range(40))
def test_random_stacks(part: int) -> None:
    """Five each. In most, layers are copied."""
    for seed in range(part * 5, part * 5 + 5):
        run(seed)
    assert Copies.found > 3 or part != 0
