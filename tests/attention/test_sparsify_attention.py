"""What `sparsify_attention` takes, what it refuses, and that neither changes a number by more than rounding."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fxpasses.inspect
from fxpasses.report import Reason
from tests.attention.spellings import (
    FUSED,
    LEAST,
    WRITTEN,
    added,
    additive,
    at_sign,
    hidden_first,
    hugging_face,
    keywords,
    least_filled,
    least_values,
    query_scaled,
)
from tests.support import assert_same, compiled, events, reports_of, results

TOKENS, WIDTH, HEADS = 288, 16, 2
NAME = "sparsify_attention"
LENGTHS = ([100, 188], [288], [30, 20, 40, 100, 98])


def documents(lengths):
    """Which tokens of a packed batch see each other: bool [1, 1, TOKENS, TOKENS]; causal, each in its own document."""
    ends = lengths.cumsum(0)
    document = torch.searchsorted(ends, torch.arange(TOKENS), right=True)
    position = torch.arange(TOKENS)
    same = document[:, None] == document[None]
    return (same & (position[:, None] >= position[None]))[None, None]


class Layers(nn.Module):
    """Two layers of `attend(q, k, v, allowed)`, on one mask or on one of each layer's own."""

    def __init__(self, attend, mask=documents, checkpointed=False, groups=1):
        super().__init__()
        self.attend, self.mask, self.checkpointed, self.groups = attend, mask, checkpointed, groups
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))

    def layer(self, x, lengths, number):
        batch = x.shape[0]
        q, k, v = self.qkv[number](x).view(batch, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        k, v = (tensor[:, : HEADS // self.groups] for tensor in (k, v))
        out = self.attend(q, k, v, self.mask(lengths))
        return x + out.transpose(1, 2).reshape(batch, TOKENS, WIDTH)

    def forward(self, x, lengths):
        for number in range(2):
            if self.checkpointed:
                x = checkpoint(self.layer, x, lengths, number, use_reentrant=False)
            else:
                x = self.layer(x, lengths, number)
        return x


def batch(lengths, elements=1):
    """Lengths are padded with zeros to five, so that batches have one shape."""
    return torch.randn(elements, TOKENS, WIDTH, requires_grad=True), torch.tensor(lengths + [0] * (5 - len(lengths)))


def assert_close(actual, expected, tolerance=2e-6):
    """All results, each by its largest value."""
    for name in expected:
        for found, wanted in zip(actual[name], expected[name], strict=True):
            largest = wanted.detach().double().abs().nan_to_num(0, 0, 0).max().item()
            torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * max(largest, 1e-3), equal_nan=True)


def check(program, batches, lowering="eager", tolerance=2e-6, **options):
    """Compare with eager mode; returns the pass's report, of the one graph that all batches share."""
    with fxpasses.inspect.record() as record:
        program_compiled = compiled(program, lowering, dynamic=options.pop("dynamic", False), **options)
        for inputs in batches:
            assert_close(results(program_compiled, inputs), results(program, inputs), tolerance)
    assert len(record.graphs) == 1
    [report] = reports_of(record, NAME)
    assert [graph.outcome for graph in record.graphs] == ["rewritten"]
    return report


@pytest.mark.parametrize("attend", [*FUSED, *WRITTEN], ids=lambda attend: attend.__name__)
def test_spellings(attend):
    report = check(Layers(attend), [batch([100, 188]), batch([30, 20, 40, 100, 98])])
    assert report.figures == {"attentions": 2, "masks": 1} and not report.refusals


@pytest.mark.parametrize("attend", [keywords, hugging_face])
def test_one_plan_for_all_layers_of_a_batch(attend):
    program = compiled(Layers(attend))
    program(*batch([100, 188])).sum().backward()
    counts = events(lambda: program(*batch([50, 238])).sum().backward())
    assert counts["fxpasses::attention_plan"] == 1
    assert counts["fxpasses::sparse_attention_forward"] == counts["fxpasses::sparse_attention_backward"] == 2


@pytest.mark.parametrize("attend", [keywords, hugging_face])
def test_checkpoints_recompute_attention_and_no_plan(attend):
    model = Layers(attend, checkpointed=True)
    report = check(model, [batch(lengths) for lengths in LENGTHS], lowering="aot_eager")
    assert report.figures == {"attentions": 2, "masks": 1}
    torch._dynamo.reset()
    program = compiled(model, "aot_eager")
    program(*batch([100, 188])).sum().backward()
    counts = events(lambda: program(*batch([50, 238])).sum().backward())
    assert counts["fxpasses::attention_plan"] == 1
    assert counts["fxpasses::sparse_attention_forward"] == 4


def captured_and_final(program, *inputs, **options):
    """The calls of a graph before and after all passes, by name."""
    with fxpasses.inspect.record() as record:
        compiled(program, **options)(*inputs)
    stages = record.graphs[0].captured, record.graphs[0].final
    return [[node.target for node in stage.regions[0].nodes if node.op.startswith("call")] for stage in stages]


def test_the_graph_after():
    """The docstring's own: attention, and views of the prologue's mask."""

    def program(q, k, v, lengths):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=documents(lengths))

    operands = [torch.randn(1, HEADS, TOKENS, 8) for _ in range(3)]
    before, after = captured_and_final(program, *operands, torch.tensor([100, 188]))
    assert "torch._C._nn.scaled_dot_product_attention" in before
    assert [name for name in after if "getitem" not in name] == ["torch.ops.fxpasses.sparse_attention.default"]


# Groups of query heads that share a head of keys


def expanded_heads(k, groups):
    batch, heads, tokens, width = k.shape
    return k[:, :, None, :, :].expand(batch, heads, groups, tokens, width).reshape(batch, heads * groups, tokens, width)


def unsqueezed_heads(k, groups):
    return k.unsqueeze(2).expand(-1, -1, groups, -1, -1).contiguous().flatten(1, 2)


def interleaved_heads(k, groups):
    return k.repeat_interleave(groups, dim=1)


def interleaved_before_heads_come_first(k, groups):
    return torch.repeat_interleave(k.transpose(1, 2), groups, 2).transpose(1, 2)


def repeats(attend, repeat):
    @functools.wraps(attend)
    def attention(q, k, v, allowed):
        groups = q.shape[1] // k.shape[1]
        return attend(q, repeat(k, groups), repeat(v, groups), allowed)

    return attention


def heads_of_keys(program, *inputs):
    """How many heads of keys the new operator takes."""
    with fxpasses.inspect.record() as record:
        compiled(program)(*inputs)
    nodes = record.graphs[0].final.regions[0].nodes
    by_name = {node.name: node for node in nodes}
    calls = [node for node in nodes if "sparse_attention" in node.target]
    return {by_name[call.args[1]["node"]].values[0].shape[1] for call in calls}


REPEATS = [expanded_heads, unsqueezed_heads, interleaved_heads, interleaved_before_heads_come_first]


@pytest.mark.parametrize("repeat", REPEATS)
@pytest.mark.parametrize("attend", [keywords, hugging_face])
def test_repeated_heads_are_not_copied(attend, repeat):
    model = Layers(repeats(attend, repeat), groups=2)
    check(model, [batch([100, 188]), batch([288])])
    assert heads_of_keys(model, *batch([100, 188])) == {1}


def grouped(q, k, v, allowed):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)


