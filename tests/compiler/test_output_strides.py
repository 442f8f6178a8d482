"""What a graph of Inductor returns and saves has the strides that were traced, also with sizes of the batch in them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from tests.support import assert_same, compiled, slices_to_the_longest

pytestmark = pytest.mark.usefixtures("capture_flags")


def batch(tokens: int, *lengths: int) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 2 * tokens * 4).sin().mul(7).cos().view(2, tokens, 4)
    return x.requires_grad_(), torch.tensor(lengths)


BATCHES = [batch(8, 5, 3), batch(8, 8, 3), batch(6, 4, 1)]


def saved_in_other_strides(x: Tensor, lengths: Tensor) -> Tensor:
    """Before, each of the two raised in backward."""
    n = lengths.max().item()
    if n < 2:
        return x.sum()
    h = x[:, :n].transpose(1, 2)
    pooled, difference = F.max_pool1d(h, 2), F.pad(h, (1, 1)).diff()
    return (pooled.sin() * torch.arange(1.0, 1 + n // 2)).sum() + (difference**3).sum()


def returned(x: Tensor, lengths: Tensor) -> Tensor:
    n = lengths.max().item()
    return F.softmin(x[:, :n].transpose(1, 2), 2) if n > 1 else x.sum()


def returned_and_saved(x: Tensor, lengths: Tensor) -> Tensor:
    """Inductor tells backward the strides of this one."""
    return (x * 2)[:, : lengths.max().item()].transpose(1, 2).flatten(0, 1).relu()


@slices_to_the_longest
@pytest.mark.slow
@pytest.mark.parametrize("program", [saved_in_other_strides, returned_and_saved])
def test_gradients_are_eager_modes(program: Any) -> None:
    assert_same(program, BATCHES, "inductor", tolerance=1e-5)


@slices_to_the_longest
def test_a_contiguous_result_is_contiguous() -> None:
    step = compiled(returned, "inductor")
    for x, lengths in BATCHES:
        torch.testing.assert_close(step(x, lengths).view(-1), returned(x, lengths).view(-1))


@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_convolution_keeps_the_layout_of_trimmed_images(lowering: str) -> None:
    """Before, the branch of contiguous results."""

    def program(x: Tensor, lengths: Tensor) -> Tensor:
        n = lengths.max().item()
        images = x[:, :n].reshape(2, n, 2, 2).permute(0, 2, 1, 3).contiguous(memory_format=torch.channels_last)
        found = F.conv2d(images, torch.linspace(-1, 1, 24).view(3, 2, 4, 1), padding=(1, 0))
        return found * 2 if found.is_contiguous() else found * 3

    assert_same(program, BATCHES, lowering, tolerance=1e-5)


@pytest.mark.slow
def test_a_view_near_a_convolution_is_compiled_once() -> None:
    """Before, Inductor compared the number of points, an expression: "cannot determine truth value". And backward was
    compiled for the strides of one batch, so that another failed, or was compiled anew."""

    def program(points: Tensor, images: Tensor, weight: Tensor) -> Tensor:
        grid = points[None, :, None]
        sampled = F.grid_sample(images[None], grid, align_corners=False)
        return F.conv2d(sampled[0, ..., 0].T.view(-1, 2, 2, 2), weight)

    def values(*shape: int) -> Tensor:
        return torch.linspace(-1, 1, math.prod(shape)).mul(9).sin().view(shape)

    images, weight = values(2, 6, 6).requires_grad_(), values(4, 2, 2, 2).requires_grad_()
    counters.clear()
    assert_same(program, [(values(n, 2), images, weight) for n in (12, 16, 24, 40)], "inductor", tolerance=1e-5)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
@slices_to_the_longest
def test_a_graph_from_the_cache_has_them_as_well() -> None:
    """Before, AOTAutograd kept no such graph, and each process partitioned it and compiled its gradients anew."""

    def program(x: Tensor, lengths: Tensor) -> Tensor:
        n = lengths.max().item()
        return F.softmin(x[:, :n].transpose(1, 2), 2) * 3 if n > 1 else x.sum()

    with fresh_cache():
        for count in ("autograd_cache_saved", "autograd_cache_hit"):
            torch._dynamo.reset()
            counters.clear()
            assert_same(program, BATCHES, "inductor", tolerance=1e-5)
            assert counters["aot_autograd"][count] == counters["stats"]["unique_graphs"] > 0
            step = compiled(program, "inductor")
            for x, lengths in BATCHES:
                assert step(x, lengths).is_contiguous()
        assert counters["inductor"]["fxgraph_cache_miss"] == 0
