"""What `hoist_metadata` hoists, what it refuses, and that neither changes a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fxpasses.inspect
from fxpasses.inspect import Record
from fxpasses.report import Reason
from tests.support import assert_same, compiled, reports_of

TOKENS = 12
LENGTHS = ([5, 4, 3], [1, 10, 1], [2, 2, 8])


def batches(dtype: torch.dtype = torch.int64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(TOKENS, 4, requires_grad=True), torch.tensor(lengths, dtype=dtype)) for lengths in LENGTHS]


def longest_item(x, lengths):
    return x * lengths.max().item()


def shortest_int(x, lengths):
    return x + int(lengths.min())


def sum_cumsum_diff(x, lengths):
    ends = lengths.cumsum(0)
    return x * ends.diff().sum().item() + ends[:-1].sum()


def argmax_item(x, lengths):
    return x + lengths.argmax().item()


def float_item(x, lengths):
    return x * lengths.float().mean().item()


def bool_item(x, lengths):
    return x * (lengths > 3).any().item()


def max_with_index(x, lengths):
    value, index = lengths.view(1, -1).max(1)
    return x * value.item() + index.item()


def unbound(x, lengths):
    first, second, third = lengths.unbind()
    return x * (first * second + third).item()


def to_cpu(x, lengths):
    return x * lengths.cpu().max().item() + lengths.to("cpu").sum().item()


def cumulative_lengths(x, lengths):
    bounds = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return x + bounds[1:].sum()


def cumulative_lengths_by_loop(x, lengths):
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    for index in range(len(lengths)):
        bounds[index + 1] = bounds[index] + lengths[index]
    return x * bounds.float().mean()


def nonzero_rows(x, lengths):
    return x[(lengths > 2).nonzero().squeeze(-1)].sum() + x


def nonzero_tuple(x, lengths):
    return x[(lengths > 2).nonzero(as_tuple=True)[0]].sum() + x


def repeat_interleave_of_unknown_size(x, lengths):
    segment = torch.repeat_interleave(torch.arange(3), lengths)
    return x * (segment[:, None] == segment[None]).sum(1)[: x.shape[0], None]


def functional_mask(x, lengths):
    segment = torch.repeat_interleave(torch.arange(3), lengths, output_size=x.shape[0])
    position = torch.arange(x.shape[0])
    allowed = (segment[:, None] == segment[None]) & (position[:, None] >= position[None])
    return torch.where(allowed, 0.0, -1e4).softmax(-1) @ x


def mask_by_slice_assignment(x, lengths):
    mask, start = torch.zeros(x.shape[0], x.shape[0], dtype=torch.bool), 0
    for length in lengths.tolist():
        mask[start : start + length, start : start + length] = True
        start += length
    return mask.to(x.dtype) @ x


def mask_by_boolean_assignment(x, lengths):
    mask, position, start = torch.full((TOKENS, TOKENS), -1e4), torch.arange(TOKENS), 0
    for length in lengths.tolist():
        inside = (position >= start) & (position < start + length)
        mask[inside[:, None] & inside[None]] = 0
        start += length
    return mask.softmax(-1) @ x


def mask_by_methods_in_place(x, lengths):
    mask = torch.ones(TOKENS, TOKENS).tril_()
    mask.masked_fill_((torch.arange(TOKENS) >= lengths[0])[:, None], 0.5)
    mask += 1
    mask.mul_(2).add_(1)
    return mask @ x


def write_through_a_view(x, lengths):
    mask = torch.zeros(TOKENS, TOKENS)
    mask.t()[0].fill_(3.0)
    mask.view(-1)[: lengths.max().item()].add_(1)
    return mask @ x


def mask_read_between_writes(x, lengths):
    mask = torch.zeros(TOKENS)
    mask[: lengths[0].item()] = 1
    mask[-1] = mask.sum()
    mask += mask.mean()
    return x * mask[:, None]


def mask_like_activation(x, lengths):
    mask = x.new_full((x.shape[0], x.shape[0]), -1e4)
    mask[:, : lengths.max().item()] = 0
    return mask.softmax(-1) @ x


def mask_cast_like_activation(x, lengths):
    mask = torch.arange(x.shape[0])[:, None] < lengths[0]
    return mask.type_as(x).expand_as(x) * x


def literal(x, lengths):
    return x * torch.tensor([1, 2, 3]).mul(lengths).sum()


def under_autocast(x, lengths):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = lengths.float()
        return x * (torch.outer(weights, weights) @ torch.ones(3, 3)).sum()


def arange_of_longest(x, lengths):
    return x * (torch.arange(lengths.max().item()) * 2).sum()


def split_by_lengths(x, lengths):
    return torch.cat([part * index for index, part in enumerate(torch.split(x, lengths.tolist()))])


HOISTED: list[Callable[..., Any]] = [
    longest_item, shortest_int, sum_cumsum_diff, argmax_item, float_item, bool_item, max_with_index, unbound, to_cpu,
    cumulative_lengths, cumulative_lengths_by_loop, nonzero_rows, nonzero_tuple, repeat_interleave_of_unknown_size,
    functional_mask, mask_by_slice_assignment, mask_by_boolean_assignment, mask_by_methods_in_place,
    write_through_a_view, mask_read_between_writes, mask_like_activation, mask_cast_like_activation, literal,
    under_autocast, arange_of_longest, split_by_lengths,
]  # fmt: skip


def twice(layer: Callable[..., Any], *, checkpointed: bool) -> Callable[..., Any]:
    def program(x, lengths):
        for _ in range(2):
            x = checkpoint(layer, x, lengths, use_reentrant=False) if checkpointed else layer(x, lengths)
        return x

    return program


def only_figures(record: Record) -> dict[str, int]:
    assert len(record.graphs) == 1, record
    return record.figures("hoist_metadata")


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("layer", HOISTED, ids=lambda layer: layer.__name__)
def test_is_hoisted_once_for_two_layers(layer, checkpointed, lowering):
    record = assert_same(twice(layer, checkpointed=checkpointed), batches(), lowering)

    figures = only_figures(record)
    assert figures["inputs_added"] >= 1
    assert 2 * figures["host_reads_after"] == figures["host_reads_before"]
    assert 2 * figures["tensors_built_after"] == figures["tensors_built_before"]
    assert not reports_of(record)[0].refusals


@pytest.mark.parametrize("layer", [cumulative_lengths, functional_mask, longest_item], ids=lambda layer: layer.__name__)
def test_int32_lengths(layer):
    figures = only_figures(assert_same(twice(layer, checkpointed=True), batches(torch.int32)))
    assert figures["inputs_added"] == 1


def test_two_windows_that_alternate_stay_two_masks():
    def program(x, lengths):
        position = torch.arange(TOKENS)
        for window in (3, 5, 3, 5):
            near = (position[:, None] - position[None]).abs() < window
            x = torch.full((TOKENS, TOKENS), -1e4).masked_fill_(near, 0).softmax(-1) @ x
        return x * lengths.max()

    figures = only_figures(assert_same(program, batches()))
    assert (figures["tensors_built_before"], figures["tensors_built_after"]) == (5, 3)


def test_nested_checkpoints():
    def inner(x, lengths):
        return functional_mask(x, lengths) + longest_item(x, lengths)

    def outer(x, lengths):
        x = checkpoint(inner, x, lengths, use_reentrant=False)
        return longest_item(checkpoint(inner, x, lengths, use_reentrant=False), lengths)

    figures = only_figures(assert_same(twice(outer, checkpointed=True), batches(), "aot_eager"))
    assert (figures["host_reads_before"], figures["host_reads_after"]) == (6, 1)
    assert (figures["tensors_built_before"], figures["tensors_built_after"]) == (4, 1)


def test_metadata_made_from_position_ids():
    def layer(x, positions):
        starts = (positions == 0).nonzero().squeeze(-1)
        bounds = F.pad(starts, (0, 1), value=TOKENS)
        return x * bounds.diff().max().item() + bounds.sum()

    positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS]
    inputs = [(torch.randn(TOKENS, 4, requires_grad=True), p) for p in positions]
    figures = only_figures(assert_same(twice(layer, checkpointed=True), inputs, "aot_eager"))
    assert (figures["host_reads_before"], figures["host_reads_after"]) == (4, 2)


def test_several_metadata_tensors_for_encoder_and_decoder():
    def program(x, sources, targets):
        for _ in range(2):
            x = checkpoint(longest_item, x, sources, use_reentrant=False)
            x = checkpoint(functional_mask, x, targets, use_reentrant=False)
        return x

    inputs = [(x, lengths, lengths.flip(0)) for x, lengths in batches()]
    figures = only_figures(assert_same(program, inputs))
    assert (figures["host_reads_after"], figures["tensors_built_after"]) == (1, 1)


# What must be refused


def refusals(record: Record) -> set[Reason]:
    return {refusal.reason for report in reports_of(record) for refusal in report.refusals}


def test_refuses_what_depends_on_a_parameter():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4))

        def forward(self, x, lengths):
            return x * (lengths.sum() * self.weight).detach().sum().item()

    assert Reason.PARAMETER in refusals(assert_same(Model(), batches(), tolerance=1e-6))


def test_refuses_what_depends_on_an_activation():
    def program(x, lengths):
        return x * (x.detach().sum() * lengths.sum()).item() + lengths.max().item()

    record = assert_same(program, batches())
    assert Reason.ACTIVATION in refusals(record)
    assert only_figures(record)["host_reads_after"] == 1


def test_refuses_random_numbers():
    def program(x, lengths):
        keep = torch.rand(TOKENS) < lengths.max()
        return x * torch.randint(0, 5, (1,)).item() * keep[:, None] + torch.randperm(TOKENS)[:, None] * lengths.max()

    x, lengths = batches()[0]
    with fxpasses.inspect.record() as record:
        function = compiled(program)
        for _ in range(2):  # a second call must draw again
            torch.manual_seed(1)
            expected = program(x, lengths), torch.rand(1)
            torch.manual_seed(1)
            assert torch.equal(function(x, lengths), expected[0])
            assert torch.equal(torch.rand(1), expected[1])
    assert Reason.RANDOM in refusals(record)


def test_refuses_an_input_that_the_graph_writes():
    def program(x, lengths):
        y = x * lengths.max().item()
        lengths.add_(1)
        return y * lengths.max().item()

    assert Reason.INPUT_WRITTEN in refusals(assert_same(program, batches()))


def test_refuses_inputs_of_which_one_is_a_view_of_another():
    def program(x, lengths, view):
        y = x * lengths.max().item()
        view.add_(1)
        return y * lengths.max().item()

    def run(function):
        lengths = torch.tensor(LENGTHS[0])
        return function(torch.ones(TOKENS, 4), lengths, lengths[:2]), lengths

    torch.testing.assert_close(run(compiled(program)), run(program))


def test_refuses_a_mask_that_a_layer_writes_to():
    def program(x, lengths):
        for _ in range(2):
            mask = torch.zeros(TOKENS, TOKENS)
            mask[: lengths.max().item()] = 1
            mask[0] = x.detach().sum()
            x = mask @ x
        return x

    record = assert_same(program, batches())
    assert Reason.WRITTEN_BY_LAYER in refusals(record)
    assert only_figures(record)["host_reads_after"] == 1  # the scalar is hoisted all the same


def test_refuses_a_read_that_comes_before_a_write():
    def program(x, lengths):
        mask = torch.zeros(TOKENS)
        mask[: lengths[0].item()] = 1
        y = x + mask[:, None]
        mask[: lengths[1].item()].add_(1)
        return y + mask[:, None]

    record = assert_same(program, batches())
    assert Reason.READ_BEFORE_WRITE in refusals(record)


def test_two_outputs_that_share_memory_still_share_it():
    def program(x, lengths):
        mask = torch.zeros(TOKENS).add_(lengths.max())
        return x * mask[:, None], mask, mask[2:]

    record = assert_same(program, batches())
    assert Reason.ESCAPES in refusals(record)


def test_a_returned_mask_is_the_callers_own():
    def program(x, lengths):
        mask = torch.zeros(TOKENS).add_(lengths.max())
        return x * mask[:, None], mask

    x, lengths = batches()[0]
    function = compiled(program)
    function(x, lengths)[1].fill_(99)
    assert torch.equal(function(x, lengths)[1], program(x, lengths)[1])


def test_a_layer_that_returns_the_mask_from_a_checkpoint():
    def layer(x, lengths):
        mask = torch.zeros(TOKENS).add_(lengths.max())
        return x * mask[:, None], mask

    def program(x, lengths):
        x, mask = checkpoint(layer, x, lengths, use_reentrant=False)
        mask = mask + 1
        return x * mask[:, None]

    assert_same(program, batches(), "aot_eager")


def test_a_function_transform_is_left_alone():
    def program(x, lengths):
        limits = torch.vmap(lambda row, length: row * length)(x[:3], lengths)
        return limits.sum() + x.sum() * lengths.max().item()

    assert_same(program, batches())


def test_what_is_large_and_used_once_stays_in_the_graph(monkeypatch):
    import fxpasses.metadata.hoist_metadata as module

    def program(x, lengths):
        return x.sum() * lengths.max().item() + F.one_hot(lengths, 16)

    monkeypatch.setattr(module, "_LARGE", 3 * 16 * 8 - 1)
    assert Reason.TOO_LARGE in refusals(assert_same(program, batches()))
    monkeypatch.setattr(module, "_LARGE", 3 * 16 * 8)
    torch._dynamo.reset()
    assert only_figures(assert_same(program, batches()))["tensors_built_after"] == 1


def test_plain_factories_and_sizes_stay_where_a_compiler_sees_them():
    def program(x, lengths):
        return x + torch.full((TOKENS, 1), 2.0) + torch.arange(TOKENS)[:, None] + len(lengths)

    record = assert_same(program, batches())
    assert not reports_of(record)[0].changed


@pytest.mark.parametrize(("layers", "small", "moves"), [(1, 48, False), (1, 47, True), (2, 48, True)])
def test_without_reads_a_small_value_goes_to_the_prologue_only_if_it_is_made_again(layers, small, moves, monkeypatch):
    """Made once, it was hoisted all the same: a small BERT's step took 1.05 times as long, for its one mask."""
    monkeypatch.setattr("fxpasses.metadata.hoist_metadata._SMALL", small)

    def program(x, lengths):
        for _ in range(layers):
            mask = torch.arange(16) < lengths[:, None]
            x = x + mask[:, :4].repeat(4, 1)
        return x

    (report, *_) = reports_of(assert_same(program, batches()))
    assert report.changed == moves
    assert [refusal.reason for refusal in report.refusals] == ([] if moves else [Reason.SMALL])


