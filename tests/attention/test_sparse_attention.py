"""Attention by a plan against `scaled_dot_product_attention`: outputs, gradients, and as an operator."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxpasses
from fxpasses.attention.runtime import cost, cpu, masks, operators
from fxpasses.attention.runtime import plan as plans
from tests.attention.mask_patterns import attention_masks, causal, documents, to_additive, window

SOME = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(SOME, max_examples=500)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
sparse_attention = torch.ops.fxpasses.sparse_attention


@pytest.fixture
def calls_are_free(monkeypatch):
    """At the sizes of these tests nearly every plan would be dense, or one tile."""
    monkeypatch.setattr(cost, "CALL", 50.0)
    monkeypatch.setattr(cost, "COLUMN", 0.0)


def operands(mask, dtype=torch.float32, batch=2, heads=4, kv_heads=2, depth=8, width=None):
    """Query, key, value and a gradient for the output, heads beside each other as models have them."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = mask.shape[-2:]
    sizes = [(rows, heads, depth), (columns, kv_heads, depth), (columns, kv_heads, width or depth)]
    made = [
        torch.randn(batch, *size, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)
        for size in [*sizes, (rows, heads, width or depth)]
    ]
    return [tensor.requires_grad_() for tensor in made[:3]], made[3]


def results(attend, leaves, grad):
    out = attend(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def sdpa(mask, scale=None):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

    return attend


def planned(mask, plan, scale=None):
    return lambda q, k, v: sparse_attention(q, k, v, mask, plan, scale)


def assert_as_exact_as_sdpa(actual, leaves, grad, mask):
    """Each result is as near to float64's as a few roundings of its dtype allow, and SDPA's own error besides."""
    dtype = leaves[0].dtype
    exact_mask = mask if mask.dtype == torch.bool else mask.double()
    exact = results(sdpa(exact_mask), [leaf.detach().double().requires_grad_() for leaf in leaves], grad.double())
    reference = results(sdpa(mask), leaves, grad)
    # A gradient of 0, of a row that sees one key, is the difference of numbers as large as the other gradients.
    gradients = max(true.abs().max().clamp(min=1.0) for true in exact[1:])
    for number, (ours, theirs, true) in enumerate(zip(actual, reference, exact, strict=True)):
        assert ours.dtype == dtype and ours.shape == true.shape
        size = gradients if number else true.abs().max().clamp(min=1.0)
        allowed = 8 * torch.finfo(dtype).eps * size + 2 * (theirs - true).abs().max()
        assert (ours - true).abs().max() <= allowed
        assert (ours - theirs).abs().max() <= 2 * allowed


def check_against_sdpa(mask, dtype, kind):
    leaves, grad = operands(mask, dtype)
    forms = {
        "bool": mask,
        "-inf": to_additive(mask, float("-inf"), dtype),
        "least": to_additive(mask, torch.finfo(dtype).min, dtype),
        "values": to_additive(mask, float("-inf"), dtype) + torch.arange(mask.shape[-1]).to(dtype) / 8,
        "blocks": mask,
    }
    said = forms[kind]
    if kind == "blocks":
        shape = tuple(mask.shape)
        plan = operators.plan_in_blocks(lambda start, stop: mask[:, :, start:stop], shape, 8)
        actual = results(planned(None, plan), leaves, grad)
    else:
        plan = operators.attention_plan(said, 8)
        actual = results(planned(said, plan), leaves, grad)
    if plans.read(plan).is_dense:
        assert all(map(torch.equal, actual, results(sdpa(said), leaves, grad)))
    elif kind == "least" and not mask.any(-1).all():
        # PyTorch's kernel gives the rows that finite values rule out other gradients than mathematics does.
        for ours, theirs in zip(actual, results(sdpa(said), leaves, grad), strict=True):
            tolerance = 16 * torch.finfo(dtype).eps * theirs.abs().max().clamp(min=1.0)
            assert (ours - theirs).abs().max() <= tolerance
    else:
        assert_as_exact_as_sdpa(actual, leaves, grad, said)


# Against SDPA

KINDS = ["bool", "-inf", "least", "values", "blocks"]


@SOME
@given(attention_masks(heads=4), st.sampled_from(DTYPES), st.sampled_from(KINDS))
def test_is_sdpa_for_any_mask(calls_are_free, mask, dtype, kind):
    check_against_sdpa(mask, dtype, kind)


@pytest.mark.slow
@MANY
@given(attention_masks(heads=4), st.sampled_from(DTYPES), st.sampled_from(KINDS))
def test_is_sdpa_for_500_masks(calls_are_free, mask, dtype, kind):
    check_against_sdpa(mask, dtype, kind)


@pytest.mark.slow
@MANY
@given(attention_masks(at_most=12, heads=4), st.booleans())
def test_gradients_of_500_masks(calls_are_free, mask, additive):
    check_gradients(to_additive(mask, float("-inf"), torch.float64) if additive else mask)


@settings(SOME, max_examples=15)
@given(attention_masks(at_most=12, heads=4), st.booleans())
def test_gradients(calls_are_free, mask, additive):
    check_gradients(to_additive(mask, float("-inf"), torch.float64) if additive else mask)


def check_gradients(mask):
    leaves, _ = operands(mask, torch.float64, depth=3)
    plan = operators.attention_plan(mask, 8)
    assert torch.autograd.gradcheck(planned(mask, plan), leaves, fast_mode=True)


@pytest.mark.all_cases
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(
    "mask", [documents([300, 20, 200]), window(600, 100), causal(512)[None, None]], ids=["documents", "window", "one"]
)
def test_long_enough_for_tiles(mask, dtype):
    plan = operators.attention_plan(mask, 8)
    assert len(plans.read(plan).tiles) > 1
    leaves, grad = operands(mask, dtype, batch=1, heads=2, kv_heads=2, depth=16)
    assert_as_exact_as_sdpa(results(planned(mask, plan), leaves, grad), leaves, grad, mask)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_with_masks_of_their_own_share_keys(calls_are_free, kv_heads):
    mask = torch.cat([window(80, width) for width in (5, 40, 40, 40)], dim=1)
    leaves, grad = operands(mask, kv_heads=kv_heads)
    plan = operators.attention_plan(mask, 1)
    assert {tile[2:4] for tile in plans.read(plan).tiles} == {(0, 1), (1, 4)}
    assert_as_exact_as_sdpa(results(planned(mask, plan), leaves, grad), leaves, grad, mask)
    values = to_additive(mask, float("-inf")) + torch.rand(mask.shape)
    plan = operators.attention_plan(values, 1)
    assert_as_exact_as_sdpa(results(planned(values, plan), leaves, grad), leaves, grad, values)


@pytest.mark.parametrize("width", [3, 13])
@pytest.mark.parametrize("dense", [False, True])
def test_values_of_another_width_than_keys(calls_are_free, width, dense):
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool) if dense else documents([20, 44])
    leaves, grad = operands(mask, width=width)
    plan = operators.attention_plan(mask, 8)
    assert plans.read(plan).is_dense == dense
    assert_as_exact_as_sdpa(results(planned(mask, plan), leaves, grad), leaves, grad, mask)


