"""Batches of architectures whose inputs are in no usual format, by type of model.

IMAGES makes the images alone, to which `media` adds the text; WHOLE makes a batch from the text in its layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.zoo.batches import IGNORED, Batch, text
from tests.zoo.tiny import FIRST

ROWS = 2
SIDE, PATCH, FRAMES, MEL = 32, 8, 64, 16  # the sizes that `tiny` gives images and sound
PATCHES = (SIDE // PATCH) ** 2


def random(*shape: int, seed: int) -> torch.Tensor:
    """Normally distributed, float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def after(plain: Batch, token: int, total: int) -> Batch:
    """The text after `total` places for the features of images or sound, the same number in each row or one more."""
    counts = torch.tensor([total // ROWS + (row < total % ROWS) for row in range(ROWS)])
    places = torch.arange(-(-total // ROWS)).expand(ROWS, -1)
    ids = torch.cat([torch.where(places < counts[:, None], token, FIRST), plain["input_ids"]], 1)
    is_medium = (ids == token).long()
    return {
        "input_ids": ids,
        "attention_mask": torch.cat([torch.ones_like(places), plain["attention_mask"]], 1),
        "labels": torch.cat([torch.full_like(places, IGNORED), plain["labels"]], 1),
        "token_type_ids": is_medium,
        "mm_token_type_ids": is_medium,
    }


def pixels(number: int) -> torch.Tensor:
    """An image for each row."""
    return random(ROWS, 3, SIDE, SIDE, seed=number)


def _grids(number: int) -> torch.Tensor:
    """Heights and widths in patches: images of other shapes with as many patches in all."""
    return torch.tensor([[[4, 8], [8, 4]], [[8, 4], [4, 8]]][number])


def _in_merged_blocks(number: int) -> Batch:
    """A block of two by two patches for each of the grid's places."""
    grid = torch.cat([torch.ones(ROWS, 1, dtype=torch.long), _grids(number)], 1)
    side = 2 * PATCH
    return {"pixel_values": random(int(grid.prod(1).sum()), side, side, 3, seed=number), "image_grid_thw": grid}


def _in_a_strip(number: int) -> Batch:
    sizes = _grids(number)
    strip = random(1, 3, PATCH, PATCH * int(sizes.prod(1).sum()), seed=number)
    return {"pixel_values": strip, "target_sizes": sizes.int()}


def _pooled(number: int) -> Batch:
    pooling = torch.arange(ROWS * PATCHES).view(-1, 4) % PATCHES
    return {
        "pixel_values": random(ROWS, PATCHES, 3 * PATCH * PATCH, seed=number),
        "image_token_pooling": pooling,
        "image_grids": torch.tensor([[2, 2, 0, 0]] * ROWS),
    }


IMAGES: dict[str, Callable[[int], Batch]] = {
    "deepseek_vl_hybrid": lambda n: {"pixel_values": pixels(n), "high_res_pixel_values": pixels(n)},
    "granite_docling": lambda n: {
        "pixel_values": pixels(n)[:, None],
        "pixel_attention_mask": torch.ones(ROWS, 1, dtype=torch.bool),
    },
    "hunyuan_vl": lambda n: {
        "pixel_values": random(ROWS * PATCHES, 3 * PATCH * PATCH, seed=n),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
    },
    "inkling2": _in_merged_blocks,
    "inkling_mm_model": lambda n: {"pixel_values": random(ROWS * PATCHES, 2, PATCH, PATCH, 3, seed=n)},
    "molmo2": _pooled,
    "nemotron_h_omni": lambda n: {
        "pixel_values": random(int(_grids(n).prod(1).sum()), 3 * PATCH * PATCH, seed=n),
        "image_grid_hw": _grids(n),
    },
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), _in_a_strip),
}


def _codes(model: Any, plain: Batch, number: int) -> Batch:
    """Sound as identifiers of several codebooks: a row for each, and its label."""
    books = model.config.num_codebooks
    return {"input_ids": text((ROWS * books, 16), number), "labels": text((ROWS, 16, books), 100 + number)}


def _codes_beside_text(model: Any, plain: Batch, number: int) -> Batch:
    codes = text((*plain["input_ids"].shape, model.config.num_codebooks), 100 + number)
    return {**plain, "input_ids": torch.cat([plain["input_ids"][..., None], codes], -1)}


def _dialogue(model: Any, plain: Batch, number: int) -> Batch:
    books = model.config.decoder_config.num_channels
    return {
        "input_ids": plain["input_ids"],
        "attention_mask": plain["attention_mask"],
        "decoder_input_ids": text((ROWS, 12, books), 100 + number),
        "labels": text((ROWS * books, 12), 100 + number),
    }


def _moved_target(model: Any, plain: Batch, number: int) -> Batch:
    return {**plain, "labels": text((ROWS, 10), 100 + number), "decoder_input_ids": text((ROWS, 10), 200 + number)}


def _gated(model: Any, plain: Batch, number: int) -> Batch:
    seen = torch.ones(*plain["input_ids"].shape, 1, dtype=torch.long)
    return {**plain, "pixel_values": pixels(number)[:, None], "image_attention_mask": seen}


def _at_marked_places(model: Any, plain: Batch, number: int) -> Batch:
    batch = after(plain, 1, ROWS * model.config.latent_query_num)
    places = batch.pop("token_type_ids")
    return {**batch, "pixel_values": pixels(number), "image_embeds_position_mask": places}


def _page(model: Any, plain: Batch, number: int) -> Batch:
    corners = random(*plain["input_ids"].shape, 2, seed=number).sigmoid() * 0.5
    return {
        **plain,
        "pixel_values": pixels(number),
        "bbox": torch.cat([corners, corners + 0.3], -1),
        "labels": text((ROWS, 6), 100 + number),
    }


def _flattened_patches(model: Any, plain: Batch, number: int) -> Batch:
    size = model.config.vision_config.patch_embed_hidden_size
    places = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0)).expand(ROWS, -1, -1)
    patches = torch.cat([places, random(ROWS, PATCHES, size, seed=number)], -1)
    return {"flattened_patches": patches, "attention_mask": plain["attention_mask"], "labels": plain["labels"]}