def one_head_for_all(q, k, v, allowed):
    return (q @ k.mT * q.shape[-1] ** -0.5 + added(allowed)).softmax(-1) @ v


@pytest.mark.parametrize("attend", [grouped, one_head_for_all])
def test_heads_that_the_operator_shares(attend):
    model = Layers(attend, groups=2)
    check(model, [batch([100, 188]), batch([288])])
    assert heads_of_keys(model, *batch([100, 188])) == {1}


def tiled(k, groups):
    """Another order of heads."""
    return k.repeat(1, groups, 1, 1)


def written_after(k, groups):
    """The copy has other values than what it is a copy of."""
    copy = interleaved_heads(k, groups)
    k.mul_(2)
    return copy


@pytest.mark.parametrize("repeat", [tiled, written_after])
def test_heads_that_are_copied(repeat):
    def attend(q, k, v, allowed):
        k, v = k.clone(), v.clone()
        return repeats(keywords, repeat)(q, k, v, allowed)

    model = Layers(attend, groups=2)
    check(model, [batch([100, 188])])
    assert heads_of_keys(model, *batch([100, 188])) == {2}


# What is left alone


def dropping(q, k, v, allowed):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=0.1)


def dropping_written(q, k, v, allowed):
    weights = F.dropout((q @ k.mT + added(allowed)).softmax(-1), 0.1, True)
    return weights @ v


