"""The hints of one trace: put into Dynamo when a frame's trace begins, taken out when it ends, and guarded after.

Everything is installed only while a frame is traced for this package's backend, in whatever thread; the patches look
for hints in the context of the thread that runs them, so a trace for another backend meanwhile finds none.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
import torch._dynamo.config as _config
from torch.fx import GraphModule

from fxpasses.capture import guarding
from fxpasses.capture.assumptions import assumptions_of
from fxpasses.capture.hints import Hints, current
from fxpasses.capture.skipping import Skipping
from fxpasses.capture.stored_numbers import StoredNumbers, is_part_of_frame, traces_what_was_given
from fxpasses.graph.regions import CHECKPOINT
from fxpasses.graph.skips import Skip
from fxpasses.report import Report

log = logging.getLogger(__name__)

# Graphs of one frame that differ in their assumptions. Dynamo gives a frame up at its limit (8): before that, the
# frame is traced without hints, and the questions break the graph as they do in stock PyTorch.
_MOST_VARIANTS = 6


@contextmanager
def hints_while_tracing(code: CodeType, skips: bool, numbers: bool, stores: bool) -> Iterator[Hints | None]:
    """Hints for the trace inside; None where this torch lacks a private name, or the frame has too many variants.

    skips: whether loops that pass over experts without tokens may be captured (`capture/skipping.py`).
    numbers: whether they may count by numbers from NumPy's arrays (`capture/numpy_counts.py`).
    stores: whether checkpoints may store numbers outside (`capture/stored_numbers.py`).
    """
    if _variants.get(code, 0) >= _MOST_VARIANTS or not _patched.enter():
        with no_hints():
            yield None
        return
    hints = Hints(Skipping(numbers) if skips else None)
    hints.stores = StoredNumbers() if stores and traces_what_was_given() else None
    token = current.set(hints)
    try:
        with _config.patch(ignore_logging_functions=_config.ignore_logging_functions | _said_once()):
            yield hints
    finally:
        hints.end()
        current.reset(token)
        _patched.leave()


def _said_once() -> set[Any]:
    """transformers' `logger.warning_once`, which some models call in every layer, and which breaks the graph."""
    methods = (getattr(logging.Logger, name, None) for name in ("warning_once", "info_once"))
    return {method for method in methods if method is not None}


@contextmanager
def no_hints() -> Iterator[None]:
    """For a trace on behalf of another backend, inside one for ours."""
    token = current.set(None)
    try:
        yield
    finally:
        current.reset(token)


def finish(hints: Hints, output: Any, code: CodeType) -> None:
    """Guard what a finished trace assumed of the batch."""
    found = guarding.guard(output, hints) if guarding.can_guard() else []
    if not found:
        return
    log.info("%s assumes %s", code.co_name, "; ".join(map(str, found)))
    compilation = torch._guards.CompileContext.current_compile_id()
    if compilation is not None and compilation.frame_compile_id == 0:
        _variants.pop(code, None)  # `torch._dynamo.reset` forgot the others
    _variants[code] = _variants.get(code, 0) + 1
    if _variants[code] == _MOST_VARIANTS:
        warnings.warn(
            f"fxpasses: {code.co_name} ({code.co_filename}:{code.co_firstlineno}) was compiled {_MOST_VARIANTS} "
            f"times because batches differ in what the program asks of them ({'; '.join(map(str, found))}). From now "
            "on these questions break the graph, as they do without fxpasses.",
            stacklevel=2,
        )


def warn_given_up(hints: Hints, code: CodeType, reason: str) -> None:
    """Say once for a frame that its capture was given up, if the failed trace had read numbers of the batch."""
    many = hints.numbers_found()
    if not many or code in _given_up:
        return
    _given_up.add(code)
    warnings.warn(
        f"fxpasses: capture was given up for {code.co_name} ({code.co_filename}:{code.co_firstlineno}), which reads "
        f"{many} {'numbers' if many > 1 else 'number'} of its batch: {reason}. The reads stay in every layer, as under "
        "stock PyTorch. TORCH_LOGS=graph_breaks shows the place.",
        stacklevel=2,
    )


