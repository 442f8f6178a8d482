"""The `torch.compile` backend: rewrites the captured graph, compiles it, and runs the prologue once per batch."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule

from fxpasses import default_options, inspect, registry
from fxpasses.attention import documents
from fxpasses.base import overrides
from fxpasses.base.containment import contained, error_text, is_unsaid, say
from fxpasses.base.once import warn_once
from fxpasses.base.tested_torch import warn_if_untested
from fxpasses.collectives import ddp_buckets
from fxpasses.collectives.as_written import uncompiled
from fxpasses.compiler import eager_start, progress
from fxpasses.compiler.background_prologues import CompiledInBackground
from fxpasses.compiler.broken_kernels import building_anew
from fxpasses.compiler.eager_frame import eager_frame
from fxpasses.compiler.fitting import fitted
from fxpasses.compiler.forked_compiler import refusal
from fxpasses.compiler.lowering import lower
from fxpasses.compiler.lowering_backward import compiling_together
from fxpasses.compiler.lowering_prologues import is_compiled, lower_prologue
from fxpasses.compiler.lowering_recovery import recovering, unasserted
from fxpasses.compiler.lowering_segments import lower_segments
from fxpasses.compiler.sizes_of_one import make_exact
from fxpasses.dynamo import (
    collective_operands,
    guarding,
    leaves,
    passed_choices,
    recompiles,
    retracing,
    tracing,
    whole_program,
)
from fxpasses.dynamo.dispatch_state import restored_if_it_fails
from fxpasses.dynamo.dynamo_names import asks_for_another_trace, for_the_program
from fxpasses.dynamo.failures import CaptureRejected, FeatureRejected, Rejected, is_data_dependent
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.trace import Trace
from fxpasses.errors import MemoryBudgetError
from fxpasses.fold.outlining import WHOLE, Place, is_folded
from fxpasses.graph.bodies import nodes_in
from fxpasses.graph.collectives import spans_ranks
from fxpasses.graph.copying import copy_graph_module
from fxpasses.graph.provenance import input_sources
from fxpasses.graph.symbols import binds_symbols, has_unbacked_floats
from fxpasses.loss import lazy_outputs
from fxpasses.memory.step import Step
from fxpasses.memory.tiles import has_regions, tile_rows
from fxpasses.metadata.program import Program
from fxpasses.metadata.runtime.prologue import Prologue, with_prologue
from fxpasses.options import Options
from fxpasses.passes.pipeline import AfterPass, Pass, Result, run_further
from fxpasses.report import OnReport, Report
from fxpasses.restart import restoring
from fxpasses.restart.recording import running as running_recording
from fxpasses.rows import choice
from fxpasses.rows.live_rows import LiveRows

log = logging.getLogger(__name__)


@collective_operands.unknown()
def fastpack_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured: `torch.compile(model, backend=fastpack_backend)` or `backend="fastpack"`.

    `mode` is one of `torch.compile`'s; `options` are those of `fxpasses.options.Options` under the prefix `fastpack.`,
    and Inductor's. Raises `ValueError` for options that do not exist or have a wrong value. Any other failure does not
    stop the program: the graph runs as it was captured, with one warning.
    """
    settings = default_options.parse(options, mode)
    settings = replace(settings, passes=overrides.passes(settings.passes, known=registry.names()))
    trace = tracing.running()
    warn_if_untested()
    restored = restoring.restored_of(gm)
    if restored is not None:
        return _recompiled(restored, gm, example_inputs, settings, trace)
    try:
        with progress.compiling(trace.code):
            outputs = _left_out(gm, settings, trace)
            if isinstance(outputs, lazy_outputs.LeftOut):
                if (recorded := running_recording()) is not None:
                    recorded.left_out = outputs
                return outputs.wrap(_compiled(outputs.gm, example_inputs, settings, trace, outputs.report))
            return _compiled(gm, example_inputs, settings, trace, outputs)
    except MemoryBudgetError as error:
        raise for_the_program(error) from None
    except _RETRACED:
        raise
    except Exception as error:  # outside of passes and lowerings: parts needed for right results may be missing
        if settings.strict or is_data_dependent(error):
            raise
        if trace.has(Feature.HINTS):
            trace.note_error(Feature.HINTS, error)
            raise FeatureRejected(Feature.HINTS, error_text(error)) from error
        say("compiling a graph", error, "It runs uncompiled, as it was captured.")
        return uncompiled(gm)


