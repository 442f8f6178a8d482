"""Builds shared libraries of C++ kernels, and finds a kernel in those that were built before.

Headers and bindings take a C++ compiler about half a second for each library, and a kernel a tenth of that, so kernels
share libraries. Beside Inductor's cache a note for each kernel names the library that has it:

    fxpasses_kernels/3f/3f09...  ->  "k5/ck5v...main.so 2"      the function at position 2

So a process may load the kernels in another order than they were compiled in, or only some of them, and a kernel of
which there is a note costs no call of the compiler. The key of a note has what Inductor's keys have: the source,
bindings included, and the compiler's command, and the version of PyTorch, whose headers it includes.

Private names, checked on torch 2.11, 2.13 and 2.15: of `CppPythonBindingsCodeCache` the attributes that its subclasses
override, `_load_library`, and, in its template, `parse_arg` and how Python calls a kernel; `cache_dir`, `CppBuilder`,
`CppTorchDeviceOptions` and `pick_vec_isa`, by which it builds.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import logging
import math
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fxpasses.base.containment import contained
from fxpasses.compiler.broken_kernels import discard

log = logging.getLogger(__name__)

Function = Callable[..., None]

# Seconds, of g++ 12 on one core: kernels that take as long are worth a library of their own if a thread is free.
_WORTH_A_LIBRARY = 1.0
_LEAST, _PER_CHARACTER, _LONGEST = 0.05, 1 / 25_000, 40_000  # what a kernel takes; long ones repeat themselves
_MOST = 64  # kernels of a library: one of thousands would need gigabytes of memory


@dataclass(frozen=True)
class Source:
    """A kernel's C++: the types of its arguments, the lines that include headers, and the function `kernel`."""

    arguments: tuple[str, ...]
    headers: str
    text: str

    def named(self, name: str) -> str:
        """The text, with another name than "kernel"."""
        return _FUNCTION.sub(rf"\g<1>{name}(", self.text, count=1)

    @classmethod
    def of(cls, arguments: Sequence[str], code: str) -> Source | None:
        """None if the code is anything but headers and one function."""
        lines = code.strip().splitlines(keepends=True)
        headers = list(itertools.takewhile(lambda line: line.startswith("#include "), lines))
        rest = lines[len(headers) :]
        text = "".join(rest)
        is_function = _FUNCTION.match(text) and text.count('extern "C"') == 1
        ends = [i for i, line in enumerate(rest, 1) if line.startswith("}")]
        directives = [
            line for line in map(str.lstrip, rest) if line.startswith("#") and not line.startswith("#pragma ")
        ]
        if not is_function or ends != [len(rest)] or directives:
            return None
        return cls(tuple(arguments), "".join(headers), text + "\n")


_FUNCTION = re.compile(r'^(extern "C"\s+void\s+)kernel\(')


def load(sources: Sequence[Source], threads: int, submit: Callable[..., Any] | None) -> dict[Source, Function]:
    """The functions of kernels, from libraries that have them, or from new ones.

    threads: libraries that are built at a time. submit: has a function called by another thread.
    """
    try:
        notes = _Notes()
    except Exception as error:  # also if there is no compiler, which the program hears of when it is needed
        log.debug("there are no notes on kernels", exc_info=error)
        notes = None
    found = {source: function for source in sources if notes and (function := notes.find(source))}
    groups = list(_groups([source for source in dict.fromkeys(sources) if source not in found], threads))
    loading = [_library(group).load_pybinding_async([], _code(group), submit_fn=submit) for group in groups]
    for group, loaded in zip(groups, loading, strict=True):
        all_kernels = loaded()
        found.update(zip(group, all_kernels(), strict=True))
        if notes is not None:
            notes.add(group, all_kernels.__self__.__file__)
    return found


