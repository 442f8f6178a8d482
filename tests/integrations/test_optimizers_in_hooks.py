"""Optimizers as GaLore's and APOLLO's layer-wise ones: each parameter has its own, which steps in the backward pass."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import compiled

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
from tests.integrations import tiny

pytestmark = pytest.mark.usefixtures("capture_flags")


def step_in_low_rank(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    """Projects the gradient of a matrix onto its two largest directions, steps, and frees it."""
    if parameter.dim() == 2:
        left = torch.linalg.svd(parameter.grad, full_matrices=False)[0][:, :2]
        parameter.grad = left @ (left.T @ parameter.grad)
    optimizer.step()
    optimizer.zero_grad()


def trained(is_compiled: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses of three steps, and the parameters after them."""
    model = tiny.model()
    program: Any = compiled(model, "aot_eager") if is_compiled else model
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        parameter.register_post_accumulate_grad_hook(functools.partial(step_in_low_rank, optimizer=optimizer))
    ids = torch.arange(12)[None]
    losses = []
    for _ in range(3):
        loss = program(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        losses.append(loss.detach())
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def test_a_step_of_each_parameter_in_backward_is_eager_modes() -> None:
    expected = trained(False)
    torch.testing.assert_close(trained(True), expected, rtol=0, atol=0)
    assert expected[0][0] > expected[0][2]  # the hooks ran
