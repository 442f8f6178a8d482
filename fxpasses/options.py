"""Every option of the backend: its key, type, default and check."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

PREFIX = "fastpack."
PASSES = ("hoist_metadata",)
LOWERINGS = ("inductor", "aot_eager", "eager")


@dataclass(frozen=True)
class Options:
    """The backend's options, as given in `torch.compile(..., options={"fastpack.<name>": value})`.

    passes: names of the passes to run, in the pipeline's own order. lowering: what compiles the result. verify: run
    each pass's input and output on the example inputs and compare (slow; for debugging). strict: raise where a pass
    fails, instead of going on with the graph as it was. inductor: every option without the prefix, for Inductor.
    """

    passes: tuple[str, ...] = PASSES
    lowering: str = "inductor"
    verify: bool = False
    strict: bool = False
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Check the options of a `torch.compile` call; raises `ValueError` that names the key, value and choices."""
        given = dict(given or {})
        own = {key: given.pop(key) for key in list(given) if str(key).startswith(PREFIX)}
        known = [PREFIX + option.name for option in fields(cls) if option.name != "inductor"]
        for key in own:
            if key not in known:
                raise ValueError(_unknown(key, known))
        values = {key.removeprefix(PREFIX): value for key, value in own.items()}
        for name in ("verify", "strict"):
            if name in values and not isinstance(values[name], bool):
                raise ValueError(f"{PREFIX}{name} is {values[name]!r}; it takes True or False")
        if "lowering" in values and values["lowering"] not in LOWERINGS:
            raise ValueError(f"{PREFIX}lowering is {values['lowering']!r}; choices: {', '.join(LOWERINGS)}")
        if "passes" in values:
            values["passes"] = _passes(values["passes"])
        options = cls(**values, inductor=given)
        if options.lowering != "inductor" and (given or mode):
            what = ", ".join(map(repr, given)) or f"mode={mode!r}"
            raise ValueError(f'{what} goes to Inductor, but {PREFIX}lowering is "{options.lowering}"; leave one out')
        return options


def _passes(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ValueError(f"{PREFIX}passes is {value!r}; it takes a list of pass names: {', '.join(PASSES)}")
    for name in value:
        if name not in PASSES:
            raise ValueError(f"{PREFIX}passes holds {name!r}; choices: {', '.join(PASSES)}{_nearest(name, PASSES)}")
    return tuple(name for name in PASSES if name in value)


def _unknown(key: str, known: list[str]) -> str:
    return f"unknown option {key!r}; choices: {', '.join(known)}{_nearest(key, known)}"


def _nearest(name: Any, known: list[str] | tuple[str, ...]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