def report() -> Report | None:
    """What the running trace assumes of its batch, for the record; None where it assumes nothing."""
    hints = current.get()
    if hints is None:
        return None
    hints.close()
    found = assumptions_of(hints)
    if not found:
        return None
    many = f"{len(found)} assumptions" if len(found) > 1 else "1 assumption"
    what = "compiles another graph" if guarding.can_guard() else "raises AssumptionError"
    return Report(
        "capture",
        summary=f"{many} on the batch; a batch that breaks one {what}",
        changes=[f"assumed: {assumption}" for assumption in found],
        figures={"assumptions": len(found)},
    )


def skips() -> list[Skip]:
    """The skips of the running trace, whose graph is written."""
    hints = current.get()
    if hints is None or hints.skipping is None:
        return []
    hints.skipping.finish()
    return hints.skipping.skips


def discharge(numbers: Iterable[int]) -> None:
    """Note which skips the passes that were kept have proved."""
    hints = current.get()
    if hints is not None and hints.skipping is not None:
        hints.skipping.discharged.update(numbers)


def unproved_skips() -> list[Skip]:
    """Those that no pass has proved."""
    hints = current.get()
    return hints.skipping.unproved if hints is not None and hints.skipping is not None else []


def store_in_the_way(gm: GraphModule | None = None) -> str:
    """Why a store in a checkpoint, which was captured, would show; "" if it would not. gm: the graph, once written."""
    hints = current.get()
    if hints is None or hints.stores is None or not hints.stores.any:
        return ""
    calls = gm.graph.find_nodes(op="call_function", target=CHECKPOINT) if gm is not None else []
    if any(call.kwargs.get("preserve_rng_state") is False for call in calls):
        return "a recomputation draws other random numbers"
    if gm is not None and (hints.metadata is None or is_part_of_frame(hints.metadata.output)):
        return "the graph breaks in the frame"
    return next(iter(hints.stores.conflicts), "")


def note_companions(sources: Sequence[str]) -> None:
    """Tell the guard of the running trace which tensors the graph's prologue will bring to the host."""
    hints = current.get()
    if hints is not None:
        hints.companions += [name for name in sources if name]


def checked(compiled: Callable[..., Any], gm: GraphModule) -> Callable[..., Any]:
    """What the backend returns for `gm`: where this torch has no data guards, it checks the assumptions itself."""
    hints = current.get()
    return compiled if hints is None or guarding.can_guard() else guarding.checked(compiled, gm, hints)


@contextmanager
def paused() -> Iterator[None]:
    """No hints inside, as after the capture."""
    hints = current.get()
    if hints is None:
        yield
    else:
        with hints.paused():
            yield


@contextmanager
def without_caches() -> Iterator[None]:
    """Hints also while a graph is compiled further; a graph from a cache would not ask, and so not be guarded."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    with functorch.patch(enable_autograd_cache=False), inductor.patch(fx_graph_cache=False), _without_warnings():
        yield


@contextmanager
def _without_warnings() -> Iterator[None]:
    """PyTorch warns of every size that it estimates by a hint."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("propagate_real_tensors")

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


_INHERITED = object()  # stands for what a class has from its base


class _Patched:
    """The patches, and how many traces need them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._undo: list[tuple[Any, Any, Any]] = []
        self._missing = False

    def enter(self) -> bool:
        with self._lock:
            if self._missing:
                return False
            if self._users == 0:
                try:
                    self._install()
                except Exception as error:  # an unknown torch: whatever its names have become
                    self._missing = True
                    warnings.warn(
                        f"fxpasses: torch {torch.__version__} lacks a private name that value hints need ({error}); "
                        "code that asks the batch for a number breaks the graph. Everything else works.",
                        RuntimeWarning,
                        stacklevel=4,
                    )
                    return False
            self._users += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._remove()

    def _install(self) -> None:
        from fxpasses.capture.questions import patches

        try:
            for owner, name, instead in patches():  # one that wraps what another has put there finds it there
                before = owner[name] if isinstance(owner, (list, dict)) else vars(owner).get(name, _INHERITED)
                self._undo.append((owner, name, before))
                _put(owner, name, instead)
        except Exception:
            self._remove()
            raise

    def _remove(self) -> None:
        for owner, name, before in reversed(self._undo):
            _put(owner, name, before)
        self._undo.clear()


def _put(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, (list, dict)):
        owner[name] = value
    elif value is _INHERITED:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


_patched = _Patched()
_variants: weakref.WeakKeyDictionary[CodeType, int] = weakref.WeakKeyDictionary()
_given_up: weakref.WeakSet[CodeType] = weakref.WeakSet()  # frames whose user was told
