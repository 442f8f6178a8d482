"""What attention by a plan does on CUDA devices, on the CPU: block masks, and FlexAttention's own reference."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask

from fxpasses.attention.runtime import cuda, operators
from fxpasses.attention.runtime.flash import Attention
from fxpasses.rows.operators import _pairs, _pairs_by_sequence, live_rows
from tests.attention.mask_patterns import attention_masks, causal, documents, to_additive, window

SOME = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@SOME
@given(attention_masks(at_most=300))
def test_block_masks_of_devices(mask):
    """Blocks that are partly allowed, and full ones."""
    size = cuda.BLOCK
    rows, columns = mask.shape[-2:]
    padded = F.pad(mask, (0, -columns % size, 0, -rows % size))
    split = padded.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    for given_mask in (mask, to_additive(mask, float("-inf"))):
        plan = cuda.plan_of(given_mask)
        block_mask = cuda.block_mask(plan, rows, columns, lambda b, h, q, k: q >= 0)
        assert torch.equal(block_mask.to_dense().bool(), split.any(-1).any(-2))
        full = split.all(-1).all(-2)
        assert torch.equal(block_mask.full_kv_num_blocks.long(), full.sum(-1))
        assert torch.equal(block_mask.full_q_num_blocks.long(), full.sum(-2))
        from_rows = BlockMask.from_kv_blocks(*block_mask.as_tuple()[2:6], size, seq_lengths=(rows, columns))
        tables = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
        assert all(torch.equal(getattr(block_mask, table), getattr(from_rows, table)) for table in tables)
        assert plan.shape[-1] == cuda.table_size(rows, columns)
    in_blocks = cuda.plan_in_blocks(lambda start, stop: mask[:, :, start:stop], tuple(mask.shape))
    assert torch.equal(in_blocks[..., : plan.shape[-1]], plan)


@pytest.mark.parametrize("sizes", [(3, 2), (1, 1), (1, 3), (3, 1)], ids=str)
def test_pairs_of_rows_on_a_device_are_those_on_the_host(sizes):
    """Of masks for each sequence and head, and for all; sequences without a row, and padding."""
    mask = torch.rand(*sizes, 40, 56) < 0.5
    queries, keys = (live_rows((torch.rand(3, tokens) < 0.4).index_fill(0, torch.tensor(1), False).view(-1), 1.0, 16)
                     for tokens in (40, 56))  # fmt: skip
    on_device, on_host = _pairs(mask, queries, keys), _pairs_by_sequence(mask, queries, keys, 3)
    for start, stop in ((0, len(queries)), (5, 11), (len(queries) - 3, len(queries))):
        assert torch.equal(on_device(start, stop), on_host(start, stop))


@pytest.mark.parametrize("form", ["bool", "least", "values", "blocks"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)], ids=str)
def test_flex_attention_follows_the_plan(form, shape):
    """What a CUDA device would run, traced and run on the CPU by FlexAttention's own reference."""
    drawn = [documents([60, 100]), window(160, 30), documents([100, 60], with_causal=False), causal(160)[None, None]]
    mask = torch.cat([drawn[i % 4] for i in range(shape[0] * shape[1])]).view(*shape, 160, 160)
    mask[:, :, 140] = False
    said = {
        "bool": mask,
        "blocks": mask,
        "least": to_additive(mask, torch.finfo(torch.float32).min),
        "values": to_additive(mask, float("-inf")) + torch.rand(160),
    }[form]
    leaves = [torch.randn(2, heads, 160, 16, requires_grad=True) for heads in (4, 2, 2)]
    grad = torch.randn(2, 4, 160, 16)
    if form == "blocks":
        plan = cuda.plan_in_blocks(lambda start, stop: mask[:, :, start:stop], tuple(mask.shape))
    else:
        plan = cuda.plan_of(said)
    if form == "least":
        grad[:, :, 140] = 0  # kernels differ in the gradients of a row that finite values rule out
    given_masks = [] if form == "blocks" else [said]

    def attend(q, k, v, plan, *masks):
        return cuda.attend(Attention(q, k, v, masks[0] if masks else None, None), plan)

    traced = aot_function(attend, nop)
    for run in (attend, traced):
        out = run(*leaves, plan, *given_masks)
        expected = F.scaled_dot_product_attention(*leaves, said, enable_gqa=True)
        torch.testing.assert_close(out, expected)
        gradients = torch.autograd.grad(out, leaves, grad)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves, grad))


def test_where_a_graph_for_cuda_is_traced_the_operator_becomes_flex_attention(monkeypatch):
    """On fake tensors, whose device need not be there."""
    attended = []
    monkeypatch.setattr(cuda, "attend", lambda attention, plan: attended.append(plan) or attention.query)
    with FakeTensorMode():
        query, key, value = (torch.empty(2, heads, 160, 16, device="cuda") for heads in (4, 2, 2))
        mask = torch.empty(1, 1, 160, 200, dtype=torch.bool, device="cuda")
        plan = torch.ops.fxpasses.attention_plan(mask)
        assert plan.device.type == "cuda" and plan.shape == (1, 1, cuda.table_size(160, 200))
        for given_mask in (mask, None):
            assert operators.sparse_attention(query, key, value, given_mask, plan) is query
    assert len(attended) == 2 and all(found is plan for found in attended)


def test_the_plan_of_a_mask_in_blocks_is_made_by_the_way_of_its_device():
    mask = documents([60, 100])
    rows = lambda start, stop: mask[:, :, start:stop]  # noqa: E731
    on_cuda = operators.plan_in_blocks(rows, tuple(mask.shape), device="cuda")
    assert torch.equal(on_cuda, cuda.plan_in_blocks(rows, tuple(mask.shape)))


@pytest.mark.parametrize(
    ("features", "dtype", "message"), [(8, torch.float32, "16 features"), (16, torch.float64, "no kernel")]
)
def test_what_has_no_kernel_is_refused(features, dtype, message):
    """So that it stays as it was, instead of failing when Inductor compiles it."""
    mask = causal(160)[None, None]
    query = torch.randn(1, 2, 160, features, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        cuda.attend(Attention(query, query, query, mask, None), cuda.plan_of(mask))