@pytest.mark.parametrize("shape", [(40, 40), (4, 40, 40), (1, 4, 40, 40), (2, 1, 40, 40), (1, 1, 1, 40), (1, 40)])
def test_masks_are_broadcast_as_sdpa_does(calls_are_free, shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[..., 3:20] = True
    leaves, grad = operands(documents([40]))
    rows = 40 if shape[-2] == 1 else None
    for said in (mask, to_additive(mask, float("-inf")), to_additive(mask, float("-inf")) + torch.rand(shape)):
        plan = operators.attention_plan(said, 8, rows)
        assert not plans.read(plan).is_dense
        assert_as_exact_as_sdpa(results(planned(said, plan), leaves, grad), leaves, grad, said)


@pytest.mark.all_cases
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("least", [None, "-inf", "min"])
def test_rows_that_see_nothing(calls_are_free, dtype, least):
    """0 where they are bool or -inf; weights from the scores where finite values rule out: what PyTorch gives."""
    mask = window(128, 30)
    mask[..., :20] = False  # padding on the left
    mask[..., 50, :] = False
    value = {None: None, "-inf": float("-inf"), "min": torch.finfo(dtype).min}[least]
    said = mask if least is None else to_additive(mask, value, dtype)
    leaves, grad = operands(mask, dtype)
    plan = operators.attention_plan(said, 8)
    assert not plans.read(plan).is_dense
    actual, expected = results(planned(said, plan), leaves, grad), results(sdpa(said), leaves, grad)
    if least != "min":
        assert not actual[0][:, :, 50].any() and not actual[1][:, :, :20].any()
    for ours, theirs in zip(actual, expected, strict=True):
        tolerance = 16 * torch.finfo(dtype).eps * theirs.abs().max().clamp(min=1.0)
        assert (ours - theirs).abs().max() <= tolerance


def test_scale_and_strides(calls_are_free):
    mask = documents([30, 50])
    plan = operators.attention_plan(mask, 8)
    leaves = [torch.randn(2, 3, 8, 80).transpose(2, 3).requires_grad_() for _ in range(3)]  # strides within a head
    for reduce in (torch.sum, lambda out: out[:, :, ::2].sum(), lambda out: out.mT.flatten(2).square().sum()):
        actual = torch.autograd.grad(reduce(sparse_attention(*leaves, mask, plan, 0.3)), leaves)
        expected = torch.autograd.grad(reduce(sdpa(mask, 0.3)(*leaves)), leaves)
        torch.testing.assert_close(actual, expected)


# Dense plans


@pytest.mark.all_cases
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("backend", [None, SDPBackend.MATH])
@pytest.mark.parametrize("shape", [(1, 1, 48, 48), (48, 48), (4, 48, 48)], ids=str)
def test_a_dense_plan_is_sdpa_bit_for_bit(dtype, additive, backend, shape):
    mask = causal(48).expand(shape)
    said = to_additive(mask, float("-inf"), dtype) if additive else mask
    plan = operators.attention_plan(said, 8)
    assert plans.read(plan).is_dense
    leaves, grad = operands(mask, dtype)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if backend is None else backend):
        assert all(map(torch.equal, results(planned(said, plan), leaves, grad), results(sdpa(said), leaves, grad)))