def from_activations(q, k, v, allowed):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed & (q.sum(-1) > 0).unsqueeze(-1))


def biased(q, k, v, allowed):
    bias = (q[:, :, :1, :1] + torch.arange(TOKENS)).expand(-1, -1, TOKENS, -1)
    return ((q @ k.mT + bias) + added(allowed)).softmax(-1) @ v


def softcapped(q, k, v, allowed):
    return (torch.tanh(q @ k.mT / 50) * 50 + added(allowed)).softmax(-1) @ v


def with_sinks(q, k, v, allowed):
    scores = torch.cat([q @ k.mT + added(allowed), q[..., :1]], -1)
    return (scores - scores.max(-1, True).values).softmax(-1)[..., :-1] @ v


def twice_masked(q, k, v, allowed):
    return (q @ k.mT + added(allowed) + added(allowed)).softmax(-1) @ v


def masked_then_scaled(q, k, v, allowed):
    return ((q @ k.mT + added(allowed, LEAST)) * 0.1).softmax(-1) @ v


def added_zero_times(q, k, v, allowed):
    return torch.add(q @ k.mT, added(allowed, LEAST), alpha=0).softmax(-1) @ v


def mildly_filled(q, k, v, allowed):
    return (q @ k.mT).masked_fill(~allowed, -1e4).softmax(-1) @ v


def weights_changed(q, k, v, allowed):
    return ((q @ k.mT + added(allowed)).softmax(-1) + 0.001) @ v


def weights_used(q, k, v, allowed):
    weights = (q @ k.mT + added(allowed)).softmax(-1)
    return weights @ v + weights.mean()


def scores_used(q, k, v, allowed):
    scores = q @ k.mT
    return (scores + added(allowed)).softmax(-1) @ v + scores.mean()


def query_written(q, k, v, allowed):
    q, k = q.detach().clone(), k.detach()
    scores = q @ k.mT + added(allowed)
    q.zero_()
    return scores.softmax(-1) @ v


def in_three_dimensions(q, k, v, allowed):
    return F.scaled_dot_product_attention(q[0], k[0], v[0], attn_mask=allowed[0])[None]


def few_tokens(q, k, v, allowed):
    q, k, v = (tensor[:, :, :100] for tensor in (q, k, v))
    return F.pad(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[..., :100, :100]), (0, 0, 0, TOKENS - 100))


def under_vmap(q, k, v, allowed):
    return torch.vmap(lambda q: F.scaled_dot_product_attention(q, k, v, attn_mask=allowed))(q[None])[0]


REFUSED = {
    dropping: Reason.DROPOUT, dropping_written: Reason.DROPOUT,
    from_activations: Reason.ACTIVATION, biased: Reason.ACTIVATION,
    softcapped: Reason.SCORES_CHANGED, with_sinks: Reason.SCORES_CHANGED, twice_masked: Reason.SCORES_CHANGED,
    masked_then_scaled: Reason.SCORES_CHANGED, added_zero_times: Reason.SCORES_CHANGED,
    mildly_filled: Reason.SCORES_CHANGED,
    weights_changed: Reason.SCORES_CHANGED, weights_used: Reason.WEIGHTS_USED, scores_used: Reason.WEIGHTS_USED,
    query_written: Reason.WRITTEN_BY_LAYER, in_three_dimensions: Reason.NOT_BY_HEADS, few_tokens: Reason.SMALL,
    under_vmap: Reason.HIGHER_ORDER,
}  # fmt: skip


