"""The data model of a record: plain values, the same in memory and in a file.

    Run → Graph (one compilation) → Stage (as captured, then after each pass) → Region (a graph or a body) → Node

Everything below is JSON once written (`fxpasses.inspect.codec`), and docs/inspect.md describes it field by field. What
the other modules of this package compute (diff, figures, ledger, pages) they compute from these values alone, so that a
record read from a file and one in memory are the same thing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fxpasses.report import Report
from fxpasses.runtime.attention.stats import AttentionStats

SCHEMA = "fxpasses.record"
VERSION = 1

CAPTURED = "captured"
MAIN = "main"
PROLOGUE = "prologue"

_ASSERTIONS = ("_check", "_assert", "sym_constrain_range")


@dataclass(slots=True)
class TensorValue:
    """What is known of a tensor. Sizes and strides are integers, or expressions in symbols (`"u0 + 1"`) as text.

    bytes: for the sizes that were traced; None where a size is known only when the program runs.
    storage: tensors of a graph with the same number share memory.
    """

    shape: list[int | str]
    stride: list[int | str]
    dtype: str
    device: str
    bytes: int | None = None
    storage: int | None = None
    requires_grad: bool = False


@dataclass(slots=True)
class Source:
    """Where the user's program made a node: the innermost frame that is known."""

    file: str
    line: int
    function: str = ""
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{self.line}"


@dataclass(slots=True)
class Node:
    """One node. `op` is FX's; `target` a qualified name, a method's name, or an input's or attribute's name.

    args, kwargs: JSON values in which `{"node": name}` refers to a node of the region, `{"slice": [a, b, c]}` is a
    slice, `{"body": path}` a region, `{"dict": [[key, value], …]}` a dictionary and `{"constant": text}` anything else.
    values: the tensors of the result (several for a tuple). scalar: a number's expression, for a number.
    binds: unbacked symbols that this node gives their value. host_read: whether the host waits here for a device.
    flops: an estimate for the traced sizes, None where there is no formula. source_name: Dynamo's expression for an
    input (`L['lengths']`). data: a small integer input's elements, kept only with FXPASSES_RECORD_VALUES=1.
    """

    name: str
    op: str
    target: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    values: list[TensorValue] = field(default_factory=list)
    scalar: str = ""
    binds: list[str] = field(default_factory=list)
    module: str = ""
    module_class: str = ""
    source: Source | None = None
    source_name: str = ""
    host_read: bool = False
    flops: int | None = None
    data: Any = None

    @property
    def short_target(self) -> str:
        """`linear` for `torch._C._nn.linear`, `mm` for `torch.ops.aten.mm.default`."""
        return short_name(self.target)

    @property
    def is_assertion(self) -> bool:
        return self.op.startswith("call") and self.short_target.startswith(_ASSERTIONS)


@dataclass(slots=True)
class Region:
    """A graph. path: "main", "main/wrap_body_0" for the body that a call in "main" runs, "prologue/host".

    call: the name of the node in the enclosing region that runs a body; "" for "main" and the prologue's parts.
    inputs: for the prologue, what each placeholder is: the position of one of main's placeholders, or -1.
    """

    path: str
    nodes: list[Node] = field(default_factory=list)
    call: str = ""
    inputs: list[int] = field(default_factory=list)

    @property
    def parent(self) -> str:
        return self.path.rsplit("/", 1)[0] if "/" in self.path else ""

    @property
    def in_prologue(self) -> bool:
        return self.path.split("/", 1)[0] == PROLOGUE


@dataclass(slots=True)
class Stage:
    """A graph at one moment: as captured, or after a pass.

    regions: None where the pass changed nothing: the graph is that of the stage before. checks: assertions that are
    evaluated with the prologue, in words. failure: why the pass was left out, if it was. seconds: the pass took them.
    partitioned: the pass worked on forward and backward, which AOTAutograd made; its report names nodes of those.
    """

    name: str
    regions: list[Region] | None = None
    report: Report | None = None
    checks: list[str] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0
    partitioned: bool = False


