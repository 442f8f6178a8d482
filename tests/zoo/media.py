"""Batches with sound or images beside their text: the first of the usual formats that a model accepts.

A model whose text has images or sound in it is asked for their features; each becomes one token of the text.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from tests.zoo.batches import Batch, accepted, of_text, text
from tests.zoo.formats import FRAMES, IMAGES, MEL, PATCH, ROWS, SIDE, WHOLE, after, pixels, random

SAMPLES = 6400  # the encoders make a frame of 320 of them, and a label needs one frame or two


class Unaccepted(ValueError):
    """A model took none of the formats."""


def batch(task: str, model: torch.nn.Module, layout: str, number: int) -> dict[str, Any]:
    """A batch for a task in a layout; the number tells apart the batches of a layout."""
    if whole := WHOLE.get(model.config.model_type):
        return accepted(model, whole(model, _text(layout, number), number))
    if task == "vision-language":
        own = IMAGES.get(model.config.model_type)
        images = [own(number)] if own else list(_images(model, number))
        return _first_accepted(model, _texts_with(model, layout, number, "image", images))
    if _hears(model) and task in ("speech", "seq2seq"):
        return _first_accepted(model, _texts_with(model, layout, number, "audio", list(_sounds_in_text(model, number))))
    if task in ("speech", "ctc"):
        return _first_accepted(model, _sounds(number))
    return accepted(model, of_text(task, layout, number))


def _text(layout: str, number: int) -> Batch:
    return {name: value[:ROWS] for name, value in of_text("vision-language", layout, number).items()}


def _hears(model: Any) -> bool:
    """Whether the model is a decoder whose text has sound in it."""
    return any(hasattr(part, "get_audio_features") for part in (model, getattr(model, "model", None)))


def _first_accepted(model: Any, candidates: Iterator[Batch]) -> dict[str, Any]:
    problem: Exception | None = None
    for candidate in candidates:
        found = accepted(model, candidate)
        try:
            with torch.no_grad():
                model(**found)
            return found
        except Exception as error:
            problem = error
    raise Unaccepted(f"none of the formats works: {problem}") from problem


def _sounds(number: int) -> Iterator[Batch]:
    labels = {"labels": text((ROWS, 6), 100 + number)}
    lengths = torch.tensor([[1.0, 0.6], [0.6, 1.0]][number])  # the same number of tokens in all
    for frames in (FRAMES, 2 * FRAMES, 4 * FRAMES, 3000):
        real = (torch.arange(frames)[None] < lengths[:, None] * frames).long()
        for shape in ((ROWS, MEL, frames), (ROWS, frames, MEL), (ROWS, frames, 2 * MEL)):
            features = random(*shape, seed=number)
            yield {"input_features": features, "attention_mask": real, **labels}
            yield {"input_features": features, "attention_mask": real.bool(), **labels}
            yield {"input_features": features, **labels}
    real = (torch.arange(SAMPLES)[None] < lengths[:, None] * SAMPLES).long()
    waves = random(ROWS, SAMPLES, seed=number)
    yield {"input_values": waves, "attention_mask": real, **labels}
    yield {"input_values": waves, **labels}
    yield {"input_values": waves[:, None], "attention_mask": real, **labels}


def _sounds_in_text(model: Any, number: int) -> Iterator[Batch]:
    """Without labels, and with a mask of a name that is not the text's."""
    names = inspect.signature(model.forward).parameters
    mask = next((name for name in ("input_features_mask", "padding_mask") if name in names), None)
    for sound in _sounds(number):
        real = sound.pop("attention_mask", None)
        del sound["labels"]
        if (real is None) == (mask is None):
            yield sound if mask is None else {**sound, mask: real}


def _images(model: Any, number: int) -> Iterator[Batch]:
    """An image for each row of text."""
    images = pixels(number)
    sizes = torch.full((ROWS, 2), SIDE)
    yield {"pixel_values": images}
    yield {"pixel_values": images, "image_sizes": sizes}
    yield {"pixel_values": images, "pixel_attention_mask": torch.ones(ROWS, SIDE, SIDE, dtype=torch.long)}
    yield {"pixel_values": images[:, None], "pixel_attention_mask": torch.ones(ROWS, 1, SIDE, SIDE, dtype=torch.long)}
    yield {"pixel_values": images, "qformer_input_ids": text((ROWS, 4), 200 + number)}
    for tiles in (1, 4):  # of images whose shape an index tells
        yield {
            "pixel_values": images[:, None, None].repeat(1, 1, tiles, 1, 1, 1),
            "aspect_ratio_ids": torch.ones(ROWS, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(ROWS, 1, tiles, dtype=torch.long),
        }
    for crops in (1, 2, 3, 5):
        yield {"pixel_values": images[:, None].repeat(1, crops, 1, 1, 1), "image_sizes": sizes}
    # Images of other shapes have as many patches in all; of those a grid says which are whose.
    grid = torch.tensor([[[1, 4, 8], [1, 8, 4]], [[1, 8, 4], [1, 4, 8]]][number])
    shapes = grid[:, 1:]
    flat = {"pixel_values": random(ROWS, 32, 3 * PATCH * PATCH, seed=number), "spatial_shapes": shapes}
    yield {**flat, "pixel_attention_mask": torch.ones(ROWS, 32, dtype=torch.long)}
    places = torch.stack([torch.cartesian_prod(torch.arange(h), torch.arange(w)) for h, w in shapes.tolist()])
    yield {"pixel_values": flat["pixel_values"], "image_position_ids": places}
    for frames in (2, 1):
        patches = random(int(grid.prod(1).sum()), 3 * frames * PATCH * PATCH, seed=number)
        merged = {"image_merge_sizes": torch.ones(ROWS, dtype=torch.long)}
        yield {"pixel_values": patches, "image_grid_thw": grid}
        yield {"pixel_values": patches, "image_grid_thw": grid, **merged}
        yield {"pixel_values": patches.view(len(patches), 3 * frames, PATCH, PATCH), "image_grid_thw": grid}


def _texts_with(model: Any, layout: str, number: int, kind: str, media: list[Batch]) -> Iterator[Batch]:
    """kind: "image" or "audio", as in the names of the model's token and method."""
    config, method = model.config, f"get_{kind}_features"
    token = getattr(config, f"{kind}_token_id", None)
    token = getattr(config, f"{kind}_token_index", None) if token is None else token
    plain = _text(layout, number)
    whole = model if hasattr(model, method) else getattr(model, "model", None)
    if not hasattr(whole, method):
        takes = kind == "audio" or "pixel_values" in inspect.signature(model.forward).parameters
        for each in media if takes else [{}]:
            yield {**plain, **each}
        return
    accepts, problem = False, None
    for each in media:
        try:
            with torch.no_grad():
                taken = accepted(whole, each).keys() & each.keys()
                features = getattr(whole, method)(**{name: each[name] for name in taken})
        except Exception as error:
            problem = error
            continue
        accepts = True
        pooled, last = (getattr(features, name, None) for name in ("pooler_output", "last_hidden_state"))
        features = pooled if pooled is not None else last if last is not None else features
        rows = features if isinstance(features, (list, tuple)) else [features]
        count = sum(row.numel() // row.shape[-1] for row in rows if isinstance(row, torch.Tensor))
        yield {**after(plain, token or 0, count), **each}
    if not accepts:
        raise Unaccepted(f"no format of {kind}s works: {problem}") from problem
