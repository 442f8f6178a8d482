"""Operations of grouped products: two for each row and element of its weight, whatever operator computes them."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses.experts.runtime.grouped_linear import grouped_mm_covering, grouped_mm_list
from fxpasses.graph.flops import flops_of

ROWS, DEPTH, WIDTH, EXPERTS = 12, 16, 32, 3


def sum_of_flops(function, *inputs):
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    vals = {node: node.meta.get("val") for node in graph.nodes}
    return sum(flops_of(node, v if isinstance(v, (list, tuple)) else [v]) or 0 for node, v in vals.items())


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_forward_and_backward_count_each_row_three_times(listed, bfloat16):
    def step(rows, weights, offsets):
        if bfloat16 and not listed:
            out = torch.nn.functional.grouped_mm(rows, weights, offs=offsets)
        elif listed:
            out = grouped_mm_list(rows, list(weights.unbind(0)), offsets)
        else:
            out = grouped_mm_covering(rows, weights, offsets)
        return torch.autograd.grad(out.sin().sum(), (rows, weights))

    dtype = torch.bfloat16 if bfloat16 else torch.float32
    rows = torch.randn(ROWS, DEPTH, dtype=dtype, requires_grad=True)
    weights = torch.randn(EXPERTS, DEPTH, WIDTH, dtype=dtype, requires_grad=True)
    offsets = torch.tensor([4, 8, ROWS], dtype=torch.int32)
    assert sum_of_flops(step, rows, weights, offsets) == 3 * 2 * ROWS * DEPTH * WIDTH
