"""A step before and after the passes, on the first batch's sizes; and what that batch looked like."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import fxpasses.inspect
from fxpasses.base import once, sample
from fxpasses.inspect.html import page_data
from fxpasses.inspect.text import Style, report
from tests.support import compiled

B, T, WIDTH, COLUMNS = 4, 32, 16, 64


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(COLUMNS, WIDTH)
        self.first, self.second, self.head = (torch.nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH, COLUMNS))

    def forward(self, ids, attention_mask, labels):
        x, seen = self.embedding(ids), torch.ones(T, T, dtype=torch.bool).tril()
        mask = (seen & attention_mask.bool()[:, None])[:, None]
        for linear in (self.first, self.second):
            q = linear(x).view(B, T, 2, -1).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).view(B * T, -1), labels.view(-1))


def batch(lengths=(32, 8, 12, 4)):
    """Texts whose first half is a prompt."""
    ids, labels = torch.randint(1, COLUMNS, (B, T)), torch.full((B, T), -100)
    attention_mask = torch.zeros(B, T, dtype=torch.int64)
    for row, length in enumerate(lengths):
        attention_mask[row, :length], labels[row, length // 2 : length] = 1, 1
    return ids, attention_mask, labels


def test_flops_of_the_captured_graph_are_those_that_the_counter_of_torch_sees():
    def program(x, w, v):
        return torch.tanh(torch.tanh(x @ w) @ v).sum()

    given = [torch.randn(8, 4), torch.randn(4, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)]
    with fxpasses.inspect.record(measure=True) as record:
        compiled(program, "aot_eager")(*given)
    with FlopCounterMode(display=False) as counter:
        program(*given).backward()
    step = record.graphs[0].before
    assert step == record.graphs[0].after and step.flops == counter.get_total_flops() > 0
    assert step.saved_bytes == 8 * 16 * 4 + 8 * 4 * 4  # both results of tanh
    assert step.peak_bytes == max(step.live) and 0 < step.turn < len(step.live)


def test_sizes_that_the_batch_decides_are_those_of_the_first_batch_which_is_kept(tmp_path):
    with fxpasses.inspect.record(measure=True) as record:
        step = compiled(Decoder(), "aot_eager", rows="live")
        step(*batch()).backward()
        step(*batch((32, 32, 4, 4)))
    [graph] = record.graphs
    before, after = graph.before, graph.after
    assert 0 < after.flops < before.flops and 0 < after.peak_bytes < before.peak_bytes
    # Of 128 rows, 64 take part in the products of both layers, and 32 in those of the head.
    products = sum(2 * WIDTH * size for size in (64 * WIDTH, 64 * WIDTH, 32 * COLUMNS)) * 3
    assert products <= after.flops < 0.6 * before.flops
    assert "FLOPs, forward" not in report(record, Style())
    texts = record.sample.texts
    assert texts == [[1, 16, 0, 16], [1, 4, 0, 4, 2, 24], [1, 6, 0, 6, 2, 20], [1, 2, 0, 2, 2, 28]]
    assert record.sample.tiles and record.sample.rows == record.sample.columns
    record.save(tmp_path / "run.jsonl")
    assert fxpasses.inspect.load(tmp_path / "run.jsonl") == record  # with sizes that are not known
    assert page_data(record)["sample"]["texts"] == texts and page_data(record)["graphs"][0]["step"]
    assert not sample.is_wanted()


def test_attention_by_a_plan_counts_the_pairs_that_it_computes():
    def program(q, document):
        mask = (document[:, None] == document)[None, None]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum()

    tokens, heads, width = 512, 2, 8
    given = torch.randn(1, heads, tokens, width, requires_grad=True), torch.arange(tokens) // 128
    with fxpasses.inspect.record(measure=True) as record:
        compiled(program, "aot_eager")(*given).backward()
    [graph] = record.graphs
    assert record.attention["pairs_computed"] == record.attention["pairs"] / 4
    assert graph.before.flops == heads * tokens * tokens * 2 * width * (2 + 5)  # products in forward, and in backward
    assert graph.after.flops == graph.before.flops / 4


def test_nothing_is_measured_unless_it_is_asked_for():
    with fxpasses.inspect.record() as record:
        compiled(torch.sin)(torch.ones(3))
    assert record.graphs[0].before is None


def test_numbers_that_the_program_asked_for_are_those_of_the_batch():
    def program(x, lengths):
        for _ in range(2):
            x = x @ torch.ones(4, lengths.max().item())[:, : lengths[0].item()]
        return x.sum()

    with fxpasses.inspect.record(measure=True) as record:
        compiled(program, "aot_eager")(torch.ones(8, 4, requires_grad=True), torch.tensor([4, 3])).backward()
    [graph] = record.graphs
    assert graph.before.flops == graph.after.flops == 2 * 2 * (2 * 8 * 4 * 4)  # in backward, the gradient of x alone
    assert graph.after.bytes_moved < graph.before.bytes_moved  # one matrix of ones instead of two


@pytest.mark.parametrize("piece", ["take_texts", "take_tiles", "take_provided"])
def test_what_a_step_keeps_for_a_record_may_fail(piece, monkeypatch):
    def fails(*_):
        raise ZeroDivisionError(f"a defect of {piece}")

    monkeypatch.setattr(sample, piece, sample._for_records(fails))
    monkeypatch.setattr(once, "_given", set())
    given, model = batch(), Decoder()
    said = f"keeping the first batch for a record failed .*{piece}"
    with pytest.warns(UserWarning, match=said) as caught, fxpasses.inspect.record():
        found = [compiled(model, rows="live")(*given) for _ in range(2)]
    assert len([each for each in caught if "for a record" in str(each.message)]) == 1
    torch.testing.assert_close(found, [model(*given)] * 2)


def test_a_record_whose_block_raises_is_closed_and_not_measured():
    with pytest.raises(KeyError), fxpasses.inspect.record(measure=True) as record:
        compiled(torch.sin, "aot_eager")(torch.ones(3))
        raise KeyError
    assert record.graphs[0].before is None and record._unmeasured is None and not sample.is_wanted()


def test_a_step_that_cannot_be_measured_is_recorded_all_the_same():
    def program(x, n):
        return x[x > 0].sum() * torch.ones(n.max().item()).sum()

    with fxpasses.inspect.record(measure=True) as record:
        compiled(program, "aot_eager", passes=[])(torch.ones(4, requires_grad=True), torch.tensor([2]))
    assert "FLOPs" not in report(record, Style()) and len(record.graphs) == 1
