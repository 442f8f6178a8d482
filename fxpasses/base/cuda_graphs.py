"""Whether a CUDA graph can record a graph, as plain data; `inspect/capturability.py` finds out."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Obstruction(enum.Enum):
    """Why a CUDA graph cannot record a node. The value is the text for a person."""

    HOST_READ = "the host reads a value from the device"
    DATA_DEPENDENT_SIZE = "its size depends on data"
    UNBACKED_NUMBER = "it brings in a number that only the running program knows"
    COPY_TO_HOST = "it copies to the host"
    COPY_FROM_HOST = "it copies from the host"
    ON_HOST = "it is on the CPU, and the graph is not"
    OTHER_DEVICE = "it is on a second device"
    MASK_WRITE = "a write through a mask counts the mask's elements first"
    CONTROL_FLOW = "the host chooses what runs"
    SPARSE = "it makes a sparse tensor"
    UNSAFE_OPERATOR = "its operator is not made for replays"


@dataclass(frozen=True)
class Obstacle:
    """A node that a CUDA graph cannot record.

    node: its name. body: the path of the body that it is in (`main/wrap_body_0`), "" for the graph itself. text: the
    details. where: `file:line`, or "". module: the path of its module.
    """

    node: str
    reason: Obstruction
    text: str = ""
    where: str = ""
    module: str = ""
    body: str = ""

    def __str__(self) -> str:
        inside = f" in {self.body}" if self.body else ""
        place = f" at {self.where}" if self.where else ""
        detail = f" ({self.text})" if self.text else ""
        return f"`{self.node}`{inside}{place}: {self.reason.value}{detail}"


@dataclass(frozen=True)
class NumberInput:
    """A Python number that the graph takes, and that its nodes or their sizes use: each value is recorded separately.

    node: the placeholder. kind: "int", "float" or "bool". sizes: whether a tensor's size depends on it. source: the
    program's expression for it, such as `batch['width']`, or ""; where: `file:line` of its first use that has one, or
    "".
    """

    node: str
    kind: str
    sizes: bool = False
    source: str = ""
    where: str = ""

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"`{self.source or self.node}`{place}"


@dataclass(frozen=True)
class Capturability:
    """Whether a CUDA graph can record a graph whole.

    obstacles: the nodes in the way, in graph order. numbers: the inputs whose every new value is recorded again.
    """

    obstacles: list[Obstacle] = field(default_factory=list)
    numbers: list[NumberInput] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return not self.obstacles

    def __str__(self) -> str:
        if self.whole:
            text = "can be recorded as one CUDA graph"
        else:
            count = len(self.obstacles)
            text = f"cannot be recorded as one CUDA graph: {count} node{'s' * (count > 1)} in the way, "
            text += f"{'first' if count > 1 else 'namely'} {self.obstacles[0]}"
        if self.numbers:
            more = f" and {len(self.numbers) - 1} more" if len(self.numbers) > 1 else ""
            text += f"{',' if self.whole else '; recorded'} again for each value of {self.numbers[0]}{more}"
        return text
