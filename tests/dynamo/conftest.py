"""How a program is compiled and run, and its values and gradients compared with eager mode's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.config as config
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from fxpasses import fastpack_backend
from fxpasses.dynamo import flags, retracing

Program = Callable[..., Any]
Check = Callable[[Program, Any], None]


def marked_backend(lowering: str) -> Callable[..., Any]:
    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return torch._dynamo.lookup_backend(lowering)(gm, example_inputs)

    backend._is_fastpack = True  # type: ignore[attr-defined]
    return backend


def run(function: Program, metadata: Any) -> list[Any]:
    """The results, and the gradient of the sum of all that have one."""
    x = torch.linspace(-1, 2, 24).view(6, 4).requires_grad_()
    results = tree_leaves(function(x, torch.tensor(metadata)))
    differentiable = [result.float().sum() for result in results if isinstance(result, Tensor) and result.requires_grad]
    return [*results, *torch.autograd.grad(sum(differentiable), x)]


def assert_same(results: list[Any], expected: list[Any]) -> None:
    for result, value in zip(results, expected, strict=True):
        assert type(result) is type(value)
        torch.testing.assert_close(result, value)


def compiled_in(way: str, function: Program) -> Program:
    if way == "fastpack":
        return torch.compile(function, backend=fastpack_backend, options={"fastpack.lowering": "eager"})
    return torch.compile(function, backend=marked_backend(way))


@pytest.fixture
def capture() -> Iterator[None]:
    """The flags are on, and frames that fail because of them are traced again."""
    assert retracing.install()
    with flags.scoped():
        yield


@pytest.fixture
def backend_of() -> Callable[[str], Callable[..., Any]]:
    """A backend that is marked as this package's and lowers with the one named."""
    return marked_backend


@pytest.fixture
def check_stock() -> Check:
    """Stock, with the flags off, gives what eager mode gives."""

    def check(function: Program, metadata: Any) -> None:
        with config.patch(dict.fromkeys(flags.FLAGS, False)):
            assert_same(run(torch.compile(function, backend="eager"), metadata), run(function, metadata))

    return check


@pytest.fixture(params=["eager", "aot_eager", "fastpack"])
def check_capturing(request: pytest.FixtureRequest, capture: None) -> Check:
    """So does a backend that is marked as this package's, with the flags on, at the first call and the second."""

    def check(function: Program, metadata: Any) -> None:
        compiled = compiled_in(request.param, function)
        expected = run(function, metadata)
        for _ in range(2):
            assert_same(run(compiled, metadata), expected)

    return check
