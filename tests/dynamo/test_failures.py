"""An error of the package's own, anywhere: the step runs, equals eager mode, and one warning says what is left out."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxpasses.compiler.backend
import fxpasses.data
import fxpasses.fastpack
import fxpasses.inspect
from fxpasses import registry
from fxpasses.compiler import output_strides, partitioner, restrides
from fxpasses.dynamo import (
    checks,
    guarding,
    hints,
    interceptions,
    number_errors,
    partial_graph,
    retracing,
    size_defaults,
    tracing,
    variants,
)
from fxpasses.dynamo.failures import FailedFeatures
from fxpasses.dynamo.interceptions import Handler, Row
from fxpasses.dynamo.trace import Trace
from fxpasses.graph import values
from fxpasses.inspect import recording
from fxpasses.metadata import analysis as metadata_analysis
from fxpasses.metadata.runtime import batch_cache, prologue
from fxpasses.metadata.runtime.prologue import Prologue
from fxpasses.passes import pipeline
from fxpasses.passes.pipeline import Pass
from tests.dynamo.reaching import BATCH, PROGRAMS, X, requires_gradient
from tests.support import results

pytestmark = [
    pytest.mark.usefixtures("no_failures_before"),
    pytest.mark.all_cases,  # each handler, each pass, each piece of bookkeeping fails, one by one
]

ROWS = interceptions.table()


@pytest.fixture
def no_failures_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed for a program in another test has not failed yet."""
    monkeypatch.setattr(checks, "_failed", FailedFeatures())


def name_of(row: Row) -> str:
    return f"{row.feature.name}-{row.handler.function.__name__}-{row.handler.site.name.rsplit('.', 1)[-1]}"


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a defect")


def said_in_two_steps(program: Any, lowering: str = "eager", batch: Any = BATCH, **options: Any) -> list[str]:
    """What this package says in two steps, which equal those of eager mode."""
    twin = copy.deepcopy(program)
    given = {"fastpack.lowering": lowering, **{f"fastpack.{name}": value for name, value in options.items()}}
    with warnings.catch_warnings(record=True) as caught, fxpasses.inspect.record():
        warnings.simplefilter("default")
        step = torch.compile(program, backend="fastpack", options=given)
        for _ in range(2):
            torch.testing.assert_close(results(step, batch), results(twin, batch), rtol=1e-5, atol=1e-5)
    return [str(warning.message) for warning in caught if "fxpasses:" in str(warning.message)]


@functools.cache
def reached() -> dict[int, str]:
    """The program, by the number of each handler's row, that reaches the handler."""
    found: dict[int, str] = {}

    def noting(number: int, handler: Handler, program: str) -> Handler:
        def function(trace: Trace, proceed: Any, /, *args: Any, **kwargs: Any) -> Any:
            result = handler.function(trace, proceed, *args, **kwargs)
            found.setdefault(number, program)  # one that ends it, after which `broken` fails
            return result

        return dataclasses.replace(handler, function=function)

    with pytest.MonkeyPatch.context() as patch:
        for program, (make, lowering) in PROGRAMS.items():
            rows = [dataclasses.replace(r, handler=noting(n, r.handler, program)) for n, r in enumerate(ROWS)]
            patch.setattr(interceptions, "table", lambda rows=rows: rows)
            torch._dynamo.reset()
            assert said_in_two_steps(make(), lowering) == []
    return found


def test_each_handler_is_reached_by_a_program() -> None:
    missed = {name_of(row) for number, row in enumerate(ROWS) if row.places and number not in reached()}
    assert missed == set()


