"""Takes a frame's trace from a file, in place of tracing it.

A saved trace is used for a frame whose code, program and settings are those of the trace, and of which every guard
states what it stated there; its guards are then made for the frame at hand, and checked. Whatever fails or differs, the
frame is traced.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import pickle
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.source import GlobalSource
from torch._guards import GuardsSet, TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._ordered_set import OrderedSet

from fxpasses.base.collector import visiting_what_is_new
from fxpasses.base.containment import contained, say
from fxpasses.base.once import warn_once
from fxpasses.dynamo import flags, retracing, variants, whole_program
from fxpasses.dynamo.attempt import Attempt
from fxpasses.dynamo.checks import Check
from fxpasses.dynamo.dynamo_names import add_guard, asks_for_another_trace, guard_names
from fxpasses.dynamo.equal_guards import Reader, Relocation
from fxpasses.dynamo.guarding import BatchGuard
from fxpasses.dynamo.trace import Trace
from fxpasses.dynamo.tracing import as_current, described
from fxpasses.errors import MemoryBudgetError
from fxpasses.restart import pickling, program, recording
from fxpasses.restart.dynamo_state import (
    Differs,
    RestoredFrame,
    RestoredOutput,
    add_automatic_dynamic,
    autograd_modes,
    given_modules,
    guarded,
    modes_around,
    renamed_state,
    set_tracked_fakes,
    share_memory,
)
from fxpasses.restart.facts import Names, digest_of, fact_of, shared_objects
from fxpasses.restart.pickling import CannotPickle
from fxpasses.restart.saved_trace import Body, Graphs, Head, SavedTrace, digest_of_body

log = logging.getLogger(__name__)

_MOST = 16  # traces of a frame; Dynamo keeps 8 graphs
_loaded: dict[str, list[SavedTrace]] = {}  # by the digest of the frame's code


def load(traces: Sequence[SavedTrace]) -> None:
    """Have frames use these traces from now on."""
    for trace in traces:
        known = _loaded.setdefault(trace.code, [])
        if trace in known:
            known.remove(trace)
        known.append(trace)
        del known[:-_MOST]


class OtherProgram(Differs):
    """It is of another program, or was made under other settings."""


# Besides, what Dynamo knows only once it compiles the graph may ask for another trace.
_NOT_THIS: tuple[type[Exception], ...] = (Differs, CannotPickle, MemoryBudgetError, *asks_for_another_trace())


@dataclass
class Restored:
    """What the backend compiles in place of a captured graph."""

    head: Head
    body: Body
    graphs: Graphs


def restored_of(gm: GraphModule) -> Restored | None:
    """What takes the place of a captured graph; None if Dynamo has just captured it."""
    return gm.meta.get(_KEY)


_KEY = "fxpasses_restored"


class CompileFrame:
    """Replaces `convert_frame.compile_frame`."""

    def __init__(self, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self._signature = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = self._of_this_backend(args, kwargs)
        if frame is None:
            return self.original(*args, **kwargs)
        if _loaded:
            found = None
            strict = bool(retracing.option(frame["compiler_fn"], "strict"))
            with (
                contained("looking for a saved trace", "The program is traced.", strict),
                visiting_what_is_new(),
                tracing(TracingContext(None)),  # some sources add a guard to it when they are made, or loaded
            ):
                found = _restored(frame, strict)
            if found is not None:
                return found
        if not recording.is_on():
            return self.original(*args, **kwargs)
        with recording.recording() as recorded:
            result = self.original(*args, **kwargs)
        recording.keep(recorded, frame, result.tracer_output.output_graph, result.bytecode)
        return result

    def _of_this_backend(self, args: Any, kwargs: Any) -> Mapping[str, Any] | None:
        with contained("finding out whose a frame is", "It is traced."):
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            frame = bound.arguments
            others = frame["export"], frame["distributed_state"], frame["package"]
            return frame if retracing.is_fastpack(frame["compiler_fn"]) and not any(others) else None
        return None


def _restored(frame: Mapping[str, Any], strict: bool) -> Any:
    """What takes the place of tracing a frame; None if no saved trace is the frame's."""
    code, other = frame["code"], None
    for trace in reversed(_loaded.get(digest_of(code), ())):
        try:
            found = _made(trace, frame)
            recording.add(trace)
            return found
        except _NOT_THIS as error:
            log.debug("a saved trace of %s is not used", code.co_name, exc_info=error)
            other = error if isinstance(error, OtherProgram) else other
        except Exception as error:
            if strict:
                raise
            say("taking a trace from a file", error, "The program is traced.")
    if other is not None:
        text = f"{described(code)} is traced anew: its saved trace is not used, because {other} is another."
        warn_once(("saved trace", code), text)
    return None


