"""Sorting pairs by expert: the order of `torch.where`, counts and offsets, slices of the experts, and no host read."""

import pytest
import torch

from fxpasses.runtime.expert_order import row_groups, sort_by_expert
from tests.support import HOST_READS, events

EXPERTS = 5


@pytest.mark.parametrize("pairs", [0, 1, 64])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_groups_are_what_torch_where_finds(pairs, dtype):
    ids = torch.randint(0, EXPERTS, (pairs,)).to(dtype)
    order, counts, offsets = sort_by_expert(ids, EXPERTS)
    assert order.dtype == torch.int64 and offsets.dtype == torch.int32
    for expert, group in enumerate(order.tensor_split(offsets.tolist())[:EXPERTS]):
        assert torch.equal(group, torch.where(ids == expert)[0])
        assert counts[expert] == len(group)


def test_pairs_of_a_mask_with_slots_first():
    idx = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(12)])
    mask = torch.nn.functional.one_hot(idx, EXPERTS).permute(2, 1, 0)
    order, _, offsets = sort_by_expert(idx.t().flatten(), EXPERTS)
    for expert, group in enumerate(order.tensor_split(offsets.tolist())[:EXPERTS]):
        slot, token = torch.where(mask[expert])
        assert torch.equal(group // 12, slot) and torch.equal(group % 12, token)


def test_a_slice_of_the_experts_leaves_the_others_at_the_end():
    ids = torch.tensor([4, 1, 3, -1, 1, 2, 0])
    order, counts, offsets = sort_by_expert(ids, experts=2, first=1)
    assert counts.tolist() == [2, 1] and offsets.tolist() == [2, 3]
    assert order.tolist() == [1, 4, 5, 0, 2, 3, 6]


def test_the_group_of_each_row():
    assert row_groups(torch.tensor([2, 2, 3]), 5).tolist() == [0, 0, 2, 3, 3]


def test_nothing_is_read_on_the_host():
    ids = torch.randint(0, EXPERTS, (64,))
    counted = events(lambda: row_groups(sort_by_expert(ids, EXPERTS).offsets, 64))
    assert not any(counted[name] for name in (*HOST_READS, "aten::bincount"))


def test_is_captured_whole_with_any_number_of_pairs():
    compiled = torch.compile(sort_by_expert, backend="aot_eager", fullgraph=True, dynamic=True)
    for pairs in (3, 40):
        ids = torch.randint(0, EXPERTS, (pairs,))
        assert all(map(torch.equal, compiled(ids, EXPERTS, 1), sort_by_expert(ids, EXPERTS, 1)))
