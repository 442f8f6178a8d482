"""transformers' `generate`, kept apart from training: it compiles nothing, and uses up none of a frame's graphs.

A model that generates in its training loop (GRPO, RLOO) has one frame for four programs: prefill, decoding, the
log-probabilities without gradient, and training. Each is compiled once for its first sizes and once for any sizes.
Dynamo's limit of 8 graphs per frame is reached in the third step, and from then on the frame, training included, runs
uncompiled. Here the calls that come from `generate` run as in eager mode while the model is in training mode. Otherwise
(a model that generates between two epochs, or only generates) they are compiled as long as the frame has fewer than
4 graphs. The cost: generation is no faster than in eager mode, and each call, one per token, takes 0.2 to 0.3 ms more
of the host's time, in which Dynamo finds that no graph fits (measured with torch 2.13, one core).
`options={"fastpack.generation": "compiled"}` treats generation like any other call.

Before Dynamo looks at its limit, it is told to run this one call, and everything inside it, uncompiled.

Private names, checked on torch 2.11, 2.13 and 2.15: `convert_frame.ConvertFrameAssert`, which Dynamo calls for a frame
without a graph that fits, its attributes `_torchdynamo_orig_backend` and `_one_graph`; `types.ConvertFrameReturn`,
`FrameExecStrategy` and `FrameAction`; `eval_frame._debug_get_cache_entry_list`, the graphs of a frame.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from fxpasses.base.containment import contained
from fxpasses.dynamo.dynamo_names import find

_MODULE, _FUNCTION = "transformers.generation.utils", "generate"
_MOST = 4  # half of Dynamo's limit


def install(chosen: Callable[[Any], bool]) -> None:
    """Run `generate` uncompiled for the backends that `chosen` accepts; raises `MissingName` if torch lacks a name."""
    owner = find("torch._dynamo.convert_frame.ConvertFrameAssert")
    types = find("torch._dynamo.types")
    find("torch._dynamo.types.ConvertFrameReturn")
    skip = find("torch._dynamo.types.FrameAction.SKIP")
    graphs_of = find("torch._C._dynamo.eval_frame._debug_get_cache_entry_list")
    original = owner.__call__
    if getattr(original, "_keeps_generation_apart", False):
        return

    @functools.wraps(original)
    def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        is_apart = False
        with contained("keeping generation apart", "It is compiled as any other call."):
            is_apart = (
                not self._one_graph
                and not torch.is_grad_enabled()
                and _MODULE in sys.modules
                and chosen(self._torchdynamo_orig_backend)
                and _is_apart(frame.f_code, graphs_of)
            )
        if is_apart:
            return types.ConvertFrameReturn(
                frame_exec_strategy=types.FrameExecStrategy(skip, skip), apply_to_code=False
            )
        return original(self, frame, *args, **kwargs)

    call._keeps_generation_apart = True  # type: ignore[attr-defined]
    owner.__call__ = call


def _is_apart(code: CodeType, graphs_of: Callable[[CodeType], list[Any]]) -> bool:
    """Whether a frame without a fitting graph is called from `generate` and stays uncompiled."""
    generating = _generating()
    if generating is None:
        return False
    is_training = getattr(generating.f_locals.get("self"), "training", False)
    return is_training or len(graphs_of(code)) >= _MOST


def _generating() -> FrameType | None:
    """The innermost running call of `generate`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == _FUNCTION and frame.f_globals.get("__name__") == _MODULE:
            return frame
        frame = frame.f_back
    return None
