"""A compiled frame as data: what Dynamo and the passes have made of it, and by what it is recognised.

It has two parts, pickled one by one. The `Head` is loaded for each frame that is looked up, and tells whether the trace
is the frame's; the `Body` has the graphs, and is loaded once it is known to be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch.fx import GraphModule

from fxpasses.dynamo.features import Feature
from fxpasses.loss.lazy_outputs import SavedLeftOut
from fxpasses.metadata.program import Program
from fxpasses.options import Options
from fxpasses.report import Report
from fxpasses.rows.choice import RowCounts


@dataclass(frozen=True)
class Head:
    """code: a digest of the frame's. body: of the body that belongs to it. options: of the backend. settings,
    sources, classes, operators, environment, modules: see `restart/program.py`. sets: the order of sets, if it may
    count. is_given: whether the frame is the one passed to `torch.compile`. one_graph: whether it may not break.
    modes: of autograd. imports, objects: the global names that Dynamo has made for its code and guards: modules'
    names, which stay, and others, which another process may have for something else: a class, a function, a module,
    or None for the dictionary of builtins. guards: of Dynamo, each as its source and the function that installs it.
    facts: what each states. shared: see `shared_objects`.
    """

    code: str
    body: str
    options: Options
    settings: Mapping[str, str]
    sources: Mapping[str, str]
    classes: Mapping[str, str]
    operators: Mapping[str, str]
    environment: Mapping[str, str | None]
    sets: str
    modules: str
    is_given: bool
    one_graph: bool
    modes: tuple[bool, bool]
    imports: Mapping[str, str]
    objects: Mapping[str, Any]
    guards: Sequence[tuple[Any, Any]]
    facts: Sequence[Any]
    shared: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Graphs:
    """captured: Dynamo's graph. rewritten: that of the passes, whose fake inputs are `examples`, and whose prologue is
    `program`. rows: counts the rows of a batch, if the graph is for such batches as are `packed`, or for the others.
    left_out: the outputs that were taken out of Dynamo's graph before.
    """

    captured: GraphModule
    rewritten: GraphModule
    examples: Sequence[Any]
    program: Program | None
    rows: RowCounts | None
    packed: bool
    left_out: SavedLeftOut | None


@dataclass(frozen=True)
class Body:
    """graphs: `Graphs`, pickled. reports: of the passes. asserted: the conditions that the program asserts itself, as
    text. bytecode: Dynamo's, which calls the graph by the global name `name`. state: fields of Dynamo's `OutputGraph`
    that guards are made from. tracked: the fake tensors and sources of which the shape environment knows. checks: of
    this package (`dynamo/checks.py`), each with its feature, the sources of its arguments and a text. sizes: what
    Dynamo has seen of sizes, for the next trace of the frame.
    """

    graphs: bytes
    reports: Sequence[Report]
    asserted: frozenset[str]
    name: str
    bytecode: CodeType
    state: Mapping[str, Any]
    tracked: Sequence[Any]
    checks: Sequence[tuple[Any, Feature, Sequence[str], str]]
    sizes: Mapping[str, Any] = field(default_factory=dict)


def digest_of_body(pickled: bytes) -> str:
    return hashlib.sha256(pickled).hexdigest()[:16]


@dataclass(frozen=True)
class SavedTrace:
    """Both parts, pickled. code: as the head's, to be found by."""

    code: str
    head: bytes
    body: bytes
