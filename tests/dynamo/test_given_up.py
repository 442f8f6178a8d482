"""A frame whose capture is given up although it reads its batch says so, once, and why."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

from tests.support import compiled

BATCH = torch.randn(6, 4, requires_grad=True), torch.tensor([3, 2])


def warnings_of(program: Callable[..., Any], *batch: Any) -> list[str]:
    """What is said in two steps; the results are those of eager mode."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = compiled(program)
        for _ in range(2):
            assert torch.equal(step(*batch), program(*batch))
    return [str(warning.message) for warning in caught if "capture was given up" in str(warning.message)]


def breaks_in_a_checkpoint(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    def layer(x: torch.Tensor) -> torch.Tensor:
        x = x[: lengths.max().item()] * lengths.sum().item()
        torch._dynamo.graph_break()
        return x.sin()

    for _ in range(2):
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def asks_activations_in_a_loop(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    x = x[: lengths.max().item()]
    for limit in range(3):
        if (x.sum() > limit).item():
            x = x + 1
    return x


def reads_nothing(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x * lengths.sum()
        torch._dynamo.graph_break()
    return x


def breaks_between_layers(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    x = x[: lengths.max().item()].sin()
    torch._dynamo.graph_break()
    return x[: lengths.min().item()].cos()


@pytest.mark.parametrize(
    ("program", "numbers", "reason"),
    [
        (breaks_in_a_checkpoint, "2 numbers", "graph_break"),
        (asks_activations_in_a_loop, "1 number", "Data-dependent branching"),
    ],
)
def test_the_frame_the_numbers_and_the_reason_are_named_once(program: Any, numbers: str, reason: str) -> None:
    (said,) = warnings_of(program, *BATCH)
    assert f"given up for {program.__name__} (" in said and f"reads {numbers} of its batch" in said and reason in said


@pytest.mark.parametrize("program", [reads_nothing, breaks_between_layers])
def test_nothing_is_said_where_nothing_is_lost(program: Any) -> None:
    assert warnings_of(program, *BATCH) == []


def test_a_wrong_option_says_what_is_wrong_and_nothing_else() -> None:
    with warnings.catch_warnings(), pytest.raises(BackendCompilerFailed, match="unknown option"):
        warnings.simplefilter("error")
        compiled(breaks_between_layers, nonsense=1)(*BATCH)


def test_an_assertion_that_cannot_be_built_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch raises as it puts the assertion of `h / w > 1` into the graph, if `dynamo/hints.py` does not divide."""
    monkeypatch.setattr("fxpasses.dynamo.hints.Proxy", type(None))

    def program(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        height, width = lengths.tolist()
        return x * 2 if height / width > 1 else x + 1

    (said,) = warnings_of(program, *BATCH)
    assert "symbolically traced variables" in said
