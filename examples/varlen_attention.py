"""Attention over packed sequences as flash-attn defines it, in plain PyTorch: Hugging Face's flash path on any machine.

    config = LlamaConfig(..., attn_implementation=install())

A model with this configuration runs transformers' own flash-attention path: in every layer it finds the sequences of a
packed batch in `position_ids`, or those of a padded batch in its mask, and asks for the longest. On the CPU, the path
ends in the operator defined here, which has a true gradient; on CUDA it ends in flash-attn where that is installed, and
in PyTorch's `varlen_attn` elsewhere.

The operator is for correctness and for counting graphs. It is not a fused kernel: it holds the scores of one sequence
at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import transformers.modeling_flash_attention_utils as flash
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

try:
    from flash_attn import flash_attn_varlen_func as flash_attn_kernel
except ImportError:
    flash_attn_kernel = None

NAME = "flash_varlen"  # transformers treats a name that contains "flash" as flash attention: no mask [tokens, tokens]


def install() -> str:
    """Make transformers' flash path call `flash_attn_varlen_func` below; returns the `attn_implementation` to pass.

    Call it before a model is made. The two registrations are transformers' public way to add an attention. Its flash
    path finds the function that it calls by `_lazy_imports`, which is private and called once.
    """
    AttentionInterface.register(NAME, flash_attention_forward)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    functions = (flash_attn_func, flash_attn_varlen_func, None, flash._pad_input, flash._unpad_input)
    with mock.patch.object(flash, "_lazy_imports", lambda *_, **__: functions):
        flash.lazy_import_flash_attention(NAME)
    return NAME


# What transformers calls: flash-attn's two functions


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention within each sequence; q [tokens, heads, width], k and v [keys, kv_heads, width] -> like q.

    cu_seqlens: int [sequences + 1], 0 and the ends of the sequences; max_seqlen: the longest, a number or a tensor [].
    softmax_scale: 1 / sqrt(width) by default. Raises ValueError for dropout and for attention sinks (`s_aux`).
    """
    if dropout_p or s_aux is not None:
        raise ValueError("dropout and attention sinks are not supported: pass dropout_p=0.0 and s_aux=None")
    longest = [n.item() if isinstance(n, Tensor) else n for n in (max_seqlen_q, max_seqlen_k)]
    batch = (q, k, v, cu_seqlens_q, cu_seqlens_k, *longest)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if not q.is_cuda:
        return varlen_attention(*batch, scale, causal, list(window_size), softcap)
    if flash_attn_kernel is not None:
        options = {"causal": causal, "window_size": window_size, "softcap": softcap}
        return flash_attn_kernel(*batch, softmax_scale=scale, **options)
    if softcap:
        raise ValueError(f"softcap is {softcap}: PyTorch's varlen_attn has none; install flash-attn")
    window = (window_size[0], 0 if causal else window_size[1])
    # PyTorch 2.11 shares heads of keys unasked, and does not know the argument.
    shared = {"enable_gqa": True} if q.shape[1] != k.shape[1] and torch.__version__ >= "2.12" else {}
    return varlen_attn(*batch, scale=scale, window_size=window, **shared)


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The same for a batch without padding; q [batch, tokens, heads, width], k and v [batch, keys, kv_heads, width]."""
    bounds = [torch.arange(len(t) + 1, dtype=torch.int32, device=t.device) * t.shape[1] for t in (q, k)]
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    return flash_attn_varlen_func(*packed, *bounds, q.shape[1], k.shape[1], **options).view(q.shape)


# The operator


@torch.library.custom_op("fxpasses_examples::varlen_attention", mutates_args=())
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool,
    window: Sequence[int],
    softcap: float,
) -> Tensor:
    """softmax(scale * query @ key) @ value within each sequence, computed in float32, or float64 for float64.

    query: float [tokens, heads, width]; key, value: float [keys, kv_heads, width], each of whose heads serves
    `heads / kv_heads` of the query's heads; cu_seqlens: int [sequences + 1]. Returns [tokens, heads, width], 0 where a
    query sees no key. The last query of a sequence is aligned with its last key. window: how many keys before and after
    its own position a query sees, -1 for all; causal: none after. softcap: scores become
    softcap * tanh(scores / softcap); 0 leaves them. Raises ValueError where shapes, ends of sequences or longest
    lengths do not fit.
    """
    check_heads(query, key, value)
    output = query.new_empty(query.shape)
    batch = (query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    with as_given(query):
        for rows, _, q, k, v in sequences(*batch):
            weights, _ = softmax_weights(q, k, scale, causal, window, softcap)
            output[rows] = torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)
    return output


@torch.library.custom_op("fxpasses_examples::varlen_attention_backward", mutates_args=())
def varlen_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool,
    window: Sequence[int],
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value. The weights are recomputed, as in flash-attn."""
    d_query, d_key, d_value = (t.new_empty(t.shape) for t in (query, key, value))
    batch = (query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    with as_given(query):
        for rows, columns, q, k, v in sequences(*batch):
            weights, slope = softmax_weights(q, k, scale, causal, window, softcap)
            d_output = grad[rows].view(q.shape).to(q.dtype)
            d_weights = torch.einsum("qhgd,khd->hgqk", d_output, v)
            d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)) * slope * scale
            d_query[rows] = torch.einsum("hgqk,khd->qhgd", d_scores, k).flatten(1, 2)
            d_key[columns] = torch.einsum("hgqk,qhgd->khd", d_scores, q)
            d_value[columns] = torch.einsum("hgqk,qhgd->khd", weights, d_output)
    return d_query, d_key, d_value


