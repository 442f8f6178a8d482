"""Ends of programs in which a dead row matters, or looks as if it could."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VOCABULARY = 8, 23
DECOYS: dict[str, Callable[..., Tensor]] = {}


def decoy(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the model, x [B, T, WIDTH], seen and labels that returns what is trained."""
    DECOYS[function.__name__] = function
    return function


class Model(nn.Module):
    """ids are kept, for decoys that read them."""

    def __init__(self, end: Callable[..., Any]) -> None:
        super().__init__()
        self.embedding, self.other = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)
        self.register_buffer("running", torch.zeros(WIDTH))
        self.end = end
        self.ids = torch.zeros(0)

    def forward(self, ids: Tensor, seen: Tensor, labels: Tensor) -> Any:
        self.ids = ids
        x = self.embedding(ids)
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return self.end(self, x, seen, labels)


def loss(model: Model, x: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten(), **options)


# Tokens are mixed


@decoy
def batch_norm(model, x, seen, labels):
    return loss(model, model.norm(x.transpose(1, 2)).transpose(1, 2), labels)


@decoy
def batch_norm_of_rows(model, x, seen, labels):
    return loss(model, model.norm(x.flatten(0, 1)).view(x.shape), labels)


@decoy
def mean_of_tokens(model, x, seen, labels):
    return model.head(x.mean(1))


@decoy
def largest_token(model, x, seen, labels):
    return model.head(x.max(1).values)


@decoy
def largest_of_tokens_of_the_text(model, x, seen, labels):
    return model.head(x.masked_fill(~seen.bool()[..., None], -1e9).amax(1))


@decoy
def softmax_over_tokens(model, x, seen, labels):
    return loss(model, x.softmax(1), labels)


@decoy
def softmax_over_all(model, x, seen, labels):
    return loss(model, x.view(-1).softmax(0).view(x.shape), labels)


@decoy
def pooled_by_attention(model, x, seen, labels):
    scores = x.sum(-1).masked_fill(seen == 0, float("-inf")).softmax(-1)
    return model.head((scores.unsqueeze(-1) * x).sum(1))


@decoy
def cumulated(model, x, seen, labels):
    return loss(model, x.cumsum(1), labels)


@decoy
def convolved(model, x, seen, labels):
    return loss(model, model.conv(x.transpose(1, 2)).transpose(1, 2), labels)


@decoy
def flipped(model, x, seen, labels):
    return loss(model, x + x.flip(1), labels)


@decoy
def rolled(model, x, seen, labels):
    return loss(model, x + x.roll(1, 1), labels)


@decoy
def every_other_token(model, x, seen, labels):
    return loss(model, x[:, ::2], labels[:, ::2])


@decoy
def shifted(model, x, seen, labels):
    return loss(model, x[:, :-1], labels[:, 1:])


@decoy
def differences(model, x, seen, labels):
    return loss(model, x[:, 1:] - x[:, :-1], labels[:, 1:])


@decoy
def padded_in_front(model, x, seen, labels):
    return loss(model, x + F.pad(x, (0, 0, 1, 0))[:, :-1], labels)


@decoy
def mixed_by_an_einsum(model, x, seen, labels):
    return loss(model, torch.einsum("btc,bsc,bsd->btd", x, x, x), labels)


@decoy
def attention_written_out(model, x, seen, labels):
    return loss(model, (x @ x.transpose(1, 2)).softmax(-1) @ x, labels)


@decoy
def mask_that_is_not_infinite(model, x, seen, labels):
    bias = (1.0 - seen[:, None, None].to(x.dtype)) * -2.0
    heads = x.unsqueeze(1)
    y = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias.expand(-1, 1, x.shape[1], -1))
    return loss(model, y.squeeze(1), labels)


@decoy
def mask_of_activations(model, x, seen, labels):
    heads = x.unsqueeze(1)
    near = (x @ x.transpose(1, 2) > 0).unsqueeze(1) | torch.eye(x.shape[1], dtype=torch.bool)
    return loss(model, F.scaled_dot_product_attention(heads, heads, heads, attn_mask=near).squeeze(1), labels)


