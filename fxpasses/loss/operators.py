"""Results of a program of rows, in chunks, as operators that autograd and `torch.compile` know.

| operator | result | products |
|---|---|---|
| `loss_of_rows(program, xs, ws, rows, shared, cotangents)` | the sum of trained results times cotangents, then results | 3, all in forward |
| `values_of_rows(program, xs, ws, rows, shared)` | the results, for whatever cotangents backward brings | 1, and 3 in backward |

xs: rows [N, H], ws: weights [V, H] of the products; rows: operands [N, ...]; shared: operands without rows.
`loss_of_rows` becomes `loss_in_chunks`, which computes the gradients that will be wanted, and backward multiplies them by
the gradient of its result. Gradients of gradients are those of the program as written, on all rows at once.
"""  # noqa: E501 - a table row is one line

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fxpasses.loss import chunks
from fxpasses.loss.row_program import RowProgram, registered, weighted_sum
from fxpasses.runtime import autocast

Tensors = Sequence[Tensor]


@custom_op("fxpasses::loss_in_chunks", mutates_args=())
def loss_in_chunks(
    program: str,
    xs: Tensors,
    ws: Tensors,
    rows: Tensors,
    shared: Tensors,
    cotangents: Tensors,
    needs: Sequence[bool],
    values: bool,
) -> list[Tensor]:
    """The sum of trained results times cotangents, [], float32 or wider; with `values` the results [N, ...]; and the
    gradients of the sum with respect to those of xs, ws, rows and shared for which `needs` is True.

    Without `values`, rows whose cotangents are all 0 are not computed, on the CPU.
    """
    found = _run(program, xs, ws, rows, shared, cotangents, needs, values)
    assert found.total is not None
    return [found.total, *found.values, *found.gradients]


@custom_op("fxpasses::values_of_rows", mutates_args=())
def values_of_rows(program: str, xs: Tensors, ws: Tensors, rows: Tensors, shared: Tensors) -> list[Tensor]:
    """The results of a program, [N, ...] each."""
    count = len(xs) + len(ws) + len(rows) + len(shared)
    return _run(program, xs, ws, rows, shared, [], [False] * count, True).values


@custom_op("fxpasses::gradients_of_rows", mutates_args=())
def gradients_of_rows(
    program: str, xs: Tensors, ws: Tensors, rows: Tensors, shared: Tensors, cotangents: Tensors, needs: Sequence[bool]
) -> list[Tensor]:
    """The gradients of `values_of_rows` for one cotangent of each trained result."""
    return _run(program, xs, ws, rows, shared, cotangents, needs, False).gradients


def loss_of_rows(
    program: str, xs: Tensors, ws: Tensors, rows: Tensors, shared: Tensors, cotangents: Tensors, values: bool
) -> list[Tensor]:
    """The sum of trained results times cotangents; with `values` also the results, through which no gradient flows."""
    operands = [*xs, *ws, *rows, *shared]
    needs = [torch.is_grad_enabled() and x.requires_grad for x in operands]
    found = loss_in_chunks(program, xs, ws, rows, shared, cotangents, needs, values)
    return found[: len(found) - sum(needs)]


def _run(
    program: str,
    xs: Tensors,
    ws: Tensors,
    rows: Tensors,
    shared: Tensors,
    cotangents: Tensors,
    needs: Sequence[bool],
    values: bool,
) -> chunks.Found:
    with torch.no_grad(), torch.autocast(xs[0].device.type, enabled=False):
        return chunks.run(registered(program), chunks.Operands(xs, ws, rows, shared), cotangents, needs, values)


# Shapes


def _values(program: str, xs: Tensors) -> list[Tensor]:
    return [xs[0].new_empty(xs[0].shape[0], *r.sizes, dtype=r.dtype) for r in registered(program).results]


@values_of_rows.register_fake
def _(program: str, xs: Tensors, ws: Tensors, rows: Tensors, shared: Tensors) -> list[Tensor]:
    return _values(program, xs)


@gradients_of_rows.register_fake
def _(
    program: str, xs: Tensors, ws: Tensors, rows: Tensors, shared: Tensors, cotangents: Tensors, needs: Sequence[bool]
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, need in zip([*xs, *ws, *rows, *shared], needs, strict=True) if need]


