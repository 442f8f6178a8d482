"""Programs in which an operand of a loss changes, a write must stay, or a shape is not what it looks like."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpasses.loss import chunks, region, row_program
from tests.loss.heads import COLUMNS, HIDDEN, entropy
from tests.support import assert_same, compiled, reports_of, results


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "LEAST_COLUMNS", 16)
    monkeypatch.setattr(region, "LEAST_BYTES", 0)
    monkeypatch.setattr(chunks, "_LEAST_ROWS", 5)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)


class Model(nn.Module):
    def __init__(self, program: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(COLUMNS, HIDDEN), nn.Linear(HIDDEN, COLUMNS)
        self.other = nn.Linear(HIDDEN, COLUMNS)
        self.number, self.columns = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.randn(COLUMNS))
        self.register_buffer("prior", torch.randn(COLUMNS))
        self.register_buffer("kept", torch.zeros(3))
        self.program = program

    def forward(self, tokens: Tensor, target: Tensor) -> Any:
        found = self.program(self, self.table(tokens).sin(), target, tokens)
        return (
            (*found, self.prior + 0, self.kept + 0)
            if isinstance(found, tuple)
            else (found, self.prior + 0, self.kept + 0)
        )


def losses(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), target, reduction="none")


def spread(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1)


def sum_without_gradients(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    with torch.no_grad():
        total = logits.sum()
    return total + spread(logits).mean()


def divergence_without_gradients(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logps = m.head(x).log_softmax(-1)
    with torch.no_grad():
        apart = F.kl_div(logps, m.other(x).softmax(-1), reduction="batchmean")
    return apart + logps.amax(-1).mean()


def loss_without_gradients(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    with torch.no_grad():
        other = entropy(m.other(x), t)
    return other + spread(m.head(x)).mean(), other


def reference_without_gradients(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    kept = t != -100
    with torch.no_grad():
        reference = m.other(x).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    logps = m.head(x).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return -((logps - reference).exp() * kept).sum() / kept.sum()


def teacher_written_afterwards(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    with torch.no_grad():
        wanted = m.other(x).softmax(-1)
    loss = F.kl_div(m.head(x).log_softmax(-1), wanted, reduction="batchmean")
    with torch.no_grad():
        m.other.weight.mul_(0.9)
    return loss


def prior_written_afterwards(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    loss = spread(m.head(x) + m.prior).mean()
    with torch.no_grad():
        m.prior.mul_(0.9)  # type: ignore[operator]
    return loss


def buffer_written_through_a_view(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    found = spread(m.head(x))
    m.kept[0].add_(found.detach().mean())  # type: ignore[index]
    return found.mean()


def rows_in_another_order(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return spread(m.head(x).view(x.shape[1], x.shape[0], COLUMNS)).sum(0).square().mean()


def a_part_of_other_rows(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return spread(m.head(x).view(x.shape[1], x.shape[0], COLUMNS)[:2, :2]).mean()


def rows_returned_in_one(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    found = spread(m.head(x).view(1, -1, COLUMNS))
    return found.mean(), found


def itself_subtracted(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    found = losses(m.head(x), t)
    return (found - found).sum() + found.mean()


def weights_of_lower_rank(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return (spread(m.head(x).reshape(-1, 3, 3, COLUMNS)).sum(1) * torch.arange(3.0)).sum()


def divided_by_what_logits_give(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    right = logits.argmax(-1) == t
    return (losses(logits, t) * right).sum() / right.sum().clamp(min=1)


def less_their_mean(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    found = losses(m.head(x), t)
    return (found - found.detach().mean()).relu().sum()


def a_result_inside_of_another(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    found = spread(m.head(x))
    return found.square().mean(), found.detach() * t


def factor_by_name(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return torch.mul(losses(m.head(x), t), other=t != -100).sum()


def labels_of_another_head(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return -m.head(x).log_softmax(-1).gather(-1, m.other(x).argmax(-1, keepdim=True)).mean()


def compared_with_a_parameter(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    return torch.where(logits > m.number, logits, 0.0).sum(-1).mean()


def dtype_of_another(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return spread(m.head(x).to(x)).mean()


def written_by_relu(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return spread(F.relu(F.linear(x, m.head.weight), inplace=True)).mean()


def counted_from_the_end(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logps = m.head(x).view(-1, COLUMNS).log_softmax(-1)
    return -logps[torch.arange(logps.shape[0]), (tokens - COLUMNS).view(-1)].mean()


def between_two(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return spread(torch.lerp(m.head(x), m.columns, 0.3)).mean()


def by_their_signs(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    logits = m.head(x)
    return (logits.sgn() * logits).sum(-1).square().mean()


def one_row_for_all(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return spread(m.head(x) + m.other(x[:1, :1])).mean()


def one_row_by_index(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return spread(m.head(x).view(-1, COLUMNS).index_select(0, torch.tensor(3))).mean()


def bits(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return m.head(x).float().view(torch.int32).amax(-1)


def columns_by_a_size(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return spread(m.head(x)[..., x.shape[0] : x.shape[0] + 20]).mean()


def mean_of_parts_and_parts(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    found, kept = spread(m.head(x)[:, :-1]), t[:, 1:]
    return ((found * kept).sum(1) / kept.sum(1)).mean(), found.detach() * kept


def only_the_best(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    """All gradients go through one of two results."""
    return m.head(x).topk(3).values.sum(-1).square().mean()


def written_twice(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return spread((m.head(x) * 1.0).mul_(0.9).add_(0.1)).mean()


def perplexity(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    """Of a batch without labels: NaN, whose gradients are 0."""
    return entropy(m.head(x), t).exp()


def sums_by_their_count(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    return (entropy(m.head(x), t, reduction="sum") + entropy(m.other(x), t, reduction="sum")) / (t != -100).sum()


def of_labelled_tokens(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    """In one batch none is labelled: a mean over nothing."""
    kept = t != -100
    return F.cross_entropy(m.head(x[kept]), t[kept]).nan_to_num(7.0)


def of_the_next_tokens(m: Model, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
    """Of texts of one token, none."""
    z = m.head(x)[:, :-1]
    return F.cross_entropy(z.reshape(-1, COLUMNS), tokens[:, 1:].reshape(-1))


PROGRAMS = [
    sum_without_gradients, divergence_without_gradients, loss_without_gradients, reference_without_gradients,
    teacher_written_afterwards, prior_written_afterwards, buffer_written_through_a_view, rows_in_another_order,
    a_part_of_other_rows, rows_returned_in_one, itself_subtracted, weights_of_lower_rank, divided_by_what_logits_give,
    less_their_mean, a_result_inside_of_another, factor_by_name, labels_of_another_head, compared_with_a_parameter,
    dtype_of_another, written_by_relu, counted_from_the_end, between_two, by_their_signs, one_row_for_all,
    one_row_by_index, bits, columns_by_a_size, mean_of_parts_and_parts, only_the_best,
    written_twice, perplexity, sums_by_their_count, of_labelled_tokens, of_the_next_tokens,
]  # fmt: skip


def batch(texts: int, length: int, labelled: bool = True) -> tuple[Tensor, Tensor]:
    tokens, target = (torch.randint(0, COLUMNS, (texts, length)) for _ in range(2))
    target[:, length // 4 :] = -100
    return tokens, target if labelled else torch.full_like(target, -100)


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_computed_is_eager_modes(program: Any) -> None:
    torch.manual_seed(0)
    batches = [batch(3, 6), batch(2, 18), batch(3, 9)]
    if program in (of_labelled_tokens, perplexity, sums_by_their_count):
        batches.append(batch(3, 6, labelled=False))
    if program is of_the_next_tokens:
        batches.append(batch(3, 1))
    model = Model(program).double()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    run = compiled(model, loss="chunks")
    for each in batches:
        found = []
        for one in (model, run):
            model.load_state_dict(state)
            found.append(results(_with_gradients_of(one, model), each))
        torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9, equal_nan=True)


def _with_gradients_of(run: Any, model: nn.Module) -> Any:
    class Run(nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            return model.parameters(recurse)

        def forward(self, *inputs: Any) -> Any:
            return run(*inputs)

    return Run()


@pytest.mark.parametrize("program", [only_the_best, written_twice])
def test_what_is_taken(program: Any) -> None:
    record = assert_same(Model(program).double(), [batch(3, 6)], tolerance=1e-9, loss="chunks")
    assert any(report.changed for report in reports_of(record, "chunk_loss"))


def test_live_rows_then_a_reference_without_gradients() -> None:
    torch.manual_seed(0)
    assert_same(Model(reference_without_gradients).double(), [batch(2, 16)], tolerance=1e-9)


def test_scaled_losses_of_float16() -> None:
    """Gradients in forward, before they are scaled, would vanish."""
    torch.manual_seed(0)
    model = Model(lambda m, x, t, tokens: entropy(m.head(x), tokens)).half()
    found = []
    for run in (model, compiled(model, loss="chunks")):
        model.zero_grad()
        (run(*batch(3, 6))[0] * 1024).backward()
        found.append(model.head.weight.grad)
        torch.manual_seed(1)
    assert all(gradient is not None and gradient.isfinite().all() for gradient in found)


@pytest.fixture
def config_of_one_thread() -> Iterator[None]:
    """Threads that call what is compiled with `dynamic=True` leave torch 2.11's option changed (docs/upstream.md)."""
    with torch._dynamo.config.patch(assume_static_by_default=torch._dynamo.config.assume_static_by_default):
        yield


@pytest.mark.usefixtures("config_of_one_thread")
def test_threads_that_run_a_program_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_program, "_programs", {})
    model = Model(lambda m, x, t, tokens: entropy(m.head(x) * 1.1, tokens))
    run = compiled(model, loss="chunks", dynamic=True)
    errors: list[BaseException] = []

    def train(length: int) -> None:
        try:
            for _ in range(2):
                run(*batch(3, length))[0].backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(length,)) for length in (6, 7, 8, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