def _left_out(gm: GraphModule, settings: Options, trace: Trace) -> lazy_outputs.LeftOut | Report | None:
    """The graph without those outputs that are computed only when read, or a report of why they stay."""
    if settings.outputs == "lazy":
        with contained("leaving out what a program returns", "It is computed in each step.", settings.strict):
            return lazy_outputs.leave_out(gm, trace.code, whole_program.is_whole(trace, gm))
    return None


def _compiled(
    gm: GraphModule, example_inputs: Sequence[Any], settings: Options, trace: Trace, before: Report | None = None
) -> Callable[..., Any]:
    """The compiled graph. before: the report of an earlier change of the graph."""
    strict = settings.strict
    observer = inspect.observe(gm, example_inputs, settings)
    assumed = tracing.report(trace)
    captured = Result(gm, list(example_inputs))
    mixing = None
    with contained("looking for packed texts that no mask separates", strict=strict):
        mixing = documents.report(gm, lambda positions: trace.inputs(gm, positions))
    for report in (assumed, before, mixing):
        if report is not None:
            observer.after_pass(report, captured, "")
    with contained("finding out whether a graph is the whole program", strict=strict):
        captured.is_whole = whole_program.is_whole(trace, gm)
    captured.branches = trace.speculated()
    result, rows, packed = _rewritten(captured, settings, trace, observer.after_pass)
    folding = [entry.load()() for entry in registry.selected(settings.passes, registry.FOLDING) if settings.folds]
    folded = run_further(folding, result, settings, observer.after_pass)
    trace.discharged |= result.discharged
    with contained("counting the sizes of a batch", strict=strict):
        recompiles.note_sizes(gm)
    if settings.offload.tier != "off":
        with contained("guarding which inputs are leaves", "Leaves and activations share graphs.", strict):
            leaves.guard(gm, example_inputs)
    if result.program is not None:
        with contained("finding what a prologue reads", "It makes a transfer of its own.", strict):
            sources = input_sources(gm)
            trace.companions += filter(None, (sources[position] for position in result.program.host_inputs))
    observer.lowering()
    try:
        tracing.check(trace, gm, result.gm)
        if settings.lowering == "inductor" and trace.attempt.with_fewer_flags() is not None:
            _check_integers(gm)
        compile = functools.partial(_compile, [folded, result, captured], trace)
        compiled, outcome = eager_start.compiled(compile, settings, trace.code, gm, observer)
    except Exception as error:
        observer.finish("retraced" if isinstance(error, _RETRACED) else "uncompiled")
        raise
    observer.finish(outcome)
    with contained("keeping a trace for a file", "The program is traced again by its next process.", strict):
        _note_for_restart(folded, captured, settings, trace, outcome, rows, packed)
    compiled = guarding.checked(compiled, gm, trace)
    if rows is not None:
        compiled = choice.counted(compiled, rows)
    with contained("noting the choices of a router", strict=strict):
        return passed_choices.noting(compiled, gm, example_inputs)
    return compiled


def _note_for_restart(
    rewritten: Result,
    captured: Result,
    settings: Options,
    trace: Trace,
    outcome: str,
    rows: choice.RowCounts | None,
    packed: bool,
) -> None:
    """Tell what `fxpasses.save_caches` may keep of a compiled graph."""
    recording = running_recording()
    if recording is None:
        return
    refusal = ""
    if outcome != "rewritten" and rewritten.gm is not captured.gm:
        refusal = f"its graph is {outcome}"
    elif not guarding.can_guard():
        refusal = "this torch has no guards of batches"
    elif trace.needs_batch:
        refusal = "compiling it takes numbers of the batch"
    elif settings.memory.budget != "off" and (rows is not None or _has_sizes(captured.gm)):
        refusal = "its memory is planned for the batch that it was compiled for"
    elif ddp_buckets.wanted():
        refusal = "DDP takes its gradients in buckets"
    elif any(passed_choices.is_passed(example) for example in captured.example_inputs):
        refusal = "it continues another graph"
    recording.note(
        rewritten,
        captured.gm,
        options=settings,
        asserted=trace.sizes.asserted_by_program(),
        is_given=trace.given,
        rows=rows,
        packed=packed,
        refusal=refusal,
    )


