"""The bytes that an operator allocates while it runs, besides its results: attention and products on the CPU.

PyTorch's flash kernel for the CPU has buffers for a block of scores in each thread (ATen's `FlashAttentionKernel.cpp`),
and backward a copy of a gradient. Attention by a plan calls it tile by tile, and adds up a tile's gradients.

Products of bfloat16, as under autocast, are oneDNN's, whose buffers have a block of the result in float32 and blocks
of operands in another order. The sizes are those measured with oneDNN 3, AVX-512 and one thread, at 32 to 8,192 rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch.fx import Node

from fxpasses.attention.runtime.plan import words_of_bits
from fxpasses.graph.calls import operator_of
from fxpasses.graph.symbols import batch_sizes_of, is_unbacked

_COLUMNS = 512  # of a block of scores
_ROWS = ((768, 256), (192, 64), (0, 32))  # of a block, by the least number of queries
_BAND, _SQUARE = 256, 2048  # rows of a tile, and from how many on it may be a causal square, which is whole


PRODUCTS = ("mm", "addmm", "bias_addmm")  # a compiler may write one as another
_PRODUCT_ROWS, _PRODUCT_COLUMNS = 256, 64  # of a block of the result


def workspace_of(node: Node) -> int:
    """0 for other operators, and where sizes are not known."""
    name = operator_of(node)
    if name in PRODUCTS and node.op == "call_function":
        return _of_product(*map(_example, node.args[-2:]))
    if name not in _OPERATORS:
        return 0
    is_backward, by_plan = _OPERATORS[name]
    query, key = [_example(argument) for argument in node.args[is_backward : is_backward + 2]]
    if query is None or key is None or query.device.type != "cpu":
        return 0
    q, k = batch_sizes_of(query), batch_sizes_of(key)
    if q is None or k is None or len(q) != 4 or len(k) != 4:
        return 0
    return _bytes(q, k, query.dtype, is_backward, by_plan)


def masks_of(nodes: Iterable[Node]) -> int:
    """The bytes of the masks of partial tiles that a batch's plan keeps for all layers (`attention/runtime/masks.py`).

    Only the batch's documents say which there are. This is the largest that causal documents have, a band's. Rows that
    are computed for their batch alone are of many short documents, often without partial tiles, and count nothing.
    """
    largest: dict[object, int] = {}
    for node, query, rows, columns in _attentions_by_plan(nodes):
        if not is_unbacked(query):
            item = 8 if query.dtype == torch.float64 else 4
            largest[node.args[4]] = min(rows, _BAND) * min(columns, _SQUARE) * item
    return sum(largest.values())


def reserved_of(nodes: Iterable[Node]) -> dict[Node, int]:
    """By plan of a batch that a graph is given: the bytes in it that nothing writes, and that so take no memory.

    Those are the bits of irregular rows (`attention/runtime/plan.py`): documents, windows and padding have none.
    """
    found = {}
    for node, _, rows, columns in _attentions_by_plan(nodes):
        plan = _example(node.args[4])
        words = batch_sizes_of(plan) if plan is not None and node.args[3] is None else None
        if plan is not None and words is not None:
            found[cast(Node, node.args[4])] = words_of_bits(words[0], rows, columns) * plan.itemsize
    return found


def _attentions_by_plan(nodes: Iterable[Node]) -> Iterator[tuple[Node, torch.Tensor, int, int]]:
    """Calls on the CPU whose sizes are known, with the query, and the rows and columns of the mask."""
    for node in nodes:
        if operator_of(node) != "fxpasses::sparse_attention_forward":
            continue
        query, key = map(_example, node.args[:2])
        if query is None or key is None or query.device.type != "cpu":
            continue
        q, k = batch_sizes_of(query), batch_sizes_of(key)
        if q is not None and k is not None:
            yield node, query, q[2], k[2]


def _of_product(one: torch.Tensor | None, other: torch.Tensor | None) -> int:
    if one is None or other is None or one.device.type != "cpu" or one.dtype != torch.bfloat16 or not _has_onednn():
        return 0
    left, right = batch_sizes_of(one), batch_sizes_of(other)
    if left is None or right is None:
        return 0
    rows, inner = min(left[0], _PRODUCT_ROWS), left[1]
    if inner > 512:
        inner = 512 if inner <= 1024 else 1024
    found = rows * min(right[1], _PRODUCT_COLUMNS) * 4 + _PRODUCT_COLUMNS * inner * 2 + 1024
    is_transposed = len(one.shape) == 2 and one.stride()[1] != 1
    return torch.get_num_threads() * (found + (rows * inner * 2 if is_transposed else 0))


@functools.cache
def _has_onednn() -> bool:
    """Whether it has products of bfloat16 on this CPU. Private name, checked on torch 2.13."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(torch.backends.mkldnn.is_available() and supported is not None and supported())


def _bytes(q: Sequence[int], k: Sequence[int], dtype: torch.dtype, is_backward: bool, by_plan: bool) -> int:
    """q, k: [B, H, T, D], where keys may have fewer heads."""
    accumulator = 8 if dtype == torch.float64 else 4
    queries = min(q[2], _BAND) if by_plan and q[2] < _SQUARE else q[2]
    rows = next(size for least, size in _ROWS if queries >= least)
    columns = min(_COLUMNS, k[2])
    block = rows * columns * (2 if is_backward else 1) + (0 if is_backward else rows * (q[3] + 2))
    found = torch.get_num_threads() * block * accumulator
    if dtype in (torch.bfloat16, torch.float16):
        found += found // 2  # scores in the operands' dtype
    if by_plan:
        own, others = q[0] * q[1] * min(q[2], _BAND) * q[3], k[0] * k[1] * k[2] * k[3]
        return found + (2 * own + 2 * others if is_backward else own) * dtype.itemsize
    return found + (q[0] * q[1] * q[2] * q[3] * dtype.itemsize if is_backward else 0)


def _example(argument: object) -> torch.Tensor | None:
    found = argument.meta.get("val") if isinstance(argument, Node) else None
    return found if isinstance(found, torch.Tensor) else None


# Whether it is backward, whose first argument is a gradient, and whether it is by a plan.
_OPERATORS = {
    "_scaled_dot_product_flash_attention_for_cpu": (False, False),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (True, False),
    "fxpasses::sparse_attention_forward": (False, True),
    "fxpasses::sparse_attention_backward": (True, True),
}
