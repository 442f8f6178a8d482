"""Random models and training loops for devices: checkpoints, reads, branches, graph breaks, tiers, streams."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpasses
from tests.support import compiled

TOKENS, WIDTH = 12, 16
KINDS = ("plain", "wide", "longest", "every", "copied", "branch", "routed", "break")


@dataclass(frozen=True)
class Plan:
    """layers: (kind, whether it is in a checkpoint). order: of backward passes. others: options of the backend."""

    layers: tuple[tuple[str, bool], ...]
    order: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    prefetches: bool
    own_stream: bool
    others: tuple[tuple[str, Any], ...]


def plan_of(seed: int) -> Plan:
    chance = random.Random(seed)
    layers = [(chance.choice(KINDS), chance.random() < 0.5) for _ in range(chance.randint(2, 4))]
    order = chance.sample(range(3), chance.randint(1, 3))
    tier = chance.choice(["off", "host", "host", "disk"])
    others = {} if tier == "off" else {
        "offload": tier, "offload.min_bytes": 0, "offload.keep_last": chance.randint(0, 1),
        "offload.buffers": chance.randint(1, 3),
    }  # fmt: skip
    lengths = tuple(tuple(chance.randint(1, TOKENS) for _ in range(3)) for _ in range(3))
    return Plan(
        tuple(layers), tuple(order), lengths, chance.random() < 0.4, chance.random() < 0.3, tuple(others.items())
    )


class Program(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in plan.layers)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)

    def layer(self, kind, linear, x, lengths):
        if kind == "wide":
            one, two, three = self.wide(x).sigmoid().chunk(3, -1)
            return linear(one * two + three.t().sum(0)[:, None]).relu() + x
        if kind == "longest":
            mask = torch.zeros(x.shape[0], 1, device=x.device)
            mask[: lengths.max().item()] = 1
            return torch.tanh(linear(x * mask)) + x
        if kind == "every":
            total = sum(length * (number + 1) for number, length in enumerate(lengths.tolist()))
            return linear(x).sin() * (total % 3) + x
        if kind == "copied":
            return torch.tanh(linear(x)) * int((lengths * 2).cpu().min()) + x
        if kind == "routed":
            rows = linear(x).argmax(-1) % 2
            return x.index_add(0, torch.where(rows == 1)[0], linear(x[torch.where(rows == 1)[0]]).cos())
        return torch.tanh(linear(x)) + x

    def forward(self, x, lengths):
        for (kind, checkpointed), linear in zip(self.plan.layers, self.linears, strict=True):
            if kind == "break":
                torch._dynamo.graph_break()
            if kind == "branch" and lengths.max() > TOKENS // 2:
                x = x * 2
            if checkpointed:
                x = checkpoint(self.layer, kind, linear, x, lengths, use_reentrant=False)
            else:
                x = self.layer(kind, linear, x, lengths)
        return x


def train(plan: Plan, seed: int, device: str, compile: bool) -> list[torch.Tensor]:
    """Losses and gradients of three forward passes and the backward passes of some, in the plan's order; on the CPU."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = Program(plan).to(device)
    program = compiled(model, "aot_eager", **dict(plan.others)) if compile else model
    batches = [
        (torch.randn(TOKENS, WIDTH).to(device), torch.tensor(lengths).to(device)) for lengths in plan.lengths
    ]  # fmt: skip
    losses = []
    for x, lengths in batches:
        if compile and plan.prefetches:
            fxpasses.prefetch(program, (x, lengths))
        losses.append(program(x, lengths).square().mean())
    if device != "cpu" and plan.own_stream:
        stream, main = torch.Stream(device=device), torch.accelerator.current_stream(torch.device(device))
        stream.wait_stream(main)
        with stream:
            for number in plan.order:
                losses[number].backward()
        main.wait_stream(stream)
    else:
        for number in plan.order:
            losses[number].backward()
    gradients = [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
    return [tensor.detach().cpu() for tensor in (*losses, *gradients)]
