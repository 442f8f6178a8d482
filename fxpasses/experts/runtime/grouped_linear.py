"""Linear layers of many experts on rows sorted by expert, as operators that autograd and Inductor know.

Rows [N, K] are sorted by group; offsets [E], int32 or int64, are the ends of the groups, so that group e is
`rows[offsets[e - 1]:offsets[e]]`. Rows after the last group give zeros.

| operator | each group | gradients |
|---|---|---|
| `grouped_mm(rows, weights, offsets, bias, transposed)` | `rows[a:b] @ weights[e]`, or `addmm` with `bias[e]` | `grouped_mm`, `grouped_outer`, `grouped_sum` |
| `grouped_mm_list(...)` | the same, weights in E tensors, not copied on the CPU | `grouped_mm_list`, `grouped_outer_list`, `grouped_sum` |
| `grouped_mm_covering(rows, weights, offsets, transposed)` | `grouped_mm` on the CPU, for offsets that rise to N | the same, and `grouped_outer_covering` |
| `grouped_outer(left, right, offsets)` | `left[a:b].T @ right[a:b]` | `grouped_mm` |
| `grouped_sum(rows, offsets)` | `rows[a:b].sum(0)` | `grouped_expand` |
| `grouped_expand(values, offsets, size)` | `values[e]` for each row | `grouped_sum` |
| `offsets_on_host(offsets)` | none: a copy on the CPU, for the other operators | none |
| `gather_rows(rows, index)` | none: `rows[index]`, sorted or not | `index_add`, last row first |

On the CPU each group makes the call that a loop over the experts would make, on as many rows, forward and backward, so
results and gradients equal the loop's bit for bit. On devices with a grouped kernel they equal them up to rounding.
`grouped_ways.py` says which implementation runs, and `grouped_kernels.py` when the host waits for the device.
"""  # noqa: E501 - a table row is one line

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fxpasses.experts.runtime import grouped_kernels as kernels
from fxpasses.experts.runtime.idle_experts import NO_GRADIENT
from fxpasses.runtime import autocast


