"""`fastpack.outputs="lazy"`: what nobody reads of a model's output is not computed; what is read is eager mode's."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpasses.inspect
from fxpasses.base import once
from fxpasses.loss import chunks, lazy_outputs, lazy_tensor, region
from fxpasses.loss.lazy_tensor import LazyTensor
from fxpasses.report import Reason
from tests.loss.heads import COLUMNS, HIDDEN, batch
from tests.support import compiled, reports_of

BATCHES = [batch(3, 7), batch(2, 9), batch(4, 5)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(region, "LEAST_COLUMNS", 16)
    monkeypatch.setattr(region, "LEAST_BYTES", 0)
    monkeypatch.setattr(chunks, "_LEAST_ROWS", 5)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(lazy_outputs, "_read", weakref.WeakSet())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message='.*"fastpack.outputs": "lazy" had not computed')
        yield


class Model(nn.Module):
    """Returns a loss and logits, as transformers' models do."""

    def __init__(self, p: float = 0.0, counts: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(COLUMNS, HIDDEN), nn.Linear(HIDDEN, COLUMNS)
        self.middle, self.dropout = nn.Linear(HIDDEN, HIDDEN), nn.Dropout(p)
        self.register_buffer("steps", torch.zeros(()))
        self.counts = counts

    def forward(self, tokens: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = self.dropout(self.middle(self.table(tokens)).relu())
        if self.counts:
            self.steps += 1
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.view(-1, COLUMNS), target.view(-1)), "logits": logits}


def lazily(model: Any, **options: Any) -> Any:
    return compiled(model, outputs="lazy", **options)


def step(run: Any, model: nn.Module, inputs: Any, use: Any = lambda out: out["loss"]) -> tuple[Any, list[Any]]:
    model.zero_grad()
    out = run(*inputs)
    use(out).backward()
    return out, [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def report(record: Any) -> Any:
    return reports_of(record, "lazy_outputs")[0]


@pytest.mark.parametrize("lowering", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_logits_that_nobody_reads_are_not_computed(lowering: str) -> None:
    model = Model().double()
    with fxpasses.inspect.record() as record:
        run = lazily(model, lowering=lowering)
        for inputs in BATCHES:
            (expected, wanted), (out, found) = (step(each, model, inputs) for each in (model, run))
            torch.testing.assert_close((out["loss"], found), (expected["loss"], wanted))
            assert type(out["logits"]) is LazyTensor and out["logits"].shape == expected["logits"].shape
            assert out["logits"].requires_grad and out["logits"].dtype == torch.float64
    assert all(each.changed for name in ("lazy_outputs", "chunk_loss") for each in reports_of(record, name))


def test_what_is_read_is_eager_modes_and_computed_from_then_on() -> None:
    model = Model().double()
    run = lazily(model)
    with fxpasses.inspect.record() as record:
        for at, inputs in enumerate(BATCHES):
            expected, out = model(*inputs), run(*inputs)
            assert (type(out["logits"]) is LazyTensor) is (at == 0)
            torch.testing.assert_close(out["logits"] + 0, expected["logits"])
    assert [each.changed for each in reports_of(record, "lazy_outputs")] == [True, False, False][: len(record.graphs)]


def test_labels_may_be_written_before_logits_are_read() -> None:
    """As an accuracy's code does. Before, each step raised, although logits do not depend on labels."""
    model = Model().double()
    run = lazily(model)
    tokens, target = BATCHES[0]
    target = target.clone()
    out, expected = run(tokens, target), model(tokens, target)["logits"]
    target.fill_(0)
    torch.testing.assert_close(out["logits"] + 0, expected)


def test_what_cannot_be_read_any_more_is_computed_in_the_next_step() -> None:
    model = Model().double()
    run = lazily(model)
    out = run(*BATCHES[0])
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="have changed"):
        out["logits"].sum()
    torch.testing.assert_close(run(*BATCHES[0])["logits"] + 0, model(*BATCHES[0])["logits"])
    assert type(run(*BATCHES[0])["logits"]) is not LazyTensor


def test_the_warning_is_given_once() -> None:
    once.forget(("lazy outputs", Model.forward.__code__))
    run = lazily(Model())
    with pytest.warns(UserWarning, match="was read. It was computed, by the graph as it was captured"):
        run(*BATCHES[0])["logits"].sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(*BATCHES[1])["logits"].sum()


def test_a_gradient_through_logits_and_loss() -> None:
    def use(out: Any) -> Tensor:
        total: Tensor = out["loss"] + out["logits"].float().square().mean()
        return total

    model = Model()
    run = lazily(model)
    for inputs in BATCHES[:2]:
        (_, wanted), (_, found) = (step(each, model, inputs, use) for each in (model, run))
        torch.testing.assert_close(found, wanted)


def test_after_a_step_of_the_optimizer_reading_raises() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    out, _ = step(lazily(model), model, BATCHES[0])
    optimizer.step()
    with pytest.raises(RuntimeError, match=r'read it before optimizer.step\(\), or compile with .*"exact"'):
        print(out["logits"])


def test_a_batch_that_was_overwritten_cannot_be_read() -> None:
    tokens, target = (x.clone() for x in BATCHES[0])
    out = lazily(Model())(tokens, target)
    tokens.zero_()
    with pytest.raises(RuntimeError, match="parameters or inputs that it depends on have changed"):
        out["logits"].sum()


def test_autocast_is_that_of_the_call() -> None:
    model = Model()
    run = lazily(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected, out = model(*BATCHES[0]), run(*BATCHES[0])
        assert type(out["logits"]) is LazyTensor and out["logits"].dtype == torch.bfloat16
    other = run(*BATCHES[0])
    assert torch.equal(out["logits"] + 0, expected["logits"])
    with torch.autocast("cpu", torch.bfloat16):
        assert (other["logits"] + 0).dtype == torch.float32


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Model(p=0.5), Reason.RANDOM), (Model(counts=True), Reason.INPUT_WRITTEN)],
)
def test_a_graph_that_cannot_run_twice_computes_all(model: Model, reason: Reason) -> None:
    with fxpasses.inspect.record() as record:
        out = lazily(model)(*BATCHES[0])
    assert type(out["logits"]) is Tensor
    assert [refusal.reason for refusal in report(record).refusals] == [reason]


