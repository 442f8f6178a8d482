"""Masks that are not made: which programs are computed in blocks of rows, which are not, and that the numbers agree."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fxpasses
import fxpasses.inspect
from fxpasses.attention import omit_masks
from fxpasses.attention.runtime import plan as plans
from fxpasses.attention.runtime.by_rows import PlanByRows
from fxpasses.report import Reason
from tests.support import compiled, reports_of, results

TOKENS, WIDTH = 288, 8
position = torch.arange(TOKENS)


@pytest.fixture(autouse=True)
def small_masks_count_as_large(monkeypatch):
    """And are read in blocks of 50 rows, the last one shorter."""
    monkeypatch.setattr(omit_masks, "LARGE", TOKENS * TOKENS)
    monkeypatch.setattr(plans, "_BLOCK", 50 * TOKENS)


class Layers(nn.Module):
    """Two layers of attention by the mask that `mask(lengths)` makes, in each of them anew; lengths: int64 [4]."""

    def __init__(self, mask, checkpointed=False, attend=F.scaled_dot_product_attention):
        super().__init__()
        self.mask, self.checkpointed, self.attend = mask, checkpointed, attend
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))

    def layer(self, x, lengths, number):
        q, k, v = self.qkv[number](x).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        return x + self.attend(q, k, v, self.mask(lengths)).transpose(1, 2).reshape(x.shape)

    def forward(self, x, lengths):
        for number in range(2):
            if self.checkpointed:
                x = checkpoint(self.layer, x, lengths, number, use_reentrant=False)
            else:
                x = self.layer(x, lengths, number)
        return x


LENGTHS = ([100, 188, 0, 0], [30, 20, 138, 100], [288, 0, 0, 0])


def batch(lengths, elements=1):
    return torch.randn(elements, TOKENS, WIDTH, requires_grad=True), torch.tensor(lengths)


def check(model, lowering="eager", elements=1, batches=LENGTHS, **options):
    """Compare with eager mode on batches that share one graph; returns the pass's report."""
    torch.manual_seed(0)
    with fxpasses.inspect.record() as record:
        program = compiled(model, lowering, **{"dynamic": False} | options)
        for lengths in batches:
            inputs = batch(lengths, elements)
            actual, expected = results(program, inputs), results(model, inputs)
            for name in expected:
                for found, wanted in zip(actual[name], expected[name], strict=True):
                    largest = wanted.detach().float().abs().max().item()
                    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6 * max(largest, 1.0))
    assert [graph.outcome for graph in record.graphs] == ["rewritten"]
    [report] = reports_of(record, "omit_masks")
    takes_mask = [
        node.args[3] is not None
        for region in record.graphs[0].final.regions
        for node in region.nodes
        if "sparse_attention" in node.target
    ]
    assert takes_mask and set(takes_mask) == {not report.changed}
    return report


# Masks whose rows are computed one by one


def document_of(lengths):
    return torch.searchsorted(lengths.cumsum(0), position, right=True)


def documents_by_ids(lengths):
    document = document_of(lengths)
    return (document[:, None] == document) & (position[:, None] >= position)


def documents_by_ends(lengths):
    ends = lengths.cumsum(0)
    inside = (position < ends[:, None]) & (position >= (ends - lengths)[:, None])
    both = inside[:, :, None] & inside[:, None]
    mask = both[0]
    for number in range(1, 4):
        mask = torch.logical_or(mask, both[number])
    return mask & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def documents_by_ends_alone(lengths):
    inside = torch.arange(TOKENS)[:, None] < lengths.cumsum(0)
    document = inside.sum(1)
    return document[:, None] == document


def documents_in_place(lengths):
    """`block_causal_mask` of examples/packed_training.py."""
    mask = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    start, longest = 0, lengths.max().item()
    for length in lengths.tolist():
        document = (position >= start) & (position < start + length)
        mask |= document[:, None] & document
        start += length
    distance = position[:, None] - position
    return mask.logical_and_((distance >= 0) & (distance < longest))


def triangle(lengths):
    document = document_of(lengths)
    causal = torch.tril(torch.ones((TOKENS, TOKENS), dtype=torch.bool))
    return torch.where(document[:, None] == document, causal, causal.new_zeros(TOKENS, TOKENS))


def upper_triangle_in_place(lengths):
    later = torch.full((TOKENS + 8, TOKENS), True).triu_(1)[:TOKENS]
    document = document_of(lengths)
    return ~(later | (document[:, None] != document))


def transposed(lengths):
    document = document_of(lengths)
    sees = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(diagonal=0).transpose(0, 1)
    return sees & (document[:, None] == document)


