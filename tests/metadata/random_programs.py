"""Random programs for `hoist_metadata`: layers of steps over a small environment of metadata, masks and activations.

A step is a name and three numbers in [0, 1) that pick its operands. Values made by one step are operands of later ones,
so that reads, writes, views and copies of the same memory come in any order, inside and outside checkpoint bodies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

TOKENS, WIDTH, SEQUENCES = 10, 4, 3
Step = tuple[str, float, float, float]


@dataclass(frozen=True)
class Layer:
    """checkpointed: runs in a checkpoint body. autocast: runs under bfloat16. shares: works on the model's own mask."""

    steps: tuple[Step, ...]
    checkpointed: bool
    autocast: bool
    shares: bool


@dataclass(frozen=True)
class Plan:
    """returns: "x", "mask" (besides x) or "views" (a cumulative sum and two outputs that share memory besides x)."""

    layers: tuple[Layer, ...]
    returns: str


class Environment:
    """The values that steps choose from: integer vectors, Python numbers, float masks, and the activation `x`."""

    def __init__(self, x: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor) -> None:
        self.x, self.weight, self.positions, self.lengths = x, weight, positions, lengths
        self.vectors = [lengths]
        self.numbers: list[Any] = [2]
        self.masks = [torch.zeros(TOKENS, TOKENS)]

    def vector(self, chance: float) -> torch.Tensor:
        return self.vectors[int(chance * len(self.vectors))]

    def number(self, chance: float) -> Any:
        return self.numbers[int(chance * len(self.numbers))]

    def mask(self, chance: float) -> torch.Tensor:
        return self.masks[int(chance * len(self.masks))]


STEPS: dict[str, Callable[[Environment, float, float, float], None]] = {}


def step(function: Callable[[Environment, float, float, float], None]) -> Callable[..., None]:
    STEPS[function.__name__] = function
    return function


# Numbers from metadata


@step
def read_longest(e, a, b, c):
    e.numbers.append(e.vector(a).max().item() % TOKENS)


@step
def read_one(e, a, b, c):
    e.numbers.append(int(e.vector(a)[int(b * SEQUENCES)]) % TOKENS)


@step
def read_all(e, a, b, c):
    total = 0
    for length in e.vector(a).tolist():
        total = total + length
    e.numbers.append(total % TOKENS)


@step
def read_float(e, a, b, c):
    e.x = e.x * (e.vector(a).float().mean().item() * 0.1)


@step
def read_bool(e, a, b, c):
    e.x = e.x + (e.vector(a) > 3).any().item()


# Vectors


@step
def arithmetic(e, a, b, c):
    e.vectors.append((e.vector(a) + e.vector(b)) % 7)


@step
def cumulative(e, a, b, c):
    e.vectors.append(e.vector(a).cumsum(0))


@step
def flipped(e, a, b, c):
    e.vectors.append(e.vector(a).flip(0))


@step
def viewed(e, a, b, c):
    e.vectors.append(e.vector(a).view(SEQUENCES, 1).squeeze(1))


@step
def unbound(e, a, b, c):
    e.vectors.append(e.vector(a).unbind()[int(b * SEQUENCES)] * e.vector(c))


@step
def padded(e, a, b, c):
    e.vectors.append(F.pad(e.vector(a)[1:], (1, 0), value=2))


@step
def cast(e, a, b, c):
    e.vectors.append(e.vector(a).to(torch.int32 if b < 0.5 else torch.int64))


@step
def literal(e, a, b, c):
    e.vectors.append(torch.tensor([1, 2, 3]) * e.vector(a))


@step
def like_an_activation(e, a, b, c):
    e.vectors.append(e.x.new_zeros(SEQUENCES, dtype=torch.int64) + e.vector(a))


@step
def copied_and_written(e, a, b, c):
    copy = e.vector(a).clone()
    copy[int(b * SEQUENCES)] = int(c * 5)
    e.vectors.append(copy)


@step
def vector_added_to(e, a, b, c):
    if e.vector(a) is not e.lengths or c < 0.3:  # now and then the graph's input
        e.vector(a).add_(1)


@step
def vector_element_written(e, a, b, c):
    if e.vector(a) is not e.lengths:
        e.vector(a)[int(b * SEQUENCES)] = e.number(c)


@step
def random_vector(e, a, b, c):
    e.vectors.append(torch.randint(0, 5, (SEQUENCES,)))


@step
def of_an_activation(e, a, b, c):
    e.vectors.append((e.x.detach().sum() > 0).long() + e.vector(a))


