"""Forward hooks that are registered again and again: one graph, however many of them a module has.

transformers adds a hook to the embedding each time checkpointing is switched on (`enable_input_require_grads`), and TRL
switches it off and on in every step of DPO, KTO, RLOO and GRPO. Dynamo guards the number of hooks, so each step would
need another graph.

    embedding._forward_hooks: [h], then [h, h'], then [h, h', h''], ...        traced, each time: [h]

with `def h(module, args, output): output.requires_grad_(True)`. Neighbouring hooks of equal effect are traced and
guarded as one if they are *idempotent*: running them again changes nothing (`dynamo/rules/idempotent_hooks.py`). Every
other hook is traced as often as it is registered, and guarded by itself.

Private names, checked on torch 2.11, 2.13 and 2.15, besides the handler's site: `NNModuleHooksDictVariable`;
`side_effects.has_pending_mutation_of_attr`; the sources of attributes and items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch._dynamo.source import AttrSource, DictGetItemSource
from torch._dynamo.variables import NNModuleHooksDictVariable
from torch._dynamo.variables.base import VariableTracker

from fxpasses.dynamo.checks import Check
from fxpasses.dynamo.dynamo_names import guard_on
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.rules.idempotent_hooks import distinct
from fxpasses.dynamo.trace import Trace
from fxpasses.graph.provenance import in_program

_WITH_KWARGS = {
    "_forward_hooks": "_forward_hooks_with_kwargs",
    "_forward_pre_hooks": "_forward_pre_hooks_with_kwargs",
}

handlers = Handlers()


class _Guards(dict[str, Any]):
    """The guards of modules with idempotent hooks, by the source of the hooks."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()


@handlers.at(
    method("torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable", "tp_getattro_impl", "var_getattr")
)
def hooks_of(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: str) -> Any:
    """`module._forward_hooks`, with one hook for neighbours of equal effect."""
    if name not in _WITH_KWARGS or not self.source:
        return NOT_HANDLED
    if tx.output.side_effects.has_pending_mutation_of_attr(self, name):
        return NOT_HANDLED
    hooks, with_kwargs = getattr(self.value, name), getattr(self.value, _WITH_KWARGS[name])
    effects = distinct(hooks, with_kwargs)
    if all(effect is None for _, effect in effects):
        return NOT_HANDLED
    source = AttrSource(self.source, name)
    _guard(trace, tx, self.source, source, AttrSource(self.source, _WITH_KWARGS[name]), expected=_compared(effects))
    items = {}
    for key, effect in effects:
        own = DictGetItemSource(source, key) if effect is None else None  # an idempotent hook reaches only arguments
        items[VariableTracker.build(tx, key)] = VariableTracker.build(tx, hooks[key], source=own)
    return NNModuleHooksDictVariable(items)


def _guard(trace: Trace, tx: Any, module: Any, hooks: Any, with_kwargs: Any, expected: list[Any]) -> None:
    """Guard a module's hooks once: Dynamo compares guards by identity, and drops those of a body that it retraces."""
    guard = trace.state(_Guards).get(hooks.name)
    if guard is None:
        is_data = not any(isinstance(each, int) for each in expected)  # keys of hooks are of the process
        text = f"the hooks of {in_program(module.name)} do the same"
        check = Check(_AreEqual(expected), Feature.HOOKS, trace.code, restart="kept" if is_data else "lost")
        guard = trace.state(_Guards)[hooks.name] = guard_on(check, [hooks.name, with_kwargs.name], text)
    tx.output.guards.add(guard)


@dataclass(frozen=True)
class _AreEqual:
    """Whether a module's hooks have the expected effects."""

    expected: list[Any]

    def __call__(self, hooks: Any, with_kwargs: Any) -> bool:
        return _compared(distinct(hooks, with_kwargs)) == self.expected


def _compared(effects: list[tuple[int, Any]]) -> list[Any]:
    """The list that a guard compares: the effect of each idempotent hook, and the identity of each other hook."""
    return [key if effect is None else effect for key, effect in effects]