def window(lengths):
    distance = position[:, None] - position
    document = document_of(lengths)
    return (distance >= 0) & (distance < 40) & (document[None, :] == document[:, None])


def of_blocks_of_documents(lengths):
    """A table of who sees whom, read for each pair; documents see the ones before."""
    document = document_of(lengths)
    sees = torch.ones(5, 5, dtype=torch.bool).tril()
    return sees[document[:, None], document[None, :]][None, None].expand(1, 2, -1, -1)


def padding(lengths):
    """[2, 1, T, T]: the second element is shorter. Padding sees the tokens too."""
    kept = position < torch.stack([lengths[0] + lengths[1], lengths[0]])[:, None]
    return kept[:, None, None, :] & torch.ones(TOKENS, 1, dtype=torch.bool)


def padding_and_causal(lengths):
    """Rows of padding see nothing."""
    kept = position < torch.stack([lengths[0] + lengths[1], lengths[0]])[:, None]
    causal = (position[:, None] >= position).unsqueeze(0)
    return (causal & kept[:, None] & kept[:, :, None]).unsqueeze(1)


def holes(lengths):
    """Rows that an interval does not describe: every third column."""
    return ((position[:, None] - position) % 3 == 0) & (position < lengths[0])


def masked_fill(lengths):
    document = document_of(lengths)
    other = (document[:, None] != document).to(torch.bool)
    return (position[:, None] >= position).masked_fill(other, False)


def written_after_it_was_read(lengths):
    """The mask is what it was when it was read, not what it is in the end."""
    mask = position[:, None] >= position
    early = mask & (position < lengths[0])
    mask &= position[:, None] < lengths[0]
    return early | mask


ONE_ELEMENT = [
    documents_by_ids, documents_by_ends, documents_by_ends_alone, documents_in_place, triangle,
    upper_triangle_in_place, transposed, window, of_blocks_of_documents, holes, masked_fill, written_after_it_was_read,
]  # fmt: skip
IN_BLOCKS = [(mask, 1) for mask in ONE_ELEMENT] + [(padding, 2), (padding_and_causal, 2)]


@pytest.mark.parametrize(("mask", "elements"), IN_BLOCKS, ids=lambda value: getattr(value, "__name__", value))
def test_not_made(mask, elements):
    report = check(Layers(mask), elements=elements)
    assert report.figures["masks"] == 1 and not report.refusals
    assert report.summary == "the mask is not made: its plan is computed in blocks of rows"


class Recorded:
    """The plans that are made in blocks, and the largest tensor on the way to each."""

    def __init__(self, monkeypatch):
        self.plans, self.largest = [], 0
        forward = PlanByRows.forward

        def recorded(module, *arguments):
            watch = Sizes()
            with watch:
                made = forward(module, *arguments)
            self.plans.append(made)
            self.largest = max(self.largest, watch.largest)
            return made

        monkeypatch.setattr(PlanByRows, "forward", recorded)


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.bool:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(("mask", "elements"), IN_BLOCKS, ids=lambda value: getattr(value, "__name__", value))
def test_plans_are_those_of_the_masks(mask, elements, monkeypatch):
    recorded = Recorded(monkeypatch)
    with torch.no_grad():
        program = compiled(Layers(mask), dynamic=False)
        for lengths in LENGTHS:
            program(*batch(lengths, elements))
            whole = plans.four_dimensional(mask(torch.tensor(lengths)))
            if whole.stride(1) == 0:
                whole = whole[:, :1]
            expected = plans.plan_in_blocks(lambda a, b, whole=whole: whole[:, :, a:b], tuple(whole.shape), 2)
            assert torch.equal(recorded.plans[-1], expected)
    assert len(recorded.plans) == 3
    assert recorded.largest < TOKENS * TOKENS  # bytes of bools: blocks, and no mask


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_checkpoints(lowering):
    assert check(Layers(documents_by_ids, checkpointed=True), lowering).changed


def test_with_inductor_no_mask_is_compiled():
    assert check(Layers(documents_by_ids), "inductor").changed


def test_sizes_that_change():
    def program(q, document):
        own = torch.arange(q.shape[2])
        mask = (document[:, None] == document) & (own[:, None] >= own)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    with fxpasses.inspect.record() as record:
        program_compiled = compiled(program, dynamic=True)
        for tokens in (TOKENS, TOKENS + 30, TOKENS + 200):
            inputs = torch.randn(1, 2, tokens, 8, requires_grad=True), torch.arange(tokens) // 70
            actual, expected = results(program_compiled, inputs), results(program, inputs)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    [report] = reports_of(record, "omit_masks")
    assert report.changed


