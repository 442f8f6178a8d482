"""Builds the simulated device with the system's compiler: once for each version of its source and of PyTorch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).with_name("simulator")
_FLAGS = ["-std=c++20", "-O1", "-g0", "-fvisibility=hidden", "-DAT_PER_OPERATOR_HEADERS", "-Wno-stringop-overflow"]


def missing() -> str:
    """What building needs and this machine has not, in words; "" where nothing is missing."""
    if not hasattr(os, "memfd_create"):
        return "it needs Linux, for memory that is mapped twice"
    _find_ninja()
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler}; the variable CXX names another)"
    if not cpp_extension.is_ninja_available():
        return "there is no ninja; pip install ninja"
    return ""


def library() -> Path:
    """The library's path, built in 40 seconds on one core if it is not there. Raises `RuntimeError` where that fails.

    It lies where PyTorch keeps such libraries: `~/.cache/torch_extensions`, or `TORCH_EXTENSIONS_DIR`.
    """
    sources = sorted(SOURCES.iterdir())
    told = repr((torch.__version__, _FLAGS, [(source.name, source.read_text()) for source in sources]))
    name = f"fxpasses_sim_{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    _find_ninja()
    # PyTorch's own folder for it, by a private name checked on torch 2.11, 2.13 and 2.15.
    folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    built = folder / f"{name}.so"
    with (folder / "one_builds").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # unlike PyTorch's own lock, it ends with its process
        if not built.exists():
            (folder / "lock").unlink(missing_ok=True)
            compiled = [str(source) for source in sources if source.suffix == ".cpp"]
            cpp_extension.load(name, compiled, extra_cflags=_FLAGS, build_directory=str(folder), is_python_module=False)
    return built


def _find_ninja() -> None:
    """Where it is installed beside the interpreter, which need not be on the path."""
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", "")])
