"""Gives the results of a compiled forward their traced strides, if these contain a size that the batch determines.

    h = x[:, : lengths.max().item()].transpose(1, 2)       # [2, 4, Min(8, u0)]
    return h.softmax(2)                                    # contiguous in eager mode

Inductor chooses the layout of its results, and of the tensors saved for backward, unless it knows the traced strides;
it ignores strides with unbacked symbols (`unbacked_symbols_in_strides` in its `graph.py`, and `output_strides` in
`compile_fx.py`, for which AOTAutograd compiles backward). And kernels may choose other strides for the sizes at hand
than for symbols (`F.max_pool1d`). So `.view(-1)` of the result, which eager mode runs, raises; and backward raises
("expected size 4==4, stride 2==1"), or computes wrong gradients without Inductor's size assertions. Here a tensor with
other strides than the traced ones is copied. Few are.

PyTorch's caches keep what `CompiledFxGraph.prepare_for_serialization` has been called on. There the graph gets its
strides (`restrided_graph.py`), so that AOTAutograd's cache, which takes no graph that is wrapped by something else,
keeps it; what is known of the strides is a part of the graph's key.

Backward is told the strides of other tensors that forward saves, but as numbers, for the batch at hand, also where
Inductor chose another layout for them (on CPUs, near convolutions): another batch fails backward's assertions. Here
backward is told the expressions.

Private names, checked on torch 2.13: `torch.utils._sympy.printers.PythonPrinter`, `user_visible_output_idxs` in the
`meta` of a graph's output; `CompiledFxGraph.output_strides`, which holds None for a result whose strides backward is
not told, and expressions, as text, for the others; `CompiledFxGraph.prepare_for_serialization`;
`TracingContext.output_strides`, what backward is told; and `ShapeEnv.deserialize_symexpr`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.compiler.config
from torch._guards import TracingContext
from torch.fx import GraphModule, Node
from torch.utils._sympy.printers import PythonPrinter

from fxpasses.base.patching import Patch
from fxpasses.compiler.lowering_by_operator import Boxed
from fxpasses.compiler.restrides import Restrides
from fxpasses.graph.symbols import expression, is_unbacked, symbol


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

    @contextlib.contextmanager
    def kept_in_caches(self) -> Iterator[None]:
        """Inside, what Inductor compiles and keeps in PyTorch's caches has these strides."""
        if not self._expected:
            yield
            return
        config: Any = torch.compiler.config
        tag = f"{config.cache_key_tag}:{sorted(self._returned)}:{self._expected}"
        before = _COMPILING.set(self)
        try:
            with config.patch(cache_key_tag=tag), _keeping_strides():
                yield
        finally:
            _COMPILING.reset(before)

    def given_to(self, compiled: Any) -> Boxed:
        """`compiled`, Inductor's code, with these strides for the returned tensors, and for the saved tensors whose
        strides it has not reported. Backward is compiled for the strides that it has reported."""
        told = getattr(compiled, "output_strides", None) or ()
        expected = {
            source: [at for at in positions if at in self._returned or (at < len(told) and told[at] is None)]
            for source, positions in self._expected.items()
        }
        expected = {source: positions for source, positions in expected.items() if positions}
        if not expected:
            return compiled
        from fxpasses.compiler.restrided_graph import restrided

        return restrided(compiled, Restrides(expected, self._returned))


_COMPILING: ContextVar[TracedStrides | None] = ContextVar("the strides of the graph that is compiled", default=None)


def _graphs() -> Any:
    from torch._inductor.output_code import CompiledFxGraph

    return CompiledFxGraph


def _with_strides(prepare: Callable[[Any], None]) -> Callable[[Any], None]:
    def prepare_with_strides(compiled: Any) -> None:
        prepare(compiled)
        strides = _COMPILING.get()
        if strides is not None:
            strides.given_to(compiled)

    return prepare_with_strides


_keeping_strides = Patch("keeping strides in caches", _graphs, prepare_for_serialization=_with_strides)


def _expected(inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[str, list[int]]:
    """The positions of the outputs with unbacked symbols in their strides, by the source of a function that computes
    these of inputs' sizes and outputs."""
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


def _computed(strides: tuple[Any, ...], sources: dict[Any, str]) -> str:
    names = sorted(_symbols(strides), key=str)
    given = ", ".join(sources[name] for name in names)
    results = ", ".join(map(PythonPrinter().doprint, strides))
    return f"lambda sizes, outputs: (lambda {', '.join(map(str, names))}: ({results},))({given})"
