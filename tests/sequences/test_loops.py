"""A loop over the parts of a batch is one graph, however many parts there are and whatever their sizes are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.sequences.comparing import FEW, WIDTH, Program, assert_eager_modes, batches

pytestmark = pytest.mark.usefixtures("capture_flags")


def attend(part: Tensor, w: Tensor) -> Tensor:
    """[u, WIDTH] to [u, WIDTH]: attention of two heads."""
    heads = (part @ w).view(1, -1, 2, 3).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)[0]


def by_weights(part: Tensor, w: Tensor) -> Tensor:
    """Attention that is written out."""
    scores = (part @ w) @ part.transpose(0, 1) * 0.4
    return scores.softmax(-1) @ part


# How the program gets its parts and takes them together.


def a_comprehension(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return torch.cat([(part @ w).tanh() - part.mean(0) for part in x.split(lengths.tolist())])


def a_loop_that_appends(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    rows, means = [], []
    for part in torch.split(x, lengths.tolist()):
        hidden = (part @ w).tanh()
        rows.append(hidden)
        means.append(hidden.mean(0))
    return torch.cat(rows), torch.stack(means), len(rows)


def a_method_of_the_list(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    rows: list[Tensor] = []
    append = rows.append
    for part in x.split(lengths.tolist()):
        append(part @ w)
    return torch.cat(rows)


def two_tensors(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    sizes = lengths.tolist()
    return torch.cat([one @ w * other for one, other in zip(x.split(sizes), y.split(sizes), strict=True)])


def two_lists_of_the_same_lengths(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    ends = F.pad(lengths.cumsum(0), (1, 0))
    ones, others = x.split((ends[1:] - ends[:-1]).tolist()), y.split((ends[1:] - ends[:-1]).tolist())
    return torch.cat([one.relu() + other.sum(0) for one, other in zip(ones, others, strict=False)])


def with_their_sizes(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    sizes = lengths.tolist()
    return torch.cat([part @ w / size for part, size in zip(x.split(sizes), sizes, strict=True)])


def results_again(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    sizes = lengths.tolist()
    means = [part.mean(0) for part in x.split(sizes)]
    rows = [part - mean for part, mean in zip(x.split(sizes), means, strict=True)]
    return torch.cat([row * row.sum(0) for row in rows]), torch.stack(means)


def several_loops(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    for _ in range(2):
        x = x + torch.cat([attend(part, w) for part in x.split(lengths.tolist())])
    return x


def a_called_function(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    def centred(values: Tensor) -> Tensor:
        return torch.cat([part - part.mean(0) for part in values.split(lengths.tolist())])

    return centred(x) * centred(centred(y) @ w)


def in_a_checkpoint(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    def body(x: Tensor) -> Tensor:
        return torch.cat([attend(part, w) for part in x.split(lengths.tolist())])

    return torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False) * y


def without_gradients(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    with torch.no_grad():
        means = torch.stack([part.mean(0) for part in x.split(lengths.tolist())])
    return means, x * 2


def lengths_of_32_bits(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return torch.cat([part - part.mean(0) for part in x.split(lengths.int().tolist())])


def two_divisions_of_a_batch(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    once = torch.cat([part - part.mean(0) for part in x.split(lengths.tolist())])
    again = torch.cat([part - part.mean(0) for part in once.split(lengths.flip(0).tolist())])
    return once, again


# What it makes of the results.


def concatenated_sums(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    sums = [part.sum(0, keepdim=True) for part in x.split(lengths.tolist())]
    return torch.cat(sums), torch.cat(sums, dim=1), torch.cat(sums, dim=-1)


def stacked_in_each_dimension(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    means = [part.view(-1, 2, 3).mean(0) for part in x.split(lengths.tolist())]
    return tuple(torch.stack(means, dim) for dim in (0, 1, 2, -1))


def padded(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    sizes = lengths.tolist()
    hidden = [part @ w for part in x.split(sizes)]
    ids = pad_sequence(targets.split(sizes), batch_first=True, padding_value=-100)
    return pad_sequence(hidden), pad_sequence(hidden, True, 0.5), ids


def summed(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    means = [(part @ w).mean(0) for part in x.split(lengths.tolist())]
    return sum(means) / len(means)


def a_carried_loss(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    total = 0
    for part in x.split(lengths.tolist()):
        total = total + (part @ w).tanh().sum()
    return total / len(lengths)


def concatenated_as_they_are(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    copy = torch.cat(x.split(lengths.tolist()))
    again = torch.cat([part for part in y.split(lengths.tolist())])
    return copy, again, copy.data_ptr() == x.data_ptr() if False else copy is x


# Other dimensions.


def of_the_second_dimension(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    both = torch.stack([x, y])
    rows = [(part @ w).softmax(-1) + part.mean((1, 2), keepdim=True) for part in both.split(lengths.tolist(), dim=1)]
    return torch.cat(rows, dim=1)


def of_the_last_dimension(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    rows = [part.tanh() - part.mean(-1, keepdim=True) for part in x.mT.split(lengths.tolist(), dim=-1)]
    return torch.cat(rows, dim=-1)


def of_four_dimensions(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    q, k, v = (values.view(1, -1, 2, 3).transpose(1, 2) for values in (x, y, x @ w))
    parts = [torch.split(values, lengths.tolist(), dim=2) for values in (q, k, v)]
    return torch.cat([F.scaled_dot_product_attention(q, k, v) for q, k, v in zip(*parts, strict=True)], dim=2)


SPELLINGS = [
    a_comprehension, a_loop_that_appends, a_method_of_the_list, two_tensors, two_lists_of_the_same_lengths,
    with_their_sizes, results_again, several_loops, a_called_function, in_a_checkpoint, without_gradients,
    lengths_of_32_bits, two_divisions_of_a_batch, concatenated_sums, stacked_in_each_dimension, padded, summed,
    a_carried_loss, concatenated_as_they_are, of_the_second_dimension, of_the_last_dimension, of_four_dimensions,
]  # fmt: skip


QUICK = {
    a_loop_that_appends, with_their_sizes, results_again, in_a_checkpoint, stacked_in_each_dimension, padded,
    a_carried_loss, of_four_dimensions,
}  # fmt: skip


@pytest.mark.parametrize(
    "program",
    [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in SPELLINGS],
    ids=lambda program: program.__name__,
)
def test_a_spelling_is_one_graph_for_all_batches(program: Program) -> None:
    record = assert_eager_modes(program)
    if program is stacked_in_each_dimension and torch.__version__ < "2.12":
        return  # Dynamo 2.11 looks into a list that a generator closes over
    assert len(record.graphs) == 1


# What a body may do, with x of a part and w. Each gives rows.

ROWS: dict[str, Any] = {
    "a linear layer": lambda x, w: F.linear(x, w, w[0]).relu(),
    "a gated one": lambda x, w: torch.mul(*(x @ w).chunk(2, dim=-1)),
    "norms": lambda x, w: F.rms_norm(F.layer_norm(x, (WIDTH,)), (WIDTH,)),
    "softmax of a row": lambda x, w: x.softmax(-1) * x.sum(1, keepdim=True),
    "a choice by elements": lambda x, w: torch.where(x > 0, x, x.mean(0)).clamp(max=1),
    "less the mean of all": lambda x, w: x - x.mean(),
    "by the sum of the rows": lambda x, w: (x.sum(0, keepdim=True) @ w).sigmoid() * x,
    "by a single row": lambda x, w: x * w[0] + w[:1],
    "heads": lambda x, w: (x.view(-1, 2, 3) * x.mean(0).view(2, 3)).flatten(1),
    "slices of a row": lambda x, w: torch.mul(x[:, 1:4], x[..., -1, None]),
    "indices that add dimensions": lambda x, w: (x[:, None] * w).sum(-1),
    "attention": attend,
    "causal attention": lambda x, w: F.scaled_dot_product_attention(x[None], x[None], (x @ w)[None], is_causal=True)[0],
    "attention by weights": by_weights,
    "other dtypes": lambda x, w: x.float().square().double(),
    "dropout that is off": lambda x, w: F.dropout(x @ w, 0.5, training=False),
    "a detached value": lambda x, w: x.detach() * x,
    "a question that all parts answer alike": lambda x, w: x * 2 if x.shape[0] < 100 else x,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_body_of_rows_is_one_graph_for_all_batches(name: str) -> None:
    body = ROWS[name]

    def program(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        return torch.cat([body(part, w) for part in x.split(lengths.tolist())])

    assert len(assert_eager_modes(program).graphs) == 1


# Each of these gives one value for each part.

VALUES: dict[str, Any] = {
    "a mean": lambda x, w: x.mean(0),
    "a number": lambda x, w: x.sum() * x.mean(),
    "a projected mean": lambda x, w: F.linear(x.mean(0), w, w[0]).tanh(),
    "a kept dimension": lambda x, w: x.sum(0, keepdim=True) @ w + x.mean((0, 1), keepdim=True),
    "heads": lambda x, w: x.view(-1, 2, 3).mean((0, 2)),
    "normalised": lambda x, w: F.layer_norm(x.mean(0), (WIDTH,)).softmax(-1),
    "an outer product": lambda x, w: x.sum(0)[:, None] * x.mean(0),
    "some elements": lambda x, w: x.mean(0)[1:4],
    "compared": lambda x, w: x.mean(0) > 0,
    "expanded": lambda x, w: x.mean(0).expand(3, WIDTH) * w[:3],
    "of a matrix": lambda x, w: x.mean(0).view(2, 3).permute(1, 0) * w[:3, :2],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_a_body_with_a_value_for_each_part_is_one_graph_for_all_batches(name: str) -> None:
    body = VALUES[name]

    def program(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([body(part, w) for part in x.split(lengths.tolist())])

    assert len(assert_eager_modes(program).graphs) == 1


def test_some_of_these_bodies_are_one_graph_for_all_batches() -> None:
    def program(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
        ones, others = x.split(lengths.tolist()), y.split(lengths.tolist())
        gated = torch.cat([ROWS["a gated one"](part, w) for part in ones])
        causal = torch.cat([ROWS["causal attention"](part, w) for part in ones])
        weighted = torch.cat([by_weights(part, w) for part in ones])
        outer = torch.stack([VALUES["an outer product"](part, w) for part in others])
        return gated, causal, weighted, outer

    assert len(assert_eager_modes(program, batches(FEW)).graphs) == 1


def test_a_loss_of_each_text_is_one_graph_for_all_batches() -> None:
    def program(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        sizes = lengths.tolist()
        losses = []
        for rows, ids in zip(x.split(sizes), targets.split(sizes), strict=True):
            losses.append(F.cross_entropy(rows @ w, ids))
        return torch.stack(losses)

    assert len(assert_eager_modes(program).graphs) == 1


class Layer(nn.Module):
    """Attention within each text, then a pooled value of each."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        return x + torch.cat([attend(self.norm(part), self.projection.weight) for part in x.split(sizes)])


