"""The private names of Dynamo that this folder uses, checked with torch 2.11.0, 2.13.0 and 2.15.0.

- `convert_frame.trace_frame(..., compiler_fn, ..., one_graph, speculation_log, ...)` is one attempt at tracing one
  frame. `compile_frame` looks it up in the module at each attempt, under the compile lock, and starts another attempt
  if it raises `RestartAnalysis`. All attempts at one compilation share one speculation log.
- `SpeculationLog.clear()` forgets where earlier attempts broke the graph.
- `GuardOnDataDependentSymNode` and `PendingUnbackedSymbolNotFound` are the errors of an unbacked symbol.
- `config._make_closure_patcher(**values)` sets values on a hot path.
- `OutputGraph.current_tx` interprets the innermost frame; `exn_tab_entry` of its `current_instruction` has the
  handler of an exception, and `with_context.cm_obj` of an entry of its `block_stack` is the manager of a `with`.
- The `frame_exec_strategy` of an error that leaves `trace_frame` may say what happens to later calls of the frame.
- `TracingContext.extract_stack()` is the user's stack at the traced instruction.
- `ShortenTraceback` is the base of errors that Dynamo raises in the program as they are, with the traceback from
  `first_useful_frame` on.
- `torch._C._autograd._saved_tensors_hooks_set_tracing(True)` has autograd call no hooks, as AOTAutograd does.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import inspect
import itertools
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, cast

import torch

from fxpasses.graph.provenance import is_of_package

CHECKED = ("2.11.0", "2.13.0", "2.15.0")
_CLEANUPS = ("COPY", "WITH_EXCEPT_START")  # follow PUSH_EXC_INFO in the handler of a handler, or of a `with`
_ENDS = ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_EXCEPT", "RERAISE")  # the first one tells `except` from `finally`
TRACE_FRAME_PARAMETERS = ("code", "compiler_fn", "one_graph", "speculation_log")


class MissingName(Exception):
    """A private name is not where the checked versions of torch have it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"torch {torch.__version__} has no {name} (checked with {', '.join(CHECKED)})")


def find(name: str) -> Any:
    """The object with a private name; raises `MissingName`."""
    try:
        return pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        raise MissingName(name) from None


@dataclass(frozen=True)
class DynamoNames:
    """restart, skip: the exceptions by which Dynamo ends an attempt, to start another one or none.

    unsupported: the error after which it does not compile the frame. runtime_error: an operator's, on fake tensors.
    this_call_alone: the `frame_exec_strategy` of an error after which Dynamo traces the frame's next call again.
    """

    convert_frame: ModuleType
    trace_frame: Callable[..., Any]
    restart: Any
    skip: type[Exception]
    unsupported: type[Exception]
    runtime_error: type[Exception]
    this_call_alone: Any
    data_dependent: tuple[type[Exception], ...]

    @classmethod
    def find(cls) -> DynamoNames:
        """Raises `MissingName`."""
        trace_frame = find("torch._dynamo.convert_frame.trace_frame")
        for parameter in TRACE_FRAME_PARAMETERS:
            if parameter not in inspect.signature(trace_frame).parameters:
                raise MissingName(f"parameter {parameter!r} of torch._dynamo.convert_frame.trace_frame")
        find("torch._dynamo.symbolic_convert.SpeculationLog.clear")
        default = find("torch._dynamo.types.FrameAction.DEFAULT")
        shapes = "torch.fx.experimental.symbolic_shapes"
        return cls(
            convert_frame=find("torch._dynamo.convert_frame"),
            trace_frame=trace_frame,
            restart=find("torch._dynamo.exc.RestartAnalysis"),
            skip=find("torch._dynamo.exc.SkipFrame"),
            unsupported=find("torch._dynamo.exc.Unsupported"),
            runtime_error=find("torch._dynamo.exc.TorchRuntimeError"),
            this_call_alone=find("torch._dynamo.types.FrameExecStrategy")(default, default),
            data_dependent=(
                find(f"{shapes}.GuardOnDataDependentSymNode"),
                find(f"{shapes}.PendingUnbackedSymbolNotFound"),
            ),
        )


