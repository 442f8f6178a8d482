"""Every option of the backend: its key, type, default and check."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

PREFIX = "fastpack."
PASSES = ("group_experts", "hoist_metadata")
LOWERINGS = ("inductor", "aot_eager", "eager")
CAPTURE = ("on", "off")
EXPERTS = ("auto", "slices", "grouped", "off")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Options:
    """The backend's options, as given in `torch.compile(..., options={"fastpack.<name>": value})`.

    passes: names of the passes to run, in the pipeline's own order. lowering: what compiles the result. capture: "off"
    leaves questions that the program asks of its batch to Dynamo, which breaks the graph at most of them. experts:
    how far loops over experts are rewritten: "slices" asks for the tokens of all experts at once, "grouped" runs the
    loop as one program where that is proved, "auto" does the second and else the first, "off" neither. verify: run each
    pass's input and output on the example inputs and compare (slow; for debugging). strict: raise where a pass fails,
    instead of going on with the graph as it was. mode:
    `torch.compile`'s, for Inductor; as an option because `torch.compile` does not take `mode` and `options` together.
    inductor: every option without the prefix.
    """

    passes: tuple[str, ...] = PASSES
    lowering: str = "inductor"
    capture: str = "on"
    experts: str = "auto"
    verify: bool = False
    strict: bool = False
    mode: str | None = None
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
        for name, choices in (("capture", CAPTURE), ("experts", EXPERTS)):
            if name in values and values[name] not in choices:
                raise ValueError(f"{PREFIX}{name} is {values[name]!r}; choices: {', '.join(choices)}")
        if "passes" in values:
            values["passes"] = _passes(values["passes"])
        if mode is not None and values.setdefault("mode", mode) != mode:
            raise ValueError(f"mode is {mode!r}, and {PREFIX}mode is {values['mode']!r}; give one")
        if "mode" in values and values["mode"] not in MODES:
            raise ValueError(
                f"mode is {values['mode']!r}; choices: {', '.join(MODES)}{_nearest(values['mode'], MODES)}"
            )
        options = cls(**values, inductor=given)
        if options.lowering != "inductor" and (given or options.mode):
            what = ", ".join(map(repr, given)) or f"mode={options.mode!r}"
            raise ValueError(f'{what} goes to Inductor, but {PREFIX}lowering is "{options.lowering}"; leave one out')
        _check_inductor(given)
        return options


def _check_inductor(given: Mapping[str, Any]) -> None:
    if not given:
        return
    from torch._inductor import list_options

    known = list_options()
    for key in given:
        name = str(key).replace("-", "_")
        if name not in known:
            raise ValueError(
                f"unknown option {key!r}: it lacks the prefix {PREFIX!r}, and Inductor has none of that name"
                f"{_nearest(name, known)}"
            )


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