@pytest.mark.parametrize("lowering", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_layers_of_a_model_are_one_graph_for_all_batches(lowering: str) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer(), Layer()]).double()

    def program(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        sizes = lengths.tolist()
        for layer in layers:
            x = layer(x, sizes)
        return torch.stack([part.mean(0) for part in x.split(sizes)]) @ w

    assert len(assert_eager_modes(program, lowering=lowering).graphs) == 1


def test_a_batch_of_one_part_and_an_empty_one_are_as_in_eager_mode() -> None:
    given = batches(([8], [0, 0, 5], [1]))
    for program in (a_loop_that_appends, of_four_dimensions):
        assert_eager_modes(program, given)


@pytest.mark.slow
def test_many_parts_are_as_in_eager_mode() -> None:
    program = several_loops
    assert len(assert_eager_modes(program, batches(([2, 3], [1, 2, 0, 4] * 12))).graphs) == 1


@pytest.mark.slow
def test_sizes_that_are_all_dynamic_are_as_in_eager_mode() -> None:
    assert_eager_modes(a_comprehension, batches(FEW), dynamic=True)
    assert_eager_modes(padded, batches(FEW), dynamic=True)


def test_the_lengths_have_to_sum_to_the_tensor() -> None:
    def program(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        return torch.cat([part @ w for part in x.split(lengths.tolist())])

    right, wrong = batches(([3, 4, 2], [2, 4, 3]))
    few, many = (wrong._replace(lengths=torch.tensor(lengths)) for lengths in ([2, 3], [2, 4, 3, 1]))
    negative = wrong._replace(lengths=torch.tensor([5, -1, 5]))
    assert_eager_modes(program, [right, few, wrong, many, negative])
    assert_eager_modes(program, [negative, few, right])


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
@pytest.mark.parametrize("program", [several_loops, a_loop_that_appends, padded, of_four_dimensions, a_carried_loss])
def test_they_are_lowered(program: Program, lowering: str) -> None:
    assert len(assert_eager_modes(program, lowering=lowering).graphs) == 1


def test_a_list_in_a_closure_is_not_read() -> None:
    def program(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
        sizes = lengths.tolist()
        cut = [torch.split(values, sizes) for values in (x, y)]  # before Python 3.12, a function with a closure
        means = [part.mean(0) for part in cut[0]]
        return [torch.cat(parts) for parts in cut], [torch.stack(means, dim) for dim in (0, 1)]

    assert len(assert_eager_modes(program, batches(FEW)).graphs) == 1
