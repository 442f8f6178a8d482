"""Dynamo's cache of a frame: its compiled graphs, each with the guards under which it is valid.

Private names, checked on torch 2.11, 2.13 and 2.15: `eval_frame._debug_get_cache_entry_list`, whose entries have a
`compile_id`, a `backend` and a `guard_manager` with its `extra_state`; `eval_frame.reset_code`;
`DeletedGuardManagerWrapper`; and `eval_frame._stance`, what `torch.compiler.set_stance` has set.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from types import CodeType

import torch


def running() -> str:
    """The identity, within its frame's cache, of the graph that is being compiled; "" if it is not known."""
    return str(torch._guards.CompileContext.current_compile_id() or "")


def may_not_recompile() -> bool:
    """Whether the program forbids Dynamo to compile any more."""
    stance = getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", "default")
    return bool(torch._dynamo.config.error_on_recompile) or stance != "default"


def has_others(code: CodeType) -> bool:
    """Whether another backend has compiled graphs of a frame."""
    from fxpasses.dynamo.retracing import is_fastpack

    found = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)
    return not all(is_fastpack(entry.backend) for entry in found)


def forget(code: CodeType, entries: AbstractSet[str]) -> None:
    """Have no call of a frame use these graphs any more; a call that is running one goes on."""
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    from fxpasses.dynamo.retracing import is_fastpack

    eval_frame = torch._C._dynamo.eval_frame
    found = eval_frame._debug_get_cache_entry_list(code)
    unwanted = [entry for entry in found if str(entry.compile_id) in entries]
    if len(unwanted) == len(found) or all(is_fastpack(entry.backend) for entry in found):  # they come from caches
        eval_frame.reset_code(code)  # an entry that is only forgotten counts for Dynamo's limit
        return
    for entry in unwanted:
        deleted = DeletedGuardManagerWrapper("fxpasses compiles this graph now, which ran uncompiled at first")
        state = entry.guard_manager.extra_state
        if state is not None:  # None: it was forgotten before
            state.invalidate(entry, deleted)