@pytest.mark.parametrize("attend", REFUSED, ids=lambda attend: attend.__name__)
def test_refused(attend):
    model, inputs = Layers(attend), batch([100, 188])
    with fxpasses.inspect.record() as record:
        compiled(model)(*inputs)
    [report] = reports_of(record, NAME)
    assert {refusal.reason for refusal in report.refusals} == {REFUSED[attend]} and len(report.refusals) == 2
    assert all(refusal.where for refusal in report.refusals) and not report.changed
    if REFUSED[attend] is not Reason.DROPOUT:
        torch._dynamo.reset()
        assert_same(model, [inputs])


def causal(q, k, v, allowed):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def unmasked(q, k, v, allowed):
    return (q @ k.mT).softmax(-1) @ v


def a_router(q, k, v, allowed):
    return q * (q @ torch.ones(8, 4)).softmax(-1)[..., :1]


@pytest.mark.parametrize("attend", [causal, unmasked, a_router])
def test_what_is_no_masked_attention_is_not_spoken_of(attend):
    with fxpasses.inspect.record() as record:
        compiled(Layers(attend))(*batch([100, 188]))
    [report] = reports_of(record, NAME)
    assert not report.changed and not report.refusals


def test_a_policy_of_the_user_keeps_its_checkpoint():
    policy = functools.partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts,
        [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default],
    )
    model = Layers(keywords)

    def program(x, lengths):
        return checkpoint(model.layer, x, lengths, 0, use_reentrant=False, context_fn=policy)

    with fxpasses.inspect.record() as record:
        compiled(program, "aot_eager")(*batch([100, 188]))
    assert [refusal.reason for refusal in reports_of(record, NAME)[0].refusals] == [Reason.SELECTIVE]


@pytest.mark.parametrize("options", [{"attention": "dense"}, {"passes": ["sparsify_attention"]}])
def test_nothing_without_the_option_or_a_prologue(options):
    with fxpasses.inspect.record() as record:
        compiled(Layers(keywords), **options)(*batch([100, 188]))
    assert not any(report.changed for report in reports_of(record, NAME))


# Numbers


def everything(lengths):
    return torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool) & (lengths.sum() > 0)


def holes(lengths):
    """Rows of no structure: there is nothing to be saved."""
    row, column = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    return (((row * 7 + column * 3 + lengths[0]) % 5 > 0) | (column == 0) | (column == TOKENS - 1))[None, None]


@pytest.mark.parametrize("mask", [everything, holes])
@pytest.mark.parametrize("attend", [keywords, least_values, repeats(keywords, expanded_heads), grouped])
def test_a_plan_that_saves_nothing_runs_what_ran_before(attend, mask):
    groups = 2 if attend not in (keywords, least_values) else 1
    assert check(Layers(attend, mask, groups=groups), [batch([100, 188])], "aot_eager", tolerance=0).changed


def padded_left(lengths):
    """The first tokens are padding: their rows see nothing."""
    return documents(lengths) & (torch.arange(TOKENS) >= lengths[0])


@pytest.mark.parametrize("attend", [keywords, additive, least_values, *WRITTEN], ids=lambda attend: attend.__name__)
def test_rows_that_see_nothing_give_what_they_gave(attend):
    """Zeros, NaN, or the mean of all values: each as in eager mode, and so are the gradients.

    One layer: where a key is NaN, eager mode makes NaN of all rows, also of those that do not see it.
    """
    model = Layers(attend, padded_left)

    def program(x, lengths):
        return model.layer(x, lengths, 0)

    check(program, [batch([100, 188]), batch([20, 268])])


@pytest.mark.parametrize(
    "attend", [at_sign, hidden_first, query_scaled, least_filled], ids=lambda attend: attend.__name__
)
def test_rows_that_see_nothing_and_are_not_used(attend):
    """The gradients of query, key and value, each by itself: those of the values are NaN all the same."""

    def program(q, k, v, lengths):
        allowed = padded_left(lengths)
        return torch.where(allowed.any(-1, keepdim=True), attend(q, k, v, allowed), 0.0)

    operands = [torch.randn(1, HEADS, TOKENS, 8, requires_grad=True) for _ in range(3)]
    check(program, [(*operands, batch(lengths)[1]) for lengths in ([100, 188], [20, 268], [0, 288])])