@decoy
def grouped_queries(model, x, seen, labels):
    heads = x.view(*x.shape[:2], 4, 2).transpose(1, 2)
    y = F.scaled_dot_product_attention(heads, heads[:, :2], heads[:, :2], is_causal=True, enable_gqa=True)
    return loss(model, y.transpose(1, 2).reshape(x.shape), labels)


@decoy
def heads_of_the_batch(model, x, seen, labels):
    """Attention with heads and texts in one dimension."""
    heads = x.view(*x.shape[:2], 2, 4).transpose(1, 2).flatten(0, 1)
    y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return loss(model, y.view(x.shape[0], 2, -1, 4).transpose(1, 2).reshape(x.shape), labels)


@decoy
def attention_over_texts(model, x, seen, labels):
    """The dimension of texts is where tokens should be."""
    heads = x.transpose(0, 1).unsqueeze(1)
    y = F.scaled_dot_product_attention(heads, heads, heads)
    return loss(model, y.squeeze(1).transpose(0, 1), labels)


@decoy
def sorted_tokens(model, x, seen, labels):
    return loss(model, x.sort(1).values, labels)


@decoy
def normalized_over_tokens(model, x, seen, labels):
    return loss(model, F.normalize(x, dim=1), labels)


@decoy
def normed_by_all(model, x, seen, labels):
    return loss(model, x / x.norm(), labels)


@decoy
def layer_norm_over_tokens(model, x, seen, labels):
    return loss(model, F.layer_norm(x, x.shape[1:]), labels)


@decoy
def first_token_everywhere(model, x, seen, labels):
    return loss(model, x + x[:, :1], labels)


@decoy
def first_token_expanded(model, x, seen, labels):
    return loss(model, x * x[:, 0].unsqueeze(1).expand_as(x), labels)