@pytest.mark.parametrize("number", range(len(ROWS)), ids=map(name_of, ROWS))
def test_a_handler_that_fails_switches_off_its_feature(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ROWS[number].places:
        pytest.skip("this torch lacks the place")
    make, lowering = PROGRAMS[reached()[number]]
    torch._dynamo.reset()
    rows = [dataclasses.replace(row, handler=broken(row.handler)) if n == number else row for n, row in enumerate(ROWS)]
    monkeypatch.setattr(interceptions, "table", lambda: rows)
    said = said_in_two_steps(make(), lowering)
    assert len(said) == 1 and f"{ROWS[number].feature.title!r} failed (ZeroDivisionError: a defect)" in said[0]


def broken(handler: Handler) -> Handler:
    """A handler that fails after it has done its work, so that what it changed is half done."""

    def function(trace: Trace, proceed: Any, /, *args: Any, **kwargs: Any) -> Any:
        handler.function(trace, proceed, *args, **kwargs)
        fails()

    return dataclasses.replace(handler, function=function)


def test_an_error_that_dynamo_catches_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo takes some errors for an answer, and would go on with what a handler has left half done."""

    def catches(trace: Trace, proceed: Any, tx: Any) -> Any:
        trace.note_error(interceptions.Feature.HINTS, ZeroDivisionError("a defect"))
        return interceptions.NOT_HANDLED

    (row,) = (row for row in ROWS if name_of(row) == "HINTS-attach-step")
    rows = [dataclasses.replace(row, handler=dataclasses.replace(row.handler, function=catches))]
    monkeypatch.setattr(interceptions, "table", lambda: [*rows, *(other for other in ROWS if other is not row)])
    (said,) = said_in_two_steps(PROGRAMS["operands"][0]())
    assert "'value hints' failed" in said


def test_a_feature_that_failed_is_not_tried_again_in_the_models_other_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(Trace, "attach", lambda *_: fails(calls.append("attach")))

    def breaks(x: Tensor, lengths: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * lengths.sum()

    (said,) = said_in_two_steps(breaks)
    assert calls == ["attach"] and "code that asks the batch for a number breaks the graph" in said


def test_a_method_with_another_parameter_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.variables.builtin import BuiltinVariable

    original = BuiltinVariable.call_bool

    def call_bool(self: Any, tx: Any, how: Any, arg: Any) -> Any:
        return original(self, tx, arg)

    monkeypatch.setattr(BuiltinVariable, "call_bool", call_bool)
    missing = [row.missing for row in interceptions.table() if row.missing]
    assert len(missing) == 2 and all("call_bool" in text and "breaks the graph" in text for text in missing)


def test_strict_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trace, "attach", fails)
    with pytest.raises(Exception, match="a defect"):
        said_in_two_steps(PROGRAMS["operands"][0](), strict=True)


# Passes


def metadata_in_layers(x: Tensor, lengths: Tensor) -> Tensor:
    for _ in range(2):
        mask = torch.zeros(12, 12)
        mask[:, : lengths.max().item()] = 1
        x = (mask @ x).sin()
    return x


def pass_that_fails(kind: Callable[[], Pass], when: str) -> Callable[[], Pass]:
    class Failing(kind):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any) -> Any:
            if when == "at its end":
                super().__call__(*args)
            with pytest.MonkeyPatch.context() as patch:
                if when == "half way":
                    patch.setattr(torch.fx.Graph, "erase_node", fails)
                    super().__call__(*args)
            fails()

    return Failing


@pytest.mark.parametrize("when", ["at once", "half way", "at its end"])
@pytest.mark.parametrize("entry", registry.selected(registry.names()), ids=lambda entry: entry.name)
def test_a_pass_that_fails_is_dropped(entry: registry.Entry, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry.where, pass_that_fails(entry.load(), when))
    (said,) = said_in_two_steps(metadata_in_layers)
    assert f"the pass {entry.name} failed and was dropped (ZeroDivisionError: a defect)" in said


def test_a_partition_that_cannot_be_copied_keeps_its_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioner, "copy_graph", fails)
    (said,) = said_in_two_steps(lambda x, lengths: (x.sin() * lengths).cos(), "aot_eager", offload="host")
    assert "the pass offload_activations failed and was dropped (ZeroDivisionError: a defect)" in said


# Guards


def asks(x: Tensor, lengths: Tensor) -> Tensor:
    return x.sin() if lengths.max().item() > 6 else x.cos()


def runs(step: Any, program: Any, batches: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            torch.testing.assert_close(step(*batch), program(*batch))
    return [str(warning.message) for warning in caught if "fxpasses:" in str(warning.message)]


@pytest.mark.parametrize("feature", ["value hints", "repeated hooks", "which inputs are leaves"])
def test_a_guard_that_always_fails_compiles_the_frame_once_more(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = checks.Check.__init__
    batches: list[Any] = [(X, torch.tensor([8, 4 + number])) for number in range(5)]

    def failing(self: Any, holds: Any, guarded: Any, code: Any, what: str = "", restart: str = "again") -> None:
        mine = what if guarded is None else guarded.title
        make(self, fails if mine == feature else holds, guarded, code, what, restart)

    monkeypatch.setattr(checks.Check, "__init__", failing)
    program: Any = asks
    if feature == "repeated hooks":
        program = torch.nn.Linear(2, 2)
        for _ in range(2):
            program.register_forward_hook(requires_gradient)
        batches = [(X,)] * 5
    options = {"fastpack.lowering": "eager"}
    if feature == "which inputs are leaves":
        options = {"fastpack.lowering": "aot_eager", "fastpack.offload": "host"}
    with fxpasses.inspect.record() as record:
        said = runs(torch.compile(program, backend="fastpack", options=options, dynamic=False), program, batches)
    said = [text for text in said if "activations are not moved" not in text]
    assert len(said) == 1 and f"a guard of {feature} failed (ZeroDivisionError: a defect)" in said[0]
    assert len(record.graphs) <= 4


# What the backend and the traces keep


BOOKKEEPING: dict[str, tuple[Any, str]] = {
    "observe": (recording.end_of_run, "entry"),
    "capture of a record": (recording._Recorder, "capture"),
    "record of a pass": (recording._Recorder, "after_pass"),
    "record of a lowering": (recording._Recorder, "lowering"),
    "end of a record": (recording._Recorder, "finish"),
    "report": (fxpasses.compiler.backend.tracing, "report"),
    "whole program": (fxpasses.compiler.backend.whole_program, "is_whole"),
    "sizes": (fxpasses.compiler.backend.recompiles, "note_sizes"),
    "checks of a trace": (tracing, "check"),
    "guards without Dynamo": (guarding, "checked"),
    "choices of routers": (fxpasses.compiler.backend.passed_choices, "noting"),
    "copies for passes": (pipeline, "copy_graph_module"),
    "contexts of passes": (pipeline, "_context"),
    "end of a graph": (Trace, "close"),
    "speculated branches": (Trace, "speculated"),
    "unproved branches": (Trace, "unproved"),
    "end of a trace": (Trace, "end"),
    "start of a trace": (tracing, "_started"),
    "table of handlers": (interceptions, "table"),
    "hints": (Trace, "value"),
    "answers": (Trace, "_note"),
    "walk": (fxpasses.dynamo.partial_graph.PartialGraph, "_catch_up"),
    "assumptions": (tracing, "assumptions_of"),
    "assumptions of a guard": (guarding, "assumptions_of"),
    "a guard": (guarding, "add_guard"),
    "its program": (guarding.BatchGuard, "__init__"),
    "variants": (variants, "begin"),
    "guards of variants": (variants, "add"),
    "leftovers": (retracing, "forget_leftovers"),
    "options": (retracing, "option"),
    "backends": (retracing, "is_fastpack"),
    "programs": (retracing, "_program"),
    "DDP": (retracing.ddp_buckets, "optimizer_among"),
    "first attempt": (tracing, "first_attempt"),
    "unproved functions": (retracing.Unproved, "given_up"),
}


@pytest.mark.parametrize("name", BOOKKEEPING)
def test_what_is_kept_beside_the_graph_may_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute = BOOKKEEPING[name]
    monkeypatch.setattr(owner, attribute, fails)
    said = said_in_two_steps(truth_and_mask)
    assert len(said) == 1 and "ZeroDivisionError: a defect" in said[0], said


def truth_and_mask(x: Tensor, lengths: Tensor) -> Tensor:
    longest = lengths.max().item()
    mask = torch.zeros(12, 12)
    mask[:, :longest] = 1
    return (mask @ x).sin() if longest > 6 else x


SIZES: dict[str, tuple[Any, str]] = {
    "who asks": (size_defaults, "_asking_operator"),
    "what is asked": (size_defaults, "_size"),
    "questions about layouts": (size_defaults, "_is_of_layout"),
    "the operator that runs": (size_defaults.SizeDefaults, "_current"),
    "PyTorch's answers of before": (size_defaults, "_forget_answers"),
    "splits of an all-to-all": (size_defaults, "_assert_splits"),
    "the operators of a trace": (size_defaults.SizeDefaults, "running"),
    "what may break": (size_defaults.SizeDefaults, "check"),
    "what is guarded": (size_defaults.SizeDefaults, "_guard"),
    "sizes of one": (fxpasses.compiler.backend, "make_exact"),
}


@pytest.mark.parametrize("name", SIZES)
def test_questions_about_sizes_may_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*SIZES[name], fails)
    (said,) = said_in_two_steps(first_and_sum, "aot_eager")
    assert "'value hints' failed (ZeroDivisionError: a defect)" in said


def first_and_sum(x: Tensor, lengths: Tensor) -> Tensor:
    h = x[: lengths.max()]
    return h - h[:1] + torch.stack(h.unbind()).sum(0)


def trimmed(x: Tensor, lengths: Tensor) -> Tensor:
    x = x.view(2, 6, 2)
    seen = x[:, torch.arange(6) < lengths.max()]
    kept = torch.arange(seen.shape[1])[: x[:, : lengths.max()].shape[1]] > 1
    n = lengths.min().item()
    # Inductor of torch 2.11 does not compile the gradient of such a slice.
    cut = x[:, :n] if torch.__version__ >= "2.12" else x[:, torch.arange(6) < n]
    return F.softmin(cut.transpose(1, 2), 2) if kept.any() and n > 1 else x


PIECES: dict[str, tuple[Any, str, str]] = {
    "views as Dynamo ran them": (values.effects, "as_in_program", "eager"),
    "effects": (values.effects, "observe", "eager"),
    "numbers of values": (values.ValueTable, "apply", "eager"),
    "sizes of activations": (metadata_analysis, "arithmetic", "eager"),
    "which sizes are computed": (metadata_analysis, "is_arithmetic", "eager"),
    "sizes of stand-ins": (partial_graph._PartialWalk, "_number_sizes", "eager"),
    "numbers that fail": (hints, "check_operation", "eager"),
    "what may fail": (number_errors, "_may_fail", "eager"),
    "strides of results": (output_strides, "_expected", "inductor"),
    "which results": (output_strides.TracedStrides, "given_to", "inductor"),
    "strides that differ": (restrides, "_differs", "inductor"),
    "copies of results": (restrides, "_copy", "inductor"),
    "integers of floats": (fxpasses.compiler.backend, "_check_integers", "inductor"),
    "a second way": (fxpasses.compiler.backend, "recovering", "inductor"),
    "its assertions": (fxpasses.compiler.backend, "unasserted", "inductor"),
}


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_that_several_levels_use_may_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, lowering = PIECES[name]
    monkeypatch.setattr(owner, attribute, fails)
    with torch._inductor.config.patch(fx_graph_cache=False):  # what it holds has the strides already
        said = said_in_two_steps(trimmed, lowering)
    assert len(said) == 1 and "ZeroDivisionError: a defect" in said[0], said


# What runs in a step


RUN_TIME: dict[str, tuple[Any, str]] = {
    "a prologue": (Prologue, "__call__"),
    "whether it is valid": (Prologue, "is_valid"),
    "its results of before": (Prologue, "known"),
    "what it keeps": (Prologue, "keep"),
    "the tensors it reads": (Prologue, "roots"),
    "the state of a batch": (batch_cache.State, "of"),
    "the cache": (batch_cache.BatchCache, "get"),
    "what the cache keeps": (batch_cache.BatchCache, "put"),
    "the copy to the host": (prologue, "to_host"),
}


@pytest.mark.parametrize("name", RUN_TIME)
def test_a_batch_whose_prologue_fails_runs_as_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = torch.compile(metadata_in_layers, backend="fastpack", options={"fastpack.lowering": "eager"})
    step(*BATCH)
    monkeypatch.setattr(*RUN_TIME[name], fails)
    said = runs(step, metadata_in_layers, [(X, torch.tensor([8, 4])), (X, torch.tensor([8, 3]))])
    assert all("ZeroDivisionError: a defect" in text for text in said)
    assert len(said) == (name != "the copy to the host")  # which a batch on the CPU does not need
    monkeypatch.undo()
    assert runs(step, metadata_in_layers, [(X, torch.tensor([8, 4]))]) == []


def test_a_prologue_that_fails_as_the_program_does_raises_the_programs_error() -> None:
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        return x * torch.arange(4)[lengths].sum().item()

    step = torch.compile(program, backend="fastpack", options={"fastpack.lowering": "eager"})
    step(X, torch.tensor([3, 2]))
    for wrong in (torch.tensor([3, 9]), torch.tensor([7, 1])):
        with pytest.raises(IndexError, match="out of bounds"):
            step(X, wrong)
    assert runs(step, program, [(X, torch.tensor([1, 2]))]) == []


def test_prefetching_that_fails_leaves_the_batch_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxpasses.metadata.runtime import prefetching

    monkeypatch.setattr(prefetching, "_frames", fails)
    with pytest.warns(UserWarning, match="prefetching a batch failed"):
        batches = list(fxpasses.data.PrefetchLoader([{"x": X}] * 3, metadata_in_layers))
    assert len(batches) == 3 and fxpasses.prefetch(metadata_in_layers, {"x": X}) == 0
