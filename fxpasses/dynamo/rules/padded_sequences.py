"""`pad_sequence` over texts of data-dependent lengths, in one graph whichever of them is the longest.

Its kernel compares the lengths pairwise, and each comparison would be a question about the batch: one graph for each
order of the lengths. Here the longest length is a number that needs no question, like `max(lengths.tolist())`, and each
text is padded to it.

Left to Dynamo are texts whose lengths are known, and texts that differ in their other sizes, their dtype or their
device, which the kernel converts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.variables.lists import BaseListVariable

from fxpasses.dynamo.interceptions import Handlers
from fxpasses.dynamo.substitutions import are_constants, are_tensors, example, substitute
from fxpasses.graph.symbols import expression, is_unbacked

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

handlers = Handlers()


def _differ_in_length_alone(trace: Trace, sequences: Any, **options: Any) -> bool:
    if not isinstance(sequences, BaseListVariable) or not are_constants(*options.values()):
        return False
    if "padding_side" in options and options["padding_side"].as_python_constant() not in ("left", "right"):
        return False
    items = [item.realize() for item in sequences.items]
    if not are_tensors(*items):
        return False
    texts = [example(item) for item in items]
    if not all(text.layout is torch.strided and 1 <= text.ndim <= 3 for text in texts):
        return False  # with four dimensions, the layout of images might differ
    if not any(is_unbacked(text.shape[0]) for text in texts):
        return False
    return len({(text.dtype, text.device, tuple(map(expression, text.shape[1:]))) for text in texts}) == 1


@substitute(handlers, torch._C._nn.pad_sequence, when=_differ_in_length_alone)
def pad_sequence(
    sequences: list[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Tensor:
    """[len(sequences), longest, ...]; [longest, len(sequences), ...] if not `batch_first`."""
    longest = max([sequence.shape[0] for sequence in sequences])
    padded = []
    for sequence in sequences:
        missing = longest - sequence.shape[0]
        around = (missing, 0) if padding_side == "left" else (0, missing)
        padded.append(F.pad(sequence, (0, 0) * (sequence.ndim - 1) + around, value=padding_value))
    return torch.stack(padded, 0 if batch_first else 1)
