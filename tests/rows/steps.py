"""Attentions and steps of random programs. A step sees `y`, whose last dimension is features and whose rows are laid
out as the plan says, and metadata that `Environment` arranges alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY, LONGEST = 8, 2, 11, 12


@dataclass(frozen=True)
class Environment:
    """ids, seen and labels, int64 [B, T]; weights: of the layer. layout: of the rows that steps see."""

    ids: Tensor
    seen: Tensor
    labels: Tensor
    weights: Weights
    layout: str = "batch first"

    def arranged(self, x: Tensor) -> Tensor:
        """[B, T, C] as the layout has it."""
        if self.layout == "flat":
            return x.reshape(-1, x.shape[-1])
        if self.layout == "sequence first":
            return x.transpose(0, 1)
        if self.layout == "heads":
            return x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)
        return x

    def restored(self, y: Tensor) -> Tensor:
        """The inverse of `arranged`."""
        if self.layout == "flat":
            return y.view(self.ids.shape[0], self.ids.shape[1], -1)
        if self.layout == "sequence first":
            return y.transpose(0, 1)
        if self.layout == "heads":
            return y.transpose(1, 2).reshape(self.ids.shape[0], self.ids.shape[1], WIDTH)
        return y

    def factor(self, of: Tensor) -> Tensor:
        """Metadata [B, T] as a column that is broadcast against rows."""
        column = of.unsqueeze(-1)
        return column.unsqueeze(1) if self.layout == "heads" else self.arranged(column)

    def weight(self, y: Tensor) -> Tensor:
        """A square weight of the width of `y`."""
        return self.weights.square[: y.shape[-1], : y.shape[-1]]

    @property
    def is_real(self) -> Tensor:
        return self.seen.bool()


class Weights(nn.Module):
    """The parameters of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.positions = nn.Parameter(torch.randn(LONGEST, WIDTH))
        self.kinds = nn.Embedding(VOCABULARY, WIDTH)


# Masks of attention: bool [B or 1, H or 1, T, T], and whether attention is causal

ATTENTIONS: dict[str, Callable[[Environment], tuple[Tensor | None, bool]]] = {}


def attention(function: Callable[[Environment], tuple[Tensor | None, bool]]) -> Callable[..., object]:
    ATTENTIONS[function.__name__] = function
    return function


def _earlier(e: Environment) -> Tensor:
    tokens = e.ids.shape[1]
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def _keys(e: Environment) -> Tensor:
    tokens = e.ids.shape[1]
    return e.is_real[:, None, None].expand(-1, 1, tokens, -1)


@attention
def causal(e):
    return None, True


@attention
def padding(e):
    return _keys(e), False


@attention
def both(e):
    return _keys(e) & _earlier(e), False


@attention
def window(e):
    at = torch.arange(e.ids.shape[1])
    return (at[:, None] - at).abs()[None, None] < 3, False


@attention
def causal_window(e):
    return _keys(e) & (_earlier(e) & ~_earlier(e).tril(-2)), False


@attention
def of_each_head(e):
    return torch.stack([_earlier(e), _earlier(e).t()])[None] & _keys(e), False


@attention
def of_documents(e):
    """Token 1 begins a document."""
    document = (e.ids == 1).cumsum(1)
    return (document[:, None, :, None] == document[:, None, None]) & _earlier(e), False


@attention
def all_pairs(e):
    return None, False


# Steps, which keep the shape; all but the last are row-wise

STEPS: dict[str, Callable[[Environment, Tensor], Tensor]] = {}


def step(function: Callable[[Environment, Tensor], Tensor]) -> Callable[..., object]:
    STEPS[function.__name__] = function
    return function


@step
def linear(e, y):
    return F.linear(y, e.weight(y), e.weights.scale[: y.shape[-1]])


@step
def multiplied(e, y):
    return y @ e.weight(y)


@step
def layer_norm(e, y):
    return F.layer_norm(y, (y.shape[-1],), e.weights.scale[: y.shape[-1]])


@step
def rms_norm(e, y):
    return F.rms_norm(y, (y.shape[-1],), e.weights.scale[: y.shape[-1]], 1e-6)


@step
def rms_norm_written_out(e, y):
    return y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@step
def standardized(e, y):
    return (y - y.mean(-1, keepdim=True)) / (y.var(-1, unbiased=False, keepdim=True) + 0.1).sqrt()


@step
def silu(e, y):
    return F.silu(y)


@step
def gated_by_chunks(e, y):
    gate, up = torch.cat([F.linear(y, e.weight(y)), y], -1).chunk(2, -1)
    return F.gelu(gate) * up


@step
def split_and_swapped(e, y):
    first, second = y.split([1, y.shape[-1] - 1], -1)
    return torch.cat([second, first], -1)


@step
def glu(e, y):
    return F.glu(torch.cat([y, y * 2], -1), -1)


@step
def rotated(e, y):
    """As positions rotate queries and keys."""
    first, second = y.chunk(2, -1)
    angle = e.factor(e.seen.cumsum(1).to(y.dtype))
    return y * angle.cos() + torch.cat([-second, first], -1) * angle.sin()