def asks_for_another_trace() -> tuple[type[Exception], ...]:
    """The exceptions by which a backend has Dynamo break the graph, skip the frame or retrace it: not failures."""
    exceptions = importlib.import_module("torch._dynamo.exc")
    fake = importlib.import_module("torch._subclasses.fake_tensor")
    found = [getattr(exceptions, name, None) for name in ("RestartAnalysis", "SkipFrame")]
    found += [getattr(fake, name, None) for name in ("DataDependentOutputException", "DynamicOutputShapeException")]
    return tuple(exception for exception in found if exception is not None)


def for_the_program(error: Exception) -> Exception:
    """An error of the same class that Dynamo raises in the program as it is, and not in its `BackendCompilerFailed`."""
    shortened = getattr(importlib.import_module("torch._dynamo.exc"), "ShortenTraceback", None)
    if shortened is None:
        return error
    kind, frame = type(error), inspect.currentframe()
    made = type(kind.__name__, (kind, shortened), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    try:
        return cast(Exception, made(*error.args, first_useful_frame=frame.f_back if frame is not None else None))
    except TypeError:
        return error  # a torch whose class takes something else


def add_guard(guards: Any, holds: Callable[..., bool], sources: Sequence[str], text: str) -> None:
    """Guard the graph of `guards` by `holds`; raises `MissingName`. See `guard_on`."""
    guards.add(guard_on(holds, sources, text))


def guard_compiled_graph(holds: Callable[..., bool], sources: Sequence[str], text: str) -> bool:
    """Guard the graph that Dynamo has given to the backend, if any; returns whether. Raises `MissingName`."""
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return False
    add_guard(context.guards_context.dynamo_guards, holds, sources, text)
    return True


def guard_on(holds: Callable[..., bool], sources: Sequence[str], text: str) -> Any:
    """A guard that calls `holds` with the values of `sources`, Dynamo's source expressions; raises `MissingName`.

    It runs after all other guards, so the values have the types and sizes that they had while tracing. `text` describes
    the condition in Dynamo's logs.
    """
    closure_vars, shape_source = check_guard_names()
    closure = dict(closure_vars())
    call = f"___fxpasses_batch({', '.join(sources)})"

    def FXPASSES_BATCH(builder: Any, guard: Any) -> None:  # Dynamo's logs show the name
        builder.add_python_lambda_leaf_guard_to_root(
            [call], [f"{call}  # {text}"], closure_vars={**closure, "___fxpasses_batch": holds}
        )

    FXPASSES_BATCH.arguments = holds, sources, text  # type: ignore[attr-defined]
    return shape_source().make_guard(FXPASSES_BATCH)


def arguments_of(guard: Any) -> tuple[Any, Sequence[str], str] | None:
    """The arguments of `guard_on` that made a guard; None for another guard."""
    return getattr(guard.create_fn, "arguments", None)


def check_guard_names() -> tuple[Callable[[], Mapping[str, object]], Callable[[], Any]]:
    """The names that `add_guard` needs; raises `MissingName`."""
    find("torch._dynamo.guards.GuardBuilder.add_python_lambda_leaf_guard_to_root")
    return find("torch._dynamo.guards._get_closure_vars"), find("torch._dynamo.source.ShapeEnvSource")


def guard_names() -> Mapping[str, object]:
    """The names that guards' sources use besides the frame's locals `L` and globals `G`; raises `MissingName`."""
    return check_guard_names()[0]()


def user_place() -> tuple[str, int]:
    """The file and line of the traced instruction; ("", 0) if unknown."""
    frames = torch._guards.TracingContext.extract_stack()
    place = next((frame for frame in reversed(frames) if not is_of_package(frame.filename)), None)
    return ("", 0) if place is None else (place.filename, place.lineno or 0)


def is_in_try(tx: Any) -> bool:
    """Whether the program may catch an error of the instruction that Dynamo's translator `tx` is at, in its frame or in
    a caller's."""
    while tx is not None:
        if _is_covered(tx):
            return True
        tx = getattr(tx, "parent", None)
    return False


def _is_covered(tx: Any) -> bool:
    """Whether a frame's instruction is inside a `try` with `except`, or a `with` that may catch its error."""
    blocks = getattr(tx, "block_stack", ())
    if any(_may_suppress(tx, block.with_context) for block in blocks if block.with_context is not None):
        return True
    instruction, seen = tx.current_instruction, 0
    while (entry := getattr(instruction, "exn_tab_entry", None)) is not None and seen < 16:
        if _catches(tx, entry.target):
            return True
        instruction, seen = entry.target, seen + 1
    return sys.version_info < (3, 11) and any(block.with_context is None for block in blocks)  # Python 3.10


def _may_suppress(tx: Any, context: Any) -> bool:
    """Whether a context manager may suppress an error: `__exit__` may return true, or its generator has `except`."""
    manager = getattr(context, "cm_obj", None)
    if isinstance(manager, (contextlib.suppress, contextlib.ExitStack)):
        return True
    if isinstance(manager, contextlib._GeneratorContextManager):
        generator = tx.output.side_effects.store_attr_mutations.get(context, {}).get("gen")  # of Dynamo's
        code = getattr(generator, "code", None)
        return code is not None and _has_except(code)
    code = getattr(getattr(type(manager), "__exit__", None), "__code__", None)
    return code is not None and _returns_something(code)


@functools.lru_cache(maxsize=256)
def _has_except(code: CodeType) -> bool:
    names = {instruction.opname for instruction in dis.get_instructions(code)}
    matches = ("CHECK_EG_MATCH", "CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH")
    return not names.isdisjoint(matches) or "suppress" in code.co_names


@functools.lru_cache(maxsize=256)
def _returns_something(code: CodeType) -> bool:
    """Whether a function may return a true value."""
    pairs = list(itertools.pairwise(dis.get_instructions(code)))
    found = [before if i.opname == "RETURN_VALUE" else i for before, i in pairs if i.opname.startswith("RETURN_")]
    return any(not (i.opname in ("LOAD_CONST", "RETURN_CONST") and not i.argval) for i in found)


def _catches(tx: Any, handler: Any) -> bool:
    """Whether a handler is an `except`. A `finally` raises the error again, unless it returns."""
    start = tx.indexof[handler] + 1
    if handler.opname != "PUSH_EXC_INFO" or tx.instructions[start].opname in _CLEANUPS:
        return False
    names = (instruction.opname for instruction in tx.instructions[start:])
    return next((name for name in names if name in _ENDS), "") != "RERAISE"


def user_line() -> str:
    """`file.py:12` of the traced instruction, or ""."""
    return in_short(*user_place())


def in_short(file: str, line: int) -> str:
    """`file.py:12`, or ""."""
    return f"{os.path.basename(file)}:{line}" if file else ""


def config_switch(values: Mapping[str, bool]) -> Callable[[], Callable[[], None]]:
    """A function that sets `values` in `torch._dynamo.config` and returns another that restores the previous values."""
    config = importlib.import_module("torch._dynamo.config")
    make = getattr(config, "_make_closure_patcher", None)
    if make is not None:
        return make(**values)

    def switch() -> Callable[[], None]:
        patch = config.patch(dict(values))
        patch.__enter__()
        return lambda: patch.__exit__(None, None, None)

    return switch


@contextlib.contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """The user's hooks for saved tensors, a checkpoint's for instance, do not see those of a trace's fake tensors."""
    autograd: Any = torch._C._autograd
    before = autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        autograd._saved_tensors_hooks_set_tracing(before)
