"""Elements that a prologue reads: together where nothing writes to their tensor, one by one otherwise."""

from __future__ import annotations

import pytest
import torch

from tests.support import assert_same, compiled, host_reads, results


def in_parts(x, lengths):
    for _ in range(2):
        x = torch.cat([part * part.shape[0] for part in reversed(x.split(lengths.tolist()))])
    return x


def from_both_ends(x, lengths):
    return x * (lengths[-1].item() - 2 * lengths[0].item() + lengths[(1,)].item())


def written_between(x, lengths):
    bounds = torch.zeros(4, dtype=torch.int64)
    before = bounds[1].item()
    bounds[1:] = lengths.cumsum(0)
    return x * (bounds[1].item() + bounds[2].item() - before)


def of_a_matrix(x, lengths):
    table = torch.stack([lengths, lengths + 1])
    return x * (table[0, 1].item() + table[1, 2].item())


def few_of_many(x, lengths):
    places = torch.arange(1000) * lengths[0]
    return x * (places[3].item() + places[999].item())


@pytest.mark.parametrize(
    "program, reads", [(in_parts, 0), (from_both_ends, 0), (written_between, 3), (of_a_matrix, 2), (few_of_many, 2)]
)
def test_a_prologue_reads_elements_at_once(program, reads):
    batches = [(torch.randn(12, 4, requires_grad=True), torch.tensor(lengths)) for lengths in ([5, 4, 3], [2, 3, 7])]
    assert_same(program, batches)
    step = compiled(program)
    results(step, batches[0])
    assert host_reads(lambda: results(step, batches[1])) == reads  # `tolist` of a CPU tensor is no operator