def _guards(head: Head, frame: Mapping[str, Any]) -> list[Any]:
    """The guards of a trace. Raises `Differs` if it is not the frame's."""
    if head.one_graph is not bool(frame["one_graph"]):
        raise OtherProgram("`fullgraph`")
    if head.is_given is not whole_program.traces_what_was_given():
        raise OtherProgram("what was given to `torch.compile`")
    if head.modes != autograd_modes():
        raise Differs("a mode of autograd")
    if around := modes_around():
        raise Differs(f"{around} is around the frame")
    if different := program.differs(head.settings, program.settings()):
        raise OtherProgram(f"the setting {different}")
    if head.sets and head.sets != program.order_of_sets():
        raise OtherProgram("the order of sets (PYTHONHASHSEED)")
    if different := next((name for name, value in head.environment.items() if os.environ.get(name) != value), ""):
        raise OtherProgram(f"the variable {different} of the environment")
    for name, digest in head.sources.items():
        if program.file_digest(name) != digest:
            raise OtherProgram(f"the file of {name}")
    read = Reader(frame["locals"], {**frame["globals"], **_globals(head, frame)})
    guards = [source.make_guard(create) for source, create in head.guards]
    names = Names(read)
    for guard, fact in zip(guards, head.facts, strict=True):
        try:
            now = fact_of(guard, names)
        except (AttributeError, CannotPickle, IndexError, KeyError, TypeError) as error:
            raise Differs(f"{guard.originating_source.name} is not there") from error
        if now != fact:
            raise Differs(
                f"{guard.create_fn_name()} {guard.originating_source.name}: {fact!s:.200}, and now {now!s:.200}"
            )
    about = guarded(guards, read)
    if head.shared != shared_objects(about):
        raise OtherProgram("which of its objects are one")
    modules = given_modules(about)
    values = [value for _, value in about]
    owned = [module for root in modules for module in root.modules()]
    if different := program.differs(head.classes, program.classes([*values, *owned], names.digest)):
        raise OtherProgram(f"the class {different}")
    if head.modules != program.modules_digest(modules, names.digest):
        raise OtherProgram("what its modules are and own")
    return guards


def _made(trace: SavedTrace, frame: Mapping[str, Any]) -> Any:
    """What takes the place of tracing a frame. Raises `Differs`, or what fails."""
    head: Head = pickle.loads(trace.head)
    guards = _guards(head, frame)
    if digest_of_body(trace.body) != head.body:
        raise OtherProgram("the file: a part of another trace is in its place")
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    body: Body = pickling.loads(trace.body, fake_mode)
    try:
        return _compiled(head, body, guards, frame, fake_mode)
    except BaseException:
        for guard in _batch_guards(body):
            guard.release()  # Dynamo does not free a function that a guard calls
        raise


def _batch_guards(body: Body) -> list[BatchGuard]:
    return [holds for holds, *_ in body.checks if isinstance(holds, BatchGuard)]


def _compiled(
    head: Head, body: Body, stated: Sequence[Any], frame: Mapping[str, Any], fake_mode: FakeTensorMode
) -> Any:
    graphs: Graphs = pickling.loads(body.graphs, fake_mode)
    if different := program.differs(head.operators, program.operators([graphs.captured])):
        raise OtherProgram(f"the operator {different}")
    _check_batch(body, graphs, frame)
    own = {name: f"{name}_{uuid.uuid4().hex}" for name in (*head.objects, body.name)}
    set_tracked_fakes(fake_mode.shape_env, body.tracked)
    context = TracingContext(fake_mode)
    context.guards_context.dynamo_guards = guards = GuardsSet(OrderedSet(_renamed(guard, own) for guard in stated))
    for holds, feature, sources, text in body.checks:
        add_guard(guards, Check(holds, feature, frame["code"], restart="kept"), sources, text)
    graphs.captured.meta[_KEY] = Restored(head, body, graphs)
    output = RestoredOutput(frame, renamed_state(body.state, own), context, graphs.captured.graph, guards)
    running = Trace(Attempt())
    running.code = frame["code"]
    examples = _examples(graphs, frame, fake_mode)
    try:
        for name, value in _globals(head, frame).items():
            if name in own:
                output.install_global(own[name], value)
            else:
                output.add_global(name, value)
        with flags.held_at(flags.wanted()), as_current(running), tracing(context):
            compiled = frame["compiler_fn"](graphs.captured, examples)
        output.install_global(own[body.name], torch._dynamo.disable(compiled, reason="it is compiled"))
        used = tuple(own.get(name, name) for name in body.bytecode.co_names)
        restored = RestoredFrame(output, frame, body.bytecode.replace(co_names=used))
    except BaseException:
        output.undo()
        raise
    variants.end_since_reset(frame["code"])
    for guard in _batch_guards(body):
        variants.add(frame["code"], guard)
    add_automatic_dynamic(frame["code"], body.sizes)
    return restored


