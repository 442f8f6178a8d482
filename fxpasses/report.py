"""A pass's report on its work: its changes, and a typed reason for every near miss."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace


class Reason(enum.Enum):
    """Why something was left alone. The value is the text for a person."""

    PARAMETER = "depends on a parameter"
    ACTIVATION = "depends on a floating-point input or an activation"
    RANDOM = "depends on random numbers"
    INPUT_WRITTEN = "depends on an input that the graph writes to"
    WRITTEN_BY_LAYER = "a layer writes to it"
    REPEATED_WRITE = "the checkpoint is left to eager mode, which repeats its writes"
    READ_BEFORE_WRITE = "it is read before it has its final value"
    ESCAPES = "it is returned from the graph together with something that shares its memory"
    HIGHER_ORDER = "it is in the body of a higher-order operator, or comes from one"
    UNKNOWN_OPERATOR = "an operator's effects are not known"
    COLLECTIVE = "other ranks take part in it"
    TOO_LARGE = "it is large and used once"
    NOT_ALIKE = "the experts are not known to be one program on different rows"
    QUERIES_DIFFER = "its queries are not known to read one routing"
    SMALL = "it is small"
    DROPOUT = "it drops weights at random"
    WEIGHTS_USED = "its weights are returned, or used elsewhere"
    SCORES_CHANGED = "its scores are not those of a known masked attention"
    NOT_BY_HEADS = "its tensors do not have the layout of multi-head attention"
    SELECTIVE = "a checkpoint around it selects by operator what to save"
    NEEDED_SOON = "backward needs it at once"
    WITHIN_BUDGET = "the device has room for it"
    HOST_BUDGET = "the host's budget is used up"
    NOT_COMPUTED = "it is an input of the graph, or a view of one"
    RETURNED = "the graph returns it, or a view of it"
    SHARED_MEMORY = "it shares memory with another saved tensor in a way that cannot be rebuilt"
    UNKNOWN_SIZE = "its size is known only when the program runs"
    WRONG_DEVICE = "moving it from its device frees nothing"
    STRIDES_MAY_CHANGE = "it has four dimensions and convolutions are near, for which a compiler changes strides"
    REPLAYED = "CUDA graphs replay the step, and a replay would not wait for copies"
    UNSUPPORTED_VALUE = "its kind of value cannot be an input of a graph"
    NOT_BY_ROWS = "its rows are not known to be computed one by one"
    READ_IN_FULL = "it is read in full"
    MASK_NEEDED = "not only plans and attention by plans use it"
    NOT_BOOL = "it is not a bool mask"
    NOT_ON_CPU = "it, or one of its operands, is not on the CPU"
    BUDGETED = "a budget of the device is kept by the graph of all layers"
    WHOLE_GRAPH = "CUDA graphs and freezing take a graph as a whole"
    CHANGES_MODE = "a mode of the process changes in it"
    SUMS_REORDERED = "gradients would be added in another order"
    UNCHECKED_TORCH = "the pass was not checked on this torch"
    NO_GRADIENT = "zeros would reach parameters as gradients where eager mode has none"
    WRITTEN_ACROSS = "memory that crosses its border is written"
    UNROLLED = "a loop over parts of the batch is unrolled"
    NO_GAIN = "it would not become faster"
    NOT_MEASURED = "whether it would become faster was not measured"
    STANDS_ONCE = "no equal one stands in its graph"
    TEXTS_MIX = "texts of one row attend to each other, since no mask separates them"
    LEFT_OUT = "FXPASSES_CHANGES excludes it"


@dataclass(frozen=True)
class Refusal:
    """One rewrite that a pass considered and refused.

    subject: the node's name; reason: the kind of refusal; text: its details; where: `file:line`, or "". module: the
    path of the subject's module, which distinguishes equal names in different bodies; "" if unknown.
    """

    subject: str
    reason: Reason
    text: str = ""
    where: str = ""
    module: str = ""

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        detail = f": {self.text}" if self.text else ""
        return f"{self.subject}{place}: {self.reason.value}{detail}"


@dataclass(frozen=True)
class Transfer:
    """A tensor that forward moves off the device and backward brings back.

    name: the node's in backward; bytes: at the traced sizes. Positions are those of nodes: the copy out starts after
    `offloaded_at` in forward, the copy back starts before `reloaded_at` in backward, and `needed_at` is the tensor's
    first user in backward. to: "host" or "disk".
    """

    name: str
    bytes: int
    offloaded_at: int
    reloaded_at: int
    needed_at: int
    to: str = "host"


@dataclass(frozen=True)
class MemoryPlan:
    """What a step was predicted to take, in bytes: the process's most while each call of a piece runs.

    budget: the bytes that it has. saving_all: forward's calls in order, then backward's, if all is saved that backward
    needs. planned: the same as it is compiled.
    """

    budget: int
    saving_all: list[int]
    planned: list[int]


@dataclass
class Report:
    """The outcome of one pass on one graph.

    summary: one line for a person; "" if nothing changed. figures: counts by name (bytes where the name says so).
    seconds: the time of the pass. asked: the number of changes that it requested, as FXPASSES_CHANGES counts them.
    transfers: activations that leave the device between forward and backward. plan: of a step that has to fit.
    """

    pass_name: str
    changed: bool = False
    summary: str = ""
    figures: dict[str, int] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    seconds: float = 0.0
    asked: int = 0
    transfers: list[Transfer] = field(default_factory=list)
    plan: MemoryPlan | None = None

    def __str__(self) -> str:
        lines = [f"{self.pass_name}: {self.summary or 'nothing to do'}"]
        lines += [f"  {change}" for change in self.changes]
        lines += [f"  not: {refusal}" for refusal in self.refusals]
        return "\n".join(lines)


def in_each(report: Report, calls: int) -> Report:
    """The report on a graph that a step runs several times: its figures are the totals of all runs."""
    figures = {name: number if name.startswith("peak_") else number * calls for name, number in report.figures.items()}
    summary = f"in each of {calls} layers: {report.summary}" if report.summary else ""
    return replace(report, figures=figures, summary=summary, transfers=report.transfers * calls)


OnReport = Callable[[Report], None]  # called with the reports of passes that run after those on the captured graph
