"""LoRA on parameters (PEFT's `target_parameters`) is one graph, with eager mode's numbers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.support import compiled

peft = pytest.importorskip("peft")

EXPERTS, WIDTH, HIDDEN = 4, 8, 12


class Experts(nn.Module):
    """As the mixtures of transformers: the weights of all experts in one parameter, [E, out, in]."""

    breaks = False

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            (rows,) = torch.where(chosen == expert)
            if self.breaks:
                torch._dynamo.graph_break()
            y = F.linear(F.linear(x[rows], self.up[expert]).sin(), self.down[expert])
            out = out.index_add(0, rows, y)
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x, self.router(x).argmax(-1))


class Model(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers, self.checkpoints = nn.ModuleList(Layer() for _ in range(2)), checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x.square().mean()


def adapted(model: nn.Module, *more: str, **options: Any) -> Any:
    options = {"r": 2, "target_modules": [], "target_parameters": ["experts.up", "experts.down"]} | options
    model = peft.get_peft_model(model.double(), peft.LoraConfig(**options))
    for name in more:
        model.add_adapter(name, peft.LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    return model


def found(step: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = step(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_eager_modes(model: nn.Module) -> None:
    torch._dynamo.reset()
    counters.clear()
    step = compiled(model)
    for _ in range(2):
        x = torch.randn(16, WIDTH, dtype=torch.float64)
        expected = found(model, model, x)
        assert len(expected) > 1
        torch.testing.assert_close(found(step, model, x), expected, rtol=1e-9, atol=1e-9)
    for module in model.modules():
        assert not parametrize.is_parametrized(module)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_one_graph(checkpoints: bool) -> None:
    torch.manual_seed(0)
    assert_eager_modes(adapted(Model(checkpoints)))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_trained_weights_beside_the_adapter() -> None:
    torch.manual_seed(0)
    model = adapted(Model())
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    assert_eager_modes(model)
    assert not counters["graph_break"]


def test_an_adapter_that_is_switched_off() -> None:
    torch.manual_seed(0)
    model = adapted(Model())
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    with model.disable_adapter():
        assert_eager_modes(model)
    assert_eager_modes(model)


@pytest.mark.slow
def test_a_break_inside_of_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(Experts, "breaks", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of graph breaks
        assert_eager_modes(adapted(Model()))
    assert counters["graph_break"]


def test_only_the_wrapper_is_compiled_around_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame that breaks is the one that has adapted the parameter."""
    torch.manual_seed(0)
    monkeypatch.setattr(Experts, "breaks", True)
    model = adapted(Model())
    for layer in model.base_model.model.layers:
        assert type(layer.experts).__name__ == "ParamWrapper"
        layer.experts.compile(backend="fastpack", options={"fastpack.lowering": "eager"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.randn(16, WIDTH, dtype=torch.float64)
        actual = found(model, model, x)
    for layer in model.base_model.model.layers:
        layer.experts._compiled_call_impl = None
    torch.testing.assert_close(actual, found(model, model, x), rtol=1e-9, atol=1e-9)


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_other_parametrizations_stay_dynamos() -> None:
    """One that is registered while it is compiled, and stays."""
    linear = nn.Linear(4, 4)
    expected = linear(torch.ones(2, 4)) * 2 - linear.bias

    def step(x: Tensor) -> Tensor:
        parametrize.register_parametrization(linear, "weight", _Doubled())
        return linear(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(compiled(step)(torch.ones(2, 4)), expected)
    assert parametrize.is_parametrized(linear, "weight")