def test_without_gradients_all_is_computed() -> None:
    with torch.no_grad():
        assert type(lazily(Model())(*BATCHES[0])["logits"]) is Tensor


def test_a_program_that_goes_on_after_the_graph_computes_all() -> None:
    model = Model()

    def program(tokens: Tensor, target: Tensor) -> Any:
        out = model(tokens, target)
        torch._dynamo.graph_break()
        return out["loss"] + out["logits"].mean()

    torch.testing.assert_close(lazily(program)(*BATCHES[0]), program(*BATCHES[0]))


def test_two_models_of_a_class_are_read_apart() -> None:
    """They share the code of `forward`: once the logits of one were read, both compute them."""
    first, second = Model(), Model()
    runs = [lazily(each) for each in (first, second)]
    outs = [run(*BATCHES[0]) for run in runs]
    assert all(type(out["logits"]) is LazyTensor for out in outs)
    torch.testing.assert_close(outs[0]["logits"] + 0, first(*BATCHES[0])["logits"])
    torch.testing.assert_close(outs[1]["logits"] + 0, second(*BATCHES[0])["logits"])
    for run, model in zip(runs, (first, second), strict=True):
        torch.testing.assert_close(run(*BATCHES[1])["logits"] + 0, model(*BATCHES[1])["logits"])


def test_outputs_that_are_kept_or_copied() -> None:
    model = Model()
    run = lazily(model)
    kept = [run(*inputs) for inputs in BATCHES]
    copied = copy.deepcopy(kept[0]["logits"].detach())
    assert type(copied) is Tensor
    for out, inputs in zip(kept, BATCHES, strict=True):
        torch.testing.assert_close(out["logits"] + 0, model(*inputs)["logits"])


def test_checkpointed_layers() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Model):
        def forward(self, tokens: Tensor, target: Tensor) -> dict[str, Tensor]:
            x = checkpoint(lambda x: self.middle(x).relu(), self.table(tokens), use_reentrant=False)
            logits = self.head(x)
            return {"loss": F.cross_entropy(logits.view(-1, COLUMNS), target.view(-1)), "logits": logits}

    model = Checkpointed()
    run = lazily(model, lowering="aot_eager")
    (expected, wanted), (out, found) = (step(each, model, BATCHES[0]) for each in (model, run))
    torch.testing.assert_close(found, wanted)
    assert type(out["logits"]) is LazyTensor
    torch.testing.assert_close(out["logits"] + 0, expected["logits"])


