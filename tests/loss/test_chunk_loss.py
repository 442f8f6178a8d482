"""Losses in chunks of rows are eager mode's, with their gradients, and logits never stand in full."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

import fxpasses
import fxpasses.inspect
from fxpasses.base import once
from fxpasses.graph import provenance
from fxpasses.graph.provenance import in_program
from fxpasses.loss import chunks, operators, region, row_program
from fxpasses.loss.chunk_loss import ChunkLoss
from fxpasses.options import Options
from fxpasses.passes.pipeline import run_passes
from fxpasses.report import Reason
from tests.loss import heads
from tests.loss.heads import COLUMNS, HIDDEN, LEFT, TAKEN, Head, Loss, batch
from tests.support import assert_same, captured, compiled, reports_of, results

ops = torch.ops.fxpasses
BATCHES = [batch(3, 7), batch(2, 9), batch(4, 5)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small logits are large enough, and chunks have few rows."""
    monkeypatch.setattr(region, "LEAST_COLUMNS", 16)
    monkeypatch.setattr(region, "LEAST_BYTES", 0)
    monkeypatch.setattr(chunks, "_LEAST_ROWS", 5)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)


def check(loss: Loss, taken: bool = True, lowering: str = "eager", batches: Any = BATCHES) -> Any:
    torch.manual_seed(0)
    model = Head(loss).double()
    record = assert_same(model, batches, lowering, 1e-9, loss="chunks")
    reports = reports_of(record, "chunk_loss")
    assert any(report.changed for report in reports) is taken, reports
    assert taken is not any(report.refusals for report in reports), reports
    return record


@pytest.mark.quick(4)
@pytest.mark.parametrize("loss", TAKEN)
def test_losses_and_gradients_are_eager_modes(loss: Loss) -> None:
    check(loss)


@pytest.mark.quick(4)
@pytest.mark.parametrize("loss", LEFT)
def test_logits_that_something_else_reads_stand(loss: Loss) -> None:
    if loss is heads.with_dropout:
        torch.manual_seed(0)
        with fxpasses.inspect.record() as record:
            compiled(Head(loss))(*BATCHES[0])
        assert [refusal.reason for report in reports_of(record, "chunk_loss") for refusal in report.refusals]
    else:
        check(loss, taken=False)


def test_what_needs_a_gradient_may_weigh_the_losses() -> None:
    check(heads.weighed_by_what_trains)


@pytest.mark.quick(1)
@pytest.mark.parametrize("loss", [heads.mean, heads.log_probabilities, heads.accuracy_and_entropy])
@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_under_a_compiler(loss: Loss, lowering: str) -> None:
    check(loss, lowering=lowering)


def test_one_compilation_for_any_number_of_rows() -> None:
    torch.manual_seed(0)
    known = set(row_program._programs)
    model = Head(lambda m, x, t, tokens: heads.entropy(m.head(x) * 1.5, t))
    step = compiled(model, "inductor", rows="all")
    for texts, length in ((3, 7), (2, 9)):
        given = batch(texts, length)
        # Inductor of torch 2.11 read the targets' logits after their gradient had overwritten them.
        torch.testing.assert_close(results(step, given), results(model, given))
    (program,) = [each for key, each in row_program._programs.items() if key not in known]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for texts, length in ((5, 6), (7, 11)):
            step(*batch(texts, length)).backward()
    assert len(program._compiled) == 1


def test_the_graph_before_and_after() -> None:
    """That of the pass's docstring."""
    gm = captured(Head(heads.mean), *BATCHES[0])
    examples = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    after = run_passes([ChunkLoss()], gm, examples, Options(strict=True)).gm
    assert not [node for node in after.graph.nodes if node.target in (F.linear, F.cross_entropy)]
    (call,) = [node for node in after.graph.nodes if node.target is ops.loss_of_rows.default]
    key, xs, ws, rows, shared, cotangents, values = call.args
    assert [len(each) for each in (xs, ws, rows, shared, cotangents)] == [1, 1, 1, 1, 1] and values is False
    assert "cross_entropy" in row_program.registered(key).body.code


