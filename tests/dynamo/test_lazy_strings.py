"""f-strings with sizes: a string that nobody reads fixes no size, and one that is read is eager mode's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fxpasses.inspect
from tests.support import compiled

pytestmark = pytest.mark.usefixtures("capture_flags")


def check(condition: Any, text: str) -> None:
    """As transformers checks that there are as many features as tokens of images."""
    if torch.compiler.is_compiling():
        torch._check(condition)
    elif not condition:
        raise ValueError(text)


def checked(x: Tensor) -> tuple[Tensor, str]:
    tokens = (x > 0).sum()
    check(x.numel() == x.shape[0] * 2, f"tokens: {tokens}, features: {x.shape[0]:>4} {'of'} {x.shape[1]!r}")
    return x.sin(), ""


def looked_up(x: Tensor) -> tuple[Tensor, str]:
    found = {f"{x.shape[0]} of {x.shape[1]}": 3.0}
    return x * found[f"{x.shape[0]} of {x.shape[1]}"], f"{x.shape[0] + 1} {x.shape[0]:>3}"


def broken(x: Tensor) -> tuple[Tensor, str]:
    text = f"{x.shape[0]} rows"
    torch._dynamo.graph_break()
    return x * len(text), text + f", {x.shape[0]}"


@pytest.mark.parametrize("program", [checked, looked_up, broken])
def test_only_a_string_that_is_read_fixes_sizes(program: Any) -> None:
    step = compiled(program, "aot_eager", dynamic=None)
    with fxpasses.inspect.record() as record:
        for rows in (4, 5, 6, 12):
            x = torch.linspace(-1, 1, 2 * rows).view(rows, 2)
            (result, text), (expected, expected_text) = step(x), program(x)
            assert torch.equal(result, expected) and text == expected_text
    assert (len(record.graphs) == 2) == (program is checked)
