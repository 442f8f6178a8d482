"""BigBird's random blocks, drawn by NumPy from a constant seed, are constants of one graph."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from fxpasses.inspect import record
from tests.support import compiled, thorough

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 128, "block_size": 4, "num_random_blocks": 1, "attention_type": "block_sparse",
}  # fmt: skip


def model_of(checkpointed: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.BigBirdConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BigBirdForMaskedLM(config).train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    return model


def step(model: Any, program: Any, ids: Tensor) -> tuple[dict[str, Tensor], Any, Any]:
    """Loss and gradients, and NumPy's state after forward and after backward."""
    model.zero_grad()
    numpy.random.seed(7)
    loss = program(input_ids=ids, labels=ids).loss
    forward = numpy.random.random()
    if loss.requires_grad:
        loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}, forward, numpy.random.random()


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "checkpointed"]
)
def test_blocks_are_those_of_eager_mode(checkpointed: bool) -> None:
    """Stock PyTorch: 30 graphs, and other blocks, because it seeds PyTorch's generator instead of NumPy's."""
    model = model_of(checkpointed)
    program = compiled(model, "aot_eager")
    with record() as seen:
        for number in range(2):
            ids = torch.randint(32, (2, 32), generator=torch.Generator().manual_seed(number))
            expected, after_forward, after_backward = step(model, model, ids)
            found, *states = step(model, program, ids)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            assert states[0] == after_forward
            assert checkpointed or states[1] == after_backward
    assert len(seen.graphs) == 1


def test_evaluation_draws_nothing() -> None:
    model = model_of(False).eval()
    ids = torch.randint(32, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), record() as seen:
        expected = step(model, model, ids)
        assert step(model, compiled(model, "aot_eager"), ids) == expected
    assert len(seen.graphs) == 1


@thorough
@pytest.mark.slow
def test_other_lengths_are_eager_modes_too() -> None:
    """A symbolic length breaks the graph, as under stock PyTorch, and the blocks are those of eager mode."""
    model = model_of(False)
    program = compiled(model, "aot_eager")
    for length in (48, 32, 40):
        ids = torch.randint(32, (1, length), generator=torch.Generator().manual_seed(length))
        expected, found = step(model, model, ids)[0], step(model, program, ids)[0]
        unused = [found.pop(name) for name in found.keys() - expected.keys()]  # None in eager mode, as in stock PyTorch
        assert not any(value.any() for value in unused)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
