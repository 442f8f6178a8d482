"""Has Inductor test only the set of vector instructions that it will use.

To find out for which instructions it can compile, Inductor builds a small C++ program for each set that the processor
has (AVX2, AVX-512, ...) and takes the largest set whose program builds and loads. Each takes the compiler a second, in
every new cache. The sets are in the order of preference, so those after the first that passes need no test.

The set that passed is noted beside the caches, for the same processor, compiler and PyTorch: another process with these
caches tests nothing. (Sets with AMX are tested in each, as that prepares the process for it.)

If the user has asked for a set (`ATEN_CPU_CAPABILITY`, `cpp.simdlen`), all are tested, as the choice may fall on any.

Private names, checked on torch 2.11, 2.13 and 2.15: of `torch._inductor.cpu_vec_isa`, `valid_vec_isa_list`, which
`pick_vec_isa` calls, `supported_vec_isa_list`, `x86_isa_checker`, `_get_isa_dry_compile_fingerprint` and the attribute
`_is_avx512_bf16_supported` of a set; `cache_dir`; and `config.cpp.simdlen`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fxpasses.base.containment import contained
from fxpasses.base.patching import Patch


def _tests() -> Any:
    from torch._inductor import cpu_vec_isa

    return cpu_vec_isa


def _until_one_passes(test_all: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    """What to call instead of `valid_vec_isa_list`."""

    @functools.wraps(test_all)
    def test_until_one_passes() -> list[Any]:
        from torch._inductor import config

        asked = config.cpp.simdlen is not None or os.environ.get("ATEN_CPU_CAPABILITY")
        if asked or not sys.platform.startswith("linux"):
            return test_all()
        with contained("testing vector instructions", "All sets are tested."):
            if found := _first_that_passes():
                return found
        return test_all()

    return test_until_one_passes


@functools.cache
def _first_that_passes() -> list[Any]:
    """A list of the first set of x86 instructions whose program builds, if any."""
    tests = _tests()
    of_processor = tests.x86_isa_checker()
    known = [isa for isa in tests.supported_vec_isa_list if set(str(isa).split()) <= set(of_processor)]
    note = None
    with contained("noting which vector instructions passed", "They are tested in each process."):
        note = _note(tests, of_processor)
        if (found := _noted(note, known)) is not None:
            return [found]
    passed = next((isa for isa in known if isa), None)
    if passed is not None and note is not None and "amx" not in str(passed):
        with contained("noting which vector instructions passed", "They are tested in each process."):
            _write(note, {"set": str(passed), _BFLOAT16: bool(getattr(passed, _BFLOAT16, False))})
    return [] if passed is None else [passed]


_BFLOAT16 = "_is_avx512_bf16_supported"


def _note(tests: Any, of_processor: list[str]) -> Path:
    """The file that says which set has passed."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    about = [tests._get_isa_dry_compile_fingerprint(""), torch.__file__, *of_processor]
    digest = hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]
    return Path(cache_dir()) / "fxpasses_vector_tests" / f"{digest}.json"


def _noted(note: Path, known: list[Any]) -> Any:
    """The set that has passed, if it is noted."""
    try:
        said = json.loads(note.read_text())
    except (OSError, ValueError):
        return None
    found = next((isa for isa in known if str(isa) == said.get("set")), None)
    if found is not None and said.get(_BFLOAT16):
        setattr(found, _BFLOAT16, True)
    return found


def _write(note: Path, what: dict[str, Any]) -> None:
    note.parent.mkdir(parents=True, exist_ok=True)
    part = note.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(what))
    os.replace(part, note)


testing_one = Patch("testing vector instructions", _tests, valid_vec_isa_list=_until_one_passes)
