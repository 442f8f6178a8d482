"""Only rows that can reach the loss are computed, and the loss and all gradients are eager mode's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fxpasses
import fxpasses.inspect
from fxpasses.base import once
from fxpasses.rows import choice
from tests.rows.models import TOKENS, VOCABULARY, WIDTH, Exit, Model, batch
from tests.support import compiled, reports_of, results

BATCHES = [
    batch(12, 5, 7),
    batch(3, 9, 1),
    batch(4, 2, 8, left=True),
    batch(5, 5, 5, labelled=0.0),
    batch(1, 1, 1, labelled=1.0),
    batch(12, 12, 12, labelled=1.0),
    batch(6, 2),
]


def loss(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).view(-1, VOCABULARY), labels.view(-1))


def summed_loss(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    target = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    total = F.cross_entropy(model.head(x).flatten(0, 1), target, reduction="sum", label_smoothing=0.1)
    return total / (target != -100).sum().clamp(min=1)


def loss_of_each(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten().clamp(min=0), reduction="none")
    wanted = (labels != -100).float()
    return (each.view(labels.shape) * wanted).sum() / wanted.sum().clamp(min=1)


def log_probabilities(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    """As DPO and GRPO compute them."""
    wanted = labels != -100
    found = model.head(x).log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return F.logsigmoid((found * wanted).sum(-1))


def first_token(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    return model.head(x[:, 0]).tanh()


def last_token(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    last = (torch.arange(seen.shape[1]) * seen).argmax(-1)
    return model.head(x)[torch.arange(seen.shape[0]), last]


def mean_of_text(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    weights = seen.unsqueeze(-1).to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1)


def shifted_loss(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels[..., 1:].contiguous().view(-1))


def losses_of_parts(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    """Of the next token and the one after it, of parts of parts, and of one text alone."""
    logits = model.head(x[:, 1:])
    first = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 2:].flatten(), reduction="sum")
    second = F.cross_entropy(logits[:, 1:-1].flatten(0, 1), labels[:, 3:].flatten(), reduction="sum")
    return first + 0.3 * second + x[1:].pow(2)[:, 0].sum()


def losses_of_labelled(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    """Selects rows by a mask, before the head and behind it."""
    wanted = labels != -100
    before = F.cross_entropy(model.head(x[wanted]), labels[wanted], reduction="sum")
    return before + 0.3 * model.head(x).view(-1, VOCABULARY)[wanted.view(-1)].logsumexp(-1).sum()


def last_of_those_marked(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    """As BART classifies: the last of the tokens of one kind, as many in each text."""
    marked = (seen.cumsum(1) == 1) & seen.bool()
    return model.head(x[marked, :].view(x.shape[0], -1, x.shape[-1])[:, -1])


EXITS = [
    losses_of_labelled, last_of_those_marked, loss, summed_loss, loss_of_each, log_probabilities, first_token,
    last_token, mean_of_text,
]  # fmt: skip


def check(model: Model, batches: Any, taken: bool = True, **options: Any) -> Any:
    """Compare with eager mode in float64; whether a graph was taken, in whole, is as expected."""
    model = model.double()
    with fxpasses.inspect.record() as record:
        step = compiled(model, rows="auto", **options)
        for each in batches:
            expected, actual = (seeded(run, each, model) for run in (model, step))
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12, equal_nan=True)
    reports = reports_of(record, "live_rows")
    assert any(report.changed and not report.refusals for report in reports) is taken, reports
    return record


def seeded(run: Any, each: Any, model: Model) -> dict[str, Any]:
    torch.manual_seed(0)
    return with_zeros(results(run, each), model)


def with_zeros(found: dict[str, Any], model: Model) -> dict[str, Any]:
    """Results with zeros for absent gradients."""
    pairs = zip(found["gradients"], model.parameters(), strict=True)
    return {**found, "gradients": [torch.zeros_like(p) if gradient is None else gradient for gradient, p in pairs]}


@pytest.mark.quick(3)
@pytest.mark.parametrize("exit", EXITS)
@pytest.mark.parametrize("attention", ["both", "padding", "causal"])
def test_what_reaches_the_loss_is_eager_modes(exit: Exit, attention: str) -> None:
    if attention == "causal" and exit is mean_of_text:
        pytest.skip("as with both")
    record = check(Model(exit, attention), BATCHES[:3] if attention == "causal" else BATCHES)
    assert len(record.graphs) <= 4  # for batches with few dead rows as well, and for another number of texts


@pytest.mark.quick(1)
@pytest.mark.parametrize("exit", [shifted_loss, losses_of_parts])
def test_parts_of_the_rows(exit: Exit) -> None:
    check(Model(exit), BATCHES)


@pytest.mark.quick(1)
@pytest.mark.parametrize("exit", [loss, mean_of_text])
@pytest.mark.parametrize("dynamic", [None, True])
def test_checkpoints(exit: Exit, dynamic: bool | None) -> None:
    """With symbolic sizes, Dynamo leaves `x.size()` in their bodies."""
    check(Model(exit, checkpoints=True), BATCHES[:4], lowering="aot_eager", dynamic=dynamic)


@pytest.mark.slow
def test_sizes_of_rows_that_are_numbers() -> None:
    def scaled(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
        return checkpoint(lambda y: model.head(y) * y.shape[1], x, use_reentrant=False)[:, 0]

    check(Model(scaled), BATCHES[:3], lowering="aot_eager", dynamic=True)


def test_no_more_than_the_rows_is_computed() -> None:
    """Layers compute the rows that labelled ones see, and the head labelled ones; both up to a multiple of 16."""
    model = Model(loss)
    model.positions = torch.nn.Embedding(TOKENS * 8, WIDTH)
    step, each = compiled(model, rows="auto"), batch(40, 9, 20, tokens=TOKENS * 8)
    step(*each)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        step(*each)
    found = [event.input_shapes[:2] for event in profile.events() if event.name == "aten::linear"]
    rows = {tuple(weight): shape[1] for shape, weight in found}
    assert rows[VOCABULARY, WIDTH] == 32  # 16 + 4 + 8 labelled tokens
    assert [shape[1] for shape, weight in found if weight == [3 * WIDTH, WIDTH]] == [80, 80]  # 40 + 9 + 20 tokens


def test_other_lengths_compile_nothing() -> None:
    model = Model(loss)
    step = compiled(model, rows="auto")
    with fxpasses.inspect.record() as record:
        for lengths in ((12, 5, 7), (3, 9, 1), (8, 8, 2), (1, 1, 2)):
            step(*batch(*lengths)).backward()
    assert len(record.graphs) == 1


@pytest.mark.slow
def test_a_guard_outlives_a_batch_of_other_sizes() -> None:
    """Where B == T in the first batch, both are one symbol, and ours is asked before the guard of that."""
    model = Model(first_token, attention="padding")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(
            model, [batch(4, 1, 2, 2, tokens=4), batch(2, 1, 1, 2, tokens=2), batch(4, 4, 1, 2, tokens=5)], dynamic=True
        )


def test_the_rows_are_counted(tmp_path: Path) -> None:
    """Of 192 rows 96 are padding; 32, up to a multiple of 16, have labels."""
    fxpasses.row_stats(reset=True)
    model = Model(loss)
    model.positions = torch.nn.Embedding(48, WIDTH)
    with fxpasses.inspect.record() as record:
        compiled(model, rows="auto")(*batch(32, 16, 32, 16, tokens=48, labelled=0.3)).backward()
    record.save(tmp_path / "record")
    assert fxpasses.inspect.load(tmp_path / "record").rows_text == record.rows_text == str(fxpasses.row_stats())
    found = fxpasses.row_stats(reset=True)
    assert found.steps == 1 and found.dead == 0.5 and 0.3 < found.live < 0.4
    assert str(found) == "rows: 38 % can reach the loss; 50 % padding, 12 % prompts"
    assert str(fxpasses.row_stats()) == ""


def test_a_step_counts_its_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the guard, which the statistics of the step use; once for each of two graphs."""
    step, counts = compiled(Model(loss), rows="auto"), choice.RowCounts.parts
    given = [batch(*lengths) for lengths in ((12, 5, 7), (3, 9, 1), (12, 12, 11), (2, 2, 2))]
    found = []
    monkeypatch.setattr(choice.RowCounts, "parts", lambda *each: found.append(1) or counts(*each))
    fxpasses.row_stats(reset=True)
    asked = []
    for each in given:
        found.clear()
        step(*each).backward()
        asked.append(len(found))
    assert asked[1] == 1 and asked[3] <= 2 and fxpasses.row_stats(reset=True).steps == 4


