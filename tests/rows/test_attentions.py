"""Attention among rows in every spelling, by a plan or on unpacked rows, of one text and across two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rows.models import ATTENTIONS, LEAST, Model, Translation, batch
from tests.rows.test_live_rows import BATCHES, check, loss, shifted_loss
from tests.support import reports_of


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "spelling",
    [
        "capped",
        "biased",
        "with_sinks",
        "dropped",
        "filled_in_place",
        "by_groups",
        "alike_for_texts",
        "of_two",
        "with_scaled_sinks",
    ],
)
def test_attention_that_no_plan_computes(spelling: str) -> None:
    """It is computed on unpacked rows, so that a dropout draws eager mode's numbers."""
    check(Model(shifted_loss, spelling=spelling), [each for each in BATCHES if each is not BATCHES[2]])


def test_a_bias_between_two_texts() -> None:
    sources = [batch(*lengths, tokens=17)[:2] for lengths in ((17, 2, 9), (1, 3, 2), (4, 9, 17))]
    batches = [(*own, *source) for own, source in zip(BATCHES, sources, strict=False)]
    check(Translation(loss, spelling="biased", checkpoints=True), batches)


def unmasked(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    return torch.matmul((torch.matmul(q, k.mT) + bias).softmax(-1), v)


def masked_too_little(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    return torch.matmul((torch.matmul(q, k.mT) + bias).masked_fill(~mask, -9.0).softmax(-1), v)


def capped_after_the_mask(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT) + torch.where(mask, 0.0, LEAST)
    return torch.matmul(scores.tanh().softmax(-1), v)


def subtracted(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    return torch.matmul((bias - (torch.matmul(q, k.mT) + torch.where(mask, 0.0, 9.0))).softmax(-1), v)


def over_queries(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    scores = (torch.matmul(q, k.mT) + bias).masked_fill(~mask, LEAST)
    return torch.matmul(scores.softmax(-2), v)


def summed_without_a_mask(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT) + bias
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask) * scores.logsumexp(-1).unsqueeze(-1)


def unmasked_beside(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    """Of two scores that are multiplied, one is masked."""
    weights = (torch.matmul(q, k.mT) + torch.where(mask, 0.0, LEAST)).softmax(-1)
    return torch.matmul(weights * torch.matmul(q, k.sin().mT).softmax(-1), v)


def larger_of_masked_and_not(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT)
    return torch.matmul(torch.maximum(scores, scores + torch.where(mask, 0.0, LEAST)).softmax(-1), v)


def weights_added_to_scores(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    """A weight of 0 hides no score."""
    scores = torch.matmul(q, k.mT)
    weights = (scores + torch.where(mask, 0.0, LEAST)).softmax(-1)
    return torch.matmul((scores + weights).softmax(-1), v)


def weights_times_scores(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT)
    weights = (scores + torch.where(mask, 0.0, LEAST)).softmax(-1)
    return torch.matmul((scores * weights).softmax(-1), v)


def without_the_largest_of_masked(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    """The largest of the masked scores hides none of those that are not."""
    scores = torch.matmul(q, k.mT)
    return torch.matmul((scores - scores.masked_fill(~mask, LEAST).amax(-1, keepdim=True)).softmax(-1), v)


def mask_that_is_taken_back(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    hides = torch.where(mask, 0.0, LEAST)
    return torch.matmul((torch.matmul(q, k.mT).tanh() + hides - hides).softmax(-1), v)


def dropped_before(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT).tanh() + torch.where(mask, 0.0, LEAST)
    return torch.matmul(F.dropout(scores, 0.5).softmax(-1), v)


def divided_often(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT).tanh() + torch.where(mask, 0.0, LEAST)
    for _ in range(13):
        scores = scores / 999
    return torch.matmul(scores.softmax(-1), v)


def mask_times_nothing(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    hides = torch.add(bias, torch.where(mask, 0.0, LEAST), alpha=0.0)
    return torch.matmul((torch.matmul(q, k.mT).tanh() + hides).softmax(-1), v)


def softmax_over_one(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT).tanh() + torch.where(mask, 0.0, LEAST)
    return torch.matmul(scores.unflatten(-1, (-1, 1)).softmax(-1).flatten(-2), v)


def scores_as_bools(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT).tanh() + torch.where(mask, 0.0, LEAST)
    return torch.matmul(scores.bool().softmax(-1, dtype=v.dtype), v)


def mask_of_more_dimensions(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    """Each text under the masks of all."""
    scores = torch.matmul(q[:, 0], k[:, 0].mT).tanh().masked_fill(~mask, LEAST)
    return torch.matmul(scores.softmax(-1), v[:, :1]).mean(1, keepdim=True).expand_as(q)


@pytest.mark.parametrize("spelling", ["mask_that_is_added_back"])
def test_a_mask_that_another_undoes(spelling: str) -> None:
    """What the batch's masks hold is seen in each batch, and the one that undoes another is found there."""

    def mask_that_is_added_back(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
        scores = torch.matmul(q, k.mT).tanh() + torch.where(mask, 0.0, LEAST) + torch.where(mask, 0.0, -LEAST)
        return torch.matmul(scores.softmax(-1), v)

    ATTENTIONS[spelling] = mask_that_is_added_back
    check(Model(loss, spelling=spelling), BATCHES[:2], taken=False)


def test_a_mask_of_each_head_where_heads_come_first() -> None:
    """As many heads as texts: what differs along the heads is no mask of the texts."""

    def heads_first(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
        tokens, heads = q.shape[2], q.shape[1]
        own = torch.stack([torch.ones(tokens, tokens).tril().bool(), *[torch.eye(tokens).bool()] * (heads - 1)])
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        scores = torch.matmul(q, k.mT).tanh().masked_fill(~own[:, None], LEAST)
        return torch.matmul(scores.softmax(-1), v).transpose(0, 1)

    ATTENTIONS["heads_first"] = heads_first
    check(Model(loss, spelling="heads_first"), [batch(12, 7), batch(3, 12)], taken=False)


@pytest.mark.parametrize(
    "attention",
    [without_the_largest_of_masked, mask_that_is_taken_back, dropped_before, divided_often, mask_times_nothing,
     softmax_over_one, scores_as_bools, mask_of_more_dimensions,
     unmasked, masked_too_little, capped_after_the_mask, subtracted, over_queries,
     summed_without_a_mask, unmasked_beside, larger_of_masked_and_not, weights_added_to_scores, weights_times_scores],
)  # fmt: skip
def test_scores_in_which_dead_keys_are_seen(attention: Any) -> None:
    ATTENTIONS["seen"] = attention
    check(Model(loss, spelling="seen"), BATCHES[:2], taken=False)


@pytest.mark.quick(2)
@pytest.mark.parametrize("spelling", ["additive", "written", "filled", "einsum"])
def test_attention_in_every_spelling(spelling: str) -> None:
    check(Model(loss, spelling=spelling), BATCHES)


@pytest.mark.parametrize("spelling", ["fused", "written"])
def test_a_decoder_attends_to_an_encoder(spelling: str) -> None:
    sources = [batch(*lengths, tokens=17)[:2] for lengths in ((17, 2, 9), (1, 3, 2), (4, 9, 17))]
    check(
        Translation(loss, spelling=spelling), [(*own, *source) for own, source in zip(BATCHES, sources, strict=False)]
    )


def every_row(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    return x.pow(2).sum() + shifted_loss(model, x, seen, labels)


@pytest.mark.parametrize("spelling", ["additive", "written"])
def test_rows_that_see_nothing_are_eager_modes_where_they_are_needed(spelling: str) -> None:
    """Padding on the left sees nothing, and is a mean of all tokens then; on the right it sees the text."""
    check(Model(every_row, spelling=spelling), [BATCHES[2], BATCHES[3], BATCHES[2]], taken=False)


def test_a_mask_with_biases() -> None:
    """As ALiBi: what it holds is known with the batch, so the graph is rewritten a second time."""

    def distances(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, _: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        bias = (place - place[:, None]).abs() * -0.1
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(mask, bias, LEAST).to(q.dtype))

    ATTENTIONS["distances"] = distances
    check(Model(loss, spelling="distances"), [*BATCHES[:2], *BATCHES[3:6]])


def test_padding_is_no_row_of_zeros() -> None:
    """0 / 0 would be a NaN in the gradients of all weights."""

    def normed(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, _: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y / y.norm(dim=-1, keepdim=True)

    ATTENTIONS["normed"] = normed
    check(Model(loss, attention="padding", spelling="normed"), [*BATCHES[:2], BATCHES[5]])


class Caching(Model):
    """Returns the keys of all tokens, as a cache keeps them, beside the loss."""

    def forward(self, ids: Tensor, seen: Tensor, labels: Tensor) -> Any:
        x, kept = self.embedding(ids), []
        for layer in self.layers:
            q, k, v = (part.transpose(1, 2) for part in layer.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2))
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen.bool()[:, None, None].expand(-1, 1, x.shape[1], -1)
            )
            x, kept = x + layer.out(y.transpose(1, 2).flatten(2)), [*kept, k]
        return self.exit(self, x, seen, labels), kept[-1]


def test_keys_that_are_needed_for_all_rows_as_well() -> None:
    record = check(Caching(loss), BATCHES[:4], taken=False)
    assert any(report.changed for report in reports_of(record, "live_rows"))


class LateInteraction(Model):
    """Two texts, of which each token of one looks for a token of the other, as ColBERT does."""

    def forward(self, ids: Tensor, seen: Tensor, other: Tensor, other_seen: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        first, second = self._of(ids, seen, self.layers[0]), self._of(other, other_seen, self.layers[1])
        return self.exit(self, first @ second.transpose(1, 2), seen, other_seen)

    def _of(self, ids: Tensor, seen: Tensor, layer: Any) -> Tensor:
        mask = seen.bool()[:, None, None].expand(-1, 1, ids.shape[1], -1)
        found: Tensor = layer(self.embedding(ids), mask, False)
        return found


def largest(model: Model, scores: Tensor, seen: Tensor, other_seen: Tensor) -> Tensor:
    return scores.masked_fill(~other_seen.bool()[:, None], LEAST).amax(-1, keepdim=True).sum(1).mean()


def all_of_them(model: Model, scores: Tensor, seen: Tensor, other_seen: Tensor) -> Tensor:
    return torch.tanh(scores).sum()


@pytest.mark.parametrize("exit", [largest, all_of_them])
def test_scores_that_give_no_attention(exit: Any) -> None:
    own, other = batch(5, 3, 2, tokens=6), batch(12, 7, 9)
    check(LateInteraction(exit), [(*own[:2], *other)], taken=False)
