"""Every option of the backend: its key, type, default and check."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

PREFIX = "fastpack."
PASSES = ("group_experts", "sparsify_attention", "hoist_metadata", "omit_masks", "coalesce_reads",
          "offload_activations")  # fmt: skip
LOWERINGS = ("inductor", "aot_eager", "eager")
CAPTURE = ("on", "off")
EXPERTS = ("auto", "slices", "grouped", "off")
ATTENTION = ("auto", "dense")
TIERS = ("off", "host", "disk")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Offload:
    """Where activations wait for backward: `fastpack.offload`, and `fastpack.offload.<name>` for the others.

    tier: "off"; "host", the host's memory, from an accelerator; or "disk", unlinked files in `directory`, from the CPU
    or an accelerator. directory: "" is the system's temporary one. min_bytes: tensors of fewer bytes are kept.
    keep_last: so many of the tensors that a graph computes are kept, the first that backward needs. buffers: how many
    tensors may be on their way or just used at a time; 1 waits for every copy. device_budget: bytes; move no more than
    brings the peak that is predicted for the graph under it. host_budget: bytes of host memory, at most.
    """

    tier: str = "off"
    directory: str = ""
    min_bytes: int = 1 << 20
    keep_last: int = 1
    buffers: int = 2
    device_budget: int | None = None
    host_budget: int | None = None

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Offload:
        """Check values by key, without the prefix `fastpack.`; raises `ValueError`."""
        values = {key.removeprefix("offload").removeprefix(".") or "tier": value for key, value in given.items()}
        if values.get("tier", "off") not in TIERS:
            raise ValueError(f"{PREFIX}offload is {values['tier']!r}; choices: {', '.join(TIERS)}")
        for name, low in (("min_bytes", 0), ("keep_last", 0), ("buffers", 1), ("device_budget", 0), ("host_budget", 0)):
            value = values.get(name, low)
            may_be_none = name.endswith("_budget")
            if not (type(value) is int and value >= low) and not (value is None and may_be_none):
                unit = "buffers" if name == "buffers" else "tensors" if name == "keep_last" else "bytes"
                none = ", or None" if may_be_none else ""
                raise ValueError(
                    f"{PREFIX}offload.{name} is {value!r}; it takes a whole number of {unit} from {low}{none}"
                )
        directory = values.get("directory", "")
        if not isinstance(directory, (str, os.PathLike)):
            raise ValueError(f"{PREFIX}offload.directory is {directory!r}; it takes a path")
        if directory:
            values["directory"] = os.path.abspath(directory)
            if not os.path.isdir(directory) or not os.access(directory, os.W_OK | os.X_OK):
                raise ValueError(f"{PREFIX}offload.directory is {str(directory)!r}; there is no directory to write to")
        return cls(**values)


@dataclass(frozen=True)
class Options:
    """The backend's options, as given in `torch.compile(..., options={"fastpack.<name>": value})`.

    passes: names of the passes to run, in the pipeline's own order. lowering: what compiles the result. capture: "off"
    leaves questions that the program asks of its batch to Dynamo, which breaks the graph at most of them. experts:
    how far loops over experts are rewritten: "slices" asks for the tokens of all experts at once, "grouped" runs the
    loop as one program where that is proved, "auto" does the second and else the first, "off" neither. attention:
    "auto" has attention compute what the batch's mask allows, "dense" leaves it alone. offload: see `Offload`. verify:
    run each pass's input and output on the example inputs and compare (slow; for debugging). strict: raise where a pass
    fails, instead of going on with the graph as it was. mode: `torch.compile`'s, for Inductor; as an option because
    `torch.compile` does not take `mode` and `options` together. inductor: every option without prefix.
    """

    passes: tuple[str, ...] = PASSES
    lowering: str = "inductor"
    capture: str = "on"
    experts: str = "auto"
    attention: str = "auto"
    offload: Offload = Offload()
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
        known += [f"{PREFIX}offload.{option.name}" for option in fields(Offload) if option.name != "tier"]
        for key in own:
            if key not in known:
                raise ValueError(_unknown(key, known))
        values = {key.removeprefix(PREFIX): value for key, value in own.items()}
        offload = {key: values.pop(key) for key in list(values) if key.split(".")[0] == "offload"}
        if offload:
            values["offload"] = Offload.parse(offload)
        for name in ("verify", "strict"):
            if name in values and not isinstance(values[name], bool):
                raise ValueError(f"{PREFIX}{name} is {values[name]!r}; it takes True or False")
        if "lowering" in values and values["lowering"] not in LOWERINGS:
            raise ValueError(f"{PREFIX}lowering is {values['lowering']!r}; choices: {', '.join(LOWERINGS)}")
        for name, choices in (("capture", CAPTURE), ("experts", EXPERTS), ("attention", ATTENTION)):
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
        if options.offload.tier != "off" and options.lowering == "eager":
            raise ValueError(
                f'{PREFIX}offload is "{options.offload.tier}", but {PREFIX}lowering is "eager", which has no backward '
                'graph; use "aot_eager" or "inductor"'
            )
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
