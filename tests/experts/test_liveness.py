"""Which variables are read later, on Python's own bytecode and on instructions written by hand."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._dynamo.bytecode_transformation import cleaned_instructions

from fxpasses.experts.capture.liveness import follow, live_at

pytestmark = pytest.mark.all_cases


def loop_temporary(xs: Any) -> Any:
    total = 0
    for x in xs:
        y = x + 1  # here
        total = total + y
    return total


def written_in_both_branches(a: Any, b: Any) -> Any:
    c = a
    if b:  # here
        c = 1
    else:
        c = 2
    return c


def written_in_one_branch(a: Any, b: Any) -> Any:
    c = a
    if b:  # here
        c = 1
    return c


def read_in_the_next_round(xs: Any, step: int) -> Any:
    done = None
    while xs:
        xs = xs[step:]
        done = xs  # here
    return done


def after_the_return(a: Any, b: Any) -> Any:
    if a:
        return a  # here
    return b


def read_by_a_closure(a: Any, b: Any) -> Any:
    def inner() -> Any:
        return a

    b = inner  # here
    return b


def read_by_a_handler(a: Any, b: Any) -> Any:
    try:
        a = b.first  # here
    except AttributeError:
        return a
    return b


def without_gradients(xs: Any) -> Any:
    for x in xs:
        x = x + 1  # here
        with torch.no_grad():
            y = x.first
        x.append(y)


def suppressing(xs: Any) -> Any:
    for x in xs:
        x = x + 1  # here
        with contextlib.suppress(AttributeError):
            y = x.first
        x.append(y)


def suppressing_around(xs: Any) -> Any:
    for x in xs:
        x = x + 1  # here
        with contextlib.suppress(AttributeError), torch.no_grad():
            y = x.first
        x.append(y)


def suppressing_inside(xs: Any) -> Any:
    for x in xs:
        x = x + 1  # here
        with torch.no_grad(), contextlib.suppress(AttributeError):
            y = x.first
        x.append(y)


def caught(xs: Any) -> Any:
    y = None
    for x in xs:
        try:
            x = x + 1  # here
            with torch.no_grad():
                y = x.first
        except AttributeError:
            x.append(y)


def deleted(a: Any, b: Any) -> Any:
    b = 1  # here
    del a
    return b


LIVE: list[tuple[Callable[..., Any], set[str]]] = [
    (loop_temporary, {"x", "total"}),
    (written_in_both_branches, {"b"}),
    (written_in_one_branch, {"b", "c"}),
    (read_in_the_next_round, {"xs", "step"}),
    (after_the_return, {"a"}),
    (read_by_a_closure, {"inner"}),
    (read_by_a_handler, {"a", "b"}),  # the write may not happen
    (without_gradients, {"x"}),
    (suppressing, {"x", "y"}),
    (suppressing_around, {"x", "y"}),
    (suppressing_inside, {"x", "y"}),
    (caught, {"x", "y"}),
    (deleted, {"a"}),  # anything but a plain store counts as a read
]


@pytest.mark.parametrize(("function", "names"), LIVE, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_live(function: Callable[..., Any], names: set[str]) -> None:
    lines, first = inspect.getsourcelines(function)
    (line,) = (first + number for number, text in enumerate(lines) if text.rstrip().endswith("# here"))
    instructions = cleaned_instructions(function.__code__)
    start = next(place for place, instruction in enumerate(instructions) if instruction.starts_line == line)
    assert live_at(instructions, start, function.__globals__) == names


@dataclass(eq=False)
class Instruction:
    opname: str
    target: Instruction | None = None


def test_the_interpreter_is_followed_through_jumps_and_instructions_that_do_nothing() -> None:
    end = Instruction("RETURN_VALUE")
    second = Instruction("JUMP_FORWARD", end)
    code = [Instruction("NOP"), Instruction("JUMP_FORWARD", second), Instruction("LOAD_FAST"), second, end]
    assert [follow(code, place) for place in range(5)] == [4, 4, 2, 4, 4]


def test_a_jump_that_depends_on_something_is_not_followed() -> None:
    end = Instruction("RETURN_VALUE")
    assert follow([Instruction("POP_JUMP_IF_FALSE", end), Instruction("LOAD_FAST"), end], 0) == 0


def test_a_jump_to_itself_is_followed_once() -> None:
    forever = Instruction("JUMP_BACKWARD")
    forever.target = forever
    assert follow([forever], 0) == 0
