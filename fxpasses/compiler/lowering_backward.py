"""Contains failures of backward, which AOTAutograd compiles and calls where no fallback of the backend sees it.

AOTAutograd compiles backward together with forward if sizes are saved for it, and suppresses an error there; otherwise
it compiles backward at the first `.backward()`. Either way an error reaches the user's `.backward()`. Here an error in
the first case counts as an error of compiling the graph, like one in forward; in the second case, backward runs
operator by operator, with the tensors that forward saved.

Also, a backward that is compiled with forward writes into saved tensors ("donated buffers"), so `retain_graph=True`
fails if the sizes of the batch are captured, though not in stock PyTorch's graphs, which have no such sizes. Here such
a backward is compiled a second time, without these writes, when it is first needed.

The pieces of one graph have a backward each, which would be compiled one after the other as autograd comes to them.
When the first is needed, all are compiled, and their C++ kernels together (`kernel_files`).

Assumptions on sizes are asserted only in forward: Inductor's backward would repeat the assertions, even for sizes that
it does not receive ("name 's27' is not defined").

Private names, checked on torch 2.13: `AOTDispatchAutograd.post_compile`, which AOTAutograd gives a graph's compiled
forward and backward, new or from its cache, as an `AOTDispatchAutogradCompileSpec` with the fields used below;
`_AutogradBackwardCompiler`, which compiles backward at the first call, under `track_graph_compiling`; and
`torch._C._autograd._get_current_graph_task_keep_graph`. Torch 2.11 lacks the second: there a backward that does not
compile is replaced where Inductor would compile it, and none writes into saved tensors.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # must come before the next module, which it imports
import torch.compiler.config
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.logging_utils import track_graph_compiling
from torch._guards import TracingContext, compile_context, tracing
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxpasses.base.collector import visiting_what_is_new
from fxpasses.base.containment import contained
from fxpasses.compiler import slice_offsets, stride_order
from fxpasses.compiler.broken_kernels import building_anew
from fxpasses.compiler.kernel_files import loading_at_the_end, sharing_files
from fxpasses.compiler.lowering_by_operator import Boxed, backward_by_operator
from fxpasses.compiler.mesh_keys import without_hashes
from fxpasses.compiler.output_strides import TracedStrides, tell_expressions
from fxpasses.compiler.vector_tests import testing_one


def _changes(gm: GraphModule, is_backward: bool) -> dict[str, Any]:
    """The settings of Inductor's configuration while it compiles a graph of AOTAutograd."""
    from torch._inductor import config

    found: dict[str, Any] = {}
    if is_backward and hasattr(config, "do_not_emit_runtime_assertions"):  # torch 2.11 lacks it
        found["do_not_emit_runtime_assertions"] = True
    # Torch 2.11 computes this from sizes, and fails for unknown ones; any value from 16 to 128 is right.
    if torch.__version__ < "2.12" and config.triton.mix_order_reduction_split_size is None:
        if any(free_unbacked_symbols(node.meta.get("val")) for node in gm.graph.nodes):
            found["triton.mix_order_reduction_split_size"] = 64
    return found


def _donated() -> str:
    """Which saved tensors the backward that is being compiled may write into, for a cache's key.

    Inductor's own keys lack that (torch 2.13): a backward that runs twice would get code that runs once.
    """
    context = TracingContext.try_get()
    return f":{getattr(context.fw_metadata, 'bw_donated_idxs', None)}" if context is not None else ""


