"""Compiles the C++ kernels of a graph in one or a few files, where Inductor compiles a file for each kernel.

Headers and bindings take a C++ compiler about a second for each file, and a kernel a tenth of that. So the kernels of
a generated module share files. Which share is decided when the module is loaded; its text is Inductor's, as in caches:

    cpp_fused_0 = async_compile.cpp_pybinding([...], r'''...''')      # waits for the others
    cpp_fused_1 = async_compile.cpp_pybinding([...], r'''...''')
    async_compile.wait(globals())                                     # one file: both kernels, and a list of them

The flags of the compiler are the same, and so are the results. Only sources of the form that Inductor gives its own
kernels share a file: headers, then one function. If such a file does not build, each kernel has its own again, for the
rest of the process, with one warning.

A change of one kernel compiles the file again, where Inductor would find the others in its cache: a tenth of a second
for each of them, and one or two for the largest.

Private names, checked on torch 2.11, 2.13 and 2.15: `AsyncCompile.cpp_pybinding` and `wait`, which generated modules
call, `submit`, `get_compile_threads` and `kernel_code_log` of its module; and of `CppPythonBindingsCodeCache` the
attributes that its subclasses override, and, in its template, `parse_arg` and how Python calls a kernel.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from fxpasses.base.containment import contained, say
from fxpasses.base.patching import Patch
from fxpasses.compiler.broken_kernels import building_anew

# Seconds, of g++ 12 on one core: kernels that take as long are worth a file of their own if there is a thread for it.
_WORTH_A_FILE = 1.0
_LEAST, _PER_CHARACTER, _LONGEST = 0.05, 1 / 25_000, 40_000  # what a kernel takes; long ones repeat themselves
_MOST = 64  # kernels of a file: one of thousands would need gigabytes of memory

_strict: ContextVar[bool | None] = ContextVar("strict", default=None)  # None: files are not shared
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


@dataclass(eq=False)
class Kernel:
    """A kernel of a generated module. arguments: the C++ types of its arguments. headers, text: its source."""

    arguments: Sequence[str]
    headers: str
    text: str
    alone: Callable[[], Any]  # compiles it in its own file: a function, or the future of one

    def named(self, name: str) -> str:
        """Its text, with another name than "kernel"."""
        return _FUNCTION.sub(rf"\g<1>{name}(", self.text, count=1)


_FUNCTION = re.compile(r'^(extern "C"\s+void\s+)kernel\(')


def kernel_of(arguments: Sequence[str], source: str, alone: Callable[[], Any]) -> Kernel | None:
    """None if the source is anything but headers and one function."""
    lines = source.strip().splitlines(keepends=True)
    headers = list(itertools.takewhile(lambda line: line.startswith("#include "), lines))
    rest = lines[len(headers) :]
    text = "".join(rest)
    is_function = _FUNCTION.match(text) and text.count('extern "C"') == 1
    ends = [i for i, line in enumerate(rest, 1) if line.startswith("}")]
    directives = [line for line in map(str.lstrip, rest) if line.startswith("#") and not line.startswith("#pragma ")]
    if not is_function or ends != [len(rest)] or directives:
        return None
    return Kernel(arguments, "".join(headers), text + "\n", alone)


def _load(kernels: Sequence[Kernel], threads: int, submit: Callable[..., Any] | None) -> dict[Kernel, Any]:
    """The functions of kernels, compiled in shared files.

    threads: files that are compiled at a time. submit: has a function called by another thread.
    """
    files = list(_files(kernels, threads))
    loading = [_together(file).load_pybinding_async([], _source(file), submit_fn=submit) for file in files]
    found = dict[Kernel, Any]()
    for file, loaded in zip(files, loading, strict=True):
        found.update(zip(file, loaded()(), strict=True))
    return found


def _files(kernels: Sequence[Kernel], threads: int) -> Iterator[list[Kernel]]:
    alike = defaultdict[str, list[Kernel]](list)
    for kernel in kernels:
        alike[kernel.headers].append(kernel)
    for group in alike.values():
        seconds = sum(map(_seconds, group))
        count = max(min(threads, math.ceil(seconds / _WORTH_A_FILE)), math.ceil(len(group) / _MOST))
        files: list[list[Kernel]] = [[] for _ in range(count)]
        heap = [(0.0, at) for at in range(count)]
        for kernel in sorted(group, key=_seconds, reverse=True):
            taken, at = heapq.heappop(heap)
            files[at].append(kernel)
            if len(files[at]) < _MOST:
                heapq.heappush(heap, (taken + _seconds(kernel), at))
        yield from filter(None, files)


def _seconds(kernel: Kernel) -> float:
    return _LEAST + min(len(kernel.text), _LONGEST) * _PER_CHARACTER


def _source(kernels: Sequence[Kernel]) -> str:
    return "\n".join([kernels[0].headers, *(kernel.named(f"kernel_{i}") for i, kernel in enumerate(kernels))])


def _together(kernels: Sequence[Kernel]) -> Any:
    """The code cache for a file of these kernels, whose one function returns the Python functions of all."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    convention = _FASTCALL if "METH_FASTCALL" in CppPythonBindingsCodeCache.suffix_template else _VARARGS
    names = [f"kernel_{i}" for i in range(len(kernels))]
    bindings = "".join(
        _binding(name, kernel.arguments, convention) for name, kernel in zip(names, kernels, strict=True)
    )
    methods = "".join(_METHOD.format(name=name, flag=convention.flag) for name in names)
    listed = _LISTED.format(count=len(names), methods=methods)
    # The template is formatted once more, with the text of this attribute and that of `call_entry_function`.
    escaped = (bindings + listed).replace("{", "{{").replace("}", "}}")
    attributes = {"cache": {}, "call_entry_function": "return all_kernels();", "extra_parse_arg": escaped}
    return type("KernelsCodeCache", (CppPythonBindingsCodeCache,), attributes)