def _check_batch(body: Body, graphs: Graphs, frame: Mapping[str, Any]) -> None:
    """Raise `Differs` for other sizes than those of the trace, or for a batch of another kind: its guards will say so
    as well, but only once the graph is compiled."""
    names = {"L": frame["locals"], "G": frame["globals"]}
    for guard in _batch_guards(body):
        if guard.broken_in(names) != []:
            raise Differs(f"the batch: {guard.text}")
    if graphs.rows is not None:
        inputs = [eval(source, {**guard_names(), **names}) for source in graphs.rows.sources]
        if graphs.rows.packs(inputs) is not graphs.packed:
            raise Differs("how many rows are needed")
        if graphs.packed:
            graphs.rows.note_sizes(inputs, graphs.rewritten)
    read = Reader(frame["locals"], frame["globals"])
    for fake, source, _ in body.tracked:
        if isinstance(fake, torch.Tensor):
            sizes = zip((*fake.shape, *fake.stride()), (*(value := read(source)).shape, *value.stride()), strict=True)
            if any(isinstance(was, int) and was != now for was, now in sizes):
                raise Differs(f"the size of {source.name}: {fake.shape}, and now {value.shape}")


def _examples(graphs: Graphs, frame: Mapping[str, Any], fake_mode: FakeTensorMode) -> list[Any]:
    """The inputs of the rewritten graph: tensors of the frame, of which `fake_mode` knows the saved fake ones."""
    read = Reader(frame["locals"], frame["globals"])
    found = []
    for node, fake in zip(graphs.rewritten.graph.find_nodes(op="placeholder"), graphs.examples, strict=True):
        source = getattr(node, "_dynamo_source", None)
        if source is not None and isinstance(fake, torch.Tensor):
            value = read(source)
            if not isinstance(value, torch.Tensor):  # a number, which Dynamo has made a tensor of
                value = torch.tensor(value, dtype=fake.dtype)
            memo: Any = fake_mode.fake_tensor_converter
            memo.set_tensor_memo(value, fake)
            fake = value
        found.append(fake)
    if share_memory(found):
        raise Differs("some of its inputs share memory")
    return found


def _globals(head: Head, frame: Mapping[str, Any]) -> dict[str, Any]:
    """The global names that Dynamo had made, with what they are in this process."""
    found = {name: importlib.import_module(module) for name, module in head.imports.items()}
    return {**found, **{name: frame["builtins"] if of is None else of for name, of in head.objects.items()}}


def _renamed(guard: Any, names: Mapping[str, str]) -> Any:
    """The guard with other names for globals: this process may have made the saved ones for something else."""
    create, source = guard.create_fn, _renamed_source(guard.originating_source, names)
    if isinstance(create, functools.partial):  # its operands may be sources, as those of guards on duplicates
        operands = {name: _renamed_source(value, names) for name, value in create.keywords.items()}
        if any(value is not operands[name] for name, value in create.keywords.items()):
            create = functools.partial(create.func, **operands)
    moves = source is not guard.originating_source or create is not guard.create_fn
    return source.make_guard(create) if moves else guard


def _renamed_source(source: Any, names: Mapping[str, str]) -> Any:
    root = source
    while (base := getattr(root, "base", None)) is not None:
        root = base
    if isinstance(root, GlobalSource) and root.global_name in names:
        return Relocation(root, GlobalSource(names[root.global_name]))(source)
    return source


def install() -> None:
    """Intercept Dynamo's compilations of frames. Without the name, in another torch, each frame is traced."""
    with contained("intercepting Dynamo's compilations", "Traces are neither kept nor taken from files."):
        convert_frame: Any = importlib.import_module("torch._dynamo.convert_frame")
        if not isinstance(convert_frame.compile_frame, CompileFrame):
            convert_frame.compile_frame = CompileFrame(convert_frame.compile_frame)
