"""Programs in which C++ asks for a number that was read, run in a process of their own: `python -m` this module.

Each has an operator before the question that only a walk of the graph has to run, on fake tensors. It prints the name
of each program before it runs, and after it `same`, or what differs from eager mode.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support import compiled, results

Made = Callable[[Tensor, int], Any]
_THREE = [1, 2, 3]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int) -> Tensor:
        ctx.n = n
        return x * torch.as_tensor([n])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * torch.as_tensor([ctx.n]), None


def _without_gradients(x: Tensor, n: int) -> Tensor:
    with torch.no_grad():
        return torch.as_tensor([n]) * x.detach()


def _under_autocast(x: Tensor, n: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.T) * torch.as_tensor([n])


def _assigned(x: Tensor, n: int) -> Tensor:
    y = x.clone()
    y[[n, 0]] = 0.0
    return y


def _checkpointed(x: Tensor, n: int) -> Any:
    return torch.utils.checkpoint.checkpoint(lambda y: y * torch.as_tensor([n]), x, use_reentrant=False)


PROGRAMS: dict[str, Made] = {
    "as_tensor": lambda x, n: torch.as_tensor([n, x.shape[0]]),
    "a float": lambda x, n: torch.as_tensor([n * 0.5, 1.5]),
    "asarray": lambda x, n: torch.asarray([n, 2]),
    "LongTensor": lambda x, n: torch.LongTensor([n]),
    "a size": lambda x, n: torch.ones(torch.Size([n, 2])),
    "a list's index": lambda x, n: torch.as_tensor(_THREE[n]),
    "an index": lambda x, n: x[n],
    "an index in a list": lambda x, n: x[[n, 1]],
    "an index in a list, assigned to": _assigned,
    "an operator's argument": lambda x, n: x.topk(n, 0).values,
    "a function": lambda x, n: _Scaled.apply(x, n),
    "no_grad": _without_gradients,
    "autocast": _under_autocast,
    "a checkpoint": _checkpointed,
    "vmap": lambda x, n: torch.vmap(lambda row: row + torch.as_tensor([n]))(x),
    "a transform": lambda x, n: torch.func.grad(lambda y: (y * torch.as_tensor([n])).sum())(x),
}


def _batches() -> list[tuple[Any, ...]]:
    numbers = ([6, 6, 1], [3, 2, 2])
    x = torch.linspace(-1, 1, 36).view(12, 3)
    return [(x.clone().requires_grad_(), torch.tensor(n), torch.arange(12) % 2 == 0) for n in numbers]


def _verdict(make: Made) -> str:
    def program(x: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
        n = lengths.min().item()
        x = x + x[mask].sum()
        return x.sum() + make(x, n).sum()

    torch._dynamo.reset()
    expected = [results(program, batch) for batch in _batches()]
    try:
        actual = [results(compiled(program), batch) for batch in _batches()]
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return "same"


def run() -> None:
    for name, make in PROGRAMS.items():
        print(f"{name}: ", end="", flush=True)
        print(_verdict(make), flush=True)


if __name__ == "__main__":
    thread = threading.Thread(target=run)  # the state of dispatch is a thread's own
    thread.start()
    thread.join()
