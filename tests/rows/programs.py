"""Random programs over the rows of a batch: layers of attention and row-wise steps in several layouts, then exits.

A plan is made of names, so that it can be shrunk and printed. A step sees `y`, whose last dimension is features and
whose rows are arranged as the layout says, and metadata that `Environment` arranges alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, VOCABULARY, LONGEST = 8, 2, 11, 12
Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class LayerPlan:
    attention: str
    layout: str
    steps: tuple[str, ...]
    checkpointed: bool = False


@dataclass(frozen=True)
class Plan:
    """exits: whose losses are added. returns: what is returned besides the loss."""

    layers: tuple[LayerPlan, ...]
    exits: tuple[str, ...]
    returns: str = "nothing"


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


# Exits: x [B, T, WIDTH] and logits of it, to what is added to the loss

EXITS: dict[str, Callable[[Environment, Tensor, Callable[[Tensor], Tensor]], Tensor]] = {}


def exit(function: Callable[[Environment, Tensor, Callable[[Tensor], Tensor]], Tensor]) -> Callable[..., object]:
    EXITS[function.__name__] = function
    return function


def _labelled(e: Environment) -> Tensor:
    return e.labels != -100


@exit
def mean_loss(e, x, head):
    return F.cross_entropy(head(x).view(-1, VOCABULARY), e.labels.view(-1))


@exit
def summed_loss(e, x, head):
    total = F.cross_entropy(head(x).flatten(0, 1), e.labels.flatten(), reduction="sum")
    return total / _labelled(e).sum().clamp(min=1)


@exit
def smoothed_loss(e, x, head):
    return F.cross_entropy(head(x).flatten(0, 1), e.labels.flatten(), label_smoothing=0.1)


@exit
def weighted_loss(e, x, head):
    weight = torch.linspace(0.5, 2, VOCABULARY, dtype=x.dtype)
    return F.cross_entropy(head(x).reshape(-1, VOCABULARY), e.labels.reshape(-1), weight, reduction="sum")


@exit
def shifted_loss(e, x, head):
    target = F.pad(e.labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(head(x).view(-1, VOCABULARY), target.view(-1), ignore_index=-100)


@exit
def loss_of_each(e, x, head):
    each = F.cross_entropy(head(x).flatten(0, 1), e.labels.flatten(), reduction="none", ignore_index=-100)
    return (each * _labelled(e).flatten()).sum() / e.seen.sum()


@exit
def loss_of_each_text(e, x, head):
    each = F.cross_entropy(head(x).flatten(0, 1), e.labels.flatten(), reduction="none").view(e.labels.shape)
    return ((each * _labelled(e)).sum(1) / _labelled(e).sum(1).clamp(min=1)).mean()


@exit
def log_probabilities(e, x, head):
    found = head(x).log_softmax(-1).gather(-1, e.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return F.logsigmoid((found * _labelled(e)).sum(-1)).mean()


@exit
def entropy(e, x, head):
    log = F.log_softmax(head(x), -1)
    return -((log.exp() * log).sum(-1) * e.seen).sum() / e.seen.sum()


@exit
def first_token(e, x, head):
    return head(x[:, 0]).tanh().sum()


@exit
def last_token(e, x, head):
    return head(x)[torch.arange(x.shape[0]), e.seen.sum(1).clamp(min=1) - 1].square().mean()


@exit
def last_of_padded_left(e, x, head):
    return x[:, -1].sin().sum()


@exit
def mean_of_text(e, x, head):
    weights = e.seen.unsqueeze(-1).to(x.dtype)
    return head((x * weights).sum(1) / weights.sum(1)).logsumexp(-1).mean()


@exit
def sum_of_text(e, x, head):
    return x.masked_fill(~e.is_real.unsqueeze(-1), 0).sum(1, keepdim=True).square().mean()


@exit
def sum_of_all(e, x, head):
    return x.tanh().sum()


@exit
def squares_of_labelled(e, x, head):
    return ((x - 1).square() * _labelled(e).unsqueeze(-1)).sum() / WIDTH


@exit
def contrast_of_texts(e, x, head):
    """Texts against each other, by their first token."""
    pooled = F.normalize(x[:, 0], dim=-1)
    return F.cross_entropy(pooled @ pooled.t(), torch.arange(x.shape[0]))


class Layer(nn.Module):
    def __init__(self, plan: LayerPlan) -> None:
        super().__init__()
        self.plan, self.weights = plan, Weights()

    def forward(self, x: Tensor, ids: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
        e = Environment(ids, seen, labels, self.weights, self.plan.layout)
        if self.plan.attention:
            x = x + self._attended(e, x)
        y = e.arranged(x)
        for name in self.plan.steps:
            y = STEPS[name](e, y)
        return x + e.restored(y)

    def _attended(self, e: Environment, x: Tensor) -> Tensor:
        batch, tokens = e.ids.shape
        normed = F.layer_norm(x, (WIDTH,))
        q, k, v = (
            part.view(batch, tokens, HEADS, -1).transpose(1, 2) for part in self.weights.qkv(normed).chunk(3, -1)
        )
        mask, is_causal = ATTENTIONS[self.plan.attention](e)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        return self.weights.out(y.transpose(1, 2).reshape(batch, tokens, WIDTH))


class Program(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer(layer) for layer in plan.layers)
        self.weights = Weights()

    def forward(self, ids: Tensor, seen: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        x = self.embedding(ids)
        hidden = []
        for layer in self.layers:
            arguments = (x, ids, seen, labels)
            x = checkpoint(layer, *arguments, use_reentrant=False) if layer.plan.checkpointed else layer(*arguments)
            hidden.append(x)
        x = F.layer_norm(x, (WIDTH,))
        e = Environment(ids, seen, labels, self.weights)
        losses = [EXITS[name](e, x, self.head) for name in self.plan.exits]
        loss = torch.stack(losses).sum()
        if self.plan.returns == "pooled":
            return loss, x[:, 0] * 2
        if self.plan.returns == "hidden":
            return loss, hidden[0]
        return (loss, seen.sum(), loss.detach()) if self.plan.returns == "numbers" else (loss,)


def batches(seed: int, count: int = 2) -> list[Batch]:
    """ids, seen and labels, padded on either side or not, with few labels or none; of other sizes for odd seeds."""
    chance = random.Random(seed)
    texts, tokens = chance.randint(2, 4), chance.randint(4, LONGEST)
    found = []
    for _ in range(count):
        if seed % 2:
            texts, tokens = chance.randint(1, 4), chance.choice([1, 2, *range(4, LONGEST + 1)])
        kind = chance.choice(["any"] * 6 + ["short", "short", "full", "one"])
        longest = {"short": (tokens + 2) // 3, "one": 1}.get(kind, tokens)
        lengths = torch.tensor([tokens if kind == "full" else chance.randint(1, longest) for _ in range(texts)])
        generator = torch.Generator().manual_seed(chance.randrange(10**6))
        at = torch.arange(tokens)
        real = at < lengths[:, None] if chance.random() < 0.7 else at >= tokens - lengths[:, None]
        ids = torch.randint(1, VOCABULARY, (texts, tokens), generator=generator) * real
        labelled = torch.rand(texts, tokens, generator=generator) < chance.choice([0.0, 0.3, 0.3, 1.0])
        found.append((ids, real.long(), ids.masked_fill(~(real & labelled), -100)))
    return found


def plan(seed: int) -> Plan:
    chance = random.Random(seed)
    layouts = ["batch first", "batch first", "flat", "sequence first", "heads"]

    def layer() -> LayerPlan:
        steps = tuple(chance.choice(list(STEPS)) for _ in range(chance.randint(0, 3)))
        return LayerPlan(chance.choice(["", *ATTENTIONS]), chance.choice(layouts), steps, chance.random() < 0.16)

    layers = tuple(layer() for _ in range(chance.randint(1, 2)))
    exits = tuple(chance.choice(list(EXITS)) for _ in range(chance.choice([1, 1, 2])))
    return Plan(layers, exits, chance.choice(["nothing"] * 5 + ["numbers", "pooled", "hidden"]))