@pytest.mark.parametrize("layers", [1, 2])
def test_what_no_batch_changes_goes_to_the_prologue_only_if_it_is_made_again(layers):
    """Made once, it was hoisted all the same: a prologue for DLRM's pairs of features, in each step."""

    def program(x, lengths):
        for _ in range(layers):
            rows, columns = torch.tril_indices(4, 4, offset=-1).unbind()
            x = x + (x @ x.T)[rows, columns].sum()
        return x

    (report, *_) = reports_of(assert_same(program, batches()))
    assert report.changed == (layers > 1)


def test_a_constant_that_is_used_before_a_write_and_after_it():
    def program(x, lengths):
        mask = torch.arange(TOKENS)[:, None] < torch.full((TOKENS, 1), 6)
        x = x * mask.float() * lengths.max().item()
        mask[:2] = False
        return x + mask.float()

    assert_same(program, batches())


def test_a_factory_that_reads_memory_reads_it_before_the_next_write():
    def program(x, lengths):
        value = torch.zeros(())
        filled = torch.full((TOKENS, 1), value)
        value.add_(lengths.max())
        return x + filled + value

    assert_same(program, batches())


def test_constants_of_different_type_are_not_merged():
    def program(x, lengths):
        one, true, real = lengths * 1, lengths * True, lengths * 1.0
        return x.sum() + one, x.sum() + true, x.sum() * lengths.max().item() + real

    record = assert_same(program, batches())
    assert only_figures(record)["tensors_built_after"] == 3


def test_a_selection_that_the_program_returns():
    def program(x, labels):
        return x * 2, labels.masked_select(labels >= 0)

    labels = torch.tensor([[1, 2, -1], [3, 4, 1]])
    assert_same(program, [(torch.ones(3, requires_grad=True), each) for each in (labels, labels.flip(0))], "aot_eager")