def test_verified():
    assert check(Layers(documents_by_ids), verify=True).changed


def test_one_plan_for_a_batch_also_ahead_of_it(monkeypatch):
    recorded = Recorded(monkeypatch)
    program = compiled(Layers(documents_by_ends_alone), dynamic=False)
    x, lengths = batch(LENGTHS[0])
    program(x, lengths)
    program(x, lengths)
    assert len(recorded.plans) == 1
    ahead = torch.tensor(LENGTHS[1])
    assert fxpasses.prefetch(program, (x, ahead)) >= 1  # other live programs may have inputs of these names
    planned = len(recorded.plans)
    assert planned >= 2
    program(x, ahead)
    assert len(recorded.plans) == planned


class TwoMasks(Layers):
    """One layer sees all of its document, the other a window of it."""

    def layer(self, x, lengths, number):
        self.mask = window if number else documents_by_ids
        return super().layer(x, lengths, number)


def test_two_masks():
    assert check(TwoMasks(None)).figures["masks"] == 2


# Masks that are made as ever


def cumulated(lengths):
    return (position[:, None] >= position).cumsum(0) > lengths[1] // 8


def ordered(lengths):
    return ((position[:, None] * 7 + lengths[0]) % (position + 1) == 0).sort(0).values


def multiplied(lengths):
    one_hot = F.one_hot(document_of(lengths), 5).float()
    return (one_hot @ one_hot.T) > 0


def flipped(lengths):
    return documents_by_ids(lengths).flip(0).flip(1)


def rolled(lengths):
    return documents_by_ids(lengths).roll(1, 0)


def every_other_row(lengths):
    rows = torch.arange(2 * TOKENS)
    return (rows[:, None] >= 2 * position + lengths[0] // 300)[::2]


def later_rows(lengths):
    rows = torch.arange(TOKENS + 4)
    return (rows[:, None] >= position + lengths[0] // 300)[4:]


def rows_by_number(lengths):
    """Each row is another row of the mask, as the batch says."""
    return documents_by_ids(lengths)[position.flip(0) // 1]


def read_elsewhere(lengths):
    return documents_by_ids(lengths)[position.flip(0)[:, None], position]


def gathered(lengths):
    order = (position[:, None] + position + lengths[0]) % TOKENS
    return torch.gather(documents_by_ids(lengths), 0, order)


def rows_written(lengths):
    mask = documents_by_ids(lengths)
    mask[10:20] = True
    return mask


def normalised(lengths):
    """Each row depends on all the others."""
    allowed = documents_by_ids(lengths)
    return allowed & (allowed.sum(0, keepdim=True) > lengths[0] // 100)


KEPT = [
    cumulated, ordered, multiplied, flipped, rolled, every_other_row, later_rows, rows_by_number, gathered,
    rows_written, normalised, read_elsewhere,
]  # fmt: skip


@pytest.mark.parametrize("mask", KEPT, ids=lambda mask: mask.__name__)
def test_rows_that_depend_on_each_other(mask):
    report = check(Layers(mask))
    assert [refusal.reason for refusal in report.refusals] == [Reason.NOT_BY_ROWS]


def written_out(q, k, v, mask):
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, torch.finfo(q.dtype).min)
    return scores.softmax(-1) @ v


def test_attention_written_out_has_its_mask():
    assert not check(Layers(documents_by_ids, attend=written_out)).changed


def additive(lengths):
    return torch.zeros(TOKENS, TOKENS).masked_fill(~documents_by_ids(lengths), float("-inf"))


def test_additive_masks_are_made():
    [refusal] = check(Layers(additive)).refusals
    assert refusal.reason is Reason.NOT_BOOL


class Returned(Layers):
    def forward(self, x, lengths):
        return super().forward(x, lengths), self.mask(lengths)


class Counted(Layers):
    """The mask's sum is the batch's too: the prologue makes the mask for it."""

    def forward(self, x, lengths):
        return super().forward(x, lengths) * self.mask(lengths).sum() / TOKENS**2


class Weighed(Layers):
    """A layer that looks at the mask itself."""

    def forward(self, x, lengths):
        return super().forward(x, lengths) + self.mask(lengths).float() @ x


@pytest.mark.parametrize("model", [Returned, Counted, Weighed])
def test_another_needs_the_mask(model):
    [refusal] = check(model(documents_by_ids)).refusals
    assert refusal.reason is Reason.MASK_NEEDED


def test_small_masks_are_made(monkeypatch):
    monkeypatch.setattr(omit_masks, "LARGE", TOKENS * TOKENS + 1)
    report = check(Layers(functools.partial(documents_by_ids)))
    assert not report.changed and not report.refusals
