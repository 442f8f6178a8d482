"""Programs in which a dead row matters, or looks as if it could, give what eager mode gives, packed or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxpasses.rows import choice
from tests.rows.decoys import DECOYS, Model
from tests.rows.models import batch
from tests.support import compiled

BATCHES = [batch(9, 4, 2, tokens=9), batch(3, 7, 1, tokens=8, left=True), batch(2, 5, tokens=11)]


def step(run: Any, model: Model, inputs: Any) -> dict[str, Any]:
    """What a training step returns, its gradients and its buffers."""
    model.zero_grad()
    returned = run(*[tensor.clone() for tensor in inputs])
    returned = returned if isinstance(returned, tuple) else (returned,)
    returned[0].sum().backward()
    found = {f"output {at}": value for at, value in enumerate(returned)}
    found |= {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def check(end: Callable[..., Any], batches: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Model(end).double()
    packed = Model(end).double()
    packed.load_state_dict(eager.state_dict())
    compiled_model = compiled(packed, rows="auto", dynamic=True)
    for at, inputs in enumerate(batches):
        torch.manual_seed(at)
        expected = step(eager, eager, inputs)
        torch.manual_seed(at)
        actual = step(compiled_model, packed, inputs)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.quick(24)
@pytest.mark.parametrize("name", DECOYS)
def test_decoys_are_eager_modes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "MOST_LIVE", 10.0)  # each is packed if any of its rows is
    check(DECOYS[name], BATCHES)


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", ["mean_of_tokens", "texts_against_each_other", "first_token_expanded", "tied_weights"])
@pytest.mark.parametrize(
    "batches",
    [[batch(5, tokens=7), batch(3, tokens=6)], [batch(1, 1, tokens=1), batch(1, 1, 1, tokens=1)],
     [batch(1, tokens=1)], [batch(5, 2, 3, 1, 4, tokens=5), batch(3, 2, 1, tokens=3)],
     [batch(8, 3, 4, tokens=8), batch(2, 3, 1, tokens=8)]],
    ids=["one text", "one token", "both", "as many texts as tokens", "as many tokens as features"],
)  # fmt: skip
def test_decoys_of_sizes_that_are_alike(name: str, batches: Any) -> None:
    check(DECOYS[name], batches)
