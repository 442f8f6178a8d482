"""What `test_no_new_failures.py` says, for values that become sizes and for shapes that depend on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Program = Callable[..., Any]
Check = Callable[[Program, Any], None]
EXPERTS, LENGTHS, COUNT = [0, 1, 0, 1, 1, 0], [2, 4], [3]
PROGRAMS: dict[str, tuple[Program, Any]] = {}


def program(metadata: Any) -> Callable[[Program], Program]:
    """Register a program of activations [6, 4] and an integer tensor."""

    def register(function: Program) -> Program:
        PROGRAMS[function.__name__] = (function, metadata)
        return function

    return register


# A scalar is a size or a position.


@program(COUNT)
def zeros_viewed(x: Tensor, n: Tensor) -> Tensor:
    return x + torch.zeros(n[0].item() * 2).view(2, 3).sum()


@program(LENGTHS)
def slices(x: Tensor, lengths: Tensor) -> Tensor:
    a, b = lengths.tolist()
    return x[:a].sum() + x[-a:].sum() + x[a:b].sum() + x[: b * 10].sum()


@program(LENGTHS)
def slice_assignment(x: Tensor, lengths: Tensor) -> Tensor:
    mask, start = torch.full((6, 6), float("-inf")), 0
    for n in lengths.tolist():
        mask[start : start + n, start : start + n] = 0
        start += n
    return (x @ x.T + mask).softmax(-1)


@program(LENGTHS)
def attention_mask_of_total(x: Tensor, lengths: Tensor) -> Tensor:
    total = int(lengths.sum().item())
    q = x[None, None]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(total, total))


@program(LENGTHS)
def padded_batch(x: Tensor, lengths: Tensor) -> Tensor:
    inside = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    padded = x.new_zeros(*inside.shape, 4)
    padded[inside] = x
    return padded.softmax(1)[inside]


@program(COUNT)
def reshaped(x: Tensor, n: Tensor) -> Tensor:
    return x.reshape(n[0].item(), -1, 4).sum(0)


@program(COUNT)
def chunks_and_dims(x: Tensor, n: Tensor) -> Tensor:
    return torch.cat(x.chunk(n[0].item())) + x.sum(dim=n[0].item() - 2, keepdim=True)


@program(1)
def repetitions(x: Tensor, n: Tensor) -> Tensor:
    return x.repeat(n.item(), 1)


@program(COUNT)
def size_check(x: Tensor, n: Tensor) -> Tensor:
    part = x[: n[0].item()]
    return x + part if part.shape[0] == x.shape[0] else x.sum() + part.sum()


# A shape depends on data.


@program(EXPERTS)
def nonzero_then_size_check(x: Tensor, mask: Tensor) -> Tensor:
    index = mask.nonzero().squeeze(-1)
    if index.numel() == 0:
        return x
    return x.index_add(0, index, x[index] * 2)


@program([0] * 6)
def nothing_selected(x: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([x[mask == 1], x[mask == 0]]) + x[mask == 1].sum()


@program(EXPERTS)
def unique_values(x: Tensor, experts: Tensor) -> Tensor:
    for k in torch.unique(experts):
        x = x + k
    for k in torch.unique(experts).tolist():
        x = x + x[experts == k].mean()
    return x * len(torch.unique(experts))


@program(EXPERTS)
def masked_select_reshaped(x: Tensor, mask: Tensor) -> Tensor:
    selected = torch.masked_select(x, (mask == 1)[:, None])
    return selected.reshape(-1, 2, 2).sum(0) + selected.view(3, 4).sum()


@program(EXPERTS)
def rows_iterated(x: Tensor, mask: Tensor) -> Tensor:
    a, b, c = x[mask == 1]
    (index,) = torch.where(mask)
    i, j, k = index.tolist()
    return sum(n * row for n, row in enumerate(x[mask == 1])) + a * b + c + x[i] * x[j] + x[k]


@program(EXPERTS)
def rows_multiplied(x: Tensor, mask: Tensor) -> Tensor:
    y = x[mask == 1]
    return (y @ y.T).softmax(-1) @ y


@program(EXPERTS)
def mask_assignment(x: Tensor, mask: Tensor) -> Tensor:
    y = x.clone()
    y[mask == 1] = x[mask == 0] * 2
    return y


@program(EXPERTS)
def expert_loop(x: Tensor, experts: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for k in range(3):
        index = torch.where(experts == k)[0]
        if index.shape[0] == 0:
            continue
        out.index_add_(0, index, x[index] * (k + 2))
    return out


# PyTorch takes an unbacked size to be other than 1, and an access to succeed; the batch says otherwise.


@program([1])
def size_1_is_broadcast(x: Tensor, n: Tensor) -> Tensor:
    return x + torch.zeros(n[0].item(), 4)


@program([1, 0, 0, 0, 0, 0])
def one_selected_row_is_broadcast(x: Tensor, mask: Tensor) -> Tensor:
    return x + x[mask == 1]


@program([1, 0, 0, 0, 0, 0])
def one_selected_row_is_squeezed(x: Tensor, mask: Tensor) -> Tensor:
    return x @ x[mask == 1].squeeze(0)


@program([20])
def failing_access_is_caught(x: Tensor, n: Tensor) -> Tensor:
    try:
        return x.narrow(0, 0, n[0].item())
    except RuntimeError:
        return x * 7


@program(LENGTHS)
def size_of_one_checkpoint_in_the_next(x: Tensor, lengths: Tensor) -> Tensor:
    """Dynamo binds the sum of two numbers of the first checkpoint nowhere, and fails in an assertion of its own."""

    def cut(x: Tensor) -> Tensor:
        first, second = (lengths - (x.detach() > 1e9).sum()).tolist()
        return torch.cat([x[:first].sin(), x[:second].cos()])

    x = checkpoint(cut, x, use_reentrant=False)
    return checkpoint(lambda x: (x.sin() * 2).cos(), x, use_reentrant=False)


@pytest.mark.parametrize("name", PROGRAMS)
def test_stock_runs_it(name: str, check_stock: Check) -> None:
    check_stock(*PROGRAMS[name])


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_runs_with_the_flags_on(name: str, check_capturing: Check) -> None:
    check_capturing(*PROGRAMS[name])