def _groups(sources: Sequence[Source], threads: int) -> Iterator[list[Source]]:
    """The sources of each library: as many libraries as are worth it, which take the compiler equally long."""
    alike = defaultdict[str, list[Source]](list)
    for source in sources:
        alike[source.headers].append(source)
    for group in alike.values():
        seconds = sum(map(_seconds, group))
        count = max(min(threads, math.ceil(seconds / _WORTH_A_LIBRARY)), math.ceil(len(group) / _MOST))
        libraries: list[list[Source]] = [[] for _ in range(count)]
        heap = [(0.0, at) for at in range(count)]
        for source in sorted(group, key=_seconds, reverse=True):
            taken, at = heapq.heappop(heap)
            libraries[at].append(source)
            if len(libraries[at]) < _MOST:
                heapq.heappush(heap, (taken + _seconds(source), at))
        yield from filter(None, libraries)


def _seconds(source: Source) -> float:
    return _LEAST + min(len(source.text), _LONGEST) * _PER_CHARACTER


# Notes


class _Notes:
    """Which library has a kernel, for the compiler's command in force."""

    def __init__(self) -> None:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        self._caches = Path(cache_dir())
        self._folder = self._caches / FOLDER
        self._command = _command()

    def find(self, source: Source) -> Function | None:
        """The function of a kernel that a library has."""
        path = self._path(source)
        try:
            name, _, position = path.read_text().rpartition(" ")
            library = self._caches / name
            if library not in _opened:
                if not library.exists():
                    return None
                opened = _library([])._load_library(str(library), library.name.partition(".")[0])
                _opened[library] = opened.kernel()
            found = _opened[library][int(position)]
        except Exception as error:  # no note, or no library that can be loaded
            discard(error)
            return None
        _noted.add(path)
        return found

    def add(self, sources: Sequence[Source], library: str) -> None:
        with contained("noting which libraries have C++ kernels", "They are compiled together with others again."):
            name = os.path.relpath(os.path.realpath(library), os.path.realpath(self._caches))
            for position, source in enumerate(sources):
                path = self._path(source)
                path.parent.mkdir(parents=True, exist_ok=True)
                handle, part = tempfile.mkstemp(dir=path.parent)
                with os.fdopen(handle, "w") as stream:
                    stream.write(f"{name} {position}")
                os.replace(part, path)
                _noted.add(path)

    def _path(self, source: Source) -> Path:
        about = "\n".join([self._command, *source.arguments, source.headers, source.text])
        digest = hashlib.sha256(about.encode()).hexdigest()
        return self._folder / digest[:2] / digest


FOLDER = "fxpasses_kernels"
_opened: dict[Path, list[Function]] = {}  # by library
_noted: set[Path] = set()  # the notes that this process has used


def notes() -> list[Path]:
    """The notes of the kernels that this process has loaded."""
    return sorted(_noted)


def _command() -> str:
    """How kernels are compiled, as Inductor puts it into its keys, and bound to Python."""
    from torch._inductor import config
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    given: dict[str, Any] = {
        **CppPythonBindingsCodeCache.cpp_compile_command_flags,
        "device_type": "cpu",
        "extra_flags": (),
        "use_relative_path": config.is_fbcode(),
        "vec_isa": pick_vec_isa(),
    }
    line = CppBuilder(name="o", sources="i", BuildOption=CppTorchDeviceOptions(**given)).get_command_line()
    bindings = _BINDING + _METHOD + _LISTED
    return "\n".join([line, bindings, torch.__version__, str(torch.version.git_version), torch.__file__])


# The source of a library


def _code(sources: Sequence[Source]) -> str:
    return "\n".join([sources[0].headers, *(source.named(f"kernel_{i}") for i, source in enumerate(sources))])


def _library(sources: Sequence[Source]) -> Any:
    """The code cache for a library of these kernels, whose one function returns the Python functions of all."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    convention = _FASTCALL if "METH_FASTCALL" in CppPythonBindingsCodeCache.suffix_template else _VARARGS
    names = [f"kernel_{i}" for i in range(len(sources))]
    bindings = "".join(
        _binding(name, source.arguments, convention) for name, source in zip(names, sources, strict=True)
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
