"""The pipeline: a pass that fails or is wrong never reaches the user's program."""

from __future__ import annotations

import operator
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fxpasses.errors import PassError
from fxpasses.graph.regions import CHECKPOINT
from fxpasses.options import Options
from fxpasses.passes import pipeline
from fxpasses.passes.pipeline import run_further, run_passes
from fxpasses.report import Report
from tests.support import captured


class Raises:
    name = "raises"
    exact = True

    def __call__(self, gm, context):
        next(iter(gm.graph.find_nodes(op="output"))).args = (None,)  # damage that must not be seen
        raise RuntimeError("on purpose")


class AddsOne:
    """Changes `a + b` to `a - b`: a wrong pass."""

    name = "adds_one"
    exact = True

    def __call__(self, gm, context):
        for node in gm.graph.find_nodes(op="call_function", target=operator.add):
            node.target = operator.sub
        return Report(self.name, changed=True, summary="wrong")


@pytest.fixture
def graph():
    inputs = torch.randn(3, requires_grad=True), torch.randn(3)
    return captured(lambda a, b: (a + b) * 2, *inputs), inputs


def test_a_pass_that_raises_is_dropped_with_one_warning(graph):
    gm, inputs = graph
    with pytest.warns(UserWarning, match=r"the pass raises failed.*on purpose.*report") as caught:
        result = run_passes([Raises()], gm, inputs, Options())
    assert len(caught) == 1
    torch.testing.assert_close(result.gm(*inputs), gm(*inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_passes([Raises()], gm, inputs, Options())


def test_strict_raises(graph):
    with pytest.raises(PassError, match="raises failed: on purpose"):
        run_passes([Raises()], *graph, Options(strict=True))


def test_verify_finds_a_wrong_pass(graph):
    gm, inputs = graph
    with pytest.raises(PassError, match=r"adds_one.*outputs"):
        run_passes([AddsOne()], gm, inputs, Options(strict=True, verify=True))
    with pytest.warns(UserWarning, match="adds_one"):
        result = run_passes([AddsOne()], gm, inputs, Options(verify=True))
    torch.testing.assert_close(result.gm(*inputs), gm(*inputs))


def test_without_verify_the_wrong_pass_is_not_noticed(graph):
    """So the test above shows something."""
    gm, inputs = graph
    result = run_passes([AddsOne()], gm, inputs, Options(strict=True))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(result.gm(*inputs), gm(*inputs))


def test_the_captured_graph_is_not_touched(graph):
    gm, inputs = graph
    before = gm.print_readable(print_output=False)
    run_passes([AddsOne()], gm, inputs, Options())
    assert gm.print_readable(print_output=False) == before


def test_verify_on_a_program_that_is_hoisted():
    from tests.support import assert_same

    def program(x, lengths):
        return x * lengths.max().item()

    assert_same(program, [(torch.randn(4, requires_grad=True), torch.tensor([1, 2]))], verify=True)


class Malforms:
    """Uses a value in a checkpoint before it is computed."""

    name = "malforms"
    exact = True

    def __call__(self, gm, context):
        (call,) = gm.graph.find_nodes(op="call_function", target=CHECKPOINT)
        body = getattr(gm, call.args[0].target)
        add, *_ = body.graph.find_nodes(op="call_function", target=operator.add)
        add.append(add.args[0])
        return Report(self.name, changed=True)


class Multiplies:
    """A pass after it, which does its work: `a + b` becomes `a + 2 b` outside of checkpoints."""

    name = "multiplies"
    exact = False

    def __call__(self, gm, context):
        (add,) = gm.graph.find_nodes(op="call_function", target=operator.add)
        with gm.graph.inserting_before(add):
            twice = gm.graph.call_function(operator.mul, (add.args[1], 2))
        add.args = (add.args[0], twice)
        return Report(self.name, changed=True)


def test_a_pass_that_leaves_a_malformed_body_is_dropped_and_the_next_one_runs():
    def layer(a):
        return torch.tanh(a) + 1

    def program(a, b):
        return checkpoint(layer, a, use_reentrant=False) + b

    inputs = torch.randn(3, requires_grad=True), torch.randn(3)
    gm = captured(program, *inputs)
    with pytest.warns(UserWarning, match="the pass malforms failed") as caught:
        result = run_passes([Malforms(), Multiplies()], gm, inputs, Options())
    assert len(caught) == 1
    assert [report.pass_name for report in result.reports] == ["multiplies"]
    a, b = inputs
    torch.testing.assert_close(result.gm(*inputs)[0], layer(a) + 2 * b)
    with pytest.raises(PassError, match=r"malforms failed.*body.*before it has been defined"):
        run_passes([Malforms()], gm, inputs, Options(strict=True))


@pytest.mark.parametrize("step", ["copy_graph_module", "_context"])
def test_a_graph_that_cannot_be_prepared_for_passes_is_left_as_it_is_with_one_warning(step, graph, monkeypatch):
    gm, inputs = graph
    told = []

    def broken(*_):
        raise KeyError("on purpose")

    monkeypatch.setattr(pipeline, step, broken)
    with pytest.warns(UserWarning, match="preparing a graph for a pass failed") as said:
        result = run_passes([AddsOne(), Proves(0)], gm, inputs, Options(), lambda *args: told.append(args))
        assert run_further([AddsOne()], result, Options()).gm is gm
    assert len(said) == 1 and [(report.pass_name, failure) for report, _, failure in told] == [
        ("adds_one", "KeyError: 'on purpose'")
    ]
    with pytest.raises(PassError, match="preparing a graph for a pass failed: 'on purpose'"):
        run_passes([AddsOne()], gm, inputs, Options(strict=True))


def test_a_record_that_fails_stops_nothing(graph):
    def after_pass(report, result, failure):
        raise RuntimeError("on purpose")

    with pytest.warns(UserWarning, match="recording the pass proves failed.*on purpose"):
        result = run_passes([Proves(0)], *graph, Options(), after_pass)
    assert result.discharged == {0}


class Proves:
    """Proves what it is given, and then fails or not."""

    name = "proves"
    exact = True

    def __init__(self, *numbers, fails=False, changed=False):
        self.numbers, self.fails, self.changed = numbers, fails, changed

    def __call__(self, gm, context):
        context.discharged.update(self.numbers)
        if self.fails:
            raise RuntimeError("on purpose")
        return Report(self.name, changed=self.changed)


def test_proofs_are_returned_and_those_of_a_dropped_pass_are_not(graph):
    with pytest.warns(UserWarning, match="the pass proves failed"):
        result = run_passes([Proves(0), Proves(1, fails=True), Proves(2, changed=True)], *graph, Options())
    assert result.discharged == {0, 2}