def _has_sizes(gm: GraphModule) -> bool:
    """Whether a graph is for other sizes of the batch as well."""
    examples = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    return binds_symbols(gm) or any(isinstance(example, torch.SymInt) for example in examples)


def _recompiled(
    restored: restoring.Restored, gm: GraphModule, example_inputs: Sequence[Any], settings: Options, trace: Trace
) -> Callable[..., Any]:
    """Compile what a saved trace has in place of a captured graph. Any error is raised: then the frame is traced."""
    if replace(settings, start="compiled") != replace(restored.head.options, start="compiled"):
        raise restoring.OtherProgram("an option")
    trace.sizes.asserted = restored.body.asserted
    observer = inspect.observe(gm, example_inputs, settings)
    graphs = restored.graphs
    left_out = None if graphs.left_out is None else graphs.left_out.again(gm, trace.code)
    if graphs.rows is not None:
        choice.guard(graphs.rows, graphs.packed, trace.code)
    if settings.offload.tier != "off":
        leaves.guard(gm, example_inputs)
    result = Result(graphs.rewritten, list(example_inputs), graphs.program, rows=graphs.rows if graphs.packed else None)
    for report in restored.body.reports:
        observer.after_pass(report, result, "")
    observer.lowering()
    with progress.compiling(trace.code):
        compiled = building_anew(
            restored_if_it_fails()(lambda: _lower(result, gm, settings, trace, observer.after_partition))
        )
    observer.finish("rewritten")
    recompiles.note_sizes(gm)
    if graphs.rows is not None:
        compiled = choice.counted(compiled, graphs.rows)
    compiled = passed_choices.noting(compiled, gm, example_inputs)
    return compiled if left_out is None else left_out.wrap(compiled)


fastpack_backend._is_fastpack = True  # type: ignore[attr-defined]  # dynamo/ recognises its own traces by this


def _rewritten(
    captured: Result, settings: Options, trace: Trace, after_pass: AfterPass
) -> tuple[Result, choice.RowCounts | None, bool]:
    """The result of the passes on the captured graph, the object that counts its rows, if they are counted, and whether
    it is packed.

    If the batch at hand has too few dead rows, `live_rows` is left out; the graph is guarded by that decision. If the
    batch cannot be packed, its masks may hold biases: then the passes run again, with attention as it is written.
    """
    gm = captured.gm
    passes: list[Pass] = [entry.load()() for entry in registry.selected(settings.passes)]
    if settings.rows == "all":
        return run_further(passes, captured, settings, after_pass), None, False
    told: list[tuple[Report, Result, str]] = []
    rows, packs = None, True

    def run(biases: bool) -> Result:
        told.clear()
        own = [type(each)(biases) if isinstance(each, LiveRows) else each for each in passes]
        return run_further(own, captured, settings, lambda *each: told.append(each))

    result = run(biases=False)
    with contained("counting rows", "They stay packed for each batch.", settings.strict):
        counts = choice.row_counts(result.draft, gm)
        if counts is not None and counts.live(trace.inputs(gm, counts.positions)) == math.inf:
            result = run(biases=True)
            counts = choice.row_counts(result.draft, gm)
        if counts is not None:
            packed = counts.packs(trace.inputs(gm, counts.positions))
            choice.guard(counts, packed, trace.code)
            rows, packs = counts, packed
            if packed:
                rows = result.rows = counts.of_packed(result.gm)
                rows.note_sizes(trace.inputs(gm, counts.positions), result.gm)
    if not packs:
        others = [each for each in passes if not isinstance(each, LiveRows)]
        return run_further(others, captured, settings, after_pass), rows, False
    for each in told:
        after_pass(*each)
    return result, rows, packs


# What no lower level may take for a defect, and what Dynamo, or the program, gets.
_MEANT: tuple[type[Exception], ...] = (*asks_for_another_trace(), MemoryBudgetError)
_RETRACED: tuple[type[Exception], ...] = (*_MEANT, Rejected)


