"""Programs in which a key that a mask hides counts all the same, or the mask is not what it seems."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpasses.rows import choice
from tests.support import assert_same, compiled, results

LEAST = torch.finfo(torch.float32).min
WIDTH, LENGTH, CLASSES = 8, 8, 9
TRIANGLE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
LATE = torch.where(torch.arange(LENGTH) >= 6, 2, -100).expand(2, LENGTH).contiguous()
FOURTH = torch.where(torch.arange(LENGTH) == 3, 2, -100).expand(2, LENGTH).contiguous()
FIFTH = torch.where(torch.arange(LENGTH) == 4, 2, -100).expand(2, LENGTH).contiguous()


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "MOST_LIVE", 10.0)


class Text(nn.Module):
    def __init__(self, program: Any) -> None:
        super().__init__()
        self.table, self.qkv, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, CLASSES)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("strict", torch.where(TRIANGLE.tril(-1), 0.0, LEAST))
        self.register_buffer("kept", torch.zeros(2, LENGTH, WIDTH))
        self.program = program

    def forward(self, tokens: Tensor, seen: Tensor, labels: Tensor) -> Any:
        return self.program(self, self.table(tokens), seen, labels)

    def heads(self, x: Tensor, heads: int = 2) -> Any:
        return (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))

    def loss(self, y: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(y).view(-1, CLASSES), labels.view(-1))

    def after(self, scores: Tensor, value: Tensor, labels: Tensor) -> Tensor:
        return self.loss(merged(scores.softmax(-1) @ value), labels)


def merged(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


def padding(seen: Tensor) -> Tensor:
    return torch.where(seen.bool(), 0.0, LEAST)[:, None, None]


def rows_given_to_checkpoints(m: Text, x: Tensor, seen: Tensor, labels: Tensor) -> Any:
    scale, shift = m.one(x), m.two(x)
    mask = seen.bool()[:, None, None].expand(-1, 1, LENGTH, -1)

    def block(x: Tensor) -> Tensor:
        y = x[:, None]
        return (x + F.scaled_dot_product_attention(y, y, y, attn_mask=mask)[:, 0]) * scale + shift

    for _ in range(3):
        x = checkpoint(block, x, use_reentrant=False)
    return m.loss(x, labels)


def mask_written_through_views(m: Text, x: Tensor, seen: Tensor, labels: Tensor) -> Any:
    def layer(x: Tensor) -> Tensor:
        mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
        mask.diagonal().fill_(True)
        mask.diagonal(-1).fill_(True)
        q, k, v = m.heads(x)
        return x + merged(F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None]))

    return m.loss(checkpoint(layer, x, use_reentrant=False), labels)


def greatest_of_more_keys(m: Text, x: Tensor, seen: Tensor, labels: Tensor) -> Any:
    """Only a causal mask hides keys where the greatest score is taken."""
    q, k, v = m.heads(x)
    scores = q @ k.mT + torch.where(TRIANGLE, 0.0, LEAST)[None, None]
    scores = scores - scores.amax(-1, keepdim=True) + padding(seen)
    sinks = torch.zeros(2, 2, LENGTH, 1, dtype=scores.dtype)
    return m.loss(merged(torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v), labels)


def greatest_of_queries(m: Text, x: Tensor, seen: Tensor, labels: Tensor) -> Any:
    q, k, v = m.heads(x, 4)
    scores = (q @ k.mT).view(2, 2, 2, LENGTH, LENGTH).masked_fill(~TRIANGLE, LEAST)
    scores = scores - scores.amax(dim=3, keepdim=True).tanh()
    return m.loss(merged(scores.softmax(-1).view(2, 4, LENGTH, LENGTH) @ v), labels)


def mask_of_groups_of_heads(m: Text, x: Tensor, seen: Tensor, labels: Tensor) -> Any:
    """As many groups as texts."""
    q, k, v = m.heads(x, 4)
    place = torch.arange(LENGTH)
    mask = torch.stack([place[:, None] // 4 == place // 4, TRIANGLE])[:, None]
    scores = (q @ k.mT).view(2, 2, 2, LENGTH, LENGTH).masked_fill(~mask, LEAST)
    return m.loss(merged(scores.softmax(-1).view(2, 4, LENGTH, LENGTH) @ v), labels)


def probabilities_as_targets(m: Text, x: Tensor, seen: Tensor, labels: Tensor) -> Any:
    q, k, v = m.heads(x)
    x = merged(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    target = F.one_hot(labels.clamp(min=0), CLASSES).to(x.dtype).view(-1, CLASSES)
    losses = F.cross_entropy(m.head(x).view(-1, CLASSES), target, reduction="none")
    return (losses * (labels.view(-1) != -100)).sum()


def rows_kept_in_a_buffer(m: Text, x: Tensor, seen: Tensor, labels: Tensor) -> Any:
    q, k, v = m.heads(x)
    x = merged(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    m.kept.copy_(x.detach())  # type: ignore[operator]
    return m.loss(x, labels)


def mask_in_a_buffer(m: Text, x: Tensor, seen: Tensor, labels: Tensor) -> Any:
    """It hides a query itself and what is later, so that the fifth sees padding alone."""
    q, k, v = m.heads(x)
    return m.after(q @ k.mT + m.strict + padding(seen), v, labels)


def large_constants(m: Text, x: Tensor, seen: Tensor, labels: Tensor) -> Any:
    q, k, v = m.heads(x)
    bias = (torch.arange(LENGTH) == 0).to(x.dtype)
    for _ in range(7):
        bias = bias * 1e6
    return m.after(q @ k.mT + bias + padding(seen), v, labels)


def large_scores(m: Text, x: Tensor, seen: Tensor, labels: Tensor) -> Any:
    q, k, v = m.heads(x)
    return m.after((q @ k.mT) * 1e39 + padding(seen), v, labels)


def narrow_softmax(m: Text, x: Tensor, seen: Tensor, labels: Tensor) -> Any:
    q, k, v = m.heads(x)
    scores = (q @ k.mT).masked_fill(~seen.bool()[:, None, None], LEAST)
    return m.loss(merged(scores.to(torch.bfloat16).softmax(-1).to(v.dtype) @ v), labels)


PROGRAMS = [
    (rows_given_to_checkpoints, FOURTH), (mask_written_through_views, LATE), (greatest_of_more_keys, LATE),
    (greatest_of_queries, FOURTH), (mask_of_groups_of_heads, LATE), (probabilities_as_targets, LATE),
    (rows_kept_in_a_buffer, LATE), (mask_in_a_buffer, FIFTH), (large_constants, LATE), (large_scores, LATE),
    (narrow_softmax, LATE),
]  # fmt: skip


@pytest.mark.all_cases
@pytest.mark.parametrize(("program", "labels"), PROGRAMS)
def test_what_is_computed_is_eager_modes(program: Any, labels: Tensor) -> None:
    tokens = torch.randint(1, 9, (2, LENGTH))
    left = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1]])
    right = left.flip(1) if program is rows_given_to_checkpoints else left
    assert_same(Text(program).double(), [(tokens, right, labels)], tolerance=1e-9)


def test_a_bias_in_the_mask_of_a_later_batch_runs_as_captured() -> None:
    def given(m: Text, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
        for _ in range(2):
            q, k, v = m.heads(x)
            x = x + merged(F.scaled_dot_product_attention(q, k, v, mask))
        return m.loss(x, labels)

    torch.manual_seed(0)
    model, tokens = Text(given), torch.randint(9, (2, LENGTH))
    program = compiled(model, "aot_eager", strict=False)
    mask = torch.where(TRIANGLE, 0.0, LEAST).expand(2, 1, LENGTH, LENGTH).clone()
    biased = mask.clone()
    biased[0, 0, 4, 1] = -1.0
    torch.testing.assert_close(results(program, [tokens, mask, LATE]), results(model, [tokens, mask, LATE]))
    with pytest.warns(UserWarning, match="NotPacked: an additive mask has values besides 0"):
        found = results(program, [tokens, biased, LATE])
    torch.testing.assert_close(found, results(model, [tokens, biased, LATE]))
