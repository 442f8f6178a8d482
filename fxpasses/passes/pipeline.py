"""Runs passes over copies of a graph: in order, timed and checked. A pass that fails is dropped alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.fx import Graph, GraphModule, Node

from fxpasses.base import overrides
from fxpasses.base.collector import visiting_what_is_new
from fxpasses.base.containment import contained, error_text, is_unsaid, say
from fxpasses.base.once import warn_once
from fxpasses.errors import PassError
from fxpasses.graph.aliases import AliasAnalysis, storages_of
from fxpasses.graph.collectives import sequence
from fxpasses.graph.copying import copy_graph_module, is_in_state, state_of
from fxpasses.graph.modes import Regions
from fxpasses.graph.refusals import Refused
from fxpasses.graph.well_formed import check_well_formed
from fxpasses.metadata.draft import Draft
from fxpasses.metadata.program import Program
from fxpasses.options import Options
from fxpasses.report import Reason, Report

if TYPE_CHECKING:
    from fxpasses.experts.branches import SpeculatedBranch

log = logging.getLogger(__name__)


@dataclass
class Context:
    """A pass's input besides the graph, and its output besides the graph.

    example_inputs: one for each placeholder; a pass that appends placeholders appends their (fake) examples.
    shared_inputs: placeholders whose memory another input shares. program: the prologue, if a pass extracted one;
    draft: its source. discharged: the numbers of the branches (`experts/branches.py`) that passes have proved.
    pass_name: the name of the pass that gets this context. branches: the speculated branches of the trace. is_whole:
    whether the graph is known to be the whole program given to `torch.compile`.
    """

    options: Options
    example_inputs: list[Any]
    fake_mode: Any
    shared_inputs: frozenset[Node] = frozenset()
    program: Program | None = None
    pass_name: str = ""
    draft: Draft | None = None
    discharged: set[int] = field(default_factory=set)
    branches: Sequence[SpeculatedBranch] = ()
    is_whole: bool = False
    _requested: dict[Node, bool] = field(default_factory=dict)

    def may_change(self, node: Node) -> bool:
        """Whether the pass may make the change that it identifies by `node`; call it before each change, repeatedly or
        not.

        False only if FXPASSES_CHANGES excludes the change, to find a wrong one.
        """
        if node not in self._requested:
            self._requested[node] = overrides.allows_change(self.pass_name)
        return self._requested[node]

    def check_may_change(self, node: Node) -> None:
        """Raise `Refused` if the pass may not make the change that it identifies by `node`."""
        if not self.may_change(node):
            raise Refused(Reason.LEFT_OUT)

    def aliases(self, graph: Graph, autocast: Regions = ()) -> AliasAnalysis:
        """The alias analysis of a graph. autocast: the regions around it, if it is the body of a checkpoint."""
        return AliasAnalysis(graph, self.fake_mode, self.shared_inputs, autocast)

    @property
    def requested_changes(self) -> int:
        return len(self._requested)


class Pass(Protocol):
    """A rewrite of a torch-level graph, in place. A refusal is not an error; an exception is a defect of the pass.

    exact: whether results stay equal bit for bit, since the same calls run on the same sizes; if not, up to rounding.
    """

    name: str
    exact: bool

    def __call__(self, gm: GraphModule, context: Context) -> Report: ...


class ComputedRows(Protocol):
    """Counts the rows that a graph computes for a batch, by set; none for a batch that it is not for.

    sources: Dynamo's, of the inputs that `computed` takes.
    """

    @property
    def sources(self) -> Sequence[str]: ...

    def computed(self, *inputs: Any) -> tuple[float, ...]: ...


@dataclass
class Result:
    """The graph after all passes, the examples for its placeholders, the prologue, and a report for each pass.

    discharged, branches, is_whole: see `Context`; the proofs of dropped passes do not count. rows: of a graph that
    computes some rows of a batch only.
    """

    gm: GraphModule
    example_inputs: list[Any]
    program: Program | None = None
    reports: list[Report] = field(default_factory=list)
    draft: Draft | None = None
    discharged: frozenset[int] = frozenset()
    branches: Sequence[SpeculatedBranch] = ()
    is_whole: bool = False
    rows: ComputedRows | None = None


AfterPass = Callable[[Report, Result, str], None]


def run_passes(
    passes: Sequence[Pass],
    original: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    after_pass: AfterPass = lambda report, result, failure: None,
) -> Result:
    """Run `passes` in order, each on a copy. `original` is not changed.

    A pass that raises, or leaves a malformed graph, is dropped with one warning, and the next pass starts from its
    input. If the graph cannot be copied for a pass, that pass and all later ones are left out, with one warning. With
    `options.strict` either error is raised as `PassError`. `after_pass(report, result, failure)` is called after each
    pass, with the current graph, and with the error if the pass was dropped or left out.
    """
    return run_further(passes, Result(original, list(example_inputs)), options, after_pass)


@visiting_what_is_new()
def run_further(
    passes: Sequence[Pass],
    result: Result,
    options: Options,
    after_pass: AfterPass = lambda report, result, failure: None,
) -> Result:
    """Run more passes, like `run_passes`, on an earlier result, which is not changed."""
    result = replace(result, reports=[*result.reports])
    unused: GraphModule | None = None  # a copy of the graph that a pass was given, and left as it was
    for graph_pass in passes:
        name = graph_pass.name
        try:
            gm = copy_graph_module(result.gm) if unused is None else unused
            unused = None
            state = state_of(gm)
            context = _context(gm, result, options, name)
        except Exception as error:  # not a pass's error: the next pass would get the same graph
            _tell(after_pass, Report(name), result, _left_out(error, options.strict), options.strict)
            break
        if context is None:
            continue
        try:
            report, result = _run(graph_pass, gm, context, result)
        except Exception as error:
            _tell(after_pass, Report(name), result, report_dropped(name, error, options.strict), options.strict)
            continue
        with contained("comparing a graph with itself before a pass", "The next pass gets a copy.", options.strict):
            unused = gm if not report.changed and is_in_state(gm, state) else None
        result.reports.append(report)
        log.info("%s (%.3f s)", report, report.seconds)
        _tell(after_pass, report, result, "", options.strict)
    return result


def _run(graph_pass: Pass, gm: GraphModule, context: Context, before: Result) -> tuple[Report, Result]:
    """Run a pass on `gm`, a copy of the graph before it, and check the result. All errors are raised."""
    started = time.perf_counter()
    report = graph_pass(gm, context)
    if report.changed:
        check_well_formed(gm, before.gm)
        gm.recompile()
        if sequence(gm) != sequence(before.gm):
            raise PassError("it changes which collectives the graph issues, or their order")
        if context.options.verify:
            _verify(graph_pass, before, gm, context)
    report.seconds = time.perf_counter() - started
    report.asked = context.requested_changes
    discharged = frozenset(context.discharged)
    after = replace(before, discharged=discharged)
    if report.changed:
        inputs = context.example_inputs
        after = replace(after, gm=gm, example_inputs=inputs, program=context.program, draft=context.draft)
    return report, after


def _tell(after_pass: AfterPass, report: Report, result: Result, failure: str, strict: bool) -> None:
    """Call `after_pass`, whose failure must not stop training."""
    try:
        after_pass(report, result, failure)
    except Exception as error:
        if strict:
            raise
        log.debug("recording the pass %s failed", report.pass_name, exc_info=error)
        text = f"recording the pass {report.pass_name} failed ({type(error).__name__}: {error}). Training continues."
        warn_once("recording a pass", text, 4)


def _context(gm: GraphModule, result: Result, options: Options, name: str) -> Context | None:
    placeholders = gm.graph.find_nodes(op="placeholder")
    fakes = [node.meta.get("example_value") for node in placeholders]
    fake_mode = next((fake.fake_mode for fake in fakes if isinstance(fake, torch._subclasses.FakeTensor)), None)
    if fake_mode is None:
        return None  # a graph without tensors, or not from Dynamo: passes have nothing to do
    shared = _inputs_that_share_memory(placeholders, result.example_inputs)
    return Context(
        options, list(result.example_inputs), fake_mode, shared, result.program, name, result.draft,
        set(result.discharged), result.branches, result.is_whole,
    )  # fmt: skip


def _inputs_that_share_memory(placeholders: list[Node], example_inputs: Sequence[Any]) -> frozenset[Node]:
    owners: dict[int, list[Node]] = {}
    for node, example in zip(placeholders, example_inputs, strict=True):
        for storage in storages_of(example):
            owners.setdefault(storage, []).append(node)
    return frozenset(node for nodes in owners.values() if len(nodes) > 1 for node in nodes)


def _verify(graph_pass: Pass, before: Result, after: GraphModule, context: Context) -> None:
    from fxpasses.passes.verification import compare

    difference = compare(
        before.gm, before.program, after, context.program, before.example_inputs, exact=graph_pass.exact
    )
    if difference:
        raise PassError(f"its result differs from its input: {difference}")


def _left_out(error: Exception, strict: bool) -> str:
    """Report that passes cannot run: by an error with `strict`, else by one warning. Returns a text for the failure.

    The warning is the same for each pass and graph, unlike the one of `report_dropped`.
    """
    if strict:
        raise PassError(f"preparing a graph for a pass failed: {error}") from error
    say("preparing a graph for a pass", error, "Training continues with the graph as it was.")
    return error_text(error)


def report_dropped(name: str, error: Exception, strict: bool, instead: str = "the graph as it was") -> str:
    """Report a pass that failed: by an error with `strict`, else by one warning. Returns a text for the failure."""
    if strict:
        raise PassError(f"the pass {name} failed: {error}") from error
    log.debug("the pass %s failed", name, exc_info=error)
    failure = f"{type(error).__name__}: {error}"
    if is_unsaid(error):
        text = f"the pass {name} failed and was dropped ({failure}). Training continues with {instead}. "
        warn_once(name, text + 'Please report this, with the error that options={"fastpack.strict": True} raises.', 3)
    return failure
