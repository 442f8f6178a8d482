"""The spellings compute what they claim, in eager mode; the decoys run, and compute something else."""

import pytest
import torch

from tests.experts.models import HIDDEN, Moe
from tests.experts.spellings import DECOYS, SPELLINGS, cases, name_of

TOKENS = 24


def outputs_and_gradients(model, forward, x):
    """Output, gradients of the input and the parameters; a parameter that was not used has a gradient of zeros."""
    x = x.clone().requires_grad_()
    y = forward(x)
    leaves = {"x": x} | {name: p for name, p in model.named_parameters() if p.requires_grad}
    direction = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    gradients = torch.autograd.grad(y, list(leaves.values()), direction, allow_unused=True, materialize_grads=True)
    return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.all_cases
@pytest.mark.parametrize("case", cases(SPELLINGS), ids=name_of)
def test_agrees_with_every_expert_on_every_token(case):
    spelling, kind = case
    model = Moe(spelling, kind)
    tolerance = 5e-2 if spelling.dtype == torch.bfloat16 else 1e-5
    for tokens in (TOKENS, 1):  # with one token, some experts have no rows
        x = torch.randn(tokens, HIDDEN).to(spelling.dtype)
        actual, expected = outputs_and_gradients(model, model, x), outputs_and_gradients(model, model.reference, x)
        for name, value in expected.items():  # what cancels is as far off as its parts
            largest = max(1.0, value.abs().max().item())
            torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.all_cases
@pytest.mark.parametrize("case", cases(DECOYS), ids=name_of)
def test_decoys_compute_something_else(case):
    spelling, kind = case
    model = Moe(spelling, kind)
    x = torch.randn(TOKENS, HIDDEN)
    actual, expected = outputs_and_gradients(model, model, x), outputs_and_gradients(model, model.reference, x)
    assert all(gradient.isfinite().all() for gradient in actual.values())
    differs = any(not torch.allclose(actual[name], expected[name], rtol=1e-3, atol=1e-3) for name in actual)
    assert differs or not spelling.identical  # experts with activations of their own compute what they should
