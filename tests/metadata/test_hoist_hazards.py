"""Programs that are easy to get wrong, each once found wrong: aliases, equal twins, autocast, dynamic sizes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from tests.support import compiled

X = torch.ones(4, 2)
LENGTHS = torch.tensor([1, 2, 1])


def view_of_an_input_returned_from_a_checkpoint(x, lengths):
    def body(x, lengths):
        return x * lengths.max().item(), lengths[1:]

    y, view = checkpoint(body, x, lengths, use_reentrant=False)
    view.add_(1)
    return y * lengths.max().item()


def dtype_that_autocast_gives(x, lengths):
    weights = lengths.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = torch.outer(weights, weights) @ torch.ones(3, 3)
    return x, product.float() + 0.001


def write_to_a_copy_of_what_autocast_gives(x, lengths):
    weights = lengths.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = torch.outer(weights, weights) @ torch.ones(3, 3)
    product.float().add_(1)
    return x * product.sum()


def mask_of_twice_the_size(x, lengths):
    stop = lengths.max().item() * 2
    y = torch.cat([x, x])
    mask = torch.zeros_like(y)
    mask[:stop] = 3
    return y + mask


def views_of_two_equal_tensors_by_meshgrid(x, lengths):
    rows, columns = torch.arange(8), torch.arange(8)
    first, second = torch.meshgrid(rows, columns, indexing="ij")
    rows.add_(lengths.max())
    return x + first.sum(), x + second.sum()


def views_of_two_equal_tensors_by_atleast_2d(x, lengths):
    one, other = torch.zeros(8), torch.zeros(8)
    _, second = torch.atleast_2d(one, other)
    second.add_(lengths.max())
    return x + one.sum(), x + other.sum()


def activation_cast_like_itself(x, lengths):
    y = x.type_as(x).view_as(x)
    return (y * 2).sum() + lengths.max(), y.detach().sum()


def written_input_expanded_as_itself(x, lengths):
    lengths.add_(0)
    return x[:3] * lengths.expand_as(lengths)[:, None].to(x.dtype)


PROGRAMS = [
    view_of_an_input_returned_from_a_checkpoint,
    dtype_that_autocast_gives,
    write_to_a_copy_of_what_autocast_gives,
    mask_of_twice_the_size,
    views_of_two_equal_tensors_by_meshgrid,
    views_of_two_equal_tensors_by_atleast_2d,
    activation_cast_like_itself,
    written_input_expanded_as_itself,
]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_equals_eager_mode(program, dynamic):
    inputs = X, LENGTHS
    expected_inputs, actual_inputs = copy.deepcopy(inputs), copy.deepcopy(inputs)
    expected = program(*expected_inputs), expected_inputs
    actual = compiled(program, dynamic=dynamic)(*actual_inputs), actual_inputs
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    dtypes = [[leaf.dtype for leaf in pytree.tree_leaves(results)] for results in (actual, expected)]
    assert dtypes[0] == dtypes[1]


def test_inputs_that_come_to_share_memory_in_a_later_call():
    def program(x, lengths, other):
        y = x * lengths.max().item()
        other.add_(1)
        return y * lengths.max().item()

    def run(function):
        lengths = LENGTHS.clone()
        return function(X, lengths, lengths[:2]), lengths

    function = compiled(program)
    separate = X, LENGTHS.clone(), torch.tensor([1, 2])
    assert torch.equal(function(*copy.deepcopy(separate)), program(*copy.deepcopy(separate)))
    torch.testing.assert_close(run(function), run(program))


def test_equal_prologues_of_swapped_inputs_do_not_share_results():
    def first(x, lengths, number):
        return x * ((lengths + 1) - number).max().item()

    def second(x, number, lengths):
        return x * ((number + 1) - lengths).max().item()

    lengths = torch.tensor([1, 2, 8])
    assert torch.equal(compiled(first, dynamic=True)(X, lengths, 5), first(X, lengths, 5))
    assert torch.equal(compiled(second, dynamic=True)(X, 5, lengths), second(X, 5, lengths))
