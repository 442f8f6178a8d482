"""Has the C++ kernels of a graph compiled together, where Inductor compiles a file for each kernel.

Which kernels share a library (`kernel_libraries`) is decided when generated modules are loaded; their text is
Inductor's, as in caches:

    cpp_fused_0 = async_compile.cpp_pybinding([...], r'''...''')      # waits for the others
    cpp_fused_1 = async_compile.cpp_pybinding([...], r'''...''')
    async_compile.wait(globals())                                     # one library has both kernels

The modules of a graph that is compiled in pieces wait for each other: their kernels are compiled at the end.

The flags of the compiler are the same, and so are the results. Only sources of the form that Inductor gives its own
kernels share a library: headers, then one function. If a library does not build, each kernel has its own again, for the
rest of the process, with one warning.

Private names, checked on torch 2.11, 2.13 and 2.15: `AsyncCompile.cpp_pybinding` and `wait`, which generated modules
call, and `submit`, `get_compile_threads` and `kernel_code_log` of its module; and `PyCodeCache.modules_no_attr`, the
modules that Inductor has loaded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fxpasses.base.containment import contained, say
from fxpasses.base.patching import Patch
from fxpasses.compiler import kernel_libraries
from fxpasses.compiler.broken_kernels import building_anew
from fxpasses.compiler.kernel_libraries import Function, Source
from fxpasses.compiler.vector_tests import testing_one

_strict: ContextVar[bool | None] = ContextVar("strict", default=None)  # None: files are not shared
_waiting: ContextVar[list[_Module] | None] = ContextVar("waiting", default=None)  # None: modules do not wait
_fails = False  # whether a shared file did not build


@contextlib.contextmanager
def sharing_files(strict: bool) -> Iterator[None]:
    """Have the modules that are loaded inside compile their kernels together. strict: raise if that fails."""
    token = _strict.set(strict)
    try:
        with gathering():
            yield
    finally:
        _strict.reset(token)


@contextlib.contextmanager
def loading_at_the_end() -> Iterator[None]:
    """Have modules that share files and are loaded inside share them with each other: all are compiled at the end."""
    if _waiting.get() is not None:
        yield
        return
    modules: list[_Module] = []
    token = _waiting.set(modules)
    try:
        yield
    except BaseException:
        _forget(modules)
        raise
    finally:
        _waiting.reset(token)
    _load(modules)


@dataclass(eq=False)
class Kernel:
    """What stands for a kernel in a generated module until it is compiled."""

    source: Source
    alone: Callable[[], Any]  # compiles it in its own file: a function, or the future of one

    def __call__(self, *arguments: Any) -> None:
        """Of a module that is used although the compilation of its graph was given up."""
        self._function(*arguments)

    @functools.cached_property
    def _function(self) -> Function:
        found = self.alone()
        function: Function = found.result() if hasattr(found, "result") else found
        return function


@dataclass(eq=False)
class _Module:
    """A generated module with kernels. compiler: Inductor's `AsyncCompile`; wait: its method."""

    compiler: Any
    scope: dict[str, Any]
    wait: Callable[[], Any]
    strict: bool

    def kernels(self) -> dict[str, Kernel]:
        return {name: value for name, value in self.scope.items() if isinstance(value, Kernel)}


def _load(modules: Sequence[_Module]) -> None:
    """Give modules the functions of their kernels."""
    global _fails
    try:
        with testing_one():
            functions, failed = _try_to_load(modules)
            for module in modules:
                for name, kernel in module.kernels().items():
                    module.scope[name] = functions[kernel.source] if kernel.source in functions else kernel.alone()
                module.wait()
    except BaseException:
        _forget(modules)
        raise
    if failed is not None:  # each builds alone, so the compiler works
        _fails = True
        say(_PIECE, failed, _INSTEAD)


def _try_to_load(modules: Sequence[_Module]) -> tuple[dict[Source, Function], Exception | None]:
    """The functions of kernels that share files, and why there are none."""
    sources = [kernel.source for module in modules for kernel in module.kernels().values()]
    if not sources:
        return {}, None
    try:
        from torch._inductor.async_compile import get_compile_threads

        threads = get_compile_threads()
        submit = modules[0].compiler.submit if threads > 1 else None
        return building_anew(lambda: kernel_libraries.load(sources, threads, submit)), None
    except Exception as error:
        if any(module.strict for module in modules):
            raise
        return {}, error


def _forget(modules: Sequence[_Module]) -> None:
    """Have Inductor load modules again when it needs them."""
    from torch._inductor.codecache import PyCodeCache

    scopes = {id(module.scope) for module in modules}
    loaded = PyCodeCache.modules_no_attr
    for path in [path for path, module in loaded.items() if id(vars(module)) in scopes]:
        del loaded[path]


_PIECE = "compiling the C++ kernels of a graph in one file"
_INSTEAD = "Each is compiled in its own file, as by stock Inductor, which takes longer."

# Of `AsyncCompile`, of which each generated module has one object. Other threads than those inside compile as before.


def _async_compile() -> Any:
    from torch._inductor.async_compile import AsyncCompile

    return AsyncCompile


def _gather(compile_one: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_one)
    def gather(self: Any, *given: Any, **named: Any) -> Any:
        alone = functools.partial(compile_one, self, *given, **named)
        if _strict.get() is not None and not _fails and len(given) == 2 and not named:
            with contained(_PIECE, _INSTEAD, bool(_strict.get())):
                if source := Source.of(*given):
                    _log(given[1])
                    return Kernel(source, alone)
        return alone()

    return gather


def _log(code: str) -> None:
    """As Inductor logs a kernel that it compiles, for `TORCH_LOGS=kernel_code`."""
    from torch._inductor.async_compile import kernel_code_log

    kernel_code_log.info("CPP+Bindings Kernel:\n%s", code)


def _load_and_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wait)
    def load_and_wait(self: Any, scope: dict[str, Any], *others: Any, **named: Any) -> Any:
        module = _Module(self, scope, lambda: wait(self, scope, *others, **named), bool(_strict.get()))
        waiting = _waiting.get()
        if not module.kernels():
            return module.wait()
        if waiting is None or _strict.get() is None:
            return _load([module])
        waiting.append(module)
        return module.wait()

    return load_and_wait


gathering = Patch(_PIECE, _async_compile, cpp_pybinding=_gather, wait=_load_and_wait)
