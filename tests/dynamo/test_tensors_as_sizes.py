"""Tensors where an operator takes sizes, as in vision encoders: `patches[:, : size[0] // 4]`, `x.view(h, w)`."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental import symbolic_shapes
from torch.utils import _pytree as pytree

from fxpasses.dynamo import tracing
from fxpasses.dynamo.attempt import Attempt
from fxpasses.dynamo.features import Feature
from tests.support import assert_same

pytestmark = pytest.mark.usefixtures("capture_flags")

IMAGES = torch.linspace(-1, 2, 2 * 3 * 4 * 4).sin().view(2, 3, 4, 4).requires_grad_()
SIZES = torch.tensor([[16, 16], [8, 16]])


def cropped(images: Tensor, sizes: Tensor) -> Tensor:
    parts = [image[..., : size[0] // 4, : size[1] // 4] for image, size in zip(images, sizes, strict=True)]
    return torch.cat([part.flatten(1).T for part in parts])


def merged(images: Tensor, sizes: Tensor) -> Tensor:
    """Mistral 3: four patches of an image become one."""
    grids = [(size[0] // 4, size[1] // 4) for size in sizes]
    x = cropped(images, sizes)
    found = []
    for (height, width), tokens in zip(grids, x.split([h * w for h, w in grids]), strict=True):
        grid = tokens.view(height, width, 3).permute(2, 0, 1).unsqueeze(0)
        found.append(F.unfold(grid, kernel_size=2, stride=2).view(12, -1).t())
    return torch.cat(found)


def frames(images: Tensor, sizes: Tensor) -> Tensor:
    """Ernie 4.5 VL: places from ranges whose bounds are tensors."""
    counts = sizes[:, 0] // 8
    places = []
    for count, start in zip(counts, counts.cumsum(0) - counts, strict=True):
        for first in range(0, count, 2):
            places.append(torch.arange(start + first, start + first + 1))
        for last in range(1 if count > 1 else 0, count, 2):
            places.append(torch.arange(start + last, start + last + 1, 1))
    return images.flatten(2).flatten(0, 1)[torch.cat(places)]


def resized(images: Tensor, sizes: Tensor) -> Tensor:
    """VideoLLaMA 3: images shrink to a part of their size."""
    found = []
    for image, (height, width) in zip(images, sizes, strict=True):
        small = F.interpolate(image[None], size=(height // 8, width // 8), mode="bilinear")
        found.append(small.permute(0, 2, 3, 1).reshape(-1, 3))
    return torch.cat(found)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("program", "tolerance"), [(cropped, 0.0), (merged, 0.0), (resized, 1e-6)])
def test_one_graph_for_images_of_all_sizes(program: object, tolerance: float) -> None:
    batches = [(IMAGES, SIZES), (IMAGES, SIZES.flip(0)), (IMAGES, torch.tensor([[8, 8], [8, 16]]))]
    record = assert_same(program, batches, "aot_eager", tolerance, fullgraph=True)
    assert len(record.graphs) == 1


def test_one_graph_for_frames_of_as_many_rounds() -> None:
    batches = [(IMAGES, SIZES), (IMAGES, SIZES + torch.tensor([[0, 8], [0, 8]])), (IMAGES, SIZES.flip(0))]
    record = assert_same(frames, batches, "aot_eager", fullgraph=True)
    assert len(record.graphs) == 2


def test_a_bound_of_which_more_is_known_later() -> None:
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        n = lengths[0]
        y = x[:n] * 2
        return y + torch.ones(n.item(), 3)  # so that n is not negative

    x = torch.linspace(-1, 2, 12).view(4, 3).requires_grad_()
    record = assert_same(program, [(x, torch.tensor([3])), (x, torch.tensor([2]))], "aot_eager", fullgraph=True)
    assert len(record.graphs) == 1


def test_a_bound_that_counts_from_the_end_has_a_graph_of_its_own() -> None:
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        return x[: lengths[0]] * 2

    x = torch.linspace(-1, 2, 12).view(4, 3).requires_grad_()
    batches = [(x, torch.tensor([n])) for n in (3, 2, -1, -2, 1)]
    record = assert_same(program, batches, "aot_eager", fullgraph=True)
    assert len(record.graphs) == 2


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 breaks the graph at `[n, 3] == list(y.size())`")
def test_a_size_that_is_compared_with_a_tensor() -> None:
    """Longformer's classification, whose first token attends to all others."""

    def program(x: Tensor, lengths: Tensor) -> Tensor:
        n = lengths.max()
        y = x.new_zeros(n, 3) + x[:1]
        assert list(y.size()) == [n, 3] and [n, 3] == list(y.size())
        return y.view(n, 3) * (2 if y.shape[0] < n + 1 else 3)

    x = torch.linspace(-1, 2, 12).view(4, 3).requires_grad_()
    record = assert_same(program, [(x, torch.tensor([1, n])) for n in (3, 2, 4)], "aot_eager", fullgraph=True)
    assert len(record.graphs) == 1


def test_a_slice_whose_size_is_known_when_it_runs_again() -> None:
    """Nemotron H Omni: `x[:n]` of max(n, m) rows. Dynamo did not know then that n is not negative."""
    shape_env = symbolic_shapes.ShapeEnv()
    size, other = shape_env.create_unbacked_symint(), shape_env.create_unbacked_symint()
    graph = Graph()
    node = graph.call_function(operator.getitem, (graph.placeholder("x"), slice(None)))
    bindings = {size.node.expr: (pytree.SequenceKey(0),)}

    def rebind(found: object) -> object:
        node.meta["unbacked_bindings"] = dict(bindings)
        symbolic_shapes.rebind_unbacked(shape_env, node, [found])  # as AOTAutograd does
        return node.meta["unbacked_bindings"]

    for known in (size, torch.sym_max(size, other)):
        if torch.__version__ < "2.15":
            with pytest.raises(AssertionError):
                rebind(known)
        with tracing.traced(Attempt(None, frozenset(Feature))):
            assert rebind(known) == {}
    with tracing.traced(Attempt(None, frozenset(Feature))):
        assert rebind(other) == bindings
    assert other.node.expr == size.node.expr