class _Convention(NamedTuple):
    """How Python calls a C function."""

    flag: str
    parameters: str
    given: str  # the number of arguments, in C++


_VARARGS = _Convention("METH_VARARGS", "PyObject* args", "PyTuple_GET_SIZE(args)")
_FASTCALL = _Convention("METH_FASTCALL", "PyObject* const* args, Py_ssize_t nargs", "nargs")  # torch 2.15


def _binding(name: str, arguments: Sequence[str], convention: _Convention) -> str:
    parsed = ", ".join(f"parse_arg<{kind.replace('const ', '')}>(args, {i})" for i, kind in enumerate(arguments))
    return _BINDING.format(
        name=name, parameters=convention.parameters, given=convention.given, expected=len(arguments), parsed=parsed
    )


# As in the template of `CppPythonBindingsCodeCache`, which has this function for one kernel.
_BINDING = """
static PyObject* {name}_py(PyObject* self, {parameters}) {{
    try {{
        if ({given} != {expected}) [[unlikely]]
            throw std::runtime_error("{name} takes {expected} arguments");
        {name}({parsed});
        Py_RETURN_NONE;
    }} catch (std::exception const& e) {{
        PyErr_SetString(PyExc_RuntimeError, e.what());
        return nullptr;
    }} catch (...) {{
        PyErr_SetString(PyExc_RuntimeError, "unhandled error");
        return nullptr;
    }}
}}
"""
_METHOD = """
    {{"{name}", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>({name}_py)), {flag}, ""}},"""
_LISTED = """
static PyMethodDef kernel_methods[] = {{{methods}
}};

static PyObject* all_kernels() {{
    PyObject* all = PyList_New({count});
    for (Py_ssize_t i = 0; all != nullptr && i < {count}; i++) {{
        PyObject* function = PyCFunction_New(&kernel_methods[i], nullptr);
        if (function == nullptr) {{
            Py_CLEAR(all);
        }} else {{
            PyList_SET_ITEM(all, i, function);
        }}
    }}
    return all;
}}
"""


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
                if kernel := kernel_of(*given, alone):
                    self.__dict__.setdefault("fxpasses_kernels", []).append(kernel)
                    _log(given[1])
                    return kernel
        return alone()

    return gather


def _log(source: str) -> None:
    """As Inductor logs a kernel that it compiles, for `TORCH_LOGS=kernel_code`."""
    from torch._inductor.async_compile import kernel_code_log

    kernel_code_log.info("CPP+Bindings Kernel:\n%s", source)


def _load_and_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wait)
    def load_and_wait(self: Any, scope: dict[str, Any], *others: Any, **named: Any) -> Any:
        global _fails
        kernels: list[Kernel] = self.__dict__.pop("fxpasses_kernels", [])
        functions, failed = _try_to_load(self, kernels)
        for name, value in list(scope.items()):
            if isinstance(value, Kernel):
                scope[name] = functions[value] if value in functions else value.alone()
        found = wait(self, scope, *others, **named)
        if failed is not None:  # each builds alone, so the compiler works
            _fails = True
            say(_PIECE, failed, _INSTEAD)
        return found

    return load_and_wait


def _try_to_load(compiler: Any, kernels: Sequence[Kernel]) -> tuple[dict[Kernel, Any], Exception | None]:
    """The functions of kernels that share files, and why there are none. compiler: Inductor's `AsyncCompile`."""
    if len(kernels) < 2:
        return {}, None
    try:
        from torch._inductor.async_compile import get_compile_threads

        threads = get_compile_threads()
        submit = compiler.submit if threads > 1 else None
        return building_anew(lambda: _load(kernels, threads, submit)), None
    except Exception as error:
        if _strict.get():
            raise
        return {}, error


gathering = Patch(_PIECE, _async_compile, cpp_pybinding=_gather, wait=_load_and_wait)
