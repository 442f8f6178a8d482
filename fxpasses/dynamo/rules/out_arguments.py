"""`torch.mm(a, b, out=buffer[:n, :m])` into memory that is not contiguous, in one graph.

TRL's fused head computes its logits tile by tile in one buffer. Dynamo breaks the graph at an `out=` argument that is
not contiguous, because functionalization does not keep its strides. Here the product is computed in memory of its own
with the same strides, bit for bit as in eager mode, and then copied.

Left to Dynamo are calls in which `out` is contiguous, would be resized or converted, has strides that are not known
yet, or shares memory with an operand; and calls that ask for a gradient, which raise in eager mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._prims_common import is_contiguous_or_false
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxpasses.dynamo.interceptions import Handlers
from fxpasses.dynamo.runtime import strided_products
from fxpasses.dynamo.substitutions import are_tensors, example, substitute
from fxpasses.graph.aliases import storages_of

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

handlers = Handlers()


def _is_copied(trace: Trace, input: Any, mat2: Any, out: Any, out_dtype: Any = None) -> bool:
    """Whether the product may be computed in memory of its own and copied to `out`."""
    if not are_tensors(input, mat2, out):
        return False
    a, b, tile = map(example, (input, mat2, out))
    dtype = None if out_dtype is None else out_dtype.as_python_constant()
    if any(type(tensor) is not torch._subclasses.FakeTensor or tensor.ndim != 2 for tensor in (tile, a, b)):
        return False
    if is_contiguous_or_false(tile) or (torch.is_grad_enabled() and any(t.requires_grad for t in (tile, a, b))):
        return False
    is_one_kind = a.dtype == b.dtype and tile.dtype == (dtype or a.dtype) and tile.device == a.device == b.device
    fits = [tile.shape[0] == a.shape[0], tile.shape[1] == b.shape[1]]
    is_known = all(isinstance(step, int) for step in tile.stride()) and all(map(statically_known_true, fits))
    return is_one_kind and is_known and not set(storages_of(tile)) & set(storages_of([a, b]))


@substitute(handlers, torch.mm, when=_is_copied)
def mm(input: Tensor, mat2: Tensor, *, out: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    return out.copy_(strided_products.strided_mm(input, mat2, out.stride(), out_dtype))