@step
def stacked(e, y):
    return torch.stack([y, y.tanh()], -1).sum(-1)


@step
def stacked_in_front(e, y):
    return torch.stack([y, y * 2]).mean(0)


@step
def unbound(e, y):
    one, other = y.unflatten(-1, (2, -1)).unbind(-2)
    return torch.cat([one * other, one + other], -1)


@step
def unsqueezed(e, y):
    return (y.unsqueeze(-2) * y.unsqueeze(-1)).mean(-1) + y.unsqueeze(0).squeeze(0)


@step
def grouped_features(e, y):
    return y.view(*y.shape[:-1], 2, -1).softmax(-2).flatten(-2)


@step
def softmax(e, y):
    return y.softmax(-1)


@step
def log_softmax(e, y):
    return F.log_softmax(y, dim=-1)


@step
def gathered_features(e, y):
    own = e.factor(e.ids % y.shape[-1])
    return y * y.gather(-1, own.expand(*y.shape[:-1], 1))


@step
def products_with_oneself(e, y):
    own = torch.matmul(y.unsqueeze(-1), y.sin().unsqueeze(-2)).softmax(-1)
    return torch.matmul(y.unsqueeze(-2), e.weight(y) @ own).squeeze(-2)


@step
def by_weights_of_parts(e, y):
    """Of more dimensions than rows have, by letters."""
    weights = e.weight(y).unflatten(0, (2, -1))
    axes = "btk"[: y.dim() - 1]
    return torch.einsum(f"{axes}hc,hcd->{axes}d", y.unflatten(-1, (2, -1)), weights)


@step
def written_by_index(e, y):
    largest = y.detach().topk(2, -1).indices
    return y + torch.zeros_like(y).scatter_(-1, largest, 1.0).scatter_add(-1, largest[..., :1], y[..., :1])


@step
def largest_feature(e, y):
    return y - y.amax(-1, keepdim=True)


@step
def one_feature(e, y):
    return y + y[..., 1:2] * y[..., 0].unsqueeze(-1)


@step
def every_other_feature(e, y):
    return y[..., ::2].repeat_interleave(2, -1)


@step
def features_cumulated(e, y):
    return y.cumsum(-1) * 0.3


@step
def where_real(e, y):
    return torch.where(e.factor(e.is_real), y.sin(), y)


@step
def filled(e, y):
    return y.masked_fill(e.factor(~e.is_real), 0.5)


@step
def times_a_factor(e, y):
    return y * e.factor(e.seen)


@step
def divided_by_lengths(e, y):
    return y / e.factor(e.seen.sum(1, keepdim=True).clamp(min=1).expand_as(e.seen).to(y.dtype))


@step
def where_positive(e, y):
    return torch.where(y > 0, y, 0.1 * y).clamp(-3, 3)


@step
def positions(e, y):
    if e.layout == "batch first":
        return y + e.weights.positions[: y.shape[1]]
    return y + e.arranged(e.weights.positions[: e.ids.shape[1]].expand(*e.ids.shape, -1))


@step
def positions_of_text(e, y):
    return y + e.factor((e.seen.cumsum(1) - 1).clamp(min=0).to(y.dtype)) * 0.1


@step
def of_each_sequence(e, y):
    """Features [B, 1, C] that only the batch determines."""
    if e.layout != "batch first":
        return y
    share = e.seen.sum(1).to(y.dtype) / e.seen.shape[1]
    return y * (share[:, None] * torch.arange(1, WIDTH + 1)).cos()[:, None]


@step
def kinds_of_tokens(e, y):
    return y + e.arranged(e.weights.kinds(e.seen))


@step
def tokens_again(e, y):
    return y * e.arranged(e.weights.kinds(e.ids)).tanh()


@step
def added_in_place(e, y):
    z = y * 0.5
    z += y.sin()
    return z


@step
def multiplied_in_place(e, y):
    z = y.tanh()
    w = z.exp() * 2
    w.mul_(e.factor(e.seen))
    w += 0.5
    return w - y


@step
def filled_in_place(e, y):
    z = y * 2
    z.masked_fill_(e.factor(~e.is_real), 0.0)
    return z


@step
def detached(e, y):
    return y + y.detach().exp().clamp(max=3)


@step
def leaky(e, y):
    return torch.maximum(y, y * 0.1) + y.clamp(min=0)


@step
def dropped_by_nothing(e, y):
    return F.dropout(y, 0.0)


@step
def compared(e, y):
    return y * (y > y.mean(-1, keepdim=True))


@step
def contiguous(e, y):
    return y.transpose(-1, -2).contiguous().transpose(-1, -2).clone()


# Steps that mix rows


@step
def moved_along(e, y):
    return y + y.roll(1, 0)


@step
def less_the_mean(e, y):
    z = y * 1
    z -= y.mean((0, 1), keepdim=True)
    return z


@step
def running_sums(e, y):
    return y.cumsum(-2) / 4
