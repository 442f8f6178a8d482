"""Heads and losses in many spellings: programs of hidden rows [B, T, H], targets and token numbers [B, T]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLUMNS, HIDDEN = 40, 8

Loss = Callable[["Head", Tensor, Tensor, Tensor], Any]


class Head(nn.Module):
    """loss: of the model, hidden rows, targets of which some are -100, and tokens."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.table = nn.Embedding(COLUMNS, HIDDEN)
        self.head = nn.Linear(HIDDEN, COLUMNS)
        self.other = nn.Linear(HIDDEN, COLUMNS)
        self.down, self.up = nn.Linear(HIDDEN, 3, bias=False), nn.Linear(3, COLUMNS, bias=False)
        self.number = nn.Parameter(torch.tensor(3.0))
        self.columns = nn.Parameter(torch.randn(COLUMNS))
        self.loss = loss

    def forward(self, tokens: Tensor, target: Tensor) -> Any:
        return self.loss(self, self.table(tokens).sin(), target, tokens)


def batch(texts: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, COLUMNS, (texts, length))
    target = torch.randint(0, COLUMNS, (texts, length))
    target[0, : length // 2] = -100
    target[-1, 1] = -100
    return tokens, target


def entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), **options)


def mean(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return entropy(m.head(x).float() if x.dtype != torch.float64 else m.head(x), t)


def shift_by_padding(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    """As transformers' causal models do."""
    shifted = F.pad(t, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(m.head(x).view(-1, COLUMNS), shifted.view(-1), reduction="sum") / 7


def shift_by_slices(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return entropy(m.head(x)[..., :-1, :].contiguous(), t[..., 1:].contiguous())


def smoothed(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return entropy(m.head(x), t, label_smoothing=0.1, weight=m.columns.detach().abs())


def capped(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return entropy((m.head(x) / 30).tanh() * 30, t)


def learned_cap(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return entropy((m.head(x) / m.number).tanh() * m.number + m.columns, t)


def temperature_of_texts(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return entropy(m.head(x) / (tokens[:, :1].to(x.dtype)[..., None] + 1), t)


def columns_first(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return F.cross_entropy(m.head(x).transpose(1, 2), t)


def mean_of_texts(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    losses = F.cross_entropy(m.head(x).transpose(1, 2), t, reduction="none")
    return (losses.sum(1) / (t != -100).sum(1)).mean()


def z_loss(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    return entropy(logits, t) + 0.01 * logits.logsumexp(-1).square().mean()


def log_probabilities(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    """DPO: not linear in the losses of rows."""
    found = m.head(x).log_softmax(-1).gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return F.logsigmoid((found * (t != -100)).sum(-1)).mean()


def policy(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    """GRPO."""
    logps = m.head(x)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    mask, old = (t[:, 1:] != -100).to(x.dtype), logps.detach() + 0.1
    advantages, ratio = (tokens[:, :1] - 20) / 10, (logps - old).exp()
    losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + 0.04 * ((old - logps).exp() - 1)
    return (losses * mask).sum() / mask.sum()


def chosen_less_logsumexp(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    chosen = logits.gather(-1, tokens[..., None]).squeeze(-1)
    return -((chosen - logits.logsumexp(-1)).masked_fill(t == -100, 0).sum() / (t != -100).sum())


def accuracy_and_entropy(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    with torch.no_grad():
        logps = logits.log_softmax(-1)
        spread = -(logps.exp() * logps).sum(-1)
    return entropy(logits, t), (logits.argmax(-1) == t).sum(), spread


def among_the_best(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    best, _ = logits.max(-1)
    return entropy(logits, t) + best.mean() * 0.1, (logits.topk(5, -1).indices == t[..., None]).any(-1).sum()


def adapter(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return entropy(F.linear(x, m.head.weight.detach(), m.head.bias.detach()) + m.up(m.down(x)) * 2, t)


def tied(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return entropy(x @ m.table.weight.t(), t)


def by_letters(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return entropy(torch.einsum("btd,vd->btv", x, m.head.weight), t)


def teacher(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    with torch.no_grad():
        wanted = m.other(x)
    return F.kl_div(m.head(x).log_softmax(-1), wanted.softmax(-1), reduction="batchmean")


def students(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    first, second = m.head(x).log_softmax(-1), m.other(x).log_softmax(-1)
    return F.kl_div(first, second, log_target=True, reduction="none").sum(-1).mean() + entropy(first, t)


def probabilities_as_targets(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return entropy(m.head(x), t.clamp(min=0)) + F.cross_entropy(
        m.head(x).view(-1, COLUMNS), m.other(x).detach().softmax(-1).view(-1, COLUMNS)
    )


def focal(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    losses = entropy(m.head(x), t, reduction="none")
    return ((1 - (-losses.detach()).exp()) ** 2 * losses).sum() / (t != -100).sum()


def negative_log_likelihood(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return F.nll_loss(F.log_softmax(m.head(x), -1).view(-1, COLUMNS), t.view(-1))


def by_position(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x).view(-1, COLUMNS)
    return -logits.log_softmax(1)[torch.arange(logits.shape[0]), tokens.view(-1)].mean()


def in_place(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    logits /= 2.5
    return entropy(logits, t)


def fewer_columns(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x).masked_fill(torch.arange(COLUMNS) > COLUMNS - 3, -1e9)
    return entropy(logits[..., : COLUMNS - 1], t.clamp(max=COLUMNS - 4))


def centred(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    return entropy(logits - logits.mean(-1, keepdim=True), t) * m.number


def losses_returned(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    losses = F.cross_entropy(m.head(x).transpose(1, 2), t, reduction="none")
    return losses.mean(), losses, losses.detach() + 1


def two_losses(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    return entropy(logits, t), (logits.logsumexp(-1) ** 2).mean()


def nothing_ignored(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return entropy(m.head(x), tokens, ignore_index=3)


def all_ignored(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return entropy(m.head(x), torch.full_like(t, -100), reduction="sum")


def mean_of_all(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return m.head(x).square().mean()


TAKEN = [
    mean, shift_by_padding, shift_by_slices, smoothed, capped, learned_cap, temperature_of_texts, columns_first,
    mean_of_texts, z_loss, log_probabilities, policy, chosen_less_logsumexp, accuracy_and_entropy, among_the_best,
    adapter, tied, by_letters, teacher, students, probabilities_as_targets, focal, negative_log_likelihood,
    by_position, in_place, fewer_columns, centred, losses_returned, two_losses, nothing_ignored, all_ignored,
    mean_of_all,
]  # fmt: skip


# Logits that stand, since something else reads them.


def logits_returned(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    return entropy(logits, t), logits


def logits_multiplied(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    return entropy(logits, t) + (logits @ m.other.weight).square().mean()


def normalised_along_rows(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    return entropy(logits - logits.mean(1, keepdim=True), t)


def softmax_along_rows(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return m.head(x).log_softmax(1).gather(-1, tokens[..., None]).mean()


def other_rows(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    return entropy(logits.flip(1), t)


def by_the_mean_of_all(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    return entropy(logits / logits.square().mean().sqrt(), t)


def two_shifts(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    return entropy(logits[:, :-1], t[:, 1:]) + entropy(logits[:, :-2], t[:, 2:])


def written_by_another_name(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    rows = logits.view(-1, COLUMNS)
    logits /= 2.5
    return F.cross_entropy(rows, t.view(-1))


def with_dropout(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return entropy(F.dropout(m.head(x), 0.5), t)


def weighed_by_what_trains(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    """The losses weigh by what needs a gradient: taken, with gradients in backward."""
    losses = F.cross_entropy(m.head(x).transpose(1, 2), t, reduction="none")
    return (losses * m.down(x).sum(-1)).sum()


LEFT = [
    logits_returned, logits_multiplied, normalised_along_rows, softmax_along_rows, other_rows, by_the_mean_of_all,
    two_shifts, written_by_another_name, with_dropout,
]  # fmt: skip
