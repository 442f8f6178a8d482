"""The varlen attention of the examples against a masked reference over the whole packed batch."""

from __future__ import annotations

from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from examples import varlen_attention as varlen

WIDTH = 8


def packed(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def tensors(tokens: int, keys: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = (tokens, heads, WIDTH), (keys, kv_heads, WIDTH), (keys, kv_heads, WIDTH)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def reference(
    q: Tensor, k: Tensor, v: Tensor, queries: list[int], keys: list[int], causal: bool, window: Any, softcap: float
) -> Tensor:
    """One [tokens, keys] mask over the whole batch, written token by token from flash-attn's documentation."""
    seen = torch.zeros(sum(queries), sum(keys), dtype=torch.bool)
    for s, (rows, columns) in enumerate(zip(queries, keys, strict=True)):
        for i in range(rows):
            place = i + columns - rows
            for j in range(columns):
                left = window[0] < 0 or j >= place - window[0]
                right = j <= place if causal else window[1] < 0 or j <= place + window[1]
                seen[sum(queries[:s]) + i, sum(keys[:s]) + j] = left and right
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(0, 1) for t in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) / WIDTH**0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0)
    return (weights @ v).transpose(0, 1)


CASES = {
    "full": {},
    "causal": {"causal": True},
    "one sequence": {"queries": [9], "causal": True},
    "empty sequences": {"queries": [0, 4, 0, 5, 0], "causal": True},
    "more keys than queries": {"queries": [2, 1, 4], "keys": [5, 3, 4], "causal": True},
    "fewer keys than queries": {"queries": [5, 3, 4], "keys": [2, 1, 0], "causal": True},
    "window to the left": {"causal": True, "window": (2, 2)},
    "window to both sides": {"window": (1, 2)},
    "window to the right": {"window": (-1, 1)},
    "window of keys": {"queries": [2, 1, 4], "keys": [5, 3, 4], "window": (1, 0)},
    "grouped heads": {"heads": 6, "kv_heads": 2, "causal": True},
    "softcap": {"softcap": 2.0, "causal": True},
    "all at once": {"heads": 4, "kv_heads": 1, "softcap": 1.5, "causal": True, "window": (2, 0)},
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    given = {"queries": [3, 1, 5], "heads": 2, "kv_heads": 2, "causal": False, "window": (-1, -1), "softcap": 0.0}
    given |= request.param
    return given | {"keys": given.get("keys", given["queries"])}


def run(q: Tensor, k: Tensor, v: Tensor, case: dict[str, Any]) -> Tensor:
    bounds = packed(case["queries"]), packed(case["keys"]), max(case["queries"]), max(case["keys"])
    options = {"causal": case["causal"], "window_size": case["window"], "softcap": case["softcap"]}
    return varlen.flash_attn_varlen_func(q, k, v, *bounds, **options)


def test_forward_and_gradients_equal_the_masked_reference(case):
    inputs = tensors(sum(case["queries"]), sum(case["keys"]), case["heads"], case["kv_heads"])
    actual = run(*inputs, case)
    options = (case[name] for name in ("queries", "keys", "causal", "window", "softcap"))
    expected = reference(*inputs, *options)
    torch.testing.assert_close(actual, expected)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, inputs, upstream), torch.autograd.grad(expected, inputs, upstream)
    )