def test_a_dense_plan_has_one_mask_for_all_layers():
    mask = causal(48)[None, None]
    plan = operators.attention_plan(mask, 8)
    leaves, _ = operands(mask)
    for _ in range(3):
        sparse_attention(*leaves, mask, plan)
    assert [kept.shape for kept in masks.prepared(plan).kept.values()] == [mask.shape]


# As an operator


def calls():
    mask = documents([40, 56])
    values = to_additive(mask, float("-inf")) + torch.rand(96)
    leaves, _ = operands(mask)
    yield (*leaves, values[0, 0], operators.attention_plan(values[0, 0], 8)), {}
    yield (*leaves, None, operators.plan_in_blocks(lambda start, stop: mask[:, :, start:stop], (1, 1, 96, 96))), {}
    dense = causal(24)[None, None]
    leaves, _ = operands(dense, width=5)
    yield (*leaves, dense, operators.attention_plan(dense, 8)), {"scale": 0.2}


@pytest.mark.parametrize("number", range(3), ids=["values", "blocks", "dense"])
def test_opcheck(calls_are_free, number):
    args, kwargs = list(calls())[number]
    torch.library.opcheck(torch.ops.fxpasses.sparse_attention_forward.default, args, kwargs)
    query, key, value, mask, plan = (None if arg is None else arg.detach() for arg in args)
    out, logsumexp = torch.ops.fxpasses.sparse_attention_forward(query, key, value, mask, plan, **kwargs)
    backward_args = (out, query, key, value, mask, plan, out, logsumexp)
    torch.library.opcheck(torch.ops.fxpasses.sparse_attention_backward.default, backward_args, kwargs)
    if mask is not None:
        torch.library.opcheck(torch.ops.fxpasses.attention_plan.default, (mask, 8))


def test_opcheck_of_what_a_graph_calls(calls_are_free):
    args, kwargs = next(calls())
    torch.library.opcheck(sparse_attention.default, args, kwargs)


def test_another_batch_compiles_nothing(calls_are_free):
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=graphs, fullgraph=True)
    def layers(q, k, v, mask):
        plan = torch.ops.fxpasses.attention_plan(mask, 8)
        for _ in range(2):
            q = sparse_attention(q, k, v, mask, plan).sin()
        return q

    def eager(q, k, v, mask):
        for _ in range(2):
            q = sdpa(mask)(q, k, v).sin()
        return q

    for mask in (documents([40, 56]), documents([10] * 9 + [6]), window(96, 20), torch.ones(1, 1, 96, 96).bool()):
        leaves, grad = operands(mask)
        actual = results(lambda *leaves, mask=mask: layers(*leaves, mask), leaves, grad)
        expected = results(lambda *leaves, mask=mask: eager(*leaves, mask), leaves, grad)
        torch.testing.assert_close(actual, expected)
    assert graphs.frame_count == 1