@pytest.mark.quick(2)
@pytest.mark.parametrize("wrap", ["around DDP", "inside DDP", "unused parameters", "FSDP2"])
def test_wrapped_models(wrap: str, single_process_group: None) -> None:
    """DDP and FSDP2 look for gradients in what a model returns, which reads nothing."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model, other = Model(), Model()
    other.load_state_dict(model.state_dict())
    options = {"fastpack.lowering": "aot_eager", "fastpack.outputs": "lazy"}
    if wrap == "FSDP2":
        run: Any = fully_shard(other)
        other.compile(backend="fastpack", options=options)
    elif wrap == "around DDP":
        run = torch.compile(DistributedDataParallel(other), backend="fastpack", options=options)
    else:
        other.compile(backend="fastpack", options=options)
        run = DistributedDataParallel(other, find_unused_parameters=wrap == "unused parameters")
    for inputs in BATCHES:
        _, wanted = step(model, model, inputs)
        out, _ = step(run, other, inputs)
        found = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in other.parameters()]
        torch.testing.assert_close(found, wanted)
        assert out["logits"].shape == (*inputs[0].shape, COLUMNS)
    torch.testing.assert_close(out["logits"] + 0, model(*inputs)["logits"])


def written_through_a_view(m: Model) -> Any:
    m.steps.view(1)[0].add_(1)


def written_by_data(m: Model) -> Any:
    m.steps.data.add_(1)


def written_detached(m: Model) -> Any:
    m.steps.detach().add_(1)


def parameter_decayed(m: Model) -> Any:
    with torch.no_grad():
        m.head.weight[0].mul_(0.9)


def renormalised(m: Model) -> Any:
    F.embedding(torch.arange(3), m.table.weight, max_norm=0.1)


def drawn_by_a_function(m: Model) -> Any:
    return F.gumbel_softmax(torch.zeros(HIDDEN))


def drawn_in_a_branch(m: Model) -> Any:
    return torch.cond(m.steps > -1, lambda x: torch.rand_like(x), lambda x: x * 2, (torch.zeros(HIDDEN),))


class Doing(Model):
    def __init__(self, do: Any) -> None:
        super().__init__()
        self.do = do

    def forward(self, tokens: Tensor, target: Tensor) -> dict[str, Tensor]:
        noise = self.do(self)
        x = self.middle(self.table(tokens)).relu()
        logits = self.head(x if noise is None else x + noise)
        return {"loss": F.cross_entropy(logits.view(-1, COLUMNS), target.view(-1)), "logits": logits}


@pytest.mark.parametrize(
    "do",
    [written_through_a_view, written_by_data, written_detached, parameter_decayed, renormalised, drawn_by_a_function,
     drawn_in_a_branch],
)  # fmt: skip
def test_what_must_not_be_done_twice(do: Any) -> None:
    model = Doing(do)
    with fxpasses.inspect.record() as record:
        out = lazily(model)(*BATCHES[0])
    assert type(out["logits"]) is Tensor and int(model.steps) == ("written" in do.__name__)
    assert [refusal.reason for refusal in report(record).refusals] == [
        Reason.RANDOM if "drawn" in do.__name__ else Reason.INPUT_WRITTEN
    ]


@torch.library.custom_op("fxpasses_test::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


noise.register_fake(torch.empty_like)


def test_an_operator_that_draws_without_saying_so() -> None:
    """It is seen when it runs; the next call computes all."""
    run = lazily(Doing(lambda m: noise(torch.zeros(HIDDEN))))
    out = run(*BATCHES[0])
    with pytest.raises(RuntimeError, match="other random numbers than the loss: the next call computes it"):
        out["logits"].sum()
    assert type(run(*BATCHES[0])["logits"]) is Tensor


class Half(Model):
    def forward(self, tokens: Tensor, target: Tensor) -> dict[str, Tensor]:
        half = tokens.shape[1] // 2
        logits = self.head(self.table(tokens)[:, :half])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), target[:, :half].flatten()), "logits": logits}


def test_sizes_that_are_computed() -> None:
    model = Half()
    run = lazily(model)
    for texts, length in ((3, 8), (2, 9), (4, 13)):
        inputs = batch(texts, length)
        inputs[1].clamp_(min=0)
        out = run(*inputs)
        assert type(out["logits"]) is LazyTensor and out["logits"].shape == (texts, length // 2, COLUMNS)
    torch.testing.assert_close(out["logits"] + 0, model(*inputs)["logits"])


class WithLast(Model):
    def forward(self, tokens: Tensor, target: Tensor) -> dict[str, Tensor]:
        found = super().forward(tokens, target)
        return {**found, "last": found["logits"][:, -1]}


def test_results_that_share_memory_stay_together() -> None:
    out = lazily(WithLast())(*BATCHES[0])
    with torch.no_grad():
        out["logits"].zero_()
    assert not out["last"].any()


class Attending(Model):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)

    def forward(self, tokens: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = self.table(tokens)
        logits = self.head(self.attention(x, x, x, need_weights=False)[0])
        return {"loss": F.cross_entropy(logits.view(-1, COLUMNS), target.view(-1)), "logits": logits}


def test_attention_without_dropout_draws_nothing() -> None:
    model = Attending()
    out = lazily(model)(*BATCHES[0])
    assert type(out["logits"]) is LazyTensor
    torch.testing.assert_close(out["logits"] + 0, model(*BATCHES[0])["logits"])


def test_an_error_in_a_step_is_contained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("a defect of this test")

    model = Model()
    run = lazily(model, strict=False)
    monkeypatch.setattr(lazy_outputs, "lazy_output", fails)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for inputs in BATCHES[:2]:
            (_, wanted), (out, found) = (step(each, model, inputs) for each in (model, run))
            torch.testing.assert_close(found, wanted)
            torch.testing.assert_close(out["logits"], model(*inputs)["logits"])
    said = [str(each.message) for each in caught if "a defect of this test" in str(each.message)]
    assert len(said) == 1 and "leaving out what a program returns failed" in said[0]


def test_an_optimizer_of_another_form_steps() -> None:
    model = Model()
    out, _ = step(lazily(model), model, BATCHES[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.param_groups.append({"params": 3, "lr": 0.1})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lazy_tensor._note_step(optimizer)
    assert any("looking at what an optimizer has written failed" in str(each.message) for each in caught)
    with pytest.raises(RuntimeError, match="have changed"):
        out["logits"].sum()