@custom_op("fxpasses::grouped_mm", mutates_args=())
def grouped_mm(
    rows: Tensor, weights: Tensor, offsets: Tensor, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """`rows[a:b] @ weights[e]` for each group.

    rows: [N, K]. weights: [E, K, M], or with `transposed` [E, M, K], as `nn.Linear` stores them; any strides.
    offsets: int32 or int64 [E], on the device of `rows` or on the CPU. bias: [E, M]; with it, each group is one
    `addmm`, as in `F.linear`, which may round differently than a product and a sum (use `grouped_expand` for those).
    Returns [N, M]. All have one dtype; under autocast, autocast's, as for `torch.mm`. Raises `ValueError` if offsets
    decrease or exceed N; kernels on a device do not check.
    """
    _check(rows, weights, offsets, bias, transposed)
    return kernels.matmul(rows, weights, offsets, bias, transposed)


@custom_op("fxpasses::grouped_mm_list", mutates_args=())
def grouped_mm_list(
    rows: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    bias: Tensor | None = None,
    transposed: bool = False,
    skips: bool = False,
) -> Tensor:
    """`grouped_mm` with weights in E tensors [K, M] (or [M, K]) of one size, each with a gradient of its own.

    skips: whether the gradients of groups without rows are `NO_GRADIENT` (`idle_experts.py`). `F.grouped_mm` needs one
    tensor: there every use copies the weights into one.
    """
    _check(rows, weights, offsets, bias, transposed)
    return kernels.matmul(rows, weights, offsets, bias, transposed)


@custom_op("fxpasses::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """`left[a:b].T @ right[a:b]` for each group, zeros for empty ones: [N, A], [N, B] -> [E, A, B]."""
    return kernels.outer(left, right, offsets)


@custom_op("fxpasses::grouped_outer_list", mutates_args=())
def grouped_outer_list(left: Tensor, right: Tensor, offsets: Tensor, skips: bool = False) -> list[Tensor]:
    """`grouped_outer` in E tensors [A, B] that share no memory, so that each can be freed alone."""
    return kernels.outer_list(left, right, offsets, NO_GRADIENT if skips else 0.0)


@custom_op("fxpasses::grouped_mm_covering", mutates_args=())
def grouped_mm_covering(rows: Tensor, weights: Tensor, offsets: Tensor, transposed: bool = False) -> Tensor:
    """`grouped_mm` without a bias, for int32 offsets that are known to rise to N: see `grouped_decompositions.py`."""
    _check(rows, weights, offsets, None, transposed)
    return kernels.matmul(rows, weights, offsets, None, transposed)


@custom_op("fxpasses::grouped_outer_covering", mutates_args=())
def grouped_outer_covering(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_outer` for such offsets."""
    return kernels.outer(left, right, offsets)


@custom_op("fxpasses::grouped_sum", mutates_args=())
def grouped_sum(rows: Tensor, offsets: Tensor, skips: bool = False) -> Tensor:
    """The sum of each group's rows: [N, M] -> [E, M]. skips: see `grouped_mm_list`."""
    return kernels.total(rows, offsets, NO_GRADIENT if skips else 0.0)


@custom_op("fxpasses::grouped_expand", mutates_args=())
def grouped_expand(values: Tensor, offsets: Tensor, size: int, skips: bool = False) -> Tensor:
    """`values[e]` for each of the `size` rows, zeros for rows after the last group: [E, M] -> [size, M].

    skips: see `grouped_mm_list`.
    """
    return kernels.expand(values, offsets, size)


@custom_op("fxpasses::offsets_on_host", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def offsets_on_host(offsets: Tensor) -> Tensor:
    """A copy on the CPU; the host waits for it. The other operators need not wait then: they save it for backward.

    It is an operator of its own so that checkpoints can keep its result and nothing computes it again. (Copies in a
    cache, by the address of the offsets, would be taken for those of the tensor that compiled code puts there next.)
    """
    return kernels.copy_to_host(offsets)


@custom_op("fxpasses::gather_rows", mutates_args=())
def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """`rows[index]`, whose gradient accumulates from the last row to the first: [T, D], int64 [N] -> [N, D].

    A loop over the experts gathers in ascending order, and autograd runs it backwards: a token's gradients are added
    from its last expert to its first. The gradient of `rows[index]` adds them in the opposite order, which differs in
    the last bit for three or more experts per token.
    """
    return rows.index_select(0, index)


# Shapes


@grouped_mm.register_fake
@grouped_mm_list.register_fake
def _(
    rows: Tensor,
    weights: kernels.Weights,
    offsets: Tensor,
    bias: Tensor | None = None,
    transposed: bool = False,
    skips: bool = False,
) -> Tensor:
    _check(rows, weights, offsets, bias, transposed)
    return rows.new_empty(rows.shape[0], weights[0].shape[0 if transposed else 1])


@grouped_mm_covering.register_fake
def _(rows: Tensor, weights: Tensor, offsets: Tensor, transposed: bool = False) -> Tensor:
    _check(rows, weights, offsets, None, transposed)
    return rows.new_empty(rows.shape[0], weights.shape[1 if transposed else 2])


@grouped_outer.register_fake
@grouped_outer_covering.register_fake
def _(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    return left.new_empty(offsets.shape[0], left.shape[1], right.shape[1])


@grouped_outer_list.register_fake
def _(left: Tensor, right: Tensor, offsets: Tensor, skips: bool = False) -> list[Tensor]:
    return [left.new_empty(left.shape[1], right.shape[1]) for _ in range(offsets.shape[0])]


@grouped_sum.register_fake
def _(rows: Tensor, offsets: Tensor, skips: bool = False) -> Tensor:
    return rows.new_empty(offsets.shape[0], rows.shape[1])


@grouped_expand.register_fake
def _(values: Tensor, offsets: Tensor, size: int, skips: bool = False) -> Tensor:
    return values.new_empty(size, values.shape[1])


@offsets_on_host.register_fake
def _(offsets: Tensor) -> Tensor:
    return offsets.new_empty(offsets.shape, device="cpu")


@gather_rows.register_fake
def _(rows: Tensor, index: Tensor) -> Tensor:
    return rows.new_empty(index.shape[0], rows.shape[1])


def _check(rows: Tensor, weights: kernels.Weights, offsets: Tensor, bias: Tensor | None, transposed: bool) -> None:
    """Raises `ValueError` if sizes or dtypes do not fit; a loop over no rows would not notice."""
    one = weights[0]  # symbolic sizes may only be compared: no sets, and no formatting before a failure
    depth, width = one.shape[::-1] if transposed else one.shape
    listed = [weights] if isinstance(weights, Tensor) else weights
    if len(weights) != offsets.shape[0]:
        raise ValueError(f"{offsets.shape[0]} groups need as many weights, but there are {len(weights)}")
    if any(tuple(weight.shape[-2:]) != tuple(one.shape) for weight in listed):
        raise ValueError(f"weights must have one size, but have {[tuple(weight.shape) for weight in listed]}")
    if rows.shape[1] != depth:
        raise ValueError(f"rows are {rows.shape[1]} wide, but the weights take {depth}")
    if bias is not None and tuple(bias.shape) != (len(weights), width):
        raise ValueError(f"bias must be {(len(weights), width)}, but is {tuple(bias.shape)}")
    dtypes = {tensor.dtype for tensor in (rows, *listed, *([] if bias is None else [bias]))}
    if len(dtypes) != 1:
        raise ValueError(f"rows, weights and bias must have one dtype, but have {sorted(map(str, dtypes))}")


# Gradients: each operator is linear in each operand, and the operators are closed under differentiation.


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, weights, offsets, _, ctx.transposed, *skips = inputs  # with defaults, unlike `needs_input_grad`
    ctx.skips = any(skips)
    ctx.is_listed = isinstance(weights, list)
    ctx.save_for_backward(rows, offsets, *(weights if ctx.is_listed else [weights]))


def _matmul_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, offsets, *matrices = ctx.saved_tensors
    weights = matrices if ctx.is_listed else matrices[0]
    product: Any = grouped_mm_list if ctx.is_listed else grouped_mm
    outer = functools.partial(grouped_outer_list, skips=ctx.skips) if ctx.is_listed else grouped_outer
    needs_rows, needs_weights, _, needs_bias = _needed(ctx)
    rows_grad = product(grad, weights, offsets, None, not ctx.transposed) if needs_rows else None
    weights_grad: Any = [None] * len(matrices) if ctx.is_listed else None
    if any(needs_weights) if ctx.is_listed else needs_weights:
        weights_grad = _gradient_of_weights(outer, rows, weights, grad, offsets, ctx.transposed)
        if ctx.is_listed:
            weights_grad = [p if needed else None for p, needed in zip(weights_grad, needs_weights, strict=True)]
    bias_grad = grouped_sum(grad, offsets, ctx.skips) if needs_bias else None
    return (rows_grad, weights_grad, None, bias_grad, None, None)[: len(ctx.needs_input_grad)]


def _save_covering(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, weights, offsets, ctx.transposed = inputs
    ctx.save_for_backward(rows, weights, offsets)


def _covering_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, weights, offsets = ctx.saved_tensors
    rows_grad = weights_grad = None
    if ctx.needs_input_grad[0]:
        rows_grad = grouped_mm_covering(grad, weights, offsets, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        weights_grad = _gradient_of_weights(grouped_outer_covering, rows, weights, grad, offsets, ctx.transposed)
    return (rows_grad, weights_grad, None, None)[: len(ctx.needs_input_grad)]


def _needed(ctx: Any) -> tuple[Any, ...]:
    """Which of rows, weights, offsets and bias need gradients; the dispatcher omits arguments at their default."""
    return (*ctx.needs_input_grad, False)[:4]


def _gradient_of_weights(
    outer: Callable[..., Any], rows: Tensor, weights: kernels.Weights, grad: Tensor, offsets: Tensor, transposed: bool
) -> Any:
    column_major = _is_column_major(weights[0].t() if transposed else weights[0])
    found = outer(*((grad, rows) if column_major else (rows, grad)), offsets)
    if column_major == transposed:
        return found
    return [matrix.t() for matrix in found] if isinstance(found, list) else found.mT


def _is_column_major(matrix: Tensor) -> bool:
    """Whether PyTorch's gradient of `mm` for this second operand is `(grad.T @ rows).T`, and not `rows.T @ grad`.

    Both are the gradient, but only the same product rounds as in the loop. The rule is that of `mm_mat2_grad` in
    torch/csrc/autograd/FunctionsManual.cpp, torch 2.11 to 2.15.
    """
    return bool(matrix.stride(0) == 1 and matrix.stride(1) == matrix.shape[0])


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    left, right, offsets = ctx.saved_tensors
    return grouped_mm(right, grad, offsets, None, True), grouped_mm(left, grad, offsets, None, False), None


def _outer_list_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    left, right, offsets = ctx.saved_tensors
    of_left, of_right = (
        grouped_mm_list(one, grads, offsets, None, is_left) for one, is_left in ((right, True), (left, False))
    )
    return (of_left, of_right, None, None)[: len(ctx.needs_input_grad)]


def _save_second(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save offsets or an index, and the number of rows of the first operand."""
    ctx.size, ctx.skips = inputs[0].shape[0], inputs[-1] is True
    ctx.save_for_backward(inputs[1])


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (grouped_expand(grad, ctx.saved_tensors[0], ctx.size), None, None)[: len(ctx.needs_input_grad)]


def _expand_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (grouped_sum(grad, ctx.saved_tensors[0], ctx.skips), None, None, None)[: len(ctx.needs_input_grad)]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (index,) = ctx.saved_tensors
    return grad.new_zeros(ctx.size, grad.shape[1]).index_add(0, index.flip(0), grad.flip(0)), None


grouped_mm.register_autograd(_matmul_backward, setup_context=_save)
grouped_mm_list.register_autograd(_matmul_backward, setup_context=_save)
grouped_mm_covering.register_autograd(_covering_backward, setup_context=_save_covering)
grouped_outer.register_autograd(_outer_backward, setup_context=_save_operands)
grouped_outer_covering.register_autograd(_outer_backward, setup_context=_save_operands)
grouped_outer_list.register_autograd(_outer_list_backward, setup_context=_save_operands)
grouped_sum.register_autograd(_sum_backward, setup_context=_save_second)
grouped_expand.register_autograd(_expand_backward, setup_context=_save_second)
gather_rows.register_autograd(_gather_backward, setup_context=_save_second)


def _autocast(name: str) -> Callable[[str], Callable[..., Any]]:
    operator = getattr(torch.ops.fxpasses, name).default

    def on(device_type: str) -> Callable[..., Any]:
        def rule(*args: Any, **kwargs: Any) -> Any:
            kwargs = {key: autocast.cast(value, device_type) for key, value in kwargs.items()}
            with torch.autocast(device_type, enabled=False):
                return operator(*(autocast.cast(value, device_type) for value in args), **kwargs)

        return rule

    return on


_COVERING = ("grouped_mm_covering", "grouped_outer_covering")
for _name in ("grouped_mm", "grouped_mm_list", "grouped_outer", "grouped_outer_list", *_COVERING):
    autocast.register(_name, _autocast(_name))
