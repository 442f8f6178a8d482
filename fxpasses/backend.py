"""The `torch.compile` backend: rewrite the captured graph, compile it, and run the prologue once per batch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch.fx import GraphModule

from fxpasses import inspect
from fxpasses.capture import breaks
from fxpasses.graph.provenance import input_sources
from fxpasses.lowering import lower
from fxpasses.options import Options
from fxpasses.passes.hoist_metadata import HoistMetadata
from fxpasses.pipeline import Pass, Result, run_passes
from fxpasses.runtime.prologue import Prologue, with_prologue

log = logging.getLogger(__name__)

PASSES: Mapping[str, Callable[[], Pass]] = {"hoist_metadata": HoistMetadata}


def fastpack_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured: `torch.compile(model, backend=fastpack_backend)` or `backend="fastpack"`.

    `mode` is one of `torch.compile`'s; `options` are those of `fxpasses.options.Options` under the prefix `fastpack.`,
    and Inductor's. Raises `ValueError` for options that do not exist or have a wrong value. What fails here otherwise
    does not stop the program: the graph runs as it was captured, with one warning.
    """
    settings = Options.parse(options, mode)
    result = run_passes([PASSES[name]() for name in settings.passes], gm, example_inputs, settings)
    inspect.note_graph(gm, result.reports)
    return _compile(result, gm, example_inputs, settings, mode)


fastpack_backend._is_fastpack = True  # type: ignore[attr-defined]  # how capture/ knows for whom Dynamo traces


def _compile(
    result: Result, gm: GraphModule, example_inputs: Sequence[Any], settings: Options, mode: str | None
) -> Callable[..., Any]:
    try:
        if result.program is None:
            return lower(result.gm, result.example_inputs, settings, mode, salt="")
        prologue = Prologue(result.program, input_sources(gm))
        main = lower(result.gm, result.example_inputs, settings, mode, salt=prologue.key)
        return with_prologue(main, prologue)
    except (RestartAnalysis, SkipFrame):
        raise  # Dynamo's own way of asking for another trace
    except Exception as error:
        if settings.strict:
            raise
        log.debug("lowering failed", exc_info=error)
        warnings.warn(
            f'fxpasses: compiling with "{settings.lowering}" failed ({type(error).__name__}: {error}). '
            "The graph runs uncompiled, as it was captured.",
            stacklevel=2,
        )
        return gm.forward


breaks.install()
