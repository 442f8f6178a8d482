"""What a pass says about its work: what it changed, and for every near miss a typed reason."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field


class Reason(enum.Enum):
    """Why something was left alone. The value is the sentence shown to a person."""

    PARAMETER = "depends on a parameter"
    ACTIVATION = "depends on a floating-point input or an activation"
    RANDOM = "depends on random numbers"
    INPUT_WRITTEN = "depends on an input that the graph writes to"
    WRITTEN_BY_LAYER = "a layer writes to it"
    READ_BEFORE_WRITE = "it is read before it has its final value"
    ESCAPES = "it is returned from the graph together with something that shares its memory"
    HIGHER_ORDER = "it comes out of, or lies in, the body of a higher-order operator"
    UNKNOWN_OPERATOR = "an operator's effects are not known"
    COLLECTIVE = "other ranks take part in it"
    TOO_LARGE = "it is large and used once"
    NOT_ALIKE = "the experts are not known to be one program on different rows"
    QUERIES_DIFFER = "its queries are not known to ask one routing"
    SMALL = "it is small"
    DROPOUT = "it drops weights at random"
    WEIGHTS_USED = "its weights are returned, or used elsewhere"
    SCORES_CHANGED = "its scores are not those of a known masked attention"
    NOT_BY_HEADS = "its tensors are not those of attention by heads"
    SELECTIVE = "a checkpoint around it chooses by operator what it keeps"
    NEEDED_SOON = "backward needs it at once"
    WITHIN_BUDGET = "the device has room for it"
    HOST_BUDGET = "the host's budget is used up"
    NOT_COMPUTED = "it is an input of the graph, or a view of one"
    RETURNED = "the graph returns it, or a view of it"
    SHARED_MEMORY = "it shares memory with another saved tensor in a way that cannot be rebuilt"
    UNKNOWN_SIZE = "its size is known only when the program runs"
    WRONG_DEVICE = "moving it from where it lies frees nothing"
    STRIDES_MAY_CHANGE = "it has four dimensions and convolutions are near, for which a compiler changes strides"
    REPLAYED = "CUDA graphs replay the step, and a replay would not wait for copies"
    UNSUPPORTED_VALUE = "its kind of value cannot be an input of a graph"
    NOT_BY_ROWS = "its rows are not known to be computed one by one"
    MASK_NEEDED = "more than plans and the attentions that follow them needs it"
    NOT_BOOL = "it is no mask of bools"
    NOT_ON_CPU = "it, or what it is made of, does not lie on the CPU"
    LEFT_OUT = "FXPASSES_CHANGES leaves it out"


@dataclass(frozen=True)
class Refusal:
    """One thing that a pass could have done and did not.

    subject: the node's name; reason: the kind of obstacle; text: the obstacle itself; where: `file:line`, or "".
    module: the path of the subject's module, which tells equal names in different bodies apart; "" where not known.
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

    name: of the node, as backward calls it; bytes: for the sizes that were traced. Positions are those of nodes:
    offloaded_at of the one in forward after which the copy out starts, reloaded_at of the one in backward before which
    the copy back starts, needed_at of the first one in backward that takes the tensor. to: "host" or "disk".
    """

    name: str
    bytes: int
    offloaded_at: int
    reloaded_at: int
    needed_at: int
    to: str = "host"


@dataclass
class Report:
    """The outcome of one pass on one graph.

    summary: one line for a person; "" where nothing changed. figures: counts by name (bytes where the name says so).
    seconds: time that the pass took. asked: how many changes it asked for, which is what FXPASSES_CHANGES counts.
    transfers: activations that leave the device between forward and backward.
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

    def __str__(self) -> str:
        lines = [f"{self.pass_name}: {self.summary or 'nothing to do'}"]
        lines += [f"  {change}" for change in self.changes]
        lines += [f"  not: {refusal}" for refusal in self.refusals]
        return "\n".join(lines)


OnReport = Callable[[Report], None]  # gets the reports of what runs after the passes over the captured graph