def _robot(model: Any, plain: Batch, number: int) -> Batch:
    config = model.config
    images = pixels(number)[:, None]
    batch = after(plain, config.vlm_config.image_token_id, ROWS * PATCHES)
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "pixel_values": images,
        "pixel_attention_mask": torch.ones(ROWS, 1, dtype=torch.bool),
        "state": random(ROWS, config.max_state_dim, seed=number),
        "timestep": torch.tensor([0.3, 0.8]),
        "noise": random(ROWS, config.chunk_size, config.max_action_dim, seed=10 + number),
        "actions": random(ROWS, config.chunk_size, config.max_action_dim, seed=20 + number),
    }


def _video(model: Any, plain: Batch, number: int) -> Batch:
    count = ROWS * 4 * model.config.num_query_tokens
    return {
        **after(plain, model.config.video_token_index, count),
        "pixel_values": random(ROWS, 4, 3, SIDE, SIDE, seed=number),
        "qformer_input_ids": text((ROWS, 4), 200 + number),
    }


def _deep(model: Any, plain: Batch, number: int) -> Batch:
    """The features are for several layers; those of each are as many."""
    images = pixels(number)[:, None].repeat(1, 2, 1, 1, 1)
    sizes = torch.full((ROWS, 2), SIDE)
    return {**after(plain, model.config.image_token_index, 20), "pixel_values": images, "image_sizes": sizes}


def _heard_as_spoken(model: Any, plain: Batch, number: int) -> Batch:
    """A token of text for each of the sound's frames."""
    ids = text((ROWS, FRAMES // 8), number)
    return {"input_ids": ids, "labels": ids, "input_features": random(ROWS, MEL, FRAMES, seed=number)}


def _of_projected_sound(model: Any, plain: Batch, number: int) -> Batch:
    """The mask is of the features, one for four frames."""
    lengths = torch.tensor([[16, 9], [9, 16]][number])
    return {
        **after(plain, model.config.audio_token_index, 25),
        "input_features": random(ROWS, FRAMES, MEL, seed=number),
        "input_features_mask": torch.arange(FRAMES // 4)[None] < lengths[:, None],
    }


def _by_lengths(mask: str) -> Callable[[Any, Batch, int], Batch]:
    """Four frames become one feature; the mask tells how many there are."""

    def batch(model: Any, plain: Batch, number: int) -> Batch:
        frames = 4 * FRAMES
        lengths = torch.tensor([[256, 160], [160, 256]][number])
        return {
            **after(plain, model.config.audio_token_id, 64 + 40),
            "input_features": random(ROWS, MEL, frames, seed=number),
            mask: (torch.arange(frames)[None] < lengths[:, None]).long(),
        }

    return batch


WHOLE: dict[str, Callable[[Any, Batch, int], Batch]] = {
    "dia": _dialogue,
    "fsmt": _moved_target,
    "granite4_vision": _deep,
    "granite_speech": _of_projected_sound,
    "granite_speech_plus": _of_projected_sound,
    "idefics": _gated,
    "instructblipvideo": _video,
    "kosmos-2": _at_marked_places,
    "kyutai_speech_to_text": _codes_beside_text,
    "musicflamingo": _by_lengths("input_features_mask"),
    "musicgen_decoder": _codes,
    "musicgen_melody_decoder": _codes,
    "pi0": _robot,
    "pix2struct": _flattened_patches,
    "pop2piano": lambda model, plain, n: {
        "input_features": random(ROWS, FRAMES, model.config.d_model, seed=n),
        "labels": text((ROWS, 6), 100 + n),
    },
    "qwen2_audio": _by_lengths("feature_attention_mask"),
    "udop": _page,
    "vision-encoder-decoder": lambda model, plain, n: {
        "pixel_values": pixels(n),
        "labels": text((ROWS, 6), 100 + n),
    },
    "voxtral_realtime": _heard_as_spoken,
}
