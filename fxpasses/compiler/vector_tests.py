"""Has Inductor test only the set of vector instructions that it will use.

To find out for which instructions it can compile, Inductor builds a small C++ program for each set that the processor
has (AVX2, AVX-512, ...) and takes the largest set whose program builds and loads. Each takes the compiler a second, in
every new cache. The sets are in the order of preference, so those after the first that passes need no test.

If the user has asked for a set (`ATEN_CPU_CAPABILITY`, `cpp.simdlen`), all are tested, as the choice may fall on any.

Private names, checked on torch 2.11, 2.13 and 2.15: of `torch._inductor.cpu_vec_isa`, `valid_vec_isa_list`, which
`pick_vec_isa` calls, `supported_vec_isa_list` and `x86_isa_checker`; and `config.cpp.simdlen`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

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
        return _first_that_passes() or test_all()

    return test_until_one_passes


@functools.cache
def _first_that_passes() -> list[Any]:
    """A list of the first set of x86 instructions whose program builds, if any."""
    tests = _tests()
    of_processor = tests.x86_isa_checker()
    known = (isa for isa in tests.supported_vec_isa_list if set(str(isa).split()) <= set(of_processor))
    return next(([isa] for isa in known if isa), [])


testing_one = Patch("testing vector instructions", _tests, valid_vec_isa_list=_until_one_passes)