def test_gradients_equal_finite_differences(case):
    inputs = tensors(sum(case["queries"]), sum(case["keys"]), case["heads"], case["kv_heads"])
    assert torch.autograd.gradcheck(lambda *tensors: run(*tensors, case), inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_rounded_once(dtype):
    inputs = tensors(9, 9, 4, 2, dtype)
    bounds = (packed([4, 5]), packed([4, 5]), 5, 5)
    wide = [t.detach().to(torch.float32) for t in inputs]
    expected = varlen.flash_attn_varlen_func(*wide, *bounds, causal=True)
    assert torch.equal(varlen.flash_attn_varlen_func(*inputs, *bounds, causal=True), expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_does_not_change_what_it_computes_in(dtype):
    """Forward and backward; flash-attn has no autocast inside either, and compiled code runs the operator without."""
    inputs = tensors(9, 9, 4, 2, dtype)
    bounds = (packed([4, 5]), packed([4, 5]), 5, 5)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = varlen.flash_attn_varlen_func(*inputs, *bounds, causal=True)
            results.append([output, *torch.autograd.grad(output, inputs, torch.ones_like(output))])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_batch_without_packing():
    q, k, v = (torch.randn(2, tokens, 3, WIDTH, dtype=torch.float64) for tokens in (4, 6, 6))
    for causal in (False, True):
        mask = torch.ones(4, 6, dtype=torch.bool).tril(2) if causal else None
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)
        torch.testing.assert_close(varlen.flash_attn_func(q, k, v, causal=causal), expected)


def test_the_longest_length_may_be_a_tensor():
    inputs, bounds = tensors(5, 5, 2, 2), packed([2, 3])
    longest = bounds.diff().max()
    actual = varlen.flash_attn_varlen_func(*inputs, bounds, bounds, longest, longest)
    assert torch.equal(actual, varlen.flash_attn_varlen_func(*inputs, bounds, bounds, 3, 3))


def test_the_operator_follows_pytorchs_rules():
    inputs, bounds = tensors(7, 7, 4, 2, torch.float32), packed([4, 3])
    arguments = (*inputs, bounds, bounds, 4, 4, 0.3, True, [2, 2], 5.0)
    torch.library.opcheck(varlen.varlen_attention, arguments)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.ones(5, 8)}, r"must be \[tokens, heads, width\], but are query \[5, 8\]"),
        ({"q": torch.ones(5, 2, 4)}, "all the same width"),
        ({"v": torch.ones(5, 1, 8)}, "key and value must have the same heads"),
        ({"q": torch.ones(5, 3, 8)}, "must be a multiple of the key's"),
        ({"cu_seqlens_q": packed([2, 2])}, r"cu_seqlens_q is \[0, 2, 4\], not 0 and the ends of sequences of 5 tokens"),
        ({"cu_seqlens_k": torch.tensor([0, 6, 5])}, r"cu_seqlens_k is \[0, 6, 5\]"),
        ({"cu_seqlens_k": packed([2, 1, 2])}, "cu_seqlens_q has 2 sequences, and cu_seqlens_k has 3"),
        ({"max_seqlen_k": 2}, "max_seqlen_k is 2, but a sequence has 3 tokens"),
        ({"dropout_p": 0.1}, "dropout and attention sinks are not supported"),
        ({"s_aux": torch.ones(2)}, "dropout and attention sinks are not supported"),
    ],
)
def test_wrong_arguments(change, words):
    given = {name: torch.ones(5, 2, 8) for name in "qkv"}
    given |= {"cu_seqlens_q": packed([2, 3]), "cu_seqlens_k": packed([2, 3]), "max_seqlen_q": 3, "max_seqlen_k": 3}
    with pytest.raises(ValueError, match=words):
        varlen.flash_attn_varlen_func(**given | change)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", ["packed", "padded", "plain"])
def test_transformers_flash_path_ends_in_it(kind, window):
    """Loss and gradients of a model with grouped heads are those of its SDPA path, which builds a mask."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=window)
    tokens = torch.randint(64, (1, 16) if kind == "packed" else (2, 8))
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(7), torch.arange(9)])[None]
    elif kind == "padded":
        batch["attention_mask"] = (torch.arange(8) < torch.tensor([[8], [5]])).long()
        batch["labels"] = tokens.masked_fill(batch["attention_mask"] == 0, -100)
    results = []
    for attention in ("sdpa", varlen.install()):
        torch.manual_seed(1)
        model = MistralForCausalLM._from_config(config, attn_implementation=attention)
        with mock.patch.object(varlen, "varlen_attention", wraps=varlen.varlen_attention) as operator:
            loss = model(**batch).loss
        assert operator.call_count == (0 if attention == "sdpa" else 2)
        results.append([loss, *torch.autograd.grad(loss, model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
