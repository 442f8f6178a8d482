"""Guard the assumptions of a graph about its batch: a batch that breaks them gets another graph.

The assumptions become a Dynamo guard over the batch's metadata. The guard computes the numbers in them as the prologue
does, once per batch and from the same copy on the host. If an assumption does not hold, Dynamo traces the frame again,
and keeps both graphs. In a torch without such guards, the graph raises `AssumptionError` for that batch.
"""

from __future__ import annotations

import logging
import math
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fxpasses.dynamo.assumptions import Assumption, assumptions_of
from fxpasses.dynamo.checks import Check
from fxpasses.dynamo.dynamo_names import MissingName, add_guard, check_guard_names, guard_names
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.trace import Trace
from fxpasses.errors import AssumptionError, MetadataError
from fxpasses.graph.provenance import source
from fxpasses.graph.symbols import symbol
from fxpasses.metadata.runtime.prologue import OperatorFailed, Prologue
from fxpasses.metadata.runtime.transfers import to_host
from fxpasses.runtime.dispatch_modes import unseen

log = logging.getLogger(__name__)

_MOST_VERDICTS = 256


def can_guard() -> bool:
    """Whether this torch has the names that data guards need."""
    try:
        check_guard_names()
    except MissingName:
        return False
    return True


def guard(output: Any, trace: Trace) -> BatchGuard | None:
    """Add the guard of a finished trace to Dynamo's `OutputGraph`, if it assumes anything."""
    found = assumptions_of(trace) if can_guard() else []
    if not found:
        return None
    batch_guard = BatchGuard(found, trace)
    check = Check(batch_guard, Feature.HINTS, trace.code, restart="kept")
    add_guard(output.guards, check, batch_guard.sources, batch_guard.text)
    return batch_guard


def checked(compiled: Callable[..., Any], gm: GraphModule, trace: Trace) -> Callable[..., Any]:
    """`compiled`, which takes the inputs of `gm`; it checks the assumptions if this torch has no data guards.

    Raises `KeyError` if a number in the assumptions cannot be computed from the graph's inputs.
    """
    found = assumptions_of(trace) if not can_guard() else []
    if not found:
        return compiled
    batch_guard = BatchGuard(found, trace)
    places: dict[Any, int] = {}
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        places[source(node)] = places[symbol(node.meta.get("example_value"))] = position
    keys = batch_guard.sources[: batch_guard.roots] + batch_guard.sizes
    positions = [places[key] for key in keys]

    def run(*inputs: Any) -> Any:
        chosen = [inputs[position] for position in positions]
        broken = batch_guard.broken(chosen)
        if broken:
            raise AssumptionError(_message(broken, batch_guard.numbers(chosen)))
        return compiled(*inputs)

    return run


def _message(broken: Sequence[Assumption], values: dict[Any, Any]) -> str:
    names = {name: values[found] for assumption in broken for found, name in assumption.names.items()}
    return (
        f"the batch breaks what the compiled graph assumes: {'; '.join(map(str, broken))}, but "
        f"{', '.join(f'{name} is {value}' for name, value in names.items())}. torch {torch.__version__} lacks the "
        'names by which another graph would be compiled; with options={"fastpack.capture": "off"}, such questions '
        "break the graph"
    )


class Numbers(PythonReferenceAnalysis):
    """Computes conditions with Python's numbers.

    PyTorch's own analysis divides integers, truncates, and combines bits as sympy does, and `torch.sym_min` rejects
    sympy's numbers.
    """

    int_truediv = staticmethod(operator.truediv)

    @staticmethod
    def trunc_to_int(x: float, dtype: torch.dtype) -> int:
        return math.trunc(x)

    bitwise_and = staticmethod(operator.and_)
    bitwise_or = staticmethod(operator.or_)
    bitwise_xor = staticmethod(operator.xor)


class BatchGuard:
    """Checks the assumptions of a graph for a batch.

    sources: Dynamo's source expressions of the guard's arguments: `roots` inputs of the graph, then `sizes`, then the
    tensors that the graph's own prologue reads, which are copied to the host in the same transfer.
    """

    def __init__(self, assumptions: list[Assumption], trace: Trace) -> None:
        assert trace.graph is not None
        graph = trace.graph
        free = sorted({found for a in assumptions for found in a.condition.free_symbols}, key=str)
        self.assumptions = assumptions
        self.text = "; ".join(map(str, assumptions))
        self.sizes = [found for found in free if graph.is_size(found)]
        self._symbols = [found for found in free if not graph.is_size(found)]
        program, roots = graph.program([graph.extra(found) for found in self._symbols])
        self.roots = len(roots)
        self.sources = [graph.source_of(root) for root in roots]
        self.sources += [graph.size_source(found) for found in self.sizes]
        self.sources += [name for name in dict.fromkeys(trace.companions) if name not in self.sources]
        self._prologue = Prologue(program, self.sources[: self.roots], autocast=trace.autocast)  # found by prefetching
        self._start()

    def _start(self) -> None:
        self._is_released = False
        self._verdicts: dict[tuple[Any, ...], list[Assumption]] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_verdicts", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def __call__(self, *inputs: Any) -> bool:
        """Whether the assumptions hold. False if an operator of the guard's program fails: the new trace raises again.

        `lengths[2]` fails for a batch of two; the user's program avoids it, because it has read the size before.
        """
        if self._is_released:
            return False
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        with unseen():
            to_host([tensor for tensor in tensors if not tensor.is_floating_point()], self._prologue.cache)
        try:
            return not self.broken(inputs)
        except (OperatorFailed, MetadataError) as error:
            log.debug("a batch does not have the numbers of %s", self.text, exc_info=error)
            return False

    def broken_in(self, names: Mapping[str, Any]) -> list[Assumption] | None:
        """The assumptions that do not hold in a frame, whose locals and globals are `names` of `sources`.

        All of them if their numbers cannot be computed for the batch; None if the frame does not have the inputs.
        """
        try:
            inputs = [eval(source, {**guard_names(), **names}) for source in self.sources]
        except Exception as error:
            log.debug("a frame does not have the inputs of %s", self.text, exc_info=error)
            return None
        try:
            return self.broken(inputs)
        except Exception as error:
            log.debug("a batch does not have the numbers of %s", self.text, exc_info=error)
            return list(self.assumptions)

    def release(self) -> None:
        """Free the prologue once no guarded graph is left: from then on the guard holds for no batch."""
        self.__dict__.pop("_prologue", None)
        self._is_released = True

    def numbers(self, inputs: Sequence[Any]) -> dict[Any, Any]:
        """The values of all symbols, for inputs in the order of `sources`."""
        sizes = inputs[self.roots : self.roots + len(self.sizes)]
        values = (*self._prologue(inputs[: self.roots]), *sizes)
        symbols = (*self._symbols, *self.sizes)
        return {s: int(v) if isinstance(v, bool) else v for s, v in zip(symbols, values, strict=True)}

    def broken(self, inputs: Sequence[Any]) -> list[Assumption]:
        """The assumptions that do not hold for a batch."""
        values = self.numbers(inputs)
        key = tuple(values.values())
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = [a for a in self.assumptions if not sympy_interp(Numbers, values, a.condition)]
            with self._lock:
                if len(self._verdicts) >= _MOST_VERDICTS:
                    self._verdicts.clear()
                self._verdicts[key] = verdict
        return verdict