def _compile(
    results: Sequence[Result], trace: Trace, settings: Options, on_report: OnReport
) -> tuple[Callable[..., Any], str]:
    """Compile the first of the given graphs that compiles; if none does, have Dynamo capture less or nothing.

    results: folded, rewritten and captured; some may be one graph. Returns a callable, and which graph it runs:
    "rewritten", "captured", or "uncompiled".
    """
    gm = results[-1].gm
    failure: tuple[str, Exception, str] | None = None
    for attempt, following in zip(results, [*results[1:], None], strict=True):
        if following is not None and following.gm is attempt.gm:
            continue
        compiled = _try_to_lower(attempt, gm, settings, trace, on_report)
        if isinstance(compiled, Exception) and ddp_buckets.wanted() and not settings.strict:
            failure = "compiling a graph piece by piece, at DDP's buckets,", compiled, "It is compiled whole."
            with ddp_buckets.moved_inside(None):
                compiled = _try_to_lower(attempt, gm, settings, trace, on_report)
        if not isinstance(compiled, Exception):
            if failure is not None:
                _warn(*failure, trace)
            return compiled, "rewritten" if attempt.gm is not gm else "captured"
        failed = compiled
        if settings.strict:
            raise failed
        if is_folded(attempt.gm):
            failure = "compiling a graph layer by layer", failed, "It is compiled whole."
        elif attempt.gm is not gm:
            failure = "compiling a graph as rewritten", failed, "It is compiled as it was captured."
    if retracing.may_trace_again(trace, failed, binds_symbols(gm)):
        text = f"the captured graph does not compile with data-dependent values ({error_text(failed)})"
        raise CaptureRejected(f"{text}. A graph that does not compile without them runs uncompiled") from failed
    _warn(f'compiling a graph with "{settings.lowering}"', failed, "It runs uncompiled, as it was captured.", trace)
    return uncompiled(gm), "uncompiled"


def _check_integers(gm: GraphModule) -> None:
    """Raise `CaptureRejected` for an integer made of a batch's float, such as `int(lengths.float().mean().item())`.

    Inductor's backward would read the float without receiving it ("name 'zuf0' is not defined", torch 2.13).
    """
    for node in nodes_in(gm):
        example = node.meta.get("example_value")
        if isinstance(example, torch.SymInt) and has_unbacked_floats(example):
            raise CaptureRejected(f"`{node.name}` makes an integer of a float, which Inductor does not compile")


def _try_to_lower(
    attempt: Result, gm: GraphModule, settings: Options, trace: Trace, on_report: OnReport
) -> Callable[..., Any] | Exception:
    """Compile without hints from the batch; if autograd needs a size that only the batch determines, with hints."""
    if settings.lowering != "eager":
        make_exact(attempt.gm)
    for needs_batch, hints in ((False, _without_hints(trace)), (True, tracing.without_caches())):
        try:
            trace.needs_batch = needs_batch
            with hints:
                return building_anew(restored_if_it_fails()(lambda: _lower(attempt, gm, settings, trace, on_report)))
        except _MEANT:
            raise
        except Exception as error:
            if trace.failure is not None:  # the frame is traced again, with a warning of its own
                raise FeatureRejected(trace.failure.feature, error_text(trace.failure.error)) from error
            failed = error
            if not is_data_dependent(error):
                break
    return failed


@contextlib.contextmanager
def _without_hints(trace: Trace) -> Iterator[None]:
    with trace.paused(), warnings.catch_warnings():
        # AOTAutograd traces backward in anomaly mode, which warns of each error; another try follows.
        warnings.filterwarnings("ignore", "Error detected in ")
        yield


def _warn(what: str, error: Exception, instead: str, trace: Trace) -> None:
    """Warn once for a function of the program and a kind of failure: each variant may word it differently."""
    log.debug("%s failed", what, exc_info=error)
    function = tracing.function_of(trace.code)
    if not is_unsaid(error, function):
        return
    key = (what, type(error), function)
    warn_once(key, f"{what} failed ({type(error).__name__}: {error}). {instead}", stacklevel=3)


def _lower(result: Result, gm: GraphModule, settings: Options, trace: Trace, on_report: OnReport) -> Callable[..., Any]:
    run = _lower_with_prologue(result, gm, uncompiled(gm), settings, trace.code, on_report)
    if settings.strict or settings.lowering == "eager":
        return run
    captured = unasserted(gm, trace.sizes.asserted_by_program())
    return recovering(run, captured, gm, tracing.function_of(trace.code))


