"""Models of images and text, tiny: batches of other numbers and sizes of images take few graphs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.utils.rnn import pad_sequence

from tests.support import compiled
from tests.zoo import tiny
from tests.zoo.architectures import architectures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXT, START, END = 60, 5, 6  # identifiers of text are smaller than the first; those around an image, of models without

# Heights and widths in patches.
IMAGES = [
    [(4, 4), (8, 4)], [(6, 4), (4, 4), (4, 8)], [(8, 8), (6, 4)], [(10, 4), (4, 8), (4, 4), (6, 6)],
    [(8, 10), (6, 6), (4, 4), (4, 6), (8, 4)], [(12, 8)] * 3,
]  # fmt: skip


def pixels(config: Any, sizes: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Images as patches, flat or of channels, height and width; for Mistral 3 as images, padded to the largest."""
    vision = config.vision_config
    if config.model_type == "mistral3":
        image_sizes = vision.patch_size * torch.tensor(sizes)
        return {"pixel_values": torch.randn(len(sizes), 3, *image_sizes.amax(0).tolist()), "image_sizes": image_sizes}
    grid = torch.tensor([[1, *size] for size in sizes])
    rows, patch, frames = int(grid.prod(1).sum()), vision.patch_size, getattr(vision, "temporal_patch_size", 1)
    is_flat = config.model_type not in ("kimi_k25", "paddleocr_vl")
    shape = (rows, 3 * frames * patch**2) if is_flat else (rows, 3, patch, patch)
    return {"pixel_values": torch.randn(*shape), "image_grid_thw": grid}


def batch(model: Any, sizes: list[tuple[int, int]], words: int) -> dict[str, Any]:
    """A text for each image, the shorter ones padded."""
    token = getattr(model.config, "image_token_id", None) or model.config.image_token_index
    start = getattr(model.config, "vision_start_token_id", None) or START
    texts = [
        torch.tensor([*range(10, 10 + words), start, *[token] * (height * width // 4), END, 7, 8])
        for height, width in sizes
    ]
    ids = pad_sequence(texts, batch_first=True)
    made = {
        "input_ids": ids, "attention_mask": (ids != 0).long(), "mm_token_type_ids": (ids == token).int(),
        "labels": ids.masked_fill((ids == 0) | (ids >= TEXT), -100), "use_cache": False,
    }  # fmt: skip
    accepted = inspect.signature(model.forward).parameters
    return {name: value for name, value in (made | pixels(model.config, sizes)).items() if name in accepted}


@pytest.mark.parametrize("name", ["paddleocr_vl", "kimi_k25", "qwen3_vl", "qwen2_vl", "glm4v", "mistral3"])
def test_few_graphs_for_all_numbers_and_sizes_of_images(name: str) -> None:
    (architecture,) = [each for each in architectures() if each.key == f"vision-language/{name}"]
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    model = tiny.model(architecture).train()
    ours = compiled(model, "aot_eager", rows="all")
    for number, sizes in enumerate(IMAGES):
        given = batch(model, sizes, 4 + number)
        losses = []
        gradients = []
        for program in (model, ours):
            model.zero_grad()
            losses.append(program(**given).loss)
            losses[-1].backward()
            gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)
    # One for the first sizes, one for any number of tokens and images, and one for any number of texts.
    assert counters["stats"]["unique_graphs"] <= 3
