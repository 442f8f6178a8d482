"""The process of one architecture: sends a result per arrangement and contender. `tests.zoo.run` starts it.

`ZOO_LOG=file` has what the models print, with the tracebacks of errors.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.zoo import media, tiny
from tests.zoo.architectures import Architecture
from tests.zoo.arrangements import Arrangement, arrangements
from tests.zoo.measuring import Numbers, first_line, measure, warnings_of_ours

CONTENDERS = ("eager", "stock", "ours")


def runs(architecture: Architecture, every: bool, contenders: Sequence[str] = CONTENDERS) -> Iterator[dict[str, Any]]:
    """A result per arrangement and contender, or one without either where the model cannot be built."""
    try:
        model = tiny.model(architecture)
    except Exception as error:
        yield {"error": first_line(error)}
        return
    todo = list(arrangements(architecture.task, model, tiny.has_experts(model), every))
    prepared: dict[Arrangement, tuple[Any, list[Any], list[Numbers]]] = {}
    for contender in contenders:
        for arrangement in todo:
            result: dict[str, Any] = {"arrangement": arrangement.key, "contender": contender}
            try:
                if contender == "eager":
                    prepared[arrangement] = prepare(architecture, arrangement)
                if arrangement not in prepared:
                    continue  # eager mode failed, and said so
                model, inputs, expected = prepared[arrangement]
                with warnings_of_ours() as texts:
                    result |= measure(model, contender, inputs, expected)
                if texts and contender == "ours":
                    result["warnings"] = texts[:3]
            except Exception as error:
                result["error"] = first_line(error)
                if contender == "eager":
                    prepared.pop(arrangement, None)
                traceback.print_exc()
            yield result


def prepare(architecture: Architecture, arrangement: Arrangement) -> tuple[Any, list[Any], list[Numbers]]:
    """The model, its batches, and a list that is to have eager mode's numbers."""
    model = tiny.model(architecture, arrangement.experts)
    if arrangement.checkpoints:
        model.gradient_checkpointing_enable()
    return model, [media.batch(architecture.task, model, arrangement.layout, number) for number in (0, 1)], []


def serve(results: Connection, architecture: Architecture, every: bool, contenders: Sequence[str]) -> None:
    """Send the results one by one, and None after the last; what libraries print goes to where the log goes."""
    log = os.open(os.environ.get("ZOO_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    for result in runs(architecture, every, contenders):
        results.send(result)
    results.send(None)
