"""The options of compilations that give none: from `set_default_options`, and from `FASTPACK_OPTIONS`.

Frameworks that call `torch.compile(model, backend="fastpack")` themselves, Trainer and accelerate, pass no options on.
A call's own options come first, then those of `set_default_options`, then those of the environment, key by key.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from typing import Any

from fxpasses.options import PREFIX, Options

VARIABLE = "FASTPACK_OPTIONS"
_MODE = PREFIX + "mode"

# State of the process: the caller of `torch.compile` is a framework that does not know these options.
_set: dict[str, Any] = {}


def set_default_options(options: Mapping[str, Any] | None = None) -> None:
    """Use `options` for later compilations that do not give them; they replace the options of an earlier call.

    options: as in `torch.compile(..., options=...)`: keys `fastpack.*`, and Inductor's; None or {} for none. They take
    precedence over `FASTPACK_OPTIONS`. Raises `ValueError` for unknown keys and wrong values.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"the options are {options!r}; pass a dict, such as {{'{PREFIX}experts': 'slices'}}")
    given = dict(options or {})
    Options.parse(given)
    _set.clear()
    _set.update(given)


def get(key: str) -> Any:
    """A default by its key; None if there is none."""
    return _defaults().get(key)


def parse(given: Mapping[str, Any] | None, mode: str | None = None) -> Options:
    """The options of a call, completed by the defaults; raises `ValueError`, which says where a default comes from."""
    given = dict(given or {})
    own = Options.parse(given, mode)
    defaults = _defaults()
    if not defaults:
        return own
    if mode is not None and _MODE not in given:
        defaults.pop(_MODE, None)  # the call has its own
    try:
        return Options.parse({**defaults, **given}, mode)
    except ValueError as error:
        sources = " and ".join(_sources())
        raise ValueError(f"{error} (the call gives {given}; the rest comes from {sources})") from None


def from_environment() -> dict[str, Any]:
    """The options in `FASTPACK_OPTIONS`; raises `ValueError`, which names the variable."""
    text = os.environ.get(VARIABLE, "")
    return dict(_checked(text)) if text.strip() else {}


def _defaults() -> dict[str, Any]:
    return {**from_environment(), **_set}


def _sources() -> list[str]:
    return [VARIABLE] * bool(from_environment()) + ["fxpasses.set_default_options"] * bool(_set)


@functools.lru_cache(maxsize=8)
def _checked(text: str) -> Mapping[str, Any]:
    example = f"""a JSON object, such as {VARIABLE}='{{"{PREFIX}experts": "slices"}}'"""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{VARIABLE} is {text!r}, which is not JSON ({error}); it takes {example}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{VARIABLE} is {text!r}; it takes {example}")
    try:
        Options.parse(found)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None
    return found
