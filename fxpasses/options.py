"""The options of the backend: key, type, default and check of each."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fxpasses import registry
from fxpasses.base.units import bytes_in

PREFIX = "fastpack."
_CHOICES = {
    "lowering": ("inductor", "aot_eager", "eager"),
    "capture": ("on", "off"),
    "experts": ("auto", "slices", "grouped", "off"),
    "adapters": ("merged", "factored"),
    "attention": ("auto", "dense"),
    "rows": ("auto", "live", "all"),
    "loss": ("auto", "chunks", "full"),
    "outputs": ("exact", "lazy"),
    "topk": ("off", "split"),
    "fold": ("auto", "on", "off"),
    "generation": ("eager", "compiled"),
    "start": ("compiled", "eager"),
}
_WHOLE_NUMBERS = {
    "min_bytes": (0, "bytes"), "keep_last": (0, "tensors"), "buffers": (1, "buffers"),
    "device_budget": (0, "bytes"), "host_budget": (0, "bytes"),
}  # fmt: skip
# A folded layer is called from Python, in forward and backward, and nothing is fused across its border. Four layers are
# the fewest for which the time of a compilation counts more (bench case `compile_time`).
FOLD_LEAST = {"auto": 4, "on": 2}
TIERS = ("off", "host", "disk")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def _without_unit(value: str) -> int | str:
    """Bytes, if the text is a number of them; else the text."""
    known = bytes_in(value)
    return value if known is None else known


@dataclass(frozen=True)
class Offload:
    """Where activations wait for backward: `fastpack.offload` is the tier, `fastpack.offload.<name>` the rest.

    tier: "off"; "host", the host's memory, for an accelerator; or "disk", unlinked files in `directory`, for the CPU or
    an accelerator. directory: "" is the system's temporary directory. min_bytes: smaller tensors are kept.
    keep_last: the number of computed tensors to keep, those that backward needs first. buffers: the number of tensors
    that may be in flight or in use at a time; 1 waits for every copy. device_budget: bytes; the graph's predicted peak
    is brought below it, and no further. host_budget: the most bytes of host memory.
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
        for name, (low, unit) in _WHOLE_NUMBERS.items():
            value = values.get(name, low)
            if unit == "bytes" and isinstance(value, str):
                value = values[name] = _without_unit(value)
            may_be_none = name.endswith("_budget")
            if not (type(value) is int and value >= low) and not (value is None and may_be_none):
                example = ', such as 2**30 or "1GiB"' * (unit == "bytes")
                takes = f"a whole number of {unit} from {low}{', or None' * may_be_none}{example}"
                raise ValueError(f"{PREFIX}offload.{name} is {value!r}; it takes {takes}")
        directory = values.get("directory", "")
        if not isinstance(directory, (str, os.PathLike)):
            raise ValueError(f"{PREFIX}offload.directory is {directory!r}; it takes a path")
        if directory:
            values["directory"] = os.path.abspath(directory)
            if not os.path.isdir(directory) or not os.access(directory, os.W_OK | os.X_OK):
                raise ValueError(f"{PREFIX}offload.directory is {str(directory)!r}; there is no directory to write to")
        return cls(**values)


@dataclass(frozen=True)
class Memory:
    """How much memory a step may take: `fastpack.memory` is the budget, `fastpack.memory.<name>` the rest.

    budget: "off"; bytes of the device that the model is on, as a whole number or "40GiB"; or a share of them, such as
    "80%", on the CPU of what the process may use. checkpoints: "keep" recomputes at least what the model's own
    checkpoints do; "free" saves what they recompute where it fits.
    """

    budget: int | str = "off"
    checkpoints: str = "keep"

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Memory:
        """Check values by key, without the prefix `fastpack.`; raises `ValueError`."""
        values = {key.removeprefix("memory").removeprefix(".") or "budget": value for key, value in given.items()}
        budget = values.get("budget", "off")
        if isinstance(budget, str):
            budget = values["budget"] = _without_unit(budget)
        is_share = isinstance(budget, str) and re.fullmatch(r"(100|[1-9][0-9]?)%", budget)
        if not (budget == "off" or is_share or (type(budget) is int and budget > 0)):
            takes = 'bytes from 1, as a number or as "40GiB", a share of the device from "1%" to "100%", or "off"'
            raise ValueError(f"{PREFIX}memory is {budget!r}; it takes {takes}")
        if values.get("checkpoints", "keep") not in ("keep", "free"):
            raise ValueError(f"{PREFIX}memory.checkpoints is {values['checkpoints']!r}; choices: keep, free")
        return cls(**values)


