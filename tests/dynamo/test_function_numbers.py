"""Autograd functions that read numbers: captured, or left alone without the rest of the model."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

from fxpasses.dynamo.rules import function_numbers
from tests.support import ASSIGNS_SLICES, assert_same, reports_of


class Mean(torch.autograd.Function):
    """A number of the batch, kept for backward."""

    @staticmethod
    def forward(ctx, x, lengths):
        ctx.count, ctx.shape = (lengths > 0).sum().item(), x.shape
        return x.sum() / ctx.count

    @staticmethod
    def backward(ctx, gradient):
        return (gradient / ctx.count).expand(ctx.shape), None


class Longest(torch.autograd.Function):
    """A number that is a size, in forward, backward and the result."""

    @staticmethod
    def forward(ctx, x, lengths):
        ctx.longest, ctx.shape = lengths.max().item(), x.shape
        return x[: ctx.longest] * 2

    @staticmethod
    def backward(ctx, gradient):
        whole = gradient.new_zeros(ctx.shape)
        whole[: ctx.longest] = 2 * gradient
        return whole, None


class Clipped(torch.autograd.Function):
    """A branch on an activation."""

    @staticmethod
    def forward(ctx, x, lengths):
        ctx.scale = 0.5 if x.norm().item() > 1 else 1.0
        return x * ctx.scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, None


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.function = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), function

    def forward(self, x, lengths):
        for layer in self.layers:
            inside = torch.arange(x.shape[0]) < lengths.max().item()
            x = torch.tanh(layer(x)) * inside[:, None]
        return self.function.apply(x, lengths)


def batches():
    torch.manual_seed(1)
    return [(torch.randn(6, 4, requires_grad=True), torch.tensor(lengths)) for lengths in ([2, 5], [4, 0], [3, 3])]


def reads(record):
    return [report.figures.get("reads_before", 0) for report in reports_of(record)]


breaks = pytest.mark.skipif(not ASSIGNS_SLICES, reason="torch 2.11 does not compile `whole[:longest] = gradient`")


@pytest.mark.parametrize("function", [Mean, pytest.param(Longest, marks=breaks)])
def test_a_number_in_a_function_is_captured_with_the_model(function):
    record = assert_same(Model(function), batches(), "aot_eager")
    assert len(record.graphs) == 1 and reports_of(record)[0].changed


def test_the_graph_breaks_at_a_function_alone():
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        record = assert_same(Model(Clipped), batches(), "aot_eager")
    said = [str(warning.message) for warning in given if "fxpasses:" in str(warning.message)]
    if torch.__version__ >= "2.12":  # torch 2.11 itself breaks the graph there
        assert len(said) == 1
        assert re.search(r"`Clipped`, called at test_function_numbers.py:\d+, needs a number", said[0])
    else:
        assert said == []
    assert reports_of(record)[0].changed


def test_a_function_whose_numbers_do_not_compile_is_left_alone(monkeypatch):
    original, given = function_numbers._break, []
    monkeypatch.setattr(function_numbers, "_break", lambda *args: given.append(args) or original(*args))
    from fxpasses.compiler import backend

    def lower(result, gm, *args):
        if any("autograd_function_apply" in str(node.target) for node in gm.graph.nodes):
            raise RuntimeError("does not compile")
        return lowered(result, gm, *args)

    lowered = backend._lower
    monkeypatch.setattr(backend, "_lower", lower)
    model = Model(Mean)
    found = torch.compile(model, backend="fastpack", options={"fastpack.lowering": "eager"})
    for batch in batches():
        assert torch.equal(found(*batch), model(*batch))
    assert given
