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

from tests.rows.steps import ATTENTIONS, HEADS, LONGEST, STEPS, VOCABULARY, WIDTH, Environment, Weights

Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class LayerPlan:
    attention: str
    layout: str
    steps: tuple[str, ...]
    checkpointed: bool = False


@dataclass(frozen=True)
class Plan:
    """exits: whose losses are added. returns: what is returned besides the loss. given: hidden rows are an input."""

    layers: tuple[LayerPlan, ...]
    exits: tuple[str, ...]
    returns: str = "nothing"
    given: bool = False


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
def running_losses(e, x, head):
    """Masked losses of which something reads all, one after the other."""
    each = F.cross_entropy(head(x).flatten(0, 1), e.labels.flatten(), reduction="none").view(e.labels.shape)
    return torch.where(_labelled(e), each, 0.0).cumsum(1).square().mean() + (each * _labelled(e)).cummax(1)[0].sum()


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
        return self.of_rows(self.embedding(ids), ids, seen, labels)

    def of_rows(self, x: Tensor, ids: Tensor, seen: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
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
    returns = chance.choice(["nothing"] * 5 + ["numbers", "pooled", "hidden"])
    return Plan(layers, exits, returns, given=chance.random() < 0.2)