def _lower_with_prologue(
    result: Result,
    gm: GraphModule,
    captured: Callable[..., Any],
    settings: Options,
    code: CodeType | None,
    on_report: OnReport,
) -> Callable[..., Any]:
    if result.program is None:
        return _lower_main(result, gm, settings, "", code, on_report)
    compiled, later = _compile_prologue(result.program, settings, on_report)
    sources = input_sources(gm)
    prologue = Prologue(result.program, sources, compiled=compiled, later=later)
    main = _lower_main(result, gm, settings, prologue.key, code, on_report)
    fakes = result.example_inputs[len(sources) :]
    raising = functools.partial(_run_in_eager_mode, code, captured) if spans_ranks() else None
    return with_prologue(main, prologue, captured, fakes, raising, settings.strict)


def _run_in_eager_mode(code: CodeType | None, captured: Callable[..., Any], *inputs: Any) -> Any:
    """Run the program of the frame that runs a compiled graph; the captured graph if that frame is not found."""
    program = eager_frame(code)
    return captured(*inputs) if program is None else program()


def _lower_main(
    result: Result, gm: GraphModule, settings: Options, salt: str, code: CodeType | None, on_report: OnReport
) -> Callable[..., Any]:
    told: list[Report] = []

    def compile(step: Step | None) -> Callable[..., Any]:
        told.clear()  # of tries at a step that has to fit, the last one runs
        return _lower_pieces(result, settings, salt, told.append, step)

    try:
        return fitted(settings.memory, gm, result.example_inputs, code, compile, result.rows, settings.strict)
    finally:
        for report in told:
            on_report(report)


def _lower_pieces(
    result: Result, settings: Options, salt: str, on_report: OnReport, step: Step | None
) -> Callable[..., Any]:
    def lower_piece(piece: GraphModule, example_inputs: Sequence[Any], place: Place = WHOLE) -> Callable[..., Any]:
        if step is not None and place.name in step.compiled:
            return step.reuse(place.name, on_report)
        if step is not None and place.calls != 1:
            with contained("computing rows in tiles", "They are computed at once.", settings.strict):
                piece = _tiled(piece, step)
        told: list[Report] = []
        own = piece if step is None else copy_graph_module(piece)  # compilers change it, and other tries begin with it
        compiled = lower(own, example_inputs, settings, salt, told.append, place, step)
        for report in told:
            on_report(report)
        if step is not None and place.calls == 1:
            step.keep(place.name, compiled, told)
        return compiled

    if is_folded(result.gm) and settings.lowering != "eager":  # DDP gets each layer's gradients when it is done
        with compiling_together() if step is None else contextlib.nullcontext():  # a plan is tried several times
            return lower_segments(result.gm, result.example_inputs, lower_piece, step)
    # DDP gets its gradients one by one anyway; a step that has to fit is planned as a whole, and not bucket by bucket.
    if settings.lowering == "eager" or step is not None:
        return lower_piece(result.gm, result.example_inputs)
    return ddp_buckets.compile_in_buckets(lower_piece, result.gm, result.example_inputs, on_report)


def _compile_prologue(
    program: Program, settings: Options, on_report: OnReport
) -> tuple[Callable[..., Any] | None, CompiledInBackground | None]:
    """The prologue's device graph, compiled if that is worthwhile: now, or while batches run."""
    if not is_compiled(program, settings):
        return None, None
    compile = functools.partial(lower_prologue, program, settings)
    if not refusal(traces_backward=False):
        on_report(Report("prologue", summary="its tensors are compiled in the background, if that pays"))
        return None, CompiledInBackground(compile, settings.strict)
    started = time.perf_counter()
    try:
        compiled = compile()
    except Exception as error:
        if settings.strict:
            raise
        _warn("compiling a prologue", error, "It runs operator by operator.", tracing.running())
        return None, None
    on_report(Report("prologue", summary="its tensors are compiled", seconds=time.perf_counter() - started))
    return compiled, None


retracing.install()
restoring.install()
inspect.start_summary_if_asked()


def _tiled(piece: GraphModule, step: Step) -> GraphModule:
    """A layer with the step's tiles of rows, if it has rows that can be computed so."""
    has_rows = has_regions(piece)
    step.could_tile |= has_rows  # layers of another kind may have some
    if step.tiles == 1 or not has_rows:
        return piece
    copy = copy_graph_module(piece)
    regions = tile_rows(copy, step.tiles)
    step.tiled += regions
    return copy if regions else piece