@decoy
def tokens_gathered(model, x, seen, labels):
    index = (torch.arange(x.shape[1]) // 2)[None, :, None].expand(x.shape)
    return loss(model, x.gather(1, index), labels)


@decoy
def added_by_index(model, x, seen, labels):
    added = x.new_zeros(x.shape[0], 3, WIDTH).index_add(1, torch.arange(x.shape[1]) % 3, x)
    return model.head(added).square().sum()


@decoy
def scattered(model, x, seen, labels):
    index = seen.unsqueeze(-1).expand(x.shape)
    return model.head(x.new_zeros(x.shape[0], 2, WIDTH).scatter_add(1, index, x)).square().sum()


@decoy
def of_tokens_and_features(model, x, seen, labels):
    return loss(model, x.transpose(1, 2).reshape(x.shape), labels)


@decoy
def of_texts_and_tokens(model, x, seen, labels):
    return loss(model, x.transpose(0, 1).reshape(x.shape), labels)


@decoy
def in_pairs_of_tokens(model, x, seen, labels):
    y = torch.cat([x, x], 1).view(x.shape[0], x.shape[1], 2 * WIDTH)
    return loss(model, y[..., :WIDTH] * y[..., WIDTH:], labels)


# Texts are mixed


@decoy
def mean_of_texts(model, x, seen, labels):
    return loss(model, x - x.mean(0), labels)


@decoy
def texts_in_another_order(model, x, seen, labels):
    return loss(model, x + x[torch.arange(x.shape[0]).flip(0)], labels)


@decoy
def texts_against_each_other(model, x, seen, labels):
    pooled = (x * seen.unsqueeze(-1)).sum(1)
    return F.cross_entropy(pooled @ pooled.t(), torch.arange(x.shape[0]))


# Labels and losses


@decoy
def labels_as_inputs(model, x, seen, labels):
    return loss(model, x + model.other(labels.clamp(min=0)), labels)


@decoy
def another_ignored_class(model, x, seen, labels):
    return loss(model, x, labels.masked_fill(labels == -100, 3), ignore_index=3)


@decoy
def nothing_is_ignored(model, x, seen, labels):
    return loss(model, x, labels.clamp(min=0))


@decoy
def target_of_activations(model, x, seen, labels):
    return loss(model, x, model.head(x).argmax(-1))


@decoy
def target_of_other_activations(model, x, seen, labels):
    return loss(model, x, model.head(model.embedding.weight[:1]).argmax(-1).expand(labels.shape))


@decoy
def probabilities_as_target(model, x, seen, labels):
    target = F.one_hot(labels.clamp(min=0), VOCABULARY).to(x.dtype)
    return F.cross_entropy(model.head(x).flatten(0, 1), target.flatten(0, 1))


@decoy
def loss_of_classes_in_front(model, x, seen, labels):
    return F.cross_entropy(model.head(x).transpose(1, 2), labels)


@decoy
def weighted_classes(model, x, seen, labels):
    return loss(model, x, labels, weight=torch.linspace(0.5, 2, VOCABULARY, dtype=x.dtype))


@decoy
def classes_weighted_by_the_model(model, x, seen, labels):
    return loss(model, x, labels, weight=model.head.bias.detach().exp(), label_smoothing=0.1)


@decoy
def divergence(model, x, seen, labels):
    log = model.head(x).log_softmax(-1)
    return F.kl_div(log, log.detach().roll(1, -1).exp(), reduction="batchmean")


@decoy
def divergence_of_labelled(model, x, seen, labels):
    log = model.head(x).log_softmax(-1)
    each = F.kl_div(log, log.detach().roll(1, -1).exp(), reduction="none").sum(-1)
    return (each * (labels != -100)).sum() / seen.sum()


@decoy
def squares(model, x, seen, labels):
    return F.mse_loss(x, torch.ones_like(x))


@decoy
def factor_of_activations(model, x, seen, labels):
    return (model.head(x) * (x[..., :1] > 0)).sum(1)


@decoy
def factor_beside_an_addition(model, x, seen, labels):
    """Where the factor is 0, the sum is of 1."""
    return ((x * seen.unsqueeze(-1) + 1) * 0.5).sum(1)


@decoy
def factor_within_an_exponential(model, x, seen, labels):
    return (x * seen.unsqueeze(-1)).exp().sum(1)


@decoy
def filled_with_one(model, x, seen, labels):
    return (x.masked_fill(~seen.bool().unsqueeze(-1), 1.0) * 2).sum(1)


@decoy
def divided_by_a_mask(model, x, seen, labels):
    return (x / (seen.unsqueeze(-1) + 1)).sum(1)


@decoy
def mean_with_a_mask(model, x, seen, labels):
    return (x * seen.unsqueeze(-1)).mean(1)


@decoy
def factor_of_features(model, x, seen, labels):
    return (x * torch.tensor([1.0, 0, 0, 1, 1, 0, 1, 0], dtype=x.dtype)).sum((0, 1))


@decoy
def sum_of_each_text_and_feature(model, x, seen, labels):
    return (x * seen.unsqueeze(-1)).sum((1, 2))


@decoy
def sum_of_texts(model, x, seen, labels):
    return loss(model, x + (x * seen.unsqueeze(-1)).sum(0), labels)


@decoy
def token_before_the_last(model, x, seen, labels):
    return model.head(x[:, -2])


# What is seen elsewhere


@decoy
def returned_rows(model, x, seen, labels):
    return loss(model, x, labels), x * 2


@decoy
def returned_labels_of_rows(model, x, seen, labels):
    return loss(model, x, labels), model.head(x).argmax(-1)


@decoy
def returned_accuracy(model, x, seen, labels):
    logits = model.head(x)
    return loss(model, x, labels), ((logits.argmax(-1) == labels) & (labels != -100)).sum()


@decoy
def number_of_a_row(model, x, seen, labels):
    return loss(model, x * min(x[0, -1, 0].item(), 0.5), labels)


@decoy
def running_mean(model, x, seen, labels):
    model.running.mul_(0.9).add_(x.detach().mean((0, 1)))
    return loss(model, x, labels)


@decoy
def running_last_row(model, x, seen, labels):
    model.running.copy_(x[-1, -1].detach())
    return loss(model, x, labels)


@decoy
def branch_on_rows(model, x, seen, labels):
    return loss(model, x.sin() if x.detach().sum() > 0 else x.cos(), labels)


@decoy
def unique_rows(model, x, seen, labels):
    return loss(model, x * len(torch.unique(x.detach().round())), labels)


@decoy
def written_into_a_larger_tensor(model, x, seen, labels):
    kept = x.new_zeros(x.shape[0], x.shape[1] + 1, WIDTH)
    kept[:, 1:] = x
    return loss(model, kept[:, :-1], labels)


@decoy
def written_token(model, x, seen, labels):
    y = x * 2
    y[:, 0] = 1.0
    return loss(model, y, labels)


@decoy
def written_by_a_view(model, x, seen, labels):
    y = x * 2
    y.view(-1, WIDTH).mul_(y.detach().mean())
    return loss(model, y, labels)


@decoy
def hook_on_the_gradient(model, x, seen, labels):
    x.register_hook(lambda gradient: gradient + 0.1)
    return loss(model, x, labels)


@decoy
def penalty_of_all_rows(model, x, seen, labels):
    return loss(model, x, labels) + 0.01 * x.square().mean()


@decoy
def dropped(model, x, seen, labels):
    return loss(model, F.dropout(x, 0.5), labels)


@decoy
def noise(model, x, seen, labels):
    return loss(model, x + torch.randn_like(x), labels)


# Writes by other names


@decoy
def rectified_in_place(model, x, seen, labels):
    y = x * 2
    first, before = y[:, 0], y + x
    F.relu(first, inplace=True)
    return loss(model, before + y, model.ids, ignore_index=0)


@decoy
def written_as_a_list(model, x, seen, labels):
    y = x.detach() * 2
    torch._foreach_mul_([y[:, 0]], 3.0)
    return loss(model, y + x, model.ids, ignore_index=0)


@decoy
def rows_written_as_a_list(model, x, seen, labels):
    y = x.detach() * 2
    torch._foreach_mul_([y], 3.0)
    return loss(model, y + x, labels)


@decoy
def written_as_a_result(model, x, seen, labels):
    y = x.detach() * 2
    flat = y.flatten(1)
    before = y + x
    torch.mul(flat.detach().clone(), 3.0, out=flat)
    return loss(model, before + y, model.ids, ignore_index=0)


@decoy
def sum_in_given_memory(model, x, seen, labels):
    found = x.new_zeros(x.shape[0], WIDTH)
    torch.sum(x.detach() * seen[..., None], 1, out=found)
    return loss(model, x, labels) + found.sum()


@decoy
def norm_over_tokens_and_features(model, x, seen, labels):
    return loss(model, F.normalize(x, dim=(1, 2)), labels)


# Embeddings


@decoy
def padding_index(model, x, seen, labels):
    return loss(model, x + model.other(model.ids), labels)


@decoy
def tied_weights(model, x, seen, labels):
    return F.cross_entropy((x @ model.embedding.weight.t()).view(-1, VOCABULARY), labels.view(-1))


@decoy
def table_that_is_renormed(model, x, seen, labels):
    return loss(model, x + F.embedding(model.ids, model.other.weight.detach().clone(), max_norm=0.5), labels)


@decoy
def table_that_counts_its_tokens(model, x, seen, labels):
    return loss(model, x + F.embedding(model.ids, model.other.weight, scale_grad_by_freq=True), labels)


@decoy
def ids_of_other_tokens(model, x, seen, labels):
    return loss(model, x + model.other(model.ids.flip(1)), labels)


@decoy
def ids_of_another_shape(model, x, seen, labels):
    """Texts' first tokens, by another table, for each of their tokens."""
    return loss(model, x + model.other(model.ids[:, :1]), labels)


@decoy
def ids_transposed(model, x, seen, labels):
    return loss(model, x + model.other(model.ids.t()).transpose(0, 1), labels)