def two_exits(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Any:
    """The second one needs other rows of the same values, and the first one's result."""
    pooled = x[:, 0].tanh()
    return pooled.sum(), loss(model, x + pooled[:, None], seen, labels)


def test_two_exits() -> None:
    check(Model(two_exits), BATCHES[:3])


def loss_by_weights_of_classes(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    weight = model.head.bias.detach().exp()
    return F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten(), weight, label_smoothing=0.1)


def losses_by_weights_of_classes(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten(), model.head.bias.detach(), reduction="none")
    return (each * (labels != -100).flatten()).sum()


@pytest.mark.parametrize("exit", [loss_by_weights_of_classes, losses_by_weights_of_classes])
def test_classes_keep_their_weights(exit: Exit) -> None:
    check(Model(exit), BATCHES[:3])


class WrittenMask(Model):
    def forward(self, ids: Tensor, seen: Tensor, labels: Tensor) -> Any:
        mask = torch.zeros(ids.shape[0], 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
        mask[:, :, :, 0] = True
        mask.logical_or_(seen.bool()[:, None, None])
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, mask, False)
        return self.exit(self, x, seen, labels)


def test_a_mask_that_is_written_in_place() -> None:
    check(WrittenMask(loss), BATCHES[:3])


def features_by_other_names(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    """A rotation by complex numbers of the position, views as others, norms, repeated features."""
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.ones(WIDTH // 2, dtype=x.dtype)
    turned = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angles), angles)
    y = torch.view_as_real(turned).flatten(2)
    y = F.normalize(y.reshape_as(x), dim=-1).view(x.shape[0], -1, 4, WIDTH // 4).repeat(1, 1, 1, 2)[..., : WIDTH // 4]
    return loss(model, torch.min(y.flatten(2).view_as(x), model.positions.weight[: x.shape[1]]), seen, labels)


@pytest.mark.slow
def test_features_by_other_names() -> None:
    check(Model(features_by_other_names), BATCHES)


def products_of_each_row(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    """By weights of more dimensions, from either side, and of rows by what is their own."""
    weights, parts = model.head.weight[:WIDTH].view(4, 4, WIDTH), x.unflatten(-1, (4, 4))
    y = torch.einsum("hec,btc->bthe", weights, x) @ parts + torch.matmul(parts, weights[:, :, :4].sum(0))
    z = torch.bmm(y.flatten(0, 1), parts.flatten(0, 1).mT).view(y.shape) + weights[0, :, :4] @ y
    return loss(model, z.flatten(2), seen, labels)


def test_products_of_each_row() -> None:
    check(Model(products_of_each_row), BATCHES)


def without_gradients_before_a_checkpoint(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    y = x * 2
    moved = y.roll(1, 1)
    with torch.no_grad():
        before = model.layers[0].out(y)

    def inside(z: Tensor) -> Tensor:
        with torch.no_grad():
            scale = model.layers[1].out(z)
        return model.layers[0].out(z).tanh() * scale

    return loss(model, before + checkpoint(inside, y, use_reentrant=False), seen, labels) + moved[:, 0].sum()


def test_a_checkpoint_takes_what_is_selected_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what was selected without gradients, before: each graph counts its own writes and switches."""
    monkeypatch.setattr(choice, "MOST_LIVE", 10.0)
    exit = without_gradients_before_a_checkpoint
    record = check(Model(exit), BATCHES[:3], taken=False, lowering="aot_eager")
    assert any(report.changed for report in reports_of(record, "live_rows"))


# Rows that matter after all


def with_logits(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Any:
    return loss(model, x, seen, labels), model.head(x)


def mean_of_all(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    return model.head(x.mean(1))


def running_sum(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    return loss(model, x.cumsum(1), seen, labels)


def normed_over_tokens(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    return loss(model, F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2), seen, labels)


def moved_along(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    return loss(model, x + x.roll(1, 1), seen, labels)


def of_tokens_and_features(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    return loss(model, x.transpose(1, 2).reshape(x.shape), seen, labels)


def by_weights_of_all(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    return (x * x.sum(-1, keepdim=True).softmax(1)).sum(1)


def pairs_of_tokens(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    return (x.unsqueeze(2) - x.unsqueeze(1)).sin().sum(2).sum(1)


def sorted_rows(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    return loss(model, x.sort(1).values, seen, labels)


def mean_beside_the_loss(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Any:
    return loss(model, model.head.weight[0] * x, seen, labels), x.mean(1)


def last_layers_rows_moved(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    """Gives no row, but is added to rows."""
    return loss(model, x.tanh() + x.roll(1, 1).view(x.shape), seen, labels)


def written_before_and_after(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    """All rows are needed of what is written before, and what is added to it."""
    y = x * 2
    moved = y.roll(1, 1)
    y += model.positions.weight[: x.shape[1]]
    y.mul_(seen.unsqueeze(-1) * 2 - 1)
    return loss(model, y, seen, labels) + moved[:, 0].sum()


@pytest.mark.quick(3)
@pytest.mark.parametrize("exit", [mean_beside_the_loss, last_layers_rows_moved, written_before_and_after])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_what_takes_all_rows_leaves_the_rest_packed(
    exit: Exit, checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "MOST_LIVE", 10.0)  # only the head is left, which is small
    lowering = "aot_eager" if checkpoints else "eager"
    record = check(Model(exit, checkpoints=checkpoints), BATCHES[:4], taken=False, lowering=lowering)
    assert any(report.changed for report in reports_of(record, "live_rows"))


def products_over_tokens(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    return loss(model, x @ (x.transpose(1, 2) @ x), seen, labels)


def products_by_places(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    """Each place has a weight of its own."""
    weights = model.positions.weight[: x.shape[1], :4]
    return loss(model, torch.einsum("btc,te->btec", x, weights).sum(2), seen, labels)


@pytest.mark.parametrize(
    "exit",
    [with_logits, mean_of_all, running_sum, normed_over_tokens, moved_along, of_tokens_and_features, by_weights_of_all,
     pairs_of_tokens, sorted_rows, products_over_tokens, products_by_places],
)  # fmt: skip
def test_rows_that_matter_are_computed(exit: Exit) -> None:
    check(Model(exit), BATCHES[:2], taken=False)


def normed_with_tokens(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    """The shape that is normed over is a node of the graph."""
    return loss(model, F.layer_norm(x, x.shape[1:]), seen, labels)


def test_a_norm_over_tokens_of_unknown_number() -> None:
    check(Model(normed_with_tokens), BATCHES[:2], taken=False, dynamic=True)


def filled_by_rows(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Any:
    """What is filled is the batch's, and where it is filled is the rows': no factor of the batch's."""
    labelled = (labels != -100).to(x.dtype).unsqueeze(-1)
    return model.head(x[:, 0]), labelled.masked_fill(x > 0, 0).sum(1)


def test_what_is_filled_by_rows_is_no_factor() -> None:
    check(Model(filled_by_rows), [batch(12, 12, 12)], taken=False)  # all rows are needed


def counted_and_averaged(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Any:
    """Before, sums of bools were bools, and those of bfloat16 lost what is small."""
    kept = seen.unsqueeze(-1)
    return (
        ((x > 0) * kept.bool()).sum(1),
        (x.bfloat16() * kept).sum(1, keepdim=True),
        (x * kept).sum(1, dtype=torch.float32),
    )


def test_sums_have_the_dtype_and_the_precision_of_sums() -> None:
    model = Model(counted_and_averaged).double()
    step = compiled(model, rows="auto")
    for each in (batch(12, 5, 7), batch(3, 9, 1)):
        for own, other in zip(step(*each), model(*each), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-2, atol=1e-2)


def test_a_row_that_is_not_there_raises() -> None:
    def picked(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
        return model.head(x)[torch.arange(seen.shape[0]) - seen.shape[0], labels[:, 0]]

    model = Model(picked)
    step = compiled(model, rows="auto", strict=False)
    ids, seen, labels = batch(4, 2, 3)
    for token in (1, -2):
        given = (ids, seen, torch.full_like(labels, token))
        torch.testing.assert_close(step(*given), model(*given))
    with pytest.raises(IndexError, match="out of bounds"):
        step(ids, seen, torch.full_like(labels, TOKENS))


def test_a_table_that_counts_its_tokens_stays() -> None:
    model = Model(loss)
    model.embedding.scale_grad_by_freq = True
    model.positions.scale_grad_by_freq = True
    check(model, BATCHES[:2], taken=False)


def test_texts_of_no_token_and_one_text() -> None:
    check(Model(loss), [batch(0, 3), batch(0, 0), batch(5), batch(1), batch(2, tokens=2)])


def test_counting_that_fails_leaves_the_rows_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("a defect")

    counts = choice.RowCounts
    for owner, attribute in ((choice, "row_counts"), (choice, "guard"), (counts, "live"), (counts, "of_step")):
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            once._given.clear()
            torch._dynamo.reset()
            model = Model(loss)
            step = torch.compile(
                model, backend="fastpack", options={"fastpack.lowering": "eager", "fastpack.rows": "auto"}
            )
            patch.setattr(owner, attribute, fails)
            for each in BATCHES[:2]:
                torch.testing.assert_close(step(*each), model(*each))
        said = [str(warning.message) for warning in caught if "fxpasses:" in str(warning.message)]
        assert len(said) == 1 and "ZeroDivisionError: a defect" in said[0]


def test_a_guard_that_fails_keeps_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(loss)
    step = torch.compile(model, backend="fastpack", options={"fastpack.lowering": "eager", "fastpack.rows": "auto"})
    step(*BATCHES[0])
    monkeypatch.setattr(choice.RowCounts, "packs", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="a guard of how many rows are needed failed") as caught:
        for each in BATCHES[:3]:
            torch.testing.assert_close(step(*each), model(*each))
    assert len(caught) == 1


def test_metadata_made_with_the_sizes_of_rows() -> None:
    def zeros_like_rows(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
        return loss(model, x * torch.ones_like(x[..., :1]).cumsum(1), seen, labels)

    check(Model(zeros_like_rows), BATCHES[:2], taken=False)


@pytest.mark.slow
def test_parts_without_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted_by_two(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
        logits = model.head(x)
        each = F.cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten(), reduction="sum")
        return each + logits[:, 0].logsumexp(-1).sum()

    monkeypatch.setattr(choice, "MOST_LIVE", 10.0)
    short = batch(2, 1, 2, tokens=2, labelled=1.0)
    check(Model(shifted_by_two), [BATCHES[0], short], dynamic=True)
    check(Model(shifted_by_two), [short], taken=False)