@loss_in_chunks.register_fake
def _(
    program: str,
    xs: Tensors,
    ws: Tensors,
    rows: Tensors,
    shared: Tensors,
    cotangents: Tensors,
    needs: Sequence[bool],
    values: bool,
) -> list[Tensor]:
    gradients = [x.new_empty(x.shape) for x, need in zip([*xs, *ws, *rows, *shared], needs, strict=True) if need]
    total = xs[0].new_empty((), dtype=registered(program).wide)
    return [total, *(_values(program, xs) if values else []), *gradients]


# Gradients


def _operands(ctx: Any) -> list[list[Tensor]]:
    """xs, ws, rows, shared and, for `loss_in_chunks`, cotangents."""
    saved = iter(ctx.saved_tensors)
    return [[next(saved) for _ in range(count)] for count in ctx.counts]


def _spread(ctx: Any, gradients: Sequence[Tensor], needs: Sequence[bool]) -> list[list[Tensor | None]]:
    """Gradients of those operands that need one, as lists of xs, ws, rows and shared."""
    found, flags = iter(gradients), iter(needs)
    return [[next(found) if next(flags) else None for _ in range(count)] for count in ctx.counts[:4]]


def _save_loss(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.program, *operands, ctx.needs, _ = inputs
    ctx.counts = [len(each) for each in operands]
    ctx.first = len(output) - sum(ctx.needs)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    # Operands are kept only for gradients of gradients; without these, a later write to them must not be an error.
    ctx.operands = [(x, None if x.is_inference() else x._version) for each in operands for x in each]
    ctx.save_for_backward(*output[ctx.first :])


def _loss_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    grad = grads[0]
    if grad is None:
        return (None, *([None] * count for count in ctx.counts), None, None)
    if torch.is_grad_enabled():  # backward of backward may follow
        gradients = _as_written(ctx, grad)
    else:
        # `grad` is a number, which keeps their dtype. Rows of weight 0 get no gradient, even from a loss that is NaN.
        gradients = [torch.where(gradient == 0, gradient, gradient * grad) for gradient in ctx.saved_tensors]
    return (None, *_spread(ctx, gradients, ctx.needs), [None] * ctx.counts[4], None, None)


def _as_written(ctx: Any, grad: Tensor) -> list[Tensor]:
    if any(version not in (None, x._version) for x, version in ctx.operands):
        raise RuntimeError("one of the variables needed for gradients of gradients was written after forward")
    given = iter(x for x, _ in ctx.operands)
    xs, ws, rows, shared, cotangents = ([next(given) for _ in range(count)] for count in ctx.counts)
    results = written(registered(ctx.program), xs, ws, rows, shared)
    needing = [x for x, need in zip([*xs, *ws, *rows, *shared], ctx.needs, strict=True) if need]
    trained = [results[at] for at in registered(ctx.program).trained]
    total = weighted_sum(trained, cotangents)
    return list(torch.autograd.grad(total, needing, grad, create_graph=True, materialize_grads=True))


def written(program: RowProgram, xs: Tensors, ws: Tensors, rows: Tensors, shared: Tensors) -> list[Tensor]:
    """The results for all rows at once, through which gradients flow any number of times."""
    products = [x @ w.t() for x, w in zip(xs, ws, strict=True)]
    return list(program.body(*products, *rows, *shared))


def _save_values(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.program, *operands = inputs
    ctx.counts = [len(each) for each in operands]
    trained = registered(ctx.program).trained
    ctx.mark_non_differentiable(*(x for at, x in enumerate(output) if at not in trained))
    ctx.needs = [x.requires_grad for each in operands for x in each]
    ctx.save_for_backward(*(x for each in operands for x in each))


def _values_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    program = registered(ctx.program)
    cotangents = [grads[at] for at in program.trained]
    operands = _operands(ctx)
    if torch.is_grad_enabled():
        results = written(program, *operands)
        needing = [x for x, need in zip([x for each in operands for x in each], ctx.needs, strict=True) if need]
        outputs = [results[at] for at in program.trained]
        gradients = list(torch.autograd.grad(outputs, needing, cotangents, create_graph=True, materialize_grads=True))
    else:
        gradients = gradients_of_rows(ctx.program, *operands, cotangents, ctx.needs)
    return (None, *_spread(ctx, gradients, ctx.needs))


loss_in_chunks.register_autograd(_loss_backward, setup_context=_save_loss)
values_of_rows.register_autograd(_values_backward, setup_context=_save_values)

autocast.library.define(
    "loss_of_rows(str program, Tensor[] xs, Tensor[] ws, Tensor[] rows, Tensor[] shared, Tensor[] cotangents, "
    "bool values) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
autocast.library.impl("loss_of_rows", loss_of_rows, "CompositeImplicitAutograd")
