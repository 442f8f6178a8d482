"""Blocks that are compiled one by one: what a checkpoint saves is the block's own input, and that is moved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import fxpasses
import fxpasses.inspect
from tests.offload import programs
from tests.offload.programs import TOKENS, WIDTH, Layer
from tests.offload.test_offload_activations import assert_equal

OPTIONS = {"fastpack.lowering": "aot_eager", "fastpack.strict": True, "fastpack.offload": "disk"}
OPTIONS |= {"fastpack.offload.min_bytes": 0}
INPUT = 4 * TOKENS * WIDTH  # bytes


class Decoder(nn.Module):
    """skips: what the blocks are given is used once more at the end."""

    def __init__(self, blocks: int = 3, skips: bool = False) -> None:
        super().__init__()
        self.embed, self.skips = nn.Linear(WIDTH, WIDTH), skips
        self.blocks = nn.ModuleList(checkpoint_wrapper(Layer()) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        seen = [self.embed(x)]
        for block in self.blocks:
            seen.append(block(seen[-1]))
        return (sum(seen) if self.skips else seen[-1]).float().square().mean()


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    """A copy whose blocks are compiled one by one."""
    model = copy.deepcopy(model)
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(
            backend="fastpack", options=OPTIONS | {f"fastpack.{key}": value for key, value in options.items()}
        )
    return model


def numbers(model: nn.Module, step: programs.Step) -> list[Tensor]:
    returned = step(model, torch.device("cpu"))
    gradients = [parameter.grad for parameter in model.parameters()]
    return [leaf.detach() for leaf in torch.utils._pytree.tree_leaves([returned, gradients])]


@pytest.fixture(autouse=True)
def fresh_counts() -> None:
    fxpasses.offload_stats(reset=True)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("step", "times"),
    [
        (programs.one_after_the_other, 3),
        (programs.accumulate_mixed, 3),
        (programs.retain_graph, 1),
        (programs.stopped_on_the_way, 2),
    ],
)
@pytest.mark.parametrize("skips", [False, True])
def test_the_inputs_of_all_blocks_are_moved_and_numbers_stay(step, times, skips):
    model = Decoder(skips=skips)
    # The gradients of what is used in several places add up in another order in eager mode.
    expected = numbers(compiled(model, offload="off") if skips else copy.deepcopy(model), step)
    assert_equal(numbers(compiled(model), step), expected)
    moved = fxpasses.offload_stats()
    assert moved.bytes_out == 3 * times * INPUT and moved.tensors_out == 3 * times
    assert moved.bytes_in >= moved.bytes_out and not moved.fallbacks


@pytest.mark.slow
def test_the_inputs_of_all_blocks_are_moved_by_inductor():
    model = Decoder()
    actual = compiled(model, lowering="inductor")
    for step in (programs.one_step, programs.accumulate):
        for one, other in zip(numbers(actual, step), numbers(model, step), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert fxpasses.offload_stats().bytes_out == (1 + 3) * 3 * INPUT


def test_dynamic_sizes():
    model = Decoder()
    actual = compiled(model)
    assert_equal(numbers(actual, programs.sizes), numbers(model, programs.sizes))
    assert fxpasses.offload_stats().bytes_out == 3 * 4 * WIDTH * (24 + 40 + 17 + 24)


def test_leaves_stay_and_the_activations_after_them_move():
    """As under `enable_input_require_grads`: the first block is given a leaf, and all blocks are one program."""
    blocks = nn.ModuleList(checkpoint_wrapper(Layer()) for _ in range(3))
    holder = nn.Module()
    holder.blocks = blocks
    blocks = compiled(holder).blocks
    counters.clear()
    for _ in range(3):
        x = programs.inputs(torch.device("cpu")).requires_grad_()
        for block in blocks:
            x = block(x)
        x.sum().backward()
    assert fxpasses.offload_stats().bytes_out == 3 * 2 * INPUT
    assert counters["stats"]["unique_graphs"] == 2


Program = Callable[[Tensor, Tensor], Any]


def in_checkpoint(body: Program) -> Program:
    return lambda x, other: checkpoint(body, x, other, use_reentrant=False)


def writes_to_it(x: Tensor, other: Tensor) -> Tensor:
    x.add_(1)
    return (x * other).sin()


OWNED: dict[str, Callable[[], Tensor]] = {
    "a parameter": lambda: nn.Parameter(torch.randn(WIDTH, WIDTH)),
    "a leaf": lambda: torch.randn(WIDTH, WIDTH, requires_grad=True),
    "a tensor without gradient": lambda: torch.randn(WIDTH, WIDTH),
}


@pytest.mark.parametrize("name", OWNED)
def test_what_has_an_owner_stays(name):
    program, other = in_checkpoint(lambda x, weight: (x @ weight).sin()), OWNED[name]()
    results = []
    run = torch.compile(program, backend="fastpack", options=OPTIONS)
    for function in (run, program):
        x = programs.inputs(torch.device("cpu")).requires_grad_()
        y = function(x * 2, other)
        leaves = [leaf for leaf in (x, other) if leaf.requires_grad]
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    assert_equal([r.detach() for r in results[0]], [r.detach() for r in results[1]])
    assert fxpasses.offload_stats().bytes_out == INPUT  # x alone


RETURNED: dict[str, Program] = {
    "a view of it": lambda x, other: ((x * other).sin(), x[2:5]),
    "it, written to": writes_to_it,
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_the_caller_has_or_sees_changed_stays(name):
    program, scale = RETURNED[name], torch.rand(WIDTH)
    results = []
    run = torch.compile(program, backend="fastpack", options=OPTIONS)
    for function in (run, program):
        x = programs.inputs(torch.device("cpu")).requires_grad_()
        given = x * 2
        y = torch.utils._pytree.tree_leaves(function(given, scale))[0]
        results.append([y, given, *torch.autograd.grad(y.square().sum() + given.sum(), x)])
    assert_equal([r.detach() for r in results[0]], [r.detach() for r in results[1]])
    assert fxpasses.offload_stats().bytes_out == 0


def test_a_view_that_is_given_is_moved_as_far_as_it_spans():
    program = in_checkpoint(lambda x, other: (x * other).sin())
    results = []
    run = torch.compile(program, backend="fastpack", options=OPTIONS)
    for function in (run, program):
        x = programs.inputs(torch.device("cpu")).requires_grad_()
        y = function((x * 2)[3:9].t(), torch.tensor(2.0))
        results.append([y, *torch.autograd.grad(y.square().sum(), x)])
    assert_equal([r.detach() for r in results[0]], [r.detach() for r in results[1]])
    assert fxpasses.offload_stats().bytes_out == 4 * 6 * WIDTH


def test_keep_last_counts_what_a_graph_computes():
    """It is 1 here. Backward needs a block's input as soon as it is at the block, after all blocks behind it."""
    with fxpasses.inspect.record() as record:
        numbers(compiled(Decoder()), programs.one_step)
    (told,) = [r for graph in record.graphs for r in graph.reports if r.pass_name == "offload_activations"]
    assert told.figures["tensors_moved"] == 1 and "a checkpoint begins with it" in told.changes[0]
    assert told.figures["peak_bytes_after"] <= told.figures["peak_bytes_before"]
