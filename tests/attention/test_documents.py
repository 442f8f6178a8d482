"""Packed texts that attention does not separate are told of, once; nothing else is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxpasses
from fxpasses.attention.documents import restarts
from fxpasses.base import once
from fxpasses.report import Reason
from tests.support import compiled

PACKED = [[0, 1, 2, 0, 1, 2, 3, 4]]


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "_given", set())


def causal(x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    q, places = (x * position_ids.cos()[..., None])[:, None], torch.arange(x.shape[1])
    return F.scaled_dot_product_attention(q, q, q, attn_mask=places[:, None] >= places)[:, 0]


def attend(x: torch.Tensor, position_ids: torch.Tensor, masked: bool = False) -> torch.Tensor:
    q = (x * position_ids.cos()[..., None])[:, None]
    mask = (position_ids.eq(0).cumsum(-1)[:, :, None] == position_ids.eq(0).cumsum(-1)[:, None]).tril()[:, None]
    attended = F.scaled_dot_product_attention(q, q, q, attn_mask=mask if masked else None, is_causal=not masked)
    return attended[:, 0]


def told(program: Any, *given: Any, **named: Any) -> tuple[list[str], list[Any]]:
    with warnings.catch_warnings(record=True) as said, fxpasses.inspect.record() as record:
        warnings.simplefilter("always")
        compiled(program)(*given, **named)
    texts = [str(w.message) for w in said if "restarts within a row" in str(w.message)]
    return texts, [r for graph in record.graphs for report in graph.reports for r in report.refusals]


def test_texts_without_a_mask_are_told_of_once() -> None:
    texts, refusals = told(lambda x, position_ids: attend(attend(x, position_ids), position_ids),
                           torch.randn(1, 8, 4), torch.tensor(PACKED))  # fmt: skip
    assert len(texts) == 1 and "`position_ids`" in texts[0] and "use_cache=False" in texts[0]
    (refusal,) = [refusal for refusal in refusals if refusal.reason is Reason.TEXTS_MIX]
    assert refusal.where.startswith("test_documents.py:")


def test_texts_whose_mask_is_that_of_any_batch_are_told_of() -> None:
    assert len(told(causal, torch.randn(1, 8, 4), torch.tensor(PACKED))[0]) == 1


@pytest.mark.parametrize(
    ("positions", "masked"),
    [(PACKED, True), ([[0, 1, 2, 3, 4, 5, 6, 7]], False), ([[1, 1, 1, 0, 1, 2, 3, 4]], False)],
    ids=["a mask", "one text", "padding on the left"],
)
def test_nothing_is_told_of_others(positions: list[list[int]], masked: bool) -> None:
    assert told(lambda x, position_ids: attend(x, position_ids, masked), torch.randn(1, 8, 4), torch.tensor(positions))[
        0
    ] == []  # fmt: skip


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (PACKED, True),
        ([[0, 1, 2, 3], [0, 1, 0, 1]], True),
        ([[5, 6, 0, 1]], True),  # a chunk of a longer text, and another
        ([[0, 0, 0, 1, 2]], False),  # padding on the left
        ([[0, 1, 2, 0, 0]], False),  # padding on the right
        ([[3, 1, 2, 0, 1]], False),  # no positions
        ([0, 1], False),
    ],
)
def test_restarts(positions: Any, expected: bool) -> None:
    assert restarts(torch.tensor(positions)) is expected


def test_transformers_mixes_texts_unless_it_has_no_cache() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    ids, positions = torch.randint(0, 32, (1, 8)), torch.tensor(PACKED)
    assert len(told(model, input_ids=ids, position_ids=positions)[0]) == 1
    torch._dynamo.reset()
    once.forget(("documents", "position_ids"))
    assert told(model, input_ids=ids, position_ids=positions, use_cache=False)[0] == []
