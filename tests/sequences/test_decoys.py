"""Programs that look like loops over parts that do the same for each, and are not, give eager mode's results.

Most have their loop unrolled, one graph for each number of parts, as under stock PyTorch. What counts is the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fxpasses.sequences.capture import lists
from fxpasses.sequences.capture.loops import Loop
from tests.sequences.comparing import FEW, WIDTH, Program, assert_eager_modes, batches
from tests.support import compiled

pytestmark = pytest.mark.usefixtures("capture_flags")

# Of lists: programs of x, w, and the list of sizes.


def an_element_before(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    parts = x.split(sizes)
    return parts[0].sin(), torch.cat([part @ w for part in parts])


def an_element_after(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    parts = x.split(sizes)
    return torch.cat([part @ w for part in parts]), parts[-1].sin()


def an_element_of_the_results(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows = [part @ w for part in x.split(sizes)]
    return rows[0], torch.cat(rows)


def the_last_value(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows = []
    for part in x.split(sizes):
        hidden = part @ w
        rows.append(hidden)
    return torch.cat(rows), hidden, part


def backwards(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return torch.cat([part @ w for part in reversed(x.split(sizes))])


def in_order_of_size(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return torch.cat([part @ w for part in sorted(x.split(sizes), key=len)])


def some_parts(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    first, *rest = x.split(sizes)
    return first.sin(), torch.cat([part @ w for part in rest]), torch.cat([part * 2 for part in x.split(sizes)[:2]])


def numbered(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return torch.cat([part * number for number, part in enumerate(x.split(sizes))])


def returned_lists(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    parts = x.split(sizes)
    return [part @ w for part in parts], parts, sizes


def a_list_that_has_elements(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows = [x]
    for part in x.split(sizes):
        rows.append(part @ w)
    return torch.cat(rows)


def a_list_that_gets_more(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows = [part @ w for part in x.split(sizes)]
    rows.append(x)
    return torch.cat(rows), torch.cat([*rows, w])


def a_list_that_loses_some(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows = [part @ w for part in x.split(sizes)]
    last = rows.pop()
    del rows[0]
    return last, torch.cat(rows)


def two_values_of_each(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows = []
    again = rows
    for part in x.split(sizes):
        rows.append(part @ w)
        again.append(part)
    return torch.cat(rows)


def two_loops_into_one_list(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows = []
    for part in x.split(sizes):
        rows.append(part @ w)
    for part in x.split(sizes):
        rows.append(part * 2)
    return torch.cat(rows)


def a_list_that_the_body_reads(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows: list[Tensor] = []
    for part in x.split(sizes):
        rows.append(part * len(rows) + (rows[-1].sum() if rows else 0))
    return torch.cat(rows)


def a_list_that_the_body_joins(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows, sums = [], []
    for part in x.split(sizes):
        rows.append(part @ w)
        sums.append(torch.cat(rows).sum())
    return torch.stack(sums)


def the_parts_that_the_body_counts(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    parts = x.split(sizes)
    return torch.cat([part * len(parts) for part in parts])


def other_sizes(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    once = torch.cat([part @ w for part in x.split(sizes)])
    sizes.append(0)
    return once, torch.stack([part.sum(0) for part in x.split(sizes)])


def sorted_sizes(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    parts = x.split(sizes)
    sizes.sort()
    return torch.stack([part.sum(0) for part in parts]), torch.stack([part.sum(0) for part in x.split(sizes)])


def generated(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    def rows() -> Iterator[Tensor]:
        for part in x.split(sizes):
            yield part @ w

    return torch.cat(list(rows())), sum(part.sum(0) for part in x.split(sizes))


def mapped(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return torch.cat(list(map(lambda part: part @ w, x.split(sizes))))


def an_iterator_that_is_used_up(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    iterator, rows = iter(x.split(sizes)), []
    rows.append(next(iterator))
    for part in iterator:
        rows.append(part @ w)
    for part in iterator:
        rows.append(part)
    return torch.cat(rows)


def a_shorter_list_beside(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return torch.cat([part * by for part, by in zip(x.split(sizes), (1, 2), strict=False)])


# Of control flow.


def a_loop_that_ends_early(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows = []
    for part in x.split(sizes):
        rows.append(part @ w)
        break
    return torch.cat(rows)


def a_loop_that_ends_at_a_size(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows = [x]
    for part in x.split(sizes):
        if part.shape[0] < 2:
            break
        rows.append(part @ w)
    else:
        rows.append(x * 2)
    return torch.cat(rows)


def a_loop_that_returns(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows = []
    for part in x.split(sizes):
        rows.append(part @ w)
        if len(rows) > 2:
            return torch.cat(rows)
    return rows


def a_loop_that_returns_at_once(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    def first(x: Tensor) -> Any:
        for part in x.split(sizes):
            return part @ w
        return None

    return first(x), first(x * 2)


def a_loop_that_raises(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows = [x]
    try:
        for part in x.split(sizes):
            rows.append(part @ w)
            raise KeyError(0)
    except KeyError:
        rows.append(part)
    return torch.cat(rows)


def parts_that_are_skipped(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows = []
    for part in x.split(sizes):
        if part.numel() == 0:
            continue
        rows.append((part @ w).mean(0))
    return torch.stack(rows)


def values_that_are_left_out(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows = [x]
    for part, size in zip(x.split(sizes), sizes, strict=True):
        if size > 2:
            rows.append(part @ w)
    return torch.cat(rows)


def a_loop_in_a_loop(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    parts = x.split(sizes)
    return torch.stack([torch.stack([one.sum() * other.sum() for other in parts]) for one in parts])


def a_graph_break(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows = []
    for part in x.split(sizes):
        rows.append(part @ w)
        torch._dynamo.graph_break()
    return torch.cat(rows)


# Of state.


def a_carried_value(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    state, rows = x.new_zeros(WIDTH), []
    for part in x.split(sizes):
        rows.append(part + state)
        state = rows[-1].sum(0).tanh()
    return torch.cat(rows), state


def a_carried_sum_that_is_read(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    total, rows = x.sum() * 0, []
    for part in x.split(sizes):
        total = total + part.sum()
        rows.append(part * total)
    return torch.cat(rows), total


def a_counter(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    count, start, rows = 0, 0, []
    for part, size in zip(x.split(sizes), sizes, strict=True):
        rows.append(part * count + start)
        count += 1
        start += size
    return torch.cat(rows), count, start


def the_first_one(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    is_first, previous, rows = True, None, []
    for part in x.split(sizes):
        rows.append(part * 2 if is_first else part * previous.sum())
        is_first, previous = False, part
    return torch.cat(rows)


def a_dict(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    found: dict[int, Tensor] = {}
    rows = []
    for part in x.split(sizes):
        found[len(found)] = part.sum(0)
        rows.append(part @ w)
    return found, torch.cat(rows)


def an_attribute(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    module, rows = nn.Identity(), []
    module.calls, module.last = 0, x
    for part in x.split(sizes):
        module.calls += 1
        module.last = part
        rows.append(part @ w)
    return torch.cat(rows), module.calls, module.last


def a_written_part(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    x = x.detach().clone()
    parts = x.split(sizes)
    for part in parts:
        part.mul_(2)
    return torch.cat([part @ w for part in parts]), x


def a_write_in_each_step(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    count, rows = torch.zeros((), dtype=x.dtype), []
    for part in x.split(sizes):
        rows.append(part.detach() * count)
        count.add_(1)
    return torch.cat(rows), count


def a_write_after_the_split(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    x = x.detach().clone()
    parts = x.split(sizes)
    x.mul_(2)
    rows = [part[:, :3] for part in parts]
    x.add_(1)
    return torch.cat(rows), torch.cat([part * 2 for part in parts])


def a_write_into_what_is_concatenated(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    x = x * 1
    same, direct = torch.cat([part for part in x.split(sizes)]), torch.cat(x.split(sizes))
    same.mul_(2)
    direct.mul_(3)
    return same, direct, x


def dropout(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return torch.cat([F.dropout(part @ w, 0.5) for part in x.split(sizes)])


def random_numbers(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return torch.cat([part * torch.rand(WIDTH, dtype=part.dtype) for part in x.split(sizes)])


def a_hook(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows = []
    for part in x.split(sizes):
        hidden = part @ w
        hidden.register_hook(lambda gradient: gradient * 2)
        rows.append(hidden)
    return torch.cat(rows)


def parts_without_gradients(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    with torch.no_grad():
        parts = x.split(sizes)
    return torch.cat([part @ w for part in parts])


def a_body_without_gradients(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    rows = []
    for part in x.split(sizes):
        with torch.no_grad():
            scale = (part @ w).mean(0)
        rows.append(part * scale)
    return torch.cat(rows)


def an_out_argument(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    result = torch.empty_like(x)
    with torch.no_grad():
        torch.cat([part @ w for part in x.split(sizes)], out=result)
    return result


# Of sizes.


def a_choice_by_size(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    parts = zip(x.split(sizes), sizes, strict=True)
    return torch.cat([part * 2 if 1 < size < 4 else part for part, size in parts])


def a_choice_by_the_remainder(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return torch.cat([part * 2 if part.shape[0] % 2 else part for part in x.split(sizes)])


def a_choice_for_empty_parts(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return torch.cat([part - part.amax(0) if part.shape[0] else part for part in x.split(sizes)])


def as_often_as_there_are_rows(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return torch.cat([sum([part * i for i in range(part.shape[0])], part) for part in x.split(sizes)])


def a_name_of_the_size(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return torch.cat([part * len(f"{part.shape[0]:03}") for part in x.split(sizes)])


def numbers_of_the_size(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return torch.cat([part * min(part.shape[0], 3) / max(len(part), 1) ** 0.5 for part in x.split(sizes)])


# Of what is done to the results.


def stacked_rows(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return torch.stack([part @ w for part in x.split(sizes)])


def concatenated_numbers(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return torch.cat([part.sum() for part in x.split(sizes)])


def a_dimension_that_is_not_there(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return torch.stack([part.sum(0) for part in x.split(sizes)], 3)


def results_in_another_dimension(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return torch.cat([part.mT @ part for part in x.split(sizes)], -1), torch.block_diag(*x.split(sizes))


def padded_on_the_left(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return pad_sequence([part @ w for part in x.split(sizes)], batch_first=True, padding_side="left")


def a_sum_from_something(x: Tensor, w: Tensor, sizes: list[int]) -> Any:
    return sum([part.sum(0) for part in x.split(sizes)], w)


PROGRAMS: list[Program] = [
    an_element_before, an_element_after, an_element_of_the_results, the_last_value, backwards, in_order_of_size,
    some_parts, numbered, returned_lists, a_list_that_has_elements, a_list_that_gets_more, a_list_that_loses_some,
    two_values_of_each, two_loops_into_one_list, a_list_that_the_body_reads, a_list_that_the_body_joins,
    the_parts_that_the_body_counts, other_sizes, sorted_sizes, generated, mapped, an_iterator_that_is_used_up,
    a_shorter_list_beside, a_loop_that_ends_early, a_loop_that_ends_at_a_size, a_loop_that_returns,
    a_loop_that_returns_at_once, a_loop_that_raises, parts_that_are_skipped, values_that_are_left_out,
    a_loop_in_a_loop, a_graph_break, a_carried_value, a_carried_sum_that_is_read, a_counter, the_first_one, a_dict,
    an_attribute, a_written_part, a_write_in_each_step, a_write_after_the_split, a_write_into_what_is_concatenated,
    dropout, random_numbers, a_hook, parts_without_gradients, a_body_without_gradients, an_out_argument,
    a_choice_by_size, a_choice_by_the_remainder, a_choice_for_empty_parts, as_often_as_there_are_rows,
    a_name_of_the_size, numbers_of_the_size, stacked_rows, concatenated_numbers, a_dimension_that_is_not_there,
    results_in_another_dimension, padded_on_the_left, a_sum_from_something,
]  # fmt: skip


QUICK = {
    an_element_before, the_last_value, a_list_that_has_elements, a_list_that_the_body_reads,
    a_loop_that_returns_at_once, a_loop_in_a_loop, a_carried_sum_that_is_read, a_write_after_the_split,
}  # fmt: skip


def slow(case: Any, is_quick: bool) -> Any:
    return pytest.param(case, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("decoy", [slow(one, one in QUICK) for one in PROGRAMS], ids=lambda decoy: decoy.__name__)
def test_a_decoy_is_as_in_eager_mode(decoy: Program) -> None:
    def program(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
        return decoy(x, w, lengths.tolist())

    assert_eager_modes(program, batches(FEW))


# Bodies that mix the rows of a part, or look at some of them.

BODIES: dict[str, Any] = {
    "the first row": lambda x, w: x[:1] * 2,
    "all but the first row": lambda x, w: x[1:],
    "every other row": lambda x, w: x[::2],
    "some rows": lambda x, w: x[x[:, 0] > 0],
    "the rows backwards": lambda x, w: x.flip(0),
    "the rows rolled": lambda x, w: x.roll(1, 0),
    "running sums": lambda x, w: x.cumsum(0),
    "sorted columns": lambda x, w: x.sort(0).values,
    "softmax over the rows": lambda x, w: x.softmax(0) + x.log_softmax(-2),
    "norms over the rows": lambda x, w: F.normalize(x, dim=0) / (x.norm() + 1),
    "deviations": lambda x, w: x / (x.var(0, unbiased=False) + 1),
    "a product of the columns": lambda x, w: x @ (x.mT @ x),
    "scores that are no weights": lambda x, w: (x @ x.mT) @ x,
    "weights of columns": lambda x, w: (x @ x.mT).softmax(0) @ x,
    "transposed weights": lambda x, w: (x @ x.mT).softmax(-1).mT @ x,
    "weights and one": lambda x, w: ((x @ x.mT).softmax(-1) + 1) @ x,
    "the logarithm of weights": lambda x, w: (x @ x.mT).log_softmax(-1) @ x,
    "scores that are masked": lambda x, w: (x @ x.mT).tril() @ x,
    "sums of scores": lambda x, w: (x @ x.mT).sum(-1, keepdim=True) * x,
    "flat": lambda x, w: x.reshape(-1),
    "rows and features mixed": lambda x, w: (x.view(-1, 3) * w[0, :3]).view(-1, WIDTH),
    "transposed and flat": lambda x, w: x.mT.reshape(-1, WIDTH),
    "heads that are mixed with rows": lambda x, w: x.view(-1, 2, 3).transpose(0, 1).reshape(-1, WIDTH),
    "attention of heads to each other": lambda x, w: F.scaled_dot_product_attention(*[x.view(-1, 2, 3)] * 3).view(
        -1, 6
    ),
    "attention to something else": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None])[0],
    "a convolution": lambda x, w: F.conv1d(F.pad(x.mT[None], (1, 1)), torch.stack([w, w, w], -1))[0].mT,
    "a part as the weight": lambda x, w: F.linear(w, x).mT,
    "a row more": lambda x, w: torch.cat([x, w[:1]]),
    "the rows twice": lambda x, w: torch.cat([x, x * 2]),
    "the rows repeated": lambda x, w: x.repeat_interleave(2, 0),
    "rows around": lambda x, w: F.pad(x, (0, 0, 1, 1)),
    "positions": lambda x, w: x * torch.arange(x.shape[0])[:, None],
    "ones": lambda x, w: x + torch.ones(x.shape[0], 1),
    "something that is no part's": lambda x, w: w,
    "a write": lambda x, w: (x @ w).sub_(x.mean(0)),
    "a written slice": lambda x, w: torch.slice_scatter(x, x[:, :1], 1, 1, 2),
}


QUICK_BODIES = ("the first row", "transposed weights", "heads that are mixed with rows", "a write")


@pytest.mark.parametrize("name", [slow(name, name in QUICK_BODIES) for name in BODIES])
def test_a_body_that_mixes_rows_is_as_in_eager_mode(name: str) -> None:
    body = BODIES[name]

    def program(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
        return torch.cat([body(part, w) for part in x.split(lengths.tolist())])

    assert_eager_modes(program, batches(FEW[:2]))


# Writes to the lengths.


@pytest.mark.parametrize("when", [slow("before the split", False), slow("before the loop", False), "after the loop"])
def test_lengths_that_are_written_are_as_in_eager_mode(when: str) -> None:
    def program(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
        sizes = lengths.tolist()
        if when == "before the split":
            lengths.copy_(lengths.flip(0))
        parts = x.split(sizes)
        if when == "before the loop":
            lengths.copy_(lengths.flip(0))
        rows = [part - part.mean(0) for part in parts]
        if when == "after the loop":
            lengths.copy_(lengths.flip(0))
        again = torch.stack([row.square().sum(0) for row in rows])
        return torch.cat(rows), pad_sequence(rows), again, len(rows), lengths * 2

    assert_eager_modes(program, batches(FEW))


@pytest.mark.slow
def test_parts_of_other_lengths_beside_each_other_are_as_in_eager_mode() -> None:
    def program(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
        ones, others = x.split(lengths.tolist()), y.split(lengths.flip(0).tolist())
        return torch.stack([one.sum(0) * other.sum(0) for one, other in zip(ones, others, strict=True)])

    assert_eager_modes(program, batches(FEW))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_stays_in_its_part(value: float) -> None:
    """Except in attention, where a weight of 0 multiplies it, as in any attention with a mask."""

    def program(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
        is_first = torch.arange(x.shape[0])[:, None] == 0
        parts = torch.where(is_first, value, x).split(lengths.tolist())
        return torch.cat([part @ w - part.mean(0) for part in parts]), torch.stack([part.sum(0) for part in parts])

    assert_eager_modes(program, batches(FEW))


@pytest.mark.parametrize("broken", ["begin", "end", "_compute_for_all"])
def test_a_defect_while_a_loop_is_traced_leaves_it_unrolled(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(x: Tensor, w: Tensor, lengths: Tensor) -> Tensor:
        return torch.cat([part @ w for part in x.split(lengths.tolist())])

    def fail(*args: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Loop, broken, fail)
    given = torch.randn(9, WIDTH), torch.randn(WIDTH, WIDTH), torch.tensor([3, 4, 2])
    program_compiled = torch.compile(program, backend="fastpack", options={"fastpack.lowering": "eager"})
    with pytest.warns(UserWarning, match="loops over parts.*a defect"):
        actual = program_compiled(*given)
    torch.testing.assert_close(actual, program(*given))


def test_a_list_is_read_once_where_a_default_device_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode calls the same function again: reading the list there would call it once more, and so on."""
    made = []

    def counted(*args: Any) -> Any:
        made.append(args)
        return sizes(*args)

    sizes = lists.sizes
    monkeypatch.setattr(lists, "sizes", counted)
    lengths = torch.tensor([3, 4, 2])
    with torch.device("cpu"):
        actual = compiled(lambda lengths: lengths * sum(lengths.tolist()))(lengths)
    assert len(made) <= 4 and actual.tolist() == [27, 36, 18]
