"""Keeps what was compiled in a file, for a process on another machine, or after the temporary directory was emptied.

    fxpasses.save_caches("compiled.zip")      # after the first steps
    fxpasses.load_caches("compiled.zip")      # in another process, before its first step

The file has PyTorch's own cache artifacts (`torch.compiler.save_cache_artifacts`), and what these leave out: the shared
libraries of C++ kernels, and the notes that say which library has a kernel. Dynamo traces the program again and finds
its code by PyTorch's keys, which cover the graph, the sizes, dtypes and options, and the versions of PyTorch and of
this package: code of another program is never used. The libraries are made for one kind of processor, which no key
covers, so the file names it.

Private names, checked on torch 2.11, 2.13 and 2.15: `cache_dir`; `codecache.get_hash`, `get_path` and `cpu_vec_isa`,
for the libraries by which Inductor tests vector instructions.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from fxpasses.base.containment import contained
from fxpasses.base.once import warn_once
from fxpasses.compiler import kernel_libraries
from fxpasses.restart import recording, restoring
from fxpasses.restart.saved_trace import SavedTrace
from fxpasses.version import code_digest

_EXTENSIONS = ("", " -mavx512bf16", " -mamx-fp16")  # flags that some tests add to those of their instructions
_IDENTITY, _ARTIFACTS, _LIBRARIES, _TRACES = "identity.json", "artifacts", "libraries/", "traces/"


def save_caches(path: str | os.PathLike[str]) -> None:
    """Write what this process has compiled, or has found in PyTorch's caches, to a file.

    Call it after the first steps: backward is compiled when it first runs. With several ranks, give each a path of its
    own. Raises `RuntimeError` if nothing was compiled, and `OSError` if the file cannot be written; an existing file is
    replaced, or stays as it is.
    """
    from torch._inductor import config

    found = torch.compiler.save_cache_artifacts()
    if found is None and not recording.saved() and (config.force_disable_caches or not config.fx_graph_cache):
        raise RuntimeError("there is nothing to save: PyTorch's caches are switched off (force_disable_caches)")
    if found is None and not recording.saved() and not recording.refusals():
        raise RuntimeError(
            "there is nothing to save: this process has compiled nothing yet that PyTorch caches. Call "
            "`fxpasses.save_caches` after the first training steps"
        )
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}, in which {path.name} should be saved")
    with _replacing(path, 0o666) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(_IDENTITY, json.dumps(_identity()))
        file.writestr(_ARTIFACTS, found[0] if found is not None else b"")
        for library in [*_libraries(), *_notes()]:
            file.write(library, _LIBRARIES + library.relative_to(_folder()).as_posix())
        for number, trace in enumerate(recording.saved()):
            for part in ("head", "body"):
                file.writestr(f"{_TRACES}{number}/{trace.code}/{part}", getattr(trace, part))
    for frame, why in recording.refusals().items():
        warn_once(("not saved", frame), f"the trace of {frame} is not in {path.name}: {why}. It is traced again.")


def load_caches(path: str | os.PathLike[str], missing_ok: bool = False) -> bool:
    """Fill PyTorch's caches from a file of `save_caches`; returns whether they were.

    From this call on, traces are kept for `save_caches`. missing_ok: return False if there is no such file, as at the
    first start of a program.

    They are not, with a warning that says why, if the file is of another version of PyTorch, of this package or of
    Python, or of another kind of processor, or if it is damaged. Like any file of PyTorch's caches, it holds code: load
    none that you do not trust. Raises `OSError` if the file cannot be read.
    """
    recording.start()
    if missing_ok and not os.path.exists(path):
        return False
    with open(path, "rb") as stream:
        whole = io.BytesIO(stream.read())
    try:
        with zipfile.ZipFile(whole) as file:
            identity, own = dict(json.loads(file.read(_IDENTITY))), _identity()
            others = [key for key in own if identity.get(key) != own[key]]
            if others:
                was, now = identity.get(others[0]), own[others[0]]
                return _refuse(path, f"it is of another {others[0]}: {was}, and this is {now}")
            artifacts = file.read(_ARTIFACTS)
            names = [name for name in file.namelist() if name.startswith(_LIBRARIES)]
            libraries = {_target(name): file.read(name) for name in names}
            traces = [
                name.removesuffix("head")
                for name in file.namelist()
                if name.startswith(_TRACES) and name.endswith("/head")
            ]
            saved = [
                SavedTrace(name.split("/")[2], file.read(f"{name}head"), file.read(f"{name}body")) for name in traces
            ]
    except _DAMAGED as error:
        return _refuse(path, f"it is damaged, or no file of `fxpasses.save_caches` ({error})")
    try:
        for target, content in libraries.items():
            _write(target, content)
    except OSError as error:
        return _refuse(path, f"PyTorch's caches cannot be written to ({error})")
    if artifacts and torch.compiler.load_cache_artifacts(artifacts) is None:
        return _refuse(path, "PyTorch does not accept it")
    restoring.load(saved)
    return True


_DAMAGED = (  # what zipfile and json raise for a file that is none of theirs
    zipfile.BadZipFile, zlib.error,
    EOFError, KeyError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


def _refuse(path: str | os.PathLike[str], why: str) -> bool:
    warnings.warn(f"fxpasses: {os.fspath(path)} is not used: {why}. The program is compiled anew.", stacklevel=3)
    return False


def _identity() -> dict[str, Any]:
    return {
        "version of torch": torch.__version__,
        "version of fxpasses": code_digest()[:16],
        "version of Python": platform.python_version(),
        "system": " ".join([platform.system(), platform.machine(), *platform.libc_ver()]),
        "processor": _processor(),
    }


def _processor() -> str:
    """The model, and a digest of its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    fields = dict[str, str]()
    for line in lines:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())  # of the first processor
    flags = fields.get("flags", fields.get("Features", ""))
    digest = hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:8]
    return f"{fields.get('model name', platform.machine())} ({digest})"


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(os.path.realpath(cache_dir()))


