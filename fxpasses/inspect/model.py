"""The data model of a record: plain values, the same in memory and in a file.

    Run → Graph (one compilation) → Stage (as captured, then after each pass) → Region (a graph or a body) → Node

Everything below becomes JSON in a file (`fxpasses.inspect.codec`), and docs/inspect.md describes each field. The other
modules of this package compute everything (diff, figures, ledger, pages) from these values alone, so a record that was
read from a file is equivalent to one in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fxpasses.attention.runtime.stats import AttentionStats
from fxpasses.base.cuda_graphs import Capturability
from fxpasses.base.sample import Sample
from fxpasses.report import Report
from fxpasses.rows.row_stats import RowStats

SCHEMA = "fxpasses.record"
VERSION = 1

CAPTURED = "captured"
MAIN = "main"
PROLOGUE = "prologue"

_ASSERTIONS = ("_check", "_assert", "sym_constrain_range")


@dataclass(slots=True)
class TensorValue:
    """The properties of a tensor. Sizes and strides are integers, or symbolic expressions (`"u0 + 1"`) as text.

    bytes: for the traced sizes; None if a size is known only at run time. storage: tensors of a graph with the same
    number share memory.
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
    """Where the user's program made a node: the innermost known frame."""

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
    values: the tensors of the result (several for a tuple). scalar: the expression of a number. binds: unbacked symbols
    that this node binds. host_read: whether the host waits here for a device. flops: an estimate for the traced sizes,
    None without a formula. source_name: Dynamo's expression for an input (`L['lengths']`). data: a small integer
    input's elements, recorded only with FXPASSES_RECORD_VALUES=1.
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

    call: the node in the enclosing region that runs a body; "" for "main" and the prologue's parts.
    inputs: for the prologue, the position among main's placeholders of each placeholder, or -1.
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
    """A graph as captured, or after a pass.

    regions: None if the pass changed nothing, so that the graph is that of the stage before. checks: texts of the
    assertions that are evaluated with the prologue. failure: why the pass was dropped, if it was. seconds: the time of
    the pass. partitioned: whether the pass worked on AOTAutograd's forward and backward graphs, whose nodes its report
    names. cuda_graph: whether a CUDA graph can record the graph; None if unknown, or without regions.
    """

    name: str
    regions: list[Region] | None = None
    report: Report | None = None
    checks: list[str] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0
    partitioned: bool = False
    cuda_graph: Capturability | None = None


@dataclass(slots=True)
class Saved:
    """A tensor that forward keeps for backward. bytes: None if the size is unknown.

    is_input: whether it is an input of forward, such as a parameter, which exists anyway. made_at: the position of its
    node in forward; needed_at, freed_at: those of its first and last user in backward. where, module: of its node.
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
    """AOTAutograd's forward and backward graphs: the FLOPs of each node, and the saved tensors.

    forward_cuda_graph, backward_cuda_graph: whether a CUDA graph can record them; None if unknown.
    """

    forward: list[int]
    backward: list[int]
    saved: list[Saved]
    forward_cuda_graph: Capturability | None = None
    backward_cuda_graph: Capturability | None = None

    @property
    def saved_bytes(self) -> int:
        """Memory of saved tensors that would otherwise be free; inputs do not count."""
        return sum(saved.bytes or 0 for saved in self.saved if not saved.is_input)


@dataclass(slots=True)
class Step:
    """Forward and backward of a graph, operator by operator, for the sizes of the first batch.

    flops: of products, convolutions and attention, of whose pairs those count that are computed. bytes_moved: read and
    written by operators that make new memory. peak_bytes, live: the largest sum of live memory, and its course (the
    highest points of at most 400 parts), without inputs but for those that the prologue provides; what is returned, and
    gradients, live to the end. saved_bytes: what forward keeps for backward, without inputs. turn: where in `live`
    backward begins.
    """

    flops: int = 0
    bytes_moved: int = 0
    peak_bytes: int = 0
    saved_bytes: int = 0
    live: list[int] = field(default_factory=list)
    turn: int = 0


@dataclass(slots=True)
class Graph:
    """One compilation.

    compile_id: Dynamo's `frame/recompilation`, or "" outside Dynamo; frame, recompile: its parts. rank: of the process,
    None for a single process. outcome: "rewritten", "captured" (compiled as captured), "uncompiled" (it runs
    uncompiled, or raised an error) or "retraced" (given up: Dynamo traced the frame again, and another graph follows);
    "" if unknown. compile_seconds: the time of the lowering. symbols: the traced value of each backed symbol.
    before, after: the step of the captured graph and of the graph after the passes, by `dry_run.py`; None if nobody
    asked for them, or they are not known. partition: AOTAutograd's graphs after the passes; None if there are none or
    they were not observed (the eager lowering, inference, a warm cache).
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
    before: Step | None = None
    after: Step | None = None
    partition: Partition | None = None

    @property
    def reports(self) -> list[Report]:
        """The reports of the passes, in order; a pass that failed has none."""
        return [stage.report for stage in self.stages if stage.report is not None]

    @property
    def nodes(self) -> int:
        """The number of nodes as captured, bodies included."""
        return sum(len(region.nodes) for region in self.captured.regions or ())

    @property
    def captured(self) -> Stage:
        return self.stages[0]

    @property
    def final(self) -> Stage:
        """The last stage that has a graph of its own."""
        return next(stage for stage in reversed(self.stages) if stage.regions is not None)

    @property
    def cuda_graphs(self) -> dict[str, Capturability]:
        """What is known of CUDA graphs: of the graph after the passes, and of AOTAutograd's forward and backward."""
        parts = {"graph": self.final.cuda_graph}
        if self.partition is not None:
            parts["forward"] = self.partition.forward_cuda_graph
            parts["backward"] = self.partition.backward_cuda_graph
        return {name: found for name, found in parts.items() if found is not None}

    def steps(self) -> Iterator[tuple[Stage, Stage]]:
        """(before, after) for every pass that changed the graph."""
        before = self.stages[0]
        for stage in self.stages[1:]:
            if stage.regions is not None:
                yield before, stage
                before = stage


@dataclass(slots=True)
class Run:
    """The compilations of one process.

    started: UTC, ISO 8601. versions: of python, torch and fxpasses. attention: the counts of
    `fxpasses.attention_stats()` during the record; empty if there are none, or in a record of a whole process. rows:
    likewise those of `fxpasses.row_stats()`. sample: likewise the first batch.
    """

    started: str = ""
    program: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    rank: int | None = None
    pid: int = 0
    attention: dict[str, int] = field(default_factory=dict)
    rows: dict[str, float] = field(default_factory=dict)
    sample: Sample = field(default_factory=Sample)
    graphs: list[Graph] = field(default_factory=list)

    @property
    def attention_text(self) -> str:
        """The share of pairs and FLOPs that attention computed; "" if unknown."""
        return str(AttentionStats(**self.attention))

    @property
    def rows_text(self) -> str:
        """The share of rows that were computed, and what the others are; "" if unknown."""
        return str(RowStats(**self.rows))


def short_name(target: str) -> str:
    """The last part of a qualified name; for an operator's overload, the operator's name."""
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
