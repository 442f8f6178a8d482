"""`F.conv2d` of a trimmed batch in channels-last layout: its result is in that layout too.

PyTorch's fake kernel assumes that the result is contiguous if a size has no value. So `y.is_contiguous()` would be
folded to the wrong answer, and the next operators would get another layout than they were compiled for.

Private names, checked on torch 2.13: `torch._subclasses.fake_impls.op_implementations_dict`, whose functions run an
operator on fake tensors, and `torch._prims_common.make_channels_last_strides_for`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._prims_common import make_channels_last_strides_for
from torch._subclasses import fake_impls

from fxpasses.dynamo.interceptions import Handlers, Proceed, Site
from fxpasses.graph.symbols import expression, is_unbacked

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

handlers = Handlers()


@handlers.at(
    Site(
        "implementation of convolution",
        lambda: [(fake_impls.op_implementations_dict, torch.ops.aten.convolution.default)],
    ),
    without="a trimmed batch of images in channels-last layout has other strides than while tracing",
)
def convolution(trace: Trace, proceed: Proceed, mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    result = proceed(mode, func, *args, **kwargs)
    if trace.graph is None or trace.graph.output.shape_env is not mode.shape_env:
        return result
    operands = (*args, *kwargs.values())[:2]
    if result.dim() not in (4, 5) or not is_unbacked(result) or not any(map(_is_channels_last, operands)):
        return result
    with mode:
        return result.as_strided(result.shape, make_channels_last_strides_for(result.shape))


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether a tensor [B, C, H, W] has the strides of [B, H, W, C]; its sizes may have no values."""
    expected = make_channels_last_strides_for(tensor.shape)
    return tensor.shape[1] != 1 and [*map(expression, tensor.stride())] == [*map(expression, expected)]
