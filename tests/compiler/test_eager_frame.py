"""The program of a frame runs in eager mode from inside the frame's compiled code, with the frame's arguments."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from fxpasses.compiler.eager_frame import eager_frame

X, Y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])


def takes_arguments(x: Tensor, /, y: Tensor, scale: int = 2) -> Tensor:
    return x * scale + y


def takes_keywords(x: Tensor, *, y: Tensor, scale: int = 3) -> Tensor:
    return x * scale - y


def takes_any(*tensors: Tensor, **more: Tensor) -> Tensor:
    return tensors[0] * 2 + more["y"]


def assigns(x: Tensor, y: Tensor) -> Tensor:
    x = x * 2
    y, x = x + 1, y
    return [x * scale + y for scale in (2, 3)][1]


def encloses(x: Tensor, y: Tensor) -> Tensor:
    scaled = lambda: x * 2  # noqa: E731
    return scaled() + y


def from_outside() -> Callable[..., Tensor]:
    scale = torch.tensor(4.0)
    return lambda x, y: x * scale + y


class Model(torch.nn.Linear):
    def forward(self, input: Tensor, y: Tensor) -> Tensor:
        return super().forward(input) + y


def again(program: Any, *inputs: Any, code: CodeType | None = None, **keywords: Any) -> tuple[Any, list[Any]]:
    """What the compiled `program` returns, and what its frames do when they start again in their graphs."""
    found: list[Any] = []
    own = code or getattr(program, "forward", program).__code__

    def backend(gm: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            frame = eager_frame(own)
            found.append(frame and frame())
            return gm(*inputs)

        return run

    return torch.compile(program, backend=backend)(*inputs, **keywords), found


@pytest.mark.parametrize("program", [takes_arguments, assigns, encloses, from_outside(), Model(2, 2)])
def test_a_frame_starts_again_with_its_arguments(program: Any) -> None:
    result, found = again(program, X, Y)
    torch.testing.assert_close(found, [result])


@pytest.mark.parametrize("program", [takes_keywords, takes_any])
def test_a_frame_starts_again_with_its_keywords(program: Any) -> None:
    result, found = again(program, X, y=Y)
    torch.testing.assert_close(found, [result])


def test_nothing_is_compiled_of_a_frame_that_starts_again() -> None:
    torch._dynamo.utils.counters.clear()
    again(takes_arguments, X, Y)
    assert torch._dynamo.utils.counters["frames"]["total"] == 1


def test_no_frame_is_found_for_other_code_nor_outside_of_a_frame() -> None:
    _, found = again(takes_arguments, X, Y, code=assigns.__code__)
    assert found == [None]
    assert eager_frame(takes_arguments.__code__) is None
    assert eager_frame(None) is None