@varlen_attention.register_fake
def _(query, key, value, *_):
    check_heads(query, key, value)
    return query.new_empty(query.shape)


@varlen_attention_backward.register_fake
def _(grad, query, key, value, *_):
    return tuple(t.new_empty(t.shape) for t in (query, key, value))


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.numbers = inputs[5:]


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = varlen_attention_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return (*gradients, *[None] * (2 + len(ctx.numbers)))


varlen_attention.register_autograd(backward, setup_context=save_for_backward)


def as_given(tensor: Tensor) -> torch.autocast:
    """A region in which products keep their dtype: eager autocast reaches the operator's body, compiled code's not."""
    return torch.autocast(tensor.device.type, enabled=False)


def sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """For each sequence: the slices of its queries and keys, query [rows, kv_heads, group, width], key and value."""
    spans_q = spans("q", cu_seqlens_q, len(query), max_seqlen_q)
    spans_k = spans("k", cu_seqlens_k, len(key), max_seqlen_k)
    if len(spans_q) != len(spans_k):
        raise ValueError(f"cu_seqlens_q has {len(spans_q)} sequences, and cu_seqlens_k has {len(spans_k)}")
    wide = torch.promote_types(query.dtype, torch.float32)
    query, key, value = query.unflatten(1, (key.shape[1], -1)).to(wide), key.to(wide), value.to(wide)
    for rows, columns in zip(spans_q, spans_k, strict=True):
        yield rows, columns, query[rows], key[columns], value[columns]


def spans(name: str, cu_seqlens: Tensor, tokens: int, longest: int) -> list[slice]:
    """The slice of each sequence; raises ValueError where it does not fit the tokens or the longest length."""
    ends = cu_seqlens.tolist()
    if not ends or ends[0] != 0 or ends != sorted(ends) or ends[-1] != tokens:
        raise ValueError(f"cu_seqlens_{name} is {ends}, not 0 and the ends of sequences of {tokens} tokens together")
    found = [slice(start, end) for start, end in pairwise(ends)]
    if (actual := max((span.stop - span.start for span in found), default=0)) > longest:
        raise ValueError(f"max_seqlen_{name} is {longest}, but a sequence has {actual} tokens")
    return found


def check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises ValueError. Numbers of tokens may be unknown while a graph is captured; they are checked at run time."""
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if query.dim() != 3 or key.dim() != 3 or value.dim() != 3:
        raise ValueError(f"query, key and value must be [tokens, heads, width], but are {shapes}")
    if key.shape[1:] != value.shape[1:] or query.shape[2] != key.shape[2]:
        raise ValueError(f"key and value must have the same heads, and all the same width, but are {shapes}")
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"the query's heads must be a multiple of the key's, but are {shapes}")


def softmax_weights(
    query: Tensor, key: Tensor, scale: float, causal: bool, window: Sequence[int], softcap: float
) -> tuple[Tensor, Tensor | float]:
    """One sequence's weights [kv_heads, group, rows, keys], and the derivative of the capped scores.

    query: [rows, kv_heads, group, width]; key: [keys, kv_heads, width].
    """
    rows, keys = len(query), len(key)
    scores = torch.einsum("qhgd,khd->hgqk", query, key) * scale
    slope: Tensor | float = 1.0
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, slope = softcap * capped, 1 - capped.square()
    before, after = (n if n >= 0 else rows + keys for n in (window[0], 0 if causal else window[1]))
    place = torch.arange(keys, device=key.device)
    ahead = place - torch.arange(keys - rows, keys, device=key.device)[:, None]
    seen = (ahead >= -before) & (ahead <= after)
    # Not -inf, which turns a row that sees nothing into NaN; such a row's weights are 0 in the end.
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen, slope


# Run as a program: what of the path reaches one graph


def main() -> None:
    """Three packed batches of other documents, in eager mode and compiled: equal losses, one graph, fewer reads."""
    from torch._dynamo.utils import counters
    from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes,
        num_hidden_layers=3,
        use_cache=False,  # or transformers makes no mask from position_ids, and the texts attend to each other
        attn_implementation=install(),
    )
    model, collate = LlamaForCausalLM(config), DataCollatorWithFlattening(return_tensors="pt")
    step = torch.compile(lambda **batch: model(**batch).loss, backend="fastpack")
    for lengths in [(9, 23), (16, 16), (30, 2)]:
        texts = [{"input_ids": torch.randint(64, (length,)).tolist()} for length in lengths]
        batch = collate(texts)
        eager, compiled = model(**batch).loss.item(), step(**batch).item()
        print(f"texts of {lengths[0]} and {lengths[1]} tokens: loss {eager:.5f} in eager mode, {compiled:.5f} compiled")
    breaks = sum(counters["graph_break"].values())
    print(f"graphs: {counters['stats']['unique_graphs']}, graph breaks: {breaks}")


if __name__ == "__main__":
    main()
