"""Hooks whose code changes nothing when it runs again: `output.requires_grad_(True)`.

Nothing is guessed from a name. A hook is *idempotent* if its code reaches nothing but its arguments (no globals, no
closure, no default values), has no jumps, only calls `requires_grad_` on its arguments or their elements, and returns
None or its last argument unchanged. The hook's *effect* is found by running it on stand-ins that allow just that. The
effect depends on the code alone, so it is found once for all hooks that one `def` makes.
"""

from __future__ import annotations

import dis
import inspect
import weakref
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

# The calls of `requires_grad_`, each with the path to its object and the value that it sets; and whether the hook
# returns its last argument.
Effect = tuple[tuple[tuple[tuple[int, ...], bool], ...], bool]

_SETTER = "requires_grad_"
_ELSEWHERE = ("GLOBAL", "NAME", "DEREF", "JUMP", "FOR_", "IMPORT", "YIELD", "AWAIT")  # parts of instructions' names
_UNUSUAL = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
_UNUSUAL |= inspect.CO_ASYNC_GENERATOR


def distinct(hooks: Mapping[int, Any], with_kwargs: Mapping[int, Any]) -> list[tuple[int, Effect | None]]:
    """The keys and effects of a module's hooks, in order; neighbours of equal effect are listed once.

    The effect is None for a hook that is not known to be idempotent. hooks, with_kwargs: `module._forward_hooks` and
    `module._forward_hooks_with_kwargs`, or those that run before forward.
    """
    found: list[tuple[int, Effect | None]] = []
    before = None
    for key, hook in hooks.items():
        code = _plain_code(hook)
        if code is not None and code is before and key not in with_kwargs:
            continue  # a long run may register thousands of hooks
        effect = _effect_of(code) if code is not None and key not in with_kwargs else None
        before = code if effect is not None else None
        if effect is None or not found or effect != found[-1][1]:
            found.append((key, effect))
    return found


def _plain_code(hook: Any) -> CodeType | None:
    """The code of a function without default values; None for anything else."""
    if type(hook) is not FunctionType or hook.__defaults__ is not None or hook.__kwdefaults__ is not None:
        return None
    return hook.__code__


def _effect_of(code: CodeType) -> Effect | None:
    if code not in _effects:
        _effects[code] = _find(code)
    return _effects[code]


def _find(code: CodeType) -> Effect | None:
    if code.co_names != (_SETTER,) or code.co_flags & _UNUSUAL or code.co_kwonlyargcount:
        return None
    if any(part in instruction.opname for instruction in dis.get_instructions(code) for part in _ELSEWHERE):
        return None
    calls: list[tuple[tuple[int, ...], bool]] = []
    arguments = [_StandIn(calls, (position,)) for position in range(code.co_argcount)]
    try:
        returned = FunctionType(code, {})(*arguments)
    except Exception:  # it does something else to its arguments
        return None
    if not arguments or (returned is not None and returned is not arguments[-1]):
        return None
    return tuple(calls), returned is not None


class _StandIn:
    """Stands for an argument of a hook, or for an element of one."""

    __slots__ = ("_calls", "_path")

    def __init__(self, calls: list[tuple[tuple[int, ...], bool]], path: tuple[int, ...]) -> None:
        self._calls = calls
        self._path = path

    def requires_grad_(self, requires_grad: bool = True) -> _StandIn:
        if type(requires_grad) is not bool:
            raise TypeError
        self._calls.append((self._path, requires_grad))
        return self

    def __getitem__(self, index: int) -> _StandIn:
        if type(index) is not int:
            raise TypeError
        return _StandIn(self._calls, (*self._path, index))

    def __bool__(self) -> bool:
        raise TypeError

    __iter__ = None
    __eq__ = None  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


_effects: weakref.WeakKeyDictionary[CodeType, Effect | None] = weakref.WeakKeyDictionary()