class BackwardFailed(BaseException):
    """Raised in place of an error in compiling backward: AOTAutograd suppresses an `Exception`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Containment:
    """The containment of one graph, while its forward and backward are compiled, and later."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.tag = ""  # for the keys of PyTorch's caches
        self.compiling = True  # False if backward is compiled in `.backward()`
        self.on_code: Callable[[GraphModule, str, bool], None] | None = None  # gets Inductor's code, if it is compiled

    def compile_inner(self, gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compile one graph of AOTAutograd with Inductor; AOTAutograd cannot suppress an error in backward."""
        from torch._inductor import config as inductor_config
        from torch._inductor.compile_fx import compile_fx_inner

        is_backward = options.get("is_backward")
        strides = None if is_backward else TracedStrides(gm, inputs)
        try:
            changes = inductor_config.patch(_changes(gm, bool(is_backward)))
            config: Any = torch.compiler.config
            with (
                changes,
                config.patch(cache_key_tag=f"{self.tag}{_donated() if is_backward else ''}"),
                strides.kept_in_caches() if strides else contextlib.nullcontext(),
                sharing_files(self.strict),
                testing_one(),
                without_hashes(),
                stride_order.with_symbols(),
                slice_offsets.in_python(),
            ):
                compiled = compile_fx_inner(gm, inputs, **options)
        except Exception as error:
            if is_backward and _SPEC is None and not self.strict:
                _warn(error)
                return backward_by_operator(copy.deepcopy(gm))
            if is_backward and self.compiling:
                raise BackwardFailed(error) from error
            raise
        source = getattr(compiled, "source_code", None)
        if self.on_code is not None and self.compiling and isinstance(source, str):
            with contained("reading what compiled code allocates", "The plan keeps its prediction.", self.strict):
                self.on_code(gm, source, bool(is_backward))
        if strides is None:
            return compiled
        with contained("telling backward its strides", "It is compiled for those of this batch.", self.strict):
            tell_expressions(compiled, inputs)
        return strides.given_to(compiled)

    def post_compile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args and _SPEC is not None and isinstance(args[0], _SPEC):
            return original(_contained(args[0], self.strict), *args[1:], **kwargs)
        return original(*args, **kwargs)


@contextlib.contextmanager
def containing_backward(strict: bool) -> Iterator[Containment]:
    """Compile a graph inside. Errors in compiling its backward are raised; with `strict`, also from `.backward()`."""
    containment = Containment(strict)
    owner: Any = runtime_wrappers.AOTDispatchAutograd
    patched = staticmethod(functools.partial(containment.post_compile, owner.post_compile))
    error: Exception | None = None
    try:
        with mock.patch.object(owner, "post_compile", patched), _nothing_donated():
            yield containment
    except BackwardFailed as failed:
        error = failed.error
    finally:
        containment.compiling = False
    if error is not None:  # raised outside of the handler: `BackwardFailed` must not become its context
        raise error


def _nothing_donated() -> contextlib.AbstractContextManager[Any]:
    """On torch 2.11, have backward write into no saved tensor: there is no way to compile it a second time."""
    if _SPEC is not None:
        return contextlib.nullcontext()
    from torch._functorch._aot_autograd import graph_compile

    return mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", lambda *_, **__: [])


_SPEC: Any = getattr(runtime_wrappers, "AOTDispatchAutogradCompileSpec", None)


def _contained(spec: Any, strict: bool) -> Any:
    uncompiled = _Uncompiled(spec.lazy_backward_info)
    if spec.compiled_bw_func is None:
        return _compiled_later(spec, uncompiled, strict)
    donated = spec.fw_metadata.bw_donated_idxs
    metadata = copy.copy(spec.fw_metadata)
    metadata.bw_donated_idxs = []  # if there are any, AOTAutograd refuses `retain_graph=True`
    compiled = _Retaining(spec, uncompiled, strict) if donated else spec.compiled_bw_func
    return dataclasses.replace(spec, compiled_bw_func=compiled, fw_metadata=metadata)


_pieces: ContextVar[list[_Later] | None] = ContextVar("pieces", default=None)


@contextlib.contextmanager
def compiling_together() -> Iterator[None]:
    """Compile the pieces of a graph inside: forward's kernels together, and later backward's."""
    token = _pieces.set([])
    try:
        with loading_at_the_end():
            yield
    finally:
        _pieces.reset(token)


def _compiled_later(spec: Any, uncompiled: _Uncompiled, strict: bool) -> Any:
    """Have the graph run without a compiler if compiling it fails when `.backward()` is first called."""
    later = _Later(spec, uncompiled, strict, _pieces.get())

    def save(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        return None if compiled is uncompiled else spec.try_save_cache_entry(compiled, *args, **kwargs)

    saves = spec.try_save_cache_entry is not None
    return dataclasses.replace(spec, bw_compiler=later.compile, try_save_cache_entry=save if saves else None)


_one_at_a_time = threading.Lock()


class _Later:
    """The backward of a graph that is compiled when it is first needed.

    pieces: those of the same graph, to which it adds itself.
    """

    def __init__(self, spec: Any, uncompiled: _Uncompiled, strict: bool, pieces: list[_Later] | None) -> None:
        self._spec, self._uncompiled, self._strict = spec, uncompiled, strict
        self._pieces = [] if pieces is None else pieces
        self._pieces.append(self)
        self.early: Any = None  # compiled with another piece

    def compile(self, gm: GraphModule, examples: Sequence[Any]) -> Any:
        """What AOTAutograd calls in `.backward()`, in place of its own compiler."""
        with contextlib.suppress(ValueError):  # it was here before, and was interrupted
            self._pieces.remove(self)
        early, self.early = self.early, None  # another thread may be here as well
        # If the autograd graph is kept, backward must not write into saved tensors.
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        if early is not None and not keeps:
            return early
        try:
            with visiting_what_is_new(), loading_at_the_end():
                compiled = building_anew(lambda: self._spec.bw_compiler(copy.deepcopy(gm), examples))
                if not keeps and _one_at_a_time.acquire(blocking=False):
                    try:
                        self._compile_others()
                    finally:
                        _one_at_a_time.release()
            return compiled
        except BaseException as error:
            for piece in list(self._pieces):
                piece.early = None  # its kernels may be what failed
            if self._strict or not isinstance(error, Exception):
                raise
            self._uncompiled.warn(error)
            return self._uncompiled

    def _compile_others(self) -> None:
        for piece in list(self._pieces):
            with contextlib.suppress(Exception):  # when it is needed, it is compiled again, and the error told
                piece.compile_early()

    def compile_early(self) -> None:
        """Compile it as `_AutogradBackwardCompiler` would."""
        info = self._spec.lazy_backward_info
        if getattr(info.saved_context, "ddp_optimizer_ctx", None) is None and self.early is None:
            without_autocast = torch._C._DisableAutocast if self._spec.disable_amp else contextlib.nullcontext
            with (
                tracing(info.saved_context),
                compile_context(info.saved_compile_context),
                without_autocast(),
                track_graph_compiling(self._spec.aot_config, "backward"),
            ):
                self.early = self._spec.bw_compiler(copy.deepcopy(info.bw_module), info.placeholder_list)


def _warn(error: Exception) -> None:
    warnings.warn(
        f"fxpasses: compiling the backward pass of a graph failed ({type(error).__name__}: {error}). It runs "
        "operator by operator.",
        stacklevel=3,
    )


class _Uncompiled:
    """Runs a graph's backward operator by operator."""

    _boxed_call = True

    def __init__(self, info: Any) -> None:
        self._info = info
        self._run: Boxed | None = None

    @torch.compiler.disable
    def __call__(self, arguments: list[Any]) -> Any:
        if self._run is None:
            gm = self._info.bw_module if hasattr(self._info, "bw_module") else self._info.bw_module_fn()
            self._run = backward_by_operator(copy.deepcopy(gm))
        return self._run(arguments)

    def warn(self, error: Exception) -> None:
        _warn(error)


class _Retaining:
    """Runs a compiled backward that writes into saved tensors, or one that does not if the autograd graph is kept."""

    _boxed_call = True

    def __init__(self, spec: Any, uncompiled: _Uncompiled, strict: bool) -> None:
        self._spec, self._uncompiled, self._strict = spec, uncompiled, strict
        self._compiled: Boxed = spec.compiled_bw_func
        self._without_writes: Boxed | None = None

    @torch.compiler.disable
    def __call__(self, arguments: list[Any]) -> Any:
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            return self._compiled(arguments)
        if self._without_writes is None:
            self._without_writes = self._compile()
        return self._without_writes(arguments)

    def _compile(self) -> Boxed:
        if self._spec.bw_compiler is None:  # the graph came from a cache
            return self._uncompiled
        fields = {field.name for field in dataclasses.fields(runtime_wrappers._AutogradBackwardCompiler)}
        given = {name: getattr(self._spec, name) for name in fields - {"compiled_bw", "try_save_cache_entry"}}
        compiler = runtime_wrappers._AutogradBackwardCompiler(compiled_bw=None, try_save_cache_entry=None, **given)
        try:
            return compiler.get_or_compile(saved_tensors_use_once=False)
        except Exception as error:
            if self._strict:
                raise
            self._uncompiled.warn(error)
            return self._uncompiled
