"""Gives the results of a compiled forward their traced strides, if these contain a size that the batch determines.

    h = x[:, : lengths.max().item()].transpose(1, 2)       # [2, 4, Min(8, u0)]
    return h.softmax(2)                                    # contiguous in eager mode

Inductor chooses the layout of its results, and of the tensors saved for backward, unless it knows the traced strides;
it ignores strides with unbacked symbols (`unbacked_symbols_in_strides` in its `graph.py`, and `output_strides` in
`compile_fx.py`, for which AOTAutograd compiles backward). And kernels may choose other strides for the sizes at hand
than for symbols (`F.max_pool1d`). So `.view(-1)` of the result, which eager mode runs, raises; and backward raises
("expected size 4==4, stride 2==1"), or computes wrong gradients without Inductor's size assertions. Here a tensor with
other strides than the traced ones is copied. Few are.

Backward is told the strides of other tensors that forward saves, but as numbers, for the batch at hand, also where
Inductor chose another layout for them (on CPUs, near convolutions): another batch fails backward's assertions. Here
backward is told the expressions.

Private names, checked on torch 2.13: `torch.utils._sympy.printers.PythonPrinter`, `user_visible_output_idxs` in the
`meta` of a graph's output; `CompiledFxGraph.output_strides`, which holds None for a result whose strides backward is
not told, and expressions, as text, for the others; `TracingContext.output_strides`, what backward is told; and
`ShapeEnv.deserialize_symexpr`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import GraphModule, Node
from torch.utils._sympy.printers import PythonPrinter

from fxpasses.compiler.lowering_by_operator import Boxed
from fxpasses.graph.symbols import expression, is_unbacked, symbol

Strides = Callable[[Sequence[Any], Sequence[Any]], tuple[int, ...]]


def tell_expressions(compiled: Any, inputs: Sequence[Any]) -> None:
    """Have AOTAutograd compile backward for what the strides of saved tensors are, not for what they are once."""
    from torch._inductor.utils import shape_env_from_inputs

    context = TracingContext.try_get()
    told = context and context.output_strides
    shape_env: Any = shape_env_from_inputs(inputs)
    if not told or shape_env is None:
        return
    for at, strides in enumerate(getattr(compiled, "output_strides", None) or ()):
        if strides is not None and not all(stride.isdigit() for stride in strides):
            told[at] = tuple(map(shape_env.deserialize_symexpr, strides))


class TracedStrides:
    """The strides of a forward graph's results, as functions of its inputs and results."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        output = gm.graph.output_node()
        results: Any = output.args[0]
        self._returned = frozenset(output.meta.get("user_visible_output_idxs", range(len(results))))
        outputs = [result.meta.get("val") if isinstance(result, Node) else result for result in results]
        self._expected = _expected(inputs, outputs)

    def given_to(self, compiled: Any) -> Boxed:
        """`compiled`, Inductor's code, with these strides for the returned tensors, and for the saved tensors whose
        strides it has not reported. Backward is compiled for the strides that it has reported."""
        told = getattr(compiled, "output_strides", None) or ()
        expected = {
            strides_of: [at for at in positions if at in self._returned or (at < len(told) and told[at] is None)]
            for strides_of, positions in self._expected.items()
        }
        expected = {strides_of: positions for strides_of, positions in expected.items() if positions}
        return _Restrided(compiled, expected, self._returned) if expected else compiled


class _Restrided:
    _boxed_call = True

    def __init__(self, compiled: Boxed, expected: dict[Strides, list[int]], returned: frozenset[int]) -> None:
        self._compiled, self._expected, self._returned = compiled, expected, returned

    def __call__(self, arguments: list[Any]) -> Any:
        sizes = [value.shape if isinstance(value, torch.Tensor) else value for value in arguments]
        outputs = list(self._compiled(arguments))  # this empties the list `arguments`
        copies: dict[tuple[int, bool], torch.Tensor] = {}  # a tensor that is returned twice stays one tensor
        for strides_of, positions in self._expected.items():
            strides = strides_of(sizes, outputs)
            for position in positions:
                found = outputs[position]
                key = id(found), position in self._returned
                if key not in copies and _differs(found, strides):
                    copies[key] = _copy(found, strides)
                outputs[position] = copies.get(key, found)
        return outputs


def _differs(found: torch.Tensor, strides: tuple[int, ...]) -> bool:
    own = found.stride()
    return own != strides and any(
        size > 1 and one != other for size, one, other in zip(found.shape, own, strides, strict=True)
    )


def _copy(found: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(found.shape, strides, dtype=found.dtype, device=found.device).copy_(found)


def _expected(inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[Strides, list[int]]:
    """The positions of the outputs with unbacked symbols in their strides, by the function that computes these."""
    sources = dict(_sources(outputs, "outputs[{}]", ".shape")) | dict(_sources(inputs, "sizes[{}]", ""))
    positions: dict[tuple[Any, ...], list[int]] = {}
    for position, output in enumerate(outputs):
        if isinstance(output, torch.Tensor) and any(map(is_unbacked, output.stride())):
            strides = tuple(map(expression, output.stride()))
            if _symbols(strides) <= sources.keys():
                positions.setdefault(strides, []).append(position)
    return {_computed(strides, sources): found for strides, found in positions.items()}


def _sources(values: Sequence[Any], place: str, shape: str) -> Iterable[tuple[Any, str]]:
    """Each symbol in `values`, with a Python expression for its value."""
    for position, value in enumerate(values):
        at = place.format(position)
        if isinstance(value, torch.SymInt) and symbol(value) is not None:
            yield symbol(value), at
        elif isinstance(value, torch.Tensor):
            for dimension, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and symbol(size) is not None:
                    yield symbol(size), f"{at}{shape}[{dimension}]"


def _symbols(strides: Iterable[Any]) -> set[Any]:
    return {found for stride in strides for found in getattr(stride, "free_symbols", ())}


def _computed(strides: tuple[Any, ...], sources: dict[Any, str]) -> Strides:
    names = sorted(_symbols(strides), key=str)
    given = ", ".join(sources[name] for name in names)
    results = ", ".join(map(PythonPrinter().doprint, strides))
    source = f"lambda sizes, outputs: (lambda {', '.join(map(str, names))}: ({results},))({given})"
    computed: Strides = eval(source, {"math": math})
    return computed
