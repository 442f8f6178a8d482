"""LoRA on parameters, as on the weights of experts (PEFT's `target_parameters`), in one graph.

    with self._activate_lora(adapters):            # peft.tuners.lora.ParamWrapper
        result = self.base_layer(x)                # reads `gate_up_proj`, which is W + scaling * B @ A

PEFT parametrizes the parameter for as long as the call takes: `register_parametrization` gives the module another
class, and `remove_parametrizations` gives the old one back. Dynamo cannot trace either. Here the parametrization is
applied once, when it is registered, and until it is removed the module's attribute is the adapted value.

Private names, besides the handlers' sites: `output` and `f_code` of the translator; the attributes of `ParamWrapper`,
read in PEFT 0.21.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch.fx import GraphModule
from torch.nn.utils import parametrize

from fxpasses.dynamo.failures import FeatureRejected
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.rules.bound_methods import BoundMethod

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_FUNCTIONS = "torch._dynamo.variables.functions"
_REGISTERS, _REMOVES, _REGISTERED = "_activate_lora", "_remove_parametrizations", "parametrizations"

handlers = Handlers()


@dataclass(frozen=True)
class _Adapted:
    """module, name: the parameter's. value: Dynamo's variable of the adapted value."""

    module: nn.Module
    name: str
    value: Any


class _AdaptedParameters:
    """The parameters that are adapted at this point of the trace, the latest last."""

    def __init__(self, trace: Trace) -> None:
        self._output: Any = None
        self._active: list[_Adapted] = []

    def of(self, tx: Any) -> list[_Adapted]:
        """Dynamo may begin again; what was adapted by then is not any more."""
        if self._output is not tx.output:
            self._output, self._active = tx.output, []
        return self._active

    @property
    def are_there(self) -> bool:
        return bool(self._active)


def check(trace: Trace, gm: GraphModule | None, rewritten: GraphModule | None) -> None:
    """Raise `FeatureRejected` for a graph that ends inside: the program would go on without the parametrization."""
    if trace.state(_AdaptedParameters).are_there:
        raise FeatureRejected(Feature.ADAPTED, "the graph breaks while a parameter is adapted")


@handlers.at(method(f"{_FUNCTIONS}.UserFunctionVariable", "call_function"), order=2)
def register(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.fn is not parametrize.register_parametrization or not _is_in_peft(tx) or len(args) != 3 or kwargs:
        return NOT_HANDLED
    module, name, _ = args
    owner = getattr(module, "value", None)
    if not isinstance(owner, nn.Module) or not name.is_python_constant() or parametrize.is_parametrized(owner):
        return NOT_HANDLED
    value = UserFunctionVariable(cast(FunctionType, _adapted)).call_function(tx, list(args), {})
    trace.state(_AdaptedParameters).of(tx).append(_Adapted(owner, name.as_python_constant(), value))
    return ConstantVariable.create(None)


@handlers.at(method(f"{_FUNCTIONS}.UserMethodVariable", "call_function"), order=3)
def remove(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    active = trace.state(_AdaptedParameters).of(tx)
    called = BoundMethod.of(self)
    if not active or called is None or not called.is_defined_in("peft.", _REMOVES):
        return NOT_HANDLED
    active.pop()
    return ConstantVariable.create(None)


@handlers.at(
    method("torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable", "tp_getattro_impl", "var_getattr"),
    order=2,
)
def read(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: str) -> Any:
    active = trace.state(_AdaptedParameters).of(tx)
    own = {each.name: each.value for each in active if each.module is self.value}
    if name == _REGISTERED and own:
        return UserFunctionVariable(cast(FunctionType, _registered)).call_function(
            tx, [ConstantVariable.create([*own][-1])], {}
        )
    return own.get(name, NOT_HANDLED)


def _is_in_peft(tx: Any) -> bool:
    return tx.f_code.co_name == _REGISTERS and str(tx.f_globals.get("__name__")).startswith("peft.")


# Traced in place of `register_parametrization`, and of what PEFT reads of it


def _adapted(module: Any, name: str, parametrization: Any) -> Any:
    return parametrization(getattr(module, name))


def _registered(name: str) -> dict[str, Any]:
    """`module.parametrizations`: PEFT calls `module.parametrizations[name].original.requires_grad_(...)`."""
    return {name: _Parametrizations()}


class _Original:
    def requires_grad_(self, requires_grad: bool) -> _Original:
        return self


class _Parametrizations:
    def __init__(self) -> None:
        self.original = _Original()
