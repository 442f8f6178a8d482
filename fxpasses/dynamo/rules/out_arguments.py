"""`torch.mm(a, b, out=buffer[:n, :m])` into memory that is not contiguous, in one graph.

TRL's fused head computes its logits tile by tile in one buffer. Dynamo breaks the graph at an `out=` argument that is
not contiguous, because functionalization does not keep its strides. Here the product is computed in memory of its own
that has these strides, and so as in eager mode, bit for bit, and copied:

    tile = buffer[:n, :m];  product = fxpasses.strided_mm(a, b, tile.stride());  tile.copy_(product)

Left to Dynamo are calls in which `out` is contiguous, would be resized or converted, has strides that are not known
yet, or shares memory with an operand; and calls that ask for a gradient, which raises in eager mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._prims_common import is_contiguous_or_false
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxpasses.dynamo.hints import TORCH_FUNCTION
from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.runtime import strided_products
from fxpasses.graph.aliases import storages_of

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

handlers = Handlers()


@handlers.at(method(TORCH_FUNCTION, "call_function"), order=4)
def write(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.value is not torch.mm or "out" not in kwargs or len(args) != 2 or not kwargs.keys() <= {"out", "out_dtype"}:
        return NOT_HANDLED
    out = kwargs["out"]
    if not all(value.is_tensor() for value in (*args, out)):
        return NOT_HANDLED
    dtype = kwargs["out_dtype"].as_python_constant() if "out_dtype" in kwargs else None
    target, a, b = map(_example, (out, *args))
    if is_contiguous_or_false(target) or not _is_copied(target, a, b, dtype):
        return NOT_HANDLED
    operands = (*(value.as_proxy() for value in args), target.stride(), dtype)
    product = tx.output.create_proxy("call_function", strided_products.strided_mm._opoverload, operands, {})
    out.call_method(tx, "copy_", [wrap_fx_proxy(tx=tx, proxy=product)], {})
    return out


def _example(variable: Any) -> torch.Tensor:
    return variable.as_proxy().node.meta["example_value"]


def _is_copied(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether `a @ b` may be computed in memory of its own and copied to `out`. dtype: the argument `out_dtype`."""
    if any(type(tensor) is not torch._subclasses.FakeTensor or tensor.ndim != 2 for tensor in (out, a, b)):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (out, a, b)):
        return False
    is_one_kind = a.dtype == b.dtype and out.dtype == (dtype or a.dtype) and out.device == a.device == b.device
    fits = [out.shape[0] == a.shape[0], out.shape[1] == b.shape[1]]
    is_known = all(isinstance(step, int) for step in out.stride()) and all(map(statically_known_true, fits))
    return is_one_kind and is_known and not set(storages_of(out)) & set(storages_of([a, b]))