class Largest(TorchDispatchMode):
    """The most elements of a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return found


@pytest.mark.parametrize("loss", [heads.mean, heads.log_probabilities, heads.capped, heads.teacher])
def test_logits_never_stand(loss: Loss) -> None:
    model = Head(loss)
    tokens, target = batch(4, 25)
    gm = _rewritten(model, tokens, target)
    with Largest() as largest:
        results(lambda *inputs: gm(*inputs), [p for p in _inputs(gm, model, tokens, target)])
    assert largest.elements <= 4 * 25 * HIDDEN < 4 * 25 * COLUMNS


def _rewritten(model: Head, *inputs: Any) -> GraphModule:
    gm = captured(model, *inputs)
    examples = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    return run_passes([ChunkLoss()], gm, examples, Options(strict=True, lowering="eager", loss="chunks")).gm


def _inputs(gm: GraphModule, model: Head, *inputs: Any) -> Iterator[Any]:
    """The inputs of a graph that was captured of a model and two tensors."""
    given = {"tokens": inputs[0], "target": inputs[1], **dict(model.named_parameters())}
    for node in gm.graph.find_nodes(op="placeholder"):
        source = re.sub(
            r"\W+", ".", in_program(provenance.source(node)).replace("_modules", "").replace("_parameters", "")
        )
        yield given[max((name for name in given if source.strip(".").endswith(name)), key=len)]


def test_rows_that_count_nothing_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    run = row_program.RowProgram.__call__

    def counting(self: Any, operands: Any, *rest: Any) -> Any:
        rows.append(len(operands[0]))
        return run(self, operands, *rest)

    monkeypatch.setattr(row_program.RowProgram, "__call__", counting)
    tokens, target = batch(4, 10)
    compiled(Head(heads.mean), rows="all")(tokens, target).backward()
    assert sum(rows) == int((target != -100).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_round_as_their_products_do(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Head(lambda m, x, t, tokens: heads.entropy(m.head(x).float(), t)).to(dtype)
    exact = Head(model.loss)
    exact.load_state_dict(model.state_dict())
    step = compiled(model)
    wanted, eager, found = (results(run, BATCHES[0]) for run in (exact, model, step))

    def error(one: Any) -> float:
        pairs = zip(one["gradients"], wanted["gradients"], strict=True)
        return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs if a is not None)

    assert error(found) <= 1.5 * error(eager)
    torch.testing.assert_close(found["outputs"], eager["outputs"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside: bool) -> None:
    def loss(m: Head, x: torch.Tensor, t: torch.Tensor, tokens: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            logits = m.head(x)
            if inside:
                return heads.entropy(logits, t)
        return heads.entropy(logits, t)

    torch.manual_seed(0)
    assert_same(Head(loss), BATCHES, tolerance=0.02)


def test_without_gradients() -> None:
    torch.manual_seed(0)
    for loss in (heads.mean, heads.log_probabilities, heads.accuracy_and_entropy):
        with torch.no_grad():
            record = assert_same(Head(loss).double(), BATCHES, tolerance=1e-9)
        assert any(report.changed for report in reports_of(record, "chunk_loss"))


def test_parameters_that_eager_mode_gives_no_gradient_get_none() -> None:
    model = Head(heads.teacher)
    compiled(model)(*BATCHES[0]).backward()
    assert model.other.weight.grad is None and model.other.bias.grad is None
    assert model.head.weight.grad is not None


def test_gradients_of_gradients() -> None:
    torch.manual_seed(0)
    for loss in (heads.mean, heads.log_probabilities):
        model = Head(loss).double()
        found = []
        for run in (model, compiled(model, loss="chunks")):
            first = torch.autograd.grad(run(*BATCHES[0]), [model.head.weight], create_graph=True)
            found.append(torch.autograd.grad(first[0].square().sum(), list(model.head.parameters())))
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("loss", [heads.mean, heads.chosen_less_logsumexp, heads.log_probabilities, heads.students])
def test_gradcheck(loss: Loss) -> None:
    torch.manual_seed(0)
    model = Head(loss).double()
    gm = _rewritten(model, *BATCHES[0])
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in _inputs(gm, model, *BATCHES[0])]

    def run(*given: Any) -> Any:
        return gm(*given)[0]

    torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_an_infinite_loss_that_counts_nothing() -> None:
    def loss(m: Head, x: torch.Tensor, t: torch.Tensor, tokens: torch.Tensor) -> Any:
        logits = m.head(x).masked_fill((t == -100)[..., None], float("-inf"))
        losses = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        return losses.masked_fill(t == -100, 0).sum(), logits.argmax(-1)

    model = Head(loss)
    expected, found = (run(*BATCHES[0])[0] for run in (model, compiled(model)))
    torch.testing.assert_close(found, expected)


def test_no_rows() -> None:
    check(heads.shift_by_slices, batches=[batch(3, 7), batch(2, 9)])
    model = Head(heads.all_ignored)
    step = compiled(model)
    loss = step(*BATCHES[0])
    loss.backward()
    assert loss == 0 and not model.head.weight.grad.any()  # type: ignore[union-attr]


def test_what_does_not_compile_runs_operator_by_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(row_program, "_in_inference", fails)
    once.forget("contained")
    model = Head(lambda m, x, t, tokens: heads.entropy(m.head(x) * 1.25, t))
    with pytest.warns(UserWarning, match="compiling the loss of some rows failed.*on purpose"):
        found = compiled(model, "inductor")(*BATCHES[0])
    torch.testing.assert_close(found, model(*BATCHES[0]))


def test_logits_that_are_a_chunk_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "LEAST_BYTES", 32 << 20)
    record = assert_same(Head(heads.mean), BATCHES[:1])
    assert not any(report.changed or report.refusals for report in reports_of(record, "chunk_loss"))


def test_the_option_and_the_report() -> None:
    record = assert_same(Head(heads.mean), BATCHES[:1], loss="full")
    assert not any(report.changed for report in reports_of(record, "chunk_loss"))
    record = assert_same(Head(heads.mean), BATCHES[:1], tolerance=1e-5)
    (report,) = reports_of(record, "chunk_loss")
    assert report.summary == f"21 × {COLUMNS} logits (3.3 KiB) never stand in full"
    assert report.figures == {"columns": COLUMNS, "rows": 21, "logits_bytes": 21 * COLUMNS * 4}
    record = assert_same(Head(heads.logits_returned), BATCHES[:1])
    (refusal,) = reports_of(record, "chunk_loss")[0].refusals
    assert refusal.reason is Reason.READ_IN_FULL and refusal.text == "`logits` is returned"


def test_logits_are_computed_twice_on_request() -> None:
    """Where the way from losses to the loss is not linear, backward needs them again, which takes a third more."""
    record = assert_same(Head(heads.log_probabilities), BATCHES[:1])
    (refusal,) = reports_of(record, "chunk_loss")[0].refusals
    assert refusal.reason is Reason.NO_GAIN and "chunks" in refusal.text


def test_a_program_as_it_is_written_gives_what_its_chunks_give() -> None:
    model = Head(heads.learned_cap)
    gm = _rewritten(model, *BATCHES[0])
    (call,) = [node for node in gm.graph.nodes if node.target is ops.loss_of_rows.default]
    program = row_program.registered(call.args[0])
    rows, shared = [BATCHES[0][1].flatten()], [model.head.bias, model.number, model.columns]
    assert (program.products, program.rows, program.shared) == (1, len(rows), len(shared))
    x, w = torch.randn(21, HIDDEN), torch.randn(COLUMNS, HIDDEN)
    whole = operators.written(program, [x], [w], rows, shared)
    torch.testing.assert_close(ops.values_of_rows(call.args[0], [x], [w], rows, shared), whole)


def test_chunks_are_of_fewer_rows_where_more_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap by `tanh` saves its result besides that of the softmax: three times the logits stand, and not once."""
    lengths: list[int] = []
    parts = chunks._Run._parts
    monkeypatch.setattr(chunks._Run, "_parts", lambda self, count: lengths.append(parts(self, count)[0].stop) or [])
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 110 * COLUMNS * 8)
    for loss in (
        lambda m, x, t, tokens: heads.entropy(m.head(x), t),
        lambda m, x, t, tokens: heads.entropy(m.head(x).tanh(), t),
    ):
        compiled(Head(loss).double(), loss="chunks")(*batch(60, 10))
    assert lengths == [96, 32]
