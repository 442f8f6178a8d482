"""Packed text [1, T]: documents without a label are left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxpasses
from fxpasses.rows import choice
from tests.rows.models import TOKENS, VOCABULARY, Exit, Model
from tests.rows.test_live_rows import check, loss, losses_of_labelled, shifted_loss
from tests.support import compiled


class Documents(Model):
    """Packed text [1, T]: attention stays within a document, of which `seen` has the number."""

    def forward(self, ids: Tensor, seen: Tensor, labels: Tensor) -> Any:
        positions = torch.arange(ids.shape[1])[None]
        x = self.embedding(ids) + self.positions(positions % TOKENS)
        mask = (seen[:, None, :, None] == seen[:, None, None]) & (positions >= positions.transpose(0, 1))[None, None].mT
        for layer in self.layers:
            x = layer(x, mask, False, self.spelling)
        return self.exit(self, x, seen, labels)


def documents(*lengths: int, labelled: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """labelled: the documents whose second half has labels."""
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    place = torch.cat([torch.arange(n) / n for n in lengths])[None]
    ids = torch.randint(1, VOCABULARY, numbers.shape, generator=torch.Generator().manual_seed(sum(lengths)))
    wanted = torch.isin(numbers, torch.tensor(labelled)) & (place >= 0.5)
    return ids, numbers, torch.where(wanted, ids, -100)


def flat_loss(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    """In and out of the dimension of one text."""
    y = model.head(x.squeeze(0)).tanh().unsqueeze(0) + model.head(x[0])[None]
    return F.cross_entropy(y[..., :-1, :].reshape(-1, VOCABULARY), labels[:, 1:].flatten())


@pytest.mark.quick(2)
@pytest.mark.parametrize("exit", [loss, flat_loss, losses_of_labelled, shifted_loss])
@pytest.mark.parametrize("spelling", ["fused", "written", "by_groups"])
def test_packed_documents(exit: Exit, spelling: str) -> None:
    batches = [documents(9, 4, 11, labelled=(1,)), documents(3, 20, labelled=(0, 1)), documents(5, 5, 5, labelled=())]
    check(Documents(exit, spelling=spelling), batches)


def expanded_text(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    return (model.layers[0].out(x).expand(3, -1, -1) * model.head.weight[:3, :1, None]).square().sum()


def text_beside_several(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    y = x + torch.arange(3.0)[:, None, None]
    return model.head(y[:, 0]) + model.head(y)[torch.arange(3), torch.tensor([1, 0, 1])]


def text_that_several_share(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    """Three texts [3, 5], which attend to one."""
    other = model.embedding((labels.clamp(min=0)[:, :5].expand(3, -1) + torch.arange(3)[:, None]) % VOCABULARY)
    q, k = (z.unflatten(-1, (2, -1)).transpose(1, 2) for z in (other, x.expand(3, -1, -1)))
    y = F.scaled_dot_product_attention(q, k, k, attn_mask=(seen < 2)[:, None, None].expand(3, 1, 5, -1))
    return model.head(y.transpose(1, 2).flatten(2))[:, 0]


@pytest.mark.parametrize("exit", [expanded_text, text_beside_several, text_that_several_share])
def test_one_text_that_becomes_several(exit: Exit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "MOST_LIVE", 10.0)
    check(Documents(exit), [documents(9, 4, 11, labelled=(1,)), documents(3, 20, labelled=(0, 1))], taken=False)


def test_documents_without_labels_are_left_out() -> None:
    step = compiled(Documents(loss), rows="auto")
    fxpasses.row_stats(reset=True)
    step(*documents(100, 20, 80, labelled=(1,))).backward()
    assert fxpasses.row_stats(reset=True).live < 0.17  # 20 of 200, up to 32
