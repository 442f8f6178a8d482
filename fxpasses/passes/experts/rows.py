"""Which operators do to each row what they do to it alone, so that one call on all rows is E calls on a part of them.

A rule says so by the operator's name and checks its arguments: an operator that is not in the table, or whose arguments
touch the dimension of the rows, is not row-wise.
"""

from __future__ import annotations

from typing import Any

from fxpasses.graph.families import Family

# Elementwise. Operands are broadcast against each other; `lift_pointwise` in rowwise.py checks against what.
POINTWISE = frozenset(
    {"abs", "add", "bfloat16", "bitwise_and", "bitwise_not", "bitwise_or", "clamp", "clamp_max", "clamp_min", "clone",
     "contiguous", "cos", "detach", "div", "double", "elu", "eq", "erf", "exp", "expm1", "float", "floor", "floordiv",
     "ge", "gelu", "gt", "half", "hardswish", "hardtanh", "int", "le", "leaky_relu", "log", "log1p", "logical_and",
     "logical_not", "logical_or", "long", "lt", "masked_fill", "maximum", "minimum", "mish", "mod", "mul", "multiply",
     "ne", "neg", "nan_to_num", "pow", "reciprocal", "relu", "relu6", "rsqrt", "rsub", "selu", "sigmoid", "sign",
     "silu", "sin", "softplus", "softsign", "sqrt", "square", "sub", "subtract", "tanh", "to", "truediv", "true_divide",
     "type", "where", "logsigmoid", "iadd", "imul", "isub", "itruediv", "mul_", "add_", "sub_", "div_", "clamp_",
     "relu_", "silu_"}
)  # fmt: skip
# What works along one dimension, with the argument that names it (position, name) and its default; a tuple is several.
ALONG: dict[str, tuple[int, str, Any]] = {
    "all": (1, "dim", None), "amax": (1, "dim", None), "amin": (1, "dim", None), "any": (1, "dim", None),
    "chunk": (2, "dim", 0), "cumsum": (1, "dim", None), "glu": (1, "dim", -1), "log_softmax": (1, "dim", None),
    "logsumexp": (1, "dim", None), "mean": (1, "dim", None), "norm": (2, "dim", None), "softmax": (1, "dim", None),
    "split": (2, "dim", 0), "std": (1, "dim", None), "sum": (1, "dim", None), "tensor_split": (2, "dim", 0),
    "unbind": (1, "dim", 0), "var": (1, "dim", None), "squeeze": (1, "dim", None), "unflatten": (1, "dim", None),
}  # fmt: skip
DROPOUTS = ("dropout",)
NORMS = {"layer_norm": 1, "rms_norm": 1}  # the position of `normalized_shape`


def along_last_dimensions(family: Family, ndim: int, row: int) -> bool:
    """Whether an operator of `ALONG` stays away from dimension `row` of its first operand, which has `ndim`."""
    position, name, default = ALONG[family.name]
    dims = family.kwargs.get(name, family.args[position] if len(family.args) > position else default)
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    return all(isinstance(dim, int) and dim % ndim != row for dim in dims)


def normalises_last_dimensions(family: Family, ndim: int, row: int) -> bool:
    position = NORMS[family.name]
    shape = family.kwargs.get("normalized_shape", family.args[position] if len(family.args) > position else None)
    return isinstance(shape, (tuple, list)) and row < ndim - len(shape)


def draws_nothing(family: Family) -> bool:
    """Whether a `dropout` gives its operand back, as in evaluation: with p = 0, eager mode draws no numbers either."""
    if family.name not in DROPOUTS:
        return False
    p = family.kwargs.get("p", family.args[1] if len(family.args) > 1 else 0.5)
    training = family.kwargs.get("training", family.args[2] if len(family.args) > 2 else True)
    return training is False or (type(p) in (int, float) and p == 0)


def keeps_rows(index: Any, row: int, ndim: int) -> bool:
    """Whether a basic index (`[..., ::2]`, `[:, None]`) leaves dimension `row` of `ndim` as it is."""
    index = index if isinstance(index, tuple) else (index,)
    if any(not (part is None or part is Ellipsis or _is_basic(part)) for part in index):
        return False
    parts = [part for part in index if part is not None]
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (ndim - len(parts) + 1)
    return row >= len(parts) or parts[row] == slice(None)


def _is_basic(part: Any) -> bool:
    parts = (part.start, part.stop, part.step) if isinstance(part, slice) else (part,)
    return all(isinstance(p, (int, type(None))) and not isinstance(p, bool) for p in parts)
