"""Runs a program in what is a new process for Dynamo, from the traces that an earlier run of it has left."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo import pgo
from torch._dynamo.symbolic_convert import InstructionTranslator

from fxpasses.restart import recording, restoring
from fxpasses.restart.saved_trace import SavedTrace
from tests.support import compiled, results


def forget() -> None:
    """What another process would not have."""
    torch._dynamo.reset()
    pgo.reset_code_state()
    restoring._loaded.clear()
    recording._saved.clear()
    recording._refusals.clear()


def traces_of(
    program: Any, batches: Sequence[Sequence[Any]], lowering: str = "eager", **options: Any
) -> list[SavedTrace]:
    """The traces that `program` leaves."""
    forget()
    recording.start()
    run = compiled(copy.deepcopy(program), lowering, **options)
    for batch in batches:
        results(run, batch)
    assert not recording.refusals(), recording.refusals()
    return recording.saved()


@contextmanager
def counting() -> Iterator[list[str]]:
    """The frames that Dynamo traces inside, by their functions' names."""
    found: list[str] = []
    begin: Callable[..., None] = InstructionTranslator.__init__

    def counted(self: Any, instructions: Any, code: Any, *args: Any, **kwargs: Any) -> None:
        found.append(code.co_name)
        begin(self, instructions, code, *args, **kwargs)

    with mock.patch.object(InstructionTranslator, "__init__", counted):  # it is not on the stack while one is traced
        yield found


def traced_from(
    traces: Sequence[SavedTrace],
    program: Any,
    batches: Sequence[Sequence[Any]],
    lowering: str = "eager",
    tolerance: float = 0.0,
    **options: Any,
) -> list[str]:
    """Compare eager mode with `program`, compiled from traces, on every batch; returns what was traced nevertheless."""
    forget()
    restoring.load(traces)
    eager, run = copy.deepcopy(program), compiled(program, lowering, **options)
    with counting() as found:
        for batch in batches:
            expected, actual = results(eager, batch), results(run, batch)
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    return found