@step
def of_a_parameter(e, a, b, c):
    e.vectors.append((e.weight.detach().sum() > 0).long() + e.vector(a))


# Masks


@step
def constant_mask(e, a, b, c):
    e.masks.append(torch.full((TOKENS, TOKENS), float(int(a * 3))))


@step
def rows_mask(e, a, b, c):
    rows = torch.arange(TOKENS)[:, None] < e.vector(a)[0]
    e.masks.append(rows.to(e.x.dtype).expand(TOKENS, TOKENS) * 1.0)


@step
def segments_mask(e, a, b, c):
    ends = (e.vector(a) % 3 + 1).cumsum(0)
    segment = (torch.arange(TOKENS)[:, None] >= ends[None]).sum(1)
    e.masks.append((segment[:, None] == segment[None]).float())


@step
def slice_assigned(e, a, b, c):
    stop = e.number(b)
    torch._check(stop >= 0)
    torch._check(stop <= TOKENS)
    e.mask(a)[:stop] = c


@step
def boolean_assigned(e, a, b, c):
    position = torch.arange(TOKENS)
    e.mask(a)[(position < e.number(b))[:, None] & (position[None] > 2)] = c


@step
def masked_filled(e, a, b, c):
    e.mask(a).masked_fill_((torch.arange(TOKENS) < e.vector(b)[1])[:, None], c)


@step
def mask_added(e, a, b, c):
    e.mask(a).add_(e.mask(b))


@step
def mask_scaled(e, a, b, c):
    mask = e.mask(a)
    mask *= 0.5


@step
def mask_copied_into(e, a, b, c):
    e.mask(a).copy_(e.mask(b))


@step
def written_through_a_view(e, a, b, c):
    e.mask(a).t()[int(b * TOKENS)].fill_(c)


@step
def view_of_a_mask(e, a, b, c):
    e.masks.append(e.mask(a).t())


@step
def written_from_itself(e, a, b, c):
    mask = e.mask(a)
    mask[0] = mask.sum(0) * 0.1


@step
def clone_of_a_mask(e, a, b, c):
    e.masks.append(e.mask(a).clone())


@step
def written_from_an_activation(e, a, b, c):
    e.mask(a)[0] = e.x.detach().sum() * 0.01


@step
def noise_added(e, a, b, c):
    e.mask(a).add_(torch.rand(TOKENS, 1))


# Uses


@step
def use_mask_in_a_product(e, a, b, c):
    e.x = torch.tanh(e.mask(a) + 0.0) @ e.x


@step
def use_a_column(e, a, b, c):
    e.x = e.x + e.mask(a)[:, :1]


@step
def use_row_sums(e, a, b, c):
    e.x = e.x + torch.tanh(e.mask(a)).sum(1, keepdim=True)


@step
def use_number(e, a, b, c):
    e.x = e.x * (1 + 0.1 * e.number(a))


@step
def use_number_as_a_size(e, a, b, c):
    stop = e.number(a)
    torch._check(stop >= 0)
    torch._check(stop <= TOKENS)
    e.x = e.x + e.x[:stop].sum(0)


@step
def use_vector(e, a, b, c):
    e.x = e.x + e.vector(a).sum() * 0.1


@step
def use_selected_count(e, a, b, c):
    e.x = e.x + (e.vector(a) > 2).nonzero().float().sum()


@step
def use_positions(e, a, b, c):
    e.x = e.x * torch.cos(e.positions.float())[:, None]


@step
def use_weight(e, a, b, c):
    e.x = torch.tanh(e.x @ e.weight)


class Program(torch.nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))

    def run_layer(self, layer, x, lengths, positions, mask=None):
        environment = Environment(x, lengths, positions, self.weight)
        if mask is not None:
            environment.masks.append(mask)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=layer.autocast):
            for name, a, b, c in layer.steps:
                STEPS[name](environment, a, b, c)
        return environment.x.float(), environment.masks[-1]

    def forward(self, x, lengths, positions):
        mask = torch.zeros(TOKENS, TOKENS)
        for layer in self.plan.layers:
            if layer.checkpointed:

                def body(x, lengths, positions, layer=layer):
                    return self.run_layer(layer, x, lengths, positions)[0]

                x = checkpoint(body, x, lengths, positions, use_reentrant=False)
            else:
                x, last = self.run_layer(layer, x, lengths, positions, mask if layer.shares else None)
                mask = last if layer.shares else mask
        x = x + 0.0  # an output of its own: the caller may write to it
        if self.plan.returns == "mask":
            return x, mask
        return (x, lengths.cumsum(0), mask.t(), mask) if self.plan.returns == "views" else x
