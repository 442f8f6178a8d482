"""Random blocks of attention, drawn by NumPy from a constant seed in each forward pass (BigBird), in one graph.

    np.random.seed(layer)                                               # a constant
    blocks = self._bigbird_block_rand_mask_with_head(length, ...)       # np.random.permutation, 2 * blocks times

Dynamo seeds PyTorch's generator instead, so that the blocks are not those of eager mode, and breaks the graph at each
draw. But a draw from a constant seed is a constant: here NumPy is seeded for the trace, the method runs once, and its
arrays are constants of the graph. Each call of the compiled frame leaves NumPy's generator as the method does.

Calls with arguments that are not constants (a symbolic length) are left to Dynamo, and the graph breaks; even then the
blocks are eager mode's, since the frame seeds NumPy before the break. With checkpoints, eager mode draws last in the
recomputation of the first layer; here the last layer draws last.

Private names, checked on torch 2.13, besides the handlers' sites: `OutputGraph.random_calls`, functions
that the frame calls before its graph. Seen in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable

from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.rules.bound_methods import BoundMethod

try:
    import numpy
except ImportError:  # no model can draw with it either
    numpy = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_MODULES = ("transformers.models.big_bird.", "transformers.models.bigbird_pegasus.")
_DRAWS = ("_bigbird_block_rand_mask", "_bigbird_block_rand_mask_with_head")

handlers = Handlers()


class _NumpyState:
    """value: the state of NumPy's generator, once the program has seeded it."""

    def __init__(self, trace: Trace) -> None:
        self.value: Any = None


@handlers.at(method("torch._dynamo.variables.misc.NumpyVariable", "call_function"))
def seed(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if numpy is None or self.value != numpy.random.seed or not tx.f_globals.get("__name__", "").startswith(_MODULES):
        return NOT_HANDLED
    if len(args) != 1 or kwargs or not args[0].is_python_constant():
        return NOT_HANDLED
    number = args[0].as_python_constant()
    if type(number) is not int:  # None takes a seed from the system
        return NOT_HANDLED
    with _numpy_at(None):
        numpy.random.seed(number)
        _leaves(trace, tx, numpy.random.get_state())
    return ConstantVariable.create(None)


@handlers.at(method("torch._dynamo.variables.functions.UserMethodVariable", "call_function"), order=2)
def draw(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    bound = BoundMethod.of(self)
    if bound is None or not bound.is_defined_in(_MODULES, *_DRAWS):
        return NOT_HANDLED
    module = bound.module
    if not all(value.is_python_constant() for value in (*args, *kwargs.values())):
        return NOT_HANDLED
    if module.training and trace.state(_NumpyState).value is None:
        return NOT_HANDLED
    given = [value.as_python_constant() for value in args]
    named = {name: value.as_python_constant() for name, value in kwargs.items()}
    with _numpy_at(trace.state(_NumpyState).value):
        drawn = bound.function(module, *given, **named)
        if module.training:  # otherwise there is one plan, guarded by the caller's question about `training`
            _leaves(trace, tx, numpy.random.get_state())
    if isinstance(drawn, numpy.ndarray):
        return _constant(tx, drawn)
    return ListVariable([_constant(tx, array) for array in drawn], mutation_type=ValueMutationNew())


@contextmanager
def _numpy_at(state: Any) -> Iterator[None]:
    """Run with NumPy's generator in a state, and leave it as it was."""
    before = numpy.random.get_state()
    try:
        if state is not None:
            numpy.random.set_state(state)
        yield
    finally:
        numpy.random.set_state(before)


def _leaves(trace: Trace, tx: Any, state: Any) -> None:
    """Have the frame leave NumPy's generator in a state."""
    trace.state(_NumpyState).value = state
    calls = tx.output.random_calls  # its other calls are known by their index
    call: tuple[Any, ...] = (numpy.random.set_state, (state,), {})
    earlier = [place for place, (function, *_) in enumerate(calls) if function == numpy.random.set_state]
    if earlier:
        calls[earlier[0]] = call
    else:
        calls.append(call)


def _constant(tx: Any, array: numpy.ndarray) -> Any:
    dtype = torch.from_numpy(array).dtype
    proxy = tx.output.create_proxy("call_function", torch.tensor, (array.tolist(),), {"dtype": dtype})
    return NumpyNdarrayVariable.create(tx, proxy)
