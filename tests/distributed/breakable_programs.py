"""Programs with a collective and an assertion about their lengths behind it, which holds if the longest is 4.

Each takes activations [4] and lengths [2], and returns a tensor. pytest would rewrite an `assert` in a file of tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.distributed.collective_programs import Program, reduced, twice

BREAKABLE: dict[str, Program] = {}


def program(function: Program) -> Program:
    BREAKABLE[function.__name__] = function
    return function


@program
def checks_its_batch(x: Tensor, lengths: Tensor) -> Tensor:
    x = x * reduced(x.detach().sum())
    longest = lengths.max().item()
    torch._check(longest <= 4)
    return x * longest


@program
def fits_in_each_layer(x: Tensor, lengths: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        x = x * reduced(x.detach().sum())
        return torch.nn.functional.pad(x, (0, lengths.max().item() - 4)).view(4).sin()

    return twice(body, x)


@program
def reads_before(x: Tensor, lengths: Tensor) -> Tensor:
    longest = lengths.max().item()
    y = x * reduced(x.detach().sum())
    assert longest <= 4
    return y * longest


@program
def views_behind(x: Tensor, lengths: Tensor) -> Tensor:
    longest = lengths.max().item()
    y = x * reduced(x.detach().sum())
    return y.sin() + y.view(longest, -1).sum()


@program
def reads_before_in_a_checkpoint(x: Tensor, lengths: Tensor) -> Tensor:
    return twice(lambda x: reads_before(x, lengths), x)


@program
def views_behind_in_a_checkpoint(x: Tensor, lengths: Tensor) -> Tensor:
    return twice(lambda x: views_behind(x, lengths), x)


@program
def reads_before_a_checkpoint(x: Tensor, lengths: Tensor) -> Tensor:
    longest = lengths.max().item()

    def body(x: Tensor) -> Tensor:
        y = x * reduced(x.detach().sum())
        assert longest <= 4
        return (y * longest).sin()

    return twice(body, x)


@program
def asserts_between(x: Tensor, lengths: Tensor) -> Tensor:
    return reads_before(x, lengths) * reduced(x.detach().cos().sum())


@program
def assumes_and_asserts(x: Tensor, lengths: Tensor) -> Tensor:
    y = reads_before(x, lengths)
    return y.sin() if lengths.max().item() > 3 else y


@program
def reads_behind_a_break(x: Tensor, lengths: Tensor) -> Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    return reads_before(x, lengths)