def test_sizes_may_be_symbols(calls_are_free):
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=graphs, fullgraph=True, dynamic=True)
    def layer(q, k, v, mask):
        return sparse_attention(q, k, v, mask, torch.ops.fxpasses.attention_plan(mask, 8))

    for lengths in ([40, 56], [33, 20, 20], [50, 70]):
        mask = documents(lengths)
        leaves, grad = operands(mask)
        actual = results(lambda *leaves, mask=mask: layer(*leaves, mask), leaves, grad)
        torch.testing.assert_close(actual, results(sdpa(mask), leaves, grad))
    assert graphs.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["bool", "least", "values"])
def test_autocast_does_what_it_does_to_sdpa(calls_are_free, dtype, form):
    mask = documents([30, 44, 54])
    mask[..., 7, :] = False
    forms = {"bool": mask, "least": to_additive(mask, torch.finfo(torch.float32).min)}
    forms["values"] = to_additive(mask, float("-inf")) + torch.rand(mask.shape)
    said = forms[form]
    plan = operators.attention_plan(said, 8)
    assert not plans.read(plan).is_dense
    leaves, grad = operands(mask)
    with torch.autocast("cpu", dtype):
        actual, expected = (results(f(said), leaves, grad.to(dtype)) for f in (lambda m: planned(m, plan), sdpa))
    assert [one.dtype for one in actual] == [one.dtype for one in expected] == [dtype] + [torch.float32] * 3
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
    double = [leaf.detach().double() for leaf in leaves]
    with torch.autocast("cpu", dtype):
        assert sparse_attention(*double, said, plan).dtype == torch.float64


def test_a_checkpoint_recomputes_it(calls_are_free):
    mask = documents([40, 56])
    plan = operators.attention_plan(mask, 8)
    leaves, grad = operands(mask)

    def attend(q, k, v):
        return torch.utils.checkpoint.checkpoint(planned(mask, plan), q, k, v, use_reentrant=False)

    fxpasses.attention_stats(reset=True)
    torch.testing.assert_close(results(attend, leaves, grad), results(sdpa(mask), leaves, grad))
    assert fxpasses.attention_stats().calls == 2
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(results(compiled, leaves, grad), results(sdpa(mask), leaves, grad))


def test_the_masks_of_tiles_are_shared_by_layers_and_backward(calls_are_free, monkeypatch):
    made = []
    additive = masks.additive
    monkeypatch.setattr(masks, "additive", lambda mask, dtype: made.append(mask.shape) or additive(mask, dtype))
    mask = documents([40, 56])
    mask[..., 80, 60] = False  # a hole

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layers(q, k, v, mask, plan):
        for _ in range(3):
            q = sparse_attention(q, k, v, mask, plan)
        return q

    plan = operators.attention_plan(mask, 8)
    leaves, grad = operands(mask)
    results(lambda *leaves: layers(*leaves, mask, plan), leaves, grad)
    partial = [tile for tile in plans.read(plan).tiles if tile.kind != plans.Kind.FULL]
    assert 0 < len(made) <= len(partial)
    assert all(shape[-2] * shape[-1] < 96 * 96 for shape in made)


def test_without_gradients_and_in_inference_mode(calls_are_free):
    mask = documents([40, 56])
    plan = operators.attention_plan(mask, 8)
    leaves, _ = operands(mask)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            torch.testing.assert_close(sparse_attention(*leaves, mask, plan), sdpa(mask)(*leaves))
    with torch.inference_mode():
        own = operators.attention_plan(mask, 8)
        torch.testing.assert_close(sparse_attention(*leaves, mask, own), sdpa(mask)(*leaves))


def test_only_what_needs_a_gradient_gets_one(calls_are_free):
    mask = documents([40, 56])
    plan = operators.attention_plan(mask, 8)
    for needs in itertools.product([False, True], repeat=3):
        if any(needs):
            leaves = [leaf.detach().requires_grad_(need) for leaf, need in zip(operands(mask)[0], needs, strict=True)]
            sparse_attention(*leaves, mask, plan).sum().backward()
            assert [leaf.grad is not None for leaf in leaves] == list(needs)


def test_threads_and_repetition_change_nothing():
    mask = documents([300, 212])
    plan = operators.attention_plan(mask, 8)
    leaves, grad = operands(mask)
    first = results(planned(mask, plan), leaves, grad)
    assert all(map(torch.equal, first, results(planned(mask, plan), leaves, grad)))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.testing.assert_close(results(planned(mask, plan), leaves, grad), first)
    finally:
        torch.set_num_threads(threads)


