"""Attention by a plan, as operators that autograd, autocast and `torch.compile` know.

| operator | result |
|---|---|
| `attention_plan(mask, heads, rows)` | the plan of a mask, once per batch |
| `sparse_attention(query, key, value, mask, plan, scale)` | attention, as a graph calls it |
| `sparse_attention_forward`, `sparse_attention_backward` | its parts on the CPU |

On the CPU, `sparse_attention` is `scaled_dot_product_attention(query, key, value, mask)` up to rounding, and bit for
bit if the plan is dense. Forward also returns the log-sum-exp of each row, so that the tensors that backward needs are
saved, recomputed in checkpoints, and moved like any activation. Backward of backward raises. On CUDA devices the
operator becomes FlexAttention while a graph is traced; elsewhere it is SDPA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fxpasses.attention.runtime import cpu, cuda, dense
from fxpasses.attention.runtime import plan as plans
from fxpasses.attention.runtime.flash import Attention
from fxpasses.attention.runtime.plan import four_dimensional
from fxpasses.runtime import autocast

_NO_PLAN = 8  # words of a plan on devices where nothing reads it


@custom_op("fxpasses::attention_plan", mutates_args=())
def attention_plan(mask: Tensor, heads: int = 8, rows: int | None = None) -> Tensor:
    """The plan of a mask, int32, on the mask's device; its size depends only on the mask's. No gradients.

    mask: bool (True: may attend) or additive, [..., Tq, Tk] of 2 to 4 dimensions, as in `scaled_dot_product_attention`.
    heads: the number of heads of queries that share one head of the mask, to weigh costs. rows: Tq, if one row of the
    mask stands for all. The host reads the mask only if it is on the CPU, and never from a device.
    """
    mask = four_dimensional(mask, rows)
    if mask.device.type == "cpu":
        return plans.plan_of(mask, heads)
    if mask.device.type == "cuda":
        return cuda.plan_of(mask)
    return torch.zeros(_NO_PLAN, dtype=torch.int32, device=mask.device)


def plan_in_blocks(
    rows: plans.Rows, shape: tuple[int, int, int, int], heads: int = 8, device: str | torch.device = "cpu"
) -> Tensor:
    """The plan of a mask that never exists as a whole; `sparse_attention` then takes None for the mask.

    rows: `rows(start, stop)` returns bool [B, H, stop - start, Tk] on the device. shape: [B, H, Tq, Tk] of the mask.
    Raises `ValueError` for devices that have no attention by plans.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return plans.plan_in_blocks(rows, shape, heads)
    if kind == "cuda":
        return cuda.plan_in_blocks(rows, shape)
    raise ValueError(f"there is no attention without a mask on {device}")


@custom_op("fxpasses::sparse_attention_forward", mutates_args=())
def sparse_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    plan: Tensor,
    scale: float | None = None,
    mask_dtype: torch.dtype | None = None,
    form: str = "fused",
) -> tuple[Tensor, Tensor]:
    """`sparse_attention` on the CPU, and the log-sum-exp of each row, float32 [B, H, Tq] (float64 for float64).

    mask_dtype: autocast's dtype, to which parts of an additive mask are cast when they are used; the mask as a whole is
    never copied.
    """
    planned = cpu.Planned(Attention(query, key, value, mask, scale), plan, mask_dtype, form)
    out, logsumexp = cpu.forward(planned)
    return _heads_together(out), _heads_together(logsumexp)


