"""The places of modules in what nodes say of the modules that they are in, as if another module had been called.

    L['self'].layers.0.norm         a node of `layers[0]`      L['self'].layers.1.norm     its copy for `layers[1]`

Private names, checked on torch 2.11, 2.13 and 2.15: the keys and paths of `nn_module_stack`, a module's
`get_nn_module_stack_source`.
"""

from __future__ import annotations

import re
from typing import Any

from fxpasses.dynamo.module_calls import Call


class Renaming:
    """The names of one module's parts as another's, in what nodes say of the modules that they are in."""

    def __init__(self, old: Call, new: Call) -> None:
        ones, others = (dict(call.module.value.named_modules(remove_duplicate=False)) for call in (old, new))
        self._keys = {str(id(one)): str(id(others[name])) for name, one in ones.items() if name in others}
        self._old, self._new = (_path(call.module) for call in (old, new))
        self._around, self._now_around = old.stack, new.stack

    def path(self, name: str) -> str:
        is_own = name == self._old or name.startswith(self._old + ".")
        return self._new + name.removeprefix(self._old) if is_own else name

    def describe(self, meta: dict[str, Any]) -> None:
        stack = meta.get("nn_module_stack", {})
        inside = {key: value for key, value in stack.items() if key not in self._around}
        renamed = {self._key(key): (self.path(value[0]), *value[1:]) for key, value in inside.items()}
        if stack or self._now_around:
            meta["nn_module_stack"] = {**self._now_around, **renamed}

    def _key(self, key: str) -> str:
        identity, at, count = key.partition("@")
        return self._keys.get(identity, identity) + at + count


def _path(module: Any) -> str:
    """As in `nn_module_stack`: `L['self'].layers.0`."""
    return re.sub(
        r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]", r".\2", module.get_nn_module_stack_source().name
    )