def _libraries() -> Iterator[Path]:
    """The shared libraries in Inductor's cache that this process has loaded or tests vector instructions by."""
    folder = str(_folder()) + os.sep
    found = set[str]()
    with contained("finding the libraries of C++ kernels", "They are compiled again where the file is loaded."):
        maps = Path("/proc/self/maps")
        mapped = [line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()] if maps.exists() else []
        found = {name for name in mapped if name.startswith(folder) and name.endswith(".so")}
        found |= {name for name in _vector_tests() if os.path.exists(name)}
    yield from map(Path, sorted(found))


def _notes() -> Iterator[Path]:
    """The notes on kernels that this process has used, in Inductor's cache."""
    for note in map(Path, map(os.path.realpath, kernel_libraries.notes())):
        if note.is_relative_to(_folder()) and note.exists():
            yield note


def _vector_tests() -> Iterator[str]:
    """Inductor compiles a small program for each set of instructions, and for extensions of some (AVX-512, AMX)."""
    from torch._inductor import codecache, cpu_vec_isa

    known = cpu_vec_isa.supported_vec_isa_list
    for isa in known:
        named = (getattr(isa, name) for name in dir(isa) if name.endswith("_code"))
        for code in {code for code in named if isinstance(code, str)}:
            for extension in _EXTENSIONS:
                fingerprint = cpu_vec_isa._get_isa_dry_compile_fingerprint(isa._arch_flags + extension)
                key = codecache.get_hash(code.strip(), fingerprint)
                yield os.path.realpath(codecache.get_path(key, "so")[2])


def _target(name: str) -> Path:
    """Where a library goes. Raises `ValueError` for a place outside of Inductor's cache."""
    target = _folder() / name.removeprefix(_LIBRARIES)
    if ".." in target.parts or not target.is_relative_to(_folder()):
        raise ValueError(f"it names {name}")
    return target


def _write(path: Path, content: bytes) -> None:
    """Another process may load the file at any time, or write the same."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path, 0o777) as stream:
        stream.write(content)


@contextlib.contextmanager
def _replacing(path: Path, mode: int) -> Iterator[IO[bytes]]:
    """A new file, which is at `path` once the block has ended without an error. mode: before the umask."""
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
        os.chmod(part, mode & ~_umask())
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