@dataclass(slots=True)
class Saved:
    """A tensor that forward keeps for backward. bytes: None where the size is not known.

    is_input: an input of forward, such as a parameter: it is there anyway. Positions are those of nodes: made_at in
    forward; needed_at and freed_at in backward, where it is taken first and last. where, module: of what made it.
    """

    name: str
    bytes: int | None
    is_input: bool
    made_at: int
    needed_at: int
    freed_at: int
    where: str = ""
    module: str = ""


@dataclass(slots=True)
class Partition:
    """What AOTAutograd made of a graph: FLOPs of each node of forward and of backward, and what is kept in between."""

    forward: list[int]
    backward: list[int]
    saved: list[Saved]

    @property
    def saved_bytes(self) -> int:
        """What is kept in memory that would otherwise be free: without inputs."""
        return sum(saved.bytes or 0 for saved in self.saved if not saved.is_input)


@dataclass(slots=True)
class Graph:
    """One compilation. compile_id: Dynamo's `frame/recompilation`, or "" outside Dynamo; frame and recompile: its
    parts. rank: of the process, None where there is one process. compile_seconds: time that the lowering took.
    outcome: "rewritten", "captured" (compiled as it was captured), "uncompiled" (it runs so, or raised an error) or
    "retraced" (given up: Dynamo traced the program again, and another graph follows); "" if unknown.
    symbols: the value that each backed symbol had when it was traced. partition: what AOTAutograd made of the graph
    after the passes; None where it was not asked, or nobody was told (the eager lowering, inference, a warm cache).
    """

    compile_id: str = ""
    frame: int | None = None
    recompile: int | None = None
    function: str = ""
    rank: int | None = None
    stages: list[Stage] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)
    outcome: str = ""
    compile_seconds: float = 0.0
    partition: Partition | None = None

    @property
    def reports(self) -> list[Report]:
        """What each pass said, in order; a pass that failed said nothing."""
        return [stage.report for stage in self.stages if stage.report is not None]

    @property
    def nodes(self) -> int:
        """The number of nodes as captured, those of bodies among them."""
        return sum(len(region.nodes) for region in self.captured.regions or ())

    @property
    def captured(self) -> Stage:
        return self.stages[0]

    @property
    def final(self) -> Stage:
        """The last stage that has a graph of its own."""
        return next(stage for stage in reversed(self.stages) if stage.regions is not None)

    def steps(self) -> Iterator[tuple[Stage, Stage]]:
        """(before, after) for every pass that changed the graph."""
        before = self.stages[0]
        for stage in self.stages[1:]:
            if stage.regions is not None:
                yield before, stage
                before = stage


@dataclass(slots=True)
class Run:
    """What one process compiled. started: UTC, ISO 8601. versions: of python, torch and fxpasses. attention: what
    `fxpasses.attention_stats()` counted meanwhile; empty where nothing was, or in a record of a whole process.
    """

    started: str = ""
    program: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    rank: int | None = None
    pid: int = 0
    attention: dict[str, int] = field(default_factory=dict)
    graphs: list[Graph] = field(default_factory=list)

    @property
    def attention_in_words(self) -> str:
        """How many pairs of tokens attention computed, and FLOPs, of how many; "" where that is not known."""
        return str(AttentionStats(**self.attention))


def short_name(target: str) -> str:
    """The last part of a qualified name, for an operator's overload that of the operator."""
    parts = target.split(".")
    return parts[3] if target.startswith("torch.ops.") and len(parts) == 5 else parts[-1]


def references(value: Any) -> Iterator[str]:
    """The names of the nodes that an argument refers to, in order, with repetitions."""
    if isinstance(value, list):
        for item in value:
            yield from references(item)
    elif isinstance(value, dict):
        if "node" in value:
            yield value["node"]
        elif "slice" in value:
            yield from references(value["slice"])
        elif "dict" in value:
            yield from references([item for _, item in value["dict"]])


def inputs_of(node: Node) -> list[str]:
    """The names of the nodes that a node takes, in the order of its arguments, with repetitions."""
    return [*references(node.args), *references(list(node.kwargs.values()))]


def bodies_of(node: Node) -> list[str]:
    """The paths of the bodies that a node runs."""
    return [a["body"] for a in [*node.args, *node.kwargs.values()] if isinstance(a, dict) and "body" in a]