@pytest.mark.parametrize("attend", [keywords, hugging_face, at_sign], ids=lambda attend: attend.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(attend, dtype):
    """Attention that is written out in bfloat16 rounds its weights, and ours does not."""
    model = Layers(functools.partial(in_dtype, attend, dtype))
    check(model, [batch([100, 188]), batch([30, 20, 40, 100, 98])], tolerance=2e-2 if dtype is torch.bfloat16 else 2e-6)


def in_dtype(attend, dtype, q, k, v, allowed):
    return attend(*(tensor.to(dtype) for tensor in (q, k, v)), allowed).float()


@pytest.mark.parametrize("attend", [keywords, hugging_face, at_sign], ids=lambda attend: attend.__name__)
@pytest.mark.parametrize("mask", [documents, padded_left])
def test_autocast(attend, mask):
    def autocast(q, k, v, allowed):
        with torch.autocast("cpu", torch.bfloat16):
            return attend(q, k, v, allowed)

    model = Layers(autocast, mask)

    def program(x, lengths):
        return model.layer(x, lengths, 0)

    report = check(program, [batch([100, 188])], "aot_eager", tolerance=3e-2)
    assert report.figures == {"attentions": 1, "masks": 1}


def test_dtypes_that_only_autocast_makes_one_in_a_checkpoint():
    """The mode around a checkpoint is that of its body; rotary embeddings leave operands of different dtypes."""
    model = Layers(lambda q, k, v, allowed: keywords(q.float(), k.bfloat16(), v, allowed), documents)

    def program(x, lengths):
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(model.layer, x, lengths, 0, use_reentrant=False)

    report = check(program, [batch([100, 188])], "aot_eager", tolerance=3e-2)
    assert report.figures == {"attentions": 1, "masks": 1}


def test_dynamic_sizes():
    """One graph for any number of tokens, and plans that fit."""

    def program(x, document):
        tokens = document.shape[0]
        q, k, v = x.view(1, tokens, 3, HEADS, 8).permute(2, 0, 3, 1, 4)
        allowed = (document[:, None] == document[None]) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
        return keywords(q, k, v, allowed) + hugging_face(q, k, v, allowed)

    batches = [(torch.randn(1, t, 48, requires_grad=True), torch.arange(t) // n) for t, n in ((300, 30), (513, 100))]
    with fxpasses.inspect.record() as record:
        program_compiled = compiled(program, "aot_eager")
        for x, document in batches:
            torch._dynamo.maybe_mark_dynamic(x, 1)
            torch._dynamo.maybe_mark_dynamic(document, 0)
            assert_close(results(program_compiled, (x, document)), results(program, (x, document)))
    assert [report.figures for report in reports_of(record, NAME)][-1] == {"attentions": 2, "masks": 2}
    assert len(record.graphs) <= 2


def test_a_mask_is_given_as_an_input():
    def program(q, k, v, allowed):
        return keywords(q, k, v, allowed) + hugging_face(q, k, v, allowed)

    operands = [torch.randn(2, HEADS, TOKENS, 8, requires_grad=True) for _ in range(3)]
    masks = [documents(torch.tensor(lengths)).expand(2, -1, -1, -1).contiguous() for lengths in LENGTHS]
    assert check(program, [(*operands, mask) for mask in masks]).figures["attentions"] == 2


def test_without_gradients():
    program, inputs = Layers(keywords), batch([100, 188])
    with torch.no_grad():
        found, expected = compiled(program, "aot_eager")(*inputs), program(*inputs)
    torch.testing.assert_close(found, expected)


def test_verification_allows_for_rounding_and_no_more(monkeypatch):
    model = Layers(hugging_face)
    check(model, [batch([100, 188])], verify=True)
    torch._dynamo.reset()
    monkeypatch.setattr("fxpasses.attention.unfused._scaled", _scaled_twice)
    with pytest.raises(Exception, match="its result differs from its input"):
        compiled(model, verify=True)(*batch([100, 188]))


def _scaled_twice(node, name):
    return (node.args[0], 2 * node.args[1]) if name == "mul" else None
