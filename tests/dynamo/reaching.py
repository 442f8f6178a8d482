"""Small programs that together reach every handler of the capture, which run on one batch."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

X = torch.linspace(-1, 1, 24).view(12, 2).requires_grad_()
BATCH = X, torch.tensor([8, 4])
W = torch.linspace(-1, 1, 12).view(3, 2, 2)


def truths(x: Tensor, lengths: Tensor) -> Tensor:
    """Branches, and Python's protocols for numbers."""
    longest = lengths.max()
    if longest > 6:
        x = x * 2
    if bool(longest == 8):
        x = x + 1
    height, width = lengths.tolist()
    if height / width > max([height, width]) / 16:
        x = x.sin()
    if 4 in lengths.tolist() or torch.equal(lengths, lengths.flip(0)):
        x = x.cos()
    for _ in range(0, (longest > 0).long()):
        x = x + 1
    x = x[: lengths.sum()]
    return x if [height, 4] == [longest, 4] and f"{height} of {x.shape[1]}" else -x


def chunks(x: Tensor, lengths: Tensor) -> Tensor:
    ends = range(0, lengths.sum().item(), 4)
    parts = [x[start : start + 4].sum() * ends.stop for start in ends]
    torch._dynamo.graph_break()
    return torch.stack(parts).sum() + len(ends) + lengths[0].item().__add__(1)


class Holder:
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self.last: Any = None


def requires_gradient(module: nn.Module, args: Any, output: Tensor) -> None:
    output.requires_grad_(True)


class Layers(nn.Module):
    """Stores on objects and in dicts, hooks, buffers, methods, keyword arguments in a mapping, warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))
        for _ in range(2):
            self.linear.register_forward_hook(requires_gradient)

    def layer(self, x: Tensor, seen: dict[str, Any], holder: Holder) -> Tensor:
        seen["mask"] = x[:, 0] > 0
        holder.last = x.shape[0]
        return self.linear(x) * seen["mask"][:, None] * len(list(seen)) * holder.last

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        warnings.warn("the program's", stacklevel=1)
        self.scale = self.scale.to(x.device)
        seen: dict[str, Any] = {}
        holder = Holder()
        for _ in range(2):
            x = checkpoint(self.layer, x, seen, holder, use_reentrant=False) * self.scale
        seen.update(a=1)
        given = types.MappingProxyType({"n": lengths.sum().item()})
        return x * given["n"] * seen["a"] + torch.mm(x.detach(), self.scale.diag(), out=torch.empty(2, 12).t()).sum()


def shares(x: Tensor, lengths: Tensor) -> Tensor:
    """A checkpointed layer that is captured, and stores a tensor in a dict of its caller's."""
    shared: dict[str, Tensor] = {}

    def layer(x: Tensor, shared: dict[str, Tensor]) -> Tensor:
        shared["mask"] = x[:, 0] > 0
        return x.sin()

    x = checkpoint(layer, x, shared, use_reentrant=False)
    return x * shared["mask"][:, None] * len(shared) * lengths.sum()


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return a * 2 + b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (a,) = ctx.saved_tensors
        return gradient * a.stride()[1] * 2, gradient


def operands(x: Tensor, lengths: Tensor) -> Tensor:
    y = x * lengths.sum()
    return Doubles.apply(y, y.cos())


steps = 0


def experts(x: Tensor, lengths: Tensor) -> Tensor:
    """A loop that skips experts, lists that grow, generators and iterators."""
    global steps
    ids = (x.detach() @ W[0]).argmax(-1)
    out, parts = torch.zeros_like(x), []
    for e, weight in enumerate(w for w in W[:2]):
        mask = ids == e
        if bool(mask.any()):
            tokens = torch.where(mask)[0]
            out = out.index_add(0, tokens, x[tokens] @ weight)
        if mask.sum() > 0:
            parts.append(x[mask])
    steps = lengths.shape[0]
    return out + (torch.cat(parts) if len(parts) else x).sum()


def counts(x: Tensor, lengths: Tensor) -> Tensor:
    """Slices by counts in NumPy arrays."""
    ids = (x.detach() @ W[0]).argmax(-1)
    rows, parts, start = x[ids.argsort()], [], 0
    for e, count in enumerate(torch.bincount(ids, minlength=2).cpu().numpy()):
        end = start + count
        if count == 0:
            continue
        parts.append(rows[start:end] @ W[e])
        start = end
    return torch.cat(parts)


def ends(x: Tensor, lengths: Tensor) -> Tensor:
    np.random.seed(0)
    ids = (x.detach() @ W[0]).argmax(-1)
    rows, parts, start = x[ids.argsort()], [], 0
    for e, end in enumerate(torch.bincount(ids, minlength=2).cpu().numpy().cumsum(0)):
        parts.append(rows[start : end.item()] @ W[e])
        start = end
    return torch.cat(parts)


def rebinds(x: Tensor, lengths: Tensor) -> Tensor:
    first = x[: lengths[0].item()]
    weights = torch.linspace(0, 1, 2).masked_select(lengths[:, None] >= lengths)
    return torch.cat([first.sin(), x[: lengths[1].item()].cos()]) * first.sum() * weights.sum()


# The ones that compile in the shortest time are first: each handler is tested with the first one that reaches it.
def images(x: Tensor, lengths: Tensor) -> Tensor:
    """A convolution of a trimmed batch in channels-last layout."""
    x = x[: lengths.max().item()].view(1, -1, 1, 2).permute(0, 3, 1, 2)
    return F.conv2d(x, W.unsqueeze(-1), padding=(1, 0))


def checkpointed(x: Tensor, lengths: Tensor) -> Tensor:
    row, column = lengths % 2
    table = torch.zeros(2, 2)
    table[row, column] = 1.0
    return checkpoint(torch.sin, x, use_reentrant=False) * lengths.sum() * table.sum()


class Stack(nn.Module):
    """Equal layers, and numbers of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x * lengths.sum()
        for layer in self.layers:
            x = layer(x)
        return x


PROGRAMS: dict[str, tuple[Callable[[], Any], str]] = {
    "shares": (lambda: shares, "eager"),
    "operands": (lambda: operands, "eager"),
    "layers": (Layers, "eager"),
    "counts": (lambda: counts, "eager"),
    "ends": (lambda: ends, "eager"),
    "truths": (lambda: truths, "eager"),
    "chunks": (lambda: chunks, "eager"),
    "experts": (lambda: experts, "eager"),
    "rebinds": (lambda: rebinds, "aot_eager"),
    "images": (lambda: images, "eager"),
    "stack": (Stack, "eager"),
    "checkpointed": (lambda: checkpointed, "eager"),
}
