"""transformers' `generate` beside training: it uses up none of the training frame's graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fxpasses.inspect
from fxpasses.inspect import Record
from tests.support import compiled

pytestmark = pytest.mark.usefixtures("capture_flags")


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def generated(model: Any, prompt: Tensor) -> Tensor:
    return model.generate(prompt, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(prompt))


def train(model: Any, ids: Tensor) -> list[Any]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss, *(parameter.grad for parameter in model.parameters())]


def compiled_in_place(model: Any, **options: Any) -> Any:
    model._compiled_call_impl = compiled(model._call_impl, "aot_eager", **options)  # as `model.compile()` does
    return model


def trained_and_generated(mode: bool, steps: int, **options: Any) -> tuple[Record, list[int]]:
    """Generate, then train, in each step, on other sizes; returns the record, and the graphs after each step."""
    eager = llama().train(mode)
    model = compiled_in_place(copy.deepcopy(eager), **options)
    counts = []
    with fxpasses.inspect.record() as record:
        for step in range(steps):
            ids = torch.arange(2, 2 * (5 + step) + 2).view(2, 5 + step) % 30
            assert torch.equal(generated(model, ids), generated(eager, ids))
            torch.testing.assert_close(train(model, ids), train(eager, ids), rtol=0, atol=0)
            counts.append(len(record.graphs))
    return record, counts


@pytest.mark.slow
def test_a_model_that_generates_while_it_trains_has_two_graphs_one_for_any_size() -> None:
    _, counts = trained_and_generated(True, steps=4)
    assert counts == [1, 2, 2, 2]


@pytest.mark.slow
def test_outside_training_generation_has_graphs_and_leaves_some() -> None:
    _, counts = trained_and_generated(False, steps=6)
    assert counts[-1] <= 6 and counts[3:] == counts[-1:] * 3


@pytest.mark.slow
def test_generation_is_compiled_if_that_is_asked_for() -> None:
    _, counts = trained_and_generated(True, steps=1, generation="compiled")
    assert counts[-1] > 2


def test_a_call_without_gradient_that_is_no_generation_is_compiled() -> None:
    model = compiled_in_place(llama().train())
    with fxpasses.inspect.record() as record, torch.no_grad():
        model(input_ids=torch.arange(2, 8).view(1, 6), use_cache=False)
    assert len(record.graphs) == 1
