"""`pad_sequence` is one graph, whichever text is the longest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.support import assert_same

X = torch.linspace(-1, 1, 36).view(12, 3)
ORDERS = ([3, 4, 5], [5, 4, 3], [4, 5, 3], [2, 8, 2], [4, 4, 4])

pytestmark = pytest.mark.usefixtures("capture_flags")


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(X.clone().requires_grad_(), torch.tensor(lengths)) for lengths in ORDERS]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True, "padding_value": 0.5},
        {"batch_first": True, "padding_value": -1, "padding_side": "left"},
    ],
)
def test_it_is_one_graph_whichever_text_is_the_longest(options: dict[str, Any]) -> None:
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        return pad_sequence(x.split(lengths.tolist()), **options).sin()

    assert len(assert_same(program, batches(), "aot_eager").graphs) == 1


def test_slices_and_integers_are_padded_as_well() -> None:
    def program(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        texts, positions, start = [], [], 0
        for length in lengths.tolist():
            texts.append(x[start : start + length, 0])
            positions.append(torch.arange(length))
            start += length
        padded = pad_sequence(texts, batch_first=True)
        mask = pad_sequence([torch.ones_like(text, dtype=torch.bool) for text in texts], batch_first=True)
        return padded.cos(), pad_sequence(positions, padding_value=2.5), mask

    assert len(assert_same(program, batches(), "aot_eager").graphs) == 1


def test_texts_that_the_kernel_converts_are_as_in_eager_mode() -> None:
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        one, two, three = x.split(lengths.tolist())
        return pad_sequence([one, two.double(), three])

    assert_same(program, batches()[:2], "aot_eager")