@dataclass(frozen=True)
class Options:
    """The backend's options, as given in `torch.compile(..., options={"fastpack.<name>": value})`.

    passes: the passes to run, in the pipeline's own order. lowering: the compiler of the result. capture: "off" leaves
    the program's reads of its batch to Dynamo, which breaks the graph at most of them. experts: how loops over experts
    are rewritten: "slices" reads the tokens of all experts at once, "grouped" runs the loop as one program if that is
    proved correct, "auto" tries "grouped" and then "slices", "off" does nothing. adapters: "factored" applies LoRA on
    the frozen weights of experts to the rows, which rounds otherwise; "merged" makes adapted weights, as the program
    does. attention: "auto" computes only the pairs that the batch's mask allows, "dense" leaves attention alone. rows:
    "auto" computes only the tokens that can reach the loss, on the CPU; "live" does so on CUDA devices as well, "all"
    computes all. loss: "auto" computes a loss in chunks of rows, so that its logits never exist in full, on the CPU and
    if that takes no more time; "chunks" does so on CUDA devices as well, and if backward has to compute the logits
    again; "full" does not. outputs: "lazy"
    returns logits beside a loss as tensors that are computed when something reads them; "exact" computes all outputs.
    topk: "split" takes the top-k of long rows in two stages, where another one of equal values may win; "off" does not.
    fold: "auto" compiles a layer that occurs four times or more only once, if Inductor compiles it; "on" also a layer
    that occurs twice, under any lowering; "off" does nothing. generation: "eager" runs transformers' `generate`
    uncompiled if the model is in training mode, or if its frame has 4 graphs, so that it does not use up Dynamo's
    graphs; "compiled" treats it like any other call. start: "eager" runs the first steps uncompiled, while another
    process compiles them; "compiled" waits for the compiler.
    memory: see `Memory`.
    offload: see `Offload`. verify: run each pass's input and output on the example inputs and compare (slow; for
    debugging). strict: raise if a pass fails, instead of continuing with its input. mode: `torch.compile`'s, for
    Inductor; an option because `torch.compile` does not take `mode` and `options` together. inductor: every option
    without prefix.
    """

    passes: tuple[str, ...] = field(default_factory=registry.names)
    lowering: str = "inductor"
    capture: str = "on"
    experts: str = "auto"
    adapters: str = "merged"
    attention: str = "auto"
    rows: str = "auto"
    loss: str = "auto"
    outputs: str = "exact"
    topk: str = "off"
    fold: str = "auto"
    generation: str = "eager"
    start: str = "compiled"
    memory: Memory = Memory()
    offload: Offload = Offload()
    verify: bool = False
    strict: bool = False
    mode: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folds(self) -> bool:
        """Whether `fold` asks for anything under the lowering."""
        return self.fold == "on" or (self.fold == "auto" and self.lowering == "inductor")

    @property
    def offloads(self) -> bool:
        return self.offload.tier != "off" and "offload_activations" in self.passes

    @property
    def takes_whole_graphs(self) -> bool:
        """Whether Inductor will record CUDA graphs, or freeze parameters into the code."""
        from torch._inductor import config, list_mode_options

        given = {**(list_mode_options(self.mode) if self.mode else {}), **self.inductor}
        given = {str(key).replace("-", "_"): value for key, value in given.items()}
        return bool(given.get("triton.cudagraphs", config.triton.cudagraphs) or given.get("freezing", config.freezing))

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Check the options of a `torch.compile` call; raises `ValueError` with the key, the value and the choices."""
        given = dict(given or {})
        own = {key: given.pop(key) for key in list(given) if str(key).startswith(PREFIX)}
        known = [PREFIX + option.name for option in fields(cls) if option.name != "inductor"]
        known += [f"{PREFIX}offload.{option.name}" for option in fields(Offload) if option.name != "tier"]
        known += [f"{PREFIX}memory.{option.name}" for option in fields(Memory) if option.name != "budget"]
        for key in own:
            if key not in known:
                raise ValueError(f"unknown option {key!r}; choices: {', '.join(known)}{_nearest(key, known)}")
        values = {key.removeprefix(PREFIX): value for key, value in own.items()}
        offload = {key: values.pop(key) for key in list(values) if key.split(".")[0] == "offload"}
        if offload:
            values["offload"] = Offload.parse(offload)
        memory = {key: values.pop(key) for key in list(values) if key.split(".")[0] == "memory"}
        if memory:
            values["memory"] = Memory.parse(memory)
        for name in ("verify", "strict"):
            if name in values and not isinstance(values[name], bool):
                raise ValueError(f"{PREFIX}{name} is {values[name]!r}; it takes True or False")
        for name, choices in _CHOICES.items():
            if name in values and values[name] not in choices:
                raise ValueError(f"{PREFIX}{name} is {values[name]!r}; choices: {', '.join(choices)}")
        if "passes" in values:
            values["passes"] = _passes(values["passes"])
        if mode is not None and values.setdefault("mode", mode) != mode:
            raise ValueError(f"mode is {mode!r}, and {PREFIX}mode is {values['mode']!r}; give one")
        if "mode" in values and values["mode"] not in MODES:
            mode = values["mode"]
            raise ValueError(f"mode is {mode!r}; choices: {', '.join(MODES)}{_nearest(mode, MODES)}")
        if values.get("memory", Memory()).budget != "off":
            if values.get("lowering") == "eager":
                raise ValueError(
                    f'{PREFIX}memory is {values["memory"].budget!r}, but {PREFIX}lowering is "eager", which has no '
                    'backward graph; use "aot_eager" or "inductor"'
                )
            if values.get("fold", "auto") == "auto":
                values["fold"] = "on"  # what a layer saves is decided for one layer
        options = cls(**values, inductor=given)
        if options.offload.tier != "off" and options.lowering == "eager":
            raise ValueError(
                f'{PREFIX}offload is "{options.offload.tier}", but {PREFIX}lowering is "eager", which has no backward '
                'graph; use "aot_eager" or "inductor"'
            )
        if options.lowering != "inductor" and (given or options.mode):
            what = ", ".join(map(repr, given)) or f"mode={options.mode!r}"
            raise ValueError(f'{what} goes to Inductor, but {PREFIX}lowering is "{options.lowering}"; omit one of them')
        _check_inductor(given)
        return options


def _check_inductor(given: Mapping[str, Any]) -> None:
    if not given:
        return
    from torch._inductor import list_options

    known = list_options()
    own = {option.name for option in fields(Options)}
    for key in given:
        name = str(key).replace("-", "_")
        if name not in known and name in own:
            raise ValueError(
                f"unknown option {key!r}: it lacks the prefix {PREFIX!r} (did you mean {PREFIX + name!r}?)"
            )
        if name not in known:
            raise ValueError(
                f"unknown option {key!r}: it lacks the prefix {PREFIX!r}, and Inductor has none of that name"
                f"{_nearest(name, known)}"
            )


def _passes(value: Any) -> tuple[str, ...]:
    known = registry.names()
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ValueError(f"{PREFIX}passes is {value!r}; it takes a list of pass names: {', '.join(known)}")
    for name in value:
        if name not in known:
            raise ValueError(f"{PREFIX}passes holds {name!r}; choices: {', '.join(known)}{_nearest(name, known)}")
    return tuple(name for name in known if name in value)


def _nearest(name: Any, known: list[str] | tuple[str, ...]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
