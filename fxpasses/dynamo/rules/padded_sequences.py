"""`pad_sequence` over texts of data-dependent lengths, in one graph whichever of them is the longest.

Its kernel compares the lengths pairwise, and each comparison would be a question about the batch: a graph for each
order. Here the longest length is a number that no question determines, as that of `max(lengths.tolist())` is, and each
text is padded to it.

Left to Dynamo are texts whose lengths are known, or that differ in their other sizes, their dtype or their device,
which the kernel converts.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lists import BaseListVariable

from fxpasses.dynamo.hints import TORCH_FUNCTION
from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.graph.symbols import expression, is_unbacked

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

handlers = Handlers()


@handlers.at(method(TORCH_FUNCTION, "call_function"), order=6)
def call(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.value is not torch._C._nn.pad_sequence or not _is_supported(args, kwargs):
        return NOT_HANDLED
    return UserFunctionVariable(_PADDED).call_function(tx, args, kwargs)


def _padded(
    sequences: list[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Tensor:
    """[len(sequences), longest, ...] or, not `batch_first`, [longest, len(sequences), ...]."""
    longest = max([sequence.shape[0] for sequence in sequences])
    padded = []
    for sequence in sequences:
        missing = longest - sequence.shape[0]
        around = (missing, 0) if padding_side == "left" else (0, missing)
        padded.append(F.pad(sequence, (0, 0) * (sequence.ndim - 1) + around, value=padding_value))
    return torch.stack(padded, 0 if batch_first else 1)


def _is_supported(args: Any, kwargs: Any) -> bool:
    try:
        given = _SIGNATURE.bind(*args, **kwargs).arguments
    except TypeError:
        return False
    sequences = given.pop("sequences").realize()
    options = {name: option.realize() for name, option in given.items()}
    if not isinstance(sequences, BaseListVariable) or not all(map(_is_constant, options.values())):
        return False
    if "padding_side" in options and options["padding_side"].as_python_constant() not in ("left", "right"):
        return False
    items = [item.realize() for item in sequences.items]
    if not all(item.is_tensor() for item in items):
        return False
    texts = [item.as_proxy().node.meta["example_value"] for item in items]
    return _are_alike(texts) and any(is_unbacked(text.shape[0]) for text in texts)


def _is_constant(variable: Any) -> bool:
    return variable.is_python_constant()


def _are_alike(texts: list[Tensor]) -> bool:
    """Whether nothing but the lengths differs. With four dimensions, the layout of images might."""
    if not all(text.layout is torch.strided and 1 <= text.ndim <= 3 for text in texts):
        return False
    return len({(text.dtype, text.device, tuple(map(expression, text.shape[1:]))) for text in texts}) == 1


_PADDED: Any = _padded
_SIGNATURE = inspect.signature(_padded)
