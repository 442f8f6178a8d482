"""What a case is made of: groups of parameters, and contenders that each run the same step on every group.

A case is declared here and measured elsewhere, so that the parent process can list it without importing a model.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Parameters = Mapping[str, Any]  # of one group: strings, numbers and bools, as the results store them

# In the order of the report.
CASES = (
    "packed_metadata",
    "packed_attention",
    "live_rows",
    "loss_head",
    "trainer",
    "qlora",
    "flash_path",
    "sequences",
    "experts",
    "grouped_products",
    "lora_experts",
    "offload",
    "offload_sweep",
    "memory",
    "cuda_graphs",
    "all_together",
    "pass_time",
    "compile_time",
    "start",
    "call_cost",
    "mlperf",
    "split_topk",
    "simulated_device_stalls",
    "simulated_device_reload",
)


class TooMuch(RuntimeError):
    """A contender takes more memory than its group allows."""


@dataclass(frozen=True)
class Program:
    """A contender made ready for a group, in a process of its own.

    step: what is timed, usually forward and backward on the next batch; it leaves no gradients behind. values: numbers
    that all contenders must agree on, such as a loss; called first, so it compiles. batches: how many steps it takes
    to have seen every batch. figures: counts and seconds that only this program knows. compiling: what `values` cost
    before there was compiled code; both the process with empty caches and the one with filled caches report it.
    """

    step: Callable[[], Any]
    values: Callable[[], Mapping[str, float]]
    batches: int = 1
    figures: Callable[[], Mapping[str, float]] = dict
    compiling: Callable[[], Mapping[str, float]] = dict


@dataclass(frozen=True)
class Contender:
    """One way to run the step. unavailable: why it cannot take part in a group ("" if it can).

    bound: leaves a part of the step out, to show what no contender can be faster than; its values are not compared.
    """

    name: str
    build: Callable[[Parameters, str], Program]  # (parameters, device)
    compiles: bool = True
    ours: bool = False
    bound: bool = False
    unavailable: Callable[[Parameters, str], str] = lambda parameters, device: ""


@dataclass(frozen=True)
class Case:
    """Contenders on groups of parameters.

    groups: (device, quick) to the parameters of each group. baseline: the contender that ratios refer to, and whose
    values are the right ones. x: the parameter that plots are drawn over.
    shows: names of `bench.report.TABLES`; all of them, if empty.
    expected: what the arithmetic says, in words. arithmetic: rows of a table, computed from the entries of the
    results. model: seconds by contender and value of `x`, as theory has them, drawn as dashed lines. notes: what the
    figures do not say themselves. timeline: on CUDA, record when copies and kernels ran. cpu_time: on one thread of a
    CPU, count the time that the process computes, which other work on the machine does not lengthen; for steps that
    never wait. budget: a parameter that is memory; who takes too much (`TooMuch`) is not tried with less of it.
    simulated: steps run on the simulated device of the tests, and whatever is shown of them says so.
    """

    name: str
    title: str
    groups: Callable[[str, bool], Sequence[Parameters]]
    contenders: Sequence[Contender]
    baseline: str
    expected: str
    x: str = ""
    shows: Sequence[str] = ()
    arithmetic: Callable[[Sequence[Mapping[str, Any]]], list[dict[str, Any]]] | None = None
    model: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Mapping[Any, float]]] | None = None
    notes: str = ""
    timeline: bool = False
    cpu_time: bool = False
    budget: str = ""
    simulated: bool = False

    def contender(self, name: str) -> Contender:
        return next(contender for contender in self.contenders if contender.name == name)


def tolerance(parameters: Parameters) -> float:
    """Relative tolerance of values against the baseline's: contenders sum in other orders, and fuse roundings."""
    return 3e-2 if parameters.get("dtype") == "bfloat16" else 1e-4


def scale(device: str) -> dict[str, str]:
    """The width of a decoder on a device, and its dtype."""
    if device == "cuda":
        return {"width": "full", "dtype": "bfloat16"}
    return {"width": "reduced", "dtype": "float32"}


def load(name: str) -> Case:
    """The case of `bench/cases/NAME.py`, or of any module that has a `CASE`, given with its dots.

    Raises ValueError for a name that is neither.
    """
    if name not in CASES and "." not in name:
        raise ValueError(f"there is no case {name!r}; cases: {', '.join(CASES)}")
    case: Case = importlib.import_module(name if "." in name else f"bench.cases.{name}").CASE
    return case


def only(case: Case, wanted: Sequence[str]) -> Case:
    """The case, reduced to the groups with these parameters, KEY=VALUE."""
    pairs = [text.split("=", 1) for text in wanted]

    def groups(device: str, quick: bool) -> Sequence[Parameters]:
        found = case.groups(device, quick)
        return [group for group in found if all(str(group.get(key)) == value for key, value in pairs)]

    return dataclasses.replace(case, groups=groups)


def among(case: Case, names: Sequence[str]) -> Case:
    """The case with these contenders and the baseline; all of them if no name is given.

    Raises ValueError for a name that the case does not have.
    """
    if unknown := [name for name in names if name not in {contender.name for contender in case.contenders}]:
        raise ValueError(f"{case.name} has no contender {unknown[0]!r}; `python -m bench list` shows them")
    chosen = [c for c in case.contenders if not names or c.name in (*names, case.baseline)]
    return dataclasses.replace(case, contenders=chosen)