@custom_op("fxpasses::sparse_attention_backward", mutates_args=())
def sparse_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    plan: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    scale: float | None = None,
    mask_dtype: torch.dtype | None = None,
    form: str = "fused",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from the gradient of the output."""
    planned = cpu.Planned(Attention(query, key, value, mask, scale), plan, mask_dtype, form)
    first, second, third = (_heads_together(part) for part in cpu.backward(planned, grad, out, logsumexp))
    return first, second, third


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    plan: Tensor,
    scale: float | None = None,
    form: str = "fused",
) -> Tensor:
    """`scaled_dot_product_attention(query, key, value, mask)`, without the pairs that the mask rules out.

    query: [B, H, Tq, D]. key: [B, Hkv, Tk, D], value: [B, Hkv, Tk, Dv], H a multiple of Hkv: groups of queries share a
    head of keys, which is not copied. mask: the mask that `plan` was made from, broadcast to [B, H, Tq, Tk], or None if
    `plan_in_blocks` made the plan; it gets no gradient. scale: 1 / sqrt(D) by default. Returns [B, H, Tq, Dv], in
    memory [B, Tq, H, Dv]. A row that may attend to nothing is 0. Raises `ValueError` if the plan is for other sizes.

    form: the program that the operator replaces, which a dense plan runs. "fused": SDPA of these operands. "repeated":
    SDPA of keys and values copied for each head of queries. "written": matmul, the mask added, softmax, matmul;
    "filled": the same with the mask's values in place of scores. The last two are SDPA up to rounding, unless finite
    values or NaN hide a whole row of the mask: then the attention is computed as written, whatever the plan.
    """
    if mask is not None and mask.requires_grad:
        raise ValueError("attention by a plan gives its mask no gradient, but the mask requires one")
    if query.device.type == "cpu":
        return sparse_attention_forward(query, key, value, mask, plan, scale, None, form)[0]
    if query.device.type == "cuda" and (mask is None or torch._guards.detect_fake_mode([query]) is not None):
        four = None if mask is None else four_dimensional(mask, query.shape[-2])
        return cuda.attend(Attention(query, key, value, four, scale), plan)
    if mask is None:
        raise ValueError(f"there is no attention without a mask on {query.device}")
    return dense.composed(Attention(query, key, value, mask, scale))


def _heads_together(tensor: Tensor) -> Tensor:
    """[B, H, T, ...] laid out as [B, T, H, ...], as the flash kernel does and `register_fake` promises."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


# Shapes


@attention_plan.register_fake
def _(mask: Tensor, heads: int = 8, rows: int | None = None) -> Tensor:
    shape = four_dimensional(mask, rows).shape
    if mask.device.type == "cpu":
        return mask.new_empty(plans.plan_size(*shape), dtype=torch.int32)
    if mask.device.type == "cuda":
        return mask.new_empty(*shape[:2], cuda.table_size(*shape[2:]), dtype=torch.int32)
    return mask.new_empty(_NO_PLAN, dtype=torch.int32)


@sparse_attention_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    batch, heads, rows = query.shape[:3]
    accumulator = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(batch, rows, heads, dtype=accumulator).transpose(1, 2)


@sparse_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = (
        operand.new_empty(operand.transpose(1, 2).shape).transpose(1, 2) for operand in (query, key, value)
    )
    return first, second, third


# Gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    query, key, value, mask, plan, ctx.scale, ctx.mask_dtype, ctx.form = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, mask, plan, *output)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    grads: tuple[Any, ...] = (None, None, None)
    if grad is not None:
        operands = ctx.saved_tensors
        grads = sparse_attention_backward(grad, *operands, ctx.scale, ctx.mask_dtype, ctx.form)
    return (*grads, None, None, None, None, None)[: len(ctx.needs_input_grad)]


sparse_attention_forward.register_autograd(_backward, setup_context=_save)

autocast.library.define(
    "sparse_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor plan, float? scale=None, "
    'str form="fused") -> Tensor',
    tags=(torch.Tag.pt2_compliant_tag,),
)
autocast.library.impl("sparse_attention", sparse_attention, "CompositeImplicitAutograd")


def _autocast(device_type: str) -> Any:
    """Autocast runs SDPA in its own dtype."""

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        plan: Tensor,
        scale: Any = None,
        form: str = "fused",
    ) -> Tensor:
        q, k, v = (autocast.cast(operand, device_type) for operand in (query, key, value))
        with torch.autocast(device_type, enabled=False):
            if device_type != "cpu":
                mask = autocast.cast(mask, device_type)
                return torch.ops.fxpasses.sparse_attention(q, k, v, mask, plan, scale, form)
            dtype = torch.get_autocast_dtype(device_type) if autocast.is_castable(mask) else None
            return sparse_attention_forward(q, k, v, mask, plan, scale, dtype, form)[0]

    return rule


autocast.register("sparse_attention", _autocast)
