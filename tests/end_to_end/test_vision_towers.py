"""Vision towers of Hugging Face: each layer cuts its patches by `lengths.tolist()`, image by image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from tests.support import assert_same, compiled, host_reads, instructions, instructions_of_stock, thorough

PATCH = 4
PATCH_NUMBERS = 3 * 2 * PATCH * PATCH  # channels, frames, height, width
SIZES: dict[str, Any] = {"num_heads": 2, "patch_size": PATCH, "attn_implementation": "sdpa"}


class Qwen2(torch.nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        config = Qwen2VLVisionConfig(depth=layers, embed_dim=32, hidden_size=16, mlp_ratio=2, **SIZES)
        self.tower = Qwen2VisionTransformerPretrainedModel(config)

    def forward(self, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return self.tower(patches, grid).pooler_output


class Qwen25(Qwen2):
    """Its first layer attends within windows of 4 x 4 patches, its last within images."""

    def __init__(self, layers: int = 2) -> None:
        torch.nn.Module.__init__(self)
        windows = {"window_size": 4 * PATCH, "fullatt_block_indexes": [layers - 1]}
        widths = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 16}
        self.tower = Qwen2_5_VisionTransformerPretrainedModel(
            Qwen2_5_VLVisionConfig(depth=layers, **widths, **windows, **SIZES)
        )


towers = pytest.mark.parametrize("tower", [Qwen2, Qwen25])


def batch(*images: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches [patches, numbers] and the images' frames, height and width in patches, [images, 3]."""
    grid = torch.tensor(images)
    return torch.randn(int(grid.prod(1).sum()), PATCH_NUMBERS, requires_grad=True), grid


@pytest.mark.slow
@towers
def test_one_graph_and_the_numbers_of_eager_mode(tower):
    record = assert_same(tower(), [batch((1, 8, 4), (1, 4, 6))], "aot_eager", tolerance=1e-5)
    assert len(record.graphs) == 1


@pytest.mark.slow
def test_images_of_other_numbers_and_sizes_take_the_same_graph():
    """One for the sizes of the first batch, one for any number of patches, and one for any number of images as well."""
    images = [
        [(1, 8, 4), (1, 4, 6)],
        [(1, 4, 4), (1, 4, 8)],
        [(1, 4, 4), (1, 10, 4), (1, 8, 8)],
        [(2, 4, 4), (1, 6, 4)],
    ]
    images += [[(1, 4, 4)] * 5, [(1, 12, 4), (3, 4, 4)]]
    record = assert_same(Qwen25(), [batch(*each) for each in images], "aot_eager", tolerance=1e-5)
    assert len(record.graphs) <= 3


@thorough
@pytest.mark.slow
@towers
def test_host_reads_do_not_depend_on_the_number_of_layers(tower):
    reads = {}
    for layers in (2, 4):
        program = compiled(tower(layers), "aot_eager")
        program(*batch((1, 8, 4), (1, 4, 6))).sum().backward()  # compiles
        inputs = batch((1, 8, 4), (1, 4, 6))
        reads[layers] = host_reads(lambda: program(*inputs).sum().backward())  # noqa: B023
    assert reads[2] == reads[4] > 0


@pytest.mark.slow
@thorough
@pytest.mark.filterwarnings("ignore")
def test_compiling_for_other_sizes_in_each_batch_takes_less_than_stock():
    sizes = [
        [(4, 6), (8, 4)],
        [(6, 6), (4, 4)],
        [(8, 8), (6, 4)],
        [(10, 4), (4, 8)],
        [(6, 8), (6, 10)],
        [(4, 10), (8, 6)],
    ]
    sizes += [[(12, 4), (4, 4)], [(8, 10), (6, 6)], [(10, 10), (4, 6)], [(6, 12), (8, 8)]]
    batches = [batch(*((1, *image) for image in images)) for images in sizes]
    tower = Qwen25()
    stock = instructions_of_stock(tower, batches)
    torch._dynamo.reset()
    program = compiled(tower, "eager", strict=False)
    assert instructions(program, batches) < stock
    torch.testing.assert_close(program(*batches[-1]), tower(*batches[-1]))
