"""The properties of operators by canonical name (`graph/calls.py`): one table for all features.

A name that ends with `_` is another operator, which writes to its first operand. A feature with a rule for each
operator, such as a transfer function, keeps its own table.
"""

from __future__ import annotations

import functools

import torch
from torch.fx import Node

# Return the values of their operand, perhaps in another dtype or memory.
CASTS = frozenset(
    {"bfloat16", "bool", "contiguous", "detach", "double", "float", "half", "int", "long", "to", "type"}
)  # fmt: skip
COPIES = frozenset({"clone", "contiguous"})
KEEPS_VALUES = CASTS | COPIES
# Return the elements of their operand in the same order, with other sizes.
RESHAPES = frozenset({"flatten", "reshape", "reshape_as", "unflatten", "view", "view_as"})
SQUEEZES = frozenset({"squeeze", "unsqueeze"})
# Return memory of their first operand, whatever the other arguments; `getitem` does for indices of numbers and slices.
PLANS = frozenset({"fxpasses::attention_plan"})  # of a mask; operators that need not be registered
VIEWS = frozenset({"expand", "getitem", "permute", "reshape", "transpose", "unsqueeze", "view"})
# Make a tensor from numbers, and use only the size, dtype and device of another tensor.
FACTORIES = frozenset(
    {"arange", "empty", "empty_like", "full", "full_like", "new_empty", "new_full", "new_ones", "new_tensor",
     "new_zeros", "ones", "ones_like", "scalar_tensor", "tensor", "zeros", "zeros_like"}
)  # fmt: skip
ZEROS = frozenset({"new_zeros", "zeros", "zeros_like"})
# Multiply matrices, those of `BATCHED_PRODUCTS` also in batches. Autograd keeps the operands.
BATCHED_PRODUCTS = frozenset({"bmm", "einsum", "matmul"})
PRODUCTS = BATCHED_PRODUCTS | {"linear", "mm"}
COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})
ADDITIONS = frozenset({"add", "add_"})
# Combine the elements along one dimension, and keep its size.
ALONG_DIMENSION = frozenset({"cumsum", "log_softmax", "softmax", "softmin"})
# Change a mode of the process.
SETS_GRADIENTS = frozenset({"_set_grad_enabled", "set_grad_enabled"})
SETS_INFERENCE = frozenset({"_enter_inference_mode", "_exit_inference_mode"})
SETS_AUTOCAST = frozenset({"_enter_autocast", "_exit_autocast"})
# Write to nothing but `out`. For other operators, a run on fake tensors shows it (`graph/effects.py`); this list saves
# that run.
WRITES_NOTHING = VIEWS | COMPARISONS | BATCHED_PRODUCTS | frozenset(
    {"add", "any", "conv1d", "conv2d", "floor_divide", "layer_norm", "linear", "mul", "nonzero", "one_hot", "remainder",
     "rms_norm", "scaled_dot_product_attention", "size", "softmax", "sum", "sym_size", "topk", "where"}
)  # fmt: skip
# Elementwise, although PyTorch tags only some of their overloads, or only the operators that they decompose into.
_UNTAGGED = frozenset({"floor_divide", "hardswish", "logsigmoid", "masked_fill", "rsub", "softsign", "where"})


@functools.lru_cache(maxsize=4096)
def is_pointwise(name: str) -> bool:
    """Whether an operator is elementwise over its broadcast operands; `where` only with three.

    `torch.Tag.pointwise` is a property of overloads, and some operators, such as `max`, have others that reduce.
    """
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if packet is None or name in _UNTAGGED:
        return name in _UNTAGGED
    overloads = [overload for each in packet.overloads() if _is_of_tensors(overload := getattr(packet, each))]
    tags = [overload.tags for overload in overloads]
    if any(torch.Tag.nondeterministic_seeded in found for found in tags):
        return False
    return bool(tags) and all(torch.Tag.pointwise in found for found in tags)


def _is_of_tensors(overload: torch._ops.OpOverload) -> bool:
    schema = overload._schema
    taken = {str(argument.type) for argument in schema.arguments}
    gives = all(str(result.type) == "Tensor" for result in schema.returns)
    return gives and bool({"Tensor", "Optional[Tensor]"} & taken) and not any(a.is_out for a in schema.arguments)


def is_integer(node: Node) -> bool:
    """Whether a node is a tensor of integers or bools."""
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and not example.dtype.is_floating_point and not example.dtype.is_complex
