"""Large tensors of a prologue are a graph of their own, which Inductor compiles; and which are not, and why."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import fxpasses
import fxpasses.compiler.backend
from fxpasses.compiler import background_prologues, forked_compiler
from fxpasses.errors import MetadataError
from fxpasses.metadata import draft as building
from fxpasses.metadata.runtime.batch_cache import BatchCache
from fxpasses.metadata.runtime.prologue import Prologue, live_prologues
from tests.support import assert_same, compiled, results

TOKENS = 24


@pytest.fixture
def everything_is_large(monkeypatch):
    monkeypatch.setattr(building, "WORTH_COMPILING", 1)
    monkeypatch.setattr(building, "_LARGE", 1)


@pytest.fixture
def at_once(monkeypatch):
    """No other process compiles."""
    monkeypatch.setattr(fxpasses.compiler.backend, "refusal", lambda traces_backward: "this is a test")


def packed(x, lengths):
    """Two layers, each with a mask of bools, a window in integers and a bias in floats."""
    tokens = x.shape[0]
    for _ in range(2):
        torch._check(lengths.sum().item() == tokens)
        position = torch.arange(tokens)
        mask = torch.zeros(tokens, tokens, dtype=torch.bool)
        start = 0
        for length in lengths.tolist():
            document = (position >= start) & (position < start + length)
            mask |= document[:, None] & document
            start += length
        distance = position[:, None] - position
        longest = lengths.max().item()
        bias = torch.full((tokens, tokens), float("-inf")).masked_fill(mask & (distance < longest), 0.5)
        window = distance.clamp(-longest, longest) * 2
        scores = x @ x.T
        weights = (scores + bias).softmax(-1) + scores.masked_fill(~mask, 0) + window * scores
        x = torch.tanh(weights @ x / tokens)
    return x * longest


def batch(*lengths, tokens=TOKENS):
    x = torch.linspace(-1, 1, tokens * 4).view(tokens, 4).clone()
    return x.requires_grad_(), torch.tensor(lengths)


def prologues_of(program, inputs, lowering="eager", **options):
    """The prologues that compiling `program` made; `program` compiled, which keeps them alive."""
    before = set(live_prologues())
    function = compiled(program, lowering, **options)
    function(*inputs)
    return [p for p in live_prologues() if p not in before], function


def the_prologue(program, inputs):
    (found,), function = prologues_of(program, inputs)
    return found, function


@pytest.mark.usefixtures("everything_is_large")
def test_large_tensors_are_a_graph_that_takes_numbers():
    prologue, _keep = the_prologue(packed, batch(9, 0, 15))
    program = prologue.program
    assert program.worth_compiling and not program.on_accelerator
    assert program.device is not None and len(program.imports) == 4  # longest, three lengths
    targets = {node.target for node in program.device.graph.nodes}
    assert "item" not in targets and torch.zeros in targets
    assert torch.zeros not in {node.target for node in program.host.graph.nodes}


@pytest.mark.usefixtures("everything_is_large")
def test_numbers_are_those_of_eager_mode():
    assert_same(packed, [batch(9, 0, 15), batch(24, 0, 0), batch(1, 22, 1), batch(1, 0, 23)])


@pytest.mark.usefixtures("everything_is_large")
def test_assertions_come_before_the_tensors():
    prologue, function = the_prologue(packed, batch(9, 0, 15))
    ran = []
    prologue.compiled = lambda *arguments: ran.append(arguments)
    with pytest.raises(MetadataError, match=r"lengths.sum\(\)"):
        function(*batch(9, 9, 9))
    assert not ran


@pytest.mark.usefixtures("everything_is_large")
def test_prefetching_computes_them_on_the_cpu():
    prologue, function = the_prologue(packed, batch(9, 0, 15))
    x, lengths = batch(4, 4, 16)
    runs = prologue.runs
    assert fxpasses.prefetch(function, (x, lengths)) >= 1
    function(x, lengths)
    assert prologue.runs == runs + 1


def test_small_ones_stay_with_the_numbers():
    prologue, _keep = the_prologue(packed, batch(9, 0, 15))
    assert prologue.program.device is None and not prologue.program.worth_compiling


def slices_of_the_batch(x, lengths):
    mask = torch.zeros(TOKENS, TOKENS)
    first = lengths[0].item()
    mask[:first, :first] = 1
    return mask @ x


def sizes_of_the_batch(x, lengths):
    longest = lengths.max().item()
    near = torch.arange(longest)[:, None] - torch.arange(longest)
    return x.sum() * near.clamp(min=0).float().square().sum()


def a_number_of_the_mask(x, lengths):
    mask = torch.arange(TOKENS)[:, None] < lengths.sum()
    mask = mask & (torch.arange(TOKENS) < lengths.max())
    return mask.float() @ x * mask.sum().item()


def a_number_with_a_fraction(x, lengths):
    mean = lengths.float().mean().item()
    return (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).mul(mean).clamp(min=0) @ x


@pytest.mark.parametrize(
    "program", [slices_of_the_batch, sizes_of_the_batch, a_number_of_the_mask, a_number_with_a_fraction]
)
@pytest.mark.usefixtures("everything_is_large")
def test_stays_with_the_numbers(program):
    prologue, _keep = the_prologue(program, batch(9, 2, 13))
    device = prologue.program.device
    assert device is None or torch.arange not in {node.target for node in device.graph.nodes}
    assert_same(program, [batch(9, 2, 13), batch(5, 1, 18)])


@pytest.mark.usefixtures("everything_is_large")
def test_what_fails_when_it_runs_runs_operator_by_operator():
    (prologue,), _keep = prologues_of(packed, batch(9, 0, 15))

    def failing(*arguments):
        raise RuntimeError("no such kernel")

    inputs = [None] * (1 + max(prologue.positions()))
    x, lengths = batch(7, 7, 10)
    for position in prologue.positions():
        inputs[position] = lengths if "lengths" in prologue.sources[position] else x
    other = Prologue(prologue.program, cache=BatchCache(), compiled=failing)
    with pytest.warns(UserWarning, match=r"RuntimeError: no such kernel.*operator by operator") as caught:
        actual = [other([t.clone() if t is not None else None for t in inputs]) for _ in range(2)]
    assert len(caught) == 1
    expected = Prologue(prologue.program, cache=BatchCache())(inputs)
    assert actual[0] is not actual[1]
    torch.testing.assert_close(list(actual[0]), list(expected), rtol=0, atol=0)


@pytest.mark.usefixtures("everything_is_large", "at_once")
def test_what_fails_to_compile_runs_operator_by_operator(monkeypatch):
    def failing(*arguments):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(fxpasses.compiler.backend, "is_compiled", lambda *arguments: True)
    monkeypatch.setattr(fxpasses.compiler.backend, "lower_prologue", failing)
    with pytest.warns(UserWarning, match=r"prologue failed \(RuntimeError: no compiler\). It runs operator by op"):
        actual = results(compiled(packed, strict=False), batch(9, 0, 15))
    torch.testing.assert_close(actual, results(packed, batch(9, 0, 15)), rtol=0, atol=0)
    with pytest.raises(Exception, match="no compiler"):
        compiled(packed)(*batch(9, 0, 15))


@pytest.mark.slow
@pytest.mark.usefixtures("everything_is_large", "at_once")
def test_inductor_compiles_them_once_for_all_batches_and_sizes():
    (prologue,), function = prologues_of(packed, batch(9, 0, 15), "inductor", dynamic=True)
    assert prologue.compiled is not None
    eager = Prologue(prologue.program, cache=BatchCache())
    seen = []
    _compute = prologue._compute

    def watched(inputs):
        seen.append((_compute(inputs), eager(inputs)))
        return seen[-1][0]

    prologue._compute = watched
    graphs = counters["stats"]["unique_graphs"]
    batches = [batch(24, 0, 0), batch(1, 22, 1), batch(0, 0, 24), batch(20, 1, 19, tokens=40), batch(0, 1, 1, tokens=2)]
    for inputs in batches:
        torch.testing.assert_close(results(function, inputs), results(packed, inputs), rtol=1e-3, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == graphs
    assert len(seen) == len(batches) and prologue.compiled is not None
    for actual, expected in seen:
        torch.testing.assert_close(list(actual), list(expected), rtol=0, atol=0)
        tensors = [value for value in actual if isinstance(value, torch.Tensor)]
        assert {torch.bool, torch.int64, torch.float32} <= {tensor.dtype for tensor in tensors}
        assert [t.stride() for t in tensors] == [t.stride() for t in expected if isinstance(t, torch.Tensor)]


@pytest.mark.usefixtures("everything_is_large", "at_once")
def test_plans_of_attention_are_made_of_the_mask_that_is_compiled():
    """The mask is written once: plans, and the views that they take, are made after the compiled graph."""
    tokens = 288

    def program(x, document):
        allowed = (document[:, None, :, None] == document[:, None, None]) & torch.ones(tokens, tokens).tril().bool()
        allowed = allowed.expand(2, -1, -1, -1)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=allowed)

    def batch(*lengths):
        x = torch.linspace(-1, 1, 2 * 2 * tokens * 8).view(2, 2, tokens, 8).clone()
        return x.requires_grad_(), torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]

    (prologue,), function = prologues_of(program, batch(100, 188), "inductor")
    assert prologue.compiled is not None and prologue.program.worth_compiling
    assert torch.ops.fxpasses.attention_plan.default in {node.target for node in prologue.program.device.graph.nodes}
    for inputs in (batch(100, 188), batch(30, 200, 58)):
        torch.testing.assert_close(results(function, inputs), results(program, inputs))
    assert prologue.compiled is not None and prologue.runs == 3


@pytest.mark.slow
@pytest.mark.usefixtures("everything_is_large")
def test_another_process_compiles_them_while_batches_run(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(background_prologues, "_TAKES_S", 0)
    (prologue,), function = prologues_of(packed, batch(9, 0, 15), "inductor", dynamic=True)
    compiled_from = []
    for number in range(1, 7):
        inputs = batch(9, number, 15 - number)
        torch.testing.assert_close(results(function, inputs), results(packed, inputs), rtol=1e-3, atol=1e-4)
        assert forked_compiler.wait()
        compiled_from.append(prologue.compiled is not None)
    assert compiled_from == [False] * 3 + [True] * 3