def test_what_does_not_fit_raises(calls_are_free):
    mask = documents([40, 56])
    plan = operators.attention_plan(mask, 8)
    leaves, _ = operands(documents([40, 50]))
    with pytest.raises(ValueError, match=r"the plan is for a mask \(1, 1, 96, 96\), but attention is \(2, 4, 90, 90\)"):
        sparse_attention(*leaves, mask, plan)
    leaves, _ = operands(mask)
    with pytest.raises(ValueError, match="gives its mask no gradient"):
        sparse_attention(*leaves, torch.zeros(96, 96, requires_grad=True), plan)
    mask[..., 80, 60] = False
    with pytest.raises(ValueError, match="this plan needs the mask that it was made from"):
        sparse_attention(*leaves, None, operators.attention_plan(mask, 8))
    with pytest.raises(ValueError, match="2 to 4 dimensions"):
        operators.attention_plan(torch.ones(4, dtype=torch.bool))


def test_stats_count_pairs(calls_are_free):
    mask = documents([40, 56], with_causal=False)
    leaves, _ = operands(mask)
    fxpasses.attention_stats(reset=True)
    sparse_attention(*leaves, mask, operators.attention_plan(mask, 8))
    everything = torch.ones_like(mask)
    sparse_attention(*leaves, everything, operators.attention_plan(everything, 8))
    taken = fxpasses.attention_stats(reset=True)
    heads = 2 * 4
    assert (taken.calls, taken.tiled) == (2, 1)
    assert (taken.pairs, taken.pairs_computed) == (2 * heads * 96**2, heads * (40**2 + 56**2 + 96**2))
    assert fxpasses.attention_stats().calls == 0


# No mask at all


def test_a_plan_in_blocks_never_holds_the_mask():
    """Documents of 512 in 16,384 tokens: no block that is asked for, and no memory that is written, is a mask."""
    tokens, largest = 16384, 0

    def rows(start, stop):
        nonlocal largest
        row, column = torch.arange(start, stop)[:, None], torch.arange(tokens)
        block = (row // 512 == column // 512) & (row >= column)
        largest = max(largest, block.numel())
        return block[None, None]

    before = resident()
    plan = operators.plan_in_blocks(rows, (1, 1, tokens, tokens), 8)
    assert largest <= 1 << 21
    assert resident() - before < tokens * tokens // 4
    leaves, grad = operands(torch.empty(1, 1, tokens, tokens, device="meta"), batch=1, heads=1, kv_heads=1)
    actual = results(planned(None, plan), leaves, grad)
    assert resident() - before < tokens * tokens // 2
    split = [leaf.detach().unflatten(2, (-1, 512)).squeeze(0).transpose(0, 1).requires_grad_() for leaf in leaves]
    out = F.scaled_dot_product_attention(*split, is_causal=True)
    torch.testing.assert_close(actual[0], out.transpose(0, 1).flatten(1, 2)[None])


def resident():
    """Bytes of this process that lie in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("amx", [False, True])
def test_low_precision_in_short_and_long_tiles(monkeypatch, amx):
    """Tiles under 768 rows are computed in float32, longer ones and all on AMX in their own dtype."""
    monkeypatch.setattr(cpu, "_has_amx", lambda: amx)
    mask = documents([300, 900, 20], with_causal=False)
    leaves, grad = operands(mask, torch.bfloat16, batch=1, heads=2, kv_heads=1)
    plan = operators.attention_plan(mask, 8)
    assert {t.stop - t.start for t in plans.read(plan).tiles} == {300, 900, 20}
    assert_as_exact_as_sdpa(results(planned(mask, plan), leaves, grad), leaves, grad, mask)


def test_a_long_causal_document_needs_no_mask(monkeypatch):
    monkeypatch.setattr(cost, "CAUSAL_ROWS", 200)
    mask = documents([20, 300, 20])
    mask[..., 150:200, :20] = False
    plan = operators.attention_plan(mask, 8)
    long = [tile for tile in plans.read(plan).tiles if tile.stop - tile.start > 100]
    assert [(tile.start, tile.stop, plans.Kind(tile.kind).name) for tile in long] == [(20, 320, "CAUSAL")]
    assert long[0].pairs(1, 1) == 300 * 301 // 2
    leaves, grad = operands(mask)
    assert_as_exact_as_sdpa(results(planned(mask, plan), leaves, grad), leaves, grad, mask)
