"""Checkpointed layers that write to what outlives them: each write is made as often as in eager mode."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpasses.inspect
from fxpasses.report import Reason
from tests.support import compiled, reports_of

WIDTH = 4


class Model(nn.Module):
    """Two checkpointed layers, of which `write` writes to the buffers and weights, after a read of the batch."""

    def __init__(self, write, reentrant=False):
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))
        self.register_buffer("count", torch.tensor(0))
        self.write, self.reentrant = write, reentrant

    def layer(self, linear, x, lengths):
        return torch.tanh(self.write(self, linear, x, lengths)) * lengths.max().item()

    def forward(self, x, lengths):
        x = x * lengths.min().item()
        x = checkpoint(self.layer, self.linears[0], x, lengths, use_reentrant=self.reentrant)
        return checkpoint(self.layer, self.linears[1], x, lengths, use_reentrant=self.reentrant)


def batch_norm(self, linear, x, lengths):
    return F.batch_norm(linear(x), self.mean, self.variance, training=True)


def counts(self, linear, x, lengths):
    self.count.add_(lengths.sum())
    return linear(x)


def load(self, linear, x, lengths):
    self.mean[lengths % WIDTH] += 1
    return linear(x)


def average(self, linear, x, lengths):
    y = linear(x)
    with torch.no_grad():
        self.mean.lerp_(y.mean(0), 0.1)
    return y - self.mean


def clamp_after_use(self, linear, x, lengths):
    y = linear(x)
    linear.weight.data.clamp_(-0.2, 0.2)
    return y


def through_a_view(self, linear, x, lengths):
    self.mean.view(2, 2)[0].add_(x.detach().sum())
    return linear(x)


def to_out(self, linear, x, lengths):
    torch.add(self.mean, x.detach().sum(0), out=self.mean)
    return linear(x)


def in_a_nested_checkpoint(self, linear, x, lengths):
    return checkpoint(functools.partial(average, self), linear, x, lengths, use_reentrant=False)


WRITES = [batch_norm, counts, clamp_after_use, through_a_view, in_a_nested_checkpoint]
WRITES += [pytest.param(write, marks=pytest.mark.slow) for write in (load, average, to_out)]


def trained(model, step, with_gradients=True):
    """Losses, gradients, weights and buffers of two steps."""
    found = []
    torch.manual_seed(0)
    for longest in (4, 5):
        x, lengths = torch.randn(3, WIDTH, requires_grad=True), torch.tensor([2, longest, 3])
        with torch.set_grad_enabled(with_gradients):
            loss = step(x, lengths).square().sum()
        if with_gradients:
            loss.backward()
            found += [x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
        found += [loss.detach(), *(tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers()))]
    return found


def compare(model, **options):
    eager = copy.deepcopy(model)
    expected = trained(eager, eager)
    with fxpasses.inspect.record() as record:
        torch.testing.assert_close(trained(model, compiled(model, "aot_eager", **options)), expected)
    return record


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_made_as_often_as_in_eager_mode(write):
    with pytest.warns(UserWarning, match=r"writes to memory that outlives the checkpoint at test_checkpoint_writes.py"):
        fxpasses.base.once._given.clear()
        record = compare(Model(write))
    refusals = [refusal for report in reports_of(record, "capture") for refusal in report.refusals]
    assert {refusal.reason for refusal in refusals} == {Reason.REPEATED_WRITE}
    assert any(report.changed for report in reports_of(record))  # what surrounds the checkpoint is captured


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fxpasses")
def test_reentrant_checkpoints_repeat_writes_as_well():
    compare(Model(average, reentrant=True))


def test_what_backward_does_not_recompute_stays_captured():
    model = Model(average)
    eager = copy.deepcopy(model)
    with fxpasses.inspect.record() as record:
        found = trained(model, compiled(model, "aot_eager"), with_gradients=False)
    torch.testing.assert_close(found, trained(eager, eager, with_gradients=False))
    assert len(record.graphs) == 1


def test_writes_to_what_the_layer_made_stay_captured():
    def own(self, linear, x, lengths):
        y = linear(x)
        y[0] += 1
        return y.add_(self.mean)

    assert len(compare(Model(own)).graphs) == 1


def test_a_whole_graph_that_the_user_demands_stays_one():
    model = Model(counts)
    step = compiled(model, "aot_eager", fullgraph=True)
    step(torch.randn(3, WIDTH, requires_grad=True), torch.tensor([2, 4, 3])).sum().backward()
    assert model.count > 0
