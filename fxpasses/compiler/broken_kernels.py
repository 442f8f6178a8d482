"""Kernels that Inductor built and that cannot be loaded: a process that is stopped while it links one leaves half a
file in the cache, and every later process fails with `ImportError: ... file too short`.

Checked on torch 2.13: Inductor builds a file that is missing, and loads it; `cache_dir` is its private name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_MOST = 8  # files of one graph: on a full disk, a file that breaks again must not be rebuilt for ever


def building_anew(compile_graph: Callable[[], Any]) -> Any:
    """The result of `compile_graph`, which is called again if a file of the cache could not be loaded."""
    for _ in range(_MOST):
        try:
            return compile_graph()
        except Exception as error:
            if not discard(error):
                raise
    return compile_graph()


def discard(error: BaseException) -> bool:
    """Remove the file that could not be loaded, if compiling failed for that reason; returns whether it did."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    for cause in _causes(error):
        path = getattr(cause, "path", None) if isinstance(cause, ImportError) else None
        if path and Path(cache_dir()).resolve() in Path(path).resolve().parents and os.path.exists(path):
            os.remove(path)
            return True
    return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
